"""Laws of the planners: partitions, closing rules, and the exact plan against every partition."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core import plan as planning
from ddlkit.core.cost import AlphaBeta, MessageCost, Table
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import predict
from ddlkit.core.plan import PLANNERS, FusionPlan
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from strategies import random_workload, workloads

SPECS = [spec for planner in PLANNERS.values() for spec in planner.examples]
"""As every registered planner shows that it is written: what is registered is tested."""
COST = AlphaBeta(1e-3, 1e-8)


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=25)
@given(st.data())
def test_every_plan_sends_every_byte_once(spec: str, data: st.DataObject) -> None:
    least = {"cuts:3,40": 41, "random:7:12": 12}.get(spec, 1)
    n = data.draw(st.integers(least, least + 11))
    sizes = data.draw(st.lists(st.integers(1, 10**8), min_size=n, max_size=n))
    workload = Workload.from_arrays(0.1, [0.01] * n, sizes)
    plan = make_plan(spec, workload, COST)
    assert plan.group_bytes(workload).sum() == workload.bytes.sum()
    members = [i for group in plan.forward_groups() for i in group]
    assert members == list(reversed(range(workload.n)))


@pytest.mark.parametrize("name", PLANNERS)
def test_an_argument_that_a_planner_does_not_take_is_one_line(name: str) -> None:
    workload = random_workload(np.random.default_rng(6), 5)
    for argument in ("50 parsecs", "fast", "-7"):
        with pytest.raises(UserError) as refused:
            make_plan(f"{name}:{argument}", workload, COST)
        assert "\n" not in str(refused.value)
    for spec in ("single:7", "exact:fast", "none:1"):
        with pytest.raises(
            UserError, match=f"plan '{spec}': write {spec.partition(':')[0]}$"
        ):
            make_plan(spec, workload, COST)


@given(workloads(), st.integers(1, 2 * 10**8))
def test_a_buffer_never_overflows_and_never_closes_early(
    workload: Workload, capacity: int
) -> None:
    plan = planning.buffer(workload, capacity)
    sizes, groups = workload.bytes, plan.slices
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        total = sizes[group].sum()
        assert total <= capacity or group.stop - group.start == 1
        if following is not None:
            assert total + sizes[following.start] > capacity


@given(workloads())
def test_ddp_closes_when_its_cap_is_reached(workload: Workload) -> None:
    plan = planning.ddp(workload)
    for k, group in enumerate(plan.slices):
        cap = planning.DDP_FIRST_BYTES if k == 0 else planning.DDP_BUCKET_BYTES
        assert workload.bytes[group][:-1].sum() < cap
        assert workload.bytes[group].sum() >= cap or group.stop == workload.n


def every_plan(n: int) -> list[FusionPlan]:
    inner = range(1, n)
    return [
        FusionPlan("all", (*cut, n)) for k in range(n) for cut in combinations(inner, k)
    ]


def random_cost(rng: np.random.Generator) -> MessageCost:
    if rng.random() < 0.5:
        return AlphaBeta(10 ** rng.uniform(-5, -1), 10 ** rng.uniform(-11, -7))
    return Table(np.array([1e2, 1e4, 1e6, 1e8]), np.sort(10 ** rng.uniform(-4, 0, 4)))


def test_exact_equals_brute_force_on_random_instances(
    request: pytest.FixtureRequest,
) -> None:
    """Of 300 networks of up to 8 tensors, and of 1000 with --long."""
    rng = np.random.default_rng(3)
    all_plans = {n: every_plan(n) for n in range(1, 9)}
    for _ in range(1000 if request.config.getoption("--long") else 300):
        workload, cost = random_workload(rng, int(rng.integers(1, 9))), random_cost(rng)
        best = min(
            predict(workload, plan, cost).iteration_s for plan in all_plans[workload.n]
        )
        found = predict(workload, planning.exact(workload, cost), cost).iteration_s
        assert found == pytest.approx(best, rel=1e-12)


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=60), st.floats(1e-12, 1e-3))
def test_exact_sends_once_where_every_grouping_ties(
    sizes: list[int], s_per_byte: float
) -> None:
    """All ready at once, and time in proportion to size: sums differ by rounding only."""
    workload = Workload.from_arrays(1.0, [0.0] * len(sizes), sizes)
    assert planning.exact(workload, AlphaBeta(0.0, s_per_byte)).ends == (len(sizes),)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("greedy", "plan 'greedy': unknown"),
        ("buffer:0", "must be above zero"),
        ("buffer:25", "write buffer:25MB"),
        ("ddp:25", "write ddp:25MiB"),
        ("buffer:1MB:0s", "timeout"),
        ("exact", "needs a message cost"),
        ("cuts:3,2", "must be in increasing order"),
        ("cuts:a", "whole numbers"),
        ("cuts:99", "99 is too large"),
        ("buffer", "as in buffer:25MB"),
        ("random:1", "random:SEED:MESSAGES"),
        ("random:1:99", "has 5 gradients"),
    ],
)
def test_bad_specs_are_refused(spec: str, message: str) -> None:
    workload = random_workload(np.random.default_rng(6), 5)
    with pytest.raises(UserError, match=message):
        make_plan(spec, workload)


@pytest.mark.parametrize("spec", SPECS)
def test_the_text_of_every_plan_is_accepted_without_a_workload(spec: str) -> None:
    planning.check_text_of_plan(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "greedy",
        "none:1",
        "buffer",
        "buffer:x",
        "buffer:0",
        "buffer:1MB:0s",
        "cuts:a",
        "cuts:3,2",
        "cuts:0,2",
        "ddp:x",
        "random:1",
        "random:1:0",
        "omgs:x",
        "mgs:0",
    ],
)
def test_a_text_that_fits_no_workload_is_refused_without_one(spec: str) -> None:
    with pytest.raises(UserError):
        planning.check_text_of_plan(spec)
