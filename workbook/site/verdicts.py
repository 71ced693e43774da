"""The outcome of every claim, and by what evidence it was reached.

Importing the papers' ``claims`` registers one check for each claim that can be
computed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from workbook.common import claims, outputs
from workbook.common.claims import Claim, Evidence, Outcome, Result, Verdict
from workbook.common.outputs import format_quantity
from workbook.common.papers import PAPERS

# Importing the module ``claims`` of a paper registers all checks of that paper.
for _paper in PAPERS:
    import_module(f"workbook.{_paper}.claims")


RESULT = ("evidence", "spans", "low", "high", "grade", "interval", "judge")
"""The properties of a `Result` that a row of verdicts has."""
NOTHING = {
    **dict.fromkeys(RESULT, ""),
    "evidence": Evidence.NONE,
    "low": math.nan,
    "high": math.nan,
}
"""The same for a claim without a result."""
FILE = "verdicts.csv"
"""The file in the reports directory that has all verdicts."""
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
    """Judge claims.

    Parameters
    ----------
    listed : sequence of Claim, optional
        The claims. By default all.

    Returns
    -------
    DataFrame
        A row for each claim, the strongest evidence first. The columns are the fields
        of the claim, RESULT, ``outcome``, ``note`` and ``notebook``. For an open claim,
        ``low`` and ``high`` are NaN, ``note`` has the reason, and ``notebook`` is the one
        that will decide the claim. A claim that cannot be judged is open, too, and a
        line of standard error says why.
    """
    if listed is None:
        listed = claims.load_claims()
    rows = []
    for claim in listed:
        # A check that fails must not keep the other claims from being judged.
        try:
            cells = _cells(claim)
        except Exception as error:
            reason = one_line(str(error) or repr(error))
            note = f"claim {claim.id}: could not be judged: {reason}"
            print(note, file=sys.stderr)
            cells = _open_cells(notebook="", note=note)
        rows.append({**asdict(claim), **cells})
    table = pd.DataFrame(rows).astype({"evidence": str, "outcome": str})
    strongest_first = [*Evidence]
    return table.sort_values(
        "evidence",
        key=lambda names: names.map(strongest_first.index),
        kind="stable",
        ignore_index=True,
    )


def _open_cells(notebook: str, note: str) -> dict[str, Any]:
    """Return RESULT, outcome, note and notebook of an open claim."""
    return {**NOTHING, "notebook": notebook, "note": note, "outcome": Outcome.OPEN}


@cache
def _cells(claim: Claim) -> dict[str, Any]:
    """Return RESULT, outcome, note and notebook of a claim. Raises what its check raises."""
    if claim.id not in claims.CHECKS:
        open_claims = claims.waiting()
        if claim.id not in open_claims.index:
            raise UserError(
                "it has no check: write one, or why not into the paper's open.csv"
            )
        notebook, why = open_claims.loc[claim.id, ["notebook", "why"]]
        cells = _open_cells(notebook, why)
        if claim.id in claims.repeats().index:
            cells["outcome"] = Outcome.NOT_TESTABLE
        return cells
    compute_result = claims.CHECKS[claim.id]
    result = compute_result()
    verdict = _settled(claim, result)
    notes = [note for note in (result.note, verdict.note) if note]
    cells = {name: getattr(result, name) for name in RESULT}
    cells["notebook"] = ""
    cells["note"] = "; ".join(notes)
    cells["outcome"] = verdict.outcome
    return cells


def _settled(claim: Claim, result: Result) -> Verdict:
    """Return the verdict on a claim.

    A claim that another one already judges is not testable. A claim is undecided if the
    outcome changes with half the step along an axis of the grid of settings.
    """
    repeats = claims.repeats()
    if claim.id in repeats.index:
        judged_by, why = repeats.loc[claim.id, ["judged_by", "why"]]
        return Verdict(Outcome.NOT_TESTABLE, f"the same {why} as {judged_by}")
    verdict = claim.verdict(result)
    halved = claims.halved()
    changes = halved["outcome"] != halved["halved"]
    changed = halved[(halved["claim"] == claim.id) & changes]
    if changed.empty:
        return verdict
    outcomes = []
    for row in changed.itertuples():
        outcomes.append(f"{row.halved} with half the step of {row.axis}")
    return Verdict(
        Outcome.UNDECIDED,
        f"{verdict.outcome} on the grid, but {', '.join(outcomes)}: {verdict.note}",
    )


def counts(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Count claims.

    Parameters
    ----------
    verdicts : DataFrame
        The rows of `evaluate`.

    Returns
    -------
    DataFrame
        How many claims had each outcome (the columns), by evidence (the rows). The row
        and the column "all" are sums.
    """
    table = pd.crosstab(verdicts["evidence"], verdicts["outcome"])
    kinds = [str(evidence) for evidence in Evidence]
    outcomes = [str(outcome) for outcome in Outcome]
    table = table.reindex(index=kinds, columns=outcomes, fill_value=0)
    table.loc["all"] = table.sum()
    return table.assign(all=table.sum(axis=1))


