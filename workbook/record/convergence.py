"""Train small networks and follow the loss: with dense layers replaced (osf Fig 9), sparsified (omgs Fig 3).

Of one seed all but what is compared is the same: data and order, first weights, optimiser.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import ELEMENT_BYTES, selected
from ddlkit.core.workload import Workload
from ddlkit.measure.layers import compute_on
from ddlkit.measure.session import say
from ddlkit.model import make_plan
from workbook.omgs.equations import published_cost
from workbook.record import drawn
from workbook.record import zoo as registry
from workbook.record.selection import PlayedExchange

_CLASSES = len(drawn.CLASSES)


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: SGD with momentum, a rate that rises for an epoch and then falls."""

    epochs: int = 40
    batch: int = 32  # of all ranks
    learning_rate: float = 0.01
    momentum: float = 0.9
    decay: float = 5e-4
    largest_gradient: float = 5.0  # norm to which a longer one is cut
    training_images: int = 2400
    held_out_images: int = 600

    @property
    def steps(self) -> int:
        """Return the whole batches of an epoch."""
        return self.training_images // self.batch

    def rate_share(self, step: int) -> float:
        """Return the rate's share in a step from 0: half a cosine to zero, less in the first epoch."""
        falling = (1 + math.cos(math.pi * step / (self.epochs * self.steps))) / 2
        return falling * min(1.0, (step + 1) / self.steps)


# -- networks and data -------------------------------------------------------------------------

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vgg16_eighth": partial(registry.vgg16_eighth, _CLASSES),
    "vgg16_eighth_replaced": partial(
        registry.vgg16_replaced, _CLASSES, *registry.SMALL
    ),
    "vgg16_eighth_no_dropout": partial(registry.vgg16_eighth, _CLASSES, dropout=0.0),
}
"""Of osf Fig 9. The replaced one has no dropout, so it has two to be compared with."""

RANKS = 4  # that train together in omgs Fig 3
DENSITY = 0.001  # of omgs Tab IV
SIDE = 32  # of a picture, averaged down to the size of those in CIFAR-10

# Rates were chosen by dense training with another seed than those recorded; decay is that of omgs' code.
_VGG = Recipe(12, learning_rate=0.02, decay=1e-4, largest_gradient=math.inf)
_RESNET = replace(_VGG, learning_rate=0.05)
TASKS: dict[str, tuple[Callable[[], nn.Module], Recipe]] = {
    "vgg16_cifar_eighth": (
        partial(registry.vgg16_cifar, _CLASSES, registry.EIGHTH),
        _VGG,
    ),
    "resnet20_half": (partial(registry.resnet20_half, _CLASSES), _RESNET),
}
"""Of omgs Fig 3; its LSTM was measured at v0.2-studies, and its tables are read."""


def started(network: str, seed: int) -> nn.Module:
    """Return a network with the first weights of a seed: torch's own, or of NETWORKS by He et al. (2015)."""
    if network in NETWORKS:
        model = NETWORKS[network]()
        random = torch.Generator().manual_seed(seed)
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(
                    layer.weight, nonlinearity="relu", generator=random
                )
                nn.init.constant_(layer.bias, 0.0)  # type: ignore[arg-type]  # all have one
        return model
    # The network is made on the processor, so no generator of a GPU is needed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TASKS[network][0]()


# -- training ----------------------------------------------------------------------------------


