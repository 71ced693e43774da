"""Pollux: iterations on T4 GPUs in many placements, predicted from the smallest batch of each.

Models know two numbers: C, what compute takes alone, and W, what all bytes take on the link alone, which
nobody timed and the placement's row to calibrate shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ddlkit.core import plan
from ddlkit.core.link import one_by_one
from ddlkit.core.workload import Floats, Workload
from workbook.validate import clusters

Model = Callable[[Floats, Floats], Floats]
"""(C, W), both (..., n) seconds -> (..., n) seconds of as many iterations; more W makes none shorter."""
NETWORKS = {
    "pollux-bert": "BERT",
    "pollux-deepspeech2": "DeepSpeech2",
    "pollux-ncf": "NCF",
    "pollux-resnet18": "ResNet-18",
    "pollux-resnet50-fitted": "ResNet-50",
    "pollux-yolov3": "YOLOv3",
}
PLACE = ["placement", "nodes", "ranks"]
"""What tells placements apart: a file by nodes and ranks does not say how many GPUs each node has."""


def wire_s(model: Model, compute_s: Floats, iteration_s: Floats) -> Floats:
    """Return the (..., n) W with which a model takes iteration_s (n,), found by halving; 0 where none is."""
    alone_s, shown_s = np.asarray(compute_s, float), np.asarray(iteration_s, float)
    least_s = model(alone_s, np.zeros_like(shown_s))
    low_s, high_s = np.zeros_like(least_s), np.broadcast_to(shown_s, least_s.shape)
    reached = (least_s < shown_s) & (model(alone_s, high_s) >= shown_s)
    for _ in range(53):  # which leaves what doubles cannot tell apart
        middle_s = (low_s + high_s) / 2
        enough = model(alone_s, middle_s) >= shown_s
        low_s, high_s = (
            np.where(enough, low_s, middle_s),
            np.where(enough, middle_s, high_s),
        )
    return np.where(reached, high_s, 0.0)


def norm(gamma: ArrayLike) -> Model:
    """Return Pollux's own form, (C^gamma + W^gamma)^(1/gamma): 1 hides nothing, infinity hides all."""
    power = np.asarray(gamma, float)

    def iteration_s(compute_s: Floats, wire_s: Floats) -> Floats:
        longer, shorter = np.maximum(compute_s, wire_s), np.minimum(compute_s, wire_s)
        return np.asarray(longer * (1 + (shorter / longer) ** power) ** (1 / power))

    return iteration_s


def slowed(workload: Workload, slowdown: ArrayLike) -> Model:
    """Return the recursion over PyTorch's buckets; slowdown : of compute, or (k, 1) for times of (k, n)."""
    sent = plan.ddp(workload)
    ready = sent.group_ready_s(workload) / workload.compute_s
    size = sent.group_bytes(workload) / workload.bytes.sum()
    update = workload.update_s / workload.compute_s

    def iteration_s(compute_s: Floats, wire_s: Floats) -> Floats:
        scenarios = np.broadcast_shapes(
            compute_s.shape, wire_s.shape, np.shape(slowdown)
        )
        alone_s, sent_s = (
            np.broadcast_to(times, scenarios) for times in (compute_s, wire_s)
        )
        ready_s, moved_s = (
            np.multiply.outer(alone_s, ready),
            np.multiply.outer(sent_s, size),
        )
        of_each = np.asarray(slowdown, float)[..., None]
        ends_s = one_by_one(ready_s, np.zeros_like(ready_s), moved_s, slowdown=of_each)[
            1
        ]
        return np.asarray(ends_s[..., -1] + update * compute_s)

    return iteration_s


def model(name: str, workload: Workload, number: ArrayLike = 0.0) -> Model:
    """Return a model on trial of a network's shape and its free number, or of (k, 1) for times of (k, n)."""
    simple: dict[str, Model] = {"no_overlap": np.add, "perfect_overlap": np.maximum}
    simple["norm"] = norm(number)
    return simple[name] if name in simple else slowed(workload, number)


MODELS: dict[str, Sequence[float]] = {
    "no_overlap": (0.0,),
    "perfect_overlap": (0.0,),
    "norm": np.linspace(1.0, 10.0, 91).tolist(),
    "workbook": (0.0,),
    "workbook_slowed": np.linspace(0.0, 1.0, 51).tolist(),
}
"""Models on trial, and what their free number may be; Pollux keeps its own between 1 and 10."""

_NODE = re.compile(
    r"^node(\d+) -- (.+) -- forward_compute_time=(\S+), backward_compute_time=(\S+), "
    r"activation_size=.+, parameter_size=(\S+)$",
    re.MULTILINE,
)


