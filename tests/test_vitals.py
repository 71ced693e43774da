"""Vitals: what nvidia-smi prints is read right, a busy GPU is noticed, and facts name no host."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import pytest
import torch

from ddlkit import store
from ddlkit.run.instruments import vitals

# As printed by nvidia-smi 580: two GPUs, the second one without a power sensor.
TWO_GPUS = "1980, 3201, 45, 350.12, 98, 2048\n345, 3201, 31, [N/A], 0, 4\n"


def test_units_are_those_of_the_names() -> None:
    found = vitals.parse_vitals(TWO_GPUS)
    assert found[:6] == [
        ("gpu0", "sm_clock_hz", 1980e6),
        ("gpu0", "memory_clock_hz", 3201e6),
        ("gpu0", "temperature_c", 45.0),
        ("gpu0", "power_w", 350.12),
        ("gpu0", "utilisation", 0.98),
        ("gpu0", "memory_used_bytes", 2.0**31),
    ]
    assert [quantity for device, quantity, _ in found if device == "gpu1"] == [
        *("sm_clock_hz", "memory_clock_hz", "temperature_c", "utilisation", "memory_used_bytes"),
    ]


@pytest.mark.parametrize("text", ["", "No devices were found\n", "1980, 3201\n"])
def test_what_is_not_understood_is_left_out(text: str) -> None:
    assert vitals.parse_vitals(text) == []


def test_a_gpu_is_in_use_if_it_is_busy_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "LOOK_PERIOD_S", 0.0)

    def said(*looks: list[tuple[str, str, float]]) -> str:
        answers = iter(looks)
        monkeypatch.setattr(vitals, "gpu_vitals", lambda: next(answers))
        return vitals.gpu_in_use()

    busy, idle = vitals.parse_vitals(TWO_GPUS), [("gpu0", "utilisation", 0.0)]
    assert said(busy, busy, busy).startswith("gpu0 is in use by others: utilisation 98%")
    assert said(busy, busy, idle) == said(idle, busy, busy) == said(busy, [], busy) == ""
    assert said([], [], []) == ""


def test_samples_are_taken_meanwhile_and_fit_the_store(tmp_path: Path) -> None:
    with vitals.Sampler(gpu=False, period_s=0.02) as sampler:
        deadline = time.monotonic() + 5
        while sampler.frame()["time_s"].nunique() < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
    frame = sampler.frame()
    assert frame["time_s"].nunique() >= 3
    assert frame["time_s"].is_monotonic_increasing
    assert {"load", "available_bytes"} <= set(frame["quantity"])
    assert frame[frame["quantity"] == "load"]["value"].between(0, 1).all()
    time.sleep(0.1)
    assert len(sampler.frame()) == len(frame), "it goes on after its block"
    path = store.save_table(frame, tmp_path, "vitals.csv.gz", schema="vitals", command=[])
    assert len(store.load_table(path)) == len(frame)


def test_facts_are_complete_and_tell_no_host_from_another(tmp_path: Path) -> None:
    frame = vitals.facts()
    store.save_table(frame, tmp_path, "facts", schema="facts", command=[])
    known = {(row.subject, row.fact): row.value for row in frame.itertuples()}
    assert (
        known["library", "torch"] == torch.__version__.partition("+")[0] or "+" in torch.__version__
    )
    assert int(known["memory", "total_bytes"]) > 2**27
    assert int(known["torch", "threads"]) == torch.get_num_threads()
    said = " ".join(map(str, known.values()))
    assert platform.node() not in said and "GPU-" not in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_tells_its_clock_and_temperature() -> None:
    found = {(device, quantity): value for device, quantity, value in vitals.gpu_vitals()}
    assert 1e8 < found["gpu0", "sm_clock_hz"] < 1e10
    assert 0 < found["gpu0", "temperature_c"] < 120
    frame = vitals.facts()
    assert {"driver_version", "multi_processor_count"} <= set(
        frame[frame.subject == "gpu0"]["fact"]
    )
