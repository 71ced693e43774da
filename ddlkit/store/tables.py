"""Recorded tables: a CSV with a JSON stamp that says where its rows come from, by itself or in a pack.

A pack, ``layers.csv.gz``, has the raw lines of a folder's tables of a kind behind a first column ``part``,
their names; ``stamps.jsonl`` has the packs' hashes and the parts' stamps. A path names a table wherever its
rows are: a loose one, ``layers-x.csv`` with ``layers-x.json``, is the later one and counts.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import fnmatch
import functools
import gzip
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.store import files
from ddlkit.store import machine as this_machine
from ddlkit.store.files import parse_json
from ddlkit.store.sheet import SCHEMAS, Column, schema_named, write_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

BENCHMARK_VERSION = 1
"""Of what a recorded number means: rows of two versions do not mix in one table."""
STAMPS = "stamps.jsonl"  # of what is packed in a folder
PART = Column("part", "str", "named")
MOST_PACK_CHARACTERS = 16 * 1024**2
"""Of a pack's text: with two characters a cell and more it stays below `sheet.MOST_CELLS`."""

_STAMP_KEYS = {
    **{
        "schema": str,
        "benchmark_version": int,
        "command": list,
        "machine": dict,
        "versions": dict,
    },
    **{"commit": str, "time": str, "rows": int, "sha256": str},
}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def save_table(
    frame: DataFrame,
    directory: Path,
    name: str,
    *,
    schema: str,
    command: Sequence[str],
    machine: Mapping[str, Any] | None = None,
    remark: str = "",
    append: bool = False,
) -> Path:
    """Write ``directory/name.csv`` (.csv.gz if so named) and its stamp ``name.json``; return the CSV's path.

    Rows are checked before anything is written; a crash at any moment leaves the old or the new table.
    append : below the table that is there, whose stamps are kept under ``history``
    machine : what ``ddlkit.store.machine.describe`` says, unless given
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
            data = gzip.compress(
                data, mtime=0
            )  # no time inside: equal rows, equal hash
        stamp = {
            "schema": schema,
            "benchmark_version": BENCHMARK_VERSION,
            "command": [_portable(word) for word in command],
            "machine": described,
            "versions": this_machine.versions(),
            "commit": _commit(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(
                timespec="seconds"
            ),
            "remark": remark,
            "rows": len(frame),
            "sha256": _sha256(data),
            "history": history,
        }
        with contextlib.suppress(
            UserError
        ):  # of what is not there, or damaged, nothing is kept
            stamp["replaces"] = _verified(path)[1]
        try:
            files.atomic_write_text(
                _stamp_path(path), json.dumps(stamp, indent=1) + "\n"
            )
            files.atomic_write(path, data)
        finally:
            if not path.exists():
                _stamp_path(path).unlink(missing_ok=True)
    return path


_commit = functools.cache(
    this_machine.commit
)  # of the code that this process has loaded


def _portable(word: str) -> str:
    """Return a word of a command without what is only true here: where the project and its tools lie."""
    word = word.replace(f"{Path.cwd()}/", "")  # a path may stand inside other text
    outside = re.fullmatch(r"(--[\w-]+=)?((?:/|\.\./).*)", word)
    return f"{outside[1] or ''}{Path(outside[2]).name}" if outside else word


def _below(
    new: DataFrame, path: Path, schema: str
) -> tuple[DataFrame, list[dict[str, Any]]]:
    """Return the recorded rows with ``new`` below them, and all stamps so far."""
    from pandas import concat

    old, stamp = load_table(path, schema), load_stamp(path)
    if stamp["benchmark_version"] != BENCHMARK_VERSION:
        versions = f"benchmark version {stamp['benchmark_version']}, this is {BENCHMARK_VERSION}"
        raise UserError(f"{path}: recorded by {versions}: save under a new name")
    kind = schema_named(schema)
    # Columns that came later stand in the rows that were read; those of a new frame may lack them.
    whole = kind.read(write_sheet(new, kind, str(path)), str(path))
    return concat([old, whole], ignore_index=True), [*stamp.pop("history", []), stamp]


def own_output(path: Path, *sources: Path) -> Path:
    """Return the path itself; refuse one where a recorded table, its stamp, or one of the sources lies."""
    if os.path.isdir(path) or not path.name:
        raise UserError(f"{path} is a directory: name a file")
    real = path.resolve()
    if any(real == source.resolve() for source in sources):
        raise UserError(
            f"{path} is what is read: choose another name for what is written"
        )
    stamp = real.suffix == ".json" and os.path.isfile(real) and _read_stamp(real)
    if stamp or is_stamped(real) or is_pack(real.name) and packed(real.parent):
        raise UserError(f"{path} is a recorded table or its stamp: choose another name")
    return path


def load_table(path: Path, schema: str | None = None) -> DataFrame:
    """Return the rows of a recorded table, verified against its stamp and schema."""
    part = _part_of(path)
    data, stamp = (b"", part.stamp) if part else _verified(path)
    kind = stamp["schema"]
    if schema not in (None, kind):
        raise UserError(f"{path}: a table of {kind}, expected one of {schema}")
    if part:
        rows, slices = _rows(part.pack, part.pack_sha256, kind, *_state(part.pack))
        frame = rows.iloc[slices.get(path.name, slice(0))]
        frame.index = range(len(frame))  # a fifth of the time of reset_index
    else:
        frame = schema_named(kind).read(files.text_of(data, path), str(path))
    if len(frame) != stamp["rows"]:
        raise UserError(
            f"{path}: {len(frame)} rows, its stamp says {stamp['rows']}: restore it"
        )
    return frame


def load_stamp(path: Path) -> dict[str, Any]:
    """Return the recorded table's own stamp, once its hash, or that of the pack it is in, is verified."""
    part = _part_of(path)
    if part is None:
        return _verified(path)[1]
    _pack_text(part.pack, part.pack_sha256, *_state(part.pack))
    return copy.deepcopy(part.stamp)


