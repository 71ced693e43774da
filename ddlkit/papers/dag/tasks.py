"""Tasks, what each waits for and what it occupies: longest path, slack, and a schedule on resources.

A task is a number from 0; an edge (a, b) says that b begins after a has ended (dag IV-B). Without resources
every task begins as early as its edges allow: the longest path. With them a resource does one task at a
time, in the order in which they become ready, the smaller number first: no choice is left, so the schedule is
one, and it is the longest path of the graph with an edge more between neighbours on a resource.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.timeline import KINDS, Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

COMPUTING = ("decode", "forward", "backward", "update")
"""Kinds of computing tasks; all others communicate (dag IV-A)."""

_CODES = ("kind", "resource", "rank", "layer", "iteration")


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """n tasks in columns, and what must come before what.

    kind : (n,) places in KINDS; resource : (n,) places in ``resources``
    duration_s : (n,); rank, layer, iteration : (n,), -1 where a task is of all or none; ranks and
        iterations count from 0, layers from 1 as in the paper
    edges : (m, 2) numbers of tasks, the first before the second
    names : n, or none: T0, T1, ... as in dag Fig 1

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
    names: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name in (*_CODES, "edges", "duration_s"):
            column = np.array(getattr(self, name), float if name == "duration_s" else np.int64)
            column.setflags(write=False)
            object.__setattr__(self, name, column)
            if name != "edges" and column.shape != self.kind.shape:
                raise UserError(f"tasks: column {name} has {column.size} rows, not {self.n}")
        for bad in np.flatnonzero(~((self.duration_s >= 0) & (self.duration_s < np.inf)))[:1]:
            seconds = self.duration_s[bad]
            told = "no duration" if np.isnan(seconds) else f"a duration of {seconds:g} s"
            raise UserError(f"task {self.describe(bad)} has {told}: give a finite time >= 0")
        known = (self.resource >= 0) & (self.resource < len(self.resources))
        for bad in np.flatnonzero(~known)[:1]:
            raise UserError(f"task {self.name(bad)}: unknown resource {self.resource[bad]}")
        if self.edges.size and not (self.edges.min() >= 0 and self.edges.max() < self.n):
            raise UserError(f"an edge leads to task {self.edges.max()}: there are {self.n}")
        if np.any(self.edges[:, 0] >= self.edges[:, 1]):  # else no circle can be
            self._check_order()

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Mapping[str, Any]],
        edges: Sequence[tuple[str, str]],
        resources: Sequence[str],
    ) -> TaskGraph:
        """A graph of mappings with name, kind, resource, duration_s, and rank, layer, iteration where known.

        Raises UserError naming the row for a missing column, an unknown kind or resource, and names that
        occur twice; and as every graph does.

        >>> rows = [{"name": "read", "kind": "io", "resource": "disk", "duration_s": 2.0},
        ...         {"name": "learn", "kind": "forward", "resource": "gpu", "duration_s": 3.0}]
        >>> TaskGraph.from_rows(rows, [("read", "learn")], ["disk", "gpu"]).longest_path_s
        5.0
        """
        numbers: dict[str, int] = {}
        for row, task in enumerate(rows):
            name = str(task.get("name", ""))
            problem = _problem(task, numbers, resources)
            if problem:
                raise UserError(f"tasks, row {row} ({name or 'no name'}): {problem}")
            numbers[name] = row
        for edge in edges:
            for name in edge:
                if name not in numbers:
                    raise UserError(f"edge {edge[0]} -> {edge[1]}: there is no task {name!r}")
        column = {
            "kind": [KINDS.index(task["kind"]) for task in rows],
            "resource": [list(resources).index(task["resource"]) for task in rows],
            "duration_s": [task["duration_s"] for task in rows],
            **{name: [task.get(name, -1) for task in rows] for name in _CODES[2:]},
        }
        pairs = np.array([[numbers[a], numbers[b]] for a, b in edges], np.int64).reshape(-1, 2)
        arrays = {name: np.array(values) for name, values in column.items()}
        return cls(tuple(resources), edges=pairs, names=tuple(numbers), **arrays)

    # -- what is in it ---------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Number of tasks."""
        return len(self.kind)

    def name(self, task: int) -> str:
        """As given, or T and its number."""
        return self.names[task] if self.names else f"T{task}"

    def describe(self, task: int) -> str:
        """Name and kind, with layer and rank where it has them: ``T12 (forward of layer 2 on rank 0)``."""
        of = f" of layer {self.layer[task]}" if self.layer[task] >= 0 else ""
        on = f" on rank {self.rank[task]}" if self.rank[task] >= 0 else ""
        return f"{self.name(task)} ({KINDS[self.kind[task]]}{of}{on})"

    @cached_property
    def computes(self) -> Bools:
        """(n,) whether a task is of the computing kinds; the others communicate."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in COMPUTING])

    def chosen(
        self, kind: str | None = None, rank: int | None = None, layer: int | None = None
    ) -> Bools:
        """(n,) tasks of a kind, a rank, a layer, or all of these.

        Raises UserError for a kind, rank or layer that no task has, and where no task has them all.
        """
        mask = np.full(self.n, True)
        if kind is not None:
            present = [KINDS[code] for code in np.unique(self.kind)]
            if kind not in present:
                raise UserError(f"no task of kind {kind!r}: there are {', '.join(present)}")
            mask &= self.kind == KINDS.index(kind)
        for what, column, wanted in (("rank", self.rank, rank), ("layer", self.layer, layer)):
            if wanted is None:
                continue
            there = np.unique(column[column >= 0])
            if wanted not in there:
                span = f"they are {there[0]} to {there[-1]}" if there.size else "there are none"
                raise UserError(f"no task of {what} {wanted}: {span}")
            mask &= column == wanted
        if not mask.any():
            raise UserError(f"no task of kind {kind}, rank {rank} and layer {layer} together")
        return mask

    def scaled(self, factor: float, tasks: Bools) -> TaskGraph:
        """The same graph where ``tasks`` (n,) take ``factor`` times as long. Raises UserError below 0."""
        if not 0 <= factor < np.inf:
            raise UserError(f"tasks cannot take {factor:g} times as long: use a number >= 0")
        return replace(self, duration_s=np.where(tasks, factor * self.duration_s, self.duration_s))

    def to_networkx(self) -> Any:
        """Return it as a networkx.DiGraph: an edge weighs what its first task takes."""
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.n))
        taken_s = self.duration_s[self.edges[:, 0]].tolist()
        pairs = self.edges.tolist()
        graph.add_weighted_edges_from((a, b, s) for (a, b), s in zip(pairs, taken_s, strict=True))
        return graph

    # -- the longest path ------------------------------------------------------------------------

    @cached_property
    def earliest_s(self) -> Floats:
        """(n,) when each task can begin if every resource could do everything at once."""
        return _settled(self.duration_s, self.edges)[0]

    @property
    def longest_path_s(self) -> float:
        """What no schedule can be shorter than."""
        return float((self.earliest_s + self.duration_s).max(initial=0.0))

    @cached_property
    def slack_s(self) -> Floats:
        """(n,) by how much each task alone may be late without making the longest path longer."""
        after_s, _ = _settled(self.duration_s, self.edges[:, ::-1])
        slack = self.longest_path_s - after_s - self.duration_s - self.earliest_s
        return np.asarray(np.maximum(slack, 0.0))

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Tasks of one longest path, first to last; of equal ones the smallest numbers, from its end."""
        return _critical(self.earliest_s, self.earliest_s + self.duration_s, self.edges)

    def shares(self, path: Sequence[int]) -> dict[str, float]:
        """Share of the time of a path's tasks by class of resource, the largest first; "gpu 3" is "gpu"."""
        seconds: dict[str, float] = {}
        for task in path:
            name = self.resources[self.resource[task]].partition(" ")[0]
            seconds[name] = seconds.get(name, 0.0) + float(self.duration_s[task])
        whole = sum(seconds.values()) or 1.0
        return {name: seconds[name] / whole for name in sorted(seconds, key=lambda n: -seconds[n])}

    def _check_order(self) -> None:
        """Raise naming a circle of tasks that wait for each other, if there is one."""
        _, waits = _settled(self.duration_s, self.edges)
        graph: dict[int, set[int]] = {}
        for before, after in self.edges[waits[self.edges].all(axis=1)].tolist():
            graph.setdefault(after, set()).add(before)
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            circle = " -> ".join(self.name(task) for task in error.args[1])
            raise UserError(f"tasks wait for each other: {circle}: leave out an edge") from None


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
    def _edges(self) -> Ints:
        """The graph's edges, and one from each task to the next on its resource."""
        by_resource = self.order[np.argsort(self.graph.resource[self.order], kind="stable")]
        held = self.graph.resource[by_resource]
        arcs = np.column_stack([by_resource[:-1], by_resource[1:]])[held[:-1] == held[1:]]
        return np.concatenate([self.graph.edges, arcs])

    @property
    def bound(self) -> TaskGraph:
        """The graph with edges from each task to the next on its resource: the longest path is this."""
        return replace(self.graph, edges=self._edges)

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """The tasks, first to last, each of which begins when the one before it ends, from 0 to the end.

        That of ``bound``, whose tasks begin no earlier than here.
        """
        return _critical(self.start_s, self.end_s, self._edges)

    def limits(self) -> dict[str, float]:
        """Share of the critical path by class of resource, the largest first, without start and end.

        Of three iterations or more the first and the last do not count: nothing is hidden yet, or any more.
        """
        path, last = self.critical_path, len(self.iteration_ends_s) - 1
        inner = [task for task in path if last < 2 or 0 < self.graph.iteration[task] < last]
        return self.graph.shares(inner)

    def stretches(self) -> dict[str, float]:
        """Seconds of the critical path in one iteration, first to last, by kind and resource.

        Of three iterations or more the last but one, else all.
        """
        last, found = len(self.iteration_ends_s) - 1, dict[str, float]()
        for task in self.critical_path:
            if last < 2 or self.graph.iteration[task] == last - 1:
                where = self.graph.resources[self.graph.resource[task]]
                name = f"{KINDS[self.graph.kind[task]]} on {where}"
                found[name] = found.get(name, 0.0) + float(self.graph.duration_s[task])
        return found

    def timeline(self) -> Timeline:
        """As spans, a stream per resource, all of rank 0, so that one plot shows them."""
        graph, end_s = self.graph, self.end_s
        names, resources = np.array(KINDS), np.array(graph.resources)
        return Timeline(
            task=np.array([graph.describe(task) for task in range(graph.n)]),
            kind=names[graph.kind],
            stream=resources[graph.resource],
            rank=np.zeros(graph.n, np.int64),
            iteration=np.zeros(graph.n, np.int64),
            group=np.where(graph.computes, -1, graph.layer),
            origin=np.full(graph.n, "simulated"),
            start_s=self.start_s,
            end_s=end_s,
            bytes=np.zeros(graph.n, np.int64),
        )


