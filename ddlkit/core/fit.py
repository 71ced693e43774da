"""Fit message costs to measured times by relative error, and say how sure the fit is.

Every form here is linear in its parameters once its breakpoints are chosen, so a fit is a weighted linear
least squares with weights 1/t (an error of 10% counts the same at 1 KiB and at 1 GiB), and breakpoints are
found by trying every gap between measured sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import AlphaBeta, MessageCost, Piecewise, Segments, Table, cost_from_dict
from ddlkit.core.errors import UserError

Floats = NDArray[np.float64]

PIECES = 3
"""Linear pieces of a ``segments`` fit; each must hold at least MIN_SIZES_PER_PIECE sizes."""
MIN_SIZES_PER_PIECE = 3


@dataclass(frozen=True, eq=False)
class Fit:
    """A cost, and how far to trust it.

    names, values, standard_errors : (k,) parameters; standard errors hold for given breakpoints
    draws : B costs fitted to bootstrap resamples of the repeats within each size
    bytes, seconds : (n,) rows fitted on; relative_residuals : (n,) (fitted - measured) / measured
    leverage : (n,) weight of each row on its own fitted value, from 0 to 1
    """

    cost: MessageCost
    names: tuple[str, ...]
    values: Floats
    standard_errors: Floats
    draws: tuple[MessageCost, ...]
    bytes: Floats
    seconds: Floats
    relative_residuals: Floats
    leverage: Floats

    def interval(self, n_bytes: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
        """(lower, upper) bootstrap interval of the fitted time at ``n_bytes``."""
        times = np.array([draw(np.asarray(n_bytes, float)) for draw in self.draws])
        tail = (1 - level) / 2
        return np.quantile(times, tail, axis=0), np.quantile(times, 1 - tail, axis=0)

    def to_dict(self) -> dict[str, Any]:
        """The cost's JSON with a summary of the fit and its draws, which ``costs_from_dict`` reads back."""
        summary = {
            "rows": len(self.bytes),
            "median_abs_relative_error": float(np.median(np.abs(self.relative_residuals))),
            "max_abs_relative_error": float(np.max(np.abs(self.relative_residuals))),
            "max_leverage": float(np.max(self.leverage)),
            "standard_errors": dict(zip(self.names, self.standard_errors.tolist(), strict=True)),
            "draws": [draw.to_dict() for draw in self.draws],
        }
        return {**self.cost.to_dict(), "fit": summary}


def costs_from_dict(description: dict[str, Any]) -> tuple[MessageCost, list[MessageCost]]:
    """The cost, and the bootstrap draws that came with it (none for a cost written by hand)."""
    fitted = description.get("fit", {}) if isinstance(description, dict) else {}
    return cost_from_dict(description), [cost_from_dict(draw) for draw in fitted.get("draws", [])]


@dataclass(frozen=True, eq=False)
class _Line:
    """A weighted linear least squares: design (n, k), values (k,), covariance (k, k), leverage (n,)."""

    design: Floats
    values: Floats
    loss: float
    covariance: Floats
    leverage: Floats


