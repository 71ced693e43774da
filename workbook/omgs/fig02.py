"""omgs Figure 2: what selecting gradients costs, and what an all-gather costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.cost import MessageCost
from ddlkit.core.fit import Fit
from workbook import plots
from workbook.common.claims import claimed, paper_table

DENSITY = 0.001
"""The density of Figure 2a."""
NODES = 16
"""The number of nodes of Figure 2b."""


def draw(
    selecting: Mapping[str, Fit],
    gathering: Sequence[Fit[MessageCost]],
    measured: pd.DataFrame,
) -> tuple[Figure, pd.DataFrame, tuple[float, float]]:
    """Return the figure, its numbers, and the authors' code's alpha (s) and beta (s/byte)."""
    code = paper_table("omgs", "code").set_index("id")["value"].astype(float)
    few, ring = np.geomspace(1e3, 1e6, 7).round(), gathering[0]
    nodes = ring.cost.workers if f"alpha-{ring.cost.workers}" in code else NODES
    gamma_s = claimed("omgs-gamma") * few * np.log2(few)
    lines = {
        f"code_{n}_s": code[f"alpha-{n}"] + code[f"beta-{n}"] * few
        for n in dict.fromkeys((nodes, NODES))
    }
    paper = {
        "paper:γ, without ρ": gamma_s,
        "paper:γ, with ρ (Eq 10)": DENSITY * gamma_s,
    }
    authors = {
        f"paper:code, {name.split('_')[1]} nodes": 1e3 * s for name, s in lines.items()
    }
    figure, axes = plots.canvas(columns=2, height=3.8)
    for ax, printed_s in zip(axes, (paper, authors), strict=True):
        plots.lines(ax, pd.DataFrame(printed_s, few), xlabel="", ylabel="", legend="")
    plots.cost_fit(axes[0], dict(selecting))
    plots.cost_fit(axes[1], {fit.form: fit for fit in gathering})
    names = (
        f"torch.topk at a density of {DENSITY:g}",
        f"all-gather among {ring.cost.workers} ranks",
    )
    for ax, name in zip(axes, names, strict=True):
        ax.set_ylim(top=30 * ax.get_ylim()[1])  # room for the legend
        plots.heading(ax, name)
    medians = (
        measured.groupby(["elements", "density"])["seconds"].median().reset_index()
    )
    said = "Above a million elements, selecting takes longer than both fitted forms say"
    plots.title(figure, said)
    gathered = pd.Series(ring.seconds).groupby(ring.sizes).median()
    printed = {"paper_no_density_s": gamma_s, "paper_s": DENSITY * gamma_s}
    parts = [medians, gathered.rename("gather_s").rename_axis("bytes").reset_index()]
    parts += [
        pd.DataFrame({"elements": few, **printed}),
        pd.DataFrame({"bytes": few, **lines}),
    ]
    numbers = pd.concat(parts, ignore_index=True).astype(
        {"elements": "Int64", "bytes": "Int64"}
    )
    of_code = float(code[f"alpha-{nodes}"]), float(code[f"beta-{nodes}"])
    return figure, numbers, of_code
