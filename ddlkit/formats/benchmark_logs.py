"""Logs of programs that time collectives, as message times.

The logs of nccl-tests (rccl-tests prints the same), of the OSU micro-benchmarks and of
the Intel MPI Benchmarks are read. One file may contain tables of several of these
programs, which is why they are one format here. A table is a line of column names with
rows of numbers below it. Of the other lines, only those count that say something of the
table that follows, such as its collective.

Sizes become those of `ddlkit.core.collective`. The size of an all_gather, for example,
is that of the whole output of a rank. Times are averages over the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlkit.core.collective import COLLECTIVES, ONLY_IN_LOGS, Collective
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import MOST_ROWS
from ddlkit.core.units import format_bytes, format_seconds
from ddlkit.formats.contract import MessageOptions, MessageTimes
from ddlkit.formats.labels import unlabelled
from ddlkit.store.readers import choose
from ddlkit.store.sheet import Column, Schema, Sheet, check_cells

if TYPE_CHECKING:
    from pandas import DataFrame

# A table may have been copied as CSV or from a Markdown page.
_WORD = re.compile(r"[^\s,|]+")
_ROW = re.compile(r"\d+[\s,|]+[+-]?(?:[\d.]|nan|inf)", re.I)

# What ends a table. Only nccl-tests has a last line of its own.
_END = re.compile(
    r"(Avg bus band)|test starting|\bOSU \w|# Benchm|#\s*(size|bytes|rep)", re.I
)
# Where another benchmark begins. A command may be printed for several of them, so that
# it does not count.
_TITLE = re.compile(r"test starting: |\bOSU \w+(-\S+)?\s|# Benchmarking ")
_RANK = re.compile(r"(?:#\s+)?Rank\s+(\d{1,9})\b.*\bPid\b|# #processes = (\d{1,9})\b")
_OTHER_TEST = re.compile(
    r"(?:# Benchmarking|\bOSU MPI\S*) (\S[^\n]{0,60}?)(?: Test v|\s*$)", re.M
)

_KNOWN = {**COLLECTIVES, **ONLY_IN_LOGS}
# nccl-tests has programs for two more, of which nothing is known but the name.
_PROGRAMS = "|".join([*_KNOWN, "alltoallv", "hypercube"])
_NAME = re.compile(
    rf"(?<!concluded: )(?<![a-z_])({_PROGRAMS})_perf"
    r"|\bOSU \S{1,40}\s(.{0,60})Latency Test|# Benchmarking (\S+)"
)
# Collectives by their names in small letters. The latency test of OSU that names no
# collective is between two ranks.
_BY_SPELLING = {
    spelling: name
    for name, collective in _KNOWN.items()
    for spelling in collective.names
}
_BY_SPELLING[""] = "point_to_point"

# As nccl-tests prints them: first into another buffer, then into the same one. Training
# sums gradients in place.
_PLACES = ("out_of_place", "in_place")


class Layout(NamedTuple):
    """The columns by which the tables of a program are recognized, in small letters.

    Attributes
    ----------
    program : str
        The program that prints such tables.
    time : str
        The name of the column of times.
    needed : frozenset of str
        Columns that must be there. The first column is "size" or "bytes".
    time_unit_us : float
        The unit of the times, in microseconds.
    """

    program: str
    time: str
    needed: frozenset[str]
    time_unit_us: float = 1.0


LAYOUTS = (
    Layout("nccl-tests", "time", frozenset({"size", "count", "algbw", "busbw"})),
    # Until 2019, nccl-tests printed milliseconds.
    Layout("nccl-tests", "time", frozenset({"bytes", "n", "algbw", "busbw"}), 1e3),
    Layout("osu", "avg_us", frozenset({"size", "avg_us"})),
    Layout("imb", "t_avg_us", frozenset({"bytes", "repetitions", "t_avg_us"})),
)
"""All layouts that are known, in the order in which they are tried."""

_PRINTED = Schema(
    "a log",
    (
        Column("size", "int", "positive"),
        Column("time", "microseconds", "positive"),
        Column("algbw", "float", "non_negative"),
        Column("busbw", "float", "non_negative"),
        Column("#wrong", "float", "non_negative"),
        Column("place", "str"),
    ),
)


class Convention(NamedTuple):
    """How a program computes the sizes and rates of a collective that it prints.

    Attributes
    ----------
    algbw_factor : float
        The printed algbw over the printed size per time.
    busbw_factor : float
        The printed busbw over the printed algbw.
    bytes_factor : int
        The size of a message over the printed size. 0 if that is the number of ranks,
        and this number is unknown.
    """

    algbw_factor: float = 1.0
    busbw_factor: float = 1.0
    bytes_factor: int = 1


@dataclass
class Table:
    """A table of a log, with the facts that the lines before it state.

    Attributes
    ----------
    collectives : set of str
        The collectives that are named. There may be none.
    ranks : int
        The number of ranks, 0 if the log does not state it.
    memory : str
        Of OSU, where the buffers are: "-CUDA", for example.
    layout : Layout
        The program and its columns.
    columns : list of str
        The column names, in small letters and without units.
    rows : list of tuple
        The line number of each row, and its cells.
    has_rates : bool
        Whether algbw and busbw are printed, as by nccl-tests.
    is_whole : bool
        Whether the table is known to be complete. A table with rates has a last line.
        If its head is not a comment, it was copied out of the log without that line.
    """

    collectives: set[str] = field(default_factory=set)
    ranks: int = 0
    memory: str = ""
    layout: Layout = LAYOUTS[0]
    columns: list[str] = field(default_factory=list)
    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    has_rates: bool = False
    is_whole: bool = False

    def note(self, line: str) -> None:
        """Take the facts about the table that a line before it states."""
        title = _TITLE.search(line)
        if title:
            self.collectives = set()
            self.ranks = 0
            self.memory = title[1] or ""
        for groups in _NAME.findall(line):
            spelling = "".join(groups).lower()
            spelling = re.sub("[^a-z]|personalized exchange", "", spelling)
            self.collectives.add(_BY_SPELLING.get(spelling, spelling))
        rank = _RANK.match(line)
        if rank and rank[2]:
            self.ranks = int(rank[2])
        elif rank:
            # nccl-tests lists its ranks, counted from 0, instead of their number.
            self.ranks = max(self.ranks, int(rank[1]) + 1)

    def cells(
        self, words: list[str], where: str
    ) -> tuple[dict[str, str], list[dict[str, str]]]:
        """Return the cells of a row by the names of their columns.

        Parameters
        ----------
        words : list of str
            The row.
        where : str
            File and line, as errors name them.

        Returns
        -------
        before_times : dict of str to str
            The cells before the first time.
        places : list of dict of str to str
            The time and the cells after it: once, or for each of `_PLACES`.

        Raises
        ------
        UserError
            If cells are missing.
        """
        n_before = self.columns.index(self.layout.time)
        before = self.columns[:n_before]
        timed = self.columns[n_before:]
        # A time stamp has one name and two words.
        n_timed_words = len(timed) + timed.count("timestamp")
        first_time = len(words) - n_timed_words
        # nccl-tests leaves redop blank where there is none, so that a word may be
        # missing.
        fewest = n_before - 1 if self.has_rates else n_before
        if not fewest <= first_time <= n_before:
            raise UserError(f"{where}, column time: truncated after {len(words)} words")
        if first_time < n_before:
            before = [name for name in before if name != "redop"]
        # The columns of a time are there once or twice.
        width = len(timed)
        if "time" in timed[1:]:
            width = timed.index("time", 1)
        places = []
        for start in range(0, len(timed), width):
            names = timed[start : start + width]
            places.append(dict(zip(names, words[first_time + start :], strict=False)))
        return dict(zip(before, words, strict=False)), places


def matches(text: str) -> bool:
    """Return whether some line of a file is the head of a table that is known."""
    return any(_head(line) for line in unlabelled(text))


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the times of the one table of a log that the options choose.

    Parameters
    ----------
    text : str
        The content of the file.
    file : str
        The file, as errors name it.
    options : MessageOptions
        The table and the times to choose, and facts that the log does not state.

    Returns
    -------
    MessageTimes
        The times. Without a place in the options, only those in place are taken if the
        two differ by more than they scatter.

    Raises
    ------
    UserError
        If no table fits, or several do, or if the table is damaged.
    """
    rows, table = read_log(
        read_tables(text, file),
        file,
        collective=options.collective or "",
        ranks=options.ranks or 0,
        table=options.table,
    )
    # 0 stands for an unknown number of ranks.
    if not rows["ranks"].any():
        rows = rows.drop(columns="ranks")
    rows, note = _of_place(rows, options.place, file)
    return MessageTimes(table.layout.program + table.memory.lower(), rows, note)


