"""A user's own table of step times, measured on several numbers of GPUs: CSV.

A row is a single step of a job, or a whole job with its mean step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.store import files
from ddlkit.store.sheet import Column, Schema, Sheet, read_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

REQUIRED = ("gpus", "nodes", "job", "step_s")
"""Columns that a table of steps must have."""
OPTIONAL = ("step", "samples", "nccl", "settings")
"""Columns that it may have."""

_SCHEMA = Schema(
    "steps",
    (
        Column("gpus", "int", "positive"),
        Column("nodes", "int", "non_negative"),
        Column("job", "str", "named"),
        Column("step_s", "float", "positive"),
        # `read_steps` drops a column of defaults, so that it is known what a file has. A default
        # of 0 would make the error about an empty cell advise to write 0, which is the number of
        # the launch.
        Column("step", "int", "non_negative", default="1"),
        Column("samples", "float", "positive", default="1"),
        Column("nccl", "str", default=""),
        Column("settings", "str", default=""),
    ),
)


def read_steps(path: Path | str) -> DataFrame:
    """Return the step times of a training on several numbers of GPUs.

    Parameters
    ----------
    path : Path or str
        A CSV with the columns ``gpus``, ``nodes`` (0 or 1 for a part of a node), ``job`` (the
        name of one run of the training) and ``step_s`` (seconds). It may have the columns
        ``step`` (the number of a single step), ``samples`` (in a step), ``nccl`` (the
        version of NCCL) and ``settings`` (any text). A column of these four in which no row
        has a value counts as left out. The samples may be those of one GPU or of all GPUs,
        which `ddlkit.model.scaling` tells by how they grow with the GPUs. Other columns are
        ignored.

    Returns
    -------
    DataFrame
        One row for each row of the file, with those of these columns that it has.

    Raises
    ------
    UserError
        If the file is no such table, or if a value is wrong.
    """
    path = Path(path)
    file = str(path)
    text = files.read_text(path)
    # An optional column can be empty or missing in three ways:
    #
    # * It is in the header and has empty cells for numbers. `_read` leaves it out.
    # * It is in the header and has empty cells for texts. It stays, because an empty text counts
    #   as no value everywhere.
    # * It is not in the header. `_read` fills it with defaults, and it is dropped below.
    frame = _read(text, file)
    first_line, _, _ = text.lstrip().partition("\n")
    header = {name.strip().strip('"') for name in first_line.split(",")}
    absent = [name for name in OPTIONAL if name not in header]
    frame = frame.drop(columns=absent)
    has_empty_nodes = (frame["gpus"] < frame["nodes"]).to_numpy()
    if has_empty_nodes.any():
        # argmax returns the first such row.
        row = frame.iloc[int(np.argmax(has_empty_nodes))]
        noun = "GPU" if row["gpus"] == 1 else "GPUs"
        raise UserError(
            f"{file}: job {row['job']} has {row['gpus']} {noun} on {row['nodes']} nodes, "
            "fewer than one on each: correct the columns gpus and nodes"
        )
    return frame


def _read(text: str, file: str) -> DataFrame:
    """Return the checked table in CSV text, without columns of numbers that have no value.

    This is about optional columns. An optional column of texts may remain with empty texts,
    which count as no value.
    """
    try:
        return _SCHEMA.read(text, file, exact=False)
    except UserError:
        # An empty cell is no number, so a column of numbers with empty cells is refused. Few files
        # have such a column, and only a file that is refused is searched for it.
        empty = _columns_without_value(read_sheet(text, file))
        if not empty:
            raise
    columns = [column for column in _SCHEMA.columns if column.name not in empty]
    return replace(_SCHEMA, columns=tuple(columns)).read(text, file, exact=False)


def _columns_without_value(sheet: Sheet) -> set[str]:
    """Return the names of the optional columns in which every cell is empty."""
    empty = set()
    for position, name in enumerate(sheet.header):
        has_value = any(row[position].strip() for row in sheet.rows)
        if name in OPTIONAL and not has_value:
            empty.add(name)
    return empty
