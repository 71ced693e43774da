"""Replay of recorded compute with real collectives: what training would take on this network.

Each rank waits out the recorded compute by absolute deadlines and posts the real collective of a group
when its last gradient would be ready: an all-reduce, or where gradients are sparsified, after the recorded
time of selecting, one all-gather of the values that are kept and one of their indices. All ranks must
run on one machine: they share its clock.

Waiting is sleeping: a spinning rank would be on time to the microsecond, but with more ranks than cores take
the processor from gloo's threads. What a message costs is measured (`calibrate`) with the same threads at the
same priority, for both decide how long a small message takes then.

Where a case is negotiated, a coordinator must first say that all ranks are ready, as Horovod does it (osf
Section 3.3): each rank reports a group to a thread of rank 0, which answers all once the last has: four bytes
each over TCP, which in the lab pass the shaped links, and queue behind the collectives' bytes.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.sparse import Selecting
from ddlkit.run.instruments.vitals import Usage, processor_times, processor_usage
from ddlkit.run.jobs import rank as peers
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.launch import Place, launch, workspace
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.lab.emulated import Watch
from ddlkit.run.lab.network import Lab
from ddlkit.run.lab.script import (
    PlannedCase,
    Recording,
    Replayed,
    Script,
    append_iteration,
    check_cases,
    keep_complete,
    read_replayed,
)
from ddlkit.run.measure.collectives import SIZES, CollectivesSettings, collectives_job

Floats = NDArray[np.float64]

HEAD_START_S = 0.01  # from the barrier to the common start: all ranks must have heard of it
SAY_S = 10.0  # between two lines of progress
MESSAGES_PER_SAMPLE = 16  # of a calibration: posted together, as a replay posts its groups
# One gloo thread carries the collectives one after the other, as NCCL would; torch's default is 2.
JOIN = {"backend": "gloo", "gloo_threads": 1, "raise_priority": True}
"""How ranks join for a replay in the lab, and must for a calibration that is to predict one."""
LINE_S = 30.0  # for the lines between the ranks to be made
GROUP = struct.Struct("!I")


def calibrate(
    lab: Lab,
    sizes: Sequence[int] = SIZES,
    collectives: Sequence[str] = ("all_reduce",),
    *,
    timeout_s: float = 600.0,
    **measured: Any,
) -> pd.DataFrame:
    """Measure table ``collectives`` of all ranks of the lab; ``measured``: see `CollectivesSettings`.

    Raises UserError when a value comes out wrong or a rank dies.
    """
    grouped: Any = {"messages_per_sample": MESSAGES_PER_SAMPLE, **measured}
    settings = CollectivesSettings(collectives, sizes, **grouped)
    how: Any = {"join": JOIN, "timeout_s": timeout_s}
    return launch(collectives_job, settings, ranks=lab.ranks, place=lab, **how)["collectives"]


@dataclass(frozen=True)
class ReplaySettings:
    """What CONFIG.json of the job "replay" holds.

    turns : (repeat, number of the script) of each iteration; tries : as for `replay`
    """

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

    The result of every collective is checked. With ``out``, rows are appended to files there as they
    come; what an interrupted replay left there is kept, and not played again. Spans are kept of the first
    round, and of all rounds where a case is negotiated: how long that takes is read off them.

    selection : recorded times of it, needed for cases that gather
    done : (case's key, repeat) of further iterations that need not be played
    tries : how often an iteration is played, at most, while the machine's host disturbs it

    Raises UserError for cases that do not fit the place, and when a rank dies.
    """
    if not cases or rounds < 1:
        raise UserError(f"replay of {len(cases)} cases in {rounds} rounds: at least 1 of each")
    asked = [planned.case for planned in cases]
    check_cases(asked, ranks, place)
    scripts = [Script.from_case(planned, selection) for planned in cases]
    how: dict[str, Any] = {
        "join": {**JOIN, "raise_priority": isinstance(place, Lab)},
        "timeout_s": 60 + 3 * tries * rounds * sum(script.expected_s for script in scripts),
    }
    with workspace(out) as directory:
        there = {*keep_complete(directory), *done}
        numbers = range(len(asked))
        turns = [(r, n) for r in range(rounds) for n in numbers if (asked[n].key, r) not in there]
        settings = ReplaySettings(scripts, turns, tries)
        launch(replay_job, settings, ranks=ranks, place=place, out=directory, **how)
        return read_replayed(directory, asked)


