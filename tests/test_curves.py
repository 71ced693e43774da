"""Curves over nodes that others published: what they are, and that they are predicted as reported."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from workbook.common import places
from workbook.course import scaling_out
from workbook.validate.clusters import scaling

CURVES = {
    (source, name): steps
    for source in scaling.BLIND
    for name, steps in scaling.published_curves(source).items()
}
GOALS = pd.read_csv(places.ROOT / "reports" / "goals.csv", keep_default_na=False)


def test_every_curve_is_one_that_counts() -> None:
    """It has four counts, two of them of several nodes, and is no copy of another one."""
    for steps in CURVES.values():
        assert (steps["step_s"] > 0).all() and not steps.duplicated(
            ["gpus", "nodes"]
        ).any()
        assert len(steps) >= 4 and (steps["nodes"] > 1).sum() >= 2
    copies = {tuple(steps["step_s"]) for steps in CURVES.values()}
    assert len(copies) == len(CURVES) == 97


def test_a_prediction_does_not_depend_on_what_it_predicts() -> None:
    """Larger counts may have any times: what smaller ones predict stays as it is."""
    name = ("tensorflow-ec2", "ResNet-152")
    steps = CURVES[name]
    cases = scaling.cases({"": steps}, 8)
    for nodes in (2, 4):
        is_larger = steps["nodes"] > nodes
        other = steps.assign(
            step_s=np.where(is_larger, 7 * steps["step_s"], steps["step_s"])
        )
        before = cases[cases["anchor"] == nodes]["predicted_s"]
        changed = scaling.cases({"": other}, 8)
        assert changed[changed["anchor"] == nodes]["predicted_s"].equals(before)


def test_the_blind_test_reaches_what_was_reported() -> None:
    cases = scaling.blind_cases()
    now = scaling.judged(cases).set_index("goal")
    rows = GOALS[GOALS["campaign"] == "scaling-blind"]
    assert len(rows) == len(now) == 8
    for row in rows.itertuples():
        own = now.loc[row.goal]
        assert float(row.reached) == pytest.approx(own["reached"], rel=1e-5)
        assert (row.wanted, row.held) == (own["wanted"], str(own["holds"]))
        assert int(row.n) == len(cases)


def test_collectives_are_predicted_as_reported() -> None:
    times = scaling.perlmutter()
    cases = scaling.collective_cases(times, "all_reduce", 16)
    (goal,) = scaling.judged(cases, "scaling_all_reduce").itertuples()
    (row,) = GOALS[GOALS["campaign"] == "scaling-perlmutter"].itertuples()
    assert float(row.reached) == pytest.approx(goal.reached, rel=1e-5)
    assert int(row.n) == len(cases) and row.held == str(goal.holds)
    for collective in ("all_gather", "reduce_scatter"):
        errors = scaling.collective_cases(times, collective, 4)["error"]
        assert errors.abs().median() < 0.05


def test_the_weather_model_loses_more_than_its_messages_take() -> None:
    numbers = scaling_out.numbers().set_index("gpus")
    predicted = numbers.loc[400]
    assert predicted["lower"] < predicted["measured"] < predicted["upper"]
    assert predicted["model"] == pytest.approx(0.726, abs=5e-4)
    assert predicted["measured"] == pytest.approx(0.800, abs=5e-4)
    assert predicted["messages_alone"] > 0.99
    assert scaling_out.osf_factor(100) == pytest.approx(0.999, abs=5e-4)
    used = numbers[numbers["shown"].astype(bool)]
    assert used["nodes"].max() == scaling_out.SHOWN_NODES
