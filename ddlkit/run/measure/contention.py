"""How much kernels slow down when communication shares the device with them (sharing 4.2.2, Tab 1, Fig 3).

Five kernels of the paper, a matrix product and attention as networks of today have them, each alone and
beside communication of given blocks and threads: the stand-in of `ddlkit.run.measure.standin` on any one
device, and the real thing, all-reduces of NCCL (on CPUs gloo), where there are several ranks. That both
ran at the same time is proven for every row: ``overlap_share`` is the share of the kernel's time in which
the communication kernel ran too, by the stand-in's own stamps, or by the profiler's spans.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Generic

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.core.timeline import merge
from ddlkit.core.units import MIB, format_seconds
from ddlkit.formats import kineto
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget, Floats, Marks, measure_interleaved, sample_rows
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank, agree_all, slowest
from ddlkit.run.measure import channels
from ddlkit.run.measure.copyengine import LEAST_S, WAYS, CopyEngine
from ddlkit.run.measure.layers import computing, device_named
from ddlkit.run.measure.standin import (
    Asked,
    Compute,
    CpuStandIn,
    Footprint,
    GpuStandIn,
    Neighbour,
)
from ddlkit.run.sessions.session import Partial, Unavailable, all_or_partial

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
MODEST = Scale(images=4, side=224, product=1024, attention=(1, 8, 1024, 64))  # for a CPU
TINY = Scale(images=1, side=32, product=128, attention=(1, 2, 64, 16))

_ONCE = Budget(warmup=1, min_repeats=1, max_repeats=1)
# Of what is this quick there are samples enough for an interval of the median that says something.
QUICK_S, QUICK_REPEATS = 0.05, 20
IDLE = "idle"  # no kernel: what the communication does by itself


@dataclass(frozen=True)
class Kernel:
    """What computes: its input's shape and type, and how to make the call for an input on a device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[torch.Tensor], Compute]

    def on(self, device: torch.device) -> Compute:
        """The kernel on fresh random input there; forward only."""
        return self.build(torch.randn(self.shape, device=device).to(self.dtype))


