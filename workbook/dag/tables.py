"""dag's tables beside what is counted here, and their checks."""

from __future__ import annotations

import pandas as pd

from workbook.common import claims, networks
from workbook.common.claims import Result, check, counted, own
from workbook.dag.cluster import BATCH, CLUSTERS, parameter_millions

K80, V100 = CLUSTERS["K80"], CLUSTERS["V100"]


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
    """Return dag Tab IV, counted from architectures, and GFLOP of a forward pass on one image."""
    frame = claims.paper_table("dag", "tab04")
    names = frame["network"]
    millions = map(parameter_millions, names)
    known = claims.recomputed(frame, parameters_millions=millions)
    return known.assign(
        gflop_computed=[2 * networks.multiply_adds(name) / 1e9 for name in names]
    )


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
    """Return dag Tab VI: one iteration of Caffe's AlexNet in float32, layer by layer.

    Added: forward FLOP of the batch, and bytes, over the printed times of layers with parameters.
    """
    frame = claims.paper_table("dag", "tab06")
    layers = iter(networks.layers("AlexNet"))
    of_rows = [
        next(layers) if size else networks.Layer((), 0) for size in frame["size_bytes"]
    ]
    flops = pd.Series(
        [2.0 * BATCH["AlexNet"] * layer.multiply_adds for layer in of_rows]
    )
    size = frame["size_bytes"].where(flops > 0)
    sizes = [4 * sum(layer.tensors) for layer in of_rows]
    return claims.recomputed(frame, size_bytes=sizes).assign(
        forward_flops_per_s_computed=1e6 * flops.where(flops > 0) / frame["forward_us"],
        communication_bytes_per_s_computed=1e6 * size / frame["communication_us"],
    )
