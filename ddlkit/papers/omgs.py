"""omgs: equations of Shi et al., Merged Gradient Sparsification on GPUs (INFOCOM 2020)."""

from __future__ import annotations

import math
from collections.abc import Iterable


def selection_s(gamma: float, density: float, elements: int) -> float:
    """omgs Eq 10: time to select the largest k = density x elements of a tensor.

    Symbols: rho = density, d = elements. The paper prints no base; its published code uses log2.
    """
    return gamma * density * elements * math.log2(elements)


def largest_gamma(seconds: float, density: float, elements: int) -> float:
    """omgs Eq 10 solved for gamma: the largest constant with which a selection ends in time."""
    return seconds / selection_s(1.0, density, elements)


def merge_up_to(parameters: Iterable[int], threshold: int) -> tuple[int, ...]:
    """omgs V-D, MGS-SGD: sizes of the merged layers, from the parameters in ready order.

    Tensors accumulate until a merged layer has at least ``threshold`` elements; what is left at
    the end travels by itself.
    """
    merged, pending = [], 0
    for size in parameters:
        pending += size
        if pending >= threshold:
            merged.append(pending)
            pending = 0
    return (*merged, pending) if pending else tuple(merged)


def cifar_vgg16_parameters() -> tuple[int, ...]:
    """Elements of the 54 tensors of the VGG-16 with batch norm for Cifar-10, in forward order.

    omgs Tab V counts 54 tensors: 13 convolutions of weight, bias and batch norm's two, and one
    linear layer to 10 classes.
    """
    sizes, inputs = [], 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            sizes += [9 * inputs * width, width, width, width]
            inputs = width
    return (*sizes, inputs * 10, 10)
