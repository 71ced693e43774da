"""Networks of the papers that torchvision lacks, built from their publications' descriptions.

Layers carry the names that the publication or its tables give them; weights are random.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

STEPS, VOCABULARY = 35, 10_000  # of a training sequence of the Penn Treebank
_VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # width and number of convolutions


def _named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def lenet5() -> nn.Module:
    """LeNet-5 with ReLU and max pooling, for 28x28 images: small enough to try anything in milliseconds."""
    return _named(
        conv1=nn.Conv2d(1, 6, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(400, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, 10),
    )


def alexnet_caffe() -> nn.Module:
    """AlexNet with the two-fold groups of Krizhevsky et al. (2012), for 227x227 images.

    Its layers are those of dag Tab VI by name and size; as there, without response normalisation.
    """
    return _named(
        conv1=nn.Conv2d(3, 96, 11, stride=4),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(3, stride=2),
        conv2=nn.Conv2d(96, 256, 5, padding=2, groups=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(3, stride=2),
        conv3=nn.Conv2d(256, 384, 3, padding=1),
        relu3=nn.ReLU(),
        conv4=nn.Conv2d(384, 384, 3, padding=1, groups=2),
        relu4=nn.ReLU(),
        conv5=nn.Conv2d(384, 256, 3, padding=1, groups=2),
        relu5=nn.ReLU(),
        pool5=nn.MaxPool2d(3, stride=2),
        flatten=nn.Flatten(),
        fc6=nn.Linear(256 * 6 * 6, 4096),
        relu6=nn.ReLU(),
        drop6=nn.Dropout(),
        fc7=nn.Linear(4096, 4096),
        relu7=nn.ReLU(),
        drop7=nn.Dropout(),
        fc8=nn.Linear(4096, 1000),
    )


# -- VGG-16 ------------------------------------------------------------------------------------


def _vgg16_features(*, norm: bool, narrower: int = 1, poolings: int = 5) -> nn.Sequential:
    """VGG-16's convolutions, with 1/``narrower`` of the channels; the first blocks end in a pooling."""
    layers: list[nn.Module] = []
    inputs = 3
    for block, (full_width, convolutions) in enumerate(_VGG16):
        width = full_width // narrower
        for _ in range(convolutions):
            layers.append(nn.Conv2d(inputs, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width), nn.ReLU()] if norm else [nn.ReLU()]
            inputs = width
        if block < poolings:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg16_cifar() -> nn.Module:
    """VGG-16 for 32x32 images: batch normalisation, and one linear layer to 10 classes (omgs Tab V)."""
    return _named(
        features=_vgg16_features(norm=True), flatten=nn.Flatten(), classifier=nn.Linear(512, 10)
    )


def vgg16_replaced() -> nn.Module:
    """VGG-16 with two 1x1 convolutions and an average in place of its three linear layers (osf Tab 3).

    The paper names no activations: as in the layers replaced, ReLU stands between, not behind.
    """
    return _averaged(_vgg16_features(norm=False), 512, 1000)


def _averaged(features: nn.Module, width: int, classes: int) -> nn.Module:
    """Features of ``width`` channels, two 1x1 convolutions, and the average over all places."""
    return _named(
        features=features,
        conv1=nn.Conv2d(width, width, 1),
        relu=nn.ReLU(),
        conv2=nn.Conv2d(width, classes, 1),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
    )


# An eighth of the channels and units, for images of a quarter of the side: with the last two of five
# poolings left out the last map is 7x7 as published, and the linear layers keep their share of parameters.
_EIGHTH = 8
_MAP_SIDE = 7


def _eighth_features() -> nn.Sequential:
    return _vgg16_features(norm=False, narrower=_EIGHTH, poolings=3)


