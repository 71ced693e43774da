"""The engine that measures: a session of points, in this process or in one whose death costs one point.

This process keeps the list of outcomes and says how things go. Where points are isolated, it starts the
process that measures (``python -m ddlkit.run.sessions.engine CONFIG``), which reports line by line, samples
the machine's vitals beside it and saves the table of outcomes; when the other one dies, the point that it
died of is marked and a new one goes on with the rest. No torch here: nothing must disturb what is measured.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import machine, store
from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.run.instruments import vitals
from ddlkit.run.jobs.launch import end
from ddlkit.run.jobs.protocol import MISTAKE, child_environment, die_with_parent, ending, trap
from ddlkit.run.lab import network
from ddlkit.run.sessions import session as outcomes
from ddlkit.run.sessions.grammar import CAMPAIGN, Suite, read
from ddlkit.run.sessions.packing import packing, with_tables
from ddlkit.run.sessions.session import Origin, Row, Source, measure_points, one_line, say
from ddlkit.store.files import remove_unfinished
from ddlkit.store.tables import is_stamped, machines_in
from ddlkit.store.tables import pack as pack_tables

POINTS = "ddlkit.run.sessions.suites:points"
PARTS = (
    *("layers", "collectives", "training", "replay", CAMPAIGN),
    *("convergence", "tensors", "input", "all"),
)
"""What can be asked for by itself, of the suites quick and full."""
LONG = "profile full"
"""Remark of tables of the suite full: they may stand for those of quick, but not the other way round."""

HUNG_FACTOR = 5.0  # a point that takes this many times what was expected hangs,
HUNG_S = 60.0  # but not before this long: CUDA, NCCL and a first kernel need seconds, not a minute
START_S = 120.0  # what a process may take until its first point: a cold disk holds torch back
STARTS = 3  # processes in a row that may end before a point: after a death a GPU needs a while,
PAUSE_S = 5.0  # and is given this long
LISTED = 8
VITALS_SAVED_S = 30.0  # how often what was sampled so far is saved
SPENT = 75  # exit status: the GPU cannot be used any more by this process
POLL_S = 0.2


def measure(
    what: str,
    *,
    profile: str = "quick",
    device: str = "",
    budget_s: float = math.inf,
    out: Path | None = None,
    dry_run: bool = False,
    pack: Path | None = None,
    ignore_load: bool = False,
    **chosen: Any,
) -> Path | str:
    """Measure a suite, or a part of one; returns the directory.

    what : name or file of a suite, or one of PARTS, of the suite ``profile``
    device, chosen : in place of the suite's own: ``networks`` and ``predict`` of `suites.points`
    dry_run : only return what is missing, and about how long it will take

    Raises UserError as `run_session` does, for a wrong file, and where there is no lab or GPU for what
    needs one.
    """
    start_s = time.monotonic()
    name, part = (profile, what) if what in PARTS else (what, "all")
    suite, gpus = read(name), bool(machine.describe()["gpus"])
    full = suite.file == read("full").file
    if suite.isolate:
        device = device or suite.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise UserError("no GPU here: nvidia-smi lists none; use --suite cpu")
    out = out or _default_out(suite, device)
    arguments = {"name": str(suite.file), "part": part, "device": device, **chosen}
    source = Source(POINTS, {key: value for key, value in arguments.items() if value})
    if full:
        _refuse_short(out)
    if dry_run:
        return estimate(source, out)
    if (suite.is_campaign or part == CAMPAIGN) and (reason := network.available()):
        raise UserError(f"no campaign here: {reason}")
    how: dict[str, Any] = {"budget_s": budget_s - (time.monotonic() - start_s), "pack": pack}
    how |= {"isolate": suite.isolate, "gpu": device == "cuda", "ignore_load": ignore_load}
    return run_session(source, out, remark=LONG if full else "", **how)


def _default_out(suite: Suite, device: str) -> Path:
    """Return where a suite measures: a recording has its GPU's name or, of processors, one of its own."""
    if suite.is_campaign and not suite.out:
        return store.recorded_dir() / suite.folder
    name = machine.name() if device == "cuda" else f"{machine.name('cpu')}-suite"
    if suite.out == "recorded":
        return store.recorded_dir(name)
    return store.BUILD / (suite.out or "measured") / (name if suite.isolate else "")


def _refuse_short(out: Path) -> None:
    """Raise UserError where tables of another profile than full would be taken for its own."""
    for path in store.list_tables(out):
        if is_stamped(path) and LONG not in store.load_stamp(path).get("remark", ""):
            raise UserError(
                f"{out} holds tables that were not measured by the profile full, such as {path.name}: "
                "choose another directory by --out, or remove them"
            )


