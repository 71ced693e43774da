"""How long collectives take by size (``bytes`` as in `ddlkit.core.collective`), with every value checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from time import perf_counter

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.collective import COLLECTIVES, find_collective
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB, format_bytes, format_seconds
from ddlkit.jobs import rank as peers
from ddlkit.jobs.clock import (
    Budget,
    Marks,
    measure,
    sample_rows,
    sleep_until,
    synchronizer,
    timed,
)
from ddlkit.jobs.rank import Floats, Rank, Tables, job, slowest
from ddlkit.jobs.vitals import Retries, Watch

SIZES = tuple(KIB << power for power in range(17))  # 1 KiB .. 64 MiB
BUDGET = Budget(warmup=1, min_repeats=5, max_repeats=50, max_s=1.0)
SAMPLE_BYTES = 32 * MIB
HOLD_CYCLES = 2_000_000  # of a GPU, about 1 ms: until all of a sample is queued

_ELEMENT_BYTES = 4
_LARGEST = 4096  # sums of up to 4096 such integers are exact in float32
_SHIFT = 7919  # prime: ranks' shares of one random vector are that far apart


@dataclass(frozen=True)
class Posting:
    """How one of COLLECTIVES is posted, and what must come out of it.

    Parameters
    ----------
    post : callable
        Takes the buffer for the result, and a rank's input; returns what ``wait`` waits for,
        without waiting itself.
    result : callable
        Takes the inputs of all ranks in their order, and this rank; returns its result.
    in_place : bool
        Whether the buffer holds the rank's input before, as ``post`` takes no other.
    """

    post: Callable[[torch.Tensor, torch.Tensor], dist.Work]
    result: Callable[[Iterator[torch.Tensor], Rank], torch.Tensor]
    in_place: bool = False


def _post_all_reduce(buffer: torch.Tensor, mine: torch.Tensor) -> dist.Work:
    return dist.all_reduce(buffer, async_op=True)


def _post_all_gather(buffer: torch.Tensor, mine: torch.Tensor) -> dist.Work:
    return peers.gather_single(buffer, mine, async_op=True)


def _post_reduce_scatter(buffer: torch.Tensor, mine: torch.Tensor) -> dist.Work:
    return peers.scatter_single(buffer, mine, async_op=True)


def _sum(inputs: Iterator[torch.Tensor], me: Rank) -> torch.Tensor:
    return reduce(torch.add, inputs)


def _joined(inputs: Iterator[torch.Tensor], me: Rank) -> torch.Tensor:
    return torch.cat([*inputs])


def _own_part_of_sum(inputs: Iterator[torch.Tensor], me: Rank) -> torch.Tensor:
    return _sum(inputs, me).chunk(me.world_size)[me.rank]


POSTINGS = {
    "all_reduce": Posting(_post_all_reduce, _sum, in_place=True),
    "all_gather": Posting(_post_all_gather, _joined),
    "reduce_scatter": Posting(_post_reduce_scatter, _own_part_of_sum),
}
"""How each of COLLECTIVES is posted and checked, by the same names."""


@dataclass(frozen=True)
class CollectivesSettings:
    """Which collectives to time at which sizes, and how; raises UserError for what there is not.

    sizes : bytes, rounded up to a whole number of elements per rank; budget : for each size
    messages_per_sample : posted at once, as training does, SAMPLE_BYTES at most; a sample is their mean
    apart_s : each rank starts so much after the one before it, as in training; times are from the last start
    tries : how often a size is measured, at most, while the machine's host disturbs it
    """

    collectives: Sequence[str] = tuple(COLLECTIVES)
    sizes: Sequence[int] = SIZES
    budget: Budget = BUDGET
    messages_per_sample: int = 1
    tries: int = 1
    apart_s: float = 0.0

    def __post_init__(self) -> None:
        for collective in self.collectives:
            find_collective(collective)
        if not self.sizes or min(self.sizes) < 1:
            raise UserError(
                f"message sizes {list(self.sizes)}: give at least one, all above 0"
            )


@job(CollectivesSettings, "collectives")
def collectives_job(me: Rank, settings: CollectivesSettings) -> Iterator[Tables]:
    """Yield a row per sample, ``seconds`` of the slowest rank; every element that comes is checked."""
    nccl = me.backend == "nccl"
    place = {
        "backend": me.backend,
        # gloo's own are rings; NCCL chooses by size unless it is told.
        "algorithm": os.environ.get("NCCL_ALGO", "auto") if nccl else "ring",
        "link": me.link,
        "link_bits_per_s": me.link_bits_per_s,
        "ranks": me.world_size,
        "in_flight": 1,
        "apart_s": settings.apart_s,
        # NCCL's messages are a device's own work, gloo's that of threads.
        "clock": "device" if nccl else "wall",
    }
    # Sizes that round up to the same number of elements are one size.
    sizes = sorted({whole_size(size, me.world_size) for size in settings.sizes})
    retries = Retries()
    for collective in settings.collectives:
        frames = []
        for seed, size in enumerate(sizes):
            count = messages_at(size, settings.messages_per_sample)
            for left in reversed(range(settings.tries)):
                watch = Watch(me.rank)
                checked = CheckedCollective(me, collective, size, seed, count)
                seconds = _seconds(me, checked, settings)
                used = peers.usage_of_all(watch.usage())
                if not (left and retries.again(used)):
                    break
            labels = {
                "collective": collective,
                "messages_per_sample": count,
                "bytes": size,
            }
            labels |= {
                **place,
                "stolen": used.stolen,
                "late": used.late,
                "others": used.others,
            }
            frames.append(sample_rows(labels, seconds))
            median = format_seconds(float(np.median(seconds)))
            me.say(
                f"{collective} of {format_bytes(size)} on {me.world_size} ranks: {median}"
            )
        yield {"collectives": pd.concat(frames, ignore_index=True)}


def whole_size(size: int, world_size: int) -> int:
    """Round ``size`` in bytes up so that every rank holds the same number of elements."""
    unit = _ELEMENT_BYTES * world_size
    return -(-size // unit) * unit


def messages_at(size: int, messages_per_sample: int) -> int:
    """Return how many messages of ``size`` bytes are posted at once: as many as wanted, if they fit."""
    return max(1, min(messages_per_sample, SAMPLE_BYTES // size))


def _seconds(
    me: Rank, checked: CheckedCollective, settings: CollectivesSettings
) -> Floats:
    """Return seconds of a message by sample, of the slowest rank; the last sample's values are checked."""
    synchronize = synchronizer(me.device)

    def together() -> None:
        checked.reset()
        synchronize()
        dist.barrier()  # NCCL's is a kernel; `measure` waits for its end, too, before it starts a sample
        sleep_until(perf_counter() + me.rank * settings.apart_s)

    def held() -> Marks:
        torch.cuda._sleep(HOLD_CYCLES)
        return timed(checked.run, me.device)()

    seconds = measure(
        held if me.backend == "nccl" else checked.run,
        settings.budget,
        synchronize=synchronize,
        setup=together,
        agree=peers.agree_all,
    )
    checked.check()
    ahead_s = (me.world_size - 1 - me.rank) * settings.apart_s
    return slowest(seconds - ahead_s) / len(checked.buffers)


