"""Laws of the audit of sparse planners, and the smallest counterexample to omgs's Theorem 1."""

from __future__ import annotations

import numpy as np
import pytest

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.plan import proven
from ddlkit.core.sparse import Selecting
from ddlkit.model import make_plan
from ddlkit.papers import omgs
from ddlkit.papers.omgs import audit
from ddlkit.papers.osf import cluster
from ddlkit.report.figures import omgs_planning


def test_the_audit_is_reproducible_and_nothing_beats_the_optimum() -> None:
    first, again = (audit.random_audit(12, seed=3) for _ in range(2))
    assert first.equals(again)
    assert first["gap"].min() > -1e-11
    assert set(first["planner"]) == set(audit.PLANNERS)
    found = audit.summary(first)
    assert len(found) == len(audit.PLANNERS) * len(audit.SELECTIONS)
    assert found["optimal"].between(0, 1).all()
    assert (found["worst_gap"] >= found["mean_gap"]).all()


def test_two_layers_are_merged_optimally_where_the_premise_holds_and_only_there() -> None:
    drawn = audit.random_audit(60, seed=1, tensors=range(2, 3))
    rules = drawn[drawn["planner"].isin(["omgs", "omgs:theorem"])]
    optimal = rules.groupby("selection")["gap"].max() <= audit.OPTIMAL
    assert optimal.to_dict() == {"density_log": True, "log": True, "scan": False}


def test_without_start_ups_each_tensor_alone_is_optimal_but_the_rule_merges_for_no_gain() -> None:
    """Its case C2 gains alpha, which is nothing, and the longer selection delays all that follows."""
    rng, excess = np.random.default_rng(2), []
    for _ in range(20):
        workload, _, beta_s = audit.random_workload(rng, range(2, 20))
        cost = audit.linear_cost(0.0, beta_s, audit.SELECTIONS["log"])
        apart_s = audit.iteration_s(workload, make_plan("none", workload, cost), cost)
        by_rule_s = audit.iteration_s(workload, make_plan("omgs", workload, cost), cost)
        assert apart_s == pytest.approx(proven(workload, cost)[1], rel=1e-11)
        excess.append(by_rule_s / apart_s - 1)
    assert min(excess) > -1e-11
    assert max(excess) > 1e-3


def test_a_message_of_whole_thousands_costs_what_eq_11_says() -> None:
    cost = audit.linear_cost(0.01, 1e-9, audit.SELECTIONS["log"])
    assert cost(4 * 5_000.0) == pytest.approx(0.01 + 5e-6)


def test_the_smallest_counterexample_has_three_equal_layers() -> None:
    layers, total = audit.SMALLEST
    assert not any(audit.counterexamples(layers, smaller) for smaller in range(11, total))
    ((gap, instance),) = audit.counterexamples(layers, total)
    assert gap == pytest.approx(0.28)
    assert instance.backward_s.tolist() == [1, 1, 1]
    assert instance.elements.tolist() == [2, 2, 2]
    assert (instance.alpha_s, instance.beta_s) == (8, 1)


def test_no_counterexample_in_small_whole_numbers_has_two_layers() -> None:
    assert not any(audit.counterexamples(2, total) for total in range(8, 20))


def test_an_instance_takes_as_long_in_core_as_by_eq_17() -> None:
    instance = omgs_planning.smallest()
    workload, cost = audit.in_core(instance)
    for merged in omgs.combinations(instance.layers):
        taken_s = audit.iteration_s(workload, omgs.plan_of(merged, "drawn"), cost)
        assert taken_s == pytest.approx(float(omgs.merged_iteration_s(instance, merged)))


def test_networks_are_audited_over_links_costs_and_densities() -> None:
    networks = {"VGG16": cluster.workload("VGG16", 0.3)}
    gathers = {"slow": AlphaBeta(1e-2, 1.7e-8, collective="all_gather", workers=16)}
    rows = audit.network_audit(networks, gathers, audit.SELECTIONS)
    assert len(rows) == len(audit.PLANNERS) * len(audit.SELECTIONS) * 2
    assert rows["gap"].min() > -1e-11
    assert rows.loc[rows["planner"] == "single", "messages"].eq(1).all()


def test_recorded_selection_is_a_cost_like_the_others() -> None:
    costs: dict[str, Selecting] = {**audit.SELECTIONS, **omgs_planning.measured_selection()}
    for name, cost in costs.items():
        times = np.asarray(cost(np.array([1e4, 1e6, 1e8]), audit.DENSITY))
        assert np.all(np.diff(times) > 0), name
