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


def modelled() -> dict[str, Timeline]:
    """Return algorithms on four layers, 16 workers, published costs; dense on a link 4 times as fast."""
    sizes = ELEMENT_BYTES * np.array((4_000_000, 4_000_000, 500_000, 500_000))
    workload = Workload.from_arrays(0.03, [0.015] * 4, sizes)
    cost = replace(
        published_cost(audit.WORKERS, audit.DENSITY), selecting=audit.SELECTION
    )
    slope = float(osf.update_s(1.0, audit.WORKERS, 5e8))
    dense = AlphaBeta(cost.gather.startup_s(), slope, workers=audit.WORKERS)
    specs = {
        "TopK-SGD": "single",
        "LAGS-SGD": "none",
        "OMGS-SGD": "omgs",
        "merged best": "exact",
    }
    lines = {"P-SGD": Iteration(workload, none(workload), dense).timeline()}
    for name, spec in specs.items():
        lines[name] = sparse_timeline(workload, make_plan(spec, workload, cost), cost)
    return lines


def draw(lines: Mapping[str, Timeline]) -> tuple[Figure, pd.DataFrame]:
    """Draw `modelled` timelines, each with how much longer it is than TopK-SGD's; return their spans, too."""
    figure, spans = plots.timelines(lines, "model", height=1.28)
    for ax, (name, line) in zip(figure.axes, lines.items(), strict=True):
        over = line.duration_s / lines["TopK-SGD"].duration_s - 1
        where = ", 4x rate" if name == "P-SGD" else ""
        longer = "longer" if over > 0 else "shorter"
        than = f": {abs(over):.0%} {longer} than TopK" if over else ""
        plots.heading(ax, name + where + than)
    return figure, spans