def kernels(scale: Scale) -> dict[str, Kernel]:
    """Kernels by name. The first five are sharing Tab 1 at ``PAPER``.

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


# -- beside the stand-in -----------------------------------------------------------------------


def measure_beside_standin(
    device: str, name: str, scale: Scale, footprints: Sequence[Footprint], budget: Budget
) -> pd.DataFrame:
    """Table ``contention``: one kernel alone and beside the stand-in of each footprint, in turn.

    name : of `kernels`, or "idle"
    budget : for all of it together, as of `_rounds`

    On CUDA ``seconds`` are the GPU's own; on a CPU a sample is the mean of several calls in a row if one
    takes less than the scheduler needs to be fair. The kernel starts once every block of the stand-in
    runs; inputs at the paper's sizes are larger than any cache. ``bytes_per_s`` is what the stand-in moved
    while the kernel ran, which may be less than asked; registers are those that the compiler gave.

    Raises UserError for an unknown device or kernel, a stand-in that does not compile, and where not even
    the first footprint can be measured; Partial where a later one cannot, with those before it.
    """
    _known(name, scale)
    with computing(f"{name} beside the stand-in", device) as place, torch.no_grad():
        stand_in = GpuStandIn() if place.type == "cuda" else CpuStandIn()
        rounds = _rounds(name, scale, place, stand_in, footprints, budget)
        return all_or_partial("contention", rounds)


def measure_beside_copies(
    device: str, names: Sequence[str], scale: Scale, budget: Budget
) -> pd.DataFrame:
    """Table ``contention``: kernels alone and beside copies between host and GPU, each way and both.

    Copy engines take no multiprocessor: what a kernel loses beside them is memory's bandwidth alone.
    ``communication`` says which way, as "copy_engine_h2d". budget : for each kernel

    Raises Unavailable for a CPU, which has no such engine, and else as `measure_beside_standin` does.
    """
    if device_named(device).type != "cuda":
        raise Unavailable("no copy engine: needs a GPU")
    for name in names:
        _known(name, scale)
    with computing("kernels beside copies", device) as place, torch.no_grad():
        copies = CopyEngine(place)
        each = (_rounds(name, scale, place, copies, WAYS, budget) for name in names)
        return all_or_partial("contention", itertools.chain.from_iterable(each))


def _known(name: str, scale: Scale) -> None:
    known = (*kernels(scale), IDLE)
    if name not in known:
        raise UserError(f"unknown kernel {name!r}: use one of {', '.join(known)}")


def _rounds(
    name: str,
    scale: Scale,
    place: torch.device,
    neighbour: Neighbour[Asked],
    ways: Sequence[Asked],
    budget: Budget,
) -> Iterator[pd.DataFrame]:
    """Rows of a kernel alone and beside its neighbour in each of ``ways``, a sample of each in a round.

    So drift meets all alike, and what has been measured when one fails is kept. Each way is tried first:
    from the first that fails, or whose neighbour does not run at the same time, none is measured.

    budget : max_repeats rounds; those that start after max_s are only of what has fewer than min_repeats
        samples, or than QUICK_REPEATS if it takes less than QUICK_S

    Raises, at the end, what the failing one did; at once, if it was the first.
    """
    kernel = kernels(scale).get(name)
    once = kernel.on(place) if kernel else neighbour.idle
    # Alone comes first: this loads and allocates what cannot be while the neighbour runs.
    calls = _calls(once, place, neighbour.least_s)
    pair = _Beside(neighbour, lambda: [once() for _ in range(calls)], place)
    tried_s: dict[Asked | None, float] = {None: pair.passage(None)[0]}
    failed: Exception | None = None
    for way in ways:
        try:
            tried_s[way] = pair.together(way, tried_s[None])
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
        for one in (one for one in tried_s if not late or sample < fewest[one]):
            seconds, seen = pair.passage(one)
            beside = seen if one is None else seen | neighbour.columns(one)
            frames.append(_rows(name, kernel, place, beside, np.array([seconds / calls])))
        if not frames:
            break
        yield pd.concat(frames, ignore_index=True).assign(sample=sample)
    if failed:
        raise failed


class _Beside(Generic[Asked]):
    """A computation and its neighbour."""

    def __init__(self, neighbour: Neighbour[Asked], compute: Compute, place: torch.device) -> None:
        self._neighbour, self._compute = neighbour, compute
        self._wait = clock.synchronizer(place)

    def passage(self, way: Asked | None) -> tuple[float, dict[str, Any]]:
        """Seconds of one computation, and what was seen beside it, as columns."""
        self._wait()
        passage = self._neighbour.beside(way, self._compute)
        self._wait()
        passed = passage.traffic()
        seen = {"bytes_per_s": passed.bytes_per_s, "overlap_share": passed.overlap_share}
        return float(passage.marks.seconds()[-1]), {"ranks": 1, **seen}

    def together(self, way: Asked, alone_s: float) -> float:
        """Seconds of a first computation. Raises UserError where it had to take turns with its neighbour.

        A profiler does that, and a GPU with one queue: each passage would then last as long as the
        neighbour does when nobody stops it, and show nothing.
        """
        neighbour = self._neighbour
        for _ in range(neighbour.chances):
            seconds, seen = self.passage(way)
            share, extra_s = seen["overlap_share"], seconds - alone_s
            if share >= neighbour.least_overlap and extra_s <= neighbour.most_extra_s:
                return seconds
        raise _taking_turns("a kernel", way, seconds, alone_s, share)


def _taking_turns(
    name: str, company: object, seconds: float, alone_s: float, share: float
) -> UserError:
    return UserError(
        f"beside {company} {name} took {format_seconds(seconds)}, alone {format_seconds(alone_s)}, "
        f"and both ran at the same time for {share:.0%} of it: something has them take turns"
    )


_COUNTS = ("blocks", "threads", "taken_blocks", "taken_threads", "registers", "shared_bytes")
_SEEN = ("bytes_per_s_asked", "bytes_per_s", "overlap_share")


def _rows(
    name: str,
    kernel: Kernel | None,
    device: torch.device,
    beside: Mapping[str, Any],
    seconds: Floats,
) -> pd.DataFrame:
    """Rows of one kernel in one company; ``beside``: columns that are not as of a kernel alone."""
    labels: dict[str, Any] = {
        "kernel": name,
        "shape": "x".join(map(str, kernel.shape)) if kernel else "none",
        "dtype": str(kernel.dtype).removeprefix("torch.") if kernel else "none",
        "device": device.type,
        "communication": "none",
        **dict.fromkeys((*_COUNTS, "cluster", "fifo_bytes"), 0),
        **dict.fromkeys(_SEEN, 0.0),
    }
    return sample_rows({**labels, **beside}, seconds)


def _calls(once: Compute, device: torch.device, least_s: float) -> int:
    """How often to call ``once`` so that all together last at least ``least_s``."""
    once_s = float(clock.measure(once, _ONCE, synchronize=clock.synchronizer(device))[0])
    return max(1, math.ceil(least_s / once_s))


# -- beside real all-reduces -------------------------------------------------------------------

MESSAGE_BYTES = 256 * MIB
AS_LONG = 4.0  # how long messages beside a kernel last, over its time alone
LEAST_OVERLAP = 0.1  # of a GPU's kernel: less is the end of one beside the begin of the other
HOLD_CYCLES = 2_000_000  # of the GPU, 1 ms: until the first message's kernel has started
COMPUTE = "ddlkit.compute"
TIMEOUT_S = 300.0  # for each setting


@dataclass(frozen=True)
class ContentionSettings:
    """What CONFIG.json of the job ``contention`` may hold.

    blocks, threads : what NCCL is asked for; 0 leaves it to NCCL
    names : of `kernels`; budget : for each of them
    """

    blocks: int
    scale: Scale
    budget: Budget
    names: Sequence[str]
    message_bytes: int = MESSAGE_BYTES
    threads: int = 0


def measure_beside_all_reduce(
    settings: ContentionSettings, thread_counts: Sequence[int], n_ranks: int
) -> pd.DataFrame:
    """Table ``contention``: kernels alone and beside all-reduces between ``n_ranks`` ranks of this machine.

    Each of ``thread_counts`` is measured in processes of its own. What NCCL took, as the profiler saw
    it, is in taken_blocks, taken_threads, registers and shared_bytes (0 where there is no such kernel,
    as with gloo). ``seconds`` are of the slowest rank. ``overlap_share`` and ``bytes_per_s`` (what each
    rank sends while messages are under way) are seen once a kernel, by profiling one more repeat.

    Raises as `channels.measure_settings` does, also for kernels that had to take turns (see `beside_each`).
    """

    def measure_one(_: int, threads: int) -> pd.DataFrame:
        own = replace(settings, threads=threads)
        with launch.workspace(None) as out, keeping(out):
            return channels.launch_under(contention_job, own, n_ranks, TIMEOUT_S, out)[0]

    pairs = [(settings.blocks, threads) for threads in thread_counts]
    return channels.measure_settings("contention", pairs, measure_one)


@dataclass(frozen=True)
class Exchange:
    """All-reduces, beside which a kernel can be measured.

    communication, ranks : as in the table
    post : puts one on its way, and returns what waits for it; reset : has the next begin as the first
    """

    communication: str
    ranks: int
    post: Callable[[], Compute]
    reset: Compute


@job(ContentionSettings, "contention")
def contention_job(me: Rank, settings: ContentionSettings) -> Iterator[Tables]:
    """One kernel after the other."""
    return beside_each(me, settings, lambda: _between_ranks(me, settings.message_bytes))


@contextmanager
def keeping(out: Path) -> Iterator[None]:
    """Where a job in the block fails, raise Partial with the rows that it left in ``out``, if any."""
    try:
        yield
    except UserError as error:
        left = out / "contention.csv"
        if not left.exists():
            raise
        raise Partial({"contention": store.load_table(left, "contention")}, str(error)) from error


def beside_each(
    me: Rank, settings: ContentionSettings, exchange: Callable[[], Exchange]
) -> Iterator[Tables]:
    """Rows of each kernel, as of `beside`.

    Raises UserError, at the end, for those that did not run at the same time as the messages, on whichever
    rank: on a GPU that is as little a measurement as beside a stand-in. On CPUs all are kept: gloo's
    threads share the cores with the computation, and to take turns there is what is measured.
    """
    turns = []
    for name in settings.names:
        with computing(f"{name} beside all-reduces", me.device), torch.no_grad():
            company = exchange()
            rows = beside(me, name, settings, company)
        alone_s, beside_s = rows.groupby("communication", sort=False)["seconds"].median()
        share = float(-slowest([-rows["overlap_share"].max()])[0])
        if me.device.type == "cuda" and share < LEAST_OVERLAP:
            turns.append(_taking_turns(name, company.communication, beside_s, alone_s, share))
        else:
            yield {"contention": rows}
    if turns:
        raise UserError("; ".join(map(str, turns)))


def _between_ranks(me: Rank, message_bytes: int) -> Exchange:
    start = torch.randn(message_bytes // 4, device=me.device)
    message = start.clone()
    post = partial(dist.all_reduce, message, async_op=True)
    # Sums of sums grow.
    return Exchange(me.backend, me.world_size, lambda: post().wait, partial(message.copy_, start))


def beside(me: Rank, name: str, settings: ContentionSettings, exchange: Exchange) -> pd.DataFrame:
    """Rows of one kernel, alone and beside all-reduces that outlast it."""
    kernel = kernels(settings.scale)[name]
    pair = _Pair(me, kernel, exchange)
    count = pair.enough()
    both_at_once = partial(pair.both, count)
    company = exchange.communication
    companies: dict[str, Compute] = {"none": pair.alone, company: both_at_once}
    samples = pair.measure(companies, settings.budget)
    pair.together()  # all ranks profile, so that all are equally slow
    seen = read_trace(json.loads(clock.chrome_trace(both_at_once, me.device)))
    sent_bytes = count * settings.message_bytes * bus_factor("all_reduce", exchange.ranks)
    seen |= {"communication": company, "bytes_per_s": sent_bytes / seen.pop("messages_s")}
    # Alone or not: a table holds several settings, each with times of its own.
    both = {"ranks": exchange.ranks, "blocks": settings.blocks, "threads": settings.threads}
    frames = [
        _rows(name, kernel, me.device, both, samples["none"] / pair.calls),
        _rows(name, kernel, me.device, both | seen, samples[company] / pair.calls),
    ]
    alone_s, beside_s = (float(frame["seconds"].median()) for frame in frames)
    me.say(
        f"{name}: {format_seconds(alone_s)} alone, {format_seconds(beside_s)} beside {company}, "
        f"which ran {100 * seen['overlap_share']:.0f}% of that time"
    )
    return pd.concat(frames, ignore_index=True)


class _Pair:
    """A kernel and all-reduces on this rank; every rank must call every method alike.

    On a CPU the kernel is called several times in a row: beside one call shorter than the scheduler's
    slice, gloo's thread would not get the processor at all.
    """

    def __init__(self, me: Rank, kernel: Kernel, exchange: Exchange) -> None:
        self.device = me.device
        once = kernel.on(me.device)
        least_s = 0.0 if me.device.type == "cuda" else CpuStandIn.least_s
        calls = _calls(once, me.device, least_s)
        self.calls = int(slowest([calls])[0])
        self.alone = clock.timed(lambda: [once() for _ in range(self.calls)], me.device)
        self._exchange = exchange
        self._wait = clock.synchronizer(me.device)

    def both(self, count: int) -> Marks:
        """Post ``count`` all-reduces, compute while they run, and wait for all."""
        waits = [self._exchange.post() for _ in range(count)]
        if self.device.type == "cuda":
            torch.cuda._sleep(HOLD_CYCLES)
        with record_function(COMPUTE):
            marks = self.alone()
        for wait in waits:
            wait()
        return marks

    def enough(self) -> int:
        """How many all-reduces outlast the kernel, on whichever rank it takes longest."""
        one = Budget(warmup=1, min_repeats=3, max_repeats=3)
        actions = {"kernel": self.alone, "message": lambda: self._exchange.post()()}
        samples = self.measure(actions, one)
        kernel_s, message_s = (float(np.median(seconds)) for seconds in samples.values())
        return 1 + math.ceil(AS_LONG * kernel_s / message_s)

    def measure(self, actions: Mapping[str, Compute], budget: Budget) -> dict[str, Floats]:
        """Seconds of the actions in turn, of the slowest rank."""
        samples = measure_interleaved(
            actions, budget, synchronize=self._wait, setup=self.together, agree=agree_all
        )
        return {name: slowest(seconds) for name, seconds in samples.items()}

    def together(self) -> None:
        """Have every rank start from here, with the message as it was."""
        self._exchange.reset()
        self._wait()
        dist.barrier()


# -- what the profiler saw ---------------------------------------------------------------------


def read_trace(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of ``contention`` from a Chrome trace of a computation and the messages beside it.

    Also messages_s, from the first message's start to the last one's end. overlap_share is of the
    computation's time; the rest is of the messages' kernel, 0 where they have none.

    Computation: all GPU kernels but NCCL's and the one that only waits; without a GPU, the span named
    COMPUTE. Messages: NCCL's kernels, or gloo's spans on its own threads.
    Raises UserError when there is nothing of either.
    """
    events = kineto.spans(trace)
    kernels = [event for event in events if event.category == "kernel"]
    if kernels:
        messages = [event for event in kernels if event.collective]
        computing = [one for one in kernels if not one.collective and "spin_kernel" not in one.name]
    else:
        messages = [event for event in events if event.collective == "all_reduce"]
        computing = [event for event in events if event.name == COMPUTE]
    if not (messages and computing):
        raise UserError(
            f"the profiler saw {len(messages)} messages and {len(computing)} computations: "
            "that they ran together is not proven, so no time is recorded"
        )
    message, compute = (np.array([event.at_s for event in seen]) for seen in (messages, computing))
    both_s = _length(message) + _length(compute) - _length(np.concatenate([message, compute]))
    how = messages[0].args if kernels else {}
    return {
        "overlap_share": max(0.0, both_s / _length(compute)),
        "messages_s": float(message[:, 1].max() - message[:, 0].min()),
        "taken_blocks": math.prod(how.get("grid", [0])),
        "taken_threads": math.prod(how.get("block", [0])),
        "registers": int(how.get("registers per thread", 0)),
        "shared_bytes": int(how.get("shared memory", 0)),
    }


