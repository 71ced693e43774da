"""Planners compared with the best of all plans, on networks that are drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import predict
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import ELEMENT_BYTES, Log, SparseGather, sparse_iteration
from ddlkit.core.workload import Workload
from workbook.omgs.equations import (
    PUBLISHED_GAMMA_S,
    find_merged_layers,
    of_planning,
    plan_of,
)

OPTIMAL = 1e-9
"""The largest relative gap that still counts as optimal, which allows for rounding."""
Draw = Callable[[np.random.Generator], tuple[Workload, MessageCost]]
"""A function that draws a random network and a cost of its messages."""


def iteration_s(workload: Workload, plan: FusionPlan, cost: MessageCost) -> float:
    """Return the predicted seconds of an iteration under a plan.

    If the cost is of sparse messages, the time to select gradients is included.
    """
    if cost.selects:
        return sparse_iteration(workload, plan, cost).prediction.iteration_s
    return predict(workload, plan, cost).iteration_s


def random_audit(
    draw: Draw, planners: Sequence[str], instances: int, seed: int = 0
) -> pd.DataFrame:
    """Compare planners with the best plan of random networks.

    Parameters
    ----------
    draw : callable
        The function that draws a network and its cost.
    planners : sequence of str
        The names of the planners.
    instances : int
        The number of networks to draw.
    seed : int, optional
        The seed of the random numbers.

    Returns
    -------
    DataFrame
        One row for each network and planner. The columns are ``instance`` (the number of
        the network), ``start_ups_over_compute`` (the start-ups of one message per gradient,
        divided by the compute time), ``planner`` and ``gap`` (its iteration divided by that of
        the best plan, minus 1).
    """
    generator = np.random.default_rng(seed)
    rows = []
    for instance in range(instances):
        workload, cost = draw(generator)
        start_ups = workload.n * cost.startup_s() / workload.compute_s
        # The planner "exact" finds the best of all plans.
        best_s = iteration_s(workload, make_plan("exact", workload, cost), cost)
        for planner in planners:
            planned_s = iteration_s(workload, make_plan(planner, workload, cost), cost)
            rows.append((instance, start_ups, planner, planned_s / best_s - 1))
    return pd.DataFrame(
        rows, columns=["instance", "start_ups_over_compute", "planner", "gap"]
    )


# -- messages that are not sparsified (osf) ------------------------------------------

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
"""The planners of messages that are not sparsified."""


def dense_draw(rng: np.random.Generator) -> tuple[Workload, AlphaBeta]:
    """Draw a network of 5 to 40 tensors, and a straight line as the cost of its messages.

    Sizes, times of layers and costs are drawn evenly in their logarithms. Compute takes 1 s,
    of which forward takes a third.
    """
    n = int(rng.integers(5, 41))
    # Bytes.
    sizes = (10 ** rng.uniform(3, 7.5, n)).astype(np.int64)
    backward_s = 10 ** rng.uniform(-2, 0, n)
    backward_s *= 2 / 3 / backward_s.sum()
    # All bytes together take 0.1 to 10 s, and a start-up for each tensor 0.01 to 10 s.
    s_per_byte = 10 ** rng.uniform(-1, 1) / sizes.sum()
    start_up_s = 10 ** rng.uniform(-2, 1) / n
    workload = Workload.from_arrays(1 / 3, backward_s, sizes)
    return workload, AlphaBeta(float(start_up_s), float(s_per_byte))


# -- sparsified messages (omgs) ------------------------------------------------------

WORKERS = 16
"""The number of workers that exchange sparsified gradients."""
DENSITY = 0.001
"""The share of the gradients that is selected."""
SELECTION = Log(PUBLISHED_GAMMA_S)
"""omgs Eq 10 without the density, as in the published code of the authors."""


def linear_cost(alpha_s: float, beta_s: float) -> SparseGather:
    """Return the cost of omgs Eq 11: alpha_s, and beta_s for each dense element.

    A sparse message is two gathers, one of values and one of indices. A dense element is an
    element of a gradient before the selection.
    """
    # Each worker sends a value and an index of the share DENSITY of the dense elements, so
    # that all workers gather this many bytes for each of them.
    gathered_bytes = 2 * ELEMENT_BYTES * WORKERS * DENSITY
    s_per_byte = beta_s / gathered_bytes
    # The start-up alpha_s is divided between the two gathers.
    gather = AlphaBeta(
        alpha_s / 2, s_per_byte, collective="all_gather", workers=WORKERS
    )
    return SparseGather(gather, DENSITY, selecting=SELECTION)


def ends_as_printed(workload: Workload, cost: SparseGather) -> list[int]:
    """Return the last layer of each message by omgs Algorithm 1 with all its printed errors.

    Layers are counted from 1 in the order in which their gradients are ready, as in notebook
    09. The planner ``omgs`` is the same algorithm without the errors.
    """
    instance = of_planning(workload, cost)
    merged = find_merged_layers(instance, repairs=frozenset())
    return list(plan_of(merged, "as printed").ends)


def random_workload(
    rng: np.random.Generator, tensors: range
) -> tuple[Workload, float, float]:
    """Draw a network and the two constants of omgs Eq 11.

    Parameters
    ----------
    rng : Generator
        The random numbers.
    tensors : range
        The numbers of tensors from which one is drawn.

    Returns
    -------
    workload : Workload
        Sizes are whole thousands of elements. The logarithms of sizes and of backward times
        are drawn evenly. Forward takes half as long as backward.
    alpha_s, beta_s : float
        The seconds of a message, and those of each of its elements.
    """
    n = int(rng.choice(tensors))
    backward_s = 10 ** rng.uniform(-4, -1.5, n)
    elements = 1000 * np.rint(10 ** rng.uniform(0, 4, n)).astype(np.int64)
    forward_s = float(backward_s.sum()) / 2
    workload = Workload.from_arrays(forward_s, backward_s, ELEMENT_BYTES * elements)
    alpha_s = float(10 ** rng.uniform(-4, -1.5))
    beta_s = float(10 ** rng.uniform(-10, -8))
    return workload, alpha_s, beta_s


def sparse_draw(rng: np.random.Generator) -> tuple[Workload, SparseGather]:
    """Draw a `random_workload` of 2 to 40 tensors, and the cost of its sparse messages."""
    workload, alpha_s, beta_s = random_workload(rng, range(2, 41))
    return workload, linear_cost(alpha_s, beta_s)
