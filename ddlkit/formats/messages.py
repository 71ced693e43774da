"""Message times, whether recorded, a user's own CSV, or an nccl-tests log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.store import files
from ddlkit.store.readers import choose
from ddlkit.store.sheet import SCHEMAS, Column, Schema, Sheet, check_cells, read_sheet
from ddlkit.store.tables import is_stamped, load_table

if TYPE_CHECKING:
    from pandas import DataFrame

_KEYS = ("collective", "backend", "algorithm", "link", "link_bits_per_s", "ranks")
_MESSAGES = (Column("bytes", "int", "positive"), Column("seconds", "float", "positive"))


def read_bytes_seconds(
    path: Path, **wanted: Any
) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[str, Any]]:
    """Return message sizes (n,) in bytes, times (n,) in seconds, and what is known of them.

    wanted : which rows, by columns of _KEYS; taken as said where the file is silent
    """
    if is_stamped(path):
        source, frame = "recorded", load_table(path, "collectives")
    else:
        source, frame = _own_messages(path)
    if place := wanted.pop("place", None):
        if "place" not in frame:
            raise UserError(f"{path}: no log, so no times {place}")
        frame, _ = choose(frame, ("place",), {"place": place}, path)
    frame, chosen = choose(frame, _KEYS, wanted, path)
    said = {name: value for name, value in wanted.items() if value is not None}
    meta = {"source": source, **said, **chosen}
    if meta.get("ranks") == 1:
        raise UserError(f"{path}: one rank sends no messages: choose times of two or more")
    return frame["bytes"].to_numpy(), frame["seconds"].to_numpy(), meta


def read_collectives(path: Path, *, ranks: int | None = None, link: str | None = None) -> DataFrame:
    """Return samples as a ``collectives`` table, whoever measured them; what a file does not say as given."""
    if is_stamped(path):
        return load_table(path, "collectives")
    source, frame = _own_messages(path)
    if "ranks" not in frame and ranks is None:
        raise UserError(f"{path}: does not say how many ranks there were: give --ranks")
    said: dict[str, Any] = {"ranks": ranks, "link": link or "unknown", "collective": "all_reduce"}
    said |= {"algorithm": "", "link_bits_per_s": 0.0, "session": 0, "stolen": 0.0}
    said |= {"backend": source, "messages_per_sample": 1, "in_flight": 1, "clock": "wall"}
    frame = frame.drop(columns="place", errors="ignore")
    return frame.assign(**{name: value for name, value in said.items() if name not in frame})


def _own_messages(path: Path) -> tuple[str, DataFrame]:
    """Return where a file without a stamp comes from, and its rows."""
    text = files.read_text(path)
    if is_log(text):
        log = read_log(text, str(path)).frame
        return "nccl-tests", log[[name for name in log if log[name].all()]]
    sheet = read_sheet(text, str(path))
    keys = [column for column in SCHEMAS["collectives"].columns if column.name in _KEYS]
    keys = [column for column in keys if column.name in sheet.header]
    frame = Schema("message times", (*_MESSAGES, *keys)).frame(sheet, exact=False)
    rate = frame["bytes"] / frame["seconds"]
    for row in np.flatnonzero((frame["bytes"] >= 65536) & (rate < 1e4))[:1]:
        problem = f"{rate[row]:.3g} bytes a second, slower than any link: not seconds? convert them"
        sheet.fail(int(row), "seconds", problem)
    return "csv", frame


# Launchers label lines: mpirun --tag-output "[1,0]<stdout>:", srun -l "0: ".
_LABEL = re.compile(r"^\s*(\[\d+,\d+\]<\w+>:|\d+:\s)?\s*")
_HEADER = re.compile(r"^#\s*size\s+count\s.*\balgbw\b")
_ROW = re.compile(r"^\d+(\s|$)")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b(?:.*\bdevice\s+\d+\s+\[\w+\]\s*(.*))?")
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|gather|scatter|sendrecv)_perf\b"
)
_PLACES = ("out_of_place", "in_place")
"""What nccl-tests prints first and second. Gradients are summed in place."""
_LOG = Schema(
    "an nccl-tests log",
    (
        Column("size", "int", "positive"),
        Column("time", "microseconds", "positive"),
        Column("algbw", "float", "non_negative"),
        Column("#wrong", "float", "non_negative"),
        Column("place", "str"),
    ),
)


class Log(NamedTuple):
    """Columns bytes, seconds, place, collective ("" unsaid) and ranks (0 unsaid); GPUs' names by rank."""

    frame: DataFrame
    devices: tuple[str, ...]


