"""Models of two numbers: what computing takes alone, and what all bytes take on the wire alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core import plan
from ddlkit.core.iteration import LinearScenarios
from ddlkit.core.link import one_by_one
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats.clusters import EXTERNAL, pipedream, triosim
from ddlkit.report.clusters.trials import BUCKET_BYTES

Model = Callable[[Floats, Floats], Floats]
"""(C, W), both (..., n) seconds -> (..., n) seconds of as many iterations; more W makes none shorter.

C : computing alone, forward, backward and update; W : all gradients on the link, nothing else going on
"""

HALVINGS = 53
"""So many leave of a time what doubles cannot tell apart."""


def wire_s(model: Model, compute_s: Floats, iteration_s: Floats) -> Floats:
    """(..., n) the W with which the iteration is as long as that, found by halving.

    compute_s, iteration_s : (..., n); the result has more axes where the model is one of many numbers

    0 where computing alone takes as long, and where no W below the whole iteration makes it so long.
    """
    alone_s, shown_s = np.asarray(compute_s, float), np.asarray(iteration_s, float)
    least_s = model(alone_s, np.zeros_like(shown_s))
    low_s, high_s = np.zeros_like(least_s), np.broadcast_to(shown_s, least_s.shape)
    reached = (least_s < shown_s) & (model(alone_s, high_s) >= shown_s)
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        enough = model(alone_s, middle_s) >= shown_s
        low_s, high_s = np.where(enough, low_s, middle_s), np.where(enough, middle_s, high_s)
    return np.where(reached, high_s, 0.0)


def lines(compute: Floats, wire: Floats) -> Model:
    """The iteration as a maximum of straight lines: max over k of compute[k] C + wire[k] W; (m,) shares."""

    def iteration_s(compute_s: Floats, wire_s: Floats) -> Floats:
        each = np.multiply.outer(compute_s, compute) + np.multiply.outer(wire_s, wire)
        return np.asarray(each.max(axis=-1))

    return iteration_s


def overlapped(workload: Workload, sent: plan.FusionPlan) -> Model:
    """The workbook's model without a start-up time: messages leave when ready, one after the other."""
    coefficients = LinearScenarios.of(workload, sent).coefficients
    return lines(coefficients[0] / workload.compute_s, coefficients[2] / workload.bytes.sum())


def slowed(workload: Workload, sent: plan.FusionPlan, slowdown: ArrayLike) -> Model:
    """As `overlapped`, but computing takes longer by that share while bytes are under way (`core.link`).

    slowdown : one, or (k, 1) for times of (k, n)
    """
    ready = sent.group_ready_s(workload) / workload.compute_s
    size = sent.group_bytes(workload) / workload.bytes.sum()
    update = workload.update_s / workload.compute_s

    def iteration_s(compute_s: Floats, wire_s: Floats) -> Floats:
        scenarios = np.broadcast_shapes(compute_s.shape, wire_s.shape, np.shape(slowdown))
        own_s, sent_s = (np.broadcast_to(one, scenarios) for one in (compute_s, wire_s))
        ready_s, moved_s = np.multiply.outer(own_s, ready), np.multiply.outer(sent_s, size)
        of_each = np.asarray(slowdown, float)[..., None]
        ends_s = one_by_one(ready_s, np.zeros_like(ready_s), moved_s, slowdown=of_each)[1]
        return np.asarray(ends_s[..., -1] + update * compute_s)

    return iteration_s


def norm(gamma: ArrayLike) -> Model:
    """Pollux's own form: (C^gamma + W^gamma)^(1/gamma); 1 hides nothing, towards infinity all is hidden."""
    power = np.asarray(gamma, float)

    def iteration_s(compute_s: Floats, wire_s: Floats) -> Floats:
        longer, shorter = np.maximum(compute_s, wire_s), np.minimum(compute_s, wire_s)
        return np.asarray(longer * (1 + (shorter / longer) ** power) ** (1 / power))

    return iteration_s


