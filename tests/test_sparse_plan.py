"""Laws of planning where groups are selected before they are sent: optimum, certificate, planners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core import plan as planning
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import (
    Log,
    Scan,
    SelectionCost,
    SparseGather,
    elements_of,
    sparse_iteration,
    sparse_timeline,
    with_selection,
)
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from strategies import workloads
from workbook.omgs import equations as omgs

RULES: dict[str, Callable[[omgs.Instance], np.ndarray]] = {
    "omgs": omgs.find_merged_layers,
    "omgs:code": partial(omgs.find_merged_layers, by_code=True),
    "omgs:theorem": omgs.merge_by_theorem,
}
SELECTIONS = (Log(2.2e-12), Log(2.2e-10), Scan(2e-5, 2e-11), Scan(1e-3, 2e-10))


def sparse(selecting: SelectionCost, alpha_s: float, beta_s: float) -> SparseGather:
    gather = AlphaBeta(alpha_s, beta_s, collective="all_gather", workers=16)
    return SparseGather(gather, 0.001, selecting=selecting)


def instances(
    seed: int, count: int, most: int
) -> Iterator[tuple[Workload, SparseGather]]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(rng.integers(1, most + 1))
        backward_s = 10 ** rng.uniform(-4, -1.5, n)
        sizes = 4 * np.rint(10 ** rng.uniform(3, 7, n)).astype(int)
        selecting = SELECTIONS[rng.integers(len(SELECTIONS))]
        cost = sparse(selecting, 10 ** rng.uniform(-4, -1.5), 10 ** rng.uniform(-9, -7))
        yield (
            Workload.from_arrays(float(rng.uniform(0, 0.1)), backward_s, sizes, 0.01),
            cost,
        )


def every_iteration_s(workload: Workload, cost: SparseGather) -> np.ndarray:
    """(2^(n-1),) iterations of all plans, by the recursion written down for all of them at once."""
    n = workload.n
    cuts = np.arange(2 ** (n - 1))
    total = np.concatenate([[0.0], np.cumsum(workload.bytes)])
    selected, sent, first = (
        np.zeros(len(cuts)),
        np.zeros(len(cuts)),
        np.zeros(len(cuts), int),
    )
    for last in range(n):
        ends = (
            ((cuts >> last) & 1).astype(bool)
            if last < n - 1
            else np.ones(len(cuts), bool)
        )
        sizes = total[last + 1] - total[first]
        now = selected + cost.selection_s(sizes)
        arrived = np.maximum(sent, workload.ready_s[last] + now) + cost(sizes)
        selected, sent = np.where(ends, now, selected), np.where(ends, arrived, sent)
        first = np.where(ends, last + 1, first)
    return sent + workload.update_s


def iteration_s(workload: Workload, plan: FusionPlan, cost: SparseGather) -> float:
    return sparse_iteration(workload, plan, cost).prediction.iteration_s


def test_the_optimum_is_that_of_brute_force_and_its_certificate_meets_it() -> None:
    for workload, cost in instances(1, 250, most=13):
        plan = planning.exact(workload, cost)
        assert plan.least_s == pytest.approx(
            iteration_s(workload, plan, cost), rel=1e-11
        )
        assert plan.least_s == pytest.approx(
            every_iteration_s(workload, cost).min(), rel=1e-11
        )


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_plan_takes_as_long_for_the_planner_as_for_the_iteration(
    share: float,
) -> None:
    for workload, cost in instances(2, 50, most=12):
        plan = make_plan(f"random:1:{1 + int(share * (workload.n - 1))}", workload)
        assert cost.selecting
        selecting_s = cost.selecting(
            elements_of(plan.group_bytes(workload)), cost.density
        )
        np.testing.assert_array_equal(
            selecting_s, cost.selection_s(plan.group_bytes(workload))
        )
        by_hand = Iteration(
            with_selection(workload, plan, selecting_s), plan, cost
        ).prediction
        assert by_hand == sparse_iteration(workload, plan, cost).prediction
        spans = sparse_timeline(workload, plan, cost)
        assert spans.end_s.max() == pytest.approx(by_hand.iteration_s)
        selected_s = (spans.end_s - spans.start_s)[spans.kind == "sparsify"].sum()
        assert selected_s == pytest.approx(selecting_s.sum(), abs=1e-9)


@given(workloads(max_tensors=30), st.integers(1, 10**7))
def test_mgs_sends_when_its_threshold_is_reached(
    workload: Workload, threshold: int
) -> None:
    plan = make_plan(f"mgs:{threshold}", workload)
    sizes = [int(workload.parameters[group].sum()) for group in plan.slices]
    assert tuple(sizes) == omgs.merge_up_to(workload.parameters.tolist(), threshold)
    assert all(size >= threshold for size in sizes[:-1])
    for group in plan.slices:
        assert workload.parameters[group][:-1].sum() < threshold


@pytest.mark.parametrize("spec", RULES)
def test_the_papers_rules_plan_with_what_the_cost_knows_of_selecting(spec: str) -> None:
    for workload, cost in instances(3, 40, most=12):
        instance = omgs.of_planning(workload, cost)
        assert instance.selection is cost.selecting
        plan, merged = make_plan(spec, workload, cost), RULES[spec](instance)
        assert plan.ends == omgs.plan_of(merged, spec).ends
        shortest_s = iteration_s(workload, planning.exact(workload, cost), cost)
        assert iteration_s(workload, plan, cost) >= shortest_s * (1 - 1e-11)
        # Eq 17 is the iteration, but for the line through a cost that counts whole elements.
        taken_s = float(omgs.merged_iteration_s(instance, merged)) + workload.update_s
        assert taken_s == pytest.approx(iteration_s(workload, plan, cost), rel=0.02)
