"""Costs carried to labs that were not calibrated: made labs come out exactly, recorded ones as is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core.cost import Stepped
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, held_out_errors
from ddlkit.core.schedule import ALGORITHMS
from ddlkit.model.extrapolation import AS_GOOD, join_labs, played_s, stepped_lab
from ddlkit.report import extrapolation, source

SIZES = 2.0 ** np.arange(10, 25)
TRUE = Stepped(1e-4, 8.4e-9, workers=4, rate_bits_per_s=1e9, saves=True, core_share=0.37)
LABS = [(2, 1e9), (4, 1e9), (4, 5e8), (8, 1e9), (16, 2e8)]


def made(cost: Stepped, link: str = "") -> pd.DataFrame:
    """A collectives table of this cost, each size three times, without scatter."""
    sizes = np.repeat(SIZES, 3)
    rate = cost.rate_bits_per_s
    labels: dict[str, Any] = {
        "collective": "all_reduce",
        "algorithm": cost.algorithm,
        "in_flight": 1,
    }
    labels |= {"link": link or f"lab:{rate / 1e6:g}mbit", "link_bits_per_s": rate}
    return pd.DataFrame(
        {**labels, "ranks": cost.workers, "bytes": sizes, "seconds": cost(sizes), "stolen": 0.0}
    )


def campaign(cost: Stepped = TRUE) -> pd.DataFrame:
    return pd.concat([made(cost.at(workers=p, rate_bits_per_s=rate)) for p, rate in LABS])


@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e-9, 1e-6),
    st.integers(2, 17),
    st.sampled_from(list(ALGORITHMS)),
    st.booleans(),
    st.floats(0, 1),
    st.floats(0, 1e-2),
)
def test_a_fit_finds_what_made_the_times(
    software_s: float,
    slope: float,
    workers: int,
    name: str,
    saves: bool,
    share: float,
    delay: float,
) -> None:
    """Where both terms show: sizes reach from a tenth to ten times where they cross."""
    known: dict[str, Any] = {
        "workers": workers,
        "algorithm": name,
        "saves": saves,
        "core_share": share,
    }
    cost = Stepped(software_s, slope, delay_s=delay, **known)
    start_s = cost(0.0)
    sizes = np.geomspace(0.1, 10, 9) * start_s / float(cost.terms(1.0).bytes_s)
    found = fit("stepped", sizes, cost(sizes), draws=0, delay_s=delay, **known)
    np.testing.assert_allclose(found.cost(sizes), cost(sizes), rtol=1e-6)
    assert found.cost.link_s_per_byte == pytest.approx(slope, rel=1e-6)
    errors = held_out_errors("stepped", sizes, cost(sizes), delay_s=delay, **known)[1]
    assert np.abs(errors).max() < 1e-6


def test_a_fit_that_finds_no_software_says_none() -> None:
    """Times that grow faster than their bytes would leave less than none."""
    found = fit("stepped", SIZES, 1e-8 * SIZES - 5e-7, workers=4, algorithm="ring")
    assert found.cost.software_s == 0 < found.cost.link_s_per_byte
    assert all(draw.software_s == 0 for draw in found.draws)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.26, 0.9), st.floats(1e-5, 1e-3))
def test_labs_of_several_ranks_tell_how_much_of_a_core_software_takes(
    share: float, software_s: float
) -> None:
    true = replace(TRUE, core_share=share, software_s=software_s)
    labs = [stepped_lab(rows) for _, rows in extrapolation.labs_of(campaign(true)).items()]
    joined = join_labs(labs, cores=2)
    for lab in labs:  # what differs by less than AS_GOOD is as good
        told = joined.at(workers=lab.workers, rate_bits_per_s=lab.rate_bits_per_s)
        assert abs(np.log(told(1.0) / lab(1.0))) <= np.sqrt(len(labs) * 2 * AS_GOOD)
    if share < 0.5:  # else all wait, even two, and only the product shows
        assert joined.core_share == pytest.approx(share, rel=0.1)


def test_one_lab_is_taken_to_want_whole_cores() -> None:
    joined = join_labs([stepped_lab(made(TRUE.at(workers=8)))], cores=2)
    assert joined.core_share == pytest.approx(0.5, rel=0.02)
    at_8 = joined.at(workers=8)(SIZES)
    np.testing.assert_allclose(at_8, TRUE.at(workers=8)(SIZES), rtol=1e-6)


def test_labs_that_follow_the_law_are_told_from_the_others() -> None:
    found = extrapolation.told(extrapolation.labs_of(campaign()), cores=2)
    others = found[found["way"] == "others"]
    assert len(others) == len(LABS) * SIZES.size
    assert others["slope_error"].abs().max() < 1e-6
    off = others.groupby("ranks")["error"].agg(lambda errors: errors.abs().max())
    assert off.drop(2).max() < 0.1
    # Where the only two that find a core each are left out, nothing tells that they do not wait.
    assert off[2] == pytest.approx(1 - 2 * 0.37, rel=0.01)
    own = found[(found["way"] == "own_core") & (found["ranks"] == 16)]
    expected = 4 * 0.37 / (16 * 0.37) - 1  # what 16 ranks wait for beyond 4
    assert own["software_error"].iloc[0] == pytest.approx(expected, rel=1e-6)
    table = extrapolation.summary(found)
    assert table.loc[table["way"] == "others", "well"].all()
    assert set(table["way"]) == set(extrapolation.WAYS)
    assert len(table) == 3 * len(LABS) - 2, "the base is told from the others only"


def test_what_decides_a_size_is_read_off_the_lab_itself() -> None:
    found = extrapolation.told(extrapolation.labs_of(campaign()), cores=2)
    lab = found[(found["ranks"] == 8) & (found["way"] == "others")]
    assert lab["decides"].iloc[0] == "start-up" and lab["decides"].iloc[-1] == "bytes"
    order = [*dict.fromkeys(lab["decides"])]
    assert order == ["start-up", "knee", "bytes"]


def test_labs_of_nodes_gathers_and_several_messages_are_left_out() -> None:
    rows = pd.concat(
        [
            made(TRUE),
            made(TRUE.at(workers=8), "lab:500mbit-g4-2gbit"),
            made(TRUE.at(workers=3)).assign(in_flight=2),
            made(TRUE.at(workers=6)).assign(collective="all_gather"),
            made(TRUE.at(workers=5), "loopback"),
        ]
    )
    assert list(extrapolation.labs_of(rows)) == [(4, 1e9)]


def test_recorded_software_waits_for_cores() -> None:
    """The recorded labs of one day: with cores shared, start-ups are told twice as well at least."""
    rows = source.open_campaign("").table("collectives")
    table = extrapolation.summary(extrapolation.told(extrapolation.labs_of(rows), cores=2))
    by_way = table.groupby("way")
    worst = by_way["software_error"].agg(lambda errors: errors.abs().max())
    assert worst["others"] < worst["own_core"] / 2
    assert table["slope_error"].abs().max() < extrapolation.WELL
    assert table["median, bytes"].max() < extrapolation.WELL


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_credit_a_cost_played_out_is_the_cost(name: str) -> None:
    """And with as much as a step's software, that of a ring is the longer of software and bytes."""
    cost = replace(TRUE, saves=False).at(workers=8, algorithm=name)
    assert played_s(cost, 1e6, 3) == pytest.approx(cost(1e6), rel=1e-9)
    assert played_s(cost, 1e6, 3, burst_s=1e-3) < cost(1e6)
    if name == "ring":
        saving = replace(cost, saves=True)
        assert played_s(cost, 1e7, 200, burst_s=2e-3) == pytest.approx(saving(1e7), rel=1e-3)


