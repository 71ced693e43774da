"""The registers of foreign formats, one for each purpose: who takes which file, tried in this order.

A format is a module with two functions. ``matches(text)`` says, at little cost, whether a file is of that
format, and raises nothing. ``read(text, file, options)`` gives what contract.py says, or raises a UserError
that names the file. Its line here makes the format known to the command of that purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddlkit.core.errors import shown
from ddlkit.formats import (
    benchmark_logs,
    flop_counts,
    kineto,
    layer_trace,
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

    name : short, as --kind takes it; takes : what kind of file it reads, to be listed in a line
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
        "csv",
        "a CSV with columns bytes, seconds",
        size_time_csv.matches,
        size_time_csv.read,
    ),
)
"""For ``ddlkit fit`` and wherever else message times are read. Recorded tables are no foreign files: a stamp
beside a table says what it is, and messages.py asks for that first."""

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
        f"shapes of transformers (CSV with columns name, {', '.join(transformer_shapes.REQUIRED)})",
        transformer_shapes.matches,
        transformer_shapes.read,
    ),
)
"""For ``ddlkit import``."""


def first_match(
    readers: Sequence[Reader[Options, Result]], text: str
) -> Reader[Options, Result] | None:
    """Return the first reader that takes the text; None if none does.

    >>> first_match(LAYER_PROFILES, "tensor,parameters,flops\\nconv,10,1e9\\n").name
    'flops'
    """
    return next((reader for reader in readers if reader.matches(text)), None)


def tried(readers: Sequence[Reader[Options, Result]], text: str) -> str:
    """Return which formats were tried in vain, and how the file begins, for the end of an error.

    >>> tried(MESSAGE_TIMES[1:], "size,time\\n8,2.1\\n")
    "tried: a CSV with columns bytes, seconds; its first line is 'size,time'"
    """
    first_line = text.strip().partition("\n")[0]
    formats = "; ".join(reader.takes for reader in readers)
    return f"tried: {formats}; its first line is {shown(first_line)}"
