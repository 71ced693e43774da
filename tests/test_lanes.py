"""Messages that share a link: one lane is the recursion, more never make the last one later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.lanes import shared_ends
from ddlkit.core.simulate import group_ends

TIMES = st.floats(0, 10).map(lambda x: round(x, 3))
MESSAGES = st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=12)


def columns(messages: list[tuple[float, float, float]]) -> tuple[np.ndarray, ...]:
    gaps, startup, wire = np.array(messages).T
    return np.cumsum(gaps), startup, wire


@given(MESSAGES)
def test_one_lane_is_the_recursion(messages: list) -> None:
    ready, startup, wire = columns(messages)
    ends = shared_ends(ready, startup, wire, 1)
    np.testing.assert_allclose(ends, group_ends(ready, startup + wire), rtol=1e-9, atol=1e-9)


@given(MESSAGES, st.integers(2, 4))
def test_more_lanes_end_no_later_and_never_beat_the_link(messages: list, lanes: int) -> None:
    ready, startup, wire = columns(messages)
    ends = shared_ends(ready, startup, wire, lanes)
    serial = group_ends(ready, startup + wire)
    assert np.all(ends >= ready + startup + wire - 1e-9)
    assert ends.max() <= serial[-1] + 1e-9
    # The link alone: bytes from any message on must still be moved.
    floor = max(ready[k] + wire[k:].sum() for k in range(len(ready)))
    assert ends.max() >= floor - 1e-9


def test_two_equal_messages_share_and_a_third_waits_for_a_lane() -> None:
    ends = shared_ends([0, 0, 0], 1.0, 2.0, 2)
    np.testing.assert_allclose(ends, [5.0, 5.0, 8.0])


def test_no_lane_is_refused() -> None:
    with pytest.raises(UserError, match="0 messages in flight"):
        shared_ends([0.0], [1.0], [1.0], 0)
