"""Kernels beside the stand-in and the copy engine: passages, rounds, CUDA, and a GPU itself."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs import protocol
from ddlkit.run.measure import contention, standin
from ddlkit.run.measure.contention import TINY, WAYS, CopyEngine, flow
from ddlkit.run.measure.standin import Compute, Footprint, GpuStandIn, Passage, Traffic
from ddlkit.run.sessions.kinds import Here, kernels_beside_copies, kernels_beside_messages
from ddlkit.run.sessions.session import Partial, Unavailable

TWICE = Budget(warmup=1, min_repeats=2, max_repeats=2)

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


# -- rounds ------------------------------------------------------------------------------------


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


class Played:
    """A neighbour that is nobody, so that rounds can be looked at without a GPU.

    fails : what to raise, by the number of the passage and the way; turns : ways that run apart
    """

    chances, least_overlap, most_extra_s = 1, 0.98, 1e9

    def __init__(
        self,
        fails: Callable[[int, Any], Exception | None] = lambda number, way: None,
        turns: tuple[Any, ...] = (),
    ) -> None:
        self.fails, self.turns, self.tried = fails, turns, list[Any]()

    def beside(self, way: Any, compute: Compute) -> Passage:
        self.tried.append(way)
        if error := self.fails(len(self.tried), way):
            raise error
        begins = (0.0,) if way in self.turns else (2.0,) if way is None else (0.0,)
        ends = (0.0,) if way in self.turns else (9.0,)
        marks = clock.timed(compute, "cpu")()
        return Passage(marks, lambda: Traffic(begins if way else (), ends, 1.0, 2.0, 5.0))

    def columns(self, way: Footprint) -> dict[str, Any]:
        return {"communication": "standin", "blocks": way.blocks}


@pytest.fixture(autouse=True)
def no_gpu_to_wait_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def rounds(neighbour: Played, ways: list[Footprint], budget: Budget = TWICE) -> dict[int, int]:
    """Rows by blocks of a kernel beside a played neighbour."""
    made = contention._rounds("relu", TINY, torch.device("cpu"), neighbour, ways, budget)
    table = contention.all_or_partial("contention", made)
    return {int(str(k)): int(n) for k, n in table.groupby("blocks").size().items()}


THREE = [Footprint(1, 1, 1e9), Footprint(2, 1, 1e9), Footprint(3, 1, 1e9)]


def test_each_round_has_a_kernel_alone_and_beside_every_footprint() -> None:
    played = Played()
    assert rounds(played, THREE) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert played.tried == [None, *THREE] * 3


def test_a_neighbour_that_takes_turns_ends_the_point_at_its_first_footprint() -> None:
    played = Played(turns=(THREE[0],))
    with pytest.raises(UserError, match="beside .*blocks=1.* for 0% of it: something has") as no:
        rounds(played, THREE)
    assert not isinstance(no.value, Partial)
    assert played.tried == [None, THREE[0]]


def test_footprints_before_the_first_that_takes_turns_are_kept() -> None:
    with pytest.raises(Partial, match="blocks=3.* take turns") as part:
        rounds(Played(turns=(THREE[2],)), THREE)
    assert part.value.tables["contention"].groupby("blocks").size().to_dict() == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("chances", [1, 2])
def test_a_neighbour_has_as_many_chances_as_it_says(chances: int) -> None:
    class Late(Played):
        def beside(self, way: Any, compute: Compute) -> Passage:
            self.turns = (THREE[0],) if len(self.tried) == 1 else ()
            return super().beside(way, compute)

    late = Late()
    late.chances = chances  # type: ignore[misc]
    if chances == 1:
        with pytest.raises(UserError, match="take turns"):
            rounds(late, THREE[:1])
    else:
        assert rounds(late, THREE[:1]) == {0: 2, 1: 2}


def test_a_computation_that_waits_for_its_neighbour_ends_the_point() -> None:
    waiting = Played()
    waiting.most_extra_s = -1.0  # type: ignore[misc]
    with pytest.raises(UserError, match="for 100% of it: something has them take turns"):
        rounds(waiting, THREE)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (UserError("cuLaunchKernelEx: invalid cluster size (912)"), "cuLaunchKernelEx: invalid"),
    ],
)
@pytest.mark.parametrize("passages", [3, 9])
def test_whatever_fails_leaves_what_was_measured_before(
    error: Exception, says: str, passages: int
) -> None:
    """Of two ways: at the third passage the second one is tried; nine make all tries and two rounds."""

    def fails(number: int, way: Any) -> Exception | None:
        return error if number == passages or (number > passages and way == THREE[1]) else None

    four = Budget(warmup=1, min_repeats=4, max_repeats=4)
    with pytest.raises(Partial, match=says) as part:
        rounds(Played(fails), THREE[:2], four)
    sizes = part.value.tables["contention"].groupby("blocks").size().to_dict()
    assert sizes == ({0: 4, 1: 4} if passages == 3 else {0: 1, 1: 1, 2: 1})


def test_nothing_but_a_kernel_alone_is_no_measurement() -> None:
    refuses = Played(lambda _, way: UserError("the driver refuses") if way else None)
    with pytest.raises(UserError, match="^the driver refuses$") as no:
        rounds(refuses, THREE)
    assert not isinstance(no.value, Partial)


def test_what_is_quick_is_measured_until_its_median_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hurried = Budget(warmup=1, min_repeats=3, max_repeats=30, max_s=1e-9)
    for quick_s, count in ((float("inf"), contention.QUICK_REPEATS), (0.0, 3)):
        monkeypatch.setattr(contention, "QUICK_S", quick_s)
        assert rounds(Played(), [], hurried) == {0: count}


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


def test_a_processor_has_neither_stand_in_nor_copy_engine(tmp_path: Path) -> None:
    here = Here("cpu", 1, tmp_path)
    for (point,) in (kernels_beside_copies(here, brief=True), kernels_beside_messages(here, True)):
        assert point.estimate_s == 0.0
        with pytest.raises(Unavailable, match="needs a GPU"):
            point.measure()


def test_points_of_a_gpu_cover_the_grid(tmp_path: Path) -> None:
    points = list(kernels_beside_messages(Here("cuda", 1, tmp_path), brief=False))
    assert {"relu", "idle"} <= {point.name for point in points} and len(points) == 8
    every = contention._footprints(False)
    assert {(1, 64), (2, 256), (4, 512), (32, 64)} <= {(one.blocks, one.threads) for one in every}
    assert len(set(every)) == len(every)
    # All blocks find a chunk of their own, even where the buffers are to stay in the cache.
    for one in every:
        chunk_bytes = 16 * standin.UNROLL * standin.nccl_threads(one.threads)
        assert one.blocks * chunk_bytes <= (one.fifo_bytes or standin.BUFFER_BYTES)


# -- CUDA --------------------------------------------------------------------------------------


def test_launch_records_lie_as_in_cuda_h() -> None:
    record, attribute = standin._Launch, standin._Attribute
    names = ("grid", "block", "shared_bytes", "stream", "attributes", "n_attributes")
    assert [getattr(record, name).offset for name in names] == [0, 12, 24, 32, 40, 48]
    assert ctypes.sizeof(record) == 56
    assert (attribute.value.offset, ctypes.sizeof(attribute)) == (8, 72)


@pytest.fixture
def nvrtc() -> ctypes.CDLL:
    try:
        return standin._nvrtc()
    except UserError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_nvrtc_compiles_the_stand_in(architecture: str, nvrtc: ctypes.CDLL) -> None:
    assert standin.cubin(architecture)[:4] == b"\x7fELF"


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
