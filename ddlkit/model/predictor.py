"""The validated model: from a workload, a plan and a calibration to an iteration's time.

A forecast has the predicted iteration, and an interval that should contain the time of
a single measured iteration. The interval comes from draws. Each draw has its own cost,
scatter of messages, scatter of compute and, where compute is real, its own drift of
compute and its own slowdowns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from pandas import DataFrame

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import LEVEL, interval
from ddlkit.core.iteration import Iteration, Prediction
from ddlkit.core.plan import FusionPlan, improved, make_plan, refuse_unknown_plan
from ddlkit.core.resources import Resources, jointly
from ddlkit.core.sparse import Selecting, elements_of, with_selection
from ddlkit.core.workload import Floats, Workload
from ddlkit.model.calibration import Calibration, Communication
from ddlkit.model.contention import Contention

STEADY = np.ones(1)
"""Compute that does not scatter: slept in a replay, or not known to scatter."""

COMPUTE_DRIFT = 0.12
"""The standard deviation of how compute changes within minutes on virtual processors.

It is the root mean square difference between eight profiles of two networks and the
iterations without exchange that were trained right after each profile. On average the
two took equally long.
"""

HOST_BOUND = 0.9
"""From this `issue_share` on, a GPU's iteration takes as long as its host needs."""

SEARCH = "search"
"""The plan that is searched where messages and compute slow each other down."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """A predicted iteration with the interval of single iterations.

    Attributes
    ----------
    iteration : Iteration
        The predicted iteration, message by message.
    interval_s : (float, float) or None
        Lower and upper end in seconds; None if the cost has no draws.
    paired_interval_s : (float, float) or None
        The interval without the drift of compute since its profile. It is for a
        comparison with iterations without exchange of the same minutes, which have the
        same drift.
    interval_includes : str
        Which causes of scatter the interval includes, in words, if it cannot include
        all. Otherwise empty.
    """

    iteration: Iteration
    interval_s: tuple[float, float] | None
    paired_interval_s: tuple[float, float] | None = None
    interval_includes: str = ""

    @property
    def prediction(self) -> Prediction:
        """Return the times of the iteration."""
        return self.iteration.prediction


def interval_includes(communication: Communication) -> str:
    """Return which causes of scatter an interval of real training includes.

    Parameters
    ----------
    communication : Communication
        What is known of the messages.

    Returns
    -------
    str
        The causes that the interval includes and those that it lacks, in words. Empty
        if the interval lacks none, which is so if contention was measured.

    Notes
    -----
    Contention is how much messages and compute slow each other down. If it was measured,
    the interval has its slowdowns and lacks nothing. If it is assumed to be none
    (`Contention.none`), the interval has the drift of compute, and the scatter and the
    drift of messages. If nothing is known of it, the drift of compute is missing as well.
    If the noise of messages is not known, the interval has the uncertainty of their
    fitted cost in place of their scatter and drift.

    Without a measured contention, the interval is hardly wider than a point if compute
    hides most messages, and would be wrong as an interval of 95%. It could be widened by
    the errors of recorded training. But iterations of recorded training took 0 to 31%
    longer than predicted without contention, depending on the link, and other machines
    were not recorded. A width taken from there would look measured without being so. The
    interval therefore states what it includes.

    This function is not for replays. They sleep for their compute times, so nothing
    slows their compute down, and their intervals lack nothing.

    Examples
    --------
    >>> from ddlkit.core.cost import AlphaBeta
    >>> interval_includes(Communication(AlphaBeta(0.5, 0.02))).partition("; ")[0]
    'the uncertainty of the fitted cost of messages'
    """
    contention = communication.contention
    if contention is not None and contention.is_measured:
        return ""
    if communication.noise is None:
        included = "the uncertainty of the fitted cost of messages"
    else:
        included = (
            "the scatter and drift of messages and the uncertainty of their fitted cost"
        )
    if contention is None:
        missing = "contention with compute and the drift of compute"
    else:
        # With any contention, also an assumed one, draws have the drift of compute that
        # was found in recorded training.
        included += ", and the drift of compute"
        missing = "contention with compute"
    return f"{included}; not included: {missing}"


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
    """Return the prediction of an iteration with the interval of a single iteration.

    Contention is how much messages and compute slow each other down. If it was measured, the
    share ``level`` of single iterations should lie in the interval. Otherwise the text
    ``interval_includes`` of the result says which causes of scatter the interval of real
    training includes. The text does not apply to replays. They sleep for their compute times, so
    that they have no contention, and their intervals lack nothing.

    Parameters
    ----------
    workload : Workload
        What one iteration computes, tensor by tensor.
    plan : FusionPlan
        Which gradients share a message.
    communication : Communication
        What is known of the messages. If its cost selects gradients, the time to select
        counts as compute. If it has a contention, the iteration is one of real training:
        messages and compute slow each other down, and buckets cost what was measured.
    copy_s_per_byte : float, optional
        Seconds per byte to copy gradients into and out of messages, unless the
        contention has a measured value. These copies count as exposed communication.
    compute_scatter : ndarray, shape (n,), optional
        The times of n iterations of one worker alone, each divided by their median. By
        default, compute does not scatter.
    compute_drift : float, optional
        The standard deviation of the logarithm of the factor by which compute has
        changed since its profile. It is ignored if ``communication`` has no contention.
    level : float, optional
        The share of single iterations that should lie in the interval.

    Returns
    -------
    Forecast
        Without an interval if the cost has no draws.

    Raises
    ------
    UserError
        If the plan does not fit the workload, if the cost of a message is negative, or
        if ``level`` is not between 0 and 1.

    Examples
    --------
    >>> from ddlkit.core.cost import AlphaBeta
    >>> layers = Workload.from_arrays(3, backward_s=[2, 2, 2], n_bytes=[100] * 3)
    >>> costs = [AlphaBeta(0.5 * factor, 0.02) for factor in (0.8, 1.0, 1.2)]
    >>> single = make_plan("single", layers)
    >>> predicted = forecast(layers, single, Communication(costs[1], draws=costs))
    >>> predicted.prediction.iteration_s, np.round(predicted.interval_s, 1).tolist()
    (15.5, [15.4, 15.6])
    """
    if not isinstance(communication, Communication):
        raise UserError(
            f"communication is {shown(communication)}: give a Communication, such as "
            "Communication(cost) for a message cost"
        )
    iteration = _iteration(workload, plan, communication, copy_s_per_byte)
    if not communication.draws:
        return Forecast(iteration, interval_s=None)

    iterations_s, drift = draw_iterations(
        iteration, communication, compute_scatter, compute_drift
    )
    # The drift of a draw is a factor on compute, such as 1.1 for compute that takes a tenth
    # longer. The paired interval is for a comparison with iterations of the same minutes,
    # which have the same drift. So each of its draws lacks the time that drift adds.
    without_drift_s = iterations_s - iteration.workload.compute_s * (drift - 1)
    return Forecast(
        iteration,
        interval_s=_interval(iterations_s, level),
        paired_interval_s=_interval(without_drift_s, level),
        interval_includes=interval_includes(communication),
    )


def _iteration(
    workload: Workload,
    plan: FusionPlan,
    communication: Communication,
    copy_s_per_byte: float,
) -> Iteration:
    """Return the predicted iteration, with selections and contention where there are any.

    ``copy_s_per_byte`` is the time to copy a gradient into a message, in seconds
    per byte, unless a contention has a measured value.
    """
    cost = communication.cost
    # A sparse message sends selected elements, and selecting them takes compute.
    if cost.selects:
        selection_s = cost.selection_s(plan.group_bytes(workload))
        workload = with_selection(workload, plan, selection_s)
    iteration = Iteration(
        workload, plan, cost, communication.link, copy_s_per_byte=copy_s_per_byte
    )
    if communication.contention is None:
        return iteration
    return with_contention(iteration, communication.contention)


def _interval(draws_s: Floats, level: float) -> tuple[float, float]:
    """Return the interval that has the share ``level`` of the draws, as two numbers."""
    lower_s, upper_s = interval(draws_s, level)
    return float(lower_s), float(upper_s)


def draw_iterations(
    iteration: Iteration,
    communication: Communication,
    compute_scatter: Floats = STEADY,
    compute_drift: float = COMPUTE_DRIFT,
    message_scatter: bool = True,
) -> tuple[Floats, Floats]:
    """Draw times of an iteration, and the drift of compute in each of these draws.

    There is one draw for each draw of the cost.

    Parameters
    ----------
    iteration : Iteration
        The predicted iteration. If ``communication`` has a contention, it is the iteration
        that `with_contention` returns.
    communication : Communication
        What is known of the messages, with B draws of their cost, and with draws of the
        slowdowns if there is a contention.
    compute_scatter : ndarray, shape (n,), optional
        The times of n iterations of one worker alone, each divided by their median. By
        default, compute does not scatter.
    compute_drift : float, optional
        The standard deviation of the logarithm of the factor by which compute has
        changed since its profile. It is ignored if ``communication`` has no contention.
    message_scatter : bool, optional
        Whether each message also scatters by itself. Without this scatter, messages
        have only the drift that all messages of a draw share, as in the mean of many
        iterations. ``compute_scatter`` counts in any case.

    Returns
    -------
    iterations_s : ndarray, shape (B,)
        The time of the iteration in each draw, in seconds.
    drift : ndarray, shape (B,)
        The factor by which compute has changed in each draw. It does not depend on the
        plan, so the draws of two plans can be compared one by one.
    """
    costs = communication.draws
    contention = communication.contention

    # Each kind of randomness has a generator of its own, so that no kind changes the draws
    # of another. The seeds are fixed, so that all plans are compared under the same draws.
    # Slowdowns have the seed 1 (`Contention.of_messages`), and messages 0 (`Noise.factors`).
    # The scatter of compute has the seed 0, too, because another one would change predictions
    # that are recorded. It is independent of messages all the same from the second draw on:
    # `choice` uses up 32 random bits for a draw of compute, and `uniform` 64 for one of messages.
    compute_factors = np.random.default_rng(0).choice(compute_scatter, len(costs))
    drift = np.ones(len(costs))
    slowdowns = None
    # A contention says how much messages and compute slow each other down. If there is one, the
    # iteration is one of real training, whose compute drifts and is slowed down. A replay sleeps
    # for its compute times, and has none.
    if contention:
        normal = np.random.default_rng(2).standard_normal(len(costs))
        drift = np.exp(compute_drift * normal)
        # ``iteration`` has the median slowdowns, and each draw has its own.
        slowdowns = contention.of_messages(iteration.group_bytes, drawn=len(costs))
    iterations_s = iteration.draws(
        costs,
        message_factors=_message_factors(iteration, communication, message_scatter),
        compute_factors=compute_factors * drift,
        slowdowns=slowdowns,
    )
    return iterations_s, drift


def _message_factors(
    iteration: Iteration, communication: Communication, scatter: bool
) -> Floats | float:
    """Return factors by which the messages of an iteration differ from their cost.

    The result has the shape (B, G), for B draws and G messages. If the noise of messages is
    not known, each takes what its cost says, and the result is the number 1. Without
    ``scatter``, the messages of a draw only drift together, as in the mean of many
    iterations.
    """
    if communication.noise is None:
        return 1.0
    # Noise was measured by the bytes that are sent. A sparse group sends only the
    # selected share of its bytes, and the cost of a dense one has no density.
    density = getattr(iteration.cost, "density", 1.0)
    sent_bytes = iteration.group_bytes * density
    return communication.noise.factors(
        sent_bytes, draws=len(communication.draws), scatter=scatter
    )


def with_contention(iteration: Iteration, contention: Contention) -> Iteration:
    """Return the iteration in which messages and compute slow each other down.

    Parameters
    ----------
    iteration : Iteration
        The iteration without contention.
    contention : Contention
        The slowdowns by the size of a message, and the compute time of copies and buckets.
        A measured time of copies replaces the time that ``iteration`` has.

    Returns
    -------
    Iteration
        ``iteration`` with the slowdowns of its messages in its link, and with the times of
        copies and buckets.
    """
    slowdown_of_compute, slowdown_of_messages = contention.of_messages(
        iteration.group_bytes
    )
    # A contention states 0 seconds per byte if copies were not timed with it. The time that
    # the iteration has then stays. What a bucket costs is known from a contention only.
    copy_s_per_byte = contention.copy_s_per_byte or iteration.copy_s_per_byte
    link = replace(
        iteration.link,
        slowdown=slowdown_of_compute,
        message_slowdown=slowdown_of_messages,
    )
    return replace(
        iteration,
        link=link,
        copy_s_per_byte=copy_s_per_byte,
        bucket_s=contention.bucket_s,
    )


def issue_share(samples: DataFrame) -> float:
    """Return the time to issue an iteration on the host, divided by its time on the GPU.

    To issue an iteration is to start all its kernels, which the GPU runs later.

    Parameters
    ----------
    samples : DataFrame
        Rows of a table ``samples`` of one profile.

    Returns
    -------
    float
        The ratio of the median times. Near 1 the host limits the iteration, and far
        below 1 the GPU does. NaN if issuing was not timed.
    """
    median_s = samples.groupby("quantity")["seconds"].median()
    # "unhooked" iterations ran without the hooks that time single layers.
    return float(median_s.get("issue", math.nan) / median_s["unhooked_iteration"])


def scatter_of(samples: DataFrame) -> Floats:
    """Return how iterations of one worker alone scatter.

    Parameters
    ----------
    samples : DataFrame
        Rows of a table ``samples`` of one profile.

    Returns
    -------
    ndarray, shape (n,)
        The time of each iteration, divided by their median.
    """
    # These iterations ran without the hooks that time single layers, which add scatter.
    is_iteration = samples["quantity"] == "unhooked_iteration"
    iterations_s = samples["seconds"][is_iteration].to_numpy()
    return np.asarray(iterations_s / np.median(iterations_s))


# -- cases -----------------------------------------------------------------------------


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
    """Return the forecast of a case, for the slowest of its ranks.

    Parameters
    ----------
    case : Case
        What identifies a measured iteration: its network, plan, link and so on.
    workloads : mapping of str to Workload
        Workloads by the hash of their layer profile.
    calibration : Calibration
        What is known of messages over the links of cases.
    selections : mapping of str to Selecting, optional
        Selection times by their hash. Sparse cases need them.
    copy_s_per_byte : float, optional
        Seconds per byte to copy gradients into and out of messages.
    compute_scatter : ndarray, shape (n,), optional
        The times of n iterations of one worker alone, each divided by their median. By
        default, compute does not scatter.
    level : float, optional
        The share of single iterations that should lie in the interval.
    compute_drift : float, optional
        The standard deviation of the logarithm of the factor by which compute has
        changed since its profile. It is ignored unless ``calibration`` has the contention
        of the case, which is how much messages and compute slow each other down. It is known
        of real training only: a replay sleeps for its compute times, which do not drift.

    Returns
    -------
    Forecast
        The predicted iteration and its interval.

    Raises
    ------
    UserError
        If the layer profile, the selection times or the calibration of the case is
        missing.
    """
    return forecast(
        workload_of_case(case, workloads, selections or {}),
        plan_of(case),
        calibration.of_case(case),
        copy_s_per_byte=copy_s_per_byte,
        compute_scatter=compute_scatter,
        compute_drift=compute_drift,
        level=level,
    )


def plan_of(case: Case) -> FusionPlan:
    """Return the plan that a case states.

    Parameters
    ----------
    case : Case
        What identifies a measured iteration. ``case.ends`` lists where each group of
        gradients ends, as the number of gradients that are ready by then: "3;40;161".

    Returns
    -------
    FusionPlan
        The groups of gradients that were sent together.
    """
    ends = tuple(int(end) for end in case.ends.split(";"))
    return FusionPlan(case.plan, ends)


def workload_of_case(
    case: Case, workloads: Mapping[str, Workload], selections: Mapping[str, Selecting]
) -> Workload:
    """Return what the slowest rank of a case computes, its selections included.

    Parameters
    ----------
    case : Case
        What identifies a measured iteration: its network, plan, link and so on.
    workloads : mapping of str to Workload
        Workloads by the hash of their layer profile.
    selections : mapping of str to Selecting
        Selection times by their hash.

    Returns
    -------
    Workload
        The profiled workload, slowed down and accumulated as the case says.

    Raises
    ------
    UserError
        If the layer profile or, for a sparse case, the selection times are missing.
    """
    if case.profile_sha256 not in workloads:
        profile = case.profile_sha256[:12]
        raise UserError(
            f"case {case.key}: its layer profile {profile} is missing: "
            "add the recording that has it"
        )
    # The slowest rank decides, because messages wait for all ranks. The dilation multiplies the
    # compute times of all ranks, and the straggler's factor those of one rank as well.
    slowest_factor = case.dilation * case.straggler
    profiled = workloads[case.profile_sha256]
    workload = profiled.scaled(slowest_factor).accumulated(case.accumulate)
    if not case.sparse:
        return workload

    plan = plan_of(case)
    selecting = _selecting_of_case(case, selections)
    # The time to select the sent share of the elements of each group of gradients.
    selection_s = selecting(elements_of(plan.group_bytes(workload)), case.density)
    # The workload is slowed down already, but these times are not.
    return with_selection(workload, plan, slowest_factor * selection_s)


def _selecting_of_case(case: Case, selections: Mapping[str, Selecting]) -> Selecting:
    """Return the selection times of a sparse case, or raise UserError if they are missing.

    ``selections`` has selection times by their hash. A case of a replay, which sleeps for
    recorded times where real training selects elements, has the hash of these times. A case of
    real training has the empty hash. If it is known how long real training takes to select,
    ``selections`` has these times under the empty hash.
    """
    if case.selection_sha256 in selections:
        return selections[case.selection_sha256]
    times = case.selection_sha256[:12] or "of real training"
    raise UserError(
        f"case {case.key}: the selection times {times} are missing: "
        "add the recording that has them"
    )


# -- plans where compute is real -------------------------------------------------------


def plan_with_contention(
    spec: str, workload: Workload, communication: Communication
) -> FusionPlan:
    """Return the plan with a given name, if messages and compute may slow each other down.

    Parameters
    ----------
    spec : str
        A plan as `ddlkit.core.plan.make_plan` takes it, or "search".
    workload : Workload
        What one iteration computes.
    communication : Communication
        What is known of the messages.

    Returns
    -------
    FusionPlan
        For "search", the best plan that was found. If there is no contention, and the link
        sends one message after the other, each in the time that it costs, this is ``exact``,
        the best of all plans. With a contention or over another link, the search makes local
        moves from the best of some plans: ``exact``, PyTorch's default, and, with a
        contention, the plan of `ddlkit.core.resources.jointly`, which takes slowdowns into
        account. Any other plan is made as if there were no contention.

    Raises
    ------
    UserError
        If no planner has this name.
    """
    if spec == SEARCH:
        return _searched_plan(workload, communication)
    name, _, _ = spec.partition(":")
    # Other plans can have a parameter behind a colon, and "search" has none.
    if name == SEARCH:
        raise UserError(f"plan {shown(spec)}: write {SEARCH} alone")
    # The error also lists "search", which is no planner of `make_plan`.
    refuse_unknown_plan(name, SEARCH)
    return make_plan(spec, workload, communication.cost)


def _searched_plan(workload: Workload, communication: Communication) -> FusionPlan:
    """Return the best plan that a search finds, allowing for contention where it is known.

    The search makes local moves from the best of some plans.
    """
    cost = communication.cost
    contention = communication.contention
    exact = make_plan("exact", workload, cost)
    # Over a plain link, messages are sent one after the other, each in the time that it
    # costs. Without contention, ``exact`` is then the best of all plans.
    if contention is None and communication.link.plain:
        return exact

    starts = [exact, make_plan("ddp", workload)]
    # Of the plans to start from, only this one takes slowdowns into account.
    if contention is not None:
        starts.append(_plan_with_one_slowdown(workload, cost, contention))

    def iteration_s(plan: FusionPlan) -> float:
        """Return the predicted time of an iteration, with contention if it is known."""
        iteration = Iteration(workload, plan, cost, communication.link)
        if contention is not None:
            iteration = with_contention(iteration, contention)
        return iteration.prediction.iteration_s

    best_start = min(starts, key=iteration_s)
    # `improved` adds, removes or moves ends of messages as long as that shortens the
    # iteration.
    return FusionPlan(SEARCH, improved(best_start, iteration_s).ends)


def _plan_with_one_slowdown(
    workload: Workload, cost: MessageCost, contention: Contention
) -> FusionPlan:
    """Return the best plan if messages of all sizes had the same slowdowns.

    `jointly` tries all plans, but can take no slowdowns into account that depend on the size
    of a message. Those of a message with the median size of a gradient stand for all, which
    is a choice, not measured.
    """
    median_bytes = float(np.median(workload.bytes))
    # The slowdowns of compute and of messages for this one size, shape (2, 1).
    slowdowns = contention.of_messages([median_bytes])
    slowdown, message_slowdown = slowdowns[:, 0].tolist()
    # The only resources among which `jointly` can choose for a message.
    typical = Resources(
        "all", cost, slowdown=slowdown, message_slowdown=message_slowdown
    )
    return jointly(workload, [typical]).plan
