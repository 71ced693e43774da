"""Logs of programs that time collectives, however they were kept: tables are found, one of them is taken.

These are nccl-tests (rccl-tests prints the same), the OSU micro-benchmarks and the Intel MPI Benchmarks. One
file may hold tables of several of them, which is why they are one format here. Sizes become those of
ddlkit.core.collective: all that a rank gets of all_gather. Times are averages over the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlkit.core.collective import COLLECTIVES, ONLY_IN_LOGS
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import MOST_ROWS
from ddlkit.core.units import format_bytes, format_seconds
from ddlkit.formats.contract import MessageOptions, MessageTimes
from ddlkit.formats.labels import unlabelled
from ddlkit.store.readers import choose
from ddlkit.store.sheet import Column, Schema, Sheet, check_cells

if TYPE_CHECKING:
    from pandas import DataFrame

_WORD, _ROW = (
    re.compile(r"[^\s,|]+"),
    re.compile(r"\d+[\s,|]+[+-]?(?:[\d.]|nan|inf)", re.I),
)
_END = re.compile(
    r"(Avg bus band)|test starting|\bOSU \w|# Benchm|#\s*(size|bytes|rep)", re.I
)
_RANK = re.compile(r"(?:#\s+)?Rank\s+(\d{1,9})\b.*\bPid\b|# #processes = (\d{1,9})\b")
_OTHER = re.compile(
    r"(?:# Benchmarking|\bOSU MPI\S*) (\S[^\n]{0,60}?)(?: Test v|\s*$)", re.M
)
_TITLE = re.compile(r"test starting: |\bOSU \w+(-\S+)?\s|# Benchmarking ")
_KNOWN = {**COLLECTIVES, **ONLY_IN_LOGS}
# Programs of nccl-tests of which the columns say nothing more.
_PROGRAMS = "|".join([*_KNOWN, "alltoallv", "hypercube"])
_NAME = re.compile(
    rf"(?<!concluded: )(?<![a-z_])({_PROGRAMS})_perf"
    r"|\bOSU \S{1,40}\s(.{0,60})Latency Test|# Benchmarking (\S+)"
)
_SPELT = {name: kind for kind, known in _KNOWN.items() for name in known.names}
_SPELT[""] = "point_to_point"  # by small letters alone
_PLACES = (
    "out_of_place",
    "in_place",
)  # as nccl-tests prints them; gradients are summed in place


class Layout(NamedTuple):
    """How a program heads its tables, in small letters: first the size, a time, and what must be there."""

    program: str
    time: str
    others: frozenset[str]
    us: float = 1.0  # in a unit of its times


LAYOUTS = (
    Layout("nccl-tests", "time", frozenset({"size", "count", "algbw", "busbw"})),
    Layout(
        "nccl-tests", "time", frozenset({"bytes", "n", "algbw", "busbw"}), 1e3
    ),  # until 2019
    Layout("osu", "avg_us", frozenset({"size", "avg_us"})),
    Layout("imb", "t_avg_us", frozenset({"bytes", "repetitions", "t_avg_us"})),
)
_PRINTED = Schema(
    "a log",
    (
        *(
            Column("size", "int", "positive"),
            Column("time", "microseconds", "positive"),
        ),
        *(
            Column(name, "float", "non_negative")
            for name in ("algbw", "busbw", "#wrong")
        ),
        Column("place", "str"),
    ),
)


@dataclass
class Table:
    """Rows under one head, and what was said before it: collectives, ranks (0: not said).

    memory : "-CUDA", of OSU; rated : with rates beside times; whole : ended, or without #, out of a log
    """

    named: set[str] = field(default_factory=set)
    ranks: int = 0
    memory: str = ""
    layout: Layout = LAYOUTS[0]
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    rated: bool = False
    whole: bool = False

    def hear(self, line: str) -> None:
        """Take what a line says of the table that follows."""
        if title := _TITLE.search(
            line
        ):  # and no command, of which there may be several
            self.named, self.ranks, self.memory = set(), 0, title[1] or ""
        for words in _NAME.findall(line):
            name = re.sub("[^a-z]|personalized exchange", "", "".join(words).lower())
            self.named.add(_SPELT.get(name, name))
        if rank := _RANK.match(line):
            self.ranks = int(rank[2] or max(self.ranks, int(rank[1]) + 1))

    def cells(self, words: list[str], where: str) -> list[dict[str, str]]:
        """Return a row's cells by column: before the times, and of each place; a redop may be blank."""
        at = self.columns.index(self.layout.time)
        timed, left = self.columns[at:], self.columns[:at]
        start = len(words) - len(timed) - ("timestamp" in timed)  # two words, one name
        if not at - self.rated <= start <= at:
            raise UserError(f"{where}, column time: truncated after {len(words)} words")
        left = left if start == at else [name for name in left if name != "redop"]
        half = timed.index("time", 1) if "time" in timed[1:] else len(timed)
        places = [
            (timed[at : at + half], words[start + at :])
            for at in range(0, len(timed), half)
        ]
        return [dict(zip(*part, strict=False)) for part in [(left, words), *places]]


