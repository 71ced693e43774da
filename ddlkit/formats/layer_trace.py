"""Layer-wise traces in the format of the dag paper, as layer profiles.

Such a trace (dag Section VI and Table VI) has one line for each layer, in forward
order: its id, its name, the times of forward, backward and communication in
microseconds, and the bytes of its gradient, which are 0 for a layer without parameters.
The ids count from 0. A file of several iterations repeats all its lines.

References
----------
dag : S. Shi et al., "A DAG Model of Synchronous Stochastic Gradient Descent in
    Distributed Deep Learning", 2018, arXiv:1805.03812.
osf : T. Liu et al., "Modeling and Optimizing the Scaling Performance in Distributed
    Deep Learning Training", WWW 2022.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import Finding, UserError, shown
from ddlkit.core.plan import FusionPlan
from ddlkit.core.strategies import IterationTimes
from ddlkit.core.units import format_seconds
from ddlkit.core.workload import Floats, Ints, LayerProfile
from ddlkit.formats.contract import ImportOptions, ReadProfile
from ddlkit.store.readers import BYTES_PER_PARAMETER
from ddlkit.store.sheet import Column, Schema, Sheet, is_json, read_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

_TRACE = Schema(
    "a layer-wise trace",
    (
        Column("id", "int", "non_negative"),
        Column("name", "str", "named"),
        Column("forward", "microseconds", "non_negative"),
        Column("backward", "microseconds", "non_negative"),
        Column("comm", "microseconds", "non_negative"),
        Column("size", "int", "non_negative"),
    ),
)

_CAUSE_OF_OTHER_COUNTS = "a cell is missing, or a name has a blank or a comma inside"
"""Why a row may have another number of cells than there are columns."""

USUAL_RATIO = 0.5
"""Forward over backward of a layer: one product of matrices against two (osf Eq 6)."""

FIRST_RATIO = 1.0
"""The ratio of the first layer, whose backward needs no gradient of its input."""

SUSPECT = 3.0
"""How many times the usual ratio is reported."""


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """The times of k iterations of L layers.

    Attributes
    ----------
    name : tuple of str, length L
        The layers, in forward order.
    n_bytes : ndarray, shape (L,)
        The bytes of each layer's gradient, 0 where there is none.
    forward_s, backward_s : ndarray, shape (k, L)
        The time of each layer in each iteration, in seconds.
    communication_s : ndarray, shape (k, L)
        The time of exchanging each layer's gradient, in seconds.
    """

    name: tuple[str, ...]
    n_bytes: Ints
    forward_s: Floats
    backward_s: Floats
    communication_s: Floats

    @property
    def learnable(self) -> NDArray[np.int64]:
        """Return the positions of the n layers with a gradient, in an array of shape (n,).

        Raises
        ------
        UserError
            If no layer has one.
        """
        rows = np.flatnonzero(self.n_bytes)
        if not len(rows):
            raise UserError(
                "trace: no layer has a gradient (all sizes are 0): nothing to exchange"
            )
        return rows

    def profile(self, network: str, *, with_input: bool = True) -> LayerProfile:
        """Return the mean iteration as a profile of the layers with a gradient.

        Parameters
        ----------
        network : str
            The name of the network.
        with_input : bool, optional
            Whether to count the layers before the first one with a gradient, which
            may be the reading of data.

        Returns
        -------
        LayerProfile
            One row for each of the n layers with a gradient. FLOP and the time of the
            update, which a trace does not state, are 0.

        Raises
        ------
        UserError
            If no layer has a gradient.

        Notes
        -----
        The time of a layer without a gradient, in forward and in backward, is added to the
        last layer with a gradient before it. The times of layers before the first layer
        with a gradient are added to this first layer, or left out if ``with_input`` is
        False.
        """
        rows = self.learnable
        n = len(rows)
        first_layer = 0 if with_input else int(rows[0])
        names = tuple(self.name[row] for row in rows)
        n_bytes = self.n_bytes[rows]
        # A trace states neither the device nor the batch size. A user may add both.
        return LayerProfile(
            network=network,
            device="unnamed",
            batch=1,
            tensor=names,
            layer=names,
            # The trace does not state the type, for which float32 is assumed. A gradient
            # has at least one element, even one of fewer than 4 bytes.
            parameters=np.maximum(n_bytes // BYTES_PER_PARAMETER, 1),
            gradient_bytes=n_bytes,
            forward_s=self._summed_to_learnable(self.forward_s, first_layer),
            backward_s=self._summed_to_learnable(self.backward_s, first_layer),
            flops=np.zeros(n),
        )

    def _summed_to_learnable(self, times_s: Floats, first_layer: int) -> Floats:
        """Return the mean times of the n layers with a gradient, shape (n,).

        ``times_s`` has shape (k, L): k iterations of L layers. The time of a layer without
        a gradient is added to the last layer with a gradient before it. If there is none
        before it, the time is added to the first layer with a gradient. Layers before the
        position ``first_layer`` are left out.
        """
        learnable_rows = self.learnable
        mean_s = times_s.mean(axis=0)
        layers = np.arange(len(self.name))
        # owner[l] is the position, among the layers with a gradient, of the layer that gets
        # the time of layer l: the last one at or before l. Layers before the first one would
        # get -1, which becomes 0.
        n_at_or_before = np.searchsorted(learnable_rows, layers, "right")
        owner = np.maximum(n_at_or_before - 1, 0)
        # For each owner, the sum of the times of its layers.
        sums_s = np.bincount(
            owner[first_layer:],
            weights=mean_s[first_layer:],
            minlength=len(learnable_rows),
        )
        # Sums of weights are float already. The conversion is for the type checker.
        return sums_s.astype(float)

    def iteration_times_and_plan(self) -> tuple[IterationTimes, FusionPlan]:
        """Return the mean times of an iteration, and the plan of one gradient a message.

        A graph of tasks is made from both (dag Section IV-B).

        Returns
        -------
        times : IterationTimes
            Forward and backward have a value for each layer from the first one with a
            gradient on. Communication has a value for each gradient. The forward time of
            the layers before the first one with a gradient counts as reading of data
            (t_io). Their backward, which no gradient needs, is left out. A trace has no
            copies to the GPU and no update, so their times are 0.
        plan : FusionPlan
            The plan "none", which fuses no gradients: a group for each gradient. A layer
            without a gradient is in the group of the gradient that is ready next, and adds
            no time to its message. The plan has the layers of ``times``.

        Raises
        ------
        UserError
            If no layer has a gradient.
        """
        learnable_rows = self.learnable
        first = int(learnable_rows[0])
        forward_s = self.forward_s.mean(axis=0)
        backward_s = self.backward_s.mean(axis=0)
        communication_s = self.communication_s.mean(axis=0)
        times = IterationTimes(
            io_s=float(forward_s[:first].sum()),
            h2d_s=0.0,
            forward_s=forward_s[first:],
            backward_s=backward_s[first:],
            communication_s=communication_s[learnable_rows],
        )
        # A plan counts layers in ready order, from the last one, and each layer with a
        # gradient ends a group. The group that layer `row` of L ends has the exclusive end
        # L - row. If layers 1 and 3 of 0 to 3 have gradients, the groups are (3) and (2, 1),
        # and their ends are 1 and 3. The last end is the number of layers of ``times``.
        ends = len(self.name) - learnable_rows[::-1]
        return times, FusionPlan("none", tuple(ends.tolist()))


def matches(text: str) -> bool:
    """Return whether the first line of a file is a trace's header, or layer 0.

    Examples
    --------
    >>> matches("Id Name Forward Backward Comm. Size"), matches("0 conv 20 40 5 400")
    (True, True)
    """
    first_line, _, _ = text.strip().partition("\n")
    # The list has at least one cell, which is "" for an empty file.
    cells = _cells(first_line)
    is_header = cells[0].lower() == "id"
    is_layer = cells[0] == "0" and len(cells) == len(_TRACE.names)
    return is_header or is_layer


def read(text: str, file: str, options: ImportOptions) -> ReadProfile:
    """Return the mean iteration of a trace as a profile, with remarks for the user.

    The remarks (findings) are the number of iterations, and those of `check_trace`. The
    option ``without_input`` leaves out the layers before the first one with a
    gradient.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    trace = parse_trace(text, file)
    # The property `learnable` refuses such a trace, too, but does not know the file.
    if not trace.n_bytes.any():
        raise UserError(
            f"{file}: no layer has a gradient, because all sizes are 0: write the bytes of "
            "the gradients in the column size"
        )
    # A trace does not name its network: ``ddlkit import`` adds the name.
    profile = trace.profile(network="", with_input=not options.without_input)
    n_iterations, n_layers = trace.forward_s.shape
    counts = f"{n_iterations}, each of {n_layers} layers"
    findings = (Finding("iterations", text=counts), *check_trace(trace))
    return ReadProfile(profile, findings)


