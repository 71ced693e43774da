"""Laws of the cost forms: continuity, JSON, carrying to other worker counts, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.cost import (
    AlphaBeta,
    Chords,
    Curve,
    MessageCost,
    Piecewise,
    RingAllReduce,
    Segments,
    Stepped,
    Table,
    cost_from_dict,
)
from ddlkit.core.errors import UserError
from ddlkit.core.schedule import ALGORITHMS, Links, Schedule, law_s
from ddlkit.papers import osf
from strategies import costs

SIZES = np.geomspace(1, 1e9, 200)
FORMS: list[MessageCost] = [
    AlphaBeta(1e-3, 8e-9, workers=4, algorithm="ring"),
    RingAllReduce(3e9, 1e-3, workers=4),
    Stepped(1e-4, 8e-9, workers=6, algorithm="tree", rate_bits_per_s=1e9, delay_s=1e-3, saves=True),
    Table(np.array([1e3, 1e6, 1e8]), np.array([1e-4, 1e-2, 0.9]), collective="all_gather"),
    Curve(np.array([1e3, 1e5, 1e6, 1e8]), np.array([1e-4, 2e-3, 1e-2, 0.9])),
    Chords(np.array([1e3, 1e5, 1e6, 1e8]), np.array([1e-4, 2e-3, 1e-2, 0.9])),
    Piecewise(45e3, 1e-5, 1e-4, 8e-9, 3e-4),
    Segments(*map(np.array, ([1e5, 1e7], [1e-4, 2e-4, 3e-4], [1e-8, 8e-9, 9e-9]))),
]


@pytest.mark.parametrize("cost", FORMS, ids=lambda cost: cost.form)
def test_json_keeps_every_prediction(cost: MessageCost) -> None:
    again = cost_from_dict(json.loads(json.dumps(cost.to_dict())))
    np.testing.assert_array_equal(again(SIZES), cost(SIZES))
    assert (again.collective, again.workers, again.algorithm) == (
        cost.collective,
        cost.workers,
        cost.algorithm,
    )


@pytest.mark.parametrize("cost", FORMS, ids=lambda cost: cost.form)
def test_scalar_equals_vectorised(cost: MessageCost) -> None:
    assert [cost(float(size)) for size in SIZES] == cost(SIZES).tolist()


@given(costs())
def test_drawn_costs_are_monotone(cost: MessageCost) -> None:
    assert np.all(np.diff(cost(np.sort(SIZES))) >= -1e-15)


@given(st.lists(st.floats(1e-6, 1), min_size=3, max_size=3))
def test_table_passes_through_its_points_and_extrapolates_with_the_last_slope(
    seconds: list[float],
) -> None:
    table = Table(np.array([1e3, 1e5, 1e6]), np.sort(seconds))
    np.testing.assert_allclose(table(table.bytes), table.seconds, rtol=1e-12)
    assert table(1.0) == pytest.approx(table.seconds[0])
    slope = (table.seconds[2] - table.seconds[1]) / 9e5
    assert table(3e6) == pytest.approx(table.seconds[2] + slope * 2e6)


def test_a_ring_is_carried_to_other_worker_counts() -> None:
    latency_s, per_byte_s = 1e-5, 1e-9

    def ring(n: int) -> AlphaBeta:
        return AlphaBeta(
            2 * (n - 1) * latency_s, 2 * (n - 1) / n * per_byte_s, workers=n, algorithm="ring"
        )

    for n in (2, 4, 16):
        np.testing.assert_allclose(ring(4).at_workers(n)(SIZES), ring(n)(SIZES), rtol=1e-12)


rings = st.builds(
    RingAllReduce,
    st.floats(1e6, 1e12),
    st.floats(0, 1),
    workers=st.integers(2, 64),
)


@given(rings)
def test_a_ring_is_osf_eq_7(ring: RingAllReduce) -> None:
    assert ring.workers is not None
    printed = osf.update_s(
        SIZES,
        ring.workers,
        ring.bytes_per_s,
        overhead_s=ring.overhead_s,
    )
    np.testing.assert_allclose(ring(SIZES), printed, rtol=1e-12)


@given(rings, st.integers(2, 64))
def test_a_ring_and_its_line_are_one_cost_at_any_number_of_workers(
    ring: RingAllReduce, workers: int
) -> None:
    moved = ring.at_workers(workers)
    np.testing.assert_allclose(
        moved(SIZES), ring.alpha_beta().at_workers(workers)(SIZES), rtol=1e-9
    )
    assert moved.bytes_per_s == ring.bytes_per_s
    back = moved.at_workers(ring.workers or 0)
    np.testing.assert_allclose(back(SIZES), ring(SIZES), rtol=1e-9)


@given(st.floats(1e6, 1e12), st.integers(2, 64))
def test_a_fitted_line_gives_the_ring_behind_it(bytes_per_s: float, workers: int) -> None:
    ring = RingAllReduce(bytes_per_s, 1e-4, workers=workers)
    again = RingAllReduce.from_alpha_beta(ring.alpha_beta())
    assert again.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert again.overhead_s == ring.overhead_s


@pytest.mark.parametrize(
    ("known", "slope", "message"),
    [
        ({}, 8e-9, "does not name a ring all_reduce"),
        (
            {"collective": "all_gather", "workers": 4, "algorithm": "ring"},
            8e-9,
            "does not name a ring all_reduce",
        ),
        ({"workers": 4, "algorithm": "ring"}, -8e-9, "leave no time for links"),
    ],
)
def test_a_line_that_is_no_ring_gives_none(known: dict, slope: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RingAllReduce.from_alpha_beta(AlphaBeta(1e-3, slope, **known))


@pytest.mark.parametrize("cost", FORMS[3:], ids=lambda cost: cost.form)
def test_other_forms_refuse_other_worker_counts(cost: MessageCost) -> None:
    with pytest.raises(UserError, match="number of workers"):
        cost.at_workers(8)
    with pytest.raises(UserError, match="does not say what it is made of"):
        cost.at(delay_s=1e-3)


lab = st.fixed_dictionaries(
    {
        "workers": st.integers(2, 17),
        "rate_bits_per_s": st.floats(1e6, 1e10),
        "delay_s": st.floats(0, 1e-2),
        "algorithm": st.sampled_from(list(ALGORITHMS)),
    }
)
stepped = st.builds(
    lambda known, **more: Stepped(**known, **more),
    lab,
    software_s=st.floats(0, 1e-2),
    link_s_per_byte=st.floats(1e-10, 1e-6),
    saves=st.booleans(),
    core_share=st.floats(0, 1),
)


@given(stepped, lab, lab)
def test_a_cost_carried_elsewhere_and_back_is_the_same(
    cost: Stepped, other: dict, third: dict
) -> None:
    home = {name: getattr(cost, name) for name in other}
    straight = cost.at(**third)
    np.testing.assert_allclose(cost.at(**other).at(**third)(SIZES), straight(SIZES), rtol=1e-9)
    np.testing.assert_allclose(straight.at(**home)(SIZES), cost(SIZES), rtol=1e-9)


@given(stepped)
def test_with_a_core_a_rank_a_stepped_cost_is_its_schedules(cost: Stepped) -> None:
    alone = replace(cost, core_share=0.0, saves=False)
    rate = 1 / cost.link_s_per_byte
    links = Links.equal(cost.workers or 0, rate, cost.delay_s, software_s=cost.software_s)
    schedule = Schedule.of(str(cost.algorithm), cost.workers or 0)
    assert alone(1e6) == pytest.approx(law_s(schedule, links, 1e6), rel=1e-9)
    terms = cost.terms(SIZES)
    assert np.all(cost(SIZES) <= sum(terms) * (1 + 1e-12))
    assert np.all(cost(SIZES) >= np.max(terms, axis=0) * (1 - 1e-12))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_step_waits_for_cores_in_proportion_to_its_messages(ranks: int) -> None:
    """A ring's steps have a message a rank; a tree's fewer and fewer, so its ranks find their cores free."""
    ring, tree = (Schedule.of(name, ranks) for name in ("ring", "tree"))
    assert ring.software(0.5) == 2 * (ranks - 1) * max(1, ranks / 2)
    assert tree.software(1.0) == 2 * (ranks - 1), "each rank but one gives and gets: one by one"
    for name in ALGORITHMS:
        one = Schedule.of(name, ranks)
        assert one.software(0.0) == one.counts.messages <= one.software(0.3) <= one.software(0.9)


def test_a_rate_that_is_not_known_is_not_carried() -> None:
    with pytest.raises(UserError, match="measured at 0 bit/s cannot be carried to 1e\\+08"):
        Stepped(1e-4, 8e-9, workers=4).at(rate_bits_per_s=1e8)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"form": "quadratic"}, "unknown cost form 'quadratic'"),
        ({"form": "alpha_beta", "alpha_s": 1}, "missing: beta_s_per_byte"),
        (
            {"form": "alpha_beta", "alpha_s": 1, "beta_s_per_byte": 1, "gamma": 1},
            "unknown parameters: gamma",
        ),
        ({"form": "alpha_beta", "alpha_s": "x", "beta_s_per_byte": 1}, "must be a finite number"),
        ({"form": "table", "bytes": [1, 1], "seconds": [1, 2]}, "increasing"),
        ({"form": "table", "bytes": [1, 2], "seconds": [1, 0]}, "above zero"),
        ({"form": "table", "bytes": [1, 2], "seconds": [1]}, "equal length"),
        (
            {"form": "segments", "breaks_bytes": [], "alpha_s": [1, 2], "beta_s_per_byte": [1, 2]},
            "k-1",
        ),
        ({"form": "ring_all_reduce", "bytes_per_s": 1, "overhead_s": 0}, "workers is None"),
        (
            {"form": "ring_all_reduce", "bytes_per_s": 0, "overhead_s": 0, "workers": 2},
            "bytes_per_s must be above zero",
        ),
        (
            {"form": "stepped", "software_s": 0, "link_s_per_byte": 0},
            "all_reduce of unknown workers",
        ),
        (
            {"form": "stepped", "software_s": -1, "link_s_per_byte": 0, "workers": 2},
            "software_s is -1: at least 0",
        ),
        (
            {
                "form": "stepped",
                "software_s": 0,
                "link_s_per_byte": 0,
                "workers": 2,
                "algorithm": "x",
            },
            "unknown algorithm 'x'",
        ),
        ({}, "unknown cost form None"),
    ],
)
def test_bad_descriptions_are_refused(description: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        cost_from_dict(description)
