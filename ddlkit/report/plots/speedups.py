"""dag's figures: a graph of tasks and its critical path; speedups on its clusters and in the lab."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.timeline import KINDS
from ddlkit.papers.dag.graph import Schedule
from ddlkit.report.figures.dag_clusters import SPELLED, lab_errors, over_linear, printed_errors
from ddlkit.report.plots import intervals, lines, points, ribbon
from ddlkit.report.plots.shown import canvas, heading, title
from ddlkit.report.plots.style import INK, SOFT, theme

ROLES = ("slow", "fast")  # of clusters, the one with K80 first
LOOKS = {
    True: ("o", "#f7d154", "compute"),
    False: ("s", "#e8833a", "communication"),
}  # of tasks, by whether they compute: dag Fig 1's


@theme()
def task_graph(ax: Axes, schedule: Schedule) -> None:
    """Draw a schedule's graph as dag Fig 1 does: a column a step, a row a rank, messages below.

    Thick: the critical path; dashed where a task waits for a resource, not for an edge. Above a column stands
    what its tasks do.
    """
    import networkx as nx

    graph, path = schedule.graph, schedule.critical_path
    drawn, column, gpus = graph.to_networkx(), graph.levels(), int(graph.rank.max()) + 1
    rows = np.where(
        graph.rank < 0, (gpus - 1) / 2, graph.rank
    )  # what is of all ranks, in the middle
    below = pd.Series(column)[(graph.rank < 0) & ~graph.computes]
    rows[below.index] = gpus + below.groupby(below).cumcount()  # messages, under each other
    place = {task: (float(column[task]), -float(rows[task])) for task in range(graph.n)}
    thin = {"ax": ax, "node_size": 250, "arrowsize": 6}
    nx.draw_networkx_edges(drawn, place, edge_color=SOFT, width=0.5, **thin)
    pairs = list(zip(path, path[1:], strict=False))
    for what, style in (("resource", "--"), ("task", "-")):
        edges = [pair for pair in pairs if drawn.has_edge(*pair) == (what == "task")]
        shape = {"edge_color": INK, "width": 1.8, "style": style}
        nx.draw_networkx_edges(nx.DiGraph(edges), place, **shape, **thin)
        ax.plot([], [], style, color=INK, label=f"critical path: waits for a {what}")
    for computes, (marker, color, label) in LOOKS.items():
        tasks = np.flatnonzero(graph.computes == computes).tolist()
        widths = [1.8 if task in path else 0.5 for task in tasks]
        shape = {"node_shape": marker, "node_color": color, "edgecolors": INK, "label": label}
        nx.draw_networkx_nodes(drawn, place, tasks, 250, ax=ax, linewidths=widths, **shape)
    names = {task: f"T{task}" for task in range(graph.n)}
    nx.draw_networkx_labels(drawn, place, names, font_size=6, ax=ax)
    words = {"io": "read", "h2d": "copy", "all_reduce": "aggregate"}
    for task, (x, y) in place.items():
        kind, layer = KINDS[graph.kind[task]], int(graph.layer[task])
        text = words.get(kind, kind) + (f"\nlayer {layer}" if layer >= 0 else "")
        if graph.rank[task] <= 0:  # what all do in this column; under a message, whose it is
            y = y - 0.75 if kind == "all_reduce" else 0.55
            ax.text(x, y, text, ha="center", va="bottom", fontsize=6.5, color=SOFT)
    for gpu in range(gpus):
        ax.text(-0.45, -gpu, f"GPU {gpu}", ha="right", va="center", fontsize=6.5, color=SOFT)
    ax.axis("off")
    ax.margins(0.04, 0.1)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.03), ncols=4)


@theme()
def speedup_ranges(bars: pd.DataFrame) -> Figure:
    """Draw dag Fig 2 or 3, rows of `dag_clusters.figures`: a panel a cluster and network, a row a framework.

    A line is the range over all settings, a marker the most central one, a hollow square the paper's.
    """
    rows = bars[bars["gpus"] > bars["gpus"].min()].replace({"network": SPELLED})
    names, most = list(rows["framework"].unique()), rows["gpus"].max()
    over, printed = ("one GPU", "up to") if most == 4 else ("one machine of 4 GPUs", "nearly")
    shape = rows["network"].nunique(), rows["cluster"].nunique()
    figure, axes = canvas(*shape, height=4.3, sharex=True, sharey=True)
    panels = rows.groupby(["cluster", "network"], sort=False)
    for ax, ((cluster, network), panel) in zip(axes.flat, panels, strict=True):
        ends = ["model_low", "model_high", "model"]
        sizes = sorted(panel.groupby("gpus"), reverse=True)
        ranges = {f"{gpus} GPUs": tuple(rows[end] for end in ends) for gpus, rows in sizes}
        intervals(ax, names, ranges, label="", legend="")
        paper = panel.loc[panel["gpus"] == most, "paper"]
        points(ax, paper, np.arange(len(names)) + 0.17, "paper", size=5, label=f"paper: {printed}")
        heading(ax, f"{network}, {cluster}")
        ax.set(xlim=(0, 4.3), xticks=range(5))
    which = "line: all compatible settings; marker: the most central one"
    axes[-1][shape[0] // 2].set_xlabel(f"speedup over {over} ({which})")
    _legend_below(figure, axes.flat[0])
    best = rows[rows["gpus"] == most].groupby("cluster")["model"].agg(["min", "max"])
    spans = (f"{name} {row['min']:.2f} to {row['max']:.2f}" for name, row in best.iterrows())
    paper = f"the paper: {printed} {rows['paper'].max():g}"
    title(figure, f"Speedups of 4 in the most central setting: {', '.join(spans)}; {paper}")
    return figure


def _legend_below(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


@theme()
def speedups_beside_lab(model: pd.DataFrame, lab: pd.DataFrame) -> Figure:
    """Draw dag Fig 4, a column a network: the paper's clusters by model; below, emulated ones, measured.

    model, lab : of `dag_clusters.fig04` and ``fig04_lab``. In the lab a line is the mean error that the paper
    prints about the prediction, a marker what was measured, but for cases that were left out.
    """
    printed, off = (errors.rename(SPELLED) for errors in (printed_errors(), lab_errors(lab)))
    upper, lower = (over_linear(table).replace({"network": SPELLED}) for table in (model, lab))
    figure, axes = canvas(len(printed), 2, height=5.4)
    for above, below, network in zip(*axes, printed.index, strict=True):
        clusters = upper[upper["network"] == network].groupby("cluster", sort=False)
        for (_, rows), role in zip(clusters, ROLES, strict=True):
            ribbon(above, rows["gpus"], rows["model_low"], rows["model_high"], role, [role])
            line = rows.set_index("gpus")[["model"]].set_axis([role], axis=1)
            lines(above, line, xlabel="GPUs of the paper's clusters", ylabel="", legend="")
        above.set(xscale="log", ylim=(0, 112))
        above.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"], minor=False)
        above.minorticks_off()
        heading(above, f"{network}, model")
        rows = lower[lower["network"] == network]
        rows = rows.assign(case=rows["case"].str.partition(", ")[2].str.replace(" ", ""))
        shapes, share = list(dict.fromkeys(rows["case"])), printed[network] / 100
        ranges = {}
        for role, cases in rows.groupby("cluster", sort=False):
            cases = cases.set_index("case").reindex(shapes)
            measured = cases["measured"].mask(cases["limited"].astype(bool))
            ranges[str(role)] = cases["model"] * (1 - share), cases["model"] * (1 + share), measured
        label = "speedup over linear [%]"
        intervals(below, shapes, ranges, label=label, reference=100, legend="")
        heading(below, f"lab {off.get(network, np.nan):.1f}% off, paper {printed[network]:g}%")
    axes[0, 0].set_ylabel("speedup over linear [%]")
    axes[1, 0].set_ylabel("lab: nodes x ranks of each")
    _legend_below(figure, axes[1, 0])
    ends = (f"{errors.min():.1f} to {errors.max():.1f}%" for errors in (off, printed))
    title(figure, "Replayed in the lab: {} off in the mean; the paper prints {}".format(*ends))
    return figure
