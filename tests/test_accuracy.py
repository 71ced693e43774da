"""The judge: a truth made by the model has no error, tables join by case, goals are set before the data."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, MessageCost, Table
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import PLAIN, Iteration
from ddlkit.core.lab_links import wire_s_per_byte
from ddlkit.core.link import Link
from ddlkit.core.plan import make_plan
from ddlkit.core.sparse import SelectionTimes
from ddlkit.model.calibration import Calibration, software_at_once
from ddlkit.model.predictor import forecast_case, plan_of
from strategies import random_workload
from workbook.common import places, source
from workbook.common.source import Source
from workbook.dag import training
from workbook.validate import accuracy, clusters
from workbook.validate.accuracy import calibrated, validate
from workbook.validate.compared import compared
from workbook.validate.rivals import TRIALS

SIZES = np.geomspace(1e2, 1e8, 13)
COST = Table(SIZES, 1e-3 + 8e-9 * SIZES, workers=4)
SPECS = ("none", "single", "buffer:25MB", "ddp", "exact")
WORKLOAD = random_workload(np.random.default_rng(0), 40)
RATE_BITS_PER_S = 1.6e9
LAB = {"link": "lab:1gbit", "ranks": 4, "collective": "all_reduce", "algorithm": "ring"}
LAB |= {"session": 0, "messages_per_sample": 1, "in_flight": 1, "stolen": 0.0}


def calibration(noise: float = 0.0, rate_bits_per_s: float = 0.0) -> Calibration:
    sizes = np.repeat(SIZES, 9)
    seconds = COST(sizes) * np.exp(
        np.random.default_rng(1).normal(0, noise, sizes.size)
    )
    rows = {
        "bytes": sizes,
        "seconds": seconds,
        "link_bits_per_s": rate_bits_per_s,
        **LAB,
    }
    return calibrated(pd.DataFrame(rows))


def case(spec: str, workers: int = 4) -> Case:
    ends = ";".join(map(str, make_plan(spec, WORKLOAD, COST).ends))
    return Case("replay", "net", "cpu", 1, workers, "lab:1gbit", 1e9, "all_reduce", spec, ends,
                profile_sha256="abc")  # fmt: skip


def runs(
    noise: float = 0.0,
    workers: int = 4,
    link: Link = PLAIN,
    copy_s_per_byte: float = 0.0,
    cost: MessageCost = COST,
) -> pd.DataFrame:
    rng, rows = np.random.default_rng(2), []
    for spec in SPECS:
        asked = replace(case(spec, workers), in_flight=int(np.max(link.in_flight)))
        truth = Iteration(
            WORKLOAD, plan_of(asked), cost, link, copy_s_per_byte
        ).prediction
        for repeat in range(4):
            iteration_s = truth.iteration_s * float(np.exp(rng.normal(0, noise)))
            values = {
                "iteration_s": iteration_s,
                "compute_s": WORKLOAD.compute_s,
                "repeat": repeat,
            }
            rows.append({**vars(asked), **values, "case": asked.key, "origin": "replayed",
                         "exposed_communication_s": iteration_s - WORKLOAD.compute_s,
                         "processor_load": 0.5, "processor_limited": False, "stolen": 0.0,
                         "copy_s_per_byte": copy_s_per_byte})  # fmt: skip
    return pd.DataFrame(rows)


def test_a_truth_made_by_the_model_has_no_error() -> None:
    cases = validate(runs(), {"abc": WORKLOAD}, calibration())
    assert len(cases) == len(SPECS) and cases["repeatability"].max() == 0
    assert cases[["model_error", "model_exposed_error"]].abs().max().max() < 1e-9
    assert cases["no_overlap_error"].max() > 0.01
    assert (cases["no_overlap_error"] >= -1e-12).all()
    assert (cases["perfect_overlap_error"] <= 1e-12).all()


def test_every_model_on_trial_is_right_where_it_is_the_truth() -> None:
    """Lines where the truth is one, tables where it is that; one whose cost is not known says nothing."""
    costs = calibration(rate_bits_per_s=RATE_BITS_PER_S).without_burst_tokens()
    lines = [name for name, (cost, _) in TRIALS.items() if cost and name != "osf_line"]
    tables = ["no_burst_tokens", "osf_repaired_table"]
    for cost, names in ((AlphaBeta(1e-3, 8e-9, workers=4), lines), (COST, tables)):
        cases = validate(runs(cost=cost), {"abc": WORKLOAD}, costs)
        covered = cases["plan"].isin(["none", "single", "buffer:25MB"])
        for name in names:
            error = cases[f"{name}_error"]
            assert (
                error.isna().any() == name.startswith("osf")
                and error[covered].notna().all()
            )
            # What has no fit takes the link's rate, which is not the truth's here.
            assert (error.abs().max() < 1e-9) == (name != "line_unfitted"), name
    unknown = validate(runs(), {"abc": WORKLOAD}, calibration())
    assert (
        unknown["line_unfitted_error"].isna().all()
        and unknown["line_ends_error"].notna().all()
    )


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_lanes_and_copies_are_known_too(in_flight: int) -> None:
    """All three at once, in a truth of the lab's shaped link; without them, they are missed."""
    costs = calibration(rate_bits_per_s=RATE_BITS_PER_S)
    link = costs.of_case(replace(case("none"), in_flight=in_flight)).link
    assert link.burst_s > 0 and link.in_flight == in_flight
    slope = wire_s_per_byte("all_reduce", 4, RATE_BITS_PER_S)
    assert link.wire_s_per_byte == pytest.approx(slope)
    truth = runs(link=link, copy_s_per_byte=1e-9)
    cases = validate(truth, {"abc": WORKLOAD}, costs)
    for quantity in ("model", "model_exposed", "rescaled", "rescaled_exposed"):
        assert cases[f"{quantity}_error"].abs().max() < 1e-9
    bare = validate(truth, {"abc": WORKLOAD}, costs.without_burst_tokens())
    assert bare["model_error"].abs().max() > 1e-6
    uncopied = validate(truth.assign(copy_s_per_byte=0.0), {"abc": WORKLOAD}, costs)
    assert (uncopied["model_error"] < -1e-6).all()


