"""Messages that share a link: several under way at once, over a link that saves up credit while it rests.

gloo's process group carries two messages at once by default. A GPU's collectives take processors and memory
bandwidth from the computation that they hide behind, and it from them. And a rate is often enforced by a
token bucket: what a link may send grows at its rate, up to a depth, the burst; what has been saved is sent at
once. So a message costs less after a pause, or after small ones that left the link idle, than among its
equals.

What a link carries is bus bandwidth as nccl-tests defines it. ``bytes`` is the size of the reduced buffer for
all_reduce, of the whole output for all_gather, and of a rank's whole input for reduce_scatter; algorithm
bandwidth is bytes / time; bus bandwidth multiplies it by what a link must carry at least, so that it compares
with the link's rate whatever the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats

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
    burst_s : most credit that a rested link has saved, in seconds of its rate; 0: it saves none
    wire_s_per_byte : of the link, a byte of a message, at its rate; of a link with a burst only
    slowdown : how much longer computing takes while a message is under way, 0 or more: 0.1 is a tenth longer
    message_slowdown : how much longer a message takes while computing goes on, which is until the last one is
        ready; with both at 1 nothing is gained by overlap. Not of a link with a burst

    With a burst, which must be longer than the software between two steps of a collective, a message's
    software runs while credit grows for its next bytes: the longer of the two decides. Without, the link
    rests meanwhile for good: software comes on top of the bytes.

    Raises UserError for no message in flight, for a processor that does less than one message's software, and
    for slowdowns that are negative or not finite, or of messages over a link with a burst.

    >>> Link(in_flight=2).ends([0.0, 0.0], Parts(np.zeros(2), np.array([1.0, 1.0]))).tolist()
    [2.0, 2.0]
    """

    in_flight: int = 1
    software: float = math.inf
    burst_s: float = 0.0
    wire_s_per_byte: float = 0.0
    slowdown: float = 0.0
    message_slowdown: float = 0.0

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise UserError(f"{self.in_flight} messages in flight: at least 1")
        if not self.software >= 1:
            raise UserError(f"software of {self.software} messages at once: at least 1")
        for share in (self.slowdown, self.message_slowdown):
            if not 0 <= share < math.inf:
                raise UserError(f"a slowdown of {share}: 0 or more, 0.1 for a tenth longer")
        if self.burst_s and self.message_slowdown:
            raise UserError(
                "a link with a burst: what computing takes from its messages is unknown"
            )

    @property
    def plain(self) -> bool:
        """Whether a message takes what it costs, whatever went before it, and slows nothing down."""
        slowed = self.slowdown or self.message_slowdown
        return self.in_flight == 1 and not self.burst_s and not slowed

    def parts(self, cost: MessageCost, n_bytes: ArrayLike) -> Parts:
        """The parts of messages of ``n_bytes`` (G,): in a row of equals they make up their cost.

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
        """(..., G) end of each message, which begins when ready with fewer than `in_flight` under way."""
        return self.play(ready_s, parts)[1]

    def play(self, ready_s: ArrayLike, parts: Parts) -> tuple[Floats, Floats]:
        """(..., G) beginning and (..., G) end of each message.

        ready_s : (..., G) when each would be ready if no message slowed down what makes it ready
        """
        columns = np.broadcast_arrays(np.asarray(ready_s, dtype=float), *parts)
        if not all(np.isfinite(column).all() for column in columns):
            raise UserError("messages on a link: every time must be finite")
        if self.in_flight == 1:
            begin_s, software_s, wire_s = columns
            slowed = self.slowdown, self.message_slowdown
            return one_by_one(begin_s, software_s, wire_s, self.burst_s, *slowed)
        starts_s, ends_s = np.empty(columns[0].shape), np.empty(columns[0].shape)
        for scenario in np.ndindex(ends_s.shape[:-1]):
            played = self._shared(*(column[scenario].tolist() for column in columns))
            starts_s[scenario], ends_s[scenario] = played
        return starts_s, ends_s

    def computed_s(self, work_s: Floats, starts_s: Floats, ends_s: Floats) -> Floats:
        """(n,) when computing has come as far as ``work_s`` (n,), beside messages of these times (G,)."""
        knots_s = np.unique(np.concatenate([[0.0], starts_s, ends_s]))
        under_way = ((starts_s <= knots_s[:, None]) & (knots_s[:, None] < ends_s)).any(axis=1)
        pace = np.where(under_way, 1 / (1 + self.slowdown), 1.0)
        done_s = np.concatenate([[0.0], np.cumsum(pace[:-1] * np.diff(knots_s))])
        last = np.searchsorted(done_s, work_s, side="right") - 1
        return np.asarray(knots_s[last] + (work_s - done_s[last]) / pace[last])

    def _shared(
        self, ready_s: list[float], software_s: list[float], wire_s: list[float]
    ) -> tuple[list[float], list[float]]:
        """Event by event: a message is ready, is admitted, has moved its bytes, or has done its software."""
        starts_s, ends_s = [0.0] * len(ready_s), [0.0] * len(ready_s)
        wire: dict[int, float] = {}  # what messages under way still need of the link
        software: dict[int, float] = {}  # and of the processor
        now_s, worked_s, credit_s, admitted = 0.0, 0.0, self.burst_s, 0
        last_s = max(ready_s, default=0.0)
        while admitted < len(ready_s) or wire:
            for done in [k for k in wire if wire[k] == software[k] == 0]:
                ends_s[done] = now_s
                del wire[done], software[done]
            free = admitted < len(ready_s) and len(wire) < self.in_flight
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
            stretch = 1 + self.slowdown if wire else 1.0
            drag = 1 + self.message_slowdown if worked_s < last_s else 1.0
            share, slower = len(moving) * drag, max(1.0, len(working) / self.software) * drag
            moments_s = [wire[k] * share for k in moving] + [software[k] * slower for k in working]
            left_s = (ready_s[admitted] - worked_s) * stretch if free else math.inf
            if drag > 1 and wire:
                moments_s.append((last_s - worked_s) * stretch)
            passed_s = min([*moments_s, left_s])
            if math.isinf(passed_s):
                continue
            for needs, of, times in ((wire, moving, share), (software, working, slower)):
                for k in of:
                    needs[k] = needs[k] - passed_s / times if needs[k] * times > passed_s else 0.0
            if not moving:
                credit_s = min(self.burst_s, credit_s + passed_s)
            now_s += passed_s
            if drag > 1 and (last_s - worked_s) * stretch <= passed_s:
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
    message_slowdown: float = 0.0,
) -> tuple[Floats, Floats]:
    """(..., G) beginning and (..., G) end of messages of which one is under way at a time; else as `Link`.

    ready_s, software_s, wire_s : (..., G) of as many scenarios; slowdown : (...) or of all of them
    """
    starts_s, ends_s = np.empty(ready_s.shape), np.empty(ready_s.shape)
    free_s, credit_s = np.zeros(ready_s.shape[:-1]), np.full(ready_s.shape[:-1], burst_s)
    late_s = before_s = np.zeros(ready_s.shape[:-1])
    last_s = ready_s.max(axis=-1, initial=0.0)
    slower, alone_s = np.asarray(slowdown, dtype=float), np.maximum(0.0, wire_s) + software_s
    for k in range(ready_s.shape[-1]):
        if slower.any():
            # Of the work since the message before was ready, what fell beside messages took longer.
            beside_s = np.maximum(0.0, free_s - before_s - late_s) / (1 + slower)
            late_s = late_s + slower * np.minimum(ready_s[..., k] - before_s, beside_s)
        before_s = ready_s[..., k]
        start_s = starts_s[..., k] = np.maximum(free_s, before_s + late_s)
        took_s = alone_s[..., k]
        if burst_s:
            credit_s = np.minimum(burst_s, credit_s + start_s - free_s)
            took_s = np.maximum(np.maximum(0.0, wire_s[..., k] - credit_s), software_s[..., k])
            credit_s = np.minimum(burst_s, credit_s + took_s - wire_s[..., k])
        if message_slowdown:
            done_s = before_s + np.maximum(0.0, start_s - before_s - late_s) / (1 + slower)
            work_s = np.maximum(0.0, last_s - done_s) * (1 + slower)  # computing still goes on for
            rest_s = np.maximum(0.0, took_s - work_s / (1 + message_slowdown))
            took_s = np.minimum(took_s * (1 + message_slowdown), work_s) + rest_s
        free_s = ends_s[..., k] = start_s + took_s
    return starts_s, ends_s


def turn_s(ends_s: Floats, in_flight: int) -> Floats:
    """(G,) when fewer than ``in_flight`` of the messages before each were still under way."""
    free_s = np.zeros(len(ends_s))
    for group in range(in_flight, len(ends_s)):
        free_s[group] = np.sort(ends_s[:group])[-in_flight]
    return free_s


# -- what it carries ---------------------------------------------------------------------------

KNOWN = ("all_reduce", "all_gather", "reduce_scatter")

BURST_S = 128 * 1024 / 1e9  # bytes per (bit/s); a smaller burst breaks the rate by 2x
MIN_BURST_BYTES = 16 * 1024
FRAMING = 1448 / 1514
"""TCP payload in a full Ethernet frame, as tbf counts it: what no collective can exceed."""


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes that each rank's link must carry in each direction, per byte of message."""
    if collective not in KNOWN:
        raise UserError(f"unknown collective {collective!r}: use {' or '.join(KNOWN)}")
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def busbw(collective: str, ranks: int, n_bytes: Any, seconds: Any) -> Any:
    """Bus bandwidth in bytes/s, elementwise.

    >>> float(busbw("all_reduce", 4, 1e9, 2.0))
    750000000.0
    """
    return bus_factor(collective, ranks) * (np.asarray(n_bytes) / np.asarray(seconds))


def burst_bytes(rate_bits_per_s: float) -> int:
    """Depth of the bucket that the lab gives to a link of that rate."""
    return max(MIN_BURST_BYTES, round(BURST_S * rate_bits_per_s))


def burst_s(rate_bits_per_s: float) -> float:
    """The same in seconds of the rate: what a message after a pause saves at most."""
    return burst_bytes(rate_bits_per_s) * 8 / rate_bits_per_s


def wire_s_per_byte(
    collective: str, ranks: int, rate_bits_per_s: float, framing: float = FRAMING
) -> float:
    """Of each rank's link, for a byte of a message, at the shaped rate; ``framing``: the message's share."""
    return bus_factor(collective, ranks) * 8 / (rate_bits_per_s * framing)
