"""A session of measuring: its points, and how what they give is saved. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError

Tables = Mapping[str, pd.DataFrame]


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


@dataclass(frozen=True)
class Point:
    """A measurement of its own: what it belongs to, its name, and how it is done.

    measure : called with the directory that holds the points before it; returns schema -> rows, or
        raises: Partial with what there is, Unavailable, or any other exception
    tables : schemas that it gives, so that one can tell whether it is there
    estimate_s : about how long it takes where it is meant to run
    packed : those of its tables that are written as .csv.gz
    """

    what: str
    name: str
    tables: Sequence[str]
    measure: Callable[[Path], Tables]
    estimate_s: float = 10.0
    packed: Sequence[str] = ("timeline",)

    def path(self, out: Path, table: str) -> Path:
        """Where a table of this point lies."""
        return out / f"{table}-{self.name}.csv{'.gz' if table in self.packed else ''}"

    def done(self, out: Path) -> bool:
        """Whether all its tables are there, whole, and of this benchmark version.

        Raises UserError for a table that is damaged: it is not measured over in silence.
        """
        paths = [self.path(out, table) for table in self.tables]
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
        """Write and stamp what ``measure`` gave. Raises UserError like `store.save_table`."""
        for table, frame in measured.items():
            path, command = self.path(out, table), sys.argv
            store.save_table(
                frame, out, path.name, schema=table, command=command, machine=machine, append=append
            )


@dataclass(frozen=True)
class Plan:
    """The points of a session.

    opening, closing : of this session alone, measured if any of ``body`` is; body : the recording
    """

    opening: Sequence[Point]
    body: Sequence[Point]
    closing: Sequence[Point]
