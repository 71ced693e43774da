"""Train small networks with the dense and the sparsified gradients of several ranks (omgs Fig 3).

Methods are fusion plans for one exchange (`ddlkit.run.measure.sparse_exchange`), dense is the mean. Of one
network and seed everything else is the same: first weights, data, order, optimiser, schedule. Plans are made
for a network's layers as counted, with the costs of the authors' published code, so that every machine trains
under the same ones; where methods find the same plan, it is trained once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import ELEMENT_BYTES, selected
from ddlkit.core.workload import Floats, Workload
from ddlkit.model import make_plan
from ddlkit.papers.omgs.cluster import published_cost
from ddlkit.run.measure import convergence
from ddlkit.run.measure.convergence import Recipe, orders
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.sparse_exchange import PlayedExchange
from ddlkit.run.nets import pictures, sentences, zoo

METHODS = {"topk": "single", "lags": "none", "omgs": "omgs", "exact": "exact"}
"""Sparsified methods, and the planner of each (omgs Tab I; exact is this project's)."""
DENSE = "dense"
RANKS = 4  # that train together
PLANNED_BACKWARD_S = 0.1
"""How long a network's backward pass takes where its plans are made: see `planned`."""
STEPS, UNITS = 20, 64  # words of a sequence, and units of a layer of the LSTM
SIDE = 32  # of a picture, averaged down to the size of those in CIFAR-10
SCHEDULES: dict[str, tuple[float, ...]] = {
    "constant": (),
    "warm-up": (0.25, 0.0625, 0.015625, 0.004),
}
"""Densities of the first epochs, if they are larger. The paper names none, and the authors' published code
trains at one density; it holds the second list (Lin et al. 2018), switched off."""
_JUDGED_AT_ONCE = 50

Examples = tuple[Tensor, Tensor]


class Task(NamedTuple):
    """What is trained: a network, by drawn pictures or sentences, at which density, how."""

    build: Callable[[], nn.Module]
    text: bool
    density: float
    recipe: Recipe

    def examples(self, recipe: Recipe, held_out: bool) -> Examples:
        """Return inputs and labels, on the CPU: to train on, or those that no training sees."""
        if self.text:
            words, following = _text(recipe, held_out).sequences(STEPS)
            return torch.from_numpy(words), torch.from_numpy(following)
        drawn = convergence.data(recipe)[held_out]
        inputs, labels = convergence.on_device(drawn, torch.device("cpu")).tensors
        smaller = nn.functional.adaptive_avg_pool2d(inputs, SIDE)
        return smaller.contiguous(memory_format=torch.channels_last), labels

    def digest(self, recipe: Recipe) -> str:
        """Return the hash of the training data."""
        return (_text(recipe, False) if self.text else convergence.data(recipe)[0]).sha256


@lru_cache(maxsize=2)
def _text(recipe: Recipe, held_out: bool) -> sentences.Text:
    count = recipe.held_out_images if held_out else recipe.training_images
    return sentences.draw(count * STEPS + 1, seed=int(held_out))


# Recipe: epochs, batch of all ranks, rate, momentum, decay, largest gradient, examples, held out. Rates were
# chosen by dense training with another seed than those recorded.
_VGG = Recipe(12, 32, 0.02, 0.9, 1e-4, math.inf, 2400, 600)
_RESNET = Recipe(12, 32, 0.05, 0.9, 1e-4, math.inf, 2400, 600)
_WORDS = Recipe(20, 16, 1.0, 0.9, 0.0, 1.0, 2112, 600)
_CLASSES = len(pictures.CLASSES)
TASKS: dict[str, Task] = {
    "vgg16_cifar_eighth": Task(partial(zoo.vgg16_cifar_eighth, _CLASSES), False, 0.001, _VGG),
    "resnet20_half": Task(partial(zoo.resnet20_half, _CLASSES), False, 0.001, _RESNET),
    "lstm_sentences": Task(
        partial(zoo.LanguageModel, UNITS, len(sentences.WORDS), dropout=0.0), True, 0.005, _WORDS
    ),
}
"""Densities are those of omgs Tab IV. Momentum, decay and rate of the LSTM are those of the paper and of its
authors' code, but for the LSTM's momentum and largest gradient (there 0 and 0.25), with which nothing is
learned in so few steps. "Images" of a language model are its sequences."""


# -- plans -----------------------------------------------------------------------------------------


def started(network: str, seed: int) -> nn.Module:
    """Return a network with torch's own first weights of that seed. Raises UserError for an unknown one."""
    if network not in TASKS:
        raise UserError(f"unknown network {network!r}: use one of {', '.join(TASKS)}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TASKS[network].build()


@lru_cache
def workload(network: str) -> Workload:
    """Return the layers of a network, `PLANNED_BACKWARD_S` of backward in proportion to their FLOP.

    A layer's time is shared out to its tensors by size; forward takes half as long.
    """
    model, task = started(network, 0), TASKS[network]
    inputs, _ = task.examples(replace(task.recipe, training_images=1, held_out_images=1), True)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(inputs[:1])
    flops = {
        name.partition(".")[2]: sum(by_operation.values())
        for name, by_operation in counter.get_flop_counts().items()
    }
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    seconds = dict.fromkeys(sizes, 0.0)
    for name, layer in model.named_modules():
        tensors = [f"{name}.{short}" for short, _ in layer.named_parameters(recurse=False)]
        whole = sum(sizes[tensor] for tensor in tensors)
        for tensor in tensors:
            seconds[tensor] = flops.get(name, 0) * sizes[tensor] / whole
    scale = PLANNED_BACKWARD_S / sum(seconds.values())
    backward_s = [scale * seconds[name] for name in reversed(sizes)]
    n_bytes = [ELEMENT_BYTES * sizes[name] for name in reversed(sizes)]
    return Workload.from_arrays(PLANNED_BACKWARD_S / 2, backward_s, n_bytes)


def planned(network: str) -> dict[str, FusionPlan]:
    """Return methods, joined by "+" where their plans are the same -> the plan, at the published costs."""
    work, cost = workload(network), published_cost(RANKS, TASKS[network].density)
    names: dict[tuple[int, ...], list[str]] = {}
    for method, spec in METHODS.items():
        names.setdefault(make_plan(spec, work, cost).ends, []).append(method)
    return {"+".join(methods): FusionPlan(methods[0], ends) for ends, methods in names.items()}


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseConvergenceSettings:
    """One training.

    method : "dense", or those that ``ends`` is the plan of; schedule : one of SCHEDULES
    """

    network: str
    method: str
    seed: int
    ends: tuple[int, ...] = ()
    schedule: str = "constant"
    recipe: Recipe = field(default_factory=Recipe)

    def density(self, epoch: int) -> float:
        """Return the share that is sent in an epoch from 0."""
        earlier = SCHEDULES[self.schedule][epoch : epoch + 1]
        return max((TASKS[self.network].density, *earlier))


def trainings(
    network: str, seed: int, recipe: Mapping[str, Any], schedule: str = "constant"
) -> Iterator[SparseConvergenceSettings]:
    """Yield what is trained of a network and seed: dense and every plan; with a schedule only omgs's.

    recipe : what differs from the task's own. Raises UserError for an unknown network.
    """
    plans = planned(network)
    how = Recipe(**{**asdict(TASKS[network].recipe), **recipe})
    whole = partial(SparseConvergenceSettings, network, seed=seed, recipe=how)
    if schedule == "constant":
        yield whole(DENSE)
    for methods, plan in plans.items():
        if schedule == "constant" or "omgs" in methods.split("+"):
            yield whole(methods, ends=plan.ends, schedule=schedule)


def train(
    settings: SparseConvergenceSettings, *, say: Callable[[str], object] = lambda line: None
) -> pd.DataFrame:
    """Return table ``sparse_convergence``: loss and accuracy before training and after every epoch.

    All RANKS are played by this process, one after the other, on one thread of the CPU. ``measured_on`` is
    "running" (all batches of the epoch, while they train) or "held_out".

    Raises UserError when the loss is no longer a number.
    """
    what = f"{settings.network}, {settings.method}, {settings.schedule}, seed {settings.seed}"
    with computing(what, "cpu", threads=1):
        training = _Training(settings)
        judge = training.judged
        rows = convergence.followed(what, settings.recipe, training.epoch, judge, say)
        return pd.DataFrame({**training.labels(), **rows})


class _Training:
    """A network in training, all its ranks.

    networks : by rank; they share all parameters, and have statistics of batch normalisation of their own
    exchange : None for dense training, whose gradients add up by themselves
    """

    def __init__(self, settings: SparseConvergenceSettings) -> None:
        self.settings, self.task, recipe = settings, TASKS[settings.network], settings.recipe
        self.model = started(settings.network, settings.seed)
        shared = {id(p): p for p in self.model.parameters()}
        self.networks = [copy.deepcopy(self.model, dict(shared)) for _ in range(RANKS)]
        self.epochs_done, self.exchange = 0, None
        if settings.method != DENSE:
            plan = FusionPlan(settings.method, settings.ends)
            self.exchange = PlayedExchange(self.model, plan, settings.density(0), RANKS)
        self.optimizer = convergence.Optimizer(self.model, recipe)
        self.training, self.held_out = (self.task.examples(recipe, part) for part in (False, True))
        self.orders = orders(len(self.training[0]), recipe.epochs, settings.seed)

    def epoch(self) -> convergence.Score:
        """Train on the next epoch's whole batches; return the score of them."""
        if self.exchange:
            self.exchange.set_density(self.settings.density(self.epochs_done))
        self.epochs_done += 1
        total = np.zeros(3)
        for network in self.networks:
            network.train()
        for rows in next(self.orders).split(self.settings.recipe.batch):
            if len(rows) == self.settings.recipe.batch:
                total += self._step(rows)
        loss, right, count = total
        return float(loss / count), float(right / count)

    def _step(self, rows: Tensor) -> Floats:
        """One iteration: all ranks' summed loss, number right, labels."""
        total = np.zeros(3)
        self.optimizer.zero_grad()
        for rank, network in enumerate(self.networks):
            inputs, labels = (part[rows[rank::RANKS]] for part in self.training)
            logits, labels = network(inputs), labels.flatten()
            loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            if self.exchange:
                self.exchange.take(rank)
            right = int((logits.argmax(1) == labels).sum())
            total += [len(labels) * loss.item(), right, len(labels)]
        if self.exchange:
            self.exchange.finish()
        else:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= RANKS
        self.optimizer.step()
        return total

    @torch.no_grad()
    def judged(self) -> dict[str, convergence.Score]:
        """Return the score on what no training sees, by the mean of all ranks' statistics."""
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                whole = torch.stack([each.get_buffer(name) for each in self.networks]).sum(0)
                buffer.copy_(whole / RANKS)
        self.model.eval()
        inputs, labels = self.held_out
        labels = labels.flatten()
        logits = torch.cat([self.model(part) for part in inputs.split(_JUDGED_AT_ONCE)])
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        return {"held_out": (float(loss) / len(labels), float(right) / len(labels))}

    def labels(self) -> dict[str, Any]:
        """Return what says which training this is: columns of the table."""
        settings, recipe = self.settings, self.settings.recipe
        sizes = [p.numel() for p in self.model.parameters()]
        density, ends = settings.density(recipe.epochs - 1), settings.ends
        groups = np.add.reduceat(sizes[::-1], (0, *ends[:-1])).tolist() if ends else []
        return {
            "network": settings.network,
            "method": settings.method,
            "ends": ";".join(map(str, ends)),
            "schedule": settings.schedule,
            "density": density if ends else 1.0,
            "messages": max(1, len(groups)),
            "selected": sum(selected(size, density) for size in groups) or sum(sizes),
            "ranks": RANKS,
            "backend": "played",
            "device": "cpu",
            "seed": settings.seed,
            "threads": torch.get_num_threads(),
            "parameters": sum(sizes),
            "tensors": len(sizes),
            "data_sha256": self.task.digest(recipe),
            "images": recipe.training_images,
            "batch": recipe.batch,
            "learning_rate": recipe.learning_rate,
            "epochs": recipe.epochs,
        }