# -- in each rank ------------------------------------------------------------------------------


@job(ReplaySettings)
def replay_job(me: Rank, settings: ReplaySettings) -> Sequence[Tables]:
    """Play all turns. Rank 0 appends to two files, which a kill leaves usable."""
    scripts = settings.scripts
    messages = _Messages(me, scripts)
    negotiator = meet(me) if any(script.case.negotiated for script in scripts) else None
    turns = deque((repeat, scripts[n], settings.tries) for repeat, n in settings.turns)
    said_s = time.monotonic()
    while turns:
        repeat, script, tries = turns.popleft()
        seen_s, used = _iterate(
            me, script, messages, negotiator if script.case.negotiated else None
        )
        if used.disturbed and tries > 1:
            turns.append((repeat, script, tries - 1))
            continue
        everyone = [Recording.from_array(row) for row in peers.everyones(seen_s)]
        if me.rank == 0:
            shown = repeat == 0 or negotiator is not None
            append_iteration(me.out, script, repeat, everyone, used, shown)
        if not turns or time.monotonic() - said_s >= SAY_S:
            said_s = time.monotonic()
            rest_s = sum(script.expected_s for _, script, _ in turns)
            me.say(f"replay: {len(turns)} iterations to come, at most {rest_s:.0f} s left")
    return ()


class _Messages:
    """A rank's messages: memory for those of any of the scripts, their sending and their checking.

    A thread waits for the collectives in turn and notes when each is complete, late by one wake-up, as the
    waiting rank itself is. Not a callback on the collective: that would run in gloo's thread and hold up the
    next one.
    """

    def __init__(self, me: Rank, scripts: Sequence[Script]) -> None:
        self._me = me
        self._dense = torch.empty(max(0 if s.kept else sum(s.elements) for s in scripts))
        kept = max(sum(s.kept) for s in scripts)
        self._kept = [torch.empty(kept, dtype=kind) for kind in (torch.float32, torch.int32)]
        self._gathered = [part.new_empty(kept * me.world_size) for part in self._kept]
        self._last: queue.SimpleQueue[dist.Work] = queue.SimpleQueue()
        self._complete_s: queue.SimpleQueue[float] = queue.SimpleQueue()
        threading.Thread(target=self._note, daemon=True).start()

    def begin(self, script: Script) -> None:
        """Lay out the messages of this script, filled with what this rank sends."""
        n = self._me.world_size
        self.script, self._works = script, list[dist.Work]()
        self.agreed_s = np.empty(len(script.elements))
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

    def post(self, group: int) -> None:
        """Send a group; the groups are posted in their order, maybe by the negotiator's thread."""
        self.agreed_s[group] = time.perf_counter()
        if self.script.kept:
            pairs = zip(self._mine[group], self._everyone[group], strict=True)
            works = [peers.gather_single(out, mine, async_op=True) for mine, out in pairs]
        else:
            works = [dist.all_reduce(part, async_op=True) for part in self._parts[group]]
        self._last.put(works[-1])
        self._works += works

    def wait(self) -> float:
        """Return when all that was posted is complete."""
        for work in self._works:
            work.wait()
        return time.perf_counter()

    def complete_s(self) -> Floats:
        """Return (G,) when each group was seen to be complete."""
        return np.array([self._complete_s.get() for _ in self.agreed_s])

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
            self._complete_s.put(time.perf_counter())


