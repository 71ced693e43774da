"""gloo's ring: its law is what is played out; fitted to a lab or to all, it finds what made the times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.gloo_ring import GlooRing
from ddlkit.core.lablink import WIRE_FRAMING, read_link
from ddlkit.core.link import FRAMING, burst_s
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import Floats, Workload
from ddlkit.model import Calibration, Communication, forecast
from ddlkit.model.calibration import UNFITTED, shared_link
from ddlkit.model.predictor import OWN
from ddlkit.model.rings import (
    LEAST_SIZES,
    Rings,
    by_law,
    fit_rings,
    ring_labs,
    ring_of,
    smoothed,
    transferred,
)
from rings_played import all_reduce_s, cut

SIZES: Floats = 1024 * 4.0 ** np.arange(8)
BETWEEN: Floats = SIZES[2:-1] * 2
times = st.floats(1e-6, 1e-2)
slopes = st.floats(1e-10, 1e-7)
TRUE = np.log([1.5e-4, 1.01, 0.3])
LINK = "emulated:500mbit-delay2ms"
LABS = [
    (LINK, 2),
    ("emulated:500mbit-delay0.5ms", 4),
    ("emulated:200mbit-delay2ms", 4),
    ("emulated:500mbit-delay1ms", 8),
    ("emulated:100mbit-delay0.5ms", 6),
]


def truth(link: str, ranks: int, values: Floats = TRUE, waking: float | None = None) -> GlooRing:
    return ring_of(values, read_link(link), ranks, waking)


def made(
    labs: Sequence[tuple[str, int]] = LABS,
    scatter: float = 0.0,
    values: Floats = TRUE,
    waking: float | None = None,
) -> pd.DataFrame:
    """A collectives table of labs that follow the law, but for a factor of each lab, of that deviation."""
    random, frames = np.random.default_rng(0), []
    for link, ranks in labs:
        sizes = np.repeat(SIZES, 5)
        seconds = truth(link, ranks, values, waking)(sizes) * np.exp(scatter * random.normal())
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
    most_s = 2 * pairs * (2 * way_s + wake_s) + float(cost.bytes_s(n))
    assert least_s * (1 - 1e-9) <= cost(n) <= most_s * (1 + 1e-9)
    small = 1e-3 * replace(cost, delay_s=0.0)(0.0) / slope / ranks
    if small < n:  # where bytes hardly count, words find the links free
        played_s = all_reduce_s(ranks, small, slope, way_s, lambda: wake_s, in_line=False)
        assert cost(small) == pytest.approx(played_s, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "mib", "delay_s"), [(2, 16, 2e-3), (4, 4, 2e-3), (3, 0.5, 1e-3), (8, 4, 5e-4)]
)
def test_words_that_find_links_at_random_wait_as_the_law_says(
    ranks: int, mib: float, delay_s: float
) -> None:
    """Ranks that wake at random are not in step; where no word waited, it would be up to 20% faster."""
    drawn, slope, n = np.random.default_rng(0), 8 / (5e8 * WIRE_FRAMING), mib * 2**20
    how: Any = {"messages": 8, "wakes_s": lambda: float(drawn.exponential(2e-4))}
    played_s = all_reduce_s(ranks, n, slope, 2 * delay_s, **how)
    ring = GlooRing(2e-4, slope, workers=ranks, delay_s=delay_s)
    assert ring(n) == pytest.approx(played_s, rel=0.07)


@settings(deadline=None)
@given(st.integers(2, 17), slopes, times, times, st.floats(0, 1e-2))
def test_no_message_is_faster_than_its_bytes_and_its_round_trips(
    ranks: int, slope: float, software_s: float, delay_s: float, saved: float
) -> None:
    cost = GlooRing(software_s, slope, workers=ranks, delay_s=delay_s, burst_s=saved)
    seconds, steps = cost(SIZES), 2 * (ranks - 1)
    assert np.all(seconds >= steps * (4 * delay_s + software_s) * (1 - 1e-9))
    assert np.all(seconds >= cost.bytes_s(SIZES) * (1 - 1e-9))
    assert np.all(np.diff(seconds) >= -1e-12), "more bytes never take less"
    at_once = replace(cost, software_s=0.0, delay_s=0.0)
    np.testing.assert_allclose(at_once(SIZES), steps / ranks * SIZES * slope, rtol=1e-9)
    later_s = replace(cost, delay_s=2 * delay_s)(0.0) - cost(0.0)
    assert later_s == pytest.approx(steps * 4 * delay_s, rel=1e-6), "four delays a step"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GlooRing(0, 1e-9, workers=1), "workers is 1: must be at least 2"),
        (lambda: GlooRing(-1.0, 1e-9, workers=2), "software_s is -1.0: at least 0"),
        (lambda: transferred(made(), [("emulated:1gbit-delay1ms-loss0.1", 4)], cores=2), "lose no"),
        (lambda: transferred(made(), [("loopback", 4)], cores=2), "be transferred to loopback"),
        (lambda: transferred(made().assign(link="h"), [(LINK, 4)], cores=2), "calibrate one"),
        (lambda: fit_rings([], 2), "no lab to extrapolate from"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


# -- a lab's own law ------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(st.floats(3e-5, 1e-3), st.floats(0.97, 1.3))
def test_between_sizes_it_is_right_where_messages_follow_the_law(
    software_s: float, over: float
) -> None:
    values = np.log([software_s, over, 0.5])
    messages = made([(LINK, 4)], values=values)
    table = Calibration.of(messages, draws=0)
    by = by_law(table, messages, cores=2).between(LINK, 4)
    exact = truth(LINK, 4, values)(BETWEEN)
    assert np.abs(np.log(by.cost(BETWEEN) / exact)).max() < 2e-3
    straight = np.abs(np.log(table.between(LINK, 4).cost(BETWEEN) / exact))
    assert straight.max() > 0.02, "a table that runs straight is not"
    assert by.others[OWN] is table.between(LINK, 4).cost, "models on trial keep the table"


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_what_the_law_misses_is_kept_and_intervals_hold_it(factor: float) -> None:
    """A link on which messages of 1 MiB and more take otherwise, as where packets are lost."""
    steady = made([(LINK, 4)])
    other = np.where(steady["bytes"] >= 2**20, factor, 1.0)
    spread = []
    for messages in (steady, steady.assign(seconds=steady["seconds"] * other)):
        by = by_law(Calibration.of(messages), messages, cores=2).between(LINK, 4)
        seconds = messages.groupby("bytes")["seconds"].median().to_numpy()
        error = np.log(by.cost(SIZES) / seconds)
        assert np.abs(error).max() < abs(np.log(factor)) / 2
        drawn = np.log([draw(BETWEEN) for draw in by.draws] / by.cost(BETWEEN))
        spread.append(drawn.std(axis=0).max())
    assert spread[0] < 0.01 < 0.03 < spread[1]


def test_what_the_law_does_not_tell_keeps_its_table() -> None:
    messages = made([(LINK, 4)])
    few = messages[messages["bytes"].isin(SIZES[: LEAST_SIZES - 1])]
    for other in (made([("lab:500mbit", 4)]), messages.assign(collective="all_gather"), few):
        table = Calibration.of(other, draws=0)
        assert by_law(table, other, cores=2).known == table.known


@given(st.lists(st.floats(-1, 1), min_size=3, max_size=12))
def test_smoothing_keeps_the_sum_and_what_is_constant(values: list[float]) -> None:
    assert smoothed(np.array(values)).sum() == pytest.approx(sum(values), abs=1e-9)
    assert smoothed(np.full(5, 0.3)) == pytest.approx(np.full(5, 0.3))


# -- labs that were never measured ----------------------------------------------------------------


@pytest.mark.parametrize("waking", [None, 0.0, 0.2])
def test_labs_that_follow_the_law_tell_any_other(waking: float | None) -> None:
    """Each held out in turn, and labs of another rate, delay and number of ranks; another law is off."""
    rows = made(waking=waking)
    rings = Rings.of(rows, "emulated:1gbit-delay1ms", 2, waking)
    for lab, ring in zip(rings.labs, rings.held_out, strict=True):
        np.testing.assert_allclose(ring(lab.bytes), lab.seconds, rtol=0.02)
    for link, ranks in [("emulated:50mbit-delay5ms", 3), ("emulated:1gbit-delay1ms", 8)]:
        exact_s = truth(link, ranks, waking=waking)(SIZES)
        np.testing.assert_allclose(rings.at(link, ranks)(SIZES), exact_s, rtol=0.02)
        other = Rings.of(rows, link, 2, (waking or 0.0) + 0.5).at(link, ranks)
        assert np.abs(other(SIZES) / exact_s - 1).max() > 0.02


def test_a_link_is_told_from_links_of_its_kind() -> None:
    """The other kind would tell it wrong; and no rank sleeps over links without delay."""
    tbf = [("lab:1gbit", 2), ("lab:500mbit", 4)]
    slow = np.log([2e-3, 1.01, 0.3])
    rows = pd.concat([made(), made(tbf, values=slow), made([("emulated:1gbit-delay0ms", 2)])])
    assert len(ring_labs(rows)) == 8
    for link, count in [("lab:200mbit", 2), (LINK, 5), ("emulated:500mbit-delay0ms", 1)]:
        assert len(Rings.of(rows, link, 2).labs) == count
    for waking in (None, 9.0):
        ring = Rings.of(rows, "lab:200mbit", 2, waking).at("lab:500mbit", 4)
        np.testing.assert_allclose(ring(SIZES), truth("lab:500mbit", 4, slow)(SIZES), rtol=0.03)
    assert len(Rings.of(made(tbf), LINK, 2).labs) == 2, "nothing nearer"


def test_what_is_no_lab_of_one_message_of_gloos_own_ring_is_held_out() -> None:
    whole = made([("lab:1gbit", 4)])
    others = [
        whole.assign(link="lab:500mbit-g4-2gbit"),
        whole.assign(link="emulated:1gbit-delay1ms-loss0.01"),
        whole.assign(ranks=3, in_flight=2),
        whole.assign(ranks=6, collective="all_gather"),
        whole.assign(ranks=5, algorithm="steps:ring"),
    ]
    labs = ring_labs(pd.concat([whole, *others]))
    assert [(lab.link, lab.workers) for lab in labs] == [("lab:1gbit", 4)]


def test_intervals_hold_labs_that_were_not_calibrated() -> None:
    """Labs that differ from the law by 4% each: ten are calibrated, forty predicted, and most are held."""
    drawn = np.random.default_rng(1)
    every = ((100.0, 200.0, 500.0), (0.2, 1.0, 3.0), (2.0, 4.0, 8.0))
    each = (drawn.choice(of, 50).tolist() for of in every)
    labs = [
        (f"emulated:{rate:g}mbit-delay{d:g}ms", int(ranks))
        for rate, d, ranks in zip(*each, strict=True)
    ]
    rows = made([*dict.fromkeys(labs[:10])], scatter=0.04)
    work = Workload.from_arrays(0.01, [0.01] * 3, [1_000_000, 200_000, 4_000_000])
    plan, calibration = FusionPlan("three", (1, 2, 3)), transferred(rows, labs[10:], cores=2)
    names, held, wide = ("software_s", "link_s_per_byte", "delay_s"), [], []
    for lab in labs[10:]:
        known, exact = calibration.between(*lab), truth(*lab)
        factor = float(np.exp(0.04 * drawn.normal()))
        real = replace(exact, **{name: factor * getattr(exact, name) for name in names})
        cost = replace(known.cost, seconds=real(known.cost.bytes))  # type: ignore[call-arg,attr-defined]
        real_s = forecast(work, plan, Communication(cost)).prediction.iteration_s
        low_s, high_s = forecast(work, plan, known).interval_s or (0.0, 0.0)
        held.append(low_s <= real_s <= high_s)
        wide.append((high_s - low_s) / real_s)
    assert 0.85 <= np.mean(held) <= 1.0
    assert np.median(wide) < 0.3, "and they say something"


def test_one_lab_tells_a_cost_and_no_interval() -> None:
    link, ranks = LABS[1]
    calibration = transferred(made(LABS[1:2]), [(link, ranks)], cores=2)
    alone = calibration.between(link, ranks)
    np.testing.assert_allclose(alone.cost(SIZES), truth(link, ranks)(SIZES), rtol=0.03)
    assert not alone.draws and alone.noise is None and alone.link.plain
    with pytest.raises(UserError, match="no calibration for all_reduce over lab:1gbit"):
        calibration.between("lab:1gbit", 5)


def test_tokens_and_framing_are_those_of_the_links_own_kind() -> None:
    saving = shared_link(made([(f"{LINK}-burst1ms", 4)]))
    assert saving.burst_s == pytest.approx(1e-3)
    assert saving.wire_s_per_byte == pytest.approx(1.5 * 8 / (5e8 * WIRE_FRAMING))
    assert shared_link(made([(LINK, 4)])).plain
    bucket = shared_link(made([("lab:500mbit", 4)]))
    assert bucket.burst_s == burst_s(5e8)
    assert bucket.wire_s_per_byte == pytest.approx(1.5 * 8 / (5e8 * FRAMING))
    for link, framing in [("lab:500mbit", FRAMING), (LINK, WIRE_FRAMING)]:
        line = Calibration.of(made([(link, 4)]), UNFITTED, draws=0).between(link, 4).cost
        assert line(1e9) - line(0.0) == pytest.approx(1.5e9 * 8 / (5e8 * framing), rel=1e-9)
