"""Recorded tables, each with a stamp that says where its rows come from.

A table is recorded in one of two forms, which are read alike:

* A *loose* table is a CSV, ``layers-x.csv`` or ``layers-x.csv.gz``, with its stamp in
  ``layers-x.json``.
* A *packed* table is a part of a pack. The pack ``layers.csv.gz`` of a folder has the
  rows of its tables of the schema ``layers``, below one header. A first column,
  ``part``, has the name of the table. ``stamps.jsonl`` has the hash of each pack and
  the stamp of each part.

A path names a table wherever its rows are: ``layers-x.csv`` is a file, or a part of
``layers.csv.gz``. If it is both, the file is newer and counts.

Tables are never changed but by `save_table` and `pack`. A process that is killed at any
moment leaves each table as it was before or as it is afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import fnmatch
import functools
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.store import files
from ddlkit.store import machine as this_machine
from ddlkit.store.files import parse_json
from ddlkit.store.sheet import SCHEMAS, Column, kind_in_words, schema_named, write_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

BENCHMARK_VERSION = 1
"""The version of the meaning of recorded numbers. A table has rows of one version."""

STAMPS = "stamps.jsonl"
"""The name of the file with the stamps of all that is packed in a folder."""

PART = Column("part", "str", "named")
"""The first column of a pack: the name of the table that a row belongs to."""

MOST_PACK_CHARACTERS = 16 * 1024**2
"""Text of a pack. A cell has two characters at least, so `sheet.MOST_CELLS` is kept."""

_STAMP_TYPES = {
    "schema": str,
    "benchmark_version": int,
    "command": list,
    "machine": dict,
    "versions": dict,
    "commit": str,
    "time": str,
    "rows": int,
    "sha256": str,
}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# The code that this process has loaded does not change, whatever happens on disk.
_commit = functools.cache(this_machine.commit)


# -- Saving ----------------------------------------------------------------------------


def save_table(
    frame: DataFrame,
    directory: Path | str,
    name: str,
    *,
    schema: str,
    command: Sequence[str],
    machine: Mapping[str, Any] | None = None,
    remark: str = "",
    append: bool = False,
) -> Path:
    """Write a table and its stamp, which says how and on which machine it was measured.

    Parameters
    ----------
    frame : DataFrame
        The rows, which are checked before anything is written.
    directory : Path or str
        The folder, which is made if it does not exist.
    name : str
        The name of the table. ``.csv`` is added unless the name ends in ``.csv`` or
        ``.csv.gz``.
    schema : str
        The kind of table, a key of `SCHEMAS`.
    command : sequence of str
        The command that measured the rows.
    machine : mapping, optional
        The machine on which they were measured, as `ddlkit.store.machine.describe`
        returns it. By default it is this one.
    remark : str, optional
        What else the stamp should say.
    append : bool, optional
        Whether the rows are added to the table that already has this path, if there is
        one. The new stamp keeps the earlier stamps of this table under "history". By
        default the rows replace such a table.

    Returns
    -------
    Path
        The path of the CSV.

    Raises
    ------
    UserError
        If the rows break the schema, if the name is one of a pack, if the table that is
        there is damaged or of another version, or if the files cannot be written.
    """
    if not name.endswith((".csv", ".csv.gz")):
        name = f"{name}.csv"
    directory = Path(directory)
    path = directory / name
    if machine is None:
        machine = this_machine.describe()
    # No other process may add rows between reading the table and writing it.
    with files.writing_in(directory):
        # A pack is a file with the rows of many tables, and only `pack` writes it.
        if is_pack(path.name):
            raise UserError(f"{path} is a pack of tables: save under another name")
        history: list[dict[str, Any]] = []
        if append and has_table(path):
            # The rows of the table with the new ones below them, and its stamps so far.
            frame, history = _appended(path, frame, schema)
        data = _csv_data(frame, schema, path)
        now = datetime.datetime.now(datetime.timezone.utc)
        stamp = {
            "schema": schema,
            "benchmark_version": BENCHMARK_VERSION,
            "command": [_without_folders(word) for word in command],
            "machine": machine,
            "versions": this_machine.versions(),
            "commit": _commit(),
            "time": now.isoformat(timespec="seconds"),
            "remark": remark,
            "rows": len(frame),
            "sha256": _sha256(data),
            "history": history,
        }
        _exchange(path, data, stamp)
    return path


def _csv_data(frame: DataFrame, schema: str, path: Path) -> bytes:
    """Return rows as the content of a CSV, compressed if ``path`` ends in ".gz".

    Raises UserError if the rows break the schema.
    """
    return files.bytes_of(write_sheet(frame, schema_named(schema), str(path)), path)


def _exchange(path: Path, data: bytes, stamp: dict[str, Any]) -> None:
    """Write a table and its stamp in the place of those that are there.

    Two files cannot be exchanged at once. The new stamp is written first, and contains
    the earlier stamp. So there is a stamp for the table on the disk at any moment, be it
    the earlier table or the new one. ``data`` is the new content of the CSV, and ``stamp``
    is its stamp, to which this function adds the earlier stamp as "replaces".
    """
    # `_verified` raises UserError if there is no table, or a damaged one. The new stamp then
    # has no entry "replaces", because no earlier stamp is worth keeping.
    with contextlib.suppress(UserError):
        _, stamp["replaces"] = _verified(path)
    try:
        files.atomic_write_text(_stamp_path(path), json.dumps(stamp, indent=1) + "\n")
        files.atomic_write(path, data)
    finally:
        # If not even a first table could be written, its stamp must not stay alone.
        if not path.exists():
            _stamp_path(path).unlink(missing_ok=True)


def _without_folders(word: str) -> str:
    """Return a word of a command without the folders of this machine.

    A path below the current folder becomes relative to it. Of any other path, only the
    last name is kept: ``--out=/data/x/runs.csv`` becomes ``--out=runs.csv``.
    """
    # The current folder is removed anywhere in the word, because a path may stand inside
    # other text, such as JSON.
    word = word.replace(f"{Path.cwd()}/", "")
    # A path outside begins with / or ../, possibly after an option such as --out=. The
    # first group is the option, and the second one the path.
    outside = re.fullmatch(r"(--[\w-]+=)?((?:/|\.\./).*)", word)
    if not outside:
        return word
    option = outside[1] or ""
    return f"{option}{Path(outside[2]).name}"


def _appended(
    path: Path, new: DataFrame, schema: str
) -> tuple[DataFrame, list[dict[str, Any]]]:
    """Return the rows of a table with new ones below them, and the table's stamps so far.

    The stamps are in the order of recording, one for each time that rows were added.
    ``schema`` is the kind of the table. Raises UserError if the table is of another kind,
    or of another benchmark version, because rows of two versions do not mean the same.
    """
    from pandas import concat

    old = load_table(path, schema)
    stamp = load_stamp(path)
    version = stamp["benchmark_version"]
    if version != BENCHMARK_VERSION:
        raise UserError(
            f"{path}: recorded by benchmark version {version}, this is "
            f"{BENCHMARK_VERSION}: save under a new name"
        )
    # The old rows have all columns of the schema, because they were read. The new ones may
    # lack columns with a default. Writing and reading the new rows adds these columns.
    schema_of_table = schema_named(schema)
    new_text = write_sheet(new, schema_of_table, str(path))
    new_with_all_columns = schema_of_table.read(new_text, str(path))
    # The history is a list of stamps that have no history themselves. So the earlier
    # history is taken out of the table's stamp, which then becomes its last entry.
    history = stamp.pop("history", [])
    rows = concat([old, new_with_all_columns], ignore_index=True)
    return rows, [*history, stamp]


def own_output(path: Path | str, *sources: Path | str) -> Path:
    """Return the path of an output, or refuse to overwrite a source or a recorded table.

    Parameters
    ----------
    path : Path or str
        Where a user wants something to be written.
    *sources : Path or str
        The files that are read for it.

    Returns
    -------
    Path
        The path itself.

    Raises
    ------
    UserError
        If the path is a directory, one of the sources, a recorded table or its stamp.
    """
    path = Path(path)
    # A path without a name, such as "/" or ".", can be no file. On Linux, all paths without
    # a name are directories.
    if os.path.isdir(path) or not path.name:
        raise UserError(f"{path} is a directory: name a file")
    # Two paths may name one file by way of links.
    resolved = path.resolve()
    if any(resolved == Path(source).resolve() for source in sources):
        raise UserError(
            f"{path} is what is read: choose another name for what is written"
        )
    if _is_recorded(resolved):
        raise UserError(f"{path} is a recorded table or its stamp: choose another name")
    return path


def _is_recorded(path: Path) -> bool:
    """Return whether a path is of a recorded table, of a stamp, or of a pack in use.

    A stamp is the JSON file that lies next to a recorded table. A pack is a file with the
    rows of many tables, whose stamps are together in one file.
    """
    if path.suffix == ".json" and os.path.isfile(path):
        # The result is None for JSON that is no stamp.
        is_stamp = _read_stamp(path) is not None
        if is_stamp:
            return True
    # A recorded table, loose or packed.
    if is_stamped(path):
        return True
    # `is_pack` is true for the name of a pack and for that of the file of its stamps. A user
    # may have a file of such a name in a folder without packs.
    return is_pack(path.name) and bool(packed(path.parent))


# -- Loading ---------------------------------------------------------------------------


def load_table(path: Path | str, schema: str | None = None) -> DataFrame:
    """Return the rows of a recorded table.

    Parameters
    ----------
    path : Path or str
        The path of the table, which is a file of its own (loose) or a part of a pack.
    schema : str, optional
        The kind of table that is expected. By default every kind is taken.

    Returns
    -------
    DataFrame
        The rows, with the columns of the schema.

    Raises
    ------
    UserError
        If there is no such table, if it is of another kind, or if its file was changed
        after it was recorded.
    """
    path = Path(path)
    # The packed table of this path, or None if the table has a file of its own.
    part = _part_of(path)
    if part is None:
        data, stamp = _verified(path)
        _check_kind(path, stamp, schema)
        text = files.text_of(data, path)
        frame = schema_named(stamp["schema"]).read(text, str(path))
    else:
        stamp = part.stamp
        _check_kind(path, stamp, schema)
        frame = _packed_rows(path.name, part)
    if len(frame) != stamp["rows"]:
        raise UserError(
            f"{path}: {len(frame)} rows, its stamp says {stamp['rows']}: restore it"
        )
    return frame


def _check_kind(path: Path, stamp: Mapping[str, Any], schema: str | None) -> None:
    """Raise UserError if the table of a stamp is of another kind than ``schema``.

    If ``schema`` is None, every kind is taken.
    """
    kind = stamp["schema"]
    if schema is not None and schema != kind:
        raise UserError(
            f"{path}: is {kind_in_words(kind)}, but {kind_in_words(schema)} is needed "
            f"here: give one, such as {schema}.csv or {schema}-NAME.csv"
        )


def load_stamp(path: Path | str) -> dict[str, Any]:
    """Return the stamp of a recorded table.

    Parameters
    ----------
    path : Path or str
        The path of the table, which is a file of its own (loose) or a part of a pack.

    Returns
    -------
    dict
        The stamp, which the caller may change. Its keys are "schema",
        "benchmark_version", "command", "machine", "versions", "commit", "time", "remark",
        "rows", "sha256" and "history".

    Raises
    ------
    UserError
        If there is no such table, or if its file was changed after it was recorded.
    """
    path = Path(path)
    # The packed table of this path, or None if the table has a file of its own.
    part = _part_of(path)
    if part is None:
        _, stamp = _verified(path)
        return stamp
    # Reading the pack verifies its hash. The text that is returned is not needed. With the
    # state of the file as further arguments, the cache reads a pack again that has changed.
    _pack_text(part.pack, part.pack_sha256, *_file_state(part.pack))
    # Parts are cached, so a caller that changes the stamp must have a copy.
    return copy.deepcopy(part.stamp)


def is_stamped(path: Path | str) -> bool:
    """Return whether a path names a recorded table, which a user's own CSV is not."""
    path = Path(path)
    has_own_stamp = _read_stamp(_stamp_path(path)) is not None
    return has_own_stamp or _part_of(path) is not None


