"""Plans as ``ddlkit plan --json`` writes them."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError, shown
from ddlkit.core.plan import FusionPlan
from ddlkit.store import files


def read_plan(path: Path) -> FusionPlan:
    """Return the plan in a file of ``ddlkit plan --json``: groups of tensors in forward order, from 0."""
    advice = "write it by ddlkit plan --json"
    described = files.read_json(path, advice)
    groups: Any = described.get("groups") if isinstance(described, dict) else None
    if not (
        isinstance(groups, list)
        and groups
        and all(isinstance(g, list) and g for g in groups)
    ):
        raise UserError(f"{path}: not a plan: it has no groups: {advice}")
    plan = FusionPlan(
        str(described.get("planner", path.stem)), tuple(accumulate(map(len, groups)))
    )
    for number, (group, wanted) in enumerate(
        zip(groups, plan.forward_groups(), strict=True)
    ):
        if group not in (wanted, wanted[::-1]):
            problem = f"group {number} is {shown(group)}, expected {shown(wanted)}"
            raise UserError(f"{path}: {problem}: every tensor once, the last first")
    return plan
