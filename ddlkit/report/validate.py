"""Predicted meets measured: every Case predicted from calibration rows, joined on its key, and judged.

The only inputs of a prediction are a layer profile (compute) and a cost fitted to collectives measured on
their own (communication); no row of the runs table takes part in either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.iteration import Iteration, Prediction, no_overlap, perfect_overlap
from ddlkit.core.sparse import Selecting
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import STEADY, forecast_case
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


Floats = NDArray[np.float64]


def measured(runs: pd.DataFrame) -> pd.DataFrame:
    """One row a case: median of its iterations, and how well it repeats.

    repeatability : mean difference between two repeats' medians, relative to the median; likewise
        ``repeatability_exposed`` of exposed communication
    """
    quantities = ["iteration_s", "exposed_communication_s", "compute_s"]
    repeats = runs.groupby(["case", "repeat"])[quantities].median()
    by_case = repeats.groupby("case")
    spread = by_case.agg(_mean_difference) / by_case.median()
    found = by_case.median().add_prefix("measured_")
    found["repeats"] = by_case.size()
    found["repeatability"] = spread["iteration_s"]
    found["repeatability_exposed"] = spread["exposed_communication_s"]
    found["processor_load"] = runs.groupby("case")["processor_load"].median()
    found["stolen"] = runs.groupby("case")["stolen"].max()
    found["copy_s_per_byte"] = runs.groupby("case")["copy_s_per_byte"].median()
    found["processor_limited"] = runs.groupby("case")["processor_limited"].any()
    keys = runs.drop_duplicates("case").set_index("case")[[*CASE_COLUMNS, "origin"]]
    return keys.join(found).reset_index()


def _mean_difference(values: pd.Series) -> float:
    pairs = [abs(a - b) for a, b in combinations(values, 2)]
    return float(np.mean(pairs)) if pairs else float("nan")


def predict_case(
    case: Case,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    compute_s: float,
    selections: Mapping[str, Selecting] | None = None,
    copy_s_per_byte: float = 0.0,
    compute_scatter: Floats = STEADY,
) -> dict[str, object]:
    """Iteration and exposed communication by every model, and the interval of a single iteration.

    compute_s : measured in the same run; only the RESCALED model uses it
    the rest : as for `ddlkit.model.predictor.forecast_case`
    """
    found = forecast_case(
        case, workloads, calibration, selections, copy_s_per_byte, compute_scatter
    )
    iteration, workload = found.iteration, found.iteration.workload
    row: dict[str, object] = {"case": case.key}
    uncopied = replace(iteration, copy_s_per_byte=0.0)
    answers = {name: other(uncopied) for name, other in OTHERS.items()}
    for name, told in {**answers, "model": found.prediction}.items():
        row |= {
            f"{name}_iteration_s": told.iteration_s,
            f"{name}_exposed_s": told.exposed_communication_s,
        }
    stretched = replace(iteration, workload=workload.scaled(compute_s / workload.compute_s))
    iteration_s = stretched.prediction.iteration_s
    row |= {f"{RESCALED}_iteration_s": iteration_s}
    row |= {f"{RESCALED}_exposed_s": iteration_s - compute_s}
    lower_s, upper_s = found.interval_s or (math.nan, math.nan)
    return {
        **row,
        "lower_s": lower_s,
        "upper_s": upper_s,
        "predicted_compute_s": workload.compute_s,
    }


def validate(
    runs: pd.DataFrame,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    selections: Mapping[str, Selecting] | None = None,
    compute_scatter: Mapping[str, Floats] | None = None,
) -> pd.DataFrame:
    """One row a case: measured, predicted, and signed relative errors.

    ``<model>_error`` is on the iteration, ``<model>_exposed_error`` on exposed communication.
    selections : selection times by the hash that a sparse case carries
    compute_scatter : of profiles by their hash, as `predict_case` takes it; for cases that really train
    """
    found, scatter = measured(runs), compute_scatter or {}
    predicted = pd.DataFrame(
        predict_case(
            Case.from_row(row),
            workloads,
            calibration,
            row["measured_compute_s"],
            selections,
            row["copy_s_per_byte"],
            scatter.get(row["profile_sha256"], STEADY) if row["kind"] == "training" else STEADY,
        )
        for row in found.to_dict("records")
    )
    joined = found.merge(predicted, on="case", validate="one_to_one")
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
        told = size[name].notna()  # the same cases for both
        if told.any():
            for what, errors in {"": size, "exposed_": exposed}.items():
                ratio = errors[name].median() / errors["model"][told].median()
                result[f"{what}skill_over_{name}"] = ratio
    return {name: float(value) for name, value in result.items()}
