"""The DAG of synchronous SGD (dag IV-B, Fig 1): any layers, machines, GPUs and iterations, by a strategy.

Tasks are numbered as in Fig 1: of each iteration first all reads, then all copies, forward from layer 1 on,
backward from layer L on, the messages in the order of backward, the update. A read, a copy and a layer are
one task a GPU; a message and the update one for all.

What the paper leaves open is decided so. A message holds the links of all machines at once, so they are
one resource; the disk (and the CPU where it decodes) is of a machine, or the disk of all (NFS); each GPU has
a copy engine of its own. Decoding is a task only where it takes time: Fig 1 has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import FusionPlan
from ddlkit.core.timeline import KINDS
from ddlkit.core.workload import LayerProfile
from ddlkit.papers.dag import IterationTimes, Strategy, exposed_communication_s
from ddlkit.papers.dag.tasks import Bools, Floats, Ints, Schedule, TaskGraph, schedule

ONE_AFTER_THE_OTHER = Strategy(
    copies_ahead=False, sends_during_backward=False, decodes_on_cpu=False, reads_ahead=False
)
"""dag Eqs 1 and 2: nothing is hidden."""
DECODING = ("machine", "own", "trains")
"""Where batches are decoded."""


@dataclass(frozen=True)
class Gpus:
    """Where tasks run: ``machines`` with as many GPUs each; ``shared_disk``: one NFS for all machines.

    decoding : on the processor of a "machine", one task at a time; on a core that each rank has for it, its
        "own"; or on the core that "trains", where processors take the place of GPUs

    Raises UserError for fewer than one of either, and for decoding elsewhere.
    """

    machines: int = 1
    per_machine: int = 1
    shared_disk: bool = False
    decoding: str = "machine"

    def __post_init__(self) -> None:
        if self.decoding not in DECODING:
            raise UserError(f"decoding on {self.decoding!r}: use one of {', '.join(DECODING)}")
        if self.machines < 1 or self.per_machine < 1:
            raise UserError(
                f"{self.machines} machines of {self.per_machine} GPUs: there must be one of each"
            )

    @classmethod
    def of(cls, n: int, per_machine: int, shared_disk: bool = False) -> Gpus:
        """``n`` GPUs on as many machines as they fill. Raises UserError where they do not."""
        if per_machine < 1 or n % per_machine:
            raise UserError(f"{n} GPUs do not fill machines of {per_machine}")
        return cls(n // per_machine, per_machine, shared_disk)

    @property
    def n(self) -> int:
        """N_g, the GPUs of all machines."""
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
    gpus: Gpus | None = None,
    *,
    iterations: int = 1,
    plan: FusionPlan | None = None,
    decode_s: float = 0.0,
) -> TaskGraph:
    """The DAG of ``iterations`` of S-SGD (dag IV-B and IV-C).

    times : io_s and h2d_s are of *one* GPU's batch, as decode_s is; communication_s of each layer, or of each
        message of ``plan`` (a tensor is a layer), in forward order

    Raises UserError without an iteration, and for a plan of other layers or messages.

    >>> toy = IterationTimes(1.0, 1.0, np.ones(3), np.ones(3), np.ones(3), 1.0)
    >>> graph = s_sgd(toy, ONE_AFTER_THE_OTHER, Gpus(1, 4))
    >>> graph.n, graph.longest_path_s, schedule(graph).duration_s
    (36, 10.0, 15.0)
    """
    gpus = Gpus() if gpus is None else gpus
    layers, messages = len(times.backward_s), len(times.communication_s)
    ends = np.arange(1, layers + 1) if plan is None else np.array(plan.ends)
    if iterations < 1:
        raise UserError(f"{iterations} iterations: there must be at least one")
    if ends[-1] != layers or len(ends) != messages:
        raise UserError(
            f"a plan of {ends[-1]} layers in {len(ends)} messages does not fit {layers} layers with "
            f"{messages} times of communication"
        )
    names, held = gpus.resources()
    decode_s = decode_s if strategy.decodes_on_cpu else 0.0
    rows, within, between, fetched = _one_iteration(times, strategy, ends.tolist(), held, decode_s)
    lag, n = 1 + strategy.batches_ahead, len(rows)
    offsets = n * np.arange(iterations)[:, None, None]
    edges = (
        within + offsets,
        between + [0, n] + offsets[:-1],
        fetched + [0, lag * n] + offsets[:-lag],
    )
    numbers = np.repeat(np.arange(iterations), n), np.concatenate([e.reshape(-1, 2) for e in edges])
    kind, resource, duration_s, rank, layer = np.tile(rows, (iterations, 1)).T
    return TaskGraph(names, kind, resource, duration_s, rank, layer, *numbers)


def _one_iteration(
    times: IterationTimes,
    strategy: Strategy,
    ends: Sequence[int],
    held: Mapping[str, Ints],
    decode_s: float,
) -> tuple[Floats, Ints, Ints, Ints]:
    """(n, 5) kind, resource, duration_s, rank and layer of its tasks, and three times (m, 2) edges.

    Those within it; to the next, where a strategy waits; and to that before which a batch is fetched.
    """
    rows: list[tuple[float, ...]] = []
    edges: list[tuple[int, int]] = []
    layers = range(len(times.backward_s))

    def add(kind: str, resource: str, seconds: float, layer: int, before: Sequence[int]) -> Any:
        """A task a rank, after that rank's one of ``before``."""
        numbers = range(len(rows), len(rows) + len(held["gpu"]))
        place, code = held[resource], KINDS.index(kind)
        rows.extend((code, place[rank], seconds, rank, layer) for rank in range(len(numbers)))
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
        rows.append(
            (KINDS.index("all_reduce"), held["link"][0], seconds, -1, len(layers) - end + 1)
        )
    rows.append((KINDS.index("update"), held["all"][0], times.update_s, -1, -1))
    waits = [*zip(io, io, strict=True), *((update, task) for task in lines[1])]
    waits += [(update, task) for task in io if not strategy.reads_ahead]
    waits += [(update, task) for task in h2d if not strategy.copies_ahead]
    waits += [*zip(h2d, io, strict=True)] if strategy.one_buffer else []
    ahead = [(update, task) for task in io if strategy.batches_ahead]
    within, between, last = (np.array(e, np.int64).reshape(-1, 2) for e in (edges, waits, ahead))
    return np.array(rows), within, between, last


