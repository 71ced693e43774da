"""The outcome of every claim, and by what evidence it was reached.

Importing the papers' ``claims`` registers one check for each claim that can be
computed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from ddlkit.core.workload import Floats
from workbook.common import claims, outputs
from workbook.common.claims import Claim, Evidence, Outcome, Result, Verdict
from workbook.common.outputs import format_quantity
from workbook.common.papers import PAPERS

# Importing the module ``claims`` of a paper registers all checks of that paper.
for _paper in PAPERS:
    import_module(f"workbook.{_paper}.claims")


RESULT = ("evidence", "spans", "low", "high", "grade", "interval", "judge")
"""The properties of a `Result` that a row of verdicts has."""
OUTCOMES = [
    str(outcome) for outcome in Outcome if outcome not in claims.AS_REQUIREMENT.values()
]
"""The outcomes that a claim of a paper can have."""
NOTHING = {
    **dict.fromkeys(RESULT, ""),
    "evidence": Evidence.NONE,
    "low": math.nan,
    "high": math.nan,
}
"""The same for a claim without a result."""
FILE = "verdicts.csv"
"""The file in the reports directory that has the verdicts on the papers' claims."""
REQUIREMENTS_FILE = "requirements.csv"
"""The file with the outcomes of the requirements of PyTorch's cost models."""
LINE = ("id", "outcome", "sentence", "how")
"""The columns of both files: what a reader sees of each claim."""


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
        of `Claim`, those of RESULT, ``outcome``, ``note`` and ``notebook``. A claim that has
        no check is open or not testable: ``low`` and ``high`` are NaN, ``note`` has the
        reason, and ``notebook`` is the one that will decide the claim. A claim whose check
        fails is open, too, and a line of standard error says why.
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
    # Members of Evidence and Outcome become plain texts.
    table = pd.DataFrame(rows).astype({"evidence": str, "outcome": str})
    # Evidence lists the strongest kind first. A stable sort keeps the order of claims otherwise.
    strongest_first = [str(evidence) for evidence in Evidence]
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
    """Return the cells of a claim: those of RESULT, ``outcome``, ``note`` and ``notebook``.

    An exception of the claim's check is passed on.

    Raises
    ------
    UserError
        If the claim has neither a check nor a row that says why it has none.
    """
    if claim.id not in claims.CHECKS:
        return _cells_without_check(claim)
    check = claims.CHECKS[claim.id]
    result = check()
    verdict = _settled(claim, result)
    outcome = verdict.outcome
    # A requirement is met or missed instead of reproduced or not, because no paper claimed it.
    if claim.paper == claims.REQUIREMENTS:
        outcome = claims.AS_REQUIREMENT[outcome]
    notes = [note for note in (result.note, verdict.note) if note]
    cells = {name: getattr(result, name) for name in RESULT}
    # Only an open claim names the notebook that will decide it.
    cells["notebook"] = ""
    cells["note"] = "; ".join(notes)
    cells["outcome"] = outcome
    return cells


def _cells_without_check(claim: Claim) -> dict[str, Any]:
    """Return the cells of a claim that has no check, from the file that says why.

    Raises UserError if the file has no row of the claim.
    """
    # The outcome, the reason and the notebook of each claim without a check.
    without_check = claims.without_check()
    if claim.id not in without_check.index:
        raise UserError(
            "it has no check: write one, or why not into the paper's open.csv"
        )
    row = without_check.loc[claim.id]
    cells = _open_cells(row["notebook"], row["why"])
    cells["outcome"] = Outcome(row["outcome"])
    return cells


def _settled(claim: Claim, result: Result) -> Verdict:
    """Return the verdict on a claim.

    Parameters
    ----------
    claim : Claim
        The claim.
    result : Result
        What its check computed.

    Returns
    -------
    Verdict
        That of `Claim.verdict`, with two exceptions. It is "not testable" if the claim repeats
        one that is already judged, and "undecided" if the outcome changes when an axis of the
        grid of settings, which the paper leaves open, is scanned in half the step.
    """
    repeats = claims.repeats()
    if claim.id in repeats.index:
        judged_by, why = repeats.loc[claim.id, ["judged_by", "why"]]
        return Verdict(Outcome.NOT_TESTABLE, f"the same {why} as {judged_by}")
    verdict = claim.verdict(result)
    # Recorded outcomes on the grid, and with half its step along each axis.
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
    """Count claims by evidence.

    Parameters
    ----------
    verdicts : DataFrame
        The rows of `evaluate`.

    Returns
    -------
    DataFrame
        How many claims of papers had each outcome (the columns), by evidence (the rows). The
        row and the column "all" are sums. Outcomes of requirements are left out.
    """
    table = pd.crosstab(verdicts["evidence"], verdicts["outcome"])
    # Kinds of evidence and outcomes that no claim has are added with counts of 0. Outcomes of
    # requirements are dropped, because OUTCOMES lacks them.
    kinds = [str(evidence) for evidence in Evidence]
    table = table.reindex(index=kinds, columns=OUTCOMES, fill_value=0)
    return _with_sums(table)


