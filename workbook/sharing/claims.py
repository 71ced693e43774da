"""The checks of the sharing paper's claims. Importing this module registers them all.

The checks of a figure or of a table are in its module. Those that belong to neither are
here.
"""

from __future__ import annotations

import pandas as pd

from workbook.common import source, specs
from workbook.common.claims import Result, check, counted
from workbook.sharing import (
    fig01,
    fig02,
    fig03,
    fig04,
    fig05,
    fig06,
    fig07,
    fig08,
    tables,
)
from workbook.sharing.printed import throughput

REGISTERING = (fig01, fig02, fig03, fig04, fig05, fig06, fig07, fig08, tables)
"""The other modules whose import registers checks of this paper."""


@check("sharing-backward-flop")
def _backward_flop() -> Result:
    """Count the FLOP of a backward pass, divided by those of the forward pass.

    A layer computes two gradients, that of its weights and that of its input. Each costs as
    much as the layer's forward pass. The first layer needs no gradient of its input.
    """
    recordings = source.recordings("layers").values()
    profiles = pd.concat([recording.table("layers") for recording in recordings])
    # The first level of the index has the paper's names of networks.
    names = [specs.network_named(name) for name in throughput().index.levels[0]]
    of_paper = profiles[profiles["network"].isin(names)]
    # Tensors without FLOP, such as biases, would hide the first layer.
    rows = of_paper.query("ranks == 1 and flops > 0")
    # FLOP grow with the batch, so that each batch is a profile of its own.
    profile_columns = ["network", "machine", "device", "precision", "batch"]
    # The rows of a profile are in forward order, so that its first layer comes first.
    forward_flops = rows.groupby(profile_columns)["flops"]
    # (2 x FLOP of all layers - FLOP of the first layer) / FLOP of all layers
    ratios = 2 - forward_flops.first() / forward_flops.sum()
    networks = ", ".join(ratios.index.unique("network"))
    return counted(ratios, f"matrix products, as PyTorch counts them in {networks}")
