"""Whole files, read within limits and written so that a crash never leaves half of one.

What cannot be read, written or locked raises a ``UserError`` that names the path. JSON
and YAML of others are read within limits, because a few hundred bytes of them can stand
for billions of values.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from ddlkit.core.errors import UserError

MOST_BYTES = 128 * 1024**2
"""Bytes of a file, and of its text once unpacked. Traces of training have 50 MB."""

RULE_OF_GZIP_NAMES = (
    "cannot be read as text: the name of a file must end in .gz if the file is packed by "
    "gzip, and only then"
)
"""The end of an error about a file whose name does not tell whether it is packed."""

_BEGIN_OF_GZIP = b"\x1f\x8b"

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the operating system reports if a disk, or a user's share of a disk, is full."""


_ADVICE_FOR_READING = {
    errno.ENOENT: "check its name",
    errno.EISDIR: "name a file in it",
    errno.EACCES: "ask its owner for the permission to read it",
}
"""What to do if the operating system refuses to read a path, by the number of its error."""


def _advice(verb: str, error: OSError) -> str:
    """Return what to do about an error of the operating system.

    ``verb`` is what was tried, such as "read" or "write".
    """
    if error.errno in FULL:
        return "free space there, or name another place"
    if verb == "read":
        return _ADVICE_FOR_READING.get(error.errno or 0, "check its name")
    return "name another place"


