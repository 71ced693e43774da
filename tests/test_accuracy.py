"""The judge: a truth made by the model has no error, noise shows as repeatability, tables join by case."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, MessageCost, Table
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import PLAIN, Iteration, no_overlap, predict
from ddlkit.core.link import Link, wire_s_per_byte
from ddlkit.core.plan import make_plan
from ddlkit.core.sparse import SelectionTimes, SparseGather
from ddlkit.model.calibration import Calibration, software_at_once
from ddlkit.model.predictor import CARRIED, OURS, TRIALS, forecast_case, plan_of
from ddlkit.papers.osf import predict_osf
from ddlkit.report import accuracy
from ddlkit.report.accuracy import by_every_model, calibrated, validate
from ddlkit.report.source import Source
from strategies import random_workload

SIZES = np.geomspace(1e2, 1e8, 13)
COST = Table(SIZES, 1e-3 + 8e-9 * SIZES, workers=4)
SPECS = ("none", "single", "buffer:25MB", "ddp", "exact")
WORKLOAD = random_workload(np.random.default_rng(0), 40)
RATE_BITS_PER_S = 1.6e9
LAB = {"link": "lab:1gbit", "ranks": 4, "collective": "all_reduce", "algorithm": "ring"}
LAB |= {"session": 0, "messages_per_sample": 1, "in_flight": 1, "stolen": 0.0}


def calibration(noise: float = 0.0, rate_bits_per_s: float = 0.0) -> Calibration:
    sizes = np.repeat(SIZES, 9)
    seconds = COST(sizes) * np.exp(np.random.default_rng(1).normal(0, noise, sizes.size))
    rows = {"bytes": sizes, "seconds": seconds, "link_bits_per_s": rate_bits_per_s, **LAB}
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
        truth = Iteration(WORKLOAD, plan_of(asked), cost, link, copy_s_per_byte).prediction
        for repeat in range(4):
            iteration_s = truth.iteration_s * float(np.exp(rng.normal(0, noise)))
            values = {"iteration_s": iteration_s, "compute_s": WORKLOAD.compute_s, "repeat": repeat}
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
    costs = calibration(rate_bits_per_s=RATE_BITS_PER_S).without_credit()
    lines = [name for name, trial in TRIALS.items() if trial.cost and name != "osf_line"]
    tables = ["no_credit", "osf_repaired_table"]
    for cost, names in ((AlphaBeta(1e-3, 8e-9, workers=4), lines), (COST, tables)):
        cases = validate(runs(cost=cost), {"abc": WORKLOAD}, costs)
        covered = cases["plan"].isin(["none", "single", "buffer:25MB"])
        for name in names:
            error = cases[f"{name}_error"]
            assert error.isna().any() == name.startswith("osf") and error[covered].notna().all()
            # What has no fit takes the link's rate, which is not the truth's here.
            assert (error.abs().max() < 1e-9) == (name != "line_unfitted"), name
    unknown = validate(runs(), {"abc": WORKLOAD}, calibration())
    assert unknown["line_unfitted_error"].isna().all() and unknown["line_ends_error"].notna().all()


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
    bare = validate(truth, {"abc": WORKLOAD}, costs.without_credit())
    assert bare["model_error"].abs().max() > 1e-6
    uncopied = validate(truth.assign(copy_s_per_byte=0.0), {"abc": WORKLOAD}, costs)
    assert (uncopied["model_error"] < -1e-6).all()


def test_compute_that_scatters_widens_the_interval_of_real_training_only() -> None:
    scatter = {"abc": np.array([0.9, 1.0, 1.2])}
    costs = calibration(noise=0.001)
    steady = validate(runs(), {"abc": WORKLOAD}, costs)
    replayed = validate(runs(), {"abc": WORKLOAD}, costs, compute_scatter=scatter)
    pd.testing.assert_frame_equal(steady, replayed)
    training = runs().assign(kind="training")
    training["case"] = [Case.from_row(row).key for row in training.to_dict("records")]
    trained = validate(training, {"abc": WORKLOAD}, costs, compute_scatter=scatter)
    trained, steady = (cases.set_index("plan").sort_index() for cases in (trained, steady))
    assert (trained["lower_s"] < steady["lower_s"]).all()
    assert (trained["upper_s"] > steady["upper_s"]).all()


def test_noise_shows_as_repeatability_and_scores_keep_it() -> None:
    single = runs(noise=0.03)
    cases = accuracy.labelled(validate(single, {"abc": WORKLOAD}, calibration(noise=0.03)))
    figures, covered = accuracy.summary(cases), accuracy.coverage(cases, single)
    assert 0.01 < figures["median_repeatability"] < 0.1
    assert figures["median_error"] < min(0.05, figures["no_overlap_median_error"])
    assert figures["median_error"] <= figures["tail_error"] <= figures["max_error"]
    assert set(cases["lab"]) == {"4 x 1gbit"} and covered["iterations"] == len(single)
    assert covered["coverage_of_cases"] == figures["interval_coverage"] == cases["inside"].mean()
    wide = pd.concat([single, single.assign(iteration_s=9e9)])
    both = accuracy.coverage(cases, wide)["coverage_of_iterations"]
    assert both == covered["coverage_of_iterations"] / 2
    columns = {"measured_iteration_s": "measured_s", "model_iteration_s": "predicted_s"}
    (row,) = accuracy.scores(cases.rename(columns=columns), ["lab"]).to_dict("records")
    assert row["median_error"] == figures["median_error"] and row["n"] == len(cases)
    assert row["error_90"] == figures["tail_error"] and row["coverage"] == cases["inside"].mean()
    assert row["bias"] == cases["model_error"].median()


def test_a_sparse_truth_with_a_straggler_made_by_the_model_has_no_error() -> None:
    """Selection after each group's last gradient, then two all-gathers: against a loop by hand."""
    density, straggler, dilation = 0.01, 1.5, 2.0
    gather = Table(SIZES, 2e-4 + 3e-9 * SIZES, collective="all_gather", workers=4)
    times = SelectionTimes(np.array([1e2, 1e8]), np.array([density]), np.array([1e-6, 1.0]))
    plan = make_plan("buffer:25MB", WORKLOAD)
    how = {"density": density, "straggler": straggler, "dilation": dilation}
    how |= {"collective": "all_gather", "selection_sha256": times.sha256}
    asked = replace(case("buffer:25MB"), **how)
    spent_s = free_s = 0.0
    for n_bytes, ready_s in zip(
        plan.group_bytes(WORKLOAD), plan.group_ready_s(WORKLOAD), strict=True
    ):
        elements = -(-int(n_bytes) // 4)
        spent_s += float(times(elements, density))
        k = max(1, round(density * elements))
        free_s = max(free_s, dilation * straggler * (ready_s + spent_s)) + 2 * gather(4 * 4 * k)
    compute_s = dilation * straggler * (WORKLOAD.compute_s + spent_s)
    rows = {**LAB, "bytes": SIZES, "seconds": gather(SIZES), "collective": "all_gather"}
    known = Calibration.of(pd.DataFrame({**rows, "link_bits_per_s": 0.0}))
    row = by_every_model(
        forecast_case(asked, {"abc": WORKLOAD}, known, {times.sha256: times}), compute_s
    )
    update_s = dilation * straggler * WORKLOAD.update_s
    assert row["model_iteration_s"] == pytest.approx(free_s + update_s)
    assert row["predicted_compute_s"] == pytest.approx(compute_s)
    with pytest.raises(UserError, match="selection times"):
        forecast_case(asked, {"abc": WORKLOAD}, known)


def test_missing_calibration_and_missing_profile_are_told() -> None:
    with pytest.raises(UserError, match="no calibration for all_reduce over lab:1gbit with 8"):
        validate(runs(workers=8), {"abc": WORKLOAD}, calibration())
    with pytest.raises(UserError, match="layer profile abc is not at hand"):
        validate(runs(), {}, calibration())


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
        store.RECORDED / "cpu-2x-amd-epyc-suite" / "runs-resnet18-b4-p2.csv", "runs"
    )
    for row in (*rows.drop_duplicates("case").to_dict("records"), *runs().to_dict("records")):
        assert Case.from_row(row).key == row["case"]
        assert replace(Case.from_row(row), straggler=1.5).key != row["case"]


