"""osf's figures: a measurement made by the model has no error, ranges are those of all settings that fit."""

from __future__ import annotations

from dataclasses import asdict

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, Table
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration, predict
from ddlkit.core.plan import make_plan, none
from ddlkit.model.calibration import Calibration
from strategies import random_workload
from workbook.common import networks, source
from workbook.common.source import Source
from workbook.osf import by_buffer, factors, fig03, fig10, phases, settings
from workbook.osf import equations as osf
from workbook.osf.equations import PHASES
from workbook.osf.lab import Lab

SIZES = np.geomspace(1e2, 1e9, 15)
COST = Table(SIZES, 1e-9 * SIZES, workers=4)
"""Without a start-up, so that an agreement takes next to no time."""
WORKLOAD = random_workload(np.random.default_rng(0), 20)
REPLAYED = [("none", True), ("buffer:25MB", True), ("none", False)]
RECORDING = Source((source.teaching_recording(),))


def samples(
    sizes: np.ndarray, seconds: np.ndarray, link: str = "lab:1gbit"
) -> pd.DataFrame:
    """All-reduces among four ranks that nothing disturbs."""
    how = {
        "link": link,
        "ranks": 4,
        "collective": "all_reduce",
        "algorithm": "ring",
        "session": 0,
    }
    quiet = {
        "messages_per_sample": 1,
        "in_flight": 1,
        "stolen": 0.0,
        "link_bits_per_s": 0.0,
    }
    return pd.DataFrame({"bytes": sizes, "seconds": seconds}).assign(**how, **quiet)


def made() -> Lab:
    """Two repeats of cases that go as the model says; of the second, all takes twice as long."""
    runs, spans, slow = [], [], WORKLOAD.scaled(3.0)
    for spec, negotiated in REPLAYED:
        plan = make_plan(spec, slow)
        place = ("replay", "resnet101", "cpu", 1, 4, "lab:1gbit", 1e9, "all_reduce")
        case = Case(
            *place,
            spec,
            ";".join(map(str, plan.ends)),
            dilation=3.0,
            profile_sha256="abc",
            negotiated=negotiated,
        )
        told, timeline = (
            predict(slow, plan, COST),
            Iteration(slow, plan, COST).timeline(),
        )
        for repeat in range(2):
            key = {"case": case.key, "repeat": repeat}
            times = {"iteration_s": told.iteration_s, "compute_s": told.compute_s}
            runs.append({**asdict(case), **key, **times, "processor_limited": False})
            of = timeline.to_frame()
            of[["start_s", "end_s"]] *= 1 + repeat
            spans.append(of.assign(**key))
    calibration = Calibration.of(samples(SIZES, COST(SIZES)))
    return Lab(pd.DataFrame(runs), pd.concat(spans), {"abc": WORKLOAD}, calibration)


def test_a_measurement_made_by_the_model_has_its_phases() -> None:
    rows = phases.in_lab(made())
    assert set(rows["buffer_bytes"]) == {0, 25_000_000} and set(rows["slowest"]) == {1}
    assert list(rows["phase"]) == [*PHASES, *PHASES]
    # The second repeat takes twice as long: the mean is 1.5 times the model, their difference once.
    assert np.allclose(rows["measured_s"], 1.5 * rows["model_s"], atol=1e-4)
    assert np.allclose(rows["repeatability_s"], rows["model_s"], atol=1e-4)
    assert np.allclose(rows.groupby("buffer_bytes")["measured"].sum(), 1)
    assert np.allclose(rows["measured"], rows["model"], atol=1e-4)
    alone = phases.in_lab(made(), negotiated=False)
    assert set(alone["buffer_bytes"]) == {0} and len(alone) == len(PHASES)


def test_of_a_case_run_both_ways_the_negotiated_one_counts_as_of_buffers() -> None:
    lab = made()
    both = lab.runs["negotiated"] & (lab.runs["plan"] == "none")
    lab.runs.loc[both, "iteration_s"] *= [1.0, 2.0]
    factors = by_buffer.in_lab(lab).set_index("buffer_bytes")
    alone = predict(WORKLOAD.scaled(3.0), none(WORKLOAD), COST).scaling_factor
    assert factors.loc[0, "measured"] == pytest.approx(0.75 * alone)
    assert factors.loc[0, "repeatability"] == pytest.approx(0.5 * alone)
    assert factors.loc[25_000_000, "repeatability"] == 0


