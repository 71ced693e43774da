"""Models on trial beside ours: what each says of an iteration, from the same messages and workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import Iteration, Prediction, no_overlap, perfect_overlap
from ddlkit.core.link import Link
from ddlkit.model.calibration import UNFITTED
from ddlkit.model.predictor import Forecast
from ddlkit.papers.osf import predict_osf


def recursion(iteration: Iteration) -> Prediction:
    """Our own formula: each message starts when it is ready and the one before it has been sent."""
    return iteration.prediction


class Trial(NamedTuple):
    """A model on trial beside ours.

    cost : what it takes a message to cost, a form as `Calibration.of` takes it; OWN: the measured table
    formula : the iteration, over a link that saves no credit, to its times; NaN where it has none
    """

    cost: str
    formula: Callable[[Iteration], Prediction]


OWN = ""
_REPAIRED = partial(predict_osf, literal=False)
TRIALS = {
    "no_overlap": Trial(OWN, no_overlap),
    "perfect_overlap": Trial(OWN, perfect_overlap),
    "no_credit": Trial(OWN, recursion),
    "line_medians": Trial("alpha_beta:medians", recursion),
    "line_least_squares": Trial("alpha_beta:least_squares", recursion),
    "line_unfitted": Trial(UNFITTED, recursion),
    "line_ends": Trial("alpha_beta:ends", recursion),
    "line_relative": Trial("alpha_beta:relative", recursion),
    "osf_line": Trial("alpha_beta:medians", predict_osf),
    "osf_table": Trial(OWN, predict_osf),
    "osf_repaired_line": Trial("alpha_beta:medians", _REPAIRED),
    "osf_repaired_table": Trial(OWN, _REPAIRED),
}
"""Every model that ours is held against: trivial ones, ours without its link's credit, ours with a straight
line laid in each way, and the paper's own as printed and as repaired, where it applies.

The line by relative error is no fair one: it is there because it was used. All others have their best fit.
"""
COSTS = tuple(dict.fromkeys(trial.cost for trial in TRIALS.values() if trial.cost))
LINES = tuple(
    name
    for name, (cost, formula) in TRIALS.items()
    if formula is recursion and cost.startswith("alpha_beta") and not cost.endswith(":relative")
)
"""The straight lines that are fair."""
OURS = "model"
MODELS = (OURS, *TRIALS)
MEASURED = "table"
"""Ours with the table of a lab's medians, where ours has gloo's law fitted to them."""
CARRIED = "carried"
"""Ours with a cost from other labs' calibrations: it never saw the one that it speaks of."""


def said(found: Forecast, others: Mapping[str, MessageCost]) -> dict[str, tuple[float, float]]:
    """Iteration and exposed communication, in seconds, by each of MODELS.

    found : what ours says; others : costs by the form that a Trial names; a trial without its cost is NaN
    """
    iteration, link = found.iteration, found.iteration.link
    bare = replace(iteration, link=Link(link.in_flight, link.software))
    costs = {OWN: iteration.cost, **others}
    rows = {}
    for name, trial in TRIALS.items():
        rows[name] = math.nan, math.nan
        if trial.cost in costs:
            rows[name] = times(trial.formula(replace(bare, cost=costs[trial.cost])))
    return {**rows, OURS: times(found.prediction)}


def times(told: Prediction) -> tuple[float, float]:
    """Iteration and exposed communication, in seconds."""
    return told.iteration_s, told.exposed_communication_s
