"""What the papers print, and the checks of their claims.

The transcribed claims, tables and numbers of prose are read from data/papers. A claim
is a row of data/papers/<key>/claims.csv. Its check is a function that is registered
under the id of the claim, never sees the printed value, and returns a `Result`. A claim
agrees with a result if the printed number, with its tolerance, meets a number that was
computed. A statement about an unstated setting is judged by the settings that agree
with the other statements, which is the task of `workbook.common.settings.LeftOut`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats
from workbook.common import papers, places, transcribed
from workbook.common.settings import HALF, LeftOut, SettingSearch

PAPERS = tuple(papers.PAPERS)


class Evidence(StrEnum):
    """The kinds of evidence that judge a claim, the strongest first."""

    MEASURED = "measured here"
    COUNTED = "counted independently"
    MODEL = "model, compatible settings"
    BOUND = "bound"
    OWN = "the paper's own numbers"
    NONE = "nothing yet"


class Outcome(StrEnum):
    """The outcomes of a claim. Only measured or counted evidence can reproduce a claim.

    A requirement is met or missed: no paper claimed it.
    """

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    COMPATIBLE = "compatible"
    CONTRADICTED = "contradicted"
    UNDECIDED = "undecided"
    NOT_TESTABLE = "not testable here"
    OPEN = "open"
    MET = "met"
    MISSED = "missed"


REQUIREMENTS = "pytorch"
"""The paper whose claims are requirements of ours, with outcomes of their own."""
AS_REQUIREMENT = {Outcome.REPRODUCED: Outcome.MET, Outcome.DIFFERS: Outcome.MISSED}
"""The outcome of a requirement, by that of a claim."""


FIRM = (Evidence.MEASURED, Evidence.COUNTED)
"""The evidence that can reproduce a claim. All other can only be compatible with one."""
RELATIONS = ("=", "<=", ">=")
"""How the computed number relates to the printed one: equal, at most, at least."""


# -- what a check returns ------------------------------------------------------------

Values = float | Iterable[float] | Iterable[Sequence[float] | Floats]
"""The numbers that a check has computed.

They are a single number, or all numbers that the quantity takes (over links, networks
or settings), or pairs of the ends of intervals in which all numbers are taken."""


class Verdict(NamedTuple):
    """The outcome of a claim, and text to add to the note of the result.

    Attributes
    ----------
    outcome : Outcome
        What the evidence says of the claim.
    note : str
        An explanation.
    """

    outcome: Outcome
    note: str = ""


@dataclass(frozen=True, eq=False)
class Result:
    """What a check has computed, in the unit of the claim.

    Attributes
    ----------
    evidence : Evidence
        The kind of evidence.
    spans : ndarray, shape (n, 2)
        Intervals of attained numbers. A single number is both ends of its interval.
    note : str
        What was computed, and from what.
    grade : str
        The grade of truth of a measurement, one of `ddlkit.core.timeline.ORIGINS`, else
        empty.
    interval : str
        Whether a measured result is a point, a range or a confidence interval, and of
        how many numbers.
    judge : callable, optional
        A function of the lowest and the highest accepted value that returns the verdict.
        Without it, the spans decide.

    Raises
    ------
    ValueError
        If there is no number, if one is NaN, or if the evidence is of no known kind.
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
        # The constructor of the enumeration raises ValueError for an unknown kind.
        Evidence(self.evidence)

    @property
    def low(self) -> float:
        """Return the least attained number."""
        return float(self.spans.min())

    @property
    def high(self) -> float:
        """Return the largest attained number."""
        return float(self.spans.max())

    @property
    def excludes_nothing(self) -> bool:
        """Return whether the spans begin at zero or below. Such a bound supports no claim.

        A bound is an interval in which the quantity must lie. The bounded quantities, such as
        the parts of an iteration, are never negative, so that a lower end of zero excludes no
        value. By choice the upper end does not count. For a part of an iteration, it may say
        only that the part is at most as long as the whole, which is true of every part.
        """
        return self.low <= 0

    def meets(self, low: float, high: float) -> bool:
        """Return whether an attained number lies from ``low`` to ``high``."""
        least, most = self.spans.T
        return bool(((least <= high) & (low <= most)).any())


