"""Replay of recorded compute with real collectives: what training would take on this network.

Each rank waits out the recorded compute by absolute deadlines and posts the real collective of a group
when its last gradient would be ready: an all-reduce, or where gradients are sparsified, after selection,
one all-gather of the values that are kept and one of their indices. Where a case is negotiated, a
coordinator must first say that all ranks are ready (`ddlkit.run.lab.negotiate`). All ranks must run on one
machine: they share its clock.

Waiting is sleeping. A spinning rank would be on time to the microsecond, but with more ranks than
cores it would take the processor from gloo's threads; how late the sleeper woke is recorded.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.link import turn_s
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    Selecting,
    group_elements,
    group_selection_s,
    selected,
)
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.run.instruments import processor
from ddlkit.run.instruments.processor import Usage
from ddlkit.run.jobs import ranks as peers
from ddlkit.run.jobs.launch import Place, launch, workspace
from ddlkit.run.jobs.ranks import Ranks
from ddlkit.run.lab.negotiate import Negotiator, meet

Floats = NDArray[np.float64]

HEAD_START_S = 0.01  # from the barrier to the common start: all ranks must have heard of it
SAY_S = 10.0  # between two lines of progress
ITERATIONS, TIMELINE = "replay.csv", "timeline.csv"
KEY = ["case", "repeat"]
REAL_SELECTION_S = 2e-8  # an element, generously, on a core
SETTLE_S = 0.1  # around an iteration: checks, and the exchange of what was seen

Selection = Selecting | None
"""How long selecting takes: recorded, so that it is waited out; None: really done, however long."""


@dataclass(frozen=True)
class Script:
    """What a rank plays: when each group is ready, counted from the start, and how large it is.

    ready_s : of each group, without the selections before it; elements : float32 elements of each
    buffered_s : how long the first gradient of each group waits in the buffer for the last
    kept : how many of them are sent, () where all are; selection_s : () where selection is real
    straggler : factor on all compute of the last rank
    negotiated : whether a coordinator says when a group may be posted
    in_flight : how many collectives are carried at once
    """

    case: str
    forward_s: float
    ready_s: tuple[float, ...]
    buffered_s: tuple[float, ...]
    bytes: tuple[int, ...]
    elements: tuple[int, ...]
    update_s: float
    kept: tuple[int, ...] = ()
    selection_s: tuple[float, ...] = ()
    straggler: float = 1.0
    negotiated: bool = False
    in_flight: int = 1

    @property
    def compute_s(self) -> float:
        """The iteration without communication, and without selections that are real."""
        return self.ready_s[-1] + sum(self.selection_s) + self.update_s

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """What a rank contributes of each group: a value an element, and an index if not all."""
        return tuple(2 * ELEMENT_BYTES * k for k in self.kept) or self.bytes

    def played_by(self, rank: int, ranks: int) -> Script:
        """The script of that rank: the last one is the straggler, if there is one."""
        if self.straggler == 1.0 or rank < ranks - 1:
            return self
        return replace(
            self,
            forward_s=self.forward_s * self.straggler,
            ready_s=tuple(self.straggler * ready_s for ready_s in self.ready_s),
            buffered_s=tuple(self.straggler * buffered_s for buffered_s in self.buffered_s),
            selection_s=tuple(self.straggler * select_s for select_s in self.selection_s),
            update_s=self.update_s * self.straggler,
        )


class Replayed(NamedTuple):
    """Frames of a replay. All times are as they passed: those of the dilated workload.

    runs : rows of the ``runs`` schema, origin "replayed", one an iteration
    timeline : rows of the ``timeline`` schema, of every rank, for the first rounds
    lateness : case, repeat, lateness_median_s, lateness_max_s: from the moment a group should have
        been posted to when its rank was awake to post it, over groups and ranks
    """

    runs: pd.DataFrame
    timeline: pd.DataFrame
    lateness: pd.DataFrame


Asked = tuple[Case, Workload, FusionPlan]
"""What to replay: the workload is undilated, the plan is the case's."""


# -- in the parent -----------------------------------------------------------------------------


