"""Every planner held against the best of all plans: random instances, and a sweep over settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import predict
from ddlkit.core.plan import make_plan
from ddlkit.core.workload import Workload
from ddlkit.papers.osf import cluster, piecewise_update, update_s

if TYPE_CHECKING:
    import pandas as pd

PLANNERS = (
    "none",
    "buffer:25MB",
    "buffer:100MB",
    "single",
    "ddp",
    "mg_wfbp",
    "mg_wfbp:osf",
    "adafusion",
    "adafusion:repaired",
)
OPTIMAL = 1e-9
"""Largest relative gap that still counts as optimal: rounding."""


def iteration_s(planner: str, workload: Workload, cost: MessageCost) -> float:
    """How long an iteration takes under the planner's plan."""
    return predict(workload, make_plan(planner, workload, cost), cost).iteration_s


def _compared(
    where: dict[str, Any], workload: Workload, cost: AlphaBeta
) -> Iterator[dict[str, Any]]:
    """A row per planner: ``where``; what decides, by scale invariance; and how far from the best plan.

    Deciding are all bytes, and all start-ups, over the compute time. A gap is how much longer the iteration
    takes than under the best plan.
    """
    sending_s = cost.beta_s_per_byte * float(workload.bytes.sum())
    ratios = {
        "tensors": workload.n,
        "bytes_over_compute": sending_s / workload.compute_s,
        "start_ups_over_compute": workload.n * cost.alpha_s / workload.compute_s,
    }
    best_s = iteration_s("exact", workload, cost)
    best = {"best_scaling_factor": workload.compute_s / best_s}
    for planner in PLANNERS:
        gap = iteration_s(planner, workload, cost) / best_s - 1
        yield {**where, **ratios, "planner": planner, "gap": gap, **best}


def random_instance(rng: np.random.Generator) -> tuple[Workload, AlphaBeta]:
    """5 to 40 tensors, sizes and times over decades; all bytes take 0.1 to 10 times the computation.

    All start-ups together take 0.01 to 10 times the computation, which takes 1.
    """
    n = int(rng.integers(5, 41))
    sizes = (10 ** rng.uniform(3, 7.5, n)).astype(np.int64)
    backward = 10 ** rng.uniform(-2, 0, n)
    backward *= 2 / 3 / backward.sum()
    slope = 10 ** rng.uniform(-1, 1) / sizes.sum()
    overhead = 10 ** rng.uniform(-2, 1) / n
    return Workload.from_arrays(1 / 3, backward, sizes), AlphaBeta(float(overhead), float(slope))


def random_audit(instances: int, seed: int = 0) -> pd.DataFrame:
    """One row per random instance and planner: gap, and the instance's ratios to its compute time."""
    rng = np.random.default_rng(seed)
    drawn = ({"instance": number} for number in range(instances))
    return cluster.frame([row for one in drawn for row in _compared(one, *random_instance(rng))])


def _workloads(
    networks: Sequence[str], images_over_c: Sequence[float]
) -> Iterator[tuple[dict[str, Any], Workload]]:
    """Every network at every compute speed (M / c of an RTX 2080 Ti), and its columns."""
    for network, batch in product(networks, images_over_c):
        compute_s = 3 * batch * cluster.network_flops(network) / cluster.PEAK_FLOPS
        yield {"network": network, "images_over_c": batch}, cluster.workload(network, compute_s)


def sweep(
    networks: Sequence[str] = cluster.FIVE,
    rates_bits_per_s: Sequence[float] = (1e9, 5e9, 25e9, 100e9),
    overheads_s: Sequence[float] = (2e-5, 1e-4, 5e-4, 2e-3, 1e-2),
    images_over_c: Sequence[float] = (16, 64, 256),
) -> pd.DataFrame:
    """One row per network, compute speed, link rate, overhead and planner."""
    rows: list[dict[str, Any]] = []
    for setting, workload in _workloads(networks, images_over_c):
        for rate, overhead in product(rates_bits_per_s, overheads_s):
            cost = AlphaBeta(overhead, float(update_s(1.0, cluster.WORKERS, rate / 8)))
            where = {**setting, "rate_bits_per_s": rate, "overhead_s": overhead}
            rows += _compared(where, workload, cost)
    return cluster.frame(rows)


def misjudged(
    networks: Sequence[str] = cluster.FIVE,
    believed: Sequence[float] = (0.0, 0.25, 0.5, 1.0),
    overheads_s: Sequence[float] = (2e-5, 1e-4, 5e-4, 2e-3),
    images_over_c: Sequence[float] = (16, 64, 256),
    threshold_bytes: float = 45e3,
) -> pd.DataFrame:
    """adaFusion, which knows the true cost, against MG-WFBP, which plans with a linear one (Section 4.2).

    True is osf Eq 18 at 25 Gbit/s: linear with a start-up from ``threshold_bytes`` on, and below it
    logarithmic, meeting the line there and half of that at 1 KB. MG-WFBP believes in the same line
    with ``believed`` times its start-up. One row per setting; gains of adaFusion (Eq 17, repaired).
    """
    rows: list[dict[str, Any]] = []
    slope = float(update_s(1.0, cluster.WORKERS, cluster.NETWORK_BYTES_PER_S))
    for setting, workload in _workloads(networks, images_over_c):
        for overhead in overheads_s:
            meeting = overhead + slope * threshold_bytes
            rise = meeting / 2 / np.log2(threshold_bytes / 1e3)
            start = meeting - rise * np.log2(threshold_bytes)
            true = piecewise_update(threshold_bytes, rise, start, slope, overhead)
            best, own = (
                iteration_s(planner, workload, true) for planner in ("exact", "adafusion:repaired")
            )
            for share in believed:
                plan = make_plan("mg_wfbp", workload, AlphaBeta(share * overhead, slope))
                other = predict(workload, plan, true).iteration_s
                rows.append(
                    {
                        **setting,
                        "overhead_s": overhead,
                        "believed": share,
                        "gain": other / own - 1,
                        "adafusion_gap": own / best - 1,
                        "mg_wfbp_gap": other / best - 1,
                    }
                )
    return cluster.frame(rows)


def summary(audit: pd.DataFrame) -> pd.DataFrame:
    """Per planner: share of instances where it is optimal, mean, 95th percentile and worst gap."""
    by_planner = audit.groupby("planner", sort=False)["gap"]
    worst = audit.loc[by_planner.idxmax()].set_index("planner")
    shares = by_planner.agg(
        instances="size",
        optimal=lambda gap: np.mean(gap <= OPTIMAL),
        mean_gap=lambda gap: gap.to_numpy().mean(),
        gap_95=lambda gap: np.quantile(gap, 0.95),
        worst_gap="max",
    )
    ratios = worst[["bytes_over_compute", "start_ups_over_compute"]]
    return shares.join(ratios.add_prefix("worst_")).reset_index()
