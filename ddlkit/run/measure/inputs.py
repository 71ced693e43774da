"""What a batch of pictures costs before training sees it: reading, decoding, copying.

Pictures are drawn, and stored as files in two forms: as JPEG, and as the numbers that a JPEG decodes to (what
frameworks call pre-converted). A cold read finds nothing in the kernel's page cache, which is asked (mincore)
and whose reads from the disk are counted; what lies below the kernel, as a virtual machine's host, may hold
the file all the same.
"""

from __future__ import annotations

import io
import itertools
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
from torch.utils.data import DataLoader, Dataset

from ddlkit.core.errors import UserError
from ddlkit.run.instruments.clock import Budget, Floats, measure, measure_on, sample_rows
from ddlkit.run.measure.copies import evict
from ddlkit.run.nets import pictures
from ddlkit.run.sessions.session import Tables, Unavailable, all_or_partial
from ddlkit.store.files import scratch

STORED = ("jpeg", "raw")
"""How pictures lie on the disk: compressed, or as the bytes that a JPEG decodes to."""
GRAIN = (
    8.0  # standard deviation of the noise that is drawn on top, of 255: photographs are not smooth
)
DISTINCT = 8  # pictures that are drawn; files repeat them
BLOCK_BYTES = 512  # the unit in which the kernel counts what it read from disks
AHEAD = 2  # batches that a loader's worker prepares ahead, torch's own default


@dataclass(frozen=True)
class Shape:
    """Of pictures as they are stored: width x height, three bytes a pixel, a JPEG's quality.

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


def pillow() -> Any:
    """PIL.Image, which decodes. Raises Unavailable where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise Unavailable("no Pillow, so no JPEG: pip install pillow") from None
    return Image


def drawn(shape: Shape, count: int) -> list[NDArray[np.uint8]]:
    """``count`` pictures, (height, width, 3) bytes each, the same at every call; DISTINCT of them differ."""
    image, random = pillow(), np.random.default_rng(0)
    made = []
    for small in pictures.draw(min(count, DISTINCT), seed=0).images:
        large = image.fromarray(small.transpose(1, 2, 0)).resize((shape.width, shape.height))
        grain = GRAIN * random.standard_normal((shape.height, shape.width, 1), np.float32)
        made.append(np.clip(np.asarray(large) + grain, 0, 255).astype(np.uint8))
    return [made[at % len(made)] for at in range(count)]


def encoded(picture: NDArray[np.uint8], stored: str, quality: int) -> bytes:
    """A picture (height, width, 3) as the bytes of its file."""
    if stored == "raw":
        return picture.tobytes()
    file = io.BytesIO()
    pillow().fromarray(picture).save(file, "JPEG", quality=quality)
    return file.getvalue()


def write(path: Path, content: bytes) -> None:
    """A file that lies on the disk: what the kernel still has to write it cannot drop."""
    with open(path, "wb", buffering=0) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def read(path: Path, cold: bool) -> bytes:
    """A file's bytes; ``cold``: the kernel is asked to forget them, so that the next read is the disk's."""
    with open(path, "rb", buffering=0) as file:
        content = file.readall()
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return content


