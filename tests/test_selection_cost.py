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
from ddlkit.core.sparse import SELECTION_FORMS, Log, Scan, SelectionCost, SelectionTimes

SIZES = np.geomspace(1e3, 1e8, 11).round()
DENSITIES = np.array([1e-4, 1e-3, 1e-2])
GRID = np.tile(SIZES, 3), np.repeat(DENSITIES, SIZES.size)
TRUTHS: dict[str, SelectionCost] = {
    "log": Log(2.2e-10, operation="topk", device="cuda"),
    "scan": Scan(2e-5, 5 * 4 / 4e12),
    "table": SelectionTimes(
        SIZES, DENSITIES, (1e-5 + np.outer(DENSITIES**0.1, 1e-10 * SIZES))
    ),
}
counts = st.integers(1, 10**9)
densities = st.floats(1e-5, 1)


def samples(form: str, noise: float) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.repeat(SIZES, 15)
    factors = np.exp(np.random.default_rng(0).normal(0, noise, sizes.size))
    return sizes, TRUTHS[form](sizes) * factors


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


@pytest.mark.parametrize("form", TRUTHS)
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
    np.testing.assert_allclose(
        table(SIZES, DENSITIES[:, None]), table.seconds, rtol=1e-12
    )
    rows = table(d, DENSITIES)
    assert rows[0] * (1 - 1e-12) <= table(d, rho) <= rows[-1] * (1 + 1e-12)
    assert table(3 * SIZES[-1], rho) == pytest.approx(3 * table(SIZES[-1], rho))


def test_a_table_of_one_density_says_nothing_of_others() -> None:
    table = SelectionTimes(SIZES, np.array([0.01]), 1e-9 * SIZES[None])
    np.testing.assert_allclose(table(SIZES, 0.01), 1e-9 * SIZES)
    with pytest.raises(UserError, match="recorded at density 0.01 only"):
        table(1e4, 0.001)
    again = from_dict(table.to_dict(), SELECTION_FORMS)
    assert isinstance(again, SelectionTimes) and again.sha256 == table.sha256
    for wrong in (
        {"elements": [1, 2]},
        {"elements": SIZES[::-1].tolist()},
        {"density": [0]},
    ):
        with pytest.raises(UserError, match="one row a density|increasing, above zero"):
            from_dict({**table.to_dict(), **wrong}, SELECTION_FORMS)


@pytest.mark.parametrize("form", ["log", "scan"])
def test_a_fit_finds_the_truth_and_held_out_sizes_tell_which_it_is(form: str) -> None:
    exact = fit(form, *samples(form, 0.0), draws=0)
    np.testing.assert_allclose(exact.cost(*GRID), TRUTHS[form](*GRID), rtol=1e-6)
    noisy = fit(form, *samples(form, 0.05), device="cuda", draws=30)
    assert np.abs(noisy.cost(*GRID) / TRUTHS[form](*GRID) - 1).max() < 0.15
    lower, upper = noisy.interval(SIZES)
    assert np.all(lower <= upper) and noisy.cost.device == "cuda"
    errors = {
        other: held_out_errors(other, *samples(form, 0.02)) for other in ("log", "scan")
    }
    assert (
        errors[form].median < 0.02
        and min(errors, key=lambda f: errors[f].median) == form
    )
    assert errors[form].sizes.tolist() == SIZES[1:-1].tolist()
    with pytest.raises(UserError, match=f"'{form}' is of selections: use alpha_beta"):
        fit(form, *samples(form, 0.0), collective="all_reduce")
