"""Fit costs of messages and selections to measured times, and say how sure the fit is.

Every form here is linear in its parameters once its breakpoints are chosen, so a fit is a weighted linear
least squares, and breakpoints are found by trying every gap between measured sizes. Weights are 1/t (an
error of 10% counts the same at 1 KiB and at 1 GiB) unless a line is asked for that counts seconds: what
is right for a curve is wrong for a line, which cannot hold small and large messages to 10% at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core import units
from ddlkit.core.cost import (
    FORMS,
    AlphaBeta,
    Chords,
    Curve,
    Form,
    MessageCost,
    Piecewise,
    Segments,
    Stepped,
    Table,
    cost_from_dict,
    parameters,
)
from ddlkit.core.doubt import (
    ENDS,
    LEVEL,
    HeldOut,
    checked_count,
    falling,
    interval,
    packed,
    unpacked,
)
from ddlkit.core.errors import UserError, shown
from ddlkit.core.pieces import (
    apart,
    best_breaks,
    each,
    grouped,
    joined,
    joined_after_log,
    least_squares,
    linear,
    log2,
    straight,
)
from ddlkit.core.sparse import (
    SELECTION_FORMS,
    DensityLog,
    Log,
    Scan,
    SelectionCost,
    SelectionTimes,
)
from ddlkit.core.workload import Floats

C = TypeVar("C", MessageCost, SelectionCost)

MOST_ROWS, MOST_SIZES = 100_000, 2_000
"""Of a fit: some 200 resamples of all rows, and every cut between sizes, are held in memory at once."""
PIECES = 3
"""Linear pieces of a ``segments`` fit; each must hold at least MIN_SIZES_PER_PIECE sizes."""
MIN_SIZES_PER_PIECE = 3
DRAWS = 200
ENOUGH_REPEATS = 4
"""Of messages measured more rarely at most sizes, resamples of a size hardly differ."""
MOST_LEFT_OUT = 24
"""Of so many sizes at most, evenly spaced, each is left out in turn to see how a form then does."""
AUTO = "auto"
"""In place of a form's name: whichever of messages' forms does best at sizes left out."""
JOINED, ONE_JUMP = "joined", "jump"
"""Pieces that join, as in "segments:joined"; all but one, as of a collective that changes its protocol."""
SIMPLE_FIRST = (
    AlphaBeta.form,
    f"{Piecewise.form}:{JOINED}",
    Piecewise.form,
    f"{Segments.form}:{JOINED}",
    f"{Segments.form}:{ONE_JUMP}",
    Segments.form,
    Chords.form,
    Table.form,
    Curve.form,
)
"""Between which AUTO chooses."""
AS_GOOD = 1.1
"""Forms whose error is at most so many times the least are as good: of those the simplest is taken."""
SELECTIONS_SIMPLE_FIRST = (Log.form, DensityLog.form, Scan.form, SelectionTimes.form)
"""Between which AUTO chooses for selections."""
THROUGH_ALL = (Chords.form, Table.form, Curve.form)
"""Forms that only neighbours decide. Where a size is left out these are twice as far as they will be: what
such a form is off by there is once what it will be if times scatter, and four times if they bend."""
COUNTS = 0.25
"""What AUTO makes of errors of THROUGH_ALL: that times bend. Seven dense tables (`tuned` of rules vidur-*,
data/external/rules.yml) and twelve logs, calibrated by twelve sizes, are off by less so than at a half or
more in the mean, none of them by more."""
NEARER = 0.4
"""Power of how far apart, in logarithms, the two sizes around a message lie, with which errors of THROUGH_ALL
grow: none if times scatter, two if they bend. Found as COUNTS was: so the 95% intervals of seven dense tables
hold 95%, by other dozens of sizes too."""
NEGLIGIBLE = 1e-6
"""Errors that differ by less are rounding."""


@dataclass(frozen=True, eq=False)
class Fit(Generic[C]):
    """A cost, and how far to trust it.

    names, values, standard_errors : (k,) parameters; standard errors hold for given breakpoints
    draws : B costs: fitted to bootstrap resamples of the repeats at each point, or, of messages with fewer
        than ENOUGH_REPEATS a size, off by what the form was off at sizes left out of it
    at, seconds : rows fitted on, (n,) each; ``at`` is what the cost is a function of: (bytes,) of a
        message, (elements, density) of a selection
    relative_residuals : (n,) (fitted - measured) / measured
    leverage : (n,) weight of each row on its own fitted value, from 0 to 1
    form : as it was asked for, or chosen, as "segments:joined"
    held_out : those errors, where the draws are made of them
    held_out_error : median size of the relative error of medians at sizes left out; None: not asked for
    why : of a form chosen by its errors: why this one
    """

    cost: C
    names: tuple[str, ...]
    values: Floats
    standard_errors: Floats
    draws: tuple[C, ...]
    at: tuple[Floats, ...]
    seconds: Floats
    relative_residuals: Floats
    leverage: Floats
    form: str
    held_out: HeldOut | None = None
    held_out_error: float | None = None
    why: str = ""

    @property
    def bytes(self) -> Floats:
        """(n,) sizes of the messages, or elements of the selections, that it was fitted on."""
        return self.at[0]

    def interval(self, *at: ArrayLike, level: float = LEVEL) -> tuple[Floats, Floats]:
        """(lower, upper) of the fitted time ``at`` bytes, or elements and density.

        Raises UserError for a fit without draws, which does not say how sure it is.
        """
        if not self.draws:
            raise UserError(
                "this fit has no interval: give it draws, and a size more than its form needs"
            )
        times = np.array(
            [draw(*(np.asarray(column, float) for column in at)) for draw in self.draws]
        )
        lower_s, upper_s = interval(times, level)
        return lower_s, upper_s

    def to_dict(self) -> dict[str, Any]:
        """The cost's JSON with a summary of the fit and its draws, which ``costs_from_dict`` reads back.

        Standard errors of zero, which say that nothing was repeated, are left out.
        """
        errors = zip(self.names, self.standard_errors.tolist(), strict=True)
        summary: dict[str, Any] = {
            "form": self.form,
            "rows": len(self.seconds),
            "median_abs_relative_error": float(np.median(np.abs(self.relative_residuals))),
            "max_abs_relative_error": float(np.max(np.abs(self.relative_residuals))),
            "max_leverage": float(np.max(self.leverage)),
            "standard_errors": {name: error for name, error in errors if error > 0},
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


def costs_from_dict(description: dict[str, Any]) -> tuple[MessageCost, list[MessageCost]]:
    """The cost, and the draws that came with it (none for a cost written by hand)."""
    cost, fitted = cost_from_dict(description), description.get("fit", {})
    if not isinstance(fitted, dict):
        raise UserError(f"the cost's fit is {shown(fitted)}: write what ddlkit fit does, or none")
    if held_out := fitted.get("held_out"):
        known = HeldOut.from_dict(held_out, fitted)
        return cost, [*known.draws(cost, checked_count(held_out.get("draws", DRAWS)))]
    return cost, unpacked(cost, fitted.get("draws", []))


Fitted = tuple[dict[str, Any], tuple[str, ...], Floats, Floats, Floats]
"""cost parameters, names, values, standard errors, leverage"""
Fitter = Callable[..., Fitted]
"""Columns of what the cost is a function of, then seconds, to the fitted parameters."""


def _linear_in_parameters(kind: type[Form]) -> Fitter:
    """Of a form without breakpoints: a column of the design is the form with one parameter 1, others 0."""
    names = parameters(kind)

    def fitter(*columns: Floats) -> Fitted:
        *at, seconds = columns
        units: list[Any] = [
            kind(**dict(zip(names, unit, strict=True))) for unit in np.eye(len(names))
        ]
        design = np.column_stack([unit(*at) for unit in units])
        values, errors, leverage, _ = least_squares(design, seconds)
        return dict(zip(names, values.tolist(), strict=True)), names, values, errors, leverage

    return fitter


def _full_grid(kind: type[Form]) -> Fitter:
    """Of a table: medians at each point, which must make a full grid; errors from the spread of repeats."""

    def fitter(*columns: Floats) -> Fitted:
        *at, seconds = columns
        points, groups, which = grouped(np.column_stack(at[::-1]), seconds)
        axes = [np.unique(column) for column in points.T]
        shape = [axis.size for axis in axes]
        if len(points) != np.prod(shape):
            raise UserError(
                f"{len(points)} points are not the {shape[0]} densities x {shape[1]} sizes of a "
                "table: measure every size at every density"
            )
        medians = each(np.median, groups)
        count = np.array([group.size for group in groups])
        names = tuple(f"seconds[{','.join(f'{x:.15g}' for x in point)}]" for point in points)
        grid = (axis.tolist() for axis in (*axes[::-1], medians.reshape(shape)))
        values = dict(zip(parameters(kind), grid, strict=True))
        return values, names, medians, _median_spread(groups), 1.0 / count[which]

    return fitter


LINES = ("relative", "least_squares", "medians", "ends")
"""Ways to lay a straight line through messages, as in "alpha_beta:ends": by relative error; by least squares
in seconds through every sample, or through the median of every size; through the two ends alone."""


def _line(how: str) -> Fitter:
    """One of LINES, or "1.2e-8": that many seconds a byte are given, and the smallest message adds its time.

    In seconds the largest messages decide, where a line's slope shows; so a start-up below zero may come out:
    then it is zero and the slope alone is fitted. Raises UserError for any other ``how``.
    """
    if how == "relative":
        return _linear_in_parameters(AlphaBeta)
    names = parameters(AlphaBeta)
    slope = 0.0 if how in LINES else _seconds_per_byte(how)

    def fitter(sizes: Floats, seconds: Floats) -> Fitted:
        points, groups, which = grouped(sizes[:, None], seconds)
        grid, count = points[:, 0], np.array([group.size for group in groups])
        medians = each(np.median, groups)
        if how not in LINES:
            share = (which == 0) / count[which]
            spread_s = float(_median_spread(groups[:1])[0])
            known = {names[0]: float(medians[0]), names[1]: slope}
            return known, names[:1], medians[:1], np.array([spread_s]), share
        if how == "least_squares":
            return _no_negative_start(sizes, seconds)
        chosen = np.array([0, -1]) if how == "ends" else np.arange(grid.size)
        known, _, values, errors, weight = _no_negative_start(grid[chosen], medians[chosen])
        shared = np.zeros(grid.size)
        shared[chosen] = weight
        if how == "ends":  # two points leave no residual to tell the error: the repeats do
            low_s, high_s = _median_spread([groups[0], groups[-1]])
            errors = np.array([low_s, np.hypot(low_s, high_s) / (grid[-1] - grid[0])])
        return known, names, values, errors, shared[which] / count[which]

    return fitter


def _seconds_per_byte(text: str) -> float:
    try:
        given = float(text)
    except ValueError:
        given = math.nan
    if not (math.isfinite(given) and given > 0):
        ways = ", ".join(LINES)
        raise UserError(f"cost form alpha_beta:{text}: use {ways}, or seconds per byte as 1.2e-8")
    return given


def _no_negative_start(sizes: Floats, seconds: Floats) -> Fitted:
    """Least squares in seconds; where the start-up would be negative, it is zero."""
    names, unit_s = parameters(AlphaBeta), np.ones_like(seconds)
    values, errors, leverage, _ = least_squares(straight(sizes), seconds, unit_s)
    if values[0] < 0:
        slope, slope_error, leverage, _ = least_squares(sizes[:, None], seconds, unit_s)
        values, errors = np.append(0.0, slope), np.append(0.0, slope_error)
    return dict(zip(names, values.tolist(), strict=True)), names, values, errors, leverage


def _median_spread(groups: Sequence[Floats]) -> Floats:
    """(k,) standard error of each group's median; that of a normal sample spreads 1.2533 times its mean."""

    def spread(times: Floats, axis: int) -> Floats:
        return np.asarray(1.2533 * times.std(axis=axis, ddof=min(1, times.shape[axis] - 1)))

    return each(spread, groups) / np.array([group.size for group in groups]) ** 0.5


