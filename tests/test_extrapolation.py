"""Costs carried to labs that were not calibrated: made labs come out exactly, recorded ones as is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.cost import Stepped
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, held_out_errors
from ddlkit.core.lablink import read_link
from ddlkit.core.schedule import ALGORITHMS, Schedule
from ddlkit.model.extrapolation import (
    AS_GOOD,
    WAITING,
    Law,
    carried_to,
    join_labs,
    played_s,
    ring_at,
    ring_labs,
    stepped_lab,
)
from ddlkit.report import extrapolation, source

SIZES = 2.0 ** np.arange(10, 25)
TRUE = Stepped(1e-4, 8.4e-9, workers=4, rate_bits_per_s=1e9, saves=True, core_share=0.37)
LABS = [(2, 1e9), (4, 1e9), (4, 5e8), (8, 1e9), (16, 2e8)]
PLAN = Path(__file__).parents[1] / "examples" / "labs_fresh_again.yml"
LATE = "emulated:200mbit-delay1ms"


def made(cost: Stepped, link: str = "") -> pd.DataFrame:
    """A collectives table of this cost, each size three times, without scatter."""
    sizes = np.repeat(SIZES, 3)
    rate = cost.rate_bits_per_s
    labels: dict[str, Any] = {"collective": "all_reduce", "algorithm": cost.algorithm}
    labels |= {"link": link or f"lab:{rate / 1e6:g}mbit", "link_bits_per_s": rate, "in_flight": 1}
    labels |= {"messages_per_sample": 1, "stolen": 0.0}
    return pd.DataFrame({**labels, "ranks": cost.workers, "bytes": sizes, "seconds": cost(sizes)})


def campaign(cost: Stepped = TRUE) -> list[pd.DataFrame]:
    return [made(cost.at(workers=p, rate_bits_per_s=rate)) for p, rate in LABS]


def rings(labs: list[tuple[str, int]]) -> pd.DataFrame:
    """A collectives table of gloo's own ring in those labs."""
    values = np.array([np.log(1.2e-4), 0.01, np.log(0.3)])
    frames = []
    for link, ranks in labs:
        ring = ring_at(values, link, ranks)
        known = {"link": link, "ranks": ranks, "link_bits_per_s": ring.rate_bits_per_s}
        known |= {"algorithm": "ring", "collective": "all_reduce", "in_flight": 1, "stolen": 0.0}
        sizes = np.repeat(SIZES, 3)
        table = {"bytes": sizes, "seconds": ring(sizes), "messages_per_sample": 1}
        frames.append(pd.DataFrame({**table, **known}))
    return pd.concat(frames)


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
    labs = [stepped_lab(rows) for rows in campaign(true)]
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


def test_labs_that_follow_the_law_are_told_from_one_and_from_the_others() -> None:
    emulated = [("emulated:500mbit-delay0.5ms", 4), ("emulated:500mbit-delay2ms", 4)]
    labs = [("lab:1gbit", 4), ("lab:500mbit", 8), ("lab:1gbit", 2), *emulated, (LATE, 8)]
    found = extrapolation.told(rings([*labs, ("emulated:1gbit-delay0ms", 2)]), cores=2)
    table = extrapolation.summary(found)
    assert set(table["way"]) == set(extrapolation.WAYS)
    assert set(table["kind"]) == {"tbf", "emulated"}, "nothing else is like a link without delay"
    assert len(table) == 2 * len(labs) - 2, "a base is told from the others only"
    assert len(found) == len(table) * SIZES.size
    assert table["well"].all() and table["byte_error"].abs().max() < 0.03
    off = table["predicted_step_s"] / table["measured_step_s"] - 1
    # One lab alone does not tell how software waits for cores.
    assert off.abs().groupby(table["way"]).median()["others"] < 0.05
    parts = found[["software_s", "delay_s", "bytes_s"]].sum(axis=1)
    np.testing.assert_allclose(parts, found["predicted_s"], rtol=1e-9)


def test_the_round_trip_is_told_by_two_labs_of_different_delay() -> None:
    labs = [(f"emulated:500mbit-delay{delay}ms", ranks) for delay in (2, 0.5) for ranks in (2, 8)]
    found = extrapolation.round_trips(rings([*labs, (LATE, 3), ("lab:1gbit", 2)]))
    assert list(found["ranks"]) == [2, 8]
    np.testing.assert_allclose(found["measured"], found["predicted"], rtol=0.01)


