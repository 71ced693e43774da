"""Kernels beside the stand-in and the copy engine: passages, rounds, CUDA, and a GPU itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget
from ddlkit.measure.parts import Here
from ddlkit.measure.session import Partial, Unavailable, all_or_partial
from workbook.record import contention, standin
from workbook.record.contention import COPIES, CopyEngine, traffic_of_marks
from workbook.record.kinds import kernels_beside_messages
from workbook.record.standin import Compute, Footprint, GpuStandIn, Passage, Traffic

times = st.floats(0, 10)


@given(st.lists(st.tuples(times, times), min_size=1), times, st.floats(0.001, 5))
def test_overlap_is_the_share_in_which_every_block_ran(
    blocks: list[tuple[float, float]], opened_s: float, takes_s: float
) -> None:
    begins, ends = ([f(block) for block in blocks] for f in (min, max))
    closed_s = opened_s + takes_s
    traffic = Traffic(begins, ends, opened_s, closed_s, 3.0)
    ticks = np.linspace(opened_s, closed_s, 2001)[:, None]
    together = np.mean(((begins <= ticks) & (ticks <= ends)).all(axis=1))
    assert traffic.overlap_share == pytest.approx(together, abs=2e-3)
    assert traffic.bytes_per_s * takes_s == pytest.approx(3.0)


class Played:
    """A neighbour that is nobody; fails : what to raise, by way; turns : ways that run apart."""

    chances, labels = 1, {"ranks": 1}

    def __init__(self, fails: Any = (), turns: Any = ()) -> None:
        self.fails, self.turns, self.tried = fails, turns, list[Any]()

    def beside(self, way: Any, compute: Compute) -> Passage:
        self.tried.append(way)
        if way in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        ends = [0.0 if way in self.turns else 9.0]
        marks = clock.timed(compute, "cpu")()
        return marks, lambda: Traffic([0.0] if way else [], ends, 1.0, 2.0, 5.0)

    def columns(self, way: Footprint) -> dict[str, Any]:
        return {"communication": "standin", "blocks": way.blocks}


THREE = [Footprint(1, 1, 1e9), Footprint(2, 1, 1e9), Footprint(3, 1, 1e9)]


def test_kernels_alone_and_beside_are_timed_in_turn_as_far_as_both_run_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(contention, "MOST_EXTRA_S", 1e9)

    def rows(neighbour: Played, budget: Budget) -> dict[int, int]:
        how = (True, torch.device("cpu"), neighbour, THREE, budget)
        table = all_or_partial("contention", contention.measure_in_turn("relu", *how))
        assert set(table.loc[table["blocks"] > 0, "overlap_share"]) == {1.0}
        return table.groupby("blocks").size().to_dict()

    played, twice = Played(), Budget(warmup=0, min_repeats=2, max_repeats=2)
    assert rows(played, twice) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert played.tried == [None, *THREE] * 3
    # The budget alone decides how many samples there are.
    late = Budget(warmup=1, min_repeats=3, max_repeats=30, max_s=1e-9)
    assert set(rows(Played(), late).values()) == {3}
    with pytest.raises(Partial, match="OutOfMemoryError: CUDA out of memory") as part:
        rows(Played(fails=THREE[1:]), twice)
    assert part.value.tables["contention"].groupby("blocks").size().to_dict() == {
        0: 2,
        1: 2,
    }
    played = Played(turns=THREE[:1])
    with pytest.raises(
        UserError, match="beside .*blocks=1.* for 0% of it: something has"
    ) as no:
        rows(played, twice)
    assert not isinstance(no.value, Partial)
    assert played.tried == [None, THREE[0]]
    monkeypatch.setattr(contention, "MOST_EXTRA_S", -1e9)
    with pytest.raises(
        UserError, match="for 100% of it: something has them take turns"
    ):
        rows(Played(), twice)


@given(
    st.lists(
        st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6), min_size=1, max_size=2
    ),
    st.floats(0, 3),
    st.floats(0.1, 3),
)
def test_bytes_flow_evenly_while_a_copy_lasts(
    copies: list[list[float]], opened_s: float, takes_s: float
) -> None:
    count = min(map(len, copies))
    lines = [np.cumsum([0.1, *copy[:count]]) for copy in copies]
    in_order = np.transpose(
        lines
    ).ravel()  # the first of each stream, the second of each, ...
    line = np.concatenate([[0.0], in_order, [opened_s, opened_s + takes_s]])
    traffic = traffic_of_marks(line, len(copies), MIB)
    ticks = np.linspace(opened_s, opened_s + takes_s, 20_001)
    rates = [
        np.where((ticks >= a) & (ticks < b), 1 / (b - a), 0.0)
        for each in lines
        for a, b in zip(each[:-1], each[1:], strict=True)
    ]
    expected = MIB * takes_s * float(np.mean(np.sum(rates, axis=0)))
    assert traffic.sent_bytes == pytest.approx(expected, rel=0.02, abs=0.02 * MIB)
    assert traffic.begins_s == pytest.approx([each[0] for each in lines])
    assert traffic.ends_s == pytest.approx([each[-1] for each in lines])


def test_copies_begin_before_a_computation_and_outlast_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a processor, with fake streams that note in which order they wait for one another."""
    did: list[str] = []
    now_s = [0.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: now_s[0])

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = str(name)

        def wait_stream(self, other: Stream) -> None:
            did.append(f"{self.name} waits for {other.name}")

    class Noting(contention.Queues):
        def put(self, ways: Sequence[str]) -> None:
            did.append(f"put {' '.join(ways)}")
            now_s[0] += 0.02

    current = Stream("current")
    names = iter(("in", "out"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names)))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(clock, "hold", lambda device: did.append("hold"))
    copying = Noting(torch.device("cpu"), ("in", "out"), n_bytes=1e6)
    copying.time()
    begins = ["in waits for current", "out waits for current"]
    ends = ["current waits for in", "current waits for out"]
    assert did == 4 * ["hold", *begins, "put in out", *ends]
    did.clear()
    copying.beside(None, lambda: did.append("compute"))
    assert did == ["hold", "compute"]
    did.clear()
    _, read = copying.beside("both", lambda: did.append("compute"))
    first = [*begins, "put in out", *ends]
    assert did[: len(first)] == first and did[-2:] == ["hold", "compute"]
    # Four times the computation, but at least a while, in operations of 20 ms.
    others = did[len(first) : -2]
    assert others == ["put in out"] * 3
    assert len(read().begins_s) == 2
    did.clear()
    copying.beside("out", lambda: did.append("compute"))
    assert did[:3] == ["out waits for current", "put out", "current waits for out"]


