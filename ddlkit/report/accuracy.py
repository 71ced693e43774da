"""Predicted meets measured: the one judge, of predictions made before their runs and of those made after.

A prediction takes a layer profile and a cost fitted to collectives measured on their own, no row of the runs.
A case's truth is the median of its iterations; errors are relative; an interval is of a single iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from ddlkit import store
from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.sparse import Selecting
from ddlkit.core.workload import Floats, Workload
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import (
    CARRIED,
    MEASURED,
    MODELS,
    OURS,
    STEADY,
    TRIAL_COSTS,
    Forecast,
    forecast_case,
    predicted_times,
)
from ddlkit.report.source import Source

RESCALED = "rescaled"
"""Our model with compute stretched to what the same run measured without communication: a machine's speed
drifts after its profile was taken, and the error that remains here is communication's alone."""
PREDICTED = (*MODELS, MEASURED, CARRIED)
"""Every model that a campaign may have predicted its cases by, before they ran."""
WITHIN = 0.05


# -- what was measured, and what is predicted of it -----------------------------------------------


def measured(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per case: medians of its iterations in seconds, and how well it repeats.

    repeatability : mean difference between two repeats' medians, relative to the median
    """
    quantities = ["iteration_s", "exposed_communication_s", "compute_s"]
    repeats = runs.groupby(["case", "repeat"])[quantities].median().groupby("case")
    spread = repeats.agg(mean_difference) / repeats.median()
    cases = repeats.median().add_prefix("measured_")
    cases["repeats"] = repeats.size()
    cases["repeatability"] = spread["iteration_s"]
    cases["repeatability_exposed"] = spread["exposed_communication_s"]
    how = {"processor_load": "median", "stolen": "max", "copy_s_per_byte": "median"}
    cases = cases.join(runs.groupby("case").agg({**how, "processor_limited": "any"}))
    keys = runs.drop_duplicates("case").set_index("case")[[*CASE_COLUMNS, "origin"]]
    return keys.join(cases).reset_index()


def mean_difference(values: pd.Series) -> float:
    """Return how far two repeats of one case differ, in the mean; NaN for a single one."""
    repeats = values.to_numpy()
    apart = np.abs(repeats[:, None] - repeats)[np.triu_indices(len(repeats), 1)]
    return float(apart.mean()) if len(apart) else math.nan


def calibrated(collectives: pd.DataFrame, form: str = "table", draws: int = 200) -> Calibration:
    """Return a calibration that holds the costs of every model on trial too, from the same samples."""
    return Calibration.of(collectives, form, draws, also=TRIAL_COSTS)


def by_every_model(
    ours: Forecast, compute_s: float, others: Mapping[str, MessageCost]
) -> dict[str, float]:
    """Return ``<model>_iteration_s`` and ``<model>_exposed_s``, and the interval of an iteration.

    compute_s : measured in the same run; only the RESCALED model uses it
    others : costs by the form that a model on trial names; one without its cost is NaN
    """
    row: dict[str, float] = {}
    iteration, workload = ours.iteration, ours.iteration.workload
    stretched = replace(iteration, workload=workload.scaled(compute_s / workload.compute_s))
    rescaled_s = stretched.prediction.iteration_s
    seconds = predicted_times(ours, others) | {RESCALED: (rescaled_s, rescaled_s - compute_s)}
    for name, (iteration_s, exposed_s) in seconds.items():
        row |= {f"{name}_iteration_s": iteration_s, f"{name}_exposed_s": exposed_s}
    row["lower_s"], row["upper_s"] = ours.interval_s or (math.nan, math.nan)
    return {**row, "predicted_compute_s": workload.compute_s}


def validate(
    runs: pd.DataFrame,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    selections: Mapping[str, Selecting] | None = None,
    compute_scatter: Mapping[str, Floats] | None = None,
) -> pd.DataFrame:
    """Return one row per case: measured, predicted, and for MODELS the errors on iteration and exposed.

    workloads, compute_scatter : by a profile's hash; the scatter counts for cases that really train
    selections : selection times by the hash that a sparse case carries
    """
    cases, predicted = measured(runs), []
    for row in cases.to_dict("records"):
        case, scatter = Case.from_row(row), STEADY
        if case.kind == "training" and compute_scatter:
            scatter = compute_scatter.get(case.profile_sha256, STEADY)
        ours = forecast_case(
            case, workloads, calibration, selections, row["copy_s_per_byte"], scatter
        )
        others = calibration.of_case(case).others
        predicted.append(by_every_model(ours, row["measured_compute_s"], others))
    return _with_errors(cases.join(pd.DataFrame(predicted)), (*MODELS, RESCALED))


def _with_errors(cases: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return the cases with columns ``<model>_error`` and ``<model>_exposed_error``."""
    for name in names:
        cases[f"{name}_error"] = cases[f"{name}_iteration_s"] / cases["measured_iteration_s"] - 1
        exposed = cases[f"{name}_exposed_s"] - cases["measured_exposed_communication_s"]
        cases[f"{name}_exposed_error"] = exposed / cases["measured_exposed_communication_s"]
    return cases


def labelled(cases: pd.DataFrame) -> pd.DataFrame:
    """Return the cases with ``lab``, as in "4 x 1gbit", and ``inside``: their median in its interval."""
    name = cases["workers"].astype(str) + " x " + cases["link"].str.removeprefix("lab:")
    name += np.where(cases["density"] < 1, ", sparse", "")
    name += np.where(cases["straggler"] > 1, ", straggler", "")
    name += np.where(cases["in_flight"] > 1, ", two in flight", "")
    inside = cases["measured_iteration_s"].between(cases["lower_s"], cases["upper_s"])
    return cases.assign(lab=name, inside=inside)


def judge(own: Source, beside: Source, form: str = "table") -> pd.DataFrame:
    """Return the `labelled` cases of a recording, each predicted from the calibration of its own lab.

    beside : has their profiles and selection times; runs without one, and those that the processor limited,
        are held out
    """
    workloads, runs = beside.workloads(), own.table("runs")
    runs = runs[runs["profile_sha256"].isin(workloads)]
    if runs.empty:
        return runs
    calibration, scatter = calibrated(own.table("collectives"), form), beside.compute_scatter()
    cases = validate(runs, workloads, calibration, beside.selections(), scatter)
    return labelled(cases[~cases["processor_limited"]])


# -- predictions that were written before their runs ----------------------------------------------


def joined(campaign: Source) -> pd.DataFrame:
    """Return one row per case, as `validate`: measured, what each model of PREDICTED had said, and errors.

    Of its ``runs`` iterations ``covered`` lie in the interval. Raises UserError for runs not predicted here.
    """
    predicted, runs = campaign.table("predicted"), campaign.table("runs")
    (path,) = store.list_tables(campaign.directories[0], "predicted-*.csv")
    digest = str(store.load_stamp(path)["sha256"])[: int(runs["predicted"].str.len().max())]
    if others := set(runs["predicted"]) - {digest}:
        raise UserError(f"runs predicted by {sorted(others)}, not by the predictions {digest}")
    wide = predicted.pivot(index="case", columns=["model", "quantity"], values="seconds")
    cases = measured(runs).set_index("case")
    if missing := [*cases.index.difference(wide.index)]:
        raise UserError(f"case {missing[0]} was run, and nothing predicted")
    for name, quantity in product(PREDICTED, ("iteration", "exposed")):
        cases[f"{name}_{quantity}_s"] = wide.get((name, quantity), np.nan)
    cases["lower_s"], cases["upper_s"] = wide[OURS, "lower"], wide[OURS, "upper"]
    ends = (runs["case"].map(cases[end]) for end in ("lower_s", "upper_s"))
    inside = runs["iteration_s"].between(*ends)
    counted = inside.groupby(runs["case"]).agg(covered="sum", runs="size")
    return _with_errors(cases, PREDICTED).join(counted).reset_index()


class Preregistered(NamedTuple):
    """Rows of `joined`, `labelled`, that the processor did not limit; and what of LINKS_GOALS they reach."""

    cases: pd.DataFrame
    goals: pd.DataFrame


def preregistered(campaign: Source) -> Preregistered:
    """Return the campaign, joined and judged by LINKS_GOALS."""
    everything = labelled(joined(campaign))
    cases = everything[~everything["processor_limited"]]
    return Preregistered(cases, pd.DataFrame(goal.judged(cases) for goal in LINKS_GOALS))


# -- scores ---------------------------------------------------------------------------------------


def summary(cases: pd.DataFrame) -> dict[str, float]:
    """Return what a reader asks for first of `labelled` cases; errors are absolute and relative."""
    size = {name: cases[f"{name}_error"].abs() for name in (OURS, "no_overlap", "perfect_overlap")}
    result = {
        "cases": len(cases),
        "median_error": size[OURS].median(),
        "max_error": size[OURS].max(),
        "median_exposed_error": cases["model_exposed_error"].abs().median(),
        "median_repeatability": cases["repeatability"].median(),
        "interval_coverage": cases["inside"].mean(),
        "no_overlap_median_error": size["no_overlap"].median(),
        "perfect_overlap_median_error": size["perfect_overlap"].median(),
    }
    return {name: float(value) for name, value in result.items()}


def coverage(cases: pd.DataFrame, runs: pd.DataFrame) -> dict[str, float]:
    """Return which share of `labelled` cases, and of their single ``runs``, lie in their intervals.

    half_width_share : the median of half an interval over the measured time
    """
    ends = cases.set_index("case")[["lower_s", "upper_s"]]
    single = runs[runs["case"].isin(ends.index)].join(ends, on="case")
    inside = single["iteration_s"].between(single["lower_s"], single["upper_s"])
    half_s = (cases["upper_s"] - cases["lower_s"]) / 2
    return {
        "cases": len(cases),
        "coverage_of_cases": float(cases["inside"].mean()),
        "iterations": len(single),
        "coverage_of_iterations": float(inside.mean()),
        "half_width_share": float((half_s / cases["measured_iteration_s"]).median()),
    }


# -- goals, which were set before the data --------------------------------------------------------


STATISTICS: dict[str, Callable[[pd.DataFrame], float]] = {
    "median_error": lambda cases: cases[f"{OURS}_error"].abs().median(),
    "median_exposed_error": lambda cases: cases[f"{OURS}_exposed_error"].abs().median(),
    "median_transferred_error": lambda cases: cases[f"{CARRIED}_error"].abs().median(),
    "largest_error_over_repeatability": lambda cases: (
        cases[f"{OURS}_error"].abs() / (2 * cases["repeatability"])
    ).max(),
    "within": lambda cases: cases[f"{OURS}_error"].abs().le(WITHIN).mean(),
    "coverage": lambda cases: cases["inside"].mean(),
    "coverage_of_iterations": lambda cases: cases["covered"].sum() / cases["runs"].sum(),
}
"""What a goal may ask of `labelled` cases."""


class Goal(NamedTuple):
    """One number to reach: a statistic of all cases, at most or at least a value, ``set`` at an ISO time."""

    goal: str
    statistic: str
    at_most: float = math.inf
    at_least: float = -math.inf
    set: str = ""

    def judged(self, cases: pd.DataFrame) -> dict[str, Any]:
        """Return goal, wanted (in words, as frozen in reports/goals.csv), reached, and if it holds."""
        reached = float(STATISTICS[self.statistic](cases))
        least = self.at_least > -math.inf
        wanted = f"at least {self.at_least:g}" if least else f"at most {self.at_most:g}"
        holds = self.at_least <= reached <= self.at_most
        return {"goal": self.goal, "wanted": wanted, "reached": reached, "holds": holds}


LINKS_GOALS = (
    Goal("median error, iteration", "median_error", 0.01),
    Goal("median error, exposed", "median_exposed_error", 0.03),
    Goal("median error, carried", "median_transferred_error", 0.03),
    Goal("cases within 5%", "within", at_least=0.9),
    Goal("interval covers, least", "coverage_of_iterations", at_least=0.9),
    Goal("interval covers, most", "coverage_of_iterations", 0.99),
)
"""Stated on 2026-11-22, before the first run of ``campaign-links``."""


def judge_goals(cases: pd.DataFrame, recorded: datetime) -> pd.DataFrame:
    """Return one row per goal of data/goals.yml: goal, wanted, reached by `labelled` cases, holds, standing.

    The standing is *exploratory* where a goal was set, or the model, a statistic or the choice of cases
    changed, after the recording had begun: such numbers suggest, and only a new recording confirms.
    """
    document = yaml.safe_load((store.DATA / "goals.yml").read_text(encoding="utf-8"))
    goals = [Goal(**entry) for entry in document["goals"]]
    moments = [goal.set for goal in goals] + [change["at"] for change in document["changes"]]
    latest = max(map(datetime.fromisoformat, moments))
    standing = "confirmatory" if latest < recorded else "exploratory"
    return pd.DataFrame(goal.judged(cases) for goal in goals).assign(standing=standing)
