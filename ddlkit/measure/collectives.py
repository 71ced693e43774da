"""How long collectives take by size, with every element of the results checked.

``bytes`` is the size of a collective as `ddlkit.core.collective` defines it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
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
from ddlkit.jobs.vitals import Retries, Usage, Watch

SIZES = tuple(KIB << power for power in range(17))
"""Bytes of the messages that are measured by default: 1 KiB to 64 MiB."""
BUDGET = Budget(warmup=1, min_repeats=5, max_repeats=50, max_s=1.0)
"""How long each size is measured by default."""
SAMPLE_BYTES = 32 * MIB
"""The most bytes of all messages that are posted at once, unless one alone has more."""
HOLD_CYCLES = 2_000_000
"""Cycles of a GPU, about 1 ms, in which the host posts all messages of a sample."""

_ELEMENT_BYTES = 4
# float32 holds every integer up to 2**24 exactly. The sum over up to 4096 ranks of
# integers of up to 4096 stays within that, in whatever order a library adds.
_LARGEST_INTEGER = 4096
# The inputs of ranks are one random vector, rotated by this many elements from rank to
# rank. The number is a prime, so that ranks seldom have equal inputs, and a message that
# is put at a wrong place or comes from a wrong rank gives a wrong result.
_ROTATION = 7919


@dataclass(frozen=True)
class Posting:
    """How a collective is posted, and which result is right.

    Attributes
    ----------
    post : callable
        Takes the buffer for the result and a rank's input. Posts the collective without
        waiting, and returns what ``wait`` waits for.
    result : callable
        Takes the inputs of all ranks in their order, and this rank. Returns its result.
    in_place : bool
        Whether the buffer holds the rank's input before, and the result replaces it.
        ``post`` then ignores its second argument.
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


def _concatenated(inputs: Iterator[torch.Tensor], me: Rank) -> torch.Tensor:
    return torch.cat([*inputs])


def _own_part_of_sum(inputs: Iterator[torch.Tensor], me: Rank) -> torch.Tensor:
    return _sum(inputs, me).chunk(me.world_size)[me.rank]


POSTINGS = {
    "all_reduce": Posting(_post_all_reduce, _sum, in_place=True),
    "all_gather": Posting(_post_all_gather, _concatenated),
    "reduce_scatter": Posting(_post_reduce_scatter, _own_part_of_sum),
}
"""How each of COLLECTIVES is posted and checked, by the same names."""


