"""A trace of torch.profiler read piece by piece, so that a large one fits the memory.

A trace of a long training has a gigabyte of JSON, and Python's objects for it would take
several times as much memory. Here one entry of the trace is parsed at a time, and what
nobody needs of it is dropped at once.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ddlkit.core.errors import UserError, shown
from ddlkit.formats.kineto import NEEDED, KinetoTrace, trace_of_document
from ddlkit.store.files import RULE_OF_GZIP_NAMES

CHUNK_CHARACTERS = 1 << 20
"""How much of a file is read at once."""
MOST_CHARACTERS_OF_ENTRY = 1 << 26
"""An entry of more characters is no span of a trace."""

_KEY = '"traceEvents"'
# What the readers of this library use of the arguments of a span.
_NEEDED_ARGS = (
    "Sequence number",
    "Input Dims",
    "Input type",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
    "Process Group Name",
    "Process Group Description",
    "Seq",
    "correlation",
    "grid",
)
# A "gpu_user_annotation" repeats an annotation of the processor, and is left out.
_NEEDED_CATEGORIES = (
    "cpu_op",
    "user_annotation",
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "memcpy",
    "memset",
    "cuda_runtime",
    "cuda_driver",
)


def read_trace(path: Path | str) -> KinetoTrace:
    """Return the spans of a trace from which iterations of a rank can be told.

    The file is read piece by piece, because a trace can be larger than the memory.

    Parameters
    ----------
    path : Path or str
        A file that ``export_chrome_trace`` has written. It must be packed by gzip if its
        name ends in .gz, and otherwise not.

    Returns
    -------
    KinetoTrace
        Spans of operators, of what was annotated, of kernels, copies and their launches.
        Spans of Python functions and arrows between spans are left out.

    Raises
    ------
    UserError
        If the file cannot be read, is cut short, or is no Chrome trace.
    """
    source = str(path)
    if Path(path).is_dir():
        raise UserError(
            f"{source}: is a directory: name the files in it, as in {source}/rank*.json.gz"
        )
    opener = gzip.open if source.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            document = _document(_Buffer(file, source), source)
    except (EOFError, zlib.error):
        # Python's gzip raises these for a packed file that is cut short or damaged.
        raise _cut_short(source) from None
    except (gzip.BadGzipFile, UnicodeDecodeError):
        raise UserError(f"{source}: {RULE_OF_GZIP_NAMES}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "check its name, and whether you may read it"
        raise UserError(f"cannot read {source}: {reason}: {advice}") from error
    return trace_of_document(document, source)


class _Buffer:
    """The part of a file that was read and not yet parsed.

    It is ``text`` from ``position`` on. What stands before was parsed.
    """

    def __init__(self, file: TextIO, source: str) -> None:
        self.file = file
        self.source = source
        self.text = ""
        self.position = 0
        self.decoder = json.JSONDecoder()

    def read_more(self) -> bool:
        """Drop what was parsed, append a chunk of the file, and return whether one was left."""
        chunk = self.file.read(CHUNK_CHARACTERS)
        self.text = self.text[self.position :] + chunk
        self.position = 0
        return bool(chunk)

    def rest(self) -> str:
        """Return all of the file that was not parsed."""
        return self.text[self.position :] + self.file.read()

    def next_character(self) -> str:
        """Skip white space, and return the character behind it without going past it.

        The result is "" at the end of the file.
        """
        while True:
            while self.position < len(self.text):
                character = self.text[self.position]
                if not character.isspace():
                    return character
                self.position += 1
            if not self.read_more():
                return ""

    def value(self) -> Any:
        """Parse the JSON value that begins at ``position``, go past it, and return it.

        Raises UserError if the file ends before the value does, if the value is longer than
        any entry of a trace, or if it is nested too deeply.
        """
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text, self.position)
            except (json.JSONDecodeError, RecursionError):
                # The value may only end in the next chunk of the file, so it is parsed again
                # with that chunk. A value that is nested too deeply for Python (RecursionError)
                # fails each time, until its text is longer than any entry, and is then refused.
                # Entries that are parsed already count for this length until `read_more` drops
                # them, but they are usually short against the limit.
                is_too_long = len(self.text) > MOST_CHARACTERS_OF_ENTRY
                if is_too_long or not self.read_more():
                    raise _cut_short(self.source) from None
            else:
                self.position = end
                return value


def _cut_short(source: str) -> UserError:
    """Return the error for a file whose JSON does not end."""
    return UserError(
        f"{source}: cannot be read as JSON to its end (was it cut short?): export the "
        "trace again, with fewer iterations if it is long"
    )


def _document(buffer: _Buffer, source: str) -> dict[str, Any]:
    """Return the JSON of a Chrome trace without the entries that are not needed.

    Besides the list of entries, it has facts about the training, such as the rank. Raises
    UserError if the file is cut short or is no Chrome trace.
    """
    before = _facts_before_entries(buffer, source)
    entries = list(_entries(buffer, source))
    after = buffer.rest().strip()
    document: dict[str, Any] = {"traceEvents": entries}
    # If the file is nothing but the list of entries, there are no facts.
    if before is None:
        return document
    # The text before the key "traceEvents" is "{" or "{ ...,". The text behind its list is
    # "}" or ", ... }". Each of the two texts is made the JSON of an object.
    facts_before = before.rstrip().removesuffix(",") + "}"
    facts_after = "{" + after.removeprefix(",")
    for facts in (facts_before, facts_after):
        # Keys that are in `document` already, such as "traceEvents", keep their values.
        try:
            document = {**json.loads(facts), **document}
        except (ValueError, RecursionError):
            raise _cut_short(source) from None
    return document


def _facts_before_entries(buffer: _Buffer, source: str) -> str | None:
    """Skip to the first entry of a trace, and return the text before "traceEvents".

    A Chrome trace is an object with a list "traceEvents", or nothing but the list. The
    result is None if it is the list. Raises UserError if the file is empty or is neither.
    """
    first = buffer.next_character()
    if not first:
        raise UserError(f"{source}: the file is empty: copy or write it again")
    if first == "[":
        buffer.position += 1
        return None
    # Only an object can have a key.
    before = _skip_key(buffer) if first == "{" else None
    if before is None:
        start = shown(buffer.text[:40])
        raise UserError(
            f"{source}: is no Chrome trace of torch.profiler, because it has no list "
            f"traceEvents: {NEEDED} (the file begins with {start})"
        )
    # A colon and the opening bracket follow the key, perhaps with white space between.
    for expected in ":[":
        if buffer.next_character() != expected:
            raise UserError(
                f"{source}: is no Chrome trace, because traceEvents is no list: {NEEDED}"
            )
        buffer.position += 1
    return before


def _skip_key(buffer: _Buffer) -> str | None:
    """Go past the key "traceEvents", and return the text before it.

    The buffer must be at the beginning of an object. The result is None if the object has no
    such key, or if the text before the key is too long.
    """
    # Chunks are read until one has the key, because facts about the training stand before it.
    # If the text is longer than any such facts, the file is no trace, and the rest is not read.
    # The buffer's text before its position is white space, so all of the text can be searched.
    while _KEY not in buffer.text:
        if len(buffer.text) > MOST_CHARACTERS_OF_ENTRY or not buffer.read_more():
            break
    before, key, after = buffer.text[buffer.position :].partition(_KEY)
    if not key:
        return None
    buffer.text = after
    buffer.position = 0
    return before


def _entries(buffer: _Buffer, source: str) -> Iterator[dict[str, Any]]:
    """Yield the needed entries of the list, and go past its closing bracket.

    The buffer must be behind the opening bracket. Raises UserError for an entry that is no
    object.
    """
    # Shapes and other lists by their text. Equal ones are stored once, and shared.
    shared: dict[str, Any] = {}
    while True:
        character = buffer.next_character()
        if character == "]":
            buffer.position += 1
            return
        # Entries are separated by commas.
        if character == ",":
            buffer.position += 1
            continue
        # This raises UserError at the end of the file, where there is no value.
        entry = buffer.value()
        if not isinstance(entry, dict):
            raise UserError(
                f"{source}: is no Chrome trace, because an entry of traceEvents is "
                f"{shown(entry)} and no object: {NEEDED}"
            )
        if _is_needed(entry):
            yield _slimmed(entry, shared)


def _is_needed(entry: dict[str, Any]) -> bool:
    """Return whether an entry is a span of a category that some reader of traces uses."""
    category = str(entry.get("cat", "")).lower()
    # The phase "X" stands for a span.
    return entry.get("ph") == "X" and category in _NEEDED_CATEGORIES


def _slimmed(entry: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of a trace without what no reader uses.

    To save memory, equal names are one object for all entries, and so are equal lists
    among their arguments, such as shapes. ``shared`` maps the text of each such list to
    the list that was met first. New lists are added to it. Arguments that are no lists
    are kept as they are.
    """
    args = entry.get("args")
    if not isinstance(args, dict):
        args = {}
    # These keys hold the phase (which tells spans from other entries), the start, the
    # duration, the process and the thread.
    slim: dict[str, Any] = {
        key: entry[key] for key in ("ph", "ts", "dur", "pid", "tid") if key in entry
    }
    slim["args"] = {
        key: _shared(args[key], shared) for key in _NEEDED_ARGS if key in args
    }
    for label in ("name", "cat"):
        text = entry.get(label)
        # Millions of spans have a few hundred names. `sys.intern` returns one object for
        # all equal ones.
        slim[label] = sys.intern(text) if isinstance(text, str) else text
    return slim


def _shared(value: Any, shared: dict[str, Any]) -> Any:
    """Return the one list that stands for all lists equal to a value, such as a shape.

    The value itself is returned if it is no list.
    """
    if not isinstance(value, list):
        return value
    return shared.setdefault(str(value), value)