def _result(evidence: Evidence, values: Values, note: str, grade: str = "") -> Result:
    """Return a result of numbers or of intervals, without repetitions.

    Parameters
    ----------
    evidence : Evidence
        The kind of evidence.
    values : float or iterable
        The numbers, or pairs of the ends of intervals in any order.
    note, grade : str
        As in `Result`.
    """
    listed = [*values] if isinstance(values, Iterable) else [values]
    array = np.array(listed, float)
    is_intervals = array.ndim == 2
    # A number is both ends of its interval.
    spans = array if is_intervals else np.stack([array, array], axis=1)
    # The lower end of each interval comes first.
    spans = np.sort(spans, axis=1)
    return Result(evidence, np.unique(spans, axis=0), note, grade)


def measured(values: Values, note: str, grade: str, n: int = 0) -> Result:
    """Return a result that was measured here.

    Parameters
    ----------
    values : float or iterable
        The measured numbers, or intervals. All must be accepted for the claim to be
        reproduced.
    note : str
        What was measured.
    grade : str
        The grade of truth, one of `ddlkit.core.timeline.ORIGINS`.
    n : int, optional
        How many cases or rounds the numbers together stand for. By default each number
        stands for one.

    Returns
    -------
    Result
        Its ``interval`` says whether it is a point (of one number) or a range, and ``n``.
    """
    listed = [*values] if isinstance(values, Iterable) else [values]
    kind = "range" if len(listed) > 1 else "point"
    result = _result(Evidence.MEASURED, listed, note, grade)
    return replace(result, interval=f"{kind}, n = {n or len(listed)}")


def confident(
    samples: Floats, statistic: Callable[..., Any], note: str, grade: str
) -> Result:
    """Return the 95% confidence interval of a statistic, as a measured result.

    Parameters
    ----------
    samples : ndarray, shape (n,)
        The measured numbers.
    statistic : callable
        The statistic, along an axis, as `scipy.stats.bootstrap` takes it.
    note : str
        What was measured.
    grade : str
        The grade of truth, one of `ddlkit.core.timeline.ORIGINS`.

    Returns
    -------
    Result
        The interval of the bias-corrected and accelerated (BCa) bootstrap.
    """
    # SciPy's statistics take as long to import as pandas, so they are imported only here.
    from scipy.stats import bootstrap

    # The fixed seed gives the same interval each time.
    drawn = bootstrap((samples,), statistic, n_resamples=500_000, rng=0)
    ends = drawn.confidence_interval
    result = _result(Evidence.MEASURED, [(ends.low, ends.high)], note, grade)
    return replace(result, interval=f"95% confidence interval, n = {len(samples)}")


counted = partial(_result, Evidence.COUNTED)
"""Return what published architectures have, or what a whole run of an algorithm gives."""
modelled = partial(_result, Evidence.MODEL)
"""Return what a model says, over the settings that the paper leaves open."""
own = partial(_result, Evidence.OWN)
"""Return what the paper's own printed numbers say, within their rounding."""


def at_least(value: float, note: str) -> Result:
    """Return a lower bound of the claimed quantity."""
    return _result(Evidence.BOUND, [(value, math.inf)], note)


def at_most(value: float, note: str) -> Result:
    """Return an upper bound of the claimed quantity."""
    return _result(Evidence.BOUND, [(-math.inf, value)], note)


