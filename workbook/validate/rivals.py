"""Rival models, with which ours is compared, and what each predicts of a case."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import Iteration, Prediction, no_overlap, perfect_overlap
from ddlkit.core.link import Link
from ddlkit.model.calibration import UNFITTED
from ddlkit.model.predictor import Forecast
from workbook.osf.equations import predict_osf

Times = tuple[float, float]
"""An iteration and its exposed communication in seconds."""


# -- cases whose messages and compute do not slow each other down --------------------


def _recursion(iteration: Iteration) -> Prediction:
    """Return our own prediction: a message starts once it is ready and the link is free."""
    return iteration.prediction


def _osf_repaired(iteration: Iteration) -> Prediction:
    return predict_osf(iteration, literal=False)


OWN = ""
"""The cost of our own model, which is the table of measured medians."""
TRIALS: dict[str, tuple[str, Callable[[Iteration], Prediction]]] = {
    "no_overlap": (OWN, no_overlap),
    "perfect_overlap": (OWN, perfect_overlap),
    "no_burst_tokens": (OWN, _recursion),
    "line_medians": ("alpha_beta:medians", _recursion),
    "line_least_squares": ("alpha_beta:least_squares", _recursion),
    "line_unfitted": (UNFITTED, _recursion),
    "line_ends": ("alpha_beta:ends", _recursion),
    "line_relative": ("alpha_beta:relative", _recursion),
    "osf_line": ("alpha_beta:medians", predict_osf),
    "osf_table": (OWN, predict_osf),
    "osf_repaired_line": ("alpha_beta:medians", _osf_repaired),
    "osf_repaired_table": (OWN, _osf_repaired),
}
"""Every rival model: the form of its cost, and its formula."""
TRIAL_COSTS = tuple(dict.fromkeys(cost for cost, _ in TRIALS.values() if cost != OWN))
"""The forms of cost that rival models need, each once."""
OURS = "model"
"""Our model."""
MODELS = (OURS, *TRIALS)
"""Our model and all rivals."""
MEASURED = "table"
"""Our model with the medians of a lab, where ours has gloo's law fitted to them."""
TRANSFERRED = "transferred"
"""Our model with a cost from the calibrations of other labs."""


def predicted_times(
    ours: Forecast, costs_by_form: Mapping[str, MessageCost]
) -> dict[str, Times]:
    """Return what each model predicts of a case.

    Parameters
    ----------
    ours : Forecast
        The prediction of our model.
    costs_by_form : mapping of str to MessageCost
        The costs of rival models by their form, such as "alpha_beta:medians".

    Returns
    -------
    dict of str to (float, float)
        The iteration and its exposed communication in seconds, by each of MODELS. They
        are NaN for a rival model whose form of cost is missing.
    """
    iteration = ours.iteration
    # Rival models know nothing of bursts, nor of messages and compute that slow each other
    # down. A link that is made from these two arguments alone has neither.
    plain_link = Link(
        in_flight=iteration.link.in_flight, software=iteration.link.software
    )
    plain = replace(iteration, link=plain_link)
    costs = {OWN: iteration.cost, **costs_by_form}
    seconds: dict[str, Times] = {}
    for name, (form, formula) in TRIALS.items():
        if form in costs:
            seconds[name] = times(formula(replace(plain, cost=costs[form])))
        else:
            seconds[name] = (math.nan, math.nan)
    seconds[OURS] = times(ours.prediction)
    return seconds


# -- cases that really train ---------------------------------------------------------

LINE = "line_medians"
"""The straight line through medians."""
BARE = f"{OURS}_alone"
"""Our model without slowdowns, copies and the time of buckets."""
LINE_BESIDE = f"{LINE}_beside"
"""The straight line with our slowdowns, copies and time of buckets."""
REAL_MODELS = (*MODELS, BARE, LINE_BESIDE)
"""Every model of a case that really trains.

All but our model and LINE_BESIDE know nothing of contention."""


def real_times(
    ours: Forecast, costs_by_form: Mapping[str, MessageCost]
) -> dict[str, Times]:
    """Return what each of REAL_MODELS predicts of a case that really trains.

    Parameters
    ----------
    ours : Forecast
        The prediction of our model.
    costs_by_form : mapping of str to MessageCost
        The costs of rival models by their form, such as "alpha_beta:medians".

    Returns
    -------
    dict of str to (float, float)
        The iteration and its exposed communication in seconds.
    """
    iteration = ours.iteration
    link = iteration.link
    # LINE_BESIDE is our model, including slowdowns, copies and the time of buckets, but with the
    # cost of the rival LINE, a straight line. A line knows nothing of the burst of a link. Both
    # the burst and the time of a byte, which a link uses only with a burst, are thus 0.
    form_of_line, _formula = TRIALS[LINE]
    line_beside = replace(
        iteration,
        cost=costs_by_form[form_of_line],
        link=replace(link, burst_s=0.0, wire_s_per_byte=0.0),
    )
    bare = replace(
        iteration,
        link=replace(link, slowdown=0.0, message_slowdown=0.0),
        copy_s_per_byte=0.0,
        bucket_s=0.0,
    )
    # The rivals, too, take the iteration without slowdowns, copies and the time of buckets.
    # `predicted_times` uses no interval.
    of_bare = predicted_times(Forecast(bare, interval_s=None), costs_by_form)
    return {
        **of_bare,
        # Our model of the bare iteration is BARE, and that of the full one is OURS.
        BARE: of_bare[OURS],
        OURS: times(iteration.prediction),
        LINE_BESIDE: times(line_beside.prediction),
    }


def times(prediction: Prediction) -> Times:
    """Return an iteration and its exposed communication in seconds."""
    return prediction.iteration_s, prediction.exposed_communication_s