def other_test(text: str) -> str:
    r"""Return which test of OSU or Intel a log is of, "" if it names none.

    Examples
    --------
    >>> other_test("# OSU MPI-CUDA Bandwidth Test v7.1\n# Size  Bandwidth (MB/s)\n")
    'Bandwidth'
    """
    title = _OTHER_TEST.search(text)
    return title[1] if title else ""


def read_tables(text: str, file: str) -> list[Table]:
    """Return the tables of a log that have rows.

    Parameters
    ----------
    text : str
        The content of the file.
    file : str
        The file, as errors name it.

    Returns
    -------
    list of Table
        The tables in their order. A file of another format has none.

    Raises
    ------
    UserError
        If there are heads of tables and no rows at all, or if the times are those of
        the processor.
    """
    check_cells(text, "\n", file)
    tables: list[Table] = []
    table: Table | None = None
    following = Table()
    for number, line in enumerate(unlabelled(text), start=1):
        if _ROW.match(line):
            if table is not None:
                table.rows.append((number, _WORD.findall(line)))
            continue
        head = _head(line)
        if head is not None:
            table = following
            following = Table()
            table.layout, table.columns = head
            table.has_rates = "algbw" in table.columns
            table.is_whole = not line.startswith("#")
            if table.layout.time not in table.columns:
                raise UserError(
                    f"{file}: line {number}, column cputime: not GPU time: take no -C"
                )
            tables.append(table)
            continue
        end = _END.search(line)
        if table is not None and end:
            if end[1]:
                table.is_whole = True
            table = None
        following.note(line)
    with_rows = [table for table in tables if table.rows]
    if tables and not with_rows:
        _, _, last_line = text.rstrip().rpartition("\n")
        raise UserError(
            f"{file}: a head but no rows: did the run fail? "
            f"Its last line is {shown(last_line)}"
        )
    return with_rows


