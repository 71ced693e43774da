"""omgs Algorithms 1 and 2: which layers to merge (also as the planner ``omgs``), and what is sent when.

MGS-SGD, which they are compared with, merges by size alone (Tab V).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.plan import FusionPlan, needed_cost, planner
from ddlkit.core.sparse import Log
from ddlkit.core.units import parse_seconds
from ddlkit.core.workload import Workload
from ddlkit.papers.omgs import Instance

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
PUBLISHED_GAMMA_S = 2.2e-10
"""gamma of the authors' published code, whose selection takes gamma d log2 d."""

REPAIRS = frozenset({"log0", "alpha", "index"})
"""What Algorithm 1 needs so that it does what its text says; without all three it is as printed.

log0 : a merged layer, of 0 elements, selects for no time (line 16 takes 0 x log 0, not a number)
alpha : it sends nothing (lines 12 and 22 charge the start-up time alpha for it again)
index : line 32 takes the backward time of layer L (printed is tb[l], where l is 1 after the loop above)
"""


def find_merged_layers(instance: Instance, repairs: frozenset[str] = REPAIRS) -> Bools:
    """omgs Algorithm 1: (L,) truth of merged layers, judged from layer L down to 2.

    repairs : which of REPAIRS to make; ``frozenset()`` is the algorithm as printed. A comparison
    with a number that is not one is false, as in any language that follows IEEE 754.
    """
    backward, size = instance.backward_s.copy(), instance.elements.copy()
    merged = np.zeros(instance.layers, bool)
    begun, computed, selecting = _compute_start(instance, backward, size, 0.0, repairs)
    sending = _communication_start(instance, selecting, computed, size, repairs)
    for i in range(instance.layers - 1, 0, -1):
        ready = begun[i] + backward[i] + backward[i - 1]
        own, before, both = _select(
            instance, np.array([size[i], size[i - 1], size[i] + size[i - 1]]), repairs
        )
        q3 = ready + own + before < sending[i] + instance.alpha_s + instance.beta_s * size[i]
        q5 = sending[i] + instance.alpha_s > ready + both
        if not (q3 and q5):
            continue
        backward[i - 1] += backward[i]
        size[i - 1] += size[i]
        backward[i] = size[i] = selecting[i] = 0.0
        selecting[i - 1] = both
        upto = slice(0, i + 1)
        begun[upto], computed[upto], _ = _compute_start(
            instance, backward[upto], size[upto], begun[i] + backward[i], repairs
        )
        sending = _communication_start(instance, selecting, computed, size, repairs)
        merged[i] = True
    return merged


def _select(instance: Instance, size: Floats, repairs: frozenset[str]) -> Floats:
    """TopKPerfModel, lines 15-16, layer by layer."""
    of_nothing = 0.0 if "log0" in repairs else np.nan
    return np.where(size == 0, of_nothing, instance.selection_s(size))


def _send(instance: Instance, size: Floats, repairs: frozenset[str]) -> Floats:
    """AllGatherPerfModel, lines 17-18, layer by layer."""
    of_nothing = 0.0 if "alpha" in repairs else instance.alpha_s
    return np.where(size == 0, of_nothing, instance.communication_s(size))


def _compute_start(
    instance: Instance, backward: Floats, size: Floats, start_s: float, repairs: frozenset[str]
) -> tuple[Floats, Floats, Floats]:
    """CalculateCompStart, lines 27-36: (tau_b, tau_s, t_s); layer L begins at ``start_s``."""
    selecting = _select(instance, size, repairs)
    begun, computed = np.empty_like(backward), np.empty_like(backward)
    begun[-1] = start_s
    computed[-1] = start_s + backward[-1 if "index" in repairs else 0]
    for i in range(len(backward) - 2, -1, -1):
        begun[i] = computed[i + 1] + selecting[i + 1]
        computed[i] = begun[i] + backward[i]
    return begun, computed, selecting


def _communication_start(
    instance: Instance, selecting: Floats, computed: Floats, size: Floats, repairs: frozenset[str]
) -> Floats:
    """CalculateCommStart, lines 19-26: tau_c."""
    sent = _send(instance, size, repairs)
    sending = computed + selecting
    for i in range(len(sending) - 2, -1, -1):
        sending[i] = max(sending[i + 1] + sent[i + 1], sending[i])
    return sending