def replay_join(raise_priority: bool, in_flight: int = 1) -> dict[str, Any]:
    """How ranks join for a replay, and must for a calibration that is to predict one.

    One gloo thread carries the collectives one after the other, as NCCL would; torch's default is 2.
    """
    return {"backend": "gloo", "gloo_threads": in_flight, "raise_priority": raise_priority}


def balanced(
    profile: LayerProfile,
    spec: str,
    cost: MessageCost,
    place: Place,
    *,
    density: float = 1.0,
    straggler: float = 1.0,
    compute_s: float | None = None,
    negotiated: bool = False,
    in_flight: int = 1,
    selection_sha256: str = "",
) -> Asked:
    """The profile under the plan ``spec``, compute as long as one message of everything.

    Time is dilated so that communication and compute weigh alike, where a model of their overlap has
    most to lose; or so that an iteration computes for ``compute_s``, whatever it sends.

    cost : of a group by its dense size; that of `ddlkit.core.sparse.SparseGather` at a density below 1
    """
    workload = profile.workload()
    wanted_s = float(cost(workload.bytes.sum())) if compute_s is None else compute_s
    ratio = wanted_s / workload.compute_s
    dilation = float(f"{ratio:.4g}")
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
        density=density,
        dilation=dilation,
        profile_sha256=profile.sha256,
        straggler=straggler,
        selection_sha256=selection_sha256,
        negotiated=negotiated,
        in_flight=in_flight,
    )
    return case, workload, plan


def script(case: Case, workload: Workload, plan: FusionPlan, selection: Selection = None) -> Script:
    """The case as its ranks play it; times, those of selection too, are dilated by ``case.dilation``."""
    ends = ";".join(map(str, plan.ends))
    if case.ends != ends:
        raise UserError(f"replay: case {case.key} has ends {case.ends}, its plan has {ends}")
    slow = workload.scaled(case.dilation)
    elements = group_elements(slow, plan)
    ready_s = plan.group_ready_s(slow)
    one = Script(
        case=case.key,
        forward_s=slow.forward_s,
        ready_s=tuple(ready_s.tolist()),
        buffered_s=tuple((ready_s - slow.ready_s[list(plan.starts)]).tolist()),
        bytes=tuple(plan.group_bytes(slow).tolist()),
        elements=tuple(elements),
        update_s=slow.update_s,
        straggler=case.straggler,
        negotiated=case.negotiated,
        in_flight=case.in_flight,
    )
    if case.collective == "all_reduce":
        return one
    one = replace(one, kept=tuple(selected(size, case.density) for size in elements))
    if not case.selection_sha256:
        return one
    if selection is None:
        raise UserError(f"replay: case {case.key} waits selection out, but no times are given")
    seconds = case.dilation * group_selection_s(slow, plan, case.density, selection)
    return replace(one, selection_s=tuple(seconds.tolist()))


def replay(
    place: Place,
    ranks: int,
    cases: Sequence[Asked],
    rounds: int = 3,
    *,
    selection: Selection = None,
    timeline_rounds: int = 1,
    raise_priority: bool = True,
    done: Collection[tuple[str, int]] | None = None,
    tries: int = 1,
    afterwards_s: float = 0.0,
    timeout_s: float | None = None,
    out: Path | None = None,
) -> Replayed:
    """Replay every case once a round, all in one launch, so that drift meets all cases alike.

    The result of every collective is checked. ``raise_priority`` must be as it was when the link was
    calibrated. With ``out``, rows are appended to files there as they come, and `finished` reads
    what an interrupted replay left.

    selection : recorded times of it, needed for cases with a ``selection_sha256``
    done : (case's key, repeat) of iterations that need not be played; what lies in ``out`` is kept
        and not played again either. None: begin anew
    tries : how often an iteration is played, at most, while the machine's host disturbs it
    afterwards_s : what is still to come after this replay, for the progress lines

    Raises UserError for cases that do not fit the place, and when a rank dies.
    """
    if not cases or rounds < 1:
        raise UserError(f"replay of {len(cases)} cases in {rounds} rounds: at least 1 of each")
    scripts = [script(*case, selection) for case in cases]
    _check_cases([case for case, _, _ in cases], ranks, place)
    expected_s = [_expected_s(one, place.link_bits_per_s, ranks) for one in scripts]
    patience_s = timeout_s or 60 + 3 * tries * rounds * sum(expected_s)
    with workspace(out) as directory:
        there = _discard(directory) if done is None else _keep_whole(directory)
        config = {
            "rounds": rounds,
            "timeline_rounds": timeline_rounds,
            "cases": [asdict(one) for one in scripts],
            "expected_s": expected_s,
            "done": [*there, *map(list, done or ())],
            "tries": tries,
            "afterwards_s": afterwards_s,
            "join": replay_join(raise_priority, cases[0][0].in_flight),
            "out": str(directory),
        }
        launch("replay", config, ranks=ranks, place=place, timeout_s=patience_s)
        return finished(directory, [case for case, _, _ in cases])