def _refuse_others(out: Path, name: str) -> None:
    """Raise UserError where the directory holds another machine's tables."""
    if others := machines_in(out) - {name}:
        theirs = " and ".join(sorted(others))
        raise UserError(
            f"{out} holds a recording of {theirs}, this is {name}: choose another directory"
        )


def run_session(
    source: Source,
    out: Path,
    *,
    budget_s: float = math.inf,
    isolate: bool = False,
    gpu: bool = False,
    ignore_load: bool = False,
    pack: Path | None = None,
    remark: str = "",
) -> Path:
    """Measure what of the points is not in ``out`` yet; returns the directory.

    budget_s : seconds from now after which nothing new is started; an isolated point that runs far over
        is ended
    isolate : whether points run in a child process, and what becomes of each is kept in ``outcomes.csv``:
        one that is missing is tried again by the next call, after those that never failed. If not, the
        first point that fails ends the session
    gpu : whether the GPU is measured, which nobody else may use meanwhile; isolated points without it see
        none, and their tables have the processor's name
    ignore_load : measure although others use the GPU; stamps say so, as they do the ``remark``
    pack : file that holds the whole recording at any time, and from which it goes on; see `packing`

    Tables are saved point by point: whatever ends this call, what was measured stays. At the end those
    of a recording are packed.

    Raises UserError when others use the GPU, when a point fails that is not isolated, when nothing at all
    could be measured, when the directory holds another machine's recording or is being written
    elsewhere, and as `packing`.
    """
    deadline_s, out = time.monotonic() + budget_s, out.resolve()
    with store.lock(out / ".lock"):
        remove_unfinished(out)
        in_use = vitals.gpu_in_use() if gpu else ""
        if in_use and not ignore_load:
            advice = "wait, choose another GPU, or measure all the same with --ignore-load"
            raise UserError(f"nothing is measured: {in_use}; {advice}")
        if in_use:
            say(f"{in_use}; measured all the same, and every stamp says so")
        name = machine.name("" if gpu or not isolate else "cpu")
        remark = "; ".join(filter(None, (remark, in_use)))
        origin = Origin(machine={**outcomes.this_machine(), "name": name}, remark=remark)
        _refuse_others(out, name)
        with packing(out, pack) as keep:
            _refuse_others(out, name)
            _Session(source, out, deadline_s, isolate, gpu, origin, keep).run()
            if out.is_relative_to(store.RECORDED.resolve()):
                for directory in with_tables(out):
                    pack_tables(directory)
    return out


def estimate(source: Source, out: Path) -> str:
    """Return what is not in ``out`` yet, point by point, and about how long each will take.

    Raises UserError for a table there that is damaged.
    """
    points = source.points(out.resolve(), 1)
    everything = [*points.opening, *points.body, *points.closing]
    missing = [point for point in everything if not point.done(out.resolve())]
    total_s = sum(point.estimate_s for point in missing)
    lines = [f"{point.key:<50} {point.estimate_s:>7.0f} s  {point.note}" for point in missing]
    there = f"{len(everything) - len(missing)} of {len(everything)} points are there"
    lines.append(f"{there}; the rest takes about {total_s / 60:.1f} min")
    return "\n".join(line.rstrip() for line in lines)


