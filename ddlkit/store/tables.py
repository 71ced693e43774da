"""Recorded tables: a CSV with a JSON stamp that says where its rows come from, by itself or in a pack.

A measurement writes both loose, ``layers-x.csv`` and ``layers-x.json``. A pack (`ddlkit.store.pack`) holds
such tables of a folder by kind: ``layers.csv.gz`` has their raw lines behind a first column ``part``, the
name of the table, and ``stamps.jsonl`` has the hash of each pack and the stamp of each part. A path names
a table wherever its rows are; where they are in both, the loose table counts, which is the later one.
"""

from __future__ import annotations

import copy
import datetime
import fnmatch
import functools
import gzip
import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlkit import machine as this_machine
from ddlkit.core.errors import UserError
from ddlkit.store import files
from ddlkit.store.files import ROOT, parse_json
from ddlkit.store.sheet import SCHEMAS, Column, schema_named, write_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

# Raise it whenever what a recorded number means changes: such rows do not mix in one table.
BENCHMARK_VERSION = 1

STAMPS = "stamps.jsonl"  # of what is packed in a folder
PART = Column("part", "str", "named")

_STAMP_KEYS = {
    **{"schema": str, "benchmark_version": int, "command": list, "machine": dict, "versions": dict},
    **{"commit": str, "time": str, "rows": int, "sha256": str},
}


