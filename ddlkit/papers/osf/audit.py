"""Every planner held against the best of all plans: random instances, and a sweep over settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import predict
from ddlkit.core.plan import make_plan
from ddlkit.core.workload import Workload
from ddlkit.papers.osf import cluster, update_s
from ddlkit.papers.search import frame

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
RATES_BITS_PER_S = (1e9, 5e9, 25e9, 100e9)
IMAGES_OVER_C = (16, 64, 256)
OPTIMAL = 1e-9
"""Largest relative gap that still counts as optimal: rounding."""


def iteration_s(planner: str, workload: Workload, cost: MessageCost) -> float:
    """How long an iteration takes under the planner's plan."""
    return predict(workload, make_plan(planner, workload, cost), cost).iteration_s


def _compared(
    where: dict[str, Any], workload: Workload, cost: AlphaBeta
) -> Iterator[dict[str, Any]]:
    """One row per planner: ``where``; what decides, by scale invariance; and the gap to the best plan.

    Deciding are all bytes, and all start-ups, over the compute time. A gap is how much longer the iteration
    takes than under the best plan.
    """
    compute_s, best_s = workload.compute_s, iteration_s("exact", workload, cost)
    for planner in PLANNERS:
        yield {
            **where,
            "tensors": workload.n,
            "bytes_over_compute": cost.beta_s_per_byte * float(workload.bytes.sum()) / compute_s,
            "start_ups_over_compute": workload.n * cost.alpha_s / compute_s,
            "planner": planner,
            "gap": iteration_s(planner, workload, cost) / best_s - 1,
            "best_scaling_factor": compute_s / best_s,
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


def random_audit(instances: int, seed: int = 0) -> pd.DataFrame:
    """One row per random instance and planner: gap, and the instance's ratios to its compute time."""
    rng = np.random.default_rng(seed)
    drawn = (_compared({"instance": k}, *random_instance(rng)) for k in range(instances))
    return frame(list(chain.from_iterable(drawn)))


def _workloads(
    networks: Sequence[str], images_over_c: Sequence[float]
) -> Iterator[tuple[dict[str, Any], Workload]]:
    """Every network at every compute speed (M / c of an RTX 2080 Ti), and its columns."""
    for network, batch in product(networks, images_over_c):
        compute_s = 3 * batch * cluster.network_flops(network) / cluster.PEAK_FLOPS
        yield {"network": network, "images_over_c": batch}, cluster.workload(network, compute_s)


def sweep(
    networks: Sequence[str] = cluster.FIVE,
    overheads_s: Sequence[float] = (2e-5, 1e-4, 5e-4, 2e-3, 1e-2),
    images_over_c: Sequence[float] = IMAGES_OVER_C,
) -> pd.DataFrame:
    """One row per network, compute speed, link rate, overhead and planner."""
    rows: list[dict[str, Any]] = []
    for setting, workload in _workloads(networks, images_over_c):
        for rate, overhead in product(RATES_BITS_PER_S, overheads_s):
            cost = AlphaBeta(overhead, float(update_s(1.0, cluster.WORKERS, rate / 8)))
            where = {**setting, "rate_bits_per_s": rate, "overhead_s": overhead}
            rows += _compared(where, workload, cost)
    return frame(rows)


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
