"""Predictions compared with measurements, whether they were made before or after.

A prediction uses a layer profile, and a cost that is fitted to collectives which were
measured on their own. No time of the judged runs enters a prediction, except that of
copying a byte of a gradient, which is measured next to the iterations. The truth of a
case is the median of its iterations. Errors are relative. A prediction interval is for
a single iteration.

A *paired* error uses the compute time of the run itself instead of the predicted
compute time: a machine drifts between profile and run, and the error of communication
remains.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.errors import UserError
from ddlkit.core.sparse import Selecting
from ddlkit.core.workload import Floats, Workload
from ddlkit.model import predictor
from ddlkit.model.calibration import TRAINING, Calibration
from ddlkit.model.predictor import Forecast, forecast_case
from ddlkit.store.files import own_yaml
from workbook.common import places
from workbook.common.outputs import format_number
from workbook.common.source import Source
from workbook.validate import rivals
from workbook.validate.rivals import LINE, OURS, predicted_times

RESCALED = "rescaled"
"""Our model with the compute time that the same run measured."""
REPEATS_WITHIN = 0.1
"""How far the rounds of a case may differ, on average, before the machine counts as
disturbed: a tenth of the iteration, by choice."""
_PARTS = (
    f"{model}_{part}"
    for model in (OURS, LINE)
    for part in ("alone", "copied", "slowed", "beside")
)
PREDICTED = (
    *rivals.MODELS,
    "fitted_norm",
    *_PARTS,
    rivals.MEASURED,
    rivals.TRANSFERRED,
)
"""Every model whose predictions a campaign may have recorded before its runs."""
DRAWS = 200
"""How many draws of the cost are made for intervals, by choice."""
_ENDS = ("lower_s", "upper_s")


# -- what was measured, and what is predicted of it ----------------------------------


def measured(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the measured times of each case.

    Parameters
    ----------
    runs : DataFrame
        A row for each iteration. ``repeat`` numbers the rounds. In each round every case is
        run once, for several iterations.

    Returns
    -------
    DataFrame
        A row for each case. The columns are those of the case, ``origin``, and these:

        measured_iteration_s, measured_exposed_communication_s, measured_compute_s
            Seconds, each the median over rounds of the median over a round's iterations.
            Disturbed iterations count only in a case that has no others.
        repeats
            The number of rounds.
        repeatability, repeatability_exposed
            The mean difference between two rounds in the iteration and in exposed
            communication, relative to the median.
        processor_load, stolen, copy_s_per_byte, processor_limited
            The conditions of the runs. ``stolen`` is the largest share of the cores that
            other virtual machines took in a run, ``copy_s_per_byte`` the time of copying a
            gradient into its bucket or out of it, and ``processor_limited`` whether the
            processor limited any iteration.
        marked
            Whether all iterations were disturbed, or rounds differ by more than
            REPEATS_WITHIN on average. Predictions are not judged by marked cases.
    """
    quantities = ["iteration_s", "exposed_communication_s", "compute_s"]
    keys = runs.drop_duplicates("case").set_index("case")[[*CASE_COLUMNS, "origin"]]
    # Recordings of older versions do not say what was disturbed.
    knows_disturbed = "disturbed" in runs
    if knows_disturbed:
        disturbed = runs["disturbed"]
    else:
        disturbed = pd.Series(False, runs.index)
    # By case, whether all its iterations were disturbed. Such a case has no others to count.
    all_disturbed = disturbed.groupby(runs["case"]).all()
    has_no_others = runs["case"].map(all_disturbed)
    runs = runs[~disturbed | has_no_others]

    rounds = runs.groupby(["case", "repeat"])[quantities].median().groupby("case")
    cases = rounds.median().add_prefix("measured_")
    spread = rounds.agg(mean_difference) / rounds.median()
    cases["repeats"] = rounds.size()
    cases["repeatability"] = spread["iteration_s"]
    cases["repeatability_exposed"] = spread["exposed_communication_s"]
    conditions = {
        "processor_load": "median",
        "stolen": "max",
        "copy_s_per_byte": "median",
        "processor_limited": "any",
    }
    cases = cases.join(runs.groupby("case").agg(conditions))
    cases["marked"] = all_disturbed
    # By choice, cases of older versions are not marked, however much their rounds differ.
    if knows_disturbed:
        cases["marked"] |= cases["repeatability"] > REPEATS_WITHIN
    return keys.join(cases).reset_index()


