"""The paper's cluster: osf's networks at given compute times, and which unstated settings fit what it states.

Batch size and c only enter as T_comp (osf Eqs 4 to 16), and one factor on T_comp, delta, the timeout and
1/beta changes no scaling factor: an effective rate below the nominal 25 Gbit/s looks like slower GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import predict
from ddlkit.core.plan import FusionPlan, buffer, make_plan, none
from ddlkit.core.units import GB, KB, MB
from ddlkit.core.workload import Floats, Workload
from workbook.common import networks
from workbook.common.specs import network_named
from workbook.osf.equations import merged, update_s

if TYPE_CHECKING:
    import pandas as pd

WORKERS = 32
NETWORK_BYTES_PER_S = 25e9 / 8
FIVE = ("ResNet50", "ResNet101", "ResNet152", "VGG16", "VGG19")
REPLACED = "VGG16 replaced"
BUFFERS = (KB, MB, 100 * MB, GB)
UNITS = ("tensor", "layer")


def osf_name(network: str) -> str:
    """Return how the paper writes a network of FIVE or ``REPLACED``; StopIteration for another."""
    return next(
        name
        for name in (*FIVE, REPLACED)
        if network_named(name) == network_named(network)
    )


def network_layers(network: str) -> tuple[networks.Layer, ...]:
    """Return layers in forward order; REPLACED is VGG-16 after osf Table 3 (1x1 convolutions, pooling)."""
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
    """Return a network of osf Table 2 that computes for ``compute_s`` = T_comp (Eqs 4-6), a third forward."""
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
        reference = _reference(network)
        return times[reference] * network_flops(network) / network_flops(reference)

    def workload(self, network: str) -> Workload:
        """Return the network's iteration in this setting."""
        return workload(network, self.compute_s(network), self.unit)

    def cost(self, workers: int = WORKERS) -> AlphaBeta:
        """osf Eq 7 without additions; PCIe's datasheet rate up to 8 workers, the network's beyond."""
        rate = 8e9 * 16 * 128 / 130 / 8 if workers <= 8 else NETWORK_BYTES_PER_S
        overhead_s = self.overhead_s * (workers - 1) / (WORKERS - 1)
        slope = float(update_s(1.0, workers, rate))
        return AlphaBeta(overhead_s, slope, workers=workers, algorithm="ring")


def _reference(network: str) -> str:
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


@dataclass(frozen=True)
class Grid:
    """Settings to scan: every unit with every combination of the times in ``free``, ``points`` of most."""

    points: int = 61

    @cached_property
    def free(self) -> dict[str, Floats]:
        """Return the scanned times by field of `PaperSetting`, in the order of the axes after the units."""
        compute_s = np.geomspace(0.01, 3.0, self.points)
        timeout_s = np.append(np.geomspace(1e-4, 0.1, 10), math.inf)
        times = {
            "timeout_s": timeout_s,
            "overhead_s": np.geomspace(1e-5, 1e-2, self.points),
        }
        return {**times, "resnet101_s": compute_s, "vgg16_s": compute_s}

    @property
    def shape(self) -> tuple[int, ...]:
        """Return counts of units, timeouts, overheads, compute times of ResNet-101, of VGG-16."""
        return (len(UNITS), *(len(scanned) for scanned in self.free.values()))

    def setting(self, index: Sequence[int]) -> PaperSetting:
        """Return the setting at one place of the grid, given in the order of ``shape``."""
        places = zip(self.free.items(), index[1:], strict=True)
        times_s = {name: float(scanned[place]) for (name, scanned), place in places}
        return PaperSetting(**times_s, unit=UNITS[index[0]])


