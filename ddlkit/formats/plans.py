"""Plans, as ``ddlkit plan --json`` writes them."""

from __future__ import annotations

from collections import Counter
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
        If the file is not such JSON, or if the groups do not contain every tensor once.
    """
    path = Path(path)
    advice = "write it by ddlkit plan --json"
    document = files.read_json(path, advice)
    groups: Any = document.get("groups") if isinstance(document, dict) else None
    problem = _problem_of_groups(groups)
    if problem:
        raise UserError(f"{path}: not a plan: {problem}: {advice}")
    # A plan that does not name its planner is called like its file.
    planner = str(document.get("planner", path.stem))
    # A FusionPlan counts tensors in ready order, from the last one, and has the exclusive
    # end of each group.
    ends = tuple(accumulate(len(group) for group in groups))
    last = ends[-1] - 1
    # A group is one message, so that the order of the tensors within a group does not matter.
    order = tuple(last - tensor for group in groups for tensor in sorted(group)[::-1])
    # A plan in ready order states no order of its own.
    if order == tuple(range(ends[-1])):
        return FusionPlan(planner, ends)
    return FusionPlan(planner, ends, order=order)


def _problem_of_groups(groups: Any) -> str:
    """Return in words why a value does not have every tensor once, "" if it does.

    The value should be a list of groups, each of which is a list of tensors that is not empty.
    Tensors are whole numbers from 0.
    """
    if not isinstance(groups, list) or not groups:
        return 'it has no groups, as in {"groups": [[2], [1, 0]]}'
    for number, group in enumerate(groups):
        if not isinstance(group, list) or not group:
            return f"group {number} (counted from 0) is {shown(group)}, and no list of tensors"
    tensors = [tensor for group in groups for tensor in group]
    for tensor in tensors:
        # JSON also has true and false, which count as whole numbers in Python.
        if type(tensor) is not int or tensor < 0:
            return (
                f"a group has {shown(tensor)}: groups have the numbers of tensors, counted from "
                "0 in forward order"
            )
    several = [tensor for tensor, times in Counter(tensors).items() if times > 1]
    if several:
        return f"tensor {min(several)} (counted from 0) is in the groups more than once"
    # If no tensor is missing, the numbers are those below the number of tensors.
    missing = set(range(len(tensors))) - set(tensors)
    if missing:
        return f"tensor {min(missing)} (counted from 0) is in none of the groups"
    return ""