def _length(spans: Floats) -> float:
    """Of the union of (n, 2) starts and ends."""
    return float(np.sum(np.diff(merge(spans))))


# -- cases -------------------------------------------------------------------------------------

Case = tuple[str, Callable[[], pd.DataFrame], float, int]
# As fast as it can; what a network adapter of 100 Gbit/s carries, which one block can, too; next to
# nothing, so that only room is taken, no bandwidth.
RATES = (0.0, 10e9, 1e6)
FIFO_BYTES = 4 * MIB  # three of these stay in the L2 cache
CPU_RATES = (0.0, 1e9)
CPU_BLOCKS = (1, 2, 4)
BRIEF = Budget(warmup=1, min_repeats=2, max_repeats=3, max_s=0.1)


def _plan(device: str, brief: bool) -> tuple[Scale, Budget, Sequence[str]]:
    """Sizes, what to spend on a kernel, and which ones; ``brief``: in seconds."""
    on_gpu = device.startswith("cuda")
    scale = TINY if brief else PAPER if on_gpu else MODEST
    long = Budget(warmup=1, min_repeats=6, max_repeats=20, max_s=6.0 if on_gpu else 20.0)
    few = ("convolution", "attention") if brief else tuple(kernels(scale))
    return scale, BRIEF if brief else long, few


