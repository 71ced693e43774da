"""Rival models: every model that ours is compared with, and what each predicts of a case."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter

from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import Iteration, Prediction, no_overlap, perfect_overlap
from ddlkit.core.link import Link
from ddlkit.model.calibration import UNFITTED
from ddlkit.model.predictor import Forecast
from workbook.osf.equations import predict_osf

OWN = ""
_RECURSION = attrgetter(
    "prediction"
)  # our own: a message starts when it and the link are ready
_REPAIRED = partial(predict_osf, literal=False)
TRIALS: dict[str, tuple[str, Callable[[Iteration], Prediction]]] = {
    "no_overlap": (OWN, no_overlap),
    "perfect_overlap": (OWN, perfect_overlap),
    "no_burst_tokens": (OWN, _RECURSION),
    "line_medians": ("alpha_beta:medians", _RECURSION),
    "line_least_squares": ("alpha_beta:least_squares", _RECURSION),
    "line_unfitted": (UNFITTED, _RECURSION),
    "line_ends": ("alpha_beta:ends", _RECURSION),
    "line_relative": ("alpha_beta:relative", _RECURSION),
    "osf_line": ("alpha_beta:medians", predict_osf),
    "osf_table": (OWN, predict_osf),
    "osf_repaired_line": ("alpha_beta:medians", _REPAIRED),
    "osf_repaired_table": (OWN, _REPAIRED),
}
"""Every model that ours is held against: the form of its cost (OWN: the measured table), and its formula."""
TRIAL_COSTS = tuple(dict.fromkeys(cost for cost, _ in TRIALS.values() if cost))
OURS = "model"
MODELS = (OURS, *TRIALS)
MEASURED = (
    "table"  # ours with a lab's medians, where ours has gloo's law fitted to them
)
TRANSFERRED = "transferred"  # ours with a cost from other labs' calibrations


def predicted_times(
    ours: Forecast, others: Mapping[str, MessageCost]
) -> dict[str, tuple[float, float]]:
    """Return iteration and exposed communication, in seconds, by each of MODELS; NaN without its cost."""
    iteration, link = ours.iteration, ours.iteration.link
    bare = replace(iteration, link=Link(link.in_flight, link.software))
    costs = {OWN: iteration.cost, **others}
    rows = dict.fromkeys(TRIALS, (math.nan, math.nan))
    for name, (cost, formula) in TRIALS.items():
        if cost in costs:
            rows[name] = times(formula(replace(bare, cost=costs[cost])))
    return {**rows, OURS: times(ours.prediction)}


LINE = "line_medians"
BARE, LINE_BESIDE = f"{OURS}_alone", f"{LINE}_beside"
REAL_MODELS = (*MODELS, BARE, LINE_BESIDE)
"""Every model of a case that really trains: all but ours and LINE_BESIDE know nothing of contention."""


def real_times(
    ours: Forecast, others: Mapping[str, MessageCost]
) -> dict[str, tuple[float, float]]:
    """Return iteration and exposed communication, in seconds, by each of REAL_MODELS."""
    whole, link = ours.iteration, ours.iteration.link
    beside = replace(link, burst_s=0.0, wire_s_per_byte=0.0)
    of_line = replace(whole, cost=others[TRIALS[LINE][0]], link=beside)
    unslowed = replace(link, slowdown=0.0, message_slowdown=0.0)
    bare = replace(whole, link=unslowed, copy_s_per_byte=0.0, bucket_s=0.0)
    rows = predicted_times(Forecast(bare, None), others)
    ours_bare = {BARE: rows[OURS], OURS: times(whole.prediction)}
    return rows | ours_bare | {LINE_BESIDE: times(of_line.prediction)}


def times(prediction: Prediction) -> tuple[float, float]:
    """Return iteration and exposed communication, in seconds."""
    return prediction.iteration_s, prediction.exposed_communication_s