@contextlib.contextmanager
def _refusing(verb: str, path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a UserError that names the path.

    ``verb`` is what the block does with the path, such as "read" in "cannot read x.csv".
    """
    try:
        yield
    except OSError as error:
        # An error that Python itself raises may have no text of the operating system.
        reason = error.strerror or error
        # If a parent of the path is a file, making the directories fails with "File exists",
        # which does not tell the user what is wrong. At most one parent can be a file.
        for parent in path.parents:
            # `Path.is_file` would raise an error of its own for a parent that may not be
            # searched. `os.path.isfile` returns False for such a parent.
            if os.path.isfile(parent):
                reason = f"{parent} is a file, not a directory"
        advice = _advice(verb, error)
        raise UserError(f"cannot {verb} {path}: {reason}: {advice}") from error


# -- Reading ---------------------------------------------------------------------------


def read(path: Path) -> bytes:
    """Return all bytes of a file.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    bytes
        At most `MOST_BYTES` bytes.

    Raises
    ------
    UserError
        If the file cannot be read, or is larger.
    """
    with _refusing("read", path), path.open("rb") as file:
        return _within_limit(file, path)


def _within_limit(
    file: BinaryIO | gzip.GzipFile, path: Path, *, unpacked: bool = False
) -> bytes:
    """Return the bytes of an open file, or raise UserError for more than `MOST_BYTES`.

    ``path`` is the file, as the error names it. ``unpacked`` is whether reading unpacks
    the file, so that the error is about its unpacked size.
    """
    # One byte more than allowed shows that the file is too large.
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        most = f"{MOST_BYTES // 1024**2} MiB"
        if unpacked:
            most += " once unpacked"
        raise UserError(
            f"{path}: more than {most}: give a part of it: fewer iterations or rows"
        )
    return data


def text_of(data: bytes, path: Path) -> str:
    """Return the content of a file as text.

    Parameters
    ----------
    data : bytes
        The content, which is unpacked if the path ends in ``.gz``.
    path : Path
        The file, as errors name it.

    Returns
    -------
    str
        The text, without a byte order mark.

    Raises
    ------
    UserError
        If the content is damaged, too large once unpacked, not UTF-8, or empty.
    """
    is_packed = data.startswith(_BEGIN_OF_GZIP)
    # A file without any bytes is not wrongly named but empty, and is refused below.
    if data and is_packed != (path.suffix == ".gz"):
        raise UserError(f"{path}: {RULE_OF_GZIP_NAMES}")
    if is_packed:
        data = _unpacked(data, path)
    try:
        # This encoding is UTF-8, and skips a byte order mark.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise UserError(
                f"{path}: is text in UTF-16, expected UTF-8: save it as UTF-8"
            ) from error
        raise UserError(
            f"{path}: binary at byte {error.start}, expected text"
        ) from error
    if not text.strip():
        raise UserError(f"{path}: the file is empty: copy or write it again")
    return text


def _unpacked(data: bytes, path: Path) -> bytes:
    """Return the content of a gzip file.

    Raises UserError if the file is damaged, or if its content is too large.
    """
    packed = gzip.GzipFile(fileobj=io.BytesIO(data))
    try:
        return _within_limit(packed, path, unpacked=True)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path}: damaged gzip file ({error}): copy or write it again"
        ) from error


def bytes_of(text: str, path: Path) -> bytes:
    """Return a text as the content of a file, from which `text_of` returns the text.

    Parameters
    ----------
    text : str
        The text.
    path : Path
        The file. The content is packed if the path ends in ``.gz``.

    Returns
    -------
    bytes
        The content. It is the same for the same text at any time.
    """
    data = text.encode()
    if path.suffix == ".gz":
        # gzip would store the time. Without it, equal texts have equal hashes.
        data = gzip.compress(data, mtime=0)
    return data


def read_text(path: Path) -> str:
    """Return the content of a file as text, unpacked if its name ends in ``.gz``.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    str
        The text.

    Raises
    ------
    UserError
        If the file cannot be read or is larger than `MOST_BYTES`, or if its content is
        not text, as `text_of` describes.
    """
    return text_of(read(path), path)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of the bytes of a file, as 64 hex digits."""
    return hashlib.sha256(read(path)).hexdigest()


# -- Writing ---------------------------------------------------------------------------


def replace(source: Path, target: Path) -> None:
    """Rename a file so that its new name survives a power cut.

    Parameters
    ----------
    source, target : Path
        The old and the new path. A file that has the new path is replaced.

    Raises
    ------
    UserError
        If the operating system refuses.
    """
    with _refusing("write", target):
        os.replace(source, target)
        # The directory stores the new name, so the directory must reach the disk, too.
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file completely or not at all.

    Parameters
    ----------
    path : Path
        The file, which is replaced if it exists. Its folder is made.
    data : bytes
        The content.

    Raises
    ------
    UserError
        If the operating system refuses. The file that was there then stays.

    Notes
    -----
    The content is first written under a random name in the same folder. That name must
    be new, and no link is followed, because in a shared folder others may write, too.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    # O_EXCL fails if the name exists, and O_NOFOLLOW if it is a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _refusing("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # The user's umask removes permissions from 0o666, as for any new file.
            with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
                file.write(data)
                # The content must be on the disk before the file has its final name.
                file.flush()
                os.fsync(file.fileno())
            replace(temporary, path)
        finally:
            # The temporary file is still there after an error, and else has been renamed.
            temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as `atomic_write` writes bytes.

    Parameters
    ----------
    path : Path
        The file, which is replaced if it exists. Its folder is made. The content is packed
        if the path ends in ``.gz``, so that `read_text` can read it.
    text : str
        The content.

    Raises
    ------
    UserError
        If the operating system refuses.
    """
    atomic_write(path, bytes_of(text, path))


def remove_unfinished(directory: Path, name: str = "") -> None:
    """Remove temporary files that `atomic_write` left because its process was killed.

    Parameters
    ----------
    directory : Path
        The folder, in which nobody must be writing such a file now.
    name : str, optional
        The name of the file that was to be written. By default, "", the temporary files
        of all names are removed.
    """
    # `atomic_write` names them .NAME.RANDOM.tmp, where RANDOM has no dot. So NAME ends
    # before the last dot of NAME.RANDOM.
    for path in directory.glob(".*.tmp"):
        written_name, _, _ = path.name[1:].removesuffix(".tmp").rpartition(".")
        if name in ("", written_name):
            path.unlink(missing_ok=True)


def append_text(path: Path, text: str) -> None:
    """Add UTF-8 text to the end of a file.

    Parameters
    ----------
    path : Path
        The file, which is made if it does not exist. A symbolic link is refused.
    text : str
        What to add.

    Raises
    ------
    UserError
        If the operating system refuses, or if the path is a symbolic link.
    """
    # O_APPEND writes at the end of the file, even if another process has just written.
    # O_NOFOLLOW fails if the path is a link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with _refusing("write", path), os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(text.encode())


# -- Locks and scratch folders ---------------------------------------------------------

_WAIT_FOR_EXCLUSIVE = fcntl.LOCK_EX
_EXCLUSIVE_OR_FAIL = fcntl.LOCK_EX | fcntl.LOCK_NB
# NFS locks a file only if it is open for writing, so no directory is ever locked.
_OPEN_LOCK = os.O_RDWR | os.O_NOFOLLOW
_MAKE_LOCK = _OPEN_LOCK | os.O_CREAT
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks reports, as NFS does without its lock service."""
_WRITING = ".writing.lock"
"""The file that is locked, and exists, while somebody writes into its folder."""

SCRATCH = "ddlkit-work-"
"""How the name of a scratch folder begins."""
_OWNERS_LOCK = "lock"
"""The file in a scratch folder that its owner locks."""


@contextlib.contextmanager
def _locked(
    path: Path, flags: int, operation: int, *, required: bool = False
) -> Iterator[int]:
    """Hold an advisory lock on a file during the block, and yield the file's descriptor.

    ``flags`` say for `os.open` how to open the file, and ``operation`` says for
    `fcntl.flock` how to lock it. Whether this waits for another process that holds the
    lock, or raises BlockingIOError, depends on ``operation``. The operating system frees
    the lock when the process ends, however it ends. If the file system has no locks, the
    block runs without one. If a lock is ``required``, OSError is raised instead.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, operation)
        except OSError as error:
            if required or error.errno not in _UNSUPPORTED:
                raise
        yield descriptor
    finally:
        # Closing the descriptor also frees the lock.
        os.close(descriptor)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a lock on a file while the block runs.

    Parameters
    ----------
    path : Path
        The file, into which the id of the process that holds the lock is written. The
        file is made if it does not exist, and it stays after the block. Only the process
        that holds the lock may remove it.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    UserError
        If another process holds the lock, or if the operating system refuses.

    Notes
    -----
    Some network file systems have no locks. There the block runs without one, and
    nobody notices if two processes run at once.
    """
    # The stack keeps the lock until the block of the caller has ended. Errors of that
    # block must not be taken for errors of locking, so the block runs outside of
    # `_refusing`.
    with contextlib.ExitStack() as stack:
        with _refusing("make the directory", path.parent):
            _make_folder(path.parent)
        with _refusing("lock", path):
            descriptor = _lock_or_refuse(path, stack)
            # The file has the id of its holder, and is emptied at the end of the block,
            # before the lock is freed.
            stack.callback(os.truncate, descriptor, 0)
            # A holder that was killed has left its own id.
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        yield


def _make_folder(folder: Path) -> None:
    """Make a folder if it does not exist, or raise UserError if it is a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"{folder} is a file, not a directory: name another") from error


def _lock_or_refuse(path: Path, stack: contextlib.ExitStack) -> int:
    """Lock a file until ``stack`` is closed, and return the descriptor of the file.

    Raises UserError, with the id of the other process, if another one holds the lock.
    """
    while True:
        # This stack holds the lock of one attempt. Closing it frees the lock.
        attempt = contextlib.ExitStack()
        try:
            descriptor = attempt.enter_context(
                _locked(path, _MAKE_LOCK, _EXCLUSIVE_OR_FAIL)
            )
        except BlockingIOError as error:
            holder = _id_of_holder(path)
            if holder is not None:
                raise UserError(
                    f"{path} is held by process {holder}: wait for it"
                ) from error
            # Without an id, the holder has removed the file, and so gives up the lock. The
            # next attempt makes the file anew.
            _make_folder(path.parent)
            continue
        # Whoever held the lock before may have removed the file after this process had
        # opened it. The lock is then worthless, because another process could lock a new
        # file of that name.
        if _is_open_as(descriptor, path):
            # From now on the stack of the caller holds the lock.
            stack.push(attempt)
            return descriptor
        attempt.close()
        # The directory may be gone with the file.
        _make_folder(path.parent)


def _id_of_holder(path: Path) -> str | None:
    """Return the id of the process that has locked a file, which is the text of the file.

    The result is "unknown" while the process has not yet written its id. It is None if the
    process has removed the file, and therefore no longer holds the lock.
    """
    try:
        return path.read_text(errors="replace").strip() or "unknown"
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def writing_in(directory: Path) -> Iterator[None]:
    """Keep other writers of a folder waiting while the block runs.

    Two processes that add rows to one table at once would otherwise lose some. On a file
    system without locks, nobody waits.

    Parameters
    ----------
    directory : Path
        The folder, which is made if it does not exist.

    Yields
    ------
    None
        Nothing.

    Raises
    ------
    UserError
        If the operating system refuses.
    """
    # As in `lock`, the stack keeps the lock until the block of the caller has ended.
    with contextlib.ExitStack() as stack:
        with _refusing("write", directory):
            directory.mkdir(parents=True, exist_ok=True)
            _lock_for_writing(directory / _WRITING, stack)
        yield


def _lock_for_writing(path: Path, stack: contextlib.ExitStack) -> None:
    """Make and lock a file, which is removed and unlocked when ``stack`` is closed.

    This waits as long as another process holds the lock.
    """
    while True:
        # This stack holds the lock of one attempt. Closing it frees the lock.
        attempt = contextlib.ExitStack()
        descriptor = attempt.enter_context(
            _locked(path, _MAKE_LOCK, _WAIT_FOR_EXCLUSIVE)
        )
        # Whoever held the lock before has removed the file, perhaps after this process
        # had opened it. A lock on a removed file keeps nobody waiting.
        if _is_open_as(descriptor, path):
            # The stack of the caller now holds the lock. What is added last is undone
            # first: the file is removed, and then unlocked.
            stack.push(attempt)
            stack.callback(path.unlink, missing_ok=True)
            return
        # Unlock the removed file, and try again with the present one.
        attempt.close()


def _is_open_as(descriptor: int, path: Path) -> bool:
    """Return whether a path still names the file that was opened as a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def scratch(parent: Path | str | None = None) -> Iterator[Path]:
    """Make a folder that lasts as long as the block.

    Parameters
    ----------
    parent : Path or str, optional
        Where to make it. By default it is the folder for temporary files.

    Yields
    ------
    Path
        The folder, which is empty.

    Raises
    ------
    UserError
        If the folder cannot be made.
    OSError
        The error of the block. If a disk is full, the error names the folder.

    Notes
    -----
    The folder that is yielded lies inside an outer folder, beside a file that the process
    locks. A process that is killed leaves both folders behind, unlocked. Whoever makes the
    next scratch folder in the same place removes them. On a file system without locks they
    stay.
    """
    parent = Path(parent or tempfile.gettempdir())
    # When the block has ended, the stack frees the lock and then removes the folder. The
    # block runs outside of `_refusing`, which is only for errors of making the folder.
    with contextlib.ExitStack() as stack:
        with _refusing("write", parent):
            _remove_abandoned(parent)
            outer = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=parent))
            stack.callback(shutil.rmtree, outer, ignore_errors=True)
            stack.enter_context(
                _locked(outer / _OWNERS_LOCK, _MAKE_LOCK, _WAIT_FOR_EXCLUSIVE)
            )
            # `_remove_abandoned` of another process removes an outer folder only if it is
            # unlocked and has an inner folder. The inner folder is therefore made only
            # now, when the lock is held.
            inner = outer / "files"
            inner.mkdir()
        try:
            yield inner
        except OSError as error:
            # The error of a write has no file name, and the user must know which disk
            # is full.
            if error.errno in FULL and not error.filename:
                error.filename = str(outer)
            raise


