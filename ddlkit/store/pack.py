"""Many recorded tables of a folder as one file a kind, from which each is cut out again byte for byte."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from ddlkit.core.errors import UserError
from ddlkit.store import files, tables
from ddlkit.store.tables import STAMPS

MOST_PACK_CHARACTERS = 16 * 1024**2
"""Of a pack's text: with two characters a cell and more it stays below `sheet.MOST_CELLS`."""


class Member(NamedTuple):
    """A table that goes into a pack: its text, whole lines below a header, and its stamp."""

    text: str
    stamp: dict[str, Any]


def pack(folder: Path) -> list[Path]:
    """Pack the loose recorded tables of a folder; return their paths, by which they are read as before.

    Packs are written and verified before a loose table goes: a crash at any moment leaves each readable.
    A table that could not be cut out byte for byte stays loose.

    Raises UserError for a damaged table, tables of two machines, and where writing is refused.
    """
    if len(names := tables.machines_in(folder)) > 1:
        raise UserError(f"{folder}: tables of {' and '.join(sorted(names))}: give each its folder")
    with files.writing_in(folder):
        _remove_unlisted(folder, tables.packed(folder))
        _remove_packed(folder)
        loose = {}
        for path in tables.list_tables(folder):
            if path.exists() and tables.is_stamped(path):
                data, stamp = tables.verified(path)
                if (text := _packable(path, data)) is not None:
                    loose[path.name] = Member(text, stamp)
        if loose:
            kinds = {member.stamp["schema"] for member in loose.values()}
            write_packs(folder, {**members(folder, kinds), **loose}, kinds)
            _remove_packed(folder)
    return [folder / name for name in loose]


def cut_out(path: Path) -> tuple[bytes, str]:
    """Return the bytes of a packed table and the text of its stamp, as they were when loose.

    Raises UserError where the rows' hash is not that of the stamp. A .csv.gz is compressed as `save_table`
    does; where another zlib makes other bytes of it, it is the text whose hash is verified.
    """
    part = tables.packed(path.parent)[path.name]
    text = _texts(part.pack, tables.pack_bytes(part)).get(path.name, "")
    if hashlib.sha256(text.encode()).hexdigest() != part.text_sha256:
        raise UserError(f"{part.pack}: the rows of {path.name} differ from its stamp: restore it")
    data = gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    return data, tables.stamp_text(part.stamp)


def members(folder: Path, kinds: set[str]) -> dict[str, Member]:
    """Return what is packed of these kinds in a folder, by the tables' names."""
    parts = tables.packed(folder)
    texts: dict[str, str] = {}
    for part in {part.pack: part for part in parts.values()}.values():
        texts |= _texts(part.pack, tables.pack_bytes(part)) if part.stamp["schema"] in kinds else {}
    return {name: Member(text, parts[name].stamp) for name, text in texts.items()}


def write_packs(folder: Path, parts: dict[str, Member], kinds: set[str]) -> None:
    """Write all packs of these kinds anew, with these parts only; those of other kinds stay as they are.

    New packs get names that no other has; then the stamps are exchanged, which say what counts. A crash
    before or after that leaves packs that are not listed, which go when the next are written.
    """
    there = tables.packed(folder)
    listed = {name: part for name, part in there.items() if part.stamp["schema"] not in kinds}
    for file, held in _bins(parts, {path.name for path in folder.iterdir()}).items():
        data = gzip.compress(_text(held).encode(), mtime=0)
        sha256 = hashlib.sha256(data).hexdigest()
        files.atomic_write(folder / file, data)
        texts = _texts(folder / file, data)
        for name, member in held.items():  # before the old ones, and what is loose, are given up
            assert texts[name] == member.text, name
            digest = hashlib.sha256(member.text.encode()).hexdigest()
            listed[name] = tables.Part(folder / file, sha256, member.stamp, digest)
    _write_index(folder / STAMPS, listed)
    _remove_unlisted(folder, listed)