def by_model(
    search: SettingSearch,
    quantity: str,
    scale: float = 1,
    offset: float = 0,
    note: str = "",
) -> Result:
    """Return a result that is judged by the settings which meet the other statements.

    Parameters
    ----------
    search : SettingSearch
        All settings against the paper's statements.
    quantity : str
        The name of the quantity of the search that the claim is about.
    scale, offset : float, optional
        The claim's number is ``offset + scale * quantity``. The scale is positive.
    note : str, optional
        A remark on the quantity.

    Returns
    -------
    Result
        The values of the quantity in the settings that meet the most *other*
        statements. They judge the claim.
    """

    def judge(low: float, high: float) -> Verdict:
        """Judge the interval of the quantity by the settings that meet the most others."""
        # The accepted values of the claim's number, as values of the quantity.
        lower = (low - offset) / scale
        upper = (high - offset) / scale
        # How the interval stands with all statements but that of this quantity.
        left_out = search.without(quantity, lower, upper)
        # The values of the quantity in the settings that meet the most other statements.
        # They are in ascending order, so that these are the least and the largest.
        lowest, highest = offset + scale * left_out.values[[0, -1]]
        # The standing is a text such as "compatible", which is the value of an Outcome.
        outcome = Outcome(left_out.standing)
        return Verdict(outcome, _how_it_stands(left_out, lowest, highest))

    # No interval is given here, because the values do not depend on it: the other statements
    # alone choose the settings.
    values = offset + scale * search.without(quantity).values
    return replace(modelled(values, note), judge=judge)


def _how_it_stands(left_out: LeftOut, lowest: float, highest: float) -> str:
    """Return the text of a verdict on a statement by the settings that the others choose.

    Parameters
    ----------
    left_out : LeftOut
        How the statement stands with the others, which choose the settings without it.
    lowest, highest : float
        The range of the claim's number in the settings that meet the most others.
    """
    together = "it holds nowhere"
    # ``with_it`` is how many others hold at most where the statement holds, or -1 if it never does.
    if left_out.with_it >= 0:
        together = f"{left_out.with_it} with it"
    text = (
        f"of {left_out.others} other statements at most {left_out.most} hold together, "
        f"{together}; it holds in {left_out.share:.0%} of the {left_out.settings:,} "
        f"settings that meet the most others ({lowest:.4g} to {highest:.4g})"
    )
    # By the name of a scanned number, the only values at which the statement holds in any setting
    # of the grid. They are listed if they are few, because many would make the text long.
    for name, values in left_out.only.items():
        if len(values) <= FEW:
            listed = " or ".join(f"{value:.3g}" for value in values)
            text += f"; only where {name} is {listed}"
    return text


def by_readings(readings: Mapping[str, Result], note: str = "") -> Result:
    """Return a result on which all fair readings of a sentence must agree.

    Parameters
    ----------
    readings : mapping of str to Result
        What each reading gives. The evidence and the grade of the first one are those of the
        result.
    note : str, optional
        What holds for all readings.

    Returns
    -------
    Result
        The values of all readings. Each reading is judged by itself, and the claim is
        undecided if the outcomes differ.
    """
    results = list(readings.values())

    def judge(low: float, high: float) -> Verdict:
        """Judge each reading by its own result, and say whether all outcomes agree."""
        outcomes = []
        notes = []
        for reading, result in readings.items():
            verdict = judged(result, low, high)
            outcomes.append(verdict.outcome)
            explanations = [text for text in (result.note, verdict.note) if text]
            # Without explanations, nothing stands after the colon, which is cut off.
            text = f"{reading}, {verdict.outcome}: {', '.join(explanations)}"
            notes.append(text.removesuffix(": "))
        all_agree = len(set(outcomes)) == 1
        outcome = outcomes[0] if all_agree else Outcome.UNDECIDED
        return Verdict(outcome, "; ".join(notes))

    spans = np.concatenate([result.spans for result in results])
    spans = np.unique(spans, axis=0)
    return replace(results[0], spans=spans, note=note, judge=judge)