def schedule(graph: TaskGraph) -> Schedule:
    """The graph on its resources, first ready first served.

    >>> rows = [{"name": name, "kind": "io", "resource": "disk", "duration_s": 1.0} for name in "ab"]
    >>> both = TaskGraph.from_rows(rows, [], ["disk"])
    >>> both.longest_path_s, schedule(both).duration_s
    (1.0, 2.0)
    """
    begins, after = (column.tolist() for column in _following(graph.edges, graph.n))
    waits = np.bincount(graph.edges[:, 1], minlength=graph.n).tolist()
    taken_s, resource = graph.duration_s.tolist(), graph.resource.tolist()
    ready_s, start_s = [0.0] * graph.n, [0.0] * graph.n
    free_s = [0.0] * len(graph.resources)
    queue = [(0.0, task) for task in range(graph.n) if not waits[task]]
    order = []
    while queue:
        at_s, task = heappop(queue)
        on = resource[task]
        start_s[task] = max(free_s[on], at_s)
        free_s[on] = end_s = start_s[task] + taken_s[task]
        order.append(task)
        for freed in after[begins[task] : begins[task + 1]]:
            ready_s[freed] = max(ready_s[freed], end_s)
            waits[freed] -= 1
            if not waits[freed]:
                heappush(queue, (ready_s[freed], freed))
    return Schedule(graph, np.array(start_s), np.array(order, np.int64))


