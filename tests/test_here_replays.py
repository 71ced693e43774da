"""Replays on this machine are predicted from this machine's own layers and messages."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from ddlkit import store
from ddlkit.core.iteration import predict
from ddlkit.model import Calibration, make_plan
from workbook.common import source
from workbook.common.source import Source, open_source
from workbook.course.here import replays

LINK = "lab:1gbit"
WORKERS = 4


def with_longer_steps(directory: Path, factor: float, *, plans: list[str]) -> Source:
    """Layers, messages and some replays of the recording, the replays ``factor`` times as slow."""
    recording = open_source()
    for kind, name in (
        ("layers", "layers-googlenet-b4-r1"),
        ("collectives", "collectives-lab-p4-1gbit"),
        ("runs", "runs-replay-p4-1gbit"),
    ):
        (path,) = (path for path in recording._paths(kind) if path.stem == name)
        table = store.load_table(path, kind)
        if kind == "runs":
            table = table[table["plan"].isin(plans) & (table["network"] == "googlenet")]
            table = table.assign(iteration_s=factor * table["iteration_s"])
        store.save_table(table, directory, name, schema=kind, command=["test"])
    return Source((directory,))


def test_the_errors_of_the_recording_are_those_of_the_lesson() -> None:
    """Each plan, made again from its name, is predicted by the recursion of the lesson."""
    recording = open_source()
    errors = replays.signed_errors(recording, LINK, WORKERS)
    mine = errors[errors["network"] == "googlenet"].set_index("plan")["predicted_s"]
    calibration = Calibration.of(recording.table("collectives"), draws=0)
    cost = calibration.between(LINK, WORKERS).cost
    workload, runs = source.as_replayed(recording, "googlenet", LINK, WORKERS)
    assert {*mine.index} == {*runs["plan"]}
    for name in ("none", "ddp", "buffer:4MB"):
        plan = make_plan(name, workload, cost)
        assert mine[name] == pytest.approx(predict(workload, plan, cost).iteration_s)
    assert errors.loc[errors["error"].abs().idxmax(), "plan"] == "none"


def test_the_recording_compared_with_itself_has_one_median_error() -> None:
    recording = open_source()
    sentence, figure = replays.compare(recording, recording, LINK, WORKERS)
    median = replays.signed_errors(recording, LINK, WORKERS)["error"].abs().median()
    assert sentence.count(f"{median:.1%}") == 2 and isinstance(figure, Figure)


@pytest.mark.parametrize("link", [LINK, "lab:unknown"])
def test_without_replays_it_says_how_to_measure(link: str) -> None:
    sentence, figure = replays.compare(open_source(), Source(()), link, WORKERS)
    assert figure is None and "./reproduce.sh" in sentence and link in sentence


def test_a_table_without_layers_or_messages_is_no_replay(tmp_path: Path) -> None:
    here = with_longer_steps(tmp_path, 1.0, plans=["ddp"])
    assert len(replays.signed_errors(here, LINK, WORKERS)) == 1
    assert replays.signed_errors(here, "lab:unknown", WORKERS).empty
    for layers in tmp_path.glob("layers-*"):
        layers.unlink()
    assert replays.signed_errors(here, LINK, WORKERS).empty


def test_steps_twice_as_long_are_predicted_half_as_long(tmp_path: Path) -> None:
    plans = ["ddp", "buffer:4MB", "none"]
    here = with_longer_steps(tmp_path, 2.0, plans=plans)
    errors = replays.signed_errors(here, LINK, WORKERS).set_index("plan")["error"]
    recorded = replays.signed_errors(open_source(), LINK, WORKERS)
    recorded = recorded[recorded["network"] == "googlenet"].set_index("plan")
    expected: pd.Series = (1 + recorded["error"][plans]) / 2 - 1
    assert errors[plans].to_numpy() == pytest.approx(expected.to_numpy())
    sentence, figure = replays.compare(open_source(), here, LINK, WORKERS)
    assert "3 plans of 1 network " in sentence and "GoogLeNet with the plan" in sentence
    assert figure is not None
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[0] == "none" and len(names) == 3  # most messages first
