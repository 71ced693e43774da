"""The two scripts for a GPU, rehearsed on a processor: they end early and loudly, and may be killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import smi
from ddlkit import cli, store
from ddlkit.core import units
from ddlkit.measure.named import network_of
from places import ROOT, alive, family, wait_for
from workbook.cli import PROGRAM
from workbook.record import grammar
from workbook.record.needs import IMAGE_S

CHECK = ROOT / "examples" / "gpu_check.sh"
RECORD = ROOT / "examples" / "gpu_record.sh"
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
if sys.argv[1] == "-c":
    print("played-gpu")
    raise SystemExit
from workbook import cli
import faulty_points
from ddlkit.measure.session import engine
from workbook.record import recording
recording.points = faulty_points.long
recording.partial = lambda make, **_: make
engine.PACK_PERIOD_S = 0.1
sys.exit(cli.main([*sys.argv[3:], "--device", "cpu"]))
"""


def played(directory: Path, program: str) -> str:
    """A program in the place of python."""
    (directory / "python").write_text(program)
    (directory / "python").chmod(0o755)
    return str(directory / "python")


def run(script: Path, *words: object, **environment: str) -> int:
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    argv = [str(script), *map(str, words)]
    return subprocess.run(argv, env=environment, capture_output=True).returncode


def packed(archive: Path, into: Path) -> set[str]:
    """The names of the tables in an archive, each of which is whole."""
    shutil.rmtree(into, ignore_errors=True)
    with tarfile.open(archive) as opened:
        opened.extractall(into, filter="data")
    tables = {path for path in into.rglob("*.csv*")}
    assert all(len(store.load_table(path).columns) for path in tables)
    return {path.name for path in tables}


ISSUE_S = 0.01
"""About how long a host takes to issue an iteration of a small network."""
STEPS = ("pip list", "yardstick", "--preflight", "record smoke", "-m gpu")


@pytest.mark.parametrize(
    ("fail", "status", "steps"),
    [
        (" 0", 0, STEPS),
        ("yardstick 3", 3, STEPS[:2]),
        ("--preflight 2", 2, STEPS[:3]),  # no GPU at all
        ("smoke 1", 1, STEPS[:4]),
        ("gpu 1", 1, STEPS[:3]),  # the first whose words have it
    ],
)
def test_a_check_ends_at_the_first_step_that_fails_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail: str,
    status: int,
    steps: tuple[str, ...],
) -> None:
    smi.install(tmp_path / "bin", monkeypatch)
    around = {
        "PYTHON": played(tmp_path, NOTING),
        "NOTED": str(tmp_path / "noted"),
        "FAIL": fail,
    }
    out = tmp_path / "out"
    assert run(CHECK, out, **around) == status
    called = (tmp_path / "noted").read_text().split("-c import ")[1:]
    assert len(called) == len(steps)
    assert all(step in call for step, call in zip(steps, called, strict=True))
    logged = (out / "check.log").read_text()
    assert ("FAILED at" in logged) == bool(status)
    assert ("all is well" in logged) == (not status)
    for call in called:
        words = call.split("sys.argv[1:]])")[1].split()
        if "workbook" in words[:2]:
            asked = cli._parser(PROGRAM).parse_args(words[2:])
            assert (asked.name, asked.device) in {("gpu", None), ("smoke", "cuda")}
            assert asked.preflight or asked.out.is_relative_to(out)
        if words[-1].endswith(".py") and "pytest" in words:
            assert words[-1] == "tests/test_contention.py", "what may hang comes last"
    assert "driver" in (out / "topology.txt").read_text()


def test_a_check_needs_nvidia_smi_and_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in (CHECK, RECORD):
        assert run(script) == run(script, tmp_path, "more") == 2
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("nvidia-smi") is None:
        assert run(CHECK, tmp_path / "out", PYTHON="/bin/true") == 1
        assert "FAILED at nvidia-smi" in (tmp_path / "out" / "check.log").read_text()


