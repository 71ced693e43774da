"""Will a training scale to more nodes: from measured steps to a prediction with a verdict.

The laws are in `ddlkit.core.scaling`. This module decides which measurements a law is applied to,
refuses those that it cannot be applied to, and says what explains the loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ddlkit.core import scaling, units
from ddlkit.core.errors import Finding, UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import ddp
from ddlkit.core.workload import Workload
from ddlkit.model.node_costs import NodeCosts, facts_of, slowed
from ddlkit.model.scaling_tables import (
    checked_kernel_steps,
    checked_kernels,
    checked_nodes,
    checked_steps,
    checked_times,
    checked_wish,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pandas import DataFrame

HIDDEN = "hidden"
"""The verdict on one node, whose messages no other traffic slows down."""
HIDDEN_EVEN_ON_A_BAD_DAY = "hidden even on a bad day"
HIDDEN_ONLY_ON_A_QUIET_FABRIC = "hidden only on a quiet fabric"
COMMUNICATION_BOUND = "communication-bound"
NOT_KNOWN = "not known"

HIDDEN_SHARE = 0.05
"""Messages count as hidden if they lengthen a step by no more than this share of it."""
LEAST_SCATTER = 0.02
"""Jobs count as different only if their steps differ by more than this share."""
LEAST_WEAK_STEP = 0.8
"""With as many samples per GPU, no step is shorter than this share of one on fewer GPUs."""
MOST_TIMES_OTHER_STEP = 100.0
"""Of jobs whose steps differ by more than this factor, one has another unit than seconds."""
LITTLE_OF_LOSS = 0.1
"""If messages explain less than this share of the lost time, a faster network does not help."""
HALF_OF_LOSS = 0.5
"""Messages that explain less than this share of the lost time are not its main cause."""
SINGLE_JOB_SHARE = 0.03
"""A measured step may differ in another job by this share, if only one job measured it."""
LAST_FIRST_STEP = 1
"""Steps are numbered from 0 or from this number on. Recordings that begin later have no launch."""
WARM_UP_STEPS = 5
"""Among so many first steps of a training, slow ones are warm-up, such as compilation."""
SLOW_TIMES = 2.0
"""A single step is slow if it takes longer than this many times the usual step of its job."""
DIGITS_OF_CHANCE = 4
"""The times of two jobs may be equal by chance if they have no more digits than these."""
LARGEST_BUCKET_BYTES = 25 * units.MIB
"""The cap of PyTorch's buckets, which is taken if nothing is known of the gradients."""
SHOWN_SIZES = tuple(2**power for power in range(20, 27))
"""The sizes of messages whose predicted times a result lists: 1 to 64 MiB."""

EVIDENCE = (
    "how far to trust this: steps of 10 published trainings, which this prediction had not seen, were "
    "predicted at 2 to 8 times the nodes. The median error was 2.7%. It was 4.7% for the assumption that "
    "more nodes do not lengthen a step. The nominal 90% interval contained 85% of these steps, and fewer "
    "where a network was saturated"
)
"""What is known of the errors of a prediction, for those who see one."""
EVIDENCE_BETWEEN = (
    "how far to trust this: the step should lie between those measured on fewer and on more nodes, "
    "because more nodes do not shorten a step. Of 1,027 steps of published trainings that were left out "
    "and interpolated, 84% lay in such an interval. The median error was 8%"
)
"""What is known of the errors of an interpolated step, for those who see one."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Count:
    """A step on some number of GPUs, measured or predicted.

    Attributes
    ----------
    gpus, nodes : int
        The numbers of GPUs and of nodes.
    step_s : float
        The step in seconds: the median over jobs of a job's mean step, or the prediction.
    interval_s : pair of float or None
        If the step was measured, the steps of the fastest and the slowest job, or None if there was
        one job. Otherwise the nominal 90% interval of the prediction.
    scaling_factor : float
        The step on the smallest measured count, divided by this one.
    scaling_factor_interval : pair of float or None
        The scaling factors of the slowest and the fastest step in ``interval_s``.
    measured : bool
        Whether the step was measured.
    jobs : int
        How many jobs measured it. 0 if it was not measured.
    interpolated : bool
        Whether the step was not measured, but counts with fewer and with more nodes were.
    only_messages_step_s, only_messages_bad_day_s : float or None
        The step if nothing but messages lengthened it, on a quiet and on a bad day. None if their
        costs or the gradients are not known.
    """

    gpus: int
    nodes: int
    step_s: float
    interval_s: Interval | None
    scaling_factor: float
    scaling_factor_interval: Interval | None
    measured: bool
    jobs: int = 0
    only_messages_step_s: float | None = None
    only_messages_bad_day_s: float | None = None
    interpolated: bool = False

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs on each node, which must be the same on all."""
        return self.gpus // self.nodes

    @property
    def range_s(self) -> Interval:
        """Return the steps of the fastest and the slowest job on a measured count, in seconds."""
        return self.interval_s or (self.step_s, self.step_s)


@dataclass(frozen=True)
class HeldOut:
    """The largest measured count, predicted from the smaller ones.

    Attributes
    ----------
    gpus, nodes : int
        The numbers of GPUs and of nodes.
    measured_s, predicted_s : float
        The step in seconds.
    relative_error : float
        The error of the prediction, relative to the measured step.
    """

    gpus: int
    nodes: int
    measured_s: float
    predicted_s: float
    relative_error: float


@dataclass(frozen=True)
class Explained:
    """What lengthens the step on the largest measured count.

    Attributes
    ----------
    gpus, nodes : int
        The numbers of GPUs and of nodes.
    loss_s : float
        How much longer the step is than on the smallest count, in seconds. 0 if it is not longer.
    messages_s : float or None
        How much of the loss messages explain on a quiet network, in seconds. None if it is not
        known.
    messages_at_most_s : float or None
        How much messages explain at most: the time of NCCL's kernels in a step if that was
        measured, or else the time that messages add to a step on a bad day. None if neither is
        known.
    kernels_s : float or None
        The measured time of NCCL's kernels in a step, in seconds. None without sums of kernels.
    scatter_s : float or None
        How much of the loss the scatter of single ranks would explain at most. If every rank drew
        its step from the single steps of the smallest count, the slowest of all ranks would
        take longer than the mean by this time. If that count has several GPUs, they draw one
        step together. ``scatter_s`` is at most ``loss_s``. None without single steps.
    unexplained_s : float
        The loss that neither messages at most nor scatter explain: waiting, or input.
    """

    gpus: int
    nodes: int
    loss_s: float
    messages_s: float | None
    messages_at_most_s: float | None
    kernels_s: float | None
    scatter_s: float | None
    unexplained_s: float


@dataclass(frozen=True)
class Wish:
    """Whether a wished scaling factor is met on the largest predicted count.

    Attributes
    ----------
    factor : float
        The wished factor.
    nodes : int
        The number of nodes.
    answer : str
        "yes" if the whole likely range of the scaling factor is at or above the wished factor, "no"
        if the whole range is below, or else "open". The range follows from the likely steps of this
        count and of the smallest one. More nodes do not shorten a step, so the nearest measured
        counts with fewer and with more nodes limit a predicted step. The
        answer is "open", too, if a step that decides it has to be repeated.
    reason : str
        Why this is the answer, in words.
    likely_factor_interval : pair of float or None
        The lowest and the highest likely scaling factor. None if a step that decides the answer
        has to be repeated.
    """

    factor: float
    nodes: int
    answer: str
    reason: str
    likely_factor_interval: Interval | None


@dataclass(frozen=True)
class MessageTime:
    """The time of a collective on the largest count of a result.

    Attributes
    ----------
    collective : str
        The name of the collective.
    nodes, gpus : int
        The numbers of nodes and of GPUs.
    bytes : int
        The size.
    seconds, bad_day_s : float
        The time on a quiet and on a bad day.
    """

    collective: str
    nodes: int
    gpus: int
    bytes: int
    seconds: float
    bad_day_s: float