class _Training:
    """A network in training, by ranks that one process plays, one after the other.

    networks : by rank; they share all parameters, and have statistics of batch normalisation of their own
    exchange : None for dense training, whose gradients add up by themselves
    """

    def __init__(
        self,
        network: str,
        seed: int,
        recipe: Recipe,
        device: torch.device,
        ranks: int = 1,
        exchange: Callable[[nn.Module], PlayedExchange] | None = None,
    ) -> None:
        torch.manual_seed(seed)  # of dropout
        self.recipe, self.model = recipe, started(network, seed).to(device)
        shared = {id(p): p for p in self.model.parameters()}
        self.networks = [copy.deepcopy(self.model, dict(shared)) for _ in range(ranks)]
        self.exchange = exchange(self.model) if exchange else None
        how = recipe.learning_rate, recipe.momentum, 0, recipe.decay
        self.optimizer = torch.optim.SGD(self.model.parameters(), *how)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, recipe.rate_share
        )
        counts = (recipe.training_images, False), (recipe.held_out_images, True)
        both = (
            drawn.examples(*count, SIDE if network in TASKS else None)
            for count in counts
        )
        self.training, self.held_out = (
            [part.to(device) for part in each] for each in both
        )
        self._orders = torch.Generator().manual_seed(seed)

    def epoch(self) -> tuple[float, float]:
        """Train on the whole batches of another order; return their loss and share right before the steps."""
        recipe = self.recipe
        for network in self.networks:
            network.train()
        order = torch.randperm(recipe.training_images, generator=self._orders)
        batches = order[: recipe.steps * recipe.batch].split(recipe.batch)
        loss, right, count = np.sum(
            [self._step(rows) for rows in batches], axis=0
        ).tolist()
        return loss / count, right / count

    def _step(self, rows: Tensor) -> Any:
        """Do one iteration; return all ranks' summed loss, number right, labels."""
        total, ranks = np.zeros(3), len(self.networks)
        self.optimizer.zero_grad()
        for rank, network in enumerate(self.networks):
            inputs, labels = (part[rows[rank::ranks]] for part in self.training)
            logits = network(inputs)
            loss = nn.functional.cross_entropy(logits, labels)
            (loss if self.exchange else loss / ranks).backward()
            if self.exchange:
                self.exchange.take(rank)
            right = int((logits.argmax(1) == labels).sum())
            total += [len(labels) * loss.item(), right, len(labels)]
        if self.exchange:
            self.exchange.finish()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.largest_gradient)
        self.optimizer.step()
        self.schedule.step()
        return total

    @torch.no_grad()
    def judged(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return loss and share right without dropout, by the mean of all ranks' statistics."""
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(
                    torch.stack([n.get_buffer(name) for n in self.networks]).mean(0)
                )
        self.model.eval()
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        return loss.item(), (logits.argmax(1) == labels).float().mean().item()

    def followed(
        self, what: str, judged_on: Mapping[str, Any], labels: Mapping[str, Any]
    ) -> pd.DataFrame:
        """Train all epochs; return scores before and after each: "running", while they train, or judged."""
        rows: list[tuple[int, str, float, float, float]] = []
        recipe = self.recipe
        for epoch in range(recipe.epochs + 1):
            start_s = time.perf_counter()
            scores = {"running": self.epoch()} if epoch else {}
            seconds = (time.perf_counter() - start_s) if epoch else 0.0
            scores |= {name: self.judged(*part) for name, part in judged_on.items()}
            if not all(math.isfinite(loss) for loss, _ in scores.values()):
                raise UserError(f"{what}: diverged in epoch {epoch}: lower the rate")
            rows += [
                (epoch, on, loss, right, seconds)
                for on, (loss, right) in scores.items()
            ]
            off, right = scores["held_out"]
            say(f"{what}, epoch {epoch}: held out {off:.3f}, {right:.0%} right")
        table = pd.DataFrame(
            rows, columns=["epoch", "measured_on", "loss", "accuracy", "seconds"]
        )
        device = self.held_out[0].device.type
        return table.assign(
            device=device,
            threads=torch.get_num_threads() if device == "cpu" else 0,
            parameters=sum(p.numel() for p in self.model.parameters()),
            images=recipe.training_images,
            batch=recipe.batch,
            learning_rate=recipe.learning_rate,
            epochs=recipe.epochs,
            data_sha256=drawn.sha256(recipe.training_images),
            **labels,
        )


def train(
    network: str, seed: int, recipe: Recipe, device: str, threads: int
) -> pd.DataFrame:
    """Return table ``convergence`` of one of NETWORKS, judged on pictures that it trains on and held out."""
    what = f"{network}, seed {seed}"
    with compute_on(what, device, threads=threads) as place, torch.random.fork_rng():
        training = _Training(network, seed, recipe, place)
        first = [part[: recipe.held_out_images] for part in training.training]
        dense = [
            layer for layer in training.model.modules() if isinstance(layer, nn.Linear)
        ]
        size = sum(p.numel() for layer in dense for p in layer.parameters())
        labels = {
            "network": network,
            "seed": seed,
            "dense_parameters": size,
            "classes": _CLASSES,
        }
        judged_on = {"training": first, "held_out": training.held_out}
        return training.followed(what, judged_on, labels)


# -- sparsified --------------------------------------------------------------------------------

METHODS = {"topk": "single", "lags": "none", "omgs": "omgs", "exact": "exact"}
"""Sparsified methods, and the planner of each (omgs Tab I; exact is this project's)."""
DENSE = "dense"
PLANNED_BACKWARD_S = (
    0.1  # that a network's backward pass takes where its plans are made
)


def workload(network: str) -> Workload:
    """Return a network's tensors, with PLANNED_BACKWARD_S shared out by their layers' FLOP, and by size."""
    model = started(network, 0)
    inputs, _ = drawn.examples(1, True, SIDE)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(inputs)
    counts = counter.get_flop_counts()
    flops = {name.partition(".")[2]: sum(counts[name].values()) for name in counts}
    sizes = pd.Series(
        {name: p.numel() for name, p in reversed([*model.named_parameters()])}
    )
    layers = sizes.index.str.rpartition(".").get_level_values(0)
    whole = sizes.groupby(layers).transform("sum").to_numpy()
    shares = (
        np.array([flops.get(layer, 0) for layer in layers]) / whole * sizes.to_numpy()
    )
    backward_s = PLANNED_BACKWARD_S * shares / shares.sum()
    n_bytes = ELEMENT_BYTES * sizes.to_numpy()
    return Workload.from_arrays(PLANNED_BACKWARD_S / 2, backward_s, n_bytes)


@cache
def plans(network: str) -> dict[str, FusionPlan | None]:
    """Return methods, joined by "+" where their plans are the same -> plan at published costs, or dense."""
    work, cost = workload(network), published_cost(RANKS, DENSITY)
    names: dict[tuple[int, ...], list[str]] = {}
    for method, spec in METHODS.items():
        names.setdefault(make_plan(spec, work, cost).ends, []).append(method)
    sparse = {
        "+".join(methods): FusionPlan(methods[0], ends)
        for ends, methods in names.items()
    }
    return {DENSE: None, **sparse}


def train_sparse(network: str, method: str, seed: int, recipe: Recipe) -> pd.DataFrame:
    """Return table ``sparse_convergence`` of one of `plans` by RANKS on one thread. Raises as `train`."""
    what, plan = f"{network}, {method}, seed {seed}", plans(network)[method]
    density = DENSITY if plan else 1.0
    exchange = (
        partial(PlayedExchange, plan=plan, density=density, ranks=RANKS)
        if plan
        else None
    )
    with compute_on(what, "cpu", threads=1) as place, torch.random.fork_rng():
        training = _Training(network, seed, recipe, place, RANKS, exchange)
        sizes = [p.numel() for p in training.model.parameters()]
        ends = plan.ends if plan else ()
        groups = np.add.reduceat(sizes[::-1], (0, *ends[:-1])).tolist() if plan else []
        labels = {
            "network": network,
            "method": method,
            "seed": seed,
            "ends": ";".join(map(str, ends)),
            "schedule": "constant",
            "density": density,
            "messages": max(1, len(groups)),
            "selected": sum(selected(size, density) for size in groups) or sum(sizes),
            "ranks": RANKS,
            "backend": "played",
            "tensors": len(sizes),
        }
        return training.followed(what, {"held_out": training.held_out}, labels)
