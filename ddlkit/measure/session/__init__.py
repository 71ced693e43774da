"""What a session measures: its points, their outcomes, and what its stamps say.

There is no torch here, because nothing in the process that watches a session may
disturb what is measured.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from ddlkit.store import machine

Tables = Mapping[str, pd.DataFrame]
"""New rows by the schema of their table."""

# What can become of a point, in the table of outcomes.
MEASURED = "measured"
PARTIAL = "measured in part"
STARTED = "started"
"""The point was begun, and whatever ended the session left no other outcome."""
PENDING = "not reached"
OUT_OF_MEMORY = "out of memory"
UNAVAILABLE = "unavailable"
FAILED = "failed"
KILLED = "killed"
NO_TIME = "no time left"
HAVE_TABLES = (MEASURED, PARTIAL)
"""Outcomes of points that have tables."""
FAULTS = (FAILED, KILLED, OUT_OF_MEMORY, UNAVAILABLE, STARTED)
"""Outcomes of points that are tried last by the next session."""
PACKED = ("contention", "selection", "timeline", "sharing_spans")
"""Schemas whose tables are written as .csv.gz."""


class Partial(UserError):
    """A part of a point could be measured.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        The part that could be measured.
    reason : str
        Why the rest could not be measured.
    """

    def __init__(self, tables: Tables, reason: str) -> None:
        super().__init__(reason)
        self.tables = tables


class Unavailable(UserError):
    """The machine lacks what a point needs, such as a second GPU."""


def all_or_partial(table: str, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate frames that are measured one after the other.

    Parameters
    ----------
    table : str
        The schema of the table.
    frames : iterable of DataFrame
        The frames. Each frame is measured only when this function takes it.

    Returns
    -------
    DataFrame
        All rows.

    Raises
    ------
    Partial
        If a frame cannot be measured and at least one was measured before. The
        exception has the rows of the frames before.
    Exception
        If the first frame cannot be measured. The exception is then the one that the
        measurement raised.
    """
    measured_frames: list[pd.DataFrame] = []
    try:
        # Not `list(frames)`, which would lose the frames before a failure.
        for frame in frames:
            measured_frames.append(frame)
    except Exception as error:
        if not measured_frames:
            raise
        if isinstance(error, Partial):
            # The frame that failed has some rows of its own, which are kept, too.
            measured_frames += error.tables.values()
        reason = str(error)
        # The message of any other error than a UserError is not written for users, and may
        # be empty. The type of the error precedes it.
        if not isinstance(error, UserError):
            reason = f"{type(error).__name__}: {reason}"
        rows = pd.concat(measured_frames, ignore_index=True)
        raise Partial({table: rows}, reason) from error
    return pd.concat(measured_frames, ignore_index=True)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out.

    Parameters
    ----------
    error : BaseException
        The exception. Python, torch on the CPU and CUDA each have their own way to say
        so.

    Returns
    -------
    bool

    Examples
    --------
    >>> ran_out_of_memory(MemoryError()), ran_out_of_memory(ValueError("no number"))
    (True, False)
    """
    # CUDA says the first of these, and torch on the CPU the second. torch says the third
    # of a tensor whose size is beyond every memory.
    signs = ("out of memory", "can't allocate memory", "size calculation overflowed")
    message = str(error)
    return isinstance(error, MemoryError) or any(sign in message for sign in signs)


def say(line: str) -> None:
    """Print a line of progress on standard error.

    Parameters
    ----------
    line : str
        The line. If nobody reads standard error any more, the line is lost, and the
        measurement goes on.
    """
    with suppress(OSError):
        print(f"ddlkit: {line}", file=sys.stderr, flush=True)


def table_path(directory: Path, schema: str, name: str) -> Path:
    """Return the path of a table.

    Parameters
    ----------
    directory : Path
        The directory of the session.
    schema, name : str
        The schema and the name of the table.

    Returns
    -------
    Path
        The path, which ends in ".csv.gz" for the schemas of `PACKED`.

    Examples
    --------
    >>> table_path(Path("measured"), "layers", "resnet50-b4-r1").name
    'layers-resnet50-b4-r1.csv'
    """
    suffix = ".csv.gz" if schema in PACKED else ".csv"
    return directory / f"{schema}-{name}{suffix}"


@functools.cache
def this_machine() -> dict[str, Any]:
    """Return the description of this machine for stamps.

    The machine is described once, because that takes a while, and because later the
    interfaces of a lab would be among its links.

    Returns
    -------
    dict
        The description that `ddlkit.store.machine.describe` returns.
    """
    return machine.describe()


@dataclass(frozen=True)
class Origin:
    """What all stamps of a session say.

    A stamp says where the rows of a table come from.

    Attributes
    ----------
    command : sequence of str
        The command line.
    machine : mapping
        The description of the machine, as `this_machine` returns it.
    remark : str
        What must be known of the session's times, such as others' load on the machine;
        empty for nothing.
    """

    command: Sequence[str] = field(default_factory=lambda: sys.argv)
    machine: Mapping[str, Any] = field(default_factory=this_machine)
    remark: str = ""

    def save(
        self, path: Path, frame: pd.DataFrame, schema: str, *, append: bool = False
    ) -> None:
        """Write a table with its stamp.

        Parameters
        ----------
        path : Path
            Where to write.
        frame : DataFrame
            The rows.
        schema : str
            The schema of the table.
        append : bool, optional
            Whether to keep the rows that the table has already.

        Raises
        ------
        UserError
            If the rows do not fit the schema, or if the table cannot be written.
        """
        store.save_table(
            frame,
            path.parent,
            path.name,
            schema=schema,
            command=self.command,
            machine=self.machine,
            remark=self.remark,
            append=append,
        )


@dataclass(frozen=True)
class Row:
    """A row of the table of outcomes: what became of a point.

    Attributes
    ----------
    what, point : str
        What the point's tables belong to, such as "layers", and the rest of the point's
        name.
    outcome : str
        One of the outcomes of this module. A point that is still to be measured is
        pending.
    reason : str
        Why the point was not measured, or not all of it; empty if it was.
    estimate_s, seconds : float
        The expected and the measured duration in seconds. The measured one is 0 if the
        point was not measured.
    """

    what: str
    point: str
    outcome: str = PENDING
    reason: str = ""
    estimate_s: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> str:
        """Return the name of the point among all points of a session."""
        return f"{self.what}/{self.point}"


@dataclass(frozen=True)
class Point:
    """A measurement of its own, with the tables that are recorded together.

    Attributes
    ----------
    what : str
        What the tables belong to, such as "layers".
    name : str
        The name of the tables, such as "resnet50-b4-r1".
    measure : callable
        Returns new rows by schema, or the rows of the only table. An exception such as
        `Partial` or `Unavailable` decides the outcome.
    estimate_s : float
        The expected duration in seconds.
    tables : sequence of str
        The schemas of the tables. By default there is one table, whose schema is
        ``what``.
    folder : str
        The folder of the tables within the session's directory; empty for the directory
        itself.
    moment : str
        What tells this point from others that add to the same tables; empty if there
        are no others.
    note : str
        What a listing of the session says of the point.
    left : callable, optional
        Returns what is left to measure of a table that grows, such as the sizes that
        have no rows yet. New rows are then added to the table. Without this argument, a
        point is done when its tables exist.
    predicted : optional
        What a model is to predict before the point is measured, in the form that the maker
        of the point chooses. With None nothing is predicted.
    """

    what: str
    name: str
    measure: Callable[[], Tables | pd.DataFrame]
    estimate_s: float = 10.0
    tables: Sequence[str] = ()
    folder: str = ""
    moment: str = ""
    note: str = ""
    left: Callable[[], Collection[object]] | None = None
    predicted: Any = None

    @property
    def key(self) -> str:
        """Return the name of the point among all points of a session."""
        return self.row().key

    def row(self) -> Row:
        """Return the point's row in the table of outcomes, before it is measured.

        The row names the point by its folder, name and moment, as far as it has them.
        """
        words = [word for word in (self.folder, self.name, self.moment) if word]
        return Row(self.what, " ".join(words), estimate_s=self.estimate_s)

    @property
    def adds_rows(self) -> bool:
        """Return whether the point adds rows to a table that may exist already."""
        return self.left is not None

    @property
    def schemas(self) -> Sequence[str]:
        """Return the schemas of the point's tables."""
        return self.tables or (self.what,)

    def path(self, out: Path, schema: str) -> Path:
        """Return where one of the point's tables lies.

        Parameters
        ----------
        out : Path
            The directory of the session.
        schema : str
            The schema of the table.

        Returns
        -------
        Path
        """
        return table_path(out / self.folder, schema, self.name)

    def done(self, out: Path) -> bool:
        """Return whether the point is measured already, and need not be measured again.

        Parameters
        ----------
        out : Path
            The directory of the session.

        Returns
        -------
        bool
            True if all tables exist and are of this version. If the point has ``left``,
            True if nothing is left to measure.

        Raises
        ------
        UserError
            If a table is damaged.
        """
        # If the point has ``left``, its table grows, and may lack rows although it exists. The
        # version of the table is not checked here. If it is another one, new rows are refused
        # when they are saved.
        if self.left is not None:
            nothing_left = not self.left()
            return nothing_left
        paths = [self.path(out, schema) for schema in self.schemas]
        if not all(store.has_table(path) for path in paths):
            return False
        # The stamp of a table, a file beside it, says which version measured it. Numbers of
        # two versions cannot be compared, so a point that another version measured is
        # measured again.
        versions = {store.load_stamp(path)["benchmark_version"] for path in paths}
        return versions == {store.BENCHMARK_VERSION}

    def row_from_tables(self, out: Path) -> Row:
        """Return the point's row of outcomes as it follows from the tables that exist.

        Parameters
        ----------
        out : Path
            The directory of the session.

        Returns
        -------
        Row
            The outcome is measured, pending, or failed if a table is damaged.
        """
        row = self.row()  # its outcome is pending
        try:
            done = self.done(out)
        except UserError as error:
            return replace(row, outcome=FAILED, reason=one_line(str(error)))
        if done:
            return replace(row, outcome=MEASURED)
        return row

    def measure_and_save(self, out: Path, origin: Origin) -> Row:
        """Measure the point, unless it is measured already, and save its tables.

        If a table is damaged, the point fails and nothing is measured. All exceptions
        of the measurement become outcomes.

        Parameters
        ----------
        out : Path
            The directory of the session.
        origin : Origin
            What the stamps say.

        Returns
        -------
        Row
            What became of the point.
        """
        row = self.row_from_tables(out)
        # Any other outcome says that the point is measured already, or that a table is damaged.
        if row.outcome != PENDING:
            return row
        start_s = time.monotonic()
        outcome, reason, tables = self._try_to_measure()
        # A failed point may have left its model in a cycle of references, and the next
        # point needs the memory.
        gc.collect()
        # If the point was measured in part, the tables with that part are saved.
        try:
            for schema, frame in tables.items():
                path = self.path(out, schema)
                origin.save(path, frame, schema, append=self.adds_rows)
        except UserError as error:
            outcome = FAILED
            reason = one_line(str(error))
        return replace(
            row, outcome=outcome, reason=reason, seconds=time.monotonic() - start_s
        )

    def _try_to_measure(self) -> _Measurement:
        """Measure the point, and return what came of it, also if the measurement fails."""
        try:
            result = self.measure()
        except Exception as error:
            return _outcome_of(error)
        # A point with a single table may return its rows without the schema.
        if isinstance(result, pd.DataFrame):
            tables: Tables = {self.schemas[0]: result}
        else:
            tables = result
        missing = sorted(set(self.schemas) - set(tables))
        # A point that adds rows need not add to each of its tables. Any other point
        # would count as pending in the next session if it lacked a table, and each
        # session would measure it again.
        if missing and not self.adds_rows:
            names = ", ".join(repr(schema) for schema in missing)
            reason = f"the measurement left no table {names}"
            return _Measurement(FAILED, reason, tables)
        return _Measurement(MEASURED, reason="", tables=tables)


