"""Communication beside computation: the stand-in does what it says, and what ran together is proven."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs import launch, protocol
from ddlkit.run.jobs.job import Tables
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure import contention, standin
from ddlkit.run.measure.contention import (
    TINY,
    ContentionSettings,
    Exchange,
    measure_beside_all_reduce,
    measure_beside_standin,
    read_trace,
)
from ddlkit.run.measure.copyengine import WAYS, CopyEngine, flow
from ddlkit.run.measure.standin import (
    Compute,
    CpuStandIn,
    Footprint,
    GpuStandIn,
    Passage,
    Traffic,
)
from ddlkit.run.sessions.kinds import Here, kernels_beside_copies, kernels_beside_messages
from ddlkit.run.sessions.session import Partial, Unavailable
from places import PATIENCE_S, wait_for

TWICE = Budget(warmup=1, min_repeats=2, max_repeats=2)


@pytest.fixture(autouse=True)
def no_stand_in_ends_before_its_computation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself after two seconds, for which others may hold the processor."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(standin, "LONGEST_S", PATIENCE_S)


# -- what is said of a passage -----------------------------------------------------------------

times = st.floats(0, 10)


@given(st.lists(st.tuples(times, times), min_size=1), times, st.floats(0.001, 5))
def test_overlap_is_the_share_in_which_every_block_ran(
    blocks: list[tuple[float, float]], opened_s: float, takes_s: float
) -> None:
    begins, ends = (tuple(f(block) for block in blocks) for f in (min, max))
    closed_s = opened_s + takes_s
    share = Traffic(begins, ends, opened_s, closed_s, 0.0).overlap_share
    ticks = np.linspace(opened_s, closed_s, 2001)
    together = np.mean(
        [(begin <= ticks) & (ticks <= end) for begin, end in zip(begins, ends, strict=True)], axis=0
    )
    assert share == pytest.approx(np.mean(together == 1), abs=2e-3)


def test_a_computation_alone_overlaps_with_nothing() -> None:
    alone = Traffic((), (), 1.0, 3.0, 0.0)
    assert alone.overlap_share == alone.bytes_per_s == 0.0
    assert Traffic((0.0,), (9.0,), 1.0, 3.0, 10.0).bytes_per_s == 5.0


@given(st.integers(0, 2000), st.lists(st.integers(1, 10**6), min_size=1, max_size=4))
def test_a_computation_within_a_tick_of_the_timer_ran_beside_what_did(
    takes_ns: int, later_ns: list[int]
) -> None:
    opened = 2**62  # a double does not hold such times
    begins, ends = ([opened + sign * one for one in later_ns] for sign in (-1, 1))
    ends = [end + max(1000, takes_ns) for end in ends]
    words = [1, len(begins), opened, 5, opened + takes_ns, 7, *begins, *ends, *begins]
    traffic = standin._read(torch.tensor(words), 10)
    assert traffic.overlap_share == 1.0
    assert traffic.bytes_per_s == pytest.approx(20e9 / max(1000, takes_ns))


@pytest.mark.parametrize(
    "wrong", [(0, 64, 0.0), (1, 0, 0.0), (1, 641, 0.0), (1, 64, -1.0), (1, 64, float("nan"))]
)
def test_footprint_that_no_kernel_can_have_is_refused(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(UserError, match="communication"):
        Footprint(*wrong)


@given(st.integers(1, 64), st.floats(1e3, 1e12), st.integers(1, 2**20))
def test_blocks_share_the_rate(blocks: int, rate: float, chunk: int) -> None:
    together_s = Footprint(blocks, 64, rate).chunk_s(chunk) / blocks
    assert chunk / together_s == pytest.approx(rate)
    assert Footprint(blocks, 64).chunk_s(chunk) == 0.0


# -- the stand-in of a CPU ---------------------------------------------------------------------


def test_threads_write_sums_and_end() -> None:
    stand_in = CpuStandIn(4 * MIB)
    sums, before = stand_in.a + stand_in.b, threading.active_count()

    def compute() -> None:
        stand_in.c.fill(np.nan)
        assert wait_for(lambda: np.array_equal(stand_in.c, sums))

    passage = stand_in.beside(Footprint(2, 1), compute)
    assert threading.active_count() == before
    assert np.array_equal(stand_in.c, sums)
    traffic = passage.traffic()
    assert len(traffic.begins_s) == 2
    assert traffic.overlap_share == 1.0
    assert traffic.bytes_per_s > 0
    assert passage.marks.seconds()[-1] > 0


def test_rate_is_kept() -> None:
    asked = 100e6
    traffic = CpuStandIn(4 * MIB).beside(Footprint(2, 1, asked), lambda: time.sleep(0.4)).traffic()
    # Since it began; who was held up may catch up. Chunks of 1 MiB: each of two threads may be in one.
    at_most = asked * (traffic.closed_s - min(traffic.begins_s)) + 2 * MIB
    assert traffic.sent_bytes <= at_most


def test_alone_nothing_is_sent() -> None:
    ran: list[int] = []
    traffic = CpuStandIn(MIB).beside(None, lambda: ran.append(1)).traffic()
    assert ran == [1] and traffic.sent_bytes == 0 and traffic.overlap_share == 0


def test_threads_end_when_the_computation_fails() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        CpuStandIn(MIB).beside(Footprint(2, 1), lambda: 1 // 0)
    assert threading.active_count() == before


def test_a_stand_in_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "LONGEST_S", 0.05)
    ended = threading.Event()

    class Ending(CpuStandIn):
        def _send(self, *how: Any) -> tuple[float, float]:
            try:
                return super()._send(*how)
            finally:
                ended.set()

    traffic = Ending(MIB).beside(Footprint(1, 1), lambda: ended.wait(PATIENCE_S)).traffic()
    assert ended.is_set() and traffic.overlap_share < 1
    assert traffic.ends_s[0] < traffic.closed_s


# -- kernels -----------------------------------------------------------------------------------


def test_kernels_are_those_of_the_paper() -> None:
    shapes = {name: kernel.shape for name, kernel in contention.kernels(contention.PAPER).items()}
    image = (64, 64, 224, 224)
    paper = ("average_pooling", "batch_norm", "convolution", "relu")
    assert all(shapes[name] == image for name in paper)
    assert shapes["linear"] == (64, 64, 224 * 224)


@pytest.mark.parametrize("name", contention.kernels(TINY))
def test_kernels_compute(name: str) -> None:
    with torch.no_grad():
        out = contention.kernels(TINY)[name].on(torch.device("cpu"))()
    assert isinstance(out, torch.Tensor) and bool(out.isfinite().all())


def test_table_has_alone_and_every_footprint() -> None:
    footprints = [Footprint(1, 1), Footprint(2, 1, 50e6)]
    table = measure_beside_standin("cpu", "relu", TINY, footprints, TWICE)
    cases = table.groupby(["communication", "blocks", "bytes_per_s_asked"]).size()
    assert cases.to_dict() == {
        ("none", 0, 0.0): 2,
        ("standin", 1, 0.0): 2,
        ("standin", 2, 50e6): 2,
    }
    beside = table[table["communication"] == "standin"]
    assert (beside["overlap_share"] == 1).all()
    assert set(table["shape"]) == {"1x64x32x32"} and set(table["dtype"]) == {"float32"}


class OneByOne(CpuStandIn):
    """A stand-in that communicates once the computation is over, from a number of blocks on."""

    first_blocks = 1

    def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
        if not footprint or footprint.blocks < self.first_blocks:
            return super().beside(footprint, compute)
        seen: list[int] = []
        alone = super().beside(None, compute).traffic()
        after = super().beside(footprint, lambda: seen.append(1)).traffic()
        times = alone.opened_s, alone.closed_s
        marks = clock.timed(compute, "cpu")()
        return Passage(marks, lambda: Traffic(after.begins_s, after.ends_s, *times, 0.0))


THREE = [Footprint(1, 1, 1e9), Footprint(2, 1, 1e9), Footprint(3, 1, 1e9)]


def test_a_neighbour_that_takes_turns_ends_the_point_at_its_first_footprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Footprint | None] = []

    class Watched(OneByOne):
        def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
            tried.append(footprint)
            return super().beside(footprint, compute)

    monkeypatch.setattr(contention, "CpuStandIn", Watched)
    with pytest.raises(
        UserError, match="beside .*blocks=1.* for 0% of it: something has them"
    ) as no:
        measure_beside_standin("cpu", "relu", TINY, THREE, TWICE)
    assert not isinstance(no.value, Partial)
    assert tried == [None, THREE[0]]


def test_footprints_before_the_first_that_takes_turns_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OneByOne, "first_blocks", 3)
    monkeypatch.setattr(contention, "CpuStandIn", OneByOne)
    with pytest.raises(Partial, match="blocks=3.* take turns") as part:
        measure_beside_standin("cpu", "relu", TINY, THREE, TWICE)
    table = part.value.tables["contention"]
    assert table.groupby("blocks").size().to_dict() == {0: 2, 1: 2, 2: 2}
    assert (table.loc[table["communication"] == "standin", "overlap_share"] > 0).all()


@pytest.mark.parametrize("chances", [1, 2])
def test_a_neighbour_has_as_many_chances_as_it_says(
    chances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(OneByOne):
        def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
            passage = super().beside(footprint, compute)
            self.first_blocks += bool(footprint)
            return passage

    monkeypatch.setattr(Late, "chances", chances)
    monkeypatch.setattr(contention, "CpuStandIn", Late)
    if chances == 1:
        with pytest.raises(UserError, match="take turns"):
            measure_beside_standin("cpu", "relu", TINY, THREE[:1], TWICE)
    else:
        assert len(measure_beside_standin("cpu", "relu", TINY, THREE[:1], TWICE)) == 4


def test_a_computation_that_waits_for_its_neighbour_ends_the_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuStandIn, "most_extra_s", -1.0)
    with pytest.raises(UserError, match="for 100% of it: something has them take turns"):
        measure_beside_standin("cpu", "relu", TINY, THREE, TWICE)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (UserError("cuLaunchKernelEx: invalid cluster size (912)"), "cuLaunchKernelEx: invalid"),
        (AttributeError("no such thing"), "AttributeError: no such thing"),
    ],
)
@pytest.mark.parametrize("passages", [3, 9])
def test_whatever_fails_leaves_what_was_measured_before(
    error: Exception, says: str, passages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ways: at the third passage the second one is tried; nine make all tries and two rounds."""
    done: list[Footprint | None] = []

    class Failing(CpuStandIn):
        def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
            done.append(footprint)
            if len(done) == passages or (len(done) > passages and footprint == THREE[1]):
                raise error
            return super().beside(footprint, compute)

    monkeypatch.setattr(contention, "CpuStandIn", Failing)
    four = Budget(warmup=1, min_repeats=4, max_repeats=4)
    with pytest.raises(Partial, match=says) as part:
        measure_beside_standin("cpu", "relu", TINY, THREE[:2], four)
    sizes = part.value.tables["contention"].groupby("blocks").size().to_dict()
    assert sizes == ({0: 4, 1: 4} if passages == 3 else {0: 1, 1: 1, 2: 1})


