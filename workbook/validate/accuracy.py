"""Predicted meets measured: the one judge of predictions, made before their runs or after.

A prediction takes a layer profile and a cost fitted to collectives measured on their own, no row of the runs.
A case's truth is the median of its iterations; errors are relative; an interval is of a single iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from ddlkit.model.predictor import forecast_case
from ddlkit.store.files import own_yaml
from workbook.common import places
from workbook.common.outputs import format_number
from workbook.common.source import Source
from workbook.validate import rivals
from workbook.validate.rivals import LINE, OURS, predicted_times

RESCALED = "rescaled"
"""Our model with compute as the same run measured it: a machine drifts, and communication's error remains."""
REPEATS_WITHIN = 0.1
"""How far the rounds of one case may differ, in the mean, before the machine counts as disturbed."""
_PARTS = (
    f"{of}_{part}"
    for of in (OURS, LINE)
    for part in ("alone", "copied", "slowed", "beside")
)
PREDICTED = (
    *rivals.MODELS,
    "fitted_norm",
    *_PARTS,
    rivals.MEASURED,
    rivals.TRANSFERRED,
)
"""Every model that a campaign may have predicted its cases by, before they ran, then or now."""
_ENDS = "lower_s", "upper_s"


# -- what was measured, and what is predicted of it -----------------------------------------------


