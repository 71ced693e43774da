"""The engine: a session of points, measured in this process or in one whose death costs one point.

This one keeps the list of outcomes, samples vitals, says how things go, and packs what there is; the other
measures the points that it names. No torch here: nothing must disturb what is measured.
"""

from __future__ import annotations

import contextlib
import io
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.jobs import child_environment, die_with_parent, ending, trap, vitals
from ddlkit.jobs.launch import end
from ddlkit.measure import session as sessions
from ddlkit.measure.session import THERE, MakePoints, Origin, Point, Row, say
from ddlkit.store import files, machine, tables
from ddlkit.store.tables import machines_in

OVERTIME_S = 20.0  # what points may run over the budget
RESERVE = (
    2.0  # times what the closing points are expected to take is kept free for them
)
HUNG_FACTOR = 5.0  # a point that takes this many times what was expected hangs,
HUNG_S = 60.0  # but not before this long: CUDA, NCCL and a first kernel need seconds, not a minute
START_S = (
    120.0  # what a process may take until its first point: a cold disk holds torch back
)
PAUSE_S = 5.0  # after a death a GPU needs a while, until which no process can start
POLL_S = 0.2
EVERY_S = 20.0  # between two packs


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
) -> Path:
    """Measure what of the points is not in ``out`` yet; returns the directory. What was measured stays.

    budget_s : after which nothing new is started; isolate : whether points run in a child process, and
        ``outcomes.csv`` keeps what becomes of each; otherwise the first that fails ends the session
    gpu : whether the GPU is measured; isolated points without it see none, and have the processor's name
    pack : file that holds the whole recording at any time, and from which it goes on; remark : of all stamps
    pack_tables : whether all tables of one kind are put into one file at the end

    Raises UserError when others use the GPU, when a point fails that is not isolated, when nothing at all
    could be measured, and when the directory holds another machine's tables or is written elsewhere.
    """
    deadline_s, out = time.monotonic() + budget_s, out.resolve()
    with store.lock(out / ".lock"):
        files.remove_unfinished(out)
        in_use = vitals.gpu_in_use() if gpu else ""
        if in_use and not ignore_load:
            advice = (
                "wait, choose another GPU, or measure all the same with --ignore-load"
            )
            raise UserError(f"nothing is measured: {in_use}; {advice}")
        name = machine.name("" if gpu or not isolate else "cpu")
        remark = "; ".join(filter(None, (remark, in_use)))
        origin = Origin(
            machine={**sessions.this_machine(), "name": name}, remark=remark
        )
        with packing(out, pack) as keep:
            if others := machines_in(out) - {name}:
                theirs = f"{out} holds a recording of {' and '.join(sorted(others))}"
                raise UserError(f"{theirs}, this is {name}: choose another directory")
            _Session(_Here(make, out, origin), deadline_s, isolate, gpu, keep).run()
            if pack_tables:
                for directory in with_tables(out):
                    tables.pack(directory)
    return out


def estimate(make: MakePoints, out: Path) -> str:
    """Return what is not in ``out`` yet, and how long it takes. Raises UserError for a damaged table."""
    every = [
        point for section in make(out=out.resolve(), session=1) for point in section
    ]
    missing = [point for point in every if not point.done(out)]
    lines = [
        f"{each.key:<50} {each.estimate_s:>7.0f} s  {each.note}".rstrip()
        for each in missing
    ]
    rest_min = sum(point.estimate_s for point in missing) / 60
    there = f"{len(every) - len(missing)} of {len(every)} points are there"
    return "\n".join([*lines, f"{there}; the rest takes about {rest_min:.1f} min"])


