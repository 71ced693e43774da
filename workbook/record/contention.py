"""How much kernels slow down when communication shares their GPU (sharing 4.2.2, Tab 1, Fig 3)."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ddlkit.measure.session import Unavailable, all_or_partial
from workbook.record.standin import Compute, Footprint, GpuStandIn, Passage, Traffic

# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """What computes: its input's shape and type, and how to make the call for an input on a device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[torch.Tensor], Compute]


def kernels(tiny: bool) -> dict[str, Kernel]:
    """Return kernels by name: tiny ones, or the first five of sharing Tab 1, and two of today.

    Our choice where the paper is silent: only the forward pass, in fp32 without TF32, which its GPUs did not
    have; average pooling as in a ResNet's stem (3 x 3, stride 2, padding 1).
    """
    fp32, bf16 = torch.float32, torch.bfloat16
    images, side, product = (1, 32, 128) if tiny else (64, 224, 8192)
    image, pixels, square = (images, 64, side, side), side**2, (product, product)
    attention = (
        (1, 2, 64, 16) if tiny else (4, 32, 4096, 128)
    )  # sequences, heads, tokens, width
    attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True)

    def module(kind: Callable[..., nn.Module], *sizes: int, **options: Any) -> Any:
        return lambda x: partial(kind(*sizes, **options).to(x.device), x)

    convolve = module(nn.Conv2d, 64, 64, 7, stride=2, padding=3, bias=False)
    return {
        "average_pooling": Kernel(
            image, fp32, module(nn.AvgPool2d, 3, stride=2, padding=1)
        ),
        "batch_norm": Kernel(image, fp32, module(nn.BatchNorm2d, 64)),
        "convolution": Kernel(image, fp32, convolve),
        "linear": Kernel((images, 64, pixels), fp32, module(nn.Linear, pixels, 64)),
        "relu": Kernel(image, fp32, module(nn.ReLU, inplace=True)),
        "matrix_product": Kernel(
            square, bf16, lambda x: partial(torch.mm, x, x.clone())
        ),
        "attention": Kernel(
            attention, bf16, lambda x: partial(attend, x, x.clone(), x.clone())
        ),
    }


_NONE: dict[str, Any] = {
    "communication": "none",
    **dict.fromkeys(
        ("blocks", "threads", "taken_blocks", "taken_threads", "registers"), 0
    ),
    **dict.fromkeys(("shared_bytes", "cluster", "fifo_bytes"), 0),
    **dict.fromkeys(("bytes_per_s_asked", "bytes_per_s", "overlap_share"), 0.0),
}


def _rows(
    name: str, kernel: Kernel, columns: Mapping[str, Any], seconds: Floats
) -> pd.DataFrame:
    """Return rows of one kernel in one company; ``columns`` : that are not as of a kernel alone."""
    shape, dtype = (
        "x".join(map(str, kernel.shape)),
        str(kernel.dtype).removeprefix("torch."),
    )
    labels = {"kernel": name, "shape": shape, "dtype": dtype, "device": "cuda"}
    return clock.sample_rows({**labels, **_NONE, **columns}, seconds)


# -- in turn -------------------------------------------------------------------------------------

# Of what is this quick there are samples enough for an interval of the median that says something.
QUICK_S, QUICK_REPEATS = 0.05, 20
LEAST_OVERLAP, MOST_EXTRA_S = 0.98, 0.2  # else a kernel and its neighbour took turns


