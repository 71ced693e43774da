"""omgs: equations of Shi et al., Merged Gradient Sparsification (INFOCOM 2020).

Layers are numbered 1 to L as in the paper; arrays hold layer l at index l - 1. Where the paper prints what
cannot be meant, ``literal=True`` gives what it prints. LAGS-SGD is the planner ``none``, TopK-SGD ``single``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    Log,
    Selecting,
    SparseGather,
    sparse_iteration,
)
from ddlkit.core.workload import Floats, Workload
from workbook.common import networks
from workbook.common.papers import published_code

Bools = NDArray[np.bool_]


def sgd_step(weights: ArrayLike, gradient: ArrayLike, learning_rate: float) -> Floats:
    """omgs Eq 1: W' = W - eta grad. Symbols: W = weights, eta = learning_rate."""
    return np.asarray(weights, float) - learning_rate * np.asarray(gradient, float)


def iteration_s(
    forward_s: float,
    backward_s: ArrayLike,
    selection_s: ArrayLike = 0.0,
    exposed_s: float = 0.0,
) -> float:
    """omgs Eqs 3, 5: t_f, sum of t_b, sum of t_s, t_c^no = exposed_s; the last two 0 of one worker (Eq 3)."""
    return forward_s + float(np.sum(backward_s) + np.sum(selection_s)) + exposed_s


def backward_start_s(
    forward_s: float, backward_s: ArrayLike, selection_s: ArrayLike = 0.0
) -> Floats:
    """omgs Eqs 2, 6: (L,) tau_b, with Eq 7 put in; t_f = forward_s, t_b = backward_s, t_s = selection_s."""
    spent = np.asarray(backward_s, float) + np.asarray(selection_s, float)
    return forward_s + np.cumsum(spent[::-1])[::-1] - spent


def topk_iteration_s(
    forward_s: float, backward_s: ArrayLike, selection_s: float, communication_s: float
) -> float:
    """omgs Eq 4: nothing overlaps. Symbols: t_s = selection_s, t_c = communication_s."""
    return iteration_s(forward_s, backward_s, selection_s, communication_s)


def selection_start_s(backward_start_s: ArrayLike, backward_s: ArrayLike) -> Floats:
    """omgs Eq 7: (L,) tau_s = tau_b + t_b."""
    return np.asarray(backward_start_s, float) + np.asarray(backward_s, float)


def communication_start_s(selection_end_s: Floats, communication_s: Floats) -> Floats:
    """omgs Eq 8: (L,) tau_c; tau_s + t_s = selection_end_s, t_c = communication_s, both (L,)."""
    start, sent = selection_end_s.tolist(), communication_s.tolist()
    for i in range(len(start) - 2, -1, -1):
        start[i] = max(start[i], start[i + 1] + sent[i + 1])
    return np.array(start)


def selection_s(gamma: float, density: float, elements: ArrayLike) -> Any:
    """omgs Eq 10: time to select the largest rho d; rho = density, d = elements; log2 as published."""
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.asarray(elements, float)
        return gamma * density * size * np.log2(size)


@dataclass(frozen=True, eq=False)
class Instance:
    """A network and a cluster: all that a merging depends on.

    backward_s, elements : (L,) t_b and d of layers 1 to L; forward_s : t_f
    selection, density : t_s of a layer by its elements (Eq 10, or another cost)
    alpha_s, beta_s : Eq 11, per element
    """

    backward_s: Floats
    elements: Floats
    selection: Selecting
    alpha_s: float
    beta_s: float
    forward_s: float = 0.0
    density: float = 1.0

    @property
    def layers(self) -> int:
        """Return L."""
        return self.elements.size

    def selection_s(self, elements: ArrayLike) -> Floats:
        """Return (...,) seconds to select; 0 where there is nothing to select from."""
        present = np.asarray(elements, float)
        some = present > 0
        return np.where(
            some, self.selection(np.where(some, present, 2.0), self.density), 0.0
        )

    def communication_s(self, elements: ArrayLike) -> Floats:
        """omgs Eq 11: (...,) t_c = alpha + beta d; 0 where there is nothing to send."""
        present = np.asarray(elements, float)
        return np.where(present > 0, self.alpha_s + self.beta_s * present, 0.0)


