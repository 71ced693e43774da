"""A kernel that loads a GPU as a communication kernel does, for where there is no other GPU to talk to.

The kernel takes the resources of NCCL's ring kernel (2.28 on Hopper): a block for each channel, 96 registers
a thread, about 102 KiB of dynamic shared memory a block, and clusters of 4 blocks where that divides. It
reads two buffers and writes their sum, at a given rate. Like NCCL, it adds a warp to the threads that are
asked for and never launches fewer than 128. The kernel is not faithful in two ways. NCCL's buffers live
largely in the L2 cache, and NCCL polls for its peers and waits, while nobody waits for the stand-in. At full
speed it is therefore an upper bound, while at the rate of a link it is a fair comparison.
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
FEWEST_THREADS = 128
WARP = 32
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
# Positions in a record, as in standin.cu.
_OPENED = 2
_CLOSED = 4
_HEAD = 6
_NS = 1e9


def nccl_threads(asked: int) -> int:
    """Return how many threads a block has if NCCL is asked for ``asked``.

    NCCL adds a warp of its own, and keeps to the range from `FEWEST_THREADS` to `MOST_THREADS`.
    """
    return min(MOST_THREADS, max(FEWEST_THREADS, asked + WARP))


@dataclass(frozen=True)
class Footprint:
    """The resources of a communication kernel.

    Attributes
    ----------
    blocks, threads : int
        The blocks, and the threads of each block that NCCL is asked for. `nccl_threads` are taken.
    bytes_per_s : float
        The rate of all blocks together in bytes/s, or 0 for no limit.
    """

    blocks: int
    threads: int
    bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """What was sent by communication next to a computation.

    Attributes
    ----------
    begins_s, ends_s : sequence of float
        When each block or stream of the communication began and ended, in seconds.
    opened_s, closed_s : float
        When the computation began and ended, by the same clock.
    sent_bytes : float
        The bytes that were sent while the computation ran.
    """

    begins_s: Sequence[float]
    ends_s: Sequence[float]
    opened_s: float
    closed_s: float
    sent_bytes: float

    @property
    def overlap_share(self) -> float:
        """Return the share of the computation's time in which every block of the communication ran."""
        # Nothing communicates while a computation runs alone. There are then no blocks.
        if not len(self.begins_s):
            return 0.0
        overlap_begin_s = max(self.opened_s, *self.begins_s)
        overlap_end_s = min(self.closed_s, *self.ends_s)
        # The overlap is negative if a block ended before the
        # computation began, or before another block began.
        overlap_s = overlap_end_s - overlap_begin_s
        return max(0.0, overlap_s / (self.closed_s - self.opened_s))

    @property
    def bytes_per_s(self) -> float:
        """Return the rate of sending while the computation ran, in bytes/s."""
        return self.sent_bytes / (self.closed_s - self.opened_s)


Passage = tuple[Marks, Callable[[], Traffic]]
"""The marks of a computation, and a function that reads what was sent once the computation is over."""


