"""Train small networks on several ranks with dense and with sparsified gradients (omgs Fig 3).

Methods are fusion plans for one exchange (`ddlkit.run.measure.sparse_exchange`), dense is the mean. Of one
network and seed everything else is the same: first weights, data, order, optimiser, schedule. Plans are made
for a network's layers as counted, with the costs of the authors' published code, so that every machine trains
under the same ones; where methods find the same plan, it is trained once.
"""

from __future__ import annotations

import copy
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from ddlkit import store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import ELEMENT_BYTES, Log, SparseGather, selected
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Floats, Rank, everyones
from ddlkit.run.measure import convergence
from ddlkit.run.measure.convergence import Recipe, orders
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.sparse_exchange import PlayedExchange, SparseExchange
from ddlkit.run.nets import datasets, pictures, sentences, zoo
from ddlkit.store import readers

METHODS = {"topk": "single", "lags": "none", "omgs": "omgs", "exact": "exact"}
"""Sparsified methods, and the planner of each (omgs Tab I; exact is this project's)."""
DENSE, PLAYED = "dense", "played"
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
    """What is trained: a network, by what data it is fed, at which density, how.

    examples : (recipe, whether held out) -> inputs, labels; digest : of the training data
    ranks : that train together
    """

    build: Callable[[], nn.Module]
    examples: Callable[[Recipe, bool], Examples]
    digest: Callable[[Recipe], str]
    density: float
    ranks: int
    recipe: Recipe


def _pictures(recipe: Recipe, held_out: bool) -> Examples:
    return _small(convergence.data(recipe)[held_out])


def _small(drawn: pictures.Pictures) -> Examples:
    inputs, labels = convergence.on_device(drawn, torch.device("cpu")).tensors
    smaller = nn.functional.adaptive_avg_pool2d(inputs, SIDE)
    return smaller.contiguous(memory_format=torch.channels_last), labels


def _picture_digest(recipe: Recipe) -> str:
    return convergence.data(recipe)[0].sha256


@lru_cache(maxsize=2)
def _text(recipe: Recipe, held_out: bool) -> sentences.Text:
    count = recipe.held_out_images if held_out else recipe.training_images
    return sentences.draw(count * STEPS + 1, seed=int(held_out))


def _sequences(recipe: Recipe, held_out: bool) -> Examples:
    return _cut(_text(recipe, held_out))


def _cut(text: sentences.Text) -> Examples:
    words, following = text.sequences(STEPS)
    return torch.from_numpy(words), torch.from_numpy(following)


def _text_digest(recipe: Recipe) -> str:
    return _text(recipe, False).sha256


