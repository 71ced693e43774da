"""Laws of all-reduces as data: they add up, on every rank alike, and their counts are the textbooks'."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.core.schedule import ALGORITHMS, NODE, STEPS, Counts, Schedule, node_ranks

RANKS = range(2, 18)
schedules = st.builds(Schedule.of, st.sampled_from(list(ALGORITHMS)), st.integers(2, 17))


def textbook(name: str, p: int) -> Counts:
    """Steps, messages, n beta and n gamma; the tree and halving and doubling as printed, with the fold."""
    share, lg = (p - 1) / p, math.ceil(math.log2(p))
    if name == "tree":
        return Counts(2 * lg, 2 * lg, 2 * lg, lg)
    if name == "halving_doubling":
        core = 2 ** math.floor(math.log2(p))
        fold, lg, share = int(core < p), round(math.log2(core)), (core - 1) / core
        return Counts(2 * lg + 2 * fold, 2 * lg + 2 * fold, 2 * share + 2 * fold, share + fold)
    if name == "hierarchical":
        steps = 2 * (node_ranks(p) - 1) + 2 * (p // node_ranks(p) - 1)
        return Counts(steps, steps, 2 * share, share)
    return Counts(2 if name == "direct" else 2 * (p - 1), 2 * (p - 1), 2 * share, share)


@given(schedules, st.integers(1, 60), st.integers(0, 2**32))
def test_every_rank_ends_with_the_sum_of_all(schedule: Schedule, n: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(-(2**40), 2**40, (schedule.ranks, n))
    assert np.array_equal(schedule.run(drawn), np.broadcast_to(drawn.sum(axis=0), drawn.shape))


@given(schedules, st.integers(1, 60), st.integers(0, 2**32))
def test_rounding_is_the_same_on_every_rank(schedule: Schedule, n: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).normal(size=(schedule.ranks, n)).astype(np.float32)
    held = schedule.run(drawn)
    assert (held == held[0]).all() and held.dtype == np.float32
    scale = np.abs(drawn).sum(axis=0)
    assert np.all(np.abs(held[0] - drawn.astype(float).sum(axis=0)) <= 1e-6 * scale)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_contribution_counts_once_and_the_counts_are_the_textbooks(name: str) -> None:
    """Powers of a base above the number of ranks: a sum tells how often each of them is in it."""
    for ranks in RANKS:
        schedule = Schedule.of(name, ranks)
        mine = np.array([[(ranks + 1) ** rank] * schedule.pieces for rank in range(ranks)], object)
        assert (schedule.run(mine) == sum((ranks + 1) ** rank for rank in range(ranks))).all()
        assert schedule.counts == pytest.approx(textbook(name, ranks), rel=1e-12)
        assert schedule.counts.carried >= bus_factor("all_reduce", ranks) - 1e-12, "none sends less"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_can_be_done_in_place(name: str) -> None:
    """What a rank receives in a step is nothing that it sends then, and reaches it once if it is kept."""
    for step in (step for ranks in RANKS for step in Schedule.of(name, ranks).steps):
        assert step, "no step is idle"
        sent = {(t.sender, piece) for t in step for piece in range(t.start, t.stop)}
        kept = Counter(
            (t.receiver, p) for t in step if not t.reduce for p in range(t.start, t.stop)
        )
        added = {(t.receiver, p) for t in step if t.reduce for p in range(t.start, t.stop)}
        assert not sent & (kept.keys() | added) and not kept.keys() & added
        assert max(kept.values(), default=1) == 1
        assert all(t.sender != t.receiver and t.start < t.stop for t in step)


@pytest.mark.parametrize("ranks", RANKS)
def test_nodes_are_four_or_the_next_that_divides(ranks: int) -> None:
    assert ranks % node_ranks(ranks) == 0 and node_ranks(ranks) <= NODE
    assert node_ranks(4 * ranks) == 4


def test_what_is_no_schedule_is_refused_and_one_rank_sends_nothing() -> None:
    assert Schedule.of("ring", 1).steps == ()
    assert Schedule.of(f"{STEPS}tree", 4) == Schedule.of("tree", 4)
    for name, ranks, message in (
        ("star", 4, "unknown algorithm 'star'"),
        ("ring", 0, "at least 1"),
        ("ring", 513, "counted up to 512"),
    ):
        with pytest.raises(UserError, match=message):
            Schedule.of(name, ranks)
