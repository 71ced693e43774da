"""A traced training whose gradients are sent in other buckets.

The readiness of each gradient on each rank is in the traces, so that the posts of any
buckets follow. What messages of other sizes take is a cost.
"""

from __future__ import annotations

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
        When each gradient is ready on each rank, in seconds of work from the start of
        backward.
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
        """Return the buckets of a training, None if the gradients do not tell them."""
        first = training.traces[0].iterations[0]
        sizes = [gradient.n_bytes for gradient in first.gradients]
        sent = [m.n_bytes for m in training.messages if m.in_backward]
        # Gradients of several types travel in buckets of their own, and so do not follow
        # one another in the order of their readiness.
        n_types = len({gradient.dtype for gradient in first.gradients})
        if n_types != 1 or sum(sent) != sum(sizes):
            return None
        # Each message must end with the last byte of a gradient.
        bytes_ready = np.cumsum(sizes)
        bytes_sent = np.cumsum(sent)
        if not np.isin(bytes_sent, bytes_ready).all():
            return None
        # The end of a bucket is exclusive: the number of the gradient behind it.
        ends = np.searchsorted(bytes_ready, bytes_sent) + 1
        ready_s = []
        for trace in training.traces:
            ready_of_rank_s = []
            for iteration in trace.iterations:
                if [g.n_bytes for g in iteration.gradients] != sizes:
                    return None
                instants_s = _ready_s(iteration)
                ready_of_rank_s.append(instants_s - iteration.forward_end_s)
            ready_s.append(ready_of_rank_s)
        # Ranks come first in ``ready_s``, and iterations first in the result.
        by_iteration_s = np.maximum(np.array(ready_s).transpose(1, 0, 2), 0.0)
        by_iteration_s = np.maximum.accumulate(by_iteration_s, axis=2)
        slowest_rank_s = by_iteration_s.max(axis=1)
        typical_s = np.median(slowest_rank_s, axis=0)
        backward_s = np.maximum(np.diff(typical_s, prepend=0.0), 0.0)
        # Nothing is planned for forward, so its time is left out.
        workload = Workload.from_arrays(0.0, backward_s, sizes)
        current = FusionPlan("traced", tuple(ends.tolist()))
        return cls(
            training=training,
            cost=cost,
            ready_s=by_iteration_s,
            workload=workload,
            current=current,
        )

    def schedule(self, plan: FusionPlan) -> Schedule:
        """Return what the ranks would do with the buckets of ``plan``.

        The segments of backward are made anew. All segments before and behind them stay,
        except that the messages behind them get other numbers.
        """
        old = self.training.schedule
        is_post = [s.action == POST and s.phase == "backward" for s in old.segments]
        n_old = sum(is_post)
        n_new = len(plan.ends)
        first = is_post.index(True)
        # So many messages are posted before backward.
        n_before = old.segments[first].message
        # The posts, and the mark of the end of backward behind them. Then the wait for
        # each message, and the mark behind the last copy.
        posting = slice(first, first + n_old + 1)
        copying = slice(posting.stop, posting.stop + n_old + 1)
        # Marks have no message: their number is negative and stays.
        renumbered = tuple(
            s._replace(message=s.message + n_new - n_old) if s.message >= 0 else s
            for s in old.segments[copying.stop :]
        )
        segments = (
            *old.segments[:first],
            *(Segment("backward", POST, n_before + g) for g in range(n_new)),
            Segment("backward", MARK),
            *(Segment("backward", WAIT, n_before + g) for g in range(n_new)),
            Segment("backward", MARK),
            *renumbered,
        )

        # A bucket is posted when its last gradient is ready.
        posted_s = self.ready_s[:, :, np.array(plan.ends) - 1]
        until_post_s = np.diff(posted_s, axis=2, prepend=0.0)
        backward_s = old.work_s[:, :, posting].sum(axis=2)
        after_last_post_s = np.maximum(backward_s - posted_s[:, :, -1], 0.0)
        # The time of copying is divided among the buckets in proportion to their bytes.
        n_bytes = plan.group_bytes(self.workload).astype(float)
        copied_s = old.work_s[:, :, copying].sum(axis=2)
        copies_s = copied_s[:, :, None] * n_bytes / n_bytes.sum()
        # Before the first wait nothing is copied.
        no_copy_s = np.zeros((*copied_s.shape, 1))
        work_s = np.concatenate(
            [
                old.work_s[:, :, :first],
                until_post_s,
                after_last_post_s[:, :, None],
                no_copy_s,
                copies_s,
                old.work_s[:, :, copying.stop :],
            ],
            axis=2,
        )
        behind = n_before + n_old
        message_s = np.concatenate(
            [
                old.message_s[:, :n_before],
                costed_messages_s(self.training, self.cost, n_bytes),
                old.message_s[:, behind:],
            ],
            axis=1,
        )
        # A rank wakes up as late behind a message as behind those of the trace.
        lags_s = old.lags_s
        lag_s = np.median(lags_s[:, :, n_before:behind], axis=2, keepdims=True)
        new_lags_s = np.concatenate(
            [
                lags_s[:, :, :n_before],
                np.repeat(lag_s, n_new, axis=2),
                lags_s[:, :, behind:],
            ],
            axis=2,
        )
        startup_s = None
        if old.startups_s.any():
            # Every message has the same start-up, whatever its size.
            startup_s = np.minimum(old.startups_s.max(), message_s)
        return replace(
            old,
            segments=segments,
            work_s=work_s,
            message_s=message_s,
            startup_s=startup_s,
            rooted=tuple(k if k < n_before else k + n_new - n_old for k in old.rooted),
            lag_s=new_lags_s,
        )

    def gains_s(self, plan: FusionPlan, judged: np.ndarray) -> Floats:
        """Return what iterations gain by the buckets of ``plan``, in seconds.

        ``judged``, shape (I,) of bool, chooses the iterations of the result. Both schedules
        are made from the readiness of gradients. What this leaves out, such as the time to
        post a message, is thereby left out of both.
        """
        now_s = self.schedule(self.current).replay().iteration_s
        then_s = self.schedule(plan).replay().iteration_s
        gained_s: Floats = (now_s - then_s)[judged]
        return gained_s


