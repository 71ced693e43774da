"""Trainings with known delays: what is stated, what a rank does of it, and what was recorded."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml

from ddlkit.core.errors import UserError
from ddlkit.formats.kineto import iterations, parse_kineto
from workbook.common import places
from workbook.record import straggling
from workbook.record.straggling import MODELS, Delays, Layer, scenarios
from workbook.validate import straggling as straggling_judged

SCENARIOS = scenarios()
PHASES = ("input", "forward", "backward", "update")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_right_answer_follows_from_what_is_injected(name: str) -> None:
    """It is the rank with the largest delay, and its phase unless there are several."""
    scenario = SCENARIOS[name]
    layers = MODELS[scenario.model].layers
    delay_s: dict[int, float] = {}
    phases: dict[int, set[str]] = {}
    for delay in scenario.inject:
        assert delay.rank < scenario.ranks
        assert delay.phase in PHASES
        delay_s[delay.rank] = delay_s.get(delay.rank, 0) + delay.total_s(layers)
        phases.setdefault(delay.rank, set()).add(delay.phase)
    if not delay_s:
        assert scenario.right is None
        return
    assert scenario.right is not None
    slowest = max(delay_s, key=delay_s.__getitem__)
    assert scenario.right.rank == slowest
    only_phase = phases[slowest] == {scenario.right.phase}
    assert only_phase or (scenario.right.phase == "any" and len(phases[slowest]) > 1)


@pytest.mark.parametrize("name", SCENARIOS)
def test_odd_iterations_have_all_that_is_stated_and_even_ones_nothing(
    name: str,
) -> None:
    scenario = SCENARIOS[name]
    layers = MODELS[scenario.model].layers
    jitter_s = 2 * layers * scenario.jitter_s
    for rank in range(scenario.ranks):
        delays = Delays(scenario, rank)
        stated_s = sum(
            delay.total_s(layers) for delay in scenario.inject if delay.rank == rank
        )
        for iteration in range(4):
            delays.iteration = iteration
            total_s = delays.seconds("input") + delays.seconds("update")
            for phase in ("forward", "backward"):
                for layer in range(layers):
                    total_s += delays.seconds(phase, layer)
            if iteration % 2 == 0:
                assert total_s == 0
            else:
                assert stated_s <= total_s + 1e-9
                assert total_s <= stated_s + jitter_s + 1e-9


def test_iterations_without_a_delay_compute_one_as_the_others_do() -> None:
    """Otherwise those with a delay would take longer on every rank."""
    odd_only, even_first = (Delays(SCENARIOS["jitter"], rank=0) for _ in range(2))
    odd_only.iteration = 1
    odd_only.seconds("forward", 0)
    even_first.seconds("forward", 0)
    even_first.iteration = 1
    assert even_first.seconds("forward", 1) == odd_only.seconds("forward", 1)


def test_a_delay_in_backward_comes_before_the_gradients_of_its_own_layer() -> None:
    scenario = SCENARIOS["backward_middle"]
    (delay,) = scenario.inject
    assert delay.layer is not None
    delays = Delays(scenario, delay.rank)
    delays.iteration = 1
    shape = MODELS[scenario.model]
    layers = [Layer(shape, number, delays) for number in range(shape.layers)]
    ready_s = {}
    for layer in layers:
        (addends,) = layer.parameters()
        addends.register_post_accumulate_grad_hook(
            lambda _, number=layer.number: ready_s.update({number: time.monotonic()})
        )
    torch.nn.Sequential(*layers)(torch.zeros(1, 16)).sum().backward()
    assert list(ready_s) == [*reversed(range(shape.layers))]
    before, own = ready_s[delay.layer + 1], ready_s[delay.layer]
    assert own - before >= delay.seconds + shape.backward_s


@pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if s.remedy])
def test_a_remedy_changes_the_training_and_has_none_itself(name: str) -> None:
    scenario = SCENARIOS[name]
    cured = scenario.with_remedy()
    assert cured != scenario
    assert cured.with_remedy() == cured
    assert cured.inject == scenario.inject
    assert cured.right == scenario.right


def test_an_unknown_scenario_is_refused_before_anything_is_recorded(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match="forwards"):
        straggling.record(tmp_path, ["none", "forwards"])
    assert not [*tmp_path.iterdir()]


def test_the_progress_counts_the_scenarios_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("record_scenario", "_record_reference"):
        monkeypatch.setattr(straggling, name, lambda *given, **options: None)
    chosen = ["loader", "none"]
    straggling.record(tmp_path, chosen)
    said = capsys.readouterr().err
    for number, name in enumerate(chosen, 1):
        assert f"[{number}/2] recording {name}, about " in said


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_recording_has_a_whole_trace_of_each_rank(name: str) -> None:
    scenario = SCENARIOS[name]
    folders = [straggling.SCENARIOS.parent / name]
    if scenario.remedy:
        folders.append(folders[0] / straggling.REMEDY)
        assert (folders[0] / "collectives.csv").is_file()
    for folder in folders:
        paths = sorted(folder.glob("rank*"))
        expected = [f"rank{rank}.json.gz" for rank in range(scenario.ranks)]
        assert [path.name for path in paths] == expected
        # One rank is read by the reader of traces. The table of truth is made of all.
        text = gzip.decompress(paths[-1].read_bytes()).decode()
        trace = parse_kineto(text, paths[-1].name)
        assert trace.rank == scenario.ranks - 1
        traced = iterations(trace)
        assert len(traced) == straggling.ITERATIONS
        posts = [
            sum(event.name == "c10d::allreduce_" for event in iteration.events)
            for iteration in traced
        ]
        assert set(posts) == {posts[0]} != {0}
        assert '"host_name"' not in text


def test_the_table_of_truth_is_that_of_the_traces(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Delays that are much longer than the noise lengthen the iterations that have them.

    Without ``--long`` the traces of every other scenario are read.
    """
    folder = straggling.SCENARIOS.parent
    columns = ["scenario", "recording", "even_iteration_s", "odd_iteration_s"]
    table = pd.read_csv(folder / "truth.csv")
    step = 1 if request.config.getoption("--long") else 2
    chosen = dict([*SCENARIOS.items()][::step])
    with monkeypatch.context() as patch:
        patch.setattr(straggling, "scenarios", lambda: chosen)
        truth = straggling.truth(folder)
    of_chosen = table[table["scenario"].isin(chosen)].reset_index(drop=True)
    assert set(of_chosen["scenario"]) == set(chosen)
    pd.testing.assert_frame_equal(truth[columns], of_chosen[columns])
    delayed = table[table["injected_s"] >= 0.02]
    assert len(delayed) > 5
    assert (delayed["odd_iteration_s"] > delayed["even_iteration_s"]).all()