def test_a_kill_leaves_a_whole_archive_from_which_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    python = played(tmp_path, MEASURING)
    out = tmp_path / "out"
    tables_of_run, archive = out / "played-gpu", out / "recording.tgz"

    def tables() -> set[str]:
        return packed(archive, tmp_path / "look") if archive.exists() else set()

    argv = [str(RECORD), str(out)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHON": python}) as process:
        assert wait_for(lambda: "drift-first.csv" in tables())
        ours = family(process.pid)
        process.kill()
    assert wait_for(lambda: not alive(ours)), "it leaves processes behind"
    there = tables()
    shutil.rmtree(tables_of_run)
    log = out / "record.log"
    with subprocess.Popen(argv, env={**os.environ, "PYTHON": python}) as process:
        assert wait_for(lambda: "already measured: " in log.read_text())
        process.terminate()
    assert "already measured: test/first" in log.read_text()
    assert there <= tables() == {path.name for path in tables_of_run.glob("*.csv*")}


# -- budgets ---------------------------------------------------------------------------


def budget_in(script: Path, name: str) -> float:
    """The seconds that a script gives to a suite."""
    (text,) = re.findall(rf"record {name} .*--budget (\w+)", script.read_text())
    return units.parse_seconds(text)


def limit_in(script: Path) -> float:
    (text,) = re.findall(r"^limit_s=(\d+)$", script.read_text(), re.MULTILINE)
    return float(text)


def test_the_suite_of_a_gpu_fits_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own estimates, with the time that is kept free for the points that close it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    listed = grammar.points(out=tmp_path, session=1, name="gpu", device="cuda")
    opening_s, body_s, closing_s = (
        sum(point.estimate_s for point in points)
        for points in (listed.opening, listed.body, listed.closing)
    )
    points = [*listed.opening, *listed.body, *listed.closing]
    assert all(point.estimate_s > 0 for point in points), "one GPU is enough for all"
    budget_s = budget_in(RECORD, "gpu")
    assert 0.9 * budget_s < opening_s + body_s + 2 * closing_s <= budget_s
    # Starting torch, and what may run over the budget, must fit below the limit.
    assert budget_s + 40 <= limit_in(RECORD) == 540
    # A small batch is limited by the host, so that larger ones come first.
    sharing = [point.name for point in listed.body if point.what == "sharing"]
    assert sharing[:2] == ["resnet18-b64-fp32", "resnet18-b128-fp32"]


def test_the_steps_of_a_check_fit_its_limit() -> None:
    text = CHECK.read_text()
    planned_s = [int(seconds) for seconds in re.findall(r"^step (\d+) ", text, re.M)]
    assert len(planned_s) == len(STEPS)
    assert sum(planned_s) <= limit_in(CHECK) == 210
    assert budget_in(CHECK, "smoke") <= 80
    # What is lent for fifteen minutes has to start, too, and to idle between both.
    assert limit_in(CHECK) + limit_in(RECORD) <= 900 - 120


def test_the_smoke_suite_fits_its_step_and_a_gpu_limits_what_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the host limited an iteration beside messages, no row of it would be kept."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    listed = grammar.points(out=tmp_path, session=1, name="smoke", device="cuda")
    points = [*listed.opening, *listed.body, *listed.closing]
    needed_s = sum(point.estimate_s for point in [*points, *listed.closing])
    assert needed_s <= budget_in(CHECK, "smoke")
    for described in grammar.read("smoke").points:
        if described["measure"] == "training_beside_messages":
            (described_network,) = described["networks"]
            network, batch = network_of(described_network)
            assert batch * IMAGE_S[network] > 2 * ISSUE_S


def test_all_that_the_short_suite_lacks_is_in_the_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def keys(name: str) -> set[str]:
        listed = grammar.points(out=tmp_path, session=1, name=name, device="cuda")
        return {point.key for point in listed.body}

    assert not keys("gpu") & keys("gpu-long"), "nothing is measured twice"
    sharing = {
        f"sharing/{network}-b{batch}-fp32"
        for network in (
            "alexnet",
            "vgg16",
            "vgg19",
            "resnet18",
            "resnet50",
            "resnet101",
        )
        for batch in (16, 32, 64, 128)
    }
    assert sharing <= keys("gpu") | keys("gpu-long")
    assert {"collectives/nccl-p8", "training/resnet50-b32-p8"} <= keys("gpu-long")
