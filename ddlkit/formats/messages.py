"""Message times, whether recorded, a user's own CSV, or an nccl-tests log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.units import BYTES
from ddlkit.formats import nccl_tests
from ddlkit.store import files
from ddlkit.store.readers import choose
from ddlkit.store.sheet import SCHEMAS, Column, Schema, Sheet, read_sheet
from ddlkit.store.tables import is_stamped, load_table

if TYPE_CHECKING:
    from pandas import DataFrame

_KEYS = ("collective", "backend", "algorithm", "link", "link_bits_per_s", "ranks")
_MESSAGES = (Column("bytes", "int", "positive"), Column("seconds", "float", "positive"))
# In a header: what is per second, whose unit is neither one of sizes nor one of times.
_RATE = re.compile(r"(?:bw|bandwidth|throughput)(?![a-z])|/s(?![a-z])|bps|per_?s(?![a-z])")
_UNITS = {
    "bytes": {
        "bits": "divide by 8",
        **{unit.lower(): f"multiply by {size}" for unit, size in BYTES.items() if size > 1},
    },
    "seconds": {
        **dict.fromkeys(("ms", "msec", "millis", "milliseconds"), "divide by 1000"),
        **dict.fromkeys(("us", "µs", "μs", "usec", "micros", "microseconds"), "divide by 1000000"),
        **dict.fromkeys(("ns", "nsec", "nanos", "nanoseconds"), "divide by 1000000000"),
    },
}
"""Units that people put in a header, and what turns them into bytes or seconds."""


def read_bytes_seconds(
    path: Path, *, place: str | None = None, **wanted: Any
) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[str, Any]]:
    """Return message sizes (n,) in bytes, times (n,) in seconds, and what is known of them.

    Reads a recorded ``collectives`` table, a CSV with columns ``bytes`` and ``seconds``, or a log as
    nccl-tests prints it (both times of a size, out of place and in place, as two rows).

    wanted : which rows, by collective, backend, algorithm, link, link_bits_per_s, ranks; taken as said where
        the file is silent. place="out_of_place" or "in_place" chooses between a log's two
    meta : ``source`` (recorded, csv or nccl-tests) and those of them that are known

    Raises UserError for a wrong file, naming row and column, for times in another unit, where rows of several
    collectives, links or numbers of ranks remain, and for those of one rank, which sends nothing.
    """
    recorded = is_stamped(path)
    source, frame = (
        ("recorded", load_table(path, "collectives")) if recorded else _own_messages(path)
    )
    if place is not None:
        there = " or ".join(frame["place"].unique()) if "place" in frame else "none: not a log"
        frame = frame[frame["place"] == place] if "place" in frame else frame[:0]
        if frame.empty:
            raise UserError(f"{path}: no times {place!r}: it has {there}")
    frame, chosen = choose(frame, _KEYS, wanted, path)
    said = {name: value for name, value in wanted.items() if value is not None}
    meta = {"source": source, **said, **chosen}
    if meta.get("ranks") == 1:
        raise UserError(f"{path}: one rank sends no messages: choose times of two or more")
    return frame["bytes"].to_numpy(), frame["seconds"].to_numpy(), meta


def read_collectives(path: Path, *, ranks: int | None = None, link: str | None = None) -> DataFrame:
    """Return samples as a ``collectives`` table, whoever measured them.

    A file without a stamp is a user's own CSV or an nccl-tests log, over a link whose rate is not shaped;
    what it does not say of ``ranks`` and ``link`` is taken as given here.

    Raises UserError as `read_bytes_seconds`, and where the number of ranks is not known.
    """
    if is_stamped(path):
        return load_table(path, "collectives")
    source, frame = _own_messages(path)
    if "ranks" not in frame and ranks is None:
        raise UserError(f"{path}: does not say how many ranks there were: give --ranks")
    said: dict[str, Any] = {"ranks": ranks, "link": link or "unknown", "collective": "all_reduce"}
    said |= {"algorithm": "", "link_bits_per_s": 0.0, "session": 0, "stolen": 0.0}
    said |= {"backend": source, "messages_per_sample": 1, "in_flight": 1, "clock": "wall"}
    frame = frame.drop(columns="place", errors="ignore")
    return frame.assign(**{name: value for name, value in said.items() if name not in frame})


def _own_messages(path: Path) -> tuple[str, DataFrame]:
    """Where a file without a stamp comes from, and its rows."""
    text = files.read_text(path)
    if nccl_tests.is_log(text):
        log = nccl_tests.read_log(text, str(path)).frame
        return "nccl-tests", log.drop(columns=[name for name in log if not log[name].all()])
    sheet = read_sheet(text, str(path))
    _check_units(sheet)
    keys = [column for column in SCHEMAS["collectives"].columns if column.name in _KEYS]
    keys = [column for column in keys if column.name in sheet.header]
    frame = Schema("message times", (*_MESSAGES, *keys)).frame(sheet, exact=False)
    size, seconds = frame["bytes"].to_numpy(), frame["seconds"].to_numpy()
    for row in np.flatnonzero((size >= 65536) & (size < 1e4 * seconds))[:1]:
        rate = f"{size[row]} bytes in {seconds[row]:g} s is {size[row] / seconds[row]:.3g} bytes a second"
        sheet.fail(int(row), "seconds", f"{rate}, slower than any link: not seconds? convert them")
    return "csv", frame


def _check_units(sheet: Sheet) -> None:
    """Raise a UserError that says what to convert where a header names another unit."""
    rates = [name for name in sheet.header if _RATE.search(name.lower())]
    for needed, units in _UNITS.items():
        if needed in sheet.header:
            continue
        for name in sheet.header:
            words = [] if name in rates else re.split(r"[\W_]+", name.lower())
            for unit in (word for word in words if word in units):
                advice = f"{units[unit]} and name the column {needed}"
                sheet.fail(None, name, f"in {unit}, expected {needed}: {advice}")
        for name in rates:
            if name not in _KEYS and needed == "seconds":
                sheet.fail(None, name, "a rate, not a time: add the column seconds")
