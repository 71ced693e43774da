"""Laws of the simulation: bounds, conservation, equality of its scalar, vectorised and graph forms."""

from __future__ import annotations

import json

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
    group_ends,
    no_overlap,
    perfect_overlap,
    predict,
)
from ddlkit.core.link import Link
from ddlkit.core.timeline import COMMUNICATION, COMPUTE, Timeline
from ddlkit.core.workload import Workload
from strategies import costs, plans, random_workload, workloads


@given(st.data())
def test_an_iteration_lies_between_perfect_overlap_and_no_overlap(
    data: st.DataObject,
) -> None:
    workload, cost = data.draw(workloads()), data.draw(costs())
    plan = data.draw(plans(workload.n))
    found = predict(workload, plan, cost)
    slack = 1e-9 * (1 + found.iteration_s)
    assert (
        found.iteration_s
        >= perfect_overlap(Iteration(workload, plan, cost)).iteration_s - slack
    )
    assert (
        found.iteration_s
        <= no_overlap(Iteration(workload, plan, cost)).iteration_s + slack
    )
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
    assert found <= bare + 2 * whole_s + slack
    if link.in_flight == 1:  # of two, one that starts later can let the other go first
        assert bare + s_per_byte * plan.group_bytes(workload)[-1] - slack <= found
    single = planning.single(workload)
    together = Iteration(workload, single, cost, copy_s_per_byte=s_per_byte).prediction
    longer_s = together.iteration_s - predict(workload, single, cost).iteration_s
    assert longer_s == pytest.approx(2 * whole_s, abs=slack)
    assert (
        copied.timeline().end_s.max() == pytest.approx(found) or not workload.update_s
    )


@given(st.data())
def test_timeline_agrees_with_the_prediction_and_conserves_bytes(
    data: st.DataObject,
) -> None:
    workload, cost = data.draw(workloads()), data.draw(costs())
    plan = data.draw(plans(workload.n))
    timeline, found = (
        Iteration(workload, plan, cost).timeline(),
        predict(workload, plan, cost),
    )
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
    assert predict(workload, plan, cost).iteration_s == pytest.approx(
        longest, rel=1e-12
    )


def test_group_ends_is_its_recursion_over_every_scenario() -> None:
    rng = np.random.default_rng(0)
    ready_s, communication_s = (
        np.cumsum(rng.random((50, 30)), axis=1),
        rng.random((50, 30)),
    )
    ends_s, end_s = group_ends(ready_s, communication_s), np.zeros(50)
    for k in range(30):
        end_s = np.maximum(end_s, ready_s[:, k]) + communication_s[:, k]
        np.testing.assert_allclose(ends_s[:, k], end_s, rtol=1e-12)


@pytest.mark.parametrize("spec", ["none", "buffer:1MB", "single"])
def test_an_iteration_is_the_maximum_of_linear_functions(spec: str) -> None:
    """Of (1, compute scale, alpha, beta): one for each group after which the link never rests."""
    rng = np.random.default_rng(1)
    workload = random_workload(rng, 161)
    plan = planning.make_plan(spec, workload)
    computed_s = plan.group_ready_s(workload) + workload.update_s
    messages_left = np.arange(len(plan.ends), 0, -1)
    bytes_left = np.cumsum(plan.group_bytes(workload)[::-1])[::-1]
    for _ in range(100):
        scale, alpha_s, beta = 10 ** rng.uniform([-1, -6, -12], [1, -1, -7])
        lengths_s = scale * computed_s + alpha_s * messages_left + beta * bytes_left
        step = predict(workload.scaled(scale), plan, AlphaBeta(alpha_s, beta))
        assert step.iteration_s == pytest.approx(lengths_s.max(), rel=1e-9)


