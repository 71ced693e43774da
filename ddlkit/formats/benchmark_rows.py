"""What the readers of benchmarks of collectives share.

A reader makes a `BenchmarkRow` of each time that a benchmark prints. From these,
`benchmark_times` makes message times, checks them against the printed bus bandwidth,
and chooses between times in place and out of place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlkit.core.collective import COLLECTIVES, ONLY_IN_LOGS
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import MOST_ROWS
from ddlkit.core.units import LEAST, MOST, MOST_WHOLE, format_bytes, format_seconds
from ddlkit.formats.contract import MessageOptions, MessageTimes
from ddlkit.store.readers import choose

if TYPE_CHECKING:
    from pandas import DataFrame

KNOWN = {**COLLECTIVES, **ONLY_IN_LOGS}
"""All collectives whose sizes and rates are known, by name."""

PLACES = ("out_of_place", "in_place")
"""Into another buffer, and into the same one, in the order of nccl-tests.

Training sums gradients in place.
"""

BY_SPELLING = {
    spelling: name
    for name, collective in KNOWN.items()
    for spelling in collective.names
}
"""The names in `KNOWN`, by the spellings of programs in small letters alone."""

UNTRUSTED_TIMES = (
    "so that its times cannot be trusted: find the cause, and run the benchmark again"
)
"""The end of an error about a benchmark that found wrong results."""

PROCESSOR_TIMES = (
    "times of the processor, not of the GPU: run nccl-tests without its option -C"
)
"""The end of an error about a benchmark that has timed with the clock of the processor."""

# How far the printed bus bandwidth may be from the one that follows from size and time,
# as a share of the printed one and besides rounding. Some programs average rates, and
# others average times.
_RATE_TOLERANCE = 0.03


class BenchmarkRow(NamedTuple):
    """One time of a collective.

    Attributes
    ----------
    where : str
        The file and the line of the row, as errors name them.
    n_bytes : int
        The size as `ddlkit.core.collective` counts it.
    seconds : float
        The time of one operation.
    collective : str
        The name of the collective.
    ranks : int
        The number of ranks, 0 if it is unknown.
    place : str
        One of `PLACES`, or "" if the program does not distinguish them.
    busbw_bytes_per_s : float
        The bus bandwidth that is printed. NaN if there is none.
    busbw_rounding_bytes_per_s : float
        How far rounding may have changed the printed bus bandwidth.
    variant : dict of str to str
        Columns that may tell several kinds of messages apart, such as "type", with
        their values in this row.
    """

    where: str
    n_bytes: int
    seconds: float
    collective: str
    ranks: int
    place: str = ""
    busbw_bytes_per_s: float = math.nan
    busbw_rounding_bytes_per_s: float = 0.0
    variant: Mapping[str, str] = MappingProxyType({})


def collective_named(spelling: str) -> str:
    """Return the name that a collective has here, from a program's spelling of it.

    Parameters
    ----------
    spelling : str
        How the program spells the name.

    Returns
    -------
    str
        The name in `KNOWN`, or the spelling itself if no collective has it.

    Examples
    --------
    >>> collective_named("AllReduce"), collective_named("all_to_all")
    ('all_reduce', 'alltoall')
    """
    letters = re.sub("[^a-z]", "", spelling.lower())
    return BY_SPELLING.get(letters, spelling)


def positive(value: Any, where: str, name: str) -> float:
    """Return a number that a file states, which must be above zero.

    Parameters
    ----------
    value : object
        The text of the number, or the value of a JSON document.
    where : str
        The file and the line, as errors name them.
    name : str
        What the number is called in the file.

    Returns
    -------
    float
        The number.

    Raises
    ------
    UserError
        If the value is no number, or not above zero, or larger than `MOST`.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        # No comparison with NaN is true, so a value that is no number is refused below.
        number = math.nan
    # The JSON values true and false are no numbers, though Python takes them for 1 and 0.
    if isinstance(value, bool) or not 0 < number <= MOST:
        raise UserError(
            f"{where}, {name}: is {shown(value)}; it must be a number above zero and at "
            f"most {MOST:g}"
        )
    return number


def whole(value: Any, where: str, name: str) -> int:
    """Return a whole number that a file states, which must be above zero.

    Parameters
    ----------
    value : object
        The text of the number, or the value of a JSON document.
    where : str
        The file and the line, as errors name them.
    name : str
        What the number is called in the file.

    Returns
    -------
    int
        The number.

    Raises
    ------
    UserError
        If the value is no whole number, or not above zero, or larger than
        `MOST_WHOLE`.
    """
    # `positive` returns a float, and raises UserError unless it is above zero.
    number = positive(value, where, name)
    # Sums of many numbers above MOST_WHOLE may not fit 64 bits.
    if number % 1 or number > MOST_WHOLE:
        raise UserError(
            f"{where}, {name}: is {shown(value)}; it must be a whole number up to "
            f"{MOST_WHOLE:g}"
        )
    return int(number)


