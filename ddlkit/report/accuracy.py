"""Predicted meets measured: every Case predicted, joined on its key with its runs, and judged.

The only inputs of a prediction are a layer profile (compute) and a cost fitted to collectives measured on
their own (communication); no row of the runs table takes part in either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.sparse import Selecting
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import STEADY, Forecast, forecast_case
from ddlkit.model.trials import COSTS, LINES, MODELS, TRIALS, said
from ddlkit.report.source import Source

RESCALED = "rescaled"
"""The overlap model once more, its compute stretched to what the same run measured without communication.

Between a profile and a run the machine's speed drifts; what error remains here is communication's alone.
"""
TAIL = 0.9
"""The quantile of errors that one case in ten exceeds."""
DRAWS = 1000
ROUNDS = 5
"""Repeats of a case from which its repeatability can be told: of two, one difference is all there is."""
Floats = NDArray[np.float64]


def calibrated(collectives: pd.DataFrame, form: str = "table", draws: int = 200) -> Calibration:
    """A calibration that holds the costs of every model on trial too, from the same samples."""
    return Calibration.of(collectives, form, draws, also=COSTS)


def measured(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per case: median of its iterations, and how well it repeats.

    repeatability : mean difference between two repeats' medians, relative to the median; likewise
        ``repeatability_exposed`` of exposed communication
    """
    quantities = ["iteration_s", "exposed_communication_s", "compute_s"]
    repeats = runs.groupby(["case", "repeat"])[quantities].median().groupby("case")
    spread = repeats.agg(mean_difference) / repeats.median()
    found = repeats.median().add_prefix("measured_")
    found["repeats"] = repeats.size()
    found["repeatability"] = spread["iteration_s"]
    found["repeatability_exposed"] = spread["exposed_communication_s"]
    how = {"processor_load": "median", "stolen": "max", "copy_s_per_byte": "median"}
    found = found.join(runs.groupby("case").agg({**how, "processor_limited": "any"}))
    keys = runs.drop_duplicates("case").set_index("case")[[*CASE_COLUMNS, "origin"]]
    return keys.join(found).reset_index()


def often_repeated(*runs: pd.DataFrame, least: int = ROUNDS) -> pd.DataFrame:
    """Of several runs tables, the `measured` cases of at least so many repeats: they tell what repeats."""
    found = pd.concat([measured(one) for one in runs], ignore_index=True)
    return found[found["repeats"] >= least]


def mean_difference(values: pd.Series) -> float:
    """Repeatability: how far two repeats of one case differ, in the mean; NaN for a single one."""
    found = values.to_numpy()
    apart = np.abs(found[:, None] - found)[np.triu_indices(len(found), 1)]
    return float(apart.mean()) if len(apart) else math.nan


def by_every_model(
    found: Forecast, compute_s: float, others: Mapping[str, MessageCost] | None = None
) -> dict[str, float]:
    """Iteration and exposed communication by every model, and the interval of a single iteration.

    compute_s : measured in the same run; only the RESCALED model uses it
    others : costs by the form that a Trial names; a trial without its cost is NaN
    """
    row: dict[str, float] = {}
    for name, times in said(found, others or {}).items():
        row[f"{name}_iteration_s"], row[f"{name}_exposed_s"] = times
    iteration, workload = found.iteration, found.iteration.workload
    stretched = replace(iteration, workload=workload.scaled(compute_s / workload.compute_s))
    row[f"{RESCALED}_iteration_s"] = stretched.prediction.iteration_s
    row[f"{RESCALED}_exposed_s"] = stretched.prediction.iteration_s - compute_s
    row["lower_s"], row["upper_s"] = found.interval_s or (math.nan, math.nan)
    return {**row, "predicted_compute_s": workload.compute_s}


