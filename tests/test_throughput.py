"""Throughput, peaks and the share of them that networks reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.measure import throughput

ONCE = Budget(warmup=0, min_repeats=1, max_repeats=1)
FEW = Budget(warmup=1, min_repeats=3, max_repeats=5, max_s=0.5)
CPU: dict[str, Any] = {"device": "cpu", "precision": "fp32", "iterations": 3}


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_peaks_are_possible() -> None:
    found = throughput.measure_peaks("cuda", ["fp32", "tf32", "bf16"], [4096], FEW)
    rate = (2 * 4096**3 / found["seconds"]).groupby(found["precision"]).median()
    told = store.datasheet(torch.cuda.get_device_name(), "bf16_flops_per_s")
    assert np.isclose(told, 0) or rate["bf16"] < told
