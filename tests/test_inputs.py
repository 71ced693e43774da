"""Pictures from disk: what is cold, what a loader gives, and the graph's word on training that reads them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.formats.inputs import read_inputs
from ddlkit.papers.dag import naive_iteration_s
from ddlkit.papers.dag.tasks import schedule
from ddlkit.report.figures import dag_inputs
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import Loopback, launch
from ddlkit.run.measure import inputs, pipelines
from ddlkit.run.measure.copies import evict
from ddlkit.run.measure.pipelines import Case, PipelineSettings, pipeline_job
from ddlkit.run.sessions.session import Unavailable

SHAPE = inputs.Shape(80, 60)
BRIEF = Budget(warmup=0, min_repeats=2, max_repeats=2, max_s=0.01)


@pytest.mark.parametrize("stored", inputs.STORED)
def test_a_loader_gives_the_same_batches_with_and_without_workers(
    stored: str, tmp_path: Path
) -> None:
    data = inputs.Stored(tmp_path, stored, SHAPE, 32, 6, cold=inputs.can_be_cold())
    assert len(data) == 6
    alone, ahead = (list(inputs.loader(data, 2, 4, workers)) for workers in (0, 1))
    assert len(alone) == len(ahead) == 4
    for (mine, _), (theirs, _) in zip(alone, ahead, strict=True):
        assert mine.shape == (2, 3, 32, 32) and mine.dtype == torch.float32
        assert torch.equal(mine, theirs)


def test_what_is_stored_raw_is_what_a_picture_is_and_jpeg_is_near_it(tmp_path: Path) -> None:
    """At its full size nothing is cropped or shrunk; chroma is coarser in a JPEG, so greys are compared."""
    shape = inputs.Shape(48, 48, quality=95)
    both = [inputs.Stored(tmp_path, how, shape, 48, 1, cold=False) for how in ("raw", "jpeg")]
    raw, jpeg = (data[0][0].numpy() for data in both)
    picture = inputs.drawn(shape, 1)[0]
    assert np.array_equal(raw, picture.transpose(2, 0, 1).astype(np.float32) / 64 - 2)
    assert np.corrcoef(raw.mean(axis=0).ravel(), jpeg.mean(axis=0).ravel())[0, 1] > 0.98


def test_a_cold_read_is_one_of_the_disk_and_a_cached_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "one"
    content = os.urandom(300_000)
    inputs.write(path, content)
    try:
        with open(path, "r+b", buffering=0) as file:
            evict(file)
    except Unavailable as reason:
        pytest.skip(str(reason))
    read = []
    for _ in range(3):  # the second and third find what the one before left
        before = inputs.disk_bytes()
        assert inputs.read(path, cold=False) == content
        read.append(inputs.disk_bytes() - before)
    assert read[0] >= len(content) and read[1:] == [0, 0]
    for _ in range(2):
        before = inputs.disk_bytes()
        assert inputs.read(path, cold=True) == content
        read.append(inputs.disk_bytes() - before)
    assert read[3] == 0 and read[4] >= len(content)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 12))
def test_who_prepares_has_a_core_of_its_own_where_there_are_two_for_each_rank(
    ranks: int, there: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(there)), raising=False)
        found = [pipelines.cores(rank, ranks) for rank in range(ranks)]
    if there >= 2 * ranks:
        assert len({core for pair in found for core in pair}) == 2 * ranks
    else:
        assert all(trains == prepares for trains, prepares in found)


def test_each_part_is_measured_and_fits_its_table(tmp_path: Path) -> None:
    asked = inputs.Alone(SHAPE, batch=2, side=32)
    found = inputs.measure_inputs("cpu", tmp_path, asked, BRIEF)["inputs"]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # no pictures stay
    store.save_table(found, tmp_path, "inputs-alone-cpu", schema="inputs", command=[])
    reading = found[found["quantity"] == "read"]
    assert set(found["quantity"]) == {"read", "decode"} and set(reading["how"]) == {"cold files"}
    assert (reading["from_disk"] >= 1).all()
    path = tmp_path / "inputs-alone-cpu.csv"
    once, twice = read_inputs(path, 2), read_inputs(path, 4)
    assert {name: 2 * one for name, one in once.items()} == pytest.approx(twice)
    assert set(once) == {"io_s", "decode_s"}


# ---------------------------------------------------------------- training


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that train on pictures for a moment: every table, as a session leaves them."""
    out = tmp_path_factory.mktemp("input")
    settings = PipelineSettings("lenet5", 2, str(out), SHAPE, 1, 2, BRIEF)
    tables = launch(pipeline_job, settings, ranks=2, place=Loopback(), join={"torch_threads": 1})
    for name, frame in tables.items():
        store.save_table(frame, out, f"{name}-toy", schema=name, command=[])
    return out


