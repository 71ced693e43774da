"""The papers' networks as published, counted by hand: parameters and multiply-adds.

1000 classes; images of 224 x 224 (AlexNet 227 x 227, Inception-v4 299 x 299, Cifar-10's VGG-16 32 x 32). VGG
and ResNet as torchvision has them, AlexNet and GoogLeNet as Caffe; of the LSTM a word counts as an image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError
from workbook.common.specs import network_named

VGG_CONVOLUTIONS = {"VGG16": (2, 2, 3, 3, 3), "VGG19": (2, 2, 4, 4, 4)}
RESNET_BLOCKS = {
    "ResNet50": (3, 4, 6, 3),
    "ResNet101": (3, 4, 23, 3),
    "ResNet152": (3, 8, 36, 3),
}


@dataclass(frozen=True)
class Layer:
    """A convolution or dense layer: elements of each of its tensors, multiply-adds of one image."""

    tensors: tuple[int, ...]
    multiply_adds: int


def layers(network: str) -> tuple[Layer, ...]:
    """Return the layers of a network, in forward order; any spelling. Raises UserError for another one.

    >>> sum(size for layer in layers("ResNet-50") for size in layer.tensors)
    25557032
    """
    name = network if network in _NETWORKS else network_named(network)
    if name not in _NETWORKS:
        raise UserError(
            f"no layers of {network!r} are counted: use one of {', '.join(_NETWORKS)}"
        )
    return tuple(_NETWORKS[name]())


def parameters(network: str) -> tuple[int, ...]:
    """Return elements of every parameter tensor in forward order. Raises UserError as ``layers``."""
    return tuple(size for layer in layers(network) for size in layer.tensors)


def multiply_adds(network: str) -> int:
    """Return multiply-adds of a forward pass on one image. Raises UserError as ``layers``."""
    return sum(layer.multiply_adds for layer in layers(network))


def conv(
    inputs: int, outputs: int, kernel: int, side: int, *, groups: int = 1
) -> Layer:
    """Return a convolution with bias whose output has ``side`` x ``side`` places."""
    weights = kernel * kernel * inputs // groups * outputs
    return Layer((weights, outputs), weights * side * side)


def dense(inputs: int, outputs: int) -> Layer:
    """Return a fully connected layer with bias."""
    return conv(inputs, outputs, kernel=1, side=1)


def _normed(layer: Layer) -> Layer:
    """Return it with batch norm's scale and shift in place of the bias."""
    weights, outputs = layer.tensors
    return Layer((weights, outputs, outputs), layer.multiply_adds)


def _convolutions(counts: Sequence[int], side: int) -> Iterator[Layer]:
    """Return VGG's: so many of each width, each width on half the side of the one before."""
    inputs = 3
    for outputs, count in zip((64, 128, 256, 512, 512), counts, strict=True):
        for _ in range(count):
            yield conv(inputs, outputs, 3, side)
            inputs = outputs
        side //= 2


def _vgg(convolutions: Sequence[int]) -> Iterator[Layer]:
    yield from _convolutions(convolutions, 224)
    yield from (dense(512 * 7 * 7, 4096), dense(4096, 4096), dense(4096, 1000))


def _resnet(blocks: Sequence[int], first: bool = False) -> Iterator[Layer]:
    """Return a ResNet; ``first``: with the stride in a block's first convolution, as published."""
    yield _normed(conv(3, 64, 7, 112))
    inputs, side = 64, 56
    for width, count in zip((64, 128, 256, 512), blocks, strict=True):
        for block in range(count):
            out = side // 2 if block == 0 and width > 64 else side
            yield _normed(conv(inputs, width, 1, out if first else side))
            yield _normed(conv(width, width, 3, out))
            yield _normed(conv(width, 4 * width, 1, out))
            if block == 0:
                yield _normed(conv(inputs, 4 * width, 1, out))
            inputs, side = 4 * width, out
    yield dense(inputs, 1000)


def _alexnet() -> Iterator[Layer]:
    yield conv(3, 96, 11, 55)
    yield conv(96, 256, 5, 27, groups=2)
    yield conv(256, 384, 3, 13)
    yield conv(384, 384, 3, 13, groups=2)
    yield conv(384, 256, 3, 13, groups=2)
    yield from (dense(256 * 6 * 6, 4096), dense(4096, 4096), dense(4096, 1000))