def stated_busbw_gb_per_s(busbw_gb_per_s: Any) -> float:
    """Return the bus bandwidth that a JSON document states, or NaN if it states none.

    NaN tells `benchmark_times` that a row has no bus bandwidth to check its time against.

    Parameters
    ----------
    busbw_gb_per_s : object
        The value in the document, in GB/s if it is a number. None stands for a document
        without such an entry.

    Returns
    -------
    float
        The bus bandwidth in GB/s, or NaN for a value that is no number.

    Examples
    --------
    >>> stated_busbw_gb_per_s(12.5), stated_busbw_gb_per_s(None)
    (12.5, nan)
    """
    if isinstance(busbw_gb_per_s, int | float):
        return busbw_gb_per_s
    return math.nan


def benchmark_times(
    source: str, rows: Sequence[BenchmarkRow], file: str, options: MessageOptions
) -> MessageTimes:
    """Return the message times of a benchmark, after checking and choosing among them.

    A collective in place writes its result over its input. Out of place, it writes the
    result into another buffer.

    Parameters
    ----------
    source : str
        The name of the program.
    rows : sequence of BenchmarkRow
        The times that the program printed.
    file : str
        The file, as errors name it.
    options : MessageOptions
        ``place`` chooses the times of "in_place" or "out_of_place" buffers. ``ranks`` is
        the number of ranks if the file does not state it.

    Returns
    -------
    MessageTimes
        The times of the chosen place. If ``options.place`` is None, these are the times
        of both places, or of "in_place" alone if the two differ by more than the times
        scatter. The rows have a column "ranks" only if the file states a number of ranks.

    Raises
    ------
    UserError
        If there are no times or too many, if a time contradicts the bus bandwidth that
        is printed beside it, if a message is timed in several variants, or if a place is
        given and the program does not distinguish places.
    """
    if not rows:
        raise UserError(f"{file}: a table of {source} without times: did the run fail?")
    if len(rows) > MOST_ROWS:
        raise UserError(
            f"{file}: {len(rows)} times, more than {MOST_ROWS}: leave some out"
        )
    for row in rows:
        _check_magnitude(row)
        # The user's number of ranks is used only if the file does not state it.
        _check_busbw(row, row.ranks or options.ranks or 0)
    # Rows with one collective, number of ranks and size are of one message. A variant of it
    # is, for example, a type of its elements.
    messages_and_variants = [
        ((row.collective, row.ranks, row.n_bytes), row.variant) for row in rows
    ]
    refuse_several_variants(messages_and_variants, file)
    frame = _frame(rows)
    if "place" in frame:
        frame, note = rows_of_place(frame, options.place, file)
        return MessageTimes(source, frame, note)
    options.refuse_place(source, file)
    return MessageTimes(source, frame)


def _frame(rows: Sequence[BenchmarkRow]) -> DataFrame:
    """Return the times of a benchmark as a table.

    The columns are bytes, seconds, place, collective and ranks. The column "ranks" is left
    out if all numbers of ranks are unknown, and "place" if the program does not distinguish
    places.
    """
    from pandas import DataFrame

    columns = {
        "bytes": [row.n_bytes for row in rows],
        "seconds": [row.seconds for row in rows],
        "place": [row.place for row in rows],
        "collective": [row.collective for row in rows],
        "ranks": [row.ranks for row in rows],
    }
    frame = DataFrame(columns)
    # An unknown number of ranks is 0.
    if not frame["ranks"].any():
        frame = frame.drop(columns="ranks")
    # The place of a program without places is "".
    if not frame["place"].any():
        frame = frame.drop(columns="place")
    return frame


def refuse_several_variants(
    rows: Iterable[tuple[object, Mapping[str, str]]], file: str
) -> None:
    """Refuse a table that times one message in several variants, such as two types.

    Parameters
    ----------
    rows : iterable of pairs
        For each row, what identifies its message, such as the size, and the values of
        the columns that tell kinds of messages apart, by the names of these columns.
    file : str
        The file, as errors name it.

    Raises
    ------
    UserError
        If a message has several values in a column.
    """
    # The variant in the first row of each message.
    first_variants: dict[object, Mapping[str, str]] = {}
    for message, variant in rows:
        first_variant = first_variants.setdefault(message, variant)
        for column, value in variant.items():
            # A column that was blank in the first row is missing there. Any value agrees.
            first_value = first_variant.get(column, value)
            if value != first_value:
                raise UserError(
                    f"{file}: column {column}: several values ({first_value}, {value}) at "
                    "one size: keep the rows of one of them"
                )


def _check_magnitude(row: BenchmarkRow) -> None:
    """Refuse a size or a time that must be an error, as it is far too small or large.

    Products of such numbers would overflow in later computations.
    """
    if not 1 <= row.n_bytes <= MOST_WHOLE:
        raise UserError(
            f"{row.where}: a size of {row.n_bytes:.3g} bytes is implausible: correct "
            "the size, or remove the row"
        )
    if not LEAST <= row.seconds <= MOST:
        raise UserError(
            f"{row.where}: a time of {row.seconds:.3g} s is implausible: correct the "
            "time, or remove the row"
        )


