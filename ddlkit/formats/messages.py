"""Message times, whether recorded, a user's own CSV, or a log of a program that times collectives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import format_bytes, format_seconds
from ddlkit.formats import logs
from ddlkit.store import files
from ddlkit.store.readers import choose
from ddlkit.store.sheet import SCHEMAS, Column, Schema, read_sheet
from ddlkit.store.tables import is_stamped, load_table

if TYPE_CHECKING:
    from pandas import DataFrame

_KEYS = ("collective", "backend", "algorithm", "link", "link_bits_per_s", "ranks")
_MESSAGES = (Column("bytes", "int", "positive"), Column("seconds", "float", "positive"))


def read_bytes_seconds(
    path: Path, **wanted: Any
) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[str, Any]]:
    """Return message sizes (n,) in bytes, times (n,) in seconds, and what is known of them.

    wanted : which rows, by columns of _KEYS; taken as said where the file is silent; of a log place and table
    """
    of_log = {name: wanted.get(name) for name in ("collective", "ranks")}
    of_log |= {name: wanted.pop(name, None) for name in ("place", "table")}
    source, frame, note = _messages(path, **of_log)
    frame, chosen = choose(frame, _KEYS, wanted, path)
    said = {name: value for name, value in wanted.items() if value is not None}
    meta = {"source": source, **said, **chosen, **({"place": note} if note else {})}
    if meta.get("ranks") == 1:
        raise UserError(
            f"{path}: one rank sends no messages: choose times of two or more"
        )
    return frame["bytes"].to_numpy(), frame["seconds"].to_numpy(), meta


def read_collectives(
    path: Path,
    *,
    link: str | None = None,
    notes: list[str] | None = None,
    **of_log: Any,
) -> DataFrame:
    """Return samples as a ``collectives`` table, whoever measured them; what a file does not say as given.

    notes : a list to which is added what should be known of the rows
    of_log : ranks, collective, place and table, as of `read_bytes_seconds`
    """
    source, frame, note = _messages(path, **of_log)
    if source == "recorded":
        return frame
    if notes is not None and note:
        notes.append(f"{path}: {note}")
    ranks = of_log.get("ranks")
    if "ranks" not in frame and ranks is None:
        raise UserError(f"{path}: does not say how many ranks there were: give --ranks")
    said: dict[str, Any] = {
        "ranks": ranks,
        "link": link or "unknown",
        "collective": "all_reduce",
    }
    said |= {"algorithm": "", "link_bits_per_s": 0.0, "session": 0, "stolen": 0.0}
    said |= {
        "backend": source,
        "messages_per_sample": 1,
        "in_flight": 1,
        "clock": "wall",
    }
    return frame.assign(
        **{name: value for name, value in said.items() if name not in frame}
    )


def _messages(path: Path, **of_log: Any) -> tuple[str, DataFrame, str]:
    """Return where a file comes from, its rows, and of a log whose times in place were taken, why."""
    given = {name: value for name, value in of_log.items() if value is not None}
    if is_stamped(path):
        source, frame = "recorded", load_table(path, "collectives")
    elif tables := logs.read_tables(text := files.read_text(path), str(path)):
        place = given.pop("place", None)
        frame, log = logs.read_log(tables, str(path), **given)
        frame = frame if frame["ranks"].any() else frame.drop(columns="ranks")
        return log.layout.program + log.memory.lower(), *_placed(frame, place, path)
    else:
        source, frame = "csv", _own_table(text, str(path))
    if {"place", "table"} & {*given}:
        raise UserError(f"{path}: no log: leave --place and --table out")
    return source, frame, ""


def _own_table(text: str, file: str) -> DataFrame:
    """Return the rows of a user's own CSV."""
    head, _, rest = text.strip().partition("\n")
    if not {"bytes", "seconds"} & {name.strip() for name in head.split(",")}:
        kinds = (
            "nccl-tests, OSU or Intel MPI Benchmarks, nor a CSV of bytes and seconds"
        )
        other, last = logs.OTHER.search(text), shown((rest or head).rpartition("\n")[2])
        problem = f"{other[1]}, but no collective's average" if other else "no table of"
        raise UserError(f"{file}: {problem} times by {kinds}; its last line is {last}")
    sheet = read_sheet(text, file)
    there = {*_KEYS} & {*sheet.header}
    keys = [column for column in SCHEMAS["collectives"].columns if column.name in there]
    frame = Schema("message times", (*_MESSAGES, *keys)).frame(sheet, exact=False)
    rate = frame["bytes"] / frame["seconds"]
    for row in np.flatnonzero((frame["bytes"] >= 65536) & (rate < 1e4))[:1]:
        problem = f"{rate[row]:.3g} bytes a second, slower than any link: not seconds? convert them"
        sheet.fail(int(row), "seconds", problem)
    return frame


def _placed(frame: DataFrame, place: str | None, path: Path) -> tuple[DataFrame, str]:
    """Return rows of ``place``; or in place, and why, if both differ by more than they scatter; or all."""
    note = ""
    medians = frame.groupby(["bytes", "place"])["seconds"].median().unstack().dropna()
    if place is None and medians.shape[1] == 2 and len(medians):
        apart = np.log(medians["out_of_place"] / medians["in_place"]).abs()
        if apart.mean() > _scatter(medians):
            place, size = "in_place", apart.idxmax()
            inside, outside = map(
                format_seconds, medians.loc[size, [place, "out_of_place"]]
            )
            shift = f"{inside} at {format_bytes(size)}, out_of_place {outside}"
            note = f"{place}: {shift}: beyond their scatter; --place decides"
    if place:
        frame, _ = choose(frame, ("place",), {"place": place}, path)
    return frame.drop(columns="place"), note


def _scatter(medians: DataFrame) -> float:
    """Return the mean relative distance of times (sizes, places) from the chord of their neighbours."""
    at, logs_s = np.log(medians.index.to_numpy(float)), np.log(medians.to_numpy())
    gaps = np.diff(at)[:, None]
    bends = np.diff(np.diff(logs_s, axis=0) / gaps, axis=0)
    away = np.abs(bends * gaps[1:] * gaps[:-1] / (gaps[1:] + gaps[:-1]))
    return float(away.mean()) if away.size else 0.0
