"""The numbers of dag's figures: they add up, and the printed trace says of itself what is known of it."""

from __future__ import annotations

import numpy as np
import pytest

from ddlkit.papers.dag import STRATEGIES, IterationTimes
from ddlkit.papers.dag.graph import Gpus, s_sgd, schedule
from ddlkit.report.figures import dag

CAFFE = STRATEGIES["Caffe-MPI"]
FIGURE_1 = IterationTimes(0.5, 0.5, np.ones(3), np.full(3, 2.0), np.array([1.5, 2.5, 3.5]), 0.5)


def test_slack_in_a_schedule_is_zero_exactly_on_critical_paths() -> None:
    found = schedule(s_sgd(FIGURE_1, CAFFE, Gpus(1, 4)))
    table = dag.tasks(found)
    assert len(table) == 36 and list(table["task"]) == [f"T{i}" for i in range(36)]
    assert (table["slack_s"][table["critical"]] == 0).all()
    path = table[table["critical"]]
    assert (path["end_s"] - path["start_s"]).sum() == found.duration_s == table["end_s"].max()
    # GPU g's batch is read g + 1 reads after the start; so much sooner than the last one's.
    layers = table[table["kind"] == "forward"].groupby("rank")["slack_s"].min()
    assert layers.to_list() == [1.5, 1.0, 0.5, 0.0]


def test_the_five_convolutions_are_marked_and_fixed() -> None:
    trace = dag.table6()
    assert dag.marked(trace) == tuple(f"conv{i}" for i in range(1, 6))
    fixed = dag.fixed(trace)
    assert dag.marked(fixed) == ()
    changed = fixed.forward_s[0] != trace.forward_s[0]
    assert [trace.name[row] for row in np.flatnonzero(changed)] == list(dag.marked(trace))
    assert fixed.forward_s[0][changed] * 10 == pytest.approx(trace.forward_s[0][changed])


def test_what_limits_takes_the_whole_critical_path() -> None:
    graph = s_sgd(FIGURE_1, CAFFE, Gpus(1, 4), iterations=6)
    table = dag.what_ifs(graph, {"slow disk": [("disk", 100.0)], "fast link": [("link", 0.0)]})
    assert list(table["change"]) == ["as it is", "slow disk", "fast link"]
    assert list(table["limited_by"]) == ["link", "disk", "gpu"]
    shares = table[[name for name in ("disk", "copy", "gpu", "link") if name in table]]
    assert shares.sum(axis=1).to_numpy() == pytest.approx(1)
    assert table["speedup"].to_numpy() == pytest.approx(
        table["iteration_s"][0] / table["iteration_s"].to_numpy()
    )
