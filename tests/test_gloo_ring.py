"""gloo's ring over links with a delay: its law is what is played out, and it is carried from labs to labs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core.case import Case
from ddlkit.core.cost import from_dict
from ddlkit.core.errors import UserError
from ddlkit.core.gloo_ring import GlooRing
from ddlkit.core.lablink import WIRE_FRAMING, read_link
from ddlkit.core.link import FRAMING, burst_s
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import Workload
from ddlkit.model import Calibration, Communication, forecast
from ddlkit.model.calibration import UNFITTED, shared_link
from ddlkit.model.extrapolation import Rings, carried, carried_to, ring_at, ring_labs
from ddlkit.model.noise import Noise
from rings_played import all_reduce_s, cut

SIZES = 2.0 ** np.arange(10, 25, 2)
times = st.floats(1e-6, 1e-2)
slopes = st.floats(1e-10, 1e-7)
TRUE = np.array([np.log(1.5e-4), 0.01, np.log(0.3)])
LABS = [
    ("emulated:500mbit-delay2ms", 2),
    ("emulated:500mbit-delay0.5ms", 4),
    ("emulated:200mbit-delay2ms", 4),
    ("emulated:500mbit-delay1ms", 8),
    ("emulated:100mbit-delay0.5ms", 6),
]


def made(
    labs: list[tuple[str, int]] = LABS, scatter: float = 0.0, seed: int = 0, values: Any = TRUE
) -> pd.DataFrame:
    """A collectives table of labs that follow the law, but for a factor of each lab, of that deviation."""
    random, frames = np.random.default_rng(seed), []
    for link, ranks in labs:
        sizes = np.repeat(SIZES, 5)
        seconds = ring_at(values, link, ranks)(sizes) * np.exp(scatter * random.normal())
        seconds = seconds * np.exp(0.01 * bool(scatter) * random.normal(size=sizes.size))
        known = {"link": link, "link_bits_per_s": read_link(link).rate_bits_per_s, "ranks": ranks}
        frames.append(pd.DataFrame({**known, "bytes": sizes, "seconds": seconds}))
    how = {"collective": "all_reduce", "algorithm": "ring", "in_flight": 1, "session": 0}
    return pd.concat(frames).assign(**how, stolen=0.0, messages_per_sample=1)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 7), st.floats(8, 3e7), slopes, times, times)
def test_the_law_lies_between_words_that_never_and_words_that_always_wait(
    ranks: int, n: float, slope: float, way_s: float, wake_s: float
) -> None:
    """Played out event by event, words that pass all bytes; and each pair's bytes after its round trip."""
    cost = GlooRing(wake_s, slope, workers=ranks, delay_s=way_s / 2)
    least_s = all_reduce_s(ranks, n, slope, way_s, lambda: wake_s, in_line=False)
    pairs = -(-cut(ranks, n) // 2)
    wire_s = 2 * (ranks - 1) / ranks * n * slope
    most_s = 2 * pairs * (2 * way_s + wake_s) + wire_s
    assert least_s * (1 - 1e-9) <= cost(n) <= most_s * (1 + 1e-9)
    small = 1e-3 * cost.at(delay_s=0.0).startup_s() / slope / ranks
    if small < n:  # where bytes hardly count, words find the links free
        played_s = all_reduce_s(ranks, small, slope, way_s, lambda: wake_s, in_line=False)
        assert cost(small) == pytest.approx(played_s, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "mib", "delay_s"),
    [
        (2, 16, 2e-3),
        (4, 1, 2e-3),
        (4, 4, 2e-3),
        (4, 16, 2e-3),
        (8, 4, 2e-3),
        (3, 0.5, 1e-3),
        (8, 4, 5e-4),
    ],
)
def test_words_that_find_links_at_random_wait_as_the_law_says(
    ranks: int, mib: float, delay_s: float
) -> None:
    """Ranks that wake at random are not in step; where no word waited, it would be up to 20% faster."""
    drawn, slope, n = np.random.default_rng(0), 8 / (5e8 * WIRE_FRAMING), mib * 2**20
    how: Any = {"messages": 8, "wakes_s": lambda: float(drawn.exponential(2e-4))}
    played_s = all_reduce_s(ranks, n, slope, 2 * delay_s, **how)
    assert GlooRing(2e-4, slope, workers=ranks, delay_s=delay_s)(n) == pytest.approx(
        played_s, rel=0.07
    )


