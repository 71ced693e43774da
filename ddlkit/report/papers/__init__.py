"""The outcome of every claim, and by what evidence it was reached.

Each module here is one paper: its tables beside print, and one check for each claim that can be computed.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import asdict

import pandas as pd

from ddlkit.report.claims import CHECKS, OUTCOMES, Claim, Evidence, Outcome, load_claims, waiting
from ddlkit.report.outputs import format_quantity

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def evaluate(claims: Sequence[Claim] | None = None) -> pd.DataFrame:
    """One row per claim: its columns, then those of its Result, ``outcome`` and ``notebook``.

    ``low``, ``high`` are NaN for an open claim, whose ``note`` is the reason and whose ``notebook`` will
    decide it.
    """
    rows, why = [], waiting()
    for claim in load_claims() if claims is None else claims:
        check = CHECKS.get(claim.id)
        result = check() if check else None
        found = {"evidence": Evidence.NONE, "low": math.nan, "high": math.nan, "grade": ""}
        found |= asdict(result) if result else {"note": why["why"].get(claim.id, "")}
        notebook = "" if result else why["notebook"].get(claim.id, "")
        outcome = claim.outcome(result)
        rows.append({**asdict(claim), **found, "outcome": outcome, "notebook": notebook})
    texts = {"evidence": str, "outcome": str}
    return in_order(pd.DataFrame(rows).astype(texts))


def counts(verdicts: pd.DataFrame) -> pd.DataFrame:
    """How many claims had each outcome, by evidence, in the order of both; row and column "all" are sums."""
    table = pd.crosstab(verdicts["evidence"], verdicts["outcome"])
    names = [str(one) for one in Evidence], [str(one) for one in Outcome]
    found = table.reindex(index=names[0], columns=names[1], fill_value=0)
    found.loc["all"] = found.sum()
    return found.assign(all=found.sum(axis=1))


def key_numbers(verdicts: pd.DataFrame) -> dict[str, int]:
    """``counts`` by name, as evidence_outcome, then how many are open, and how many there are in all."""
    table = counts(verdicts)
    found = {
        f"{evidence.name}_{outcome}".lower(): int(table.loc[str(evidence), outcome])
        for evidence in Evidence
        for outcome in OUTCOMES.get(evidence, ())
    }
    is_open = verdicts["outcome"] == Outcome.OPEN
    return {**found, "open": int(is_open.sum()), "claims": len(verdicts)}


def counts_markdown(verdicts: pd.DataFrame) -> str:
    """``counts`` as a Markdown table; empty cells for none."""
    table = counts(verdicts)
    lines = [_line(["evidence", *(str(name) for name in table.columns)])]
    lines.append("|---" + "|--:" * table.shape[1] + "|")
    for name, row in table.iterrows():
        lines.append(_line([str(name), *(str(n) if n else "" for n in row)]))
    return "\n".join(lines) + "\n"


def computed(row: pd.Series) -> str:
    """What was computed for a claim, as readers see it: a number, a range, or a bound.

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


def printed(row: pd.Series) -> str:
    """What the paper prints for a claim, with its relation where that is one-sided."""
    sign = {"<=": "≤ ", ">=": "≥ "}.get(row["relation"], "")
    return sign + format_quantity(row["value"], row["unit"])


def shown(verdicts: pd.DataFrame) -> list[dict[str, str]]:
    """The verdicts as cells for readers: ``printed`` and ``computed`` with their units."""
    cells = verdicts.apply(lambda row: {"printed": printed(row), "computed": computed(row)}, axis=1)
    rows = verdicts.to_dict("records")
    return [{**row, **found} for row, found in zip(rows, cells, strict=True)]


def markdown(verdicts: pd.DataFrame) -> str:
    """The verdicts as a Markdown table, strongest evidence first."""
    names = "claim place quantity printed computed evidence outcome errata note"
    head = names.split()
    lines = [_line(head), "|---" * len(head) + "|"]
    for row in shown(verdicts):
        condition = f" ({row['condition']})" if row["condition"] else ""
        evidence = ", ".join(filter(None, (row["evidence"], row["grade"])))
        note = f"{row['notebook']}: {row['note']}" if row["notebook"] else row["note"]
        named = (
            row["id"],
            row["place"],
            row["quantity"] + condition,
            row["printed"],
            row["computed"],
        )
        lines.append(_line([*named, evidence, row["outcome"], row["errata"], note]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def in_order(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Strongest evidence first, otherwise in the order of the files."""
    rank = {str(one): place for place, one in enumerate(Evidence)}
    ordered = verdicts.sort_values("evidence", key=lambda e: e.map(rank), kind="stable")
    return ordered.reset_index(drop=True)
