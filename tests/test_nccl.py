"""NCCL by blocks and threads, and what controls it: what needs no GPU, and two GPUs where they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure import channels, controls
from ddlkit.run.measure.controls import ABSENT, HEEDED, IGNORED, OFFERED
from ddlkit.run.measure.standin import THREADS
from ddlkit.run.sessions.kinds import Here, controls_of_communication
from ddlkit.run.sessions.session import Partial

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
ONCE = Budget(warmup=0, min_repeats=1, max_repeats=1)

# Lines as NCCL 2.25 and 2.28 print them.
LOG = """\
node:1263644:1263644 [0] NCCL INFO NCCL_MAX_CTAS set by environment to 2.
node:1263644:1263655 [0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 4 p2p channels
[0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 4 p2p channels, 4 p2p channels per peer
"""


def test_the_kernels_shape_is_read_from_a_trace() -> None:
    other = {"cat": "kernel", "name": "gemm", "args": {"grid": [9, 9, 1], "block": [32, 1, 1]}}
    seen = {
        "cat": "kernel",
        "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "args": {"grid": [2, 1, 1], "block": [288, 1, 1]},
    }
    started = {"cat": "cuda_runtime", "name": "ncclDevKernel", "args": {}}
    assert channels.kernel_shape({"traceEvents": [started, other, seen]}) == (2, 288)
    assert channels.kernel_shape({"traceEvents": [other]}) == (0, 0)


def test_gloo_takes_no_blocks_and_the_table_says_so(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    me = Rank(0, 1, 0, torch.device("cpu"), "gloo", 2, 1, out=tmp_path)
    twice = Budget(warmup=0, min_repeats=2, max_repeats=2)
    try:
        channels.channels_job.run(me, channels.ChannelsSettings(4, 128, [1000, 4096], twice))
    finally:
        torch.distributed.destroy_process_group()
    frame = store.load_table(tmp_path / "channels.csv", "channels")
    assert list(frame["bytes"]) == [1000, 1000, 4096, 4096]
    assert set(frame["asked_blocks"]) == {4} and set(frame["taken_blocks"]) == {0}


def played(monkeypatch: pytest.MonkeyPatch, taken: dict[tuple[int, int], tuple[int, int]]) -> None:
    """Settings that take these blocks and threads, with a log of two channels; others fail."""

    @contextmanager
    def workspace(_: object) -> Iterator[Path]:
        yield Path(os.environ["PLAYED_OUT"])

    def launched(
        _: object, asked: channels.ChannelsSettings, **how: Any
    ) -> dict[str, pd.DataFrame]:
        key = asked.blocks, asked.threads
        if key not in taken:
            raise UserError("it hangs")
        (how["out"] / f"{channels.LOG}.1").write_text(LOG if asked.blocks else "gloo says nothing")
        blocks, threads = taken[key]
        row = {"asked_blocks": [key[0]], "taken_blocks": [blocks], "taken_threads": [threads]}
        return {"channels": pd.DataFrame(row)}

    monkeypatch.setattr(launch, "workspace", workspace)
    monkeypatch.setattr(launch, "launch", launched)


def test_a_setting_that_did_not_take_effect_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLAYED_OUT", str(tmp_path))
    played(monkeypatch, {(0, 0): (0, 0), (1, 64): (1, 128), (2, 64): (2, 128), (4, 64): (2, 128)})
    whole = channels.measure_channels([(0, 0), (1, 64), (2, 64)], 2, [1000], ONCE)
    assert list(whole["taken_blocks"]) == [0, 1, 2]
    assert list(whole["taken_channels"]) == [0, 2, 2]
    with pytest.raises(
        Partial, match="^4x64: seen with 2 blocks of 128 .*; 8x64: it hangs"
    ) as some:
        channels.measure_channels([(2, 64), (4, 64), (8, 64)], 2, [1000], ONCE)
    assert list(some.value.tables["channels"]["asked_blocks"]) == [2, 4]
    with pytest.raises(UserError, match="it hangs") as nothing:
        channels.measure_channels([(8, 64)], 2, [1000], ONCE)
    assert not isinstance(nothing.value, Partial)


@pytest.mark.parametrize("taken", [64, 128, 160, 288, 544])
def test_a_kernel_of_other_threads_than_nccl_makes_of_those_asked_is_told(
    taken: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NCCL adds a warp that synchronises, and launches no fewer than four."""
    monkeypatch.setenv("PLAYED_OUT", str(tmp_path))
    for asked, made in zip(THREADS, (128, 160, 288, 544), strict=True):
        played(monkeypatch, {(2, asked): (2, taken)})
        if taken == made:
            assert len(channels.measure_channels([(2, asked)], 2, [1000], ONCE)) == 1
        else:
            with pytest.raises(Partial, match=f"seen with 2 blocks of {taken} threads$"):
                channels.measure_channels([(2, asked)], 2, [1000], ONCE)


# -- what controls it ---------------------------------------------------------------------------


def test_every_level_is_listed_and_what_is_absent_says_why() -> None:
    found = controls.offered()
    assert list(dict.fromkeys(found["level"])) == ["environment", "communicator", "call", "thread"]
    assert not found["control"].duplicated().any()
    assert set(found["outcome"]) <= {OFFERED, ABSENT}
    assert ((found["reason"] == "none") == (found["outcome"] == OFFERED)).all()
    if not dist.is_nccl_available():
        assert set(found.loc[found["level"] != "thread", "outcome"]) == {ABSENT}


def test_a_thread_that_may_not_be_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    rows = controls.offered().set_index("control")
    assert rows.loc["cores", "reason"] == "not permitted: Operation not permitted"
    monkeypatch.delattr(os, "sched_setaffinity")
    assert (
        controls.offered().set_index("control").loc["cores", "reason"]
        == "this system has no such call"
    )


@pytest.mark.parametrize(
    ("here", "since", "reason"),
    [((2, 28, 9), (2, 17), ""), ((2, 16, 2), (2, 17), "NCCL 2.16.2 is older than 2.17")],
)
def test_an_old_nccl_lacks_what_came_later(
    monkeypatch: pytest.MonkeyPatch,
    here: tuple[int, ...],
    since: tuple[int, ...],
    reason: str,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: here)
    assert controls._lacks_nccl(since) == reason


def test_the_proof_needs_two_gpus(tmp_path: Any) -> None:
    assert [one.name for one in controls_of_communication(Here("cpu", 1, tmp_path))] == ["cpu"]
    _, proof = controls_of_communication(Here("cuda", 1, tmp_path))
    assert (proof.estimate_s > 0) == (torch.cuda.device_count() >= 2)


@pytest.mark.gpu
@two_gpus
def test_gpu_a_communicator_heeds_its_blocks_but_perhaps_not_in_an_all_to_all() -> None:
    how: dict[str, Any] = {"ranks": 2, "place": Loopback(), "join": {"backend": "nccl"}}
    rows = launch.launch(controls.controls_job, controls.ControlsSettings(), **how)["controls"]
    by_operation = rows[rows["level"] == "communicator"].groupby("operation")["outcome"]
    assert set(by_operation.get_group("all_reduce")) == {HEEDED}
    if IGNORED in set(by_operation.get_group("all_to_all")):
        pytest.xfail(f"NVIDIA/nccl#2421 holds in NCCL {torch.cuda.nccl.version()}")
