"""osf Tables 2 and 3 counted anew, and the checks of their claims; Table 1 has symbols alone."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ddlkit.core.units import MIB
from workbook.common import claims, networks
from workbook.common.claims import Result, check, counted
from workbook.osf.cluster import FIVE, REPLACED, network_layers


def _mib(tensors: Sequence[int]) -> float:
    """Return a size in float32; osf's MB are MiB."""
    return 4 * sum(tensors) / MIB


def table2() -> pd.DataFrame:
    """Return osf Tab 2, counted from architectures: gflops are multiply-adds of one image / 1e9.

    layers: convolutions and dense layers, without a ResNet's projected shortcuts.
    """
    frame = claims.paper_table("osf", "tab02")
    names = frame["network"]
    shortcuts = {name: len(blocks) for name, blocks in networks.RESNET_BLOCKS.items()}
    return claims.recomputed(
        frame,
        gflops=[networks.multiply_adds(name) / 1e9 for name in names],
        size_mb=[_mib(networks.parameters(name)) for name in names],
        layers=[len(networks.layers(name)) - shortcuts.get(name, 0) for name in names],
        tensors=[len(networks.parameters(name)) for name in names],
    )


def table3() -> pd.DataFrame:
    """Return osf Tab 3: layers of VGG-16 that are replaced, and what replaces them."""
    layers = (*networks.layers("VGG16")[-3:], *network_layers(REPLACED)[-2:])
    sizes = [*(_mib(layer.tensors) for layer in layers), 0.0]
    return claims.recomputed(claims.paper_table("osf", "tab03"), size_mb=sizes)


# -- claims --------------------------------------------------------------------------------------


def _tensors(network: str) -> Result:
    return counted(len(networks.parameters(network)), "of the published architecture")


for _network in FIVE:
    check(f"osf-tab2-{_network.lower()}-tensors", _network)(_tensors)


@check("osf-tab2-resnet50-gflops")
def _gflops() -> Result:
    note = "two operations a multiply-add; multiply-adds are half, which agrees"
    return counted(2 * networks.multiply_adds("ResNet50") / 1e9, note)


@check("osf-tab2-vgg16-size")
def _network_size() -> Result:
    return _size(networks.parameters("VGG16"))


@check("osf-tab3-dense1")
def _layer_size() -> Result:
    return _size(networks.layers("VGG16")[-3].tensors[:1])


def _size(tensors: Sequence[int]) -> Result:
    note = f"as float32, in MiB; {4e-6 * sum(tensors):.1f} in MB of 10^6 bytes"
    return counted(_mib(tensors), note)
