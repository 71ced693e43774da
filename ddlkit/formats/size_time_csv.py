"""A user's own table of message times: CSV, or separated by semicolons, tabs or blanks.

It needs a size and a time. The names "bytes" and "seconds" say what these are. Other
names must say their unit, as size_mib and latency_us do. The columns of `KEYS`
distinguish message times. The number of ranks may have another name, such as
world_size, and so may the collective, such as op. Any other column must not divide the
times of one size into several kinds.
"""

from __future__ import annotations

import csv
import io
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import LEAST, MOST_WHOLE, format_bytes
from ddlkit.formats.benchmark_rows import BY_SPELLING
from ddlkit.formats.contract import KEYS, MessageOptions, MessageTimes
from ddlkit.store.sheet import (
    SCHEMAS,
    Column,
    Schema,
    Sheet,
    columns_in_words,
    is_json,
    read_sheet,
)

if TYPE_CHECKING:
    from pandas import DataFrame

RANKS_NAMES = frozenset(
    {
        "world_size",
        "worldsize",
        "n_ranks",
        "nranks",
        "num_ranks",
        "ranks",
        "n_gpus",
        "ngpus",
        "num_gpus",
        "gpus",
        "n_workers",
        "workers",
        "nprocs",
        "num_procs",
        "np",
    }
)
"""Names that a column with the number of ranks may have, in small letters."""

REPEATS_NAMES = frozenset(
    {"repeat", "trial", "iteration", "iter", "step", "run", "sample", "rep", "session"}
)
"""Names of columns that count repeated times of one kind, in small letters."""

_SIZE_UNIT = r"(?P<unit>bytes?|b|kib|mib|gib|kb|mb|gb)"
_TIME_UNIT = (
    r"(?P<unit>seconds?|secs?|s|milliseconds?|msecs?|ms|microseconds?|usecs?|us)"
)
# Matched to a name as `_in_letters` returns it: a noun with or without a unit, or a unit
# alone.
_SIZE_NAMES = (
    re.compile(
        r"(?:(?:message|msg|data|buffer|payload|tensor)_?)?(?:size|n_?bytes|bytes)"
        rf"(?:_in)?(?:_{_SIZE_UNIT})?"
    ),
    # A column that is called only "b" may as well count blocks or batches.
    re.compile(rf"(?!b$){_SIZE_UNIT}"),
)
_TIME_NAMES = (
    re.compile(
        r"(?:(?:avg|average|mean|median)_?)?(?:time|latency|duration|elapsed)"
        rf"(?:_in)?(?:_{_TIME_UNIT})?"
    ),
    re.compile(rf"(?:t_)?{_TIME_UNIT}"),
)
# Names such as "mean_us", which count where no other column has times.
_MEAN_NAMES = (re.compile(rf"(?:avg|average|mean|median)_{_TIME_UNIT}"),)
_BYTES = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SECONDS = {"s": 1.0, "m": 1e-3, "u": 1e-6}

# Units that may be a power of 1000 bytes or the same power of 1024 bytes.
_POWERS_OF_AMBIGUOUS_UNITS = {"kb": 1, "mb": 2, "gb": 3}

# Stands for the unit of a column whose name does not say it.
_UNKNOWN_UNIT = 0

# What may stand between two cells. The first one that the header has is that of the file.
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", " ": "blank"}

# A message of this size is slower than this rate only if its time is not in seconds.
_LARGE_BYTES = 65536
_SLOWEST_BYTES_PER_S = 1e4

# A column that tells several kinds of messages apart has several values at this share of
# the sizes or more. At fewer sizes this may be chance, as with rounded rates.
_DIVIDED_SHARE = 0.5


class _Quantity(NamedTuple):
    """A column of sizes or times: its name in the file, and how it is read.

    Attributes
    ----------
    name : str
        The name in the header.
    unit : float
        The bytes or seconds in a unit of the column, or `_UNKNOWN_UNIT`.
    ambiguous_unit : str
        The unit in the name if it has several meanings, such as "kb", and otherwise "".
    """

    name: str
    unit: float
    ambiguous_unit: str = ""