def merge(instance: Instance, merged: ArrayLike) -> Instance:
    """omgs Eqs 13-15: the network in which each merged layer is part of the normal layer before it.

    merged : (L,) truth of l_m, false of layer 1. Sizes add (Eq 14), backward runs without a selection between
    (Eq 15), merged layers neither select nor send (Eq 13).
    """
    starts = np.flatnonzero(~np.asarray(merged, bool))
    backward_s = np.add.reduceat(instance.backward_s, starts)
    merged = np.add.reduceat(instance.elements, starts)
    return replace(instance, backward_s=backward_s, elements=merged)


def combinations(layers: int) -> Bools:
    """omgs Eqs 16, 19: (2^(L-1), L) all choices of merged layers; layer 1 is always normal."""
    count = np.arange(2 ** (layers - 1))[:, None]
    free = (count >> np.arange(layers - 1)) & 1
    return np.concatenate([np.zeros_like(count, bool), free.astype(bool)], axis=1)


def merged_iteration_s(instance: Instance, merged: ArrayLike) -> Floats:
    """omgs Eq 17: (...,) iteration time tau_c(1) + t_c(1) of mergings (..., L), by Eqs 6-8 and 13-15."""
    flags = np.asarray(merged, bool)
    compute_s = np.full(flags.shape[:-1], instance.forward_s)
    sent_s, pending = np.zeros_like(compute_s), np.zeros_like(compute_s)
    for layer in range(instance.layers - 1, -1, -1):
        pending = pending + instance.elements[layer]
        compute_s = compute_s + instance.backward_s[layer]
        sends = ~flags[..., layer]
        compute_s = compute_s + np.where(sends, instance.selection_s(pending), 0.0)
        end_s = np.maximum(sent_s, compute_s) + instance.communication_s(pending)
        sent_s = np.where(sends, end_s, sent_s)
        pending = np.where(sends, 0.0, pending)
    return sent_s


def timeline(instance: Instance) -> tuple[Floats, Floats, Floats, Floats]:
    """omgs Eqs 2, 6-8: (tau_b, tau_s, tau_c, t_c), each (L,), no layer being merged; Eq 2 if t_s is 0."""
    selecting = instance.selection_s(instance.elements)
    sent_s = instance.communication_s(instance.elements)
    begun = backward_start_s(instance.forward_s, instance.backward_s, selecting)
    computed = selection_start_s(begun, instance.backward_s)
    return begun, computed, communication_start_s(computed + selecting, sent_s), sent_s


def exposed_s(instance: Instance, *, literal: bool = False) -> float:
    """omgs Eq 9: t_c^no, communication after layer 1 has been selected, when no layer is merged.

    Printed is tau_c + t_c - tau_s + t_s of layer 1; t_s must be subtracted with tau_s.
    """
    _, computed, sending, sent_s = timeline(instance)
    selecting = float(instance.selection_s(instance.elements[0]))
    selected = computed[0] + (-selecting if literal else selecting)
    return float(sending[0] + sent_s[0] - selected)


def objective_s(instance: Instance, *, literal: bool = False) -> float:
    """omgs Eq 18: what is minimised, for a network that has been merged and has two layers or more.

    Printed is max{tau_c(1) + t_c(1), tau_c(2) + t_c(2)} + t_c(1); Eq 17 needs tau_s(1) + t_s(1) first.
    """
    _, computed, sending, sent_s = timeline(instance)
    first = computed[0] + instance.selection_s(instance.elements[0])
    first = sending[0] + sent_s[0] if literal else first
    return float(max(first, sending[1] + sent_s[1]) + sent_s[0])