def quantities(
    grid: Grid, of_fig4: int = WORKERS, of_fig8: Sequence[int] = (0, 0)
) -> dict[str, Floats]:
    """Return what the paper states, computed for every setting; each array broadcasts to ``grid.shape``.

    of_fig4 : workers of Fig 4a; of_fig8 : buffers of Fig 8, of VGG-16 and replaced: both are not stated
    """
    one = {network: _family(network, grid, WORKERS) for network in (*FIVE, REPLACED)}
    resnet, vgg, fig4 = (
        one["ResNet101"],
        one["VGG16"],
        _family("ResNet101", grid, of_fig4),
    )
    errors = [one[network]["csf"] / one[network]["sf_0"] - 1 for network in FIVE]
    sizes = np.abs(np.stack(np.broadcast_arrays(*errors)))
    against = [fig4["csf"] / fig4[f"sf_{size}"] - 1 for size in BUFFERS]
    return {
        "VGG-16: scaling factor": vgg[f"sf_{of_fig8[0]}"],
        "VGG-16 replaced: scaling factor": one[REPLACED][f"sf_{of_fig8[1]}"],
        "VGG-16: change up to 100 MB": vgg[f"sf_{100 * MB}"] / vgg["sf_0"] - 1,
        "VGG-16: share of one layer": _largest_share(grid),
        "VGG-16: loss at 1 GB": 1 - vgg[f"sf_{GB}"] / vgg["sf_0"],
        "VGG-16: communication at 1 GB": vgg[f"update_{GB}"] / vgg["update_0"] - 1,
        "ResNet-101: gain at 1 GB": resnet[f"sf_{GB}"] / resnet["sf_0"] - 1,
        "ResNet-101: gain at 100 MB": resnet[f"sf_{100 * MB}"] / resnet["sf_0"] - 1,
        "ResNet-101: 100 MB over 1 GB": resnet[f"sf_{100 * MB}"] / resnet[f"sf_{GB}"]
        - 1,
        "ResNet-101: ALLREDUCE share": resnet["share_0"],
        "ResNet-101: largest CSF error": np.max(np.abs(np.stack(against)), axis=0),
        "ResNet-101: CSF above at 1 KB, 1 MB": np.minimum(against[0], against[1]),
        "ResNet-101: CSF below at 100 MB, 1 GB": np.maximum(against[2], against[3]),
        "five: smallest CSF error": sizes.min(axis=0),
        "five: largest CSF error": sizes.max(axis=0),
        "ResNets: CSF above SF": np.min(np.stack(errors[:3]), axis=0),
    }


def _largest_share(grid: Grid) -> Floats:
    """Return the share of VGG-16's largest layer in what all messages take (osf Eq 7), by grid setting."""
    layers = [layer.tensors for layer in networks.layers("VGG16")]
    sent_s = update_s(
        np.array([4.0 * sum(of) for of in layers]), WORKERS, NETWORK_BYTES_PER_S
    )
    shares = []
    for unit in UNITS:
        messages = np.array(
            [len(tensors) if unit == "tensor" else 1 for tensors in layers]
        )
        each_s = sent_s + np.multiply.outer(grid.free["overhead_s"], messages)
        shares.append(each_s[:, np.argmax(sent_s)] / each_s.sum(axis=1))
    return np.array(shares)[:, None, :, None, None]


@lru_cache(maxsize=8)
def _family(network: str, grid: Grid, workers: int) -> dict[str, Floats]:
    """Return SF by buffer, CSF, T_update and its busy share, over the grid; 1 wide along the other's axis."""
    reference, slope = (
        _reference(network),
        float(update_s(1.0, workers, NETWORK_BYTES_PER_S)),
    )
    times = grid.free["vgg16_s" if reference == "VGG16" else "resnet101_s"]
    timeouts_s = grid.free["timeout_s"]
    overheads_s = grid.free["overhead_s"] * (workers - 1) / (WORKERS - 1)
    ratio = network_flops(network) / network_flops(reference)
    buffered = {"ResNet101": BUFFERS, "VGG16": BUFFERS, REPLACED: (100 * MB,)}
    capacities = 0, *buffered.get(network, ())
    shape = len(UNITS), len(timeouts_s), len(overheads_s), len(times)
    names = [f"{what}_{c}" for c in capacities for what in ("sf", "update", "share")]
    found = {name: np.empty(shape) for name in (*names, "csf")}
    for (u, unit), (t, compute_s) in product(
        enumerate(UNITS), enumerate(ratio * times)
    ):
        sending_s = slope * workload(network, compute_s, unit).bytes.sum()
        found["csf"][u, :, :, t] = compute_s / (compute_s + (overheads_s + sending_s))
        for capacity in capacities:
            for k, timeout_s in enumerate(timeouts_s if capacity else timeouts_s[:1]):
                place = (u, k if capacity else slice(None), slice(None), t)
                work, plan, waited = fused(
                    network, compute_s, capacity, timeout_s, unit
                )
                taken = fused_iteration_s(work, plan, waited, overheads_s, slope)
                update = taken - work.ready_s[0]
                found[f"sf_{capacity}"][place] = compute_s / taken
                found[f"update_{capacity}"][place] = update
                busy = len(plan.ends) * overheads_s + sending_s
                found[f"share_{capacity}"][place] = busy / update
    other = -2 if reference == "VGG16" else -1
    return {name: np.expand_dims(values, other) for name, values in found.items()}


