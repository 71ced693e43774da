"""``--pack FILE``: whatever ends a recording, the file is whole, and a later run goes on from it."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import faulty_points
from ddlkit import cli, store
from ddlkit.core.errors import UserError
from ddlkit.run.sessions import engine, packing
from ddlkit.run.sessions.engine import run_session
from ddlkit.run.sessions.packing import pack, restore
from ddlkit.run.sessions.session import Origin, Source
from places import PATIENCE_S, ROOT, alive, family, wait_for

TESTS = Path(__file__).parent
FACTS = {"measure": "facts"}
PATH = os.pathsep.join([str(ROOT), str(TESTS)])
SCRIPT = """
import signal, sys
from pathlib import Path
from ddlkit.core.errors import UserError
from ddlkit.run.sessions import engine, packing
from ddlkit.run.sessions.session import Source
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.default_int_handler)
packing.EVERY_S = 0.1
out, file = map(Path, sys.argv[1:])
engine.run_session(Source("faulty_points:steady"), out, isolate=True, pack=file)
"""


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the lock, by its path in there."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def unpacked(file: Path, where: Path, name: str = "rec") -> Path:
    """The recording in the file, as by the command that the help names, every table of it checked."""
    where.mkdir()
    subprocess.run(["tar", "xzf", file, "-C", where], check=True)
    for path in where.rglob("*.csv*"):
        store.load_table(path)
    return where / name


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A recording of three tables, and what else may lie beside them."""
    out = tmp_path / "here" / "rec"
    for name, directory in (("a", out), ("b", out), ("c", out / "campaign")):
        Origin().save(directory / f"drift-{name}.csv", faulty_points.drift()["drift"], "drift")
    return out


def test_what_is_packed_is_restored_as_it_was(out: Path, tmp_path: Path) -> None:
    expected, file = contents(out), tmp_path / "rec.tgz"
    for litter in (".lock", ".drift-a.csv.77.tmp", "core", "rec.tgz"):
        (out / litter).write_text("no table")
    pack(out, file)
    assert contents(unpacked(file, tmp_path / "by-hand")) == expected
    again = tmp_path / "again" / "rec"
    again.mkdir(parents=True)
    restore(again, file)
    assert contents(again) == expected
    with tarfile.open(file) as archive:
        assert {(one.uid, one.uname, one.gname) for one in archive} == {(0, "", "")}


