"""How fast a device multiplies matrices, reads and decodes pictures, and whether it drifts."""

from __future__ import annotations

import io
import itertools
import math
import os
import resource
from collections.abc import Iterator, Sequence
from functools import partial
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

CACHE_BYTES = 256 * MIB
"""More than the caches of a device hold, so that operands in turn come from memory."""
MOST_SETS = 16
DRIFT_BUDGET = Budget(warmup=3, min_repeats=10, max_repeats=20, max_s=2.0)


def measure_peaks(
    device: str, precisions: Sequence[str], sides: Sequence[int], budget: Budget
) -> pd.DataFrame:
    """Return table ``peaks`` with times of products of square matrices of random numbers.

    A product has 2 side^3 FLOPs. Every precision ("fp32", "tf32" or "bf16") is measured at every
    side, each for the time of the budget.
    """
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
    """Return the seconds of one product of square matrices, shape (repeats,).

    A sample is the mean over several sets of matrices. If the side is large, the sets together
    exceed the caches, so that the matrices come from memory.

    Parameters
    ----------
    device : torch.device
        The device.
    precision : str
        "fp32", "tf32" or "bf16".
    side : int
        The number of rows and columns of the matrices.
    budget : Budget
        How long to measure.
    """
    # tf32 is a way of computing with numbers of fp32, which `compute_on` switches on.
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # Two matrices and their product.
    set_bytes = 3 * side * side * dtype.itemsize
    # As many sets as exceed the caches. At least two, so that no product has the operands of the
    # product before it. At most `MOST_SETS`, so that small matrices all stay in the caches.
    n_sets = min(MOST_SETS, max(2, math.ceil(CACHE_BYTES / set_bytes)))
    what = f"{n_sets} x 3 matrices of {side} x {side} on {device}"
    with compute_on(what, device, precision):
        # The second axis has the left and the right matrix of a set, and their product.
        numbers = torch.randn((n_sets, 3, side, side), device=device, dtype=dtype)
        sets = [matrices.unbind() for matrices in numbers]

        def multiply() -> None:
            for left, right, result in sets:
                torch.mm(left, right, out=result)

        return clock.measure_on(device, multiply, budget) / n_sets


