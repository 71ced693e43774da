"""Times of collectives on several numbers of nodes, from logs or tables.

A log of nccl-tests lists the host of each rank. A user's own table needs a column of nodes.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.formats import benchmark_logs, size_time_csv
from ddlkit.formats.benchmark_rows import collective_named, rows_of_place
from ddlkit.formats.contract import MessageOptions
from ddlkit.store import files
from ddlkit.store.sheet import (
    Column,
    Schema,
    Sheet,
    columns_in_words,
    read_sheet,
)

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = (
    "collective",
    "nodes",
    "ranks",
    "bytes",
    "seconds",
    "nccl",
    "settings",
    "file",
)
"""The columns of `read_node_tables`."""

_COLUMNS_OF_CSV = "bytes, seconds, ranks and nodes"
"""The columns that a user's own table needs, in words."""
_NODES_NAMES = frozenset({"nodes", "num_nodes", "n_nodes", "nnodes", "hosts"})
_EXTRA = Schema(
    "collectives by number of nodes",
    (
        Column("nodes", "int", "positive"),
        Column("nccl", "str", default=""),
        Column("settings", "str", default=""),
    ),
)


def read_node_tables(
    paths: Sequence[Path | str], *, collective: str | None = None
) -> DataFrame:
    """Return the times of collectives on several numbers of nodes.

    Parameters
    ----------
    paths : sequence of Path or str
        Logs of nccl-tests or rccl-tests, each of one number of nodes, or tables (CSV) with the
        columns ``bytes``, ``seconds``, ``ranks``, ``nodes`` and perhaps ``collective``, ``nccl``
        and ``settings``.
    collective : str, optional
        The collective of files that do not name theirs, and the one to read of files with
        several. By default, all collectives of a CSV are read, and a CSV that names none is
        one of all-reduces. A log that names none is then refused, unless the collective
        follows from its columns and rates.

    Returns
    -------
    DataFrame
        One row for each time, with the columns of `COLUMNS`. ``nccl``, the version of NCCL,
        and ``settings`` are "" where they are not known. ``file`` is the path.

    Raises
    ------
    UserError
        If a file is wrong, if its nodes or ranks are not known, if the collective of a log is
        not known, or if a file has times of other collectives alone, or of collectives that are
        not predicted.
    """
    import pandas as pd

    tables = []
    for path in paths:
        text = files.read_text(Path(path))
        file = str(path)
        if benchmark_logs.matches(text):
            table = _of_log(text, file, collective)
        else:
            table = _of_collective(_of_csv(text, file), text, file, collective)
        _refuse_unpredicted(table, text, file)
        tables.append(table.assign(file=file)[[*COLUMNS]])
    return pd.concat(tables, ignore_index=True)


def _of_log(text: str, file: str, collective: str | None) -> DataFrame:
    """Return the times of a log, with its number of nodes and its version of NCCL.

    ``collective`` is used if the log does not name one. Raises UserError if the log is
    wrong, or does not list the host of each rank.
    """
    # `read_log` refuses a log in which several tables fit. Of the only one, ``rows`` has the
    # times, and ``table`` has what the lines above it state of the run, such as the hosts.
    tables = benchmark_logs.read_tables(text, file)
    try:
        rows, table = benchmark_logs.read_log(tables, file, collective=collective or "")
    except benchmark_logs.CutLogError as error:
        raise UserError(error.with_columns(_COLUMNS_OF_CSV)) from None
    # nccl-tests times collectives in place (the result over the input) and out of place. All
    # rows stay, unless the times of the two clearly differ. Then only the rows in place
    # stay, because a training works in place.
    rows, _ = rows_of_place(rows, place=None, file=file)
    # Without a list of hosts, the number of nodes is 0.
    if not table.nodes:
        raise UserError(
            f"{file}: does not list the host of each rank, so its number of nodes is not known: "
            f"give a CSV with the columns {_COLUMNS_OF_CSV}"
        )
    # In a user's own table, `settings` is any text on the settings of a run. A log has no
    # such text, for which "" stands.
    return rows.assign(nodes=table.nodes, nccl=table.nccl, settings="")


def _of_csv(text: str, file: str) -> DataFrame:
    """Return the times of a user's own table that has a column of nodes.

    The table may have columns of NCCL versions and of settings, too, which are "" in the
    result if it has none. Raises UserError if the table has no number of nodes or of ranks, or is
    wrong.
    """
    import pandas as pd

    if not size_time_csv.matches(text):
        raise UserError(
            f"{file}: neither a log of nccl-tests nor a CSV with the columns {_COLUMNS_OF_CSV}: "
            "give one of these"
        )
    sheet = read_sheet(text, file)
    _refuse_missing_columns(sheet)
    # The columns of nodes, NCCL versions and settings are read here. `size_time_csv` reads
    # all others, which `lines_of_others` has as lines of CSV, the header first.
    extra = _extra_columns(sheet)
    lines_of_others = _without_extra(sheet)
    tables = []
    # `size_time_csv` knows no nodes, NCCL versions or settings, and would mix their times. So
    # the rows of each combination are read as a table of their own.
    for key, extra_of_part in extra.groupby(["nodes", "nccl", "settings"]):
        # The index has the positions of the rows in the sheet. Each row comes into the line
        # that it has in the file, by `sheet.lines`, so that errors name this line.
        csv_of_part = _csv_of_rows(lines_of_others, extra_of_part.index, sheet.lines)
        part = size_time_csv.read(csv_of_part, file, MessageOptions()).rows
        nodes, nccl, settings = key
        tables.append(part.assign(nodes=nodes, nccl=nccl, settings=settings))
    return pd.concat(tables, ignore_index=True)


