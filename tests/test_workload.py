"""Laws of profiles made by counting FLOP instead of by timing (osf Eqs 4-6), and of batches in a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core import plan, units
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import predict
from ddlkit.core.link import Link
from ddlkit.core.workload import LayerProfile, Workload
from strategies import workloads
from workbook.osf import equations as osf

counts = st.lists(st.floats(1e3, 1e10), min_size=1, max_size=8)


def counted(
    flops: list[float],
    batch: int = 1,
    *,
    peak_flops_per_s: float = 1e13,
    utilisation: float = 0.5,
) -> LayerProfile:
    names = [f"t{i}" for i in range(len(flops))]
    return LayerProfile.from_flops(
        "mine",
        batch,
        names,
        [10] * len(flops),
        flops,
        peak_flops_per_s=peak_flops_per_s,
        utilisation=utilisation,
    )


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
    assert (half.gradient_bytes.tolist(), half.parameters.tolist()) == (
        [40, 20],
        [10, 5],
    )
    assert (half.forward_s / profile.forward_s).tolist() == [1.0, 0.5]
    assert (half.backward_s / profile.backward_s).tolist() == [1.0, 0.5]
    with pytest.raises(UserError, match="no layer or tensor 't7'"):
        profile.resized({"t7": 2.0})
    with pytest.raises(UserError, match="cannot be 0 times"):
        profile.resized({"t0": 0.0})
    with pytest.raises(UserError, match="0 micro-batches"):
        profile.workload().accumulated(0)
    halved = profile.sent_as(2)
    assert (halved.gradient_bytes == 2 * halved.parameters).all()
    assert np.array_equal(halved.backward_s, profile.backward_s)
    with pytest.raises(UserError, match="any FLOP"):
        counted([0.0])
    with pytest.raises(UserError, match="rate is 0"):
        counted([1e6], peak_flops_per_s=0)
    with pytest.raises(UserError, match="utilisation is 1.2"):
        counted([1e6], utilisation=1.2)
    with pytest.raises(UserError, match="size is 0"):
        counted([1e6], batch=0)


lines = st.builds(AlphaBeta, st.floats(0, 1), st.floats(0, 1e-6))


@given(
    workloads(), lines, st.integers(1, 30), st.integers(1, 4 * 10**7), st.floats(0, 2)
)
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
    assert workload.accumulated(1).ready_s == pytest.approx(
        workload.ready_s, rel=0, abs=0
    )


@given(st.floats(1e-8, 9e5))
def test_times_are_printed_without_an_exponent(seconds: float) -> None:
    """Rounding up must not leave a thousand of the smaller unit."""
    number, unit = units.format_seconds(seconds).split()
    assert "e" not in number
    assert unit == "s" or float(number) < 1000


@given(st.integers(0, 2**40), st.floats(1e-8, 1e4))
def test_bytes_and_times_print_and_parse_back(n: int, seconds: float) -> None:
    assert units.parse_bytes(units.format_bytes(n)) == pytest.approx(
        n, rel=1e-3, abs=0.5
    )
    assert units.parse_seconds(units.format_seconds(seconds)) == pytest.approx(
        seconds, rel=1e-2
    )


def test_decimal_and_binary_prefixes_differ() -> None:
    assert (units.parse_bytes("25MB"), units.parse_bytes("25 MiB")) == (
        25_000_000,
        26_214_400,
    )
    assert units.parse_bits_per_s("25 Gbit/s") == 25e9
    assert units.parse_seconds("8m") == 480


def test_wrong_sizes_and_rates_are_refused() -> None:
    for size in ("25Mb", "25 parsecs", "MB", "", "-1MB", "1e", "nan"):
        with pytest.raises(UserError, match="size"):
            units.parse_bytes(size)
    for rate in ("1GB", "0gbit", "fast", "1"):
        with pytest.raises(UserError, match="rate"):
            units.parse_bits_per_s(rate)


def test_sizes_of_gradients_that_no_type_has_are_doubted() -> None:
    rng = np.random.default_rng(5)
    parameters = rng.integers(1000, 10**6, 6)
    profile = LayerProfile.from_flops(
        "x",
        2,
        [f"w{number}" for number in range(6)],
        parameters,
        parameters.astype(float),
        peak_flops_per_s=1e9,
        utilisation=1.0,
    )
    for n_bytes in (1, 2, 4, 8):
        assert not [*profile.sent_as(n_bytes).doubts()]
    # A file without parameters has them rounded up.
    odd = replace(profile, gradient_bytes=profile.gradient_bytes - 3)
    assert not [*odd.doubts()]
    for factor in (2, 3):
        sizes = profile.gradient_bytes.copy()
        sizes[3] *= factor
        (doubt,) = replace(profile, gradient_bytes=sizes).doubts()
        assert "w3" in doubt
        # With several types, only a size that none of them has is doubted.
        several = ("fp32", "fp32", "fp32", "fp64", "fp32", "fp32")
        typed = replace(profile, gradient_bytes=sizes, dtype=several)
        assert len([*typed.doubts()]) == (factor == 3)