class GpuStandIn:
    """The CUDA C++ kernel of standin.cu, on torch's current GPU and in a stream of its own.

    It takes the resources of NCCL's kernel, and adds two buffers of ``buffer_bytes`` each into a
    third one.
    """

    # How often a run beside a computation is tried. The first try loads the kernel, which then
    # takes turns with other kernels.
    chances = 3
    labels: Mapping[str, Any] = {"ranks": 1}

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        # The call makes torch's CUDA context the current one, into which the driver loads modules.
        torch.cuda.synchronize()
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        # The compiled kernels.
        image = cubin(f"sm_{gpu.major}{gpu.minor}")
        module = c_void_p()
        _driver("cuModuleLoadData", byref(module), c_char_p(image))
        # The most shared memory that a block may ask for. If torch does not tell, 48 KiB, which a
        # block may have on every GPU.
        most_bytes = getattr(gpu, "shared_memory_per_block_optin", 48 * KIB)
        self._shared_bytes = min(SHARED_BYTES, most_bytes)
        # GPUs have clusters from Hopper on.
        self._has_clusters = gpu.major >= 9
        self._send = CudaFunction(module, "standin", self._shared_bytes)
        # The gate is a second kernel, in the stream of a computation. It waits for the first kernel
        # to run, ends it, and notes the time.
        self._gate = CudaFunction(module, "gate")
        # The kernel loads 16 bytes at a time, which are 4 numbers of float32. A buffer therefore
        # has a multiple of 4 numbers.
        elements = buffer_bytes // 16 * 4
        self.a, self.b, self.c = torch.randn(3, elements, device="cuda")
        self._stream = torch.cuda.Stream()

    def columns(self, footprint: Footprint) -> dict[str, Any]:
        """Return the columns of table ``contention`` that describe a footprint.

        They say what NCCL is asked for, and what the kernel takes: as many threads as NCCL's kernel would.
        """
        return {
            "blocks": footprint.blocks,
            "threads": footprint.threads,
            "communication": "standin",
            "taken_blocks": footprint.blocks,
            "taken_threads": nccl_threads(footprint.threads),
            "bytes_per_s_asked": footprint.bytes_per_s,
            "registers": self._send.registers,
            "shared_bytes": self._shared_bytes,
            "cluster": self._cluster(footprint.blocks),
        }

    def _cluster(self, blocks: int) -> int:
        """Return how many of these blocks form a cluster, as in NCCL. 1 stands for none."""
        if self._has_clusters and blocks % CLUSTER == 0:
            return CLUSTER
        return 1

    def chunk_bytes(self, threads: int) -> int:
        """Return the bytes of a chunk, which a block sums at a time, by the threads asked for."""
        # Each thread sums `UNROLL` loads of 16 bytes.
        return 16 * UNROLL * nccl_threads(threads)

    def send(self, footprint: Footprint, chunks: int, record: torch.Tensor) -> None:
        """Put the kernel into its own stream, after all work of torch's current stream so far.

        Parameters
        ----------
        footprint : Footprint
            What the kernel takes.
        chunks : int
            The number of chunks after which each block ends.
        record : Tensor, shape (6 + 3 blocks,)
            Where the kernel writes down its times and chunks, as `record` makes it. A flag in the
            record, which the gate of `beside` can set, ends the kernel.
        """
        # NCCL adds a warp to the threads that it is asked for, and so does the kernel.
        threads = nccl_threads(footprint.threads)
        chunk_bytes = self.chunk_bytes(footprint.threads)
        chunks_in_buffer = self.c.nbytes // chunk_bytes
        # A time of 0 for each chunk means no limit of the rate.
        chunk_ns = 0.0
        if footprint.bytes_per_s:
            # In this time each block sums a chunk, so that all blocks together have the rate.
            chunk_ns = _NS * chunk_bytes * footprint.blocks / footprint.bytes_per_s
        # A kernel that nobody stops ends by itself after this time.
        longest_ns = int(LONGEST_S * _NS)
        # In the order of the kernel's parameters.
        arguments = [
            self.a,
            self.b,
            self.c,
            chunks_in_buffer,
            chunks,
            chunk_ns,
            longest_ns,
            record,
        ]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Torch must not give the record's memory away before the kernel in this stream has
            # ended.
            record.record_stream(self._stream)
            self._send.launch(
                footprint.blocks,
                threads,
                arguments,
                self._cluster(footprint.blocks),
            )

    def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
        """Start communicating, compute, and stop communicating.

        Parameters
        ----------
        footprint : Footprint or None
            What communicates. With None, the computation runs alone.
        compute : callable
            The computation, which must have run before. The first run loads and allocates, which
            waits for the end of the kernel.

        Returns
        -------
        marks : Marks
            The begin and the end of the computation.
        read : callable
            Returns the `Traffic` during the computation, once the computation is over.
        """
        if footprint:
            blocks = footprint.blocks
            # What is sent is counted in chunks of so many bytes.
            chunk_bytes = self.chunk_bytes(footprint.threads)
            record = self.record(blocks)
            # So many chunks are never sent, so that the kernel runs until the second gate ends it.
            self.send(footprint, chunks=2**63 - 1, record=record)
        else:
            # Nothing is sent. The gates only note the times of the computation.
            blocks = 0
            chunk_bytes = 0
            record = self.record(0)
        marks = Marks("cuda")
        # The first gate waits until all blocks run, and at least so long that the host can hand
        # over the computation.
        self._launch_gate(
            record,
            _OPENED,
            blocks,
            least_wait_ns=HOLD_NS,
            most_wait_ns=PATIENCE_NS,
            ends_blocks=False,
        )
        marks.mark()
        compute()
        marks.mark()
        self._launch_gate(
            record, _CLOSED, blocks, least_wait_ns=0, most_wait_ns=0, ends_blocks=True
        )
        return marks, functools.partial(_read, record, chunk_bytes)

    def _launch_gate(
        self,
        record: torch.Tensor,
        position: int,
        blocks: int,
        *,
        least_wait_ns: int,
        most_wait_ns: int,
        ends_blocks: bool,
    ) -> None:
        """Put a gate, which is a kernel of one thread, into torch's current stream.

        Parameters
        ----------
        record : Tensor, shape (6 + 3 blocks,)
            Where the gate writes the time, and how many chunks were sent by then.
        position : int
            The position of the time in the record. The chunks follow it.
        blocks : int
            The number of blocks that the gate waits for, and whose chunks it adds up.
        least_wait_ns, most_wait_ns : int
            How long the gate waits at least, and how long it waits for the blocks at most.
        ends_blocks : bool
            Whether the gate ends the blocks when it has noted the time.
        """
        # In the order of the kernel's parameters.
        arguments = [
            record,
            position,
            blocks,
            least_wait_ns,
            most_wait_ns,
            int(ends_blocks),
        ]
        self._gate.launch(1, 1, arguments)

    def join(self) -> None:
        """Let torch's current stream go on only when all that was sent has ended."""
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, blocks: int) -> torch.Tensor:
        """Return zeros of shape (6 + 3 blocks,), for what the kernel and the gates write down.

        There are six whole numbers of the gates, then the begins, the ends and the chunks of all
        blocks.
        """
        return torch.zeros(_HEAD + 3 * blocks, dtype=torch.int64, device="cuda")


