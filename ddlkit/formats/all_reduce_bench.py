"""Tables of all_reduce_bench.py and torch-dist-bench.py of ml-engineering.

These programs time collectives of torch.distributed, and print Markdown with a row for
each size ("payload", in powers of 1024) and the bandwidths in GB/s. The mean time of
one operation follows from size and bandwidth. Sizes are those of
`ddlkit.core.collective`.
"""

from __future__ import annotations

import re

from ddlkit.core.errors import UserError
from ddlkit.formats.benchmark_rows import (
    BenchmarkRow,
    benchmark_times,
    collective_named,
    positive,
)
from ddlkit.formats.contract import MessageOptions, MessageTimes
from ddlkit.formats.labels import unlabelled

SOURCE = "all_reduce_bench"

_TITLE = re.compile(
    r"average bandwidth\b.* of (?P<collective>\w+) over (?P<ranks>\d{1,9}) ranks"
)
_HEAD = re.compile(r"payload\s*\|\s*busbw\s*\|\s*algbw\b")
_ROW = re.compile(
    r"(?P<payload>[\d.]+)(?P<unit>[KMGT]?)i?B\s*\|"
    r"\s*(?P<busbw>[\d.]+)\s*GBps\s*\|\s*(?P<algbw>[\d.]+)\s*GBps"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# Bandwidths are printed to 0.01 GB/s.
_ROUNDING_BYTES_PER_S = 0.005e9


def matches(text: str) -> bool:
    """Return whether a file has the head of a table as all_reduce_bench.py prints it.

    torch-dist-bench.py prints the same head.

    Examples
    --------
    >>> matches("| payload |    busbw   |    algbw   |")
    True
    """
    return bool(_HEAD.search(text))


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the message times of all tables in a file.

    The tables have no numbers, so the option ``table`` is refused here. They do not
    distinguish times in place and out of place, so `benchmark_times` refuses ``place``.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    options.refuse_table(file)
    # What the last title above a row states. A table without a title is of an all-reduce.
    # 0 stands for an unknown number of ranks.
    collective = "all_reduce"
    ranks = 0
    rows = []
    # `unlabelled` removes what launchers and loggers put before the lines.
    for number, line in enumerate(unlabelled(text), start=1):
        title = _TITLE.search(line)
        if title:
            collective = collective_named(title["collective"])
            ranks = int(title["ranks"])
        match = _ROW.match(line)
        if match:
            where = f"{file}: row at line {number}"
            rows.append(_row(match, where, collective, ranks))
    return benchmark_times(SOURCE, rows, file, options)


def _row(match: re.Match[str], where: str, collective: str, ranks: int) -> BenchmarkRow:
    """Return the row of a table that `_ROW` has matched.

    ``where`` is the file and the line of the row, and ``ranks`` is 0 if it is unknown.
    Raises UserError for a number that is not above zero, or for a size below one byte.
    """
    payload = positive(match["payload"], where, "payload")
    algbw_gb_per_s = positive(match["algbw"], where, "algbw")
    busbw_gb_per_s = positive(match["busbw"], where, "busbw")
    n_bytes = round(payload * _UNITS[match["unit"]])
    # A payload of 0.5 bytes or less is rounded to 0.
    if n_bytes < 1:
        raise UserError(f"{where}, payload: less than a byte")
    # The algorithm bandwidth (algbw) is size / time, and the bus bandwidth (busbw) is algbw
    # times a factor. `benchmark_times` compares the printed busbw with the one that follows
    # from the time, and so from the printed algbw. The former is off by up to the rounding,
    # and the latter by up to rounding x (busbw / algbw). A difference up to the sum of both is
    # no error.
    largest_difference_bytes_per_s = _ROUNDING_BYTES_PER_S * (
        1 + busbw_gb_per_s / algbw_gb_per_s
    )
    return BenchmarkRow(
        where=where,
        n_bytes=n_bytes,
        seconds=n_bytes / (1e9 * algbw_gb_per_s),
        collective=collective,
        ranks=ranks,
        busbw_bytes_per_s=1e9 * busbw_gb_per_s,
        busbw_rounding_bytes_per_s=largest_difference_bytes_per_s,
    )
