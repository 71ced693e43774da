"""The validated model: plan, compute and communication to an iteration's time; models on trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from pandas import DataFrame

from ddlkit import papers
from ddlkit.core import plan as planning
from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import LEVEL, interval
from ddlkit.core.iteration import (
    Iteration,
    Prediction,
    Resources,
    jointly,
    no_overlap,
    perfect_overlap,
)
from ddlkit.core.link import Link
from ddlkit.core.plan import FusionPlan, Planner, improved
from ddlkit.core.sparse import Selecting, elements_of, with_selection
from ddlkit.core.workload import Floats, Workload
from ddlkit.model.calibration import UNFITTED, Calibration, Communication
from ddlkit.model.contention import Contention
from ddlkit.papers.osf import predict_osf

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
    how: Any = {"copy_s_per_byte": copy_s_per_byte, "compute_scatter": compute_scatter}
    how |= {"compute_drift": compute_drift, "level": level}
    return forecast(workload, plan_of(case), messages, **how)


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
    if case.collective != "all_gather":
        return workload
    if case.selection_sha256 not in selections:
        name = case.selection_sha256[:12] or "of a real one"
        raise UserError(f"case {case.key}: selection times {name} are not at hand")
    plan, selecting = plan_of(case), selections[case.selection_sha256]
    selection_s = selecting(elements_of(plan.group_bytes(workload)), case.density)
    return with_selection(workload, plan, slower * selection_s)


def planners() -> dict[str, Planner]:
    """Return every planner by its name: ours, and those of the papers."""
    papers.load()
    return planning.PLANNERS


def make_plan(
    spec: str, workload: Workload, cost: MessageCost | None = None
) -> FusionPlan:
    """Return the plan of our planners or the papers'. Raises UserError for an unknown one or no cost."""
    papers.load()
    return planning.make_plan(spec, workload, cost)


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


OWN = ""
_RECURSION = attrgetter(
    "prediction"
)  # our own: a message starts when it and the link are ready
_REPAIRED = partial(predict_osf, literal=False)
TRIALS: dict[str, tuple[str, Callable[[Iteration], Prediction]]] = {
    "no_overlap": (OWN, no_overlap),
    "perfect_overlap": (OWN, perfect_overlap),
    "no_burst_tokens": (OWN, _RECURSION),
    "line_medians": ("alpha_beta:medians", _RECURSION),
    "line_least_squares": ("alpha_beta:least_squares", _RECURSION),
    "line_unfitted": (UNFITTED, _RECURSION),
    "line_ends": ("alpha_beta:ends", _RECURSION),
    "line_relative": ("alpha_beta:relative", _RECURSION),
    "osf_line": ("alpha_beta:medians", predict_osf),
    "osf_table": (OWN, predict_osf),
    "osf_repaired_line": ("alpha_beta:medians", _REPAIRED),
    "osf_repaired_table": (OWN, _REPAIRED),
}
"""Every model that ours is held against: the form of its cost (OWN: the measured table), and its formula."""
TRIAL_COSTS = tuple(dict.fromkeys(cost for cost, _ in TRIALS.values() if cost))
OURS = "model"
MODELS = (OURS, *TRIALS)
MEASURED = (
    "table"  # ours with a lab's medians, where ours has gloo's law fitted to them
)
TRANSFERRED = "transferred"  # ours with a cost from other labs' calibrations


def predicted_times(
    ours: Forecast, others: Mapping[str, MessageCost]
) -> dict[str, tuple[float, float]]:
    """Return iteration and exposed communication, in seconds, by each of MODELS; NaN without its cost."""
    iteration, link = ours.iteration, ours.iteration.link
    bare = replace(iteration, link=Link(link.in_flight, link.software))
    costs = {OWN: iteration.cost, **others}
    rows = dict.fromkeys(TRIALS, (math.nan, math.nan))
    for name, (cost, formula) in TRIALS.items():
        if cost in costs:
            rows[name] = times(formula(replace(bare, cost=costs[cost])))
    return {**rows, OURS: times(ours.prediction)}


LINE = "line_medians"
BARE, LINE_BESIDE = f"{OURS}_alone", f"{LINE}_beside"
REAL_MODELS = (*MODELS, BARE, LINE_BESIDE)
"""Every model of a case that really trains: all but ours and LINE_BESIDE know nothing of contention."""


def real_times(
    ours: Forecast, others: Mapping[str, MessageCost]
) -> dict[str, tuple[float, float]]:
    """Return iteration and exposed communication, in seconds, by each of REAL_MODELS."""
    whole, link = ours.iteration, ours.iteration.link
    beside = replace(link, burst_s=0.0, wire_s_per_byte=0.0)
    of_line = replace(whole, cost=others[TRIALS[LINE][0]], link=beside)
    unslowed = replace(link, slowdown=0.0, message_slowdown=0.0)
    bare = replace(whole, link=unslowed, copy_s_per_byte=0.0, bucket_s=0.0)
    rows = predicted_times(Forecast(bare, None), others)
    ours_bare = {BARE: rows[OURS], OURS: times(whole.prediction)}
    return rows | ours_bare | {LINE_BESIDE: times(of_line.prediction)}


def times(prediction: Prediction) -> tuple[float, float]:
    """Return iteration and exposed communication, in seconds."""
    return prediction.iteration_s, prediction.exposed_communication_s
