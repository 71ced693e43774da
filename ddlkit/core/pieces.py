"""Straight pieces through measured times: least squares, where the pieces meet, and whether they join.

A piece is a line in the size or in its logarithm. Found by trying every cut between sizes, pieces need not
join; a collective's time is continuous but where it changes its protocol, so there is a way that joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats

UNDETERMINED = "the sizes do not determine the parameters: measure more distinct sizes"


def least_squares(
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
    try:
        if np.all(scale > 0):
            basis, _, rank, _ = np.linalg.lstsq(weighted / scale, wanted, rcond=None)
        if rank < design.shape[1]:
            raise np.linalg.LinAlgError
        inverse = np.linalg.inv((weighted / scale).T @ (weighted / scale)) / np.outer(scale, scale)
    except np.linalg.LinAlgError:
        raise UserError(UNDETERMINED) from None
    values = basis / scale
    loss = float(np.sum((weighted @ values - wanted) ** 2))
    leverage = np.einsum("ij,jk,ik->i", weighted, inverse, weighted)
    variance = np.diag(inverse * loss / max(len(seconds) - design.shape[1], 1))
    return values, np.sqrt(np.maximum(variance, 0)), leverage, loss


def grouped(points: Floats, seconds: Floats) -> tuple[Floats, list[Floats], NDArray[np.int64]]:
    """(n, k) points to those that differ, (k', k), the times at each, and which one each row is at."""
    rows = points[:, 0] if points.shape[1] == 1 else points  # numbers take half the time of rows
    distinct, inverse, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    distinct, which = distinct.reshape(-1, points.shape[1]), inverse.ravel()
    in_order = seconds[np.argsort(which, kind="stable")]
    return distinct, np.split(in_order, np.cumsum(counts)[:-1]), which


def each(of: Callable[..., Any], groups: Sequence[Floats]) -> Floats:
    """(k,) ``of`` each of k groups, at once where all are of one length."""
    if len({group.size for group in groups}) == 1:
        return np.asarray(of(np.stack(groups), axis=1))
    return np.array([of(group, axis=0) for group in groups])


Design = Callable[[Floats], Floats]
"""(n,) sizes to the (n, 2) matrix whose product with the parameters is the time."""


def straight(sizes: Floats) -> Floats:
    return np.column_stack([np.ones_like(sizes), sizes])


def log2(sizes: Floats) -> Floats:
    return np.column_stack([np.log2(sizes), np.ones_like(sizes)])


def linear(sizes: Floats) -> Floats:
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


def _weighted(groups: Sequence[Floats]) -> tuple[Floats, Floats]:
    """(k,) weights of k sizes in a fit by relative error, and what their times count as."""
    weight = each(lambda times, axis: np.sum(times**-2.0, axis=axis), groups)
    return weight, each(lambda times, axis: np.sum(1.0 / times, axis=axis), groups) / weight


def _total_losses(variables: Sequence[Floats], groups: Sequence[Floats], minimum: int) -> Floats:
    """Losses of len(variables) pieces by where they are cut, an axis a cut; infinite where one is too short.

    variables : of each piece (n,), what it is straight in; groups : the n sizes' times

    Repeats scatter about their own mean wherever the cuts are, so that part is left out.
    """
    weight, mean = _weighted(groups)
    n, count = len(groups), np.arange(len(groups) + 1)
    too_short, short = count - count[:, None] < minimum, count < minimum
    between = []
    for variable in variables[1:-1]:
        piece = np.zeros((n + 1, n + 1))
        piece[:n] = _losses(variable, mean, weight, n)
        between.append(piece)
    if between and all(np.array_equal(variable, variables[0]) for variable in variables):
        first, last = between[0][0], between[0][::-1, n]
    else:
        first = _losses(variables[0], mean, weight, 1)[0]
        last = _losses(variables[-1][::-1], mean[::-1], weight[::-1], 1)[0]
    total = np.where(short, np.inf, first)
    for piece in between:
        total = total[..., None] + np.where(too_short, np.inf, piece)
    return np.asarray(total + np.where(short, np.inf, last)[::-1])


CLOSE = 64
"""So many of the best breakpoints, if equal but for rounding, are compared by their exact loss."""


def best_breaks(
    designs: Sequence[Design], sizes: Floats, seconds: Floats, minimum: int
) -> list[float]:
    """The breakpoints of least total loss, geometric means between neighbouring sizes.

    Every cut is tried, by sums of all pieces' losses; those that rounding cannot tell apart by least squares.
    """
    points, groups, _ = grouped(sizes[:, None], seconds)
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
        return least_squares(design(sizes[inside]), seconds[inside])[-1]

    def exact(cuts: tuple[int, ...]) -> float:
        bounds = pairwise((0, *cuts, grid.size))
        return sum(loss(design, *ends) for design, ends in zip(designs, bounds, strict=True))

    tried = list(zip(*(c.tolist() for c in np.unravel_index(near, total.shape)), strict=True))
    best = tried[0] if len(tried) == 1 else min(tried, key=exact)
    return [float(np.sqrt(grid[cut - 1] * grid[cut])) for cut in best]


def apart(
    designs: Sequence[Design], breaks: Sequence[float], sizes: Floats, seconds: Floats
) -> tuple[Floats, Floats, Floats]:
    """Values, standard errors and leverage of pieces between the breaks that need not join, one by one."""
    which = np.searchsorted(breaks, sizes, side="right")
    lines = [
        least_squares(design(sizes[which == k]), seconds[which == k])
        for k, design in enumerate(designs)
    ]
    values, errors, leverage, _ = zip(*lines, strict=True)
    return np.concatenate(values), np.concatenate(errors), np.concatenate(leverage)


# -- pieces that join ----------------------------------------------------------------------------

SEARCHED = 48
"""Of so many sizes at most, evenly spaced in their order, the best knots are searched."""
INSIDE, NEARER = 8, 10
"""So many places of a knot are tried between two sizes, and so many times others nearer to the best."""


class Joined(NamedTuple):
    """Pieces that meet at their knots, but for jumps.

    knots_bytes : (k-1,) where the pieces meet; slopes : (k,), the first per doubling if it is logarithmic
    start_s : the first piece's value where its variable is zero; jumps_s : (k-1,) 0 where they meet
    values, errors : of all parameters: start, slopes, then jumps; leverage : (n,) of the rows
    """

    knots_bytes: Floats
    start_s: float
    slopes: Floats
    jumps_s: Floats
    values: Floats
    errors: Floats
    leverage: Floats

    def intercepts_s(self) -> Floats:
        """(k,) value of each straight piece at no bytes."""
        steps = self.jumps_s - np.diff(self.slopes) * self.knots_bytes
        return np.cumsum([self.start_s, *steps])


def joined_design(
    sizes: Floats, knots: Floats, steps: Sequence[bool], logarithmic: bool = False
) -> Floats:
    """(..., n, k) columns of pieces that meet at knots (..., k-1), and of a step at each knot that has one.

    A parameter of the columns is the slope of its piece, the height of its step.
    """
    at = [knots[..., place, None] for place in range(knots.shape[-1])]
    x = np.broadcast_to(sizes, (*knots.shape[:-1], sizes.size))
    first = np.minimum(x, at[0]) if at else x
    columns = [np.ones_like(x), np.log2(first) if logarithmic else first]
    for place, start in enumerate(at):
        upto = np.minimum(x, at[place + 1]) if place + 1 < len(at) else x
        columns.append(np.maximum(upto - start, 0.0))
    columns += [x >= start for start, step in zip(at, steps, strict=True) if step]
    return np.stack(columns, axis=-1)


def joined(
    sizes: Floats,
    seconds: Floats,
    pieces: int,
    minimum: int,
    jumps: int = 0,
) -> Joined:
    """Lines of least loss that meet at their knots, all but ``jumps`` of them, each of ``minimum`` sizes.

    The best knot of two lines that meet is either a measured size, where they share it, or the place between
    two sizes where lines that know nothing of each other happen to cross: so those are all tried.
    """
    grid, mean, per_s = _searched(sizes, seconds)
    best = None
    for free in product((False, True), repeat=pieces - 1):
        for jumping in _jumping(free, min(jumps, pieces - 1)):
            found = _best_knots(grid, mean, per_s, free, jumping, minimum)
            if found and (best is None or found[0] < best[0]):
                best = found
    if best is None:
        raise UserError(f"{pieces} pieces need more sizes than {grid.size}")
    _, knots, steps = best
    return _joined_at(knots, steps, sizes, seconds)


def joined_after_log(sizes: Floats, seconds: Floats, minimum: int) -> Joined:
    """A piece that is straight in the size's logarithm, and a line that it meets, of least loss.

    The best knot may be anywhere between two sizes: INSIDE places in each are tried, then ever nearer ones.
    """
    grid, mean, per_s = _searched(sizes, seconds)
    among = grid[minimum - 1 : grid.size - minimum + 1]
    share = np.arange(INSIDE) / INSIDE
    between = among[:-1, None] * (among[1:] / among[:-1])[:, None] ** share
    places = np.append(between, among[-1])
    for _ in range(NEARER):
        design = joined_design(grid, places[:, None], (False,), True) * per_s[:, None]
        best = int(np.argmin(_solved(design, mean * per_s)[1]))
        knot, last = places[best], places.size - 1
        before, behind = places[max(best - 1, 0)], places[min(best + 1, last)]
        places = np.sort(np.append(np.linspace(before, behind, 2 * INSIDE), knot))
    return _joined_at(np.array([knot]), (False,), sizes, seconds, True)


def _searched(sizes: Floats, seconds: Floats) -> tuple[Floats, Floats, Floats]:
    """(k,) sizes at which knots are searched, what the times there count as, and an error's unit, inverse."""
    points, groups, _ = grouped(sizes[:, None], seconds)
    every = np.linspace(0, len(points) - 1, min(len(points), SEARCHED)).round().astype(int)
    weight, mean = _weighted([groups[k] for k in every.tolist()])
    return points[every, 0], mean, weight**0.5


def _joined_at(
    knots: Floats,
    steps: Sequence[bool],
    sizes: Floats,
    seconds: Floats,
    logarithmic: bool = False,
) -> Joined:
    pieces = knots.size + 1
    design = joined_design(sizes, knots, steps, logarithmic)
    values, errors, leverage, _ = least_squares(design, seconds)
    heights = np.zeros(knots.size)
    heights[np.flatnonzero(steps)] = values[pieces + 1 :]
    start_s, slopes = float(values[0]), values[1 : pieces + 1]
    return Joined(knots, start_s, slopes, heights, values, errors, leverage)


def _jumping(free: Sequence[bool], jumps: int) -> list[tuple[bool, ...]]:
    """All ways to let so many knots jump, each of them between two sizes."""
    every = product((False, True), repeat=len(free))
    return [
        one
        for one in every
        if sum(one) == jumps and not any(j > f for j, f in zip(one, free, strict=True))
    ]


def _best_knots(
    grid: Floats,
    mean: Floats,
    per_s: Floats,
    free: Sequence[bool],
    jumping: Sequence[bool],
    minimum: int,
) -> tuple[float, Floats, tuple[bool, ...]] | None:
    """Loss, knots and which of them jump, of the best pieces whose knots lie between sizes where ``free``."""
    ends = _ends(grid.size, free, minimum)
    if not len(ends):
        return None
    inside = np.asarray(free, dtype=bool)
    low: Floats = grid[ends]
    high: Floats = grid[np.minimum(ends + inside, grid.size - 1)]
    knots = np.sqrt(low * high)
    knots[:, ~inside] = low[:, ~inside]
    design = joined_design(grid, knots, free) * per_s[:, None]
    values, losses = _solved(design, mean * per_s)
    meeting = np.flatnonzero(inside & ~np.asarray(jumping, dtype=bool)).tolist()
    for place in meeting:
        apart = partial(_apart_s, values, knots, free, place)
        losses[apart(low[:, place]) * apart(high[:, place]) > 0] = np.inf
    best = int(np.argmin(losses))
    if not np.isfinite(losses[best]):
        return None
    chosen = knots[best].copy()
    for place in meeting:
        apart = partial(_apart_s, values[best], knots[best], free, place)
        edges = np.array([low[best, place], high[best, place]])
        off = apart(edges)
        share = off[0] / (off[0] - off[1]) if off[0] != off[1] else 0.5  # one line all through
        chosen[place] = edges[0] + (edges[1] - edges[0]) * share
    return float(losses[best]), chosen, tuple(jumping)


def _ends(n: int, free: Sequence[bool], minimum: int) -> NDArray[np.int64]:
    """(m, k-1) numbers of the last size of each piece but the last; the next begins there, if free after."""
    if not free:
        return np.zeros((1, 0), dtype=np.int64)
    every = np.stack(np.meshgrid(*[np.arange(n)] * len(free), indexing="ij"), axis=-1)
    ends = every.reshape(-1, len(free))
    starts = ends + np.asarray(free, dtype=np.int64)
    first = np.column_stack([np.zeros(len(ends), dtype=np.int64), starts])
    last = np.column_stack([ends, np.full(len(ends), n - 1)])
    return np.asarray(ends[np.all(last - first + 1 >= minimum, axis=1)])


def _solved(design: Floats, wanted: Floats) -> tuple[Floats, Floats]:
    """(m, k) parameters of least squares for each of m designs, (m, n, k), and (m,) their losses."""
    scale = np.linalg.norm(design, axis=1, keepdims=True)
    scaled = design / scale
    normal = np.matmul(scaled.transpose(0, 2, 1), scaled) + 1e-14 * np.eye(design.shape[2])
    try:
        values = np.linalg.solve(normal, (scaled.transpose(0, 2, 1) @ wanted)[..., None])
    except np.linalg.LinAlgError:
        raise UserError(UNDETERMINED) from None
    losses = np.sum((np.matmul(scaled, values)[..., 0] - wanted) ** 2, axis=1)
    return values[..., 0] / scale[:, 0], losses


def _apart_s(values: Floats, knots: Floats, free: Sequence[bool], place: int, at: Floats) -> Floats:
    """How far above the line before a free knot the one behind it is, both continued to ``at`` bytes."""
    step = len(free) + 2 + sum(free[:place])
    bend = values[..., place + 2] - values[..., place + 1]
    return np.asarray(values[..., step] + bend * (at - knots[..., place]))
