"""Plans as they are written on a command line or kept in a file: what ``ddlkit plan --json`` prints."""

from __future__ import annotations

import contextlib
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError, shown
from ddlkit.core.plan import FusionPlan
from ddlkit.core.units import KIB
from ddlkit.store.files import read_json


def is_file(spec: str) -> bool:
    """Whether a plan is asked for by a file, of any suffix if it is there, not by its planner.

    >>> is_file("plan.json"), is_file("buffer:25MB")
    (True, False)
    """
    path = Path(spec)
    if path.suffix == ".json":
        return True
    with contextlib.suppress(OSError):  # of a name that no file can have
        return bool(path.suffix) and path.is_file()
    return False


def read_plan(path: Path) -> FusionPlan:
    """The plan in a file of ``ddlkit plan --json``: groups of tensors in forward order, counted from 0.

    Raises UserError for another file, and for groups that are not neighbours from the last tensor to the
    first.
    """
    described = read_json(path, "write it by ddlkit plan --json")
    groups: Any = described.get("groups") if isinstance(described, dict) else None
    good = isinstance(groups, list) and groups and all(isinstance(g, list) and g for g in groups)
    if not good:
        raise UserError(f"{path}: not a plan: it has no groups: write it by ddlkit plan --json")
    plan = FusionPlan(str(described.get("planner", path.stem)), tuple(accumulate(map(len, groups))))
    for number, (group, wanted) in enumerate(zip(groups, plan.forward_groups(), strict=True)):
        if group not in (wanted, wanted[::-1]):
            raise UserError(
                f"{path}: group {number} is {_short(group)}, expected {_short(wanted)}: every tensor "
                "once, the last of the forward pass first"
            )
    return plan


def _short(group: list[Any]) -> str:
    return shown(group) if len(group) <= 4 else f"{shown(group[:3])[:-1]}, ..., {shown(group[-1])}]"


def with_unit(spec: str) -> str:
    """The plan's name itself. Raises UserError for a buffer of a few bytes, which nobody means.

    >>> with_unit("buffer:25MB")
    'buffer:25MB'
    """
    found = re.fullmatch(r"buffer:\s*([0-9]*\.?[0-9]+)\s*(:.*)?", spec)
    if found and 0 < float(found[1]) < KIB:
        size, rest = found[1], found[2] or ""
        raise UserError(
            f"plan {spec!r}: a buffer of {size} bytes: write buffer:{size}MB{rest}, or "
            f"buffer:{size}B{rest} if bytes are meant"
        )
    return spec
