"""How accurate a prediction is, from validated cases: by lab, against other models, and against the goals."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.sparse import Selecting
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import forecast_case

GOALS = {
    "median error, iteration": 0.02,
    "median error, exposed communication": 0.05,
    "largest error over twice the repeatability": 1.0,
    "interval covers, least": 0.90,
    "interval covers, most": 0.99,
}
"""What a prediction should reach, set before anything was measured."""


def labelled(validated: pd.DataFrame) -> pd.DataFrame:
    """The validated cases with a column ``lab``: its ranks and links, as in "4 x 1gbit"."""
    link = validated["link"].str.removeprefix("lab:")
    sparse = np.where(validated["density"] < 1, ", sparse", "")
    slow = np.where(validated["straggler"] > 1, ", straggler", "")
    several = np.where(validated["in_flight"] > 1, ", two in flight", "")
    name = validated["workers"].astype(str) + " x " + link + sparse + slow + several
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
    """Columns error and exposed_error of one model of `ddlkit.report.validate`, as `models` takes them."""
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


def simulated(
    case: Case,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    selections: Mapping[str, Selecting],
) -> Timeline:
    """The timeline that the model has of a case: to look at beside the replayed one."""
    return forecast_case(case, workloads, calibration, selections).iteration.timeline()
