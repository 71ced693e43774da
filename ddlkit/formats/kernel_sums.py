"""Sums of GPU kernels, as ``nsys stats --report cuda_gpu_kern_sum --format csv`` writes them.

A kernel of NCCL has the name of one protocol, whatever protocol runs in it. Its name therefore
tells no more than the collective, and whether the collective goes along a ring or a tree. The time
of a kernel includes waiting for the slowest rank.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddlkit.core.errors import UserError
from ddlkit.formats.benchmark_rows import BY_SPELLING
from ddlkit.store import files
from ddlkit.store.sheet import Column, Schema, Sheet, read_sheet

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
_COLUMNS = ("instances", "total_ns", "least_ns", "name")
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
        raise UserError(f"{file}: has no sums of kernels: {_ADVICE}")
    n_before = heads[0]
    sheet = read_sheet("".join(lines[n_before:]), file)
    # `sheet.lines` counts from the head of the table, and errors count from the first line
    # of the file.
    numbers = [number + n_before for number in sheet.lines]
    # "Total Time (ns)" becomes "total_ns", for example. Other columns keep their names, and
    # are left out of the frame, as `exact=False` asks.
    header = tuple(_NAMES.get(_only_letters(name), name) for name in sheet.header)
    frame = _SCHEMA.frame(Sheet(file, header, numbers, sheet.rows), exact=False)
    return frame.drop(columns=["total_ns", "least_ns"]).assign(
        total_s=frame["total_ns"] / 1e9,
        least_s=frame["least_ns"] / 1e9,
        collective=[_collective(name) for name in frame["name"]],
        shape=[_shape(name) for name in frame["name"]],
    )


def _only_letters(name: str) -> str:
    """Return only the letters of a column's name, in small letters, as `_NAMES` has them."""
    return re.sub("[^a-z]", "", name.lower())


def _is_head(line: str) -> bool:
    """Return whether a line is the header of the table: it names all needed columns."""
    names = {_NAMES.get(_only_letters(name), "") for name in line.split(",")}
    return set(_COLUMNS) <= names


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
