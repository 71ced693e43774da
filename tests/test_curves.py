"""Curves over nodes that others published: what they are, and that they are predicted as reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit.core import scaling as law
from ddlkit.core.errors import UserError
from workbook.common import places
from workbook.course import scaling_out
from workbook.validate.clusters import scaling, scaling_intervals, scaling_wishes

CURVES = {
    (source.name, name): steps
    for source in (*scaling.LATER, scaling.FORMERLY_BLIND)
    for name, steps in scaling.published_curves(source).items()
}
GOALS = pd.read_csv(places.ROOT / "reports" / "goals.csv", keep_default_na=False)


@pytest.fixture(scope="module")
def later() -> pd.DataFrame:
    """The cases of all later curves, which take seconds to predict."""
    return scaling.later_cases()


def test_every_curve_is_one_that_counts() -> None:
    """It has four counts, two of them of several nodes, and is no copy of another one."""
    for steps in CURVES.values():
        assert (steps["step_s"] > 0).all() and not steps.duplicated(
            ["gpus", "nodes"]
        ).any()
        assert len(steps) >= 4 and (steps["nodes"] > 1).sum() >= 2
    copies = {tuple(steps["step_s"]) for steps in CURVES.values()}
    assert len(copies) == len(CURVES) == 18


def test_a_prediction_does_not_depend_on_what_it_predicts() -> None:
    """Larger counts may have any times: what smaller ones predict stays as it is."""
    steps = CURVES["tensorflow-ec2", "ResNet-152"]
    cases = scaling.cases({"": steps}, 8)
    for nodes in (2, 4):
        is_larger = steps["nodes"] > nodes
        other = steps.assign(
            step_s=np.where(is_larger, 7 * steps["step_s"], steps["step_s"])
        )
        before = cases[cases["anchor"] == nodes]["predicted_s"]
        changed = scaling.cases({"": other}, 8)
        assert changed[changed["anchor"] == nodes]["predicted_s"].equals(before)


def test_the_later_curves_reach_what_was_reported(later: pd.DataFrame) -> None:
    """The law has not changed since it was committed before these curves were opened."""
    reported = {"scaling-blind-again": True, "scaling-not-blind": False}
    for campaign, is_blind in reported.items():
        cases = later[later["is_blind"] == is_blind]
        now = scaling.judged(cases).set_index("goal")
        rows = GOALS[GOALS["campaign"] == campaign]
        assert len(rows) == len(now) == 8
        # Only curves that nobody had seen confirm anything.
        assert {*rows["standing"]} == {"confirmatory" if is_blind else "exploratory"}
        for row in rows.itertuples():
            own = now.loc[row.goal]
            assert float(row.reached) == pytest.approx(own["reached"], rel=1e-5)
            assert (row.wanted, row.held) == (own["wanted"], str(own["holds"]))
            assert int(row.n) == len(cases)
    assert {*scaling.NOT_BLIND} <= {*CURVES}


def test_the_anchor_answers_wishes_that_the_interval_leaves_open(
    later: pd.DataFrame,
) -> None:
    """No answer is taken back, and those that are given are right as often as was asked."""
    cases = later
    assert cases.loc[cases["answered"], "answered_today"].all()
    assert cases["answered_today"].sum() > cases["answered"].sum()
    assert cases.loc[cases["answered_today"], "right_today"].mean() >= 0.95


def test_a_lower_level_answers_more_wishes_and_takes_no_answer_back() -> None:
    """At the level of the command, the answers are those of the command."""
    cases = scaling_wishes.later_cases()
    before = scaling_wishes.answers(cases, scaling_wishes.LEVELS[0])
    assert (before["answered"] == cases["answered_today"]).all()
    is_answered = before["answered"]
    assert (before["right"] == cases["right_today"])[is_answered].all()
    assert scaling_wishes.width_ratio(scaling_wishes.LEVELS[0]) == 1.0
    for level in scaling_wishes.LEVELS[1:]:
        now = scaling_wishes.answers(cases, level)
        assert now["answered"].sum() >= before["answered"].sum()
        assert now.loc[before["answered"], "answered"].all()
        before = now


def test_a_level_is_admitted_by_all_conditions_alone() -> None:
    """Sources with few answers do not decide, and most sets have to meet both goals."""
    rows = [
        ("together", "together", 100, 0.9, 0.99),
        ("source", "many", 80, 0.9, 0.99),
        ("source", "few", 5, 0.9, 0.2),
        ("set", "first", 50, 0.9, 0.99),
        ("set", "second", 30, 0.9, 0.99),
        ("set", "third", 5, 0.9, 0.2),
    ]
    columns = ["kind", "name", "answers", "answered", "right"]
    table = pd.DataFrame(rows, columns=columns).assign(level=0.9)
    assert scaling_wishes.admissible(table) == [0.9]
    for row, column in ((0, "answered"), (0, "right"), (1, "right"), (4, "right")):
        worse = table.copy()
        worse.loc[row, column] = 0.5
        assert scaling_wishes.admissible(worse) == []


def test_a_count_that_is_left_out_lies_between_its_neighbours() -> None:
    """The intervals of interpolated counts contain at least as many as those of predicted ones."""
    curves = {"/".join(key): steps for key, steps in CURVES.items()}
    cases = scaling.interpolated_cases(curves)
    assert len(cases) == 76
    assert cases["inside"].mean() >= 0.9
    assert cases["error"].abs().median() < 0.02


def test_resampled_curves_vary_around_what_is_reached() -> None:
    """Curves that are alike vary in nothing."""
    cases = scaling.cases({"a": CURVES["ultrascale", "data parallel"]}, 8)
    alike = pd.concat([cases.assign(curve=name) for name in "abc"]).assign(source="")
    limits = scaling.resampled(alike, draws=5, seed=1)
    reached = scaling.judged(alike)["reached"]
    assert limits["lower"].to_numpy() == pytest.approx(reached, nan_ok=True)
    assert limits["upper"].to_numpy() == pytest.approx(reached, nan_ok=True)
    uneven = pd.concat([cases.assign(curve="a"), cases.assign(curve="b", error=0.5)])
    limits = scaling.resampled(uneven.assign(source=""), draws=40, seed=1)
    assert limits["lower"].iloc[0] < limits["upper"].iloc[0] == 0.5


def test_further_curves_are_cases_of_the_blind_test_too(
    later: pd.DataFrame, tmp_path: Path
) -> None:
    """Each folder with rates is a source; rates in another unit change no relative error."""
    with pytest.raises(UserError, match="no curves"):
        scaling.blind_cases(tmp_path)
    rates = pd.read_csv(scaling.FORMERLY_BLIND / "rates.csv")
    for source, unit in (("slower", 0.1), ("faster", 10)):
        (tmp_path / source).mkdir()
        other = rates.assign(samples_per_s=unit * rates["samples_per_s"])
        other.to_csv(tmp_path / source / "rates.csv", index=False)
    cases = scaling.blind_cases(tmp_path)
    is_further = cases["source"].isin(["slower", "faster"])
    blind = later[later["is_blind"]].reset_index(drop=True)
    assert cases[~is_further].reset_index(drop=True)[blind.columns].equals(blind)
    errors = dict(iter(cases[is_further].groupby("source")["error"]))
    assert errors.keys() == {"slower", "faster"}
    assert errors["slower"].to_numpy() == pytest.approx(errors["faster"].to_numpy())


def test_the_interval_is_the_candidate_that_was_chosen() -> None:
    """It meets the criterion of docs/studies.md, with its calibrated number rounded up."""
    steps = scaling_intervals.steps_in_sight()
    chosen = scaling_intervals.Candidate(
        counted_from="smallest",
        form="share",
        uses_slowest=True,
        step_share=law.STEP_SHARE,
        growth=1.0,
    )
    assert chosen in scaling_intervals.CANDIDATES
    comparison = scaling_intervals.Comparison(chosen, steps)
    assert 0.9 * law.LOSS_SHARE < comparison.number() <= law.LOSS_SHARE
    by_set = comparison.judged()
    assert by_set["inside"].min() >= 0.85
    assert 0.86 <= by_set["inside"].mean() <= 0.94
    assert by_set["right"].mean() >= 0.95
    limits_s = chosen.interval(steps, np.full(len(steps), law.LOSS_SHARE))
    for own_s, limit_s in zip(
        law.step_interval_s(
            steps["smallest_s"],
            steps["anchor_s"],
            steps["ratio"],
            steps["slowest_s"],
        ),
        limits_s,
        strict=True,
    ):
        # A loss below 1% is taken as 1%.
        assert own_s == pytest.approx(limit_s, rel=0.06)
        has_loss = steps["anchor_s"] > 1.01 * steps["smallest_s"]
        assert own_s[has_loss] == pytest.approx(limit_s[has_loss])


def test_an_interval_that_ends_at_the_anchor_contains_too_few_steps() -> None:
    """Jobs scatter, so that many steps are shorter than on fewer nodes, as is reported."""
    steps = scaling_intervals.steps_in_sight()
    measured_s = steps["measured_s"]
    assert (measured_s < steps["anchor_s"]).mean() == pytest.approx(0.24, abs=5e-3)
    lower_s, upper_s = law.step_interval_s(
        steps["smallest_s"], steps["anchor_s"], steps["ratio"], steps["slowest_s"]
    )
    limited_s = np.maximum(lower_s, steps["anchor_s"] / 1.03)
    inside = measured_s.between(lower_s, upper_s).mean()
    inside_limited = measured_s.between(limited_s, upper_s).mean()
    assert inside == pytest.approx(0.91, abs=5e-3)
    assert inside_limited == pytest.approx(0.78, abs=5e-3)


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
    assert predicted["model"] == pytest.approx(0.717, abs=5e-4)
    assert predicted["measured"] == pytest.approx(0.800, abs=5e-4)
    assert predicted["messages_alone"] > 0.99
    assert scaling_out.osf_factor(100) == pytest.approx(0.999, abs=5e-4)
    used = numbers[numbers["shown"].astype(bool)]
    assert used["nodes"].max() == scaling_out.SHOWN_NODES