def matches(text: str) -> bool:
    """Return whether some line is the head of a table of one of LAYOUTS."""
    return any(_head(line) for line in unlabelled(text))


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the times of the one table that fits the options; in place alone where these differ."""
    rows, table = read_log(
        read_tables(text, file),
        file,
        options.collective or "",
        options.ranks or 0,
        options.table,
    )
    if not rows["ranks"].any():
        rows = rows.drop(columns="ranks")
    source = table.layout.program + table.memory.lower()
    return MessageTimes(source, *_placed(rows, options.place, file))


def other_test(text: str) -> str:
    """Return what OSU's or Intel's benchmarks say that a log is of; "" if they say nothing.

    >>> other_test("# OSU MPI-CUDA Bandwidth Test v7.1\\n# Size  Bandwidth (MB/s)\\n")
    'Bandwidth'
    """
    found = _OTHER.search(text)
    return found[1] if found else ""


def read_tables(text: str, file: str) -> list[Table]:
    """Return the tables of a log; of other files nothing."""
    check_cells(text, "\n", file)
    tables, ahead, now = list[Table](), Table(), None
    for number, line in enumerate(unlabelled(text), start=1):
        if _ROW.match(line):
            if now:
                now.rows.append((number, _WORD.findall(line)))
        elif head := _head(line):
            tables.append(now := ahead)
            now.layout, now.columns = head
            now.rated, now.whole = "algbw" in now.columns, not line.startswith("#")
            if now.layout.time not in now.columns:
                raise UserError(
                    f"{file}: line {number}, column cputime: not GPU time: take no -C"
                )
            ahead = Table()
        else:
            if now and (end := _END.search(line)):
                now.whole, now = now.whole or bool(end[1]), None
            ahead.hear(line)
    if tables and not any(table.rows for table in tables):
        last = shown(text.rstrip().rpartition("\n")[2])
        raise UserError(
            f"{file}: a head but no rows: did the run fail? Its last line is {last}"
        )
    return [table for table in tables if table.rows]


def _head(line: str) -> tuple[Layout, list[str]] | None:
    """Return the layout of a line of column names, and these in small letters, without units."""
    plain = re.sub(
        r"\s{0,9}(tail )?lat(ency)?\s{0,9}\(us\)|\[usec\]", "_us", line.lower()
    ).replace("#", " ")
    columns = [word for word in _WORD.findall(plain) if word[0] != "("]
    fits = [layout for layout in LAYOUTS if layout.others <= {*columns}]
    return (fits[0], columns) if fits and columns[0] in ("size", "bytes") else None


def read_log(
    tables: list[Table],
    file: str,
    collective: str = "",
    ranks: int = 0,
    table: int | None = None,
) -> tuple[DataFrame, Table]:
    """Return bytes, seconds, place, collective and ranks (0: unknown) of the one table that fits, and it."""
    log = _chosen(tables, file, collective, ranks, table)
    if log.rated and not log.whole:
        problem = "no '# Avg bus bandwidth' after the rows: the log is cut"
        raise UserError(
            f"{file}: {problem}: get all of it, or make a CSV of bytes and seconds"
        )
    sheet, frame = _printed(log, file)
    ranks = log.ranks or ranks
    kinds = _kinds(log, frame, ranks)
    if log.rated:
        _check_rates(sheet, frame, {rate for rate, _ in kinds.values()} or {1.0})
    listed, names = (
        " or ".join(kinds),
        " or ".join(sorted(log.named)) or "any collective",
    )
    problem = f"of {listed}, not of {collective}"
    if not kinds:
        problem = (
            f"redop, root and busbw are not those of {names} of {ranks or 'any'} ranks"
        )
    elif not collective:
        problem = f"does not name its collective: say --collective {listed}"
    if (kind := collective or listed) not in kinds:
        raise UserError(f"{file}: {problem}")
    if not kinds[kind][1]:
        raise UserError(
            f"{file}: the bytes of {kind} are those of one rank: give --ranks"
        )
    frame = frame.assign(
        bytes=frame["size"] * kinds[kind][1], collective=kind, ranks=ranks
    )
    frame = frame.rename(columns={"time": "seconds"})
    return frame[["bytes", "seconds", "place", "collective", "ranks"]], log


def _chosen(
    tables: list[Table], file: str, kind: str, ranks: int, number: int | None
) -> Table:
    """Return the table of that number, from 1, or the one that may be of these; a UserError lists them."""
    if number in range(1, len(tables) + 1) or number is None and len(tables) == 1:
        return tables[(number or 1) - 1]
    lines, fits = list[str](), list[int]()
    for at, table in enumerate(tables, start=1):
        n, count = (
            table.ranks or ranks,
            f"{table.ranks or 'unknown'} ranks, {len(table.rows)} rows",
        )
        kinds = sorted(table.named) or [*_kinds(table, _printed(table, file)[1], n)]
        lines.append(f"{at} {' or '.join(kinds)}, {count}")
        if (
            number is None
            and kind in ("", *kinds)
            and (not ranks or table.ranks in (0, ranks))
        ):
            fits.append(at)
    if len(fits) != 1:
        listed = "; ".join(lines[at - 1] for at in fits) or "; ".join(lines)
        raise UserError(
            f"{file}: {len(tables)} tables: choose one by --table: {listed}"
        )
    return tables[fits[0] - 1]


def _printed(table: Table, file: str) -> tuple[Sheet, DataFrame]:
    """Return what is printed, a row for each time, but of sizes of 0: too small to be divided among ranks."""
    if len(table.rows) > MOST_ROWS:
        raise UserError(
            f"{file}: {len(table.rows)} rows, more than {MOST_ROWS}: leave some out"
        )
    lines, rows, before = list[int](), list[list[str]](), list[str]()
    for number, words in table.rows:
        where = f"{file}: row at line {number}"
        if words == before and words[0] != "0":
            raise UserError(
                f"{where}: the same as the row before it: is every line there twice?"
            )
        before = words
        for place, cells in zip(_PLACES, table.cells(words, where)[1:], strict=False):
            # Until 2022 the largest deviation was printed, as "error"; N/A: values were not checked.
            cells |= {
                "place": place,
                "#wrong": cells.get("wrong", "0").replace("N/A", "0"),
            }
            cells |= {"size": words[0], "time": cells.get(table.layout.time, "")}
            if words[0] != "0" and cells["time"] != "N/A":
                lines.append(number)
                rows.append([cells.get(name, "0") for name in _PRINTED.names])
    if not rows:
        raise UserError(f"{where}, column size: none is above 0 in this table")
    sheet = Sheet(file, _PRINTED.names, lines, rows)
    digits = [len(row[1].partition(".")[2]) for row in rows[-2:]]
    if not table.rated and digits[-1] < digits[0]:
        sheet.fail(
            len(rows) - 1,
            "time",
            "fewer digits than in the row before: is the log cut?",
        )
    frame = _PRINTED.frame(sheet, exact=False)
    return sheet, frame.assign(time=frame["time"] * table.layout.us)


def _kinds(table: Table, frame: DataFrame, n: int) -> dict[str, tuple[float, int]]:
    """Return the collectives between ``n`` ranks (0: unknown) that a table is named for and may be of.

    Of each, what algbw is of size over time, and its bytes over the size, 0 where that needs the ranks.
    """
    if not table.rated:
        names = sorted(table.named) or _KNOWN
        return {kind: (1.0, n if _prints_a_part(kind) else 1) for kind in names}
    fast = frame[frame["algbw"] >= frame["algbw"].max() / 10]
    algbw = max(float(fast["algbw"].mean()), 1e-9)
    rate, bus = (
        algbw / (fast["size"] / fast["time"]).mean() * 1e9,
        fast["busbw"].mean() / algbw,
    )
    error = (
        0.001 + 0.01 / algbw
    )  # both are printed to 0.01, times of seconds to two digits
    left, *places = table.cells(table.rows[-1][1], "")
    reduces, root = left.get("redop", left.get("op", "none")), left.get("root", "-1")
    law, kinds = (
        [reduces != "none", not root.startswith("-")],
        dict[str, tuple[float, int]](),
    )
    unchecked = [cells.get("wrong") == "N/A" for cells in places]
    for kind, known in _KNOWN.items():
        wanted = [known.prints_redop, known.prints_root]
        passes = known.rounds if known.divided else 0
        count = n or max(2, round(passes / max(passes - bus, 1e-9)))
        share = known.bus_factor(count)
        ways = [(1.0, share, 1)]
        if kind in ("all_gather", "reduce_scatter"):  # until 2020
            ways.append(((count - 1) / count, 1.0, 1))
        if kind == "all_gather":  # sizes of one rank
            ways += [(count, share, count), (count - 1, 1.0, count)]
        for part, over, times in ways if law == wanted else ():
            if (
                abs(rate - part) <= (error + 0.05) * part
                and abs(bus - over) <= error * over
            ):
                kinds[kind] = part, times
    # Since 2022 what these two leave in place, and no other, is not checked.
    if unchecked == [False, True]:
        kinds = {
            kind: kinds[kind] for kind in ("alltoall", "sendrecv") if kind in kinds
        }
    elif unchecked == [False, False]:
        kinds.pop("sendrecv", None)
    named = [
        kind for kind in sorted(table.named) if kind in kinds or kind not in _KNOWN
    ]
    return {
        kind: kinds.get(kind, (1.0, 1)) for kind in (named if table.named else kinds)
    }


def _prints_a_part(kind: str) -> bool:
    """Return whether MPI's benchmarks print the bytes from one rank, or from one to one.

    Those of variants with a size for each rank, as allgatherv, do as the plain ones.
    """
    plain = _SPELT.get(kind.replace("_", "").removesuffix("v"), "")
    return plain in _KNOWN and _KNOWN[plain].mpi_prints_a_part


def _check_rates(sheet: Sheet, frame: DataFrame, parts: Collection[float]) -> None:
    """Refuse wrong values, and an algbw that none of these parts of size over time rounds to."""
    for at in np.flatnonzero(frame["#wrong"])[:1]:
        problem = (
            f"{frame['#wrong'][at]:g} wrong values: fix the collective before timing it"
        )
        sheet.fail(int(at), "#wrong", problem)
    rate, algbw = frame["size"] / frame["time"] / 1e9, frame["algbw"]
    off = np.min([abs(part * rate - algbw) for part in parts], axis=0)
    last = np.array(
        [[_half(row[1]) / float(row[1]), _half(row[2])] for row in sheet.rows]
    )
    allowed = 1.02 * last[:, 1] + (last[:, 0] + 0.001) * algbw + 1e-4
    for at in np.flatnonzero(off > allowed)[:1]:
        problem = (
            "contradicts size over time: mixed units? the time must be in microseconds"
        )
        sheet.fail(int(at), f"{frame['place'][at]}_algbw", problem)


def _half(cell: str) -> float:
    """Return half of a printed number's last digit: 0.005 of "9.15", 5e5 of "1.6e+07"."""
    number = re.fullmatch(r"\d+\.?(\d*)(?:e([+-]?\d{1,2}))?", cell.lower())
    return 0.5 * 10.0 ** (int(number[2] or 0) - len(number[1])) if number else 0.005


def _placed(frame: DataFrame, place: str | None, file: str) -> tuple[DataFrame, str]:
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
        frame, _ = choose(frame, ("place",), {"place": place}, Path(file))
    return frame.drop(columns="place"), note


def _scatter(medians: DataFrame) -> float:
    """Return the mean relative distance of times (sizes, places) from the chord of their neighbours."""
    at, logs_s = np.log(medians.index.to_numpy(float)), np.log(medians.to_numpy())
    gaps = np.diff(at)[:, None]
    bends = np.diff(np.diff(logs_s, axis=0) / gaps, axis=0)
    away = np.abs(bends * gaps[1:] * gaps[:-1] / (gaps[1:] + gaps[:-1]))
    return float(away.mean()) if away.size else 0.0
