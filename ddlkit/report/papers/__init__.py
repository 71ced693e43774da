"""The outcome of every claim, and by what evidence it was reached.

Each module here is one paper: its tables beside print, and one check for each claim that can be computed.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

import pandas as pd

from ddlkit.report import claims
from ddlkit.report.claims import Claim, Evidence, Outcome, Result
from ddlkit.report.outputs import format_quantity

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def evaluate(listed: Sequence[Claim] | None = None) -> pd.DataFrame:
    """Return a row per claim, strongest evidence first: its columns, its Result's, outcome and notebook.

    Of an open claim low and high are NaN, ``note`` is the reason, and ``notebook`` will decide it.
    """
    undecided = claims.waiting().rename(columns={"why": "note"}).to_dict("index")
    nothing = {"evidence": Evidence.NONE, "low": math.nan, "high": math.nan, "grade": ""}
    rows = []
    for claim in claims.load_claims() if listed is None else listed:
        result = _result(claim.id)
        cells = {**asdict(result), "notebook": ""} if result else nothing | undecided[claim.id]
        rows.append({**asdict(claim), **cells, "outcome": claim.outcome(result)})
    table = pd.DataFrame(rows).astype({"evidence": str, "outcome": str})
    return table.sort_values(
        "evidence", key=lambda names: names.map([*Evidence].index), kind="stable", ignore_index=True
    )


@cache
def _result(claim: str) -> Result | None:
    return claims.CHECKS[claim]() if claim in claims.CHECKS else None


def counts(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return how many claims had each outcome, by evidence; row and column "all" are sums."""
    table = pd.crosstab(verdicts["evidence"], verdicts["outcome"])
    table = table.reindex(index=[*map(str, Evidence)], columns=[*map(str, Outcome)], fill_value=0)
    table.loc["all"] = table.sum()
    return table.assign(all=table.sum(axis=1))


def key_numbers(verdicts: pd.DataFrame) -> dict[str, int]:
    """Return `counts` by name, as evidence_outcome, then how many are open, and how many in all."""
    table, numbers = counts(verdicts), {}
    for evidence in [*Evidence][:-1]:
        firm = evidence in claims.FIRM
        for outcome in ("reproduced", "differs") if firm else ("compatible", "contradicted"):
            numbers[f"{evidence.name.lower()}_{outcome}"] = int(table.loc[str(evidence), outcome])
    return {**numbers, "open": int(table.loc["all", "open"]), "claims": len(verdicts)}


def computed(row: pd.Series) -> str:
    """Return what was computed for a claim, as readers see it: a number, a range, or a bound.

    >>> cells = {"low": 7.0, "high": 7.0, "unit": "%"}
    >>> computed(pd.Series(cells)), computed(pd.Series({**cells, "high": 8.0}))
    ('7%', '7 to 8%')
    >>> computed(pd.Series({**cells, "high": math.inf}))
    'at least 7%'
    """
    low, high = (format_quantity(row[end], row["unit"]) for end in ("low", "high"))
    if low == high:
        return low
    if not low or not high:
        return f"at least {low}" if low else f"at most {high}"
    return f"{format_quantity(row['low'], '1')} to {high}"


def shown(verdicts: pd.DataFrame) -> list[dict[str, str]]:
    """Return the verdicts as cells for readers: ``printed`` and ``computed`` with their units."""
    sign = verdicts["relation"].map({"<=": "≤ ", ">=": "≥ ", "=": ""})
    printed = [*map(format_quantity, verdicts["value"], verdicts["unit"])]
    table = verdicts.assign(printed=sign + printed, computed=verdicts.apply(computed, axis=1))
    return table.to_dict("records")
