"""Noise: single messages scatter as the samples, sessions drift as they did, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from ddlkit.core.fit import interval
from ddlkit.model.calibration import Noise

TWO = np.repeat([1e3, 1e6], 4)
SECONDS = np.concatenate([[0.9, 1.0, 1.0, 1.2], [2.0, 2.0, 2.0, 2.0]])


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
