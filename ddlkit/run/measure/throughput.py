"""How fast a device multiplies matrices, and whether it drifts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor, nn

from ddlkit.core.units import MIB
from ddlkit.run.instruments.clock import Budget, Floats, measure_on, rows_by, sample_rows
from ddlkit.run.measure.layers import computing, device_named

CACHE_BYTES = 256 * MIB  # more than the caches of a device hold: operands in turn come from memory
MOST_SETS = 16
DRIFT_BUDGET = Budget(warmup=3, min_repeats=10, max_repeats=20, max_s=2.0)
KERNELS = {"cpu": ("product", "convolution"), "cuda": ("product",)}


def _product(left: Tensor, right: Tensor, result: Tensor) -> Tensor:
    return torch.mm(left, right, out=result)


def _convolution(left: Tensor, right: Tensor, _: Tensor) -> Tensor:
    """The same product as a 1 x 1 convolution: rows of ``right`` are channels, its columns pixels."""
    side = len(left)
    height = 2 ** (side.bit_length() // 2)
    height = height if side % height == 0 else 1
    pixels = right.view(1, side, height, side // height)
    return nn.functional.conv2d(pixels, left.view(side, side, 1, 1)).view(side, side)


_MULTIPLY = {"product": _product, "convolution": _convolution}


def measure_peaks(
    device: str, precisions: Sequence[str], sides: Sequence[int], budget: Budget
) -> pd.DataFrame:
    """Table ``peaks``: products of square matrices of random numbers, 2 side^3 FLOP each.

    Once as such, and on a CPU also as the convolution that is the same sum: the two go to different
    libraries, and on some processors the one for convolutions is twice as fast. Each sample is the mean
    of products of several sets of matrices in a row, so that the operands have left the caches; on CUDA
    by the device's own clock.

    Raises UserError for an unknown device or precision, and when memory runs out.
    """
    place = device_named(device)
    frames = []
    for precision, side, kernel in itertools.product(precisions, sides, KERNELS[place.type]):
        seconds = product_s(place, precision, side, budget, kernel)
        labels = {"device": place.type, "precision": precision, "kernel": kernel, "side": side}
        frames.append(sample_rows(labels, seconds))
    return pd.concat(frames, ignore_index=True)


def product_s(
    device: torch.device, precision: str, side: int, budget: Budget, kernel: str = "product"
) -> Floats:
    """(repeats,) seconds of one product of two side x side matrices, computed by ``kernel``."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    set_bytes = 3 * side * side * kind.itemsize
    count = min(MOST_SETS, max(2, -(-CACHE_BYTES // set_bytes)))
    multiply_by = _MULTIPLY[kernel]
    what = f"{count} x 3 matrices of {side} x {side} on {device}"
    with computing(what, device, precision):
        sets = [
            [torch.randn(side, side, device=device, dtype=kind) for _ in range(3)]
            for _ in range(count)
        ]

        def multiply() -> None:
            for left, right, result in sets:
                multiply_by(left, right, result)

        return measure_on(device, multiply, budget) / count


def measure_drift(moment: str, device: str, side: int, copy_bytes: int) -> pd.DataFrame:
    """Table ``drift``: one product in fp32 and one copy in memory, the same at every ``moment``.

    Taken at the start and at the end of a session: where the two differ, so may what lies between.
    """
    place = device_named(device)
    source = torch.randn(copy_bytes // 4, device=place)
    target = torch.empty_like(source)
    work = {
        f"fp32 product {side}": product_s(place, "fp32", side, DRIFT_BUDGET),
        f"copy {copy_bytes} bytes": measure_on(place, lambda: target.copy_(source), DRIFT_BUDGET),
    }
    return rows_by("work", work, {"moment": moment, "device": place.type})