def is_stamped(path: Path) -> bool:
    """Return whether it is a recorded table, with a stamp (a user's own CSV has none)."""
    return bool(_read_stamp(_stamp_path(path)) or _part_of(path))


def has_table(path: Path) -> bool:
    """Return whether there is a table of this path, loose or in a pack."""
    return path.exists() or _part_of(path) is not None


def list_tables(folder: Path, pattern: str = "*.csv*") -> list[Path]:
    """Return sorted paths of a folder's tables, packed or loose; of folders below only if in ``pattern``."""
    above, _, name = pattern.rpartition("/")
    tables = set()
    for place in folder.glob(above) if above else [folder]:
        loose = {path.name for path in place.glob(name) if path.name[0] != "."}
        there = {table for table in loose if not is_pack(table)}
        tables |= {
            place / table for table in there.union(fnmatch.filter(packed(place), name))
        }
    return sorted(tables)


def expand_tables(paths: list[Path]) -> list[Path]:
    """Return the paths, of which patterns that no shell could expand, packed tables, give what they match."""
    expanded = []
    for path in paths:
        tables = (
            list_tables(path.parent, path.name)
            if re.search(r"[*?[]", path.name)
            else []
        )
        expanded += tables or [path]
    return expanded


def machines_in(folder: Path) -> set[str]:
    """Return the names of the machines whose tables a folder holds, loose or packed: one, or none."""
    stamps = [part.stamp for part in packed(folder).values()]
    paths = (path for path in list_tables(folder) if path.exists())
    loose = [_read_stamp(_stamp_path(path)) for path in paths]
    return {
        str(stamp["machine"].get("name", "")) for stamp in (*stamps, *loose) if stamp
    }


def _stamp_path(path: Path) -> Path:
    """Return the path of a loose table's stamp: name.json beside name.csv or name.csv.gz."""
    return path.parent / f"{path.name.removesuffix('.gz').removesuffix('.csv')}.json"