def has_table(path: Path | str) -> bool:
    """Return whether there is a table of this path, loose or packed."""
    path = Path(path)
    return path.exists() or _part_of(path) is not None


def list_tables(folder: Path | str, pattern: str = "*.csv*") -> list[Path]:
    """Return the paths of tables in a folder, loose or packed.

    Parameters
    ----------
    folder : Path or str
        Where to look.
    pattern : str, optional
        A pattern of the names of tables. What stands before its last slash, if any, is a
        pattern of the folders to search within ``folder``, as in ``**/layers*.csv*``.
        Without a slash, only ``folder`` itself is searched.

    Returns
    -------
    list of Path
        The sorted paths of all files that match, recorded or not, and of all packed
        tables that match. The files of packs and hidden files are left out.
    """
    folder = Path(folder)
    folders: Iterable[Path] = [folder]
    # Without a slash, the pattern of folders is empty.
    folder_pattern, _, name_pattern = pattern.rpartition("/")
    if folder_pattern:
        folders = folder.glob(folder_pattern)
    # A table that is both loose and packed is listed once.
    tables: set[Path] = set()
    for searched in folders:
        # Packed tables have no files, so `glob` does not find them. `packed` has their
        # names.
        names = fnmatch.filter(packed(searched), name_pattern)
        for path in searched.glob(name_pattern):
            # The temporary file of a table that is being written is hidden, for example.
            is_hidden = path.name.startswith(".")
            if not is_hidden and not is_pack(path.name):
                names.append(path.name)
        tables.update(searched / name for name in names)
    return sorted(tables)


