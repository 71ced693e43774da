"""Logs of DeepSpeed's communication benchmark, as message times.

The benchmark stands in DeepSpeedExamples, benchmarks/communication, and in DeepSpeed as
ds_bench. A title names the collective and the number of ranks. A row has a rounded
size, "elements x bytes of each", the mean time of one operation, and two rates. The
throughput of an all-reduce counts each byte twice, so that only the bus bandwidth,
which is that of nccl-tests, is compared with size and time.

Sizes become those of `ddlkit.core.collective`. The printed size of an all_gather is
that of the input of a rank.
"""

from __future__ import annotations

import re

from ddlkit.core.errors import UserError, shown
from ddlkit.formats.benchmark_rows import (
    KNOWN,
    BenchmarkRow,
    benchmark_times,
    collective_named,
    positive,
    whole,
)
from ddlkit.formats.contract import MessageOptions, MessageTimes
from ddlkit.formats.labels import unlabelled

SOURCE = "deepspeed"

_TITLE = re.compile(
    r"-- Performance of (?P<collective>\w+) on (?P<ranks>\d{1,9}) devices"
)
_HEAD = re.compile(
    r"Size \(Bytes\)\s+Description\s+Duration(?P<in_us>\s+\(us\))?\s+"
    r"Throughput \((?P<unit>G[bB]ps)\)\s+BusBW"
)
_ROW = re.compile(
    r"[\d.]+ *[KMGT]?B?\s+(?P<elements>\d+)x(?P<element_bytes>\d+)\s+"
    r"(?P<duration>[\d.]+) *(?P<unit>us|ms|s)?\s+(?P<throughput>[\d.]+)\s+"
    r"(?P<busbw>[\d.]+)"
)
# The printed rates have three decimals, so that they are rounded by up to half a unit of
# the third one.
_RATE_ROUNDING = 5e-4
# How far, beyond rounding, the time of the rate may differ from the printed duration.
_TIME_TOLERANCE = 1e-3
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES_PER_S = {"Gbps": 1e9 / 8, "GBps": 1e9}


def matches(text: str) -> bool:
    """Return whether some line of a file is a title of DeepSpeed's benchmark.

    Examples
    --------
    >>> matches("---- Performance of all_reduce on 8 devices -------")
    True
    """
    return bool(_TITLE.search(text))


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the message times of all tables in a log.

    The tables have no numbers, so the option ``table`` is refused here. They do not
    distinguish times in place and out of place, so `benchmark_times` refuses ``place``.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    options.refuse_table(file)
    title: re.Match[str] | None = None
    head: re.Match[str] | None = None
    rows = []
    # `unlabelled` removes what launchers and loggers put before the lines.
    for number, line in enumerate(unlabelled(text), start=1):
        # A row belongs to the last title and the last head above it.
        title = _TITLE.search(line) or title
        head = _HEAD.search(line) or head
        match = _ROW.match(line)
        if match and title and head:
            rows.append(_row(match, title, head, f"{file}: row at line {number}"))
    return benchmark_times(SOURCE, rows, file, options)


def _row(
    match: re.Match[str], title: re.Match[str], head: re.Match[str], where: str
) -> BenchmarkRow:
    """Return the size and the time in a row of a table.

    ``match`` is the row as `_ROW` has matched it. ``title`` states the collective and the
    number of ranks, and ``head`` the units. ``where`` is the file and the line of the
    row, as errors name them. Raises UserError for a number that is not above zero, or for
    a duration without a unit.
    """
    ranks = int(title["ranks"])
    # "pt2pt" is the program's short name for messages between two ranks.
    if title["collective"] == "pt2pt":
        collective = "point_to_point"
    else:
        collective = collective_named(title["collective"])
    n_bytes = _bytes_of_tensor(match, where)
    # The tensor is the input of one rank. The size of an all-gather is that of its output.
    if collective == "all_gather":
        n_bytes *= ranks
    duration = positive(match["duration"], where, "Duration")
    duration_s = duration * _SECONDS[_unit_of_duration(match, head, where)]
    # The head says whether rates are in gigabits (Gbps) or in gigabytes (GBps) a second.
    rate_unit = _BYTES_PER_S[head["unit"]]
    # The rate may be rounded to 0, which `positive` would refuse.
    busbw_bytes_per_s = float(match["busbw"]) * rate_unit
    # The printed bus bandwidth is compared with the one that follows from size and
    # duration. Both are rounded, so the two roundings add up.
    relative_duration_error = _rounding_share(match["duration"])
    busbw_rounding_bytes_per_s = (
        _RATE_ROUNDING * rate_unit + relative_duration_error * busbw_bytes_per_s
    )
    row = BenchmarkRow(
        where=where,
        n_bytes=n_bytes,
        seconds=duration_s,
        collective=collective,
        ranks=ranks,
        busbw_bytes_per_s=busbw_bytes_per_s,
        busbw_rounding_bytes_per_s=busbw_rounding_bytes_per_s,
    )
    # The bus bandwidth may tell the time with more digits than the printed duration.
    return row._replace(seconds=_finer_time_s(row, relative_duration_error))


def _bytes_of_tensor(match: re.Match[str], where: str) -> int:
    """Return the bytes of the tensor that a row describes.

    The description, as in "1024x4" for elements and bytes of each, is exact. The size that
    is printed next to it is rounded.
    """
    elements = whole(match["elements"], where, "Description")
    element_bytes = whole(match["element_bytes"], where, "Description")
    return elements * element_bytes


def _rounding_share(number: str) -> float:
    """Return how far a printed number above zero may be rounded, as a share of it.

    Numbers are rounded by up to half a unit of their last decimal. Durations are printed
    with few decimals, so that the share can be large for a short one.
    """
    decimals = len(number.partition(".")[2])
    return 0.5 * 10.0**-decimals / float(number)


def _unit_of_duration(match: re.Match[str], head: re.Match[str], where: str) -> str:
    """Return the unit of a row's duration: "us", "ms" or "s".

    With the benchmark's option --raw, the unit is in the head and not in the rows. The
    head can only state "us". Raises UserError if neither has a unit.
    """
    if match["unit"] is not None:
        return match["unit"]
    if head["in_us"]:
        return "us"
    problem = f"{shown(match['duration'])} has no unit"
    raise UserError(f"{where}, Duration: {problem}: expected us, ms or s")


def _finer_time_s(row: BenchmarkRow, relative_duration_error: float) -> float:
    """Return the time of a row in seconds, computed from its bus bandwidth if possible.

    The bus bandwidth has more digits than the printed duration, which may be rounded by
    ``relative_duration_error``, a share of the duration. The printed duration is returned
    if the number of ranks or the collective is unknown. It is also returned if the bus
    bandwidth contradicts it, and `benchmark_times` then refuses the row.
    """
    busbw = row.busbw_bytes_per_s
    collective = KNOWN.get(row.collective)
    # An unknown number of ranks is 0, and a single rank sends nothing.
    if collective is None or row.ranks < 2 or busbw <= 0:
        return row.seconds
    # The bus bandwidth is the bytes on the link of each rank, divided by the time.
    time_s = float(collective.wire_bytes(row.ranks, row.n_bytes)) / busbw
    # How far the two times may differ, as a share of the printed duration.
    allowed = relative_duration_error + _TIME_TOLERANCE
    agrees = abs(time_s / row.seconds - 1) <= allowed
    return time_s if agrees else row.seconds
