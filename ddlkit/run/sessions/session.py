"""What a session measures: points, what can become of them, and the loop that measures them. No torch here.

What is there is left out, the rest saved point by point.
"""

from __future__ import annotations

import functools
import gc
import importlib
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import machine, store
from ddlkit.core.errors import UserError

Tables = Mapping[str, pd.DataFrame]
"""Schema -> rows."""

# What can become of a point, in the words of the table of outcomes.
MEASURED, PARTIAL = "measured", "measured in part"
STARTED, PENDING = "started", "not reached"
OUT_OF_MEMORY, UNAVAILABLE = "out of memory", "unavailable"
FAILED, KILLED, NO_TIME = "failed", "killed", "no time left"
THERE = (MEASURED, PARTIAL)
FAULTS = (FAILED, KILLED, OUT_OF_MEMORY, UNAVAILABLE, STARTED)
"""Of points that come last when they are tried again; the last: all ended while it was measured."""

PACKED = ("contention", "selection", "timeline", "sharing_spans")
"""Schemas whose tables are written as .csv.gz."""
OVERTIME_S = 20.0  # what points may run over the budget
RESERVE = 2.0  # times what the closing points are expected to take is kept free for them


class Partial(UserError):
    """Part of a point could be measured: ``tables`` hold it, the message says why not the rest."""

    def __init__(self, tables: Tables, reason: str) -> None:
        super().__init__(reason)
        self.tables = tables


class Unavailable(UserError):
    """This machine lacks what a point needs, such as a second GPU."""


