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
        message_s = self._message_s(n_bytes, n_before, n_old)
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

    def _message_s(self, n_bytes: Floats, n_before: int, n_old: int) -> Floats:
        """Return how long messages take if those of backward have other sizes.

        The result has shape (I, K), in seconds. ``n_bytes`` are the new sizes. Before
        backward come ``n_before`` messages, and in the trace it has ``n_old`` messages.

        In a training, messages can take longer or shorter than their cost. This difference
        is a factor on their start-ups if these make up most of the cost, and otherwise a
        factor on the time of their bytes.
        """
        old = self.training.schedule.message_s
        gradients = slice(n_before, n_before + n_old)
        old_bytes = self.training.message_bytes[gradients]
        startup_s = max(0.0, self.cost.startup_s())
        old_startup_s = np.minimum(startup_s, self.cost(old_bytes)).sum()
        old_wire_s = np.asarray(self.cost(old_bytes)).sum() - old_startup_s
        taken_s = old[:, gradients].sum(axis=1)
        startup_factor = np.ones_like(taken_s)
        wire_factor = np.ones_like(taken_s)
        if old_startup_s > old_wire_s:
            startup_factor = np.maximum(taken_s - old_wire_s, 0.0) / old_startup_s
        else:
            wire_factor = np.maximum(taken_s - old_startup_s, 0.0) / old_wire_s
        new_startup_s = np.minimum(startup_s, self.cost(n_bytes))
        new_wire_s = np.asarray(self.cost(n_bytes)) - new_startup_s
        new_s = (
            startup_factor[:, None] * new_startup_s + wire_factor[:, None] * new_wire_s
        )
        return np.concatenate(
            [old[:, :n_before], new_s, old[:, n_before + n_old :]], axis=1
        )


def _ready_s(iteration: RankIteration) -> Floats:
    """Return when each gradient of an iteration could be sent, in seconds.

    A gradient can be sent when DDP has copied it into its bucket.
    """
    instants_s = [gradient.ready_s for gradient in iteration.gradients]
    if len(iteration.copies_into) == len(instants_s):
        instants_s = [copy.end_s for copy in iteration.copies_into]
    return np.array(instants_s)
