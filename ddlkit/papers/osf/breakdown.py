"""Where communication time goes (osf Section 3.3): NEGOTIATE, ALLREDUCE, WAIT and MISC, simulated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.simulate import group_ends, group_times
from ddlkit.core.timeline import merge
from ddlkit.core.workload import Workload

Floats = NDArray[np.float64]
PHASES = ("NEGOTIATE", "ALLREDUCE", "WAIT", "MISC")


def breakdown(
    workload: Workload,
    plan: FusionPlan,
    cost: MessageCost,
    *,
    waited_s: Floats | None = None,
    slowest: float = 1.0,
    negotiate_s: float = 0.0,
) -> dict[str, float]:
    """Seconds of each phase for a rank of usual speed, from its first gradient to the last message's end.

    A message leaves when its last gradient is ready on the slowest rank (``slowest`` times slower) and
    its order has been agreed on (``negotiate_s``), after ``waited_s`` (G,) in vain for one more tensor.
    Each moment counts once, for the first of these that holds:

        ALLREDUCE   a message is on its way
        WAIT        a gradient is in the buffer for others to join it
        NEGOTIATE   a complete message is held up by the slowest rank or by the agreement
        MISC        none of these: nothing to send, the rank computes

    Raises UserError if the slowest rank is faster than the usual one, or a time is negative.
    """
    if slowest < 1 or negotiate_s < 0:
        raise UserError(f"slowest rank {slowest} times, {negotiate_s} s: must be >= 1 and >= 0")
    ready_s, communication_s = group_times(workload, plan, cost)
    waited = np.zeros_like(ready_s) if waited_s is None else waited_s
    leave_s = slowest * ready_s + waited + negotiate_s
    end_s = group_ends(leave_s, communication_s)
    first_s = workload.ready_s[np.array(plan.starts)]
    phases = {
        "ALLREDUCE": (end_s - communication_s, end_s),
        "WAIT": (first_s, ready_s + waited),
        "NEGOTIATE": (ready_s + waited, leave_s),
    }
    found, covered, spans = {}, 0.0, np.empty((0, 2))
    for phase, (start, stop) in phases.items():
        spans = merge(np.concatenate([spans, np.column_stack([start, np.maximum(start, stop)])]))
        length = float(np.sum(spans[:, 1] - spans[:, 0]))
        found[phase], covered = length - covered, length
    found["MISC"] = float(end_s[-1] - workload.ready_s[0]) - covered
    return {phase: max(found[phase], 0.0) for phase in PHASES}
