"""Noise: single messages scatter as the samples, sessions drift as their medians, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from ddlkit.model.noise import Noise

SIZES = np.repeat([1e3, 1e6], 4)
SECONDS = np.concatenate([[0.9, 1.0, 1.0, 1.2], [2.0, 2.0, 2.0, 2.0]])
ASKED = [10.0, 9e4, 1e6, 1e9]


def test_single_messages_scatter_as_the_samples_of_the_nearest_size() -> None:
    factors = Noise.of(SIZES, SECONDS).factors(ASKED, draws=400)
    assert factors.shape == (400, 4)
    assert set(np.unique(factors[:, :1].round(12))) == {0.9, 1.0, 1.2}  # below the first: as there
    assert np.all(factors[:, 1:] == 1)
    assert np.array_equal(factors, Noise.of(SIZES, SECONDS).factors(ASKED, draws=400))


def test_a_mean_of_several_messages_scatters_less_than_one_by_the_root() -> None:
    one = np.random.default_rng(0).normal(1, 0.05, (2000, 16))
    noise = Noise.of(1e3, one.mean(axis=1), messages_per_sample=16)
    drawn = noise.factors([1e3], draws=4000)
    assert drawn.mean() == pytest.approx(1, abs=0.005)
    assert drawn.std() == pytest.approx(0.05, rel=0.1)


@pytest.mark.parametrize("sessions", [2, 5])
def test_drift_covers_a_further_session_as_often_as_it_says(sessions: int) -> None:
    """Sessions whose medians differ by 3%: 95% of the draws should hold about 95% of new ones."""
    rng, sizes = np.random.default_rng(1), np.geomspace(1e3, 1e6, 16)
    deviations, inside = [], []
    for _ in range(300):
        level = np.exp(rng.normal(0, 0.03, (sessions, sizes.size)))
        session = np.repeat(np.arange(sessions), sizes.size)
        noise = Noise.of(np.tile(sizes, sessions), (sizes * level).ravel(), session)
        deviations.append(noise.drift.mean())
        low, high = np.quantile(noise.factors([3e4], draws=400), [0.025, 0.975])
        new = np.exp(rng.normal(0, 0.03)) / np.exp(np.log(level[:, 8]).mean())
        inside.append(low <= new <= high)
    assert np.mean(deviations) == pytest.approx(0.03 * np.sqrt(1 + 1 / sessions), rel=0.1)
    assert 0.86 <= np.mean(inside) <= 0.99


def test_all_messages_of_a_draw_drift_together() -> None:
    two = np.concatenate([SECONDS, 1.1 * SECONDS])
    noise = Noise.of(np.tile(SIZES, 2), two, np.repeat([0, 1], 8))
    factors = noise.factors([1e6, 1e6, 1e6], draws=200)
    assert np.all(factors == factors[:, :1])
    assert factors.std() > 0.05


def test_a_single_session_has_no_drift_and_a_lacking_size_drifts_as_its_neighbours() -> None:
    assert np.all(Noise.of(SIZES, SECONDS).drift == 0)
    sizes, session = [1e3, 2e3, 1e9, 1e3, 2e3], [0, 0, 0, 1, 1]
    noise = Noise.of(sizes, [1.0, 1.0, 1.0, 1.2, 1.1], session)
    assert np.all(noise.drift > 0)
    assert noise.drift[2] == pytest.approx(noise.drift[0]), "far from all: as the others on average"
    assert Noise.of([1e3, 2e3], [1.0, 1.0], [0, 1]).drift.tolist() == [0, 0]


def test_the_next_session_lies_within_the_interval_as_often_as_it_says() -> None:
    """Two sessions tell little of their own drift; a normal interval would cover 75% in place of 95%."""
    rng, inside, trials = np.random.default_rng(3), 0, 400
    for _ in range(trials):
        sessions = np.exp(rng.normal(0, 0.05, 3))
        known = np.repeat(sessions[:2], 3)
        noise = Noise.of(1e3, known, np.repeat([0, 1], 3))
        middle = np.exp(np.log(known).mean())
        lower, upper = np.quantile(noise.factors([1e3], 1000), [0.025, 0.975]) * middle
        inside += lower <= sessions[2] <= upper
    assert 0.91 <= inside / trials <= 0.98
