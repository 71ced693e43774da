"""The papers' claims as transcribed, and the register of the checks that compute them anew.

A claim is one number of a paper, a row of data/papers/<key>/claims.csv. A check computes that number
from the paper's own other numbers, its equations or a count; it never sees the claimed value. A claim
is *reproduced* when |computed - value| <= tolerance x |value|.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.store import files, transcribed

PAPERS = ("osf", "sharing", "dag", "omgs")
VERDICTS = ("reproduced", "differs", "not attempted")

Result = tuple[float, str]
Check = Callable[[], Result]


@dataclass(frozen=True)
class Claim:
    """One number of a paper: where it stands, and within which relative tolerance it must agree.

    ``figure`` is the catalog entry it belongs to, "" if none.
    """

    id: str
    paper: str
    place: str
    quantity: str
    value: float
    unit: str
    tolerance: float
    condition: str
    figure: str

    def verdict(self, computed: float | None) -> str:
        """One of VERDICTS."""
        if computed is None:
            return "not attempted"
        # One unit in the last place of a double must not turn an exact match into a difference.
        margin = self.tolerance * abs(self.value) + 1e-12 * abs(self.value)
        return "reproduced" if abs(computed - self.value) <= margin else "differs"


def load_claims(papers: Path | None = None) -> tuple[Claim, ...]:
    """All claims under ``papers`` (data/papers by default), paper by paper in the order written.

    Raises UserError naming file, line and field for a row that is incomplete or not a number, and
    for a file that was edited since it was transcribed.
    """
    folder = papers or store.DATA / "papers"
    claims = [claim for key in PAPERS for claim in _read(folder / key / "claims.csv", key)]
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise UserError(f"{folder}: claim {claim.id} appears twice: give each its own id")
        seen.add(claim.id)
    return tuple(claims)


def _read(path: Path, paper: str) -> list[Claim]:
    names = [field.name for field in fields(Claim)]
    reader = csv.DictReader(io.StringIO(files.text_of(transcribed.read(path), path), newline=""))
    rows = list(reader)
    if reader.fieldnames != names:
        raise UserError(f"{path}: columns are {reader.fieldnames}: must be {', '.join(names)}")
    return [_claim(row, paper, f"{path}, line {line}") for line, row in enumerate(rows, 2)]


def _claim(row: dict[str, str], paper: str, where: str) -> Claim:
    if None in row or None in row.values():
        raise UserError(f"{where}: has more or fewer cells than the header")
    numbers = {name: _number(row[name], f"{where}, {name}") for name in ("value", "tolerance")}
    for name in ("id", "place", "quantity", "unit"):
        if not row[name]:
            raise UserError(f"{where}: {name} is empty")
    if row["paper"] != paper:
        raise UserError(f"{where}: paper is {row['paper']!r}, but this is the file of {paper!r}")
    return Claim(**{**row, **numbers})  # type: ignore[arg-type]


def _number(cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{where}: {cell!r} is not a finite number >= 0")
    return value


CHECKS: dict[str, Check] = {}
"""Claim id -> function that computes (value in the claim's unit, note)."""


def check(claim: str) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a claim."""

    def register(function: Check) -> Check:
        CHECKS[claim] = function
        return function

    return register


REASONS: dict[str, str] = {}
"""Claim id -> why nothing here computes it; every claim is in CHECKS or here."""


def not_attempted(*claims: str, why: str) -> None:
    """Say why these claims have no check: what it would take, or what the paper leaves unstated."""
    REASONS.update(dict.fromkeys(claims, why))


def paper_table(paper: str, name: str) -> pd.DataFrame:
    """A transcribed table or figure: data/papers/<paper>/<name>.csv.

    Raises UserError if it is missing, or was edited since it was transcribed.
    """
    path = store.DATA / "papers" / paper / f"{name}.csv"
    if not path.is_file():
        raise UserError(f"{path} is missing: restore it from the repository")
    return pd.read_csv(io.BytesIO(transcribed.read(path)))


def claimed(claim: str) -> float:
    """The value of another claim, for checks that follow from it. Raises KeyError if there is none."""
    return {one.id: one.value for one in load_claims()}[claim]


def prose(paper: str) -> dict[str, float]:
    """The numbers that a paper states in its prose, by their id in data/papers/<paper>/prose.csv."""
    rows = paper_table(paper, "prose")
    return dict(zip(rows["id"], rows["value"].astype(float), strict=True))


def percent(share: float) -> float:
    """A share as per cent."""
    return 100 * share
