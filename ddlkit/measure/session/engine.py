"""The engine of a session: it measures points, and saves what became of each.

The points are measured in this process, or in a child process whose death costs one
point. In the second case this process names the points, keeps the table of outcomes,
samples vitals and packs the recording, and the child does nothing but measure. There is
no torch here, because nothing in this process may disturb what is measured.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.jobs import child_environment, die_with_parent, how_it_ended, trap, vitals
from ddlkit.jobs.launch import end
from ddlkit.measure import session as sessions
from ddlkit.measure.session import HAVE_TABLES, MakePoints, Origin, Point, Row, say
from ddlkit.store import files, machine, tables

OVERTIME_S = 20.0
"""Seconds for which points may run beyond the budget."""
RESERVE = 2.0
"""The time kept free for closing points is this many times their expected duration."""
HUNG_FACTOR = 5.0
"""A point hangs if it takes this many times its expected duration."""
HUNG_S = 60.0
"""No point hangs before this time: CUDA, NCCL and a first kernel need seconds."""
START_S = 120.0
"""Seconds until the first point of a process: torch loads slowly from a cold disk."""
PAUSE_S = 5.0
"""Seconds after which a process is started again: a GPU needs a while after a death."""
POLL_S = 0.2
"""Seconds between two looks whether the child has answered."""
PACK_PERIOD_S = 20.0
"""Seconds between two times at which the recording is packed."""


class Wording(NamedTuple):
    """How the lines of a session call its points.

    Attributes
    ----------
    noun : str
        What a point is.
    doing : str
        What the session does with a point.
    done : str
        The outcome of a point with which this succeeded.
    """

    noun: str = "measurement"
    doing: str = "measuring"
    done: str = sessions.MEASURED

    def counted(self, points: int) -> str:
        """Return a number of points with the noun, as in "2 measurements"."""
        return f"1 {self.noun}" if points == 1 else f"{points} {self.noun}s"


MEASURING = Wording()


def run_session(
    make: MakePoints,
    out: Path,
    *,
    budget_s: float = math.inf,
    isolate: bool = False,
    gpu: bool = False,
    ignore_load: bool = False,
    pack: Path | None = None,
    remark: str = "",
    pack_tables: bool = False,
    strict: bool = False,
    wording: Wording = MEASURING,
) -> Path:
    """Measure the points whose tables a directory lacks.

    A point is a measurement with tables of its own.

    Parameters
    ----------
    make : callable
        Returns the points, as `ddlkit.measure.session.MakePoints`.
    out : Path
        The directory of the session. Tables that it has are kept.
    budget_s : float, optional
        Seconds after which no point starts.
    isolate : bool, optional
        Whether points are measured in a child process, and ``outcomes.csv`` says what
        became of each. Otherwise the first point that fails ends the session.
    gpu : bool, optional
        Whether the GPU is measured. Isolated points of a session that does not measure
        the GPU see none, and their tables have the name of the processor.
    ignore_load : bool, optional
        Whether to measure although others use the GPU.
    pack : Path, optional
        An archive that holds the whole recording at any time, and from which the session
        continues.
    remark : str, optional
        A remark for all stamps.
    pack_tables : bool, optional
        Whether all tables of a schema are put into one file at the end. This has nothing
        to do with the archive ``pack``.
    strict : bool, optional
        Whether the session fails at its end if a point failed, was killed, ran out of
        memory or was measured in part. A point that is unavailable here, or for which
        there was no time, is only listed.
    wording : Wording, optional
        How the lines of the session call its points. By default they are measurements.

    Returns
    -------
    Path
        The directory.

    Raises
    ------
    UserError
        If others use the GPU, if a point that is not isolated fails, if nothing at all
        could be measured, and if the directory holds another machine's tables or
        another process writes to it. A strict session also raises it if a point failed.
    """
    deadline_s = time.monotonic() + budget_s
    out = out.resolve()
    with store.lock(out / ".lock"):
        # An earlier session may have died while it wrote a table.
        files.remove_unfinished(out)
        # Which GPU others use, in words. The text is empty if they use none, and if no GPU
        # is measured.
        in_use = _gpu_in_use(ignore_load) if gpu else ""
        # Isolated points of a session that does not measure the GPU see no GPU, so the
        # machine has the name of its processor.
        name = machine.name("cpu" if isolate and not gpu else "")
        # If the session measures although others use the GPU, all stamps say so.
        origin = Origin(
            machine={**sessions.this_machine(), "name": name},
            remark="; ".join(text for text in (remark, in_use) if text),
        )
        # `pack_if_due` writes the recording into the archive again, if the last time was
        # `PACK_PERIOD_S` ago. Without an archive it does nothing.
        with packing(out, pack) as pack_if_due:
            tables.refuse_other_machines(out, name)
            session = _Session(
                _Worker(make, out, origin),
                # No point starts after the deadline. The budget itself serves for advice: if
                # a point did not fit, the session says at its end which budget is enough.
                budget_s=budget_s,
                deadline_s=deadline_s,
                isolate=isolate,
                gpu=gpu,
                pack_if_due=pack_if_due,
                strict=strict,
                wording=wording,
            )
            session.run()
            if pack_tables:
                for directory in with_tables(out):
                    tables.pack(directory)
    return out


def _gpu_in_use(ignore_load: bool) -> str:
    """Return in words which GPU others use, or "" if they use none.

    Raises UserError if they use one, unless ``ignore_load`` says that this is no obstacle.
    """
    in_use = vitals.gpu_in_use()
    if in_use and not ignore_load:
        raise UserError(
            f"nothing is measured: {in_use}; wait, choose another GPU, or measure "
            "all the same with --ignore-load"
        )
    return in_use


def _about(seconds: float) -> str:
    """Return a rough duration in words: in minutes, or in seconds if it is below a minute."""
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def estimate(make: MakePoints, out: Path, budget_s: float = math.inf) -> str:
    """Return a listing of the points whose tables a directory lacks.

    A point is a measurement with tables of its own.

    Parameters
    ----------
    make : callable
        Returns the points, as `ddlkit.measure.session.MakePoints`.
    out : Path
        The directory of the session.
    budget_s : float, optional
        How long the session may measure, in seconds. By default it is not limited.

    Returns
    -------
    str
        A line for each missing point with its expected duration, and a line for all. If
        not all can be measured within the budget, the last line says how many can.

    Raises
    ------
    UserError
        If a table is damaged.
    """
    # The number of the session is part of the names of a few tables only. Which number
    # it is makes no difference to the listing. Points get the absolute path of the
    # directory, as in `run_session`. Below, the listing names ``out`` as the user gave it.
    sections = make(out=out.resolve(), session=1)
    # Opening and closing points are those that a session measures before and after all
    # others, the body. They serve the body, and are both listed behind it.
    points = [*sections.body, *sections.opening, *sections.closing]
    # If there is no point, this machine lacks what is needed for all that was asked for. What it
    # lacks was said when the points were made.
    if not points:
        return "nothing of this can be measured on this machine"
    missing = [point for point in points if not point.done(out)]
    if not missing:
        return f"{MEASURING.counted(len(points))} done already: nothing is left to do"
    lines = []
    for point in missing:
        line = f"{point.key:<50} {point.estimate_s:>7.0f} s  {point.note}"
        lines.append(line.rstrip())
    rest = _about(sum(point.estimate_s for point in missing))
    progress = f"{len(points) - len(missing)} of {MEASURING.counted(len(points))} done"
    lines.append(f"{progress} in {out}; the rest takes about {rest}")
    # Seconds from the start until each point ends, in the order of the listing. The number
    # within the budget is approximate, because the session begins with the opening points.
    ends_s = itertools.accumulate(point.estimate_s for point in missing)
    n_in_budget = sum(end_s <= budget_s for end_s in ends_s)
    if n_in_budget < len(missing):
        budget = f"{budget_s / 60:.3g} min" if budget_s >= 60 else f"{budget_s:.3g} s"
        lines.append(
            f"the budget of {budget} is enough for about {n_in_budget} of "
            f"{MEASURING.counted(len(missing))}; the next run continues with the rest"
        )
    return "\n".join(lines)


# -- the session -----------------------------------------------------------------------


class _Sections(NamedTuple):
    """The rows of the points of a session, as a `PointList` has its points.

    A row says what became of a point. Before the point is measured, the row has the
    expected duration, and its outcome follows from the tables that exist: it is pending
    if they are missing.
    """

    body: list[Row]
    opening: list[Row]
    closing: list[Row]


@dataclass
class _Session:
    """One call of `run_session`.

    A point is a measurement with tables of its own, and its row says what became of it.

    Attributes
    ----------
    worker_here : _Worker
        The worker of this process. It measures the points, unless the session is isolated.
        Then a child process gets a copy of it.
    budget_s, deadline_s : float
        The seconds that the session may take, and when they end.
    isolate, gpu : bool
        Whether a child process measures the points, and whether the GPU is measured.
    pack_if_due : callable
        Packs all tables into an archive if the last time was `PACK_PERIOD_S` ago.
    strict : bool
        Whether the session fails at its end if a point failed.
    wording : Wording
        How the lines of the session call its points.
    rows : dict of str to Row
        The row of each point by the point's key.
    row_before_start : Row, optional
        The row that the point being measured had before it began. None while no point is
        measured.
    sampler : Sampler, optional
        Samples vitals, such as the machine's load. None unless the session is isolated.
    """

    worker_here: _Worker
    budget_s: float
    deadline_s: float
    isolate: bool
    gpu: bool
    pack_if_due: Callable[[], None]
    strict: bool = False
    wording: Wording = MEASURING
    rows: dict[str, Row] = field(default_factory=dict)
    row_before_start: Row | None = None
    sampler: vitals.Sampler | None = None

    def run(self) -> None:
        """Measure until nothing is left to do or time is up."""
        if not self.isolate:
            self.measure_all(self.worker_here)
            return
        child = _IsolatedWorker(self)
        # `closing` ends the child process, also after an interrupt.
        with vitals.Sampler(gpu=self.gpu) as sampler, contextlib.closing(child):
            # Each save of the outcomes from now on also saves what was sampled so far.
            self.sampler = sampler
            try:
                self.measure_all(child)
            finally:
                # The row that the point under way had before it began. It is None if no point
                # is under way, as after a session that was not interrupted.
                row = self.row_before_start
                if row:
                    # An interrupt is no fault of the point, so the point counts as not
                    # reached.
                    self.rows[row.key] = row
                # A session that is not isolated, as above, saves no outcomes.
                self._save()

    def measure_all(self, worker: _Worker | _IsolatedWorker) -> None:
        """Have a worker measure what is missing, and print what could not be measured.

        Opening and closing points are measured before and after all others, the body.

        Raises
        ------
        UserError
            If a point that is not isolated fails, if nothing at all was measured, and in a
            strict session if any point failed.
        """
        sections = self._to_measure(worker.make_rows())
        # Until all other points are done, `RESERVE` times the expected duration of the
        # closing points is kept free for these.
        reserved_s = RESERVE * sum(row.estimate_s for row in sections.closing)
        any_begun = False
        for row in (*sections.opening, *sections.body):
            # Without a budget the time that is left is infinite.
            left_s = self.deadline_s - reserved_s - time.monotonic()
            if self._measure_in_time(worker, row, left_s, reserved_s):
                any_begun = True
        for row in sections.closing:
            # The closing points show how far the machine has drifted in the meantime.
            # So they may run beyond the budget, if any other point was begun.
            overtime_s = OVERTIME_S if any_begun else 0.0
            left_s = self.deadline_s + overtime_s - time.monotonic()
            if self._measure_in_time(worker, row, left_s):
                any_begun = True
        # The report raises an error if nothing at all was measured, and in a strict session
        # if any point failed. A larger budget that it advises includes the reserved time.
        self._report(reserved_s)

    def _measure_in_time(
        self,
        worker: _Worker | _IsolatedWorker,
        row: Row,
        left_s: float,
        reserved_s: float = 0.0,
    ) -> bool:
        """Have a worker measure a point, and return whether the measurement was begun.

        A point is not begun if its table is damaged, or if its expected duration is
        longer than ``left_s``, which is what is left of the budget besides the ``reserved_s``
        that are kept free for the closing points. The outcome is kept in ``rows`` in any case.
        """
        if row.outcome == sessions.FAILED:
            # A point that has failed before it is measured has a damaged table, which the
            # user has to remove.
            self._record_outcome(row)
            return False
        if row.estimate_s > left_s:
            reason = _why_no_time(row.estimate_s, left_s, reserved_s)
            # At its end the session prints all such points together.
            self.rows[row.key] = replace(row, outcome=sessions.NO_TIME, reason=reason)
            return False
        # A point that this machine can only refuse is expected to take 0 s, and is not
        # announced.
        if row.estimate_s:
            # A point may take much longer than expected on a machine that others use.
            expected = format_seconds(row.estimate_s)
            say(
                f"{self.wording.doing} {row.key}, about {expected} if the machine is idle"
            )
        # If an isolated session is interrupted, `run` puts this row back, so that the point
        # counts as not reached.
        self.row_before_start = row
        self.rows[row.key] = replace(row, outcome=sessions.STARTED)
        # Saved now, the table of outcomes says that the point was begun, whatever may
        # end this process in the meantime.
        self._save()
        self._record_outcome(worker.measure(row))
        return True

    def _to_measure(self, sections: _Sections) -> _Sections:
        """Return the rows of the points that are not measured yet, in their order.

        ``sections`` has the rows of all points, as they follow from the tables that exist.
        These rows are kept in ``rows`` and saved. If the tables of a point exist, the row that
        an earlier session recorded takes the place of its row.
        """
        body, opening, closing = sections
        # If no point of the body will be measured, opening and closing points are left out,
        # because they only serve the body. Pending points are measured unless this machine
        # can only refuse them, as a point for two GPUs where there is one. Such a point is
        # expected to take 0 s. A point whose table is damaged is failed, and not pending.
        pending = [row for row in body if row.outcome == sessions.PENDING]
        if not any(row.estimate_s > 0 for row in pending):
            opening = []
            closing = []
        earlier = self._earlier_rows()
        for row in (*opening, *body, *closing):
            self.rows[row.key] = _with_earlier_outcome(row, earlier.get(row.key))
        self._save()
        # Points whose table is damaged are returned, too, so that the user is told of them
        # when their turn comes. `_measure_in_time` does not begin them.
        missing = [row for row in body if row.outcome not in HAVE_TABLES]
        present = [row.key for row in body if row.outcome in HAVE_TABLES]
        if present:
            say(f"already measured: {', '.join(present)}")
        to_go = [*opening, *missing, *closing]
        to_go_s = sum(row.estimate_s for row in to_go)
        if to_go_s:
            say(f"{self.wording.counted(len(to_go))} to do, about {_about(to_go_s)}")
        # A point that failed in an earlier session may fail again, and comes last.
        faulty = {key for key, row in earlier.items() if row.outcome in sessions.FAULTS}
        first = [row for row in missing if row.key not in faulty]
        last = [row for row in missing if row.key in faulty]
        return _Sections([*first, *last], opening, closing)

    def _earlier_rows(self) -> dict[str, Row]:
        """Return the rows that an earlier session left, by the keys of their points."""
        path = self.worker_here.out / "outcomes.csv"
        if not store.has_table(path):
            return {}
        records = store.load_table(path, "outcomes").to_dict("records")
        rows = [Row(**cells) for cells in records]
        return {row.key: row for row in rows}

    def _record_outcome(self, row: Row) -> None:
        """Keep what became of a point, save it, and print a line of progress.

        Raises
        ------
        UserError
            If the point failed and is not isolated.
        """
        self.rows[row.key] = row
        self.row_before_start = None
        self._save()
        self.pack_if_due()
        if row.outcome == sessions.FAILED and not self.isolate:
            raise UserError(f"{row.key}: {row.reason}")
        outcome = row.outcome
        if outcome == sessions.MEASURED:
            outcome = self.wording.done
        line = f"[{self._progress()}] {row.key}: {outcome}"
        if row.seconds:
            line += f" in {format_seconds(row.seconds)}"
        if row.reason:
            line += f": {row.reason}"
        say(line)

    def _progress(self) -> str:
        """Return how many of all points have tables, as in "3/12", and the time left.

        Without a budget the time is left out.
        """
        n_with_tables = sum(row.outcome in HAVE_TABLES for row in self.rows.values())
        progress = f"{n_with_tables}/{len(self.rows)}"
        left_s = self.deadline_s - time.monotonic()
        # Without a budget, `left_s` is infinite. It is negative if a point ran beyond the
        # budget.
        if math.isfinite(left_s):
            progress += f", {format_seconds(max(0.0, left_s))} of the budget left"
        return progress

    def _save(self) -> None:
        """Save the table of outcomes and the vitals, if the session is isolated.

        Vitals are samples of the machine's load, clocks, temperature and power. Points of an
        isolated session are measured in a child process, and a point that fails or is slow does
        not end the session. The two tables say afterwards what happened. A session that is not
        isolated ends at its first failure, takes no vitals and needs neither table.
        """
        if not self.rows or not self.isolate:
            return
        out = self.worker_here.out
        save = self.worker_here.origin.save
        outcomes = pd.DataFrame([asdict(row) for row in self.rows.values()])
        save(out / "outcomes.csv", outcomes, "outcomes")
        sampled = self.sampler.frame() if self.sampler else pd.DataFrame()
        # Vitals explain how long points took. So they are saved once the table of outcomes,
        # which also has the points of earlier sessions, has the time of some point.
        has_times = any(row.seconds for row in self.rows.values())
        if len(sampled) and has_times:
            number = self.worker_here.session_number
            save(out / f"vitals-s{number}.csv.gz", sampled, "vitals")

    def _report(self, reserved_s: float) -> None:
        """Print how many points are done, and which are missing with their outcomes.

        ``reserved_s`` is the part of the budget that is kept free for the closing points.

        Raises
        ------
        UserError
            If nothing at all was measured, and in a strict session if a point failed.
        """
        by_outcome: dict[str, list[str]] = {}
        for row in self.rows.values():
            by_outcome.setdefault(row.outcome, []).append(row.key)
        # The points that have tables are taken out of `by_outcome` and counted. What
        # remains is missing.
        n_with_tables = sum(len(by_outcome.pop(outcome, ())) for outcome in HAVE_TABLES)
        say(f"{n_with_tables} of {self.wording.counted(len(self.rows))} done")
        for outcome, keys in by_outcome.items():
            say(f"missing, {outcome}: {', '.join(keys)}")
        # The advice for points for which no time was left, empty without such points.
        remedy = self._how_to_continue(reserved_s)
        if self.rows and not n_with_tables:
            # No point has tables, and the first one is named as an example.
            row = next(iter(self.rows.values()))
            advice = f": {remedy}" if row.outcome == sessions.NO_TIME else ""
            raise UserError(
                f"nothing could be measured: {row.key}: {row.outcome}, {row.reason}{advice}"
            )
        if remedy:
            # One of the points without time is enough to show how much time was lacking.
            key = by_outcome[sessions.NO_TIME][0]
            say(f"{key}: {self.rows[key].reason}: {remedy}")
        if self.strict:
            self._refuse_failures()

    def _how_to_continue(self, reserved_s: float) -> str:
        """Return the advice for points for which no time was left, or "" without such points.

        ``reserved_s`` is the part of the budget that is kept free for the closing points.
        """
        no_time = [row for row in self.rows.values() if row.outcome == sessions.NO_TIME]
        if not no_time:
            return ""
        longest = max(no_time, key=lambda row: row.estimate_s)
        # The same budget again is of no use for a point that is longer than the budget. A
        # budget that is enough has `RESERVE` times the expected duration of the longest point
        # and of the closing points. For the latter, `reserved_s` includes the factor already.
        enough_s = math.ceil(RESERVE * longest.estimate_s + reserved_s)
        if self.budget_s < enough_s:
            closing = " and the closing measurements are" if reserved_s else " is"
            return (
                f"run the same command again with --budget {enough_s}s or more, which is "
                f"{RESERVE:g} times as long as the longest of those missing, {longest.key},"
                f"{closing} expected to take"
            )
        return "run the same command again to continue"

    def _refuse_failures(self) -> None:
        """Raise UserError if a point was not measured in full, although it could have been.

        A point that is unavailable, or for which no time was left, is no failure. The
        error names the first failure.
        """
        without_failure = (
            sessions.MEASURED,
            sessions.UNAVAILABLE,
            sessions.NO_TIME,
        )
        for row in self.rows.values():
            if row.outcome not in without_failure:
                raise UserError(f"{row.key}: {row.outcome}: {row.reason}")


def _why_no_time(estimate_s: float, left_s: float, reserved_s: float) -> str:
    """Return why a point is not begun that is expected to take longer than the time left.

    ``left_s`` is what is left of the budget besides the ``reserved_s`` that are kept free for
    the closing points. It is negative if less than ``reserved_s`` is left of the budget.
    """
    # One number is rounded up and the other one down, so that they do not look equal.
    needed = math.ceil(estimate_s)
    left = max(0, math.floor(left_s))
    reason = f"it would take about {needed} s, but only {left} s were left when its turn came"
    # The last line of progress gave all that was left of the budget, including the time that is
    # kept, so the reason names this time, too. If ``left_s`` is negative, only a part of
    # ``reserved_s`` or nothing is left.
    kept = math.floor(reserved_s + min(0.0, left_s))
    if kept > 0:
        reason += f", besides {kept} s that are kept for the closing measurements"
    return reason


def _with_earlier_outcome(row: Row, earlier_row: Row | None) -> Row:
    """Return the earlier row of a point if its tables exist now and did then, or else ``row``.

    ``row`` is made from the tables of the point, and only says whether they exist.
    ``earlier_row``, which an earlier session recorded, also says how long the measurement
    took, and whether the point was measured only in part. It is None if there is none.
    """
    if earlier_row is None:
        return row
    if row.outcome in HAVE_TABLES and earlier_row.outcome in HAVE_TABLES:
        # The settings of this session may give the point another expected duration.
        return replace(earlier_row, estimate_s=row.estimate_s)
    return row


# -- who measures ----------------------------------------------------------------------


@dataclass
class _Worker:
    """Makes the points of a session, and measures them in the process that asks.

    ``make`` returns the points. ``out`` is the directory of the session, and ``origin``
    what the stamps of all its tables say. A stamp says where the rows of a table come from.
    ``points`` has the points by their keys, once `make_rows` has made them.
    """

    make: MakePoints
    out: Path
    origin: Origin
    points: dict[str, Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Each session has tables of its own, such as those of drift and of vitals.
        # Their names carry the number of the session, as in vitals-s2.csv.gz. This
        # session gets the next number.
        names = " ".join(path.name for path in store.list_tables(self.out, "*-s*.csv*"))
        numbers = [int(number) for number in re.findall(r"-s(\d+)[-.]", names)]
        self.session_number = 1 + max(numbers, default=0)

    def make_rows(self) -> _Sections:
        """Make the points, and return their rows.

        A row is pending if a table of its point is missing. Otherwise the point is
        measured, or failed if a table is damaged. Opening and closing points are those that
        are measured before and after all others, the body.
        """
        made = self.make(out=self.out, session=self.session_number)
        points = [*made.body, *made.opening, *made.closing]
        self.points = {point.key: point for point in points}
        return _Sections(
            [point.row_from_tables(self.out) for point in made.body],
            [point.row_from_tables(self.out) for point in made.opening],
            [point.row_from_tables(self.out) for point in made.closing],
        )

    def measure(self, row: Row) -> Row:
        """Measure a point, and return what became of it."""
        return self.points[row.key].measure_and_save(self.out, self.origin)


class _IsolatedWorker:
    """Has a child process measure the points. After a death it starts another child.

    The child gets orders and answers through a pipe, as `serve` describes. ``_pipe`` is
    this process's end of the pipe, and ``_process`` the child, or None if none runs.
    """

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the child, if there is one."""
        if self._process:
            end([self._process])
            self._process = None

    def make_rows(self) -> _Sections:
        """Start a child that makes the points, and return the rows of these points.

        The session calls this once. `measure` calls it after the death of a child.

        Raises
        ------
        UserError
            If the child cannot make the points.
        """
        self._start()
        # The child gets the worker of this process as its own, and answers with the rows
        # or, after a mistake of the user, with the text of the error. If it does not answer
        # in time, the error is "nothing is measured: did not go on within ... before its
        # first point".
        try:
            answer = self._ask(
                self._session.worker_here, allowed_s=START_S, failure="did not go on"
            )
        except _WorkerLost as error:
            answer = f"nothing is measured: {error} before its first point"
        # A text instead of rows is an error.
        if isinstance(answer, str):
            self.close()
            raise UserError(answer)
        sections: _Sections = answer
        return sections

    def _start(self) -> None:
        """Start a child that gets its orders through a pipe."""
        environment = child_environment()
        if not self._session.gpu:
            # The empty list hides all GPUs from the child.
            environment["CUDA_VISIBLE_DEVICES"] = ""
        own_end, childs_end = socket.socketpair()
        # `detach` takes the file descriptor from the socket, because the connection will
        # close it.
        self._pipe = Connection(own_end.detach())
        # This process closes the child's end after the start. Otherwise it would never
        # see the end of the pipe.
        with childs_end:
            program = f"from {__name__} import serve; serve({childs_end.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=environment,
                stdin=subprocess.DEVNULL,
                # Standard error: what libraries print is not a result.
                stdout=2,
                pass_fds=[childs_end.fileno()],
                # Ctrl-C then reaches this process alone, which ends the child.
                start_new_session=True,
            )

    def measure(self, row: Row) -> Row:
        """Have the child measure a point, and return its row with what became of it.

        The point fails if no child can be started. It counts as killed if the child
        dies or hangs. If the session's time and the overtime end while the child measures,
        the outcome is that no time was left.
        """
        if not self._process:
            try:
                # This starts a new child after the death of one. The returned rows are
                # not needed: `_Session.rows` has those of the first child, with all
                # outcomes since then.
                self.make_rows()
            except UserError as error:
                # The next point may find a GPU that has recovered in the meantime.
                time.sleep(PAUSE_S)
                return replace(row, outcome=sessions.FAILED, reason=str(error))
        # A child that takes longer than this counts as hung. Even a point that is expected
        # to be short gets `HUNG_S`, because CUDA, NCCL and a first kernel need seconds.
        allowed_s = max(HUNG_S, HUNG_FACTOR * row.estimate_s)
        measured_row: Row
        try:
            measured_row, gpu_is_usable = self._ask(
                row, allowed_s=allowed_s, failure="did not end"
            )
        except _WorkerLost as error:
            # A child that dies while it writes a table leaves an unfinished file.
            files.remove_unfinished(self._session.worker_here.out)
            self.close()
            return replace(row, outcome=error.outcome, reason=str(error))
        if not gpu_is_usable:
            # CUDA works again only in a new process, which the next point starts.
            self.close()
        return measured_row

    def _ask(self, request: object, *, allowed_s: float, failure: str) -> Any:
        """Send the child a request, and return its answer.

        If the child does not answer within ``allowed_s``, the error says ``failure`` and
        this time, as in "did not end within 60 s".

        Raises
        ------
        _WorkerLost
            If the child dies, if it does not answer within ``allowed_s``, or if it still
            runs `OVERTIME_S` after the end of the session's budget.
        """
        assert self._process, "a child was started before"
        # If the pipe breaks, the child is dying, and its exit status below says how.
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(request)
            self._wait_for_answer(self._process, allowed_s, failure)
            # The child may have answered just before it died.
            if self._pipe.poll():
                return self._pipe.recv()
        status = self._process.wait()
        raise _WorkerLost(f"the process that measured it {how_it_ended(status)}")

    def _wait_for_answer(
        self, child: subprocess.Popen[bytes], allowed_s: float, failure: str
    ) -> None:
        """Wait until the child has answered or has died.

        The arguments and errors are those of `_ask`. The death of the child raises no
        error here.
        """
        give_up_s = time.monotonic() + allowed_s
        overtime_ends_s = self._session.deadline_s + OVERTIME_S
        # `poll` of the pipe waits for an answer for `POLL_S`. `poll` of the child returns
        # None while the child runs. It is asked as well, because children of a child that
        # has died may still hold the pipe open.
        while not self._pipe.poll(POLL_S) and child.poll() is None:
            # The tables of earlier points may not be in the archive yet, if packing was not due
            # when they were written. They are not to wait for a point that takes long.
            self._session.pack_if_due()
            if time.monotonic() > overtime_ends_s:
                reason = "still ran when the budget was over"
                raise _WorkerLost(reason, sessions.NO_TIME)
            if time.monotonic() > give_up_s:
                limit = format_seconds(allowed_s)
                raise _WorkerLost(f"{failure} within {limit}")