def rounded_or_cut_off(result: Result) -> Result:
    """Return a result for a claim whose number may have been rounded or cut off in print.

    Parameters
    ----------
    result : Result
        A result for a claim whose tolerance is half a unit of the last printed digit.

    Returns
    -------
    Result
        The result, which both readings of the printed number judge, as in `by_readings`.
    """

    def judge_cut_off(low: float, high: float) -> Verdict:
        # The printed number is in the middle of the accepted values. If digits were cut
        # off, the full number lies between the printed one and one unit more.
        half_a_unit = (high - low) / 2
        return judged(result, low + half_a_unit, high + half_a_unit)

    # The note is given once, and not for each reading.
    readings = {
        "rounded": replace(result, note=""),
        "cut off": replace(result, note="", judge=judge_cut_off),
    }
    return by_readings(readings, result.note)


def by_cases(values: Values, note: str) -> Result:
    """Return what a model says in several cases, each of which counts as one.

    Cases are combinations of what the paper leaves open. A range over them is no range of
    uncertainty, because a number that one case attains is not supported by the others.

    Parameters
    ----------
    values : float or iterable
        A number, or the two ends of an interval, for each case. A float is a single case.
    note : str
        What was computed, and from what.

    Returns
    -------
    Result
        A claim is compatible if it agrees with at least half of the cases, contradicted
        if it agrees with none, and otherwise undecided.
    """
    listed = [*values] if isinstance(values, Iterable) else [values]
    array = np.array(listed, float)
    if array.ndim == 1:
        # A number is both ends of its interval.
        array = np.stack([array, array], axis=1)

    def judge(low: float, high: float) -> Verdict:
        # A case agrees if its interval and the accepted values meet.
        agrees = (array.min(axis=1) <= high) & (low <= array.max(axis=1))
        outcome = by_share(float(agrees.mean()))
        return Verdict(outcome, f"{agrees.sum()} of {len(agrees)} cases agree")

    return replace(modelled(array, note), judge=judge)


def by_share(share: float) -> Outcome:
    """Return the outcome of a claim that agrees with a share of the cases."""
    if share == 0:
        return Outcome.CONTRADICTED
    if share >= HALF:
        return Outcome.COMPATIBLE
    return Outcome.UNDECIDED


def over_compatible(search: SettingSearch) -> str:
    """Return a phrase for a note on a range: over how many settings it was taken.

    These are the settings of the search that agree with the most statements.
    """
    n_settings = int(search.most().sum())
    return (
        f"over {n_settings:,} settings, which agree with {search.count.max()} of the "
        f"{len(search.stated)} statements"
    )


FEW = 4
"""How many values of a scanned number a note lists. More are left out."""
CHECKS: dict[str, Callable[[], Result]] = {}
"""The functions that compute results, by the id of their claim."""
Checking = TypeVar("Checking", bound=Callable[..., Result])


def check(claim: str, *arguments: Any) -> Callable[[Checking], Checking]:
    """Return a decorator that registers a function as the check of a claim.

    Parameters
    ----------
    claim : str
        The id of the claim.
    *arguments
        The arguments with which the function is called when the claim is judged.

    Returns
    -------
    callable
        The decorator. It returns the function as it is, so that one function can be
        registered for several claims.
    """

    def register(function: Checking) -> Checking:
        CHECKS[claim] = partial(function, *arguments)
        return function

    return register