def period_s(
    times: IterationTimes, strategy: Strategy, gpus: Gpus | None = None, *, decode_s: float = 0.0
) -> float:
    """dag Eq 5 repaired: what the schedule of equal GPUs takes from update to update, in the long run.

    Disks, processors and copy engines work side by side, unless a strategy waits; the update is a part of
    computing. Symbols as in ``s_sgd``; every layer is a message. A read that waits for a copy (one_buffer) or
    for an update has no such form where several GPUs share a disk, nor has a core that decodes and trains:
    UserError.

    >>> toy = IterationTimes(2.0, 1.0, np.ones(3), np.ones(3), np.ones(3), 1.0)
    >>> period_s(toy, Strategy(True, True, False)), period_s(toy, Strategy(True, True, False), Gpus(1, 8))
    (8.0, 16.0)
    """
    gpus = Gpus() if gpus is None else gpus
    if strategy.batches_ahead:
        raise UserError("a read that waits has no closed form on a shared disk: schedule it")
    if gpus.decoding == "trains":
        raise UserError("a core that decodes and trains has no closed form: schedule it")
    sent_s = exposed_communication_s(times)
    if not strategy.sends_during_backward:
        sent_s = float(np.sum(times.communication_s))
    readers = gpus.n if gpus.shared_disk else gpus.per_machine
    busy_s = times.gpu_s + sent_s + times.update_s
    decoding_s = decode_s * (gpus.per_machine if gpus.decoding == "machine" else 1)
    return float(steady_s(readers * times.io_s, decoding_s, times.h2d_s, busy_s, strategy))


def steady_s(reads_s: Any, decoding_s: Any, h2d_s: Any, busy_s: Any, strategy: Strategy) -> Any:
    """``period_s`` by what works side by side: numbers, or arrays that broadcast.

    reads_s, decoding_s : of all batches that share a disk, a processor; busy_s : computing, what is sent and
        not hidden, and the update
    """
    if strategy.one_buffer or not strategy.reads_ahead:
        raise UserError("a read that waits has no closed form on a shared disk: schedule it")
    decoding_s = decoding_s if strategy.decodes_on_cpu else 0.0
    gpu_s = np.maximum(h2d_s, busy_s) if strategy.copies_ahead else h2d_s + busy_s
    return np.maximum(np.maximum(reads_s, decoding_s), gpu_s)


def of_iteration(
    iteration: Iteration,
    strategy: Strategy,
    gpus: Gpus | None = None,
    *,
    forward_s: Floats,
    iterations: int = 1,
    io_s: float = 0.0,
    decode_s: float = 0.0,
    h2d_s: float = 0.0,
) -> TaskGraph:
    """Return the DAG of core's iteration: its tensors as layers, a message per group of its plan.

    forward_s : (n,) of each layer, in forward order

    Raises UserError where messages share a link or are copied.
    """
    iteration.edges()  # refuses what no graph says
    times = IterationTimes.of_workload(iteration.workload, iteration.cost, io_s, h2d_s)
    sent_s = iteration.communication_s[::-1]
    times = replace(times, communication_s=sent_s, forward_s=forward_s)
    return s_sgd(
        times, strategy, gpus, iterations=iterations, plan=iteration.plan, decode_s=decode_s
    )


