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
WITHOUT_GOAL = {
    "our_median_error": "median error of steps, our model on the transferred cases",
    "largest_error": "largest error of a step",
    "cases": "number of cases",
    "transferred_cases": "number of transferred cases",
    "labs": "number of labs",
}
"""What the rows below those of the goals are called in the notebook, in their order."""


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
        numbers = _numbers_without_goal(cases)
        reached_by_set[f"{name} set"] = [
            *_outcomes(goals, cases),
            *[numbers[row] for row in WITHOUT_GOAL],
        ]
    meanings = [MEANINGS[goal.goal] for goal in goals]
    bounds = [_wanted(goal) for goal in goals]
    no_bounds = [""] * len(WITHOUT_GOAL)
    return pd.DataFrame(
        {
            "goal": [*meanings, *WITHOUT_GOAL.values()],
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


def _numbers_without_goal(cases: pd.DataFrame) -> dict[str, str | int]:
    """Return the number of each row of WITHOUT_GOAL, by the key of the row.

    A case has a ``transferred_error`` if it was also predicted by the transferred model, which
    takes the costs of messages from other labs. Our model, whose error is ``model_error``, takes
    them from the lab of the case.
    """
    transferred = cases.dropna(subset="transferred_error")
    # A goal asks for the median error of the transferred model. That of our model on the same
    # cases is given for comparison.
    our_median_error = transferred["model_error"].abs().median()
    largest_error = cases["model_error"].abs().max()
    return {
        "our_median_error": f"{our_median_error:.2%}",
        "largest_error": f"{largest_error:.2%}",
        "cases": len(cases),
        "transferred_cases": len(transferred),
        "labs": cases["lab"].nunique(),
    }