def test_nothing_but_a_kernel_alone_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Passage:
        raise UserError("the driver refuses")

    plain = CpuStandIn.beside
    monkeypatch.setattr(
        CpuStandIn, "beside", lambda self, way, do: refuse() if way else plain(self, way, do)
    )
    with pytest.raises(UserError, match="^the driver refuses$") as no:
        measure_beside_standin("cpu", "relu", TINY, THREE, TWICE)
    assert not isinstance(no.value, Partial)


def test_what_is_quick_is_measured_until_its_median_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hurried = Budget(warmup=1, min_repeats=3, max_repeats=30, max_s=1e-9)
    monkeypatch.setattr(contention, "QUICK_S", float("inf"))
    table = measure_beside_standin("cpu", "relu", TINY, [], hurried)
    assert len(table) == contention.QUICK_REPEATS
    monkeypatch.setattr(contention, "QUICK_S", 0.0)
    assert len(measure_beside_standin("cpu", "relu", TINY, [], hurried)) == 3


def test_measuring_processes_are_not_told_to_take_turns() -> None:
    told = dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "OTHER"), "1")
    assert set(told) & set(protocol.child_environment(told)) == {"OTHER"}


# -- beside copies -----------------------------------------------------------------------------

spans = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6)


@given(st.lists(spans, min_size=1, max_size=2), st.floats(0, 3), st.floats(0.1, 3))
def test_bytes_flow_evenly_while_a_copy_lasts(
    copies: list[list[float]], opened_s: float, takes_s: float
) -> None:
    count = min(map(len, copies))
    lines = [np.cumsum([0.1, *copy[:count]]) for copy in copies]
    line = np.concatenate([[0.0], *lines, [opened_s, opened_s + takes_s]])
    traffic = flow(line, len(copies), MIB)
    ticks = np.linspace(opened_s, opened_s + takes_s, 20_001)
    rates = [
        np.where((ticks >= a) & (ticks < b), 1 / (b - a), 0.0)
        for own in lines
        for a, b in zip(own[:-1], own[1:], strict=True)
    ]
    expected = MIB * takes_s * float(np.mean(np.sum(rates, axis=0)))
    assert traffic.sent_bytes == pytest.approx(expected, rel=0.02, abs=0.02 * MIB)
    assert traffic.begins_s == pytest.approx([own[0] for own in lines])
    assert traffic.ends_s == pytest.approx([own[-1] for own in lines])


