"""Where communication time goes (osf Section 3.3): NEGOTIATE, ALLREDUCE, WAIT and MISC.

`breakdown` simulates it, `of_timeline` reads it off spans, measured or simulated. Both count each moment
from a rank's first gradient to the last message's end once, for the first of these that holds:

    ALLREDUCE   a message is on its way
    WAIT        a gradient is in the buffer for others to join it
    NEGOTIATE   a complete message is held up by the slowest rank or by the agreement
    MISC        none of these: nothing to send, the rank computes
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import PLAIN, Iteration
from ddlkit.core.link import Link
from ddlkit.core.plan import FusionPlan
from ddlkit.core.timeline import COMMUNICATION, Timeline, merge
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
    link: Link = PLAIN,
) -> dict[str, float]:
    """Seconds of each phase for a rank of usual speed, from its first gradient to the last message's end.

    A message leaves when its last gradient is ready on the slowest rank (``slowest`` times slower) and
    its order has been agreed on (``negotiate_s``), after ``waited_s`` (G,) in vain for one more tensor.
    Messages go one by one; ``link`` knows whether one that rested has saved credit.

    Raises UserError if the slowest rank is faster than the usual one, a time is negative, or messages are
    several at a time.
    """
    if slowest < 1 or negotiate_s < 0:
        raise UserError(f"slowest rank {slowest} times, {negotiate_s} s: must be >= 1 and >= 0")
    if link.in_flight > 1:
        raise UserError(f"breakdown: one message at a time, not {link.in_flight}")
    ready_s = plan.group_ready_s(workload)
    waited = np.zeros_like(ready_s) if waited_s is None else waited_s
    leave_s = slowest * ready_s + waited + negotiate_s
    end_s = Iteration(workload, plan, cost, link, leave_s=leave_s).ends_s
    begin_s = np.maximum(leave_s, np.concatenate([[0.0], end_s[:-1]]))
    first_s = workload.ready_s[np.array(plan.starts)]
    phases = {
        "ALLREDUCE": _spans(begin_s, end_s),
        "WAIT": _spans(first_s, ready_s + waited),
        "NEGOTIATE": _spans(ready_s + waited, leave_s),
    }
    return _each_moment_once(phases, float(end_s[-1] - workload.ready_s[0]))


def of_timeline(timeline: Timeline, rank: int = 0) -> dict[str, float]:
    """Seconds of each phase for that rank, in the timeline of one iteration.

    A group lies in the buffer from the end of its first "backward" span to the end of its last one;
    "negotiate" spans are from when a rank has a group complete until it may be sent. Without a
    negotiation, what a message waits for slower ranks is part of ALLREDUCE: it is on its way.

    Raises UserError for a rank without messages, or without the backward pass before them.
    """
    mine = timeline.select(timeline.rank == rank)
    messages, backward = mine.spans(COMMUNICATION), mine.select(mine.kind == "backward")
    if not (len(messages) and backward.n):
        raise UserError(f"breakdown: rank {rank} has no messages, or no backward pass")
    ends = [backward.end_s[backward.group == group] for group in np.unique(backward.group)]
    buffered = _spans(np.array([end.min() for end in ends]), np.array([end.max() for end in ends]))
    phases = {"ALLREDUCE": messages, "WAIT": buffered, "NEGOTIATE": mine.spans(("negotiate",))}
    return _each_moment_once(phases, float(messages[-1, 1] - backward.end_s.min()))


def _spans(start_s: Floats, end_s: Floats) -> Floats:
    return np.column_stack([start_s, np.maximum(start_s, end_s)])


def _each_moment_once(phases: Mapping[str, Floats], total_s: float) -> dict[str, float]:
    """Length of each phase less what earlier ones cover; MISC is what remains of ``total_s``."""
    found, covered_s, seen = {}, 0.0, np.empty((0, 2))
    for phase, spans in phases.items():
        seen = merge(np.concatenate([seen, spans]))
        length_s = float(np.sum(seen[:, 1] - seen[:, 0]))
        found[phase], covered_s = length_s - covered_s, length_s
    found["MISC"] = total_s - covered_s
    return {phase: max(found[phase], 0.0) for phase in PHASES}
