"""Validation: a truth made by the model has no error, noise shows as repeatability."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, MessageCost, Table
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import PLAIN, Iteration
from ddlkit.core.link import Link, wire_s_per_byte
from ddlkit.core.plan import make_plan
from ddlkit.core.sparse import SelectionTimes
from ddlkit.model.calibration import Calibration, software_at_once
from ddlkit.model.predictor import forecast_case, plan_of
from ddlkit.model.trials import LINES, TRIALS
from ddlkit.report.accuracy import by_every_model, calibrated, summary, validate
from ddlkit.store.pack import cut_out
from strategies import random_workload

SIZES = np.geomspace(1e2, 1e8, 13)
COST = Table(SIZES, 1e-3 + 8e-9 * SIZES, workers=4)
SPECS = ("none", "single", "buffer:25MB", "ddp", "exact")
WORKLOAD = random_workload(np.random.default_rng(0), 40)


RATE_BITS_PER_S = 1.6e9
WIRE_S_PER_BYTE = wire_s_per_byte("all_reduce", 4, RATE_BITS_PER_S)
COPY_S_PER_BYTE = 1e-9


def calibration(noise: float = 0.0, rate_bits_per_s: float = 0.0) -> Calibration:
    rng = np.random.default_rng(1)
    sizes = np.repeat(SIZES, 9)
    rows = {"link": "lab:1gbit", "ranks": 4, "collective": "all_reduce", "algorithm": "ring"}
    seconds = COST(sizes) * np.exp(rng.normal(0, noise, sizes.size))
    known = {
        "bytes": sizes,
        "seconds": seconds,
        "session": 0,
        "messages_per_sample": 1,
        "in_flight": 1,
        "stolen": 0.0,
        "link_bits_per_s": rate_bits_per_s,
    }
    return calibrated(pd.DataFrame({**known, **rows}))


def case(spec: str, workers: int = 4) -> Case:
    plan = make_plan(spec, WORKLOAD, COST)
    ends = ";".join(map(str, plan.ends))
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
            exposed_s = iteration_s - WORKLOAD.compute_s
            values = {"iteration_s": iteration_s, "compute_s": WORKLOAD.compute_s, "repeat": repeat}
            rows.append({**vars(asked), **values, "case": asked.key, "origin": "replayed",
                         "exposed_communication_s": exposed_s, "processor_load": 0.5,
                         "processor_limited": False, "stolen": 0.0,
                         "copy_s_per_byte": copy_s_per_byte})  # fmt: skip
    return pd.DataFrame(rows)


def test_a_truth_made_by_the_model_has_no_error() -> None:
    found = validate(runs(), {"abc": WORKLOAD}, calibration())
    assert len(found) == len(SPECS)
    assert found["model_error"].abs().max() < 1e-9
    assert found["model_exposed_error"].abs().max() < 1e-9
    assert found["repeatability"].max() == 0
    assert found["no_overlap_error"].max() > 0.01
    assert (found["no_overlap_error"] >= -1e-12).all()
    assert (found["perfect_overlap_error"] <= 1e-12).all()


def test_every_model_on_trial_is_right_where_it_is_the_truth() -> None:
    """Each gets the same messages and plan: lines where the truth is one, tables where it is that."""
    costs = calibration(rate_bits_per_s=RATE_BITS_PER_S).without_credit()
    truths = {
        AlphaBeta(1e-3, 8e-9, workers=4): [*LINES, "line_relative", "osf_repaired_line"],
        COST: ["no_credit", "osf_repaired_table"],
    }
    for cost, names in truths.items():
        found = validate(runs(cost=cost), {"abc": WORKLOAD}, costs)
        covered = found["plan"].isin(["none", "single", "buffer:25MB"])
        for name in names:
            error = found[f"{name}_error"]
            assert error.isna().any() == name.startswith("osf") and error[covered].notna().all()
            # What has no fit takes the link's rate, which is not the truth's here.
            assert (error.abs().max() < 1e-9) == (name != "line_unfitted"), name


def test_a_trial_whose_cost_is_not_known_says_nothing() -> None:
    """Of a link without a rate there is no unfitted line, and no error of one."""
    found = validate(runs(), {"abc": WORKLOAD}, calibration())
    assert found["line_unfitted_error"].isna().all()
    assert found["line_medians_error"].notna().all()
    assert "line_unfitted_median_error" not in summary(found)
    assert set(TRIALS) == {c.removesuffix("_iteration_s") for c in found if c.endswith("_iteration_s")} - {
        "measured", "model", "rescaled"}  # fmt: skip


@pytest.mark.parametrize("in_flight", [1, 2])
def test_credit_lanes_and_copies_are_known_too(in_flight: int) -> None:
    """All three at once, in a truth of the lab's shaped link; left out, they are missed."""
    costs = calibration(rate_bits_per_s=RATE_BITS_PER_S)
    link = costs.of_case(replace(case("none"), in_flight=in_flight)).link
    assert link.burst_s > 0 and link.in_flight == in_flight
    assert link.wire_s_per_byte == pytest.approx(WIRE_S_PER_BYTE)
    truth = runs(link=link, copy_s_per_byte=COPY_S_PER_BYTE)
    found = validate(truth, {"abc": WORKLOAD}, costs)
    for quantity in ("model", "model_exposed", "rescaled", "rescaled_exposed"):
        assert found[f"{quantity}_error"].abs().max() < 1e-9
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
    found = validate(training, {"abc": WORKLOAD}, costs, compute_scatter=scatter)
    trained, steady = (one.set_index("plan").sort_index() for one in (found, steady))
    assert (trained["lower_s"] < steady["lower_s"]).all()
    assert (trained["upper_s"] > steady["upper_s"]).all()
    alone = trained.loc["single"]
    least_s = alone["model_iteration_s"] - 0.1 * WORKLOAD.compute_s
    assert alone["lower_s"] == pytest.approx(least_s, rel=0.01)


