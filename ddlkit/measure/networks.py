"""The networks that can be measured by name.

They have random weights and are fed random data, so nothing is downloaded. These are
networks of torchvision. Other packages may register networks of their own by
`register`.
"""

from __future__ import annotations

import difflib
import functools
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
"""Inputs and labels."""
INSTALL_IT = (
    "install it with: pip install 'ddlkit[networks]', or, to keep this torch: "
    "pip install --no-deps torchvision"
)


@dataclass(frozen=True)
class Network:
    """How a network and its data are made.

    Attributes
    ----------
    build : callable
        Returns the network with random weights.
    sample : callable
        Takes a batch size n and a generator. Returns n inputs, and a label for each row
        of the network's output.
    package : str
        The package that must be installed besides torch, if any.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[int, torch.Generator], Batch]
    package: str = ""


def import_torchvision() -> ModuleType:
    """Import torchvision, even if its build is for CUDA and that of torch for the CPU.

    Returns
    -------
    module
        torchvision.

    Raises
    ------
    UserError
        If torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ImportError as error:
        raise UserError(
            f"torchvision cannot be imported ({error}); {INSTALL_IT}"
        ) from None
    except RuntimeError as error:
        # On import torchvision describes its operators to torch, in the module
        # `_meta_registrations`. That fails for an operator whose kernel did not load,
        # as in a build for CUDA. No network here needs such operators, so an empty
        # module takes the place of these descriptions before the second import.
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        descriptions = "torchvision._meta_registrations"
        sys.modules[descriptions] = ModuleType(descriptions)
        return importlib.import_module("torchvision")


def images(
    channels: int, side: int, classes: int
) -> Callable[[int, torch.Generator], Batch]:
    """Return a function that draws batches of random square images with labels.

    Parameters
    ----------
    channels, side : int
        The shape of an image is (channels, side, side).
    classes : int
        How many different labels there are.

    Returns
    -------
    callable
        A function for `Network.sample`, which takes a batch size and a generator.
    """

    def sample(batch: int, generator: torch.Generator) -> Batch:
        pixels = torch.randn(batch, channels, side, side, generator=generator)
        labels = torch.randint(classes, (batch,), generator=generator)
        return pixels, labels

    return sample


IMAGENET = images(channels=3, side=224, classes=1000)


def torchvision_network(name: str, **options: Any) -> Network:
    """Return a network of torchvision.

    Parameters
    ----------
    name : str
        The name of the network in torchvision.
    **options
        Arguments of its constructor, in place of those of `_OPTIONS`.

    Returns
    -------
    Network
        The network, on images of the shape of ImageNet's. Building it raises
        `UserError` if torchvision is missing, or if it has no such network for the
        classification of images.
    """

    def build() -> nn.Module:
        models = import_torchvision().models
        refuse_unless_classifying_images(name)
        arguments = {**_OPTIONS.get(name, {}), **options}
        network: nn.Module = models.get_model(name, weights=None, **arguments)
        return network

    return Network(build, IMAGENET, package="torchvision")


def refuse_unless_classifying_images(name: str) -> None:
    """Refuse a name that is not a network of torchvision for the classification of images.

    Networks of other kinds, such as those that detect objects, take other data than
    `IMAGENET`, and return no row of scores for each image.

    Parameters
    ----------
    name : str
        The name of the network in torchvision.

    Raises
    ------
    UserError
        If there is no such network, or if it is of another kind.
    """
    models = import_torchvision().models
    # The networks for images are in this module itself, and those of other kinds in modules
    # within it.
    classifying = models.list_models(module=models)
    if name in classifying:
        return
    if name in models.list_models():
        raise UserError(
            f"{name!r} does not classify images, and only networks that do can be measured by "
            "name: write a function that returns the model and its loss, and give it to ddlkit "
            "measure layers, advise or trace by --model FILE.py:FUNCTION"
        )
    advice = _advice_on_name(name, classifying, prefix="torchvision:")
    raise UserError(f"torchvision has no network {name!r}: {advice}")