@settings(deadline=None)
@given(st.integers(2, 17), slopes, times, times, st.floats(0, 1e-2))
def test_no_message_is_faster_than_its_bytes_and_its_round_trips(
    ranks: int, slope: float, software_s: float, delay_s: float, saved: float
) -> None:
    cost = GlooRing(software_s, slope, workers=ranks, delay_s=delay_s, burst_s=saved)
    found, steps = cost(SIZES), 2 * (ranks - 1)
    assert np.all(found >= steps * (4 * delay_s + software_s) * (1 - 1e-9))
    wire_s = steps / ranks * SIZES * slope
    assert np.all(found >= wire_s * (1 - 1e-9))
    assert np.all(np.diff(found) >= -1e-12), "more bytes never take less"
    assert cost.at(delay_s=2 * delay_s)(1.0) > cost(1.0)
    terms = cost.terms(SIZES)
    np.testing.assert_allclose(sum(terms), found, rtol=1e-9)
    at_once = replace(cost, software_s=0.0, delay_s=0.0)
    np.testing.assert_allclose(at_once(SIZES), wire_s, rtol=1e-9)


@settings(deadline=None)
@given(st.integers(2, 17), times, times, times)
def test_delay_enters_linearly_for_small_messages(
    ranks: int, software_s: float, one_s: float, more_s: float
) -> None:
    """A round trip a step: four delays, of the two links both ways."""
    ring = GlooRing(software_s, 0.0, workers=ranks)
    slower_s = ring.at(delay_s=one_s + more_s)(64.0) - ring.at(delay_s=one_s)(64.0)
    assert slower_s == pytest.approx(2 * (ranks - 1) * 4 * more_s, rel=1e-6)


@settings(deadline=None)
@given(st.integers(2, 9), st.floats(1e-5, 5e-4), st.floats(1e-5, 1e-2))
def test_over_links_that_save_the_longer_of_software_and_bytes_decides(
    ranks: int, software_s: float, busy_s: float
) -> None:
    """As of `Stepped`: a bucket holds all that is saved while the software runs."""
    n = 1e3
    ring = GlooRing(software_s, busy_s * ranks / n, workers=ranks, burst_s=2e-3)
    steps = 2 * (ranks - 1)
    assert ring(n) == pytest.approx(steps * max(software_s, busy_s))


