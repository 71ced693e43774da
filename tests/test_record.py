"""Recording: whatever goes wrong, what was measured stays valid and the rest is listed."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import faulty_points
from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.jobs import vitals
from ddlkit.measure import session as sessions
from ddlkit.measure.session import Point, PointList, Tables, engine
from ddlkit.measure.session.engine import run_session
from ddlkit.store import machine
from faulty_points import FAULTS, fine, point
from workbook.record import grammar, recording
from workbook.record.recording import record


def valid_tables(out: Path) -> dict[str, str]:
    paths = sorted(out.glob("*.csv*"))
    for path in paths:
        store.load_table(path)
    return {path.name: store.sha256_file(path) for path in paths}


def work(
    points: PointList, out: Path, budget_s: float = math.inf, strict: bool = False
) -> dict[str, sessions.Row]:
    """What became of each point of a recording that is made in this process."""
    deadline_s = engine.time.monotonic() + budget_s  # type: ignore[attr-defined]
    worker = engine._Worker(
        lambda out, session: points, out, sessions.Origin(machine={"name": "here"})
    )
    session = engine._Session(
        worker, budget_s, deadline_s, True, False, lambda: None, strict=strict
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gc.collect", lambda: 0
        )  # a third of a second, in a process of tests
        session.measure_all(worker)
    return session.rows


# -- points --------------------------------------------------------------------------------------


@pytest.mark.fault(
    fault="memory is used up",
    injected="a petabyte asked of torch and of NumPy, among other failures of single points",
    holds="the point is recorded as out of memory; all others are measured",
)
def test_a_fault_is_an_outcome_of_its_point_alone(tmp_path: Path) -> None:
    rows = work(faulty_points.faults(tmp_path, 1), tmp_path)
    ends = {
        name: (rows[f"test/{name}"].outcome, rows[f"test/{name}"].reason)
        for name in FAULTS
    }
    assert ends["torch-memory"][0] == ends["numpy-memory"][0] == sessions.OUT_OF_MEMORY
    assert ends["numpy-memory"][1].startswith("Unable to allocate")
    assert ends["lacking"] == (sessions.UNAVAILABLE, "needs 2 GPUs, here are 0")
    assert ends["half"] == (sessions.PARTIAL, "out of memory: the other half")
    assert ends["bug"] == (sessions.FAILED, "KeyError: 'drift'")
    assert ends["wrong-rows"][0] == sessions.FAILED
    assert "must be above zero" in ends["wrong-rows"][1]
    assert ends["nothing"] == (sessions.FAILED, "the measurement left no table 'drift'")
    # All others are there, whole; of the faulty ones only what the half one had.
    assert {rows[f"test/after-{name}"].outcome for name in FAULTS} == {
        sessions.MEASURED
    }
    there = {
        name.removeprefix("drift-").removesuffix(".csv")
        for name in valid_tables(tmp_path)
    }
    assert there - {"outcomes"} == {
        "half",
        "s1-start",
        "s1-end",
        *(f"after-{n}" for n in FAULTS),
    }


def test_what_is_there_is_not_measured_again_and_what_failed_comes_last(
    tmp_path: Path,
) -> None:
    order: list[str] = []

    def noted(name: str, fails: str = "") -> Point:
        def measure() -> Any:
            order.append(name)
            return {} if name == fails else faulty_points.drift(name)

        return point(name, measure)

    plan = PointList(
        [noted(name, "b") for name in "abc"], [noted("open")], [noted("close")]
    )
    work(plan, tmp_path)
    assert order == ["open", "a", "b", "c", "close"]
    hashes = valid_tables(tmp_path)
    order.clear()
    again = [noted(name) for name in "abcd"]
    rows = work(PointList(again, [noted("open2")], [noted("close2")]), tmp_path)
    assert order == ["open2", "d", "b", "close2"]
    assert rows["test/a"].outcome == sessions.MEASURED
    hashes.pop("outcomes.csv")
    assert hashes.items() <= valid_tables(tmp_path).items()
    order.clear()
    lacking = point("lacking", FAULTS["lacking"], 0.0)
    rows = work(
        PointList([*again, lacking], [noted("open3")], [noted("close3")]), tmp_path
    )
    assert not order, "nothing can be measured, so nothing is opened or closed either"
    assert [row.point for row in rows.values()] == [*"abcd", "lacking"]


@pytest.mark.parametrize("fault", [*FAULTS, "no-time"])
def test_a_strict_recording_fails_if_one_of_its_points_fails(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = fine(fault, estimate_s=1e6)
    if fault in FAULTS:
        faulty = point(fault, FAULTS[fault])
    points = PointList([fine("first"), faulty, fine("last")])
    if fault in ("lacking", "no-time"):
        assert len(work(points, tmp_path, 1e3, strict=True)) == 3
    else:
        with pytest.raises(UserError, match=f"^test/{fault}: "):
            work(points, tmp_path, 1e3, strict=True)
    # The other points are measured all the same.
    rows = work(points, tmp_path, 1e3)
    ends = [rows[f"test/{name}"].outcome for name in ("first", "last")]
    assert ends == 2 * [sessions.MEASURED]


def test_closing_points_have_time_set_aside_twice_and_the_overtime(
    tmp_path: Path,
) -> None:
    now_s = [0.0]  # a clock that stands still but for what points take

    def late() -> Tables:
        now_s[0] += 75.0
        return faulty_points.drift("late")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        plan = PointList(
            [fine("d", 150.0), fine("e", 50.0)], closing=[fine("close", 200.0)]
        )
        rows = work(plan, tmp_path, 500.0)
        ends = [
            fine("end", engine.OVERTIME_S - 15.5),
            fine("over", engine.OVERTIME_S - 14.5),
        ]
        rows |= work(
            PointList([point("late", late, 10.0)], closing=ends), tmp_path, 60.0
        )
    measured = {row.point for row in rows.values() if row.outcome == sessions.MEASURED}
    assert measured == {"e", "close", "late", "end"}
    assert {row.outcome for row in rows.values()} == {
        sessions.MEASURED,
        sessions.NO_TIME,
    }


def test_the_budget_that_is_advised_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Be it in the error, or in a line of a session that could measure other points."""
    long = fine("long", 30.0)
    nothing_else, with_closing = (
        PointList([long], closing=closing) for closing in ([], [fine("close", 3.0)])
    )
    with pytest.raises(UserError, match="nothing could be measured") as refused:
        work(nothing_else, tmp_path / "alone", 20.0)
    work(with_closing, tmp_path / "closing", 20.0)
    printed = capsys.readouterr().err
    for points, name, text in (
        (nothing_else, "alone", str(refused.value)),
        (with_closing, "closing", printed),
    ):
        advised = re.search(r"--budget (\d+)s", text)
        assert advised
        assert "the longest of those missing, test/long" in text
        rows = work(points, tmp_path / name, float(advised[1]))
        assert {row.outcome for row in rows.values()} == {sessions.MEASURED}