# The arguments of the constructors of some networks. The others are built with torchvision's own
# defaults.
_OPTIONS: dict[str, dict[str, Any]] = {
    # The auxiliary heads help training to converge. They are no part of the trained
    # network, and those of Inception need larger images than ImageNet's.
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
    # Layers come with random weights. To draw VGG's 138 million again takes two
    # seconds.
    "vgg16": {"init_weights": False},
    "vgg19": {"init_weights": False},
}
_OF_TORCHVISION = (
    "googlenet",
    "vgg16",
    "vgg19",
    "alexnet",
    "vit_b_16",
    "squeezenet1_1",
    "mobilenet_v3_small",
    "resnet18",
    "resnet50",
    "resnet101",
    "resnet152",
)
NETWORKS: dict[str, Network] = {
    name: torchvision_network(name) for name in _OF_TORCHVISION
}
"""Every network that is known by name."""


def register(module: str, networks: Mapping[str, Network]) -> None:
    """Make networks known by name, in this process and in all ranks that it starts.

    Parameters
    ----------
    module : str
        The module that calls this function when it is imported. Each rank imports this
        module before its job, and so knows the networks, too.
    networks : mapping of str to Network
        The networks by their names.
    """
    NETWORKS.update(networks)
    if module not in launch.IMPORTED:
        launch.IMPORTED.append(module)


def find(name: str) -> Network:
    """Return a network by its name.

    Parameters
    ----------
    name : str
        One of `NETWORKS`, or ``"torchvision:NAME"`` for any network of torchvision that
        classifies images.

    Returns
    -------
    Network

    Raises
    ------
    UserError
        If the name is unknown. The message lists known names, after the most similar one.
        Without torchvision, its names are refused only when the network is built.
    """
    if name.startswith("torchvision:"):
        short_name = name.removeprefix("torchvision:")
        # A name in NETWORKS is known to be right, without an import of torchvision. Without
        # torchvision, the name is checked only when the network is built.
        if short_name not in NETWORKS and find_spec("torchvision") is not None:
            refuse_unless_classifying_images(short_name)
        return NETWORKS.get(short_name) or torchvision_network(short_name)
    if name in NETWORKS:
        return NETWORKS[name]
    advice = _advice_on_name(name, [*NETWORKS])
    raise UserError(f"unknown network {name!r}: {advice}")


_MOST_LISTED = 12
"""The most known names that an error lists. Torchvision has more than a hundred."""


