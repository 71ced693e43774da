"""The table of notebook 11: which goals four sets of labs reached, whose links have delays."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from workbook.validate import accuracy

MEANINGS = {
    "median error, iteration": "median error of steps",
    "median error, exposed": (
        "median error of exposed communication, which compute does not hide"
    ),
    "median error, carried": "median error of steps, transferred model",
    "cases within 5%": "cases with errors of at most 5%",
    "interval covers, least": "single steps in their 95% intervals",
    "interval covers, most": "single steps in their 95% intervals",
}
"""What each goal of data/goals.yml is called in the notebook."""
WITHOUT_GOAL = (
    "median error of steps, our model on the transferred cases",
    "largest error of a step",
    "number of cases",
    "number of transferred cases",
    "number of labs",
)
"""The rows below those of the goals."""


def reached(sets: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return what each set of labs reached of the goals that were set for such labs.

    Parameters
    ----------
    sets : mapping of str to DataFrame
        The cases of each set, as `workbook.validate.accuracy.labelled` returns them, by
        the name of the set. A case is a network and a bucket plan in a lab.

    Returns
    -------
    DataFrame
        A row for each goal, and below them the rows of WITHOUT_GOAL. The columns are
        ``goal``, ``wanted``, and one for each set.
    """
    goals = accuracy.goals("links")
    columns = {}
    for name, cases in sets.items():
        columns[f"{name} set"] = [
            *_outcomes(goals, cases),
            *_numbers_without_goal(cases),
        ]
    meanings = [MEANINGS[goal.goal] for goal in goals]
    bounds = [_wanted(goal) for goal in goals]
    no_bounds = [""] * len(WITHOUT_GOAL)
    return pd.DataFrame(
        {
            "goal": [*meanings, *WITHOUT_GOAL],
            "wanted": [*bounds, *no_bounds],
            **columns,
        }
    )


def _wanted(goal: accuracy.Goal) -> str:
    """Return the bound of a goal in per cent."""
    if goal.at_least > -math.inf:
        return f"at least {goal.at_least:.0%}"
    return f"at most {goal.at_most:.0%}"


def _outcomes(goals: list[accuracy.Goal], cases: pd.DataFrame) -> list[str]:
    """Return the number that cases reach of each goal, and whether they miss the goal."""
    outcomes = []
    for goal in goals:
        judged = goal.judged(cases)
        outcome = f"{judged['reached']:.2%}"
        if not judged["holds"]:
            outcome += ", missed"
        outcomes.append(outcome)
    return outcomes


def _numbers_without_goal(cases: pd.DataFrame) -> list[str | int]:
    """Return the numbers of the rows of WITHOUT_GOAL, in their order."""
    # Only some cases, the transferred ones, were also predicted with the costs of other labs.
    transferred = cases.dropna(subset="transferred_error")
    return [
        f"{transferred['model_error'].abs().median():.2%}",
        f"{cases['model_error'].abs().max():.2%}",
        len(cases),
        len(transferred),
        cases["lab"].nunique(),
    ]