def _check_busbw(row: BenchmarkRow, ranks: int) -> None:
    """Refuse a row whose size and time contradict the printed bus bandwidth.

    The check finds a wrong unit, a wrong number of ranks and another meaning of sizes.
    A row is not checked if it has no printed bandwidth, if its collective is not known,
    or if ``ranks`` is 0 (unknown) or 1 (nothing is sent).
    """
    printed = row.busbw_bytes_per_s
    if math.isnan(printed) or row.collective not in KNOWN or ranks < 2:
        return
    # The bus bandwidth in bytes/s that follows from size and time.
    busbw = float(KNOWN[row.collective].busbw(ranks, row.n_bytes, row.seconds))
    # Some programs average rates and others times, so a small difference is no error.
    allowed = _RATE_TOLERANCE * printed + row.busbw_rounding_bytes_per_s
    if abs(busbw - printed) > allowed:
        stated = f"busbw {printed / 1e9:.4g} GB/s"
        message = f"{format_bytes(row.n_bytes)} in {format_seconds(row.seconds)}"
        raise UserError(
            f"{row.where}: {stated} contradicts {message} between {ranks} ranks, "
            f"which is {busbw / 1e9:.4g} GB/s: other units, or other ranks?"
        )


# -- Times in place and out of place ---------------------------------------------------


def rows_of_place(
    frame: DataFrame, place: str | None, file: str
) -> tuple[DataFrame, str]:
    """Return the message times in place, out of place, or both if the two hardly differ.

    In place, a collective writes its result over its input. Out of place, it writes into
    another buffer.

    Parameters
    ----------
    frame : DataFrame
        Message times, with the columns "bytes", "seconds" and "place". The place is one
        of `PLACES`.
    place : str or None
        The place to choose. If it is None, all rows are returned, unless the times of the
        two places differ by more than they scatter. In that case the rows in place are
        returned, because training works in place.
    file : str
        The file, as errors name it.

    Returns
    -------
    rows : DataFrame
        The rows, without the column "place".
    note : str
        Why rows in place were chosen, "" if the caller chose the place or if all rows
        are returned.

    Raises
    ------
    UserError
        If there are no rows of the place.
    """
    note = ""
    if place is None:
        note = _difference_of_places(frame)
        if note:
            place = "in_place"
    if place is not None:
        # `choose` also returns the chosen value of each column, which is known here.
        frame, _ = choose(frame, ("place",), {"place": place}, Path(file))
    return frame.drop(columns="place"), note


def _difference_of_places(frame: DataFrame) -> str:
    """Return how far times in place and out of place differ, if by more than they scatter.

    The result is a note for the user with the two times at the size where they differ
    most. It is "" if the places do not differ, or if no size has times of both.
    """
    # With times of one place alone, as in most logs, nothing can be compared.
    if frame["place"].nunique() < 2:
        return ""
    # A row for each size and a column for each place. `dropna` leaves only sizes that have
    # times of both places.
    medians_s = frame.groupby(["bytes", "place"])["seconds"].median().unstack().dropna()
    if medians_s.empty:
        return ""
    # How far the places differ at each size, about as a share of the time.
    log_ratios = np.log(medians_s["out_of_place"] / medians_s["in_place"]).abs()
    # Differences no larger than the scatter of the times say nothing. `_scatter` returns, by the
    # same measure, how far times lie from a smooth curve over the sizes.
    if log_ratios.mean() <= _scatter(medians_s):
        return ""
    size = log_ratios.idxmax()
    in_place = format_seconds(medians_s.loc[size, "in_place"])
    out_of_place = format_seconds(medians_s.loc[size, "out_of_place"])
    times = f"{in_place} at {format_bytes(size)}, out_of_place {out_of_place}"
    problem = "they differ by more than they scatter"
    return f"in_place: {times}: {problem}; choose by --place"


def _scatter(medians_s: DataFrame) -> float:
    """Return how much times scatter, about as a share of the time.

    Each time is compared with the straight line (chord) between the times of the next
    smaller and the next larger size, in logarithms. The result is the mean distance of
    the times from their chords. A distance of 0.1 in natural logarithms is about 10%.
    ``medians_s`` has a row for each size, increasing, and the columns "in_place" and
    "out_of_place".
    """
    # With n sizes and 2 places, these four have the shapes (n,), (n, 2), (n - 1, 1) and
    # (n - 1, 2).
    log_sizes = np.log(medians_s.index.to_numpy(float))
    log_times = np.log(medians_s.to_numpy())
    gaps = np.diff(log_sizes)[:, None]
    slopes = np.diff(log_times, axis=0) / gaps
    # Every size but the first and the last has a gap before it and one after it. Its
    # point lies (change of slope) * after * before / (after + before) off the chord.
    before = gaps[:-1]
    after = gaps[1:]
    changes_of_slope = np.diff(slopes, axis=0)
    distances = np.abs(changes_of_slope * after * before / (after + before))
    # Fewer than three sizes have no chord.
    return float(distances.mean()) if distances.size else 0.0