# -- predictions that came before their runs ------------------------------------------------------

CASES = [
    Case("replay", "lenet5", "cpu", 4, 2, "lab:1gbit", 1e9, "all_reduce", plan, ends)
    for plan, ends in (("none", "1;2"), ("single", "2"), ("ddp", "1;2;3"))
]


def recorded(directory: Path, factor: float = 1.01, digest: str = "", limited: str = "") -> Source:
    """A campaign of CASES, with 1, 2 and 4 repeats of about 1 s, that were said to take factor s."""
    rows = []
    for one in CASES:
        for model, times in {OURS: factor, CARRIED: 2 * factor}.items():
            rows += [(one.key, model, "iteration", times), (one.key, model, "exposed", times / 2)]
        rows += [(one.key, OURS, "lower", 0.995), (one.key, OURS, "upper", 2.0)]
    said = pd.DataFrame(rows, columns=["case", "model", "quantity", "seconds"])
    how: Any = {"command": ["drawn"], "machine": {"name": "drawn"}}
    path = store.save_table(said, directory, "predicted-cases", schema="predicted", **how)
    runs = pd.DataFrame(
        {**vars(one), "case": one.key, "repeat": repeat, "iteration_s": 0.99 + 0.01 * repeat}
        | {"processor_limited": one.plan == limited}
        for one, times in zip(CASES, (1, 3, 5), strict=True)
        for repeat in range(times)
    ).assign(
        **{"origin": "replayed", "iteration": 0, "compute_s": 0.5, "exposed_communication_s": 0.5},
        **{"processor_load": 0.1, "stolen": 0.0, "late": 0.0, "copy_s_per_byte": 0.0},
        **{"precision": "fp32", "predicted": digest or store.load_stamp(path)["sha256"][:12]},
    )
    store.save_table(runs, directory, "runs-drawn", schema="runs", **how)
    return Source((directory,))


