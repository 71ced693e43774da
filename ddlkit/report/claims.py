"""What the papers print, as transcribed: claims, tables, prose; and the register of the claims' checks.

A claim is a row of data/papers/<key>/claims.csv. Its check never sees the printed value and returns a Result.
One rule for all judges: a claim agrees when the printed number, with its tolerance, meets the interval.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from ddlkit import papers, store
from ddlkit.papers.audit import SettingSearch
from ddlkit.store import readers

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


FIRM = (Evidence.MEASURED, Evidence.COUNTED)
"""What alone can reproduce a claim; the others can only be compatible with one."""
RELATIONS = ("=", "<=", ">=")
"""Of a computed number to the printed one: equal within the tolerance, at most, at least."""


# -- what a check returns ------------------------------------------------------------------------

Values = float | Iterable[float]
"""A number, or all that it may be: over links, networks, settings or roundings."""


@dataclass(frozen=True)
class Result:
    """What a check computed: the claimed quantity lies between ``low`` and ``high``, in the claim's unit.

    A bound leaves one side infinite. ``grade`` : of what was measured, else "".
    """

    evidence: Evidence
    low: float
    high: float
    note: str
    grade: str = ""

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"a result from {self.low} to {self.high}: give low <= high, no NaN")


def _result(evidence: Evidence, values: Values, note: str, grade: str = "") -> Result:
    array = np.array([*values] if isinstance(values, Iterable) else [values], float)
    return Result(evidence, float(array.min()), float(array.max()), note, grade)


measured = partial(_result, Evidence.MEASURED)
"""What was measured here, a note, and its grade: one of `ddlkit.core.timeline.ORIGINS`."""
counted = partial(_result, Evidence.COUNTED)
"""What published architectures have, or what an algorithm run to its end gives."""
modelled = partial(_result, Evidence.MODEL)
"""What a model says over what the paper leaves open."""
own = partial(_result, Evidence.OWN)
"""What the paper's own printed numbers say, within their rounding."""


def at_least(value: float, note: str) -> Result:
    """Return a lower bound on the claimed quantity."""
    return _result(Evidence.BOUND, (value, math.inf), note)


def at_most(value: float, note: str) -> Result:
    """Return an upper bound on the claimed quantity."""
    return _result(Evidence.BOUND, (-math.inf, value), note)


def by_model(search: SettingSearch, statement: str, scale: float = 1, offset: float = 0) -> Result:
    """Return a statement's values over all settings that agree with the most *other* statements."""
    left = search.without(statement)
    note = (
        f"over {left.settings:,} settings, which agree with {left.most} of the {left.others} other "
        f"statements; those that agree with this one too reach {left.with_it} of them"
    )
    return modelled([offset + scale * end for end in (left.low, left.high)], note)


def over_compatible(search: SettingSearch) -> str:
    """Return over which settings a range goes, for a note."""
    return (
        f"over {int(search.most().sum()):,} settings, which agree with {search.count.max()} of the "
        f"{len(search.stated)} statements"
    )


CHECKS: dict[str, Callable[[], Result]] = {}
"""Claim id -> function that computes its Result."""
Checking = TypeVar("Checking", bound=Callable[..., Result])


def check(claim: str, *arguments: Any) -> Callable[[Checking], Checking]:
    """Register the decorated function, called with ``arguments``, as the check of a claim."""

    def register(function: Checking) -> Checking:
        CHECKS[claim] = partial(function, *arguments)
        return function

    return register


# -- claims --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One number of a paper: where it stands, and within which relative tolerance it must agree.

    relation : one of RELATIONS. An ordering ("A is above B") is a ratio or a count with a bound.
    figure : of the catalog, or ""; errata : numbers in the paper's errata.md, separated by spaces
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
        """Return the one rule's verdict: a claim agrees when the accepted values meet the computed interval.

        Of what was measured or counted, a range over links, networks or repeats, all must be accepted.
        """
        if result is None:
            return Outcome.OPEN
        low, high = self.accepted
        if result.evidence in FIRM:
            inside = low <= result.low and result.high <= high
            return Outcome.REPRODUCED if inside else Outcome.DIFFERS
        meets = result.low <= high and low <= result.high
        return Outcome.COMPATIBLE if meets else Outcome.CONTRADICTED


@cache
def load_claims() -> tuple[Claim, ...]:
    """Return all claims under data/papers, paper by paper in the order written."""
    tables = [_read(paper, "claims", dtype=str, keep_default_na=False) for paper in PAPERS]
    rows = pd.concat(tables).astype({"value": float, "tolerance": float})
    return tuple(Claim(**row) for row in rows.to_dict("records"))


# -- tables and prose ----------------------------------------------------------------------------


def paper_table(paper: str, name: str) -> pd.DataFrame:
    """Return data/papers/<paper>/<name>.csv. Raises UserError if it is missing, or edited since."""
    return _read(paper, name)


def _read(paper: str, name: str, **options: Any) -> pd.DataFrame:
    path = store.DATA / "papers" / paper / f"{name}.csv"
    return pd.read_csv(io.BytesIO(readers.read_transcribed(path)), **options)


def waiting() -> pd.DataFrame:
    """Return the open claims, by id: ``notebook`` that will decide it ("" if none can), and ``why``."""
    rows = pd.concat([paper_table(paper, "open") for paper in PAPERS])
    return rows.set_index("claim").fillna("")


def recomputed(frame: pd.DataFrame, **columns: Iterable[float]) -> pd.DataFrame:
    """Return ``frame`` with what was computed, and its difference relative to print, after each column.

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
    """Return a table of symbols: symbol, meaning in our words, ``ddlkit``: its name below the package.

    Of a phase's total the name is that of its layers'. Raises KeyError for a symbol without one.
    """
    names = paper_table(paper, "symbols").set_index("symbol")["ddlkit"].to_dict()
    printed = paper_table(paper, name)
    return printed.assign(ddlkit=[names[symbol] for symbol in printed["symbol"]])


def claimed(claim: str) -> float:
    """Return the value of another claim, for checks that follow from it."""
    return {each.id: each.value for each in load_claims()}[claim]


def prose(paper: str) -> dict[str, float]:
    """Return the numbers of a paper's prose, by their id in data/papers/<paper>/prose.csv."""
    return paper_table(paper, "prose").set_index("id")["value"].astype(float).to_dict()