def disk_bytes() -> int:
    """What this process has had the kernel read from disks so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * BLOCK_BYTES


def can_be_cold() -> bool:
    """Whether this system can be asked to forget a file."""
    return hasattr(os, "posix_fadvise")


class Stored(Dataset[Any]):
    """Pictures in files of a directory, as training takes them: (channels, side, side) and bytes from disk.

    JPEG is decoded and shrunk; what is stored raw is cropped in its middle: no more is to be done with it.
    """

    def __init__(
        self,
        directory: Path,
        stored: str,
        shape: Shape,
        side: int,
        count: int,
        cold: bool,
        channels: int = 3,
    ) -> None:
        self.stored, self.shape, self.side, self.cold = stored, shape, side, cold
        self.channels = channels
        if stored not in STORED:
            raise UserError(f"pictures stored as {stored!r}: use one of {', '.join(STORED)}")
        if stored == "raw" and side > min(shape.width, shape.height):
            raise UserError(
                f"pictures of {shape.width} x {shape.height}: too small to crop {side} x {side} of: "
                "store larger ones"
            )
        self.paths = [directory / f"{at}.{stored}" for at in range(count)]
        contents = [
            encoded(one, stored, shape.quality) for one in drawn(shape, min(count, DISTINCT))
        ]
        try:
            for path, content in zip(self.paths, itertools.cycle(contents)):
                write(path, content)
                read(path, cold)  # once: what was written is forgotten
        except OSError as error:
            raise UserError(
                f"cannot store pictures in {directory}: {error.strerror}: choose another --out"
            ) from None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        before = disk_bytes()
        content = read(self.paths[at], self.cold)
        return self.prepared(content), disk_bytes() - before

    def prepared(self, content: bytes) -> torch.Tensor:
        """(channels, side, side) of a file's bytes, about 0 with deviation about 1."""
        if self.stored == "jpeg":
            opened = pillow().open(io.BytesIO(content)).convert("RGB")
            whole = np.asarray(opened.resize((self.side, self.side)))
        else:
            held = np.frombuffer(content, np.uint8).reshape(self.shape.height, self.shape.width, 3)
            top, left = ((n - self.side) // 2 for n in held.shape[:2])
            whole = held[top : top + self.side, left : left + self.side]
        channels = whole.transpose(2, 0, 1)[: self.channels]
        return torch.from_numpy(channels.astype(np.float32) / 64 - 2)

    def batch_bytes(self, batch: int) -> int:
        """Of the files of a batch, on average."""
        return round(batch * float(np.mean([path.stat().st_size for path in self.paths])))


def batches(count: int, batch: int, wanted: int) -> list[list[int]]:
    """``wanted`` lists of ``batch`` places among ``count``, in chance order, each before any comes again."""
    random = np.random.default_rng(0)
    rounds = -(-wanted * batch // count)
    order = np.concatenate([random.permutation(count) for _ in range(rounds)])
    return order[: wanted * batch].reshape(wanted, batch).tolist()


def loader(
    data: Stored,
    batch: int,
    wanted: int,
    workers: int,
    *,
    pin: bool = False,
    core: int | None = None,
) -> DataLoader[Any]:
    """torch's own DataLoader of ``wanted`` batches, each worker AHEAD batches ahead; without one, none are.

    core : on which each worker runs
    """
    ahead: dict[str, Any] = {"prefetch_factor": AHEAD} if workers else {}
    return DataLoader(
        data,
        batch_sampler=batches(len(data), batch, wanted),
        num_workers=workers,
        pin_memory=pin,
        worker_init_fn=partial(_begin, core),
        **ahead,
    )


def _begin(core: int | None, _: int) -> None:
    """A worker's first act."""
    torch.set_num_threads(1)
    pin_to(core)


def pin_to(core: int | None) -> None:
    """Keep this thread, and what it starts from now on, on one core, where the system can."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


# -- each alone --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone:
    """Parts of the input measured alone: pictures of ``shape``, ``batch`` at a time, for inputs of ``side``.

    Raises UserError for a batch below 1, and as `Shape`.
    """

    shape: Shape = Shape()
    batch: int = 32
    side: int = 224

    def __post_init__(self) -> None:
        if self.batch < 1 or self.side < 1:
            raise UserError(
                f"batches of {self.batch} pictures of side {self.side}: both must be at least 1"
            )


def measure_inputs(device: str, directory: Path, asked: Alone, budget: Budget) -> Tables:
    """Table ``inputs``: seconds of a batch, one row a sample, each part with nothing else going on.

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
    batch = asked.batch
    jpegs = Stored(place, "jpeg", asked.shape, asked.side, batch, cold=False)
    n_bytes = jpegs.batch_bytes(batch)
    rows = partial(input_rows, batch=batch, stored="jpeg", n_bytes=n_bytes)
    held = [read(path, cold=False) for path in jpegs.paths]
    decoding = measure(lambda: [jpegs.prepared(one) for one in held], budget)
    yield rows("decode", "one core", decoding)
    if device.type == "cuda":
        images = torch.stack([jpegs.prepared(one) for one in held]).pin_memory()
        copy = partial(images.to, device, non_blocking=True)
        labels: dict[str, Any] = {"batch": batch, "stored": "float32", "n_bytes": images.nbytes}
        seconds = measure_on(device, copy, budget)
        yield input_rows("h2d", "pinned", seconds, device=device.type, **labels)
    from_disk: list[float] = []
    reading = partial(_read_all, jpegs.paths, from_disk)
    seconds = measure(reading, budget, setup=partial(_forget, jpegs.paths))
    yield rows(
        "read", "cold files", seconds, from_disk=np.array(from_disk[-len(seconds) :]) / n_bytes
    )


def _forget(paths: Sequence[Path]) -> None:
    """Have the kernel forget files, so that the next read is the disk's; it may not be able to."""
    for path in paths:
        with open(path, "r+b", buffering=0) as file:
            evict(file)


def _read_all(paths: Sequence[Path], from_disk: list[float]) -> None:
    """Read files, and note how many bytes of them came from the disk."""
    before = disk_bytes()
    for path in paths:
        read(path, cold=False)
    from_disk.append(float(disk_bytes() - before))


def input_rows(
    quantity: str,
    how: str,
    seconds: Floats,
    *,
    batch: int,
    stored: str,
    n_bytes: int,
    device: str = "cpu",
    ranks: int = 1,
    from_disk: Floats | float = 0.0,
) -> pd.DataFrame:
    """Rows of table ``inputs``: (n,) seconds of a batch; from_disk: bytes from the disk over the batch's."""
    labels = {"quantity": quantity, "how": how, "device": device, "stored": stored, "batch": batch}
    more = {"bytes": n_bytes, "ranks": ranks, "from_disk": from_disk}
    return sample_rows({**labels, **more}, seconds)
