"""What the papers print, as transcribed: claims, tables, prose; and the register of the claims' checks.

A claim is one number of a paper, a row of data/papers/<key>/claims.csv. A check computes that number anew,
never sees the claimed value, and returns a Result: an interval, and by what evidence. One rule for all
judges them: a claim agrees when the printed number, with its tolerance, meets the interval.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from ddlkit import papers, store
from ddlkit.core.errors import UserError
from ddlkit.core.timeline import ORIGINS
from ddlkit.papers.audit import SettingSearch
from ddlkit.store import files, readers
from ddlkit.store.files import own_yaml
from ddlkit.store.sheet import Sheet, read_sheet

PAPERS = tuple(papers.load())


class Evidence(StrEnum):
    """By what a claim is judged, the strongest first."""

    MEASURED = "measured here"
    COUNTED = "counted independently"
    MODEL = "model, compatible settings"
    BOUND = "bound"
    OWN = "the paper's own numbers"
    NONE = "nothing yet"


class Outcome(StrEnum):
    """What the evidence says of a claim. Only what was measured or counted here can reproduce one."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    COMPATIBLE = "compatible"
    CONTRADICTED = "contradicted"
    OPEN = "open"


_FIRM = (Outcome.REPRODUCED, Outcome.DIFFERS)
_SOFT = (Outcome.COMPATIBLE, Outcome.CONTRADICTED)
OUTCOMES = {
    **dict.fromkeys((Evidence.MEASURED, Evidence.COUNTED), _FIRM),
    **dict.fromkeys((Evidence.MODEL, Evidence.BOUND, Evidence.OWN), _SOFT),
}
"""What each evidence says where a claim agrees, and where not."""
RELATIONS = ("=", "<=", ">=")
"""Of a computed number to the printed one: equal within the tolerance, at most, at least."""


@dataclass(frozen=True)
class Result:
    """What a check computed: the claimed quantity lies between ``low`` and ``high``, equal for a point.

    Both are in the claim's unit; a bound leaves one side infinite. ``grade``: of what was measured, one of
    ORIGINS, else "". Raises UserError for low above high, NaN, and a grade that does not fit.
    """

    evidence: Evidence
    low: float
    high: float
    note: str
    grade: str = ""

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise UserError(f"a result from {self.low} to {self.high}: give low <= high, no NaN")
        known = ORIGINS if self.evidence is Evidence.MEASURED else ("",)
        if self.grade not in known:
            raise UserError(f"{self.evidence} of grade {self.grade!r}: use one of {known}")


def counted(values: float | Iterable[float], note: str) -> Result:
    """A number, or its range over networks, from published architectures or an algorithm run to its end."""
    seen = list(values) if isinstance(values, Iterable) else [values]
    return Result(Evidence.COUNTED, min(seen), max(seen), note)


def own(low: float, high: float, note: str) -> Result:
    """What the paper's own printed numbers say, from ``low`` to ``high`` within their rounding."""
    return Result(Evidence.OWN, low, high, note)


def at_least(value: float, note: str) -> Result:
    """A lower bound on the claimed quantity."""
    return Result(Evidence.BOUND, value, math.inf, note)


def at_most(value: float, note: str) -> Result:
    """An upper bound on the claimed quantity."""
    return Result(Evidence.BOUND, -math.inf, value, note)


def measured(values: Iterable[float], grade: str, note: str) -> Result:
    """The range of what was measured here, over links, cases or repeats."""
    seen = list(values)
    return Result(Evidence.MEASURED, min(seen), max(seen), note, grade)


def by_model(search: SettingSearch, statement: str, scale: float = 1, offset: float = 0) -> Result:
    """Return a statement's values over all settings that agree with the most *other* statements."""
    left = search.without(statement)
    note = (
        f"over {left.settings:,} settings, which agree with {left.most} of the {left.others} other "
        f"statements; those that agree with this one too reach {left.with_it} of them"
    )
    return Result(Evidence.MODEL, offset + scale * left.low, offset + scale * left.high, note)


def over_compatible(search: SettingSearch) -> str:
    """Return over which settings a range goes, for a note."""
    return (
        f"over {int(search.most().sum()):,} settings, which agree with {search.count.max()} of the "
        f"{len(search.stated)} statements"
    )


Checking = TypeVar("Checking", bound=Callable[..., Result])


