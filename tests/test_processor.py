"""How the cores were used: shares of what passed, and what was disturbed is taken again."""

from __future__ import annotations

from collections import namedtuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.run.instruments import vitals
from ddlkit.run.instruments.vitals import Usage

Times = namedtuple("Times", "user system idle iowait nice steal guest")


@given(st.lists(st.floats(0.1, 1), min_size=6, max_size=6), st.sampled_from([0, 19]))
def test_shares_are_those_of_the_time_that_passed(spent: list[float], niceness: int) -> None:
    """What others do who are nice leaves a core to us, unless we are nice ourselves."""
    user, system, idle, iowait, nice, steal = spent
    before, after = Times(*[5] * 7), Times(*(np.array([*spent, user]) + 5))
    with mock.patch("os.nice", return_value=niceness):
        found = vitals.processor_usage(before, after)
    busy = user + system + steal + (nice if niceness else 0.0)
    assert found.busy == pytest.approx(busy / sum(spent))
    assert found.stolen == pytest.approx(steal / sum(spent))
    assert found.limited == (found.busy >= 0.9 or found.stolen > 0.02)


def test_no_time_is_no_use_and_the_machine_counts_upwards() -> None:
    now = vitals.processor_times()
    assert vitals.processor_usage(now, now) == Usage(0.0, 0.0)
    assert 0 <= vitals.processor_usage(now, vitals.processor_times()).busy <= 1
