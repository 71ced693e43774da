"""The planners OMGS-SGD and MGS-SGD, which importing this module registers."""

from __future__ import annotations

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan, needed_cost, planner
from ddlkit.core.units import parse_seconds
from ddlkit.core.workload import Workload
from workbook.omgs.equations import (
    find_merged_layers,
    merge_by_theorem,
    merge_up_to,
    of_planning,
    plan_of,
)


@planner(
    "omgs",
    examples=("omgs", "omgs:code", "omgs:theorem", "omgs:0.22ns"),
)
def _omgs(workload: Workload, cost: MessageCost | None, rule: str) -> FusionPlan:
    """Return the plan of omgs Algorithm 1 or of one of its variants.

    Parameters
    ----------
    workload : Workload
        One iteration.
    cost : MessageCost
        The time of a message.
    rule : str
        What follows "omgs:" in the name of the plan. "" is Algorithm 1, "code" is the
        rule of the published code, and "theorem" is Eq 25 alone. A time such as "0.22ns"
        is the gamma of a selection, which replaces the selection of the cost.
    """
    gamma_s = None
    if rule not in ("", "code", "theorem"):
        gamma_s = parse_seconds(rule)
    instance = of_planning(workload, needed_cost(cost, "omgs"), gamma_s)
    if rule == "theorem":
        merged = merge_by_theorem(instance)
    else:
        merged = find_merged_layers(instance, by_code=rule == "code")
    name = f"omgs:{rule}" if rule else "omgs"
    return plan_of(merged, name)


@planner("mgs", examples=("mgs:8192",))
def _mgs(workload: Workload, cost: MessageCost | None, threshold: str) -> FusionPlan:
    """Return the plan of MGS-SGD (omgs V-D).

    Parameters
    ----------
    workload : Workload
        One iteration.
    cost : MessageCost, optional
        The time of a message, which does not matter here.
    threshold : str
        From how many elements on a merged layer is sent.
    """
    if not (threshold.isdecimal() and int(threshold)):
        raise UserError(
            f"plan 'mgs:{threshold}': write mgs:8192, elements from which a group is sent"
        )
    message_sizes = merge_up_to(workload.parameters.tolist(), int(threshold))
    # The layers are in ready order. A message ends at the layer up to which as many elements
    # are ready as this message and those before it have together. An end is the number of
    # layers up to and including this one.
    sent = np.cumsum(message_sizes)
    ready = np.cumsum(workload.parameters)
    ends = np.searchsorted(ready, sent) + 1
    return FusionPlan(f"mgs:{threshold}", tuple(ends.tolist()))
