"""Laws of all-reduces as data: they add up, their counts are the textbooks', and law and simulation agree."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.core.schedule import (
    ALGORITHMS,
    NODE,
    Counts,
    Links,
    Schedule,
    fastest,
    law_s,
    node_ranks,
    simulate,
)

EVERY = [(name, ranks) for name in ALGORITHMS for ranks in range(2, 18)]
schedules = st.builds(Schedule.of, st.sampled_from(list(ALGORITHMS)), st.integers(2, 17))
OPTIMAL = ["ring", "hierarchical", "direct"]
"""Those that send, at any number of ranks, as little as any all-reduce can."""


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


@pytest.mark.parametrize(("name", "ranks"), EVERY)
def test_each_contribution_counts_exactly_once(name: str, ranks: int) -> None:
    """Powers of a base above the number of ranks: a sum tells how often each of them is in it."""
    schedule = Schedule.of(name, ranks)
    mine = np.array([[(ranks + 1) ** rank] * schedule.pieces for rank in range(ranks)], object)
    assert (schedule.run(mine) == sum((ranks + 1) ** rank for rank in range(ranks))).all()


@given(schedules, st.integers(1, 60), st.integers(0, 2**32))
def test_rounding_is_the_same_on_every_rank(schedule: Schedule, n: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).normal(size=(schedule.ranks, n)).astype(np.float32)
    found = schedule.run(drawn)
    assert (found == found[0]).all() and found.dtype == np.float32
    scale = np.abs(drawn).sum(axis=0)
    assert np.all(np.abs(found[0] - drawn.astype(float).sum(axis=0)) <= 1e-6 * scale)


@pytest.mark.parametrize(("name", "ranks"), EVERY)
def test_a_step_can_be_done_in_place(name: str, ranks: int) -> None:
    """What a rank receives in a step is nothing that it sends then, and reaches it once if it is kept."""
    for step in Schedule.of(name, ranks).steps:
        assert step, "no step is idle"
        sent = {(t.sender, piece) for t in step for piece in range(t.start, t.stop)}
        kept = Counter(
            (t.receiver, p) for t in step if not t.reduce for p in range(t.start, t.stop)
        )
        added = {(t.receiver, p) for t in step if t.reduce for p in range(t.start, t.stop)}
        assert not sent & (kept.keys() | added) and not kept.keys() & added
        assert max(kept.values(), default=1) == 1
        assert all(t.sender != t.receiver and t.start < t.stop for t in step)


@pytest.mark.parametrize(("name", "ranks"), EVERY)
def test_the_counts_are_the_textbooks(name: str, ranks: int) -> None:
    assert Schedule.of(name, ranks).counts == pytest.approx(textbook(name, ranks), rel=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_links_carry(name: str) -> None:
    for ranks in range(2, 18):
        shares = Schedule.of(name, ranks).link_shares
        assert shares[0].sum() == pytest.approx(shares[1].sum()), "what is sent arrives"
        power = ranks & (ranks - 1) == 0
        if name in OPTIMAL or (name == "halving_doubling" and power):
            np.testing.assert_allclose(shares, bus_factor("all_reduce", ranks))
        assert shares.max() >= bus_factor("all_reduce", ranks) - 1e-12, "none can send less"
    assert Schedule.of("tree", 16).link_shares.max() == 4


times = st.floats(0, 1e-2)
sizes = st.floats(0, 1e9)


@given(schedules, st.floats(1e6, 1e10), times, times, st.floats(0, 1e-8), sizes)
def test_over_equal_links_counts_law_and_simulation_are_one(
    schedule: Schedule, rate: float, delay_s: float, software_s: float, add_s: float, n: float
) -> None:
    def three(**links: Any) -> tuple[float, float, float]:
        equal = Links.equal(schedule.ranks, rate, software_s=software_s, **links)
        played_s = float(simulate(schedule, equal, n).max())
        return float(schedule.counts.seconds(n, equal)), law_s(schedule, equal, n), played_s

    whole = three(delay_s=delay_s, reduce_s_per_byte=add_s)
    assert whole[0] == pytest.approx(whole[1], rel=1e-9)
    early = schedule.algorithm == "tree" and schedule.ranks & (schedule.ranks - 1)
    assert whole[2] <= whole[0] * (1 + 1e-9)
    both = three() if early else whole
    assert both[2] == pytest.approx(both[0], rel=1e-9)


@given(st.data(), schedules.filter(lambda one: one.algorithm != "direct"), sizes, times, times)
def test_over_unequal_links_the_law_is_a_bound_and_so_are_the_bytes(
    data: st.DataObject, schedule: Schedule, n: float, software_s: float, add_s: float
) -> None:
    def drawn(values: st.SearchStrategy[float]) -> np.ndarray:
        count = schedule.ranks
        return np.array(data.draw(st.lists(values, min_size=count, max_size=count)))

    links = Links(drawn(st.floats(1e6, 1e10)), drawn(times), software_s, add_s * 1e-7)
    found = simulate(schedule, links, n)
    assert found.max() <= law_s(schedule, links, n) * (1 + 1e-9)
    assert found.max() >= (schedule.link_shares * n / links.bytes_per_s).max() * (1 - 1e-9)


@given(st.integers(2, 9), st.floats(1e-5, 1e-3), st.floats(1e-5, 1e-2))
def test_a_ring_over_links_that_save_takes_the_longer_of_software_and_bytes(
    ranks: int, software_s: float, wire_s: float
) -> None:
    """While the bucket holds what is saved in the software of a step; in a row, the burst is spent once."""
    schedule, n = Schedule.of("ring", ranks), 1e6
    rate, burst_s = n / ranks / wire_s, 2e-3
    links = Links(np.full(ranks, rate), np.zeros(ranks), software_s, burst_s=burst_s)
    in_all_s = simulate(schedule, links, n, messages=8).max()
    longer_s = 8 * schedule.counts.messages * max(software_s, wire_s)
    assert longer_s - burst_s * (1 + 1e-9) <= in_all_s <= longer_s * (1 + 1e-9)


@given(schedules, st.floats(1e6, 1e10), times, times, st.floats(1, 1e8))
def test_credit_never_costs_and_never_saves_more_than_the_rest_of_a_link(
    schedule: Schedule, rate: float, software_s: float, burst_s: float, n: float
) -> None:
    ranks = schedule.ranks
    plain, saving = (
        Links(np.full(ranks, rate), np.zeros(ranks), software_s, burst_s=one)
        for one in (0.0, burst_s)
    )
    plain_s, saving_s = (simulate(schedule, links, n, 3).max() for links in (plain, saving))
    assert plain_s == pytest.approx(3 * schedule.counts.seconds(n, plain), rel=1e-9)
    least_s = 3 * schedule.link_shares.max() * n / rate - burst_s
    assert max(least_s, 3 * schedule.counts.messages * software_s) <= saving_s * (1 + 1e-9)
    assert saving_s <= plain_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_slow_link_slows_a_ring_down_to_its_own_rate(name: str) -> None:
    rates = np.full(8, 1e8)
    rates[3] /= 4
    schedule, alone = Schedule.of(name, 8), Links.equal(8, 0.25e8)
    slow_s = simulate(schedule, Links(rates, np.zeros(8)), 1e6).max()
    all_s = simulate(schedule, alone, 1e6).max()
    assert slow_s == pytest.approx(all_s) if name == "ring" else slow_s <= all_s * (1 + 1e-9)


def test_a_far_rank_costs_a_ring_two_ways_round_and_not_every_step() -> None:
    """The law says every step waits for the long way: played out, only what passes the far rank does."""
    delays = np.zeros(8)
    delays[3] = 1.0
    schedule, links = Schedule.of("ring", 8), Links(np.full(8, 1e8), delays)
    assert law_s(schedule, links, 0.0) == 14.0
    assert simulate(schedule, links, 0.0).max() == 4.0


@pytest.mark.parametrize("ranks", range(2, 18))
def test_nodes_are_four_or_the_next_that_divides(ranks: int) -> None:
    assert ranks % node_ranks(ranks) == 0 and node_ranks(ranks) <= NODE
    assert node_ranks(4 * ranks) == 4


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_few_steps_win_small_messages_and_few_bytes_large_ones(ranks: int) -> None:
    """Where one takes over is where the two lines cross."""
    links = Links.equal(ranks, 1e8, delay_s=1e-4, software_s=1e-4)
    names = ("ring", "halving_doubling", "tree", "hierarchical")
    counts = {name: Schedule.of(name, ranks).counts for name in names}
    costs = {name: lambda n, c=one: float(c.seconds(n, links)) for name, one in counts.items()}
    order = fastest({name: costs[name] for name in ("ring", "tree")}, np.geomspace(1, 1e9, 20001))
    assert [*order] == ["tree", "ring"]
    (tree, ring), (_, at) = (counts["tree"], counts["ring"]), order.values()
    more_s = (ring.steps - tree.steps) * 3e-4
    assert at == pytest.approx(more_s / ((tree.carried - ring.carried) / 1e8), rel=2e-3)
    assert next(iter(fastest(costs, [1e9]))) == "halving_doubling", "a power of two: least of both"


def test_one_rank_has_its_sum() -> None:
    for name in ALGORITHMS:
        assert Schedule.of(name, 1).counts == (0, 0, 0, 0)
        assert Schedule.of(name, 1).run(np.ones((1, 3))).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule.of("torus", 4), "unknown algorithm 'torus': use one of ring, "),
        (lambda: Schedule.of("ring", 0), "ring of 0 ranks"),
        (lambda: Links(np.ones(2), np.zeros(1)), "2 rates and 1 delays"),
        (lambda: Links.equal(2, 0.0), "rates must be above zero"),
        (lambda: Links.equal(2, 1.0, -1.0), "at least zero"),
        (lambda: Links.equal(2, 1.0, software_s=math.nan), "at least zero"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