def validate(
    runs: pd.DataFrame,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    selections: Mapping[str, Selecting] | None = None,
    compute_scatter: Mapping[str, Floats] | None = None,
) -> pd.DataFrame:
    """One row per case: measured, predicted, and signed relative errors.

    ``<model>_error`` is on the iteration, ``<model>_exposed_error`` on exposed communication, of MODELS.
    calibration : of models on trial only those are judged whose cost it holds, see `calibrated`
    selections : selection times by the hash that a sparse case carries
    compute_scatter : of profiles by their hash, as `forecast_case` takes it; for cases that really train
    """
    found, scatter = measured(runs), compute_scatter or {}
    predicted = []
    for row in found.to_dict("records"):
        scattered = scatter if row["kind"] == "training" else {}
        case = Case.from_row(row)
        forecast = forecast_case(
            case,
            workloads,
            calibration,
            selections,
            row["copy_s_per_byte"],
            scattered.get(row["profile_sha256"], STEADY),
        )
        others = calibration.of_case(case).others
        predicted.append(by_every_model(forecast, row["measured_compute_s"], others))
    joined = found.join(pd.DataFrame(predicted))
    for name in (*MODELS, RESCALED):
        joined[f"{name}_error"] = joined[f"{name}_iteration_s"] / joined["measured_iteration_s"] - 1
        exposed = joined[f"{name}_exposed_s"] - joined["measured_exposed_communication_s"]
        joined[f"{name}_exposed_error"] = exposed / joined["measured_exposed_communication_s"]
    return joined


def summary(validated: pd.DataFrame) -> dict[str, float]:
    """The figures that a reader asks for first; errors are absolute and relative.

    Of every model on trial the median error, and ours on the same cases where those are fewer.
    """
    exposed = validated["model_exposed_error"].abs()
    size = {name: validated[f"{name}_error"].abs() for name in MODELS}
    inside = validated["measured_iteration_s"].between(validated["lower_s"], validated["upper_s"])
    result = {
        "cases": len(validated),
        "median_error": size["model"].median(),
        "tail_error": size["model"].quantile(TAIL),
        "max_error": size["model"].max(),
        "median_exposed_error": exposed.median(),
        "median_exposed_error_rescaled": validated[f"{RESCALED}_exposed_error"].abs().median(),
        "max_exposed_error": exposed.max(),
        "median_repeatability": validated["repeatability"].median(),
        "median_repeatability_exposed": validated["repeatability_exposed"].median(),
        "interval_coverage": inside.mean(),
    }
    for name in TRIALS:
        covered = size[name].notna()
        if covered.any():
            result[f"{name}_median_error"] = size[name].median()
        if covered.any() and not covered.all():
            result[f"median_error_where_{name}"] = size["model"][covered].median()
    return {name: float(value) for name, value in result.items()}


def labelled(validated: pd.DataFrame) -> pd.DataFrame:
    """The validated cases with a column ``lab``: its ranks and links, as in "4 x 1gbit"."""
    name = validated["workers"].astype(str) + " x " + validated["link"].str.removeprefix("lab:")
    name += np.where(validated["density"] < 1, ", sparse", "")
    name += np.where(validated["straggler"] > 1, ", straggler", "")
    name += np.where(validated["in_flight"] > 1, ", two in flight", "")
    inside = validated["measured_iteration_s"].between(validated["lower_s"], validated["upper_s"])
    return validated.assign(lab=name, inside=inside)


def judge(own: Source, known: Source, form: str = "table") -> pd.DataFrame:
    """The `labelled` cases of a recording's runs, each predicted from the calibration of its own lab.

    known : has their layer profiles and selection times. Runs without a profile, and cases that the
        processor limited, are left out; where nothing is left, no rows.
    """
    workloads, runs = known.workloads(), own.table("runs")
    runs = runs[runs["profile_sha256"].isin(workloads)]
    if runs.empty:
        return runs
    calibration, scatter = calibrated(own.table("collectives"), form), known.compute_scatter()
    found = validate(runs, workloads, calibration, known.selections(), scatter)
    return labelled(found[~found["processor_limited"]])


def coverage(cases: pd.DataFrame, runs: pd.DataFrame) -> dict[str, float]:
    """How many of `labelled` cases, and how many of their single iterations, lie in their intervals.

    The interval is of a single iteration, so a case's median lies in it more easily. half_width_share : in
    the median, over the measured time. runs : the table that the cases are of
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


def by_lab(cases: pd.DataFrame) -> pd.DataFrame:
    """One row per lab of `labelled` cases: errors, repeatability, coverage, and the processor's share."""
    size = cases.assign(
        error=cases["model_error"].abs(), exposed=cases["model_exposed_error"].abs()
    )
    found = size.groupby("lab", sort=False).agg(
        cases=("case", "size"),
        median_error=("error", "median"),
        max_error=("error", "max"),
        median_exposed=("exposed", "median"),
        max_exposed=("exposed", "max"),
        repeatability=("repeatability", "median"),
        coverage=("inside", "mean"),
        processor_load=("processor_load", "median"),
        limited=("processor_limited", "sum"),
    )
    return found.reset_index()