class _WorkerLost(Exception):
    """The process that measures a point has died or has to be ended.

    ``outcome`` is what this makes of the point.
    """

    def __init__(self, reason: str, outcome: str = sessions.KILLED) -> None:
        super().__init__(reason)
        self.outcome = outcome


def serve(pipe: int) -> None:
    """Be the child process of a session, which measures what the parent names.

    A point is one measurement, and its row says what became of it. These are sent through
    the pipe:

    1. Parent to child: the worker, which makes the points.
    2. Child to parent: the rows of all points, as `_Sections`, or the text of an error.
    3. Parent to child: the row of a point that is to be measured.
    4. Child to parent: the row with the outcome, and whether the GPU still works.

    Steps 3 and 4 are repeated until the parent closes the pipe. This function does not
    return.

    Parameters
    ----------
    pipe : int
        The file descriptor of the child's end of the pipe.
    """
    die_with_parent()
    # SIGTERM becomes an exception, so that a measurement can clean up.
    trap(signal.SIGTERM)
    parent = Connection(pipe)
    worker: _Worker = parent.recv()
    # When the parent needs this child no more, it closes the pipe. `recv` then raises
    # EOFError, and `send` raises OSError.
    with contextlib.suppress(EOFError, OSError):
        try:
            parent.send(worker.make_rows())
        except UserError as error:
            # The parent then closes the pipe, which ends the loop below.
            parent.send(str(error))
        while True:
            measured_row = worker.measure(parent.recv())
            parent.send((measured_row, _gpu_is_usable()))
    # After a fault CUDA's own clean-up may hang, which sys.exit would run.
    os._exit(0)


