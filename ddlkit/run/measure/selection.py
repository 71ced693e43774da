"""What it costs to keep only the largest gradients: selecting exactly k of d, and the work around it.

Beside torch.topk stand two ways of our own to find the same set. Both look at each element once, in a
way that every machine does fast, and leave the exact choice to torch.topk on the few that remain:

* `tournament`: the maxima of groups play first. The k largest elements lie in the k groups with the
  largest maxima, whatever the data are (the delegates of Gaihre et al., Dr. Top-k, SC 2021). Nothing
  depends on the values, so nobody waits for the GPU until the end.
* `threshold`: a sample says between which two values the k-th largest should lie. What is above the
  upper one is in, what is not above the lower one is out. Where the sample misled, ties or torch.topk help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ddlkit.core.errors import UserError
from ddlkit.core.sparse import selected
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.measure.layers import computing
from ddlkit.run.sessions.session import all_or_partial

Selector = Callable[[Tensor, int], Tensor]
Actions = Mapping[str, Callable[[int], object]]

SMALL, MEDIUM = 2**16, 2**18  # with fewer elements, torch.topk or the tournament is as fast
GROUP = 64  # elements whose maximum is taken at once: 256 bytes
SAMPLE = 2**15
DEVIATIONS = 4.0  # how many standard deviations of luck the thresholds allow for


# -- selectors ---------------------------------------------------------------------------------


def topk(magnitudes: Tensor, k: int) -> Tensor:
    """(k,) positions of the k largest of (d,), in any order, by torch.topk.

    Raises UserError for a k that is not within 1 and d, and for NaN, of which none is the largest.
    """
    if not 1 <= k <= magnitudes.numel():
        raise UserError(f"cannot select {k} of {magnitudes.numel()} elements: choose 1 to all")
    values, positions = torch.topk(magnitudes, k, sorted=False)
    _refuse_nan(values)  # to torch.topk, NaN is larger than any number
    return positions


def tournament(magnitudes: Tensor, k: int) -> Tensor:
    """As `topk`: the same magnitudes, from positions that differ at most where magnitudes are equal."""
    d = magnitudes.numel()
    if d < SMALL or not 1 <= k <= d // 32:
        return topk(magnitudes, k)
    size = min(GROUP, 2 ** round(np.log2(d / k) / 2))  # the root: as many groups as then remain
    n_groups = d // size
    groups = magnitudes[: n_groups * size].view(n_groups, size)
    best = torch.topk(groups.amax(dim=1), k, sorted=False).indices  # amax passes NaN on
    inside = torch.arange(size, device=magnitudes.device)
    left_over = torch.arange(n_groups * size, d, device=magnitudes.device)
    positions = torch.cat([(best[:, None] * size + inside).flatten(), left_over])
    remaining = torch.cat([groups.index_select(0, best).flatten(), magnitudes[n_groups * size :]])
    return positions[topk(remaining, k)]


def threshold(magnitudes: Tensor, k: int) -> Tensor:
    """As `topk`: the same magnitudes, from positions that differ at most where magnitudes are equal."""
    d = magnitudes.numel()
    if d < MEDIUM or not 1 <= k <= d // 4:
        return tournament(magnitudes, k)
    low, high = _bracket(magnitudes, k)
    candidates = _above(magnitudes, low, dense=k * GROUP > d)
    values = magnitudes[candidates]
    _refuse_nan(values)
    if len(candidates) < k:
        ties = _equal(magnitudes, low, k - len(candidates))
        found = torch.cat([candidates, ties])
        return found if len(found) == k else topk(magnitudes, k)
    certain = values > high
    n_certain = int(certain.sum())
    if n_certain > k:
        return candidates[topk(values, k)]
    if n_certain == k:
        return candidates[certain]
    open_ = candidates[~certain]
    return torch.cat([candidates[certain], open_[topk(magnitudes[open_], k - n_certain)]])


def _refuse_nan(values: Tensor) -> None:
    if bool(values.isnan().any()):
        raise UserError("cannot select the largest of elements: NaN among them has no order")


def _bracket(magnitudes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Two values between which the k-th largest most likely lies, from a sample."""
    d = magnitudes.numel()
    # An odd stride does not fall in step with rows of a weight.
    sample = magnitudes[:: (d // min(SAMPLE, d // 16)) | 1]
    expected = k * len(sample) / d
    luck = DEVIATIONS * expected**0.5
    first, last = int(expected - luck), min(len(sample), int(expected + luck) + 4)
    largest = torch.topk(sample, last, sorted=True).values
    high = largest[first - 1] if first > 0 else largest.new_full((), float("inf"))
    return largest[-1], high


def _above(magnitudes: Tensor, low: Tensor, *, dense: bool) -> Tensor:
    """Ascending positions of what is above ``low``, NaN included."""
    if dense:
        return (magnitudes <= low).logical_not_().nonzero()[:, 0]
    whole = magnitudes.numel() // GROUP * GROUP
    groups = magnitudes[:whole].view(-1, GROUP)
    rows = (groups.amax(dim=1) <= low).logical_not_().nonzero()[:, 0]
    row, column = (groups.index_select(0, rows) <= low).logical_not_().nonzero().unbind(1)
    rest = _above(magnitudes[whole:], low, dense=True) + whole
    return torch.cat([rows[row] * GROUP + column, rest])


def _equal(magnitudes: Tensor, value: Tensor, count: int) -> Tensor:
    """The first ``count`` positions of that value, or all if there are fewer."""
    found: list[Tensor] = []
    # What is common is found early, what is rare by longer and longer steps.
    start, size = 0, 2 * count
    while count and start < magnitudes.numel():
        here = (magnitudes[start : start + size] == value).nonzero()[:count, 0] + start
        found.append(here)
        count, start, size = count - len(here), start + size, 2 * size
    return torch.cat(found)


SELECTORS: dict[str, Selector] = {"tournament": tournament, "threshold": threshold}
_WAYS: dict[str, Callable[[Tensor, int], object]] = {
    "topk_sorted": lambda magnitudes, k: torch.topk(magnitudes, k, sorted=True),
    "topk_unsorted": lambda magnitudes, k: torch.topk(magnitudes, k, sorted=False),
    **SELECTORS,
}


# -- measuring ---------------------------------------------------------------------------------

DENSITIES: Sequence[float] = (1e-4, 1e-3, 1e-2, 0.1)
USUAL_DENSITY = 1e-3  # omgs IV; at this one, other distributions are measured too
ELEMENTS = (*(most * 10**power for power in range(3, 8) for most in (1, 3)), 10**8)
WORKERS = (4, 16)
MOST_IN_A_ROW = 16
AT_ONCE = 2**22  # elements of the tensors that take turns

DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "heavy": lambda x: x * (2 * x.roll(1)).exp(),  # scales that differ as those of layers do
    "ties": lambda x: (4 * x).round() / 4,
    "sparse": lambda x: x * (x.roll(1) > 3.1),  # 0.1% are not zero
}


class _Tensors:
    """Fresh random tensors of d elements: a few of each, that take turns."""

    def __init__(self, d: int, distribution: str, device: torch.device, seed: int) -> None:
        self.distribution = distribution
        self.count = max(1, min(MOST_IN_A_ROW, AT_ONCE // d))
        self.random: dict[str, Any] = {
            "generator": torch.Generator(device).manual_seed(seed),
            "device": device,
        }
        normal = (torch.randn(self.count, d, **self.random) for _ in range(2))
        self.gradients, self.residuals = (list(DISTRIBUTIONS[distribution](x)) for x in normal)
        self.magnitudes = [gradient.abs() for gradient in self.gradients]

    def dense(self) -> Actions:
        """What is done to all elements."""
        return {
            "accumulate": lambda i: self.residuals[i].add_(self.gradients[i]),
            "abs": lambda i: torch.abs(self.gradients[i], out=self.magnitudes[i]),
        }

    def select(self, k: int) -> Actions:
        """The ways to find the k largest: the same result, but for order and ties."""

        def find(way: Callable[[Tensor, int], object], i: int) -> object:
            return way(self.magnitudes[i], k)

        return {name: partial(find, way) for name, way in _WAYS.items()}

    def exchange(self, k: int) -> Actions:
        """What is done to the k selected ones, and to those that come from other workers."""
        chosen = [topk(magnitudes, k) for magnitudes in self.magnitudes]
        return {
            "gather": lambda i: self.gradients[i].index_select(0, chosen[i]),
            "zero": lambda i: self.residuals[i].index_fill_(0, chosen[i], 0.0),
            **{f"scatter_add_{workers}": self._scatter(workers * k) for workers in WORKERS},
        }

    def _scatter(self, count: int) -> Callable[[int], object]:
        where = torch.randint(self.gradients[0].numel(), (count,), **self.random)
        values = torch.randn(count, **self.random)
        return lambda i: self.residuals[i].scatter_add_(0, where, values)

    def measure(
        self, actions: Actions, density: float, flush: clock.Action, budget: Budget
    ) -> pd.DataFrame:
        """Rows of each action in turn, each sample the mean over the tensors; ``flush`` comes before."""

        def on_each(action: Callable[[int], object]) -> None:
            for i in range(self.count):
                action(i)

        device = self.gradients[0].device
        samples = clock.measure_interleaved(
            {name: clock.timed(partial(on_each, actions[name]), device) for name in actions},
            budget,
            synchronize=clock.synchronizer(device),
            setup=flush,
        )
        labels = {
            "device": device.type,
            "dtype": "float32",
            "threads": torch.get_num_threads() if device.type == "cpu" else 0,
            "elements": self.gradients[0].numel(),
            "density": density,
            "distribution": self.distribution,
        }
        means = {name: seconds / self.count for name, seconds in samples.items()}
        return clock.rows_by("operation", means, labels)


def measure_selection(
    device: str,
    elements: int,
    densities: Sequence[float],
    budget: Budget,
    distributions: Sequence[str] = tuple(DISTRIBUTIONS),
) -> pd.DataFrame:
    """Table ``selection``: seconds of one operation on ``elements`` fp32 numbers, by density.

    accumulate (residual += gradient) and abs touch every element: density 1. Then, for each density,
    k = density x elements, at least 1: topk_sorted, topk_unsorted and our selectors on magnitudes,
    gather of the k values, zero of the k residuals, scatter_add_P of the k values of each of P workers
    at random places. Distributions but the first are measured for selectors at one density only.

    Each sample is the mean over a few tensors in turn, with the caches flushed before it; on CUDA by
    the GPU's clock, launches included, since training launches them too. CPU: torch's threads.

    budget : for all operations of one density and distribution together

    Raises UserError for an unknown device, and when memory runs out: Partial if something was measured.
    """

    def frames() -> Iterator[pd.DataFrame]:
        with computing(f"selecting from {elements} elements on {device}", device) as place:
            flush = clock.flusher(place)
            for number, distribution in enumerate(distributions):
                tensors = _Tensors(elements, distribution, place, number)
                if number:
                    select = tensors.select(selected(elements, USUAL_DENSITY))
                    yield tensors.measure(select, USUAL_DENSITY, flush, budget)
                    continue
                yield tensors.measure(tensors.dense(), 1.0, flush, budget)
                for density in densities:
                    k = selected(elements, density)
                    actions = {**tensors.select(k), **tensors.exchange(k)}
                    yield tensors.measure(actions, density, flush, budget)

    return all_or_partial("selection", frames())


def cases(device: str, brief: bool) -> Iterator[tuple[str, Callable[[], pd.DataFrame], float]]:
    """(name, measurement, seconds that it takes) of each size, smallest first; ``brief``: in seconds."""
    on_gpu = device.startswith("cuda")
    densities = (1e-3, 0.1) if brief else DENSITIES
    most_s = 0.1 if brief else 2.0 if on_gpu else 5.0
    # Kernels of a GPU take milliseconds, so it can afford a median that is known well.
    least, most = (2, 15) if brief else (20, 20) if on_gpu else (6, 15)
    budget = Budget(warmup=1, min_repeats=least, max_repeats=most, max_s=most_s)
    groups = len(densities) + len(DISTRIBUTIONS)
    for size in (1_000, 2 * MEDIUM) if brief else ELEMENTS:
        # On a CPU the repeats end small sizes early, and the least number of rounds the large ones late.
        estimate_s = groups * most_s / 2 if on_gpu else 2 + size * 2.3e-6
        yield f"d{size}", partial(measure_selection, device, size, densities, budget), estimate_s
