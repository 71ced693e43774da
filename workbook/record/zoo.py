"""The networks of the four papers and small ones of our own; importing this registers them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from ddlkit.measure.networks import (
    IMAGENET,
    Batch,
    Network,
    images,
    register,
    torchvision_network,
)

STEPS = 35
"""The words of a training sequence of the Penn Treebank."""
VOCABULARY = 10_000
"""The distinct words of the Penn Treebank."""
TEXT = 2_000
"""The distinct words that a small network of our own knows."""
_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""The width of each block of VGG-16, and its number of convolutions."""


def _named(**layers: nn.Module) -> nn.Sequential:
    """Return a module that applies layers one after the other, in the order of the keywords.

    A keyword is the name of its layer, which is also part of the names of the layer's parameters.
    """
    return nn.Sequential(OrderedDict(layers))


def lenet5() -> nn.Module:
    """Return LeNet-5 with ReLU and max pooling, for 28x28 images. It is small enough to try anything."""
    return _named(
        conv1=nn.Conv2d(1, 6, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        # 16 channels of 5 x 5 values.
        fc1=nn.Linear(400, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, 10),
    )


# -- VGG-16 ----------------------------------------------------------------------------

# An eighth of the channels and units, for images of a quarter of the side: with the last two of five
# poolings left out the last map is 7x7 as published, and the linear layers keep their share of parameters.
EIGHTH = 8
EIGHTH_POOLINGS = 3
SMALL = (EIGHTH, EIGHTH_POOLINGS)


def _vgg16_features(*, norm: bool, narrower: int, poolings: int = 5) -> nn.Sequential:
    """Return the convolutions of VGG-16 for images of 3 colours, in five blocks.

    Parameters
    ----------
    norm : bool
        Whether batch normalisation follows each convolution.
    narrower : int
        The factor by which each convolution has fewer channels than published.
    poolings : int
        How many blocks, counted from the first, end in a pooling.
    """
    layers: list[nn.Module] = []
    # The channels before the next convolution.
    inputs = 3
    for block, (full_width, convolutions) in enumerate(_VGG16):
        width = full_width // narrower
        for _ in range(convolutions):
            layers.append(nn.Conv2d(inputs, width, 3, padding=1))
            if norm:
                layers.append(nn.BatchNorm2d(width))
            layers.append(nn.ReLU())
            inputs = width
        if block < poolings:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg16_cifar(classes: int = 10, narrower: int = 1) -> nn.Module:
    """Return VGG-16 for 32x32 images, with batch normalisation and one linear layer (omgs Tab V).

    It has ``narrower`` times fewer channels than published.
    """
    features = _vgg16_features(norm=True, narrower=narrower)
    # Five poolings leave one value of each channel.
    dense = nn.Linear(512 // narrower, classes)
    return _named(features=features, flatten=nn.Flatten(), classifier=dense)


def vgg16_replaced(
    classes: int = 1000, narrower: int = 1, poolings: int = 5
) -> nn.Module:
    """Return VGG-16 with two 1x1 convolutions and an average in place of its linear layers (osf Tab 3).

    Parameters
    ----------
    classes : int, optional
        The number of classes.
    narrower : int, optional
        The factor by which each convolution has fewer channels than published.
    poolings : int, optional
        How many of the five blocks of convolutions, counted from the first, end in a pooling.
    """
    # The channels after the last block of convolutions.
    width = 512 // narrower
    return _named(
        features=_vgg16_features(norm=False, narrower=narrower, poolings=poolings),
        conv1=nn.Conv2d(width, width, 1),
        relu=nn.ReLU(),
        conv2=nn.Conv2d(width, classes, 1),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
    )


def vgg16_eighth(classes: int, dropout: float = 0.5) -> nn.Module:
    """Return VGG-16 with an eighth of its channels and units, for 56x56 images."""
    # The published linear layers have 4096 units.
    units = 4096 // EIGHTH
    return _named(
        features=_vgg16_features(norm=False, narrower=EIGHTH, poolings=EIGHTH_POOLINGS),
        flatten=nn.Flatten(),
        # Three poolings leave 7 x 7 values of each channel.
        fc1=nn.Linear(512 // EIGHTH * 7**2, units),
        relu1=nn.ReLU(),
        drop1=nn.Dropout(dropout),
        fc2=nn.Linear(units, units),
        relu2=nn.ReLU(),
        drop2=nn.Dropout(dropout),
        fc3=nn.Linear(units, classes),
    )


# -- ResNet-20 -------------------------------------------------------------------------


class _Residual(nn.Module):
    """Two convolutions and a shortcut without parameters, whose results are added.

    ``inputs`` and ``outputs`` are numbers of channels. Where a block has twice as many outputs as
    inputs, the first convolution and the shortcut take every second pixel, and the shortcut pads
    the missing channels with zeros.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        # 1 where the channels stay as many, and 2 where they double.
        self.stride = outputs // inputs
        self.padding = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        # `pad` takes two numbers for each dimension, beginning with the last: how many zeros come
        # before and after the width, the height and the channels.
        padded = nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.padding))
        return torch.relu(inner + padded)


def resnet20_half(classes: int) -> nn.Module:
    """Return ResNet-20 of He et al. (2016) for small images, half as wide as published."""
    # The channels before the first of nine blocks, and after each block.
    widths = (8, 8, 8, 8, 16, 16, 16, 32, 32, 32)
    return _named(
        conv=nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(widths[0]),
        relu=nn.ReLU(),
        blocks=nn.Sequential(*(_Residual(*pair) for pair in pairwise(widths))),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(widths[-1], classes),
    )


# -- other than one row of logits a sample ---------------------------------------------


class AllHeads(nn.Module):
    """A network with auxiliary heads, whose outputs are stacked. A batch of n gives (heads x n) rows."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.network(x)
        return outputs if isinstance(outputs, Tensor) else torch.cat(tuple(outputs))


class LanguageModel(nn.Module):
    """The large LSTM of Zaremba et al. (2014), with ``units`` units and ``words`` distinct words.

    It takes words of shape (batch, steps) and returns logits of shape (batch x steps, ``words``).
    """

    def __init__(self, units: int = 1500, words: int = VOCABULARY) -> None:
        super().__init__()
        self.encoder = nn.Embedding(words, units)
        self.drop = nn.Dropout(0.65)
        self.lstm = nn.LSTM(
            units, units, num_layers=2, dropout=self.drop.p, batch_first=True
        )
        self.decoder = nn.Linear(units, words)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.drop(self.encoder(words)))
        logits: Tensor = self.decoder(self.drop(states).flatten(end_dim=1))
        return logits


class SmallGpt(nn.Module):
    """A small decoder of words, which by default has four blocks and is 256 wide.

    It takes words of shape (batch, steps) and returns logits of shape (batch x steps, `TEXT`).
    """

    def __init__(self, width: int = 256, blocks: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(TEXT, width)
        # A vector for each position in the sequence, which is added to the vector of its word.
        self.places = nn.Embedding(STEPS, width)
        block = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TEXT, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of the word after each word, shape (batch x steps, `TEXT`)."""
        steps = words.shape[1]
        # An encoder whose words do not see the words after them is a decoder without cross attention.
        mask_later_words = nn.Transformer.generate_square_subsequent_mask(
            steps, device=words.device
        )
        embedded = self.words(words) + self.places.weight[:steps]
        states = self.blocks(embedded, mask=mask_later_words, is_causal=True)
        logits: Tensor = self.head(self.norm(states))
        return logits.flatten(end_dim=1)


def _words(words: int) -> Callable[[int, torch.Generator], Batch]:
    """Return a function that draws a batch of random sequences of words.

    It takes the batch size and a generator. It returns words of shape (batch, `STEPS`) and labels
    of shape (batch x `STEPS`,). The label of a word is the word after it. ``words`` is the number
    of distinct words.
    """

    def sample(batch: int, generator: torch.Generator) -> Batch:
        # The last word of a sequence is a label only.
        text = torch.randint(words, (batch, STEPS + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].flatten()

    return sample


def _for_each_head(batch: int, generator: torch.Generator) -> Batch:
    """Draw images, and their labels once for each of the three heads of GoogLeNet."""
    images, labels = IMAGENET(batch, generator)
    # `AllHeads` stacks the rows of all images of one head before those of the next head.
    return images, labels.repeat(3)


_GOOGLENET_AUX = torchvision_network("googlenet", aux_logits=True, init_weights=False)

register(
    __name__,
    {
        "lenet5": Network(lenet5, images(channels=1, side=28, classes=10)),
        # With both auxiliary heads, as in the published training: twice the bytes to exchange.
        "googlenet_aux": Network(
            lambda: AllHeads(_GOOGLENET_AUX.build()), _for_each_head
        ),
        "lstm_ptb": Network(LanguageModel, _words(VOCABULARY)),
        "lstm_small": Network(lambda: LanguageModel(320, TEXT), _words(TEXT)),
        "gpt_small": Network(SmallGpt, _words(TEXT)),
        "vgg16_cifar": Network(vgg16_cifar, images(channels=3, side=32, classes=10)),
        "vgg16_replaced": Network(vgg16_replaced, IMAGENET),
    },
)