def test_algorithms_that_follow_the_law_are_told_from_one_ring() -> None:
    """The software of two cores, as is assumed where one lab is all there is."""
    true = replace(TRUE, core_share=0.5)
    tables = [
        made(true.at(workers=ranks, algorithm=name)).assign(
            algorithm=f"steps:{name}", messages_per_sample=1
        )
        for ranks in (4, 6)
        for name in ALGORITHMS
    ]
    told = extrapolation.algorithms_told(pd.concat([*tables, made(TRUE)]), cores=2)
    assert len(told) == (2 * len(ALGORITHMS) - 1) * SIZES.size, (
        "without the base, and the library's"
    )
    np.testing.assert_allclose(told["told_s"], told["measured_s"], rtol=0.02)
    chosen = extrapolation.choices(told, by="told_s")
    assert chosen["regret"].max() < 0.03
    small = chosen[chosen["bytes"] == SIZES[0]]
    assert set(small["predicted"]) == {"steps:tree"} == set(small["measured"])
    with pytest.raises(UserError, match="no steps:ring of 4 ranks"):
        extrapolation.algorithms_told(made(TRUE), cores=2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (campaign(), "5 labs to fit as one"),
        (made(TRUE).assign(link_bits_per_s=0.0), "no rate is known"),
    ],
)
def test_what_is_not_one_lab_is_refused(rows: pd.DataFrame, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stepped_lab(rows)
    with pytest.raises(UserError, match="no lab to extrapolate from"):
        join_labs([], 2)
    with pytest.raises(UserError, match="no lab of 4 ranks"):
        extrapolation.told({}, 2)
