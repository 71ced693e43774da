"""What one rank of data-parallel training did: its work, its messages and its copies.

An iteration under DistributedDataParallel (DDP) has phases, which the thread that computes
goes through in turn. The rank reads its input, runs forward, and runs backward, during which
it posts one message for each bucket of gradients. When the last gradient is ready, the rank
waits for its messages in their order, and copies each bucket back into the gradients. Then
follows the update.

A message is *posted* where the computing thread hands it over: by ``c10d::allreduce_``
and the like with gloo, or by the launch of its kernel with NCCL. With gloo the span of
the message itself begins only when a worker thread takes it. On a GPU a message can start
when the kernels that were launched before it are done.

All instants are by the clock of the rank, in seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.formats.kineto import (
    ACCUMULATE,
    EVALUATE,
    HOST_TO_DEVICE,
    Event,
    KinetoTrace,
    TracedIteration,
    iterations,
)

FLOAT32_BYTES = 4
GLOO_THREADS = 2
"""How many messages gloo of PyTorch sends at once, each by a thread of its own."""

# Operators that post messages through gloo, with the collective that each one posts.
_POSTS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::barrier": "barrier",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::alltoall_": "alltoall",
    "c10d::alltoall_base_": "alltoall",
    "c10d::send": "sendrecv",
    "c10d::recv_": "sendrecv",
    "c10d::reduce_": "reduce",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::allreduce_coalesced_": "coalesced all_reduce",
}
_REPLAYED = ("all_reduce", "broadcast", "barrier")
"""The collectives of DDP, which ``ddlkit explain`` replays. It refuses all others."""
_SENDERS = {
    "all_gather": "FSDP, HSDP and ZeRO send",
    "reduce_scatter": "FSDP, HSDP and ZeRO send",
    "alltoall": "mixtures of experts send",
    "sendrecv": "pipelines send",
}
"""Which trainings send messages of other collectives."""
_COPY_BACK = "copy_bucket_to_grad"
_COPY_INTO = "reducer::mul_out"


class Message(NamedTuple):
    """A message of a rank.

    Attributes
    ----------
    collective : str
        Which collective, such as "all_reduce".
    n_bytes, elements : int
        Its size in bytes and in elements, 0 if that is unknown.
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
    elements: int
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
    """When a gradient was ready, its size in bytes, and the type of its elements."""

    ready_s: float
    n_bytes: int
    dtype: str = ""


class Operator(NamedTuple):
    """An operator of backward, or a kernel of it.

    Attributes
    ----------
    kind : int
        A number that operators share if they compute the same from the same shapes. How
        much messages slow operators down is seen by comparing operators of one kind.
    start_s, end_s : float
        When the operator ran.
    """

    kind: int
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
    step : int
        The number that the profiler gave the step.
    start_s, input_end_s, forward_end_s, backward_end_s, end_s : float
        When the iteration starts, when its input, its forward and its backward end, and when
        the iteration ends. Backward ends when the last gradient is computed, before the wait
        for messages. The iteration ends when the next one starts.
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
    step: int
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

    @property
    def uses_nccl(self) -> bool:
        """Return whether messages went through NCCL and not through gloo.

        NCCL sends messages one by one. Gloo sends several at once, even in a training on
        GPUs.
        """
        return self.device != "cpu" and self.in_flight < GLOO_THREADS


def rank_trace(trace: KinetoTrace) -> RankTrace:
    """Return what a rank did in each iteration, from its trace.

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
        If the trace has no ``ProfilerStep`` spans, no iteration or no spans of autograd, if
        an iteration sums up gradients of several batches, or if its messages are of a
        training that is not DDP, of CUDA graphs or incomplete.
    """
    if not any(event.name.startswith("ProfilerStep#") for event in trace.events):
        raise trace.missing(
            "no ProfilerStep spans, which divide the iterations (give the profiler a schedule, "
            "and call its step() at the end of each iteration)"
        )
    traced = iterations(trace)
    read = [
        _read_iteration(trace, iteration, end_s)
        for iteration, end_s in zip(traced, _ends_s(traced), strict=True)
    ]
    return RankTrace(
        source=trace.source,
        rank=trace.rank,
        ranks=trace.world_size,
        device=trace.device,
        in_flight=_in_flight(trace.events),
        iterations=tuple(read),
    )


