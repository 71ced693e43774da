"""Plans, as ``ddlkit plan --json`` writes them."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError, shown
from ddlkit.core.plan import FusionPlan
from ddlkit.store import files


def read_plan(path: Path | str) -> FusionPlan:
    """Return the plan in a file: which gradients are sent together, and in which order.

    Parameters
    ----------
    path : Path or str
        JSON with "groups": lists of tensors, which are numbered from 0 in forward
        order. The group that is sent first comes first.

    Returns
    -------
    FusionPlan
        The plan.

    Raises
    ------
    UserError
        If the file is not such JSON, or if the groups do not contain every tensor once,
        from the last one to the first.
    """
    path = Path(path)
    advice = "write it by ddlkit plan --json"
    document = files.read_json(path, advice)
    groups: Any = document.get("groups") if isinstance(document, dict) else None
    if not _is_list_of_groups(groups):
        raise UserError(f"{path}: not a plan: it has no groups: {advice}")
    # A plan that does not name its planner is called like its file.
    planner = str(document.get("planner", path.stem))
    # A FusionPlan counts tensors in ready order, from the last one, and has the exclusive
    # end of each group. Only the sizes of the groups in the file are needed for it.
    ends = tuple(accumulate(len(group) for group in groups))
    plan = FusionPlan(planner, ends)
    # The groups that the file must have: the tensors of each, numbered in forward order.
    for number, expected in enumerate(plan.forward_groups()):
        group = groups[number]
        # Within a group, tensors may be listed from the last to the first or reversed.
        if group not in (expected, expected[::-1]):
            raise UserError(
                f"{path}: group {number} (counted from 0) is {shown(group)}, but the groups "
                f"of a plan have every tensor once, from the last to the first, so that "
                f"{shown(expected)} belongs there: {advice}"
            )
    return plan


def _is_list_of_groups(groups: Any) -> bool:
    """Return whether a value is a list of lists, none of which is empty."""
    if not isinstance(groups, list) or not groups:
        return False
    return all(isinstance(group, list) and group for group in groups)
