"""The networks that are measured: by name, with random weights and random data, nothing downloaded."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ddlkit.core.errors import UserError
from ddlkit.run.nets import zoo
from ddlkit.store import network_named

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Network:
    """How to make a network, and a batch of ``n`` inputs with a label for each row that it puts out."""

    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Batch]


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its CUDA wheel stands beside a CPU torch. Raises UserError.

    There the import dies while describing operators that it has no kernels for, and no network needs.
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


_IMAGENET = _images(channels=3, side=224, classes=1000)


def _torchvision(name: str, side: int = 224, **options: Any) -> Network:
    def build() -> nn.Module:
        network: nn.Module = import_torchvision().models.get_model(name, weights=None, **options)
        return network

    return Network(build, _images(3, side, 1000))


def _words(batch: int, generator: torch.Generator) -> Batch:
    """(batch, steps) words, and the word after each, as (batch x steps) labels."""
    text = torch.randint(zoo.VOCABULARY, (batch, zoo.STEPS + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].flatten()


def _for_each_head(batch: int, generator: torch.Generator) -> Batch:
    images, labels = _IMAGENET(batch, generator)
    return images, labels.repeat(3)


_GOOGLENET_AUX = _torchvision("googlenet", aux_logits=True, init_weights=False)
NETWORKS: dict[str, Network] = {
    "lenet5": Network(zoo.lenet5, _images(channels=1, side=28, classes=10)),
    "alexnet_caffe": Network(zoo.alexnet_caffe, _images(channels=3, side=227, classes=1000)),
    # Without the auxiliary heads: they help training to converge and are no part of what it leaves.
    "googlenet": _torchvision("googlenet", aux_logits=False, init_weights=False),
    # With both, as in the published training: twice the bytes to exchange.
    "googlenet_aux": Network(lambda: zoo.AllHeads(_GOOGLENET_AUX.build()), _for_each_head),
    "inception_v4": Network(zoo.inception_v4, _images(channels=3, side=299, classes=1000)),
    "lstm_ptb": Network(zoo.LanguageModel, _words),
    "vgg16_cifar": Network(zoo.vgg16_cifar, _images(channels=3, side=32, classes=10)),
    "vgg16_replaced": Network(zoo.vgg16_replaced, _IMAGENET),
    # Layers come with random weights; drawing VGG's 138 million once more takes two seconds.
    **{name: _torchvision(name, init_weights=False) for name in ("vgg16", "vgg19")},
    **{name: _torchvision(name) for name in ("alexnet", "vit_b_16")},
    **{name: _torchvision(name) for name in ("resnet18", "resnet50", "resnet101", "resnet152")},
    "squeezenet1_1": _torchvision("squeezenet1_1"),
    # Small pictures: two cores then compute about as long as they decode, as GPUs do with large ones.
    **{f"{name}_64": _torchvision(name, side=64) for name in ("resnet18", "resnet50")},
    "googlenet_64": _torchvision("googlenet", side=64, aux_logits=False, init_weights=False),
}


def find(name: str) -> Network:
    """Return the network of that name. Raises UserError for an unknown one, with what it may stand for."""
    if name in NETWORKS:
        return NETWORKS[name]
    raise UserError(f"unknown network {name!r}: did you mean {network_named(name)!r}?")


def build(name: str) -> nn.Module:
    """The network with random weights, on the CPU, in training mode. Raises UserError as `find`."""
    return find(name).build().train()


class Size(NamedTuple):
    """How large a network is; FLOP of the forward pass on one sample, 2 per multiply-add."""

    parameters: int
    tensors: int
    forward_flops: int


def size(name: str) -> Size:
    """Count on shapes alone, so also for a network that memory would not hold. Raises UserError as `find`."""
    with torch.device("meta"):
        network = build(name)
    inputs, _ = sample_batch(name, 1, "meta")
    with torch.no_grad(), flop_counter() as counter:
        network(inputs)
    tensors = [parameter.numel() for parameter in network.parameters()]
    return Size(sum(tensors), len(tensors), counter.get_total_flops())


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
    """Each weight matrix is applied once to every sample of every time step."""
    return 2 * math.prod(inputs[:2]) * sum(math.prod(w) for w in weights if len(w) == 2)


# torch has no formula for these kernels, and counts 0: the same work must count alike everywhere.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
    torch.ops.aten.mkldnn_rnn_layer: (
        lambda inputs, w_inputs, w_states, *_, **__: recurrence_flops(inputs, (w_inputs, w_states))
    ),
    torch.ops.aten._cudnn_rnn: lambda inputs, weights, *_, **__: recurrence_flops(inputs, weights),
}


def flop_counter() -> Any:
    """A context in which the FLOP of every operation add up; ask it with ``get_total_flops``."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)