@dataclass(frozen=True)
class Family:
    """A model on trial: what is made of a network's shape, and of one number where it has one.

    make : of one number, or of (k, 1) for times of (k, n)
    numbers : what the number may be; empty where there is none
    hosts : whether computing takes longer by a factor for the GPUs that share a node
    """

    make: Callable[[Workload, ArrayLike], Model]
    numbers: tuple[float, ...] = ()
    hosts: bool = False


def _workbook(workload: Workload, slowdown: ArrayLike) -> Model:
    sent = plan.ddp(workload)
    return slowed(workload, sent, slowdown) if np.any(slowdown) else overlapped(workload, sent)


_ONE, _NONE = np.ones(1), np.zeros(1)
SLOWDOWNS = tuple(np.linspace(0.0, 1.0, 51).tolist())
GAMMAS = tuple(np.linspace(1.0, 10.0, 91).tolist())
"""Pollux keeps its own between 1 and 10."""
FAMILIES = {
    "compute_only": Family(lambda _, __: lines(_ONE, _NONE)),
    "no_overlap": Family(lambda _, __: lines(_ONE, _ONE)),
    "perfect_overlap": Family(lambda _, __: lines(np.eye(2)[0], np.eye(2)[1])),
    "osf_repaired": Family(lambda work, _: overlapped(work, plan.buffer(work, BUCKET_BYTES))),
    "dag": Family(lambda work, _: overlapped(work, plan.none(work))),
    "norm": Family(lambda _, gamma: norm(gamma), GAMMAS),
    "workbook": Family(_workbook),
    "workbook_slowed": Family(_workbook, SLOWDOWNS),
    "workbook_hosts": Family(_workbook, hosts=True),
    "workbook_hosts_slowed": Family(_workbook, SLOWDOWNS, hosts=True),
}
"""As `trials.TRIALS`, where all that is known of messages is W: at their best, without a start-up time.

osf_repaired : Eqs 12-16, with a buffer as large as PyTorch's buckets and no timeout
dag : Eqs 3-6, layer by layer, where batches are fetched in time, and with the update, which Eq 4 leaves out
The formulas of both papers come to the recursion of core.iteration on the plan given here: tests hold that.
"""


@cache
def resnet50() -> Workload:
    """ResNet-50 in the shape that TrioSim traced on an H100, batch 128, float32."""
    operators = triosim.read_operators(EXTERNAL / "triosim" / "resnet50-h100-b128.csv.gz")
    return triosim.layer_profile(operators, "resnet50", 128).workload()


@cache
def graph(network: str) -> Workload:
    """A network in the shape that PipeDream's profiler recorded, its batch size unknown: only shares count.

    Its ResNet-18 is that of 1,000 classes and 224 pixels, Pollux's that of 10 classes and 32 pixels.
    """
    layers = pipedream.read_layers(EXTERNAL / "pipedream" / f"{network}.txt.gz")
    return pipedream.layer_profile(layers, network, 1).workload()


def bert() -> Workload:
    """BERT-base by its published sizes: 12 equal layers, then the embedding, whose gradient is ready last.

    A layer has four matrices of 768 x 768 and two of 768 x 3072, with time in proportion to their elements;
    30,522 words and 514 positions and segments take none. Forward takes half of what backward does.
    """
    attention, outer = [768 * 769] * 4, [768 * 3072] * 2
    elements = np.array([*(outer + attention) * 12, 768 * (30_522 + 514)])
    backward_s = np.array([*elements[:-1] / elements[:-1].sum(), 0.0])
    return Workload.from_arrays(0.5, backward_s, 4 * elements)


def uniform(messages: int = 10) -> Workload:
    """A network of which no shape is known: equal layers, each as large as one of PyTorch's buckets."""
    return Workload.from_arrays(
        0.5, np.full(messages, 1 / messages), np.full(messages, plan.DDP_BUCKET_BYTES)
    )


SHAPES: dict[str, Callable[[], Workload]] = {
    "resnet50": resnet50,
    "resnet50-pipedream": lambda: graph("resnet50"),
    "resnet18": lambda: graph("resnet18"),
    "bert": bert,
    "uniform": uniform,
}
"""Shares of computing and of bytes by layer, which `shape` of a rule names."""
