"""Keep only the largest gradients: selecting exactly k of d, what it costs, and training's exchange of them.

Beside torch.topk stands `tournament`, which finds the same set: the k largest elements lie in the k groups
with the largest maxima (the delegates of Gaihre et al., Dr. Top-k, SC 2021), so torch.topk sees only few.
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
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget
from ddlkit.measure.layers import compute_on
from ddlkit.measure.session import all_or_partial

SMALL = 2**16  # with fewer elements, torch.topk is as fast
GROUP = 64  # elements whose maximum is taken at once: 256 bytes


def tournament(magnitudes: Tensor, k: int) -> Tensor:
    """Return (k,) positions of the k largest of (d,), 1 <= k <= d, in any order; raise UserError for NaN."""
    d = magnitudes.numel()
    if d < SMALL or k > d // 32:
        return _topk(magnitudes, k)
    size = min(
        GROUP, 2 ** round(np.log2(d / k) / 2)
    )  # the root: as many groups as then remain
    n_groups = d // size
    groups = magnitudes[: n_groups * size].view(n_groups, size)
    best = torch.topk(groups.amax(dim=1), k, sorted=False).indices  # amax passes NaN on
    inside = torch.arange(size, device=magnitudes.device)
    left_over = torch.arange(n_groups * size, d, device=magnitudes.device)
    positions = torch.cat([(best[:, None] * size + inside).flatten(), left_over])
    remaining = torch.cat(
        [groups.index_select(0, best).flatten(), magnitudes[n_groups * size :]]
    )
    return positions[_topk(remaining, k)]


def _topk(magnitudes: Tensor, k: int) -> Tensor:
    values, positions = torch.topk(magnitudes, k, sorted=False)
    if bool(values.isnan().any()):  # to torch.topk, NaN is larger than any number
        raise UserError(
            "cannot select the largest of elements: NaN among them has no order"
        )
    return positions


# -- measuring ---------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Tensor, int], object]] = {
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
    """Return table ``selection``: mean seconds to select from normal numbers (fp32), caches flushed."""

    def frames() -> Iterator[pd.DataFrame]:
        with compute_on(
            f"selecting from {elements} elements on {device}", device
        ) as place:
            count = max(1, min(MOST_IN_A_ROW, AT_ONCE // elements))
            random = torch.Generator(place).manual_seed(0)
            magnitudes = torch.randn(
                count, elements, generator=random, device=place
            ).abs_()
            labels = {"device": place.type, "dtype": "float32", "elements": elements}
            labels |= {"threads": torch.get_num_threads() if place.type == "cpu" else 0}

            def on_each(way: Callable[[Tensor, int], object], k: int) -> None:
                for tensor in magnitudes:
                    way(tensor, k)

            flush = torch.ones(clock.FLUSH_BYTES[place.type] // 4, device=place).sum
            synchronize = clock.synchronizer(place)
            for density in densities:
                k = selected(elements, density)
                actions = {
                    name: clock.timed(partial(on_each, way, k), place)
                    for name, way in WAYS.items()
                }
                samples = clock.measure_interleaved(
                    actions, budget, synchronize=synchronize, setup=flush
                )
                each = {name: seconds / count for name, seconds in samples.items()}
                named = {**labels, "density": density, "distribution": "normal"}
                yield clock.rows_by("operation", each, named)

    return all_or_partial("selection", frames())


def cases(
    device: str, brief: bool
) -> Iterator[tuple[str, Callable[[], pd.DataFrame], float]]:
    """Yield (name, measurement, seconds that it takes) of each size, smallest first; ``brief``: few."""
    # Kernels of a GPU take milliseconds, so it can afford a median that is known well.
    budget = Budget(1, 20, 20, 2.0) if device == "cuda" else Budget(1, 6, 15, 5.0)
    sizes, densities = ELEMENTS, DENSITIES
    if brief:
        budget, sizes, densities = (
            Budget(1, 2, 15, 0.1),
            (1_000, 8 * SMALL),
            (1e-3, 0.1),
        )
    for size in sizes:
        on_gpu_s, on_cpu_s = len(densities) * budget.max_s / 2, 2 + size * 1e-6
        estimate_s = on_gpu_s if device == "cuda" else on_cpu_s
        yield (
            f"d{size}",
            partial(measure_selection, device, size, densities, budget),
            estimate_s,
        )


# -- exchanging --------------------------------------------------------------------------------


@dataclass
class Group:
    """The tensors of a rank's message; residual : (n,) not sent yet; positions, values : (k,) sent last."""

    parameters: dict[str, nn.Parameter]
    residual: Tensor
    k: int
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))

    def parts(self, whole: Tensor) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield each tensor with its share of an (n,) tensor, in its own shape."""
        parts = whole.split(
            [parameter.numel() for parameter in self.parameters.values()]
        )
        for (name, parameter), part in zip(self.parameters.items(), parts, strict=True):
            yield name, parameter, part.view(parameter.shape)

    @torch.no_grad()
    def choose(self) -> None:
        """Add gradients to the residual, and take out what to send. Raises UserError for infinite ones."""
        for name, parameter, part in self.parts(self.residual):
            if parameter.grad is not None:
                part.add_(parameter.grad)
            if not bool(part.isfinite().all()):
                raise UserError(
                    f"sparsified training: the gradient of {name} is not finite"
                )
        self.positions = tournament(self.residual.abs(), self.k)
        self.values = self.residual[self.positions]
        self.residual[self.positions] = 0.0


class PlayedExchange:
    """Exchange a module's gradients, sparsified, under a plan (omgs Algorithm 2, with error feedback).

    One process plays all ranks: each goes backward and is taken; then `finish` leaves the mean in ``.grad``.
    plan : over the module's tensors in ready order; density : share of each group's elements that is sent
    """

    def __init__(
        self, module: nn.Module, plan: FusionPlan, density: float, ranks: int
    ) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad][
            ::-1
        ]
        groups = [dict(named[part]) for part in plan.slices]
        sizes = [sum(p.numel() for p in group.values()) for group in groups]

        def group(parameters: dict[str, nn.Parameter], size: int) -> Group:
            return Group(parameters, torch.zeros(size), selected(size, density))

        self.ranks = [[*map(group, groups, sizes)] for _ in range(ranks)]

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
