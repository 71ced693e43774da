"""What the papers print, as transcribed: claims, tables, prose; and the register of the claims' checks.

A claim is a row of data/papers/<key>/claims.csv. Its check never sees the printed value and returns a Result.
A claim agrees when the printed number, with its tolerance, meets a number that was computed; what settings
that agree with other statements say of one is judged by `workbook.common.settings.LeftOut`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats
from workbook.common import papers, places, transcribed
from workbook.common.settings import SettingSearch

PAPERS = tuple(papers.PAPERS)


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
    UNDECIDED = "undecided"
    OPEN = "open"


FIRM = (Evidence.MEASURED, Evidence.COUNTED)
"""What alone can reproduce a claim; the others can only be compatible with one."""
RELATIONS = ("=", "<=", ">=")
"""Of a computed number to the printed one: equal within the tolerance, at most, at least."""


# -- what a check returns ------------------------------------------------------------------------

Values = float | Iterable[float] | Iterable[Sequence[float] | Floats]
"""A number, all numbers that it may be (links, networks, settings), or the ends of all that lies between."""


class Verdict(NamedTuple):
    """What the evidence says of a claim, and what to add to the result's note."""

    outcome: Outcome
    note: str = ""


@dataclass(frozen=True, eq=False)
class Result:
    """What was computed, in the claim's unit.

    spans : (n, 2) attained numbers, each twice, or the ends of all that lies between
    grade : of what was measured, else ""; interval : what a measured result is, and of how many numbers
    judge : of the lowest and highest accepted value; if given, it decides in place of the spans
    """

    evidence: Evidence
    spans: Floats
    note: str
    grade: str = ""
    interval: str = ""
    judge: Callable[[float, float], Verdict] | None = None

    def __post_init__(self) -> None:
        if not len(self.spans) or np.isnan(self.spans).any():
            raise ValueError(
                "a result without numbers, as without its recording, or with NaN"
            )
        Evidence(self.evidence)  # raises ValueError of an unknown kind

    @property
    def low(self) -> float:
        """The least of all."""
        return float(self.spans.min())

    @property
    def high(self) -> float:
        """The largest of all."""
        return float(self.spans.max())

    def meets(self, low: float, high: float) -> bool:
        """Return whether anything that was attained lies from ``low`` to ``high``."""
        least, most = self.spans.T
        return bool(((least <= high) & (low <= most)).any())


def _result(evidence: Evidence, values: Values, note: str, grade: str = "") -> Result:
    array = np.array([*values] if isinstance(values, Iterable) else [values], float)
    spans = array if array.ndim == 2 else np.stack([array, array], axis=1)
    return Result(evidence, np.unique(np.sort(spans, axis=1), axis=0), note, grade)


def measured(values: Values, note: str, grade: str, n: int = 0) -> Result:
    """Return what was measured here, a note, and its grade: of `ddlkit.core.timeline.ORIGINS`.

    n : how many cases or rounds they are of, if not one each; of several values all must be accepted
    """
    each = [*values] if isinstance(values, Iterable) else [values]
    interval = f"{'range' if len(each) > 1 else 'point'}, n = {n or len(each)}"
    return replace(_result(Evidence.MEASURED, each, note, grade), interval=interval)


def confident(
    samples: Floats, statistic: Callable[..., Any], note: str, grade: str
) -> Result:
    """Return the 95% BCa bootstrap interval of a statistic along an axis, of (n,) samples."""
    from scipy.stats import bootstrap  # takes as long to import as pandas

    ends = bootstrap(
        (samples,), statistic, n_resamples=500_000, rng=0
    ).confidence_interval
    result = _result(Evidence.MEASURED, [(ends.low, ends.high)], note, grade)
    return replace(result, interval=f"95% confidence interval, n = {len(samples)}")


counted = partial(_result, Evidence.COUNTED)
"""What published architectures have, or what an algorithm run to its end gives."""
modelled = partial(_result, Evidence.MODEL)
"""What a model says over what the paper leaves open."""
own = partial(_result, Evidence.OWN)
"""What the paper's own printed numbers say, within their rounding."""


def at_least(value: float, note: str) -> Result:
    """Return a lower bound on the claimed quantity."""
    return _result(Evidence.BOUND, [(value, math.inf)], note)


