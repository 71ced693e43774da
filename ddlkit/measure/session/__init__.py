"""What a session measures: points, what can become of each, what its stamps say. No torch here."""

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
"""Schema -> rows."""

# What can become of a point, in the table of outcomes.
MEASURED, PARTIAL = "measured", "measured in part"
STARTED, PENDING = "started", "not reached"
OUT_OF_MEMORY, UNAVAILABLE = "out of memory", "unavailable"
FAILED, KILLED, NO_TIME = "failed", "killed", "no time left"
THERE = (MEASURED, PARTIAL)
FAULTS = (
    FAILED,
    KILLED,
    OUT_OF_MEMORY,
    UNAVAILABLE,
    STARTED,
)  # what comes last when tried again
PACKED = ("contention", "selection", "timeline", "sharing_spans")
"""Schemas whose tables are written as .csv.gz."""


class Partial(UserError):
    """Part of a point could be measured: ``tables`` hold it, the message says why not the rest."""

    def __init__(self, tables: Tables, reason: str) -> None:
        super().__init__(reason)
        self.tables = tables


class Unavailable(UserError):
    """This machine lacks what a point needs, such as a second GPU."""


def all_or_partial(table: str, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return the frames below each other. Raises Partial with those before one that cannot be measured."""
    done: list[pd.DataFrame] = []
    try:
        for frame in frames:
            done.append(frame)
    except Exception as error:
        if not done:
            raise
        done += error.tables.values() if isinstance(error, Partial) else ()
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise Partial(
            {table: pd.concat(done, ignore_index=True)}, f"{kind}{error}"
        ) from error
    return pd.concat(done, ignore_index=True)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether this is how Python, torch on the CPU or CUDA say that memory is used up."""
    signs = ("out of memory", "can't allocate memory", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def say(line: str) -> None:
    """Print a line of progress on standard error; that nobody reads it there ends no measurement."""
    with suppress(OSError):
        print(f"ddlkit: {line}", file=sys.stderr, flush=True)


def table_path(directory: Path, schema: str, name: str) -> Path:
    """Return where a table of that schema and name lies."""
    return directory / f"{schema}-{name}.csv{'.gz' if schema in PACKED else ''}"


@functools.cache
def this_machine() -> dict[str, Any]:
    """Return the machine, described once: it takes a while, and later a lab would be among its links."""
    return machine.describe()


@dataclass(frozen=True)
class Origin:
    """What all stamps of a session say; ``remark``: what must be known of its times, as others' load."""

    command: Sequence[str] = field(default_factory=lambda: sys.argv)
    machine: Mapping[str, Any] = field(default_factory=this_machine)
    remark: str = ""

    def save(
        self, path: Path, frame: pd.DataFrame, schema: str, *, append: bool = False
    ) -> None:
        """Write and stamp a table. Raises UserError like `store.save_table`."""
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
    """A row of the table of outcomes: what became of a point, or that it is to be measured yet."""

    what: str
    point: str
    outcome: str = PENDING
    reason: str = ""
    estimate_s: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> str:
        """Return the point's name among all of a session."""
        return f"{self.what}/{self.point}"


@dataclass(frozen=True)
class Point:
    """A measurement of its own: the tables that are recorded together, and how it is done.

    what : the tables belong to, as "layers"; name : of the tables, as "resnet50-b4-fp32"
    measure : returns schema -> rows, or the rows of the only table, or raises, such as Partial
    tables : schemas of the tables, () for one, ``what``; folder : in which they lie, in the session's own
    moment : which of several points it is that add to the same tables; note : what to say of it
    left : returns what is left to measure; without it, a point is done when its tables are there
    predicted : what a model is to say of it before, where that is asked for
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
        """Return its name among all points of a session."""
        return self.row().key

    def row(self) -> Row:
        """Return its row in the table of outcomes, before it is measured."""
        words = filter(None, (self.folder, self.name, self.moment))
        return Row(self.what, " ".join(words), estimate_s=self.estimate_s)

    @property
    def schemas(self) -> Sequence[str]:
        """Return those of its tables."""
        return self.tables or (self.what,)

    def path(self, out: Path, schema: str) -> Path:
        """Return where its table of that schema lies."""
        return table_path(out / self.folder, schema, self.name)

    def done(self, out: Path) -> bool:
        """Return whether it is measured, by this version of ddlkit. Raises UserError for a damaged table."""
        if self.left:
            return not self.left()
        paths = [self.path(out, schema) for schema in self.schemas]
        if not all(map(store.has_table, paths)):
            return False
        versions = {store.load_stamp(path)["benchmark_version"] for path in paths}
        return versions == {store.BENCHMARK_VERSION}

    def looked(self, out: Path) -> Row:
        """Return its row: whether it is there, is still to be measured, or has a damaged table."""
        row = self.row()
        try:
            return replace(row, outcome=MEASURED) if self.done(out) else row
        except UserError as error:
            return replace(row, outcome=FAILED, reason=one_line(str(error)))

    def take(self, out: Path, origin: Origin) -> Row:
        """Measure it unless it is there by now, save its tables, and return what became of it."""
        row = self.looked(out)
        if row.outcome != PENDING:
            return row
        start_s = time.monotonic()
        outcome, reason, tables = self._measured()
        gc.collect()
        append = self.left is not None  # what others gave to the same table stays
        try:
            for schema, frame in tables.items():
                origin.save(self.path(out, schema), frame, schema, append=append)
        except UserError as error:
            outcome, reason = FAILED, one_line(str(error))
        return replace(
            row, outcome=outcome, reason=reason, seconds=time.monotonic() - start_s
        )

    def _measured(self) -> tuple[str, str, Tables]:
        """Return outcome, reason, and what there is of its tables."""
        try:
            given = self.measure()
        except Exception as error:
            reason = one_line(str(error))
            if isinstance(error, Partial):
                return PARTIAL, reason, error.tables
            if isinstance(error, Unavailable):
                return UNAVAILABLE, reason, {}
            if ran_out_of_memory(error):
                return OUT_OF_MEMORY, reason, {}
            if not isinstance(error, UserError):
                traceback.print_exc()
                reason = f"{type(error).__name__}: {reason}"
            return FAILED, reason, {}
        tables = {self.schemas[0]: given} if isinstance(given, pd.DataFrame) else given
        missing = [] if self.left else sorted(set(self.schemas) - set(tables))
        if missing:  # the next call would take it for one that was never measured
            return FAILED, f"it left no table {', '.join(map(repr, missing))}", tables
        return MEASURED, "", tables


class PointList(NamedTuple):
    """The points of a session: ``opening`` and ``closing`` are measured if any of ``body`` is."""

    body: Sequence[Point]
    opening: Sequence[Point] = ()
    closing: Sequence[Point] = ()


MakePoints = Callable[..., PointList]
"""Gets ``out``, the session's directory, and ``session``, its number; any process can make its points."""
