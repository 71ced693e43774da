"""Jobs, each declared once: what runs in every rank, the settings it reads, and the tables it leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args, get_type_hints

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError

if TYPE_CHECKING:  # those who only start ranks load no torch
    from _typeshed import DataclassInstance

    from ddlkit.run.jobs.rank import Rank

S = TypeVar("S", bound="DataclassInstance")
Tables = Mapping[str, pd.DataFrame]
Part = Callable[["Rank", S], Iterable[Tables]]

FRAME = ("out", "join", "link", "link_bits_per_s")  # what CONFIG.json says to any job


@dataclass(frozen=True)
class Job(Generic[S]):
    """A program for every rank; made by `job`.

    settings : dataclass of what its CONFIG.json may hold besides FRAME
    tables : names of the tables that it leaves, which are also their schemas; settings may do without some
    part : what each rank does. It yields new rows by table; rank 0 saves after each yield what there is.
    """

    settings: type[S]
    tables: tuple[str, ...]
    part: Part[S]

    @property
    def module(self) -> str:
        """Return where it is declared: by this name the ranks find it."""
        return self.part.__module__

    def run(self, me: Rank, settings: S) -> None:
        """Do this rank's part of the job; rank 0 saves its tables into ``me.out``."""
        frames: dict[str, list[pd.DataFrame]] = {name: [] for name in self.tables}
        for rows in self.part(me, settings):
            for name, frame in rows.items():
                frames[name].append(frame)
                if me.rank == 0:
                    table = pd.concat(frames[name], ignore_index=True)
                    store.save_table(table, me.out, name, schema=name, command=sys.argv)

    def read(self, config: Mapping[str, Any]) -> S:
        """Read the job's own settings. Raises UserError for one that is unknown or missing."""
        own = {name: value for name, value in config.items() if name not in FRAME}
        try:
            return cast(S, _made(self.settings, own))
        except TypeError as error:
            reason = str(error).rpartition("__init__() ")[2]
            raise UserError(f"job settings: {reason}") from error


def job(settings: type[S], *tables: str) -> Callable[[Part[S]], Job[S]]:
    """Declare a function as what every rank does in a job; it becomes a `Job`, one in each module.

    ::

        @job(GreetingSettings, "greetings")
        def greetings_job(me: Rank, settings: GreetingSettings) -> Iterator[Tables]:
            yield {"greetings": pd.DataFrame({"rank": [me.rank]})}
    """
    return lambda part: Job(settings, tables, part)


def _made(kind: Any, value: Any) -> Any:
    """What JSON holds as what a field's type says: dataclasses of objects, tuples of lists."""
    if isinstance(value, list):
        inner = next(iter(get_args(kind)), None)
        return tuple(_made(inner, one) for one in value)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints.get(name), inside) for name, inside in value.items()})
    return value
