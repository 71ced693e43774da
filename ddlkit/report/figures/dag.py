"""dag's figure 1 as numbers, its equations beside schedules, its trace played, and what changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ddlkit.core.timeline import KINDS
from ddlkit.formats.trace import LayerTrace, check_trace, parse_trace
from ddlkit.papers.dag.tasks import Schedule, TaskGraph
from ddlkit.papers.dag.training import what_if
from ddlkit.store import DATA, files

MENDED = 10.0
"""By how much the marked forwards of dag Tab VI are too large (errata 9)."""


def tasks(found: Schedule) -> pd.DataFrame:
    """A row a task: name, kind, layer, rank, resource, start_s, end_s, slack_s, critical.

    slack_s : by how much it may be late with everything in this order on the resources
    """
    graph, slack_s = found.graph, found.bound.slack_s
    columns = {
        "task": [graph.name(task) for task in range(graph.n)],
        "kind": [KINDS[kind] for kind in graph.kind],
        "layer": graph.layer,
        "rank": graph.rank,
        "resource": [graph.resources[resource] for resource in graph.resource],
        "start_s": found.start_s,
        "end_s": found.end_s,
        "slack_s": slack_s,
        "critical": np.isin(np.arange(graph.n), found.critical_path),
    }
    return pd.DataFrame(columns)


def table6() -> LayerTrace:
    """dag Tab VI as the trace that it is: one iteration of AlexNet on a K80."""
    path = DATA / "papers" / "dag" / "tab06.csv"
    return parse_trace(files.read_text(path), str(path))


def marked(trace: LayerTrace) -> tuple[str, ...]:
    """Layers whose forward is far above what their backward implies."""
    found = {finding.what: finding.layers for finding in check_trace(trace)}
    return found.get("forward", ())


def mended(trace: LayerTrace) -> LayerTrace:
    """The trace with the marked layers' forward divided by ten."""
    wrong = np.isin(trace.name, marked(trace))
    return replace(trace, forward_s=np.where(wrong, trace.forward_s / MENDED, trace.forward_s))


def what_ifs(graph: TaskGraph, changes: Mapping[str, Sequence[tuple[str, float]]]) -> pd.DataFrame:
    """A row as it is and one a change: iteration_s, speedup, limited_by, and each resource's share."""
    rows = {}
    for name, change in {"as it is": (), **changes}.items():
        found = what_if(graph, change)
        limits = found.after.limits()
        told = {"iteration_s": found.after.period_s, "speedup": found.speedup}
        rows[name] = {**told, "limited_by": next(iter(limits), ""), **limits}
    return pd.DataFrame(rows).T.rename_axis("change").reset_index().infer_objects().fillna(0.0)