def _least_squares(design: Floats, seconds: Floats) -> _Line:
    """Minimise sum(((design @ values - seconds) / seconds)**2)."""
    weighted = design / seconds[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    if np.any(scale == 0):
        raise UserError("the sizes do not determine the parameters: measure more distinct sizes")
    basis, _, rank, _ = np.linalg.lstsq(weighted / scale, np.ones(len(seconds)), rcond=None)
    if rank < design.shape[1]:
        raise UserError("the sizes do not determine the parameters: measure more distinct sizes")
    values = basis / scale
    loss = float(np.sum((weighted @ values - 1) ** 2))
    inverse = np.linalg.inv((weighted / scale).T @ (weighted / scale)) / np.outer(scale, scale)
    leverage = np.einsum("ij,jk,ik->i", weighted, inverse, weighted)
    freedom = max(len(seconds) - design.shape[1], 1)
    return _Line(design, values, loss, inverse * loss / freedom, leverage)


Fitted = tuple[dict[str, Any], tuple[str, ...], Floats, Floats, Floats]
"""cost parameters, names, values, standard errors, leverage"""


def _straight(sizes: Floats) -> Floats:
    return np.column_stack([np.ones_like(sizes), sizes])


def _fit_alpha_beta(sizes: Floats, seconds: Floats) -> Fitted:
    line = _least_squares(_straight(sizes), seconds)
    names = ("alpha_s", "beta_s_per_byte")
    parameters = dict(zip(names, line.values.tolist(), strict=True))
    return parameters, names, line.values, np.sqrt(np.diag(line.covariance)), line.leverage


def _fit_table(sizes: Floats, seconds: Floats) -> Fitted:
    """The median of each size; its standard error from the spread of the repeats."""
    grid = np.unique(sizes)
    groups = [seconds[sizes == size] for size in grid]
    medians = np.array([np.median(group) for group in groups])
    # The median of a normal sample spreads 1.2533 times as much as its mean.
    errors = np.array(
        [1.2533 * group.std(ddof=min(1, group.size - 1)) / group.size**0.5 for group in groups]
    )
    counts = dict(zip(grid.tolist(), [group.size for group in groups], strict=True))
    leverage = np.array([1.0 / counts[size] for size in sizes.tolist()])
    names = tuple(f"seconds[{int(size)}]" for size in grid)
    return {"bytes": grid.tolist(), "seconds": medians.tolist()}, names, medians, errors, leverage


def _log2(sizes: Floats) -> Floats:
    return np.column_stack([np.log2(sizes), np.ones_like(sizes)])


def _linear(sizes: Floats) -> Floats:
    return np.column_stack([sizes, np.ones_like(sizes)])


def _best_pieces(
    designs: Sequence[Callable[[Floats], Floats]], sizes: Floats, seconds: Floats, minimum: int
) -> tuple[Floats, list[_Line]]:
    """The breakpoints (geometric means between neighbouring sizes) of least total loss, and the pieces."""
    grid = np.unique(sizes)
    cache: dict[tuple[Callable[[Floats], Floats], int, int], _Line] = {}

    def piece(which: int, start: int, end: int) -> _Line:
        key = (designs[which], start, end)
        if key not in cache:
            inside = (sizes >= grid[start]) & (sizes <= grid[end - 1])
            cache[key] = _least_squares(designs[which](sizes[inside]), seconds[inside])
        return cache[key]

    best: tuple[float, tuple[int, ...], list[_Line]] | None = None
    for cuts in combinations(range(minimum, grid.size - minimum + 1), len(designs) - 1):
        bounds = (0, *cuts, grid.size)
        if min(np.diff(bounds)) < minimum:
            continue
        lines = [piece(k, bounds[k], bounds[k + 1]) for k in range(len(designs))]
        loss = sum(line.loss for line in lines)
        if best is None or loss < best[0]:
            best = (loss, cuts, lines)
    if best is None:
        needed = minimum * len(designs)
        raise UserError(
            f"{len(designs)} pieces need at least {needed} distinct sizes, got {grid.size}"
        )
    breaks = np.array([np.sqrt(grid[cut - 1] * grid[cut]) for cut in best[1]])
    return breaks, best[2]


def _joined(lines: Sequence[_Line]) -> tuple[Floats, Floats, Floats]:
    """Values, standard errors and leverage of several pieces, one after the other."""
    values = np.concatenate([line.values for line in lines])
    errors = np.concatenate([np.sqrt(np.maximum(np.diag(line.covariance), 0)) for line in lines])
    return values, errors, np.concatenate([line.leverage for line in lines])


def _fit_piecewise(sizes: Floats, seconds: Floats) -> Fitted:
    breaks, lines = _best_pieces((_log2, _linear), sizes, seconds, 2)
    values, errors, leverage = _joined(lines)
    names = ("log_slope_s", "log_intercept_s", "slope_s_per_byte", "intercept_s")
    parameters = dict(zip(names, values.tolist(), strict=True))
    return {"threshold_bytes": float(breaks[0]), **parameters}, names, values, errors, leverage


def _fit_segments(sizes: Floats, seconds: Floats) -> Fitted:
    """As many pieces as the sizes can carry, at most PIECES."""
    pieces = max(1, min(PIECES, np.unique(sizes).size // MIN_SIZES_PER_PIECE))
    breaks, lines = _best_pieces((_straight,) * pieces, sizes, seconds, MIN_SIZES_PER_PIECE)
    values, errors, leverage = _joined(lines)
    names = tuple(f"{name}[{k}]" for k in range(pieces) for name in ("alpha_s", "beta_s_per_byte"))
    parameters = {"breaks_bytes": breaks.tolist(), "alpha_s": values[::2].tolist()}
    return {**parameters, "beta_s_per_byte": values[1::2].tolist()}, names, values, errors, leverage


_FITTERS: dict[str, tuple[type[MessageCost], Callable[[Floats, Floats], Fitted], int]] = {
    "alpha_beta": (AlphaBeta, _fit_alpha_beta, 3),
    "table": (Table, _fit_table, 2),
    "piecewise": (Piecewise, _fit_piecewise, 5),
    "segments": (Segments, _fit_segments, MIN_SIZES_PER_PIECE),
}
"""Form -> cost class, fitter, least number of distinct sizes."""


def _checked(form: str, n_bytes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    if form not in _FITTERS:
        raise UserError(f"unknown cost form {form!r}: use one of {', '.join(_FITTERS)}")
    sizes, times = (
        np.asarray(n_bytes, dtype=float).ravel(),
        np.asarray(seconds, dtype=float).ravel(),
    )
    if sizes.shape != times.shape:
        raise UserError(f"{sizes.size} sizes but {times.size} times: give one time a size")
    for name, values in (("size", sizes), ("time", times)):
        wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if wrong.size:
            raise UserError(
                f"row {wrong[0]}: {name} is {values[wrong[0]]:g}: must be finite and above zero"
            )
    least, distinct = _FITTERS[form][2], np.unique(sizes).size
    if distinct < least:
        raise UserError(f"a {form} fit needs at least {least} distinct sizes, got {distinct}")
    order = np.argsort(sizes, kind="stable")
    return sizes[order], times[order]


def fit(
    form: str,
    n_bytes: ArrayLike,
    seconds: ArrayLike,
    *,
    collective: str = "all_reduce",
    workers: int | None = None,
    algorithm: str | None = None,
    draws: int = 200,
    seed: int = 0,
) -> Fit:
    """Fit ``form`` ("alpha_beta", "piecewise", "segments", "table") to raw samples (repeats allowed).

    Raises UserError for degenerate data: too few distinct sizes, zero, negative or non-finite entries.
    """
    sizes, times = _checked(form, n_bytes, seconds)
    kind, fitter, _ = _FITTERS[form]
    known: dict[str, Any] = {"collective": collective, "workers": workers, "algorithm": algorithm}
    parameters, names, values, errors, leverage = fitter(sizes, times)
    cost = kind(**parameters, **known)
    resamples = _resamples(sizes, draws, np.random.default_rng(seed))
    drawn = tuple(kind(**fitter(sizes, times[rows])[0], **known) for rows in resamples)
    residuals = cost(sizes) / times - 1
    return Fit(cost, names, values, errors, drawn, sizes, times, residuals, leverage)


def _resamples(sizes: Floats, draws: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Row numbers of bootstrap samples, drawn with replacement within each size so that none is lost."""
    _, starts, counts = np.unique(sizes, return_index=True, return_counts=True)
    first, count = np.repeat(starts, counts), np.repeat(counts, counts)
    return [first + rng.integers(0, count) for _ in range(draws)]


def held_out_errors(form: str, n_bytes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    """Leave one size out: (sizes, signed relative error of each size's median, fitted without it).

    Only inner sizes are left out: at the ends a fit would have to extrapolate.
    """
    sizes, times = _checked(form, n_bytes, seconds)
    grid = np.unique(sizes)[1:-1]
    errors = []
    for size in grid:
        rest = sizes != size
        cost = fit(form, sizes[rest], times[rest], draws=0).cost
        errors.append(cost(float(size)) / float(np.median(times[~rest])) - 1)
    return grid, np.array(errors)
