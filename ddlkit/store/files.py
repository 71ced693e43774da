"""Where everything lies; whole files, read and written so that a crash never leaves half of one.

What cannot be read, written or locked raises a UserError that names the path. Others' JSON and YAML
are read within limits: some hundred bytes can stand for billions of values.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import gzip
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ddlkit.core.errors import UserError

MOST_BYTES = 128 * 1024**2
"""Of a file, and of its text once unpacked: profiles of training have some 50 MB."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def _refusing(verb: str, path: Path) -> Iterator[None]:
    """Turn the operating system's refusal into a UserError naming ``path``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {verb} {path}: {error.strerror or error}") from error


def read(path: Path) -> bytes:
    """Return all bytes of a file."""
    with _refusing("read", path), path.open("rb") as file:
        return _limited(file, path)


def _limited(file: BinaryIO | gzip.GzipFile, path: Path, when: str = "") -> bytes:
    if len(data := file.read(MOST_BYTES + 1)) > MOST_BYTES:
        most = f"{MOST_BYTES // 1024**2} MiB{when}"
        raise UserError(
            f"{path}: more than {most}: give a part of it: fewer iterations or rows"
        )
    return data


def text_of(data: bytes, path: Path) -> str:
    """Return content as text, unpacked if a .gz."""
    try:
        if path.suffix == ".gz" and data:
            data = _limited(
                gzip.GzipFile(fileobj=io.BytesIO(data)), path, " once unpacked"
            )
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}): restore it") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: binary at byte {error.start}, expected text"
        ) from error
    if not text.strip():
        raise UserError(f"{path}: the file is empty: expected a header line and rows")
    return text


def read_text(path: Path) -> str:
    """Return the content of a file as text, unpacked if a .gz."""
    return text_of(read(path), path)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, 64 hex digits."""
    return hashlib.sha256(read(path)).hexdigest()


def replace(source: Path, target: Path) -> None:
    """Rename so that the new name survives a power cut."""
    with _refusing("write", target):
        os.replace(source, target)
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def atomic_write(path: Path, data: bytes) -> None:
    """Write ``data``, in a directory that is made, by a name that nobody knows: all of it, or nothing."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _refusing("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(temporary, new, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as ``atomic_write`` does bytes."""
    atomic_write(path, text.encode())


def remove_unfinished(directory: Path, name: str = "") -> None:
    """Remove what `atomic_write` left of that file, or of any, when it was killed; while nobody writes it."""
    for path in directory.glob(f".{glob.escape(name)}*.tmp"):
        path.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Add UTF-8 text to a file, made where there is none; no link that lies there is followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with _refusing("write", path), os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(text.encode())


_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
_OURS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
SCRATCH = "ddlkit-run-"


@contextlib.contextmanager
def _locked(path: Path, flags: int, how: int) -> Iterator[int]:
    """Hold an advisory lock on a file or directory; give its descriptor."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which names its holder, and stays: else two could lock two of one name."""
    with contextlib.ExitStack() as held:
        with _refusing("lock", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                descriptor = held.enter_context(_locked(path, flags, _AT_ONCE))
            except BlockingIOError as error:
                holder = path.read_text(errors="replace").strip() or "unknown"
                raise UserError(
                    f"{path} is held by process {holder}: wait for it"
                ) from error
            held.callback(os.truncate, descriptor, 0)
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield


@contextlib.contextmanager
def writing_in(directory: Path) -> Iterator[None]:
    """Keep other writers of this directory waiting: two appends at once must not lose one."""
    with contextlib.ExitStack() as held:
        with _refusing("write", directory):
            directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(_locked(directory, os.O_RDONLY, fcntl.LOCK_EX))
        yield


@contextlib.contextmanager
def scratch(parent: Path | str | None = None) -> Iterator[Path]:
    """Give a directory for the block, in ``parent`` or a temporary one; killed owners' are removed."""
    place = Path(parent or tempfile.gettempdir())
    with contextlib.ExitStack() as held:
        with _refusing("write", place):
            for left in place.glob(f"{SCRATCH}*/files"):
                with (
                    contextlib.suppress(OSError),
                    _locked(left.parent, _OURS, _AT_ONCE) as owned,
                ):
                    if os.fstat(owned).st_uid == os.geteuid():
                        shutil.rmtree(left.parent)
            path = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
            held.callback(shutil.rmtree, path, ignore_errors=True)
            held.enter_context(_locked(path, _OURS, fcntl.LOCK_EX))
            (path / "files").mkdir()  # nobody removes one that has none yet
        try:
            yield path / "files"
        except OSError as error:
            if (
                error.errno in FULL and not error.filename
            ):  # a write does not know where it goes
                error.filename = str(path)
            raise


MOST_DEPTH = 50
"""Levels of lists and mappings: the deepest file known here, a profiler's, has 7."""
TOO_DEEP = f"nested more than {MOST_DEPTH} deep"
MOST_VALUES = 10_000_000
"""Of JSON, by its commas and brackets: a profile of half a million events; read, about a gigabyte."""
MOST_YAML_CHARACTERS, MOST_YAML_VALUES = 128 * 1024, 100_000
"""Of YAML, in which an alias counts as all that it stands for."""
MOST_DIGITS = 18
"""Of a whole number, with its sign: it has 64 bits."""


def parse_json(text: str) -> Any:
    """Return the document in JSON, longer numbers as floats; a ValueError says what is wrong."""
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        document = json.loads(text, parse_int=_number)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level, depth = [document], 0
    while level := [value for value in level if isinstance(value, (dict, list))]:
        if (depth := depth + 1) > MOST_DEPTH:
            raise ValueError(TOO_DEEP)
        within = (
            value.values() if isinstance(value, dict) else value for value in level
        )
        level = [value for values in within for value in values]
    return document


def _number(text: str) -> int | float:
    return int(text) if len(text) <= MOST_DIGITS else float(text)


def read_json(path: Path, advice: str) -> Any:
    """Return the document in a file of JSON; a UserError ends in ``advice``."""
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}): {advice}") from error


def parse_yaml(text: str) -> Any:
    """Return the document in YAML as `parse_json` does, of which it has what JSON has."""
    import yaml

    if len(text) > MOST_YAML_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {MOST_YAML_CHARACTERS}")
    try:
        # Before anything is made of it: a merge copies what its aliases stand for.
        if _values(yaml.compose(text, yaml.SafeLoader), {}) > MOST_YAML_VALUES:
            raise ValueError(f"with its aliases more than {MOST_YAML_VALUES} values")
        return parse_json(json.dumps(yaml.safe_load(text), default=str))
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{getattr(error, 'problem', 'unreadable')}") from None
    except TypeError as error:  # a key that is no text
        raise ValueError(str(error)) from None


def _values(node: Any, counts: dict[int, float]) -> float:
    """Return how many values a node of YAML, or a pair of them, stands for: no end if it holds itself."""
    inside = node if isinstance(node, tuple) else getattr(node, "value", "")
    if isinstance(inside, str):
        return 1
    if id(inside) not in counts:
        counts[id(inside)] = math.inf
        counts[id(inside)] = 1 + sum(_values(each, counts) for each in inside)
    return counts[id(inside)]


def own_yaml(text: str) -> Any:
    """Return the document in YAML of this project's own, without limits; much faster with libyaml."""
    import yaml

    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
