"""At which level a wish of `ddlkit scale` would be answered often and rightly.

docs/studies.md has the criterion, which was written down before levels were compared. All
curves were in sight by then, so that the comparison is exploratory.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from ddlkit.core import scaling as law
from ddlkit.core.workload import Floats
from workbook.validate.clusters import scaling
from workbook.validate.clusters.scaling_intervals import quantile, steps_in_sight

LEVELS = (0.95, 0.925, 0.90, 0.875, 0.85)
"""The one-sided levels that are compared. The first one is that of the command."""
LEAST_ANSWERED = 0.60
LEAST_RIGHT = 0.95
"""The goals for wishes, as in data/goals.yml."""
LEAST_ANSWERS = 20
"""A source with fewer answers does not decide by itself."""
TOGETHER = "together"
"""The name of all sets together."""


def residuals(steps: pd.DataFrame) -> Floats:
    """Return how far measured steps lie from their predictions, in half-widths of the 90% interval.

    Parameters
    ----------
    steps : DataFrame
        Steps as `steps_in_sight` returns them, of n rows. ``measured_s`` is predicted from the
        step ``anchor_s`` on fewer nodes, the anchor, and from ``smallest_s``, that of the
        curve's smallest count, such as one GPU. ``ratio`` is the number of nodes divided by
        that of the anchor. ``slowest_s`` is the slowest step of the anchor and all smaller
        counts.

    Returns
    -------
    ndarray, shape (n,)
        Absolute values. A half-width is the distance of the prediction from the limit on the
        side of the measured step.
    """
    smallest_s = steps["smallest_s"]
    anchor_s = steps["anchor_s"]
    ratio = steps["ratio"]
    predicted_s = law.step_s(smallest_s, anchor_s, ratio)
    lower_s, upper_s = law.step_interval_s(
        smallest_s, anchor_s, ratio, steps["slowest_s"]
    )
    error_s = steps["measured_s"].to_numpy() - predicted_s
    half_s = np.where(error_s > 0, upper_s - predicted_s, predicted_s - lower_s)
    return np.abs(error_s) / half_s


def width_ratio(level: float, without: str = "") -> float:
    """Return the half-width of the interval at a level, divided by that of the 90% interval.

    Both are quantiles of the `residuals`, the absolute distances of measured steps from their
    predictions. An interval that reaches as far as the quantile q on either side of a prediction
    contains the share q of the steps. The steps are those of `steps_in_sight`, which were known
    when the command's interval was chosen.

    Parameters
    ----------
    level : float
        The one-sided level p, the share of steps on the inner side of one limit. If a share of
        1 - p lies beyond either limit, 2 p - 1 lies between both.
    without : str, optional
        A source whose steps are left out, so that its wishes can be judged by the ratio. By
        default all steps are used.

    Returns
    -------
    float
        The ratio of two quantiles, where each set has the same weight.
    """
    in_sight = _residuals_in_sight()
    used = in_sight[in_sight["source"] != without]
    distances = used["residual"].to_numpy()
    half_width = quantile(distances, used["set"], 2 * level - 1)
    half_width_of_90 = quantile(distances, used["set"], law.NOMINAL)
    return half_width / half_width_of_90


@cache
def _residuals_in_sight() -> pd.DataFrame:
    """Return the residual of each step in sight, with its set and source."""
    steps = steps_in_sight()
    return steps[["set", "source"]].assign(residual=residuals(steps))


def later_cases() -> pd.DataFrame:
    """Return the cases of the curves that were first read after the law had been committed.

    Returns
    -------
    DataFrame
        The columns of `workbook.validate.clusters.scaling.cases`, with ``source`` (the name of
        its folder) and ``set`` (what is judged together: a source, or the curves of a machine).
    """
    cases = scaling.later_cases()
    # Curves of the machine p2.8xlarge are a set of their own, as the criterion in
    # docs/studies.md has it.
    is_p2 = cases["curve"].str.startswith("p2.8xlarge")
    return cases.assign(set=cases["source"].where(~is_p2, "p2.8xlarge"))


def cases_in_sight() -> pd.DataFrame:
    """Return the cases of the sets on which the law was chosen. This takes some minutes.

    Returns
    -------
    DataFrame
        The columns of `workbook.validate.clusters.scaling.cases`, with ``set`` (what is judged
        together) and ``source`` (who published it).
    """
    tables = []
    for name, curves in scaling.sets().items():
        # A name is the source and, after a comma, what its sets differ in. Those of Pollux are
        # different networks, which are judged apart. Other sets of one source, such as
        # "Anemoi, mean" and "Anemoi, median", are judged together.
        source = name.partition(",")[0]
        # As in the goals, counts of at most MOST_TIMES the nodes of the anchor, the count from
        # which they are predicted.
        own = scaling.cases(curves, most_times=scaling.MOST_TIMES)
        judged_as = name if source == "Pollux" else source
        tables.append(own.assign(set=judged_as, source=source))
    return pd.concat(tables, ignore_index=True)


def answers(cases: pd.DataFrame, level: float) -> pd.DataFrame:
    """Return which wishes would be answered at a level, and whether rightly.

    A wish asks whether the scaling factor on more nodes is at least `scaling.WISH`. The factor is
    the step of the smallest count (``one_s``), divided by the measured one.

    Parameters
    ----------
    cases : DataFrame
        Cases with ``source``, as `later_cases` returns them, of n rows. ``answered_today`` is
        whether the command as it is answers the wish of a case.
    level : float
        The one-sided level, on which the width of the intervals depends.

    Returns
    -------
    DataFrame
        The columns ``answered`` and ``right``, a row for each case. ``right`` is NaN without
        an answer.
    """
    # The command leaves a wish open if a step that decides it is doubtful and has to be measured
    # again. Such a wish stays open at every level. It is recognized by the command's interval,
    # whose width has the ratio 1: the interval alone would have answered it.
    is_answered_by_interval, _ = _answered(cases, ratio=np.ones(len(cases)))
    is_doubtful = is_answered_by_interval & ~cases["answered_today"].to_numpy(bool)
    # No source is judged by a width that its own steps chose.
    ratios = {
        name: width_ratio(level, without=name) for name in cases["source"].unique()
    }
    is_answered, is_yes = _answered(cases, cases["source"].map(ratios).to_numpy())
    is_answered = is_answered & ~is_doubtful
    is_met = (cases["one_s"] / cases["measured_s"] >= scaling.WISH).to_numpy()
    right = np.where(is_answered, is_yes == is_met, np.nan)
    return pd.DataFrame({"answered": is_answered, "right": right}, index=cases.index)


def _answered(cases: pd.DataFrame, ratio: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Return which wishes are answered, and which with yes: two arrays of bool, shape (n,).

    A count is a number of nodes with a number of GPUs. A wish asks whether the scaling factor, the
    step of the smallest count divided by that of a larger one, is at least `scaling.WISH`. It is
    answered if all likely steps of both counts give the same answer. The likely steps of the
    smallest count reach from ``fastest_one_s`` to ``slowest_one_s``, the steps of its fastest and
    slowest job. The likely steps of the larger count are its interval, whose half-widths are
    multiplied by ``ratio``, shape (n,).
    """
    predicted_s = cases["predicted_s"]
    lower_s = predicted_s - ratio * (predicted_s - cases["lower_s"])
    upper_s = predicted_s + ratio * (cases["upper_s"] - predicted_s)
    # The step of the larger count is predicted from that of fewer nodes, the anchor. More nodes do
    # not shorten a step, so that it is at least ``least_s``, the shortest likely one on the anchor.
    lower_s = np.maximum(lower_s, cases["least_s"])
    # The answer is yes if even the smallest likely factor is enough, and no if even the largest
    # one is too small.
    is_yes = (cases["fastest_one_s"] / upper_s >= scaling.WISH).to_numpy()
    is_no = (cases["slowest_one_s"] / lower_s < scaling.WISH).to_numpy()
    is_answered = is_yes | is_no
    return is_answered, is_yes


