"""Replay of recorded compute with real collectives: what training would take on this network.

Each rank, all on one machine, whose clock they share, waits out the recorded compute by absolute deadlines
and posts a group's collective when its last gradient would be ready: an all-reduce, or of sparsified
gradients, after the recorded time of selecting, an all-gather of values and one of indices. Waiting is
sleeping: with more ranks than cores, one that spins would take the processor from gloo's threads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.sparse import Selecting
from ddlkit.run.jobs import rank as peers
from ddlkit.run.jobs.launch import Place, launch, workspace
from ddlkit.run.jobs.rank import Floats, Rank, Tables, job
from ddlkit.run.lab.network import Lab
from ddlkit.run.lab.script import (
    PlannedCase,
    Replayed,
    Script,
    append_iteration,
    keep_complete,
    read_replayed,
)
from ddlkit.run.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.run.vitals import Usage, Watch, processor_times, processor_usage

HEAD_START_S = 0.01  # from the barrier to the common start: all ranks must have heard of it
SAY_S = 10.0  # between two lines of progress
MESSAGES_PER_SAMPLE = 16  # of a calibration: posted together, as a replay posts its groups
JOIN = {"backend": "gloo"}
"""How ranks join for a replay in the lab, and must for a calibration that is to predict one."""


def calibrate(lab: Lab, settings: CollectivesSettings, timeout_s: float = 600.0) -> pd.DataFrame:
    """Measure table ``collectives`` of all ranks of the lab."""
    how: Any = {"ranks": lab.ranks, "place": lab, "join": JOIN, "timeout_s": timeout_s}
    return launch(collectives_job, settings, **how)["collectives"]


@dataclass(frozen=True)
class ReplaySettings:
    """What CONFIG.json of this job holds; turns : (repeat, number of the script) of each iteration."""

    scripts: Sequence[Script]
    turns: Sequence[tuple[int, int]]
    tries: int


def replay(
    place: Place,
    ranks: int,
    cases: Sequence[PlannedCase],
    rounds: int = 3,
    *,
    selection: Selecting | None = None,
    done: Collection[tuple[str, int]] = (),
    tries: int = 1,
    out: Path | None = None,
) -> Replayed:
    """Replay every case once per round, all in one launch, so that drift meets all cases alike.

    selection : recorded times of it, needed for cases that gather
    done : (case's key, repeat) of iterations that need not be played
    tries : how often an iteration is played, at most, while the machine's host disturbs it
    out : where rows are appended as they come; what an interrupted replay left there is not played again

    Raises UserError as `launch` does.
    """
    scripts = [Script.from_case(planned, selection) for planned in cases]
    keys = [planned.case.key for planned in cases]
    limit_s = 60 + 3 * tries * rounds * sum(script.expected_s for script in scripts)
    with workspace(out) as directory:
        played = {*keep_complete(directory), *done}
        every = product(range(rounds), range(len(keys)))
        turns = [(repeat, n) for repeat, n in every if (keys[n], repeat) not in played]
        how: Any = {"ranks": ranks, "place": place, "join": JOIN, "timeout_s": limit_s}
        launch(replay_job, ReplaySettings(scripts, turns, tries), out=directory, **how)
        return read_replayed(directory, [planned.case for planned in cases])


# -- in each rank ------------------------------------------------------------------------------


@job(ReplaySettings)
def replay_job(me: Rank, settings: ReplaySettings) -> Sequence[Tables]:
    """Play all turns. Rank 0 appends to a file, which a kill leaves usable."""
    messages = _Messages(me, settings.scripts)
    turns = deque((repeat, settings.scripts[n], settings.tries) for repeat, n in settings.turns)
    progress_s = time.monotonic()
    while turns:
        repeat, script, tries = turns.popleft()
        seen_s, used = _iterate(me, script, messages)
        if used.disturbed and tries > 1:
            turns.append((repeat, script, tries - 1))
            continue
        everyone = peers.everyones(seen_s)
        if me.rank == 0:
            append_iteration(me.out, script, repeat, everyone, used)
        if not turns or time.monotonic() - progress_s >= SAY_S:
            progress_s = time.monotonic()
            rest_s = sum(script.expected_s for _, script, _ in turns)
            me.say(f"replay: {len(turns)} iterations to come, at most {rest_s:.0f} s left")
    return ()


class _Messages:
    """A rank's messages: memory for those of any of the scripts, their sending and their checking.

    A thread waits for the collectives in turn and notes when each is complete, late by one wake-up, as the
    waiting rank itself is. A callback on the collective would hold up the next one in gloo's thread.
    """

    def __init__(self, me: Rank, scripts: Sequence[Script]) -> None:
        self._me = me
        self._dense = torch.empty(max(0 if s.kept else sum(s.elements) for s in scripts))
        kept = max(sum(s.kept) for s in scripts)
        self._kept = [torch.empty(kept, dtype=kind) for kind in (torch.float32, torch.int32)]
        self._gathered = [part.new_empty(kept * me.world_size) for part in self._kept]
        self._last: queue.SimpleQueue[dist.Work] = queue.SimpleQueue()
        self.complete_s: queue.SimpleQueue[float] = queue.SimpleQueue()
        threading.Thread(target=self._note, daemon=True).start()

    def begin(self, script: Script) -> None:
        """Lay out the messages of this script, filled with what this rank sends."""
        n = self._me.world_size
        self.script, self._works = script, list[dist.Work]()
        self._parts = _split([self._dense], [] if script.kept else script.elements)
        self._mine = _split(self._kept, script.kept)
        self._everyone = _split(self._gathered, [n * kept for kept in script.kept])
        for (part,) in self._parts:
            part.fill_(self._me.rank + 1)
        for (values, indices), everyone in zip(self._mine, self._everyone, strict=True):
            values.fill_(self._me.rank + 1)
            torch.arange(len(indices), out=indices)
            for gathered in everyone:
                gathered.fill_(-1)

    def post(self, group: int) -> float:
        """Send a group; returns when that was done."""
        if self.script.kept:
            pairs = zip(self._mine[group], self._everyone[group], strict=True)
            works = [peers.gather_single(out, mine, async_op=True) for mine, out in pairs]
        else:
            works = [dist.all_reduce(part, async_op=True) for part in self._parts[group]]
        self._last.put(works[-1])
        self._works += works
        return time.perf_counter()

    def wait(self) -> float:
        """Return when all that was posted is complete."""
        for work in self._works:
            work.wait()
        return time.perf_counter()

    def check(self) -> None:
        """Raise RuntimeError unless every sum is right, and every gathered element where it belongs."""
        n = self._me.world_size
        extremes = [torch.stack(part.aminmax()) for (part,) in self._parts]
        right = [bool((both == n * (n + 1) / 2).all()) for both in extremes]
        for (_, mine), everyone in zip(self._mine, self._everyone, strict=True):
            values, indices = (gathered.view(n, -1) for gathered in everyone)
            expected = torch.arange(1.0, n + 1)[:, None]
            right.append(bool((values == expected).all() and (indices == mine).all()))
        if not all(right):
            where = f"group {right.index(False)} of case {self.script.case.key}"
            raise RuntimeError(f"replay: wrong values in {where}")

    def _note(self) -> None:
        while True:
            self._last.get().wait()
            self.complete_s.put(time.perf_counter())


def _split(whole: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """Return, for each size, the part of that many elements of every tensor, one part after the other."""
    parts = [tensor[: sum(sizes)].split(list(sizes)) for tensor in whole] if sizes else []
    return list(zip(*parts, strict=True))


def _iterate(me: Rank, script: Script, messages: _Messages) -> tuple[Floats, Usage]:
    """Return one iteration, started by all ranks at once, as of `make_timeline`; and how cores were used.

    They count as busy from the first message to the last: over a whole iteration, ranks mostly sleep.
    """
    messages.begin(script.played_by(me.rank))
    watch = Watch(me.rank)
    start_s = float(peers.slowest([time.perf_counter()])[0]) + HEAD_START_S
    seen_s, sending = _play(messages, start_s)
    used = Usage(*peers.slowest(astuple(replace(watch.usage(), busy=sending.busy))).tolist())
    messages.check()
    return seen_s, used


def _play(messages: _Messages, start_s: float) -> tuple[Floats, Usage]:
    """Return times of one iteration, as of `make_timeline`, and how cores were used while it sent."""
    script = messages.script
    awake_s, selected_s, posted_s = np.empty((3, len(script.ready_s)))
    spent_s = 0.0  # by the selections so far: all that follows is later by it
    forward_end_s = _sleep_until(start_s + script.forward_s)
    for group, planned_s in enumerate(script.ready_s):
        ready_s = start_s + planned_s + spent_s
        awake_s[group] = selected_s[group] = _sleep_until(ready_s)
        if script.selection_s:
            spent_s += script.selection_s[group]
            selected_s[group] = _sleep_until(ready_s + script.selection_s[group])
        if group == 0:
            before = processor_times()
        posted_s[group] = messages.post(group)
    wait_s = time.perf_counter()
    waited_s = messages.wait()
    sending = processor_usage(before, processor_times())
    end_s = _sleep_until(waited_s + script.update_s)
    done_s = np.minimum([messages.complete_s.get() for _ in script.ready_s], waited_s)
    groups = (awake_s, selected_s, posted_s, done_s)
    return np.hstack([*groups, forward_end_s, wait_s, waited_s, end_s]) - start_s, sending


def _sleep_until(deadline_s: float) -> float:
    """Sleep to an absolute time of the performance counter; returns the time on waking."""
    while (rest_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(rest_s)
    return time.perf_counter()
