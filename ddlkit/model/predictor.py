"""The validated model: plan, compute and communication to an iteration's time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from pandas import DataFrame

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.fit import LEVEL, interval
from ddlkit.core.iteration import Iteration, Prediction
from ddlkit.core.plan import FusionPlan, improved, make_plan
from ddlkit.core.resources import Resources, jointly
from ddlkit.core.sparse import Selecting, elements_of, with_selection
from ddlkit.core.workload import Floats, Workload
from ddlkit.model.calibration import Calibration, Communication
from ddlkit.model.contention import Contention

STEADY = np.ones(1)  # compute that does not scatter: replayed, or not known to
COMPUTE_DRIFT = 0.12
"""Of compute within minutes, on virtual processors: the root mean square of how much eight profiles of two
networks differed from iterations without exchange in training right after, which took as long on average."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """A prediction, and the interval of single iterations; None without bootstrap draws.

    paired_s : the interval where compute's drift since its profile is known, and was taken off
    """

    iteration: Iteration
    interval_s: tuple[float, float] | None
    paired_s: tuple[float, float] | None = None

    @property
    def prediction(self) -> Prediction:
        """Return the times of the iteration."""
        return self.iteration.prediction


def forecast(
    workload: Workload,
    plan: FusionPlan,
    communication: Communication,
    *,
    copy_s_per_byte: float = 0.0,
    compute_scatter: Floats = STEADY,
    compute_drift: float = COMPUTE_DRIFT,
    level: float = LEVEL,
) -> Forecast:
    """Return a prediction of ``workload`` under ``plan``, with the interval of a single iteration.

    Selecting counts as compute, where the cost knows what it takes. Where contention is known, compute is
    real: both slow each other down, and buckets take what was measured of them.

    copy_s_per_byte : of gradients into and out of messages, if contention says nothing of it; counts as
        exposed communication
    compute_scatter : iterations of one worker alone over their median
    compute_drift : standard deviation of the logarithm of how much compute has changed since its profile,
        where contention is known
    level : share of single iterations that should lie in the interval
    """
    cost, beside = communication.cost, communication.contention
    if cost.selects:
        selecting_s = cost.selection_s(plan.group_bytes(workload))
        workload = with_selection(workload, plan, selecting_s)
    iteration = Iteration(workload, plan, cost, communication.link, copy_s_per_byte)
    if beside:
        iteration = with_contention(iteration, beside)
    if not communication.draws:
        return Forecast(iteration, None)
    drawn_s, drifted = drawn(iteration, communication, compute_scatter, compute_drift)
    both = (
        interval(drawn_s, level),
        interval(drawn_s - workload.compute_s * (drifted - 1), level),
    )
    return Forecast(
        iteration, *((float(lower_s), float(upper_s)) for lower_s, upper_s in both)
    )


def drawn(
    iteration: Iteration,
    communication: Communication,
    compute_scatter: Floats = STEADY,
    compute_drift: float = COMPUTE_DRIFT,
    scatter: bool = True,
) -> tuple[Floats, Floats]:
    """Return (B,) iterations by draws, and (B,) how much compute has drifted in each: of every plan as much.

    scatter : whether single messages scatter, as in a single iteration
    """
    draws, beside = communication.draws, communication.contention
    factors: Floats | float = 1.0
    if communication.noise is not None:
        sent_bytes = iteration.group_bytes * getattr(iteration.cost, "density", 1.0)
        factors = communication.noise.factors(sent_bytes, len(draws), scatter=scatter)
    slower = np.random.default_rng(0).choice(compute_scatter, len(draws))
    drifted, slowed = np.ones(len(draws)), None
    if beside:
        drifted = np.exp(
            compute_drift * np.random.default_rng(2).standard_normal(len(draws))
        )
        slowed = beside.of_messages(iteration.group_bytes, len(draws))
    return iteration.draws(draws, factors, slower * drifted, slowed), drifted


def with_contention(iteration: Iteration, beside: Contention) -> Iteration:
    """Return the iteration where messages and compute slow each other down, and buckets take their time."""
    of_compute, of_messages = beside.of_messages(iteration.group_bytes)
    link = replace(iteration.link, slowdown=of_compute, message_slowdown=of_messages)
    copy_s = beside.copy_s_per_byte or iteration.copy_s_per_byte
    return replace(
        iteration, link=link, copy_s_per_byte=copy_s, bucket_s=beside.bucket_s
    )


HOST_BOUND = 0.9  # from this share on, a GPU's iteration is as long as its host takes to issue it


def issue_share(samples: DataFrame) -> float:
    """Return how long a host issues an iteration over what that takes on the GPU; NaN if not timed."""
    median = samples.groupby("quantity")["seconds"].median()
    return float(median.get("issue", math.nan) / median["unhooked_iteration"])


def scatter_of(samples: DataFrame) -> Floats:
    """Return (n,) iterations of one worker alone over their median, of a profile's ``samples`` table."""
    took_s = samples["seconds"][samples["quantity"] == "unhooked_iteration"].to_numpy()
    return np.asarray(took_s / np.median(took_s))


