"""Tables 1 to 3 of `osf`."""

from __future__ import annotations

import pandas as pd

from ddlkit.core.units import MIB
from ddlkit.papers import networks
from ddlkit.report.claims import paper_table
from ddlkit.report.tables import recomputed


def table2() -> pd.DataFrame:
    """osf Tab 2: five networks, counted from their architectures.

    gflops: multiply-adds of one image / 1e9; size_mb: float32 in MiB; layers: convolutions and dense
    layers without a ResNet's projected shortcuts; tensors: parameter tensors.
    """
    frame = paper_table("osf", "tab02")
    names = frame["network"]
    frame = recomputed(frame, "gflops", [networks.multiply_adds(name) / 1e9 for name in names])
    sizes = [4 * sum(networks.parameters(name)) / MIB for name in names]
    frame = recomputed(frame, "size_mb", sizes)
    shortcuts = {name: len(blocks) for name, blocks in networks.RESNET_BLOCKS.items()}
    layers = [len(networks.layers(name)) - shortcuts.get(name, 0) for name in names]
    frame = recomputed(frame, "layers", layers)
    return recomputed(frame, "tensors", [len(networks.parameters(name)) for name in names])


def table3() -> pd.DataFrame:
    """osf Tab 3: the layers of VGG-16 that are replaced, and what replaces them.

    size_mb: weights and biases in float32, MiB.
    """
    replaced = networks.layers("VGG16")[-3:]
    placed = networks.conv(512, 512, 1, side=7), networks.conv(512, 1000, 1, side=7)
    elements = [sum(layer.tensors) for layer in (*replaced, *placed)]
    pooling = 0
    sizes = [4 * count / MIB for count in (*elements, pooling)]
    return recomputed(paper_table("osf", "tab03"), "size_mb", sizes)