def levels(graph: TaskGraph) -> Ints:
    """(n,) the most edges that lead to each task, one after the other."""
    steps, _ = _settled(np.ones(graph.n), graph.edges)
    return steps.astype(np.int64)


def _problem(task: Mapping[str, Any], known: Mapping[str, int], resources: Sequence[str]) -> str:
    """What is wrong with one row of tasks, or nothing."""
    missing = [key for key in ("name", "kind", "resource") if task.get(key) is None]
    if missing:
        return f"{missing[0]} is missing"
    if task["name"] in known:
        return f"the name stands in row {known[task['name']]} too"
    if task["kind"] not in KINDS:
        return f"unknown kind {task['kind']!r}: use one of {', '.join(KINDS)}"
    if task["resource"] not in resources:
        return f"unknown resource {task['resource']!r}: use one of {', '.join(resources)}"
    seconds = task.get("duration_s")
    if not isinstance(seconds, (int, float)) or not np.isfinite(seconds):
        return "the duration is missing: give duration_s"
    return ""


def _following(edges: Ints, n: int) -> tuple[Ints, Ints]:
    """(n + 1,) and (m,): the tasks after task i are the second's from first[i] to first[i + 1]."""
    order = np.argsort(edges[:, 0], kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(edges[:, 0], minlength=n))])
    return first, edges[order, 1]


