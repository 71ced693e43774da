"""A kernel that loads the machine as a communication kernel does, for where there is no one to talk to.

One GPU cannot exchange messages, yet what NCCL's kernel does to a computation beside it can be had there:
the stand-in occupies what NCCL's occupies (as its version 2.28 does on Hopper: a block a channel, 96
registers a thread, about 102 KiB of dynamic shared memory a block, clusters of 4 blocks where that divides
their number) and does what a ring's step does, reading two buffers and writing their sum to a third. It
does not cross a link, nor wait for a peer. On a CPU, a block is a thread that does the same with NumPy.

Three knobs: blocks, threads, and bytes per second. The latter counts the sums written, as a message's
bytes would be; memory moves three times as many.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_char, c_char_p, c_double, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB
from ddlkit.run.instruments.clock import Marks

Compute = Callable[[], object]

MOST_THREADS = 640  # that NCCL ever gives to a block
SHARED_BYTES = 102 * KIB
CLUSTER = 4
BUFFER_BYTES = 256 * MIB  # three of these pass through no cache

LONGEST_S = 2.0  # a stand-in that nobody stops ends by itself
PATIENCE_S = 0.05  # for the stand-in to start, before the computation does
HOLD_S = 300e-6  # meanwhile the host gives the GPU all that is to follow, so that no gap is timed

# 16 bytes a load, 2 x 10 loads under way: the compiler keeps these 80 words and little else, 94 registers
# on sm_90 (nvcc and NVRTC 13.0), handed out by eights. What it gives is read back and recorded.
UNROLL = 10
OPTIONS = ("--maxrregcount=96", f"-DUNROLL={UNROLL}", f"-DMOST_THREADS={MOST_THREADS}")
SOURCE = Path(__file__).with_suffix(".cu").read_text()

_OPENED, _CLOSED, _HEAD = 2, 4, 6  # as in the source
_NS = 1e9


@dataclass(frozen=True)
class Footprint:
    """How much communicates: blocks, threads of each, bytes per second of all together (0: unlimited).

    Raises UserError for what no communication kernel could be launched with.
    """

    blocks: int
    threads: int
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        possible = self.blocks >= 1 and 1 <= self.threads <= MOST_THREADS
        if not (possible and 0 <= self.bytes_per_s < float("inf")):
            raise UserError(
                f"{self}: a communication kernel needs at least one block, 1 to {MOST_THREADS} threads, "
                "and a rate, or 0 for any"
            )

    def chunk_s(self, chunk_bytes: int) -> float:
        """How long each block may take for a chunk; 0 if it need not wait."""
        return chunk_bytes * self.blocks / self.bytes_per_s if self.bytes_per_s else 0.0


@dataclass(frozen=True)
class Traffic:
    """What was sent while a computation ran, on one clock.

    begins_s, ends_s : of each block of the communication kernel; none if there was none
    opened_s, closed_s : these enclose the computation
    sent_bytes : in between
    """

    begins_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    opened_s: float
    closed_s: float
    sent_bytes: float

    @property
    def overlap_share(self) -> float:
        """Share of the computation's time in which every block of the communication kernel ran."""
        if not self.begins_s:
            return 0.0
        both_s = min(self.closed_s, *self.ends_s) - max(self.opened_s, *self.begins_s)
        return max(0.0, both_s / (self.closed_s - self.opened_s))

    @property
    def bytes_per_s(self) -> float:
        """Rate of sending while the computation ran."""
        return self.sent_bytes / (self.closed_s - self.opened_s)


@dataclass(frozen=True)
class Passage:
    """One computation: its time by the device's clock, and, once it is over, what ran beside it."""

    marks: Marks
    traffic: Callable[[], Traffic]


