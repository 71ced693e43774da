"""``ddlkit record``: everything that this machine can tell, in order of value, within a budget.

This process starts the one that measures (`ddlkit.run.sessions.recorder`), samples the machine's vitals
beside it, and keeps the table of outcomes. When the other one dies, the point that it died of is marked and a
new one goes on with the rest. No torch here: nothing must disturb what is measured.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd

from ddlkit import machine, store
from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.run.instruments import vitals
from ddlkit.run.jobs.launch import end
from ddlkit.run.jobs.protocol import child_environment, ending
from ddlkit.run.sessions.outcomes import KILLED, MEASURED, NO_TIME, PARTIAL, PENDING, STARTED

POINTS = "ddlkit.run.sessions.suites:session_plan"
THERE = (MEASURED, PARTIAL)

OVERTIME_S = 20.0  # what a point may run over the budget
HUNG_FACTOR = 10.0  # a point that takes so many times what was expected hangs,
HUNG_S = 120.0  # but not before this long
POLL_S = 0.2
LISTED = 8
VITALS_SAVED_S = 30.0  # how often what was sampled so far is saved


def record(
    suite: str,
    *,
    profile: str = "standard",
    budget_s: float = math.inf,
    out: Path | None = None,
    points: str = POINTS,
) -> Path:
    """Measure what is not recorded yet; returns the directory.

    suite : "gpu" or "cpu"; profile : "standard", or "smoke" for every code path in a minute
    budget_s : seconds from now after which nothing new is started; a point that runs far over is ended
    out : directory; by default one of this machine's in data/recorded, named for its GPU or, since
        the lab's recording has the processor's name, for the processor with "-suite" after it;
        build/smoke for the profile "smoke"
    points : "module:function" that makes the plan, called as `ddlkit.run.sessions.suites.session_plan`

    ``outcomes.csv`` there lists every point with what became of it; one that is missing is tried again
    by the next call, after those that never failed. Tables are saved point by point: whatever ends
    this call, what was measured stays.

    Raises UserError when there is no GPU for "gpu" or others use it, when nothing at all could be
    measured, and when the directory holds another machine's recording or is being written elsewhere.
    """
    gpu = suite == "gpu"
    if gpu and not machine.describe()["gpus"]:
        raise UserError("no GPU here: nvidia-smi lists none; use --suite cpu")
    if out is None:
        name = machine.name() if gpu else f"{machine.name()}-suite"
        out = store.recorded_dir(name) if profile == "standard" else store.BUILD / "smoke"
    with store.Lock(out / ".lock"):
        if in_use := vitals.gpu_in_use() if gpu else "":
            raise UserError(f"nothing is measured: {in_use}; wait, or choose another GPU")
        _Session(suite, profile, time.time() + budget_s, out.resolve(), points).run()
    return out


@dataclass
class _Row:
    """What is known of a point."""

    what: str
    point: str
    outcome: str = PENDING
    reason: str = ""
    estimate_s: float = 0.0
    seconds: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.what}/{self.point}"


@dataclass
class _Session:
    """One call of `record`.

    rows : every point of the plan; tried : keys of those that this call has come to an end with
    running : the one being measured, since when, and how long that was expected to take
    """

    suite: str
    profile: str
    deadline_s: float
    out: Path
    points: str
    rows: dict[str, _Row] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    running: tuple[_Row, float, float] | None = None

    def __post_init__(self) -> None:
        self.machine = machine.describe()
        self.earlier = _earlier_rows(self.out, self.machine["name"])
        self.number = 1 + max(_session_numbers(self.out), default=0)

    def run(self) -> None:
        """Processes one after the other, until one has nothing left to do or time is over."""
        start_s = time.monotonic()
        with vitals.Sampler(gpu=self.suite == "gpu") as sampler:
            try:
                while self._measure(sampler):
                    _say("a new process goes on with the rest")
            finally:
                self._save_vitals(sampler)
                self._save()
        self._report(time.monotonic() - start_s)

    def _measure(self, sampler: vitals.Sampler) -> bool:
        """Let a process measure until it ends; returns whether there may be more for another one."""
        tried, saved_s, overdue = len(self.tried), time.monotonic(), ""
        with _Recorder(self._config()) as recorder:
            for event in recorder.events():
                self._note(event)
                if time.monotonic() - saved_s > VITALS_SAVED_S:
                    self._save_vitals(sampler)
                    saved_s = time.monotonic()
                if overdue := self._overdue():
                    break
            else:
                if recorder.status == 0:
                    return False
        how = overdue or f"the process that measured it {ending(recorder.status)}"
        if self.running:
            row = self.running[0]
            self._close(row, NO_TIME if self._late() else KILLED, how, 0.0)
        elif len(self.tried) == tried:
            raise UserError(f"nothing is measured: {how} before its first point")
        return not self._late()

    def _config(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "profile": self.profile,
            "session": self.number,
            "out": str(self.out),
            "points": self.points,
            "deadline_s": self.deadline_s,
            "skip": self.tried,
            "last": [row.key for row in self.earlier.values() if row.outcome not in THERE],
        }

    def _note(self, event: dict[str, Any]) -> None:
        """What the other process tells, if it tells anything."""
        if not event:
            return
        if "failure" in event:
            raise UserError(event["failure"])
        if "plan" in event:
            for row in (_Row(**described) for described in event["plan"]):
                self.rows.setdefault(row.key, row)
            self._save()
            return
        row = self.rows[event["point"]]
        if event["outcome"] == STARTED:
            row.outcome = STARTED
            self.running = row, time.monotonic(), event["expected_s"]
            self._save()  # whatever happens to us, this point was begun
        elif event.get("before"):
            known = self.earlier.get(row.key, row)
            row.outcome = known.outcome if known.outcome in THERE else MEASURED
            row.reason, row.seconds = known.reason, known.seconds
        else:
            self._close(row, event["outcome"], event["reason"], event["seconds"])

    def _close(self, row: _Row, outcome: str, reason: str, seconds: float) -> None:
        """A point has come to an end."""
        row.outcome, row.reason, row.seconds = outcome, reason, seconds
        self.tried.append(row.key)
        if outcome == NO_TIME and not self.running:
            return  # it was not begun: there may be many, and the report lists them
        self.running = None
        self._save()
        there = sum(other.outcome in THERE for other in self.rows.values())
        left_s = self.deadline_s - time.time()
        left = f", {format_seconds(max(0.0, left_s))} left" if math.isfinite(left_s) else ""
        took = f" in {format_seconds(seconds)}" if seconds else ""
        why = f": {reason}" if reason else ""
        _say(f"[{there}/{len(self.rows)}{left}] {row.key}: {outcome}{took}{why}")

    def _late(self) -> bool:
        return time.time() > self.deadline_s + OVERTIME_S

    def _overdue(self) -> str:
        """Why the other process must not go on; "" if it may."""
        if self._late():
            return "still ran when the budget was over"
        if self.running:
            _, since_s, expected_s = self.running
            allowed_s = max(HUNG_S, HUNG_FACTOR * expected_s)
            if time.monotonic() - since_s > allowed_s:
                return f"did not end within {format_seconds(allowed_s)}"
        return ""

    def _save(self) -> None:
        if not self.rows:
            return
        frame = pd.DataFrame([asdict(row) for row in self.rows.values()])
        self._save_table(frame, "outcomes", "outcomes")

    def _save_vitals(self, sampler: vitals.Sampler) -> None:
        frame = sampler.frame()
        if self.tried and len(frame):
            self._save_table(frame, f"vitals-s{self.number}.csv.gz", "vitals")

    def _save_table(self, frame: pd.DataFrame, name: str, schema: str) -> None:
        store.save_table(
            frame, self.out, name, schema=schema, command=sys.argv, machine=self.machine
        )

    def _report(self, seconds: float) -> None:
        """What is there and what is missing, on standard error."""
        missing: dict[str, list[_Row]] = {}
        for row in self.rows.values():
            if row.outcome not in THERE:
                missing.setdefault(row.outcome, []).append(row)
        there = len(self.rows) - sum(map(len, missing.values()))
        _say(f"{there} of {len(self.rows)} points are there after {format_seconds(seconds)}")
        for outcome, rows in missing.items():
            _say(f"missing, {outcome}: {_listed(rows)}")
        if not there:
            row = next(iter(self.rows.values()))
            raise UserError(f"nothing could be measured; {row.key}: {row.outcome}, {row.reason}")


def _listed(rows: list[_Row]) -> str:
    """Which points, or if they are many, how many of each kind."""
    if len(rows) <= LISTED:
        return ", ".join(row.key for row in rows)
    kinds = Counter(row.what for row in rows)
    return ", ".join(f"{count} of {what}" for what, count in kinds.items())


def _earlier_rows(out: Path, name: str) -> dict[str, _Row]:
    """What the last call left as outcomes. Raises UserError for another machine's recording."""
    path = out / "outcomes.csv"
    if not path.exists():
        return {}
    recorded_on = store.load_stamp(path)["machine"]["name"]
    if recorded_on != name:
        raise UserError(
            f"{out} holds a recording of {recorded_on}, this is {name}: choose another directory"
        )
    found = [_Row(**cells) for cells in store.load_table(path, "outcomes").to_dict("records")]
    return {row.key: row for row in found}


def _session_numbers(out: Path) -> Iterator[int]:
    """Numbers of the calls that left tables of their own."""
    for path in out.glob("*-s*.csv*"):
        if found := re.search(r"-s(\d+)[-.]", path.name):
            yield int(found[1])


def _say(line: str) -> None:
    print(f"ddlkit: {line}", file=sys.stderr, flush=True)


class _Recorder:
    """A process that measures, from entry to exit of the block; it does not outlive us."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> _Recorder:
        reading, writing = os.pipe()
        config = json.dumps({**self._config, "events": writing})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ddlkit.run.sessions.recorder", config],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print is no result of ours
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end([self._process])

    @property
    def status(self) -> int:
        """Exit status, once it has ended; negative: the signal that killed it."""
        return int(self._process.wait())

    def events(self) -> Iterator[dict[str, Any]]:
        """What it tells; {} now and then while it tells nothing. Ends when it does."""
        while True:
            try:
                yield self._events.get(timeout=POLL_S)
            except queue.Empty:
                if self._process.poll() is not None:
                    return
                yield {}

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as stream:
            for line in stream:
                if line.endswith("\n"):  # else it died while it wrote
                    self._events.put(json.loads(line))
