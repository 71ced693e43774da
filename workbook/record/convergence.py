"""Training of small networks to convergence.

Networks are trained with their dense layers replaced (osf Fig 9), and with sparsified gradients (omgs Fig 3).
For one seed, all but what is compared is the same: the data and their order, the first weights and the
optimiser.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
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
    """How a network is trained: SGD with momentum, at a rate that first rises and then falls.

    ``decay`` is the weight decay, and ``batch`` counts the images of all ranks together.
    """

    epochs: int = 40
    batch: int = 32
    learning_rate: float = 0.01
    momentum: float = 0.9
    decay: float = 5e-4
    largest_gradient: float = 5.0  # norm to which a longer one is cut
    training_images: int = 2400
    held_out_images: int = 600

    @property
    def steps(self) -> int:
        """Return the steps of an epoch, which trains on whole batches only."""
        return self.training_images // self.batch

    def rate_share(self, step: int) -> float:
        """Return the factor of the learning rate in a step, from 0 to 1.

        The step counts from 0 over all epochs. The factor falls from 1 to 0 as half a cosine. In
        the first epoch it is multiplied by a line that rises to 1.
        """
        falling = (1 + math.cos(math.pi * step / (self.epochs * self.steps))) / 2
        return falling * min(1.0, (step + 1) / self.steps)


# -- networks and data -----------------------------------------------------------------

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
    """Return a network of `NETWORKS` or `TASKS` with the first weights of a seed.

    Weights of `NETWORKS` are drawn as in He et al. (2015), and those of `TASKS` as torch draws
    them.
    """
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
    # The seed is set for this network alone, because the state of torch's generator is restored
    # afterwards. ``devices`` would be GPUs, and the network is made on the processor.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make, _ = TASKS[network]
        return make()


# -- training --------------------------------------------------------------------------


class _Training:
    """A network in training by ranks that one process plays, one after the other.

    ``network`` is a name of `NETWORKS` or `TASKS`. The ``seed`` decides the first weights, dropout
    and the order of the images. ``exchange`` takes the network and returns the exchange of its
    gradients. With None, training is dense.

    Attributes
    ----------
    recipe : Recipe
        How the network is trained.
    model : Module
        The network.
    networks : list of Module
        The network of each rank. They share all parameters. Each has its own statistics of batch
        normalisation.
    exchange : PlayedExchange or None
        The exchange of gradients, or None for dense training, whose gradients add up by themselves.
    training, held_out : list of Tensor
        The images and labels that are trained on, and those that are held out of training.
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
        # Dropout draws from the global generator.
        torch.manual_seed(seed)
        self.recipe = recipe
        self.model = started(network, seed).to(device)
        # `deepcopy` does not copy the parameters that its second argument holds by their ids, so
        # that all networks share them. It adds to this dictionary, so that each copy gets its own.
        shared = {id(p): p for p in self.model.parameters()}
        self.networks = [copy.deepcopy(self.model, dict(shared)) for _ in range(ranks)]
        self.exchange = exchange(self.model) if exchange else None
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=recipe.learning_rate,
            momentum=recipe.momentum,
            weight_decay=recipe.decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, recipe.rate_share
        )
        # The networks of omgs (`TASKS`) are made for small images. Those of osf take the pictures
        # as they are drawn, for which None stands.
        side = SIDE if network in TASKS else None
        trained_on = drawn.examples(recipe.training_images, held_out=False, side=side)
        held_out = drawn.examples(recipe.held_out_images, held_out=True, side=side)
        self.training = [part.to(device) for part in trained_on]
        self.held_out = [part.to(device) for part in held_out]
        # Draws the order of the images in each epoch.
        self._orders = torch.Generator().manual_seed(seed)

    def epoch(self) -> tuple[float, float]:
        """Train on the whole batches of the training images, in another random order at each call.

        Returns
        -------
        loss : float
            The mean loss of the images. The loss of an image is taken with the weights before its
            step.
        accuracy : float
            The share of the images that were classified correctly, with the same weights.
        """
        recipe = self.recipe
        for network in self.networks:
            network.train()
        order = torch.randperm(recipe.training_images, generator=self._orders)
        # The images that would not fill the last batch are left out of this epoch.
        batches = order[: recipe.steps * recipe.batch].split(recipe.batch)
        # A row for each step, with sums over its images.
        step_sums = [self._step(positions) for positions in batches]
        loss, correct, count = np.sum(step_sums, axis=0).tolist()
        return loss / count, correct / count

    def _step(self, positions: Tensor) -> Any:
        """Do one iteration on the images at these positions.

        The images are divided among the ranks. Returns an array of three sums over all images:
        their losses, how many were classified correctly, and how many there are.
        """
        total = np.zeros(3)
        all_inputs, all_labels = self.training
        ranks = len(self.networks)
        self.optimizer.zero_grad()
        for rank, network in enumerate(self.networks):
            # Of n ranks, rank r takes the images r, r + n, r + 2 n and so on of the batch.
            own_positions = positions[rank::ranks]
            labels = all_labels[own_positions]
            logits = network(all_inputs[own_positions])
            loss = nn.functional.cross_entropy(logits, labels)
            if self.exchange:
                # The exchange takes the gradients of this rank, and makes the mean of the ranks
                # later.
                loss.backward()
                self.exchange.take(rank)
            else:
                # Gradients of all ranks add up in the shared parameters. Divided by the number of
                # ranks, they add up to a mean.
                (loss / ranks).backward()
            correct = int((logits.argmax(1) == labels).sum())
            # The loss is a mean over the images of the rank.
            total += [len(labels) * loss.item(), correct, len(labels)]
        if self.exchange:
            self.exchange.finish()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.largest_gradient)
        self.optimizer.step()
        self.schedule.step()
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return the mean loss and the accuracy on images, without dropout.

        Batch normalisation uses the mean of all ranks' statistics.
        """
        # What changes in the model here, its buffers and its mode, does not affect training: the
        # networks of the ranks share only its parameters. Statistics are the buffers with
        # floating-point numbers, while other buffers only count batches.
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                of_ranks = [network.get_buffer(name) for network in self.networks]
                buffer.copy_(torch.stack(of_ranks).mean(0))
        self.model.eval()
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return loss.item(), accuracy.item()

    def run(
        self, what: str, evaluated_on: Mapping[str, Any], labels: Mapping[str, Any]
    ) -> pd.DataFrame:
        """Train all epochs and return a row for each epoch and each set of images.

        Parameters
        ----------
        what : str
            What is trained, as messages name it.
        evaluated_on : mapping
            Images and their labels to evaluate after each epoch, by name. One name is "held_out".
        labels : mapping
            Further columns of the table.

        Returns
        -------
        DataFrame
            The ``loss`` and ``accuracy`` of each epoch. Epoch 0 is before training. Column
            ``measured_on`` has the name of the images. Its value "running" means the images that
            the epoch trained on, each with the weights before its own step. ``seconds`` is how long
            the epoch trained.

        Raises
        ------
        UserError
            If a loss is not finite.
        """
        rows: list[tuple[int, str, float, float, float]] = []
        for epoch in range(self.recipe.epochs + 1):
            # By name of the images, the loss and the accuracy.
            scores = {}
            # Epoch 0 trains nothing, and takes no time.
            seconds = 0.0
            if epoch > 0:
                start_s = time.perf_counter()
                scores["running"] = self.epoch()
                seconds = time.perf_counter() - start_s
            for name, images in evaluated_on.items():
                scores[name] = self.evaluate(*images)
            if not all(math.isfinite(loss) for loss, _ in scores.values()):
                raise UserError(f"{what}: diverged in epoch {epoch}: lower the rate")
            rows += [
                (epoch, name, loss, accuracy, seconds)
                for name, (loss, accuracy) in scores.items()
            ]
            # Progress, as a message to the user.
            loss, accuracy = scores["held_out"]
            say(f"{what}, epoch {epoch}: held out {loss:.3f}, {accuracy:.0%} right")
        columns = ["epoch", "measured_on", "loss", "accuracy", "seconds"]
        table = pd.DataFrame(rows, columns=columns)
        return table.assign(**self._labels(), **labels)

    def _labels(self) -> dict[str, Any]:
        """Return the columns that describe the training."""
        recipe = self.recipe
        device = self.held_out[0].device.type
        return {
            "device": device,
            # On a GPU the threads of the processor do not count.
            "threads": torch.get_num_threads() if device == "cpu" else 0,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "images": recipe.training_images,
            "batch": recipe.batch,
            "learning_rate": recipe.learning_rate,
            "epochs": recipe.epochs,
            "data_sha256": drawn.sha256(recipe.training_images),
        }


def train(
    network: str, seed: int, recipe: Recipe, device: str, threads: int
) -> pd.DataFrame:
    """Return table ``convergence`` of one of `NETWORKS`, by training on one rank.

    Training is dense: gradients are not sparsified. The network is evaluated on held-out images,
    and on as many of those that it trains on.

    Parameters
    ----------
    network : str
        The name of the network.
    seed : int
        The seed of the first weights, of dropout and of the order of images.
    recipe : Recipe
        How the network is trained.
    device : str
        "cpu" or "cuda".
    threads : int
        The number of threads on the processor.
    """
    what = f"{network}, seed {seed}"
    # Training seeds the global generator. `fork_rng`
    # restores the state of the generator afterwards.
    with (
        compute_on(what, device, threads=threads) as torch_device,
        torch.random.fork_rng(),
    ):
        training = _Training(network, seed, recipe, torch_device)
        # As many images to train on as are held out, and their labels.
        trained_on = [part[: recipe.held_out_images] for part in training.training]
        # The number of parameters in dense (linear) layers, which the paper "osf" (Liu et al. 2022)
        # replaces by convolutions for its Fig 9.
        dense_parameters = 0
        for layer in training.model.modules():
            if isinstance(layer, nn.Linear):
                dense_parameters += sum(p.numel() for p in layer.parameters())
        labels = {
            "network": network,
            "seed": seed,
            "dense_parameters": dense_parameters,
            "classes": _CLASSES,
        }
        evaluated_on = {"training": trained_on, "held_out": training.held_out}
        return training.run(what, evaluated_on, labels)


# -- sparsified ------------------------------------------------------------------------

METHODS = {"topk": "single", "lags": "none", "omgs": "omgs", "exact": "exact"}
"""Sparsified methods, and the planner of each (omgs Tab I; exact is this project's)."""
DENSE = "dense"
PLANNED_BACKWARD_S = 0.1
"""The seconds of a network's backward pass for which its plans are made."""


def workload(network: str) -> Workload:
    """Return the workload of a network of `TASKS`: the bytes and backward seconds of each tensor.

    All times follow from FLOPs, and none is measured. The backward pass takes `PLANNED_BACKWARD_S`,
    and the forward pass half as long. A layer's share of the backward pass is its share of the
    FLOPs of the forward pass. The time of a layer is divided between the layer's tensors by their
    sizes.
    """
    # Neither FLOPs nor sizes depend on the weights.
    model = started(network, seed=0)
    layer_flops = _forward_flops(model)
    # In the order in which gradients become ready, which is the reverse order of registration.
    parameters = list(model.named_parameters())[::-1]
    elements = np.array([p.numel() for _, p in parameters])
    # The layer of each tensor. After the last dot, the name of a tensor has "weight" or "bias".
    layers = [name.rpartition(".")[0] for name, _ in parameters]
    # For each tensor, the elements of its layer.
    layer_elements = pd.Series(elements).groupby(layers).sum()
    elements_of_layer = layer_elements[layers].to_numpy()
    # The counter leaves out layers without products, such as batch normalisation. They count as 0.
    flops_of_layer = np.array([layer_flops.get(layer, 0) for layer in layers])
    # FLOPs of each tensor: those of its layer, times its share of the layer's elements.
    flops = flops_of_layer / elements_of_layer * elements
    backward_s = PLANNED_BACKWARD_S * flops / flops.sum()
    n_bytes = ELEMENT_BYTES * elements
    forward_s = PLANNED_BACKWARD_S / 2
    return Workload.from_arrays(forward_s, backward_s, n_bytes)


def _forward_flops(model: nn.Module) -> dict[str, int]:
    """Return the FLOPs of the forward pass on one image, by the name of the layer.

    Only the shares of layers matter. They are about the same in the backward pass, which takes
    about twice as many FLOPs for each layer. Layers without products, such as batch normalisation,
    are missing. The sums of modules that contain layers are in the result, too, but are not used.
    """
    # The FLOPs do not depend on the image.
    inputs, _ = drawn.examples(1, held_out=True, side=SIDE)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(inputs)
    layer_flops = {}
    # The counter names a module by the class of the network, a dot, and the name of the module.
    # Names without a dot belong to sums of the whole network, and become "".
    for name, counts in counter.get_flop_counts().items():
        _, _, layer = name.partition(".")
        # ``counts`` are by operator.
        layer_flops[layer] = sum(counts.values())
    return layer_flops


@cache
def plans(network: str) -> dict[str, FusionPlan | None]:
    """Return the plan of each method of `METHODS`, made for the published costs of messages.

    Methods whose plans have the same groups share one entry, whose key joins their names by "+".
    The entry `DENSE` has None, because dense training has no plan.
    """
    network_workload = workload(network)
    cost = published_cost(RANKS, DENSITY)
    # By the ends of a plan's groups, the methods whose plans have these groups.
    methods_by_ends: dict[tuple[int, ...], list[str]] = {}
    for method, spec in METHODS.items():
        plan = make_plan(spec, network_workload, cost)
        methods_by_ends.setdefault(plan.ends, []).append(method)
    plans_by_method: dict[str, FusionPlan | None] = {DENSE: None}
    for ends, methods in methods_by_ends.items():
        # The plan is named after the first of its methods.
        plans_by_method["+".join(methods)] = FusionPlan(methods[0], ends)
    return plans_by_method


def train_sparse(network: str, method: str, seed: int, recipe: Recipe) -> pd.DataFrame:
    """Return table ``sparse_convergence`` of training one of `TASKS` under one of its `plans`.

    One thread plays `RANKS` ranks. Raises UserError if a loss is not finite.

    Parameters
    ----------
    network : str
        The name of the task's network.
    method : str
        A key of `plans`, such as `DENSE`.
    seed : int
        The seed of the first weights, of dropout and of the order of images.
    recipe : Recipe
        How the network is trained.
    """
    what = f"{network}, {method}, seed {seed}"
    plan = plans(network)[method]
    # Dense training has no plan. Its gradients add up without an exchange.
    exchange = None
    if plan:
        exchange = partial(PlayedExchange, plan=plan, density=DENSITY, ranks=RANKS)
    # Training seeds the global generator. `fork_rng`
    # restores the state of the generator afterwards.
    with compute_on(what, "cpu", threads=1) as torch_device, torch.random.fork_rng():
        training = _Training(network, seed, recipe, torch_device, RANKS, exchange)
        elements = [p.numel() for p in training.model.parameters()]
        labels = {
            "network": network,
            "method": method,
            "seed": seed,
            **_plan_labels(plan, elements),
            "ranks": RANKS,
            "backend": "played",
            "tensors": len(elements),
        }
        return training.run(what, {"held_out": training.held_out}, labels)


def _plan_labels(plan: FusionPlan | None, elements: Sequence[int]) -> dict[str, Any]:
    """Return the columns that describe a plan, or dense training.

    Parameters
    ----------
    plan : FusionPlan or None
        The plan, or None for dense training, which sends all elements in one message.
    elements : sequence of int
        The elements of each tensor, in the order of registration.

    Returns
    -------
    dict
        The values of these columns:

        ends
            The ends of the plan's groups in ready order, joined by ";". Empty for dense
            training.
        schedule
            How the density changes over the epochs: "constant", because it never does.
        density
            The share of the elements that is sent.
        messages
            The number of messages of an iteration.
        selected
            The number of elements that a rank sends in an iteration.
    """
    if plan is None:
        return {
            "ends": "",
            "schedule": "constant",
            "density": 1.0,
            "messages": 1,
            "selected": sum(elements),
        }
    # A plan counts tensors in ready order, which is the reverse order of registration.
    in_ready_order = elements[::-1]
    # Each group begins where the group before it ends. `reduceat` adds up the elements from each
    # begin to the next one.
    begins = (0, *plan.ends[:-1])
    group_elements = np.add.reduceat(in_ready_order, begins).tolist()
    return {
        "ends": ";".join(map(str, plan.ends)),
        "schedule": "constant",
        "density": DENSITY,
        "messages": len(group_elements),
        "selected": sum(selected(size, DENSITY) for size in group_elements),
    }