class Candidates:
    """omgs Eqs 12, 20-24: layers l = 2 to L, each with the one before: whether to merge l (Section IV-A).

    All values are (L-1,), no layer being merged yet. Symbols: u(l) = u_s, when the gradients of both would be
    computed if nothing were selected between; t_s(l) = own_s, t_s(l-1) = before_s; together_s selects from
    both at once; tau_c(l) = sending_s; tau_c(l) + t_c(l) = free_s; d(l) = elements. By Eq 12, together_s
    is more than before_s and own_s.

    q3 : apart, the second message waits for the first; the contrary is Q1
    q4, q5 : together, the message is selected before layer l's could start; within a start-up after that
    """

    def __init__(self, instance: Instance) -> None:
        _, computed, sending, sent = timeline(instance)
        elements, selecting = instance.elements, instance.selection_s(instance.elements)
        self.instance, self.elements = instance, elements[1:]
        self.u_s = computed[1:] + instance.backward_s[:-1]
        self.own_s, self.before_s = selecting[1:], selecting[:-1]
        self.together_s = instance.selection_s(elements[1:] + elements[:-1])
        self.sending_s, self.free_s = sending[1:], sending[1:] + sent[1:]
        self.q3: Bools = self.u_s + self.own_s + self.before_s < self.free_s
        self.q4: Bools = self.u_s + self.together_s < self.sending_s
        self.q5: Bools = self.sending_s + instance.alpha_s > self.u_s + self.together_s

    def completion_s(self, line: int = 6) -> Floats:
        """Return mu(l-1), the end of layer l-1's message when l is normal, by one of the lines 2 to 6.

        Line 3 drops t_s(l-1), and line 4 has tau_b(l) where tau_b(l-1) is meant; 2, 5 and 6 agree.
        """
        before = self.instance.elements[:-1]
        ready = self.u_s + self.own_s + self.before_s
        if line == 3:
            ready = ready - self.before_s
        if line == 4:
            ready = ready - self.own_s - self.instance.backward_s[1:]
        return np.maximum(ready, self.free_s) + self.instance.communication_s(before)

    @property
    def gain_s(self) -> Floats:
        """Return t_gain = mu(l-1) - mu~(l-1): how much earlier layer l-1's message ends with l merged."""
        ready = np.maximum(self.u_s + self.together_s, self.sending_s)
        both = self.elements + self.instance.elements[:-1]
        return self.completion_s() - (ready + self.instance.communication_s(both))

    def case_gain_s(self, *, literal: bool = False) -> Floats:
        """Return t_gain by case: C1 (omgs Eq 21; as printed, gamma rho is of one product), C2 (Eq 22), C3."""
        instance = self.instance
        saved = self.own_s + self.before_s - self.together_s
        if literal:
            unit = float(instance.selection_s(2.0)) / 2.0  # gamma rho, as 2 log2 2 = 2
            saved = self.own_s + (self.before_s - self.together_s) / unit
        late = self.sending_s + instance.alpha_s - self.u_s - self.together_s
        bound = np.where(self.q4, instance.alpha_s, late)
        return np.where(self.q3, bound, saved - instance.beta_s * self.elements)

    def rule(self, *, equation: int = 24) -> Bools:
        """omgs Eq 23 or 24: whether layer l should be merged; the two say the same."""
        both = (self.q3 & self.q4) | (self.q3 & ~self.q4 & self.q5)
        return both if equation == 23 else self.q3 & self.q5


def merge_by_theorem(instance: Instance) -> Bools:
    """omgs Eq 25, Theorem 1: (L,) merged layers, each judged in the network without merged layers."""
    return np.array([False, *Candidates(instance).rule()])


PUBLISHED_GAMMA_S = (
    2.2e-10  # of the authors' published code, whose selection takes gamma d log2 d
)
COUNTEREXAMPLE = Instance(
    np.ones(3), np.full(3, 2.0), Log(1.0), 8.0, 1.0
)  # errata, entry 12

REPAIRS = frozenset({"log0", "alpha", "index"})
"""What Algorithm 1 needs so that it does what its text says; without all three it is as printed.

log0, alpha : a merged layer selects for no time (line 16: 0 x log 0), nor pays alpha again (lines 12, 22)
index : line 32 takes the backward time of layer L (printed is tb[l], where l is 1 after the loop above)
"""


def find_merged_layers(
    instance: Instance, repairs: frozenset[str] = REPAIRS, *, by_code: bool = False
) -> Bools:
    """omgs Algorithm 1: (L,) truth of merged layers, judged from layer L down to 2.

    In O(L) where the paper takes O(L^2): what is judged next needs only the starts of one layer.

    repairs : which of REPAIRS to make; none: as printed, comparisons with NaN being false
    by_code : by the authors' published code: a layer merges when its message waits less than a start-up,
        which leaves out Q3, and t_s(l-1) out of Q5; layer L always joins, unjudged
    """
    elements = instance.elements
    backward, size = (
        instance.backward_s.tolist(),
        elements.tolist(),
    )  # arrays are slow one by one
    selecting = instance.selection_s(elements).tolist()
    together = [0.0, *instance.selection_s(elements[1:] + elements[:-1]).tolist()]
    sent = instance.communication_s(elements).tolist()
    merged = np.zeros(instance.layers, bool)
    # Of the layer judged: begin and end of its backward, when the link is free for it (lines 17-36).
    begun, free = 0.0, -np.inf
    computed = backward[-1 if "index" in repairs else 0]
    for i in range(instance.layers - 1, 0, -1):
        sending = max(computed + selecting[i], free)
        ready = begun + backward[i] + backward[i - 1]
        own, before, both = selecting[i], selecting[i - 1], together[i]
        q3 = (
            ready + own + before
            < sending + instance.alpha_s + instance.beta_s * size[i]
        )
        joins = q3 and sending + instance.alpha_s > ready + both
        if by_code:
            merged[i] = i == instance.layers - 1
            joins = not merged[i] and ready + both - before < sending + instance.alpha_s
        if joins:
            merged[i] = True
            backward[i - 1] += backward[i]
            size[i - 1] += size[i]
            selecting[i - 1] = both
            sent[i - 1] = instance.alpha_s + instance.beta_s * size[i - 1]
            if i > 1:
                both = np.float64(size[i - 1] + size[i - 2])
                together[i - 1] = float(instance.selection(both, instance.density))
            computed = begun + (0.0 if "index" in repairs else backward[0])
            sending = max(computed, free)
            selecting[i] = 0.0 if "log0" in repairs else np.nan
            sent[i] = 0.0 if "alpha" in repairs else instance.alpha_s
        begun, free = computed + selecting[i], sending + sent[i]
        computed = begun + backward[i - 1]
    return merged


