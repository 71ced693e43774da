"""Laws of omgs's networks on its cluster: shapes, parts, what can be saved; where sparse is worth it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.plan import FusionPlan, exact, single
from ddlkit.core.sparse import Scan
from ddlkit.core.workload import Workload
from ddlkit.papers import networks
from ddlkit.papers.omgs import cluster
from ddlkit.papers.omgs.cluster import NETWORKS, PARTS, Costs, Setting
from ddlkit.report.figures import omgs_breakdown as breakdown
from ddlkit.report.figures import omgs_region as region
from ddlkit.run.nets import registry

COSTS = Costs(1.1e-2, 1.7e-8, 2.2e-10, 16)


@pytest.mark.parametrize("name", ["inception_v4", "vgg16_cifar", "lstm_ptb"])
def test_layers_counted_by_hand_are_those_of_the_network(name: str) -> None:
    with torch.device("meta"):
        built = registry.build(name)
    assert networks.parameters(name) == tuple(p.numel() for p in built.parameters())


def test_inception_v4_has_the_published_parameters_and_multiply_adds() -> None:
    assert sum(networks.parameters("inception_v4")) == pytest.approx(42.7e6, rel=1e-3)
    assert networks.multiply_adds("inception_v4") == pytest.approx(12.3e9, rel=5e-3)
    assert len(networks.parameters("inception_v4")) == 2 + 3 * 149


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("even", [0.0, 0.5])
def test_a_setting_computes_as_long_as_it_says(network: str, even: float) -> None:
    workload = Setting(network, 0.3, 0.6, even).workload()
    assert workload.compute_s == pytest.approx(0.3)
    assert workload.forward_s == pytest.approx(0.12)
    assert workload.parameters.sum() == sum(networks.parameters(NETWORKS[network]))


@pytest.mark.parametrize("planner", cluster.PLANS.values())
def test_the_parts_add_up_and_the_optimum_is_the_least(planner: str) -> None:
    setting, cost = Setting("VGG-16", 0.2), COSTS.of(0.001)
    found, best = (cluster.planned(setting, one, cost) for one in (planner, "exact"))
    assert sum(found[part] for part in PARTS) == pytest.approx(found["iteration"])
    assert min(found[part] for part in PARTS) >= -1e-12
    assert best["iteration"] <= found["iteration"] * (1 + 1e-11)


def test_no_layer_times_save_more_than_the_bound() -> None:
    rng, cost = np.random.default_rng(0), COSTS.of(0.001)
    whole = Setting("VGG-16", 0.2).workload()
    for _ in range(30):
        messages = int(rng.integers(1, 8))
        ends = (*sorted(rng.choice(np.arange(1, whole.n), messages - 1, replace=False)), whole.n)
        drawn = rng.dirichlet(np.full(whole.n, 0.1))
        one = Workload.from_arrays(0.01, rng.uniform(0, 1) * drawn, whole.bytes)
        topk, plan = (
            cluster.breakdown(one, each, cost)["iteration"]
            for each in (single(one), FusionPlan("drawn", tuple(map(int, ends))))
        )
        assert topk - plan <= COSTS.most_saved_s("VGG-16", 0.001, messages) + 1e-12


def test_compatible_settings_agree_with_as_many_times_as_any() -> None:
    every, best = breakdown.scanned("LSTM-PTB"), breakdown.compatible("LSTM-PTB")
    names = [f"{name}_agrees" for name in breakdown.TIMES]
    assert best[names].sum(axis=1).eq(every[names].sum(axis=1).max()).all()
    assert best["far"].is_monotonic_increasing
    for name in breakdown.TIMES:
        off = every[name] / breakdown.printed().loc["LSTM-PTB", name] - 1
        assert (off.abs() <= breakdown.TOLERANCE).equals(every[f"{name}_agrees"])


def test_what_topk_leaves_to_computation_makes_its_iteration() -> None:
    low, high = breakdown.computing_s("ResNet-50")
    cost = breakdown.costs().of(0.001)
    took_s = cluster.planned(Setting("ResNet-50", (low + high) / 2), "single", cost)["iteration"]
    assert took_s == pytest.approx(breakdown.printed().loc["ResNet-50", "topk_s"])


# ---------------------------------------------------------------- sparse against dense


def case(selection_s: float = 0.0) -> region.Case:
    workload = Workload.from_arrays(0.02, [0.01, 0.03, 0.02], [4_000_000, 400_000, 8_000_000])
    return region.Case(workload, Scan(selection_s, 0.0))


def test_below_the_break_even_sparse_is_faster_and_above_it_dense() -> None:
    rate = region.break_even(case(0.01), 1e-3, 0.001)
    assert region.SLOWEST < rate < region.FASTEST
    for factor, sparse_is_faster in ((0.9, True), (1.1, False)):
        dense_s, sparse_s = region.iterations_s(case(0.01), factor * rate, 1e-3, 0.001)
        assert (sparse_s < dense_s) == sparse_is_faster


def test_a_dearer_selection_is_worth_it_on_slower_links_only() -> None:
    rates = [region.break_even(case(each), 1e-3, 0.001) for each in (1e-3, 1e-2, 1e-1)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


@pytest.mark.parametrize("workers", [4, 16])
def test_nothing_is_saved_on_the_link_from_a_density_of_one_in_p_on(workers: int) -> None:
    for bits_per_s in (1e7, 1e9):
        dense_s, sparse_s = region.iterations_s(case(), bits_per_s, 1e-3, 1 / workers, workers)
        assert sparse_s == pytest.approx(dense_s, rel=1e-3)
        dense_s, sparse_s = region.iterations_s(case(1e-6), bits_per_s, 1e-3, 1 / workers, workers)
        assert sparse_s > dense_s
    assert region.break_even(case(1e-3), 1e-3, 1.01 / workers, workers) == 0.0


def test_where_selecting_is_free_sparse_is_always_worth_it() -> None:
    assert region.break_even(case(), 1e-3, 1e-3) == math.inf


def test_the_dense_side_is_the_exact_plan() -> None:
    one = case()
    dense_s, _ = region.iterations_s(one, 1e9, 1e-3, 0.001)
    cost = AlphaBeta(2e-3, 2 * 8 * 15 / 16 / 1e9, workers=16)
    assert dense_s == pytest.approx(exact(one.workload, cost).least_s)