def cases(device: str, brief: bool) -> Iterator[Case]:
    """(name, measurement, seconds that it takes, GPUs that it needs); ``brief``: in seconds.

    First each kernel beside the stand-in, then all kernels between ranks, by number of blocks.
    """
    on_gpu = device.startswith("cuda")
    scale, budget, few = _plan(device, brief)
    footprints = _footprints(on_gpu, brief)
    for name in (*few, IDLE):
        measure = partial(measure_beside_standin, device, name, scale, footprints, budget)
        yield name, measure, 3.0 + 1.5 * budget.max_s, 0
    budget = replace(budget, max_s=budget.max_s / 4)  # two companies in turn, not tens
    names = tuple(kernels(scale)) if on_gpu else few
    each_s = 10.0 + len(names) * (1 + budget.max_s)
    if not on_gpu:
        own = ContentionSettings(0, scale, budget, few, 4 * MIB)
        yield "gloo-p2", partial(measure_beside_all_reduce, own, [0], 2), each_s, 0
        return
    threads = channels.THREADS[1:2] if brief else channels.THREADS
    gpus = torch.cuda.device_count()
    names, message_bytes = (few, 4 * MIB) if brief else (names, MESSAGE_BYTES)
    for blocks in channels.BLOCKS[: 1 if brief else None]:
        own = ContentionSettings(blocks, scale, budget, names, message_bytes)
        measure = partial(measure_beside_all_reduce, own, threads, gpus)
        yield f"nccl-b{blocks}", measure, len(threads) * each_s, 2


