"""Logs as nccl-tests (all_reduce_perf and its sisters) print them: one reader, whoever asks."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b(?:.*\bon\s+(\S+)\s+device\s+\d+\s+\[\w+\]\s*(.*))?")
_UNITS = re.compile(r"^#\s*\([^()]+\)\s")
_END = re.compile(r"^#\s*(Out of bounds values|Avg bus bandwidth)")
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|gather|scatter|sendrecv)_perf\b"
)
_KNOWN_UNITS = {"(B)", "(elements)", "(us)", "(GB/s)", "(%)"}

_LOG = Schema(
    "an nccl-tests log",
    (
        Column("size", "int", "positive"),
        Column("time", "microseconds", "positive"),
        Column("algbw", "float", "non_negative"),
        Column("busbw", "float", "non_negative"),
        Column("#wrong", "float", "non_negative"),
        Column("collective", "str"),
        Column("ranks", "int", "non_negative"),
        Column("place", "str"),
    ),
)
_PLACES = ("out_of_place", "in_place")
"""Of the result: what nccl-tests prints first and second. Gradients are summed in place."""
_WHOLE = "get the whole log, or put what there is of it into a CSV with columns bytes and seconds"
_DIVIDE = "two logs in one file? give each its own file, repeats as one CSV with columns bytes and seconds"


class Log(NamedTuple):
    """What a log holds, in one table or in several, of different collectives or ranks.

    frame : columns bytes, seconds, place, collective ("" where unsaid) and ranks (0 where unsaid), two rows a
        size if it has times in place
    nodes, devices : hosts and names of GPUs, of each rank of the last table; empty where unsaid
    """

    frame: DataFrame
    nodes: tuple[str, ...]
    devices: tuple[str, ...]


def is_log(text: str) -> bool:
    """Whether it has the head of a table as nccl-tests prints it."""
    return any(_HEADER.match(_LABEL.sub("", line)) for line in text.splitlines())


def read_log(text: str, file: str, collective: str = "") -> Log:
    """All tables of a log; ``collective`` is of those whose program it does not name.

    Rows of size 0 are left out: all_gather prints them where a message is too small to be divided
    among the ranks. Raises UserError naming file, row and column for a log that is cut, for a second table
    of the same collective and ranks, for wrong values, for times that are not of the GPU, in other units, or
    that contradict the bandwidths printed beside them.
    """
    check_cells(text, "\n", file)
    scan = _Scan(file, collective)
    for number, line in enumerate(text.splitlines(), start=1):
        scan.take(number, _LABEL.sub("", line))
    sheet = scan.sheet()
    frame = _LOG.frame(sheet, exact=False)
    for row, wrong in enumerate(frame["#wrong"]):
        if wrong:
            sheet.fail(
                row, "#wrong", f"{wrong:g} wrong values: mend the collective before timing it"
            )
    frame = frame.rename(columns={"size": "bytes", "time": "seconds"})
    _check_bandwidths(frame, sheet)
    kept = ["bytes", "seconds", "place", "collective", "ranks"]
    return Log(frame[kept], tuple(scan.nodes), tuple(scan.devices))


def _check_bandwidths(frame: DataFrame, sheet: Sheet) -> None:
    """Printed to 0.01 GB/s, from times that are printed to four digits or more."""
    known = frame["collective"].isin(COLLECTIVES) & (frame["ranks"] > 1)
    factors = [
        bus_factor(one, ranks) if told else np.nan
        for one, ranks, told in zip(frame["collective"], frame["ranks"], known, strict=True)
    ]
    algbw = frame["bytes"] / frame["seconds"] / 1e9
    for name, rate in (("algbw", algbw), ("busbw", algbw * factors)):
        wrong = (rate - frame[name]).abs() > 0.0051 + 0.001 * rate
        if wrong.any():
            row = int(np.argmax(wrong))
            problem = "contradicts size over time: mixed units? the time must be in microseconds"
            sheet.fail(row, f"{frame['place'][row]}_{name}", problem)


class _Scan:
    """Reads a log line by line: which table it is in, of which program and ranks, and the rows so far."""

    def __init__(self, file: str, collective: str) -> None:
        self.file, self.collective = file, collective
        self.after: list[str] = []  # names from the time out of place on; empty outside a table
        self.ranks, self.nodes, self.devices = 0, list[str](), list[str]()
        self.tables: list[tuple[str, int]] = []
        self.ended = True
        self.lines: list[int] = []
        self.rows: list[tuple[str, ...]] = []

    def take(self, number: int, line: str) -> None:
        """The next line, without its label."""
        if _HEADER.match(line):
            self._begin(number, line)
        elif rank := _RANK.match(line):
            self.ranks = max(self.ranks, int(rank[1]) + 1)
            self.nodes += [rank[2]] if rank[2] else []
            self.devices += [rank[3].strip()] if rank[3] else []
        elif line.startswith("# Using devices"):
            self.ranks, self.nodes, self.devices = 0, [], []
        elif _END.match(line):
            self.after, self.ended = [], self.ended or "Avg" in line
        elif self.after and _UNITS.match(line):
            units = line.strip("# ").split()
            if not set(units) <= _KNOWN_UNITS:
                raise UserError(
                    f"{self.file}: line {number}: its columns are not in (B), (us) and (GB/s) as nccl-tests "
                    f"prints them, but in {' '.join(dict.fromkeys(units))}: mixed units?"
                )
        elif self.after and _ROW.match(line):
            self._row(number, line)
        elif program := _PROGRAM.search(line):
            self.collective = program[1]

    def _begin(self, number: int, line: str) -> None:
        if not self.ended:
            raise UserError(f"{self.file}: line {number}: a table begins in another: {_DIVIDE}")
        names = line.lstrip("# ").split()
        if "time" not in names:
            raise UserError(
                f"{self.file}: row at line {number}, column cputime: not GPU time: run without -C"
            )
        self.after, self.ended = names[names.index("time") :], False
        table = self.collective, self.ranks
        if table in self.tables:
            of = f"{table[0] or 'collectives'} between {table[1] or 'unknown'} ranks"
            raise UserError(f"{self.file}: line {number}: a second table of {of}: {_DIVIDE}")
        self.tables.append(table)

    def _row(self, number: int, line: str) -> None:
        size, both = _cells(line.split(), self.after, self.file, number)
        for place, measured in zip(_PLACES, both, strict=False):
            if size != "0" and measured[0] != "N/A":
                self.lines.append(number)
                self.rows.append((size, *measured, self.collective, str(self.ranks), place))

    def sheet(self) -> Sheet:
        """The rows of all tables, each with the program and the number of ranks printed above it."""
        if not self.rows:
            raise UserError(
                f"{self.file}: a header of nccl-tests but no rows: truncated log, or the run failed"
            )
        if not self.ended:
            raise UserError(
                f"{self.file}: no '# Avg bus bandwidth' after the rows: the log is cut: {_WHOLE}"
            )
        return Sheet(self.file, _LOG.names, tuple(self.lines), tuple(self.rows))


def _cells(
    words: Sequence[str], after: Sequence[str], file: str, number: int
) -> tuple[str, list[tuple[str, ...]]]:
    """Size, then time, bandwidths and number of wrong values out of place, and in place where printed.

    The words in front of the time vary (all_gather prints no redop, old versions no root), those
    behind do not, so they are counted from the end. A time stamp is one name but two words.
    """
    start = len(words) - len(after) - ("timestamp" in after)
    if not 3 <= start <= 5:
        raise UserError(
            f"{file}: row at line {number}, column time: truncated after {len(words)} words"
        )
    printed = list(zip(after, words[start : start + len(after)], strict=True))
    begins = [k for k, (name, _) in enumerate(printed) if name == "time"]
    found: list[tuple[str, ...]] = []
    for begin, end in zip(begins, [*begins[1:], len(printed)], strict=True):
        cells = dict(printed[begin:end])
        # Old versions print the largest deviation as "error"; N/A means that values were not checked.
        wrong = cells.get("#wrong", "N/A")
        rates = cells.get("algbw", ""), cells.get("busbw", "")
        found.append((cells["time"], *rates, "0" if wrong == "N/A" else wrong))
    return words[0], found
