"""What a session measures: points, the tables that each gives, and what can become of it. No torch here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError

Tables = Mapping[str, pd.DataFrame]
"""Schema -> rows."""

# What can become of a point, in the words of the table of outcomes.
MEASURED, PARTIAL = "measured", "measured in part"
STARTED, PENDING = "started", "not reached"
OUT_OF_MEMORY, UNAVAILABLE, IN_USE = "out of memory", "unavailable", "in use by others"
FAILED, KILLED, NO_TIME = "failed", "killed", "no time left"
THERE = (MEASURED, PARTIAL)


class Partial(UserError):
    """Part of a point could be measured: ``tables`` hold it, the message says why not the rest."""

    def __init__(self, tables: Tables, reason: str) -> None:
        super().__init__(reason)
        self.tables = tables


def all_or_partial(table: str, frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """The frames as they are measured, below each other.

    Raises a mistake that the first frame makes as it is, and a later one as Partial with those before.
    """
    done: list[pd.DataFrame] = []
    try:
        for frame in frames:
            done.append(frame)
    except UserError as error:
        if not done:
            raise
        raise Partial({table: pd.concat(done, ignore_index=True)}, str(error)) from None
    return pd.concat(done, ignore_index=True)


class Unavailable(UserError):
    """This machine lacks what a point needs, such as a second GPU."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this is how Python, torch on the CPU or CUDA say that memory is used up."""
    signs = ("out of memory", "can't allocate memory", "size calculation overflowed")
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def say(line: str) -> None:
    """One line of progress, on standard error."""
    print(f"ddlkit: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class TableSet:
    """Tables that are recorded together, under one name.

    what : what they belong to, as "layers"; name : "resnet50-b4-fp32"
    schemas : of each of them; packed : those that are written as .csv.gz
    folder : in which they lie, inside the session's directory
    """

    what: str
    name: str
    schemas: Sequence[str]
    packed: Sequence[str] = ("contention", "selection", "timeline")
    folder: str = ""

    def path(self, out: Path, schema: str) -> Path:
        """Where one of the tables lies."""
        end = ".csv.gz" if schema in self.packed else ".csv"
        return out / self.folder / f"{schema}-{self.name}{end}"

    def done(self, out: Path) -> bool:
        """Whether all tables are there, whole, and of this benchmark version.

        Raises UserError for a table that is damaged: it is not measured over in silence.
        """
        paths = [self.path(out, schema) for schema in self.schemas]
        if not all(path.exists() for path in paths):
            return False
        stamps = [store.load_stamp(path) for path in paths]
        return all(stamp["benchmark_version"] == store.BENCHMARK_VERSION for stamp in stamps)

    def save(
        self,
        out: Path,
        measured: Tables,
        machine: dict[str, Any] | None = None,
        *,
        append: bool = False,
    ) -> None:
        """Write and stamp what was measured. Raises UserError like `store.save_table`."""
        for schema, frame in measured.items():
            path = self.path(out, schema)
            store.save_table(
                frame,
                path.parent,
                path.name,
                schema=schema,
                command=sys.argv,
                machine=machine,
                append=append,
            )


@dataclass(frozen=True)
class Point:
    """A measurement of its own: the tables that it gives, and how it is done.

    measure : called with the directory that holds the points before it; returns schema -> rows, or
        raises: Partial with what there is, Unavailable, or any other exception
    estimate_s : about how long it takes where it is meant to run
    moment : which of several points it is that add to the same tables; note : what to say of it
    is_done : whether nothing is left to measure; without it, a point is done when its tables are there
    """

    tables: TableSet
    measure: Callable[[Path], Tables]
    estimate_s: float = 10.0
    moment: str = ""
    note: str = ""
    is_done: Callable[[Path], bool] | None = None

    @property
    def name(self) -> str:
        """Its name among all points of its kind."""
        return " ".join(filter(None, (self.tables.folder, self.tables.name, self.moment)))

    @property
    def key(self) -> str:
        """Its name among all points of a session."""
        return f"{self.tables.what}/{self.name}"

    def done(self, out: Path) -> bool:
        """Whether it need not be measured. Raises UserError for a table that is damaged."""
        return self.is_done(out) if self.is_done else self.tables.done(out)

    def save(self, out: Path, measured: Tables, machine: dict[str, Any] | None = None) -> None:
        """Write and stamp what ``measure`` gave; what others gave to the same tables stays."""
        self.tables.save(out, measured, machine, append=self.is_done is not None)


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
        """The points of the session of that number, which measures into ``out``."""
        module, _, function = self.function.partition(":")
        make = getattr(importlib.import_module(module), function)
        found: PointList = make(out=out, session=session, **self.arguments)
        return found
