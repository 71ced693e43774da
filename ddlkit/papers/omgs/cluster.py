"""The paper's cluster: omgs's networks at the published code's costs, layer times scanned."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from ddlkit import store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.sparse import ELEMENT_BYTES, Log, SparseGather, sparse_iteration
from ddlkit.core.workload import Workload
from ddlkit.papers import networks
from ddlkit.store import readers

LSTM = "LSTM-PTB"
NETWORKS = {"VGG-16": "vgg16_cifar", "ResNet-50": "ResNet50", "Inception-v4": "inception_v4"}
NETWORKS[LSTM] = "lstm_ptb"
"""The four of omgs Tab V, and what their layers are listed under."""
PLANS = {"TopK": "single", "LAGS": "none", "MGS": "mgs:8192", "OMGS": "omgs", "exact": "exact"}
"""Algorithm -> planner. Of OMGS there are two rules: Algorithm 1, and that of the published code."""
RULES = "omgs", "omgs:code"
PARTS = ("forward", "backward", "selection", "exposed")
UNITS = (1024, 1280, 1500, 1750, 2047)
"""Of the LSTM: 1,024 to 2,047 agree with the messages of MGS-SGD in Tab V; 1,500 is the published code's."""


@cache
def published_code() -> dict[str, float]:
    """Return what the authors' published code states (data/papers/omgs/code.csv), by its id, in SI units."""
    import pandas as pd  # only here: this room imports without it

    table = readers.read_transcribed(store.DATA / "papers" / "omgs" / "code.csv")
    return dict(pd.read_csv(io.BytesIO(table)).set_index("id")["value"].astype(float))


def published_gather(workers: int) -> AlphaBeta:
    """Return the cost of one all-gather of 2, 4, 8 or 16 workers, by bytes gathered, on 1 Gbit/s Ethernet."""
    alpha_s, beta_s = (published_code()[f"{name}-{workers}"] for name in ("alpha", "beta"))
    return AlphaBeta(alpha_s, beta_s, collective="all_gather", workers=workers)


def published_cost(workers: int, density: float) -> SparseGather:
    """Return the cost of messages as published: gamma d log2 d, then values and indices gathered."""
    selecting = Log(published_code()["gamma"])
    return SparseGather(published_gather(workers), density, selecting=selecting)


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
        sizes, by_work, alike = _shape(self.network, self.units if self.network == LSTM else 0)
        backward_s = self.compute_s * self.backward
        shares = (1 - self.even) * by_work + self.even * alike
        forward_s = self.compute_s - backward_s
        return Workload.from_arrays(forward_s, backward_s * shares, ELEMENT_BYTES * sizes)


@cache
def _shape(network: str, units: int) -> tuple[Any, Any, Any]:
    """Return elements of tensors in ready order; shares of the backward by multiply-adds, and by layer."""
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
    """Return seconds of PARTS, which add up to the iteration (omgs Fig 4), and how many messages it sends."""
    whole_s = sparse_iteration(workload, plan, cost).prediction.iteration_s
    selection_s = float(cost.selection_s(plan.group_bytes(workload)).sum())
    parts_s = (workload.forward_s, float(workload.backward_s.sum()), selection_s)
    exposed_s = whole_s - parts_s[0] - parts_s[1] - parts_s[2]
    parts = dict(zip(PARTS, (*parts_s, exposed_s), strict=True))
    return {**parts, "iteration": whole_s, "messages": len(plan.ends)}


def planned(setting: Setting, planner: str, cost: SparseGather) -> dict[str, float]:
    """Return the `breakdown` of a setting under a planner."""
    workload = setting.workload()
    return breakdown(workload, make_plan(planner, workload, cost), cost)


def most_saved_s(network: str, cost: SparseGather, messages: int, units: int = 1500) -> float:
    """Return how much less than TopK-SGD ``messages`` can take at most, whatever the layers' times are."""
    whole = ELEMENT_BYTES * float(_shape(network, units if network == LSTM else 0)[0].sum())
    apart_s = messages * float(Log(published_code()["gamma"])(whole / ELEMENT_BYTES / messages, 1))
    return float(cost.selection_s(whole)) - apart_s + cost(whole) - cost.startup_s()


def scan(network: str, topk_s: float, cost: SparseGather) -> Iterator[dict[str, Any]]:
    """Yield every setting of a network under both rules; compute times up to ``topk_s``, evenly spaced."""
    computing = np.linspace(topk_s / 16, topk_s, 16).tolist()
    units = UNITS if network == LSTM else (0,)
    for compute_s, backward, even, of in product(computing, (0.5, 2 / 3, 0.75), (0.0, 0.5), units):
        setting = Setting(network, compute_s, backward, even, of)
        workload = setting.workload()
        topk, mgs, *by_rules = (
            breakdown(workload, make_plan(spec, workload, cost), cost)
            for spec in (PLANS["TopK"], PLANS["MGS"], *RULES)
        )
        for rule, merged in zip(RULES, by_rules, strict=True):
            yield {
                **vars(setting),
                "rule": rule,
                "topk_s": topk["iteration"],
                "mgs_s": mgs["iteration"],
                "omgs_s": merged["iteration"],
                "messages": merged["messages"],
                "topk_exposed_s": topk["exposed"],
                "omgs_exposed_s": merged["exposed"],
                "selection_share": merged["selection"] / compute_s,
            }
