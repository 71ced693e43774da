"""Layer-wise traces in the format of dag Section VI and Table VI: read, written, checked, made a profile.

One line per layer in forward order: id, name, forward, backward and communication time in microseconds,
bytes of its gradient (0 for a layer without parameters). Ids count from 0; a file of several
iterations repeats the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.units import format_bytes, format_seconds
from ddlkit.core.workload import Floats, Ints, LayerProfile
from ddlkit.papers.dag import IterationTimes
from ddlkit.store.readers import BYTES_PER_PARAMETER
from ddlkit.store.sheet import Column, Schema, Sheet, check_cells

if TYPE_CHECKING:
    from pandas import DataFrame

TIMES = ("forward_s", "backward_s", "communication_s")

_FILE = Schema(
    "a layer-wise trace",
    (
        Column("id", "int", "non_negative"),
        Column("name", "str", "named"),
        *(Column(name, "microseconds", "non_negative") for name in ("forward", "backward", "comm")),
        Column("size", "int", "non_negative"),
    ),
)
_HEADER = ("Id", "Name", "Forward", "Backward", "Comm.", "Size")
_GAP = re.compile(r"[\s,]+")
_OTHER_UNIT = re.compile(r"[^a-z](ms|ns|s|sec|seconds|bits|[kmg]i?b)\b")
"""In a header: neither microseconds nor bytes."""


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """k iterations of L layers, in forward order.

    name : L; n_bytes : (L,) of each layer's gradient, 0 where there is none
    forward_s, backward_s, communication_s : (k, L) seconds

    Raises UserError for shapes that differ, nothing at all, and negative or non-finite
    entries.
    """

    name: tuple[str, ...]
    n_bytes: Ints
    forward_s: Floats
    backward_s: Floats
    communication_s: Floats

    def __post_init__(self) -> None:
        n = len(self.name)
        if not n or self.n_bytes.shape != (n,) or np.any(self.n_bytes < 0):
            raise UserError(
                "trace: n_bytes must be one size >= 0 per layer, and there must be a layer"
            )
        for column in TIMES:
            times: Floats = getattr(self, column)
            if times.ndim != 2 or not len(times) or times.shape[1] != n:
                raise UserError(f"trace: {column} has shape {times.shape}, not (k, {n})")
            if not np.all((times >= 0) & (times < np.inf)):
                raise UserError(f"trace: {column} has an entry that is not a time >= 0")

    @property
    def iterations(self) -> int:
        """k: how often every layer was timed."""
        return len(self.forward_s)

    @property
    def learnable(self) -> NDArray[np.int64]:
        """(n,) positions of the layers that have a gradient."""
        return np.flatnonzero(self.n_bytes)

    def mean(self) -> LayerTrace:
        """One iteration: the mean of all, layer by layer."""
        means = {column: getattr(self, column).mean(axis=0, keepdims=True) for column in TIMES}
        return LayerTrace(self.name, self.n_bytes, **means)

    def spread(self) -> dict[str, Floats]:
        """(L,) sample standard deviation of each column of TIMES; NaN where there is one iteration."""
        if self.iterations == 1:
            return {column: np.full(len(self.name), np.nan) for column in TIMES}
        return {column: getattr(self, column).std(axis=0, ddof=1) for column in TIMES}

    def profile(self, network: str, *, with_input: bool = True) -> LayerProfile:
        """The mean iteration as a profile of the layers with parameters.

        A layer without parameters counts to the one with parameters before it, in forward (it runs until
        the next one starts) and in backward (it runs between the next one's gradient and this one's).
        What stands before the first counts to the first; ``with_input`` false leaves it out: reading
        data is no computation, and overlaps with it where the framework prefetches. The trace tells
        neither batch nor device (1 and "unnamed"), nor FLOP and update (0).

        Raises UserError when no layer has parameters.
        """
        rows = self._learnable()
        owner = np.maximum(np.searchsorted(rows, np.arange(len(self.name)), "right") - 1, 0)
        first = 0 if with_input else int(rows[0])
        n, mean = len(rows), self.mean()

        def folded(times: Floats) -> Floats:
            return np.bincount(owner[first:], times[0, first:], n).astype(float)

        names = tuple(self.name[row] for row in rows)
        n_bytes = self.n_bytes[rows]
        return LayerProfile(
            network=network,
            device="unnamed",
            batch=1,
            tensor=names,
            layer=names,
            parameters=np.maximum(n_bytes // BYTES_PER_PARAMETER, 1),
            gradient_bytes=n_bytes,
            forward_s=folded(mean.forward_s),
            backward_s=folded(mean.backward_s),
            flops=np.zeros(n),
        )

    def training(self) -> tuple[IterationTimes, FusionPlan]:
        """The mean iteration as tasks of the DAG (dag IV-B): every layer of its own, a message a gradient.

        What stands before the first layer with parameters is the read, t_io; copy and update are not in
        the trace. Raises UserError when no layer has parameters.
        """
        first, mean = int(self._learnable()[0]), self.mean()
        times = IterationTimes(
            io_s=_input_s(mean),
            h2d_s=0.0,
            forward_s=mean.forward_s[0, first:],
            backward_s=mean.backward_s[0, first:],
            communication_s=mean.communication_s[0, self.learnable],
        )
        ends = len(self.name) - self.learnable[::-1]
        return times, FusionPlan("none", tuple(ends.tolist()))

    def messages(self) -> tuple[Ints, Floats]:
        """Every message of every iteration, as measured: (k n,) bytes and seconds, in forward order.

        Without those of no time: a message takes some.
        """
        seconds = self.communication_s[:, self.learnable]
        n_bytes = np.broadcast_to(self.n_bytes[self.learnable], seconds.shape)
        return n_bytes[seconds > 0], seconds[seconds > 0]

    def _learnable(self) -> NDArray[np.int64]:
        """``learnable``; raises UserError where no layer is."""
        if not len(self.learnable):
            raise UserError("trace: no layer has a gradient (all sizes are 0): nothing to exchange")
        return self.learnable


# -- files -------------------------------------------------------------------------------------


def looks_like_one(text: str) -> bool:
    """Whether the first line is a trace's: its header, or layer 0."""
    first = _cells(text.strip().partition("\n")[0])
    return bool(first) and (
        first[0].lower() == "id" or first[0] == "0" and len(first) == len(_FILE.names)
    )