def matches(text: str) -> bool:
    r"""Return whether the first line of a file names a column of sizes and one of times.

    In two cases a single one of these columns is enough, and `read` then reports that the
    other one is missing. In the first case the column is called "bytes" or "seconds". In
    the second case it has times, and the line looks like a header: it has no digits and no
    braces, and several columns that are not separated by blanks.

    Examples
    --------
    >>> matches("bytes,seconds\n1024,2e-5\n"), matches("size_kib;latency_us\n1;20\n")
    (True, True)
    >>> matches("algo,count,time_ms\nring,8,20\n"), matches("step 7, 120 ms\n")
    (True, False)
    >>> matches("tensor,flops\nconv,20\n")
    False
    """
    header = _header(text)
    if "bytes" in header or "seconds" in header:
        return True
    # Without one of these two names, a column of times is needed.
    if not _times(header):
        return False
    first_line, _, _ = text.strip().partition("\n")
    # Names of columns have no digits or braces, unlike JSON or a line such as "step 7, 120 ms".
    has_names = not re.search(r"[\d{}]", first_line)
    # Sentences have blanks, too, so that blanks do not show that there are columns.
    has_columns = len(header) > 1 and _separator(first_line) != " "
    has_sizes = bool(_sizes(header))
    return has_sizes or (has_columns and has_names)


def refuse_json(text: str, file: str) -> None:
    """Raise UserError for JSON that no reader of message times has recognized.

    Readers of JSON come before this one. Text that does not begin as JSON does passes.

    Parameters
    ----------
    text : str
        The content of the file.
    file : str
        The file, as errors name it.

    Raises
    ------
    UserError
        If the text is JSON.
    """
    if not text.lstrip().startswith("{") and not is_json(text):
        return
    # What ddlkit fit --json writes begins with the form of the cost.
    if re.match(r'\s*\{\s*"form"', text):
        raise UserError(
            f"{file}: is a cost that ddlkit fit wrote, and no table of measured times: "
            "give it to ddlkit predict by --cost, or give measured times"
        )
    if '"traceEvents"' in text:
        raise UserError(
            f"{file}: is a trace, as torch.profiler writes it, and no table of message "
            f"times: if messages are in it, ddlkit import {file} --messages m.csv makes a "
            "table of them"
        )
    raise UserError(
        f"{file}: is JSON, but neither of nccl-tests -J nor of NCCL Inspector: give one "
        "of these, a log of a benchmark, or a CSV with the columns bytes and seconds"
    )


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the message times of a file, with the columns of `KEYS` that it has.

    The options ``place`` and ``table`` are refused, because only a log has several places
    and tables. The file is refused if a unit is not known, if its times seem to be in
    another unit than it says, or if a column that is not known divides them into several
    kinds.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    refuse_json(text, file)
    first_line, _, _ = text.strip().partition("\n")
    separator = _SEPARATORS[_separator(first_line)]
    sheet = read_sheet(
        _comma_separated(text), file, likely_cause=f"a {separator} is missing or stray"
    )
    # Columns of ranks and collectives with other names get the names of `KEYS`.
    sheet = _with_known_collectives(_with_known_ranks(sheet))
    sizes = _sizes(sheet.header)
    times = _times(sheet.header)
    _refuse_two_unknown_units(sheet, sizes, times)
    size = _only_column(sheet, sizes, expected="bytes", example="size_mib")
    time = _only_column(sheet, times, expected="seconds", example="time_us")
    frame = _schema(sheet, size, time).frame(sheet, exact=False)
    frame = _in_bytes_and_seconds(sheet, frame, size, time)
    _refuse_slow(sheet, frame, time.name)
    # Columns that are not read must not tell several kinds of messages apart.
    for position, name in enumerate(sheet.header):
        if name not in (size.name, time.name, *KEYS):
            cells = [row[position] for row in sheet.rows]
            _refuse_dividing(sheet, frame, name, cells)
    options.refuse_options_of_logs(file)
    return MessageTimes("csv", frame)