def _critical(start_s: Floats, end_s: Floats, edges: Ints) -> tuple[int, ...]:
    """Tasks of one longest path, first to last; of equal ones the smallest numbers, from its end."""
    first, before = _following(edges[:, ::-1], len(start_s))
    path = [int(np.argmax(end_s))] if len(end_s) else []
    while path:
        waited_for = np.sort(before[first[path[-1]] : first[path[-1] + 1]])
        binding = waited_for[end_s[waited_for] == start_s[path[-1]]]
        if not binding.size:
            break
        path.append(int(binding[0]))
    return tuple(path[::-1])


def _slices(first: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """Places of all entries of the ``chosen`` slices, and for each the place in ``chosen`` it is of."""
    counts = first[chosen + 1] - first[chosen]
    of = np.repeat(np.arange(len(chosen)), counts)
    skipped = np.cumsum(counts) - counts
    return np.arange(len(of)) + (first[chosen] - skipped)[of], of


def _settled(duration_s: Floats, edges: Ints) -> tuple[Floats, Ints]:
    """(n,) the earliest start of each task, and (n,) for how many it still waits: none, without a circle.

    All that are ready are settled at once, then those after them.
    """
    n = len(duration_s)
    first, after = _following(edges, n)
    waits = np.bincount(edges[:, 1], minlength=n)
    start_s, front = np.zeros(n), np.flatnonzero(waits == 0)
    while front.size:
        places, of = _slices(first, front)
        targets = after[places]
        np.maximum.at(start_s, targets, (start_s[front] + duration_s[front])[of])
        np.subtract.at(waits, targets, 1)
        front = np.unique(targets[waits[targets] == 0])
    return start_s, waits
