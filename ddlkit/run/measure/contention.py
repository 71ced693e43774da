"""How much kernels of a GPU slow down when communication shares it with them (sharing 4.2.2, Tab 1, Fig 3).

Five kernels of the paper, a matrix product and attention, each alone and beside the stand-in or the copy
engine. That both ran at the same time is proven for every row: ``overlap_share`` is the share of the kernel's
time in which the communication ran too. Beside NCCL: `nccl_one_gpu`; on processors: `shared_kernels`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB, format_seconds
from ddlkit.run.instruments.clock import Budget, Floats, Marks, measure_on, sample_rows, timed
from ddlkit.run.measure.layers import computing, device_named
from ddlkit.run.measure.standin import (
    BLOCKS,
    THREADS,
    Compute,
    Footprint,
    GpuStandIn,
    Passage,
    Traffic,
)
from ddlkit.run.sessions import Unavailable, all_or_partial

# -- kernels -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Sizes of inputs: images and their side, side of the product's matrices, and of attention
    (sequences, heads, tokens, width of a head)."""

    images: int
    side: int
    product: int
    attention: tuple[int, int, int, int]


PAPER = Scale(images=64, side=224, product=8192, attention=(4, 32, 4096, 128))
TINY = Scale(images=1, side=32, product=128, attention=(1, 2, 64, 16))
# Of what is this quick there are samples enough for an interval of the median that says something.
QUICK_S, QUICK_REPEATS = 0.05, 20
IDLE = "idle"  # no kernel: what the communication does by itself


@dataclass(frozen=True)
class Kernel:
    """What computes: its input's shape and type, and how to make the call for an input on a device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[torch.Tensor], Compute]

    def columns(self) -> dict[str, str]:
        """Return its input's shape and type, as columns of tables."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"shape": "x".join(map(str, self.shape)), "dtype": dtype}

    def on(self, device: torch.device) -> Compute:
        """Return the kernel on fresh random input there; forward only."""
        return self.build(torch.randn(self.shape, device=device).to(self.dtype))


def kernels(scale: Scale) -> dict[str, Kernel]:
    """Return kernels by name. The first five are sharing Tab 1 at ``PAPER``.

    Our choice where the paper or its text is silent: only the forward pass is timed, without recording
    a graph; fp32 without TF32, which its GPUs did not have; average pooling, whose definition did not
    survive in the text, is that of a ResNet's stem (3 x 3, stride 2, padding 1).
    """
    fp32, bf16 = torch.float32, torch.bfloat16
    image = (scale.images, 64, scale.side, scale.side)
    pixels = scale.side**2
    square = (scale.product, scale.product)
    convolve = _module(nn.Conv2d, 64, 64, 7, stride=2, padding=3, bias=False)
    attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True)
    return {
        "average_pooling": Kernel(image, fp32, _module(nn.AvgPool2d, 3, stride=2, padding=1)),
        "batch_norm": Kernel(image, fp32, _module(nn.BatchNorm2d, 64)),
        "convolution": Kernel(image, fp32, convolve),
        "linear": Kernel((scale.images, 64, pixels), fp32, _module(nn.Linear, pixels, 64)),
        "relu": Kernel(image, fp32, _module(nn.ReLU, inplace=True)),
        "matrix_product": Kernel(square, bf16, lambda x: partial(torch.mm, x, x.clone())),
        "attention": Kernel(
            scale.attention, bf16, lambda x: partial(attend, x, x.clone(), x.clone())
        ),
    }


def _module(
    kind: Callable[..., nn.Module], *sizes: int, **options: Any
) -> Callable[[torch.Tensor], Compute]:
    return lambda x: partial(kind(*sizes, **options).to(x.device), x)


_COUNTS = ("blocks", "threads", "taken_blocks", "taken_threads", "registers", "shared_bytes")
_SEEN = ("bytes_per_s_asked", "bytes_per_s", "overlap_share")


