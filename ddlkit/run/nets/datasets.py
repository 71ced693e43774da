"""CIFAR-10 and the Penn Treebank, read from a directory that somebody gives; nothing is downloaded.

CIFAR-10 in its binary version (data_batch_1.bin to data_batch_5.bin, test_batch.bin), the Penn Treebank as
ptb.train.txt and ptb.valid.txt, a sentence a line.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.run.nets.pictures import Pictures
from ddlkit.run.nets.sentences import Text

SIDE, KINDS = 32, 10  # of CIFAR-10's pictures
RECORD_BYTES = 1 + 3 * SIDE * SIDE
BATCHES = (tuple(f"data_batch_{number}.bin" for number in range(1, 6)), ("test_batch.bin",))
"""Files of CIFAR-10: those to train on, those held out."""
TEXTS = ("ptb.train.txt", "ptb.valid.txt")
END, UNKNOWN = "<eos>", "<unk>"


def cifar10(directory: Path, count: int, held_out: bool) -> Pictures:
    """The first ``count`` pictures to train on, or of those held out.

    Raises UserError where a file cannot be read or is none of CIFAR-10, and where there are fewer.
    """
    whole = b"".join(_bytes(directory / name) for name in BATCHES[held_out])
    if len(whole) % RECORD_BYTES:
        raise UserError(
            f"{directory}: {len(whole)} bytes are no whole records of {RECORD_BYTES}: give the directory "
            "of CIFAR-10's binary version"
        )
    rows = np.frombuffer(whole, dtype=np.uint8).reshape(-1, RECORD_BYTES)[:count]
    _enough(directory, len(rows), count, "pictures")
    if len(rows) and rows[:, 0].max() >= KINDS:
        raise UserError(f"{directory}: a label is {rows[:, 0].max()}: CIFAR-10's are 0 to 9")
    images = rows[:, 1:].reshape(-1, 3, SIDE, SIDE).copy()
    return Pictures(images, rows[:, 0].astype(np.int64))


def penn_treebank(directory: Path, count: int, held_out: bool) -> Text:
    """The first ``count`` words to train on, or of those held out, as places in `vocabulary`.

    Raises UserError where a file cannot be read, for a held-out word that no place is for, and where there
    are fewer.
    """
    place = {word: number for number, word in enumerate(vocabulary(directory))}
    words = _words(directory / TEXTS[held_out])[:count]
    _enough(directory, len(words), count, "words")
    if missing := [word for word in words if word not in place and UNKNOWN not in place]:
        raise UserError(f"{directory}: {missing[0]!r} is not among the words of {TEXTS[0]}")
    return Text(np.array([place.get(word, place.get(UNKNOWN, 0)) for word in words], np.int64))


@lru_cache(maxsize=1)
def vocabulary(directory: Path) -> tuple[str, ...]:
    """The words to train on, each once, in the order of the text. Raises UserError as `penn_treebank`."""
    return tuple(dict.fromkeys(_words(directory / TEXTS[0])))


def _words(path: Path) -> list[str]:
    try:
        lines = _bytes(path).decode().splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not text: give the Penn Treebank's words") from None
    return [word for line in lines for word in (*line.split(), END)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}: give its directory") from None


def _enough(directory: Path, there: int, count: int, what: str) -> None:
    if there < count:
        raise UserError(f"{directory}: {there} {what}, {count} are asked for: ask for fewer")