@cache
def pipedream_workload(network: str) -> Workload:
    """Return a network as PipeDream's profiler recorded it, one tensor a layer; the batch is unknown.

    Layers without parameters count to the one before them that has some, or to the first. The input is left
    out: its time is that of loading data.
    """
    nodes = _NODE.findall(
        clusters.read(clusters.EXTERNAL / "pipedream" / f"{network}.txt.gz")
    )
    layers = (node for node in nodes if node[1][:5] != "Input")
    numbers = sorted((int(node[0]), *map(float, node[2:])) for node in layers)
    _, forward_ms, backward_ms, sizes = np.array(numbers).T
    backward_s = (
        np.bincount(np.maximum(np.cumsum(sizes > 0) - 1, 0), backward_ms)[::-1] / 1e3
    )
    return Workload.from_arrays(
        forward_ms.sum() / 1e3, backward_s, sizes[sizes > 0][::-1]
    )


def bert() -> Workload:
    """Return BERT-base by published sizes, the embedding last; backward takes 1, by elements, forward 0.5."""
    attention, outer = [768 * 769] * 4, [768 * 3072] * 2
    elements = np.array([*(outer + attention) * 12, 768 * (30_522 + 514)])
    backward_s = np.array([*elements[:-1] / elements[:-1].sum(), 0.0])
    return Workload.from_arrays(0.5, backward_s, 4 * elements)


def uniform() -> Workload:
    """Return a network of unknown shape: ten layers as large as PyTorch's bucket; times as `bert`."""
    return Workload.from_arrays(
        0.5, np.full(10, 0.1), np.full(10, plan.DDP_BUCKET_BYTES)
    )


SHAPES: dict[str, Callable[[], Workload]] = {
    "resnet50": clusters.resnet50,
    "resnet18": partial(pipedream_workload, "resnet18"),
    "bert": bert,
    "uniform": uniform,
}
"""Shares of compute and of bytes by layer, which `shape` of a rule names. PipeDream's ResNet-18 is that of
1,000 classes and 224 pixels, Pollux's that of 10 classes and 32 pixels."""


def timings(parts: clusters.Rows, target: pd.DataFrame) -> Floats:
    """Return (3, n) seconds that a model knows of n rows: C, and C and iteration of that to calibrate."""
    alone = parts.compute.set_index("batch")["iteration_s"]
    shown = parts.calibrate.set_index(PLACE).loc[
        pd.MultiIndex.from_frame(target[PLACE])
    ]
    return np.array(
        [alone[target["batch"]], alone[shown["batch"]], shown["iteration_s"]]
    )


def predict(timed_s: Floats, blind: Model) -> Floats:
    """Return (..., n) iterations in seconds from (3, n) of `timings`."""
    compute_s, shown_compute_s, shown_s = timed_s
    return blind(compute_s, wire_s(blind, shown_compute_s, shown_s))


def fit(parts: clusters.Rows, name: str, shape: Workload) -> float:
    """Return the free number with the least mean error on the rows to fit of several nodes; 0 for none."""
    drawn, numbers = parts.fit.query("nodes > 1"), np.array(MODELS[name])
    each_s = predict(timings(parts, drawn), model(name, shape, numbers[:, None]))
    errors = np.abs(each_s / drawn["iteration_s"].to_numpy() - 1)
    return float(numbers[np.atleast_2d(errors).mean(axis=1).argmin()])


def most_gpus(target: pd.DataFrame) -> NDArray[np.int64]:
    """Return (n,) GPUs on the fullest node; where the placement is not known, of ranks spread evenly."""
    even = -(-target["ranks"] // target["nodes"])
    placed = target["placement"].map(lambda text: max(map(int, text), default=0))
    return np.where(placed > 0, placed, even).astype(np.int64)


def predictions(rules: Sequence[str] = tuple(NETWORKS)) -> pd.DataFrame:
    """Return the rules' test rows by every model, with placement, nodes, ranks, batch and most_gpus."""
    each = []
    for rule in rules:
        parts, shape = clusters.rows(rule), SHAPES[clusters.rules()[rule]["shape"]]()
        timed_s = timings(parts, parts.test)
        kept = parts.test[[*PLACE, "batch"]].assign(
            rule=rule, most_gpus=most_gpus(parts.test)
        )
        kept["measured_s"] = parts.test["iteration_s"]
        for name in MODELS:
            blind = model(name, shape, fit(parts, name, shape))
            each.append(kept.assign(model=name, predicted_s=predict(timed_s, blind)))
    return pd.concat(each, ignore_index=True)


def by_node(predicted: pd.DataFrame, rule: str, name: str = "workbook") -> pd.Series:
    """Return the median signed error by GPUs on the fullest node, of the larger half of the batches."""
    rows = predicted.query("rule == @rule and model == @name")
    large = rows[rows["batch"] >= rows["batch"].median()]
    return (
        (large["predicted_s"] / large["measured_s"] - 1)
        .groupby(large["most_gpus"])
        .median()
    )