def _head(line: str) -> tuple[Layout, list[str]] | None:
    """Return the layout and the column names in a line that is the head of a table."""
    # "Avg Latency(us)", "P50 Tail Lat(us)" and "t_avg[usec]" become one word each.
    lower = re.sub(
        r"\s{0,9}(tail )?lat(ency)?\s{0,9}\(us\)|\[usec\]", "_us", line.lower()
    )
    words = _WORD.findall(lower.replace("#", " "))
    columns = [word for word in words if not word.startswith("(")]
    if not columns or columns[0] not in ("size", "bytes"):
        return None
    for layout in LAYOUTS:
        if layout.needed <= set(columns):
            return layout, columns
    return None


def read_log(
    tables: list[Table],
    file: str,
    collective: str = "",
    ranks: int = 0,
    table: int | None = None,
) -> tuple[DataFrame, Table]:
    """Return the times of the one table that fits, and the table.

    Parameters
    ----------
    tables : list of Table
        The tables of a log.
    file : str
        The file, as errors name it.
    collective : str, optional
        The collective that is looked for, or that the log does not name.
    ranks : int, optional
        The number of ranks that is looked for, or that the log does not state.
    table : int, optional
        Which of the tables to take, counted from 1.

    Returns
    -------
    rows : DataFrame
        The columns bytes (of a message), seconds, place, collective and ranks (0 if it
        is unknown).
    table : Table
        The table that was taken.

    Raises
    ------
    UserError
        If no table fits, or several do, or if the table is damaged or contradicts
        itself.
    """
    taken = _chosen_table(tables, file, collective, ranks, table)
    if taken.has_rates and not taken.is_whole:
        problem = "no '# Avg bus bandwidth' after the rows: the log is cut"
        advice = "get all of it, or make a CSV of bytes and seconds"
        raise UserError(f"{file}: {problem}: {advice}")
    sheet, frame = _printed(taken, file)
    ranks = taken.ranks or ranks
    possible = _possible_collectives(taken, frame, ranks)
    if taken.has_rates:
        factors = {convention.algbw_factor for convention in possible.values()}
        _check_rates(sheet, frame, factors or {1.0})
    kind = _decided_collective(taken, file, possible, collective, ranks)
    bytes_factor = possible[kind].bytes_factor
    if bytes_factor == 0:
        problem = f"the bytes of {kind} are those of one rank: give --ranks"
        raise UserError(f"{file}: {problem}")
    frame = frame.assign(
        bytes=frame["size"] * bytes_factor, collective=kind, ranks=ranks
    )
    frame = frame.rename(columns={"time": "seconds"})
    return frame[["bytes", "seconds", "place", "collective", "ranks"]], taken