def test_alone_nothing_is_copied() -> None:
    traffic = flow(np.array([0.0, 1.0, 3.0]), 0, MIB)
    assert traffic == Traffic((), (), 1.0, 3.0, 0.0)


def test_a_processor_has_no_copy_engine(tmp_path: Path) -> None:
    (point,) = kernels_beside_copies(Here("cpu", 1, tmp_path), brief=True)
    assert point.estimate_s == 0.0
    with pytest.raises(Unavailable, match="no copy engine"):
        point.measure()


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(UserError, match="unknown kernel 'sort': use one of average_pooling"):
        measure_beside_standin("cpu", "sort", TINY, [], TWICE)


# -- beside all-reduces ------------------------------------------------------------------------


def _event(name: str, start: float, end: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "args": args}


def test_trace_of_gpu_kernels_shows_overlap_and_footprint() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    how: dict[str, Any] = {
        "grid": [8, 1, 1],
        "block": [288, 1, 1],
        "registers per thread": 96,
        "shared memory": 9,
    }
    events = [
        _event("nccl:all_reduce", 0, 99, "gpu_user_annotation"),
        _event(contention.COMPUTE, 0, 99, "user_annotation"),
        _event(nccl, 10, 30, **how),
        _event(nccl, 32, 52, **how),
        _event("void at::cuda::spin_kernel(long)", 0, 20),
        _event("implicit_gemm", 20, 40),
        {"ph": "M", "name": "process_name"},
    ]
    seen = read_trace({"traceEvents": events})
    assert seen.pop("overlap_share") == pytest.approx((10 + 8) / 20)
    assert seen.pop("messages_s") == pytest.approx(42e-6)
    assert seen == {"taken_blocks": 8, "taken_threads": 288, "registers": 96, "shared_bytes": 9}