def parse_trace(text: str, file: str) -> LayerTrace:
    """The trace in blank- or comma-separated columns, with or without a header; ``file`` names it in errors.

    Raises UserError naming file and line for a wrong number of columns, a wrong header or unit, ids that do
    not count from 0, entries that are no numbers or negative, and iterations that differ in names, sizes
    or length.

    >>> trace = parse_trace("0 conv 20 40 5 400\\n1 relu 3 3 0 0", "my trace")
    >>> trace.name, trace.forward_s[0].tolist()
    (('conv', 'relu'), [2e-05, 3e-06])
    """
    sheet = _sheet(text, file)
    frame = _FILE.frame(sheet, exact=False)
    ids = frame["id"].to_numpy()
    rows = np.arange(len(ids))
    expected = rows - np.maximum.accumulate(np.where(ids == 0, rows, 0))
    for row in np.flatnonzero(ids != expected)[:1]:
        problem = f"{ids[row]}, expected {expected[row]}: ids count from 0 in every iteration"
        sheet.fail(row, "id", problem)
    count = int(np.append(np.flatnonzero(ids == 0), len(ids))[1])
    _check_repeats(sheet, frame, count)
    times = frame[["forward", "backward", "comm"]].to_numpy().reshape(-1, count, 3)
    columns = dict(zip(TIMES, np.moveaxis(times, -1, 0), strict=True))
    return LayerTrace(tuple(frame["name"][:count]), frame["size"].to_numpy()[:count], **columns)


def format_trace(trace: LayerTrace) -> str:
    """The trace in the columns of dag Table VI: ``parse_trace`` reads it back equal to the last bit.

    Times are microseconds, as the shortest decimals that say them exactly. Raises UserError for a name that
    the format cannot hold: an empty one, or one with a blank or a comma.

    >>> print(format_trace(parse_trace("0 conv 20 40 5 400", "my trace")).replace("\\t", " "), end="")
    Id Name Forward Backward Comm. Size
    0 conv 20 40 5 400
    """
    for name in trace.name:
        if not name or _GAP.search(name):
            raise UserError(f"trace: layer {name!r}: blanks and commas part columns; rename it")
    lines = ["\t".join(_HEADER)]
    for times_s in np.moveaxis(np.array([getattr(trace, column) for column in TIMES]), 0, -1):
        for row, (name, size) in enumerate(zip(trace.name, trace.n_bytes, strict=True)):
            times_us = (
                f"{Decimal(repr(float(time))).scaleb(6).normalize():f}" for time in times_s[row]
            )
            lines.append("\t".join((str(row), name, *times_us, str(size))))
    return "\n".join(lines) + "\n"