def _remove_unlisted(folder: Path, parts: dict[str, tables.Part]) -> None:
    """Remove packs that no stamp counts: of `write_packs` before, or one that was interrupted."""
    listed = {STAMPS, *(part.pack.name for part in parts.values())}
    for path in folder.glob("*.csv.gz"):
        if path.name not in listed and tables.is_pack(path.name) and not tables.is_stamped(path):
            path.unlink()


def _write_index(path: Path, parts: dict[str, tables.Part]) -> None:
    """Write a line for each pack, with its hash, then one for each part; no file where there is none."""
    sums = {part.pack.name: part.pack_sha256 for part in parts.values()}
    lines: list[dict[str, Any]] = [{"pack": name, "sha256": sums[name]} for name in sorted(sums)]
    for name, part in sorted(parts.items(), key=lambda item: (item[1].pack, item[0])):
        line = {"part": name, "pack": part.pack.name, "stamp": part.stamp}
        compressed = part.text_sha256 != part.stamp["sha256"]
        lines.append(line | ({"text_sha256": part.text_sha256} if compressed else {}))
    if lines:
        files.atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
    else:
        path.unlink(missing_ok=True)


def _bins(parts: dict[str, Member], taken: set[str]) -> dict[str, dict[str, Member]]:
    """Return the parts by pack: KIND.csv.gz, KIND.2.csv.gz for another header, or where one is full."""
    packs: dict[str, dict[str, Member]] = {}
    headers: dict[str, str] = {}
    room: dict[str, int] = defaultdict(lambda: MOST_PACK_CHARACTERS)
    for name, member in sorted(parts.items()):
        header = member.text.partition("\n")[0]
        n_characters = len(member.text) + member.text.count("\n") * (len(name) + 1)
        number, file = 1, f"{member.stamp['schema']}.csv.gz"
        while file in taken or headers.get(file, header) != header or room[file] < n_characters:
            number += 1
            file = f"{member.stamp['schema']}.{number}.csv.gz"
        packs.setdefault(file, {})[name] = member
        headers[file] = header
        room[file] -= n_characters
    return packs


def _text(held: dict[str, Member]) -> str:
    header = next(iter(held.values())).text.partition("\n")[0]
    rows = [
        f"{name},{line}\n" for name, part in held.items() for line in part.text.split("\n")[1:-1]
    ]
    return f"part,{header}\n" + "".join(rows)


@functools.lru_cache(maxsize=1)
def _texts(path: Path, data: bytes) -> dict[str, str]:
    """Return the text of every table in a pack, by name."""
    text = files.text_of(data, path)
    header, _, rows = text.partition("\n")
    lines: dict[str, list[str]] = defaultdict(lambda: [header.removeprefix("part,")])
    for row in rows.split("\n")[:-1]:
        name, _, line = row.partition(",")
        lines[name].append(line)
    return {name: "\n".join([*those, ""]) for name, those in lines.items()}


def _packable(path: Path, data: bytes) -> str | None:
    """Return the text of a table that can be cut out again; None of another, which stays loose."""
    raw = gzip.decompress(data) if path.suffix == ".gz" else data
    text = raw.decode()
    lines = text.split("\n")
    whole = lines[-1] == "" and all(lines[:-1]) and "\r" not in text
    plain = not set(',"\n') & set(path.name) and len(text) < MOST_PACK_CHARACTERS // 2
    return text if whole and plain and not any(line.count('"') % 2 for line in lines) else None


def _remove_packed(folder: Path) -> None:
    """Remove loose tables that are packed, the stamp last: without its table it misleads nobody."""
    for name, part in tables.packed(folder).items():
        path = folder / name
        if path.exists():
            data, stamp = tables.verified(path)
            if stamp != part.stamp:
                continue
            path.unlink()
        for place in tables.stamp_paths(path):
            place.unlink(missing_ok=True)