def copy_case(device: str, brief: bool) -> Case:
    """As one of `cases`: all kernels beside copies; nobody waits for it where there is no GPU."""
    scale, budget, few = _plan(device, brief)
    budget = replace(budget, max_s=budget.max_s / 4)
    each_s = QUICK_REPEATS * len(WAYS) * LEAST_S
    estimate_s = 3.0 + len(few) * each_s if device.startswith("cuda") else 0.0
    return "copy-engine", partial(measure_beside_copies, device, few, scale, budget), estimate_s, 0


def _footprints(on_gpu: bool, brief: bool) -> list[Footprint]:
    """At full speed the whole grid; threads matter less where a rate is kept, or the cache is fast enough."""
    if not on_gpu:
        blocks = CPU_BLOCKS[: 2 if brief else None]
        return [Footprint(many, 1, rate) for rate, many in itertools.product(CPU_RATES, blocks)]
    if brief:
        return [Footprint(1, 64), Footprint(4, 512, 1e9), Footprint(2, 128, fifo_bytes=FIFO_BYTES)]
    few = channels.THREADS[1], channels.THREADS[-1]
    found = [Footprint(*both) for both in itertools.product(channels.BLOCKS, channels.THREADS)]
    paced = itertools.product(RATES[1:], channels.BLOCKS, few)
    found += [Footprint(blocks, threads, rate) for rate, blocks, threads in paced]
    return found + [Footprint(blocks, few[-1], 0.0, FIFO_BYTES) for blocks in channels.BLOCKS]
