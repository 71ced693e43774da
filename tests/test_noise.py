"""Noise: single messages scatter as the samples, sessions drift as all links tell, and no more."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.fit import interval
from ddlkit.model.calibration import Drift, Noise, Sessions

TWO = np.repeat([1e3, 1e6], 4)
SECONDS = np.concatenate([[0.9, 1.0, 1.0, 1.2], [2.0, 2.0, 2.0, 2.0]])
SIZES = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
SCATTER = 0.02


def test_single_messages_scatter_as_the_samples_of_the_nearest_size() -> None:
    noise = Noise.of(TWO, SECONDS)
    factors = noise.factors([10.0, 9e4, 1e6, 1e9], draws=400)
    assert factors.shape == (400, 4) and np.all(noise.drift == 0)
    assert set(np.unique(factors[:, :1].round(12))) == {0.9, 1.0, 1.2}  # below the first: as there
    assert np.all(factors[:, 1:] == 1)


def test_a_mean_of_several_messages_scatters_less_than_one_by_the_root() -> None:
    one = np.random.default_rng(0).normal(1, 0.05, (2000, 16))
    drawn = Noise.of(1e3, one.mean(axis=1), messages_per_sample=16).factors([1e3], draws=4000)
    assert drawn.mean() == pytest.approx(1, abs=0.005)
    assert drawn.std() == pytest.approx(0.05, rel=0.1)


def test_the_next_session_lies_within_the_interval_as_often_as_it_says() -> None:
    """Two sessions tell little of their own drift; a normal interval would cover 75% in place of 95%."""
    rng, inside, trials = np.random.default_rng(3), 0, 400
    for _ in range(trials):
        sessions = np.exp(rng.normal(0, 0.05, 3))
        noise = Noise.of(1e3, np.repeat(sessions[:2], 3), np.repeat([0, 1], 3))
        middle = np.sqrt(sessions[0] * sessions[1])
        lower, upper = interval(noise.factors([1e3], 1000)) * middle
        inside += lower <= sessions[2] <= upper
    assert 0.91 <= inside / trials <= 0.98


def test_all_messages_of_a_draw_drift_together_and_a_lacking_size_as_its_neighbours() -> None:
    noise = Noise.of(np.tile(TWO, 2), [*SECONDS, *1.1 * SECONDS], np.repeat([0, 1], 8))
    factors = noise.factors([1e6, 1e6, 1e6], draws=200)
    assert np.all(factors == factors[:, :1]) and factors.std() > 0.05
    lacking = Noise.of([1e3, 2e3, 1e9, 1e3, 2e3], [1.0, 1.0, 1.0, 1.2, 1.1], [0, 0, 0, 1, 1])
    assert np.all(lacking.drift > 0)
    assert lacking.drift[2] == pytest.approx(lacking.drift[0]), (
        "far from all: as they do on average"
    )


# -- told by all links together -------------------------------------------------------------------


def recording(links: int, drift: float, seed: int, samples: int = 3) -> pd.DataFrame:
    """Rows of ``links`` and two sessions, whose messages are slower or faster together."""
    random, frames = np.random.default_rng(seed), []
    for link in range(links):
        for session in range(2):
            level = np.exp(random.normal(0, drift))
            scatter = np.exp(random.normal(0, SCATTER, (samples, SIZES.size)))
            seconds = ((1e-3 + 1e-8 * SIZES) * level * scatter).ravel()
            row = {"bytes": np.tile(SIZES, samples), "seconds": seconds, "session": session}
            frames.append(pd.DataFrame({"link": f"emulated:{100 + link}mbit-delay1ms", **row}))
    rows = pd.concat(frames, ignore_index=True)
    fixed = {"ranks": 4, "collective": "all_reduce", "algorithm": "ring", "in_flight": 1}
    return rows.assign(**fixed, messages_per_sample=1, stolen=0.0, link_bits_per_s=1e8)


def links_of(rows: pd.DataFrame) -> list[Sessions]:
    return [Sessions.of(own) for _, own in rows.groupby("link")]


def test_what_sessions_differ_by_is_found_in_whatever_order_links_tell_it() -> None:
    """Their drift, and what is left of samples' scatter in a mean of three."""
    told = [Drift.of(links_of(recording(20, 0.03, seed))).variance.mean() for seed in range(8)]
    assert np.sqrt(np.mean(told)) == pytest.approx(np.hypot(0.03, SCATTER / 3**0.5), rel=0.15)
    links = links_of(recording(5, 0.03, 3))
    assert links[0].decides.tolist() == [0, 0, 1, 2, 2]
    there, turned = Drift.of(links), Drift.of(links[::-1])
    assert turned.degrees == there.degrees == 5
    assert turned.variance == pytest.approx(there.variance)


@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_a_further_session_is_covered_as_often_as_it_says(drift: float) -> None:
    """Of single messages of a size in the middle, about the mean of two sessions of many samples."""
    inside = []
    for seed in range(4):
        rows, random = recording(12, drift, seed, samples=40), np.random.default_rng(10**6 + seed)
        by_all = Drift.of(links_of(rows))
        for _, own in rows.groupby("link"):
            noise = Noise.of(own["bytes"], own["seconds"], own["session"])
            factors = by_all.noise(noise, Sessions.of(own)).factors([1e5], 400, seed)
            middle_s = np.exp(np.log(own.loc[own["bytes"] == 1e5, "seconds"]).mean())
            low_s, high_s = interval(factors) * middle_s
            level = random.normal(0, drift, 50) + random.normal(0, SCATTER, 50)
            next_s = (1e-3 + 1e-8 * 1e5) * np.exp(level)
            inside.append(np.mean((low_s <= next_s) & (next_s <= high_s)))
    assert 0.90 <= np.mean(inside) <= 0.98
