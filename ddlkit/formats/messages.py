"""Message times, whether recorded or in a foreign file: readers.py lists the formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError, shown
from ddlkit.formats import benchmark_logs, readers
from ddlkit.formats.contract import KEYS, MessageOptions, MessageTimes
from ddlkit.store import files
from ddlkit.store.readers import choose
from ddlkit.store.sheet import check_cells
from ddlkit.store.tables import is_stamped, load_table

if TYPE_CHECKING:
    from pandas import DataFrame


def read_bytes_seconds(
    path: Path,
    *,
    collective: str | None = None,
    link: str | None = None,
    ranks: int | None = None,
    place: str | None = None,
    table: int | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[str, Any]]:
    """Return message sizes (n,) in bytes, times (n,) in seconds, and what is known of them.

    collective, link, ranks : which rows; taken as said where the file is silent
    place, table : which times of a log, as of `MessageOptions`
    """
    options = MessageOptions(
        collective=collective, ranks=ranks, place=place, table=table
    )
    wanted = {"collective": collective, "link": link, "ranks": ranks}
    source, frame, note = _messages(path, options)
    frame, chosen = choose(frame, KEYS, wanted, path)
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
    collective: str | None = None,
    link: str | None = None,
    ranks: int | None = None,
    place: str | None = None,
    table: int | None = None,
    notes: list[str] | None = None,
) -> DataFrame:
    """Return samples as a ``collectives`` table, whoever measured them; what a file does not say as given.

    notes : a list to which is added what should be known of the rows
    collective, link, ranks, place, table : as of `read_bytes_seconds`
    """
    options = MessageOptions(
        collective=collective, ranks=ranks, place=place, table=table
    )
    source, frame, note = _messages(path, options)
    if source == "recorded":
        return frame
    if notes is not None and note:
        notes.append(f"{path}: {note}")
    if "ranks" not in frame and options.ranks is None:
        raise UserError(f"{path}: does not say how many ranks there were: give --ranks")
    said: dict[str, Any] = {
        "ranks": options.ranks,
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


def _messages(path: Path, options: MessageOptions) -> MessageTimes:
    """Return the message times in a file: a recorded table, or of the first format that it matches."""
    if is_stamped(path):
        frame = load_table(path, "collectives")
        options.refuse_those_of_a_log(str(path))
        return MessageTimes("recorded", frame)
    text, file = files.read_text(path), str(path)
    check_cells(text, "\n", file)
    reader = readers.first_match(readers.MESSAGE_TIMES, text)
    if reader is None:
        other = benchmark_logs.other_test(text)
        problem = f"{other}, but no collective's average" if other else "no message"
        last_line = shown(text.rstrip().rpartition("\n")[2])
        formats = readers.tried(readers.MESSAGE_TIMES, text)
        raise UserError(
            f"{file}: {problem} times: {formats}; its last line is {last_line}"
        )
    return reader.read(text, file, options)
