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

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlkit.core.collective import Collective
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import MOST_ROWS
from ddlkit.core.units import format_bytes
from ddlkit.formats.benchmark_rows import (
    BY_SPELLING,
    KNOWN,
    PLACES,
    PROCESSOR_TIMES,
    UNTRUSTED_TIMES,
    refuse_several_variants,
    rows_of_place,
)
from ddlkit.formats.contract import ONE_RANK, MessageOptions, MessageTimes
from ddlkit.formats.labels import unlabelled
from ddlkit.store.sheet import Column, Schema, Sheet, check_cells

if TYPE_CHECKING:
    from pandas import DataFrame

# A table may have been copied as CSV or from a Markdown page.
_WORD = re.compile(r"[^\s,|]+")
_ROW = re.compile(r"\d+[\s,|]+[+-]?(?:[\d.]|nan|inf)", re.I)

# What NCCL writes if NCCL_DEBUG is set: host:process:thread, the GPU in brackets, which
# is taken for a label and left out, and a level. This text may stand in the middle of a row,
# because both go to the standard output without a lock.
_NCCL_DEBUG = re.compile(r"[A-Za-z][\w.-]*:\d+:\d+\s+(?:\[\d+\]\s+)?NCCL .*")

# What ends a table. Only nccl-tests has a last line of its own.
_END = re.compile(
    r"(?P<last_line>Avg bus band)|test starting|\bOSU \w|# Benchm|"
    r"#\s*(size|bytes|rep)",
    re.I,
)
# What nccl-tests prints after the rows if results were wrong. Its older versions have no
# counts of wrong values in the rows.
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(?P<count>\d+)\s+FAILED")
# A code block of a Markdown page, which may quote a table without its last line.
_FENCE = re.compile(r"```|~~~")
# Where another benchmark begins. A command may be printed for several of them, so that
# it does not count. OSU says where its buffers are, as in "OSU MPI-CUDA Allreduce".
_TITLE = re.compile(r"test starting: |\bOSU \w+(?P<memory>-\S+)?\s|# Benchmarking ")
# nccl-tests lists its ranks with the host of each, since 2023 also with the group of each:
# NCCL_TESTS_SPLIT puts ranks into groups that each work for themselves. Intel prints the
# number of ranks.
_RANK = re.compile(
    r"(?:#\s+)?Rank\s+(?P<rank>\d{1,9})\b(?:\s+Group\s+(?P<group>\d{1,9})\b)?"
    r".*\bPid\b(?:\s+\d+\s+on\s+(?P<host>\S+)\s+device\b)?"
    r"|# #processes = (?P<count>\d{1,9})\b"
)
# nccl-tests prints the version of NCCL since 2025 as a number, and NCCL_DEBUG=VERSION prints
# it as it is written.
_NCCL_VERSION = re.compile(
    r"\bnccl-library=(?P<number>\d{4,6})\b|^NCCL version (?P<written>\d+(?:\.\d+)+)"
)
# What nccl-tests prints before its table. Of these lines, older versions only have the one with
# the number of threads, in which the oldest write colons.
_BEGIN_OF_NCCL_TESTS = re.compile(
    r"\bnThread:? \d+ nGpus:? \d+\b|\btest starting: \w+_perf\b"
)
_OTHER_TEST = re.compile(
    r"(?:# Benchmarking|\bOSU MPI\S*) (?P<test>\S[^\n]{0,60}?)(?: Test v|\s*$)", re.M
)

# nccl-tests has programs for two more collectives, of which only the name is known.
_PROGRAMS = "|".join([*KNOWN, "alltoallv", "hypercube"])
# The collective is in the name of a program of nccl-tests, or in a title of OSU or of
# Intel.
_NAME = re.compile(
    rf"(?<!concluded: )(?<![a-z_])(?P<nccl>{_PROGRAMS})_perf"
    r"|\bOSU \S{1,40}\s(?P<osu>.{0,60})Latency Test|# Benchmarking (?P<intel>\S+)"
)
# The latency test of OSU that names no collective is between two ranks.
_BY_SPELLING = {**BY_SPELLING, "": "point_to_point"}


