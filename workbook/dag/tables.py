"""The tables of the dag paper next to what is counted here, and their checks."""

from __future__ import annotations

import pandas as pd

from workbook.common import claims, networks
from workbook.common.claims import Result, check, counted, own
from workbook.dag.cluster import BATCH, CLUSTERS, parameter_millions

K80 = CLUSTERS["K80"]
V100 = CLUSTERS["V100"]


@check(
    "dag-storage",
    K80.storage_bytes_per_s / V100.storage_bytes_per_s,
    "1.1 GB/s over 367.30 MB/s",
)
@check(
    "dag-nvlink",
    V100.connection_bytes_per_s / K80.connection_bytes_per_s,
    "95 GB/s over 15 GB/s",
)
def _of_table2(ratio: float, note: str) -> Result:
    return own(ratio, note)


def table4() -> pd.DataFrame:
    """Return Table IV of the dag paper next to counts from the published architectures.

    Returns
    -------
    DataFrame
        The printed columns, those which `workbook.common.claims.recomputed` adds for the
        millions of parameters, and ``gflop_computed``, the GFLOP of the forward pass of one
        image.
    """
    printed = claims.paper_table("dag", "tab04")
    millions = [parameter_millions(name) for name in printed["network"]]
    # A multiply-add is two operations.
    gflop = [2 * networks.multiply_adds(name) / 1e9 for name in printed["network"]]
    table = claims.recomputed(printed, parameters_millions=millions)
    return table.assign(gflop_computed=gflop)


@check(
    "dag-tab4-resnet50",
    "ResNet50",
    "23.5 M without its dense layer, which rounds to 24",
)
@check(
    "dag-tab4-googlenet",
    "GoogLeNet",
    "13.4 M with training's heads: print fits their MB",
)
@check(
    "dag-tab4-alexnet",
    "AlexNet",
    "grouped, as Table VI's sizes; torchvision's has 61.1 M",
)
def _parameters(network: str, note: str) -> Result:
    return counted(
        parameter_millions(network), f"of the published architecture; {note}"
    )


def table6() -> pd.DataFrame:
    """Return Table VI of the dag paper, one iteration of AlexNet layer by layer.

    Returns
    -------
    DataFrame
        The printed columns, and the size of each layer's float32 gradients counted from
        the architecture. Two more columns have the rates that follow from the printed
        times, NaN for a layer without parameters:

        forward_flops_per_s_computed
            The FLOP of a batch's forward pass, counted from the architecture, per second.
        communication_bytes_per_s_computed
            The printed bytes of the gradients per second.
    """
    printed = claims.paper_table("dag", "tab06")
    # The printed sizes only tell which rows have parameters: those whose size is not 0.
    layers = _alexnet_layers(printed["size_bytes"])
    # A float32 number has 4 bytes.
    size_bytes = [4 * sum(layer.tensors) for layer in layers]
    table = claims.recomputed(printed, size_bytes=size_bytes)

    # A multiply-add is two operations.
    batch_flops = pd.Series(
        [2.0 * BATCH["AlexNet"] * layer.multiply_adds for layer in layers]
    )
    has_parameters = batch_flops > 0
    # Rows without parameters become NaN.
    counted_flops = batch_flops.where(has_parameters)
    printed_bytes = printed["size_bytes"].where(has_parameters)
    # Times are printed in microseconds.
    return table.assign(
        forward_flops_per_s_computed=1e6 * counted_flops / printed["forward_us"],
        communication_bytes_per_s_computed=(
            1e6 * printed_bytes / printed["communication_us"]
        ),
    )


def _alexnet_layers(size_bytes: pd.Series) -> list[networks.Layer]:
    """Return the layer of AlexNet for each printed row of Table VI.

    ``size_bytes`` are the printed sizes of the rows. Rows of size 0, such as pooling, get a
    layer without parameters, because the architecture has no layer for them.
    """
    # The printed rows and the layers of the architecture are in forward order.
    remaining = iter(networks.layers("AlexNet"))
    layers = []
    for layer_bytes in size_bytes:
        if layer_bytes > 0:
            layers.append(next(remaining))
        else:
            layers.append(networks.Layer(tensors=(), multiply_adds=0))
    return layers
