"""omgs Tab V: how many messages MGS-SGD sends, from the sizes of a network's tensors."""

from __future__ import annotations

from collections.abc import Iterable


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


def send_from(parameters: Iterable[int], threshold: int) -> tuple[int, ...]:
    """The other reading of omgs V-D: a tensor below ``threshold`` joins what comes after it.

    A message closes with a tensor that by itself has at least ``threshold`` elements.
    """
    merged, pending = [], 0
    for size in parameters:
        pending += size
        if size >= threshold:
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


def ptb_lstm_parameters(units: int = 1500, vocabulary: int = 10_000) -> tuple[int, ...]:
    """Elements of the 11 tensors of a two-layer LSTM on the Penn Treebank, in forward order.

    Embedding; per layer two matrices and two biases of the four gates; a linear layer to the words.
    1500 units and untied words are the large network of Zaremba et al. (2014).
    """
    layer = (4 * units * units, 4 * units * units, 4 * units, 4 * units)
    return (vocabulary * units, *layer, *layer, units * vocabulary, vocabulary)