def test_all_cases_are_run_and_predicted(place: Path) -> None:
    found = dag_inputs.parts(place)
    (toy,) = found.values()
    ran = toy.runs[["stored", "ahead", "sends"]].drop_duplicates()
    assert [Case(*row) for row in ran.itertuples(index=False)] == pipelines.cases(2)
    assert (toy.runs.groupby(["stored", "ahead", "sends"]).size() == 2).all()
    table = dag_inputs.predictions(found)
    assert len(table) == 8 and toy.runs["from_disk"].ge(pipelines.LEAST).all()
    off = (table["predicted_s"] / table["measured_s"] - 1).to_numpy()
    assert table["error"].to_numpy() == pytest.approx(off)


def test_a_prediction_is_a_sum_where_nothing_is_hidden_and_never_more(place: Path) -> None:
    """One disk for both ranks: the second waits for the first; all else is one after the other."""
    (toy,) = dag_inputs.parts(place).values()

    def predicted_s(*case: Any) -> float:
        return dag_inputs.steady_s(schedule(toy.graph(*case)))

    for stored in inputs.STORED:
        whole_s = naive_iteration_s(toy.times(stored)) + toy.input_s("decode", stored, toy.ranks)
        sum_s, io_s = predicted_s(stored, 0, "after"), toy.input_s("read", stored, 1)
        assert whole_s <= sum_s * (1 + 1e-9) <= (whole_s + io_s) * (1 + 2e-9)
        for how in ((0, "during"), (2, "after"), (2, "during")):
            assert predicted_s(stored, *how) <= sum_s * (1 + 2e-9)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: inputs.Shape(0, 5), "pictures of 0 x 5 at quality 90: use sides of at least 1"),
        (lambda _: inputs.Shape(quality=100), "quality 100: use sides of at least 1 and a quality"),
        (lambda _: inputs.Alone(batch=0), "batches of 0 pictures of side 224: both"),
        (lambda _: PipelineSettings("x", 0, "."), "of 0 pictures: needs at least one of each"),
        (
            lambda at: inputs.Stored(at, "png", SHAPE, 32, 1, cold=False),
            "pictures stored as 'png': use one of jpeg, raw",
        ),
        (
            lambda at: inputs.Stored(at, "raw", SHAPE, 64, 1, cold=False),
            "pictures of 80 x 60: too small to crop 64 x 64 of: store larger ones",
        ),
        (
            lambda at: inputs.Stored(at / "no", "raw", SHAPE, 32, 1, cold=False),
            "No such file or directory: choose another --out",
        ),
        (lambda at: dag_inputs.parts(at), "no training with pictures in"),
    ],
)
def test_a_mistake_is_one_line(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as told:
        make(tmp_path)
    assert "\n" not in str(told.value)


def test_a_table_without_what_is_asked_for_is_told(place: Path, tmp_path: Path) -> None:
    (toy,) = dag_inputs.parts(place).values()
    with pytest.raises(UserError, match="no decode of jpeg by 3 ranks: measure input again"):
        toy.input_s("decode", "jpeg", 3)
    loads = pd.DataFrame(
        inputs.input_rows("load", "1 workers", np.ones(2), batch=1, stored="jpeg", n_bytes=9)
    )
    store.save_table(loads, tmp_path, "inputs-x", schema="inputs", command=[])
    with pytest.raises(UserError, match="tells of no reading, decoding or copying"):
        read_inputs(tmp_path / "inputs-x.csv", 1)
    with (
        pytest.raises(UserError, match="no measured input in"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(store, "RECORDED", tmp_path)
        dag_inputs.recorded()


def test_without_pillow_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(Unavailable, match="no Pillow, so no JPEG: pip install pillow"):
        inputs.pillow()


def test_a_network_of_words_is_refused(tmp_path: Path) -> None:
    settings = PipelineSettings("lstm_ptb", 1, str(tmp_path), SHAPE, 1, 1, BRIEF)
    with pytest.raises(
        UserError, match="lstm_ptb takes no pictures with a label each: choose another"
    ):
        launch(pipeline_job, settings, ranks=1, place=Loopback(), join={"torch_threads": 1})
