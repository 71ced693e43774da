"""Laws of profiles made by counting FLOP instead of by timing (osf Eqs 4-6), and of batches in a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import predict
from ddlkit.core.link import Link
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.papers import osf
from strategies import workloads

counts = st.lists(st.floats(1e3, 1e10), min_size=1, max_size=8)


def counted(flops: list[float], batch: int = 1, **changed: Any) -> LayerProfile:
    rate: dict[str, Any] = {"peak_flops_per_s": 1e13, "utilisation": 0.5, **changed}
    names = [f"t{i}" for i in range(len(flops))]
    return LayerProfile.from_flops("mine", batch, names, [10] * len(flops), flops, **rate)


@given(counts, st.integers(1, 512), st.floats(1e9, 1e15), st.floats(0.01, 1))
def test_compute_is_three_times_the_forward_work_over_the_rate(
    flops: list[float], batch: int, peak: float, c: float
) -> None:
    profile = counted(flops, batch, peak_flops_per_s=peak, utilisation=c)
    workload = profile.workload()
    assert workload.compute_s == pytest.approx(3 * sum(flops) * batch / (c * peak))
    assert np.array_equal(profile.backward_s, 2 * profile.forward_s)
    one_sample = osf.compute_s(flops, batch, c, peak)
    assert workload.compute_s == pytest.approx(one_sample)


def test_bytes_follow_the_parameters_and_a_layer_can_be_resized() -> None:
    profile = counted([1e6, 4e6])
    assert profile.gradient_bytes.tolist() == [40, 40]
    assert profile.layer == profile.tensor == ("t0", "t1")
    half = profile.resized({"t1": 0.5})
    assert (half.gradient_bytes.tolist(), half.parameters.tolist()) == ([40, 20], [10, 5])
    assert (half.forward_s / profile.forward_s).tolist() == [1.0, 0.5]
    assert (half.backward_s / profile.backward_s).tolist() == [1.0, 0.5]
    with pytest.raises(UserError, match="no layer or tensor 't7'"):
        profile.resized({"t7": 2.0})
    with pytest.raises(UserError, match="cannot be 0 times"):
        profile.resized({"t0": 0.0})
    with pytest.raises(UserError, match="0 micro-batches"):
        profile.workload().accumulated(0)


@pytest.mark.parametrize(
    ("flops", "changed", "message"),
    [
        ([1e6], {"peak_flops_per_s": 0}, "peak rate is 0"),
        ([1e6], {"utilisation": 1.2}, "utilisation is 1.2"),
        ([1e6], {"batch": 0}, "batch size is 0"),
        ([-1.0], {}, "forward_s of tensor 0"),
        ([0.0], {}, "no tensor has any FLOP"),
    ],
)
def test_a_rate_or_count_that_cannot_be_is_refused(
    flops: list[float], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        counted(flops, **changed)


lines = st.builds(AlphaBeta, st.floats(0, 1), st.floats(0, 1e-6))


@given(workloads(), lines, st.integers(1, 30), st.integers(1, 4 * 10**7), st.floats(0, 2))
def test_accumulated_batches_come_before_the_one_whose_gradients_travel(
    workload: Workload, cost: AlphaBeta, m: int, capacity: int, slowdown: float
) -> None:
    """Whatever the plan and however messages slow down what they hide behind; one batch is the present."""
    sent, link = plan.buffer(workload, capacity), Link(slowdown=slowdown)
    one = predict(workload, sent, cost, link)
    many = predict(workload.accumulated(m), sent, cost, link)
    before_s = (m - 1) * (workload.compute_s - workload.update_s)
    assert many.iteration_s == pytest.approx(one.iteration_s + before_s)
    assert many.communication_s == one.communication_s
    assert workload.accumulated(1).ready_s == pytest.approx(workload.ready_s, rel=0, abs=0)


@given(workloads(), lines, st.integers(1, 4 * 10**7))
def test_halved_gradients_are_never_slower(
    workload: Workload, cost: AlphaBeta, capacity: int
) -> None:
    """Of a plan that is kept; parameters and times stay as they are."""
    whole = counted([1e6] * 8)
    half = whole.sent_as(2)
    assert (half.gradient_bytes == 2 * half.parameters).all()
    assert np.array_equal(half.backward_s, whole.backward_s) and half.batch == whole.batch
    smaller = replace(workload, bytes=np.maximum(workload.bytes // 2, 1))
    sent = plan.buffer(workload, capacity)
    assert predict(smaller, sent, cost).iteration_s <= predict(workload, sent, cost).iteration_s
