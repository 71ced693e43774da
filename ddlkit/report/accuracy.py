"""Predicted meets measured: every Case predicted, joined on its key with its runs, and judged.

The only inputs of a prediction are a layer profile (compute) and a cost fitted to collectives measured on
their own (communication); no row of the runs table takes part in either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.iteration import Iteration, Prediction, no_overlap, perfect_overlap
from ddlkit.core.sparse import Selecting
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import STEADY, Forecast, forecast_case
from ddlkit.papers.osf import predict_osf

OTHERS: dict[str, Callable[[Iteration], Prediction]] = {
    "no_overlap": no_overlap,
    "perfect_overlap": perfect_overlap,
    "osf": predict_osf,
}
"""Two trivial models that the overlap model must beat, and the paper's own, where it applies."""
MODELS = ("model", *OTHERS)
RESCALED = "rescaled"
"""The overlap model once more, its compute stretched to what the same run measured without communication.

Between a profile and a run the machine's speed drifts; what error remains here is communication's alone.
"""
GOALS = {
    "median error, iteration": 0.02,
    "median error, exposed communication": 0.05,
    "largest error over twice the repeatability": 1.0,
    "interval covers, least": 0.90,
    "interval covers, most": 0.99,
}
"""What a prediction should reach, set before anything was measured."""
Floats = NDArray[np.float64]


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


def mean_difference(values: pd.Series) -> float:
    """Repeatability: how far two repeats of one case differ, in the mean; NaN for a single one."""
    found = values.to_numpy()
    apart = np.abs(found[:, None] - found)[np.triu_indices(len(found), 1)]
    return float(apart.mean()) if len(apart) else math.nan


