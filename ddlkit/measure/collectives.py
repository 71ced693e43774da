"""How long collectives take by size, with every element of the results checked.

``bytes`` is the size of a collective as `ddlkit.core.collective` defines it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.collective import COLLECTIVES, find_collective
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB, format_bytes, format_seconds
from ddlkit.jobs import rank as peers
from ddlkit.jobs.clock import (
    Action,
    Budget,
    measure,
    sample_rows,
    sleep_until,
    synchronizer,
    timed,
)
from ddlkit.jobs.rank import Floats, Rank, Tables, job
from ddlkit.jobs.vitals import Retries, Usage, Watch

SIZES = tuple(KIB << power for power in range(17))
"""Bytes of the messages that are measured by default: 1 KiB to 64 MiB."""
NCCL_SIZES = tuple(KIB << power for power in range(21))
"""Bytes of the messages between GPUs that are measured by default: 1 KiB to 1 GiB."""
NCCL_MESSAGES = 16
"""How many messages between GPUs a sample has, if they are small.

A single small message would mostly show how exactly the ranks begin together."""
BUDGET = Budget(warmup=1, min_repeats=5, max_repeats=50, max_s=1.0)
"""How long each size is measured by default."""
SAMPLE_BYTES = 32 * MIB
"""The most bytes of all messages that are posted at once, unless one alone has more."""

_ELEMENT_BYTES = 4
# float32 holds every integer up to 2**24 exactly. The sum over up to 4096 ranks of
# integers of up to 4096 stays within that, in whatever order a library adds.
_LARGEST_INTEGER = 4096
# The inputs of ranks are one random vector, rotated by this many elements from rank to
# rank. The number is a prime, so that ranks seldom have equal inputs, and a message that
# is put at a wrong place or comes from a wrong rank gives a wrong result.
_ROTATION = 7919
# Odd numbers of 64 bits, by which positions are turned into random integers.
_MULTIPLIERS = (-7046029254386353131, -4417276706812531889)
_CHUNK_ELEMENTS = 2**24
"""Elements for which random integers are made at once, to bound the memory."""


@dataclass(frozen=True)
class Posting:
    """How a rank posts a collective, and which result is right.

    Attributes
    ----------
    post : callable
        Takes the tensor for the result and a rank's input. Posts the collective without
        waiting, and returns what ``wait`` waits for.
    result : callable
        Takes the inputs of all ranks in their order, and this rank. Returns its result.
    in_place : bool
        Whether the result always replaces the rank's input. ``post`` then ignores its
        second argument.
    """

    post: Callable[[torch.Tensor, torch.Tensor], dist.Work]
    result: Callable[[Iterator[torch.Tensor], Rank], torch.Tensor]
    in_place: bool = False


# Functions for `Posting.post`, which start a collective and return without waiting.


def _post_all_reduce(target: torch.Tensor, source: torch.Tensor) -> dist.Work:
    # The input lies in `target` already, because an all-reduce is always in place.
    return dist.all_reduce(target, async_op=True)


def _post_all_gather(target: torch.Tensor, source: torch.Tensor) -> dist.Work:
    return peers.gather_single(target, source, async_op=True)


def _post_reduce_scatter(target: torch.Tensor, source: torch.Tensor) -> dist.Work:
    return peers.scatter_single(target, source, async_op=True)


# Functions for `Posting.result`, which compute the right result of this rank from the
# inputs of all ranks. Some results are the same on all ranks.


def _sum(inputs: Iterator[torch.Tensor], me: Rank) -> torch.Tensor:
    return reduce(torch.add, inputs)


def _concatenated(inputs: Iterator[torch.Tensor], me: Rank) -> torch.Tensor:
    return torch.cat([*inputs])


def _own_part_of_sum(inputs: Iterator[torch.Tensor], me: Rank) -> torch.Tensor:
    # Rank k gets the k-th of equally long parts.
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
        in training. Times are counted from the last start. With NCCL it must be 0.

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
        the slowest rank, and ``fastest_s`` of the fastest. ``stolen``, ``late`` and
        ``others`` say how much the machine was disturbed meanwhile: which share of the
        cores' time other virtual machines took, which share of packets an emulated link
        carried too late, and which share of the cores' time other programs used.
        All-reduces are in place, and so are all collectives of NCCL.

    Raises
    ------
    UserError
        If an element of a result is wrong on any rank, and if each rank is to begin
        ``settings.apart_s`` after the one before it with NCCL, whose GPUs begin together.
        All ranks raise the same error.
    """
    _refuse_apart_with_nccl(me, settings)
    columns_of_all_rows = _columns_of_all_rows(me, settings)
    # Sizes that round up to the same number of elements are one size.
    sizes = sorted({whole_size(size, me.world_size) for size in settings.sizes})
    retries = Retries.on(me.device.type, me.say)
    n_all = len(settings.collectives) * len(sizes)
    n_done = 0
    for collective in settings.collectives:
        frames = []
        # The number of a size is the seed of its random integers, so that no two sizes
        # have the same integers.
        for seed, size in enumerate(sizes):
            count = messages_at(size, settings.messages_per_sample)
            make_collective = partial(
                CheckedCollective, me, collective, size, seed=seed, count=count
            )
            # Seconds on the slowest and on the fastest rank, and how busy the machine was.
            spread, usage = _measure_undisturbed(me, make_collective, settings, retries)
            labels = {
                "collective": collective,
                "messages_per_sample": count,
                "bytes": size,
                **columns_of_all_rows,
            }
            frames.append(_rows_of_samples(labels, spread, usage))
            # A line of progress for the user.
            n_done += 1
            median = format_seconds(float(np.median(spread.slowest_s)))
            ranks = "1 rank" if me.world_size == 1 else f"{me.world_size} ranks"
            message = f"{collective} of {format_bytes(size)} on {ranks}"
            me.say(f"{n_done} of {n_all} messages: {message} takes {median}")
        yield {"collectives": pd.concat(frames, ignore_index=True)}


