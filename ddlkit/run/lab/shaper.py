"""When packets leave links, and which do not: an emulated network without a clock, a socket or a byte.

A packet of up to 64 KiB stands for the frames that the wire would carry, and passes links in turn: its
sender's, its receiver's, and between nodes those of the nodes. Frames follow one another through the links
as on a real path (a switch need not have the last one to send the first); each link carries them in order,
at its rate, and hands them on after its delay. What chance takes is lost, frame by frame. All times are in
seconds since a start that the caller chooses.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from ddlkit.core.lablink import FRAMING_BYTES
from ddlkit.run.lab.conditions import Conditions

MIN_PACKET_BYTES = 46  # in a frame; a shorter one is padded
NEVER_S = math.inf


class Size(NamedTuple):
    """A packet on the wire: ``frames`` of ``frame_bytes`` each, the last one shorter; ``bytes`` of all."""

    frames: int
    frame_bytes: int
    bytes: int

    def of(self, start: int, stop: int) -> int:
        """Return the bytes of the frames from ``start`` up to ``stop``."""
        if stop == self.frames:
            return self.bytes - start * self.frame_bytes
        return (stop - start) * self.frame_bytes


def size_of(ip_bytes: int, header_bytes: int = 0, segment_bytes: int = 0) -> Size:
    """Cut a packet into frames: segments with a header each, if it has any, and framing around each.

    >>> size_of(100)
    Size(frames=1, frame_bytes=138, bytes=138)
    >>> size_of(40 + 3000, header_bytes=40, segment_bytes=1460)
    Size(frames=3, frame_bytes=1538, bytes=3234)
    """
    payload = ip_bytes - header_bytes
    if not segment_bytes or payload <= segment_bytes:
        whole = max(MIN_PACKET_BYTES, ip_bytes) + FRAMING_BYTES
        return Size(1, whole, whole)
    frames = -(-payload // segment_bytes)
    around = header_bytes + FRAMING_BYTES
    return Size(frames, segment_bytes + around, payload + frames * around)


@dataclass(slots=True, eq=False)
class Piece:
    """Frames of a packet that travel together: those from ``start`` up to ``stop`` of ``load``.

    route : the links to pass; hop : how many of them it has; first_s : when its first frame arrived
    """

    load: Any
    size: Size
    source: int
    target: int
    start: int
    stop: int
    route: Sequence[Line]
    hop: int = 0
    first_s: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether it is the packet as it was sent."""
        return self.start == 0 and self.stop == self.size.frames


class Line:
    """One direction of a link: how fast it carries what, and what it has carried.

    free_s : when all that was given to it will have left
    bytes, packets, frames, lost : carried, framing included, and frames taken by chance
    """

    def __init__(
        self, rate_bits_per_s: float, delay_s: float, loss: float, chance: random.Random
    ) -> None:
        self.bytes_per_s, self.delay_s, self.loss = rate_bits_per_s / 8, delay_s, loss
        self.chance = chance
        self.free_s = 0.0
        self.bytes = self.packets = self.frames = self.lost = 0
        self._until_loss = self._draw()

    def carry(
        self, first_s: float, last_s: float, size: Size, start: int, stop: int
    ) -> tuple[float, float]:
        """Carry frames whose first arrives at the one time and whose last at the other.

        Returns when the first of them has left, and when all have.
        """
        n_bytes, frames = size.of(start, stop), stop - start
        begin_s = max(first_s, self.free_s)
        left_s = begin_s + n_bytes / self.bytes_per_s
        if last_s > first_s:
            left_s = max(left_s, last_s + size.of(stop - 1, stop) / self.bytes_per_s)
        self.free_s = left_s
        self.bytes += n_bytes
        self.packets += 1
        self.frames += frames
        began_s = begin_s + size.frame_bytes / self.bytes_per_s if frames > 1 else left_s
        return min(left_s, began_s), left_s

    def spared(self, frames: int) -> int:
        """Return how many of that many frames pass until chance takes one; all if it takes none."""
        if self._until_loss < 0 or self._until_loss >= frames:
            self._until_loss -= frames if self._until_loss >= 0 else 0
            return frames
        passed, self._until_loss = self._until_loss, self._draw()
        self.lost += 1
        return passed

    def _draw(self) -> int:
        """Return how many frames pass until the next is lost; -1 where none ever is."""
        if not self.loss:
            return -1
        return int(math.log(1.0 - self.chance.random()) / math.log1p(-self.loss))


