"""What others measured on their clusters: data/external, its sources and licences; a reader module each.

Readers take a path, packed or not, and return a table in seconds and bytes. Where a SHA256SUMS lies beside
the file they read it only while it is what was taken.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlkit.core.errors import UserError
from ddlkit.store import files, readers
from ddlkit.store.sheet import Column, Schema, read_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

EXTERNAL = files.DATA / "external"

MAY_BE_SHIPPED = {
    "Apache-2.0": "Apache License Version 2.0, January 2004",
    "MIT": "Permission is hereby granted, free of charge, to any person obtaining a copy",
}
"""Licences under which data are passed on here, each with words that its text must hold."""

_SOURCES = Schema(
    "sources",
    tuple(
        Column(name, "str", "named")
        for name in (
            "source",
            "repository",
            "commit",
            "licence",
            "holder",
            "licence_text",
            "taken",
        )
    ),
    key=("source",),
)


def read(path: Path) -> str:
    """Text of a file of others, unpacked. Raises UserError where it is not what was taken."""
    return files.text_of(readers.read_transcribed(path), path)


def read_columns(path: Path, columns: tuple[Column, ...], key: tuple[str, ...]) -> DataFrame:
    """The CSV as checked columns. Raises UserError naming row and column, also when it ends in mid-line."""
    text = read(path)
    if not text.endswith("\n"):
        raise UserError(f"{path}: the last line is cut in the middle: get the whole file")
    return Schema(path.name, columns, key).frame(read_sheet(text, str(path)))


def sources(root: Path = EXTERNAL) -> DataFrame:
    """Columns source, repository, commit, licence, holder, licence_text (where from) and taken.

    Raises UserError naming row and column.
    """
    path = root / "sources.csv"
    return _SOURCES.frame(read_sheet(files.read_text(path), str(path)))


def check_sources(root: Path = EXTERNAL) -> None:
    """Raise a UserError for the first thing below ``root`` that may not be shipped as it is.

    That is a folder that no row of sources.csv is of, a licence that is not in `MAY_BE_SHIPPED` or whose text
    is not in the folder, a file without a hash, or one that differs from its hash.
    """
    listed = sources(root)
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    for name in sorted(folders ^ set(listed["source"])):
        raise UserError(f"{root / name}: must be a folder and a row of sources.csv, both")
    for row in listed.itertuples(index=False):
        _check_licence(root / row.source, row.licence, row.holder)
        there = {path.name for path in (root / row.source).iterdir()}
        for name in sorted(there - {readers.SUMS}):
            readers.read_transcribed(root / row.source / name)


def _check_licence(folder: Path, licence: str, holder: str) -> None:
    if licence not in MAY_BE_SHIPPED:
        known = " or ".join(sorted(MAY_BE_SHIPPED))
        raise UserError(f"{folder}: licence {licence!r} is not {known}: do not ship these data")
    text = " ".join(read(folder / "LICENSE").split())
    for words in (MAY_BE_SHIPPED[licence], holder):
        if words not in text:
            raise UserError(f"{folder / 'LICENSE'}: lacks {words!r}: put the licence's text there")
    if not (folder / readers.SUMS).is_file():
        raise UserError(f"{folder}: has no {readers.SUMS}: write the hashes of its files there")