def all_or_partial(table: str, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return the frames as they are measured, below each other.

    Raises what the first frame does as it is, and what a later one does as Partial with those before, and
    with what there is of itself.
    """
    done: list[pd.DataFrame] = []
    try:
        for frame in frames:
            done.append(frame)
    except Exception as error:
        if not done:
            raise
        done += error.tables.values() if isinstance(error, Partial) else ()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise Partial({table: pd.concat(done, ignore_index=True)}, f"{kind}{error}") from error
    return pd.concat(done, ignore_index=True)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether this is how Python, torch on the CPU or CUDA say that memory is used up."""
    signs = ("out of memory", "can't allocate memory", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def say(line: str) -> None:
    """Print a line of progress on standard error; that nobody can read it there ends no measurement."""
    with suppress(OSError):
        print(f"ddlkit: {line}", file=sys.stderr, flush=True)


def one_line(error: BaseException, most: int = 300) -> str:
    """Return what an exception says, fit for a cell of a table."""
    text = " ".join(str(error).split())
    return "".join(letter for letter in text if letter.isprintable())[:most]


# -- points ------------------------------------------------------------------------------------


def table_path(directory: Path, schema: str, name: str) -> Path:
    """Return where a table of that schema and name lies."""
    return directory / f"{schema}-{name}.csv{'.gz' if schema in PACKED else ''}"


@functools.cache
def this_machine() -> dict[str, Any]:
    """Return the machine, described once: it takes a while, and a lab that is up would be among its links."""
    return machine.describe()


@dataclass(frozen=True)
class Origin:
    """What all stamps of a session say of where its tables come from.

    command : the user's; remark : what must be known of the times, as that others used the GPU; "" if nothing
    """

    command: Sequence[str] = field(default_factory=lambda: sys.argv)
    machine: Mapping[str, Any] = field(default_factory=this_machine)
    remark: str = ""

    def save(self, path: Path, frame: pd.DataFrame, schema: str, *, append: bool = False) -> None:
        """Write and stamp a table. Raises UserError like `store.save_table`."""
        how: dict[str, Any] = {**vars(self), "schema": schema, "append": append}
        store.save_table(frame, path.parent, path.name, **how)


@dataclass(frozen=True)
class Row:
    """What is known of a point: a row of the table of outcomes."""

    what: str
    point: str
    outcome: str = PENDING
    reason: str = ""
    estimate_s: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> str:
        """The point's name among all of a session."""
        return f"{self.what}/{self.point}"


@dataclass(frozen=True)
class Point:
    """A measurement of its own: the tables that are recorded together, and how it is done.

    what : the tables belong to, as "layers"; name : of the tables, as "resnet50-b4-fp32"
    measure : returns schema -> rows, or the rows of the only table, or raises: Partial with what there
        is, Unavailable, or any other exception
    estimate_s : about how long it takes where it is meant to run
    tables : schemas of the tables; () for one, ``what``
    folder : in which they lie, inside the session's directory
    moment : which of several points it is that add to the same tables; note : what to say of it
    is_done : whether nothing is left to measure; without it, a point is done when its tables are there
    """

    what: str
    name: str
    measure: Callable[[], Tables | pd.DataFrame]
    estimate_s: float = 10.0
    tables: Sequence[str] = ()
    folder: str = ""
    moment: str = ""
    note: str = ""
    is_done: Callable[[], bool] | None = None

    @property
    def key(self) -> str:
        """Its name among all points of a session."""
        return self.row().key

    def row(self) -> Row:
        """Return its row in the table of outcomes, before it is measured."""
        words = filter(None, (self.folder, self.name, self.moment))
        return Row(self.what, " ".join(words), estimate_s=self.estimate_s)

    @property
    def schemas(self) -> Sequence[str]:
        """Those of its tables."""
        return self.tables or (self.what,)

    def paths(self, out: Path) -> list[Path]:
        """Return where its tables lie."""
        return [table_path(out / self.folder, schema, self.name) for schema in self.schemas]

    def done(self, out: Path) -> bool:
        """Return whether it need not be measured: all tables are there, whole, and of this version.

        Raises UserError for a table that is damaged: it is not measured over in silence.
        """
        if self.is_done:
            return self.is_done()
        paths = self.paths(out)
        if not all(store.has_table(path) for path in paths):
            return False
        stamps = [store.load_stamp(path) for path in paths]
        return all(stamp["benchmark_version"] == store.BENCHMARK_VERSION for stamp in stamps)

    def save(self, out: Path, measured: Tables, origin: Origin) -> None:
        """Write and stamp what ``measure`` gave; what others gave to the same tables stays."""
        for schema, frame in measured.items():
            path = table_path(out / self.folder, schema, self.name)
            origin.save(path, frame, schema, append=self.is_done is not None)


@dataclass(frozen=True)
class PointList:
    """The points of a session.

    opening, closing : of this session alone, measured if any of ``body`` is; body : the recording
    """

    body: Sequence[Point]
    opening: Sequence[Point] = ()
    closing: Sequence[Point] = ()


@dataclass(frozen=True)
class Source:
    """How any process makes the points of a session.

    function : "module:function", called with ``out``, ``session`` and ``arguments``, which JSON can carry
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def points(self, out: Path, session: int) -> PointList:
        """Return the points of the session of that number, which measures into ``out``."""
        module, _, function = self.function.partition(":")
        make = getattr(importlib.import_module(module), function)
        points: PointList = make(out=out, session=session, **self.arguments)
        return points


# -- the loop ----------------------------------------------------------------------------------

Emit = Callable[[dict[str, Any]], None]


def measure_points(
    points: PointList,
    out: Path,
    emit: Emit,
    *,
    deadline_s: float = math.inf,
    skip: Sequence[str] = (),
    last: Sequence[str] = (),
    origin: Origin | None = None,
) -> bool:
    """Measure what is not there yet; returns whether this process can still use the GPU.

    emit : called with the ``rows`` of all points, then with the ``row`` of each that starts or ends
    deadline_s : by `time.monotonic`, which all processes share and nobody sets; a point that will probably
        not end before it is left out, and so are all but the shorter ones after it. The closing ones have
        RESERVE times their time before it and, if a point before them took too long, OVERTIME_S after it
    skip, last : keys of points that are not tried (again), and that are tried after all others
    origin : for the stamps; by default this process's command and machine
    """
    origin = origin or Origin()
    body = sorted(points.body, key=lambda point: point.key in last)
    rows = [point.row() if point.key in skip else _looked(point, out) for point in body]
    # What can only be refused, such as a second GPU's points where there is one, makes no session.
    session = bool(skip) or any(row.outcome == PENDING and row.estimate_s > 0 for row in rows)
    opening, closing = (points.opening, points.closing) if session else ((), ())
    rows = [*(point.row() for point in opening), *rows, *(point.row() for point in closing)]
    emit({"rows": [asdict(row) for row in rows]})
    reserved_s = RESERVE * sum(point.estimate_s for point in closing)
    # After a first point, closing ones are worth the overtime: what lies before them is told by their times.
    begun = bool(skip)
    for point, row in zip((*opening, *body, *closing), rows, strict=True):
        if row.outcome == FAILED or row.key in skip:
            continue
        if point.done(out):  # which may depend on what has just been measured
            if row.outcome != MEASURED:
                emit({"row": asdict(replace(row, outcome=MEASURED))})
            continue
        spare_s = OVERTIME_S * begun if point in closing else -reserved_s
        begun |= _take(point, out, emit, deadline_s + spare_s, origin)
        if not _gpu_is_usable():
            return False
    return True


def _take(point: Point, out: Path, emit: Emit, until_s: float, origin: Origin) -> bool:
    """Measure one point, if it will probably end in time; returns whether it was begun."""
    row, left_s = point.row(), until_s - time.monotonic()
    if point.estimate_s > left_s:
        reason = f"would take about {point.estimate_s:.0f} s, {max(0.0, left_s):.0f} s were left"
        emit({"row": asdict(replace(row, outcome=NO_TIME, reason=reason))})
        return False
    emit({"row": asdict(replace(row, outcome=STARTED))})
    start_s = time.monotonic()
    outcome, reason, tables = _measured(point)
    gc.collect()
    if (cuda := _cuda()) and _gpu_is_usable():
        cuda.empty_cache()
    try:
        point.save(out, tables, origin)
    except UserError as error:
        outcome, reason = FAILED, one_line(error)
    seconds = time.monotonic() - start_s
    emit({"row": asdict(replace(row, outcome=outcome, reason=reason, seconds=seconds))})
    return True


def _looked(point: Point, out: Path) -> Row:
    """Return the row of a point that may be there, or whose table may be damaged."""
    row = point.row()
    try:
        return replace(row, outcome=MEASURED) if point.done(out) else row
    except UserError as error:
        return replace(row, outcome=FAILED, reason=one_line(error))


def _measured(point: Point) -> tuple[str, str, Tables]:
    """Return outcome, reason, and what there is of the point's tables."""
    try:
        given = point.measure()
        tables = {point.schemas[0]: given} if isinstance(given, pd.DataFrame) else given
        missing = [] if point.is_done else sorted(set(point.schemas) - set(tables))
        if missing:  # the next call would take it for one that was never measured
            return FAILED, f"it left no table {', '.join(map(repr, missing))}", tables
        return MEASURED, "", tables
    except Partial as error:
        return PARTIAL, one_line(error), error.tables
    except Unavailable as error:
        return UNAVAILABLE, one_line(error), {}
    except Exception as error:
        if ran_out_of_memory(error):
            return OUT_OF_MEMORY, one_line(error), {}
        if isinstance(error, UserError):
            return FAILED, one_line(error), {}
        traceback.print_exc()
        return FAILED, f"{type(error).__name__}: {one_line(error)}", {}


def _cuda() -> Any:
    """Return torch.cuda once this process uses a GPU, else None: no point may have needed torch at all."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def _gpu_is_usable() -> bool:
    """Return False after a fault such as an illegal address: CUDA then refuses all further work.

    And after the capture of a graph that failed: torch then leaves its stream the current one, and random
    numbers and memory as they are within a capture.
    """
    if not (cuda := _cuda()):
        return True
    try:
        cuda.synchronize()
        return bool(cuda.current_stream() == cuda.default_stream())
    except RuntimeError:
        return False