def _ends_s(traced: Sequence[TracedIteration]) -> list[float]:
    """Return when each iteration ends, in seconds.

    What a rank does between two steps belongs to the earlier iteration, which therefore
    ends when the next one starts. The last iteration ends with its own step. So does an
    iteration before a step without a backward pass, because `iterations` leaves out such a
    step.
    """
    ends_s = [_end_s(iteration) for iteration in traced]
    for position, (iteration, following) in enumerate(pairwise(traced)):
        if following.number == iteration.number + 1:
            ends_s[position] = _start_s(following)
    return ends_s


def _in_flight(events: Sequence[Event]) -> int:
    """Return how many messages can be under way at once, by some events of a trace.

    NCCL sends the messages of a process group on one stream, one by one. Gloo has
    ``GLOO_THREADS`` threads that send, even if the training is on GPUs.
    """
    # The messages of NCCL are kernels of the GPU, and those of gloo are not.
    sends_with_nccl = any(event.on_gpu and event.collective for event in events)
    return 1 if sends_with_nccl else GLOO_THREADS


class _Clock:
    """A clock that tells, for an instant, when all work launched up to it is done.

    The processor runs some work itself, and launches other work on the GPU. Without a GPU,
    the result is the instant itself. With a GPU, it is when all kernels that were launched
    up to the instant have ended, but never before the instant. Messages and copies of the
    input do not count, because they run on streams of their own.
    """

    def __init__(self, iteration: TracedIteration) -> None:
        """Prepare the times of the kernels that count, for `done_s`."""
        # `iteration.kernels()` has no messages, and is in the order of launches. Copies of
        # the input run on a stream of their own, so that compute does not wait for them.
        kernels = [
            kernel
            for kernel in iteration.kernels()
            if not kernel.name.startswith(HOST_TO_DEVICE)
        ]
        # These instants rise, so that `done_s` can search them.
        self._launched_s = [kernel.launched_s for kernel in kernels]
        # _latest_end_s[k] is when the kernels 0 to k have all ended.
        ends_s = [kernel.end_s for kernel in kernels]
        self._latest_end_s = np.maximum.accumulate(ends_s)
        # When the GPU has done the work of earlier iterations.
        self._free_s = iteration.free_s

    def done_s(self, instant_s: float) -> float:
        """Return when all work is done that was run or launched up to an instant.

        Both instants are in seconds.
        """
        # Without kernels in this iteration, there is no GPU, or it has nothing to do in it.
        if not self._launched_s:
            return instant_s
        # Kernels of this iteration begin when the GPU has finished the iteration before, at
        # `_free_s`.
        done_s = max(instant_s, self._free_s)
        n_launched = bisect_right(self._launched_s, instant_s)
        if n_launched > 0:
            # The latest end of the first `n_launched` kernels, not the end of the last one.
            kernels_end_s = float(self._latest_end_s[n_launched - 1])
            done_s = max(done_s, kernels_end_s)
        return done_s


def _step(iteration: TracedIteration) -> Event:
    """Return the span of the profiler that marks the step of an iteration."""
    for event in iteration.events:
        if event.name.startswith("ProfilerStep#"):
            return event
    # `rank_trace` has refused traces without such spans, and in all others each iteration
    # is the time of such a span.
    raise AssertionError("iterations of a trace with steps have steps")


def _start_s(iteration: TracedIteration) -> float:
    """Return when an iteration starts, in seconds.

    It starts with the profiler's step. On a GPU, it does not start before the work of the
    iteration before is done.
    """
    step_s = _step(iteration).start_s
    if not iteration.kernels():
        return step_s
    # `free_s` is when the GPU had done the work of earlier iterations.
    return max(step_s, iteration.free_s)


def _end_s(iteration: TracedIteration) -> float:
    """Return when the work of the profiler's step of an iteration is done, in seconds."""
    return _Clock(iteration).done_s(_step(iteration).end_s)


def _step_number(iteration: TracedIteration) -> int:
    """Return the profiler's number of an iteration, or else the number in the trace."""
    # The span is called "ProfilerStep#3", for example.
    _, _, number = _step(iteration).name.partition("#")
    return int(number) if number.isdecimal() else iteration.number


