"""The verdict on every claim: reproduced, differs, or not attempted.

Each module here is one paper: its tables beside print, and one check for each claim that can be computed.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import asdict

import pandas as pd

from ddlkit.report.claims import CHECKS, VERDICTS, Claim, load_claims, reasons
from ddlkit.report.outputs import format_quantity

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def evaluate(claims: Sequence[Claim] | None = None) -> pd.DataFrame:
    """One row per claim: its columns, ``computed`` (NaN if not attempted), ``difference`` (relative),
    ``verdict`` and ``note`` (why not, if not attempted)."""
    rows, why = [], reasons()
    for claim in load_claims() if claims is None else claims:
        check = CHECKS.get(claim.id)
        computed, note = check() if check else (None, why.get(claim.id, ""))
        shown = math.nan if computed is None else float(computed)
        difference = (shown - claim.value) / claim.value if claim.value else shown
        verdict = claim.verdict(computed)
        row = {"computed": shown, "difference": difference, "verdict": verdict, "note": note}
        rows.append({**asdict(claim), **row})
    return pd.DataFrame(rows)


def counts(verdicts: pd.DataFrame) -> dict[str, int]:
    """How many claims got each verdict."""
    return {name: int((verdicts["verdict"] == name).sum()) for name in VERDICTS}


def markdown(verdicts: pd.DataFrame) -> str:
    """The verdicts as a Markdown table, attempted claims first."""
    head = ("claim", "place", "quantity", "printed", "computed", "verdict", "note")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in in_order(verdicts).itertuples():
        condition = f" ({row.condition})" if row.condition else ""
        printed, computed = (format_quantity(v, row.unit) for v in (row.value, row.computed))
        named = row.id, row.place, row.quantity + condition
        cells = (*named, printed, computed, row.verdict, row.note)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def in_order(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Attempted claims first, otherwise in the order of the files."""
    return verdicts.sort_values("verdict", key=lambda v: v == "not attempted", kind="stable")
