"""Curves of step times over nodes that others published, and how well they are predicted.

The law of `ddlkit.core.scaling` and its interval were chosen with the curves of `sets` in
sight. The sources of `LATER` were opened after both had been committed. Three of their curves
are not blind all the same, and are judged apart (`NOT_BLIND`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from ddlkit.core import scaling
from ddlkit.core.errors import UserError
from ddlkit.formats.node_tables import COLUMNS
from ddlkit.model.node_costs import NodeCosts
from ddlkit.model.scaling import SINGLE_JOB_SHARE, Scaling, scale
from workbook.validate.accuracy import Goal, goals
from workbook.validate.clusters import EXTERNAL, pollux_iterations, table

LATER = tuple(
    EXTERNAL / name
    for name in ("internevo", "tensorflow-daint", "ultrascale", "horovod-p3")
)
"""The sources that were opened after the law had been committed."""
NOT_BLIND = {
    ("ultrascale", "data parallel"): "its numbers had been seen at the first test",
    ("tensorflow-daint", "p2.8xlarge, synthetic"): "machine of a source in sight",
    ("tensorflow-daint", "p2.8xlarge, ImageNet"): "machine of a source in sight",
}
"""The curves of `LATER` that test nothing, by source and name, each with the reason.

The source in sight is `tensorflow-ec2`: the same machine and network, InceptionV3 with as many
images per GPU, and the same program.
"""
FORMERLY_BLIND = EXTERNAL / "tensorflow-ec2"
"""A source that refuted the first interval, and is now in sight."""
MOST_TIMES = 8
"""The goals are about steps on at most so many times the nodes of the anchor.

An anchor is the measured count of nodes and GPUs from which a step is predicted."""
WISH = 0.8
"""The wished scaling factor of the goals."""
RECONSTRUCTED_S = 1.226
"""Anemoi's mean step on 100 nodes if all steps had whole batches, as computed from its steps."""


# -- curves --------------------------------------------------------------------------


def anemoi_steps(statistic: str = "mean") -> pd.DataFrame:
    """Return the steps of Anemoi's weather model on 1 to 400 GPUs.

    Parameters
    ----------
    statistic : {"mean", "median"}, optional
        Whether the mean or the median of the steps of a job is taken. The mean leaves out the
        longest step, in which the job is launched.

    Returns
    -------
    DataFrame
        One row for each job, that is, each run of the training. The columns are ``gpus``,
        ``nodes``, ``job`` and ``step_s`` (seconds).

    Notes
    -----
    On 100 nodes, 8 of 24 steps had half a batch. In place of their mean, RECONSTRUCTED_S is
    taken, the mean as if all steps had whole batches.
    """
    column = {"mean": "step_mean_without_longest_ms", "median": "step_median_ms"}
    frame = table(EXTERNAL / "anemoi" / "steps.csv")
    frame["step_s"] = frame[column[statistic]] / 1e3
    if statistic == "mean":
        frame.loc[frame["nodes"] == 100, "step_s"] = RECONSTRUCTED_S
    return frame[["gpus", "nodes", "job", "step_s"]]


def abci_steps(gpu: str) -> pd.DataFrame:
    """Return the steps of ResNet-50 on ABCI, from the times of whole trainings.

    Parameters
    ----------
    gpu : {"A100", "V100"}
        The GPUs.

    Returns
    -------
    DataFrame
        The columns of `anemoi_steps`, with a row for each training. ``step_s`` is
        proportional to a step, not a step itself.

    Notes
    -----
    All trainings process the same number of samples, with the same number per GPU in a step.
    A training on n nodes therefore has 1/n of the steps of one node, and its time multiplied
    by n is proportional to a step.
    """
    frame = table(EXTERNAL / "abci" / "training.csv")
    frame = frame[frame["device"] == gpu]
    per_node = {"A100": 8, "V100": 4}[gpu]
    return pd.DataFrame(
        {
            "gpus": per_node * frame["nodes"],
            "nodes": frame["nodes"],
            "job": "training",
            "step_s": frame["training_s"] * frame["nodes"],
        }
    )


