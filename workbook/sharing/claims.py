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
    """Count the FLOP of a backward pass over those of the forward pass.

    Each of the two gradients of a layer costs as much as its forward pass, but the first
    layer needs only one of them.
    """
    recordings = source.recordings("layers").values()
    profiles = pd.concat([recording.table("layers") for recording in recordings])
    names = [specs.network_named(name) for name in throughput().index.levels[0]]
    of_paper = profiles[profiles["network"].isin(names)]
    rows = of_paper.query("ranks == 1 and flops > 0")
    # Of each batch alone: the first layer has its share of the FLOP of its own batch.
    profile = ["network", "machine", "device", "precision", "batch"]
    by_profile = rows.groupby(profile)["flops"]
    # Two gradients for each layer but the first, whose share of the FLOP is taken off.
    ratios = 2 - by_profile.first() / by_profile.sum()
    networks = ", ".join(ratios.index.unique("network"))
    return counted(ratios, f"matrix products, as PyTorch counts them in {networks}")
