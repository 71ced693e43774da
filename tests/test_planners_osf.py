"""osf's planners, bound, breakdown and cluster: laws over random instances, and what no setting can do."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration, predict
from ddlkit.core.plan import buffer, make_plan
from ddlkit.core.workload import Workload
from strategies import costs, plans, random_workload, workloads
from workbook.common.settings import Stated, settle
from workbook.osf import cluster, settings
from workbook.osf import equations as osf
from workbook.osf.equations import PHASES, breakdown, of_timeline


@pytest.mark.parametrize("start_up_s, messages", [(0.0005, 10), (0.002, 1)])
def test_an_idle_link_fuses_if_the_start_up_exceeds_the_wait(
    start_up_s: float, messages: int
) -> None:
    # A message of 1 MB is over within the 1 ms until the next gradient, or nearly.
    workload = Workload.from_arrays(0.1, [0.001] * 10, [10**6] * 10)
    for name in ("mg_wfbp", "adafusion:repaired"):
        assert (
            len(make_plan(name, workload, AlphaBeta(start_up_s, 1e-10)).ends)
            == messages
        )


@given(workloads(), st.integers(1, 10**9), st.floats(1e-3, 10))
def test_buffer_with_timeout_sends_what_the_repaired_equation_sends(
    workload: Workload, capacity: int, timeout_s: float
) -> None:
    plan = buffer(workload, capacity, timeout_s=timeout_s)
    arguments = workload.bytes[::-1].tolist(), workload.backward_s[::-1].tolist()
    sent = osf.sent_bytes(*arguments, capacity, timeout_s, literal=False)
    assert plan.group_bytes(workload).tolist() == sent[sent > 0][::-1].tolist()


@given(
    st.integers(1, 10),
    st.integers(0, 2**32),
    st.floats(0, 1),
    st.floats(0, 1e-7),
    st.data(),
)
def test_no_plan_is_faster_than_the_bound(
    n: int, seed: int, alpha_s: float, slope: float, data: st.DataObject
) -> None:
    drawn, cost = (
        random_workload(np.random.default_rng(seed), n),
        AlphaBeta(alpha_s, slope),
    )
    forward_s = float(drawn.backward_s.sum()) / 2  # backward is two thirds
    workload = Workload.from_arrays(forward_s, drawn.backward_s, drawn.bytes)
    constant, other = data.draw(plans(n)), data.draw(plans(n))
    times = [predict(workload, plan, cost).iteration_s for plan in (constant, other)]
    saved = (len(constant.ends) - 1) * cost.alpha_s / workload.compute_s
    most = osf.largest_fusion_gain(min(1.0, workload.compute_s / times[0]), saved)
    assert times[0] / times[1] - 1 <= most + 1e-9


@given(workloads(), costs(), st.data())
def test_phases_fill_the_time_from_the_first_gradient_to_the_last_message(
    workload: Workload, cost: MessageCost, data: st.DataObject
) -> None:
    plan = data.draw(plans(workload.n))
    slowest = data.draw(st.floats(1, 2))
    equal = breakdown(workload, plan, cost)
    end_s = predict(workload, plan, cost).iteration_s - workload.update_s
    assert sum(equal.values()) == pytest.approx(end_s - workload.ready_s[0], abs=1e-9)
    assert set(equal) == set(PHASES) and equal["NEGOTIATE"] == pytest.approx(
        0, abs=1e-9
    )
    unequal = breakdown(workload, plan, cost, slowest=slowest)
    assert sum(unequal.values()) >= sum(equal.values()) - 1e-9
    assert unequal["ALLREDUCE"] == pytest.approx(equal["ALLREDUCE"])
    assert min(unequal.values()) >= 0


@given(workloads(), costs(), st.data())
def test_phases_read_off_a_simulated_timeline_are_the_simulated_ones(
    workload: Workload, cost: MessageCost, data: st.DataObject
) -> None:
    """One definition: a measurement and a model that agree moment by moment agree in every phase."""
    plan = data.draw(plans(workload.n))
    seen = of_timeline(Iteration(workload, plan, cost).timeline())
    assert seen == pytest.approx(breakdown(workload, plan, cost), abs=1e-9)


@pytest.mark.parametrize("capacity", [0, 10**6, 10**9])
@pytest.mark.parametrize("timeout_s", [0.003, math.inf])
def test_the_scan_equals_the_repaired_equations_one_by_one(
    capacity: int, timeout_s: float
) -> None:
    compute_s, overheads, slope = 0.2, np.array([1e-5, 1e-3]), 6e-10
    arguments = cluster.fused("VGG16", compute_s, capacity, timeout_s, "tensor")
    workload = arguments[0]
    fast = compute_s / cluster.fused_iteration_s(*arguments, overheads, slope)
    sizes, backward = workload.bytes[::-1].tolist(), workload.backward_s[::-1].tolist()
    for overhead, found in zip(overheads.tolist(), fast.tolist(), strict=True):
        cost = AlphaBeta(overhead, slope)
        times = workload.forward_s, sizes, backward
        until_s = timeout_s if capacity else math.inf
        slow = osf.osf_fused(*times, cost, capacity, until_s, literal=False)
        assert found == pytest.approx(slow)


def test_the_search_finds_the_setting_that_was_stated() -> None:
    values = settings.quantities(grid := settings.Grid(9))
    place = (0, 3, 4, 5, 2)
    stated = [
        Stated(name, 0.99 * at, 1.01 * at)
        for name, value in values.items()
        if (at := float(np.broadcast_to(value, grid.shape)[place])) > 0
    ]
    found = settle(stated, grid, values)
    assert found.fits_all() and found.holds[(slice(None), *place)].all()
    assert found.residuals(place)["holds"].all()
    with pytest.raises(UserError, match="no quantity"):
        settle([Stated("ResNet-7: charm", 0, 1)], grid, values)


@given(
    hnp.arrays(bool, st.tuples(st.integers(2, 6), st.integers(1, 9))),
    st.floats(-0.5, 1.5),
    st.floats(0, 1),
)
def test_a_statement_stands_with_the_others_as_counted_by_hand(
    holds: NDArray[np.bool_], low: float, width: float
) -> None:
    """Values of statement 0 are 0 or 1; it is asked for another interval than its own."""
    value = holds[0].astype(float)
    values = {str(k): row.astype(float) for k, row in enumerate(holds)}
    stated = [Stated(name, 0.5, 1.5) for name in values]
    places = np.arange(len(value))
    search = settle(
        stated, SimpleNamespace(shape=value.shape, free={"place": places}), values
    )
    left = search.without("0", low, low + width)
    here = [low <= each <= low + width for each in value]
    others = [int(column.sum()) for column in holds[1:].T]
    with_it = max([n for n, it in zip(others, here, strict=True) if it], default=-1)
    assert (left.most, left.with_it, left.others) == (
        max(others),
        with_it,
        len(holds) - 1,
    )
    only = {} if all(here) else {"place": [*np.flatnonzero(here)]}
    assert {name: [*values] for name, values in left.only.items()} == only
    best = [it for n, it in zip(others, here, strict=True) if n == max(others)]
    assert left.settings == len(best) == search.most_others("0").sum()
    assert left.share == pytest.approx(np.mean(best))
    apart = not any(here) or with_it <= max(others) - 2
    expected = (
        "contradicted"
        if apart
        else "compatible"
        if np.mean(best) >= 0.5
        else "undecided"
    )
    assert left.standing == expected
    # What holds in every setting that meets the most others agrees with them.
    own = search.without("0")
    assert own.standing == "compatible" or own.share < 1


@given(hnp.arrays(bool, st.tuples(st.integers(2, 6), st.integers(1, 9))))
def test_a_statement_never_chooses_the_settings_that_judge_it(
    holds: NDArray[np.bool_],
) -> None:
    """With other values of its own, the same settings judge it."""
    values = {str(k): row.astype(float) for k, row in enumerate(holds)}
    stated = [Stated(name, 0.5, 1.5) for name in values]
    grid = SimpleNamespace(shape=holds.shape[1:], free={"place": holds[0]})
    turned = {**values, "0": 1 - values["0"]}
    chosen = settle(stated, grid, values).most_others("0")
    assert (chosen == settle(stated, grid, turned).most_others("0")).all()
