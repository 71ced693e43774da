"""Fig 1 of the dag paper: the tasks of an iteration, and which must precede which."""

from __future__ import annotations

from collections.abc import Mapping
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
"""What the figure calls some kinds of tasks. Other kinds have their own name."""
NODE_SIZE = 250
"""The size of a task, in points squared."""


def numbers(schedule: Schedule) -> pd.DataFrame:
    """Return the tasks of a schedule.

    Parameters
    ----------
    schedule : Schedule
        When each task of the graph runs.

    Returns
    -------
    DataFrame
        A row for each task: its name, kind, layer, rank and resource, when it starts
        and ends, ``slack_s``, and whether it is on the critical path. The layer is -1 for a
        task of no layer, and the rank is -1 for a task of all ranks together. ``slack_s``
        is by how many seconds the task could end later without a longer schedule, if every
        resource keeps the order of its tasks.
    """
    graph = schedule.graph
    # The graph has the indices of kinds and of resources, and the table has their names.
    # ``bound`` is the graph with the order of the tasks of each resource as further edges.
    columns = {
        "task": [f"T{task}" for task in range(graph.n)],
        "kind": np.array(KINDS)[graph.kind],
        "layer": graph.layer,
        "rank": graph.rank,
        "resource": np.array(graph.resources)[graph.resource],
        "start_s": schedule.start_s,
        "end_s": schedule.end_s,
        "slack_s": schedule.bound.slack_s,
        "critical": np.isin(np.arange(graph.n), schedule.critical_path),
    }
    return pd.DataFrame(columns)


def as_networkx(graph: TaskGraph) -> Any:
    """Return a task graph as a networkx.DiGraph.

    The nodes are the numbers of the tasks. An edge leads from a task to one that must wait for
    its end. The weight of the edge is the duration of the former task in seconds, which is the
    least time between the starts of both.
    """
    import networkx as nx

    converted = nx.DiGraph()
    converted.add_nodes_from(range(graph.n))
    durations_s = graph.duration_s.tolist()
    for first, second in graph.edges.tolist():
        converted.add_edge(first, second, weight=durations_s[first])
    return converted


def draw(schedule: Schedule) -> Figure:
    """Draw the task graph of a schedule.

    The tasks of a column are one step, and those of a row one GPU. Tasks of all GPUs
    together are in the middle of the rows or, if they are messages, below them. Circles
    compute, squares read, copy or communicate, and the critical path is thick.

    Parameters
    ----------
    schedule : Schedule
        When each task of the graph runs.
    """
    figure, ax = plots.canvas(height=3.6)
    _draw_tasks(ax, schedule)
    title = (
        f"Of {schedule.graph.n} tasks only those on the critical path (thick) determine "
        f"the iteration's {schedule.duration_s:g} s"
    )
    plots.title(figure, title)
    return figure


def _draw_tasks(ax: Axes, schedule: Schedule) -> None:
    """Draw the tasks, the edges between them, and the name of each column."""
    graph = schedule.graph
    positions = _positions(graph)
    _draw_edges(ax, schedule, positions)
    _draw_nodes(ax, graph, positions)
    _name_columns(ax, graph, positions)
    ax.axis("off")
    # The circles at the edges need room, and so do the names above and below them.
    ax.margins(0.04, 0.1)


Positions = Mapping[int, tuple[float, float]]
"""The coordinates x and y of each task, by its number."""


def _positions(graph: TaskGraph) -> Positions:
    """Return where the tasks are drawn, so that each edge leads to the right."""
    # The column is the length of the longest chain of edges that leads to a task, so that
    # a task is to the right of all tasks that must precede it.
    columns = graph.levels()
    # Ranks are numbered from 0, and each has a GPU and a row.
    gpus = int(graph.rank.max()) + 1
    # Tasks of all ranks together have the rank -1. They are in the middle of the rows.
    of_all_ranks = graph.rank < 0
    rows = np.where(of_all_ranks, (gpus - 1) / 2, graph.rank)
    # Messages are the tasks of all ranks that do not compute. They are in further rows
    # below those of the ranks, several messages of a column one below the other.
    message_columns = pd.Series(columns)[of_all_ranks & ~graph.computes]
    messages_above = message_columns.groupby(message_columns).cumcount()
    # The index of `message_columns` is the number of the task.
    rows[message_columns.index] = gpus + messages_above
    # Rows are numbered from the top, and the vertical axis points upwards.
    return {task: (float(columns[task]), -float(rows[task])) for task in range(graph.n)}


def _draw_edges(ax: Axes, schedule: Schedule, positions: Positions) -> None:
    """Draw thin edges between the tasks, and thick ones along the critical path."""
    import networkx as nx

    all_edges = as_networkx(schedule.graph)
    # The path also leads from a task to the next one on its resource, where the graph may
    # have no edge.
    path = schedule.critical_path
    critical = nx.DiGraph(list(zip(path[:-1], path[1:], strict=True)))
    for edges, color, width in ((all_edges, SOFT, 0.5), (critical, INK, 1.8)):
        nx.draw_networkx_edges(
            edges,
            positions,
            ax=ax,
            edge_color=color,
            width=width,
            node_size=NODE_SIZE,
            arrowsize=6,
        )


def _draw_nodes(ax: Axes, graph: TaskGraph, positions: Positions) -> None:
    """Draw a circle for each task that computes, a square for others, and names."""
    import networkx as nx

    nodes = as_networkx(graph)
    # Yellow circles and orange squares, as in the paper's figure.
    for computes, marker, color in ((True, "o", "#f7d154"), (False, "s", "#e8833a")):
        tasks = np.flatnonzero(graph.computes == computes).tolist()
        nx.draw_networkx_nodes(
            nodes,
            positions,
            tasks,
            ax=ax,
            node_shape=marker,
            node_color=color,
            edgecolors=INK,
            node_size=NODE_SIZE,
        )
    labels = {task: f"T{task}" for task in positions}
    nx.draw_networkx_labels(nodes, positions, labels, font_size=6, ax=ax)


def _name_columns(ax: Axes, graph: TaskGraph, positions: Positions) -> None:
    """Write what the tasks of each column do, and in which layer."""
    # Tasks of rank 0 and of all ranks together (-1) are enough, because the other ranks
    # have the same tasks as rank 0.
    for task in np.flatnonzero(graph.rank <= 0).tolist():
        x, y = positions[task]
        kind = KINDS[graph.kind[task]]
        text = WORDS.get(kind, kind)
        layer = int(graph.layer[task])
        # Layers are counted from 1. Tasks of no layer have -1.
        if layer >= 0:
            text += f"\nlayer {layer}"
        # Names are above the first row, which is at y = 0. Only the names of messages,
        # which are below all other rows, are below their tasks.
        text_y = 0.55
        if kind == "all_reduce":
            text_y = y - 0.75
        ax.text(x, text_y, text, ha="center", va="bottom", fontsize=6.5, color=SOFT)


@check("dag-fig01-tasks")
def _tasks() -> Result:
    tasks = dag.iteration_tasks(layers=3, gpus=4)
    return counted(sum(tasks.values()), "of one iteration, kind by kind")
