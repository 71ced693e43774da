"""The paper's cluster: its networks at given compute times, in one unstated setting.

The batch size and c enter osf Eqs 4 to 16 only by the compute time T_comp. No scaling
factor changes if T_comp, delta, the timeout and 1/beta are all multiplied by the same
number. A network that is slower than its nominal 25 Gbit/s thus looks like faster GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.plan import FusionPlan, buffer, none
from ddlkit.core.units import GB, KB, MB
from ddlkit.core.workload import Floats, Ints, Workload
from workbook.common import networks
from workbook.common.specs import network_named
from workbook.osf.equations import update_s

WORKERS = 32
NETWORK_BYTES_PER_S = 25e9 / 8
FIVE = ("ResNet50", "ResNet101", "ResNet152", "VGG16", "VGG19")
"""The networks of Table 2."""
TWO = ("ResNet101", "VGG16")
"""The networks of Figures 4 to 7."""
REPLACED = "VGG16 replaced"
"""VGG-16 with the layers of Table 3 replaced."""
BUFFERS = (KB, MB, 100 * MB, GB)
"""The buffers of Figure 4, in bytes."""
UNITS = ("tensor", "layer")
"""What one message carries if nothing is fused."""


def osf_name(network: str) -> str:
    """Return how the paper writes one of the networks FIVE or ``REPLACED``.

    Parameters
    ----------
    network : str
        The network in any spelling.

    Raises
    ------
    UserError
        If the network is not known at all.
    StopIteration
        If it is another known network.
    """
    # Every spelling of a network gives the same name, under which the network is measured.
    wanted = network_named(network)
    return next(name for name in (*FIVE, REPLACED) if network_named(name) == wanted)


def measured_names() -> list[str]:
    """Return the names under which the five networks are measured."""
    return [network_named(name) for name in FIVE]


def network_layers(network: str) -> tuple[networks.Layer, ...]:
    """Return the layers of a network in forward order.

    In ``REPLACED``, 1x1 convolutions and pooling replace the three dense layers of
    VGG-16 (Table 3). Pooling has no parameters and is left out.
    """
    if network != REPLACED:
        return networks.layers(network)
    # The last three layers of VGG-16 are the dense ones.
    convolutions = networks.layers("VGG16")[:-3]
    # The last convolution and its pooling give 512 channels of 7x7. A convolution of 1x1
    # keeps the 7x7. The second one has a channel for each of the 1000 classes.
    first = networks.conv(512, 512, kernel=1, side=7)
    second = networks.conv(512, 1000, kernel=1, side=7)
    return (*convolutions, first, second)


@cache
def network_flops(network: str) -> float:
    """Return the FLOP of one image's forward pass, the sum of C in osf Eq 5.

    A multiply-add is two operations.
    """
    return 2.0 * sum(layer.multiply_adds for layer in network_layers(network))


@lru_cache(maxsize=1024)
def workload(network: str, compute_s: float, unit: str = "tensor") -> Workload:
    """Return the iteration of a network with a given compute time (osf Eqs 4-6).

    Parameters
    ----------
    network : str
        A network of Table 2, or ``REPLACED``.
    compute_s : float
        T_comp in seconds. A third of it is the forward pass, because the backward pass
        takes twice as long (Eq 4).
    unit : {"tensor", "layer"}, optional
        What one message carries if nothing is fused. With "layer", the gradients of a layer
        are one tensor of the workload.
    """
    shape = _shape(network, unit)
    return Workload(
        forward_s=compute_s / 3,
        backward_s=2 / 3 * compute_s * shape.backward_shares,
        # The parameters are float32.
        bytes=4 * shape.parameters,
        parameters=shape.parameters,
        layer=shape.layers,
        tensor=shape.tensors,
    )


@dataclass(frozen=True)
class _Shape:
    """The n messages of a network without fusion, in ready order.

    Attributes
    ----------
    backward_shares : ndarray, shape (n,)
        By which share of the backward pass each message is ready later than the one before it.
    parameters : ndarray of int, shape (n,)
        The number of parameters whose gradients each message carries.
    layers, tensors : tuple of str, length n
        The number of the layer, such as "3", and of the tensor, such as "3.1".
    """

    backward_shares: Floats
    parameters: Ints
    layers: tuple[str, ...]
    tensors: tuple[str, ...]


@lru_cache(maxsize=32)
def _shape(network: str, unit: str) -> _Shape:
    """Return the messages of a network without fusion, in ready order.

    Each message carries a ``unit``, which is "tensor" or "layer".
    """
    layers = network_layers(network)
    total_multiply_adds = sum(layer.multiply_adds for layer in layers)
    shares: list[float] = []
    parameters: list[int] = []
    layer_names: list[str] = []
    tensor_names: list[str] = []
    # The backward pass begins with the last layer, and there with the last tensor.
    for number, layer in reversed(list(enumerate(layers, 1))):
        # The number of parameters in each message of the layer.
        sizes = list(reversed(layer.tensors))
        if unit == "layer":
            sizes = [sum(layer.tensors)]
        parameters += sizes
        layer_names += [str(number)] * len(sizes)
        # Names count the tensors of a layer from 1 in forward order. The messages are in the
        # reverse order, so that the names count down.
        tensor_names += [f"{number}.{k}" for k in range(len(sizes), 0, -1)]
        # The backward time of a layer is in proportion to its operations (Eqs 5 and 6).
        layer_share = layer.multiply_adds / total_multiply_adds
        # The first message of a layer waits for its backward pass. The others are ready at
        # the same time.
        shares += [layer_share] + [0.0] * (len(sizes) - 1)
    return _Shape(
        np.array(shares),
        np.array(parameters, dtype=np.int64),
        tuple(layer_names),
        tuple(tensor_names),
    )


@dataclass(frozen=True)
class PaperSetting:
    """The numbers of the cluster that the paper does not state.

    Attributes
    ----------
    resnet101_s, vgg16_s : float
        T_comp of ResNet-101 and of VGG-16, in seconds. The other networks of a family
        reach the same share c of the peak rate.
    overhead_s : float
        The overhead delta of a message between 32 workers, in seconds. It grows with
        the N - 1 steps of a ring.
    timeout_s : float
        How long the fusion buffer waits for the next tensor, in seconds.
    unit : {"tensor", "layer"}
        What one message carries if nothing is fused.
    """

    resnet101_s: float
    vgg16_s: float
    overhead_s: float
    timeout_s: float = math.inf
    unit: str = "tensor"

    def compute_s(self, network: str) -> float:
        """Return T_comp of one of the five networks or of ``REPLACED``, in seconds."""
        reference = reference_network(network)
        reference_s = self.vgg16_s if reference == "VGG16" else self.resnet101_s
        return reference_s * network_flops(network) / network_flops(reference)

    def workload(self, network: str) -> Workload:
        """Return the iteration of a network in this setting."""
        return workload(network, self.compute_s(network), self.unit)

    def with_buffer(
        self, network: str, capacity: int
    ) -> tuple[Workload, FusionPlan, Floats]:
        """Return a network's iteration with a fusion buffer, and its messages.

        Parameters
        ----------
        network : str
            The network.
        capacity : int
            The size of the buffer in bytes, or 0 for no fusion.

        Returns
        -------
        work : Workload
            The iteration.
        plan : FusionPlan
            The G messages.
        waited_s : ndarray, shape (G,)
            How long each message waits in vain for one more tensor, in seconds: the
            timeout of the setting if the message leaves because of the timeout, and
            otherwise 0.
        """
        compute_s = self.compute_s(network)
        return fused(network, compute_s, capacity, self.timeout_s, self.unit)

    def cost(self, workers: int = WORKERS) -> AlphaBeta:
        """Return the time of a message by osf Eq 7, in which additions take no time here.

        Up to 8 workers are in one machine (Section 3.1), and their link has the rate of PCIe's
        data sheet. More workers communicate by the network.
        """
        bytes_per_s = NETWORK_BYTES_PER_S
        if workers <= 8:
            # PCIe 3.0 has 16 lanes of 8e9 bits per second here, of which 128 in 130 are data. A
            # byte has 8 bits.
            bytes_per_s = 8e9 * 16 * 128 / 130 / 8
        # ``self.overhead_s`` is that of WORKERS workers. It grows with the steps of a ring,
        # which are one fewer than its workers.
        overhead_s = self.overhead_s * (workers - 1) / (WORKERS - 1)
        s_per_byte = float(update_s(1.0, workers, bytes_per_s))
        return AlphaBeta(overhead_s, s_per_byte, workers=workers, algorithm="ring")


def reference_network(network: str) -> str:
    """Return the network of the same family whose compute time a setting has."""
    return "VGG16" if network.startswith("VGG") else "ResNet101"


@lru_cache(maxsize=1024)
def fused(
    network: str, compute_s: float, capacity: float, timeout_s: float, unit: str
) -> tuple[Workload, FusionPlan, Floats]:
    """Return the iteration of a network with a fusion buffer, and its messages.

    Parameters
    ----------
    network, compute_s, unit
        As of `workload`.
    capacity : float
        The size of the buffer in bytes, or 0 for no fusion.
    timeout_s : float
        How long the buffer waits for the next tensor, in seconds. It may be infinite.

    Returns
    -------
    work : Workload
        The iteration.
    plan : FusionPlan
        The G messages.
    waited_s : ndarray, shape (G,)
        How long each message waits in vain for one more tensor, in seconds: ``timeout_s``
        if the message leaves because of the timeout, and otherwise 0. The array must not be
        changed.
    """
    work = workload(network, compute_s, unit)
    if capacity == 0:
        plan = none(work)
        waited_s = np.zeros(len(plan.ends))
    else:
        # A tensor is late if its backward pass takes at least as long as the buffer waits.
        is_late = work.backward_s >= timeout_s
        # The array is passed as bytes, because a cache needs hashable arguments.
        plan, has_waited = _buffered(network, capacity, unit, is_late.tobytes())
        waited_s = np.where(has_waited, timeout_s, 0.0)
    # All callers get the same array from the cache, so that none of them may change it.
    waited_s.setflags(write=False)
    return work, plan, waited_s


@lru_cache(maxsize=4096)
def _buffered(
    network: str, capacity: float, unit: str, late_tensors: bytes
) -> tuple[FusionPlan, NDArray[np.bool_]]:
    """Return the messages of a buffer, and which of them wait in vain for one more tensor.

    A tensor is late if its backward pass takes at least as long as the buffer waits. The times of
    a setting matter only by which tensors are late. Plans are therefore cached by the late
    tensors, so that thousands of settings share a few plans.

    Parameters
    ----------
    network, capacity, unit
        As of `fused`.
    late_tensors : bytes
        The bytes of an array of bool, which says of each of n tensors in ready order whether
        it is late. The array itself could not be the key of a cache.

    Returns
    -------
    plan : FusionPlan
        The G messages.
    has_waited : ndarray of bool, shape (G,)
        Whether each message waits in vain.
    """
    is_late = np.frombuffer(late_tensors, bool)
    # Any compute time will do here, because the backward times are replaced.
    some_workload = workload(network, compute_s=1.0, unit=unit)
    # `buffer` only compares the time of a tensor with the timeout. With a timeout of 1 s, late
    # tensors may thus take 1 s, and all others no time.
    work = replace(some_workload, backward_s=is_late.astype(float))
    plan = buffer(work, int(capacity), timeout_s=1.0)
    # A message waits in vain if it has room for the next tensor, but the next tensor is late.
    # The last message has no next tensor, and waits for none.
    has_waited = np.zeros(len(plan.ends), bool)
    # The index of the first tensor after each message but the last. The ends are exclusive.
    next_tensors = np.array(plan.ends[:-1], int)
    sizes = plan.group_bytes(work)[:-1]
    has_room = sizes + work.bytes[next_tensors] <= capacity
    has_waited[:-1] = has_room & is_late[next_tensors]
    return plan, has_waited


def fused_iteration_s(
    work: Workload,
    plan: FusionPlan,
    waited_s: Floats,
    overhead_s: Floats,
    s_per_byte: float,
) -> Floats:
    """Return the time of an iteration for each of several overheads.

    Parameters
    ----------
    work, plan, waited_s
        What `fused` returns: what the iteration computes, its G messages, and how long each
        message waits in vain for one more tensor before it may leave, in seconds.
    overhead_s : ndarray, shape (D,)
        Values of the overhead delta of a message, in seconds.
    s_per_byte : float
        The time of each byte of a message, in seconds.

    Returns
    -------
    ndarray, shape (D,)
        The iterations in seconds.

    Notes
    -----
    Messages are sent one after the other. The iteration is the largest value over all
    messages g of

    leave(g) + s_per_byte * bytes(g) + delta * messages(g),

    where message g may leave at leave(g), and bytes(g) and messages(g) are what is left to
    send from message g on. The iteration takes at least as long for each g, because all of
    this is sent after leave(g). It takes just as long for the last message that finds the
    link free, because from then on the link is busy to the end.
    """
    # Summed from the last message backwards, the message itself included.
    messages_left = np.arange(len(plan.ends), 0, -1.0)
    bytes_left = np.cumsum(plan.group_bytes(work)[::-1])[::-1]
    leave_s = plan.group_ready_s(work) + waited_s
    end_without_overheads_s = leave_s + s_per_byte * bytes_left
    # Shape (D, G).
    overheads_left_s = np.multiply.outer(overhead_s, messages_left)
    return np.max(end_without_overheads_s + overheads_left_s, axis=1)
