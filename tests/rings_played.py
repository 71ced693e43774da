"""gloo's ring played out event by event, rank by rank, as its source says: what its law is held against."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

MIB = 2**20


class Played:
    """Some all-reduces of equal messages, or their halves: each of them ``segments``, two under way.

    wakes_s : from the arrival of a segment until its receiver goes on, drawn for each
    in_line : whether word that a rank is ready stands behind the bytes that it sends, or passes them
    """

    def __init__(
        self,
        ranks: int,
        segments: int,
        bytes_s: float,
        way_s: float,
        wakes_s: Callable[[], float],
        *,
        halves: int = 2,
        in_line: bool = True,
    ) -> None:
        self.ranks, self.segments, self.halves = ranks, segments, halves
        self.bytes_s, self.way_s, self.wakes_s, self.in_line = bytes_s, way_s, wakes_s, in_line
        self._events: list[tuple[float, int, Callable[..., None], int, int]] = []
        self._count = itertools.count()
        self._free_s = [0.0] * ranks
        self._next = [0] * ranks
        self._got: set[tuple[int, int]] = set()
        self._gone: set[tuple[int, int]] = set()
        self._ready: set[tuple[int, int]] = set()
        self._wanted: set[tuple[int, int]] = set()

    def end_s(self) -> float:
        for rank in range(self.ranks):
            self._enter(0.0, rank)
        at_s = 0.0
        while self._events:
            at_s, _, happens, rank, number = heapq.heappop(self._events)
            happens(at_s, rank, number)
        assert self._next == [self.halves * self.segments] * self.ranks and not self._wanted
        return at_s

    def _at(self, at_s: float, happens: Callable[..., None], rank: int, number: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._count), happens, rank, number))

    def _before(self, number: int) -> range:
        """What must be done: the segment but one before, or at the beginning of a half all."""
        begun = number // self.segments * self.segments
        if number >= begun + 2:
            return range(number - 2, number - 1)
        return range(max(0, begun - 2), begun)

    def _enter(self, now_s: float, rank: int) -> None:
        while (number := self._next[rank]) < self.halves * self.segments:
            before = [(rank, one) for one in self._before(number)]
            if not (self._got.issuperset(before) and self._gone.issuperset(before)):
                return
            self._next[rank] += 1
            word_s = max(now_s, self._free_s[rank] if self.in_line else 0.0) + self.way_s
            self._at(word_s, self._hear, (rank + 1) % self.ranks, number)
            self._wanted.add((rank, number))
            self._send(now_s, rank, number)

    def _hear(self, now_s: float, rank: int, number: int) -> None:
        self._ready.add((rank, number))
        self._send(now_s, rank, number)

    def _send(self, now_s: float, rank: int, number: int) -> None:
        if (rank, number) in self._wanted & self._ready:
            self._wanted.remove((rank, number))
            left_s = max(now_s, self._free_s[rank]) + self.bytes_s
            self._free_s[rank] = left_s
            self._at(left_s, self._leave, rank, number)
            there_s = left_s + self.way_s + self.wakes_s()
            self._at(there_s, self._get, (rank - 1) % self.ranks, number)

    def _leave(self, now_s: float, rank: int, number: int) -> None:
        self._gone.add((rank, number))
        self._enter(now_s, rank)

    def _get(self, now_s: float, rank: int, number: int) -> None:
        self._got.add((rank, number))
        self._enter(now_s, rank)


def cut(ranks: int, n_bytes: float) -> int:
    """Segments of a half of a message's all-reduce, as gloo makes them."""
    return (ranks - 1) * math.ceil(max(math.ceil(n_bytes / MIB), 2 * ranks) / ranks)


def all_reduce_s(
    ranks: int,
    n_bytes: float,
    s_per_byte: float,
    way_s: float,
    wakes_s: Callable[[], float],
    *,
    messages: int = 1,
    in_line: bool = True,
) -> float:
    """Seconds of each of several messages in a row."""
    segments = cut(ranks, n_bytes)
    bytes_s = n_bytes * s_per_byte * (ranks - 1) / ranks / segments
    halves = 2 * messages
    played = Played(ranks, segments, bytes_s, way_s, wakes_s, halves=halves, in_line=in_line)
    return played.end_s() / messages