@dataclass
class _Session:
    """One call of `run_session`.

    keep : called now and then, to pack what there is
    rows : of every point; tried : keys of those that this call has come to an end with
    stillborn : processes in a row that came to an end before a point
    running : the one being measured; heard_s : when anything was last reported
    """

    source: Source
    out: Path
    deadline_s: float
    isolate: bool
    gpu: bool
    origin: Origin
    keep: Callable[[], None]
    rows: dict[str, Row] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    running: Row | None = None
    heard_s: float = 0.0
    stillborn: int = 0

    def __post_init__(self) -> None:
        path = self.out / "outcomes.csv"
        frame = store.load_table(path, "outcomes") if store.has_table(path) else pd.DataFrame()
        self.earlier = {row.key: row for row in (Row(**r) for r in frame.to_dict("records"))}
        # Calls number the tables of their own.
        names = " ".join(path.name for path in store.list_tables(self.out, "*-s*.csv*"))
        self.number = 1 + max(map(int, re.findall(r"-s(\d+)[-.]", names)), default=0)

    def run(self) -> None:
        """Measure, in one process after the other, until nothing is left to do or time is over."""
        start_s = time.monotonic()
        if self.isolate:
            with vitals.Sampler(gpu=self.gpu) as sampler:
                try:
                    while self._in_child(sampler):
                        say("a new process goes on with the rest")
                finally:
                    if row := self.running:  # we are ended, through no fault of it
                        self.rows[row.key] = replace(row, outcome=outcomes.PENDING)
                    self._save_vitals(sampler)
                    self._save()
        else:
            points = self.source.points(self.out, self.number)
            how: dict[str, Any] = {"deadline_s": self.deadline_s, "origin": self.origin}
            measure_points(points, self.out, self._note, **how)
        self._report(time.monotonic() - start_s)

    def _in_child(self, sampler: vitals.Sampler) -> bool:
        """Let a process measure until it ends; returns whether there may be more for another one."""
        tried, saved_s, overdue, failure = len(self.tried), time.monotonic(), "", ""
        self.heard_s = saved_s
        config = {
            "source": asdict(self.source),
            "session": self.number,
            "out": str(self.out),
            "deadline_s": self.deadline_s,
            "origin": asdict(self.origin),
            "skip": self.tried,
            "last": [row.key for row in self.earlier.values() if row.outcome in outcomes.FAULTS],
        }
        with _child(config, gpu=self.gpu) as (process, events):
            for event in events:
                if failure := event.get("failure", ""):
                    break
                self._note(event)
                if time.monotonic() - saved_s > VITALS_SAVED_S:
                    self._save_vitals(sampler)
                    saved_s = time.monotonic()
                if overdue := self._overdue():
                    break
            else:
                if process.wait() == 0:
                    return False
        remove_unfinished(self.out)
        how = overdue or f"the process that measured it {ending(process.wait())}"
        if self.running:
            outcome = outcomes.NO_TIME if self._late() else outcomes.KILLED
            self._close(replace(self.running, outcome=outcome, reason=how))
        elif len(self.tried) > tried:
            say(failure or how)
        else:
            self._start_again(failure or f"nothing is measured: {how} before its first point")
        return not self._late()

    def _start_again(self, reason: str) -> None:
        """Wait a moment. Raises UserError if no point was tried yet, or none by several processes."""
        self.stillborn += 1
        if not self.tried or self.stillborn == STARTS:
            raise UserError(reason)
        say(reason)
        time.sleep(PAUSE_S)

    # -- what is reported ------------------------------------------------------------------

    def _note(self, event: Mapping[str, Any]) -> None:
        """Take in what the loop reports, if it reports anything."""
        self.keep()
        if event:
            self.heard_s = time.monotonic()
        if "rows" in event:
            self._begin([Row(**cells) for cells in event["rows"]])
        elif event:
            row = Row(**event["row"])
            if row.outcome != outcomes.STARTED:
                self._close(row)
                return
            self.rows[row.key] = self.running = row
            self._save()  # whatever happens to us, this point was begun

    def _begin(self, rows: Sequence[Row]) -> None:
        """Take in that all points are known, and what an earlier call left of them."""
        first = not self.rows
        there = [row for row in rows if row.outcome in outcomes.THERE]
        for row in rows:
            self.rows.setdefault(row.key, replace(row, outcome=outcomes.PENDING))
        for row in there:
            was = self.earlier.get(row.key, row)
            kept = was if was.outcome in outcomes.THERE else row
            self.rows[row.key] = replace(kept, estimate_s=row.estimate_s)
        self._save()
        if first and there:
            say(f"already measured: {_listed(there)}")
        if first and len(there) < len(rows):
            to_go_s = sum(row.estimate_s for row in rows if row.outcome == outcomes.PENDING)
            say(f"{len(rows) - len(there)} points to measure, about {to_go_s / 60:.1f} min")
        for row in rows:
            if row.outcome == outcomes.FAILED:
                self._close(row)

    def _close(self, row: Row) -> None:
        """Take in that a point has come to an end."""
        self.rows[row.key] = row
        self.tried.append(row.key)
        self.stillborn = 0
        if row.outcome == outcomes.NO_TIME and not self.running:
            return  # it was not begun: there may be many, and the report lists them
        self.running = None
        self._save()
        if row.outcome == outcomes.FAILED and not self.isolate:
            raise UserError(f"{row.key}: {row.reason}")
        there = sum(other.outcome in outcomes.THERE for other in self.rows.values())
        left_s = self.deadline_s - time.monotonic()
        left = f", {format_seconds(max(0.0, left_s))} left" if math.isfinite(left_s) else ""
        took = f" in {format_seconds(row.seconds)}" if row.seconds else ""
        why = f": {row.reason}" if row.reason else ""
        say(f"[{there}/{len(self.rows)}{left}] {row.key}: {row.outcome}{took}{why}")

    def _late(self) -> bool:
        return time.monotonic() > self.deadline_s + outcomes.OVERTIME_S

    def _overdue(self) -> str:
        """Return why the other process must not go on; "" if it may."""
        if self._late():
            return "still ran when the budget was over"
        allowed_s, what = START_S, "go on"
        if self.running:
            allowed_s, what = max(HUNG_S, HUNG_FACTOR * self.running.estimate_s), "end"
        if time.monotonic() - self.heard_s > allowed_s:
            return f"did not {what} within {format_seconds(allowed_s)}"
        return ""

    # -- what is kept ----------------------------------------------------------------------

    def _save(self) -> None:
        if self.rows and self.isolate:
            frame = pd.DataFrame(map(asdict, self.rows.values()))
            self.origin.save(self.out / "outcomes.csv", frame, "outcomes")

    def _save_vitals(self, sampler: vitals.Sampler) -> None:
        frame = sampler.frame()
        if self.tried and len(frame):
            self.origin.save(self.out / f"vitals-s{self.number}.csv.gz", frame, "vitals")

    def _report(self, seconds: float) -> None:
        """Say what is there and what is missing. Raises UserError where nothing is."""
        missing: dict[str, list[Row]] = {}
        for row in self.rows.values():
            if row.outcome not in outcomes.THERE:
                missing.setdefault(row.outcome, []).append(row)
        there = len(self.rows) - sum(map(len, missing.values()))
        say(f"{there} of {len(self.rows)} points are there after {format_seconds(seconds)}")
        for outcome, rows in missing.items():
            say(f"missing, {outcome}: {_listed(rows)}")
        if self.rows and not there:
            row = next(iter(self.rows.values()))
            raise UserError(f"nothing could be measured; {row.key}: {row.outcome}, {row.reason}")


