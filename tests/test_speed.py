"""Products, copies and drift: every size there, at rates that are possible, and bytes arrive."""

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
from ddlkit.jobs.clock import Budget
from ddlkit.measure import copies
from ddlkit.measure.session import Partial
from workbook.common import specs
from workbook.record import speed

FEW = Budget(warmup=0, min_repeats=1, max_repeats=2, max_s=0.1)


def test_peaks_and_drift_are_the_same_work_at_a_rate_that_is_possible(
    tmp_path: Path,
) -> None:
    peaks = speed.measure_peaks("cpu", ["fp32", "bf16"], [64, 128], FEW)
    store.save_table(peaks, tmp_path, "peaks", schema="peaks", command=[])
    assert (2 * peaks["side"] ** 3 / peaks["seconds"]).between(1e6, 1e15).all()
    assert peaks.groupby(["precision", "side"]).ngroups == 4
    with pytest.raises(UserError, match="^out of memory"):
        speed.measure_peaks("cpu", ["fp32"], [10**8], FEW)
    drift = pd.concat(
        speed.measure_drift(at, "cpu", 64, 2**16) for at in ("start", "end")
    )
    store.save_table(drift, tmp_path, "drift", schema="drift", command=[])
    assert (
        set(drift.groupby("work")["moment"].nunique()) == {2}
        and drift["work"].nunique() == 2
    )


def test_datasheets_are_read_by_the_name_that_the_driver_gives() -> None:
    assert specs.datasheet("NVIDIA H200", "bf16_flops_per_s") == pytest.approx(989.5e12)
    assert specs.datasheet("Tesla V100-SXM2-32GB", "memory_bytes_per_s") == 900e9


@pytest.mark.parametrize("size", [5, 64])
def test_copies_walk_through_the_whole_pool(size: int) -> None:
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    every = Budget(warmup=0, min_repeats=64, max_repeats=64, max_s=9.0)
    per_sample, seconds = copies._time_copies(target, source, size, every)
    slots = 64 // size
    assert per_sample == min(32, slots) and len(seconds) == 64
    expected = torch.cat([source[at * size :][:size] for at in reversed(range(slots))])
    assert torch.equal(target[: slots * size], expected)


def test_sizes_that_do_not_fit_into_memory_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * 64 * KIB)
    )
    with pytest.raises(
        Partial, match="no copies of 128 KiB: .* free memory is 64 KiB"
    ) as part:
        copies.measure_copies("cpu", (4 * KIB, 64 * KIB, 128 * KIB), FEW)
    table = part.value.tables["copies"]
    store.save_table(table, tmp_path, "copies", schema="copies", command=[])
    assert set(table["copy"]) == {"memcpy"} and set(table["bytes"]) == {
        4 * KIB,
        64 * KIB,
    }
    assert (table["bytes"] / table["seconds"]).between(1e6, 1e13).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_copies_arrive() -> None:
    every = Budget(warmup=0, min_repeats=16, max_repeats=16, max_s=9.0)
    for target, source in copies._pools(torch.device("cuda"), MIB).values():
        copies._time_copies(target, source, MIB // 16, every)
        torch.cuda.synchronize()
        # The pools are walked in opposite directions.
        assert torch.equal(target.cpu(), source.cpu().view(16, -1).flip(0).reshape(-1))
