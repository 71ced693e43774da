"""Models on trial where the messages of a cluster were measured on their own: each an iteration's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ddlkit.core import plan
from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import Iteration, no_overlap, perfect_overlap
from ddlkit.core.link import Link
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import Floats, Workload
from ddlkit.papers.dag import IterationTimes, wait_free_iteration_s
from ddlkit.papers.osf import predict_osf

BUCKET_BYTES = 25 * 2**20
"""PyTorch's default; what the paper's constant buffer is taken to be."""


class Trial(NamedTuple):
    """An iteration in seconds of a workload, a plan and a cost; ``free`` is its one fitted number, if any.

    most : what the free number is at most; 0 where the model has none
    """

    iteration_s: Callable[[Workload, FusionPlan, MessageCost, float], float]
    most: float = 0.0


def _osf_repaired(work: Workload, sent: FusionPlan, cost: MessageCost, _: float) -> float:
    known = sent.planner.partition(":")[0] in ("none", "single", "buffer")
    own = sent if known else plan.buffer(work, BUCKET_BYTES)
    return predict_osf(Iteration(work, own, cost), literal=False).iteration_s


def _wait_free(work: Workload, _: FusionPlan, cost: MessageCost, __: float) -> float:
    """dag Eq 4, with the update that it leaves out: every tensor travels alone."""
    return wait_free_iteration_s(IterationTimes.of_workload(work, cost)) + work.update_s


def _workbook(work: Workload, sent: FusionPlan, cost: MessageCost, slowdown: float = 0.0) -> float:
    return Iteration(work, sent, cost, Link(slowdown=slowdown)).prediction.iteration_s


TRIALS = {
    "compute_only": Trial(lambda work, sent, cost, _: work.compute_s),
    "no_overlap": Trial(lambda *of: no_overlap(Iteration(*of[:3])).iteration_s),
    "perfect_overlap": Trial(lambda *of: perfect_overlap(Iteration(*of[:3])).iteration_s),
    "osf_repaired": Trial(_osf_repaired),
    "dag": Trial(_wait_free),
    "workbook": Trial(lambda *of: _workbook(*of[:3])),
    "workbook_slowed": Trial(_workbook, most=10.0),
    "workbook_step": Trial(lambda *of: _workbook(*of[:3]) + of[3], most=1.0),
}
"""By name. The free numbers: a slowdown of computing beside messages; and what a step of data parallelism
takes beside them, in seconds. OSF has no formula for PyTorch's buckets: it gets a constant buffer.
"""


def fitted(predicted_s: Callable[[float], Floats], measured_s: Floats, most: float) -> float:
    """The free number from 0 to ``most`` at which the median signed error on (n,) rows is nought.

    predicted_s : what a model says of the rows for a free number; it must not fall as that rises
    Where no number will do, the end of the range that comes nearest.
    """

    def bias(free: float) -> float:
        return float(np.median(predicted_s(free) / measured_s - 1))

    if bias(0.0) >= 0:
        return 0.0
    if bias(most) <= 0:
        return most
    return root(bias, 0.0, most, xtol=1e-12, rtol=1e-9)


def root(of: Callable[..., float], low: float, high: float, **exactness: float) -> float:
    """Where a function is nought that has another sign at ``low`` than at ``high``; as SciPy's brentq."""
    from scipy.optimize import (
        brentq,
    )  # not in every notebook: it takes as long to import as all of pandas

    return float(brentq(of, low, high, **exactness))
