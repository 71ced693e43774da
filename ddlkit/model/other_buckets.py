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
        ready_s = []
        for trace in training.traces:
            ready_of_rank_s = []
            for iteration in trace.iterations:
                if [g.n_bytes for g in iteration.gradients] != sizes:
                    return None
                instants_s = _ready_s(iteration)
                ready_of_rank_s.append(instants_s - iteration.forward_end_s)
            ready_s.append(ready_of_rank_s)
        sent = [m.n_bytes for m in training.messages if m.in_backward]
        ends = np.searchsorted(np.cumsum(sizes), np.cumsum(sent)) + 1
        if not sizes or sum(sent) != sum(sizes) or ends[-1] != len(sizes):
            return None
        by_iteration_s = np.maximum(np.array(ready_s).transpose(1, 0, 2), 0.0)
        by_iteration_s = np.maximum.accumulate(by_iteration_s, axis=2)
        typical_s = np.median(by_iteration_s.max(axis=1), axis=0)
        backward_s = np.maximum(np.diff(typical_s, prepend=0.0), 0.0)
        workload = Workload.from_arrays(0.0, backward_s, sizes)
        current = FusionPlan("traced", tuple(ends.tolist()))
        return cls(training, cost, by_iteration_s, workload, current)

    def schedule(self, plan: FusionPlan) -> Schedule:
        """Return what the ranks would do with other buckets."""
        old = self.training.schedule
        is_first_post = [
            s.action == POST and s.phase == "backward" for s in old.segments
        ]
        first_post = is_first_post.index(True)
        n_before = old.segments[first_post].message
        n_old = sum(is_first_post)
        # Behind the posts come a mark, a wait for each message, and a mark.
        behind = first_post + 2 * n_old + 2
        n_new = len(plan.ends)
        before = old.segments[:first_post]
        after = tuple(
            s._replace(message=s.message + n_new - n_old) if s.message >= 0 else s
            for s in old.segments[behind:]
        )
        posts = [Segment("backward", POST, n_before + g) for g in range(n_new)]
        waits = [Segment("backward", WAIT, n_before + g) for g in range(n_new)]
        mark = Segment("backward", MARK)
        segments = (*before, *posts, mark, *waits, mark, *after)

        posted_s = self.ready_s[:, :, np.array(plan.ends) - 1]
        until_post_s = np.diff(posted_s, axis=2, prepend=0.0)
        backward_s = old.work_s[:, :, first_post : first_post + n_old + 1].sum(axis=2)
        rest_s = np.maximum(backward_s - posted_s[:, :, -1], 0.0)
        n_bytes = plan.group_bytes(self.workload).astype(float)
        copied_s = old.work_s[:, :, first_post + n_old + 1 : behind].sum(axis=2)
        copies_s = copied_s[:, :, None] * n_bytes / n_bytes.sum()
        no_copy_s = np.zeros((*copied_s.shape, 1))
        work_s = np.concatenate(
            [
                old.work_s[:, :, :first_post],
                until_post_s,
                rest_s[:, :, None],
                # Before the first wait nothing is copied.
                no_copy_s,
                copies_s,
                old.work_s[:, :, behind:],
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
        )

    def _message_s(self, n_bytes: Floats, n_before: int, n_old: int) -> Floats:
        """Return how long messages of other sizes take, shape (I, K), in seconds.

        Messages of a training can take longer than the cost says. Those of an iteration
        are made longer by the factor by which its own messages were.
        """
        old = self.training.schedule.message_s
        gradients = slice(n_before, n_before + n_old)
        old_bytes = self.training.message_bytes[gradients]
        factor = old[:, gradients].sum(axis=1) / np.asarray(self.cost(old_bytes)).sum()
        new_s = factor[:, None] * np.asarray(self.cost(n_bytes))
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
