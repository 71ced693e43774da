"""The best of all mergings, and how near omgs Algorithm 1 comes to it: the numbers of its errata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.sparse import Log, SelectionCost
from ddlkit.papers.omgs import (
    PUBLISHED_GAMMA_S,
    Instance,
    combinations,
    find_merged_layers,
    merged_iteration_s,
)

Bools = NDArray[np.bool_]
Planner = Callable[[Instance], Bools]


def optimal(instance: Instance) -> tuple[Bools, float]:
    """The merging with the shortest iteration of all 2^(L-1) (omgs Eqs 16, 18), and its time."""
    every = combinations(instance.layers)
    times = merged_iteration_s(instance, every)
    best = int(np.argmin(times))
    return every[best], float(times[best])


def random_instances(
    seed: int, count: int, layers: range, selection: SelectionCost | None = None
) -> Iterator[Instance]:
    """Networks drawn at random, always the same for a seed; sizes and times spread over decades."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(rng.choice(layers))
        yield Instance(
            backward_s=10 ** rng.uniform(-4, -1.5, n),
            elements=np.rint(10 ** rng.uniform(3, 7, n)),
            selection=selection or Log(PUBLISHED_GAMMA_S),
            alpha_s=10 ** rng.uniform(-4, -1.5),
            beta_s=10 ** rng.uniform(-10, -8),
        )


class Audit(NamedTuple):
    """How a planner compares with the best merging, over many instances.

    optimal : share in which its iteration is the shortest; mean_gap, worst_gap : relative excess
    improvable : share in which turning one layer from merged to normal, or back, would shorten it
    """

    optimal: float
    mean_gap: float
    worst_gap: float
    improvable: float


def audit(instances: Iterable[Instance], planner: Planner = find_merged_layers) -> Audit:
    """Compare a planner with all mergings of each instance; a gap below 1e-9 counts as none."""
    gaps, improvable = [], []
    for instance in instances:
        merged = planner(instance)
        found = float(merged_iteration_s(instance, merged))
        gaps.append(found / optimal(instance)[1] - 1)
        turned = merged_iteration_s(instance, merged ^ np.eye(instance.layers, dtype=bool)[1:])
        improvable.append(bool(np.any(turned < found * (1 - 1e-9))))
    gap = np.array(gaps)
    return Audit(float(np.mean(gap < 1e-9)), gap.mean(), gap.max(), float(np.mean(improvable)))
