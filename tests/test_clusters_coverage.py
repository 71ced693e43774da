"""Intervals of fits on every log of others: counted as they are, and 90 to 99% of what was not seen."""

from __future__ import annotations

import numpy as np
import pytest

from ddlkit.core.cost import AlphaBeta
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
    assert set(few["n"]) == {0}, "four sizes are too few to leave one out and have an interval"


@pytest.mark.parametrize("source", ["abci", "vidur"])
def test_intervals_hold_ninety_to_ninety_nine_percent_of_each_kind(source: str) -> None:
    """Of the logs together; fewer than 8 of 12 at 95% chance would bring about once in 5000."""
    found = coverage.by_log(every=4)
    own = found[found["log"].str.startswith(source)]
    assert 0.90 <= own["covered"].sum() / own["n"].sum() <= 0.99
    assert (own["covered"] / own["n"]).min() >= 8 / 12


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
