"""``--pack FILE``: whatever ends a recording, the file is whole, and a later run goes on from it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

import faulty_points
from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.measure import session as sessions
from ddlkit.measure.session import Origin, engine
from ddlkit.measure.session.engine import pack_into, packing, restore
from forked import Forked
from places import PATIENCE_S, ROOT, alive, family, wait_for
from workbook import cli as workbook_cli


def record(out: Path, points: str, file: Path) -> None:
    """Pack after each point or two. The process that measures is a new one, and imports the points."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    engine.PACK_PERIOD_S = 0.1
    engine.run_session(getattr(faulty_points, points), out, isolate=True, pack=file)


def begin(out: Path, points: str, file: Path) -> Forked:
    """A recording by a process of its own."""
    process = Forked(record, out, points, file)
    process.start()
    return process


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the lock, by its path in there."""
    files = (
        path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"
    )
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def unpacked(file: Path, where: Path) -> Path:
    """The recording in the file, as by the command that the help names, every table of it checked."""
    where.mkdir()
    subprocess.run(["tar", "xzf", file, "-C", where], check=True)
    for path in where.rglob("*.csv*"):
        store.load_table(path)
    return where / "rec"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A recording of three tables, one of them in a campaign's folder."""
    out = tmp_path / "here" / "rec"
    for name, directory in (("a", out), ("b", out), ("c", out / "campaign")):
        Origin().save(
            directory / f"drift-{name}.csv", faulty_points.drift()["drift"], "drift"
        )
    return out


def test_what_is_packed_is_restored_as_it_was(out: Path, tmp_path: Path) -> None:
    expected, file = contents(out), tmp_path / "rec.tgz"
    for litter in (".lock", ".drift-a.csv.77.tmp", "core", "rec.tgz"):
        (out / litter).write_text("no table")
    pack_into(out, file)
    assert contents(unpacked(file, tmp_path / "by-hand")) == expected
    again = tmp_path / "again" / "rec"
    again.mkdir(parents=True)
    restore(again, file)
    assert contents(again) == expected
    with tarfile.open(file) as archive:
        assert {(member.uid, member.uname, member.gname) for member in archive} == {
            (0, "", "")
        }