def pollux_curves(network: str) -> dict[str, pd.DataFrame]:
    """Return the steps of a network of Pollux, by GPUs per node and batch.

    Parameters
    ----------
    network : str
        The name of the network in the files of Pollux.

    Returns
    -------
    dict of str to DataFrame
        By a name such as "2 a node, batch 20", a table with the columns of `anemoi_steps`. It
        has the step on one GPU, and those of all placements with this number of GPUs on each
        node.
    """
    files = [
        EXTERNAL / "pollux" / f"{network}-{kind}.csv.gz"
        for kind in ("placements", "scalability")
    ]
    frame = pd.concat([pollux_iterations(path) for path in files], ignore_index=True)
    frame["per_node"] = frame["ranks"] / frame["nodes"]
    # Only rows with the same number of GPUs on each node are kept. A placement has a digit for
    # each node, and one such as "1124" is uneven.
    has_equal_digits = frame["placement"].map(lambda text: len({*text}) <= 1)
    # Rows of the file without placements have "", whose digits count as equal. They are uneven
    # if their number of GPUs on a node is a fraction.
    has_whole_number = frame["per_node"] % 1 == 0
    frame = frame[has_equal_digits & has_whole_number]
    columns = {"ranks": "gpus", "iteration_s": "step_s"}
    # On a curve, each count of nodes and GPUs has one row, and so one job. The jobs of different
    # counts may have the same name.
    frame = frame.rename(columns=columns).assign(job="run")
    curves = {}
    for (per_node, batch), rows in frame.groupby(["per_node", "batch"]):
        one_gpu = frame[(frame["gpus"] == 1) & (frame["batch"] == batch)]
        # Where nodes have one GPU each, the single GPU is among the rows already.
        steps = pd.concat([one_gpu, rows]).drop_duplicates(["gpus", "nodes"])
        curves[f"{per_node:g} a node, batch {batch}"] = steps[
            ["gpus", "nodes", "job", "step_s"]
        ]
    return curves


def published_curves(source: Path) -> dict[str, pd.DataFrame]:
    """Return the curves of a source that publishes rates.

    Parameters
    ----------
    source : Path
        The folder of the source, such as one of `LATER`. Its file ``rates.csv`` has one row for
        each curve and number of GPUs. The columns are ``curve``, ``gpus``, ``nodes``,
        ``samples_per_gpu`` (in a step) and ``samples_per_s`` (of all GPUs).

    Returns
    -------
    dict of str to DataFrame
        Tables with the columns of `anemoi_steps`, by the names of the curves.
    """
    frame = table(source / "rates.csv")
    samples = frame["gpus"] * frame["samples_per_gpu"]
    # On a curve, each number of GPUs has one row, and so one job. The jobs of different numbers
    # may have the same name.
    frame = frame.assign(step_s=samples / frame["samples_per_s"], job="run")
    columns = ["gpus", "nodes", "job", "step_s"]
    return {str(name): rows[columns] for name, rows in frame.groupby("curve")}


@cache
def sets() -> dict[str, dict[str, pd.DataFrame]]:
    """Return the eleven sets of curves on which the law was chosen, by name.

    The law (`ddlkit.core.scaling.step_s`) predicts steps on more nodes. It was chosen, with the
    interval of its predictions, while these curves were in sight.

    Returns
    -------
    dict of str to dict of str to DataFrame
        The curves of each set by name, with steps as `anemoi_steps` returns them. The only
        curve of a set has the name "".
    """
    chosen_on = {
        "Anemoi, mean": {"": anemoi_steps("mean")},
        "Anemoi, median": {"": anemoi_steps("median")},
        "ABCI, A100": {"": abci_steps("A100")},
        "ABCI, V100": {"": abci_steps("V100")},
    }
    for network in ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"):
        chosen_on[f"Pollux, {network}"] = pollux_curves(network)
    # Nobody had seen these curves when the first interval was tested on them, and failed. They
    # were in sight when the present interval was chosen.
    chosen_on["Amazon EC2"] = published_curves(FORMERLY_BLIND)
    return chosen_on


# -- predictions ---------------------------------------------------------------------


