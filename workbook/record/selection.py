"""Selecting exactly the k largest of d gradients, what this costs, and the exchange of sparsified gradients.

`tournament` finds the same elements as torch.topk. The k largest elements lie in the k groups with the
largest maxima (the delegates of Gaihre et al., Dr. Top-k, SC 2021), so that torch.topk sees only few.
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
from workbook.record.needs import SELECTIONS

SMALL = 2**16  # with fewer elements, torch.topk is as fast
GROUP = 64  # the most elements of a group, 256 bytes: a choice, not measured


def tournament(magnitudes: Tensor, k: int, *, refuse_nan: bool = True) -> Tensor:
    """Return the positions of the k largest elements, in any order.

    The elements are compared in groups of equal size. Each of the k largest elements lies in one of
    the k groups with the largest maxima, so that only these groups are searched.

    Parameters
    ----------
    magnitudes : Tensor, shape (d,)
        The elements.
    k : int
        How many to select, from 1 to d.
    refuse_nan : bool, optional
        Whether NaN is looked for and refused. For this the host waits for the device.

    Returns
    -------
    Tensor, shape (k,)
        The positions.

    Raises
    ------
    UserError
        If an element is NaN and NaN is looked for.
    """
    d = magnitudes.numel()
    # With few elements, torch.topk alone is as fast. If many elements are selected, groups are
    # small, and the k best of them hold a large part of all elements, so that little is saved.
    if d < SMALL or k > d // 32:
        return _topk(magnitudes, k, refuse_nan)
    # torch.topk sees the maxima of d / size groups, and later the k x size elements of the k best
    # groups. Together these are fewest for a size of sqrt(d / k), which is 2 to the power of half
    # of log2(d / k). The exponent is rounded. `GROUP` is a limit by choice.
    group_size = min(GROUP, 2 ** round(np.log2(d / k) / 2))
    n_groups = d // group_size
    # The elements that do not fill a last group are left over. All of them stay in the search.
    grouped = magnitudes[: n_groups * group_size].view(n_groups, group_size)
    left_over = magnitudes[n_groups * group_size :]
    # The best groups include those with NaN. Their maximum is NaN, which counts as largest.
    best_groups = torch.topk(grouped.amax(dim=1), k, sorted=False).indices
    remaining = torch.cat([grouped.index_select(0, best_groups).flatten(), left_over])
    # The positions of the remaining elements among all elements, in the same order.
    in_left_over = torch.arange(n_groups * group_size, d, device=magnitudes.device)
    positions = torch.cat([_members(best_groups, group_size), in_left_over])
    # `_topk` returns positions among the remaining elements.
    return positions[_topk(remaining, k, refuse_nan)]


def _members(groups: Tensor, group_size: int) -> Tensor:
    """Return the positions of all elements of some groups, group by group.

    All groups have the same size, and group 0 has the elements from position 0 on. ``groups``,
    shape (k,), has the numbers of k groups. The result has shape (k * group_size,).
    """
    inside = torch.arange(group_size, device=groups.device)
    return (groups[:, None] * group_size + inside).flatten()


def _topk(magnitudes: Tensor, k: int, refuse_nan: bool) -> Tensor:
    """Return the positions of the k largest elements by torch.topk, in any order.

    Raises UserError if an element is NaN and ``refuse_nan`` is true.
    """
    values, positions = torch.topk(magnitudes, k, sorted=False)
    # To torch.topk, NaN is larger than any number. If there is a NaN, it is therefore among the
    # values.
    if refuse_nan and bool(values.isnan().any()):
        raise UserError(
            "cannot select the largest of elements: NaN among them has no order"
        )
    return positions


# -- measuring -------------------------------------------------------------------------

WAYS: dict[str, Callable[[Tensor, int], object]] = {
    "topk_unsorted": lambda magnitudes, k: torch.topk(magnitudes, k, sorted=False),
    "tournament": partial(tournament, refuse_nan=False),
}
"""Ways to find the k largest: the same result, but for order and ties.