def _remove_abandoned(parent: Path) -> None:
    """Remove the scratch folders of this user whose owners were killed."""
    # An outer folder has the file that its owner locks, and an inner folder "files". The
    # owner makes the inner folder last. An outer folder without it may be of an owner that
    # is just about to lock it, and stays.
    for inner in parent.glob(f"{SCRATCH}*/files"):
        outer = inner.parent
        # Locking fails while the owner still runs, and opening the lock's file fails if
        # another process has just removed it. A folder with such an error is skipped.
        with contextlib.suppress(OSError):
            # Not `stat`: a link of this name may lead to a folder of value.
            facts = os.lstat(outer)
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                continue
            lock_file = outer / _OWNERS_LOCK
            # Without locks on this file system, nothing tells whether the owner still
            # runs, so `required` lets the folder stay.
            with _locked(lock_file, _OPEN_LOCK, _EXCLUSIVE_OR_FAIL, required=True):
                shutil.rmtree(outer)


# -- JSON and YAML ---------------------------------------------------------------------

MOST_DEPTH = 50
"""Levels of lists and mappings. The deepest file known here, a profiler's, has 7."""

TOO_DEEP = f"nested more than {MOST_DEPTH} deep"

MOST_VALUES = 10_000_000
"""Values of JSON, counted by commas and brackets. Reading them takes about 1 GB."""

