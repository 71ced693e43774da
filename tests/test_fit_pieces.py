"""Laws of pieces that join and of smooth tables: continuous, exact where the truth is, never worse."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ddlkit import store
from ddlkit.core.cost import Chords, Curve, Piecewise, Segments, Table
from ddlkit.core.errors import UserError
from ddlkit.core.fit import choose_form, fit, held_out_errors
from ddlkit.core.pieces import joined
from ddlkit.formats import messages

LOGS = sorted((store.ROOT / "data/external/abci").glob("allreduce_*.log.gz"))
SIZES = np.geomspace(1024, 64 * 2**20, 17).round()


def bent(knots: list[float], slopes: list[float], start_s: float = 1e-4) -> Segments:
    """Straight pieces that join."""
    alpha = np.cumsum([start_s, *-np.diff(slopes) * np.array(knots)])
    return Segments(np.array(knots), alpha, np.array(slopes))


def gaps(cost: Segments | Piecewise) -> np.ndarray:
    """How far a cost jumps at each of its breaks, relative to the time there."""
    at = np.atleast_1d(
        cost.breaks_bytes if isinstance(cost, Segments) else np.array(cost.threshold_bytes)
    )
    return np.abs(cost(at * (1 + 1e-12)) / cost(at * (1 - 1e-12)) - 1)


def noisy(seed: int, n: int = 12) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    sizes = np.unique(np.exp(random.uniform(3, 20, n)).round())
    curve = 2e-5 + 1e-9 * sizes + 3e-5 * (sizes > 1e5) + 1e-7 * np.sqrt(sizes)
    return sizes, curve * np.exp(random.normal(0, 0.05, sizes.size))


def loss(found: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.sum((found / seconds - 1) ** 2))


def least_of_grid(
    sizes: np.ndarray, seconds: np.ndarray, pieces: int, minimum: int, logarithmic: bool
) -> float:
    """Least loss of continuous pieces with knots anywhere on a fine grid, each design solved on its own."""
    inside = [
        np.geomspace(*ends, 12 if logarithmic else 20)
        for ends in zip(sizes[:-1], sizes[1:], strict=True)
    ]
    losses = [np.inf]
    for knots in product(np.unique(np.concatenate(inside)), repeat=pieces - 1):
        ends = [0.0, *knots, np.inf]
        counts = [np.sum((sizes >= a) & (sizes <= b)) for a, b in zip(ends, ends[1:], strict=False)]
        if min(counts) < minimum or np.any(np.diff(knots) <= 0):
            continue
        first = np.minimum(sizes, knots[0])
        columns = [np.ones_like(sizes), np.log2(first) if logarithmic else first]
        columns += [np.clip(sizes - a, 0, b - a) for a, b in zip(ends[1:], ends[2:], strict=False)]
        design = np.column_stack(columns) / seconds[:, None]
        design /= np.linalg.norm(design, axis=0)
        values, *_ = np.linalg.lstsq(design, np.ones_like(sizes), rcond=None)
        losses.append(float(np.sum((design @ values - 1) ** 2)))
    return min(losses)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("form", "pieces", "minimum"), [("piecewise:joined", 2, 2), ("segments:joined", 3, 3)]
)
def test_no_continuous_pieces_lose_less(form: str, pieces: int, minimum: int, seed: int) -> None:
    sizes, seconds = noisy(seed, 10 if pieces == 3 else 14)
    if sizes.size < minimum * pieces:
        pytest.skip("sizes fell together")
    found = loss(fit(form, sizes, seconds, draws=0).cost(sizes), seconds)
    least = least_of_grid(sizes, seconds, pieces, minimum, form.startswith("piecewise"))
    assert found <= least * (1 + 1e-9)
    assert least <= found * 1.05, "the grid comes close to what was found"


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.split(".")[0])
def test_pieces_join_on_real_logs_but_for_one_where_one_jump_is_asked_for(path: Path) -> None:
    sizes, seconds, _ = messages.read_bytes_seconds(path, place="out_of_place")
    costs = {
        form: fit(form, sizes, seconds, draws=0).cost
        for form in ("piecewise:joined", "segments:joined", "segments:jump", "segments")
    }
    assert gaps(costs["piecewise:joined"]).max() < 1e-9
    assert gaps(costs["segments:joined"]).max() < 1e-9
    assert np.sum(gaps(costs["segments:jump"]) > 1e-9) <= 1
    lost = [loss(costs[form](sizes), seconds) for form in costs if form != "piecewise:joined"]
    assert lost[2] <= lost[1] * (1 + 1e-9) <= lost[0] * (1 + 2e-9), "who may jump loses no more"


def test_auto_jumps_only_where_it_pays_at_sizes_left_out() -> None:
    """Of forms that do as well it takes those that join."""
    joins, jumps = {"segments:joined": 0.02, "segments:jump": 0.019}, {"segments": 0.019}
    assert choose_form({"alpha_beta": 0.2, **joins, **jumps}) == "segments:joined"
    assert choose_form({"alpha_beta": 0.2, **joins, "segments": 0.01}) == "segments"
    for seed in range(8):
        random = np.random.default_rng(seed)
        truth = bent([3e5, 9e6], [2e-8, 9e-9, 3e-8])
        seconds = truth(SIZES) * np.exp(random.normal(0, 0.01, SIZES.size))
        found = fit("auto", SIZES, seconds, draws=0)
        others = {
            form: float(np.median(np.abs(held_out_errors(form, SIZES, seconds)[1])))
            for form in ("segments:joined", "segments:jump", "segments")
        }
        if found.form in ("segments:jump", "segments"):
            assert others[found.form] < others["segments:joined"] / 1.1


@pytest.mark.parametrize("knots", [[3e5, 9e6], [2**14, 2**22], [5000.0, 7e5]])
def test_the_joins_of_exact_data_are_found_exactly(knots: list[float]) -> None:
    """Between sizes and on a size; also where the truth bends downwards."""
    sizes = np.geomspace(1024, 64 * 2**20, 17)
    for slopes in ([2e-8, 9e-9, 7e-9], [1e-9, 5e-9, 8e-9], [1e-8, 1e-9, 1e-8]):
        truth = bent(knots, slopes, 1e-4)
        cost = fit("segments:joined", sizes, truth(sizes), draws=0).cost
        np.testing.assert_allclose(cost.breaks_bytes, knots, rtol=1e-6)
        np.testing.assert_allclose(cost.beta_s_per_byte, slopes, rtol=1e-6)
        np.testing.assert_allclose(cost(sizes), truth(sizes), rtol=1e-9)
    threshold = knots[0]
    start_s = 2e-5 * np.log2(threshold) + 1e-4 - 8e-9 * threshold
    curved = Piecewise(threshold, 2e-5, 1e-4, 8e-9, start_s)
    found = fit("piecewise:joined", sizes, curved(sizes), draws=0).cost
    assert found.threshold_bytes == pytest.approx(threshold, rel=1e-6)
    np.testing.assert_allclose(found(sizes), curved(sizes), rtol=1e-9)


def test_one_jump_is_found_where_it_is_and_the_other_pieces_join() -> None:
    truth = Segments(
        np.array([1e5, 5e6]),
        np.array([2e-4, 9e-4, 9e-4 - 5e6 * 1.5e-9]),
        np.array([2e-9, 5e-10, 2e-9]),
    )
    cost = fit("segments:jump", SIZES, truth(SIZES), draws=0).cost
    assert SIZES[SIZES < 1e5].max() < cost.breaks_bytes[0] < SIZES[SIZES > 1e5].min()
    assert cost.breaks_bytes[1] == pytest.approx(5e6)
    np.testing.assert_allclose(cost(SIZES), truth(SIZES), rtol=1e-9)


@pytest.mark.parametrize("slopes", [[2e-8, 9e-9, 3e-8], [1e-9, 4e-9, 8e-9]])
def test_what_rises_is_fitted_by_what_rises(slopes: list[float]) -> None:
    """Exact or with noise far below the rise from size to size; falling data are not made to rise."""
    seconds = bent([3e5, 9e6], slopes)(SIZES)
    for seed in range(5):
        scattered = seconds * np.exp(np.random.default_rng(seed).normal(0, 0.002, SIZES.size))
        for form in ("segments:joined", "curve", "chords", "table"):
            grid = np.geomspace(SIZES[0], SIZES[-1], 2000)
            cost = fit(form, SIZES, np.sort(scattered), draws=0).cost
            assert np.all(np.diff(cost(grid)) >= -1e-12 * cost(grid[1:]))
    falls = np.where(np.arange(SIZES.size) == 8, 0.5 * seconds, seconds)
    assert np.any(np.diff(fit("curve", SIZES, falls, draws=0).cost(SIZES)) < 0)


def test_leverage_and_parameters_of_joined_pieces() -> None:
    sizes, seconds = noisy(3, 20)
    for form, free in (("segments:joined", 4), ("segments:jump", 5), ("piecewise:joined", 3)):
        found = fit(form, np.repeat(sizes, 4), np.repeat(seconds, 4), draws=3)
        assert found.leverage.sum() == pytest.approx(free)
        assert len(found.names) == len(found.values) == len(found.standard_errors) == free
        assert found.form == form and len(found.draws) == 3


def test_too_few_sizes_for_pieces_and_unknown_ways_are_told() -> None:
    with pytest.raises(UserError, match="3 pieces need more sizes than 5"):
        joined(np.arange(1.0, 6), np.arange(1.0, 6), 3, 3)
    with pytest.raises(UserError, match="nothing behind it, or joined or jump"):
        fit("segments:smooth", SIZES, SIZES)
    line = fit("segments:joined", SIZES[:4], 1e-3 + 1e-9 * SIZES[:4], draws=0).cost
    assert line.beta_s_per_byte == pytest.approx([1e-9])


# -- smooth tables -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_curve_goes_through_its_table_and_turns_only_where_the_times_do(seed: int) -> None:
    sizes, seconds = noisy(seed, 15)
    curve, table = Curve(sizes, seconds), Table(sizes, seconds)
    np.testing.assert_allclose(curve(sizes), seconds, rtol=1e-12)
    for low, high in zip(range(sizes.size - 1), range(1, sizes.size), strict=True):
        inside = curve(np.geomspace(sizes[low], sizes[high], 50))
        ends = sorted((seconds[low], seconds[high]))
        assert ends[0] * (1 - 1e-9) <= inside.min() and inside.max() <= ends[1] * (1 + 1e-9)
    beyond = np.array([sizes[0] / 2, sizes[0], sizes[-1], 3 * sizes[-1]])
    np.testing.assert_allclose(curve(beyond), table(beyond), rtol=1e-12)
    assert curve.startup_s() == table.startup_s()


def test_a_curve_of_a_power_is_the_power_and_of_a_line_closer_than_its_table() -> None:
    sizes, grid = np.geomspace(1e3, 1e9, 12), np.geomspace(1e3, 1e9, 500)
    np.testing.assert_allclose(Curve(sizes, 1e-6 * sizes**0.7)(grid), 1e-6 * grid**0.7, rtol=1e-9)
    line = lambda at: 1e-3 + 1e-9 * at  # noqa: E731
    off = [np.abs(kind(sizes, line(sizes))(grid) / line(grid) - 1).max() for kind in (Curve, Table)]
    assert off[0] < off[1] / 2


@pytest.mark.parametrize("seed", range(5))
def test_chords_go_through_their_table_and_straight_from_size_to_size(seed: int) -> None:
    sizes, seconds = noisy(seed, 15)
    chords, table = Chords(sizes, seconds), Table(sizes, seconds)
    np.testing.assert_allclose(chords(sizes), seconds, rtol=1e-12)
    middle = (sizes[1:] + sizes[:-1]) / 2
    np.testing.assert_allclose(chords(middle), (seconds[1:] + seconds[:-1]) / 2, rtol=1e-12)
    beyond = np.array([sizes[0] / 2, sizes[0], sizes[-1], 3 * sizes[-1]])
    np.testing.assert_allclose(chords(beyond), table(beyond), rtol=1e-12)
    assert chords.startup_s() == pytest.approx(table.startup_s(), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_chords_are_faster_than_log_log_pieces_where_rates_rise_and_slower_where_they_fall(
    seed: int,
) -> None:
    """A line with a start-up above zero bends upwards in logarithms, one below zero downwards."""
    sizes, seconds = noisy(seed, 15)
    middle = np.sqrt(sizes[1:] * sizes[:-1])
    faster = Chords(sizes, seconds)(middle) < Table(sizes, seconds)(middle)
    starts = seconds[1:] - np.diff(seconds) / np.diff(sizes) * sizes[1:]
    rising = np.diff(seconds) > 0
    assert np.array_equal(faster[rising], starts[rising] > 0) and rising.any()


def test_chords_of_pieces_that_join_at_their_sizes_are_the_pieces() -> None:
    """A line and three joined ones, inside and beyond: what they were drawn from is recovered."""
    for truth in (bent([3e5, 9e6], [2e-8, 9e-9, 3e-8]), bent([], [4e-9])):
        known = np.union1d(SIZES[::3], [3e5, 9e6, SIZES[-1]])
        cost = fit("chords", known, truth(known), draws=0).cost
        grid = np.geomspace(known[0], 8 * known[-1], 500)
        np.testing.assert_allclose(cost(grid), truth(grid), rtol=1e-9)


def test_a_curve_of_two_sizes_is_their_table() -> None:
    ends = np.array([1e3, 1e6]), np.array([1e-3, 2e-2])
    grid = np.geomspace(10, 1e8, 50)
    np.testing.assert_allclose(Curve(*ends)(grid), Table(*ends)(grid), rtol=1e-12)