def _refuse_apart_with_nccl(me: Rank, settings: CollectivesSettings) -> None:
    """Raise UserError if ranks are to start apart with NCCL.

    The GPUs meet in a message of their own before each sample, so they start together
    whenever their ranks start.
    """
    if settings.apart_s and me.backend == "nccl":
        raise UserError(
            f"apart {settings.apart_s:g} s: GPUs start together with NCCL: leave apart "
            "out, or measure gloo"
        )


def _columns_of_all_rows(me: Rank, settings: CollectivesSettings) -> dict[str, Any]:
    """Return the columns of table ``collectives`` that are equal in all rows of a job."""
    on_nccl = me.backend == "nccl"
    # NCCL chooses an algorithm by size, unless NCCL_ALGO says which. gloo's are rings.
    algorithm = os.environ.get("NCCL_ALGO", "auto") if on_nccl else "ring"
    layout = peers.layout()
    return {
        "backend": me.backend,
        "algorithm": algorithm,
        "link": me.link,
        "link_bits_per_s": me.link_bits_per_s,
        "ranks": me.world_size,
        "nodes": layout.nodes,
        "ranks_per_node": layout.ranks_per_node,
        # How many messages are under way at once. gloo has one thread here and NCCL one
        # stream, so messages follow one another.
        "in_flight": 1,
        # How much later each rank starts a sample than the rank before it, in seconds.
        "apart_s": settings.apart_s,
        # NCCL's messages are work of the device, gloo's are work of threads.
        "clock": "device" if on_nccl else "wall",
    }


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


def _rows_of_samples(
    labels: dict[str, Any], spread: _Spread, usage: Usage
) -> pd.DataFrame:
    """Return a row of table ``collectives`` for each sample of one collective and size.

    ``labels`` are the columns that do not depend on the measured times. ``spread`` has the
    seconds of each sample on the slowest rank, which become the column ``seconds``, and on
    the fastest rank. ``usage`` says how busy the machine was.
    """
    # Each is a share from 0 to 1, and the same in all rows: time of the cores that other
    # virtual machines took, packets that an emulated link carried too late, and time of
    # the cores that other programs took.
    columns_of_usage = {
        "stolen": usage.stolen,
        "late": usage.late,
        "others": usage.others,
    }
    rows = sample_rows({**labels, **columns_of_usage}, spread.slowest_s)
    return rows.assign(fastest_s=spread.fastest_s)