def _schema(sheet: Sheet, size: _Quantity, time: _Quantity) -> Schema:
    """Return the schema of those columns of a file that are read.

    They are the columns of sizes and of times, and those of `KEYS` that the file has, such
    as "ranks". The latter are read as in a recorded table.
    """
    keys = [
        column
        for column in SCHEMAS["collectives"].columns
        if column.name in KEYS and column.name in sheet.header
    ]
    # A unit of 1 is bytes, and bytes are whole numbers. Sizes in larger units need not be.
    size_kind = "int" if size.unit == 1 else "float"
    columns = (
        Column(size.name, size_kind, "positive"),
        Column(time.name, "float", "positive"),
        *keys,
    )
    return Schema("message times", columns)


def names_links(text: str) -> bool:
    r"""Return whether a file of message times has a column of links.

    Examples
    --------
    >>> names_links("bytes,seconds,link\n1024,2e-5,lab:1gbit\n")
    True
    >>> names_links("bytes,seconds\n1024,2e-5\n")
    False
    """
    # `matches` tells whether the file has message times at all.
    return matches(text) and "link" in _header(text)


# -- Separators ------------------------------------------------------------------------


def _separator(first_line: str) -> str:
    """Return what separates the cells of a table, given its header."""
    for separator in _SEPARATORS:
        if separator in first_line:
            return separator
    return " "


def _header(text: str) -> tuple[str, ...]:
    """Return the names in the first line of a file."""
    first_line, _, _ = text.strip().partition("\n")
    # Several blanks may stand between two cells. The split then makes empty cells between
    # them, which are left out.
    cells = first_line.split(_separator(first_line))
    return tuple(cell.strip().strip('"') for cell in cells if cell.strip())


def _comma_separated(text: str) -> str:
    """Return a table as CSV, in which each line keeps the number that it has in the file."""
    first_line, _, _ = text.strip().partition("\n")
    separator = _separator(first_line)
    if separator == ",":
        return text
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    for line in text.splitlines():
        # An empty line stays empty, so that the lines below keep their numbers.
        cells: list[str] = []
        if line.strip():
            cells = line.split() if separator == " " else line.split(separator)
        # The writer puts quotes around the cells that need them, and only around these.
        writer.writerow([cell.strip().strip('"') for cell in cells])
    return out.getvalue()


# -- Columns ---------------------------------------------------------------------------


def _in_letters(name: str) -> str:
    """Return the name of a column in small letters, with "_" for all that is no letter.

    So "Time (us)" becomes "time_us".
    """
    # Unicode has two characters for the Greek letter of "micro".
    name = name.lower().replace("\u00b5s", "us").replace("\u03bcs", "us")
    return re.sub(r"[^a-z]+", "_", name).strip("_")


def _matched(patterns: tuple[re.Pattern[str], ...], name: str) -> re.Match[str] | None:
    """Return the match of the first pattern that a name of a column fits, if any."""
    for pattern in patterns:
        match = pattern.fullmatch(_in_letters(name))
        if match:
            return match
    return None


def _sizes(header: tuple[str, ...]) -> list[_Quantity]:
    """Return the columns that may have the sizes: only "bytes", if there is one.

    The result says which unit the name of each column states. KB, MB and GB are noted as
    ambiguous, because each may be 1000 or 1024 of the next smaller unit. Their value in
    bytes is `_UNKNOWN_UNIT`, as it is for a name without any unit, such as "size".
    """
    if "bytes" in header:
        return [_Quantity("bytes", 1)]
    sizes = []
    for name in header:
        match = _matched(_SIZE_NAMES, name)
        if match is None:
            continue
        # "bytes", "byte" and "b" are one unit.
        unit = re.sub("bytes?", "b", match["unit"] or "")
        # A name without a unit at its end may still say that sizes are in bytes, as "n_bytes"
        # does. The whole name is match[0].
        if not unit and "bytes" in match[0]:
            unit = "b"
        ambiguous_unit = unit if unit in _POWERS_OF_AMBIGUOUS_UNITS else ""
        sizes.append(_Quantity(name, _BYTES.get(unit, _UNKNOWN_UNIT), ambiguous_unit))
    return sizes


