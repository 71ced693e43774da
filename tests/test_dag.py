"""Laws of the DAG: longest path and slack, schedules on resources, and what the closed forms say of them."""

from __future__ import annotations

import heapq
import re
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration, predict
from ddlkit.core.link import Link
from ddlkit.core.plan import make_plan
from ddlkit.core.timeline import KINDS
from ddlkit.papers import dag, networks, osf
from ddlkit.papers.dag.tasks import TaskGraph, schedule
from ddlkit.papers.dag.training import ONE_AFTER_THE_OTHER, Gpus, of_iteration, s_sgd, what_if
from strategies import costs, plans, workloads

EQ_3 = replace(ONE_AFTER_THE_OTHER, reads_ahead=True, copies_ahead=True, one_buffer=True)
EQ_5 = replace(EQ_3, sends_during_backward=True)
CAFFE = dag.STRATEGIES["Caffe-MPI"]
ALL = {"none hidden": ONE_AFTER_THE_OTHER, "Eq 3": EQ_3, "Eq 5": EQ_5, **dag.STRATEGIES}
FIGURE_1 = dag.IterationTimes(2.0, 1.0, np.full(3, 1.0), np.full(3, 2.0), np.full(3, 1.5), 0.5)

positive = st.floats(0.01, 10)
seconds = st.floats(0, 10) | st.sampled_from([0.0, 1.0])


def made(resource: list[int], duration_s: list[float], edges: list[tuple[int, int]]) -> TaskGraph:
    n, whole = len(resource), np.zeros(len(resource), int)
    pairs = np.array(sorted(set(edges)), int).reshape(-1, 2)
    names = tuple(f"r{i}" for i in range(max(resource) + 1))
    kind = np.full(n, KINDS.index("forward"))
    return TaskGraph(names, kind, np.array(resource), np.array(duration_s), whole, whole, whole, pairs)


@st.composite
def graphs(draw: st.DrawFn, most: int = 14) -> TaskGraph:
    """Tasks numbered anyhow, of long chains as often as of many edges."""
    n = draw(st.integers(1, most))
    resource = draw(st.lists(st.integers(0, draw(st.integers(0, 3))), min_size=n, max_size=n))
    duration_s = draw(st.lists(seconds, min_size=n, max_size=n))
    number = draw(st.permutations(range(n)))
    drawn = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=2 * n))
    chained = [(i, i + 1) for i in range(n - 1) if draw(st.booleans())]
    edges = [(number[a], number[b]) for a, b in [*drawn, *chained] if a < b]
    return made(resource, duration_s, edges)


@st.composite
def iterations(draw: st.DrawFn) -> dag.IterationTimes:
    layers = draw(st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=6))
    forward, backward, sent = (np.array(column) for column in zip(*layers, strict=True))
    fetched = draw(positive), draw(positive)
    return dag.IterationTimes(*fetched, forward, backward, sent, draw(positive))


def one_by_one(graph: TaskGraph) -> np.ndarray:
    """Starts of first ready, first served, task by task: what the chains must give, too."""
    waits = np.bincount(graph.edges[:, 1], minlength=graph.n)
    free = np.zeros(len(graph.resources))
    ready, start = np.zeros(graph.n), np.zeros(graph.n)
    queue = [(0.0, task) for task in np.flatnonzero(waits == 0).tolist()]
    while queue:
        at, task = heapq.heappop(queue)
        start[task] = max(at, free[graph.resource[task]])
        free[graph.resource[task]] = end = start[task] + graph.duration_s[task]
        for after in graph.edges[graph.edges[:, 0] == task, 1]:
            ready[after], waits[after] = max(ready[after], end), waits[after] - 1
            if not waits[after]:
                heapq.heappush(queue, (float(ready[after]), int(after)))
    return start


# ---------------------------------------------------------------- longest path


