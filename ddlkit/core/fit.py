"""Fit costs to measured times by size; held-out errors say how sure that is, and which form to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core import units
from ddlkit.core.cost import (
    DRAWS,
    REPLACED,
    AlphaBeta,
    Chords,
    HeldOut,
    MessageCost,
    Samples,
    Table,
    checked_form,
    parameters,
)
from ddlkit.core.errors import UserError, shown
from ddlkit.core.pieces import METHODS, VARIANTS, Fitter
from ddlkit.core.sparse import SelectionCost
from ddlkit.core.workload import Floats

C = TypeVar("C", MessageCost, SelectionCost)

MOST_ROWS, MOST_SIZES = (
    100_000,
    2_000,
)  # 200 resamples of all rows are in memory at once
ENOUGH_REPEATS = (
    4  # of messages measured more rarely, resamples of a size hardly differ
)
MOST_LEFT_OUT = (
    24  # so many sizes, evenly spaced, are held out in turn to see how a form then does
)
AUTO = "auto"
"""In place of a form's name: whichever of these does best at sizes held out."""
SIMPLE_FIRST = tuple(kind.form for kind in METHODS if issubclass(kind, MessageCost))
AS_GOOD, NEGLIGIBLE = 1.1, 1e-6
"""Forms whose error is at most so many times the least, or more by rounding, are as good: simplest first."""
THROUGH_ALL = (Chords.form, Table.form)
"""Forms that only neighbours decide, which are twice as far where a size is held out: the error there is once
what it will be if times scatter, and four times if they bend."""
COUNTS, APART = 0.25, 2.0
"""What AUTO makes of errors of THROUGH_ALL: that times bend, as seven dense tables (`tuned` of rules vidur-*)
and twelve logs do. And the power with which those errors grow with the `gap` around a message."""
FAR = 4.0  # so many times beyond the sizes that it is fitted to a form is tried at either end
NEAR, ALIKE = 2.0, 0.5
"""How fast an error counts less away from its size: e to this power a size further; and how much of what is
expected near a size is expected everywhere. With few errors, neither alone tells enough."""
LEAST_ERROR = 1e-4  # of sizes held out: less is chance
MEAN = float(np.exp(np.euler_gamma))
"""Of an exponential law over its geometric mean, which single large errors hardly move."""
LEVEL = 0.95


def interval(draws: ArrayLike, level: float = LEVEL) -> Floats:
    """Return (2, ...) lower and upper end between which the middle ``level`` of draws (B, ...) lies."""
    if not 0 < level < 1:
        raise UserError(
            f"level is {shown(level)}: must be above 0 and below 1, as 0.95"
        )
    tail = round((1 - level) / 2, 12)  # 0.025 of 0.95, to the last bit
    return np.asarray(
        np.quantile(np.asarray(draws, dtype=float), [tail, 1 - tail], axis=0)
    )


@cache
def _rank(n: int, rare: int) -> int:
    """Return the largest k with P(Binomial(n, 1/2) < k) <= 1 / ``rare``, or 0. Exact, in integers."""
    k, term, below = 0, 1, 1
    while rare * below <= 2**n:
        term = term * (n - k) // (k + 1)
        k, below = k + 1, below + term
    return k


def median_interval(
    samples: Sequence[float] | Floats, level: float = LEVEL
) -> tuple[float, float]:
    """Return the order statistics that hold the median at least so often, by tossed coins."""
    k, ordered = _rank(len(samples), round(2 / (1 - level))), np.sort(samples)
    return (float(ordered[k - 1]), float(ordered[-k])) if k else (-np.inf, np.inf)


