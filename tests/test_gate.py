"""What a change of the code's form may not move: every planner's plans.

That every claim comes out as it did is tested in test_verdicts.py, which evaluates all claims.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.cost import AlphaBeta, MessageCost, Table
from ddlkit.core.iteration import predict
from ddlkit.core.plan import PLANNERS
from ddlkit.model import make_plan
from workbook.common import places

PLANS = Path(__file__).with_name("gate_plans.csv")
COSTS: dict[str, MessageCost] = {
    "expensive start": AlphaBeta(5e-3, 8e-9),
    "cheap start": AlphaBeta(1e-4, 2e-8),
    "steps": Table(
        np.array([1e3, 1e5, 1e6, 1e7, 1e8]), np.array([1e-3, 1.1e-3, 8e-3, 7e-2, 0.9])
    ),
}


def planned(profile: str) -> pd.DataFrame:
    """Plan and iteration of every registered planner's examples, at every cost that it takes."""
    workload = store.read_profile(places.RECORDED / profile).workload()
    rows = []
    for planner in PLANNERS.values():
        for spec in planner.examples:
            for name, cost in COSTS.items():
                if planner.name == "cuts" and workload.n <= 40:
                    continue
                plan = make_plan(spec, workload, cost)
                ends = ";".join(str(end) for end in plan.ends)
                iteration_s = predict(workload, plan, cost).iteration_s
                rows.append((profile, spec, name, ends, iteration_s))
    return pd.DataFrame(
        rows, columns=["profile", "spec", "cost", "ends", "iteration_s"]
    )


@pytest.mark.parametrize("profile", sorted(set(pd.read_csv(PLANS)["profile"])))
def test_planners_choose_what_they_chose(profile: str) -> None:
    before = pd.read_csv(PLANS).query("profile == @profile")
    merged = before.merge(
        planned(profile), on=["profile", "spec", "cost"], suffixes=("_was", "")
    )
    assert len(merged) == len(before)
    assert merged["ends"].tolist() == merged["ends_was"].tolist()
    assert merged["iteration_s"].tolist() == pytest.approx(
        merged["iteration_s_was"].tolist(), rel=1e-12
    )
