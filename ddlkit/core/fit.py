"""Fit costs of messages and selections to measured times, and say how sure that is, and which form to take.

Repeats of a size tell how times scatter, not whether the form follows them: held-out errors hold both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core import units
from ddlkit.core.cost import (
    DRAWS,
    FORMS,
    REPLACED,
    AlphaBeta,
    Chords,
    Form,
    HeldOut,
    MessageCost,
    Piecewise,
    Segments,
    Table,
    checked_form,
    packed,
)
from ddlkit.core.errors import UserError, shown
from ddlkit.core.pieces import METHODS, VARIANTS, Fitter, each, grouped
from ddlkit.core.sparse import SELECTION_FORMS, DensityLog, Log, Scan, SelectionCost, SelectionTimes
from ddlkit.core.workload import Floats

C = TypeVar("C", MessageCost, SelectionCost)

MOST_ROWS, MOST_SIZES = 100_000, 2_000  # 200 resamples of all rows are in memory at once
ENOUGH_REPEATS = 4  # of messages measured more rarely, resamples of a size hardly differ
MOST_LEFT_OUT = 24  # so many sizes, evenly spaced, are held out in turn to see how a form then does
AUTO = "auto"
"""In place of a form's name: whichever of these does best at sizes held out."""
SIMPLE_FIRST = (AlphaBeta.form, Piecewise.form, Segments.form, Chords.form, Table.form)
SELECTIONS_SIMPLE_FIRST = (Log.form, DensityLog.form, Scan.form, SelectionTimes.form)
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
        raise UserError(f"level is {shown(level)}: must be above 0 and below 1, as 0.95")
    tail = round((1 - level) / 2, 12)  # 0.025 of 0.95, to the last bit
    return np.asarray(np.quantile(np.asarray(draws, dtype=float), [tail, 1 - tail], axis=0))


@cache
def _rank(n: int, rare: int) -> int:
    """Return the largest k with P(Binomial(n, 1/2) < k) <= 1 / ``rare``, or 0. Exact, in integers."""
    k, term, below = 0, 1, 1
    while rare * below <= 2**n:
        term = term * (n - k) // (k + 1)
        k, below = k + 1, below + term
    return k


def median_interval(samples: Sequence[float] | Floats, level: float = LEVEL) -> tuple[float, float]:
    """Return the order statistics that hold the median at least so often, by tossed coins."""
    k, ordered = _rank(len(samples), round(2 / (1 - level))), np.sort(samples)
    return (float(ordered[k - 1]), float(ordered[-k])) if k else (-np.inf, np.inf)


# -- the fit -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fit(Generic[C]):
    """A cost, and how far to trust it.

    draws : B costs, fitted to bootstrap resamples of the repeats at each point, or off as ``held_out`` says
    at, seconds : rows fitted on, (n,) each: (bytes,) of messages, (elements, density) of selections
    form : as it was given, or chosen, as "piecewise:45KB"; why : of a form chosen by its errors
    held_out : errors at sizes held out of it, of messages with fewer than ENOUGH_REPEATS a size
    held_out_error : median size of the relative error of medians there; None: not wanted
    """

    cost: C
    draws: tuple[C, ...]
    at: tuple[Floats, ...]
    seconds: Floats
    form: str
    held_out: HeldOut | None = None
    held_out_error: float | None = None
    why: str = ""

    @property
    def bytes(self) -> Floats:
        """Return (n,) sizes of the messages, or elements of the selections, that it was fitted on."""
        return self.at[0]

    @property
    def relative_residuals(self) -> Floats:
        """Return (n,) (fitted - measured) / measured."""
        return np.asarray(self.cost(*self.at) / self.seconds - 1)

    def interval(self, *at: ArrayLike, level: float = LEVEL) -> tuple[Floats, Floats]:
        """Return (lower, upper) of the fitted time ``at`` bytes, or elements and density."""
        if not self.draws:
            more = "give it draws, and a size more than its form needs"
            raise UserError(f"this fit has no interval: {more}")
        columns = [np.asarray(column, float) for column in at]
        lower_s, upper_s = interval([draw(*columns) for draw in self.draws], level)
        return lower_s, upper_s

    def to_dict(self) -> dict[str, Any]:
        """Return the cost's JSON with a summary of the fit and its draws, for ``costs_from_dict``."""
        off = np.abs(self.relative_residuals)
        summary: dict[str, Any] = {
            "form": self.form,
            "rows": len(self.seconds),
            "median_abs_relative_error": float(np.median(off)),
            "max_abs_relative_error": float(np.max(off)),
        }
        if len(self.at) == 1:
            edges = float(self.bytes.min()), float(self.bytes.max())
            summary["from_bytes"], summary["to_bytes"] = edges
        if self.why:
            summary["why"] = self.why
        if self.held_out_error is not None:
            summary["median_abs_held_out_error"] = self.held_out_error
        if self.held_out:
            summary["held_out"] = {"draws": len(self.draws), **self.held_out.to_dict()}
        elif self.draws:
            messages = len(self.at) == 1
            summary["draws"] = packed(self.draws) if messages else [d.to_dict() for d in self.draws]
        return {**self.cost.to_dict(), "fit": summary}