def of_planning(
    workload: Workload, cost: MessageCost, gamma_s: float | None = None
) -> Instance:
    """Return the instance that Algorithm 1 plans: its costs are those of Eqs 10 and 11, whatever ``cost`` is.

    alpha and beta are those of the line through ``cost`` of the smallest gradient and of all together; a
    selection takes what ``cost`` knows; where that is nothing, or ``gamma_s`` is given, gamma d log2 d.
    """
    least, whole = float(workload.bytes.min()), float(workload.bytes.sum())
    slope = max(0.0, cost(whole) - cost(least)) / max(whole - least, 1.0)
    alpha_s = max(0.0, cost(least) - slope * least)
    beta_s = slope * whole / float(workload.parameters.sum())
    selection: Selecting = Log(PUBLISHED_GAMMA_S if gamma_s is None else gamma_s)
    density = 1.0
    if gamma_s is None and isinstance(cost, SparseGather) and cost.selecting:
        selection, density = cost.selecting, cost.density
    backward_s, elements = (
        workload.backward_s[::-1],
        workload.parameters[::-1].astype(float),
    )
    return Instance(
        backward_s, elements, selection, alpha_s, beta_s, workload.forward_s, density
    )


def plan_of(merged: Bools, name: str) -> FusionPlan:
    """Return the fusion plan of (L,) merged layers: each is fused with the one before it in the network."""
    return FusionPlan(name, tuple((np.flatnonzero(~merged[::-1]) + 1).tolist()))


def messages(merged: Bools, *, literal: bool = False) -> tuple[tuple[int, ...], ...]:
    """omgs Algorithm 2: the layers in each message of an iteration, in order of sending; merged : (L,).

    A normal layer sends what merged ones pushed (lines 15-28); printed, nothing pushes the normal layer.
    """
    sent, buffer = list[tuple[int, ...]](), list[int]()
    for layer in range(len(merged), 0, -1):
        if merged[layer - 1] or not literal:
            buffer.append(layer)
        if not merged[layer - 1]:
            sent.append(tuple(buffer))
            buffer.clear()
    return tuple(sent)


def merge_up_to(parameters: Iterable[int], threshold: int) -> tuple[int, ...]:
    """omgs V-D, MGS-SGD: sizes of merged layers, from parameters in ready order; the rest by itself."""
    merged, pending = [], 0
    for size in parameters:
        pending += size
        if pending >= threshold:
            merged.append(pending)
            pending = 0
    return (*merged, pending) if pending else tuple(merged)


LSTM = "LSTM-PTB"
NETWORKS = {
    "VGG-16": "vgg16_cifar",
    "ResNet-50": "ResNet50",
    "Inception-v4": "inception_v4",
}
NETWORKS[LSTM] = "lstm_ptb"
"""The four of omgs Tab V, and what their layers are listed under."""
PLANS = {
    "TopK": "single",
    "LAGS": "none",
    "MGS": "mgs:8192",
    "OMGS": "omgs",
    "exact": "exact",
}
"""Algorithm -> planner. Of OMGS there are two rules: Algorithm 1, and that of the published code."""
PARTS = ("forward", "backward", "selection", "exposed")
UNITS = (1024, 1280, 1500, 1750, 2047)
"""Of the LSTM: 1,024 to 2,047 agree with the messages of MGS-SGD in Tab V; 1,500 is the published code's."""