def _times(header: tuple[str, ...]) -> list[_Quantity]:
    """Return the columns that may have the times: only "seconds", if there is one.

    Names of means, such as "mean_us", count only if no other column may have the times.
    """
    if "seconds" in header:
        return [_Quantity("seconds", 1.0)]
    return _times_named(_TIME_NAMES, header) or _times_named(_MEAN_NAMES, header)


def _times_named(
    patterns: tuple[re.Pattern[str], ...], header: tuple[str, ...]
) -> list[_Quantity]:
    """Return the columns of times whose names fit one of the patterns, with their units.

    A name that states no unit has `_UNKNOWN_UNIT`.
    """
    times = []
    for name in header:
        match = _matched(patterns, name)
        if match is None:
            continue
        # The first letter tells the units apart (s, m or u) once "micro" is written as "u".
        unit = (match["unit"] or "").replace("micro", "u")
        first_letter = unit[:1]
        times.append(_Quantity(name, _SECONDS.get(first_letter, _UNKNOWN_UNIT)))
    return times


def _refuse_two_unknown_units(
    sheet: Sheet, sizes: list[_Quantity], times: list[_Quantity]
) -> None:
    """Raise UserError if neither the unit of the sizes nor that of the times is known.

    ``sizes`` and ``times`` are the columns of the sheet that may have these. One error names both
    columns, so that the user can mend the file in one step.
    """
    unknown = []
    for candidates in (sizes, times):
        if len(candidates) == 1 and candidates[0].unit == _UNKNOWN_UNIT:
            unknown.append(candidates[0].name)
    if len(unknown) == 2:
        raise UserError(
            f"{sheet.file}: header, columns {' and '.join(unknown)}: their units are not known: "
            "name them bytes and seconds, or with their units as in size_mib and time_us"
        )


def _only_column(
    sheet: Sheet, candidates: list[_Quantity], expected: str, example: str
) -> _Quantity:
    """Return the one column of sizes or times whose unit is known, or raise UserError.

    ``candidates`` are the columns of the sheet whose names fit, and one of them must be
    there. Errors advise the name ``expected``, or a name with its unit such as
    ``example``.
    """
    advice = f"name it {expected}, or with its unit as in {example}"
    # `fail` raises UserError. With None instead of a row, the error is one of the header.
    if not candidates:
        present = columns_in_words(sheet.header)
        sheet.fail(None, expected, f"missing; the columns are {present}: {advice}")
    if len(candidates) > 1:
        names = ", ".join(candidate.name for candidate in candidates)
        raise UserError(
            f"{sheet.file}: header, columns {names}: several columns may have these "
            "values: keep one of them and remove the others"
        )
    (column,) = candidates
    if column.ambiguous_unit:
        sheet.fail(None, column.name, _problem_of_ambiguous(column.ambiguous_unit))
    if column.unit == _UNKNOWN_UNIT:
        sheet.fail(None, column.name, f"its unit is not known: {advice}")
    return column


def _problem_of_ambiguous(unit: str) -> str:
    """Return what is wrong with a unit of two meanings, such as "mb", and what to do.

    The unit "mb" may be 1000**2 bytes, or 1024**2 bytes, which are a "mib".
    """
    power = _POWERS_OF_AMBIGUOUS_UNITS[unit]
    binary_unit = f"{unit[0]}ib"
    return (
        f"{unit} may be {1000**power} or {1024**power} bytes: name "
        f"it size_{binary_unit} if it is {1024**power}, and otherwise convert it to "
        "bytes and name it bytes"
    )


