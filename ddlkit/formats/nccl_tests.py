"""Logs as nccl-tests (all_reduce_perf and its sisters) print them: one reader, whoever asks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.core.link import COLLECTIVES, bus_factor
from ddlkit.store.sheet import Column, Schema, Sheet, check_cells

if TYPE_CHECKING:
    from pandas import DataFrame

# Launchers label lines: mpirun --tag-output "[1,0]<stdout>:", srun -l "0: ".
_LABEL = re.compile(r"^\s*(\[\d+,\d+\]<\w+>:|\d+:\s)?\s*")
_HEADER = re.compile(r"^#\s*size\s+count\s.*\balgbw\b")
_ROW = re.compile(r"^\d+(\s|$)")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b(?:.*\bdevice\s+\d+\s+\[\w+\]\s*(.*))?")
_UNITS = re.compile(r"^#\s*\([^()]+\)\s")
_END = re.compile(r"^#\s*(Out of bounds values|Avg bus bandwidth)")
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|gather|scatter|sendrecv)_perf\b"
)
_KNOWN_UNITS = {"(B)", "(elements)", "(us)", "(GB/s)", "(%)"}
_RATES = ("algbw", "busbw")
_PLACES = ("out_of_place", "in_place")
"""Of the result: what nccl-tests prints first and second. Gradients are summed in place."""
_LOG = Schema(
    "an nccl-tests log",
    (
        Column("size", "int", "positive"),
        Column("time", "microseconds", "positive"),
        *(Column(name, "float", "non_negative") for name in (*_RATES, "#wrong")),
        Column("collective", "str"),
        Column("ranks", "int", "non_negative"),
        Column("place", "str"),
    ),
)
_DIVIDE = "two logs in one file? give each its own file, repeats as one CSV with columns bytes and seconds"
_WHOLE = "get the whole log, or put what there is of it into a CSV with columns bytes and seconds"


class Log(NamedTuple):
    """What a log holds, in one table or in several, of different collectives or ranks.

    frame : columns bytes, seconds, place, collective ("" where unsaid) and ranks (0 where unsaid), two rows a
        size if it has times in place
    devices : names of GPUs, of each rank of the last table; empty where unsaid
    """

    frame: DataFrame
    devices: tuple[str, ...]


def is_log(text: str) -> bool:
    """Return whether it has the head of a table as nccl-tests prints it."""
    return any(_HEADER.match(_LABEL.sub("", line)) for line in text.splitlines())


def read_log(text: str, file: str, collective: str = "") -> Log:
    """Return all tables of a log; ``collective`` is of those whose program it does not name.

    Rows of size 0 are left out: all_gather prints them where a message is too small to be divided among the
    ranks. Raises UserError naming file, row and column for a log that is cut, for a second table of the same
    collective and ranks, for wrong values, and for times that are not of the GPU, in other units, or
    contradict the bandwidths printed beside them.
    """
    check_cells(text, "\n", file)
    scan = _Scan(file, collective)
    for number, line in enumerate(text.splitlines(), start=1):
        scan.take(number, _LABEL.sub("", line))
    sheet = scan.sheet()
    frame = _LOG.frame(sheet, exact=False)
    for row in np.flatnonzero(frame["#wrong"])[:1]:
        problem = f"{frame['#wrong'][row]:g} wrong values: fix the collective before timing it"
        sheet.fail(int(row), "#wrong", problem)
    frame = frame.rename(columns={"size": "bytes", "time": "seconds"})
    _check_bandwidths(frame, sheet)
    return Log(frame[["bytes", "seconds", "place", "collective", "ranks"]], tuple(scan.devices))


def _check_bandwidths(frame: DataFrame, sheet: Sheet) -> None:
    """Printed to 0.01 GB/s, from times that are printed to four digits or more."""
    factors = [
        bus_factor(name, ranks) if name in COLLECTIVES and ranks > 1 else np.nan
        for name, ranks in zip(frame["collective"], frame["ranks"], strict=True)
    ]
    algbw = frame["bytes"] / frame["seconds"] / 1e9
    for name, rate in zip(_RATES, (algbw, algbw * factors), strict=True):
        wrong = (rate - frame[name]).abs() > 0.0051 + 0.001 * rate
        for row in np.flatnonzero(wrong)[:1]:
            problem = "contradicts size over time: mixed units? the time must be in microseconds"
            sheet.fail(int(row), f"{frame['place'][row]}_{name}", problem)


class _Scan:
    """Reads a log line by line: which table it is in, of which program and ranks, and the rows so far."""

    def __init__(self, file: str, collective: str) -> None:
        self.file, self.collective = file, collective
        self.after: list[str] = []  # names from the time out of place on; empty outside a table
        self.ranks, self.devices = 0, list[str]()
        self.tables: list[tuple[str, int]] = []
        self.ended = True
        self.lines: list[int] = []
        self.rows: list[tuple[str, ...]] = []

    def take(self, number: int, line: str) -> None:
        """Take the next line, without its label."""
        if _HEADER.match(line):
            self._begin(number, line)
        elif rank := _RANK.match(line):
            self.ranks = max(self.ranks, int(rank[1]) + 1)
            self.devices += [rank[2].strip()] if rank[2] else []
        elif line.startswith("# Using devices"):
            self.ranks, self.devices = 0, []
        elif _END.match(line):
            self.after, self.ended = [], self.ended or "Avg" in line
        elif self.after and _UNITS.match(line):
            units = line.strip("# ").split()
            if not set(units) <= _KNOWN_UNITS:
                problem = f"columns are not in (B), (us) and (GB/s) but in {' '.join(units)}"
                raise UserError(f"{self.file}: line {number}: its {problem}: mixed units?")
        elif self.after and _ROW.match(line):
            self._row(number, line.split())
        elif program := _PROGRAM.search(line):
            self.collective = program[1]

    def _begin(self, number: int, line: str) -> None:
        where, table = f"{self.file}: line {number}", (self.collective, self.ranks)
        names = line.lstrip("# ").split()
        if "time" not in names:
            raise UserError(f"{where}, column cputime: not GPU time: run without -C")
        if not self.ended:
            raise UserError(f"{where}: a table begins in another: {_DIVIDE}")
        if table in self.tables:
            raise UserError(f"{where}: a second table of {table[0]} of {table[1]} ranks: {_DIVIDE}")
        self.after, self.ended = names[names.index("time") :], False
        self.tables.append(table)

    def _row(self, number: int, words: list[str]) -> None:
        """Take a row: words before the time vary by version, so those behind it are counted from the end."""
        start = len(words) - len(self.after) - ("timestamp" in self.after)  # two words, one name
        if not 3 <= start <= 5:
            problem = f"column time: truncated after {len(words)} words"
            raise UserError(f"{self.file}: row at line {number}, {problem}")
        half = self.after.index("time", 1) if "time" in self.after[1:] else len(self.after)
        for place, begin in zip(_PLACES, range(0, len(self.after), half), strict=False):
            names = self.after[begin : begin + half]
            cells = dict(zip(names, words[start + begin :], strict=False))
            if words[0] == "0" or cells.get("time", "N/A") == "N/A":
                continue
            # Old versions print the largest deviation as "error"; N/A means that values were not checked.
            wrong = cells.get("#wrong", "N/A").replace("N/A", "0")
            rates = (cells.get(name, "") for name in _RATES)
            known = (self.collective, str(self.ranks), place)
            self.lines.append(number)
            self.rows.append((words[0], cells["time"], *rates, wrong, *known))

    def sheet(self) -> Sheet:
        """Return the rows of all tables, each with the program and the number of ranks printed above it."""
        if not self.rows:
            raise UserError(f"{self.file}: a header of nccl-tests but no rows: truncated log?")
        if not self.ended:
            problem = "no '# Avg bus bandwidth' after the rows: the log is cut"
            raise UserError(f"{self.file}: {problem}: {_WHOLE}")
        return Sheet(self.file, _LOG.names, tuple(self.lines), tuple(self.rows))