# Columns of nccl-tests by which it may time several kinds of messages, one after the
# other: by its options -d all and -o all.
_VARIANTS = ("type", "redop", "op")


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
    Layout(
        "nccl-tests",
        "time",
        frozenset({"bytes", "n", "algbw", "busbw"}),
        time_unit_us=1e3,
    ),
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
        The printed algbw, divided by (printed size / time).
    busbw_factor : float
        The printed busbw, divided by the printed algbw.
    bytes_factor : int
        The size of a message, divided by the printed size. This is the number of ranks if the
        printed size is that of one rank's part, and 0 if that number is unknown.
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
    stated_ranks : int
        The number of ranks as a line of Intel's states it, 0 if none does.
    listed_ranks : Counter of (int, int)
        How often each rank is listed by nccl-tests, by its rank and its group.
    hosts : Counter of str
        How many ranks nccl-tests lists on each host.
    nccl : str
        The version of NCCL, such as "2.19.3", "" if it is not stated.
    memory : str
        Of OSU, where the buffers are: "-CUDA", for example.
    layout : Layout
        The program and its columns.
    columns : list of str
        The column names, in small letters and without units.
    n_heads : int
        How often the head was printed before the first row.
    rows : list of tuple
        The line number of each row, and its cells.
    has_rates : bool
        Whether algbw and busbw are printed, as by nccl-tests.
    is_whole : bool
        Whether no row can be missing at the end. nccl-tests prints a last line after the
        rows, so a table of nccl-tests is whole when this line has been read. A table
        that was copied out of its log is whole without this line. Such a table has a
        head that is not a comment, or rows that end with a code block of a Markdown
        page.
    out_of_bounds : int
        How many wrong values the line "Out of bounds values" counts, 0 if it says that
        the check was passed, or if there is no such line.
    """

    collectives: set[str] = field(default_factory=set)
    stated_ranks: int = 0
    listed_ranks: Counter[tuple[int, int]] = field(default_factory=Counter)
    hosts: Counter[str] = field(default_factory=Counter)
    nccl: str = ""
    memory: str = ""
    layout: Layout = LAYOUTS[0]
    columns: list[str] = field(default_factory=list)
    n_heads: int = 0
    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    has_rates: bool = False
    is_whole: bool = False
    out_of_bounds: int = 0

    @property
    def ranks(self) -> int:
        """Return between how many ranks a message is sent, 0 if it is unknown.

        If ranks are in several groups, this is the size of each group. It is unknown if
        the groups differ in size.
        """
        if not self.listed_ranks:
            return self.stated_ranks
        # nccl-tests leaves ranks out of a long list, but not the last rank. The number of the
        # last rank says how many ranks there are in all groups together, because ranks count
        # from 0 across groups.
        n_ranks = max(rank for rank, _ in self.listed_ranks) + 1
        group_sizes = Counter(group for _, group in self.listed_ranks)
        # A list that shows a single group is taken to have no other, even if it is cut.
        if len(group_sizes) == 1:
            return n_ranks
        # In a list that leaves ranks out, the sizes of groups cannot be counted.
        is_cut = len(self.listed_ranks) < n_ranks
        distinct_sizes = {*group_sizes.values()}
        if is_cut or len(distinct_sizes) > 1:
            return 0
        return distinct_sizes.pop()

    @property
    def nodes(self) -> int:
        """Return on how many hosts the ranks are, 0 if it is unknown.

        nccl-tests leaves ranks out of a long list. Then all hosts are taken to have as many
        ranks as the listed host with the most. If the ranks are in several groups, the
        result is 0, because the hosts of each group are unknown.
        """
        groups = {group for _, group in self.listed_ranks}
        if not self.hosts or len(groups) > 1:
            return 0
        # The total is the number of listed ranks.
        is_whole_list = self.hosts.total() == self.ranks
        if is_whole_list:
            return len(self.hosts)
        most_ranks = max(self.hosts.values())
        return math.ceil(self.ranks / most_ranks)

    @property
    def runs_at_once(self) -> int:
        """Return how many runs print into the table at once.

        Processes of nccl-tests that do not know of one another are a run each, and may
        share a log. Each run lists its rank 0 once, so the result is how often rank 0 is
        listed.
        """
        # If several runs of several ranks print into the table, each prints the head before the
        # first row. A single head is therefore that of one run, even if rank 0 is listed twice,
        # as after an attempt that failed when it had printed its list.
        if self.ranks > 1 and self.n_heads <= 1:
            return 1
        # All other runs, such as those of one rank each without MPI, are counted by their lists.
        # Ranks are numbered across groups, so rank 0 is in one group only.
        for (rank, _group), count in self.listed_ranks.items():
            if rank == 0:
                return count
        # Without a list of ranks, the log is of one run.
        return 1

    def add_facts(self, line: str) -> None:
        """Add the facts about the table that a line before its head states."""
        title = _TITLE.search(line)
        if title:
            # Another benchmark begins, to which the facts of the last one do not apply. Only
            # the version of NCCL holds until another one is stated, because benchmarks whose
            # output shares a log usually share the library.
            self.collectives = set()
            self.stated_ranks = 0
            self.listed_ranks = Counter()
            self.hosts = Counter()
            self.memory = title["memory"] or ""
        self.collectives |= _collectives_in(line)
        version = _NCCL_VERSION.search(line)
        if version:
            self.nccl = version["written"] or _nccl_version(int(version["number"]))
        self._add_ranks(line)

    def _add_ranks(self, line: str) -> None:
        """Add what a line before the head says of the ranks.

        Intel states the number of ranks in one line, and nccl-tests lists each rank in a
        line of its own.
        """
        ranks_in_line = _RANK.match(line)
        if ranks_in_line is None:
            return
        if ranks_in_line["count"]:
            self.stated_ranks = int(ranks_in_line["count"])
            return
        rank = int(ranks_in_line["rank"])
        # Older lists have no groups, which is the same as a single group.
        group = int(ranks_in_line["group"] or 0)
        self.listed_ranks[rank, group] += 1
        # A line of the list may lack the host.
        if ranks_in_line["host"]:
            self.hosts[ranks_in_line["host"]] += 1

    def cells(
        self, words: list[str], where: str
    ) -> tuple[dict[str, str], list[dict[str, str]]]:
        """Return the cells of a row by the names of their columns.

        Parameters
        ----------
        words : list of str
            The words of the row. A blank cell has no word. A time stamp, which is the last
            cell of a row, has two words.
        where : str
            File and line, as errors name them.

        Returns
        -------
        cells_before_times : dict of str to str
            The cells before the first time.
        cells_of_places : list of dict of str to str
            The time and the cells after it. The list has one such dict or, if the table has
            times out of place and in place, one for each of the two. A time stamp is left
            out if the table has two places. Otherwise the first of its words, the date, is
            the last cell.

        Raises
        ------
        UserError
            If cells are missing.
        """
        # `before` has the columns before the first column of times. `timed` has this column
        # and all columns after it.
        n_columns_before = self.columns.index(self.layout.time)
        before = self.columns[:n_columns_before]
        timed = self.columns[n_columns_before:]
        n_words_before = self._words_before_times(words, before, timed, where)
        # If a word is missing before the times, the cell of redop is blank, which nccl-tests does
        # for a collective without an operation. No other cell before the times may be missing.
        if n_words_before < n_columns_before:
            before = [name for name in before if name != "redop"]
        # nccl-tests prints the time and the columns after it, such as algbw, twice: out of
        # place and in place. The second place then begins with the second "time".
        n_columns_of_place = len(timed)
        if self.layout.time in timed[1:]:
            n_columns_of_place = timed.index(self.layout.time, 1)
        cells_of_places = []
        # Each place begins at the position `start` in `timed`.
        for start in range(0, len(timed), n_columns_of_place):
            names = timed[start : start + n_columns_of_place]
            # A time stamp behind two places does not begin with a time, and is no place.
            if names[0] != self.layout.time:
                break
            # Up to a time stamp, which comes last, each column of `timed` has one word. So
            # the words of the place begin at the same position as its columns.
            place_words = words[n_words_before + start :]
            # Not strict, because more words may follow: those of the second place, or of the
            # time stamp, which has two words for one column.
            cells_of_places.append(dict(zip(names, place_words, strict=False)))
        # Not strict, because the words of the times follow.
        cells_before_times = dict(zip(before, words, strict=False))
        return cells_before_times, cells_of_places

    def _words_before_times(
        self, words: list[str], before: list[str], timed: list[str], where: str
    ) -> int:
        """Return how many words of a row stand before its first time.

        ``before`` and ``timed`` are the columns before the first time, and from the first
        time on. The result is one less than the columns ``before`` if the row leaves the
        column redop blank. Raises UserError if words are missing or surplus.
        """
        # Words are counted from the end of the row. A time stamp is one column and two
        # words.
        n_timed_words = len(timed) + timed.count("timestamp")
        n_words_before = len(words) - n_timed_words
        # Only nccl-tests prints rates. It leaves the column redop blank where there is no
        # operation, so that one word may be missing.
        fewest = len(before) - 1 if self.has_rates else len(before)
        if not fewest <= n_words_before <= len(before):
            most = len(before) + n_timed_words
            problem = f"has {len(words)} words instead of {most}"
            # Lines of NCCL_DEBUG contain the word "NCCL" and may be mixed with a row.
            if "NCCL" in words:
                problem = "text of NCCL_DEBUG is inside: write it to NCCL_DEBUG_FILE"
            elif len(words) < most:
                problem += (
                    ": the row is cut: copy the log again, or run the benchmark again"
                )
            else:
                problem += ": remove what is no cell of the row"
            raise UserError(f"{where}, column time: {problem}")
        return n_words_before


def _collectives_in(line: str) -> set[str]:
    """Return the collectives that a line of a log names by a program or a title.

    A collective that is not known keeps the spelling of the log, in small letters alone.
    """
    collectives = set()
    for named in _NAME.finditer(line):
        # Of the three groups of `_NAME`, one for each program, only one has matched. The
        # group of OSU is empty for its latency test between two ranks, and `_BY_SPELLING`
        # has "point_to_point" for "".
        spelling = (named["nccl"] or named["osu"] or named["intel"] or "").lower()
        # OSU calls its alltoall "All-to-All Personalized Exchange".
        letters = re.sub("[^a-z]|personalized exchange", "", spelling)
        collectives.add(_BY_SPELLING.get(letters, letters))
    return collectives


def _nccl_version(number: int) -> str:
    """Return the version of NCCL, such as "2.19.3", that nccl.h encodes as a number."""
    # Since 2.9, the version 2.19.3 is 21903. Before, the version 2.8.4 was 2804.
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1_000)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def matches(text: str) -> bool:
    """Return whether some line of a file is the head of a table in one of `LAYOUTS`."""
    return any(_head(line) for line in unlabelled(text))


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the times of the one table of a log that the options choose.

    The options ``collective`` and ``ranks`` choose a table, or state what the log does
    not. The option ``table`` chooses it by its number. The option ``place`` chooses
    between times in place (the result over the input) and out of place.

    `ddlkit.formats.contract` describes arguments, result and errors.
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
    # Only nccl-tests prints rates, and only it distinguishes places.
    if not table.has_rates:
        options.refuse_place(table.layout.program, file)
    # The note says why rows in place were chosen, if the user has not chosen them.
    rows, note = rows_of_place(rows, options.place, file)
    # OSU may say where its buffers were. With the title "OSU MPI-CUDA Allreduce", `memory`
    # is "-CUDA", and the source "osu-cuda". For other programs, `memory` is "".
    source = table.layout.program + table.memory.lower()
    return MessageTimes(source, rows, note)


def other_test(text: str) -> str:
    r"""Return the name of the test of OSU or Intel that wrote a log, "" if it has none.

    An error can then say why a log has no message times that can be read.

    Examples
    --------
    >>> other_test("# OSU MPI-CUDA Bandwidth Test v7.1\n# Size  Bandwidth (MB/s)\n")
    'Bandwidth'
    """
    title = _OTHER_TEST.search(text)
    return title["test"] if title else ""


def is_of_nccl_tests(text: str) -> bool:
    r"""Return whether a text has a line with which logs of nccl-tests begin.

    An error can then say what such a log lacks.

    Examples
    --------
    >>> is_of_nccl_tests("# nThread 1 nGpus 2 minBytes 8\nTest NCCL failure\n")
    True
    """
    return _BEGIN_OF_NCCL_TESTS.search(text) is not None


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
        If the file has too many lines, if there are heads of tables and no rows at all,
        or if the times are those of the processor and not of the GPU.
    """
    # This refuses a file of too many lines.
    check_cells(text, "\n", file)
    collector = _TableCollector(file)
    # `unlabelled` removes what launchers and loggers put before the lines.
    for number, line in enumerate(unlabelled(text), start=1):
        collector.add_line(number, line)
    tables = collector.tables
    with_rows = [table for table in tables if table.rows]
    if tables and not with_rows:
        # If a run has failed, its last line often says why.
        _, _, last_line = text.rstrip().rpartition("\n")
        raise UserError(
            f"{file}: a head but no rows: did the run fail? "
            f"Its last line is {shown(last_line)}"
        )
    return with_rows


