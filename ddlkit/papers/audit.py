"""Planners held against the best of all plans: over random networks, and over settings of osf's networks.

A gap is how much longer an iteration takes than under the best plan; that of omgs's rules is 0 by its
Theorem 1, which does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import predict
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    DensityLog,
    Log,
    Scan,
    Selecting,
    SparseGather,
    sparse_iteration,
)
from ddlkit.core.workload import Workload
from ddlkit.papers.omgs import PUBLISHED_GAMMA_S
from ddlkit.papers.osf import cluster, update_s
from ddlkit.papers.search import frame

if TYPE_CHECKING:
    import pandas as pd

OPTIMAL = 1e-9
"""Largest relative gap that still counts as optimal: rounding."""
Draw = Callable[[np.random.Generator], tuple[Workload, MessageCost]]
"""A random network and what its messages cost."""


def iteration_s(workload: Workload, plan: FusionPlan, cost: MessageCost) -> float:
    """Return the seconds of an iteration under a plan, selections included where the cost has them."""
    if cost.selects:
        return sparse_iteration(workload, plan, cost).prediction.iteration_s
    return predict(workload, plan, cost).iteration_s


def compared(
    where: Mapping[str, Any], workload: Workload, cost: MessageCost, planners: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield one row per planner: ``where``; what decides; messages; and the gap to the best plan.

    Deciding, over the time of computation: all traffic, and all start-ups, one a tensor.
    """
    compute_s, startup_s = workload.compute_s, cost.startup_s()
    best_s = iteration_s(workload, make_plan("exact", workload, cost), cost)
    for planner in planners:
        plan = make_plan(planner, workload, cost)
        yield {
            **where,
            "tensors": workload.n,
            "bytes_over_compute": (cost(float(workload.bytes.sum())) - startup_s) / compute_s,
            "start_ups_over_compute": workload.n * startup_s / compute_s,
            "planner": planner,
            "messages": len(plan.ends),
            "gap": iteration_s(workload, plan, cost) / best_s - 1,
            "best_scaling_factor": compute_s / best_s,
        }


def random_audit(
    draw: Draw, planners: Sequence[str], instances: int, seed: int = 0
) -> pd.DataFrame:
    """Return one row per random instance and planner; the same ones for a seed."""
    random = np.random.default_rng(seed)
    rows = (compared({"instance": k}, *draw(random), planners) for k in range(instances))
    return frame(list(chain.from_iterable(rows)))


def summary(audit: pd.DataFrame) -> pd.DataFrame:
    """Return per planner: share of instances where it is optimal; mean, 95th percentile and worst gap."""
    gaps = audit.groupby("planner", sort=False)["gap"]
    shares = gaps.agg(
        instances="size",
        optimal=lambda gap: np.mean(gap <= OPTIMAL),
        mean_gap=lambda gap: gap.to_numpy().mean(),
        gap_95=lambda gap: np.quantile(gap, 0.95),
        worst_gap="max",
    )
    return shares.reset_index()


# -- dense messages (osf) ------------------------------------------------------------------------

DENSE = (
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
OVERHEADS_S = (2e-5, 1e-4, 5e-4, 2e-3, 1e-2)
IMAGES_OVER_C = (16, 64, 256)
"""M / c of osf Eq 5 for an RTX 2080 Ti: images in the mini-batch over the GPU's utilisation."""


def dense_draw(rng: np.random.Generator) -> tuple[Workload, AlphaBeta]:
    """Return 5 to 40 tensors, sizes and times over decades; computing takes 1.

    All bytes take 0.1 to 10 times that, all start-ups together 0.01 to 10 times.
    """
    n = int(rng.integers(5, 41))
    sizes = (10 ** rng.uniform(3, 7.5, n)).astype(np.int64)
    backward = 10 ** rng.uniform(-2, 0, n)
    backward *= 2 / 3 / backward.sum()
    slope = 10 ** rng.uniform(-1, 1) / sizes.sum()
    overhead = 10 ** rng.uniform(-2, 1) / n
    return Workload.from_arrays(1 / 3, backward, sizes), AlphaBeta(float(overhead), float(slope))


def sweep() -> pd.DataFrame:
    """Return one row per network of osf, compute speed, link rate, overhead and planner of DENSE."""
    rows: list[dict[str, Any]] = []
    for network, batch in product(cluster.FIVE, IMAGES_OVER_C):
        compute_s = 3 * batch * cluster.network_flops(network) / cluster.PEAK_FLOPS
        workload = cluster.workload(network, compute_s)
        for rate, overhead_s in product(RATES_BITS_PER_S, OVERHEADS_S):
            cost = AlphaBeta(overhead_s, float(update_s(1.0, cluster.WORKERS, rate / 8)))
            where = {"network": network, "images_over_c": batch, "rate_bits_per_s": rate}
            rows += compared({**where, "overhead_s": overhead_s}, workload, cost, DENSE)
    return frame(rows)


# -- sparsified messages (omgs) ------------------------------------------------------------------

WORKERS, DENSITY = 16, 0.001
BANDWIDTH_BYTES_PER_S = 320e9
"""Of a GPU's memory, as a card with GDDR5X of 2017 has it: what a scan of the tensor is limited by."""
SELECTIONS: dict[str, Selecting] = {
    "density_log": DensityLog(PUBLISHED_GAMMA_S),
    "log": Log(PUBLISHED_GAMMA_S),
    "scan": Scan(2e-5, 5 * ELEMENT_BYTES / BANDWIDTH_BYTES_PER_S),
}
"""Eq 10 as printed; without its density, as the code has it; and a radix select that reads five times."""


def linear_cost(
    alpha_s: float, beta_s: float, selecting: Selecting, density: float = DENSITY
) -> SparseGather:
    """Return a cost whose message is that of omgs Eq 11: alpha_s, and beta_s for each dense element.

    Exactly so where density x elements is whole.
    """
    per_byte = beta_s / (2 * ELEMENT_BYTES * WORKERS * density)
    gather = AlphaBeta(alpha_s / 2, per_byte, collective="all_gather", workers=WORKERS)
    return SparseGather(gather, density, selecting=selecting)


def random_workload(rng: np.random.Generator, tensors: range) -> tuple[Workload, float, float]:
    """Return a network, alpha and beta (per element) over decades; sizes are whole thousands of elements.

    Sizes 10^3 to 10^7 elements, backward 0.1 to 30 ms a tensor and forward half of it, alpha 0.1 to 30 ms,
    beta 0.1 to 10 ns: a network takes longer to compute, to send or to start, each in many draws.
    """
    n = int(rng.choice(tensors))
    backward_s = 10 ** rng.uniform(-4, -1.5, n)
    sizes = 1000 * np.rint(10 ** rng.uniform(0, 4, n)).astype(np.int64)
    workload = Workload.from_arrays(float(backward_s.sum()) / 2, backward_s, ELEMENT_BYTES * sizes)
    return workload, float(10 ** rng.uniform(-4, -1.5)), float(10 ** rng.uniform(-10, -8))


def sparse_draw(selection: str, tensors: range = range(2, 41)) -> Draw:
    """Return how to draw a `random_workload` with one of SELECTIONS, on which the instances do not depend."""

    def draw(rng: np.random.Generator) -> tuple[Workload, MessageCost]:
        workload, alpha_s, beta_s = random_workload(rng, tensors)
        return workload, linear_cost(alpha_s, beta_s, SELECTIONS[selection])

    return draw
