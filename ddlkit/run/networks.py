"""The networks that are measured: by name, with random weights and random data, nothing downloaded."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ddlkit.core.errors import UserError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Network:
    """How to make a network, and a batch of ``n`` inputs and labels for it."""

    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Batch]


def import_torchvision() -> ModuleType:
    """torchvision, also where its CUDA wheel stands beside a CPU torch.

    There the import dies while describing operators that it has no kernels for (nms and its like). No
    network needs them, so after that very error, and no other, the description is left out.

    Raises UserError if torchvision cannot be imported.
    """
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise UserError(
            f"torchvision cannot be imported ({error}); install it with: pip install --no-deps torchvision"
        ) from None
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        absent = "torchvision._meta_registrations"
        sys.modules[absent] = ModuleType(absent)
        return importlib.import_module("torchvision")


def _images(channels: int, side: int, classes: int) -> Callable[[int, torch.Generator], Batch]:
    def sample(batch: int, generator: torch.Generator) -> Batch:
        images = torch.randn(batch, channels, side, side, generator=generator)
        return images, torch.randint(classes, (batch,), generator=generator)

    return sample


def _torchvision(name: str, **options: Any) -> Network:
    def build() -> nn.Module:
        network: nn.Module = import_torchvision().models.get_model(name, weights=None, **options)
        return network

    return Network(build, _images(channels=3, side=224, classes=1000))


def _lenet5() -> nn.Module:
    """LeNet-5 with ReLU and max pooling, for 28x28 images: small enough to try anything in milliseconds."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
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
    )


NETWORKS: dict[str, Network] = {
    "lenet5": Network(_lenet5, _images(channels=1, side=28, classes=10)),
    "alexnet": _torchvision("alexnet"),
    # Without its auxiliary heads: they are no part of the network that the papers measure.
    "googlenet": _torchvision("googlenet", aux_logits=False, init_weights=False),
    "resnet18": _torchvision("resnet18"),
    "resnet50": _torchvision("resnet50"),
    "resnet101": _torchvision("resnet101"),
    "resnet152": _torchvision("resnet152"),
    # Layers come with random weights; drawing VGG's 138 million once more takes two seconds.
    "vgg16": _torchvision("vgg16", init_weights=False),
    "vgg19": _torchvision("vgg19", init_weights=False),
    "vit_b_16": _torchvision("vit_b_16"),
}


def names() -> list[str]:
    """The names that `build` knows."""
    return sorted(NETWORKS)


def find(name: str) -> Network:
    """The network of that name. Raises UserError for an unknown one, naming the nearest known one."""
    if name in NETWORKS:
        return NETWORKS[name]
    near = difflib.get_close_matches(name.lower(), NETWORKS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}"
    raise UserError(f"unknown network {name!r}: {hint}")


def build(name: str) -> nn.Module:
    """The network with random weights, on the CPU, in training mode.

    Raises UserError for an unknown name, naming the nearest known one.
    """
    return find(name).build().train()


def sample_batch(name: str, batch: int, device: torch.device | str = "cpu") -> Batch:
    """Random inputs and labels for ``batch`` samples, the same at every call.

    Raises UserError for an unknown name and a batch below 1.
    """
    network = find(name)
    if batch < 1:
        raise UserError(f"batch {batch} of {name}: must be at least 1")
    inputs, labels = network.sample(batch, torch.Generator().manual_seed(0))
    return inputs.to(device), labels.to(device)
