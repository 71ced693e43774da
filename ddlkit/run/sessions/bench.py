"""How fast predicting is, beside networkx on the same inputs, and planning, planner beside planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddlkit.core import plan as planning
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration, LinearScenarios, predict
from ddlkit.core.workload import Floats, Workload
from ddlkit.model import make_plan
from ddlkit.model.predictor import planners
from ddlkit.papers import networks
from ddlkit.papers.dag import STRATEGIES, IterationTimes
from ddlkit.papers.dag.tasks import schedule
from ddlkit.papers.dag.training import Gpus, s_sgd
from ddlkit.run.instruments.clock import Budget, measure

SCENARIOS = 1_000_000
GRAPHS = 20
BUDGET = Budget(warmup=1, min_repeats=5, max_repeats=50, max_s=2.0)
PLANNED = "ResNet152"


def _workload(network: str, tensors: int | None = None) -> Workload:
    """The network's tensors (repeated up to ``tensors``), backward time in proportion to size.

    Only the number and spread of sizes matter for speed, not the times.
    """
    sizes = 4 * np.array(networks.parameters(network)[::-1])
    sizes = np.resize(sizes, tensors or sizes.size)
    return Workload.from_arrays(0.1, 0.2 * sizes / sizes.sum(), sizes)


def plan_times() -> dict[str, float]:
    """Median seconds of every planner, as it shows how it is written, on PLANNED's tensors.

    Under a start-up of 1 ms and 1 Gbit/s.
    """
    workload, cost = _workload(PLANNED), AlphaBeta(1e-3, 8e-9)
    specs = [spec for planner in planners().values() for spec in planner.examples]
    return {spec: _median_s(partial(make_plan, spec, workload, cost)) for spec in specs}


def schedule_s() -> float:
    """Median seconds to build and schedule dag's graph of PLANNED: 8 machines of 8 GPUs, 10 iterations."""
    workload, caffe = _workload(PLANNED), STRATEGIES["Caffe-MPI"]
    times = IterationTimes.of_workload(workload, AlphaBeta(1e-3, 8e-9), 1e-3, 1e-3)
    return _median_s(lambda: schedule(s_sgd(times, caffe, Gpus(8, 8), iterations=10)))


def _median_s(action: Callable[[], object]) -> float:
    return float(np.median(measure(action, BUDGET)))


def _by_networkx(iterations: Sequence[Iteration]) -> tuple[Floats, float, float]:
    """Iterations as longest paths: their times, and seconds for one with and without building its graph."""
    import networkx as nx

    def graph_of(iteration: Iteration) -> Any:
        graph = nx.DiGraph()
        graph.add_weighted_edges_from(iteration.edges())
        return graph

    built = [graph_of(one) for one in iterations]
    found = np.array([nx.dag_longest_path_length(graph) for graph in built])
    whole_s = _median_s(lambda: [nx.dag_longest_path_length(graph_of(one)) for one in iterations])
    path_s = _median_s(lambda: [nx.dag_longest_path_length(graph) for graph in built])
    return found, whole_s / len(iterations), path_s / len(iterations)


def run() -> dict[str, Any]:
    """Predictions per second (ResNet-50, no fusion), networkx beside it, time of plans.

    Per core when BLAS runs on one thread, which the caller sets in the environment before NumPy loads.
    """
    workload, rng = _workload("ResNet50"), np.random.default_rng(0)
    plan = planning.none(workload)
    scale = rng.uniform(0.1, 10, SCENARIOS)
    alpha_s, beta = 10 ** rng.uniform(-6, -2, SCENARIOS), 10 ** rng.uniform(-11, -8, SCENARIOS)
    scenarios = LinearScenarios.of(workload, plan)
    everything = LinearScenarios.of(workload, plan, prune=False)
    few = [
        Iteration(
            workload.scaled(float(scale[k])), plan, AlphaBeta(float(alpha_s[k]), float(beta[k]))
        )
        for k in range(GRAPHS)
    ]

    def one_by_one() -> list[float]:
        return [
            predict(workload, plan, AlphaBeta(a, b)).iteration_s
            for a, b in zip(alpha_s[:GRAPHS], beta[:GRAPHS], strict=True)
        ]

    deep = _workload("ResNet50", 516)
    fast = scenarios.iteration_s(scale, alpha_s, beta)
    graphs, graph_s, path_s = _by_networkx(few)
    fast_s = _median_s(lambda: scenarios.iteration_s(scale, alpha_s, beta))
    full_s = _median_s(lambda: everything.iteration_s(scale, alpha_s, beta))
    scalar_s = _median_s(one_by_one) / GRAPHS
    exact_s = _median_s(lambda: planning.exact(deep, AlphaBeta(1e-3, 8e-9)))
    return {
        "network": "resnet50",
        "tensors": workload.n,
        "predictions_per_s_per_core": SCENARIOS / fast_s,
        "without_pruning_predictions_per_s": SCENARIOS / full_s,
        "groups_that_can_be_critical": scenarios.coefficients.shape[1],
        "one_by_one_predictions_per_s": 1 / scalar_s,
        "networkx_predictions_per_s": 1 / graph_s,
        "networkx_without_building_predictions_per_s": 1 / path_s,
        "largest_difference_to_networkx": float(np.max(np.abs(fast[:GRAPHS] / graphs - 1))),
        "exact_plan_516_tensors_s": exact_s,
        f"{PLANNED.lower()}_64_gpus_10_iterations_schedule_s": schedule_s(),
        **{f"{PLANNED.lower()}_plan_s[{spec}]": seconds for spec, seconds in plan_times().items()},
    }
