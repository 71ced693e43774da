"""What is said of a campaign: laws of its tables, and the paper's formula where it must agree with ours."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.cost import Table
from ddlkit.core.iteration import Iteration, no_overlap, predict
from ddlkit.core.plan import make_plan
from ddlkit.papers.osf import predict_osf
from ddlkit.report import accuracy, compare
from strategies import random_workload

SIZES = np.geomspace(1e2, 1e9, 15)
COST = Table(SIZES, 1e-3 + 8e-9 * SIZES, workers=4)


def cases(n: int = 40, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    iteration_s = rng.uniform(1, 2, n)
    error = rng.normal(0, 0.01, n)
    return accuracy.labelled(
        pd.DataFrame(
            {
                "case": [f"{k:012x}" for k in range(n)],
                "link": np.where(np.arange(n) % 2, "lab:1gbit", "lab:500mbit"),
                "workers": 4,
                "density": np.where(np.arange(n) % 5, 1.0, 0.01),
                "straggler": 1.0,
                "in_flight": 1,
                "measured_iteration_s": iteration_s,
                "lower_s": iteration_s * (1 + error - 0.02),
                "upper_s": iteration_s * (1 + error + 0.02),
                "model_error": error,
                "model_exposed_error": 3 * error,
                "repeatability": 0.01,
                "processor_load": 0.3,
                "processor_limited": False,
            }
        )
    )


def test_labs_hold_every_case_once_and_tell_dense_from_sparse() -> None:
    found = cases()
    labs = accuracy.by_lab(found)
    assert labs["cases"].sum() == len(found) and len(labs) == 4
    assert labs["lab"].str.endswith(", sparse").sum() == 2
    assert labs["max_error"].max() == found["model_error"].abs().max()
    whole = (labs["coverage"] * labs["cases"]).sum() / len(found)
    assert whole == pytest.approx(found["inside"].mean())


def test_plans_with_one_and_with_two_in_flight_meet_in_one_row() -> None:
    found = cases().assign(network="n", plan=[f"p{k // 2}" for k in range(40)], straggler=1.0)
    found = found.assign(link="lab:1gbit", density=1.0, in_flight=[1, 2] * 20)
    found["model_iteration_s"] = found["measured_iteration_s"] * (1 + found["model_error"])
    pairs = compare.in_flight(found)
    assert len(pairs) == 20 and set(pairs["plan"]) == set(found["plan"])
    one, two = (found[found["in_flight"] == n].set_index("plan") for n in (1, 2))
    gain = one["measured_iteration_s"] / two["measured_iteration_s"] - 1
    assert pairs.set_index("plan")["measured_gain"].to_dict() == pytest.approx(gain.to_dict())
    ratio = (1 + pairs["one_error"]) / (1 + pairs["two_error"])
    np.testing.assert_allclose((1 + pairs["model_gain"]) / (1 + pairs["measured_gain"]), ratio)
    alone = compare.in_flight(found[found["in_flight"] == 1])
    assert alone.empty


def test_goals_are_judged_by_what_was_reached() -> None:
    found = cases()
    good = accuracy.goals(found).set_index("goal")
    assert good.loc["median error, iteration", "holds"]
    bad = accuracy.goals(found.assign(model_error=0.5, inside=False)).set_index("goal")
    assert not bad.loc["median error, iteration", "holds"]
    assert not bad.loc["interval covers, least", "holds"]
    assert bad.loc["largest error over twice the repeatability", "reached"] == pytest.approx(25)


def test_shares_below_a_limit_rise_to_all_cases() -> None:
    found = {"a": pd.DataFrame({"error": [0.001, -0.02, math.nan, 0.5]})}
    shares = accuracy.shares_below(found)["a"]
    assert np.all(np.diff(shares) >= 0) and shares.iloc[-1] == pytest.approx(100)
    assert accuracy.models({"a": found["a"].assign(exposed_error=0.1)}).loc[0, "cases"] == 3


def test_outliers_are_those_furthest_beyond_their_repeatability() -> None:
    found = cases().assign(repeatability=np.linspace(0.001, 0.1, 40), model_error=0.01)
    assert accuracy.outliers(found, 3)["case"].tolist() == found["case"].tolist()[:3]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.1, "worth it"), (1.0, "not worth it"), (0.9, "slower")]
)
def test_pairs_recover_a_ratio_under_drift(factor: float, verdict: str) -> None:
    rng, rows = np.random.default_rng(3), []
    for repeat in range(20):
        drift = 1 + 0.3 * rng.random()
        for plan, scale in (("exact", 1.0), ("ddp", factor)):
            iteration_s = drift * scale * math.exp(rng.normal(0, 0.002))
            rows.append({"network": "n", "link": "lab:1gbit", "workers": 4, "plan": plan,
                         "repeat": repeat, "iteration_s": iteration_s})  # fmt: skip
    (found,) = compare.paired(pd.DataFrame(rows), "exact").to_dict("records")
    assert found["pairs"] == 20 and found["verdict"] == verdict
    assert found["ratio"] == pytest.approx(factor, rel=0.005)
    assert found["lower"] <= found["ratio"] <= found["upper"]


@pytest.mark.parametrize("seed", range(20))
def test_the_papers_formula_is_our_model_without_fusion_and_bounded_with_it(seed: int) -> None:
    workload = random_workload(np.random.default_rng(seed), 30)
    plan = make_plan("none", workload)
    told = predict_osf(Iteration(workload, plan, COST))
    assert told.iteration_s == pytest.approx(predict(workload, plan, COST).iteration_s)
    single = make_plan("single", workload)
    alone = predict_osf(Iteration(workload, single, COST)).iteration_s
    assert alone == pytest.approx(no_overlap(Iteration(workload, single, COST)).iteration_s)
    assert math.isnan(
        predict_osf(Iteration(workload, make_plan("exact", workload, COST), COST)).iteration_s
    )
    buffered = predict_osf(Iteration(workload, make_plan("buffer:25MB", workload), COST))
    assert math.isfinite(buffered.iteration_s)