@dataclass(frozen=True)
class Claim:
    """One number of a paper: where it stands, and within which relative tolerance it must agree.

    relation : one of RELATIONS. An ordering ("A is above B") is a ratio or a count with a bound.
    figure : the catalog entry it belongs to, "" if none; errata : numbers, in the paper's errata.md, of
        the entries that mark it, separated by spaces.
    """

    id: str
    paper: str
    place: str
    quantity: str
    relation: str
    value: float
    unit: str
    tolerance: float
    condition: str
    figure: str
    errata: str

    @property
    def accepted(self) -> tuple[float, float]:
        """The values that agree with the printed one."""
        # One unit in the last place of a double must not turn an exact match into a difference.
        margin = (self.tolerance + 1e-12) * abs(self.value)
        low = -math.inf if self.relation == "<=" else self.value - margin
        return low, math.inf if self.relation == ">=" else self.value + margin

    def outcome(self, result: Result | None) -> Outcome:
        """The one rule: a claim agrees when the accepted values meet the computed interval.

        Of what was measured or counted, a range over links, networks or repeats, all must be accepted.
        """
        if result is None:
            return Outcome.OPEN
        low, high = self.accepted
        yes, no = OUTCOMES[result.evidence]
        if yes is Outcome.REPRODUCED:
            return yes if low <= result.low and result.high <= high else no
        return yes if result.low <= high and low <= result.high else no


_SCHEMA = store.Schema(
    "claims",
    tuple(
        store.Column(name, "float", "non_negative")
        if name in ("value", "tolerance")
        else store.Column(name, "str", "" if name in ("condition", "figure", "errata") else "named")
        for name in (field.name for field in fields(Claim))
    ),
    key=("id",),
)


def load_claims(folder: Path | None = None) -> tuple[Claim, ...]:
    """All claims under ``folder`` (data/papers by default), paper by paper in the order written.

    Raises UserError naming file, line and field for a row that is incomplete, not a number or of another
    paper, and for a file that was edited since it was transcribed.
    """
    claims: list[Claim] = []
    for key in PAPERS:
        path, text = _transcribed(key, "claims", folder)
        claims += _claims_of(key, str(path), text)
    return tuple(claims)


@lru_cache(maxsize=32)  # checks ask for other claims all the time, whose text does not change
def _claims_of(paper: str, path: str, text: str) -> tuple[Claim, ...]:
    """Those that a paper's file says in this text."""
    claims, sheet = [], read_sheet(text, path)
    for row, fields_of in enumerate(_SCHEMA.frame(sheet).to_dict("records")):
        claims.append(Claim(**fields_of))
        if claims[-1].paper != paper:
            sheet.fail(row, "paper", f"is {claims[-1].paper!r}, but this is the file of {paper!r}")
        if claims[-1].relation not in RELATIONS:
            known = ", ".join(RELATIONS)
            sheet.fail(row, "relation", f"is {claims[-1].relation!r}: use one of {known}")
    return tuple(claims)


def transcribed_sheet(paper: str, name: str, folder: Path | None = None) -> Sheet:
    """Checked cells of <paper>/<name>.csv below ``folder`` (data/papers by default).

    Raises UserError if the file is missing, or was edited since it was transcribed.
    """
    path, text = _transcribed(paper, name, folder)
    return read_sheet(text, str(path))


def _transcribed(paper: str, name: str, folder: Path | None) -> tuple[Path, str]:
    path = (folder or store.DATA / "papers") / paper / f"{name}.csv"
    return path, files.text_of(readers.read_transcribed(path), path)


CHECKS: dict[str, Callable[[], Result]] = {}
"""Claim id -> function that computes its Result."""


def check(claim: str, *arguments: Any) -> Callable[[Checking], Checking]:
    """Register the decorated function, called with ``arguments``, as the check of a claim."""

    def register(function: Checking) -> Checking:
        CHECKS[claim] = cache(partial(function, *arguments))
        return function

    return register


def waiting() -> pd.DataFrame:
    """The open claims, by id: ``notebook`` that will decide it ("" if none can), and ``why`` it is open.

    From the papers' open.csv; every other claim has a check.
    """
    rows = pd.concat([paper_table(paper, "open") for paper in PAPERS])
    return rows.set_index("claim").fillna("")


def paper_table(paper: str, name: str) -> pd.DataFrame:
    """A transcribed table or figure: data/papers/<paper>/<name>.csv.

    Raises UserError if it is missing, or was edited since it was transcribed.
    """
    return pd.read_csv(
        io.BytesIO(readers.read_transcribed(store.DATA / "papers" / paper / f"{name}.csv"))
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
    return {known.id: known.value for known in load_claims()}[claim]


def prose(paper: str) -> dict[str, float]:
    """The numbers that a paper states in its prose, by their id in data/papers/<paper>/prose.csv."""
    return paper_table(paper, "prose").set_index("id")["value"].astype(float).to_dict()


def percent(share: float) -> float:
    """A share as per cent."""
    return 100 * share


def settings(paper: str) -> dict[str, Any]:
    """What a paper's experiments ran on, as it states it, and what it leaves out (its settings.yml)."""
    path = store.DATA / "papers" / paper / "settings.yml"
    return dict(own_yaml(path.read_text(encoding="utf-8")))