def _gpu_is_usable() -> bool:
    """Return whether CUDA still works in this process.

    After a fault CUDA refuses all work. After a failed capture of a graph, torch leaves
    the capture's stream as the current one, and its random numbers fail for good.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True  # nothing that this process has measured used CUDA
    try:
        # After a fault this raises a RuntimeError.
        torch.cuda.synchronize()
        # This is no part of the test. Other processes can then use the memory that torch
        # holds, and that nothing refers to any more.
        torch.cuda.empty_cache()
        # A failed capture may have spoilt the generator of random numbers, even if the
        # default stream was set again since then. Drawing a number then raises a
        # RuntimeError.
        torch.rand(1, device="cuda")
        return bool(torch.cuda.current_stream() == torch.cuda.default_stream())
    except RuntimeError:
        return False


# -- the packed recording --------------------------------------------------------------


@contextlib.contextmanager
def packing(out: Path, file: Path | None) -> Iterator[Callable[[], None]]:
    """Keep an archive of a recording up to date while the recording goes on.

    If the archive exists and the directory has no tables, the archive is unpacked first.

    Parameters
    ----------
    out : Path
        The directory.
    file : Path or None
        The archive; None for no archive.

    Yields
    ------
    callable
        Takes nothing, and writes the archive again if `PACK_PERIOD_S` have passed since
        the last time.

    Raises
    ------
    UserError
        If the file is damaged or belongs to another recording, if it holds tables that
        the directory lacks, and if it cannot be written at the beginning or the end.
    """
    if file is None:
        yield lambda: None
        return
    # An earlier session may have died while it wrote the archive.
    files.remove_unfinished(file.parent, file.name)
    restore(out, file)
    # If the archive cannot be written, this call raises before anything is measured.
    pack_into(out, file)
    due_s = time.monotonic() + PACK_PERIOD_S

    def pack_if_due() -> None:
        """Write all tables in ``out`` into the archive again, if the time ``due_s`` has come.

        This also sets the next time. A failure is printed, and does not end the session.
        """
        nonlocal due_s
        if time.monotonic() < due_s:
            return
        due_s = time.monotonic() + PACK_PERIOD_S
        try:
            pack_into(out, file)
        except UserError as error:
            say(f"not packed: {error}")

    try:
        yield pack_if_due
    finally:
        # What was measured since the last pack, also before a failure, is packed now.
        pack_into(out, file)


def pack_into(out: Path, file: Path) -> None:
    """Write every table and stamp of a recording into one archive.

    Parameters
    ----------
    out : Path
        The directory of the recording.
    file : Path
        The archive, a .tar.gz file.

    Raises
    ------
    UserError
        If the archive cannot be written.
    """

    # Whoever unpacks the archive as root should own the files, and the archive should
    # not tell who recorded it.
    def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = 0
        member.gid = 0
        member.uname = ""
        member.gname = ""
        return member

    # The archive is made in memory, and then replaces the file at once. At this level of
    # compression, 4 MB of tables take about a tenth of a second.
    packed = io.BytesIO()
    subdirectories = sorted(path for path in out.rglob("*") if path.is_dir())
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for directory in (out, *subdirectories):
            # While this block holds the lock, nobody writes to the directory. So a
            # table is packed with its own stamp, and not with that of a newer table.
            with files.writing_in(directory):
                for path in _tables_and_stamps(directory):
                    name = str(path.relative_to(out.parent))
                    archive.add(path, name, filter=without_owner)
    files.atomic_write(file, packed.getvalue())


def _refuse_other_recordings(members: Iterable[Path], out: Path, file: Path) -> None:
    """Raise UserError if an archive has files of another recording than ``out``.

    ``members`` are the paths of the files in the archive, and ``file`` is the archive. Each
    path begins with the name of a recording's directory.
    """
    other_recordings = {path.parts[0] for path in members} - {out.name}
    if other_recordings:
        names = ", ".join(sorted(other_recordings))
        raise UserError(
            f"{file} holds a recording of {names}, not of {out.name}: name another file"
        )


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the files of an archive into a folder and its subfolders.

    Raises TarError if a member is no plain file, or would lie outside of the folder. Python
    itself can refuse such members only from version 3.11.4 on.
    """
    members = archive.getmembers()
    for member in members:
        path = Path(member.name)
        if not member.isfile() or path.is_absolute() or ".." in path.parts:
            raise tarfile.TarError(f"{member.name} is no file of a recording")
    for member in members:
        content = archive.extractfile(member)
        # Only members that are no files have no content.
        assert content is not None
        path = folder / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.read())
        os.utime(path, (member.mtime, member.mtime))


