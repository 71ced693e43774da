"""How long copies take: between host and GPU, within the GPU, within the host, and from disk."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import torch

from ddlkit.core.units import KIB, MIB, format_bytes
from ddlkit.run.instruments.clock import (
    Action,
    Budget,
    Floats,
    flusher,
    measure,
    measure_on,
    sample_rows,
)
from ddlkit.run.measure.layers import computing
from ddlkit.run.sessions.session import Unavailable, all_or_partial

SIZES = tuple(4 * KIB << power for power in range(0, 19, 2))  # 4 KiB .. 1 GiB
# An image as it is stored, a shard of data, a large one.
DISK_SIZES = (128 * KIB, 4 * MIB, 256 * MIB)

_AT_ONCE_BYTES = 64 * MIB
_MOST_IN_A_ROW = 32
_DROPS, _DROP_PERIOD_S = 20, 0.01
_MEMORY_SHARE = 8  # a pool takes at most that part of the host's free memory

Pool = torch.Tensor  # (bytes,) uint8: copies go from places in one to places in another, in turn


def measure_copies(device: str, sizes: Sequence[int], budget: Budget) -> pd.DataFrame:
    """Table ``copies``: seconds of one copy by kind and size, the mean of several in a row.

    CUDA: h2d_pinned, h2d_pageable, d2h_pinned, d2h_pageable, d2d within the first GPU, p2p to the second;
    by the GPU's own clock, d2d replayed as a graph. CPU: memcpy, with torch's threads. Source and target
    move through pools as large as the largest size, so that small copies find nothing in the caches.

    budget : for each kind and size

    Raises Partial where sizes above an eighth of the host's free memory are left out, or where a later copy
    fails, with those before it; UserError for an unknown device, and where nothing fits.
    """
    most = psutil.virtual_memory().available // _MEMORY_SHARE
    fitting = [size for size in sizes if size <= most]
    large = ", ".join(format_bytes(size) for size in sizes if size > most)
    reason = f"no copies of {large}: an eighth of the host's free memory is {format_bytes(most)}"
    if not fitting:
        raise Unavailable(reason)

    def frames() -> Iterator[pd.DataFrame]:
        pools = _pools(place, max(fitting))
        for (kind, (target, source)), size in itertools.product(pools.items(), fitting):
            count, seconds = _copy_s(kind, target, source, size, place, budget)
            labels = {"copy": kind, "device": place.type, "bytes": size, "copies_per_sample": count}
            yield sample_rows(labels, seconds)
        if large:
            raise Unavailable(reason)

    with computing(f"pools of {format_bytes(max(fitting))} to copy between", device) as place:
        return all_or_partial("copies", frames())


def _random(n_bytes: int, *, pinned: bool = False) -> Pool:
    words = torch.empty(-(-n_bytes // 8), dtype=torch.int64, pin_memory=pinned)
    return words.random_().view(torch.uint8)


def _pools(device: torch.device, n_bytes: int) -> dict[str, tuple[Pool, Pool]]:
    """Kind of copy -> (target, source)."""
    if device.type == "cpu":
        return {"memcpy": (_random(n_bytes), _random(n_bytes))}
    pageable, pinned = _random(n_bytes), _random(n_bytes, pinned=True)
    here, there = pinned.to(device), pageable.to(device)
    pools = {
        "h2d_pinned": (here, pinned),
        "h2d_pageable": (here, pageable),
        "d2h_pinned": (pinned, there),
        "d2h_pageable": (pageable, there),
        "d2d": (here, there),
    }
    if torch.cuda.device_count() > 1:
        pools["p2p"] = (there.to(torch.device("cuda", 1)), here)
    return pools


def _copy_s(
    kind: str, target: Pool, source: Pool, size: int, device: torch.device, budget: Budget
) -> tuple[int, Floats]:
    """How many copies in a row make a sample, and (repeats,) seconds of one."""
    slots = source.numel() // size
    copies_per_sample = min(slots, _MOST_IN_A_ROW, max(1, _AT_ONCE_BYTES // size))
    place = itertools.cycle(range(slots))
    pairs: list[tuple[Pool, Pool]] = []

    def move_on() -> None:
        places = [next(place) for _ in range(copies_per_sample)]
        # A target elsewhere than its source: the two pools are walked in opposite directions.
        pairs[:] = [
            (target[(slots - 1 - at) * size :][:size], source[at * size :][:size]) for at in places
        ]

    def copy() -> None:
        for into, out_of in pairs:
            into.copy_(out_of, non_blocking=True)

    move_on()
    if kind == "d2d":
        # Within the GPU a small copy takes less time than issuing it: a graph issues all at once.
        # Its places are fixed, so something else must be in the cache before each replay.
        graph = torch.cuda.CUDAGraph()
        copy()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            copy()
        seconds = measure_on(device, graph.replay, budget, setup=flusher(device))
    else:
        seconds = measure_on(device, copy, budget, setup=move_on)
    return copies_per_sample, seconds / copies_per_sample


# -- disk --------------------------------------------------------------------------------------


def measure_disk(directory: Path, sizes: Sequence[int], budget: Budget) -> pd.DataFrame:
    """Table ``copies`` of disk_cached and disk_cold: reading a whole file's beginning in ``directory``.

    Cold: before every sample the kernel is asked to drop the file from its page cache, and is asked
    whether it did. What lies below the kernel (a controller, a virtual machine's host) may still hold
    it. The file has no name: it is gone however this process ends.

    Raises Partial with the times before where the page cache cannot be emptied (macOS, tmpfs), and
    OSError when the disk is full.
    """
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        rest = memoryview(np.random.default_rng(0).bytes(max(sizes)))
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
        buffer = memoryview(bytearray(max(sizes)))
        labels = {"device": "disk", "copies_per_sample": 1}
        frames = (
            sample_rows(
                labels | {"copy": kind, "bytes": size},
                _read_s(file, buffer[:size], budget, setup),
            )
            for kind, setup in (("disk_cached", None), ("disk_cold", lambda: evict(file)))
            for size in sizes
        )
        return all_or_partial("copies", frames)


def _read_s(file: FileIO, into: memoryview, budget: Budget, setup: Action | None) -> Floats:
    """Seconds of reading a file's beginning."""

    def read() -> None:
        at = 0
        file.seek(0)
        while at < len(into):
            at += file.readinto(into[at:]) or 0

    return measure(read, budget, setup=setup)


def evict(file: FileIO) -> None:
    """Drop a file from the page cache. Raises Unavailable where that fails or nobody knows."""
    if not hasattr(os, "posix_fadvise"):
        raise Unavailable("no cold reads: this system cannot drop a file from its page cache")
    for _ in range(_DROPS):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        share = resident_share(file)
        if share == 0:
            return
        time.sleep(_DROP_PERIOD_S)  # what is being read ahead cannot be dropped until it is there
    raise Unavailable(f"no cold reads: {100 * share:.0f}% of a dropped file stayed in memory")


def resident_share(file: FileIO) -> float:
    """Which part of a file's pages lies in the page cache, 0 to 1 (mincore)."""
    size = os.fstat(file.fileno()).st_size
    with mmap.mmap(file.fileno(), size) as pages:
        first = ctypes.c_char.from_buffer(pages)
        flags = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), flags)
        del first  # a mapping that is looked at cannot be closed
        if failed:
            raise Unavailable("no cold reads: the kernel does not say what it holds in memory")
    return float(np.mean(np.frombuffer(bytes(flags), dtype=np.uint8) & 1))