def test_trace_without_either_proves_nothing() -> None:
    for events in ([_event("gemm", 0, 1)], [_event("ncclDevKernel", 0, 1)], []):
        with pytest.raises(UserError, match="not proven"):
            read_trace({"traceEvents": events})


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), st.sampled_from(["cuda", "cpu"]))
def test_on_a_gpu_a_kernel_that_took_turns_with_messages_leaves_no_row(
    shares: list[float], device: str
) -> None:
    """The others do, and the reason names each that did; on CPUs turns are what is measured."""
    me = Rank(0, 2, 0, torch.device(device), "nccl", 0, 1)
    names = [f"k{number}" for number in range(len(shares))]

    def rows(_: Rank, name: str, *__: object) -> pd.DataFrame:
        pair = {"communication": ["none", "nccl"], "seconds": [1.0, 2.0]}
        return pd.DataFrame({"kernel": name, **pair, "overlap_share": [0, shares[int(name[1:])]]})

    found: list[str] = []
    message = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contention, "beside", rows)
        patch.setattr(contention, "slowest", lambda values: np.array(values, float))
        patch.setattr(contention, "computing", lambda *_: contextlib.nullcontext())
        company = Exchange("nccl", 2, lambda: lambda: None, lambda: None)
        settings = ContentionSettings(0, TINY, TWICE, names)
        try:
            for part in contention.beside_each(me, settings, lambda: company):
                found += set(part["contention"]["kernel"])
        except UserError as error:
            message = str(error)
    kept = [share >= contention.LEAST_OVERLAP or device == "cpu" for share in shares]
    assert found == list(itertools.compress(names, kept))
    refused = re.findall(
        r"beside nccl (k\d) took 2 s, alone 1 s, and both ran at the same", message
    )
    assert refused == [name for name, well in zip(names, kept, strict=True) if not well]