def expand_tables(paths: list[Path]) -> list[Path]:
    """Return paths in which patterns are replaced by the tables that they match.

    Parameters
    ----------
    paths : list of Path
        Paths as a user gives them. The last name of each may be a pattern such as
        "layers*.csv". A shell cannot expand a pattern of packed tables, which have no
        files of their own.

    Returns
    -------
    list of Path
        The paths. A pattern that matches nothing stays as it is.
    """
    expanded = []
    for path in paths:
        matches = []
        # One of the characters *, ? and [ makes a name a pattern.
        is_pattern = re.search(r"[*?[]", path.name)
        if is_pattern:
            matches = list_tables(path.parent, path.name)
        expanded += matches or [path]
    return expanded


def machines_in(folder: Path) -> set[str]:
    """Return the names of the machines on which the tables of a folder were recorded.

    Parameters
    ----------
    folder : Path
        A folder, which should have the tables of one machine only.

    Returns
    -------
    set of str
        The names. The set is empty if no table is recorded there. A machine without a
        name in the stamp is "".
    """
    # The stamps of packed tables are in one file, and loose tables have one each.
    stamps = [part.stamp for part in packed(folder).values()]
    for path in list_tables(folder):
        # A path without a file is a packed table.
        if not path.exists():
            continue
        stamp = _read_stamp(_stamp_path(path))
        # A user's own CSV has no stamp.
        if stamp is not None:
            stamps.append(stamp)
    return {str(stamp["machine"].get("name", "")) for stamp in stamps}


