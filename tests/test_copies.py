"""Copies: what is said to be cold is cold, every kind and size is there, and bytes arrive."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from ddlkit import store
from ddlkit.core.units import KIB, MIB
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.measure import copies
from ddlkit.run.sessions.session import Partial, Unavailable

FEW = Budget(warmup=1, min_repeats=3, max_repeats=5, max_s=0.5)
SIZES = (4 * KIB, 256 * KIB, 4 * MIB)


def bandwidth(frame: object, kind: str, size: int) -> float:
    rows = frame[(frame["copy"] == kind) & (frame["bytes"] == size)]  # type: ignore[index]
    return float(size / rows["seconds"].median())


def test_memcpy_moves_bytes_at_a_rate_that_memory_can_have(tmp_path: Path) -> None:
    frame = copies.measure_copies("cpu", SIZES, FEW)
    store.save_table(frame, tmp_path, "copies", schema="copies", command=[])
    assert set(frame["copy"]) == {"memcpy"} and set(frame["bytes"]) == set(SIZES)
    for size in SIZES:
        assert 1e7 < bandwidth(frame, "memcpy", size) < 1e13


@pytest.mark.parametrize("size", [1, 5, 8, 64])
def test_copies_walk_through_the_whole_pool(size: int) -> None:
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    every = Budget(warmup=0, min_repeats=64, max_repeats=64, max_s=9.0)
    per_sample, seconds = copies._copy_s("memcpy", target, source, size, torch.device("cpu"), every)
    slots = 64 // size
    assert per_sample == min(32, slots) and len(seconds) == 64
    expected = torch.cat([source[at * size :][:size] for at in reversed(range(slots))])
    assert torch.equal(target[: slots * size], expected)


def test_sizes_that_do_not_fit_into_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=8 * 64 * KIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(
        Partial, match="no copies of 128 KiB, 1 MiB: .* free memory is 64 KiB"
    ) as part:
        copies.measure_copies("cpu", (4 * KIB, 64 * KIB, 128 * KIB, MIB), FEW)
    assert set(part.value.tables["copies"]["bytes"]) == {4 * KIB, 64 * KIB}
    with pytest.raises(Unavailable, match="no copies of 1 MiB"):
        copies.measure_copies("cpu", (MIB,), FEW)


def test_a_dropped_file_is_out_of_memory_and_reading_brings_it_back(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as file:
        file.write(np.random.default_rng(0).bytes(MIB))
        os.fsync(file.fileno())
        assert copies.resident_share(file) == 1
        try:
            copies.evict(file)
        except Unavailable as reason:
            pytest.skip(str(reason))
        assert copies.resident_share(file) == 0
        file.seek(0)
        file.read()
        assert copies.resident_share(file) == 1


def test_disk_reads_are_cached_and_cold_and_leave_no_file(tmp_path: Path) -> None:
    try:
        frame = copies.measure_disk(tmp_path, (64 * KIB, MIB), FEW)
    except Partial as partial:
        frame = partial.tables["copies"]
        assert set(frame["copy"]) == {"disk_cached"}
    else:
        assert set(frame["copy"]) == {"disk_cached", "disk_cold"}
        # Half of them: one read may be as quick as memory, not most.
        assert bandwidth(frame, "disk_cold", MIB) < bandwidth(frame, "disk_cached", MIB)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_dropped_the_cached_times_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "resident_share", lambda _: 0.5)
    monkeypatch.setattr(copies, "_DROP_PERIOD_S", 0.0)
    with pytest.raises(Partial, match="50% of a dropped file stayed in memory") as caught:
        copies.measure_disk(tmp_path, (64 * KIB,), FEW)
    assert set(caught.value.tables["copies"]["copy"]) == {"disk_cached"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "kind", ["h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable", "d2d"]
)
def test_gpu_copies_arrive(kind: str) -> None:
    device = torch.device("cuda")
    target, source = copies._pools(device, MIB)[kind]
    every = Budget(warmup=0, min_repeats=16, max_repeats=16, max_s=9.0)
    copies._copy_s(kind, target, source, MIB // 16, device, every)
    torch.cuda.synchronize()
    # The pools are walked in opposite directions.
    assert torch.equal(target.cpu(), source.cpu().view(16, -1).flip(0).reshape(-1))
