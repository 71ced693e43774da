"""A kernel that loads a GPU as a communication kernel does, for where there is no one to talk to.

It occupies what NCCL's ring kernel does (2.28 on Hopper: a block a channel, 96 registers a thread, about
102 KiB of dynamic shared memory a block, clusters of 4 blocks where that divides), reads two buffers and
writes their sum, at a rate of sums. Not faithful: NCCL's buffers live largely in the L2 cache, and nobody
waits: at full speed it is an upper bound, at a link's rate fair.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import (
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB
from ddlkit.jobs.clock import Marks

Compute = Callable[[], object]

MOST_THREADS = 640  # that NCCL ever gives to a block
FEWEST_THREADS, WARP = 128, 32
SHARED_BYTES = 102 * KIB
CLUSTER = 4
BUFFER_BYTES = 256 * MIB  # three of these pass through no cache

LONGEST_S = 2.0  # a stand-in that nobody stops ends by itself
PATIENCE_NS = 50_000_000  # for the stand-in to start, before the computation does
HOLD_NS = 1_000_000  # in which the host gives the GPU all that is to follow, at 100 us a launch

# 16 bytes a load, 2 x 10 loads under way: 94 registers on sm_90 (NVRTC 13.0), as NCCL's kernel has 96.
UNROLL = 10
OPTIONS = ("--maxrregcount=96", f"-DUNROLL={UNROLL}", f"-DMOST_THREADS={MOST_THREADS}")
SOURCE = Path(__file__).with_suffix(".cu").read_text()

TICK_S = 1e-6  # the GPU's timer may not see what is shorter
_OPENED, _CLOSED, _HEAD = 2, 4, 6  # as in the source
_NS = 1e9


def nccl_threads(asked: int) -> int:
    """Return how many threads a block has where NCCL is asked for ``asked``: it adds a warp of its own."""
    return min(MOST_THREADS, max(FEWEST_THREADS, asked + WARP))


@dataclass(frozen=True)
class Footprint:
    """How much communicates, and how fast all blocks together (0: unlimited)."""

    blocks: int
    threads: int
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """What was sent from ``opened_s`` to ``closed_s``, around a computation; begins_s, ends_s : of blocks."""

    begins_s: Sequence[float]
    ends_s: Sequence[float]
    opened_s: float
    closed_s: float
    sent_bytes: float

    @property
    def overlap_share(self) -> float:
        """Return the share of the computation's time in which every block of the kernel ran."""
        if not len(self.begins_s):
            return 0.0
        both_s = min(self.closed_s, *self.ends_s) - max(self.opened_s, *self.begins_s)
        return max(0.0, both_s / (self.closed_s - self.opened_s))

    @property
    def bytes_per_s(self) -> float:
        """Return the rate of sending while the computation ran."""
        return self.sent_bytes / (self.closed_s - self.opened_s)


Passage = tuple[Marks, Callable[[], Traffic]]
"""One computation: its time by the device's clock, and, once it is over, what ran beside it."""