def refuse_other_machines(folder: Path, name: str) -> None:
    """Refuse to measure into a folder that has tables of another machine.

    Rows of two machines in one recording would be taken for rows of one machine.

    Parameters
    ----------
    folder : Path
        The folder, which need not have any tables.
    name : str
        The name of the machine that is going to measure.

    Raises
    ------
    UserError
        If a table in the folder was recorded on a machine of another name.
    """
    other_machines = machines_in(folder) - {name}
    if other_machines:
        names = " and ".join(sorted(other_machines))
        raise UserError(
            f"{folder} holds a recording of {names}, this is {name}: choose another "
            "directory"
        )


# -- Stamps of loose tables ------------------------------------------------------------


def _stamp_path(path: Path) -> Path:
    """Return the path of a loose table's stamp: name.json for name.csv[.gz]."""
    return path.parent / f"{path.name.removesuffix('.gz').removesuffix('.csv')}.json"


def _read_stamp(path: Path) -> dict[str, Any] | None:
    """Return the stamp in a file.

    The result is None if there is no such file, or if the file is empty or has JSON that
    is no stamp. Raises UserError if the file is not JSON, or if the stamp is damaged.
    """
    if not os.path.lexists(path):
        return None
    try:
        # An empty file is not JSON, and is read as null instead.
        stamp = parse_json(files.read(path).decode() or "null")
    except ValueError as error:
        raise UserError(
            f"{path}: damaged stamp, which says where the CSV of the same name comes from "
            f"({error}): restore it, or rename it if it belongs to no CSV"
        ) from error
    # JSON of a user may lie beside a CSV. Without a hash it is no stamp.
    if not isinstance(stamp, dict) or "sha256" not in stamp:
        return None
    return _checked_stamp(stamp, path)


