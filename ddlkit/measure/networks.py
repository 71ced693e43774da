"""The networks that can be measured by name, with random weights and random data; nothing is downloaded.

These are networks of torchvision. Other packages may register networks of their own by `register`.
"""

from __future__ import annotations

import difflib
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ddlkit.core.errors import UserError
from ddlkit.jobs import launch

Batch = tuple[Tensor, Tensor]
INSTALL_IT = """install it with: pip install 'ddlkit[networks]', or, to keep this torch: \
pip install --no-deps torchvision"""


@dataclass(frozen=True)
class Network:
    """How to make a network, and a batch of ``n`` inputs with a label for each row that it puts out.

    package : what must be installed, beyond torch
    """

    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Batch]
    package: str = ""


def import_torchvision() -> ModuleType:
    """Return torchvision, also where its CUDA wheel stands beside a CPU torch. Raises UserError."""
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise UserError(
            f"torchvision cannot be imported ({error}); {INSTALL_IT}"
        ) from None
    except (
        RuntimeError
    ) as error:  # describing operators without a kernel, which no network needs
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        absent = "torchvision._meta_registrations"
        sys.modules[absent] = ModuleType(absent)
        return importlib.import_module("torchvision")


def images(
    channels: int, side: int, classes: int
) -> Callable[[int, torch.Generator], Batch]:
    def sample(batch: int, generator: torch.Generator) -> Batch:
        images = torch.randn(batch, channels, side, side, generator=generator)
        return images, torch.randint(classes, (batch,), generator=generator)

    return sample


IMAGENET = images(channels=3, side=224, classes=1000)


def torchvision_network(name: str, **options: Any) -> Network:
    def build() -> nn.Module:
        models = import_torchvision().models
        if name not in models.list_models():
            raise UserError(f"torchvision has no network {name!r}")
        network: nn.Module = models.get_model(name, weights=None, **options)
        return network

    return Network(build, IMAGENET, package="torchvision")


NETWORKS: dict[str, Network] = {
    # Without the auxiliary heads: they help training to converge and are no part of what it leaves.
    "googlenet": torchvision_network("googlenet", aux_logits=False, init_weights=False),
    # Layers come with random weights; drawing VGG's 138 million once more takes two seconds.
    **{
        name: torchvision_network(name, init_weights=False)
        for name in ("vgg16", "vgg19")
    },
    **{
        name: torchvision_network(name)
        for name in (
            "alexnet",
            "vit_b_16",
            "squeezenet1_1",
            "mobilenet_v3_small",
            "resnet18",
            "resnet50",
            "resnet101",
            "resnet152",
        )
    },
}
"""Every network that is known by name."""


def register(module: str, networks: Mapping[str, Network]) -> None:
    """Add networks, in this process and, as they import ``module`` first, in all ranks it starts."""
    NETWORKS.update(networks)
    if module not in launch.IMPORTED:
        launch.IMPORTED.append(module)


def find(name: str) -> Network:
    """Return the network of that name, or any by torchvision:NAME.

    Raises UserError for an unknown one, with what it may stand for.
    """
    if name.startswith("torchvision:"):
        plain = name.partition(":")[2]
        return NETWORKS.get(plain) or torchvision_network(plain)
    if name in NETWORKS:
        return NETWORKS[name]
    near = difflib.get_close_matches(name.lower(), sorted(NETWORKS), n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"use {', '.join(NETWORKS)}"
    raise UserError(f"unknown network {name!r}: {advice}")


def require(name: str) -> None:
    """Raise UserError, before anything is measured, for an unknown name and for what is not installed."""
    package = find(name).package
    if package and find_spec(package) is None:
        raise UserError(f"{name} needs {package}; {INSTALL_IT}")


def build(name: str) -> nn.Module:
    """Return the network with random weights, on the CPU, in training mode. Raises UserError as `find`."""
    return find(name).build().train()


def sample_batch(name: str, batch: int, device: torch.device | str = "cpu") -> Batch:
    """Return random inputs and labels for ``batch`` samples, the same at every call. Raises UserError."""
    network = find(name)
    if batch < 1:
        raise UserError(f"batch {batch} of {name}: must be at least 1")
    inputs, labels = network.sample(batch, torch.Generator().manual_seed(0))
    return inputs.to(device), labels.to(device)


# -- FLOP of a forward pass, 2 per multiply-add, alike on every device ---------------------------

Shape = tuple[int, ...]


def recurrence_flops(inputs: Shape, weights: Sequence[Shape]) -> int:
    """Return FLOP of weight matrices that are applied once to every sample of every time step."""
    return 2 * math.prod(inputs[:2]) * sum(math.prod(w) for w in weights if len(w) == 2)


# torch has no formula for these kernels, and counts 0: the same work must count alike everywhere.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten.mkldnn_rnn_layer: (
        lambda inputs, w_inputs, w_states, *_, **__: recurrence_flops(
            inputs, (w_inputs, w_states)
        )
    ),
    torch.ops.aten._cudnn_rnn: lambda inputs, weights, *_, **__: recurrence_flops(
        inputs, weights
    ),
}


def flop_counter() -> Any:
    """Return a context in which the FLOP of every operation add up."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)
