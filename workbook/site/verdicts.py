"""The outcome of every claim, and by what evidence it was reached.

Importing the papers' ``claims`` registers one check for each claim that can be computed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from workbook.common import claims, outputs
from workbook.common.claims import Claim, Evidence, Outcome, Result, Verdict
from workbook.common.outputs import format_quantity
from workbook.dag import claims as _dag
from workbook.omgs import claims as _omgs
from workbook.osf import claims as _osf
from workbook.pytorch import claims as _pytorch
from workbook.sharing import claims as _sharing

REGISTERING = (_osf, _sharing, _dag, _omgs, _pytorch)
"""Modules whose import registers the checks of their paper."""


RESULT = ("evidence", "spans", "low", "high", "grade", "interval", "judge")
NOTHING = dict.fromkeys(RESULT, "") | {
    "evidence": Evidence.NONE,
    "low": math.nan,
    "high": math.nan,
}


FILE = "verdicts.csv"
SHOWN = (
    "id",
    "place",
    "quantity",
    "condition",
    "printed",
    "computed",
    "evidence",
    "grade",
    "interval",
    "outcome",
    "errata",
    "notebook",
    "note",
)
"""The columns of FILE: what a reader sees of each claim."""


def evaluate(listed: Sequence[Claim] | None = None) -> pd.DataFrame:
    """Return a row per claim, strongest evidence first: its columns, RESULT, outcome, note and notebook.

    Of an open claim low and high are NaN, ``note`` is the reason, and ``notebook`` will decide it. A claim
    that cannot be judged is open, too, and said to be so on a line of standard error.
    """
    rows = []
    for claim in claims.load_claims() if listed is None else listed:
        try:
            cells = _cells(claim)
        except Exception as error:  # the others are still to be judged
            line = f"claim {claim.id}: could not be judged: {one_line(str(error) or repr(error))}"
            print(line, file=sys.stderr)
            cells = NOTHING | {"notebook": "", "note": line, "outcome": Outcome.OPEN}
        rows.append({**asdict(claim), **cells})
    table = pd.DataFrame(rows).astype({"evidence": str, "outcome": str})
    return table.sort_values(
        "evidence",
        key=lambda names: names.map([*Evidence].index),
        kind="stable",
        ignore_index=True,
    )


@cache
def _cells(claim: Claim) -> dict[str, Any]:
    """Return a claim's RESULT, outcome, note and notebook. Raises whatever its check does."""
    if claim.id not in claims.CHECKS:
        if claim.id not in claims.waiting().index:
            raise UserError(
                "it has no check: write one, or why not into the paper's open.csv"
            )
        notebook, why = claims.waiting().loc[claim.id, ["notebook", "why"]]
        return NOTHING | {"notebook": notebook, "note": why, "outcome": Outcome.OPEN}
    result = claims.CHECKS[claim.id]()
    verdict = _settled(claim, result)
    note = "; ".join(filter(None, [result.note, verdict.note]))
    cells = {name: getattr(result, name) for name in RESULT}
    return {**cells, "notebook": "", "note": note, "outcome": verdict.outcome}


def _settled(claim: Claim, result: Result) -> Verdict:
    """Return a claim's verdict; undecided where half the step, along one axis of its grid, changes it."""
    flips = claims.halved().query("claim == @claim.id and outcome != halved")
    verdict = claim.verdict(result)
    if flips.empty:
        return verdict
    axes = ", ".join(
        f"{row.halved} with half the step of {row.axis}" for row in flips.itertuples()
    )
    return Verdict(
        Outcome.UNDECIDED, f"{verdict.outcome} on the grid, but {axes}: {verdict.note}"
    )


def counts(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return how many claims had each outcome, by evidence; row and column "all" are sums."""
    table = pd.crosstab(verdicts["evidence"], verdicts["outcome"])
    table = table.reindex(
        index=[*map(str, Evidence)], columns=[*map(str, Outcome)], fill_value=0
    )
    table.loc["all"] = table.sum()
    return table.assign(all=table.sum(axis=1))


def key_numbers(verdicts: pd.DataFrame) -> dict[str, int]:
    """Return `counts` by name, as evidence_outcome, how many are undecided, open, and how many in all."""
    table, numbers = counts(verdicts), {}
    for evidence in [*Evidence][:-1]:
        firm = evidence in claims.FIRM
        for outcome in (
            ("reproduced", "differs") if firm else ("compatible", "contradicted")
        ):
            numbers[f"{evidence.name.lower()}_{outcome}"] = int(
                table.loc[str(evidence), outcome]
            )
    ends = {name: int(table.loc["all", name]) for name in ("undecided", "open")}
    return {**numbers, **ends, "claims": len(verdicts)}


def published(reports: Path) -> pd.DataFrame:
    """Return the verdicts as readers see them, judged only once for each report.

    The file verdicts.csv in ``reports`` is read where notebook 14 has written it; else all claims are
    judged and the file is written.

    Returns
    -------
    DataFrame
        One row per claim, all cells as text: the columns of `SHOWN`.
    """
    path = reports / FILE
    if not path.is_file():
        publish(evaluate(), reports)
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def publish(verdicts: pd.DataFrame, reports: Path | None = None) -> None:
    """Write the verdicts on all claims, as readers see them, to verdicts.csv in ``reports``."""
    table = pd.DataFrame(shown(verdicts))[[*SHOWN]]
    path = (reports or outputs.reports_dir()) / FILE
    store.atomic_write_text(path, table.to_csv(index=False, lineterminator="\n"))


def computed(row: pd.Series) -> str:
    """Return what was computed for a claim, as readers see it: a number, a few, a range, or a bound.

    >>> cells = {"spans": np.array([[7.0, 7.0]]), "low": 7.0, "high": 7.0}
    >>> cells |= {"unit": "%", "interval": ""}
    >>> computed(pd.Series(cells))
    '7%'
    >>> computed(pd.Series(cells | {"spans": np.array([[7.0, 7.0], [9.0, 9.0]]), "high": 9.0}))
    '7 or 9%'
    >>> computed(pd.Series(cells | {"spans": np.array([[7.0, math.inf]]), "high": math.inf}))
    'at least 7%'
    """
    low, high = (format_quantity(row[end], row["unit"]) for end in ("low", "high"))
    if low == high:
        return low
    if not low or not high:
        return f"at least {low}" if low else f"at most {high}"
    least, most = np.transpose(row["spans"])
    few = 1 < len(least) <= claims.FEW and (least == most).all() and not row["interval"]
    first = [
        format_quantity(value, "1") for value in (least[:-1] if few else least[:1])
    ]
    return f"{', '.join(first)} {'or' if few else 'to'} {high}"


def shown(verdicts: pd.DataFrame) -> list[dict[str, str]]:
    """Return the verdicts as cells for readers: ``printed`` and ``computed`` with their units."""
    sign = verdicts["relation"].map({"<=": "≤ ", ">=": "≥ ", "=": ""})
    printed = [*map(format_quantity, verdicts["value"], verdicts["unit"])]
    table = verdicts.assign(
        printed=sign + printed, computed=verdicts.apply(computed, axis=1)
    )
    return table.to_dict("records")
