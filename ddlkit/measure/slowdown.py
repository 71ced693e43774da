"""How much compute and all-reduces slow each other down.

A network is trained while messages are under way, and both are also timed alone. All
ranks do the same at the same time, as in training, and what is compared is timed in
turn. A run with messages posts so many messages of one size that they outlast an
iteration, and repeats the iteration while they are under way.

The time that DDP takes for its buckets, besides sending them, is measured with a
communication hook that answers at once, so that nobody sends the buckets.
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
AS_LONG = 1.5
"""How long messages last that are sent while a network computes, over an iteration alone."""
FIRST = 8
FIRST_BYTES = 2**23
"""A first batch of messages says how many are needed. It has `FIRST` messages, or fewer
if these have more than `FIRST_BYTES` together, but at least two."""
WARMUP = 3
"""Iterations that warm up, because DDP rebuilds its buckets in the second."""
PHASES = ("forward", "backward", "update")
ONE_BUCKET = float(2**20)
A_BUCKET_EACH = 1e-6
"""Bucket caps in MiB: all gradients in one bucket, and a bucket for each gradient."""

Row = tuple[str, str, int, int, float]
"""Quantity, what went on at the time, bytes, number of messages or buckets, seconds."""


@dataclass(frozen=True)
class SlowdownSettings:
    """The settings of the job.

    Attributes
    ----------
    network, batch : str, int
        The name of the network and its batch size.
    sizes : sequence of int
        Bytes of the messages that are sent while it is trained.
    max_s : float
        Seconds after which no round starts, once there are ``min_repeats`` rounds.
    min_repeats : int
        The fewest rounds.

    Raises
    ------
    UserError
        If there is no size, or one below 4 bytes.
    """

    network: str
    batch: int
    sizes: Sequence[int]
    max_s: float = 10.0
    min_repeats: int = 5

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 4:
            raise UserError(
                f"sizes {list(self.sizes)}: give at least one, all of 4 bytes or more"
            )


@job(SlowdownSettings, "slowdown")
def slowdown_job(me: Rank, settings: SlowdownSettings) -> Iterator[Tables]:
    """Measure the slowdowns of a network that is known by name.

    Parameters
    ----------
    me : Rank
        This rank.
    settings : SlowdownSettings
        The network and the messages.

    Yields
    ------
    mapping of str to DataFrame
        Rows of table ``slowdown`` of one round, as `slowdown_rounds` yields them.
    """
    name = settings.network
    with compute_on(f"{name} beside all-reduces", me.device, PRECISION):
        torch.manual_seed(0)
        training = known(name, settings.batch, me.device, PRECISION)
        yield from slowdown_rounds(
            me,
            training,
            sizes=settings.sizes,
            max_s=settings.max_s,
            min_repeats=settings.min_repeats,
        )


def slowdown_rounds(
    me: Rank, training: Training, sizes: Sequence[int], max_s: float, min_repeats: int
) -> Iterator[Tables]:
    """Measure how much a training and messages slow each other down, round by round.

    A disturbed round is repeated.

    Parameters
    ----------
    me : Rank
        This rank.
    training : Training
        The model in training, which is wrapped in DDP.
    sizes : sequence of int
        Bytes of the messages.
    max_s : float
        Seconds after which no round starts, once there are ``min_repeats`` rounds.
    min_repeats : int
        The fewest rounds.

    Yields
    ------
    mapping of str to DataFrame
        Rows of table ``slowdown`` of one round, with ``seconds`` of the slowest rank.

    Raises
    ------
    UserError
        If the loss does not call the model itself, so that DDP sees no backward pass.
    """
    columns = ["quantity", "beside", "bytes", "messages", "seconds"]  # as in `Row`
    labels = {
        "network": training.network,
        "batch": training.batch,
        "precision": training.precision,
        "device": me.device.type,
        "backend": me.backend,
        "link": me.link,
        "link_bits_per_s": me.link_bits_per_s,
        "ranks": me.world_size,
    }
    pair = _Pair(me, training, sizes)
    retries = Retries()
    begun_s = time.perf_counter()
    repeat = 0
    # The clocks of ranks differ. All go on until all have run out of time, because each
    # round needs all of them.
    while repeat < min_repeats or not agree_all(time.perf_counter() - begun_s >= max_s):
        watch = Watch(me.rank)
        rows = list(pair.round())
        if retries.again(usage_of_all(watch.usage())):
            continue
        frame = pd.DataFrame(rows, columns=columns).assign(**labels, repeat=repeat)
        yield {"slowdown": frame}
        repeat += 1
    medians = frame.groupby(["quantity", "beside"])["seconds"].median()
    alone = format_seconds(medians["backward", NOTHING])
    beside = format_seconds(medians["backward", MESSAGES])
    me.say(
        f"{training.network}: backward {alone} alone, {beside} while messages are sent"
    )


class _Pair:
    """A training and messages on this rank. All ranks must call the same methods.

    Attributes
    ----------
    ddp : dict of int to DistributedDataParallel
        The training in DDP, by the number of its buckets: one, and one for each
        gradient.
    messages : dict of int to (Tensor, int)
        What is sent, and how many times, by size in bytes.
    """

    def __init__(self, me: Rank, training: Training, sizes: Sequence[int]) -> None:
        self.me = me
        self.training = training
        self.bytes = training.gradient_bytes
        self.ddp = {
            1: training.wrap(bucket_cap_mb=ONE_BUCKET),
            len(training.trained()): training.wrap(bucket_cap_mb=A_BUCKET_EACH),
        }
        for ddp in self.ddp.values():
            ddp.register_comm_hook(
                None, lambda _, bucket: completed_future(bucket.buffer())
            )
            training.use(ddp)
            for _ in range(WARMUP):
                training.iterate()
            inside: Any = ddp.module
            if not inside.called:
                reason = "loss() does not call the model itself, as DDP needs"
                raise UserError(f"{training.network}: {reason}")
        alone_s = float(slowest([sum(self._phases())])[0])
        self.messages: dict[int, tuple[torch.Tensor, int]] = {}
        for size in sizes:
            buffer = torch.zeros(size // 4, device=me.device)
            count = self._needed(buffer, size, alone_s)
            self.messages[size] = (buffer, count)

    def _needed(self, buffer: torch.Tensor, size: int, alone_s: float) -> int:
        """Return how many messages last for `AS_LONG` times an iteration."""
        first_count = max(2, min(FIRST, FIRST_BYTES // size))
        # The first try also warms up, so the longer of two is taken.
        longest_s = 0.0
        for _ in range(2):
            _, messages_s = self._together(buffer, first_count)
            longest_s = max(longest_s, float(slowest([messages_s])[0]))
        return max(1, math.ceil(AS_LONG * alone_s * first_count / longest_s))

    def round(self) -> Iterator[Row]:
        """Yield a row for each quantity that is timed in a round."""
        alone: list[Floats] = []
        copy_s = self.bytes * copy_s_per_byte(self.me, self.training.model)
        yield "copy", NOTHING, self.bytes, 1, copy_s
        for size, (buffer, count) in self.messages.items():
            alone.append(self._phases())
            sent_s = slowest([self._sent_s(buffer, count)])[0]
            yield "message", NOTHING, size, count, sent_s / count
            phases, messages_s = self._together(buffer, count)
            yield from self._phase_rows(MESSAGES, size, count, phases)
            beside_s = slowest([messages_s])[0]
            yield "message", COMPUTE, size, count, beside_s / count
        yield from self._phase_rows(NOTHING, 0, 0, np.mean(alone, axis=0))
        for buckets in self.ddp:
            phases = self._phases(buckets, send=True)
            yield from self._phase_rows(BUCKETS, self.bytes, buckets, phases)

    def _phase_rows(
        self, beside: str, size: int, count: int, seconds: Floats
    ) -> Iterator[Row]:
        for phase, phase_s in zip(PHASES, slowest(seconds), strict=True):
            yield phase, beside, size, count, phase_s

    def _phases(self, buckets: int = 1, send: bool = False) -> Floats:
        """Return seconds of forward, backward and update in an iteration, shape (3,).

        With ``send`` DDP fills its buckets and calls the hook. Without ``send`` DDP does
        nothing.
        """
        marks = Marks(self.me.device)
        dist.barrier()
        self._iterate(buckets, marks, send)
        return np.diff(marks.seconds())

    def _iterate(self, buckets: int, marks: Marks, send: bool = False) -> None:
        ddp = self.training.use(self.ddp[buckets])
        exchange = nullcontext() if send else ddp.no_sync()
        with exchange:
            self.training.iterate(marks.mark)

    def _sent_s(self, buffer: torch.Tensor, count: int) -> float:
        """Return seconds of messages that are posted at once, without any compute."""
        dist.barrier()
        return _Sending(self.me, buffer, count).seconds()

    def _together(self, buffer: torch.Tensor, count: int) -> tuple[Floats, float]:
        """Train while messages are under way, and time both.

        Returns
        -------
        phases_s : ndarray, shape (3,)
            Mean seconds of forward, backward and update.
        messages_s : float
            Seconds from the first post to the arrival of the last message.
        """
        dist.barrier()
        synchronize = clock.synchronizer(self.me.device)
        sending = _Sending(self.me, buffer, count)
        iterations: list[Marks] = []
        while not iterations or not sending.done():
            marks = Marks(self.me.device)
            iterations.append(marks)
            self._iterate(buckets=1, marks=marks)
            synchronize()
        # The last iteration ran partly after the messages. It counts only if there is
        # no other.
        if len(iterations) > 1:
            iterations.pop()
        phases = [np.diff(marks.seconds()) for marks in iterations]
        return np.mean(phases, axis=0), sending.seconds()


class _Sending:
    """Messages that are posted at once.

    On CUDA they have a stream of their own, and events say when they begin and end.
    With gloo a callback of the last message takes the time of its end.
    """

    def __init__(self, me: Rank, buffer: torch.Tensor, count: int) -> None:
        self._marks = Marks(me.device)
        self._ended_on_gpu: torch.cuda.Event | None = None
        on_gpu = me.device.type == "cuda"
        stream: Any = nullcontext()
        if on_gpu:
            stream = torch.cuda.stream(torch.cuda.Stream(me.device))
        with stream:
            self._marks.mark()
            self._works = [dist.all_reduce(buffer, async_op=True) for _ in range(count)]
            if on_gpu:
                for work in self._works:
                    work.wait()  # this holds up the stream, not the host
                self._marks.mark()
                self._ended_on_gpu = torch.cuda.Event()
                self._ended_on_gpu.record()
            else:
                last_message = self._works[-1].get_future()
                self._end_marked = last_message.then(lambda _: self._marks.mark())

    def done(self) -> bool:
        """Return whether the last message has arrived."""
        if self._ended_on_gpu:
            return self._ended_on_gpu.query()
        return self._end_marked.done()

    def seconds(self) -> float:
        """Wait for the last arrival, and return the seconds since the first post."""
        for work in self._works:
            work.wait()
        if not self._ended_on_gpu:
            # A message may be complete a moment before its callback has run.
            self._end_marked.wait()
        return float(self._marks.seconds()[-1])


def completed_future(buffer: torch.Tensor) -> Any:
    """Return the result of a communication hook that sends nothing.

    Parameters
    ----------
    buffer : Tensor
        The bucket's buffer.

    Returns
    -------
    torch.futures.Future
        A future that holds the buffer already.
    """
    # A future of CUDA tensors has to know their devices.
    devices: list[Any] | None = [buffer.device] if buffer.is_cuda else None
    future: Any = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