def _discard(out: Path) -> list[list[Any]]:
    for name in (ITERATIONS, TIMELINE):
        (out / name).unlink(missing_ok=True)
    return []


def _keep_whole(out: Path) -> list[list[Any]]:
    """(case, repeat) of what is complete in ``out``; what a kill left incomplete goes."""
    rows, spans = _read(out / ITERATIONS, KEY), _read(out / TIMELINE, [*KEY, *TIMELINE_COLUMNS])
    if rows.empty:
        return _discard(out)
    for name, frame in ((ITERATIONS, rows), (TIMELINE, spans.merge(rows[KEY], on=KEY))):
        if (out / name).exists():
            frame.to_csv(out / name, index=False)
    found: list[list[Any]] = rows[KEY].to_numpy(dtype=object).tolist()
    return found


def finished(out: Path, cases: Iterable[Case]) -> Replayed:
    """The iterations that a replay into ``out`` has completed, be it still running or dead.

    Those of other cases than ``cases`` are left out.
    """
    late = ["lateness_median_s", "lateness_max_s"]
    rows = _read(out / ITERATIONS, KEY)
    spans = _read(out / TIMELINE, [*KEY, *TIMELINE_COLUMNS])
    described = pd.DataFrame([{"case": case.key, **asdict(case)} for case in cases])
    rows = rows[rows["case"].isin(described["case"])]
    if rows.empty:
        raise UserError(f"replay: no iteration was completed in {out}")
    runs = rows.drop(columns=late).merge(described, on="case").assign(origin="replayed")
    # An iteration's spans are written before its row: those of an unfinished one have none.
    return Replayed(runs, spans.merge(rows[KEY], on=KEY), rows[[*KEY, *late]])


def _check_cases(cases: Sequence[Case], ranks: int, place: Place) -> None:
    for number, case in enumerate(cases):
        if case in cases[:number]:
            raise UserError(f"replay: case {case.key} ({case.plan}) is asked for twice")
        sparse = case.collective == "all_gather"
        if case.collective not in ("all_reduce", "all_gather") or not (
            0 < case.density <= 1 and sparse or case.density == 1
        ):
            raise UserError(
                f"replay: case {case.key} is an {case.collective} of density {case.density}: dense "
                "gradients (density 1) are all_reduced, sparsified ones all_gathered"
            )
        if case.in_flight != cases[0].in_flight:
            raise UserError("replay: all cases of a launch must have as many messages in flight")
        if case.straggler < 1:
            raise UserError(f"replay: case {case.key} has straggler {case.straggler}: at least 1")
        if (case.kind, case.workers, case.link) != ("replay", ranks, place.name):
            raise UserError(
                f"replay: case {case.key} is a {case.kind} of {case.workers} ranks over {case.link}, "
                f"not a replay of {ranks} over {place.name}"
            )


def _expected_s(one: Script, bits_per_s: float, ranks: int) -> float:
    """A generous guess of one iteration: no overlap, and twice the bytes in each direction."""
    wire_s_per_byte = 2 * 8 / bits_per_s if bits_per_s else 1e-8
    copies = ranks if one.kept else 1
    compute_s = one.compute_s
    if one.kept and not one.selection_s:
        compute_s += ranks * sum(one.elements) * REAL_SELECTION_S
    wire_s = copies * sum(one.sent_bytes) * wire_s_per_byte
    return compute_s * one.straggler + wire_s + SETTLE_S