# -- the fit -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fit(Generic[C]):
    """A cost, and how far to trust it.

    draws : B costs, fitted to bootstrap resamples of the repeats of each size, or off as ``held_out`` says
    sizes, seconds : rows fitted on, (n,) each: bytes of messages, elements of selections
    form : as it was given, or chosen, as "piecewise:45KB"; why : of a form chosen by its errors
    held_out : errors at sizes held out of it, of messages with fewer than ENOUGH_REPEATS a size
    held_out_error : median size of the relative error of medians there; None: not wanted
    """

    cost: C
    draws: tuple[C, ...]
    sizes: Floats
    seconds: Floats
    form: str
    held_out: HeldOut | None = None
    held_out_error: float | None = None
    why: str = ""

    @property
    def relative_residuals(self) -> Floats:
        """Return (n,) (fitted - measured) / measured."""
        return np.asarray(self.cost(self.sizes) / self.seconds - 1)

    def interval(self, sizes: ArrayLike, level: float = LEVEL) -> tuple[Floats, Floats]:
        """Return (lower, upper) of the fitted time at ``sizes``."""
        if not self.draws:
            more = "give it draws, and a size more than its form needs"
            raise UserError(f"this fit has no interval: {more}")
        at = np.asarray(sizes, float)
        lower_s, upper_s = interval([draw(at) for draw in self.draws], level)
        return lower_s, upper_s

    def to_dict(self) -> dict[str, Any]:
        """Return the cost's JSON with a summary of the fit and its draws, for ``costs_from_dict``."""
        off = np.abs(self.relative_residuals)
        summary: dict[str, Any] = {
            "form": self.form,
            "rows": len(self.seconds),
            "median_abs_relative_error": float(np.median(off)),
            "max_abs_relative_error": float(np.max(off)),
            "from_bytes": float(self.sizes.min()),
            "to_bytes": float(self.sizes.max()),
        }
        if self.why:
            summary["why"] = self.why
        if self.held_out_error is not None:
            summary["median_abs_held_out_error"] = self.held_out_error
        if self.held_out:
            summary["held_out"] = {"draws": len(self.draws), **self.held_out.to_dict()}
        elif self.draws:
            names = [name for name in parameters(type(self.cost)) if name != "bytes"]
            every = [draw.to_dict() for draw in self.draws]
            summary["draws"] = [{name: draw[name] for name in names} for draw in every]
        return {**self.cost.to_dict(), "fit": summary}


def fit(
    form: str,
    sizes: ArrayLike,
    seconds: ArrayLike,
    draws: int = DRAWS,
    *,
    collective: str | None = None,
    workers: int | None = None,
    algorithm: str | None = None,
    samples: Samples | None = None,
    operation: str | None = None,
    device: str | None = None,
) -> Fit[Any]:
    """Fit ``form`` to raw samples, (n,) each, repeats allowed.

    form : AUTO for the best for messages, one of METHODS, or as "piecewise:45KB", "alpha_beta:ends"
    collective, workers, algorithm, samples : what a cost of messages holds for, as of `MessageCost`
    operation, device : what a cost of selections holds for, as of `SelectionCost`

    >>> line = fit("alpha_beta", [0.5e6, 1e6, 2e6], [0.75, 1.0, 1.5])
    >>> round(line.cost.alpha_s, 6), round(line.cost.beta_s_per_byte * 1e6, 6)
    (0.5, 0.5)
    """
    sizes, seconds = _checked(sizes, seconds)
    why, held = "", None
    if form == AUTO:
        every = errors_by_form(SIMPLE_FIRST, sizes, seconds)
        form, why = chosen_because(every)
        held = every.get(form)
    kind, fitter, least = _method(form)
    if collective is not None and issubclass(kind, SelectionCost):
        raise UserError(
            f"cost form {form!r} is of selections: use {', '.join(SIMPLE_FIRST)}"
        )
    distinct, repeats = np.unique(sizes, return_counts=True)
    if distinct.size < least:
        raise UserError(
            f"{form}: a fit needs at least {least} distinct sizes, got {distinct.size}"
        )
    said = {
        "collective": collective,
        "workers": workers,
        "algorithm": algorithm,
        "samples": samples,
        "operation": operation,
        "device": device,
    }
    use = {name: value for name, value in said.items() if value is not None}
    cost = kind(**fitter(sizes, seconds), **use)
    held_out, costs = None, tuple[Any, ...]()
    if draws and isinstance(cost, MessageCost) and np.median(repeats) < ENOUGH_REPEATS:
        held = held or held_out_errors(form, sizes, seconds)
        held_out = _held_out(form, sizes, seconds, held)
        costs = held_out.draws(cost, draws) if held_out else ()
    elif draws:
        again = _resampled(kind, fitter, sizes, seconds, draws)
        costs = tuple(kind(**values, **use) for values in again)
    error = held.median if held and held.sizes.size else None
    return Fit(cost, costs, sizes, seconds, form, held_out, error, why)