def test_how_much_software_is_done_at_once_is_read_off_small_messages() -> None:
    rows = pd.DataFrame(
        [
            {"in_flight": lanes, "bytes": size, "seconds": seconds / faster}
            for lanes, faster in ((1, 1.0), (2, 1.4))
            for size, seconds in ((1024, 1e-3), (4096, 2e-3))
        ]
    )
    assert software_at_once(rows) == pytest.approx(1.4)
    assert software_at_once(rows[rows["in_flight"] == 1]) == np.inf
    slower = rows.assign(seconds=rows["seconds"] * rows["in_flight"])
    assert software_at_once(slower) == 1.0


def test_noise_shows_as_repeatability_and_the_summary_keeps_it() -> None:
    found = validate(runs(noise=0.03), {"abc": WORKLOAD}, calibration(noise=0.03))
    figures = summary(found)
    assert 0.01 < figures["median_repeatability"] < 0.1
    assert figures["median_error"] < 0.05
    assert figures["median_error"] < figures["no_overlap_median_error"]
    assert figures["median_error"] <= figures["tail_error"] <= figures["max_error"]
    assert figures["median_error_where_osf_line"] < 0.05
    assert 0 <= figures["interval_coverage"] <= 1
    assert (found["lower_s"] <= found["model_iteration_s"]).mean() > 0.5


def test_a_case_survives_the_runs_table() -> None:
    asked = case("exact")
    row = runs().query("plan == 'exact'").iloc[0].to_dict()
    assert Case.from_row(row) == asked
    assert Case.from_row(row).key == asked.key
    assert case("ddp").key != asked.key


