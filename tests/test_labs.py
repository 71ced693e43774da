"""gloo's ring law is what is played out, and labs are told by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core.lab_links import read_link
from ddlkit.core.workload import Floats
from workbook.common import source
from workbook.validate import labs
from workbook.validate.rings import (
    GlooRing,
    fit_rings,
    held_out_rings,
    ring_labs,
    ring_of,
)

SIZES: Floats = 1024 * 4.0 ** np.arange(8.0)
times = st.floats(1e-6, 1e-2)
slopes = st.floats(1e-10, 1e-7)
TRUE: Floats = np.array([math.log(value) for value in (1.5e-4, 1.01, 0.3)])
LINK = "emulated:500mbit-delay2ms"
LABS = [
    (LINK, 2),
    ("emulated:500mbit-delay0.5ms", 4),
    ("emulated:200mbit-delay2ms", 4),
    ("emulated:500mbit-delay1ms", 8),
    ("emulated:100mbit-delay0.5ms", 6),
]


def truth(
    link: str, ranks: int, values: Floats = TRUE, waking: float | None = None
) -> GlooRing:
    return ring_of(values, read_link(link), ranks, waking)


def made(
    labs: Sequence[tuple[str, int]] = LABS,
    values: Floats = TRUE,
    waking: float | None = None,
) -> pd.DataFrame:
    """A collectives table of labs that follow the law."""
    frames = []
    for link, ranks in labs:
        sizes = np.repeat(SIZES, 5)
        seconds = truth(link, ranks, values, waking)(sizes)
        known = {
            "link": link,
            "link_bits_per_s": read_link(link).rate_bits_per_s,
            "ranks": ranks,
        }
        frames.append(pd.DataFrame({**known, "bytes": sizes, "seconds": seconds}))
    how = {
        "collective": "all_reduce",
        "algorithm": "ring",
        "in_flight": 1,
        "session": 0,
    }
    return pd.concat(frames).assign(**how, stolen=0.0, messages_per_sample=1)


@settings(deadline=None)
@given(st.integers(2, 17), slopes, times, times, st.floats(0, 1e-2))
def test_no_message_is_faster_than_its_bytes_and_its_round_trips(
    ranks: int, slope: float, software_s: float, delay_s: float, saved: float
) -> None:
    cost = GlooRing(software_s, slope, workers=ranks, delay_s=delay_s, burst_s=saved)
    seconds, steps = cost(SIZES), 2 * (ranks - 1)
    assert np.all(seconds >= steps * (4 * delay_s + software_s) * (1 - 1e-9))
    assert np.all(seconds >= steps / ranks * SIZES * slope * (1 - 1e-9))
    assert np.all(np.diff(seconds) >= -1e-12), "more bytes never take less"
    at_once = replace(cost, software_s=0.0, delay_s=0.0)
    np.testing.assert_allclose(at_once(SIZES), steps / ranks * SIZES * slope, rtol=1e-9)
    later_s = replace(cost, delay_s=2 * delay_s)(0.0) - cost(0.0)
    assert later_s == pytest.approx(steps * 4 * delay_s, rel=1e-6), "four delays a step"


@pytest.mark.parametrize("waking", [None, 0.0, 0.2])
def test_labs_that_follow_the_law_tell_any_other(waking: float | None) -> None:
    """Each held out in turn, and labs of another rate, delay and number of ranks; another law is off."""
    known = ring_labs(made(waking=waking))
    assert len(known) == len(LABS) and held_out_rings(known[:1], 2, waking) == []
    for lab, ring in zip(known, held_out_rings(known, 2, waking), strict=True):
        np.testing.assert_allclose(ring(lab.bytes), lab.seconds, rtol=0.02)
    values, other = (
        fit_rings(known, 2, law) for law in (waking, (waking or 0.0) + 0.5)
    )
    for link, ranks in [
        ("emulated:50mbit-delay5ms", 3),
        ("emulated:1gbit-delay1ms", 8),
    ]:
        exact_s = truth(link, ranks, waking=waking)(SIZES)
        there = ring_of(values, read_link(link), ranks, waking)
        np.testing.assert_allclose(there(SIZES), exact_s, rtol=0.02)
        wrong = ring_of(other, read_link(link), ranks, (waking or 0.0) + 0.5)
        assert np.abs(wrong(SIZES) / exact_s - 1).max() > 0.02


def test_the_law_is_fitted_on_a_machine_of_many_cores() -> None:
    known = ring_labs(made())
    values = fit_rings(known, 64)
    assert np.isfinite(values).all()
    for lab, ring in zip(known, held_out_rings(known, 64), strict=True):
        np.testing.assert_allclose(ring(lab.bytes), lab.seconds, rtol=0.1)


def test_labs_that_follow_the_law_are_told_by_it() -> None:
    tbf = [("lab:1gbit", 4), ("lab:500mbit", 8), ("lab:1gbit", 2)]
    known = pd.concat([made(LABS, waking=0.3), made(tbf)])
    table = labs.held_out(known, 2, 0.3)
    assert set(table["kind"]) == {"tbf", "emulated"} and len(table) == 8 * SIZES.size
    assert (
        table["error"].abs().groupby([table["kind"], table["link"]]).median().max()
        < labs.WELL
    )
    one = table[(table["link"] == "lab:500mbit")].sort_values("bytes")
    assert [*dict.fromkeys(one["decides"])] == ["start-up", "knee", "bytes"]


def test_labs_are_predicted_as_they_were_before_they_were_recorded() -> None:
    """The table that twelve labs met, with wake-up latency: what messages cost."""
    many, again = source.open_labs(""), source.open_labs("", "labs-fresh-again")
    wake_up = labs.waking(source.open_labs("", source.ECHOES).table("echoes"))
    said = again.table("predicted").query("model == 'with_wake_up'")
    said[["ranks", "link", "bytes"]] = said["case"].str.split(" ", expand=True)
    known = ring_labs(many.table("collectives"))
    for (link, ranks), own in said.query("quantity == 'message'").groupby(
        ["link", "ranks"]
    ):
        named = read_link(str(link))
        kind = named.engine, named.delay_s > 0
        law = wake_up if kind == ("emulated", True) else None
        alike = [lab for lab in known if lab.kind == kind]
        cores = many.machine("collectives")["cpu"]["cores"]
        ring = ring_of(fit_rings(alike, cores, law), named, int(ranks), law)
        sizes = own["bytes"].to_numpy(float)
        np.testing.assert_allclose(own["seconds"], ring(sizes), rtol=1e-6)
