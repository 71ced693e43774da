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

import functools
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB
from ddlkit.run.instruments import nvrtc
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
OPTIONS = ("--maxrregcount=96",)
SOURCE = r"""
typedef unsigned long long u64;

// The record, in 64-bit words: whether to stop, how many blocks have begun; when the gate opened and
// closed, and how many chunks had been sent by then; then for each block its begin, end, and chunks sent.
enum { STOP, BEGUN, OPENED, SENT_BEFORE, CLOSED, SENT_AFTER, HEAD };

static __device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// c = a + b, chunk by chunk: block i takes the chunks i, i + blocks, ... of the buffers, round and round.
// It waits for nothing but the time at which its next chunk is due, and ends on the flag, after
// most_chunks, and after most_ns in any case. Buffers hold buffer_chunks >= blocks chunks.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, 1)
standin(const float4* __restrict__ a, const float4* __restrict__ b, float4* __restrict__ c,
        u64 buffer_chunks, u64 most_chunks, double chunk_ns, u64 most_ns, volatile u64* record) {
  volatile u64* begins = record + HEAD;
  volatile u64* ends = begins + gridDim.x;
  volatile u64* sent = ends + gridDim.x;
  const u64 begin = now_ns();
  if (threadIdx.x == 0) {
    begins[blockIdx.x] = begin;
    atomicAdd((u64*)record + BEGUN, 1ULL);
  }
  u64 chunk = blockIdx.x;
  for (u64 done = 0;; ++done) {
    bool halt = false;
    if (threadIdx.x == 0) {
      sent[blockIdx.x] = done;
      const double due_ns = done * chunk_ns;
      u64 passed;
      do {
        passed = now_ns() - begin;
        halt = record[STOP] || passed >= most_ns || done >= most_chunks;
      } while (!halt && passed < due_ns);
    }
    if (__syncthreads_or(halt)) break;
    const u64 first = chunk * UNROLL * blockDim.x + threadIdx.x;
    float4 x[UNROLL], y[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) x[i] = a[first + i * blockDim.x];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) y[i] = b[first + i * blockDim.x];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      c[first + i * blockDim.x] =
          make_float4(x[i].x + y[i].x, x[i].y + y[i].y, x[i].z + y[i].z, x[i].w + y[i].w);
    chunk += gridDim.x;
    if (chunk >= buffer_chunks) chunk -= buffer_chunks;
  }
  if (threadIdx.x == 0) ends[blockIdx.x] = now_ns();
}

// One thread, before and after the computation and in its stream: waits at least hold_ns, and until
// `blocks` blocks have begun or most_ns are over; notes the time and what has been sent; may set the flag.
extern "C" __global__ void gate(volatile u64* record, u64 slot, u64 blocks, u64 hold_ns, u64 most_ns,
                                u64 stop) {
  const u64 begin = now_ns();
  u64 passed;
  do {
    passed = now_ns() - begin;
  } while (passed < hold_ns || (record[BEGUN] < blocks && passed < most_ns));
  volatile u64* sent = record + HEAD + 2 * blocks;
  u64 chunks = 0;
  for (u64 i = 0; i < blocks; ++i) chunks += sent[i];
  record[slot] = now_ns();
  record[slot + 1] = chunks;
  if (stop) record[STOP] = 1;
}
""".replace("UNROLL", str(UNROLL)).replace("MOST_THREADS", str(MOST_THREADS))

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
        if self.blocks < 1 or not 1 <= self.threads <= MOST_THREADS:
            raise UserError(
                f"a communication kernel of {self.blocks} blocks of {self.threads} threads: "
                f"needs at least one of each and at most {MOST_THREADS} threads"
            )
        if not 0 <= self.bytes_per_s < float("inf"):
            raise UserError(
                f"communication at {self.bytes_per_s} bytes/s: give a rate, or 0 for any"
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
    """The CUDA C++ kernel above, on torch's current GPU and in a stream of its own.

    registers : of each thread; shared_bytes : of each block
    least_s : a computation that takes less does not share fairly: repeat it
    """

    least_s = 0.0

    def __init__(self, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._send, self._gate = nvrtc.load(SOURCE, ("standin", "gate"), OPTIONS)
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._clusters = gpu.major >= 9
        self.registers = self._send.registers
        self.shared_bytes = min(
            SHARED_BYTES, getattr(gpu, "shared_memory_per_block_optin", 48 * KIB)
        )
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

        chunks : of each block; record : (6 + 3 blocks,) zeros, int64
        """
        if record is None:
            record = self._record(footprint.blocks)
        in_buffer = self.c.nbytes // self.chunk_bytes(footprint.threads)
        if in_buffer < footprint.blocks:
            raise UserError(
                f"stand-in of {footprint.blocks} blocks: its buffers hold {in_buffer} chunks"
            )
        chunk_ns = footprint.chunk_s(self.chunk_bytes(footprint.threads)) * _NS
        limits = (in_buffer, chunks, chunk_ns, int(LONGEST_S * _NS))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            record.record_stream(self._stream)
            self._send.launch(
                footprint.blocks,
                footprint.threads,
                [self.a, self.b, self.c, *limits, record],
                shared_bytes=self.shared_bytes,
                cluster=self.cluster(footprint.blocks),
            )

    def beside(self, footprint: Footprint | None, compute: Compute) -> Passage:
        """Start communicating, then compute, then stop; without a footprint, compute alone.

        ``compute`` must have run once before without a neighbour: what is loaded or allocated for the
        first time may have to wait until the GPU is idle. Nothing waits for the GPU here: synchronise
        before looking at the traffic.
        """
        blocks = footprint.blocks if footprint else 0
        record = self._record(blocks)
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
        self._gate.launch(1, 1, [self._record(0), _OPENED, 0, int(2e-3 * _NS), 0, 0])

    def _record(self, blocks: int) -> torch.Tensor:
        return torch.zeros(_HEAD + 3 * blocks, dtype=torch.int64, device="cuda")


def _read(record: torch.Tensor, chunk_bytes: int) -> Traffic:
    """What stands in a record once all has ended; nanoseconds are of the GPU's global timer."""
    words = record.tolist()
    opened, sent_before, closed, sent_after = words[_OPENED:_HEAD]
    begins, ends, _ = np.reshape(words[_HEAD:], (3, -1)).tolist()
    # Relative to the opening first: a double does not hold the timer's nanoseconds.
    return Traffic(
        tuple((begin - opened) / _NS for begin in begins),
        tuple((end - opened) / _NS for end in ends),
        0.0,
        (closed - opened) / _NS,
        float((sent_after - sent_before) * chunk_bytes),
    )


class CpuStandIn:
    """As many threads as blocks, each summing its own parts of buffers; NumPy lets go of the interpreter.

    With more threads than cores nothing runs at the same time all the time: what the stand-in got is to
    be seen from the bytes that it moved.
    """

    registers = 0
    shared_bytes = 0
    least_s = 0.02  # several of the scheduler's slices: threads that share a core take turns
    chunk_elements = 256 * KIB  # long enough for another thread to wake up and get the interpreter

    def __init__(self, buffer_bytes: int = 64 * MIB) -> None:
        elements = max(buffer_bytes // 4, self.chunk_elements)
        self.a, self.b = np.random.default_rng(0).random((2, elements), dtype=np.float32)
        self.c = np.empty_like(self.a)

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
                    pool.submit(self._send, footprint, number, flag, begun, sent)
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
        ended = [span.result() for span in spans]
        traffic = Traffic(
            tuple(begin_s for begin_s, _ in ended),
            tuple(end_s for _, end_s in ended),
            opened_s,
            closed_s,
            float(sent_after - sent_before) * self.chunk_elements * 4,
        )
        return Passage(marks, lambda: traffic)

    def _send(
        self,
        footprint: Footprint,
        number: int,
        flag: threading.Event,
        begun: threading.Semaphore,
        sent: list[int],
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
            if flag.wait(early_s) if early_s > 0 else flag.is_set():
                break
            if now_s - begin_s > LONGEST_S:
                break
            start = own[done % len(own)]
            part = slice(start, start + self.chunk_elements)
            np.add(self.a[part], self.b[part], out=self.c[part])
        return begin_s, time.perf_counter()


StandIn = GpuStandIn | CpuStandIn
"""What can communicate, or seem to, while something computes."""


def make(device: torch.device) -> StandIn:
    """The stand-in of that device. Raises UserError where it cannot be compiled or loaded."""
    return GpuStandIn() if device.type == "cuda" else CpuStandIn()