def _classifier(make: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return partial(make, len(pictures.CLASSES))


# Recipe: epochs, batch of all ranks, rate, momentum, decay, largest gradient, examples, held out. Rates were
# chosen by dense training with another seed than those recorded.
_VGG = Recipe(12, 32, 0.02, 0.9, 1e-4, math.inf, 2400, 600)
_RESNET = Recipe(12, 32, 0.05, 0.9, 1e-4, math.inf, 2400, 600)
_WORDS = Recipe(20, 16, 1.0, 0.9, 0.0, 1.0, 2112, 600)
TASKS: dict[str, Task] = {
    "vgg16_cifar_eighth": Task(
        _classifier(zoo.vgg16_cifar_eighth), _pictures, _picture_digest, 0.001, 4, _VGG
    ),
    "resnet20_half": Task(
        _classifier(zoo.resnet20_half), _pictures, _picture_digest, 0.001, 4, _RESNET
    ),
    "lstm_sentences": Task(
        partial(zoo.LanguageModel, UNITS, len(sentences.WORDS), dropout=0.0),
        _sequences,
        _text_digest,
        0.005,
        4,
        _WORDS,
    ),
}
"""Densities are those of omgs Tab IV. Momentum, decay and rate of the LSTM are those of the paper and of its
authors' code, but for the LSTM's momentum and largest gradient (there 0 and 0.25), with which nothing is
learned in so few steps. "Images" of a language model are its sequences."""
TEXTS = ("lstm_sentences",)


def task(network: str) -> Task:
    """The task of that name; "NAME@DIRECTORY": with the real data in there (`ddlkit.run.nets.datasets`).

    Raises UserError for an unknown one, and for data that cannot be read.
    """
    name, _, directory = network.partition("@")
    if name not in TASKS:
        raise UserError(f"unknown network {name!r}: use one of {', '.join(TASKS)}")
    if not directory:
        return TASKS[name]
    return (_with_text if name in TEXTS else _with_pictures)(TASKS[name], Path(directory))


def label(network: str) -> str:
    """What a task is recorded as: its name, and which real data it was fed with, if any."""
    name, _, directory = network.partition("@")
    return name + (f"-{'ptb' if name in TEXTS else 'cifar10'}" if directory else "")


def _with_pictures(drawn: Task, directory: Path) -> Task:
    """The task with CIFAR-10; its network knows more classes than there are."""

    def read(recipe: Recipe, held_out: bool) -> pictures.Pictures:
        count = recipe.held_out_images if held_out else recipe.training_images
        return datasets.cifar10(directory, count, held_out)

    return drawn._replace(
        examples=lambda recipe, held_out: _small(read(recipe, held_out)),
        digest=lambda recipe: read(recipe, False).sha256,
    )


def _with_text(drawn: Task, directory: Path) -> Task:
    """The task with the Penn Treebank and its vocabulary."""

    def read(recipe: Recipe, held_out: bool) -> sentences.Text:
        count = recipe.held_out_images if held_out else recipe.training_images
        return datasets.penn_treebank(directory, count * STEPS + 1, held_out)

    words = len(datasets.vocabulary(directory))
    return drawn._replace(
        build=partial(zoo.LanguageModel, UNITS, words, dropout=0.0),
        examples=lambda recipe, held_out: _cut(read(recipe, held_out)),
        digest=lambda recipe: read(recipe, False).sha256,
    )


# -- plans -----------------------------------------------------------------------------------------


def started(network: str, seed: int) -> nn.Module:
    """A network with its first weights: torch's own of that seed. Raises UserError for an unknown one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return task(network).build()


def ready_order(model: nn.Module) -> list[str]:
    """Names of the trained tensors from the last one to the first."""
    return [name for name, p in reversed(list(model.named_parameters())) if p.requires_grad]


@lru_cache
def workload(network: str) -> Workload:
    """The layers of a network, `PLANNED_BACKWARD_S` of backward in proportion to their FLOP.

    A layer's time is shared out to its tensors by size; forward takes half as long.
    """
    model = started(network, 0)
    one = replace(task(network).recipe, training_images=1, held_out_images=1)
    inputs, _ = task(network).examples(one, True)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(inputs[:1])
    flops = {
        name.partition(".")[2]: sum(by_operation.values())
        for name, by_operation in counter.get_flop_counts().items()
    }
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    seconds = dict.fromkeys(sizes, 0.0)
    for name, layer in model.named_modules():
        own = [f"{name}.{short}" for short, _ in layer.named_parameters(recurse=False)]
        whole = sum(sizes[tensor] for tensor in own)
        for tensor in own:
            seconds[tensor] = flops.get(name, 0) * sizes[tensor] / whole
    scale = PLANNED_BACKWARD_S / sum(seconds.values())
    order = ready_order(model)
    backward_s = [scale * seconds[name] for name in order]
    n_bytes = [ELEMENT_BYTES * sizes[name] for name in order]
    return Workload.from_arrays(PLANNED_BACKWARD_S / 2, backward_s, n_bytes)


def published_cost(ranks: int, density: float) -> SparseGather:
    """Messages and selection as the authors' code has them for so many workers on 1 Gbit/s Ethernet."""
    table = store.DATA / "papers" / "omgs" / "code.csv"
    code = pd.read_csv(io.BytesIO(readers.read_transcribed(table))).set_index("id")["value"]
    alpha_s, beta_s = code[f"alpha-{ranks}"], code[f"beta-{ranks}"]
    gather = AlphaBeta(alpha_s, beta_s, collective="all_gather", workers=ranks)
    return SparseGather(gather, density, selecting=Log(code["gamma"]))


def planned(network: str) -> dict[str, FusionPlan]:
    """Methods, joined by "+" where their plans are the same -> the plan, for a network on its ranks."""
    cost = published_cost(task(network).ranks, task(network).density)
    names: dict[tuple[int, ...], list[str]] = {}
    for method, spec in METHODS.items():
        plan = make_plan(spec, workload(network), cost)
        names.setdefault(plan.ends, []).append(method)
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

    def __post_init__(self) -> None:
        task(self.network)
        if self.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise UserError(f"unknown schedule {self.schedule!r}: use one of {known}")

    def density(self, epoch: int) -> float:
        """Share that is sent in an epoch from 0."""
        least = task(self.network).density
        earlier = SCHEDULES[self.schedule][epoch : epoch + 1]
        return max(least, *earlier) if earlier else least


def train(
    settings: SparseConvergenceSettings,
    *,
    device: str = "cpu",
    say: Callable[[str], object] = lambda line: None,
) -> pd.DataFrame:
    """Table ``sparse_convergence``: loss and accuracy before training and after every epoch.

    All ranks are played by this process, one after the other, on one thread of a CPU: the same numbers as of
    ranks that talk. ``measured_on`` is "running" (all batches of the epoch, while they train) or "held_out".

    Raises UserError when the loss is no longer a number.
    """
    what = f"{settings.network}, {settings.method}, seed {settings.seed}"
    with computing(what, device, threads=1) as place:
        return _followed(_Training(settings, place), say)


@job(SparseConvergenceSettings, "sparse_convergence")
def sparse_convergence_job(me: Rank, settings: SparseConvergenceSettings) -> Iterator[Tables]:
    """The same on ranks that talk, whatever number a task's is. Raises UserError on every rank."""
    yield {"sparse_convergence": _followed(_Training(settings, me.device, me), me.say)}


def _followed(training: _Training, say: Callable[[str], object]) -> pd.DataFrame:
    settings = training.settings
    what = f"{settings.network}, {settings.method}, {settings.schedule}, seed {settings.seed}"
    rows: list[tuple[int, str, float, float, float]] = []
    for epoch in range(settings.recipe.epochs + 1):
        start_s = time.perf_counter()
        found = {"running": training.epoch(epoch - 1)} if epoch else {}
        seconds = (time.perf_counter() - start_s) if epoch else 0.0
        found["held_out"] = training.judged()
        if not all(math.isfinite(loss) for loss, _ in found.values()):
            raise UserError(f"{what}: diverged in epoch {epoch}: lower the rate")
        rows += [(epoch, on, loss, right, seconds) for on, (loss, right) in found.items()]
        if epoch % max(1, settings.recipe.epochs // 4) == 0:
            loss, right = found["held_out"]
            say(f"{what}, epoch {epoch}: held out {loss:.3f}, {right:.0%} right")
    columns = ["epoch", "measured_on", "loss", "accuracy", "seconds"]
    return pd.DataFrame({**training.labels(), **pd.DataFrame(rows, columns=columns)})


class _Dense:
    """The mean of all ranks' gradients, played."""

    density = 1.0

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.model, self.ranks = model, ranks

    def set_density(self, density: float) -> None:
        """All is sent."""

    def take(self, rank: int) -> None:
        """Gradients add up by themselves."""

    def finish(self) -> None:
        """Divide the sums."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.ranks


class _Training:
    """A network in training: all its ranks where ``me`` is None, else that one.

    networks : by rank; they share all parameters, and have statistics of batch normalisation of their own
    """

    def __init__(
        self, settings: SparseConvergenceSettings, device: torch.device, me: Rank | None = None
    ) -> None:
        self.settings, self.me, recipe = settings, me, settings.recipe
        self.world_size = me.world_size if me else task(settings.network).ranks
        self.model = started(settings.network, settings.seed).to(device)
        shared = {id(p): p for p in self.model.parameters()}
        self.networks: dict[int, nn.Module] = {
            rank: copy.deepcopy(self.model, dict(shared))
            for rank in ([me.rank] if me else range(self.world_size))
        }
        self.exchange = self._exchange()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            recipe.learning_rate,
            recipe.momentum,
            weight_decay=recipe.decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, recipe.rate_share)
        examples = task(settings.network).examples
        self.training, self.held_out = (
            tuple(part.to(device) for part in examples(recipe, held_out))
            for held_out in (False, True)
        )
        self.orders = orders(len(self.training[0]), recipe.epochs, settings.seed)

    def _exchange(self) -> _Dense | PlayedExchange | SparseExchange | None:
        """What makes one gradient of all ranks'; None: DistributedDataParallel, around the only network."""
        settings = self.settings
        if settings.method == DENSE:
            if not self.me:
                return _Dense(self.model, self.world_size)
            rank = self.me.rank
            wrapped = DistributedDataParallel(self.networks[rank], broadcast_buffers=False)
            self.networks[rank] = wrapped
            return None
        plan = FusionPlan(settings.method, settings.ends)
        if self.me:
            return SparseExchange(self.model, plan, settings.density(0))
        return PlayedExchange(self.model, plan, settings.density(0), self.world_size)

    def epoch(self, number: int) -> tuple[float, float]:
        """(mean loss, share right) of an epoch's whole batches, of all ranks."""
        density = self.settings.density(number) if self.settings.ends else 1.0
        if self.exchange and density != self.exchange.density:
            self.exchange.set_density(density)
        total = np.zeros(3)
        for network in self.networks.values():
            network.train()
        for rows in next(self.orders).split(self.settings.recipe.batch):
            if len(rows) == self.settings.recipe.batch:
                total += self._step(rows)
        loss, right, count = self._of_all(total)
        return float(loss / count), float(right / count)

    def _step(self, rows: Tensor) -> Floats:
        """One iteration of the ranks here: their summed loss, number right, labels."""
        total = np.zeros(3)
        self.optimizer.zero_grad()
        for rank, network in self.networks.items():
            inputs, labels = (part[rows[rank :: self.world_size]] for part in self.training)
            logits, labels = network(inputs), labels.flatten()
            loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            if isinstance(self.exchange, PlayedExchange | _Dense):
                self.exchange.take(rank)
            right = int((logits.argmax(1) == labels).sum())
            total += [len(labels) * loss.item(), right, len(labels)]
        if self.exchange:
            self.exchange.finish()
        largest = self.settings.recipe.largest_gradient
        if math.isfinite(largest):
            nn.utils.clip_grad_norm_(self.model.parameters(), largest)
        self.optimizer.step()
        self.schedule.step()
        return total

    def _of_all(self, mine: Floats) -> Floats:
        """Sums over all ranks."""
        return np.asarray(everyones(mine).sum(axis=0)) if self.me else mine

    @torch.no_grad()
    def judged(self) -> tuple[float, float]:
        """(mean loss, share right) on what no training sees, by the mean of all ranks' statistics.

        Each rank judges its share of it.
        """
        for name, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                whole = torch.stack([_buffer(one, name) for one in self.networks.values()]).sum(0)
                if self.me:
                    dist.all_reduce(whole)
                buffer.copy_(whole / self.world_size)
        self.model.eval()
        mine = slice(self.me.rank, None, self.world_size) if self.me else slice(None)
        inputs, labels = (part[mine] for part in self.held_out)
        labels = labels.flatten()
        logits = torch.cat([self.model(part) for part in inputs.split(_JUDGED_AT_ONCE)])
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        total, hits, count = self._of_all(np.array([float(loss), float(right), len(labels)]))
        return float(total / count), float(hits / count)

    def labels(self) -> dict[str, Any]:
        """What says which training this is."""
        settings, recipe = self.settings, self.settings.recipe
        sizes = [p.numel() for p in self.model.parameters()]
        density, ends = settings.density(recipe.epochs - 1), settings.ends
        groups = np.add.reduceat(sizes[::-1], (0, *ends[:-1])).tolist() if ends else []
        device = self.training[0].device.type
        return {
            "network": label(settings.network),
            "method": settings.method,
            "ends": ";".join(map(str, ends)),
            "schedule": settings.schedule,
            "density": density if ends else 1.0,
            "messages": max(1, len(groups)),
            "selected": sum(selected(size, density) for size in groups) or sum(sizes),
            "ranks": self.world_size,
            "backend": self.me.backend if self.me else PLAYED,
            "device": device,
            "seed": settings.seed,
            "threads": torch.get_num_threads() if device == "cpu" else 0,
            "parameters": sum(sizes),
            "tensors": len(sizes),
            "data_sha256": task(settings.network).digest(recipe),
            "images": recipe.training_images,
            "batch": recipe.batch,
            "learning_rate": recipe.learning_rate,
            "epochs": recipe.epochs,
        }


def _buffer(network: nn.Module, name: str) -> Tensor:
    """A buffer by the name it has in the network, which may be wrapped."""
    inner = network.module if isinstance(network, DistributedDataParallel) else network
    return cast(Tensor, inner.get_buffer(name))


def trainings(
    network: str, seed: int, recipe: Mapping[str, Any], schedule: str = "constant"
) -> Iterator[SparseConvergenceSettings]:
    """What is trained of a network and seed: dense and every distinct plan; with a schedule only omgs's.

    recipe : what differs from the task's own. Raises UserError for an unknown network or schedule.
    """
    how = Recipe(**{**asdict(task(network).recipe), **recipe})
    whole = partial(SparseConvergenceSettings, network, seed=seed, recipe=how)
    if schedule == "constant":
        yield whole(DENSE)
    for methods, plan in planned(network).items():
        if schedule == "constant" or "omgs" in methods.split("+"):
            yield whole(methods, ends=plan.ends, schedule=schedule)