def _split(whole: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
    """Return, for each size, the part of that many elements of every tensor, one part after the other."""
    parts = [tensor[: sum(sizes)].split(list(sizes)) for tensor in whole] if sizes else []
    return list(zip(*parts, strict=True))


def _iterate(
    me: Rank, script: Script, messages: _Messages, negotiator: Negotiator | None
) -> tuple[Floats, Usage]:
    """Return one iteration, started by all ranks at once, as a `Recording`'s array; and how cores were used.

    They count as busy from the first message to the last, where the link should be at work. Over a whole
    iteration, in which ranks mostly sleep, their limit would not show.
    """
    messages.begin(script.played_by(me.rank))
    watch = Watch(me.rank)
    start_s = float(peers.slowest([time.perf_counter()])[0]) + HEAD_START_S
    seen_s, sending = _play(messages, start_s, negotiator)
    used = Usage(*peers.slowest(astuple(replace(watch.usage(), busy=sending.busy))).tolist())
    messages.check()
    return seen_s, used


def _play(
    messages: _Messages, start_s: float, negotiator: Negotiator | None
) -> tuple[Floats, Usage]:
    script = messages.script
    awake_s, selected_s, posted_s = np.empty((3, len(script.ready_s)))
    spent_s = 0.0  # by the selections so far: all that follows is later by it
    hand_over = messages.post
    if negotiator:
        negotiator.begin(messages.post)
        hand_over = negotiator.report
    forward_end_s = _sleep_until(start_s + script.forward_s)
    for group, planned_s in enumerate(script.ready_s):
        ready_s = start_s + planned_s + spent_s
        awake_s[group] = selected_s[group] = _sleep_until(ready_s)
        if script.selection_s:
            spent_s += script.selection_s[group]
            selected_s[group] = _sleep_until(ready_s + script.selection_s[group])
        if group == 0:
            before = processor_times()
        hand_over(group)
        posted_s[group] = time.perf_counter()
    wait_s = time.perf_counter()
    if negotiator:
        negotiator.finish()
    waited_s = messages.wait()
    sending = processor_usage(before, processor_times())
    end_s = _sleep_until(waited_s + script.update_s)
    done_s = np.minimum(messages.complete_s(), waited_s)
    groups = (awake_s, selected_s, messages.agreed_s, posted_s, done_s)
    return np.hstack([*groups, forward_end_s, wait_s, waited_s, end_s]) - start_s, sending


def _sleep_until(deadline_s: float) -> float:
    """Sleep to an absolute time of the performance counter; returns the time on waking."""
    while (rest_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(rest_s)
    return time.perf_counter()


# -- negotiation -------------------------------------------------------------------------------


def meet(me: Rank) -> Negotiator:
    """Return this rank's line to the coordinator. All ranks must call it together. Raises OSError."""
    address = os.environ["MASTER_ADDR"]
    door = socket.create_server((address, 0), backlog=me.world_size) if not me.rank else None
    ports = peers.everyones([door.getsockname()[1] if door else 0])
    lines = [socket.create_connection((address, int(ports[0, 0])), LINE_S)]
    lines[0].settimeout(None)
    if door:
        with door:
            lines += [door.accept()[0] for _ in range(me.world_size)]
        threading.Thread(target=coordinate, args=(lines[1:],), daemon=True).start()
    for line in lines:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Negotiator(lines[0])


class Negotiator:
    """A rank's end of the line to the coordinator."""

    def __init__(self, line: socket.socket) -> None:
        self._line, self._open = line, 0
        self._posted: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, post: Callable[[int], None]) -> None:
        """Have ``post`` called from now on, in another thread, with each group that may leave."""
        self._post, self._open = post, 0

    def report(self, group: int) -> None:
        """Report to the coordinator that this rank's part of a group is ready."""
        self._open += 1
        self._line.sendall(GROUP.pack(group))

    def finish(self) -> None:
        """Wait until every group reported since `begin` has been posted.

        Raises what ``post`` raised, and ConnectionError when the coordinator is gone.
        """
        for _ in range(self._open):
            if error := self._posted.get():
                raise error

    def _listen(self) -> None:
        try:
            with self._line.makefile("rb") as answers:
                while answer := answers.read(GROUP.size):
                    self._post(*GROUP.unpack(answer))
                    self._posted.put(None)
            raise ConnectionError
        except ConnectionError:  # hung up, or died with answers unread
            self._posted.put(ConnectionError("the coordinator of the negotiation is gone"))
        except Exception as error:  # for the thread that waits in `finish`
            self._posted.put(error)


def coordinate(lines: Sequence[socket.socket]) -> None:
    """Answer until every rank has hung up. Groups of one that dies stay open: `launch` ends the others."""
    reports: Counter[bytes] = Counter()  # of each group
    listening = list(lines)
    with suppress(ConnectionError):
        while listening:
            for line in select.select(listening, (), ())[0]:
                group = line.recv(GROUP.size, socket.MSG_WAITALL)
                if len(group) < GROUP.size:
                    listening.remove(line)
                    continue
                reports[group] += 1
                if reports[group] == len(lines):
                    del reports[group]  # the next iteration may report it again
                    for each in lines:
                        each.sendall(group)