@dataclass
class _Session:
    """One call of `run_session`. rows : of every point, by its key; running : the one being measured"""

    here: _Here
    deadline_s: float
    isolate: bool
    gpu: bool
    keep: Callable[[], None]
    rows: dict[str, Row] = field(default_factory=dict)
    running: Row | None = None
    sampler: vitals.Sampler | None = None

    def run(self) -> None:
        """Measure until nothing is left to do or time is over. Raises UserError where nothing is there."""
        if not self.isolate:
            return self.take_all(self.here)
        child = _Child(self)
        with vitals.Sampler(gpu=self.gpu) as self.sampler, contextlib.closing(child):
            try:
                self.take_all(child)
            finally:
                if self.running:  # we are ended, through no fault of it
                    self.rows[self.running.key] = self.running
                self._save()

    def take_all(self, worker: _Here | _Child) -> None:
        """Have the worker take what is missing, most valuable first. Raises UserError as `_report`."""
        body, opening, closing = self._missing(*worker.listed())
        reserved_s = RESERVE * sum(row.estimate_s for row in closing)
        # After a first point, closing ones are worth the overtime: drift shows only by their times.
        begun = False
        for row in (*opening, *body, *closing):
            spare_s = OVERTIME_S * begun if row in closing else -reserved_s
            left_s = self.deadline_s + spare_s - time.monotonic()
            if row.outcome == sessions.FAILED:  # its table is damaged
                self._close(row)
            elif row.estimate_s > left_s:
                why = f"would take about {row.estimate_s:.0f} s, {max(0.0, left_s):.0f} s were left"
                self.rows[row.key] = replace(row, outcome=sessions.NO_TIME, reason=why)
            else:
                begun, self.running = True, row
                self.rows[row.key] = replace(row, outcome=sessions.STARTED)
                self._save()  # whatever happens to us, this point was begun
                self._close(worker.take(row))
        self._report()

    def _missing(
        self, body: list[Row], opening: list[Row], closing: list[Row]
    ) -> tuple[list[Row], list[Row], list[Row]]:
        """Return what is to be tried, and take in what an earlier call left of all points."""
        path = self.here.out / "outcomes.csv"
        frame = (
            store.load_table(path, "outcomes")
            if store.has_table(path)
            else pd.DataFrame()
        )
        earlier = {
            row.key: row for row in (Row(**cells) for cells in frame.to_dict("records"))
        }
        # What can only be refused, such as a second GPU's points where there is one, makes no session.
        if not any(
            row.outcome == sessions.PENDING and row.estimate_s > 0 for row in body
        ):
            opening, closing = [], []
        for row in (*opening, *body, *closing):
            was = earlier.get(row.key, row)
            partly = row.outcome in THERE and was.outcome in THERE
            self.rows[row.key] = (
                replace(was, estimate_s=row.estimate_s) if partly else row
            )
        self._save()
        missing = [row for row in body if row.outcome not in THERE]
        if there := [row.key for row in body if row not in missing]:
            say(f"already measured: {', '.join(there)}")
        if to_go_s := sum(row.estimate_s for row in (*opening, *missing, *closing)):
            say(f"{len(missing)} points to measure, about {to_go_s / 60:.1f} min")
        faulty = {key for key, row in earlier.items() if row.outcome in sessions.FAULTS}
        return sorted(missing, key=lambda row: row.key in faulty), opening, closing

    def _close(self, row: Row) -> None:
        """Take in that a point has come to an end. Raises UserError where that ends the session."""
        self.rows[row.key], self.running = row, None
        self._save()
        self.keep()
        if row.outcome == sessions.FAILED and not self.isolate:
            raise UserError(f"{row.key}: {row.reason}")
        there = sum(other.outcome in THERE for other in self.rows.values())
        left_s = self.deadline_s - time.monotonic()
        left = (
            f", {format_seconds(max(0.0, left_s))} left"
            if math.isfinite(left_s)
            else ""
        )
        took = f" in {format_seconds(row.seconds)}" if row.seconds else ""
        why = f": {row.reason}" if row.reason else ""
        say(f"[{there}/{len(self.rows)}{left}] {row.key}: {row.outcome}{took}{why}")

    def _save(self) -> None:
        if self.rows and self.isolate:
            out, save = self.here.out, self.here.origin.save
            save(
                out / "outcomes.csv",
                pd.DataFrame(map(asdict, self.rows.values())),
                "outcomes",
            )
            frame = self.sampler.frame() if self.sampler else pd.DataFrame()
            if len(frame) and any(row.seconds for row in self.rows.values()):
                save(out / f"vitals-s{self.here.number}.csv.gz", frame, "vitals")

    def _report(self) -> None:
        """Say what is missing, and why. Raises UserError where nothing is there."""
        missing: dict[str, list[str]] = {}
        for row in self.rows.values():
            missing.setdefault(row.outcome, []).append(row.key)
        there = sum(len(missing.pop(outcome, ())) for outcome in THERE)
        say(f"{there} of {len(self.rows)} points are there")
        for outcome, keys in missing.items():
            say(f"missing, {outcome}: {', '.join(keys)}")
        if self.rows and not there:
            row = next(iter(self.rows.values()))
            raise UserError(
                f"nothing could be measured; {row.key}: {row.outcome}, {row.reason}"
            )


