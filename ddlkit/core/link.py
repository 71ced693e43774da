"""Messages that share a link: several under way at once, over a link that saves up tokens while it rests.

gloo carries two messages at once by default. A GPU's collectives take processors and memory bandwidth from
the computation that they hide behind, and it from them. And a rate is often enforced by a token bucket: what
a link may send grows at its rate, up to a depth, the burst; what has been saved is sent at once.

What a link carries is bus bandwidth as nccl-tests defines it: algorithm bandwidth (bytes / time) times what a
link must carry at least, so that it compares with the link's rate whatever the number of ranks. ``bytes`` is
the size of the reduced buffer for all_reduce, of the whole output for all_gather, and of a rank's whole input
for reduce_scatter.

The name of a lab's link says what it is: "lab:1gbit" is shaped by the kernel's token bucket, and
"emulated:500mbit-delay2ms-loss0.001" by a process of ours.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import parse_bits_per_s, parse_seconds
from ddlkit.core.workload import Floats, Ints

LARGE = 1e9  # bytes of a message beside which roundings do not count


class Parts(NamedTuple):
    """What messages are made of, (..., G) seconds each; the first axes are scenarios.

    software_s : of the processor alone: steps, system calls, wake-ups
    wire_s : of the link alone, at its rate, for all bytes
    """

    software_s: Floats
    wire_s: Floats


@dataclass(frozen=True, eq=False)
class Link:
    """What messages share beyond the cost that each has.

    in_flight : how many may be under way at once, in their order; they share the rate alike
    software : how many messages' software the processor does at once, 1 or more; beyond, it is shared alike
    burst_s : most tokens that a rested link has saved, in seconds of its rate; 0: it saves none. With a burst
        a message's software runs while tokens grow for its next bytes; without, it comes on top of the bytes
    wire_s_per_byte : of the link, a byte of a message, at its rate; of a link with a burst only
    slowdown : how much longer computing takes while a message is under way, 0 or more: 0.1 is a tenth longer;
        of several under way the largest counts
    message_slowdown : how much longer a message takes (with a burst, its software) while computing goes on,
        which is until the last one is ready; with both at 1 nothing is gained by overlap

    Slowdowns and ``in_flight`` are one number, or (G,) one for each message, by resources of its own.

    Raises UserError for less than one message in flight.

    >>> Link(in_flight=2).ends([0.0, 0.0], Parts(np.zeros(2), np.array([1.0, 1.0]))).tolist()
    [2.0, 2.0]
    """

    in_flight: int | Ints = 1
    software: float = math.inf
    burst_s: float = 0.0
    wire_s_per_byte: float = 0.0
    slowdown: float | Floats = 0.0
    message_slowdown: float | Floats = 0.0

    def __post_init__(self) -> None:
        if np.min(self.in_flight) < 1:
            raise UserError(f"{np.min(self.in_flight)} messages in flight: at least 1")

    @property
    def plain(self) -> bool:
        """Return whether a message takes what it costs, whatever went before it, and slows nothing down."""
        return self.one_at_a_time and not self.burst_s and not self.slows

    @property
    def one_at_a_time(self) -> bool:
        """Return whether each message waits for the one before it."""
        return bool(np.all(np.equal(self.in_flight, 1)))

    @property
    def slows(self) -> bool:
        """Return whether messages slow down computing, or computing messages."""
        return bool(np.any(self.slowdown) or np.any(self.message_slowdown))

    def parts(self, cost: MessageCost, n_bytes: ArrayLike) -> Parts:
        """Return the parts of messages of ``n_bytes`` (G,): in a row of equals they make up their cost.

        What a message costs with hardly any bytes is software. Behind a bucket, what was measured is the
        processor's time up to the size whose bytes take as long on the link, and the link's above it.
        """
        taken_s, startup_s = np.asarray(cost(n_bytes)), max(0.0, cost.startup_s())
        if not self.burst_s:
            software_s = np.minimum(startup_s, taken_s)
            return Parts(software_s, taken_s - software_s)
        sent_bytes = cost.sent_bytes(n_bytes)
        wire_s = self.wire_s_per_byte * sent_bytes
        by_link = wire_s > startup_s
        wire_s_per_byte = self.wire_s_per_byte * float(cost.sent_bytes(LARGE)) / LARGE
        software_s = np.minimum(taken_s, cost(startup_s / wire_s_per_byte))
        # Of the row of messages that a sample is the mean of, the first one found the burst.
        saved_s = self.burst_s / cost.messages_per_sample(n_bytes)
        wire_s = np.where(by_link, taken_s + saved_s, wire_s)
        return Parts(np.where(by_link, software_s, taken_s), wire_s)

    def ends(self, ready_s: ArrayLike, parts: Parts) -> Floats:
        """Return (..., G) the end of each message, which begins with fewer than `in_flight` under way."""
        return self.play(ready_s, parts)[1]

    def play(self, ready_s: ArrayLike, parts: Parts) -> tuple[Floats, Floats]:
        """Return (..., G) the beginning and (..., G) the end of each message.

        ready_s : (..., G) when each would be ready if no message slowed down what makes it ready
        """
        columns = np.broadcast_arrays(np.asarray(ready_s, dtype=float), *parts)
        if self.one_at_a_time:
            begin_s, software_s, wire_s = columns
            slowed = self.slowdown, self.message_slowdown
            return one_by_one(begin_s, software_s, wire_s, self.burst_s, *slowed)
        if not all(np.isfinite(column).all() for column in columns):
            raise UserError("messages on a link: every time must be finite")
        starts_s, ends_s = np.empty(columns[0].shape), np.empty(columns[0].shape)
        for scenario in np.ndindex(ends_s.shape[:-1]):
            played = self._shared(*(column[scenario].tolist() for column in columns))
            starts_s[scenario], ends_s[scenario] = played
        return starts_s, ends_s

    def computed_s(self, work_s: Floats, starts_s: Floats, ends_s: Floats) -> Floats:
        """Return (n,) when computing has come as far as ``work_s`` (n,), beside messages (G,)."""
        knots_s = np.unique(np.concatenate([[0.0], starts_s, ends_s]))
        under_way = (starts_s <= knots_s[:, None]) & (knots_s[:, None] < ends_s)
        slower = np.where(under_way, self.slowdown, 0.0).max(axis=1, initial=0.0)
        pace = 1 / (1 + slower)
        done_s = np.concatenate([[0.0], np.cumsum(pace[:-1] * np.diff(knots_s))])
        last = np.searchsorted(done_s, work_s, side="right") - 1
        return np.asarray(knots_s[last] + (work_s - done_s[last]) / pace[last])

    def _shared(
        self, ready_s: list[float], software_s: list[float], wire_s: list[float]
    ) -> tuple[list[float], list[float]]:
        """Return both event by event: messages get ready, are admitted, have moved, have done software."""
        starts_s, ends_s = [0.0] * len(ready_s), [0.0] * len(ready_s)
        wire: dict[int, float] = {}  # what messages under way still need of the link
        software: dict[int, float] = {}  # and of the processor
        now_s, worked_s, credit_s, admitted = 0.0, 0.0, self.burst_s, 0
        last_s = max(ready_s, default=0.0)
        shares = self.slowdown, self.message_slowdown, self.in_flight
        slowed, dragged, lanes = (np.broadcast_to(each, len(ready_s)).tolist() for each in shares)
        while admitted < len(ready_s) or wire:
            for done in [k for k in wire if wire[k] == software[k] == 0]:
                ends_s[done] = now_s
                del wire[done], software[done]
            free = admitted < len(ready_s) and len(wire) < lanes[admitted]
            if free and ready_s[admitted] <= worked_s:
                saved_s = min(credit_s, wire_s[admitted])
                credit_s -= saved_s
                starts_s[admitted] = now_s
                wire[admitted] = wire_s[admitted] - saved_s
                software[admitted] = software_s[admitted]
                admitted += 1
                continue
            moving = [k for k in wire if wire[k]]
            working = [k for k in wire if software[k] and (self.burst_s or not wire[k])]
            stretch = 1.0 + max((slowed[k] for k in wire), default=0.0)
            computing = worked_s < last_s and any(dragged[k] for k in wire)
            drag = {k: 1.0 + dragged[k] if computing else 1.0 for k in wire}
            turns = max(1.0, len(working) / self.software)
            needs = [(wire, k, len(moving) * (1.0 if self.burst_s else drag[k])) for k in moving]
            needs += [(software, k, turns * drag[k]) for k in working]
            moments_s = [of[k] * times for of, k, times in needs]
            left_s = (ready_s[admitted] - worked_s) * stretch if free else math.inf
            if computing:
                moments_s.append((last_s - worked_s) * stretch)
            passed_s = min([*moments_s, left_s])
            if math.isinf(passed_s):
                continue
            for of, k, times in needs:
                of[k] = of[k] - passed_s / times if of[k] * times > passed_s else 0.0
            if not moving:
                credit_s = min(self.burst_s, credit_s + passed_s)
            now_s += passed_s
            if computing and (last_s - worked_s) * stretch <= passed_s:
                worked_s = last_s
            else:
                done = left_s <= passed_s
                worked_s = ready_s[admitted] if done else worked_s + passed_s / stretch
        return starts_s, ends_s


def one_by_one(
    ready_s: Floats,
    software_s: Floats,
    wire_s: Floats,
    burst_s: float = 0.0,
    slowdown: ArrayLike = 0.0,
    message_slowdown: ArrayLike = 0.0,
) -> tuple[Floats, Floats]:
    """Return (..., G) beginning and end of messages of which one is under way at a time; else as `Link`.

    ready_s, software_s, wire_s : (..., G) of as many scenarios; both slowdowns : (..., G) or what becomes it
    """
    starts_s, ends_s = np.empty(ready_s.shape), np.empty(ready_s.shape)
    free_s, credit_s = np.zeros(ready_s.shape[:-1]), np.full(ready_s.shape[:-1], burst_s)
    late_s = np.zeros(ready_s.shape[:-1])
    last_s = ready_s.max(axis=-1, initial=0.0)
    slower, drag = (np.broadcast_to(by, ready_s.shape) for by in (slowdown, message_slowdown))
    slows, drags, alone_s = slower.any(), drag.any(), np.maximum(0.0, wire_s) + software_s
    for k in range(ready_s.shape[-1]):
        start_s = starts_s[..., k] = np.maximum(free_s, ready_s[..., k] + late_s)
        work_s = np.maximum(0.0, last_s - (start_s - late_s))  # of computing that is left
        took_s = alone_s[..., k]
        if burst_s:
            credit_s = np.minimum(burst_s, credit_s + start_s - free_s)
            on_link_s = np.maximum(0.0, wire_s[..., k] - credit_s)
            on_processor_s = _dragged(software_s[..., k], work_s, slower[..., k], drag[..., k])
            took_s = np.maximum(on_link_s, on_processor_s)
            credit_s = np.minimum(burst_s, credit_s + took_s - wire_s[..., k])
        elif drags:
            took_s = _dragged(took_s, work_s, slower[..., k], drag[..., k])
        if slows:
            # What is computed beside the message is late by the share that it takes longer.
            beside_s = np.minimum(work_s, took_s / (1 + slower[..., k]))
            late_s = late_s + slower[..., k] * beside_s
        free_s = ends_s[..., k] = start_s + took_s
    return starts_s, ends_s


def _dragged(alone_s: Floats, work_s: Floats, slower: Floats, drag: Floats) -> Floats:
    """Return (...) how long takes what takes ``alone_s`` by itself, begun beside ``work_s`` of computing."""
    beside_s = work_s * (1 + slower)
    rest_s = np.maximum(0.0, alone_s - beside_s / (1 + drag))
    return np.asarray(np.minimum(alone_s * (1 + drag), beside_s) + rest_s)


def turn_s(ends_s: Floats, in_flight: int) -> Floats:
    """Return (G,) when fewer than ``in_flight`` of the messages before each were still under way."""
    free_s = np.zeros(len(ends_s))
    for group in range(in_flight, len(ends_s)):
        free_s[group] = np.sort(ends_s[:group])[-in_flight]
    return free_s


# -- what it carries ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """A collective as it is registered: what its messages are, how it is drawn.

    crossings : how often each byte of a message crosses each rank's link, beside (ranks - 1) / ranks
    label, color, hatch : its name, colour and hatch in a figure
    """

    name: str
    crossings: int
    label: str
    color: str
    hatch: str


COLLECTIVES: dict[str, Collective] = {
    collective.name: collective
    for collective in (
        Collective("all_reduce", 2, "all-reduce", "#c14d00", "////"),
        Collective("all_gather", 1, "all-gather", "#e0a000", "\\\\"),
        Collective("reduce_scatter", 1, "reduce-scatter", "#8a6d00", "----"),
    )
}
"""Every collective that can be timed, fitted, predicted and drawn, by name."""

STEPS = "steps:"
"""Before an algorithm's name, in a table: its steps were sent one by one, not by a library's collective."""

BURST_S = 128 * 1024 / 1e9  # bytes per (bit/s); a smaller burst breaks the rate by 2x
MIN_BURST_BYTES = 16 * 1024
TBF_FRAMING_BYTES = 14
"""Around each packet of up to 1,500 bytes, as tbf counts it."""
FRAMING = 1448 / (1500 + TBF_FRAMING_BYTES)
"""TCP payload in a full Ethernet frame, as tbf counts it: what no collective can exceed."""


def bus_factor(collective: str, ranks: int) -> float:
    """Return the bytes that each rank's link must carry in each direction, per byte of message.

    2 (n-1)/n of an all_reduce, (n-1)/n of the others, as nccl-tests. Raises UserError for an unknown name.
    """
    if collective not in COLLECTIVES:
        known = " or ".join(COLLECTIVES)
        raise UserError(f"unknown collective {shown(collective)}: use {known}")
    return COLLECTIVES[collective].crossings * (ranks - 1) / ranks


def busbw(collective: str, ranks: int, n_bytes: Any, seconds: Any) -> Any:
    """Return bus bandwidth in bytes/s, elementwise.

    >>> float(busbw("all_reduce", 4, 1e9, 2.0))
    750000000.0
    """
    return bus_factor(collective, ranks) * (np.asarray(n_bytes) / np.asarray(seconds))


def burst_bytes(rate_bits_per_s: float) -> int:
    """Return the depth of the bucket that the lab gives to a link of that rate."""
    return max(MIN_BURST_BYTES, round(BURST_S * rate_bits_per_s))


def wire_s_per_byte(
    collective: str, ranks: int, rate_bits_per_s: float, framing: float = FRAMING
) -> float:
    """Return seconds of each rank's link for a byte of a message; framing : the share of its own bytes."""
    return bus_factor(collective, ranks) * 8 / (rate_bits_per_s * framing)