def test_rows_that_a_job_left_before_it_failed_are_kept(tmp_path: Path) -> None:
    def fail() -> None:
        with contention.keeping(tmp_path):
            raise UserError("k1 took turns")

    with pytest.raises(UserError, match="^k1 took turns$") as nothing:
        fail()
    assert not isinstance(nothing.value, Partial)
    beside = measure_beside_standin("cpu", "relu", TINY, [Footprint(1, 1)], TWICE)
    store.save_table(beside, tmp_path, "contention", schema="contention", command=[])
    with pytest.raises(Partial, match="^k1 took turns$") as raised:
        fail()
    assert len(raised.value.tables["contention"]) == len(beside)


@pytest.mark.alone
def test_kernels_beside_all_reduces_of_real_ranks() -> None:
    asked = ContentionSettings(0, TINY, TWICE, ["convolution"], MIB)
    table = measure_beside_all_reduce(asked, [0], 2)
    assert table.groupby("communication").size().to_dict() == {"none": 2, "gloo": 2}
    beside = table[table["communication"] == "gloo"].iloc[0]
    assert beside["ranks"] == 2
    assert beside["overlap_share"] > 0
    assert beside["bytes_per_s"] > 0


def test_ranks_that_fail_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def start(_: object, settings: ContentionSettings, **__: object) -> Tables:
        done.append(settings.threads)
        if settings.threads == 64:
            raise UserError("rank 1 of 2 died")
        return {"contention": row}

    row = measure_beside_standin("cpu", "relu", TINY, [], TWICE)
    monkeypatch.setattr(launch, "launch", start)
    asked = ContentionSettings(1, TINY, TWICE, ["relu"])
    with pytest.raises(Partial, match="1x64: rank 1 of 2 died") as raised:
        measure_beside_all_reduce(asked, [64, 128], 2)
    assert done == [64, 128] and len(raised.value.tables["contention"]) == len(row)
    with pytest.raises(UserError, match="died"):
        measure_beside_all_reduce(asked, [64], 2)


# -- points ------------------------------------------------------------------------------------


def test_smoke_points_can_be_saved(tmp_path: Path) -> None:
    points = list(kernels_beside_messages(Here("cpu", 1, tmp_path), brief=True))
    for point in [point for point in points if point.name in ("attention", contention.IDLE)]:
        name, frame = point.what, point.measure()
        path = store.save_table(frame, tmp_path, f"{name}-{point.name}", schema=name, command=[])
        assert set(store.load_table(path, "contention")["kernel"]) == {point.name}
    assert points[-1].name == "gloo-p2"


def test_points_of_a_gpu_cover_the_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    points = list(kernels_beside_messages(Here("cuda", 1, tmp_path), brief=False))
    names = [point.name for point in points]
    assert len(set(names)) == len(names)
    assert {"relu", "idle", "nccl-b1", "nccl-b32"} <= set(names)
    between = next(point for point in points if point.name == "nccl-b4")
    with pytest.raises(Unavailable, match="needs 2 GPUs, here is 1"):
        between.measure()
    grid = {(one.blocks, one.threads) for one in contention._footprints(True, False)}
    assert {(1, 64), (2, 256), (4, 512), (32, 64)} <= grid
    every = contention._footprints(True, False)
    assert len(set(every)) == len(every)
    # All blocks find a chunk of their own, even where the buffers are to stay in the cache.
    threads = {one: standin.nccl_threads(one.threads) for one in every}
    assert all(
        one.blocks * 16 * standin.UNROLL * threads[one] <= (one.fifo_bytes or standin.BUFFER_BYTES)
        for one in every
    )


# -- CUDA --------------------------------------------------------------------------------------