def test_compatible_settings_are_those_with_the_most_statements_best_first() -> None:
    search, compatible = settings.setting_search(), settings.compatible()
    assert len(compatible) == search.most(settings.ANCHOR).sum()
    best = search.grid.setting(search.best_index(settings.ANCHOR))
    assert compatible[0] == settings.setting() == best
    low, high = search.range_of("VGG-16: scaling factor", settings.ANCHOR)
    keys = ["network", "quantity"]
    row = settings.over(fig03.modelled, keys).set_index(keys).loc["VGG16", "simulated"]
    assert (low, high) == pytest.approx((row["model_low"], row["model_high"]), rel=1e-9)


def test_formulas_are_exact_where_they_hold() -> None:
    """Without start-ups OSF repaired is the recursion, and CSF is never above it."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        workload = random_workload(rng, 12)
        cost = AlphaBeta(0.0, float(10 ** rng.uniform(-11, -8)))
        by_formula = factors.by_formulas(workload, cost)
        simulated = predict(workload, none(workload), cost).scaling_factor
        assert by_formula["OSF repaired"] == pytest.approx(simulated, rel=1e-9)
        assert by_formula["CSF"] <= simulated * (1 + 1e-12)


BEFORE = np.repeat([1024 << k for k in range(17)], 3)
TENSORS = np.repeat(
    sorted({4 * count for count in networks.parameters("ResNet101")}), 3
)


def ring(
    sizes: np.ndarray, factor: float = 1.0, link: str = "lab:1gbit"
) -> pd.DataFrame:
    seconds = factor * osf.update_s(sizes, 4, 125e6, overhead_s=9e-4)
    return samples(sizes, seconds, link).assign(network="ResNet101")


def test_a_true_ring_is_predicted_by_all_but_the_logarithm_and_told_apart_if_runs_agree() -> (
    None
):
    """On one day the line beats Eq 18 on small tensors, on another nothing is decided."""
    for factor, decided in ((1.0, True), (1.5, False)):
        frame = fig10.numbers(ring(BEFORE), ring(TENSORS, factor), "ResNet101")
        assert frame["bandwidth_delay_bytes"].iloc[0] == pytest.approx(125e6 * 9e-4 / 3)
        small = fig10.decided(frame).set_index("tensors").loc["small"]
        assert small["line"] in fig10.LINE_MODELS and small["decided"] == decided
        assert small["runs_differ"] == pytest.approx(1 - 1 / factor)
        assert (small["line_error"] < small["eq18_error"]) or not decided
        worst = frame["error"].abs().groupby(frame["model"]).max()
        assert (
            worst[fig10.LINE_MODELS].max() < 1e-9 and worst["piecewise:BDP"] > 0.01
        ) == decided
        per_tensor = frame[frame["model"] == "alpha_beta"]["tensors"]
        assert per_tensor.sum() == len(networks.parameters("ResNet101"))
        figure = fig10.draw(frame)
        (ax,) = figure.axes
        assert "paper: BDP of 45 KB" in ax.get_legend_handles_labels()[1]
        assert ("undecided" in ax.get_title(loc="left")) != decided
        plt.close(figure)
    with pytest.raises(UserError, match="no link with all-reduces of ResNet101"):
        fig10.numbers(ring(BEFORE), ring(TENSORS, link="lab:2gbit"), "ResNet101")


def test_a_replay_is_predicted_from_the_compute_that_was_waited_out_else_as_profiled() -> (
    None
):
    workload, runs = source.as_replayed(RECORDING, "googlenet", "lab:1gbit", 4)
    assert workload.compute_s == pytest.approx(runs["compute_s"].median())
    workload, runs = source.as_replayed(RECORDING, "googlenet", "no link", 4)
    assert (
        runs.empty
        and workload.compute_s == RECORDING.profile("googlenet").workload().compute_s
    )
