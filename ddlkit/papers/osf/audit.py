"""Every planner held against the best of all plans: random instances, and a sweep over settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def gaps(workload: Workload, cost: MessageCost, planners: Sequence[str]) -> dict[str, float]:
    """How much longer each planner's iteration takes than the best plan's, relative to it."""
    best = predict(workload, make_plan("exact", workload, cost), cost).iteration_s
    return {
        p: predict(workload, make_plan(p, workload, cost), cost).iteration_s / best - 1
        for p in planners
    }


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


def random_audit(instances: int, seed: int = 0, planners: Sequence[str] = PLANNERS) -> pd.DataFrame:
    """One row per random instance and planner: gap, and the instance's ratios to its compute time."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for number in range(instances):
        workload, cost = random_instance(rng)
        where = {"instance": number, **ratios(workload, cost)}
        found = gaps(workload, cost, planners)
        rows += [{**where, "planner": planner, "gap": gap} for planner, gap in found.items()]
    return _frame(rows)


def ratios(workload: Workload, cost: AlphaBeta) -> dict[str, float]:
    """What decides, by scale invariance: all bytes, and all start-ups, over the compute time."""
    transmission = cost.beta_s_per_byte * float(workload.bytes.sum())
    return {
        "tensors": workload.n,
        "bytes_over_compute": transmission / workload.compute_s,
        "start_ups_over_compute": workload.n * cost.alpha_s / workload.compute_s,
    }


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
    planners: Sequence[str] = PLANNERS,
    workers: int = cluster.WORKERS,
) -> pd.DataFrame:
    """One row per network, compute speed, link rate, overhead and planner."""
    rows: list[dict[str, Any]] = []
    for setting, workload in _workloads(networks, images_over_c):
        for rate, overhead in product(rates_bits_per_s, overheads_s):
            cost = AlphaBeta(overhead, float(update_s(1.0, workers, rate / 8)))
            link = {"rate_bits_per_s": rate, "overhead_s": overhead}
            where = {**setting, **link, **ratios(workload, cost)}
            best = predict(workload, make_plan("exact", workload, cost), cost).scaling_factor
            rows += [
                {**where, "planner": planner, "gap": gap, "best_scaling_factor": best}
                for planner, gap in gaps(workload, cost, planners).items()
            ]
    return _frame(rows)


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
                predict(workload, make_plan(planner, workload, true), true).iteration_s
                for planner in ("exact", "adafusion:repaired")
            )
            for share in believed:
                plan = make_plan("mg_wfbp", workload, AlphaBeta(share * overhead, slope))
                other = predict(workload, plan, true).iteration_s
                found = {
                    "gain": other / own,
                    "adafusion_gap": own / best,
                    "mg_wfbp_gap": other / best,
                }
                relative = {name: ratio - 1 for name, ratio in found.items()}
                rows.append({**setting, "overhead_s": overhead, "believed": share, **relative})
    return _frame(rows)


def summary(audit: pd.DataFrame) -> pd.DataFrame:
    """Per planner: share of instances where it is optimal, mean, 95th percentile and worst gap."""
    rows = []
    for planner, found in audit.groupby("planner", sort=False):
        gap, at_worst = found["gap"].to_numpy(), found.loc[found["gap"].idxmax()]
        rows.append(
            {
                "planner": planner,
                "instances": len(gap),
                "optimal": float(np.mean(gap <= OPTIMAL)),
                "mean_gap": float(gap.mean()),
                "gap_95": float(np.quantile(gap, 0.95)),
                "worst_gap": float(gap.max()),
                "worst_bytes_over_compute": float(at_worst["bytes_over_compute"]),
                "worst_start_ups_over_compute": float(at_worst["start_ups_over_compute"]),
            }
        )
    return _frame(rows)


def _frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd  # this room imports without it

    return pd.DataFrame(rows)