def test_a_case_keeps_the_key_that_it_had_before_there_were_more_fields() -> None:
    """The key of a recorded case, whose table lacks the columns that came later."""
    recorded = store.RECORDED / "cpu-2x-amd-epyc-suite" / "runs-resnet18-b4-p2.csv"
    rows = store.load_table(recorded, "runs")
    assert b"straggler" not in cut_out(recorded)[0].splitlines()[0]
    for row in rows.drop_duplicates("case").to_dict("records"):
        assert Case.from_row(row).key == row["case"]
        assert replace(Case.from_row(row), straggler=1.5).key != row["case"]


def test_a_sparse_truth_with_a_straggler_made_by_the_model_has_no_error() -> None:
    """Selection after each group's last gradient, then two all-gathers: against a loop by hand."""
    density, straggler, dilation = 0.01, 1.5, 2.0
    gather = Table(SIZES, 2e-4 + 3e-9 * SIZES, collective="all_gather", workers=4)
    times = SelectionTimes(np.array([1e2, 1e8]), np.array([density]), np.array([1e-6, 1.0]))
    plan = make_plan("buffer:25MB", WORKLOAD)
    asked = replace(
        case("none"),
        plan=plan.planner,
        ends=";".join(map(str, plan.ends)),
        collective="all_gather",
        density=density,
        straggler=straggler,
        dilation=dilation,
        selection_sha256=times.sha256,
    )
    spent_s = free_s = 0.0
    for n_bytes, ready_s in zip(
        plan.group_bytes(WORKLOAD), plan.group_ready_s(WORKLOAD), strict=True
    ):
        elements = -(-int(n_bytes) // 4)
        spent_s += float(times(elements, density))
        k = max(1, round(density * elements))
        free_s = max(free_s, dilation * straggler * (ready_s + spent_s)) + 2 * gather(4 * 4 * k)
    compute_s = dilation * straggler * (WORKLOAD.compute_s + spent_s)
    update_s = dilation * straggler * WORKLOAD.update_s
    rows = {"link": "lab:1gbit", "ranks": 4, "collective": "all_gather", "algorithm": "ring"}
    known = {
        "bytes": SIZES,
        "seconds": gather(SIZES),
        "session": 0,
        "messages_per_sample": 1,
        "in_flight": 1,
        "stolen": 0.0,
        "link_bits_per_s": 0.0,
    }
    calibrated = Calibration.of(pd.DataFrame({**known, **rows}))
    selections = {times.sha256: times}
    found = forecast_case(asked, {"abc": WORKLOAD}, calibrated, selections)
    row = by_every_model(found, compute_s)
    assert row["model_iteration_s"] == pytest.approx(free_s + update_s)
    assert row["predicted_compute_s"] == pytest.approx(compute_s)
    with pytest.raises(UserError, match="selection times"):
        forecast_case(asked, {"abc": WORKLOAD}, calibrated)


def test_missing_calibration_and_missing_profile_are_told() -> None:
    with pytest.raises(
        UserError, match="no calibration for all_reduce over lab:1gbit with 8 ranks"
    ):
        validate(runs(workers=8), {"abc": WORKLOAD}, calibration())
    with pytest.raises(UserError, match="layer profile abc is not at hand"):
        validate(runs(), {}, calibration())


def test_disturbed_samples_of_a_calibration_are_left_out_where_there_are_others() -> None:
    known = {"link": "lab:1gbit", "ranks": 4, "collective": "all_reduce", "algorithm": "ring"}
    rows = pd.DataFrame(
        {
            "bytes": [1e3, 1e3, 1e6, 1e6],
            "seconds": [1.0, 9.0, 2.0, 4.0],
            "session": [0, 1, 0, 1],
            "stolen": [0.0, 0.3, 0.3, 0.3],
            "messages_per_sample": 1,
            "in_flight": 1,
            "link_bits_per_s": 0.0,
            **known,
        }
    )
    cost = Calibration.of(rows).between("lab:1gbit", 4).cost
    assert cost([1e3, 1e6]) == pytest.approx([1.0, 3.0])
