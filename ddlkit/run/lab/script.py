"""What a case asks of its ranks, and what comes back of it: their recordings, as spans and as rows.

Rank 0 appends each iteration to a file when it is complete, so that a kill loses only the one under way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.link import way_s
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    Selecting,
    SparseGather,
    elements_of,
    group_selection_s,
    selected,
)
from ddlkit.core.timeline import COLUMNS as TIMELINE_COLUMNS
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.run.jobs.launch import Place
from ddlkit.run.vitals import Usage
from ddlkit.store.files import append_text

Floats = NDArray[np.float64]

ITERATIONS = "replay.jsonl"
SETTLE_S = 0.1  # around an iteration: checks, and the exchange of what was seen


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
    compute_s: float | None = None,
    **axes: Any,
) -> PlannedCase:
    """Plan the profile by ``spec``. Raises UserError for a plan that cannot be made for it.

    Time is dilated so that an iteration computes as long as one message of everything takes, where a model
    of their overlap has most to lose; or for ``compute_s``, whatever it sends.

    cost : of a group by its dense size; that of `ddlkit.core.sparse.SparseGather` at a density below 1. What
        it knows of selecting is dilated, too, as a replay waits it out
    axes : further fields of the Case, such as density, straggler
    """
    workload = profile.workload()
    wanted_s = float(cost(workload.bytes.sum())) if compute_s is None else compute_s
    dilation = float(f"{wanted_s / workload.compute_s:.4g}")
    if isinstance(cost, SparseGather) and (selecting := cost.selecting) is not None:
        cost = replace(cost, selecting=lambda n, density: dilation * selecting(n, density))
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
        **axes,
    )
    return PlannedCase(case, workload, plan)


@dataclass(frozen=True)
class Script:
    """What a rank plays in one iteration; times in seconds from the common start, dilated.

    ready_s : when each group is ready, without the selections before it
    buffered_s : how long the first gradient of each group waits in the buffer for the last
    bytes, elements : size of each group, and its float32 elements
    kept : how many elements of each group are sent, () where all are
    selection_s : how long each selection takes, () where there is none
    """

    case: Case
    forward_s: float
    ready_s: Sequence[float]
    buffered_s: Sequence[float]
    bytes: Sequence[int]
    elements: Sequence[int]
    update_s: float
    kept: Sequence[int] = ()
    selection_s: Sequence[float] = ()

    @classmethod
    def from_case(cls, planned: PlannedCase, selection: Selecting | None = None) -> Script:
        """Make the script of a case; one that gathers waits out recorded times of selection."""
        case, plan = planned.case, planned.plan
        if case.negotiated:
            raise UserError(f"replay: case {case.key}: v0.2-studies could replay negotiated cases")
        slow = planned.workload.scaled(case.dilation)
        elements = elements_of(plan.group_bytes(slow)).astype(int).tolist()
        sparse: dict[str, Sequence[Any]] = {}
        if case.collective == "all_gather":
            if selection is None:
                raise UserError(f"replay: case {case.key} waits out selections of unknown times")
            waited_s = case.dilation * group_selection_s(slow, plan, case.density, selection)
            kept = [selected(size, case.density) for size in elements]
            sparse = {"kept": kept, "selection_s": waited_s.tolist()}
        ready_s = plan.group_ready_s(slow)
        return cls(
            case=case,
            forward_s=slow.forward_s,
            ready_s=ready_s.tolist(),
            buffered_s=(ready_s - slow.ready_s[list(plan.starts)]).tolist(),
            bytes=plan.group_bytes(slow).tolist(),
            elements=elements,
            update_s=slow.update_s,
            **sparse,
        )

    @property
    def compute_s(self) -> float:
        """Return the iteration without communication."""
        return self.ready_s[-1] + sum(self.selection_s) + self.update_s

    @property
    def sent_bytes(self) -> Sequence[int]:
        """Return what a rank sends of each group: a value per element, and an index if not all are sent."""
        return [2 * ELEMENT_BYTES * k for k in self.kept] or self.bytes

    @property
    def expected_s(self) -> float:
        """Return a generous guess of the iteration: no overlap, and twice the bytes in each direction."""
        case = self.case
        byte_s = 16 / case.link_bits_per_s if case.link_bits_per_s else 1e-8
        wire_s = sum(self.sent_bytes) * byte_s * (case.workers if self.kept else 1)
        wire_s += len(self.bytes) * 4 * case.workers * way_s(case.link)  # a step asks first
        return self.compute_s * case.straggler + wire_s + SETTLE_S

    def played_by(self, rank: int) -> Script:
        """Return the script of that rank: the last one is the straggler, if there is one."""
        slower = self.case.straggler if rank == self.case.workers - 1 else 1.0
        times = ("forward_s", "ready_s", "buffered_s", "selection_s", "update_s")
        slow: Any = {name: np.multiply(slower, getattr(self, name)).tolist() for name in times}
        return replace(self, **slow)


# -- what comes back -----------------------------------------------------------------------------


class Recording(NamedTuple):
    """One iteration of one rank, in seconds from the common start.

    awake_s, selected_s, posted_s, done_s : (G,) when the rank woke with a group's gradients, had selected,
        went on computing, and saw its messages complete
    forward_end_s : when the rank woke at the end of forward
    wait_s, waited_s, end_s : start and end of the wait for the last collective; end of the update
    """

    awake_s: Floats
    selected_s: Floats
    posted_s: Floats
    done_s: Floats
    forward_end_s: float
    wait_s: float
    waited_s: float
    end_s: float

    @classmethod
    def from_array(cls, values: Floats) -> Recording:
        """Make the recording whose fields follow one another in an array (4 G + 4,), as ranks exchange it."""
        return cls(*values[:-4].reshape(4, -1), *values[-4:].tolist())


class Replayed(NamedTuple):
    """Frames of a replay. All times are as they passed: those of the dilated workload.

    runs : rows of the ``runs`` schema, origin "replayed", one per iteration
    timeline : rows of the ``timeline`` schema, of every rank, for the first round
    """

    runs: pd.DataFrame
    timeline: pd.DataFrame


def make_timeline(script: Script, everyone: Sequence[Recording]) -> Timeline:
    """Make spans of all ranks, in seconds from the common start; ``bytes`` is what a rank contributes.

    A collective begins when it is posted and its predecessor has ended; "wait" begins with the last post. The
    backward pass of several gradients is two spans: until the first is ready, and until the last.
    """
    return Timeline.from_rows(
        {**span, "rank": rank, "origin": "replayed"}
        for rank, recording in enumerate(everyone)
        for span in _spans(script.played_by(rank), recording)
    )


def _spans(script: Script, seen: Recording) -> Iterable[dict[str, Any]]:
    def span(kind: str, group: int, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
        task = kind if group < 0 else f"{kind} {group}"
        times = {"start_s": start_s, "end_s": max(start_s, end_s)}
        return {"task": task, "kind": kind, "stream": "compute", "group": group, **times, **more}

    yield span("forward", -1, 0.0, seen.forward_end_s)
    begin_s, free_s = seen.forward_end_s, 0.0
    for group, n_bytes in enumerate(script.bytes):
        times = (seen.awake_s, seen.selected_s, seen.posted_s, seen.done_s)
        awake_s, selected_s, posted_s, done_s = (float(time_s[group]) for time_s in times)
        first_s = max(begin_s, awake_s - script.buffered_s[group])
        if first_s < awake_s:
            yield span("backward", group, begin_s, first_s, task=f"backward {group}, first")
            begin_s = first_s
        yield span("backward", group, begin_s, awake_s, bytes=n_bytes)
        if script.kept:
            yield span("sparsify", group, awake_s, selected_s, bytes=n_bytes)
        sent = {"stream": "communication", "bytes": script.sent_bytes[group]}
        yield span(script.case.collective, group, max(selected_s, free_s), done_s, **sent)
        begin_s, free_s = posted_s, done_s
    yield span("wait", -1, seen.wait_s, seen.waited_s)
    yield span("update", -1, seen.waited_s, seen.end_s)


# -- the file ----------------------------------------------------------------------------------


def append_iteration(
    out: Path, script: Script, repeat: int, everyone: Sequence[Recording], used: Usage
) -> None:
    """Add an iteration to the file in ``out``: a line of its row, and in the first round its spans."""
    iteration_s = max(seen.end_s for seen in everyone)
    compute_s = max(script.played_by(rank).compute_s for rank in range(len(everyone)))
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
    }
    spans = [] if repeat else make_timeline(script, everyone).to_frame().to_dict("records")
    append_text(out / ITERATIONS, json.dumps([row, spans]) + "\n")


def keep_complete(out: Path) -> list[tuple[str, int]]:
    """Return (case's key, repeat) of the iterations in ``out``; half a line, of a kill, is removed."""
    text = _complete(out)
    if (out / ITERATIONS).exists():
        (out / ITERATIONS).write_text(text)
    return [(row["case"], row["repeat"]) for row, _ in map(json.loads, text.splitlines())]


def read_replayed(out: Path, cases: Iterable[Case]) -> Replayed:
    """Read the iterations of ``cases`` that a replay into ``out`` has completed, be it still running or not.

    Raises UserError where there is none.
    """
    described = {case.key: asdict(case) for case in cases}
    played = [(row, spans) for row, spans in map(json.loads, _complete(out).splitlines())]
    played = [(row, spans) for row, spans in played if row["case"] in described]
    if not played:
        raise UserError(f"replay: no iteration was completed in {out}")
    runs = [{**row, **described[row["case"]], "origin": "replayed"} for row, _ in played]
    shown = [
        {"case": row["case"], "repeat": row["repeat"], **span}
        for row, spans in played
        for span in spans
    ]
    columns = ["case", "repeat", *TIMELINE_COLUMNS]
    return Replayed(pd.DataFrame(runs), pd.DataFrame(shown, columns=columns))


def _complete(out: Path) -> str:
    text = (out / ITERATIONS).read_text() if (out / ITERATIONS).exists() else ""
    return text[: text.rfind("\n") + 1]
