"""Plans as ``ddlkit plan --json`` writes them, and what a batch costs before training sees it."""

from __future__ import annotations

import contextlib
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

from ddlkit import store
from ddlkit.core.errors import UserError, shown
from ddlkit.core.plan import FusionPlan
from ddlkit.core.units import KIB
from ddlkit.store.files import read_json

QUANTITIES = {"io_s": "read", "decode_s": "decode", "h2d_s": "h2d"}
"""Task of training's graph -> quantity of the table of inputs."""
BEST = ("cold files", "one core", "pinned")
"""Of several ways that were measured the one that training takes: a file a picture, pinned memory."""


def is_file(spec: str) -> bool:
    """Return whether a plan is asked for by a file, of any suffix if it is there, not by its planner.

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
    """Return the plan in a file: groups of tensors in forward order, counted from 0.

    Raises UserError for another file, and for groups that are not neighbours from the last tensor to the
    first.
    """
    described = read_json(path, "write it by ddlkit plan --json")
    groups: Any = described.get("groups") if isinstance(described, dict) else None
    if not (isinstance(groups, list) and groups and all(isinstance(g, list) and g for g in groups)):
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
    """Return the plan's name itself. Raises UserError for a buffer of a few bytes, which nobody means."""
    sized = re.fullmatch(r"buffer:\s*([0-9]*\.?[0-9]+)\s*(:.*)?", spec)
    if sized and 0 < float(sized[1]) < KIB:
        size, rest = sized[1], sized[2] or ""
        forms = f"buffer:{size}MB{rest}, or buffer:{size}B{rest} if bytes are meant"
        raise UserError(f"plan {spec!r}: a buffer of {size} bytes: write {forms}")
    return spec


def read_inputs(path: Path, batch: int) -> dict[str, float]:
    """Return median seconds of io_s, decode_s and h2d_s for ``batch`` pictures, as far as they were measured.

    A picture takes its part of the measured batch. Of pictures stored in two forms it is the JPEG's: what
    is stored raw is not decoded. Raises UserError for a table of something else, or of none of the three.
    """
    rows = store.load_table(path, "inputs")
    rows = rows[(rows["ranks"] == 1) | (rows["quantity"] == "decode")]
    rows = rows[rows["how"].isin(BEST) & (rows["stored"] != "raw")]
    each_s = (rows["seconds"] / rows["batch"]).groupby(rows["quantity"]).median()
    known = {name: batch * float(each_s[of]) for name, of in QUANTITIES.items() if of in each_s}
    if not known:
        raise UserError(
            f"{path}: tells of no reading, decoding or copying: give inputs-alone-*.csv"
        )
    return known
