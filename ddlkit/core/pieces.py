"""How each form of cost is fitted: straight pieces by least squares, tables by medians.

Errors are relative, so that 10% count the same at 1 KiB and at 1 GiB, unless a variant
of a line counts seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
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

MOST_PIECES = 3
"""The most pieces of a fit of segments."""
SIZES_PER_PIECE = 3
"""The least number of distinct sizes in each piece of a fit of segments."""
LINES = ("relative", "least_squares", "medians", "ends")
"""The ways to lay a straight line through messages, as in "alpha_beta:ends".

``relative`` is least squares of relative errors. ``least_squares`` and ``medians`` are
least squares in seconds, through every sample or through the median of every size.
``ends`` passes through the medians of the smallest and the largest size.
"""

Design = Callable[[Floats], Floats]
"""From sizes, shape (n,), to a matrix, shape (n, 2).

The product of the matrix and the parameters is the time.
"""
Fitter = Callable[..., dict[str, Any]]
"""From sizes and seconds, both of shape (n,), to the fitted parameters by name."""

RUNS_AT_ONCE = 128
"""How many runs are computed in one matrix. Its size limits the memory."""


# -- least squares -----------------------------------------------------------------


def least_squares(
    design: Floats, seconds: Floats, unit_s: Floats | None = None
) -> Floats:
    """Return the parameters with the least sum of squared errors.

    Parameters
    ----------
    design : ndarray, shape (n, k)
        The matrix whose product with the parameters is the predicted time.
    seconds : ndarray, shape (n,)
        The measured times.
    unit_s : ndarray, shape (n,), optional
        The unit in which each error counts. By default this is the measured time, so
        that errors are relative.

    Returns
    -------
    ndarray, shape (k,)
        The values with the least ``sum(((design @ values - seconds) / unit_s)**2)``.

    Raises
    ------
    UserError
        If the sizes do not determine all parameters.

    Examples
    --------
    >>> sizes = np.array([1.0, 2.0, 3.0])
    >>> least_squares(straight(sizes), 5 + 2 * sizes).round(6).tolist()
    [5.0, 2.0]
    """
    if unit_s is None:
        unit_s = seconds
    # Every row, which stands for one measured time, is divided by its unit.
    weighted = design / unit_s[:, None]
    # Columns differ by many orders of magnitude, such as a constant and bytes. Without a
    # common scale, `lstsq` would take small columns for zero, and find too low a rank.
    scale = np.linalg.norm(weighted, axis=0)
    scaled_values = np.zeros_like(scale)
    rank = 0
    # If a column has only zeros, its scale is 0, and its parameter is not determined. The rank
    # then stays 0, which is refused below.
    if np.all(scale > 0):
        scaled_values, _, rank, _ = np.linalg.lstsq(
            weighted / scale, seconds / unit_s, rcond=None
        )
    if rank < design.shape[1]:
        raise UserError(
            "the sizes do not determine the parameters: measure more distinct sizes"
        )
    return scaled_values / scale


def straight(sizes: Floats) -> Floats:
    """Return the design of a straight line, shape (n, 2): a constant and the size."""
    return np.column_stack([np.ones_like(sizes), sizes])


def grouped(sizes: Floats, seconds: Floats) -> tuple[Floats, list[Floats]]:
    """Return the times at each distinct size.

    Parameters
    ----------
    sizes, seconds : ndarray, shape (n,)
        Raw samples in any order.

    Returns
    -------
    distinct : ndarray, shape (k,)
        The distinct sizes, increasing.
    groups : list of ndarray, length k
        The times at each of them.
    """
    # ``size_index`` has for each sample the index of its size in ``distinct``.
    distinct, size_index, counts = np.unique(
        sizes, return_inverse=True, return_counts=True
    )
    by_size = seconds[np.argsort(size_index, kind="stable")]
    # The times of a size end after as many samples as this size and all smaller ones have.
    # The last end is the end of the array, where nothing is cut.
    ends = np.cumsum(counts)
    return distinct, np.split(by_size, ends[:-1])


def _of_each_group(function: Callable[..., Any], groups: Sequence[Floats]) -> Floats:
    """Apply a function such as np.median to each of the k groups.

    The function must take the keyword ``axis``. The result has the shape (k,).
    """
    # Groups of equal length form one array with a row for each group. To call the
    # function once is many times faster.
    lengths = {group.size for group in groups}
    if len(lengths) == 1:
        return np.asarray(function(np.stack(groups), axis=1))
    return np.array([function(group, axis=0) for group in groups])


# -- where pieces begin ------------------------------------------------------------


def _losses(x: Floats, y: Floats, weight: Floats, least: int) -> Floats:
    """Return the loss of the best line through each run of points.

    Parameters
    ----------
    x, y, weight : ndarray, shape (n,)
        The points, and the weight of the squared error of each.
    least : int
        The least number of points of a run.

    Returns
    -------
    ndarray, shape (n + 1, n + 1)
        The element [i, j] is the loss of the run of points i to j - 1: the weighted sum
        of squared errors. Runs of fewer than ``least`` points have an infinite loss, also
        the empty ones with j <= i.
    """
    n = x.size
    losses = np.full((n + 1, n + 1), np.inf)
    # All runs that begin at one of the points first to stop - 1 are computed at once.
    # There are RUNS_AT_ONCE such points, which limits the memory.
    for first in range(0, n, RUNS_AT_ONCE):
        stop = min(first + RUNS_AT_ONCE, n)
        # In these matrices, the element [e, b] belongs to the run from point first + b to
        # point first + e, both included. With e < b there is no run.
        unexplained = _unexplained(
            x[first:], y[first:], weight[first:], n_begins=stop - first
        )
        # This is e - b + 1, which is 0 or negative where there is no run.
        n_points = 1 + np.arange(n - first)[:, None] - np.arange(stop - first)
        own_losses = np.where(n_points >= least, unexplained, np.inf)
        # In the result, rows are beginnings of runs, hence the transposed matrix. Columns
        # are exclusive ends, so the run that ends with point first + e is in column
        # first + e + 1.
        losses[first:stop, first + 1 :] = own_losses.T
    return losses


def _unexplained(x: Floats, y: Floats, weight: Floats, n_begins: int) -> Floats:
    """Return the residual sum of squares of the best line through each run of points.

    Runs begin at the first ``n_begins`` points, and end at any point.

    Parameters
    ----------
    x, y, weight : ndarray, shape (n,)
        The points, and the weight of the squared error of each.
    n_begins : int
        The number of points at which a run begins, at most n.

    Returns
    -------
    ndarray, shape (n, n_begins)
        The element [j, i] belongs to the run from point i to point j, both included. It
        is 0 if j < i.
    """
    n = x.size
    # In all matrices, column i belongs to the run that begins at point i, and in row j this
    # run has grown up to point j. Points are added one by one (Welford's algorithm), because
    # differences of plain sums would lose the digits of short runs.
    has_begun = np.tri(n, n_begins, dtype=bool)
    own_weight = np.where(has_begun, weight[:, None], 0.0)
    run_weight = np.cumsum(own_weight, axis=0)
    # How far each point is in x and in y from the means of each run before it joins the run.
    off = _off_means(np.stack([x, y]), weight, run_weight)
    off_x = off[:, 0]
    off_y = off[:, 1]
    # The second moments of a run about its means: xx and yy are sums of squares, and xy is the
    # sum of products. When a point joins the run, xy grows by the product off_x * off_y times the
    # factor of the point. In xx and yy, the square of one distance takes the place of the product.
    factor = _moment_factors(own_weight, run_weight)
    xx = np.cumsum(factor * off_x * off_x, axis=0)
    xy = np.cumsum(factor * off_x * off_y, axis=0)
    yy = np.cumsum(factor * off_y * off_y, axis=0)
    # The best line explains xy^2 / xx of the spread yy. If all points of a run have one x,
    # its best line is the mean of y, which explains nothing.
    explained = np.divide(xy * xy, xx, out=np.zeros((n, n_begins)), where=xx > 0)
    # Where a line fits exactly, rounding can make the difference slightly negative.
    return np.maximum(yy - explained, 0.0)


def _moment_factors(own_weight: Floats, run_weight: Floats) -> Floats:
    """Return the factor of each point in the second moments of each run that it joins.

    If a point of weight w joins a run of weight W, each second moment of the run about its
    means grows by w W / (w + W) times the product of two distances of the point from the
    means. The factor is w W / (w + W). For the first point of a run, W is 0, and so is the
    factor.

    Parameters
    ----------
    own_weight : ndarray, shape (n, B)
        The element [j, i] is the weight w of point j if it belongs to run i of B runs, and
        else 0.
    run_weight : ndarray, shape (n, B)
        The element [j, i] is the weight w + W of run i after point j has joined it. It is 0
        where the run has not begun.

    Returns
    -------
    ndarray, shape (n, B)
        The factor of each point in each run, 0 where the run has not begun.
    """
    # W, the weight of a run before a point joins, is its weight after the point before.
    weight_before = np.zeros_like(run_weight)
    weight_before[1:] = run_weight[:-1]
    factors = np.zeros_like(run_weight)
    has_begun = run_weight > 0
    np.divide(own_weight * weight_before, run_weight, out=factors, where=has_begun)
    return factors


def _off_means(points: Floats, weight: Floats, run_weight: Floats) -> Floats:
    """Return how far each point is from the means of each run that it joins.

    There are B runs, and run i begins at point i. All later points join it in their order,
    so each point joins every run that has begun. The sums of squares and products about
    the means of a run grow by squares and products of these distances, times
    `_moment_factors` (Welford's algorithm).

    Parameters
    ----------
    points : ndarray, shape (2, n)
        The coordinates x and y of the points.
    weight : ndarray, shape (n,)
        The weight of each point in the means.
    run_weight : ndarray, shape (n, B)
        The element [j, i] is the weight of the run of points i to j, both included.

    Returns
    -------
    ndarray, shape (n, 2, B)
        The element [j, :, i] is the distance in x and in y of point j from the weighted
        means of points i to j - 1. It is 0 if j < i. The first point of a run has no such
        means. Its element [i, :, i] is the point itself, and does not count, because
        `_moment_factors` has the factor 0 for it.
    """
    n, n_begins = run_weight.shape
    off = np.zeros((n, 2, n_begins))
    # The weighted means of x and y of each run so far, 0 before its first point.
    means = np.zeros((2, n_begins))
    for newest in range(n):
        # The runs that have begun: those that begin at the newest point or before it.
        begun = slice(min(newest + 1, n_begins))
        own_off = points[:, newest, None] - means[:, begun]
        off[newest, :, begun] = own_off
        # Each point moves the means towards itself, by its share of the weight. The share of
        # the first point of a run is 1, which moves the means from 0 to the point itself.
        means[:, begun] += own_off * weight[newest] / run_weight[newest, begun]
    return off


def best_breaks(
    designs: Sequence[Design], sizes: Floats, seconds: Floats, minimum: int
) -> list[float]:
    """Return the breakpoints between pieces with the least squared relative errors.

    Parameters
    ----------
    designs : sequence of callable, length k
        The design of each piece: a column that is constant and one that is not, in either
        order.
    sizes, seconds : ndarray, shape (n,)
        Raw samples.
    minimum : int
        The least number of distinct sizes in each piece.

    Returns
    -------
    list of float, length k - 1
        The geometric means of the sizes on either side of each break.

    Raises
    ------
    UserError
        If there are too few distinct sizes.

    Notes
    -----
    No other breaks have a smaller error. A dynamic programme over pieces combines the
    losses of the best lines through all runs of sizes.
    """
    distinct, groups = grouped(sizes, seconds)
    needed = minimum * len(designs)
    if distinct.size < needed:
        raise UserError(
            f"{len(designs)} pieces need at least {needed} distinct sizes, "
            f"got {distinct.size}"
        )
    # The weight of a size is the sum of 1 / t**2 over its times, so errors are relative.
    mean_s, weight = _means_of_sizes(groups)
    losses_of = {}
    # Pieces of one design have the same losses.
    for design in {*designs}:
        # `_losses` fits lines in the column that is not constant, which may be either of the
        # two. The sum of both columns serves as well: a constant that is added to the variable
        # of a line changes the intercept of the best line, but not its loss.
        variable_plus_constant = design(distinct).sum(axis=1)
        losses_of[design] = _losses(variable_plus_constant, mean_s, weight, minimum)
    losses = [losses_of[design] for design in designs]
    # There is a break before each piece but the first.
    return [
        float(np.sqrt(distinct[start - 1] * distinct[start]))
        for start in _best_starts(losses)
    ]


def _means_of_sizes(groups: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Return a single time that stands for all times of a size, and its weight.

    ``groups`` has the times at each of k sizes. Both results have the shape (k,). The
    single time is the weighted mean. A fit to it has the same losses as a fit to all
    times, but for the scatter of the times about their mean, which no fit changes.
    """
    # Errors are relative, so a time t has the weight 1 / t**2, and the mean with these
    # weights is sum(1 / t) / sum(1 / t**2).
    weight = _of_each_group(_sum_of_inverse_squares, groups)
    mean_s = _of_each_group(_sum_of_inverses, groups) / weight
    return mean_s, weight


def _sum_of_inverse_squares(times: Floats, axis: int) -> Any:
    """Return sum(1 / t**2), the weight of several times of one size."""
    return np.sum(times**-2.0, axis=axis)


def _sum_of_inverses(times: Floats, axis: int) -> Any:
    """Return sum(1 / t), the sum of times t that have the weights 1 / t**2."""
    return np.sum(1 / times, axis=axis)


def _best_starts(losses: Sequence[Floats]) -> list[int]:
    """Return where the second piece and all later ones begin, with the least loss.

    Parameters
    ----------
    losses : sequence of ndarray, shape (n + 1, n + 1), length k
        The losses of each piece over n sizes. The element [i, j] is the loss if the
        piece begins at size i and ends before size j. It is infinite if the piece would
        have too few sizes, and so wherever j <= i.

    Returns
    -------
    list of int, length k - 1
        Indices of sizes, increasing.
    """
    # least_loss[j] is the least loss of the first j sizes if they are divided between the
    # pieces so far. The first piece begins at size 0, so its losses are row 0.
    least_loss = losses[0][0]
    # An array for each further piece. Its element j is the best size i at which the piece
    # begins if it ends before size j.
    best_starts = []
    for loss_of_piece in losses[1:]:
        # If the piece begins at size i, the sizes before i belong to earlier pieces. The
        # rows of ``total`` are i, and the columns are j.
        total = least_loss[:, None] + loss_of_piece
        best_starts.append(total.argmin(axis=0))
        least_loss = total.min(axis=0)

    # Trace the best pieces from the last one back to the second one. The last piece
    # ends after all n sizes. Where a piece begins, the piece before it ends.
    starts = []
    end = len(least_loss) - 1
    for best_start in reversed(best_starts):
        end = int(best_start[end])
        starts.append(end)
    return starts[::-1]


def _refuse_fewer_than_two_sizes(
    sizes: Floats, piece: int, breaks: Sequence[float]
) -> None:
    """Raise UserError if a piece has fewer sizes than the two that a line needs.

    ``sizes`` has the measured sizes of the piece, ``piece`` is its index, and ``breaks``
    has all limits between pieces, which the error names.
    """
    n_sizes = np.unique(sizes).size
    if n_sizes >= 2:
        return
    # ``breaks`` is not empty. Without a break there is a single piece, which has enough
    # sizes, as `best_breaks` has checked.
    limits = [f"{limit:.0f} B" for limit in breaks]
    if piece == 0:
        where = f"below {limits[0]}"
    elif piece == len(breaks):
        where = f"from {limits[-1]} on"
    else:
        where = f"from {limits[piece - 1]} to {limits[piece]}"
    noun = "size was" if n_sizes == 1 else "sizes were"
    raise UserError(
        f"{n_sizes} {noun} measured {where}, and a piece needs two sizes or more: "
        "choose another limit, or measure more sizes there"
    )


def _fitted_pieces(
    designs: Sequence[Design], breaks: Sequence[float], sizes: Floats, seconds: Floats
) -> list[Floats]:
    """Return the two parameters of each piece, fitted between its breaks.

    ``designs`` has the design of each piece: a function from sizes to a matrix, whose product
    with the two parameters is the time. There is one more piece than there are ``breaks``.
    ``sizes``, in bytes, and ``seconds`` have the shape (n,).
    """
    # The index of the piece of each row is the number of breaks up to its size. By "right",
    # a size that equals a break belongs to the piece that begins there.
    piece_of_row = np.searchsorted(breaks, sizes, side="right")
    values = []
    for piece, design in enumerate(designs):
        rows = piece_of_row == piece
        _refuse_fewer_than_two_sizes(sizes[rows], piece, breaks)
        values.append(least_squares(design(sizes[rows]), seconds[rows]))
    return values


# -- forms -------------------------------------------------------------------------


def _linear_in_parameters(kind: type[Form]) -> Fitter:
    """Return the fitter of a form whose time is linear in its parameters.

    An example is alpha + beta * bytes, which is linear in alpha and beta.
    """
    return partial(_fit_linear, kind=kind)


def _fit_linear(sizes: Floats, seconds: Floats, kind: type[Form]) -> dict[str, Any]:
    """Return the parameters of a form by name, if its time is linear in them.

    ``kind`` is the class of the form. Errors are relative.
    """
    design = np.column_stack([term(sizes) for term in _terms(kind)])
    values = least_squares(design, seconds).tolist()
    return dict(zip(parameters(kind), values, strict=True))


@cache
def _terms(kind: type[Form]) -> list[Any]:
    """Return for each parameter the cost in which it is 1 and all others are 0.

    The time of such a cost is the column of the design that belongs to the parameter.
    """
    unit_vectors = np.eye(len(parameters(kind))).tolist()
    return [kind(*unit_vector) for unit_vector in unit_vectors]


def _fit_table(sizes: Floats, seconds: Floats) -> dict[str, Any]:
    """Return the parameters of `Table` by name: distinct sizes and their median times."""
    distinct, groups = grouped(sizes, seconds)
    medians = _of_each_group(np.median, groups)
    return {"bytes": distinct.tolist(), "seconds": medians.tolist()}


def _line(variant: str) -> Fitter:
    """Return the fitter of a straight line by a variant, such as "ends" (see LINES)."""
    if variant not in LINES:
        usable = ", ".join(f"alpha_beta:{known}" for known in LINES)
        raise UserError(
            f"cost form alpha_beta has no variant {variant!r}: use {usable}"
        )
    # By this variant errors are relative to the time, and by all others they are in seconds.
    if variant == "relative":
        return _linear_in_parameters(AlphaBeta)
    return partial(_fit_line_in_seconds, variant=variant)


def _fit_line_in_seconds(
    sizes: Floats, seconds: Floats, variant: str
) -> dict[str, Any]:
    """Return the parameters of `AlphaBeta` by name, fitted with errors in seconds.

    ``variant`` is "least_squares", "medians" or "ends", as LINES describes them.
    """
    points, times_s = _points_of_variant(sizes, seconds, variant)
    # `least_squares` divides the error of each row by a unit. A unit of one second for
    # every row makes errors count in seconds, and not relative to the time. The design
    # matrix `straight` has a constant and the size, whose factors are alpha and beta.
    one_second = np.ones_like(times_s)
    alpha_s, beta = least_squares(straight(points), times_s, one_second).tolist()
    if alpha_s >= 0:
        return {"alpha_s": alpha_s, "beta_s_per_byte": beta}
    # In seconds the errors of the largest messages dominate, and a slight bend there can
    # make the start-up ``alpha_s`` negative. The line is then replaced by the best line
    # through the origin. This line has one parameter, so its design matrix has one column,
    # the sizes.
    (beta,) = least_squares(points[:, None], times_s, one_second).tolist()
    return {"alpha_s": 0.0, "beta_s_per_byte": beta}


def _points_of_variant(
    sizes: Floats, seconds: Floats, variant: str
) -> tuple[Floats, Floats]:
    """Return the sizes and the times of the points to which a line is fitted.

    ``sizes`` and ``seconds`` are all samples. With the variant "least_squares" every
    sample is a point. With "medians" every distinct size is a point, with the median of
    its times. With "ends" only the smallest and the largest of these sizes are points.
    """
    if variant == "least_squares":
        return sizes, seconds
    distinct, groups = grouped(sizes, seconds)
    medians_s = _of_each_group(np.median, groups)
    if variant == "ends":
        first_and_last = [0, -1]
        return distinct[first_and_last], medians_s[first_and_last]
    return distinct, medians_s


# By Eq 18 of "osf" (Liu et al. 2022), the time is a line in log2(size) below a threshold,
# and a line in the size from there on. `straight` has the columns constant and size. The
# parameters of Eq 18 begin with the slope of each piece, so its designs have the two columns
# exchanged.


def _log2_slope_first(sizes: Floats) -> Floats:
    """Return the design of the first piece of Eq 18 of "osf" (Liu et al. 2022).

    Its columns are log2(size), whose factor is the slope, and a constant.
    """
    return straight(np.log2(sizes))[:, ::-1]


def _slope_first(sizes: Floats) -> Floats:
    """Return the design of the second piece of Eq 18 of "osf" (Liu et al. 2022).

    Its columns are the size, whose factor is the slope, and a constant.
    """
    return straight(sizes)[:, ::-1]


def _fit_piecewise(
    sizes: Floats, seconds: Floats, threshold: str = ""
) -> dict[str, Any]:
    """Return the parameters of `Piecewise` by name.

    ``threshold`` is a size such as "45KB". By default ("") it is the threshold with the
    least squared relative errors.
    """
    # Below the threshold the time is a line in log2(size), and from there on in the size.
    designs = (_log2_slope_first, _slope_first)
    if threshold:
        # If the threshold is no size, the error suggests one of the measured sizes, because a
        # threshold outside their range leaves a piece empty.
        distinct_sizes = np.unique(sizes)
        example = f"{distinct_sizes[distinct_sizes.size // 2]:.0f}B"
        threshold_bytes = float(units.parse_bytes(threshold, example=example))
    else:
        # Two pieces have one break between them. Two sizes are enough for the two parameters
        # of a piece.
        (threshold_bytes,) = best_breaks(designs, sizes, seconds, minimum=2)
    small, large = _fitted_pieces(designs, [threshold_bytes], sizes, seconds)
    # The values in the order of the parameters of `Piecewise`: the threshold, then slope
    # and intercept below it, then slope and intercept from it on.
    values = (threshold_bytes, *small.tolist(), *large.tolist())
    return dict(zip(parameters(Piecewise), values, strict=True))


def _piecewise(threshold: str) -> Fitter:
    """Return the fitter of `Piecewise` with a given threshold, such as "45KB"."""
    return partial(_fit_piecewise, threshold=threshold)


def _fit_segments(sizes: Floats, seconds: Floats) -> dict[str, Any]:
    """Return the parameters of `Segments` by name.

    There are as many pieces as sizes allow, at most MOST_PIECES. Each piece is a straight
    line through SIZES_PER_PIECE distinct sizes or more.
    """
    possible = np.unique(sizes).size // SIZES_PER_PIECE
    # With too few sizes for one piece, one is tried nevertheless. The error that
    # `best_breaks` raises says how many sizes it needs.
    designs = [straight] * max(1, min(MOST_PIECES, possible))
    breaks = best_breaks(designs, sizes, seconds, minimum=SIZES_PER_PIECE)
    lines = _fitted_pieces(designs, breaks, sizes, seconds)
    return {
        "breaks_bytes": breaks,
        "alpha_s": [float(alpha_s) for alpha_s, _ in lines],
        "beta_s_per_byte": [float(beta) for _, beta in lines],
    }


METHODS: dict[type[Form], tuple[Fitter, int]] = {
    AlphaBeta: (_linear_in_parameters(AlphaBeta), 3),
    Piecewise: (_fit_piecewise, 5),
    Segments: (_fit_segments, SIZES_PER_PIECE),
    Chords: (_fit_table, 2),
    Table: (_fit_table, 2),
    Log: (_linear_in_parameters(Log), 3),
    Scan: (_linear_in_parameters(Scan), 3),
}
"""How each form is fitted, and the least number of distinct sizes that this needs.

The simplest form comes first.
"""
VARIANTS: dict[type[Form], Callable[[str], Fitter]] = {
    AlphaBeta: _line,
    Piecewise: _piecewise,
}
"""How a form is fitted with a text behind its name, as in "piecewise:45KB"."""
