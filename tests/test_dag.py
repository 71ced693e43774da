"""Laws of the DAG: longest path and slack, schedules on resources, and what the closed forms say of them."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import Link
from ddlkit.core.plan import single
from ddlkit.core.strategies import ONE_AFTER_THE_OTHER, STRATEGIES, IterationTimes
from ddlkit.core.taskgraph import (
    Gpus,
    TaskGraph,
    changed,
    effect_of_change,
    of_iteration,
    s_sgd,
    schedule,
    tasks_named,
)
from ddlkit.core.timeline import KINDS
from ddlkit.core.workload import Workload
from strategies import costs, iterations, plans, positive, workloads
from workbook.dag import equations as dag
from workbook.dag.fig01 import as_networkx

EQ_3 = replace(
    ONE_AFTER_THE_OTHER, reads_ahead=True, copies_ahead=True, one_buffer=True
)
EQ_5 = replace(EQ_3, sends_during_backward=True)
CAFFE = STRATEGIES["Caffe-MPI"]
FIGURE_1 = IterationTimes(
    2.0, 1.0, np.full(3, 1.0), np.full(3, 2.0), np.full(3, 1.5), 0.5
)


@st.composite
def graphs(draw: st.DrawFn, most: int = 14) -> TaskGraph:
    """Tasks numbered anyhow, of long chains as often as of many edges."""
    n = draw(st.integers(1, most))
    resource = draw(
        st.lists(st.integers(0, draw(st.integers(0, 3))), min_size=n, max_size=n)
    )
    duration_s = draw(st.lists(st.floats(0, 10) | st.just(1.0), min_size=n, max_size=n))
    number = draw(st.permutations(range(n)))
    drawn = draw(
        st.lists(
            st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n
        )
    )
    chained = [(i, i + 1) for i in range(n - 1) if draw(st.booleans())]
    edges = [(number[a], number[b]) for a, b in [*drawn, *chained] if a < b]
    return TaskGraph.of(duration_s, sorted(set(edges)), resource)


@given(graphs())
def test_the_longest_path_is_networkx_s(graph: TaskGraph) -> None:
    others = as_networkx(graph)
    others.add_weighted_edges_from(
        (task, "end", graph.duration_s[task]) for task in range(graph.n)
    )
    assert graph.longest_path_s == pytest.approx(
        nx.dag_longest_path_length(others), rel=1e-12
    )
    path = list(schedule(TaskGraph.of(graph.duration_s, graph.edges)).critical_path)
    assert sum(graph.duration_s[path]) == pytest.approx(graph.longest_path_s, rel=1e-12)
    assert graph.slack_s[path] == pytest.approx(0, abs=1e-9)


@given(graphs())
@example(
    TaskGraph.of([0, 0, 0, 0, 0, 1, 0], [(1, 6), (6, 2)], [0, 1, 0, 0, 0, 0, 1])
)  # 2 is late
def test_a_schedule_is_first_ready_first_served_one_thing_at_a_time(
    graph: TaskGraph,
) -> None:
    found, ready_s = schedule(graph), np.zeros(graph.n)
    before, after = graph.edges.T
    np.maximum.at(ready_s, after, found.end_s[before])
    assert np.all(found.start_s >= ready_s)
    for resource in range(len(graph.resources)):
        mine = found.order[graph.resource[found.order] == resource]
        free_s = np.append(0.0, found.end_s[mine])[:-1]
        assert np.array_equal(found.start_s[mine], np.maximum(ready_s[mine], free_s))
        assert np.all(np.diff(ready_s[mine]) >= 0)
    busy = np.bincount(graph.resource, graph.duration_s)
    assert found.duration_s >= max(graph.longest_path_s, busy.max()) * (1 - 1e-12)
    assert found.duration_s <= busy.sum() * (1 + 1e-12)


@given(graphs())
def test_a_schedule_is_the_longest_path_with_its_resources_edges(
    graph: TaskGraph,
) -> None:
    found = schedule(graph)
    assert np.array_equal(found.bound.earliest_s, found.start_s)
    path = list(found.critical_path)
    assert graph.duration_s[path].sum() == pytest.approx(found.duration_s, rel=1e-12)
    ends, starts = found.end_s[path], found.start_s[path]
    assert starts[0] == 0 and np.array_equal(ends[:-1], starts[1:])


@pytest.mark.parametrize("name", STRATEGIES)
def test_tasks_are_numbered_and_wait_as_figure_1_has_it(name: str) -> None:
    graph = s_sgd(FIGURE_1, STRATEGIES[name], Gpus(1, 4), iterations=2)
    assert graph.n == 2 * 36 == 2 * sum(dag.iteration_tasks(3, 4).values())
    numbered = {
        0: "io",
        4: "h2d",
        12: "forward",
        28: "backward",
        32: "all_reduce",
        35: "update",
    }
    assert [KINDS[graph.kind[task]] for task in numbered] == [*numbered.values()]
    assert graph.layer[[0, 12, 28, 32, 34, 35]].tolist() == [-1, 2, 1, 3, 1, -1]

    def before(task: int) -> set[int]:
        return set(graph.edges[graph.edges[:, 1] == task, 0].tolist())

    assert before(35) == {32, 33, 34} and before(36) == {0}
    assert before(32) == (set(range(28, 32)) if name == "CNTK" else set(range(20, 24)))
    assert before(40) == ({36} if name == "Caffe-MPI" else {35, 36})
    assert before(44) == {35, 40}
    communicates = {KINDS[kind] for kind in graph.kind[~graph.computes]}
    assert communicates == {"io", "h2d", "all_reduce"}  # dag IV-A


@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_one_iteration_is_core_s_for_every_plan(
    data: st.DataObject, machines: int, per_machine: int
) -> None:
    workload, cost = data.draw(workloads()), data.draw(costs())
    iteration = Iteration(workload, data.draw(plans(workload.n)), cost)
    gpus, forward_s = (
        Gpus(machines, per_machine),
        np.eye(workload.n)[0] * workload.forward_s,
    )
    graph = of_iteration(iteration, CAFFE, gpus, forward_s=forward_s)
    drawn, sent = schedule(graph), graph.kind == KINDS.index("all_reduce")
    assert drawn.duration_s == pytest.approx(
        iteration.prediction.iteration_s, rel=1e-12
    )
    assert drawn.start_s[sent] == pytest.approx(
        iteration.played_s[0], rel=1e-9, abs=1e-9
    )
    after = schedule(
        of_iteration(iteration, STRATEGIES["CNTK"], gpus, forward_s=forward_s)
    )
    whole = workload.compute_s + iteration.communication_s.sum()
    assert after.duration_s == pytest.approx(whole, rel=1e-12)


@given(iterations(), st.integers(1, 4))
def test_eqs_1_and_2_are_the_schedule_where_nothing_is_hidden(
    times: IterationTimes, gpus: int
) -> None:
    found = schedule(s_sgd(times, ONE_AFTER_THE_OTHER, Gpus(1, gpus), iterations=3))
    printed = dag.naive_iteration_s(
        replace(times, io_s=gpus * times.io_s)
    )  # one disk for all
    assert found.duration_s == pytest.approx(3 * printed)
    alone = replace(times, communication_s=np.zeros_like(times.communication_s))
    one = schedule(s_sgd(alone, ONE_AFTER_THE_OTHER))
    assert one.duration_s == pytest.approx(dag.sgd_iteration_s(alone))


@given(iterations())
def test_eqs_3_to_5_are_the_period_of_one_gpu_with_one_buffer(
    times: IterationTimes,
) -> None:
    """With the update, which they leave out (errata 2), as a part of computing."""
    first = np.arange(len(times.forward_s)) == 0
    expected = replace(times, forward_s=times.forward_s + first * times.update_s)
    cases = [(EQ_3, dag.fetch_hidden_iteration_s(expected))]
    cases += [(EQ_5, dag.wait_free_iteration_s(expected))]
    others = [STRATEGIES[name] for name in ("CNTK", "MXNet", "TensorFlow")]
    cases += [(strategy, dag.iteration_s(expected, strategy)) for strategy in others]
    for strategy, closed_s in cases:
        assert schedule(s_sgd(times, strategy, iterations=4)).period_s == pytest.approx(
            closed_s
        )


@given(
    iterations(),
    st.sampled_from(sorted(STRATEGIES)),
    st.booleans(),
    positive,
    st.data(),
)
def test_eq_5_repaired_is_the_schedule_of_equal_gpus(
    times: IterationTimes,
    name: str,
    shared: bool,
    decode_s: float,
    data: st.DataObject,
) -> None:
    """Each of N iterations may end later than the period says by what comes before the first, no more."""
    gpus = Gpus(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), shared)
    strategy, count = STRATEGIES[name], 12
    found = schedule(s_sgd(times, strategy, gpus, iterations=count, decode_s=decode_s))
    ends, period = (
        found.iteration_ends_s,
        dag.period_s(times, strategy, gpus, decode_s=decode_s),
    )
    lower = period * np.arange(1, count + 1)
    started = (
        gpus.n * times.io_s + gpus.per_machine * decode_s + times.h2d_s + times.gpu_s
    )
    started += times.communication_s.sum() + times.update_s
    assert np.all(ends >= lower * (1 - 1e-12)) and np.all(
        ends <= lower + started + 1e-9
    )


def test_what_limits_follows_the_change() -> None:
    """Four reads of 3 s on one disk against 11 s of computing: half as long, the GPUs limit."""
    graph = s_sgd(replace(FIGURE_1, io_s=3.0), CAFFE, Gpus(1, 4), iterations=12)
    facts = effect_of_change(schedule(graph), schedule(changed(graph, [("io", 0.5)])))
    assert (facts["iteration_s"], facts["iteration_s_after"]) == (12.0, 11.0)
    assert facts["iteration_speedup"] == pytest.approx(12 / 11)
    assert (
        facts["shares_of_critical_path"] == {"disk": 1.0}
        and facts["limited_by"] == "disk"
    )
    limits = facts["shares_of_critical_path_after"]
    assert list(limits) == ["gpu", "link"] and limits["link"] == pytest.approx(1.5 / 11)
    assert sum(limits.values()) == pytest.approx(1)


def test_a_straggler_delays_all_and_a_message_hides_a_shorter_layer() -> None:
    graph = s_sgd(replace(FIGURE_1, io_s=0.0), CAFFE, Gpus(2, 4), iterations=3)
    before, slow = schedule(graph), schedule(changed(graph, [("rank:3", 1.2)]))
    assert slow.period_s - before.period_s == pytest.approx(0.2 * 9)
    path = list(slow.critical_path)
    assert set(slow.graph.rank[path][slow.graph.computes[path]]) == {
        3,
        -1,
    }  # -1: the update
    halved = schedule(changed(graph, [("layer:2", 0.5)]))
    assert before.period_s - halved.period_s == pytest.approx(0.5 * (1 + 2))


@settings(deadline=None, max_examples=30)
@given(iterations(), st.floats(0, 5), st.integers(1, 4))
def test_a_core_more_and_a_batch_more_ahead_never_make_training_slower(
    times: IterationTimes, decode_s: float, ahead: int
) -> None:
    """Of ranks that are alike; with as many batches ahead as there are iterations, nothing waits for one."""

    def period(decoding: str, batches: int) -> float:
        strategy = replace(CAFFE, decodes_on_cpu=True, batches_ahead=batches)
        gpus = Gpus(2, 1, decoding=decoding)
        return schedule(
            s_sgd(times, strategy, gpus, iterations=6, decode_s=decode_s)
        ).duration_s

    assert period("own", ahead) <= period("trains", ahead) * (1 + 1e-9)
    assert period("own", ahead + 1) <= period("own", ahead) * (1 + 1e-9)
    assert period("own", 6) == period("own", 0) == period("machine", 0)


def test_a_dag_of_nothing_and_of_shared_links_is_refused() -> None:
    with pytest.raises(UserError, match="0 iterations"):
        s_sgd(FIGURE_1, CAFFE, iterations=0)
    with pytest.raises(UserError, match="5 GPUs cannot be divided into machines of 4"):
        Gpus.of(5, 4)
    wrong = {
        "rank:8": "there is no task 'rank:8'",
        "layer:0": "there is no task 'layer:0'",
    }
    for what, message in {**wrong, "io": "cannot take -1 times as long"}.items():
        with pytest.raises(UserError, match=message):
            changed(
                s_sgd(FIGURE_1, CAFFE, Gpus(2, 4)),
                [(what, -1.0 if what == "io" else 0.5)],
            )
    # The resources that the error lists have tasks. Caffe-MPI decodes nothing.
    for what in ("cpu", "no_such"):
        graph = s_sgd(FIGURE_1, CAFFE)
        with pytest.raises(UserError, match="a resource ") as raised:
            changed(graph, [(what, 2.0)])
        listed = str(raised.value).partition("a resource (")[2].partition(")")[0]
        assert all(tasks_named(graph, name).any() for name in listed.split(", "))
    without_layers = TaskGraph.of([1.0], [])
    for graph in (without_layers, TaskGraph.of([], [])):
        with pytest.raises(UserError, match="there is no task 'layer:1'") as raised:
            changed(graph, [("layer:1", 2.0)])
        assert "layer:-1" not in str(raised.value)
    with pytest.raises(
        UserError, match=r"task T1 \(forward\) has a duration of nan s: give a fin"
    ):
        TaskGraph.of([1.0, np.nan], [(0, 1)])
    workload = Workload.from_arrays(1.0, [1.0, 1.0], [4, 4])
    two_at_once = Iteration(workload, single(workload), AlphaBeta(0.1, 1e-9), Link(2))
    with pytest.raises(UserError, match="one message after the other only"):
        of_iteration(two_at_once, CAFFE, forward_s=np.ones(2))