# -- claims --------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One number that a paper prints, and how closely a result must agree with it.

    Attributes
    ----------
    id : str
        The id, which begins with the paper's abbreviation.
    paper : str
        The paper's abbreviation.
    place : str
        Where in the paper the number stands.
    quantity : str
        What the number is of.
    relation : str
        One of RELATIONS. An ordering ("A is above B") is a ratio or a count with a
        bound.
    value : float
        The printed number, in ``unit``.
    unit : str
        The unit.
    tolerance : float
        The relative tolerance.
    condition : str
        Under which condition the claim is made.
    figure : str
        The figure of the catalog that shows the claim, or "".
    errata : str
        The entries of the paper's errata.md, separated by spaces.
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
        """Return the least and the largest value that agree with the printed one."""
        # With 1e-12 more, an error of rounding cannot turn an exact match into a difference.
        margin = (self.tolerance + 1e-12) * abs(self.value)
        low = self.value - margin
        high = self.value + margin
        # A number that is at most the printed one has no lower limit, and one that is at least
        # the printed one has no upper limit.
        if self.relation == "<=":
            low = -math.inf
        if self.relation == ">=":
            high = math.inf
        return low, high

    def verdict(self, result: Result) -> Verdict:
        """Return the outcome of the claim under a result.

        Parameters
        ----------
        result : Result
            What was computed. If it has a ``judge``, this function decides. Else the claim
            must accept all numbers that were measured or counted, such as those of several
            links, networks or repeats. Of other evidence, it need accept only one number.
            Evidence of the kind BOUND is an interval in which the quantity must lie. If it
            begins at zero or below, it excludes too little to support a claim
            (`Result.excludes_nothing`), and a claim that agrees with it is not testable.

        Returns
        -------
        Verdict

        Raises
        ------
        UserError
            If the claim's relation is not one of RELATIONS.
        """
        if self.relation not in RELATIONS:
            raise UserError(
                f"relation {self.relation!r}: write one of {', '.join(RELATIONS)}"
            )
        # `judged` applies the rules above.
        return judged(result, *self.accepted)


def judged(result: Result, low: float, high: float) -> Verdict:
    """Return the outcome of a claim that accepts what lies from ``low`` to ``high``.

    Parameters
    ----------
    result : Result
        What was computed.
    low, high : float
        The ends of the accepted interval, which may be infinite.

    Returns
    -------
    Verdict
        The outcome, by the rules that `Claim.verdict` states.
    """
    if result.judge:
        return result.judge(low, high)
    # If the numbers were measured or counted, all must be accepted.
    if result.evidence in FIRM:
        all_accepted = low <= result.low and result.high <= high
        return Verdict(Outcome.REPRODUCED if all_accepted else Outcome.DIFFERS)
    # Of any other evidence, one accepted number suffices.
    if not result.meets(low, high):
        return Verdict(Outcome.CONTRADICTED)
    # The quantities are never negative, so that a bound which begins at zero or below rules out
    # no small value. It can contradict a claim, but not support one.
    if result.evidence is Evidence.BOUND and result.excludes_nothing:
        return Verdict(Outcome.NOT_TESTABLE)
    return Verdict(Outcome.COMPATIBLE)


@cache
def load_claims() -> tuple[Claim, ...]:
    """Return all claims of data/papers, paper by paper in the order of their files."""
    tables = [
        paper_table(key, "claims", dtype=str, keep_default_na=False) for key in PAPERS
    ]
    rows = pd.concat(tables).astype({"value": float, "tolerance": float})
    return tuple(Claim(**row) for row in rows.to_dict("records"))


# -- tables and prose ----------------------------------------------------------------


def paper_table(paper: str, name: str, **options: Any) -> pd.DataFrame:
    """Return a transcribed table, data/papers/<paper>/<name>.csv.

    Parameters
    ----------
    paper : str
        The abbreviation of the paper.
    name : str
        The name of the table, such as "tab02" or "claims".
    **options
        Further arguments of `pandas.read_csv`.

    Raises
    ------
    UserError
        If the file is missing, or if it was changed since it was transcribed.
    """
    path = places.DATA / "papers" / paper / f"{name}.csv"
    content = transcribed.read_transcribed(path)
    # A tuple of the options is hashable, as the key of a cache must be. Callers get a copy
    # of the cached table, because they may change it.
    return _parsed(content, (*options.items(),)).copy()


@cache
def _parsed(content: bytes, options: tuple[tuple[str, Any], ...]) -> pd.DataFrame:
    """Return the table that a CSV file contains, parsed once for each content.

    ``options`` are further arguments of `pandas.read_csv` by name.
    """
    return pd.read_csv(io.BytesIO(content), **dict(options))