def of_backward(training: TracedTraining) -> slice:
    """Return which messages of a training are posted in backward.

    What is posted between two messages of backward counts as one of them.
    """
    numbers = [k for k, m in enumerate(training.messages) if m.in_backward]
    return slice(numbers[0], numbers[-1] + 1)


def costed_messages_s(
    training: TracedTraining, cost: MessageCost, n_bytes: Floats
) -> Floats:
    """Return how long messages of backward would take that have other sizes.

    Parameters
    ----------
    training : TracedTraining
        The training.
    cost : MessageCost
        What a message costs by its size.
    n_bytes : ndarray, shape (N,)
        The sizes, in bytes.

    Returns
    -------
    ndarray, shape (I, N)
        Seconds in each iteration.

    Notes
    -----
    In a training, messages can take longer or shorter than their cost. This difference is
    a factor of each iteration: on the start-ups if these make up most of the cost, and
    otherwise on the time of bytes. It is the same for all messages of the iteration. What
    each single message took is less certain than their sum, because messages that share a
    link do not share it quite equally.
    """
    old = of_backward(training)
    old_bytes = training.message_bytes[old]
    startup_s = max(0.0, cost.startup_s())
    old_startup_s = np.minimum(startup_s, cost(old_bytes)).sum()
    old_wire_s = np.asarray(cost(old_bytes)).sum() - old_startup_s
    taken_s = training.schedule.message_s[:, old].sum(axis=1)
    startup_factor = np.ones_like(taken_s)
    wire_factor = np.ones_like(taken_s)
    if old_startup_s > old_wire_s:
        startup_factor = np.maximum(taken_s - old_wire_s, 0.0) / old_startup_s
    else:
        wire_factor = np.maximum(taken_s - old_startup_s, 0.0) / old_wire_s
    new_startup_s = np.minimum(startup_s, cost(n_bytes))
    new_wire_s = np.asarray(cost(n_bytes)) - new_startup_s
    # One row for each iteration, and one column for each message.
    new_s: Floats = (
        startup_factor[:, None] * new_startup_s + wire_factor[:, None] * new_wire_s
    )
    return new_s


def _ready_s(iteration: RankIteration) -> Floats:
    """Return when each gradient of an iteration could be sent, in seconds.

    A gradient can be sent when DDP has copied it into its bucket.
    """
    instants_s = [gradient.ready_s for gradient in iteration.gradients]
    if len(iteration.copies_into) == len(instants_s):
        instants_s = [copy.end_s for copy in iteration.copies_into]
    return np.array(instants_s)
