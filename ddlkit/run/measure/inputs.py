"""What a batch of pictures costs before training sees it: reading, decoding, copying.

A cold read finds nothing in the kernel's page cache, which is asked to forget files, and whose reads from the
disk are counted; what lies below the kernel, as a virtual machine's host, may hold them all the same.
"""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ddlkit.core.errors import UserError
from ddlkit.run.clock import Budget, measure, measure_on, sample_rows
from ddlkit.run.nets import drawn
from ddlkit.run.sessions import Tables, Unavailable, all_or_partial
from ddlkit.store.files import scratch

GRAIN = 8.0  # standard deviation of noise drawn on top, of 255: photographs are not smooth
DISTINCT = 8  # pictures that are drawn; files repeat them
BLOCK_BYTES = 512  # the unit in which the kernel counts what it read from disks
QUALITY = 90  # of JPEG
WidthHeight = tuple[int, int]


def pillow() -> Any:
    """Return PIL.Image, which decodes. Raises Unavailable where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise Unavailable("no Pillow, so no JPEG: pip install pillow") from None
    return Image


def stored(directory: Path, shape: WidthHeight, count: int) -> list[Path]:
    """Write ``count`` JPEG files, the same at every call, which lie on the disk afterwards."""
    random, made = np.random.default_rng(0), []
    for small in drawn.draw_pictures(min(count, DISTINCT), seed=0)[0]:
        large = pillow().fromarray(small.transpose(1, 2, 0)).resize(shape)
        grain = GRAIN * random.standard_normal((*shape[::-1], 1), np.float32)
        made.append(pillow().fromarray(np.clip(np.asarray(large) + grain, 0, 255).astype(np.uint8)))
    paths = [directory / f"{at}.jpeg" for at in range(count)]
    for at, path in enumerate(paths):
        with open(path, "wb") as out:
            made[at % len(made)].save(out, "JPEG", quality=QUALITY)
            out.flush()
            os.fsync(out.fileno())  # what the kernel still has to write it cannot drop
    return paths


def prepared(content: bytes, side: int) -> torch.Tensor:
    """Return (3, side, side) numbers of a JPEG's bytes, about 0 with deviation about 1."""
    whole = np.asarray(pillow().open(io.BytesIO(content)).convert("RGB").resize((side, side)))
    return torch.from_numpy(whole.transpose(2, 0, 1).astype(np.float32) / 64 - 2)


def measure_inputs(
    device: str, directory: Path, shape: WidthHeight, batch: int, side: int, budget: Budget
) -> Tables:
    """Return table ``inputs``: seconds of a batch, each part with nothing else going on.

    Quantities are a cold "read", "decode" on one core, and to a GPU "h2d", from pinned memory. Raises Partial
    with the rest where nothing can be cold, UserError for no room in ``directory``.
    """
    try:
        with scratch(directory) as place:
            made = _frames(torch.device(device), stored(place, shape, batch), side, budget)
            return {"inputs": all_or_partial("inputs", made)}
    except OSError as error:
        why = f"cannot store pictures in {directory}: {error.strerror}"
        raise UserError(f"{why}: choose another --out") from None


def _frames(
    device: torch.device, paths: Sequence[Path], side: int, budget: Budget
) -> Iterator[pd.DataFrame]:
    contents = [path.read_bytes() for path in paths]
    n_bytes = sum(map(len, contents))
    labels = {"device": "cpu", "stored": "jpeg", "batch": len(paths), "bytes": n_bytes, "ranks": 1}
    seconds = measure(lambda: [prepared(content, side) for content in contents], budget)
    what: dict[str, Any] = {"quantity": "decode", "how": "one core", "from_disk": 0.0}
    yield sample_rows(labels | what, seconds)
    if device.type == "cuda":
        images = torch.stack([prepared(content, side) for content in contents]).pin_memory()
        seconds = measure_on(device, partial(images.to, device, non_blocking=True), budget)
        what |= {"quantity": "h2d", "how": "pinned", "device": device.type, "stored": "float32"}
        yield sample_rows(labels | what | {"bytes": images.nbytes}, seconds)
    from_disk: list[int] = []

    def read_all() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        for path in paths:
            path.read_bytes()
        blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before
        from_disk.append(blocks * BLOCK_BYTES)

    seconds = measure(read_all, budget, setup=partial(_forget, paths))
    share = np.array(from_disk[-len(seconds) :]) / n_bytes
    if share.min() < 1:
        raise Unavailable(f"no cold reads: {share.min():.0%} of a dropped file came from the disk")
    what = {"quantity": "read", "how": "cold files", "from_disk": share}
    yield sample_rows(labels | what, seconds)


def _forget(paths: Sequence[Path]) -> None:
    """Have the kernel forget files, so that the next read is the disk's. Raises Unavailable on macOS."""
    if not hasattr(os, "posix_fadvise"):
        raise Unavailable("no cold reads: this system cannot drop a file from its page cache")
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
