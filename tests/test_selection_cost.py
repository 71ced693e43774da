"""Laws of the selection costs: growth, what merging saves, JSON, and fits that find the truth."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.cost import from_dict
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, judge_selections
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
counts = st.integers(1, 10**9)
densities = st.floats(1e-5, 1)
each_form = pytest.mark.parametrize("form", TRUTHS)


def samples(form: str, noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    factors = np.exp(np.random.default_rng(0).normal(0, noise, GRID[0].size))
    return *GRID, TRUTHS[form](*GRID) * factors


@each_form
@given(a=counts, b=counts, density=densities)
def test_a_larger_tensor_never_costs_less(form: str, a: int, b: int, density: float) -> None:
    cost = TRUTHS[form]
    assert cost(min(a, b), density) <= cost(max(a, b), density) * (1 + 1e-12)


@each_form
def test_scalar_equals_vectorised_and_shapes_broadcast(form: str) -> None:
    cost = TRUTHS[form]
    whole = cost(SIZES[:, None], DENSITIES)
    assert whole.shape == (SIZES.size, DENSITIES.size)
    single = [[cost(float(d), float(rho)) for rho in DENSITIES] for d in SIZES]
    np.testing.assert_allclose(whole, single, rtol=1e-12)


@pytest.mark.parametrize("form", ["density_log", "log"])
@given(a=counts, b=counts, density=densities)
def test_merging_never_saves_where_the_cost_has_a_logarithm(
    form: str, a: int, b: int, density: float
) -> None:
    cost = TRUTHS[form]
    assert cost(a + b, density) >= (cost(a, density) + cost(b, density)) * (1 - 1e-12)


@given(a=counts, b=counts, density=densities)
def test_merging_saves_one_start_where_the_tensor_is_scanned(
    a: int, b: int, density: float
) -> None:
    cost = Scan(2e-5, 1e-11)
    saved = cost(a, density) + cost(b, density) - cost(a + b, density)
    assert saved == pytest.approx(cost.start_s, rel=1e-6)


@given(st.floats(1e3, 1e8), st.floats(1e-6, 1))
def test_a_table_passes_through_its_points_and_stays_between_its_neighbours(
    d: float, rho: float
) -> None:
    table = TRUTHS["table"]
    assert isinstance(table, SelectionTimes)
    np.testing.assert_allclose(table(SIZES, DENSITIES[:, None]), table.seconds, rtol=1e-12)
    rows = table(d, DENSITIES)
    assert rows[0] * (1 - 1e-12) <= table(d, rho) <= rows[-1] * (1 + 1e-12)


@each_form
def test_json_keeps_every_prediction(form: str) -> None:
    cost = TRUTHS[form]
    again = from_dict(json.loads(json.dumps(cost.to_dict())), SELECTION_FORMS)
    np.testing.assert_array_equal(again(*GRID), cost(*GRID))
    assert (again.operation, again.device) == (cost.operation, cost.device)


@each_form
def test_a_fit_finds_the_truth_it_was_drawn_from(form: str) -> None:
    exact = fit(form, *samples(form, 0.0), draws=0)
    np.testing.assert_allclose(exact.cost(*GRID), TRUTHS[form](*GRID), rtol=1e-6)
    noisy = fit(form, *samples(form, 0.05), device="cuda", draws=30)
    assert np.abs(noisy.cost(*GRID) / TRUTHS[form](*GRID) - 1).max() < 0.15
    assert noisy.leverage.sum() == pytest.approx(len(noisy.names))
    lower, upper = noisy.interval(SIZES, 0.001)
    assert np.all(lower <= upper)
    summary = noisy.to_dict()
    assert from_dict(summary, SELECTION_FORMS)(1e6, 1e-3) == noisy.cost(1e6, 1e-3)
    assert (summary["device"], len(summary["fit"]["draws"])) == ("cuda", 30)


@pytest.mark.parametrize("truth", ["density_log", "log", "scan"])
def test_held_out_sizes_tell_which_reading_is_true(truth: str) -> None:
    judged = judge_selections(*samples(truth, 0.02), draws=0)
    medians = {form: np.median(np.abs(one.held_out)) for form, one in judged.items()}
    assert set(judged) == set(TRUTHS)
    assert min(("density_log", "log", "scan"), key=medians.__getitem__) == truth
    assert medians[truth] < 0.02
    inner = (SIZES.size - 2) * DENSITIES.size
    for one in judged.values():
        assert one.elements.shape == one.density.shape == one.held_out.shape == (inner,)
        assert {SIZES[0], SIZES[-1]}.isdisjoint(one.elements)


@pytest.mark.parametrize("truth", ["density_log", "log", "scan"])
def test_the_form_is_chosen_by_its_error_at_sizes_left_out(truth: str) -> None:
    found = fit("auto", *samples(truth, 0.0), draws=0)
    assert found.form == truth
    assert all(form in found.why for form in TRUTHS if form != truth)


def test_a_table_of_one_density_says_nothing_of_others() -> None:
    table = SelectionTimes(SIZES, np.array([0.01]), 1e-9 * SIZES)
    np.testing.assert_allclose(table(SIZES, 0.01), 1e-9 * SIZES)
    with pytest.raises(UserError, match="recorded at density 0.01 only"):
        table(1e4, 0.001)
    again = from_dict(json.loads(json.dumps(table.to_dict())), SELECTION_FORMS)
    assert isinstance(again, SelectionTimes) and again.sha256 == table.sha256


@pytest.mark.parametrize(
    ("form", "rows", "message"),
    [
        ("scan", ([9, 9, 9], [1, 1, 1], [1, 2, 3]), "at least 3 distinct sizes, got 1"),
        ("log", ([1, 2, 3], [1, 1, 1], [1, 0, 3]), "row 1: time is 0"),
        ("log", ([1, 2, 3], [1, -1, 1], [1, 2, 3]), "row 1: density is -1"),
        ("log", ([1, 2, 3], [1, 2, 1], [1, 2, 3]), "density is 2: must be at most 1"),
        ("log", ([1, 2], [1, 1, 1], [1, 2, 3]), "2 sizes but 3 times"),
        ("log", ([1, 2, 3], [1, 1], [1, 2, 3]), "2 densities but 3 times"),
        ("table", ([1, 2, 3], [0.1, 0.1, 1], [1, 2, 3]), "3 points are not the 2 densities x 3"),
        ("spline", ([1, 2, 3], [1, 1, 1], [1, 2, 3]), "unknown cost form 'spline'"),
    ],
)
def test_degenerate_data_are_refused(form: str, rows: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit(form, *rows)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"form": "alpha_beta"}, "unknown cost form 'alpha_beta'"),
        ({"form": "log", "gamma_s": "fast"}, "gamma_s is 'fast': must be a finite number"),
        ({"form": "scan", "start_s": 1}, "missing: s_per_element"),
        (
            {"form": "table", "elements": [1, 2], "density": [1], "seconds": [[1]]},
            "one row a density, one column a size",
        ),
        (
            {"form": "table", "elements": [2, 1], "density": [1], "seconds": [[1, 1]]},
            "elements must be 2 or more, increasing",
        ),
        (
            {"form": "table", "elements": [1, 2], "density": [1], "seconds": [[0, 1]]},
            "every time in seconds must be above zero",
        ),
    ],
)
def test_bad_descriptions_are_refused(description: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_dict(description, SELECTION_FORMS)