# Inception modules: side, 1x1, then 3x3 and 5x5 each after a 1x1, then the 1x1 after the pool.
_INCEPTION = (
    (28, 64, 96, 128, 16, 32, 32),
    (28, 128, 128, 192, 32, 96, 64),
    (14, 192, 96, 208, 16, 48, 64),
    (14, 160, 112, 224, 24, 64, 64),
    (14, 128, 128, 256, 24, 64, 64),
    (14, 112, 144, 288, 32, 64, 64),
    (14, 256, 160, 320, 32, 128, 128),
    (7, 256, 160, 320, 32, 128, 128),
    (7, 384, 192, 384, 48, 128, 128),
)


def _googlenet(*, heads: bool) -> Iterator[Layer]:
    yield from (conv(3, 64, 7, 112), conv(64, 64, 1, 56), conv(64, 192, 3, 56))
    inputs = 192
    for number, (side, one, to_three, three, to_five, five, pooled) in enumerate(
        _INCEPTION
    ):
        if heads and number in (
            3,
            6,
        ):  # the auxiliary classifiers of training hang on 4a and 4d
            yield from (
                conv(inputs, 128, 1, 4),
                dense(128 * 4 * 4, 1024),
                dense(1024, 1000),
            )
        yield from (conv(inputs, one, 1, side), conv(inputs, to_three, 1, side))
        yield from (conv(to_three, three, 3, side), conv(inputs, to_five, 1, side))
        yield from (conv(to_five, five, 5, side), conv(inputs, pooled, 1, side))
        inputs = one + three + five + pooled
    yield dense(inputs, 1000)


def _inception_v4() -> Iterator[Layer]:
    """Yield Inception-v4 of Szegedy et al. (2017), Figures 3 to 9: stages of blocks of branches of units.

    A unit is (channels, kernel), which keeps the image's size, or (channels, kernel, stride) without padding,
    or "mean" over 3x3 places, or "halve", the maximum of 3x3 places at every other one.
    """
    stages = json.loads(
        Path(__file__).with_name("inception_v4.json").read_text(encoding="utf-8")
    )
    times = {"inception_a": 4, "inception_b": 7, "inception_c": 3}
    channels, side = 3, 299
    for name, blocks in stages.items():
        for branches in blocks * times.get(name, 1):
            inputs, place, channels = channels, side, 0
            for units in branches:
                row, outputs, side = _row(inputs, place, units)
                channels += outputs
                yield from row
    yield dense(channels, 1000)


def _row(inputs: int, side: int, units: Sequence[Any]) -> tuple[list[Layer], int, int]:
    """Return layers of units in a row, how many channels they put out, and of which side."""
    row: list[Layer] = []
    fork = 0
    for unit in units:
        if unit == "halve":
            side = (side - 3) // 2 + 1
        elif isinstance(unit, dict):
            for branch in unit["side_by_side"]:
                branch_layers, outputs, _ = _row(inputs, side, branch)
                row, fork = row + branch_layers, fork + outputs
        elif unit != "mean":
            outputs, kernel, *stride = unit
            height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
            side = (side - height) // stride[0] + 1 if stride else side
            weights = inputs * outputs * height * width
            row.append(Layer((weights, outputs, outputs), weights * side * side))
            inputs = outputs
    return row, fork or inputs, side


def _cifar_vgg16() -> Iterator[Layer]:
    """Yield 13 convolutions of weight, bias and batch norm's two, and one linear layer to 10 classes."""
    for layer in _convolutions(VGG_CONVOLUTIONS["VGG16"], 32):
        yield Layer(
            (*layer.tensors, layer.tensors[1], layer.tensors[1]), layer.multiply_adds
        )
    yield dense(512, 10)


def ptb_lstm(units: int = 1500, vocabulary: int = 10_000) -> Iterator[Layer]:
    """Return Zaremba et al.'s two-layer LSTM on the Penn Treebank, 11 tensors; multiply-adds of a word."""
    gates = 4 * units * units
    yield Layer((vocabulary * units,), 0)
    for _ in range(2):
        yield Layer((gates, gates, 4 * units, 4 * units), 2 * gates)
    yield dense(units, vocabulary)


_NETWORKS: dict[str, Callable[[], Iterator[Layer]]] = {
    **{
        name.lower(): partial(_vgg, counts) for name, counts in VGG_CONVOLUTIONS.items()
    },
    **{
        name.lower(): partial(_resnet, counts) for name, counts in RESNET_BLOCKS.items()
    },
    "resnet50_published": partial(_resnet, RESNET_BLOCKS["ResNet50"], first=True),
    "alexnet": _alexnet,
    "googlenet": partial(_googlenet, heads=False),
    "googlenet_aux": partial(_googlenet, heads=True),
    "inception_v4": _inception_v4,
    "lstm_ptb": ptb_lstm,
    "vgg16_cifar": _cifar_vgg16,
}