@given(graphs())
def test_the_longest_path_is_networkx_s(graph: TaskGraph) -> None:
    others = graph.to_networkx()
    others.add_weighted_edges_from((task, "end", graph.duration_s[task]) for task in range(graph.n))
    assert graph.longest_path_s == pytest.approx(nx.dag_longest_path_length(others), rel=1e-12)
    path = graph.critical_path
    assert sum(graph.duration_s[list(path)]) == pytest.approx(graph.longest_path_s, rel=1e-12)
    assert all(others.has_edge(a, b) for a, b in zip(path, path[1:], strict=False))
    assert graph.slack_s[list(path)] == pytest.approx(0, abs=1e-9)


@given(graphs(), st.data())
def test_slack_is_what_a_task_may_be_late(graph: TaskGraph, data: st.DataObject) -> None:
    task = data.draw(st.integers(0, graph.n - 1))
    late = graph.duration_s.copy()
    late[task] += graph.slack_s[task]
    longest = graph.longest_path_s
    assert replace(graph, duration_s=late).longest_path_s == pytest.approx(longest, rel=1e-9)
    late[task] += 1.0
    assert replace(graph, duration_s=late).longest_path_s == pytest.approx(longest + 1, rel=1e-9)


@given(graphs(), st.data())
def test_less_work_and_fewer_edges_never_lengthen_the_longest_path(
    graph: TaskGraph, data: st.DataObject
) -> None:
    shorter = graph.duration_s * data.draw(
        st.lists(st.floats(0, 1), min_size=graph.n, max_size=graph.n).map(np.array)
    )
    assert replace(graph, duration_s=shorter).longest_path_s <= graph.longest_path_s
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=40, max_size=40)))
    fewer = graph.edges[kept[: len(graph.edges)]]
    assert replace(graph, edges=fewer).longest_path_s <= graph.longest_path_s


# ---------------------------------------------------------------- schedules


@given(graphs())
def test_a_schedule_is_first_ready_first_served_one_thing_at_a_time(graph: TaskGraph) -> None:
    found = schedule(graph)
    assert np.array_equal(found.start_s, one_by_one(graph))
    before, after = graph.edges.T
    assert np.all(found.start_s[after] >= found.end_s[before])
    for resource in range(len(graph.resources)):
        mine = found.order[graph.resource[found.order] == resource]
        assert np.all(found.start_s[mine][1:] >= found.end_s[mine][:-1])
    busy = np.bincount(graph.resource, graph.duration_s)
    assert found.duration_s >= max(graph.longest_path_s, busy.max()) * (1 - 1e-12)
    assert found.duration_s <= busy.sum() * (1 + 1e-12)


@given(graphs())
def test_a_schedule_is_the_longest_path_with_its_resources_edges(graph: TaskGraph) -> None:
    found = schedule(graph)
    assert np.array_equal(found.bound.earliest_s, found.start_s)
    path = list(found.critical_path)
    assert graph.duration_s[path].sum() == pytest.approx(found.duration_s, rel=1e-12)
    ends, starts = found.end_s[path], found.start_s[path]
    assert starts[0] == 0 and np.array_equal(ends[:-1], starts[1:])


def test_what_comes_between_breaks_a_chain() -> None:
    """Task 1 follows 0 alone, but 2 is ready at 0.5 on the same resource, and is served first."""
    graph = made([0, 0, 0, 1], [1.0, 1.0, 5.0, 0.5], [(0, 1), (3, 2)])
    assert schedule(graph).start_s.tolist() == [0.0, 6.0, 1.0, 0.0]


def test_a_schedule_can_grow_when_a_task_shrinks() -> None:
    """Graham's anomaly: 1 is done sooner, so 2 is served before 3, and what follows 3 comes late."""
    edges = [(1, 2), (3, 4)]
    times = [1.0, 2.0, 4.0, 1.0, 4.0]
    graph = made([0, 1, 2, 2, 1], times, [*edges, (0, 3)])
    quick = graph.scaled(0.25, np.arange(5) == 1)
    assert quick.longest_path_s <= graph.longest_path_s
    assert (schedule(graph).duration_s, schedule(quick).duration_s) == (6.0, 9.5)
