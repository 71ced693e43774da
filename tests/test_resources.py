"""Resources of every message: planned with fusion, no other plan with any other resources is faster."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core import iteration as resources
from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration, Resources, Shared
from ddlkit.core.link import Link
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import Workload

TENTHS = st.integers(0, 20).map(lambda k: k / 10)
CHOICES = st.lists(
    st.builds(
        Resources, st.just("some"), st.builds(AlphaBeta, TENTHS, TENTHS.map(lambda b: b / 100)),
        TENTHS, TENTHS,
    ),
    min_size=1,
    max_size=3,
)  # fmt: skip
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


def every_gift(work: Workload, sent: FusionPlan, choices: list[Resources]) -> float:
    """The least iteration by any resources of each message."""
    gifts = itertools.product(choices, repeat=len(sent.ends))
    return min(Shared(work, sent, given).iteration_s for given in gifts)


@given(WORK, CHOICES)
def test_no_plan_with_any_resources_is_faster_than_the_joint_one(
    work: Workload, choices: list[Resources]
) -> None:
    best = resources.jointly(work, choices)
    assert best.iteration_s == pytest.approx(
        min(every_gift(work, sent, choices) for sent in partitions(work.n))
    )


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


def test_hidden_messages_get_the_frugal_and_the_last_one_the_rich() -> None:
    """Rich halves a message's time and doubles that of computing: only what nothing hides is worth it."""
    work = Workload.from_arrays(0.0, [10.0, 10.0, 10.0], [100, 100, 100])
    frugal = Resources("frugal", AlphaBeta(0.0, 0.08))
    rich = Resources("rich", AlphaBeta(0.0, 0.04), slowdown=1.0)
    sent = plan.none(work)
    best = resources.jointly(work, [frugal, rich], sent)
    assert best.names == ("frugal", "frugal", "rich")
    assert best.iteration_s == pytest.approx(30 + 4)
    assert all(
        best.iteration_s < Shared(work, sent, (way,) * 3).iteration_s for way in (frugal, rich)
    )