def test_impossible_workloads_costs_and_plans_are_refused() -> None:
    workload = Workload.from_arrays(1, [1, 1], [10, 10])
    with pytest.raises(UserError, match="10 bytes is negative"):
        predict(workload, planning.none(workload), AlphaBeta(-1, 0))
    with pytest.raises(UserError, match="for 3 tensors, but the layer profile has 2"):
        predict(workload, planning.FusionPlan("x", (3,)), AlphaBeta(0, 0))
    for forward_s, backward_s, n_bytes, message in (
        (1, [1, -1], [1, 1], "backward_s of tensor 1 is -1"),
        (1, [1, np.nan], [1, 1], "backward_s of tensor 1 is nan"),
        (1, [1], [1, 1], "backward_s has shape"),
        (1, [1, 1], [0, 1], "bytes of tensor 0 is 0"),
        (np.inf, [1, 1], [1, 1], "forward_s is inf"),
        (1, [], [], "the layer profile is empty"),
    ):
        with pytest.raises(UserError, match=message):
            Workload.from_arrays(forward_s, backward_s, n_bytes)
    with pytest.raises(UserError, match="ends before it starts"):
        line_of([(0, -1)], [])


@given(st.data())
def test_draws_are_predictions_and_scatter_lengthens_no_message_twice(
    data: st.DataObject,
) -> None:
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
    drawn_twice = iteration.draws([cost, cost], compute_factors=[1.0, 2.0])
    assert drawn_twice == pytest.approx([one, twice])


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30)


def line_of(
    compute: list[tuple[int, int]], messages: list[tuple[int, int]]
) -> Timeline:
    rows = [("backward", s) for s in compute] + [("all_reduce", s) for s in messages]
    names = ("task", "kind", "stream", "origin", "start_s", "end_s")
    spans = (
        (f"{kind} {a}", kind, kind, "simulated", a, a + d) for kind, (a, d) in rows
    )
    return Timeline.from_rows(dict(zip(names, span, strict=True)) for span in spans)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Spans of two ranks, two streams and several iterations, some before 0, some at the same time."""
    rows = draw(
        st.lists(
            st.tuples(*[st.integers(0, 1)] * 3, st.integers(-9, 30), st.integers(0, 9))
        )
    )
    names = (
        "task",
        "kind",
        "stream",
        "rank",
        "iteration",
        "origin",
        "start_s",
        "end_s",
    )
    spans = []
    for number, (stream, rank, iteration, start, length) in enumerate(rows):
        kind = "backward" if stream else "all_reduce"
        of_rank = f"task {number}", kind, f"s{stream}", rank, iteration, "simulated"
        span = dict(
            zip(names, (*of_rank, start / 7, (start + length) / 7), strict=True)
        )
        spans.append(span | {"group": number, "bytes": number})
    return Timeline.from_rows(spans)


@given(spans, spans)
def test_busy_overlap_and_exposed_count_the_ticks(
    compute: list, messages: list
) -> None:
    if not compute and not messages:
        return
    line = line_of(compute, messages)
    work, sent = (
        {t for a, d in of for t in range(a, a + d)} for of in (compute, messages)
    )
    assert line.busy_s(("backward",)) == len(work)
    assert line.overlap_s() == len(work & sent)
    assert line.exposed_communication_s() == len(sent - work)


@given(timelines())
def test_chrome_trace_holds_every_span_once_one_at_a_time_in_a_thread(
    line: Timeline,
) -> None:
    trace = json.loads(json.dumps(line.to_chrome_trace()))
    heads = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in heads}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) + len(names) == len(trace["traceEvents"])
    assert [event["name"] for event in events] == line.task.tolist()
    assert [event["cat"] for event in events] == line.kind.tolist()
    assert [event["dur"] for event in events] == pytest.approx(
        (line.end_s - line.start_s) * 1e6
    )
    assert not events or min(event["ts"] for event in events) == 0
    busy: dict[tuple[int, int], float] = {}
    for row, event in sorted(
        enumerate(events), key=lambda e: (e[1]["ts"], e[1]["dur"])
    ):
        place = (event["pid"], event["tid"])
        assert names[("process_name", event["pid"], 0)] == f"rank {line.rank[row]}"
        assert names[("thread_name", *place)].split()[0] == line.stream[row]
        for name in ("bytes", "group", "origin"):
            assert event["args"][name] == getattr(line, name)[row]
        assert event["ts"] >= busy.get(place, 0.0) - 1e-3
        busy[place] = event["ts"] + event["dur"]
