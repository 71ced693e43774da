"""Logs of nccom-test of AWS Neuron, as message times.

It prints a table with the columns size(B), count(elems), type, time:avg(us),
algbw(GB/s) and busbw(GB/s), and perhaps others. The collective and the number of ranks
are only in its command, as in ``nccom-test -r 32 allr``.

Sizes are those of `ddlkit.core.collective`: the size of an all_gather is all that a
rank receives. The unit of the bandwidths is 2**30 or 1e9 bytes a second, depending on
the version, so that each row is checked against both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ddlkit.core.errors import UserError
from ddlkit.formats.benchmark_rows import (
    BY_SPELLING,
    KNOWN,
    BenchmarkRow,
    benchmark_times,
    positive,
    whole,
)
from ddlkit.formats.contract import MessageOptions, MessageTimes
from ddlkit.formats.labels import unlabelled

SOURCE = "nccom-test"

# Some versions print "time(us)", which is the median.
_HEAD = re.compile(r"size\(B\)\s+.*\btime(?::avg)?\(us\)\s+.*\balgbw\(GB/s\)", re.I)
_COMMAND = re.compile(r"\bnccom-test\s+(?P<words>.*)")
_RANKS = re.compile(r"(?:-r|--nworkers)[\s=]+(?P<ranks>\d{1,9})\b")
# Its short names for collectives.
_SHORT = {"allr": "all_reduce", "allg": "all_gather", "redsct": "reduce_scatter"}

_UNITS_BYTES_PER_S = (1e9, 2.0**30)
# Bandwidths are printed to 0.01 of their unit.
_ROUNDING = 0.005
# How far the printed algbw may be from size / time besides its rounding, as a share of the
# printed one.
_RATE_TOLERANCE = 0.01
# The larger unit is 1.074 times the smaller one. A rate that is read in the wrong unit is
# off by less than this share.
_SHARE_BETWEEN_UNITS = 0.08


def matches(text: str) -> bool:
    """Return whether some line of a file is the head of a table of nccom-test.

    Examples
    --------
    >>> matches("size(B)  count(elems)  type  time:avg(us)  algbw(GB/s)  busbw(GB/s)")
    True
    """
    return bool(_HEAD.search(text))


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the message times of all tables in a log.

    The option ``collective`` is used for rows before which no command names a
    collective, and ``ranks`` for rows before which the last command states no number of
    ranks. The option ``table`` is refused here, because the tables have no numbers.
    `benchmark_times` refuses ``place``, because times in place and out of place are not
    distinguished.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    options.refuse_table(file)
    # The collective that a command has named, "" until one does.
    collective = ""
    # The number of ranks in the last command, 0 if there is none. `benchmark_times` uses
    # the option in place of 0.
    ranks = 0
    # The columns of the table to which the next lines belong. Empty outside of a table.
    columns: list[str] = []
    rows = []
    # `unlabelled` removes what launchers and loggers put before the lines.
    for number, line in enumerate(unlabelled(text), start=1):
        command = _COMMAND.search(line)
        if command:
            # A command that names no collective leaves the earlier one as it is.
            collective = _collective_of(command["words"]) or collective
            ranks = _ranks_of(command["words"])
        words = line.split()
        # A row of a table begins with its size.
        is_row = columns and words and words[0].isdigit()
        if _HEAD.match(line):
            # Some versions call the column of times "time:avg(us)", and others "time(us)".
            columns = [word.lower().replace(":avg", "") for word in words]
        elif is_row:
            where = f"{file}: row at line {number}"
            cells = _cells_by_column(words, columns, where)
            # The user's choice is used only if no command has named a collective.
            name = collective or _collective_of_user(options, file)
            rows.append(_row(cells, where, name, ranks))
        elif words:
            # Any other line that is not empty ends the table.
            columns = []
    return benchmark_times(SOURCE, rows, file, options)


def _ranks_of(words: str) -> int:
    """Return the number of ranks that a command of nccom-test states, 0 if none.

    ``words`` are the arguments of the command.
    """
    stated = _RANKS.search(words)
    return int(stated["ranks"]) if stated else 0


def _cells_by_column(
    words: list[str], columns: list[str], where: str
) -> dict[str, str]:
    """Return the words of a row by the names of their columns.

    Raises UserError unless there is a word for each column.
    """
    if len(words) != len(columns):
        raise UserError(
            f"{where}: {len(words)} words for {len(columns)} columns: is the log cut?"
        )
    return dict(zip(columns, words, strict=True))


def _collective_of_user(options: MessageOptions, file: str) -> str:
    """Return the collective that the user states, or raise UserError if none is stated."""
    if not options.collective:
        raise UserError(
            f"{file}: nccom-test does not name its collective: "
            f"give --collective {' or '.join(KNOWN)}"
        )
    return options.collective


def _collective_of(words: str) -> str:
    """Return the collective that a command of nccom-test names, "" if none.

    ``words`` are the arguments of the command. The first one that names a collective
    counts, in a short spelling such as "allr" or in a full one.
    """
    for word in words.split():
        letters = re.sub("[^a-z]", "", word.lower())
        name = _SHORT.get(letters) or BY_SPELLING.get(letters)
        if name:
            return name
    return ""


def _row(
    cells: Mapping[str, str], where: str, collective: str, ranks: int
) -> BenchmarkRow:
    """Return a row of a table as a time of a collective.

    ``cells`` are the words of the row by the names of their columns. ``where`` is the
    file and the line, as errors name them, and ``ranks`` is 0 if it is unknown. Raises
    UserError if a number is missing, or if algbw contradicts size / time.
    """
    # Names of columns are in small letters here. Each table has the columns of size, time
    # and algbw, because `_HEAD` demands them, but perhaps not that of busbw.
    size = whole(cells["size(b)"], where, "size(B)")
    seconds = positive(cells["time(us)"], where, "time(us)") / 1e6
    try:
        algbw = float(cells["algbw(gb/s)"])
        busbw = float(cells["busbw(gb/s)"])
    except (KeyError, ValueError):
        raise UserError(f"{where}, algbw and busbw: a number is missing") from None
    # The unit, in bytes/s, is 1e9 (GB/s) or 2**30 (GiB/s): the one that fits algbw better.
    unit = _unit_of_bandwidths(algbw, size / seconds)
    distance = abs(algbw - size / seconds / unit)
    # The tolerance is a share of algbw, and its printed value is rounded besides.
    allowed = _RATE_TOLERANCE * algbw + _ROUNDING
    # The comparison is False also for a bandwidth that is not a number (NaN).
    if not distance <= allowed:
        raise UserError(
            f"{where}, algbw(GB/s): {algbw:g} contradicts {size} bytes in "
            f"{cells['time(us)']} us: other units?"
        )
    # The printed busbw may differ from the one that follows from the time, for two reasons.
    # The first is rounding to steps of 0.01, by up to half a step, which is _ROUNDING. A whole
    # step is allowed, by choice.
    step_bytes_per_s = 2 * _ROUNDING * unit
    # The second is that `unit` may be the wrong one, because an algbw of few digits may fit
    # both GB/s and GiB/s. So the difference of the units, about 7%, is also allowed. It is
    # allowed in every row, because a row does not show whether its unit is wrong.
    wrong_unit_bytes_per_s = _SHARE_BETWEEN_UNITS * busbw * unit
    return BenchmarkRow(
        where=where,
        n_bytes=size,
        seconds=seconds,
        collective=collective,
        ranks=ranks,
        busbw_bytes_per_s=busbw * unit,
        busbw_rounding_bytes_per_s=step_bytes_per_s + wrong_unit_bytes_per_s,
        # Types of elements tell several kinds of messages apart.
        variant={"type": cells.get("type", "")},
    )


def _unit_of_bandwidths(algbw: float, bytes_per_s: float) -> float:
    """Return the unit of the printed bandwidths, in bytes/s.

    Depending on the version of nccom-test, the unit is 1e9 or 2**30 bytes/s. It is taken to
    be the one in which the printed ``algbw`` is closer to ``bytes_per_s``, which is size / time.
    """

    def distance(unit: float) -> float:
        return abs(algbw - bytes_per_s / unit)

    return min(_UNITS_BYTES_PER_S, key=distance)