@pytest.mark.fault(
    fault="the packed file is truncated or another's",
    injected="half of it, none of it, no gzip, another recording's name, a table missing",
    holds="one line; nothing is unpacked",
)
def test_a_file_that_cannot_be_gone_on_from_is_one_line(
    out: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rec.tgz"
    pack_into(out, file)
    whole = file.read_bytes()
    (out / "drift-b.csv").unlink()
    with pytest.raises(
        UserError, match="holds 1 tables that .* lacks, such as drift-b.csv: "
    ):
        restore(out, file)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(
        UserError, match="holds a recording of rec, not of other: name another"
    ):
        restore(other, file)
    for damaged in (whole[: len(whole) // 2], b"not gzip", b""):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match="rec.tgz: is not a whole archive"):
            restore(other, file)
    assert not contents(other)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rec/../../outside.csv", tarfile.REGTYPE),
        ("rec/link.csv", tarfile.SYMTYPE),
        ("rec/device.csv", tarfile.CHRTYPE),
    ],
)
def test_an_archive_writes_only_plain_files_into_its_recording(
    name: str, kind: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "rec.tgz"
    with tarfile.open(file, "w:gz") as archive:
        for member_name, member_kind in (
            ("rec/drift-a.csv", tarfile.REGTYPE),
            (name, kind),
        ):
            member = tarfile.TarInfo(member_name)
            member.type = member_kind
            member.linkname = "/etc/passwd"
            archive.addfile(member)
    out = tmp_path / "here" / "rec"
    out.mkdir(parents=True)
    with pytest.raises(UserError, match="is no file of a recording"):
        restore(out, file)
    assert [*tmp_path.rglob("*.csv")] == []


@pytest.mark.fault(
    fault="the packed file cannot be written",
    injected="a directory in its place, in the middle of a session",
    holds="it is told; the session goes on",
)
def test_a_disk_that_refuses_ends_no_session_before_its_end(
    out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engine, "PACK_PERIOD_S", 0.0)
    file = tmp_path / "rec.tgz"
    refused = pytest.raises(UserError, match="^cannot write .*rec.tgz: Is a directory")
    with refused, packing(out, file) as keep:
        keep()
        file.unlink()
        file.mkdir()
        keep()
        assert "not packed: cannot write" in capsys.readouterr().err
    nowhere = tmp_path / "here" / "rec" / "drift-a.csv" / "rec.tgz"
    with pytest.raises(UserError, match="^cannot write"), packing(out, nowhere):
        pytest.fail("measured without a place for the file")


def points_in(directory: Path) -> int:
    return len([*directory.glob("drift-p*.csv")])


def lived(
    out: Path, file: Path, chance: random.Random, number: signal.Signals, goal: int
) -> None:
    """A recording whose child is killed after so many points, and then it is itself, each at random."""
    parent = begin(out, "steady", file)
    assert parent.pid is not None
    try:
        assert wait_for(lambda: points_in(out) >= goal)
        time.sleep(chance.uniform(0.0, 0.1))
        family(parent.pid)[0].kill()
        assert wait_for(lambda: points_in(out) > goal), "another one goes on"
        time.sleep(chance.uniform(0.0, 0.1))
        processes = family(parent.pid)
        os.kill(parent.pid, number)
        parent.join(PATIENCE_S)
        assert parent.exitcode
        assert wait_for(lambda: not alive(processes))
    finally:
        parent.kill()


@pytest.mark.fault(
    fault="a recording is killed",
    injected="SIGKILL and SIGTERM to the engine while its child measures",
    holds="the child dies with it; the next run keeps what is there and goes on",
)
@pytest.mark.fault(
    fault="a recording that packs itself is killed at any moment, or ended",
    injected="SIGKILL to child and parent at random moments, half an archive beside, and SIGTERM",
    holds="the packed file is whole each time and holds no less than before, of one that was ended "
    "exactly what was measured; the last run ends with all points",
)
def test_killed_at_any_moment_the_file_is_whole_and_gone_on_from(
    tmp_path: Path,
) -> None:
    out, file = tmp_path / "machine" / "rec", tmp_path / "packed" / "rec.tgz"
    chance, there = random.Random(3), 0
    for number in (signal.SIGKILL, signal.SIGTERM):
        # A machine of its own each time; and far enough from the end, on busy cores too.
        shutil.rmtree(out, ignore_errors=True)
        lived(out, file, chance, number, min(12, there + chance.randint(2, 4)))
        kept = unpacked(file, tmp_path / number.name)
        assert points_in(kept) >= there
        there = points_in(kept)
        assert number == signal.SIGKILL or contents(kept) == contents(out)
        (file.parent / f".{file.name}.{os.getpid()}.tmp").write_bytes(b"half")
    assert sessions.STARTED not in set(
        store.load_table(out / "outcomes.csv")["outcome"]
    )
    shutil.rmtree(out)
    last = begin(out, "steady", file)
    last.join(PATIENCE_S)
    assert last.exitcode == 0
    before, after = contents(kept), contents(unpacked(file, tmp_path / "last"))
    changing = {"outcomes.csv", "outcomes.json"}
    assert {
        name: before[name] for name in before.keys() - changing
    }.items() <= after.items()
    assert after == contents(out) and points_in(out) == 20
    assert [path.name for path in file.parent.iterdir()] == ["rec.tgz"]
    assert not [*out.glob(".*.tmp")]


def test_a_recordings_end_packs_its_tables_and_the_next_call_finds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without being asked they stay loose, until they are packed by hand; below a directory, too."""
    pair = faulty_points.pair
    for out in (tmp_path / "recorded" / "here", tmp_path / "elsewhere" / "below"):
        packed = out.parent.name == "recorded"
        engine.run_session(pair, out, pack_tables=packed)
        assert len([*out.glob("*.csv")]) == (0 if packed else 2)
        if not packed:
            assert workbook_cli.main(["pack", str(out.parent)]) == 0
        assert (out / "drift.csv.gz").exists() and not [*out.glob("*.csv")]
        assert [len(store.load_table(path)) for path in store.list_tables(out)] == [
            1,
            1,
        ]
        capsys.readouterr()
        engine.run_session(pair, out, pack_tables=packed)
        assert "already measured: test/a, test/b" in capsys.readouterr().err
    assert workbook_cli.main(["pack", str(tmp_path / "nowhere")]) == 2