def merged_plan(
    workload: Workload, cost: MessageCost, gamma_s: float = PUBLISHED_GAMMA_S, name: str = "omgs"
) -> FusionPlan:
    """omgs Algorithm 1 as a fusion plan: each merged tensor travels with the one before it in the network.

    Selecting from d elements is taken to cost ``gamma_s`` d log2 d, and a message what the line through
    ``cost`` of the smallest gradient and of all gradients together says (alpha and beta of Eq 11).

    >>> from ddlkit.core.cost import AlphaBeta
    >>> workload = Workload.from_arrays(0.01, [0.001] * 4, [400_000] * 4)
    >>> [merged_plan(workload, AlphaBeta(alpha_s, 1e-10)).ends for alpha_s in (0.0, 1.0)]
    [(1, 2, 3, 4), (4,)]
    """
    least, whole = float(workload.bytes.min()), float(workload.bytes.sum())
    slope = max(0.0, cost(whole) - cost(least)) / max(whole - least, 1.0)
    alpha_s = max(0.0, cost(least) - slope * least)
    beta_s = slope * whole / float(workload.parameters.sum())
    instance = Instance.of_workload(workload, Log(gamma_s), alpha_s, beta_s)
    sends = ~find_merged_layers(instance)[::-1]
    return FusionPlan(name, tuple((np.flatnonzero(sends) + 1).tolist()))


@planner(
    "omgs",
    label="OMGS",
    look=("#00664b", "p", "-.", "///..."),
    examples=("omgs", "omgs:0.22ns"),
)
def _omgs(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """``omgs:GAMMA``, a time per element; without it the published gamma."""
    gamma_s = parse_seconds(text) if text else PUBLISHED_GAMMA_S
    name = f"omgs:{text}" if text else "omgs"
    return merged_plan(workload, needed_cost(cost, "omgs"), gamma_s, name)


def messages(
    merged: Sequence[bool] | Bools, *, literal: bool = False
) -> tuple[tuple[int, ...], ...]:
    """omgs Algorithm 2: the layers in each message of an iteration, in order of sending.

    merged : (L,) of layers 1 to L. Both threads go from layer L to 1 and keep a buffer: a merged layer
    is pushed into it (lines 18, 28); at a normal layer the buffer is selected from, or sent, and
    cleared (lines 15-16, 25-26). As printed, nothing pushes the normal layer itself.
    """
    sent: list[tuple[int, ...]] = []
    buffer: list[int] = []
    for layer in range(len(merged), 0, -1):
        if merged[layer - 1] or not literal:
            buffer.append(layer)
        if not merged[layer - 1]:
            sent.append(tuple(buffer))
            buffer.clear()
    return tuple(sent)


def never_sent(merged: Sequence[bool] | Bools, *, literal: bool = False) -> tuple[int, ...]:
    """Layers whose gradient no message of Algorithm 2 holds."""
    sent = {layer for message in messages(merged, literal=literal) for layer in message}
    return tuple(layer for layer in range(1, len(merged) + 1) if layer not in sent)


def merge_up_to(parameters: Iterable[int], threshold: int) -> tuple[int, ...]:
    """omgs V-D, MGS-SGD: sizes of the merged layers, from the parameters in ready order.

    Tensors accumulate until a merged layer has at least ``threshold`` elements; what is left at
    the end travels by itself.
    """
    merged, pending = [], 0
    for size in parameters:
        pending += size
        if pending >= threshold:
            merged.append(pending)
            pending = 0
    return (*merged, pending) if pending else tuple(merged)


def send_from(parameters: Iterable[int], threshold: int) -> tuple[int, ...]:
    """The other reading of omgs V-D: a tensor below ``threshold`` joins what comes after it.

    A message closes with a tensor that by itself has at least ``threshold`` elements.
    """
    merged, pending = [], 0
    for size in parameters:
        pending += size
        if size >= threshold:
            merged.append(pending)
            pending = 0
    return (*merged, pending) if pending else tuple(merged)
