"""A recording as one file that is whole at any moment, for machines that end without a warning.

It holds what a session's directory holds, under the directory's name: ``tar xzf FILE -C data/recorded``
restores it.
"""

from __future__ import annotations

import io
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ddlkit.core.errors import UserError
from ddlkit.run.sessions import say
from ddlkit.store import files, has_table

EVERY_S = 20.0
KEPT = (".csv", ".csv.gz", ".json", ".jsonl")
"""Ends of the names of tables and stamps; not of a lock or half a file."""


@contextmanager
def packing(out: Path, file: Path | None) -> Iterator[Callable[[], None]]:
    """Keep ``file``, if there is one, up to date while ``out`` is recorded into; first go on from it.

    Gives what is to be called now and then: it packs if EVERY_S have passed. At the end of the block
    it is packed again, however that comes.

    Raises UserError as `restore` and `pack`; that one is only told while the session goes on.
    """
    if file is None:
        yield lambda: None
        return
    files.remove_unfinished(file.parent, file.name)
    restore(out, file)
    pack(out, file)  # that the file cannot be written is better known now
    due_s = time.monotonic() + EVERY_S

    def keep() -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + EVERY_S
            try:
                pack(out, file)
            except UserError as error:
                say(f"not packed: {error}")

    try:
        yield keep
    finally:
        pack(out, file)


def pack(out: Path, file: Path) -> None:
    """Write every table and stamp below ``out`` into ``file``. Raises UserError where it is refused."""

    def nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
        return member.replace(uid=0, gid=0, uname="", gname="", deep=False)

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for directory in (out, *sorted(path for path in out.rglob("*") if path.is_dir())):
            with files.writing_in(directory):  # a table with its own stamp, not with the next one
                for path in sorted(filter(_is_kept, directory.iterdir())):
                    archive.add(path, str(path.relative_to(out.parent)), filter=nobodys)
    files.atomic_write(file, packed.getvalue())


def restore(out: Path, file: Path) -> None:
    """Unpack ``file``, if there is one, where ``out`` holds nothing yet.

    Raises UserError where it is damaged, holds another recording, or tables that ``out``, which has some,
    lacks: packing would lose them.
    """
    if not file.exists():
        return
    try:
        with tarfile.open(file, "r:gz") as archive:
            members = [Path(name) for name in archive.getnames()]
            if names := {path.parts[0] for path in members} - {out.name}:
                theirs = f"{', '.join(sorted(names))}, not of {out.name}"
                raise UserError(f"{file} holds a recording of {theirs}: name another file")
            if not any(map(_is_kept, out.iterdir())):
                archive.extractall(out.parent, filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{file}: no whole archive ({error}): name another file") from error
    tables = [path for path in members if ".csv" in path.name]
    if lost := [path for path in tables if not has_table(out.parent / path)]:
        raise UserError(
            f"{file} holds {len(lost)} tables that {out} lacks, such as {lost[0].name}: "
            "unpack it, or name another file"
        )


def with_tables(folder: Path) -> list[Path]:
    """Return the directory and those below it that hold tables, each to be packed by itself."""
    parents = {path.parent for path in folder.rglob("*.csv*")}
    return sorted(path for path in parents if not path.name.startswith("."))


def _is_kept(path: Path) -> bool:
    return path.is_file() and path.name.endswith(KEPT)