def test_labs_that_follow_the_law_confirm_it() -> None:
    known = rings([("emulated:500mbit-delay0.5ms", 4), ("emulated:500mbit-delay2ms", 2), (LATE, 8)])
    fresh = rings([("emulated:300mbit-delay1ms", 5), ("emulated:1gbit-delay3ms", 3)])
    found = extrapolation.confirmed(fresh, known, cores=2)
    assert len(found) == 2 * SIZES.size and found["off"].max() < 0.02
    assert (found["low_s"] <= found["predicted_s"] * 1.001).all()
    slow = extrapolation.confirmed(fresh.assign(seconds=2 * fresh["seconds"]), known, cores=2)
    assert not slow["inside"].any() and slow["off"].min() > 0.4
    with pytest.raises(UserError, match="no lab of equal links to confirm by"):
        extrapolation.confirmed(known.assign(link="loopback"), known, cores=2)


def test_what_decides_a_size_is_read_off_the_lab_itself() -> None:
    labs = [("lab:1gbit", 4), ("lab:1gbit", 8)]
    found = extrapolation.told(rings(labs), cores=2).query("ranks == 8 and way == 'others'")
    assert [*dict.fromkeys(found["decides"])] == ["start-up", "knee", "bytes"]


def test_labs_of_nodes_gathers_steps_and_several_messages_are_left_out() -> None:
    whole = rings([("lab:1gbit", 4)])
    others = [
        whole.assign(link="lab:500mbit-g4-2gbit"),
        whole.assign(link="emulated:1gbit-delay1ms-loss0.01"),
        whole.assign(ranks=3, in_flight=2),
        whole.assign(ranks=6, collective="all_gather"),
        whole.assign(ranks=5, algorithm="steps:ring"),
        whole.assign(link="loopback"),
    ]
    found = ring_labs(pd.concat([whole, *others]))
    assert [(lab.link, lab.workers) for lab in found] == [("lab:1gbit", 4)]


def test_recorded_labs_are_told_from_one_another() -> None:
    """The first campaign's, of one day, that know no delay: all but the slowest start-ups of 16 ranks."""
    rows = source.open_campaign("").table("collectives")
    table = extrapolation.summary(extrapolation.told(rows, cores=2)).query("way == 'others'")
    assert (table["median"] <= extrapolation.WELL).mean() >= 0.7
    assert table["median, bytes"].max() < extrapolation.WELL / 2


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_credit_a_cost_played_out_is_the_cost(name: str) -> None:
    """And with as much as a step's software, that of a ring is the longer of software and bytes."""
    cost = replace(TRUE, saves=False).at(workers=8, algorithm=name)
    assert played_s(cost, 1e6, 3) == pytest.approx(cost(1e6), rel=1e-9)
    assert played_s(cost, 1e6, 3, burst_s=1e-3) < cost(1e6)
    if name == "ring":
        saving = replace(cost, saves=True)
        assert played_s(cost, 1e7, 200, burst_s=2e-3) == pytest.approx(saving(1e7), rel=1e-3)


@pytest.mark.parametrize("link", ["lab:1gbit", LATE])
def test_algorithms_that_follow_the_law_are_told_from_one_ring(link: str) -> None:
    """The software of two cores, as is assumed where one lab is all there is."""
    named = read_link(link)
    true = replace(TRUE, core_share=0.5, saves=named.burst_s > 0).at(
        rate_bits_per_s=named.rate_bits_per_s, delay_s=named.delay_s
    )
    tables = [
        made(true.at(workers=ranks, algorithm=f"steps:{name}"), link)
        for ranks in (4, 6)
        for name in ALGORITHMS
    ]
    rows = pd.concat([*tables, made(TRUE)])
    told = extrapolation.algorithms_told(rows, cores=2, base=(link, 4))
    assert len(told) == (2 * len(ALGORITHMS) - 1) * SIZES.size, (
        "without the base, and the library's"
    )
    np.testing.assert_allclose(told["told_s"], told["measured_s"], rtol=0.02)
    chosen = extrapolation.choices(told, by="told_s")
    assert chosen["regret"].max() < 0.03
    assert (chosen["always"].dropna() >= 0).all() and chosen["always"].max() > 0.3
    small = chosen[chosen["bytes"] == SIZES[0]]
    assert set(small["predicted"]) == set(small["measured"])
    with pytest.raises(UserError, match="no steps:ring of 4 ranks over lab:1gbit"):
        extrapolation.algorithms_told(made(TRUE), cores=2, base=("lab:1gbit", 4))