class _Measurement(NamedTuple):
    """What came of the measurement of a point.

    Attributes
    ----------
    outcome : str
        One of the outcomes of this module.
    reason : str
        Why the point was not measured, or not all of it; empty if it was.
    tables : mapping of str to DataFrame
        The rows that were measured, by the schema of their table.
    """

    outcome: str
    reason: str
    tables: Tables


def _outcome_of(error: Exception) -> _Measurement:
    """Return what came of the measurement of a point that raised an error.

    Any other exception than a UserError may be a mistake in the program, and is printed
    with its traceback, unless memory ran out.
    """
    reason = one_line(str(error))
    # `Partial` and `Unavailable` are UserErrors with outcomes of their own.
    if isinstance(error, Partial):
        return _Measurement(PARTIAL, reason, error.tables)
    if isinstance(error, Unavailable):
        return _Measurement(UNAVAILABLE, reason, tables={})
    # A UserError may also say that memory ran out.
    if ran_out_of_memory(error):
        return _Measurement(OUT_OF_MEMORY, reason, tables={})
    # All other errors fail the point.
    if not isinstance(error, UserError):
        traceback.print_exception(error)
        reason = f"{type(error).__name__}: {reason}"
    return _Measurement(FAILED, reason, tables={})


class PointList(NamedTuple):
    """The points of a session.

    Attributes
    ----------
    body : sequence of Point
        The points.
    opening, closing : sequence of Point
        Points that are measured before and after all others, if any point of ``body``
        is measured.
    """

    body: Sequence[Point]
    opening: Sequence[Point] = ()
    closing: Sequence[Point] = ()


MakePoints = Callable[..., PointList]
"""Takes ``out``, the session's directory, and ``session``, its number, by keyword. Any
process can thus make the points anew."""
