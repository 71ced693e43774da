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


def _read_gamma(rule: str) -> float | None:
    """Return the seconds of the gamma that a rule of `_omgs` gives, or None if it gives none.

    Raises UserError for a rule that is neither known nor a time.
    """
    if rule in ("", "code", "theorem"):
        return None
    return parse_seconds(rule)


@planner(
    "omgs",
    examples=("omgs", "omgs:code", "omgs:theorem", "omgs:0.22ns"),
    read=_read_gamma,
)
def _omgs(workload: Workload, cost: MessageCost | None, rule: str) -> FusionPlan:
    """Return the plan of omgs Algorithm 1 or of one of its variants.

    Parameters
    ----------
    workload : Workload
        One iteration.
    cost : MessageCost
        The time of a message, which this planner needs.
    rule : str
        What follows "omgs:" in the name of the plan. "" is Algorithm 1, "code" is the
        rule of the published code, and "theorem" is Eq 25 alone. A time such as "0.22ns"
        is Algorithm 1 with this gamma of a selection, in place of the selection that the
        cost has.
    """
    gamma_s = _read_gamma(rule)
    # `needed_cost` refuses a missing cost.
    instance = of_planning(workload, needed_cost(cost, "omgs"), gamma_s)
    if rule == "theorem":
        merged = merge_by_theorem(instance)
    else:
        merged = find_merged_layers(instance, by_code=rule == "code")
    name = f"omgs:{rule}" if rule else "omgs"
    return plan_of(merged, name)


def _read_threshold(threshold: str) -> int:
    """Return the elements of a text such as "8192". Raises UserError if it is no whole number above 0."""
    if not (threshold.isdecimal() and int(threshold)):
        raise UserError(
            f"plan 'mgs:{threshold}': write mgs:8192, elements from which a group is sent"
        )
    return int(threshold)


@planner("mgs", examples=("mgs:8192",), read=_read_threshold)
def _mgs(workload: Workload, cost: MessageCost | None, threshold: str) -> FusionPlan:
    """Return the plan of MGS-SGD (omgs V-D).

    Parameters
    ----------
    workload : Workload
        One iteration.
    cost : MessageCost, optional
        The time of a message, which does not matter here.
    threshold : str
        How many elements layers must have together to be sent as a message.

    Raises
    ------
    UserError
        If ``threshold`` is no whole number above 0.
    """
    least_elements = _read_threshold(threshold)
    # Each message has at least ``threshold`` elements, but for the last one. For example,
    # layers of 10, 5, 5 and 3 elements in ready order are sent as 10, 10 and 3 if the
    # threshold is 10.
    message_sizes = merge_up_to(workload.parameters.tolist(), least_elements)
    # The sums of the messages are 10, 20 and 23, and those of the layers 10, 15, 20 and 23.
    # Each sum of messages is thus found among those of the layers, at the last layer of its
    # message.
    sent_elements = np.cumsum(message_sizes)
    ready_elements = np.cumsum(workload.parameters)
    last_layers = np.searchsorted(ready_elements, sent_elements)
    # A plan has the exclusive end of each message, here 1, 3 and 4.
    ends = last_layers + 1
    return FusionPlan(f"mgs:{threshold}", tuple(ends.tolist()))
