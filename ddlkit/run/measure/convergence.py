"""Train VGG-16 as published and with its dense layers replaced, and follow the loss (osf Fig 9).

The networks are an eighth as wide as published and see drawn pictures (`ddlkit.run.nets.pictures`), so that
two cores train them in minutes. Whatever is not the head is the same for all: pictures and their order,
first weights of the convolutions, optimiser, schedule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddlkit.core.errors import UserError
from ddlkit.run.measure.layers import computing
from ddlkit.run.nets import pictures, zoo

NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "vgg16_eighth": zoo.vgg16_eighth,
    "vgg16_eighth_replaced": zoo.vgg16_eighth_replaced,
    "vgg16_eighth_no_dropout": partial(zoo.vgg16_eighth, dropout=0.0),
}
"""Number of classes -> network. The replaced one has no dropout, so it has two to be compared with."""

_MEAN, _SPREAD = 0.35, 0.3  # about those of the pictures' bytes / 255
_EVALUATED_AT_ONCE = 200


@dataclass(frozen=True)
class Recipe:
    """How every network is trained: SGD with momentum, a rate that rises for an epoch and then falls.

    decay : of weights, per step and rate; largest_gradient : norm to which a longer gradient is cut
    """

    epochs: int = 40
    batch: int = 32
    learning_rate: float = 0.01
    momentum: float = 0.9
    decay: float = 5e-4
    largest_gradient: float = 5.0
    training_images: int = 2400
    held_out_images: int = 600

    @property
    def steps(self) -> int:
        """Batches of an epoch; the last one may be smaller."""
        return -(-self.training_images // self.batch)

    def rate_share(self, step: int) -> float:
        """Return the rate's share in a step from 0: half a cosine to zero, less in the first epoch."""
        falling = (1 + math.cos(math.pi * step / (self.epochs * self.steps))) / 2
        return falling * min(1.0, (step + 1) / self.steps)


