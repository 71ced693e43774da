"""osf's figures 1, 2 and 11: what overlapping and fusing gain, and where a plan can gain at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration, predict
from ddlkit.core.plan import none, single
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import MB
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.papers import osf
from ddlkit.papers.osf import cluster
from ddlkit.papers.osf.cluster import FIVE, REPLACED, WORKERS, PaperSetting

FIG02_BACKWARD_S = (2e-3, 2e-3, 9e-3, 5e-3)
FIG02_BYTES = (4 * MB, 4 * MB, 4 * MB, 4 * MB)
FIG02_OVERHEAD_S = 4e-3
FIG02_PLANS = {"one by one": "none", "fused in pairs": "cuts:2", "only the first pair": "cuts:2,3"}
FIG11_PLANNERS = (
    *("none", "buffer:100MB", "buffer:25MB", "ddp", "mg_wfbp"),
    *("adafusion", "adafusion:repaired", "exact"),
)


def fig01(setting: PaperSetting) -> dict[str, Timeline]:
    """Replaced VGG-16 by layer: all communication after computation (CSF), and overlapped (OSF)."""
    workload = cluster.workload(REPLACED, setting.compute_s(REPLACED), "layer")
    plans = {"after computation (CSF)": single(workload), "overlapped (OSF)": none(workload)}
    cost = setting.cost()
    return {name: Iteration(workload, plan, cost).timeline() for name, plan in plans.items()}


def fig02() -> tuple[Workload, AlphaBeta, dict[str, Timeline]]:
    """Four equal tensors; waiting for the second pays, waiting for the last does not.

    Numbers chosen here (the paper draws none): times in ``FIG02_BACKWARD_S``, 4 MB per tensor.
    """
    workload = Workload.from_arrays(2e-3, FIG02_BACKWARD_S, FIG02_BYTES)
    slope = float(osf.update_s(1.0, WORKERS, cluster.NETWORK_BYTES_PER_S))
    cost = AlphaBeta(FIG02_OVERHEAD_S, slope, workers=WORKERS, algorithm="ring")
    timelines = {
        name: Iteration(workload, make_plan(spec, workload, cost), cost).timeline()
        for name, spec in FIG02_PLANS.items()
    }
    return workload, cost, timelines


def fig11(setting: PaperSetting) -> pd.DataFrame:
    """Scaling factor of the five networks by planner, its gain over 100 MB, and the most possible gain."""
    rows: list[dict[str, Any]] = []
    cost = setting.cost()
    for network in FIVE:
        workload = setting.workload(network)
        plan = make_plan("buffer:100MB", workload, cost)
        constant = predict(workload, plan, cost)
        saved = (len(plan.ends) - 1) * cost.alpha_s / workload.compute_s
        bound = osf.largest_fusion_gain(constant.scaling_factor, saved)
        for planner in FIG11_PLANNERS:
            fusion = make_plan(planner, workload, cost)
            found = predict(workload, fusion, cost)
            rows.append(
                {
                    "network": network,
                    "planner": planner,
                    "messages": len(fusion.ends),
                    "model": found.scaling_factor,
                    "gain_over_100MB": found.scaling_factor / constant.scaling_factor - 1,
                    "most_possible_gain": bound,
                }
            )
    return pd.DataFrame(rows).assign(paper=math.nan)


def gain_region(gains: Sequence[float], factors: Sequence[float]) -> pd.DataFrame:
    """Least (k - 1) delta over T_comp that allows each gain, by the constant plan's scaling factor."""
    rows = pd.DataFrame(
        [
            (gain, factor, osf.least_overhead_for_gain(gain, factor))
            for gain in gains
            for factor in factors
        ],
        columns=["gain", "scaling_factor", "saved_overhead"],
    )
    return rows.replace(math.inf, math.nan)
