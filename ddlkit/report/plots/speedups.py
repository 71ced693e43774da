"""dag's figures 2 to 4: speedups on its clusters and in the lab, and what the paper prints of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.report.figures.dag_clusters import SPELLED, lab_errors, over_linear, printed_errors
from ddlkit.report.plots import heading, intervals, points, ribbon, title
from ddlkit.report.plots.pages import canvas
from ddlkit.report.plots.style import INK, SOFT, look, theme

ROLES = ("slow", "fast")
"""Of clusters, the one with K80 first."""


@theme()
def speedup_ranges(bars: pd.DataFrame) -> Figure:
    """dag Fig 2 or 3, rows of `dag_clusters.figures`: a panel a cluster and network, a row a framework.

    A line is the range over all settings, a marker the most central one, a hollow square the paper's.
    """
    rows = bars[bars["gpus"] > bars["gpus"].min()].replace({"network": SPELLED})
    clusters, networks = rows["cluster"].unique(), rows["network"].unique()
    names, most = list(rows["framework"].unique()), rows["gpus"].max()
    server = most == 4
    over, printed = ("one GPU", "up to") if server else ("one machine of 4 GPUs", "nearly")
    figure, axes = canvas(len(networks), len(clusters), height=4.3, sharex=True, sharey=True)
    panels = rows.groupby(["cluster", "network"], sort=False)
    for ax, ((cluster, network), mine) in zip(axes.flat, panels, strict=True):
        ends = ("model_low", "model_high", "model")
        by_size = sorted(mine.groupby("gpus"), reverse=True)
        ranges = {f"{n} GPUs": tuple(one[end] for end in ends) for n, one in by_size}
        intervals(ax, names, ranges, label="", legend="")
        paper = mine.loc[mine["gpus"] == most, "paper"]
        points(ax, paper, np.arange(len(names)) + 0.17, "paper", size=5, label=f"paper: {printed}")
        heading(ax, f"{network}, {cluster}")
        ax.set(xlim=(0, 4.3), xticks=range(5))
    which = "line: all compatible settings; marker: the most central one"
    axes[-1][len(networks) // 2].set_xlabel(f"speedup over {over} ({which})")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    title(figure, _best_and_worst(rows[rows["gpus"] == most], server))
    return figure


def _best_and_worst(rows: pd.DataFrame, server: bool) -> str:
    """What dag Fig 2 or 3 finds, beside what the paper's text has in numbers."""
    best, by_cluster = rows["paper"].max(), rows.set_index("cluster")["model"]
    if server:
        slow = by_cluster["V100"][rows.set_index("cluster")["network"]["V100"] == "AlexNet"]
        return (
            f"The most central setting: K80 get {by_cluster['K80'].max() / 4:.0%} of linear at best (paper: "
            f"up to {best / 4:.0%}), AlexNet on V100 at most {slow.max():.1f} of 4"
        )
    caffe = rows[rows["framework"] == "Caffe-MPI"].groupby("cluster")["model"].min()
    return (
        f"Most central setting: Caffe-MPI gets {caffe['K80']:.2f} of 4 or more with K80 (paper: nearly "
        f"{best:g}), {caffe['V100']:.2f} or more with V100"
    )


@theme()
def speedups_beside_lab(model: pd.DataFrame, lab: pd.DataFrame) -> Figure:
    """dag Fig 4, a column a network: the paper's clusters by model; below, emulated ones, measured.

    model, lab : of `dag_clusters.fig04` and ``fig04_lab``. Shaded in the lab: the mean error that the paper
    prints, about what the model says.
    """
    printed, off = (one.rename(SPELLED) for one in (printed_errors(), lab_errors(lab)))
    upper, lower = (over_linear(one).replace({"network": SPELLED}) for one in (model, lab))
    figure, axes = canvas(len(printed), 2, height=4.9, sharey=True)
    for above, below, network in zip(*axes, printed.index, strict=True):
        clusters = upper.loc[upper["network"] == network].groupby("cluster", sort=False)
        for (_, one), role in zip(clusters, ROLES, strict=True):
            ribbon(above, one["gpus"], one["model_low"], one["model_high"], role, [role])
            style = look(role)
            shape = {"color": style.color, "linestyle": style.line, "marker": style.marker}
            above.plot(one["gpus"], one["model"], markersize=4, **shape)
        above.set(xscale="log", xlabel="GPUs of the paper's clusters")
        above.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"], minor=False)
        above.minorticks_off()
        heading(above, f"{network}, model")
        _measured(below, lower[lower["network"] == network], printed[network])
        heading(below, f"lab {off.get(network, np.nan):.1f}% off, paper {printed[network]:g}%")
    for ax in axes[:, 0]:
        ax.set(ylabel="speedup over linear [%]", ylim=(0, 112))
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    ends = (f"{errors.min():.1f} to {errors.max():.1f}%" for errors in (off, printed))
    title(figure, "Replayed in the lab: {} off in the mean; the paper prints {}".format(*ends))
    return figure


def _measured(ax: Axes, lab: pd.DataFrame, printed: float) -> None:
    """Predicted speedups as level strokes, measured ones as markers upon their repeats.

    A measured one that was left out is not drawn.
    """
    lab = lab.assign(case=lab["case"].str.partition(", ")[2].str.replace(" ", ""))
    shapes = list(dict.fromkeys(lab["case"]))
    for number, role in enumerate(role for role in ROLES if role in {*lab["cluster"]}):
        mine = lab[lab["cluster"] == role].set_index("case").reindex(shapes)
        place, known = np.arange(len(shapes)), mine["model"].to_numpy()
        names = [name if number == 0 else "_" for name in ("paper's mean error", "predicted")]
        band: dict[str, Any] = {
            "color": look("paper").color,
            "alpha": 0.25,
            "linewidth": 0,
            "label": names[0],
        }
        ax.bar(place, printed / 50 * known, 0.8, (1 - printed / 100) * known, zorder=1, **band)
        ax.hlines(known, place - 0.4, place + 0.4, color=INK, linewidth=1, label=names[1])
        middle = mine["measured"].mask(mine["limited"].astype(bool)).to_numpy()
        half = 50 * (mine["repeatability"] / mine["workers"]).to_numpy()
        ax.vlines(place, middle - half, middle + half, color=SOFT, linewidth=3)
        points(ax, place, middle, role, size=4.5)
    ax.set_xticks(range(len(shapes)), shapes, fontsize=6.5, rotation=45)
    ax.set_xlabel("lab: nodes x ranks of each")
