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
from ddlkit.run.measure import convergence
from ddlkit.run.measure.convergence import (
    DENSE,
    TASKS,
    Recipe,
    SparseTraining,
    train_sparse,
    trainings,
)
from ddlkit.run.measure.selection import PlayedExchange

TINY = Recipe(epochs=2, batch=8, training_images=24, held_out_images=8)
LSTM = "lstm_sentences"
RANKS, DENSITY = 3, 0.07


def train(network: str, seed: int, recipe: Recipe = TINY) -> pd.DataFrame:
    """On one thread: several wait for each other longer than they compute."""
    return convergence.train(network, seed, recipe, "cpu", threads=1)


def tiny(method: str = "lags", **how: Any) -> SparseTraining:
    """One short training of the LSTM under one of its methods."""
    made = next(each for each in trainings(LSTM, 0) if method in each.method.split("+"))
    counts = {name: getattr(TINY, name) for name in ("epochs", "batch", "training_images")}
    recipe = replace(made.recipe, held_out_images=8, **counts)
    return replace(made, recipe=recipe, **how)


# -- data and networks -------------------------------------------------------------------------


@pytest.mark.parametrize("network", TASKS)
def test_plans_hold_all_tensors_and_none_is_trained_twice(network: str) -> None:
    tensors = len(list(convergence.started(network, 0).parameters()))
    plans = convergence.planned(network)
    assert len({plan.ends for plan in plans.values()}) == len(plans)
    assert sorted("+".join(plans).split("+")) == sorted(convergence.METHODS)
    by_method = {method: plan for name, plan in plans.items() for method in name.split("+")}
    assert by_method["topk"].ends == (tensors,)
    assert by_method["lags"].ends == tuple(range(1, tensors + 1))
    assert 1 < len(by_method["omgs"].ends) < tensors


# -- training ----------------------------------------------------------------------------------


def test_the_rate_rises_for_an_epoch_and_falls_to_nothing() -> None:
    recipe = Recipe(epochs=10, batch=16, training_images=112)
    assert recipe.steps == 7
    shares = [recipe.rate_share(step) for step in range(10 * 7)]
    assert np.all(np.diff(shares[:6]) > 0) and np.all(np.diff(shares[7:]) < 0)
    assert 0.9 < max(shares) <= 1 and 0 < shares[-1] < 0.01
    layer = nn.Linear(1, 1, bias=False)
    sgd = replace(recipe, momentum=0.0, decay=0.0, largest_gradient=2.0).optimizer(layer)
    layer.weight.grad, before = torch.full((1, 1), 50.0), layer.weight.item()
    sgd.step()
    assert before - layer.weight.item() == pytest.approx(2.0 * 0.01 / 7, rel=1e-4)


def test_the_same_seed_trains_the_same_and_every_epoch_is_followed(tmp_path: Any) -> None:
    table = train("vgg16_eighth", 0)
    store.save_table(table, tmp_path, "convergence-x", schema="convergence", command=[])
    scored = table.groupby("epoch")["measured_on"].agg(set).to_dict()
    both = {"training", "held_out"}
    assert scored == {0: both, 1: both | {"running"}, 2: both | {"running"}}
    assert table["accuracy"].between(0, 1).all() and table["dense_parameters"].gt(0).all()
    assert (table.loc[table["epoch"] > 0, "seconds"] > 0).all()
    torch.manual_seed(17)  # whatever was drawn before
    again = train("vgg16_eighth", 0)
    pd.testing.assert_frame_equal(table.drop(columns="seconds"), again.drop(columns="seconds"))
    with pytest.raises(UserError, match="vgg16_eighth, seed 1: diverged in epoch"):
        train("vgg16_eighth", 1, replace(TINY, learning_rate=1e12))


# -- sparsified --------------------------------------------------------------------------------


def ready_gradients(parameters: dict[str, nn.Parameter]) -> torch.Tensor:
    """What stands in the gradients, one after the other."""
    return torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None])


@pytest.mark.parametrize("ends", [(6,), (1, 2, 3, 4, 5, 6), (2, 6)])
def test_what_is_sent_and_kept_are_the_gradients_and_the_mean_is_that_of_what_was_sent(
    ends: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 12), nn.Linear(12, 4))
    exchange = PlayedExchange(model, FusionPlan("x", ends), DENSITY, RANKS)
    for _ in range(3):
        sent = [torch.zeros_like(group.residual) for group in exchange.ranks[0]]
        for rank, groups in enumerate(exchange.ranks):
            before = [group.residual.clone() for group in groups]
            model(torch.randn(5, 9)).square().sum().backward()
            gradients = [ready_gradients(group.parameters) for group in groups]
            exchange.take(rank)
            for k, group in enumerate(groups):
                assert len(group.values) == selected(len(group.residual), DENSITY)
                whole = torch.zeros_like(group.residual)
                whole[group.positions] = group.values
                torch.testing.assert_close(whole + group.residual, before[k] + gradients[k])
                assert group.values.abs().min() >= group.residual.abs().max()
                sent[k] += whole
        exchange.finish()
        for k, group in enumerate(exchange.ranks[0]):
            torch.testing.assert_close(ready_gradients(group.parameters), sent[k] / RANKS)
    next(model.parameters()).grad = torch.full((16, 9), math.nan)
    with pytest.raises(UserError, match="the gradient of 0.weight is not finite"):
        exchange.take(1)


def test_at_density_1_every_plan_learns_what_dense_training_learns(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, sparse = train_sparse(tiny(DENSE)), train_sparse(tiny())
    for name, table in {"dense": dense, "sparse": sparse}.items():
        store.save_table(table, tmp_path, name, schema="sparse_convergence", command=[])
    assert (sparse["selected"] < sparse["parameters"] / 50).all()
    assert not np.allclose(train_sparse(tiny(seed=1))["loss"], sparse["loss"])
    monkeypatch.setitem(TASKS, LSTM, TASKS[LSTM]._replace(density=1.0))
    for method in ("topk", "lags"):
        whole = train_sparse(tiny(method))
        assert (whole["selected"] == whole["parameters"]).all()
        np.testing.assert_allclose(whole["loss"], dense["loss"], rtol=1e-4)