MOST_YAML_CHARACTERS = 128 * 1024
MOST_YAML_VALUES = 100_000
"""Values of YAML, in which an alias counts as all that it stands for."""

MOST_DIGITS = 18
"""Characters of a whole number, with its sign. It must fit into 64 bits."""


def parse_json(text: str) -> Any:
    """Return the document in JSON.

    Parameters
    ----------
    text : str
        The JSON.

    Returns
    -------
    object
        The document. A whole number of more than `MOST_DIGITS` characters becomes a float.

    Raises
    ------
    ValueError
        If the text is not JSON, or has too many values or levels.
    """
    # Values are counted before any of them is made. A bracket comes before the first
    # value of a list or mapping, and a comma before each other value. Commas and brackets
    # within texts count, too, so the count is at least the number of values.
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        document = json.loads(text, parse_int=_number)
    except json.JSONDecodeError as error:
        # Python's own words, such as "Expecting value", do not say what is wrong.
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"the first mistake is at {where}") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    _check_depth(document)
    return document


def _number(text: str) -> int | float:
    # A longer number does not fit into 64 bits, and Python refuses very long ones.
    return int(text) if len(text) <= MOST_DIGITS else float(text)


def _check_depth(document: Any) -> None:
    """Raise ValueError if lists and mappings are nested in more than `MOST_DEPTH` levels.

    The levels are visited one after the other (breadth first). A recursive function could
    itself fail on a document that is nested very deep.
    """
    depth = 0
    # All values of one level. The first level has only the document itself.
    values = [document]
    while True:
        containers = [value for value in values if isinstance(value, (dict, list))]
        if not containers:
            return
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(TOO_DEEP)
        # Go on with all values of the next level.
        values = []
        for container in containers:
            if isinstance(container, dict):
                values.extend(container.values())
            else:
                values.extend(container)