def _decided_collective(
    table: Table,
    file: str,
    possible: Collection[str],
    wanted: str,
    ranks: int,
) -> str:
    """Return the collective that is wanted, or else the only one that is possible.

    Raises UserError if the collective that is wanted is not possible, or if none is
    wanted and the number of possible ones is not 1.
    """
    listed = " or ".join(possible)
    # If a single collective is possible, the list of names is its name.
    collective = wanted or listed
    if collective in possible:
        return collective
    if not possible:
        names = " or ".join(sorted(table.collectives)) or "any collective"
        printed = "redop, root and busbw"
        problem = f"{printed} are not those of {names} of {ranks or 'any'} ranks"
    elif not wanted:
        problem = f"does not name its collective: give --collective {listed}"
    else:
        problem = f"of {listed}, not of {wanted}"
    raise UserError(f"{file}: {problem}")


def _chosen_table(
    tables: list[Table], file: str, collective: str, ranks: int, number: int | None
) -> Table:
    """Return the table of that number, or the only one that fits collective and ranks.

    A UserError lists the tables if there is no such table, or more than one.
    """
    if number is None and len(tables) == 1:
        return tables[0]
    if number is not None and 1 <= number <= len(tables):
        return tables[number - 1]
    described = []
    fitting = []
    for position, table in enumerate(tables):
        collectives = sorted(table.collectives)
        if not collectives:
            _, frame = _printed(table, file)
            possible = _possible_collectives(table, frame, table.ranks or ranks)
            collectives = list(possible)
        described.append(
            f"{position + 1} {' or '.join(collectives)}, "
            f"{table.ranks or 'unknown'} ranks, {len(table.rows)} rows"
        )
        is_of_collective = not collective or collective in collectives
        is_of_ranks = not ranks or table.ranks in (0, ranks)
        if number is None and is_of_collective and is_of_ranks:
            fitting.append(position)
    if len(fitting) == 1:
        return tables[fitting[0]]
    listed = "; ".join(described[position] for position in fitting)
    if not fitting:
        listed = "; ".join(described)
    raise UserError(f"{file}: {len(tables)} tables: choose one by --table: {listed}")


def _printed(table: Table, file: str) -> tuple[Sheet, DataFrame]:
    """Return the sizes, times and rates of a table, one row for each time.

    Rows of size 0 are left out: the message was too small to be divided among the
    ranks.
    """
    if len(table.rows) > MOST_ROWS:
        raise UserError(
            f"{file}: {len(table.rows)} rows, more than {MOST_ROWS}: leave some out"
        )
    lines: list[int] = []
    rows: list[list[str]] = []
    words_before: list[str] = []
    for number, words in table.rows:
        where = f"{file}: row at line {number}"
        size = words[0]
        # A log may contain each line twice, for example if two ranks print it.
        if words == words_before and size != "0":
            raise UserError(
                f"{where}: the same as the row before it: is every line there twice?"
            )
        words_before = words
        _, places = table.cells(words, where)
        for place, cells in zip(_PLACES, places, strict=False):
            time = cells.get(table.layout.time, "")
            if size == "0" or time == "N/A":
                continue
            # Until 2022, the largest deviation was printed instead, as "error". N/A
            # means that the values were not checked.
            cells["#wrong"] = cells.get("wrong", "0").replace("N/A", "0")
            cells["size"] = size
            cells["time"] = time
            cells["place"] = place
            lines.append(number)
            rows.append([cells.get(name, "0") for name in _PRINTED.names])
    if not rows:
        raise UserError(f"{where}, column size: none is above 0 in this table")
    sheet = Sheet(file, _PRINTED.names, lines, rows)
    if not table.has_rates:
        _check_last_time(sheet)
    frame = _PRINTED.frame(sheet, exact=False)
    return sheet, frame.assign(time=frame["time"] * table.layout.time_unit_us)


def _check_last_time(sheet: Sheet) -> None:
    """Refuse a table of MPI, which has no last line, if its last time is cut."""
    time = sheet.header.index("time")
    # The number of decimals in the last two rows, or in the only one.
    decimals = [len(row[time].partition(".")[2]) for row in sheet.rows[-2:]]
    if decimals[-1] < decimals[0]:
        problem = "fewer digits than in the row before: is the log cut?"
        sheet.fail(len(sheet.rows) - 1, "time", problem)