def measure_drift(moment: str, device: str, side: int, copy_bytes: int) -> pd.DataFrame:
    """Return table ``drift``: times of a product in fp32 and of a copy in memory.

    The same work is timed at the start and at the end of a session, to show whether the machine
    changes its speed.

    Parameters
    ----------
    moment : str
        "start" or "end" of the session, which becomes a column of the table.
    device : str
        "cpu" or "cuda".
    side : int
        The number of rows and columns of the matrices.
    copy_bytes : int
        The bytes that are copied from one tensor to another.
    """
    torch_device = torch.device(device)
    # A number of float32 has 4 bytes.
    source = torch.randn(copy_bytes // 4, device=torch_device)
    target = torch.empty_like(source)
    product_seconds = product_s(torch_device, "fp32", side, DRIFT_BUDGET)
    copy_seconds = clock.measure_on(
        torch_device, lambda: target.copy_(source), DRIFT_BUDGET
    )
    seconds_by_work = {
        f"fp32 product {side}": product_seconds,
        f"copy {copy_bytes} bytes": copy_seconds,
    }
    labels = {"moment": moment, "device": torch_device.type}
    return clock.rows_by("work", seconds_by_work, labels)


# -- a batch of pictures, before training sees it --------------------------------------

GRAIN = 8.0
"""The standard deviation of noise, of 255, that is drawn on pictures, as photographs are not smooth."""
DISTINCT = 8
"""How many pictures are drawn. Files repeat them."""
BLOCK_BYTES = 512
"""The unit in which the kernel counts what it has read from disks."""
QUALITY = 90
"""The quality of JPEG files."""


def pillow() -> Any:
    """Return module PIL.Image, which decodes pictures.

    It is imported when a picture is needed, because a node that measures a GPU need not have it.
    """
    from PIL import Image

    return Image


def stored(directory: Path, shape: tuple[int, int], count: int) -> list[Path]:
    """Write JPEG files onto the disk and return their paths.

    The same arguments give the same files.

    Parameters
    ----------
    directory : Path
        The directory of the files.
    shape : (int, int)
        The width and height of the pictures.
    count : int
        The number of files.
    """
    # Files may repeat a few pictures, because each file is read and decoded by itself.
    pictures = _grainy_pictures(shape, min(count, DISTINCT))
    paths = [directory / f"{number}.jpeg" for number in range(count)]
    for number, path in enumerate(paths):
        with open(path, "wb") as file:
            pictures[number % len(pictures)].save(file, "JPEG", quality=QUALITY)
            file.flush()
            # Writes the file to the disk. Only then can the operating system drop it from its page
            # cache, as `_forget` asks.
            os.fsync(file.fileno())
    return paths


def _grainy_pictures(shape: tuple[int, int], count: int) -> list[Any]:
    """Return different images of Pillow with noise, because photographs are not smooth either.

    ``shape`` is their width and height. The noise makes the JPEG files about twice as large.
    """
    width, height = shape
    random = np.random.default_rng(0)
    small_pictures, _ = drawn.draw_pictures(count, seed=0)
    pictures = []
    for small in small_pictures:
        # The drawn picture has shape (colours, height, width), and Pillow takes (height, width,
        # colours).
        large = pillow().fromarray(small.transpose(1, 2, 0)).resize(shape)
        # The noise is the same for all colours of a pixel.
        grain = GRAIN * random.standard_normal((height, width, 1), np.float32)
        grainy = np.clip(np.asarray(large) + grain, 0, 255)
        pictures.append(pillow().fromarray(grainy.astype(np.uint8)))
    return pictures


def decoded(content: bytes, side: int) -> torch.Tensor:
    """Return the picture in the content of a JPEG file, shape (3, side, side).

    The numbers have a mean of about 0 and a deviation of about 1.
    """
    picture = pillow().open(io.BytesIO(content)).convert("RGB").resize((side, side))
    numbers = np.asarray(picture).transpose(2, 0, 1).astype(np.float32)
    # Bytes from 0 to 255 become numbers from -2 to about 2.
    return torch.from_numpy(numbers / 64 - 2)


def measure_inputs(
    directory: Path, shape: tuple[int, int], batch: int, side: int, budget: Budget
) -> Tables:
    """Return table ``inputs`` with the seconds in which a batch of pictures is decoded, and read.

    One core decodes. Before a batch is read, the operating system drops its files from memory, and
    it counts what it reads from the disk. The host of a virtual machine may nevertheless hold the
    files in memory.

    Parameters
    ----------
    directory : Path
        A directory on the disk.
    shape : (int, int)
        The width and height of the pictures in the files.
    batch : int
        The pictures of a batch.
    side : int
        The side to which decoded pictures are resized, in pixels.
    budget : Budget
        How long to measure decoding, and again reading.

    Returns
    -------
    dict of DataFrame
        The table by its schema.
    """
    # The files are removed at the end.
    with scratch(directory) as folder:
        frames = _input_frames(stored(folder, shape, batch), side, budget)
        return {"inputs": all_or_partial("inputs", frames)}


def _input_frames(
    paths: Sequence[Path], side: int, budget: Budget
) -> Iterator[pd.DataFrame]:
    """Yield the rows of decoding files, then those of reading them from the disk.

    Raises Unavailable if files cannot be read from the disk.

    Parameters
    ----------
    paths : sequence of Path
        The JPEG files of one batch.
    side : int
        The side to which decoded pictures are resized, in pixels.
    budget : Budget
        How long to measure decoding, and again reading.
    """
    contents = [path.read_bytes() for path in paths]
    n_bytes = sum(map(len, contents))
    labels: dict[str, Any] = {
        "device": "cpu",
        "stored": "jpeg",
        "batch": len(paths),
        "bytes": n_bytes,
        "ranks": 1,
    }

    def decode_all() -> None:
        for content in contents:
            decoded(content, side)

    decode_s = clock.measure(decode_all, budget)
    # Decoding takes the contents from memory, so that nothing comes from the disk.
    decoding = {"quantity": "decode", "how": "one core", "from_disk": 0.0}
    yield clock.sample_rows({**labels, **decoding}, decode_s)

    read_s, disk_bytes = _cold_reads(paths, budget)
    # By sample, the share of the files' bytes that came from the disk.
    from_disk = disk_bytes / n_bytes
    # The operating system reads whole blocks. A share below 1 therefore means that some of the
    # files came from its page cache.
    if from_disk.min() < 1:
        raise Unavailable(
            f"no cold reads: {from_disk.min():.0%} of a dropped file came from the disk"
        )
    reading = {"quantity": "read", "how": "cold files", "from_disk": from_disk}
    yield clock.sample_rows({**labels, **reading}, read_s)


def _cold_reads(paths: Sequence[Path], budget: Budget) -> tuple[Floats, Floats]:
    """Time the reading of files that the operating system has dropped from its page cache.

    Raises Unavailable if the system cannot drop a file.

    Returns
    -------
    seconds : ndarray, shape (samples,)
        The seconds in which all files were read.
    disk_bytes : ndarray, shape (samples,)
        The bytes that came from the disk.
    """
    if not hasattr(os, "posix_fadvise"):
        raise Unavailable(
            "no cold reads: this system cannot drop a file from its page cache"
        )
    disk_bytes: list[float] = []

    def read_all() -> None:
        # The operating system counts the blocks that it reads from disks, and not those that it
        # takes from its page cache.
        blocks_before = _blocks_read()
        for path in paths:
            path.read_bytes()
        disk_bytes.append((_blocks_read() - blocks_before) * BLOCK_BYTES)

    # Before each sample the files are dropped. The time of this does not count.
    seconds = clock.measure(read_all, budget, setup=partial(_forget, paths))
    # Reads of the warm-up come first, and are no samples.
    return seconds, np.array(disk_bytes[-len(seconds) :])


def _forget(paths: Sequence[Path]) -> None:
    """Have the operating system drop these files from its page cache."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            # From the first byte on. A length of 0 stands for all bytes to the end.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _blocks_read() -> int:
    """Return how many blocks of `BLOCK_BYTES` were read from disks for this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock
