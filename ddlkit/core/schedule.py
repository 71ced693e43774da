"""All-reduces as data: who sends which part of the message to whom in which step, and whether it is added.

An algorithm is a function from a number of ranks to a `Schedule`; all else follows from that: what it
computes (`Schedule.run`), how many steps and bytes it needs (`Counts`), what it takes over given links, step
by step (`law_s`) and played out (`simulate`), and what real ranks send (`ddlkit.run.measure.algorithms`).

The counts are those of the textbooks. With a start-up alpha of a message, beta seconds a byte of a link and
gamma seconds a byte that is added, p ranks and n bytes (Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005, sections 4.1 to 4.5; they print recursive halving
and doubling for powers of two, and say how others are folded into them)::

    ring              2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma
    halving_doubling  2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma
    tree              2 ceil(lg p) alpha + 2 ceil(lg p) n beta + ceil(lg p) n gamma   (binomial)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError, shown
from ddlkit.core.workload import Floats

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

    def seconds(self, n_bytes: ArrayLike, links: Links) -> Any:
        """The closed form for equal links: messages, one way's delay a step, bytes, additions."""
        per_byte_s = self.carried / links.bytes_per_s[0] + self.reduced * links.reduce_s_per_byte
        startup_s = self.messages * links.software_s + self.steps * 2 * links.delay_s[0]
        return startup_s + per_byte_s * np.asarray(n_bytes, float)


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

    def software(self, core_share: float) -> float:
        """How many messages' software follows one another, where the cores do 1 / core_share at once; 0: all.

        Of each step, that of the busiest rank's messages, or of all messages by turns on the cores.
        """
        return sum(max(busiest, len(step) * core_share) for step, busiest in _busiest(self))

    @property
    def link_shares(self) -> Floats:
        """(2, P) what each rank sends and receives in all, as shares of the message."""
        shares = np.zeros((2, self.ranks))
        for one in (one for step in self.steps for one in step):
            shares[0, one.sender] += (one.stop - one.start) / self.pieces
            shares[1, one.receiver] += (one.stop - one.start) / self.pieces
        return shares

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


@cache
def _busiest(schedule: Schedule) -> tuple[tuple[Step, int], ...]:
    """Each step, with the messages of its busiest rank."""
    ranks = [{rank for one in step for rank in one[:2]} for step in schedule.steps]
    return tuple(
        (step, max(_work(step, rank)[0] for rank in here))
        for step, here in zip(schedule.steps, ranks, strict=True)
    )


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


# -- what it takes -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Links:
    """Full-duplex links of P ranks, each of which sends one message and receives one at a time.

    bytes_per_s : (P,) of each rank's link; delay_s : (P,) of each link, so one way crosses two
    software_s : of the processor, a message, before its bytes leave; reduce_s_per_byte : of adding
    burst_s : most credit that a resting link saves in each direction, in seconds of its rate; for `simulate`

    Raises UserError for lengths that differ, rates not above zero, and times below zero.
    """

    bytes_per_s: Floats
    delay_s: Floats
    software_s: float = 0.0
    reduce_s_per_byte: float = 0.0
    burst_s: float = 0.0

    def __post_init__(self) -> None:
        rates, delays = np.asarray(self.bytes_per_s, float), np.asarray(self.delay_s, float)
        if rates.ndim != 1 or rates.shape != delays.shape:
            raise UserError(f"{rates.size} rates and {delays.size} delays: give one to each rank")
        least = min(self.software_s, self.reduce_s_per_byte, self.burst_s, *delays)
        if not (np.all(rates > 0) and np.isfinite(rates).all() and 0 <= least < np.inf):
            raise UserError("links: rates must be above zero, delays and times at least zero")
        object.__setattr__(self, "bytes_per_s", rates)
        object.__setattr__(self, "delay_s", delays)

    @classmethod
    def equal(cls, ranks: int, bytes_per_s: float, delay_s: float = 0.0, **times: float) -> Links:
        """Links of one rate and delay."""
        return cls(np.full(ranks, bytes_per_s), np.full(ranks, delay_s), **times)

    def carry_s(self, one: Transfer, n_bytes: float, pieces: int) -> float:
        """How long a transfer keeps its two links busy: its software, then bytes at the slower one's rate."""
        return self.software_s + float(self.wires_s(one, n_bytes, pieces).max())

    def wires_s(self, one: Transfer, n_bytes: float, pieces: int) -> Floats:
        """(2,) the bytes of a transfer at the rate of its sender's and its receiver's link."""
        return (
            (one.stop - one.start) / pieces * n_bytes / self.bytes_per_s[[one.sender, one.receiver]]
        )

    def way_s(self, one: Transfer) -> float:
        """One way's delay."""
        return float(self.delay_s[one.sender] + self.delay_s[one.receiver])


