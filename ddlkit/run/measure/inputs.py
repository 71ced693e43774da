"""What a batch of pictures costs before training sees it: reading, decoding, copying.

Pictures are drawn, and stored as JPEG. A cold read finds nothing in the kernel's page cache, which is asked
to forget them and whose reads from the disk are counted; what lies below the kernel, as a virtual machine's
host, may hold the file all the same.
"""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.run.instruments.clock import Budget, Floats, measure, measure_on, sample_rows
from ddlkit.run.nets import pictures
from ddlkit.run.sessions import Tables, Unavailable, all_or_partial
from ddlkit.store.files import scratch

GRAIN = 8.0  # standard deviation of noise drawn on top, of 255: photographs are not smooth
DISTINCT = 8  # pictures that are drawn; files repeat them
BLOCK_BYTES = 512  # the unit in which the kernel counts what it read from disks


@dataclass(frozen=True)
class Shape:
    """Pictures as they are stored: width x height, three bytes a pixel, a JPEG's quality.

    Raises UserError for sizes that are none, and a quality that Pillow does not know.
    """

    width: int = 500
    height: int = 375
    quality: int = 90

    def __post_init__(self) -> None:
        if min(self.width, self.height) < 1 or not 1 <= self.quality <= 95:
            raise UserError(
                f"pictures of {self.width} x {self.height} at quality {self.quality}: use sides of at least "
                "1 and a quality from 1 to 95"
            )


@dataclass(frozen=True)
class Alone:
    """What is measured: pictures of ``shape``, ``batch`` at a time, for inputs of ``side`` pixels a side.

    Raises UserError for a batch or a side below 1, and as `Shape`.
    """

    shape: Shape = Shape()
    batch: int = 32
    side: int = 224

    def __post_init__(self) -> None:
        if self.batch < 1 or self.side < 1:
            raise UserError(
                f"batches of {self.batch} pictures of side {self.side}: both must be at least 1"
            )


def pillow() -> Any:
    """Return PIL.Image, which decodes. Raises Unavailable where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise Unavailable("no Pillow, so no JPEG: pip install pillow") from None
    return Image


def drawn(shape: Shape, count: int) -> list[NDArray[np.uint8]]:
    """Return up to DISTINCT pictures, (height, width, 3) bytes each, the same at every call."""
    image, random = pillow(), np.random.default_rng(0)
    made = []
    for small in pictures.draw(min(count, DISTINCT), seed=0).images:
        large = image.fromarray(small.transpose(1, 2, 0)).resize((shape.width, shape.height))
        grain = GRAIN * random.standard_normal((shape.height, shape.width, 1), np.float32)
        made.append(np.clip(np.asarray(large) + grain, 0, 255).astype(np.uint8))
    return made


def stored(directory: Path, shape: Shape, count: int) -> list[Path]:
    """Write ``count`` JPEG files, which lie on the disk afterwards; returns their paths.

    Raises UserError where they cannot be written.
    """
    made = [pillow().fromarray(picture) for picture in drawn(shape, count)]
    paths = [directory / f"{at}.jpeg" for at in range(count)]
    try:
        for at, path in enumerate(paths):
            with open(path, "wb") as out:
                made[at % len(made)].save(out, "JPEG", quality=shape.quality)
                out.flush()
                os.fsync(out.fileno())  # what the kernel still has to write it cannot drop
    except OSError as error:
        raise UserError(
            f"cannot store pictures in {directory}: {error.strerror}: choose another --out"
        ) from None
    return paths


def prepared(content: bytes, side: int) -> torch.Tensor:
    """Return (3, side, side) numbers of a JPEG's bytes, about 0 with deviation about 1."""
    opened = pillow().open(io.BytesIO(content)).convert("RGB")
    whole = np.asarray(opened.resize((side, side)))
    return torch.from_numpy(whole.transpose(2, 0, 1).astype(np.float32) / 64 - 2)


def measure_inputs(device: str, directory: Path, asked: Alone, budget: Budget) -> Tables:
    """Return table ``inputs``: seconds of a batch, one row a sample, each part with nothing else going on.

    read : of a file a picture, cold; decode : from JPEG in memory to what a network takes, on one core
    h2d : to the GPU, where ``device`` is one, from pinned memory

    Raises Partial with the rest where nothing can be cold, UserError for no room in ``directory``.
    """
    with scratch(directory) as place:
        made = _frames(torch.device(device), place, asked, budget)
        return {"inputs": all_or_partial("inputs", made)}


def _frames(
    device: torch.device, place: Path, asked: Alone, budget: Budget
) -> Iterator[pd.DataFrame]:
    paths = stored(place, asked.shape, asked.batch)
    contents = [path.read_bytes() for path in paths]
    n_bytes = sum(map(len, contents))
    rows = partial(input_rows, batch=asked.batch, stored="jpeg", n_bytes=n_bytes)
    decoding = measure(lambda: [prepared(content, asked.side) for content in contents], budget)
    yield rows("decode", "one core", decoding)
    if device.type == "cuda":
        images = torch.stack([prepared(content, asked.side) for content in contents]).pin_memory()
        seconds = measure_on(device, partial(images.to, device, non_blocking=True), budget)
        labels: dict[str, Any] = {"stored": "float32", "n_bytes": images.nbytes}
        yield rows("h2d", "pinned", seconds, device=device.type, **labels)
    from_disk: list[float] = []
    read = partial(_read_all, paths, from_disk)
    seconds = measure(read, budget, setup=partial(_forget, paths))
    share = np.array(from_disk[-len(seconds) :]) / n_bytes
    if share.min() < 1:
        raise Unavailable(f"no cold reads: {share.min():.0%} of a dropped file came from the disk")
    yield rows("read", "cold files", seconds, from_disk=share)


def input_rows(
    quantity: str,
    how: str,
    seconds: Floats,
    *,
    batch: int,
    stored: str,
    n_bytes: int,
    device: str = "cpu",
    from_disk: Floats | float = 0.0,
) -> pd.DataFrame:
    """Return rows of table ``inputs``: (n,) seconds of a batch, and the share of it from the disk."""
    labels = {"quantity": quantity, "how": how, "device": device, "stored": stored, "batch": batch}
    return sample_rows({**labels, "bytes": n_bytes, "ranks": 1, "from_disk": from_disk}, seconds)


def _forget(paths: Sequence[Path]) -> None:
    """Have the kernel forget files, so that the next read is the disk's. Raises Unavailable on macOS."""
    if not hasattr(os, "posix_fadvise"):
        raise Unavailable("no cold reads: this system cannot drop a file from its page cache")
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(paths: Sequence[Path], from_disk: list[float]) -> None:
    """Read files, and note how many bytes of them came from the disk."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    for path in paths:
        path.read_bytes()
    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before
    from_disk.append(float(blocks * BLOCK_BYTES))
