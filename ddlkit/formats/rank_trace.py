"""What one rank of data-parallel training did: its work, its messages and its copies.

DistributedDataParallel (DDP) divides an iteration by what happens on the thread that
computes. The rank reads its input, runs forward, and runs backward, during which it posts
one message for each bucket of gradients. When the last gradient is ready, the rank waits
for its messages in their order, and copies each bucket back into the gradients. Then
follows the update.

A message is *posted* where the computing thread hands it over: by ``c10d::allreduce_``
and the like with gloo, or by the launch of its kernel with NCCL. With gloo the span of
the message itself begins only when a worker thread takes it. On a GPU a message can start
when the kernels that were launched before it are done.

All instants are by the clock of the rank, in seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.formats.kineto import (
    ACCUMULATE,
    EVALUATE,
    Event,
    KinetoTrace,
    TracedIteration,
    iterations,
)

GLOO_THREADS = 2
"""How many messages gloo of PyTorch sends at once, each by a thread of its own."""

# How the operators begin that post messages, with the collective that each one posts.
_POSTS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_": "alltoall",
    "c10d::alltoall_base_": "alltoall",
    "c10d::send": "sendrecv",
    "c10d::recv_": "sendrecv",
    "c10d::barrier": "barrier",
}
_SHARDED = ("all_gather", "reduce_scatter")
_COPY_BACK = "copy_bucket_to_grad"
_COPY_INTO = "reducer::mul_out"


class Message(NamedTuple):
    """A message of a rank.

    Attributes
    ----------
    collective : str
        Which collective, such as "all_reduce".
    n_bytes : int
        Its size in bytes, 0 if that is unknown.
    group, sequence : str and int
        The process group and the number of the message within it. They are "" and -1
        where the trace does not have them, as with gloo.
    posted_s : float
        When this rank was ready for the message.
    started_s : float
        When the message could start on this rank. It is later than ``posted_s`` if as
        many messages as possible were under way.
    ended_s : float
        When the message had ended on this rank.
    in_backward : bool
        Whether the rank posted it during backward. It then waits for the message at the
        end of backward, and otherwise at once.
    """

    collective: str
    n_bytes: int
    group: str
    sequence: int
    posted_s: float
    started_s: float
    ended_s: float
    in_backward: bool

    @property
    def duration_s(self) -> float:
        """Return how long the message took on this rank, with its wait for others."""
        return self.ended_s - self.started_s


class Gradient(NamedTuple):
    """When a gradient was ready, and its size in bytes."""

    ready_s: float
    n_bytes: int


class Operator(NamedTuple):
    """An operator of backward, or a kernel of it.

    Attributes
    ----------
    alike : int
        A number that operators share if they compute the same from the same shapes.
    start_s, end_s : float
        When the operator ran.
    """

    alike: int
    start_s: float
    end_s: float


class Copy(NamedTuple):
    """When a gradient was copied into or out of its bucket, and its elements."""

    start_s: float
    end_s: float
    elements: int


@dataclass(frozen=True)
class RankIteration:
    """What a rank did in one iteration.

    Attributes
    ----------
    number : int
        Which step of the trace this is, counted from 0.
    start_s, input_end_s, forward_end_s, backward_end_s, end_s : float
        When the phases end. Backward ends when the last gradient is computed; the wait
        for messages follows. The iteration ends when the next one starts.
    messages : tuple of Message
        In the order in which they were posted.
    copies_into, copies_back : tuple of Copy
        The copies of gradients into buckets, and of buckets into gradients.
    gradients : tuple of Gradient
        In the order in which they became ready.
    operators : tuple of Operator
        The operators of backward.
    """

    number: int
    start_s: float
    input_end_s: float
    forward_end_s: float
    backward_end_s: float
    end_s: float
    messages: tuple[Message, ...]
    copies_into: tuple[Copy, ...] = ()
    copies_back: tuple[Copy, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    operators: tuple[Operator, ...] = ()


@dataclass(frozen=True)
class RankTrace:
    """What a rank did in all iterations of its trace.

    Attributes
    ----------
    source : str
        The file, as errors name it.
    rank : int
        The number of the rank.
    ranks : int
        How many ranks the training had, 0 if the trace does not say.
    device : str
        "cpu", or the name of the GPU.
    in_flight : int
        How many messages can be under way at once.
    iterations : tuple of RankIteration
        In their order.
    """

    source: str
    rank: int
    ranks: int
    device: str
    in_flight: int
    iterations: tuple[RankIteration, ...]


def rank_trace(trace: KinetoTrace) -> RankTrace:
    """Return what a rank did, from its trace.

    Parameters
    ----------
    trace : KinetoTrace
        The trace of one rank, recorded with ``ProfilerStep`` spans and shapes.

    Returns
    -------
    RankTrace
        What the rank did in every iteration.

    Raises
    ------
    UserError
        If the trace has no ``ProfilerStep`` spans, no messages, or messages of a
        training that is not DDP.
    """
    if not any(event.name.startswith("ProfilerStep#") for event in trace.events):
        raise trace.missing(
            "no ProfilerStep spans, which divide the iterations (call step() of the "
            "profiler at the end of each iteration)"
        )
    traced = iterations(trace)
    starts_s = [_start_s(iteration) for iteration in traced]
    read = []
    for position, iteration in enumerate(traced):
        end_s = _end_s(iteration)
        is_last = position == len(traced) - 1
        if not is_last and traced[position + 1].number == iteration.number + 1:
            # What a rank does between two spans belongs to the earlier iteration.
            end_s = starts_s[position + 1]
        read.append(_read_iteration(trace, iteration, end_s))
    in_flight = GLOO_THREADS
    if trace.device != "cpu":
        # NCCL sends the messages of a process group on one stream, one by one.
        in_flight = 1
    return RankTrace(
        source=trace.source,
        rank=trace.rank,
        ranks=trace.world_size,
        device=trace.device,
        in_flight=in_flight,
        iterations=tuple(read),
    )


class _Clock:
    """When work is done that a processor has run or launched.

    Without a GPU that is at once. With a GPU, it is when all kernels have ended that were
    launched until then. Messages do not count.
    """

    def __init__(self, iteration: TracedIteration) -> None:
        kernels = iteration.kernels()
        self._launched_s = [kernel.launched_s for kernel in kernels]
        self._latest_end_s = np.maximum.accumulate([k.end_s for k in kernels])
        self._free_s = iteration.free_s

    def done_s(self, instant_s: float) -> float:
        """Return when all is done that was launched until an instant, in seconds."""
        if not self._launched_s:
            return instant_s
        n_launched = bisect_right(self._launched_s, instant_s)
        if n_launched == 0:
            # The GPU may still be busy with the iteration before.
            return max(instant_s, self._free_s)
        return float(max(self._latest_end_s[n_launched - 1], self._free_s))


def _step(iteration: TracedIteration) -> Event:
    """Return the span of the profiler's step of an iteration."""
    for event in iteration.events:
        if event.name.startswith("ProfilerStep#"):
            return event
    raise AssertionError("iterations of a trace with steps have steps")