def read_json(path: Path, advice: str) -> Any:
    """Return the document in a file of JSON.

    Parameters
    ----------
    path : Path
        The file.
    advice : str
        The end of the error for a file that is not JSON, which says what the user should
        do.

    Returns
    -------
    object
        The document, as `parse_json` returns it.

    Raises
    ------
    UserError
        If the file cannot be read, is not JSON, or has too many values or levels.
    """
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}): {advice}") from error


def parse_yaml(text: str) -> Any:
    """Return the document in YAML that somebody else may have written.

    Parameters
    ----------
    text : str
        The YAML.

    Returns
    -------
    object
        The document with the types of JSON. A date, for example, is text.

    Raises
    ------
    ValueError
        If the text is not YAML, or has too many values or levels.
    """
    import yaml

    if len(text) > MOST_YAML_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {MOST_YAML_CHARACTERS}")
    try:
        # Values are counted before any of them is made, because a merge (<<) copies all
        # that its aliases stand for. `compose` only makes nodes, in which an alias is a
        # reference. The loader refuses a text that itself is nested too deep.
        root = yaml.compose(text, _shallow_loader())
        if _count_values(root, counts={}) > MOST_YAML_VALUES:
            raise ValueError(f"with its aliases more than {MOST_YAML_VALUES} values")
        # By way of JSON, dates and the like become text. Aliases may nest values deeper
        # than the text is nested, and `parse_json` refuses such a document.
        document = yaml.safe_load(text)
        return parse_json(json.dumps(document, default=str))
    except RecursionError:
        # Aliases nest so deep that Python stops before `parse_json` is called.
        raise ValueError(TOO_DEEP) from None
    except yaml.YAMLError as error:
        raise ValueError(_problem_of_yaml(error)) from None
    except TypeError as error:
        # JSON has no keys such as dates.
        raise ValueError(str(error)) from None


