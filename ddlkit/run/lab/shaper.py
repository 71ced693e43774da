"""When packets leave links, and which do not: an emulated network without a clock, a socket or a byte.

A packet of up to 64 KiB stands for the frames that the wire would carry, and passes links in turn: its
sender's, its receiver's, and between nodes those of the nodes. Frames follow one another through the links
as on a real path (a switch need not have the last one to send the first); each link carries them in order,
at its rate, and hands them on after its delay. What finds a queue full is dropped, and what chance takes is
lost, frame by frame. All times are in seconds since a start that the caller chooses.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from ddlkit.core.errors import UserError
from ddlkit.core.lablink import FRAMING_BYTES
from ddlkit.run.lab.conditions import Background, Change, Conditions

MIN_PACKET_BYTES = 46  # in a frame; a shorter one is padded
NEVER_S = math.inf


class Size(NamedTuple):
    """A packet on the wire: ``frames`` of ``frame_bytes`` each, the last one shorter; ``bytes`` of all."""

    frames: int
    frame_bytes: int
    bytes: int

    def of(self, start: int, stop: int) -> int:
        """Bytes of the frames from ``start`` up to ``stop``."""
        if stop == self.frames:
            return self.bytes - start * self.frame_bytes
        return (stop - start) * self.frame_bytes


def size_of(
    ip_bytes: int,
    header_bytes: int = 0,
    segment_bytes: int = 0,
    framing_bytes: int = FRAMING_BYTES,
) -> Size:
    """A packet as frames: cut into segments with a header each, if it has any, and framing around each.

    >>> size_of(100)
    Size(frames=1, frame_bytes=138, bytes=138)
    >>> size_of(40 + 3000, header_bytes=40, segment_bytes=1460)
    Size(frames=3, frame_bytes=1538, bytes=3234)
    """
    payload = ip_bytes - header_bytes
    if not segment_bytes or payload <= segment_bytes:
        whole = max(MIN_PACKET_BYTES, ip_bytes) + framing_bytes
        return Size(1, whole, whole)
    frames = -(-payload // segment_bytes)
    around = header_bytes + framing_bytes
    return Size(frames, segment_bytes + around, payload + frames * around)


class Piece:
    """Frames of a packet that travel together: those from ``start`` up to ``stop`` of ``load``.

    route : the links to pass; hop : how many of them it has; first_s : when its first frame arrived
    """

    __slots__ = ("first_s", "hop", "load", "route", "size", "source", "start", "stop", "target")

    def __init__(
        self, load: Any, size: Size, source: int, target: int, start: int, stop: int
    ) -> None:
        self.load, self.size, self.source, self.target = load, size, source, target
        self.start, self.stop, self.hop = start, stop, 0
        self.first_s = 0.0
        self.route: Sequence[Line] = ()

    @property
    def whole(self) -> bool:
        """Whether it is the packet as it was sent."""
        return self.start == 0 and self.stop == self.size.frames


class _Step(NamedTuple):
    """What holds of a link from ``at_s`` on."""

    at_s: float
    bytes_per_s: float
    delay_s: float
    loss: float
    jitter_s: float
    background: Background


class Line:
    """One direction of a link: how fast it carries what, and what it has carried.

    delay_s, loss, jitter_s : as they are now, at the last time asked of
    free_s : when all that was given to it will have left; bytes, frames, dropped, lost, most_queued_bytes :
        carried, frames that found the queue full, frames taken by chance, most that waited
    """

    def __init__(
        self,
        rate_bits_per_s: float,
        delay_s: float = 0.0,
        loss: float = 0.0,
        background: Background | None = None,
        queue_bytes: float = math.inf,
        chance: random.Random | None = None,
        burst_s: float = 0.0,
        jitter_s: float = 0.0,
    ) -> None:
        share = background or Background(0.0)
        self._steps = [_Step(0.0, rate_bits_per_s / 8, delay_s, loss, jitter_s, share)]
        self._queue_bytes, self._burst_s = queue_bytes, burst_s
        self.chance = chance or random.Random(0)
        self.free_s = 0.0
        self.bytes = self.packets = self.frames = self.dropped = self.lost = 0
        self.most_queued_bytes = 0.0
        self._until_loss = -1
        self._find(0.0)

    def change(self, change: Change, since_s: float = 0.0) -> None:
        """Let a change hold from its time on, which is that of the last one known or later."""
        rate, known = change.rate_bits_per_s, self._steps[-1]._asdict()
        new = {name: getattr(change, name, None) for name in known}
        new |= {"at_s": since_s + change.at_s, "bytes_per_s": rate and rate / 8}
        self._steps.append(_Step(**known | {k: v for k, v in new.items() if v is not None}))
        self._find(self._from_s)

    def restore(self, at_s: float) -> None:
        """Let it be as in the beginning from a time on; changes that were to come do not."""
        passed = [step for step in self._steps if step.at_s <= at_s]
        self._steps = [*passed, self._steps[0]._replace(at_s=at_s)]
        self._find(self._from_s)

    @property
    def last_change_s(self) -> float:
        """When the last change that is known comes or came."""
        return self._steps[-1].at_s

    def _find(self, at_s: float) -> None:
        """Set what holds at a time, from `_from_s` until `_until_s`."""
        number = bisect_right(self._steps, at_s, key=lambda step: step.at_s) - 1
        step = self._steps[max(0, number)]
        loss_before = getattr(self, "loss", None)
        following = self._steps[number + 1 : number + 2]
        self.delay_s, self.loss, self.jitter_s = step.delay_s, step.loss, step.jitter_s
        self._from_s, self._until_s = step.at_s, following[0].at_s if following else NEVER_S
        taken, period_s = step.background.load, step.background.period_s
        if period_s:
            begun_s = math.floor(at_s / period_s) * period_s
            edges = [begun_s, begun_s + step.background.on_s, begun_s + period_s]
            edges.append(edges[1] + period_s)
            passed = bisect_right(edges, at_s)
            self._from_s = max(self._from_s, edges[max(0, passed - 1)])
            self._until_s = min(self._until_s, edges[passed])
            taken *= passed % 2  # on behind the first edge and the third
        self.bytes_per_s = step.bytes_per_s * (1 - taken)
        if loss_before != step.loss:
            self._until_loss = self._draw()

    def at(self, at_s: float) -> None:
        """Let rate, delay and loss be those of a time."""
        if not self._from_s <= at_s < self._until_s:
            self._find(at_s)

    def end_s(self, start_s: float, n_bytes: float) -> float:
        """When bytes that start then have left."""
        if not self._from_s <= start_s < self._until_s:
            self._find(start_s)
        while (needed_s := n_bytes / self.bytes_per_s) > self._until_s - start_s:
            n_bytes -= (self._until_s - start_s) * self.bytes_per_s
            start_s = self._until_s
            self._find(start_s)
        return start_s + needed_s

    def queued_bytes(self, now_s: float) -> float:
        """What has still to leave."""
        at_s, queued = now_s, 0.0
        while at_s < self.free_s:
            self.at(at_s)
            until_s = min(self.free_s, self._until_s)
            queued += (until_s - at_s) * self.bytes_per_s
            at_s = until_s
        return queued

    def fits(self, now_s: float, size: Size, start: int, stop: int) -> int:
        """Up to which frame a piece finds room; the rest is dropped."""
        queued = self.queued_bytes(now_s) if now_s < self.free_s else 0.0
        room, n_bytes = self._queue_bytes - queued, size.of(start, stop)
        if n_bytes <= room:
            if queued + n_bytes > self.most_queued_bytes:
                self.most_queued_bytes = queued + n_bytes
            return stop
        self.most_queued_bytes = self._queue_bytes
        fitting = start + max(0, int(room // size.frame_bytes))
        self.dropped += stop - fitting
        return fitting

    def carry(self, first_s: float, last_s: float, size: Size, start: int, stop: int) -> float:
        """Carry frames whose first arrives at the one time and whose last at the other; when they have left.

        ``began_s`` is when the first one has.
        """
        n_bytes, frames = size.of(start, stop), stop - start
        begin_s = max(first_s - self._burst_s, self.free_s)
        self.free_s = left_s = self.end_s(begin_s, n_bytes)
        if self._burst_s:  # a bucket: what has been saved leaves at once
            left_s = max(left_s, last_s)
        elif last_s > first_s:
            left_s = self.free_s = max(left_s, self.end_s(last_s, size.of(stop - 1, stop)))
        self.bytes += n_bytes
        self.packets += 1
        self.frames += frames
        began_s = self.end_s(begin_s, size.frame_bytes) if frames > 1 else left_s
        self.began_s = min(left_s, max(first_s, began_s))
        return left_s

    def spared(self, frames: int) -> int:
        """How many of that many frames pass until chance takes one; all of them if it takes none."""
        if self._until_loss < 0 or self._until_loss >= frames:
            self._until_loss -= frames if self._until_loss >= 0 else 0
            return frames
        passed, self._until_loss = self._until_loss, self._draw()
        self.lost += 1
        return passed

    def _draw(self) -> int:
        """How many frames pass until the next is lost; -1 where none ever is."""
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
        ranks = len(rates_bits_per_s)
        self.framing_bytes = conditions.framing_bytes
        self._conditions, self._per_node = conditions, ranks_per_node
        rates = {**dict(enumerate(rates_bits_per_s)), **dict(conditions.rates)}
        delays = {**dict.fromkeys(range(ranks), conditions.delay_s), **dict(conditions.delays)}
        if ranks_per_node > 1:  # what is far is beyond the nodes' links
            delays = dict.fromkeys(range(ranks), 0.0)
        nodes = range(ranks // ranks_per_node if ranks_per_node > 1 else 0)
        self.up, self.down = (
            [self._line(rates[rank], delays[rank], f"{way}{rank}") for rank in range(ranks)]
            for way in ("up", "down")
        )
        self.node_up, self.node_down = (
            [self._line(node_rate_bits_per_s, conditions.delay_s, f"{way}{node}") for node in nodes]
            for way in ("node up", "node down")
        )
        self._events: list[tuple[float, int, Piece]] = []
        self._order = count()
        everyone = range(ranks)
        self._routes = [[self._route(one, other) for other in everyone] for one in everyone]
        self._last_s: dict[tuple[int, int, int], float] = {}
        self._moving = False  # whether delays ever change, so that packets could overtake others
        self.change(conditions.changes)
        self._moving |= bool(conditions.jitter_s)

    def _line(self, rate_bits_per_s: float, delay_s: float, name: str) -> Line:
        how = self._conditions
        loss = how.loss if name.startswith("up") else 0.0  # drawn once on the way
        chance = random.Random(f"{how.seed} {name}")
        queue = (how.background, how.queue_bytes, chance, how.burst_s, how.jitter_s)
        return Line(rate_bits_per_s, delay_s, loss, *queue)

    def change(self, changes: Sequence[Change], since_s: float = 0.0) -> None:
        """Let links change; of packets, those that come from now on are touched.

        Raises UserError, and changes nothing, for one that comes before an earlier one of the same link.
        """
        pairs = [(line, change) for change in changes for line in self._touched(change)]
        for line, change in pairs:
            if since_s + change.at_s < line.last_change_s:
                known = f"{line.last_change_s - since_s:.6g} s from now is known already"
                raise UserError(f"a change at {change.at_s:g} s, but one {known}: wait for that")
        for line, change in pairs:
            self._moving |= change.delay_s is not None or bool(change.jitter_s)
            line.change(change, since_s)

    def restore(self, at_s: float) -> None:
        """Let all links be as in the beginning from a time on."""
        for line in (*self.up, *self.down, *self.node_up, *self.node_down):
            line.restore(at_s)

    def _touched(self, change: Change) -> Sequence[Line]:
        if change.ranks:
            return [way[rank] for rank in change.ranks for way in (self.up, self.down)]
        return self.node_up + self.node_down or self.up + self.down

    def _route(self, source: int, target: int) -> list[Line]:
        per_node = self._per_node
        if per_node > 1 and source // per_node != target // per_node:
            between = [self.node_up[source // per_node], self.node_down[target // per_node]]
            return [self.up[source], *between, self.down[target]]
        return [self.up[source], self.down[target]]

    def send(self, now_s: float, source: int, target: int, size: Size, load: Any) -> None:
        """A packet leaves a rank: no earlier than any before."""
        line = self.up[source]
        line.at(now_s)
        room = line.fits(now_s, size, 0, size.frames)
        start = 0
        while start < room:
            stop = start + line.spared(room - start)
            if stop > start:
                piece = Piece(load, size, source, target, start, stop)
                piece.route = self._routes[source][target]
                self._carry(piece, now_s, now_s)
            if stop < room:  # the frame that is lost takes its time, too
                line.carry(now_s, now_s, size, stop, stop + 1)
            start = stop + 1

    def _carry(self, piece: Piece, first_s: float, last_s: float) -> None:
        """Let the piece's next link carry it, and note when it will be at the end of that."""
        line = piece.route[piece.hop]
        left_s = line.carry(first_s, last_s, piece.size, piece.start, piece.stop)
        line.at(last_s)
        delay_s = line.delay_s
        due_s = left_s + delay_s
        if self._moving:
            if jitter_s := min(line.jitter_s, delay_s):
                due_s = left_s + delay_s + line.chance.uniform(-jitter_s, jitter_s)
            way = (piece.hop, piece.source, piece.target)
            due_s = self._last_s[way] = max(due_s, self._last_s.get(way, 0.0))
            delay_s = due_s - left_s
        piece.hop += 1
        piece.first_s = line.began_s + delay_s
        heapq.heappush(self._events, (due_s, next(self._order), piece))

    @property
    def next_s(self) -> float:
        """When `take` should be called next; infinite where nothing is under way."""
        return self._events[0][0] if self._events else NEVER_S

    def take(self, now_s: float) -> Iterator[tuple[float, Piece]]:
        """(when it was due, piece) of all that has arrived by now, in order, one by one."""
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, _, piece = heapq.heappop(events)
            if piece.hop == len(piece.route):
                yield at_s, piece
                continue
            line = piece.route[piece.hop]
            piece.stop = line.fits(at_s, piece.size, piece.start, piece.stop)
            if piece.stop > piece.start:
                self._carry(piece, piece.first_s, at_s)
