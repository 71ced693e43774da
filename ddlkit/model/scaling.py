"""Will a training scale to more nodes: from measured steps to a prediction with a verdict.

The laws are in `ddlkit.core.scaling`. This module decides which measurements a law is applied to, refuses
those that it cannot be applied to, and says what explains the loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core import scaling, units
from ddlkit.core.errors import Finding, UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import ddp
from ddlkit.core.workload import Workload
from ddlkit.model.node_costs import NodeCosts, facts_of, slowed

if TYPE_CHECKING:
    from pandas import DataFrame

HIDDEN_EVEN_ON_A_BAD_DAY = "hidden even on a bad day"
HIDDEN_ONLY_ON_A_QUIET_FABRIC = "hidden only on a quiet fabric"
COMMUNICATION_BOUND = "communication-bound"
NOT_KNOWN = "not known"

HIDDEN_SHARE = 0.05
"""Messages count as hidden if they lengthen a step by less than this share of it."""
LEAST_SCATTER = 0.02
"""Jobs count as different only if their steps differ by more than this share."""
LEAST_WEAK_STEP = 0.6
"""With as many samples per GPU, no step is shorter than this share of one on fewer GPUs."""
DIGITS_OF_CHANCE = 4
"""The times of two jobs may be equal by chance if they have no more digits than these."""
LARGEST_BUCKET_BYTES = 25 * units.MIB
"""The cap of PyTorch's buckets, which is taken if nothing is known of the gradients."""
SHOWN_SIZES = tuple(2**power for power in range(20, 27))
"""The sizes of messages whose predicted times a result lists: 1 to 64 MiB."""

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
        The fastest and the slowest job, None if there was one job, or the nominal 90% interval of a
        prediction.
    scaling_factor : float
        The step on the smallest measured placement over this one.
    scaling_factor_interval : pair of float or None
        The scaling factors of the slowest and the fastest step in ``interval_s``.
    measured : bool
        Whether the step was measured.
    jobs : int
        How many jobs measured it.
    messages_s, messages_bad_day_s : float or None
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
    messages_s: float | None = None
    messages_bad_day_s: float | None = None


@dataclass(frozen=True)
class Hidden:
    """The largest measured count, predicted from the smaller ones.

    Attributes
    ----------
    gpus, nodes : int
        The numbers of GPUs and of nodes.
    measured_s, predicted_s : float
        The step in seconds.
    error : float
        The relative error of the prediction.
    """

    gpus: int
    nodes: int
    measured_s: float
    predicted_s: float
    error: float


@dataclass(frozen=True)
class Explained:
    """What lengthens the step on the largest measured count.

    Attributes
    ----------
    gpus, nodes : int
        The numbers of GPUs and of nodes.
    loss_s : float
        How much longer the step is than on the smallest placement, in seconds. 0 if it is not longer.
    messages_s : float or None
        How much of the loss messages explain on a quiet network, in seconds. None if it is not known.
    messages_at_most_s : float or None
        How much messages explain at most: their time on a bad day, or that of NCCL's kernels.
    scatter_s : float or None
        How much longer the slowest of all ranks would take than the mean if every rank drew its
        step from the single steps of the smallest placement. None without single steps.
    rest_s : float
        The loss that neither messages at most nor scatter explain: waiting, or input.
    """

    gpus: int
    nodes: int
    loss_s: float
    messages_s: float | None
    messages_at_most_s: float | None
    scatter_s: float | None
    rest_s: float


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
        "yes" or "no" if the whole interval of the scaling factor is above or below the wished
        factor, or else "open".
    """

    factor: float
    nodes: int
    answer: str


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
        All measured and predicted counts, in the order of their nodes and GPUs.
    hidden : Hidden or None
        The largest measured count, predicted from the others. None if it is the only one of
        several nodes.
    explained : Explained
        What lengthens the step on the largest measured count.
    verdict : str
        Whether messages alone are hidden on the largest count: "hidden even on a bad day", "hidden
        only on a quiet fabric", "communication-bound" or "not known".
    wish : Wish or None
        Whether the wished factor is met.
    findings : tuple of Finding
        What the user should know of the measurements, what would help, and what to measure.
    collectives : tuple of MessageTime
        Times of messages on the largest count.
    """

    counts: tuple[Count, ...]
    hidden: Hidden | None
    explained: Explained
    verdict: str
    wish: Wish | None
    findings: tuple[Finding, ...]
    collectives: tuple[MessageTime, ...] = ()

    @property
    def anchor(self) -> Count:
        """Return the largest measured count, from which others are predicted."""
        return [count for count in self.counts if count.measured][-1]

    @property
    def base(self) -> Count:
        """Return the measured count from which the loss of a prediction is counted."""
        return _base([count for count in self.counts if count.measured], self.anchor)

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
        result["findings"] = [
            {"what": finding.what, "text": finding.text} for finding in self.findings
        ]
        return result


