"""All-reduces as data: who sends which part of the message to whom in which step, and whether it is added.

An algorithm is a function from a number of ranks to a `Schedule`; all else follows from that: what it
computes (`Schedule.run`), how many steps and bytes it needs (`Counts`), and what real ranks send
(`ddlkit.run.measure.algorithms`).

The counts are those of the textbooks. With a start-up alpha of a message, beta seconds a byte of a link and
gamma seconds a byte that is added, p ranks and n bytes (Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005, sections 4.1 to 4.5; they print recursive halving
and doubling for powers of two, and say how others are folded into them)::

    ring              2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma
    halving_doubling  2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma
    tree              2 ceil(lg p) alpha + 2 ceil(lg p) n beta + ceil(lg p) n gamma   (binomial)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError, shown

NODE = 4
"""Ranks of a node of the hierarchical algorithm, at most: the largest number that divides the ranks."""


STEPS = "steps:"
"""Before an algorithm's name, in a table: its steps were sent one by one, not by a library's collective.

Every rank then says at the beginning of a message that it is ready for all that it will receive: nothing
leaves before that word has come, one way more than the steps need. (gloo sends to no one who has not said
so; its own ring says so segment by segment: `ddlkit.core.gloo_ring`.)
"""


class Transfer(NamedTuple):
    """Pieces ``start`` up to ``stop`` of the message go from a rank to another, which adds or keeps them."""

    sender: int
    receiver: int
    start: int
    stop: int
    reduce: bool


Step = tuple[Transfer, ...]
"""What is under way at the same time. A rank's transfers follow one another in their order; it goes on to
the next step when its own are sent, received and added."""


class Counts(NamedTuple):
    """What the busiest rank of each step does, summed over the steps.

    steps : each waits for the one before; messages : that follow one another on a link
    carried : over a link in one direction, reduced : added, both as shares of the message
    """

    steps: int
    messages: int
    carried: float
    reduced: float


@dataclass(frozen=True)
class Schedule:
    """An all-reduce among ``ranks``: the message is cut into ``pieces`` equal parts.

    >>> Schedule.of("ring", 3).counts
    Counts(steps=4, messages=4, carried=1.3333333333333333, reduced=0.6666666666666666)
    """

    algorithm: str
    ranks: int
    pieces: int
    steps: tuple[Step, ...]

    @staticmethod
    def of(algorithm: str, ranks: int) -> Schedule:
        """An algorithm's, with or without STEPS. Raises UserError for an unknown one, or no rank."""
        return _made(algorithm.removeprefix(STEPS), ranks)

    @property
    def counts(self) -> Counts:
        """What the busiest rank of each step does, over all steps."""
        return _counts(self)

    def bounds(self, elements: int) -> NDArray[np.int64]:
        """(pieces + 1,) where the pieces of so many elements begin, as even as they can be."""
        return np.arange(self.pieces + 1) * elements // self.pieces

    def run(self, values: NDArray[Any]) -> NDArray[Any]:
        """(P, n) what every rank holds afterwards, of the (P, n) that they contribute.

        Sums are made in the order and precision in which real ranks make them.
        """
        held, cut = values.copy(), self.bounds(values.shape[1])
        for step in self.steps:
            sent = [held[t.sender, cut[t.start] : cut[t.stop]].copy() for t in step]
            for t, part in zip(step, sent, strict=True):
                here = held[t.receiver, cut[t.start] : cut[t.stop]]
                here[:] = here + part if t.reduce else part
        return held


@cache
def _counts(schedule: Schedule) -> Counts:
    busiest = np.zeros(3)
    for step in schedule.steps:
        work = np.array([_work(step, rank) for rank in {r for one in step for r in one[:2]}])
        busiest += work.max(axis=0)
    messages, carried, reduced = busiest.tolist()
    shares = carried / schedule.pieces, reduced / schedule.pieces
    return Counts(len(schedule.steps), round(messages), *shares)


def _work(step: Step, rank: int) -> tuple[int, int, int]:
    """Messages on the busier direction of a rank's link, pieces there, and pieces that it adds."""
    out = [one.stop - one.start for one in step if one.sender == rank]
    back = [one for one in step if one.receiver == rank]
    sizes = [one.stop - one.start for one in back]
    added = sum(one.stop - one.start for one in back if one.reduce)
    return max(len(out), len(back)), max(sum(out), sum(sizes)), added


# -- algorithms --------------------------------------------------------------------------------

MOST_RANKS = 512
"""Of a schedule: a ring of so many has half a million messages, which are counted one by one."""
ALGORITHMS: dict[str, Callable[[int], tuple[int, list[Step]]]] = {}
"""By name: from a number of ranks, 2 or more, to the pieces and steps of a schedule."""


def _algorithm(
    make: Callable[[int], tuple[int, list[Step]]],
) -> Callable[[int], tuple[int, list[Step]]]:
    ALGORITHMS[make.__name__] = make
    return make


