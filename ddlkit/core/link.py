"""Messages that share a link: several under way at once, over a link that saves up tokens while it rests.

As in nccl-tests, a collective's bytes are those of the reduced buffer for all_reduce, of the whole output for
all_gather, and of a rank's whole input for reduce_scatter.
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
from ddlkit.core.units import KIB, parse_bits_per_s, parse_seconds
from ddlkit.core.workload import Floats

LARGE = 1e9  # bytes of a message beside which roundings do not count


class Parts(NamedTuple):
    """What messages take of the processor alone, and of the link alone, (..., G) seconds; first scenarios."""

    software_s: Floats
    wire_s: Floats


@dataclass(frozen=True, eq=False)
class Link:
    """What messages share beyond the cost that each has.

    in_flight : how many may be under way at once, in their order; they share the rate alike
    software : how many messages' software the processor does at once, 1 or more; beyond, it is shared alike
    burst_s : most tokens that a rested link has saved, in seconds of its rate. With a burst a message's
        software runs while tokens grow for its next bytes; without, it comes on top of the bytes
    wire_s_per_byte : of the link, a byte of a message, at its rate; of a link with a burst only
    slowdown : how much longer compute takes while a message is under way: 0.1 is a tenth, the largest counts
    message_slowdown : how much longer a message takes until the last is ready; both are one number, or
        (..., G) one for each message, in each scenario if they are drawn
    """

    in_flight: int = 1
    software: float = math.inf
    burst_s: float = 0.0
    wire_s_per_byte: float = 0.0
    slowdown: float | Floats = 0.0
    message_slowdown: float | Floats = 0.0

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise UserError(f"{self.in_flight} messages in flight: at least 1")

    @property
    def plain(self) -> bool:
        """Return whether a message takes what it costs, whatever went before it, and slows nothing down."""
        return self.in_flight == 1 and not self.burst_s and not self.slows

    @property
    def slows(self) -> bool:
        """Return whether messages slow down computing, or computing messages."""
        return bool(np.any(self.slowdown) or np.any(self.message_slowdown))

    def parts(self, cost: MessageCost, n_bytes: ArrayLike) -> Parts:
        """Return the parts of messages of ``n_bytes`` (G,): in a row of equals they make up their cost."""
        taken_s, startup_s = np.asarray(cost(n_bytes)), max(0.0, cost.startup_s())
        if not self.burst_s:
            software_s = np.minimum(startup_s, taken_s)
            return Parts(software_s, taken_s - software_s)
        # Behind a bucket, what was measured is the link's time where the bytes take longer than the start.
        wire_s = self.wire_s_per_byte * cost.sent_bytes(n_bytes)
        by_link = wire_s > startup_s
        wire_s_per_byte = self.wire_s_per_byte * float(cost.sent_bytes(LARGE)) / LARGE
        software_s = np.minimum(taken_s, cost(startup_s / wire_s_per_byte))
        # Of the row of messages that a sample is the mean of, the first one found the burst.
        saved_s = self.burst_s / cost.messages_per_sample(n_bytes)
        wire_s = np.where(by_link, taken_s + saved_s, wire_s)
        return Parts(np.where(by_link, software_s, taken_s), wire_s)

    def play(self, ready_s: ArrayLike, parts: Parts) -> tuple[Floats, Floats]:
        """Return (..., G) begin and end of each message; ``ready_s`` : if none slowed down compute."""
        slowed = self.slowdown, self.message_slowdown
        columns = np.broadcast_arrays(np.asarray(ready_s, dtype=float), *parts, *slowed)
        if self.in_flight == 1:
            begin_s, software_s, wire_s, *of_each = columns
            return one_by_one(
                begin_s, software_s, wire_s, self.burst_s, of_each[0], of_each[1]
            )
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
        pace = 1 / (
            1 + np.where(under_way, self.slowdown, 0.0).max(axis=1, initial=0.0)
        )
        done_s = np.concatenate([[0.0], np.cumsum(pace[:-1] * np.diff(knots_s))])
        last = np.searchsorted(done_s, work_s, side="right") - 1
        return np.asarray(knots_s[last] + (work_s - done_s[last]) / pace[last])

    def _needs(
        self, wire: dict[int, float], software: dict[int, float], drag: dict[int, float]
    ) -> list[tuple[dict[int, float], int, float]]:
        """Return what messages under way need of link and processor, and how many times as long as alone."""
        moving = [k for k in wire if wire[k]]
        working = [k for k in wire if software[k] and (self.burst_s or not wire[k])]
        turns = max(1.0, len(working) / self.software)
        needs = [(wire, k, len(moving) * drag[k]) for k in moving]
        return [*needs, *((software, k, turns * drag[k]) for k in working)]

    def _shared(
        self,
        ready_s: list[float],
        software_s: list[float],
        wire_s: list[float],
        slowed: list[float],
        dragged: list[float],
    ) -> tuple[list[float], list[float]]:
        """Return both event by event: messages get ready, are admitted, have moved, have done software."""
        starts_s, ends_s = [0.0] * len(ready_s), [0.0] * len(ready_s)
        wire: dict[int, float] = {}  # what messages under way still need of the link
        software: dict[int, float] = {}  # and of the processor
        now_s, worked_s, tokens_s, admitted = 0.0, 0.0, self.burst_s, 0
        last_s = max(ready_s, default=0.0)
        while admitted < len(ready_s) or wire:
            for done in [k for k in wire if wire[k] == software[k] == 0]:
                ends_s[done] = now_s
                del wire[done], software[done]
            free = admitted < len(ready_s) and len(wire) < self.in_flight
            if free and ready_s[admitted] <= worked_s:
                saved_s = min(tokens_s, wire_s[admitted])
                tokens_s -= saved_s
                starts_s[admitted] = now_s
                wire[admitted] = wire_s[admitted] - saved_s
                software[admitted] = software_s[admitted]
                admitted += 1
                continue
            stretch = 1.0 + max((slowed[k] for k in wire), default=0.0)
            computes = worked_s < last_s and any(dragged[k] for k in wire)
            drag = {k: 1.0 + dragged[k] if computes else 1.0 for k in wire}
            needs = self._needs(wire, software, drag)
            moments_s = [of[k] * times for of, k, times in needs]
            left_s = (ready_s[admitted] - worked_s) * stretch if free else math.inf
            if computes:
                moments_s.append((last_s - worked_s) * stretch)
            passed_s = min([*moments_s, left_s])
            if math.isinf(passed_s):
                continue
            for of, k, times in needs:
                of[k] = of[k] - passed_s / times if of[k] * times > passed_s else 0.0
            if all(of is software for of, _, _ in needs):  # nothing moved
                tokens_s = min(self.burst_s, tokens_s + passed_s)
            now_s += passed_s
            if computes and (last_s - worked_s) * stretch <= passed_s:
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
    """Return (..., G) begin and end of (..., G) messages, one under way at a time; else as `Link`."""
    starts_s, ends_s = np.empty(ready_s.shape), np.empty(ready_s.shape)
    free_s, tokens_s = (
        np.zeros(ready_s.shape[:-1]),
        np.full(ready_s.shape[:-1], burst_s),
    )
    late_s = np.zeros(ready_s.shape[:-1])
    last_s = ready_s.max(axis=-1, initial=0.0)
    slower, drag = (
        np.broadcast_to(by, ready_s.shape) for by in (slowdown, message_slowdown)
    )
    slows, drags = slower.any(), drag.any()
    for k in range(ready_s.shape[-1]):
        start_s = starts_s[..., k] = np.maximum(free_s, ready_s[..., k] + late_s)
        work_s = np.maximum(
            0.0, last_s - (start_s - late_s)
        )  # of computing that is left
        tokens_s = np.minimum(burst_s, tokens_s + start_s - free_s)
        on_link_s = np.maximum(0.0, wire_s[..., k] - tokens_s)
        beside = work_s, slower[..., k], drag[..., k]
        took_s = software_s[..., k] + (0.0 if burst_s else on_link_s)
        if burst_s:
            took_s = np.maximum(on_link_s, took_s)
        longer_s: Floats | float = (
            0.0  # that the link is busy, which then saves nothing
        )
        if drags:
            took_s, longer_s = (
                _dragged(took_s, *beside),
                _dragged(on_link_s, *beside) - on_link_s,
            )
        tokens_s = np.minimum(burst_s, tokens_s + took_s - wire_s[..., k] - longer_s)
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


# -- what it carries ---------------------------------------------------------------------------


class Collective(NamedTuple):
    """How often each byte crosses each rank's link, beside (ranks - 1) / ranks, and its look in a figure."""

    crossings: int
    label: str
    color: str
    hatch: str