def messages_at(size: int, messages_per_sample: int) -> int:
    """Return how many messages of a size are posted at once.

    Parameters
    ----------
    size : int
        The size of a message in bytes.
    messages_per_sample : int
        How many messages are wanted.

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


class _Spread(NamedTuple):
    """Mean seconds of a message in each sample, on the slowest and on the fastest rank.

    The ranks differ, because NCCL's kernel runs from the moment in which its own rank
    begins. A rank that begins early waits in the kernel for the others. So the shortest
    time is closest to that of the message itself.
    """

    slowest_s: Floats
    fastest_s: Floats


def _measure_undisturbed(
    me: Rank,
    make_collective: Callable[[], CheckedCollective],
    settings: CollectivesSettings,
    retries: Retries,
) -> tuple[_Spread, Usage]:
    """Time a collective until other programs do not disturb it or no try is left.

    ``make_collective`` makes the collective anew for each try. Two numbers limit the tries:
    ``settings.tries`` is for this collective at this size, and ``retries`` is shared by all
    collectives and sizes of the job.

    Returns
    -------
    spread : _Spread
        Seconds of a message in each sample of the last try.
    usage : Usage
        How busy the machine was during that try.
    """
    tries_left = settings.tries
    while True:
        watch = Watch(me.rank)  # notes how busy the machine is from now on
        spread = _measure(me, make_collective(), settings)
        # All ranks know the largest usage of any, so that all decide alike whether to
        # try again. A single rank that went on would wait for the others for ever.
        usage = peers.usage_of_all(watch.usage())
        tries_left -= 1
        # `again` is false if nothing disturbed the measurement, or if the job may repeat no
        # more. Otherwise it pauses first, because the disturbance may end meanwhile.
        if not tries_left or not retries.again(usage):
            return spread, usage


def _measure(
    me: Rank, checked: CheckedCollective, settings: CollectivesSettings
) -> _Spread:
    """Time a collective, check its results, and return the mean seconds of a message.

    The times are those of the slowest and of the fastest rank in each sample. ``checked`` has
    a buffer for each message of a sample. Times count from the start of the last rank,
    because ranks may start ``settings.apart_s`` apart, as they do in training. UserError is
    raised on all ranks if a result is wrong.
    """
    seconds = _time_samples(me, checked, settings)
    # The buffers still hold the results of the last sample.
    _refuse_wrong_results(checked)
    # The rank with the largest number starts last, and no collective can end before all
    # ranks have started. What an earlier rank waited for the last start does not count.
    # With NCCL all start together, and this time is 0.
    started_before_last_s = (me.world_size - 1 - me.rank) * settings.apart_s
    messages_per_sample = len(checked.buffers)
    own_s = (seconds - started_before_last_s) / messages_per_sample
    seconds_of_ranks = peers.everyones(own_s)  # shape (ranks, samples)
    slowest_s = seconds_of_ranks.max(axis=0)
    fastest_s = seconds_of_ranks.min(axis=0)
    # A rank that starts later than it should has waited less than what is subtracted, so that
    # its time may come out below zero, and 0 takes its place. The largest time is never below
    # zero, because nothing is subtracted on the rank that starts last.
    return _Spread(slowest_s, np.maximum(fastest_s, 0.0))


def _time_samples(
    me: Rank, checked: CheckedCollective, settings: CollectivesSettings
) -> Floats:
    """Return the seconds of each sample on this rank, from its own start.

    In a sample each rank posts one message for each buffer of ``checked``, and waits for
    all of them. Each rank starts ``settings.apart_s`` later than the rank before it. With
    NCCL ``apart_s`` is 0, because `collectives_job` refuses anything else.
    """
    synchronize = synchronizer(me.device)

    def reset_and_meet() -> None:
        """Prepare a sample, which is no part of its time."""
        checked.reset()
        # On a GPU the call above returns before the buffers are restored. This rank is
        # ready only when they are.
        synchronize()
        # NCCL's barrier is a kernel. After this function `measure` waits for the device,
        # and thus for the end of that kernel, before it runs `action`.
        dist.barrier()
        # Ranks in training start a message one after the other. After this common moment,
        # rank 0 starts at once, and each other rank `apart_s` after the rank before it.
        sleep_until(perf_counter() + me.rank * settings.apart_s)

    # `measure` times an action by the clock of the host, unless the action returns times.
    action: Action = checked.run
    if me.backend == "nccl":
        # This action has the GPU take the time before and after the messages, and returns
        # both times, so that the clock of the GPU counts. Hosts leave the barrier one
        # after the other. So the GPUs meet once more, in a tiny all-reduce just before the
        # first of the two times.
        meeting = torch.zeros(1, device=me.device)
        meet = partial(dist.all_reduce, meeting)
        action = timed(checked.run, me.device, before=meet)
    return measure(
        action,
        settings.budget,
        synchronize=synchronize,
        setup=reset_and_meet,
        # All ranks stop after the same sample.
        agree=peers.agree_all,
    )


def _refuse_wrong_results(checked: CheckedCollective) -> None:
    """Raise UserError on all ranks if a result is wrong on any rank.

    The error names the rank with the most wrong elements.
    """
    # A rank that left alone after a wrong result would let all others wait for it. So all
    # ranks exchange their numbers of wrong elements: shape (ranks,).
    n_wrong_on_ranks = peers.everyones([checked.n_wrong()])[:, 0]
    if n_wrong_on_ranks.any():
        rank = int(n_wrong_on_ranks.argmax())
        raise checked.error(int(n_wrong_on_ranks[rank]), f" on rank {rank}")


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
    buffers : Tensor, shape (count, m)
        A row per message, which holds the result. If the collective is in place, the row
        also holds the input, and is as long as the longer of both.
    """

    def __init__(
        self, me: Rank, collective: str, size: int, seed: int, count: int = 1
    ) -> None:
        self.collective = collective
        self._rank = me.rank
        self._posting = POSTINGS[collective]
        # In place, the input and the result of a message share one buffer. An all-reduce
        # always is in place here, and NCCL's own benchmarks and FSDP run all collectives
        # so.
        self._in_place = self._posting.in_place or me.backend == "nccl"
        # The size of a collective is `_input_parts` times the input of a rank, and
        # `_output_parts` times its result. For an all-gather the two numbers are the number of
        # ranks and 1, because its result has the inputs of all ranks. For a reduce-scatter they
        # are 1 and the number of ranks, and for an all-reduce both are 1.
        definition = COLLECTIVES[collective]
        self._input_parts = definition.input_parts(me.world_size)
        self._output_parts = definition.output_parts(me.world_size)
        elements = size // _ELEMENT_BYTES
        # All ranks draw the same vector, so each knows the inputs of all others and can
        # compute the right result without any message.
        vector = random_integers(elements // self._input_parts, seed, me.device)
        # The input of rank k is the vector, rotated by k times `_ROTATION` elements. So the
        # inputs of ranks differ, although only one vector is drawn. `inputs` is a generator,
        # because the inputs of many ranks would not fit into memory at once.
        inputs = (vector.roll(rank * _ROTATION) for rank in range(me.world_size))
        self.mine = vector.roll(me.rank * _ROTATION)
        # The right result of this rank.
        self.expected = self._posting.result(inputs, me)
        # A row for each of the messages that are posted at once. `reset` fills each of the
        # rows with `_initial`, what it holds before the collective: NaN, and in place also
        # the input.
        self._initial = self._initial_row(elements)
        self.buffers = self.mine.new_empty((count, len(self._initial)))

    def _initial_row(self, elements: int) -> torch.Tensor:
        """Return a row of the buffers as it is before the collective.

        A row holds the result of one message. If the collective is in place, the row also
        holds the input, and is as large as the larger of the two, which has ``elements``
        elements. An all-gather in place between R ranks has R parts, of which a rank's input is
        one.
        """
        row_elements = elements if self._in_place else self.expected.numel()
        # An element that the collective does not write must not look right. So all of a
        # row but the input is NaN before.
        row = self.mine.new_full((row_elements,), float("nan"))
        # In place, the input lies in the row itself, in the part that `_source` returns. Of an
        # all-reduce or a reduce-scatter this is the whole row, so that no NaN remains.
        if self._in_place:
            self._source(row).copy_(self.mine)
        return row

    def _source(self, row: torch.Tensor) -> torch.Tensor:
        """Return the input of a message, which is a part of the row if it is in place."""
        if not self._in_place:
            return self.mine
        return self._part(row, self._input_parts)

    def _target(self, row: torch.Tensor) -> torch.Tensor:
        """Return the part of a row that gets the result of a message."""
        if not self._in_place:
            return row
        return self._part(row, self._output_parts)

    def _part(self, row: torch.Tensor, parts: int) -> torch.Tensor:
        """Return this rank's part of a row, or the whole row if there is one part.

        A row has either one part, which is the same for all ranks, or one for each rank.
        """
        return row.chunk(parts)[self._rank] if parts > 1 else row

    def reset(self) -> None:
        """Restore what the buffers held before the collective."""
        self.buffers.copy_(self._initial)

    def run(self) -> None:
        """Post all messages, then wait for them in order."""
        post = self._posting.post
        works = [post(self._target(row), self._source(row)) for row in self.buffers]
        for work in works:
            work.wait()

    def n_wrong(self) -> int:
        """Return how many elements of the results are not exactly right on this rank."""
        n_wrong = 0
        for row in self.buffers:
            n_wrong += int((self._target(row) != self.expected).sum())
        return n_wrong

    def check(self) -> None:
        """Check every element of the results of this rank.

        Raises
        ------
        UserError
            If an element is not exactly right.
        """
        n_wrong = self.n_wrong()
        if n_wrong:
            raise self.error(n_wrong)

    def error(self, n_wrong: int, where: str = "") -> UserError:
        """Return the error that says how many elements are wrong.

        Parameters
        ----------
        n_wrong : int
            How many elements of the results of a rank are wrong.
        where : str, optional
            Words that name the rank, with a blank before them.

        Returns
        -------
        UserError
        """
        # The size of a collective is that of its longer buffer.
        size = format_bytes(max(self.expected.nbytes, self.mine.nbytes))
        n_elements = len(self.buffers) * self.expected.numel()
        elements = f"{n_wrong} of {n_elements} elements"
        return UserError(
            f"{self.collective} of {size}{where}: {elements} came out wrong: "
            "mend the network or the library first"
        )


def random_integers(
    elements: int, seed: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return random integers in float32, which are the same on every device.

    Each integer is a hash of its position. torch's own random numbers would depend on
    the model of the GPU, and drawing a large vector on the host would take seconds.

    Parameters
    ----------
    elements : int
        How many integers.
    seed : int
        Another seed gives other integers.
    device : torch.device or str, optional
        Where they are made.

    Returns
    -------
    Tensor, shape (elements,)
        Integers from -4096 to 4095.

    Examples
    --------
    >>> random_integers(3, seed=1).equal(random_integers(5, seed=1)[:3])
    True
    """
    vector = torch.empty(elements, device=device)
    # The integers of 64 bits take twice the memory of their part of the vector. So they
    # are made chunk by chunk.
    for begin in range(0, elements, _CHUNK_ELEMENTS):
        # A view, which `copy_` fills below.
        chunk = vector[begin : begin + _CHUNK_ELEMENTS]
        # Each seed begins 2**40 positions after the one before it, so that no two seeds
        # share positions.
        first_position = (seed << 40) + begin
        bits = torch.arange(first_position, first_position + len(chunk), device=device)
        for multiplier in _MULTIPLIERS:
            # The product wraps at 64 bits. Its high bits depend on all bits of the
            # position, and are mixed into the low ones.
            bits = bits * multiplier
            bits = bits ^ (bits >> 32)
        # The remainder is from 0 to 8191, also of a negative number. The difference is
        # from -4096 to 4095.
        chunk.copy_(bits.remainder(2 * _LARGEST_INTEGER) - _LARGEST_INTEGER)
    return vector


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
        Those of ``sizes`` for which the table has no row.
    """
    measured_sizes: set[int] = set()
    # An empty frame may have no columns.
    if len(rows):
        measured_sizes = set(rows["bytes"][rows["collective"] == collective])
    # A size is rounded up to equally many elements on every rank before it is measured.
    # The table has the rounded sizes.
    return tuple(
        size for size in sizes if whole_size(size, workers) not in measured_sizes
    )
