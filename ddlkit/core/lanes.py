"""Messages that share a link: several under way at once, over a link that saves up credit while it rests.

gloo's process group carries two messages at once by default. And a rate is often enforced by a token bucket:
what a link may send grows at its rate, up to a depth, the burst; what has been saved is sent at once. So
a message costs less after a pause, or after small ones that left the link idle, than among its equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError

Floats = NDArray[np.float64]


class Parts(NamedTuple):
    """What messages are made of, (..., G) seconds each; the first axes are scenarios.

    wire_s : of the link alone, at its rate, for all bytes
    least_s : the lane, at least, while the bytes move: software's steps between them
    rest_s : the lane, afterwards, when the link is free for others
    """

    least_s: Floats
    wire_s: Floats
    rest_s: Floats


@dataclass(frozen=True, eq=False)
class Link:
    """What messages share beyond the cost that each has.

    in_flight : how many may be under way at once, in their order; they share the rate alike
    burst_s : most credit that a rested link has saved, in seconds of its rate; 0: it saves none
    wire_s_per_byte : of the link, a byte of a message, at its rate; of a link with a burst only
    bytes, in_a_row : (s,) where the cost was calibrated, and of how many messages in a row, begun with full
        credit, it is the mean there; of a link with a burst only

    Raises UserError without a lane.
    """

    in_flight: int = 1
    burst_s: float = 0.0
    wire_s_per_byte: float = 0.0
    bytes: Sequence[float] = ()
    in_a_row: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise UserError(f"{self.in_flight} messages in flight: at least 1")

    @property
    def plain(self) -> bool:
        """Whether a message takes what it costs, whatever went before it."""
        return self.in_flight == 1 and not self.burst_s

    def parts(self, cost: MessageCost, n_bytes: ArrayLike) -> Parts:
        """The parts of messages of ``n_bytes`` (G,): in a row of equals they make up their cost.

        The software's share is what the smallest message costs. Behind a bucket it passes while the bucket
        fills for the bytes of the same message: the longer of the two decides, and what was measured is the
        time of that one. Otherwise it comes on top of the bytes.
        """
        taken_s, startup_s = np.asarray(cost(n_bytes)), np.maximum(0.0, cost(1.0))
        if not self.burst_s:
            rest_s = np.minimum(startup_s, taken_s)
            return Parts(np.zeros_like(taken_s), taken_s - rest_s, rest_s)
        sent_bytes = cost.sent_bytes(n_bytes)
        wire_s = self.wire_s_per_byte * sent_bytes
        in_a_row = np.interp(np.log(sent_bytes), np.log(self.bytes), self.in_a_row)
        by_link = wire_s > startup_s
        least_s = np.where(by_link, startup_s, taken_s)
        # Of the row that was calibrated, the first message found the burst.
        wire_s = np.where(by_link, taken_s + self.burst_s / in_a_row, wire_s)
        return Parts(least_s, wire_s, np.zeros_like(wire_s))

    def ends(self, ready_s: ArrayLike, parts: Parts) -> Floats:
        """(..., G) end of each message, of which each may begin when it is ready and a lane is free."""
        columns = np.broadcast_arrays(np.asarray(ready_s, dtype=float), *parts)
        if self.in_flight == 1:
            return self._one_by_one(*columns)
        ends_s = np.empty(columns[0].shape)
        for scenario in np.ndindex(ends_s.shape[:-1]):
            ends_s[scenario] = self._shared(*(column[scenario].tolist() for column in columns))
        return ends_s

    def _one_by_one(
        self, ready_s: Floats, least_s: Floats, wire_s: Floats, rest_s: Floats
    ) -> Floats:
        ends_s = np.empty(ready_s.shape)
        free_s, credit_s = np.zeros(ready_s.shape[:-1]), np.full(ready_s.shape[:-1], self.burst_s)
        for k in range(ready_s.shape[-1]):
            start_s = np.maximum(free_s, ready_s[..., k])
            credit_s = np.minimum(self.burst_s, credit_s + start_s - free_s)
            moved_s = np.maximum(0.0, wire_s[..., k] - credit_s)
            took_s = np.maximum(least_s[..., k], moved_s) + rest_s[..., k]
            credit_s = np.minimum(self.burst_s, credit_s + took_s - wire_s[..., k])
            free_s = ends_s[..., k] = start_s + took_s
        return ends_s

    def _shared(
        self,
        ready_s: list[float],
        least_s: list[float],
        wire_s: list[float],
        rest_s: list[float],
    ) -> list[float]:
        """Event by event: a message is admitted, has moved its bytes, or leaves its lane."""
        ends_s, started_s = [0.0] * len(ready_s), [0.0] * len(ready_s)
        left_s: dict[
            int, float
        ] = {}  # of messages whose bytes move: what they still need of the link
        leaving_s: list[float] = []  # ends of those whose bytes have moved
        now_s, credit_s, admitted = 0.0, self.burst_s, 0

        while admitted < len(ready_s) or left_s:
            leaving_s = [end_s for end_s in leaving_s if end_s > now_s]
            waiting = admitted < len(ready_s)
            free = waiting and len(left_s) + len(leaving_s) < self.in_flight
            first = min(left_s, key=left_s.__getitem__, default=-1)
            done_s = now_s + left_s[first] * len(left_s) if left_s else math.inf
            next_s = max(now_s, ready_s[admitted]) if free else math.inf
            if waiting and not free:
                next_s = min(leaving_s, default=math.inf)
            then_s = min(done_s, next_s)
            for number in left_s:
                left_s[number] -= (then_s - now_s) / len(left_s)
            if not left_s:
                credit_s = min(self.burst_s, credit_s + then_s - now_s)
            now_s = then_s
            if done_s <= next_s:
                del left_s[first]
                ends_s[first] = max(now_s, started_s[first] + least_s[first]) + rest_s[first]
                leaving_s.append(ends_s[first])
            elif free:
                saved_s = min(credit_s, wire_s[admitted])
                credit_s -= saved_s
                started_s[admitted], left_s[admitted] = now_s, wire_s[admitted] - saved_s
                admitted += 1
        return ends_s