def in_turn(
    name: str,
    tiny: bool,
    device: torch.device,
    neighbour: Any,
    ways: Sequence[Any],
    budget: Budget,
) -> Iterator[pd.DataFrame]:
    """Yield rows of a kernel alone, and of it beside its neighbour in each of ``ways``, timed in turn.

    Each way is tried first: from the first that fails, or whose neighbour does not run at the same time, none
    is measured; what it did is raised, at the end unless it was the first.
    """
    kernel = kernels(tiny)[name]
    compute = kernel.build(torch.randn(kernel.shape, device=device).to(kernel.dtype))
    compute()  # loads and allocates what cannot be while the neighbour runs
    reads: dict[Any, list[Callable[[], Traffic]]] = {None: []}

    def passage(way: Any) -> Marks:
        marks, read = neighbour.beside(way, compute)
        reads[way].append(read)
        return marks

    torch.cuda.synchronize()
    alone_s = float(passage(None).seconds()[-1])
    failed: Exception | None = None
    for way in ways:
        reads[way] = []
        try:
            _try(passage, way, reads[way], alone_s, neighbour.chances)
        except Exception as error:
            if way == ways[0]:
                raise
            failed = error
            del reads[way]
            break
    if alone_s < QUICK_S and budget.min_repeats < QUICK_REPEATS <= budget.max_repeats:
        budget = replace(budget, min_repeats=QUICK_REPEATS)
    actions = {way: partial(passage, way) for way in reads}
    samples = clock.measure_interleaved(
        actions, budget, synchronize=torch.cuda.synchronize
    )
    for way, seconds in samples.items():
        seen = [read() for read in reads[way][-len(seconds) :]]
        rates = {"bytes_per_s": [traffic.bytes_per_s for traffic in seen]}
        shares = {"overlap_share": [traffic.overlap_share for traffic in seen]}
        company = neighbour.columns(way) if way else {}
        columns = {**neighbour.labels, **rates, **shares, **company}
        yield _rows(name, kernel, columns, seconds)
    if failed:
        raise failed


def _try(
    passage: Callable[[Any], Marks],
    way: Any,
    reads: Sequence[Callable[[], Traffic]],
    alone_s: float,
    chances: int,
) -> None:
    """Raise UserError where a kernel takes turns with its neighbour, as under a profiler, at every chance."""
    for _ in range(chances):
        seconds = float(passage(way).seconds()[-1])
        share = reads[-1]().overlap_share
        if share >= LEAST_OVERLAP and seconds - alone_s <= MOST_EXTRA_S:
            return
    raise UserError(
        f"beside {way} a kernel took {format_seconds(seconds)}, alone {format_seconds(alone_s)}, and "
        f"both ran at the same time for {share:.0%} of it: something has them take turns"
    )


# -- the copy engine, and others in streams of their own -----------------------------------------

# How long operations last, as nobody can stop them: over the computation's time, and at least.
AS_LONG, LEAST_S = 4.0, 0.05
HOLD_CYCLES = 2_000_000  # of the GPU, 1 ms: until the host has given it the computation
BOTH = "both"
_FEW = Budget(warmup=1, min_repeats=3, max_repeats=3)


class Queues(ABC):
    """Equal operations of ``n_bytes`` in a stream for each way, as many as outlast a computation."""

    chances = 3  # where a computation was held up, operations end too early
    labels: Mapping[str, Any] = {"ranks": 1}

    def __init__(
        self, device: torch.device, ways: Sequence[str], n_bytes: float
    ) -> None:
        self._device, self._bytes = device, n_bytes
        self.streams = {way: torch.cuda.Stream(device) for way in ways}
        self._alone = Marks(device)

    @abstractmethod
    def put(self, ways: Sequence[str]) -> None:
        """Put an operation into each of these streams."""

    def time(self) -> None:
        """See how long an operation takes, in all streams at the same time."""
        put, wait = partial(self.put, [*self.streams]), clock.synchronizer(self._device)
        self._each_s = float(clock.measure(put, _FEW, synchronize=wait).min())

    def beside(self, way: str | None, compute: Compute) -> Passage:
        """Start operations of a way, or BOTH, then compute; None: alone. As of `GpuStandIn.beside`."""
        current = torch.cuda.current_stream(self._device)
        ways = [name for name in self.streams if way in (name, BOTH)]
        line, inside = Marks(self._device), Marks(self._device)

        def mark_each() -> None:
            for name in ways:
                with torch.cuda.stream(self.streams[name]):
                    line.mark()

        line.mark()
        for name in ways:
            self.streams[name].wait_stream(current)
        mark_each()
        if ways:
            lasting_s = max(LEAST_S, AS_LONG * float(self._alone.seconds()[-1]))
            for number in range(1 + math.ceil(lasting_s / self._each_s)):
                self.put(ways)
                mark_each()
                if number == 0:
                    for name in ways:
                        current.wait_stream(self.streams[name])
        torch.cuda._sleep(HOLD_CYCLES)
        line.mark()
        inside.mark()
        compute()
        inside.mark()
        line.mark()
        if not ways:
            self._alone = inside
        return inside, lambda: flow(line.seconds(), len(ways), self._bytes)


