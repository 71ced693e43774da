"""dag Fig 1: the tasks of one iteration of synchronous SGD, and what must come before what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.taskgraph import Schedule, TaskGraph
from ddlkit.core.timeline import KINDS
from workbook import plots
from workbook.common.claims import Result, check, counted
from workbook.dag import equations as dag
from workbook.plots.style import INK, SOFT

WORDS = {"io": "read", "h2d": "copy", "all_reduce": "aggregate"}
"""What a drawing calls kinds of tasks."""


def numbers(drawn: Schedule) -> pd.DataFrame:
    """Return a row a task; slack_s : by how much it may be late with everything in this order."""
    graph = drawn.graph
    columns = {
        "task": [f"T{task}" for task in range(graph.n)],
        "kind": np.array(KINDS)[graph.kind],
        "layer": graph.layer,
        "rank": graph.rank,
        "resource": np.array(graph.resources)[graph.resource],
        "start_s": drawn.start_s,
        "end_s": drawn.end_s,
        "slack_s": drawn.bound.slack_s,
        "critical": np.isin(np.arange(graph.n), drawn.critical_path),
    }
    return pd.DataFrame(columns)


def as_networkx(graph: TaskGraph) -> Any:
    """Return a graph of tasks as a networkx.DiGraph: an edge weighs what its first task takes."""
    import networkx as nx

    drawn = nx.DiGraph()
    drawn.add_nodes_from(range(graph.n))
    taken_s = graph.duration_s[graph.edges[:, 0]].tolist()
    for (first, second), seconds in zip(graph.edges.tolist(), taken_s, strict=True):
        drawn.add_edge(first, second, weight=seconds)
    return drawn


def draw(drawn: Schedule) -> Figure:
    """Draw a schedule's graph: a column a step, a row a GPU; circles compute, the critical path is thick."""
    figure, ax = plots.canvas(height=3.6)
    _draw_tasks(ax, drawn)
    said = (
        f"Of {drawn.graph.n} tasks only those on the critical path (thick) determine the "
        f"iteration's {drawn.duration_s:g} s"
    )
    plots.title(figure, said)
    return figure


def _draw_tasks(ax: Axes, schedule: Schedule) -> None:
    import networkx as nx

    graph, path = schedule.graph, schedule.critical_path
    column, gpus = graph.levels(), int(graph.rank.max()) + 1
    # What is of all ranks stands in the middle, messages below the ranks' rows.
    rows = np.where(graph.rank < 0, (gpus - 1) / 2, graph.rank)
    below = pd.Series(column)[(graph.rank < 0) & ~graph.computes]
    rows[below.index] = gpus + below.groupby(below).cumcount()
    place = {task: (float(column[task]), -float(rows[task])) for task in range(graph.n)}
    edges, thin = as_networkx(graph), {"ax": ax, "node_size": 250, "arrowsize": 6}
    nx.draw_networkx_edges(edges, place, edge_color=SOFT, width=0.5, **thin)
    chain = nx.DiGraph(list(zip(path, path[1:], strict=False)))
    nx.draw_networkx_edges(chain, place, edge_color=INK, width=1.8, **thin)
    for computes, marker, color in ((True, "o", "#f7d154"), (False, "s", "#e8833a")):
        tasks = np.flatnonzero(graph.computes == computes).tolist()
        nx.draw_networkx_nodes(
            edges,
            place,
            tasks,
            ax=ax,
            node_shape=marker,
            node_color=color,
            edgecolors=INK,
            node_size=250,
        )
    labels = {task: f"T{task}" for task in place}
    nx.draw_networkx_labels(edges, place, labels, font_size=6, ax=ax)
    for task in np.flatnonzero(graph.rank <= 0).tolist():  # what all do in this column
        (x, y), layer = place[task], int(graph.layer[task])
        kind = KINDS[graph.kind[task]]
        text = WORDS.get(kind, kind) + (f"\nlayer {layer}" if layer >= 0 else "")
        high = y - 0.75 if kind == "all_reduce" else 0.55
        ax.text(x, high, text, ha="center", va="bottom", fontsize=6.5, color=SOFT)
    ax.axis("off")
    ax.margins(0.04, 0.1)


@check("dag-fig01-tasks")
def _tasks() -> Result:
    tasks = dag.iteration_tasks(layers=3, gpus=4)
    return counted(sum(tasks.values()), "of one iteration, kind by kind")