def _checked_stamp(stamp: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the stamp itself, or raise UserError if an entry is missing or of a wrong type.

    ``path`` is the file of the stamp, as the error names it.
    """
    for key, required in _STAMP_TYPES.items():
        if not isinstance(stamp.get(key), required):
            problem = f"damaged stamp (its {key} is no {required.__name__})"
            raise UserError(f"{path}: {problem}: restore it")
    return stamp


def _verified(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of a loose table, and the stamp that has their hash.

    Another process may be exchanging the table and its stamp at the same time. It writes the
    new stamp before the new table. The new stamp contains the earlier stamp, and each of these
    two is compared with the table. The table may also be exchanged between reading it and
    reading its stamp. So a table without a matching stamp counts as damaged only if its bytes
    are still the same when they are read again. Raises UserError if the table has no stamp, or
    counts as damaged.
    """
    # None lets the loop begin, because no bytes are equal to it.
    data_of_last_try = None
    data = files.read(path)
    # Try again as long as the file changes.
    while data != data_of_last_try:
        for stamp in _possible_stamps(path):
            if stamp["sha256"] == _sha256(data):
                return data, stamp
        data_of_last_try = data
        data = files.read(path)
    stamp_name = _stamp_path(path).name
    raise UserError(
        f"{path}: was changed after it was recorded, because its hash is not the one in "
        f"{stamp_name}: restore the table, or delete both files and measure again"
    )


def _possible_stamps(path: Path) -> list[dict[str, Any]]:
    """Return the stamp next to a loose table and, if there is one, the stamp inside it.

    `_exchange` writes the new stamp before the new table. Between these writes, the earlier
    table is still there, and its stamp is inside the new one. Raises UserError if the table
    has no stamp.
    """
    stamp = _read_stamp(_stamp_path(path))
    if stamp is None:
        # A pack has no stamp of its own beside it. `refuse_pack` raises an error that names
        # the tables in the pack, and does nothing for any other file.
        refuse_pack(path)
        raise UserError(
            f"{path}: is not a recorded table, because {_stamp_path(path).name} is "
            "not beside it: give a table as it was recorded, and keep its two files "
            "together"
        )
    if "replaces" not in stamp:
        return [stamp]
    # The earlier stamp is taken out, because it says nothing about the new table.
    earlier = stamp.pop("replaces")
    return [stamp, earlier]


# -- Packs -----------------------------------------------------------------------------

MOST_NAMED = 3
"""The most tables of a pack that an error names."""


class Part(NamedTuple):
    """A packed table.

    Attributes
    ----------
    pack : Path
        The file of the pack.
    pack_sha256 : str
        The SHA-256 of that file.
    stamp : dict
        The stamp of the table. Its "sha256" is the hash of the loose file.
    text_sha256 : str
        The SHA-256 of the text of the table. It differs from the hash of a loose file
        that was compressed.
    """

    pack: Path
    pack_sha256: str
    stamp: dict[str, Any]
    text_sha256: str


def is_pack(name: str) -> bool:
    """Return whether a file of this name is a pack, or the file of the stamps of packs.

    Parameters
    ----------
    name : str
        The name of a file, such as "layers.csv.gz" or "layers.2.csv.gz".

    Returns
    -------
    bool
        True for the two examples and for `STAMPS`, but not for "layers-x.csv.gz", which
        is a table. The name alone decides, whether or not there is such a file.
    """
    # "layers.2.csv.gz" is the second pack of the schema "layers".
    kind, _, extension = name.partition(".")
    has_name_of_pack = re.fullmatch(r"(\d+\.)?csv\.gz", extension) is not None
    return name == STAMPS or (kind in SCHEMAS and has_name_of_pack)


def packed(folder: Path) -> dict[str, Part]:
    """Return the tables of a folder whose rows are in a pack, a file of many tables.

    Parameters
    ----------
    folder : Path
        A folder, which may have no packs.

    Returns
    -------
    dict of str to Part
        The packed tables by their names, such as "layers-x.csv".

    Raises
    ------
    UserError
        If the file of stamps is damaged.
    """
    # This file has a line for each pack of the folder, and a line with the stamp of each
    # packed table. Without it, the folder has no packs.
    stamps_file = folder / STAMPS
    file_state = _file_state(stamps_file)
    if not file_state:
        return {}
    # With its state as a part of the cache's key, a file that has changed is read again.
    return _read_stamps_file(stamps_file, *file_state)


def refuse_pack(path: Path) -> None:
    """Refuse a pack where a table is needed.

    Parameters
    ----------
    path : Path
        A file that should be a table.

    Raises
    ------
    UserError
        If the file is a pack. The error names some of its tables.
    """
    # The names of the tables in this file, of which there are none unless it is a pack.
    parts = [name for name, part in packed(path.parent).items() if part.pack == path]
    if not parts:
        return
    names = ", ".join(str(path.parent / name) for name in parts[:MOST_NAMED])
    if len(parts) == 1:
        raise UserError(
            f"{path}: is a pack, and the table in it has another path: give {names}, which "
            "ddlkit finds in the pack although there is no such file"
        )
    raise UserError(
        f"{path}: is a pack of {len(parts)} recorded tables: give the path of one of them, "
        f"which ddlkit finds in the pack although there is no such file, as in {names}"
    )


def _part_of(path: Path) -> Part | None:
    """Return the packed table of this path, or None if there is none.

    The result is also None if there is a file of this path. Such a file is newer than the
    packed table, and counts.
    """
    if os.path.lexists(path):
        return None
    return packed(path.parent).get(path.name)


def _file_state(path: Path) -> tuple[int, ...]:
    """Return the time, size and inode of a file, or () if there is no such file.

    At least one of the three numbers changes when the file is exchanged. Cached functions
    take them as further arguments, which they do not use. The cache then has an entry for
    each state of a file, so a file that was exchanged is read again.
    """
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


@functools.lru_cache(maxsize=256)
def _read_stamps_file(path: Path, *_file_state: int) -> dict[str, Part]:
    """Return the packed tables in a file of stamps, by their names.

    A line of the file is JSON of one of two kinds: the hash of a pack, or the stamp of a
    packed table, which is called a part of its pack. The line of a pack comes before the
    lines of its parts. ``_file_state`` only makes the cache read a file again that has
    changed. Raises UserError if a line is damaged.
    """
    # The hash of each pack by the name of its file.
    pack_sha256: dict[str, str] = {}
    parts = {}
    for line_number, line in enumerate(files.read_text(path).splitlines(), 1):
        try:
            entry = json.loads(line)
            pack_name = entry["pack"]
            # A line without a part is the line of a pack. It has only the hash.
            if "part" not in entry:
                pack_sha256[pack_name] = str(entry["sha256"])
            else:
                part = _part_of_entry(entry, pack_sha256, path)
                parts[str(entry["part"])] = part
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            # No JSON, no mapping, an entry that is missing, or too many levels.
            raise UserError(
                f"{path}: damaged line {line_number} ({error}): restore it"
            ) from error
    return parts


def _part_of_entry(
    entry: dict[str, Any], pack_sha256: Mapping[str, str], path: Path
) -> Part:
    """Return the packed table that a line of a file of stamps describes.

    ``entry`` is the JSON of the line, ``pack_sha256`` the hash of each pack by the name of
    its file, and ``path`` the file of stamps, which is next to the packs. Raises KeyError if
    something is missing, and UserError if the stamp is damaged.
    """
    stamp = _checked_stamp(entry["stamp"], path)
    return Part(
        pack=path.parent / entry["pack"],
        pack_sha256=pack_sha256[entry["pack"]],
        stamp=stamp,
        # An earlier version of this library left out the hash of the table's text if the
        # loose file was not compressed. The loose file was then that text, so its hash, which
        # the stamp has, is the hash of the text.
        text_sha256=entry.get("text_sha256", stamp["sha256"]),
    )


def _packed_rows(name: str, part: Part) -> DataFrame:
    """Return the rows of a packed table, with an index from 0.

    ``name`` is the name of the table, and ``part`` says in which pack its rows are.
    """
    # All rows of the pack, and for each table where its rows are. They are cached. The schema
    # says which columns to read: a pack has tables of one schema only, so it is that of this
    # table. With the state of the file as further arguments, the cache reads a pack again that
    # has changed.
    rows, slices = _rows_of_pack(
        part.pack, part.pack_sha256, part.stamp["schema"], *_file_state(part.pack)
    )
    # A table without rows has none in the pack.
    no_rows = slice(0)
    frame = rows.iloc[slices.get(name, no_rows)]
    # This numbers the rows from 0 in a fifth of the time of reset_index.
    frame.index = range(len(frame))
    return frame


@functools.lru_cache(maxsize=256)
def _rows_of_pack(
    path: Path, sha256: str, kind: str, *file_state: int
) -> tuple[DataFrame, dict[str, slice]]:
    """Return all rows of a pack, and the slice of rows of each table by its name.

    ``path`` and ``sha256`` are those of the pack, and ``kind`` is the schema of its
    tables. Values are checked again, but not whether rows have equal keys. `save_table`
    has refused such rows, and the hash shows that the rows have not changed since.
    ``file_state`` only makes the cache read a file again that has changed.
    """
    schema = schema_named(kind)
    # A pack has the column "part" before those of its tables. With an empty key, reading
    # compares no keys.
    schema = replace(schema, columns=(PART, *schema.columns), key=())
    text = _pack_text(path, sha256, *file_state)
    frame = schema.read(text, str(path))
    # The rows of a table follow one another, and the column "part" names their table. So
    # a table begins where that name changes.
    names = frame["part"].to_numpy(object)
    # For each row, whether a table begins there. One does in the first row of all, and in
    # each row whose name differs from that of the row before.
    is_first = np.append(True, names[1:] != names[:-1])
    starts = np.flatnonzero(is_first)
    ends = [*starts[1:], len(names)]
    slices = {
        names[start]: slice(start, end) for start, end in zip(starts, ends, strict=True)
    }
    # The first column, "part", is no column of the tables.
    return frame.iloc[:, 1:], slices


@functools.lru_cache(maxsize=16)
def _pack_text(path: Path, sha256: str, *_file_state: int) -> str:
    """Return the text of a pack, or raise UserError if its hash is not ``sha256``.

    ``_file_state`` only makes the cache read a file again that has changed.
    """
    data = files.read(path)
    digest = _sha256(data)
    if digest != sha256:
        problem = f"sha256 {digest[:12]} differs from {sha256[:12]} in {STAMPS}"
        raise UserError(f"{path}: {problem}: changed after packing, restore it")
    return files.text_of(data, path)


def pack(folder: Path) -> list[Path]:
    """Pack the loose recorded tables of a folder.

    A loose table has a file of its own. A pack is one file with the rows of many tables.

    Parameters
    ----------
    folder : Path
        A folder with tables of one machine.

    Returns
    -------
    list of Path
        The paths of the tables that were packed. They are still read by these paths.

    Raises
    ------
    UserError
        If the tables are of several machines, or if one of them is damaged.

    Notes
    -----
    Existing packs are not changed. First, new packs are written under new names. Then
    the file of stamps, which lists the packs and their tables, is exchanged. At last,
    the loose files are removed. A crash at any moment leaves each table readable, and
    the next call completes what was begun.

    A table whose text could not be restored from a pack byte for byte stays loose.
    """
    machines = machines_in(folder)
    if len(machines) > 1:
        names = " and ".join(sorted(machines))
        raise UserError(f"{folder}: tables of {names}: give each its folder")
    with files.writing_in(folder):
        # Complete what an earlier call has begun, if it was killed.
        _remove_replaced(folder)
        # All packed tables by name: those of existing packs, and then the new ones.
        parts = packed(folder)
        packed_now: list[Path] = []
        for new_pack, tables in _tables_to_pack(folder).items():
            new_parts = _write_pack(folder, new_pack.schema, new_pack.header, tables)
            parts = {**parts, **new_parts}
            packed_now += tables.keys()
        # Without a new pack, the file of stamps stays as it is.
        if packed_now:
            # The new packs are on the disk. They are listed in the file of stamps, and only
            # then do the loose files go.
            _write_stamps_file(folder / STAMPS, parts)
            _remove_replaced(folder)
    return sorted(packed_now)


class _NewPack(NamedTuple):
    """What tables have in common that go into one new pack.

    Attributes
    ----------
    schema : str
        The schema of the tables.
    header : str
        Their first line.
    number : int
        What tells packs of one schema and header apart. There may be several, because a
        pack must not become too large.
    """

    schema: str
    header: str
    number: int


def _tables_to_pack(folder: Path) -> dict[_NewPack, dict[Path, list[str]]]:
    """Return which loose tables of a folder go into which new pack.

    For each new pack, the result has the lines of its tables by the path of the table. The
    header is not among these lines, because a pack has one header for all of its tables.
    """
    new_packs: dict[_NewPack, dict[Path, list[str]]] = defaultdict(dict)
    characters_so_far = 0
    for path in list_tables(folder):
        # A table that is in a pack already is listed, too, but is no file.
        is_loose = path.exists()
        # Only a stamp says which schema a table has.
        if not is_loose or not is_stamped(path):
            continue
        text, stamp = _text_of(path)
        header, *rows = text.splitlines()
        # A table with other line ends than a newline could not be restored byte for
        # byte, and stays loose.
        if "\n".join([header, *rows, ""]) != text:
            continue
        # Characters are counted over all tables of the folder, whatever their schemas.
        # Beyond each multiple of MOST_PACK_CHARACTERS, tables go into new packs, which
        # limits the size of a pack. In a pack, each row begins with the name of its table,
        # which counts, too.
        characters_so_far += len(text) + len(rows) * len(f"{path.name},")
        number = characters_so_far // MOST_PACK_CHARACTERS
        new_pack = _NewPack(stamp["schema"], header, number)
        new_packs[new_pack][path] = rows
    return new_packs


def _text_of(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a loose table, and its stamp."""
    data, stamp = _verified(path)
    return files.text_of(data, path), stamp


def _write_pack(
    folder: Path, kind: str, header: str, tables: dict[Path, list[str]]
) -> dict[str, Part]:
    """Write tables of one schema and header as a new pack, a file of many tables.

    ``kind`` is the schema, and ``tables`` has the lines of each table by its path,
    without the header. Returns the packed tables by their names. Each keeps its stamp,
    which says where its rows come from. The files of the tables stay for the time being.
    """
    pack_path = _free_pack_path(folder, kind)
    pack_data = _pack_data(header, tables, pack_path)
    files.atomic_write(pack_path, pack_data)
    pack_sha256 = _sha256(pack_data)
    parts = {}
    for path in tables:
        # ``tables`` has neither the stamp nor the whole text, so the file of the table is
        # read again for its stamp and for the hash of its text.
        table_text, stamp = _text_of(path)
        text_sha256 = _sha256(table_text.encode())
        parts[path.name] = Part(
            pack=pack_path,
            pack_sha256=pack_sha256,
            stamp=stamp,
            text_sha256=text_sha256,
        )
    return parts


def _pack_data(header: str, tables: dict[Path, list[str]], pack: Path) -> bytes:
    """Return the content of a pack: the CSV of all rows of its tables, compressed.

    Each row begins with the name of its table, in the column "part". ``tables`` has the
    lines of each table by its path, without the ``header``. ``pack`` is the path of the pack.
    """
    lines = [f"part,{header}"]
    for path, rows in tables.items():
        lines += [f"{path.name},{row}" for row in rows]
    text = "\n".join([*lines, ""])
    # The path of a pack ends in ".gz", so `bytes_of` compresses the text.
    return files.bytes_of(text, pack)


def _free_pack_path(folder: Path, kind: str) -> Path:
    """Return the first of KIND.csv.gz, KIND.2.csv.gz and so on that does not exist.

    These are the names of the packs of the schema ``kind`` in a folder.
    """
    path = folder / f"{kind}.csv.gz"
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{kind}.{number}.csv.gz"
    return path


def _write_stamps_file(path: Path, parts: dict[str, Part]) -> None:
    """Write the file of stamps: a line for each pack with its hash, then one for each part.

    ``path`` is the file, and ``parts`` are the packed tables by their names. A part is a
    table in a pack, and its line has its stamp.
    """
    pack_sha256 = {part.pack.name: part.pack_sha256 for part in parts.values()}
    entries: list[dict[str, Any]] = []
    for name, sha256 in sorted(pack_sha256.items()):
        entries.append({"pack": name, "sha256": sha256})
    # Parts are ordered by their pack, and within a pack by name.
    for name, part in sorted(parts.items(), key=lambda item: (item[1].pack, item[0])):
        entries.append(
            {
                "part": name,
                "pack": part.pack.name,
                "stamp": part.stamp,
                "text_sha256": part.text_sha256,
            }
        )
    lines = [json.dumps(entry) + "\n" for entry in entries]
    files.atomic_write_text(path, "".join(lines))


def _remove_replaced(folder: Path) -> None:
    """Remove packs that the file of stamps does not list, and loose files of packed tables.

    A call of `pack` that was killed may have left either of them. A loose file is a file
    of one table alone.
    """
    parts = packed(folder)
    # The packs that the file of stamps lists.
    listed = {part.pack.name for part in parts.values()}
    for path in folder.glob("*.csv.gz"):
        # A file with a stamp of its own is a loose table, whatever its name.
        if path.name not in listed and is_pack(path.name) and not is_stamped(path):
            path.unlink()
    for name, part in parts.items():
        path = folder / name
        if path.exists():
            _, stamp = _verified(path)
            # If the table was saved again after packing, its stamp differs from the packed
            # one. It is newer than the packed table, and stays.
            if stamp != part.stamp:
                continue
        # The table goes first, because a stamp without its table misleads nobody. If an
        # earlier call was killed after removing the table, only the stamp is left to remove.
        path.unlink(missing_ok=True)
        _stamp_path(path).unlink(missing_ok=True)