# -- in each rank ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """One iteration of one rank, in seconds from the common start.

    awake_s, selected_s, agreed_s, posted_s, done_s : (G,) when the rank woke with the gradients of group
        k, when it had selected, when its messages might be posted, when it went on computing, and when
        its messages were seen to be complete
    wait_s, waited_s, end_s : start and end of the wait for the last collective; end of the update
    forward_end_s : when the rank woke at the end of forward
    """

    awake_s: Floats
    selected_s: Floats
    agreed_s: Floats
    posted_s: Floats
    done_s: Floats
    forward_end_s: float
    wait_s: float
    waited_s: float
    end_s: float

    def to_array(self) -> Floats:
        """(5 G + 4,) for the exchange between ranks."""
        scalars = [self.forward_end_s, self.wait_s, self.waited_s, self.end_s]
        groups = [self.awake_s, self.selected_s, self.agreed_s, self.posted_s, self.done_s]
        return np.concatenate([*groups, scalars])

    @classmethod
    def from_array(cls, values: Floats) -> Recording:
        """The recording that ``to_array`` wrote down."""
        return cls(*values[:-4].reshape(5, -1), *values[-4:].tolist())

    def selection_s(self, one: Script) -> Floats:
        """(G,) how long each selection took, by the script where it was waited out."""
        return np.asarray(one.selection_s) if one.selection_s else self.selected_s - self.awake_s


def run_job(ranks: Ranks, config: dict[str, Any]) -> None:
    """The job "replay"; see `replay` for the settings. Rank 0 appends to two files in ``out``."""
    scripts = [Script(**{k: _tupled(v) for k, v in row.items()}) for row in config["cases"]]
    out, done = Path(config["out"]), {tuple(pair) for pair in config["done"]}
    witness, arena = _Witness(), _Arena(ranks, scripts)
    negotiator = meet(ranks) if any(one.negotiated for one in scripts) else None
    turns = deque(
        _Turn(repeat, one, expected_s, config["tries"])
        for repeat in range(config["rounds"])
        for one, expected_s in zip(scripts, config["expected_s"], strict=True)
        if (one.case, repeat) not in done
    )
    progress = _Progress([turn.expected_s for turn in turns], config["afterwards_s"])
    while turns:
        turn = turns.popleft()
        repeat, one = turn.repeat, turn.one
        line = negotiator if one.negotiated else None
        recording, used = _iteration(ranks, one, arena, witness, line)
        if used.disturbed and turn.tries > 1:
            turns.append(replace(turn, tries=turn.tries - 1))
            continue
        everyone = [Recording.from_array(row) for row in peers.everyones(recording.to_array())]
        if ranks.rank == 0:
            key = {"case": [one.case], "repeat": [repeat]}
            if repeat < config["timeline_rounds"]:
                spans = timeline(one, everyone).to_frame()
                _append(out / TIMELINE, pd.DataFrame(key).merge(spans, how="cross"))
            _append(out / ITERATIONS, pd.DataFrame({**key, **_row(one, everyone, used)}))
        progress.step()


@dataclass(frozen=True)
class _Turn:
    """One iteration that is to be played; again, later, if the host disturbed it."""

    repeat: int
    one: Script
    expected_s: float
    tries: int


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class _Progress:
    """Says now and then how many iterations are done and how long the rest will take."""

    def __init__(self, expected_s: Sequence[float], afterwards_s: float) -> None:
        self._expected_s, self._afterwards_s = expected_s, afterwards_s
        self._done, self._begun_s = 0, time.monotonic()
        self._said_s = self._begun_s

    def step(self) -> None:
        """One more iteration is done."""
        self._done += 1
        now_s = time.monotonic()
        total = len(self._expected_s)
        if self._done < total and now_s - self._said_s < SAY_S:
            return
        self._said_s = now_s
        # The guess is generous, so what remains is scaled by how it went so far.
        pace = (now_s - self._begun_s) / sum(self._expected_s[: self._done])
        rest_s = pace * sum(self._expected_s[self._done :]) + self._afterwards_s
        peers.say(f"replay: {self._done} of {total} iterations done, about {rest_s:.0f} s left")


class _Arena:
    """The memory of a rank's messages, large enough for any of the scripts."""

    def __init__(self, ranks: Ranks, scripts: Sequence[Script]) -> None:
        self.ranks = ranks
        dense = [sum(one.elements) for one in scripts if not one.kept]
        self._buffer = torch.empty(max(dense, default=0))
        kept = max((sum(one.kept) for one in scripts), default=0)
        self._mine = [torch.empty(kept, dtype=kind) for kind in (torch.float32, torch.int32)]
        self._all = [one.new_empty(one.numel() * ranks.world_size) for one in self._mine]
        real = [max(one.elements) for one in scripts if one.kept and not one.selection_s]
        # Equal on all ranks, so that each knows what the others select.
        self._magnitudes = torch.rand(
            max(real, default=0), generator=torch.Generator().manual_seed(0)
        )

    def messages(self, one: Script) -> Sequence[_Message]:
        """One for each group of the script, ready to be posted."""
        if not one.kept:
            parts = self._buffer[: sum(one.elements)].split(one.elements)
            return [_Dense(part, self.ranks) for part in parts]
        mine = [whole[: sum(one.kept)].split(one.kept) for whole in self._mine]
        out = [k * self.ranks.world_size for k in one.kept]
        everyone = [whole[: sum(out)].split(out) for whole in self._all]
        looked_at = () if one.selection_s else one.elements
        return [
            _Sparse(
                self.ranks,
                [kind[group] for kind in mine],
                [kind[group] for kind in everyone],
                self._magnitudes[: looked_at[group]] if looked_at else None,
            )
            for group in range(len(one.kept))
        ]