class Shaper:
    """Packets on their way between ranks: give it what is sent, and take out what has arrived.

    ::

        shaper = Shaper([1e9, 1e9], Conditions(delay_s=1e-3))
        shaper.send(0.0, 0, 1, size_of(1500), "hello")
        list(shaper.take(0.1))  # [(0.0020..., the piece)]

    up, down : the ranks' links, from them and to them; node_up, node_down : of nodes that ranks share
    """

    def __init__(
        self,
        rates_bits_per_s: Sequence[float],
        conditions: Conditions,
        ranks_per_node: int = 1,
        node_rate_bits_per_s: float = 0.0,
    ) -> None:
        self._conditions, self._per_node = conditions, ranks_per_node
        shared = ranks_per_node > 1
        nodes = len(rates_bits_per_s) // ranks_per_node if shared else 0
        own_delay_s = (
            0.0 if shared else conditions.delay_s
        )  # what is far is beyond the nodes' links
        self.up, self.down = (
            [self._line(rate, own_delay_s, f"{way}{n}") for n, rate in enumerate(rates_bits_per_s)]
            for way in ("up", "down")
        )
        self.node_up, self.node_down = (
            [
                self._line(node_rate_bits_per_s, conditions.delay_s, f"{way}{n}")
                for n in range(nodes)
            ]
            for way in ("node up", "node down")
        )
        self._events: list[tuple[float, int, Piece]] = []
        self._order = count()
        ranks = range(len(rates_bits_per_s))
        self._routes = [[self._route(source, target) for target in ranks] for source in ranks]
        self._last_s: dict[tuple[int, int, int], float] = {}

    def _line(self, rate_bits_per_s: float, delay_s: float, name: str) -> Line:
        how = self._conditions
        loss = how.loss if name.startswith("up") else 0.0  # drawn once on the way
        rate = rate_bits_per_s * (1 - how.background)
        return Line(rate, delay_s, loss, random.Random(f"{how.seed} {name}"))

    def _route(self, source: int, target: int) -> list[Line]:
        ends = [node // self._per_node for node in (source, target)]
        between = [self.node_up[ends[0]], self.node_down[ends[1]]] if self.node_up else []
        return [self.up[source], *(between if ends[0] != ends[1] else []), self.down[target]]

    def send(self, now_s: float, source: int, target: int, size: Size, load: Any) -> None:
        """Let a packet leave a rank: no earlier than any before."""
        line = self.up[source]
        start = 0
        while start < size.frames:
            stop = start + line.spared(size.frames - start)
            if stop > start:
                route = self._routes[source][target]
                self._carry(Piece(load, size, source, target, start, stop, route), now_s, now_s)
            if stop < size.frames:  # the frame that is lost takes its time, too
                line.carry(now_s, now_s, size, stop, stop + 1)
            start = stop + 1

    def _carry(self, piece: Piece, first_s: float, last_s: float) -> None:
        """Let the piece's next link carry it, and note when it will be at the end of that."""
        line = piece.route[piece.hop]
        began_s, left_s = line.carry(first_s, last_s, piece.size, piece.start, piece.stop)
        due_s = left_s + line.delay_s
        if jitter_s := min(self._conditions.jitter_s, line.delay_s):
            way = (piece.hop, piece.source, piece.target)
            late_s = due_s + line.chance.uniform(-jitter_s, jitter_s)
            due_s = self._last_s[way] = max(late_s, self._last_s.get(way, 0.0))
        piece.hop += 1
        piece.first_s = began_s + due_s - left_s
        heapq.heappush(self._events, (due_s, next(self._order), piece))

    @property
    def next_s(self) -> float:
        """When `take` should be called next; infinite where nothing is under way."""
        return self._events[0][0] if self._events else NEVER_S

    def take(self, now_s: float) -> Iterator[tuple[float, Piece]]:
        """Give (when it was due, piece) of all that has arrived by now, in order, one by one."""
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, _, piece = heapq.heappop(events)
            if piece.hop == len(piece.route):
                yield at_s, piece
            else:
                self._carry(piece, piece.first_s, at_s)
