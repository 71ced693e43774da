"""dag's figure 1 as numbers, its trace and what changes it; and its graph beside training on pictures.

Fixed before any training was recorded: parts are medians; a prediction is the time between updates in the
middle of the schedule; a case's error is that over the median measured iteration, less 1; the mean of their
absolute values, as dag V-D has it, should be no larger than the largest that dag prints, MOST.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.timeline import KINDS
from ddlkit.core.workload import Floats
from ddlkit.formats.trace import LayerTrace, check_trace, parse_trace
from ddlkit.papers.dag import STRATEGIES, IterationTimes, Strategy
from ddlkit.papers.dag.graph import Gpus, Schedule, TaskGraph, changed, s_sgd, schedule
from ddlkit.report.plots.style import INK, SOFT, theme
from ddlkit.store import files

FIXED = 10.0  # by how much the marked forwards of dag Tab VI are too large (errata 9)
MOST = 0.094  # AlexNet's mean error in dag V-D
ENDS, ITERATIONS = 5, 20
CASE = ["network", "batch", "ranks", "link", "stored", "ahead", "sends"]


def tasks(drawn: Schedule) -> pd.DataFrame:
    """Return a row a task; slack_s: by how much it may be late with everything in this order."""
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


@theme()
def draw_tasks(ax: Axes, schedule: Schedule) -> None:
    """Draw dag Fig 1: a column a step, a row a GPU; circles compute, the critical path is thick."""
    import networkx as nx

    graph, path = schedule.graph, schedule.critical_path
    column, gpus = graph.levels(), int(graph.rank.max()) + 1
    rows = np.where(graph.rank < 0, (gpus - 1) / 2, graph.rank)  # what is of all, in the middle
    below = pd.Series(column)[(graph.rank < 0) & ~graph.computes]
    rows[below.index] = gpus + below.groupby(below).cumcount()
    place = {task: (float(column[task]), -float(rows[task])) for task in range(graph.n)}
    edges, thin = graph.to_networkx(), {"ax": ax, "node_size": 250, "arrowsize": 6}
    nx.draw_networkx_edges(edges, place, edge_color=SOFT, width=0.5, **thin)
    chain = nx.DiGraph(list(zip(path, path[1:], strict=False)))
    nx.draw_networkx_edges(chain, place, edge_color=INK, width=1.8, **thin)
    for computes, marker, color in ((True, "o", "#f7d154"), (False, "s", "#e8833a")):
        tasks = np.flatnonzero(graph.computes == computes).tolist()
        shape = {"node_shape": marker, "node_color": color, "edgecolors": INK, "node_size": 250}
        nx.draw_networkx_nodes(edges, place, tasks, ax=ax, **shape)
    nx.draw_networkx_labels(edges, place, {k: f"T{k}" for k in place}, font_size=6, ax=ax)
    words = {"io": "read", "h2d": "copy", "all_reduce": "aggregate"}
    for task in np.flatnonzero(graph.rank <= 0).tolist():  # what all do in this column
        (x, y), layer = place[task], int(graph.layer[task])
        kind = KINDS[graph.kind[task]]
        text = words.get(kind, kind) + (f"\nlayer {layer}" if layer >= 0 else "")
        high = y - 0.75 if kind == "all_reduce" else 0.55
        ax.text(x, high, text, ha="center", va="bottom", fontsize=6.5, color=SOFT)
    ax.axis("off")
    ax.margins(0.04, 0.1)


def table6() -> LayerTrace:
    """Return dag Tab VI as the trace that it is: one iteration of AlexNet on a K80."""
    path = store.DATA / "papers" / "dag" / "tab06.csv"
    return parse_trace(files.read_text(path), str(path))


def marked(trace: LayerTrace) -> tuple[str, ...]:
    """Return the layers whose forward is far above what their backward implies."""
    return {mark.what: mark.layers for mark in check_trace(trace)}.get("forward", ())


def fixed(trace: LayerTrace) -> LayerTrace:
    """Return the trace with the marked layers' forward divided by FIXED."""
    wrong = np.isin(trace.name, marked(trace))
    return replace(trace, forward_s=np.where(wrong, trace.forward_s / FIXED, trace.forward_s))


def what_ifs(graph: TaskGraph, changes: Mapping[str, Sequence[tuple[str, float]]]) -> pd.DataFrame:
    """Return a row as it is and one a change: iteration_s, speedup, limited_by, each resource's share."""
    rows, before_s = {}, schedule(graph).period_s
    for name, change in {"as it is": (), **changes}.items():
        after = schedule(changed(graph, change))
        limits = after.limits()
        times = {"iteration_s": after.period_s, "speedup": before_s / after.period_s}
        rows[name] = {**times, "limited_by": next(iter(limits), ""), **limits}
    return pd.DataFrame(rows).T.rename_axis("change").reset_index().infer_objects().fillna(0.0)