def _read_iteration(
    trace: KinetoTrace, iteration: TracedIteration, end_s: float
) -> RankIteration:
    """Return what a rank did in an iteration that ends at ``end_s``.

    Raises UserError if the iteration sums up gradients of several batches, has no spans
    of autograd, has messages of a training that is not DDP, has a message without a span,
    or launches messages together with other kernels.
    """
    _refuse_summed_gradients(trace, iteration)
    # Autograd runs backward as functions, each in a span of its own.
    functions = [e for e in iteration.events if e.name.startswith(EVALUATE)]
    if not functions:
        raise trace.missing(f"iteration {iteration.number} has no spans of autograd")
    # The phases of a trace are by the processor's clock. `clock.done_s` returns when the GPU,
    # if there is one, has done what the processor launched until an instant.
    clock = _Clock(iteration)
    backward_start_s, _ = iteration.phases["backward"]
    functions_end_s = max(function.end_s for function in functions)
    messages = _messages(trace, iteration, clock, (backward_start_s, functions_end_s))
    # The copies of buckets back into gradients, whose operators' names end with _COPY_BACK.
    copies_back = _copies(iteration, _COPY_BACK, clock)
    # Each phase is made to end no earlier than the phase before it. On a GPU, the processor
    # may run far ahead, or a phase may have no kernels, so the order is not certain.
    start_s = _start_s(iteration)
    input_end_s = max(start_s, clock.done_s(_forward_start_s(iteration)))
    forward_end_s = max(input_end_s, clock.done_s(backward_start_s))
    # When the last gradient was computed. The last function of autograd may end later, because
    # it may contain the waits for messages and the copies back.
    computed_s = _backward_end_s(clock.done_s(functions_end_s), messages, copies_back)
    backward_end_s = max(forward_end_s, computed_s)
    return RankIteration(
        number=iteration.number,
        step=_step_number(iteration),
        start_s=start_s,
        input_end_s=input_end_s,
        forward_end_s=forward_end_s,
        backward_end_s=backward_end_s,
        end_s=max(end_s, backward_end_s),
        messages=messages,
        copies_into=_copies(iteration, _COPY_INTO, clock),
        copies_back=copies_back,
        gradients=_gradients(iteration, clock),
        operators=_operators(iteration, functions),
    )


def _refuse_summed_gradients(trace: KinetoTrace, iteration: TracedIteration) -> None:
    """Raise UserError if an iteration sums up gradients of several batches.

    Such an iteration has several forwards and backwards, and `RankIteration` has one of
    each.
    """
    if iteration.repeats_forward():
        raise UserError(
            f"{trace.source}: iteration {iteration.number} runs forward again after "
            "backward began (gradients are summed up?): record a training of one forward and "
            "one backward in each iteration, without gradient accumulation"
        )


def _backward_end_s(
    functions_end_s: float, messages: Sequence[Message], copies_back: Sequence[Copy]
) -> float:
    """Return when a rank has computed its last gradient, in seconds.

    That is when the last function of autograd ends, at ``functions_end_s``, unless this
    function contains waits for messages, or copies of buckets back into gradients
    (``copies_back``, in the order of their start), as in some versions of PyTorch. The last
    gradient was computed before these, but not before the last message of backward was
    posted (handed over).
    """
    # Without messages in backward, these instants have no effect below.
    of_backward = [message for message in messages if message.in_backward]
    last_posted_s = max((m.posted_s for m in of_backward), default=-math.inf)
    first_message_end_s = min((m.ended_s for m in of_backward), default=math.inf)
    end_s = functions_end_s
    # If the function copies buckets back, the last gradient was computed before the first copy.
    if copies_back:
        end_s = min(end_s, copies_back[0].start_s)
    # If a function still runs when the first message ends, and all messages were posted before
    # that, the function contains the wait for messages, because nothing else is left to do after
    # the last post. Backward then ends with this post. If the first message ended before the
    # last post, nothing tells whether the function contains the wait, and the end stays as it is.
    if last_posted_s < first_message_end_s < end_s:
        end_s = last_posted_s
    return max(end_s, last_posted_s)


def _forward_start_s(iteration: TracedIteration) -> float:
    """Return when forward starts by the processor's clock, in seconds.

    DDP marks its forward, which begins with the broadcast of buffers. Without this mark,
    forward starts with the first operator that shares its sequence number with a function of
    backward. This may be slightly too early: an operator without a gradient, such as one on
    the input, also has the sequence number of the next operator with a gradient.
    """
    for event in iteration.events:
        if event.name == "DistributedDataParallel.forward":
            return event.start_s
    first_operator_s, _ = iteration.phases["forward"]
    return first_operator_s


class _Post(NamedTuple):
    """How a message was posted, and the span in which it was then sent.

    Attributes
    ----------
    launched_s : float
        When the processor began to hand the message over: by the launch of its kernel with
        NCCL, and by an operator with gloo.
    posted_s : float
        When the rank was ready for the message.
    sent : Event
        The span in which the message was sent.
    collective : str
        The collective, such as "all_reduce".
    elements : int
        The size in elements, 0 if that is unknown.
    """

    launched_s: float
    posted_s: float
    sent: Event
    collective: str
    elements: int