class Optimizer:
    """SGD as a recipe says, of a model's parameters."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.parameters, self.recipe = list(model.parameters()), recipe
        self._sgd = torch.optim.SGD(
            self.parameters, recipe.learning_rate, recipe.momentum, weight_decay=recipe.decay
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._sgd, recipe.rate_share)
        self.zero_grad = self._sgd.zero_grad

    def step(self) -> None:
        """Cut the gradient where it is too long, and take a step."""
        nn.utils.clip_grad_norm_(self.parameters, self.recipe.largest_gradient)
        self._sgd.step()
        self._schedule.step()


@lru_cache(maxsize=1)
def data(recipe: Recipe) -> tuple[pictures.Pictures, pictures.Pictures]:
    """Return the pictures to train on, and those that no training sees."""
    return pictures.draw(recipe.training_images, 0), pictures.draw(recipe.held_out_images, 1)


def on_device(drawn: pictures.Pictures, device: torch.device) -> TensorDataset:
    """Return the pictures as the networks see them, and their labels."""
    inputs = (torch.from_numpy(drawn.images).float() / 255 - _MEAN) / _SPREAD
    labels = torch.from_numpy(drawn.labels)
    return TensorDataset(inputs.to(device, memory_format=torch.channels_last), labels.to(device))


def started(network: str, seed: int) -> nn.Module:
    """Return a network with first weights by He et al. (2015): without them 16 layers do not begin to learn.

    Of one seed the convolutions start alike in every network. Raises UserError for an unknown network.
    """
    if network not in NETWORKS:
        raise UserError(f"unknown network {network!r}: use one of {', '.join(NETWORKS)}")
    model = NETWORKS[network](len(pictures.CLASSES))
    random = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=random)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return model


def orders(images: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield (images,) rows in the order in which each epoch shows them: by seed, whatever the network."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield torch.randperm(images, generator=random)


Score = tuple[float, float]
"""Mean loss, and share that is right."""


def followed(
    what: str,
    recipe: Recipe,
    train_epoch: Callable[[], Score],
    judge: Callable[[], dict[str, Score]],
    say: Callable[[str], object],
) -> pd.DataFrame:
    """Train all epochs; return rows of what ``judge`` finds, before training and after every epoch.

    Columns: epoch, measured_on ("running": all batches of the epoch, while they train, or a key of what
    ``judge`` gives, which has "held_out"), loss, accuracy, seconds (of training the epoch).

    Raises UserError when the loss is no longer a number.
    """
    rows: list[tuple[int, str, float, float, float]] = []
    for epoch in range(recipe.epochs + 1):
        start_s = time.perf_counter()
        scores = {"running": train_epoch()} if epoch else {}
        seconds = (time.perf_counter() - start_s) if epoch else 0.0
        scores |= judge()
        if not all(math.isfinite(loss) for loss, _ in scores.values()):
            raise UserError(f"{what}: diverged in epoch {epoch}: lower the rate")
        rows += [(epoch, on, loss, right, seconds) for on, (loss, right) in scores.items()]
        if epoch % max(1, recipe.epochs // 4) == 0:
            loss, right = scores["held_out"]
            say(f"{what}, epoch {epoch}: held out {loss:.3f}, {right:.0%} right")
    return pd.DataFrame(rows, columns=["epoch", "measured_on", "loss", "accuracy", "seconds"])


def train(
    network: str,
    seed: int,
    recipe: Recipe,
    *,
    device: str = "cpu",
    threads: int | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> pd.DataFrame:
    """Return table ``convergence``: loss and accuracy before training and after every epoch.

    ``measured_on`` is "running" (with dropout), "training" (as many training images as are held out, without
    dropout) or "held_out". seed : of first weights, order and dropout; threads : of the CPU, None for
    torch's default; say : gets a line every few epochs

    Raises UserError for an unknown network or device, and when the loss is no longer a number.
    """
    with computing(what := f"{network}, seed {seed}", device, threads=threads) as place:
        with torch.random.fork_rng():
            training, held_out = (on_device(drawn, place) for drawn in data(recipe))
            torch.manual_seed(seed)  # of dropout
            model = started(network, seed).to(place)
            shown = orders(len(training), recipe.epochs, seed)
            parts = {"training": training[: len(held_out)], "held_out": held_out[:]}
            rows = followed(
                what,
                recipe,
                partial(_epoch, model, training, Optimizer(model, recipe), shown),
                lambda: {name: _evaluate(model, *part) for name, part in parts.items()},
                say,
            )
        return pd.DataFrame({**_labels(network, model, seed, recipe), **rows})


def _labels(network: str, model: nn.Module, seed: int, recipe: Recipe) -> dict[str, Any]:
    device = next(model.parameters()).device.type
    dense = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return {
        "network": network,
        "device": device,
        "seed": seed,
        "threads": torch.get_num_threads() if device == "cpu" else 0,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dense_parameters": sum(p.numel() for layer in dense for p in layer.parameters()),
        "classes": len(pictures.CLASSES),
        "images": recipe.training_images,
        "data_sha256": data(recipe)[0].sha256,
        "batch": recipe.batch,
        "learning_rate": recipe.learning_rate,
        "epochs": recipe.epochs,
    }


def _epoch(
    model: nn.Module, images: TensorDataset, optimizer: Optimizer, shown: Iterator[Tensor]
) -> Score:
    """Train on the images in the next order; loss and accuracy of batches before their steps."""
    model.train()
    total = np.zeros(2)
    for rows in next(shown).split(optimizer.recipe.batch):
        inputs, labels = images[rows]
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += [len(rows) * loss.item(), int((logits.argmax(1) == labels).sum())]
    mean_loss, accuracy = (total / len(images)).tolist()
    return mean_loss, accuracy


@torch.no_grad()
def _evaluate(model: nn.Module, inputs: Tensor, labels: Tensor) -> Score:
    """Mean loss and accuracy without dropout."""
    model.eval()
    logits = torch.cat([model(part) for part in inputs.split(_EVALUATED_AT_ONCE)])
    loss = nn.functional.cross_entropy(logits, labels)
    return loss.item(), (logits.argmax(1) == labels).float().mean().item()
