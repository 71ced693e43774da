"""Tables 1 and 2 of `sharing`."""

from __future__ import annotations

import pandas as pd

from ddlkit.papers import sharing
from ddlkit.report.checks.sharing import DEFAULT, throughput
from ddlkit.report.claims import paper_table, percent
from ddlkit.report.tables import recomputed
from ddlkit.run.nets import registry as networks
from ddlkit.store import network_named

BATCHES = (16, 32, 64, 128)
SHAPE = (64, 64, 224, 224)
"""Of every kernel's input; Tab 1 leaves batch norm's out, and flattens the last two for the linear layer."""


def table1() -> pd.DataFrame:
    """Five kernels: as printed, with the FLOP of matrix products (2 per multiply-add) and least bytes.

    Average pooling is not defined, so only the bytes that it reads are counted; what does no matrix
    product has no FLOP here. float32 is assumed: the paper states no precision.
    """
    work = {
        "Average Pooling": (float("nan"), sharing.elementwise_bytes(SHAPE, passes=1)),
        "Batch Norm": (float("nan"), sharing.elementwise_bytes(SHAPE)),
        "Convolution": sharing.convolution_work(SHAPE, outputs=64, kernel=7, stride=2, padding=3),
        "Linear": sharing.linear_work((*SHAPE[:2], SHAPE[2] * SHAPE[3]), outputs=64),
        "ReLU": (float("nan"), sharing.elementwise_bytes(SHAPE)),
    }
    printed = paper_table("sharing", "tab01")
    flops, moved = zip(*(work[kernel] for kernel in printed["kernel"]), strict=True)
    return printed.assign(flops_computed=flops, bytes_computed=moved)


def table2() -> pd.DataFrame:
    """Seven networks at four batch sizes: best configuration and gain, as printed and from Fig 8.

    best_from_fig08 names all configurations that share the largest throughput.
    """
    printed = paper_table("sharing", "tab02")
    grid = throughput()
    rows = []
    for network in printed.to_dict("records"):
        for batch in BATCHES:
            row = grid.loc[(network["network"], batch)]
            rows.append(
                {
                    "network": network["network"],
                    "batch": batch,
                    "best": network[f"best_{batch}"],
                    "best_from_fig08": " = ".join(row.index[row == row.max()]),
                    "gain_percent": network[f"gain_{batch}_percent"],
                    "gain_percent_computed": percent(sharing.gain(row.max(), row[DEFAULT])),
                }
            )
    table = pd.DataFrame(rows)
    computed = table.pop("gain_percent_computed")
    return recomputed(table, "gain_percent", computed.to_list())


def table2_networks() -> pd.DataFrame:
    """Size, FLOP and intensity of the seven networks, as printed and of the zoo's."""
    printed = paper_table("sharing", "tab02")
    sizes = [networks.size(network_named(network)) for network in printed["network"]]
    counted = {
        "parameters_millions": [size.parameters / 1e6 for size in sizes],
        "gflop": [size.forward_flops / 1e9 for size in sizes],
        "intensity": [
            sharing.model_intensity(size.forward_flops, size.parameters) for size in sizes
        ],
    }
    table = printed[["network", *counted]]
    for column, values in counted.items():
        table = recomputed(table, column, values)
    return table