@dataclass(frozen=True)
class _Jobs:
    """The mean steps of the jobs of one count, and the single steps if they are known."""

    gpus: int
    nodes: int
    means_s: tuple[float, ...]
    steps_s: tuple[float, ...]

    @property
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
        ``step``, ``samples``, ``nccl`` and ``settings``, as `ddlkit.read_steps` returns them.
    nodes : int or sequence of int
        The numbers of nodes to predict for. Each has as many GPUs as a node of the largest
        measured count.
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
        A wished scaling factor on the largest number of nodes, between 0 and 1.

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
    The prediction is `ddlkit.core.scaling.step_s`, from the largest measured count and
    one node, or the smallest placement if no whole node was measured. If rows are single
    steps, the first step of each job is left out, because it includes the launch.

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
    (0.836, 'yes')
    """
    targets = sorted({int(n) for n in np.atleast_1d(nodes)})
    _refuse_wrong_choices(targets, wish, kernel_steps)
    findings: list[Finding] = []
    jobs = _jobs_of(steps, findings)
    measured = _measured_counts(jobs)
    # The law of a step extrapolates the loss between these two counts.
    anchor = measured[-1]
    _refuse_unpredictable(measured, targets)
    base = _base(measured, anchor)
    findings += _slower_than_larger(jobs)
    findings += _known_of_software(steps, collectives)

    per_node = anchor.gpus // anchor.nodes
    known = {(count.gpus, count.nodes) for count in measured}
    predicted = [
        _predicted(measured[0], base, anchor, target)
        for target in targets
        if (target * per_node, target) not in known
    ]
    counts = sorted(
        [*measured, *predicted], key=lambda count: (count.nodes, count.gpus)
    )
    costs = None
    if collectives is not None:
        costs = NodeCosts.of(collectives).with_per_node(per_node)
        _refuse_large_sizes(costs, workload)
        _refuse_far_collectives(costs, counts[-1].nodes)
    counts = [_with_messages(count, measured[0], workload, costs) for count in counts]
    # The anchor is now known with its step if nothing but messages lengthened it.
    anchor = next(
        count
        for count in counts
        if (count.gpus, count.nodes) == (anchor.gpus, anchor.nodes)
    )

    explained = _explained(jobs, anchor, kernels, kernel_steps)
    asked = _largest_asked(counts, targets, per_node)
    findings += _advice(explained, measured[0], base, anchor, asked, jobs)
    return Scaling(
        counts=tuple(counts),
        hidden=_hidden(measured),
        explained=explained,
        verdict=_verdict(asked),
        wish=_wish(wish, asked),
        findings=tuple(findings),
        collectives=_message_times(costs, asked),
    )


# -- what is measured ----------------------------------------------------------------


def _refuse_wrong_choices(
    targets: Sequence[int], wish: float | None, kernel_steps: int
) -> None:
    """Raise UserError for numbers that are out of their range.

    ``targets`` are the numbers of nodes to predict for, in ascending order. ``wish`` is the
    scaling factor that the user wishes for. ``kernel_steps`` is in how many steps the traced
    kernels ran.
    """
    if not targets or targets[0] < 1:
        raise UserError("nodes: give numbers of nodes of at least 1")
    if wish is not None and not 0 < wish < 1:
        raise UserError(f"wish is {wish:g}: give a scaling factor between 0 and 1")
    if kernel_steps < 1:
        raise UserError(f"kernel_steps is {kernel_steps}: give at least 1")


_JOB = ("nodes", "gpus", "job")
"""The columns that distinguish jobs."""


def _jobs_of(steps: DataFrame, findings: list[Finding]) -> list[_Jobs]:
    """Return the jobs of each count, in the order of nodes and GPUs.

    What was left out of the steps is added to ``findings``.
    """
    for column in ("gpus", "nodes", "job", "step_s"):
        if column not in steps:
            raise UserError(f"the steps have no column {column}: add it")
    if not len(steps):
        raise UserError("there are no steps: measure one GPU and several nodes")
    is_right = np.isfinite(steps["step_s"]) & (steps["step_s"] > 0)
    if not is_right.all():
        raise UserError("the column step_s must have times above zero")
    # A part of a node may be written as no node.
    steps = steps.reset_index(drop=True)
    steps = steps.assign(nodes=steps["nodes"].clip(lower=1))
    steps = _of_equal_samples(steps, findings)
    steps = _without_launches(steps, findings)
    _refuse_copies(steps, findings)
    jobs = []
    for key, rows in steps.groupby(["nodes", "gpus"]):
        nodes, gpus = key
        means_s = tuple(rows.groupby("job")["step_s"].mean())
        single_s = tuple(rows.loc[rows["is_single"], "step_s"])
        jobs.append(_Jobs(int(gpus), int(nodes), means_s, single_s))
    return jobs


def _without_launches(steps: DataFrame, findings: list[Finding]) -> DataFrame:
    """Return the steps without the launch of each job, and with a new column ``is_single``.

    A job of several rows has single steps, and its first step includes the launch. A job of one
    row has its mean step. ``is_single`` says whether a row is a single step. What was left out is
    added to ``findings``.
    """
    order = [*_JOB, "step"] if "step" in steps else [*_JOB]
    # A stable sort keeps the rows of a job in the order of the file if there is no column step.
    steps = steps.sort_values(order, kind="stable")
    by_job = steps.groupby([*_JOB])["step_s"]
    steps = steps.assign(is_single=by_job.transform("size") > 1)
    is_launch = steps["is_single"] & (by_job.cumcount() == 0)
    if is_launch.any():
        text = (
            f"the first step of {int(is_launch.sum())} jobs with single steps is left out, "
            "because it includes the launch"
        )
        findings.append(Finding("launch", (), text))
    return steps[~is_launch]


def _of_equal_samples(steps: DataFrame, findings: list[Finding]) -> DataFrame:
    """Return the steps in which each GPU computes the most frequent number of samples.

    Raises UserError if this number is not the same for all counts. The column ``samples`` has the
    samples of one GPU, or those of all GPUs. What was left out, and what is not known, is added to
    ``findings``.
    """
    if "samples" not in steps:
        findings.append(
            Finding("samples", (), "samples per GPU: not known, taken as equal")
        )
        return steps
    samples = steps["samples"]
    usual = _usual_samples(steps, samples)
    if usual.nunique() > 1:
        # The samples of one GPU are the same on all counts, so these may be those of all GPUs.
        samples = samples / steps["gpus"]
        usual_per_gpu = _usual_samples(steps, samples)
        if usual_per_gpu.nunique() > 1:
            _, gpus_with_fewest = usual.idxmin()
            _, gpus_with_most = usual.idxmax()
            raise UserError(
                f"the samples per GPU change: {usual.min():g} samples with "
                f"{_gpus(gpus_with_fewest)}, {usual.max():g} with {gpus_with_most}: "
                "measure all counts with as many samples per GPU"
            )
        usual = usual_per_gpu
    # All counts have the same usual number.
    is_usual = samples == usual.iloc[0]
    if not is_usual.all():
        text = f"{int((~is_usual).sum())} steps with another number of samples are left out"
        findings.append(Finding("samples", (), text))
    return steps[is_usual]


def _usual_samples(steps: DataFrame, samples: Any) -> Any:
    """Return the most frequent number of samples of each count, by its nodes and GPUs.

    ``samples`` is a series with a number for each row of ``steps``.
    """
    by_count = samples.groupby([steps["nodes"], steps["gpus"]])
    return by_count.agg(lambda values: values.mode().iloc[-1])


def _refuse_copies(steps: DataFrame, findings: list[Finding]) -> None:
    """Raise UserError if two jobs have the same times to the last digit.

    Times of few digits may be equal by chance. For these a warning is added to ``findings``.
    """
    seen: dict[tuple[float, ...], tuple[int, Any]] = {}
    for (_, gpus, job), times_s in steps.groupby([*_JOB])["step_s"]:
        times = tuple(times_s)
        # A copy can stand under another number of GPUs.
        if times not in seen:
            seen[times] = (gpus, job)
            continue
        first_gpus, first_job = seen[times]
        problem = f"the jobs {first_job} and {job} on {_gpus(gpus)} have equal times"
        # Times that repeat within a job make equality by chance no less likely.
        n_digits = sum(_digits(time_s) for time_s in set(times))
        if n_digits > DIGITS_OF_CHANCE:
            raise UserError(
                f"{problem}, identical to the digit: one is a copy, so leave it out, or measure "
                "the job again"
            )
        # Rounded steps of different counts are often equal.
        if gpus == first_gpus:
            findings.append(Finding("warning", (), f"{problem}: one may be a copy"))


def _counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "1 node" and "8 GPUs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gpus(number: int) -> str:
    return _counted(number, "GPU")


def _nodes(number: int) -> str:
    return _counted(number, "node")


def _digits(seconds: float) -> int:
    """Return how many digits a time has, without zeros at its beginning and end."""
    return len(f"{seconds:.15g}".replace(".", "").strip("0"))


def _measured_counts(jobs: Sequence[_Jobs]) -> list[Count]:
    """Return the measured counts. The first one defines the scaling factor."""
    one_s = jobs[0].step_s
    counts = []
    for own in jobs:
        interval_s = None
        factors = None
        if len(own.means_s) > 1:
            interval_s = (min(own.means_s), max(own.means_s))
            factors = (one_s / interval_s[1], one_s / interval_s[0])
        counts.append(
            Count(
                gpus=own.gpus,
                nodes=own.nodes,
                step_s=own.step_s,
                interval_s=interval_s,
                scaling_factor=one_s / own.step_s,
                scaling_factor_interval=factors,
                measured=True,
                jobs=len(own.means_s),
            )
        )
    return counts


def _refuse_unpredictable(measured: Sequence[Count], targets: Sequence[int]) -> None:
    """Raise UserError unless the counts allow a prediction for all targets."""
    anchor = measured[-1]
    if len(measured) == 1:
        verb = "was" if anchor.gpus == 1 else "were"
        missing = "one GPU or one node" if anchor.nodes > 1 else "two nodes or more"
        raise UserError(
            f"only {_gpus(anchor.gpus)} on {_nodes(anchor.nodes)} {verb} measured: measure "
            f"{missing} as well"
        )
    if measured[0].nodes > 1:
        # What the first nodes already lose would count as none.
        raise UserError(
            f"the smallest count has {_nodes(measured[0].nodes)}: measure one GPU or one "
            "node as well"
        )
    if anchor.nodes == 1:
        raise UserError(
            f"only counts on one node were measured, up to {_gpus(anchor.gpus)}: measure two "
            "nodes or more"
        )
    if anchor.gpus % anchor.nodes:
        raise UserError(
            f"the largest count has {_gpus(anchor.gpus)} on {_nodes(anchor.nodes)}: measure one with "
            "as many GPUs on each node"
        )
    one = measured[0]
    if anchor.step_s < LEAST_WEAK_STEP * one.step_s:
        raise UserError(
            f"a step on {_gpus(anchor.gpus)} takes {units.format_seconds(anchor.step_s)}, much less "
            f"than {units.format_seconds(one.step_s)} on {one.gpus}, as with a fixed batch of all GPUs: "
            "measure all counts with as many samples per GPU"
        )
    most = scaling.MOST_TIMES * anchor.nodes
    if targets[-1] > most:
        needed = math.ceil(targets[-1] / scaling.MOST_TIMES)
        raise UserError(
            f"{targets[-1]} nodes are more than {scaling.MOST_TIMES:g} times the {anchor.nodes} "
            f"nodes of the largest measured count: measure {needed} nodes or more"
        )


def _base(measured: Sequence[Count], anchor: Count) -> Count:
    """Return the count from which a loss is counted: a whole node, or the smallest placement.

    The whole node has as many GPUs as each node of the anchor. The GPUs of a node slow each other
    down. More nodes do not change this, so it is no part of the loss.
    """
    per_node = anchor.gpus // anchor.nodes
    for count in measured:
        if (count.nodes, count.gpus) == (1, per_node):
            return count
    return measured[0]


def _slower_than_larger(jobs: Sequence[_Jobs]) -> list[Finding]:
    """Return a finding for each count that is slower than some count with more GPUs.

    Differences count only if they are larger than the scatter of the jobs of any count.
    """
    scatter = max(LEAST_SCATTER, *(own.scatter for own in jobs))
    findings = []
    for position, own in enumerate(jobs):
        larger = [other for other in jobs[position + 1 :] if other.gpus > own.gpus]
        if not larger:
            continue
        fastest = min(larger, key=lambda other: other.step_s)
        if own.step_s > fastest.step_s * (1 + scatter):
            text = (
                f"a step on {_gpus(own.gpus)} takes {units.format_seconds(own.step_s)}, longer than on "
                f"{_gpus(fastest.gpus)} ({units.format_seconds(fastest.step_s)}) by more than jobs "
                f"scatter: repeat the measurement on {_gpus(own.gpus)}"
            )
            findings.append(Finding("warning", (), text))
    return findings


def _known_of_software(
    steps: DataFrame, collectives: DataFrame | None
) -> list[Finding]:
    """Return findings on versions of NCCL and settings that are not known.

    Raises UserError if the training and the tables of collectives have different ones.
    """
    if collectives is None:
        return []
    findings = []
    for column, name in (("nccl", "version of NCCL"), ("settings", "settings")):
        of_steps = facts_of(steps, column)
        of_tables = facts_of(collectives, column)
        if not of_steps or not of_tables:
            text = f"whether tables and training have the same {name}: not known"
            findings.append(Finding(column, (), text))
            continue
        # A suffix such as "+cuda12.3" makes no other version. Settings stay as they are.
        if {*map(_version, of_steps)} != {*map(_version, of_tables)}:
            raise UserError(
                f"the {name} of the training is {_listed(of_steps)}, and of the tables "
                f"{_listed(of_tables)}: measure the tables as the training runs"
            )
    return findings


def _version(text: str) -> str:
    """Return a version without what follows its numbers, as in "2.19.3+cuda12.3"."""
    match = re.match(r"\s*v?(?P<numbers>\d+(?:\.\d+)+)", text)
    return match["numbers"] if match else text.strip()


def _listed(values: set[Any]) -> str:
    return ", ".join(sorted(map(str, values)))


# -- predictions ---------------------------------------------------------------------


def _predicted(one: Count, base: Count, anchor: Count, nodes: int) -> Count:
    """Return the predicted step on a number of nodes, each with the GPUs of the anchor's.

    ``one`` is the smallest placement, which defines the scaling factor.
    """
    ratio = nodes / anchor.nodes
    step_s = float(scaling.step_s(base.step_s, anchor.step_s, ratio))
    lower_s, upper_s = scaling.step_interval_s(base.step_s, anchor.step_s, ratio)
    interval_s = (float(lower_s), float(upper_s))
    return Count(
        gpus=nodes * (anchor.gpus // anchor.nodes),
        nodes=nodes,
        step_s=step_s,
        interval_s=interval_s,
        scaling_factor=one.step_s / step_s,
        scaling_factor_interval=(
            one.step_s / interval_s[1],
            one.step_s / interval_s[0],
        ),
        measured=False,
    )


def _hidden(measured: Sequence[Count]) -> Hidden | None:
    """Return the largest measured count, as predicted while it is hidden from the law.

    The result is None if the smaller counts do not allow a prediction.
    """
    *smaller, largest = measured
    anchors = [count for count in smaller if 1 < count.nodes < largest.nodes]
    if not anchors:
        return None
    anchor = anchors[-1]
    base = _base(smaller, anchor)
    if base == anchor:
        # It is the smallest placement itself, so that no loss was measured.
        return None
    ratio = largest.nodes / anchor.nodes
    predicted_s = float(scaling.step_s(base.step_s, anchor.step_s, ratio))
    error = predicted_s / largest.step_s - 1
    return Hidden(
        gpus=largest.gpus,
        nodes=largest.nodes,
        measured_s=largest.step_s,
        predicted_s=predicted_s,
        error=error,
    )


def _refuse_large_sizes(costs: NodeCosts, workload: Workload | None) -> None:
    """Raise UserError if the smallest size of a table is above the largest bucket.

    Nothing would be known of the messages of the training then.
    """
    largest_bytes = float(LARGEST_BUCKET_BYTES)
    bucket = "PyTorch's largest bucket by default"
    if workload is not None:
        largest_bytes = float(ddp(workload).group_bytes(workload).max())
        bucket = "the largest bucket"
    for table in costs.tables:
        if table.sizes[0] > largest_bytes:
            raise UserError(
                f"the table of {table.collective} on {_nodes(table.nodes)} begins at "
                f"{units.format_bytes(table.sizes[0])}, above {bucket} of "
                f"{units.format_bytes(largest_bytes)}: measure sizes down to 1 MiB"
            )


def _refuse_far_collectives(costs: NodeCosts, nodes: int) -> None:
    """Raise UserError if some collective cannot be predicted for a number of nodes."""
    for collective in costs.collectives:
        costs.anchor(collective, nodes)  # raises the error


def _with_messages(
    count: Count, one: Count, workload: Workload | None, costs: NodeCosts | None
) -> Count:
    """Return a count with the step that it would have if nothing but messages lengthened it.

    The count is returned unchanged if this is not known, or if one GPU sends no messages.
    """
    if workload is None or costs is None or "all_reduce" not in costs.collectives:
        return count
    if count.gpus == 1:
        return count
    # Without messages, an iteration takes as long as on the smallest placement.
    scaled = workload.scaled(one.step_s / workload.compute_s)
    cost = costs.cost("all_reduce", count.nodes, count.gpus)
    iteration = Iteration(scaled, ddp(scaled), cost)
    bad_cost = slowed(cost, scaling.bad_day_factor(count.nodes))
    bad_iteration = replace(iteration, cost=bad_cost)
    return replace(
        count,
        messages_s=iteration.prediction.iteration_s,
        messages_bad_day_s=bad_iteration.prediction.iteration_s,
    )


def _message_times(costs: NodeCosts | None, target: Count) -> tuple[MessageTime, ...]:
    """Return the times of messages of `SHOWN_SIZES` on a count, where they are known."""
    if costs is None:
        return ()
    factor = scaling.bad_day_factor(target.nodes)
    times = []
    for collective in costs.collectives:
        cost = costs.cost(collective, target.nodes, target.gpus)
        for n_bytes in SHOWN_SIZES:
            if cost.bytes[0] <= n_bytes <= cost.bytes[-1]:
                seconds = float(cost(n_bytes))
                times.append(
                    MessageTime(
                        collective=collective,
                        nodes=target.nodes,
                        gpus=target.gpus,
                        bytes=n_bytes,
                        seconds=seconds,
                        bad_day_s=factor * seconds,
                    )
                )
    return tuple(times)


# -- what it means -------------------------------------------------------------------


def _largest_asked(
    counts: Sequence[Count], targets: Sequence[int], per_node: int
) -> Count:
    """Return the count of the largest number of nodes that the user asks for.

    ``targets`` are these numbers in ascending order, and ``per_node`` is how many GPUs a node has.
    """
    asked = (targets[-1] * per_node, targets[-1])
    return next(count for count in counts if (count.gpus, count.nodes) == asked)


def _explained(
    jobs: Sequence[_Jobs], anchor: Count, kernels: DataFrame | None, kernel_steps: int
) -> Explained:
    """Return what lengthens the step on the largest measured count, the anchor."""
    one = jobs[0]
    loss_s = max(0.0, anchor.step_s - one.step_s)
    messages_s = None
    at_most_s = None
    if anchor.messages_s is not None and anchor.messages_bad_day_s is not None:
        # Rounding may leave less than nothing.
        messages_s = max(0.0, anchor.messages_s - one.step_s)
        at_most_s = max(0.0, anchor.messages_bad_day_s - one.step_s)
    elif kernels is not None:
        # Kernels of NCCL also wait for other ranks and run beside compute, so that messages
        # lengthen the step by less than their time.
        is_nccl = kernels["collective"] != ""
        at_most_s = float(kernels.loc[is_nccl, "total_s"].sum()) / kernel_steps
    scatter_s = None
    if len(one.steps_s) > 1:
        slowest_s = scaling.expected_maximum_s(one.steps_s, anchor.gpus)
        scatter_s = slowest_s - float(np.mean(one.steps_s))
    explained_s = (at_most_s or 0.0) + (scatter_s or 0.0)
    rest_s = max(0.0, loss_s - explained_s)
    return Explained(
        gpus=anchor.gpus,
        nodes=anchor.nodes,
        loss_s=loss_s,
        messages_s=messages_s,
        messages_at_most_s=at_most_s,
        scatter_s=scatter_s,
        rest_s=rest_s,
    )


def _verdict(asked: Count) -> str:
    """Return whether messages are hidden behind the compute of a count."""
    quiet_s = asked.messages_s
    bad_day_s = asked.messages_bad_day_s
    if quiet_s is None or bad_day_s is None:
        return NOT_KNOWN
    # The step on the smallest placement, from the definition of the scaling factor.
    compute_s = asked.scaling_factor * asked.step_s
    if bad_day_s <= compute_s * (1 + HIDDEN_SHARE):
        return HIDDEN_EVEN_ON_A_BAD_DAY
    if quiet_s <= compute_s * (1 + HIDDEN_SHARE):
        return HIDDEN_ONLY_ON_A_QUIET_FABRIC
    return COMMUNICATION_BOUND


def _wish(factor: float | None, asked: Count) -> Wish | None:
    """Return whether a count meets a wished scaling factor, None if none is wished."""
    if factor is None:
        return None
    lowest = asked.scaling_factor
    highest = asked.scaling_factor
    if asked.scaling_factor_interval is not None:
        lowest, highest = asked.scaling_factor_interval
    answer = "open"
    if lowest >= factor:
        answer = "yes"
    elif highest < factor:
        answer = "no"
    return Wish(factor, asked.nodes, answer)


def _advice(
    explained: Explained,
    one: Count,
    base: Count,
    anchor: Count,
    asked: Count,
    jobs: Sequence[_Jobs],
) -> list[Finding]:
    """Return what would help, what would not, and what to measure next.

    ``one`` is the smallest placement, ``base`` the count from which the loss is counted, ``anchor``
    the largest measured count, and ``asked`` the largest one that the user asks for.
    """
    findings = []
    loss_s = asked.step_s - one.step_s
    if explained.messages_at_most_s is None:
        text = (
            "whether messages explain the loss: not known: give --collectives and a --profile, "
            "or --kernels"
        )
        findings.append(Finding("messages", (), text))
    elif explained.loss_s > 0:
        findings.append(_on_messages(explained))
    if loss_s > 0:
        # Two batches compute for two steps of the smallest placement, and lose once.
        twice = 2 * one.step_s / (2 * one.step_s + loss_s)
        text = (
            "helps: accumulating two batches before each update. If every step loses the "
            "same time, however many batches it has, this halves the loss per sample: "
            f"scaling factor {twice:.2f} on {_nodes(asked.nodes)} instead of "
            f"{asked.scaling_factor:.2f}"
        )
        findings.append(Finding("helps", (), text))
    if not asked.measured:
        findings.append(_next_measurement(base, anchor, asked, jobs[-1]))
    return findings


def _on_messages(explained: Explained) -> Finding:
    """Return whether a faster network or other buckets would help."""
    at_most_s = explained.messages_at_most_s or 0.0
    share = at_most_s / explained.loss_s
    facts = (
        f"messages explain at most {units.format_seconds(at_most_s)} of the "
        f"{units.format_seconds(explained.loss_s)} that a step on {_gpus(explained.gpus)} loses"
    )
    if share < 0.5:
        text = (
            f"does not help: a faster network or other buckets, because {facts}; look for ranks "
            "that wait for their input or for one another: ddlkit explain finds them in the "
            "traces of all ranks"
        )
        return Finding("does not help", (), text)
    text = f"may help: a faster network or other buckets, because {facts}"
    return Finding("helps", (), text)


def _next_measurement(base: Count, anchor: Count, asked: Count, jobs: _Jobs) -> Finding:
    """Return which measurement would narrow the interval of a predicted count most.

    ``jobs`` are those of the anchor.
    """
    least_s, most_s = asked.interval_s or (asked.step_s, asked.step_s)
    width_s = most_s - least_s
    # Jobs of the anchor that differ by half of this width are the largest uncertainty.
    if jobs.scatter > LEAST_SCATTER and jobs.scatter * anchor.step_s > width_s / 4:
        text = (
            f"measure next: more jobs on {_nodes(anchor.nodes)}, whose steps differ by "
            f"{2 * jobs.scatter:.0%}"
        )
        return Finding("measure", (), text)
    # The count halfway in doublings is the cheapest one that is worth its job.
    halfway = max(anchor.nodes + 1, round(math.sqrt(anchor.nodes * asked.nodes)))
    if halfway >= asked.nodes:
        text = f"measure next: one job on {_nodes(asked.nodes)}, as no count between would help"
        return Finding("measure", (), text)
    # If that count measures what is predicted, it becomes the anchor.
    halfway_s = scaling.step_s(base.step_s, anchor.step_s, halfway / anchor.nodes)
    lower_s, upper_s = scaling.step_interval_s(
        base.step_s, halfway_s, asked.nodes / halfway
    )
    share_now = width_s / 2 / asked.step_s
    share_then = float(upper_s - lower_s) / 2 / asked.step_s
    text = (
        f"measure next: one job on {_nodes(halfway)}: the interval on {_nodes(asked.nodes)} would narrow "
        f"from \u00b1{share_now:.0%} to about \u00b1{share_then:.0%}"
    )
    return Finding("measure", (), text)
