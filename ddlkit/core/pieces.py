"""How each form is fitted: straight pieces by least squares, mostly of relative errors; tables of medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlkit.core import units
from ddlkit.core.cost import (
    AlphaBeta,
    Chords,
    Form,
    Piecewise,
    Segments,
    Table,
    parameters,
)
from ddlkit.core.errors import UserError
from ddlkit.core.sparse import Log, Scan
from ddlkit.core.workload import Floats

PIECES, MIN_SIZES_PER_PIECE = 3, 3  # of a ``segments`` fit
LINES = ("relative", "least_squares", "medians", "ends")
"""Ways to lay a straight line through messages, as in "alpha_beta:ends": by relative error; by least squares
in seconds through every sample, or through the median of every size; through the two ends alone."""


def least_squares(
    design: Floats, seconds: Floats, unit_s: Floats | None = None
) -> Floats:
    """Return (k,) values of least sum(((design @ values - seconds) / unit_s)**2).

    design : (n, k); unit_s : (n,) what an error counts in: by default the measured time, so it is relative
    """
    unit_s = seconds if unit_s is None else unit_s
    weighted, target = design / unit_s[:, None], seconds / unit_s
    scale = np.linalg.norm(weighted, axis=0)
    values, rank = scale, 0
    if np.all(scale > 0):
        values, _, rank, _ = np.linalg.lstsq(weighted / scale, target, rcond=None)
    if rank < design.shape[1]:
        raise UserError(
            "the sizes do not determine the parameters: measure more distinct sizes"
        )
    return values / scale


def grouped(sizes: Floats, seconds: Floats) -> tuple[Floats, list[Floats]]:
    """Return (k,) distinct ones of (n,) sizes, and the times at each."""
    distinct, inverse, counts = np.unique(
        sizes, return_inverse=True, return_counts=True
    )
    in_order = seconds[np.argsort(inverse, kind="stable")]
    return distinct, np.split(in_order, np.cumsum(counts)[:-1])


def each(of: Callable[..., Any], groups: Sequence[Floats]) -> Floats:
    """Return (k,) ``of`` each of k groups, at once where all are of one length."""
    if len({group.size for group in groups}) == 1:
        return np.asarray(of(np.stack(groups), axis=1))
    return np.array([of(group, axis=0) for group in groups])


Design = Callable[[Floats], Floats]
"""(n,) sizes to the (n, 2) matrix whose product with the parameters is the time."""


def straight(sizes: Floats) -> Floats:
    """Return (n, 2): a constant and the size."""
    return np.column_stack([np.ones_like(sizes), sizes])


def _losses(x: Floats, y: Floats, weight: Floats, least: int) -> Floats:
    """Return (n+1, n+1) losses of a line through the (n,) points from i up to j; infinite below ``least``."""
    # Points are added one by one to moments about their mean: plain sums would lose digits of short pieces.
    losses = np.full((x.size + 1, x.size + 1), np.inf)
    moments = np.zeros((6, x.size))
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
        long_enough = slice(0, max(0, j + 2 - least))
        losses[long_enough, j + 1] = np.maximum(yy - explained, 0.0)[long_enough]
    return losses


def best_breaks(
    designs: Sequence[Design], sizes: Floats, seconds: Floats, minimum: int
) -> list[float]:
    """Return breakpoints of least total loss, geometric means of neighbours; UserError for too few sizes."""
    (grid, groups), needed = grouped(sizes, seconds), minimum * len(designs)
    if grid.size < needed:
        pieces = f"{len(designs)} pieces need at least {needed} distinct sizes"
        raise UserError(f"{pieces}, got {grid.size}")
    # Repeats scatter about their own mean wherever the cuts are: that part is left out.
    weight = each(lambda times, axis: np.sum(times**-2.0, axis=axis), groups)
    mean = each(lambda times, axis: np.sum(1.0 / times, axis=axis), groups) / weight
    # A design is a constant and a variable: their sum is as good a variable.
    first, *rest = (
        _losses(design(grid).sum(axis=1), mean, weight, minimum) for design in designs
    )
    least, came = first[0], []
    for piece in rest:
        total = least[:, None] + piece
        came.append(total.argmin(axis=0))
        least = total.min(axis=0)
    cuts = [grid.size]
    for before in reversed(came):
        cuts.append(int(before[cuts[-1]]))
    return [float(np.sqrt(grid[cut - 1] * grid[cut])) for cut in reversed(cuts[1:])]


def apart(
    designs: Sequence[Design], breaks: Sequence[float], sizes: Floats, seconds: Floats
) -> list[float]:
    """Return 2k values of k pieces between the breaks, fitted one by one."""
    which, values = np.searchsorted(breaks, sizes, side="right"), list[float]()
    for k, design in enumerate(designs):
        values += least_squares(design(sizes[which == k]), seconds[which == k]).tolist()
    return values


# -- forms -------------------------------------------------------------------------------------

Fitter = Callable[..., dict[str, Any]]
"""Sizes and seconds, (n,) each, to the fitted parameters."""


def _linear_in_parameters(kind: type[Form]) -> Fitter:
    """Return the fitter of a form without breakpoints: a column is the form with one parameter 1, else 0."""
    names = parameters(kind)

    def fitter(sizes: Floats, seconds: Floats) -> dict[str, Any]:
        terms: list[Any] = [kind(*unit) for unit in np.eye(len(names)).tolist()]
        design = np.column_stack([term(sizes) for term in terms])
        return dict(zip(names, least_squares(design, seconds).tolist(), strict=True))

    return fitter


def _medians(sizes: Floats, seconds: Floats) -> dict[str, Any]:
    """Return how a table is fitted: medians at each size."""
    distinct, groups = grouped(sizes, seconds)
    return {"bytes": distinct.tolist(), "seconds": each(np.median, groups).tolist()}


def _line(how: str) -> Fitter:
    """Return how a line is laid: one of LINES."""
    if how not in LINES:
        raise UserError(f"cost form alpha_beta:{how}: use {', '.join(LINES)}")
    if how == "relative":
        return _linear_in_parameters(AlphaBeta)

    def fitter(sizes: Floats, seconds: Floats) -> dict[str, Any]:
        grid, groups = grouped(sizes, seconds)
        medians = each(np.median, groups)
        if how == "least_squares":
            grid, medians = sizes, seconds
        elif how == "ends":
            grid, medians = grid[[0, -1]], medians[[0, -1]]
        unit_s = np.ones_like(medians)
        values = least_squares(straight(grid), medians, unit_s)
        if values[0] < 0:  # in seconds the largest messages decide
            values = np.append(0.0, least_squares(grid[:, None], medians, unit_s))
        return dict(zip(parameters(AlphaBeta), values.tolist(), strict=True))

    return fitter


def _fit_piecewise(
    sizes: Floats, seconds: Floats, threshold: str = ""
) -> dict[str, Any]:
    """Return parameters with the threshold that is given, or else with the one of least loss."""
    designs: tuple[Design, ...] = (
        lambda sizes: straight(np.log2(sizes))[:, ::-1],
        lambda sizes: straight(sizes)[:, ::-1],
    )
    if threshold:
        threshold_bytes = float(units.parse_bytes(threshold))
    else:
        (threshold_bytes,) = best_breaks(designs, sizes, seconds, 2)
    values = apart(designs, (threshold_bytes,), sizes, seconds)
    return dict(zip(parameters(Piecewise), (threshold_bytes, *values), strict=True))


def _fit_segments(sizes: Floats, seconds: Floats) -> dict[str, Any]:
    """Return as many pieces as the sizes can carry, at most PIECES; they need not join."""
    designs = (straight,) * max(
        1, min(PIECES, np.unique(sizes).size // MIN_SIZES_PER_PIECE)
    )
    breaks = best_breaks(designs, sizes, seconds, MIN_SIZES_PER_PIECE)
    values = apart(designs, breaks, sizes, seconds)
    return dict(
        zip(parameters(Segments), (breaks, values[::2], values[1::2]), strict=True)
    )


METHODS: dict[type[Form], tuple[Fitter, int]] = {
    AlphaBeta: (_linear_in_parameters(AlphaBeta), 3),
    Piecewise: (_fit_piecewise, 5),
    Segments: (_fit_segments, MIN_SIZES_PER_PIECE),
    Chords: (_medians, 2),
    Table: (_medians, 2),
    **{kind: (_linear_in_parameters(kind), 3) for kind in (Log, Scan)},
}
"""How each form is fitted, and from how many distinct sizes at least; the simplest first."""
VARIANTS: dict[type[Form], Callable[[str], Fitter]] = {
    AlphaBeta: _line,
    Piecewise: lambda text: partial(_fit_piecewise, threshold=text),
}
"""What may stand behind a form's name, as in "piecewise:45KB", to how it is then fitted."""
