"""``--pack FILE``: whatever ends a recording, the file is whole, and a later run goes on from it."""

from __future__ import annotations

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

import psutil
import pytest

import faulty_points
from ddlkit import cli, store
from ddlkit.core.errors import UserError
from ddlkit.run.sessions import engine, packing
from ddlkit.run.sessions.packing import pack, restore
from ddlkit.run.sessions.session import Origin
from places import PATIENCE_S, ROOT, alive, family, wait_for

TESTS = Path(__file__).parent
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
