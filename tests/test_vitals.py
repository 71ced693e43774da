"""Vitals: what nvidia-smi prints is read right, a busy GPU is noticed, and what was disturbed is marked."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import smi
from ddlkit import store
from ddlkit.jobs import vitals
from ddlkit.jobs.vitals import BUSY_LIMIT, LATE_LIMIT, Usage, processor_usage
from ddlkit.lab import tunnel
from ddlkit.model.calibration import OTHERS_LIMIT, STOLEN_LIMIT
from places import wait_for

# As printed by nvidia-smi 580 of the last two of four GPUs, the second one without a power sensor.
TWO_GPUS = "2, 1980, 3201, 45, 350.12, 98, 2048\n3, 345, 3201, 31, [N/A], 0, 4\n"
BUSY = {"utilization.gpu": "98"}
FULL = {"memory.used": "40960"}
Times = namedtuple("Times", "user system idle iowait nice steal guest")
SHARES = st.floats(0, 1)


@given(st.lists(st.floats(0.1, 1), min_size=6, max_size=6))
def test_shares_are_those_of_the_time_that_passed(spent: list[float]) -> None:
    user, system, _, _, nice, steal = spent
    used = processor_usage(Times(*[5] * 7), Times(*(np.array([*spent, user]) + 5)))
    assert used.busy == pytest.approx((user + system + nice + steal) / sum(spent))
    assert used.stolen == pytest.approx(steal / sum(spent))


@given(SHARES, SHARES, SHARES)
def test_a_run_is_marked_where_any_one_of_the_three_is_beyond_its_limit(
    busy: float, stolen: float, late: float
) -> None:
    used = Usage(busy, stolen, late)
    assert used.limited == (
        busy >= BUSY_LIMIT or stolen > STOLEN_LIMIT or late > LATE_LIMIT
    )
    assert used.disturbed == (stolen > STOLEN_LIMIT), "taken again"


@given(st.lists(st.tuples(SHARES, SHARES), min_size=1, max_size=4))
def test_what_no_rank_took_was_taken_by_others(
    ranks: list[tuple[float, float]],
) -> None:
    """User code of the machine, as all ranks see it, less that of every rank; retries end some time."""
    own = [each for each, _ in ranks]
    everyone = np.array([(0.5, 0.0, 0.0, user, each) for each, user in ranks])
    used, left = Usage.of_ranks(everyone), vitals.Retries(2)
    assert used.others == pytest.approx(max(0.0, everyone[:, 3].max() - sum(own)))
    assert used.disturbed == (used.others > OTHERS_LIMIT)
    with patch.object(vitals, "RETRY_S", 0.0):
        assert [left.again(used) for _ in range(3)] == [
            used.disturbed,
            used.disturbed,
            False,
        ]


def test_each_repeat_is_numbered_and_what_is_kept_at_last_is_said_once() -> None:
    said: list[str] = []
    disturbed = Usage(busy=1.0, stolen=2 * STOLEN_LIMIT)
    retries = vitals.Retries(2, say=said.append)
    with patch.object(vitals, "RETRY_S", 0.0):
        assert [retries.again(disturbed) for _ in range(4)] == [
            True,
            True,
            False,
            False,
        ]
    first, second, kept = said
    assert "repeat 1 of at most 2" in first and "repeat 2 of at most 2" in second
    assert len(second) < len(first), "only the first line says what a repeat is"
    assert "all 2 repeats of this measurement" in kept


def test_nothing_is_repeated_on_a_gpu() -> None:
    disturbed = Usage(busy=1.0, stolen=2 * STOLEN_LIMIT)
    with patch.object(vitals, "RETRY_S", 0.0):
        assert vitals.Retries.on("cpu").again(disturbed)
        assert not vitals.Retries.on("cuda").again(disturbed)


def test_a_busy_neighbour_shows_and_our_own_work_does_not() -> None:
    """Half a second of one core, by this process, and by another."""
    watch, end_s = vitals.Watch(), time.perf_counter() + 0.5
    while time.perf_counter() < end_s:
        pass
    own = watch.usage()
    busy = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    watch = vitals.Watch()
    subprocess.run([sys.executable, "-c", busy], check=True)
    theirs = watch.usage()
    assert own.own > 0 and theirs.own < 0.1 * own.own and theirs.user > theirs.own


@pytest.mark.parametrize(
    ("early", "late", "full"), [(0, 0, False), (3, 1, False), (9, 0, True)]
)
def test_a_run_is_marked_late_as_its_link_says_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: int, late: int, full: bool
) -> None:
    """Rank 0 reads before and after what has crossed; the others see nothing late."""
    link = tmp_path / "link"
    monkeypatch.setenv(vitals.LINK, str(link))
    link.write_bytes(tunnel.CROSSED.pack(3, 1, 1.0, 2.0))
    watches = vitals.Watch(0), vitals.Watch(1)
    spent = (1.0, 1.0 if full else 0.1)
    link.write_bytes(
        tunnel.CROSSED.pack(3 + early + late, 1 + late, 1 + spent[0], 2 + spent[1])
    )
    share = late / (early + late) if early + late else 0.0
    assert watches[0].usage().late == pytest.approx(1.0 if full else share)
    assert watches[1].usage().late == 0


def test_units_are_those_of_the_names() -> None:
    samples = vitals.parse_vitals(TWO_GPUS)
    assert samples[:6] == [
        ("gpu2", "sm_clock_hz", 1980e6),
        ("gpu2", "memory_clock_hz", 3201e6),
        ("gpu2", "temperature_c", 45.0),
        ("gpu2", "power_w", 350.12),
        ("gpu2", "utilisation", 0.98),
        ("gpu2", "memory_used_bytes", 2.0**31),
    ]
    second = [quantity for device, quantity, _ in samples if device == "gpu3"]
    assert "power_w" not in second and len(second) == 5
    # With the reasons for which clocks are lowered: here the limit of power.
    limited = TWO_GPUS.replace("98, 2048", "98, 2048, 0x0000000000000004")
    assert vitals.parse_vitals(limited)[6] == ("gpu2", "throttle_reasons", 4.0)
    assert vitals.parse_vitals("No devices were found\n") == []


@pytest.mark.parametrize(
    ("gpus", "used"),
    [
        (
            [{}, {**BUSY, **FULL}],
            "gpu1 is in use by others: utilisation 98% or more for 0.2 s",
        ),
        ([BUSY], ""),  # a driver that starts
        ([FULL], ""),  # somebody rests
        ([{**BUSY, "memory.used": "1024"}], ""),  # more than 1 GiB counts
    ],
)
def test_a_gpu_is_in_use_if_it_is_busy_with_company_at_every_look(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[dict[str, str]],
    used: str,
) -> None:
    monkeypatch.setattr(vitals, "PATIENCE_S", 0.2)
    monkeypatch.setattr(vitals, "LOOK_PERIOD_S", 0.1)
    smi.install(tmp_path, monkeypatch, *gpus)
    assert vitals.gpu_in_use() == used


def test_all_are_sampled_into_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.install(tmp_path / "bin", monkeypatch, {}, BUSY)
    # Other tests of this process may have started a fork server, which goes on.
    before = psutil.Process().children()
    with vitals.Sampler(gpu=True, period_s=0.02) as sampler:
        assert wait_for(lambda: sampler.frame()["time_s"].nunique() >= 3)
        assert wait_for(lambda: "gpu1" in set(sampler.frame()["device"]))
        (reporter,) = set(psutil.Process().children()) - set(before)
    assert not reporter.is_running(), "one process for all samples, which has ended"
    frame = sampler.frame()
    assert frame["time_s"].is_monotonic_increasing
    assert {"load", "stolen"} <= set(frame["quantity"])
    loads = (
        frame[frame["quantity"] == "utilisation"].groupby("device")["value"].agg(set)
    )
    assert loads.to_dict() == {"gpu0": {0.0}, "gpu1": {0.98}}
    path = store.save_table(
        frame, tmp_path, "vitals-s1.csv.gz", schema="vitals", command=[]
    )
    assert len(store.load_table(path)) == len(frame)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vitals.gpu_in_use() == "" and vitals.gpu_vitals() == [], "without nvidia-smi"
    with vitals.Sampler(gpu=True, period_s=0.02) as sampler:
        assert wait_for(lambda: len(sampler.frame()) > 0)
    assert set(sampler.frame()["device"]) == {"cpu"}


@pytest.mark.parametrize(
    ("known", "reasons"),
    [
        ("clocks_event_reasons.active", {4.0}),
        ("clocks_throttle_reasons.active", {4.0}),
        ("none", set()),
    ],
)
def test_reasons_for_lower_clocks_are_sampled_while_a_gpu_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, reasons: set[float]
) -> None:
    """A driver that knows neither name tells everything else all the same."""
    monkeypatch.delitem(smi.IDLE, "clocks_event_reasons.active")
    smi.install(tmp_path / "bin", monkeypatch, {known: "0x0000000000000004"})
    with vitals.Sampler(gpu=True, period_s=0.02) as sampler:
        assert wait_for(lambda: "gpu0" in set(sampler.frame()["device"]))
        assert wait_for(lambda: sampler.frame()["time_s"].nunique() >= 3)
    frame = sampler.frame().set_index("quantity")
    assert {*frame["value"].get(["throttle_reasons"], [])} == reasons
    assert "utilisation" in frame.index


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_tells_its_clock_and_temperature() -> None:
    seen = {quantity: value for _, quantity, value in vitals.gpu_vitals()}
    assert 1e8 < seen["sm_clock_hz"] < 1e10
    assert 0 < seen["temperature_c"] < 120
