"""When sparsified gradients are worth it: against dense ones, both in their best fusion.

The dense all-reduce is a ring, so is each of the two all-gathers; a step of either starts alike. P workers
send 2 (P-1)/P d dense numbers or 2 (P-1) rho d values and indices, a share of rho P: at a density of 1/P
nothing is saved on the link, whatever it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import FusionPlan, exact, faster
from ddlkit.core.sparse import Selecting, SparseGather
from ddlkit.core.workload import Workload
from ddlkit.papers.omgs import audit
from ddlkit.papers.osf import cluster
from ddlkit.report import source
from ddlkit.report.claims import prose
from ddlkit.report.figures import omgs_breakdown, omgs_planning

WORKERS = 16
SLOWEST, FASTEST = 1e6, 1e13
"""Between which rates, in bit/s, a break-even is looked for."""
CLOSE = 0.05
"""Relative width within which it is found."""


@dataclass(frozen=True)
class Case:
    """A network as somebody computes it, and what selecting takes there."""

    workload: Workload
    selecting: Selecting


def costs(
    bits_per_s: float, start_s: float, density: float, selecting: Selecting, workers: int = WORKERS
) -> tuple[AlphaBeta, SparseGather]:
    """What a dense message costs on a link, and a sparse one."""
    per_byte = 8 * (workers - 1) / workers / bits_per_s
    dense = AlphaBeta(2 * start_s, 2 * per_byte, workers=workers)
    gather = AlphaBeta(start_s, per_byte, collective="all_gather", workers=workers)
    return dense, SparseGather(gather, density, selecting=selecting)


def iterations_s(
    case: Case, bits_per_s: float, start_s: float, density: float, workers: int = WORKERS
) -> tuple[float, float]:
    """An iteration with dense and with sparse gradients, each in its best fusion."""
    dense, sparse = costs(bits_per_s, start_s, density, case.selecting, workers)
    whole_s = Iteration(case.workload, exact(case.workload, dense), dense).prediction.iteration_s
    return whole_s, audit.iteration_s(case.workload, exact(case.workload, sparse), sparse)


@dataclass
class Race:
    """Sparse against dense gradients at any rate of a link; remembers the ``last`` sparse plan that won."""

    case: Case
    start_s: float
    density: float
    workers: int
    last: FusionPlan | None = None

    def sparse_wins(self, bits_per_s: float) -> bool:
        """Whether sparse gradients are faster there: a plan is only looked for where need be.

        Where the plan that won at another rate wins by far more than rounding, the best one does.
        """
        workload, selecting = self.case.workload, self.case.selecting
        dense, sparse = costs(bits_per_s, self.start_s, self.density, selecting, self.workers)
        dense_s = Iteration(workload, exact(workload, dense), dense).prediction.iteration_s
        known = self.last
        if known and audit.iteration_s(workload, known, sparse) < dense_s * (1 - audit.OPTIMAL):
            return True
        found = faster(workload, sparse, dense_s)
        self.last = found or known
        return found is not None


def break_even(case: Case, start_s: float, density: float, workers: int = WORKERS) -> float:
    """The rate in bit/s below which sparse gradients are faster: 0 for never, infinite for always.

    By halving, which takes it that there is one such rate.
    """
    wins = Race(case, start_s, density, workers).sparse_wins
    low, high = SLOWEST, FASTEST
    if not wins(low):
        return 0.0
    if wins(high):
        return math.inf
    while high > low * (1 + CLOSE):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if wins(middle) else (low, middle)
    return math.sqrt(low * high)


@lru_cache(maxsize=1)
def cases() -> dict[str, Case]:
    """ResNet-50: on the paper's GPU with its selection, or with a scan; and on a recorded machine."""
    theirs = cluster.workload("ResNet50", prose("omgs")["resnet50-computing"])
    found = {
        "P102-100, d log d": Case(theirs, audit.SELECTIONS["log"]),
        "P102-100, scan": Case(theirs, audit.SELECTIONS["scan"]),
    }
    for machine, selecting in omgs_planning.measured_selection().items():
        own = source.recordings("layers")[machine].profile("resnet50")
        found[f"{own.device}, measured"] = Case(own.workload(), selecting)
    return found


def on_the_papers_link(density: float = audit.DENSITY) -> tuple[float, float, float, float]:
    """ResNet-50 as the paper computes it, at its start-up: a dense and a sparse iteration on 1 Gbit/s, in
    seconds; and below which rate in bit/s sparse is faster, if selecting takes d log d, and if it scans.
    """
    start_s = omgs_breakdown.costs().alpha_s
    logarithmic, scan = (cases()[f"P102-100, {how}"] for how in ("d log d", "scan"))
    dense_s, sparse_s = iterations_s(logarithmic, 1e9, start_s, density)
    below, below_scan = (break_even(one, start_s, density) for one in (logarithmic, scan))
    return dense_s, sparse_s, below, below_scan