def _messages(
    trace: KinetoTrace,
    iteration: TracedIteration,
    clock: _Clock,
    backward_s: tuple[float, float],
) -> tuple[Message, ...]:
    """Return the messages of an iteration in the order in which they were posted.

    The processor hands a message over at the instant ``launched_s`` of `_Post`. The message
    is posted at ``posted_s``, when the rank is ready for it, which can be later.
    ``backward_s`` is when the first function of autograd starts and the last one ends, by
    the processor's clock.

    Raises UserError for a message that DDP does not send, for one of a CUDA graph, or for
    one of gloo without a span.
    """
    kernels = [e for e in iteration.events if e.on_gpu and e.collective]
    # Messages of NCCL are kernels. Without any, messages go through gloo.
    if kernels:
        _refuse_cuda_graphs(trace, iteration, kernels)
        posts = _posts_on_gpu(kernels, clock)
    else:
        posts = _posts_of_gloo(trace, iteration)
    # How many messages can be under way at once.
    in_flight = _in_flight(iteration.events)
    first_function_start_s, last_function_end_s = backward_s
    messages: list[Message] = []
    for post in posts:
        _refuse_other_training(trace, iteration, post)
        # ``backward_s`` is by the processor's clock, and so is ``launched_s``.
        in_backward = first_function_start_s <= post.launched_s <= last_function_end_s
        started_s = _earliest_start_s(messages, post.posted_s, in_flight)
        messages.append(_message(post, started_s, in_backward=in_backward))
    return tuple(messages)


def _message(post: _Post, started_s: float, *, in_backward: bool) -> Message:
    """Return the message of a post.

    ``started_s`` is an estimate of when the message started, in seconds. It takes for granted
    that the rank never has more messages under way than `_in_flight` says. ``in_backward``
    says whether the message was posted during backward.
    """
    return Message(
        collective=post.collective,
        # The span has 0 bytes if it does not state the size and the type. The type
        # is then taken to be float32, the usual one of DDP.
        n_bytes=post.sent.bytes or FLOAT32_BYTES * post.elements,
        elements=post.elements,
        group=str(post.sent.args.get("Process Group Name", "")),
        sequence=_sequence(post.sent),
        posted_s=post.posted_s,
        # If the rank had more messages under way, for example those of two process groups,
        # the estimate can be after the end of the message. The end is then taken instead.
        started_s=min(started_s, post.sent.end_s),
        ended_s=post.sent.end_s,
        in_backward=in_backward,
    )


def _refuse_other_training(
    trace: KinetoTrace, iteration: TracedIteration, post: _Post
) -> None:
    """Raise UserError for a message that DDP does not send.

    That is a message of a collective that is not in `_REPLAYED`, or a message between some
    of the ranks only.
    """
    where = f"{trace.source}: iteration {iteration.number}"
    if post.collective not in _REPLAYED:
        senders = _SENDERS.get(post.collective, "a loop of one's own may send")
        raise UserError(
            f"{where} has messages of {post.collective}, as {senders} them: explain reads "
            "the all-reduces, broadcasts and barriers of DistributedDataParallel only"
        )
    group_size = post.sent.args.get("Group size")
    # The number of ranks is 0 if the trace does not state it.
    if isinstance(group_size, int) and trace.world_size not in (0, group_size):
        raise UserError(
            f"{where} has a message between {group_size} of {trace.world_size} ranks, as "
            "tensor parallelism and HSDP send them: explain reads messages between all "
            "ranks only"
        )


def _refuse_cuda_graphs(
    trace: KinetoTrace, iteration: TracedIteration, messages: Sequence[Event]
) -> None:
    """Raise UserError if a single launch has started a message and other work.

    Such a launch is that of a CUDA graph. It does not tell which of the other work comes
    before the message, and therefore not when the rank was ready for the message.
    """
    # Kernels of one launch have one correlation number. These are the numbers of kernels
    # that are no messages.
    launches_of_compute = {
        kernel.identifier("correlation") for kernel in iteration.kernels()
    }
    for message in messages:
        correlation = message.identifier("correlation")
        if correlation is not None and correlation in launches_of_compute:
            raise UserError(
                f"{trace.source}: iteration {iteration.number} launches messages together "
                "with other kernels, as CUDA graphs do, so that it is not known when the "
                "rank was ready for them: record the training without CUDA graphs"
            )