@dataclass(frozen=True)
class Scaling:
    """How a training scales, as `scale` returns it.

    Attributes
    ----------
    counts : tuple of Count
        All measured and predicted counts, in the order of their GPUs and nodes.
    held_out : HeldOut or None
        The largest measured count, predicted from the others. None if it is the only one of
        several nodes.
    explained : Explained
        What lengthens the step on the largest measured count.
    verdict_on_messages : str
        Whether messages alone are hidden on the count that was asked for: "hidden even on a bad
        day", "hidden only on a quiet fabric", "communication-bound" or "not known". On one node,
        which has no bad day, hidden messages are only "hidden".
    wish : Wish or None
        Whether the wished factor is met.
    findings : tuple of Finding
        What the user should know of the measurements, what would help, and what to measure.
    collectives : tuple of MessageTime
        Times of messages on the largest count.
    asked_nodes : int
        The largest number of nodes that was asked for, which ``verdict_on_messages`` and ``wish``
        are about.
    interval_level : float
        The share of steps that the interval of a predicted step should contain.
    """

    counts: tuple[Count, ...]
    held_out: HeldOut | None
    explained: Explained
    verdict_on_messages: str
    wish: Wish | None
    findings: tuple[Finding, ...]
    collectives: tuple[MessageTime, ...]
    asked_nodes: int
    interval_level: float = scaling.NOMINAL

    @property
    def smallest(self) -> Count:
        """Return the smallest measured count, from which a loss is counted."""
        return _smallest(self._measured)

    @property
    def anchor(self) -> Count:
        """Return the measured count from which others are predicted."""
        return _anchor(self._measured)

    @property
    def slowest_s(self) -> float:
        """Return the slowest step that the anchor should not be faster than, in seconds."""
        return _slowest_s(self._measured, self.anchor)

    @property
    def anchor_jobs_s(self) -> Interval:
        """Return the steps of the fastest and the slowest job that the anchor may have, in seconds.

        If one job alone measured the anchor, jobs scatter there as on the other counts.
        """
        return _jobs_s(self.anchor, _scatter_of_jobs(self._measured))

    @property
    def _measured(self) -> list[Count]:
        return [count for count in self.counts if count.measured]

    @property
    def target(self) -> Count:
        """Return the largest count."""
        return self.counts[-1]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values that JSON can express.

        Returns
        -------
        dict
            An entry for each attribute.
        """
        result = asdict(self)
        # `asdict` keeps a finding as a tuple, which JSON would write without its names.
        result["findings"] = [finding._asdict() for finding in self.findings]
        return result


@dataclass(frozen=True)
class _Jobs:
    """The mean steps of the jobs of one count, and the single steps if they are known."""

    gpus: int
    nodes: int
    means_s: tuple[float, ...]
    steps_s: tuple[float, ...]

    @cached_property
    def step_s(self) -> float:
        return float(np.median(self.means_s))

    @property
    def scatter(self) -> float:
        """Return half the range of the jobs, as a share of their median."""
        return (max(self.means_s) - min(self.means_s)) / 2 / self.step_s


def scale(
    steps: DataFrame,
    nodes: int | Sequence[int],
    *,
    workload: Workload | None = None,
    collectives: DataFrame | None = None,
    kernels: DataFrame | None = None,
    kernel_steps: int = 1,
    wish: float | None = None,
) -> Scaling:
    """Predict the step of a data-parallel training on more nodes.

    Parameters
    ----------
    steps : DataFrame
        Measured steps with the columns ``gpus``, ``nodes``, ``job`` and ``step_s``, and perhaps
        ``step``, ``samples``, ``nccl`` and ``settings``, as `ddlkit.read_steps` returns them. A job
        is one run of the training.
    nodes : int or sequence of int
        The numbers of nodes to predict for. Each node has as many GPUs as a node of the largest
        measured count. A count is a number of GPUs on a number of nodes.
    workload : Workload, optional
        The gradients of the network, for the time of messages alone. Its compute is scaled to
        the measured step.
    collectives : DataFrame, optional
        Measured collectives with the columns of `ddlkit.formats.node_tables.COLUMNS`.
    kernels : DataFrame, optional
        Sums of kernels on the largest measured count, as
        `ddlkit.formats.kernel_sums.read_kernel_sums` returns them.
    kernel_steps : int, optional
        In how many steps these kernels ran.
    wish : float, optional
        A wished scaling factor on the largest number of nodes, above 0 and below 1.

    Returns
    -------
    Scaling
        Measured and predicted steps with all that explains them.

    Raises
    ------
    UserError
        If the measurements do not allow the prediction. The error says what to measure.

    Notes
    -----
    The prediction is `ddlkit.core.scaling.step_s`, from the smallest count on one node and the
    anchor, the count on several nodes with the most GPUs. A count below the anchor that was not
    measured is interpolated between its measured neighbours.

    If rows are single steps, the first step of each job is left out, because it includes the launch
    of the training. It is kept if its number says that the recording began later. Slow steps soon
    after the launch are left out as well.

    Examples
    --------
    >>> import pandas as pd
    >>> steps = pd.DataFrame(
    ...     {
    ...         "gpus": [1, 4, 16],
    ...         "nodes": [1, 1, 4],
    ...         "job": ["a", "b", "c"],
    ...         "step_s": [1.0, 1.02, 1.1],
    ...     }
    ... )
    >>> result = scale(steps, 16, wish=0.6)
    >>> round(result.target.scaling_factor, 3), result.wish.answer
    (0.839, 'yes')
    """
    targets = checked_nodes(nodes)
    wished_factor = checked_wish(wish)
    kernel_steps = checked_kernel_steps(kernel_steps)
    steps = checked_steps(steps)
    if collectives is not None:
        collectives = checked_times(collectives)
    if kernels is not None:
        kernels = checked_kernels(kernels)
    findings: list[Finding] = []
    # `_jobs_of` adds to the findings which steps it leaves out, and which jobs may be copies.
    jobs = _jobs_of(steps, findings)
    measured = _measured_counts(jobs)
    _refuse_unpredictable(measured, targets)
    # Steps are predicted from these two counts, which `_with_predictions` finds in ``measured`` for
    # itself. Here they are needed for findings, and for what explains the lost time.
    smallest = _smallest(measured)
    anchor = _anchor(measured)
    # Counts that are slower than larger ones by more than jobs scatter: to be measured again.
    doubts = _doubts(jobs)
    findings += [_repeat(doubt) for doubt in doubts]
    # Functions whose names begin with ``_on`` return what the user should know, if anything.
    findings += _on_fixed_batch(measured, doubts, has_samples="samples" in steps)
    findings += _on_gpus_per_node(measured, anchor)
    findings += _on_software(steps, collectives)

    counts = _with_predictions(measured, targets)
    costs = None
    if collectives is not None:
        most_nodes = max(count.nodes for count in counts)
        costs = _costs_of(collectives, anchor.gpus_per_node, most_nodes, workload)
        findings += _on_tables(costs, workload)
        # If the gradients are known, tables that end below their largest message are continued.
        if workload is not None:
            costs = costs.continued_to(_largest_bucket_bytes(workload))
    # Counts also get the steps that they would have if nothing but messages lengthened them.
    counts = [_with_messages(count, smallest, workload, costs) for count in counts]
    findings += _on_messages_that_do_not_fit(counts, _scatter_of_jobs(measured))
    # What follows needs these steps of the anchor, which only the new object of this count has.
    anchor = _anchor([count for count in counts if count.measured])

    # The time of NCCL's kernels in a step. Warnings about it, and how it compares with the tables,
    # are added to the findings.
    kernels_s = _kernels_s(kernels, kernel_steps, anchor, findings)
    explained = _explained(jobs, smallest, anchor, kernels_s)
    asked = _largest_asked(counts, targets, anchor.gpus_per_node)
    findings += _on_factors_above_one(counts)
    findings += _on_factors_of_fewer_nodes(asked, measured)
    if explained.messages_at_most_s is None:
        missing = _missing_for_messages(costs, workload)
        findings.append(Finding("messages", text=missing))
    findings += _advice(explained, measured, asked)
    return Scaling(
        counts=tuple(counts),
        held_out=_held_out(measured),
        explained=explained,
        verdict_on_messages=_verdict_on_messages(asked),
        wish=_wish(wished_factor, asked, measured, doubts),
        findings=tuple(findings),
        collectives=_message_times(costs, asked),
        asked_nodes=asked.nodes,
    )


# -- what is measured ----------------------------------------------------------------


_JOB = ("nodes", "gpus", "job")
"""The columns that distinguish jobs."""


def _jobs_of(steps: DataFrame, findings: list[Finding]) -> list[_Jobs]:
    """Return the jobs of each measured pair of GPUs and nodes, in the order of these numbers.

    A job is one run of the training. ``steps`` has been checked by `checked_steps`. What was left
    out of it, and which jobs may be copies, is added to ``findings``.
    """
    # The samples are compared before repeats are merged, which drops the column of samples.
    steps = _of_equal_samples(steps, findings)
    # The rows that several ranks have of one step become one row.
    steps = _without_repeats(steps)
    steps = _sorted_by_job(steps)
    # The launch is the slow first step of a job. The new column ``is_one_step`` tells rows of
    # single steps from mean steps of a job.
    steps = _without_launches(steps, findings)
    all_jobs = _each_job(steps)
    # Of two jobs with the same times to the last digit, one is probably a copy. A job whose times
    # are far from all others probably has another unit than seconds, such as ms.
    _refuse_copies(all_jobs, findings)
    _refuse_other_unit(all_jobs)
    # All jobs with the same numbers of GPUs and nodes are put together.
    by_count: dict[tuple[int, int], list[_Job]] = {}
    for job in all_jobs:
        by_count.setdefault((job.gpus, job.nodes), []).append(job)
    counts = []
    for (gpus, nodes), jobs_of_count in sorted(by_count.items()):
        means_s = tuple(job.mean_s for job in jobs_of_count)
        # A job with only one row has its mean step there, and no single steps.
        single_s = [job.steps_s for job in jobs_of_count if job.has_single_steps]
        counts.append(_Jobs(gpus, nodes, means_s, tuple(chain.from_iterable(single_s))))
    return counts


@dataclass(frozen=True)
class _Job:
    """One job, with the rows that are kept of it and their mean."""

    gpus: int
    nodes: int
    name: str
    mean_s: float
    steps_s: tuple[float, ...]
    has_single_steps: bool
    """Whether each row is one step of the job. Otherwise the only row is the job's mean step."""


def _each_job(steps: DataFrame) -> list[_Job]:
    """Return each job of ``steps``, in their order.

    A job is one run of the training. ``steps`` are sorted by `_sorted_by_job`. Their column
    ``job_number`` counts the jobs. The column ``is_one_step`` says whether a row is one of several
    steps of its job, or else the mean step of the job, which is then its only row.
    """
    job_number = steps["job_number"].to_numpy()
    step_s = steps["step_s"].to_numpy()
    # The index of the first row of each job.
    _, first_rows = np.unique(job_number, return_index=True)
    if len(first_rows) == len(steps):
        # Every job has one row, whose mean is the row itself and need not be computed.
        means_s = step_s
    else:
        means_s = steps["step_s"].groupby(job_number).mean().to_numpy()
    gpus = steps["gpus"].to_numpy()
    nodes = steps["nodes"].to_numpy()
    names = steps["job"].to_numpy()
    is_one_step = steps["is_one_step"].to_numpy()
    # The rows of a job stand together: they end where those of the next job begin.
    end_rows = [*first_rows[1:], len(steps)]
    jobs = []
    for first, end, mean_s in zip(first_rows, end_rows, means_s, strict=True):
        job = _Job(
            gpus=int(gpus[first]),
            nodes=int(nodes[first]),
            name=names[first],
            mean_s=float(mean_s),
            steps_s=tuple(step_s[first:end].tolist()),
            has_single_steps=bool(is_one_step[first]),
        )
        jobs.append(job)
    return jobs


def _sorted_by_job(steps: DataFrame) -> DataFrame:
    """Return the steps in the order of nodes, GPUs, jobs and the numbers of steps.

    A job is one run of the training. The rows of a job then stand together. The new column
    ``job_number`` counts the jobs in this order from 0. It takes the place of the columns nodes,
    gpus and job as the key of a job, because one number is compared faster than three columns.
    """
    import pandas as pd

    # The position of each job among the sorted names of jobs.
    job_order, _ = pd.factorize(steps["job"], sort=True)
    # `np.lexsort` sorts by the last key first: by nodes, then by GPUs, jobs and steps.
    keys = [job_order, steps["gpus"].to_numpy(), steps["nodes"].to_numpy()]
    if "step" in steps:
        keys.insert(0, steps["step"].to_numpy())
    # The sort is stable, so that the rows of a job keep the order of the file if there is no
    # column step.
    order = np.lexsort(keys)
    # Whether a row is of another job than the row before. The first row begins job 0.
    is_other_job = np.zeros(len(steps), bool)
    # Only the last three keys distinguish jobs, and a step's number, which comes first, does not.
    for key in keys[-3:]:
        is_other_job[1:] |= np.diff(key[order]) != 0
    return steps.iloc[order].assign(job_number=np.cumsum(is_other_job))


def _without_repeats(steps: DataFrame) -> DataFrame:
    """Return the steps with a single row for each step of each job.

    A table may have a row of each rank for one step. These rows have the same number in the
    column ``step``. Ranks wait for one another, so their times are nearly equal, and the mean is
    taken. Apart from the number and the time of a step, only the columns that distinguish jobs are
    kept. A table without the column ``step`` is returned unchanged.
    """
    if "step" not in steps:
        return steps
    return steps.groupby([*_JOB, "step"], as_index=False)["step_s"].mean()


def _without_launches(steps: DataFrame, findings: list[Finding]) -> DataFrame:
    """Return the steps without the launch and the warm-up of each job, in the order of the steps.

    The launch is the first step of a training, which takes longer than the others. ``steps`` are in
    the order of `_sorted_by_job`. The result has a new column ``is_one_step``, which says whether a
    row is one step of a job that has several rows. The only row of a job is taken as its mean step,
    unless the column ``step`` numbers it as a launch, which is then left out. What was left out is
    added to ``findings``. Raises UserError if nothing but launches is given on some number of GPUs.
    """
    job_number = steps["job_number"].to_numpy()
    # The index of the first row of each job, and how many rows it has.
    _, first_row, n_rows = np.unique(job_number, return_index=True, return_counts=True)
    # Every job still has rows here, so that its number is its index in these arrays.
    first_row_of_job = first_row[job_number]
    is_one_step = n_rows[job_number] > 1
    steps = steps.assign(is_one_step=is_one_step)
    # Of each row, whether its job begins with the launch. Without numbers of steps, each job of
    # several steps is taken to do so.
    begins_with_launch = is_one_step
    if "step" in steps:
        numbers = steps["step"].to_numpy()
        begins_with_launch = _begins_with_launch(
            numbers, numbers[first_row_of_job], is_one_step
        )
    # The position of a row among the rows of its job, from 0.
    position = np.arange(len(steps)) - first_row_of_job
    is_launch = begins_with_launch & (position == 0)
    if is_launch.all():
        raise UserError(
            "each job has its first step alone, which includes the launch: give further steps, or "
            "leave out the column step if a row is the mean step of a job"
        )
    _refuse_launches_alone(steps, is_launch)
    if is_launch.any():
        text = (
            f"the first step of {_counted(int(is_launch.sum()), 'job')} with single steps is left out, "
            "because it includes the launch"
        )
        findings.append(Finding("launch", text=text))
    # Slow steps soon after the launch are warm-up, and are left out as well.
    is_early = begins_with_launch & (position < WARM_UP_STEPS)
    return _without_warm_up(steps[~is_launch], is_early[~is_launch], findings)


def _refuse_launches_alone(steps: DataFrame, is_launch: NDArray[np.bool_]) -> None:
    """Raise UserError if some number of GPUs has nothing but launches, which are left out.

    The user has measured these GPUs, and would otherwise miss them without a word. ``is_launch``
    says of each row of ``steps`` whether it is the launch of a job.
    """
    counts = steps[["gpus", "nodes"]].assign(is_launch=is_launch)
    has_launches_alone = counts.groupby(["gpus", "nodes"])["is_launch"].all()
    if not has_launches_alone.any():
        return
    # idxmax returns the first such pair of GPUs and nodes.
    gpus, nodes = has_launches_alone.idxmax()
    raise UserError(
        f"{_gpus(gpus)} on {_nodes(nodes)}: each job has its first step alone, which includes the "
        "launch: give further steps, or leave out the column step if a row is the mean step of a job"
    )


