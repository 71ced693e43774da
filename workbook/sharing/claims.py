"""All checks of the sharing paper's claims: importing this module registers them.

Those of a figure or a table stand in its module; here is what belongs to none.
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
    """Each layer's two gradients cost as much as its forward, but the first layer needs only one."""
    names = [specs.network_named(name) for name in throughput().index.levels[0]]
    recorded = (each.table("layers") for each in source.recordings("layers").values())
    rows = pd.concat(recorded).query("ranks == 1 and flops > 0")
    rows = rows[rows["network"].isin(names)]
    by = rows.groupby(["network", "machine", "precision"])["flops"]
    ratios = 2 - by.first() / by.sum()
    counts = ", ".join(ratios.index.unique("network"))
    return counted(ratios, f"matrix products, as PyTorch counts them in {counts}")
