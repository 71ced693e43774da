"""``ddlkit measure``: points are resumed, damage is told, two runs do not mix, Ctrl-C leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ddlkit import store
from ddlkit.core.cost import Table
from ddlkit.core.errors import UserError
from ddlkit.report.source import default_recording, open_source
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.sessions import quick as suite

TINY = {"lenet5": 4}
SIZES = np.geomspace(1e3, 1e8, 12)
RING = Table(SIZES, 1e-3 + 12.6e-9 * SIZES, workers=4, algorithm="ring")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("measured")
    suite.measure("layers", "quick", out, TINY)
    return out


def test_what_is_measured_is_stamped_and_can_be_read(measured: Path) -> None:
    profile = store.read_profile(measured / "layers-lenet5-b4-r1.csv")
    assert profile.workload().n == 10
    samples = store.load_table(measured / "samples-lenet5-b4-r1.csv", "samples")
    totals = samples.groupby("quantity")["seconds"].median()
    assert profile.forward_s.sum() == pytest.approx(totals["forward"])
    assert profile.backward_s.sum() == pytest.approx(totals["backward"])


def test_a_second_run_measures_nothing_again(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in measured.iterdir() if path.suffix == ".csv"}
    suite.measure("layers", "quick", measured, TINY)
    assert "lenet5-b4-r1: already measured" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_damaged_table_is_told_not_measured_over(measured: Path, tmp_path: Path) -> None:
    for path in measured.glob("*lenet5*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / "layers-lenet5-b4-r1.csv"
    damaged.write_text(damaged.read_text().replace("conv1", "conv9"))
    with pytest.raises(UserError, match="differs from its stamp"):
        suite.measure("layers", "quick", tmp_path, TINY)


def test_two_runs_into_one_directory_do_not_mix(tmp_path: Path) -> None:
    with store.Lock(tmp_path / ".lock"), pytest.raises(UserError, match=f"process {os.getpid()}"):
        suite.measure("layers", "quick", tmp_path, TINY)


def test_ctrl_c_ends_in_one_line_and_leaves_no_half_table(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "ddlkit", "measure", "layers", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*argv, "--networks", "lenet5:4,vgg16:8"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "samples-lenet5-b4-r1.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "interrupted; what was measured is kept" in said
    assert "Traceback" not in said
    kept = sorted(path.name for path in tmp_path.glob("*.csv"))
    assert kept == ["layers-lenet5-b4-r1.csv", "samples-lenet5-b4-r1.csv"]
    assert store.read_profile(tmp_path / kept[0]).network == "lenet5"


def test_replay_cases_are_distinct_and_weigh_communication_as_much_as_compute() -> None:
    profile = open_source(default_recording().name).profile("resnet50")
    cases = suite.replay_cases(profile, RING, Loopback())
    plans = {one.plan.ends for one in cases}
    assert len(plans) == len(cases) == suite.DISTINCT_PLANS
    case, workload = cases[0].case, cases[0].workload
    whole_s = float(RING(workload.bytes.sum()))
    assert workload.scaled(case.dilation).compute_s == pytest.approx(whole_s, rel=1e-2)
