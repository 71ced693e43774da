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
        the name of the set. A case is a network and a bucket plan in a lab, which is some
        workers and their links.

    Returns
    -------
    DataFrame
        A row for each goal, and below them the rows of WITHOUT_GOAL. The columns are
        ``goal`` (what it is called), ``wanted`` (its bound, or "" without a goal), and for
        each set one with what it reached, such as "first set".
    """
    # The goals that data/goals.yml has for links with delay, jitter and loss.
    goals = accuracy.goals("links")
    reached_by_set = {}
    for name, cases in sets.items():
        reached_by_set[f"{name} set"] = [
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
            **reached_by_set,
        }
    )


def _wanted(goal: accuracy.Goal) -> str:
    """Return the bound of a goal in per cent. These goals have one bound each."""
    if goal.at_least > -math.inf:
        return f"at least {goal.at_least:.0%}"
    return f"at most {goal.at_most:.0%}"


def _outcomes(goals: list[accuracy.Goal], cases: pd.DataFrame) -> list[str]:
    """Return for each goal the number that the cases reach, and "missed" if it is missed.

    All goals of links are about shares, which are written in per cent, as in "0.75%" or
    "1.43%, missed".
    """
    outcomes = []
    for goal in goals:
        judgement = goal.judged(cases)
        outcome = f"{judgement['reached']:.2%}"
        if not judgement["holds"]:
            outcome += ", missed"
        outcomes.append(outcome)
    return outcomes


def _numbers_without_goal(cases: pd.DataFrame) -> list[str | int]:
    """Return the numbers of the rows of WITHOUT_GOAL, in their order.

    ``model_error`` is the relative error of our model, which takes the costs of messages from
    the lab of the case. ``transferred_error`` is that of the model which takes them from other
    labs.
    """
    # Only some cases, the transferred ones, were also predicted with the costs of other labs.
    # The error of the transferred model has a goal of its own. The error of our model on the
    # same cases shows which of the two models is better.
    transferred = cases.dropna(subset="transferred_error")
    our_median_error = transferred["model_error"].abs().median()
    largest_error = cases["model_error"].abs().max()
    return [
        f"{our_median_error:.2%}",
        f"{largest_error:.2%}",
        len(cases),
        len(transferred),
        cases["lab"].nunique(),
    ]
