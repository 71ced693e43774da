"""Logs as nccl-tests (all_reduce_perf and its sisters) print them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddlkit.core.errors import UserError
from ddlkit.store.sheet import Column, Schema, Sheet

if TYPE_CHECKING:
    from pandas import DataFrame

# Launchers label lines: mpirun --tag-output "[1,0]<stdout>:", srun -l "0: ".
_LABEL = re.compile(r"^\s*(\[\d+,\d+\]<\w+>:|\d+:\s)?\s*")
_HEADER = re.compile(r"^#\s*size\s+count\s.*\balgbw\b")
_ROW = re.compile(r"^\d+(\s|$)")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b")
_END = re.compile(r"^#\s*Out of bounds values")
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|gather|scatter|sendrecv)_perf\b"
)

_LOG = Schema(
    "an nccl-tests log",
    (
        Column("size", "int", "positive"),
        Column("time", "float", "positive"),
        Column("#wrong", "float", "non_negative"),
        Column("collective", "str"),
        Column("ranks", "int", "non_negative"),
    ),
)


def looks_like_one(text: str) -> bool:
    """Whether the table header of nccl-tests stands in the text."""
    return any(_HEADER.match(_LABEL.sub("", line)) for line in text.splitlines())


def read_log(text: str, file: str) -> DataFrame:
    """Columns bytes, seconds (out of place), and collective and ranks where the log tells them.

    Rows of size 0 are left out: all_gather prints them where a message is too small to be divided
    among the ranks. Raises UserError naming file, row and column for truncated rows, wrong values,
    and times that are not of the GPU.
    """
    sheet = _sheet(text, file)
    frame = _LOG.frame(sheet)
    for row, wrong in enumerate(frame["#wrong"]):
        if wrong:
            sheet.fail(
                row, "#wrong", f"{wrong:g} wrong values: mend the collective before timing it"
            )
    frame["seconds"] = frame["time"] / 1e6
    frame = frame.rename(columns={"size": "bytes"})
    known = [name for name in ("collective", "ranks") if frame[name].all()]
    return frame[["bytes", "seconds", *known]]


def _sheet(text: str, file: str) -> Sheet:
    """The rows of the log, each with the program and the number of ranks printed above it."""
    after: list[str] = []  # header names from the out-of-place time on; empty outside the table
    collective, ranks = "", 0
    lines, rows = [], []
    for number, labelled in enumerate(text.splitlines(), start=1):
        line = _LABEL.sub("", labelled)
        if _HEADER.match(line):
            after = _after_time(line, file, number)
        elif rank := _RANK.match(line):
            ranks = max(ranks, int(rank[1]) + 1)
        elif line.startswith("# Using devices"):
            ranks = 0
        elif _END.match(line):
            after = []
        elif after and _ROW.match(line):
            size, time, wrong = _cells(line.split(), after, file, number)
            if size != "0":
                lines.append(number)
                rows.append((size, time, wrong, collective, str(ranks)))
        elif program := _PROGRAM.search(line):
            collective = program[1]
    if not rows:
        raise UserError(
            f"{file}: a header of nccl-tests but no rows: truncated log, or the run failed"
        )
    return Sheet(file, _LOG.names, tuple(lines), tuple(rows))


def _after_time(header: str, file: str, number: int) -> list[str]:
    names = header.lstrip("# ").split()
    if "time" not in names:
        raise UserError(
            f"{file}: row at line {number}, column cputime: not GPU time: run without -C"
        )
    return names[names.index("time") :]


def _cells(words: list[str], after: list[str], file: str, number: int) -> tuple[str, str, str]:
    """Size, out-of-place time and number of wrong values of a row.

    The words in front of the time vary (all_gather prints no redop, old versions no root), those
    behind do not, so they are counted from the end. A time stamp is one name but two words.
    """
    start = len(words) - len(after) - ("timestamp" in after)
    if not 3 <= start <= 5:
        raise UserError(
            f"{file}: row at line {number}, column time: truncated after {len(words)} words"
        )
    measured = dict(zip(reversed(after), reversed(words[start : start + len(after)]), strict=True))
    # Old versions print the largest deviation as "error"; N/A means that values were not checked.
    wrong = measured.get("#wrong", "N/A")
    return words[0], measured["time"], "0" if wrong == "N/A" else wrong
