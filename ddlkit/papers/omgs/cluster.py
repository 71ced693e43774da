"""The paper's cluster: omgs's four networks at the costs of the published code, layer times left open.

Of alpha, beta, gamma the published code has numbers; of layer times the text has one sum, of one network. So
they are scanned: how long an iteration computes, which share of it is backward, how that is spread over the
layers; of the LSTM, how many units it has; and by which of the two rules its layers are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import ELEMENT_BYTES, Log, SparseGather, sparse_iteration
from ddlkit.core.workload import Workload
from ddlkit.papers import networks

NETWORKS = {
    "VGG-16": "vgg16_cifar",
    "ResNet-50": "ResNet50",
    "Inception-v4": "inception_v4",
    "LSTM-PTB": "lstm_ptb",
}
"""The four of omgs Tab V, and what their layers are listed under."""
LSTM = "LSTM-PTB"
PLANS = {"TopK": "single", "LAGS": "none", "MGS": "mgs:8192", "OMGS": "omgs", "exact": "exact"}
"""Algorithm -> planner. Of OMGS there are two rules: Algorithm 1, and that of the published code."""
RULES = ("omgs", "omgs:code")
PARTS = ("forward", "backward", "selection", "exposed")
UNITS = (1024, 1280, 1500, 1750, 2047)
"""Of the LSTM: 1,024 to 2,047 agree with the messages of MGS-SGD in Tab V; 1,500 is the published code's."""


@dataclass(frozen=True)
class Setting:
    """What the paper leaves open of one network's iteration on its cluster.

    compute_s : t_f + t_b; backward : share of it that is backward; even : share of the backward that is
        spread over the layers alike, the rest by multiply-adds; units : of the LSTM
    """

    network: str
    compute_s: float
    backward: float = 2 / 3
    even: float = 0.0
    units: int = 1500

    def workload(self) -> Workload:
        """One iteration: a layer's tensors become ready together."""
        sizes, by_work, alike = _shape(self.network, self.units if self.network == LSTM else 0)
        backward_s = self.compute_s * self.backward
        shares = (1 - self.even) * by_work + self.even * alike
        forward_s = self.compute_s - backward_s
        return Workload.from_arrays(forward_s, backward_s * shares, ELEMENT_BYTES * sizes)


@cache
def _shape(network: str, units: int) -> tuple[Any, Any, Any]:
    """Elements of the tensors in ready order; shares of the backward by multiply-adds, and by layer."""
    listed = tuple(networks.ptb_lstm(units)) if units else networks.layers(NETWORKS[network])
    total = sum(layer.multiply_adds for layer in listed)
    rows = [
        (size, 0.0 if k else layer.multiply_adds / total, 0.0 if k else 1 / len(listed))
        for layer in reversed(listed)
        for k, size in enumerate(layer.tensors[::-1])
    ]
    sizes, by_work, alike = zip(*rows, strict=True)
    return np.array(sizes, dtype=np.int64), np.array(by_work), np.array(alike)


def breakdown(workload: Workload, plan: FusionPlan, cost: SparseGather) -> dict[str, float]:
    """Seconds of PARTS, which add up to the iteration (omgs Fig 4), and how many messages it sends."""
    whole_s = sparse_iteration(workload, plan, cost).prediction.iteration_s
    selection_s = float(cost.selection_s(plan.group_bytes(workload)).sum())
    backward_s = float(workload.backward_s.sum())
    found = {
        "forward": workload.forward_s,
        "backward": backward_s,
        "selection": selection_s,
        "exposed": whole_s - workload.forward_s - backward_s - selection_s,
    }
    return {**found, "iteration": whole_s, "messages": len(plan.ends)}


def planned(setting: Setting, planner: str, cost: SparseGather) -> dict[str, float]:
    """`breakdown` of a setting under a planner."""
    workload = setting.workload()
    return breakdown(workload, make_plan(planner, workload, cost), cost)


@dataclass(frozen=True)
class Costs:
    """alpha, beta and gamma of the published code: of one all-gather, by bytes gathered, and of d log2 d."""

    alpha_s: float
    beta_s_per_byte: float
    gamma_s: float
    workers: int

    def of(self, density: float) -> SparseGather:
        """Of messages of that density: values and indices, gathered one after the other."""
        gather = AlphaBeta(
            self.alpha_s, self.beta_s_per_byte, collective="all_gather", workers=self.workers
        )
        return SparseGather(gather, density, selecting=Log(self.gamma_s))

    def most_saved_s(self, network: str, density: float, messages: int, units: int = 1500) -> float:
        """How much less than TopK-SGD ``messages`` can take at most, whatever the layers' times are.

        All is computed under both, and then a message of at least one element arrives; to select from equal
        parts is quickest, as gamma d log2 d is convex. What is left of sending can be hidden.
        """
        sizes = _shape(network, units if network == LSTM else 0)[0]
        elements, cost = float(sizes.sum()), self.of(density)
        apart_s = messages * float(cost.selecting(elements / messages, density))  # type: ignore[misc]
        whole_s = float(cost.selecting(elements, density))  # type: ignore[misc]
        return whole_s - apart_s + cost(ELEMENT_BYTES * elements) - cost.startup_s()


def grid(network: str, topk_s: float, times: int = 16) -> Iterator[Setting]:
    """Settings of a network: compute times up to all of TopK-SGD's iteration, evenly spaced, and the rest."""
    computing = np.linspace(topk_s / times, topk_s, times).tolist()
    units = UNITS if network == LSTM else (0,)
    for compute_s, backward, even, of in product(computing, (0.5, 2 / 3, 0.75), (0.0, 0.5), units):
        yield Setting(network, compute_s, backward, even, of)


def scan(settings: Sequence[Setting], cost: SparseGather) -> list[dict[str, Any]]:
    """Every setting and rule: times of TopK, MGS and OMGS, OMGS's messages, and parts of TopK and OMGS."""
    rows = []
    for setting in settings:
        workload = setting.workload()
        seen: Mapping[str, dict[str, float]] = {
            name: breakdown(workload, make_plan(spec, workload, cost), cost)
            for name, spec in (
                ("TopK", "single"),
                ("MGS", PLANS["MGS"]),
                *((rule, rule) for rule in RULES),
            )
        }
        for rule in RULES:
            one, whole = seen[rule], seen["TopK"]
            rows.append(
                {
                    **vars(setting),
                    "rule": rule,
                    "topk_s": whole["iteration"],
                    "mgs_s": seen["MGS"]["iteration"],
                    "omgs_s": one["iteration"],
                    "messages": one["messages"],
                    "topk_exposed_s": whole["exposed"],
                    "omgs_exposed_s": one["exposed"],
                    "selection_share": one["selection"] / setting.compute_s,
                }
            )
    return rows