def _cells(line: str) -> list[str]:
    return [cell for cell in _GAP.split(line.strip()) if cell]


def _sheet(text: str, file: str) -> Sheet:
    """The lines that are neither blank nor a header, as cells."""
    check_cells(text, "\n\t ,", file)
    lines, rows, names = [], [], _FILE.names
    for line, content in enumerate(text.splitlines(), start=1):
        cells = _cells(content)
        if cells and len(cells) != len(names):
            raise UserError(
                f"{file}: line {line}: {len(cells)} columns, expected {len(names)}: {', '.join(names)}"
            )
        if cells and cells[0].lower() == "id":
            for cell, name in zip(cells, names, strict=True):
                if not cell.lower().startswith(name):
                    raise UserError(f"{file}: line {line}: column {cell!r}, expected {name!r} here")
                if _OTHER_UNIT.search(cell.lower()):
                    wanted = "bytes" if name == "size" else "microseconds"
                    raise UserError(f"{file}: line {line}: column {cell!r}: give {wanted}")
        elif cells:
            lines.append(line)
            rows.append(cells)
    if not rows:
        raise UserError(f"{file}: line 1: no layers: expected lines of {', '.join(names)}")
    return Sheet(file, names, tuple(lines), tuple(rows))


def _check_repeats(sheet: Sheet, frame: DataFrame, count: int) -> None:
    """Raise unless each iteration has the ``count`` layers of the first one."""
    layers = list(zip(frame["id"], frame["name"], frame["size"], strict=True))
    for row, (number, name, size) in enumerate(layers):
        if number >= count:
            sheet.fail(row, "id", f"layer {number} ({name}) is not in the first iteration")
        if (number, name, size) != layers[number]:
            _, known, known_size = layers[number]
            problem = (
                f"layer {name} of {size} bytes, but line {sheet.lines[number]} has {known} of "
            )
            sheet.fail(row, "size", f"{problem}{known_size} bytes")
    left = len(layers) % count
    if left:
        problem = f"the last iteration ends before layer {left} ({layers[left][1]})"
        sheet.fail(len(layers) - 1, "id", problem)


# -- what does not fit -------------------------------------------------------------------------

Found = tuple[str, Iterable[SupportsIndex], str]
"""What a finding is called, rows of its layers, its text."""

USUAL_RATIO = 0.5  # forward over backward: two products against one (osf Eq 6)
FIRST_RATIO = 1.0  # the first layer needs no gradient of its input: one against one
SUSPECT = 3.0  # times the usual ratio
SUSPECT_PLAIN = 30.0  # backward over forward of a layer without parameters
SAME = 5e-5  # relative: times printed with five or six digits that agree in four


def check_trace(trace: LayerTrace) -> list[Finding]:
    """What the mean iteration says of itself that cannot be, or is not what it seems; nothing is mended.

    ``what`` is one of

    * totals: sums of the columns (always there)
    * input: time before the first layer with parameters
    * forward: layers whose forward is far above what their backward implies
    * backward: layers without parameters whose backward is far above their forward
    * monotone: a message that takes longer than a larger one
    * waiting: communication that takes as long as the backward of an earlier layer: it may contain it
    * size: a size that is not a whole number of single-precision parameters
    * message: a gradient that takes no time to exchange, or a time without a gradient
    """
    mean = trace.mean()
    checks = (_totals, _large_forward, _large_backward, _not_monotone, _waiting, _odd_messages)
    found = (one for check in checks for one in check(mean))
    return [
        Finding(what, tuple(mean.name[row] for row in rows), text) for what, rows, text in found
    ]


def _input_s(mean: LayerTrace) -> float:
    """Forward time of what stands before the first layer with parameters."""
    return float(mean.forward_s[0, : mean.learnable[:1].sum()].sum())


def _totals(mean: LayerTrace) -> Iterator[Found]:
    input_s = _input_s(mean)
    forward, backward, sent = (float(getattr(mean, column).sum()) for column in TIMES)
    forward -= input_s
    size = int(mean.n_bytes.sum())
    ratio = f" (backward / forward {backward / forward:.2f})" if forward else ""
    text = (
        f"forward {format_seconds(forward)} without input, backward {format_seconds(backward)}{ratio}, "
        f"communication {format_seconds(sent)}, gradients {size} bytes = "
        f"{size // BYTES_PER_PARAMETER} parameters"
    )
    yield "totals", (), text
    if input_s:
        text = f"{format_seconds(input_s)} before the first layer with parameters: input, not computation"
        yield "input", range(mean.learnable[0]), text