def fit(form: str, *rows: ArrayLike, draws: int = DRAWS, **use: Any) -> Fit[Any]:
    """Fit ``form`` to raw samples (repeats allowed) of messages or of selections.

    form : AUTO for the best, one of (SELECTIONS_)SIMPLE_FIRST, or as "piecewise:45KB", "alpha_beta:ends"
    rows : bytes, seconds of messages, or elements, density, seconds of selections, (n,) each
    use : what the cost holds for, as of `MessageCost` or `SelectionCost`

    >>> line = fit("alpha_beta", [0.5e6, 1e6, 2e6], [0.75, 1.0, 1.5])
    >>> round(line.cost.alpha_s, 6), round(line.cost.beta_s_per_byte * 1e6, 6)
    (0.5, 0.5)
    """
    *at, times = _checked(rows)
    why, held, messages = "", None, len(rows) == 2
    if form == AUTO:
        every = unseen_by_form(SIMPLE_FIRST if messages else SELECTIONS_SIMPLE_FIRST, *at, times)
        form, why = chosen_because(every, AlphaBeta.form if messages else Scan.form)
        held = every.get(form)
    kind, fitter, least = _method(form, len(rows))
    distinct, repeats = np.unique(at[0], return_counts=True)
    if distinct.size < least:
        raise UserError(f"{form}: a fit needs at least {least} distinct sizes, got {distinct.size}")
    cost = kind(**fitter(*at, times), **use)
    held_out, costs = None, tuple[Any, ...]()
    if draws and messages and np.median(repeats) < ENOUGH_REPEATS:
        held = held or unseen(form, at[0], times)
        held_out = _held_out(form, at[0], times, held)
        costs = held_out.draws(cost, draws) if held_out else ()
    elif draws:
        again = _resampled(kind, fitter, at, times, draws)
        costs = tuple(kind(**values, **use) for values in again)
    error = held.error() if held and held.sizes.size else None
    return Fit(cost, costs, tuple(at), times, form, held_out, error, why)


def _method(form: str, columns: int) -> tuple[Callable[..., Any], Fitter, int]:
    """Return the class of a form's costs, how it is fitted, and the least number of distinct sizes."""
    forms: Mapping[str, type[Form]] = FORMS if columns == 2 else SELECTION_FORMS
    name, colon, text = form.partition(":")
    name = form if form in REPLACED else name
    checked_form(name, (*(SIMPLE_FIRST if columns == 2 else SELECTIONS_SIMPLE_FIRST), AUTO))
    fitter, least = METHODS[forms[name]]
    if colon:
        if forms[name] not in VARIANTS or not text:
            raise UserError(f"cost form {form!r}: write {name}, nothing behind it")
        fitter = VARIANTS[forms[name]](text)
    return forms[name], fitter, least


