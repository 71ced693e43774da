"""How long collectives take by size, on real ranks, with every value checked.

What ``bytes`` means for each is said in `ddlkit.core.link`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.core.link import COLLECTIVES, bus_factor, busbw
from ddlkit.core.schedule import STEPS, Schedule
from ddlkit.core.units import KIB, MIB, format_bytes, format_seconds
from ddlkit.run.instruments.clock import Budget, Marks, measure, sample_rows, synchronizer, timed
from ddlkit.run.instruments.usage import Usage
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import (
    Floats,
    Rank,
    agree_all,
    carrying_messages,
    gather_single,
    scatter_single,
    slowest,
)
from ddlkit.run.lab import emulated
from ddlkit.run.measure.algorithms import SteppedAllReduce

LIBRARY = "library"
"""In place of an algorithm: whichever the library takes for its own collective."""
SIZES = tuple(KIB << power for power in range(17))  # 1 KiB .. 64 MiB
BUDGET = Budget(warmup=1, min_repeats=5, max_repeats=50, max_s=1.0)
SAMPLE_BYTES = 32 * MIB
HOLD_CYCLES = 2_000_000  # of a GPU, about 1 ms: until all of a sample is queued

_ELEMENT_BYTES = 4
_LARGEST = 4096  # sums of up to 4096 such integers are exact in float32
_SHIFT = 7919  # prime: ranks' shares of one random vector are that far apart


@dataclass(frozen=True)
class CollectivesSettings:
    """Which collectives to time at which sizes, and how.

    sizes : bytes, rounded up to a whole number of elements per rank; budget : for each size
    messages_per_sample : messages posted at once; a sample is their mean, as nccl-tests takes it.
        Training posts its groups so: what one message costs among others is less than a lone one, by the
        time in which ranks come together, and by TCP's after a pause. SAMPLE_BYTES at most in all.
        How many of them are carried at once, the column ``in_flight``, is for gloo the threads it joined with
    tries : how often a size is measured, at most, while the machine's host disturbs it
    algorithm : LIBRARY, or of an all-reduce one of `ddlkit.core.schedule`, whose steps are sent one by one

    Raises UserError for an unknown collective or algorithm, and for sizes that are none.
    """

    collectives: Sequence[str] = tuple(COLLECTIVES)
    sizes: Sequence[int] = SIZES
    budget: Budget = BUDGET
    messages_per_sample: int = 1
    seed: int = 0
    tries: int = 1
    algorithm: str = LIBRARY

    def __post_init__(self) -> None:
        for collective in self.collectives:
            bus_factor(collective, 1)
        wrong = [size for size in self.sizes if size < 1]
        if wrong or not self.sizes:
            raise UserError(f"message sizes {list(self.sizes)}: give at least one, all above 0")
        if self.algorithm != LIBRARY:
            Schedule.of(self.algorithm, 1)
            if others := set(self.collectives) - {"all_reduce"}:
                asked = f"{' and '.join(sorted(others))} by {self.algorithm}"
                raise UserError(f"{asked}: only an all_reduce can be measured step by step")


@job(CollectivesSettings, "collectives")
def collectives_job(me: Rank, settings: CollectivesSettings) -> Iterator[Tables]:
    """One row per sample, ``seconds`` of the slowest rank; collectives in turn, small sizes first.

    The ranks start each sample together, from a barrier. They leave it a little apart, by up to about
    the time of one small message, and the slowest rank's time includes waiting for the last to start:
    so times below a few small messages are too long by a fraction of one. Large sizes are not touched.

    NCCL's messages are timed by the GPU's own clock, without launching them and waiting for their end;
    all others by the wall clock, since gloo's threads are what carries them. The column ``clock`` says so.

    Raises UserError when an element comes out wrong, and for steps that NCCL should send.
    """
    gloo = me.backend == "gloo"
    if settings.algorithm != LIBRARY and not gloo:
        raise UserError(f"{settings.algorithm} by {me.backend}: steps are sent by gloo only")
    # gloo's own are rings; NCCL chooses by size unless it is told.
    algorithm = "ring" if gloo else os.environ.get("NCCL_ALGO", "auto")
    if settings.algorithm != LIBRARY:
        algorithm = f"{STEPS}{settings.algorithm}"
    # Sizes that round up to the same number of elements are one size.
    sizes = sorted({whole_size(size, me.world_size) for size in settings.sizes})
    for collective in settings.collectives:
        frames = []
        for number, size in enumerate(sizes):
            seconds, used = _undisturbed(me, settings, collective, size, settings.seed + number)
            labels = {
                "collective": collective,
                "backend": me.backend,
                "algorithm": algorithm,
                "link": me.link,
                "link_bits_per_s": me.link_bits_per_s,
                "ranks": me.world_size,
                "messages_per_sample": messages_at(size, settings.messages_per_sample),
                "in_flight": max(1, me.gloo_threads),
                "bytes": size,
                "stolen": used.stolen,
                "late": used.late,
                "clock": clock_of(me),
            }
            frames.append(sample_rows(labels, seconds))
            median_s = float(np.median(seconds))
            rate = busbw(collective, me.world_size, size, median_s) * 8 / 1e9
            me.say(
                f"{collective} of {format_bytes(size)} on {me.world_size} ranks: "
                f"{format_seconds(median_s)}, bus {rate:.3g} Gbit/s, {len(seconds)} samples"
            )
        yield {"collectives": pd.concat(frames, ignore_index=True)}


def _undisturbed(
    me: Rank, settings: CollectivesSettings, collective: str, size: int, seed: int
) -> tuple[Floats, Usage]:
    """`measure_size`, again while the host takes more than its share of the cores; how they were used."""
    for _ in range(settings.tries):
        watch = emulated.Watch(me.rank)
        messages = settings.messages_per_sample
        how = (settings.budget, seed, messages, settings.algorithm)
        seconds = measure_size(me, collective, size, *how)
        used = Usage(*slowest(astuple(watch.usage())).tolist())
        if not used.disturbed:
            break
    return seconds, used


def clock_of(me: Rank) -> str:
    """By which clock messages are timed: NCCL's are a device's own work, gloo's that of threads."""
    return "device" if me.backend == "nccl" else "wall"


