"""How fast a device multiplies matrices, reads and decodes pictures, and whether it drifts."""

from __future__ import annotations

import io
import itertools
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ddlkit.core.units import MIB
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget, Floats
from ddlkit.measure.layers import compute_on
from ddlkit.measure.session import Tables, Unavailable, all_or_partial
from ddlkit.store.files import scratch
from workbook.record import drawn

CACHE_BYTES = (
    256 * MIB
)  # more than the caches of a device hold: operands in turn come from memory
MOST_SETS = 16
DRIFT_BUDGET = Budget(warmup=3, min_repeats=10, max_repeats=20, max_s=2.0)


def measure_peaks(
    device: str, precisions: Sequence[str], sides: Sequence[int], budget: Budget
) -> pd.DataFrame:
    """Return table ``peaks``: products of square matrices of random numbers, 2 side^3 FLOP each."""
    frames = []
    for precision, side in itertools.product(precisions, sides):
        seconds = product_s(torch.device(device), precision, side, budget)
        labels = {
            "device": device,
            "precision": precision,
            "kernel": "product",
            "side": side,
        }
        frames.append(clock.sample_rows(labels, seconds))
    return pd.concat(frames, ignore_index=True)


def product_s(
    device: torch.device, precision: str, side: int, budget: Budget
) -> Floats:
    """Return (repeats,) seconds of one side x side product: means over sets that leave the caches."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    count = min(MOST_SETS, max(2, -(-CACHE_BYTES // (3 * side * side * kind.itemsize))))
    with compute_on(
        f"{count} x 3 matrices of {side} x {side} on {device}", device, precision
    ):
        shape = (count, 3, side, side)
        sets = [each.unbind() for each in torch.randn(shape, device=device, dtype=kind)]

        def multiply() -> None:
            for left, right, result in sets:
                torch.mm(left, right, out=result)

        return clock.measure_on(device, multiply, budget) / count


def measure_drift(moment: str, device: str, side: int, copy_bytes: int) -> pd.DataFrame:
    """Return table ``drift``: one product in fp32 and one copy in memory, the same at every ``moment``."""
    place = torch.device(device)
    source = torch.randn(copy_bytes // 4, device=place)
    target = torch.empty_like(source)
    work = {
        f"fp32 product {side}": product_s(place, "fp32", side, DRIFT_BUDGET),
        f"copy {copy_bytes} bytes": clock.measure_on(
            place, lambda: target.copy_(source), DRIFT_BUDGET
        ),
    }
    return clock.rows_by("work", work, {"moment": moment, "device": place.type})


# -- a batch of pictures, before training sees it -----------------------------------------------

GRAIN = (
    8.0  # standard deviation of noise drawn on top, of 255: photographs are not smooth
)
DISTINCT = 8  # pictures that are drawn; files repeat them
BLOCK_BYTES = 512  # the unit in which the kernel counts what it read from disks
QUALITY = 90  # of JPEG


def pillow() -> Any:
    """Return PIL.Image, which decodes. Raises Unavailable where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise Unavailable("no Pillow, so no JPEG: pip install pillow") from None
    return Image


def stored(directory: Path, shape: tuple[int, int], count: int) -> list[Path]:
    """Write ``count`` JPEG files, the same at every call, which lie on the disk afterwards."""
    random, made = np.random.default_rng(0), []
    for small in drawn.draw_pictures(min(count, DISTINCT), seed=0)[0]:
        large = pillow().fromarray(small.transpose(1, 2, 0)).resize(shape)
        grain = GRAIN * random.standard_normal((*shape[::-1], 1), np.float32)
        made.append(
            pillow().fromarray(
                np.clip(np.asarray(large) + grain, 0, 255).astype(np.uint8)
            )
        )
    paths = [directory / f"{at}.jpeg" for at in range(count)]
    for at, path in enumerate(paths):
        with open(path, "wb") as out:
            made[at % len(made)].save(out, "JPEG", quality=QUALITY)
            out.flush()
            os.fsync(out.fileno())  # what the kernel still has to write it cannot drop
    return paths


def decoded(content: bytes, side: int) -> torch.Tensor:
    """Return (3, side, side) numbers of a JPEG's bytes, about 0 with deviation about 1."""
    whole = np.asarray(
        pillow().open(io.BytesIO(content)).convert("RGB").resize((side, side))
    )
    return torch.from_numpy(whole.transpose(2, 0, 1).astype(np.float32) / 64 - 2)


def measure_inputs(
    directory: Path, shape: tuple[int, int], batch: int, side: int, budget: Budget
) -> Tables:
    """Return table ``inputs``: seconds of a batch: "decode" on one core, and a cold "read".

    The kernel forgets files, and counts its reads from the disk; a virtual machine's host may hold them.
    """
    with scratch(directory) as place:
        made = _frames(stored(place, shape, batch), side, budget)
        return {"inputs": all_or_partial("inputs", made)}


def _frames(paths: Sequence[Path], side: int, budget: Budget) -> Iterator[pd.DataFrame]:
    contents = [path.read_bytes() for path in paths]
    n_bytes = sum(map(len, contents))
    labels = {
        "device": "cpu",
        "stored": "jpeg",
        "batch": len(paths),
        "bytes": n_bytes,
        "ranks": 1,
    }
    seconds = clock.measure(
        lambda: [decoded(content, side) for content in contents], budget
    )
    what: dict[str, Any] = {"quantity": "decode", "how": "one core", "from_disk": 0.0}
    yield clock.sample_rows(labels | what, seconds)
    if not hasattr(os, "posix_fadvise"):
        raise Unavailable(
            "no cold reads: this system cannot drop a file from its page cache"
        )
    from_disk: list[int] = []

    def forget_all() -> None:
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_all() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        for path in paths:
            path.read_bytes()
        blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before
        from_disk.append(blocks * BLOCK_BYTES)

    seconds = clock.measure(read_all, budget, setup=forget_all)
    share = np.array(from_disk[-len(seconds) :]) / n_bytes
    if share.min() < 1:
        raise Unavailable(
            f"no cold reads: {share.min():.0%} of a dropped file came from the disk"
        )
    what = {"quantity": "read", "how": "cold files", "from_disk": share}
    yield clock.sample_rows(labels | what, seconds)