def at_most(value: float, note: str) -> Result:
    """Return an upper bound on the claimed quantity."""
    return _result(Evidence.BOUND, [(-math.inf, value)], note)


def by_model(
    search: SettingSearch,
    quantity: str,
    scale: float = 1,
    offset: float = 0,
    note: str = "",
) -> Result:
    """Return a quantity's values in the settings that meet the most *other* statements, which judge it."""

    def judge(low: float, high: float) -> Verdict:
        left = search.without(
            quantity, *((end - offset) / scale for end in (low, high))
        )
        least, most = (offset + scale * end for end in left.ends)
        text = (
            f"of {left.others} other statements at most {left.most} hold together, {left.with_it} with it; it"
            f" holds in {left.counted:.0%} of the {left.settings:,} settings that meet the most, itself"
            f" counted ({least:.4g} to {most:.4g}), in {left.uncounted:.0%} of those with the most others"
        )
        few = {name: values for name, values in left.only.items() if len(values) <= FEW}
        for name, values in few.items():
            text += f"; only where {name} is {' or '.join(f'{value:.3g}' for value in values)}"
        return Verdict(
            Outcome(left.standing), text.replace("-1 with it", "it holds nowhere")
        )

    return replace(
        modelled(offset + scale * search.without(quantity).values, note), judge=judge
    )


def over_compatible(search: SettingSearch) -> str:
    """Return over which settings a range goes, for a note."""
    return (
        f"over {int(search.most().sum()):,} settings, which agree with {search.count.max()} of the "
        f"{len(search.stated)} statements"
    )


FEW = 4  # values that are listed; more are left out, or their ends stand for all
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

    def verdict(self, result: Result) -> Verdict:
        """Return what a result says of the claim: it agrees if an attained value is accepted.

        Of what was measured or counted, over links, networks or repeats, all must be accepted.
        """
        if self.relation not in RELATIONS:
            raise UserError(
                f"relation {self.relation!r}: write one of {', '.join(RELATIONS)}"
            )
        low, high = self.accepted
        if result.judge:
            return result.judge(low, high)
        if result.evidence in FIRM:
            inside = low <= result.low and result.high <= high
            return Verdict(Outcome.REPRODUCED if inside else Outcome.DIFFERS)
        return Verdict(
            Outcome.COMPATIBLE if result.meets(low, high) else Outcome.CONTRADICTED
        )


@cache
def load_claims() -> tuple[Claim, ...]:
    """Return all claims under data/papers, paper by paper in the order written."""
    tables = [
        paper_table(key, "claims", dtype=str, keep_default_na=False) for key in PAPERS
    ]
    rows = pd.concat(tables).astype({"value": float, "tolerance": float})
    return tuple(Claim(**row) for row in rows.to_dict("records"))


# -- tables and prose ----------------------------------------------------------------------------


def paper_table(paper: str, name: str, **options: Any) -> pd.DataFrame:
    """Return data/papers/<paper>/<name>.csv. Raises UserError if it is missing, or edited since."""
    path = places.DATA / "papers" / paper / f"{name}.csv"
    return pd.read_csv(io.BytesIO(transcribed.read_transcribed(path)), **options)


def waiting() -> pd.DataFrame:
    """Return the open claims, by id: ``notebook`` that will decide it ("" if none can), and ``why``."""
    return (
        pd.concat([paper_table(paper, "open") for paper in PAPERS])
        .set_index("claim")
        .fillna("")
    )


@cache
def halved() -> pd.DataFrame:
    """Return the outcomes of modelled claims on a grid, and with half its step along each ``axis``."""
    return pd.read_csv(places.DATA / "halved.csv")


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
    """Return a table of symbols: symbol, meaning in our words, ``ddlkit``: its name below the package."""
    names = paper_table(paper, "symbols").set_index("symbol")["ddlkit"].to_dict()
    printed = paper_table(paper, name)
    return printed.assign(ddlkit=[names[symbol] for symbol in printed["symbol"]])


def claimed(claim: str) -> float:
    """Return the value of another claim, for checks that follow from it."""
    return {each.id: each.value for each in load_claims()}[claim]


def prose(paper: str) -> dict[str, float]:
    """Return the numbers of a paper's prose, by their id in data/papers/<paper>/prose.csv."""
    return paper_table(paper, "prose").set_index("id")["value"].astype(float).to_dict()