@dataclass(frozen=True)
class CollectivesSettings:
    """The settings of the job.

    Attributes
    ----------
    collectives : sequence of str
        Names of collectives.
    sizes : sequence of int
        Sizes in bytes. Each is rounded up to a whole number of elements on every rank.
    budget : Budget
        How long to measure each size of each collective.
    messages_per_sample : int
        How many messages are posted at once, as training does; fewer if they exceed
        `SAMPLE_BYTES`. A sample is the mean time of a message.
    tries : int
        How often a size is measured at most, while others disturb the machine.
    apart_s : float
        How much later each rank starts than the rank before it, in seconds, as ranks do
        in training. Times are counted from the last start.

    Raises
    ------
    UserError
        If a collective is unknown, or if there is no size or one below 1 byte.
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
    """Time each collective at each size.

    Parameters
    ----------
    me : Rank
        This rank.
    settings : CollectivesSettings
        The collectives and their sizes.

    Yields
    ------
    mapping of str to DataFrame
        Table ``collectives`` of one collective: a row per sample, with ``seconds`` of
        the slowest rank.

    Raises
    ------
    UserError
        If an element of a result is wrong.
    """
    on_nccl = me.backend == "nccl"
    # NCCL chooses an algorithm by size, unless NCCL_ALGO says which. gloo's are rings.
    algorithm = os.environ.get("NCCL_ALGO", "auto") if on_nccl else "ring"
    columns_of_all_rows = {
        "backend": me.backend,
        "algorithm": algorithm,
        "link": me.link,
        "link_bits_per_s": me.link_bits_per_s,
        "ranks": me.world_size,
        # gloo has one thread here and NCCL one stream, so messages follow one another.
        "in_flight": 1,
        "apart_s": settings.apart_s,
        # NCCL's messages are work of the device, gloo's are work of threads.
        "clock": "device" if on_nccl else "wall",
    }
    # Sizes that round up to the same number of elements are one size.
    sizes = sorted({whole_size(size, me.world_size) for size in settings.sizes})
    retries = Retries()
    for collective in settings.collectives:
        frames = []
        # Each size has random integers of its own, by its number as the seed.
        for seed, size in enumerate(sizes):
            count = messages_at(size, settings.messages_per_sample)
            make_collective = partial(
                CheckedCollective, me, collective, size, seed, count
            )
            seconds, usage = _measure_undisturbed(
                me, make_collective, settings, retries
            )
            labels = {
                "collective": collective,
                "messages_per_sample": count,
                "bytes": size,
                **columns_of_all_rows,
                "stolen": usage.stolen,
                "late": usage.late,
                "others": usage.others,
            }
            frames.append(sample_rows(labels, seconds))
            median = format_seconds(float(np.median(seconds)))
            message = f"{collective} of {format_bytes(size)} on {me.world_size} ranks"
            me.say(f"{message}: {median}")
        yield {"collectives": pd.concat(frames, ignore_index=True)}


def whole_size(size: int, world_size: int) -> int:
    """Round a size up so that every rank holds the same number of elements.

    Parameters
    ----------
    size : int
        The size in bytes.
    world_size : int
        How many ranks there are.

    Returns
    -------
    int
        The smallest multiple of 4 bytes times the number of ranks that is not below it.

    Examples
    --------
    >>> whole_size(1000, 2), whole_size(1000, 3)
    (1000, 1008)
    """
    unit = _ELEMENT_BYTES * world_size
    # The negation before and after turns the rounding down of `//` into rounding up.
    return -(-size // unit) * unit


def messages_at(size: int, messages_per_sample: int) -> int:
    """Return how many messages are posted at once.

    Parameters
    ----------
    size : int
        The size of a message in bytes.
    messages_per_sample : int
        How many are wanted.

    Returns
    -------
    int
        As many as wanted if they fit into `SAMPLE_BYTES`, or fewer, but at least one.

    Examples
    --------
    >>> messages_at(2**20, 16), messages_at(2**24, 16), messages_at(2**30, 16)
    (16, 2, 1)
    """
    return max(1, min(messages_per_sample, SAMPLE_BYTES // size))


def _measure_undisturbed(
    me: Rank,
    make_collective: Callable[[], CheckedCollective],
    settings: CollectivesSettings,
    retries: Retries,
) -> tuple[Floats, Usage]:
    """Time a collective until other programs do not disturb it or no try is left.

    Two numbers limit the tries: ``settings.tries`` is for this collective at this size,
    and ``retries`` is shared by all collectives and sizes of the job.

    Returns
    -------
    seconds : ndarray, shape (n_samples,)
        Seconds of a message in each sample of the last try.
    usage : Usage
        What the processor did during that try.
    """
    tries_left = settings.tries
    while True:
        watch = Watch(me.rank)
        seconds = _measure(me, make_collective(), settings)
        # All ranks know the largest usage of any, so that all decide alike whether to
        # try again. A single rank that went on would wait for the others for ever.
        usage = peers.usage_of_all(watch.usage())
        tries_left -= 1
        # `again` is false if nothing disturbed the measurement, or if the job may repeat no
        # more. Otherwise it pauses, in which others may end what disturbs.
        if not tries_left or not retries.again(usage):
            return seconds, usage


def _measure(
    me: Rank, checked: CheckedCollective, settings: CollectivesSettings
) -> Floats:
    """Return seconds of a message by sample, of the slowest rank.

    The results that the last sample left in the buffers are checked.
    """
    synchronize = synchronizer(me.device)

    def start_together() -> None:
        checked.reset()
        synchronize()
        # NCCL's barrier is a kernel. After this function `measure` waits for the device,
        # and thus for the end of that kernel, before it times a sample.
        dist.barrier()
        sleep_until(perf_counter() + me.rank * settings.apart_s)

    def run_on_gpu() -> Marks:
        # The GPU sleeps until the host has posted all messages of the sample, so that
        # the time between two marks has no time of the host in it.
        torch.cuda._sleep(HOLD_CYCLES)
        return timed(checked.run, me.device)()

    seconds = measure(
        run_on_gpu if me.backend == "nccl" else checked.run,
        settings.budget,
        synchronize=synchronize,
        setup=start_together,
        agree=peers.agree_all,
    )
    checked.check()
    # The rank with the largest number starts last, and no collective can end before all
    # ranks have started. What an earlier rank waited for the last start does not count.
    started_before_last_s = (me.world_size - 1 - me.rank) * settings.apart_s
    return slowest(seconds - started_before_last_s) / len(checked.buffers)


class CheckedCollective:
    """A collective of random integers in float32, whose sums are exact.

    Parameters
    ----------
    me : Rank
        This rank.
    collective : str
        The name of the collective.
    size : int
        Its size in bytes, which `whole_size` has rounded up.
    seed : int
        The seed of the random integers.
    count : int, optional
        How many messages are posted at once.

    Attributes
    ----------
    mine : Tensor
        This rank's input.
    expected : Tensor, shape (n,)
        The right result.
    buffers : Tensor, shape (count, n)
        The results, a row per message.
    """

    def __init__(
        self, me: Rank, collective: str, size: int, seed: int, count: int = 1
    ) -> None:
        self.collective = collective
        self._posting = POSTINGS[collective]
        # The size of an all-gather is that of its result, of which each rank's input is
        # only one part. The input of an all-reduce is as large as its size.
        parts = COLLECTIVES[collective].input_parts(me.world_size)
        elements = size // _ELEMENT_BYTES // parts
        # All ranks draw the same vector, so each knows the inputs of all others and can
        # compute the right result without any message.
        generator = torch.Generator().manual_seed(seed)
        integers = torch.randint(
            -_LARGEST_INTEGER, _LARGEST_INTEGER, (elements,), generator=generator
        )
        vector = integers.float()
        # A generator, because the inputs of many ranks would not fit into memory at once.
        inputs = (vector.roll(rank * _ROTATION) for rank in range(me.world_size))
        mine = vector.roll(me.rank * _ROTATION)
        expected = self._posting.result(inputs, me)
        # What each buffer holds before the collective: the input if the collective
        # replaces it, and otherwise NaN, because a buffer that nothing is written to
        # must not look right.
        if self._posting.in_place:
            initial = mine
        else:
            initial = torch.full_like(expected, float("nan"))
        self.mine = mine.to(me.device)
        self._initial = initial.to(me.device)
        # A row for each message of a sample.
        self.expected = expected.to(me.device)
        self.buffers = self.expected.new_empty((count, expected.numel()))

    def reset(self) -> None:
        """Restore what the buffers held before the collective."""
        self.buffers.copy_(self._initial)

    def run(self) -> None:
        """Post all messages, then wait for them in order."""
        post = self._posting.post
        for work in [post(buffer, self.mine) for buffer in self.buffers]:
            work.wait()

    def check(self) -> None:
        """Check every element of the results.

        Raises
        ------
        UserError
            If an element is not exactly right.
        """
        wrong = int((self.buffers != self.expected).sum())
        if wrong:
            size = format_bytes(max(self.expected.nbytes, self.mine.nbytes))
            elements = f"{wrong} of {self.buffers.numel()} elements"
            raise UserError(
                f"{self.collective} of {size}: {elements} came out wrong: "
                "mend the network or the library first"
            )


def missing_sizes(
    rows: pd.DataFrame, collective: str, sizes: Sequence[int], workers: int
) -> tuple[int, ...]:
    """Return the sizes of a collective that are not measured in a table yet.

    Parameters
    ----------
    rows : DataFrame
        Rows of a table ``collectives``, or an empty frame.
    collective : str
        The name of the collective.
    sizes : sequence of int
        The wanted sizes in bytes.
    workers : int
        How many ranks there are.

    Returns
    -------
    tuple of int
        The sizes of which the table has no row.
    """
    measured_sizes: set[int] = set()
    # An empty frame may have no columns.
    if len(rows):
        measured_sizes = set(rows["bytes"][rows["collective"] == collective])
    return tuple(
        size for size in sizes if whole_size(size, workers) not in measured_sizes
    )