CONSTANT = 100 * MB
MORE = {
    size * MB for size in (3, 10, 25, 30, 64, 300)
}  # what frameworks have, and between
READINGS = {
    "mg_wfbp:osf": "all sent so far",
    "own": "a layer's own",
    "mg_wfbp": "as [43], drawn",
}
"""What MG-WFBP may be: Section 4.2 compares backward with "tensors of layer i"."""


def gains(setting: PaperSetting, network: str) -> dict[str, float]:
    """Return, of one network in one setting, by how much iterations get shorter.

    over_constant, over_<planner> : of the best plan at most, over the constant buffer's, over `READINGS`' and
        adaFusion's: no plan is faster than all bytes after the first gradient, or the last tensor after
        backward
    constant_over_others, constant_over_more : of the constant buffer over Fig 4's others, over `MORE` too
    """
    cost, work = setting.cost(), setting.workload(network)
    compute_s, taken_s = setting.compute_s(network), dict[int, float]()
    for capacity in (0, *BUFFERS, *MORE):
        plan = fused(network, compute_s, capacity, setting.timeout_s, setting.unit)
        overhead_s = np.array([cost.alpha_s])
        taken_s[capacity] = float(
            fused_iteration_s(*plan, overhead_s, cost.beta_s_per_byte)[0]
        )
    constant_s = taken_s.pop(CONSTANT)
    after_backward_s = work.compute_s + float(cost(work.bytes[-1:])[0])
    after_first_s = work.forward_s + work.backward_s[0] + float(cost(work.bytes.sum()))
    least_s = max(after_backward_s, after_first_s)
    endless, planners = (
        replace(setting, timeout_s=math.inf),
        (*READINGS, "adafusion:repaired"),
    )
    return {
        "over_constant": constant_s / least_s - 1,
        **{
            f"over_{p}": _planned_s(network, endless, p) / least_s - 1 for p in planners
        },
        "constant_over_others": min(taken_s[c] for c in taken_s.keys() - MORE)
        / constant_s
        - 1,
        "constant_over_more": min(taken_s.values()) / constant_s - 1,
    }


@cache
def _planned_s(network: str, setting: PaperSetting, planner: str) -> float:
    cost, work = setting.cost(), setting.workload(network)
    if planner != "own":
        return predict(work, make_plan(planner, work, cost), cost).iteration_s
    limits_s = cost(work.bytes) + cost.alpha_s
    plan = merged("own", work, cost, lambda i, *_: work.backward_s[i] < limits_s[i - 1])
    return predict(work, plan, cost).iteration_s


def gains_over(grid: Grid, wanted: NDArray[np.bool_]) -> pd.DataFrame:
    """Return `gains` of all five networks over the ``wanted`` settings: a row per network and setting."""
    import pandas as pd

    places, frames = np.argwhere(wanted), []
    for network in FIVE:
        family = 4 if _reference(network) == "VGG16" else 3
        keys, of_setting = np.unique(
            places[:, [0, 1, 2, family]], axis=0, return_inverse=True
        )
        ends = [
            (0, key[3]) if family == 4 else (key[3], 0) for key in keys
        ]  # its own time
        at = zip(keys, ends, strict=True)
        rows = [gains(grid.setting((*key[:3], *end)), network) for key, end in at]
        gained = pd.DataFrame(rows).iloc[of_setting.ravel()].reset_index(drop=True)
        frames.append(gained.assign(network=network, setting=np.arange(len(places))))
    return pd.concat(frames, ignore_index=True)