# -- the name of a lab's link --------------------------------------------------------------------

FRAMING_BYTES = 38
"""Around each packet of up to 1,500 bytes, as Ethernet on a wire has them."""
_PARTS = {"delay": "0s", "jitter": "0s", "loss": "0", "burst": "0s", "framing": f"{FRAMING_BYTES}"}


class Named(NamedTuple):
    """What the name of a link says.

    engine : "tbf" or "emulated"; delay_s, jitter_s : of each link, one way; loss : share of frames
    burst_s : most that a rested link may send at once, in seconds of its rate
    framing_bytes : counted around each packet
    """

    engine: str
    rate_bits_per_s: float
    delay_s: float
    jitter_s: float
    loss: float
    burst_s: float = 0.0
    framing_bytes: int = FRAMING_BYTES

    @property
    def framing(self) -> float:
        """Return the share of what the link carries that is a message's own bytes."""
        return 1448 / (1500 + self.framing_bytes)


def is_lab(link: str) -> bool:
    """Return whether the link is one of a lab, by its name."""
    return link.startswith(("lab:", "emulated:"))


def read_link(link: str) -> Named:
    """Return what the name of a lab's link says, as it stands in tables; UserError for other links.

    >>> read_link("emulated:500mbit-delay2ms-loss0.001")[:5]
    ('emulated', 500000000.0, 0.002, 0.0, 0.001)
    >>> read_link("lab:1gbit").engine
    'tbf'
    """
    if not is_lab(link):
        raise UserError(f"{link!r} is no lab's link: they are called as lab:1gbit")
    engine, _, rest = link.partition(":")
    rate, *parts = rest.split("-")
    bits_per_s = parse_bits_per_s(rate)
    if engine == "lab":
        saved_s = burst_bytes(bits_per_s) * 8 / bits_per_s
        return Named("tbf", bits_per_s, 0.0, 0.0, 0.0, saved_s, TBF_FRAMING_BYTES)
    matches = (re.fullmatch(rf"({'|'.join(_PARTS)})([0-9].*)", part) for part in parts)
    texts = _PARTS | {match[1]: match[2] for match in matches if match}
    delay_s, jitter_s, saved_s = (parse_seconds(texts[n]) for n in ("delay", "jitter", "burst"))
    loss, framing_bytes = float(texts["loss"]), int(texts["framing"])
    return Named(engine, bits_per_s, delay_s, jitter_s, loss, saved_s, framing_bytes)


