"""osf Figure 2: when fusing tensors saves time, and when waiting costs more than it saves."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import MB
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from workbook import plots
from workbook.common.claims import prose
from workbook.osf.cluster import NETWORK_BYTES_PER_S, WORKERS
from workbook.osf.equations import update_s

CONDITIONS = {
    "one by one": "each tensor is sent alone",
    "fused in pairs": "both pairs of tensors are fused",
    "only the first pair": "only the first pair of tensors is fused",
}
"""What each plan of `modelled` does, as a sentence says it."""


def modelled() -> tuple[Workload, AlphaBeta, dict[str, Timeline]]:
    """Return four equal tensors, their cost, and timelines by plan.

    The numbers are chosen here: waiting for the second tensor pays, for the last not.
    """
    workload = Workload.from_arrays(2e-3, (2e-3, 2e-3, 9e-3, 5e-3), [4 * MB] * 4)
    slope = float(update_s(1.0, WORKERS, NETWORK_BYTES_PER_S))
    cost = AlphaBeta(4e-3, slope, workers=WORKERS, algorithm="ring")
    specs = {
        "one by one": "none",
        "fused in pairs": "cuts:2",
        "only the first pair": "cuts:2,3",
    }
    plans = {name: make_plan(spec, workload, cost) for name, spec in specs.items()}
    drawn = {
        name: Iteration(workload, plan, cost).timeline() for name, plan in plans.items()
    }
    return workload, cost, drawn


def draw() -> tuple[Figure, pd.DataFrame]:
    """Return the figure with its spans; the paper's example is a buffer of so many tensors."""
    _, _, drawn = modelled()
    tensors = int(prose("osf")["fig02-buffer"])
    best = min(drawn, key=lambda name: drawn[name].duration_s)
    said = (
        f"The iteration is shortest, {1e3 * drawn[best].duration_s:.1f} ms, if "
        f"{CONDITIONS[best]}"
    )
    figure, spans = plots.timelines(drawn, "plan", said)
    return figure, spans.assign(paper_buffer_tensors=tensors)
