"""Replay of recorded compute with real collectives: what training would take on this network.

Each rank waits out the recorded compute by absolute deadlines and posts the real all-reduce of a
group when its last gradient would be ready. All ranks must run on one machine: they share its clock.

Waiting is sleeping. A spinning rank would be on time to the microsecond, but with more ranks than
cores it would take the processor from gloo's threads; how late the sleeper woke is recorded.
"""

from __future__ import annotations

import io
import itertools
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import psutil
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Workload
from ddlkit.run import ranks as peers
from ddlkit.run.launch import Place, launch, workspace
from ddlkit.run.ranks import PROCESSOR_LIMIT, Ranks

Floats = NDArray[np.float64]

HEAD_START_S = 0.01  # from the barrier to the common start: all ranks must have heard of it
FLOAT_BYTES = 4
ITERATIONS, TIMELINE = "replay.csv", "timeline.csv"


@dataclass(frozen=True)
class Script:
    """What a rank plays: when each group is ready, counted from the start, and how large it is."""

    case: str
    forward_s: float
    ready_s: tuple[float, ...]
    bytes: tuple[int, ...]
    update_s: float

    @property
    def compute_s(self) -> float:
        """The iteration without communication."""
        return self.ready_s[-1] + self.update_s

    @property
    def elements(self) -> list[int]:
        """float32 elements of each group: its bytes, rounded up."""
        return [-(-n_bytes // FLOAT_BYTES) for n_bytes in self.bytes]


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


# -- in the parent -----------------------------------------------------------------------------


def replay_join(raise_priority: bool) -> dict[str, Any]:
    """How ranks join for a replay, and must for a calibration that is to predict one.

    One gloo thread carries the collectives one after the other, as NCCL would.
    """
    return {"backend": "gloo", "gloo_threads": 1, "raise_priority": raise_priority}


def script(case: Case, workload: Workload, plan: FusionPlan) -> Script:
    """The case as its ranks play it; the workload's times are dilated by ``case.dilation``."""
    ends = ";".join(map(str, plan.ends))
    if case.ends != ends:
        raise UserError(f"replay: case {case.key} has ends {case.ends}, its plan has {ends}")
    slow = workload.scaled(case.dilation)
    return Script(
        case=case.key,
        forward_s=slow.forward_s,
        ready_s=tuple(plan.group_ready_s(slow).tolist()),
        bytes=tuple(plan.group_bytes(slow).tolist()),
        update_s=slow.update_s,
    )


def replay(
    place: Place,
    ranks: int,
    cases: Sequence[tuple[Case, Workload, FusionPlan]],
    rounds: int = 3,
    *,
    timeline_rounds: int = 1,
    raise_priority: bool = True,
    timeout_s: float | None = None,
    out: Path | None = None,
) -> Replayed:
    """Replay every case once a round, all in one launch, so that drift meets all cases alike.

    The sum of every all-reduce is checked. ``raise_priority`` must be as it was when the link was
    calibrated. With ``out``, rows are appended to files there as they come, and `finished` reads
    what an interrupted replay left.

    Raises UserError for cases that do not fit the place, and when a rank dies.
    """
    if not cases or rounds < 1:
        raise UserError(f"replay of {len(cases)} cases in {rounds} rounds: at least 1 of each")
    scripts = [script(*case) for case in cases]
    _check_cases([case for case, _, _ in cases], ranks, place)
    config = {
        "rounds": rounds,
        "timeline_rounds": timeline_rounds,
        "cases": [asdict(one) for one in scripts],
        "join": replay_join(raise_priority),
    }
    patience_s = timeout_s or 60 + 3 * rounds * _expected_s(scripts, place.link_bits_per_s)
    with workspace(out) as directory:
        for name in (ITERATIONS, TIMELINE):
            (directory / name).unlink(missing_ok=True)
        launch(
            "replay",
            {**config, "out": str(directory)},
            ranks=ranks,
            place=place,
            timeout_s=patience_s,
        )
        return finished(directory, [case for case, _, _ in cases])


def finished(out: Path, cases: Iterable[Case]) -> Replayed:
    """The iterations that a replay into ``out`` has completed, be it still running or dead."""
    key, late = ["case", "repeat"], ["lateness_median_s", "lateness_max_s"]
    rows = _read(out / ITERATIONS, key)
    spans = _read(out / TIMELINE, [*key, *TIMELINE_COLUMNS])
    if rows.empty:
        raise UserError(f"replay: no iteration was completed in {out}")
    described = pd.DataFrame([{"case": case.key, **asdict(case)} for case in cases])
    runs = rows.drop(columns=late).merge(described, on="case").assign(origin="replayed")
    # An iteration's spans are written before its row: those of an unfinished one have none.
    return Replayed(runs, spans.merge(rows[key], on=key), rows[[*key, *late]])


def _check_cases(cases: Sequence[Case], ranks: int, place: Place) -> None:
    for number, case in enumerate(cases):
        if case in cases[:number]:
            raise UserError(f"replay: case {case.key} ({case.plan}) is asked for twice")
        if (case.kind, case.workers, case.link) != ("replay", ranks, place.name):
            raise UserError(
                f"replay: case {case.key} is a {case.kind} of {case.workers} ranks over {case.link}, "
                f"not a replay of {ranks} over {place.name}"
            )


def _expected_s(scripts: Sequence[Script], bits_per_s: float) -> float:
    """A generous guess of one round: no overlap, and twice the bytes in each direction."""
    wire_s_per_byte = 2 * 8 / bits_per_s if bits_per_s else 1e-8
    return sum(one.compute_s + sum(one.bytes) * wire_s_per_byte for one in scripts)


# -- in each rank ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """One iteration of one rank, in seconds from the common start.

    awake_s, posted_s, done_s : (G,) when the rank woke to post group k, when the call returned, and
        when the collective was seen to be complete
    wait_s, waited_s, end_s : start and end of the wait for the last collective; end of the update
    forward_end_s : when the rank woke at the end of forward
    """

    awake_s: Floats
    posted_s: Floats
    done_s: Floats
    forward_end_s: float
    wait_s: float
    waited_s: float
    end_s: float

    def to_array(self) -> Floats:
        """(3 G + 4,) for the exchange between ranks."""
        scalars = [self.forward_end_s, self.wait_s, self.waited_s, self.end_s]
        return np.concatenate([self.awake_s, self.posted_s, self.done_s, scalars])

    @classmethod
    def from_array(cls, values: Floats) -> Recording:
        """The recording that ``to_array`` wrote down."""
        awake_s, posted_s, done_s = values[:-4].reshape(3, -1)
        return cls(awake_s, posted_s, done_s, *values[-4:].tolist())


def run_job(ranks: Ranks, config: dict[str, Any]) -> None:
    """The job "replay"; see `replay` for the settings. Rank 0 appends to two files in ``out``."""
    if not ranks.one_thread:
        raise UserError("replay needs gloo_threads 1: collectives must run one after the other")
    scripts = [Script(**row) for row in config["cases"]]
    out = Path(config["out"])
    buffer = torch.empty(max(sum(one.elements) for one in scripts))
    witness = _Witness()
    for repeat, one in itertools.product(range(config["rounds"]), scripts):
        recording, load = _iteration(ranks, one, buffer, witness)
        everyone = [Recording.from_array(row) for row in peers.everyones(recording.to_array())]
        if ranks.rank == 0:
            key = {"case": [one.case], "repeat": [repeat]}
            if repeat < config["timeline_rounds"]:
                spans = timeline(one, everyone).to_frame()
                _append(out / TIMELINE, pd.DataFrame(key).merge(spans, how="cross"))
            _append(out / ITERATIONS, pd.DataFrame({**key, **_row(one, everyone, load)}))
        if one is scripts[-1]:
            peers.say(f"replay: round {repeat + 1} of {config['rounds']} done")


def _iteration(
    ranks: Ranks, one: Script, buffer: torch.Tensor, witness: _Witness
) -> tuple[Recording, float]:
    """One iteration, started by all ranks at once, and the share of all cores that was in use."""
    parts = buffer[: sum(one.elements)].split(one.elements)
    for part in parts:
        part.fill_(ranks.rank + 1)
    start_s = float(peers.slowest([time.perf_counter()])[0]) + HEAD_START_S
    before = psutil.cpu_times()
    recording = _play(one, parts, start_s, witness)
    load = _load(before, psutil.cpu_times())
    expected = ranks.world_size * (ranks.world_size + 1) / 2
    for group, part in enumerate(parts):
        low, high = (float(value) for value in part.aminmax())
        if not low == high == expected:
            raise RuntimeError(f"replay: group {group} summed to {low}..{high}, not to {expected}")
    return recording, load


def _play(
    one: Script, parts: Sequence[torch.Tensor], start_s: float, witness: _Witness
) -> Recording:
    awake_s, posted_s = np.empty(len(parts)), np.empty(len(parts))
    works = []
    forward_end_s = _sleep_until(start_s + one.forward_s)
    for group, part in enumerate(parts):
        awake_s[group] = _sleep_until(start_s + one.ready_s[group])
        works.append(dist.all_reduce(part, async_op=True))
        witness.watch(works[-1])
        posted_s[group] = time.perf_counter()
    wait_s = time.perf_counter()
    for work in works:
        work.wait()
    waited_s = time.perf_counter()
    end_s = _sleep_until(waited_s + one.update_s)
    done_s = np.minimum(witness.seen(len(parts)), waited_s)
    scalars = [value - start_s for value in (forward_end_s, wait_s, waited_s, end_s)]
    return Recording(awake_s - start_s, posted_s - start_s, done_s - start_s, *scalars)


def _sleep_until(deadline_s: float) -> float:
    """Sleep to an absolute time of the performance counter; returns the time on waking."""
    while (rest_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(rest_s)
    return time.perf_counter()


class _Witness:
    """A thread that waits for the collectives one after the other and notes when each is complete.

    Not a callback on the collective: that would run in gloo's thread and hold up the next one. The
    wait costs no processor time; the note is late by one wake-up, as the waiting rank itself is.
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
    """Spans of all ranks, in seconds from the common start.

    Collectives run one after the other, so one begins when it is posted or when its predecessor
    ends, whichever is later. "wait" is from the last post until the last collective has ended.
    """
    return Timeline.from_rows(
        {**span, "rank": rank, "origin": "replayed"}
        for rank, recording in enumerate(everyone)
        for span in _spans(one, recording)
    )


def _spans(one: Script, seen: Recording) -> Iterable[dict[str, Any]]:
    def span(kind: str, group: int, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
        task = kind if group < 0 else f"{kind} {group}"
        times = {"start_s": start_s, "end_s": max(start_s, end_s)}
        return {"task": task, "kind": kind, "stream": "compute", "group": group, **times, **more}

    yield span("forward", -1, 0.0, seen.forward_end_s)
    begin_s, free_s = seen.forward_end_s, 0.0
    for group, n_bytes in enumerate(one.bytes):
        awake_s, done_s = float(seen.awake_s[group]), float(seen.done_s[group])
        yield span("backward", group, begin_s, awake_s, bytes=n_bytes)
        sent = {"stream": "communication", "bytes": n_bytes}
        yield span("allreduce", group, max(awake_s, free_s), done_s, **sent)
        begin_s, free_s = float(seen.posted_s[group]), done_s
    yield span("wait", -1, seen.wait_s, seen.waited_s)
    yield span("update", -1, seen.waited_s, seen.end_s)


def _row(one: Script, everyone: Sequence[Recording], load: float) -> dict[str, Any]:
    """What the runs table says of one iteration: that of the slowest rank."""
    iteration_s = max(recording.end_s for recording in everyone)
    late_s = np.concatenate([recording.awake_s - one.ready_s for recording in everyone])
    return {
        "iteration": 0,
        "iteration_s": iteration_s,
        "compute_s": one.compute_s,
        "exposed_communication_s": iteration_s - one.compute_s,
        "processor_load": load,
        "processor_limited": load >= PROCESSOR_LIMIT,
        "lateness_median_s": float(np.median(late_s)),
        "lateness_max_s": float(late_s.max()),
    }


def _load(before: Any, after: Any) -> float:
    """Share of all cores that was busy between two readings of `psutil.cpu_times`.

    The kernel already counts guests in user time; a core that waits for a disk is idle.
    """
    names = [name for name in before._fields if not name.startswith("guest")]
    spent = {name: getattr(after, name) - getattr(before, name) for name in names}
    total_s = sum(spent.values())
    idle_s = spent["idle"] + spent.get("iowait", 0.0)
    return 1.0 - idle_s / total_s if total_s > 0 else 0.0


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