def compared(cases: pd.DataFrame) -> pd.DataFrame:
    """Return which share of wishes each of LEVELS answers, and which share of answers is right.

    A wish asks whether the scaling factor is at least `scaling.WISH`. The narrower intervals of a
    lower level answer more wishes.

    Parameters
    ----------
    cases : DataFrame
        Cases with ``set`` and ``source``, as `later_cases` and `cases_in_sight` return them.

    Returns
    -------
    DataFrame
        One row for each level and group of cases. The columns are ``level``, ``kind`` ("set",
        "source" or `TOGETHER`), ``name`` (of the set or source), ``cases`` and ``answers``
        (numbers), and ``answered`` and ``right`` (shares).
    """
    rows = []
    for level in LEVELS:
        own = answers(cases, level)
        # The kind of each group, its name, and its rows.
        groups = [(TOGETHER, TOGETHER, own)]
        for kind in ("set", "source"):
            groups += [
                (kind, name, part)
                for name, part in own.groupby(cases[kind], sort=False)
            ]
        for kind, name, part in groups:
            rows.append(
                {
                    "level": level,
                    "kind": kind,
                    "name": name,
                    "cases": len(part),
                    "answers": int(part["answered"].sum()),
                    "answered": part["answered"].mean(),
                    # The mean leaves out cases without an answer, whose ``right`` is NaN.
                    "right": part["right"].mean(),
                }
            )
    return pd.DataFrame(rows)


def admissible(table: pd.DataFrame) -> list[float]:
    """Return the levels that the criterion of docs/studies.md admits.

    Parameters
    ----------
    table : DataFrame
        What `compared` returns.

    Returns
    -------
    list of float
        The one-sided levels.
    """
    meets_both = (table["answered"] >= LEAST_ANSWERED) & (table["right"] >= LEAST_RIGHT)
    table = table.assign(meets_both=meets_both)
    levels = []
    for level, own in table.groupby("level"):
        # There are two goals: a share of wishes that are answered, and a share of answers that
        # are right. A level is admitted if all cases together and most sets meet both goals,
        # and if each source with at least LEAST_ANSWERS answers meets the second goal.
        together_meet = own.loc[own["kind"] == TOGETHER, "meets_both"].all()
        decides = (own["kind"] == "source") & (own["answers"] >= LEAST_ANSWERS)
        sources_meet = (own.loc[decides, "right"] >= LEAST_RIGHT).all()
        most_sets_meet = own.loc[own["kind"] == "set", "meets_both"].mean() > 0.5
        if together_meet and sources_meet and most_sets_meet:
            levels.append(float(level))
    return levels
