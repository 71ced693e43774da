"""Copies between host and GPU beside a computation: a neighbour that takes bandwidth, and no multiprocessor.

A GPU has engines that do nothing but copy, one each way; a program uses them by copying to and from pinned
memory in streams of its own. What a computation loses beside them is what a communication kernel would
still cost if it occupied nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ddlkit.core.units import MIB
from ddlkit.run.instruments.clock import Budget, Floats, Marks, measure_on, timed
from ddlkit.run.measure.standin import Compute, GpuStandIn, Passage, Traffic

DIRECTIONS = ("h2d", "d2h")
WAYS = (*DIRECTIONS, "both")

CHUNK_BYTES = 16 * MIB  # a quarter of a millisecond at 64 GB/s: starting a copy does not count
# How long copies last, as nobody can stop them: over the computation's time, and at least, so that a host
# that is away for a moment does not come too late.
AS_LONG, LEAST_S = 4.0, 0.05
HOLD_CYCLES = 2_000_000  # of the GPU, 1 ms: until the host has given it the computation
_FEW = Budget(warmup=1, min_repeats=3, max_repeats=3)


class CopyEngine:
    """Copies that outlast a computation, on a GPU and in a stream of its own for each direction.

    How many these must be follows from the time of one, and from those of what was last computed, alone
    and beside any. Where that is held up they end too early, which a second chance may mend.
    """

    least_s = GpuStandIn.least_s
    least_overlap, most_extra_s = GpuStandIn.least_overlap, GpuStandIn.most_extra_s
    chances = 3

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        self._streams = {way: torch.cuda.Stream(device) for way in DIRECTIONS}
        self._ends = {}  # (target, source) of each direction
        for way in DIRECTIONS:
            host = torch.zeros(chunk_bytes, dtype=torch.uint8, pin_memory=True)
            there = host.to(device)
            self._ends[way] = (there, host) if way == "h2d" else (host, there)
        self._alone = self._last = timed(self.idle, device)()
        copies = (functools.partial(self._copy, way) for way in DIRECTIONS)
        self._copy_s = min(float(measure_on(device, copy, _FEW).min()) for copy in copies)

    def columns(self, way: str) -> dict[str, Any]:
        """Which way is copied, as columns of table ``contention``: no multiprocessor is taken."""
        return {"communication": f"copy_engine_{way}"}

    def idle(self) -> None:
        """Compute nothing for about two milliseconds."""
        torch.cuda._sleep(2 * HOLD_CYCLES)

    def beside(self, way: str | None, compute: Compute) -> Passage:
        """Start to copy one of WAYS, then compute; None: compute alone.

        As with `GpuStandIn.beside`, nothing waits here for what is computed, and ``compute`` must have run
        before. Each direction counts as a block; bytes flow evenly while a copy lasts.
        """
        here = torch.cuda.current_stream(self._device)
        directions = [one for one in DIRECTIONS if way in (one, "both")]
        computing_s = max(float(marks.seconds()[-1]) for marks in (self._alone, self._last))
        copying_s = max(LEAST_S, AS_LONG * computing_s)
        count = 1 + math.ceil(copying_s / self._copy_s)
        line, inside = Marks(self._device), Marks(self._device)
        line.mark()
        for one in directions:
            self._streams[one].wait_stream(here)
        for one in directions:
            with torch.cuda.stream(self._streams[one]):
                line.mark()
                for number in range(count):
                    self._copy(one)
                    line.mark()
                    if number == 0:
                        here.wait_stream(self._streams[one])
        torch.cuda._sleep(HOLD_CYCLES)
        line.mark()
        inside.mark()
        compute()
        inside.mark()
        line.mark()
        self._last = inside
        if way is None:
            self._alone = inside
        return Passage(inside, lambda: flow(line.seconds(), len(directions), self._chunk_bytes))

    def _copy(self, way: str) -> None:
        target, source = self._ends[way]
        target.copy_(source, non_blocking=True)


def flow(seconds: Floats, directions: int, chunk_bytes: int) -> Traffic:
    """What was copied while a computation ran.

    seconds : from any moment on, of that moment itself; for each direction, of the copies' beginning and
        of each one's end; of the computation's beginning and end
    """
    opened_s, closed_s = map(float, seconds[-2:])
    lines: Sequence[Floats] = np.split(seconds[1:-2], directions) if directions else []
    window = np.array([opened_s, closed_s])
    sent = [np.ptp(np.interp(window, line, np.arange(len(line)))) for line in lines]
    begins_s, ends_s = (tuple(float(line[at]) for line in lines) for at in (0, -1))
    return Traffic(begins_s, ends_s, opened_s, closed_s, float(sum(sent)) * chunk_bytes)
