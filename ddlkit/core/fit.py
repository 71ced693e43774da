"""Fit costs of messages and selections to measured times, and say how sure the fit is.

Every form here is linear in its parameters once its breakpoints are chosen, so a fit is a weighted linear
least squares, and breakpoints are found by trying every gap between measured sizes. Weights are 1/t (an
error of 10% counts the same at 1 KiB and at 1 GiB) unless a line is asked for that counts seconds: what
is right for a curve is wrong for a line, which cannot hold small and large messages to 10% at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core import units
from ddlkit.core.cost import (
    FORMS,
    AlphaBeta,
    Form,
    MessageCost,
    Piecewise,
    Segments,
    Stepped,
    Table,
    cost_from_dict,
    parameters,
)
from ddlkit.core.doubt import ENDS, HeldOut
from ddlkit.core.errors import UserError
from ddlkit.core.sparse import (
    SELECTION_FORMS,
    DensityLog,
    Log,
    Scan,
    SelectionCost,
    SelectionTable,
)
from ddlkit.core.workload import Floats

C = TypeVar("C", MessageCost, SelectionCost)

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
SIMPLE_FIRST = (AlphaBeta.form, Piecewise.form, Segments.form, Table.form)
"""Between which AUTO chooses."""
AS_GOOD = 1.1
"""Forms whose error is at most so many times the least are as good: of those the simplest is taken."""
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
    held_out : those errors, where the draws are made of them
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
    held_out: HeldOut | None = None
    why: str = ""

    @property
    def bytes(self) -> Floats:
        """(n,) sizes of the messages, or elements of the selections, that it was fitted on."""
        return self.at[0]

    def interval(self, *at: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
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
        tail = (1 - level) / 2
        return np.quantile(times, tail, axis=0), np.quantile(times, 1 - tail, axis=0)

    def to_dict(self) -> dict[str, Any]:
        """The cost's JSON with a summary of the fit and its draws, which ``costs_from_dict`` reads back.

        Standard errors of zero, which say that nothing was repeated, are left out.
        """
        errors = zip(self.names, self.standard_errors.tolist(), strict=True)
        summary: dict[str, Any] = {
            "rows": len(self.seconds),
            "median_abs_relative_error": float(np.median(np.abs(self.relative_residuals))),
            "max_abs_relative_error": float(np.max(np.abs(self.relative_residuals))),
            "max_leverage": float(np.max(self.leverage)),
            "standard_errors": {name: error for name, error in errors if error > 0},
        }
        if self.why:
            summary["why"] = self.why
        if self.held_out:
            summary["median_abs_held_out_error"] = float(np.median(self.held_out.log_errors))
            summary["held_out"] = {"draws": len(self.draws), **self.held_out.to_dict()}
        else:
            summary["draws"] = [draw.to_dict() for draw in self.draws]
        return {**self.cost.to_dict(), "fit": summary}


def costs_from_dict(description: dict[str, Any]) -> tuple[MessageCost, list[MessageCost]]:
    """The cost, and the draws that came with it (none for a cost written by hand)."""
    fitted = description.get("fit", {}) if isinstance(description, dict) else {}
    cost, held_out = cost_from_dict(description), fitted.get("held_out")
    if held_out:
        return cost, [*HeldOut.from_dict(held_out).draws(cost, held_out.get("draws", DRAWS))]
    return cost, [cost_from_dict(draw) for draw in fitted.get("draws", [])]


def _least_squares(
    design: Floats, seconds: Floats, unit_s: Floats | None = None
) -> tuple[Floats, Floats, Floats, float]:
    """Minimise loss = sum(((design @ values - seconds) / unit_s)**2); ``design`` is (n, k).

    unit_s : (n,) what an error counts in: by default the measured time itself, so errors are relative

    Returns (k,) values and their standard errors, (n,) leverage, and the loss.
    """
    unit_s = seconds if unit_s is None else unit_s
    weighted, wanted = design / unit_s[:, None], seconds / unit_s
    scale = np.linalg.norm(weighted, axis=0)
    basis, rank = np.zeros(0), 0
    if np.all(scale > 0):
        basis, _, rank, _ = np.linalg.lstsq(weighted / scale, wanted, rcond=None)
    if rank < design.shape[1]:
        raise UserError("the sizes do not determine the parameters: measure more distinct sizes")
    values = basis / scale
    loss = float(np.sum((weighted @ values - wanted) ** 2))
    inverse = np.linalg.inv((weighted / scale).T @ (weighted / scale)) / np.outer(scale, scale)
    leverage = np.einsum("ij,jk,ik->i", weighted, inverse, weighted)
    variance = np.diag(inverse * loss / max(len(seconds) - design.shape[1], 1))
    return values, np.sqrt(np.maximum(variance, 0)), leverage, loss


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
        values, errors, leverage, _ = _least_squares(design, seconds)
        return dict(zip(names, values.tolist(), strict=True)), names, values, errors, leverage

    return fitter


def _grouped(points: Floats, seconds: Floats) -> tuple[Floats, list[Floats], NDArray[np.int64]]:
    """(n, k) points to those that differ, (k', k), the times at each, and which one each row is at."""
    distinct, inverse, counts = np.unique(points, axis=0, return_inverse=True, return_counts=True)
    which = inverse.ravel()
    in_order = seconds[np.argsort(which, kind="stable")]
    return distinct, np.split(in_order, np.cumsum(counts)[:-1]), which


def _each(of: Callable[..., Any], groups: Sequence[Floats]) -> Floats:
    """(k,) ``of`` each of k groups, at once where all are of one length."""
    if len({group.size for group in groups}) == 1:
        return np.asarray(of(np.stack(groups), axis=1))
    return np.array([of(group, axis=0) for group in groups])


def _full_grid(kind: type[Form]) -> Fitter:
    """Of a table: medians at each point, which must make a full grid; errors from the spread of repeats."""

    def fitter(*columns: Floats) -> Fitted:
        *at, seconds = columns
        points, groups, which = _grouped(np.column_stack(at[::-1]), seconds)
        axes = [np.unique(column) for column in points.T]
        shape = [axis.size for axis in axes]
        if len(points) != np.prod(shape):
            raise UserError(
                f"{len(points)} points are not the {shape[0]} densities x {shape[1]} sizes of a "
                "table: measure every size at every density"
            )
        medians = _each(np.median, groups)
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
        points, groups, which = _grouped(sizes[:, None], seconds)
        grid, count = points[:, 0], np.array([group.size for group in groups])
        medians = _each(np.median, groups)
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
    values, errors, leverage, _ = _least_squares(_straight(sizes), seconds, unit_s)
    if values[0] < 0:
        slope, slope_error, leverage, _ = _least_squares(sizes[:, None], seconds, unit_s)
        values, errors = np.append(0.0, slope), np.append(0.0, slope_error)
    return dict(zip(names, values.tolist(), strict=True)), names, values, errors, leverage


def _median_spread(groups: Sequence[Floats]) -> Floats:
    """(k,) standard error of each group's median; that of a normal sample spreads 1.2533 times its mean."""

    def spread(times: Floats, axis: int) -> Floats:
        return np.asarray(1.2533 * times.std(axis=axis, ddof=min(1, times.shape[axis] - 1)))

    return _each(spread, groups) / np.array([group.size for group in groups]) ** 0.5


Design = Callable[[Floats], Floats]
"""(n,) sizes to the (n, 2) matrix whose product with the parameters is the time."""


def _straight(sizes: Floats) -> Floats:
    return np.column_stack([np.ones_like(sizes), sizes])


def _log2(sizes: Floats) -> Floats:
    return np.column_stack([np.log2(sizes), np.ones_like(sizes)])


def _linear(sizes: Floats) -> Floats:
    return np.column_stack([sizes, np.ones_like(sizes)])


def _losses(x: Floats, y: Floats, weight: Floats, starts: int) -> Floats:
    """(starts, n+1) losses of a line through the points from i up to j, 0 where there is none.

    x, y, weight : (n,) of the points

    Points are added one by one to moments about their mean: plain sums would lose the digits of short pieces.
    """
    losses = np.zeros((x.size + 1, starts))
    moments = np.zeros((6, starts))
    for j, (new_x, new_y, new) in enumerate(zip(x, y, weight, strict=True)):
        total, mean_x, mean_y, xx, xy, yy = moments[:, : j + 1]
        both = total + new
        off_x, off_y, rest = new_x - mean_x, new_y - mean_y, new * total / both
        mean_x += off_x * new / both
        mean_y += off_y * new / both
        xx += rest * off_x * off_x
        xy += rest * off_x * off_y
        yy += rest * off_y * off_y
        total[:] = both
        explained = np.divide(xy * xy, xx, out=np.zeros_like(xx), where=xx > 0)
        losses[j + 1, : j + 1] = np.maximum(yy - explained, 0.0)
    return losses.T


def _total_losses(variables: Sequence[Floats], groups: Sequence[Floats], minimum: int) -> Floats:
    """Losses of len(variables) pieces by where they are cut, an axis a cut; infinite where one is too short.

    variables : of each piece (n,), what it is straight in; groups : the n sizes' times

    Repeats scatter about their own mean wherever the cuts are, so that part is left out.
    """
    weight = np.array([np.sum(group**-2.0) for group in groups])
    mean = np.array([np.sum(1.0 / group) for group in groups]) / weight
    n, count = len(groups), np.arange(len(groups) + 1)
    total = np.where(count < minimum, np.inf, _losses(variables[0], mean, weight, 1)[0])
    too_short = count - count[:, None] < minimum
    for variable in variables[1:-1]:
        piece = np.zeros((n + 1, n + 1))
        piece[:n] = _losses(variable, mean, weight, n)
        total = total[..., None] + np.where(too_short, np.inf, piece)
    last = _losses(variables[-1][::-1], mean[::-1], weight[::-1], 1)[0]
    return np.asarray(total + np.where(count < minimum, np.inf, last)[::-1])


CLOSE = 64
"""So many of the best breakpoints, if equal but for rounding, are compared by their exact loss."""


def _best_breaks(
    designs: Sequence[Design], sizes: Floats, seconds: Floats, minimum: int
) -> list[float]:
    """The breakpoints of least total loss, geometric means between neighbouring sizes.

    Every cut is tried, by sums of all pieces' losses; those that rounding cannot tell apart by least squares.
    """
    points, groups, _ = _grouped(sizes[:, None], seconds)
    grid, starts = points[:, 0], np.cumsum([0, *(group.size for group in groups)])
    if grid.size < minimum * len(designs):
        raise UserError(
            f"{len(designs)} pieces need at least {minimum * len(designs)} distinct sizes, "
            f"got {grid.size}"
        )
    if len(designs) == 1:
        return []
    # A design is a constant and a variable: their sum is as good a variable.
    total = _total_losses([design(grid).sum(axis=1) for design in designs], groups, minimum)
    slack = 1e-9 * total.min() + 1e-12 * sizes.size
    near = np.flatnonzero(total <= total.min() + slack)
    near = np.sort(near[np.argsort(total.flat[near], kind="stable")[:CLOSE]])

    @cache
    def loss(design: Design, start: int, end: int) -> float:
        inside = slice(starts[start], starts[end])
        return _least_squares(design(sizes[inside]), seconds[inside])[-1]

    def exact(cuts: tuple[int, ...]) -> float:
        bounds = pairwise((0, *cuts, grid.size))
        return sum(loss(design, *ends) for design, ends in zip(designs, bounds, strict=True))

    tried = list(zip(*(c.tolist() for c in np.unravel_index(near, total.shape)), strict=True))
    best = tried[0] if len(tried) == 1 else min(tried, key=exact)
    return [float(np.sqrt(grid[cut - 1] * grid[cut])) for cut in best]


def _pieces(
    designs: Sequence[Design], breaks: Sequence[float], sizes: Floats, seconds: Floats
) -> tuple[Floats, Floats, Floats]:
    """Values, standard errors and leverage of the pieces between the breaks, one after the other."""
    which = np.searchsorted(breaks, sizes, side="right")
    lines = [
        _least_squares(design(sizes[which == k]), seconds[which == k])
        for k, design in enumerate(designs)
    ]
    values, errors, leverage, _ = zip(*lines, strict=True)
    return np.concatenate(values), np.concatenate(errors), np.concatenate(leverage)


def _fit_piecewise(sizes: Floats, seconds: Floats, threshold: str = "") -> Fitted:
    """With the threshold that is given, or else with the one of least loss."""
    designs = _log2, _linear
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
        (threshold_bytes,) = _best_breaks(designs, sizes, seconds, 2)
    values, errors, leverage = _pieces(designs, (threshold_bytes,), sizes, seconds)
    _, *names = parameters(Piecewise)
    known = dict(zip(names, values.tolist(), strict=True))
    return {"threshold_bytes": threshold_bytes, **known}, tuple(names), values, errors, leverage


def _fit_segments(sizes: Floats, seconds: Floats) -> Fitted:
    """As many pieces as the sizes can carry, at most PIECES."""
    pieces = max(1, min(PIECES, np.unique(sizes).size // MIN_SIZES_PER_PIECE))
    designs = (_straight,) * pieces
    breaks = _best_breaks(designs, sizes, seconds, MIN_SIZES_PER_PIECE)
    values, errors, leverage = _pieces(designs, breaks, sizes, seconds)
    names = tuple(f"{name}[{k}]" for k in range(pieces) for name in ("alpha_s", "beta_s_per_byte"))
    known = {"breaks_bytes": breaks, "alpha_s": values[::2].tolist()}
    return {**known, "beta_s_per_byte": values[1::2].tolist()}, names, values, errors, leverage


def _fit_stepped(sizes: Floats, seconds: Floats, **known: Any) -> Fitted:
    """Software and bytes of what is known of the lab, through the median of every size.

    Where links save, messages up to some size are the processor's, those above the link's.
    """
    units = [Stepped(*unit, **known).terms(sizes) for unit in np.eye(2)]
    points, groups, which = _grouped(sizes[:, None], seconds)
    medians, first = _each(np.median, groups), np.unique(which, return_index=True)[1]
    software, of_bytes = units[0].software_s[first], units[1].bytes_s[first]
    design, latency_s = np.column_stack([software, of_bytes]), units[0].delay_s[first]
    if not known.get("saves"):
        found = _least_squares(design, medians - latency_s, medians)[:3]
        if found[0][0] < 0:  # as good as no software
            slope, error, leverage, _ = _least_squares(design[:, 1:], medians - latency_s, medians)
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
    low = _least_squares(design[:cut, :1], net_s[:cut], seconds[:cut])
    high = _least_squares(design[cut:, 1:], seconds[cut:])
    values, errors, leverage = (
        np.concatenate([one, other]) for one, other in zip(low[:3], high[:3], strict=True)
    )
    whole_s = np.maximum(design[:, 0] * values[0] + latency_s, design[:, 1] * values[1])
    return values, errors, leverage, float(np.sum((whole_s / seconds - 1) ** 2))


_METHODS: dict[type[Form], tuple[Fitter, int]] = {
    **{kind: (_linear_in_parameters(kind), 3) for kind in (AlphaBeta, DensityLog, Log, Scan)},
    **{kind: (_full_grid(kind), 2) for kind in (Table, SelectionTable)},
    Piecewise: (_fit_piecewise, 5),
    Segments: (_fit_segments, MIN_SIZES_PER_PIECE),
    Stepped: (_fit_stepped, 3),
}
"""How each form is fitted, and from how many distinct sizes at least."""
_VARIANTS: dict[type[Form], Callable[[str], Fitter]] = {
    AlphaBeta: _line,
    Piecewise: lambda text: partial(_fit_piecewise, threshold=text),
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
        relative error without; of selections "density_log", "log", "scan", "table"
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
    if form == AUTO and len(rows) == 2:
        form, why, held_out = _best_form(at[0], times)
    else:
        why, held_out = "", None
    kind, fitter, least = _method(form, len(rows))
    distinct, repeats = np.unique(at[0], return_counts=True)
    if distinct.size < least:
        raise UserError(f"a {form} fit needs at least {least} distinct sizes, got {distinct.size}")
    if kind is Stepped:  # how a size divides into its terms depends on what it holds for
        of_cost = {name: value for name, value in known.items() if name != "samples"}
        fitter = partial(fitter, **of_cost)
    values, names, estimates, errors, leverage = fitter(*at, times)
    cost = kind(**values, **known)
    if draws and len(rows) == 2 and np.median(repeats) < ENOUGH_REPEATS:
        held_out = held_out or _held_out(form, at[0], times)
        costs: tuple[Any, ...] = held_out.draws(cost, draws) if held_out else ()
    else:
        held_out = None
        costs = tuple(
            kind(**fitter(*at, times[drawn])[0], **known)
            for drawn in _resamples(at, draws, np.random.default_rng(seed))
        )
    residuals = cost(*at) / times - 1
    sure = names, estimates, errors, costs, tuple(at), times, residuals, leverage
    return Fit(cost, *sure, held_out=held_out, why=why)


def _method(form: str, columns: int) -> tuple[Callable[..., Any], Fitter, int]:
    """The class of a form's costs, how it is fitted, and the least number of distinct sizes."""
    forms: Mapping[str, type[Form]] = FORMS if columns == 2 else SELECTION_FORMS
    name, colon, text = form.partition(":")
    if name not in fitted_forms(forms):
        known = [*fitted_forms(forms), *([AUTO] if columns == 2 else [])]
        raise UserError(f"unknown cost form {form!r}: use one of {', '.join(known)}")
    fitter, least = _METHODS[forms[name]]
    if colon:
        if forms[name] not in _VARIANTS or not text:
            raise UserError(f"cost form {form!r}: write {name}, nothing behind it")
        fitter = _VARIANTS[forms[name]](text)
    return forms[name], fitter, least


def _best_form(sizes: Floats, seconds: Floats) -> tuple[str, str, HeldOut | None]:
    """The form of least median error at sizes left out, a sentence of why, and its errors there.

    Where the sizes are too few to leave one out of a line, it is the line.
    """
    every = {form: _held_out(form, sizes, seconds) for form in SIMPLE_FIRST}
    known = {form: held_out for form, held_out in every.items() if held_out}
    if AlphaBeta.form not in known:
        return AlphaBeta.form, "too few sizes to leave one out and compare forms", None
    errors = {form: float(np.median(held_out.log_errors)) for form, held_out in known.items()}
    as_good = AS_GOOD * min(errors.values()) + NEGLIGIBLE
    chosen = next(form for form, error in errors.items() if error <= as_good)
    others = "".join(f"; {form} {error:.2%}" for form, error in errors.items() if form != chosen)
    why = f"single times at sizes left out are off by {errors[chosen]:.2%} in the median{others}"
    return chosen, why, known[chosen]


def _checked(given: Sequence[ArrayLike]) -> list[Floats]:
    """Columns, times last, sorted by those before the times."""
    columns = [np.asarray(values, dtype=float).ravel() for values in given]
    named = [("size", "sizes"), ("density", "densities")][: len(columns) - 1]
    for (one, many), column in zip((*named, ("time", "times")), columns, strict=True):
        if column.shape != columns[-1].shape:
            raise UserError(
                f"{column.size} {many} but {columns[-1].size} times: give one time a {one}"
            )
        wrong = np.flatnonzero(~(np.isfinite(column) & (column > 0)))
        if wrong.size:
            raise UserError(
                f"row {wrong[0]}: {one} is {column[wrong[0]]:g}: must be finite and above zero"
            )
        if one == "density" and np.any(column > 1):
            raise UserError(f"density is {column.max():g}: must be at most 1")
    order = np.lexsort(columns[-2::-1])
    return [column[order] for column in columns]


def _resamples(
    at: Sequence[Floats], draws: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Row numbers of bootstrap samples, drawn with replacement at each point so that none is lost."""
    _, starts, counts = np.unique(np.stack(at), axis=1, return_index=True, return_counts=True)
    first, count = np.repeat(starts, counts), np.repeat(counts, counts)
    return [first + rng.integers(0, count) for _ in range(draws)]


# -- where it was not fitted -------------------------------------------------------------------


def held_out_errors(form: str, *rows: ArrayLike, **known: Any) -> tuple[Floats, ...]:
    """Leave one size out: sizes (and densities), signed relative error of the median fitted without it.

    Only inner sizes are left out, MOST_LEFT_OUT at most: at the ends a fit would have to extrapolate. None
    where the form needs every size there is. known : as for `fit`, of a form that needs it
    """
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


def _held_out(form: str, sizes: Floats, seconds: Floats) -> HeldOut | None:
    """What a form is off by at inner sizes, left out one by one, and beyond a half, quarter, eighth of all.

    None where it needs every size. Costs are given a thousandth of the measured time at least.
    """

    def off(kept: NDArray[np.bool_], at: NDArray[np.bool_]) -> Floats:
        try:
            cost = fit(form, sizes[kept], seconds[kept], draws=0).cost
        except UserError:  # the form needs this size
            return np.empty(0)
        return np.abs(np.log(seconds[at] / np.maximum(cost(sizes[at]), seconds[at] / 1000)))

    inner = [off(sizes != size, sizes == size) for size in _inner(form, sizes, 2)]
    errors = np.sort(np.concatenate([np.empty(0), *inner]))
    if not errors.size:
        return None
    first, last, grows = float(sizes[0]), float(sizes[-1]), []
    for kept_to in (
        lambda part: (sizes >= first * part, sizes == first, first),
        lambda part: (sizes <= last / part, sizes == last, last),
    ):
        seen = []
        for part in ENDS:
            kept, at, end = kept_to(part)
            if kept.any() and (found := off(kept, at)).size:
                near = sizes[kept][0 if end == first else -1]
                seen.append(float(np.median(found)) / abs(math.log(near / end)))
        grows.append(max(seen, default=float(errors[-1]) / math.log(2)))
    return HeldOut(errors, first, last, *grows)


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
    points, groups, _ = _grouped(np.column_stack(at), times)
    medians = _each(np.median, groups)
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