def _begins_with_launch(
    numbers: NDArray[np.int64],
    first_of_job: NDArray[np.int64],
    is_one_step: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Return of each row whether its job begins with the launch, from the numbers of the steps.

    The launch is the first step of a training, and a job is one run of the training. All arrays
    have an entry for each row of the table.

    Parameters
    ----------
    numbers : ndarray, shape (n,)
        The number of the step.
    first_of_job : ndarray, shape (n,)
        The number of the first step that the table has of the row's job.
    is_one_step : ndarray, shape (n,)
        True if the job has several rows, each of which is a single step. False if the row is the
        job's only one, which may be the mean step of the job.

    Returns
    -------
    ndarray, shape (n,)
        Whether the first row of the row's job is a launch.
    """
    first_in_table = numbers.min()
    if first_in_table > LAST_FIRST_STEP:
        # The first step has the number 0 or 1, so the recordings began after the launch.
        return np.zeros(len(numbers), bool)
    # Steps may be numbered from 0 or from 1. The lowest number in the table says from which.
    has_first_step = first_of_job == first_in_table
    # The first step of such a job is its launch, if the job has several rows, or if this step has
    # the number 0. The only row of a job counts as no launch if it has the number 1, because the
    # user may have left out a launch of the number 0.
    return has_first_step & (is_one_step | (first_in_table == 0))


def _without_warm_up(
    steps: DataFrame, is_early: NDArray[np.bool_], findings: list[Finding]
) -> DataFrame:
    """Return the steps without slow ones soon after the launch, such as a compilation.

    A job is one run of the training. A step is slow if it is much longer than the usual step of its
    job. ``is_early`` says of each row whether it is one of the first steps of its job. Slow steps
    that are not early are kept, because they may be part of every training. How many slow steps
    were left out and how many were kept is added to ``findings``.
    """
    is_slow = steps["step_s"].to_numpy() > SLOW_TIMES * _usual_step_s(steps)
    is_warm_up = is_slow & is_early
    n_warm_up = int(is_warm_up.sum())
    if n_warm_up:
        verb = "is" if n_warm_up == 1 else "are"
        text = (
            f"{_counted(n_warm_up, 'step')} among the first {WARM_UP_STEPS} of a job {verb} left "
            f"out as warm-up, because they take more than {SLOW_TIMES:g} times its usual step"
        )
        findings.append(Finding("launch", text=text))
    n_slow = int((is_slow & ~is_early).sum())
    if n_slow:
        verb = "takes" if n_slow == 1 else "take"
        text = (
            f"{_counted(n_slow, 'later step')} {verb} more than {SLOW_TIMES:g} times the usual "
            "step of the job. The mean step of a job includes such steps"
        )
        findings.append(Finding("launch", text=text))
    return steps[~is_warm_up]


def _usual_step_s(steps: DataFrame) -> NDArray[np.float64]:
    """Return for each row of ``steps`` the usual step of its job, shape (n,), in seconds.

    A job is one run of the training, which the column ``job_number`` tells from the others. Its
    usual step is the median of its rows. If their number is even, the lower one of the two rows in
    the middle counts, so that of two steps the shorter one is the usual one.
    """
    step_s = steps["step_s"].to_numpy()
    # For each row the index of its job, and for each job how many rows it has.
    _, job, n_rows = np.unique(
        steps["job_number"].to_numpy(), return_inverse=True, return_counts=True
    )
    # The times of each job stand together, from the shortest to the longest: `np.lexsort` sorts
    # by its last key first.
    sorted_s = step_s[np.lexsort((step_s, job))]
    # The index in ``sorted_s`` at which the times of each job begin.
    first = np.cumsum(n_rows) - n_rows
    usual_of_job_s = sorted_s[first + (n_rows - 1) // 2]
    usual_s: NDArray[np.float64] = usual_of_job_s[job]
    return usual_s


def _of_equal_samples(steps: DataFrame, findings: list[Finding]) -> DataFrame:
    """Return the steps in which each GPU computes the most frequent number of samples.

    The column ``samples`` has the samples of one GPU if it is the same on all measured numbers of
    GPUs and nodes, and those of all GPUs if it grows in proportion to the GPUs. UserError is raised
    if neither is so. How the column was understood, and what was left out, is added to
    ``findings``. Without the column, all steps are returned.
    """
    if "samples" not in steps:
        findings.append(
            Finding("samples", text="samples per GPU: not known, taken as equal")
        )
        return steps
    # The samples of one GPU in each step, and in words how the column was understood.
    samples, understood = _samples_per_gpu(steps)
    findings.append(Finding("samples", text=understood))
    # The most frequent number of samples on each number of GPUs and nodes. `_samples_per_gpu`
    # raises UserError unless it is the same on all of them, so the first one stands for all.
    usual_samples = _usual_samples(steps, samples)
    is_usual = samples == usual_samples.iloc[0]
    n_unusual = int((~is_usual).sum())
    if n_unusual:
        verb = "is" if n_unusual == 1 else "are"
        text = f"{_counted(n_unusual, 'step')} with another number of samples {verb} left out"
        findings.append(Finding("samples", text=text))
    return steps[is_usual]


def _samples_per_gpu(steps: DataFrame) -> tuple[Any, str]:
    """Return the samples of one GPU in each step, and how they were understood, in words.

    Raises UserError if the column ``samples`` can be neither the samples of one GPU nor those of
    all GPUs.
    """
    samples = steps["samples"]
    # The most frequent number of samples on each measured number of GPUs and nodes, so that a
    # few odd steps do not matter.
    usual = _usual_samples(steps, samples)
    # If there is only one distinct number, it is the same everywhere.
    if usual.nunique() == 1:
        return samples, (
            "the column samples is taken as the samples of one GPU, because it is the same on "
            "all numbers of GPUs"
        )
    samples_per_gpu = samples / steps["gpus"]
    if _usual_samples(steps, samples_per_gpu).nunique() == 1:
        return samples_per_gpu, (
            "the column samples is taken as the samples of all GPUs, because it grows in "
            "proportion to the GPUs"
        )
    _raise_unlike_samples(usual)


def _raise_unlike_samples(usual: Any) -> NoReturn:
    """Raise UserError, because samples are neither the same everywhere nor in proportion.

    ``usual`` is a series of the most frequent numbers of samples. Its index has pairs of GPUs and
    nodes. The error names the GPUs that have the fewest and the most samples per GPU.
    """
    per_gpu = usual / usual.index.get_level_values("gpus")
    gpus_of_least, _ = per_gpu.idxmin()
    gpus_of_most, _ = per_gpu.idxmax()
    raise UserError(
        "the column samples is neither the same everywhere nor in proportion to the GPUs "
        f"(divided by the number of GPUs, it is {per_gpu.min():g} on {_gpus(gpus_of_least)} and "
        f"{per_gpu.max():g} on {_gpus(gpus_of_most)}): correct it, or measure all steps with the "
        "same number of samples per GPU"
    )


def _usual_samples(steps: DataFrame, samples: Any) -> Any:
    """Return the most frequent of ``samples`` on each measured number of GPUs and nodes.

    ``samples`` is a series with the number of training samples of each row of ``steps``, either of
    one GPU or of all GPUs. The result is a series whose index has pairs of GPUs and nodes. Of
    several numbers of samples that are equally frequent, the largest one counts.
    """
    by_count = samples.groupby([steps["gpus"], steps["nodes"]])
    # `mode` has all numbers that are equally frequent, in ascending order.
    return by_count.agg(lambda values: values.mode().iloc[-1])


def _refuse_copies(jobs: Sequence[_Job], findings: list[Finding]) -> None:
    """Raise UserError if two jobs have the same times to the last digit.

    A job is one run of the training. Times of few digits may be equal by chance. For two jobs on
    the same number of GPUs with such times, a warning is added to ``findings``.
    """
    # The first job with each sequence of times.
    seen: dict[tuple[float, ...], _Job] = {}
    for job in jobs:
        # A copy can stand under another number of GPUs, so all jobs are compared.
        first = seen.setdefault(job.steps_s, job)
        if first is job:
            continue
        on_first = "" if job.gpus == first.gpus else f" on {_gpus(first.gpus)}"
        problem = f"the jobs {first.name}{on_first} and {job.name} on {_gpus(job.gpus)} have equal times"
        # The more digits agree, the less likely is chance. Times that repeat within a job add
        # nothing, so each counts once.
        n_digits = sum(_digits(time_s) for time_s in set(job.steps_s))
        if n_digits > DIGITS_OF_CHANCE:
            raise UserError(
                f"{problem}, identical to the digit: one is a copy, so leave it out, or measure "
                "the job again"
            )
        # On different numbers of GPUs, rounded steps are often equal, and nothing is said.
        if job.gpus == first.gpus:
            findings.append(Finding("warning", text=f"{problem}: one may be a copy"))


def _refuse_other_unit(jobs: Sequence[_Job]) -> None:
    """Raise UserError if two jobs' times are so far apart that one must have another unit.

    A job is one run of the training. No training takes longer by such a factor on one number of
    GPUs than on another.
    """
    longest = max(jobs, key=_mean_s)
    shortest = min(jobs, key=_mean_s)
    if longest.mean_s <= MOST_TIMES_OTHER_STEP * shortest.mean_s:
        return
    raise UserError(
        f"the column step_s: a step of job {longest.name} on {_gpus(longest.gpus)} takes "
        f"{units.format_seconds(longest.mean_s)}, and of job {shortest.name} on "
        f"{_gpus(shortest.gpus)} {units.format_seconds(shortest.mean_s)}, over "
        f"{MOST_TIMES_OTHER_STEP:g} times apart: is one of them not in seconds? convert it"
    )


def _mean_s(job: _Job) -> float:
    """Return the mean step of a job, by which jobs are compared."""
    return job.mean_s


def _counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 node" and "8 GPUs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gpus(number: int) -> str:
    return _counted(number, "GPU")


def _nodes(number: int) -> str:
    return _counted(number, "node")


def _digits(seconds: float) -> int:
    """Return how many digits a time has, without zeros at its beginning and end."""
    # Format "e" always writes an exponent. It is cut off, as its digits are none of the time.
    mantissa, _, _ = f"{seconds:.14e}".partition("e")
    return len(mantissa.replace(".", "").strip("0"))


def _measured_counts(jobs: Sequence[_Jobs]) -> list[Count]:
    """Return each measured number of GPUs and nodes, with its step and scaling factor.

    A job is one run of the training. Each entry of ``jobs`` has all jobs on one number of GPUs and
    nodes. The entries are in ascending order of GPUs, and so is the result. A scaling factor is the
    step on the fewest GPUs of one node, divided by the step on the count.
    """
    on_one_node = [of_count for of_count in jobs if of_count.nodes == 1]
    # If no job ran on one node, the factors refer to the fewest GPUs of all. Nobody sees these
    # factors, because `_refuse_unpredictable` then refuses the steps.
    fewest_gpus = (on_one_node or jobs)[0]
    smallest_s = fewest_gpus.step_s
    counts = []
    for of_count in jobs:
        # A single job has no range.
        interval_s = None
        factors = None
        if len(of_count.means_s) > 1:
            fastest_s = min(of_count.means_s)
            slowest_s = max(of_count.means_s)
            interval_s = (fastest_s, slowest_s)
            # The slowest step has the lowest factor.
            factors = (smallest_s / slowest_s, smallest_s / fastest_s)
        counts.append(
            Count(
                gpus=of_count.gpus,
                nodes=of_count.nodes,
                step_s=of_count.step_s,
                interval_s=interval_s,
                scaling_factor=smallest_s / of_count.step_s,
                scaling_factor_interval=factors,
                measured=True,
                jobs=len(of_count.means_s),
            )
        )
    return counts


def _by_size(count: Count) -> tuple[int, int]:
    """Return the key by which counts are sorted: GPUs, and nodes for as many GPUs."""
    return (count.gpus, count.nodes)


def _smallest(measured: Sequence[Count]) -> Count:
    """Return the smallest count on one node. Scaling factors are relative to its step."""
    return min((count for count in measured if count.nodes == 1), key=_by_size)


def _anchor(measured: Sequence[Count]) -> Count:
    """Return the count on several nodes with the most GPUs, from which steps are predicted."""
    return max((count for count in measured if count.nodes > 1), key=_by_size)


def _slowest_s(measured: Sequence[Count], anchor: Count) -> float:
    """Return the slowest step that was measured on no more GPUs and nodes than the anchor has.

    The anchor is the count from which steps are predicted, and is itself among these counts. More
    GPUs on more nodes do not shorten a step. If fewer GPUs were slower than the anchor, one of the
    two measurements may be wrong. The anchor's true step is then perhaps as long as this slowest
    one, which the interval of a prediction allows for.
    """
    return max(
        count.step_s
        for count in measured
        if count.gpus <= anchor.gpus and count.nodes <= anchor.nodes
    )


def _scatter_of_jobs(measured: Sequence[Count]) -> float:
    """Return by how much the jobs of a count scatter, as a share of their median step.

    A count is a pair of numbers of GPUs and nodes, and a job is one run of the training. The step
    of each job is divided by the median step of its count. The result is half the range of these
    quotients over all counts, 0 if no count has several jobs.
    """
    # The median itself has the quotient 1, and a count with one job adds nothing but another 1.
    # For several jobs, the fastest and the slowest of them are enough.
    shares = [1.0]
    for count in measured:
        shares += [job_s / count.step_s for job_s in count.range_s]
    return (max(shares) - min(shares)) / 2


def _jobs_s(count: Count, scatter: float) -> Interval:
    """Return the shortest and the longest step that jobs on these GPUs may take, in seconds.

    A job is one run of the training. If several jobs measured the count, these are the steps of the
    fastest and the slowest of them. If one job or none did, another job may be slower or faster
    than ``count.step_s`` by the factor 1 + ``scatter``, where ``scatter`` is the share by which
    jobs differ on other numbers of GPUs.
    """
    if count.jobs > 1:
        return count.range_s
    return (count.step_s / (1 + scatter), count.step_s * (1 + scatter))


def _refuse_unpredictable(measured: Sequence[Count], targets: Sequence[int]) -> None:
    """Raise UserError unless the counts allow a prediction for all targets.

    ``measured`` has the measured counts of GPUs and nodes, in the order of GPUs.
    ``targets`` are the numbers of nodes to predict for, in ascending order.
    """
    _refuse_missing_counts(measured)
    # The count on several nodes with the most GPUs, from which steps are predicted.
    anchor = _anchor(measured)
    # Predicted nodes have as many GPUs as each node of the anchor.
    if anchor.gpus % anchor.nodes:
        raise UserError(
            f"the most GPUs with measured steps are {_gpus(anchor.gpus)} on {_nodes(anchor.nodes)}: "
            "measure with the same number of GPUs on each node"
        )
    smallest = _smallest(measured)
    # With equally many samples per GPU, no step on more GPUs is this much shorter.
    if anchor.step_s < LEAST_WEAK_STEP * smallest.step_s:
        # Equal samples in all steps may be those of a fixed batch, too, so that the column samples
        # does not rule it out.
        raise UserError(
            f"a step on {_gpus(anchor.gpus)} takes {units.format_seconds(anchor.step_s)}, clearly less "
            f"than {units.format_seconds(smallest.step_s)} on {_gpus(smallest.gpus)}, as with a "
            "fixed batch of all GPUs: measure all steps with the same number of samples per GPU, or "
            f"repeat the measurement on {_gpus(smallest.gpus)}"
        )
    most = scaling.MOST_TIMES * anchor.nodes
    if targets[-1] > most:
        needed = math.ceil(targets[-1] / scaling.MOST_TIMES)
        raise UserError(
            f"{targets[-1]} nodes are more than {scaling.MOST_TIMES:g} times the largest "
            f"measured number of nodes, {anchor.nodes}: ask for at most {most:g} nodes, or "
            f"measure steps on {needed} nodes or more"
        )


def _refuse_missing_counts(measured: Sequence[Count]) -> None:
    """Raise UserError unless steps were measured on one node and on several nodes.

    ``measured`` has the measured counts of GPUs and nodes, in the order of GPUs. A prediction
    extrapolates from a count on one node and a count on several nodes.
    """
    first = measured[0]
    if len(measured) == 1:
        verb = "was" if first.gpus == 1 else "were"
        missing = "one GPU or one node" if first.nodes > 1 else "two nodes or more"
        raise UserError(
            f"only {_gpus(first.gpus)} on {_nodes(first.nodes)} {verb} measured: measure "
            f"{missing} as well"
        )
    fewest_nodes = min(count.nodes for count in measured)
    if fewest_nodes > 1:
        # The loss is how much longer a step is than on one node. A step on several nodes has such a
        # loss itself, which would be missed if losses were counted from that step.
        raise UserError(
            f"all steps were measured on {_nodes(fewest_nodes)} or more: add steps measured on "
            "one GPU or one node"
        )
    if all(count.nodes == 1 for count in measured):
        # A prediction needs to know how a step grows with the nodes.
        raise UserError(
            f"all steps were measured on a single node, on up to {_gpus(measured[-1].gpus)}: add "
            "steps measured on two nodes or more"
        )


@dataclass(frozen=True)
class _Doubt:
    """Two numbers of GPUs, of which the smaller one is slower by more than jobs scatter."""

    slow: _Jobs
    faster: _Jobs


def _doubts(jobs: Sequence[_Jobs]) -> list[_Doubt]:
    """Return a doubt for each number of GPUs that is slower than a larger one by more than chance.

    With equally many samples per GPU, more GPUs on as many nodes or more do not shorten a step. So
    the longer step on fewer GPUs was probably disturbed. A difference must be larger than the
    scatter of the jobs on any number of GPUs. ``jobs`` has an entry for each measured number of
    GPUs and nodes, with the mean steps of its jobs.
    """
    scatter = max(LEAST_SCATTER, *(of_count.scatter for of_count in jobs))
    doubts = []
    for smaller in jobs:
        # More GPUs on fewer nodes may really be faster, because they use the network less. As many
        # GPUs on more nodes are not compared either, because they use the network more.
        larger = [
            other
            for other in jobs
            if other.gpus > smaller.gpus and other.nodes >= smaller.nodes
        ]
        if not larger:
            continue
        # The fastest of these decides, and is named in the warning.
        fastest = min(larger, key=lambda other: other.step_s)
        if smaller.step_s > fastest.step_s * (1 + scatter):
            doubts.append(_Doubt(slow=smaller, faster=fastest))
    return doubts


def _repeat(doubt: _Doubt) -> Finding:
    """Return the warning that the step of ``doubt.slow`` has to be measured again.

    It is slower than the step of ``doubt.faster``, which has more GPUs.
    """
    slow = doubt.slow
    faster = doubt.faster
    text = (
        f"a step on {_gpus(slow.gpus)} takes {units.format_seconds(slow.step_s)}, longer than on "
        f"{_gpus(faster.gpus)} ({units.format_seconds(faster.step_s)}) by more than jobs "
        f"scatter: repeat the measurement on {_gpus(slow.gpus)}"
    )
    return Finding("warning", text=text)


def _on_gpus_per_node(measured: Sequence[Count], anchor: Count) -> list[Finding]:
    """Return a finding if counts of GPUs and nodes differ in how many GPUs of a node they use.

    ``anchor`` is the count from which others are predicted. Fewer GPUs on a single node are no
    difference. The smallest count is such a part of a node, often one GPU, and the prediction is
    about how much longer a step is than on this count.
    """
    per_node = anchor.gpus_per_node
    # The counts with more or fewer GPUs on each node than the anchor has.
    differ = []
    for count in measured:
        is_alike = count.gpus == per_node * count.nodes
        is_part_of_node = count.nodes == 1 and count.gpus < per_node
        if not is_alike and not is_part_of_node:
            differ.append(count)
    if not differ:
        return []
    listed = ", ".join(
        f"{_gpus(count.gpus)} on {_nodes(count.nodes)}" for count in differ
    )
    text = (
        f"the prediction starts from the {_gpus(anchor.gpus)} on {_nodes(anchor.nodes)}, the most "
        f"GPUs on several nodes, and is for {_gpus(per_node)} on each node. Other numbers of GPUs "
        f"on a node: {listed}"
    )
    return [Finding("placement", text=text)]


def _on_software(steps: DataFrame, collectives: DataFrame | None) -> list[Finding]:
    """Return findings if versions of NCCL or settings are not stated and so cannot be compared.

    Raises UserError if the stated versions or settings differ among the steps, among the tables of
    collectives, or between steps and tables.
    """
    return [
        *_on_software_column("nccl", "version of NCCL", steps, collectives),
        *_on_software_column("settings", "settings", steps, collectives),
    ]


def _on_software_column(
    column: str, name: str, steps: DataFrame, collectives: DataFrame | None
) -> list[Finding]:
    """Return a finding if it is not known whether steps and tables have the same software.

    ``column`` states some part of the software, such as the version of NCCL, and ``name`` is what
    texts call it. The finding says that the steps or the tables of collectives do not state it.
    Without tables, there is nothing to compare. Raises UserError if the steps state several values,
    if the tables do, or if the steps state another value than the tables.
    """
    # Errors name the values as they are stated. They are compared without suffixes of versions.
    of_steps = facts_of(steps, column)
    distinct_in_steps = _comparable(of_steps, column)
    if len(distinct_in_steps) > 1:
        raise UserError(
            f"the column {column} has several values, {_listed(of_steps)}: measure all "
            f"steps with the same {name}"
        )
    if collectives is None:
        return []
    of_tables = facts_of(collectives, column)
    distinct_in_tables = _comparable(of_tables, column)
    if len(distinct_in_tables) > 1:
        raise UserError(
            f"the tables of collectives have several values of {column}, "
            f"{_listed(of_tables)}: measure all tables with the same {name}"
        )
    if not of_steps or not of_tables:
        text = f"whether tables and training have the same {name}: not known"
        return [Finding(column, text=text)]
    if distinct_in_steps != distinct_in_tables:
        raise UserError(
            f"the training ran with {column} {_listed(of_steps)}, and the tables were measured "
            f"with {column} {_listed(of_tables)}: measure the tables with the {name} of the "
            "training"
        )
    return []


def _comparable(values: set[Any], column: str) -> set[str]:
    """Return the values of a column about software in the form in which they are compared.

    A suffix of a version of NCCL, such as "+cuda12.3", makes no other version. Settings are any
    text, all of which is compared.
    """
    if column == "nccl":
        return {_version(value) for value in values}
    return {str(value) for value in values}


def _version(text: str) -> str:
    """Return a version without what follows its numbers, as in "2.19.3+cuda12.3"."""
    match = re.match(r"\s*v?(?P<numbers>\d+(?:\.\d+)+)", text)
    return match["numbers"] if match else text.strip()


def _listed(values: set[Any]) -> str:
    return ", ".join(sorted(map(str, values)))


# -- predictions ---------------------------------------------------------------------


def _with_predictions(measured: Sequence[Count], targets: Sequence[int]) -> list[Count]:
    """Return the measured counts and predicted ones, sorted by GPUs and then by nodes.

    A count is a number of GPUs on a number of nodes, with its step. ``targets`` are the numbers of
    nodes to predict for, and the anchor is the measured count on several nodes with the most GPUs.
    A predicted count has as many GPUs on each node as the anchor. Its step is predicted from the
    anchor if it has more nodes than the anchor, and interpolated if it has fewer. A target that was
    measured is not predicted.
    """
    anchor = _anchor(measured)
    known = {(count.gpus, count.nodes) for count in measured}
    counts = [*measured]
    for nodes in targets:
        if (nodes * anchor.gpus_per_node, nodes) in known:
            continue
        if nodes < anchor.nodes:
            counts.append(_interpolated(measured, anchor.gpus_per_node, nodes))
        else:
            # Here there are more nodes than the anchor has. A target with equally many nodes is the
            # anchor itself, which was measured and is skipped above.
            counts.append(_predicted(measured, nodes))
    return sorted(counts, key=_by_size)


def _predicted(measured: Sequence[Count], nodes: int) -> Count:
    """Return the predicted step on more nodes than the anchor has.

    Of the measured counts on several nodes, the anchor is the one with the most GPUs. Each node has
    as many GPUs as the anchor's.
    """
    # The count with the fewest GPUs on one node.
    smallest = _smallest(measured)
    anchor = _anchor(measured)
    ratio = nodes / anchor.nodes
    # By the law of `ddlkit.core.scaling.step_s`, the square of a step exceeds the square of the
    # smallest count's step by an amount that grows as the square root of the number of nodes.
    step_s = float(scaling.step_s(smallest.step_s, anchor.step_s, ratio))
    interval_s = _predicted_interval_s(measured, anchor, nodes)
    gpus = nodes * anchor.gpus_per_node
    return _unmeasured(smallest, gpus, nodes, step_s, interval_s)


def _predicted_interval_s(
    measured: Sequence[Count], start: Count, nodes: int
) -> Interval:
    """Return the nominal 90% interval of the step on some nodes, predicted from ``start``.

    The interval should contain 90% of measured steps. ``start`` is one of the ``measured`` counts
    of GPUs and nodes. The ends of the interval are in seconds. They take into account how the jobs
    of a count scatter, and whether a smaller count is slower than ``start``.
    """
    lower_s, upper_s = scaling.step_interval_s(
        _smallest(measured).step_s,
        start.step_s,
        nodes / start.nodes,
        # The slowest step on ``start`` itself and on all smaller counts.
        slowest_s=_slowest_s(measured, start),
        jobs_s=_jobs_s(start, _scatter_of_jobs(measured)),
    )
    return (float(lower_s), float(upper_s))


def _interpolated(measured: Sequence[Count], gpus_per_node: int, nodes: int) -> Count:
    """Return the step on fewer nodes than the anchor has, between its measured neighbours.

    Of the measured counts on several nodes, the anchor is the one with the most GPUs. The step is
    that of ``nodes`` nodes with ``gpus_per_node`` GPUs each. Its interval takes into account how
    jobs scatter on the neighbours.
    """
    gpus = nodes * gpus_per_node
    smallest = _smallest(measured)
    # The step is interpolated between the counts ``lower`` and ``upper``.
    lower, upper = _neighbours(measured, gpus, nodes)
    if lower is None:
        # Every measured count has more GPUs or more nodes than the target. An example is a target
        # of 4 GPUs on 2 nodes, if the smallest count is 8 GPUs on 1 node. It is taken all the same,
        # because it has no more nodes than the target.
        lower = smallest
    # The anchor has more GPUs and more nodes than the target, so there is an upper count.
    assert upper is not None
    step_s = scaling.interpolated_step_s(
        lower.step_s,
        upper.step_s,
        smaller=(lower.gpus, lower.nodes),
        larger=(upper.gpus, upper.nodes),
        target=(gpus, nodes),
    )
    scatter = _scatter_of_jobs(measured)
    interval_s = scaling.interpolated_interval_s(
        _jobs_s(lower, scatter),
        _jobs_s(upper, scatter),
        # The result also contains this interval, which is predicted from the upper count alone, as
        # intervals beyond the anchor are predicted from the anchor. It allows for a wrong
        # measurement of one of the two counts.
        predicted_s=_predicted_interval_s(measured, upper, nodes),
    )
    count = _unmeasured(smallest, gpus, nodes, step_s, interval_s)
    return replace(count, interpolated=True)


def _neighbours(
    measured: Sequence[Count], gpus: int, nodes: int
) -> tuple[Count | None, Count | None]:
    """Return the nearest smaller and larger measured counts of some GPUs and nodes.

    A smaller count has no more GPUs and no more nodes, and a larger one at least as many of both.
    Either is None if there is no such count. For more nodes than the anchor has, the smaller count
    is the anchor and the larger one is None, because these steps are predicted from the anchor. The
    anchor is the count on several nodes with the most GPUs.
    """
    anchor = _anchor(measured)
    if nodes > anchor.nodes:
        return anchor, None
    smaller = [
        count for count in measured if count.gpus <= gpus and count.nodes <= nodes
    ]
    larger = [
        count for count in measured if count.gpus >= gpus and count.nodes >= nodes
    ]
    # Counts are compared by their GPUs, and then by their nodes.
    return (
        max(smaller, key=_by_size, default=None),
        min(larger, key=_by_size, default=None),
    )


def _unmeasured(
    smallest: Count, gpus: int, nodes: int, step_s: float, interval_s: Interval
) -> Count:
    """Return a count of GPUs and nodes that was not measured, with its scaling factors.

    A scaling factor is the step on the smallest measured count, ``smallest``, divided by the step
    on the count.
    """
    # The longest step has the lowest factor.
    lower_s, upper_s = interval_s
    return Count(
        gpus=gpus,
        nodes=nodes,
        step_s=step_s,
        interval_s=interval_s,
        scaling_factor=smallest.step_s / step_s,
        scaling_factor_interval=(smallest.step_s / upper_s, smallest.step_s / lower_s),
        measured=False,
    )


def _held_out(measured: Sequence[Count]) -> HeldOut | None:
    """Return how well `ddlkit.core.scaling.step_s` predicts the largest count from smaller ones.

    A count is a number of GPUs on a number of nodes. ``measured`` has at least one count on one
    node and one on several nodes. The result is None if no smaller count has several nodes, because
    a prediction needs a count on one node and another on several nodes.
    """
    # The count on several nodes with the most GPUs.
    held_out = _anchor(measured)
    smaller = [
        count
        for count in measured
        if count.gpus < held_out.gpus and count.nodes < held_out.nodes
    ]
    if not any(count.nodes > 1 for count in smaller):
        return None
    # The prediction starts from the largest of the smaller counts on several nodes.
    smaller_anchor = _anchor(smaller)
    ratio = held_out.nodes / smaller_anchor.nodes
    # It also needs the smallest count on one node. This is never the count that is held out, which
    # has several nodes, so it may have any number of GPUs.
    smallest_s = _smallest(measured).step_s
    predicted_s = float(scaling.step_s(smallest_s, smaller_anchor.step_s, ratio))
    return HeldOut(
        gpus=held_out.gpus,
        nodes=held_out.nodes,
        measured_s=held_out.step_s,
        predicted_s=predicted_s,
        relative_error=predicted_s / held_out.step_s - 1,
    )


def _costs_of(
    collectives: DataFrame,
    gpus_per_node: int,
    most_nodes: int,
    workload: Workload | None,
) -> NodeCosts:
    """Return the costs of collectives, if they can be predicted for the largest count.

    A count is a number of GPUs on a number of nodes. ``collectives`` has measured times of
    collectives, with a table for each number of nodes. Only tables with ``gpus_per_node`` GPUs on
    each node, as many as in the training, are used. ``most_nodes`` is the largest number of nodes
    of any count. The gradients of ``workload`` give the size of the training's largest message. If
    ``workload`` is None, that size is PyTorch's default bucket of 25 MiB.

    Raises UserError if no table of several nodes has ``gpus_per_node`` GPUs on each node, if the
    smallest size of a table exceeds that largest message, if a collective was measured on one node
    only or has no law for more nodes, or if its tables end too far below ``most_nodes``.
    """
    costs = NodeCosts.of(collectives).with_per_node(gpus_per_node)
    _refuse_large_sizes(costs, workload)
    for collective in costs.collectives:
        # The result is not used. The call raises the error if the collective cannot be predicted
        # for ``most_nodes``.
        costs.anchor(collective, most_nodes)
    return costs


def _refuse_large_sizes(costs: NodeCosts, workload: Workload | None) -> None:
    """Raise UserError if the smallest size of a table is above the largest bucket of gradients.

    Nothing would be known of the messages of the training then. If ``workload`` is None, the
    largest bucket is 25 MiB, PyTorch's default.
    """
    largest_bytes = _largest_bucket_bytes(workload)
    bucket = _largest_bucket_in_words(workload)
    for table in costs.tables:
        if table.sizes[0] > largest_bytes:
            # The advice names 1 MiB, the default size of PyTorch's first bucket.
            raise UserError(
                f"the table of {table.collective} on {_nodes(table.nodes)} begins at "
                f"{units.format_bytes(table.sizes[0])}, above {bucket} of "
                f"{units.format_bytes(largest_bytes)}: measure sizes down to 1 MiB"
            )


def _largest_bucket_bytes(workload: Workload | None) -> float:
    """Return the size of the largest message of gradients, in bytes.

    If nothing is known of the gradients, it is PyTorch's default.
    """
    if workload is None:
        return float(LARGEST_BUCKET_BYTES)
    return float(ddp(workload).group_bytes(workload).max())


def _largest_bucket_in_words(workload: Workload | None) -> str:
    if workload is None:
        return "PyTorch's largest bucket by default"
    return "the largest bucket"


def _on_tables(costs: NodeCosts, workload: Workload | None) -> list[Finding]:
    """Return a finding if the tables of collectives tell too little of a training's messages.

    ``workload`` has the gradients, None if they are not known. Raises UserError if a table of
    all-reduces ends too far below the largest message of these gradients.
    """
    if "all_reduce" in costs.collectives:
        return _on_short_tables(costs, workload)
    # Without the gradients, the time of messages alone is not known whatever the
    # tables. Another finding says that the gradients are missing.
    if workload is None:
        return []
    listed = ", ".join(costs.collectives)
    text = (
        f"messages alone: not known, because the tables are of {listed}, and gradients are "
        "exchanged by all-reduces: give a table of all_reduce"
    )
    return [Finding("messages", text=text)]


def _on_short_tables(costs: NodeCosts, workload: Workload | None) -> list[Finding]:
    """Return a finding if a table of all-reduces ends below the largest bucket of gradients.

    DDP exchanges gradients in buckets, each of which is one message. ``workload`` has the
    gradients, whose messages are predicted. Raises UserError if the table ends so far below the
    largest of these that its times cannot be continued to it. If ``workload`` is None, only sizes
    within the table are predicted, and the largest bucket is taken to be PyTorch's default.
    """
    largest_bytes = _largest_bucket_bytes(workload)
    bucket = _largest_bucket_in_words(workload)
    # The table that ends at the smallest size is the one that may be too short.
    table = min(costs.of_collective("all_reduce"), key=lambda table: table.sizes[-1])
    last_bytes = table.sizes[-1]
    if last_bytes >= largest_bytes:
        return []
    facts = (
        f"the table of all_reduce on {_nodes(table.nodes)} ends at {units.format_bytes(last_bytes)}, "
        f"below {bucket} of {units.format_bytes(largest_bytes)}"
    )
    advice = f"measure sizes up to {units.format_bytes(largest_bytes)}"
    # If times were continued so far beyond the table, they would be too wrong.
    is_too_short = largest_bytes > scaling.MOST_TIMES_OF_SIZE * last_bytes
    # Only the messages of known gradients need times beyond the table. These times lie on the line
    # through its two largest sizes. At 8 times the largest size, the times of published tables
    # differ from this line by up to 61% (`ddlkit.core.scaling.MOST_TIMES_OF_SIZE`).
    if is_too_short and workload is not None:
        raise UserError(
            f"{facts}, and times are continued to {scaling.MOST_TIMES_OF_SIZE:g} times the largest "
            f"size only, because beyond it the times of published tables differ from this by up to "
            f"61%: {advice}"
        )
    text = f"{facts}: {advice}"
    if workload is not None:
        text = f"{facts}. Its times are continued along its two largest sizes: {advice}"
    return [Finding("messages", text=text)]


def _with_messages(
    count: Count, smallest: Count, workload: Workload | None, costs: NodeCosts | None
) -> Count:
    """Return a count with the steps that it would have if nothing but messages lengthened it.

    A count is a number of GPUs on a number of nodes. The steps are ``only_messages_step_s``, with
    messages as in the tables, and ``only_messages_bad_day_s``, with messages that other jobs on the
    network slow down. ``workload`` has the gradients, which are sent in PyTorch's default buckets,
    and ``costs`` has the tables of collectives. ``smallest`` is the smallest measured count. The
    count is returned unchanged if these steps are not known, or if it is one GPU, which sends no
    messages.
    """
    # Gradients are exchanged by all-reduces.
    if workload is None or costs is None or "all_reduce" not in costs.collectives:
        return count
    # One GPU sends no messages. For other counts, the times may not follow from the tables, for
    # example if these are of other numbers of GPUs on a node.
    if count.gpus == 1 or not costs.knows("all_reduce", count.nodes, count.gpus):
        return count
    # All compute times are multiplied by one factor, so that an iteration without messages takes
    # as long as the step on the smallest count.
    factor = smallest.step_s / workload.compute_s
    scaled = workload.scaled(factor)
    cost = costs.cost("all_reduce", count.nodes, count.gpus)
    iteration = Iteration(scaled, ddp(scaled), cost)
    bad_cost = slowed(cost, scaling.bad_day_factor(count.nodes))
    bad_iteration = replace(iteration, cost=bad_cost)
    return replace(
        count,
        only_messages_step_s=iteration.prediction.iteration_s,
        only_messages_bad_day_s=bad_iteration.prediction.iteration_s,
    )


def _message_times(costs: NodeCosts | None, target: Count) -> tuple[MessageTime, ...]:
    """Return the times of messages of `SHOWN_SIZES` on a count, where they are known.

    ``target`` is this count of GPUs and nodes. ``costs`` has the tables of collectives, and is None
    if there are none.
    """
    if costs is None:
        return ()
    # How many times as long messages take on a day with much other traffic.
    factor = scaling.bad_day_factor(target.nodes)
    times = []
    for collective in costs.collectives:
        if not costs.knows(collective, target.nodes, target.gpus):
            continue
        cost = costs.cost(collective, target.nodes, target.gpus)
        for n_bytes in SHOWN_SIZES:
            # Outside the sizes of the table, times would be extrapolated.
            if n_bytes < cost.bytes[0] or n_bytes > cost.bytes[-1]:
                continue
            seconds = float(cost(n_bytes))
            message_time = MessageTime(
                collective=collective,
                nodes=target.nodes,
                gpus=target.gpus,
                bytes=n_bytes,
                seconds=seconds,
                bad_day_s=factor * seconds,
            )
            times.append(message_time)
    return tuple(times)


def _on_messages_that_do_not_fit(
    counts: Sequence[Count], scatter: float
) -> list[Finding]:
    """Return a warning if the step that is predicted from messages alone is longer than measured.

    That prediction is ``only_messages_step_s`` of a count: the step if nothing but messages
    lengthened it. It must not exceed the longest step that a job may take. ``counts`` are in
    ascending order of GPUs and nodes, and ``scatter`` is the share by which the jobs of a count
    scatter. If the prediction is too long for several counts, the warning names the largest one.
    """
    predicted_too_long = []
    for count in counts:
        only_messages_s = count.only_messages_step_s
        if not count.measured or only_messages_s is None:
            continue
        # The longest step that a job on the count may take.
        _, slowest_s = _likely_range_s(count, scatter)
        # Several jobs that happen to agree make this range too narrow. So a prediction may always
        # exceed the measured step by the share `SINGLE_JOB_SHARE`.
        slowest_s = max(slowest_s, (1 + SINGLE_JOB_SHARE) * count.step_s)
        if only_messages_s > slowest_s:
            predicted_too_long.append((count, only_messages_s))
    if not predicted_too_long:
        return []
    largest, only_messages_s = predicted_too_long[-1]
    text = (
        f"with nothing but messages, a step on {_nodes(largest.nodes)} would take "
        f"{units.format_seconds(only_messages_s)}, longer than the measured "
        f"{units.format_seconds(largest.step_s)}: the tables or the gradients do not fit this training, so "
        "the times of messages are too long, and the verdict may be too bad: measure the tables on "
        "its nodes, with its NCCL and settings"
    )
    return [Finding("warning", text=text)]


def _kernels_s(
    kernels: DataFrame | None,
    kernel_steps: int,
    anchor: Count,
    findings: list[Finding],
) -> float | None:
    """Return the time of NCCL's kernels in a step of the anchor, None if they were not traced.

    Of the measured counts on several nodes, the anchor is the one with the most GPUs.
    ``kernels`` has the sum of the times of each kernel on one GPU, over ``kernel_steps`` steps of
    the anchor. Kernels of NCCL wait for other ranks and run beside compute, so messages lengthen a
    step by less than this time. A warning if it exceeds the step, and how it compares with the
    tables of collectives, are added to ``findings``. Raises UserError if the number of steps was
    probably not given.
    """
    if kernels is None:
        return None
    # A kernel that is not of NCCL has no collective.
    is_nccl = kernels["collective"] != ""
    kernels_s = float(kernels.loc[is_nccl, "total_s"].sum()) / kernel_steps
    took = (
        f"the kernels of NCCL took {units.format_seconds(kernels_s)}, longer than a step on "
        f"{_gpus(anchor.gpus)} ({units.format_seconds(anchor.step_s)})"
    )
    # If the kernels of a single step took longer than the step, they probably ran in more steps.
    # The number of steps has a default of 1, which may also be what the user gave.
    if kernels_s > anchor.step_s and kernel_steps == 1:
        raise UserError(
            f"{took}, taken as those of 1 step: give the number of steps of one GPU in which they "
            "ran by --kernel-steps (kernel_steps in Python)"
        )
    # A number of steps that the user has given may be right, so there is only a warning.
    if kernels_s > anchor.step_s:
        text = f"{took}, in {kernel_steps} steps: check this number, and that one GPU was traced"
        findings.append(Finding("warning", text=text))
    findings += _on_kernels_and_tables(kernels_s, anchor)
    return kernels_s


def _on_kernels_and_tables(kernels_s: float, anchor: Count) -> list[Finding]:
    """Return a finding that compares NCCL's kernels with what the tables say of messages.

    ``kernels_s`` is the measured time of NCCL's kernels in a step of the anchor. Of the measured
    counts on several nodes, the anchor is the one with the most GPUs. The tables of collectives say
    by how much messages lengthen this step on a bad day, when other traffic on the network slows
    them down. There is no finding if that is not known.
    """
    if anchor.only_messages_bad_day_s is None:
        return []
    # The scaling factor is the step on the smallest count, divided by that on the anchor.
    smallest_s = anchor.scaling_factor * anchor.step_s
    # ``only_messages_bad_day_s`` is the whole step if nothing but messages lengthened it on a bad
    # day. If they lengthen nothing, rounding may leave a difference below 0.
    added_s = max(0.0, anchor.only_messages_bad_day_s - smallest_s)
    text = (
        f"messages at most: the measured kernels of NCCL, {units.format_seconds(kernels_s)} of "
        f"a step. By the tables, messages add {units.format_seconds(added_s)} on a bad day"
    )
    return [Finding("messages", text=text)]


# -- what it means -------------------------------------------------------------------


def _largest_asked(
    counts: Sequence[Count], targets: Sequence[int], per_node: int
) -> Count:
    """Return the count of GPUs and nodes with the most nodes that the user asks for.

    ``targets`` are the asked numbers of nodes in ascending order, and ``per_node`` is how many GPUs
    a node has. ``counts`` has a measured or predicted count for each of them.
    """
    asked = (targets[-1] * per_node, targets[-1])
    return next(count for count in counts if (count.gpus, count.nodes) == asked)


def _explained(
    jobs: Sequence[_Jobs],
    smallest: Count,
    anchor: Count,
    kernels_s: float | None,
) -> Explained:
    """Return what lengthens the step on the anchor, compared with the smallest count.

    Parameters
    ----------
    jobs : sequence of _Jobs
        The runs of the training on each measured count, and their single steps where these are
        known.
    smallest : Count
        The smallest measured count of GPUs and nodes, from which the loss is counted.
    anchor : Count
        The largest measured count, whose loss is explained. Where they are known, it also has the
        steps that it would take if nothing but messages lengthened them: with messages as in the
        tables, and on a bad day, when other traffic on the network slows messages down.
    kernels_s : float or None
        The measured time of NCCL's kernels in a step of the anchor. None if it was not measured.

    Returns
    -------
    Explained
        The loss in seconds, how much of it messages and the scatter of steps explain, and the rest.
    """
    # A step on the anchor that is shorter than on the smallest count is no loss.
    loss_s = max(0.0, anchor.step_s - smallest.step_s)
    messages_s = _added_by_messages_s(anchor.only_messages_step_s, smallest)
    # Kernels of NCCL run beside compute as well, so messages lengthen a step by at most their
    # whole time. They were measured in this training, and the tables perhaps on another day. So
    # kernels bound the messages better, and tables do so only where kernels are missing.
    at_most_s = kernels_s
    if at_most_s is None:
        at_most_s = _added_by_messages_s(anchor.only_messages_bad_day_s, smallest)
    # If nothing but scatter lengthens it, a step on r times as many GPUs is as long as the longest
    # of r single steps on the smallest count.
    single_s = _jobs_on(smallest, jobs).steps_s
    scatter_s = _lost_to_scatter_s(single_s, anchor.gpus / smallest.gpus)
    # Messages and scatter count with the most that they may explain, so that the rest surely has
    # other causes. What is not known explains nothing.
    explained_s = 0.0
    if at_most_s is not None:
        # Unlike the scatter, this time may exceed the loss. `_on_messages` then states it in full.
        explained_s += at_most_s
    if scatter_s is not None:
        # The result has no more scatter than the loss.
        scatter_s = min(scatter_s, loss_s)
        explained_s += scatter_s
    unexplained_s = max(0.0, loss_s - explained_s)
    return Explained(
        gpus=anchor.gpus,
        nodes=anchor.nodes,
        loss_s=loss_s,
        messages_s=messages_s,
        messages_at_most_s=at_most_s,
        kernels_s=kernels_s,
        scatter_s=scatter_s,
        unexplained_s=unexplained_s,
    )


def _added_by_messages_s(
    only_messages_step_s: float | None, smallest: Count
) -> float | None:
    """Return by how much messages lengthen the step of some larger count, in seconds.

    ``only_messages_step_s`` is the step on the larger count if nothing but messages made it longer
    than on ``smallest``. The result is None if it is not known.
    """
    if only_messages_step_s is None:
        return None
    # If messages lengthen nothing, the two steps are equal. Their rounded difference can then be
    # below 0.
    return max(0.0, only_messages_step_s - smallest.step_s)


def _lost_to_scatter_s(single_s: Sequence[float], times_gpus: float) -> float | None:
    """Return how much longer a step is on more GPUs, only because single steps scatter.

    ``single_s`` are the single steps on some number of GPUs, in seconds. Each of them is already
    the step of the slowest of these GPUs. A step on ``times_gpus`` times as many GPUs is the
    longest of so many single steps, drawn at random. The result is by how much this longest step is
    expected to exceed the mean step, in seconds. It is None for fewer than two single steps, which
    show no scatter.
    """
    if len(single_s) < 2:
        return None
    # The number of draws is a whole number, so that a fraction is rounded up.
    longest_s = scaling.expected_maximum_s(single_s, math.ceil(times_gpus))
    return longest_s - float(np.mean(single_s))


def _jobs_on(count: Count, jobs: Sequence[_Jobs]) -> _Jobs:
    """Return the jobs that measured a count."""
    return next(
        own for own in jobs if (own.gpus, own.nodes) == (count.gpus, count.nodes)
    )


def _verdict_on_messages(asked: Count) -> str:
    """Return whether messages are hidden behind compute on a count of GPUs and nodes, in words.

    Messages count as hidden if they lengthen a step by no more than the share `HIDDEN_SHARE`.
    """
    # The steps that nothing but messages lengthens, on a quiet and on a bad day of the network.
    quiet_s = asked.only_messages_step_s
    bad_day_s = asked.only_messages_bad_day_s
    if quiet_s is None or bad_day_s is None:
        return NOT_KNOWN
    # Nothing is lost on the smallest count, whose step is that of compute. The scaling factor is
    # the step on the smallest count, divided by that on the asked one.
    compute_s = asked.scaling_factor * asked.step_s
    is_hidden = quiet_s <= compute_s * (1 + HIDDEN_SHARE)
    if is_hidden and asked.nodes == 1:
        return HIDDEN
    if bad_day_s <= compute_s * (1 + HIDDEN_SHARE):
        return HIDDEN_EVEN_ON_A_BAD_DAY
    if is_hidden:
        return HIDDEN_ONLY_ON_A_QUIET_FABRIC
    return COMMUNICATION_BOUND


def _wish(
    factor: float | None,
    asked: Count,
    measured: Sequence[Count],
    doubts: Sequence[_Doubt],
) -> Wish | None:
    """Return whether a count meets a wished scaling factor, None if none is wished.

    The scaling factor of a count is the step on the smallest measured count, divided by its own.

    Parameters
    ----------
    factor : float or None
        The wished factor.
    asked : Count
        The largest count of GPUs and nodes that the user asks for.
    measured : sequence of Count
        The measured counts. The scaling factor compares with the smallest one, all of them tell by
        how much jobs scatter, and those without a doubt limit the step of ``asked``.
    doubts : sequence of _Doubt
        The counts that have to be measured again. If ``asked`` or the smallest count is among
        them, the answer is open.

    Returns
    -------
    Wish or None
        The answer "yes" if all likely factors are at or above the wished one, "no" if all are
        below it, and else "open", with the reason in words. It states the number of nodes, which
        is what users ask for, and not the GPUs.
    """
    if factor is None:
        return None
    smallest = _smallest(measured)
    # The smallest count has the factor 1, which no wish exceeds.
    if _by_size(asked) == _by_size(smallest):
        reason = (
            "scaling factors compare with the step on these GPUs, whose own factor is 1"
        )
        return Wish(factor, asked.nodes, "yes", reason, (1.0, 1.0))
    # Of the two counts of a doubt, the slower one has to be measured again.
    doubtful = {(doubt.slow.gpus, doubt.slow.nodes) for doubt in doubts}
    # The factor is the ratio of these two steps, so that neither may be doubtful. A predicted
    # count never is, because only measured ones are doubted.
    for count in (smallest, asked):
        if (count.gpus, count.nodes) in doubtful:
            reason = f"the measurement on {_gpus(count.gpus)} has to be repeated"
            return Wish(factor, asked.nodes, "open", reason, None)
    # Only these counts limit the step of ``asked``. All measured counts tell by how much jobs
    # scatter, which gives the factor a likely range.
    trusted = [count for count in measured if (count.gpus, count.nodes) not in doubtful]
    return _wish_by_likely_factors(factor, asked, trusted, measured)


def _wish_by_likely_factors(
    factor: float, asked: Count, trusted: Sequence[Count], measured: Sequence[Count]
) -> Wish:
    """Return whether a count meets a wished scaling factor, by the likely range of its factor.

    A count is a number of GPUs on a number of nodes. The scaling factor of ``asked`` is the step on
    the smallest of the ``measured`` counts, divided by its own step. ``trusted`` are those measured
    counts that need not be measured again. If ``asked`` was predicted, its step is not shorter than
    on the nearest smaller trusted count, and not longer than on the nearest larger trusted one.
    """
    smallest = _smallest(measured)
    # The share of its step by which another job on a count may be faster or slower.
    scatter = _scatter_of_jobs(measured)
    # The likely steps on ``asked``, and which of its neighbours limit them.
    (fastest_s, slowest_s), limiting = _limited(asked, trusted, measured)
    # The step on the smallest count has a range, too. If one job alone measured it, its range
    # depends on whether the likely steps on ``asked`` allow for a further job already.
    fastest_smallest_s, slowest_smallest_s = _smallest_range_s(smallest, asked, scatter)
    # The factor is the smallest count's step, divided by that of ``asked``. So it is lowest if the
    # smallest count is fast and ``asked`` is slow.
    lowest = fastest_smallest_s / slowest_s
    highest = slowest_smallest_s / fastest_s
    if lowest >= factor:
        answer = "yes"
        compared_with_wish = f"not below {factor:g}"
    elif highest < factor:
        answer = "no"
        compared_with_wish = f"below {factor:g}"
    else:
        answer = "open"
        compared_with_wish = f"so that {factor:g} may be reached or missed"
    # The factors of the likely steps on ``asked``, before the range of the smallest count is added.
    limited_factors = (smallest.step_s / slowest_s, smallest.step_s / fastest_s)
    origin = _origin_of_likely_factors(
        asked, smallest, limiting, scatter, limited_factors
    )
    reason = (
        f"the factor is likely between {lowest:.2f} and {highest:.2f}, {compared_with_wish}. "
        f"{origin}"
    )
    return Wish(factor, asked.nodes, answer, reason, (lowest, highest))


def _limited(
    asked: Count, trusted: Sequence[Count], measured: Sequence[Count]
) -> tuple[Interval, list[Count]]:
    """Return the likely steps of a count, limited by its neighbours, and which neighbours limit it.

    A count is a number of GPUs on a number of nodes. More nodes do not shorten a step. So the step
    is not shorter than on the nearest smaller count, and not longer than on the nearest larger one.
    The likely steps are the shortest and the longest one in seconds.

    ``asked`` is the count. If it was measured itself, no neighbour limits it. ``trusted`` are those
    of the ``measured`` counts that need not be measured again. The neighbours are trusted counts.
    All ``measured`` counts tell by how much jobs scatter, and whether the larger neighbour is
    credible.
    """
    scatter = _scatter_of_jobs(measured)
    fastest_s, slowest_s = _likely_range_s(asked, scatter)
    limiting: list[Count] = []
    if asked.measured:
        return (fastest_s, slowest_s), limiting
    smaller, larger = _neighbours(trusted, asked.gpus, asked.nodes)
    if smaller is not None:
        least_s, _ = _likely_range_s(smaller, scatter)
        if least_s > fastest_s:
            fastest_s = least_s
            limiting.append(smaller)
    if larger is not None:
        _, most_s = _likely_range_s(larger, scatter)
        # ``larger`` may be measured wrong. If a count with no more GPUs and nodes than ``larger``
        # is slower than ``most_s``, ``larger`` seems too fast, and limits nothing.
        slowest_up_to_larger_s = _slowest_s(measured, larger)
        is_credible = slowest_up_to_larger_s <= most_s
        if is_credible and most_s < slowest_s:
            slowest_s = most_s
            limiting.append(larger)
    return (fastest_s, slowest_s), limiting


def _likely_range_s(count: Count, scatter: float) -> Interval:
    """Return the shortest and the longest step that a count may have, in seconds.

    A count is a number of GPUs on a number of nodes, and a job is one run of the training. If the
    step was predicted, the result is its interval. If several jobs measured the step, the result is
    their range. If one job did, the result is its step, shorter or longer by the larger one of
    `SINGLE_JOB_SHARE` and ``scatter``, the share by which jobs of other counts scatter.
    """
    # The interval is None only if a single job measured the count.
    if count.interval_s is not None:
        return count.interval_s
    return _jobs_s(count, max(scatter, SINGLE_JOB_SHARE))


def _smallest_range_s(smallest: Count, asked: Count, scatter: float) -> Interval:
    """Return the shortest and the longest step that the smallest count may have, in seconds.

    The scaling factor of ``asked`` is this step, divided by that of ``asked``. A count is a number
    of GPUs on a number of nodes, and a job is one run of the training. If several jobs measured the
    smallest count, the result is their range. If one job did, another job may differ from it. By
    how much depends on ``asked`` and on ``scatter``, the share by which jobs of other counts
    scatter.
    """
    if smallest.jobs > 1:
        return smallest.range_s
    # One job measured the smallest count. At least one of the two steps in the factor has to allow
    # for a job that was not measured. If several jobs measured ``asked``, its range has these
    # jobs alone. The range of the smallest count is then always widened.
    if asked.jobs > 1:
        return _jobs_s(smallest, max(scatter, SINGLE_JOB_SHARE))
    # If one job measured ``asked``, or if it was predicted, its range is wider than what was
    # measured (`_likely_range_s`). The range of the smallest count is then widened only by a
    # scatter that was observed.
    if scatter > LEAST_SCATTER:
        return _jobs_s(smallest, scatter)
    return smallest.range_s


def _origin_of_likely_factors(
    asked: Count,
    smallest: Count,
    limiting: Sequence[Count],
    scatter: float,
    limited_factors: Interval,
) -> str:
    """Return in sentences why the scaling factor of a count is likely to lie where it does.

    A count is a number of GPUs on a number of nodes. The factor is the step on ``smallest``,
    divided by the step on ``asked``. ``limiting`` are the measured counts that limit the interval
    of a predicted count. ``scatter`` is the share by which jobs of a count scatter.
    ``limited_factors`` are the ends of the interval within these limits, before the range of the
    step on ``smallest`` moves them further apart.
    """
    if asked.measured:
        origin = _origin_of_measured(asked, scatter)
    else:
        origin = f"The range starts from the nominal {scaling.NOMINAL:.0%} interval"
        lowest, highest = limited_factors
        for count in limiting:
            # Factors fall with the GPUs: a larger count limits the factor from below, and a
            # smaller count from above.
            change = f"lower end is raised to {lowest:.2f}"
            if _by_size(count) < _by_size(asked):
                change = f"upper end is lowered to {highest:.2f}"
            # A smaller or larger count may have as many nodes, and then differs in GPUs alone.
            noun = "GPUs" if count.nodes == asked.nodes else "nodes"
            origin += (
                f". Its {change}, because more {noun} do not raise the factor, "
                f"{_measured_factor(count, asked, scatter)}"
            )
    of_smallest = _origin_of_smallest_range(smallest, asked, scatter)
    return f"{origin}. {of_smallest}" if of_smallest else origin


def _origin_of_measured(asked: Count, scatter: float) -> str:
    """Return in a sentence where the likely range of a measured scaling factor comes from.

    ``asked`` is the count of GPUs and nodes, and a job is one run of the training. The factor is
    the step on the smallest count, divided by that on ``asked``. It differs among jobs by the same
    shares as the step on ``asked``. ``scatter`` is the share by which the jobs of other counts
    scatter. The cases are those of `_likely_range_s`.
    """
    if asked.jobs > 1:
        return "The range starts from the jobs that measured the step"
    measured = f"One job measured {asked.scaling_factor:.2f}, and "
    if scatter > SINGLE_JOB_SHARE:
        return f"{measured}jobs on other numbers of GPUs differ by {scatter:.0%} either way"
    return f"{measured}another job may differ by {SINGLE_JOB_SHARE:.0%}"


def _origin_of_smallest_range(smallest: Count, asked: Count, scatter: float) -> str:
    """Return in a sentence where the range of the step on the smallest count comes from.

    A count is a number of GPUs on a number of nodes, and a job is one run of the training. The
    scaling factor of ``asked`` compares with the smallest count, and ``scatter`` is the share by
    which the jobs of other counts scatter. The cases are those of `_smallest_range_s`, which has
    their reasons. The result is empty if the range is only the step that one job measured.
    """
    on_smallest = _gpus(smallest.gpus)
    if smallest.jobs > 1:
        return f"The range also allows for each of the jobs on {on_smallest}"
    # One job measured the smallest count, and another job may differ there by ``share``. If several
    # jobs measured ``asked``, this is at least SINGLE_JOB_SHARE, which is assumed. Otherwise a
    # scatter of no more than LEAST_SCATTER counts as none.
    share = scatter
    is_assumed = asked.jobs > 1 and scatter <= SINGLE_JOB_SHARE
    if is_assumed:
        share = SINGLE_JOB_SHARE
    elif scatter <= LEAST_SCATTER:
        return ""
    text = (
        f"The range also allows for another job on {on_smallest}, which may differ by "
        f"{share:.0%}"
    )
    return text if is_assumed else f"{text}, as jobs on other numbers of GPUs do"


def _measured_factor(count: Count, asked: Count, scatter: float) -> str:
    """Return in words which factor was measured on a count, and how far jobs may differ there.

    ``asked`` is the count whose factor is limited by this one.
    """
    where = _where(count, asked)
    measured = f"{count.scaling_factor:.2f} was measured on {where}, and "
    if count.jobs > 1:
        return measured + "jobs differ there"
    share = max(scatter, SINGLE_JOB_SHARE)
    return f"{measured}another job there may differ by {share:.0%}"


def _where(count: Count, other: Count) -> str:
    """Return the nodes of a count, or its GPUs if ``other`` has as many nodes."""
    if count.nodes == other.nodes:
        return _gpus(count.gpus)
    return _nodes(count.nodes)


def _missing_for_messages(costs: Any, workload: Any) -> str:
    """Return what to give so that it is known whether messages explain the lost time.

    The lost time is by how much a step is longer than on the smallest count. ``costs`` and
    ``workload`` are None if the user has not given them. Both are needed to predict by how much
    messages lengthen a step. Instead of both, the measured times of NCCL's kernels (--kernels) will
    do, because messages lengthen a step by at most these times.
    """
    if costs is None and workload is None:
        advice = "give --collectives and a --profile"
    elif workload is None:
        advice = "add a --profile or a --trace, which has the gradients"
    elif costs is None:
        advice = "add --collectives"
    else:
        # Both were given, but the tables lack the nodes of the measured steps.
        advice = (
            "add times of all-reduces on as many nodes as steps were measured on to "
            "--collectives"
        )
    return f"whether messages explain the lost time: not known: {advice}, or give --kernels"


def _advice(
    explained: Explained, measured: Sequence[Count], asked: Count
) -> list[Finding]:
    """Return what would help, what would not, and what to measure next.

    ``asked`` is the largest count of GPUs and nodes that the user asks for. ``explained`` says what
    lengthens the step on the largest of the ``measured`` counts.
    """
    findings = []
    # What messages explain at most is None if neither their costs nor kernels of NCCL are known.
    if explained.messages_at_most_s is not None and explained.loss_s > 0:
        findings.append(_on_messages(explained))
    findings += _on_accumulation(_smallest(measured), asked)
    # If the step on ``asked`` was measured, nothing is left to measure. It may also lie between
    # measured steps, or beyond all of them.
    if asked.interpolated:
        text = (
            f"measure next: one job on {_nodes(asked.nodes)} itself, which lies between measured "
            "numbers of nodes"
        )
        findings.append(Finding("measure", text=text))
        findings.append(Finding("evidence", text=EVIDENCE_BETWEEN))
    elif not asked.measured:
        findings.append(_next_measurement(measured, asked))
        findings.append(Finding("evidence", text=EVIDENCE))
    return findings


def _on_accumulation(smallest: Count, asked: Count) -> list[Finding]:
    """Return the advice to accumulate the gradients of two batches, if that helps visibly.

    ``smallest`` and ``asked`` are counts of GPUs and nodes. The scaling factor of ``asked`` is the
    step on ``smallest``, divided by its own step.
    """
    # How much longer the step is than on the smallest count.
    loss_s = asked.step_s - smallest.step_s
    # Two batches before each update compute as long as two steps on the smallest count, and lose
    # only once what each step loses. The scaling factor is the time without the loss, divided by
    # the time with it.
    accumulated_factor = 2 * smallest.step_s / (2 * smallest.step_s + loss_s)
    # Factors are printed with two decimals, so a smaller gain would not be seen.
    if round(accumulated_factor, 2) <= round(asked.scaling_factor, 2):
        return []
    text = (
        "helps: accumulating two batches before each update. If every step loses the "
        "same time, however many batches it has, this halves the time lost per sample: "
        f"scaling factor {accumulated_factor:.2f} on {_nodes(asked.nodes)} instead of "
        f"{asked.scaling_factor:.2f}"
    )
    return [Finding("helps", text=text)]


def _on_messages(explained: Explained) -> Finding:
    """Return whether a faster network or other buckets would help.

    ``explained`` must have ``messages_at_most_s``, and a step that loses time against the step
    on the smallest measured count.
    """
    assert explained.messages_at_most_s is not None
    at_most_s = explained.messages_at_most_s
    share = at_most_s / explained.loss_s
    # Both times as texts.
    at_most, loss = _in_one_unit(at_most_s, explained.loss_s)
    of_loss = f"of the {loss} that a step on {_gpus(explained.gpus)} loses"
    # Without NCCL's kernels, the most that messages add is what they add on a bad day.
    when = "" if explained.kernels_s is not None else " on a bad day"
    if share < 1:
        facts = f"messages explain at most {at_most}{when} {of_loss}"
    else:
        facts = f"messages, which add up to {at_most}{when}, may explain all {of_loss}"
    other_causes = (
        "look for ranks that wait for their input or for one another: ddlkit explain finds them "
        "in the traces of all ranks"
    )
    if share < LITTLE_OF_LOSS:
        text = (
            f"does not help: a faster network or other buckets, because {facts}; "
            f"{other_causes}"
        )
        return Finding("does not help", text=text)
    # Messages that explain less than half of the loss are not its main cause.
    if share < HALF_OF_LOSS:
        text = (
            f"helps at most in part: a faster network or other buckets, because {facts}; "
            f"{other_causes}"
        )
    else:
        text = f"may help: a faster network or other buckets, because {facts}"
    # This kind of finding stands for what helps and for what may help.
    return Finding("helps", text=text)


def _in_one_unit(first_s: float, second_s: float) -> tuple[str, str]:
    """Return two times in the unit of the longer one, with equally many decimals."""
    longer_s = max(first_s, second_s)
    # The largest unit of which the longer time has at least one. Below 1 µs it is ns.
    unit = "ns"
    unit_s = 1e-9
    for larger_unit, larger_unit_s in (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if longer_s >= larger_unit_s:
            unit = larger_unit
            unit_s = larger_unit_s
    # The longer one gets three digits, or all digits before its point if these are more.
    digits_before_point = len(f"{longer_s / unit_s:.0f}")
    decimals = max(0, 3 - digits_before_point)
    return (
        f"{first_s / unit_s:.{decimals}f} {unit}",
        f"{second_s / unit_s:.{decimals}f} {unit}",
    )


def _next_measurement(measured: Sequence[Count], asked: Count) -> Finding:
    """Return the advice which measurement should narrow the interval of a predicted count.

    The anchor is the measured count of GPUs and nodes from which ``asked`` is predicted, and a job
    is one run of the training. The advice is to measure more jobs on the anchor, if their range is
    more than half of the interval. Otherwise it is one job on a number of nodes between those of
    the anchor and of ``asked``, if that would narrow the interval, or else one job on ``asked``.
    """
    anchor = _anchor(measured)
    # A predicted count always has an interval.
    assert asked.interval_s is not None
    least_s, most_s = asked.interval_s
    width_s = most_s - least_s
    # If the jobs on the anchor make up more than half of the width, more jobs are advised at once.
    # A job on other nodes is then not considered, because jobs scatter there as well.
    more_jobs = _more_jobs(anchor, _scatter_of_jobs(measured), width_s)
    if more_jobs is not None:
        return more_jobs
    text = (
        f"measure next: one job on {_nodes(asked.nodes)}, as no number of nodes between "
        "would help"
    )
    itself = Finding("measure", text=text)
    halfway = _halfway_nodes(anchor.nodes, asked.nodes)
    # It is None if no suitable number of nodes lies between those of the anchor and of ``asked``.
    if halfway is None:
        return itself
    # Half the width of the interval, as a share of the step, now and after a job on the nodes
    # halfway.
    percent_now = round(100 * width_s / 2 / asked.step_s)
    width_then_s = _width_after_halfway_s(measured, halfway, asked.nodes)
    percent_then = round(100 * width_then_s / 2 / asked.step_s)
    if percent_then >= percent_now:
        return itself
    text = (
        f"measure next: one job on {_nodes(halfway)}: the interval on {_nodes(asked.nodes)} would narrow "
        f"from \u00b1{percent_now}% to about \u00b1{percent_then}%"
    )
    return Finding("measure", text=text)


def _more_jobs(anchor: Count, scatter: float, width_s: float) -> Finding | None:
    """Return the advice to measure more jobs on the anchor, if these are the largest uncertainty.

    The anchor is the measured count of GPUs and nodes from which a step is predicted, and a job is
    one run of the training. ``width_s`` is the width of the interval of the predicted step, in
    seconds, and ``scatter`` is the share by which the jobs of a count scatter to either side of
    their median. The result is None if the range of the anchor's jobs is at most half of that
    width, or if these jobs hardly differ.
    """
    fastest_s, slowest_s = _jobs_s(anchor, scatter)
    range_s = slowest_s - fastest_s
    # Jobs that differ by no more than LEAST_SCATTER to either side count as equal.
    if range_s / 2 <= LEAST_SCATTER * anchor.step_s:
        return None
    # Jobs are the largest uncertainty if their range is more than half of the width.
    if range_s <= width_s / 2:
        return None
    text = f"measure next: more jobs on {_nodes(anchor.nodes)}"
    if anchor.jobs == 1:
        # From the fastest to the slowest job, steps differ by twice the share to either side.
        text += (
            ", where one job was measured, because the steps of jobs on other "
            f"numbers of nodes differ by {2 * scatter:.0%}"
        )
    else:
        text += f", whose steps differ by {range_s / anchor.step_s:.0%}"
    return Finding("measure", text=text)


def _width_after_halfway_s(
    measured: Sequence[Count], halfway_nodes: int, asked_nodes: int
) -> float:
    """Return how wide the interval of a predicted step would be after a further measurement.

    The step is predicted for ``asked_nodes`` nodes, at present from the anchor, which is the
    measured count on several nodes with the most GPUs. The further measurement is one job, which is
    one run of the training, on ``halfway_nodes`` nodes, more than the anchor has. The prediction
    would then start from this job. The result is in seconds.
    """
    smallest_s = _smallest(measured).step_s
    anchor = _anchor(measured)
    scatter = _scatter_of_jobs(measured)
    # The job is assumed to take the step that is predicted for its nodes now. A prediction
    # extrapolates how much longer the anchor's step is than the one on the smallest count.
    halfway_s = float(
        scaling.step_s(smallest_s, anchor.step_s, halfway_nodes / anchor.nodes)
    )
    lower_s, upper_s = scaling.step_interval_s(
        smallest_s,
        halfway_s,
        asked_nodes / halfway_nodes,
        # A measured step that is slower than the one halfway makes the interval wider.
        slowest_s=_slowest_s(measured, anchor),
        # Jobs scatter halfway as on the counts that were measured.
        jobs_s=(halfway_s / (1 + scatter), halfway_s * (1 + scatter)),
    )
    return float(upper_s - lower_s)


def _halfway_nodes(anchor_nodes: int, asked_nodes: int) -> int | None:
    """Return the number of nodes halfway in doublings between two numbers.

    The result is a power of 2 times the nodes of the anchor, as users choose them, or None if no
    such number lies between the two. The number halfway is a choice, which no measurement
    supports: fewer nodes would be cheaper to measure.
    """
    doublings = math.log2(asked_nodes / anchor_nodes)
    # At least one doubling, because the anchor itself was measured.
    halfway = anchor_nodes * 2 ** max(1, round(doublings / 2))
    return halfway if halfway < asked_nodes else None


def _on_fixed_batch(
    measured: Sequence[Count], doubts: Sequence[_Doubt], *, has_samples: bool
) -> list[Finding]:
    """Return a warning if steps get shorter with more GPUs, as with a fixed batch of all GPUs.

    A fixed batch is divided among all GPUs, so that each computes less. The steps are those on the
    smallest count of GPUs and nodes, and on the anchor: of the ``measured`` counts on several
    nodes, the one with the most GPUs. ``doubts`` are the counts that are slower than a larger one
    by more than jobs scatter. With ``has_samples``, the samples per GPU are known to be equal, so
    that the batch is not fixed.
    """
    smallest = _smallest(measured)
    anchor = _anchor(measured)
    slow = {(doubt.slow.gpus, doubt.slow.nodes) for doubt in doubts}
    # The warning names the anchor. A doubt of the smallest count may be about another larger count,
    # so the anchor is compared as well.
    is_shorter = anchor.step_s < (1 - LEAST_SCATTER) * smallest.step_s
    if has_samples or not is_shorter or (smallest.gpus, smallest.nodes) not in slow:
        return []
    text = (
        f"a step on {_gpus(anchor.gpus)} is shorter than on {_gpus(smallest.gpus)}, as with a fixed batch "
        "of all GPUs, for which the prediction does not hold: check that each GPU has the same number "
        "of samples in all jobs, and give it in a column samples"
    )
    return [Finding("warning", text=text)]


def _on_factors_above_one(counts: Sequence[Count]) -> list[Finding]:
    """Return what a scaling factor above 1 means, if a count has one or its interval reaches it.

    ``counts`` are in ascending order of GPUs. The first of them is left out: its own factor is 1,
    and its interval has the jobs on this count, of which some are always above it.
    """
    # The factors of all other counts, and the ends of their intervals.
    factors = []
    for count in counts[1:]:
        factors.append(count.scaling_factor)
        if count.scaling_factor_interval is not None:
            factors += count.scaling_factor_interval
    # Factors are printed with two decimals, so a factor below 1.005 is not seen to be above 1.
    if max(factors, default=0.0) < 1.005:
        return []
    text = (
        "a scaling factor, or an end of its interval, is above 1, which is a step shorter than on the "
        "fewest GPUs. Steps differ by some percent from job to job, so this is no gain"
    )
    return [Finding("factor", text=text)]


def _on_factors_of_fewer_nodes(
    asked: Count, measured: Sequence[Count]
) -> list[Finding]:
    """Return why an interval may reach above the factor on fewer nodes, if it does.

    ``asked`` is the largest count of GPUs and nodes that the user asks for. It is compared with the
    nearest smaller count that was measured.
    """
    smaller, _ = _neighbours(measured, asked.gpus, asked.nodes)
    # Only a predicted count, which always has an interval, is compared, and only if a smaller count
    # was measured.
    if asked.measured or smaller is None or asked.scaling_factor_interval is None:
        return []
    _, highest = asked.scaling_factor_interval
    # Factors are printed with two decimals, so that a smaller difference would not be seen.
    if round(highest, 2) <= round(smaller.scaling_factor, 2):
        return []
    # The 24% are of the steps on which the rule of the interval was chosen
    # (`ddlkit.core.scaling.step_interval_s`).
    text = (
        f"the interval on {_where(asked, smaller)} reaches above the scaling factor on "
        f"{_where(smaller, asked)}, {smaller.scaling_factor:.2f}, because jobs scatter: in published "
        "trainings, 24% of the steps were shorter than on fewer nodes"
    )
    return [Finding("factor", text=text)]
