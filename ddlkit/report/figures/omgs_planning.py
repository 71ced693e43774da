"""omgs's figure 1, the smallest counterexample to its Theorem 1, and what its rules are audited on."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pandas as pd

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import none, proven
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    Selecting,
    SelectionTimes,
    SparseGather,
    sparse_timeline,
)
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.papers import omgs
from ddlkit.papers.omgs import audit
from ddlkit.papers.osf import cluster, update_s
from ddlkit.report import source
from ddlkit.report.claims import paper_table
from ddlkit.store.readers import SELECTOR, selection_table

PEAK_FLOPS = cluster.PEAK_FLOPS
RULES = ("single", "none", "omgs", "omgs:theorem", "omgs:code")
FIG01_BACKWARD_S = (0.015, 0.015, 0.015, 0.015)
FIG01_ELEMENTS = (4_000_000, 4_000_000, 500_000, 500_000)
FIG01_DENSE_BYTES_PER_S = 5e8


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


@lru_cache(maxsize=1)
def smallest() -> omgs.Instance:
    """The smallest instance of whole numbers on which Algorithm 1 is not optimal."""
    return audit.counterexamples(*audit.SMALLEST)[0][1]


def counterexample() -> dict[str, Timeline]:
    """The two timelines of `smallest`: by Algorithm 1, and the optimum; times in seconds."""
    workload, cost = audit.in_core(smallest())
    plans = {"Algorithm 1": make_plan("omgs", workload, cost), "optimum": proven(workload, cost)[0]}
    return {name: sparse_timeline(workload, plan, cost) for name, plan in plans.items()}


def of_counterexample() -> pd.DataFrame:
    """Groups and iteration time of `smallest` under each rule and the optimum."""
    workload, cost = audit.in_core(smallest())
    best, best_s = proven(workload, cost)
    plans = {rule: make_plan(rule, workload, cost) for rule in RULES} | {"exact": best}
    rows = [
        (name, [g.stop - g.start for g in plan.slices], audit.iteration_s(workload, plan, cost))
        for name, plan in plans.items()
    ]
    frame = pd.DataFrame(rows, columns=["planner", "tensors_of_groups", "iteration_s"])
    return frame.assign(gap=frame["iteration_s"] / best_s - 1)


def measured_selection() -> dict[str, SelectionTimes]:
    """Selection as each machine recorded it: the median of every size and density, interpolated."""
    found = {}
    for machine, one in source.recordings("selection").items():
        rows = one.table("selection")
        rows = rows[(rows["operation"] == SELECTOR) & (rows["distribution"] == "normal")]
        found[machine] = selection_table(rows)
    return found


def workloads() -> dict[str, Workload]:
    """Recorded layer profiles of every machine, and the networks of osf counted by FLOP at 32 images."""
    found: dict[str, Workload] = {}
    for machine, one in source.recordings("layers").items():
        for network in one.table("layers")["network"].unique():
            found[f"{network}, {machine}"] = one.profile(network).workload()
    for network in cluster.FIVE:
        compute_s = 3 * 32 * cluster.network_flops(network) / PEAK_FLOPS
        found[f"{network}, 32 images, by FLOP"] = cluster.workload(network, compute_s)
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


def selections() -> dict[str, Selecting]:
    """The audit's three costs, and what was measured."""
    return {**audit.SELECTIONS, **{f"measured, {k}": v for k, v in measured_selection().items()}}
