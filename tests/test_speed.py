"""Products, copies and drift: the same sums by each kernel, every size there, and bytes arrive."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.measure import speed
from ddlkit.run.sessions import Partial, Unavailable

ONCE = Budget(warmup=0, min_repeats=1, max_repeats=1)
FEW = Budget(warmup=1, min_repeats=3, max_repeats=5, max_s=0.1)
SIZES = (4 * KIB, 256 * KIB)


def test_peaks_are_products_at_a_rate_that_is_possible(tmp_path: Path) -> None:
    frame = speed.measure_peaks("cpu", ["fp32", "bf16"], [64, 128], ONCE)
    store.save_table(frame, tmp_path, "peaks", schema="peaks", command=[])
    assert set(frame["kernel"]) == {"product", "convolution"}
    rate = 2 * frame["side"] ** 3 / frame["seconds"]
    assert (rate > 1e6).all() and (rate < 1e15).all()
    with pytest.raises(UserError, match="^out of memory"):
        speed.measure_peaks("cpu", ["fp32"], [10**8], ONCE)


@pytest.mark.parametrize("side", [1, 7, 64])
def test_the_convolution_is_the_product(side: int) -> None:
    left, right = torch.randn(2, side, side, dtype=torch.float64)
    torch.testing.assert_close(speed._convolution(left, right, torch.empty(0)), left @ right)


def test_datasheets_are_read_by_the_name_that_the_driver_gives() -> None:
    assert store.datasheet("NVIDIA H200", "bf16_flops_per_s") == pytest.approx(989.5e12)
    assert store.datasheet("Tesla V100-SXM2-32GB", "memory_bytes_per_s") == 900e9
    assert store.datasheet("NVIDIA H200", "bf17_flops_per_s") == 0


def test_drift_is_the_same_work_at_both_moments(tmp_path: Path) -> None:
    frames = [speed.measure_drift(moment, "cpu", 64, 2**16) for moment in ("start", "end")]
    frame = pd.concat(frames, ignore_index=True)
    store.save_table(frame, tmp_path, "drift", schema="drift", command=[])
    assert set(frames[0]["work"]) == set(frames[1]["work"]) and frame["work"].nunique() == 2


def test_memcpy_moves_bytes_at_a_rate_that_memory_can_have(tmp_path: Path) -> None:
    frame = speed.measure_copies("cpu", SIZES, FEW)
    store.save_table(frame, tmp_path, "copies", schema="copies", command=[])
    assert set(frame["copy"]) == {"memcpy"} and set(frame["bytes"]) == set(SIZES)
    assert (frame["bytes"] / frame["seconds"]).between(1e7, 1e13).all()


@pytest.mark.parametrize("size", [1, 5, 64])
def test_copies_walk_through_the_whole_pool(size: int) -> None:
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    every = Budget(warmup=0, min_repeats=64, max_repeats=64, max_s=9.0)
    per_sample, seconds = speed._copy_s("memcpy", target, source, size, torch.device("cpu"), every)
    slots = 64 // size
    assert per_sample == min(32, slots) and len(seconds) == 64
    expected = torch.cat([source[at * size :][:size] for at in reversed(range(slots))])
    assert torch.equal(target[: slots * size], expected)


def test_sizes_that_do_not_fit_into_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=8 * 64 * KIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(Partial, match="no copies of 128 KiB: .* free memory is 64 KiB") as part:
        speed.measure_copies("cpu", (4 * KIB, 64 * KIB, 128 * KIB), FEW)
    assert set(part.value.tables["copies"]["bytes"]) == {4 * KIB, 64 * KIB}
    with pytest.raises(Unavailable, match="no copies of 1 MiB"):
        speed.measure_copies("cpu", (MIB,), FEW)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "kind", ["h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable", "d2d"]
)
def test_gpu_copies_arrive(kind: str) -> None:
    device = torch.device("cuda")
    target, source = speed._pools(device, MIB)[kind]
    every = Budget(warmup=0, min_repeats=16, max_repeats=16, max_s=9.0)
    speed._copy_s(kind, target, source, MIB // 16, device, every)
    torch.cuda.synchronize()
    # The pools are walked in opposite directions.
    assert torch.equal(target.cpu(), source.cpu().view(16, -1).flip(0).reshape(-1))
