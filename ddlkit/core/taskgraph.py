"""Synchronous training as a graph of tasks: longest path, slack, schedules on resources, and what-if.

The graph is that of dag IV-B and its Fig 1. An edge (a, b) says that b begins after a has ended. A resource
does one task at a time, in the order in which they become ready, the smaller number first: the schedule is
the longest path of the graph with one more edge between neighbours on a resource. What the paper leaves open:
a message holds the links of all machines, and the disk (and the CPU where it decodes) is that of a machine,
or one network file system of all machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import FusionPlan
from ddlkit.core.strategies import IterationTimes, Strategy
from ddlkit.core.timeline import KINDS
from ddlkit.core.workload import Floats, Ints

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """n tasks in columns, and what must come before what.

    kind : (n,) places in KINDS; resource : (n,) places in ``resources``; duration_s : (n,)
    rank, layer, iteration : (n,), -1 where a task is of all or none; layers from 1, the others from 0
    edges : (m, 2) numbers of tasks, the first before the second

    Raises UserError for a duration that is negative or infinite.
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
        for name in ("kind", "resource", "rank", "layer", "iteration", "edges"):
            object.__setattr__(self, name, np.array(getattr(self, name), np.int64))
        object.__setattr__(self, "duration_s", np.array(self.duration_s, float))
        allowed = (self.duration_s >= 0) & (self.duration_s < np.inf)
        if allowed.all():
            return
        bad = int(np.flatnonzero(~allowed)[0])
        what = KINDS[self.kind[bad]]
        if self.rank[bad] >= 0:
            what += f" on rank {self.rank[bad]}"
        seconds = f"has a duration of {self.duration_s[bad]:g} s"
        raise UserError(f"task T{bad} ({what}) {seconds}: give a finite time >= 0")

    @classmethod
    def of(
        cls,
        duration_s: ArrayLike,
        edges: ArrayLike,
        resource: Sequence[int] | None = None,
    ) -> TaskGraph:
        """Return a graph of "forward" tasks, each on the resource of that number; else on its own."""
        seconds = np.asarray(duration_s, float)
        places = np.arange(seconds.size) if resource is None else np.array(resource)
        names = tuple(f"gpu {number}" for number in range(places.max(initial=-1) + 1))
        kind = np.full(seconds.size, KINDS.index("forward"))
        none = np.full(seconds.size, -1)
        pairs = np.array(edges, np.int64).reshape(-1, 2)
        return cls(names, kind, places, seconds, none, none, none, pairs)

    @property
    def n(self) -> int:
        """Return the number of tasks."""
        return len(self.kind)

    @cached_property
    def computes(self) -> Bools:
        """Return (n,) whether a task computes; the others communicate (dag IV-A)."""
        compute_kinds = ("decode", "forward", "backward", "update")
        return np.isin(self.kind, [KINDS.index(kind) for kind in compute_kinds])

    @cached_property
    def earliest_s(self) -> Floats:
        """Return (n,) when each task can begin if every resource could do everything at once."""
        return _run(self.duration_s, self.edges, np.arange(self.n))[0]

    @property
    def longest_path_s(self) -> float:
        """Return what no schedule can be shorter than."""
        return float((self.earliest_s + self.duration_s).max(initial=0.0))

    @cached_property
    def slack_s(self) -> Floats:
        """Return (n,) by how much each task alone may be late without making the longest path longer."""
        after_s, _ = _run(self.duration_s, self.edges[:, ::-1], np.arange(self.n))
        slack = self.longest_path_s - after_s - self.duration_s - self.earliest_s
        return np.asarray(np.maximum(slack, 0.0))

    def levels(self) -> Ints:
        """Return (n,) the most edges that lead to each task, one after the other."""
        return _run(np.ones(self.n), self.edges, np.arange(self.n))[0].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Schedule:
    """When every task runs: start_s (n,), and their ``order`` (n,) as they were begun."""

    graph: TaskGraph
    start_s: Floats
    order: Ints

    @property
    def end_s(self) -> Floats:
        """Return (n,) when each task is done."""
        return np.asarray(self.start_s + self.graph.duration_s)

    @property
    def duration_s(self) -> float:
        """Return seconds from 0 to the end of the last task."""
        return float(self.end_s.max(initial=0.0))

    @cached_property
    def iteration_ends_s(self) -> Floats:
        """Return (k,) when the last task of each iteration is done."""
        ends = np.zeros(int(self.graph.iteration.max(initial=0)) + 1)
        np.maximum.at(ends, np.maximum(self.graph.iteration, 0), self.end_s)
        return ends

    @property
    def period_s(self) -> float:
        """Return seconds between the ends of the last two iterations; of one, its duration."""
        ends = self.iteration_ends_s
        return float(ends[-1] - ends[-2]) if len(ends) > 1 else self.duration_s

    @cached_property
    def bound(self) -> TaskGraph:
        """Return the graph with edges from each task to the next on its resource."""
        by_resource = self.order[
            np.argsort(self.graph.resource[self.order], kind="stable")
        ]
        held = self.graph.resource[by_resource]
        neighbours = np.column_stack([by_resource[:-1], by_resource[1:]])
        arcs = neighbours[held[:-1] == held[1:]]
        return replace(self.graph, edges=np.concatenate([self.graph.edges, arcs]))

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Return tasks, each of which begins when the one before it ends; of equals the smallest."""
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
        graph, last = self.graph, len(self.iteration_ends_s) - 1
        iterations = range(1, last) if last > 1 else range(-1, last + 1)
        seconds: dict[str, float] = {}
        for task in self.critical_path:
            if graph.iteration[task] in iterations:
                name = graph.resources[graph.resource[task]].partition(" ")[0]
                seconds[name] = seconds.get(name, 0.0) + float(graph.duration_s[task])
        whole = sum(seconds.values()) or 1.0
        return {
            name: seconds[name] / whole
            for name in sorted(seconds, key=lambda n: -seconds[n])
        }


def schedule(graph: TaskGraph) -> Schedule:
    """Return the graph on its resources, first ready first served."""
    return Schedule(graph, *_run(graph.duration_s, graph.edges, graph.resource))


def _following(edges: Ints, n: int) -> tuple[Ints, Ints]:
    """Return (n + 1,) and (m,): the tasks after task i are the second's from first[i] to first[i + 1]."""
    order = np.argsort(edges[:, 0], kind="stable")
    first = np.append(0, np.cumsum(np.bincount(edges[:, 0], minlength=n)))
    return first, edges[order, 1]


