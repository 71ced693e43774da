"""omgs's figure 1, the smallest counterexample to its Theorem 1, and what its rules are audited on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from matplotlib.figure import Figure

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import none
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    SelectionTimes,
    SparseGather,
    sparse_timeline,
)
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.papers import omgs
from ddlkit.papers.omgs import audit
from ddlkit.papers.osf import update_s
from ddlkit.report import plots, source
from ddlkit.report.claims import paper_table
from ddlkit.store.readers import SELECTOR, selection_table

FIG01_BACKWARD_S = (0.015, 0.015, 0.015, 0.015)
FIG01_ELEMENTS = (4_000_000, 4_000_000, 500_000, 500_000)
FIG01_DENSE_BYTES_PER_S = 5e8
LINK_BYTES_PER_S = 1e9 / 8
"""Of the paper's Ethernet."""


def fig01() -> dict[str, Timeline]:
    """Dense and sparse algorithms on four layers, in ready order: 16 workers, costs of the published code.

    Dense gradients take a ring over a link four times as fast as the paper's, else the first timeline
    would be several times as long as the others.
    """
    sizes = ELEMENT_BYTES * np.array(FIG01_ELEMENTS)
    workload = Workload.from_arrays(0.03, FIG01_BACKWARD_S, sizes)
    gather = gathers()["16 workers"]
    per_byte = float(update_s(1.0, audit.WORKERS, FIG01_DENSE_BYTES_PER_S))
    dense = AlphaBeta(gather.alpha_s, per_byte, workers=audit.WORKERS)
    cost = SparseGather(gather, audit.DENSITY, selecting=audit.SELECTIONS["log"])
    specs = {"TopK-SGD": "single", "LAGS-SGD": "none", "OMGS-SGD": "omgs", "merged best": "exact"}
    plans = {name: make_plan(spec, workload, cost) for name, spec in specs.items()}
    return {
        "P-SGD": Iteration(workload, none(workload), dense).timeline(),
        **{name: sparse_timeline(workload, plan, cost) for name, plan in plans.items()},
    }


def draw_fig01(timelines: Mapping[str, Timeline]) -> Figure:
    """The timelines of `fig01` below each other; each title says how much longer it is than TopK-SGD."""
    whole_s = timelines["TopK-SGD"].duration_s
    times = FIG01_DENSE_BYTES_PER_S / LINK_BYTES_PER_S
    where = {"P-SGD": f"P-SGD on a link {times:g} times as fast"}
    named = {
        f"{where.get(name, name)}: {line.duration_s / whole_s - 1:+.0%}": line
        for name, line in timelines.items()
    }
    figure, axes = plots.canvas(rows=len(named), height=6.4)
    plots.gantt(axes, named)
    return figure


@lru_cache(maxsize=1)
def smallest() -> omgs.Instance:
    """The smallest instance of whole numbers on which Algorithm 1 is not optimal."""
    return audit.counterexamples(*audit.SMALLEST)[0][1]


def measured_selection() -> dict[str, SelectionTimes]:
    """Selection as each machine recorded it: the median of every size and density, interpolated."""
    found = {}
    for machine, one in source.recordings("selection").items():
        rows = one.table("selection")
        rows = rows[(rows["operation"] == SELECTOR) & (rows["distribution"] == "normal")]
        found[machine] = selection_table(rows)
    return found


def gathers() -> dict[str, AlphaBeta]:
    """All-gathers of 2 to 16 workers over 1 Gbit/s, as the authors' published code has them."""
    code = paper_table("omgs", "code").set_index("id")["value"]
    return {
        f"{workers} workers": AlphaBeta(
            code[f"alpha-{workers}"],
            code[f"beta-{workers}"],
            collective="all_gather",
            workers=workers,
        )
        for workers in (2, 4, 8, 16)
    }
