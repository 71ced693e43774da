"""Keep only the largest gradients: selecting exactly k of d, what it costs, and training's exchange of them.

Beside torch.topk stands a way of our own to find the same set, `tournament`: the maxima of groups play
first. The k largest elements lie in the k groups with the largest maxima, whatever the data are (the
delegates of Gaihre et al., Dr. Top-k, SC 2021), so torch.topk sees only few. Each element is read once, in a
way that every machine does fast, and nothing depends on the values: nobody waits for the GPU until the end.

`PlayedExchange` is omgs Algorithm 2 in real training, by ranks that one process plays: where it matters what
is learned, and not how fast, nobody needs to wait for messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import selected
from ddlkit.run import clock
from ddlkit.run.clock import Budget
from ddlkit.run.measure.layers import computing
from ddlkit.run.sessions import all_or_partial

SMALL = 2**16  # with fewer elements, torch.topk is as fast
GROUP = 64  # elements whose maximum is taken at once: 256 bytes


def tournament(magnitudes: Tensor, k: int) -> Tensor:
    """Return (k,) positions of the k largest of (d,), 1 <= k <= d, in any order, as torch.topk finds them.

    Raises UserError for NaN, of which none is the largest.
    """
    d = magnitudes.numel()
    if d < SMALL or k > d // 32:
        return _topk(magnitudes, k)
    size = min(GROUP, 2 ** round(np.log2(d / k) / 2))  # the root: as many groups as then remain
    n_groups = d // size
    groups = magnitudes[: n_groups * size].view(n_groups, size)
    best = torch.topk(groups.amax(dim=1), k, sorted=False).indices  # amax passes NaN on
    inside = torch.arange(size, device=magnitudes.device)
    left_over = torch.arange(n_groups * size, d, device=magnitudes.device)
    positions = torch.cat([(best[:, None] * size + inside).flatten(), left_over])
    remaining = torch.cat([groups.index_select(0, best).flatten(), magnitudes[n_groups * size :]])
    return positions[_topk(remaining, k)]


def _topk(magnitudes: Tensor, k: int) -> Tensor:
    values, positions = torch.topk(magnitudes, k, sorted=False)
    if bool(values.isnan().any()):  # to torch.topk, NaN is larger than any number
        raise UserError("cannot select the largest of elements: NaN among them has no order")
    return positions


# -- measuring ---------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Tensor, int], object]] = {
    "topk_sorted": lambda magnitudes, k: torch.topk(magnitudes, k, sorted=True),
    "topk_unsorted": lambda magnitudes, k: torch.topk(magnitudes, k, sorted=False),
    "tournament": tournament,
}
"""Ways to find the k largest: the same result, but for order and ties."""
DENSITIES: Sequence[float] = (1e-4, 1e-3, 1e-2, 0.1)
ELEMENTS = (*(most * 10**power for power in range(3, 8) for most in (1, 3)), 10**8)
MOST_IN_A_ROW = 16
AT_ONCE = 2**22  # elements of the tensors that take turns


def measure_selection(
    device: str, elements: int, densities: Sequence[float], budget: Budget
) -> pd.DataFrame:
    """Return table ``selection``: seconds to select from ``elements`` normal numbers (fp32), by density.

    Operations are WAYS, of k = density x elements, at least 1. Each sample is the mean over a few tensors in
    turn, with the caches flushed before it; on CUDA by the GPU's clock, launches included, since training
    launches them too. budget : for all ways at one density. Raises as `all_or_partial`, out of memory.
    """

    def frames() -> Iterator[pd.DataFrame]:
        with computing(f"selecting from {elements} elements on {device}", device) as place:
            count = max(1, min(MOST_IN_A_ROW, AT_ONCE // elements))
            random = torch.Generator(place).manual_seed(0)
            normal = torch.randn(count, elements, generator=random, device=place)
            magnitudes = list(normal.abs_())
            labels = {"device": place.type, "dtype": "float32", "elements": elements}
            labels |= {"threads": torch.get_num_threads() if place.type == "cpu" else 0}
            for density in densities:
                samples = _seconds(magnitudes, selected(elements, density), budget)
                named = {**labels, "density": density, "distribution": "normal"}
                yield clock.rows_by("operation", samples, named)

    return all_or_partial("selection", frames())


def _seconds(magnitudes: Sequence[Tensor], k: int, budget: Budget) -> dict[str, clock.Floats]:
    """Return seconds of each way, taken in turn, each sample the mean over the tensors."""
    device = magnitudes[0].device

    def on_each(way: Callable[[Tensor, int], object]) -> None:
        for tensor in magnitudes:
            way(tensor, k)

    samples = clock.measure_interleaved(
        {name: clock.timed(partial(on_each, way), device) for name, way in WAYS.items()},
        budget,
        synchronize=clock.synchronizer(device),
        setup=clock.flusher(device),
    )
    return {name: seconds / len(magnitudes) for name, seconds in samples.items()}


def cases(device: str, brief: bool) -> Iterator[tuple[str, Callable[[], pd.DataFrame], float]]:
    """Yield (name, measurement, seconds that it takes) of each size, smallest first; ``brief``: few."""
    on_gpu = device.startswith("cuda")
    densities = (1e-3, 0.1) if brief else DENSITIES
    most_s = 0.1 if brief else 2.0 if on_gpu else 5.0
    # Kernels of a GPU take milliseconds, so it can afford a median that is known well.
    least, most = (2, 15) if brief else (20, 20) if on_gpu else (6, 15)
    budget = Budget(warmup=1, min_repeats=least, max_repeats=most, max_s=most_s)
    for size in (1_000, 8 * SMALL) if brief else ELEMENTS:
        # On a CPU the repeats end small sizes early, and the least number of rounds the large ones late.
        estimate_s = len(densities) * most_s / 2 if on_gpu else 2 + size * 1e-6
        yield f"d{size}", partial(measure_selection, device, size, densities, budget), estimate_s


# -- exchanging --------------------------------------------------------------------------------


@dataclass
class Group:
    """The tensors of one message, of one rank.

    residual : (n,) float32 of all of them: what was not sent yet; positions, values : (k,) sent last
    """

    parameters: dict[str, nn.Parameter]
    residual: Tensor
    k: int
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))

    def parts(self, whole: Tensor) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield each tensor with its share of an (n,) tensor, in its own shape."""
        parts = whole.split([parameter.numel() for parameter in self.parameters.values()])
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
    """Exchange a module's gradients, sparsified, under a plan (omgs Algorithm 2, with error feedback).

    ::

        exchange = PlayedExchange(network, plan, density=0.001, ranks=4)
        for rank in range(4):
            loss(rank).backward()
            exchange.take(rank)
        exchange.finish()                   # .grad is now the mean of what all ranks sent

    plan : over the module's tensors in ready order, `named_parameters` from the last to the first
    density : share of each group's elements that is sent; what is not, each group of each rank keeps

    A tensor without a gradient in a pass counts as zero.
    """

    def __init__(self, module: nn.Module, plan: FusionPlan, density: float, ranks: int) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad][::-1]
        groups = [dict(named[part]) for part in plan.slices]
        sizes = [sum(p.numel() for p in group.values()) for group in groups]
        self.ranks = [
            [
                Group(group, torch.zeros(size), selected(size, density))
                for group, size in zip(groups, sizes, strict=True)
            ]
            for _ in range(ranks)
        ]

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
            for _, parameter, part in groups[0].parts(mean / len(groups)):
                parameter.grad = part.clone()
