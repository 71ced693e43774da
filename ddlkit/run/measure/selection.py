"""What it costs to keep only the largest gradients: selecting exactly k of d.

Beside torch.topk stands a way of our own to find the same set, `tournament`: the maxima of groups play
first. The k largest elements lie in the k groups with the largest maxima, whatever the data are (the
delegates of Gaihre et al., Dr. Top-k, SC 2021), so torch.topk sees only few. Each element is read once, in a
way that every machine does fast, and nothing depends on the values: nobody waits for the GPU until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ddlkit.core.errors import UserError
from ddlkit.core.sparse import selected
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.measure.layers import computing
from ddlkit.run.sessions import all_or_partial

SMALL = 2**16  # with fewer elements, torch.topk is as fast
GROUP = 64  # elements whose maximum is taken at once: 256 bytes


def tournament(magnitudes: Tensor, k: int) -> Tensor:
    """Return (k,) positions of the k largest of (d,), in any order, as torch.topk finds them.

    Raises UserError for a k that is not within 1 and d, and for NaN, of which none is the largest.
    """
    d = magnitudes.numel()
    if not 1 <= k <= d:
        raise UserError(f"cannot select {k} of {d} elements: choose 1 to all")
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


WAYS: dict[str, Callable[[Tensor, int], object]] = {
    "topk_sorted": lambda magnitudes, k: torch.topk(magnitudes, k, sorted=True),
    "topk_unsorted": lambda magnitudes, k: torch.topk(magnitudes, k, sorted=False),
    "tournament": tournament,
}
"""Ways to find the k largest: the same result, but for order and ties."""


# -- measuring ---------------------------------------------------------------------------------

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
    launches them too. CPU: torch's threads.

    budget : for all ways at one density together

    Raises UserError for an unknown device, and when memory runs out: Partial if something was measured.
    """

    def frames() -> Iterator[pd.DataFrame]:
        with computing(f"selecting from {elements} elements on {device}", device) as place:
            count = max(1, min(MOST_IN_A_ROW, AT_ONCE // elements))
            random = torch.Generator(place).manual_seed(0)
            normal = torch.randn(count, elements, generator=random, device=place)
            magnitudes = list(normal.abs_())
            for density in densities:
                yield _measured(magnitudes, density, budget)

    return all_or_partial("selection", frames())


def _measured(magnitudes: Sequence[Tensor], density: float, budget: Budget) -> pd.DataFrame:
    """Rows of each way in turn, each sample the mean over the tensors."""
    elements, device = magnitudes[0].numel(), magnitudes[0].device
    k = selected(elements, density)

    def on_each(way: Callable[[Tensor, int], object]) -> None:
        for tensor in magnitudes:
            way(tensor, k)

    samples = clock.measure_interleaved(
        {name: clock.timed(partial(on_each, way), device) for name, way in WAYS.items()},
        budget,
        synchronize=clock.synchronizer(device),
        setup=clock.flusher(device),
    )
    labels = {
        "device": device.type,
        "dtype": "float32",
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "elements": elements,
        "density": density,
        "distribution": "normal",
    }
    means = {name: seconds / len(magnitudes) for name, seconds in samples.items()}
    return clock.rows_by("operation", means, labels)


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