Neither looks for NaN. The host would wait for the device, and of all that it issues later the launches would
count. Training looks for NaN among gradients before.
"""
DENSITIES: Sequence[float] = (1e-4, 1e-3, 1e-2, 0.1)
ELEMENTS = (*(most * 10**power for power in range(3, 8) for most in (1, 3)), 10**8)
MOST_IN_A_ROW = 16
AT_ONCE = 2**22  # elements of the tensors that take turns


def measure_selection(
    device: str, elements: int, densities: Sequence[float], budget: Budget
) -> pd.DataFrame:
    """Return table ``selection``: the seconds of selecting the largest elements of a tensor.

    The elements are drawn from a normal distribution, in fp32. Caches are flushed before each
    sample. If tensors are small, a sample is the mean over several tensors.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".
    elements : int
        The elements of a tensor.
    densities : sequence of float
        The shares of the elements that are selected.
    budget : Budget
        How long to measure at each density.
    """
    frames = _selection_frames(device, elements, densities, budget)
    return all_or_partial("selection", frames)


def _selection_frames(
    device: str, elements: int, densities: Sequence[float], budget: Budget
) -> Iterator[pd.DataFrame]:
    """Yield the rows of `measure_selection`, a frame for each density.

    A frame has a row for each of `WAYS` to find the largest elements and for each sample.
    """
    with compute_on(
        f"selecting from {elements} elements on {device}", device
    ) as torch_device:
        magnitudes = _drawn_magnitudes(elements, torch_device)
        # A sample selects from all tensors in turn.
        n_tensors = len(magnitudes)
        # Before each sample, more numbers of 4 bytes are added up than the caches hold, which
        # drives everything else out of them.
        cache_filler = torch.ones(
            clock.FLUSH_BYTES[torch_device.type] // 4, device=torch_device
        )
        flush = cache_filler.sum
        for density in densities:
            k = selected(elements, density)
            # By the name of the way, an action that the device's own clock times.
            actions = {
                name: clock.timed(
                    partial(_select_from_each, way, magnitudes, k), torch_device
                )
                for name, way in WAYS.items()
            }
            samples = clock.measure_interleaved(
                actions,
                budget,
                synchronize=clock.synchronizer(torch_device),
                setup=flush,
            )
            seconds = {name: sample_s / n_tensors for name, sample_s in samples.items()}
            labels = {
                "device": torch_device.type,
                "dtype": "float32",
                "elements": elements,
                # On a GPU the threads of the processor do not count.
                "threads": torch.get_num_threads() if torch_device.type == "cpu" else 0,
                "density": density,
                "distribution": "normal",
            }
            yield clock.rows_by("operation", seconds, labels)


def _drawn_magnitudes(elements: int, device: torch.device) -> Tensor:
    """Return absolute values of normal numbers, shape (tensors, elements).

    They are absolute because elements are selected by their absolute values.
    """
    # A sample must be long enough to be timed. If tensors are small, it selects from several in
    # turn: at most `MOST_IN_A_ROW` tensors, with at most `AT_ONCE` elements together.
    n_tensors = max(1, min(MOST_IN_A_ROW, AT_ONCE // elements))
    random = torch.Generator(device).manual_seed(0)
    return torch.randn(n_tensors, elements, generator=random, device=device).abs_()


def _select_from_each(
    way: Callable[[Tensor, int], object], tensors: Tensor, k: int
) -> None:
    """Select the k largest elements from each row of ``tensors``, one row after the other."""
    for tensor in tensors:
        way(tensor, k)


def cases(
    device: str, brief: bool
) -> Iterator[tuple[str, Callable[[], pd.DataFrame], float]]:
    """Yield what is to be measured, for each size of tensors from the smallest to the largest.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".
    brief : bool
        Whether few sizes and densities are measured, for a short time.

    Yields
    ------
    name : str
        The name of the table, such as "d1000" for 1000 elements.
    measure : callable
        Returns table ``selection``.
    estimate_s : float
        The expected seconds of the measurement.
    """
    if brief:
        # One size below `SMALL`, for which `tournament` is torch.topk itself, and one above it.
        sizes: Sequence[int] = (1_000, 8 * SMALL)
        densities: Sequence[float] = (1e-3, 0.1)
        budget = Budget(warmup=1, min_repeats=2, max_repeats=15, max_s=0.1)
    else:
        sizes = ELEMENTS
        densities = DENSITIES
        # On a GPU a selection takes milliseconds, so that many repeats cost little. The budget
        # holds for each density.
        on_gpu = Budget(warmup=1, min_repeats=10, max_repeats=40, max_s=1.0)
        on_cpu = Budget(warmup=1, min_repeats=6, max_repeats=15, max_s=5.0)
        budget = on_gpu if device == "cuda" else on_cpu
    for size in sizes:
        estimate_s = SELECTIONS.seconds(budget, device, size, len(densities))
        measure = partial(measure_selection, device, size, densities, budget)
        yield f"d{size}", measure, estimate_s


# -- exchanging ------------------------------------------------------------------------


@dataclass
class Group:
    """The tensors that a rank sends in one message.

    Attributes
    ----------
    parameters : dict
        The tensors by name, in ready order.
    residual : Tensor, shape (n,)
        The gradients that have not been sent yet.
    k : int
        How many elements are sent.
    positions, values : Tensor, shape (k,)
        What was sent last.
    """

    parameters: dict[str, nn.Parameter]
    residual: Tensor
    k: int
    positions: Tensor = field(default_factory=lambda: torch.empty(0))
    values: Tensor = field(default_factory=lambda: torch.empty(0))

    def parts(self, whole: Tensor) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield the name and the parameter of each tensor, with its part of ``whole``, shape (n,).

        The part is a view of ``whole`` in the shape of the parameter. The n elements are those of
        all tensors of the group, one tensor after the other.
        """
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        parts = iter(whole.split(sizes))
        for name, parameter in self.parameters.items():
            yield name, parameter, next(parts).view(parameter.shape)

    @torch.no_grad()
    def choose(self) -> None:
        """Add the gradients to the residual, and move its k largest elements into ``values``.

        The residual keeps what is not sent, and has 0 in place of what is sent. Raises UserError if
        a gradient is not finite.
        """
        for name, parameter, part in self.parts(self.residual):
            # The part is a view, so that this changes the residual. An unused tensor has no gradient.
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

    One process plays all ranks. After the backward pass of each rank, `take` selects from its gradients.
    After all ranks, `finish` leaves the mean of what was sent in ``.grad``.

    Parameters
    ----------
    module : Module
        The network.
    plan : FusionPlan
        The plan, over the tensors of the module in ready order.
    density : float
        The share of each group's elements that is sent.
    ranks : int
        The number of ranks.
    """

    def __init__(
        self, module: nn.Module, plan: FusionPlan, density: float, ranks: int
    ) -> None:
        # In the order in which gradients become ready, which is the reverse order of registration.
        trained = [
            (name, parameter)
            for name, parameter in reversed([*module.named_parameters()])
            if parameter.requires_grad
        ]
        # By rank, its groups of tensors. Each rank has residuals of its own.
        self.ranks: list[list[Group]] = []
        for _ in range(ranks):
            groups = [_group(dict(trained[part]), density) for part in plan.slices]
            self.ranks.append(groups)

    def take(self, rank: int) -> None:
        """Select from the gradients as that rank, and clear the gradients. Raises as `Group.choose` does."""
        for group in self.ranks[rank]:
            group.choose()
            for parameter in group.parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Make each gradient the mean of what all ranks have sent, added up in the order of ranks."""
        # One group of tensors at a time, as each rank has it.
        for same_group in zip(*self.ranks, strict=True):
            # All ranks share the parameters, so that those of the first rank are enough.
            first = same_group[0]
            total = torch.zeros_like(first.residual)
            for group in same_group:
                # Elements that a rank has not sent count as 0.
                total.index_add_(0, group.positions, group.values)
            for _, parameter, part in first.parts(total / len(same_group)):
                # The part is a view of the whole group. The clone gives the gradient memory of its own.
                parameter.grad = part.clone()


def _group(parameters: dict[str, nn.Parameter], density: float) -> Group:
    """Return the group of these tensors, with nothing left unsent."""
    elements = sum(parameter.numel() for parameter in parameters.values())
    return Group(parameters, torch.zeros(elements), selected(elements, density))
