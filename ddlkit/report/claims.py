"""The papers' claims as transcribed, and the register of the checks that compute them anew.

A claim is one number of a paper, a row of data/papers/<key>/claims.csv. A check computes that number
from the paper's own other numbers, its equations or a count; it never sees the claimed value. A claim
is *reproduced* when |computed - value| <= tolerance x |value|.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ddlkit import papers, store
from ddlkit.core.errors import UserError
from ddlkit.store import files, specs
from ddlkit.store.sheet import read_sheet

PAPERS = tuple(papers.load())
VERDICTS = ("reproduced", "differs", "not attempted")

Result = tuple[float, str]
Check = Callable[[], Result]
Checking = TypeVar("Checking", bound=Callable[..., Result])


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


_SCHEMA = store.Schema(
    "claims",
    tuple(
        store.Column(name, "float", "non_negative")
        if name in ("value", "tolerance")
        else store.Column(name, "str", "" if name in ("condition", "figure") else "named")
        for name in (field.name for field in fields(Claim))
    ),
    key=("id",),
)


def load_claims(folder: Path | None = None) -> tuple[Claim, ...]:
    """All claims under ``folder`` (data/papers by default), paper by paper in the order written.

    Raises UserError naming file, line and field for a row that is incomplete, not a number or of another
    paper, and for a file that was edited since it was transcribed.
    """
    folder = folder or store.DATA / "papers"
    return tuple(claim for key in PAPERS for claim in _read(folder / key / "claims.csv", key))


def _read(path: Path, paper: str) -> list[Claim]:
    sheet = read_sheet(files.text_of(specs.read_transcribed(path), path), str(path))
    claims = [Claim(**row) for row in _SCHEMA.frame(sheet).to_dict("records")]
    for row, claim in enumerate(claims):
        if claim.paper != paper:
            sheet.fail(row, "paper", f"is {claim.paper!r}, but this is the file of {paper!r}")
    return claims


CHECKS: dict[str, Check] = {}
"""Claim id -> function that computes (value in the claim's unit, note)."""


def check(claim: str, *arguments: Any) -> Callable[[Checking], Checking]:
    """Register the decorated function, called with ``arguments``, as the check of a claim."""

    def register(function: Checking) -> Checking:
        CHECKS[claim] = partial(function, *arguments)
        return function

    return register


def reasons() -> dict[str, str]:
    """Claim id -> why nothing here computes it (not_attempted.csv); every other claim has a check."""
    rows = pd.concat([paper_table(paper, "not_attempted") for paper in PAPERS])
    return dict(zip(rows["claim"], rows["why"], strict=True))


def paper_table(paper: str, name: str) -> pd.DataFrame:
    """A transcribed table or figure: data/papers/<paper>/<name>.csv.

    Raises UserError if it is missing, or was edited since it was transcribed.
    """
    path = store.DATA / "papers" / paper / f"{name}.csv"
    if not path.is_file():
        raise UserError(f"{path} is missing: restore it from the repository")
    return pd.read_csv(io.BytesIO(specs.read_transcribed(path)))


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
