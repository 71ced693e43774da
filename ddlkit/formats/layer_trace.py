"""Layer-wise traces in the format of dag Section VI and Table VI: read, checked, made a profile.

One line per layer in forward order: id, name, forward, backward and communication time in microseconds, bytes
of its gradient (0 without parameters). Ids count from 0; a file of several iterations repeats the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.strategies import IterationTimes
from ddlkit.core.units import format_seconds
from ddlkit.core.workload import Floats, Ints, LayerProfile
from ddlkit.formats.contract import ImportOptions, ReadProfile
from ddlkit.store.readers import BYTES_PER_PARAMETER
from ddlkit.store.sheet import Column, Schema, Sheet, read_sheet

TIMES = ("forward_s", "backward_s", "communication_s")
_FILE = Schema(
    "a layer-wise trace",
    (
        Column("id", "int", "non_negative"),
        Column("name", "str", "named"),
        *(
            Column(name, "microseconds", "non_negative")
            for name in ("forward", "backward", "comm")
        ),
        Column("size", "int", "non_negative"),
    ),
)
USUAL_RATIO, FIRST_RATIO = 0.5, 1.0
"""Forward over backward: one product against two (osf Eq 6), in the first layer against one."""
SUSPECT = 3.0  # times the usual ratio


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """k iterations of L layers, in forward order.

    name : L; n_bytes : (L,) of each layer's gradient, 0 where there is none
    forward_s, backward_s, communication_s : (k, L) seconds
    """

    name: tuple[str, ...]
    n_bytes: Ints
    forward_s: Floats
    backward_s: Floats
    communication_s: Floats

    @property
    def learnable(self) -> NDArray[np.int64]:
        """(n,) positions of the layers with a gradient, of which there must be one."""
        rows = np.flatnonzero(self.n_bytes)
        if not len(rows):
            raise UserError(
                "trace: no layer has a gradient (all sizes are 0): nothing to exchange"
            )
        return rows

    @property
    def mean_s(self) -> list[Floats]:
        """(L,) means over the iterations, of each of TIMES."""
        return [getattr(self, column).mean(0) for column in TIMES]

    def profile(self, network: str, *, with_input: bool = True) -> LayerProfile:
        """Return the mean iteration as a profile of the layers with parameters, without FLOP and update.

        A layer without parameters counts to the one with parameters before it, in forward and backward. What
        stands before the first counts to it; ``with_input`` false leaves it out, as it may be reading data.
        """
        rows = self.learnable
        owner = np.maximum(
            np.searchsorted(rows, np.arange(len(self.name)), "right") - 1, 0
        )
        first = 0 if with_input else int(rows[0])
        forward_s, backward_s = (
            np.bincount(owner[first:], times_s[first:], len(rows)).astype(float)
            for times_s in self.mean_s[:2]
        )
        names, n_bytes = tuple(self.name[row] for row in rows), self.n_bytes[rows]
        return LayerProfile(
            network=network,
            device="unnamed",
            batch=1,
            tensor=names,
            layer=names,
            parameters=np.maximum(n_bytes // BYTES_PER_PARAMETER, 1),
            gradient_bytes=n_bytes,
            forward_s=forward_s,
            backward_s=backward_s,
            flops=np.zeros(len(rows)),
        )

    def training(self) -> tuple[IterationTimes, FusionPlan]:
        """Return the mean iteration as tasks of the DAG (dag IV-B): a message a gradient.

        What stands before the first layer with parameters is t_io; copy and update are not in the trace.
        """
        first, (forward_s, backward_s, communication_s) = (
            int(self.learnable[0]),
            self.mean_s,
        )
        times = IterationTimes(
            io_s=float(forward_s[:first].sum()),
            h2d_s=0.0,
            forward_s=forward_s[first:],
            backward_s=backward_s[first:],
            communication_s=communication_s[self.learnable],
        )
        return times, FusionPlan(
            "none", tuple((len(self.name) - self.learnable[::-1]).tolist())
        )


def matches(text: str) -> bool:
    """Return whether the first line is a trace's: its header, or layer 0."""
    first = _cells(text.strip().partition("\n")[0])
    return (
        first[0].lower() == "id" or first[0] == "0" and len(first) == len(_FILE.names)
    )