def parse_trace(text: str, file: str) -> LayerTrace:
    r"""Return the trace in a file.

    Parameters
    ----------
    text : str
        The content of the file, with or without a header. Its columns, which blanks or
        commas separate, are the id, the name, the microseconds of forward, backward and
        communication, and the bytes of the gradient.
    file : str
        The file, as errors name it.

    Returns
    -------
    LayerTrace
        The trace.

    Raises
    ------
    UserError
        For a cell that cannot be read, for wrong ids, or for an iteration that lacks layers
        or differs from the first one in their names or sizes.

    Examples
    --------
    >>> trace = parse_trace("0 conv 20 40 5 400\n1 relu 3 3 0 0", "my trace")
    >>> trace.name, trace.forward_s[0].tolist()
    (('conv', 'relu'), [2e-05, 3e-06])
    """
    sheet = _sheet(text, file)
    # `exact=False` marks a user's own file, in which implausible numbers are refused. The
    # microseconds of the file become seconds here.
    frame = _TRACE.frame(sheet, exact=False)
    n_layers = _layers_of_an_iteration(frame["id"].to_numpy())
    _refuse_wrong_ids(sheet, frame, n_layers)
    _refuse_changed_layers(sheet, frame)
    _refuse_partial_iteration(sheet, frame, n_layers)
    # The lines of k iterations follow one another, so a column of k * L times becomes an
    # array of shape (k, L).
    return LayerTrace(
        name=tuple(frame["name"][:n_layers]),
        n_bytes=frame["size"].to_numpy()[:n_layers],
        forward_s=frame["forward"].to_numpy().reshape(-1, n_layers),
        backward_s=frame["backward"].to_numpy().reshape(-1, n_layers),
        communication_s=frame["comm"].to_numpy().reshape(-1, n_layers),
    )


