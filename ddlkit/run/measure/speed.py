"""How fast a device multiplies matrices and copies bytes, and whether it drifts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pandas as pd
import psutil
import torch
from torch import Tensor

from ddlkit.core.units import KIB, MIB, format_bytes
from ddlkit.run.clock import Action, Budget, Floats, flusher, measure_on, rows_by, sample_rows
from ddlkit.run.measure.layers import compute_on
from ddlkit.run.sessions import Unavailable, all_or_partial

SIZES = tuple(4 * KIB << power for power in range(0, 19, 2))  # 4 KiB .. 1 GiB
CACHE_BYTES = 256 * MIB  # more than the caches of a device hold: operands in turn come from memory
MOST_SETS = 16
DRIFT_BUDGET = Budget(warmup=3, min_repeats=10, max_repeats=20, max_s=2.0)
_AT_ONCE_BYTES, _MOST_IN_A_ROW = 64 * MIB, 32
_MEMORY_SHARE = 8  # a pool takes at most that part of the host's free memory

Pool = Tensor  # (bytes,) uint8: copies go from places in one to places in another, in turn


def measure_peaks(
    device: str, precisions: Sequence[str], sides: Sequence[int], budget: Budget
) -> pd.DataFrame:
    """Return table ``peaks``: products of square matrices of random numbers, 2 side^3 FLOP each.

    Each sample is the mean over several sets of matrices in a row, so that the operands have left the caches.
    """
    frames = []
    for precision, side in itertools.product(precisions, sides):
        seconds = product_s(torch.device(device), precision, side, budget)
        labels = {"device": device, "precision": precision, "kernel": "product", "side": side}
        frames.append(sample_rows(labels, seconds))
    return pd.concat(frames, ignore_index=True)


def product_s(device: torch.device, precision: str, side: int, budget: Budget) -> Floats:
    """Return (repeats,) seconds of one product of two side x side matrices."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    count = min(MOST_SETS, max(2, -(-CACHE_BYTES // (3 * side * side * kind.itemsize))))
    with compute_on(f"{count} x 3 matrices of {side} x {side} on {device}", device, precision):
        shape = (count, 3, side, side)
        sets = [each.unbind() for each in torch.randn(shape, device=device, dtype=kind)]

        def multiply() -> None:
            for left, right, result in sets:
                torch.mm(left, right, out=result)

        return measure_on(device, multiply, budget) / count


def measure_drift(moment: str, device: str, side: int, copy_bytes: int) -> pd.DataFrame:
    """Return table ``drift``: one product in fp32 and one copy in memory, the same at every ``moment``."""
    place = torch.device(device)
    source = torch.randn(copy_bytes // 4, device=place)
    target = torch.empty_like(source)
    work = {
        f"fp32 product {side}": product_s(place, "fp32", side, DRIFT_BUDGET),
        f"copy {copy_bytes} bytes": measure_on(place, lambda: target.copy_(source), DRIFT_BUDGET),
    }
    return rows_by("work", work, {"moment": moment, "device": place.type})


def measure_copies(device: str, sizes: Sequence[int], budget: Budget) -> pd.DataFrame:
    """Return table ``copies``: seconds of one copy by kind and size, the mean of several in a row.

    Source and target move through pools as large as the largest size, past all caches. Raises Partial without
    sizes above an eighth of the host's free memory, or what fails later; UserError where nothing fits.
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
            count, seconds = _copy_s(kind, target, source, size, budget)
            labels = {"copy": kind, "device": place.type, "bytes": size, "copies_per_sample": count}
            yield sample_rows(labels, seconds)
        if large:
            raise Unavailable(reason)

    with compute_on(f"pools of {format_bytes(max(fitting))} to copy between", device) as place:
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


def _copy_s(kind: str, target: Pool, source: Pool, size: int, budget: Budget) -> tuple[int, Floats]:
    """Return how many copies in a row make a sample, and (repeats,) seconds of one."""
    slots = source.numel() // size
    copies_per_sample = min(slots, _MOST_IN_A_ROW, max(1, _AT_ONCE_BYTES // size))
    place = itertools.cycle(range(slots))
    pairs: list[tuple[Pool, Pool]] = []
    device = (target if target.is_cuda else source).device

    def move_on() -> None:
        pairs.clear()
        for at in itertools.islice(place, copies_per_sample):
            # A target elsewhere than its source: the two pools are walked in opposite directions.
            into = target[(slots - 1 - at) * size :][:size]
            pairs.append((into, source[at * size :][:size]))

    def copy() -> None:
        for into, out_of in pairs:
            into.copy_(out_of, non_blocking=True)

    move_on()
    action: Action = copy
    setup: Action = move_on
    if kind == "d2d":
        # Within the GPU a small copy takes less time than issuing it: a graph issues all at once.
        # Its places are fixed, so something else must be in the cache before each replay.
        graph = torch.cuda.CUDAGraph()
        copy()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            copy()
        action, setup = graph.replay, flusher(device)
    seconds = measure_on(device, action, budget, setup=setup)
    return copies_per_sample, seconds / copies_per_sample