def test_the_time_left_and_the_time_kept_add_up_to_the_budget(tmp_path: Path) -> None:
    """A point that is left out says both, as the lines of progress count them together."""
    points = PointList([fine("long", 30.0)], closing=[fine("close", 3.0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: 0.0))
        for budget_s in (20.0, 4.0):
            rows = work(points, tmp_path / str(budget_s), budget_s)
            reason = rows["test/long"].reason
            seconds = [int(number) for number in re.findall(r"(\d+) s\b", reason)]
            assert seconds[0] == 30 and sum(seconds[1:]) == budget_s


def test_after_a_failed_capture_no_more_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch does not leave the stream of a capture that fails; its random numbers then fail for good."""
    streams = ["null"]
    does = {"is_initialized": True, "synchronize": None, "empty_cache": None}
    for name, answer in {**does, "default_stream": "null"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch, "rand", lambda size, device: None)
    assert engine._gpu_is_usable()
    streams.append("of the capture")
    assert not engine._gpu_is_usable()


# -- suites --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_point_has_a_place_of_its_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    own = ("cpu",) if device == "cpu" else ("gpu", "gpu-long")
    for name in (*own, "smoke", "quick", "full"):
        points = grammar.points(out=Path(), session=1, name=name, device=device)
        everything = [point for section in points for point in section]
        tables = [(point, schema) for point in everything for schema in point.schemas]
        places = {
            (point.path(Path(), schema), point.moment) for point, schema in tables
        }
        assert len(places) == len({(point.key, schema) for point, schema in tables})
        assert {schema for _, schema in tables} <= set(store.SCHEMAS)
        assert all(0 <= point.estimate_s < 600 for point in everything)
        drifts = [point.name for point in (*points.opening, *points.closing)]
        assert drifts == ([] if name in ("quick", "full") else ["s1-start", "s1-end"])


# -- whole runs ----------------------------------------------------------------------------------


@pytest.mark.fault(
    fault="the process that measures is killed, or hangs",
    injected="SIGKILL to itself in one point, a minute's sleep in another",
    holds="each costs its own point; another process goes on",
)
def test_a_process_that_dies_or_hangs_costs_one_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(engine, "HUNG_S", 2.0)
    listed = (
        {
            "model": "NVIDIA H200",
            "driver": "",
            "memory_bytes": 1,
            "compute_capability": "",
        },
    )
    monkeypatch.setattr(machine, "_gpus", lambda: listed)
    monkeypatch.setattr(sessions, "this_machine", machine.describe)
    assert machine.name() == "nvidia-h200"
    run_session(faulty_points.deadly, tmp_path, isolate=True)
    table = store.load_table(tmp_path / "outcomes.csv", "outcomes").set_index("point")
    measured = dict.fromkeys(("first", "blind", "s1-end"), sessions.MEASURED)
    killed = dict.fromkeys(("killed", "hung"), sessions.KILLED)
    assert table["outcome"].to_dict() == {**measured, **killed}
    assert table["reason"]["killed"].endswith("was killed by SIGKILL")
    assert table["reason"]["hung"] == "did not end within 2 s"
    stamps = [store.load_stamp(tmp_path / name) for name in valid_tables(tmp_path)]
    names = {stamp["machine"]["name"] for stamp in stamps}
    assert names == {machine.name("cpu")} and names != {machine.name()}
    default = recording._default_out(grammar.read("cpu"), "cpu").name
    assert re.fullmatch(r"cpu-\d+x-.*-suite", default)
    assert recording._default_out(grammar.read("gpu"), "cuda").name == "nvidia-h200"


def test_an_ignored_load_is_in_stamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, pair = "gpu0 is in use by others", faulty_points.pair
    monkeypatch.setattr(vitals, "gpu_in_use", lambda: busy)
    with pytest.raises(
        UserError, match=f"^nothing is measured: {busy}; wait, .* --ignore-load$"
    ):
        run_session(pair, tmp_path, gpu=True)
    assert not valid_tables(tmp_path)
    run_session(pair, tmp_path, gpu=True, ignore_load=True)
    names = [*valid_tables(tmp_path)]
    assert {store.load_stamp(tmp_path / name)["remark"] for name in names} == {busy}


@pytest.mark.fault(
    fault="two measuring runs into one directory",
    injected="the lock of the directory is held",
    holds="the second is refused and names the first's process",
)
def test_another_machines_recording_and_another_writer_are_refused(
    tmp_path: Path,
) -> None:
    row = {"what": "a", "point": "b", "outcome": "measured", "reason": ""}
    frame = pd.DataFrame([{**row, "estimate_s": 1.0, "seconds": 1.0}])
    sessions.Origin(machine={"name": "other"}).save(
        tmp_path / "outcomes.csv", frame, "outcomes"
    )
    with pytest.raises(
        UserError, match="holds a recording of other, this is .*: choose another"
    ):
        record("cpu", out=tmp_path)
    with (
        store.lock(tmp_path / ".lock"),
        pytest.raises(UserError, match=f"is held by process {os.getpid()}"),
    ):
        record("cpu", out=tmp_path)
