"""The planners of the paper: importing this module registers OMGS-SGD's and MGS-SGD's."""

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
def _omgs(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return the plan of omgs Algorithm 1; "code" by the published code's rule, "theorem" by Eq 25 alone.

    ``omgs:GAMMA`` takes a time per element in place of what the cost knows of selecting.
    """
    gamma_s = parse_seconds(text) if text not in ("", "code", "theorem") else None
    instance = of_planning(workload, needed_cost(cost, "omgs"), gamma_s)
    if text == "theorem":
        merged = merge_by_theorem(instance)
    else:
        merged = find_merged_layers(instance, by_code=text == "code")
    return plan_of(merged, f"omgs:{text}" if text else "omgs")


@planner("mgs", examples=("mgs:8192",))
def _mgs(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """omgs V-D, MGS-SGD: ``mgs:THRESHOLD``, the elements from which a merged layer is sent."""
    if not (text.isdecimal() and int(text)):
        raise UserError(
            f"plan 'mgs:{text}': write mgs:8192, elements from which a group is sent"
        )
    sizes = np.cumsum(merge_up_to(workload.parameters.tolist(), int(text)))
    ends = np.searchsorted(np.cumsum(workload.parameters), sizes) + 1
    return FusionPlan(f"mgs:{text}", tuple(ends.tolist()))