COLLECTIVES = {
    "all_reduce": Collective(2, "all-reduce", "#c14d00", "////"),
    "all_gather": Collective(1, "all-gather", "#e0a000", "\\\\"),
    "reduce_scatter": Collective(1, "reduce-scatter", "#8a6d00", "----"),
}
"""Every collective that can be timed, fitted, predicted and drawn, by name."""

STEPS = "steps:"
"""Before an algorithm's name, in a table: its steps were sent one by one, not by a library's collective."""

FRAMING_BYTES, TBF_FRAMING_BYTES = 38, 14
"""Around each packet of up to 1,500 bytes: as Ethernet on a wire has them, and as tbf counts it."""
FRAMING = 1448 / (1500 + TBF_FRAMING_BYTES)
"""TCP payload in a full Ethernet frame, as tbf counts it: what no collective can exceed."""


def bus_factor(collective: str, ranks: int) -> float:
    """Return the bytes that each rank's link must carry each way, per byte of message (nccl-tests)."""
    if collective not in COLLECTIVES:
        raise UserError(
            f"unknown collective {shown(collective)}: use {' or '.join(COLLECTIVES)}"
        )
    return COLLECTIVES[collective].crossings * (ranks - 1) / ranks


def busbw(collective: str, ranks: int, n_bytes: Any, seconds: Any) -> Any:
    """Return bus bandwidth in bytes/s, elementwise, which compares with the link's rate (nccl-tests)."""
    return bus_factor(collective, ranks) * (np.asarray(n_bytes) / np.asarray(seconds))


