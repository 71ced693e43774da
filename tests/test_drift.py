"""Drift told by all links together: right where links drift alike, and as wide as that needs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ddlkit.model import Calibration
from ddlkit.model.drift import Drift, Sessions, pooled
from ddlkit.model.noise import Noise

SIZES = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
START_S, SLOPE_S = 1e-3, 1e-8
SCATTER = 0.02


def recording(
    links: int,
    drift: float,
    seed: int,
    sessions: int = 2,
    samples: int = 3,
    scatter: float = SCATTER,
) -> pd.DataFrame:
    """Rows of ``links``, of which each session's messages are slower or faster together."""
    random, frames = np.random.default_rng(seed), []
    for link in range(links):
        for session in range(sessions):
            level = np.exp(random.normal(0, drift))
            noise = np.exp(random.normal(0, scatter, (samples, SIZES.size)))
            seconds = (START_S + SLOPE_S * SIZES) * level * noise
            row = {"bytes": np.tile(SIZES, samples), "seconds": seconds.ravel(), "session": session}
            frames.append(pd.DataFrame({"link": f"emulated:{100 + link}mbit-delay1ms", **row}))
    rows = pd.concat(frames, ignore_index=True)
    fixed = {"ranks": 4, "collective": "all_reduce", "algorithm": "ring", "in_flight": 1}
    return rows.assign(**fixed, messages_per_sample=1, stolen=0.0, link_bits_per_s=1e8)


def links_of(rows: pd.DataFrame) -> list[Sessions]:
    return [Sessions.of(own) for _, own in rows.groupby("link")]


def test_what_sessions_differ_by_is_found_whatever_link_tells_it() -> None:
    """Their drift, and what is left of samples' scatter in a mean of three."""
    found = [Drift.of(links_of(recording(20, 0.03, seed))).variance.mean() for seed in range(8)]
    expected = np.sqrt(0.03**2 + SCATTER**2 / 3)
    assert np.sqrt(np.mean(found)) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_a_further_session_is_covered_as_often_as_it_says(drift: float) -> None:
    """Of single messages of a size in the middle, about the mean of two sessions of many samples."""
    inside = []
    for seed in range(6):
        rows, random = recording(12, drift, seed, samples=40), np.random.default_rng(10**6 + seed)
        by_all = Drift.of(links_of(rows))
        for _, own in rows.groupby("link"):
            noise = Noise.of(own["bytes"], own["seconds"], own["session"])
            factors = by_all.noise(noise, Sessions.of(own)).factors([1e5], 400, seed)
            middle_s = np.exp(np.log(own.loc[own["bytes"] == 1e5, "seconds"]).mean())
            low_s, high_s = np.quantile(factors, [0.025, 0.975]) * middle_s
            level = random.normal(0, drift, 50) + random.normal(0, SCATTER, 50)
            next_s = (START_S + SLOPE_S * 1e5) * np.exp(level)
            inside.append(np.mean((low_s <= next_s) & (next_s <= high_s)))
    print(np.mean(inside))
    assert 0.90 <= np.mean(inside) <= 0.98


def test_it_is_narrower_than_what_two_sessions_alone_can_say() -> None:
    rows = recording(20, 0.03, 1)
    own = Calibration.of(rows, draws=0)
    by_all = pooled(own, rows)
    for key, one in own.known.items():
        there = by_all.known[key].noise
        assert one.noise is not None and there is not None
        assert np.all(there.degrees == 20) and np.all(one.noise.degrees < 20)
        assert there.ratios is one.noise.ratios and by_all.known[key].cost is one.cost
    widths = [
        np.mean([np.ptp(np.log(np.quantile(k.noise.factors(SIZES, 400), [0.025, 0.975], axis=0)), axis=0)
                 for k in some.known.values() if k.noise is not None])
        for some in (own, by_all)
    ]  # fmt: skip
    assert widths[1] < 0.7 * widths[0]


def test_one_link_alone_keeps_what_it_says() -> None:
    rows = recording(1, 0.03, 2)
    own = Calibration.of(rows, draws=0)
    (key,) = own.known
    before, after = own.known[key].noise, pooled(own, rows).known[key].noise
    assert before is not None and after is not None
    assert np.array_equal(before.drift, after.drift)
    assert np.array_equal(before.degrees, after.degrees)


def test_links_in_another_order_say_the_same_and_single_sessions_say_nothing() -> None:
    rows = recording(5, 0.03, 3)
    there = Drift.of(links_of(rows))
    turned = Drift.of(links_of(rows)[::-1])
    assert turned.degrees == there.degrees == 5
    assert turned.variance == pytest.approx(there.variance)
    once = rows[rows["session"] == 0]
    assert Drift.of(links_of(once)).degrees == 0
    assert np.all(Drift.of(links_of(once)).variance == 0)


def test_what_decides_is_told_by_time_over_the_smallest_messages() -> None:
    (link,) = links_of(recording(1, 0.0, 4, scatter=1e-6))
    assert link.decides.tolist() == [0, 0, 1, 2, 2]