def test_errors_are_of_medians_and_intervals_of_single_iterations(tmp_path: Path) -> None:
    cases = accuracy.joined(recorded(tmp_path)).set_index("case").loc[[one.key for one in CASES]]
    medians = np.array([0.99, 1.0, 1.01])
    assert cases["model_error"].to_numpy() == pytest.approx(1.01 / medians - 1)
    assert cases["carried_error"].to_numpy() == pytest.approx(2.02 / medians - 1)
    assert cases["model_exposed_error"].to_numpy() == pytest.approx(np.full(3, 0.01))
    assert cases["runs"].tolist() == [1, 3, 5]
    assert cases["covered"].tolist() == [0, 2, 4], "only the first, 0.99, lies below"
    assert cases["no_overlap_error"].isna().all(), "which said nothing"


@pytest.mark.parametrize(("factor", "holds"), [(1.005, True), (1.2, False)])
def test_a_goal_holds_where_it_is_reached(tmp_path: Path, factor: float, holds: bool) -> None:
    """Cases that the processor limited are not judged."""
    judged = accuracy.preregistered(recorded(tmp_path, factor, limited="ddp"))
    assert list(judged.cases["plan"]) == ["none", "single"]
    held = judged.goals.set_index("goal")["holds"]
    assert held["cases within 5%"] == holds
    assert not held["median error, carried"] and not held["interval covers, least"]
    assert held["interval covers, most"]


def test_a_run_that_something_else_predicted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="predicted by .*'0123456789ab'"):
        accuracy.joined(recorded(tmp_path, digest="0123456789ab"))


PREDICTED = store.list_tables(store.RECORDED, "**/predicted-cases.csv")


@pytest.mark.parametrize("path", PREDICTED, ids=lambda path: path.parent.name)
def test_stamps_have_predictions_before_their_runs(path: Path) -> None:
    """Of every campaign that counts as predicted; its runs carry the hash of the table."""
    campaign = Source((path.parent,))
    assert campaign.begun("predicted") < campaign.begun("runs")
    assert len(accuracy.joined(campaign)) > 0


# -- the paper's formula, where it must agree with ours -------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_the_papers_formula_is_our_model_without_fusion_and_repaired_with_it(seed: int) -> None:
    workload = random_workload(np.random.default_rng(seed), 30)
    for spec in ("none", "single", "buffer:1MB", "buffer:25MB"):
        plan = make_plan(spec, workload)
        ours_s = predict(workload, plan, COST).iteration_s
        repaired = predict_osf(Iteration(workload, plan, COST), literal=False)
        assert repaired.iteration_s == pytest.approx(ours_s)
        literal = predict_osf(Iteration(workload, plan, COST)).iteration_s
        assert math.isfinite(literal)
        if spec == "none":
            assert literal == pytest.approx(ours_s)
        if spec == "single":
            iteration_s = no_overlap(Iteration(workload, plan, COST)).iteration_s
            assert literal == pytest.approx(iteration_s)


def test_the_paper_has_no_formula_for_other_plans_and_other_collectives() -> None:
    gather = SparseGather(Table(SIZES, COST.seconds, collective="all_gather", workers=4), 0.01)
    exact, none = make_plan("exact", WORKLOAD, COST), make_plan("none", WORKLOAD)
    pairs = ((exact, COST, Link()), (none, COST, Link(in_flight=2)), (none, gather, Link()))
    for plan, cost, link in pairs:
        for literal in (True, False):
            times = predict_osf(Iteration(WORKLOAD, plan, cost, link), literal=literal)
            assert math.isnan(times.iteration_s)