def ranks_per_node(link: str) -> int:
    """Return how many ranks share the link of a node, by its name; 1 where each has its own.

    >>> ranks_per_node("emulated:200mbit-g4-1gbit-delay0.5ms"), ranks_per_node("lab:1gbit")
    (4, 1)
    """
    group = re.search(r"-g([0-9]+)-", link)
    return int(group[1]) if group else 1


def way_s(link: str) -> float:
    """Return a packet's delay in seconds from rank to rank, by the link's name; 0 for other links.

    >>> way_s("emulated:500mbit-delay2ms"), way_s("loopback")
    (0.004, 0.0)
    """
    return 2 * read_link(link).delay_s if link.startswith("emulated:") else 0.0


# -- gloo's own ring all-reduce over links with a delay ----------------------------------------------
# Read in gloo's source (allreduce.cc, tcp/pair.cc; 2025) and confirmed by measured times: each step of the
# ring is cut into segments, two at least, of 1 MiB at most, and two are under way at once. A rank enters a
# segment when both of the segment but one before are done, tells its neighbour that it is ready, and sends
# when the same word comes from the other side. So small messages pay a round trip r a pair of segments.
#
# With bytes of x seconds a segment a pair takes T seconds, of which the link is busy 2x. Ranks are not in
# step, so the word finds the link at any time of them, and then as a rule x from being free:
#
#     T = r + x + (2x / T) x    or    T = ((r + x) + sqrt((r + x)^2 + 8 x^2)) / 2