def read(text: str, file: str, options: ImportOptions) -> ReadProfile:
    """Return the mean iteration as a profile, and what the trace says of itself that cannot be."""
    trace = parse_trace(text, file)
    profile = trace.profile("", with_input=not options.without_input)
    count = f"{len(trace.forward_s)} of {len(trace.name)} layers"
    findings = (Finding("iterations", (), count), *check_trace(trace))
    return ReadProfile(profile, findings)


def parse_trace(text: str, file: str) -> LayerTrace:
    """Return the trace in blank- or comma-separated columns, with or without a header.

    >>> trace = parse_trace("0 conv 20 40 5 400\\n1 relu 3 3 0 0", "my trace")
    >>> trace.name, trace.forward_s[0].tolist()
    (('conv', 'relu'), [2e-05, 3e-06])
    """
    sheet = _sheet(text, file)
    frame = _FILE.frame(sheet, exact=False)
    ids = frame["id"].to_numpy()
    starts = np.flatnonzero(ids == 0)
    count = int(starts[starts > 0][0]) if (starts > 0).any() else len(ids)
    for row in np.flatnonzero(ids != np.arange(len(ids)) % count)[:1]:
        problem = f"{ids[row]}, expected {row % count}: ids count from 0, alike in each iteration"
        sheet.fail(int(row), "id", problem)
    layers = frame[["name", "size"]]
    first = layers.iloc[ids].reset_index(drop=True)
    for row in np.flatnonzero((layers != first).any(axis=1))[:1]:
        (name, size), (of, there) = layers.loc[row], first.loc[row]
        line = sheet.lines[ids[row]]
        sheet.fail(
            int(row),
            "size",
            f"{name} of {size} bytes, but line {line} has {of} of {there}",
        )
    if left := len(ids) % count:
        problem = f"the last iteration ends before layer {left} ({frame['name'][left]})"
        sheet.fail(len(ids) - 1, "id", problem)
    times = frame[["forward", "backward", "comm"]].to_numpy().reshape(-1, count, 3)
    forward_s, backward_s, communication_s = np.moveaxis(times, -1, 0)
    return LayerTrace(
        name=tuple(frame["name"][:count]),
        n_bytes=frame["size"].to_numpy()[:count],
        forward_s=forward_s,
        backward_s=backward_s,
        communication_s=communication_s,
    )


def _cells(line: str) -> list[str]:
    return re.split(r"[\s,]+", line.strip("\t\r ,"))


def _sheet(text: str, file: str) -> Sheet:
    """Return the cells of a trace, with a header or without."""
    lines = [",".join(_cells(line)) for line in text.splitlines()]
    headless = lines[0][:2].lower() != "id"
    sheet = read_sheet("\n".join([",".join(_FILE.names)] * headless + lines), file)
    if len(sheet.header) != len(_FILE.names):
        problem = f"{len(sheet.header)} columns, expected {len(_FILE.names)}"
        raise UserError(f"{file}: line 1: {problem}: {', '.join(_FILE.names)}")
    for cell, name in zip(sheet.header, _FILE.names, strict=True):
        if not cell.lower().startswith(name):
            raise UserError(f"{file}: line 1: column {cell!r}, expected {name!r} here")
    return Sheet(
        file, _FILE.names, [line - headless for line in sheet.lines], sheet.rows
    )


def check_trace(trace: LayerTrace) -> Iterator[Finding]:
    """Yield sums of the columns, and what the mean iteration says of itself that cannot be."""
    (forward_s, backward_s, sent_s), rows = trace.mean_s, trace.learnable
    input_s = float(forward_s[: rows[0]].sum())
    totals = (forward_s.sum() - input_s, input_s, backward_s.sum(), sent_s.sum())
    took = [format_seconds(float(total)) for total in totals]
    text = f"forward {took[0]}, and {took[1]} before the first layer with parameters"
    text = f"{text}; backward {took[2]}, communication {took[3]}"
    yield Finding("totals", (), f"{text}, gradients {trace.n_bytes.sum()} bytes")
    usual = np.where(np.arange(len(rows)) == 0, FIRST_RATIO, USUAL_RATIO)
    with np.errstate(all="ignore"):
        excess = forward_s[rows] / backward_s[rows] / usual
    large = np.isfinite(excess) & (excess > SUSPECT)
    if large.any():
        text = f"forward over backward is {np.median(excess[large]):.1f} times the usual ratio"
        yield Finding("forward", tuple(trace.name[row] for row in rows[large]), text)
