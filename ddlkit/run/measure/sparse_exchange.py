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
from ddlkit.run.measure.selection import Selector, tournament


@dataclass
class Group:
    """The tensors of one message.

    residual : (n,) float32 of all of them, one after the other: what was not sent yet
    positions, values : (k,) what was sent last
    """

    names: list[str]
    parameters: list[nn.Parameter]
    residual: Tensor
    k: int = 1
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))

    def parts(self, whole: Tensor) -> Iterator[Tensor]:
        """Yield the tensors' shares of an (n,) tensor, each in its parameter's shape."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for part, parameter in zip(whole.split(sizes), self.parameters, strict=True):
            yield part.view(parameter.shape)

    @torch.no_grad()
    def choose(self, select: Selector) -> None:
        """Add the gradients to the residual, and take out of it what is to be sent: positions and values.

        Raises UserError for gradients that are no number.
        """
        for name, part, parameter in zip(
            self.names, self.parts(self.residual), self.parameters, strict=True
        ):
            if parameter.grad is not None:
                part.add_(parameter.grad)
            if not bool(part.isfinite().all()):
                raise UserError(f"sparsified training: the gradient of {name} is not finite")
        self.positions = select(self.residual.abs(), self.k)
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
    density : share of each group's elements that is sent; select : positions of the k largest magnitudes

    A tensor without a gradient in a pass counts as zero. Raises UserError for a density outside (0, 1] and a
    plan of other tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: FusionPlan,
        density: float,
        ranks: int,
        *,
        select: Selector = tournament,
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        names = list(reversed(named))
        if plan.n != len(names):
            raise UserError(
                f"plan {plan.planner!r} is of {plan.n} tensors, the module trains {len(names)}"
            )
        self.select = select
        self.ranks = [[_group(names[part], named) for part in plan.slices] for _ in range(ranks)]
        self.set_density(density)

    def set_density(self, density: float) -> None:
        """Send another share from now on. Raises UserError for one outside (0, 1]."""
        if not 0 < density <= 1:
            raise UserError(f"density {density} is not above 0 and at most 1")
        self.density = density
        for group in chain.from_iterable(self.ranks):
            group.k = selected(group.residual.numel(), density)

    def take(self, rank: int) -> None:
        """Select from the gradients as that rank, and clear them. Raises UserError as `Group.choose`."""
        for group in self.ranks[rank]:
            group.choose(self.select)
            for parameter in group.parameters:
                parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Make each gradient the mean of what all ranks sent, added up in the order of ranks."""
        for groups in zip(*self.ranks, strict=True):
            mean = torch.zeros_like(groups[0].residual)
            for group in groups:
                mean.index_add_(0, group.positions, group.values)
            mean /= len(groups)
            for parameter, part in zip(groups[0].parameters, groups[0].parts(mean), strict=True):
                parameter.grad = part.clone()


def _group(names: list[str], named: dict[str, nn.Parameter]) -> Group:
    parameters = [named[name] for name in names]
    elements = sum(parameter.numel() for parameter in parameters)
    return Group(names, parameters, torch.zeros(elements, device=parameters[0].device))