def measured(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per case: medians of its iterations in seconds, and its repeatability.

    Disturbed iterations count where a case has no others; it is then ``marked``, as it is where its rounds
    differ by more than REPEATS_WITHIN in the mean: no prediction is asked for that.
    """
    quantities = ["iteration_s", "exposed_communication_s", "compute_s"]
    keys = runs.drop_duplicates("case").set_index("case")[[*CASE_COLUMNS, "origin"]]
    disturbed = (
        runs["disturbed"] if "disturbed" in runs else pd.Series(False, runs.index)
    )
    marked = disturbed.groupby(runs["case"]).transform("all")
    runs = runs[~disturbed | marked]
    repeats = runs.groupby(["case", "repeat"])[quantities].median().groupby("case")
    cases = repeats.median().add_prefix("measured_")
    spread = repeats.agg(mean_difference) / repeats.median()
    cases["repeats"] = repeats.size()
    cases["repeatability"] = spread["iteration_s"]
    cases["repeatability_exposed"] = spread["exposed_communication_s"]
    how = {"processor_load": "median", "stolen": "max", "copy_s_per_byte": "median"}
    cases = cases.join(runs.groupby("case").agg({**how, "processor_limited": "any"}))
    cases["marked"] = marked.groupby(runs["case"]).any()
    cases["marked"] |= (cases["repeatability"] > REPEATS_WITHIN) & ("disturbed" in runs)
    return keys.join(cases).reset_index()


def mean_difference(values: pd.Series) -> float:
    """Return how far two repeats of one case differ, in the mean; NaN for a single one."""
    repeats = values.to_numpy()
    apart = np.abs(repeats[:, None] - repeats)[np.triu_indices(len(repeats), 1)]
    return float(apart.mean()) if len(apart) else math.nan


def calibrated(
    collectives: pd.DataFrame,
    form: str = "table",
    draws: int = 200,
    slowdown: pd.DataFrame | None = None,
) -> Calibration:
    """Return a calibration that holds the costs of every model on trial too, from the same samples."""
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
    """Return one row per case: measured, predicted in seconds by MODELS and RESCALED, and their errors.

    workloads, compute_scatter : by a profile's hash; the scatter counts for cases that really train
    selections : selection times by the hash that a sparse case carries
    """
    cases, predicted = measured(runs), []
    for row in cases.to_dict("records"):
        case, scatter = Case.from_row(row), predictor.STEADY
        if case.kind == TRAINING and compute_scatter:
            scatter = compute_scatter.get(case.profile_sha256, predictor.STEADY)
        ours = forecast_case(
            case, workloads, calibration, selections, row["copy_s_per_byte"], scatter
        )
        workload = ours.iteration.workload
        scaled = workload.scaled(row["measured_compute_s"] / workload.compute_s)
        rescaled = replace(ours.iteration, workload=scaled).prediction
        seconds = predicted_times(ours, calibration.of_case(case).others)
        seconds[RESCALED] = rivals.times(rescaled)
        values: dict[str, float] = {}
        for name, (iteration_s, exposed_s) in seconds.items():
            values |= {
                f"{name}_iteration_s": iteration_s,
                f"{name}_exposed_s": exposed_s,
            }
        values["lower_s"], values["upper_s"] = ours.paired_s or (math.nan, math.nan)
        values["contention"] = calibration.of_case(case).contention is not None
        predicted.append({**values, "predicted_compute_s": workload.compute_s})
    return _with_errors(cases.join(pd.DataFrame(predicted)), (*rivals.MODELS, RESCALED))


def _with_errors(cases: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return the cases with columns ``<model>_error``, ``<model>_exposed_error``, ``<model>_paired_error``.

    Paired: a prediction less its own compute, and with what was measured around it instead, without exchange.
    """
    of = "iteration", "exposed_communication"
    took_s, exposed_s = (cases[f"measured_{what}_s"] for what in of)
    errors = {}
    for name in names:
        apart_s = cases[f"{name}_exposed_s"] - exposed_s
        errors[f"{name}_error"] = cases[f"{name}_iteration_s"] / took_s - 1
        errors[f"{name}_paired_error"] = apart_s / took_s
        errors[f"{name}_exposed_error"] = apart_s / exposed_s
    return pd.concat([cases, pd.DataFrame(errors)], axis=1)


def labelled(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with ``lab``, as in "4 x 1gbit", and ``inside``: their median in its interval.

    Of real training, the interval of the paired prediction: both ends less what compute was predicted to
    take, and with what it took around the runs.
    """
    if "contention" in cases:
        drifted_s = cases["measured_compute_s"] - cases["predicted_compute_s"]
        drifted_s = drifted_s.where(cases["contention"], 0.0)
        ends = {end: cases[end] + drifted_s for end in _ENDS}
        cases = cases.assign(**ends)
    name = cases["workers"].astype(str) + " x " + cases["link"].str.removeprefix("lab:")
    name += np.where(cases["density"] < 1, ", sparse", "")
    name += np.where(cases["straggler"] > 1, ", straggler", "")
    name += np.where(cases["in_flight"] > 1, ", two in flight", "")
    inside = cases["measured_iteration_s"].between(cases["lower_s"], cases["upper_s"])
    return cases.assign(lab=name, inside=inside)


def sends_one_message(cases: pd.DataFrame) -> pd.Series:
    """Return for each case whether its plan sends all gradients in one message.

    Such a plan overlaps nothing, so that its error tests no model of overlap.
    """
    return ~cases["ends"].astype(str).str.contains(";")


def judge(
    own: Source, beside: Source, form: str = "table", *, marked: bool = False
) -> pd.DataFrame:
    """Return a recording's `labelled` cases by profiles ``beside`` it, none that the processor limited.

    marked : whether to return what was disturbed or limited here, too
    """
    workloads, runs = beside.workloads(), own.table("runs")
    runs = runs[runs["profile_sha256"].isin(workloads)]
    if runs.empty:
        return runs
    slowdown = own.table("slowdown") if own.has("slowdown") else None
    calibration = calibrated(own.table("collectives"), form, slowdown=slowdown)
    cases = validate(
        runs, workloads, calibration, beside.selections(), beside.compute_scatter()
    )
    if form == "table":
        ends = pd.read_csv(places.DATA / "intervals.csv", index_col="case")
        cases = cases.set_index("case")
        cases.update(ends)
        cases = cases.reset_index()
    limited = cases["processor_limited"]
    if not own.is_live("runs"):  # what was recorded before had no marks
        return labelled(cases[~limited])
    cases["marked"] |= limited
    return labelled(cases if marked else cases[~cases["marked"]])


# -- predictions that were written before their runs ----------------------------------------------


def joined(campaign: Source) -> pd.DataFrame:
    """Return rows as `validate`, of models before their runs; ``covered`` of ``runs`` lie inside."""
    predicted, runs = campaign.table("predicted"), campaign.table("runs")
    (path,) = store.list_tables(campaign.directories[0], "predicted-*.csv")
    digest = str(store.load_stamp(path)["sha256"])[
        : int(runs["predicted"].str.len().max())
    ]
    if others := set(runs["predicted"]) - {digest}:
        raise UserError(
            f"runs predicted by {sorted(others)}, not by the predictions {digest}"
        )
    wide = predicted.pivot(
        index="case", columns=["model", "quantity"], values="seconds"
    )
    cases = measured(runs).set_index("case")
    for name, quantity in product(PREDICTED, ("iteration", "exposed")):
        cases[f"{name}_{quantity}_s"] = wide.get((name, quantity), np.nan)
    cases["lower_s"], cases["upper_s"] = wide[OURS, "lower"], wide[OURS, "upper"]
    cases["predicted_compute_s"] = wide[OURS, "iteration"] - wide[OURS, "exposed"]
    cases["contention"] = cases["kind"] == TRAINING
    drifted_s = runs["compute_s"] - runs["case"].map(cases["predicted_compute_s"])
    drifted_s = drifted_s.where(runs["case"].map(cases["contention"]), 0.0)
    ends = (runs["case"].map(cases[end]) + drifted_s for end in ("lower_s", "upper_s"))
    inside = runs["iteration_s"].between(*ends)
    counted = inside.groupby(runs["case"]).agg(covered="sum", runs="size")
    return _with_errors(cases, PREDICTED).join(counted).reset_index()


def trained(campaign: Source) -> pd.DataFrame:
    """Return the `labelled` cases of a campaign of real training, none that was disturbed."""
    cases = joined(campaign)
    return labelled(cases[~cases["marked"]])


# -- live runs of the suite quick ----------------------------------------------------------------


def live() -> pd.DataFrame:
    """Return all such rows that were recorded, by ``run`` and ``condition``, with error and ``inside``."""
    cases = pd.read_csv(places.DATA / "live.csv")
    cases["model_iteration_s"] = cases["predicted_s"]
    cases["model_error"] = cases["predicted_s"] / cases["measured_s"] - 1
    return cases.assign(
        inside=cases["measured_s"].between(cases["lower_s"], cases["upper_s"])
    )


# -- scores ---------------------------------------------------------------------------------------


def summary(cases: pd.DataFrame, runs: pd.DataFrame) -> dict[str, float]:
    """Return what a reader asks for first of `labelled` cases and of their single ``runs``.

    Errors are absolute and relative; half_width_share, the median interval's, is of the prediction.
    """
    off = {
        name: cases[f"{name}_error"].abs()
        for name in (OURS, "no_overlap", "perfect_overlap")
    }
    ends = cases.set_index("case")[["lower_s", "upper_s"]]
    single = runs[runs["case"].isin(ends.index)].join(ends, on="case")
    inside = single["iteration_s"].between(single["lower_s"], single["upper_s"])
    half_s = (cases["upper_s"] - cases["lower_s"]) / 2
    return {
        "cases": len(cases),
        "median_error": off[OURS].median(),
        "max_error": off[OURS].max(),
        "median_exposed_error": cases["model_exposed_error"].abs().median(),
        "median_repeatability": cases["repeatability"].median(),
        "no_overlap_median_error": off["no_overlap"].median(),
        "perfect_overlap_median_error": off["perfect_overlap"].median(),
        "interval_coverage": cases["inside"].mean(),
        "iterations": len(single),
        "coverage_of_iterations": inside.mean(),
        "half_width_share": (half_s / cases["model_iteration_s"]).median(),
    }


# -- goals, which were set before the data --------------------------------------------------------


MUCH = 0.2  # of an iteration: from here on exposed communication is judged by itself


def much_exposed(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases whose exposed communication is at least a fifth of their iteration."""
    took_s, exposed_s = (
        cases[f"measured_{x}_s"] for x in ("iteration", "exposed_communication")
    )
    return cases[exposed_s >= MUCH * took_s]


def difference(cases: pd.DataFrame, rival: str) -> tuple[float, float, float]:
    """Return how much larger our absolute paired error is than the rival's, in the mean, and its ends.

    The 95% interval is of bootstrap samples of clusters, networks on a link: cases of one share its errors.
    """
    ours, theirs = (cases[f"{name}_paired_error"].abs() for name in (OURS, rival))
    of_cluster = (
        (ours - theirs).groupby([cases["network"], cases["link"]]).agg(["sum", "size"])
    )
    drawn = np.random.default_rng(0).integers(
        0, len(of_cluster), (10_000, len(of_cluster))
    )
    sums, sizes = of_cluster.to_numpy()[drawn].sum(axis=1).T
    lower, upper = np.percentile(sums / sizes, [2.5, 97.5])
    return float((ours - theirs).mean()), float(lower), float(upper)


_OF_LIVE = {
    "inside": "coverage",
    "half_width": "half_width_share",
    "error": "median_error",
}


def _of_kind(kind: str, statistic: str, cases: pd.DataFrame) -> float:
    """Return a statistic of a kind of cases, none that was disturbed."""
    return STATISTICS[statistic](cases[(cases["kind"] == kind) & ~cases["marked"]])


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
    "half_width_share": lambda of: (
        of.eval("(upper_s - lower_s) / model_iteration_s").median() / 2
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
"""What a goal may ask of `labelled` cases, or of those of `live`; else it is an expression of columns."""


class Goal(NamedTuple):
    """One number to reach: a statistic of all cases, at most or at least a value, ``set`` at an ISO time."""

    goal: str
    statistic: str
    at_most: float = math.inf
    at_least: float = -math.inf
    set: str = ""

    def judged(self, cases: pd.DataFrame) -> dict[str, Any]:
        """Return goal, wanted (in words, as frozen in reports/goals.csv), reached, and if it holds."""
        known = STATISTICS.get(self.statistic)
        reached = float(known(cases) if known else cases.eval(self.statistic))
        least = self.at_least > -math.inf
        wanted = f"at least {self.at_least:g}" if least else f"at most {self.at_most:g}"
        holds = self.at_least <= reached <= self.at_most
        return {"goal": self.goal, "wanted": wanted, "reached": reached, "holds": holds}


def goals(of: str) -> list[Goal]:
    """Return the goals that data/goals.yml has under a name."""
    text = (places.DATA / "goals.yml").read_text(encoding="utf-8")
    return [Goal(**entry) for entry in own_yaml(text)[of]]


# -- what campaigns reached, as frozen in reports/goals.csv and reports/coverage.csv --------------


SIZES = ("cases", "links", "cases with exposed communication of at least a fifth")
"""Goals of how much was to be measured, which no model can miss: they do not count."""


def frozen(name: str, campaign: str = "") -> pd.DataFrame:
    """Return the rows of "goals" or "coverage", all or those of a campaign; "" where nothing is given."""
    rows = pd.read_csv(places.ROOT / "reports" / f"{name}.csv", keep_default_na=False)
    return rows[rows["campaign"] == campaign] if campaign else rows


def _with_a_number(goals: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that count: goals with a number, but for how much was to be measured."""
    return goals[(goals["held"] != "") & ~goals["goal"].isin(SIZES)]


def goals_met(standing: str) -> tuple[int, int]:
    """Return how many goals of a standing were met, over all campaigns, and how many there were.

    Parameters
    ----------
    standing : str
        "confirmatory" for preset goals, or "exploratory" for those that were set with the data in sight.
    """
    goals = _with_a_number(frozen("goals"))
    of_standing = goals[goals["standing"] == standing]
    return int((of_standing["held"] == "True").sum()), len(of_standing)


def outcome(campaign: str) -> str:
    """Return which goals a campaign met and missed, and whether its predictions came before its runs.

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
    goals = _with_a_number(rows)
    sentences = []
    for standing, kind in (("confirmatory", "preset"), ("exploratory", "exploratory")):
        of_kind = goals[goals["standing"] == standing]
        if of_kind.empty:
            continue
        missed = [
            f"{row.goal} ({format_number(row.reached)}, target {row.wanted})"
            for row in of_kind[of_kind["held"] == "False"].itertuples()
        ]
        met = len(of_kind) - len(missed)
        sentence = f"{met} of {len(of_kind)} {kind} goals were met"
        if missed:
            sentence += "; missed: " + "; ".join(missed)
        sentences.append(sentence)
    if not sentences:
        sentences.append("No goal was set")
    notes = pd.concat([rows, intervals])["note"]
    if not notes.str.contains("predictions committed").any():
        sentences.append("No table of predictions was committed before the runs")
    return ". ".join(sentences)