class CheckedCollective:
    """One collective of random integers in float32, whose sums are exact; buffers : (count, n) results."""

    def __init__(
        self, me: Rank, collective: str, size: int, seed: int, count: int = 1
    ) -> None:
        self.collective, self._posting = collective, POSTINGS[collective]
        parts = COLLECTIVES[collective].input_parts(me.world_size)
        elements = size // _ELEMENT_BYTES // parts
        random = torch.Generator().manual_seed(seed)
        vector = torch.randint(
            -_LARGEST, _LARGEST, (elements,), generator=random
        ).float()
        shares = (vector.roll(number * _SHIFT) for number in range(me.world_size))
        mine = vector.roll(me.rank * _SHIFT)
        expected = self._posting.result(shares, me)
        in_place = self._posting.in_place
        start = mine if in_place else torch.full_like(expected, float("nan"))
        everything = (tensor.to(me.device) for tensor in (mine, start, expected))
        self.mine, self._start, self.expected = everything
        self.buffers = self.expected.new_empty((count, expected.numel()))

    def reset(self) -> None:
        """Put the buffers back to where they were before the collective."""
        self.buffers.copy_(self._start)

    def run(self) -> None:
        """Post all messages, then wait for them in order."""
        post = self._posting.post
        for work in [post(buffer, self.mine) for buffer in self.buffers]:
            work.wait()

    def check(self) -> None:
        """Raise UserError unless every element is exactly right."""
        wrong = int((self.buffers != self.expected).sum())
        if wrong:
            size = format_bytes(max(self.expected.nbytes, self.mine.nbytes))
            what = f"{self.collective} of {size}: {wrong} of {self.buffers.numel()} elements"
            raise UserError(
                f"{what} came out wrong: mend the network or the library first"
            )


def lacking(
    rows: pd.DataFrame, collective: str, sizes: Sequence[int], workers: int
) -> tuple[int, ...]:
    """Return those of the sizes that rows of a table ``collectives`` do not have of a collective."""
    there = set(rows["bytes"][rows["collective"] == collective]) if len(rows) else set()
    return tuple(size for size in sizes if whole_size(size, workers) not in there)
