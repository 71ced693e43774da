"""A job in which ranks train small networks by sparsified exchange, and keep what each of them saw."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure.sparse_exchange import SparseExchange

PLANS = {
    "none": (1, 2, 3, 4, 5, 6),
    "single": (6,),
    "pairs": (2, 4, 6),
    "uneven": (1, 5, 6),
}
STEPS = 4


class Branching(nn.Module):
    """Layers of which one may stay unused and one is used twice."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.spare, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        if tied:
            self.spare.weight = self.first.weight

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        states = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.spare(states)) if spare else states)


def convolutional(me: Rank) -> nn.Module:
    """Its weights, and so their gradients, are not contiguous."""
    first, second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)
    for layer in (first, second):
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    layers = nn.Sequential(first, nn.Tanh(), second, nn.Flatten())
    return nn.Sequential(layers, nn.Linear(5 * 16, 3)).to(me.device)


def images(me: Rank, step: int) -> Tensor:
    """(4, 3, 8, 8) numbers, other ones on every rank in every step."""
    drawn = torch.Generator().manual_seed(100 * me.rank + step)
    whole = torch.randn(4, 3, 8, 8, generator=drawn)
    return whole.to(me.device, memory_format=torch.channels_last)


def vectors(me: Rank, step: int) -> Tensor:
    """(4, 6) numbers, other ones on every rank in every step."""
    drawn = torch.Generator().manual_seed(100 * me.rank + step)
    return torch.randn(4, 6, generator=drawn).to(me.device)


def loss_of(outputs: Tensor) -> Tensor:
    """Some loss whose gradient is nowhere zero."""
    return (outputs**2).mean() + outputs.mean()


