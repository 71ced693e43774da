"""The JSON that nccl-tests writes by its option -J, as message times.

A document is of one run. Its "devices" are ranks, "results" has an object for each
size, and in that "out_of_place" and "in_place" have the mean time of one operation in
microseconds. Sizes are those of `ddlkit.core.collective`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import format_bytes
from ddlkit.formats.benchmark_rows import (
    PLACES,
    PROCESSOR_TIMES,
    UNTRUSTED_TIMES,
    BenchmarkRow,
    benchmark_times,
    collective_named,
    positive,
    stated_busbw_gb_per_s,
    whole,
)
from ddlkit.formats.contract import MessageOptions, MessageTimes
from ddlkit.store.files import parse_json

SOURCE = "nccl-tests"

_PROGRAM = re.compile(r"(\w+)_perf\b")


def matches(text: str) -> bool:
    """Return whether a file is JSON with the keys of nccl-tests.

    Examples
    --------
    >>> matches('{"version": 3, "nccl_version": 22803, "config": {}}')
    True
    """
    has_keys = '"nccl_version"' in text and '"config"' in text
    return text.lstrip().startswith("{") and has_keys


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the message times of a run.

    The option ``place`` chooses between times in place (the result over the input) and out
    of place, as in `benchmark_times`. The option ``table`` is refused, because a file is
    of one run.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    options.refuse_table(file, has_choice=False)
    try:
        document = parse_json(text)
    except ValueError as error:
        raise UserError(
            f"{file}: cannot be read as JSON: {error}: did the run of nccl-tests end?"
        ) from error
    # `matches` takes only text that begins with "{", so the document is an object.
    results = document.get("results")
    if not isinstance(results, list):
        raise UserError(f"{file}: nccl-tests wrote no list of results: run it again")
    collective = _collective(document, file)
    ranks = _ranks(document)
    rows: list[BenchmarkRow] = []
    for number, result in enumerate(results):
        where = f"{file}: results[{number}]"
        rows += _rows_of_size(result, where, collective, ranks)
    return benchmark_times(SOURCE, rows, file, options)


def _rows_of_size(
    result: Any, where: str, collective: str, ranks: int
) -> list[BenchmarkRow]:
    """Return the times in one of the "results", at most one in place and one out of place.

    ``where`` is the file and the result, as errors name them, and ``ranks`` is 0 if the
    number is unknown. Raises UserError if the result is damaged.
    """
    if not isinstance(result, dict):
        raise UserError(f"{where}: {shown(result)} is not an object")
    if result.get("size") == 0:
        # The message was too small to be divided among the ranks.
        return []
    n_bytes = whole(result.get("size"), where, "size")
    # The options -d all and -o all time several types and operations. A variant tells their
    # times apart.
    variant = {name: str(result[name]) for name in ("type", "redop") if name in result}
    rows = []
    for place in PLACES:
        times = result.get(place)
        # Some runs print no times out of place.
        if isinstance(times, dict):
            row = _row(times, f"{where}, {place}", n_bytes, collective, ranks)
            rows.append(row._replace(place=place, variant=variant))
    return rows


def _row(
    times: dict[str, Any], where: str, n_bytes: int, collective: str, ranks: int
) -> BenchmarkRow:
    """Return the time in an object "in_place" or "out_of_place" of a result.

    ``times`` is that object, with a time in microseconds and rates in GB/s. ``where`` is
    the file and the object, as errors name them, and ``ranks`` is 0 if the number is
    unknown. The caller adds the place and the variant to the row. Raises UserError if the
    time is not above zero or not of the GPU, or if the results were wrong.
    """
    # The option -C of nccl-tests measures by the clock of the processor.
    if "cpu_time" in times:
        raise UserError(f"{where}, cpu_time: {PROCESSOR_TIMES}")
    # The results are right if this is 0. Null, which is None here, means that they were not
    # checked, and is accepted.
    n_wrong = times.get("nwrong")
    if n_wrong:
        raise UserError(
            f"{where}, nwrong: nccl-tests found {shown(n_wrong)} wrong values in a message "
            f"of {format_bytes(n_bytes)}, {UNTRUSTED_TIMES}"
        )
    busbw_gb_per_s = stated_busbw_gb_per_s(times.get("bus_bw"))
    return BenchmarkRow(
        where=where,
        n_bytes=n_bytes,
        seconds=positive(times.get("time"), where, "time") / 1e6,
        collective=collective,
        ranks=ranks,
        busbw_bytes_per_s=1e9 * busbw_gb_per_s,
        # The JSON has at least four decimals of a rate in GB/s.
        busbw_rounding_bytes_per_s=1e9 * 1e-4,
    )


def _collective(document: dict[str, Any], file: str) -> str:
    """Return the collective that is in the name of the program, such as all_reduce_perf.

    The name is in the configuration of the run, or is the first word of its command, the
    first of "args". Raises UserError if it is in neither.
    """
    config = document.get("config")
    args = document.get("args")
    names = [config.get("program_name")] if isinstance(config, dict) else []
    if isinstance(args, list):
        names += args[:1]
    for name in names:
        # A missing name becomes "None", which is no name of a program.
        program = _PROGRAM.search(str(name))
        if program:
            return collective_named(program[1])
    raise UserError(
        f"{file}: its entry args does not name a program, which tells the collective: write "
        'the program as the first of args, as in "args": ["all_reduce_perf"]'
    )


def _ranks(document: dict[str, Any]) -> int:
    """Return between how many ranks a message was sent, 0 if it is unknown.

    The list "devices" has the ranks. If a process has several GPUs, nccl-tests lists only
    the first rank of the process. The first rank of the next process is then larger by
    the number of these GPUs.
    """
    config = document.get("config")
    if not isinstance(config, dict):
        return 0
    # The list may stand at the top of the document or in the configuration.
    devices = document.get("devices")
    if not devices:
        devices = config.get("devices")
    if not isinstance(devices, list):
        return 0
    try:
        # A process has some threads, each with some GPUs, and a rank for each GPU.
        ranks_of_process = int(config["nthreads"]) * int(config["ngpus"])
        last_rank = max(int(device["rank"]) for device in devices)
        # How many ranks are listed in each group. Without groups, all are in one.
        groups = Counter(int(device.get("group", 0)) for device in devices)
    except (AttributeError, KeyError, TypeError, ValueError):
        # The list is empty, or an entry is missing or not of the type that nccl-tests
        # writes.
        return 0
    if ranks_of_process < 1:
        return 0
    # Ranks count from 0. The last rank that is listed may be the first of several ranks of
    # its process, so the number of ranks is rounded up to whole processes.
    n_ranks = (last_rank // ranks_of_process + 1) * ranks_of_process
    # NCCL_TESTS_SPLIT puts ranks into groups that send messages only among themselves.
    # The result is the size of a group, which is unknown if the groups differ in size.
    sizes_differ = len({*groups.values()}) > 1 or n_ranks % len(groups) > 0
    if sizes_differ:
        return 0
    return n_ranks // len(groups)