def kernel_rows(
    name: str,
    kernel: Kernel | None,
    device: torch.device,
    beside: Mapping[str, Any],
    seconds: Floats,
) -> pd.DataFrame:
    """Return rows of one kernel in one company; ``beside``: columns that are not as of a kernel alone."""
    labels: dict[str, Any] = {
        "kernel": name,
        **(kernel.columns() if kernel else {"shape": "none", "dtype": "none"}),
        "device": device.type,
        "communication": "none",
        **dict.fromkeys((*_COUNTS, "cluster", "fifo_bytes"), 0),
        **dict.fromkeys(_SEEN, 0.0),
    }
    return sample_rows({**labels, **beside}, seconds)


# -- beside the stand-in and the copy engine ---------------------------------------------------


def measure_beside_standin(
    device: str, name: str, scale: Scale, footprints: Sequence[Footprint], budget: Budget
) -> pd.DataFrame:
    """Measure table ``contention``: a kernel alone and beside the stand-in of each footprint, in turn.

    name : of `kernels`, or "idle"; budget : for all of it together, as of `_rounds`

    ``seconds`` are the GPU's own. The kernel starts once every block of the stand-in runs. ``bytes_per_s``
    is what the stand-in moved while the kernel ran; registers are those that the compiler gave.

    Raises UserError for a device that is no GPU, a stand-in that does not compile, and where not even the
    first footprint can be measured; Partial where a later one cannot, with those before it.
    """
    _needs_gpu(device)
    with computing(f"{name} beside the stand-in", device) as place, torch.no_grad():
        return all_or_partial(
            "contention", _rounds(name, scale, place, GpuStandIn(), footprints, budget)
        )


def measure_beside_copies(
    device: str, names: Sequence[str], scale: Scale, budget: Budget
) -> pd.DataFrame:
    """Measure table ``contention``: kernels alone and beside copies of host and GPU, each way and both.

    Copy engines take no multiprocessor: what a kernel loses beside them is memory's bandwidth alone.
    ``communication`` says which way, as "copy_engine_h2d". budget : for each kernel

    Raises as `measure_beside_standin` does.
    """
    _needs_gpu(device)
    with computing("kernels beside copies", device) as place, torch.no_grad():
        copies = CopyEngine(place)
        each = (_rounds(name, scale, place, copies, WAYS, budget) for name in names)
        return all_or_partial("contention", itertools.chain.from_iterable(each))


def _needs_gpu(device: str) -> None:
    if device_named(device).type != "cuda":
        raise Unavailable("no stand-in and no copy engine: needs a GPU")


def _rounds(
    name: str,
    scale: Scale,
    place: torch.device,
    neighbour: Any,
    ways: Sequence[Any],
    budget: Budget,
) -> Iterator[pd.DataFrame]:
    """Yield rows of a kernel alone and beside its neighbour in each of ``ways``, a sample of each a round.

    So drift meets all alike, and what has been measured when one fails is kept. Each way is tried first:
    from the first that fails, or whose neighbour does not run at the same time, none is measured.

    neighbour : a stand-in or a copy engine
    budget : max_repeats rounds; those that start after max_s are only of what has fewer than min_repeats
        samples, or than QUICK_REPEATS if it takes less than QUICK_S

    Raises, at the end, what the failing one did; at once, if it was the first.
    """
    kernel = None if name == IDLE else kernels(scale)[name]
    compute = kernel.on(place) if kernel else neighbour.idle
    compute()  # loads and allocates what cannot be while the neighbour runs
    tried_s: dict[Any, float] = {None: _passage(neighbour, None, compute)[0]}
    failed: Exception | None = None
    for way in ways:
        try:
            tried_s[way] = _together(neighbour, way, compute, tried_s[None])
        except Exception as error:
            failed = error
            break
    if failed and len(tried_s) == 1:
        raise failed
    quick = max(budget.min_repeats, QUICK_REPEATS)
    fewest = {way: quick if s < QUICK_S else budget.min_repeats for way, s in tried_s.items()}
    begin_s = perf_counter()
    for sample in range(budget.max_repeats):
        late = perf_counter() - begin_s >= budget.max_s
        frames = []
        for way in (way for way in tried_s if not late or sample < fewest[way]):
            seconds, seen = _passage(neighbour, way, compute)
            columns = seen if way is None else seen | neighbour.columns(way)
            frames.append(kernel_rows(name, kernel, place, columns, np.array([seconds])))
        if not frames:
            break
        yield pd.concat(frames, ignore_index=True).assign(sample=sample)
    if failed:
        raise failed


