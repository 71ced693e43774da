"""Tables 2 and 3 of the osf paper next to counts from architectures, and their checks.

Table 1 has only symbols.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ddlkit.core.units import MIB
from workbook.common import claims, networks
from workbook.common.claims import Result, check, counted
from workbook.osf.cluster import FIVE, REPLACED, network_layers


def _mib(tensors: Sequence[int]) -> float:
    """Return the size of float32 tensors in MiB, which the paper calls MB."""
    return 4 * sum(tensors) / MIB


def table2() -> pd.DataFrame:
    """Return Table 2 of the osf paper next to counts from the published architectures.

    Returns
    -------
    DataFrame
        A row for each network. `workbook.common.claims.recomputed` puts computed columns
        next to the printed ones. The computed ``gflops`` are the multiply-adds of one image
        divided by 1e9, ``size_mb`` is the size of the parameters in MiB, ``layers`` counts
        convolutions and dense layers without the projected shortcuts of a ResNet, and
        ``tensors`` counts arrays of parameters.
    """
    printed = claims.paper_table("osf", "tab02")
    gflops = []
    size_mib = []
    n_layers = []
    n_tensors = []
    for name in printed["network"]:
        # The number of parameters in each tensor.
        parameters = networks.parameters(name)
        # Each stage of a ResNet has one projected shortcut. A VGG has no stages.
        shortcuts = len(networks.RESNET_BLOCKS.get(name, ()))
        gflops.append(networks.multiply_adds(name) / 1e9)
        size_mib.append(_mib(parameters))
        n_layers.append(len(networks.layers(name)) - shortcuts)
        n_tensors.append(len(parameters))
    return claims.recomputed(
        printed, gflops=gflops, size_mb=size_mib, layers=n_layers, tensors=n_tensors
    )


def table3() -> pd.DataFrame:
    """Return osf Table 3, the replaced layers of VGG-16 and their replacements."""
    replaced = networks.layers("VGG16")[-3:]
    replacements = network_layers(REPLACED)[-2:]
    size_mib = [_mib(layer.tensors) for layer in (*replaced, *replacements)]
    # The last row is a pooling layer, which has no parameters.
    size_mib.append(0.0)
    return claims.recomputed(claims.paper_table("osf", "tab03"), size_mb=size_mib)


# -- claims --------------------------------------------------------------------------


def _tensors(network: str) -> Result:
    return counted(len(networks.parameters(network)), "of the published architecture")


for _network in FIVE:
    check(f"osf-tab2-{_network.lower()}-tensors", _network)(_tensors)


@check("osf-tab2-resnet50-gflops")
def _gflops() -> Result:
    giga_multiply_adds = networks.multiply_adds("ResNet50") / 1e9
    readings = {
        "two operations a multiply-add": counted(2 * giga_multiply_adds, ""),
        "one operation a multiply-add": counted(giga_multiply_adds, ""),
    }
    return claims.by_readings(readings)


@check("osf-tab2-vgg16-size")
def _network_size() -> Result:
    return _size(networks.parameters("VGG16"))


@check("osf-tab3-dense1")
def _layer_size() -> Result:
    return _size(networks.layers("VGG16")[-3].tensors[:1])


def _size(tensors: Sequence[int]) -> Result:
    note = f"as float32, in MiB; {4e-6 * sum(tensors):.1f} in MB of 10^6 bytes"
    return counted(_mib(tensors), note)
