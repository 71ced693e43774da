"""Sparsified training: nothing is lost in the exchange, plans are what they should be, seeds are repeated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import selected
from ddlkit.run.measure import sparse_convergence as convergence
from ddlkit.run.measure.convergence import Recipe
from ddlkit.run.measure.sparse_convergence import (
    DENSE,
    TASKS,
    SparseConvergenceSettings,
    train,
    trainings,
)
from ddlkit.run.measure.sparse_exchange import PlayedExchange
from ddlkit.run.nets import sentences

TINY: dict[str, Any] = {"epochs": 2, "batch": 8, "training_images": 24, "held_out_images": 8}
LSTM = "lstm_sentences"
RANKS, DENSITY = 3, 0.07


def tiny(method: str = "lags", **how: Any) -> SparseConvergenceSettings:
    """One short training of the LSTM under one of its methods."""
    made = {each.method: each for each in trainings(LSTM, 0, TINY)}
    chosen = next(each for name, each in made.items() if method in name.split("+"))
    return replace(chosen, **how)


# -- the exchange ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [(6,), (1, 2, 3, 4, 5, 6), (2, 6)])
def test_what_is_sent_and_kept_are_the_gradients_and_the_mean_is_that_of_what_was_sent(
    ends: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 12), nn.Linear(12, 4))
    exchange = PlayedExchange(model, FusionPlan("x", ends), DENSITY, RANKS)
    for _ in range(3):
        sent = [
            [torch.zeros_like(group.residual) for group in exchange.ranks[0]] for _ in range(RANKS)
        ]
        for rank, groups in enumerate(exchange.ranks):
            before = [group.residual.clone() for group in groups]
            model(torch.randn(5, 9)).square().sum().backward()
            gradients = [
                torch.cat(
                    [p.grad.flatten() for p in group.parameters.values() if p.grad is not None]
                )
                for group in groups
            ]
            exchange.take(rank)
            for group, kept, gradient, out in zip(
                groups, before, gradients, sent[rank], strict=True
            ):
                assert len(group.positions) == selected(len(gradient), DENSITY)
                out[group.positions] = group.values
                assert torch.equal(group.residual + out, kept + gradient)
                assert group.values.abs().min() >= group.residual.abs().max()
        exchange.finish()
        for place, group in enumerate(exchange.ranks[0]):
            mean = sum(each[place] for each in sent) / RANKS
            given = torch.cat(
                [p.grad.flatten() for p in group.parameters.values() if p.grad is not None]
            )
            torch.testing.assert_close(given, mean, rtol=1e-6, atol=1e-8)
        model.zero_grad()


def test_a_fault_is_one_line() -> None:
    model = nn.Linear(3, 2)
    exchange = PlayedExchange(model, FusionPlan("single", (2,)), 0.5, 2)
    (model(torch.ones(1, 3)).sum() * math.nan).backward()
    with pytest.raises(UserError, match="the gradient of bias is not finite"):
        exchange.take(1)
    with pytest.raises(UserError, match="density 0 is not above 0 and at most 1"):
        PlayedExchange(model, FusionPlan("single", (2,)), 0, 2)
    with pytest.raises(UserError, match="plan 'x' is of 1 tensors, the module trains 2"):
        PlayedExchange(model, FusionPlan("x", (1,)), 0.5, 2)


# -- what is trained -------------------------------------------------------------------------------


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


def test_a_text_is_its_seed_and_its_verbs_agree_with_their_subjects() -> None:
    text, longer, other = sentences.draw(400, 3), sentences.draw(900, 3), sentences.draw(400, 4)
    assert np.array_equal(text.words, longer.words[:400])
    assert text.sha256 == sentences.draw(400, 3).sha256 != other.sha256
    words, following = text.sequences(20)
    assert np.array_equal(words.ravel()[1:], following.ravel()[:-1])
    told = " ".join(sentences.WORDS[word] for word in sentences.draw(5_000, 0).words)
    for sentence in told.split(" . ")[:-1]:
        subject = sentence.split(" that ")[0].split(" verb")[0].split()[-1]
        verbs = [word for word in sentence.split() if word.startswith("verb")]
        first = verbs[0] if " that " in sentence else verbs[-1]
        assert subject.endswith("s") != first.endswith("s")


def test_at_density_1_every_plan_learns_what_dense_training_learns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = train(tiny(DENSE))
    monkeypatch.setitem(TASKS, LSTM, TASKS[LSTM]._replace(density=1.0))
    for method in ("topk", "lags"):
        whole = train(tiny(method))
        assert (whole["selected"] == whole["parameters"]).all()
        np.testing.assert_allclose(whole["loss"], dense["loss"], rtol=1e-4)


def test_the_same_seed_trains_the_same_and_a_lost_loss_is_said() -> None:
    first, again, other = train(tiny()), train(tiny()), train(tiny(seed=1))
    pd.testing.assert_frame_equal(first.drop(columns="seconds"), again.drop(columns="seconds"))
    assert not np.allclose(first["loss"], other["loss"])
    hopeless = Recipe(**{**TINY, "learning_rate": 1e30, "largest_gradient": math.inf})
    with pytest.raises(UserError, match=r"lstm_sentences|not finite"):
        train(tiny(recipe=hopeless))
    with pytest.raises(UserError, match="unknown network 'lstm': use one of vgg16_cifar_eighth"):
        next(trainings("lstm", 0, {}))