def _read(record: torch.Tensor, chunk_bytes: int) -> Traffic:
    """Return what a record holds once the computation is over.

    Times are in seconds since the computation began. Two gates, kernels of one thread right before
    and after the computation, have written down the time and how many chunks were sent by then.

    Parameters
    ----------
    record : Tensor, shape (6 + 3 blocks,)
        What the kernel and the gates have written down.
    chunk_bytes : int
        The bytes of a chunk. They do not matter without blocks.
    """
    # The first two words, which are not needed, are a flag that ends the kernel and the number of
    # blocks that have begun. Then come the time and the chunks of each gate.
    words = record.tolist()
    opened_ns, chunks_before, closed_ns, chunks_after = words[_OPENED:_HEAD]
    # Three rows with a number for each block: begins and ends
    # in nanoseconds of the GPU's global timer, and chunks.
    blocks = np.reshape(np.array(words[_HEAD:], dtype=np.int64), (3, -1))
    # The begin of the computation is subtracted while all times are whole numbers, because a double
    # does not hold the timer's many digits to a nanosecond.
    begins_s, ends_s = (blocks[:2] - opened_ns) / _NS
    return Traffic(
        begins_s,
        ends_s,
        opened_s=0.0,
        # The timer may see no time at all. The rate, which is divided by the time, needs some.
        closed_s=max(TICK_S, (closed_ns - opened_ns) / _NS),
        sent_bytes=float((chunks_after - chunks_before) * chunk_bytes),
    )