def test_noise_shows_as_repeatability_and_scores_keep_it() -> None:
    single = runs(noise=0.03)
    cases = accuracy.labelled(
        validate(single, {"abc": WORKLOAD}, calibration(noise=0.03))
    )
    figures = accuracy.summary(cases, single)
    assert 0.01 < figures["median_repeatability"] < 0.1
    assert figures["median_error"] < min(0.05, figures["no_overlap_median_error"])
    assert figures["median_error"] <= figures["max_error"]
    assert set(cases["lab"]) == {"4 x 1gbit"} and figures["iterations"] == len(single)
    assert figures["interval_coverage"] == cases["inside"].mean()
    wide = pd.concat([single, single.assign(iteration_s=9e9)])
    both = accuracy.summary(cases, wide)["coverage_of_iterations"]
    assert both == figures["coverage_of_iterations"] / 2


def test_a_sparse_truth_with_a_straggler_made_by_the_model_has_no_error() -> None:
    """Selection after each group's last gradient, then two all-gathers: against a loop by hand."""
    density, straggler, dilation = 0.01, 1.5, 2.0
    gather = Table(SIZES, 2e-4 + 3e-9 * SIZES, collective="all_gather", workers=4)
    times = SelectionTimes(
        np.array([1e2, 1e8]), np.array([density]), np.array([[1e-6, 1.0]])
    )
    plan = make_plan("buffer:25MB", WORKLOAD)
    how: dict[str, Any] = {
        "density": density,
        "straggler": straggler,
        "dilation": dilation,
    }
    how |= {"collective": "all_gather", "selection_sha256": times.sha256}
    asked = replace(case("buffer:25MB"), **how)
    spent_s = free_s = 0.0
    for n_bytes, ready_s in zip(
        plan.group_bytes(WORKLOAD), plan.group_ready_s(WORKLOAD), strict=True
    ):
        elements = -(-int(n_bytes) // 4)
        spent_s += float(times(elements, density))
        k = max(1, round(density * elements))
        free_s = max(free_s, dilation * straggler * (ready_s + spent_s)) + 2 * gather(
            4 * 4 * k
        )
    compute_s = dilation * straggler * (WORKLOAD.compute_s + spent_s)
    rows = {**LAB, "bytes": SIZES, "seconds": gather(SIZES), "collective": "all_gather"}
    known = Calibration.of(pd.DataFrame({**rows, "link_bits_per_s": 0.0}))
    forecast = forecast_case(asked, {"abc": WORKLOAD}, known, {times.sha256: times})
    update_s = dilation * straggler * WORKLOAD.update_s
    assert forecast.prediction.iteration_s == pytest.approx(free_s + update_s)
    assert forecast.iteration.workload.compute_s == pytest.approx(compute_s)
    with pytest.raises(UserError, match="selection times"):
        forecast_case(asked, {"abc": WORKLOAD}, known)
    # Gradients that are all gathered are dense: nothing is selected.
    dense = forecast_case(replace(asked, density=1.0), {"abc": WORKLOAD}, known)
    assert dense.iteration.workload.compute_s == pytest.approx(
        dilation * straggler * WORKLOAD.compute_s
    )
    assert not dense.iteration.cost.selects
    np.testing.assert_allclose(dense.iteration.cost(SIZES), gather(SIZES))


def test_what_a_calibration_takes_from_its_samples() -> None:
    """Not those that the host disturbed, where there are others; how much software runs at once."""
    rows = pd.DataFrame({**LAB, "bytes": [1e3, 1e3, 1e6, 1e6], "link_bits_per_s": 0.0})
    rows = rows.assign(seconds=[1.0, 9.0, 2.0, 4.0], stolen=[0.0, 0.3, 0.3, 0.3])
    cost = Calibration.of(rows).between("lab:1gbit", 4).cost
    assert cost([1e3, 1e6]) == pytest.approx([1.0, 3.0])
    sizes, alone_s = [1024, 4096] * 2, [1e-3, 2e-3]
    faster = pd.DataFrame({"in_flight": [1, 1, 2, 2], "bytes": sizes})
    faster["seconds"] = [*alone_s, *np.divide(alone_s, 1.4)]
    assert software_at_once(faster) == pytest.approx(1.4)
    assert software_at_once(faster[faster["in_flight"] == 1]) == np.inf
    assert software_at_once(faster.assign(seconds=faster["in_flight"])) == 1.0


def test_a_case_keeps_the_key_that_it_had_before_there_were_more_fields() -> None:
    """The key of a recorded case, whose table lacks the columns that came later."""
    rows = store.load_table(
        places.RECORDED / "cpu-2x-amd-epyc-suite" / "runs-resnet18-b4-p2.csv", "runs"
    )
    for row in (
        *rows.drop_duplicates("case").to_dict("records"),
        *runs().to_dict("records"),
    ):
        assert Case.from_row(row).key == row["case"]
        assert replace(Case.from_row(row), straggler=1.5).key != row["case"]


PREDICTED = store.list_tables(places.RECORDED, "*/*/predicted-cases.csv")


@pytest.mark.parametrize("path", PREDICTED, ids=lambda path: path.parent.name)
def test_predictions_were_written_before_their_runs(path: Path) -> None:
    """Runs carry the hash of the table; errors are of medians; single iterations are counted."""
    campaign = Source((path.parent,))
    cases, runs = accuracy.joined(campaign), campaign.table("runs")
    ran = [
        store.load_stamp(table)["time"]
        for table in store.list_tables(path.parent, "runs-*")
    ]
    assert store.load_stamp(path)["time"] < min(ran)
    assert (
        cases["runs"].sum() == len(runs) and (cases["covered"] <= cases["runs"]).all()
    )
    one = cases.iloc[len(cases) // 2]
    own_s = (
        runs.loc[runs["case"] == one["case"]].groupby("repeat")["iteration_s"].median()
    )
    assert one["model_error"] == pytest.approx(
        one["model_iteration_s"] / own_s.median() - 1
    )


def test_a_run_that_something_else_predicted_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    campaign = Source((PREDICTED[0].parent,))
    tables = {kind: campaign.table(kind) for kind in ("predicted", "runs")}
    tables["runs"] = tables["runs"].assign(predicted="0123456789ab")
    monkeypatch.setattr(Source, "table", lambda self, kind: tables[kind])
    with pytest.raises(UserError, match="predicted by .*'0123456789ab'"):
        accuracy.joined(campaign)


GOALS, COVERAGE = (
    pd.read_csv(places.ROOT / "reports" / name, keep_default_na=False, dtype=str)
    for name in ("goals.csv", "coverage.csv")
)
FROZEN = {
    "goals": (124, "2f04302eb2c8e532dc117767361dc2ee191744c62810a4ae0bab8c5f8f17f697"),
    "coverage": (
        57,
        "8d96164e4db6f825510b71127113b5480aedc7de1f00eafea8126fa79b59e51a",
    ),
}
"""Rows of v0.2-studies (docs/studies.md), and their hash without the column ``state``."""


OF_FILE = yaml.safe_load((places.DATA / "goals.yml").read_text(encoding="utf-8"))


def digest(entry: dict[str, Any]) -> str:
    """SHA-256 of an entry as JSON without spaces, its keys in order."""
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def test_nothing_that_was_frozen_changes_or_disappears() -> None:
    """Campaigns recorded later add rows below; what left the reading path keeps its rows."""
    for table, (rows, sha256) in zip((GOALS, COVERAGE), FROZEN.values(), strict=True):
        text = table.head(rows).drop(columns="state").to_csv(index=False)
        assert hashlib.sha256(text.encode()).hexdigest() == sha256


def test_goals_and_predictions_are_those_that_were_frozen() -> None:
    of_file = GOALS["campaign"].isin([source.CAMPAIGN, source.REPEATS])
    assert set(GOALS.loc[of_file, "goal_sha256"]) == {
        digest(entry) for entry in OF_FILE["goals"]
    }
    moments = [
        *(goal["set"] for goal in OF_FILE["goals"]),
        *(c["at"] for c in OF_FILE["changes"]),
    ]
    confirms = max(moments) < GOALS["first_run_at"][of_file]
    assert confirms.eq(GOALS["standing"][of_file] == "confirmatory").all()
    assert confirms.nunique() == 2
    for row in GOALS[~of_file].itertuples():
        assert row.goal_sha256 == digest({"goal": row.goal, "wanted": row.wanted})
    kept = (places.DATA / "predicted").glob("*.csv")
    there = {path.stem: store.sha256_file(path) for path in kept}
    for path in store.list_tables(places.RECORDED, "*/*/predicted-*.csv"):
        there[path.parent.name] = store.load_stamp(path)["sha256"]
    predicted = GOALS[GOALS["prediction_sha256"] != ""]
    assert {*there} <= {*predicted["campaign"]}
    for row in predicted.itertuples():
        assert there.get(row.campaign) in {
            row.prediction_sha256,
            None if row.state else "",
        }
    confirms = GOALS[GOALS["standing"] == "confirmatory"]
    committed, run = (
        pd.to_datetime(confirms[f"{what}_at"]) for what in ("committed", "first_run")
    )
    assert (committed < run).all()


RECORDED = COVERAGE[COVERAGE["campaign"].str.match("campaign(?!-disturbed|-calm)")][
    "campaign"
]
NOT_JUDGED = (
    "cases$|links$|labs where the framework's default|models that are behind another"
)
"""Goals of RECORDED of how much is measured, and of plans and models, which nothing judges any more."""


def hold_share(campaign: str, cases: pd.DataFrame, inside: float, n: float) -> None:
    """Hold a campaign's last row of coverage.csv against cases: so many of n lie inside."""
    half = (
        (cases["upper_s"] - cases["lower_s"]) / cases["model_iteration_s"]
    ).median() / 2
    row = COVERAGE[COVERAGE["campaign"] == campaign].iloc[-1]
    assert (
        float(row["reached"]) == pytest.approx(inside / n, rel=1e-5)
        and int(row["n"]) == n
    )
    assert float(row["median_half_width"]) == pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize("name", RECORDED.unique())
def test_recorded_campaigns_reach_what_was_frozen(name: str) -> None:
    """Goals and coverage, of medians of cases, or of single iterations that were predicted before."""
    campaign, goals = source.open_campaign("", name), accuracy.goals("links")
    if name == source.TRAINED:
        cases = accuracy.trained(campaign.alone)
        hold_share(name, cases, cases["covered"].sum(), cases["runs"].sum())
        goals = accuracy.goals("training")
    elif campaign.alone.has("predicted"):
        cases = accuracy.labelled(accuracy.joined(campaign.alone))
        cases = cases[~cases["processor_limited"] | (source.LINKS not in name)]
        hold_share(name, cases, cases["covered"].sum(), cases["runs"].sum())
    else:
        cases = accuracy.judge(campaign.alone, campaign)
        hold_share(name, cases, cases["inside"].sum(), len(cases))
        goals = accuracy.goals("goals")
    judged = {goal.goal: goal.judged(cases) for goal in goals}
    judged["largest error, iteration"] = {"reached": cases["model_error"].abs().max()}
    rows = GOALS[(GOALS["campaign"] == name) & ~GOALS["goal"].str.match(NOT_JUDGED)]
    for row in rows.itertuples():
        now = judged[row.goal]
        assert float(row.reached) == pytest.approx(now["reached"], rel=1e-5)
        assert not row.held or (row.wanted, row.held) == (
            now["wanted"],
            str(now["holds"]),
        )


def test_live_runs_reach_what_was_frozen() -> None:
    """Each row of reports/goals.csv, and of coverage.csv without the marked and with them."""
    live = accuracy.live()
    runs = live.groupby("condition")["run"].nunique()
    assert runs["quiet"] >= 5 and runs["disturbed"] >= 10
    assert not live.duplicated(["run", "case"]).any()
    now = {
        g.goal: g.judged(live[live["condition"] == g.goal.partition(":")[0]])
        for g in accuracy.goals("live")
    }
    for row in GOALS[GOALS["campaign"] == "live"].itertuples():
        assert float(row.reached) == pytest.approx(now[row.goal]["reached"], rel=1e-5)
        assert (row.wanted, row.held) == (
            now[row.goal]["wanted"],
            str(now[row.goal]["holds"]),
        )
    rows = COVERAGE[COVERAGE["campaign"] == "live"].itertuples()
    every = itertools.product(
        ("quiet", "disturbed"), ("replay", "training"), (False, True)
    )
    for condition, kind, marked in every:
        cases = live[(live["condition"] == condition) & (live["kind"] == kind)]
        cases = cases[marked | ~cases["marked"]]
        row = next(rows)
        assert float(row.reached) == pytest.approx(cases["inside"].mean(), rel=1e-5)
        assert int(row.n) == len(cases)


def test_other_recordings_reach_what_was_frozen() -> None:
    """Training and replays of the newest recording, dense tables of others, training with pictures."""
    recording = source.open_source("cpu-2x-amd-epyc")
    for kind, cases in accuracy.judge(recording, recording).groupby("kind"):
        hold_share(f"cpu-2x-amd-epyc, {kind}", cases, cases["inside"].sum(), len(cases))
    dense = clusters.dense_predictions()
    tables, cases = (
        clusters.judged(dense),
        dense.assign(model_iteration_s=dense["predicted_s"]),
    )
    hold_share("clusters, dense tables", cases, tables["covered"].sum(), len(dense))
    scores = (
        tables["median"].median(),
        tables["held"].mean(),
        tables["below_25_mib"].max(),
    )
    pictures = training.predictions(
        training.parts(places.RECORDED / "cpu-2x-intel-xeon" / "input")
    )
    most = pictures["error"].abs().groupby(pictures["network"]).mean().max()
    kept = GOALS[
        GOALS["goal"].str.match(
            "(?:median|largest) over (?:tables|net)|share of tables"
        )
    ]
    assert kept["reached"].astype(float).tolist() == pytest.approx(
        [*scores, most], rel=1e-5
    )


def test_the_model_says_of_the_confirming_cases_what_was_kept() -> None:
    campaign = source.open_campaign("", source.REPEATS)
    own = accuracy.calibrated(campaign.alone.table("collectives"))
    runs = campaign.alone.table("runs")
    now = accuracy.validate(runs, campaign.workloads(), own, campaign.selections())
    then = pd.read_csv(
        places.DATA / "predicted" / f"{source.REPEATS}.csv", index_col="case"
    )
    now = now.set_index("case").loc[then.index, then.columns]
    points = [name for name in then if name.startswith("model")]
    assert np.allclose(then[points], now[points], rtol=1e-9, atol=0)
    judged = accuracy.judge(campaign.alone, campaign).set_index("case").loc[then.index]
    assert np.allclose(then, judged[then.columns], rtol=1e-6, atol=0), (
        "intervals as of then"
    )


def test_goals_are_counted_once_for_all_pages() -> None:
    """The sets sum up to the count, and no goal for how much was measured is in it."""
    counts = accuracy.goal_counts()
    by_set = accuracy.goals_by_set()
    assert by_set["met"].sum() == counts["preset_met"] <= counts["preset"]
    assert by_set["preset"].sum() == counts["preset"]
    for name, quote in counts["poor_sets"].items():
        assert quote == f"{by_set.loc[name, 'met']} of {by_set.loc[name, 'preset']}"
        assert 2 * by_set.loc[name, "met"] < by_set.loc[name, "preset"]


def test_coverage_counts_each_measurement_of_95_percent_once() -> None:
    every = accuracy.frozen("coverage")
    rows = accuracy.coverage_of_95()
    assert (rows["nominal"] == 0.95).all()
    key = rows[["campaign", "replayed_or_real"]].assign(
        disturbed=rows["note"].str.contains("disturbed runs")
    )
    assert not key.duplicated().any()
    of_95 = every[every["nominal"] == 0.95]
    assert set(rows["campaign"]) == set(of_95["campaign"])


def test_runs_without_a_layer_profile_are_not_compared() -> None:
    """The directory of this campaign has runs, and the profiles are in the one above."""
    best = places.RECORDED / "cpu-2x-amd-epyc" / "campaign-best"
    assert Source((best,)).has("runs") and not Source((best,)).has("layers")
    assert list(compared(best)) == []
