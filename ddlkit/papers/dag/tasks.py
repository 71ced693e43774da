"""Tasks, what each waits for and what it occupies: longest path, slack, and a schedule on resources.

A task is a number from 0; an edge (a, b) says that b begins after a has ended (dag IV-B). Without resources
every task begins as early as its edges allow: the longest path. With them a resource does one task at a
time, in the order in which they become ready, the smaller number first: no choice is left, so the schedule is
one, and it is the longest path of the graph with an edge more between neighbours on a resource.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.timeline import KINDS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

COMPUTING = ("decode", "forward", "backward", "update")
"""Kinds of computing tasks; all others communicate (dag IV-A)."""


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """n tasks in columns, and what must come before what.

    kind : (n,) places in KINDS; resource : (n,) places in ``resources``
    duration_s : (n,); rank, layer, iteration : (n,), -1 where a task is of all or none; ranks and
        iterations count from 0, layers from 1 as in the paper
    edges : (m, 2) numbers of tasks, the first before the second

    Raises UserError, naming the task, for a duration that is missing, negative or infinite, an unknown
    resource, an edge to no task, and tasks that wait for each other in a circle.
    """

    resources: tuple[str, ...]
    kind: Ints
    resource: Ints
    duration_s: Floats
    rank: Ints
    layer: Ints
    iteration: Ints
    edges: Ints

    def __post_init__(self) -> None:
        for name in ("kind", "resource", "rank", "layer", "iteration", "edges", "duration_s"):
            column = np.array(getattr(self, name), float if name == "duration_s" else np.int64)
            column.setflags(write=False)
            object.__setattr__(self, name, column)
            if name != "edges" and column.shape != self.kind.shape:
                raise UserError(f"tasks: column {name} has {column.size} rows, not {self.n}")
        for bad in np.flatnonzero(~((self.duration_s >= 0) & (self.duration_s < np.inf)))[:1]:
            seconds = f"a duration of {self.duration_s[bad]:g} s"
            raise UserError(f"task {self.describe(bad)} has {seconds}: give a finite time >= 0")
        known = (self.resource >= 0) & (self.resource < len(self.resources))
        for bad in np.flatnonzero(~known)[:1]:
            raise UserError(f"task {self.name(bad)}: unknown resource {self.resource[bad]}")
        if self.edges.size and not (self.edges.min() >= 0 and self.edges.max() < self.n):
            raise UserError(f"an edge leads to task {self.edges.max()}: there are {self.n}")
        circle = np.any(self.edges[:, 0] >= self.edges[:, 1])  # else there can be none
        if circle and len(_run(self.duration_s, self.edges, np.arange(self.n))[1]) < self.n:
            import networkx as nx

            tasks = " -> ".join(self.name(task) for task, _ in nx.find_cycle(self.to_networkx()))
            raise UserError(f"tasks wait for each other: {tasks}: leave out an edge")

    @classmethod
    def of(
        cls, duration_s: ArrayLike, edges: ArrayLike, resource: Sequence[int] | None = None
    ) -> TaskGraph:
        """Return a graph of "forward" tasks, each on the resource of that number; else on its own.

        >>> both = TaskGraph.of([1.0, 2.0], [], resource=[0, 0])
        >>> both.longest_path_s, schedule(both).duration_s
        (2.0, 3.0)
        """
        seconds = np.asarray(duration_s, float)
        places = np.arange(seconds.size) if resource is None else np.array(resource)
        names = tuple(f"gpu {number}" for number in range(places.max(initial=-1) + 1))
        kind, none = np.full(seconds.size, KINDS.index("forward")), np.full(seconds.size, -1)
        pairs = np.array(edges, np.int64).reshape(-1, 2)
        return cls(names, kind, places, seconds, none, none, none, pairs)

    @property
    def n(self) -> int:
        """Number of tasks."""
        return len(self.kind)

    def name(self, task: int) -> str:
        """Return T and the task's number, as in dag Fig 1."""
        return f"T{task}"

    def describe(self, task: int) -> str:
        """Return name and kind, with layer and rank if any: ``T12 (forward of layer 2 on rank 0)``."""
        of = f" of layer {self.layer[task]}" if self.layer[task] >= 0 else ""
        on = f" on rank {self.rank[task]}" if self.rank[task] >= 0 else ""
        return f"{self.name(task)} ({KINDS[self.kind[task]]}{of}{on})"

    @cached_property
    def computes(self) -> Bools:
        """(n,) whether a task is of the computing kinds; the others communicate."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in COMPUTING])

    def to_networkx(self) -> Any:
        """Return it as a networkx.DiGraph: an edge weighs what its first task takes."""
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.n))
        taken_s = self.duration_s[self.edges[:, 0]].tolist()
        pairs = self.edges.tolist()
        graph.add_weighted_edges_from((a, b, s) for (a, b), s in zip(pairs, taken_s, strict=True))
        return graph

    @cached_property
    def earliest_s(self) -> Floats:
        """(n,) when each task can begin if every resource could do everything at once."""
        return _run(self.duration_s, self.edges, np.arange(self.n))[0]

    @property
    def longest_path_s(self) -> float:
        """What no schedule can be shorter than."""
        return float((self.earliest_s + self.duration_s).max(initial=0.0))

    @cached_property
    def slack_s(self) -> Floats:
        """(n,) by how much each task alone may be late without making the longest path longer."""
        after_s, _ = _run(self.duration_s, self.edges[:, ::-1], np.arange(self.n))
        slack = self.longest_path_s - after_s - self.duration_s - self.earliest_s
        return np.asarray(np.maximum(slack, 0.0))


@dataclass(frozen=True, eq=False)
class Schedule:
    """When every task runs: a resource does one at a time, in the order in which they become ready.

    start_s : (n,); order : (n,) tasks as they were begun
    """

    graph: TaskGraph
    start_s: Floats
    order: Ints

    @property
    def end_s(self) -> Floats:
        """(n,) when each task is done."""
        return np.asarray(self.start_s + self.graph.duration_s)

    @property
    def duration_s(self) -> float:
        """From 0 to the end of the last task."""
        return float(self.end_s.max(initial=0.0))

    @cached_property
    def iteration_ends_s(self) -> Floats:
        """(k,) when the last task of each iteration is done."""
        ends = np.zeros(int(self.graph.iteration.max(initial=0)) + 1)
        np.maximum.at(ends, np.maximum(self.graph.iteration, 0), self.end_s)
        return ends

    @property
    def period_s(self) -> float:
        """Time from the end of the last iteration but one to the end of the last; of one, its duration."""
        ends = self.iteration_ends_s
        return float(ends[-1] - ends[-2]) if len(ends) > 1 else self.duration_s

    @cached_property
    def bound(self) -> TaskGraph:
        """The graph with edges from each task to the next on its resource: the longest path is this."""
        by_resource = self.order[np.argsort(self.graph.resource[self.order], kind="stable")]
        held = self.graph.resource[by_resource]
        arcs = np.column_stack([by_resource[:-1], by_resource[1:]])[held[:-1] == held[1:]]
        return replace(self.graph, edges=np.concatenate([self.graph.edges, arcs]))

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """The tasks, first to last, each of which begins when the one before it ends, from 0 to the end.

        A longest path of ``bound``; of equal ones that of the smallest numbers, from its end.
        """
        first, before = _following(self.bound.edges[:, ::-1], self.graph.n)
        path = [int(np.argmax(self.end_s))] if self.graph.n else []
        while path:
            waited_for = np.sort(before[first[path[-1]] : first[path[-1] + 1]])
            binding = waited_for[self.end_s[waited_for] == self.start_s[path[-1]]]
            if not binding.size:
                break
            path.append(int(binding[0]))
        return tuple(path[::-1])

    def limits(self) -> dict[str, float]:
        """Return the share of the critical path by class of resource ("gpu" of "gpu 3"), largest first.

        Of three iterations or more the first and the last do not count: nothing is hidden yet, or any more.
        """
        last = len(self.iteration_ends_s) - 1
        inner = range(1, last) if last > 1 else range(-1, last + 1)
        seconds = self._on_path(inner, lambda kind, resource: resource.partition(" ")[0])
        whole = sum(seconds.values()) or 1.0
        return {name: seconds[name] / whole for name in sorted(seconds, key=lambda n: -seconds[n])}

    def stretches(self) -> dict[str, float]:
        """Return seconds of the critical path in one iteration, first to last, by kind and resource.

        Of three iterations or more the last but one, else all.
        """
        last = len(self.iteration_ends_s) - 1
        those = range(last - 1, last) if last > 1 else range(-1, last + 1)
        return self._on_path(those, lambda kind, resource: f"{kind} on {resource}")

    def _on_path(self, iterations: range, name: Callable[[str, str], str]) -> dict[str, float]:
        """Seconds of the critical path's tasks of these iterations, by a name of kind and resource."""
        graph, seconds = self.graph, dict[str, float]()
        for task in self.critical_path:
            if graph.iteration[task] in iterations:
                key = name(KINDS[graph.kind[task]], graph.resources[graph.resource[task]])
                seconds[key] = seconds.get(key, 0.0) + float(graph.duration_s[task])
        return seconds


