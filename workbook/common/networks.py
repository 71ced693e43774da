"""The networks of the papers as published, counted by hand: parameters and multiply-adds.

Networks have 1000 classes and images of 224 x 224, AlexNet 227 x 227, Inception-v4
299 x 299, and the VGG-16 for Cifar-10 32 x 32. VGG and ResNet are as in torchvision,
AlexNet and GoogLeNet as in Caffe. A word counts as an image of the LSTM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
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
    """A convolution or a dense layer.

    Attributes
    ----------
    tensors : tuple of int
        The number of elements of each parameter tensor.
    multiply_adds : int
        The multiply-adds of the forward pass of one image.
    """

    tensors: tuple[int, ...]
    multiply_adds: int


@cache
def layers(network: str) -> tuple[Layer, ...]:
    """Return the layers of a network in forward order.

    Parameters
    ----------
    network : str
        The name in any spelling.

    Returns
    -------
    tuple of Layer

    Raises
    ------
    UserError
        If the layers of the network are not counted here.

    Examples
    --------
    >>> sum(size for layer in layers("ResNet-50") for size in layer.tensors)
    25557032
    """
    # Keys of _NETWORKS need no look-up of spellings, which does not know all of them.
    name = network if network in _NETWORKS else network_named(network)
    if name not in _NETWORKS:
        raise UserError(
            f"no layers of {network!r} are counted: use one of {', '.join(_NETWORKS)}"
        )
    return tuple(_NETWORKS[name]())


def parameters(network: str) -> tuple[int, ...]:
    """Return the number of elements of every parameter tensor in forward order.

    Parameters
    ----------
    network : str
        The name in any spelling.

    Returns
    -------
    tuple of int

    Raises
    ------
    UserError
        If the layers of the network are not counted here.
    """
    sizes: list[int] = []
    for layer in layers(network):
        sizes += layer.tensors
    return tuple(sizes)


def multiply_adds(network: str) -> int:
    """Return the multiply-adds of a forward pass of one image.

    Parameters
    ----------
    network : str
        The name in any spelling.

    Raises
    ------
    UserError
        If the layers of the network are not counted here.
    """
    return sum(layer.multiply_adds for layer in layers(network))


# -- kinds of layers -----------------------------------------------------------------


def conv(
    inputs: int, outputs: int, kernel: int, side: int, *, groups: int = 1
) -> Layer:
    """Return a convolution with a bias.

    Parameters
    ----------
    inputs, outputs : int
        The numbers of channels.
    kernel : int
        The side of the kernel.
    side : int
        The side of the output.
    groups : int, optional
        Into how many groups the channels are divided. An output channel is computed from
        the input channels of its own group.
    """
    weights = kernel * kernel * (inputs // groups) * outputs
    # Each weight is used once for each place of the output. The bias needs no multiply-add.
    return Layer((weights, outputs), weights * side * side)


def dense(inputs: int, outputs: int) -> Layer:
    """Return a fully connected layer with a bias."""
    return conv(inputs, outputs, kernel=1, side=1)


def _normed(layer: Layer) -> Layer:
    """Return a layer whose bias is replaced by the scale and the shift of a batch norm."""
    weights, outputs = layer.tensors
    return Layer((weights, outputs, outputs), layer.multiply_adds)


# -- networks ------------------------------------------------------------------------


def _vgg_convolutions(counts: Sequence[int], side: int) -> Iterator[Layer]:
    """Yield the convolutions of a VGG.

    Parameters
    ----------
    counts : sequence of int
        The number of convolutions of each width. A width is a number of output channels.
    side : int
        The side of the images. It is halved after the convolutions of each width.
    """
    inputs = 3  # colours
    for outputs, count in zip((64, 128, 256, 512, 512), counts, strict=True):
        for _ in range(count):
            yield conv(inputs, outputs, kernel=3, side=side)
            inputs = outputs
        side //= 2


def _vgg(counts: Sequence[int]) -> Iterator[Layer]:
    yield from _vgg_convolutions(counts, 224)
    yield dense(512 * 7 * 7, 4096)
    yield dense(4096, 4096)
    yield dense(4096, 1000)


def _resnet(blocks: Sequence[int], stride_first: bool = False) -> Iterator[Layer]:
    """Yield the layers of a ResNet of bottleneck blocks.

    Parameters
    ----------
    blocks : sequence of int
        The number of blocks of each width. The width of a block is the number of output
        channels of its first two convolutions.
    stride_first : bool, optional
        Whether the first convolution of a block has the stride, as in the paper. In
        torchvision the second convolution has it.
    """
    yield _normed(conv(3, 64, kernel=7, side=112))
    inputs = 64
    # A pool after the first convolution halves the side.
    side = 56
    for width, count in zip((64, 128, 256, 512), blocks, strict=True):
        for block in range(count):
            # The first block of each width halves the side, except for the width of 64.
            halves = block == 0 and width > 64
            output_side = side // 2 if halves else side
            # The output of the first convolution is smaller only if it has the stride.
            first_side = output_side if stride_first else side
            yield _normed(conv(inputs, width, 1, first_side))
            yield _normed(conv(width, width, 3, output_side))
            yield _normed(conv(width, 4 * width, 1, output_side))
            if block == 0:
                # The shortcut has a convolution where its number of channels changes.
                yield _normed(conv(inputs, 4 * width, 1, output_side))
            inputs = 4 * width
            side = output_side
    yield dense(inputs, 1000)


def _alexnet() -> Iterator[Layer]:
    """Yield the layers of AlexNet, of which three convolutions have two groups of channels.

    The numbers are the arguments of `conv`: the channels of the input and of the output, the
    side of the kernel, and the side of the output.
    """
    yield conv(3, 96, 11, 55)
    yield conv(96, 256, 5, 27, groups=2)
    yield conv(256, 384, 3, 13)
    yield conv(384, 384, 3, 13, groups=2)
    yield conv(384, 256, 3, 13, groups=2)
    # A last pool leaves a side of 6.
    yield dense(256 * 6 * 6, 4096)
    yield dense(4096, 4096)
    yield dense(4096, 1000)


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
"""The modules of GoogLeNet.

