"""Sums of GPU kernels, as ``nsys stats --report cuda_gpu_kern_sum --format csv`` writes them.

A kernel of NCCL has the name of one protocol, whatever protocol runs in it. Its name therefore
tells no more than the collective, and whether the collective goes along a ring or a tree. The time
of a kernel includes waiting for the slowest rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddlkit.core.errors import UserError
from ddlkit.formats.benchmark_rows import BY_SPELLING
from ddlkit.store import files
from ddlkit.store.sheet import Column, Schema, read_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

# Versions of Nsight Systems differ in blanks and in how much they abbreviate.
_NAMES = {
    "instances": "instances",
    "totaltimens": "total_ns",
    "minns": "least_ns",
    "minimumns": "least_ns",
    "name": "name",
}
_NSYS_NAMES = {
    "instances": "Instances",
    "total_ns": "Total Time (ns)",
    "least_ns": "Min (ns)",
    "name": "Name",
}
"""The name in a file of nsys of each column that is needed."""
_COLUMNS = tuple(_NSYS_NAMES)
_SCHEMA = Schema(
    "kernels",
    (
        Column("instances", "int", "positive"),
        Column("total_ns", "float", "non_negative"),
        Column("least_ns", "float", "non_negative"),
        Column("name", "str", "named"),
    ),
)
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_?(?P<collective>[A-Za-z]+?)_", re.ASCII)
_ADVICE = (
    "give what nsys stats --report cuda_gpu_kern_sum --format csv prints, with the columns "
    "Instances, Total Time (ns), Min (ns) and Name"
)


def read_kernel_sums(path: Path | str) -> DataFrame:
    """Return how often and how long each GPU kernel ran, from a file of Nsight Systems.

    Parameters
    ----------
    path : Path or str
        A CSV that ``nsys stats`` wrote.

    Returns
    -------
    DataFrame
        One row for each kernel. The columns are ``name``, ``instances``, ``total_s`` (the
        time of all instances), ``least_s`` (the time of the shortest one), ``collective``
        ("" for a kernel that is not of NCCL) and ``shape`` (whether the collective goes
        along a "ring" or a "tree", or "" if the name does not tell it).

    Raises
    ------
    UserError
        If the file is no such table, or if a value is wrong.
    """
    path = Path(path)
    file = str(path)
    lines = files.read_text(path).splitlines(keepends=True)
    # nsys prints lines about its progress before the table, which begins with its head.
    heads = [row for row, line in enumerate(lines) if _is_head(line)]
    if not heads:
        raise UserError(f"{file}: {_why_no_head(lines)}: {_ADVICE}")
    n_before = heads[0]
    sheet = read_sheet("".join(lines[n_before:]), file)
    # `sheet.lines` counts from the head of the table, and errors count from the first line
    # of the file.
    numbers = [number + n_before for number in sheet.lines]
    # Columns are read by the names that they have in the file, such as "Total Time (ns)", so that
    # errors have these names. Other columns are left out of the frame, as `exact=False` asks.
    name_in_file = {_column_of(name): name for name in sheet.header}
    # A name can be missing here although it is part of a name within quotes, which `_is_head` has
    # divided at its commas. The schema then refuses the file.
    columns = [
        replace(column, name=name_in_file.get(column.name, _NSYS_NAMES[column.name]))
        for column in _SCHEMA.columns
    ]
    schema = replace(_SCHEMA, columns=tuple(columns))
    frame = schema.frame(replace(sheet, lines=numbers), exact=False)
    # "Total Time (ns)" becomes "total_ns", for example.
    frame = frame.rename(columns=_column_of)
    return frame.drop(columns=["total_ns", "least_ns"]).assign(
        total_s=frame["total_ns"] / 1e9,
        least_s=frame["least_ns"] / 1e9,
        collective=[_collective(name) for name in frame["name"]],
        shape=[_shape(name) for name in frame["name"]],
    )


def _only_letters(name: str) -> str:
    """Return only the letters of a column's name, in small letters, as `_NAMES` has them."""
    return re.sub("[^a-z]", "", name.lower())


def _column_of(name: str) -> str:
    """Return which of `_COLUMNS` a column of the file is, "" if none."""
    return _NAMES.get(_only_letters(name), "")


def _is_head(line: str) -> bool:
    """Return whether a line is the header of the table: it names all needed columns."""
    return not _missing_columns(line)


def _missing_columns(line: str) -> list[str]:
    """Return the needed columns that a line does not name, as nsys calls them."""
    present = {_column_of(name) for name in line.split(",")}
    return [_NSYS_NAMES[column] for column in _COLUMNS if column not in present]


def _why_no_head(lines: Sequence[str]) -> str:
    """Return what is wrong with a file in which no line is the header of the table, in words."""
    missing = min(map(_missing_columns, lines), key=len, default=_COLUMNS)
    # A line that names half of the needed columns is taken as an incomplete header.
    if 2 * len(missing) > len(_COLUMNS):
        return "has no sums of kernels"
    return f"the table of kernels has no column {' and no column '.join(missing)}"


def _collective(kernel: str) -> str:
    """Return the collective of a kernel of NCCL, "" for another kernel.

    A collective that `BY_SPELLING` does not have is named as in the kernel, in small
    letters.
    """
    match = _NCCL.match(kernel)
    if match is None:
        return ""
    spelling = match["collective"].lower()
    return BY_SPELLING.get(spelling, spelling)


def _shape(kernel: str) -> str:
    """Return "ring" or "tree" if the name of a kernel of NCCL tells it, else ""."""
    if not _NCCL.match(kernel):
        return ""
    if "_TREE" in kernel:
        return "tree"
    return "ring" if "_RING" in kernel else ""
