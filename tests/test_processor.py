"""How the cores were used: shares of what passed, and what was disturbed is taken again."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.run.instruments import vitals
from ddlkit.run.instruments.vitals import Usage

Times = namedtuple("Times", "user system idle iowait steal guest")


@given(st.lists(st.floats(0.1, 1), min_size=5, max_size=5))
def test_shares_are_those_of_the_time_that_passed(spent: list[float]) -> None:
    user, system, idle, iowait, steal = spent
    before, after = Times(5, 5, 5, 5, 5, 5), Times(*(np.array([*spent, user]) + 5))
    found = vitals.processor_usage(before, after)
    assert found.busy == pytest.approx((user + system + steal) / sum(spent))
    assert found.stolen == pytest.approx(steal / sum(spent))
    assert found.limited == (found.busy >= 0.9 or found.stolen > 0.02)


def test_no_time_is_no_use_and_the_machine_counts_upwards() -> None:
    now = vitals.processor_times()
    assert vitals.processor_usage(now, now) == Usage(0.0, 0.0)
    assert 0 <= vitals.processor_usage(now, vitals.processor_times()).busy <= 1
