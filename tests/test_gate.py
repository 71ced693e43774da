"""What a change of the code's form may not move: every claim's outcome, every planner's plans."""

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
from workbook.site import verdicts as papers

CLAIMS, PLANS = (
    Path(__file__).with_name("gate.csv"),
    Path(__file__).with_name("gate_plans.csv"),
)
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


@pytest.mark.slow
def test_claims_come_out_as_they_did() -> None:
    before = pd.read_csv(CLAIMS).set_index("id").sort_index()
    now = papers.evaluate().set_index("id").sort_index()
    new = now.loc[now.index.difference(before.index), ["low", "high", "outcome"]]
    rows = new.to_csv(header=False, float_format="%.6g")
    assert new.empty, f"append the new claims to tests/gate.csv:\n{rows}"
    assert before["outcome"].to_dict() == now["outcome"].to_dict()
    for end in ("low", "high"):
        assert before[end].tolist() == pytest.approx(
            now[end].tolist(), rel=1e-5, nan_ok=True
        )