@cache
def _made(algorithm: str, ranks: int) -> Schedule:
    if algorithm not in ALGORITHMS:
        raise UserError(f"unknown algorithm {shown(algorithm)}: use one of {', '.join(ALGORITHMS)}")
    if ranks > MOST_RANKS:
        raise UserError(f"a schedule of {ranks} ranks: messages are counted up to {MOST_RANKS}")
    if ranks < 1:
        raise UserError(f"{algorithm} of {ranks} ranks: at least 1")
    pieces, steps = ALGORITHMS[algorithm](ranks) if ranks > 1 else (1, [])
    return Schedule(algorithm, ranks, pieces, tuple(steps))


@_algorithm
def ring(ranks: int) -> tuple[int, list[Step]]:
    """Each passes a part on to its neighbour, which adds its own; then the sums go round."""
    everyone = range(ranks)
    return ranks, [*_scatter(everyone, 0, 1), *_gather(everyone, 0, 1)]


@_algorithm
def halving_doubling(ranks: int) -> tuple[int, list[Step]]:
    """Partners exchange halves of what they still reduce, then double what they hold.

    Ranks beyond the largest power of two hand all they have to one of the others, and get the sum at the end.
    """
    core = 1 << (ranks.bit_length() - 1)
    begin, halving, held = [0] * core, [], core
    for bit in range(core.bit_length() - 1):
        held //= 2
        step = []
        for rank in range(core):
            theirs = begin[rank] + (0 if rank >> bit & 1 else held)
            step.append(Transfer(rank, rank ^ 1 << bit, theirs, theirs + held, True))
        begin = [at + (held if rank >> bit & 1 else 0) for rank, at in enumerate(begin)]
        halving.append(tuple(step))
    doubling = _returned(halving)
    fold = [Transfer(rank, rank - core, 0, core, True) for rank in range(core, ranks)]
    folded = [tuple(fold)] if fold else []
    return core, [*folded, *halving, *doubling, *_returned(folded)]


@_algorithm
def tree(ranks: int) -> tuple[int, list[Step]]:
    """A binomial tree: half of those left hand all they have to the others; the sum comes back alike."""
    reducing = []
    for bit in range((ranks - 1).bit_length()):
        far = 1 << bit
        givers = range(far, ranks, 2 * far)
        reducing.append(tuple(Transfer(rank, rank - far, 0, 1, True) for rank in givers))
    return 1, [*reducing, *_returned(reducing)]


@_algorithm
def hierarchical(ranks: int) -> tuple[int, list[Step]]:
    """Rings within nodes of `node_ranks`, and between nodes for the part that each rank of a node reduced."""
    node = node_ranks(ranks)
    nodes = [range(first, first + node) for first in range(0, ranks, node)]
    part = ranks // node
    peers = [
        (range(local, ranks, node), (local + 1) % node * part if node > 1 else 0)
        for local in range(node)
    ]
    return ranks, [
        *_together(*(_scatter(one, 0, part) for one in nodes)),
        *_together(*(_scatter(ring, first, 1) for ring, first in peers)),
        *_together(*(_gather(ring, first, 1) for ring, first in peers)),
        *_together(*(_gather(one, 0, part) for one in nodes)),
    ]


@_algorithm
def direct(ranks: int) -> tuple[int, list[Step]]:
    """Each sends every other rank its part, and then the sum of its own part: two steps of many messages."""
    pairs = [(rank, (rank + far) % ranks) for far in range(1, ranks) for rank in range(ranks)]
    scattered = tuple(Transfer(one, other, other, other + 1, True) for one, other in pairs)
    gathered = tuple(Transfer(one, other, one, one + 1, False) for one, other in pairs)
    return ranks, [scattered, gathered]


def node_ranks(ranks: int) -> int:
    """Ranks of each node of the hierarchical algorithm.

    >>> [node_ranks(ranks) for ranks in (2, 3, 6, 8, 7)]
    [2, 3, 3, 4, 1]
    """
    return max(size for size in range(1, NODE + 1) if ranks % size == 0)


def _scatter(members: Sequence[int], first: int, width: int) -> list[Step]:
    """Round a ring until member i has the sum of part i + 1, each part ``width`` pieces from ``first``."""
    return _around(members, first, width, shift=0, reduce=True)


def _gather(members: Sequence[int], first: int, width: int) -> list[Step]:
    """Round a ring until all have what member i has of part i + 1."""
    return _around(members, first, width, shift=1, reduce=False)


def _around(members: Sequence[int], first: int, width: int, shift: int, reduce: bool) -> list[Step]:
    size, steps = len(members), []
    for turn in range(size - 1):
        step = []
        for place, rank in enumerate(members):
            start = first + (place + shift - turn) % size * width
            to = members[(place + 1) % size]
            step.append(Transfer(rank, to, start, start + width, reduce))
        steps.append(tuple(step))
    return steps


def _returned(steps: Sequence[Step]) -> list[Step]:
    """The way back: who added a part hands the sum to who gave it."""
    return [
        tuple(Transfer(one.receiver, one.sender, one.start, one.stop, False) for one in step)
        for step in reversed(steps)
    ]


def _together(*parts: Sequence[Step]) -> list[Step]:
    """Steps of several groups that share no rank, side by side."""
    return [sum(step, ()) for step in zip_longest(*parts, fillvalue=())]
