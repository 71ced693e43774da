"""Laws of the simulation: bounds, conservation, equality of its scalar, vectorised and graph forms."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core import plan as planning
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import (
    Iteration,
    LinearScenarios,
    group_ends,
    no_overlap,
    perfect_overlap,
    predict,
)
from ddlkit.core.link import Link
from ddlkit.core.timeline import COMMUNICATION, COMPUTE
from ddlkit.core.workload import Workload
from strategies import costs, plans, random_workload, workloads


@given(st.data())
def test_an_iteration_lies_between_perfect_overlap_and_no_overlap(data: st.DataObject) -> None:
    workload, cost = data.draw(workloads()), data.draw(costs())
    plan = data.draw(plans(workload.n))
    found = predict(workload, plan, cost)
    slack = 1e-9 * (1 + found.iteration_s)
    assert found.iteration_s >= perfect_overlap(Iteration(workload, plan, cost)).iteration_s - slack
    assert found.iteration_s <= no_overlap(Iteration(workload, plan, cost)).iteration_s + slack
    assert 0 < found.scaling_factor <= 1 + 1e-12 or found.compute_s == 0


@given(st.data(), st.floats(0, 1e-7))
def test_copies_lengthen_an_iteration_by_at_most_both_ways(
    data: st.DataObject, s_per_byte: float
) -> None:
    workload, cost = data.draw(workloads()), data.draw(costs())
    plan, link = data.draw(plans(workload.n)), Link(data.draw(st.integers(1, 2)))
    bare = predict(workload, plan, cost, link).iteration_s
    copied = Iteration(workload, plan, cost, link, s_per_byte)
    found = copied.prediction.iteration_s
    whole_s, slack = s_per_byte * workload.bytes.sum(), 1e-9 * (1 + bare)
    last_s = s_per_byte * plan.group_bytes(workload)[-1]
    assert found <= bare + 2 * whole_s + slack
    if link.in_flight == 1:  # of two, one that starts later can let the other go first
        assert bare + last_s - slack <= found
    single = planning.single(workload)
    together = Iteration(workload, single, cost, copy_s_per_byte=s_per_byte).prediction
    alone = predict(workload, single, cost)
    longer_s = together.iteration_s - alone.iteration_s
    assert longer_s == pytest.approx(2 * whole_s, abs=1e-9 * (1 + bare))
    assert together.compute_s == alone.compute_s
    timeline = copied.timeline()
    assert timeline.end_s.max() == pytest.approx(found) or not workload.update_s


@given(st.data())
def test_timeline_agrees_with_the_prediction_and_conserves_bytes(data: st.DataObject) -> None:
    workload, cost = data.draw(workloads()), data.draw(costs())
    plan = data.draw(plans(workload.n))
    timeline, found = Iteration(workload, plan, cost).timeline(), predict(workload, plan, cost)
    messages = np.isin(timeline.kind, COMMUNICATION)
    assert timeline.end_s.max() == pytest.approx(found.iteration_s, rel=1e-12)
    assert timeline.bytes[messages].sum() == workload.bytes.sum()
    assert timeline.bytes[timeline.kind == "backward"].sum() == workload.bytes.sum()
    assert timeline.busy_s(COMPUTE) == pytest.approx(workload.compute_s, abs=1e-9)
    assert timeline.exposed_communication_s() == pytest.approx(
        found.exposed_communication_s, abs=1e-7
    )


@given(st.data())
def test_simulation_is_the_longest_path_of_its_graph(data: st.DataObject) -> None:
    workload, cost = data.draw(workloads()), data.draw(costs())
    plan = data.draw(plans(workload.n))
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(Iteration(workload, plan, cost).edges())
    longest = nx.dag_longest_path_length(graph)
    assert predict(workload, plan, cost).iteration_s == pytest.approx(longest, rel=1e-12)


def test_group_ends_is_its_recursion_over_every_scenario() -> None:
    rng = np.random.default_rng(0)
    ready_s, communication_s = np.cumsum(rng.random((50, 30)), axis=1), rng.random((50, 30))
    ends_s = group_ends(ready_s, communication_s)
    for row in range(50):
        end_s = 0.0
        for k in range(30):
            end_s = max(end_s, ready_s[row, k]) + communication_s[row, k]
            assert ends_s[row, k] == pytest.approx(end_s, rel=1e-12)


@pytest.mark.parametrize("spec", ["none", "buffer:1MB", "single"])
def test_linear_scenarios_equal_one_prediction_each(spec: str) -> None:
    rng = np.random.default_rng(1)
    workload = random_workload(rng, 161)
    plan = planning.make_plan(spec, workload)
    scale, start, slope = rng.uniform(
        np.array([[0.1], [-6], [-12]]), np.array([[10], [-1], [-7]]), (3, 5000)
    )
    alpha_s, beta = 10**start, 10**slope
    fast = LinearScenarios.of(workload, plan).iteration_s(scale, alpha_s, beta)
    slow = [
        predict(workload.scaled(s), plan, AlphaBeta(a, b)).iteration_s
        for s, a, b in zip(scale[::50], alpha_s[::50], beta[::50], strict=True)
    ]
    np.testing.assert_allclose(fast[::50], slow, rtol=1e-9)


def test_negative_cost_and_foreign_plan_are_refused() -> None:
    workload = Workload.from_arrays(1, [1, 1], [10, 10])
    with pytest.raises(UserError, match="negative at 10 bytes"):
        predict(workload, planning.none(workload), AlphaBeta(-1, 0))
    with pytest.raises(UserError, match="of 3 tensors, the workload has 2"):
        predict(workload, planning.FusionPlan("x", (3,)), AlphaBeta(0, 0))


def test_impossible_workloads_are_refused() -> None:
    for forward_s, backward_s, n_bytes, message in (
        (1, [1, -1], [1, 1], "backward_s of tensor 1 is -1"),
        (1, [1, np.nan], [1, 1], "backward_s of tensor 1 is nan"),
        (1, [1], [1, 1], "backward_s has shape"),
        (1, [1, 1], [0, 1], "bytes of tensor 0 is 0"),
        (np.inf, [1, 1], [1, 1], "forward_s is inf"),
        (1, [], [], "the workload is empty"),
    ):
        with pytest.raises(UserError, match=message):
            Workload.from_arrays(forward_s, backward_s, n_bytes)


@given(st.data())
def test_draws_are_predictions_and_scatter_lengthens_no_message_twice(data: st.DataObject) -> None:
    workload, cost = data.draw(workloads()), data.draw(costs())
    plan = data.draw(plans(workload.n))
    one = predict(workload, plan, cost).iteration_s
    iteration = Iteration(workload, plan, cost)
    assert iteration.draws([]).shape == (0,)
    (drawn,) = iteration.draws([cost])
    assert drawn == pytest.approx(one)
    (longer,) = iteration.draws([cost], np.full((1, len(plan.ends)), 1.5))
    sent_s = predict(workload, plan, cost).communication_s
    assert one - 1e-9 <= longer <= one + 0.5 * sent_s + 1e-9
    twice = predict(workload.scaled(2.0), plan, cost).iteration_s
    drawn_twice = iteration.draws([cost, cost], slower=[1.0, 2.0])
    assert drawn_twice == pytest.approx([one, twice])
