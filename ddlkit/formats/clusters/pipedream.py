"""Layers of 14 networks as PipeDream's profiler timed them on one GPU: a graph of nodes, one a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.formats import clusters
from ddlkit.store.readers import BYTES_PER_PARAMETER

if TYPE_CHECKING:
    from pandas import DataFrame

_NUMBER = r"\d+(?:\.\d+)?"
_NODE = re.compile(
    rf"node(\d+) -- (.+) -- forward_compute_time=({_NUMBER}), backward_compute_time=({_NUMBER}), "
    rf"activation_size=({_NUMBER}|\[{_NUMBER}(?:; {_NUMBER})*\]), parameter_size=({_NUMBER})"
)
_INPUT = "Input"  # its forward time is that of loading data
_EDGE = re.compile(r"\tnode(\d+) -- node(\d+)")


def read_layers(path: Path) -> DataFrame:
    """Columns node, layer, forward_s, backward_s, activation_bytes, parameter_bytes, and after.

    One row a node, in the order of their numbers, which is one of forward: every node comes after those
    that it takes its input from. after : (nodes) numbers of those, a tuple
    The file prints milliseconds and bytes; activations of several outputs are summed.

    Raises UserError naming the line for one that is neither a node nor an edge (cut, or another unit), a node
    that comes twice, an edge against the order or of an unknown node, and a node that nothing leads to.
    """
    import pandas as pd

    rows: dict[int, tuple[object, ...]] = {}
    before: dict[int, list[int]] = {}
    for number, line in enumerate(clusters.read(path).splitlines(), 1):
        where = f"{path}: line {number}"
        if node := _NODE.fullmatch(line):
            if int(node[1]) in rows:
                raise UserError(
                    f"{where}: node{node[1]} comes twice: two files in one? divide them"
                )
            sizes = sum(map(float, re.findall(_NUMBER, node[5])))
            times = float(node[3]) / 1e3, float(node[4]) / 1e3
            rows[int(node[1])] = (node[2], *times, int(sizes), int(float(node[6])))
        elif edge := _EDGE.fullmatch(line):
            start, end = int(edge[1]), int(edge[2])
            if start >= end or not {start, end} <= rows.keys():
                raise UserError(f"{where}: an edge from node{start} to node{end}: damaged or cut")
            before.setdefault(end, []).append(start)
        else:
            raise UserError(f"{where}: neither a node nor an edge, or cut: {line[:40]!r}")
    _check_connected(path, rows, before)
    names = ["layer", "forward_s", "backward_s", "activation_bytes", "parameter_bytes"]
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=names).sort_index()
    frame["after"] = [tuple(sorted(before.get(node, ()))) for node in frame.index]
    return frame.rename_axis("node").reset_index()


def _check_connected(
    path: Path, rows: dict[int, tuple[object, ...]], before: dict[int, list[int]]
) -> None:
    """Only inputs, and what makes constants and costs nothing, come after nothing."""
    if not before:
        raise UserError(f"{path}: has no edges: the file is cut")
    for node, (layer, forward_s, backward_s, *_) in rows.items():
        is_input = str(layer).startswith(_INPUT)
        if node not in before and not is_input and (forward_s or backward_s):
            raise UserError(f"{path}: nothing leads to node{node} ({layer}): edges are cut off")


def layer_profile(layers: DataFrame, network: str, batch: int) -> LayerProfile:
    """The rows of `read_layers` as a layer profile in float32: one tensor a layer that has parameters.

    Inputs are left out: their time is that of loading data. What layers without parameters take counts as
    spent when autograd spends it: forward with the layer before, backward before the gradient of the layer
    in front of them is ready; what lies in front of the first tensor counts with it.

    Raises UserError where no layer has parameters.
    """
    layers = layers[~layers["layer"].str.startswith(_INPUT)]
    owner = np.cumsum(layers["parameter_bytes"].to_numpy() > 0) - 1
    if owner.max() < 0:
        raise UserError(f"{network}: no layer has parameters: nothing to send")
    owner = np.maximum(owner, 0)
    own = layers[layers["parameter_bytes"] > 0]
    names = tuple(f"node{node}" for node in own["node"])
    forward_s, backward_s = np.zeros(len(own)), np.zeros(len(own))
    np.add.at(forward_s, owner, layers["forward_s"].to_numpy())
    np.add.at(backward_s, owner, layers["backward_s"].to_numpy())
    n_bytes = own["parameter_bytes"].to_numpy()
    return LayerProfile(
        network=network,
        device="PipeDream's GPU",
        batch=batch,
        tensor=names,
        layer=tuple(own["layer"]),
        parameters=n_bytes // BYTES_PER_PARAMETER,
        gradient_bytes=n_bytes,
        forward_s=forward_s,
        backward_s=backward_s,
        flops=np.zeros(len(own)),
    )
