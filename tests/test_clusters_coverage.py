"""Intervals of fits on every log of others: counted as they are, and 90 to 99% of what was not seen."""

from __future__ import annotations

import numpy as np
import pytest

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.doubt import HeldOut
from ddlkit.formats.clusters import EXTERNAL
from ddlkit.report.clusters import coverage
from ddlkit.report.fits import held_intervals


def test_every_log_that_is_shipped_is_counted() -> None:
    """Nothing that holds all-reduces is left out: logs, four sizes of two and four ranks, dense tables."""
    found = coverage.by_log(every=4)
    logs = len([*(EXTERNAL / "abci").glob("allreduce_*.log.gz")])
    assert found["log"].str.split().str[0].value_counts().to_dict() == {
        "abci": logs,
        "cs336": 2,
        "vidur": 14,
    }
    assert found["log"].is_unique and (found["covered"] <= found["n"]).all()
    assert set(found.loc[found["log"].str.startswith("abci"), "n"]) == {12}
    few = found[found["log"].str.startswith("cs336")]
    assert set(few["n"]) == {1}, "of four sizes two are left out, one of every four asked: one"


@pytest.mark.parametrize("source", ["abci", "vidur"])
def test_intervals_hold_ninety_to_ninety_nine_percent_of_each_kind(source: str) -> None:
    """Of the logs together; fewer than 8 of 12 at 95% chance would bring about once in 5000."""
    found = coverage.by_log(every=4)
    own = found[found["log"].str.startswith(source)]
    assert 0.90 <= own["covered"].sum() / own["n"].sum() <= 0.99
    assert (own["covered"] / own["n"]).min() >= 8 / 12


@pytest.mark.parametrize(("known", "asked"), [(10, 854), (10, 40), (44, 44)])
def test_the_chance_to_hold_ninety_to_ninety_nine_percent_is_that_of_simulated_logs(
    known: int, asked: int
) -> None:
    random, inside = np.random.default_rng(1), []
    for _ in range(3000):
        errors = np.sort(random.exponential(size=known))
        width = HeldOut(errors, 1.0, 2.0, 0.0, 0.0).quantile(0.95)
        inside.append(0.9 <= np.mean(random.exponential(size=asked) <= width) <= 0.99)
    assert coverage.chance(known, asked) == pytest.approx(np.mean(inside), abs=0.03)


def test_ten_errors_hold_a_table_within_the_band_three_times_in_five_and_no_law_saves_many() -> (
    None
):
    """By hand: nearly all rows, so the share held is 1 - U^c, U the largest error's, c = ln 20 / ln 11."""
    c = np.log(20) / np.log(11)
    by_hand = (1 - 0.01 ** (1 / c)) ** 10 - (1 - 0.1 ** (1 / c)) ** 10
    assert coverage.chance(10, 10**6) == pytest.approx(by_hand, abs=0.002)
    assert by_hand < coverage.chance(10, 10**6, of_mean=True) < 0.75
    assert coverage.chance(10**5, 10**5) > 0.99


def test_where_each_size_is_left_out_in_turn_little_is_left_to_luck() -> None:
    assert coverage.chance_in_turn(22, 2) == 1.0
    assert coverage.chance_in_turn(2, 1) == 0.0, "of two rows none or half or all are held"


def test_an_interval_that_is_asked_about_noise_free_times_holds_and_leaves_out_every_inner_size() -> (
    None
):
    sizes = np.geomspace(1e3, 1e8, 9)
    jitter = np.exp(np.random.default_rng(3).normal(0, 0.01, 9))
    assert held_intervals("alpha_beta", sizes, AlphaBeta(1e-5, 1e-9)(sizes) * jitter).size == 7
    halved = held_intervals("table", sizes, AlphaBeta(1e-5, 1e-9)(sizes), every=2)
    assert halved.size == 4 and halved.mean() >= 0.5
    off = AlphaBeta(1e-5, 1e-9)(sizes)
    off[4] *= 100
    assert not held_intervals("alpha_beta", sizes, off)[3]
