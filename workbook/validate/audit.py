"""Planners against the best of all plans, on networks that are drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import predict
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import ELEMENT_BYTES, Log, SparseGather, sparse_iteration
from ddlkit.core.workload import Workload
from workbook.omgs.equations import PUBLISHED_GAMMA_S

OPTIMAL = 1e-9
"""Largest relative gap that still counts as optimal: rounding."""
Draw = Callable[[np.random.Generator], tuple[Workload, MessageCost]]
"""Draws a random network and a cost of its messages."""


def iteration_s(workload: Workload, plan: FusionPlan, cost: MessageCost) -> float:
    """Return the seconds of an iteration under a plan, selections included where the cost has them."""
    if cost.selects:
        return sparse_iteration(workload, plan, cost).prediction.iteration_s
    return predict(workload, plan, cost).iteration_s


def random_audit(
    draw: Draw, planners: Sequence[str], instances: int, seed: int = 0
) -> pd.DataFrame:
    """Return a row per random instance and planner: its gap to the best, and start-ups over computing."""
    random, rows = np.random.default_rng(seed), []
    for instance in range(instances):
        workload, cost = draw(random)
        start_ups = workload.n * cost.startup_s() / workload.compute_s
        best_s = iteration_s(workload, make_plan("exact", workload, cost), cost)
        for planner in planners:
            taken_s = iteration_s(workload, make_plan(planner, workload, cost), cost)
            rows.append((instance, start_ups, planner, taken_s / best_s - 1))
    return pd.DataFrame(
        rows, columns=["instance", "start_ups_over_compute", "planner", "gap"]
    )


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
"""Planners of messages that are not sparsified (osf)."""


def dense_draw(rng: np.random.Generator) -> tuple[Workload, AlphaBeta]:
    """Return 5 to 40 tensors, sizes and times over decades; computing takes 1."""
    n = int(rng.integers(5, 41))
    sizes = (10 ** rng.uniform(3, 7.5, n)).astype(np.int64)
    backward = 10 ** rng.uniform(-2, 0, n)
    backward *= 2 / 3 / backward.sum()
    slope = 10 ** rng.uniform(-1, 1) / sizes.sum()
    overhead = 10 ** rng.uniform(-2, 1) / n
    workload = Workload.from_arrays(1 / 3, backward, sizes)
    return workload, AlphaBeta(float(overhead), float(slope))


WORKERS, DENSITY = 16, 0.001
"""Of sparsified messages (omgs)."""
SELECTION = Log(PUBLISHED_GAMMA_S)
"""omgs Eq 10 without density, as the authors' published code has it."""


def linear_cost(alpha_s: float, beta_s: float) -> SparseGather:
    """Return a cost whose message is that of omgs Eq 11: alpha_s, and beta_s for each dense element."""
    per_byte = beta_s / (2 * ELEMENT_BYTES * WORKERS * DENSITY)
    gather = AlphaBeta(alpha_s / 2, per_byte, collective="all_gather", workers=WORKERS)
    return SparseGather(gather, DENSITY, selecting=SELECTION)


def random_workload(
    rng: np.random.Generator, tensors: range
) -> tuple[Workload, float, float]:
    """Return a network, alpha and beta (per element) over decades; sizes are whole thousands of elements."""
    n = int(rng.choice(tensors))
    backward_s = 10 ** rng.uniform(-4, -1.5, n)
    sizes = 1000 * np.rint(10 ** rng.uniform(0, 4, n)).astype(np.int64)
    workload = Workload.from_arrays(
        float(backward_s.sum()) / 2, backward_s, ELEMENT_BYTES * sizes
    )
    alpha_s = float(10 ** rng.uniform(-4, -1.5))
    beta_s = float(10 ** rng.uniform(-10, -8))
    return workload, alpha_s, beta_s


def sparse_draw(rng: np.random.Generator) -> tuple[Workload, SparseGather]:
    """Return a `random_workload` of 2 to 40 tensors with its cost."""
    workload, alpha_s, beta_s = random_workload(rng, range(2, 41))
    return workload, linear_cost(alpha_s, beta_s)