def by_paper(lines: pd.DataFrame) -> pd.DataFrame:
    """Count the claims of each paper.

    Parameters
    ----------
    lines : DataFrame
        A row for each claim, with its ``id`` and ``outcome``.

    Returns
    -------
    DataFrame
        How many claims had each outcome (the columns), by paper (the rows). The row and
        the column "all" are sums.
    """
    # An id begins with the abbreviation of the paper and a dash.
    papers = lines["id"].str.partition("-")[0]
    table = pd.crosstab(papers, lines["outcome"])
    # Requirements have outcomes of their own, and are no paper.
    names = [name for name in PAPERS if name != claims.REQUIREMENTS]
    return _with_sums(table.reindex(index=names, columns=OUTCOMES, fill_value=0))


def _with_sums(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of counts with the row and the column "all"."""
    table.loc["all"] = table.sum()
    return table.assign(all=table.sum(axis=1))


def key_numbers(verdicts: pd.DataFrame) -> dict[str, int]:
    """Return how many claims of the papers had each outcome, by kind of evidence.

    Parameters
    ----------
    verdicts : DataFrame
        The rows of `evaluate`. Requirements do not count.

    Returns
    -------
    dict of str to int
        The counts under names such as "measured_reproduced", how many claims are
        ``undecided``, ``not_testable`` and ``open``, and how many ``claims`` there are.
    """
    of_papers = verdicts[verdicts["paper"] != claims.REQUIREMENTS]
    table = counts(of_papers)
    numbers = {}
    for evidence in Evidence:
        # Claims without evidence are counted below.
        if evidence is Evidence.NONE:
            continue
        # Only firm evidence can reproduce a claim. Other evidence can only be compatible with it.
        if evidence in claims.FIRM:
            outcomes = (Outcome.REPRODUCED, Outcome.DIFFERS)
        else:
            outcomes = (Outcome.COMPATIBLE, Outcome.CONTRADICTED)
        for outcome in outcomes:
            name = f"{evidence.name.lower()}_{outcome}"
            numbers[name] = int(table.loc[str(evidence), str(outcome)])
    for outcome in (Outcome.UNDECIDED, Outcome.NOT_TESTABLE, Outcome.OPEN):
        numbers[outcome.name.lower()] = int(table.loc["all", str(outcome)])
    numbers["claims"] = len(of_papers)
    return numbers


def published(reports: Path) -> dict[str, pd.DataFrame]:
    """Return the verdicts as readers see them, judged only once for each reports directory.

    If notebook 14 has already written the files FILE and REQUIREMENTS_FILE, they are read.
    Otherwise all claims are judged, and the files are written.

    Parameters
    ----------
    reports : Path
        The reports directory.

    Returns
    -------
    dict of str to DataFrame
        By FILE and REQUIREMENTS_FILE, a row for each claim with the columns of LINE.
    """
    paths = {name: reports / name for name in (FILE, REQUIREMENTS_FILE)}
    if not all(path.is_file() for path in paths.values()):
        publish(evaluate(), reports)
    return {
        name: pd.read_csv(path, dtype=str, keep_default_na=False)
        for name, path in paths.items()
    }


def publish(verdicts: pd.DataFrame, reports: Path | None = None) -> None:
    """Write the verdicts, as readers see them, into FILE and REQUIREMENTS_FILE.

    Parameters
    ----------
    verdicts : DataFrame
        The rows of `evaluate`.
    reports : Path, optional
        The reports directory. By default that of this run.
    """
    directory = reports or outputs.reports_dir()
    # The line of each claim for readers.
    rows = [told(row) for row in shown(verdicts)]
    # Papers and requirements have a file each.
    table = pd.DataFrame(rows, columns=LINE)
    is_requirement = table["id"].str.startswith(f"{claims.REQUIREMENTS}-")
    for name, lines in (
        (FILE, table[~is_requirement]),
        (REQUIREMENTS_FILE, table[is_requirement]),
    ):
        text = lines.to_csv(index=False, lineterminator="\n")
        store.atomic_write_text(directory / name, text)


def told(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the line of a claim for readers.

    Parameters
    ----------
    row : mapping
        One of the rows of `shown`.

    Returns
    -------
    dict of str to str
        The cells of LINE: the id, the outcome, a sentence, and how the claim was judged. A
        person has written the last two for the outcome with the published recordings. If the
        outcome is another one, as with other recordings, they are made from the numbers.
    """
    line = {"id": row["id"], "outcome": str(row["outcome"])}
    # The written texts by the id of the claim, each with the outcome that it tells.
    written = claims.lines()
    if row["id"] in written.index:
        text = written.loc[row["id"]]
        if text["outcome"] == line["outcome"]:
            return {**line, "sentence": text["sentence"], "how": text["how"]}
    number = row["computed"] or "nothing"
    sentence = (
        f"{line['outcome'].capitalize()}: the {row['quantity']} is printed as "
        f"{row['printed']}, and {number} was computed."
    )
    return {**line, "sentence": sentence, "how": f"The evidence is: {row['evidence']}."}


# A whole number or a decimal one, with or without commas and an exponent.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
# Names that contain digits, and the places and equations of a paper.
_NAMES = re.compile(
    r"\b(?:Figs?|Eqs?|Sections?|Tables?|Algorithm|Theorem|notebook|erratum)"
    r" [\dIV][\w.,-]*(?: (?:and|to) \d\w*)*|\b[\w.]*(?:[A-Za-z][-\w]*\d|\d+[A-Za-z])[-\w]*"
)


def unsupported_numbers(row: Mapping[str, Any], text: str) -> list[str]:
    """Return the numbers of a text that neither a claim nor its check has.

    Parameters
    ----------
    row : mapping
        One of the rows of `shown`.
    text : str
        What readers are told.

    Returns
    -------
    list of str
        The numbers of the text that do not come from a number of the row by rounding. Before
        it is rounded, the number of the row may be turned into per cent, or from a ratio into
        a change in per cent.

    Examples
    --------
    >>> cells = {"printed": "7%", "computed": "1.0664x", "note": "of 3 runs", "spans": ""}
    >>> unsupported_numbers(cells, "ResNet-50 gains 6.6% in 3 runs (Fig 2), not 9%.")
    ['9']
    """
    known = _known_numbers(row)
    # A text may state a number x of the row as it stands, as a share of 1 in per cent, or a ratio
    # as a gain or a loss in per cent.
    possible = np.concatenate(
        [known, 100 * known, 100 * (known - 1), 100 * (1 - known)]
    )
    # The digits in names such as ResNet-50 and Fig 2 are no numbers.
    return [
        number
        for number in _NUMBER.findall(_NAMES.sub(" ", text))
        if not _is_rounded_from(number, possible)
    ]


def _known_numbers(row: Mapping[str, Any]) -> np.ndarray:
    """Return the numbers in a row of `shown`, those in its texts and the ends of its intervals."""
    fields = (
        "place",
        "quantity",
        "condition",
        "printed",
        "computed",
        "interval",
        "note",
    )
    stated = " ".join(str(row.get(field, "")) for field in fields)
    known = [_value(number) for number in _NUMBER.findall(stated)]
    # The ends of the computed intervals. A claim without a result has the text "" instead.
    if isinstance(row["spans"], np.ndarray):
        known.extend(row["spans"][np.isfinite(row["spans"])])
    return np.array(known)


def _value(number: str) -> float:
    return float(number.strip(",").replace(",", ""))


def _is_rounded_from(number: str, possible: Floats) -> bool:
    """Return whether a written number is one of the possible ones, rounded to its last digit."""
    digits, _, exponent = number.strip(",").partition("e")
    decimals = len(digits.partition(".")[2])
    # The unit of the last digit: 0.1 for "6.6", and 100 for "1.2e3".
    unit = 10.0 ** (float(exponent or 0) - decimals)
    # A number is rounded by at most half a unit. The rest is for rounding errors of floats.
    return bool((np.abs(possible - _value(number)) <= 0.5001 * unit).any())


def computed(row: pd.Series) -> str:
    """Return what was computed for a claim, as readers see it.

    Parameters
    ----------
    row : Series
        A row of `evaluate`. Its ``spans`` have the two ends of each interval in which computed
        numbers lie, in ascending order. ``low`` and ``high`` are the least and the largest of
        all ends, and ``interval`` is empty unless the numbers were measured.

    Returns
    -------
    str
        A number, a few numbers, a range, or a bound, with the unit. It is empty if nothing was
        computed.

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
    # An end that is infinite or NaN gives an empty string.
    low = format_quantity(row["low"], row["unit"])
    high = format_quantity(row["high"], row["unit"])
    # If both ends are shown alike, there is a single number, or none.
    if low == high:
        return low
    if not high:
        return f"at least {low}"
    if not low:
        return f"at most {high}"
    least, most = np.transpose(row["spans"])
    # A few single numbers, whose spans have equal ends, are listed. Only the last has the unit.
    # Measured numbers are samples of a range, and are not listed.
    is_few = 1 < len(least) <= claims.FEW and (least == most).all()
    if is_few and not row["interval"]:
        others = [format_quantity(value, "1") for value in least[:-1]]
        return f"{', '.join(others)} or {high}"
    # Only the upper end has the unit.
    return f"{format_quantity(row['low'], '1')} to {high}"


def shown(verdicts: pd.DataFrame) -> list[dict[str, str]]:
    """Return the verdicts as cells for readers.

    Parameters
    ----------
    verdicts : DataFrame
        The rows of `evaluate`.

    Returns
    -------
    list of dict
        For each claim all columns of `evaluate` by name, and the texts ``printed`` and
        ``computed`` with their units.
    """
    # A claim may print a bound.
    signs = verdicts["relation"].map({"<=": "≤ ", ">=": "≥ ", "=": ""})
    quantities = [*map(format_quantity, verdicts["value"], verdicts["unit"])]
    table = verdicts.assign(
        printed=signs + quantities, computed=verdicts.apply(computed, axis=1)
    )
    return table.to_dict("records")
