"""Recorded tables: a CSV, and beside it a JSON stamp saying where its rows come from."""

from __future__ import annotations

import datetime
import gzip
import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlkit import machine as this_machine
from ddlkit.core.errors import UserError
from ddlkit.store import files
from ddlkit.store.documents import parse_json
from ddlkit.store.files import ROOT
from ddlkit.store.sheet import read_sheet, schema_named, write_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

# Raise it whenever what a recorded number means changes: such rows do not mix in one table.
BENCHMARK_VERSION = 1

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
    """Write ``directory/name.csv`` (.csv.gz if so named) and its stamp ``name.json``; the CSV's path.

    Rows are checked before anything is written; a crash at any moment leaves the old or the new table.
    append : verify the table that is there, add the rows below it, keep its stamps under ``history``
    machine : what ``ddlkit.machine.describe`` says, unless given
    remark : what a reader must know of how the rows came about, for the stamp

    Raises UserError for rows against the schema, a damaged old table, or a read-only directory.
    """
    path = directory / (name if name.endswith((".csv", ".csv.gz")) else f"{name}.csv")
    described = this_machine.describe() if machine is None else machine
    with files.writing_in(directory):
        history: list[dict[str, Any]] = []
        if append and path.exists():
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
            "commit": this_machine.commit(),
            "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "remark": remark,
            "rows": len(frame),
            "sha256": hashlib.sha256(data).hexdigest(),
            "history": history,
        }
        _write_stamped(path, data, json.dumps(stamp, indent=1) + "\n")
    return path


def _write_stamped(path: Path, data: bytes, stamp: str) -> None:
    """A table and its stamp, so that a crash at any moment leaves the old pair or the new one."""
    pending, final = _stamp_paths(path)
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
    """The rows of a recorded table, verified against its stamp and schema.

    Raises UserError naming the file, and row and column where there is one, for a missing stamp,
    another hash or schema, an empty, truncated or binary file, a missing column, or a wrong value.
    """
    data, stamp = _verified(path)
    if schema is not None and stamp["schema"] != schema:
        raise UserError(f"{path}: a table of {stamp['schema']}, expected one of {schema}")
    frame = schema_named(stamp["schema"]).frame(read_sheet(files.text_of(data, path), str(path)))
    if len(frame) != stamp["rows"]:
        raise UserError(f"{path}: {len(frame)} rows, its stamp says {stamp['rows']}: restore it")
    return frame


def load_stamp(path: Path) -> dict[str, Any]:
    """The stamp of a recorded table, its hash verified. Raises UserError as ``load_table``."""
    return _verified(path)[1]


def is_stamped(path: Path) -> bool:
    """Whether a stamp lies beside the file (a user's own CSV has none).

    An empty file is none: no writer leaves one, but a shell does that is to fill it with our output.
    """
    places = [place for place in _stamp_paths(path) if not files.is_empty(place)]
    return any(_read_stamp(place) is not None for place in places)


def own_output(path: Path, *sources: Path) -> Path:
    """The path itself, as one that a user's own output may be written to.

    Raises UserError where a recorded table or its stamp is in the way, or a file that the output is made of.
    """
    if os.path.isdir(path) or not path.name:
        raise UserError(f"{path} is a directory: name a file")
    for source in sources:
        same = os.path.exists(path) and os.path.samefile(path, source)
        if same or path.resolve() == source.resolve():
            raise UserError(f"{path} is what is read: choose another name for what is written")
    real = path.resolve()
    if is_stamped(real) or _is_stamp(real):
        raise UserError(f"{path} is a recorded table or its stamp: choose another name")
    return path


def _is_stamp(path: Path) -> bool:
    """Whether it is the stamp of a table, or waits to become it."""
    return path.suffix in (".json", ".pending") and os.path.isfile(path) and bool(_read_stamp(path))


def _portable(word: str) -> str:
    """A word of a command without what is only true here: where the project and its tools lie."""
    word = word.replace(f"{ROOT}/", "")  # a path may stand inside other text
    outside = re.fullmatch(r"(--[\w-]+=)?((?:/|\.\./).*)", word)
    return f"{outside[1] or ''}{Path(outside[2]).name}" if outside else word


def _below(new: DataFrame, path: Path, schema: str) -> tuple[DataFrame, list[dict[str, Any]]]:
    """The recorded rows with ``new`` below them, and all stamps so far."""
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
    whole = known.frame(read_sheet(write_sheet(new, known, str(path)), str(path)))
    return concat([old, whole], ignore_index=True), [*earlier, stamp]


def _stamp_paths(path: Path) -> tuple[Path, Path]:
    """Where the next stamp waits while the CSV is exchanged, and where the stamp stands."""
    stem = path.name.removesuffix(".gz").removesuffix(".csv")
    return path.parent / f".{stem}.json.pending", path.parent / f"{stem}.json"


def _read_stamp(path: Path) -> dict[str, Any] | None:
    """The stamp in that file; None when there is none, or the file is some other JSON."""
    try:
        stamp = parse_json(files.read(path).decode())
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except ValueError as error:
        raise UserError(f"{path}: damaged stamp ({error}): restore it or measure again") from error
    if not isinstance(stamp, dict) or "sha256" not in stamp:
        return None
    for key, kind in _STAMP_KEYS.items():
        if key not in stamp:
            raise UserError(f"{path}: the stamp has no {key}: restore it or measure again")
        if not isinstance(stamp[key], kind):
            damage = f"{key} is no {kind.__name__}"
            raise UserError(f"{path}: damaged stamp ({damage}): restore it or measure again")
    return stamp


def _verified(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Bytes of the CSV and the stamp that matches them.

    After a crash between the two renames it is the pending one; looking there first also serves a
    reader that comes while a writer renames. Where none matches, a writer may have exchanged all since the
    CSV was read: only one that is still the same has been damaged.
    """
    before = found = None
    while (data := files.read(path)) != before:
        digest, before = hashlib.sha256(data).hexdigest(), data
        for place in _stamp_paths(path):
            stamp = _read_stamp(place)
            if stamp is not None and stamp["sha256"] == digest:
                return data, stamp
            found = stamp or found
    if found is None:
        raise UserError(f"{path}: not a recorded table: no stamp {_stamp_paths(path)[1].name}")
    raise UserError(
        f"{path}: sha256 {digest[:12]} differs from its stamp's {found['sha256'][:12]}: "
        "the file was changed after recording, restore it or measure again"
    )