class GpuStandIn:
    """The CUDA C++ kernel of standin.cu, on torch's current GPU and in a stream of its own."""

    chances = 1  # kernels given to the GPU together run together, or never do
    labels: Mapping[str, Any] = {"ranks": 1}

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        torch.cuda.synchronize()  # makes torch's context the current one, where modules belong
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        module = c_void_p()
        _driver(
            "cuModuleLoadData",
            byref(module),
            c_char_p(cubin(f"sm_{gpu.major}{gpu.minor}")),
        )
        most_bytes = getattr(gpu, "shared_memory_per_block_optin", 48 * KIB)
        self._shared_bytes, self._clusters = (
            min(SHARED_BYTES, most_bytes),
            gpu.major >= 9,
        )
        self._send = CudaFunction(module, "standin", self._shared_bytes)
        self._gate = CudaFunction(module, "gate")
        self.a, self.b, self.c = torch.randn(3, buffer_bytes // 16 * 4, device="cuda")
        self._stream = torch.cuda.Stream()

    def columns(self, footprint: Footprint) -> dict[str, Any]:
        """Return what the kernel takes, as columns of table ``contention``."""
        return {
            "blocks": footprint.blocks,
            "threads": footprint.threads,
            "communication": "standin",
            "taken_blocks": footprint.blocks,
            "taken_threads": nccl_threads(footprint.threads),
            "bytes_per_s_asked": footprint.bytes_per_s,
            "registers": self._send.registers,
            "shared_bytes": self._shared_bytes,
            # As NCCL does it, from Hopper on.
            "cluster": CLUSTER
            if self._clusters and footprint.blocks % CLUSTER == 0
            else 1,
        }

    def chunk_bytes(self, threads: int) -> int:
        """Return what a block sums at a time where ``threads`` are asked for."""
        return 16 * UNROLL * nccl_threads(threads)

    def send(self, footprint: Footprint, chunks: int, record: torch.Tensor) -> None:
        """Put the kernel into its stream: to end by the flag in `record`, or after ``chunks`` a block."""
        chunk_bytes = self.chunk_bytes(footprint.threads)
        in_buffer = self.c.nbytes // chunk_bytes
        rate = footprint.bytes_per_s
        chunk_ns = _NS * chunk_bytes * footprint.blocks / rate if rate else 0.0
        limits = (in_buffer, chunks, chunk_ns, int(LONGEST_S * _NS))
        shape = footprint.blocks, nccl_threads(footprint.threads)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            record.record_stream(self._stream)
            arguments = [self.a, self.b, self.c, *limits, record]
            self._send.launch(*shape, arguments, self.columns(footprint)["cluster"])

    def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
        """Start communicating, then compute, which must have run before, then stop; or compute alone."""
        blocks, chunk_bytes, record = 0, 0, self.record(0)
        if footprint:
            blocks, chunk_bytes = footprint.blocks, self.chunk_bytes(footprint.threads)
            record = self.record(blocks)
            self.send(footprint, 2**63 - 1, record)
        marks = Marks("cuda")
        self._gate.launch(1, 1, [record, _OPENED, blocks, HOLD_NS, PATIENCE_NS, 0])
        marks.mark()
        compute()
        marks.mark()
        self._gate.launch(1, 1, [record, _CLOSED, blocks, 0, 0, 1])
        return marks, functools.partial(_read, record, chunk_bytes)

    def join(self) -> None:
        """Let torch's current stream go on only when all that was sent has ended."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, blocks: int) -> torch.Tensor:
        """Return (6 + 3 blocks,) zeros for what the kernel writes down, as in the source."""
        return torch.zeros(_HEAD + 3 * blocks, dtype=torch.int64, device="cuda")


def _read(record: torch.Tensor, chunk_bytes: int) -> Traffic:
    """Return what stands in a record once all has ended; nanoseconds are of the GPU's global timer."""
    words = record.tolist()
    opened, sent_before, closed, sent_after = words[_OPENED:_HEAD]
    blocks = np.reshape(np.array(words[_HEAD:], dtype=np.int64), (3, -1))
    # Relative to the opening first: a double does not hold the timer's nanoseconds.
    begins_s, ends_s = (blocks[:2] - opened) / _NS
    sent_bytes = float((sent_after - sent_before) * chunk_bytes)
    return Traffic(
        begins_s, ends_s, 0.0, max(TICK_S, (closed - opened) / _NS), sent_bytes
    )


def read_message(record: torch.Tensor) -> tuple[float, int]:
    """Return seconds from a message's first block's begin to its last one's end, and chunks."""
    begins_ns, ends_ns, chunks = np.reshape(record.tolist()[_HEAD:], (3, -1))
    return int(ends_ns.max() - begins_ns.min()) / _NS, int(chunks.sum())


# -- CUDA compiled while the program runs: torch's own way insists on a toolkit, and has no clusters --

_REGISTERS, _DYNAMIC_SHARED_BYTES = 4, 8  # CUfunction_attribute
_CLUSTER, _CLUSTER_POLICY, _SPREAD = (
    4,
    5,
    1,
)  # CUlaunchAttributeID, CUclusterSchedulingPolicy


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
    """A function on the current GPU; registers : of each thread; shared_bytes : a block's dynamic memory."""

    def __init__(self, module: c_void_p, name: str, shared_bytes: int = 0) -> None:
        self._function, count, self._shared_bytes = c_void_p(), c_int(), shared_bytes
        _driver(
            "cuModuleGetFunction",
            byref(self._function),
            module,
            c_char_p(name.encode()),
        )
        _driver("cuFuncGetAttribute", byref(count), _REGISTERS, self._function)
        # Without being allowed more, a block may ask for 48 KiB.
        _driver(
            "cuFuncSetAttribute", self._function, _DYNAMIC_SHARED_BYTES, shared_bytes
        )
        self.registers = count.value

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[Any], cluster: int = 1
    ) -> None:
        """Put the function into torch's current stream.

        arguments : tensors go as addresses, and live until it has ended; ints as 64 bits without sign
        cluster : blocks that run near each other, yet spread
        """
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[0].value[:3] = _CLUSTER, (cluster, 1, 1)
        attributes[1].id, attributes[1].value[0] = _CLUSTER_POLICY, _SPREAD
        grid, block, stream = (
            (blocks, 1, 1),
            (threads, 1, 1),
            torch.cuda.current_stream(),
        )
        given = attributes, len(attributes) if cluster > 1 else 0
        how = _Launch(grid, block, self._shared_bytes, stream.cuda_stream, *given)
        kinds: dict[type, Any] = {int: c_uint64, float: c_double}
        kinds[torch.Tensor] = lambda x: c_void_p(x.data_ptr())
        values = [kinds[type(argument)](argument) for argument in arguments]
        places = (c_void_p * len(values))(*map(ctypes.addressof, values))
        _driver("cuLaunchKernelEx", byref(how), self._function, places, None)