def published_cost(workers: int, density: float) -> SparseGather:
    """Return the published cost, of 2, 4, 8 or 16 workers on 1 Gbit/s: gamma d log2 d, then gathers."""
    code = published_code("omgs")
    line = code[f"alpha-{workers}"], code[f"beta-{workers}"]
    gather = AlphaBeta(*line, collective="all_gather", workers=workers)
    return SparseGather(gather, density, selecting=Log(code["gamma"]))


@dataclass(frozen=True)
class Setting:
    """What the paper leaves open of one network's iteration on its cluster.

    compute_s : t_f + t_b; backward : its share; even : share of the backward that is spread over the layers
        alike, the rest by multiply-adds; units : of the LSTM
    """

    network: str
    compute_s: float
    backward: float = 2 / 3
    even: float = 0.0
    units: int = 1500

    def workload(self) -> Workload:
        """Return one iteration: a layer's tensors become ready together."""
        sizes, by_work, alike = _shape(
            self.network, self.units if self.network == LSTM else 0
        )
        backward_s = self.compute_s * self.backward
        shares = (1 - self.even) * by_work + self.even * alike
        forward_s = self.compute_s - backward_s
        return Workload.from_arrays(
            forward_s, backward_s * shares, ELEMENT_BYTES * sizes
        )


@cache
def _shape(network: str, units: int) -> tuple[Any, Any, Any]:
    """Return elements of tensors in ready order; shares of the backward by multiply-adds, and by layer."""
    listed = (
        tuple(networks.ptb_lstm(units)) if units else networks.layers(NETWORKS[network])
    )
    total = sum(layer.multiply_adds for layer in listed)
    rows = [
        (size, 0.0 if k else layer.multiply_adds / total, 0.0 if k else 1 / len(listed))
        for layer in reversed(listed)
        for k, size in enumerate(layer.tensors[::-1])
    ]
    sizes, by_work, alike = zip(*rows, strict=True)
    return np.array(sizes, dtype=np.int64), np.array(by_work), np.array(alike)


def breakdown(
    workload: Workload, plan: FusionPlan, cost: SparseGather
) -> dict[str, float]:
    """Return seconds of PARTS, which add up to the iteration (omgs Fig 4), and how many messages it sends."""
    whole_s = sparse_iteration(workload, plan, cost).prediction.iteration_s
    selection_s = float(cost.selection_s(plan.group_bytes(workload)).sum())
    parts_s = [workload.forward_s, float(workload.backward_s.sum()), selection_s]
    shown_s = whole_s - parts_s[0] - parts_s[1] - parts_s[2]
    parts = dict(zip(PARTS, (*parts_s, shown_s), strict=True))
    return {**parts, "iteration": whole_s, "messages": len(plan.ends)}


def planned(setting: Setting, planner: str, cost: SparseGather) -> dict[str, float]:
    """Return the `breakdown` of a setting under a planner."""
    workload = setting.workload()
    return breakdown(workload, make_plan(planner, workload, cost), cost)


def most_saved_s(
    network: str, cost: SparseGather, messages: int, units: int = 1500
) -> float:
    """Return how much less than TopK-SGD ``messages`` can take at most, whatever the layers' times are."""
    whole = ELEMENT_BYTES * float(
        _shape(network, units if network == LSTM else 0)[0].sum()
    )
    selecting = Log(published_code("omgs")["gamma"])
    apart_s = messages * float(selecting(whole / ELEMENT_BYTES / messages, 1))
    return float(cost.selection_s(whole)) - apart_s + cost(whole) - cost.startup_s()


def scan(network: str, topk_s: float, cost: SparseGather) -> Iterator[dict[str, Any]]:
    """Yield every setting of a network under both rules; compute times up to ``topk_s``, evenly spaced."""
    compute_each_s = np.linspace(topk_s / 16, topk_s, 16).tolist()
    units = UNITS if network == LSTM else (0,)
    for case in product(compute_each_s, (0.5, 2 / 3, 0.75), (0.0, 0.5), units):
        setting = Setting(network, *case)
        topk, mgs = (planned(setting, PLANS[name], cost) for name in ("TopK", "MGS"))
        for rule in ("omgs", "omgs:code"):
            merged = planned(setting, rule, cost)
            yield {
                **vars(setting),
                "rule": rule,
                "topk_s": topk["iteration"],
                "mgs_s": mgs["iteration"],
                "omgs_s": merged["iteration"],
                "messages": merged["messages"],
            }