@pytest.mark.fault(
    fault="the packed file is truncated or another's",
    injected="half of it, none of it, no gzip, another recording's name, a table missing",
    holds="one line; nothing is unpacked",
)
def test_a_file_that_cannot_be_gone_on_from_is_one_line(out: Path, tmp_path: Path) -> None:
    file = tmp_path / "rec.tgz"
    pack(out, file)
    whole = file.read_bytes()
    (out / "drift-b.csv").unlink()
    with pytest.raises(UserError, match="holds 1 tables that .* lacks, such as drift-b.csv: "):
        restore(out, file)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match="holds a recording of rec, not of other: name another"):
        restore(other, file)
    for damaged in (whole[: len(whole) // 2], b"not gzip", b""):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="rec.tgz: no whole archive"):
            restore(other, file)
    assert not contents(other)


def test_a_table_that_is_being_written_is_packed_with_its_own_stamp(tmp_path: Path) -> None:
    out, over = tmp_path / "rec", threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            frame = faulty_points.drift(f"moment {number}")["drift"]
            Origin().save(out / "drift-a.csv", frame, "drift")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert wait_for((out / "drift-a.json").exists)
        seen: set[bytes] = set()
        for number in itertools.count():
            pack(out, file := tmp_path / f"{number}.tgz")
            seen.add((unpacked(file, tmp_path / f"of{number}") / "drift-a.csv").read_bytes())
            if number >= 20 and len(seen) > 1:  # the lock is not fair: the writer may have to wait
                break
    finally:
        over.set()
        writer.join()


@pytest.mark.fault(
    fault="the packed file cannot be written",
    injected="a directory in its place, in the middle of a session",
    holds="it is told; the session goes on",
)
def test_a_disk_that_refuses_ends_no_session_before_its_end(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packing, "EVERY_S", 0.0)
    file = tmp_path / "rec.tgz"
    with (
        pytest.raises(UserError, match="^cannot write .*rec.tgz: Is a directory"),
        packing.packing(out, file) as keep,
    ):
        keep()
        file.unlink()
        file.mkdir()
        keep()
        assert "not packed: cannot write" in capsys.readouterr().err
    with (
        pytest.raises(UserError, match="^cannot write"),
        packing.packing(out, tmp_path / "here" / "rec" / "drift-a.csv" / "rec.tgz"),
    ):
        pytest.fail("measured without a place for the file")


def all_gone(processes: list[psutil.Process]) -> bool:
    return not alive(processes)


class Clock:
    """What `packing` asks for the time."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=10))
def test_the_file_is_never_older_than_it_may_be_and_seldom_written(steps_s: list[float]) -> None:
    clock, writes, packed_s = Clock(), 0, 0.0
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        out, file = Path(directory) / "rec", Path(directory) / "rec.tgz"
        out.mkdir()
        patch.setattr(packing, "time", clock)
        with packing.packing(out, file) as keep:
            before = file.stat().st_ino
            for step_s in steps_s:
                clock.now_s += step_s
                keep()
                if (now := file.stat().st_ino) != before:
                    before, packed_s, writes = now, clock.now_s, writes + 1
                assert clock.now_s - packed_s < packing.EVERY_S
    assert writes <= clock.now_s / packing.EVERY_S


def start(out: Path, file: Path, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """A recording that packs after each point or two, by a process of its own."""
    command = [sys.executable, "-c", SCRIPT, str(out), str(file)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": PATH}, stderr=stderr)


def points_in(directory: Path) -> int:
    return len([*directory.glob("drift-p*.csv")])


def holds(directory: Path, least: int) -> bool:
    return points_in(directory) >= least


@pytest.mark.parametrize("who", ["parent", "child"])
@pytest.mark.fault(
    fault="a recording that packs itself is killed at any moment",
    injected="SIGKILL to parent or child at random moments, and half an archive beside",
    holds="the packed file is whole each time and holds no less than before; the last run "
    "ends with all points",
)
def test_killed_at_any_moment_the_file_is_whole_and_gone_on_from(who: str, tmp_path: Path) -> None:
    out, file = tmp_path / "machine" / "rec", tmp_path / "packed" / "rec.tgz"
    chance, there = random.Random(who), 0
    for life in range(3):
        shutil.rmtree(out, ignore_errors=True)  # a machine of its own each time
        parent = start(out, file)
        try:
            goal = min(
                12, there + chance.randint(2, 4)
            )  # far enough from the end, on busy cores too
            assert wait_for(partial(holds, out, goal))
            threading.Event().wait(chance.uniform(0.0, 0.1))
            processes = family(parent.pid)
            victim = parent.pid if who == "parent" else processes[0].pid
            os.kill(victim, signal.SIGKILL)
            if who == "child":  # another one goes on
                assert wait_for(partial(holds, out, goal + 1))
                parent.kill()
            parent.wait(PATIENCE_S)
            assert wait_for(partial(all_gone, processes))
        finally:
            parent.kill()
        found = unpacked(file, tmp_path / f"life{life}")
        assert points_in(found) >= there
        there = points_in(found)
        (file.parent / f".{file.name}.{parent.pid}.tmp").write_bytes(b"half")
    shutil.rmtree(out)
    last = start(out, file)
    assert last.wait(PATIENCE_S) == 0
    before, after = contents(found), contents(unpacked(file, tmp_path / "last"))
    changing = {"outcomes.csv", "outcomes.json"}
    assert {name: before[name] for name in before.keys() - changing}.items() <= after.items()
    assert after == contents(out) and points_in(out) == 20
    assert [path.name for path in file.parent.iterdir()] == ["rec.tgz"]
    assert not [*out.glob(".*.tmp")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.fault(
    fault="a recording that packs itself is ended",
    injected="SIGINT, SIGTERM",
    holds="the packed file holds exactly what was measured",
)
def test_a_recording_that_is_ended_packs_all_it_leaves(
    tmp_path: Path, number: signal.Signals
) -> None:
    out, file = tmp_path / "rec", tmp_path / "rec.tgz"
    parent = start(out, file)
    try:
        assert wait_for(lambda: points_in(out) >= 3)
        parent.send_signal(number)
        assert parent.wait(PATIENCE_S) != 0
    finally:
        parent.kill()
    assert contents(unpacked(file, tmp_path / "found")) == contents(out)


@pytest.mark.fault(
    fault="nobody reads the log any more",
    injected="the reading end of standard error is closed",
    holds="the recording goes on to its end",
)
def test_a_log_that_nobody_writes_any_more_ends_no_recording(tmp_path: Path) -> None:
    out, file = tmp_path / "rec", tmp_path / "rec.tgz"
    reading, writing = os.pipe()
    parent = start(out, file, stderr=writing)
    os.close(writing)
    assert wait_for(partial(holds, out, 1))
    os.close(reading)
    parent.wait(PATIENCE_S)
    assert points_in(unpacked(file, tmp_path / "found")) == 20


def test_points_in_this_process_are_packed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    out, file = tmp_path / "rec", tmp_path / "rec.tgz"
    run_session(Source("faulty_points:pair"), out, pack=file)
    assert contents(unpacked(file, tmp_path / "found")) == contents(out)


def test_a_copied_tree_without_git_records_and_packs_nothing_of_this_place(tmp_path: Path) -> None:
    tree, suite, file = tmp_path / "tree", tmp_path / "mine.json", tmp_path / "rec.tgz"
    shutil.copytree(ROOT / "ddlkit", tree / "ddlkit")
    described = {"isolate": True, "device": "cpu", "out": "recorded", "points": [FACTS]}
    suite.write_text(json.dumps(described))
    asked = [str(suite), "--budget=1m30s", "--pack", str(file)]
    environment = {name: text for name, text in os.environ.items() if "DDLKIT" not in name}
    said = subprocess.run(
        [sys.executable, "-m", "ddlkit", "measure", *asked],
        cwd=tree,
        env={**environment, "PYTHONPATH": str(tree)},
        check=True,
        capture_output=True,
        text=True,
    )
    out = Path(said.stdout.strip())
    assert out.parent == tree / "data" / "recorded"
    found = unpacked(file, tmp_path / "found", out.name)
    assert contents(found) == contents(out)
    told = ["ddlkit/__main__.py", "measure", "mine.json", "--budget=1m30s", "--pack", "rec.tgz"]
    stamps = [store.load_stamp(path) for path in found.glob("*.csv*")]
    assert [stamp["command"] for stamp in stamps] == [told] * len(stamps)
    assert {stamp["commit"] for stamp in stamps} == {"unknown"}
    assert not [name for name, data in contents(found).items() if str(tmp_path).encode() in data]


@pytest.mark.parametrize(
    "asked", [["measure", "quick"], ["record", "--suite", "cpu"], ["record", "--suite", "gpu"]]
)
def test_every_session_takes_the_same_arguments(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[str, object] = {}
    monkeypatch.setattr(engine, "measure", lambda what, **how: heard.update(how))
    assert cli.main([*asked, "--budget", "8m30s", "--pack", "x.tgz", "--ignore-load"]) == 0
    expected = {"budget_s": 510.0, "pack": Path("x.tgz"), "ignore_load": True, "out": None}
    assert expected.items() <= heard.items()
