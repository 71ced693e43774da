"""A traced training whose gradients are sent in other buckets.

The traces say when each gradient is ready on each rank, and so when any other bucket
would be posted. What messages of other sizes take is computed from a cost. Shapes of
arrays are written with I iterations, R ranks, S segments of work, K messages, n
gradients, and G buckets of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.plan import FusionPlan
from ddlkit.core.replay import MARK, POST, WAIT, Schedule, Segment
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats.rank_trace import RankIteration
from ddlkit.model.ranks import TracedTraining


@dataclass(frozen=True, eq=False)
class Buckets:
    """The gradients of a training, which can be sent in other buckets.

    Attributes
    ----------
    training : TracedTraining
        The training.
    cost : MessageCost
        What a message costs by its size.
    ready_s : ndarray, shape (I, R, n)
        When each of n gradients is ready on each rank, in seconds from the start of
        backward. A rank does not wait in backward, so this is also how long it has worked.
    workload : Workload
        The gradients, with the median readiness of the slowest rank.
    current : FusionPlan
        The buckets of the trace.
    """

    training: TracedTraining
    cost: MessageCost
    ready_s: Floats
    workload: Workload
    current: FusionPlan

    @classmethod
    def of(cls, training: TracedTraining, cost: MessageCost) -> Buckets | None:
        """Return the buckets of a training, or None if they cannot be told.

        They cannot be told if gradients have several types, if an iteration lacks
        gradients that others have, or if gradients do not fill the messages. ``cost`` is
        what a message costs by its size.
        """
        # The first iteration of rank 0, whose messages are also those of ``training``, stands
        # for all. The result is None if another one has other gradients (`_ready_of_all_s`).
        first = training.traces[0].iterations[0]
        sizes = [gradient.n_bytes for gradient in first.gradients]
        # Gradients of several types travel in buckets of their own, and so do not follow
        # one another in the order of their readiness.
        types = {gradient.dtype for gradient in first.gradients}
        if len(types) != 1:
            return None
        sent_bytes = [m.n_bytes for m in training.messages if m.in_backward]
        # Behind which gradient the bucket of each message ends.
        ends = _ends_of_buckets(sizes, sent_bytes)
        if ends is None:
            return None
        ready_s = _ready_of_all_s(training, sizes)
        if ready_s is None:
            return None
        return cls(
            training=training,
            cost=cost,
            ready_s=ready_s,
            workload=_typical_workload(ready_s, sizes),
            current=FusionPlan("traced", ends),
        )

    def schedule(self, plan: FusionPlan) -> Schedule:
        """Return what the ranks would do with the buckets of ``plan``.

        The segments of backward are made anew. All segments before and behind them stay,
        except that the messages behind them get other numbers.
        """
        old = self.training.schedule
        # Which segments and messages of the old schedule are of backward.
        backward = _BackwardSegments.of(old)
        # The sizes of the new buckets, and the times of all messages with these buckets.
        n_bytes = plan.group_bytes(self.workload).astype(float)
        before_s = old.message_s[:, : backward.messages.start]
        new_s = costed_messages_s(self.training, self.cost, n_bytes)
        behind_s = old.message_s[:, backward.messages.stop :]
        message_s = np.concatenate([before_s, new_s, behind_s], axis=1)
        return replace(
            old,
            segments=_with_messages(old.segments, backward, len(plan.ends)),
            work_s=self._work_s(plan, backward, n_bytes),
            message_s=message_s,
            startup_s=_startups_s(old, message_s),
            rooted=_rooted(old, backward, len(plan.ends)),
            # How late ranks see the ends of the messages that they wait for.
            lag_s=_lags_s(old.lags_s, backward.messages, len(plan.ends)),
        )

    def _work_s(
        self, plan: FusionPlan, backward: _BackwardSegments, n_bytes: Floats
    ) -> Floats:
        """Return how long ranks work in each segment with the buckets of ``plan``.

        ``backward`` says where backward is in the schedule of the trace. The result has
        the shape (I, R, number of segments), in seconds. ``n_bytes``, shape (G,), has
        the sizes of the buckets.
        """
        old_s = self.training.schedule.work_s
        # A bucket is posted when its last gradient is ready. An end is exclusive, hence
        # the index before it.
        posted_s = self.ready_s[:, :, np.array(plan.ends) - 1]
        until_post_s = np.diff(posted_s, axis=2, prepend=0.0)
        # The whole work of backward, shape (I, R). If the last gradient is ready after that
        # work, no work is left behind the last post.
        backward_s = old_s[:, :, backward.posting].sum(axis=2)
        after_last_post_s = np.maximum(backward_s - posted_s[:, :, -1], 0.0)
        # The time of copying, shape (I, R), is divided among the buckets in proportion
        # to their bytes, which gives the shape (I, R, G).
        copied_s = old_s[:, :, backward.copying].sum(axis=2)
        copies_s = copied_s[:, :, None] * n_bytes / n_bytes.sum()
        # The work of a segment lies before its end. The segments of ``posting`` end with G posts
        # and the mark where compute ends.
        posting_s = np.concatenate(
            [until_post_s, after_last_post_s[:, :, None]], axis=2
        )
        # Those of ``copying`` end with G waits and the mark where copying ends. A bucket is copied
        # behind its wait, so its copy is the work of the next segment, and the first has none.
        no_work_s = np.zeros((*copied_s.shape, 1))
        copying_s = np.concatenate([no_work_s, copies_s], axis=2)
        before_s = old_s[:, :, : backward.posting.start]
        behind_s = old_s[:, :, backward.copying.stop :]
        return np.concatenate([before_s, posting_s, copying_s, behind_s], axis=2)

    def gains_s(self, plan: FusionPlan, judged: np.ndarray) -> Floats:
        """Return what iterations gain by the buckets of ``plan``, in seconds.

        ``judged``, shape (I,) of bool, says for which iterations gains are returned. Both schedules
        are made from the readiness of gradients. What this leaves out, such as the time to
        post a message, is thereby left out of both.
        """
        # With the buckets of the trace, and with those of the plan.
        now_s = self.schedule(self.current).replay().iteration_s
        then_s = self.schedule(plan).replay().iteration_s
        gained_s: Floats = (now_s - then_s)[judged]
        return gained_s


def _typical_workload(ready_s: Floats, gradient_bytes: Sequence[int]) -> Workload:
    """Return the gradients of a training, with the median readiness of the slowest rank.

    ``ready_s``, shape (I, R, n), is when each of n gradients is ready on each rank, in seconds
    from the start of backward. It never decreases from one gradient to the next.
    """
    # A message begins when the last rank has posted it, so plans are made for the slowest
    # rank of each iteration. The median over iterations is a typical one.
    typical_s = np.median(ready_s.max(axis=1), axis=0)
    # What a workload states of backward is the time from one gradient to the next.
    backward_s = np.diff(typical_s, prepend=0.0)
    # Nothing is planned for forward, so its time is left out.
    return Workload.from_arrays(0.0, backward_s, gradient_bytes)


def of_backward(training: TracedTraining) -> slice:
    """Return which messages of a training are posted in backward.

    Any message that is posted between two messages of backward counts as one of backward.
    """
    numbers = [k for k, m in enumerate(training.messages) if m.in_backward]
    return slice(numbers[0], numbers[-1] + 1)


def costed_messages_s(
    training: TracedTraining, cost: MessageCost, n_bytes: Floats
) -> Floats:
    """Return how long the messages of backward would take if they had other sizes.

    Parameters
    ----------
    training : TracedTraining
        The training.
    cost : MessageCost
        What a message costs by its size.
    n_bytes : ndarray, shape (G,)
        The sizes, in bytes.

    Returns
    -------
    ndarray, shape (I, G)
        Seconds in each iteration.

    Notes
    -----
    The cost of a message has two parts: its start-up, and the time of its bytes. The messages of
    a training can take longer or shorter than their cost. So one part of the cost of each new
    message is multiplied by a factor, which is the part that is larger for all traced messages
    together. The factor of an iteration is the one by which the traced messages would cost as
    much as they took together. That the larger part takes the whole difference is a choice, not
    measured. The time that messages took together is known better than the time of each,
    because messages that share a link do not share it quite equally.
    """
    traced = of_backward(training)
    traced_bytes = training.message_bytes[traced]
    # What all messages of backward in the trace cost together: start-ups, and the rest,
    # which is the time of their bytes.
    startup_sum_s = _startup_parts_s(cost, traced_bytes).sum()
    wire_sum_s = np.asarray(cost(traced_bytes)).sum() - startup_sum_s
    # What they took together in each iteration, shape (I,).
    traced_sum_s = training.schedule.message_s[:, traced].sum(axis=1)
    # The same two parts of the cost of each new message.
    new_startup_s = _startup_parts_s(cost, n_bytes)
    new_wire_s = np.asarray(cost(n_bytes)) - new_startup_s
    # By the factor, the traced messages cost as much as they took together. If they took less
    # than the part without the factor, the factor would be below 0, and is set to 0.
    new_s: Floats
    if startup_sum_s > wire_sum_s:
        factor = np.maximum(traced_sum_s - wire_sum_s, 0.0) / startup_sum_s
        new_s = factor[:, None] * new_startup_s + new_wire_s
    else:
        factor = np.maximum(traced_sum_s - startup_sum_s, 0.0) / wire_sum_s
        new_s = new_startup_s + factor[:, None] * new_wire_s
    return new_s


def _startup_parts_s(cost: MessageCost, n_bytes: Floats) -> Floats:
    """Return which part of the cost of each message is start-up, shape (G,), in seconds.

    ``n_bytes``, shape (G,), are the sizes of the messages. The start-up of a message is at
    most its whole cost.
    """
    # A fitted line can have a start-up below 0.
    startup_s = max(0.0, cost.startup_s())
    return np.minimum(startup_s, cost(n_bytes))


def _startups_s(traced: Schedule, message_s: Floats) -> Floats | None:
    """Return the start-ups of new messages, shape (I, number of messages), in seconds.

    ``message_s`` is how long these messages take, and ``traced`` is the schedule of the trace.
    The result is None if the traced messages have no start-ups.
    """
    if not traced.startups_s.any():
        return None
    # Every message has the same start-up, except that a message that takes less time than that
    # is nothing but start-up. So the largest traced start-up is that of every message.
    return np.minimum(traced.startups_s.max(), message_s)


def _rooted(
    traced: Schedule, backward: _BackwardSegments, n_messages: int
) -> tuple[int, ...]:
    """Return the new numbers of rooted messages if backward sends ``n_messages`` messages.

    Rooted messages are those that rank 0 alone sends, such as broadcasts of buffers. None of
    them is of backward. ``traced`` is the schedule of the trace, and ``backward`` says which
    of its messages are of backward. Messages behind these get other numbers.
    """
    added = n_messages - backward.n_messages
    first = backward.messages.start
    return tuple(k if k < first else k + added for k in traced.rooted)


def _lags_s(traced_s: Floats, in_backward: slice, n_messages: int) -> Floats:
    """Return how late ranks see the ends of messages, shape (I, R, number of messages).

    These lags are in seconds. ``traced_s``, shape (I, R, K), has those of the trace. The messages
    ``in_backward`` are replaced by ``n_messages`` others. In each iteration, the lag of a rank is
    the same for all new messages: the median of its lags for the replaced ones.
    """
    typical_s = np.median(traced_s[:, :, in_backward], axis=2, keepdims=True)
    new_s = np.repeat(typical_s, n_messages, axis=2)
    before_s = traced_s[:, :, : in_backward.start]
    behind_s = traced_s[:, :, in_backward.stop :]
    return np.concatenate([before_s, new_s, behind_s], axis=2)


@dataclass(frozen=True)
class _BackwardSegments:
    """Where backward posts, awaits and copies its buckets in a schedule.

    Attributes
    ----------
    posting : slice
        The segments that end with a post, and the one behind them, which ends with the mark
        of the end of the compute of backward.
    copying : slice
        The segments that end with a wait for a bucket, and the one behind them, which ends
        with the mark of the end of copying. The first one has no work. The work of each further
        one is to copy the bucket for which the segment before waits.
    messages : slice
        The messages of backward.
    """

    posting: slice
    copying: slice
    messages: slice

    @classmethod
    def of(cls, schedule: Schedule) -> _BackwardSegments:
        """Return where the backward of a traced training is in its schedule."""
        is_post = [
            segment.action == POST and segment.phase == "backward"
            for segment in schedule.segments
        ]
        n_messages = sum(is_post)
        first = is_post.index(True)
        first_message = schedule.segments[first].message
        # With two messages, the segments end with these, one after the other:
        #   post, post, mark of the end of compute: ``posting``
        #   wait, wait, mark of the end of copying: ``copying``
        posting = slice(first, first + n_messages + 1)
        copying = slice(posting.stop, posting.stop + n_messages + 1)
        return cls(
            posting=posting,
            copying=copying,
            messages=slice(first_message, first_message + n_messages),
        )

    @property
    def n_messages(self) -> int:
        """Return how many messages backward sends."""
        return self.messages.stop - self.messages.start


def _with_messages(
    segments: Sequence[Segment], backward: _BackwardSegments, n_messages: int
) -> tuple[Segment, ...]:
    """Return the segments of a schedule whose backward sends ``n_messages`` messages.

    Of ``segments``, those of ``backward`` are made anew, in the order in which
    `ddlkit.model.ranks` makes them. They begin with ``backward.posting`` and end with
    ``backward.copying``. All others stay, but for the numbers of messages behind those of
    backward.
    """
    first = backward.messages.start
    added = n_messages - backward.n_messages
    behind = []
    for segment in segments[backward.copying.stop :]:
        # Marks have no message: their number is negative and stays.
        if segment.message >= 0:
            segment = segment._replace(message=segment.message + added)
        behind.append(segment)
    return (
        *segments[: backward.posting.start],
        *(Segment("backward", POST, first + g) for g in range(n_messages)),
        # The mark of the end of compute.
        Segment("backward", MARK),
        *(Segment("backward", WAIT, first + g) for g in range(n_messages)),
        # The mark of the end of copying, behind the copy of the last bucket.
        Segment("backward", MARK),
        *behind,
    )


def _ends_of_buckets(
    gradient_bytes: Sequence[int], message_bytes: Sequence[int]
) -> tuple[int, ...] | None:
    """Return where the bucket of each message ends, by the sizes alone.

    The sizes of gradients and of messages are in the order of backward. The end of a
    bucket is exclusive: the number of the gradient behind it. The result is None if the
    gradients do not fill the messages, or if a message does not end with the last byte
    of a gradient.
    """
    # The bytes of all gradients up to each one, and of all messages up to each one.
    bytes_ready = np.cumsum(gradient_bytes)
    bytes_sent = np.cumsum(message_bytes)
    if sum(message_bytes) != sum(gradient_bytes):
        return None
    if not np.isin(bytes_sent, bytes_ready).all():
        return None
    # The index of the gradient that ends with the last byte of each message.
    last = np.searchsorted(bytes_ready, bytes_sent)
    return tuple((last + 1).tolist())


def _ready_of_all_s(
    training: TracedTraining, gradient_bytes: Sequence[int]
) -> Floats | None:
    """Return when each gradient is ready, shape (I, R, n), in seconds from the start of backward.

    A rank does not wait in backward, so this is also how long it has worked. No gradient is
    ready before those in front of it. The result is None if an iteration of some rank has
    other gradients than ``gradient_bytes``.
    """
    ready_of_ranks_s = []
    for trace in training.traces:
        ready_of_rank_s = []
        for iteration in trace.iterations:
            sizes = [gradient.n_bytes for gradient in iteration.gradients]
            if sizes != list(gradient_bytes):
                return None
            # Backward starts when forward ends.
            instants_s = _ready_s(iteration)
            ready_of_rank_s.append(instants_s - iteration.forward_end_s)
        ready_of_ranks_s.append(ready_of_rank_s)
    # Ranks come first in the list, and iterations first in the result.
    ready_s = np.array(ready_of_ranks_s).transpose(1, 0, 2)
    # A training loop can mark the phases of an iteration in the trace. Its mark of backward
    # can begin after the first gradients are ready. These then count as ready at 0.
    in_backward_s = np.maximum(ready_s, 0.0)
    # A gradient cannot be sent before those in front of it.
    in_order_s: Floats = np.maximum.accumulate(in_backward_s, axis=2)
    return in_order_s


def _ready_s(iteration: RankIteration) -> Floats:
    """Return when each gradient of an iteration could be sent, in seconds.

    A gradient can be sent when DDP has copied it into its bucket.
    """
    instants_s = [gradient.ready_s for gradient in iteration.gradients]
    # Traces can lack the copies into buckets. They count if there is one for each gradient.
    # Gradients and copies are both in the order of time.
    if len(iteration.copies_into) == len(instants_s):
        instants_s = [copy.end_s for copy in iteration.copies_into]
    return np.array(instants_s)
