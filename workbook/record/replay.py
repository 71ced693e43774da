"""Replay of recorded compute with real collectives: what training would take on this network.

Each rank, all on one machine, whose clock they share, waits out the recorded compute by absolute deadlines
and posts a group's collective when its last gradient would be ready: an all-reduce, or of sparsified
gradients, after the recorded time of selecting, an all-gather of values and one of indices. Waiting is
sleeping: with more ranks than cores, one that spins would take the processor from gloo's threads. Rank 0
appends each iteration to a file when it is complete, so that a kill loses only the one under way.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core import sparse
from ddlkit.core.case import Case
from ddlkit.core.collective import of_gradients
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import one_way_delay_s
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.jobs import rank as peers
from ddlkit.jobs.clock import sleep_until
from ddlkit.jobs.launch import Place, launch, workspace
from ddlkit.jobs.rank import Floats, Rank, Tables, job
from ddlkit.jobs.vitals import Retries, Usage, Watch, processor_times, processor_usage
from ddlkit.lab.network import Lab
from ddlkit.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.store.files import append_text

ITERATIONS = "replay.jsonl"
HEAD_START_S = (
    0.01  # from the barrier to the common start: all ranks must have heard of it
)
SETTLE_S = 0.1  # around an iteration: checks, and the exchange of what was seen
MESSAGES_PER_SAMPLE = (
    16  # of a calibration: posted together, as a replay posts its groups
)
JOIN = {"backend": "gloo"}
"""How ranks join for a replay in the lab, and must for a calibration that is to predict one."""


class PlannedCase(NamedTuple):
    """A case that can be replayed: its plan, and its workload before dilation."""

    case: Case
    workload: Workload
    plan: FusionPlan


def plan_case(
    profile: LayerProfile,
    spec: str,
    cost: MessageCost,
    place: Place,
    *,
    density: float = 1.0,
    straggler: float = 1.0,
    selection_sha256: str = "",
) -> PlannedCase:
    """Plan the profile by ``spec``. Raises UserError for a plan that cannot be made for it.

    Time is dilated so that an iteration computes as long as one message of everything takes, where a model
    of their overlap has most to lose.

    cost : of a group by its dense size. What a `sparse.SparseGather` knows of selecting is dilated, too
    density, straggler, selection_sha256 : as of `Case`
    """
    workload = profile.workload()
    dilation = float(f"{float(cost(workload.bytes.sum())) / workload.compute_s:.4g}")
    if (
        isinstance(cost, sparse.SparseGather)
        and (selecting := cost.selecting) is not None
    ):
        cost = replace(
            cost, selecting=lambda n, density: dilation * selecting(n, density)
        )
    plan = make_plan(spec, workload.scaled(dilation), cost)
    case = Case(
        kind="replay",
        network=profile.network,
        device=profile.device,
        batch=profile.batch,
        workers=cost.workers or 0,
        link=place.name,
        link_bits_per_s=place.link_bits_per_s,
        collective=cost.collective,
        plan=plan.planner,
        ends=";".join(map(str, plan.ends)),
        dilation=dilation,
        profile_sha256=profile.sha256,
        density=density,
        straggler=straggler,
        selection_sha256=selection_sha256,
    )
    return PlannedCase(case, workload, plan)


@dataclass(frozen=True)
class Script:
    """What a rank plays in one iteration; times in seconds from the common start, dilated.

    ready_s : when each group is ready, without the selections before it
    kept : how many elements of each group are sent, () where all are
    selection_s : how long each selection takes, () where there is none
    """

    case: Case
    forward_s: float
    ready_s: Sequence[float]
    bytes: Sequence[int]
    elements: Sequence[int]
    update_s: float
    kept: Sequence[int] = ()
    selection_s: Sequence[float] = ()

    @classmethod
    def from_case(
        cls, planned: PlannedCase, selection: sparse.Selecting | None = None
    ) -> Script:
        """Make the script of a case; a sparse one waits out recorded times of selection.

        Raises UserError without these, and for a collective that a replay does not post.
        """
        case, plan = planned.case, planned.plan
        slow = planned.workload.scaled(case.dilation)
        elements = sparse.elements_of(plan.group_bytes(slow)).astype(int)
        kept: Sequence[int] = ()
        selection_s: Sequence[float] = ()
        if case.collective != (posted := of_gradients(sparse=case.sparse)):
            kind = "sparse" if case.sparse else "dense"
            raise UserError(
                f"replay: case {case.key} names {case.collective}: {kind} gradients are "
                f"sent by {posted}"
            )
        if case.sparse:
            if selection is None:
                raise UserError(
                    f"replay: case {case.key} waits out selections of unknown times"
                )
            waited_s = case.dilation * selection(elements, case.density)
            kept = [sparse.selected(size, case.density) for size in elements.tolist()]
            selection_s = waited_s.tolist()
        return cls(
            case=case,
            forward_s=slow.forward_s,
            ready_s=plan.group_ready_s(slow).tolist(),
            bytes=plan.group_bytes(slow).tolist(),
            elements=elements.tolist(),
            update_s=slow.update_s,
            kept=kept,
            selection_s=selection_s,
        )

    @property
    def compute_s(self) -> float:
        """Return the iteration without communication."""
        return self.ready_s[-1] + sum(self.selection_s) + self.update_s

    @property
    def sent_bytes(self) -> Sequence[int]:
        """Return bytes that a rank sends of each group; beside values that are selected, their indices."""
        return [2 * sparse.ELEMENT_BYTES * k for k in self.kept] or self.bytes

    @property
    def expected_s(self) -> float:
        """Return generous seconds of the iteration: no overlap, and twice the bytes each way."""
        case = self.case
        byte_s = 16 / case.link_bits_per_s if case.link_bits_per_s else 1e-8
        wire_s = sum(self.sent_bytes) * byte_s * (case.workers if self.kept else 1)
        wire_s += (
            len(self.bytes) * 4 * case.workers * one_way_delay_s(case.link)
        )  # a step asks first
        return self.compute_s * case.straggler + wire_s + SETTLE_S

    def played_by(self, rank: int) -> Script:
        """Return the script of that rank: the last one is the straggler, if there is one."""
        slower = self.case.straggler if rank == self.case.workers - 1 else 1.0
        times = ("forward_s", "ready_s", "selection_s", "update_s")
        slow: Any = {
            name: np.multiply(slower, getattr(self, name)).tolist() for name in times
        }
        return replace(self, **slow)


class Replayed(NamedTuple):
    """Tables of a replay: ``runs``, and of the first round ``timeline``; times are dilated."""

    runs: pd.DataFrame
    timeline: pd.DataFrame


def calibrate(
    lab: Lab, settings: CollectivesSettings, timeout_s: float = 600.0
) -> pd.DataFrame:
    """Measure table ``collectives`` of all ranks of the lab."""
    tables = launch(
        collectives_job,
        settings,
        ranks=lab.ranks,
        place=lab,
        join=JOIN,
        timeout_s=timeout_s,
    )
    return tables["collectives"]


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
    selection: sparse.Selecting | None = None,
    done: Collection[tuple[str, int]] = (),
    tries: int = 1,
    out: Path | None = None,
) -> Replayed:
    """Replay every case once per round, all in one launch, so that drift meets all cases alike.

    selection : recorded times of it, needed for sparse cases
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
        launch(
            replay_job,
            ReplaySettings(scripts, turns, tries),
            ranks=ranks,
            place=place,
            join=JOIN,
            timeout_s=limit_s,
            out=directory,
        )
        return read_replayed(directory, [planned.case for planned in cases])