class _TableCollector:
    """Collects the tables of a log from its lines, one after the other.

    Rows go to ``current``, the table whose head came last, until that table ends. Facts that
    other lines state, such as the collective, go to ``following``, the table whose head is
    still to come. With its head, this table becomes the current one. ``tables`` has all
    tables whose head has come, also the current one.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.tables: list[Table] = []
        self.current: Table | None = None
        self.following = Table()
        # Whether the last line was of a row and also had text of NCCL_DEBUG, such as
        # "n1:41:77 NCCL INFO". If the text has cut the row, as in "1024 256 n1:41:77 NCCL INFO",
        # the rest of the row, "float sum -1 ...", comes in a later line. If the text came
        # after a whole row, no rest comes. A line with this text alone may come between the
        # two parts of a row, so it leaves this value as it is.
        self.row_may_be_cut = False
        # Whether nothing but empty lines came since the last row.
        self.is_after_row = False

    def add_line(self, number: int, line: str) -> None:
        """Add what a line of the log says: a row, a head, the end of a table or a fact.

        The ``number`` of the line counts from 1.
        """
        # Text of NCCL_DEBUG may follow the beginning of a row in the same line. The rest
        # of the row then comes in a later line.
        before_debug = _NCCL_DEBUG.sub("", line)
        has_debug = before_debug != line
        if has_debug and not before_debug.strip():
            # The whole line is NCCL's. It may be between the parts of a row, whose rest is
            # therefore still expected.
            return
        # `row_may_be_cut` is still that of the line before.
        is_of_row = self.row_may_be_cut and self._adds_rest_of_row(before_debug)
        if not is_of_row:
            is_of_row = self._adds_row(number, before_debug)
        # If NCCL's text came in the line of a row, the rest of the row may come in a later
        # line. A line that is not of a row ends this wait.
        self.row_may_be_cut = is_of_row and has_debug
        # A line that is neither empty nor of a row is read with its text of NCCL_DEBUG. This does
        # no harm, because only in rows does each word count as a cell.
        if not is_of_row and line.strip():
            self._add_other_line(number, line)

    def _adds_row(self, number: int, line: str) -> bool:
        """Return whether a line looks like a row, after adding it to the current table.

        Numbers that follow no head look like a row, too, but no table gets them.
        """
        if not _ROW.match(line):
            return False
        if self.current is not None:
            self.current.rows.append((number, _WORD.findall(line)))
            # A log may be quoted in a block of a Markdown page. If the fence (```) that ends
            # the block is the next line, `_add_other_line` ends the table there.
            self.is_after_row = True
        return True

    def _add_other_line(self, number: int, line: str) -> None:
        """Add a line that is neither empty nor of a row.

        The line may be the head of a table, end the current table, or state facts.
        """
        # This line may still be the first one after a row. The next line is not.
        is_after_row = self.is_after_row
        self.is_after_row = False
        # A fence (```) begins or ends a code block of a Markdown page.
        if _FENCE.match(line):
            # If it comes right after a row, it ends the block that quotes the table. A quotation
            # may lack the last line of nccl-tests, so the table counts as whole.
            if is_after_row:
                self._end_table(is_whole=True)
            return
        head = _head(line)
        if head is not None:
            self._begin_table(number, line, head)
            return
        # nccl-tests prints after the rows how many values of the results were wrong.
        out_of_bounds = _OUT_OF_BOUNDS.search(line)
        if out_of_bounds and self.current is not None:
            self.current.out_of_bounds = int(out_of_bounds["count"])
        end = _END.search(line)
        if end:
            # This line is either the last one of nccl-tests, which tells that no row is
            # missing, or the beginning of another test, before which rows may be missing.
            is_last_line = end["last_line"] is not None
            self._end_table(is_whole=is_last_line)
        # All lines but fences and heads may state facts, also one that has ended a table. The
        # beginning of another test, for example, names the collective of the table whose head
        # is still to come.
        self.following.add_facts(line)

    def _end_table(self, *, is_whole: bool) -> None:
        """End the current table, if there is one.

        Rows until the next head then belong to no table. ``is_whole`` says whether this
        end shows that no row is missing.
        """
        if self.current is None:
            return
        # Only ever set to True: `_begin_table` may have taken the table for whole already, and an
        # end that does not show this must not undo it.
        if is_whole:
            self.current.is_whole = True
        self.current = None

    def _adds_rest_of_row(self, line: str) -> bool:
        """Add a line to the last row if it is the rest of this row, and return whether it is.

        It is called if the last row came in one line with text of NCCL_DEBUG. This text may
        cut a row, because both are printed into one log without a lock. The rest of the row
        then follows in a later line.
        """
        # A line that begins with "#" is a comment of nccl-tests and no part of a row.
        if self.current is None or line.startswith("#"):
            return False
        words = _WORD.findall(line)
        columns = self.current.columns
        _, row = self.current.rows[-1]
        # A row has at most a word for each column, and a time stamp is one column and two
        # words. If NCCL's text came after a whole row, this line is another row, and the two
        # rows together have too many words.
        most_words = len(columns) + columns.count("timestamp")
        if not words or len(row) + len(words) > most_words:
            return False
        row.extend(words)
        return True

    def _begin_table(
        self, number: int, line: str, head: tuple[Layout, list[str]]
    ) -> None:
        """Begin the table whose head is in a line.

        ``number`` counts the line from 1. ``head`` has the layout and the column names in
        it. A head that follows another one, without a row between them, is of the same
        table as the earlier head.

        Raises UserError if the times of the table are not those of the GPU.
        """
        table = self.following
        if self.current is not None and not self.current.rows:
            # Several runs print into one log at the same time. Their heads follow one another,
            # and belong to one table. The facts that a later run states repeat those of the
            # first run, and are dropped.
            table = self.current
        else:
            self.tables.append(table)
        self.current = table
        self.following = Table()
        table.layout, table.columns = head
        table.n_heads += 1
        # The rates are algbw and busbw, which only nccl-tests prints.
        table.has_rates = "algbw" in table.columns
        # nccl-tests prints its heads as comments, and prints a last line after the rows, by
        # which `_end_table` makes the table whole. If a head has no "#", the table was copied
        # out of a log without its last line, and counts as whole at once.
        awaits_last_line = line.startswith("#")
        table.is_whole = not awaits_last_line
        if table.layout.time not in table.columns:
            # The option -C of nccl-tests renames the column of times to "cputime".
            raise UserError(
                f"{self.file}: line {number}, column cputime: {PROCESSOR_TIMES}"
            )


def _head(line: str) -> tuple[Layout, list[str]] | None:
    """Return the layout and the column names of the table whose head is in a line.

    The result is None if the line is not the head of a table in one of `LAYOUTS`.
    """
    # "Avg Latency(us)" becomes "avg_us", "P50 Tail Lat(us)" becomes "p50_us", and
    # "t_avg[usec]" becomes "t_avg_us". At most 9 blanks are matched: with any number, the
    # search would take quadratic time in a line of many blanks.
    lower = re.sub(
        r"\s{0,9}(tail )?lat(ency)?\s{0,9}\(us\)|\[usec\]", "_us", line.lower()
    )
    words = _WORD.findall(lower.replace("#", " "))
    # A unit such as "(B)" that stands apart from its column is no name of a column.
    columns = [word for word in words if not word.startswith("(")]
    # In all layouts, the first column is that of sizes.
    if not columns or columns[0] not in ("size", "bytes"):
        return None
    for layout in LAYOUTS:
        if layout.needed <= set(columns):
            return layout, columns
    return None


class SeveralTablesError(UserError):
    """A log of several tables, of which the user has to choose one, or of which none fits.

    Parameters
    ----------
    problem : str
        What is wrong, without advice.
    with_option : str
        The advice of a command that has an option --table.
    without_option : str
        The advice of a command that has no such option.

    Attributes
    ----------
    without_option : str
        The error for a command that has no option --table.
    """

    def __init__(self, problem: str, with_option: str, without_option: str) -> None:
        self.without_option = f"{problem}: {without_option}"
        super().__init__(f"{problem}: {with_option}")


class CutLogError(UserError):
    """A log that breaks off before its end.

    Parameters
    ----------
    file : str
        The log, as errors name it.

    Attributes
    ----------
    problem : str
        What is wrong, without advice.
    """

    def __init__(self, file: str) -> None:
        self.problem = (
            f"{file}: no '# Avg bus bandwidth' after the rows: the log is cut"
        )
        super().__init__(self.with_columns("bytes and seconds"))

    def with_columns(self, columns: str) -> str:
        """Return the error for a command that reads a CSV of other columns.

        Parameters
        ----------
        columns : str
            The names of the columns, in words.

        Returns
        -------
        str
            The error, whose advice names these columns.
        """
        return f"{self.problem}: get all of it, or make a CSV of {columns}"


def read_log(
    tables: list[Table],
    file: str,
    collective: str = "",
    ranks: int = 0,
    table: int | None = None,
) -> tuple[DataFrame, Table]:
    """Return the message times of the one table of a log that fits, and this table.

    Parameters
    ----------
    tables : list of Table
        The tables of the log, as `read_tables` returns them.
    file : str
        The file, as errors name it.
    collective : str, optional
        The collective that is looked for, or that the log does not name. By default,
        "", a table of any collective fits.
    ranks : int, optional
        The number of ranks that is looked for, or that the log does not state. By
        default, 0, a table of any number fits.
    table : int, optional
        Which of the tables to read, counted from 1. By default it is the only one that
        fits.

    Returns
    -------
    rows : DataFrame
        The columns bytes (of a message), seconds, place (in place or out of place),
        collective and ranks (0 if it is unknown).
    table : Table
        The table that was read.

    Raises
    ------
    UserError
        If no table fits, or several do, or if the table is damaged or contradicts
        itself.
    """
    # A benchmark that was built without MPI runs once in each process, and nothing is sent
    # between the processes. Each of them prints a table of one rank.
    are_all_of_one_rank = all(table_of_log.ranks == 1 for table_of_log in tables)
    if len(tables) > 1 and are_all_of_one_rank:
        raise _without_mpi(f"{len(tables)} processes print a table each", file)
    chosen = _chosen_table(tables, file, collective, ranks, table)
    if chosen.runs_at_once > 1:
        problem = f"{chosen.runs_at_once} processes print into one table"
        raise _without_mpi(problem, file)
    _refuse_cut(chosen, file)
    return _message_times(chosen, file, collective, ranks), chosen


def _message_times(
    table: Table, file: str, wanted_collective: str, user_ranks: int
) -> DataFrame:
    """Return the message times in a table, with the columns that `read_log` returns.

    ``wanted_collective`` is the user's collective, "" if the user names none.
    ``user_ranks`` is the user's number of ranks, 0 if there is none, which is used only if
    the log does not state the number.

    Raises UserError if the table is damaged, contradicts itself or is of another
    collective than the user's, or if it needs a number of ranks and none is known.
    """
    ranks = table.ranks or user_ranks
    # The sheet has the table as text, for errors, and the frame has it as numbers.
    sheet, frame = _sizes_times_and_rates(table, file)
    # The collectives that the table may be of, each with the way in which it is printed.
    possible = _possible_collectives(table, frame, ranks)
    if table.has_rates:
        _check_values(sheet, frame)
        _refuse_out_of_bounds(table, file)
        factors = {convention.algbw_factor for convention in possible.values()}
        # If no collective is possible, the cause may be a damaged row, whose error says more
        # than the refusal below. So the rows are checked even then, by the usual factor of 1.0,
        # with which algbw is the size divided by the time.
        _check_rates(sheet, frame, factors or {1.0})
    # This refuses the table if no collective is possible.
    name = _decided_collective(table, file, possible, wanted_collective, ranks)
    # The printed size may be the bytes of one rank. The size of the message is then larger
    # by a factor, the number of ranks. The factor is 0 if that number is unknown.
    bytes_factor = possible[name].bytes_factor
    if bytes_factor == 0:
        problem = f"the bytes of {name} are those of one rank: give --ranks"
        raise UserError(f"{file}: {problem}")
    frame = frame.assign(
        bytes=frame["size"] * bytes_factor, collective=name, ranks=ranks
    )
    frame = frame.rename(columns={"time": "seconds"})
    return frame[["bytes", "seconds", "place", "collective", "ranks"]]


def _refuse_cut(table: Table, file: str) -> None:
    """Raise CutLogError if rows of a table may be missing at its end."""
    # Only nccl-tests prints a last line that shows this. Its tables are those with rates.
    if table.has_rates and not table.is_whole:
        raise CutLogError(file)


def _refuse_out_of_bounds(table: Table, file: str) -> None:
    """Raise UserError if a collective had wrong results, by the line after the rows.

    `_check_values` names the row, but not all logs count the wrong values of each row.
    """
    if table.out_of_bounds:
        raise UserError(
            f"{file}: nccl-tests found wrong results of the collective (it prints 'Out of "
            f"bounds values : {table.out_of_bounds} FAILED' after the rows), "
            f"{UNTRUSTED_TIMES}"
        )


def _without_mpi(problem: str, file: str) -> UserError:
    """Return the error for a log of nccl-tests without MPI.

    Without MPI, its processes know nothing of one another. Each process is a run by
    itself, whose ranks count from 0, and all of them print into one log. ``problem`` says
    what they print, as in "3 processes print a table each".
    """
    return UserError(
        f"{file}: {problem}, each as rank 0: nccl-tests was built without MPI: "
        "build it with MPI=1"
    )


def _decided_collective(
    table: Table,
    file: str,
    possible: Collection[str],
    wanted: str,
    ranks: int,
) -> str:
    """Return the collective of a table: the user's, or else the only one that is possible.

    ``possible`` has the collectives that the columns and the rates of the table allow.
    ``wanted`` is the user's collective, "" if the user names none. ``ranks`` is the
    number of ranks in errors, 0 if it is unknown.

    Raises UserError if the user's collective is not possible, or if the user names none
    and not exactly one is possible.
    """
    if wanted in possible:
        return wanted
    if not wanted and len(possible) == 1:
        return next(iter(possible))
    listed = " or ".join(possible)
    # If none is possible, the columns and rates fit no collective, or none of those that the
    # log names.
    if not possible:
        raise _no_collective_possible(table, file, ranks)
    if not wanted:
        raise UserError(
            f"{file}: does not name its collective: give --collective {listed}"
        )
    raise UserError(
        f"{file}: has times of {listed}, not of {wanted}: give times of {wanted}"
    )


def _no_collective_possible(table: Table, file: str, ranks: int) -> UserError:
    """Return the error for a table whose columns and rates fit no collective.

    ``ranks`` is the number of ranks of the log or of the user, 0 if it is unknown.
    """
    # The rates of one rank, between which nothing is sent, fit no collective.
    if table.ranks == 1:
        return UserError(f"{file}: {ONE_RANK}")
    names = " or ".join(sorted(table.collectives)) or "any collective"
    problem = f"redop, root and busbw are not those of {names}"
    advice = "give the log of one run as nccl-tests has printed it"
    if table.ranks:
        problem += f" of {ranks} ranks, as the log says"
    elif ranks:
        problem += f" of {ranks} ranks"
        advice = f"check --ranks {ranks}, or leave it out"
    return UserError(f"{file}: {problem}: {advice}")


def _chosen_table(
    tables: list[Table], file: str, collective: str, ranks: int, number: int | None
) -> Table:
    """Return the table with a given number, or else the only one that fits.

    Tables are counted from 1. If there is a single table and no ``number``, it is returned
    whether it fits or not. Of several tables, one fits if it may be of the ``collective``
    and of the number of ``ranks``. A ``collective`` of "", and ``ranks`` of 0, fit every
    table.

    Raises UserError, with a list of tables, if there is no table of that number. Raises
    SeveralTablesError if several tables are given without a number and not exactly one of them
    fits.
    """
    if number is not None and 1 <= number <= len(tables):
        return tables[number - 1]
    # A single table is taken even if it does not fit. The caller then refuses it with a reason.
    if number is None and len(tables) == 1:
        return tables[0]
    # For each table, the collectives that it may be of, and a phrase for a list in an error.
    collectives = [_collectives_of_table(table, file, ranks) for table in tables]
    described = [
        f"table {position + 1} of {' or '.join(collectives[position])}, "
        f"{table.ranks or 'unknown'} ranks, {len(table.rows)} rows"
        for position, table in enumerate(tables)
    ]
    if number is not None:
        raise _no_table_of_number(number, described, file)

    # The positions, counted from 0, of the tables that fit.
    fitting = []
    for position, table in enumerate(tables):
        is_of_collective = not collective or collective in collectives[position]
        # A table with 0 ranks does not state its number of ranks, and may be of any number.
        is_of_ranks = not ranks or table.ranks in (0, ranks)
        if is_of_collective and is_of_ranks:
            fitting.append(position)
    if len(fitting) == 1:
        return tables[fitting[0]]
    if not fitting:
        wanted = {"collective": collective, "ranks": ranks}
        given = [f"--{name} {value}" for name, value in wanted.items() if value]
        options = " and ".join(given)
        raise SeveralTablesError(
            f"{file}: none of its {len(tables)} tables ({'; '.join(described)}) fits {options}",
            with_option=f"leave {options} out, and choose a table with --table N",
            without_option="give a log that has such a table",
        )
    offered = [described[position] for position in fitting]
    raise SeveralTablesError(
        f"{file}: has {len(tables)} tables ({'; '.join(offered)})",
        with_option="choose one with --table N",
        without_option="keep only one of them in the file",
    )


def _collectives_of_table(table: Table, file: str, ranks: int) -> list[str]:
    """Return the collectives that a table may have timed, by name or by rates.

    If the log names collectives above the table, the result has these. If it names none,
    the result has all collectives that would be printed with the algorithm and bus
    bandwidths of the table. ``ranks`` is the user's number of ranks, which is used if the
    table does not state one. 0 stands for an unknown number.
    """
    if table.collectives:
        return sorted(table.collectives)
    _, frame = _sizes_times_and_rates(table, file)
    return list(_possible_collectives(table, frame, table.ranks or ranks))


def _no_table_of_number(number: int, described: list[str], file: str) -> UserError:
    """Return the error for a number that no table has.

    ``described`` has a phrase for each table of the log.
    """
    listed = "; ".join(described)
    if len(described) == 1:
        return UserError(
            f"{file}: --table {number}: there is only one table ({listed}): leave --table "
            "out"
        )
    return UserError(
        f"{file}: --table {number}: there are only {len(described)} tables ({listed}): "
        "choose one of them by its number"
    )


def _sizes_times_and_rates(table: Table, file: str) -> tuple[Sheet, DataFrame]:
    """Return the sizes, times and rates of a table, one row for each time.

    Both results have the same rows, and the columns of `_PRINTED`: size, time, algbw,
    busbw, #wrong and place. The sheet has text with the numbers of lines, for errors. The
    frame has numbers, with times in seconds. Rows of size 0 are left out: the message was
    too small to be divided among the ranks.

    Raises UserError if the table has too many rows or none above size 0, if a row is
    damaged or repeats the row before it, or if one size is timed in several variants, such
    as two types of elements.
    """
    lines = _lines_of_table(table, file)
    # For each time, the number of its line, and its cells in the columns of `_PRINTED`.
    numbers: list[int] = []
    rows: list[list[str]] = []
    for line in lines:
        if line.size == "0":
            continue
        # A line of the log has one time or, for two places, two.
        rows_of_line = _printed_rows(table, line.size, line.places)
        numbers += [line.number] * len(rows_of_line)
        rows += rows_of_line
    if not rows:
        where = f"{file}: row at line {lines[-1].number}"
        raise UserError(f"{where}, column size: none is above 0 in this table")
    refuse_several_variants([(line.size, line.variant) for line in lines], file)
    sheet = Sheet(file, _PRINTED.names, numbers, rows)
    # A log may break off within its last number. `_refuse_cut` finds that in a table with rates,
    # which is of nccl-tests, because the line "Avg bus bandwidth" after the rows is missing
    # then. Other programs print no such line, so the digits of the last time are checked.
    if not table.has_rates:
        _check_last_time(sheet)
    # `exact=False` marks a file of the user, in which implausible numbers are refused.
    frame = _PRINTED.frame(sheet, exact=False)
    # `_PRINTED` has taken every time for microseconds, and made seconds of it. Some layouts
    # print times in another unit.
    return sheet, frame.assign(time=frame["time"] * table.layout.time_unit_us)


class _Line(NamedTuple):
    """A line of a log that is a row of a table.

    Attributes
    ----------
    number : int
        The number of the line in the file, counted from 1.
    size : str
        The printed size.
    variant : dict of str to str
        The cells of those columns of `_VARIANTS` that the table has, such as the type of
        the elements.
    places : list of dict of str to str
        For each place that the table times, the time and the cells after it, by the names
        of their columns.
    """

    number: int
    size: str
    variant: dict[str, str]
    places: list[dict[str, str]]


def _lines_of_table(table: Table, file: str) -> list[_Line]:
    """Return the rows of a table, divided into cells.

    Raises UserError if there are too many rows, or if a row is damaged or repeats the row
    before it.
    """
    if len(table.rows) > MOST_ROWS:
        raise UserError(
            f"{file}: {len(table.rows)} rows, more than {MOST_ROWS}: leave some out"
        )
    lines = []
    words_before: list[str] = []
    for number, words in table.rows:
        where = f"{file}: row at line {number}"
        size = words[0]
        # Two equal rows mean that the log contains each line twice, for example if two ranks print
        # it. But rows of size 0 may be equal: each size that was too small is printed as 0.
        if words == words_before and size != "0":
            raise UserError(
                f"{where}: the same as the row before it: is every line there twice?"
            )
        words_before = words
        # `cells_before_times` has the cells of the columns before the first time, by the names
        # of the columns. `cells_of_places` has, for each place (out of place, in place), such
        # a dict of the time and the cells after it.
        cells_before_times, cells_of_places = table.cells(words, where)
        # The cells that tell several kinds of messages of one size apart, as the type does.
        variant = {
            name: cell for name, cell in cells_before_times.items() if name in _VARIANTS
        }
        lines.append(_Line(number, size, variant, cells_of_places))
    return lines


def _printed_rows(
    table: Table, size: str, places: list[dict[str, str]]
) -> list[list[str]]:
    """Return the times in a row of a table, each as cells of the columns of `_PRINTED`.

    nccl-tests times each size in two places, and prints both in one row: out of place, into
    another buffer than the input's, and in place, over the input. ``places`` has the cells
    of each place by the names of their columns, in the order of `PLACES`. A place that is
    not timed is left out of the result.
    """
    rows = []
    # Not strict, because a table may have times of one place only, which is then the first.
    for place, cells in zip(PLACES, places, strict=False):
        time = cells.get(table.layout.time, "")
        # The program prints N/A as the time of a place that it does not time.
        if time == "N/A":
            continue
        # The number of wrong values. N/A means that the values were not checked. Until
        # 2022, logs had no column "wrong", but a column "error" with the largest deviation,
        # which is not read here. In both cases the number counts as 0.
        n_wrong = cells.get("wrong", "0").replace("N/A", "0")
        cells_by_name = {
            **cells,
            "size": size,
            "time": time,
            "#wrong": n_wrong,
            "place": place,
        }
        # A table without rates has no algbw and busbw, for which 0 stands.
        rows.append([cells_by_name.get(name, "0") for name in _PRINTED.names])
    return rows


def _check_last_time(sheet: Sheet) -> None:
    """Raise UserError if the last time of a table is cut, as by the end of the file.

    Tables of MPI benchmarks have no last line that would show whether they are whole.
    """
    time = sheet.header.index("time")
    # The numbers of decimals of the last two times, or of the only one. A program prints
    # all its times with one number of decimals.
    decimals = [len(row[time].partition(".")[2]) for row in sheet.rows[-2:]]
    if decimals[-1] < decimals[0]:
        problem = "fewer digits than in the row before: is the log cut?"
        sheet.fail(len(sheet.rows) - 1, "time", problem)


# -- Which collective a table is of ----------------------------------------------------


def _possible_collectives(
    table: Table, frame: DataFrame, ranks: int
) -> dict[str, Convention]:
    """Return the collectives that a table may have timed, and how each would be printed.

    If the log names collectives, the result has those of them that would be printed with
    the rates of the table. If the log names none, the result has all known collectives
    that would be printed with these rates. A table without rates excludes no collective.

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
        How the table prints each possible collective. Empty if no collective would be
        printed with such rates.
    """
    if not table.has_rates:
        # MPI benchmarks print no rates. For some collectives they print the size of one rank's
        # part, so the message is larger by a factor: the number of ranks. 0 stands for an
        # unknown number of ranks, and for an unknown factor, too.
        names = sorted(table.collectives) or list(KNOWN)
        return {
            name: Convention(bytes_factor=ranks if _prints_a_part(name) else 1)
            for name in names
        }
    possible = _possible_by_rates(table, frame, ranks)
    if not table.collectives:
        return possible
    named = {}
    for name in sorted(table.collectives):
        # The rates of a collective that is not known cannot be checked. Its sizes and
        # rates are taken as they are printed.
        if name in possible or name not in KNOWN:
            named[name] = possible.get(name, Convention())
    return named


def _possible_by_rates(
    table: Table, frame: DataFrame, ranks: int
) -> dict[str, Convention]:
    """Return the collectives that would be printed with such columns and rates.

    The columns are those of the operation (redop), of the root, and of the number of wrong
    values (#wrong), where nccl-tests prints N/A if it does not check the results. The rates
    are two ratios: algbw / (size / time), and busbw / algbw. ``frame`` has the rows of the
    ``table`` as numbers. ``ranks`` is the number of ranks. If it is 0, the number is unknown,
    and follows from the second ratio.

    For each of these collectives, the result has the convention by which the table prints it.
    """
    rates = _measured_rates(frame)
    # All rows are of one collective. So either all or none have an operation, and the same
    # holds for a root and for checks of the results. The last row stands for all.
    _, last_words = table.rows[-1]
    # No error needs ``where``, because `_lines_of_table` has refused rows that lack cells.
    cells, cells_of_places = table.cells(last_words, where="")
    # nccl-tests prints "none" and "-1" for a collective without reduction or root. Its
    # older versions call the column of the operation "op".
    redop = cells.get("redop", cells.get("op", "none"))
    root = cells.get("root", "-1")
    has_redop = redop != "none"
    has_root = not root.startswith("-")

    possible = {}
    for name, collective in KNOWN.items():
        if has_redop != collective.prints_redop or has_root != collective.prints_root:
            continue
        convention = _fitting_convention(collective, rates, ranks)
        if convention is not None:
            possible[name] = convention
    # For each place (out of place, in place), N/A as the number of wrong values means that the
    # results were not checked. The column "#wrong" is called "wrong" here, without its sign.
    # Older versions have a column "error" instead, with N/A in the same case. Tables without
    # either column count as checked.
    is_checked = [
        after_time.get("wrong", after_time.get("error")) != "N/A"
        for after_time in cells_of_places
    ]
    return _possible_by_checks(possible, is_checked)


def _fitting_convention(
    collective: Collective, rates: _Rates, ranks: int
) -> Convention | None:
    """Return a convention of nccl-tests by which a collective has the rates of a table.

    A convention is how a version of nccl-tests computes the sizes and rates that it prints.
    ``ranks`` is the number of ranks. If it is unknown, which 0 stands for, the number
    follows from the rates. The result is None if the rates fit no convention.
    """
    likely_ranks = ranks or _ranks_by_bus_factor(collective, rates.busbw_factor)
    fitting = [
        convention
        for convention in _conventions(collective, likely_ranks)
        if rates.fit(convention)
    ]
    if not fitting:
        return None
    # Where several conventions fit, they have the same bytes_factor and differ by less
    # than rounding, so any of them will do.
    return fitting[-1]


class _Rates(NamedTuple):
    """Two ratios of the rates in a table, and how far rounding may have changed them.

    Attributes
    ----------
    algbw_factor : float
        The printed algbw, divided by (printed size / time).
    busbw_factor : float
        The printed busbw, divided by the printed algbw.
    algbw_error, busbw_error : float
        How far each ratio may be off, as a share of the ratio without rounding.
    """

    algbw_factor: float
    busbw_factor: float
    algbw_error: float
    busbw_error: float

    def fit(self, convention: Convention) -> bool:
        """Return whether a program may have printed these rates by a convention.

        The convention has the ratios without rounding. Each measured ratio may be off by its
        error, which is a share of the convention's ratio.
        """
        algbw_off = abs(self.algbw_factor - convention.algbw_factor)
        busbw_off = abs(self.busbw_factor - convention.busbw_factor)
        return (
            algbw_off <= self.algbw_error * convention.algbw_factor
            and busbw_off <= self.busbw_error * convention.busbw_factor
        )


def _measured_rates(frame: DataFrame) -> _Rates:
    """Return two ratios of the rates in a table: algbw / (size / time), and busbw / algbw.

    The result also has their errors, the shares by which rounding may have changed them.
    ``frame`` has the columns size (bytes), time (seconds), algbw and busbw (GB/s).
    """
    # Bandwidths are printed to 0.01 GB/s. Only the ratios of large ones are precise.
    fast = frame[frame["algbw"] >= frame["algbw"].max() / 10]
    # The mean is 0 if all bandwidths are rounded to 0. A divisor must be above 0.
    mean_algbw_gb_per_s = max(float(fast["algbw"].mean()), 1e-9)
    mean_bytes_per_s = (fast["size"] / fast["time"]).mean()
    algbw_factor = mean_algbw_gb_per_s / mean_bytes_per_s * 1e9
    busbw_factor = fast["busbw"].mean() / mean_algbw_gb_per_s
    # algbw and busbw are each rounded by up to 0.005 GB/s. busbw is taken to be about as large
    # as algbw, so each is off by a share of 0.005 / algbw, and their ratio by the sum of both
    # shares. The term 0.001 leaves some room.
    busbw_error = 0.001 + 2 * 0.005 / mean_algbw_gb_per_s
    # In algbw / (size / time), the rounding of algbw is only a part of busbw_error, which is more
    # than enough. The time is rounded, too: times of a second and more are printed to two digits,
    # which changes them by up to 5%.
    algbw_error = busbw_error + 0.05
    return _Rates(algbw_factor, busbw_factor, algbw_error, busbw_error)


def _possible_by_checks(
    possible: dict[str, Convention], is_checked: list[bool]
) -> dict[str, Convention]:
    """Return those possible collectives whose results would be checked in these places.

    ``is_checked`` says for each of `PLACES` (out of place, in place) whether its results
    were checked. It has one entry if the table has one place only.
    """
    if is_checked == [True, False]:
        # These are the only collectives that nccl-tests does not check in place, since 2022.
        unchecked_in_place = ("alltoall", "sendrecv")
        return {name: possible[name] for name in unchecked_in_place if name in possible}
    if is_checked == [True, True]:
        # Alltoall stays possible, because nccl-tests checked it in place until 2022. Sendrecv
        # is excluded, because nccl-tests only has it since 2021, so that few versions checked it.
        return {name: possible[name] for name in possible if name != "sendrecv"}
    # In other cases, as without any checks or with one place only, nothing is excluded.
    return possible


def _ranks_by_bus_factor(collective: Collective, bus_factor: float) -> int:
    """Return the number of ranks, at least 2, at which a collective has this bus factor.

    The bus factor is the bus bandwidth divided by the algorithm bandwidth. With r rounds of a
    ring of n ranks, the factor is b = r (n - 1) / n if a message is divided into a piece
    for each rank, so that n = r / (r - b). If a message is not divided, the factor does
    not depend on n, and the result is 2.
    """
    if not collective.divided:
        return 2
    rounds = collective.rounds
    # A factor of r or more belongs to another collective. The result is then a huge
    # number of ranks, with which the rates of the collective do not fit those of the log.
    # The caller therefore rejects the collective.
    return max(2, round(rounds / max(rounds - bus_factor, 1e-9)))


def _conventions(collective: Collective, ranks: int) -> list[Convention]:
    """Return the ways in which versions of nccl-tests print size, algbw and busbw.

    The result has each way for this collective between this number of ranks. The three ratios
    of a `Convention` are 1 by default.
    """
    bus_factor = collective.bus_factor(ranks)
    conventions = [Convention(busbw_factor=bus_factor)]
    if collective.name in ("all_gather", "reduce_scatter"):
        # Until 2020, algbw counted only the bytes that a rank sends, (ranks - 1) / ranks of
        # the message, and busbw was equal to algbw.
        conventions.append(Convention(algbw_factor=(ranks - 1) / ranks))
    if collective.name == "all_gather":
        # Some versions print the size of one rank's part. Their algbw counts the parts of
        # all ranks or, until 2020, only the ranks - 1 parts that a rank sends.
        conventions.append(
            Convention(algbw_factor=ranks, busbw_factor=bus_factor, bytes_factor=ranks)
        )
        conventions.append(Convention(algbw_factor=ranks - 1, bytes_factor=ranks))
    return conventions


def _prints_a_part(name: str) -> bool:
    """Return whether MPI's benchmarks print the size of one rank's part of a message.

    Variants with a size for each rank, such as allgatherv, are printed in the same way as
    those without.
    """
    plain = _BY_SPELLING.get(name.replace("_", "").removesuffix("v"), "")
    return plain in KNOWN and KNOWN[plain].mpi_prints_a_part


def _check_values(sheet: Sheet, frame: DataFrame) -> None:
    """Raise UserError if the rows of a table count wrong results of the collective."""
    # The count is 0 where results were not checked.
    n_wrong = frame["#wrong"].to_numpy()
    has_wrong = n_wrong > 0
    if has_wrong.any():
        # argmax returns the first row with wrong values.
        row = int(np.argmax(has_wrong))
        size = format_bytes(frame["size"][row])
        problem = (
            f"the benchmark found {n_wrong[row]:g} wrong values in a message of {size}"
        )
        sheet.fail(row, "#wrong", f"{problem}, {UNTRUSTED_TIMES}")


def _check_rates(sheet: Sheet, frame: DataFrame, factors: Collection[float]) -> None:
    """Raise UserError for an algbw that contradicts size over time.

    ``sheet`` has the rows of the table as text, as they are printed. ``frame`` has them as
    numbers, with times in seconds. ``factors`` are the ratios algbw / (size / time), one for
    each way in which the table may have been printed (see `_conventions`).
    """
    # All rates are in GB/s, as algbw is printed.
    algbw = frame["algbw"].to_numpy()
    rate = (frame["size"] / frame["time"] / 1e9).to_numpy()
    # How far the printed algbw is from the computed one in each row, shape (rows,). The factor
    # that comes closest counts. It may differ from row to row.
    distance = np.min([abs(factor * rate - algbw) for factor in factors], axis=0)
    # Two roundings are allowed for, each of up to half a unit of the last digit
    # (`_half_digit`): that of algbw, in GB/s, and that of the time. If the time is off by some
    # share of itself, size / time is off by this share, too.
    time_column = sheet.header.index("time")
    algbw_column = sheet.header.index("algbw")
    time_rounding_share = np.array(
        [_half_digit(row[time_column]) / float(row[time_column]) for row in sheet.rows]
    )
    algbw_rounding = np.array([_half_digit(row[algbw_column]) for row in sheet.rows])
    # The factor 1.02 and the terms 0.001 and 1e-4 (GB/s) allow a little more. They are chosen, not
    # measured.
    allowed = 1.02 * algbw_rounding + (time_rounding_share + 0.001) * algbw + 1e-4
    if (distance > allowed).any():
        row = int(np.argmax(distance > allowed))
        # A line of the log has an algbw for each place, in place and out of place.
        place = frame["place"][row].replace("_", " ")
        problem = f"the one {place} contradicts size over time: mixed units? "
        problem += "the time must be in microseconds"
        sheet.fail(row, "algbw", problem)


def _half_digit(cell: str) -> float:
    """Return how far a printed number may be rounded: half a unit of its last digit.

    The result is 0.005 for "9.15", and 5e5 for "1.6e+07".
    """
    number = re.fullmatch(r"\d+\.?(\d*)(?:e([+-]?\d{1,2}))?", cell.lower())
    if not number:
        # Programs print two decimals. A cell in any other notation is taken to have two.
        return 0.005
    decimals, exponent = number.groups()
    # The last digit of "1.65e+07", which has two decimals, is worth 10**(7 - 2).
    return 0.5 * 10.0 ** (int(exponent or 0) - len(decimals))
