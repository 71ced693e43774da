"""All-reduces as their schedules say, of messages between two ranks each.

What a library's own collective hides, this shows: any algorithm of `ddlkit.core.schedule`, on real ranks and
links, by nothing but sends and receives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ddlkit.core.schedule import Schedule, Transfer


class _Part(NamedTuple):
    """One transfer as this rank sees it: with whom, in which step, and the view of the buffer it is about."""

    peer: int
    step: int
    view: torch.Tensor
    reduce: bool


class SteppedAllReduce:
    """One rank's part of an all-reduce of ``buffer``, a flat tensor that is reduced in place.

    Every receive is posted before the first step, so that no message waits for its receiver: what is
    to be added arrives in memory of its own, and a sum can only come once this rank's part is in it.
    Sums are rounded as `Schedule.run` rounds them.
    """

    def __init__(self, schedule: Schedule, rank: int, buffer: torch.Tensor) -> None:
        self._steps: list[tuple[list[_Part], list[_Part]]] = []
        cut = schedule.bounds(buffer.numel()).tolist()

        def part(one: Transfer, peer: int, number: int) -> _Part:
            return _Part(peer, number, buffer[cut[one.start] : cut[one.stop]], one.reduce)

        for number, step in enumerate(schedule.steps):
            sends = [part(one, one.receiver, number) for one in step if one.sender == rank]
            gets = [part(one, one.sender, number) for one in step if one.receiver == rank]
            # A message without elements is not sent: both ends know.
            filled = [[one for one in each if one.view.numel()] for each in (sends, gets)]
            self._steps.append((filled[0], filled[1]))
        self._memory = {
            id(one): torch.empty_like(one.view)
            for _, gets in self._steps
            for one in gets
            if one.reduce
        }

    def __call__(self) -> None:
        """Take part; all ranks must. Returns when this rank has the sum and its sends are done."""
        posted = [[self._receive(one) for one in gets] for _, gets in self._steps]
        for (sends, gets), arriving in zip(self._steps, posted, strict=True):
            leaving = [dist.isend(one.view, one.peer, tag=one.step) for one in sends]
            for work in (*arriving, *leaving):
                if work is not None:
                    work.wait()
            for one in gets:
                if one.reduce:
                    one.view.add_(self._memory[id(one)])

    def _receive(self, one: _Part) -> dist.Work | None:
        place = self._memory.get(id(one), one.view)
        return dist.irecv(place, one.peer, tag=one.step)
