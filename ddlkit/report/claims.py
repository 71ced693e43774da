"""What the papers print, as transcribed: claims, tables, prose; and the register of the claims' checks.

A claim is one number of a paper, a row of data/papers/<key>/claims.csv. A check computes that number
from the paper's own other numbers, its equations or a count; it never sees the claimed value. A claim
is *reproduced* when |computed - value| <= tolerance x |value|.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ddlkit import papers, store
from ddlkit.store import files, specs
from ddlkit.store.sheet import Sheet, read_sheet

PAPERS = tuple(papers.load())
VERDICTS = ("reproduced", "differs", "not attempted")

Result = tuple[float, str]
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
    claims = []
    for key in PAPERS:
        sheet = transcribed_sheet(key, "claims", folder)
        for row, fields_of in enumerate(_SCHEMA.frame(sheet).to_dict("records")):
            claims.append(Claim(**fields_of))
            if claims[-1].paper != key:
                sheet.fail(
                    row, "paper", f"is {claims[-1].paper!r}, but this is the file of {key!r}"
                )
    return tuple(claims)


def transcribed_sheet(paper: str, name: str, folder: Path | None = None) -> Sheet:
    """Checked cells of <paper>/<name>.csv below ``folder`` (data/papers by default).

    Raises UserError if the file is missing, or was edited since it was transcribed.
    """
    path = (folder or store.DATA / "papers") / paper / f"{name}.csv"
    return read_sheet(files.text_of(specs.read_transcribed(path), path), str(path))


CHECKS: dict[str, Callable[[], Result]] = {}
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
    return rows.set_index("claim")["why"].to_dict()


def paper_table(paper: str, name: str) -> pd.DataFrame:
    """A transcribed table or figure: data/papers/<paper>/<name>.csv.

    Raises UserError if it is missing, or was edited since it was transcribed.
    """
    return pd.read_csv(
        io.BytesIO(specs.read_transcribed(store.DATA / "papers" / paper / f"{name}.csv"))
    )


def recomputed(frame: pd.DataFrame, **columns: Iterable[float]) -> pd.DataFrame:
    """A copy of ``frame`` with what was computed, and its difference relative to print, after each column.

    >>> recomputed(pd.DataFrame({"a": [2.0], "b": [1]}), a=[3.0]).to_dict("list")
    {'a': [2.0], 'a_computed': [3.0], 'a_difference': [0.5], 'b': [1]}
    """
    result = frame.copy()
    for column, values in columns.items():
        place = result.columns.get_loc(column) + 1
        result.insert(place, f"{column}_computed", list(values))
        difference = result[f"{column}_computed"] / frame[column] - 1
        result.insert(place + 1, f"{column}_difference", difference)
    return result


def symbols(paper: str, name: str) -> pd.DataFrame:
    """A table of symbols: symbol, meaning in our words, name in ddlkit (the paper's symbols.csv).

    A name is module.function(parameter), or class attribute, below ``ddlkit``; of a phase's total, the name
    of its layers'. Raises KeyError for a symbol without one.
    """
    names = paper_table(paper, "symbols").set_index("symbol")["ddlkit"].to_dict()
    printed = paper_table(paper, name)
    return printed.assign(ddlkit=[names[symbol] for symbol in printed["symbol"]])


def claimed(claim: str) -> float:
    """The value of another claim, for checks that follow from it. Raises KeyError if there is none."""
    return {one.id: one.value for one in load_claims()}[claim]


def prose(paper: str) -> dict[str, float]:
    """The numbers that a paper states in its prose, by their id in data/papers/<paper>/prose.csv."""
    return paper_table(paper, "prose").set_index("id")["value"].astype(float).to_dict()


def percent(share: float) -> float:
    """A share as per cent."""
    return 100 * share