def tasks_named(graph: TaskGraph, what: str) -> Bools:
    """Return (n,) tasks of a kind ("all_reduce"), of resources ("disk"), of "layer 2", or of "rank 3".

    A rank's are its forward, backward and decoding: what a slow GPU or its processor delays.

    Raises UserError for what the graph does not have.
    """
    head, _, number = what.replace(":", " ").partition(" ")
    present = {KINDS[code] for code in np.unique(graph.kind)}
    kind = {known.replace("_", ""): known for known in present}.get(head.replace("_", ""))
    classes = [name.partition(" ")[0] for name in graph.resources]
    chosen = np.zeros(graph.n, bool)
    if head in ("layer", "rank") and number.strip().isdigit():
        column = graph.layer if head == "layer" else np.where(graph.computes, graph.rank, -1)
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


def resized(profile: LayerProfile, factors: Mapping[str, float]) -> LayerProfile:
    """Return the profile with layers or tensors, by name, so many times as large: in time and bytes.

    Raises UserError for a name that it does not have, and a factor that is not above 0.

    >>> one, n = np.ones(1), np.array([8])
    >>> toy = LayerProfile("toy", "cpu", 1, ("a.weight",), ("a",), n, 4 * n, one, one, one)
    >>> half = resized(toy, {"a": 0.5})
    >>> half.gradient_bytes.tolist(), half.backward_s.tolist()
    ([16], [0.5])
    """
    factor = np.ones(len(profile.tensor))
    for name, times in factors.items():
        names = zip(profile.layer, profile.tensor, strict=True)
        chosen = np.array([name in either for either in names])
        if not chosen.any():
            some = ", ".join(dict.fromkeys(profile.layer[:3]))
            raise UserError(f"no layer or tensor {name!r}: use one of the profile's, as {some}")
        if not 0 < times < np.inf:
            raise UserError(f"layer {name}: cannot be {times:g} times as large: use a number > 0")
        factor[chosen] *= times
    whole = {name: getattr(profile, name) for name in ("parameters", "gradient_bytes")}
    rounded = {
        name: np.maximum(1, np.rint(factor * one)).astype(int) for name, one in whole.items()
    }
    scaled = {
        name: factor * getattr(profile, name) for name in ("forward_s", "backward_s", "flops")
    }
    return replace(profile, **rounded, **scaled)


class WhatIf(NamedTuple):
    """The schedule before a change and after it."""

    before: Schedule
    after: Schedule

    @property
    def speedup(self) -> float:
        """By how much iterations follow each other faster."""
        return self.before.period_s / self.after.period_s if self.after.period_s else np.inf

    def described(self) -> dict[str, Any]:
        """Return the time between iterations, what limits it, and the critical path, before and after."""
        told: dict[str, Any] = {}
        for when, each in zip(("", "_after"), self, strict=True):
            limits = each.limits()
            told[f"iteration_s{when}"] = each.period_s
            told[f"limited_by{when}"] = next(iter(limits), "nothing")
            told[f"shares_of_critical_path{when}"] = limits
            told[f"critical_path_s{when}"] = each.stretches()
        return {**told, "speedup": self.speedup}


def changed(graph: TaskGraph, changes: Sequence[tuple[str, float]]) -> TaskGraph:
    """Return the graph with tasks that take other times: (what, factor) each, one after the other.

    Raises UserError for what the graph does not have, and a factor below 0.

    >>> from ddlkit.papers.dag import STRATEGIES
    >>> toy = IterationTimes(0.0, 0.0, np.ones(2), np.ones(2), np.full(2, 4.0))
    >>> graph = s_sgd(toy, STRATEGIES["MXNet"])
    >>> after = schedule(changed(graph, [("all_reduce", 0.5), ("rank:0", 2.0)]))
    >>> schedule(graph).duration_s, after.duration_s, after.limits()["gpu"]
    (11.0, 10.0, 0.8)
    """
    for what, factor in changes:
        if not 0 <= factor < np.inf:
            raise UserError(f"tasks cannot take {factor:g} times as long: use a number >= 0")
        times = np.where(tasks_named(graph, what), factor, 1.0)
        graph = replace(graph, duration_s=times * graph.duration_s)
    return graph


def what_if(graph: TaskGraph, changes: Sequence[tuple[str, float]]) -> WhatIf:
    """Return the graph scheduled as it is, and `changed`. Raises UserError as that."""
    return WhatIf(schedule(graph), schedule(changed(graph, changes)))
