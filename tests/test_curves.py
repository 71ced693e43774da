"""Curves over nodes that others published: what they are, and that they are predicted as reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.errors import UserError
from workbook.common import places
from workbook.course import scaling_out
from workbook.validate.clusters import scaling

CURVES = scaling.published_curves(scaling.BLIND)
GOALS = pd.read_csv(places.ROOT / "reports" / "goals.csv", keep_default_na=False)


def test_every_curve_is_one_that_counts() -> None:
    """It has four counts, two of them of several nodes, and is no copy of another one."""
    for steps in CURVES.values():
        assert (steps["step_s"] > 0).all() and not steps.duplicated(
            ["gpus", "nodes"]
        ).any()
        assert len(steps) >= 4 and (steps["nodes"] > 1).sum() >= 2
    copies = {tuple(steps["step_s"]) for steps in CURVES.values()}
    assert len(copies) == len(CURVES) == 5


def test_a_prediction_does_not_depend_on_what_it_predicts() -> None:
    """Larger counts may have any times: what smaller ones predict stays as it is."""
    steps = CURVES["ResNet-152"]
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
    """As far as its curves are in this repository."""
    cases = scaling.blind_cases()
    now = scaling.judged(cases).set_index("goal")
    rows = GOALS[GOALS["campaign"] == "scaling-tensorflow-ec2"]
    assert len(rows) == len(now) == 8
    for row in rows.itertuples():
        own = now.loc[row.goal]
        assert float(row.reached) == pytest.approx(own["reached"], rel=1e-5)
        assert (row.wanted, row.held) == (own["wanted"], str(own["holds"]))
        assert int(row.n) == len(cases)


def test_further_curves_are_cases_of_the_blind_test_too(tmp_path: Path) -> None:
    """Each folder with rates is a source; rates in another unit change no relative error."""
    with pytest.raises(UserError, match="no curves"):
        scaling.blind_cases(tmp_path)
    rates = pd.read_csv(scaling.BLIND / "rates.csv")
    for source, unit in (("slower", 0.1), ("faster", 10)):
        (tmp_path / source).mkdir()
        other = rates.assign(samples_per_s=unit * rates["samples_per_s"])
        other.to_csv(tmp_path / source / "rates.csv", index=False)
    cases = scaling.blind_cases(tmp_path)
    errors = dict(iter(cases.groupby("source")["error"]))
    assert errors.keys() == {"slower", "faster", scaling.BLIND.name}
    for error in errors.values():
        assert error.to_numpy() == pytest.approx(scaling.blind_cases()["error"])


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