def _refuse_wrong_ids(sheet: Sheet, frame: DataFrame, n_layers: int) -> None:
    """Raise UserError unless the ids count from 0 to ``n_layers - 1`` again and again."""
    ids = frame["id"].to_numpy()
    is_wrong = ids != np.arange(len(ids)) % n_layers
    if is_wrong.any():
        # argmax returns the first row with a wrong id.
        row = int(np.argmax(is_wrong))
        problem = f"{ids[row]}, expected {row % n_layers}"
        rule = "ids count from 0, alike in each iteration"
        sheet.fail(row, "id", f"{problem}: {rule}")


def _refuse_changed_layers(sheet: Sheet, frame: DataFrame) -> None:
    """Raise UserError unless a layer has one name and one size in all iterations.

    The ids must have been checked, so that row k of the table is layer k in the first
    iteration.
    """
    ids = frame["id"].to_numpy()
    layers = frame[["name", "size"]]
    # For each row, the row of its layer in the first iteration.
    in_first_iteration = layers.iloc[ids].reset_index(drop=True)
    is_changed = (layers != in_first_iteration).any(axis=1).to_numpy()
    if is_changed.any():
        # argmax returns the first row that differs.
        row = int(np.argmax(is_changed))
        name, size = layers.loc[row]
        first_name, first_size = in_first_iteration.loc[row]
        first_line = sheet.lines[ids[row]]
        first = f"line {first_line} has {first_name} of {first_size}"
        rule = "a layer has the same name and size in all iterations"
        column = "size" if name == first_name else "name"
        sheet.fail(row, column, f"{name} of {size} bytes, but {first}: {rule}")


def _refuse_partial_iteration(sheet: Sheet, frame: DataFrame, n_layers: int) -> None:
    """Raise UserError if the last iteration lacks layers.

    The ids must have been checked, so that row k of the table is layer k in the first
    iteration.
    """
    n_rows = len(frame)
    # A last iteration that is cut has the layers 0 to surplus - 1.
    surplus = n_rows % n_layers
    if surplus:
        next_layer = f"layer {surplus} ({frame['name'][surplus]})"
        problem = f"the last iteration ends before {next_layer}"
        sheet.fail(n_rows - 1, "id", problem)


def _layers_of_an_iteration(ids: Ints) -> int:
    """Return the number of layers: how many lines there are until an id is 0 again."""
    starts = np.flatnonzero(ids == 0)
    later = starts[starts > 0]
    return int(later[0]) if later.size else len(ids)


def _cells(line: str) -> list[str]:
    """Return the cells of a line, which blanks or commas separate."""
    return re.split(r"[\s,]+", line.strip("\t\r ,"))


