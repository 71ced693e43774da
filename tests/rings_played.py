"""gloo's ring played out event by event, rank by rank, as its source says: what its law is held against."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

MIB = 2**20


class Played:
    """One half of an all-reduce or more: each rank has ``steps`` segments, two of them under way."""

    def __init__(
        self, ranks: int, steps: int, bytes_s: float, way_s: float, wake_s: float, software_s: float
    ) -> None:
        self.ranks, self.steps, self.bytes_s, self.way_s = ranks, steps, bytes_s, way_s
        self.wake_s, self.software_s = wake_s, software_s
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
        assert self._next == [self.steps] * self.ranks and not self._wanted
        return at_s

    def _at(self, at_s: float, happens: Callable[..., None], rank: int, number: int) -> None:
        heapq.heappush(self._events, (at_s, next(self._count), happens, rank, number))

    def _enter(self, now_s: float, rank: int) -> None:
        while (number := self._next[rank]) < self.steps:
            before = rank, number - 2
            if number >= 2 and not (before in self._got and before in self._gone):
                return
            self._next[rank] += 1
            word_s = max(now_s, self._free_s[rank]) + self.way_s  # in line behind what was sent
            self._at(word_s, self._hear, (rank + 1) % self.ranks, number)
            self._wanted.add((rank, number))
            self._send(now_s, rank, number)

    def _hear(self, now_s: float, rank: int, number: int) -> None:
        self._ready.add((rank, number))
        self._send(now_s, rank, number)

    def _send(self, now_s: float, rank: int, number: int) -> None:
        if (rank, number) in self._wanted & self._ready:
            self._wanted.remove((rank, number))
            left_s = max(now_s, self._free_s[rank]) + self.software_s + self.bytes_s
            self._free_s[rank] = left_s
            self._at(left_s, self._leave, rank, number)
            there_s = left_s + self.way_s + self.wake_s
            self._at(there_s, self._get, (rank - 1) % self.ranks, number)

    def _leave(self, now_s: float, rank: int, number: int) -> None:
        self._gone.add((rank, number))
        self._enter(now_s, rank)

    def _get(self, now_s: float, rank: int, number: int) -> None:
        self._got.add((rank, number))
        self._enter(now_s, rank)


def all_reduce_s(
    ranks: int, n_bytes: float, s_per_byte: float, way_s: float, wake_s: float, software_s: float
) -> float:
    """Seconds of a message, cut as gloo cuts it."""
    cut = math.ceil(max(math.ceil(n_bytes / MIB), 2 * ranks) / ranks)
    bytes_s = n_bytes / (cut * ranks) * s_per_byte
    return 2 * Played(ranks, (ranks - 1) * cut, bytes_s, way_s, wake_s, software_s).end_s()