def _large_forward(mean: LayerTrace) -> Iterator[Found]:
    rows = mean.learnable
    forward, backward = mean.forward_s[0, rows], mean.backward_s[0, rows]
    usual = np.where(np.arange(len(rows)) == 0, FIRST_RATIO, USUAL_RATIO)
    with np.errstate(all="ignore"):
        ratio = forward / backward
    wrong = np.isfinite(ratio) & (ratio > SUSPECT * usual)
    if not wrong.any():
        return
    excess = float(np.median(ratio[wrong] / usual[wrong]))
    power = 10 ** round(np.log10(excess))
    rest = mean.forward_s.sum() - _input_s(mean) - forward[wrong].sum()
    total = float(mean.backward_s.sum())
    found, mended = (total / (rest + forward[wrong].sum() / by) for by in (1, power))
    text = (
        f"forward takes {ratio[wrong].min():.1f} to {ratio[wrong].max():.1f} times backward, though "
        f"backward computes twice as much (as much, in the first layer): {excess:.1f} times too large "
        f"in the median; divided by {power}, backward / forward of the whole is {mended:.2f}, not "
        f"{found:.2f}"
    )
    yield "forward", rows[wrong], text


def _large_backward(mean: LayerTrace) -> Iterator[Found]:
    forward, backward = mean.forward_s[0], mean.backward_s[0]
    plain = (mean.n_bytes == 0) & (forward > 0) & (backward > SUSPECT_PLAIN * forward)
    for row in np.flatnonzero(plain):
        times = (
            f"{format_seconds(backward[row])} is {backward[row] / forward[row]:.0f} times forward"
        )
        text = f"backward {times}, in a layer without parameters"
        yield "backward", [int(row)], text


def _not_monotone(mean: LayerTrace) -> Iterator[Found]:
    """Reported once, of the pair where it is worst."""
    rows = mean.learnable[np.argsort(mean.n_bytes[mean.learnable], kind="stable")]
    n_bytes, seconds = mean.n_bytes[rows], mean.communication_s[0, rows]
    slower = (n_bytes[:, None] < n_bytes) & (seconds[:, None] > seconds) & (seconds > 0)
    if not slower.any():
        return
    with np.errstate(all="ignore"):
        worse = np.where(slower, n_bytes / seconds / (n_bytes / seconds)[:, None], 0)
    small, large = np.unravel_index(np.argmax(worse), worse.shape)
    text = (
        f"{format_bytes(n_bytes[small])} take {format_seconds(seconds[small])}, "
        f"{format_bytes(n_bytes[large])} only {format_seconds(seconds[large])}; "
        f"{int(slower.any(axis=1).sum())} of {len(rows)} messages take longer than a larger one: the "
        "column is not the cost of a message of that size"
    )
    yield "monotone", rows[[small, large]], text


def _waiting(mean: LayerTrace) -> Iterator[Found]:
    for row in mean.learnable:
        sent = mean.communication_s[0, row]
        apart = np.abs(mean.backward_s[0, :row] - sent)
        if sent and apart.size and apart.min() <= SAME * sent:
            other = int(np.argmin(apart))
            text = (
                f"communication of {mean.name[row]} and backward of {mean.name[other]}, which follows, "
                f"agree within {format_seconds(apart[other])} of {format_seconds(sent)}: it seems to "
                "include waiting for it"
            )
            yield "waiting", (row, other), text


def _odd_messages(mean: LayerTrace) -> Iterator[Found]:
    for row in np.flatnonzero(mean.n_bytes % BYTES_PER_PARAMETER):
        text = f"{mean.n_bytes[row]} bytes is not a whole number of single-precision parameters"
        yield "size", [int(row)], text
    has_gradient, is_sent = mean.n_bytes > 0, mean.communication_s[0] > 0
    for odd, text in (
        (has_gradient & ~is_sent, "a gradient, but no communication time"),
        (~has_gradient & is_sent, "communication time, but no gradient"),
    ):
        if odd.any():
            yield "message", np.flatnonzero(odd), text
