"""omgs at the costs of its authors' published code: what Table VI leaves for computing, and messages then."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.sparse import ELEMENT_BYTES, Log
from ddlkit.core.workload import Floats
from workbook.common import networks, source
from workbook.common.papers import published_code
from workbook.omgs import equations as omgs
from workbook.omgs.equations import LSTM, UNITS
from workbook.omgs.settings import RESNET, TOLERANCE, cost_of, printed, tensors
from workbook.validate import audit

OFF = (1 - TOLERANCE, 1, 1 + TOLERANCE)
"""Of TopK-SGD's time in Table VI."""
BACKWARD = (1 / 2, 2 / 3, 3 / 4)
"""Backward's share of what selecting and sending leave of it (omgs Eq 4)."""
LEFT = "what TopK-SGD's time in Table VI, within 5%, leaves at the code's costs"


def as_in_the_code(
    backward_s: ArrayLike,
    elements: ArrayLike,
    gathers: int = 2,
    density: float = audit.DENSITY,
) -> omgs.Instance:
    """Return a network's layers with the costs of the authors' published code, of 16 workers.

    A message carries density x d values and, in a second gather, as many indices of all workers.
    """
    code, workers = published_code("omgs"), 16
    beta_s = (
        gathers * code[f"beta-{workers}"] * workers * code["element-bytes"] * density
    )
    times, sizes = np.asarray(backward_s, float), np.asarray(elements, float)
    return omgs.Instance(
        times, sizes, Log(code["gamma"]), gathers * code[f"alpha-{workers}"], beta_s
    )


def recorded_shares(network: str) -> list[tuple[Floats, list[int]]]:
    """Return layers' shares of backward, and elements, in forward order, by recording; the lab's first."""
    workloads = source.open_campaign(name=source.OMGS).alone.workloads().values()
    lab = [each for each in workloads if each.n == len(tensors(network))]
    layers = [(each.backward_s[::-1], each.parameters[::-1]) for each in lab]
    if network == RESNET:
        profiles = [
            machine.profile("resnet50")
            for machine in source.recordings("layers").values()
        ]
        layers += [(each.backward_s, each.parameters) for each in profiles]
    return [(times / times.sum(), sizes.tolist()) for times, sizes in layers]


def topk_parts(network: str, gathers: int, elements: float = 0) -> tuple[float, float]:
    """Return how long TopK-SGD selects and sends at the code's costs, in s; elements : of another LSTM."""
    cost = cost_of(network)
    size = ELEMENT_BYTES * (elements or sum(tensors(network)))
    return float(cost.selection_s(size)), float(cost(size)) * gathers / 2


def left_s(network: str, *parts_s: float) -> Floats:
    """Return what OFF times TopK-SGD's time in Table VI leaves for computing (omgs Eq 4), in s."""
    left = printed().loc[network, "topk_s"] * np.array(OFF) - sum(parts_s)
    return left[left > 0]


def unstated(network: str) -> Iterator[tuple[Any, ...]]:
    """Yield units of the LSTM, or 0, gathers, tensors, `topk_parts` and `left_s` where any time is left."""
    for units, gathers in product(UNITS if network == LSTM else (0,), (1, 2)):
        lstm = [n for layer in networks.ptb_lstm(units) for n in layer.tensors]
        sizes = lstm if units else tensors(network)
        parts_s = topk_parts(network, gathers, sum(sizes))
        left = left_s(network, *parts_s)
        if left.size:
            yield units, gathers, sizes, parts_s, left


def message_counts(network: str, compute_s: float = 0) -> pd.DataFrame:
    """Return messages by both rules, at what Table VI leaves or compute_s; layers share it as recorded."""
    rows, density = [], printed().loc[network, "density"]
    for (shares, sizes), each in product(recorded_shares(network), unstated(network)):
        units, gathers, listed, _, left = each
        listed_as = dict(zip(tensors(network), listed, strict=True))
        elements = [listed_as.get(n, n) for n in sizes]
        whole_s = np.outer(BACKWARD, compute_s or left).flat
        for backward_s, by_code in product(whole_s, (False, True)):
            costs = as_in_the_code(backward_s * shares, elements, gathers, density)
            sends = ~omgs.find_merged_layers(costs, by_code=by_code)
            gathered = "one" if gathers == 1 else "both"
            rule = "its rule" if by_code else "Algorithm 1"
            rows.append((units, f"{gathered}, {rule}", int(sends.sum())))
    return pd.DataFrame(rows, columns=["units", "how", "messages"])
