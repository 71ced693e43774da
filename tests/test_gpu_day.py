"""The script for half an hour on a GPU, rehearsed: it may be killed at any moment, and goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ddlkit import cli, store
from places import ROOT, alive, family, wait_for
from workbook.cli import PROGRAM

SCRIPT = ROOT / "examples" / "gpu_day.sh"
# Plays python: notes its arguments, and ends as FAIL says of those that hold its first word.
NOTING = """\
#!/bin/bash
echo "$*" >> "$NOTED"
[[ -z $FAIL || "$*" != *${FAIL% *}* ]] || exit "${FAIL#* }"
"""
# Plays python -m workbook: the command is ours, the points are those of a test.
MEASURING = f"""\
#!{sys.executable}
import sys
from workbook import cli
import faulty_points
from ddlkit.measure.session import engine
from workbook.record import recording
recording.points = faulty_points.long
recording.partial = lambda make, **_: make
engine.EVERY_S = 0.1
sys.exit(cli.main(sys.argv[3:]))
"""


def played(directory: Path, program: str) -> str:
    (directory / "python").write_text(program)
    (directory / "python").chmod(0o755)
    return str(directory / "python")


def day(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    argv = [str(SCRIPT), *map(str, words)]
    return subprocess.run(argv, env=environment, capture_output=True, text=True)


def packed(archive: Path, into: Path) -> set[str]:
    shutil.rmtree(into, ignore_errors=True)
    with tarfile.open(archive) as opened:
        opened.extractall(into, filter="data")
    tables = {path for path in into.rglob("*.csv*")}
    assert all(len(store.load_table(path).columns) for path in tables)
    return {path.name for path in tables}


@pytest.mark.parametrize(
    ("fail", "status", "steps"),
    [
        (" 0", 0, ["--preflight", "record smoke", "-m gpu"]),
        ("--preflight 2", 2, ["--preflight"]),  # no GPU at all
        ("smoke 2", 1, ["--preflight", "record smoke", "-m gpu"]),
    ],
)
def test_the_first_stage_goes_on_after_a_failure_and_says_so(
    tmp_path: Path, fail: str, status: int, steps: list[str]
) -> None:
    around = {
        "PYTHON": played(tmp_path, NOTING),
        "NOTED": str(tmp_path / "noted"),
        "FAIL": fail,
    }
    done = day(1, 60, "90s", tmp_path / "day", "--ignore-load", **around)
    called = (tmp_path / "noted").read_text().split("-c import ")[1:]
    assert done.returncode == status
    assert [
        step for step, call in zip(steps, called, strict=True) if step in call
    ] == steps
    for call in called:
        words = call.split("sys.argv[1:]])")[1].split()
        if words[1] == "workbook":
            asked = cli._parser(PROGRAM).parse_args(words[2:])
            assert (asked.name, asked.device) in {("gpu", None), ("smoke", "cuda")}
    logged = (tmp_path / "day" / "stage1.log").read_text()
    assert logged.count("gpu_day: exit status") == len(steps)


def test_a_kill_leaves_a_whole_archive_from_which_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    python = played(tmp_path, MEASURING)
    out, archive = tmp_path / "recorded" / "here", tmp_path / "day" / "recording.tgz"
    words = ("60m", archive.parent, "--device", "cpu", "--out", out)

    def tables() -> set[str]:
        return packed(archive, tmp_path / "look") if archive.exists() else set()

    argv = [str(SCRIPT), "2", "300", *map(str, words)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHON": python}) as process:
        assert wait_for(lambda: "drift-first.csv" in tables())
        ours = family(process.pid)
        process.kill()
    assert wait_for(lambda: not alive(ours)), "it leaves processes behind"
    there = tables()
    shutil.rmtree(out)
    for limit_s in (6, 60):  # on a busy machine it may not even have begun by then
        ended = day(3, limit_s, *words, PYTHON=python)
        log = (archive.parent / "stage3.log").read_text()
        if "already measured: " in log:
            break
    assert "already measured: test/first" in log
    assert ended.returncode == 143
    assert there <= tables() == {path.name for path in out.glob("*.csv*")}
