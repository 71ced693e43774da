"""The validated model: a plan, compute and communication to the time of an iteration, with its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pandas import DataFrame

from ddlkit import papers
from ddlkit.core import plan as planning
from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.doubt import interval
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration, Prediction
from ddlkit.core.plan import FusionPlan, Planner
from ddlkit.core.sparse import Selecting, group_selection_s, with_selection
from ddlkit.core.workload import Floats, Workload
from ddlkit.model.calibration import Calibration, Communication

STEADY = np.ones(1)
"""Compute that does not scatter: replayed, or not known to."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """A prediction, and where 95% of single iterations should lie; None without bootstrap draws.

    iteration : what was predicted, for its timeline or for other models of the same
    """

    iteration: Iteration
    interval_s: tuple[float, float] | None

    @property
    def prediction(self) -> Prediction:
        """Times of the iteration."""
        return self.iteration.prediction


def forecast(
    workload: Workload,
    plan: FusionPlan,
    communication: Communication,
    *,
    copy_s_per_byte: float = 0.0,
    compute_scatter: Floats = STEADY,
) -> Forecast:
    """Predict an iteration of ``workload`` under ``plan``, with the interval of a single iteration.

    The interval holds three kinds of noise, all of the calibration: how sure the cost is, how single
    messages scatter about it, and how it drifts from session to session; and, where it is known, a
    fourth, of the profile: how compute scatters from iteration to iteration. Where the cost knows what
    selecting a message takes, that is computed, too.

    copy_s_per_byte : of gradients into and out of messages; counts as exposed communication
    compute_scatter : iterations of one worker alone over their median
    """
    cost, draws = communication.cost, communication.draws
    if cost.selects:
        selecting_s = cost.selection_s(plan.group_bytes(workload))
        workload = with_selection(workload, plan, selecting_s)
    iteration = Iteration(workload, plan, cost, communication.link, copy_s_per_byte)
    if not draws:
        return Forecast(iteration, None)
    factors: Floats | float = 1.0
    if communication.noise is not None:
        sent_bytes = iteration.group_bytes * getattr(cost, "density", 1.0)
        factors = communication.noise.factors(sent_bytes, len(draws))
    slower = np.random.default_rng(0).choice(compute_scatter, len(draws))
    lower_s, upper_s = interval(iteration.draws(draws, factors, slower))
    return Forecast(iteration, (float(lower_s), float(upper_s)))


HOST_BOUND = (
    0.9  # from this share on, a GPU's iteration is as long as a program takes to ask for it
)


def issue_share(samples: DataFrame) -> float:
    """Time in which a host issues an iteration over what that takes on the GPU, by its ``samples``.

    From HOST_BOUND on, the iteration shows how fast Python is, not the GPU. NaN where it was not timed.
    """
    median = samples.groupby("quantity")["seconds"].median()
    return float(median.get("issue", math.nan) / median["unhooked_iteration"])


def scatter_of(samples: DataFrame) -> Floats:
    """Iterations of one worker alone over their median, of the ``samples`` table of a layer profile."""
    took_s = samples["seconds"][samples["quantity"] == "unhooked_iteration"].to_numpy()
    return np.asarray(took_s / np.median(took_s))


def forecast_case(
    case: Case,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    selections: Mapping[str, Selecting] | None = None,
    copy_s_per_byte: float = 0.0,
    compute_scatter: Floats = STEADY,
) -> Forecast:
    """The forecast of a case: its slowest rank's workload, its plan, its lab's calibration.

    workloads : by the hash of the profile that a case carries
    selections : selection times by the hash that a sparse case carries; the rest as for `forecast`
    """
    return forecast(
        computed(case, workloads, selections or {}),
        plan_of(case),
        calibration.of_case(case),
        copy_s_per_byte=copy_s_per_byte,
        compute_scatter=compute_scatter,
    )


def plan_of(case: Case) -> FusionPlan:
    """The plan whose group ends the case carries."""
    return FusionPlan(case.plan, tuple(int(end) for end in case.ends.split(";")))


def computed(
    case: Case, workloads: Mapping[str, Workload], selections: Mapping[str, Selecting]
) -> Workload:
    """What the slowest rank of a case computes, its selections included.

    Raises UserError when the layer profile, or the selection times of a sparse case, are not at hand.
    """
    if case.profile_sha256 not in workloads:
        raise UserError(
            f"case {case.key}: its layer profile {case.profile_sha256[:12]} is not at hand"
        )
    slower = case.dilation * case.straggler
    workload = workloads[case.profile_sha256].scaled(slower)
    if case.collective != "all_gather":
        return workload
    if case.selection_sha256 not in selections:
        name = case.selection_sha256[:12] or "of a real one"
        raise UserError(f"case {case.key}: selection times {name} are not at hand")
    plan = plan_of(case)
    selection_s = group_selection_s(workload, plan, case.density, selections[case.selection_sha256])
    # Only what is waited out can be stretched.
    stretch = slower if case.selection_sha256 else 1.0
    return with_selection(workload, plan, stretch * selection_s)


def planners() -> dict[str, Planner]:
    """Every planner by its name: ours, and those of the papers."""
    papers.load()
    return planning.PLANNERS


def make_plan(spec: str, workload: Workload, cost: MessageCost | None = None) -> FusionPlan:
    """The plan that ``spec`` names, by our own planners or by those of the papers.

    Planners see what a message costs, not what messages share: they plan as if messages went one after
    the other over a link that saves nothing while it rests. Predict what comes out with the link.

    Raises UserError for an unknown planner, or one that needs a cost when none is given.

    >>> toy = Workload.from_arrays(1.0, [1.0, 1.0, 1.0], [1_000_000, 3_000_000, 20_000_000])
    >>> make_plan("buffer:4MB", toy).ends
    (2, 3)
    """
    papers.load()
    return planning.make_plan(spec, workload, cost)
