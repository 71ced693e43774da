"""What the cases of a campaign say about the model: by lab, against other models, case by case, in pairs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.bandwidth import bus_factor
from ddlkit.core.case import Case
from ddlkit.core.sparse import Selecting
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import MIB
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration, undisturbed
from ddlkit.model.predictor import forecast_case

Floats = NDArray[np.float64]

GOALS = {
    "median error, iteration": 0.02,
    "median error, exposed communication": 0.05,
    "largest error over twice the repeatability": 1.0,
    "interval covers, least": 0.90,
    "interval covers, most": 0.99,
}
"""What a prediction should reach, set before anything was measured."""
WORTH = 0.02
"""A plan that saves less than this share of an iteration is not worth a change."""


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
    """One row a lab of `labelled` cases: errors, repeatability, coverage, and the processor's share."""
    size = cases.assign(
        error=cases["model_error"].abs(), exposed=cases["model_exposed_error"].abs()
    )
    return (
        size.groupby("lab", sort=False)
        .agg(
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
        .reset_index()
    )


def terms(collectives: pd.DataFrame) -> pd.DataFrame:
    """One row a lab and collective: the parts of a message's cost, each from sizes where it shows.

    startup_s : of the smallest message; intercept_s : of the straight line through messages of 1 MiB and
        more, by relative error: below the start-up where the shaper's burst lets bytes through early
    efficiency_1mib, _16mib, _largest : bus bandwidth over the link's rate; framing caps it at 0.956
    drift, drift_largest : difference between the sessions' medians, at worst over sizes and of the largest
    Samples that the host disturbed are left out.
    """
    rows = []
    keys = ["link", "link_bits_per_s", "ranks", "collective"]
    one_by_one = collectives[collectives["in_flight"] == 1]
    for key, samples in undisturbed(one_by_one).groupby(keys, sort=False):
        link, rate, ranks, collective = key
        medians = samples.groupby(["bytes", "session"])["seconds"].median().unstack()
        apart = medians.max(axis=1) / medians.min(axis=1) - 1
        taken = medians.mean(axis=1)
        sizes, seconds = taken.index.to_numpy(dtype=float), taken.to_numpy()
        efficiency = 8 * sizes * bus_factor(str(collective), int(ranks)) / seconds / rate
        long = sizes >= MIB
        line = np.polyfit(sizes[long], seconds[long], 1, w=1 / seconds[long])
        rows.append(
            {
                "link": link,
                "ranks": ranks,
                "collective": collective,
                "startup_s": seconds[0],
                "intercept_s": float(line[1]),
                "efficiency_1mib": _at(sizes, efficiency, MIB),
                "efficiency_16mib": _at(sizes, efficiency, 16 * MIB),
                "efficiency_largest": efficiency[-1],
                "drift": apart.max(),
                "drift_largest": apart.iloc[-1],
            }
        )
    return pd.DataFrame(rows)


def _at(sizes: Floats, values: Floats, size: int) -> float:
    """The value at the size that is nearest in ratio."""
    return float(values[np.abs(np.log(sizes / size)).argmin()])


def models(found: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One row a model: errors on the iteration and on exposed communication, on the cases it covers.

    found : model -> frame with columns ``error`` and ``exposed_error``, NaN where it says nothing
    """
    rows = []
    for name, cases in found.items():
        told = cases.dropna()
        row: dict[str, object] = {"model": name, "cases": len(told)}
        for column in ("error", "exposed_error"):
            size = told[column].abs()
            row |= {f"{column}_median": size.median(), f"{column}_90": size.quantile(0.9)}
            row[f"{column}_max"] = size.max()
        rows.append(row)
    return pd.DataFrame(rows)


def errors(validated: pd.DataFrame, model: str) -> pd.DataFrame:
    """Columns error and exposed_error of one model of `ddlkit.report.validate`, as `models` takes them."""
    names = {f"{model}_error": "error", f"{model}_exposed_error": "exposed_error"}
    return validated[list(names)].rename(columns=names)


def shares_below(found: Mapping[str, pd.DataFrame], column: str = "error") -> pd.DataFrame:
    """Share of cases (in %) whose absolute error is at most the index (in %), a column a model."""
    limits = np.geomspace(0.05, 100, 60)
    shares = {
        name: [100 * float((cases[column].dropna().abs() <= x / 100).mean()) for x in limits]
        for name, cases in found.items()
    }
    return pd.DataFrame(shares, index=pd.Index(limits, name="error_percent"))


def goals(cases: pd.DataFrame) -> pd.DataFrame:
    """One row a goal of GOALS: wanted, reached on `labelled` cases, and whether that is enough."""
    beyond = cases["model_error"].abs() / (2 * cases["repeatability"])
    coverage = float(cases["inside"].mean())
    reached = {
        "median error, iteration": cases["model_error"].abs().median(),
        "median error, exposed communication": cases["model_exposed_error"].abs().median(),
        "largest error over twice the repeatability": beyond[cases["model_error"].abs().idxmax()],
        "interval covers, least": coverage,
        "interval covers, most": coverage,
    }
    rows = [
        {
            "goal": goal,
            "wanted": wanted,
            "reached": float(reached[goal]),
            "holds": bool(
                reached[goal] >= wanted if goal.endswith("least") else reached[goal] <= wanted
            ),
        }
        for goal, wanted in GOALS.items()
    ]
    return pd.DataFrame(rows)


def in_flight(cases: pd.DataFrame) -> pd.DataFrame:
    """One row a plan that was measured with one message in flight and with two.

    Columns: network, link, workers, plan, one_s and two_s (measured iterations), measured_gain (one over
    two, less 1), model_gain, one_error and two_error of the model.
    """
    keys = ["network", "link", "workers", "plan"]
    alike = cases[(cases["straggler"] == 1) & (cases["density"] == 1)].set_index(keys)
    one, two = (alike[alike["in_flight"] == n] for n in (1, 2))
    both = one.add_suffix("_one").join(two.add_suffix("_two"), how="inner")
    gains = {
        f"{who}_gain": both[f"{who}_iteration_s_one"] / both[f"{who}_iteration_s_two"] - 1
        for who in ("measured", "model")
    }
    return pd.DataFrame(
        {
            "one_s": both["measured_iteration_s_one"],
            "two_s": both["measured_iteration_s_two"],
            **gains,
            "one_error": both["model_error_one"],
            "two_error": both["model_error_two"],
        }
    ).reset_index()


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


def paired(runs: pd.DataFrame, plan: str, draws: int = 2000, seed: int = 0) -> pd.DataFrame:
    """``plan`` against every other plan of the same network and lab, round by round.

    Columns: network, link, workers, other, pairs, ratio (median over rounds of the other's iteration
    over this plan's: above 1 the plan is faster), lower, upper (95% bootstrap interval of that median),
    verdict.
    """
    rng, rows = np.random.default_rng(seed), []
    place = ["network", "link", "workers"]
    for key, here in runs.groupby(place, sort=False):
        table = here.pivot_table(index="repeat", columns="plan", values="iteration_s")
        if plan not in table:
            continue
        for other in table.columns.drop(plan):
            ratios = (table[other] / table[plan]).dropna().to_numpy()
            drawn = np.median(rng.choice(ratios, (draws, ratios.size)), axis=1)
            lower, upper = np.quantile(drawn, [0.025, 0.975])
            rows.append(
                {
                    **dict(zip(place, key, strict=True)),
                    "other": other,
                    "pairs": ratios.size,
                    "ratio": float(np.median(ratios)),
                    "lower": float(lower),
                    "upper": float(upper),
                    "verdict": _verdict(float(lower), float(upper)),
                }
            )
    return pd.DataFrame(rows)


def _verdict(lower: float, upper: float) -> str:
    if lower > 1 + WORTH:
        return "worth it"
    if upper < 1 + WORTH:
        return "slower" if upper < 1 - WORTH else "not worth it"
    return "undecided"
