"""Models on trial on others' clusters: rules keep calibration and test apart, and predictions are blind."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration, no_overlap, perfect_overlap
from ddlkit.core.workload import Workload
from ddlkit.formats.clusters import EXTERNAL
from ddlkit.report.clusters import board, overlap, pollux, rules

POLLUX = "pollux-resnet50"
SECONDS = st.floats(1e-4, 1e3)


@pytest.mark.parametrize("name", rules.rules())
def test_no_row_both_calibrates_and_tests(name: str) -> None:
    found = rules.rows(name)
    parts = [set(part.index) for part in (found.compute, found.calibrate, found.test)]
    assert found.test.size and parts[0] | parts[1]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert (found.test[rules.rules()[name]["predicts"]] > 0).all()
    costs = rules.rules()[name].get("costs")
    assert costs is None or list(EXTERNAL.glob(costs))


def test_no_batch_that_is_tested_calibrates_in_pollux() -> None:
    found = rules.rows(POLLUX)
    assert not set(found.test["batch"]) & set(found.calibrate["batch"])
    assert set(found.compute["placement"]) == {"1"}
    assert (len(found.compute), len(found.calibrate), len(found.test)) == (8, 107, 749)


@given(compute_s=SECONDS, wire_s=SECONDS, seed=st.integers(0, 99))
def test_lines_are_the_iteration_that_they_stand_for(
    compute_s: float, wire_s: float, seed: int
) -> None:
    """Of any workload and plan, and as the trivial models say it, which hold it between them."""
    draw = np.random.default_rng(seed)
    n = int(draw.integers(1, 12))
    times, sizes = draw.uniform(0, 1, n), draw.integers(1, 10**7, n)
    shape = Workload.from_arrays(draw.uniform(0.01, 1), times, sizes, draw.uniform(0, 0.1))
    sent = plan.buffer(shape, int(draw.integers(1, 3 * 10**7)))
    cost = AlphaBeta(0.0, wire_s / shape.bytes.sum())
    whole = Iteration(shape.scaled(compute_s / shape.compute_s), sent, cost)
    both = {name: overlap.models()[name] for name in ("no_overlap", "perfect_overlap")}
    said = {
        "no_overlap": no_overlap(whole).iteration_s,
        "perfect_overlap": perfect_overlap(whole).iteration_s,
        "workbook": whole.prediction.iteration_s,
    }
    ours = {**both, "workbook": overlap.overlapped(shape, sent)}
    found = {
        name: model.iteration_s(np.array([compute_s]), np.array([wire_s]))[0]
        for name, model in ours.items()
    }
    assert found == pytest.approx(said, rel=1e-9)
    tiny = 1 + 1e-9
    assert found["perfect_overlap"] <= found["workbook"] * tiny
    assert found["workbook"] <= found["no_overlap"] * tiny


@pytest.mark.parametrize("name", ["no_overlap", "perfect_overlap", "workbook"])
@given(compute_s=SECONDS, wire_s=SECONDS)
def test_a_model_is_calibrated_to_what_it_is_shown(
    name: str, compute_s: float, wire_s: float
) -> None:
    """The W that is found gives the same iteration; it is 0 where computing alone takes as long."""
    model, alone = overlap.models()[name], np.array([compute_s])
    shown_s = model.iteration_s(alone, np.array([wire_s]))
    fitted_s = model.wire_s(alone, shown_s)
    assert model.iteration_s(alone, fitted_s) == pytest.approx(shown_s, rel=1e-9)
    assert model.wire_s(alone, 0.9 * alone)[0] == 0.0


@pytest.mark.parametrize("name", overlap.models())
def test_predictions_are_blind(name: str) -> None:
    """They are the same whatever was measured in the rows that are tested."""
    found, model = rules.rows(POLLUX), overlap.models()[name]
    hidden = found.test.assign(iteration_s=np.nan, sync_s=np.nan)
    before = pollux.predict(found, model)
    assert np.array_equal(before, pollux.predict(replace(found, test=hidden), model))
    assert np.isfinite(before).all()


@pytest.mark.parametrize("name", ["no_overlap", "perfect_overlap", "workbook"])
def test_a_cluster_that_follows_a_model_is_predicted_exactly(name: str) -> None:
    """Rows made by the model itself, with a wire time for each placement that keeps it visible."""
    found, model = rules.rows(POLLUX), overlap.models()[name]
    alone = found.compute.set_index("batch")["iteration_s"]
    places = sorted(set(found.test["placement"]))
    wire = dict(zip(places, np.linspace(0.5, 5.0, len(places)), strict=True))

    def made(part: str) -> np.ndarray:
        frame = getattr(found, part)
        wire_s = np.array([wire[place] for place in frame["placement"]])
        return model.iteration_s(alone[frame["batch"]].to_numpy(), wire_s)

    shown = replace(found, calibrate=found.calibrate.assign(iteration_s=made("calibrate")))
    assert pollux.predict(shown, model) == pytest.approx(made("test"), rel=1e-9)


def test_the_workbook_beats_what_it_is_held_against_on_pollux() -> None:
    """5.2% is what a first look had reached on these 749 cells, before this was built."""
    judged = board.scoreboard(pollux.predictions()).set_index("model")
    assert set(judged["n"]) == {749} and set(judged["rule"]) == {POLLUX}
    ours, others = judged.loc["workbook"], judged.drop("workbook")
    assert ours["median_error"] < 0.052
    assert (others["median_error"] > ours["median_error"]).all()
    assert (others["error_90"] > ours["error_90"]).all()
    assert (judged["bias"].abs() <= judged["median_error"]).all()
    assert (judged["median_error"] <= judged["error_90"]).all()


WRONG = [
    ("ranks > 1 and batch == 20", "ranks > 1", "a row is in two parts"),
    ("ranks > 1 and batch > 20", "ranks > 9999", "tests nothing"),
    ("pollux.read_iterations", "pollux.read", "reads 'pollux.read'"),
    ("    predicts: iteration_s\n", "", "lacks predicts"),
    ("imagenet-placements", "imagenot", "there are no files"),
    ("rules:\n", "rulers:\n", "no YAML with rules"),
]


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_a_wrong_rule_is_one_line_of_error(old: str, new: str, said: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(EXTERNAL, tmp_path / "external")) / rules.RULES.name
    copy.write_text(copy.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=said) as error:
        rules.rows(POLLUX, copy)
    assert "\n" not in str(error.value)


def test_a_rule_that_is_not_there_and_rows_that_lack_a_batch_are_told() -> None:
    with pytest.raises(UserError, match="unknown rule 'pollux': use one of pollux-resnet50"):
        rules.rows("pollux")
    found, model = rules.rows(POLLUX), overlap.models()["workbook"]
    with pytest.raises(UserError, match=r"batches without a row to compute: \[200\]"):
        pollux.predict(replace(found, compute=found.compute[:-1]), model)
    with pytest.raises(UserError, match="placements without one to calibrate"):
        pollux.predict(replace(found, calibrate=found.calibrate[1:]), model)
