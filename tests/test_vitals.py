"""Vitals: what nvidia-smi prints is read right, and a busy GPU is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import smi
from ddlkit import store
from ddlkit.run.instruments import vitals
from places import wait_for

# As printed by nvidia-smi 580 of the last two of four GPUs, the second one without a power sensor.
TWO_GPUS = "2, 1980, 3201, 45, 350.12, 98, 2048\n3, 345, 3201, 31, [N/A], 0, 4\n"
BUSY = {"utilization.gpu": "98"}
FULL = {"memory.used": "40960"}
NOBODY = "99999999"  # no pid of this machine


def test_units_are_those_of_the_names() -> None:
    numbers: dict[str, int] = {}
    found = [one for line in TWO_GPUS.splitlines() for one in vitals.parse_vitals(line, numbers)]
    assert found == vitals.parse_vitals(TWO_GPUS, {})
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


@pytest.mark.parametrize("text", ["", "No devices were found\n", "0, 1980, 3201\n"])
def test_what_is_not_understood_is_left_out(text: str) -> None:
    assert vitals.parse_vitals(text, {}) == []


@pytest.mark.parametrize(
    ("gpus", "strangers", "used"),
    [
        ([{}, {**BUSY, **FULL}], [], "gpu1 is in use by others: utilisation 98% or more for 0.5 s"),
        ([BUSY], ["GPU-0"], "gpu0 is in use by others: utilisation 98% or more for 0.5 s"),
        ([BUSY], [], ""),  # a driver that starts
        ([BUSY, {}], ["GPU-1"], ""),
        ([FULL], ["GPU-0"], ""),  # somebody rests
        ([{**BUSY, "memory.used": "[N/A]"}], [], ""),
    ],
)
def test_a_gpu_is_in_use_if_it_is_busy_with_company_at_every_look(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[dict[str, str]],
    strangers: list[str],
    used: str,
) -> None:
    monkeypatch.setattr(vitals, "PATIENCE_S", 0.5)
    ours = [{"gpu_uuid": "GPU-0", "pid": str(pid)} for pid in (os.getpid(), os.getppid())]
    processes = [*ours, *({"gpu_uuid": uuid, "pid": NOBODY} for uuid in strangers)]
    smi.install(tmp_path, monkeypatch, *gpus, processes=processes)
    assert vitals.gpu_in_use() == used


def test_a_driver_that_starts_anew_for_each_question_is_not_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process that asks by itself finds it busy, and with the memory of what starts it."""
    played = smi.install(tmp_path, monkeypatch, FULL, starts=True)
    assert [x for _, what, x in vitals.gpu_vitals() if what == "utilisation"] == [1.0]
    assert vitals.gpu_in_use() == ""
    assert not psutil.pid_exists(played.resident())


def test_without_nvidia_smi_nobody_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vitals.gpu_in_use() == "" and vitals.gpu_vitals() == []
    with vitals.Sampler(gpu=True, period_s=0.02) as sampler:
        assert wait_for(lambda: len(sampler.frame()) > 0)


def test_the_gpus_are_sampled_by_one_process_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = smi.install(tmp_path, monkeypatch, {}, BUSY)
    with vitals.Sampler(gpu=True, period_s=0.05) as sampler:
        gpus = ("gpu0", "gpu1")
        assert wait_for(lambda: (sampler.frame()["device"] == "gpu1").sum() >= 9)
        assert wait_for(lambda: "cpu" in set(sampler.frame()["device"]))
    frame = sampler.frame()
    assert len(played.asked()) == 1 and not psutil.pid_exists(played.resident())
    assert frame["time_s"].is_monotonic_increasing and set(frame["device"]) == {"cpu", *gpus}
    loads = frame[frame["quantity"] == "utilisation"].groupby("device")["value"].agg(set)
    assert loads.to_dict() == {"gpu0": {0.0}, "gpu1": {0.98}}


def test_it_does_not_outlive_one_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = smi.install(tmp_path, monkeypatch)
    sampling = "from ddlkit.run.instruments import vitals as v; v.Sampler(gpu=True).__enter__(); "
    with subprocess.Popen(
        [sys.executable, "-c", sampling + "input()"], stdin=subprocess.PIPE
    ) as owner:
        assert wait_for(lambda: played.resident() > 0)
        assert psutil.pid_exists(played.resident())
        owner.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not psutil.pid_exists(played.resident()))


def test_samples_are_taken_meanwhile_and_fit_the_store(tmp_path: Path) -> None:
    with vitals.Sampler(gpu=False, period_s=0.02) as sampler:
        assert wait_for(lambda: sampler.frame()["time_s"].nunique() >= 3)
    frame = sampler.frame()
    assert frame["time_s"].is_monotonic_increasing
    assert {"load", "available_bytes"} <= set(frame["quantity"])
    assert frame[frame["quantity"] == "load"]["value"].between(0, 1).all()
    time.sleep(0.1)
    assert len(sampler.frame()) == len(frame), "it goes on after its block"
    path = store.save_table(frame, tmp_path, "vitals.csv.gz", schema="vitals", command=[])
    assert len(store.load_table(path)) == len(frame)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_tells_its_clock_and_temperature() -> None:
    found = {(device, quantity): value for device, quantity, value in vitals.gpu_vitals()}
    assert 1e8 < found["gpu0", "sm_clock_hz"] < 1e10
    assert 0 < found["gpu0", "temperature_c"] < 120