def _with_known_collectives(sheet: Sheet) -> Sheet:
    """Return a sheet whose collectives are in a column "collective", named as in `KNOWN`.

    Without a column of that name, the only column whose cells all name collectives is
    renamed. It may be called "op" or "operation", for example. If there is none or
    several, the sheet stays as it is. Collectives may be spelled as programs spell them:
    "AllReduce", "all_reduce_perf" or "MPI_Allreduce". A cell that names no known
    collective stays as it is.
    """
    # The names of the columns that may have the collectives.
    of_collectives = [name for name in sheet.header if name == "collective"]
    if not of_collectives:
        for position, name in enumerate(sheet.header):
            if all(_known_collective(row[position]) for row in sheet.rows):
                of_collectives.append(name)
    if len(of_collectives) != 1:
        return sheet
    position = sheet.header.index(of_collectives[0])
    header = (*sheet.header[:position], "collective", *sheet.header[position + 1 :])
    rows = []
    for row in sheet.rows:
        name = _known_collective(row[position]) or row[position]
        rows.append([*row[:position], name, *row[position + 1 :]])
    return Sheet(sheet.file, header, sheet.lines, rows)


def _known_collective(cell: str) -> str:
    """Return the name in `KNOWN` of the collective that a cell names, "" if none."""
    letters = re.sub("[^a-z]", "", cell.lower())
    # Names of programs and of calls have more: all_reduce_perf, ncclAllReduce, MPI_Bcast.
    plain = re.sub("^(?:mpi|[nr]ccl)|perf$", "", letters)
    return BY_SPELLING.get(plain, "")


def has_ranks(sheet: Sheet) -> bool:
    """Return whether a table says between how many ranks its times were measured.

    Parameters
    ----------
    sheet : Sheet
        The table.

    Returns
    -------
    bool
        True if it has a column "ranks", or just one column with another name for it.
    """
    return "ranks" in _with_known_ranks(sheet).header


def _with_known_ranks(sheet: Sheet) -> Sheet:
    """Return a sheet whose number of ranks is in a column "ranks".

    Without a column of that name, the only column with one of `RANKS_NAMES` is renamed. If
    there is none or several, the sheet stays as it is.
    """
    if "ranks" in sheet.header:
        return sheet
    of_ranks = [name for name in sheet.header if _in_letters(name) in RANKS_NAMES]
    if len(of_ranks) != 1:
        return sheet
    header = tuple("ranks" if name == of_ranks[0] else name for name in sheet.header)
    return Sheet(sheet.file, header, sheet.lines, sheet.rows)


def _in_bytes_and_seconds(
    sheet: Sheet, frame: DataFrame, size: _Quantity, time: _Quantity
) -> DataFrame:
    """Return a table with columns "bytes" and "seconds" in place of ``size`` and ``time``.

    ``size`` and ``time`` are the columns of the file, which have units of their own.
    Raises UserError for a size below 1 byte or above `MOST_WHOLE` bytes, and for a time
    below `LEAST` seconds.
    """
    # Sizes in a larger unit may have decimals, and bytes are whole numbers.
    n_bytes = (frame[size.name] * size.unit).round()
    seconds = frame[time.name] * time.unit
    is_wrong_size = ((n_bytes < 1) | (n_bytes > MOST_WHOLE)).to_numpy()
    if is_wrong_size.any():
        problem = f"the size must be from 1 byte to {MOST_WHOLE:g} bytes: correct it"
        # argmax, here and below, returns the first such row.
        sheet.fail(int(np.argmax(is_wrong_size)), size.name, problem)
    is_too_short = (seconds < LEAST).to_numpy()
    if is_too_short.any():
        problem = f"the time must be at least {LEAST:g} s: correct it, or its unit"
        sheet.fail(int(np.argmax(is_too_short)), time.name, problem)
    others = frame.drop(columns=[size.name, time.name])
    others.insert(0, "bytes", n_bytes.astype(np.int64))
    others.insert(1, "seconds", seconds)
    return others


