"""How much compute and all-reduces slow each other down.

A network is trained while messages are under way, and both are also timed alone. All
ranks do the same at the same time, as in training, and what is compared is timed in
turn. A run with messages posts so many messages of one size that they outlast an
iteration, and repeats the iteration while they are under way.

The time that DDP takes for its buckets, besides sending them, is measured with a
communication hook that returns at once and sends nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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
LASTING = 1.5
"""The duration of all messages that are sent while a network is trained, as a multiple of
the duration of an iteration without messages."""
PILOT_MESSAGES = 8
"""The most messages of a pilot run, which shows how many messages last long enough."""
PILOT_BYTES = 2**23
"""The most bytes of all messages of a pilot run, unless two messages have more."""
WARMUP = 3
"""Iterations that warm up, because DDP rebuilds its buckets in the second."""
PHASES = ("forward", "backward", "update")
CAP_OF_ONE_BUCKET_MIB = float(2**20)
"""A bucket cap of 1 TiB, above the gradients of any model: they share one bucket."""
CAP_OF_SINGLE_GRADIENTS_MIB = 1e-6
"""A bucket cap of about one byte: every gradient has a bucket of its own."""


class Row(NamedTuple):
    """A row of table ``slowdown``, without the columns that are equal in all rows.

    Attributes
    ----------
    quantity : str
        What is timed.
    beside : str
        What went on at the same time.
    bytes : int
        The bytes of a message or of all buckets; 0 where there are neither.
    messages : int
        The number of messages or buckets; 0 where there are neither.
    seconds : float
        The time on the slowest rank.
    """

    quantity: str
    beside: str
    bytes: int
    messages: int
    seconds: float


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
    """Measure how much messages and the training of a named network slow each other down.

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
        # `Training.wrap` keeps DDP from sending the first weights of rank 0 to the other
        # ranks. The seed makes the first weights of all ranks equal.
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

    For each size of messages, a round times the training alone, the messages alone, and both
    at the same time. A round that other programs disturb is repeated, but not on a GPU, whose
    kernels hardly suffer from what others do on the cores.

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
        The fewest rounds that are yielded, 1 or more. A disturbed round does not count.

    Yields
    ------
    mapping of str to DataFrame
        Rows of table ``slowdown`` of one round, with ``seconds`` of the slowest rank.

    Raises
    ------
    UserError
        If the loss does not call the model itself, so that DDP sees no backward pass.
    """
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
    me.say(
        "training to warm up, and trying how many messages last as long as an iteration"
    )
    compared = _TrainingAndMessages(me, training, sizes)
    retries = Retries.on(me.device.type, me.say)
    begun_s = time.perf_counter()
    pace = clock.Pace()
    repeat = 0
    # Each round needs all ranks, and their clocks differ. So all of them go on until
    # every rank has run out of time.
    while repeat < min_repeats or not agree_all(time.perf_counter() - begun_s >= max_s):
        watch = Watch(me.rank)  # notes how busy the machine is during the round
        round_begun_s = time.perf_counter()
        rows = list(compared.measure_round())
        round_s = time.perf_counter() - round_begun_s
        # If others disturbed the round, `again` pauses and has it repeated, as long as
        # repeats are left.
        if retries.again(usage_of_all(watch.usage())):
            continue
        frame = pd.DataFrame(rows).assign(**labels, repeat=repeat)
        yield {"slowdown": frame}
        repeat += 1
        now_s = time.perf_counter()
        # The fewest rounds are run even if they take longer than `max_s`. Each of those left is
        # expected to take as long as this one.
        left_s = max(begun_s + max_s - now_s, (min_repeats - repeat) * round_s)
        if left_s >= 1 and pace.due():
            me.say(
                f"round {repeat} of slowdowns is done; about {left_s:.0f} s are left"
            )
    # `frame` still has the rows of the last round. Only this round is shown.
    me.say(f"{training.network}: {_backward_in_words(frame)}")


def _backward_in_words(round_rows: pd.DataFrame) -> str:
    """Return in words how long backward takes alone, and while messages are sent.

    ``round_rows`` are the rows of table ``slowdown`` of one round. The times are medians over
    the sizes of messages.
    """
    medians = round_rows.groupby(["quantity", "beside"])["seconds"].median()
    alone = format_seconds(medians["backward", NOTHING])
    with_messages = format_seconds(medians["backward", MESSAGES])
    return f"backward {alone} alone, {with_messages} while messages are sent"


class _TrainingAndMessages:
    """A training and messages, which are timed alone and at the same time.

    Every rank has such an object. All ranks must call the same methods in the same
    order, because the methods send messages and meet at barriers.

    Parameters
    ----------
    me : Rank
        This rank.
    training : Training
        The model in training, which is wrapped in DDP.
    sizes : sequence of int
        Bytes of the messages.

    Attributes
    ----------
    gradient_bytes : int
        Bytes of all gradients.
    ddp : dict of int to DistributedDataParallel
        The training in DDP by the number of its buckets: with one bucket for all
        gradients, and with one bucket for each. Both have equally many bytes, so that
        their difference is the cost of the additional buckets.
    messages : dict of int to (Tensor, int)
        The tensor that is sent, and how many times it is sent, by its size in bytes.
    """

    def __init__(self, me: Rank, training: Training, sizes: Sequence[int]) -> None:
        self.me = me
        self.training = training
        self.gradient_bytes = training.gradient_bytes
        one_bucket = training.wrap(bucket_cap_mb=CAP_OF_ONE_BUCKET_MIB)
        single_gradients = training.wrap(bucket_cap_mb=CAP_OF_SINGLE_GRADIENTS_MIB)
        # A model of a single tensor has only one entry, because both keys are 1.
        self.ddp = {1: one_bucket, len(training.trained()): single_gradients}
        for ddp in self.ddp.values():
            # Only what DDP does besides sending is timed.
            send_nothing(ddp)
            self._warm_up(ddp)
        # How long an iteration without messages takes on the slowest rank, as the sum of its
        # phases. By default `_phases` trains in the DDP of one bucket, and keeps it from
        # filling this bucket. `slowest` takes and returns an array, here of one number.
        alone_s = float(slowest([sum(self._phases())])[0])
        self.messages: dict[int, tuple[torch.Tensor, int]] = {}
        # Each size gets a buffer, and so many messages that some are under way during the
        # whole iteration: they last `LASTING` times as long.
        for size in sizes:
            # An element of float32 has 4 bytes.
            buffer = torch.zeros(size // 4, device=me.device)
            count = self._needed_messages(buffer, size, alone_s)
            self.messages[size] = (buffer, count)

    def _warm_up(self, ddp: DistributedDataParallel) -> None:
        """Train in a DDP until its buckets are rebuilt.

        Raises UserError if the loss does not call the model itself, so that DDP sees no
        backward pass.
        """
        self.training.use(ddp)
        for _ in range(WARMUP):
            self.training.iterate()
        # `Training.wrap` puts the model into a module that notes whether the loss calls
        # the model.
        module_in_ddp: Any = ddp.module
        if not module_in_ddp.called:
            reason = "loss() does not call the model itself, as DDP needs"
            raise UserError(f"{self.training.network}: {reason}")

    def _needed_messages(self, buffer: torch.Tensor, size: int, alone_s: float) -> int:
        """Return how many messages together take `LASTING` times as long as an iteration.

        ``alone_s`` is how long an iteration takes without messages, and ``size`` is the
        size of the buffer in bytes.
        """
        # A pilot run shows how long a message takes while this process trains. It has as
        # many messages as the limits of number and of bytes allow, but at least two, which
        # is a choice and not measured.
        pilot_count = max(2, min(PILOT_MESSAGES, PILOT_BYTES // size))
        # The first of two runs also warms up. The longer one counts: it gives the
        # smaller number of messages, so that a round does not take too long.
        longest_s = 0.0
        for _ in range(2):
            _, messages_s = self._time_both(buffer, pilot_count)
            longest_s = max(longest_s, float(slowest([messages_s])[0]))
        message_s = longest_s / pilot_count
        # At least one message is sent, even if the iteration were to take no time.
        return max(1, math.ceil(LASTING * alone_s / message_s))

    def measure_round(self) -> Iterator[Row]:
        """Yield a row for each quantity that is timed in a round.

        Quantities that are compared are timed one right after the other, so that drift of
        the machine affects both.
        """
        # DDP copies each gradient into its bucket before the bucket is sent. Here all
        # gradients are copied into one buffer, as if they shared one bucket.
        copy_s = self.gradient_bytes * copy_s_per_byte(self.me, self.training.model)
        yield Row("copy", NOTHING, self.gradient_bytes, messages=1, seconds=copy_s)
        phases_alone_s: list[Floats] = []  # each of shape (3,)
        # Each size has three timings: the phases of an iteration (forward, backward and update)
        # alone, messages alone, and then both at the same time. The row of a message has the
        # mean time of all `count` messages, which follow one another.
        for size, (buffer, count) in self.messages.items():
            phases_alone_s.append(self._phases())
            alone_s = slowest([self._time_messages(buffer, count)])[0]
            yield Row("message", NOTHING, size, count, alone_s / count)
            phases_s, messages_s = self._time_both(buffer, count)
            yield from self._phase_rows(MESSAGES, size, count, phases_s)
            with_compute_s = slowest([messages_s])[0]
            yield Row("message", COMPUTE, size, count, with_compute_s / count)
        # The phases alone were timed once for each size of messages, but do not depend
        # on the size. So they have one row with the mean.
        mean_alone_s = np.mean(phases_alone_s, axis=0)
        yield from self._phase_rows(NOTHING, size=0, count=0, seconds=mean_alone_s)
        # Phases in which DDP fills its buckets, with one bucket and with one for each
        # gradient.
        for buckets in self.ddp:
            phases_s = self._phases(buckets, fill_buckets=True)
            yield from self._phase_rows(BUCKETS, self.gradient_bytes, buckets, phases_s)

    def _phase_rows(
        self, at_the_same_time: str, size: int, count: int, seconds: Floats
    ) -> Iterator[Row]:
        """Yield a row for each phase, with the seconds of the slowest rank.

        ``seconds`` are those of this rank, shape (3,). ``at_the_same_time`` says what went
        on besides, such as messages. ``count`` is the number of these messages or of
        buckets, and ``size`` is the bytes of a message or of all buckets.
        """
        for phase, phase_s in zip(PHASES, slowest(seconds), strict=True):
            yield Row(phase, at_the_same_time, size, count, phase_s)

    def _phases(self, buckets: int = 1, fill_buckets: bool = False) -> Floats:
        """Train for an iteration without messages, and return the seconds of its phases.

        The phases are forward, backward and update, shape (3,). ``buckets`` is a key of
        ``ddp``. With ``fill_buckets``, DDP copies gradients into its buckets, but sends
        none. Without ``fill_buckets``, DDP does nothing with the gradients.
        """
        marks = Marks(self.me.device)
        dist.barrier()
        self._iterate(buckets, marks, fill_buckets)
        return np.diff(marks.seconds())

    def _iterate(self, buckets: int, marks: Marks, fill_buckets: bool = False) -> None:
        """Train for an iteration, and add a mark where each phase begins and ends.

        The phases are forward, backward and update. ``buckets``, a key of ``ddp``, is the
        number of buckets. ``fill_buckets`` says whether DDP copies gradients into them. In
        either case DDP sends nothing, because `send_nothing` was called for it.
        """
        ddp = self.training.use(self.ddp[buckets])
        # Within `no_sync`, DDP does not copy gradients into buckets.
        use_of_buckets = nullcontext() if fill_buckets else ddp.no_sync()
        with use_of_buckets:
            self.training.iterate(marks.mark)

    def _time_messages(self, buffer: torch.Tensor, count: int) -> float:
        """Return seconds of messages that are posted at once, without any compute."""
        dist.barrier()
        return _Sending(self.me, buffer, count).seconds()

    def _time_both(self, buffer: torch.Tensor, count: int) -> tuple[Floats, float]:
        """Train while ``count`` messages are under way, and time both.

        Returns
        -------
        phases_s : ndarray, shape (3,)
            Mean seconds of forward, backward and update, of this rank.
        messages_s : float
            Seconds from the first post to the arrival of the last message, of this rank.
        """
        dist.barrier()
        synchronize = clock.synchronizer(self.me.device)
        sending = _Sending(self.me, buffer, count)
        # `_iterate` trains in a DDP that sends nothing. So no rank waits for another within an
        # iteration, and the ranks need not train for equally many iterations.
        iterations: list[Marks] = []
        while not iterations or not sending.done():
            marks = Marks(self.me.device)
            iterations.append(marks)
            # Every DDP here sends nothing. The one with a single bucket has the least other work.
            self._iterate(buckets=1, marks=marks)
            # Without waiting for the GPU, the host would issue many iterations ahead, and
            # most of them would run when the messages have long arrived.
            synchronize()
        # The last message arrived during the last iteration. So a part of this iteration
        # ran without messages, and it counts only if there is no other.
        if len(iterations) > 1:
            iterations.pop()
        phases_s = [np.diff(marks.seconds()) for marks in iterations]
        return np.mean(phases_s, axis=0), sending.seconds()


class _Sending:
    """Messages that follow one another while this process trains.

    On CUDA the messages have a stream of their own, and events say when they begin and
    end. Posting a small message takes as long as sending it. If the training waited for
    the posts, hardly any message would still be under way while it runs. So a separate
    thread posts the messages. gloo's messages are posted at once, and a callback of the
    last one takes the time of its end.

    The threads that post and train take turns at Python's interpreter. So a small
    message on CUDA, which the GPU sends faster than the host posts it, may take longer
    while this process trains although the GPU does not send it more slowly. Messages in
    a replayed CUDA graph would not depend on the host.

    Parameters
    ----------
    me : Rank
        This rank.
    buffer : Tensor
        What is sent.
    count : int
        How many times the buffer is sent.
    while_training : bool or None, optional
        Whether the messages are posted while this process trains. Otherwise the
        constructor waits until all are posted. In both cases they are under way while the
        process trains. By default only the messages on CUDA are posted while it trains,
        because posting them takes as long as sending them.
    """

    def __init__(
        self,
        me: Rank,
        buffer: torch.Tensor,
        count: int,
        while_training: bool | None = None,
    ) -> None:
        self._device = me.device
        # Two marks: when the first message is posted, and when the last one has arrived.
        self._marks = Marks(me.device)
        self._works: list[Any] = []
        # With gloo, `_mark_end` puts a future here, which is complete once the second mark
        # was made. On CUDA it stays None, because the mark can be asked (`Marks.reached`).
        self._end_marked: Any = None
        self._failure: Exception | None = None
        if while_training is None:
            while_training = me.device.type == "cuda"
        # A thread posts the messages, so that this process can train meanwhile. If they are to
        # be posted before, the constructor waits until the thread has posted all.
        self._poster = threading.Thread(target=self._post, args=(buffer, count))
        # As a daemon, a thread whose post hangs does not keep the process from ending.
        self._poster.daemon = True
        self._poster.start()
        if not while_training:
            self._poster.join()

    def _post(self, buffer: torch.Tensor, count: int) -> None:
        """Post all messages. Keep a failure, which the thread that trains then raises."""
        try:
            # On the stream of compute, each message would wait for the kernels before
            # it. The block also sets the device, because each thread has its own
            # current one.
            stream: Any = nullcontext()
            if self._device.type == "cuda":
                stream = torch.cuda.stream(torch.cuda.Stream(self._device))
            with stream:
                self._marks.mark()
                for _ in range(count):
                    self._works.append(dist.all_reduce(buffer, async_op=True))
                self._mark_end()
        except Exception as error:
            self._failure = error

    def _mark_end(self) -> None:
        """Let the last message add a mark when it ends."""
        # gloo calls back when a message has arrived. `_end_marked` is a future that is
        # complete once the callback has added the mark.
        if self._device.type != "cuda":
            last_message = self._works[-1].get_future()
            self._end_marked = last_message.then(lambda _: self._marks.mark())
            return
        # On CUDA `wait` holds up the stream and not the host. So the mark that follows in
        # the stream is reached when the last message has arrived.
        for work in self._works:
            work.wait()
        self._marks.mark()

    def done(self) -> bool:
        """Return whether the last message has arrived, or could not be posted."""
        # While the thread is alive, it still posts messages.
        if self._poster.is_alive():
            return False
        # If a message could not be posted, there is no last arrival to wait for.
        if self._failure:
            return True
        # On CUDA the last mark is an event, which the GPU reaches when the last message has
        # arrived.
        if self._device.type == "cuda":
            return self._marks.reached()
        # gloo makes the last mark only at the arrival, and then completes this future.
        return bool(self._end_marked.done())

    def seconds(self) -> float:
        """Wait for the last arrival, and return the seconds since the first post."""
        self._poster.join()
        if self._failure:
            raise self._failure
        # With gloo this thread waits. On CUDA only the stream waits, and the marks below
        # wait for the GPU.
        for work in self._works:
            work.wait()
        if self._device.type != "cuda":
            # A message may be complete a moment before its callback has run.
            self._end_marked.wait()
        # The seconds of the marks count from the first one, and the last is the arrival.
        return float(self._marks.seconds()[-1])


def send_nothing(ddp: DistributedDataParallel) -> None:
    """Have DDP fill its buckets, but send none of them.

    Parameters
    ----------
    ddp : DistributedDataParallel
        A wrapped model, whose gradients are then not averaged over ranks.
    """
    # DDP calls the hook in place of its own all-reduce, and goes on when the future that
    # the hook returns is complete. The hook is a lambda, because torch refuses a function
    # whose annotations are texts, as all annotations are in this module.
    ddp.register_comm_hook(None, lambda _, bucket: _completed_future(bucket.buffer()))


def _completed_future(buffer: torch.Tensor) -> Any:
    """Return a future that holds the buffer of a bucket already."""
    # A future that holds CUDA tensors must be made with their devices.
    devices: list[Any] | None = [buffer.device] if buffer.is_cuda else None
    future: Any = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
