"""What dag Figs 2, 3 and 4 share: speedups in all compatible settings, and bars of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.strategies import STRATEGIES
from ddlkit.core.taskgraph import Gpus
from workbook import plots
from workbook.dag.cluster import CLUSTERS, NETWORKS, SPELLED
from workbook.dag.settings import compatible

MODEL = ["model", "model_low", "model_high"]
"""A speedup at the most central of the compatible settings, the least and the most over all of them."""


def speedup(case: Sequence[str], gpus: Gpus, over: Gpus) -> tuple[float, float, float]:
    """Return MODEL: the speedup of a case (cluster, network, framework) over a smaller machine."""
    settings = compatible()
    cluster, network, framework = case
    alone_s, together_s = (
        settings.iteration_s(cluster, network, framework, size) for size in (over, gpus)
    )
    each = np.ravel(gpus.n / over.n * (alone_s / together_s))
    return float(each[0]), float(each.min()), float(each.max())


def modelled(number: int, sizes: Sequence[Gpus]) -> pd.DataFrame:
    """Return speedups over the first of ``sizes``, a row a bar, of the figure of that number."""
    rows = [
        (number, *case, gpus.n, *speedup(case, gpus, sizes[0]))
        for case in product(CLUSTERS, NETWORKS, STRATEGIES)
        for gpus in sizes
    ]
    columns = ["figure", "cluster", "network", "framework", "gpus"]
    return pd.DataFrame(rows, columns=[*columns, *MODEL])


def draw_bars(bars: pd.DataFrame, over: str) -> Figure:
    """Draw `modelled` bars with ``paper``: a line over all settings, a marker at the most central one.

    over : of what they are speedups, as the axis says it
    """
    rows = bars[bars["gpus"] > bars["gpus"].min()].replace({"network": SPELLED})
    names, most = list(rows["framework"].unique()), rows["gpus"].max()
    whole = rows.loc[rows["gpus"] == most, "model"]
    said = (
        f"In the most central setting {most} GPUs are {whole.min():.1f} to "
        f"{whole.max():.1f} times as fast as {over}; "
        f'the paper\'s "nearly linear" is drawn at {rows["paper"].max():g}'
    )
    with plots.sheet(said, columns=3, rows=2, height=4.3, sharex=True, sharey=True) as (
        figure,
        axes,
    ):
        panels = rows.groupby(["cluster", "network"], sort=False)
        for ax, ((cluster, network), panel) in zip(axes.flat, panels, strict=True):
            ends, sizes = ["model_low", "model_high", "model"], panel.groupby("gpus")
            ranges = {
                f"model:of {n} GPUs": tuple(of[end] for end in ends)
                for n, of in reversed([*sizes])
            }
            plots.intervals(ax, names, ranges, label=f"speedup over {over}")
            paper = panel.loc[panel["gpus"] == most, "paper"]
            plots.points(ax, paper, np.arange(len(names)) + 0.17, "paper", size=5)
            ax.set(title=f"{network}, {cluster}", xlim=(0, 4.3), xticks=range(5))
            ax.label_outer()
    return figure