# -- in each rank ------------------------------------------------------------------------------


@job(ReplaySettings)
def replay_job(me: Rank, settings: ReplaySettings) -> Sequence[Tables]:
    """Play all turns. Rank 0 appends to a file, which a kill leaves usable."""
    retries = Retries(len(settings.turns) // 4)
    turns = deque(
        (repeat, settings.scripts[n], settings.tries) for repeat, n in settings.turns
    )
    while turns:
        repeat, script, tries = turns.popleft()
        seen_s, used = _iterate(me, script)
        if tries > 1 and retries.again(used):
            turns.append((repeat, script, tries - 1))
            continue
        everyone = peers.everyones(seen_s)
        if me.rank == 0:
            append_iteration(me.out, script, repeat, everyone, used)
    return ()


class _Messages:
    """A rank's messages of one iteration: their memory, sending and checking.

    A thread waits for the collectives in turn and notes when each is complete, late by one wake-up, as the
    waiting rank itself is. A callback on the collective would hold up the next one in gloo's thread.
    """

    def __init__(self, me: Rank, script: Script) -> None:
        self._script, self._ranks = script, me.world_size
        self._works: list[dist.Work] = []
        mine = me.rank + 1.0
        self._dense = [
            torch.full((n,), mine) for n in script.elements if not script.kept
        ]
        sent = [
            (torch.full((n,), mine), torch.arange(n, dtype=torch.int32))
            for n in script.kept
        ]
        self._sparse = [
            [(part.new_zeros(me.world_size * len(part)), part) for part in pair]
            for pair in sent
        ]
        self._last: queue.SimpleQueue[dist.Work] = queue.SimpleQueue()
        self._complete_s: list[float] = []
        self._noting = threading.Thread(target=self._note, daemon=True)
        self._noting.start()

    def post(self, group: int) -> float:
        """Send a group; returns when that was done."""
        if self._script.kept:
            pairs = self._sparse[group]
            works = [peers.gather_single(*pair, async_op=True) for pair in pairs]
        else:
            works = [dist.all_reduce(self._dense[group], async_op=True)]
        self._last.put(works[-1])
        self._works += works
        return time.perf_counter()

    def wait(self) -> tuple[float, Floats]:
        """Return when all that was posted is complete, and when each group was, (G,) seconds."""
        for work in self._works:
            work.wait()
        waited_s = time.perf_counter()
        self._noting.join()
        return waited_s, np.minimum(self._complete_s, waited_s)

    def check(self) -> None:
        """Raise RuntimeError unless every sum is right, and every gathered element where it belongs."""
        n = self._ranks
        right = [bool((part == n * (n + 1) / 2).all()) for part in self._dense]
        for (values, _), (indices, sent) in self._sparse:
            of_ranks = values.view(n, -1) == torch.arange(1.0, n + 1)[:, None]
            right.append(bool(of_ranks.all() and (indices.view(n, -1) == sent).all()))
        if not all(right):
            where = f"group {right.index(False)} of case {self._script.case.key}"
            raise RuntimeError(f"replay: wrong values in {where}")

    def _note(self) -> None:
        for _ in self._script.ready_s:
            self._last.get().wait()
            self._complete_s.append(time.perf_counter())


def _iterate(me: Rank, script: Script) -> tuple[Floats, Usage]:
    """Return one iteration, started by all ranks at once, as of `make_timeline`; and how cores were used.

    They count as busy from the first message to the last: over a whole iteration, ranks mostly sleep.
    """
    script = script.played_by(me.rank)
    messages, watch = _Messages(me, script), Watch(me.rank)
    start_s = float(peers.slowest([time.perf_counter()])[0]) + HEAD_START_S
    seen_s, sending = _play(script, messages, start_s)
    used = peers.usage_of_all(replace(watch.usage(), busy=sending.busy))
    messages.check()
    return seen_s, used


def _play(script: Script, messages: _Messages, start_s: float) -> tuple[Floats, Usage]:
    """Return times of one iteration, as of `make_timeline`, and how cores were used while it sent."""
    awake_s, selected_s, posted_s = np.empty((3, len(script.ready_s)))
    spent_s = 0.0  # by the selections so far: all that follows is later by it
    forward_end_s = sleep_until(start_s + script.forward_s)
    for group, planned_s in enumerate(script.ready_s):
        ready_s = start_s + planned_s + spent_s
        awake_s[group] = selected_s[group] = sleep_until(ready_s)
        if script.selection_s:
            spent_s += script.selection_s[group]
            selected_s[group] = sleep_until(ready_s + script.selection_s[group])
        if group == 0:
            before = processor_times()
        posted_s[group] = messages.post(group)
    waited_s, done_s = messages.wait()
    sending = processor_usage(before, processor_times())
    end_s = sleep_until(waited_s + script.update_s)
    groups = (awake_s, selected_s, posted_s, done_s)
    return np.hstack([*groups, forward_end_s, waited_s, end_s]) - start_s, sending


# -- what comes back -----------------------------------------------------------------------------


def make_timeline(script: Script, everyone: Floats) -> Timeline:
    """Make spans of all ranks, in seconds from the common start; ``bytes`` is what a rank contributes.

    everyone : (ranks, 4 G + 3) seconds: when a rank woke with each group's gradients, had selected, went on
        computing, and saw its messages complete; ends of forward, of waiting and of the update

    A collective begins when it is posted and its predecessor has ended.
    """
    return Timeline.from_rows(
        {**span, "rank": rank, "origin": "replayed"}
        for rank, seen_s in enumerate(everyone)
        for span in _spans(script.played_by(rank), seen_s)
    )


def _spans(script: Script, seen_s: Floats) -> Iterable[dict[str, Any]]:
    forward_end_s, waited_s, end_s = seen_s[-3:].tolist()

    def span(
        kind: str,
        group: int,
        start_s: float,
        end_s: float,
        stream: str = "compute",
        n_bytes: int = 0,
    ) -> dict[str, Any]:
        return {
            "task": kind if group < 0 else f"{kind} {group}",
            "kind": kind,
            "stream": stream,
            "group": group,
            "start_s": start_s,
            "end_s": max(start_s, end_s),
            "bytes": n_bytes,
        }

    yield span("forward", -1, 0.0, forward_end_s)
    begin_s, free_s = forward_end_s, 0.0
    for group, n_bytes in enumerate(script.bytes):
        awake_s, selected_s, posted_s, done_s = (
            seen_s[:-3].reshape(4, -1)[:, group].tolist()
        )
        yield span("backward", group, begin_s, awake_s, n_bytes=n_bytes)
        if script.kept:
            yield span("sparsify", group, awake_s, selected_s, n_bytes=n_bytes)
        yield span(
            script.case.collective,
            group,
            max(selected_s, free_s),
            done_s,
            stream="communication",
            n_bytes=script.sent_bytes[group],
        )
        begin_s, free_s = posted_s, done_s
    yield span("wait", -1, begin_s, waited_s)
    yield span("update", -1, waited_s, end_s)


# -- the file ----------------------------------------------------------------------------------


def append_iteration(
    out: Path, script: Script, repeat: int, everyone: Floats, used: Usage
) -> None:
    """Add an iteration to the file in ``out``: a line of its row, and in the first round its spans."""
    iteration_s = float(everyone[:, -1].max())
    compute_s = script.played_by(
        len(everyone) - 1
    ).compute_s  # of the straggler, if there is one
    row = {
        "case": script.case.key,
        "repeat": repeat,
        "iteration": 0,
        "iteration_s": iteration_s,
        "compute_s": compute_s,
        "exposed_communication_s": iteration_s - compute_s,
        "processor_load": used.busy,
        "processor_limited": used.limited,
        "stolen": used.stolen,
        "late": used.late,
        "others": used.others,
        "disturbed": used.disturbed,
    }
    spans = (
        [] if repeat else make_timeline(script, everyone).to_frame().to_dict("records")
    )
    append_text(out / ITERATIONS, json.dumps([row, spans]) + "\n")


def keep_complete(out: Path) -> list[tuple[str, int]]:
    """Return (case's key, repeat) of the iterations in ``out``; half a line, of a kill, is removed."""
    (out / ITERATIONS).write_text(text := _complete(out))
    return [
        (row["case"], row["repeat"]) for row, _ in map(json.loads, text.splitlines())
    ]


def read_replayed(out: Path, cases: Iterable[Case]) -> Replayed:
    """Read the iterations of ``cases`` that a replay into ``out`` completed. Raises UserError for none."""
    described = {case.key: asdict(case) for case in cases}
    runs, shown = [], []
    for row, spans in map(json.loads, _complete(out).splitlines()):
        if case := described.get(row["case"]):
            runs.append({**row, **case, "origin": "replayed"})
            shown += [
                {"case": row["case"], "repeat": row["repeat"], **span} for span in spans
            ]
    if not runs:
        raise UserError(f"replay: no iteration was completed in {out}")
    columns = ["case", "repeat", *TIMELINE_COLUMNS]
    return Replayed(pd.DataFrame(runs), pd.DataFrame(shown, columns=columns))


def _complete(out: Path) -> str:
    """Return the whole lines of the file in ``out``, without half a line that a kill has left."""
    text = (out / ITERATIONS).read_text() if (out / ITERATIONS).exists() else ""
    return text[: text.rfind("\n") + 1]