@functools.cache
def cubin(architecture: str) -> bytes:
    """Compile the source for an architecture such as "sm_90". Raises UserError with why it cannot."""
    nvrtc, program, size = _nvrtc(), c_void_p(), c_size_t()

    def fetch(what: str) -> Any:
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size))
        data = (c_char * size.value)()
        getattr(nvrtc, f"nvrtcGet{what}")(program, data)
        return data

    words = [f"--gpu-architecture={architecture}", *OPTIONS]
    given = (c_char_p * len(words))(*(word.encode() for word in words))
    named = c_char_p(SOURCE.encode()), c_char_p(b"ddlkit.cu")
    nvrtc.nvrtcCreateProgram(byref(program), *named, 0, None, None)
    try:
        if failed := nvrtc.nvrtcCompileProgram(program, len(words), given):
            lines = fetch("ProgramLog").value.decode(errors="replace").splitlines()
            complaint = next(
                (line for line in lines if "error" in line), f"status {failed}"
            )
            raise UserError(f"CUDA source does not compile: {complaint}")
        return bytes(fetch("CUBIN").raw)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def in_wheels(pattern: str) -> list[Path]:
    """Return files that NVIDIA's wheels brought along."""
    wheels = importlib.util.find_spec("nvidia")
    places = (wheels.submodule_search_locations if wheels else None) or ()
    return [path for place in places for path in Path(place).glob(pattern)]


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Return NVRTC of torch's CUDA version, of wheels, of torch itself, or where the loader finds it."""
    version = (torch.version.cuda or "*").partition(".")[0]
    paths = in_wheels(f"*/lib/libnvrtc.so.{version}")
    paths += Path(torch.__file__).parent.glob("lib/libnvrtc-[0-9]*.so*")
    for path in paths:
        with suppress(OSError):
            for half in path.parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(half), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    with suppress(OSError):
        return ctypes.CDLL(f"libnvrtc.so.{version}".removesuffix(".*"))
    raise UserError(
        f"no NVRTC {version}: install a CUDA build of torch, or nvidia-cuda-nvrtc"
    )


def _driver(call: str, *arguments: object) -> None:
    """Call the CUDA driver. Raises UserError with its words where it fails."""
    library = _libcuda()
    if status := getattr(library, call)(*arguments):
        words = c_char_p()
        library.cuGetErrorString(status, byref(words))
        raise UserError(
            f"{call}: {(words.value or b'unknown error').decode()} ({status})"
        )


# Opened once: looking it up takes longer than a launch, for which training waits.
_libcuda = functools.cache(lambda: ctypes.CDLL("libcuda.so.1"))