def cases(curves: Mapping[str, pd.DataFrame], most_times: float) -> pd.DataFrame:
    """Return the steps of larger counts as predicted from smaller ones, and their errors.

    A count is a number of nodes with a number of GPUs. An anchor is a count of several nodes
    whose measured step the law extrapolates to larger counts. A wish asks whether the scaling
    factor, the step of the smallest count divided by that of the larger one, is at least WISH.

    Parameters
    ----------
    curves : mapping of str to DataFrame
        Tables of steps, as `anemoi_steps` returns them, by the name of the curve.
    most_times : float
        Counts of at most so many times the nodes of the anchor are predicted.

    Returns
    -------
    DataFrame
        One row for each curve, anchor of at least two nodes, and larger count. The columns are

        - ``error``, ``factor_error``, ``inside``, ``half`` and ``loss``, as the comment on
          ``scaling_steps`` in data/goals.yml explains them,
        - ``curve``, ``anchor`` (its nodes), ``nodes`` (to predict for), ``measured_s`` and
          ``predicted_s``,
        - the relative error of each rival law, under its name,
        - ``answered``, whether `ddlkit scale` gave the answer yes or no to the wish, by the rule
          of the time when the goals were tested, which used the interval alone,
        - ``right``, whether this answer was right,
        - ``answered_today`` and ``right_today``, the same by the present rule, which also uses
          that more nodes do not shorten a step,
        - in seconds ``one_s``, ``fastest_one_s`` and ``slowest_one_s``, the step of the
          smallest count and those of its fastest and slowest job, ``lower_s`` and
          ``upper_s``, the limits of the interval, and ``least_s``, the shortest step that is
          likely, because more nodes than the anchor has do not shorten a step.
    """
    rows = []
    for name, steps in curves.items():
        # The steps up to an anchor, and the nodes of a larger count.
        for known, target in _known_and_targets(steps, most_times):
            result = scale(known, target, wish=WISH)
            rows.append({"curve": name, **_case(result, steps, target)})
    return pd.DataFrame(rows)


def _known_and_targets(
    steps: pd.DataFrame, most_times: float
) -> Iterator[tuple[pd.DataFrame, int]]:
    """Yield the steps that a prediction may know, and a number of nodes to predict for.

    Each count of several nodes is an anchor in turn. The steps of the anchor and of all smaller
    counts are known, and each larger count of at most ``most_times`` its nodes is predicted.
    Anchors and predicted counts have as many GPUs on each node as the largest count.
    """
    # Pairs of nodes and GPUs in ascending order.
    counts = sorted({*zip(steps["nodes"], steps["gpus"], strict=True)})
    most_nodes, most_gpus = counts[-1]
    gpus_per_node = most_gpus / most_nodes
    of_several_nodes = [
        (nodes, gpus)
        for nodes, gpus in counts
        if nodes > 1 and gpus == gpus_per_node * nodes
    ]
    for nodes, gpus in of_several_nodes:
        known = steps[(steps["nodes"] <= nodes) & (steps["gpus"] <= gpus)]
        for target, _ in of_several_nodes:
            if 1 < target / nodes <= most_times:
                yield known, target


def _case(result: Scaling, steps: pd.DataFrame, nodes: int) -> dict[str, object]:
    """Return the row of `cases` of one predicted count, without the name of its curve.

    ``result`` predicts the step on ``nodes`` nodes from those of the measured ``steps`` that
    are on fewer nodes. A wish asks whether the scaling factor, the step of the smallest count
    divided by that of ``nodes`` nodes, is at least WISH. The answer of `ddlkit scale` is "yes",
    "no" or "open". The row has two answers: that of today, and that of the time when goals were
    tested.
    """
    predicted = result.target
    is_target = (steps["nodes"] == nodes) & (steps["gpus"] == predicted.gpus)
    measured_s = float(steps.loc[is_target, "step_s"].median())
    one_s = result.smallest.step_s
    factor = one_s / measured_s
    # For the type checker: a predicted count has an interval, and a wish was given.
    assert predicted.interval_s and result.wish
    lower_s, upper_s = predicted.interval_s
    right_answer = "yes" if factor >= WISH else "no"
    answer_today = result.wish.answer
    # The goals are judged by the answer at the time when they were tested. Then only the interval
    # counted, and a wish was open if the shortest step of the interval met it. Today `ddlkit scale`
    # says "no" to some of these wishes, because the step of the anchor is too long and more nodes
    # do not shorten a step.
    answer_then = answer_today
    if answer_today == "no" and one_s / lower_s >= WISH:
        answer_then = "open"
    fastest_one_s, slowest_one_s = result.smallest.range_s
    anchor = result.anchor
    rival_errors = {}
    for law in scaling.RIVALS:
        rival_s = scaling.rival_step_s(law, one_s, anchor.step_s, nodes, anchor.nodes)
        rival_errors[law] = float(rival_s) / measured_s - 1
    return {
        "anchor": anchor.nodes,
        "nodes": nodes,
        "measured_s": measured_s,
        "predicted_s": predicted.step_s,
        "error": predicted.step_s / measured_s - 1,
        "factor_error": predicted.scaling_factor - factor,
        "inside": lower_s <= measured_s <= upper_s,
        # A share of the prediction, as data/goals.yml defines it.
        "half": (upper_s - lower_s) / 2 / predicted.step_s,
        "loss": 1 - factor,
        "answered": answer_then != "open",
        "right": answer_then == right_answer,
        "answered_today": answer_today != "open",
        "right_today": answer_today == right_answer,
        "one_s": one_s,
        "slowest_one_s": slowest_one_s,
        "fastest_one_s": fastest_one_s,
        "lower_s": lower_s,
        "upper_s": upper_s,
        "least_s": _least_step_s(result),
        **rival_errors,
    }