def _read_stamp(path: Path) -> dict[str, Any] | None:
    """Return the stamp in that file; None when there is none, or the file is empty or some other JSON."""
    try:
        stamp = (
            parse_json(files.read(path).decode() or "null")
            if os.path.lexists(path)
            else None
        )
    except ValueError as error:
        raise UserError(f"{path}: damaged stamp ({error}): restore it") from error
    return (
        _stamp(stamp, path) if isinstance(stamp, dict) and "sha256" in stamp else None
    )


def _stamp(stamp: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the stamp itself, which has all that it must."""
    for key, kind in _STAMP_KEYS.items():
        if not isinstance(stamp.get(key), kind):
            raise UserError(
                f"{path}: damaged stamp (its {key} is no {kind.__name__}): restore it"
            )
    return stamp


def _verified(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of a loose CSV and the stamp that matches them: until it is exchanged the one before.

    A writer may have exchanged all since the CSV was read: only one that is still the same was damaged.
    """
    before, expected = None, ""
    while (data := files.read(path)) != before:
        before, stamp = data, _read_stamp(_stamp_path(path))
        if stamp is None:
            raise UserError(
                f"{path}: not a recorded table: no stamp {_stamp_path(path).name}"
            )
        either: list[dict[str, Any]] = [stamp, stamp.pop("replaces", stamp)]
        for each in either:
            if each["sha256"] == _sha256(data):
                return data, each
        expected = stamp["sha256"][:12]
    digests = f"sha256 {_sha256(data)[:12]} differs from its stamp's {expected}"
    advice = "the file was changed after recording, restore it or measure again"
    raise UserError(f"{path}: {digests}: {advice}")


class Part(NamedTuple):
    """A table in a pack; SHA-256 of the pack's file, and of the table's text."""

    pack: Path
    pack_sha256: str
    stamp: dict[str, Any]
    text_sha256: str


def is_pack(name: str) -> bool:
    """Return whether a file of this name is a pack, KIND.csv.gz or KIND.2.csv.gz, or the stamps of packs."""
    kind, _, rest = name.partition(".")
    return name == STAMPS or (
        kind in SCHEMAS and bool(re.fullmatch(r"(\d+\.)?csv\.gz", rest))
    )


def packed(folder: Path) -> dict[str, Part]:
    """Return what is packed in a folder by the tables' names."""
    state = _state(folder / STAMPS)
    return _read_index(folder / STAMPS, *state) if state else {}


def _part_of(path: Path) -> Part | None:
    """Return the packed table of this path; None where a file is there, or no table."""
    return None if os.path.lexists(path) else packed(path.parent).get(path.name)


def _state(path: Path) -> tuple[int, ...]:
    """Return what differs when a file is another one, () where there is none: a key of caches."""
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
            if "part" in entry:
                stamp = _stamp(entry["stamp"], path)
                pack_of, text_sha256 = (
                    entry["pack"],
                    entry.get("text_sha256", stamp["sha256"]),
                )
                part = Part(path.parent / pack_of, sums[pack_of], stamp, text_sha256)
                parts[str(entry["part"])] = part
            else:
                sums[entry["pack"]] = str(entry["sha256"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(
                f"{path}: damaged line {number} ({error}): restore it"
            ) from error
    return parts


@functools.lru_cache(maxsize=256)
def _rows(
    path: Path, sha256: str, kind: str, *state: int
) -> tuple[DataFrame, dict[str, slice]]:
    """Return all rows of a pack, their values checked, and which of them are each part's, by name.

    That no two agree in their key was checked when they were saved: they are the same, says the hash.
    """
    schema = schema_named(kind)
    schema = replace(schema, columns=(PART, *schema.columns), key=())
    frame = schema.read(_pack_text(path, sha256, *state), str(path))
    names = frame["part"].to_numpy(object)
    starts = np.flatnonzero(np.r_[True, names[1:] != names[:-1]])
    ends = [*starts[1:], len(names)]
    slices = {names[at]: slice(at, end) for at, end in zip(starts, ends, strict=True)}
    return frame.iloc[:, 1:], slices


@functools.lru_cache(maxsize=16)
def _pack_text(path: Path, sha256: str, *_state: int) -> str:
    """Return the text of a pack of this hash."""
    data = files.read(path)
    if (digest := _sha256(data)) != sha256:
        problem = f"sha256 {digest[:12]} differs from {sha256[:12]} in {STAMPS}"
        raise UserError(f"{path}: {problem}: changed after packing, restore it")
    return files.text_of(data, path)


def pack(folder: Path) -> list[Path]:
    """Pack the loose recorded tables of a folder; return their paths, by which they are read as before.

    New packs get new names; then the stamps are exchanged, which say what counts; then what is packed goes:
    a crash at any moment leaves each table readable. One that could not be cut out byte for byte stays loose.
    """
    if len(names := machines_in(folder)) > 1:
        raise UserError(
            f"{folder}: tables of {' and '.join(sorted(names))}: give each its folder"
        )
    with files.writing_in(folder):
        _remove_replaced(folder)
        parts, paths = packed(folder), []
        bins: dict[tuple[str, str, int], dict[Path, list[str]]] = defaultdict(dict)
        size = 0
        for path in filter(is_stamped, filter(Path.exists, list_tables(folder))):
            text, stamp = _text_of(path)
            header, *rows = text.splitlines()
            if "\n".join([header, *rows, ""]) == text:
                paths.append(path)
                size += len(text) + len(rows) * (len(path.name) + 1)
                bins[stamp["schema"], header, size // MOST_PACK_CHARACTERS][path] = rows
        for (kind, header, _), tables in bins.items():
            parts = parts | _write_pack(folder, kind, header, tables)
        if paths:
            _write_index(folder / STAMPS, parts)
            _remove_replaced(folder)
    return paths


def _text_of(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a loose table, and its stamp."""
    data, stamp = _verified(path)
    return files.text_of(data, path), stamp


def _write_pack(
    folder: Path, kind: str, header: str, tables: dict[Path, list[str]]
) -> dict[str, Part]:
    """Write the rows of these tables, of one kind and header, as a pack; return its parts."""
    names = (
        f"{kind}{number}.csv.gz"
        for number in ("", *(f".{n}" for n in range(2, 10_000)))
    )
    pack_path = next(folder / name for name in names if not (folder / name).exists())
    lines = [f"{path.name},{row}" for path, rows in tables.items() for row in rows]
    data = gzip.compress("\n".join([f"part,{header}", *lines, ""]).encode(), mtime=0)
    files.atomic_write(pack_path, data)
    parts = {}
    for path in tables:
        text, stamp = _text_of(path)
        parts[path.name] = Part(pack_path, _sha256(data), stamp, _sha256(text.encode()))
    return parts


def _write_index(path: Path, parts: dict[str, Part]) -> None:
    """Write a line for each pack, with its hash, then one for each part."""
    sums = {part.pack.name: part.pack_sha256 for part in parts.values()}
    lines: list[dict[str, Any]] = [
        {"pack": name, "sha256": sums[name]} for name in sorted(sums)
    ]
    for name, part in sorted(parts.items(), key=lambda item: (item[1].pack, item[0])):
        line = {"part": name, "pack": part.pack.name, "stamp": part.stamp}
        lines.append({**line, "text_sha256": part.text_sha256})
    files.atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def _remove_replaced(folder: Path) -> None:
    """Remove packs that no stamp counts, and loose tables that are packed: a killed call may leave both."""
    parts = packed(folder)
    listed = {STAMPS, *(part.pack.name for part in parts.values())}
    for path in folder.glob("*.csv.gz"):
        if path.name not in listed and is_pack(path.name) and not is_stamped(path):
            path.unlink()
    for name, part in parts.items():
        path = folder / name
        if not path.exists() or _verified(path)[1] == part.stamp:
            path.unlink(
                missing_ok=True
            )  # the stamp last: without its table it misleads nobody
            _stamp_path(path).unlink(missing_ok=True)