def whole_size(size: int, world_size: int) -> int:
    """``size`` in bytes, rounded up so that every rank holds the same number of elements."""
    unit = _ELEMENT_BYTES * world_size
    return -(-size // unit) * unit


def messages_at(size: int, messages_per_sample: int) -> int:
    """How many messages of ``size`` bytes are posted at once when ``messages_per_sample`` are asked for."""
    return max(1, min(messages_per_sample, SAMPLE_BYTES // size))


def measure_size(
    me: Rank,
    collective: str,
    size: int,
    budget: Budget,
    seed: int,
    messages_per_sample: int,
    algorithm: str = LIBRARY,
) -> Floats:
    """Seconds of every sample, of the slowest rank; the values of the last one are checked."""
    count = messages_at(size, messages_per_sample)
    checked = CheckedCollective(me, collective, size, seed, count, algorithm)
    synchronize = synchronizer(me.device)

    def together() -> None:
        checked.reset()
        synchronize()
        dist.barrier()  # NCCL's is a kernel; `measure` waits for its end, too, before it starts a sample

    def held() -> Marks:
        torch.cuda._sleep(HOLD_CYCLES)
        return timed(checked.run, me.device)()

    action = held if clock_of(me) == "device" else checked.run
    seconds = measure(action, budget, synchronize=synchronize, setup=together, agree=agree_all)
    checked.check()
    return slowest(seconds) / count


class CheckedCollective:
    """One collective on one size, of random integers in float32 whose sums are exact.

    mine : what this rank contributes, different on every rank; buffers : (count, n) where the results of
    ``count`` equal messages appear; expected : what must stand in each afterwards
    algorithm : LIBRARY, or that of an all-reduce whose steps are sent one by one
    """

    def __init__(
        self,
        me: Rank,
        collective: str,
        size: int,
        seed: int,
        count: int = 1,
        algorithm: str = LIBRARY,
    ) -> None:
        self.collective = collective
        elements = size // _ELEMENT_BYTES
        share = _shares(seed, elements // me.world_size if collective == "all_gather" else elements)
        mine = share(me.rank)
        if collective == "all_gather":
            expected = torch.cat([share(number) for number in range(me.world_size)])
        else:
            expected = torch.zeros(elements)
            for number in range(me.world_size):
                expected += share(number)
            if collective == "reduce_scatter":
                expected = expected.chunk(me.world_size)[me.rank]
        start = mine if collective == "all_reduce" else torch.full_like(expected, float("nan"))
        everything = (tensor.to(me.device) for tensor in (mine, start, expected))
        self.mine, self._start, self.expected = everything
        self.buffers = self.expected.new_empty((count, expected.numel()))
        self._me = me
        self._stepped: list[SteppedAllReduce] = []
        if algorithm != LIBRARY:
            schedule = Schedule.of(algorithm, me.world_size)
            self._stepped = [SteppedAllReduce(schedule, me.rank, one) for one in self.buffers]

    def reset(self) -> None:
        """Put the buffers back to where they were before the collective."""
        self.buffers.copy_(self._start)

    def run(self) -> None:
        """The collective itself: all messages posted, then waited for in order; of steps one by one."""
        if self._stepped:
            with carrying_messages(self._me):
                for stepped in self._stepped:
                    stepped()
            return
        for work in [self._post(buffer) for buffer in self.buffers]:
            work.wait()

    def _post(self, buffer: torch.Tensor) -> dist.Work:
        if self.collective == "all_reduce":
            return dist.all_reduce(buffer, async_op=True)
        if self.collective == "reduce_scatter":
            return scatter_single(buffer, self.mine, async_op=True)
        return gather_single(buffer, self.mine, async_op=True)

    def check(self) -> None:
        """Raise UserError unless every element is exactly right."""
        wrong = int((self.buffers != self.expected).sum())
        if wrong:
            size = format_bytes(max(self.expected.nbytes, self.mine.nbytes))
            raise UserError(
                f"{self.collective} of {size}: {wrong} of {self.buffers.numel()} elements came out "
                "wrong: no time is recorded, mend the network or the library first"
            )


def _shares(seed: int, elements: int) -> Callable[[int], torch.Tensor]:
    """(elements,) of each rank: one random vector, rotated by a different amount for every rank."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randint(
        -_LARGEST, _LARGEST, (elements,), generator=generator, dtype=torch.float32
    )
    return lambda rank: vector.roll(rank * _SHIFT)