def _run(duration_s: Floats, edges: Ints, resource: Ints) -> tuple[Floats, Ints]:
    """Return (n,) when each task begins, and the tasks as begun: not all, if some wait in a circle."""
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


@dataclass(frozen=True)
class Gpus:
    """Where tasks run: ``machines`` with as many GPUs each; ``shared_disk``: one NFS for all machines.

    decoding : on the processor of a "machine", on each rank's "own" core, or on the core that "trains"
    """

    machines: int = 1
    per_machine: int = 1
    shared_disk: bool = False
    decoding: str = "machine"

    @classmethod
    def of(cls, n: int, per_machine: int, shared_disk: bool = False) -> Gpus:
        """Return ``n`` GPUs on as many machines as they fill. Raises UserError where they do not."""
        if per_machine < 1 or n % per_machine:
            raise UserError(f"{n} GPUs do not fill machines of {per_machine}")
        return cls(n // per_machine, per_machine, shared_disk)

    @property
    def n(self) -> int:
        """Return N_g, the GPUs of all machines."""
        return self.machines * self.per_machine

    def resources(self) -> tuple[tuple[str, ...], dict[str, Ints]]:
        """Return what resources are called, and their numbers by kind: one a rank (R,), or (1,) of all."""
        ranks = np.arange(self.n)
        machine = ranks // self.per_machine
        of_rank = {"disk": 0 * machine if self.shared_disk else machine}
        if self.decoding != "trains":
            of_rank["cpu"] = machine if self.decoding == "machine" else ranks
        names, numbers = list[str](), dict[str, Ints]()
        for kind, places in {**of_rank, "copy": ranks, "gpu": ranks}.items():
            numbers[kind] = len(names) + places
            names += [f"{kind} {number}" for number in range(places.max() + 1)]
        if self.shared_disk:
            names[0] = "disk all"
        numbers |= {"link": np.array([len(names)]), "all": np.array([len(names) + 1])}
        return (*names, "link", "gpu all"), {"cpu": numbers["gpu"], **numbers}


def s_sgd(
    times: IterationTimes,
    strategy: Strategy,
    gpus: Gpus = Gpus(),
    *,
    iterations: int = 1,
    plan: FusionPlan | None = None,
    decode_s: float = 0.0,
) -> TaskGraph:
    """Return the DAG of ``iterations`` of S-SGD (dag IV-B and IV-C), tasks numbered as in Fig 1.

    times : io_s and h2d_s are of *one* GPU's batch, as decode_s is; communication_s of each layer, or of each
        message of ``plan`` (a tensor is a layer), in forward order

    >>> from ddlkit.core.strategies import ONE_AFTER_THE_OTHER
    >>> toy = IterationTimes(1.0, 1.0, np.ones(3), np.ones(3), np.ones(3), 1.0)
    >>> graph = s_sgd(toy, ONE_AFTER_THE_OTHER, Gpus(1, 4))
    >>> graph.n, graph.longest_path_s, schedule(graph).duration_s
    (36, 10.0, 15.0)
    """
    if iterations < 1:
        raise UserError(f"{iterations} iterations: there must be at least one")
    ends = range(1, len(times.backward_s) + 1) if plan is None else plan.ends
    names, held = gpus.resources()
    decode_s = decode_s if strategy.decodes_on_cpu else 0.0
    rows, within, between, fetched = _one_iteration(
        times, strategy, ends, held, decode_s
    )
    lag, n = 1 + strategy.batches_ahead, len(rows)
    offsets = n * np.arange(iterations)[:, None, None]
    ahead = fetched + [0, lag * n] + offsets[:-lag]
    edges = within + offsets, between + [0, n] + offsets[:-1], ahead
    kind, resource, duration_s, rank, layer = np.tile(rows, (iterations, 1)).T
    return TaskGraph(
        resources=names,
        kind=kind,
        resource=resource,
        duration_s=duration_s,
        rank=rank,
        layer=layer,
        iteration=np.repeat(np.arange(iterations), n),
        edges=np.concatenate([part.reshape(-1, 2) for part in edges]),
    )


def _one_iteration(
    times: IterationTimes,
    strategy: Strategy,
    ends: Sequence[int],
    held: Mapping[str, Ints],
    decode_s: float,
) -> tuple[Floats, Ints, Ints, Ints]:
    """Return (n, 5) columns of tasks; (m, 2) edges within, to the next iteration, and to fetching."""
    rows: list[tuple[float, ...]] = []
    edges: list[tuple[int, int]] = []
    layers = range(len(times.backward_s))

    def add(
        kind: str, resource: str, seconds: float, layer: int, before: Sequence[int]
    ) -> Any:
        """Return a task a rank, after that rank's one of ``before``."""
        numbers = range(len(rows), len(rows) + len(held["gpu"]))
        place, code = held[resource], KINDS.index(kind)
        rows.extend(
            (code, place[rank], seconds, rank, layer) for rank in range(len(numbers))
        )
        edges.extend(zip(before, numbers, strict=False))
        return numbers

    io = fetched = add("io", "disk", times.io_s, -1, ())
    if decode_s:
        fetched = add("decode", "cpu", decode_s, -1, io)
    h2d = add("h2d", "copy", times.h2d_s, -1, fetched)
    lines = [h2d]
    for k in layers:
        lines.append(add("forward", "gpu", times.forward_s[k], k + 1, lines[-1]))
    for k in reversed(layers):
        lines.append(add("backward", "gpu", times.backward_s[k], k + 1, lines[-1]))
    update = len(rows) + len(ends)
    for end, seconds in zip(ends, times.communication_s[::-1], strict=True):
        ready = lines[len(layers) + end if strategy.sends_during_backward else -1]
        edges += [*((task, len(rows)) for task in ready), (len(rows), update)]
        layer = len(layers) - end + 1
        rows.append((KINDS.index("all_reduce"), held["link"][0], seconds, -1, layer))
    rows.append((KINDS.index("update"), held["all"][0], times.update_s, -1, -1))
    waits = [*zip(io, io, strict=True), *((update, task) for task in lines[1])]
    waits += [(update, task) for task in io if not strategy.reads_ahead]
    waits += [(update, task) for task in h2d if not strategy.copies_ahead]
    waits += [*zip(h2d, io, strict=True)] if strategy.one_buffer else []
    ahead = [(update, task) for task in io if strategy.batches_ahead]
    within, between, last = (
        np.array(e, np.int64).reshape(-1, 2) for e in (edges, waits, ahead)
    )
    return np.array(rows), within, between, last


def of_iteration(
    iteration: Iteration,
    strategy: Strategy,
    gpus: Gpus = Gpus(),
    *,
    forward_s: Floats,
    iterations: int = 1,
    io_s: float = 0.0,
    decode_s: float = 0.0,
    h2d_s: float = 0.0,
) -> TaskGraph:
    """Return the DAG of core's iteration, a message per group of its plan; forward_s : (n,) in forward order.

    Raises UserError where messages share a link or are copied.
    """
    iteration.edges()  # refuses what no graph says
    times = IterationTimes.of_workload(iteration.workload, iteration.cost, io_s, h2d_s)
    times = replace(
        times, communication_s=iteration.communication_s[::-1], forward_s=forward_s
    )
    return s_sgd(
        times,
        strategy,
        gpus,
        iterations=iterations,
        plan=iteration.plan,
        decode_s=decode_s,
    )


def tasks_named(graph: TaskGraph, what: str) -> Bools:
    """Return (n,) which tasks a name means.

    what : a kind ("all_reduce"), a resource ("disk"), "layer:2", or "rank:3" for all that a rank computes

    Raises UserError for a name that means no task.
    """
    head, _, number = what.replace(":", " ").partition(" ")
    present = {KINDS[code] for code in np.unique(graph.kind)}
    kind = {name.replace("_", ""): name for name in present}.get(head.replace("_", ""))
    classes = [name.partition(" ")[0] for name in graph.resources]
    chosen = np.zeros(graph.n, bool)
    if head in ("layer", "rank") and number.strip().isdigit():
        column = (
            graph.layer if head == "layer" else np.where(graph.computes, graph.rank, -1)
        )
        chosen = column == int(number)
    elif kind and not number:
        chosen = graph.kind == KINDS.index(kind)
    elif head in classes and not number:
        chosen = np.array([name == head for name in classes])[graph.resource]
    if not chosen.any():
        raise UserError(
            f"no task or resource {what!r}: use layer:NUMBER to {graph.layer.max()}, rank:NUMBER to "
            f"{graph.rank.max()}, a kind ({', '.join(sorted(present))}) or a resource "
            f"({', '.join(dict.fromkeys(classes))})"
        )
    return chosen


def changed(graph: TaskGraph, changes: Sequence[tuple[str, float]]) -> TaskGraph:
    """Return the graph with tasks that take other times: each change is (what, factor), applied in turn.

    ``what`` is a name as in `tasks_named`; ``factor`` says how many times as long these tasks take.
    """
    for what, factor in changes:
        if not 0 <= factor < np.inf:
            raise UserError(
                f"tasks cannot take {factor:g} times as long: use a number >= 0"
            )
        times = np.where(tasks_named(graph, what), factor, 1.0)
        graph = replace(graph, duration_s=times * graph.duration_s)
    return graph


def described(before: Schedule, after: Schedule) -> dict[str, Any]:
    """Return the time between iterations and what limits it, of both schedules, and the speedup."""
    facts: dict[str, Any] = {}
    for when, each in (("", before), ("_after", after)):
        limits = each.limits()
        facts[f"iteration_s{when}"] = each.period_s
        facts[f"limited_by{when}"] = next(iter(limits), "nothing")
        facts[f"shares_of_critical_path{when}"] = limits
    return {
        **facts,
        "speedup": before.period_s / after.period_s if after.period_s else np.inf,
    }