def _least_step_s(result: Scaling) -> float:
    """Return the shortest step that is likely on more nodes than the anchor has, in seconds.

    More nodes do not shorten a step, so that no step is shorter than that of the anchor's
    fastest job. A job is one run of the training.
    """
    # If the anchor has several jobs, this is the measured step of the fastest. If it has a single
    # job, this is its step, shortened by the share by which jobs scatter on other counts.
    fastest_s, _ = result.anchor_jobs_s
    if result.anchor.jobs > 1:
        return fastest_s
    # Of a single job, the estimate is shorter by at least `SINGLE_JOB_SHARE`, even if no other
    # count has several jobs that could scatter.
    return min(fastest_s, result.anchor.step_s / (1 + SINGLE_JOB_SHARE))


def interpolated_cases(curves: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return each count of several nodes as predicted while it is left out.

    A count is a number of nodes with a number of GPUs. The prediction is interpolated between
    the measured neighbours of the count. A smaller neighbour always exists, because `scale`
    needs a count on one node. The largest count has no larger neighbour, and therefore no row.
    Counts with partly used nodes have no row either.

    Parameters
    ----------
    curves : mapping of str to DataFrame
        Tables of steps, as `anemoi_steps` returns them, by the name of the curve.

    Returns
    -------
    DataFrame
        One row for each curve and count. The columns are ``curve``, ``nodes``, the relative
        ``error`` of the predicted step, and whether the measured step is ``inside`` the interval
        of the predicted one.
    """
    rows = []
    for name, steps in curves.items():
        # Pairs of nodes and GPUs in ascending order, the largest count apart.
        *smaller, (most_nodes, most_gpus) = sorted(
            {*zip(steps["nodes"], steps["gpus"], strict=True)}
        )
        for nodes, gpus in smaller:
            # A count with partly used nodes has fewer GPUs on each node than the largest.
            is_whole = gpus * most_nodes == most_gpus * nodes
            if nodes > 1 and is_whole:
                is_left_out = (steps["nodes"] == nodes) & (steps["gpus"] == gpus)
                judged = _interpolated(steps, is_left_out, int(nodes))
                rows.append({"curve": name, "nodes": nodes, **judged})
    return pd.DataFrame(rows)


def _interpolated(
    steps: pd.DataFrame, is_left_out: pd.Series, nodes: int
) -> dict[str, object]:
    """Return how well the step on one number of nodes is predicted while it is left out.

    The keys are the columns ``error`` and ``inside`` of `interpolated_cases`: the relative error
    of the predicted step, and whether the measured step is inside its interval. A count is a
    number of nodes with a number of GPUs.

    Parameters
    ----------
    steps : DataFrame
        The steps of a curve, as `anemoi_steps` returns them.
    is_left_out : Series of bool
        Which of the steps were measured on the count that is left out.
    nodes : int
        The number of nodes of this count.
    """
    result = scale(steps[~is_left_out], nodes)
    # All other counts are measured, so that the one that is left out is the only interpolated one.
    (predicted,) = (count for count in result.counts if count.interpolated)
    # For the type checker: an interpolated count has an interval.
    assert predicted.interval_s
    lower_s, upper_s = predicted.interval_s
    measured_s = float(steps.loc[is_left_out, "step_s"].median())
    return {
        "error": predicted.step_s / measured_s - 1,
        "inside": lower_s <= measured_s <= upper_s,
    }


def later_cases() -> pd.DataFrame:
    """Return the cases of all curves that were first read after the law had been committed.

    The law (`ddlkit.core.scaling.step_s`) predicts steps on more nodes. A commit fixed it before
    the sources of `LATER` were opened. A case is a step of such a curve and its prediction.

    Returns
    -------
    DataFrame
        The columns of `cases`, after ``source``, the name of the source's folder, and
        ``is_blind``. A curve is blind if neither its numbers nor another curve of its machine
        had been seen when the law was committed. All are but those of `NOT_BLIND`.
    """
    # The table is cached, and callers may change their copy.
    return _own_later_cases().copy()


@cache
def _own_later_cases() -> pd.DataFrame:
    """Return `later_cases`, which takes a second, computed once."""
    return _cases_of(LATER)


def blind_cases(further: Path | None = None) -> pd.DataFrame:
    """Return the cases of the blind test, and of further curves if a folder is given.

    Nobody had seen the curves of the blind test when the law was committed.

    Parameters
    ----------
    further : Path, optional
        A folder with one folder for each further source, as `published_curves` reads it. By
        default only the sources in this repository are read.

    Returns
    -------
    DataFrame
        The columns of `later_cases`, without the curves of `NOT_BLIND`.

    Raises
    ------
    UserError
        If ``further`` has no folder with a file ``rates.csv``.
    """
    tables = [_own_later_cases()]
    if further is not None:
        found = sorted(path.parent for path in further.glob("*/rates.csv"))
        if not found:
            raise UserError(
                f"{further} has no curves: "
                "put each source's rates.csv into a folder of its own there"
            )
        tables.append(_cases_of(found))
    all_cases = pd.concat(tables, ignore_index=True)
    return all_cases[all_cases["is_blind"]].reset_index(drop=True)


def _cases_of(sources: Sequence[Path]) -> pd.DataFrame:
    """Return the cases of the curves in the folders ``sources``, as `later_cases` does.

    The law (`ddlkit.core.scaling.step_s`) predicts steps from those measured on fewer nodes. The
    largest of these numbers of nodes is the anchor, and steps on at most MOST_TIMES as many nodes
    are predicted. A curve is blind if nobody had seen it when the law was committed. All are but
    those of NOT_BLIND.
    """
    tables = []
    for source in sources:
        own = cases(published_curves(source), MOST_TIMES)
        is_blind = [(source.name, curve) not in NOT_BLIND for curve in own["curve"]]
        own.insert(0, "is_blind", is_blind)
        own.insert(0, "source", source.name)
        tables.append(own)
    return pd.concat(tables, ignore_index=True)


def resampled(own_cases: pd.DataFrame, draws: int, seed: int) -> pd.DataFrame:
    """Return how far the numbers that goals are about depend on which curves were published.

    This is a bootstrap over the curves.

    Parameters
    ----------
    own_cases : DataFrame
        The cases that are drawn from, with the columns of `cases`, and with ``source``.
    draws : int
        The number of resamples. Each has as many curves as there are, drawn with replacement.
        All cases of a curve are drawn together.
    seed : int
        The seed of the draws.

    Returns
    -------
    DataFrame
        One row for each goal of `judged`. The columns are ``goal``, ``lower`` and ``upper``,
        the 5% and the 95% quantile of the number that resamples reach.
    """
    # The row numbers of each curve, in the order of the names, which makes draws repeatable.
    rows_of_curve = own_cases.groupby(["source", "curve"]).indices
    curves = [rows_of_curve[key] for key in sorted(rows_of_curve)]
    generator = np.random.default_rng(seed)
    reached = []
    for _ in range(draws):
        drawn = generator.integers(len(curves), size=len(curves))
        rows = np.concatenate([curves[number] for number in drawn])
        table = judged(own_cases.iloc[rows])
        reached.append(table["reached"].to_numpy())
    # One row for each resample, one column for each goal. One goal is the share of right answers
    # to the question whether a scaling factor is at least WISH. The answer may be left open. In a
    # resample where all are open, the share is NaN and does not count.
    lower, upper = np.nanquantile(np.array(reached), [0.05, 0.95], axis=0)
    return pd.DataFrame({"goal": table["goal"], "lower": lower, "upper": upper})


# -- collectives ---------------------------------------------------------------------


def perlmutter() -> pd.DataFrame:
    """Return the collectives that were timed on Perlmutter.

    Returns
    -------
    DataFrame
        The columns of `ddlkit.formats.node_tables.COLUMNS`, with times out of place. The
        version of NCCL and its settings are "", because the file does not state them.
    """
    path = EXTERNAL / "perlmutter" / "nccl-tests.csv.gz"
    frame = table(path)
    names = {
        "allreduce": "all_reduce",
        "allgather": "all_gather",
        "reducescatter": "reduce_scatter",
    }
    frame = frame.assign(
        collective=frame["op"].map(names),
        nodes=frame["num_nodes"],
        ranks=frame["num_nodes"] * frame["gpus_per_node"],
        bytes=frame["size"],
        # Microseconds out of place.
        seconds=frame["time-o"] / 1e6,
        nccl="",
        settings="",
        file=path.name,
    )
    return frame[[*COLUMNS]]


def collective_cases(times: pd.DataFrame, collective: str, ratio: int) -> pd.DataFrame:
    """Return the times of messages of 1 to 64 MiB, as measured and as fewer nodes predict them.

    A table is the times on one number of nodes with one number of GPUs on each.

    Parameters
    ----------
    times : DataFrame
        Measured collectives with the columns of `ddlkit.formats.node_tables.COLUMNS`.
    collective : str
        The collective.
    ratio : int
        Each table predicts ``ratio`` times its nodes.

    Returns
    -------
    DataFrame
        One row for each size of each table of several nodes, if ``ratio`` times its nodes
        were measured, too. The columns are ``anchor`` (the nodes of the predicting table),
        ``nodes``, ``ranks``, ``bytes``, ``measured_s``, ``predicted_s``, ``error`` (relative,
        of the prediction) and ``unchanged`` (the error if the time of the predicting table is
        taken as the prediction).
    """
    times = times[times["collective"] == collective]
    gpus_per_node = times["ranks"] / times["nodes"]
    tables = []
    # Tables with another number of GPUs on each node do not predict each other. `_extrapolated`
    # keeps the sizes of 1 to 64 MiB.
    for _, own in times.groupby(gpus_per_node):
        tables += list(_extrapolated(own, collective, ratio))
    return pd.concat(tables, ignore_index=True)


def _extrapolated(
    times: pd.DataFrame, collective: str, ratio: int
) -> Iterator[pd.DataFrame]:
    """Yield for each anchor its rows of `collective_cases`.

    An anchor is the table of times on one number of nodes, and predicts the table on ``ratio``
    times its nodes. All ``times`` are of the collective, with one number of GPUs on each node.
    """
    costs = NodeCosts.of(times)
    for anchor in costs.tables:
        nodes = ratio * anchor.nodes
        measured = costs.measured(collective, nodes, ratio * anchor.ranks)
        # A table of one node says nothing of the network, and a prediction for nodes that were
        # not measured cannot be judged.
        if anchor.nodes == 1 or measured is None:
            continue
        # The prediction may know the tables up to the anchor.
        known = NodeCosts.of(times[times["nodes"] <= anchor.nodes])
        try:
            cost = known.cost(collective, nodes, measured.ranks)
        except UserError:
            # The prediction is refused: gathers are predicted for at most four times the nodes.
            continue
        # Only sizes at which the cost has a time, so that none is interpolated. These are among
        # the sizes of the anchor, and all sizes ascend.
        has_time = np.isin(measured.sizes, cost.bytes)
        # The goal ``scaling_all_reduce`` in data/goals.yml is about messages of 1 to 64 MiB.
        has_size_of_goal = (measured.sizes >= 2**20) & (measured.sizes <= 2**26)
        is_judged = has_time & has_size_of_goal
        sizes = measured.sizes[is_judged]
        measured_s = measured.seconds[is_judged]
        # The times on the anchor's own nodes, for comparison: what a prediction by which more
        # nodes change nothing would say.
        unchanged_s = anchor.seconds[np.isin(anchor.sizes, sizes)]
        predicted_s = cost(sizes)
        yield pd.DataFrame(
            {
                "anchor": anchor.nodes,
                "nodes": nodes,
                "ranks": measured.ranks,
                "bytes": sizes,
                "measured_s": measured_s,
                "predicted_s": predicted_s,
                "error": predicted_s / measured_s - 1,
                "unchanged": unchanged_s / measured_s - 1,
            }
        )


# -- goals ---------------------------------------------------------------------------


def judged(own_cases: pd.DataFrame, name: str = "scaling_steps") -> pd.DataFrame:
    """Return which goals of data/goals.yml some cases reach.

    Parameters
    ----------
    own_cases : DataFrame
        The cases, with the columns that the goals are about.
    name : str, optional
        The name of the goals in data/goals.yml.

    Returns
    -------
    DataFrame
        One row for each goal, with the columns ``goal``, ``wanted``, ``reached`` and ``holds``.
    """
    wanted: list[Goal] = goals(name)
    return pd.DataFrame([goal.judged(own_cases) for goal in wanted])