def _fit_piecewise(sizes: Floats, seconds: Floats, threshold: str = "") -> Fitted:
    """With the threshold that is given, or else with the one of least loss."""
    _, *names = parameters(Piecewise)
    if threshold == JOINED:
        found = joined_after_log(sizes, seconds, 2)
        straight_s = found.start_s + found.slopes[0] * np.log2(found.knots_bytes[0])
        intercept_s = straight_s - found.slopes[1] * found.knots_bytes[0]
        first = found.slopes[0], found.start_s
        whole = [found.knots_bytes[0], *first, found.slopes[1], intercept_s]
        cost = dict(zip(parameters(Piecewise), map(float, whole), strict=True))
        free = names[1], names[0], names[2]
        return cost, free, found.values, found.errors, found.leverage
    designs = log2, linear
    if threshold:
        threshold_bytes = float(units.parse_bytes(threshold))
        below = int(np.searchsorted(np.unique(sizes), threshold_bytes))
        above = np.unique(sizes).size - below
        if min(below, above) < 2:
            raise UserError(
                f"a threshold of {units.format_bytes(threshold_bytes)} has {below} sizes below and "
                f"{above} above: each piece needs 2"
            )
    else:
        (threshold_bytes,) = best_breaks(designs, sizes, seconds, 2)
    values, errors, leverage = apart(designs, (threshold_bytes,), sizes, seconds)
    known = dict(zip(names, values.tolist(), strict=True))
    return {"threshold_bytes": threshold_bytes, **known}, tuple(names), values, errors, leverage