def _problem_of_yaml(error: Exception) -> str:
    """Return what is wrong with a text, and in which line, by the error of PyYAML."""
    # Not every error of PyYAML says where it is and what is wrong.
    problem = getattr(error, "problem", "unreadable")
    mark = getattr(error, "problem_mark", None)
    if not mark:
        return f"{problem}"
    # A mark counts lines from 0.
    return f"line {mark.line + 1}: {problem}"


@cache
def _shallow_loader() -> Any:
    """Return a loader class of PyYAML that refuses more than `MOST_DEPTH` levels.

    The loader raises ValueError as soon as it meets a node that is too deep. Otherwise a
    text of opening brackets alone would take PyYAML seconds.
    """
    import yaml

    class ShallowLoader(yaml.SafeLoader):
        # How many nodes are being made, each inside the one before.
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            # PyYAML calls this for each node, and within the call for the nodes inside.
            self.depth += 1
            # The deepest list or mapping may have scalars, which are one level deeper.
            if self.depth > MOST_DEPTH + 1:
                raise ValueError(TOO_DEEP)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return ShallowLoader


def _count_values(node: Any, counts: dict[int, float]) -> float:
    """Return how many values a node of YAML, or a pair of a mapping, stands for.

    A few aliases of aliases can stand for billions of values, and `parse_yaml` refuses
    such a document by this count.

    Parameters
    ----------
    node : yaml.Node or tuple
        The node, or the nodes of a key and its value.
    counts : dict of int to float
        The counts so far, by the identity (`id`) of each node or pair. This function adds
        to it. PyYAML has one node for a value and all of its aliases, so the inside of
        that node is visited only once.

    Returns
    -------
    float
        The number of values, in which an alias counts as all that it stands for, and each
        list, mapping and pair as one more. It is infinite if the node contains itself.
    """
    children: Any
    if isinstance(node, tuple):
        # The nodes of a key and its value.
        children = node
    else:
        # The value of a mapping is a list of pairs, that of a list is a list of nodes, and
        # that of a scalar is its text. An empty document is None, and counts as a scalar.
        children = getattr(node, "value", "")
    is_scalar = isinstance(children, str)
    if is_scalar:
        return 1
    key = id(node)
    if key not in counts:
        # A node that is met again while it is being counted contains itself. It then
        # finds this entry, so that its count becomes infinite.
        counts[key] = math.inf
        counts[key] = 1 + sum(_count_values(child, counts) for child in children)
    return counts[key]


def own_yaml(text: str) -> Any:
    """Return the document in YAML of this project, which is read without limits.

    Parameters
    ----------
    text : str
        The YAML.

    Returns
    -------
    object
        The document.

    Notes
    -----
    If libyaml is installed, reading is much faster than with `parse_yaml`.
    """
    import yaml

    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