def message_parts(collective: str, ranks: int) -> tuple[int, int]:
    """Return into how many parts of a message's bytes a rank's input, and its output, divide them.

    >>> message_parts("all_gather", 8)
    (8, 1)
    """
    divided = {"all_gather": (ranks, 1), "reduce_scatter": (1, ranks)}
    return divided.get(collective, (1, 1))


def burst_bytes(rate_bits_per_s: float) -> int:
    """Return the depth of the bucket that the lab gives to a link; a smaller one breaks the rate by 2x."""
    return max(16 * KIB, round(128 * KIB / 1e9 * rate_bits_per_s))


def wire_s_per_byte(
    collective: str, ranks: int, rate_bits_per_s: float, framing: float = FRAMING
) -> float:
    """Return seconds of each rank's link for a byte of a message; framing : the share of its own bytes."""
    return bus_factor(collective, ranks) * 8 / (rate_bits_per_s * framing)


# -- the name of a lab's link --------------------------------------------------------------------


class Named(NamedTuple):
    """What the name of a link says; engine : "tbf", the kernel's token bucket, or "emulated", ours."""

    engine: str
    rate_bits_per_s: float
    delay_s: float
    burst_s: float
    framing_bytes: int

    @property
    def framing(self) -> float:
        """Return the share of what the link carries that is a message's own bytes."""
        return 1448 / (1500 + self.framing_bytes)


def is_lab(link: str) -> bool:
    """Return whether the link is one of a lab, by its name."""
    return link.startswith(("lab:", "emulated:"))


def read_link(link: str) -> Named:
    """Return what the name of a lab's link says, as it stands in tables; UserError for other links.

    >>> read_link("emulated:500mbit-delay2ms-loss0.001")[:3]
    ('emulated', 500000000.0, 0.002)
    """
    if not is_lab(link):
        raise UserError(f"{link!r} is no lab's link: they are called as lab:1gbit")

    def part(name: str, otherwise: str) -> str:
        match = re.search(rf"-{name}([0-9][^-]*)", link)
        return match[1] if match else otherwise

    engine, _, rest = link.partition(":")
    bits_per_s = parse_bits_per_s(rest.partition("-")[0])
    if engine == "lab":
        saved_s = burst_bytes(bits_per_s) * 8 / bits_per_s
        return Named("tbf", bits_per_s, 0.0, saved_s, TBF_FRAMING_BYTES)
    delay_s, saved_s = (parse_seconds(part(name, "0s")) for name in ("delay", "burst"))
    return Named(
        engine, bits_per_s, delay_s, saved_s, int(part("framing", f"{FRAMING_BYTES}"))
    )


def ranks_per_node(link: str) -> int:
    """Return how many ranks share the link of a node, by its name as emulated:200mbit-g4-1gbit; else 1."""
    group = re.search(r"-g([0-9]+)-", link)
    return int(group[1]) if group else 1


def way_s(link: str) -> float:
    """Return a packet's delay in seconds from rank to rank, by the link's name; 0 for other links."""
    return 2 * read_link(link).delay_s if link.startswith("emulated:") else 0.0
