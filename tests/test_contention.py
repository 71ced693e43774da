"""Kernels beside the stand-in and the copy engine: passages, rounds, CUDA, and a GPU itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.measure import contention, standin
from ddlkit.run.measure.contention import TINY, WAYS, CopyEngine, flow
from ddlkit.run.measure.standin import Compute, Footprint, GpuStandIn, Passage, Traffic
from ddlkit.run.sessions import Partial, Unavailable, all_or_partial
from ddlkit.run.sessions.kinds import Here, kernels_beside_copies, kernels_beside_messages

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


@pytest.mark.parametrize(
    "wrong", [(0, 64, 0.0), (1, 0, 0.0), (1, 641, 0.0), (1, 64, -1.0), (1, 64, float("nan"))]
)
def test_footprint_that_no_kernel_can_have_is_refused(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(UserError, match="communication"):
        Footprint(*wrong)


# -- rounds ------------------------------------------------------------------------------------


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
    table = all_or_partial("contention", made)
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


@pytest.mark.parametrize("passages", [3, 9])
def test_whatever_fails_leaves_what_was_measured_before(passages: int) -> None:
    """Of two ways: at the third passage the second one is tried; nine make all tries and two rounds."""

    def fails(number: int, way: Any) -> Exception | None:
        lost = number == passages or (number > passages and way == THREE[1])
        return torch.OutOfMemoryError("CUDA out of memory") if lost else None

    four = Budget(warmup=1, min_repeats=4, max_repeats=4)
    with pytest.raises(Partial, match="OutOfMemoryError: CUDA out of memory") as part:
        rounds(Played(fails), THREE[:2], four)
    sizes = part.value.tables["contention"].groupby("blocks").size().to_dict()
    assert sizes == ({0: 4, 1: 4} if passages == 3 else {0: 1, 1: 1, 2: 1})


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


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(scope="module")
def gpu() -> GpuStandIn:
    return GpuStandIn(16 * MIB)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (7, 640), (32, 640)])
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
