"""The host's side of the stand-in: what it asks of the CUDA driver, and what it reads from its record.

The driver is a fake of the six calls that the stand-in makes. Each launch is noted and takes one millisecond
of a clock of its own, so that nothing here says how fast a GPU is; tests marked gpu run the real kernel.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.jobs.clock import Budget, Marks
from ddlkit.measure.session import all_or_partial
from workbook.record import contention, preflight, standin
from workbook.record.standin import Footprint, GpuStandIn

REGISTERS, SHARED_LIMIT = 94, 232_448
LAUNCH_NS = 1_000_000
CHUNKS = 5  # that each block of a running stand-in sends from one launch to the next
OUT_OF_MEMORY = 2
ARGUMENTS = {
    "standin": "pointer pointer pointer integer integer double integer pointer",
    "gate": "pointer integer integer integer integer integer",
}
"""The parameters of each kernel, in the order of standin.cu."""


class Launch(NamedTuple):
    """What cuLaunchKernelEx was told."""

    kernel: str
    blocks: int
    threads: int
    shared_bytes: int
    cluster: int
    arguments: list[float]


class FakeDriver:
    """The calls of libcuda that the stand-in makes, each with the status that it returns."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.status = 0
        self.now_ns = 0
        self.loads_first = False
        """Whether the first stand-in begins only when the kernel next to it has ended."""
        self._names: list[str] = []
        self._allowed_bytes = dict[int, int]()

    def cuModuleLoadData(self, module: Any, image: Any) -> int:
        assert image.value == b"sm_90", "compiled for the GPU that is there"
        return self.status

    def cuModuleGetFunction(self, function: Any, module: Any, name: Any) -> int:
        self._names.append(name.value.decode())
        function._obj.value = len(self._names)
        return self.status

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:
        value._obj.value = REGISTERS
        return self.status

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self._allowed_bytes[function.value] = value
        return self.status

    def cuGetErrorString(self, status: int, words: Any) -> int:
        words._obj.value = b"out of memory"
        return 0

    def cuLaunchKernelEx(
        self, config: Any, function: Any, places: Any, extra: None
    ) -> int:
        told, name = config._obj, self._names[function.value - 1]
        assert told.shared_bytes == self._allowed_bytes[function.value]
        assert (*told.grid[1:], *told.block[1:]) == (1, 1, 1, 1)
        kinds = [
            ctypes.c_double if kind == "double" else ctypes.c_uint64
            for kind in ARGUMENTS[name].split()
        ]
        assert len(places) == len(kinds)
        arguments = [
            kind.from_address(place).value
            for kind, place in zip(kinds, places, strict=True)
        ]
        clustered = told.n_attributes > 0
        cluster = told.attributes[0].value[0] if clustered else 1
        shape = told.grid[0], told.block[0], told.shared_bytes, cluster
        self.launches.append(Launch(name, *shape, arguments))
        self.now_ns += LAUNCH_NS
        if name == "gate":
            self._gate(arguments)
        else:
            self._begin(told.grid[0], int(arguments[-1]))
        return self.status

    def _begin(self, blocks: int, address: int) -> None:
        """Note in the record that every block begins now."""
        words = (ctypes.c_int64 * (6 + 3 * blocks)).from_address(address)
        begin_ns = self.now_ns
        if self.loads_first:
            begin_ns += 2 * LAUNCH_NS  # the launches of both gates come before
            self.loads_first = False
        words[6 : 6 + blocks] = [begin_ns] * blocks

    def _gate(self, arguments: list[float]) -> None:
        """Note the time and the chunks sent so far; a gate that stops has every block end."""
        address, slot, blocks, _, _, stops = map(int, arguments)
        words = (ctypes.c_int64 * (6 + 3 * blocks)).from_address(address)
        sent = words[6 + 2 * blocks :]
        words[slot], words[slot + 1] = self.now_ns, sum(sent)
        words[6 + 2 * blocks :] = [chunks + CHUNKS for chunks in sent]
        if stops:
            words[6 + blocks : 6 + 2 * blocks] = [self.now_ns] * blocks


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A fake driver; what asks for memory of a GPU gets memory of the host."""
    fake = FakeDriver()

    def on_host(make: Any) -> Any:
        return lambda *shape, device=None, **how: make(*shape, **how)

    stream = SimpleNamespace(cuda_stream=None, wait_stream=lambda other: None)
    gpu = SimpleNamespace(
        major=9, minor=0, shared_memory_per_block_optin=SHARED_LIMIT, name="fake"
    )
    for name, answer in {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda: stream,
        "get_device_properties": lambda device: gpu,
        "get_device_capability": lambda: (9, 0),
        "Stream": lambda: stream,
        "stream": nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    # Nobody reads the numbers, and half a gigabyte of random ones takes seconds. The fake
    # driver has a clock of its own, so that the product may be short.
    monkeypatch.setattr(preflight, "PRODUCT_SIZE", 64)
    monkeypatch.setattr(torch, "randn", on_host(torch.zeros))
    monkeypatch.setattr(torch, "zeros", on_host(torch.zeros))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(standin, "_libcuda", lambda: fake)
    monkeypatch.setattr(standin, "cubin", lambda architecture: architecture.encode())
    monkeypatch.setattr(standin, "Marks", lambda device: Marks("cpu"))
    return fake


@pytest.mark.parametrize(
    ("footprint", "threads", "cluster"),
    [
        (Footprint(1, 64), 128, 1),
        (Footprint(8, 512), 544, 4),
        (Footprint(3, 640, 1e9), 640, 1),
    ],
)
def test_a_stand_in_is_launched_as_its_columns_say(
    footprint: Footprint, threads: int, cluster: int, driver: FakeDriver
) -> None:
    gpu = GpuStandIn(16 << 20)
    _, read = gpu.beside(footprint, lambda: None)
    sent, opened, closed = driver.launches
    assert sent[:5] == (
        "standin",
        footprint.blocks,
        threads,
        standin.SHARED_BYTES,
        cluster,
    )
    columns = gpu.columns(footprint)
    assert columns["taken_blocks"] == sent.blocks
    assert columns["taken_threads"] == sent.threads
    assert columns["shared_bytes"] == sent.shared_bytes
    assert columns["cluster"] == sent.cluster
    assert columns["registers"] == REGISTERS

    chunk_bytes = 16 * standin.UNROLL * threads
    a, b, c, in_buffer, most_chunks, chunk_ns, most_ns, record = sent.arguments
    assert [a, b, c] == [buffer.data_ptr() for buffer in (gpu.a, gpu.b, gpu.c)]
    assert in_buffer * chunk_bytes <= gpu.c.nbytes < (in_buffer + 1) * chunk_bytes
    assert footprint.blocks <= in_buffer and most_ns == standin.LONGEST_S * 1e9
    if footprint.bytes_per_s:
        in_a_second = footprint.blocks * chunk_bytes * 1e9 / chunk_ns
        assert in_a_second == pytest.approx(footprint.bytes_per_s)
    else:
        assert chunk_ns == 0

    # The first gate holds the GPU until every block has begun; the second one has them stop.
    holds = [standin.HOLD_NS, standin.PATIENCE_NS]
    assert opened.arguments == [record, 2, footprint.blocks, *holds, 0]
    assert closed.arguments == [record, 4, footprint.blocks, 0, 0, 1]
    assert {launch.kernel for launch in (opened, closed)} == {"gate"}
    traffic = read()
    assert traffic.overlap_share == 1.0
    assert traffic.closed_s - traffic.opened_s == pytest.approx(LAUNCH_NS / 1e9)
    assert traffic.sent_bytes == CHUNKS * footprint.blocks * chunk_bytes


def test_alone_nothing_is_sent(driver: FakeDriver) -> None:
    _, read = GpuStandIn(1 << 20).beside(None, lambda: None)
    assert [launch.kernel for launch in driver.launches] == ["gate", "gate"]
    assert read().overlap_share == 0.0 and read().bytes_per_s == 0.0


def test_a_table_of_kernels_beside_the_stand_in_holds_its_parameters(
    driver: FakeDriver, tmp_path: Path
) -> None:
    ways = contention.footprints(brief=True)
    twice = Budget(warmup=0, min_repeats=2, max_repeats=2)
    samples = contention.measure_in_turn(
        "relu", True, torch.device("cpu"), GpuStandIn(1 << 20), ways, twice
    )
    rows = all_or_partial("contention", samples)
    store.save_table(rows, tmp_path, "contention", schema="contention", command=[])
    assert set(rows["device"]) == {"cuda"} and (rows["seconds"] > 0).all()
    assert rows.groupby("communication").size().to_dict() == {"none": 2, "standin": 4}
    beside = rows[rows["communication"] == "standin"]
    assert set(beside["registers"]) == {REGISTERS}
    assert set(beside["shared_bytes"]) == {standin.SHARED_BYTES}
    assert (beside["overlap_share"] == 1.0).all() and (beside["bytes_per_s"] > 0).all()
    asked = beside[["blocks", "threads", "bytes_per_s_asked"]].drop_duplicates()
    assert {*map(tuple, asked.to_numpy())} == {
        (way.blocks, way.threads, way.bytes_per_s) for way in ways
    }


def test_a_stand_in_that_takes_turns_while_it_is_loaded_has_further_chances(
    driver: FakeDriver,
) -> None:
    driver.loads_first = True
    assert preflight.stand_in("cuda").endswith("runs beside 100.0% of a product")
    driver.loads_first = True
    twice = Budget(warmup=0, min_repeats=2, max_repeats=2)
    samples = contention.measure_in_turn(
        "relu",
        True,
        torch.device("cpu"),
        GpuStandIn(1 << 20),
        [Footprint(1, 64)],
        twice,
    )
    rows = all_or_partial("contention", samples)
    beside = rows[rows["communication"] == "standin"]
    assert len(beside) == 2 and (beside["overlap_share"] == 1.0).all()
    assert not driver.loads_first


def test_the_preflight_says_whether_the_stand_in_runs_beside_a_product(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = preflight.stand_in("cuda")
    assert line == "5 B for sm_90, runs beside 100.0% of a product"

    def late(record: torch.Tensor, chunk_bytes: int) -> standin.Traffic:
        return standin.Traffic([0.9], [2.0], 0.0, 1.0, 0.0)

    monkeypatch.setattr(standin, "_read", late)
    with pytest.raises(UserError, match="beside 10.0% .* kernels take turns here$"):
        preflight.stand_in("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU: install a build"):
        preflight.stand_in("cuda")


def test_a_call_that_the_driver_refuses_is_one_line(driver: FakeDriver) -> None:
    gpu = GpuStandIn(1 << 20)
    driver.status = OUT_OF_MEMORY
    with pytest.raises(UserError, match=r"^cuLaunchKernelEx: out of memory \(2\)$"):
        gpu.beside(Footprint(1, 64), lambda: None)