def _checked(given: Sequence[ArrayLike]) -> list[Floats]:
    """Return columns, times last, sorted by those before the times."""
    columns = [np.asarray(values, dtype=float).ravel() for values in given]
    named = [("size", "sizes"), ("density", "densities")][: len(columns) - 1]
    for (name, many), column in zip((*named, ("time", "times")), columns, strict=True):
        if column.shape != columns[-1].shape:
            times = f"{columns[-1].size} times: give one time a {name}"
            raise UserError(f"{column.size} {many} but {times}")
        if column.size > MOST_ROWS or np.unique(column).size > MOST_SIZES and name == "size":
            most = f"at most {MOST_ROWS} rows of {MOST_SIZES} sizes"
            raise UserError(f"{column.size} {many}: a fit takes {most}: leave some out")
        wrong = np.flatnonzero(~((column >= units.LEAST) & (column <= units.MOST)))
        if wrong.size:
            right = f"must be finite and above zero, from {units.LEAST:g} to {units.MOST:g}"
            raise UserError(f"row {wrong[0]}: {name} is {column[wrong[0]]:g}: {right}")
        if name == "density" and np.any(column > 1):
            raise UserError(f"density is {column.max():g}: must be at most 1")
    order = np.lexsort(columns[-2::-1])
    return [column[order] for column in columns]


def _resampled(
    kind: Callable[..., Any], fitter: Fitter, at: Sequence[Floats], times: Floats, draws: int
) -> Iterable[dict[str, Any]]:
    """Yield parameters fitted to bootstrap samples, drawn with replacement at each point: none is lost."""
    rng = np.random.default_rng(0)
    _, starts, counts = np.unique(np.stack(at), axis=1, return_index=True, return_counts=True)
    first, count = np.repeat(starts, counts), np.repeat(counts, counts)
    drawn = [first + rng.integers(0, count) for _ in range(draws)]
    if kind not in (Table, Chords):
        yield from (fitter(*at, times[rows]) for rows in drawn)
        return
    sizes, starts = np.unique(at[0], return_index=True)  # of a table all draws at once
    groups = np.split(times[np.stack(drawn)], starts[1:], axis=1)
    medians = np.column_stack([np.median(group, axis=1) for group in groups])
    yield from ({"bytes": sizes, "seconds": row} for row in medians)


# -- which form, by sizes held out -------------------------------------------------------------


class Unseen(NamedTuple):
    """What a form says of (k,) sizes (and densities) held out of its fit one by one, and measured medians."""

    at: tuple[Floats, ...]
    predicted_s: Floats
    median_s: Floats

    @property
    def sizes(self) -> Floats:
        """Return (k,) sizes that were held out."""
        return self.at[0]

    def errors(self) -> Floats:
        """Return (k,) errors, signed, relative."""
        return np.asarray(self.predicted_s / self.median_s - 1)

    def error(self) -> float:
        """Return the median of their sizes."""
        return float(np.median(np.abs(self.errors())))


def unseen(form: str, *rows: ArrayLike) -> Unseen:
    """Return what a form says of inner sizes, but those that it needs; at the ends it would extrapolate."""
    columns = _checked(rows)
    points, groups = grouped(np.column_stack(columns[:-1]), columns[-1])
    simplest = AlphaBeta.form if len(columns) == 2 else Scan.form
    least = _method(simplest if form == AUTO else form, len(columns))[-1]
    distinct = np.unique(columns[0])
    inner = distinct[1:-1] if distinct.size > max(least, 2) else distinct[:0]
    some = np.linspace(0, inner.size - 1, min(inner.size, MOST_LEFT_OUT)).round().astype(int)
    held, predicted_s = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for size in inner[some].tolist():
        kept, of_size = columns[0] != size, np.flatnonzero(points[:, 0] == size)
        try:
            cost = fit(form, *(column[kept] for column in columns), draws=0).cost
        except UserError:  # the form needs this size
            continue
        held.append(of_size)
        predicted_s.append(cost(*points[of_size].T))
    which = np.concatenate(held)
    medians = each(np.median, groups)[which]
    return Unseen(tuple(points[which].T), np.concatenate(predicted_s), medians)