def is_log(text: str) -> bool:
    """Return whether it has the head of a table as nccl-tests prints it."""
    return any(_HEADER.match(_LABEL.sub("", line)) for line in text.splitlines())


def read_log(text: str, file: str, collective: str = "") -> Log:
    """Return the one table of a log; ``collective`` is of one whose program it does not name."""
    check_cells(text, "\n", file)
    names: list[str] = []  # from the time out of place on
    devices: list[str] = []
    lines, rows, ranks, ended = [], [], 0, False
    for number, line in enumerate(text.splitlines(), start=1):
        line = _LABEL.sub("", line)
        if _HEADER.match(line):
            if names:
                raise UserError(f"{file}: line {number}: a second table: give it its own file")
            names = line.lstrip("# ").split()
            if "time" not in names:
                problem = "column cputime: not GPU time: run without -C"
                raise UserError(f"{file}: line {number}, {problem}")
            names = names[names.index("time") :]
        elif rank := _RANK.match(line):
            ranks = max(ranks, int(rank[1]) + 1)
            devices += [rank[2].strip()] if rank[2] else []
        elif line.startswith("# Avg bus bandwidth"):
            ended = True
        elif names and not ended and _ROW.match(line):
            row = f"{file}: row at line {number}"
            lines += [number] * len(timed := list(_timed(line.split(), names, row)))
            rows += timed
        elif program := _PROGRAM.search(line):
            collective = program[1]
    if not rows:
        raise UserError(f"{file}: a header of nccl-tests but no rows: truncated log?")
    if not ended:
        problem = "no '# Avg bus bandwidth' after the rows: the log is cut"
        raise UserError(f"{file}: {problem}: get all of it, or make a CSV of bytes and seconds")
    frame = _checked(Sheet(file, _LOG.names, lines, rows))
    return Log(frame.assign(collective=collective, ranks=ranks), tuple(devices))


def _checked(sheet: Sheet) -> DataFrame:
    """Return bytes, seconds and place; rates are printed to 0.01, times to four digits or more."""
    frame = _LOG.frame(sheet, exact=False)
    for at in np.flatnonzero(frame["#wrong"])[:1]:
        problem = f"{frame['#wrong'][at]:g} wrong values: fix the collective before timing it"
        sheet.fail(int(at), "#wrong", problem)
    rate = frame["size"] / frame["time"] / 1e9
    for at in np.flatnonzero((rate - frame["algbw"]).abs() > 0.0051 + 0.001 * rate)[:1]:
        problem = "contradicts size over time: mixed units? the time must be in microseconds"
        sheet.fail(int(at), f"{frame['place'][at]}_algbw", problem)
    return frame.rename(columns={"size": "bytes", "time": "seconds"})[["bytes", "seconds", "place"]]


def _timed(words: list[str], names: list[str], where: str) -> Iterator[tuple[str, ...]]:
    """Yield size, time, rate, wrong values and place; words before the time vary by version.

    Sizes of 0 are left out: all_gather's, where a message is too small to be divided among the ranks.
    """
    start = len(words) - len(names) - ("timestamp" in names)  # two words, one name
    if not 3 <= start <= 5:
        raise UserError(f"{where}, column time: truncated after {len(words)} words")
    half = names.index("time", 1) if "time" in names[1:] else len(names)
    for place, begin in zip(_PLACES, range(0, len(names), half), strict=False):
        cells = dict(zip(names[begin : begin + half], words[start + begin :], strict=False))
        if words[0] != "0" and cells.get("time", "N/A") != "N/A":
            # Old versions print the largest deviation as "error"; N/A means that values were not checked.
            wrong = cells.get("#wrong", "N/A").replace("N/A", "0")
            yield words[0], cells["time"], cells.get("algbw", ""), wrong, place