def _start_s(iteration: TracedIteration) -> float:
    """Return when an iteration starts: its step, or when a GPU is free for its work."""
    step_s = _step(iteration).start_s
    if not iteration.kernels():
        return step_s
    return max(step_s, iteration.free_s)


def _end_s(iteration: TracedIteration) -> float:
    return _Clock(iteration).done_s(_step(iteration).end_s)


def _read_iteration(
    trace: KinetoTrace, iteration: TracedIteration, end_s: float
) -> RankIteration:
    """Return what a rank did in an iteration that ends at ``end_s``."""
    clock = _Clock(iteration)
    forward_start_s = _forward_start_s(iteration)
    backward_start_s, _ = iteration.phases["backward"]
    functions = [e for e in iteration.events if e.name.startswith(EVALUATE)]
    if not functions:
        raise trace.missing(f"iteration {iteration.number} has no spans of autograd")
    gradients_end_s = max(function.end_s for function in functions)
    messages = _messages(trace, iteration, clock, backward_start_s, gradients_end_s)
    # Copies back run in the last function of backward, which ends behind them, so the
    # end of backward is told by what comes before the first of them.
    copies_back = _copies(iteration, _COPY_BACK, clock)
    copies_into = _copies(iteration, _COPY_INTO, clock)
    last_posted_s = max((m.posted_s for m in messages if m.in_backward), default=0.0)
    backward_end_s = clock.done_s(gradients_end_s)
    if copies_back:
        backward_end_s = min(backward_end_s, copies_back[0].start_s)
    first_end_s = min((m.ended_s for m in messages if m.in_backward), default=math.inf)
    if last_posted_s < first_end_s < backward_end_s:
        # The thread was waiting inside the last function until a message ended.
        backward_end_s = last_posted_s
    backward_end_s = max(backward_end_s, last_posted_s)
    start_s = _start_s(iteration)
    input_end_s = max(start_s, clock.done_s(forward_start_s))
    forward_end_s = max(input_end_s, clock.done_s(backward_start_s))
    return RankIteration(
        number=iteration.number,
        start_s=start_s,
        input_end_s=input_end_s,
        forward_end_s=forward_end_s,
        backward_end_s=max(forward_end_s, backward_end_s),
        end_s=max(end_s, backward_end_s),
        messages=messages,
        copies_into=copies_into,
        copies_back=copies_back,
        gradients=_gradients(iteration, clock),
        operators=_operators(iteration, functions),
    )