def numbers(values: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Copies as arrays."""
    return {name: value.detach().cpu().clone().numpy() for name, value in values.items()}


def gradients(network: nn.Module) -> dict[str, Tensor]:
    """By name, zeros where there is none."""
    named = network.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


class Keeper:
    """What one rank saw, for one file."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def keep(self, prefix: str, values: Mapping[str, NDArray[Any]]) -> None:
        for name, value in values.items():
            self.found[f"{prefix}/{name}"] = value


def dense_against_ddp(me: Rank, keeper: Keeper) -> None:
    """Gradients at density 1 under every plan, and DistributedDataParallel's."""
    torch.manual_seed(0)
    network = convolutional(me)
    reference = DistributedDataParallel(copy.deepcopy(network))
    loss_of(reference(images(me, 0))).backward()
    keeper.keep("dense/ddp", numbers(gradients(reference.module)))
    for name, ends in PLANS.items():
        model = copy.deepcopy(network)
        exchange = SparseExchange(model, FusionPlan(name, ends), 1.0)
        loss_of(model(images(me, 0))).backward()
        exchange.finish()
        keeper.keep(f"dense/{name}", numbers(gradients(model)))


def steps(me: Rank, keeper: Keeper, density: float) -> None:
    """Training under each plan."""
    for plan in PLANS:
        steps_of(me, keeper, plan, density)


def steps_of(me: Rank, keeper: Keeper, plan: str, density: float) -> None:
    """In every step of a training: gradient, residual before and after, sent, mean, weights."""
    torch.manual_seed(0)
    model = convolutional(me)
    exchange = SparseExchange(model, FusionPlan(plan, PLANS[plan]), density)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        where = f"steps/{plan}/{step}"
        keeper.keep(f"{where}/before", numbers(exchange.residuals()))
        names, tensors = zip(*model.named_parameters(), strict=True)
        alone = torch.autograd.grad(loss_of(model(images(me, step))), tensors)
        keeper.keep(f"{where}/gradient", numbers(dict(zip(names, alone, strict=True))))
        loss_of(model(images(me, step))).backward()
        exchange.finish()
        keeper.keep(f"{where}/after", numbers(exchange.residuals()))
        keeper.keep(f"{where}/mean", numbers(gradients(model)))
        for number, group in enumerate(exchange.groups):
            sent = torch.zeros_like(group.residual)
            sent[group.positions] = group.values
            parts = dict(zip(group.names, group.parts(sent), strict=True))
            keeper.keep(f"{where}/sent", numbers(parts))
            keeper.keep(f"{where}/k", {str(number): np.array(len(group.positions.unique()))})
        optimizer.step()
        optimizer.zero_grad()
        keeper.keep(f"{where}/weights", numbers(model.state_dict()))


def accumulated(me: Rank, keeper: Keeper) -> None:
    """Two halves of a batch, of which the first is not exchanged, against the whole at once."""
    for way in ("halves", "whole"):
        torch.manual_seed(0)
        model = convolutional(me)
        exchange = SparseExchange(model, FusionPlan("pairs", PLANS["pairs"]), 0.1)
        batch = images(me, 0)
        if way == "whole":
            loss_of(model(batch)).backward()
        else:
            for last, half in enumerate(batch.split(2)):
                with nullcontext() if last else exchange.no_sync():
                    (loss_of(model(half)) / 2).backward()
        exchange.finish()
        keeper.keep(f"accumulated/{way}", numbers(gradients(model)))


def unused_and_tied(me: Rank, keeper: Keeper) -> None:
    """A layer that only rank 0 uses, at density 1; then one tensor that two layers share."""
    for tied in (False, True):
        torch.manual_seed(0)
        model = Branching(tied).to(me.device)
        reference = copy.deepcopy(model)
        count = len(list(model.parameters()))
        exchange = SparseExchange(model, FusionPlan("halves", (2, count)), 1.0)
        for step in range(2):
            for each in (model, reference):
                each.zero_grad()
                loss_of(each(vectors(me, step), tied or me.rank == 0)).backward()
            keeper.keep(f"unused/{tied}/{step}/alone", numbers(gradients(reference)))
            exchange.finish()
            keeper.keep(f"unused/{tied}/{step}/mean", numbers(gradients(model)))


def _complaint(action: Callable[[], object]) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "nothing"


def _made(
    me: Rank, size: int = 6, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(size, 3).to(me.device, dtype)


def refused_at_once(me: Rank) -> dict[str, Callable[[], object]]:
    """Wrong from the beginning, some on one rank only."""
    odd, plan, one = me.rank == 1, FusionPlan("single", (2,)), partial(_made, me)
    empty = one()
    empty.extra = nn.Parameter(torch.empty(0, device=me.device))
    frozen = one().requires_grad_(False)
    return {
        **{
            f"density {wrong}": partial(SparseExchange, one(), plan, wrong)
            for wrong in (0.0, 1.5, np.nan)
        },
        "other density": lambda: SparseExchange(one(), plan, 0.5 if odd else 0.25),
        "other shape": lambda: SparseExchange(one(7 if odd else 6), plan, 0.5),
        "other model": lambda: SparseExchange(
            nn.Sequential(one(), one()) if odd else one(),
            FusionPlan("single", (4 if odd else 2,)),
            0.5,
        ),
        "other weights": lambda: SparseExchange(one(seed=me.rank), plan, 0.5),
        "other plan": lambda: SparseExchange(one(), FusionPlan("x", (1, 2) if odd else (2,)), 0.5),
        "short plan": lambda: SparseExchange(one(), FusionPlan("x", (1,)), 0.5),
        "empty": lambda: SparseExchange(empty, FusionPlan("single", (3,)), 0.5),
        "half": lambda: SparseExchange(
            one(dtype=torch.float16 if odd else torch.float32), plan, 0.5
        ),
        "order": lambda: SparseExchange(one(), plan, 0.5, order=["weight", "weight"]),
        "frozen": lambda: SparseExchange(frozen, plan, 0.5),
        "ddp": lambda: SparseExchange(DistributedDataParallel(one()), plan, 0.5),
        "later density": lambda: SparseExchange(one(), plan, 0.5).set_density(2.0 if odd else 0.5),
    }


def refused_later(me: Rank) -> dict[str, Callable[[], object]]:
    """Wrong in a pass, on rank 1 only, or on all."""

    def trained(wrong: str) -> None:
        model = _made(me)
        exchange = SparseExchange(model, FusionPlan("none", (1, 2)), 0.5)
        inputs = vectors(me, 0)
        if me.rank == 1 and wrong in ("nan", "inf"):
            inputs[0, 2] = float(wrong)
        if me.rank == 1 and wrong == "later half":
            model.half()
            inputs = inputs.half()
        loss_of(model(inputs)).backward()
        if wrong == "twice":
            loss_of(model(inputs)).backward()
        exchange.finish()

    wrongs = ("nan", "inf", "later half", "twice")
    return {wrong: partial(trained, wrong) for wrong in wrongs}


@dataclass(frozen=True)
class ExchangeSettings:
    """What to do, by name."""

    parts: Sequence[str]


@job(ExchangeSettings)
def exchange_job(me: Rank, settings: ExchangeSettings) -> Sequence[Tables]:
    """Each part in turn; then a file of every rank's results."""
    keeper = Keeper()
    parts: dict[str, Callable[[], object]] = {
        "dense": lambda: dense_against_ddp(me, keeper),
        "steps": lambda: steps(me, keeper, 0.07),
        "accumulated": lambda: accumulated(me, keeper),
        "unused": lambda: unused_and_tied(me, keeper),
    }
    for name in settings.parts:
        if name == "refused":
            for case, action in {**refused_at_once(me), **refused_later(me)}.items():
                keeper.found[f"refused/{case}"] = np.array(_complaint(action))
                dist.barrier()  # nobody is left behind in a message
        else:
            parts[name]()
    np.savez(me.out / f"rank{me.rank}.npz", **keeper.found)
    return []