def forecast_case(
    case: Case,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    selections: Mapping[str, Selecting] | None = None,
    copy_s_per_byte: float = 0.0,
    compute_scatter: Floats = STEADY,
    level: float = LEVEL,
    compute_drift: float = COMPUTE_DRIFT,
) -> Forecast:
    """Return the forecast of a case on its slowest rank; workloads, selections : by the case's hashes."""
    workload, messages = (
        computed(case, workloads, selections or {}),
        calibration.of_case(case),
    )
    return forecast(
        workload,
        plan_of(case),
        messages,
        copy_s_per_byte=copy_s_per_byte,
        compute_scatter=compute_scatter,
        compute_drift=compute_drift,
        level=level,
    )


def plan_of(case: Case) -> FusionPlan:
    """Return the plan whose group ends the case carries."""
    return FusionPlan(case.plan, tuple(int(end) for end in case.ends.split(";")))


def computed(
    case: Case, workloads: Mapping[str, Workload], selections: Mapping[str, Selecting]
) -> Workload:
    """Return what the slowest rank computes, selections included. Raises UserError without their times."""
    if case.profile_sha256 not in workloads:
        profile = case.profile_sha256[:12]
        raise UserError(f"case {case.key}: its layer profile {profile} is not at hand")
    slower = case.dilation * case.straggler
    workload = (
        workloads[case.profile_sha256].scaled(slower).accumulated(case.accumulate)
    )
    if not case.sparse:
        return workload
    if case.selection_sha256 not in selections:
        name = case.selection_sha256[:12] or "of a real one"
        raise UserError(f"case {case.key}: selection times {name} are not at hand")
    plan, selecting = plan_of(case), selections[case.selection_sha256]
    selection_s = selecting(elements_of(plan.group_bytes(workload)), case.density)
    return with_selection(workload, plan, slower * selection_s)


SEARCH = "search"


def plan_beside(
    spec: str, workload: Workload, communication: Communication
) -> FusionPlan:
    """Return `make_plan`'s, or for "search" the best found where compute and messages slow each other down.

    Local moves from the best of exact, jointly and ddp; without contention exact is the best of all plans.
    """
    beside, cost = communication.contention, communication.cost
    if spec != SEARCH or beside is None:
        return make_plan("exact" if spec == SEARCH else spec, workload, cost)
    middle = beside.of_messages([float(np.median(workload.bytes))])[:, 0].tolist()
    starts = [make_plan("exact", workload, cost), make_plan("ddp", workload)]
    starts.append(jointly(workload, [Resources("all", cost, *middle)]).plan)

    def seconds(plan: FusionPlan) -> float:
        made = Iteration(workload, plan, cost, communication.link)
        return with_contention(made, beside).prediction.iteration_s

    return FusionPlan(SEARCH, improved(min(starts, key=seconds), seconds).ends)