def _forward_start_s(iteration: TracedIteration) -> float:
    """Return when forward starts by the processor's clock, in seconds.

    DDP marks its forward. It begins with the broadcast of buffers, before any operator.
    """
    starts_s = [
        event.start_s
        for event in iteration.events
        if event.name == "DistributedDataParallel.forward"
    ]
    first_operator_s, _ = iteration.phases["forward"]
    return min([*starts_s, first_operator_s])


def _messages(
    trace: KinetoTrace,
    iteration: TracedIteration,
    clock: _Clock,
    backward_start_s: float,
    gradients_end_s: float,
) -> tuple[Message, ...]:
    """Return the messages of an iteration in the order in which they were posted."""
    kernels = [e for e in iteration.events if e.on_gpu and e.collective]
    if kernels:
        posts = _posts_on_gpu(kernels)
    else:
        posts = _posts_of_gloo(trace, iteration)
    messages: list[Message] = []
    for post, sent, collective in posts:
        if collective in _SHARDED:
            raise UserError(
                f"{trace.source}: iteration {iteration.number} has messages of "
                f"{collective}, as FSDP, HSDP and ZeRO send them: explain reads the "
                "traces of DistributedDataParallel only"
            )
        if collective in ("sendrecv", "alltoall"):
            raise UserError(
                f"{trace.source}: iteration {iteration.number} has messages of "
                f"{collective}, as pipelines and experts send them: explain reads the "
                "traces of DistributedDataParallel only"
            )
        if kernels:
            posted_s = clock.done_s(post.start_s)
        else:
            # The worker may take a message before the post returns.
            posted_s = min(post.end_s, sent.start_s)
        in_backward = backward_start_s <= post.start_s <= gradients_end_s
        started_s = max(posted_s, _room_s(messages, posted_s, bool(kernels)))
        messages.append(
            Message(
                collective=collective,
                n_bytes=sent.bytes or post.bytes or _bytes_of_post(post),
                group=str(sent.args.get("Process Group Name", "")),
                sequence=_sequence(sent),
                posted_s=posted_s,
                started_s=min(started_s, sent.end_s),
                ended_s=sent.end_s,
                in_backward=in_backward,
            )
        )
    return tuple(messages)


def _sequence(sent: Event) -> int:
    value = sent.args.get("Seq")
    return value if isinstance(value, int) else -1


def _room_s(earlier: Sequence[Message], posted_s: float, on_gpu: bool) -> float:
    """Return when there was room on the link for a message, in seconds."""
    most = 1 if on_gpu else GLOO_THREADS
    ends_s = sorted(m.ended_s for m in earlier if m.ended_s > posted_s)
    if len(ends_s) < most:
        return posted_s
    # The message can start when only ``most - 1`` of the earlier ones are left.
    return ends_s[-most]