def law_s(schedule: Schedule, links: Links, n_bytes: float) -> float:
    """Steps one after the other, each as long as its busiest link, its longest way and its most additions.

    Over equal links that is `Counts.seconds`, and what `simulate` finds; but in a tree of no power of two
    a message may travel while its receiver still adds. There, and over unequal links, where a rank
    need not wait for the slowest of each step, it is an upper bound for one message a rank and step.
    """
    total_s, pieces = 0.0, schedule.pieces
    for step in schedule.steps:
        busy_s, added = np.zeros((2, schedule.ranks)), np.zeros(schedule.ranks)
        for one in step:
            taken_s = links.carry_s(one, n_bytes, pieces)
            busy_s[0, one.sender] += taken_s
            busy_s[1, one.receiver] += taken_s
            added[one.receiver] += one.reduce * (one.stop - one.start)
        added_s = float(added.max()) / pieces * n_bytes * links.reduce_s_per_byte
        total_s += float(busy_s.max()) + max(map(links.way_s, step)) + added_s
    return total_s


def simulate(
    schedule: Schedule, links: Links, n_bytes: float, messages: int = 1, *, told: bool = False
) -> Floats:
    """(P,) when each rank has the sum of the last of so many equal messages in a row.

    Every rank goes at its own pace, every link has its own queue: a message leaves when its sender has come
    to that step and both links are free; what arrives early waits. Where links save, bytes cost only what
    exceeds the credit of each link, which grows while it sends nothing, its messages' software included.

    told : whether a rank must hear that its receiver has begun the same message, before anything leaves
    """
    done_s = np.zeros(schedule.ranks)
    free_s = np.zeros((2, schedule.ranks))  # links out and in are busy until then
    credit_s = np.full((2, schedule.ranks), links.burst_s)
    began_s = done_s
    for number, step in enumerate(schedule.steps * messages):
        if number % len(schedule.steps) == 0:
            began_s = done_s
        after_s, added_s = done_s.copy(), np.zeros(schedule.ranks)
        for one in step:
            ends = np.array([0, 1]), np.array([one.sender, one.receiver])
            heard_s = began_s[one.receiver] + links.way_s(one) if told else 0.0
            start_s = max(done_s[one.sender], heard_s, free_s[ends].max()) + links.software_s
            saved_s = np.minimum(links.burst_s, credit_s[ends] + start_s - free_s[ends])
            wires_s = links.wires_s(one, n_bytes, schedule.pieces)
            left_s = start_s + max(0.0, (wires_s - saved_s).max())
            # What a link had and did not need, or got while the other was slower, it keeps.
            credit_s[ends] = np.minimum(links.burst_s, saved_s + left_s - start_s - wires_s)
            free_s[ends] = left_s
            after_s[one.sender] = max(after_s[one.sender], left_s)
            after_s[one.receiver] = max(after_s[one.receiver], left_s + links.way_s(one))
            share = one.reduce * (one.stop - one.start) / schedule.pieces
            added_s[one.receiver] += share * n_bytes * links.reduce_s_per_byte
        done_s = after_s + added_s
    return done_s


def fastest(costs: Mapping[str, Callable[[float], float]], sizes: ArrayLike) -> dict[str, float]:
    """The cheapest of several costs at the first size, then each that takes over, and at which size.

    >>> fastest({"slow start": lambda n: 5 + n, "fast start": lambda n: 1 + 2 * n}, [1, 2, 3, 4, 5, 6])
    {'fast start': 1.0, 'slow start': 5.0}
    """
    order: dict[str, float] = {}
    last = ""
    for size in np.asarray(sizes, float).tolist():
        seconds = {name: cost(size) for name, cost in costs.items()}
        # Ties, but for rounding, stay with who leads.
        least = min(seconds.values()) * (1 + 1e-12)
        if not last or seconds[last] > least:
            last = next(name for name in seconds if seconds[name] <= least)
            order.setdefault(last, size)
    return order
