"""What a message may take of a machine: planning fusion and the resources of every message together.

A collective that gets more of a machine (blocks and threads of a GPU, threads and cores of a processor) is
often sooner done, and slows down more what is computed beside it (the `sharing` paper). Which is better
depends on whether anything is still computed: so each message of an iteration may be given its own.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """What the messages take from computing, and it from them."""
        of_each = np.array([(one.slowdown, one.message_slowdown) for one in self.given]).T
        return Link(self.in_flight, slowdown=of_each[0], message_slowdown=of_each[1])

    @property
    def played_s(self) -> tuple[Floats, Floats]:
        """(G,) when each message begins, and (G,) when it has arrived."""
        sizes, link = self.plan.group_bytes(self.workload).tolist(), self.link
        each = [link.parts(one.cost, size) for one, size in zip(self.given, sizes, strict=True)]
        parts = Parts(*(np.array(column, float) for column in zip(*each, strict=True)))
        return link.play(self.plan.group_ready_s(self.computing), parts)

    @property
    def computing(self) -> Workload:
        """The workload, whose backward copies, too."""
        return packed(self.workload, self.copy_s_per_byte)

    @property
    def iteration_s(self) -> float:
        """From the start of forward to the end of the update."""
        sizes = self.plan.group_bytes(self.workload)
        done_s = unpacked_s(self.played_s[1], sizes, self.copy_s_per_byte)
        return float(done_s) + self.workload.update_s

    @property
    def exposed_s(self) -> float:
        """How long the last message is under way after computing is done."""
        starts_s, ends_s = self.played_s
        done_s = self.link.computed_s(self.computing.ready_s[-1:], starts_s, ends_s)
        return max(0.0, float(ends_s.max() - done_s[0]))

    @property
    def names(self) -> tuple[str, ...]:
        """(G,) whose resources each message has."""
        return tuple(one.name for one in self.given)


def uniform(workload: Workload, plan: FusionPlan, choices: Sequence[Resources]) -> Shared:
    """The plan with the same resources for all messages that make its iteration shortest."""
    _some(choices)
    tried = [Shared(workload, plan, (one,) * len(plan.ends)) for one in choices]
    return min(tried, key=lambda one: one.iteration_s)


def last_apart(workload: Workload, plan: FusionPlan, choices: Sequence[Resources]) -> Shared:
    """The best of two resources: one for the last message, one for all before it (sharing 5)."""
    _some(choices)
    before = len(plan.ends) - 1
    pairs = [(most, last) for most in choices for last in choices]
    tried = [Shared(workload, plan, (most,) * before + (last,)) for most, last in pairs]
    return min(tried, key=lambda one: one.iteration_s)


def of_each(workload: Workload, plan: FusionPlan, choices: Sequence[Resources]) -> Shared:
    """The plan with those resources for each of its messages that make its iteration shortest."""
    return _best(workload, choices, plan)


def jointly(workload: Workload, choices: Sequence[Resources], width: int = 0) -> Shared:
    """The shortest iteration of all plans, with all resources that each of their messages could have.

    Dynamic programme over prefixes of the gradients: what the messages of a prefix leave behind is when the
    last has arrived and how far computing has come by then. Of two ways one is better for sure if it is
    earlier and computing further; the others are kept, and of many at most ``width``, spread evenly. Then the
    plan is a good one, no longer surely the best; 0 keeps all.
    """
    return _best(workload, choices, None, width)


def jointly_apart(workload: Workload, choices: Sequence[Resources], width: int = 0) -> list[Shared]:
    """Of all plans whose last message has resources of its own, the shortest for each of the others'.

    What two groups of ranks can carry, one for the hidden messages and one for the last (sharing 5), with
    fusion planned for both together. One iteration for each of the ``choices`` that all messages but the last
    may have, the shortest first; ``width`` as of `jointly`.
    """
    found = [_best(workload, choices, None, width, before=one) for one in choices]
    return sorted(found, key=lambda one: one.iteration_s)


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


def _best(
    workload: Workload,
    choices: Sequence[Resources],
    plan: FusionPlan | None,
    width: int = 0,
    before: Resources | None = None,
) -> Shared:
    """The shortest iteration; before: what all messages but the last have, if one for them all."""
    _some(choices)
    n, ready_s = workload.n, workload.ready_s
    total = np.concatenate([[0], np.cumsum(workload.bytes)])
    choices = _worth_having(choices, np.unique(total[:, None] - total))
    given = {end: choices if before is None or end == n else [before] for end in range(1, n + 1)}
    ends = tuple(range(1, n + 1)) if plan is None else plan.ends
    none = np.zeros(1, np.int64)
    fronts = {0: _Front(np.zeros(1), np.zeros(1), none, none, none)}
    starts = (0, *ends[:-1])
    for at, end in enumerate(ends):
        firsts = starts[: at + 1] if plan is None else starts[at : at + 1]
        sizes = total[end] - total[list(firsts)]
        costs = np.stack([np.asarray(one.cost(sizes), float) for one in given[end]])
        before_it = [fronts[first] for first in firsts]
        ways = _after(before_it, firsts, ready_s[end - 1], ready_s[-1], costs, given[end])
        fronts[end] = _undominated(ways, width)
    state = int(np.argmin(fronts[n].end_s))
    cuts, names, end = [], [], n
    while end:
        front = fronts[end]
        cuts.append(end)
        names.append(given[end][int(front.choice[state])])
        end, state = int(front.first[state]), int(front.state[state])
    found = plan or FusionPlan("jointly", tuple(reversed(cuts)))
    return Shared(workload, found, tuple(reversed(names)))


def _after(
    fronts: Sequence[_Front],
    firsts: Sequence[int],
    ready_s: float,
    last_s: float,
    costs_s: Floats,
    choices: Sequence[Resources],
) -> _Front:
    """Every way of every front with one more message, by any of the resources, front after front.

    firsts : (F,) the message's first gradient after each front; costs_s : (choices, F) of it
    """
    counts = np.array([len(front.end_s) for front in fronts])
    end_s, before_s = (np.concatenate([front[k] for front in fronts]) for k in (0, 1))
    of = np.arange(len(fronts)).repeat(counts)
    late_s = end_s - before_s
    start_s = np.maximum(end_s, ready_s + late_s)
    work_s = np.minimum(start_s - late_s, last_s)
    slower, drag = (
        1 + np.array([[getattr(one, name)] for one in choices])
        for name in ("slowdown", "message_slowdown")
    )
    beside_s, alone_s = (last_s - work_s) * slower, costs_s[:, of]
    took_s = np.minimum(alone_s * drag, beside_s) + np.maximum(0.0, alone_s - beside_s / drag)
    done_s = np.where(took_s >= beside_s, last_s, work_s + took_s / slower)
    state = np.arange(len(of)) - (counts.cumsum() - counts)[of]
    columns = (
        start_s + took_s,
        done_s,
        np.array(firsts)[of],
        state,
        np.arange(len(choices))[:, None],
    )
    order = np.tile(of, len(choices)).argsort(kind="stable")
    return _Front(*(np.broadcast_to(one, took_s.shape).ravel()[order] for one in columns))


def _worth_having(choices: Sequence[Resources], sizes: Ints) -> list[Resources]:
    """Those that no other is as good as in all: cost of every size above 0, and both slowdowns."""
    positive = sizes[sizes > 0]
    rows = [[*one.cost(positive), one.slowdown, one.message_slowdown] for one in choices]
    table, kept = np.array(rows), []
    for k, row in enumerate(table):
        as_good = (table <= row).all(axis=1)
        better = as_good & (table < row).any(axis=1)
        if not better.any() and not as_good[:k].any():
            kept.append(choices[k])
    return kept


def _undominated(ways: _Front, width: int = 0) -> _Front:
    """Those that no other is as early and as far as; of more than ``width`` so many, if not 0."""
    order = np.lexsort((-ways.work_s, ways.end_s))
    furthest = np.maximum.accumulate(ways.work_s[order])
    kept = order[np.concatenate([[True], furthest[1:] > furthest[:-1]])]
    if 0 < width < len(kept):
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, width).astype(int))]
    return _Front(*(column[kept] for column in ways))


def _some(choices: Sequence[Resources]) -> None:
    if not choices:
        raise UserError("planning resources: none to choose from; give at least one")