SEGMENT_BYTES = 2**20
"""Of a segment, at most."""
UNDER_WAY = 2
"""Segments of each rank at once, and least of a step."""


def half_s(
    segments: Floats, *, bytes_s: Floats, trip_s: Floats, burst_s: ArrayLike = 0.0
) -> Floats:
    """Return seconds from when all ranks begin until all have received the last of so many segments.

    All arguments broadcast. All but the last of the pairs take T.

    bytes_s : of a segment on its link; trip_s : of word and bytes, both ways, software included
    burst_s : most burst tokens that a resting link saves, in seconds of its rate; each pair has a rest
    """
    x, r, pairs = bytes_s, trip_s, np.ceil(segments / 2)
    pair_s = ((r + x) + np.sqrt((r + x) ** 2 + 8 * x**2)) / 2
    played_s = (pairs - 1) * pair_s + r + x * np.where(segments % 2, 1, 2)
    return np.maximum(np.maximum(segments * x, pairs * r), played_s - pairs * np.asarray(burst_s))


def ring_s(
    n_bytes: ArrayLike,
    workers: ArrayLike,
    *,
    software_s: ArrayLike,
    link_s_per_byte: ArrayLike,
    core_share: ArrayLike,
    delay_s: ArrayLike,
    burst_s: ArrayLike,
) -> Floats:
    """Return seconds of two halves, which add parts and hand them round.

    Every argument may be an array, and they broadcast; what they are, says `GlooRing`.
    """
    sizes, ranks = np.asarray(n_bytes, float), np.asarray(workers, float)
    whole = np.maximum(np.ceil(sizes / SEGMENT_BYTES), UNDER_WAY * ranks)
    cut = np.ceil(whole / ranks)
    waits = np.maximum(1.0, ranks * np.asarray(core_share))
    bytes_s = sizes / (cut * ranks) * np.asarray(link_s_per_byte)
    trip_s = 4 * np.asarray(delay_s) + np.asarray(software_s) * waits
    return 2 * half_s((ranks - 1) * cut, bytes_s=bytes_s, trip_s=trip_s, burst_s=burst_s)