def _passage(neighbour: Any, way: Any, compute: Compute) -> tuple[float, dict[str, Any]]:
    """Return seconds of one computation, and what was seen beside it, as columns."""
    torch.cuda.synchronize()
    passage = neighbour.beside(way, compute)
    torch.cuda.synchronize()
    passed = passage.traffic()
    seen = {"bytes_per_s": passed.bytes_per_s, "overlap_share": passed.overlap_share}
    return float(passage.marks.seconds()[-1]), {"ranks": 1, **seen}


def _together(neighbour: Any, way: Any, compute: Compute, alone_s: float) -> float:
    """Return seconds of a first computation. Raises UserError where it took turns with its neighbour.

    A profiler does that, and a GPU with one queue: each passage would then last as long as the
    neighbour does when nobody stops it, and show nothing.
    """
    for _ in range(neighbour.chances):
        seconds, seen = _passage(neighbour, way, compute)
        share = seen["overlap_share"]
        if share >= neighbour.least_overlap and seconds - alone_s <= neighbour.most_extra_s:
            return seconds
    raise taking_turns("a kernel", way, seconds, alone_s, share)


def taking_turns(
    name: str, company: object, seconds: float, alone_s: float, share: float
) -> UserError:
    return UserError(
        f"beside {company} {name} took {format_seconds(seconds)}, alone {format_seconds(alone_s)}, "
        f"and both ran at the same time for {share:.0%} of it: something has them take turns"
    )


# -- the copy engine ----------------------------------------------------------------------------

DIRECTIONS = ("h2d", "d2h")
WAYS = (*DIRECTIONS, "both")

CHUNK_BYTES = 16 * MIB  # a quarter of a millisecond at 64 GB/s: starting a copy does not count
# How long copies last, as nobody can stop them: over the computation's time, and at least, so that a host
# that is away for a moment does not come too late.
AS_LONG, LEAST_COPIES_S = 4.0, 0.05
HOLD_CYCLES = 2_000_000  # of the GPU, 1 ms: until the host has given it the computation
_FEW = Budget(warmup=1, min_repeats=3, max_repeats=3)


class CopyEngine:
    """Copies between host and GPU that outlast a computation, in a stream of its own for each direction.

    How many these must be follows from the time of one, and from those of what was last computed, alone
    and beside any. Where that is held up they end too early, which a second chance may mend.
    """

    least_overlap, most_extra_s = GpuStandIn.least_overlap, GpuStandIn.most_extra_s
    chances = 3

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        self._streams = {way: torch.cuda.Stream(device) for way in DIRECTIONS}
        self._ends = {}  # (target, source) of each direction
        for way in DIRECTIONS:
            host = torch.zeros(chunk_bytes, dtype=torch.uint8, pin_memory=True)
            there = host.to(device)
            self._ends[way] = (there, host) if way == "h2d" else (host, there)
        self._alone = self._last = timed(self.idle, device)()
        copies = (partial(self._copy, way) for way in DIRECTIONS)
        self._copy_s = min(float(measure_on(device, copy, _FEW).min()) for copy in copies)

    def columns(self, way: str) -> dict[str, Any]:
        """Which way is copied, as columns of table ``contention``: no multiprocessor is taken."""
        return {"communication": f"copy_engine_{way}"}

    def idle(self) -> None:
        """Compute nothing for about two milliseconds."""
        torch.cuda._sleep(2 * HOLD_CYCLES)

    def beside(self, way: str | None, compute: Compute) -> Passage:
        """Start to copy one of WAYS, then compute; None: compute alone. As of `GpuStandIn.beside`."""
        here = torch.cuda.current_stream(self._device)
        directions = [direction for direction in DIRECTIONS if way in (direction, "both")]
        computing_s = max(float(marks.seconds()[-1]) for marks in (self._alone, self._last))
        copying_s = max(LEAST_COPIES_S, AS_LONG * computing_s)
        count = 1 + math.ceil(copying_s / self._copy_s)
        line, inside = Marks(self._device), Marks(self._device)
        line.mark()
        for direction in directions:
            self._streams[direction].wait_stream(here)
        for direction in directions:
            with torch.cuda.stream(self._streams[direction]):
                line.mark()
                for number in range(count):
                    self._copy(direction)
                    line.mark()
                    if number == 0:
                        here.wait_stream(self._streams[direction])
        torch.cuda._sleep(HOLD_CYCLES)
        line.mark()
        inside.mark()
        compute()
        inside.mark()
        line.mark()
        self._last = inside
        if way is None:
            self._alone = inside
        return Passage(inside, lambda: flow(line.seconds(), len(directions), self._chunk_bytes))

    def _copy(self, way: str) -> None:
        target, source = self._ends[way]
        target.copy_(source, non_blocking=True)


