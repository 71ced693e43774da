"""Graphs of tasks: what waits for what, and the path that decides how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ddlkit.core.timeline import KINDS
from ddlkit.papers.dag.tasks import Schedule, TaskGraph, levels
from ddlkit.report.plots.style import INK, SOFT, known, look, looks, theme

COLORS = {
    "o": "#f7d154",
    "s": "#e8833a",
}  # dag Fig 1: yellow circles compute, orange squares communicate
MEANINGS = {"o": "computing", "s": "communication"}
FASTER_SLOWER = ("tasks 2 times as fast", "2 times as slow")
SIZE = 250  # of a node, points squared


@theme()
def task_graph(ax: Axes, schedule: Schedule) -> None:
    """The graph of a schedule as dag Fig 1 draws it: a column a step, a row a rank, messages below.

    Thick: the critical path; dashed where a task waits for a resource, not for an edge. Above a column stands
    what its tasks do.
    """
    import networkx as nx

    graph, path = schedule.graph, schedule.critical_path
    place, pairs = positions(graph), list(zip(path, path[1:], strict=False))
    drawn = graph.to_networkx()
    waited = [pair for pair in pairs if not drawn.has_edge(*pair)]
    common = {"ax": ax, "node_size": SIZE, "arrowsize": 6}
    nx.draw_networkx_edges(drawn, place, edge_color=SOFT, width=0.5, **common)
    for edges, line in ((set(pairs) - set(waited), "-"), (waited, "--")):
        chosen = nx.DiGraph(list(edges))
        shown = {"edge_color": INK, "width": 1.8, "style": line}
        nx.draw_networkx_edges(chosen, place, **shown, **common)
    for shape, color in COLORS.items():
        tasks = [task for task in range(graph.n) if graph.computes[task] == (shape == "o")]
        widths = [1.8 if task in path else 0.5 for task in tasks]
        looks = {"node_shape": shape, "node_color": color, "edgecolors": INK, "linewidths": widths}
        nx.draw_networkx_nodes(drawn, place, tasks, node_size=SIZE, ax=ax, **looks)
    names = {task: graph.name(task) for task in range(graph.n)}
    nx.draw_networkx_labels(drawn, place, names, font_size=6, ax=ax)
    _headings(ax, graph, place)
    _legend(ax)


@theme()
def tornado(
    ax: Axes, table: pd.DataFrame, heading: str, *, ways: Sequence[str] = FASTER_SLOWER
) -> None:
    """A row a kind of task, or another change, the first on top: how an iteration changes, in percent of it.

    table : kind, iteration_s, faster_s, slower_s; ``ways`` are the names of the last two
    """
    rows = np.arange(len(table))
    named = dict(zip(("faster_s", "slower_s"), ways, strict=True))
    for style, (column, label) in zip(looks(list(ways)), named.items(), strict=True):
        change = 100 * (table[column] / table["iteration_s"] - 1)
        shape: dict[str, Any] = {"color": style.color, "hatch": style.hatch, "edgecolor": "white"}
        ax.barh(rows, change, height=0.6, linewidth=0.3, label=label, **shape)
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set_yticks(rows, [look(kind).label if known(kind) else kind for kind in table["kind"]])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    ax.set_title(heading)
    ax.set_xlabel("change of the iteration [%]")


def positions(graph: TaskGraph) -> dict[int, tuple[float, float]]:
    """Where each task is drawn: its column is the most edges before it, its row its rank.

    Messages stand below all ranks, under each other in one column; what else is of all ranks, in the middle.
    """
    column, ranks = levels(graph), int(graph.rank.max(initial=0)) + 1
    rows: NDArray[np.float64] = np.where(graph.rank >= 0, graph.rank, (ranks - 1) / 2).astype(float)
    below = np.flatnonzero((graph.rank < 0) & ~graph.computes)
    for task in below:
        before = below[(below < task) & (column[below] == column[task])]
        rows[task] = ranks + len(before)
    return {task: (float(column[task]), -float(rows[task])) for task in range(graph.n)}


def _headings(ax: Axes, graph: TaskGraph, place: dict[int, tuple[float, float]]) -> None:
    """What the tasks of a column do, above it; whose row it is, beside it; which layer a message is of."""
    ax.axis("off")
    words = {"io": "read", "h2d": "copy", "all_reduce": "aggregate"}
    top: dict[float, int] = {}
    for task, (x, _) in place.items():
        if graph.rank[task] == 0 or KINDS[graph.kind[task]] == "update":
            top.setdefault(x, task)
    for x, task in top.items():
        kind, layer = KINDS[graph.kind[task]], graph.layer[task]
        text = words.get(kind, kind) + (f"\nlayer {layer}" if layer >= 0 else "")
        ax.text(x, 0.55, text, ha="center", va="bottom", fontsize=6.5, color=SOFT)
    for message in np.flatnonzero((graph.rank < 0) & ~graph.computes).tolist():
        x, y = place[message]
        below = ax.text(
            x, y - 0.24, f"layer {graph.layer[message]}", ha="center", va="top", fontsize=6
        )
        below.set(color=SOFT, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    for rank in range(int(graph.rank.max(initial=0)) + 1):
        ax.text(-0.45, -rank, f"GPU {rank}", ha="right", va="center", fontsize=6.5, color=SOFT)
    ax.margins(0.04, 0.1)


def _legend(ax: Axes) -> None:
    """What shapes and lines mean, below."""
    shapes = [
        Line2D(
            [],
            [],
            marker=m,
            color="none",
            markerfacecolor=c,
            markeredgecolor=INK,
            label=MEANINGS[m],
        )
        for m, c in COLORS.items()
    ]
    path = "critical path: waits for a"
    lines = [
        Line2D([], [], color=INK, linewidth=1.8, label=f"{path} {what}")
        for what in ("task", "resource")
    ]
    lines[1].set_linestyle("--")
    ax.legend(handles=[*shapes, *lines], loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4)
