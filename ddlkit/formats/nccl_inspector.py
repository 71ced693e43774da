"""JSON lines of NCCL Inspector, a plugin of NCCL's profiler, as message times.

Each line is of one collective of one rank. Up to version 4.2 of the format, a line has
a "header" with the communicator and its number of ranks. Since version 4.3 only a line
"dump_stats" has it, and counts for the lines below. Times are of one operation in
microseconds, by the clock of the GPU, and include the wait for slower ranks.

Sizes become those of `ddlkit.core.collective`. The size of an all_gather and of a
reduce_scatter is printed as the part of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ddlkit.core.errors import UserError, shown
from ddlkit.formats.benchmark_rows import (
    KNOWN,
    BenchmarkRow,
    benchmark_times,
    collective_named,
    positive,
    stated_busbw_gb_per_s,
    whole,
)
from ddlkit.formats.contract import ONE_RANK, MessageOptions, MessageTimes
from ddlkit.store.files import parse_json

SOURCE = "nccl-inspector"

_SIZED_BY_PART = ("all_gather", "reduce_scatter")
_BY_PROCESSOR = ("kernel_cpu", "collective_cpu")


class _Operation(NamedTuple):
    """One collective of one rank, as a line of the file has it.

    ``where`` is the file and the line, as errors name them. ``header`` has the facts about
    the communicator, such as "n_ranks", and ``performance`` those about the collective,
    such as its time, by the names of the file.
    """

    where: str
    header: dict[str, Any]
    performance: dict[str, Any]


def matches(text: str) -> bool:
    """Return whether the first line of a file is of NCCL Inspector.

    Examples
    --------
    >>> matches('{"header": {"n_ranks": 8}, "coll_perf": {"coll": "AllReduce"}}')
    True
    """
    first_line, _, _ = text.lstrip().partition("\n")
    # Since version 4.3 of the format, a file may begin with a line "dump_stats". That line
    # has no time. It has the header that counts for the collectives below it.
    has_keys = '"coll_perf"' in first_line or '"dump_stats"' in first_line
    return first_line.startswith("{") and has_keys


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the times of all known collectives between two or more ranks.

    The file may be of one rank or of several. If communicators lie on different numbers
    of nodes, the column "link" tells them apart, as in "2 nodes". The option ``table``
    is refused here, because the file has no tables. `benchmark_times` refuses ``place``,
    because times in place and out of place are not distinguished.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    options.refuse_table(file)
    # The times, and for each of them the link, such as "2 nodes".
    rows = []
    links = []
    # Times by the clock of the processor include its delays. They are only counted here,
    # and not returned.
    n_by_processor = 0
    # Collectives of other names than those in `KNOWN` are not returned either.
    unknown: set[str] = set()
    n_of_one_rank = 0
    for operation in _operations(text, file):
        if operation.performance.get("coll_timing_source") in _BY_PROCESSOR:
            n_by_processor += 1
            continue
        row = _row(operation)
        # A collective of one rank sends nothing, and the size of an unknown one is unclear.
        if row.ranks < 2:
            n_of_one_rank += 1
        elif row.collective not in KNOWN:
            unknown.add(row.collective)
        else:
            rows.append(row)
            links.append(_link(operation.header))
    if n_by_processor and not rows:
        raise UserError(
            f"{file}: all {n_by_processor} times are those of the processor, "
            "not of the GPU: record with NCCL_INSPECTOR_REQUIRE_KERNEL_TIMING=1"
        )
    if unknown and not rows:
        listed = ", ".join(map(shown, sorted(unknown)))
        raise UserError(
            f"{file}: has only collectives that are not known ({listed}): give a file "
            f"with times of {' or '.join(KNOWN)}"
        )
    if n_of_one_rank and not rows:
        raise UserError(f"{file}: {ONE_RANK}")
    times = benchmark_times(SOURCE, rows, file, options)
    # Without places, the times have the order of the rows, and so have the links.
    if len({*links}) > 1:
        times = times._replace(rows=times.rows.assign(link=links))
    return times


def _link(header: dict[str, Any]) -> str:
    """Return the link of a communicator, which is the number of its nodes in words.

    ``header`` has the facts about the communicator, by the names of the file.
    """
    if "nnodes" not in header:
        return "unknown number of nodes"
    nodes = header["nnodes"]
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _operations(text: str, file: str) -> Iterator[_Operation]:
    """Yield the collectives of a file, each with its own header or the last one above it.

    A header has the facts about the communicator. Raises UserError for a line that is no
    JSON object.
    """
    # Without a header above it, a collective has no facts about its communicator.
    header: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{file}: line {number}"
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise UserError(
                f"{where} cannot be read as JSON: {error}: is the file cut?"
            ) from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: {shown(record)} is not an object")
        if isinstance(record.get("header"), dict):
            header = record["header"]
        performance = record.get("coll_perf")
        if isinstance(performance, dict):
            yield _Operation(where, header, performance)


def _row(operation: _Operation) -> BenchmarkRow:
    """Return the size and the time of a collective, as `BenchmarkRow` counts them.

    The collective may be unknown or have one rank only. The caller leaves such rows out.
    Raises UserError if the number of ranks, the size or the time is missing or not above
    zero.
    """
    where, header, performance = operation
    ranks = whole(header.get("n_ranks"), where, "n_ranks")
    collective = collective_named(str(performance.get("coll")))
    n_bytes = whole(
        performance.get("coll_msg_size_bytes"), where, "coll_msg_size_bytes"
    )
    # For these collectives, the file has the size of one rank's part of the message.
    if collective in _SIZED_BY_PART:
        n_bytes *= ranks
    time_us = positive(performance.get("coll_exec_time_us"), where, "coll_exec_time_us")
    busbw_gb_per_s = stated_busbw_gb_per_s(performance.get("coll_busbw_gbs"))
    return BenchmarkRow(
        where=where,
        n_bytes=n_bytes,
        seconds=time_us / 1e6,
        collective=collective,
        ranks=ranks,
        busbw_bytes_per_s=1e9 * busbw_gb_per_s,
        # The time may be rounded to whole microseconds, even where the rate is not. It is
        # then off by up to the share 0.5 / time_us, and so is the rate that follows from it.
        busbw_rounding_bytes_per_s=1e9 * busbw_gb_per_s / (2 * time_us),
    )
