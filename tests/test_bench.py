"""The benchmark: it times every planner there is, on a real network's tensors."""

from __future__ import annotations

import pytest

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.plan import none
from ddlkit.model import make_plan
from ddlkit.model.predictor import planners
from ddlkit.papers import networks
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.sessions import bench


def test_every_planner_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {name for name in planners() if name != "test-alone"}  # which another test registers
    assert {spec.partition(":")[0] for spec in bench.SPECS} == named
    monkeypatch.setattr(bench, "BUDGET", Budget(warmup=0, min_repeats=1, max_repeats=1))
    times = bench.plan_times()
    assert list(times) == list(bench.SPECS)
    assert min(times.values()) > 0


def test_what_is_planned_is_the_network() -> None:
    workload = bench._workload(bench.PLANNED)
    assert workload.n == 467
    assert workload.bytes.sum() == 4 * sum(networks.parameters(bench.PLANNED))
    sizes = {
        spec: len(make_plan(spec, workload, AlphaBeta(1e-3, 8e-9)).ends) for spec in bench.SPECS
    }
    assert sizes["none"] == len(none(workload).ends) == 467
    assert sizes["cuts:100,300"] == 3 and sizes["random:0:20"] == 20