def _sequence(sent: Event) -> int:
    """Return the number of a message within its process group, -1 if it is unknown."""
    value = sent.args.get("Seq")
    return value if isinstance(value, int) else -1


def _earliest_start_s(
    earlier: Sequence[Message], posted_s: float, in_flight: int
) -> float:
    """Return when a message could start that was posted at ``posted_s``, in seconds.

    Only ``in_flight`` messages can be under way at once. ``earlier`` are the messages
    that were posted before this one.
    """
    # Pending messages are those that have not ended when this one is posted.
    ends_of_pending_s = sorted(m.ended_s for m in earlier if m.ended_s > posted_s)
    if len(ends_of_pending_s) < in_flight:
        return posted_s
    # All but ``in_flight - 1`` of the pending messages must end first. The last of these
    # is the ``in_flight``-th from the end.
    return ends_of_pending_s[-in_flight]


def _posts_on_gpu(kernels: Sequence[Event], clock: _Clock) -> list[_Post]:
    """Return the posts of NCCL's messages, in the order of their launches.

    A message is launched when the processor gives its kernel to the GPU. It is posted
    later, when the rank is ready for it: when all compute that was launched before it is
    done. ``clock`` tells this instant.
    """
    posts = []
    for kernel in sorted(kernels, key=lambda event: event.launched_s):
        collective = kernel.collective
        # For a broadcast, ``kernel.collective`` is "other". The word is in the arguments of
        # the kernel or in its name.
        names = f"{kernel.args.get('Collective name')} {kernel.name}".lower()
        if "broadcast" in names:
            collective = "broadcast"
        elements = kernel.args.get("In msg nelems")
        posts.append(
            _Post(
                launched_s=kernel.launched_s,
                posted_s=clock.done_s(kernel.launched_s),
                sent=kernel,
                collective=collective,
                elements=elements if isinstance(elements, int) else 0,
            )
        )
    return posts


def _posts_of_gloo(trace: KinetoTrace, iteration: TracedIteration) -> list[_Post]:
    """Return the posts of gloo's messages, in the order in which they were posted.

    A post is an operator by which the computing thread hands a message over. A thread of
    gloo then sends the message, which is a span of its own. There are two such threads, so
    the spans can be in another order than the posts. Each post gets the first span of its
    collective and its size that ends after the start of the post and that no earlier post
    has. Raises UserError for a post without a span.
    """
    # The spans of messages for which no post has been found yet.
    unmatched = [e for e in iteration.events if e.collective and not e.on_gpu]
    posts = []
    for event in iteration.events:
        collective = _POSTS.get(event.name)
        if collective is None:
            continue
        elements = _elements_of_post(event)
        sent = event
        # For any other collective, the span is not looked for, and ``sent`` remains the
        # operator: its post is made only so that the caller can refuse the collective.
        if collective in _REPLAYED:
            span = _first_alike(unmatched, collective, elements, event.start_s)
            if span is None:
                raise _without_span(trace, iteration, event, elements)
            unmatched.remove(span)
            sent = span
        posts.append(
            _Post(
                launched_s=event.start_s,
                # A message counts as posted when its operator ends or, if a thread of gloo
                # has begun to send it before that, when its span starts.
                posted_s=min(event.end_s, sent.start_s),
                sent=sent,
                collective=collective,
                elements=elements,
            )
        )
    return posts


def _without_span(
    trace: KinetoTrace, iteration: TracedIteration, operator: Event, elements: int
) -> UserError:
    """Return the error for an operator that posts a message which no span of gloo sends.

    ``elements`` is the size of the message.
    """
    return UserError(
        f"{trace.source}: iteration {iteration.number}: no span of gloo "
        f"belongs to a message ({operator.name} of {elements} elements): record "
        "whole iterations with record_shapes=True"
    )


def _first_alike(
    spans: Sequence[Event], collective: str, elements: int, launched_s: float
) -> Event | None:
    """Return the first span of gloo that can be the message of a post, None if none can.

    The span must be of the collective and of the number of elements that were posted. It
    must end after ``launched_s``, the start of the post, because a message that ended before is
    an earlier one.
    """
    for span in spans:
        is_of_collective = span.name == f"gloo:{collective}"
        # A span that does not say its size has 0 elements.
        is_of_size = span.elements in (elements, 0)
        if is_of_collective and is_of_size and span.end_s > launched_s:
            return span
    return None