def test_launch_records_lie_as_in_cuda_h() -> None:
    record, attribute = standin._Launch, standin._Attribute
    names = ("grid", "block", "shared_bytes", "stream", "attributes", "n_attributes")
    assert [getattr(record, name).offset for name in names] == [0, 12, 24, 32, 40, 48]
    assert ctypes.sizeof(record) == 56
    assert (attribute.value.offset, ctypes.sizeof(attribute)) == (8, 72)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_compiler_gives_the_stand_in_the_registers_of_nccl(tmp_path: Path) -> None:
    source = tmp_path / "standin.cu"
    source.write_text(standin.SOURCE)
    command = ["nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v", *standin.OPTIONS, source.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    report = done.stderr.partition("function 'standin'")[2].partition("Compiling")[0]
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    registers = int(report.partition("Used ")[2].split()[0])
    assert 88 < registers <= 96  # handed out by eights


@pytest.fixture
def nvrtc() -> ctypes.CDLL:
    try:
        return standin._nvrtc()
    except UserError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_nvrtc_gives_the_stand_in_the_registers_of_nccl(
    architecture: str, nvrtc: ctypes.CDLL
) -> None:
    image, said = standin.compiled(architecture, "--ptxas-options=-v")
    assert image[:4] == b"\x7fELF" and standin.cubin(architecture)[:4] == b"\x7fELF"
    report = said.partition("function 'standin'")[2]
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert 88 < int(report.partition("Used ")[2].split()[0]) <= 96
    assert "0 bytes spill stores, 0 bytes spill loads" in said.partition("function 'gate'")[2]


@pytest.mark.parametrize(("asked", "launched"), [(64, 128), (128, 160), (256, 288), (512, 544)])
def test_as_many_threads_are_launched_as_nccl_makes_of_those_asked(
    asked: int, launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[Any, ...]] = []
    there = GpuStandIn.__new__(GpuStandIn)
    there.a = there.b = there.c = torch.zeros(2**20)
    there._send = SimpleNamespace(launch=lambda *how: shapes.append(how[:2]))  # type: ignore[assignment]
    there._stream = SimpleNamespace(wait_stream=lambda other: None)  # type: ignore[assignment]
    there._clusters, there.shared_bytes = True, 0
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    record: Any = SimpleNamespace(record_stream=lambda stream: None)
    there.send(Footprint(4, asked), 1, record)
    assert shapes == [(4, launched)]
    assert there.chunk_bytes(asked) == 16 * standin.UNROLL * launched


def test_what_is_measured_on_a_gpu_says_something() -> None:
    """Turns are noticed at once; a slow host hides in the hold; paced settings differ from one another."""
    assert (GpuStandIn.chances, GpuStandIn.least_overlap) == (1, 0.98)
    assert GpuStandIn.most_extra_s <= 0.2 and standin.HOLD_S >= 1e-3
    assert contention.QUICK_S == 0.05 and contention.QUICK_REPEATS >= 20
    full, link, least = contention.RATES
    assert full == 0.0 and 1e3 * least < link < 20e9, "the smallest setting reaches 20 GB/s or so"


def test_the_driver_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages leave from within the backward pass, which a slow launch would hold up."""
    opened: list[str] = []

    def open_library(name: str) -> SimpleNamespace:
        opened.append(name)
        return SimpleNamespace(cuInit=lambda flags: 0)

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    standin._libcuda.cache_clear()
    for _ in range(3):
        standin._driver("cuInit", 0)
    standin._libcuda.cache_clear()
    assert opened == ["libcuda.so.1"]


def test_a_source_that_does_not_compile_is_one_line(
    monkeypatch: pytest.MonkeyPatch, nvrtc: ctypes.CDLL
) -> None:
    monkeypatch.setattr(standin, "SOURCE", "__global__ void f() { nothing; }")
    with pytest.raises(UserError, match="does not compile: .*nothing"):
        standin.cubin("sm_90")


@pytest.fixture
def empty_cache() -> Iterator[None]:
    standin._nvrtc.cache_clear()
    yield
    standin._nvrtc.cache_clear()


def build(library: Path, source: str, *options: str) -> None:
    """A shared library of C source."""
    command = ["gcc", "-shared", "-fPIC", *options, "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_a_wheels_compiler_finds_its_second_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: None
) -> None:
    """As that of CUDA 13: the library opens the other one by its name alone, without a path to look in."""
    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    half = lib / "libnvrtc-builtins.so.99.0"
    build(half, "int half(void) { return 42; }", f"-Wl,-soname,{half.name}")
    open_half = (
        f'#include <dlfcn.h>\nint whole(void) {{ return !!dlopen("{half.name}", RTLD_LAZY); }}'
    )
    build(lib / "libnvrtc.so.99", open_half)
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert standin._nvrtc().whole() == 1


def test_without_a_compiler_the_stand_in_says_so(
    monkeypatch: pytest.MonkeyPatch, empty_cache: None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    with pytest.raises(UserError, match="no NVRTC 99: .* install"):
        standin.cubin("sm_90")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def gpu() -> GpuStandIn:
    return GpuStandIn(16 * MIB)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("blocks", [1, 2, 4, 7, 8, 32])
@pytest.mark.parametrize("threads", [32, 64, 160, 512, 640])
def test_gpu_writes_every_sum_once_asked_for(gpu: GpuStandIn, blocks: int, threads: int) -> None:
    chunk = gpu.chunk_bytes(threads)
    in_buffer = gpu.c.nbytes // chunk
    gpu.c.fill_(float("nan"))
    gpu.send(Footprint(blocks, threads), -(-in_buffer // blocks))
    torch.cuda.synchronize()
    whole = in_buffer * chunk // 4
    assert torch.equal(gpu.c[:whole], (gpu.a + gpu.b)[:whole])
    assert bool(gpu.c[whole:].isnan().all())


@pytest.mark.gpu
@needs_gpu
def test_gpu_runs_beside_the_whole_computation_and_stops(
    gpu: GpuStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody stops would run for longer than a test may take."""
    monkeypatch.setattr(standin, "LONGEST_S", 600.0)
    x, y = torch.randn(2, 2048, 2048, device="cuda")

    def compute() -> None:
        for _ in range(20):
            torch.mm(x, x, out=y)

    gpu.beside(None, compute)
    for footprint in (
        Footprint(1, 64),
        Footprint(4, 512),
        Footprint(32, 256),
        Footprint(4, 256, 1e9),
    ):
        passage = gpu.beside(footprint, compute)
        torch.cuda.synchronize()
        traffic = passage.traffic()
        assert traffic.overlap_share == 1.0
        assert len(traffic.begins_s) == footprint.blocks
        assert traffic.bytes_per_s > 0
        if footprint.bytes_per_s:
            assert traffic.bytes_per_s == pytest.approx(footprint.bytes_per_s, rel=0.1)
        inside_s = passage.marks.seconds()[-1]
        assert inside_s <= traffic.closed_s - traffic.opened_s


@pytest.mark.gpu
@needs_gpu
def test_profiler_sees_both_kernels_at_the_same_time(gpu: GpuStandIn, tmp_path: Path) -> None:
    x = torch.randn(4096, 4096, device="cuda")
    gpu.beside(None, lambda: x @ x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        gpu.beside(Footprint(4, 256), lambda: x @ x)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    (beside,) = [event for event in kernels if event["name"] == "standin"]
    product = max(
        (event for event in kernels if event["name"] not in ("standin", "gate")),
        key=lambda event: event["dur"],
    )
    assert beside["ts"] < product["ts"]
    assert product["ts"] + product["dur"] < beside["ts"] + beside["dur"]
    assert beside["args"]["grid"] == [4, 1, 1] and beside["args"]["block"] == [288, 1, 1]


@pytest.mark.gpu
@needs_gpu
def test_gpu_stand_in_has_the_footprint_of_nccl(gpu: GpuStandIn) -> None:
    assert 88 < gpu.registers <= 96
    if torch.cuda.get_device_capability() >= (9, 0):
        assert gpu.shared_bytes == 102 * KIB
        assert [gpu.cluster(blocks) for blocks in (1, 2, 3, 4, 6, 8, 32)] == [1, 1, 1, 4, 1, 4, 4]


@pytest.mark.gpu
@needs_gpu
def test_gpu_refuses_more_blocks_than_its_buffers_have_chunks(gpu: GpuStandIn) -> None:
    with pytest.raises(UserError, match="buffers hold"):
        gpu.send(Footprint(1000, 640), 1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("way", WAYS)
def test_gpu_copies_beside_the_whole_computation(way: str) -> None:
    x, y = torch.randn(2, 2048, 2048, device="cuda")
    # Not with small chunks: giving the GPU thousands of these may take as long as the copies do.
    engine = CopyEngine(torch.device("cuda"))

    def compute() -> None:
        for _ in range(20):
            torch.mm(x, x, out=y)

    compute()
    for _ in range(2):
        engine.beside(None, compute)
    traffic = engine.beside(way, compute).traffic()
    torch.cuda.synchronize()
    assert traffic.overlap_share == 1.0
    assert len(traffic.begins_s) == (2 if way == "both" else 1)
    assert 1e8 < traffic.bytes_per_s < 2e12


@pytest.mark.gpu
@needs_gpu
def test_gpu_keeps_small_buffers_small(gpu: GpuStandIn) -> None:
    gpu.c.fill_(float("nan"))
    gpu.send(Footprint(2, 128, fifo_bytes=MIB), 64)
    torch.cuda.synchronize()
    whole = MIB // gpu.chunk_bytes(128) * gpu.chunk_bytes(128) // 4
    assert torch.equal(gpu.c[:whole], (gpu.a + gpu.b)[:whole])
    assert bool(gpu.c[whole:].isnan().all())
