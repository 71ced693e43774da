"""Every planner of sparsified messages against the optimum: random instances, and networks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.plan import FusionPlan, make_plan, proven
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
from ddlkit.papers import omgs
from ddlkit.papers.search import frame

if TYPE_CHECKING:
    import pandas as pd

PLANNERS = ("single", "none", "mgs:8192", "omgs", "omgs:theorem", "omgs:code")
"""TopK-SGD, LAGS-SGD, MGS-SGD, Algorithm 1, Eq 25 for all layers at once, and the published code's rule."""
WORKERS, DENSITY = 16, 0.001
BANDWIDTH_BYTES_PER_S = 320e9
"""Of a GPU's memory, as a card with GDDR5X of 2017 has it: what a scan of the tensor is limited by."""
SELECTIONS: dict[str, Selecting] = {
    "density_log": DensityLog(omgs.PUBLISHED_GAMMA_S),
    "log": Log(omgs.PUBLISHED_GAMMA_S),
    "scan": Scan(2e-5, 5 * ELEMENT_BYTES / BANDWIDTH_BYTES_PER_S),
}
"""Eq 10 as printed; without its density, as the code has it; and a radix select that reads five times."""
OPTIMAL = 1e-9
"""Largest relative gap that still counts as optimal: rounding."""


def linear_cost(
    alpha_s: float, beta_s: float, selecting: Selecting, density: float = DENSITY
) -> SparseGather:
    """A cost whose message is that of Eq 11: alpha_s, and beta_s for each of the dense group's elements.

    Exactly so where density x elements is whole.
    """
    per_byte = beta_s / (2 * ELEMENT_BYTES * WORKERS * density)
    gather = AlphaBeta(alpha_s / 2, per_byte, collective="all_gather", workers=WORKERS)
    return SparseGather(gather, density, selecting=selecting)


def iteration_s(workload: Workload, plan: FusionPlan, cost: SparseGather) -> float:
    """How long an iteration takes under a plan, selections included."""
    return sparse_iteration(workload, plan, cost).prediction.iteration_s


def compared(
    where: Mapping[str, Any],
    workload: Workload,
    cost: SparseGather,
    planners: Sequence[str] = PLANNERS,
) -> Iterator[dict[str, Any]]:
    """One row per planner: ``where``; what decides; messages; the gap to the optimum, which is proven.

    Deciding, over the time of computation: all start-ups, all traffic, and selecting from each tensor.
    """
    best, least_s = proven(workload, cost)
    start_s = cost.startup_s()
    deciding = {
        "start_ups_over_compute": workload.n * start_s,
        "traffic_over_compute": cost(float(workload.bytes.sum())) - start_s,
        "selection_over_compute": float(cost.selection_s(workload.bytes).sum()),
    }
    shares = {name: seconds / workload.compute_s for name, seconds in deciding.items()}
    proof = {"best_messages": len(best.ends), "best_s": least_s}
    for planner in planners:
        plan = make_plan(planner, workload, cost)
        gap = iteration_s(workload, plan, cost) / least_s - 1
        found = {"planner": planner, "messages": len(plan.ends), "gap": gap}
        yield {**where, "tensors": workload.n, **shares, **proof, **found}


def random_workload(rng: np.random.Generator, tensors: range) -> tuple[Workload, float, float]:
    """A network, alpha and beta (per element) over decades; sizes are whole thousands of elements.

    Sizes 10^3 to 10^7 elements, backward 0.1 to 30 ms a tensor and forward half of it, alpha 0.1 to 30 ms,
    beta 0.1 to 10 ns: a network takes longer to compute, to send or to start, each in many draws.
    """
    n = int(rng.choice(tensors))
    backward_s = 10 ** rng.uniform(-4, -1.5, n)
    sizes = 1000 * np.rint(10 ** rng.uniform(0, 4, n)).astype(np.int64)
    workload = Workload.from_arrays(float(backward_s.sum()) / 2, backward_s, ELEMENT_BYTES * sizes)
    return workload, float(10 ** rng.uniform(-4, -1.5)), float(10 ** rng.uniform(-10, -8))


