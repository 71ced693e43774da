"""Throughput, peaks and the share of them that networks reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.papers import osf
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure import channels, throughput
from ddlkit.run.measure.layers import profile_layers
from ddlkit.run.nets import registry
from ddlkit.run.sessions.session import Partial

ONCE = Budget(warmup=0, min_repeats=1, max_repeats=1)
FEW = Budget(warmup=1, min_repeats=3, max_repeats=5, max_s=0.5)
CPU: dict[str, Any] = {"device": "cpu", "precision": "fp32", "iterations": 3}


class Counted(nn.Module):
    """A layer that remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.clone())
        out: Tensor = self.linear(x)
        return out


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A network by the name of "mine"."""
    network = Counted()

    def sample(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if n > 100:
            torch.empty(10**15)
        return torch.randn(n, 4, generator=generator), torch.zeros(n, dtype=torch.int64)

    monkeypatch.setitem(registry.NETWORKS, "mine", registry.Network(lambda: network, sample))
    return network


def test_samples_are_whole_iterations_on_data_that_change(counted: Counted, tmp_path: Path) -> None:
    frame = throughput.measure_throughput("mine", [8], budget=FEW, **CPU)
    store.save_table(frame, tmp_path, "throughput", schema="throughput", command=[])
    assert len(counted.seen) == 3 * (len(frame) + FEW.warmup)
    assert not torch.equal(counted.seen[0], counted.seen[1])
    assert torch.equal(counted.seen[0], counted.seen[throughput.INPUTS])
    assert counted.linear.weight.grad is None, "gradients were not cleared: no whole iteration"


def test_memory_that_runs_out_costs_the_larger_batches_only(counted: Counted) -> None:
    with pytest.raises(Partial, match="^out of memory: mine at batch 101 in fp32 on cpu") as caught:
        throughput.measure_throughput("mine", [101, 4, 8], budget=ONCE, **CPU)
    assert list(caught.value.tables["throughput"]["batch"]) == [4, 8]
    with pytest.raises(UserError, match="^out of memory") as nothing:
        throughput.measure_throughput("mine", [101], budget=ONCE, **CPU)
    assert not isinstance(nothing.value, Partial)


def test_peaks_are_products_at_a_rate_that_is_possible(tmp_path: Path) -> None:
    frame = throughput.measure_peaks("cpu", ["fp32", "bf16"], [64, 128], ONCE)
    store.save_table(frame, tmp_path, "peaks", schema="peaks", command=[])
    assert set(frame["kernel"]) == {"product", "convolution"}
    rate = 2 * frame["side"] ** 3 / frame["seconds"]
    assert (rate > 1e6).all() and (rate < 1e15).all()
    with pytest.raises(UserError, match="^out of memory"):
        throughput.measure_peaks("cpu", ["fp32"], [10**8], ONCE)


@pytest.mark.parametrize("side", [1, 7, 64, 96])
def test_the_convolution_is_the_product(side: int) -> None:
    left, right = torch.randn(2, side, side, dtype=torch.float64)
    found = throughput._convolution(left, right, torch.empty(0))
    torch.testing.assert_close(found, left @ right)


def test_efficiency_is_osf_eq_5_on_what_was_recorded(tmp_path: Path) -> None:
    profile, _ = profile_layers("lenet5", 4, threads=1, budget=ONCE)
    frame = store.profile_frame(profile, "fp32", ranks=1, threads=1)
    gpu = {"name": "test", "gpus": [{"model": "NVIDIA H200"}]}
    options: dict = {"schema": "layers", "command": []}
    store.save_table(frame, tmp_path, "layers-a", **options)
    store.save_table(frame.assign(device="cuda"), tmp_path, "layers-b", **options, machine=gpu)
    rows = {
        "device": "cpu",
        "precision": "fp32",
        "kernel": "product",
        "side": [10, 20, 20],
        "sample": [0, 0, 1],
    }
    measured = pd.DataFrame({**rows, "seconds": [1e-6, 4e-6, 4e-6]})  # 2 and 4 GFLOP/s
    store.save_table(measured, tmp_path, "peaks-x", schema="peaks", command=[])

    found = throughput.efficiency(tmp_path).set_index("device")
    store.save_table(found.reset_index(), tmp_path, "efficiency", schema="efficiency", command=[])
    flops, compute_s = profile.flops.sum(), (profile.forward_s + profile.backward_s).sum()
    assert found["measured_flops_per_s"].to_dict() == {"cpu": pytest.approx(4e9), "cuda": 0}
    assert found["datasheet_flops_per_s"].to_dict() == {"cpu": 0, "cuda": 67e12}
    assert found["measured_c"]["cpu"] == pytest.approx(3 * flops / (compute_s * 4e9))
    assert found["datasheet_c"]["cuda"] == pytest.approx(3 * flops / (compute_s * 67e12))
    # Eq 5 with that c gives the measured time back.
    c = osf.utilisation(flops, compute_s, 4e9)
    assert 3 * flops / (c * 4e9) == pytest.approx(compute_s)


def test_datasheets_are_read_by_the_name_that_the_driver_gives() -> None:
    assert store.datasheet("NVIDIA H200", "bf16_flops_per_s") == pytest.approx(989.5e12)
    assert store.datasheet("Tesla V100-SXM2-32GB", "memory_bytes_per_s") == 900e9
    assert store.datasheet("NVIDIA H200", "bf17_flops_per_s") == 0
    names = (store.DATA / "specs" / "devices.csv").read_text().splitlines()[1:]
    for device in {line.partition(",")[0].partition("|")[0] for line in names}:
        precisions = [store.datasheet(device, f"{p}_flops_per_s") for p in ("fp32", "tf32", "bf16")]
        told = [rate for rate in precisions if rate]
        assert told == sorted(told), f"{device}: a lower precision is slower"


def test_drift_is_the_same_work_at_both_moments(tmp_path: Path) -> None:
    frames = [throughput.measure_drift(moment, "cpu", 64, 2**16) for moment in ("start", "end")]
    frame = pd.concat(frames, ignore_index=True)
    store.save_table(frame, tmp_path, "drift", schema="drift", command=[])
    assert set(frames[0]["work"]) == set(frames[1]["work"]) and frame["work"].nunique() == 2


# -- NCCL's blocks and threads -----------------------------------------------------------------

# Lines as NCCL 2.25 and 2.28 print them; of the latter also what is not a number.
LOG = """\
node:1263644:1263644 [0] NCCL INFO NCCL version 2.25.1+cuda12.8
node:1263644:1263644 [0] NCCL INFO NCCL_MIN_CTAS set by environment to 2.
node:1263644:1263644 [0] NCCL INFO NCCL_MAX_CTAS set by environment to 2.
node:1263644:1263655 [0] NCCL INFO NCCL_NTHREADS set by environment to 256.
node:1263644:1263655 [0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 4 p2p channels
node:1263644:1263655 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =lo
[0] NCCL INFO 2 coll channels, 2 collnet channels, 0 nvls channels, 4 p2p channels, 4 p2p channels per peer
"""


def test_what_nccl_heeds_is_read_from_its_log() -> None:
    heeded, count = channels.read_log(LOG)
    assert heeded == {"NCCL_MIN_CTAS": 2, "NCCL_MAX_CTAS": 2, "NCCL_NTHREADS": 256}
    assert count == 2
    assert channels.read_log("gloo says nothing") == ({}, 0)


def test_the_kernels_shape_is_read_from_a_trace() -> None:
    other = {"cat": "kernel", "name": "gemm", "args": {"grid": [9, 9, 1], "block": [32, 1, 1]}}
    nccl = {
        "cat": "kernel",
        "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "args": {"grid": [2, 1, 1], "block": [288, 1, 1]},
    }
    launch = {"cat": "cuda_runtime", "name": "ncclDevKernel", "args": {}}
    assert channels.kernel_shape({"traceEvents": [launch, other, nccl]}) == (2, 288)
    assert channels.kernel_shape({"traceEvents": [other]}) == (0, 0)


def test_a_setting_reaches_nccl_by_its_environment(tmp_path: Path) -> None:
    told = channels.environment(4, 128, tmp_path)
    assert told["NCCL_MIN_CTAS"] == told["NCCL_MAX_CTAS"] == "4"
    assert told["NCCL_NTHREADS"] == "128" and told["NCCL_PROTO"] == "Simple"
    assert not any("CTAS" in name for name in channels.environment(*channels.DEFAULT, tmp_path))
    assert json.dumps(told)


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


def test_a_setting_that_did_not_take_effect_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launched(
        job: object, settings: channels.ChannelsSettings, *_: object
    ) -> tuple[pd.DataFrame, str]:
        blocks = settings.blocks
        log = LOG if blocks else ""
        heeded = log.replace(
            "MAX_CTAS set by environment to 2", f"MAX_CTAS set by environment to {blocks}"
        )
        heeded = heeded.replace(
            "NTHREADS set by environment to 256", "NTHREADS set by environment to 64"
        )
        taken = {"taken_blocks": [min(blocks, 2)], "taken_threads": [128 * bool(blocks)]}
        frame = pd.DataFrame({"asked_blocks": [blocks], **taken})
        return frame, log if blocks == 8 else heeded

    monkeypatch.setattr(channels, "launch_under", launched)
    whole = channels.measure_channels([(0, 0), (1, 64), (2, 64)], 2, [1000], ONCE)
    assert list(whole["taken_blocks"]) == [0, 1, 2]
    with pytest.raises(
        Partial, match="^4x64: seen with 2 blocks of 128 .*; 8x64: NCCL did not heed"
    ) as some:
        channels.measure_channels([(2, 64), (4, 64), (8, 64)], 2, [1000], ONCE)
    assert list(some.value.tables["channels"]["asked_blocks"]) == [2, 4]
    with pytest.raises(UserError, match="did not heed") as nothing:
        channels.measure_channels([(8, 64)], 2, [1000], ONCE)
    assert not isinstance(nothing.value, Partial)


@pytest.mark.parametrize("taken", [64, 128, 160, 256, 288, 544])
@pytest.mark.parametrize("asked", channels.THREADS)
def test_a_kernel_of_other_threads_than_nccl_makes_of_those_asked_is_told(
    asked: int, taken: int
) -> None:
    """NCCL adds a warp that synchronises, and launches no fewer than four."""
    made = dict(zip(channels.THREADS, (128, 160, 288, 544), strict=True))
    frame = pd.DataFrame({"taken_blocks": [2], "taken_threads": [taken]})
    if taken == made[asked]:
        channels._check_shape(frame, 2, asked)
        return
    with pytest.raises(Partial, match=f"^seen with 2 blocks of {taken} threads$") as some:
        channels._check_shape(frame, 2, asked)
    assert some.value.tables["channels"] is frame


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_nccl_takes_the_blocks_and_threads_asked_for() -> None:
    frame = channels.measure_channels([(1, 64), (4, 512)], 2, [2**20], FEW)
    shapes = frame.drop_duplicates(["asked_blocks", "asked_threads"])
    assert list(shapes["taken_blocks"]) == [1, 4]
    assert list(shapes["taken_threads"]) == [128, 544]
    assert (shapes["taken_channels"] == shapes["taken_blocks"]).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_throughput_and_peaks_are_possible() -> None:
    frame = throughput.measure_throughput(
        "resnet18", [16], device="cuda", precision="bf16", iterations=5, budget=FEW
    )
    assert (frame["seconds"] > 0).all()
    found = throughput.measure_peaks("cuda", ["fp32", "tf32", "bf16"], [4096], FEW)
    rate = (2 * 4096**3 / found["seconds"]).groupby(found["precision"]).median()
    told = store.datasheet(torch.cuda.get_device_name(), "bf16_flops_per_s")
    assert np.isclose(told, 0) or rate["bf16"] < told