def _listed(rows: Iterable[Row]) -> str:
    """Return which points, or if they are many, how many of each kind."""
    listed = list(rows)
    if len(listed) <= LISTED:
        return ", ".join(row.key for row in listed)
    kinds = Counter(row.what for row in listed)
    return ", ".join(f"{count} of {what}" for what, count in kinds.items())


# -- the process that measures: both ends of it ------------------------------------------------


@contextmanager
def _child(
    config: Mapping[str, Any], *, gpu: bool
) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[dict[str, Any]]]]:
    """Give the process, which sees GPUs only if they are measured, and what it reports.

    It does not outlive the block.
    """
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps({**config, "events": writing})],
            env=child_environment() | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""}),
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print is no result of ours
            pass_fds=[writing],
            start_new_session=True,
        )
    finally:
        os.close(writing)
    try:
        yield process, _events(process, reading)
    finally:
        end([process])
        os.close(reading)


def _events(process: subprocess.Popen[bytes], reading: int) -> Iterator[dict[str, Any]]:
    """Yield what the process reports; {} now and then while it reports nothing. Ends when it does."""
    started = b""  # a line of which the rest is to come; never, if it died while it wrote
    while True:
        if select.select([reading], [], [], POLL_S)[0]:
            written = os.read(reading, 1 << 16)
            if not written:
                return
            *lines, started = (started + written).split(b"\n")
            yield from map(json.loads, lines)
        elif process.poll() is not None:
            return
        else:
            yield {}


def main(argv: Sequence[str]) -> int:
    """Measure in the process itself; returns 0, SPENT, or MISTAKE with the reason reported to the parent."""
    die_with_parent()
    trap(signal.SIGTERM)
    config = json.loads(argv[0])
    out = Path(config["out"])
    with os.fdopen(config["events"], "w") as stream:

        def emit(event: dict[str, Any]) -> None:
            stream.write(json.dumps(event) + "\n")
            stream.flush()

        try:
            points = Source(**config["source"]).points(out, config["session"])
            chosen = {key: config[key] for key in ("deadline_s", "skip", "last")}
            origin = Origin(**config["origin"])
            usable = measure_points(points, out, emit, origin=origin, **chosen)
        except UserError as error:
            emit({"failure": one_line(error)})
            return MISTAKE
    return 0 if usable else SPENT


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Not sys.exit: after a fault, CUDA's own clean-up may hang.
    os._exit(status)
