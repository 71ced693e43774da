"""Dense tables of others: twelve sizes calibrate as the rule says, blind, and floors are what they say."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.cost import Table
from ddlkit.core.fit import SIMPLE_FIRST, fit
from ddlkit.core.units import MIB
from ddlkit.report import fits
from ddlkit.report.clusters import board, rules, vidur

PARTS = tuple(vidur.tables())
SIZES = np.arange(1.0, 400.0) * MIB


@cache
def judged() -> pd.DataFrame:
    return vidur.judged(vidur.predictions()).merge(vidur.floors(), on=["table", "tuned"])


def test_the_rule_takes_twelve_sizes_of_every_table_and_half_of_the_tables_to_tune_on() -> None:
    assert [part.tuned for part in sorted(PARTS, key=lambda part: part.table)] == [True, False] * 7
    for part in PARTS:
        shown, asked = part.calibrate["bytes"], part.test["bytes"]
        every = pd.concat([shown, asked])
        assert shown.tolist() == rules.rules()[part.rule]["drawn"]
        assert every.min() == MIB and not shown.isin(asked).any()
        assert part.whole()[0].tolist() == sorted(every)


@pytest.mark.parametrize("form", ["auto", "segments"])
def test_predictions_are_blind_and_those_of_the_fit_to_twelve_sizes(form: str) -> None:
    part = PARTS[0]
    hidden = part._replace(test=part.test.assign(median_s=np.nan, min_s=np.nan, max_s=np.nan))
    seen, blind = (vidur.calibrated(one, form) for one in (part, hidden))
    said = ["bytes", "predicted_s", "lower_s", "upper_s", "fitted"]
    assert seen[said].equals(blind[said]) and np.isfinite(seen["predicted_s"]).all()
    cost = fit(form, part.calibrate["bytes"], part.calibrate["median_s"], draws=0).cost
    np.testing.assert_array_equal(seen["predicted_s"], cost(seen["bytes"]))
    assert (seen["lower_s"] <= seen["predicted_s"]).all()
    assert (seen["predicted_s"] <= seen["upper_s"]).all()


def test_what_is_judged_is_counted_by_hand() -> None:
    given = pd.DataFrame(
        {"model": "m", "table": "t", "tuned": True, "fitted": "m", "measured_s": 1.0}
        | {"bytes": [MIB, 24 * MIB, 25 * MIB], "predicted_s": [1.02, 0.96, 1.005]}
        | {"lower_s": [0.9, 0.9, 1.001], "upper_s": 1.1}
    )
    (row,) = vidur.judged(given).itertuples()
    assert (row.n, row.covered, row.held) == (3, 2, False)
    found = [row.median, row.below_25_mib, row.worst, row.needed]
    assert found == pytest.approx([0.02, 0.03, 0.04, 0.038])
    assert row.half_width == pytest.approx(0.1 / 1.02)
    near = given.assign(predicted_s=[1.001, 1.002, 1.003])
    assert vidur.judged(near)["held"].all()


# -- floors ------------------------------------------------------------------------------------


def test_nothing_scatters_on_a_power_of_the_size_nor_bends_between_the_knots_of_a_table() -> None:
    assert vidur.scatter(SIZES, np.log(1e-5 * SIZES**0.9)) == pytest.approx(0, abs=1e-9)
    knots = SIZES[[0, 3, 20, 90, -1]]
    bent = Table(knots, np.array([1e-4, 1.5e-4, 2e-3, 3e-3, 9e-3]))(SIZES)
    assert vidur.nearest_curve(SIZES, np.log(bent), knots) == pytest.approx(0, abs=1e-6)
    lifted = bent.copy()
    lifted[::10] *= 3  # a few that are far off decide nothing
    assert vidur.nearest_curve(SIZES, np.log(lifted), knots) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("sigma", [0.005, 0.03])
def test_what_scatters_is_the_noise_and_a_curve_comes_no_nearer(sigma: float) -> None:
    """Half of normal errors are within 0.67 sigma; a median of neighbours adds a little."""
    noise = np.random.default_rng(7).normal(0, sigma, SIZES.size)
    log_s = np.log(1e-5 * SIZES**0.9) + noise
    assert 0.55 * sigma < vidur.scatter(SIZES, log_s) < 0.95 * sigma
    assert 0.5 * sigma < vidur.nearest_curve(SIZES, log_s, SIZES[::40]) < 0.8 * sigma


def test_teeth_between_knots_are_a_curves_and_not_the_scatters() -> None:
    teeth = 0.04 * (np.arange(SIZES.size) % 40 / 40 - 0.5)
    log_s = np.log(1e-5 * SIZES**0.9) + teeth
    knots = np.geomspace(SIZES[0], SIZES[-1], 12)
    assert vidur.scatter(SIZES, log_s) < 0.002 < 0.007 < vidur.nearest_curve(SIZES, log_s, knots)


# -- what is found -----------------------------------------------------------------------------


def test_messages_below_25_mib_hold_their_goal_on_every_table() -> None:
    found = judged()
    assert len(found) == 14 and found["n"].sum() == 14464
    assert (found["below_25_mib"] <= fits.GOAL_SMALL).all()


def test_the_goal_of_one_percent_is_missed_where_no_curve_of_twelve_knots_could_reach_it() -> None:
    """Held on half of the tables; of all, and of those not tuned on, it is missed and held by a hair.

    The median of the tables' medians was 1.041% before `auto` had chords.
    """
    found = judged()
    assert found["held"].sum() == 7
    out_of_reach = found["curve"] > fits.GOAL
    assert out_of_reach.sum() == 6 and not found["held"][out_of_reach].any()
    nearer = found["median"] < found["curve"]
    assert nearer.sum() == 1, (
        "log-log pieces of least mean error: straight ones may have a lesser median"
    )
    assert (found["curve"] > 1.5 * found["scatter"])[out_of_reach].all(), "teeth, not noise"
    assert fits.GOAL < found["median"].median() < 1.03 * fits.GOAL
    assert 0.9 * fits.GOAL < found.loc[~found["tuned"], "median"].median() < fits.GOAL


def test_the_goal_hangs_on_the_luck_of_the_twelve_sizes_and_sixteen_reach_it() -> None:
    """Five forms, each table's best one chosen afterwards, do not reach it with the rule's sizes either."""
    every = vidur.judged(vidur.predictions(SIMPLE_FIRST)).groupby("table")["median"]
    assert fits.GOAL < every.min().median() < judged()["median"].median()
    twelve, sixteen = (vidur.dozens(sizes).median(axis=1) for sizes in (12, 16))
    assert 0.1 < (twelve <= fits.GOAL).mean() < 0.5 < 0.9 < (sixteen <= fits.GOAL).mean()
    assert len(twelve) == vidur.DOZENS and vidur.dozens().shape[1] == 14


def test_straight_pieces_are_nearer_than_log_log_ones_on_tables_that_were_not_looked_at() -> None:
    rest = [part.table for part in PARTS if not part.tuned]
    straight = np.log(vidur.dozens()[rest]).mean().mean()
    assert straight < np.log(vidur.dozens(form="table")[rest]).mean().mean() - 0.01


def test_another_dozen_is_judged_as_the_rules_is() -> None:
    part = PARTS[0]
    (own,) = vidur.judged(vidur.calibrated(part, "chords")).itertuples()
    found = vidur._chosen(np.linspace(0, 1, 12), *part.whole(), "chords")
    assert found == pytest.approx(own.median, rel=1e-9)


def test_the_scoreboard_knows_the_source() -> None:
    said = board.SOURCES["vidur"]()
    assert set(said["rule"]) == set(vidur.RULES) and set(said["model"]) == {"auto"}
    both = board.scoreboard(said).set_index("rule")
    assert both["n"].to_dict() == {"vidur-64mib": 10248, "vidur-512mib": 4216}