def read_message(record: torch.Tensor) -> tuple[float, int]:
    """Return the seconds of a message, and how many chunks all its blocks have sent.

    The message lasts from the begin of its first block to the end of its last block.
    """
    # After the head, the record has three rows with a number for each block.
    begins_ns, ends_ns, chunks = np.reshape(record.tolist()[_HEAD:], (3, -1))
    message_s = int(ends_ns.max() - begins_ns.min()) / _NS
    return message_s, int(chunks.sum())


# -- CUDA compiled while the program runs ----------------------------------------------
# The way of torch itself insists on a toolkit, and has no clusters.

# CUfunction_attribute
_REGISTERS = 4
_DYNAMIC_SHARED_BYTES = 8
# CUlaunchAttributeID
_CLUSTER = 4
_CLUSTER_POLICY = 5
# CUclusterSchedulingPolicy
_SPREAD = 1


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


def _cluster_attributes(cluster: int) -> ctypes.Array[_Attribute]:
    """Return the attributes of a launch in clusters of that many blocks.

    The blocks of a cluster are spread over several multiprocessors (SMs) of the GPU.
    """
    shape, scheduling = _Attribute(), _Attribute()
    shape.id = _CLUSTER
    shape.value[:3] = (cluster, 1, 1)
    scheduling.id = _CLUSTER_POLICY
    scheduling.value[0] = _SPREAD
    return (_Attribute * 2)(shape, scheduling)


class CudaFunction:
    """A function of CUDA C++ on the current GPU, a kernel.

    Parameters
    ----------
    module : c_void_p
        The module that holds the function.
    name : str
        The name of the function.
    shared_bytes : int, optional
        The dynamic shared memory of a block.

    Attributes
    ----------
    registers : int
        The registers of each thread.
    """

    def __init__(self, module: c_void_p, name: str, shared_bytes: int = 0) -> None:
        self._function = c_void_p()
        self._shared_bytes = shared_bytes
        function_name = c_char_p(name.encode())
        _driver("cuModuleGetFunction", byref(self._function), module, function_name)
        # The driver writes its results into variables of C.
        registers = c_int()
        _driver("cuFuncGetAttribute", byref(registers), _REGISTERS, self._function)
        # Without this call, a block may have no more than 48 KiB.
        _driver(
            "cuFuncSetAttribute", self._function, _DYNAMIC_SHARED_BYTES, shared_bytes
        )
        self.registers = registers.value

    def launch(
        self, blocks: int, threads: int, arguments: Sequence[Any], cluster: int = 1
    ) -> None:
        """Put the function into torch's current stream.

        Parameters
        ----------
        blocks, threads : int
            The blocks, and the threads of each block.
        arguments : sequence of Tensor, int or float
            The arguments of the function. Tensors go as addresses, and must live until the function
            has ended. Whole numbers go as 64 bits without sign, and others as doubles.
        cluster : int, optional
            How many blocks form a cluster, or 1 for no clusters. The blocks of a cluster are spread
            over several multiprocessors (SMs) of the GPU.
        """
        # The shape of a cluster and how its blocks are spread. GPUs before Hopper refuse both
        # attributes, so that neither is passed without clusters.
        attributes = _cluster_attributes(cluster)
        n_attributes = len(attributes) if cluster > 1 else 0
        # In the order of the fields of CUlaunchConfig.
        configuration = _Launch(
            (blocks, 1, 1),
            (threads, 1, 1),
            self._shared_bytes,
            torch.cuda.current_stream().cuda_stream,
            attributes,
            n_attributes,
        )
        # The driver takes the address of each argument, and reads the arguments before the call
        # returns.
        values = [_c_value(argument) for argument in arguments]
        addresses = (c_void_p * len(values))(
            *[ctypes.addressof(value) for value in values]
        )
        # The last argument would be another way to pass the arguments of the function.
        _driver(
            "cuLaunchKernelEx", byref(configuration), self._function, addresses, None
        )


