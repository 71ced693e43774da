"""How long a device takes to copy bytes, by kind of copy and by size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
import psutil
import torch
from torch import Tensor

from ddlkit.core.units import KIB, MIB, format_bytes
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget, Floats
from ddlkit.measure.layers import compute_on
from ddlkit.measure.session import Unavailable, all_or_partial

SIZES = tuple(4 * KIB << power for power in range(0, 19, 2))
"""Bytes of the copies that are measured by default: 4 KiB to 1 GiB."""
_SAMPLE_BYTES = 64 * MIB
"""A sample has no more copies than these bytes allow, or a single one that is larger."""
_MOST_COPIES = 32
"""The most copies of a sample, so that those of few bytes do not take forever."""
_MEMORY_PARTS = 8
"""A pool takes at most an eighth of the host's free memory. The host has two pools."""

Pool = Tensor
"""Bytes (uint8). Copies go from the slots of one pool to those of another, in turn."""


def measure_copies(device: str, sizes: Sequence[int], budget: Budget) -> pd.DataFrame:
    """Time copies of each kind and size.

    Bytes are copied from one pool of memory to another. Both pools are as large as the
    largest copy. For smaller copies the pools are divided into slots of the size of a copy.
    Each copy takes the next slots, so that with large pools no copy finds its bytes in a
    cache.

    Parameters
    ----------
    device : str
        ``"cpu"`` for copies within the host's memory, ``"cuda"`` for copies between the
        host and the GPU and within the GPU.
    sizes : sequence of int
        Bytes of the copies.
    budget : Budget
        How long to measure each size of each kind.

    Returns
    -------
    DataFrame
        Table ``copies``: seconds of one copy, a row per sample. A sample is the mean of
        several copies in a row.

    Raises
    ------
    Unavailable
        If an eighth of the host's free memory holds none of the sizes.
    Partial
        If it holds only some of the sizes. The exception has the table of these.
    """
    # Up to two pools lie in the host's memory, and each may take an eighth of it.
    largest_possible = psutil.virtual_memory().available // _MEMORY_PARTS
    fitting = [size for size in sizes if size <= largest_possible]
    too_large = [format_bytes(size) for size in sizes if size > largest_possible]
    # Why sizes are left out. It is used only if some are too large.
    reason = (
        f"no copies of {', '.join(too_large)}: an eighth of the host's free memory "
        f"is {format_bytes(largest_possible)}"
    )
    if not fitting:
        raise Unavailable(reason)
    largest = max(fitting)

    def frames(torch_device: torch.device) -> Iterator[pd.DataFrame]:
        """Measure each kind at each size that fits, and yield the rows of each."""
        pools = _pools(torch_device, largest)
        for kind, (target, source) in pools.items():
            labels = {"copy": kind, "device": torch_device.type}
            for size in fitting:
                yield _rows_of_copies(target, source, size, budget, labels)
        if too_large:
            # `all_or_partial` keeps the rows so far, and raises `Partial` with them.
            raise Unavailable(reason)

    what = f"pools of {format_bytes(largest)} to copy between"
    # If memory runs out, `compute_on` raises a UserError with this description.
    with compute_on(what, device) as torch_device:
        return all_or_partial("copies", frames(torch_device))


def _rows_of_copies(
    target: Pool, source: Pool, size: int, budget: Budget, labels: Mapping[str, str]
) -> pd.DataFrame:
    """Time copies of ``size`` bytes from one pool to another, and return a row per sample.

    ``labels`` has the values of the columns "copy" and "device".
    """
    copies_per_sample, seconds = _time_copies(target, source, size, budget)
    columns = {**labels, "bytes": size, "copies_per_sample": copies_per_sample}
    return clock.sample_rows(columns, seconds)


def _pools(device: torch.device, n_bytes: int) -> dict[str, tuple[Pool, Pool]]:
    """Return the two pools of each kind of copy: first the target, then the source.

    A pool is memory from which or to which bytes are copied. Each pool has ``n_bytes``
    random bytes, rounded up to a multiple of 8.

    The kinds are "memcpy" on the CPU. On a GPU they are from the host to the device
    (h2d) and back (d2h), each with pinned or pageable memory of the host, and within
    the device (d2d).
    """

    def random(*, pinned: bool = False) -> Pool:
        """Return a pool of random bytes in the host's memory, which may be pinned."""
        # Random numbers are drawn as words of 8 bytes, which is faster than as bytes.
        n_words = -(-n_bytes // 8)  # rounded up
        words = torch.empty(n_words, dtype=torch.int64, pin_memory=pinned)
        return words.random_().view(torch.uint8)

    if device.type == "cpu":
        return {"memcpy": (random(), random())}
    pageable = random()
    pinned = random(pinned=True)
    on_device = pinned.to(device)
    also_on_device = pageable.to(device)
    return {
        "h2d_pinned": (on_device, pinned),
        "h2d_pageable": (on_device, pageable),
        "d2h_pinned": (pinned, also_on_device),
        "d2h_pageable": (pageable, also_on_device),
        "d2d": (on_device, also_on_device),
    }


def _copies_per_sample(n_slots: int, size: int) -> int:
    """Return how many copies of ``size`` bytes a sample has.

    ``n_slots`` is how many such copies a pool can hold. A sample uses no slot twice, and is
    limited in bytes and in copies.
    """
    # A single copy may have more bytes than the limit.
    most_by_bytes = max(1, _SAMPLE_BYTES // size)
    return min(n_slots, _MOST_COPIES, most_by_bytes)


def _time_copies(
    target: Pool, source: Pool, size: int, budget: Budget
) -> tuple[int, Floats]:
    """Time copies of ``size`` bytes from one pool to another.

    Returns
    -------
    copies_per_sample : int
        How many copies follow one another in a sample.
    seconds : ndarray, shape (repeats,)
        The mean seconds of one copy in each sample.
    """
    # A slot is a place in a pool that holds one copy. Slots are numbered from 0.
    n_slots = source.numel() // size
    copies_per_sample = _copies_per_sample(n_slots, size)
    # Each copy takes the next slots, because bytes that were just copied are still in a
    # cache. After the last slot of the source the first one is next.
    source_slots = itertools.cycle(range(n_slots))
    # The copies of a sample: where each goes, and where it comes from.
    pairs: list[tuple[Pool, Pool]] = []

    def choose_next_slots() -> None:
        """Prepare the slots of the next sample, which is no part of its time."""
        pairs.clear()
        for source_slot in itertools.islice(source_slots, copies_per_sample):
            # The target is walked from its last slot to its first, so that nearly all copies
            # have different offsets in the two pools, as gradients have in buckets. Whether
            # that changes the times was not measured.
            target_slot = n_slots - 1 - source_slot
            into = target[target_slot * size : (target_slot + 1) * size]
            out_of = source[source_slot * size : (source_slot + 1) * size]
            pairs.append((into, out_of))

    def copy_all_pairs() -> None:
        for into, out_of in pairs:
            # With pinned memory the host does not wait for a copy, so that the copies of
            # a sample follow one another on the GPU.
            into.copy_(out_of, non_blocking=True)

    # If one of the pools is on the GPU, the GPU does the copy, and its clock is used.
    device = target.device if target.is_cuda else source.device
    seconds = clock.measure_on(device, copy_all_pairs, budget, setup=choose_next_slots)
    return copies_per_sample, seconds / copies_per_sample
