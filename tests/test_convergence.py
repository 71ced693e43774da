"""Training to convergence: what is compared has all else equal, and sparsified exchange loses nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import selected
from workbook.record import convergence, drawn
from workbook.record.convergence import DENSE, TASKS, Recipe, plans, train_sparse
from workbook.record.selection import PlayedExchange

TINY = Recipe(epochs=2, batch=8, training_images=24, held_out_images=8)
RESNET = "resnet20_half"
RANKS, SHARE = 3, 0.07


def test_a_seed_is_a_data_set() -> None:
    (images, labels), again, other = (
        drawn.draw_pictures(48, seed) for seed in (3, 3, 4)
    )
    assert np.array_equal(images, again[0]) and not np.array_equal(images, other[0])
    assert images.shape == (48, 3, drawn.SIDE, drawn.SIDE)
    assert np.bincount(labels, minlength=24).tolist() == [2] * len(drawn.CLASSES)
    assert len({image.tobytes() for image in images}) == 48


@pytest.mark.parametrize("network", TASKS)
def test_plans_hold_all_tensors_and_none_is_trained_twice(network: str) -> None:
    tensors = len(list(convergence.started(network, 0).parameters()))
    by_method = {
        method: plan
        for name, plan in plans(network).items()
        for method in name.split("+")
    }
    assert by_method.pop(DENSE) is None
    ends = {method: plan.ends for method, plan in by_method.items() if plan}
    assert ends.keys() == convergence.METHODS.keys()
    assert len({*ends.values()}) == len(plans(network)) - 1
    assert ends["topk"] == (tensors,)
    assert ends["lags"] == tuple(range(1, tensors + 1))
    assert 1 < len(ends["omgs"]) < tensors


def test_the_rate_rises_for_an_epoch_and_falls_to_nothing() -> None:
    recipe = Recipe(epochs=10, batch=16, training_images=112)
    assert recipe.steps == 7
    shares = [recipe.rate_share(step) for step in range(10 * 7)]
    assert np.all(np.diff(shares[:6]) > 0) and np.all(np.diff(shares[7:]) < 0)
    assert 0.9 < max(shares) <= 1 and 0 < shares[-1] < 0.01


def test_the_same_seed_trains_the_same_and_every_epoch_is_followed(
    tmp_path: Any,
) -> None:
    def train(seed: int, recipe: Recipe) -> pd.DataFrame:
        """On one thread: several wait for each other longer than they compute."""
        return convergence.train("vgg16_eighth", seed, recipe, "cpu", threads=1)

    table = train(0, TINY)
    store.save_table(table, tmp_path, "convergence-x", schema="convergence", command=[])
    scored = table.groupby("epoch")["measured_on"].agg(set).to_dict()
    both = {"training", "held_out"}
    assert scored == {0: both, 1: both | {"running"}, 2: both | {"running"}}
    assert (
        table["accuracy"].between(0, 1).all() and table["dense_parameters"].gt(0).all()
    )
    assert (table.loc[table["epoch"] > 0, "seconds"] > 0).all()
    torch.manual_seed(17)  # whatever was drawn before
    again = train(0, TINY)
    pd.testing.assert_frame_equal(
        table.drop(columns="seconds"), again.drop(columns="seconds")
    )
    assert not np.allclose(
        train(0, replace(TINY, largest_gradient=1e-3))["loss"], table["loss"]
    )
    with pytest.raises(UserError, match="vgg16_eighth, seed 1: diverged in epoch"):
        train(1, replace(TINY, learning_rate=1e12, largest_gradient=math.inf))


def ready_gradients(parameters: dict[str, nn.Parameter]) -> torch.Tensor:
    """What stands in the gradients, one after the other."""
    return torch.cat(
        [p.grad.flatten() for p in parameters.values() if p.grad is not None]
    )


@pytest.mark.parametrize("ends", [(6,), (1, 2, 3, 4, 5, 6), (2, 6)])
def test_what_is_sent_and_kept_are_the_gradients_and_the_mean_is_that_of_what_was_sent(
    ends: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 12), nn.Linear(12, 4)
    )
    exchange = PlayedExchange(model, FusionPlan("x", ends), SHARE, RANKS)
    for _ in range(3):
        sent = [torch.zeros_like(group.residual) for group in exchange.ranks[0]]
        for rank, groups in enumerate(exchange.ranks):
            before = [group.residual.clone() for group in groups]
            model(torch.randn(5, 9)).square().sum().backward()
            gradients = [ready_gradients(group.parameters) for group in groups]
            exchange.take(rank)
            for k, group in enumerate(groups):
                assert len(group.values) == selected(len(group.residual), SHARE)
                whole = torch.zeros_like(group.residual)
                whole[group.positions] = group.values
                torch.testing.assert_close(
                    whole + group.residual, before[k] + gradients[k]
                )
                assert group.values.abs().min() >= group.residual.abs().max()
                sent[k] += whole
        exchange.finish()
        for k, group in enumerate(exchange.ranks[0]):
            torch.testing.assert_close(
                ready_gradients(group.parameters), sent[k] / RANKS
            )
    next(model.parameters()).grad = torch.full((16, 9), math.nan)
    with pytest.raises(UserError, match="the gradient of 0.weight is not finite"):
        exchange.take(1)


def test_at_density_1_every_plan_learns_what_dense_training_learns(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(method: str) -> pd.DataFrame:
        name = next(each for each in plans(RESNET) if method in each.split("+"))
        return train_sparse(RESNET, name, 0, TINY)

    dense, sparse = train(DENSE), train("lags")
    for name, table in {"dense": dense, "sparse": sparse}.items():
        store.save_table(table, tmp_path, name, schema="sparse_convergence", command=[])
    assert (sparse["selected"] < sparse["parameters"] / 50).all()
    monkeypatch.setattr(convergence, "DENSITY", 1.0)
    whole = train("topk")
    assert (whole["selected"] == whole["parameters"]).all()
    np.testing.assert_allclose(whole["loss"], dense["loss"], rtol=1e-4)