def test_points_of_a_gpu_cover_the_grid_and_a_processor_has_none(
    tmp_path: Path,
) -> None:
    cpu = Here("cpu", 1, tmp_path)
    for copies in (True, False):
        for point in kernels_beside_messages(cpu, True, copies):
            assert point.estimate_s == 0.0
            with pytest.raises(Unavailable, match="needs a GPU"):
                point.measure()
    every = contention.footprints(False)
    assert len(set(every)) == len(every)
    assert {(1, 64), (4, 512), (32, 64)} <= {
        (each.blocks, each.threads) for each in every
    }
    assert [*map(standin.nccl_threads, (64, 128, 256, 512))] == [128, 160, 288, 544]
    # All blocks find a chunk of their own.
    for each in every:
        chunk_bytes = 16 * standin.UNROLL * standin.nccl_threads(each.threads)
        assert each.blocks * chunk_bytes <= standin.BUFFER_BYTES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "way", [Footprint(1, 64), Footprint(32, 640), Footprint(4, 256, 1e9), *COPIES]
)
def test_gpu_runs_a_neighbour_beside_the_whole_computation_and_stops_it(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that nobody stops would run for longer than a test may take."""
    monkeypatch.setattr(standin, "LONGEST_S", 5.0)
    x, y = torch.randn(2, 2048, 2048, device="cuda")
    gpu = GpuStandIn(16 * MIB)
    neighbour: Any = CopyEngine(torch.device("cuda")) if isinstance(way, str) else gpu

    def compute() -> None:
        for _ in range(20):
            torch.mm(x, x, out=y)

    for _ in range(2):
        neighbour.beside(None, compute)
    # The first try loads the kernel of the stand-in, which then takes turns.
    for _ in range(neighbour.chances):
        marks, read = neighbour.beside(way, compute)
        torch.cuda.synchronize()
        traffic = read()
        if traffic.overlap_share == 1.0:
            break
    assert traffic.overlap_share == 1.0
    assert marks.seconds()[-1] <= traffic.closed_s - traffic.opened_s
    assert 0 < traffic.bytes_per_s < 2e13
    if isinstance(way, str):
        assert len(traffic.begins_s) == (2 if way == "both" else 1)
        return
    if way.bytes_per_s:
        assert traffic.bytes_per_s == pytest.approx(way.bytes_per_s, rel=0.1)
    chunk = gpu.chunk_bytes(way.threads)
    gpu.send(way, -(-(gpu.c.nbytes // chunk) // way.blocks), gpu.record(way.blocks))
    torch.cuda.synchronize()
    whole = gpu.c.nbytes // chunk * chunk // 4
    assert torch.equal(gpu.c[:whole], (gpu.a + gpu.b)[:whole])