def _sheet(text: str, file: str) -> Sheet:
    """Return the cells of a trace.

    The columns of the result always have the names of `_TRACE`, however the header of
    the file spells them, and also if the file has no header.
    """
    names = _TRACE.names
    if is_json(text):
        raise UserError(
            f"{file}: is JSON, but a layer-wise trace is needed here, whose lines have the "
            f"columns {', '.join(names)}"
        )
    # The cells of a trace may be separated by blanks, but `read_sheet` needs commas between them.
    lines = [",".join(_cells(line)) for line in text.splitlines()]
    # A file may begin with empty lines.
    first_line = next((line for line in lines if line), "")
    # The first column is "id". Without a header, the first cell is a number.
    has_header = first_line.lower().startswith("id")
    if not has_header and not first_line[:1].isdigit():
        raise UserError(
            f"{file}: is no layer-wise trace: its first line is {shown(first_line)}, but the "
            f"columns must be {', '.join(names)}, in this order, with or without a line of "
            "these names: give such a trace, or leave --kind out if it is given"
        )
    if not has_header:
        return read_sheet("\n".join(lines), file, names, _CAUSE_OF_OTHER_COUNTS)
    # `read_sheet` takes the first line of the file for the header. If the file begins with empty
    # lines, the header therefore changes places with the first of them. All lines below the header
    # keep their numbers.
    position = lines.index(first_line)
    lines[position] = lines[0]
    lines[0] = first_line
    where = f"{file}: line {position + 1}"
    sheet = read_sheet("\n".join(lines), file, likely_cause=_CAUSE_OF_OTHER_COUNTS)
    if len(sheet.header) != len(names):
        problem = f"{len(sheet.header)} columns, expected {len(names)}"
        raise UserError(f"{where}: {problem}: {', '.join(names)}")
    # A header may add to the names, as in "Comm." or "Forward(us)".
    for cell, name in zip(sheet.header, names, strict=True):
        if not cell.lower().startswith(name):
            raise UserError(
                f"{where}: column {cell!r}, expected {name!r} here: the columns must be "
                f"{', '.join(names)}, in this order"
            )
    return Sheet(file, names, sheet.lines, sheet.rows)


def check_trace(trace: LayerTrace) -> Iterator[Finding]:
    """Yield remarks for the user: totals, and layers with a strangely long forward.

    Parameters
    ----------
    trace : LayerTrace
        The trace.

    Yields
    ------
    Finding
        First the sums of the columns in the mean iteration. Then, if there are such layers,
        those whose forward takes more than `SUSPECT` times as long as usual, compared with
        their backward.

    Raises
    ------
    UserError
        If no layer has a gradient.
    """
    yield _totals(trace)
    rows = trace.learnable
    forward_s = trace.forward_s.mean(axis=0)
    backward_s = trace.backward_s.mean(axis=0)
    # Usually, backward takes twice as long as forward: it computes the gradients of the
    # parameters and of the input. The first layer with a gradient has another usual
    # ratio, because it needs no gradient of its input.
    usual_ratio = np.full(len(rows), USUAL_RATIO)
    usual_ratio[0] = FIRST_RATIO
    # excess is the ratio of forward to backward over the usual ratio. It is infinite or NaN
    # for a layer whose backward takes no time, and such a layer is not suspect.
    with np.errstate(all="ignore"):
        excess = forward_s[rows] / backward_s[rows] / usual_ratio
    is_suspect = np.isfinite(excess) & (excess > SUSPECT)
    if is_suspect.any():
        median = np.median(excess[is_suspect])
        names = tuple(trace.name[row] for row in rows[is_suspect])
        text = f"forward over backward is {median:.1f} times the usual ratio"
        yield Finding("forward", text, layers=names)


def _totals(trace: LayerTrace) -> Finding:
    """Return a remark for the user: the sums of times and sizes in the mean iteration."""
    forward_s = trace.forward_s.mean(axis=0)
    # The position of the first layer with a gradient, which is the first one with parameters.
    # The layers before it may be the reading of data.
    first = int(trace.learnable[0])
    before_first_s = float(forward_s[:first].sum())
    from_first_s = float(forward_s.sum()) - before_first_s
    backward = format_seconds(float(trace.backward_s.mean(axis=0).sum()))
    communication = format_seconds(float(trace.communication_s.mean(axis=0).sum()))
    text = (
        f"the file has {format_seconds(from_first_s)} of forward "
        f"({format_seconds(before_first_s)} more before the first layer with parameters), "
        f"{backward} of backward, {communication} of communication, and gradients of "
        f"{trace.n_bytes.sum()} bytes, before --without-input and --gradient-bytes change these"
    )
    return Finding("totals", text=text)