def contest(cases: pd.DataFrame, by: str = "lab", draws: int = DRAWS) -> pd.DataFrame:
    """One row per model on trial, beside ours on the same cases: those that it has a formula for.

    by : the column whose values are drawn anew, with all their cases, for the intervals: cases of one lab
        share a calibration and err together; "case" where there is one lab only

    Columns: model; cases; median, tail and largest of the absolute error, each also as ``ours_``;
    exposed_median and ours_exposed_median; closer, the share of cases in which it errs less than ours; and
    of pairs, with ``_lower`` and ``_upper`` of a 95% bootstrap interval: ``difference``, its mean error less
    ours, ``factor`` and ``tail_factor``, its median and tail over ours.
    """
    rows = []
    for name in TRIALS:
        there = cases[cases[f"{name}_error"].notna()]
        if there.empty:
            continue
        both = np.abs(there[[f"{name}_error", "model_error"]].to_numpy(float))
        exposed = there[[f"{name}_exposed_error", "model_exposed_error"]].abs().median()
        row = {"model": name, "cases": len(there)}
        parts = {"median": np.median(both, 0), "tail": np.quantile(both, TAIL, 0)}
        for part, values in {**parts, "largest": both.max(axis=0)}.items():
            row[part], row[f"ours_{part}"] = values.tolist()
        row["exposed_median"], row["ours_exposed_median"] = exposed.tolist()
        row["closer"] = float(np.mean(both[:, 0] < both[:, 1]))
        of = there.groupby(by, sort=False).ngroup().to_numpy()
        rows.append({**row, **_intervals(both, of, draws)})
    return pd.DataFrame(rows)


def _compared(both: Floats) -> dict[str, float]:
    """(n, 2) absolute errors of a model and of ours, case by case, as three numbers."""
    (median, ours), (tail, ours_tail) = np.quantile(both, [0.5, TAIL], axis=0)
    difference = float(np.mean(both[:, 0] - both[:, 1]))
    return {"difference": difference, "factor": median / ours, "tail_factor": tail / ours_tail}


def _intervals(both: Floats, of: NDArray[np.intp], draws: int) -> dict[str, float]:
    """`_compared`, and between which values it lies in 95% of samples drawn with replacement.

    of : (n,) the lab, or what else is drawn as a whole, of each case
    """
    rng, groups = np.random.default_rng(0), [np.flatnonzero(of == k) for k in range(of.max() + 1)]
    drawn = pd.DataFrame(
        _compared(
            both[np.concatenate([groups[k] for k in rng.integers(0, len(groups), len(groups))])]
        )
        for _ in range(draws)
    )
    found = _compared(both)
    for end, quantile in (("lower", 0.025), ("upper", 0.975)):
        found |= {f"{name}_{end}": value for name, value in drawn.quantile(quantile).items()}
    return found


def by_plan(cases: pd.DataFrame, names: Sequence[str] = ("model", *LINES)) -> pd.DataFrame:
    """Median and tail of the absolute error of each model by kind of plan: one row per kind.

    Columns: (``cases``, ""), then (``median``, name) and (``tail``, name)
    """
    size = cases[[f"{name}_error" for name in names]].abs().set_axis(list(names), axis=1)
    grouped = size.groupby(cases["plan"].str.partition(":")[0].rename("plan"), sort=False)
    parts = {"median": grouped.median(), "tail": grouped.quantile(TAIL)}
    found = pd.concat(parts, axis=1)
    found.insert(0, ("cases", ""), grouped.size())
    return found


def shares_below(
    cases: pd.DataFrame, names: Sequence[str] = MODELS, quantity: str = "error"
) -> pd.DataFrame:
    """Share of cases (in %) whose absolute error is at most the index (in %), one column per model.

    quantity : "error" of the iteration or "exposed_error"; cases that a model says nothing of are left out
    """
    limits = np.geomspace(0.05, 100, 60)
    size = {name: cases[f"{name}_{quantity}"].dropna().abs() for name in names}
    shares = {
        name: [100 * float((values <= x / 100).mean()) for x in limits]
        for name, values in size.items()
    }
    return pd.DataFrame(shares, index=pd.Index(limits, name="error_percent"))


def outliers(cases: pd.DataFrame, count: int = 6) -> pd.DataFrame:
    """The cases that the model misses by most, measured in what the case itself repeats to."""
    beyond = cases["model_error"].abs() / cases["repeatability"].clip(lower=1e-3)
    return cases.assign(errors_per_repeat=beyond).nlargest(count, "errors_per_repeat")
