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
    profile: LayerProfile, spec: str, cost: MessageCost, place: Place, **axes: Any
) -> PlannedCase:
    """Plan the profile by ``spec``. Raises UserError for a plan that cannot be made for it.

    Time is dilated so that an iteration computes as long as one message of everything takes, where a model
    of their overlap has most to lose.

    cost : of a group by its dense size. What a `SparseGather` knows of selecting is dilated, too
    axes : further fields of the Case, such as density, straggler
    """
    workload = profile.workload()
    dilation = float(f"{float(cost(workload.bytes.sum())) / workload.compute_s:.4g}")
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
        elements = elements_of(plan.group_bytes(slow)).astype(int)
        sparse: dict[str, Sequence[Any]] = {}
        if case.collective == "all_gather":
            if selection is None:
                raise UserError(f"replay: case {case.key} waits out selections of unknown times")
            waited_s = case.dilation * selection(elements, case.density)
            kept = [selected(size, case.density) for size in elements.tolist()]
            sparse = {"kept": kept, "selection_s": waited_s.tolist()}
        ready_s = plan.group_ready_s(slow)
        return cls(
            case=case,
            forward_s=slow.forward_s,
            ready_s=ready_s.tolist(),
            buffered_s=(ready_s - slow.ready_s[list(plan.starts)]).tolist(),
            bytes=plan.group_bytes(slow).tolist(),
            elements=elements.tolist(),
            update_s=slow.update_s,
            **sparse,
        )

    @property
    def compute_s(self) -> float:
        """Return the iteration without communication."""
        return self.ready_s[-1] + sum(self.selection_s) + self.update_s

    @property
    def sent_bytes(self) -> Sequence[int]:
        """Return bytes that a rank sends of each group; beside values that are selected, their indices."""
        return [2 * ELEMENT_BYTES * k for k in self.kept] or self.bytes

    @property
    def expected_s(self) -> float:
        """Return generous seconds of the iteration: no overlap, and twice the bytes each way."""
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


class Replayed(NamedTuple):
    """Tables of a replay: ``runs``, and of the first round ``timeline``; times are dilated."""

    runs: pd.DataFrame
    timeline: pd.DataFrame


def make_timeline(script: Script, everyone: Floats) -> Timeline:
    """Make spans of all ranks, in seconds from the common start; ``bytes`` is what a rank contributes.

    everyone : (ranks, 4 G + 4) seconds: when a rank woke with each group's gradients, had selected, went on
        computing, and saw its messages complete; ends of forward, of posting, of waiting and of the update

    A collective begins when it is posted and its predecessor has ended. The backward pass of several
    gradients is two spans: until the first is ready, and until the last.
    """
    return Timeline.from_rows(
        {**span, "rank": rank, "origin": "replayed"}
        for rank, seen_s in enumerate(everyone)
        for span in _spans(script.played_by(rank), seen_s)
    )


def _spans(script: Script, seen_s: Floats) -> Iterable[dict[str, Any]]:
    forward_end_s, wait_s, waited_s, end_s = seen_s[-4:].tolist()

    def span(kind: str, group: int, start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
        task = kind if group < 0 else f"{kind} {group}"
        times = {"start_s": start_s, "end_s": max(start_s, end_s)}
        return {"task": task, "kind": kind, "stream": "compute", "group": group, **times, **more}

    yield span("forward", -1, 0.0, forward_end_s)
    begin_s, free_s = forward_end_s, 0.0
    for group, n_bytes in enumerate(script.bytes):
        awake_s, selected_s, posted_s, done_s = seen_s[:-4].reshape(4, -1)[:, group].tolist()
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
    yield span("wait", -1, wait_s, waited_s)
    yield span("update", -1, waited_s, end_s)


# -- the file ----------------------------------------------------------------------------------


def append_iteration(out: Path, script: Script, repeat: int, everyone: Floats, used: Usage) -> None:
    """Add an iteration to the file in ``out``: a line of its row, and in the first round its spans."""
    iteration_s = float(everyone[:, -1].max())
    compute_s = script.played_by(len(everyone) - 1).compute_s  # of the straggler, if there is one
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
    (out / ITERATIONS).write_text(text := _complete(out))
    return [(row["case"], row["repeat"]) for row, _ in map(json.loads, text.splitlines())]


def read_replayed(out: Path, cases: Iterable[Case]) -> Replayed:
    """Read the iterations of ``cases`` that a replay into ``out`` completed. Raises UserError for none."""
    described = {case.key: asdict(case) for case in cases}
    runs, shown = [], []
    for row, spans in map(json.loads, _complete(out).splitlines()):
        if case := described.get(row["case"]):
            runs.append({**row, **case, "origin": "replayed"})
            shown += [{"case": row["case"], "repeat": row["repeat"], **span} for span in spans]
    if not runs:
        raise UserError(f"replay: no iteration was completed in {out}")
    columns = ["case", "repeat", *TIMELINE_COLUMNS]
    return Replayed(pd.DataFrame(runs), pd.DataFrame(shown, columns=columns))


def _complete(out: Path) -> str:
    """Return the whole lines of the file in ``out``, without half a line that a kill has left."""
    text = (out / ITERATIONS).read_text() if (out / ITERATIONS).exists() else ""
    return text[: text.rfind("\n") + 1]