# -- Which collective a table is of ----------------------------------------------------


def _possible_collectives(
    table: Table, frame: DataFrame, ranks: int
) -> dict[str, Convention]:
    """Return the collectives that a table may be of, and how each would be printed.

    These are the collectives that the log names, as far as their rates are those of the
    table. If the log names none, they are all collectives with such rates.

    Parameters
    ----------
    table : Table
        The table.
    frame : DataFrame
        Its sizes, times and rates.
    ranks : int
        The number of ranks, 0 if it is unknown.

    Returns
    -------
    dict of str to Convention
        Empty if no collective has such rates.
    """
    if not table.has_rates:
        names = sorted(table.collectives) or list(_KNOWN)
        return {
            name: Convention(bytes_factor=ranks if _prints_a_part(name) else 1)
            for name in names
        }
    possible = _possible_by_rates(table, frame, ranks)
    if not table.collectives:
        return possible
    named = {}
    for name in sorted(table.collectives):
        # The rates of a collective that is not known cannot be judged.
        if name in possible or name not in _KNOWN:
            named[name] = possible.get(name, Convention())
    return named


def _possible_by_rates(
    table: Table, frame: DataFrame, ranks: int
) -> dict[str, Convention]:
    """Return the collectives that would be printed with such columns and rates."""
    # Bandwidths are printed to 0.01, so that only large ones show their ratio.
    fast = frame[frame["algbw"] >= frame["algbw"].max() / 10]
    algbw = max(float(fast["algbw"].mean()), 1e-9)
    algbw_factor = algbw / (fast["size"] / fast["time"]).mean() * 1e9
    busbw_factor = fast["busbw"].mean() / algbw
    error = 0.001 + 0.01 / algbw
    # Times of seconds are printed to two digits, which is up to 5%.
    time_error = error + 0.05

    _, last_words = table.rows[-1]
    before_times, places = table.cells(last_words, "")
    redop = before_times.get("redop", before_times.get("op", "none"))
    root = before_times.get("root", "-1")
    has_redop = redop != "none"
    has_root = not root.startswith("-")

    possible = {}
    for name, collective in _KNOWN.items():
        if has_redop != collective.prints_redop or has_root != collective.prints_root:
            continue
        n = ranks or _ranks_by_bus_factor(collective, busbw_factor)
        for convention in _conventions(collective, n):
            algbw_off = abs(algbw_factor - convention.algbw_factor)
            busbw_off = abs(busbw_factor - convention.busbw_factor)
            if (
                algbw_off <= time_error * convention.algbw_factor
                and busbw_off <= error * convention.busbw_factor
            ):
                possible[name] = convention

    # Since 2022, nccl-tests does not check the results of alltoall and sendrecv in
    # place, and checks all others. A table in which both places are checked is not of
    # sendrecv.
    is_checked = [cells.get("wrong") != "N/A" for cells in places]
    if is_checked == [True, False]:
        unchecked_in_place = ("alltoall", "sendrecv")
        return {name: possible[name] for name in unchecked_in_place if name in possible}
    if is_checked == [True, True]:
        possible.pop("sendrecv", None)
    return possible


def _ranks_by_bus_factor(collective: Collective, bus_factor: float) -> int:
    """Return the ranks, at least 2, among which a collective has this bus factor.

    With r rounds of a ring of n ranks, the factor is r (n - 1) / n if a message is
    divided. Else the factor does not depend on n.
    """
    rounds = collective.rounds if collective.divided else 0
    return max(2, round(rounds / max(rounds - bus_factor, 1e-9)))


def _conventions(collective: Collective, ranks: int) -> list[Convention]:
    """Return how versions of nccl-tests print a collective between some ranks."""
    bus_factor = collective.bus_factor(ranks)
    conventions = [Convention(busbw_factor=bus_factor)]
    if collective.name in ("all_gather", "reduce_scatter"):
        # Until 2020, algbw counted only the bytes that are sent.
        conventions.append(Convention(algbw_factor=(ranks - 1) / ranks))
    if collective.name == "all_gather":
        # The size may be that of one rank's part, with either way of counting.
        conventions.append(Convention(ranks, bus_factor, bytes_factor=ranks))
        conventions.append(Convention(ranks - 1, bytes_factor=ranks))
    return conventions