def flow(seconds: Floats, directions: int, chunk_bytes: int) -> Traffic:
    """What was copied while a computation ran.

    seconds : from any moment on, of that moment itself; for each direction, of the copies' beginning and
        of each one's end; of the computation's beginning and end
    """
    opened_s, closed_s = map(float, seconds[-2:])
    lines: Sequence[Floats] = np.split(seconds[1:-2], directions) if directions else []
    window = np.array([opened_s, closed_s])
    sent = [np.ptp(np.interp(window, line, np.arange(len(line)))) for line in lines]
    begins_s, ends_s = (tuple(float(line[at]) for line in lines) for at in (0, -1))
    return Traffic(begins_s, ends_s, opened_s, closed_s, float(sum(sent)) * chunk_bytes)


# -- cases -------------------------------------------------------------------------------------

Case = tuple[str, Callable[[], pd.DataFrame], float]
# As fast as it can; what a network adapter of 100 Gbit/s carries, which one block can, too; next to
# nothing, so that only room is taken, no bandwidth.
RATES = (0.0, 10e9, 1e6)
FIFO_BYTES = 4 * MIB  # three of these stay in the L2 cache
FEW, BRIEF = ("convolution", "attention"), Budget(warmup=1, min_repeats=2, max_repeats=3, max_s=0.1)


def _plan(brief: bool) -> tuple[Scale, Budget, Sequence[str]]:
    """Return sizes, what to spend on a kernel, and which ones; ``brief``: in seconds."""
    long = Budget(warmup=1, min_repeats=6, max_repeats=20, max_s=6.0)
    return (TINY, BRIEF, FEW) if brief else (PAPER, long, tuple(kernels(PAPER)))


def cases(device: str, brief: bool) -> Iterator[Case]:
    """Yield (name, measurement, seconds that it takes); ``brief``: in seconds, not minutes."""
    scale, budget, names = _plan(brief)
    on_gpu = device.startswith("cuda")
    for name in (*names, IDLE) if on_gpu else names[:1]:
        measure = partial(measure_beside_standin, device, name, scale, _footprints(brief), budget)
        yield name, measure, 3.0 + 1.5 * budget.max_s if on_gpu else 0.0


def copy_case(device: str, brief: bool) -> Case:
    """Return, as one of `cases`, all kernels beside copies; nobody waits for it where there is no GPU."""
    scale, budget, names = _plan(brief)
    budget = replace(budget, max_s=budget.max_s / 4)
    each_s = QUICK_REPEATS * len(WAYS) * LEAST_COPIES_S
    estimate_s = 3.0 + len(names) * each_s if device.startswith("cuda") else 0.0
    measure = partial(measure_beside_copies, device, names, scale, budget)
    return "copy-engine", measure, estimate_s


def _footprints(brief: bool) -> list[Footprint]:
    """Return at full speed the whole grid; threads matter less where a rate is kept."""
    if brief:
        return [Footprint(1, 64), Footprint(4, 512, 1e9), Footprint(2, 128, fifo_bytes=FIFO_BYTES)]
    few = THREADS[1], THREADS[-1]
    grid = [Footprint(*both) for both in itertools.product(BLOCKS, THREADS)]
    paced = itertools.product(RATES[1:], BLOCKS, few)
    grid += [Footprint(blocks, threads, rate) for rate, blocks, threads in paced]
    return grid + [Footprint(blocks, few[-1], 0.0, FIFO_BYTES) for blocks in BLOCKS]