def _posts_on_gpu(kernels: Sequence[Event]) -> list[tuple[Event, Event, str]]:
    """Return for each message the launch, as a span, the kernel, and the collective."""
    posts = []
    for kernel in sorted(kernels, key=lambda event: event.launched_s):
        launch = kernel._replace(start_s=kernel.launched_s, end_s=kernel.launched_s)
        names = f"{kernel.args.get('Collective name')} {kernel.name}".lower()
        collective = "broadcast" if "broadcast" in names else kernel.collective
        posts.append((launch, kernel, collective))
    return posts


def _posts_of_gloo(
    trace: KinetoTrace, iteration: TracedIteration
) -> list[tuple[Event, Event, str]]:
    """Return for each message its post, the span of the message, and the collective.

    Two threads take messages in turn, so that the spans of messages can be in another
    order than their posts. A post and a span belong together if they are the first of
    their collective and shape that are left.
    """
    waiting = [e for e in iteration.events if e.collective and not e.on_gpu]
    posts = []
    for event in iteration.events:
        collective = _POSTS.get(event.name)
        if collective is None or collective == "barrier":
            continue
        elements = _elements_of_post(event)
        for sent in waiting:
            is_alike = sent.name.replace("gloo:", "") == collective or (
                sent.collective == collective
            )
            if is_alike and sent.elements == elements and sent.end_s > event.start_s:
                posts.append((event, sent, collective))
                waiting.remove(sent)
                break
        else:
            if collective in _SHARDED or collective in ("sendrecv", "alltoall"):
                posts.append((event, event, collective))
                continue
            raise UserError(
                f"{trace.source}: iteration {iteration.number}: no span of gloo belongs "
                f"to a message ({event.name} of {elements} elements): record whole "
                "iterations with record_shapes=True"
            )
    return posts


def _elements_of_post(post: Event) -> int:
    """Return how many elements a post of c10d sends."""
    dims = post.args.get("Input Dims")
    # The first input of a post is a list of tensors, and a shape itself a list.
    while isinstance(dims, list) and dims and isinstance(dims[0], list):
        dims = dims[0]
    if not isinstance(dims, list):
        return 0
    sizes = [size for size in dims if isinstance(size, int)]
    return math.prod(sizes)


def _bytes_of_post(post: Event) -> int:
    """Return the bytes of a message whose trace has a shape without a type.

    DDP sends gradients and buffers in float32 unless a hook changes this.
    """
    return 4 * _elements_of_post(post)


def _copies(iteration: TracedIteration, name: str, clock: _Clock) -> tuple[Copy, ...]:
    """Return the copies of one direction, in the order of their start."""
    copies = []
    for event in iteration.events:
        if not event.on_gpu and event.name.endswith(name):
            # On a GPU only the time counts that the kernels of the copy need.
            start_s = clock.done_s(event.start_s)
            end_s = clock.done_s(event.end_s)
            copies.append(Copy(start_s, max(start_s, end_s), event.elements))
    return tuple(copies)


def _gradients(iteration: TracedIteration, clock: _Clock) -> tuple[Gradient, ...]:
    gradients = []
    for event in iteration.events:
        if event.name == ACCUMULATE and not event.undefined:
            gradients.append(Gradient(clock.done_s(event.start_s), event.bytes))
    return tuple(gradients)


def _operators(
    iteration: TracedIteration, functions: Sequence[Event]
) -> tuple[Operator, ...]:
    """Return the operators of backward: kernels of a GPU, or functions of autograd."""
    first_s = min(function.start_s for function in functions)
    last_s = max(function.end_s for function in functions)
    kernels = iteration.kernels(first_s, last_s)
    if kernels:
        return tuple(
            Operator(hash((k.name, str(k.args.get("grid")))), k.start_s, k.end_s)
            for k in kernels
        )
    operators = []
    inside = [e for e in iteration.events if e.category == "cpu_op"]
    starts_s = [event.start_s for event in inside]
    for function in functions:
        # The functions that store gradients also copy and post, which is told apart.
        if ACCUMULATE in function.name:
            continue
        shapes = []
        for event in inside[bisect_right(starts_s, function.start_s - 1e-9) :]:
            if event.start_s >= function.end_s:
                break
            if event.thread == function.thread:
                shapes.append((event.name, str(event.args.get("Input Dims"))))
        key = hash((function.name, tuple(shapes)))
        operators.append(Operator(key, function.start_s, function.end_s))
    return tuple(operators)
