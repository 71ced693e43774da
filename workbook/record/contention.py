"""How much kernels slow down when communication shares their GPU (sharing 4.2.2, Tab 1, Fig 3)."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB, format_seconds
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget, Floats, Marks
from ddlkit.measure.layers import compute_on
from ddlkit.measure.session import all_or_partial
from workbook.record.needs import KERNELS
from workbook.record.standin import Compute, Footprint, GpuStandIn, Passage, Traffic

# -- kernels ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A computation on an input.

    Attributes
    ----------
    shape : tuple of int
        The shape of the input.
    dtype : torch.dtype
        The type of the input.
    build : callable
        Takes an input on a device and returns a function without arguments that computes with it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[torch.Tensor], Compute]


def kernels(tiny: bool) -> dict[str, Kernel]:
    """Return kernels by name: five of sharing Tab 1, then two that are common today.

    Where the paper does not give a size, the choice is ours. Only the forward pass runs. The
    kernels of the paper run in fp32 without TF32, which the paper's GPUs did not have. Average
    pooling is that of a ResNet's stem (3 x 3, stride 2, padding 1). No tensor is made before a
    kernel is built.

    Parameters
    ----------
    tiny : bool
        Whether the inputs are tiny, so that a test can run the kernels on a processor.
    """
    if tiny:
        batch = 1
        side = 32
        product_side = 128
        # Sequences, heads, tokens, and the width of a head.
        attention_shape = (1, 2, 64, 16)
    else:
        batch = 64
        side = 224
        product_side = 8192
        attention_shape = (4, 32, 4096, 128)
    # Batch, channels, height and width.
    images = (batch, 64, side, side)
    pixels = side**2
    square = (product_side, product_side)

    def attention(x: torch.Tensor) -> Compute:
        # Queries, keys and values have memory of their own.
        attend = nn.functional.scaled_dot_product_attention
        return partial(attend, x, x.clone(), x.clone(), is_causal=True)

    def matrix_product(x: torch.Tensor) -> Compute:
        return partial(torch.mm, x, x.clone())

    fp32 = torch.float32
    bf16 = torch.bfloat16
    pool = _module(nn.AvgPool2d, kernel_size=3, stride=2, padding=1)
    # From 64 channels to 64 channels.
    convolve = _module(
        nn.Conv2d, 64, 64, kernel_size=7, stride=2, padding=3, bias=False
    )
    return {
        "average_pooling": Kernel(images, fp32, pool),
        "batch_norm": Kernel(images, fp32, _module(nn.BatchNorm2d, 64)),
        "convolution": Kernel(images, fp32, convolve),
        "linear": Kernel((batch, 64, pixels), fp32, _module(nn.Linear, pixels, 64)),
        "relu": Kernel(images, fp32, _module(nn.ReLU, inplace=True)),
        "matrix_product": Kernel(square, bf16, matrix_product),
        "attention": Kernel(attention_shape, bf16, attention),
    }


def _module(
    kind: Callable[..., nn.Module], *sizes: int, **options: Any
) -> Callable[[torch.Tensor], Compute]:
    """Return the ``build`` of a `Kernel` that is the forward pass of a module of torch.

    Parameters
    ----------
    kind : type
        The class of the module, which is moved to the device of the input.
    *sizes, **options
        The arguments of this class.
    """

    def build(x: torch.Tensor) -> Compute:
        return partial(kind(*sizes, **options).to(x.device), x)

    return build


_KERNEL_ALONE: dict[str, Any] = {
    "communication": "none",
    **dict.fromkeys(
        ("blocks", "threads", "taken_blocks", "taken_threads", "registers"), 0
    ),
    **dict.fromkeys(("shared_bytes", "cluster", "fifo_bytes"), 0),
    **dict.fromkeys(("bytes_per_s_asked", "bytes_per_s", "overlap_share"), 0.0),
}
"""The columns of table ``contention`` for a kernel that runs alone."""


def _rows(
    name: str, kernel: Kernel, columns: Mapping[str, Any], seconds: Floats
) -> pd.DataFrame:
    """Return rows of table ``contention`` of one kernel, alone or beside what communicates.

    Parameters
    ----------
    name : str
        The name of the kernel.
    kernel : Kernel
        The kernel.
    columns : mapping
        The columns that differ from `_KERNEL_ALONE`.
    seconds : ndarray, shape (repeats,)
        The seconds of the kernel.
    """
    labels = {
        "kernel": name,
        "shape": "x".join(map(str, kernel.shape)),
        "dtype": str(kernel.dtype).removeprefix("torch."),
        "device": "cuda",
    }
    return clock.sample_rows({**labels, **_KERNEL_ALONE, **columns}, seconds)


# -- in turn ---------------------------------------------------------------------------

LEAST_OVERLAP = 0.98
"""With a smaller share of overlap, a kernel and its neighbour took turns."""
MOST_EXTRA_S = 0.2
"""A kernel that takes this much longer beside its neighbour waited until that had ended."""


def measure_in_turn(
    name: str,
    tiny: bool,
    device: torch.device,
    neighbour: Any,
    ways: Sequence[Any],
    budget: Budget,
) -> Iterator[pd.DataFrame]:
    """Yield rows of a kernel alone, and beside each way of its neighbour, timed in turn.

    The neighbour is what communicates on the GPU of the kernel. A way is one setting of the
    neighbour: a footprint of the stand-in, or the streams in which copies run.

    Each way is tried before it is timed, as often as the neighbour's ``chances`` say. A way fails
    if it raises an error, or if kernel and neighbour do not run at the same time in any of the
    tries. A way that fails is not measured, and neither are the ways after it.

    Parameters
    ----------
    name, tiny
        The name and size of a kernel, of `kernels`.
    device : torch.device
        The device of the kernel.
    neighbour : GpuStandIn or Queues
        What communicates.
    ways : sequence
        The ways that ``neighbour`` takes: footprints, or names of streams.
    budget : Budget
        How long to measure all ways together.

    Yields
    ------
    DataFrame
        Rows of table ``contention``, first of the kernel alone and then of each way.

    Raises
    ------
    Exception
        The exception of the way that failed. If the first way fails, its exception is raised at
        once. The exception of a later way is raised after all rows.
    """
    kernel = kernels(tiny)[name]
    # Numbers are drawn in fp32 and then rounded to the type of the kernel.
    compute = kernel.build(torch.randn(kernel.shape, device=device).to(kernel.dtype))
    # The first call loads and allocates, which cannot be done while the neighbour runs.
    compute()
    # A passage is one run of the kernel.
    passages = _Passages(neighbour, compute)
    torch.cuda.synchronize()
    # None stands for the kernel alone. The last mark of a passage is its end, in seconds from its
    # begin.
    alone_s = float(passages.run(None).seconds()[-1])
    failure = _first_failure(passages, ways, alone_s)
    # The ways that have been run and did not fail are now in ``passages.ways``, and so is None, the
    # kernel alone. ``samples`` has the seconds of each repeat by way.
    samples = clock.measure_interleaved(
        {way: partial(passages.run, way) for way in passages.ways},
        budget,
        synchronize=torch.cuda.synchronize,
    )
    for way, seconds in samples.items():
        columns = passages.columns(way, n_samples=len(seconds))
        yield _rows(name, kernel, columns, seconds)
    # Raised last, so that the rows of the ways that did not fail are not lost.
    if failure:
        raise failure


def _first_failure(
    passages: _Passages, ways: Sequence[Any], alone_s: float
) -> Exception | None:
    """Try the ways of a neighbour in turn, and return the exception of the first that fails.

    `measure_in_turn` says what a way is and when it fails. The ways after one that fails are not
    tried. Afterwards, ``passages`` has the ways that did not fail.

    Parameters
    ----------
    passages : _Passages
        Runs the kernel.
    ways : sequence
        The ways.
    alone_s : float
        The seconds of the kernel alone.

    Returns
    -------
    Exception or None
        The exception, or None if no way fails.

    Raises
    ------
    Exception
        The exception of the very first way, without which there is nothing to compare the kernel
        alone with.
    """
    for way in ways:
        try:
            passages.check_overlap(way, alone_s)
        except Exception as error:
            if way == ways[0]:
                raise
            passages.drop(way)
            return error
    return None


class _Passages:
    """Passages of a kernel: runs of the kernel alone or beside its neighbour.

    Parameters
    ----------
    neighbour : GpuStandIn or Queues
        What communicates.
    compute : callable
        The kernel.
    """

    def __init__(self, neighbour: Any, compute: Compute) -> None:
        self._neighbour = neighbour
        self._compute = compute
        # For each way, a list with a function for each passage, which returns the traffic during
        # the passage. The way None is the kernel alone.
        self._traffic_readers: dict[Any, list[Callable[[], Traffic]]] = {}

    @property
    def ways(self) -> list[Any]:
        """Return the ways that have been run, in the order of their first passages."""
        return list(self._traffic_readers)

    def run(self, way: Any) -> Marks:
        """Run the kernel once, and return the marks of its begin and its end.

        The neighbour communicates meanwhile in this way, or not at all if the way is None.
        """
        # A way that is a key here counts as run, even if its first passage fails below.
        traffic_readers = self._traffic_readers.setdefault(way, [])
        # The function ``read_traffic`` returns the traffic once the passage is over.
        marks, read_traffic = self._neighbour.beside(way, self._compute)
        traffic_readers.append(read_traffic)
        return marks

    def drop(self, way: Any) -> None:
        """Forget a way, which will not be measured."""
        del self._traffic_readers[way]

    def check_overlap(self, way: Any, alone_s: float) -> None:
        """Raise UserError unless the kernel and its neighbour run at the same time in one of a few tries.

        Under a profiler, for example, they run one after the other.

        Parameters
        ----------
        way : object
            The way in which the neighbour communicates.
        alone_s : float
            The seconds of the kernel alone.
        """
        for _ in range(self._neighbour.chances):
            # The last mark is the end of the kernel, in seconds from its begin.
            seconds = float(self.run(way).seconds()[-1])
            # The last reader belongs to the passage that has just run.
            read_traffic = self._traffic_readers[way][-1]
            overlap_share = read_traffic().overlap_share
            # A kernel that is launched but waits until the neighbour has ended also counts as
            # overlapping. That it waited shows in its long time.
            if overlap_share >= LEAST_OVERLAP and seconds - alone_s <= MOST_EXTRA_S:
                return
        raise UserError(
            f"beside {way} a kernel took {format_seconds(seconds)}, alone "
            f"{format_seconds(alone_s)}, and both ran at the same time for "
            f"{overlap_share:.0%} of it: something has them take turns"
        )

    def columns(self, way: Any, n_samples: int) -> dict[str, Any]:
        """Return the columns of table ``contention`` for a way in which the neighbour communicates.

        The way None is the kernel alone. Columns of what was sent have a value for each of the last
        ``n_samples`` passages. The earlier passages are tries and the warm-up.
        """
        readers = self._traffic_readers[way][-n_samples:]
        traffics = [read_traffic() for read_traffic in readers]
        columns = {
            **self._neighbour.labels,
            "bytes_per_s": [traffic.bytes_per_s for traffic in traffics],
            "overlap_share": [traffic.overlap_share for traffic in traffics],
        }
        # If the kernel ran alone, there is no way to describe.
        if way:
            columns |= self._neighbour.columns(way)
        return columns


# -- the copy engine, and others in streams of their own -------------------------------

# Operations that are in a queue cannot be stopped. They are therefore made to last AS_LONG times as long as
# the computation alone, which they slow down, and at least LEAST_S, which covers a late host.
AS_LONG = 4.0
LEAST_S = 0.05
BOTH = "both"
"""The way in which all streams have operations at the same time."""
_FEW = Budget(warmup=1, min_repeats=3, max_repeats=3)


class Queues(ABC):
    """Streams of a GPU with equal operations, such as copies, as a neighbour of `measure_in_turn`.

    Each stream gets so many operations that they outlast the computation beside them.

    Parameters
    ----------
    device : torch.device
        The GPU.
    ways : sequence of str
        The names of the streams. The name of a stream is also the way of using it alone.
    n_bytes : float
        The bytes that an operation moves.
    """

    # How often a way is tried. Operations end too early if the host was late with a computation.
    chances = 3
    labels: Mapping[str, Any] = {"ranks": 1}

    def __init__(
        self, device: torch.device, ways: Sequence[str], n_bytes: float
    ) -> None:
        self._device = device
        self._bytes = n_bytes
        self.streams = {way: torch.cuda.Stream(device) for way in ways}
        # The marks of the last computation that ran alone.
        self._alone = Marks(device)

    @abstractmethod
    def put(self, ways: Sequence[str]) -> None:
        """Put one operation into each of the streams that ``ways`` names."""

    def time(self) -> None:
        """Measure how long an operation takes while each stream runs one.

        From this time, `beside` finds how many operations outlast a computation.
        """
        current = torch.cuda.current_stream(self._device)

        def put_and_wait() -> None:
            # `measure_on` marks the begin and the end of this function in the current stream. All
            # streams therefore wait for this stream first, and it waits for all of them at the end.
            for stream in self.streams.values():
                stream.wait_stream(current)
            self.put([*self.streams])
            for stream in self.streams.values():
                current.wait_stream(stream)

        seconds = clock.measure_on(self._device, put_and_wait, _FEW)
        # The shortest sample counts, because `_operations` divides by it, and too many operations
        # are better than too few.
        self._operation_s = float(seconds.min())

    def beside(self, way: str | None, compute: Compute) -> Passage:
        """Start operations in streams, and compute while they run.

        Parameters
        ----------
        way : str or None
            The stream that has operations, or `BOTH` for all streams. With None, the
            computation runs alone.
        compute : callable
            The computation, which must have run alone before it runs beside operations.

        Returns
        -------
        marks : Marks
            The begin and the end of the computation.
        read : callable
            Returns the `Traffic` during the computation, once all that was started has ended.
        """
        current = torch.cuda.current_stream(self._device)
        # The streams with operations: one, all for `BOTH`, and none for None.
        ways = [name for name in self.streams if way in (name, BOTH)]
        computation = Marks(self._device)
        # The marks of the computation and of all operations, in the order of `traffic_of_marks`.
        all_marks = Marks(self._device)
        # The mark from which times count.
        all_marks.mark()
        for name in ways:
            self.streams[name].wait_stream(current)
        # A mark before the operations of each stream, and then one after each operation.
        self._mark_streams(all_marks, ways)
        self._put_all(ways, all_marks)
        # The current stream waits for some milliseconds, in which the host issues the whole
        # computation, so that its kernels follow each other without gaps. The operations go on
        # meanwhile.
        clock.hold(self._device)
        all_marks.mark()
        computation.mark()
        compute()
        computation.mark()
        all_marks.mark()
        if not ways:
            # The computation ran alone. Its time says how many operations outlast it later.
            self._alone = computation

        def read() -> Traffic:
            return traffic_of_marks(all_marks.seconds(), len(ways), self._bytes)

        return computation, read

    def _put_all(self, ways: Sequence[str], marks: Marks) -> None:
        """Put so many operations into each stream that they outlast the computation beside them.

        The computation follows in the current stream, which is made to wait for the first
        operations.

        Parameters
        ----------
        ways : sequence of str
            The names of the streams.
        marks : Marks
            Gets a mark in each stream after each operation.
        """
        current = torch.cuda.current_stream(self._device)
        for number in range(self._operations(ways)):
            self.put(ways)
            self._mark_streams(marks, ways)
            if number == 0:
                # The computation begins once the first operation of each stream has ended.
                for name in ways:
                    current.wait_stream(self.streams[name])

    def _mark_streams(self, marks: Marks, ways: Sequence[str]) -> None:
        """Add a mark to ``marks`` in each of the streams that ``ways`` names, in this order."""
        for name in ways:
            with torch.cuda.stream(self.streams[name]):
                marks.mark()

    def _operations(self, ways: Sequence[str]) -> int:
        """Return how many operations each stream gets, so that they outlast the computation.

        Without streams the number is 0.
        """
        if not ways:
            return 0
        # The last mark is the end of the computation alone, in seconds from its begin.
        computation_s = float(self._alone.seconds()[-1])
        lasting_s = max(LEAST_S, AS_LONG * computation_s)
        # One more, because the first operation ends before the computation begins.
        return 1 + math.ceil(lasting_s / self._operation_s)


def traffic_of_marks(seconds: Floats, streams: int, n_bytes: float) -> Traffic:
    """Return what was moved while a computation ran.

    Parameters
    ----------
    seconds : ndarray, shape (1 + streams x (1 + operations) + 2,)
        The times of the marks, in this order: a moment before everything, the begin of the first
        operation in each stream, the end of the first operation in each stream, the end of the
        second one in each stream and so on, and at last the begin and the end of the computation.
        All streams have equally many operations.
    streams : int
        The number of streams with operations. Without any, nothing was moved.
    n_bytes : float
        The bytes that an operation moves.
    """
    # The begin and the end of the computation.
    window_s = seconds[-2:]
    opened_s, closed_s = map(float, window_s)
    # All other marks except for the very first one are those of streams. Each stream gets a row:
    # the begin of its first operation, then the ends of all its operations.
    stream_times_s = seconds[1:-2].reshape(-1, streams).T if streams else ()
    operations = 0.0
    for times_s in stream_times_s:
        # How many operations had ended when the computation began, and when it ended. At
        # ``times_s[i]`` exactly i operations have ended. In between, an operation counts by the
        # share of its time that is over.
        complete_before, complete_after = np.interp(
            window_s, times_s, np.arange(len(times_s))
        )
        operations += float(complete_after - complete_before)
    return Traffic(
        begins_s=[float(times_s[0]) for times_s in stream_times_s],
        ends_s=[float(times_s[-1]) for times_s in stream_times_s],
        opened_s=opened_s,
        closed_s=closed_s,
        sent_bytes=operations * n_bytes,
    )


DIRECTIONS = ("h2d", "d2h")
COPIES = (*DIRECTIONS, BOTH)
CHUNK_BYTES = 16 * MIB
"""The bytes of a copy, a quarter of a millisecond at 64 GB/s, so that starting it does not count."""


class CopyEngine(Queues):
    """Copies between host and GPU, as a neighbour of `measure_in_turn`.

    There is a stream for each of `DIRECTIONS`, "h2d" to the ``device`` and "d2h" to the host.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, DIRECTIONS, CHUNK_BYTES)
        # The copy engine can only access memory of the host
        # that is pinned. Each direction has its own.
        host_source, host_target = (
            torch.zeros(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in DIRECTIONS
        )
        # By direction, the target and the source of a copy.
        self._target_and_source = {
            "h2d": (host_source.to(device), host_source),
            "d2h": (host_target, host_target.to(device)),
        }
        # `Queues` needs the time of a copy to know how many outlast a computation.
        self.time()

    def columns(self, way: str) -> dict[str, Any]:
        """Return the column of table ``contention`` that names a way of copying, of `COPIES`."""
        return {"communication": f"copy_engine_{way}"}

    def put(self, ways: Sequence[str]) -> None:
        """Copy a chunk in each of these directions."""
        for way in ways:
            target, source = self._target_and_source[way]
            with torch.cuda.stream(self.streams[way]):
                target.copy_(source, non_blocking=True)


# -- cases -----------------------------------------------------------------------------

# In bytes/s: without a limit, about what an adapter of 100 Gbit/s carries (which one block can send), and so
# little that the stand-in takes room on the GPU but hardly any bandwidth of its memory.
RATES = (0.0, 10e9, 1e6)
# Blocks and threads that NCCL is asked for.
BLOCKS = (1, 2, 3, 4, 8, 16, 32)
THREADS = (64, 128, 256, 512)
FEW = ("convolution", "attention")
_BRIEF_BUDGET = Budget(warmup=1, min_repeats=2, max_repeats=3, max_s=0.1)
_LONG_BUDGET = Budget(warmup=1, min_repeats=6, max_repeats=40, max_s=6.0)


def measure_beside(
    name: str, ways: Sequence[Any], tiny: bool, budget: Budget
) -> pd.DataFrame:
    """Return table ``contention`` of one kernel on a GPU, alone and beside each way of communicating.

    Parameters
    ----------
    name, tiny
        The name and size of a kernel, of `kernels`.
    ways : sequence
        Footprints of the stand-in, a kernel that loads the GPU as NCCL's does, or some of `COPIES`.
    budget : Budget
        How long to measure all ways together.
    """
    # In this context TF32 is off, and the error for a lack of memory names ``what``. A kernel is a
    # forward pass, so that no gradients are needed.
    what = f"{name} beside communication"
    with compute_on(what, "cuda") as gpu, torch.no_grad():
        neighbour: GpuStandIn | CopyEngine
        # All ways are of the same type, which tells what communicates.
        if isinstance(ways[0], Footprint):
            neighbour = GpuStandIn()
        else:
            neighbour = CopyEngine(gpu)
        frames = measure_in_turn(name, tiny, gpu, neighbour, ways, budget)
        # If a later way fails, the rows of the ways before it are kept.
        return all_or_partial("contention", frames)


def cases(brief: bool, copies: bool = False) -> Iterator[Any]:
    """Yield what is to be measured of each kernel.

    Parameters
    ----------
    brief : bool
        Whether few, tiny kernels are measured for a short time.
    copies : bool, optional
        Whether the kernels run beside copies between host and GPU instead of the stand-in, a kernel
        that loads the GPU as NCCL's does.

    Yields
    ------
    name : str
        The name of the kernel and, with copies, an ending.
    measure : callable
        Measures the kernel and returns table ``contention``.
    estimate_s : float
        How long the measurement is expected to take, in seconds.
    """
    # Only the names are needed, and no kernel is built to list them.
    names = FEW if brief else tuple(kernels(tiny=False))
    budget = _BRIEF_BUDGET if brief else _LONG_BUDGET
    # The ways of communicating while a kernel runs: the directions of copies, or the resources that the
    # stand-in takes.
    ways: Sequence[Any] = COPIES if copies else footprints(brief)
    suffix = "-copies" if copies else ""
    estimate_s = KERNELS.seconds(budget)
    for name in names:
        measure = partial(measure_beside, name, ways, tiny=brief, budget=budget)
        yield name + suffix, measure, estimate_s


def footprints(brief: bool) -> list[Footprint]:
    """Return the footprints to measure, the resources that a communication kernel takes.

    Without a limit of the rate, these are all pairs of `BLOCKS` and `THREADS`. At each limited rate there are
    fewer numbers of threads, because threads matter less there.

    Parameters
    ----------
    brief : bool
        Whether only two footprints are measured, a small one without a limit and a large one with a limit.
    """
    if brief:
        return [
            Footprint(blocks=1, threads=64),
            Footprint(blocks=4, threads=512, bytes_per_s=1e9),
        ]
    unlimited = [
        Footprint(blocks, threads)
        for blocks, threads in itertools.product(BLOCKS, THREADS)
    ]
    # The first rate is 0, which stands for no limit.
    limited_rates = RATES[1:]
    limited = [
        Footprint(blocks, threads, rate)
        for rate, blocks, threads in itertools.product(
            limited_rates, BLOCKS, (128, 512)
        )
    ]
    return unlimited + limited
