"""What compute and all-reduces take from each other: a network beside messages, each alone, and DDP's part.

All ranks do the same at once, as in training, and what is compared is timed in turn. So many messages of one
size are posted that they outlast an iteration, which is done again and again while they are under way. What
DDP's buckets take is timed where nobody sends them: a hook answers at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Marks
from ddlkit.jobs.rank import Floats, Rank, Tables, agree_all, job, slowest, usage_of_all
from ddlkit.jobs.vitals import Retries, Watch
from ddlkit.measure.given import Training, known
from ddlkit.measure.layers import compute_on
from ddlkit.measure.training import copy_s_per_byte
from ddlkit.model.contention import BUCKETS, COMPUTE, MESSAGES, NOTHING

PRECISION = "fp32"
AS_LONG = 1.5  # how long messages last beside compute, over an iteration by itself
FIRST, FIRST_BYTES = (
    8,
    2**23,
)  # messages, or bytes in at least two, which tell how many are needed
WARMUP = 3  # iterations: DDP makes its buckets anew in the second
PHASES = ("forward", "backward", "update")
ONE_BUCKET, A_BUCKET_EACH = float(2**20), 1e-6  # caps, in MiB
Row = tuple[str, str, int, int, float]
"""quantity, what it was timed beside, bytes and number of messages or buckets, seconds"""


@dataclass(frozen=True)
class SlowdownSettings:
    """A network at a batch beside messages of these sizes; after ``max_s`` only missing rounds start."""

    network: str
    batch: int
    sizes: Sequence[int]
    max_s: float = 10.0
    min_repeats: int = 5

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 4:
            raise UserError(f"sizes {list(self.sizes)}: messages of at least 4 bytes")


@job(SlowdownSettings, "slowdown")
def slowdown_job(me: Rank, settings: SlowdownSettings) -> Iterator[Tables]:
    """Yield `slowed` of a network of the registry."""
    name = settings.network
    with compute_on(f"{name} beside all-reduces", me.device, PRECISION):
        torch.manual_seed(0)
        training = known(name, settings.batch, me.device, PRECISION)
        yield from slowed(
            me, training, settings.sizes, settings.max_s, settings.min_repeats
        )


def slowed(
    me: Rank, training: Training, sizes: Sequence[int], max_s: float, min_repeats: int
) -> Iterator[Tables]:
    """Yield rows round by round, ``seconds`` of the slowest rank; a disturbed round is made again."""
    names = ["quantity", "beside", "bytes", "messages", "seconds"]
    place = {
        "link": me.link,
        "link_bits_per_s": me.link_bits_per_s,
        "ranks": me.world_size,
    }
    labels = {"network": training.network, "batch": training.batch}
    labels |= {
        "precision": training.precision,
        "device": me.device.type,
        "backend": me.backend,
    }
    pair, retries = _Pair(me, training, sizes), Retries()
    begun_s, repeat = time.perf_counter(), 0
    while repeat < min_repeats or not agree_all(time.perf_counter() - begun_s >= max_s):
        watch = Watch(me.rank)
        rows = [*pair.round()]
        if retries.again(usage_of_all(watch.usage())):
            continue
        frame = pd.DataFrame(rows, columns=names).assign(
            **labels, **place, repeat=repeat
        )
        yield {"slowdown": frame}
        repeat += 1
    medians = frame.groupby(["quantity", "beside"])["seconds"].median()
    alone, beside = (
        format_seconds(medians["backward", what]) for what in (NOTHING, MESSAGES)
    )
    me.say(f"{training.network}: backward {alone} alone, {beside} beside messages")


class _Pair:
    """A training and messages on this rank; every rank must call every method alike."""

    def __init__(self, me: Rank, training: Training, sizes: Sequence[int]) -> None:
        self.me, self.training = me, training
        self.bytes = training.gradient_bytes
        caps = {1: ONE_BUCKET, len(training.trained()): A_BUCKET_EACH}
        self.ddp = {n: training.wrap(bucket_cap_mb=cap) for n, cap in caps.items()}
        for ddp in self.ddp.values():
            ddp.register_comm_hook(None, lambda _, bucket: answered(bucket.buffer()))
            training.use(ddp)
            for _ in range(WARMUP):
                training.iterate()
            inside: Any = ddp.module
            if not inside.called:
                needed = "loss() does not call the model itself, as DDP needs"
                raise UserError(f"{training.network}: {needed}")
        self.buffers: dict[int, tuple[torch.Tensor, int]] = {}
        alone_s = float(slowest([sum(self._phases())])[0])
        for size in sizes:
            buffer = torch.zeros(size // 4, device=me.device)
            few = max(2, min(FIRST, FIRST_BYTES // size))
            beside_s = max(
                float(slowest([self._together(buffer, few)[1]])[0]) for _ in range(2)
            )
            self.buffers[size] = (
                buffer,
                max(1, math.ceil(AS_LONG * alone_s * few / beside_s)),
            )

    def round(self) -> Iterator[Row]:
        """Yield a row for each thing that is timed; of compute alone the mean."""
        alone: list[Floats] = []
        copied_s = self.bytes * copy_s_per_byte(self.me, self.training.model)
        yield "copy", NOTHING, self.bytes, 1, copied_s
        for size, (buffer, count) in self.buffers.items():
            alone.append(self._phases())
            message_s = slowest([self._sent_s(buffer, count)])[0] / count
            yield "message", NOTHING, size, count, message_s
            phases, beside_s = self._together(buffer, count)
            yield from self._rows(MESSAGES, size, count, phases)
            yield "message", COMPUTE, size, count, slowest([beside_s])[0] / count
        yield from self._rows(NOTHING, 0, 0, np.mean(alone, axis=0))
        for count in self.ddp:
            yield from self._rows(
                BUCKETS, self.bytes, count, self._phases(count, send=True)
            )

    def _rows(
        self, beside: str, size: int, count: int, seconds: Floats
    ) -> Iterator[Row]:
        for phase, phase_s in zip(PHASES, slowest(seconds), strict=True):
            yield phase, beside, size, count, phase_s

    def _phases(self, buckets: int = 1, send: bool = False) -> Floats:
        """Return seconds of forward, backward and update; with ``send`` gradients fill buckets."""
        marks = Marks(self.me.device)
        dist.barrier()
        self._iterate(buckets, marks, send)
        return np.diff(marks.seconds())

    def _iterate(self, buckets: int, marks: Marks, send: bool = False) -> None:
        ddp = self.training.use(self.ddp[buckets])
        with nullcontext() if send else ddp.no_sync():
            self.training.iterate(marks.mark)

    def _sent_s(self, buffer: torch.Tensor, count: int) -> float:
        """Return seconds of so many messages posted at once, with nothing beside them."""
        dist.barrier()
        return _Sending(self.me, buffer, count).seconds()

    def _together(self, buffer: torch.Tensor, count: int) -> tuple[Floats, float]:
        """Return mean seconds of the phases of iterations beside messages, and those of all messages."""
        dist.barrier()
        sending, marks = _Sending(self.me, buffer, count), list[Marks]()
        while not marks or not sending.done():
            marks.append(Marks(self.me.device))
            self._iterate(1, marks[-1])
            clock.synchronizer(self.me.device)()
        # The last one was beside messages in part only.
        whole = marks[: max(1, len(marks) - 1)]
        return np.mean(
            [np.diff(each.seconds()) for each in whole], axis=0
        ), sending.seconds()


class _Sending:
    """Messages posted at once: on CUDA in a stream of their own, timed by events; else by a callback."""

    def __init__(self, me: Rank, buffer: torch.Tensor, count: int) -> None:
        self._marks, self._ended = Marks(me.device), None
        stream: Any = nullcontext()
        if me.device.type == "cuda":
            stream = torch.cuda.stream(torch.cuda.Stream(me.device))
        with stream:
            self._marks.mark()
            self._works = [dist.all_reduce(buffer, async_op=True) for _ in range(count)]
            if me.device.type == "cuda":
                for work in self._works:
                    work.wait()  # holds up the stream, not the host
                self._marks.mark()
                self._ended = torch.cuda.Event()
                self._ended.record()
            else:
                self._last = (
                    self._works[-1].get_future().then(lambda _: self._marks.mark())
                )

    def done(self) -> bool:
        """Return whether the last one has arrived."""
        return self._ended.query() if self._ended else self._last.done()

    def seconds(self) -> float:
        """Return seconds from the first post to the last arrival, once that is there."""
        for work in self._works:
            work.wait()
        if not self._ended:
            self._last.wait()
        return float(self._marks.seconds()[-1])


def answered(buffer: torch.Tensor) -> Any:
    """Return the future of a bucket that nobody sends: it is there at once."""
    future: Any = torch.futures.Future(
        devices=[buffer.device] if buffer.is_cuda else None
    )
    future.set_result(buffer)
    return future