@dataclass
class _Here:
    """The points of a session, measured in the process that asks."""

    make: MakePoints
    out: Path
    origin: Origin
    points: dict[str, Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = " ".join(path.name for path in store.list_tables(self.out, "*-s*.csv*"))
        # Of this call: tables of its own, such as drift's, are named by it.
        self.number = 1 + max(map(int, re.findall(r"-s(\d+)[-.]", names)), default=0)

    def listed(self) -> list[list[Row]]:
        """Return the rows of a `PointList`, as they are."""
        sections = self.make(out=self.out, session=self.number)
        self.points = {point.key: point for section in sections for point in section}
        return [[point.looked(self.out) for point in section] for section in sections]

    def take(self, row: Row) -> Row:
        """Return what became of a point."""
        return self.points[row.key].take(self.out, self.origin)


class _Child:
    """The same in a process that does not outlive the block; after one that dies comes another."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process:
            end([self._process])
            self._process = None

    def listed(self) -> list[list[Row]]:
        """Return what `_Here` does, of a new process. Raises UserError where it cannot."""
        hidden = {} if self._session.gpu else {"CUDA_VISIBLE_DEVICES": ""}
        ours, theirs = socket.socketpair()
        self._pipe = Connection(ours.detach())
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"from {__name__} import serve; serve({theirs.fileno()})",
                ],
                env={**child_environment(), **hidden},
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print is no result of ours
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            sections: list[list[Row]] | str = self._answer(
                self._session.here, START_S, "go on"
            )
        except _Lost as error:
            sections = f"nothing is measured: {error} before its first point"
        if isinstance(sections, str):
            self.close()
            raise UserError(sections)
        return sections

    def take(self, row: Row) -> Row:
        """Return what became of a point, be it that it killed its process, or hung, or none could start."""
        if not self._process:
            try:
                self.listed()
            except UserError as error:
                time.sleep(PAUSE_S)
                return replace(row, outcome=sessions.FAILED, reason=str(error))
        try:
            allowed_s = max(HUNG_S, HUNG_FACTOR * row.estimate_s)
            taken, usable = self._answer(row, allowed_s, "end")
        except _Lost as error:
            files.remove_unfinished(self._session.here.out)
            taken, usable = (
                replace(row, outcome=error.outcome, reason=str(error)),
                False,
            )
        if not usable:
            self.close()
        return taken

    def _answer(self, question: object, allowed_s: float, what: str) -> Any:
        """Return what the process answers. Raises _Lost where it dies, or takes too long to ``what``."""
        assert self._process
        give_up_s, late_s = (
            time.monotonic() + allowed_s,
            self._session.deadline_s + OVERTIME_S,
        )
        with contextlib.suppress(OSError, EOFError):
            self._pipe.send(question)
            # A process that is gone may have left children who still hold the pipe.
            while not self._pipe.poll(POLL_S) and self._process.poll() is None:
                self._session.keep()
                if time.monotonic() > late_s:
                    raise _Lost("still ran when the budget was over", sessions.NO_TIME)
                if time.monotonic() > give_up_s:
                    raise _Lost(f"did not {what} within {format_seconds(allowed_s)}")
            if self._pipe.poll():
                return self._pipe.recv()
        raise _Lost(f"the process that measured it {ending(self._process.wait())}")


class _Lost(Exception):
    """The process that measures died or has to be ended: ``outcome`` of its point."""

    def __init__(self, reason: str, outcome: str = sessions.KILLED) -> None:
        super().__init__(reason)
        self.outcome = outcome


def serve(pipe: int) -> None:
    """Be the process that measures what the parent names at that end of a pipe; does not return."""
    die_with_parent()
    trap(signal.SIGTERM)
    parent = Connection(pipe)
    here: _Here = parent.recv()
    with contextlib.suppress(EOFError, OSError):
        try:
            parent.send(here.listed())
        except UserError as error:
            parent.send(str(error))
        while True:
            parent.send((here.take(parent.recv()), _gpu_is_usable()))
    os._exit(0)  # not sys.exit: after a fault, CUDA's own clean-up may hang


def _gpu_is_usable() -> bool:
    """Return False after a fault, when CUDA refuses all work, and after a failed capture of a graph."""
    torch = sys.modules.get("torch")  # no point may have needed it at all
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # A capture that fails leaves its stream the current one, and random numbers as within it.
        return bool(torch.cuda.current_stream() == torch.cuda.default_stream())
    except RuntimeError:
        return False


@contextlib.contextmanager
def packing(out: Path, file: Path | None) -> Iterator[Callable[[], None]]:
    """Keep ``file`` up to date with ``out``, first go on from it; give what packs if EVERY_S have passed."""
    if file is None:
        yield lambda: None
        return
    files.remove_unfinished(file.parent, file.name)
    restore(out, file)
    pack_into(out, file)  # that the file cannot be written is better known now
    due_s = time.monotonic() + EVERY_S

    def keep() -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + EVERY_S
            try:
                pack_into(out, file)
            except UserError as error:
                say(f"not packed: {error}")

    try:
        yield keep
    finally:
        pack_into(out, file)


def pack_into(out: Path, file: Path) -> None:
    """Write every table and stamp below ``out`` into ``file``. Raises UserError where it is refused."""

    def of_nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
        return member.replace(uid=0, gid=0, uname="", gname="", deep=False)

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for directory in (
            out,
            *sorted(path for path in out.rglob("*") if path.is_dir()),
        ):
            with files.writing_in(
                directory
            ):  # a table with its own stamp, not with the next one
                for path in _kept(directory):
                    name = str(path.relative_to(out.parent))
                    archive.add(path, name, filter=of_nobody)
    files.atomic_write(file, packed.getvalue())


def restore(out: Path, file: Path) -> None:
    """Unpack ``file`` where ``out`` is empty. Raises UserError if it is damaged, another's, or holds more."""
    if not file.exists():
        return
    try:
        with tarfile.open(file, "r:gz") as archive:
            members = [Path(name) for name in archive.getnames()]
            if names := {path.parts[0] for path in members} - {out.name}:
                theirs = f"{', '.join(sorted(names))}, not of {out.name}"
                raise UserError(
                    f"{file} holds a recording of {theirs}: name another file"
                )
            if not _kept(out):
                archive.extractall(out.parent, filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(
            f"{file}: no whole archive ({error}): name another file"
        ) from error
    tables = [path for path in members if ".csv" in path.name]
    if lost := [path for path in tables if not store.has_table(out.parent / path)]:
        raise UserError(
            f"{file} holds {len(lost)} tables that {out} lacks, such as {lost[0].name}: "
            "unpack it, or name another file"
        )


def with_tables(folder: Path) -> list[Path]:
    """Return the directory and those below it that hold tables, each to be packed by itself."""
    parents = {path.parent for path in folder.rglob("*.csv*")}
    return sorted(path for path in parents if not path.name.startswith("."))


def _kept(directory: Path) -> list[Path]:
    """Return the tables and stamps in a directory; not a lock or half a file."""
    ends = (".csv", ".csv.gz", ".json", ".jsonl")
    return sorted(
        p for p in directory.iterdir() if p.is_file() and p.name.endswith(ends)
    )
