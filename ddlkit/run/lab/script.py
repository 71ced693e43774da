"""What a case asks of its ranks: the groups of its plan, when each is ready and how large it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    Selecting,
    group_elements,
    group_selection_s,
    selected,
)
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.run.jobs.launch import Place

REAL_SELECTION_S = 2e-8  # per element, generously, on a core
SETTLE_S = 0.1  # around an iteration: checks, and the exchange of what was seen


@dataclass(frozen=True)
class PlannedCase:
    """A case that can be replayed: its plan, and its workload before dilation.

    Raises UserError where the case names other group ends than the plan has.
    """

    case: Case
    workload: Workload
    plan: FusionPlan

    def __post_init__(self) -> None:
        if self.case.ends != (ends := _written(self.plan)):
            raise UserError(
                f"replay: case {self.case.key} has ends {self.case.ends}, its plan has {ends}"
            )


def plan_case(
    profile: LayerProfile,
    spec: str,
    cost: MessageCost,
    place: Place,
    *,
    compute_s: float | None = None,
    **axes: Any,
) -> PlannedCase:
    """The profile under the plan ``spec``, computing as long as one message of everything takes.

    Time is dilated so that communication and compute weigh alike, where a model of their overlap has
    most to lose; or so that an iteration computes for ``compute_s``, whatever it sends.

    cost : of a group by its dense size; that of `ddlkit.core.sparse.SparseGather` at a density below 1
    axes : further fields of the Case, such as density, straggler, negotiated, in_flight

    Raises UserError for a plan that cannot be made for this profile.
    """
    workload = profile.workload()
    wanted_s = float(cost(workload.bytes.sum())) if compute_s is None else compute_s
    dilation = float(f"{wanted_s / workload.compute_s:.4g}")
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
        ends=_written(plan),
        dilation=dilation,
        profile_sha256=profile.sha256,
        **axes,
    )
    return PlannedCase(case, workload, plan)


def check_cases(cases: Sequence[Case], ranks: int, place: Place) -> None:
    """Raise UserError for cases that cannot be replayed together by ``ranks`` ranks in ``place``."""
    for number, case in enumerate(cases):
        named = f"replay: case {case.key}"
        if case in cases[:number]:
            raise UserError(f"{named} ({case.plan}) is asked for twice")
        densities = {"all_reduce": case.density == 1, "all_gather": 0 < case.density <= 1}
        if not densities.get(case.collective):
            raise UserError(
                f"{named} is an {case.collective} of density {case.density}: dense gradients "
                "(density 1) are all_reduced, sparsified ones all_gathered"
            )
        if case.in_flight != cases[0].in_flight:
            raise UserError("replay: all cases of a launch need one number of messages in flight")
        if case.straggler < 1:
            raise UserError(f"{named} has straggler {case.straggler}: at least 1")
        if (case.kind, case.workers, case.link) != ("replay", ranks, place.name):
            raise UserError(
                f"{named} is a {case.kind} of {case.workers} ranks over {case.link}, "
                f"not a replay of {ranks} over {place.name}"
            )


def _written(plan: FusionPlan) -> str:
    """The plan's group ends as a Case holds them."""
    return ";".join(map(str, plan.ends))


@dataclass(frozen=True)
class Script:
    """What a rank plays in one iteration; times in seconds from the common start, dilated.

    ready_s : when each group is ready, without the selections before it
    buffered_s : how long the first gradient of each group waits in the buffer for the last
    bytes, elements : size of each group, and its float32 elements
    kept : how many elements of each group are sent, () where all are
    selection_s : how long each selection takes, () where selection is real
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
        """The script of a case.

        selection : recorded times of selecting, for a case that waits them out

        Raises UserError for a case that waits selection out where no times are given.
        """
        case, plan = planned.case, planned.plan
        slow = planned.workload.scaled(case.dilation)
        elements = group_elements(slow, plan)
        sparse = case.collective == "all_gather"
        selection_s: list[float] = []
        if sparse and case.selection_sha256:
            if selection is None:
                raise UserError(
                    f"replay: case {case.key} waits selection out, but no times are given"
                )
            seconds = case.dilation * group_selection_s(slow, plan, case.density, selection)
            selection_s = seconds.tolist()
        ready_s = plan.group_ready_s(slow)
        return cls(
            case=case,
            forward_s=slow.forward_s,
            ready_s=ready_s.tolist(),
            buffered_s=(ready_s - slow.ready_s[list(plan.starts)]).tolist(),
            bytes=plan.group_bytes(slow).tolist(),
            elements=elements,
            update_s=slow.update_s,
            kept=[selected(size, case.density) for size in elements] if sparse else [],
            selection_s=selection_s,
        )

    @property
    def compute_s(self) -> float:
        """The iteration without communication, and without selections that are real."""
        return self.ready_s[-1] + sum(self.selection_s) + self.update_s

    @property
    def sent_bytes(self) -> Sequence[int]:
        """What a rank contributes of each group: a value per element, and an index if not all are sent."""
        return [2 * ELEMENT_BYTES * k for k in self.kept] or self.bytes

    @property
    def expected_s(self) -> float:
        """A generous guess of the iteration: no overlap, and twice the bytes in each direction."""
        case = self.case
        wire_s_per_byte = 2 * 8 / case.link_bits_per_s if case.link_bits_per_s else 1e-8
        copies = case.workers if self.kept else 1
        compute_s = self.compute_s
        if self.kept and not self.selection_s:
            compute_s += case.workers * sum(self.elements) * REAL_SELECTION_S
        wire_s = copies * sum(self.sent_bytes) * wire_s_per_byte
        return compute_s * case.straggler + wire_s + SETTLE_S

    def played_by(self, rank: int) -> Script:
        """The script of that rank: the last one is the straggler, if there is one."""
        slower = self.case.straggler if rank == self.case.workers - 1 else 1.0
        if slower == 1.0:
            return self
        times = ("forward_s", "ready_s", "buffered_s", "selection_s", "update_s")
        slow: Any = {name: np.multiply(slower, getattr(self, name)).tolist() for name in times}
        return replace(self, **slow)
