"""Laws of the selection costs: growth, what merging saves, JSON, and fits that find the truth."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.cost import from_dict
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, held_out_errors
from ddlkit.core.sparse import (
    SELECTION_FORMS,
    DensityLog,
    Log,
    Scan,
    SelectionCost,
    SelectionTimes,
)

SIZES = np.geomspace(1e3, 1e8, 11).round()
DENSITIES = np.array([1e-4, 1e-3, 1e-2])
GRID = np.repeat(np.tile(SIZES, 3), 5), np.repeat(DENSITIES, 5 * SIZES.size)
TRUTHS: dict[str, SelectionCost] = {
    "density_log": DensityLog(2e-9),
    "log": Log(2.2e-10, operation="topk", device="cuda"),
    "scan": Scan(2e-5, 5 * 4 / 4e12),
    "table": SelectionTimes(SIZES, DENSITIES, (1e-5 + np.outer(DENSITIES**0.1, 1e-10 * SIZES))),
}
FORMULAS = ("density_log", "log", "scan")
counts = st.integers(1, 10**9)
densities = st.floats(1e-5, 1)
each_form = pytest.mark.parametrize("form", TRUTHS)


def samples(form: str, noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    factors = np.exp(np.random.default_rng(0).normal(0, noise, GRID[0].size))
    return *GRID, TRUTHS[form](*GRID) * factors


@given(a=counts, b=counts, density=densities)
def test_larger_tensors_cost_more_and_merging_saves_a_start_or_nothing(
    a: int, b: int, density: float
) -> None:
    for form, cost in TRUTHS.items():
        assert cost(min(a, b), density) <= cost(max(a, b), density) * (1 + 1e-12)
        apart, together = cost(a, density) + cost(b, density), cost(a + b, density)
        if form.endswith("log"):
            assert together >= apart * (1 - 1e-12)
        if isinstance(cost, Scan):
            assert apart - together == pytest.approx(cost.start_s, rel=1e-6, abs=1e-12)


@each_form
def test_shapes_broadcast_and_json_keeps_every_prediction(form: str) -> None:
    cost = TRUTHS[form]
    whole = cost(SIZES[:, None], DENSITIES)
    single = [[cost(float(d), float(rho)) for rho in DENSITIES] for d in SIZES]
    np.testing.assert_allclose(whole, single, rtol=1e-12)
    again = from_dict(json.loads(json.dumps(cost.to_dict())), SELECTION_FORMS)
    np.testing.assert_array_equal(again(*GRID), cost(*GRID))
    assert (again.operation, again.device) == (cost.operation, cost.device)


@given(st.floats(1e3, 1e8), st.floats(1e-6, 1))
def test_a_table_passes_through_its_points_and_stays_between_its_neighbours(
    d: float, rho: float
) -> None:
    table = TRUTHS["table"]
    assert isinstance(table, SelectionTimes)
    np.testing.assert_allclose(table(SIZES, DENSITIES[:, None]), table.seconds, rtol=1e-12)
    rows = table(d, DENSITIES)
    assert rows[0] * (1 - 1e-12) <= table(d, rho) <= rows[-1] * (1 + 1e-12)
    assert table(3 * SIZES[-1], rho) == pytest.approx(3 * table(SIZES[-1], rho))


def test_a_table_of_one_density_says_nothing_of_others() -> None:
    table = SelectionTimes(SIZES, np.array([0.01]), 1e-9 * SIZES)
    np.testing.assert_allclose(table(SIZES, 0.01), 1e-9 * SIZES)
    with pytest.raises(UserError, match="recorded at density 0.01 only"):
        table(1e4, 0.001)
    again = from_dict(table.to_dict(), SELECTION_FORMS)
    assert isinstance(again, SelectionTimes) and again.sha256 == table.sha256


@each_form
def test_a_fit_finds_the_truth_it_was_drawn_from(form: str) -> None:
    exact = fit(form, *samples(form, 0.0), draws=0)
    np.testing.assert_allclose(exact.cost(*GRID), TRUTHS[form](*GRID), rtol=1e-6)
    noisy = fit(form, *samples(form, 0.05), device="cuda", draws=30)
    assert np.abs(noisy.cost(*GRID) / TRUTHS[form](*GRID) - 1).max() < 0.15
    lower, upper = noisy.interval(SIZES, 0.001)
    assert np.all(lower <= upper)
    summary = noisy.to_dict()
    assert from_dict(summary, SELECTION_FORMS)(1e6, 1e-3) == noisy.cost(1e6, 1e-3)
    assert (summary["device"], len(summary["fit"]["draws"])) == ("cuda", 30)


@pytest.mark.parametrize("truth", FORMULAS)
def test_held_out_sizes_tell_which_reading_is_true(truth: str) -> None:
    judged = {form: held_out_errors(form, *samples(truth, 0.02)) for form in TRUTHS}
    medians = {form: np.median(np.abs(errors)) for form, (_, _, errors) in judged.items()}
    assert medians[truth] < 0.02 and min(FORMULAS, key=medians.__getitem__) == truth
    for elements, _, errors in judged.values():
        assert errors.shape == ((SIZES.size - 2) * DENSITIES.size,)
        assert {SIZES[0], SIZES[-1]}.isdisjoint(elements)
    assert fit("auto", *samples(truth, 0.0), draws=0).form == truth


def test_degenerate_data_and_bad_tables_are_refused() -> None:
    for form, sizes, densities, message in (
        ("scan", [9, 9, 9], [1, 1, 1], "at least 3 distinct sizes, got 1"),
        ("log", [1, 2, 3], [1, 2, 1], "density is 2: must be at most 1"),
        ("table", [1, 2, 3], [0.1, 0.1, 1], "3 points are not the 2 densities x 3"),
    ):
        with pytest.raises(UserError, match=message):
            fit(form, sizes, densities, [1, 2, 3])
    for elements, density, seconds in (
        ([1, 2], [1], [[1]]),
        ([2, 1], [1], [[1, 1]]),
        ([1, 2], [0], [[1, 1]]),
    ):
        bad = {"form": "table", "elements": elements, "density": density, "seconds": seconds}
        with pytest.raises(UserError, match="one row a density|increasing, above zero"):
            from_dict(bad, SELECTION_FORMS)