The numbers are the side, the channels of the 1x1 convolution, those of the 3x3
convolution after its own 1x1, those of the 5x5 convolution after its own 1x1, and those
of the 1x1 convolution after the pool."""
_AUXILIARY = (3, 6)
"""The modules, counted from 0, whose inputs the two auxiliary classifiers take."""


def _googlenet(*, heads: bool) -> Iterator[Layer]:
    """Yield the layers of GoogLeNet, with or without its auxiliary classifiers.

    The numbers are the arguments of `conv`: the channels of the input and of the output, the
    side of the kernel, and the side of the output.
    """
    yield conv(3, 64, 7, 112)
    yield conv(64, 64, 1, 56)
    yield conv(64, 192, 3, 56)
    inputs = 192
    for number, module in enumerate(_INCEPTION):
        side, ones, before_threes, threes, before_fives, fives, pooled = module
        if heads and number in _AUXILIARY:
            # An auxiliary classifier first averages the input of this module to a side of 4.
            yield conv(inputs, 128, 1, 4)
            yield dense(128 * 4 * 4, 1024)
            yield dense(1024, 1000)
        yield conv(inputs, ones, 1, side)
        yield conv(inputs, before_threes, 1, side)
        yield conv(before_threes, threes, 3, side)
        yield conv(inputs, before_fives, 1, side)
        yield conv(before_fives, fives, 5, side)
        yield conv(inputs, pooled, 1, side)
        inputs = ones + threes + fives + pooled
    yield dense(inputs, 1000)


def _inception_v4() -> Iterator[Layer]:
    """Yield the layers of Inception-v4 (Szegedy et al., 2017, Figures 3 to 9).

    The file inception_v4.json lists stages, their blocks, the branches of a block, and
    the units of a branch. A unit is one of these:

    * [channels, kernel] is a convolution that keeps the side of the image.
    * [channels, kernel, stride] is a convolution without padding.
    * "mean" is the mean over 3x3 places, which keeps the side.
    * "halve" is the maximum over 3x3 places, at every second place, without padding.
    * {"side_by_side": branches} is a fork into further branches.
    """
    path = Path(__file__).with_name("inception_v4.json")
    stages = json.loads(path.read_text(encoding="utf-8"))
    # The file lists the block of these stages once.
    repeats = {"inception_a": 4, "inception_b": 7, "inception_c": 3}
    channels = 3  # colours
    side = 299
    for name, blocks in stages.items():
        for branches in blocks * repeats.get(name, 1):
            inputs = channels
            input_side = side
            # All branches have the same input, and the channels of their outputs are
            # concatenated.
            channels = 0
            for units in branches:
                branch_layers, outputs, side = _branch(inputs, input_side, units)
                yield from branch_layers
                channels += outputs
    yield dense(channels, 1000)


def _output_side(side: int, kernel: int, stride: int) -> int:
    """Return how many kernels fit into a side at distances of the stride, without padding."""
    return (side - kernel) // stride + 1


def _branch(
    inputs: int, side: int, units: Sequence[Any]
) -> tuple[list[Layer], int, int]:
    """Return the layers of one branch of Inception-v4.

    Parameters
    ----------
    inputs : int
        The number of channels of the branch's input.
    side : int
        The side of the branch's input.
    units : sequence
        The units, as `_inception_v4` describes them.

    Returns
    -------
    layers : list of Layer
        The convolutions, each with a batch norm.
    outputs, side : int
        The number of channels and the side of the branch's output.
    """
    layers: list[Layer] = []
    for unit in units:
        if unit == "mean":
            # A mean has no parameters, and keeps the channels and the side.
            continue
        if unit == "halve":
            side = _output_side(side, kernel=3, stride=2)
        elif isinstance(unit, dict):
            # A fork is the last unit of its branch. The channels of its outputs are
            # concatenated. Its branches keep the side.
            fork_outputs = 0
            for branch in unit["side_by_side"]:
                fork_layers, outputs, _ = _branch(inputs, side, branch)
                layers += fork_layers
                fork_outputs += outputs
            inputs = fork_outputs
        else:
            # ``kernel`` is the side of a square kernel, or its height and its width.
            # ``stride`` has one number, or none.
            outputs, kernel, *stride = unit
            height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
            if stride:
                # Kernels with a stride are square.
                side = _output_side(side, height, stride[0])
            weights = inputs * outputs * height * width
            # A batch norm's scale and shift take the place of a bias.
            layers.append(Layer((weights, outputs, outputs), weights * side * side))
            # The output of a unit is the input of the next one.
            inputs = outputs
    return layers, inputs, side


def _cifar_vgg16() -> Iterator[Layer]:
    """Yield the layers of the VGG-16 for Cifar-10.

    They are 13 convolutions with a weight, a bias, and the scale and the shift of a
    batch norm, and one linear layer for 10 classes.
    """
    for layer in _vgg_convolutions(VGG_CONVOLUTIONS["VGG16"], 32):
        weights, outputs = layer.tensors
        yield Layer((weights, outputs, outputs, outputs), layer.multiply_adds)
    # The side was halved five times, from 32 to 1.
    yield dense(512, 10)


def ptb_lstm(units: int = 1500, vocabulary: int = 10_000) -> Iterator[Layer]:
    """Yield the layers of the LSTM of Zaremba et al. on the Penn Treebank.

    It has 11 tensors: the embedding, four of each of two LSTM layers, and two of the
    output. Multiply-adds are those of one word. ``units`` is the number of units of each
    layer, and of the embedding of a word.
    """
    # An LSTM layer has four gates. Their weights are a matrix for the input and one for the
    # state of the word before, and each of these matrices has a bias.
    gates = 4 * units * units
    # The embedding is looked up, which multiplies nothing.
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
    "resnet50_published": partial(
        _resnet, RESNET_BLOCKS["ResNet50"], stride_first=True
    ),
    "alexnet": _alexnet,
    "googlenet": partial(_googlenet, heads=False),
    "googlenet_aux": partial(_googlenet, heads=True),
    "inception_v4": _inception_v4,
    "lstm_ptb": ptb_lstm,
    "vgg16_cifar": _cifar_vgg16,
}
