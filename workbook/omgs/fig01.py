"""omgs Fig 1: five algorithms on four layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import none
from ddlkit.core.sparse import ELEMENT_BYTES, sparse_timeline
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from workbook import plots
from workbook.omgs.equations import published_cost
from workbook.osf import equations as osf
from workbook.validate import audit

DENSE_BYTES_PER_S = 5e8
"""The rate of the dense algorithm's link, which is 4 times that of the others.

It is a choice, not measured."""


def modelled() -> dict[str, Timeline]:
    """Return the timelines of the five algorithms on four layers.

    There are 16 workers, and the costs are those of the published code. The dense P-SGD
    has a link that is 4 times as fast as that of the others, which is a choice.

    Returns
    -------
    dict of str to Timeline
        The timelines by algorithm, P-SGD first.
    """
    # An example with a forward pass of 30 ms, and backward passes of 15 ms. The layers are
    # in ready order.
    gradient_bytes = ELEMENT_BYTES * np.array((4_000_000, 4_000_000, 500_000, 500_000))
    workload = Workload.from_arrays(0.03, [0.015] * 4, gradient_bytes)
    cost = published_cost(audit.WORKERS, audit.DENSITY)
    # Selecting from d elements takes gamma d log2 d. The gamma of the code, 2.189e-10 s, is
    # rounded to 2.2e-10 s here.
    cost = replace(cost, selecting=audit.SELECTION)

    # The dense all-reduce has the start-up of an all-gather. `update_s` updates no weights: it
    # is the time of a ring all-reduce, here of one byte ("osf" Eq 7, Liu et al. 2022).
    s_per_byte = float(osf.update_s(1.0, audit.WORKERS, DENSE_BYTES_PER_S))
    dense = AlphaBeta(cost.gather.startup_s(), s_per_byte, workers=audit.WORKERS)
    # `none` makes the plan in which each layer is a message of its own.
    timelines = {"P-SGD": Iteration(workload, none(workload), dense).timeline()}
    # "single" merges all layers, "none" merges no layers, and "exact" finds the best merging.
    planners = {
        "TopK-SGD": "single",
        "LAGS-SGD": "none",
        "OMGS-SGD": "omgs",
        "merged best": "exact",
    }
    for algorithm, planner in planners.items():
        plan = make_plan(planner, workload, cost)
        timelines[algorithm] = sparse_timeline(workload, plan, cost)
    return timelines


def draw(timelines: Mapping[str, Timeline]) -> tuple[Figure, pd.DataFrame]:
    """Draw the `modelled` timelines.

    Parameters
    ----------
    timelines : mapping of str to Timeline
        What `modelled` returned.

    Returns
    -------
    figure : Figure
        A panel for each timeline. Its heading says by how much the timeline is longer or
        shorter than that of TopK-SGD.
    spans : DataFrame
        The spans of all timelines, with the algorithm as ``model``.
    """
    figure, spans = plots.timelines(timelines, "model", height=1.28)
    topk_s = timelines["TopK-SGD"].duration_s
    for ax, (algorithm, timeline) in zip(figure.axes, timelines.items(), strict=True):
        heading = algorithm
        # The dense algorithm has a faster link than the others (DENSE_BYTES_PER_S).
        if algorithm == "P-SGD":
            heading += ", 4x rate"
        difference = timeline.duration_s / topk_s - 1
        # The difference is exactly 0 for TopK-SGD itself, which is not compared.
        if difference:
            word = "longer" if difference > 0 else "shorter"
            heading += f": {abs(difference):.0%} {word} than TopK"
        plots.heading(ax, heading)
    return figure, spans
