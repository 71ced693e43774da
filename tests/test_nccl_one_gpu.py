"""Two ranks of NCCL on one device, rehearsed with a played libnccl: refused, measured, failing, hanging."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB
from ddlkit.run.clock import Budget
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Job, Rank
from ddlkit.run.measure import nccl_one_gpu
from ddlkit.run.measure.nccl_one_gpu import OneGpuSettings, measure_on_one_gpu, taken, unavailable
from ddlkit.run.sessions import Unavailable

CPU = torch.device("cpu")
TWICE = Budget(warmup=1, min_repeats=2, max_repeats=2)
TINY = OneGpuSettings(True, TWICE, ["relu"], 64 * KIB)

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")

Play = Callable[[str], Path]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnccl.so.2 of tests/played_nccl.c."""
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so.2"
    source = Path(__file__).with_name("played_nccl.c")
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    subprocess.run(["gcc", *options, "-o", str(path), str(source)], check=True)
    return path


@pytest.fixture
def play(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Have the played library do as told; returns where it writes down what is called."""

    def start(role: str) -> Path:
        for name, value in (("DDLKIT_NCCL", played), ("PLAYED_NCCL", role)):
            monkeypatch.setenv(name, str(value))
        log = tmp_path / "calls"
        monkeypatch.setenv("PLAYED_LOG", str(log))
        return log

    return start


def test_a_library_that_is_old_or_no_nccl_is_refused(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play("version=23003")
    assert not unavailable()
    play("version=23002")
    names = [os.environ["DDLKIT_NCCL"], "missing.so", "libm.so.6"]
    reasons = [r"NCCL 23002 has", "cannot open", "undefined symbol"]
    for name, reason in zip(names, reasons, strict=True):
        monkeypatch.setenv("DDLKIT_NCCL", name)
        with pytest.raises(Unavailable, match=reason):
            measure_on_one_gpu([(1, 64)], TINY)


def test_trace_of_gpu_kernels_shows_what_nccl_took() -> None:
    took = {"grid": [8, 1, 1], "block": [288, 1, 1], "registers per thread": 96, "shared memory": 9}
    ring: dict[str, Any] = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_RING_LL"}
    ring |= {"ts": 10, "dur": 20, "args": took}
    other = {**ring, "name": "implicit_gemm", "ts": 5, "args": {"grid": [99]}}
    seen = taken({"traceEvents": [other, ring]})
    assert seen == {"taken_blocks": 8, "taken_threads": 288, "registers": 96, "shared_bytes": 9}
    assert set(taken({"traceEvents": []}).values()) == {0}


def test_each_setting_is_heard_by_nccl_and_kernels_that_took_turns_leave_no_row(
    play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but what needs a GPU, in this process: one rank, as in a job."""
    roles = {"wrong": "sums are wrong", "refuse": "ncclCommInitAll: invalid usage: Duplicate GPU"}
    monkeypatch.setattr(launch, "launch", launch_here)
    for role, line in roles.items():
        play(f"{role} version=23003")
        with pytest.raises(UserError, match=line):
            measure_on_one_gpu([(2, 256)], TINY, on_gpu=False)
    log = play("version=23003")
    log.unlink()

    def in_turn(name: str, scale: object, place: object, ranks: Any, *_: object) -> Any:
        if name == "relu":
            raise UserError("take turns")
        yield pd.DataFrame({**ranks.labels, "kernel": [name]})

    monkeypatch.setattr(nccl_one_gpu, "in_turn", in_turn)
    pairs, both = [(1, 64), (2, 256)], replace(TINY, names=["relu", "linear"])
    rows = measure_on_one_gpu(pairs, both, on_gpu=False)["contention"]
    assert rows.to_numpy().tolist() == [[2, *pair, "linear"] for pair in pairs]
    assert capsys.readouterr().err.count("relu: take turns") == 2
    meets = [line.split() for line in log.read_text().splitlines() if line.startswith("meet ")]
    assert [(call[6], call[8], call[10]) for call in meets] == [("1", "1", "64"), ("1", "2", "256")]
    with pytest.raises(UserError, match="take turns"):
        measure_on_one_gpu(pairs[:1], TINY, on_gpu=False)


def launch_here(
    job: Job[Any], settings: object, *, place: Loopback, join: dict[str, Any], **_: object
) -> dict[str, pd.DataFrame]:
    """As `launch.launch`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.environment(0, 1).items():
            patch.setenv(name, value)
        me = Rank(0, 1, 0, torch.device("cpu"), "gloo", 1)
        parts = [tables["contention"] for tables in job.part(me, settings)]
    return {"contention": pd.concat(parts, ignore_index=True)}


def test_a_hang_is_ended_and_nothing_stays(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    log = play("hang version=23003")
    monkeypatch.setattr(nccl_one_gpu, "LIMIT_S", 6.0)
    with pytest.raises(UserError, match="not done after 6 s and was ended"):
        measure_on_one_gpu([(1, 64), (2, 256)], TINY, on_gpu=False)
    (meet,) = log.read_text().splitlines()  # and the next setting was not tried
    with pytest.raises(ProcessLookupError):
        os.kill(int(meet.split()[-1]), 0)
