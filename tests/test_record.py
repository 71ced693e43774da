"""Recording: whatever goes wrong, what was measured stays valid and the rest is listed."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import faulty_points
from ddlkit import machine, store
from ddlkit.core.errors import UserError
from ddlkit.report.source import Source as Reader
from ddlkit.run import vitals
from ddlkit.run.sessions import engine, grammar, suites
from ddlkit.run.sessions import session as outcomes
from ddlkit.run.sessions.engine import measure, run_session
from ddlkit.run.sessions.session import Point, PointList, Source, Tables
from faulty_points import FAULTS, fine
from places import PATIENCE_S, ROOT, alive, family, wait_for

TESTS = Path(__file__).parent


@pytest.fixture
def with_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that measure find the plans of these tests."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def outcomes_in(out: Path) -> dict[str, str]:
    table = store.load_table(out / "outcomes.csv", "outcomes")
    return dict(zip(table["what"] + "/" + table["point"], table["outcome"], strict=True))


def valid_tables(out: Path) -> dict[str, str]:
    """Every table in there, loaded and checked, with its hash."""
    paths = sorted(out.glob("*.csv*"))
    for path in paths:
        store.load_table(path)
    return {path.name: store.sha256_file(path) for path in paths}


# -- in this process ---------------------------------------------------------------------------


def work(points: PointList, out: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """What became of each point, as the loop reports it."""
    events: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        # A third of a second at each point, in a process of tests.
        patch.setattr("gc.collect", lambda: 0)
        assert outcomes.measure_points(points, out, events.append, **options)
    rows = [*events[0]["rows"], *(event["row"] for event in events[1:])]
    return {f"{row['what']}/{row['point']}": row for row in rows}


def record(points: str, out: Path, budget_s: float = math.inf) -> Path:
    source = Source(f"faulty_points:{points}")
    return run_session(source, out, budget_s=budget_s, isolate=True)


@pytest.mark.fault(
    fault="memory is used up",
    injected="a petabyte asked of torch and of NumPy, among other failures of single points",
    holds="the point is recorded as out of memory; all others are measured",
)
def test_a_fault_is_an_outcome_of_its_point_alone(tmp_path: Path) -> None:
    found = work(faulty_points.faults(tmp_path, 1), tmp_path)
    told = {
        name: (found[f"test/{name}"]["outcome"], found[f"test/{name}"]["reason"]) for name in FAULTS
    }
    for name, start in {
        "torch-memory": "",
        "numpy-memory": "Unable to allocate",
        "profile-memory": "out of memory: lenet5 at batch 1000000000000 on cpu",
    }.items():
        assert told[name][0] == outcomes.OUT_OF_MEMORY
        assert told[name][1].startswith(start)
    assert told["lacking"] == (outcomes.UNAVAILABLE, "needs 2 GPUs, here are 0")
    assert told["half"] == (outcomes.PARTIAL, "out of memory: the other half")
    assert told["compile"][0] == told["bug"][0] == told["wrong-rows"][0] == outcomes.FAILED
    assert told["compile"][1].startswith("CUDA source does not compile: ddlkit.cu(7)")
    assert told["bug"][1] == "KeyError: 'drift'"
    assert "must be above zero" in told["wrong-rows"][1]
    assert told["nothing"] == (outcomes.FAILED, "it left no table 'drift'")
    # All others are there, whole; of the faulty ones only what the half one had.
    assert {found[f"test/after-{name}"]["outcome"] for name in FAULTS} == {outcomes.MEASURED}
    there = {name.removeprefix("drift-").removesuffix(".csv") for name in valid_tables(tmp_path)}
    assert there == {"half", "s1-start", "s1-end", *(f"after-{name}" for name in FAULTS)}


def test_what_is_there_is_not_measured_again_and_what_failed_comes_last(tmp_path: Path) -> None:
    order: list[str] = []

    def noted(name: str) -> Point:
        def measure() -> Any:
            order.append(name)
            return faulty_points.drift(name)

        return faulty_points.point(name, measure)

    plan = PointList([noted(name) for name in "abcd"], [noted("open")], [noted("close")])
    work(plan, tmp_path, skip=["test/b", "test/d"])
    assert order == ["open", "a", "c", "close"]
    hashes = valid_tables(tmp_path)
    order.clear()
    plan = PointList(plan.body, [noted("open2")], [noted("close2")])
    found = work(plan, tmp_path, last=["test/b"])
    assert order == ["open2", "d", "b", "close2"]
    assert found["test/a"]["outcome"] == outcomes.MEASURED
    assert hashes.items() <= valid_tables(tmp_path).items()
    order.clear()
    lacking = faulty_points.point("lacking", FAULTS["lacking"], 0.0)
    events: list[dict[str, Any]] = []
    plan = PointList([*plan.body, lacking], plan.opening, plan.closing)
    outcomes.measure_points(plan, tmp_path, events.append)
    assert not order, "nothing can be measured, so nothing is opened or closed either"
    assert [row["point"] for row in events[0]["rows"]] == [*"abcd", "lacking"]


def test_what_does_not_fit_into_the_budget_makes_room_for_what_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "time", Clock())
    body = [fine("a", 50.0), fine("b", 5000.0), fine("c", 50.0)]
    plan = PointList(body, closing=[fine("close", 200.0)])
    found = work(plan, tmp_path, deadline_s=600)
    assert {key: event["outcome"] for key, event in found.items()} == {
        "test/a": outcomes.MEASURED,
        "test/b": outcomes.NO_TIME,
        "test/c": outcomes.MEASURED,
        "test/close": outcomes.MEASURED,
    }
    # Twice the time for the last is set aside: of 500 s, 400 are not for one more of 150.
    plan = PointList([fine("d", 150.0)], closing=[fine("close2", 200.0)])
    found = work(plan, tmp_path, deadline_s=500)
    assert found["test/d"]["outcome"] == outcomes.NO_TIME
    assert found["test/close2"]["outcome"] == outcomes.MEASURED


class Clock:
    """A clock that stands still but for what points take."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def point(self, name: str, estimate_s: float, seconds: float) -> Point:
        def measure() -> Tables:
            self.now_s += seconds
            return {}

        return Point("test", name, measure, estimate_s, is_done=lambda: False)


