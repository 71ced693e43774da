"""Logs of Ascend's hccl_test, as message times.

Its programs are called all_reduce_test, all_gather_test and so on. They print a table
with the columns data_size (bytes), aveg_time (the mean time of one operation in
microseconds, under a name that is spelled so), alg_bandwidth (GB/s) and check_result.
Neither the collective nor the number of ranks is in the table. The collective may be
named by the command above it.

The algorithm bandwidth counts the sizes of `ddlkit.core.collective`: the whole output
of an all_gather and the whole input of a reduce_scatter. The printed size may be the
part of one rank instead, so that the size of a message is that of the bandwidth.
"""

from __future__ import annotations

import re

from ddlkit.core.errors import UserError, shown
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

SOURCE = "hccl_test"

# The name of the time is matched however it is spelled.
_HEAD = re.compile(r"data_size\s*\(Bytes\):?\s*\|\s*a\w{1,9}_time\s*\(us\)", re.I)
_PROGRAM = re.compile(r"\b(\w+)_test\b")
_ROW = re.compile(
    r"(?P<size>\d+)\s*\|\s*(?P<time>[\d.]+)\s*\|\s*(?P<algbw>[\d.]+)\s*"
    r"\|\s*(?P<result>\w+)"
)

# Sizes are divided among the ranks and rounded up to whole elements.
_SIZE_TOLERANCE = 0.05
# Bandwidths are printed to 0.00001 GB/s.
_ROUNDING_BYTES_PER_S = 1e4


def matches(text: str) -> bool:
    """Return whether some line of a file is the head of a table of hccl_test.

    Examples
    --------
    >>> matches("data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s):")
    True
    """
    return bool(_HEAD.search(text))


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the message times of all tables in a log.

    The option ``collective`` is used for rows above which no command names one. The
    number of ranks is always the option ``ranks``, because no log states it. The option
    ``table`` is refused here, because the tables have no numbers. `benchmark_times`
    refuses ``place``, because times in place and out of place are not distinguished.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    options.refuse_table(file)
    # The user's choice, until a command in the log names another collective.
    collective = options.collective or ""
    rows = []
    # `unlabelled` removes what launchers and loggers put before the lines.
    for number, line in enumerate(unlabelled(text), start=1):
        match = _ROW.match(line)
        if match:
            if not collective:
                raise UserError(
                    f"{file}: hccl_test does not name its collective: "
                    f"give --collective {' or '.join(KNOWN)}"
                )
            where = f"{file}: row at line {number}"
            # 0 stands for a number of ranks that the user has not given.
            user_ranks = options.ranks or 0
            rows.append(_row(match, where, collective, user_ranks))
        # A command names its program, such as all_gather_test. Other words that end with
        # "_test" leave the collective as it is.
        for program in _PROGRAM.findall(line):
            collective = BY_SPELLING.get(program.replace("_", ""), collective)
    return benchmark_times(SOURCE, rows, file, options)


def _row(match: re.Match[str], where: str, collective: str, ranks: int) -> BenchmarkRow:
    """Return the row of a table that `_ROW` has matched.

    ``where`` is the file and the line of the row. ``ranks`` is the number of ranks that
    the user has given, 0 if none.

    The printed bandwidth always counts the whole message. The printed size may be the part
    of one rank instead, and the message is then as many times as large as there are ranks.

    Raises UserError if the results were wrong, if a number is not above zero, or if the
    bandwidth is neither that of the printed size nor of such a multiple. The multiple must
    be ``ranks`` if that is known.
    """
    # NULL means that the results were not checked.
    if match["result"] not in ("success", "NULL"):
        result = shown(match["result"])
        raise UserError(
            f"{where}, check_result: {result}: fix the collective before timing it"
        )
    size = whole(match["size"], where, "data_size")
    seconds = positive(match["time"], where, "aveg_time") / 1e6
    algbw_bytes_per_s = 1e9 * positive(match["algbw"], where, "alg_bandwidth")
    # The relative error may be this large: the size is divided among the ranks and rounded
    # up to whole elements, and the printed bandwidth is rounded, too.
    allowed = _SIZE_TOLERANCE + _ROUNDING_BYTES_PER_S / algbw_bytes_per_s
    n_bytes = _whole_message_bytes(size, algbw_bytes_per_s * seconds, ranks, allowed)
    if n_bytes is None:
        advice = "check the units"
        # The size of the message may be that of the part of one of so many ranks.
        if ranks:
            advice += f", and whether --ranks {ranks} is right"
        raise UserError(
            f"{where}, alg_bandwidth: {match['algbw']} GB/s contradicts {size} bytes "
            f"in {match['time']} us: {advice}"
        )
    return BenchmarkRow(
        where=where,
        n_bytes=n_bytes,
        seconds=seconds,
        collective=collective,
        # A row has the number of ranks that its log states, and not the user's. No log of
        # hccl_test states one, for which 0 stands.
        ranks=0,
    )


def _whole_message_bytes(
    size: int, bytes_by_rate: float, ranks: int, allowed: float
) -> int | None:
    """Return the size of the whole message, None if the printed numbers contradict it.

    The printed ``size`` is that of the whole message or that of the part of one rank.
    ``bytes_by_rate`` is the printed bandwidth times the time, which always counts the whole
    message, and may be off by ``allowed``, a share of the result. ``ranks`` is 0 if the
    number of ranks, and therefore of parts, is unknown.
    """
    # A ratio that rounds to 0 counts as 1, and the relative error is then too large.
    parts = max(1, round(bytes_by_rate / size))
    if ranks != 0 and parts not in (1, ranks):
        return None
    n_bytes = parts * size
    relative_error = abs(bytes_by_rate / n_bytes - 1)
    return n_bytes if relative_error <= allowed else None