def without_check() -> pd.DataFrame:
    """Return the claims that have no check.

    Returns
    -------
    DataFrame
        By the id of the claim, its ``outcome``, the ``notebook`` that will decide it
        ("" if none can), and ``why`` it has no check. The outcome is "open" if nothing
        here computes the quantity. The outcome is "not testable here" if what was computed
        could not have disagreed, or if another claim judges the sentence.
    """
    tables = [paper_table(paper, "open") for paper in PAPERS]
    return pd.concat(tables).set_index("claim").fillna("")


@cache
def repeats() -> pd.DataFrame:
    """Return the claims that another claim already judges.

    Such claims are not counted, so that each sentence, and each equation between printed
    numbers, counts once.

    Returns
    -------
    DataFrame
        By the id of the claim, ``judged_by``, the id of the claim that counts, and
        ``why``: "sentence" if both claims are the same sentence of the paper, "identity"
        if one claim follows from the other by arithmetic.
    """
    return _of_papers("repeats")


def _of_papers(name: str) -> pd.DataFrame:
    """Return a table of all papers that have it, by the id of the claim."""
    tables = []
    for key in PAPERS:
        if (places.DATA / "papers" / key / f"{name}.csv").is_file():
            tables.append(paper_table(key, name, keep_default_na=False))
    return pd.concat(tables).set_index("claim")


@cache
def lines() -> pd.DataFrame:
    """Return what readers are told of each claim.

    Returns
    -------
    DataFrame
        By the id of the claim, the ``outcome`` that the text tells, one plain
        ``sentence`` with the outcome, the number and the reason, and ``how`` it was
        judged.
    """
    return _of_papers("lines")


@cache
def halved() -> pd.DataFrame:
    """Return the outcomes of modelled claims on grids with a halved step.

    Returns
    -------
    DataFrame
        A row for each ``claim`` and each ``axis`` of its grid of settings: the ``outcome``
        on the grid itself, and the outcome with half the step along this axis (``halved``).
    """
    return pd.read_csv(places.DATA / "halved.csv")


def recomputed(frame: pd.DataFrame, **columns: Iterable[float]) -> pd.DataFrame:
    """Return a printed table with the computed numbers next to the printed ones.

    Parameters
    ----------
    frame : DataFrame
        The printed table.
    **columns : iterable of float
        The computed numbers by the printed column.

    Returns
    -------
    DataFrame
        The printed table. Behind each of these columns it also has ``<column>_computed``
        and ``<column>_difference``, the relative difference from the printed number.

    Examples
    --------
    >>> recomputed(pd.DataFrame({"a": [2.0], "b": [1]}), a=[3.0]).to_dict("list")
    {'a': [2.0], 'a_computed': [3.0], 'a_difference': [0.5], 'b': [1]}
    """
    result = frame.copy()
    for column, values in columns.items():
        after = result.columns.get_loc(column) + 1
        result.insert(after, f"{column}_computed", list(values))
        difference = result[f"{column}_computed"] / frame[column] - 1
        result.insert(after + 1, f"{column}_difference", difference)
    return result


def symbols(paper: str, name: str) -> pd.DataFrame:
    """Return a paper's table of symbols with their names in the code.

    Parameters
    ----------
    paper : str
        The abbreviation of the paper.
    name : str
        The name of the table.

    Returns
    -------
    DataFrame
        The columns of the printed table, among them ``symbol`` and its meaning in our
        words. A further column ``ddlkit`` has the dotted name by which the package has the
        symbol, without the leading "ddlkit".
    """
    # The table "symbols" has the names of all symbols of the paper.
    names = paper_table(paper, "symbols").set_index("symbol")["ddlkit"].to_dict()
    printed = paper_table(paper, name)
    return printed.assign(ddlkit=[names[symbol] for symbol in printed["symbol"]])


def claimed(claim: str) -> float:
    """Return the printed value of another claim, for a check that follows from it."""
    values = {listed.id: listed.value for listed in load_claims()}
    return values[claim]


def prose(paper: str) -> dict[str, float]:
    """Return the numbers of a paper's prose by their id in data/papers/<paper>/prose.csv."""
    values = paper_table(paper, "prose").set_index("id")["value"]
    return values.astype(float).to_dict()