def test_steps_sent_one_by_one_take_one_way_more() -> None:
    """Word from the receivers, once a message; played out for every algorithm of equal ranks."""
    for name in ALGORITHMS:
        cost = Stepped(0.0, 1e-15, workers=8, algorithm=f"steps:{name}", delay_s=1e-3)
        whole_s = 2e-3 * (Schedule.of(name, 8).counts.steps + 1)
        assert cost(8) == pytest.approx(whole_s)
        assert played_s(cost.at(delay_s=2e-3), 8) == pytest.approx(2 * whole_s)
        if name != "tree":  # whose leaves have begun the next before its root has
            assert played_s(cost, 8, messages=3) == pytest.approx(whole_s)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pd.concat(campaign()), "5 labs to fit as one"),
        (made(TRUE, "loopback"), "is no lab's link"),
    ],
)
def test_what_is_not_one_lab_is_refused(rows: pd.DataFrame, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stepped_lab(rows)
    with pytest.raises(UserError, match="no lab to extrapolate from"):
        join_labs([], 2)
    with pytest.raises(UserError, match="no lab of equal links"):
        extrapolation.told(made(TRUE, "loopback"), 2)


DELAYED = [
    ("emulated:500mbit-delay2ms", 2),
    ("emulated:500mbit-delay0.1ms", 4),
    ("emulated:1gbit-delay1ms", 8),
]


def woken_labs(labs: list[tuple[str, int]], law: Law, software_s: float = 1.2e-4) -> pd.DataFrame:
    """A collectives table of gloo's ring in those labs by a law."""
    frames = []
    for link, ranks in labs:
        ring = ring_at(np.array([np.log(software_s), 0.01, np.log(0.4)]), link, ranks, law)
        sizes = np.repeat(SIZES, 3)
        rows = {"link": link, "ranks": ranks, "link_bits_per_s": ring.rate_bits_per_s}
        frames.append(pd.DataFrame({"bytes": sizes, "seconds": ring(sizes), **rows}))
    of = {"algorithm": "ring", "collective": "all_reduce", "in_flight": 1, "stolen": 0.0}
    return pd.concat(frames).assign(**of, messages_per_sample=1)


@pytest.mark.parametrize("line", [(1e-4, 0.05), (0.0, 0.0), (3e-4, 0.2)])
def test_what_echoes_tell_is_found_and_labs_with_it_are_told(line: tuple[float, float]) -> None:
    """Labs made of the law come out to rounding, told from the others; another law is off."""
    delays = np.array([read_link(link).delay_s for link, _ in DELAYED])
    crossed = pd.DataFrame({"delay_s": delays, "beyond_s": line[0] + line[1] * delays})
    still = pd.DataFrame({"delay_s": [0.0], "beyond_s": [9.9]})
    crossed = pd.concat([crossed, still])
    assert extrapolation.waking(crossed) == pytest.approx(line, abs=1e-12)
    law = extrapolation.woken(crossed)
    assert law.waking == pytest.approx(line[1], abs=1e-12) and not law.waits
    labs = woken_labs(DELAYED, law)
    own = extrapolation.told(labs, 2, (), law)
    assert own["error"].abs().max() < 1e-4
    other = extrapolation.told(labs, 2, (), law._replace(waking=line[1] + 0.5))
    assert extrapolation.summary(other)["median"].max() > 1e-2


@given(st.floats(0, 0.3), st.floats(1e-4, 5e-3), st.integers(2, 16))
def test_a_law_adds_its_waking_to_round_trips_and_takes_waiting_away(
    waking: float, delay_s: float, ranks: int
) -> None:
    """A small message's round trips are longer by waking x delay each; none waits where the law says so."""
    values, link = (
        np.array([np.log(2e-4), 0.0, np.log(0.5)]),
        f"emulated:1gbit-delay{delay_s * 1e3:.6f}ms",
    )
    plain, woken = (
        ring_at(values, link, ranks, law) for law in (Law(0.0, False), Law(waking, False))
    )
    trips = 2 * (ranks - 1)
    delay_s = read_link(link).delay_s
    assert woken(0.0) - plain(0.0) == pytest.approx(trips * waking * delay_s, rel=1e-9, abs=1e-15)
    assert plain(0.0) == pytest.approx(trips * (2e-4 + 4 * delay_s))
    waiting = ring_at(values, link, ranks, Law(waking))
    assert waiting(0.0) - woken(0.0) == pytest.approx(
        trips * 2e-4 * (max(1, ranks / 2) - 1), abs=1e-12
    )


def test_the_old_law_is_that_which_was_always_used() -> None:
    """Where nothing is said; and over links without delay, whatever is said."""
    rows, law = (
        rings([("lab:1gbit", 4), ("lab:500mbit", 2), ("emulated:1gbit-delay1ms", 4)]),
        Law(9.0, False),
    )
    links = ["lab:200mbit", "emulated:500mbit-delay2ms"]
    plain, old, other = (
        carried_to(rows, [(link, 8) for link in links], cores=2, **how)
        for how in ({}, {"law": WAITING}, {"law": law})
    )
    for link in links:
        key = (link, 8, "all_reduce")
        costs = [one.known[key].cost(SIZES) for one in (plain, old, other)]
        assert np.array_equal(costs[0], costs[1])
        assert np.array_equal(costs[0], costs[2]) == link.startswith("lab:")


def test_what_is_foretold_is_written_read_and_judged(tmp_path: Path) -> None:
    """Sizes are those of a plan; measured ones may be rounded up to the ranks, and no further."""
    plan = tmp_path / "labs.yml"
    plan.write_text("points:\n- {ranks: [3, 5], rate: 300mbit, delay: 1ms, sizes: [1KiB, 64KiB]}\n")
    labs = extrapolation.planned_labs(plan)
    link = "emulated:300mbit-delay1ms"
    assert [*labs] == [(link, 3), (link, 5)] and labs[link, 3].tolist() == [1024, 65536]
    law = Law(0.1, waits=False)
    known = woken_labs([*DELAYED, (LATE, 8)], law)
    by = dict(zip(extrapolation.MODELS, [(known, WAITING), (known, law)] * 2, strict=True))
    path = extrapolation.foretell(labs, by, 2, tmp_path)
    said = extrapolation.foretold(store.load_table(path))
    assert len(said) == 4 * 2 * 2 and (said["low_s"] <= said["high_s"]).all()
    truth = woken_labs([*labs], law)
    truth = truth[truth["bytes"].isin([1024, 65536])].assign(bytes=lambda rows: rows["bytes"] + 8)
    judged = extrapolation.against(said, truth)
    table = extrapolation.verdicts(judged).set_index("model")
    assert len(judged) == len(said) and (table["labs"] == 2).all()
    assert table.loc["woken", "median"] < 1e-3 < table.loc["waiting", "median"]
    assert table["nearer"].tolist() == [0, 2, 0, 2] and table.loc["woken", "inside"] == 1
    far = truth.assign(bytes=truth["bytes"] * 1.1)
    assert extrapolation.against(said, far).empty


def test_recorded_labs_were_foretold_before_and_are_as_was_said() -> None:
    """The table's commit came before; here, that it holds every lab and size that was then measured."""
    again = source.open_labs("", source.AGAIN_LABS)
    said, plan = extrapolation.foretold(again.table("predicted")), PLAN
    asked = extrapolation.planned_labs(plan)
    assert {(row.link, row.ranks) for row in said.itertuples()} == set(asked)
    judged = extrapolation.against(said, again.table("collectives"))
    assert len(judged) == len(said)
    table = extrapolation.verdicts(judged).set_index("model")
    assert (table.loc[["waiting", "woken"], "median"] <= extrapolation.WELL).all()
    assert table.loc["woken", "nearer"] > len(asked) / 2