def random_audit(
    instances: int,
    seed: int = 0,
    tensors: range = range(2, 41),
    *,
    selections: Mapping[str, Selecting] = SELECTIONS,
    planners: Sequence[str] = PLANNERS,
) -> pd.DataFrame:
    """One row per random instance, selection cost and planner; the instances depend on neither."""

    def rows() -> Iterator[Iterator[dict[str, Any]]]:
        rng = np.random.default_rng(seed)
        for instance in range(instances):
            workload, alpha_s, beta_s = random_workload(rng, tensors)
            for name, selecting in selections.items():
                where = {"instance": instance, "selection": name}
                cost = linear_cost(alpha_s, beta_s, selecting)
                yield compared(where, workload, cost, planners)

    return frame(list(chain.from_iterable(rows())))


def network_audit(
    workloads: Mapping[str, Workload],
    gathers: Mapping[str, AlphaBeta],
    selections: Mapping[str, Selecting],
    densities: Iterable[float] = (DENSITY, 0.01),
) -> pd.DataFrame:
    """One row per network, all-gather, selection cost, density and planner."""

    def rows() -> Iterator[Iterator[dict[str, Any]]]:
        grid = product(workloads.items(), gathers.items(), selections.items(), densities)
        for (network, workload), (link, gather), (name, selecting), density in grid:
            where = {"network": network, "link": link, "selection": name, "density": density}
            cost = SparseGather(gather, density, selecting=selecting)
            yield compared(where, workload, cost)

    return frame(list(chain.from_iterable(rows())))


def integer_instances(layers: int, total: int) -> Iterator[omgs.Instance]:
    """All instances of whole numbers above zero that add up to ``total``: t_b, d, alpha and beta.

    Sizes are 2 or more, so that selecting takes time, and gamma is 1 (Eq 10 without a density).
    """
    free = total - 3 * layers - 2
    for bars in combinations(range(free + 2 * layers + 1), 2 * layers + 1):
        more = np.diff([-1, *bars, free + 2 * layers + 1]) - 1
        backward_s, elements = 1.0 + more[:layers], 2.0 + more[layers:-2]
        alpha_s, beta_s = 1.0 + more[-2:]
        yield omgs.Instance(backward_s, elements, Log(1.0), float(alpha_s), float(beta_s))


def counterexamples(layers: int, total: int) -> list[tuple[float, omgs.Instance]]:
    """Of `integer_instances`, those on which Algorithm 1 is not optimal, the largest gap first.

    omgs Theorem 1 has none. All 2^(L-1) mergings are tried.
    """
    every, found = omgs.combinations(layers), []
    for instance in integer_instances(layers, total):
        merged = omgs.find_merged_layers(instance)
        taken_s = float(omgs.merged_iteration_s(instance, merged))
        gap = taken_s / float(omgs.merged_iteration_s(instance, every).min()) - 1
        if gap > OPTIMAL:
            found.append((gap, instance))
    return sorted(found, key=lambda one: -one[0])


def in_core(instance: omgs.Instance) -> tuple[Workload, SparseGather]:
    """The same as a workload and a cost, everything selected (density 1)."""
    sizes = ELEMENT_BYTES * instance.elements[::-1].astype(np.int64)
    workload = Workload.from_arrays(instance.forward_s, instance.backward_s[::-1], sizes)
    return workload, linear_cost(instance.alpha_s, instance.beta_s, instance.selection, 1.0)


SMALLEST = 3, 18
"""Layers and sum of the smallest counterexample (`counterexamples`): no smaller pair has one."""


def summary(audit: pd.DataFrame, by: Sequence[str] = ("selection", "planner")) -> pd.DataFrame:
    """Per ``by``: share of instances where a planner is optimal; mean, 95th percentile and worst gap."""
    grouped = audit.groupby(list(by), sort=False)["gap"]
    shares = grouped.agg(
        instances="size",
        optimal=lambda gap: np.mean(gap <= OPTIMAL),
        mean_gap=lambda gap: gap.to_numpy().mean(),
        gap_95=lambda gap: np.quantile(gap, 0.95),
        worst_gap="max",
    )
    return shares.reset_index()