def mean_difference(values: pd.Series) -> float:
    """Return the mean absolute difference over all pairs of values, NaN for a single value."""
    numbers = values.to_numpy()
    differences = np.abs(numbers[:, None] - numbers)
    # The part of the square matrix above its diagonal, which has each pair once.
    of_pairs = differences[np.triu_indices(len(numbers), 1)]
    if not len(of_pairs):
        return math.nan
    return float(of_pairs.mean())


def calibrated(
    collectives: pd.DataFrame,
    form: str = "table",
    draws: int = DRAWS,
    slowdown: pd.DataFrame | None = None,
) -> Calibration:
    """Return the costs of our model and of every rival model, fitted to measured messages.

    Parameters
    ----------
    collectives : DataFrame
        The samples of collectives, to which all costs are fitted.
    form : str, optional
        The form of our model's cost.
    draws : int, optional
        How many draws of the cost are made for intervals. Each is fitted to a resample of
        the samples.
    slowdown : DataFrame, optional
        Measurements of how messages and compute slow each other down. By default,
        predictions do not count this.
    """
    return Calibration.of(
        collectives, form, draws, also=rivals.TRIAL_COSTS, slowdown=slowdown
    )


def validate(
    runs: pd.DataFrame,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    selections: Mapping[str, Selecting] | None = None,
    compute_scatter: Mapping[str, Floats] | None = None,
) -> pd.DataFrame:
    """Return the measured and the predicted times of each case, and their errors.

    Parameters
    ----------
    runs : DataFrame
        A row for each iteration.
    workloads : mapping of str to Workload
        Layer profiles by their hash.
    calibration : Calibration
        The costs of messages.
    selections : mapping of str to Selecting, optional
        Selection times by the hash that a sparse case carries.
    compute_scatter : mapping of str to ndarray, optional
        Times of iterations of one worker alone, divided by their median, by the hash of the
        profile. By default compute does not scatter.

    Returns
    -------
    DataFrame
        A row for each case, with the columns of `measured` and these:

        <model>_iteration_s, <model>_exposed_s
            The predicted iteration and its exposed communication in seconds, by each of
            `rivals.MODELS` and by RESCALED, our model with the measured compute time.
        <model>_error, <model>_paired_error, <model>_exposed_error
            The relative errors of these predictions, as `_with_errors` describes them.
        lower_s, upper_s
            The ends of the prediction interval of our model in seconds, without the drift
            of compute since its profile. `labelled` adds the drift as measured. The ends are
            NaN if the costs have no draws.
        contention
            Whether the prediction counts how messages and compute slow each other down.
        predicted_compute_s
            The compute time in seconds from the layer profile.
    """
    cases = measured(runs)
    predicted = []
    for row in cases.to_dict("records"):
        case = Case.from_row(row)
        # The compute of a replay does not scatter, because a replay sleeps for its times.
        scatter = predictor.STEADY
        if case.kind == TRAINING and compute_scatter:
            scatter = compute_scatter.get(case.profile_sha256, predictor.STEADY)
        ours = forecast_case(
            case,
            workloads,
            calibration,
            selections,
            # Timed next to the iterations of the same run, and 0 for a replay.
            copy_s_per_byte=row["copy_s_per_byte"],
            compute_scatter=scatter,
        )
        communication = calibration.of_case(case)
        seconds = predicted_times(ours, communication.costs_by_form)
        seconds[RESCALED] = _rescaled_times(ours, row["measured_compute_s"])
        # This interval leaves out how compute has drifted since its profile. `labelled` moves the
        # interval of real training by that drift, measured less predicted compute.
        lower_s, upper_s = ours.paired_interval_s or (math.nan, math.nan)
        predicted.append(
            {
                **_time_columns(seconds),
                "lower_s": lower_s,
                "upper_s": upper_s,
                "contention": communication.contention is not None,
                "predicted_compute_s": ours.iteration.workload.compute_s,
            }
        )
    return _with_errors(cases.join(pd.DataFrame(predicted)), (*rivals.MODELS, RESCALED))


def _time_columns(times_s: Mapping[str, rivals.Times]) -> dict[str, float]:
    """Return the predictions of one case as columns of `validate`.

    ``times_s`` has, by model, the seconds of the iteration and of its exposed communication.
    """
    columns = {}
    for model, (iteration_s, exposed_s) in times_s.items():
        columns[f"{model}_iteration_s"] = iteration_s
        columns[f"{model}_exposed_s"] = exposed_s
    return columns