def key_numbers(verdicts: pd.DataFrame) -> dict[str, int]:
    """Return `counts` as key numbers.

    Parameters
    ----------
    verdicts : DataFrame
        The rows of `evaluate`.

    Returns
    -------
    dict of str to int
        The counts under names such as "measured_reproduced", how many claims are
        ``undecided`` and ``open``, and how many ``claims`` there are.
    """
    table = counts(verdicts)
    numbers = {}
    for evidence in Evidence:
        if evidence is Evidence.NONE:
            continue
        if evidence in claims.FIRM:
            outcomes = (Outcome.REPRODUCED, Outcome.DIFFERS)
        else:
            outcomes = (Outcome.COMPATIBLE, Outcome.CONTRADICTED)
        for outcome in outcomes:
            name = f"{evidence.name.lower()}_{outcome}"
            numbers[name] = int(table.loc[str(evidence), str(outcome)])
    numbers["undecided"] = int(table.loc["all", "undecided"])
    numbers["open"] = int(table.loc["all", "open"])
    numbers["claims"] = len(verdicts)
    return numbers


def published(reports: Path) -> pd.DataFrame:
    """Return the verdicts as readers see them, judged only once for each report.

    If notebook 14 has written the file verdicts.csv in ``reports``, this file is read.
    Otherwise all claims are judged, and the file is written.

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
    """Return what was computed for a claim, as readers see it.

    It is a number, a few numbers, a range, or a bound.

    Parameters
    ----------
    row : Series
        A row of `evaluate`.

    Examples
    --------
    >>> cells = {"spans": np.array([[7.0, 7.0]]), "low": 7.0, "high": 7.0}
    >>> cells |= {"unit": "%", "interval": ""}
    >>> computed(pd.Series(cells))
    '7%'
    >>> computed(pd.Series(cells | {"spans": np.array([[7.0, 7.0], [9.0, 9.0]]), "high": 9.0}))
    '7 or 9%'
    >>> computed(pd.Series(cells | {"spans": np.array([[7.0, math.inf]]), "high": math.inf}))
    'at least 7%'
    """
    # An end that is not finite gives an empty string.
    low = format_quantity(row["low"], row["unit"])
    high = format_quantity(row["high"], row["unit"])
    if low == high:
        return low
    if not high:
        return f"at least {low}"
    if not low:
        return f"at most {high}"
    least, most = np.transpose(row["spans"])
    # Only the last number has the unit.
    is_few = 1 < len(least) <= claims.FEW and (least == most).all()
    if is_few and not row["interval"]:
        others = [format_quantity(value, "1") for value in least[:-1]]
        return f"{', '.join(others)} or {high}"
    return f"{format_quantity(least[0], '1')} to {high}"


def shown(verdicts: pd.DataFrame) -> list[dict[str, str]]:
    """Return the verdicts as cells for readers.

    Parameters
    ----------
    verdicts : DataFrame
        The rows of `evaluate`.

    Returns
    -------
    list of dict
        For each claim all columns by name, and ``printed`` and ``computed`` with units.
    """
    signs = verdicts["relation"].map({"<=": "≤ ", ">=": "≥ ", "=": ""})
    quantities = [*map(format_quantity, verdicts["value"], verdicts["unit"])]
    table = verdicts.assign(
        printed=signs + quantities, computed=verdicts.apply(computed, axis=1)
    )
    return table.to_dict("records")
