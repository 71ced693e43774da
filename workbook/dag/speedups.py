"""What Figs 2, 3 and 4 of the dag paper share: speedups in all compatible settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.strategies import STRATEGIES
from ddlkit.core.taskgraph import Gpus
from workbook import plots
from workbook.dag.cluster import CLUSTERS, NETWORKS, SPELLED
from workbook.dag.settings import compatible

MODEL = ["model", "model_low", "model_high"]
"""The columns of a speedup.

They are the speedup at the most central of the compatible settings, and the least and the
largest speedup over all of these settings."""


def speedup(
    case: tuple[str, str, str], gpus: Gpus, reference: Gpus
) -> tuple[float, float, float]:
    """Return the speedup of some GPUs over fewer GPUs, with weak scaling.

    Parameters
    ----------
    case : (str, str, str)
        Cluster, network and framework.
    gpus : Gpus
        The GPUs whose speedup is returned.
    reference : Gpus
        The fewer GPUs with which they are compared.

    Returns
    -------
    (float, float, float)
        The values of the columns MODEL: the speedup in the most central of the compatible
        settings, and the least and the largest over all of them.
    """
    settings = compatible()
    reference_s = settings.iteration_s(*case, reference)
    together_s = settings.iteration_s(*case, gpus)
    # With weak scaling, n GPUs train n batches in an iteration. The ratio is a single
    # number if both times are the same in all settings.
    by_setting = np.ravel(gpus.n / reference.n * (reference_s / together_s))
    # The most central of the compatible settings is the first.
    return float(by_setting[0]), float(by_setting.min()), float(by_setting.max())


def modelled(number: int, sizes: Sequence[Gpus]) -> pd.DataFrame:
    """Return the speedups of a figure.

    Parameters
    ----------
    number : int
        The number of the figure, for the column ``figure``.
    sizes : sequence of Gpus
        The GPUs of each bar. Speedups are over the first of them.

    Returns
    -------
    DataFrame
        A row for each bar, with the columns ``figure``, ``cluster``, ``network``,
        ``framework``, ``gpus`` (a number) and those of MODEL.
    """
    rows = []
    # STRATEGIES has the names of the frameworks.
    for case in product(CLUSTERS, NETWORKS, STRATEGIES):
        for gpus in sizes:
            values = speedup(case, gpus, reference=sizes[0])
            rows.append((number, *case, gpus.n, *values))
    columns = ["figure", "cluster", "network", "framework", "gpus"]
    return pd.DataFrame(rows, columns=[*columns, *MODEL])


def draw_bars(bars: pd.DataFrame, reference: str) -> Figure:
    """Draw the speedups that are bars in the paper's figure, as lines with markers.

    There is a panel for each cluster and network. A line reaches from the least to the
    largest speedup over the compatible settings, and its marker is at the speedup in the
    most central one.

    Parameters
    ----------
    bars : DataFrame
        The rows of `modelled`, one for each bar of the paper. The column ``paper`` has the
        only speedup that the paper states of the figure, or NaN.
    reference : str
        What the speedups are over, as the axis has it, such as "one GPU".
    """
    # The fewest GPUs are those that all others are compared with. Their speedup is 1.
    rows = bars[bars["gpus"] > bars["gpus"].min()].replace({"network": SPELLED})
    all_gpus = rows["gpus"].max()
    of_all_gpus = rows.loc[rows["gpus"] == all_gpus, "model"]
    # All rows of which the paper states a speedup have the same one. `max` ignores NaN.
    stated_speedup = rows["paper"].max()
    title = (
        f"In the most central setting {all_gpus} GPUs are {of_all_gpus.min():.1f} to "
        f"{of_all_gpus.max():.1f} times as fast as {reference}; "
        f"what the paper states is drawn at {stated_speedup:g}"
    )
    panels = rows.groupby(["cluster", "network"], sort=False)
    sheet = plots.sheet(title, columns=3, rows=2, height=4.3, sharex=True, sharey=True)
    with sheet as (figure, axes):
        for ax, ((cluster, network), panel) in zip(axes.flat, panels, strict=True):
            _draw_panel(ax, panel, f"speedup over {reference}")
            ax.set_title(f"{network}, {cluster}")
    return figure


def _draw_panel(ax: Axes, panel: pd.DataFrame, label: str) -> None:
    """Draw the speedups of one cluster and network, a row for each framework.

    ``label`` is the label of the horizontal axis.
    """
    # The rows of each number of GPUs have the frameworks in this order.
    frameworks = list(panel["framework"].unique())
    ranges = {}
    # The name of a series is that of a style, "model", and after the colon what is added to
    # its label. The first of several series has the style as it is, which should be that of the
    # most GPUs. The others are drawn darker.
    for gpus in sorted(panel["gpus"].unique(), reverse=True):
        of_gpus = panel[panel["gpus"] == gpus]
        # The ends of the lines, and where their markers are.
        ranges[f"model:of {gpus} GPUs"] = (
            of_gpus["model_low"],
            of_gpus["model_high"],
            of_gpus["model"],
        )
    plots.intervals(ax, frameworks, ranges, label=label)
    # The paper states speedups of all GPUs only.
    printed = panel.loc[panel["gpus"] == panel["gpus"].max(), "paper"]
    # Framework i is in row i. Printed values are drawn a little away from the lines, which
    # would hide them.
    heights = np.arange(len(frameworks)) + 0.17
    plots.points(ax, printed, heights, "paper", size=5)
    # The linear speedup is 4: four GPUs are compared with one, or four machines with one.
    ax.set(xlim=(0, 4.3), xticks=range(5))
    ax.label_outer()
