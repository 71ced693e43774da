"""How the cores were used: shares of what passed, and what was disturbed is taken again."""

from __future__ import annotations

from collections import namedtuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.model.calibration import STOLEN_LIMIT
from ddlkit.run.instruments.usage import (
    BUSY_LIMIT,
    LATE_LIMIT,
    Usage,
    processor_usage,
)
from ddlkit.run.lab import emulated, tunnel

Times = namedtuple("Times", "user system idle iowait nice steal guest")


@given(st.lists(st.floats(0.1, 1), min_size=6, max_size=6), st.sampled_from([0, 19]))
def test_shares_are_those_of_the_time_that_passed(spent: list[float], niceness: int) -> None:
    """What others do who are nice leaves a core to us, unless we are nice ourselves."""
    user, system, idle, iowait, nice, steal = spent
    before, after = Times(*[5] * 7), Times(*(np.array([*spent, user]) + 5))
    with mock.patch("os.nice", return_value=niceness):
        found = processor_usage(before, after)
    busy = user + system + steal + (nice if niceness else 0.0)
    assert found.busy == pytest.approx(busy / sum(spent))
    assert found.stolen == pytest.approx(steal / sum(spent))
    assert found.limited == (found.busy >= 0.9 or found.stolen > 0.02)


SHARES = st.floats(0, 1)


@given(SHARES, SHARES, SHARES)
def test_a_run_is_marked_where_any_one_of_the_three_is_beyond_its_limit(
    busy: float, stolen: float, late: float
) -> None:
    marked = Usage(busy, stolen, late).limited
    alone = Usage(busy, 0.0), Usage(0.0, stolen), Usage(0.0, 0.0, late)
    assert marked == any(one.limited for one in alone)
    assert marked == (busy >= BUSY_LIMIT or stolen > STOLEN_LIMIT or late > LATE_LIMIT)
    assert Usage(busy, stolen, late).disturbed == (stolen > STOLEN_LIMIT), "taken again"


@given(st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_a_run_is_marked_late_as_its_link_says_it_was(early: int, late: int, full: bool) -> None:
    """Rank 0 asks the link before and after; the others ask nobody, and see nothing late."""
    edge = tunnel.BINS.index(tunnel.LATE_S)
    counts = {f"{way}_{n}": 0 for way in ("sent", "received") for n in tunnel.COUNTED}
    before = {"seconds": 0.0, "processor_s": 0.0, "late": [0] * (1 + len(tunnel.BINS))}
    before |= {"stray": 0, "refused": 0, "ranks": [{"rank": 0, **counts}]}
    bins = [0] * (1 + len(tunnel.BINS))
    bins[edge], bins[edge + 1] = early, late
    after = {**before, "seconds": 1.0, "processor_s": 1.0 if full else 0.1, "late": bins}
    with mock.patch.object(emulated, "ask_mine", side_effect=[before, after]):
        used = emulated.Watch(0).usage()
    share = late / (early + late) if early + late else 0.0
    assert used.late == pytest.approx(1.0 if full else share)
    assert Usage(0.0, 0.0, used.late).limited == (full or share > LATE_LIMIT)
    assert emulated.Crossing.between(before, after).held is not (full or share > LATE_LIMIT)
    with mock.patch.object(emulated, "ask_mine", side_effect=AssertionError):
        assert emulated.Watch(1).usage().late == 0
