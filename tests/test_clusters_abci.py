"""ABCI's iterations and trainings, predicted blind; what a model's free number is fitted to, it recovers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.report.clusters import abci, board
from ddlkit.report.clusters.rules import rows
from ddlkit.report.clusters.trials import TRIALS, fitted

FREE = [name for name, trial in TRIALS.items() if trial.most]
FP32 = rows("abci-step-fp32")


@pytest.mark.parametrize("name", TRIALS)
def test_predictions_are_blind(name: str) -> None:
    hidden = replace(FP32, test=FP32.test.assign(iteration_s=np.nan, compute_s=np.nan))
    seen, blind = (abci.iterations(one, name)["predicted_s"] for one in (FP32, hidden))
    assert np.isfinite(seen).all() and seen.equals(blind)


@pytest.mark.parametrize(("name", "truth"), [("workbook_slowed", 0.3), ("workbook_step", 0.004)])
def test_a_cluster_that_follows_a_model_is_predicted_exactly(name: str, truth: float) -> None:
    def made(part: str) -> np.ndarray:
        return abci.steps(FP32, getattr(FP32, part), TRIALS[name], truth)

    shown = FP32.calibrate.assign(iteration_s=made("calibrate"))
    found = abci.iterations(replace(FP32, calibrate=shown), name)
    assert set(found["free"].round(6)) == {truth}
    assert found["predicted_s"].to_numpy() == pytest.approx(made("test"), rel=1e-6)


@given(st.floats(0, 5), st.floats(0.1, 10))
def test_the_free_number_leaves_no_bias_within_its_range(truth: float, most: float) -> None:
    ways = np.array([1.0, 2.0, 4.0])
    found = fitted(lambda free: ways + free, ways + truth, most)
    assert found == pytest.approx(min(truth, most), abs=1e-6)
    assert fitted(lambda free: ways + 1 + free, ways, most) == 0.0


def test_models_keep_their_order() -> None:
    """Whatever is hidden, an iteration is not shorter than computing, nor longer than all in a row."""
    for name in ("perfect_overlap", "workbook", "osf_repaired", "dag"):
        said = abci.iterations(FP32, name)["predicted_s"].to_numpy()
        assert np.all(said >= abci.iterations(FP32, "compute_only")["predicted_s"] * (1 - 1e-12))
    ours, all_in_a_row = (
        abci.iterations(FP32, name)["predicted_s"].to_numpy() for name in ("workbook", "no_overlap")
    )
    assert np.all(ours <= all_in_a_row)


def test_the_goal_on_abci_is_reached_with_a_step_of_data_parallelism_and_not_without() -> None:
    """A median signed error within 1%, in fp32 and with AMP apart."""
    judged = board.scoreboard(abci.predictions()).set_index(["rule", "model"])
    for rule in ("abci-step-fp32", "abci-step-amp"):
        assert abs(judged.loc[rule].loc["workbook_step", "bias"]) < 0.01
        assert judged.loc[rule].loc["workbook", "bias"] < -0.01
    assert judged.loc["abci-trainings"].loc["workbook", "bias"] < -0.1
    assert not set(FREE) & set(judged.loc["abci-trainings"].index)


def test_what_a_step_takes_longer_is_shown_by_configuration_and_in_part_by_models() -> None:
    """Without any message nothing is longer; a constant comes upon every configuration alike."""
    predicted = abci.predictions()
    found = abci.longer(predicted, ["compute_only", "workbook", "workbook_step"])
    step = abci.step(predicted)
    assert len(found) == len(step.errors) == 5 and (found["measured"] > 3).all()
    np.testing.assert_allclose(found["compute_only"], 0, atol=1e-9)
    np.testing.assert_allclose(found["workbook_step"] - found["workbook"], 1e3 * step.constant_s)
    assert step.slowdown == TRIALS["workbook_slowed"].most and (step.trainings < 0).all()
