"""How long a device takes to copy bytes, by kind of copy and by size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

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
_AT_ONCE_BYTES = 64 * MIB
_MOST_IN_A_ROW = 32
_MEMORY_SHARE = 8  # a pool takes at most that part of the host's free memory

Pool = Tensor
"""(bytes,) uint8: copies go from places in one pool to places in another, in turn."""


def measure_copies(device: str, sizes: Sequence[int], budget: Budget) -> pd.DataFrame:
    """Return table ``copies``: seconds of one copy by kind and size, of several in a row, past all caches."""
    most = psutil.virtual_memory().available // _MEMORY_SHARE
    fitting = [size for size in sizes if size <= most]
    large = ", ".join(format_bytes(size) for size in sizes if size > most)
    reason = f"no copies of {large}: an eighth of the host's free memory is {format_bytes(most)}"
    if not fitting:
        raise Unavailable(reason)

    def frames() -> Iterator[pd.DataFrame]:
        pools = _pools(place, max(fitting))
        for (kind, (target, source)), size in itertools.product(pools.items(), fitting):
            count, seconds = _copy_s(target, source, size, budget)
            labels = {
                "copy": kind,
                "device": place.type,
                "bytes": size,
                "copies_per_sample": count,
            }
            yield clock.sample_rows(labels, seconds)
        if large:
            raise Unavailable(reason)

    with compute_on(
        f"pools of {format_bytes(max(fitting))} to copy between", device
    ) as place:
        return all_or_partial("copies", frames())


def _pools(device: torch.device, n_bytes: int) -> dict[str, tuple[Pool, Pool]]:
    """Return kind of copy -> (target, source) of random bytes."""

    def random(*, pinned: bool = False) -> Pool:
        words = torch.empty(-(-n_bytes // 8), dtype=torch.int64, pin_memory=pinned)
        return words.random_().view(torch.uint8)

    if device.type == "cpu":
        return {"memcpy": (random(), random())}
    pageable, pinned = random(), random(pinned=True)
    near, far = pinned.to(device), pageable.to(device)
    return {
        "h2d_pinned": (near, pinned),
        "h2d_pageable": (near, pageable),
        "d2h_pinned": (pinned, far),
        "d2h_pageable": (pageable, far),
        "d2d": (near, far),
    }


def _copy_s(
    target: Pool, source: Pool, size: int, budget: Budget
) -> tuple[int, Floats]:
    """Return how many copies in a row make a sample, and (repeats,) seconds of one."""
    slots = source.numel() // size
    copies_per_sample = min(slots, _MOST_IN_A_ROW, max(1, _AT_ONCE_BYTES // size))
    place = itertools.cycle(range(slots))
    pairs: list[tuple[Pool, Pool]] = []

    def move_on() -> None:
        pairs.clear()
        for at in itertools.islice(place, copies_per_sample):
            # A target elsewhere than its source: the two pools are walked in opposite directions.
            into = target[(slots - 1 - at) * size :][:size]
            pairs.append((into, source[at * size :][:size]))

    def copy() -> None:
        for into, out_of in pairs:
            into.copy_(out_of, non_blocking=True)

    device = (target if target.is_cuda else source).device
    seconds = clock.measure_on(device, copy, budget, setup=move_on)
    return copies_per_sample, seconds / copies_per_sample