class Parts:
    """What was measured on its own for a network between some ranks, and the runs that it should predict."""

    def __init__(self, pipelines: Path) -> None:
        layers, inputs, collectives = (
            pipelines.with_name(pipelines.name.replace("pipelines", kind, 1))
            for kind in ("layers", "inputs", "collectives")
        )
        self.runs = store.load_table(pipelines, "pipelines")
        self.cores = int(store.load_stamp(pipelines)["machine"]["cpu"]["cores"])
        self.ranks = int(self.runs["ranks"].iloc[0])
        self.profile = store.read_profile(layers)
        self.inputs = store.load_table(inputs, "inputs")
        self._sent = store.load_table(collectives, "collectives")

    def input_s(self, quantity: str, stored: str, ranks: int) -> float:
        """Return median seconds of a batch. Raises UserError where that was not measured."""
        rows = self.inputs.query("quantity == @quantity and stored == @stored and ranks == @ranks")
        if rows.empty:
            what = f"no {quantity} of {stored} by {ranks} ranks"
            raise UserError(f"inputs: {what}: measure input again")
        return float(rows["seconds"].median())

    @cached_property
    def sent_s(self) -> Floats:
        """Return (n,) seconds of each tensor's message, in forward order; nothing of one rank."""
        rows, tensors = self._sent, self.profile.gradient_bytes
        if self.ranks == 1:
            return np.zeros(len(tensors))
        how: dict[str, Any] = {
            "draws": 0,
            "workers": self.ranks,
            "algorithm": str(rows["algorithm"].iloc[0]),
        }
        return np.asarray(fit("table", rows["bytes"], rows["seconds"], **how).cost(tensors))

    def times(self, stored: str) -> IterationTimes:
        """Return dag Tab I of an iteration; the update is counted with forward, as computing (errata 2).

        Layers have the profile's shares of what computing took between the runs.
        """
        profile, sent_s = self.profile, self.sent_s
        forward_s = profile.forward_s + np.append(profile.update_s, np.zeros(len(sent_s) - 1))
        whole_s = float(forward_s.sum() + profile.backward_s.sum())
        drift = self.input_s("compute", stored, self.ranks) / whole_s
        io_s = self.input_s("read", stored, 1)
        return IterationTimes(io_s, 0.0, drift * forward_s, drift * profile.backward_s, sent_s)

    def predicted_s(self, stored: str, ahead: int, sends: str) -> float:
        """Return the mean seconds between updates of a case's schedule, one disk for all ranks.

        Decoding is on the core that trains, unless there are two cores for each rank. Without the first ENDS,
        while loaders get ahead, and the last, when nothing is left to be fetched.
        """
        loads = {"copies_ahead": ahead > 0, "reads_ahead": ahead > 0, "decodes_on_cpu": True}
        strategy = Strategy(**loads, sends_during_backward=sends == "during", batches_ahead=ahead)
        decoding = "own" if self.cores >= 2 * self.ranks else "trains"
        gpus = Gpus(1, self.ranks, decoding=decoding)
        decode_s, times = self.input_s("decode", stored, self.ranks), self.times(stored)
        graph = s_sgd(times, strategy, gpus, iterations=ITERATIONS, decode_s=decode_s)
        return float(np.diff(schedule(graph).iteration_ends_s[ENDS:-ENDS]).mean())


def parts(place: Path | None = None) -> dict[str, Parts]:
    """Return all that was measured of training with pictures in a folder, by name of the table.

    Without one, of this machine or of the first that has it. Raises UserError where there is none.
    """
    machines = sorted(store.RECORDED.glob("*"), key=lambda at: (at != store.recorded_dir(), at))
    for folder in [place] if place else [machine / "input" for machine in machines]:
        if tables := store.list_tables(folder, "pipelines-*.csv"):
            return {path.stem.partition("-")[2]: Parts(path) for path in tables}
    where = place or store.RECORDED
    raise UserError(f"no training with pictures in {where}: run ddlkit measure input --out mine")


def predictions(measured: Mapping[str, Parts]) -> pd.DataFrame:
    """Return a row a case: measured_s (median), predicted_s, and error, the second over the first less 1."""
    tables = []
    for part in measured.values():
        cases = part.runs.groupby(CASE, sort=False)["iteration_s"].median()
        rows = cases.rename("measured_s").reset_index()
        settings = rows[["stored", "ahead", "sends"]].itertuples(index=False)
        tables.append(rows.assign(predicted_s=[part.predicted_s(*case) for case in settings]))
    return pd.concat(tables, ignore_index=True).eval("error = predicted_s / measured_s - 1")


def by_framework(table: pd.DataFrame) -> pd.Series:
    """Return mean absolute error by framework: of cases of several ranks that read and send as it does."""
    ahead = table[(table["ranks"] > 1) & (table["ahead"] == table["ahead"].max())]
    means = ahead["error"].abs().groupby([ahead["stored"] == "jpeg", ahead["sends"] == "during"])
    does = {name: (s.decodes_on_cpu, s.sends_during_backward) for name, s in STRATEGIES.items()}
    return pd.Series({name: means.mean().get(edges, np.nan) for name, edges in does.items()})