def _prints_a_part(name: str) -> bool:
    """Return whether MPI's benchmarks print the bytes from one rank, or to one rank.

    Variants with a size for each rank, such as allgatherv, are printed as the plain
    ones.
    """
    plain = _BY_SPELLING.get(name.replace("_", "").removesuffix("v"), "")
    return plain in _KNOWN and _KNOWN[plain].mpi_prints_a_part


def _check_rates(sheet: Sheet, frame: DataFrame, factors: Collection[float]) -> None:
    """Refuse a table with wrong values, or with an algbw that contradicts its times.

    ``factors`` are the possible ratios of algbw to size over time.
    """
    wrong = frame["#wrong"].to_numpy()
    if wrong.any():
        row = int(np.argmax(wrong > 0))
        problem = f"{wrong[row]:g} wrong values: fix the collective before timing it"
        sheet.fail(row, "#wrong", problem)

    algbw = frame["algbw"].to_numpy()
    rate = (frame["size"] / frame["time"] / 1e9).to_numpy()
    # Of several ways to compute algbw, the one that comes closest counts in each row.
    off = np.min([abs(factor * rate - algbw) for factor in factors], axis=0)
    # Both are rounded: the time, by which the rate is divided, and algbw itself.
    time_column = sheet.header.index("time")
    algbw_column = sheet.header.index("algbw")
    time_rounding = np.array(
        [_half_digit(row[time_column]) / float(row[time_column]) for row in sheet.rows]
    )
    algbw_rounding = np.array([_half_digit(row[algbw_column]) for row in sheet.rows])
    allowed = 1.02 * algbw_rounding + (time_rounding + 0.001) * algbw + 1e-4
    if (off > allowed).any():
        row = int(np.argmax(off > allowed))
        problem = "contradicts size over time: mixed units? "
        problem += "the time must be in microseconds"
        sheet.fail(row, f"{frame['place'][row]}_algbw", problem)


def _half_digit(cell: str) -> float:
    """Return how far a printed number may be rounded: half a unit of its last digit.

    This is 0.005 for "9.15", and 5e5 for "1.6e+07".
    """
    number = re.fullmatch(r"\d+\.?(\d*)(?:e([+-]?\d{1,2}))?", cell.lower())
    if not number:
        # Programs print two decimals, so a cell in any other notation counts as such.
        return 0.005
    decimals, exponent = number.groups()
    return 0.5 * 10.0 ** (int(exponent or 0) - len(decimals))


# -- Times in place and out of place ---------------------------------------------------


def _of_place(frame: DataFrame, place: str | None, file: str) -> tuple[DataFrame, str]:
    """Return the rows of a place, and a note if the user should know of the choice.

    If no place is given, all rows are returned, unless the two places differ by more
    than their times scatter. Then the rows in place are returned, as training works in
    place.
    """
    note = ""
    medians = frame.groupby(["bytes", "place"])["seconds"].median().unstack().dropna()
    if place is None and medians.shape[1] == 2 and len(medians):
        difference = np.log(medians["out_of_place"] / medians["in_place"]).abs()
        if difference.mean() > _scatter(medians):
            place = "in_place"
            size = difference.idxmax()
            in_place = format_seconds(medians.loc[size, "in_place"])
            out_of_place = format_seconds(medians.loc[size, "out_of_place"])
            times = f"{in_place} at {format_bytes(size)}, out_of_place {out_of_place}"
            problem = "they differ by more than they scatter"
            note = f"in_place: {times}: {problem}; choose by --place"
    if place:
        frame, _ = choose(frame, ("place",), {"place": place}, Path(file))
    return frame.drop(columns="place"), note


def _scatter(medians: DataFrame) -> float:
    """Return the mean relative distance of times from the chord of their neighbours.

    ``medians`` has a row for each size, increasing, and the columns "in_place" and
    "out_of_place". Chords are straight in the logarithms of size and time, where a
    smooth curve lies close to them.
    """
    log_sizes = np.log(medians.index.to_numpy(float))
    log_times = np.log(medians.to_numpy())
    gaps = np.diff(log_sizes)[:, None]
    slopes = np.diff(log_times, axis=0) / gaps
    # Every size but the first and the last has a gap before it and one after it. Its
    # point lies (change of slope) * before * after / (before + after) off the chord.
    before = gaps[:-1]
    after = gaps[1:]
    distances = np.abs(np.diff(slopes, axis=0) * after * before / (after + before))
    return float(distances.mean()) if distances.size else 0.0