def held_out_errors(form: str, *rows: ArrayLike) -> tuple[Floats, ...]:
    """Return (k,) sizes (and densities) of `unseen`, and signed relative errors of the medians there."""
    held_out = unseen(form, *rows)
    return *held_out.at, held_out.errors()


def unseen_by_form(forms: Sequence[str], *rows: ArrayLike) -> dict[str, Unseen]:
    """Return what forms say of inner sizes of rows, each held out; without forms that need every size."""
    every = {form: unseen(form, *rows) for form in forms}
    return {form: held for form, held in every.items() if held.sizes.size}


def chosen_because(every: Mapping[str, Unseen], otherwise: str = AlphaBeta.form) -> tuple[str, str]:
    """Return what AUTO takes of forms, the simplest first, and why; ``otherwise`` where sizes are too few."""
    if otherwise not in every:
        return otherwise, "too few sizes to leave one out and compare forms"
    errors = {form: held.error() for form, held in every.items()}
    counted = {f: e * (COUNTS if f in THROUGH_ALL else 1.0) for f, e in errors.items()}
    as_good = AS_GOOD * min(counted.values()) + NEGLIGIBLE
    chosen = next(form for form, error in counted.items() if error <= as_good)
    others = "".join(f"; {form} {error:.2%}" for form, error in errors.items() if form != chosen)
    why = f"at sizes left out the median is off by {errors[chosen]:.2%} in the median{others}"
    if chosen in THROUGH_ALL:
        why += f" ({' and '.join(THROUGH_ALL)} count {COUNTS:g} times: neighbours will be nearer)"
    return chosen, why


def unseen_errors(
    make: Callable[..., Any], rows: Sequence[Floats], others: Sequence[Floats]
) -> tuple[Floats, ...]:
    """Return points of ``others``, and the relative error at each of a cost made of ``rows`` without it."""
    *at, times = others
    points, groups = grouped(np.column_stack(at), times)
    medians, errors = each(np.median, groups), [np.empty(0)]
    for size in np.unique(at[0]):
        kept, of_size = rows[0] != size, points[:, 0] == size
        cost = make(*(column[kept] for column in rows))
        errors.append(cost(*points[of_size].T) / medians[of_size] - 1)
    return *points.T, np.concatenate(errors)


# -- draws of a cost whose sizes are not repeated ------------------------------------------------


def _held_out(form: str, sizes: Floats, seconds: Floats, held: Unseen) -> HeldOut | None:
    """Return what single times are off by at sizes held out, and FAR beyond; None if it needs every size."""
    if not held.sizes.size:
        return None
    left_out = np.isin(sizes, held.sizes)
    predicted_s = np.interp(sizes[left_out], held.sizes, held.predicted_s)
    inner = _log_errors(predicted_s, seconds[left_out])
    ends = []
    for end, kept in ((sizes[0], sizes >= FAR * sizes[0]), (sizes[-1], sizes <= sizes[-1] / FAR)):
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
    return HeldOut(at_bytes, _near(sizes[left_out], inner, at_bytes), ends[0], ends[1], apart)


def _log_errors(predicted_s: Floats, measured_s: Floats) -> Floats:
    """Return (n,) sizes of the logarithm; costs are given a thousandth of the measured time at least."""
    return np.asarray(np.abs(np.log(measured_s / np.maximum(predicted_s, measured_s / 1000))))


def _near(sizes: Floats, log_errors: Floats, at_bytes: Floats) -> Floats:
    """Return (k,) mean errors that (n,) errors at sizes (n,) let expect near each of ``at_bytes`` (k,)."""
    at, logs = np.log(at_bytes), np.log(np.maximum(log_errors, LEAST_ERROR))
    step = (at[-1] - at[0]) / (at.size - 1)
    weight = np.exp(-NEAR * np.abs(at[:, None] - np.log(sizes)) / step)
    around = np.exp(weight @ logs / weight.sum(axis=1))
    return np.asarray(MEAN * ((1 - ALIKE) * around + ALIKE * np.exp(logs.mean())))
