"""Which tensors travel together: adaFusion (osf Eq 17) and MG-WFBP, registered with core.plan.

All of them walk through the tensors in ready order and let the next one join the message that is being
filled if waiting for it takes less than the start-up that one message fewer saves,

    t_update(B) + t_update(D) - t_update(B + D)        (delta under osf Eq 7),

and differ only in what they take for the wait:

    adafusion            osf Eq 17 as printed: t_wait^(i) of Eq 14, without buffer limit and timeout
    adafusion:repaired   osf Eq 17 with the index i + 1: the backward time of the tensor that joins
    mg_wfbp              the published rule: from when the message could start, on a link that may be busy
    mg_wfbp:osf          as osf Section 4.2 has it: the backward time of the tensor that joins, but
                         against the whole communication time of the message and one start-up
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ddlkit.core.cost import MessageCost
from ddlkit.core.plan import FusionPlan, needed_cost, planner
from ddlkit.core.workload import Workload
from ddlkit.papers.osf import fusing_pays, of_workload, wait_s

Rule = Callable[[int, float, float], bool]
"""(next tensor, bytes in the message so far, when it could start) -> whether the tensor joins."""


@planner("adafusion", label="adaFusion", variants=("repaired",), look=("#d55e00", "h", ":", "+++"))
def adafusion(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """osf Eq 17 tensor by tensor; printed, its wait is zero without buffer limit and timeout."""
    known = needed_cost(cost, "adafusion")
    sizes, backward_s = of_workload(workload)
    waits = workload.backward_s if text else wait_s(sizes, backward_s, math.inf, math.inf)[::-1]

    def joins(i: int, filled: float, start_s: float) -> bool:
        return fusing_pays(known, filled, float(workload.bytes[i]), float(waits[i]))

    return _merged(f"adafusion:{text}" if text else "adafusion", workload, known, joins)


@planner("mg_wfbp", label="MG-WFBP", variants=("osf",), look=("#7fc4ee", "^", "--", "\\\\\\"))
def mg_wfbp(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Merge while the next gradient is ready before the start-up of this message would be over.

    With tau_c the earliest start of the message (its gradients ready, the link free), a the start-up
    and ready the next gradient's readiness: merge if ready - tau_c < a (Shi, Chu and Li, INFOCOM 2019;
    TPDS 2021). For a cost that is not linear, a is what merging saves. "osf": merge if the next tensor's
    backward takes less than the message's communication plus one start-up.
    """
    known = needed_cost(cost, "mg_wfbp")

    def published(i: int, filled: float, start_s: float) -> bool:
        waited_s = float(workload.ready_s[i]) - start_s
        return fusing_pays(known, filled, float(workload.bytes[i]), waited_s)

    def described(i: int, filled: float, start_s: float) -> bool:
        size = float(workload.bytes[i])
        start_up_s = known(filled) + known(size) - known(filled + size)
        return bool(workload.backward_s[i] < known(filled) + start_up_s)

    name, rule = ("mg_wfbp:osf", described) if text else ("mg_wfbp", published)
    return _merged(name, workload, known, rule)


def _merged(name: str, workload: Workload, cost: MessageCost, joins: Rule) -> FusionPlan:
    """The plan of a rule that decides tensor by tensor, in ready order."""
    sizes, ready_s = workload.bytes.tolist(), workload.ready_s.tolist()
    ends: list[int] = []
    free_s, filled = 0.0, float(sizes[0])
    for i in range(1, workload.n):
        start_s = max(free_s, ready_s[i - 1])
        if joins(i, filled, start_s):
            filled += sizes[i]
        else:
            ends.append(i)
            free_s, filled = start_s + cost(filled), float(sizes[i])
    return FusionPlan(name, (*ends, workload.n))