@pytest.mark.parametrize("name", ["backward_last", "none"])
def test_what_is_recorded_of_a_judgement_is_what_explain_says(name: str) -> None:
    row = straggling_judged.judged_row(
        name, straggling_judged.scenarios()[name], straggling_judged.FOLDER / name
    )
    recorded = straggling_judged.judged().set_index("scenario").loc[name]
    for column, value in row.items():
        if column == "scenario":
            continue
        if value is None or value != value:
            assert pd.isna(recorded[column])
        elif isinstance(value, str):
            assert recorded[column] == value
        else:
            assert recorded[column] == pytest.approx(value, rel=1e-4)


def test_every_goal_has_its_statistic() -> None:
    goals = yaml.safe_load((places.DATA / "goals.yml").read_text())
    named = {goal["statistic"] for goal in goals["straggling_third"]}
    assert set(straggling_judged.statistics(straggling_judged.judged())) == named


def test_every_rank_with_a_large_delay_is_named_and_no_other() -> None:
    judged = straggling_judged.judged()
    assert set(judged["scenario"]) == set(SCENARIOS)
    delay_s = judged["odd_s"] - judged["even_s"]
    is_large = delay_s >= straggling_judged.LARGE * judged["odd_s"]
    is_named = judged["named_rank"].notna()
    is_right = judged["named_rank"] == judged["right_rank"]
    assert is_named[is_large & judged["right_rank"].notna()].all()
    assert is_right[is_named].all()