@settings(max_examples=20, deadline=None)
@given(taken_s=st.floats(0.0, 120.0), closing_s=st.floats(0.1, 5.0))
@example(taken_s=65.0, closing_s=1.0)
def test_a_point_that_takes_too_long_costs_none_of_the_closing_ones(
    taken_s: float, closing_s: float
) -> None:
    """Up to the time at which the process is ended, less what they may be expected to take."""
    clock = Clock()
    body = [clock.point("a", 30.0, taken_s)]
    closing = [clock.point(name, closing_s, closing_s) for name in ("drift", "efficiency")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outcomes, "time", clock)
        found = work(PointList(body, closing=closing), Path(), deadline_s=60.0)
        end_s = 60.0 + outcomes.OVERTIME_S
    if taken_s + 2 * closing_s <= end_s:
        assert {row["outcome"] for row in found.values()} == {outcomes.MEASURED}
    assert clock.now_s <= max(end_s, taken_s)


def test_a_process_in_which_a_graph_could_not_be_captured_measures_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch does not leave the stream of a capture that fails; its random numbers then fail for good."""
    streams = ["null"]
    played = SimpleNamespace(
        synchronize=lambda: None,
        empty_cache=lambda: None,
        mem_get_info=lambda: (1, 1),
        memory_reserved=lambda: 0,
        current_stream=lambda: streams[-1],
        default_stream=lambda: "null",
    )
    monkeypatch.setattr(outcomes, "_cuda", lambda: played)

    def captured() -> Tables:
        streams.append("of the capture")
        return faulty_points.drift("b")

    points = PointList([fine("a"), faulty_points.point("b", captured), fine("c")])
    assert not outcomes.measure_points(points, tmp_path, lambda event: None)
    assert set(valid_tables(tmp_path)) == {"drift-a.csv", "drift-b.csv"}


# -- plans -------------------------------------------------------------------------------------


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of a GPU can be made here, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_point_has_a_place_of_its_own(device: str, any_device: None) -> None:
    for name in ("cpu" if device == "cpu" else "gpu", "smoke", "quick", "full"):
        points = suites.points(out=Path(), session=1, name=name, device=device)
        everything = [*points.opening, *points.body, *points.closing]
        assert len({point.key for point in everything}) == len(everything)
        tables = [(point, schema) for point in everything for schema in point.schemas]
        places = {(point.path(Path(), schema), point.moment) for point, schema in tables}
        assert len(places) == len(tables)
        assert {schema for _, schema in tables} <= set(store.SCHEMAS)
        assert all(0 <= point.estimate_s < 600 for point in everything)


def code_paths(name: str, device: str) -> set[tuple[str, str, str]]:
    """(kind, link, precision) of all that a suite measures on a device."""
    suite = grammar.read(name)
    return {
        (one["measure"], one.get("link", ""), precision)
        for one in (*suite.opening, *suite.points, *suite.closing)
        if one.get("device", "") in ("", device)
        for precision in (one.get("precisions") or one.get("sides") or ["fp32"])
    }


@pytest.mark.parametrize(("name", "device"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_smoke_takes_every_path_that_the_long_suite_will_take(name: str, device: str) -> None:
    """Alone points too: what is first met in the standard run is met too late."""
    assert code_paths(name, device) <= code_paths("smoke", device)


def test_eight_minutes_on_a_gpu_hold_what_matters_most(any_device: None) -> None:
    body = suites.points(out=Path(), session=1, name="gpu").body
    ends_s: dict[str, float] = {}
    spent_s = 0.0
    for point in body:
        spent_s += point.estimate_s
        ends_s[point.key] = spent_s
    first = [
        f"layers/{name}-{p}"
        for p in ("fp32", "bf16")
        for name in ("resnet50-b32", "resnet101-b32", "vgg16-b32", "alexnet-b128")
    ]
    assert max(ends_s[key] for key in first) < 90
    for what in ("selection/", "contention/", "copies/"):
        assert max(end_s for key, end_s in ends_s.items() if key.startswith(what)) < 400


# -- whole runs --------------------------------------------------------------------------------


@pytest.mark.fault(
    fault="the process that measures is killed, or hangs",
    injected="SIGKILL to itself in one point, a minute's sleep in another",
    holds="each costs its own point; another process goes on",
)
def test_a_process_that_dies_or_hangs_costs_one_point(
    tmp_path: Path, with_tests: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "HUNG_S", 3.0)
    record("deadly", tmp_path)
    table = store.load_table(tmp_path / "outcomes.csv", "outcomes").set_index("point")
    assert table["outcome"].to_dict() == {
        "first": outcomes.MEASURED,
        "killed": outcomes.KILLED,
        "next": outcomes.MEASURED,
        "hung": outcomes.KILLED,
        "s1-end": outcomes.MEASURED,
    }
    assert table["reason"]["killed"].endswith("was killed by SIGKILL")
    assert table["reason"]["hung"] == "did not end within 3 s"
    valid_tables(tmp_path)


SCRIPT = """
import signal, sys
from pathlib import Path
from ddlkit.run.sessions.engine import run_session
from ddlkit.run.sessions.session import Source
signal.signal(signal.SIGINT, signal.default_int_handler)
run_session(Source("faulty_points:long"), Path(sys.argv[1]), isolate=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.fault(
    fault="a recording is killed",
    injected="SIGKILL and SIGINT to the engine while its child measures",
    holds="the child dies with it; the next run keeps what is there and goes on",
)
def test_a_run_that_is_killed_leaves_nothing_behind_and_goes_on_later(
    tmp_path: Path, with_tests: None, number: signal.Signals
) -> None:
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert wait_for(lambda: (tmp_path / "outcomes.csv").exists())
        assert wait_for(lambda: outcomes_in(tmp_path)["test/slow"] == outcomes.STARTED)
        children: list[psutil.Process] = family(parent.pid)
        assert children
        parent.send_signal(number)
        assert parent.wait(PATIENCE_S) != 0
        assert wait_for(lambda: not alive(children)), "the measuring process outlived its parent"
    finally:
        parent.kill()
    hashes = valid_tables(tmp_path)
    assert outcomes_in(tmp_path)["test/first"] == outcomes.MEASURED
    if number == signal.SIGINT:  # it was not the point's fault: it need not wait next time
        assert outcomes_in(tmp_path)["test/slow"] == outcomes.PENDING
        return
    record("long", tmp_path, budget_s=200.0)
    assert outcomes_in(tmp_path) == {
        "test/first": outcomes.MEASURED,
        "test/last": outcomes.MEASURED,
        "test/slow": outcomes.NO_TIME,
    }
    assert valid_tables(tmp_path)["drift-first.csv"] == hashes["drift-first.csv"]


def test_a_process_that_cannot_start_after_another_died_is_tried_again(
    tmp_path: Path, with_tests: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PAUSE_S", 0.0)
    record("recovering", tmp_path)
    table = store.load_table(tmp_path / "outcomes.csv", "outcomes").set_index("point")
    assert table["outcome"].to_dict() == {"killed": outcomes.KILLED, "next": outcomes.MEASURED}
    assert len((tmp_path / "starts").read_text()) == 4
    (tmp_path / "drift-next.csv").unlink()
    with pytest.raises(UserError, match="^the GPU is not back yet$"):
        record("recovering", tmp_path)


@pytest.mark.skipif(bool(machine.describe()["gpus"]), reason="there is a GPU")
def test_no_gpu_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^no GPU here: .*use --suite cpu$"):
        measure("gpu", out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_load_that_is_ignored_is_told_in_every_stamp(
    tmp_path: Path,
    with_tests: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    busy = "gpu0 is in use by others"
    monkeypatch.setattr(vitals, "gpu_in_use", lambda: busy)
    how: dict[str, Any] = {"isolate": True, "gpu": True}
    with pytest.raises(UserError, match=f"^nothing is measured: {busy}; wait, .* --ignore-load$"):
        run_session(Source("faulty_points:pair"), tmp_path, **how)
    assert not valid_tables(tmp_path)
    run_session(Source("faulty_points:pair"), tmp_path, ignore_load=True, **how)
    assert f"{busy}; measured all the same" in capsys.readouterr().err
    names = [*valid_tables(tmp_path)]
    assert {store.load_stamp(tmp_path / name)["remark"] for name in names} == {busy}
    assert Reader((tmp_path,)).label("drift").endswith(f" ({busy})")
    # Afterwards the GPU is free: what is there stays what it was.
    monkeypatch.setattr(vitals, "gpu_in_use", lambda: "")
    (tmp_path / "drift-b.csv").unlink()
    run_session(Source("faulty_points:pair"), tmp_path, **how)
    assert set(outcomes_in(tmp_path).values()) == {outcomes.MEASURED}
    assert store.load_stamp(tmp_path / "drift-b.csv")["remark"] == ""


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver lists a GPU."""
    found = ({"model": "NVIDIA H200", "driver": "", "memory_bytes": 1, "compute_capability": ""},)
    monkeypatch.setattr(machine, "_gpus", lambda: found)
    outcomes.this_machine.cache_clear()
    monkeypatch.setattr(outcomes, "this_machine", machine.describe)


def test_a_suite_for_the_processor_has_its_name_and_sees_no_gpu(
    tmp_path: Path, with_tests: None, a_gpu: None
) -> None:
    assert machine.name() == "nvidia-h200"
    found = grammar.read("cpu")
    assert re.fullmatch(r"cpu-\d+x-.*-suite", engine._default_out(found, "cpu").name)
    assert engine._default_out(grammar.read("gpu"), "cuda").name == "nvidia-h200"
    for _ in range(2):  # the second finds its own recording there
        record("blind", tmp_path)
    assert outcomes_in(tmp_path) == {"test/blind": outcomes.MEASURED}
    names = {
        store.load_stamp(tmp_path / name)["machine"]["name"] for name in valid_tables(tmp_path)
    }
    assert names == {machine.name("cpu")} and names != {machine.name()}


def test_another_machines_recording_and_another_writer_are_refused(tmp_path: Path) -> None:
    row = {"what": "a", "point": "b", "outcome": "measured", "reason": ""}
    frame = pd.DataFrame([{**row, "estimate_s": 1.0, "seconds": 1.0}])
    store.save_table(
        frame, tmp_path, "outcomes", schema="outcomes", command=[], machine={"name": "another"}
    )
    with pytest.raises(UserError, match="holds a recording of another, this is .*: choose another"):
        measure("cpu", out=tmp_path)
    with (
        store.lock(tmp_path / ".lock"),
        pytest.raises(UserError, match=f"is held by process {os.getpid()}"),
    ):
        measure("cpu", out=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_every_code_path_on_a_gpu(tmp_path: Path) -> None:
    measure("smoke", device="cuda", out=tmp_path)
    found = outcomes_in(tmp_path)
    wrong = {
        key: outcome
        for key, outcome in found.items()
        if outcome not in (outcomes.MEASURED, outcomes.UNAVAILABLE)
    }
    assert not wrong
    valid_tables(tmp_path)
    assert outcomes_in(tmp_path)["layers/lenet5-b4-tf32"] == outcomes.MEASURED
