"""Messages that share a link: one lane without credit is the recursion; lanes and credit only ever help."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.lanes import Link, Parts
from ddlkit.core.simulate import group_ends

TIMES = st.floats(0, 10).map(lambda x: round(x, 3))
MESSAGES = st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES), min_size=1, max_size=12)
BURSTS = st.sampled_from([0.0, 0.5, 3.0])


def columns(messages: list[tuple[float, ...]]) -> tuple[np.ndarray, Parts]:
    gaps, least, wire, rest = np.array(messages).T
    return np.cumsum(gaps), Parts(least, wire, rest)


@given(MESSAGES)
def test_one_lane_without_credit_is_the_recursion(messages: list) -> None:
    ready, parts = columns(messages)
    ends = Link().ends(ready, parts)
    taken = np.maximum(parts.least_s, parts.wire_s) + parts.rest_s
    np.testing.assert_allclose(ends, group_ends(ready, taken), rtol=1e-9, atol=1e-9)


@given(MESSAGES, BURSTS)
def test_one_lane_event_by_event_is_one_by_one(messages: list, burst: float) -> None:
    ready, parts = columns(messages)
    link = Link(burst_s=burst)
    shared = link._shared(ready.tolist(), *(part.tolist() for part in parts))
    np.testing.assert_allclose(link.ends(ready, parts), shared, rtol=1e-9, atol=1e-9)


@given(MESSAGES, st.integers(1, 4), BURSTS)
def test_more_lanes_and_credit_end_no_later_and_never_beat_the_link(
    messages: list, lanes: int, burst: float
) -> None:
    ready, parts = columns(messages)
    ends = Link(lanes, burst).ends(ready, parts)
    assert ends.max() <= Link().ends(ready, parts)[-1] + 1e-9
    alone = np.maximum(parts.least_s, parts.wire_s - burst) + parts.rest_s
    assert np.all(ends >= ready + alone - 1e-9)
    # The link alone: bytes from any message on must still be moved, but for the credit.
    floor = max(ready[k] + parts.wire_s[k:].sum() for k in range(len(ready)))
    assert ends.max() >= floor - burst - 1e-9


def test_two_equal_messages_share_and_a_third_waits_for_a_lane() -> None:
    ends = Link(2).ends([0, 0, 0], Parts(*np.array([[0.0], [2.0], [1.0]])))
    np.testing.assert_allclose(ends, [5.0, 5.0, 8.0])


def test_a_rested_link_has_credit_and_a_busy_one_has_not() -> None:
    """After messages that keep the link busy for a tenth of their time, a large one finds full credit."""
    sizes = np.array([1.0, 1.0, 1.0, 30.0, 30.0])
    parts = Parts(np.full(5, 10.0), sizes, np.zeros(5))
    ends = Link(burst_s=8.0).ends(np.zeros(5), parts)
    np.testing.assert_allclose(np.diff(ends, prepend=0.0), [10.0, 10.0, 10.0, 22.0, 30.0])


@given(st.floats(1e-5, 1e-2), st.floats(0, 3), st.integers(1, 40), st.integers(1_000, 10_000_000))
def test_a_row_of_equals_costs_what_was_calibrated(
    alpha: float, slower: float, in_a_row: int, size: int
) -> None:
    """Whatever the cost: the mean over the row that was calibrated is the cost again."""
    wire = 1e-8
    cost = AlphaBeta(alpha, wire * (1 + slower))
    link = Link(1, 1e-3, wire, [1.0, 1e8], [in_a_row, in_a_row])
    parts = link.parts(cost, np.full(in_a_row, float(size)))
    end = link.ends(np.zeros(in_a_row), parts)[-1]
    assert end == pytest.approx(in_a_row * cost(size))


@given(MESSAGES, st.integers(1, 3), BURSTS)
def test_scenarios_are_computed_as_one_by_one(messages: list, lanes: int, burst: float) -> None:
    ready, parts = columns(messages)
    link = Link(lanes, burst)
    factors = np.array([[0.5], [1.0], [2.0]])
    together = link.ends(ready, Parts(*(part * factors for part in parts)))
    for row, factor in zip(together, factors, strict=True):
        one = link.ends(ready, Parts(*(part * factor for part in parts)))
        np.testing.assert_allclose(row, one)


def test_no_lane_is_refused() -> None:
    with pytest.raises(UserError, match="0 messages in flight"):
        Link(0)