class _Dense:
    """A group that is all-reduced: nothing is selected."""

    def __init__(self, part: torch.Tensor, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks
        part.fill_(ranks.rank + 1)

    def select(self) -> None:
        """Nothing: all of it is sent."""

    def post(self) -> list[dist.Work]:
        """The collectives of this group, in order."""
        return [dist.all_reduce(self._part, async_op=True)]

    def right(self) -> bool:
        """Whether every element is the sum over all ranks."""
        expected = self._ranks.world_size * (self._ranks.world_size + 1) / 2
        low, high = (float(value) for value in self._part.aminmax())
        return low == high == expected


class _Sparse:
    """A group whose largest elements are gathered from all ranks: values and indices.

    mine, everyone : [values, indices] of this rank, and of all; magnitudes : what is selected from,
    None where selection is only waited out
    """

    def __init__(
        self,
        ranks: Ranks,
        mine: Sequence[torch.Tensor],
        everyone: Sequence[torch.Tensor],
        magnitudes: torch.Tensor | None,
    ) -> None:
        self._ranks, self._mine, self._everyone = ranks, mine, everyone
        self._magnitudes = magnitudes
        values, indices = mine
        values.fill_(ranks.rank + 1)
        torch.arange(len(indices), out=indices)
        for gathered in everyone:
            gathered.fill_(-1)

    def select(self) -> None:
        """Find the largest, if that is to be done really."""
        if self._magnitudes is not None:
            k = len(self._mine[1])
            self._mine[1].copy_(torch.topk(self._magnitudes, k, sorted=False).indices)

    def post(self) -> list[dist.Work]:
        """The collectives of this group, in order."""
        return [
            peers.gather_single(gathered, mine, async_op=True)
            for mine, gathered in zip(self._mine, self._everyone, strict=True)
        ]

    def right(self) -> bool:
        """Whether each rank's values and indices stand where they belong."""
        values, indices = (one.view(self._ranks.world_size, -1) for one in self._everyone)
        expected = torch.arange(1.0, self._ranks.world_size + 1)[:, None]
        return bool((values == expected).all() and (indices == self._mine[1]).all())


_Message = _Dense | _Sparse


def _iteration(
    ranks: Ranks, one: Script, arena: _Arena, witness: _Witness, negotiator: Negotiator | None
) -> tuple[Recording, Usage]:
    """One iteration, started by all ranks at once, and how the cores were used; alike on all ranks.

    They count as busy from the first message to the last: where the link and not the processor should
    be at work. Over a whole iteration, in which ranks mostly sleep, their limit would not show.
    """
    messages = arena.messages(one)
    mine = one.played_by(ranks.rank, ranks.world_size)
    start_s = float(peers.slowest([time.perf_counter()])[0]) + HEAD_START_S
    begun = processor.reading()
    recording, sending = _play(mine, _Posts(messages, witness), start_s, negotiator)
    stolen = processor.usage(begun, processor.reading()).stolen
    busy, stolen = peers.slowest([sending.busy, stolen]).tolist()
    for group, message in enumerate(messages):
        if not message.right():
            raise RuntimeError(f"replay: wrong values in group {group} of case {one.case}")
    return recording, Usage(busy, stolen)


class _Posts:
    """The groups of an iteration as they are posted: at once, or in the negotiator's thread."""

    def __init__(self, messages: Sequence[_Message], witness: _Witness) -> None:
        self.messages, self.witness = messages, witness
        self.agreed_s = np.empty(len(messages))
        self._works: list[dist.Work] = []

    def post(self, group: int) -> None:
        """Send a group; the groups are posted in their order."""
        self.agreed_s[group] = time.perf_counter()
        works = self.messages[group].post()
        self.witness.watch(works[-1])
        self._works += works

    def wait(self) -> None:
        """Until all that was posted is complete."""
        for work in self._works:
            work.wait()


def _play(
    one: Script, posts: _Posts, start_s: float, negotiator: Negotiator | None = None
) -> tuple[Recording, Usage]:
    n = len(posts.messages)
    awake_s, selected_s, posted_s = np.empty((3, n))
    spent_s = 0.0  # by the selections so far: all that follows is later by it
    hand_over = posts.post
    if negotiator:
        negotiator.begin(posts.post)
        hand_over = negotiator.report
    forward_end_s = _sleep_until(start_s + one.forward_s)
    for group, message in enumerate(posts.messages):
        ready_s = start_s + one.ready_s[group] + spent_s
        awake_s[group] = selected_s[group] = _sleep_until(ready_s)
        if one.selection_s:
            spent_s += one.selection_s[group]
            selected_s[group] = _sleep_until(ready_s + one.selection_s[group])
        elif one.kept:
            message.select()
            selected_s[group] = time.perf_counter()
            spent_s += selected_s[group] - awake_s[group]
        if group == 0:
            before = processor.reading()
        hand_over(group)
        posted_s[group] = time.perf_counter()
    wait_s = time.perf_counter()
    if negotiator:
        negotiator.finish()
    posts.wait()
    waited_s = time.perf_counter()
    sending = processor.usage(before, processor.reading())
    end_s = _sleep_until(waited_s + one.update_s)
    done_s = np.minimum(posts.witness.seen(n), waited_s)
    scalars = [value - start_s for value in (forward_end_s, wait_s, waited_s, end_s)]
    groups = [awake_s, selected_s, posts.agreed_s, posted_s, done_s]
    seen = np.concatenate([*(times - start_s for times in groups), scalars])
    return Recording.from_array(seen), sending


def _sleep_until(deadline_s: float) -> float:
    """Sleep to an absolute time of the performance counter; returns the time on waking."""
    while (rest_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(rest_s)
    return time.perf_counter()


class _Witness:
    """A thread that waits for the collectives one after the other and notes when each is complete.

    Not a callback on the collective: that would run in gloo's thread and hold up the next one. The
    wait costs no processor time; the note is late by one wake-up, as the waiting rank itself is, and of
    several in flight one that overtakes another is noted with it.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[dist.Work] = queue.SimpleQueue()
        self._times: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def watch(self, work: dist.Work) -> None:
        """Note when ``work`` completes."""
        self._works.put(work)

    def seen(self, n: int) -> Floats:
        """(n,) times of completion, in the order of `watch`."""
        return np.array([self._times.get() for _ in range(n)])

    def _run(self) -> None:
        while True:
            self._works.get().wait()
            self._times.put(time.perf_counter())


# -- what came of it ---------------------------------------------------------------------------


def timeline(one: Script, everyone: Sequence[Recording]) -> Timeline:
    """Spans of all ranks, in seconds from the common start; ``bytes`` is what a rank contributes.

    A collective begins when it may be posted or when those before it leave room for it, whichever is
    later: if one is in flight at a time, when its predecessor ends. "wait" is from the last post until
    the last collective has ended. Of a group of several gradients, the backward pass is two spans: until
    the first is ready, and until the last.
    """
    return Timeline.from_rows(
        {**span, "rank": rank, "origin": "replayed"}
        for rank, recording in enumerate(everyone)
        for span in _spans(one.played_by(rank, len(everyone)), recording)
    )


def _spans(one: Script, seen: Recording) -> Iterable[dict[str, Any]]:
    def span(kind: str, group: int, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
        task = kind if group < 0 else f"{kind} {group}"
        times = {"start_s": start_s, "end_s": max(start_s, end_s)}
        return {"task": task, "kind": kind, "stream": "compute", "group": group, **times, **more}

    yield span("forward", -1, 0.0, seen.forward_end_s)
    begin_s = seen.forward_end_s
    message = "all_gather" if one.kept else "all_reduce"
    free_s = turn_s(seen.done_s, one.in_flight)
    for group, n_bytes in enumerate(one.bytes):
        awake_s, done_s = float(seen.awake_s[group]), float(seen.done_s[group])
        selected_s, agreed_s = float(seen.selected_s[group]), float(seen.agreed_s[group])
        first_s = max(begin_s, awake_s - one.buffered_s[group])
        if first_s < awake_s:
            yield span("backward", group, begin_s, first_s, task=f"backward {group}, first")
            begin_s = first_s
        yield span("backward", group, begin_s, awake_s, bytes=n_bytes)
        if one.kept:
            yield span("sparsify", group, awake_s, selected_s, bytes=n_bytes)
        if one.negotiated:
            yield span("negotiate", group, selected_s, agreed_s, stream="negotiation")
        sent = {"stream": "communication", "bytes": one.sent_bytes[group]}
        yield span(message, group, max(agreed_s, float(free_s[group])), done_s, **sent)
        begin_s = float(seen.posted_s[group])
    yield span("wait", -1, seen.wait_s, seen.waited_s)
    yield span("update", -1, seen.waited_s, seen.end_s)


def _row(one: Script, everyone: Sequence[Recording], used: Usage) -> dict[str, Any]:
    """What the runs table says of one iteration: that of the slowest rank."""
    iteration_s = max(recording.end_s for recording in everyone)
    compute_s, late_s = 0.0, []
    for rank, recording in enumerate(everyone):
        played = one.played_by(rank, len(everyone))
        selection_s = recording.selection_s(played)
        before_s = np.cumsum(selection_s) - selection_s
        late_s.append(recording.awake_s - played.ready_s - before_s)
        real_s = 0.0 if played.selection_s else float(selection_s.sum())
        compute_s = max(compute_s, played.compute_s + real_s)
    late = np.concatenate(late_s)
    return {
        "iteration": 0,
        "iteration_s": iteration_s,
        "compute_s": compute_s,
        "exposed_communication_s": iteration_s - compute_s,
        "processor_load": used.busy,
        "processor_limited": used.limited,
        "stolen": used.stolen,
        "lateness_median_s": float(np.median(late)),
        "lateness_max_s": float(late.max()),
    }


def _append(path: Path, frame: pd.DataFrame) -> None:
    """Add rows to a CSV file, which gets its header with the first ones."""
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)


def _read(path: Path, columns: list[str]) -> pd.DataFrame:
    """The complete rows of a file that `_append` may have been killed while writing.

    Without any, a frame with these columns and no row.
    """
    text = path.read_text() if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    return pd.read_csv(io.StringIO(complete)) if complete else pd.DataFrame(columns=columns)