def test_a_cost_carried_elsewhere_and_back_is_the_same() -> None:
    cost = ring_at(TRUE, *LABS[1])
    there = cost.at(workers=7, rate_bits_per_s=1e8, delay_s=0.01, burst_s=1e-3)
    back = there.at(workers=4, rate_bits_per_s=5e8, delay_s=5e-4, burst_s=0.0)
    np.testing.assert_allclose(back(SIZES), cost(SIZES), rtol=1e-12)
    assert there(1e6) > cost(1e6)
    read = from_dict(cost.to_dict(), {"gloo_ring": GlooRing})
    np.testing.assert_array_equal(read(SIZES), cost(SIZES))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GlooRing(0, 1e-9), "workers is None: must be at least 2"),
        (lambda: GlooRing(0, 1e-9, workers=2, algorithm="tree"), "all_reduce by tree"),
        (lambda: GlooRing(-1.0, 1e-9, workers=2), "software_s is -1.0: at least 0"),
        (lambda: GlooRing(0, 1, workers=2).at(rate_bits_per_s=1e9), "measured at 0 bit/s"),
        (lambda: GlooRing(0, 1, workers=2).at(algorithm="tree"), "cannot be carried to tree"),
        (lambda: carried(made(), "emulated:1gbit-delay1ms-loss0.01", 4, cores=2), "lose nothing"),
        (lambda: carried(made(), "loopback", 4, cores=2), "no cost can be carried to loopback"),
        (lambda: carried(made().assign(link="host"), LABS[0][0], 4, cores=2), "calibrate one"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


# -- from labs to labs ---------------------------------------------------------------------------


def test_labs_that_follow_the_law_tell_any_other() -> None:
    """Each left out in turn, and labs of another rate, delay and number of ranks."""
    rings = Rings.of(made(), "emulated:1gbit-delay1ms", cores=2)
    assert max(np.abs(error).max() for error in rings.errors) < 0.02
    for link, ranks in [("emulated:50mbit-delay5ms", 3), ("emulated:1gbit-delay1ms", 8)]:
        told = rings.at(link, ranks)
        np.testing.assert_allclose(told(SIZES), ring_at(TRUE, link, ranks)(SIZES), rtol=0.02)


def test_a_link_is_told_from_links_of_its_kind() -> None:
    """The other kind would tell it wrong: its processes take another time."""
    slow = np.array([np.log(2e-3), *TRUE[1:]])
    tbf = [("lab:1gbit", 2), ("lab:500mbit", 4)]
    rows = pd.concat([made(), made(tbf, values=slow), made([("emulated:1gbit-delay0ms", 2)])])
    assert len(ring_labs(rows)) == 8
    for link, count in [("lab:200mbit", 2), (LABS[0][0], 5), ("emulated:500mbit-delay0ms", 1)]:
        assert len(Rings.of(rows, link, 2).labs) == count
    np.testing.assert_allclose(
        Rings.of(rows, "lab:200mbit", 2).at("lab:500mbit", 4)(SIZES),
        ring_at(slow, "lab:500mbit", 4)(SIZES),
        rtol=0.03,
    )
    assert len(Rings.of(made(tbf), LABS[0][0], 2).labs) == 2, "nothing nearer"


def test_one_lab_tells_a_cost_and_no_interval() -> None:
    link, ranks = LABS[1]
    alone = carried(made(LABS[1:2]), link, ranks, cores=2)
    np.testing.assert_allclose(alone.cost(SIZES), ring_at(TRUE, link, ranks)(SIZES), rtol=0.03)
    assert not alone.draws and alone.noise is None


def test_intervals_hold_labs_that_were_not_calibrated() -> None:
    """Labs that differ from the law by 4% each: ten are calibrated, forty predicted, and most are held."""
    drawn = np.random.default_rng(1)
    each = (
        drawn.choice(of, 50).tolist()
        for of in ((100.0, 200.0, 500.0), (0.2, 1.0, 3.0), (2.0, 4.0, 8.0))
    )
    labs = [
        (f"emulated:{rate:g}mbit-delay{d:g}ms", int(ranks))
        for rate, d, ranks in zip(*each, strict=True)
    ]
    rows = made([*dict.fromkeys(labs[:10])], scatter=0.04)
    work = Workload.from_arrays(0.01, [0.01] * 3, [1_000_000, 200_000, 4_000_000])
    plan, calibration = FusionPlan("three", (1, 2, 3)), carried_to(rows, labs[10:], cores=2)
    names, held, wide = ("software_s", "link_s_per_byte", "delay_s"), [], []
    for lab in labs[10:]:
        known, truth = calibration.between(*lab), ring_at(TRUE, *lab)
        factor = float(np.exp(0.04 * drawn.normal()))
        real = replace(truth, **{name: factor * getattr(truth, name) for name in names})
        real_s = forecast(work, plan, Communication(real)).prediction.iteration_s
        low_s, high_s = forecast(work, plan, known).interval_s or (0.0, 0.0)
        held.append(low_s <= real_s <= high_s)
        wide.append((high_s - low_s) / real_s)
    assert 0.85 <= np.mean(held) <= 1.0
    assert np.median(wide) < 0.3, "and they say something"


def test_a_case_in_a_lab_that_was_not_calibrated_is_predicted() -> None:
    link = "emulated:300mbit-delay1ms"
    case = Case("replay", "net", "", 1, 5, link, 0.0, "all_reduce", "one", "1")
    found = carried_to(made(), [(link, 5)], cores=2).of_case(case)
    np.testing.assert_allclose(found.cost(SIZES), ring_at(TRUE, link, 5)(SIZES), rtol=0.02)
    assert found.link.plain and isinstance(found.noise, Noise)
    with pytest.raises(UserError, match="no calibration for all_reduce over lab:1gbit"):
        carried_to(made(), [(link, 5)], cores=2).between("lab:1gbit", 5)


# -- what a link's name says ---------------------------------------------------------------------


def test_credit_and_framing_are_those_of_the_links_own_kind() -> None:
    def row(link: str) -> pd.DataFrame:
        return made([(link, 4)])

    saving = shared_link(row("emulated:500mbit-delay2ms-burst1ms"))
    assert saving.burst_s == pytest.approx(1e-3)
    assert saving.wire_s_per_byte == pytest.approx(1.5 * 8 / (5e8 * WIRE_FRAMING))
    assert shared_link(row("emulated:500mbit-delay2ms")).plain
    bucket = shared_link(row("lab:500mbit"))
    assert bucket.burst_s == burst_s(5e8)
    assert bucket.wire_s_per_byte == pytest.approx(1.5 * 8 / (5e8 * FRAMING))
    for link, framing in [("lab:500mbit", FRAMING), ("emulated:500mbit-delay2ms", WIRE_FRAMING)]:
        line = Calibration.of(row(link), UNFITTED, draws=0).between(link, 4).cost
        assert line(1e9) - line(0.0) == pytest.approx(1.5e9 * 8 / (5e8 * framing), rel=1e-9)
