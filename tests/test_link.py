"""Messages that share a link: one lane without credit is the recursion; nothing ends later than by it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from ddlkit.core import plan as planning
from ddlkit.core import resources
from ddlkit.core.collective import COLLECTIVES, ONLY_IN_LOGS
from ddlkit.core.cost import AlphaBeta, Samples
from ddlkit.core.errors import UserError
from ddlkit.core.fronts import undominated
from ddlkit.core.iteration import Iteration, group_ends
from ddlkit.core.link import Link, Parts, _Simulation
from ddlkit.core.plan import FusionPlan
from ddlkit.core.resources import Resources, Shared, jointly
from ddlkit.core.workload import Workload
from workbook.plots.style import look

TIMES = st.floats(0, 10).map(lambda x: round(x, 3))
MESSAGES = st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=12)
BURSTS = st.sampled_from([0.0, 0.5, 3.0])
SLOWDOWNS = st.sampled_from([0.0, 0.1, 1.0])
OF_EACH = st.lists(st.tuples(SLOWDOWNS, SLOWDOWNS), min_size=12, max_size=12).map(
    np.array
)


def columns(messages: list[tuple[float, ...]]) -> tuple[np.ndarray, Parts]:
    gaps, software, wire = np.array(messages).T
    return np.cumsum(gaps), Parts(software, wire)


def ends_of(link: Link, ready: ArrayLike, parts: Parts) -> np.ndarray:
    return link.play(ready, parts)[1]


@given(MESSAGES)
def test_one_lane_without_credit_is_the_recursion(messages: list) -> None:
    ready, parts = columns(messages)
    ends = ends_of(Link(), ready, parts)
    expected = group_ends(ready, parts.software_s + parts.wire_s)
    np.testing.assert_allclose(ends, expected, rtol=1e-9, atol=1e-9)


@given(MESSAGES, BURSTS, st.floats(1, 3), OF_EACH)
def test_one_lane_event_by_event_is_one_by_one(
    messages: list, burst: float, software: float, of_each: np.ndarray
) -> None:
    """Whatever each message takes from computing, and computing from it."""
    ready, parts = columns(messages)
    of_each = of_each[: len(ready)].T
    link = Link(1, software, burst, 1.0, *of_each)
    shared = _Simulation(
        link, *(column.tolist() for column in (ready, *parts, *of_each))
    ).run()
    np.testing.assert_allclose(link.play(ready, parts), shared, rtol=1e-9, atol=1e-9)


@given(MESSAGES, st.integers(1, 3), OF_EACH)
def test_each_message_takes_from_computing_what_is_its_own(
    messages: list, lanes: int, of_each: np.ndarray
) -> None:
    """Computing advances at 1 / (1 + s) of the message under way that slows it most: work is conserved."""
    ready, parts = columns(messages)
    slowdown, of_messages = of_each[: len(ready)].T
    link = Link(lanes, slowdown=slowdown, message_slowdown=of_messages)
    starts, ends = link.play(ready, parts)
    last = link.computed_s(ready[-1:], starts, ends)[0]
    edges = np.unique(np.clip(np.concatenate([[0.0], starts, ends]), 0.0, last))
    edges = np.append(edges, last)
    middle = (edges[:-1] + edges[1:]) / 2
    beside = (starts[:, None] < middle) & (middle < ends[:, None])
    pace = 1 / (1 + np.where(beside, slowdown[:, None], 0.0).max(axis=0))
    assert pace @ np.diff(edges) == pytest.approx(ready[-1], abs=1e-6)


@given(MESSAGES, st.integers(1, 4), st.floats(1, 3), BURSTS)
def test_more_lanes_and_credit_end_no_later_and_never_beat_link_or_processor(
    messages: list, lanes: int, software: float, burst: float
) -> None:
    ready, parts = columns(messages)
    ends = ends_of(Link(lanes, software, burst, 1.0), ready, parts)
    assert ends.max() <= ends_of(Link(), ready, parts)[-1] + 1e-9
    together = np.maximum if burst else np.add
    alone = together(parts.software_s, np.maximum(0, parts.wire_s - burst))
    assert np.all(ends >= ready + alone - 1e-9)
    # Either alone: what is left from any message on must still be done, but for the credit.
    on_link = max(ready[k] + parts.wire_s[k:].sum() for k in range(len(ready)))
    assert ends.max() >= on_link - burst - 1e-9
    at_once = min(software, lanes)
    on_cores = max(
        ready[k] + parts.software_s[k:].sum() / at_once for k in range(len(ready))
    )
    assert ends.max() >= on_cores - 1e-9


def test_two_equal_messages_share_and_a_third_waits_for_a_lane() -> None:
    parts = Parts(*np.array([[1.0], [2.0]]))
    np.testing.assert_allclose(ends_of(Link(2), [0, 0, 0], parts), [5.0, 5.0, 8.0])
    # The processor does the software of one at a time: two take twice as long each.
    np.testing.assert_allclose(ends_of(Link(2, 1.0), [0, 0], parts), [6.0, 6.0])
    # Ready at 0 and 0, and an empty one at 4: until computing ends at 4 they move at half their rate.
    parts, link = (
        Parts(np.zeros(3), np.array([2.0, 2.0, 0.0])),
        Link(2, message_slowdown=1.0),
    )
    np.testing.assert_allclose(ends_of(link, [0.0, 0.0, 4.0], parts)[:2], [6.0, 6.0])
    with pytest.raises(UserError, match="0 messages in flight"):
        Link(0)


def test_a_rested_link_has_credit_and_a_busy_one_has_not() -> None:
    """After messages that keep the link busy for a tenth of their time, a large one finds full credit."""
    sizes = np.array([1.0, 1.0, 1.0, 30.0, 30.0])
    link = Link(1, 1.0, 8.0, 1.0)
    ends = ends_of(link, np.zeros(5), Parts(np.full(5, 10.0), sizes))
    np.testing.assert_allclose(
        np.diff(ends, prepend=0.0), [10.0, 10.0, 10.0, 22.0, 30.0]
    )


@given(
    st.floats(1e-5, 1e-2),
    st.floats(0, 3),
    st.integers(1, 40),
    st.integers(1_000, 10_000_000),
)
def test_a_row_of_equals_costs_what_was_calibrated(
    alpha: float, slower: float, per_sample: int, size: int
) -> None:
    """Whatever the cost: the mean over the row that was calibrated is the cost again."""
    wire = 1e-8
    samples = Samples(np.array([1.0, 1e8]), np.full(2, float(per_sample)))
    cost = AlphaBeta(alpha, wire * (1 + slower), samples=samples)
    link = Link(1, 1.0, 1e-3, wire)
    parts = link.parts(cost, np.full(per_sample, float(size)))
    end = ends_of(link, np.zeros(per_sample), parts)[-1]
    assert end == pytest.approx(per_sample * cost(size))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_registered_collective_is_judged_predicted_and_drawn(collective: str) -> None:
    """Each byte crosses a link (n-1)/n times, and twice that if it is both summed and handed out."""
    crossings = 2 if collective == "all_reduce" else 1
    assert COLLECTIVES[collective].bus_factor(4) == crossings * 3 / 4
    work = Workload.from_arrays(1.0, [1.0, 1.0], [1000, 3000])
    cost = AlphaBeta(0.5, 1e-3, collective=collective)
    spans = Iteration(work, FusionPlan("single", (2,)), cost).timeline()
    assert spans.exposed_communication_s() == 4.5
    assert look(collective).label


def test_each_collective_is_in_one_register_under_its_name() -> None:
    for register in (COLLECTIVES, ONLY_IN_LOGS):
        assert [known.name for known in register.values()] == [*register]
    assert not COLLECTIVES.keys() & ONLY_IN_LOGS.keys()


TENTHS = st.integers(0, 20).map(lambda k: k / 10)
LINES = st.builds(AlphaBeta, TENTHS, TENTHS.map(lambda b: b / 100))
CHOICES = st.lists(
    st.builds(Resources, st.just("some"), LINES, TENTHS, TENTHS), min_size=1, max_size=3
)
WORK = st.builds(
    Workload.from_arrays,
    TENTHS,
    st.lists(TENTHS, min_size=4, max_size=4),
    st.lists(st.integers(1, 200), min_size=4, max_size=4),
    TENTHS,
)


def partitions(n: int) -> list[FusionPlan]:
    cuts = [range(1, n)] * (n - 1)
    ends = {tuple(sorted({*chosen, n})) for chosen in itertools.product(*cuts)} | {(n,)}
    return [FusionPlan("any", one) for one in sorted(ends)]


@given(WORK, CHOICES)
def test_no_plan_with_any_resources_is_faster_than_the_joint_one(
    work: Workload, choices: list[Resources]
) -> None:
    every = [
        Shared(work, sent, given).iteration_s
        for sent in partitions(work.n)
        for given in itertools.product(choices, repeat=len(sent.ends))
    ]
    assert jointly(work, choices).iteration_s == pytest.approx(min(every))


@given(WORK, TENTHS, TENTHS)
def test_one_choice_is_the_iteration_over_such_a_link(
    work: Workload, slowdown: float, drag: float
) -> None:
    cost = AlphaBeta(0.3, 0.01)
    link = Link(slowdown=slowdown, message_slowdown=drag)
    only = Resources("only", cost, slowdown, drag)
    for sent in partitions(work.n):
        shared = Shared(work, sent, (only,) * len(sent.ends))
        alike = Iteration(work, sent, cost, link).prediction
        assert shared.iteration_s == pytest.approx(alike.iteration_s)


def test_hidden_messages_get_few_resources_and_the_last_one_many() -> None:
    """Many halve a message's time and double that of computing: only what nothing hides is worth it."""
    work = Workload.from_arrays(0.0, [10.0, 10.0, 10.0], [100, 100, 100])
    few = Resources("few", AlphaBeta(0.0, 0.08))
    many = Resources("many", AlphaBeta(0.0, 0.04), slowdown=1.0)
    best = jointly(work, [few, many], planning.none(work))
    assert best.resources == (few, few, many) and best.iteration_s == pytest.approx(
        30 + 4
    )


def test_of_more_ways_than_are_kept_the_plan_is_hardly_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, kept = np.random.default_rng(0), list[int]()
    backward_s, sizes = (
        rng.lognormal(0, 1, 30) * 0.01,
        (rng.lognormal(0, 1.5, 30) * 1e6).astype(int),
    )
    work = Workload.from_arrays(0.1, backward_s, sizes)
    way = [Resources("only", AlphaBeta(2e-4, 1e-9, workers=2), 0.5, 2.0)]
    shortest_s = jointly(work, way).iteration_s
    monkeypatch.setattr(resources, "MOST_STATES", 20)

    def counted(*columns: Any) -> Any:
        kept.append(len(found := undominated(*columns)))
        return found

    monkeypatch.setattr(resources, "undominated", counted)
    few = jointly(work, way)
    assert max(kept) > 20 and few.plan.ends[-1] == work.n
    assert (
        shortest_s
        <= few.iteration_s
        <= jointly(work, way, planning.none(work)).iteration_s
    )
    assert few.iteration_s <= jointly(work, way, planning.single(work)).iteration_s
