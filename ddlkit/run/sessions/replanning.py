"""Plan again after a rate has changed: from the last iterations' messages, against the plan that knew.

The two rates are calibrated in labs of their own. Then, in the lab of the first rate, whose link changes to
the second one in some iterations: the plan for one rate is watched for a few iterations at the other, what
its messages took makes a new cost, and that a new plan. In the duel each round plays at either rate the plan
that was kept, the one that was made again, and the one that knew the rate from its calibration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import LayerProfile
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import make_plan
from ddlkit.model.replanning import AGAIN, KEPT, KNEW, WATCHED, last_messages, refitted
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.lab.conditions import rate_text
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.replay import calibrate, replay
from ddlkit.run.lab.script import PlannedCase, plan_case
from ddlkit.run.measure.collectives import whole_size
from ddlkit.run.sessions.session import Tables

PLANNER = "exact"


@dataclass(frozen=True)
class Duel:
    """What is planned again for what.

    lab : before the change, with emulated links; share : of its rate that is left afterwards
    compute_s : of an iteration; watched : iterations before planning again; rounds : of the duel
    """

    profile: LayerProfile
    lab: LabShape
    share: float
    compute_s: float
    watched: int
    rounds: int

    @property
    def ranks(self) -> int:
        """Of the lab."""
        return self.lab.workers

    @property
    def rates(self) -> tuple[float, float]:
        """Before and after the change, in bits per second."""
        return self.lab.rate_bits_per_s, self.share * self.lab.rate_bits_per_s

    def shape(self, rate_bits_per_s: float) -> LabShape:
        """The lab of that rate."""
        return replace(self.lab, rate_bits_per_s=rate_bits_per_s)

    def changes(self, rate_bits_per_s: float) -> str:
        """What a case says whose iterations pass at that rate."""
        first = rate_bits_per_s == self.lab.rate_bits_per_s
        return "" if first else f"0s:rate={rate_text(rate_bits_per_s)}"


def measure_duel(duel: Duel, sizes: Sequence[int], budget: Budget) -> Tables:
    """Tables collectives, of both rates' labs, runs and timeline; cases are named by whose plan they have."""
    whole = whole_size(int(duel.profile.gradient_bytes.sum()), duel.ranks)
    wanted = [*(size for size in sizes if size < whole), whole]
    tables = []
    for rate in duel.rates:
        with Lab(duel.shape(rate)) as lab:
            tables.append(calibrate(lab, wanted, budget=budget))
    rows = pd.concat(tables, ignore_index=True)
    with Lab(duel.lab) as lab:
        runs, spans = _played(duel, lab, calibrated_costs(duel, rows))
    return {"collectives": rows, "runs": runs, "timeline": spans[spans["rank"] == 0]}


def calibrated_costs(duel: Duel, rows: pd.DataFrame) -> dict[float, MessageCost]:
    """What a message costs at each of the rates, by the rows of their labs."""
    known = Calibration.of(rows, draws=0)
    return {rate: known.between(duel.shape(rate).link, duel.ranks).cost for rate in duel.rates}


def planned(duel: Duel, costs: Mapping[float, MessageCost]) -> dict[float, FusionPlan]:
    """The plan for each of the rates."""
    wanted_s = duel.compute_s / duel.profile.workload().compute_s
    workload = duel.profile.workload().scaled(float(f"{wanted_s:.4g}"))
    return {rate: make_plan(PLANNER, workload, cost) for rate, cost in costs.items()}


def _played(
    duel: Duel, lab: Lab, costs: Mapping[float, MessageCost]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of runs and timeline: iterations that were watched, and the duel."""
    plans, other = planned(duel, costs), dict(zip(duel.rates, reversed(duel.rates), strict=True))
    watched = {rate: _case(duel, lab, rate, WATCHED, plans[other[rate]]) for rate in duel.rates}
    seen = replay(lab, duel.ranks, [*watched.values()], duel.watched, spans=duel.watched)
    again = {}
    for rate, one in watched.items():
        last = last_messages(seen.timeline, one.case.key, duel.watched)
        again[rate] = refitted(costs[other[rate]], last["bytes"], last["seconds"])
    made = planned(duel, again)
    cases = [
        _case(duel, lab, rate, name, plan)
        for rate in duel.rates
        for name, plan in ((KEPT, plans[other[rate]]), (AGAIN, made[rate]), (KNEW, plans[rate]))
    ]
    found = replay(lab, duel.ranks, cases, duel.rounds)
    runs = pd.concat([seen.runs, found.runs], ignore_index=True)
    return runs, pd.concat([seen.timeline, found.timeline], ignore_index=True)


def _case(duel: Duel, lab: Lab, rate: float, name: str, plan: FusionPlan) -> PlannedCase:
    """The plan, under another name, at that rate."""
    cost = AlphaBeta(0.0, 0.0, workers=duel.ranks)  # the plan is made already
    one = plan_case(
        duel.profile, "none", cost, lab, compute_s=duel.compute_s, changes=duel.changes(rate)
    )
    ends = ";".join(map(str, plan.ends))
    return PlannedCase(
        replace(one.case, plan=name, ends=ends), one.workload, replace(plan, planner=name)
    )