def _rescaled_times(ours: Forecast, measured_compute_s: float) -> tuple[float, float]:
    """Return our prediction with all layers scaled to the measured compute time.

    The two numbers are the iteration and its exposed communication in seconds.
    """
    workload = ours.iteration.workload
    scaled = workload.scaled(measured_compute_s / workload.compute_s)
    return rivals.times(replace(ours.iteration, workload=scaled).prediction)


def _with_errors(cases: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return the cases with three relative errors of each model.

    The models are those of ``names``. ``<model>_error`` is of the iteration and
    ``<model>_exposed_error`` of the exposed communication. ``<model>_paired_error`` is of
    the iteration with the measured compute time instead of the predicted one, so that only
    exposed communication differs.
    """
    iteration_s = cases["measured_iteration_s"]
    exposed_s = cases["measured_exposed_communication_s"]
    errors = {}
    for name in names:
        difference_s = cases[f"{name}_exposed_s"] - exposed_s
        errors[f"{name}_error"] = cases[f"{name}_iteration_s"] / iteration_s - 1
        errors[f"{name}_paired_error"] = difference_s / iteration_s
        errors[f"{name}_exposed_error"] = difference_s / exposed_s
    return pd.concat([cases, pd.DataFrame(errors)], axis=1)


def labelled(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with the name of their lab, and whether intervals hold them.

    Parameters
    ----------
    cases : DataFrame
        As `validate` or `joined` returns them.

    Returns
    -------
    DataFrame
        The cases with ``lab``, such as "4 x 1gbit" for four ranks, and ``inside``, whether
        the median iteration lies in its interval. For real training with ``contention``,
        the interval is moved by the difference between the measured and the predicted
        compute time. So compute that has drifted since its profile is no error.
    """
    if "contention" in cases:
        # Contention is that messages and compute slow each other down. Only predictions of real
        # training count it. Replays sleep for their compute times, so that these do not drift.
        is_real_training = cases["contention"]
        drift_s = cases["measured_compute_s"] - cases["predicted_compute_s"]
        drift_s = drift_s.where(is_real_training, 0.0)
        cases = cases.assign(**{end: cases[end] + drift_s for end in _ENDS})
    name = cases["workers"].astype(str) + " x " + cases["link"].str.removeprefix("lab:")
    # The density is the share of the gradients that is sent, and the straggler is the factor on
    # the compute times of the slowest rank, 1 if all ranks compute equally fast.
    name += np.where(cases["density"] < 1, ", sparse", "")
    name += np.where(cases["straggler"] > 1, ", straggler", "")
    name += np.where(cases["in_flight"] > 1, ", two in flight", "")
    inside = cases["measured_iteration_s"].between(cases["lower_s"], cases["upper_s"])
    return cases.assign(lab=name, inside=inside)


def sends_one_message(cases: pd.DataFrame) -> pd.Series:
    """Return for each case whether its plan sends all gradients in one message.

    Such a plan overlaps nothing, so that its error tests no model of overlap.
    """
    # The ends of a plan's messages are listed with ";" between them.
    return ~cases["ends"].astype(str).str.contains(";")


def judge(
    measurements: Source, profiles: Source, form: str = "table", *, marked: bool = False
) -> pd.DataFrame:
    """Return the cases by which predictions are judged, as `labelled` returns them.

    Parameters
    ----------
    measurements : Source
        The runs, recorded or of this machine, and the collectives to which costs are
        fitted.
    profiles : Source
        The layer profiles, and the selection times of sparse cases.
    form : str, optional
        The form of our model's cost.
    marked : bool, optional
        Whether to return the marked cases of live runs, which are runs on this machine. A
        case is marked if all its iterations were disturbed, if its rounds differ too much
        (both noted by `measured`), or if the processor limited it. By default marked cases are
        dropped. For recorded runs, the argument changes nothing: only cases that the
        processor limited are dropped.

    Returns
    -------
    DataFrame
        A row for each case, with the columns of `validate`, ``lab`` and ``inside``. There
        is no row if there is no profile for any run.
    """
    workloads = profiles.workloads()
    runs = measurements.table("runs")
    runs = runs[runs["profile_sha256"].isin(workloads)]
    if runs.empty:
        return runs
    # How messages and compute slow each other down, where it was measured.
    slowdown = None
    if measurements.has("slowdown"):
        slowdown = measurements.table("slowdown")
    # The interval by which a recorded case was first judged is frozen: it is stored, and used
    # instead of one that is drawn anew.
    frozen_ends = _frozen_ends(form)
    # Draws of the cost take time, and are needed only for intervals that are not frozen.
    all_frozen = runs["case"].isin(frozen_ends.index).all()
    calibration = calibrated(
        measurements.table("collectives"),
        form,
        draws=0 if all_frozen else DRAWS,
        slowdown=slowdown,
    )
    cases = validate(
        runs, workloads, calibration, profiles.selections(), profiles.compute_scatter()
    )
    # Cases without a frozen interval, such as those of this machine, keep the drawn one.
    cases = cases.set_index("case")
    cases.update(frozen_ends)
    cases = cases.reset_index()
    limited = cases["processor_limited"]
    if not measurements.is_live("runs"):
        # The recordings that this function is asked about were made before disturbances
        # were noted, so that none of their cases is marked.
        return labelled(cases[~limited])
    # Of runs on this machine, a limited case is marked, too.
    cases["marked"] |= limited
    if marked:
        return labelled(cases)
    return labelled(cases[~cases["marked"]])


def _frozen_ends(form: str) -> pd.DataFrame:
    """Return the frozen prediction intervals, by which recorded cases were first judged.

    They are stored in data/intervals.csv.

    Parameters
    ----------
    form : str
        The form of our model's cost. The stored intervals are of the form "table", and do not
        belong to the predictions of another form.

    Returns
    -------
    DataFrame
        ``lower_s`` and ``upper_s``, the ends in seconds, by case.
    """
    ends = pd.read_csv(places.DATA / "intervals.csv", index_col="case")
    # A case without ends has no frozen interval.
    ends = ends.dropna()
    if form != "table":
        # No rows.
        return ends.iloc[:0]
    return ends


# -- predictions that were written before their runs ---------------------------------


def joined(campaign: Source) -> pd.DataFrame:
    """Return the cases of a campaign with the predictions recorded before its runs.

    Parameters
    ----------
    campaign : Source
        Tables of predictions and of runs.

    Returns
    -------
    DataFrame
        A row for each case. The columns are those of `validate`, but with the models of
        PREDICTED, and ``runs``, the number of single iterations of the case, and
        ``covered``, how many of them lie in its interval.

    Raises
    ------
    UserError
        If the runs name another table of predictions by its hash.
    """
    predicted = campaign.table("predicted")
    runs = campaign.table("runs")
    _check_predicted_by(campaign, runs)
    seconds = predicted.pivot(
        index="case", columns=["model", "quantity"], values="seconds"
    )
    cases = measured(runs).set_index("case")
    for name, quantity in product(PREDICTED, ("iteration", "exposed")):
        # Older campaigns lack the models that came later, whose predictions are NaN.
        cases[f"{name}_{quantity}_s"] = seconds.get((name, quantity), np.nan)
    cases["lower_s"] = seconds[OURS, "lower"]
    cases["upper_s"] = seconds[OURS, "upper"]
    # An iteration is its compute and its exposed communication.
    predicted_compute_s = seconds[OURS, "iteration"] - seconds[OURS, "exposed"]
    cases["predicted_compute_s"] = predicted_compute_s
    # Contention means that messages and compute slow each other down. Only predictions of real
    # training count it. `labelled` moves the intervals of cases with contention by measured less
    # predicted compute, because the compute of real training drifts after its profile.
    cases["contention"] = cases["kind"] == TRAINING
    counted = _covered_iterations(runs, cases)
    return _with_errors(cases, PREDICTED).join(counted).reset_index()


def _check_predicted_by(campaign: Source, runs: pd.DataFrame) -> None:
    """Raise UserError if runs name another table of predictions than the campaign's.

    Runs name the table by the first digits of its hash, in their column ``predicted``.
    """
    # A campaign has a single table of predictions.
    (path,) = store.list_tables(campaign.directories[0], "predicted-*.csv")
    digits = int(runs["predicted"].str.len().max())
    digest = str(store.load_stamp(path)["sha256"])[:digits]
    others = set(runs["predicted"]) - {digest}
    if others:
        raise UserError(
            f"runs predicted by {sorted(others)}, not by the predictions {digest}"
        )


def _covered_iterations(runs: pd.DataFrame, cases: pd.DataFrame) -> pd.DataFrame:
    """Count the iterations of each case (``runs``) and those in its interval (``covered``).

    ``runs`` has a row for each iteration. ``cases`` has a row for each case, which is its index.
    """
    # With the case of each iteration, ``map`` gives every iteration the value of its case.
    case = runs["case"]
    # ``contention`` is true for all cases of real training, and for no others.
    is_real_training = case.map(cases["contention"])
    # The interval of an iteration of real training is moved to the iteration's own compute time.
    drift_s = runs["compute_s"] - case.map(cases["predicted_compute_s"])
    drift_s = drift_s.where(is_real_training, 0.0)
    lower_s = case.map(cases["lower_s"]) + drift_s
    upper_s = case.map(cases["upper_s"]) + drift_s
    inside = runs["iteration_s"].between(lower_s, upper_s)
    return inside.groupby(case).agg(covered="sum", runs="size")


def trained(campaign: Source) -> pd.DataFrame:
    """Return the `labelled` cases of a campaign of real training, without disturbed ones."""
    cases = joined(campaign)
    return labelled(cases[~cases["marked"]])


# -- live runs of the suite quick ----------------------------------------------------


def live() -> pd.DataFrame:
    """Return the recorded live runs of the suite quick.

    Returns
    -------
    DataFrame
        The rows of data/live.csv, with ``model_error``, the relative error of our model,
        and ``inside``, whether the measured iteration lies in its interval. ``condition``
        is "quiet", or "disturbed" if another program used the processor.
    """
    cases = pd.read_csv(places.DATA / "live.csv")
    # STATISTICS know the prediction by this name.
    cases["model_iteration_s"] = cases["predicted_s"]
    cases["model_error"] = cases["predicted_s"] / cases["measured_s"] - 1
    return cases.assign(
        inside=cases["measured_s"].between(cases["lower_s"], cases["upper_s"])
    )


# -- scores --------------------------------------------------------------------------


def summary(cases: pd.DataFrame, runs: pd.DataFrame) -> dict[str, float]:
    """Return the counts, errors and coverages that sum up how good predictions are.

    Parameters
    ----------
    cases : DataFrame
        `labelled` cases.
    runs : DataFrame
        Their single iterations.

    Returns
    -------
    dict of str to float
        ``cases`` and ``iterations`` are counts. Errors are relative and without sign, of our
        model and of the models with no and with perfect overlap.
        ``median_repeatability`` is that of `measured`. The coverages are the shares of
        cases and of single iterations in their intervals, and ``half_width_share`` is the
        median half width of an interval relative to the prediction.
    """
    bounds = ("no_overlap", "perfect_overlap")
    errors = {name: cases[f"{name}_error"].abs() for name in (OURS, *bounds)}
    ends = cases.set_index("case")[["lower_s", "upper_s"]]
    # Each iteration with the interval of its case.
    single = runs[runs["case"].isin(ends.index)].join(ends, on="case")
    inside = single["iteration_s"].between(single["lower_s"], single["upper_s"])
    half_s = (cases["upper_s"] - cases["lower_s"]) / 2
    return {
        "cases": len(cases),
        "median_error": errors[OURS].median(),
        "max_error": errors[OURS].max(),
        "median_exposed_error": cases["model_exposed_error"].abs().median(),
        "median_repeatability": cases["repeatability"].median(),
        "no_overlap_median_error": errors["no_overlap"].median(),
        "perfect_overlap_median_error": errors["perfect_overlap"].median(),
        "interval_coverage": cases["inside"].mean(),
        "iterations": len(single),
        "coverage_of_iterations": inside.mean(),
        "half_width_share": (half_s / cases["model_iteration_s"]).median(),
    }


# -- goals, which were set before the data -------------------------------------------


MUCH = 0.2
"""From which share of an iteration on exposed communication is judged by itself."""


def much_exposed(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases whose exposed communication is at least a fifth of their iteration."""
    iteration_s = cases["measured_iteration_s"]
    exposed_s = cases["measured_exposed_communication_s"]
    return cases[exposed_s >= MUCH * iteration_s]


def difference(cases: pd.DataFrame, rival: str) -> tuple[float, float, float]:
    """Return how much larger our absolute paired error is than that of a rival.

    Parameters
    ----------
    cases : DataFrame
        Cases with the paired errors of both models, ``<model>_paired_error``.
    rival : str
        The rival model.

    Returns
    -------
    mean, lower, upper : float
        The mean difference over all cases, negative if our model errs less, and its 95%
        bootstrap interval. The bootstrap draws clusters, not single cases, because the
        cases of one network on one link share errors.
    """
    ours = cases[f"{OURS}_paired_error"].abs()
    theirs = cases[f"{rival}_paired_error"].abs()
    differences = ours - theirs
    cluster = [cases["network"], cases["link"]]
    # For each cluster the sum of its differences, and its number of cases.
    of_clusters = differences.groupby(cluster).agg(["sum", "size"])
    n = len(of_clusters)
    # One row for each of 10,000 resamples, of n clusters. The fixed seed gives the same
    # interval each time.
    drawn = np.random.default_rng(0).integers(0, n, (10_000, n))
    # From shape (10_000, n, 2) to (10_000, 2).
    of_resamples = of_clusters.to_numpy()[drawn].sum(axis=1)
    # The mean of a resample is its sum divided by its number of cases, so that clusters with more
    # cases weigh more.
    sums, sizes = of_resamples.T
    lower, upper = np.percentile(sums / sizes, [2.5, 97.5])
    return float(differences.mean()), float(lower), float(upper)


_OF_LIVE = {
    "inside": "coverage",
    "half_width": "half_width_share",
    "error": "median_error",
}


def _of_kind(kind: str, statistic: str, cases: pd.DataFrame) -> float:
    """Return one of STATISTICS of the unmarked cases of a kind, replays or real training."""
    of_kind = cases[(cases["kind"] == kind) & ~cases["marked"]]
    return STATISTICS[statistic](of_kind)


STATISTICS: dict[str, Callable[[pd.DataFrame], float]] = {
    "median_error": lambda cases: cases["model_error"].abs().median(),
    "median_exposed_error": lambda cases: cases["model_exposed_error"].abs().median(),
    "median_transferred_error": lambda cases: cases["transferred_error"].abs().median(),
    "largest_error_over_repeatability": lambda cases: (
        cases["model_error"].abs() / (2 * cases["repeatability"])
    ).max(),
    "within": lambda cases: cases["model_error"].abs().le(0.05).mean(),
    "coverage": lambda cases: cases["inside"].mean(),
    "coverage_of_iterations": lambda cases: (
        cases["covered"].sum() / cases["runs"].sum()
    ),
    "above_line_medians": lambda cases: difference(cases, LINE)[2],
    "paired_median_error": lambda cases: cases["model_paired_error"].abs().median(),
    "paired_mean_error": lambda cases: abs(cases["model_paired_error"].mean()),
    "half_width_share": lambda cases: (
        cases.eval("(upper_s - lower_s) / model_iteration_s").median() / 2
    ),
    "much_exposed_error": lambda cases: STATISTICS["median_exposed_error"](
        much_exposed(cases)
    ),
    "above_no_overlap_on_loopback": lambda cases: difference(
        cases[cases["link"] == "loopback"], "no_overlap"
    )[0],
    "cases": len,
    "much_exposed_cases": lambda cases: len(much_exposed(cases)),
    "marked": lambda cases: cases["marked"].mean(),
    "unmarked": lambda cases: 1 - cases["marked"].mean(),
    "inside": lambda cases: STATISTICS["coverage"](cases[~cases["marked"]]),
    **{
        f"{kind}s_{name}": partial(_of_kind, kind, statistic)
        for kind, (name, statistic) in product(("replay", TRAINING), _OF_LIVE.items())
    },
}
"""The statistics of `labelled` or `live` cases that a goal can name.

A goal with another statistic is an expression of columns."""


class Goal(NamedTuple):
    """One number that predictions were to reach.

    Attributes
    ----------
    goal : str
        What is to be reached, in words.
    statistic : str
        One of STATISTICS, or an expression of columns.
    at_most, at_least : float
        The bounds of the statistic.
    set : str
        When the goal was set, as an ISO time.
    """

    goal: str
    statistic: str
    at_most: float = math.inf
    at_least: float = -math.inf
    set: str = ""

    def judged(self, cases: pd.DataFrame) -> dict[str, Any]:
        """Return whether cases reach the goal.

        Parameters
        ----------
        cases : DataFrame
            `labelled` or `live` cases.

        Returns
        -------
        dict
            The ``goal``, the ``wanted`` bound in words as reports/goals.csv has them, the
            ``reached`` number, and whether the goal ``holds``.
        """
        statistic = STATISTICS.get(self.statistic)
        if statistic:
            reached = float(statistic(cases))
        else:
            reached = float(cases.eval(self.statistic))
        # A goal has one bound. The other one is infinite.
        if self.at_least > -math.inf:
            wanted = f"at least {self.at_least:g}"
        else:
            wanted = f"at most {self.at_most:g}"
        holds = self.at_least <= reached <= self.at_most
        return {"goal": self.goal, "wanted": wanted, "reached": reached, "holds": holds}


def goals(campaign: str) -> list[Goal]:
    """Return the goals that data/goals.yml has under the name of a campaign."""
    text = (places.DATA / "goals.yml").read_text(encoding="utf-8")
    return [*_goals_of(text, campaign)]


@cache
def _goals_of(text: str, campaign: str) -> tuple[Goal, ...]:
    """Return the goals of a campaign in the text of data/goals.yml.

    The text is an argument so that an edited file is parsed again.
    """
    return tuple(Goal(**entry) for entry in own_yaml(text)[campaign])


# -- what campaigns reached, as frozen in reports/goals.csv and reports/coverage.csv ---


SIZES = (
    "cases",
    "links",
    "cases with exposed communication of at least a fifth",
    "cases where no overlap and perfect overlap differ by a fifth",
)
"""Goals for how much was to be measured, met or not. They do not count, as no model can
miss them."""


def frozen(name: str, campaign: str = "") -> pd.DataFrame:
    """Return rows of reports/goals.csv or reports/coverage.csv.

    The rows are frozen: they state what each campaign reached, and are not computed anew.

    Parameters
    ----------
    name : {"goals", "coverage"}
        The table.
    campaign : str, optional
        The campaign whose rows are returned. By default those of all campaigns.

    Returns
    -------
    DataFrame
        The rows, with "" where nothing is given. ``held``, whether a goal was met, is
        therefore a text, "True", "False" or "".
    """
    # Parsed rows are cached by the content of the file, so that an edited file is parsed
    # again.
    content = (places.ROOT / "reports" / f"{name}.csv").read_bytes()
    rows = _rows_of(content)
    if campaign:
        rows = rows[rows["campaign"] == campaign]
    # Callers may change their copy, but not the cached rows.
    return rows.copy()


@cache
def _rows_of(content: bytes) -> pd.DataFrame:
    """Return the rows of a file of reports, parsed once for each content."""
    return pd.read_csv(io.BytesIO(content), keep_default_na=False)


def _goals_that_count(goals: pd.DataFrame) -> pd.DataFrame:
    """Return the goals that count: those that were met or missed, but without those of SIZES.

    ``held`` is the text "True" of a goal that was met, and "False" of one that was missed. It is
    "" in a row that states what was reached although no goal was set.
    """
    return goals[(goals["held"] != "") & ~goals["goal"].isin(SIZES)]


def goals_met(standing: str) -> tuple[int, int]:
    """Return how many goals of a standing were met over all campaigns, and their number.

    Parameters
    ----------
    standing : str
        "confirmatory" for preset goals, or "exploratory" for those that were set with
        the data in sight.

    Returns
    -------
    met, total : int
        Rows for which no goal was set do not count, nor do goals for how much was to be
        measured (SIZES).
    """
    goals = _goals_that_count(frozen("goals"))
    of_standing = goals[goals["standing"] == standing]
    # Truth values of the file are texts.
    is_met = of_standing["held"] == "True"
    return int(is_met.sum()), len(of_standing)


def goals_by_set() -> pd.DataFrame:
    """Return how many preset goals each campaign met.

    A campaign is a set of runs, which has goals of its own. A goal is preset if it was set
    before the data.

    Returns
    -------
    DataFrame
        By the name of the campaign, in the order of reports/goals.csv, how many goals were
        ``preset``, and how many of these were ``met``. Rows for which no goal was set do
        not count, nor do goals for how much was to be measured (SIZES).
    """
    goals = _goals_that_count(frozen("goals"))
    # The file calls preset goals confirmatory, and its truth values are texts.
    preset = goals[goals["standing"] == "confirmatory"]
    is_met = preset["held"] == "True"
    by_campaign = is_met.groupby(preset["campaign"], sort=False)
    return by_campaign.agg(["sum", "size"]).set_axis(["met", "preset"], axis=1)


OF_SHARDED_INTERVALS = "share of medians in their interval"
"""The goal of each campaign of sharded training (FSDP2) for the intervals of its predictions."""


def goal_counts() -> dict[str, Any]:
    """Return the counts of goals that pages and passages quote.

    Returns
    -------
    dict
        ``preset`` goals were set before the data, and ``exploratory`` ones with the data in
        sight. Both are counts, and ``preset_met`` and ``exploratory_met`` how many of them
        were met. ``poor_sets`` has the campaigns that met less than half of their preset
        goals, each with a text such as "1 of 7".
        ``sharded_intervals`` is how many campaigns of sharded training have a goal for
        their intervals, and ``sharded_intervals_met`` how many met it. ``of_95`` has the
        rows of `coverage_of_95`.
    """
    # The file calls preset goals confirmatory.
    preset_met, preset = goals_met("confirmatory")
    exploratory_met, exploratory = goals_met("exploratory")
    by_campaign = goals_by_set()
    poor = by_campaign[2 * by_campaign["met"] < by_campaign["preset"]]
    goals = frozen("goals")
    # Whether each was met, as the text "True" or "False" of the file.
    of_sharded = goals[goals["goal"] == OF_SHARDED_INTERVALS]["held"]
    return {
        "preset_met": preset_met,
        "preset": preset,
        "exploratory_met": exploratory_met,
        "exploratory": exploratory,
        "poor_sets": {
            str(row.Index): f"{row.met} of {row.preset}" for row in poor.itertuples()
        },
        "sharded_intervals_met": int((of_sharded == "True").sum()),
        "sharded_intervals": len(of_sharded),
        "of_95": coverage_of_95(),
    }


def coverage_of_95() -> pd.DataFrame:
    """Return the coverage of nominal 95% intervals, each measurement once.

    A measurement is a campaign and a value of ``replayed_or_real``. It may have several
    rows: for single iterations next to medians, for further models, or for all cases next
    to those that are not marked as disturbed. The first row is what was reported. The
    campaign "live" holds two measurements, whose runs were quiet or disturbed. Only the note
    tells these apart.

    Returns
    -------
    DataFrame
        Rows of reports/coverage.csv.
    """
    rows = frozen("coverage")
    rows = rows[rows["nominal"] == 0.95]
    of_disturbed_runs = rows["note"].str.contains("disturbed runs")
    measurement = [rows["campaign"], rows["replayed_or_real"], of_disturbed_runs]
    return rows.groupby(measurement, sort=False).head(1)


def outcome(campaign: str) -> str:
    """Return in words which goals a campaign met and missed.

    If no predictions were committed before the runs of the campaign, the text says this, too.

    Raises
    ------
    UserError
        If neither reports/goals.csv nor reports/coverage.csv has a row of the campaign.
    """
    rows = frozen("goals", campaign)
    intervals = frozen("coverage", campaign)
    if rows.empty and intervals.empty:
        raise UserError(
            f"{campaign!r} has no row in reports/goals.csv: name one that has"
        )
    # Rows for which no goal was set are dropped, and goals for how much was to be measured.
    goals = _goals_that_count(rows)
    sentences = []
    # The file calls preset goals confirmatory.
    for standing, kind in (("confirmatory", "preset"), ("exploratory", "exploratory")):
        of_kind = goals[goals["standing"] == standing]
        if len(of_kind):
            sentences.append(_met_and_missed(of_kind, kind))
    # A campaign may have intervals alone, or no row that counts as a goal.
    if not sentences:
        sentences.append("No goal was set")
    # The note of a goal or of an interval says if its predictions preceded the runs.
    notes = [*rows["note"], *intervals["note"]]
    if not any("predictions committed" in note for note in notes):
        sentences.append("No table of predictions was committed before the runs")
    return ". ".join(sentences)


def _met_and_missed(goals: pd.DataFrame, kind: str) -> str:
    """Return in words how many goals were met, and name those missed.

    ``goals`` are rows of reports/goals.csv, each with ``held`` as the text "True" or "False".
    ``kind`` is the word for them in the sentence, "preset" or "exploratory".
    """
    missed = goals[goals["held"] == "False"]
    met = len(goals) - len(missed)
    sentence = f"{met} of {len(goals)} {kind} goals were met"
    if missed.empty:
        return sentence
    named = [
        f"{row.goal} ({format_number(row.reached)}, target {row.wanted})"
        for row in missed.itertuples()
    ]
    return f"{sentence}; missed: {'; '.join(named)}"
