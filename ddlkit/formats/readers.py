"""The registers of foreign formats, one for each purpose.

A format is a module with two functions:

* ``matches(text)`` returns whether a file is of that format. It is fast, and never
  raises an exception.
* ``read(text, file, options)`` returns what is in the file, or raises a ``UserError``
  that begins with the name of the file. `ddlkit.formats.contract` describes its
  arguments and results.

An entry in one of the registers below makes a format known to the commands of that
purpose. Formats are tried in the order of the register.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddlkit.core.errors import shown
from ddlkit.formats import (
    all_reduce_bench,
    benchmark_logs,
    deepspeed_bench,
    flop_counts,
    hccl_test,
    kineto,
    layer_trace,
    nccl_inspector,
    nccl_tests_json,
    nccom_test,
    rccl_tests_csv,
    size_time_csv,
    transformer_shapes,
)
from ddlkit.formats.contract import (
    ImportOptions,
    MessageOptions,
    MessageTimes,
    ReadProfile,
)

Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Reader(Generic[Options, Result]):
    """A format of foreign files.

    Attributes
    ----------
    name : str
        A short name, as ``--kind`` takes it.
    takes : str
        A phrase that says which files are read, for errors.
    matches : callable
        Returns whether a text is of this format.
    read : callable
        Returns what is in a file, given its text, its name and options.
    """

    name: str
    takes: str
    matches: Callable[[str], bool]
    read: Callable[[str, str, Options], Result]


MESSAGE_TIMES: tuple[Reader[MessageOptions, MessageTimes], ...] = (
    Reader(
        "log",
        "a log of nccl-tests, rccl-tests, OSU or Intel MPI Benchmarks",
        benchmark_logs.matches,
        benchmark_logs.read,
    ),
    Reader(
        "nccl-tests-json",
        "JSON of nccl-tests -J",
        nccl_tests_json.matches,
        nccl_tests_json.read,
    ),
    Reader(
        "rccl-tests-csv",
        "CSV of rccl-tests",
        rccl_tests_csv.matches,
        rccl_tests_csv.read,
    ),
    Reader(
        "nccl-inspector",
        "JSON lines of NCCL Inspector",
        nccl_inspector.matches,
        nccl_inspector.read,
    ),
    Reader(
        "all-reduce-bench",
        "a table of all_reduce_bench.py",
        all_reduce_bench.matches,
        all_reduce_bench.read,
    ),
    Reader(
        "deepspeed",
        "a log of DeepSpeed's communication benchmark",
        deepspeed_bench.matches,
        deepspeed_bench.read,
    ),
    Reader(
        "hccl-test",
        "a log of Ascend's hccl_test",
        hccl_test.matches,
        hccl_test.read,
    ),
    Reader(
        "nccom-test",
        "a log of nccom-test of AWS Neuron",
        nccom_test.matches,
        nccom_test.read,
    ),
    Reader(
        "csv",
        "a CSV with columns bytes, seconds",
        size_time_csv.matches,
        size_time_csv.read,
    ),
)
"""Formats of message times, for ``ddlkit fit`` and all others that need such times.

A recorded table is not one of them. It has a stamp, and `ddlkit.formats.messages` looks
for that first.
"""

LAYER_PROFILES: tuple[Reader[ImportOptions, ReadProfile], ...] = (
    Reader(
        "trace",
        "a layer-wise trace (six columns: id, name, forward, backward, comm, size)",
        layer_trace.matches,
        layer_trace.read,
    ),
    Reader(
        "kineto",
        "a Chrome trace of torch.profiler (JSON with traceEvents)",
        kineto.matches,
        kineto.read,
    ),
    Reader(
        "flops",
        "FLOP counts (CSV with columns tensor, parameters, flops)",
        flop_counts.matches,
        flop_counts.read,
    ),
    Reader(
        "transformer",
        "shapes of transformers (CSV with columns name, "
        f"{', '.join(transformer_shapes.REQUIRED)})",
        transformer_shapes.matches,
        transformer_shapes.read,
    ),
)
"""Formats of layer profiles, for ``ddlkit import``."""


def first_match(
    readers: Sequence[Reader[Options, Result]], text: str
) -> Reader[Options, Result] | None:
    r"""Return the first reader of a register whose format a text has.

    Parameters
    ----------
    readers : sequence of Reader
        The register.
    text : str
        The content of a file.

    Returns
    -------
    Reader or None
        None if the text has none of the formats.

    Examples
    --------
    >>> first_match(LAYER_PROFILES, "tensor,parameters,flops\nconv,10,1e9\n").name
    'flops'
    """
    for reader in readers:
        if reader.matches(text):
            return reader
    return None


def formats_tried(readers: Sequence[Reader[Options, Result]], text: str) -> str:
    r"""Return how a file of no known format begins, and which formats were tried.

    Parameters
    ----------
    readers : sequence of Reader
        The register, whose formats were tried.
    text : str
        The content of the file.

    Returns
    -------
    str
        The end of the error for such a file.

    Examples
    --------
    >>> formats_tried(MESSAGE_TIMES[-1:], "size,time\n8,2.1\n")
    "its first line is 'size,time'; formats that were tried: a CSV with columns bytes, seconds"
    """
    first_line, _, _ = text.strip().partition("\n")
    formats = "; ".join(reader.takes for reader in readers)
    return f"its first line is {shown(first_line)}; formats that were tried: {formats}"
