"""The paper's cluster: its networks at given compute times, in one unstated setting.

Batch size and c only enter as T_comp (osf Eqs 4 to 16), and one factor on T_comp, delta,
the timeout and 1/beta changes no scaling factor: an effective rate below the nominal
25 Gbit/s looks like slower GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.plan import FusionPlan, buffer, none
from ddlkit.core.units import GB, KB, MB
from ddlkit.core.workload import Floats, Workload
from workbook.common import networks
from workbook.common.specs import network_named
from workbook.osf.equations import update_s

WORKERS = 32
NETWORK_BYTES_PER_S = 25e9 / 8
FIVE = ("ResNet50", "ResNet101", "ResNet152", "VGG16", "VGG19")
TWO = ("ResNet101", "VGG16")
"""The networks of Figures 4 to 7."""
REPLACED = "VGG16 replaced"
BUFFERS = (KB, MB, 100 * MB, GB)
"""The buffers of Figure 4, in bytes."""
UNITS = ("tensor", "layer")
"""What one message may be of, where nothing is fused."""


def osf_name(network: str) -> str:
    """Return how the paper writes a network of FIVE or ``REPLACED``; StopIteration for another."""
    return next(
        name
        for name in (*FIVE, REPLACED)
        if network_named(name) == network_named(network)
    )


def measured_names() -> list[str]:
    """Return the names under which the five networks are measured here."""
    return [network_named(name) for name in FIVE]


def network_layers(network: str) -> tuple[networks.Layer, ...]:
    """Return layers in forward order.

    ``REPLACED`` is VGG-16 after osf Table 3 (1x1 convolutions, pooling).
    """
    if network != REPLACED:
        return networks.layers(network)
    tail = networks.conv(512, 512, 1, 7), networks.conv(512, 1000, 1, 7)
    return (*networks.layers("VGG16")[:-3], *tail)


@cache
def network_flops(network: str) -> float:
    """Return FLOP of one image's forward pass, two a multiply-add (osf Eq 5's C, summed)."""
    return 2.0 * sum(layer.multiply_adds for layer in network_layers(network))


@lru_cache(maxsize=1024)
def workload(network: str, compute_s: float, unit: str = "tensor") -> Workload:
    """Return a network of osf Table 2 that computes for ``compute_s`` = T_comp (Eqs 4-6).

    A third of it is the forward pass.
    """
    shares, sizes, names, layers = _shape(network, unit)
    return Workload(
        compute_s / 3, 2 / 3 * compute_s * shares, 4 * sizes, sizes, layers, names
    )


@lru_cache(maxsize=32)
def _shape(
    network: str, unit: str
) -> tuple[Floats, Any, tuple[str, ...], tuple[str, ...]]:
    """Return the share of the backward pass, elements, tensor and layer names, all in ready order."""
    listed = network_layers(network)
    total = sum(layer.multiply_adds for layer in listed)
    rows: list[tuple[float, int, str, str]] = []
    for number, layer in reversed(list(enumerate(listed, 1))):
        parts = layer.tensors[::-1] if unit == "tensor" else (sum(layer.tensors),)
        for k, size in enumerate(parts):
            share = 0.0 if k else layer.multiply_adds / total
            rows.append((share, size, f"{number}.{len(parts) - k}", str(number)))
    shares, sizes, names, owners = zip(*rows, strict=True)
    return np.array(shares), np.array(sizes, dtype=np.int64), names, owners


@dataclass(frozen=True)
class PaperSetting:
    """What the paper leaves out. ``compute_s`` is T_comp of ResNet-101 and of VGG-16; families share c.

    ``overhead_s`` is delta at 32 workers; it grows with the N - 1 steps of a ring.
    """

    resnet101_s: float
    vgg16_s: float
    overhead_s: float
    timeout_s: float = math.inf
    unit: str = "tensor"

    def compute_s(self, network: str) -> float:
        """Return T_comp of one of the five networks, or of VGG-16 with its layers replaced."""
        times = {"VGG16": self.vgg16_s, "ResNet101": self.resnet101_s}
        reference = reference_network(network)
        return times[reference] * network_flops(network) / network_flops(reference)

    def workload(self, network: str) -> Workload:
        """Return the network's iteration in this setting."""
        return workload(network, self.compute_s(network), self.unit)

    def with_buffer(
        self, network: str, capacity: int
    ) -> tuple[Workload, FusionPlan, Floats]:
        """Return workload, plan and waits with a fusion buffer (0: without), as `fused`."""
        compute_s = self.compute_s(network)
        return fused(network, compute_s, capacity, self.timeout_s, self.unit)

    def cost(self, workers: int = WORKERS) -> AlphaBeta:
        """osf Eq 7 without additions; PCIe's datasheet rate up to 8 workers, the network's beyond."""
        rate = 8e9 * 16 * 128 / 130 / 8 if workers <= 8 else NETWORK_BYTES_PER_S
        overhead_s = self.overhead_s * (workers - 1) / (WORKERS - 1)
        slope = float(update_s(1.0, workers, rate))
        return AlphaBeta(overhead_s, slope, workers=workers, algorithm="ring")


def reference_network(network: str) -> str:
    """Return the network of the family whose compute time a setting holds."""
    return "VGG16" if network.startswith("VGG") else "ResNet101"


@lru_cache(maxsize=1024)
def fused(
    network: str, compute_s: float, capacity: float, timeout_s: float, unit: str
) -> tuple[Workload, FusionPlan, Floats]:
    """Return a workload, the plan of a buffer with timeout (0: no fusion), and (G,) waits in vain."""
    work = workload(network, compute_s, unit)
    if not capacity:
        unwaited = np.zeros(work.n)
        unwaited.setflags(write=False)
        return work, none(work), unwaited
    plan = buffer(work, int(capacity), timeout_s=timeout_s)
    waited = np.zeros(len(plan.ends))
    sizes = plan.group_bytes(work)
    for group, end in enumerate(plan.ends[:-1]):
        if (
            sizes[group] + work.bytes[end] <= capacity
            and work.backward_s[end] >= timeout_s
        ):
            waited[group] = timeout_s
    waited.setflags(write=False)
    return work, plan, waited


def fused_iteration_s(
    work: Workload, plan: FusionPlan, waited_s: Floats, overhead_s: Floats, slope: float
) -> Floats:
    """Return (D,) iteration times for (D,) overheads: the longest of the ways through the messages."""
    messages = np.arange(len(plan.ends), 0, -1.0)
    bytes_left = np.cumsum(plan.group_bytes(work)[::-1])[::-1]
    fixed = plan.group_ready_s(work) + waited_s + slope * bytes_left
    return np.max(fixed + np.multiply.outer(overhead_s, messages), axis=1)