@dataclass(frozen=True)
class GlooRing:
    """An all-reduce of gloo's from what it is made of; call it on bytes of messages (any shape).

    Where cores are fewer than ranks their software waits for one: it takes workers x core_share times as
    long, if that is above 1.

    software_s : of a round trip, by ranks that have their cores; link_s_per_byte : of one link
    delay_s, burst_s : of each link; a round trip passes four delays
    core_share : share of all cores that a rank's software takes while it runs

    >>> ring = GlooRing(1e-4, 8e-9, workers=4)
    >>> round(ring(8), 6), round(GlooRing(1e-4, 8e-9, workers=4, delay_s=1e-3)(8), 6)
    (0.0006, 0.0246)
    """

    software_s: float
    link_s_per_byte: float
    workers: int
    delay_s: float = 0.0
    burst_s: float = 0.0
    core_share: float = 0.0

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Return seconds for messages of ``n_bytes`` (any shape); a scalar gives a float."""
        seconds = ring_s(n_bytes, **vars(self))
        return float(seconds) if seconds.ndim == 0 else seconds

    def bytes_s(self, n_bytes: ArrayLike) -> Floats:
        """Return seconds, in the shape of ``n_bytes``, for which each link is busy with a message."""
        ring_share = 2 * (self.workers - 1) / self.workers
        return np.asarray(ring_share * self.link_s_per_byte * np.asarray(n_bytes, float))
