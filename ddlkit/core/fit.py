"""Fit costs of messages and selections to measured times by relative error, and say how sure the fit is.

Every form here is linear in its parameters once its breakpoints are chosen, so a fit is a weighted linear
least squares with weights 1/t (an error of 10% counts the same at 1 KiB and at 1 GiB), and breakpoints are
found by trying every gap between measured sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core import units
from ddlkit.core.cost import (
    FORMS,
    AlphaBeta,
    MessageCost,
    Piecewise,
    Samples,
    Segments,
    Table,
    cost_from_dict,
)
from ddlkit.core.errors import UserError
from ddlkit.core.form import Form, parameters
from ddlkit.core.selection import (
    SELECTION_FORMS,
    DensityLog,
    Log,
    Scan,
    SelectionCost,
    SelectionTable,
)

C = TypeVar("C", MessageCost, SelectionCost)
Floats = NDArray[np.float64]
Columns = tuple[Floats, ...]

PIECES = 3
"""Linear pieces of a ``segments`` fit; each must hold at least MIN_SIZES_PER_PIECE sizes."""
MIN_SIZES_PER_PIECE = 3


@dataclass(frozen=True, eq=False)
class Fit(Generic[C]):
    """A cost, and how far to trust it.

    names, values, standard_errors : (k,) parameters; standard errors hold for given breakpoints
    draws : B costs fitted to bootstrap resamples of the repeats at each point
    at, seconds : rows fitted on, (n,) each; ``at`` is what the cost is a function of: (bytes,) of a
        message, (elements, density) of a selection
    relative_residuals : (n,) (fitted - measured) / measured
    leverage : (n,) weight of each row on its own fitted value, from 0 to 1
    """

    cost: C
    names: tuple[str, ...]
    values: Floats
    standard_errors: Floats
    draws: tuple[C, ...]
    at: Columns
    seconds: Floats
    relative_residuals: Floats
    leverage: Floats

    @property
    def bytes(self) -> Floats:
        """(n,) sizes of the messages, or elements of the selections, that it was fitted on."""
        return self.at[0]

    def interval(self, *at: ArrayLike, level: float = 0.95) -> tuple[Floats, Floats]:
        """(lower, upper) bootstrap interval of the fitted time ``at`` bytes, or elements and density."""
        times = np.array(
            [draw(*(np.asarray(column, float) for column in at)) for draw in self.draws]
        )
        tail = (1 - level) / 2
        return np.quantile(times, tail, axis=0), np.quantile(times, 1 - tail, axis=0)

    def to_dict(self) -> dict[str, Any]:
        """The cost's JSON with a summary of the fit and its draws, which ``costs_from_dict`` reads back."""
        summary = {
            "rows": len(self.seconds),
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
Fitter = Callable[..., Fitted]
"""Columns of what the cost is a function of, then seconds, to the fitted parameters."""


@dataclass(frozen=True)
class _Method:
    """How the form ``kind`` is fitted: by a fitter, from at least ``least`` distinct sizes.

    options : keywords of the fitter by the text after the form's colon; None if there must be none
    """

    kind: Callable[..., Any]
    fitter: Fitter
    least: int
    options: Callable[[str], dict[str, Any]] | None = None


_METHODS: dict[type[Form], _Method] = {}


def fits(
    kind: type[Form], least: int, options: Callable[[str], dict[str, Any]] | None = None
) -> Callable[[Fitter], Fitter]:
    """Decorate the function that fits the form ``kind``: see `_Method`."""

    def register(fitter: Fitter) -> Fitter:
        _METHODS[kind] = _Method(kind, fitter, least, options)
        return fitter

    return register


def fitted_forms(forms: Mapping[str, type[Form]]) -> tuple[str, ...]:
    """Names of those forms that can be fitted to measured times."""
    return tuple(name for name, kind in forms.items() if kind in _METHODS)


def _method(form: str, forms: Mapping[str, Any]) -> _Method:
    """The method that a form's name asks for, what stands behind its colon included."""
    name, colon, text = form.partition(":")
    if name not in fitted_forms(forms):
        raise UserError(f"unknown cost form {form!r}: use one of {', '.join(fitted_forms(forms))}")
    method = _METHODS[forms[name]]
    if not colon:
        return method
    if method.options is None:
        raise UserError(f"cost form {form!r}: write {name}, nothing behind it")
    return replace(method, fitter=partial(method.fitter, **method.options(text)))


def _straight(sizes: Floats) -> Floats:
    return np.column_stack([np.ones_like(sizes), sizes])


def _linear_in_parameters(kind: type[Form]) -> Fitter:
    """Of a form without breakpoints: a column of the design is the form with one parameter 1, others 0."""
    names = parameters(kind)

    def fitter(*columns: Floats) -> Fitted:
        *at, seconds = columns
        units: list[Any] = [
            kind(**dict(zip(names, unit, strict=True))) for unit in np.eye(len(names))
        ]
        line = _least_squares(np.column_stack([unit(*at) for unit in units]), seconds)
        values = dict(zip(names, line.values.tolist(), strict=True))
        return values, names, line.values, np.sqrt(np.diag(line.covariance)), line.leverage

    return fitter


for _kind in (AlphaBeta, DensityLog, Log, Scan):
    fits(_kind, least=3)(_linear_in_parameters(_kind))


def _medians(points: Floats, seconds: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """(n, k) points to those that differ, (k', k), with their medians, standard errors, and (n,) leverage."""
    distinct, which = np.unique(points, axis=0, return_inverse=True)
    groups = [seconds[which.ravel() == k] for k in range(len(distinct))]
    medians = np.array([np.median(group) for group in groups])
    # The median of a normal sample spreads 1.2533 times as much as its mean.
    errors = np.array(
        [1.2533 * group.std(ddof=min(1, group.size - 1)) / group.size**0.5 for group in groups]
    )
    leverage = 1.0 / np.array([group.size for group in groups])[which.ravel()]
    return distinct, medians, errors, leverage


@fits(Table, least=2)
def _fit_table(sizes: Floats, seconds: Floats) -> Fitted:
    """The median of each size; its standard error from the spread of the repeats."""
    points, medians, errors, leverage = _medians(sizes[:, None], seconds)
    grid = points[:, 0].tolist()
    names = tuple(f"seconds[{int(size)}]" for size in grid)
    return {"bytes": grid, "seconds": medians.tolist()}, names, medians, errors, leverage


@fits(SelectionTable, least=2)
def _fit_selection_table(elements: Floats, density: Floats, seconds: Floats) -> Fitted:
    """The median at each size and density, which must make a full grid."""
    points, medians, errors, leverage = _medians(np.column_stack([density, elements]), seconds)
    rows, columns = np.unique(points[:, 0]), np.unique(points[:, 1])
    if len(points) != rows.size * columns.size:
        raise UserError(
            f"{len(points)} points are not the {rows.size} densities x {columns.size} sizes of a table: "
            "measure every size at every density"
        )
    names = tuple(f"seconds[{rho:g},{int(d)}]" for rho, d in points)
    grid = medians.reshape(rows.size, columns.size).tolist()
    values = {"elements": columns.tolist(), "density": rows.tolist(), "seconds": grid}
    return values, names, medians, errors, leverage


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


@fits(Piecewise, least=5, options=lambda text: {"threshold_bytes": float(units.parse_bytes(text))})
def _fit_piecewise(sizes: Floats, seconds: Floats, threshold_bytes: float | None = None) -> Fitted:
    """With the threshold that is given, or else with the one of least loss."""
    if threshold_bytes is None:
        breaks, lines = _best_pieces((_log2, _linear), sizes, seconds, 2)
    else:
        breaks, small = np.array([threshold_bytes]), sizes < threshold_bytes
        counts = np.unique(sizes[small]).size, np.unique(sizes[~small]).size
        if min(counts) < 2:
            raise UserError(
                f"a threshold of {units.format_bytes(threshold_bytes)} has {counts[0]} sizes below and "
                f"{counts[1]} above: each piece needs 2"
            )
        pieces = (_log2, small), (_linear, ~small)
        lines = [_least_squares(design(sizes[here]), seconds[here]) for design, here in pieces]
    values, errors, leverage = _joined(lines)
    names = ("log_slope_s", "log_intercept_s", "slope_s_per_byte", "intercept_s")
    parameters = dict(zip(names, values.tolist(), strict=True))
    return {"threshold_bytes": float(breaks[0]), **parameters}, names, values, errors, leverage


@fits(Segments, least=MIN_SIZES_PER_PIECE)
def _fit_segments(sizes: Floats, seconds: Floats) -> Fitted:
    """As many pieces as the sizes can carry, at most PIECES."""
    pieces = max(1, min(PIECES, np.unique(sizes).size // MIN_SIZES_PER_PIECE))
    breaks, lines = _best_pieces((_straight,) * pieces, sizes, seconds, MIN_SIZES_PER_PIECE)
    values, errors, leverage = _joined(lines)
    names = tuple(f"{name}[{k}]" for k in range(pieces) for name in ("alpha_s", "beta_s_per_byte"))
    parameters = {"breaks_bytes": breaks.tolist(), "alpha_s": values[::2].tolist()}
    return {**parameters, "beta_s_per_byte": values[1::2].tolist()}, names, values, errors, leverage


def _require_sizes(form: str, method: _Method, sizes: Floats) -> None:
    distinct = np.unique(sizes).size
    if distinct < method.least:
        raise UserError(
            f"a {form} fit needs at least {method.least} distinct sizes, got {distinct}"
        )


def _checked(
    form: str, method: _Method, *given: tuple[str, str, ArrayLike]
) -> tuple[Columns, Floats]:
    """(singular, plural, values) of each column, times last; sorted by the columns before the times."""
    columns = [np.asarray(values, dtype=float).ravel() for _, _, values in given]
    for (one, many, _), column in zip(given, columns, strict=True):
        if column.shape != columns[-1].shape:
            raise UserError(
                f"{column.size} {many} but {columns[-1].size} times: give one time a {one}"
            )
        wrong = np.flatnonzero(~(np.isfinite(column) & (column > 0)))
        if wrong.size:
            raise UserError(
                f"row {wrong[0]}: {one} is {column[wrong[0]]:g}: must be finite and above zero"
            )
    _require_sizes(form, method, columns[0])
    order = np.lexsort(columns[-2::-1])
    *at, times = (column[order] for column in columns)
    return tuple(at), times


def fit(
    form: str,
    n_bytes: ArrayLike,
    seconds: ArrayLike,
    *,
    collective: str = "all_reduce",
    workers: int | None = None,
    algorithm: str | None = None,
    samples: Samples | None = None,
    draws: int = 200,
    seed: int = 0,
) -> Fit[MessageCost]:
    """Fit ``form`` ("alpha_beta", "piecewise", "segments", "table") to raw samples (repeats allowed).

    "piecewise:45KB" has its threshold there, "piecewise" where the loss is least.
    samples : of how many messages in a row each sample is the mean, by size; None: of one

    >>> found = fit("alpha_beta", [0.5e6, 1e6, 2e6], [0.75, 1.0, 1.5])
    >>> round(found.cost.alpha_s, 6), round(found.cost.beta_s_per_byte * 1e6, 6)
    (0.5, 0.5)

    Raises UserError for degenerate data: too few distinct sizes, zero, negative or non-finite entries.
    """
    method = _method(form, FORMS)
    at, times = _checked(form, method, ("size", "sizes", n_bytes), ("time", "times", seconds))
    known: dict[str, Any] = {"collective": collective, "workers": workers, "algorithm": algorithm}
    return _fit(method, at, times, {**known, "samples": samples}, draws, seed)


def fit_selection(
    form: str,
    elements: ArrayLike,
    density: ArrayLike,
    seconds: ArrayLike,
    *,
    operation: str | None = None,
    device: str | None = None,
    draws: int = 200,
    seed: int = 0,
) -> Fit[SelectionCost]:
    """Fit ``form`` ("density_log", "log", "scan", "table") to raw samples of selections, as `fit` does.

    Raises UserError for degenerate data, for a density above 1, and for a table without a full grid.
    """
    method = _method(form, SELECTION_FORMS)
    at, times = _checked(
        form,
        method,
        ("size", "sizes", elements),
        ("density", "densities", density),
        ("time", "times", seconds),
    )
    if at[1].max() > 1:
        raise UserError(f"density is {at[1].max():g}: must be at most 1")
    return _fit(method, at, times, {"operation": operation, "device": device}, draws, seed)


def _fit(
    method: _Method, at: Columns, times: Floats, known: dict[str, Any], draws: int, seed: int
) -> Fit[Any]:
    """``at``, ``times`` : checked and sorted; ``known`` : what the cost holds for."""
    values, names, estimates, errors, leverage = method.fitter(*at, times)
    cost = method.kind(**values, **known)
    drawn = tuple(
        method.kind(**method.fitter(*at, times[rows])[0], **known)
        for rows in _resamples(at, draws, np.random.default_rng(seed))
    )
    residuals = cost(*at) / times - 1
    return Fit(cost, names, estimates, errors, drawn, at, times, residuals, leverage)


def _resamples(at: Columns, draws: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Row numbers of bootstrap samples, drawn with replacement at each point so that none is lost."""
    _, starts, counts = np.unique(np.stack(at), axis=1, return_index=True, return_counts=True)
    first, count = np.repeat(starts, counts), np.repeat(counts, counts)
    return [first + rng.integers(0, count) for _ in range(draws)]


def held_out_errors(form: str, n_bytes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    """Leave one size out: (sizes, signed relative error of each size's median, fitted without it).

    Only inner sizes are left out: at the ends a fit would have to extrapolate.
    """
    found = fit(form, n_bytes, seconds, draws=0)
    (sizes,), errors = _held_out(form, _method(form, FORMS), found)
    return sizes, errors


def unseen_errors(
    make: Callable[[Floats, Floats], MessageCost],
    n_bytes: ArrayLike,
    seconds: ArrayLike,
    at_bytes: ArrayLike,
    at_seconds: ArrayLike,
) -> tuple[Floats, Floats]:
    """Predict another run's samples, each size by a cost made without that size.

    make : (sizes, seconds) of samples -> cost, as ``lambda *rows: fit("table", *rows, draws=0).cost``
    n_bytes, seconds : samples to make it from; at_bytes, at_seconds : the other run's

    Returns (k,) the other run's distinct sizes, and the signed relative error of its median at each.
    """
    sizes, times = np.asarray(n_bytes, float), np.asarray(seconds, float)
    others, other_times = np.asarray(at_bytes, float), np.asarray(at_seconds, float)
    distinct = np.unique(others)
    whole = make(sizes, times)
    errors = []
    for size in distinct:
        kept = sizes != size
        cost = whole if kept.all() else make(sizes[kept], times[kept])
        errors.append(cost(float(size)) / np.median(other_times[others == size]) - 1)
    return distinct, np.array(errors)


def _held_out(form: str, method: _Method, found: Fit[Any]) -> tuple[Columns, Floats]:
    """Leave one size (the first column) out at a time: the inner points, and the error at each."""
    sizes = found.at[0]
    points, medians, _, _ = _medians(np.column_stack(found.at), found.seconds)
    inner = np.unique(sizes)[1:-1]
    errors = [np.empty(0)]
    for size in inner:
        rest, here = sizes != size, points[:, 0] == size
        _require_sizes(form, method, sizes[rest])
        kept = (column[rest] for column in (*found.at, found.seconds))
        cost = method.kind(**method.fitter(*kept)[0])
        errors.append(cost(*points[here].T) / medians[here] - 1)
    return tuple(points[np.isin(points[:, 0], inner)].T), np.concatenate(errors)


@dataclass(frozen=True, eq=False)
class Judged:
    """A fit of a selection cost, and how it does where it was not fitted.

    elements, density, held_out : (k,) each inner size at each density, and the signed relative error
        there of the form fitted without that size
    """

    fit: Fit[SelectionCost]
    elements: Floats
    density: Floats
    held_out: Floats


def judge_selections(
    elements: ArrayLike,
    density: ArrayLike,
    seconds: ArrayLike,
    forms: Sequence[str] = (),
    **options: Any,
) -> dict[str, Judged]:
    """Every form fitted to the same measured selections, with its held-out error by size.

    elements, density, seconds : (n,) raw samples; forms : by default all that can be fitted
    options : go to `fit_selection`, which raises
    """
    judged = {}
    for form in forms or fitted_forms(SELECTION_FORMS):
        found = fit_selection(form, elements, density, seconds, **options)
        (sizes, densities), errors = _held_out(form, _method(form, SELECTION_FORMS), found)
        judged[form] = Judged(found, sizes, densities, errors)
    return judged