def _method(form: str) -> tuple[type[Any], Fitter, int]:
    """Return the class of a form's costs, how it is fitted, and the least number of distinct sizes."""
    kinds = {kind.form: kind for kind in METHODS}
    name, colon, text = form.partition(":")
    if form in REPLACED or name not in kinds:
        checked_form(form if form in REPLACED else name, (*SIMPLE_FIRST, AUTO))
    kind = kinds[name]
    fitter, least = METHODS[kind]
    if colon:
        if kind not in VARIANTS or not text:
            raise UserError(f"cost form {form!r}: write {name}, nothing behind it")
        fitter = VARIANTS[kind](text)
    return kind, fitter, least


def _checked(sizes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    """Return both, (n,), sorted by size."""
    at, times = (np.asarray(values, dtype=float).ravel() for values in (sizes, seconds))
    if at.shape != times.shape:
        raise UserError(f"{at.size} sizes but {times.size} times: give one time a size")
    if at.size > MOST_ROWS or np.unique(at).size > MOST_SIZES:
        most = f"at most {MOST_ROWS} rows of {MOST_SIZES} sizes"
        raise UserError(f"{at.size} sizes: a fit takes {most}: leave some out")
    for name, column in (("size", at), ("time", times)):
        wrong = np.flatnonzero(~((column >= units.LEAST) & (column <= units.MOST)))
        if wrong.size:
            right = (
                f"must be finite and above zero, from {units.LEAST:g} to {units.MOST:g}"
            )
            raise UserError(f"row {wrong[0]}: {name} is {column[wrong[0]]:g}: {right}")
    order = np.argsort(at, kind="stable")
    return at[order], times[order]


def _resampled(
    kind: Callable[..., Any], fitter: Fitter, sizes: Floats, seconds: Floats, draws: int
) -> Iterator[dict[str, Any]]:
    """Yield parameters fitted to bootstrap samples, drawn with replacement at each size: none is lost."""
    rng = np.random.default_rng(0)
    distinct, starts, counts = np.unique(sizes, return_index=True, return_counts=True)
    first, count = np.repeat(starts, counts), np.repeat(counts, counts)
    drawn = [first + rng.integers(0, count) for _ in range(draws)]
    if kind not in (Table, Chords):
        yield from (fitter(sizes, seconds[rows]) for rows in drawn)
        return
    groups = np.split(
        seconds[np.stack(drawn)], starts[1:], axis=1
    )  # of a table all draws at once
    medians = np.column_stack([np.median(group, axis=1) for group in groups])
    yield from ({"bytes": distinct, "seconds": row} for row in medians)


# -- which form, by sizes held out -------------------------------------------------------------


class HeldOutErrors(NamedTuple):
    """Of (k,) sizes held out of a fit one by one: signed relative errors of medians, and what it predicts."""

    sizes: Floats
    errors: Floats
    predicted_s: Floats

    @property
    def median(self) -> float:
        """Return the median of the sizes of the errors."""
        return float(np.median(np.abs(self.errors)))


def held_out_errors(form: str, sizes: ArrayLike, seconds: ArrayLike) -> HeldOutErrors:
    """Return what a form says of inner sizes, but those that it needs; at the ends it would extrapolate."""
    at, times = _checked(sizes, seconds)
    least = _method(AlphaBeta.form if form == AUTO else form)[-1]
    distinct = np.unique(at)
    inner = distinct[1:-1] if distinct.size > max(least, 2) else distinct[:0]
    some = (
        np.linspace(0, inner.size - 1, min(inner.size, MOST_LEFT_OUT))
        .round()
        .astype(int)
    )
    rows = []
    for size in inner[some].tolist():
        kept = at != size
        try:
            predicted_s = fit(form, at[kept], times[kept], draws=0).cost(size)
        except UserError:  # the form needs this size
            continue
        rows.append((size, predicted_s / np.median(times[~kept]) - 1, predicted_s))
    return HeldOutErrors(*np.array(rows).reshape(-1, 3).T)


def errors_by_form(
    forms: Sequence[str], sizes: ArrayLike, seconds: ArrayLike
) -> dict[str, HeldOutErrors]:
    """Return `held_out_errors` of forms; without forms that need every size."""
    every = {form: held_out_errors(form, sizes, seconds) for form in forms}
    return {form: held for form, held in every.items() if held.sizes.size}


def chosen_because(every: Mapping[str, HeldOutErrors]) -> tuple[str, str]:
    """Return what AUTO takes of forms, the simplest first, and why; the line where sizes are too few."""
    if AlphaBeta.form not in every:
        return AlphaBeta.form, "too few sizes to leave one out and compare forms"
    errors = {form: held.median for form, held in every.items()}
    counted = {f: e * (COUNTS if f in THROUGH_ALL else 1.0) for f, e in errors.items()}
    as_good = AS_GOOD * min(counted.values()) + NEGLIGIBLE
    chosen = next(form for form, error in counted.items() if error <= as_good)
    others = "".join(
        f"; {form} {error:.2%}" for form, error in errors.items() if form != chosen
    )
    why = f"at sizes left out the median is off by {errors[chosen]:.2%} in the median{others}"
    if chosen in THROUGH_ALL:
        why += f" ({' and '.join(THROUGH_ALL)} count {COUNTS:g} times: neighbours will be nearer)"
    return chosen, why


def unseen_errors(
    make: Callable[..., Any], rows: Sequence[Floats], others: Sequence[Floats]
) -> tuple[Floats, Floats]:
    """Return sizes of ``others``, and the relative error at each of a cost made of ``rows`` without it."""
    sizes, errors = np.unique(others[0]), []
    for size in sizes.tolist():
        cost = make(*(column[rows[0] != size] for column in rows))
        errors.append(cost(size) / np.median(others[1][others[0] == size]) - 1)
    return sizes, np.array(errors)


# -- draws of a cost whose sizes are not repeated ------------------------------------------------


def _held_out(
    form: str, sizes: Floats, seconds: Floats, held: HeldOutErrors
) -> HeldOut | None:
    """Return what single times are off by at sizes held out, and FAR beyond; None if it needs every size."""
    if not held.sizes.size:
        return None
    left_out = np.isin(sizes, held.sizes)
    predicted_s = np.interp(sizes[left_out], held.sizes, held.predicted_s)
    inner = _log_errors(predicted_s, seconds[left_out])
    ends = []
    for end, kept in (
        (sizes[0], sizes >= FAR * sizes[0]),
        (sizes[-1], sizes <= sizes[-1] / FAR),
    ):
        try:
            cost = fit(form, sizes[kept], seconds[kept], draws=0).cost
        except UserError:  # too few are left
            ends.append(float(inner.max()) / math.log(2))
            continue
        off = _log_errors(cost(sizes[sizes == end]), seconds[sizes == end])
        away = np.abs(np.log(sizes[kept] / end)).min()
        ends.append(float(np.median(off) / away))
    apart = APART if form in THROUGH_ALL else 0.0
    where = np.searchsorted(distinct := np.unique(sizes), sizes[left_out])
    inner /= np.log(distinct[where + 1] / distinct[where - 1]) ** apart
    at_bytes = np.unique([sizes[0], *held.sizes, sizes[-1]])
    at, logs = np.log(at_bytes), np.log(np.maximum(inner, LEAST_ERROR))
    step = (at[-1] - at[0]) / (at.size - 1)
    weight = np.exp(-NEAR * np.abs(at[:, None] - np.log(sizes[left_out])) / step)
    around = np.exp(weight @ logs / weight.sum(axis=1))
    near = MEAN * ((1 - ALIKE) * around + ALIKE * np.exp(logs.mean()))
    return HeldOut(at_bytes, near, ends[0], ends[1], apart)


def _log_errors(predicted_s: Floats, measured_s: Floats) -> Floats:
    """Return (n,) sizes of the logarithm; costs are given a thousandth of the measured time at least."""
    return np.asarray(
        np.abs(np.log(measured_s / np.maximum(predicted_s, measured_s / 1000)))
    )
