"""What a message may take of a machine: planning fusion and the resources of every message together.

A collective that gets more of a machine (blocks and threads of a GPU, threads and cores of a processor) is
often sooner done, and slows down more what is computed beside it (the `sharing` paper). Which is better
depends on whether anything is still computed: so each message of an iteration may be given its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import packed, unpacked_s
from ddlkit.core.link import Link, Parts
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import Floats, Ints, Workload


@dataclass(frozen=True, eq=False)
class Resources:
    """One way in which a message can be sent: what it costs, takes from computing, and loses by it.

    slowdown, message_slowdown : as of a `Link`: how much longer computing takes beside such a message, and
        such a message beside computing; 0.1 is a tenth longer
    """

    name: str
    cost: MessageCost
    slowdown: float = 0.0
    message_slowdown: float = 0.0


@dataclass(frozen=True, eq=False)
class Shared:
    """An iteration in which every message has resources of its own.

    given : (G,) the resources of each message of the plan
    in_flight : how many may be under way when each begins, as of a `Link`; one after the other by default
    copy_s_per_byte : to copy gradients into messages, and out of them, as of an `Iteration`

    Raises UserError for another number of resources than of messages.
    """

    workload: Workload
    plan: FusionPlan
    given: tuple[Resources, ...]
    in_flight: int | Ints = 1
    copy_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if len(self.given) != len(self.plan.ends):
            counts = f"{len(self.given)} resources for {len(self.plan.ends)} messages"
            raise UserError(f"plan {self.plan.planner!r}: {counts}, one of each is needed")

    @property
    def link(self) -> Link:
        """Return what the messages take from compute, and it from them."""
        of_each = np.array([(way.slowdown, way.message_slowdown) for way in self.given]).T
        return Link(self.in_flight, slowdown=of_each[0], message_slowdown=of_each[1])

    @property
    def played_s(self) -> tuple[Floats, Floats]:
        """Return (G,) when each message begins, and (G,) when it has arrived."""
        sizes, link = self.plan.group_bytes(self.workload).tolist(), self.link
        each = [link.parts(way.cost, size) for way, size in zip(self.given, sizes, strict=True)]
        parts = Parts(*(np.array(column, float) for column in zip(*each, strict=True)))
        return link.play(
            self.plan.group_ready_s(packed(self.workload, self.copy_s_per_byte)), parts
        )

    @property
    def iteration_s(self) -> float:
        """Return seconds from the start of forward to the end of the update."""
        sizes = self.plan.group_bytes(self.workload)
        done_s = unpacked_s(self.played_s[1], sizes, self.copy_s_per_byte)
        return float(done_s) + self.workload.update_s

    @property
    def names(self) -> tuple[str, ...]:
        """Return (G,) whose resources each message has."""
        return tuple(way.name for way in self.given)


def of_each(workload: Workload, plan: FusionPlan, choices: Sequence[Resources]) -> Shared:
    """Return the plan with those resources for each message that make its iteration shortest."""
    return _best(workload, choices, plan)


def jointly(workload: Workload, choices: Sequence[Resources]) -> Shared:
    """Return the shortest iteration of all plans, with all resources that each of their messages could have.

    Dynamic programme over prefixes of the gradients: what the messages of a prefix leave behind is when the
    last has arrived and how far computing has come by then. Of two ways one is better for sure if it is
    earlier and computing further; the others are kept.
    """
    return _best(workload, choices, None)


class _Front(NamedTuple):
    """Ways to have sent a prefix, none better than another: rising end, rising work.

    end_s, work_s : (m,) when the last message has arrived, and computing done by then
    first, state, choice : (m,) the last message's first gradient, the way before it, its resources
    """

    end_s: Floats
    work_s: Floats
    first: Ints
    state: Ints
    choice: Ints


def _best(workload: Workload, choices: Sequence[Resources], plan: FusionPlan | None) -> Shared:
    """Return the shortest iteration; with that plan's messages, if there is one."""
    if not choices:
        raise UserError("planning resources: none to choose from; give at least one")
    n, ready_s = workload.n, workload.ready_s
    total = np.concatenate([[0], np.cumsum(workload.bytes)])
    ends = tuple(range(1, n + 1)) if plan is None else plan.ends
    none = np.zeros(1, np.int64)
    fronts = {0: _Front(np.zeros(1), np.zeros(1), none, none, none)}
    starts = (0, *ends[:-1])
    for at, end in enumerate(ends):
        firsts = starts[: at + 1] if plan is None else starts[at : at + 1]
        sizes = total[end] - total[list(firsts)]
        costs_s = np.stack([np.asarray(way.cost(sizes), float) for way in choices])
        before = {first: fronts[first] for first in firsts}
        ways = _after(before, ready_s[end - 1], ready_s[-1], costs_s, choices)
        fronts[end] = _undominated(ways)
    state = int(np.argmin(fronts[n].end_s))
    cuts, given, end = [], [], n
    while end:
        front = fronts[end]
        cuts.append(end)
        given.append(choices[int(front.choice[state])])
        end, state = int(front.first[state]), int(front.state[state])
    planned = plan or FusionPlan("jointly", tuple(reversed(cuts)))
    return Shared(workload, planned, tuple(reversed(given)))


def _after(
    fronts: Mapping[int, _Front],
    ready_s: float,
    last_s: float,
    costs_s: Floats,
    choices: Sequence[Resources],
) -> _Front:
    """Return every way of every front with one more message, by any of the resources.

    fronts : by the message's first gradient; costs_s : (choices, fronts) of it, alone
    """
    counts = [len(front.end_s) for front in fronts.values()]
    end_s, before_s = (np.concatenate([front[k] for front in fronts.values()]) for k in (0, 1))
    of = np.arange(len(fronts)).repeat(counts)
    late_s = end_s - before_s
    start_s = np.maximum(end_s, ready_s + late_s)
    work_s = np.minimum(start_s - late_s, last_s)
    slower = np.array([[1 + way.slowdown] for way in choices])
    drag = np.array([[1 + way.message_slowdown] for way in choices])
    beside_s, alone_s = (last_s - work_s) * slower, costs_s[:, of]
    took_s = np.minimum(alone_s * drag, beside_s) + np.maximum(0.0, alone_s - beside_s / drag)
    done_s = np.where(took_s >= beside_s, last_s, work_s + took_s / slower)
    first, state = np.repeat([*fronts], counts), np.concatenate([np.arange(m) for m in counts])
    columns = start_s + took_s, done_s, first, state, np.arange(len(choices))[:, None]
    return _Front(*(np.broadcast_to(column, took_s.shape).ravel() for column in columns))


def _undominated(ways: _Front) -> _Front:
    """Return those that no other is as early and as far as."""
    order = np.lexsort((-ways.work_s, ways.end_s))
    furthest = np.maximum.accumulate(ways.work_s[order])
    kept = order[np.concatenate([[True], furthest[1:] > furthest[:-1]])]
    return _Front(*(column[kept] for column in ways))
