"""The CSV that rccl-tests writes by its options -Z csv -x FILE, as message times.

It has a row for each size, cycle and place. Times are means of one operation in
microseconds, and rates are in GB/s. Sizes are those of `ddlkit.core.collective`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddlkit.core.units import format_bytes
from ddlkit.formats.benchmark_rows import (
    UNTRUSTED_TIMES,
    BenchmarkRow,
    benchmark_times,
    collective_named,
)
from ddlkit.formats.contract import MessageOptions, MessageTimes
from ddlkit.store.sheet import Column, Schema, Sheet, read_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

SOURCE = "rccl-tests"

_TABLE = Schema(
    "the CSV of rccl-tests",
    (
        Column("collective", "str", "named"),
        # Early versions have gpus, later ones ranks with some GPUs each.
        Column("gpus", "int", "non_negative", default="0"),
        Column("ranks", "int", "non_negative", default="0"),
        Column("gpusperrank", "int", "positive", default="1"),
        Column("size", "int", "non_negative"),
        Column("inplace", "int", "non_negative"),
        Column("time", "microseconds", "non_negative"),
        Column("busbw", "float", "non_negative"),
        Column("#wrong", "str", default="0"),
        # The options -d all and -o all time several types and operations.
        Column("type", "str", default=""),
        Column("redop", "str", default=""),
    ),
)


def matches(text: str) -> bool:
    """Return whether the first line of a file has the columns of rccl-tests.

    Examples
    --------
    >>> matches("numCycle,collective,gpus,size,type,redop,inplace,time,algbw,busbw")
    True
    """
    first_line, _, _ = text.strip().partition("\n")
    names = {name.strip() for name in first_line.split(",")}
    return {"numCycle", "collective", "size", "inplace", "time", "busbw"} <= names


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the message times of a run.

    The option ``place`` chooses between times in place (the result over the input) and out
    of place, as in `benchmark_times`. The option ``table`` is refused, because a file is
    one table.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    options.refuse_table(file, has_choice=False)
    sheet = read_sheet(text, file)
    # The file may have other columns, which are ignored.
    frame = _TABLE.frame(sheet, exact=False)
    _refuse_wrong_results(sheet, frame)
    _refuse_times_of_zero(sheet, frame)
    # Each GPU is a rank of the collective. A file has either the number of GPUs ("gpus"), or
    # the number of processes ("ranks") and of the GPUs of each ("gpusperrank"). The number
    # for which columns are missing is 0 by their defaults, so the larger one is right.
    n_ranks = np.maximum(frame["gpus"], frame["ranks"] * frame["gpusperrank"])
    is_in_place = frame["inplace"] > 0
    rows = []
    for row in range(len(frame)):
        # A message that is too small to be divided among the ranks has size 0.
        if frame["size"][row] == 0:
            continue
        rows.append(
            BenchmarkRow(
                where=f"{file}: row at line {sheet.lines[row]}",
                n_bytes=int(frame["size"][row]),
                seconds=float(frame["time"][row]),
                collective=collective_named(frame["collective"][row]),
                ranks=int(n_ranks[row]),
                place="in_place" if is_in_place[row] else "out_of_place",
                busbw_bytes_per_s=1e9 * float(frame["busbw"][row]),
                # Rates are printed to 0.01 GB/s, so rounding changes them by 0.005 GB/s at
                # most. Twice as much is allowed, which is a choice.
                busbw_rounding_bytes_per_s=1e9 * 0.01,
                variant={"type": frame["type"][row], "redop": frame["redop"][row]},
            )
        )
    return benchmark_times(SOURCE, rows, file, options)


def _refuse_wrong_results(sheet: Sheet, frame: DataFrame) -> None:
    """Raise UserError if the benchmark has found wrong results of a collective."""
    # N/A means that the results were not checked. An empty cell is taken to mean the same.
    # Both are accepted. If the file lacks the column, all cells are "0" by default.
    is_wrong = ~frame["#wrong"].isin(["0", "N/A", ""]).to_numpy()
    if is_wrong.any():
        # argmax returns the first row with wrong results.
        row = int(np.argmax(is_wrong))
        size = format_bytes(frame["size"][row])
        count = frame["#wrong"][row]
        problem = f"the benchmark found {count} wrong values in a message of {size}"
        sheet.fail(row, "#wrong", f"{problem}, {UNTRUSTED_TIMES}")


def _refuse_times_of_zero(sheet: Sheet, frame: DataFrame) -> None:
    """Raise UserError if a message took no time.

    A message of size 0 may take no time, because `read` leaves it out.
    """
    is_timed_as_zero = ((frame["size"] > 0) & (frame["time"] <= 0)).to_numpy()
    if is_timed_as_zero.any():
        # argmax returns the first such row.
        row = int(np.argmax(is_timed_as_zero))
        time = f"{frame['time'][row]:g}"
        sheet.fail(row, "time", f"is {time}; it must be above zero")