def _elements_of_post(post: Event) -> int:
    """Return how many elements an operator of c10d posts, 0 if the trace does not say.

    Only the first tensor counts. An operator takes a tensor for each device of the process,
    and a process of DDP has one.
    """
    # For each input, its shape or, for a list of tensors, the list of their shapes.
    dims = post.args.get("Input Dims")
    # Without shapes, the number of elements is unknown.
    if not dims:
        return 0
    # The first input of a post is a tensor or a list of tensors, so that the shape of the
    # first tensor is the innermost first list.
    while isinstance(dims, list) and dims and isinstance(dims[0], list):
        dims = dims[0]
    # A damaged shape counts as unknown.
    if not isinstance(dims, list) or not all(isinstance(size, int) for size in dims):
        return 0
    # A tensor of one number has an empty shape, whose product is 1.
    return math.prod(dims)


def _copies(iteration: TracedIteration, name: str, clock: _Clock) -> tuple[Copy, ...]:
    """Return the copies into or out of buckets, in the order of their start.

    The names of the operators that copy end with ``name``. ``clock`` tells when the work
    that was launched until an instant is done.
    """
    copies = []
    # Spans of the processor are in the order of their start here, and so are the copies: the
    # clock gives no earlier result for a later instant.
    for event in iteration.events:
        if not event.on_gpu and event.name.endswith(name):
            # On a GPU, the operator only launches the kernels of the copy. The copy
            # starts when all earlier kernels have ended, and ends when its own have.
            start_s = clock.done_s(event.start_s)
            end_s = clock.done_s(event.end_s)
            copies.append(Copy(start_s, end_s, event.elements))
    return tuple(copies)


def _gradients(iteration: TracedIteration, clock: _Clock) -> tuple[Gradient, ...]:
    """Return the gradients in the order in which they became ready.

    A gradient is ready when all work is done that was launched before autograd began to
    store it. ``clock`` tells this instant.
    """
    gradients = []
    for event in iteration.events:
        # Autograd also stores gradients that do not exist, which are undefined.
        if event.name == ACCUMULATE and not event.undefined:
            # The first input is the gradient. Its type is "" if the trace does not say it.
            types = event.args.get("Input type")
            dtype = str(types[0]) if isinstance(types, list) and types else ""
            gradients.append(Gradient(clock.done_s(event.start_s), event.bytes, dtype))
    return tuple(gradients)


def _operators(
    iteration: TracedIteration, functions: Sequence[Event]
) -> tuple[Operator, ...]:
    """Return the operators of backward: kernels of a GPU, or else functions of autograd.

    Operators of one kind compute the same from the same shapes, so that their times can be
    compared. A trace has no shapes for kernels. Kernels count as one kind if they have the
    same name and the same grid of threads, whose size follows from the shapes.
    """
    first_s = min(function.start_s for function in functions)
    last_s = max(function.end_s for function in functions)
    # The kernels that were launched while the functions of autograd ran.
    kernels = iteration.kernels(first_s, last_s)
    if not kernels:
        return _functions_as_operators(iteration, functions)
    operators = []
    for kernel in kernels:
        # Kernels of equal names and grids have equal hashes.
        kind = hash((kernel.name, str(kernel.args.get("grid"))))
        operators.append(Operator(kind, kernel.start_s, kernel.end_s))
    return tuple(operators)


def _functions_as_operators(
    iteration: TracedIteration, functions: Sequence[Event]
) -> tuple[Operator, ...]:
    """Return those functions of autograd that only compute.

    Functions are of one kind, so that their times can be compared, if they have the same name
    and run operators of the same names and shapes.
    """
    operators = []
    # The operators are in the order of their start, as all spans of the processor.
    cpu_operators = [e for e in iteration.events if e.category == "cpu_op"]
    starts_s = [event.start_s for event in cpu_operators]
    for function in functions:
        # Functions that store gradients also copy them and post messages.
        if ACCUMULATE in function.name:
            continue
        # The operators that start during the function. Those of other threads do not belong
        # to the function.
        first = bisect_left(starts_s, function.start_s)
        behind_last = bisect_left(starts_s, function.end_s)
        names_and_shapes = [
            (event.name, str(event.args.get("Input Dims")))
            for event in cpu_operators[first:behind_last]
            if event.thread == function.thread
        ]
        # Functions of equal names, operators and shapes have equal hashes.
        kind = hash((function.name, tuple(names_and_shapes)))
        operators.append(Operator(kind, function.start_s, function.end_s))
    return tuple(operators)