def _refuse_missing_columns(sheet: Sheet) -> None:
    """Raise UserError unless a user's own table has columns of nodes and of ranks."""
    missing = []
    if not any(_in_letters(name) in _NODES_NAMES for name in sheet.header):
        missing.append("nodes")
    if not size_time_csv.has_ranks(sheet):
        missing.append("ranks (the number of GPUs that exchange messages)")
    if missing:
        pronoun = "it" if len(missing) == 1 else "them"
        raise UserError(
            f"{sheet.file}: has no column {' and no column '.join(missing)}: add {pronoun} (the "
            f"columns of the file are {columns_in_words(sheet.header)})"
        )


def _of_collective(
    table: DataFrame, text: str, file: str, collective: str | None
) -> DataFrame:
    """Return the rows of a user's own table that are of a collective, or all if it is None.

    A table without a column of collectives is all of ``collective``, or of all-reduces if that is
    None. Raises UserError if the table names other collectives alone. ``text`` is the content of
    the file, in whose spelling the error names them.
    """
    if "collective" not in table:
        return table.assign(collective=collective or "all_reduce")
    if collective is None:
        return table
    rows = table[table["collective"] == collective]
    if rows.empty:
        present = sorted(table["collective"].unique())
        remedy = f"give a table of {collective}"
        # A collective that is not predicted is no choice.
        predicted = [name for name in present if name in COLLECTIVES]
        if predicted:
            remedy = f"choose {' or '.join(predicted)} by --collective, or {remedy}"
        spelled = ", ".join(_as_spelled(name, text) for name in present)
        raise UserError(
            f"{file}: has times of {spelled}, not of {collective}: {remedy}"
        )
    return rows


def _refuse_unpredicted(table: DataFrame, text: str, file: str) -> None:
    """Raise UserError if a table has times of collectives that are not predicted.

    ``text`` is the content of the file, in whose spelling the error names these collectives.
    """
    present = table["collective"].unique()
    unpredicted = sorted(set(present) - set(COLLECTIVES))
    if not unpredicted:
        return
    predicted = [name for name in COLLECTIVES if name in present]
    remedy = f"give times of {' or '.join(COLLECTIVES)}"
    if predicted:
        remedy = (
            f"choose {' or '.join(predicted)} by --collective, or leave these rows out"
        )
    spelled = ", ".join(_as_spelled(name, text) for name in unpredicted)
    raise UserError(
        f"{file}: has times of {spelled}, which are not predicted: {remedy}"
    )


def _as_spelled(collective: str, text: str) -> str:
    """Return the first spelling of a collective in a text, or its name if it has none there."""
    for word in re.findall(r"\w+", text):
        if collective_named(word) == collective:
            return str(word)
    return collective


def _csv_of_rows(
    table: Sequence[str], positions: Iterable[int], line_numbers: Sequence[int]
) -> str:
    """Return some rows of a table as CSV, each in its line of the file.

    Errors about the result then name the right lines. The lines of other rows are empty.

    ``table`` has the header and then all rows, as lines of CSV. ``positions`` are those of
    the rows to return, and ``line_numbers`` has the line of each row in the file. Positions
    count from 0 and lines from 1.
    """
    header, *rows = table
    lines = [""] * max(line_numbers)
    lines[0] = header
    for position in positions:
        lines[line_numbers[position] - 1] = rows[position]
    return "\n".join(lines)


def _is_extra(name: str) -> bool:
    return _in_letters(name) in _NODES_NAMES | {"nccl", "settings"}


def _in_letters(name: str) -> str:
    return re.sub(r"[^a-z_]", "", name.lower())


def _extra_columns(sheet: Sheet) -> DataFrame:
    """Return the columns ``nodes``, ``nccl`` and ``settings`` of each row.

    The column of nodes may have another name in the file.
    """
    header = []
    for name in sheet.header:
        header.append("nodes" if _in_letters(name) in _NODES_NAMES else name)
    renamed = Sheet(sheet.file, tuple(header), sheet.lines, sheet.rows)
    # `exact=False` marks a user's own file: all other columns are ignored, and implausible
    # numbers are refused.
    return _EXTRA.frame(renamed, exact=False)


def _without_extra(sheet: Sheet) -> list[str]:
    """Return a table without nodes, versions of NCCL and settings, as lines of CSV.

    The first line is the header, and each row is a line below it.
    """
    positions = [
        position for position, name in enumerate(sheet.header) if not _is_extra(name)
    ]
    lines = []
    for row in (sheet.header, *sheet.rows):
        line = io.StringIO()
        # A cell may contain a comma, and is then written in quotes.
        csv.writer(line, lineterminator="").writerow(
            row[position] for position in positions
        )
        lines.append(line.getvalue())
    return lines