def flow(seconds: Floats, streams: int, n_bytes: float) -> Traffic:
    """Return what was moved while a computation ran.

    seconds : of any moment; when operations began in each stream; when the first of each ended, the second of
        each, and so on; of the computation's beginning and end
    """
    opened_s, closed_s = map(float, window := seconds[-2:])
    lines = seconds[1:-2].reshape(-1, streams).T if streams else ()
    moved = [np.ptp(np.interp(window, line, np.arange(len(line)))) for line in lines]
    begins_s, ends_s = ([float(line[at]) for line in lines] for at in (0, -1))
    return Traffic(begins_s, ends_s, opened_s, closed_s, float(sum(moved)) * n_bytes)


DIRECTIONS = ("h2d", "d2h")
COPIES = (*DIRECTIONS, BOTH)
CHUNK_BYTES = (
    16 * MIB
)  # a quarter of a millisecond at 64 GB/s: starting a copy does not count


class CopyEngine(Queues):
    """Copies between host and GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, DIRECTIONS, CHUNK_BYTES)
        hosts = [
            torch.zeros(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in DIRECTIONS
        ]
        near, far = (host.to(device) for host in hosts)
        self._ends = {
            "h2d": (near, hosts[0]),
            "d2h": (hosts[1], far),
        }  # (target, source)
        self.time()

    def columns(self, way: str) -> dict[str, Any]:
        """Return which way is copied, as columns of table ``contention``."""
        return {"communication": f"copy_engine_{way}"}

    def put(self, ways: Sequence[str]) -> None:
        """Copy a chunk each way."""
        for way in ways:
            target, source = self._ends[way]
            with torch.cuda.stream(self.streams[way]):
                target.copy_(source, non_blocking=True)


# -- cases -------------------------------------------------------------------------------------

# As fast as it can; what an adapter of 100 Gbit/s carries, and one block can; only room, no bandwidth.
RATES = (0.0, 10e9, 1e6)
BLOCKS, THREADS = (1, 2, 3, 4, 8, 16, 32), (64, 128, 256, 512)  # that NCCL is asked for
FEW = ("convolution", "attention")
# Kernels, and what to spend on each:
_BRIEF = FEW, Budget(warmup=1, min_repeats=2, max_repeats=3, max_s=0.1)
_LONG = (
    tuple(kernels(tiny=True)),
    Budget(warmup=1, min_repeats=6, max_repeats=20, max_s=6.0),
)


def measure_beside(
    device: str, name: str, ways: Sequence[Any], tiny: bool, budget: Budget
) -> pd.DataFrame:
    """Return table ``contention``: a kernel alone, beside footprints of the stand-in or some of COPIES."""
    if device == "cpu":
        raise Unavailable("no stand-in and no copy engine: needs a GPU")
    with compute_on(f"{name} beside communication", device) as place, torch.no_grad():
        neighbour = (
            GpuStandIn() if isinstance(ways[0], Footprint) else CopyEngine(place)
        )
        return all_or_partial(
            "contention", in_turn(name, tiny, place, neighbour, ways, budget)
        )


def cases(device: str, brief: bool, copies: bool = False) -> Iterator[Any]:
    """Yield (name, measurement, seconds that it takes) of each kernel; on a processor one, which says why."""
    names, budget = _BRIEF if brief else _LONG
    ways: Sequence[Any] = COPIES if copies else footprints(brief)
    lasts_s = 3.0 + 1.5 * budget.max_s
    if device == "cpu":
        names, lasts_s = names[:1], 0.0
    for name in names:
        measure = partial(measure_beside, device, name, ways, brief, budget)
        yield name + "-copies" * copies, measure, lasts_s


def footprints(brief: bool) -> list[Footprint]:
    """Return at full speed the whole grid; threads matter less where a rate is kept."""
    if brief:
        return [Footprint(1, 64), Footprint(4, 512, 1e9)]
    grid = [Footprint(*both) for both in itertools.product(BLOCKS, THREADS)]
    limited = itertools.product(RATES[1:], BLOCKS, (128, 512))
    return grid + [
        Footprint(blocks, threads, rate) for rate, blocks, threads in limited
    ]