def vgg16_eighth(classes: int, dropout: float = 0.5) -> nn.Module:
    """VGG-16 with an eighth of its channels and units, for 56x56 images.

    dropout : after both hidden linear layers; 0.5 as published by Simonyan and Zisserman, none in Keras
    """
    width, units = 512 // _EIGHTH, 4096 // _EIGHTH
    return _named(
        features=_eighth_features(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(width * _MAP_SIDE**2, units),
        relu1=nn.ReLU(),
        drop1=nn.Dropout(dropout),
        fc2=nn.Linear(units, units),
        relu2=nn.ReLU(),
        drop2=nn.Dropout(dropout),
        fc3=nn.Linear(units, classes),
    )


def vgg16_eighth_replaced(classes: int) -> nn.Module:
    """`vgg16_eighth` with its linear layers replaced as in `vgg16_replaced` (osf Tab 3)."""
    return _averaged(_eighth_features(), 512 // _EIGHTH, classes)


# -- Inception-v4 ------------------------------------------------------------------------------


class _Concat(nn.ModuleList):
    """Branches of one input, their channels put together."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


Kernel = int | tuple[int, int]
Unit = tuple[int, Kernel] | tuple[int, Kernel, int]


def _chain(inputs: int, *units: Unit) -> nn.Sequential:
    """Convolutions in a row, each with batch normalisation and ReLU.

    units : (channels, kernel) keep the image's size; (channels, kernel, stride) use valid padding
    """
    layers: list[nn.Module] = []
    for outputs, kernel, *valid in units:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid else (height // 2, width // 2)
        stride = valid[0] if valid else 1
        layers += [
            nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3),
            nn.ReLU(),
        ]
        inputs = outputs
    return nn.Sequential(*layers)


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    mean = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(mean, _chain(inputs, (outputs, 1)))


def _halved() -> nn.Module:
    return nn.MaxPool2d(3, stride=2)


def _split(inputs: int, *units: Unit) -> nn.Sequential:
    """A chain whose end goes through a 1x3 and a 3x1 convolution side by side."""
    width = units[-1][0]
    fork = _Concat(*(_chain(width, (256, kernel)) for kernel in ((1, 3), (3, 1))))
    return nn.Sequential(_chain(inputs, *units), fork)


def _stem() -> nn.Sequential:
    return nn.Sequential(
        _chain(3, (32, 3, 2), (32, 3, 1), (64, 3)),
        _Concat(_halved(), _chain(64, (96, 3, 2))),
        _Concat(
            _chain(160, (64, 1), (96, 3, 1)),
            _chain(160, (64, 1), (64, (7, 1)), (64, (1, 7)), (96, 3, 1)),
        ),
        _Concat(_chain(192, (192, 3, 2)), _halved()),
    )


def _inception_a() -> nn.Module:
    n = 384
    return _Concat(
        _pooled(n, 96),
        _chain(n, (96, 1)),
        _chain(n, (64, 1), (96, 3)),
        _chain(n, (64, 1), (96, 3), (96, 3)),
    )


def _inception_b() -> nn.Module:
    n, row, column = 1024, (1, 7), (7, 1)
    return _Concat(
        _pooled(n, 128),
        _chain(n, (384, 1)),
        _chain(n, (192, 1), (224, row), (256, column)),
        _chain(n, (192, 1), (192, row), (224, column), (224, row), (256, column)),
    )


def _inception_c() -> nn.Module:
    n = 1536
    return _Concat(
        _pooled(n, 256),
        _chain(n, (256, 1)),
        _split(n, (384, 1)),
        _split(n, (384, 1), (448, (1, 3)), (512, (3, 1))),
    )


def inception_v4() -> nn.Module:
    """Inception-v4 of Szegedy et al. (2017), Figures 3 to 9, for 299x299 images: 149 convolutions."""
    return _named(
        stem=_stem(),
        inception_a=nn.Sequential(*(_inception_a() for _ in range(4))),
        reduction_a=_Concat(
            _halved(),
            _chain(384, (384, 3, 2)),
            _chain(384, (192, 1), (224, 3), (256, 3, 2)),
        ),
        inception_b=nn.Sequential(*(_inception_b() for _ in range(7))),
        reduction_b=_Concat(
            _halved(),
            _chain(1024, (192, 1), (192, 3, 2)),
            _chain(1024, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2)),
        ),
        inception_c=nn.Sequential(*(_inception_c() for _ in range(3))),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        drop=nn.Dropout(0.2),
        fc=nn.Linear(1536, 1000),
    )


# -- other than one row of logits a sample -----------------------------------------------------


class AllHeads(nn.Module):
    """A network with auxiliary heads whose outputs are stacked: a batch of n gives (heads x n) rows.

    Cross entropy then weighs all heads alike, where GoogLeNet's publication gives the auxiliary ones
    0.3: the same work, another objective.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.network(x)
        return outputs if isinstance(outputs, Tensor) else torch.cat(tuple(outputs))


class LanguageModel(nn.Module):
    """The large LSTM of Zaremba et al. (2014): two layers of 1500 units, words in and out untied.

    forward : (batch, steps) words -> (batch x steps, vocabulary) logits of each next word
    """

    def __init__(self, units: int = 1500, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, units)
        self.drop = nn.Dropout(0.65)
        self.lstm = nn.LSTM(units, units, num_layers=2, dropout=0.65, batch_first=True)
        self.decoder = nn.Linear(units, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.lstm(self.drop(self.encoder(words)))
        logits: Tensor = self.decoder(self.drop(states).flatten(end_dim=1))
        return logits