def schedule(graph: TaskGraph) -> Schedule:
    """Return the graph on its resources, first ready first served."""
    return Schedule(graph, *_run(graph.duration_s, graph.edges, graph.resource))


def levels(graph: TaskGraph) -> Ints:
    """Return (n,) the most edges that lead to each task, one after the other."""
    return _run(np.ones(graph.n), graph.edges, np.arange(graph.n))[0].astype(np.int64)


def _following(edges: Ints, n: int) -> tuple[Ints, Ints]:
    """(n + 1,) and (m,): the tasks after task i are the second's from first[i] to first[i + 1]."""
    order = np.argsort(edges[:, 0], kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(edges[:, 0], minlength=n))])
    return first, edges[order, 1]


def _run(duration_s: Floats, edges: Ints, resource: Ints) -> tuple[Floats, Ints]:
    """(n,) when each task begins, and the tasks as they were begun: not all, if some wait in a circle."""
    n = len(duration_s)
    begins, after = (column.tolist() for column in _following(edges, n))
    waits = np.bincount(edges[:, 1], minlength=n).tolist()
    taken_s, held = duration_s.tolist(), resource.tolist()
    ready_s, start_s, free_s = [0.0] * n, [0.0] * n, [0.0] * (max(held, default=0) + 1)
    queue = [(0.0, task) for task in range(n) if not waits[task]]
    order = []
    while queue:
        at_s, task = heappop(queue)
        start_s[task] = max(free_s[held[task]], at_s)
        free_s[held[task]] = end_s = start_s[task] + taken_s[task]
        order.append(task)
        for freed in after[begins[task] : begins[task + 1]]:
            ready_s[freed] = max(ready_s[freed], end_s)
            waits[freed] -= 1
            if not waits[freed]:
                heappush(queue, (ready_s[freed], freed))
    return np.array(start_s), np.array(order, np.int64)
