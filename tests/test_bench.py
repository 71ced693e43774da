"""The benchmark: it times every planner there is, on a real network's tensors."""

from __future__ import annotations

import pytest

from ddlkit.model import make_plan
from ddlkit.model.predictor import planners
from ddlkit.papers import networks
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.sessions import bench


def test_every_planner_is_timed_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BUDGET", Budget(warmup=0, min_repeats=1, max_repeats=1))
    times = bench.plan_times()
    assert {spec.partition(":")[0] for spec in times} == set(planners())
    assert min(times.values()) > 0


def test_what_is_planned_is_the_network() -> None:
    workload = bench._workload(bench.PLANNED)
    assert workload.n == 467
    assert workload.bytes.sum() == 4 * sum(networks.parameters(bench.PLANNED))
    assert len(make_plan("none", workload).ends) == 467


def test_another_program_gets_its_best_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """networkx is timed with and without building its graphs, and finds the same iterations."""
    monkeypatch.setattr(bench, "BUDGET", Budget(warmup=0, min_repeats=3, max_repeats=3))
    monkeypatch.setattr(bench, "SCENARIOS", 1000)
    monkeypatch.setattr(bench, "plan_times", dict)
    found = bench.run()
    assert found["largest_difference_to_networkx"] < 1e-9
    assert found["networkx_without_building_predictions_per_s"] > 0
    assert found["networkx_predictions_per_s"] > 0
    assert found["resnet152_64_gpus_10_iterations_schedule_s"] > 0
