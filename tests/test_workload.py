"""Laws of profiles made by counting FLOP instead of by timing (osf Eqs 4-6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.papers import osf

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
    # osf Eq 5 solved for c finds the utilisation that went in
    assert osf.utilisation(profile.flops.sum(), workload.compute_s, peak) == pytest.approx(c)


def test_bytes_follow_the_parameters() -> None:
    half = counted([1e6, 0.0], bytes_per_parameter=2)
    assert half.gradient_bytes.tolist() == [20, 20]
    assert half.layer == half.tensor == ("t0", "t1")


@pytest.mark.parametrize(
    ("flops", "changed", "message"),
    [
        ([1e6], {"peak_flops_per_s": 0}, "peak rate is 0"),
        ([1e6], {"peak_flops_per_s": float("inf")}, "peak rate is inf"),
        ([1e6], {"utilisation": 1.2}, "utilisation is 1.2"),
        ([1e6], {"utilisation": float("nan")}, "utilisation is nan"),
        ([1e6], {"batch": 0}, "batch size is 0"),
        ([-1.0], {}, "forward_s of tensor 0"),
        ([0.0], {}, "no tensor has any FLOP"),
        ([], {}, "no tensor has any FLOP"),
    ],
)
def test_a_rate_or_count_that_cannot_be_is_refused(
    flops: list[float], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        counted(flops, **changed)