def by_every_model(found: Forecast, compute_s: float) -> dict[str, float]:
    """Iteration and exposed communication by every model, and the interval of a single iteration.

    compute_s : measured in the same run; only the RESCALED model uses it
    """
    iteration, workload = found.iteration, found.iteration.workload
    uncopied = replace(iteration, copy_s_per_byte=0.0)
    answers = {name: other(uncopied) for name, other in OTHERS.items()}
    row: dict[str, float] = {}
    for name, answer in {**answers, "model": found.prediction}.items():
        row[f"{name}_iteration_s"] = answer.iteration_s
        row[f"{name}_exposed_s"] = answer.exposed_communication_s
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

    ``<model>_error`` is on the iteration, ``<model>_exposed_error`` on exposed communication.
    selections : selection times by the hash that a sparse case carries
    compute_scatter : of profiles by their hash, as `forecast_case` takes it; for cases that really train
    """
    found, scatter = measured(runs), compute_scatter or {}
    predicted = []
    for row in found.to_dict("records"):
        scattered = scatter if row["kind"] == "training" else {}
        forecast = forecast_case(
            Case.from_row(row),
            workloads,
            calibration,
            selections,
            row["copy_s_per_byte"],
            scattered.get(row["profile_sha256"], STEADY),
        )
        predicted.append(by_every_model(forecast, row["measured_compute_s"]))
    joined = found.join(pd.DataFrame(predicted))
    for name in (*MODELS, RESCALED):
        joined[f"{name}_error"] = joined[f"{name}_iteration_s"] / joined["measured_iteration_s"] - 1
        exposed = joined[f"{name}_exposed_s"] - joined["measured_exposed_communication_s"]
        joined[f"{name}_exposed_error"] = exposed / joined["measured_exposed_communication_s"]
    return joined


def summary(validated: pd.DataFrame) -> dict[str, float]:
    """The figures that a reader asks for first; errors are absolute and relative."""
    size = {name: validated[f"{name}_error"].abs() for name in MODELS}
    exposed = {name: validated[f"{name}_exposed_error"].abs() for name in MODELS}
    inside = validated["measured_iteration_s"].between(validated["lower_s"], validated["upper_s"])
    result = {
        "cases": len(validated),
        "median_error": size["model"].median(),
        "max_error": size["model"].max(),
        "median_exposed_error": exposed["model"].median(),
        "median_exposed_error_rescaled": validated[f"{RESCALED}_exposed_error"].abs().median(),
        "max_exposed_error": exposed["model"].max(),
        "median_repeatability": validated["repeatability"].median(),
        "median_repeatability_exposed": validated["repeatability_exposed"].median(),
        "interval_coverage": inside.mean(),
    }
    for name in OTHERS:
        covered = size[name].notna()  # the same cases for both
        if covered.any():
            for what, of in {"": size, "exposed_": exposed}.items():
                ratio = of[name].median() / of["model"][covered].median()
                result[f"{what}skill_over_{name}"] = ratio
    return {name: float(value) for name, value in result.items()}


def labelled(validated: pd.DataFrame) -> pd.DataFrame:
    """The validated cases with a column ``lab``: its ranks and links, as in "4 x 1gbit"."""
    name = validated["workers"].astype(str) + " x " + validated["link"].str.removeprefix("lab:")
    name += np.where(validated["density"] < 1, ", sparse", "")
    name += np.where(validated["straggler"] > 1, ", straggler", "")
    name += np.where(validated["in_flight"] > 1, ", two in flight", "")
    inside = validated["measured_iteration_s"].between(validated["lower_s"], validated["upper_s"])
    return validated.assign(lab=name, inside=inside)


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


def errors(validated: pd.DataFrame, model: str) -> pd.DataFrame:
    """Columns error and exposed_error of one model of `validate`, as `models` takes them."""
    names = {f"{model}_error": "error", f"{model}_exposed_error": "exposed_error"}
    return validated[list(names)].rename(columns=names)


def models(found: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One row per model: errors on the iteration and on exposed communication, on the cases it covers.

    found : model -> frame with columns ``error`` and ``exposed_error``, NaN where it says nothing
    """
    size = pd.concat(found, names=["model"]).abs()
    covered = size.where(size.notna().all(axis=1)).groupby("model", sort=False)
    columns = {"cases": covered["error"].count()}
    for name in ("error", "exposed_error"):
        columns[f"{name}_median"] = covered[name].median()
        columns[f"{name}_90"] = covered[name].quantile(0.9)
        columns[f"{name}_max"] = covered[name].max()
    return pd.DataFrame(columns).reset_index()


def shares_below(found: Mapping[str, pd.DataFrame], column: str = "error") -> pd.DataFrame:
    """Share of cases (in %) whose absolute error is at most the index (in %), one column per model."""
    limits = np.geomspace(0.05, 100, 60)
    shares = {
        name: [100 * float((cases[column].dropna().abs() <= x / 100).mean()) for x in limits]
        for name, cases in found.items()
    }
    return pd.DataFrame(shares, index=pd.Index(limits, name="error_percent"))


def goals(cases: pd.DataFrame) -> pd.DataFrame:
    """One row per goal of GOALS: wanted, reached on `labelled` cases, and whether that is enough."""
    error, exposed = cases["model_error"].abs(), cases["model_exposed_error"].abs()
    beyond = error / (2 * cases["repeatability"])
    coverage = cases["inside"].mean()
    reached = error.median(), exposed.median(), beyond[error.idxmax()], coverage, coverage
    frame = pd.DataFrame({"goal": list(GOALS), "wanted": list(GOALS.values()), "reached": reached})
    above, below = frame["reached"] >= frame["wanted"], frame["reached"] <= frame["wanted"]
    return frame.assign(holds=above.where(frame["goal"].str.endswith("least"), below))


def outliers(cases: pd.DataFrame, count: int = 6) -> pd.DataFrame:
    """The cases that the model misses by most, measured in what the case itself repeats to."""
    beyond = cases["model_error"].abs() / cases["repeatability"].clip(lower=1e-3)
    return cases.assign(errors_per_repeat=beyond).nlargest(count, "errors_per_repeat")