def save_table(
    frame: DataFrame,
    directory: Path,
    name: str,
    *,
    schema: str,
    command: list[str],
    machine: dict[str, Any] | None = None,
    remark: str = "",
    append: bool = False,
) -> Path:
    """Write ``directory/name.csv`` (.csv.gz if so named) and its stamp ``name.json``; return the CSV's path.

    Rows are checked before anything is written; a crash at any moment leaves the old or the new table.
    append : verify the table that is there, add the rows below it, keep its stamps under ``history``
    machine : what ``ddlkit.machine.describe`` says, unless given
    remark : what a reader must know of how the rows came about, for the stamp

    Raises UserError for rows against the schema, a damaged old table, or a read-only directory.
    """
    path = directory / (name if name.endswith((".csv", ".csv.gz")) else f"{name}.csv")
    described = this_machine.describe() if machine is None else machine
    with files.writing_in(directory):
        if is_pack(path.name):
            raise UserError(f"{path} is a pack of tables: save under another name")
        history: list[dict[str, Any]] = []
        if append and has_table(path):
            frame, history = _below(frame, path, schema)
        data = write_sheet(frame, schema_named(schema), str(path)).encode()
        if path.suffix == ".gz":
            data = gzip.compress(data, mtime=0)  # no time inside: equal rows, equal hash
        stamp = {
            "schema": schema,
            "benchmark_version": BENCHMARK_VERSION,
            "command": [_portable(word) for word in command],
            "machine": described,
            "versions": this_machine.versions(),
            "commit": _commit(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "remark": remark,
            "rows": len(frame),
            "sha256": hashlib.sha256(data).hexdigest(),
            "history": history,
        }
        _write_stamped(path, data, stamp_text(stamp))
    return path


@functools.cache
def _commit() -> str:
    """Return the commit of the code that this process has loaded: asking git takes longer than saving."""
    return this_machine.commit()


def stamp_text(stamp: dict[str, Any]) -> str:
    """Return a loose table's stamp as its file has it."""
    return json.dumps(stamp, indent=1) + "\n"


def _write_stamped(path: Path, data: bytes, stamp: str) -> None:
    """Write a table and its stamp, so that a crash at any moment leaves the old pair or the new one."""
    pending, final = stamp_paths(path)
    try:
        files.atomic_write_text(pending, stamp)
        files.atomic_write(path, data)
        files.replace(pending, final)
    except BaseException:  # also where the process is ended just now
        if pending.exists():  # the table says which pair it is
            if path.exists() and files.read(path) == data:
                files.replace(pending, final)
            else:
                pending.unlink()
        raise


def load_table(path: Path, schema: str | None = None) -> DataFrame:
    """Return the rows of a recorded table, verified against its stamp and schema.

    Raises UserError naming the file, and row and column where there is one, for a missing stamp,
    another hash or schema, an empty, truncated or binary file, a missing column, or a wrong value.
    """
    part = _part_of(path)
    data, stamp = (b"", part.stamp) if part else verified(path)
    if schema is not None and stamp["schema"] != schema:
        raise UserError(f"{path}: a table of {stamp['schema']}, expected one of {schema}")
    if part:
        frame = _rows_in(part, path.name)
    else:
        frame = schema_named(stamp["schema"]).read(files.text_of(data, path), str(path))
    if len(frame) != stamp["rows"]:
        raise UserError(f"{path}: {len(frame)} rows, its stamp says {stamp['rows']}: restore it")
    return frame


def load_stamp(path: Path) -> dict[str, Any]:
    """Return the stamp of a recorded table, its hash verified. Raises UserError as ``load_table``."""
    part = _part_of(path)
    if part is None:
        return verified(path)[1]
    pack_bytes(part)
    return copy.deepcopy(part.stamp)


def is_stamped(path: Path) -> bool:
    """Return whether it is a recorded table, with a stamp (a user's own CSV has none).

    An empty file is none: no writer leaves one, but a shell does that is to fill it with our output.
    """
    return any(map(_read_stamp, stamp_paths(path))) or _part_of(path) is not None


def has_table(path: Path) -> bool:
    """Return whether there is a table of this path, loose or in a pack."""
    return path.exists() or _part_of(path) is not None


def list_tables(folder: Path, pattern: str = "*.csv*") -> list[Path]:
    """Return the paths, sorted, that match a pattern below a folder, of packed tables and of files.

    Packs and their stamps are none of them. Raises UserError for damaged stamps.
    """
    above, _, name = pattern.rpartition("/")
    tables = set()
    for place in folder.glob(above) if above else [folder]:
        parts = packed(place)
        loose = (path.name for path in place.glob(name) if path.name[0] != ".")
        there = {table for table in loose if not is_pack(table)}
        tables |= {place / table for table in there.union(fnmatch.filter(parts, name))}
    return sorted(tables)


def is_pack(name: str) -> bool:
    """Return whether a file of this name is a pack, KIND.csv.gz or KIND.2.csv.gz, or the stamps of packs."""
    kind, _, rest = name.partition(".")
    return name == STAMPS or (kind in SCHEMAS and bool(re.fullmatch(r"(\d+\.)?csv\.gz", rest)))


def expand_tables(paths: list[Path]) -> list[Path]:
    """Return the paths, of which patterns that no shell could expand, packed tables, give what they match."""
    expanded = []
    for path in paths:
        expanded += (re.search(r"[*?[]", path.name) and list_tables(path.parent, path.name)) or [
            path
        ]
    return expanded


def machines_in(folder: Path) -> set[str]:
    """Return the names of the machines whose tables a folder holds, loose or packed: one, or none."""
    stamps = [part.stamp for part in packed(folder).values()]
    paths = (path for path in list_tables(folder) if path.exists())
    loose = [_read_stamp(place) for path in paths for place in stamp_paths(path)]
    return {str(stamp["machine"].get("name", "")) for stamp in (*stamps, *loose) if stamp}


def own_output(path: Path, *sources: Path) -> Path:
    """Return the path itself, as one that a user's own output may be written to.

    Raises UserError where a recorded table or its stamp is in the way, or a file that the output is made of.
    """
    if os.path.isdir(path) or not path.name:
        raise UserError(f"{path} is a directory: name a file")
    for source in sources:
        same = os.path.exists(path) and os.path.samefile(path, source)
        if same or path.resolve() == source.resolve():
            raise UserError(f"{path} is what is read: choose another name for what is written")
    real = path.resolve()
    of_pack = is_pack(real.name) and packed(real.parent)
    if of_pack or is_stamped(real) or _is_stamp(real):
        raise UserError(f"{path} is a recorded table or its stamp: choose another name")
    return path


def _is_stamp(path: Path) -> bool:
    """Return whether it is the stamp of a table, or waits to become it."""
    return path.suffix in (".json", ".pending") and os.path.isfile(path) and bool(_read_stamp(path))


def _portable(word: str) -> str:
    """Return a word of a command without what is only true here: where the project and its tools lie."""
    word = word.replace(f"{ROOT}/", "")  # a path may stand inside other text
    outside = re.fullmatch(r"(--[\w-]+=)?((?:/|\.\./).*)", word)
    return f"{outside[1] or ''}{Path(outside[2]).name}" if outside else word


def _below(new: DataFrame, path: Path, schema: str) -> tuple[DataFrame, list[dict[str, Any]]]:
    """Return the recorded rows with ``new`` below them, and all stamps so far."""
    from pandas import concat

    old, stamp = load_table(path, schema), load_stamp(path)
    if stamp["benchmark_version"] != BENCHMARK_VERSION:
        raise UserError(
            f"{path}: recorded by benchmark version {stamp['benchmark_version']}, this is "
            f"{BENCHMARK_VERSION}: the rows do not mix, save under a new name"
        )
    earlier = stamp.pop("history", [])
    known = schema_named(schema)
    # Columns that came later stand in the rows that were read; those of a new frame may lack them.
    whole = known.read(write_sheet(new, known, str(path)), str(path))
    return concat([old, whole], ignore_index=True), [*earlier, stamp]


# -- loose tables ----------------------------------------------------------------------------------


def stamp_paths(path: Path) -> tuple[Path, Path]:
    """Return where the next stamp waits while the CSV is exchanged, and where the stamp stands."""
    stem = path.name.removesuffix(".gz").removesuffix(".csv")
    return path.parent / f".{stem}.json.pending", path.parent / f"{stem}.json"


def _read_stamp(path: Path) -> dict[str, Any] | None:
    """Return the stamp in that file; None when there is none, or the file is empty or some other JSON."""
    try:
        stamp = parse_json(files.read(path).decode() or "null")
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except ValueError as error:
        raise UserError(f"{path}: damaged stamp ({error}): restore it or measure again") from error
    return _stamp(stamp, path) if isinstance(stamp, dict) and "sha256" in stamp else None


def _stamp(stamp: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the stamp itself. Raises UserError where it lacks something."""
    for key, kind in _STAMP_KEYS.items():
        if key not in stamp:
            raise UserError(f"{path}: the stamp has no {key}: restore it or measure again")
        if not isinstance(stamp[key], kind):
            damage = f"{key} is no {kind.__name__}"
            raise UserError(f"{path}: damaged stamp ({damage}): restore it or measure again")
    return stamp


def verified(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of a loose CSV and the stamp that matches them.

    After a crash between the two renames it is the pending one; looking there first also serves a
    reader that comes while a writer renames. Where none matches, a writer may have exchanged all since the
    CSV was read: only one that is still the same has been damaged.
    """
    before = found = None
    while (data := files.read(path)) != before:
        digest, before = hashlib.sha256(data).hexdigest(), data
        for place in stamp_paths(path):
            stamp = _read_stamp(place)
            if stamp is not None and stamp["sha256"] == digest:
                return data, stamp
            found = stamp or found
    if found is None:
        raise UserError(f"{path}: not a recorded table: no stamp {stamp_paths(path)[1].name}")
    raise UserError(
        f"{path}: sha256 {digest[:12]} differs from its stamp's {found['sha256'][:12]}: "
        "the file was changed after recording, restore it or measure again"
    )


# -- packed tables ---------------------------------------------------------------------------------


class Part(NamedTuple):
    """A table in a pack: the pack, its SHA-256, the table's stamp, and the SHA-256 of its text."""

    pack: Path
    pack_sha256: str
    stamp: dict[str, Any]
    text_sha256: str


def packed(folder: Path) -> dict[str, Part]:
    """Return what is packed in a folder by the tables' names. Raises UserError for damaged stamps."""
    state = _state(folder / STAMPS)
    return _read_index(folder / STAMPS, *state) if state else {}


def _state(path: Path) -> tuple[int, ...]:
    """Return what differs when a file is another one, () where there is none."""
    try:
        state = path.stat()
    except OSError:
        return ()
    return state.st_mtime_ns, state.st_size, state.st_ino


@functools.lru_cache(maxsize=256)
def _read_index(path: Path, *_state: int) -> dict[str, Part]:
    """Return the parts by name in a file of stamps, which begins with a line for each pack."""
    sums: dict[str, str] = {}
    parts = {}
    for number, line in enumerate(files.read_text(path).splitlines(), 1):
        try:
            entry = json.loads(line)
            if "part" not in entry:
                sums[entry["pack"]] = str(entry["sha256"])
                continue
            stamp = _stamp(entry["stamp"], path)
            text_sha256 = str(entry.get("text_sha256", stamp["sha256"]))
            pack = path.parent / entry["pack"]
            parts[str(entry["part"])] = Part(pack, sums[entry["pack"]], stamp, text_sha256)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{path}: damaged line {number} ({error}): restore it") from error
    return parts


def _part_of(path: Path) -> Part | None:
    """Return the packed table of this path; None where a file is there, or no table."""
    return None if os.path.lexists(path) else packed(path.parent).get(path.name)


def pack_bytes(part: Part) -> bytes:
    """Return the content of the part's pack, verified. Raises UserError for another hash."""
    return _read_pack(part.pack, part.pack_sha256, *_state(part.pack))


@functools.lru_cache(maxsize=64)
def _read_pack(path: Path, sha256: str, *state: int) -> bytes:
    if not state:
        raise UserError(f"{path} is missing, of which {STAMPS} has the stamps: restore it")
    data = files.read(path)
    digest = hashlib.sha256(data).hexdigest()
    if digest != sha256:
        problem = f"sha256 {digest[:12]} differs from {sha256[:12]} in {STAMPS}"
        raise UserError(f"{path}: {problem}: the file was changed after packing, restore it")
    return data


@functools.lru_cache(maxsize=256)
def _rows(pack: Path, sha256: str, kind: str, *state: int) -> tuple[DataFrame, dict[str, slice]]:
    """Return all rows of a pack, their values checked, and which of them are each part's, by name.

    That no two agree in their key was checked when they were saved: they are the same, says the hash.
    """
    schema = schema_named(kind)
    schema = replace(schema, columns=(PART, *schema.columns), key=())
    frame = schema.read(files.text_of(_read_pack(pack, sha256, *state), pack), str(pack))
    names = frame["part"].to_numpy(object)
    starts = np.flatnonzero(np.r_[True, names[1:] != names[:-1]])
    ends = [*starts[1:], len(names)]
    slices = {names[at]: slice(at, end) for at, end in zip(starts, ends, strict=True)}
    return frame.iloc[:, 1:], slices


def _rows_in(part: Part, name: str) -> DataFrame:
    state = _state(part.pack)
    frame, slices = _rows(part.pack, part.pack_sha256, part.stamp["schema"], *state)
    if name not in slices:
        raise UserError(f"{part.pack}: has no rows of {name}, which {STAMPS} lists: restore it")
    rows = frame.iloc[slices[name]]
    rows.index = range(len(rows))
    return rows