class GpuStandIn:
    """The CUDA C++ kernel of standin.cu, on torch's current GPU and in a stream of its own.

    registers : of each thread; shared_bytes : of each block
    least_s : a computation that takes less does not share fairly: repeat it
    """

    least_s = 0.0

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        torch.cuda.synchronize()  # makes torch's context the current one, where modules belong
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        module = c_void_p()
        _driver("cuModuleLoadData", byref(module), c_char_p(cubin(f"sm_{gpu.major}{gpu.minor}")))
        self._send, self._gate = CudaFunction(module, "standin"), CudaFunction(module, "gate")
        self._clusters = gpu.major >= 9
        self.registers = self._send.registers
        most_bytes = getattr(gpu, "shared_memory_per_block_optin", 48 * KIB)
        self.shared_bytes = min(SHARED_BYTES, most_bytes)
        self._send.allow_shared(self.shared_bytes)
        self.a, self.b, self.c = torch.randn(3, buffer_bytes // 16 * 4, device="cuda")
        self._stream = torch.cuda.Stream()

    def cluster(self, blocks: int) -> int:
        """As NCCL does it: 4 where that divides the blocks, from Hopper on."""
        return CLUSTER if self._clusters and blocks % CLUSTER == 0 else 1

    def chunk_bytes(self, threads: int) -> int:
        """What a block of ``threads`` threads sums at a time."""
        return 16 * UNROLL * threads

    def send(self, footprint: Footprint, chunks: int, record: torch.Tensor | None = None) -> None:
        """Put the kernel into its stream: to end by the flag in ``record``, or after ``chunks``.

        chunks : of each block; record : of `record`
        """
        record = self.record(footprint.blocks) if record is None else record
        chunk_bytes = self.chunk_bytes(footprint.threads)
        in_buffer = self.c.nbytes // chunk_bytes
        if in_buffer < footprint.blocks:
            raise UserError(
                f"stand-in of {footprint.blocks} blocks: its buffers hold {in_buffer} chunks"
            )
        chunk_ns = footprint.chunk_s(chunk_bytes) * _NS
        limits = (in_buffer, chunks, chunk_ns, int(LONGEST_S * _NS))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            record.record_stream(self._stream)
            arguments = [self.a, self.b, self.c, *limits, record]
            shape = footprint.blocks, footprint.threads
            cluster = self.cluster(footprint.blocks)
            self._send.launch(*shape, arguments, self.shared_bytes, cluster)

    def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
        """Start communicating, then compute, then stop; without a footprint, compute alone.

        ``compute`` must have run once before without a neighbour: what is loaded or allocated for the
        first time may have to wait until the GPU is idle. Nothing waits for the GPU here: synchronise
        before looking at the traffic.
        """
        blocks = footprint.blocks if footprint else 0
        record = self.record(blocks)
        if footprint:
            self.send(footprint, 2**63 - 1, record)
        marks = Marks("cuda")
        hold_ns, patience_ns = int(HOLD_S * _NS), int(PATIENCE_S * _NS)
        self._gate.launch(1, 1, [record, _OPENED, blocks, hold_ns, patience_ns, 0])
        marks.mark()
        compute()
        marks.mark()
        self._gate.launch(1, 1, [record, _CLOSED, blocks, 0, 0, 1])
        chunk_bytes = self.chunk_bytes(footprint.threads) if footprint else 0
        return Passage(marks, functools.partial(_read, record, chunk_bytes))

    def idle(self) -> None:
        """Compute nothing for two milliseconds, to see the communication by itself."""
        self._gate.launch(1, 1, [self.record(0), _OPENED, 0, int(2e-3 * _NS), 0, 0])

    def join(self) -> None:
        """Let torch's current stream go on only when all that was sent has ended."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, blocks: int) -> torch.Tensor:
        """What the kernel writes down, as in the source: (6 + 3 blocks,) zeros."""
        return torch.zeros(_HEAD + 3 * blocks, dtype=torch.int64, device="cuda")


def _read(record: torch.Tensor, chunk_bytes: int) -> Traffic:
    """What stands in a record once all has ended; nanoseconds are of the GPU's global timer."""
    words = record.tolist()
    opened, sent_before, closed, sent_after = words[_OPENED:_HEAD]
    blocks = np.reshape(np.array(words[_HEAD:], dtype=np.int64), (3, -1))
    # Relative to the opening first: a double does not hold the timer's nanoseconds.
    begins_s, ends_s = ((blocks[:2] - opened) / _NS).tolist()
    sent_bytes = float((sent_after - sent_before) * chunk_bytes)
    return Traffic(tuple(begins_s), tuple(ends_s), 0.0, (closed - opened) / _NS, sent_bytes)


def read_message(record: torch.Tensor) -> tuple[float, int]:
    """Of a message that has ended: seconds from its first block's begin to the last one's end, and chunks."""
    begins_ns, ends_ns, chunks = np.reshape(record.tolist()[_HEAD:], (3, -1))
    return int(ends_ns.max() - begins_ns.min()) / _NS, int(chunks.sum())


class CpuStandIn:
    """As many threads as blocks, each summing its own parts of buffers; NumPy lets go of the interpreter.

    With more threads than cores nothing runs at the same time all the time: what the stand-in got is to
    be seen from the bytes that it moved.
    """

    registers = shared_bytes = 0
    least_s = 0.02  # several of the scheduler's slices: threads that share a core take turns
    chunk_elements = 256 * KIB  # long enough for another thread to wake up and get the interpreter

    def __init__(self, buffer_bytes: int = 64 * MIB) -> None:
        elements = max(buffer_bytes // 4, self.chunk_elements)
        self.a, self.b = np.random.default_rng(0).random((2, elements), dtype=np.float32)
        self.c = np.empty_like(self.a)
        self._stream, self._sent = ThreadPoolExecutor(1), deque[Future[None]]()

    def chunk_bytes(self, threads: int) -> int:
        """What a block sums at a time."""
        return 4 * self.chunk_elements

    def send(self, footprint: Footprint, chunks: int, record: torch.Tensor) -> None:
        """As `GpuStandIn.send`, after ``chunks``: a thread of its own is the stream."""
        self._sent.append(self._stream.submit(self._message, footprint, chunks, record))

    def join(self) -> None:
        """Wait until all that was sent has ended."""
        while self._sent:
            self._sent.popleft().result()

    def record(self, blocks: int) -> torch.Tensor:
        """As `GpuStandIn.record`; times are those of `time.perf_counter`."""
        return torch.zeros(_HEAD + 3 * blocks, dtype=torch.int64)

    def _message(self, footprint: Footprint, chunks: int, record: torch.Tensor) -> None:
        sent = [0] * footprint.blocks
        how = footprint, threading.Event(), threading.Semaphore(0), sent
        with ThreadPoolExecutor(footprint.blocks) as pool:
            spans = list(pool.map(lambda block: self._send(*how, block, chunks), range(len(sent))))
        times_ns = (_NS * np.transpose(spans)).astype(np.int64)
        record[_HEAD:] = torch.from_numpy(np.concatenate([*times_ns, sent]))

    def cluster(self, blocks: int) -> int:
        """Threads are not tied together."""
        return 1

    def idle(self) -> None:
        """As `GpuStandIn.idle`."""
        time.sleep(0.02)

    def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
        """As `GpuStandIn.beside`, but over when it returns."""
        blocks = footprint.blocks if footprint else 0
        flag, begun, sent = threading.Event(), threading.Semaphore(0), [0] * blocks
        marks = Marks("cpu")
        with ThreadPoolExecutor(max(1, blocks)) as pool:
            try:
                spans = [
                    pool.submit(self._send, footprint, flag, begun, sent, number)
                    for number in range(blocks)
                    if footprint
                ]
                for _ in spans:
                    begun.acquire(timeout=PATIENCE_S)
                opened_s, sent_before = time.perf_counter(), sum(sent)
                marks.mark()
                compute()
                marks.mark()
                closed_s, sent_after = time.perf_counter(), sum(sent)
            finally:
                flag.set()
        begins_s, ends_s = np.reshape([span.result() for span in spans], (-1, 2)).T.tolist()
        sent_bytes = float(sent_after - sent_before) * self.chunk_elements * 4
        traffic = Traffic(tuple(begins_s), tuple(ends_s), opened_s, closed_s, sent_bytes)
        return Passage(marks, lambda: traffic)

    def _send(
        self,
        footprint: Footprint,
        flag: threading.Event,
        begun: threading.Semaphore,
        sent: list[int],
        number: int,
        most: int = sys.maxsize,
    ) -> tuple[float, float]:
        """One block; when it began and ended."""
        chunk_s = footprint.chunk_s(4 * self.chunk_elements)
        starts = range(0, len(self.c) - self.chunk_elements + 1, self.chunk_elements)
        own = starts[number :: footprint.blocks] or starts[:1]
        begin_s = time.perf_counter()
        begun.release()
        for done in itertools.count():
            sent[number] = done
            now_s = time.perf_counter()
            early_s = begin_s + done * chunk_s - now_s
            halt = flag.wait(early_s) if early_s > 0 else flag.is_set()
            if halt or done >= most or now_s - begin_s > LONGEST_S:
                break
            start = own[done % len(own)]
            part = slice(start, start + self.chunk_elements)
            np.add(self.a[part], self.b[part], out=self.c[part])
        return begin_s, time.perf_counter()


StandIn = GpuStandIn | CpuStandIn

# -- CUDA compiled while the program runs, launched through the driver ---------------------------
#
# It needs what every CUDA build of torch brings along (NVRTC) and the driver, no toolkit and no headers.
# torch's own ``torch.cuda._compile_kernel`` (2.9 and later) insists on a toolkit, passes whole numbers
# as 32 bits, and cannot ask for a cluster.

_REGISTERS, _DYNAMIC_SHARED_BYTES = 4, 8  # CUfunction_attribute
_CLUSTER, _CLUSTER_POLICY, _SPREAD = 4, 5, 1  # CUlaunchAttributeID, CUclusterSchedulingPolicy


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a number, and a value of up to 64 bytes."""

    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", c_uint),
    )


class CudaFunction:
    """A function that runs on the current GPU.

    registers : that the compiler gave to each thread
    """

    def __init__(self, module: c_void_p, name: str) -> None:
        self._function, found = c_void_p(), c_int()
        _driver("cuModuleGetFunction", byref(self._function), module, c_char_p(name.encode()))
        _driver("cuFuncGetAttribute", byref(found), _REGISTERS, self._function)
        self.registers = found.value

    def allow_shared(self, n_bytes: int) -> None:
        """Let a block ask for up to ``n_bytes`` of dynamic shared memory: without this, for 48 KiB."""
        _driver("cuFuncSetAttribute", self._function, _DYNAMIC_SHARED_BYTES, n_bytes)

    def launch(
        self,
        blocks: int,
        threads: int,
        arguments: Sequence[torch.Tensor | int | float],
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """Put ``blocks`` blocks of ``threads`` threads into torch's current stream.

        cluster : blocks that must run at the same time and near each other, yet spread over
            multiprocessors, as NCCL asks for; divides ``blocks``, above 1 from Hopper on

        Tensors must live until the kernel has ended. Raises UserError when the driver refuses.
        """
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[0].value[:3] = _CLUSTER, (cluster, 1, 1)
        attributes[1].id, attributes[1].value[0] = _CLUSTER_POLICY, _SPREAD
        how = _Launch(
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=attributes,
            n_attributes=len(attributes) if cluster > 1 else 0,
        )
        values = [_c_value(argument) for argument in arguments]
        places = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        _driver("cuLaunchKernelEx", byref(how), self._function, places, None)


def _c_value(argument: torch.Tensor | int | float) -> c_void_p | c_uint64 | c_double:
    """A tensor goes as its address, an int as 64 bits without sign, a float as double."""
    if isinstance(argument, torch.Tensor):
        return c_void_p(argument.data_ptr())
    return c_uint64(argument) if isinstance(argument, int) else c_double(argument)


def cubin(architecture: str) -> bytes:
    """The source's machine code for an architecture such as "sm_90"; no GPU is needed to make it.

    Raises UserError for a torch without CUDA, and with the compiler's first complaint.
    """
    nvrtc = _nvrtc()
    words = [f"--gpu-architecture={architecture}", *OPTIONS]
    program, size = c_void_p(), c_size_t()
    named = c_char_p(SOURCE.encode()), c_char_p(b"ddlkit.cu")
    _check_nvrtc(nvrtc.nvrtcCreateProgram(byref(program), *named, 0, None, None))
    try:
        given = (c_char_p * len(words))(*(word.encode() for word in words))
        failed = nvrtc.nvrtcCompileProgram(program, len(words), given)
        nvrtc.nvrtcGetProgramLogSize(program, byref(size))
        log = (c_char * size.value)()
        nvrtc.nvrtcGetProgramLog(program, log)
        _check_nvrtc(failed, log.value.decode(errors="replace"))
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, byref(size)))
        image = (c_char * size.value)()
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
    return image.raw


def _check_nvrtc(status: int, log: str = "") -> None:
    if status:
        complaint = next((line for line in log.splitlines() if "error" in line), f"status {status}")
        raise UserError(f"CUDA source does not compile: {complaint}")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC of torch's CUDA version: where the loader finds it, or as torch's wheels bring it along."""
    if torch.version.cuda is None:
        raise UserError("this torch has no CUDA, so no NVRTC: install a CUDA build of torch")
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    home = Path(torch.__file__).parent
    brought = (*home.parent.glob(f"nvidia/*/lib/{name}"), *home.glob("lib/libnvrtc-[0-9]*.so*"))
    for candidate in (name, *map(str, brought)):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise UserError(f"{name} is neither where the loader looks nor beside torch in {home.parent}")


def _driver(call: str, *arguments: object) -> None:
    """One call of the CUDA driver. Raises UserError with the driver's words when it fails."""
    library = ctypes.CDLL("libcuda.so.1")
    status = getattr(library, call)(*arguments)
    if status:
        words = c_char_p()
        library.cuGetErrorString(status, byref(words))
        raise UserError(f"{call}: {(words.value or b'unknown error').decode()} ({status})")
