"""Training to convergence: what must be equal for all networks is equal, and classes can be told apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from ddlkit.core.errors import UserError
from ddlkit.run.measure import convergence
from ddlkit.run.measure.convergence import NETWORKS, Recipe
from ddlkit.run.nets import pictures

TINY = Recipe(epochs=2, batch=8, training_images=24, held_out_images=8)


def train(network: str, seed: int, recipe: Recipe = TINY) -> pd.DataFrame:
    """On one thread: several wait for each other longer than they compute."""
    return convergence.train(network, seed, recipe, threads=1)


# -- pictures ----------------------------------------------------------------------------------


def test_a_seed_is_a_data_set() -> None:
    one, again, other = pictures.draw(48, 3), pictures.draw(48, 3), pictures.draw(48, 4)
    assert one.sha256 == again.sha256 != other.sha256
    assert one.images.shape == (48, 3, pictures.SIDE, pictures.SIDE)
    assert np.bincount(one.labels, minlength=24).tolist() == [2] * len(pictures.CLASSES)
    assert len({image.tobytes() for image in one.images}) == 48


# -- networks ----------------------------------------------------------------------------------


def test_of_one_seed_convolutions_and_order_are_the_same_for_all() -> None:
    first = {
        name: dict(convergence.started(name, 5).named_parameters())["features.2.weight"]
        for name in NETWORKS
    }
    values = list(first.values())
    assert all(torch.equal(one, values[0]) for one in values)
    other = dict(convergence.started("vgg16_eighth", 6).named_parameters())["features.2.weight"]
    assert not torch.equal(other, values[0])
    one, again = (list(convergence.orders(30, 3, seed=5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert all(sorted(order.tolist()) == list(range(30)) for order in one)
    assert not torch.equal(one[0], one[1])


# -- training ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> pd.DataFrame:
    return train("vgg16_eighth", 0)


def test_the_rate_rises_for_an_epoch_and_falls_to_nothing() -> None:
    recipe = Recipe(epochs=10, batch=16, training_images=100)
    assert recipe.steps == 7
    shares = [recipe.rate_share(step) for step in range(10 * 7)]
    assert np.all(np.diff(shares[:6]) > 0) and np.all(np.diff(shares[7:]) < 0)
    assert 0.9 < max(shares) <= 1 and 0 < shares[-1] < 0.01


def test_losses_before_training_and_after_every_epoch(trained: pd.DataFrame) -> None:
    found = trained.groupby("epoch")["measured_on"].agg(set).to_dict()
    both = {"training", "held_out"}
    assert found == {0: both, 1: both | {"running"}, 2: both | {"running"}}
    assert trained["accuracy"].between(0, 1).all()
    assert (trained.loc[trained["epoch"] > 0, "seconds"] > 0).all()


def test_the_same_seed_trains_the_same(trained: pd.DataFrame) -> None:
    torch.manual_seed(17)  # whatever was drawn before
    again = train("vgg16_eighth", 0)
    pd.testing.assert_frame_equal(trained.drop(columns="seconds"), again.drop(columns="seconds"))


def test_a_loss_that_is_no_number_ends_in_one_line() -> None:
    with pytest.raises(UserError, match="vgg16_eighth, seed 1: diverged in epoch"):
        train("vgg16_eighth", 1, replace(TINY, learning_rate=1e12))
    with pytest.raises(UserError, match="unknown network 'vgg': use one of vgg16_eighth"):
        train("vgg", 0)