# -- Checks ----------------------------------------------------------------------------


def _refuse_slow(sheet: Sheet, frame: DataFrame, time_name: str) -> None:
    """Raise UserError for a large message that is slower than any link.

    Its time, in the column ``time_name`` of the file, is most likely in another unit.
    """
    bytes_per_s = (frame["bytes"] / frame["seconds"]).to_numpy()
    is_large = frame["bytes"].to_numpy() >= _LARGE_BYTES
    is_too_slow = is_large & (bytes_per_s < _SLOWEST_BYTES_PER_S)
    if is_too_slow.any():
        # argmax returns the first such row.
        row = int(np.argmax(is_too_slow))
        n_bytes = frame["bytes"][row]
        seconds = frame["seconds"][row]
        # Smaller messages may be slow because of their latency, and are not checked. The
        # error therefore says that the row is the first large one.
        problem = (
            f"{n_bytes} bytes in {seconds:.3g} s are slower than any link (this is the "
            f"first such row of at least {format_bytes(_LARGE_BYTES)}): the column is "
            "probably"
        )
        advice = "not in seconds: convert all its values to seconds"
        if time_name != "seconds":
            advice = (
                "in another unit than its name says: correct the name or the values"
            )
        sheet.fail(row, time_name, f"{problem} {advice}")


def _refuse_dividing(
    sheet: Sheet, frame: DataFrame, name: str, cells: list[str]
) -> None:
    """Raise UserError if an unknown column divides the times into several kinds.

    A column such as the algorithm does, because its few values come back at several sizes. A
    column of measured numbers, which are different in each row, does not. ``cells`` are the
    values of the column ``name``, one for each row of ``frame``.
    """
    # A column that counts repeats of a measurement does not divide the times. Its name may be
    # spelled like "Iter #", which `_in_letters` makes "iter".
    if _in_letters(name) in REPEATS_NAMES:
        return
    if _divides_times(frame, cells):
        values = " and ".join(shown(value) for value in sorted(set(cells))[:5])
        # None in place of a row makes this an error of the header.
        sheet.fail(
            None,
            name,
            "ddlkit does not know this column, and rows of the same size have different "
            f"values in it, as {values}: keep the rows of one value, or remove the "
            "column if it does not matter",
        )


def _divides_times(frame: DataFrame, cells: list[str]) -> bool:
    """Return whether a column with these cells divides the times into several kinds.

    A column does so if it has several values at half of the sizes or more, and if half of
    its values or more occur at several sizes. An example is a column with the protocol of
    NCCL, which is "LL" and "Simple" at each size. A column of measured numbers, such as a
    standard deviation, has other values at each size, and divides nothing.
    """
    # Known columns may divide the times. So the values at one size are counted among rows
    # that agree in all known columns.
    known_keys = [column for column in KEYS if column in frame]
    table = frame[["bytes", *known_keys]].assign(value=cells)
    # How many values the column has at each size, for rows that agree.
    values_of_size = table.groupby(["bytes", *known_keys])["value"].nunique()
    # At how many sizes each value occurs in the whole file.
    sizes_of_value = table.groupby("value")["bytes"].nunique()
    # The mean of a mask is the share of sizes, or of values, for which it is True.
    divides_sizes = (values_of_size > 1).mean() >= _DIVIDED_SHARE
    values_recur = (sizes_of_value > 1).mean() >= _DIVIDED_SHARE
    # If the file has a single size, no value can occur at several sizes, so `values_recur`
    # is not required.
    has_one_size = table["bytes"].nunique() == 1
    return bool(divides_sizes and (values_recur or has_one_size))
