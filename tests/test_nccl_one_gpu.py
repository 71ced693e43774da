"""Two ranks of NCCL on one device, rehearsed with a played libnccl: refused, measured, failing, hanging."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB
from ddlkit.run import clock
from ddlkit.run.clock import Budget
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Job, Rank
from ddlkit.run.measure import contention, nccl_one_gpu
from ddlkit.run.measure.nccl_one_gpu import (
    OneGpuSettings,
    library,
    measure_on_one_gpu,
    one_gpu_job,
    read_trace,
    unavailable,
)
from ddlkit.run.sessions import Unavailable

CPU = torch.device("cpu")
TWICE = Budget(warmup=1, min_repeats=2, max_repeats=2)
TINY = OneGpuSettings(contention.TINY, TWICE, ["relu"], 64 * KIB)

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


def calls(log: Path) -> list[list[str]]:
    """What was called, word by word."""
    return [line.split() for line in log.read_text().splitlines()]


def test_a_library_that_is_old_or_no_nccl_is_refused(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play("version=23003")
    assert not unavailable()
    play("version=23002")
    reasons = [(library(), r"NCCL 2\.30\.2 has")]
    reasons += [("missing.so", "cannot open"), ("libm.so.6", "undefined symbol")]
    for name, reason in reasons:
        monkeypatch.setenv("DDLKIT_NCCL", name)
        assert library() == name
        with pytest.raises(Unavailable, match=reason):
            measure_on_one_gpu([(1, 64)], TINY)


# -- what the profiler saw ----------------------------------------------------------------------


def _event(name: str, start: float, end: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "args": args}


def test_trace_of_gpu_kernels_shows_overlap_and_footprint() -> None:
    ring = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    how: dict[str, Any] = {"grid": [8, 1, 1], "block": [288, 1, 1]}
    how |= {"registers per thread": 96, "shared memory": 9}
    events = [
        _event("nccl:all_reduce", 0, 99, "gpu_user_annotation"),
        _event(ring, 10, 30, **how),
        _event(ring, 32, 52, **how),
        _event("void at::cuda::spin_kernel(long)", 0, 20),
        _event("implicit_gemm", 20, 40),
    ]
    seen = read_trace({"traceEvents": events})
    assert seen.pop("overlap_share") == pytest.approx((10 + 8) / 20)
    assert seen.pop("messages_s") == pytest.approx(42e-6)
    assert seen == {"taken_blocks": 8, "taken_threads": 288, "registers": 96, "shared_bytes": 9}


def test_kernels_that_took_turns_with_messages_leave_no_row(
    play: Play, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others do, and each that did is said."""
    play("version=23003")
    shares = {"relu": 0.05, "attention": 0.9, "linear": 0.0}

    def rows(_: object, name: str, *__: object) -> pd.DataFrame:
        pair = {"communication": ["none", "nccl_one_gpu"], "seconds": [1.0, 2.0]}
        return pd.DataFrame({"kernel": name, **pair, "overlap_share": [0, shares[name]]})

    monkeypatch.setattr(nccl_one_gpu, "beside", rows)
    me = Rank(0, 1, 0, CPU, "gloo", 1)
    (part,) = one_gpu_job.part(me, replace(TINY, names=[*shares]))
    assert part["contention"]["kernel"].unique().tolist() == ["attention"]
    said = capsys.readouterr().err
    assert said.count("took 2 s, alone 1 s") == 2 and "two ranks relu" in said
    with pytest.raises(UserError, match="two ranks relu took"):
        list(one_gpu_job.part(me, TINY))


@pytest.mark.parametrize(
    ("role", "line"),
    [("wrong", "sums are wrong"), ("refuse", "ncclCommInitAll: invalid usage: Duplicate GPU")],
)
def test_what_fails_is_one_line(role: str, line: str, play: Play) -> None:
    play(f"{role} version=23003")
    with pytest.raises(UserError, match=line) as raised:
        measure_on_one_gpu([(2, 256)], TINY, on_gpu=False)
    assert "\n" not in str(raised.value)


def trace_of_a_gpu(run: Callable[[], object], _: object) -> str:
    """What a GPU's profiler would have seen of the two ranks' kernels beside another one."""
    run()
    how: dict[str, Any] = {"grid": [2, 1, 1], "block": [288, 1, 1]}
    ranks = [_event("ncclDevKernel_AllReduce", at, at + 100, **how) for at in (0, 10)]
    return json.dumps({"traceEvents": [*ranks, _event("relu", 50, 150)]})


def test_each_setting_is_heard_by_nccl_and_makes_rows(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of it but the profiler, which sees no kernels here, in this process: one rank, as in a job."""
    log = play("version=23003")
    monkeypatch.setattr(launch, "launch", launch_here)
    monkeypatch.setattr(clock, "chrome_trace", trace_of_a_gpu)
    found = measure_on_one_gpu([(1, 64), (2, 256)], TINY, on_gpu=False)["contention"]
    path = store.save_table(found, tmp_path, "x", schema="contention", command=[])
    rows = store.load_table(path, "contention")
    assert rows.groupby(["communication", "blocks", "threads"]).size().to_dict() == {
        (company, *pair): 2 for company in ("nccl_one_gpu", "none") for pair in ((1, 64), (2, 256))
    }
    beside = rows[rows["communication"] == "nccl_one_gpu"]
    assert set(beside["taken_blocks"]) == {2} and set(beside["taken_threads"]) == {288}
    assert beside["overlap_share"].to_numpy() == pytest.approx(0.6)
    assert set(rows["ranks"]) == {2}
    meets = [call for call in calls(log) if call[0] == "meet"]
    assert [(call[6], call[8], call[10]) for call in meets] == [("1", "1", "64"), ("1", "2", "256")]


def launch_here(
    job: Job[Any], settings: object, *, place: Loopback, join: dict[str, Any], **_: object
) -> dict[str, pd.DataFrame]:
    """As `launch.launch`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.environment(0, 1).items():
            patch.setenv(name, value)
        with socket.create_server((launch.LOCALHOST, 0)) as probe:
            patch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        me = Rank.join(**join)
        try:
            parts = [tables["contention"] for tables in job.part(me, settings)]
        finally:
            me.leave()
    return {"contention": pd.concat(parts, ignore_index=True)}


# -- a hang ------------------------------------------------------------------------------------


def test_a_hang_is_ended_and_nothing_stays(play: Play) -> None:
    log = play("hang version=23003")
    with pytest.raises(UserError, match="not done after 6 s and was ended"):
        measure_on_one_gpu([(1, 64), (2, 256)], TINY, on_gpu=False, limit_s=6)
    (meet,) = calls(log)  # and the next setting was not tried
    with pytest.raises(ProcessLookupError):
        os.kill(int(meet[-1]), 0)