def _c_value(argument: torch.Tensor | int | float) -> Any:
    """Return an argument of a CUDA function as an address, a whole number or a double of C."""
    if isinstance(argument, torch.Tensor):
        return c_void_p(argument.data_ptr())
    if isinstance(argument, int):
        return c_uint64(argument)
    return c_double(argument)


@functools.cache
def cubin(architecture: str) -> bytes:
    """Return the kernels of standin.cu, compiled for an architecture such as "sm_90".

    Raises UserError with the compiler's first error if the source does not compile.
    """
    # The functions of the compiler return 0 if all went well.
    nvrtc = _nvrtc()
    program = c_void_p()
    options = [f"--gpu-architecture={architecture}", *OPTIONS]
    c_options = (c_char_p * len(options))(*(option.encode() for option in options))
    source = c_char_p(SOURCE.encode())
    name = c_char_p(b"ddlkit.cu")
    # The compiler uses the name in its errors only. The zero and the two None mean no headers.
    nvrtc.nvrtcCreateProgram(byref(program), source, name, 0, None, None)
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), c_options)
        if status:
            log = _fetch(nvrtc, program, "ProgramLog").value.decode(errors="replace")
            errors = [line for line in log.splitlines() if "error" in line]
            complaint = errors[0] if errors else f"status {status}"
            raise UserError(f"CUDA source does not compile: {complaint}")
        return bytes(_fetch(nvrtc, program, "CUBIN").raw)
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))


def _fetch(nvrtc: ctypes.CDLL, program: c_void_p, what: str) -> Any:
    """Return an output of a compilation, "ProgramLog" or "CUBIN", as an array of bytes.

    The compiler has a function for the size of each output, and one that writes it into memory of
    that size.
    """
    size = c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, byref(size))
    data = (c_char * size.value)()
    getattr(nvrtc, f"nvrtcGet{what}")(program, data)
    return data


def in_wheels(pattern: str) -> list[Path]:
    """Return the files that NVIDIA's wheels have installed and that match a glob pattern.

    The list is empty if no such wheel is installed.
    """
    # The wheels share the package "nvidia", which may lie in several folders.
    wheels = importlib.util.find_spec("nvidia")
    if wheels is None or not wheels.submodule_search_locations:
        return []
    paths: list[Path] = []
    for folder in wheels.submodule_search_locations:
        paths += Path(folder).glob(pattern)
    return paths


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """Return NVRTC, which is NVIDIA's compiler as a library, of torch's CUDA version.

    NVRTC is looked for in NVIDIA's wheels, then in torch itself, and then where the loader of the
    system finds it. Raises UserError if there is none.
    """
    # The major version. If torch was built without CUDA, any version will do, and "*" is a pattern
    # that finds all.
    version = (torch.version.cuda or "*").partition(".")[0]
    paths = in_wheels(f"*/lib/libnvrtc.so.{version}")
    paths += Path(torch.__file__).parent.glob("lib/libnvrtc-[0-9]*.so*")
    for path in paths:
        # A library that cannot be loaded raises OSError, and the next one is tried.
        with suppress(OSError):
            # NVRTC opens this second library by its name only, so it must be loaded before.
            for builtins in path.parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    # The loader knows no patterns. In place of "*", the name that it gets has no version.
    with suppress(OSError):
        return ctypes.CDLL(f"libnvrtc.so.{version}".removesuffix(".*"))
    raise UserError(
        f"no NVRTC {version}: install a CUDA build of torch, or nvidia-cuda-nvrtc"
    )


def _driver(call: str, *arguments: object) -> None:
    """Call a function of the CUDA driver. Raises UserError with the driver's words if the call fails."""
    library = _libcuda()
    # 0 if all went well.
    status = getattr(library, call)(*arguments)
    if status:
        words = c_char_p()
        library.cuGetErrorString(status, byref(words))
        reason = (words.value or b"unknown error").decode()
        raise UserError(f"{call}: {reason} ({status})")


# Opened once: looking it up takes longer than a launch, for which training waits.
_libcuda = functools.cache(lambda: ctypes.CDLL("libcuda.so.1"))
