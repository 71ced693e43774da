"""A fusion plan imposed on the gradients of a torch module, sparsified: omgs Algorithm 2 in real training.

Each group of the plan keeps what of its gradients was not sent yet (error feedback). The largest elements
are selected exactly; every rank gets all values and indices, adds them up rank by rank, and leaves the mean
in the gradients, where an optimizer finds it. All ranks are played by one process, one after the other: where
it matters what is learned, and not how fast, nobody needs to wait for messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import selected
from ddlkit.run.measure.selection import tournament


@dataclass
class Group:
    """The tensors of one message.

    residual : (n,) float32 of all of them, one after the other: what was not sent yet
    positions, values : (k,) what was sent last
    """

    parameters: dict[str, nn.Parameter]
    residual: Tensor
    k: int = 1
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))

    def parts(self, whole: Tensor) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield each tensor with its share of an (n,) tensor, in its own shape."""
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        parts = whole.split(sizes)
        for (name, parameter), part in zip(self.parameters.items(), parts, strict=True):
            yield name, parameter, part.view(parameter.shape)

    @torch.no_grad()
    def choose(self) -> None:
        """Add the gradients to the residual, and take out of it what is to be sent: positions and values.

        Raises UserError for gradients that are no number.
        """
        for name, parameter, part in self.parts(self.residual):
            if parameter.grad is not None:
                part.add_(parameter.grad)
            if not bool(part.isfinite().all()):
                raise UserError(f"sparsified training: the gradient of {name} is not finite")
        self.positions = tournament(self.residual.abs(), self.k)
        self.values = self.residual[self.positions]
        self.residual[self.positions] = 0.0


class PlayedExchange:
    """Exchange a module's gradients, sparsified, under a plan.

    ::

        exchange = PlayedExchange(network, plan, density=0.001, ranks=4)
        for rank in range(4):
            loss(rank).backward()
            exchange.take(rank)
        exchange.finish()                   # .grad is now the mean of what all ranks sent

    plan : over the module's tensors in ready order, `named_parameters` from the last to the first
    density : share of each group's elements that is sent

    A tensor without a gradient in a pass counts as zero. Raises UserError for a density outside (0, 1] and a
    plan of other tensors.
    """

    def __init__(self, module: nn.Module, plan: FusionPlan, density: float, ranks: int) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]
        if plan.n != len(named):
            raise UserError(
                f"plan {plan.planner!r} is of {plan.n} tensors, the module trains {len(named)}"
            )
        groups = [dict(named[part]) for part in plan.slices]
        sizes = [sum(p.numel() for p in group.values()) for group in groups]
        self.ranks = [
            [Group(group, torch.zeros(size)) for group, size in zip(groups, sizes, strict=True)]
            for _ in range(ranks)
        ]
        self.set_density(density)

    def set_density(self, density: float) -> None:
        """Send another share from now on. Raises UserError for one outside (0, 1]."""
        if not 0 < density <= 1:
            raise UserError(f"density {density} is not above 0 and at most 1")
        for group in chain.from_iterable(self.ranks):
            group.k = selected(group.residual.numel(), density)

    def take(self, rank: int) -> None:
        """Select from the gradients as that rank, and clear them. Raises UserError as `Group.choose`."""
        for group in self.ranks[rank]:
            group.choose()
            for parameter in group.parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Make each gradient the mean of what all ranks sent, added up in the order of ranks."""
        for groups in zip(*self.ranks, strict=True):
            mean = torch.zeros_like(groups[0].residual)
            for group in groups:
                mean.index_add_(0, group.positions, group.values)
            mean /= len(groups)
            for _, parameter, part in groups[0].parts(mean):
                parameter.grad = part.clone()