def _advice_on_name(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Return advice on an unknown name: the most similar known one, and the known ones.

    ``prefix`` is what a user writes before each of the ``known`` names. Without one, these are
    `NETWORKS`, and any network of torchvision is known besides.
    """
    # A number is probably a batch size that was meant to follow a name.
    if name.isdigit():
        return (
            "the batch size follows the name of a network and a colon, as in resnet18:4"
        )
    # At this cutoff a known name is similar if it differs in a letter or two.
    similar = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.8)
    guess = f"did you mean {prefix + similar[0]!r}? Otherwise " if similar else ""
    listed = ", ".join(prefix + known_name for known_name in known[:_MOST_LISTED])
    if len(known) > _MOST_LISTED:
        listed += f" and {len(known) - _MOST_LISTED} more"
    advice = f"{guess}use one of {listed}"
    if not prefix:
        advice += (
            ", or any network of torchvision that classifies images, as in "
            "torchvision:densenet121"
        )
    return advice


def require(name: str) -> None:
    """Refuse a network that cannot be built, before anything is measured.

    Parameters
    ----------
    name : str
        The name of the network.

    Raises
    ------
    UserError
        If the name is unknown, or if the network needs a package that is not installed.
    """
    package = find(name).package  # "" if the network needs none besides torch
    if package and find_spec(package) is None:
        raise UserError(f"{name} needs {package}; {INSTALL_IT}")


def build(name: str) -> nn.Module:
    """Return a network with random weights, on the CPU, in training mode.

    Parameters
    ----------
    name : str
        The name of the network.

    Returns
    -------
    Module

    Raises
    ------
    UserError
        If the name is unknown, or if the network needs a package that is not installed.
    """
    return find(name).build().train()


def sample_batch(name: str, batch: int, device: torch.device | str = "cpu") -> Batch:
    """Return random data for a network, the same at every call.

    Parameters
    ----------
    name : str
        The name of the network.
    batch : int
        How many samples to draw.
    device : torch.device or str, optional
        Where the data lie.

    Returns
    -------
    inputs : Tensor, shape (batch, ...)
    labels : Tensor
        A label for each row of the network's output.

    Raises
    ------
    UserError
        If the network is unknown, or if ``batch`` is not positive.
    """
    network = find(name)
    if batch < 1:
        raise UserError(f"batch {batch} of {name}: must be at least 1")
    # A new generator with a fixed seed gives the same data at every call.
    inputs, labels = network.sample(batch, torch.Generator().manual_seed(0))
    return inputs.to(device), labels.to(device)


# -- FLOPs of a forward pass, 2 per multiply-add, alike on every device ----------------

Shape = tuple[int, ...]


def recurrence_flops(inputs: Shape, weights: Sequence[Shape]) -> int:
    """Return the FLOPs of a recurrent layer.

    Each weight matrix is applied once to every sample of every time step, with 2 FLOPs
    for each of its elements: a product and a sum.

    Parameters
    ----------
    inputs : tuple of int
        The shape of the inputs, whose first two axes are samples and time steps, in
        either order.
    weights : sequence of tuple of int
        The shapes of the weights. Those of biases, which have one axis, are ignored.

    Returns
    -------
    int

    Examples
    --------
    >>> recurrence_flops((7, 3, 6), [(20, 6), (20, 5), (20,)])
    9240
    """
    matrices = [shape for shape in weights if len(shape) == 2]  # without biases
    elements = sum(math.prod(shape) for shape in matrices)
    # The product of the numbers of samples and of time steps.
    applications = math.prod(inputs[:2])
    return 2 * applications * elements


# A formula gets the shapes of an operator's arguments. Those that it does not need are
# collected in `_` and `__`.
def _attention_on_cpu(
    query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
) -> Any:
    return sdpa_flop_count(query, key, value)


def _recurrence_of_mkldnn(
    inputs: Shape, input_weights: Shape, state_weights: Shape, *_: Any, **__: Any
) -> int:
    return recurrence_flops(inputs, (input_weights, state_weights))


def _recurrence_of_cudnn(
    inputs: Shape, weights: Sequence[Shape], *_: Any, **__: Any
) -> int:
    return recurrence_flops(inputs, weights)


# torch has no formula for these kernels and counts 0 for them. The same work must count
# the same on every device.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
    torch.ops.aten.mkldnn_rnn_layer: _recurrence_of_mkldnn,
    torch.ops.aten._cudnn_rnn: _recurrence_of_cudnn,
}


def flop_counter() -> Any:
    """Return a context manager that counts the FLOPs of all operations.

    Returns
    -------
    torch.utils.flop_counter.FlopCounterMode
        Its method ``get_total_flops`` returns the count so far.
    """
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


# -- how large a network is, without computing with it -----------------------------------

SAMPLES_COUNTED = 2
"""The batch whose FLOPs are counted. Batch normalization needs more than one sample."""


@dataclass(frozen=True)
class Size:
    """How much a network computes, and how much of it is exchanged.

    Attributes
    ----------
    flops_of_sample : float
        The FLOPs of the forward pass of one sample, 2 per multiply-add.
    gradient_bytes : int
        The bytes of all gradients.
    """

    flops_of_sample: float
    gradient_bytes: int


@functools.cache
def size_of(name: str) -> Size | None:
    """Return the size of a network, without the memory for it and without computing.

    Parameters
    ----------
    name : str
        The name of the network.

    Returns
    -------
    Size or None
        None if the network cannot be counted in this way, because a package is missing or
        because its forward pass depends on the values of tensors.

    Raises
    ------
    UserError
        If the name is unknown.

    Examples
    --------
    >>> size = size_of("resnet18")
    >>> round(size.flops_of_sample / 1e9, 1), size.gradient_bytes
    (3.6, 46758048)
    """
    network = find(name)
    if network.package and find_spec(network.package) is None:
        return None
    inputs, _ = network.sample(SAMPLES_COUNTED, torch.Generator().manual_seed(0))
    try:
        # Tensors of the device "meta" have shapes and no values.
        with torch.device("meta"):
            model = network.build().train()
        with flop_counter() as counter:
            model(inputs.to("meta"))
    except RuntimeError:
        # torch raises this error, or a subclass of it, for an operation that needs values.
        return None
    gradient_bytes = sum(
        parameter.nbytes for parameter in model.parameters() if parameter.requires_grad
    )
    return Size(counter.get_total_flops() / SAMPLES_COUNTED, gradient_bytes)