def restore(out: Path, file: Path) -> None:
    """Unpack an archive into a directory that has neither tables nor stamps.

    A directory that has some is left as it is.

    Parameters
    ----------
    out : Path
        The directory of the recording.
    file : Path
        The archive, which need not exist.

    Raises
    ------
    UserError
        If the archive is damaged, if it is of another recording, or if it holds tables
        that the directory lacks and that packing would therefore lose.
    """
    if not file.exists():
        return
    try:
        with tarfile.open(file, "r:gz") as archive:
            members = [Path(name) for name in archive.getnames()]
            _refuse_other_recordings(members, out, file)
            if not _tables_and_stamps(out):
                # The paths of the members begin with the name of `out`, so they are
                # unpacked into the folder above.
                _unpack(archive, out.parent)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(
            f"{file}: is not a whole archive ({error}): name another file"
        ) from error
    # If the directory was left as it is, each table of the archive must be in it,
    # because the next pack overwrites the archive. Tables are called x.csv or x.csv.gz, and
    # their stamps x.json.
    packed_tables = [path for path in members if ".csv" in path.name]
    lost = [path for path in packed_tables if not store.has_table(out.parent / path)]
    if lost:
        raise UserError(
            f"{file} holds {len(lost)} tables that {out} lacks, "
            f"such as {lost[0].name}: unpack it, or name another file"
        )


def with_tables(folder: Path) -> list[Path]:
    """Return which of a directory and its subdirectories hold tables.

    Parameters
    ----------
    folder : Path
        The directory.

    Returns
    -------
    list of Path
        The directories in order, without hidden ones. The tables of each are packed on
        their own.
    """
    parents = {path.parent for path in folder.rglob("*.csv*")}  # .csv and .csv.gz
    return sorted(path for path in parents if not path.name.startswith("."))


def _tables_and_stamps(directory: Path) -> list[Path]:
    """Return the tables and stamps of a directory, but no lock or unfinished file."""
    suffixes = (".csv", ".csv.gz", ".json", ".jsonl")
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file() and path.name.endswith(suffixes)
    )