def _fit_segments(sizes: Floats, seconds: Floats, how: str = "") -> Fitted:
    """As many pieces as the sizes can carry, at most PIECES; they need not join, unless ``how`` says so."""
    pieces = max(1, min(PIECES, np.unique(sizes).size // MIN_SIZES_PER_PIECE))
    if how:
        return _fit_joined(sizes, seconds, pieces, how)
    designs = (straight,) * pieces
    breaks = best_breaks(designs, sizes, seconds, MIN_SIZES_PER_PIECE)
    values, errors, leverage = apart(designs, breaks, sizes, seconds)
    names = tuple(f"{name}[{k}]" for k in range(pieces) for name in ("alpha_s", "beta_s_per_byte"))
    known = {"breaks_bytes": breaks, "alpha_s": values[::2].tolist()}
    return {**known, "beta_s_per_byte": values[1::2].tolist()}, names, values, errors, leverage


def _fit_stepped(sizes: Floats, seconds: Floats, **known: Any) -> Fitted:
    """Software and bytes of what is known of the lab, through the median of every size.

    Where links save, messages up to some size are the processor's, those above the link's.
    """
    units = [Stepped(*unit, **known).terms(sizes) for unit in np.eye(2)]
    points, groups, which = grouped(sizes[:, None], seconds)
    medians, first = each(np.median, groups), np.unique(which, return_index=True)[1]
    software, of_bytes = units[0].software_s[first], units[1].bytes_s[first]
    design, latency_s = np.column_stack([software, of_bytes]), units[0].delay_s[first]
    if not known.get("saves"):
        found = least_squares(design, medians - latency_s, medians)[:3]
        if found[0][0] < 0:  # as good as no software
            slope, error, leverage, _ = least_squares(design[:, 1:], medians - latency_s, medians)
            found = np.append(0.0, slope), np.append(0.0, error), leverage
    else:
        found = min(
            (_two_parts(design, medians, latency_s, cut) for cut in range(1, medians.size)),
            key=lambda one: one[3],
        )[:3]
    values, errors, leverage = found
    names = parameters(Stepped)
    repeats = np.bincount(which)
    estimates = dict(zip(names, np.maximum(values, 0.0).tolist(), strict=True))
    return estimates, names, values, errors, leverage[which] / repeats[which]


def _two_parts(
    design: Floats, seconds: Floats, latency_s: Floats, cut: int
) -> tuple[Floats, Floats, Floats, float]:
    """The first column below the cut, the second above: values, errors, leverage, loss of the longer."""
    net_s = seconds - latency_s
    low = least_squares(design[:cut, :1], net_s[:cut], seconds[:cut])
    high = least_squares(design[cut:, 1:], seconds[cut:])
    values, errors, leverage = (
        np.concatenate([one, other]) for one, other in zip(low[:3], high[:3], strict=True)
    )
    whole_s = np.maximum(design[:, 0] * values[0] + latency_s, design[:, 1] * values[1])
    return values, errors, leverage, float(np.sum((whole_s / seconds - 1) ** 2))


def _fit_joined(sizes: Floats, seconds: Floats, pieces: int, how: str) -> Fitted:
    """Straight pieces that join, or all but one; the joins are fitted too, the errors hold for these."""
    if how not in (JOINED, ONE_JUMP):
        ways = f"nothing behind it, or {JOINED} or {ONE_JUMP}"
        raise UserError(f"cost form segments:{how}: write segments, {ways}")
    found = joined(sizes, seconds, pieces, MIN_SIZES_PER_PIECE, jumps=int(how == ONE_JUMP))
    slopes = [f"beta_s_per_byte[{k}]" for k in range(pieces)]
    jumps = [f"jump_s[{k}]" for k in np.flatnonzero(found.jumps_s).tolist()]
    known = dict(
        zip(
            parameters(Segments),
            (found.knots_bytes.tolist(), found.intercepts_s().tolist(), found.slopes.tolist()),
            strict=True,
        )
    )
    names = ("alpha_s[0]", *slopes, *jumps)
    return known, names, found.values, found.errors, found.leverage


_METHODS: dict[type[Form], tuple[Fitter, int]] = {
    **{kind: (_linear_in_parameters(kind), 3) for kind in (AlphaBeta, DensityLog, Log, Scan)},
    **{kind: (_full_grid(kind), 2) for kind in (Table, Chords, Curve, SelectionTimes)},
    Piecewise: (_fit_piecewise, 5),
    Segments: (_fit_segments, MIN_SIZES_PER_PIECE),
    Stepped: (_fit_stepped, 3),
}
"""How each form is fitted, and from how many distinct sizes at least."""
_VARIANTS: dict[type[Form], Callable[[str], Fitter]] = {
    AlphaBeta: _line,
    Piecewise: lambda text: partial(_fit_piecewise, threshold=text),
    Segments: lambda text: partial(_fit_segments, how=text),
}
"""What may stand behind a form's name, as in "piecewise:45KB", to how it is then fitted."""


def fitted_forms(forms: Mapping[str, type[Form]]) -> tuple[str, ...]:
    """Names of those forms that can be fitted to measured times."""
    return tuple(name for name, kind in forms.items() if kind in _METHODS)


def fit(form: str, *rows: ArrayLike, draws: int = DRAWS, seed: int = 0, **known: Any) -> Fit[Any]:
    """Fit ``form`` to raw samples (repeats allowed) of messages or of selections.

    form : of messages "auto" for the best of all, or "alpha_beta", "piecewise", "segments", "table",
        or "stepped" of known workers and algorithm; "piecewise:45KB" has its threshold
        there, "piecewise" where the loss is least; "alpha_beta:least_squares" and others as of LINES, by
        relative error without; of selections "auto", "density_log", "log", "scan", "table"
    rows : bytes, seconds of messages, or elements, density, seconds of selections, (n,) each
    known : what the cost holds for: collective, workers, algorithm, samples as of `MessageCost`, or
        operation, device as of `SelectionCost`; of "stepped" any of its own

    >>> found = fit("alpha_beta", [0.5e6, 1e6, 2e6], [0.75, 1.0, 1.5])
    >>> round(found.cost.alpha_s, 6), round(found.cost.beta_s_per_byte * 1e6, 6)
    (0.5, 0.5)

    Raises UserError for degenerate data: too few distinct sizes, zero, negative or non-finite entries,
    a density above 1, and a table without a full grid.
    """
    *at, times = _checked(rows)
    why, unseen = "", None
    if form == AUTO and len(rows) == 2:
        form, why, unseen = _best_form(at[0], times)
    elif form == AUTO:
        form, why = _best_selection(*at, times)
    kind, fitter, least = _method(form, len(rows))
    distinct, repeats = np.unique(at[0], return_counts=True)
    if distinct.size < least:
        raise UserError(f"{form}: a fit needs at least {least} distinct sizes, got {distinct.size}")
    if kind is Stepped:  # how a size divides into its terms depends on what it holds for
        of_cost = {name: value for name, value in known.items() if name != "samples"}
        fitter = partial(fitter, **of_cost)
    values, names, estimates, errors, leverage = fitter(*at, times)
    cost = kind(**values, **known)
    held_out = None
    costs: tuple[Any, ...] = ()
    if draws and len(rows) == 2 and np.median(repeats) < ENOUGH_REPEATS:
        unseen = unseen or _unseen(form, at[0], times)
        held_out = _held_out(form, at[0], times, unseen)
        costs = held_out.draws(cost, draws) if held_out else ()
    else:
        drawn = _resamples(at, draws, np.random.default_rng(seed))
        costs = tuple(kind(**one, **known) for one in _refitted(kind, fitter, at, times, drawn))
    residuals = cost(*at) / times - 1
    sure = names, estimates, errors, costs, tuple(at), times, residuals, leverage
    error = unseen.error() if unseen and unseen.sizes.size else None
    return Fit(cost, *sure, form, held_out, error, why)


def _method(form: str, columns: int) -> tuple[Callable[..., Any], Fitter, int]:
    """The class of a form's costs, how it is fitted, and the least number of distinct sizes."""
    forms: Mapping[str, type[Form]] = FORMS if columns == 2 else SELECTION_FORMS
    name, colon, text = form.partition(":")
    if name not in fitted_forms(forms):
        known = [*fitted_forms(forms), AUTO]
        raise UserError(f"unknown cost form {form!r}: use one of {', '.join(known)}")
    fitter, least = _METHODS[forms[name]]
    if colon:
        if forms[name] not in _VARIANTS or not text:
            raise UserError(f"cost form {form!r}: write {name}, nothing behind it")
        fitter = _VARIANTS[forms[name]](text)
    return forms[name], fitter, least


def _best_form(sizes: Floats, seconds: Floats) -> tuple[str, str, Unseen | None]:
    """The form that AUTO takes, why, and what it says of sizes left out."""
    every = unseen_by_form(sizes, seconds)
    chosen, why = chosen_because(every)
    return chosen, why, every.get(chosen)


def _best_selection(*rows: Floats) -> tuple[str, str]:
    """Of selections' forms the one that AUTO takes, by the median error at sizes left out, and why."""
    errors = {form: held_out_errors(form, *rows)[-1] for form in SELECTIONS_SIMPLE_FIRST}
    if not all(found.size for found in errors.values()):
        return Scan.form, "too few sizes to leave one out and compare forms"
    return _because({form: float(np.median(np.abs(found))) for form, found in errors.items()})


def unseen_by_form(
    sizes: ArrayLike, seconds: ArrayLike, forms: Sequence[str] = SIMPLE_FIRST
) -> dict[str, Unseen]:
    """What forms say of inner sizes of rows (n,), each left out; without forms that need every size."""
    rows = _checked((sizes, seconds))
    every = {form: _unseen(form, *rows) for form in forms}
    return {form: one for form, one in every.items() if one.sizes.size}


def chosen_because(every: Mapping[str, Unseen]) -> tuple[str, str]:
    """What AUTO takes of forms, the simplest first, and a sentence of why.

    Where the sizes are too few to leave one out of a line, it is the line.
    """
    if AlphaBeta.form not in every:
        return AlphaBeta.form, "too few sizes to leave one out and compare forms"
    return _because({form: one.error() for form, one in every.items()})


def _because(errors: Mapping[str, float]) -> tuple[str, str]:
    """What AUTO takes by errors at sizes left out, and a sentence of why."""
    chosen = choose_form(errors)
    others = "".join(f"; {form} {error:.2%}" for form, error in errors.items() if form != chosen)
    why = f"at sizes left out the median is off by {errors[chosen]:.2%} in the median{others}"
    if chosen in THROUGH_ALL:
        why += f" ({' and '.join(THROUGH_ALL)} count {COUNTS:g} times: neighbours will be nearer)"
    return chosen, why


def choose_form(errors: Mapping[str, float]) -> str:
    """Of forms, the simplest first, with their errors at sizes left out: what AUTO takes."""
    counted = {f: e * (COUNTS if f in THROUGH_ALL else 1.0) for f, e in errors.items()}
    as_good = AS_GOOD * min(counted.values()) + NEGLIGIBLE
    return next(form for form, error in counted.items() if error <= as_good)


def _checked(given: Sequence[ArrayLike]) -> list[Floats]:
    """Columns, times last, sorted by those before the times."""
    columns = [np.asarray(values, dtype=float).ravel() for values in given]
    named = [("size", "sizes"), ("density", "densities")][: len(columns) - 1]
    for (one, many), column in zip((*named, ("time", "times")), columns, strict=True):
        if column.shape != columns[-1].shape:
            raise UserError(
                f"{column.size} {many} but {columns[-1].size} times: give one time a {one}"
            )
        if column.size > MOST_ROWS or np.unique(column).size > MOST_SIZES and one == "size":
            most = f"at most {MOST_ROWS} rows of {MOST_SIZES} sizes"
            raise UserError(f"{column.size} {many}: a fit takes {most}: leave some out")
        wrong = np.flatnonzero(~((column >= units.LEAST) & (column <= units.MOST)))
        if wrong.size:
            raise UserError(
                f"row {wrong[0]}: {one} is {column[wrong[0]]:g}: must be finite and above zero, from "
                f"{units.LEAST:g} to {units.MOST:g}"
            )
        if one == "density" and np.any(column > 1):
            raise UserError(f"density is {column.max():g}: must be at most 1")
    order = np.lexsort(columns[-2::-1])
    return [column[order] for column in columns]


def _resamples(
    at: Sequence[Floats], draws: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Row numbers of bootstrap samples, drawn with replacement at each point so that none is lost."""
    if not draws:
        return []
    _, starts, counts = np.unique(np.stack(at), axis=1, return_index=True, return_counts=True)
    first, count = np.repeat(starts, counts), np.repeat(counts, counts)
    return [first + rng.integers(0, count) for _ in range(draws)]


def _refitted(
    kind: Callable[..., Any],
    fitter: Fitter,
    at: Sequence[Floats],
    times: Floats,
    drawn: Sequence[NDArray[np.int64]],
) -> Iterable[dict[str, Any]]:
    """Parameters fitted to each of some resamples of rows in order; of a table, to all of them at once."""
    if not drawn or kind not in (Table, Chords, Curve):
        return (fitter(*at, times[rows])[0] for rows in drawn)
    sizes, starts = np.unique(at[0], return_index=True)
    groups = np.split(times[np.stack(drawn)], starts[1:], axis=1)
    medians = np.column_stack([np.median(group, axis=1) for group in groups])
    return (dict(zip(parameters(Table), (sizes, row), strict=True)) for row in medians)


# -- where it was not fitted -------------------------------------------------------------------


def held_out_errors(form: str, *rows: ArrayLike, **known: Any) -> tuple[Floats, ...]:
    """Leave one size out: sizes (and densities), signed relative error of the median fitted without it.

    Only inner sizes are left out, MOST_LEFT_OUT at most: at the ends a fit would have to extrapolate. None
    where the form needs every size there is. known : as for `fit`, of a form that needs it
    """
    if len(rows) == 2 and not known:
        unseen = _unseen(form, *_checked(rows))
        return unseen.sizes, unseen.errors()
    inner = _inner(form, np.asarray(rows[0], float), len(rows))
    return unseen_errors(lambda *kept: fit(form, *kept, draws=0, **known).cost, rows, rows, inner)


def _inner(form: str, sizes: Floats, columns: int) -> Floats:
    """Distinct sizes without which the form can still be fitted: not the ends, and evenly spaced if many."""
    distinct = np.unique(sizes)
    least = _method(AlphaBeta.form if form == AUTO else form, columns)[-1]
    if distinct.size <= max(least, 2):
        return distinct[:0]
    inner = distinct[1:-1]
    every = np.linspace(0, inner.size - 1, min(inner.size, MOST_LEFT_OUT)).round().astype(int)
    return np.asarray(inner[every])


class Unseen(NamedTuple):
    """What a form says of sizes left out of its fit, one by one: (k,) sizes, its times, measured medians."""

    sizes: Floats
    predicted_s: Floats
    median_s: Floats

    def errors(self) -> Floats:
        """(k,) signed, relative."""
        return np.asarray(self.predicted_s / self.median_s - 1)

    def error(self) -> float:
        """The median of their sizes."""
        return float(np.median(np.abs(self.errors())))


def _unseen(form: str, sizes: Floats, seconds: Floats) -> Unseen:
    """Of a form and inner sizes; those that it needs are left out."""
    found = []
    for size in _inner(form, sizes, 2).tolist():
        kept = sizes != size
        try:
            cost = fit(form, sizes[kept], seconds[kept], draws=0).cost
        except UserError:  # the form needs this size
            continue
        found.append((size, cost(size), np.median(seconds[~kept])))
    return Unseen(*np.array(found, dtype=float).reshape(-1, 3).T)


def _held_out(form: str, sizes: Floats, seconds: Floats, unseen: Unseen) -> HeldOut | None:
    """What single times are off by at inner sizes left out, and beyond a half, quarter, eighth of all.

    None where the form needs every size. Costs are given a thousandth of the measured time at least.
    """

    def off(predicted_s: Any, measured_s: Floats) -> Floats:
        least = np.maximum(predicted_s, measured_s / 1000)
        return np.asarray(np.abs(np.log(measured_s / least)))

    def off_beyond(kept: NDArray[np.bool_], at: NDArray[np.bool_]) -> Floats:
        try:
            cost = fit(form, sizes[kept], seconds[kept], draws=0).cost
        except UserError:  # too few are left
            return np.empty(0)
        return off(cost(sizes[at]), seconds[at])

    if not unseen.sizes.size:
        return None
    left_out = np.isin(sizes, unseen.sizes)
    said_s = np.interp(sizes[left_out], unseen.sizes, unseen.predicted_s)
    inner = off(said_s, seconds[left_out])
    first, last, grows = float(sizes[0]), float(sizes[-1]), []
    for kept_to in (
        lambda part: (sizes >= first * part, sizes == first, first),
        lambda part: (sizes <= last / part, sizes == last, last),
    ):
        seen = []
        for part in ENDS:
            kept, at, end = kept_to(part)
            if kept.any() and (found := off_beyond(kept, at)).size:
                near = sizes[kept][0 if end == first else -1]
                seen.append(float(np.median(found)) / abs(math.log(near / end)))
        grows.append(max(seen, default=float(inner.max()) / math.log(2)))
    apart = NEARER if form in THROUGH_ALL else 0.0
    where = np.searchsorted(distinct := np.unique(sizes), sizes[left_out])
    inner /= np.log(distinct[where + 1] / distinct[where - 1]) ** apart
    falls = falling(sizes[left_out], inner)
    as_at_first = np.sort(inner * (sizes[left_out] / first) ** falls)
    return HeldOut(as_at_first, first, last, grows[0], grows[1], falls, apart)


def unseen_errors(
    make: Callable[..., Any],
    rows: Sequence[ArrayLike],
    others: Sequence[ArrayLike],
    sizes: Floats | None = None,
) -> tuple[Floats, ...]:
    """Predict another run's samples, each size by a cost made without that size.

    make : columns of samples, times last -> cost, as ``lambda *rows: fit("table", *rows, draws=0).cost``
    rows : columns of the samples to make it from; others : those of the other run
    sizes : which of the other run's (the first column), by default all

    Returns the other run's distinct points, a column each, and the signed relative error of its median.
    """
    known = [np.asarray(column, float) for column in rows]
    *at, times = (np.asarray(column, float) for column in others)
    sizes = np.unique(at[0]) if sizes is None else sizes
    points, groups, _ = grouped(np.column_stack(at), times)
    medians = each(np.median, groups)
    whole, errors = make(*known), [np.empty(0)]
    for size in sizes:
        kept, here = known[0] != size, points[:, 0] == size
        cost = whole if kept.all() else make(*(column[kept] for column in known))
        errors.append(cost(*points[here].T) / medians[here] - 1)
    return *points[np.isin(points[:, 0], sizes)].T, np.concatenate(errors)


class Judged(NamedTuple):
    """A fit of a selection cost, and how it does where it was not fitted.

    elements, density, held_out : (k,) each inner size at each density, and the signed relative error
        there of the form fitted without that size
    """

    fit: Fit[SelectionCost]
    elements: Floats
    density: Floats
    held_out: Floats


def judge_selections(
    *rows: ArrayLike, forms: Sequence[str] = (), **options: Any
) -> dict[str, Judged]:
    """Every form fitted to the same measured selections, with its held-out error by size.

    rows : elements, density, seconds, (n,) raw samples each; forms : by default all that can be fitted
    options : go to `fit`, which raises
    """
    return {
        form: Judged(fit(form, *rows, **options), *held_out_errors(form, *rows))
        for form in forms or fitted_forms(SELECTION_FORMS)
    }
