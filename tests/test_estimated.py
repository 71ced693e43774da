"""What plans by PyTorch's prices cost in real training: data/estimated.csv by data/estimated."""

from __future__ import annotations

import pandas as pd
import pytest

from ddlkit import store
from workbook.common import places
from workbook.validate import accuracy

RECORDED, FROZEN = places.DATA / "estimated", places.DATA / "estimated.csv"
PLAN = ["network", "link", "who", "plan"]
EXACT = "exact"  # the best plan by the measured cost, without contention


def tables(schema: str) -> pd.DataFrame:
    paths = store.list_tables(RECORDED, f"{schema}-*.csv*")
    return pd.concat([store.load_table(path, schema) for path in paths])


def as_recorded() -> pd.DataFrame:
    """How much longer an iteration is by each one's plan than by EXACT's: as the model said, and as it was.

    measured : the median over rounds of the ratio of medians, less 1; low, high : its least and largest
    """
    runs, said = tables("runs"), tables("predicted")
    said = said[(said["model"] == "model") & (said["quantity"] == "iteration")]
    model_s, rows = said.set_index("case")["seconds"], []
    for (network, link), own in pd.read_csv(FROZEN).groupby(
        ["network", "link"], sort=False
    ):
        of = runs[(runs["network"] == network) & (runs["link"] == link)]
        rounds = of.pivot_table("iteration_s", "repeat", "plan", "median")
        case, ends = (of.groupby("plan")[name].first() for name in ("case", "ends"))
        inner = {",".join(text.split(";")[:-1]): plan for plan, text in ends.items()}
        ran = {
            plan: inner.get(plan.removeprefix("cuts:"), plan) for plan in own["plan"]
        }  # once each
        exact = ran[own.set_index("who")["plan"][EXACT]]
        for who, plan in own[["who", "plan"]].itertuples(index=False):
            ratio = rounds[ran[plan]] / rounds[exact] - 1
            predicted = model_s[case[ran[plan]]] / model_s[case[exact]] - 1
            numbers = predicted, ratio.median(), ratio.min(), ratio.max()
            rows.append(
                (network, link, who, plan, *(round(float(n), 5) for n in numbers))
            )
    return pd.DataFrame(rows, columns=[*PLAN, "predicted", "measured", "low", "high"])


def test_recorded_regrets_reach_what_was_frozen(request: pytest.FixtureRequest) -> None:
    """Four prices of PyTorch's, a bucket by its saturation, DDP's default and twelve sizes, on two links."""
    table = as_recorded()
    if request.config.getoption("--write"):
        table.to_csv(FROZEN, index=False, lineterminator="\n")
    kept = pd.read_csv(FROZEN)
    pd.testing.assert_frame_equal(table, kept, rtol=1e-3, atol=1e-4)
    rows = accuracy.frozen("goals", "estimated").set_index("goal")
    assert len(rows) == len(accuracy.goals("estimated"))
    for goal in accuracy.goals("estimated"):
        now, row = goal.judged(kept), rows.loc[goal.goal]
        assert float(row["reached"]) == pytest.approx(
            now["reached"], rel=1e-5, abs=1e-6
        )
        assert (row["wanted"], row["held"]) == (now["wanted"], str(now["holds"]))
