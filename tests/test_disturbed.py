"""Disturbed iterations: laws of what is foretold, of planning again, and links that change in earnest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import group_ends
from ddlkit.core.pace import Pace, in_turns
from ddlkit.core.plan import FusionPlan
from ddlkit.core.straggler import straggler_factors
from ddlkit.core.window import CUBIC, RENO, Control, Windows
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration, Communication
from ddlkit.model.disturbed import Disturbance, carried_share, foretell, wire_s_per_byte
from ddlkit.model.noise import Noise
from ddlkit.model.replanning import last_messages, refitted
from ddlkit.report import disturbances, source
from ddlkit.run.lab.conditions import Conditions
from ddlkit.run.lab.network import Lab, LabShape
from places import planned

ALPHA_S, BETA = 1e-3, 2e-8
COST = AlphaBeta(ALPHA_S, BETA, workers=4, algorithm="ring")
SIZES = np.repeat(np.geomspace(1e4, 4e7, 12), 2)
QUIET = Noise.of(SIZES, COST(SIZES), np.tile([0, 1], 12))
KNOWN = Communication(COST, [COST] * 4, noise=QUIET)
WORK = Workload.from_arrays(0.1, [0.05] * 8, [2_000_000] * 8, update_s=0.01)
EACH = FusionPlan("none", tuple(range(1, 9)))

times = st.floats(1e-3, 5.0)
messages = st.lists(st.tuples(times, times, st.floats(0, 1)), min_size=1, max_size=8)
shares = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4)


def arrays(drawn: list[tuple[float, float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ready, alone, bytes_share = np.array(drawn).T
    return np.cumsum(ready), alone, alone * bytes_share


# -- a link that has a share of its rate -----------------------------------------------------------


@given(messages, st.floats(0.05, 1.0), st.floats(0.1, 20.0))
def test_a_rate_that_changes_to_itself_changes_nothing(
    drawn: list[tuple[float, float, float]], share: float, at_s: float
) -> None:
    ready, alone, wire = arrays(drawn)
    whole = Pace((0.0,), (share,)).ends(ready, alone, wire)
    cut = Pace((0.0, at_s), (share, share)).ends(ready, alone, wire)
    assert np.allclose(whole, cut, rtol=1e-9)
    assert np.allclose(whole, group_ends(ready, alone + wire * (1 / share - 1)), rtol=1e-12)


@given(messages, shares)
def test_the_link_is_busy_for_as_many_bytes_as_there_are(
    drawn: list[tuple[float, float, float]], given_shares: list[float]
) -> None:
    """Of messages that are bytes alone and all ready, the area under the share is what they need."""
    alone = np.array(drawn)[:, 1]
    edges = (0.0, *np.cumsum(np.linspace(0.5, 1.5, len(given_shares) - 1)).tolist())
    pace = Pace(edges, tuple(given_shares))
    ends = pace.ends(np.zeros_like(alone), alone, alone)
    for end, needed in zip(ends, np.cumsum(alone), strict=True):
        spans = np.diff(np.minimum([*edges, np.inf], end))
        assert spans @ np.array(given_shares) == pytest.approx(needed, rel=1e-9)


@given(messages, st.floats(0.05, 0.9), st.floats(0.01, 2.0), st.floats(0.01, 2.0), times)
def test_turns_lie_between_their_share_and_the_whole_rate(
    drawn: list[tuple[float, float, float]], low: float, on_s: float, off_s: float, phase_s: float
) -> None:
    ready, alone, wire = arrays(drawn)
    until_s = float(ready[-1] + alone.sum() / low)
    turns = in_turns(low, on_s, off_s, phase_s, until_s)
    ends = turns.ends(ready, alone, wire)
    tiny = 1 + 1e-9
    assert np.all(Pace().ends(ready, alone, wire) <= ends * tiny)
    assert np.all(ends <= Pace((0.0,), (low,)).ends(ready, alone, wire) * tiny)
    assert turns.at_s[-1] <= until_s + on_s + off_s


@pytest.mark.parametrize(
    ("at_s", "given_shares"), [((1.0,), (1.0,)), ((0.0, 0.0), (1.0, 0.5)), ((0.0,), (0.0,))]
)
def test_a_pace_that_cannot_be_is_refused(
    at_s: tuple[float, ...], given_shares: tuple[float, ...]
) -> None:
    with pytest.raises(UserError, match="pace: shares"):
        Pace(at_s, given_shares)


# -- what is foretold ------------------------------------------------------------------------------


def told(**disturbance: object) -> np.ndarray:
    return np.sort(foretell(WORK, EACH, KNOWN, Disturbance(**disturbance)).seconds)  # type: ignore[arg-type]


def test_without_disturbance_it_is_the_recursion() -> None:
    ends = group_ends(np.array(WORK.ready_s), np.full(8, COST(2e6)))
    assert told() == pytest.approx(ends[-1] + WORK.update_s)


def test_a_calibrated_lines_slope_is_its_bytes() -> None:
    assert wire_s_per_byte(KNOWN) == pytest.approx(BETA, rel=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_slow_link_stretches_bytes_and_nothing_else(share: float) -> None:
    slow = AlphaBeta(ALPHA_S, BETA / share, workers=4)
    ends = group_ends(np.array(WORK.ready_s), np.full(8, slow(2e6)))
    assert told(shares=(share,)) == pytest.approx(ends[-1] + WORK.update_s)
    assert told(load=1 - share) == pytest.approx(told(shares=(share,)))


def test_a_change_in_mid_iteration_lies_between_before_and_after() -> None:
    change = told(at_s=(0.0, 0.3), shares=(1.0, 0.5))
    assert told()[0] < change[0] < told(shares=(0.5,))[0]


def test_the_square_root_law_and_its_limits() -> None:
    slow = carried_share(0.01, 2e-3, 5e8, "cubic")
    assert carried_share(0.0025, 2e-3, 5e8, "cubic") == pytest.approx(2 * slow)
    assert carried_share(0.01, 4e-3, 5e8, "cubic") == pytest.approx(slow / 2)
    assert carried_share(0.01, 2e-3, 1e6, "cubic") == carried_share(0.01, 2e-3, 5e8, "bbr") == 0.99
    assert carried_share(0.0, 2e-3, 5e8, "cubic") == 1


def test_what_is_lost_costs_time_and_the_more_the_longer() -> None:
    how = {"round_trip_s": 2e-3, "rate_bits_per_s": 5e8}
    medians = [
        np.median(told(loss=loss, congestion=control, **how))
        for control, loss in [("bbr", 0.0), ("bbr", 0.01), ("cubic", 0.01), ("cubic", 0.1)]
    ]
    assert medians == sorted(medians) and medians[0] < medians[1] < medians[2]


def test_jitter_makes_later_in_the_mean_and_by_no_more_than_all_of_it() -> None:
    jitter_s, steps = 1e-4, 6
    late = told(jitter_s=jitter_s) - told()
    assert 0 < late.mean() <= len(EACH.ends) * steps * 2 * jitter_s


def test_a_straggler_is_drawn_by_seed_and_number_as_its_law_says() -> None:
    factors = straggler_factors(1.4, 0.5, 3, range(4000))
    assert np.array_equal(factors[7:9], straggler_factors(1.4, 0.5, 3, [7, 8]))
    assert not np.array_equal(factors[:9], straggler_factors(1.4, 0.5, 4, range(9)))
    logs = np.log((factors - 1) / 0.4)
    assert abs(logs.mean()) < 4 * 0.5 / np.sqrt(4000) and logs.std() == pytest.approx(0.5, rel=0.05)
    assert np.all(factors > 1)
    with pytest.raises(UserError, match="at least 1"):
        straggler_factors(0.9, 0.5, 3, [0])


def test_a_straggler_at_random_is_foretold_as_it_is_drawn() -> None:
    """Where messages hide behind compute, the iteration is what the slowest computes and the last message."""
    found = foretell(WORK, EACH, KNOWN, Disturbance(straggler=1.4, spread=0.5), draws=500)
    last_s = COST(2e6)
    drawn = 1 + 0.4 * np.exp(0.5 * np.random.default_rng(5).standard_normal(500))
    distance = disturbances.kolmogorov(found.seconds, drawn * WORK.compute_s + last_s)
    assert distance.distance < distance.critical


def test_the_distance_of_equal_samples_exceeds_its_critical_value_in_a_twentieth() -> None:
    rng = np.random.default_rng(2)
    beyond = [
        found.distance > found.critical
        for found in (
            disturbances.kolmogorov(rng.normal(size=40), rng.normal(size=500)) for _ in range(400)
        )
    ]
    assert 0.01 <= np.mean(beyond) <= 0.08
    assert disturbances.kolmogorov([1, 2], [1, 2]).distance == 0


@pytest.mark.parametrize("control", [RENO, CUBIC])
@pytest.mark.parametrize("loss", [0.001, 0.01])
def test_a_long_flow_of_windows_gets_what_the_square_root_law_says(
    loss: float, control: Control
) -> None:
    """Where packets take no time on the link; windows of a few packets lose more than one at once."""
    flow = Windows(np.full((20, 1), 30.0), loss, 1.0, 0.0, control)
    chance, packets = np.random.default_rng(1), 20_000
    flow.send(packets, chance)
    per_trip = packets / flow.send(packets, chance).mean()
    assert per_trip == pytest.approx(np.sqrt(1.5 / loss), rel=0.15)


def test_without_loss_windows_grow_until_the_link_is_full() -> None:
    flow = Windows(np.full(1, 1000.0), 0.0, 1e-3, 1e-3)
    took_s = flow.send(10_000, np.random.default_rng(0))
    assert took_s == pytest.approx(10.0, rel=0.01) and flow.packets[0] > 1000


def test_a_step_waits_for_the_slowest_of_its_links() -> None:
    one, four = (Windows(np.full((50, n), 30.0), 0.01, 1e-3, 1e-5) for n in (1, 4))
    times = [flow.step(2000, np.random.default_rng(3)).mean() for flow in (one, four)]
    assert times[0] < times[1]


def test_played_windows_take_longer_than_their_law_and_leave_bbr_alone() -> None:
    def median_s(control: str, windows: bool) -> float:
        how = Disturbance(loss=0.01, round_trip_s=2e-3, rate_bits_per_s=5e8, congestion=control)
        return foretell(WORK, EACH, KNOWN, how, draws=20, windows=windows).median_s

    assert median_s("cubic", True) > median_s("cubic", False)
    assert median_s("bbr", True) == median_s("bbr", False)


# -- planning again --------------------------------------------------------------------------------


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0))
def test_messages_of_two_sizes_tell_a_line_that_has_changed(start: float, slope: float) -> None:
    now, seen = AlphaBeta(start * ALPHA_S, slope * BETA, workers=4), np.array([2e5, 2e5, 8e6])
    found = refitted(COST, seen, now(seen))
    sizes = np.array([2.0**k for k in range(12, 28)])
    assert found(sizes) == pytest.approx(now(sizes), rel=1e-6)
    assert (found.collective, found.workers, found.algorithm) == ("all_reduce", 4, "ring")


def test_messages_of_one_size_tell_the_bytes_alone() -> None:
    slow = AlphaBeta(ALPHA_S, 4 * BETA, workers=4)
    assert refitted(COST, [4e6, 4e6], slow([4e6, 4e6]))(2.0**20) == pytest.approx(slow(2.0**20))
    with pytest.raises(UserError, match="no message"):
        refitted(COST, [], [])


def test_the_last_messages_are_those_of_the_last_iterations_of_one_rank() -> None:
    rows = [
        {
            "case": case,
            "repeat": repeat,
            "rank": rank,
            "stream": stream,
            "start_s": 1.0,
            "end_s": 1.5 + repeat,
            "bytes": 8,
        }
        for case in ("a", "b")
        for repeat in range(3)
        for rank in (0, 1)
        for stream in ("compute", "communication")
    ]
    found = last_messages(pd.DataFrame(rows), "a", 2)
    assert found["seconds"].tolist() == [1.5, 2.5] and found["bytes"].tolist() == [8, 8]
    with pytest.raises(UserError, match="no message times"):
        last_messages(pd.DataFrame(rows), "c", 2)


# -- what a case says ------------------------------------------------------------------------------


def played(changes: list[str], took_s: list[float], link: str) -> pd.DataFrame:
    case: dict[str, Any] = {
        "kind": "replay",
        "network": "n",
        "device": "cpu",
        "batch": 1,
        "workers": 4,
        "link": link,
    }
    case |= {"link_bits_per_s": 5e8, "collective": "all_reduce", "plan": "ddp", "ends": "1"}
    rows = [{**vars(Case(**case, changes=one, seed=k))} for k, one in enumerate(changes)]
    return pd.DataFrame(rows).assign(iteration_s=took_s, case=[str(k) for k in range(len(rows))])


def test_the_reference_is_what_came_before_any_loss_on_each_link() -> None:
    lossy, names = (
        "0s:loss=1%",
        ["emulated:500mbit-delay1ms-cubic", "emulated:500mbit-delay1ms-bbr"],
    )
    cubic = played(["", "", lossy, "", lossy, ""], [1.0, 2.0, 9.0, 3.0, 9.0, 1.5], names[0])
    bbr = played(["", lossy, ""], [4.0, 9.0, 4.0], names[1])
    runs = pd.concat([cubic, bbr], ignore_index=True)
    before = disturbances.before_loss(runs)
    assert before["iteration_s"].to_list() == [1.0, 2.0, 4.0]
    after = disturbances.after_loss(runs).set_index("congestion")
    assert after.loc["cubic", "ratio"].to_list() == [2.0, 1.0]
    assert after.loc["cubic", "after"].to_list() == [1, 2]
    assert after.loc["bbr", "ratio"] == 1
    pd.testing.assert_frame_equal(disturbances.before_loss(before), before)
    with pytest.raises(UserError, match="record campaign_calm.yml"):
        disturbances.after_loss(before)


def test_a_case_says_its_disturbance_and_has_a_name_for_it() -> None:
    case = replace(
        planned("none", Lab(LabShape(4, 5e8, conditions=Conditions(5e-4, congestion="bbr")))).case,
        workers=4,
    )
    found = disturbances.disturbance_of(replace(case, changes="0s:rate=125mbit,rank=3"))
    assert (found.at_s, found.shares, found.round_trip_s) == ((0.0,), (0.25,), 2e-3)
    changes = {
        "": "none, bbr",
        "0s:rate=125mbit,rank=3": "one link at 1/4",
        "0.3s:rate=250mbit": "all links at 1/2 in mid-iteration",
        "0s:background=80%:100ms/100ms": "others 80%, 100 ms on and off",
        "0s:loss=0.1%": "loss 0.1%, bbr",
        "0s:jitter=0.5ms": "jitter 0.5 ms",
    }
    for change, name in changes.items():
        assert disturbances.name_of(replace(case, changes=change)) == name
    assert case.key != replace(case, changes="0s:loss=1%").key


# -- as it was recorded ----------------------------------------------------------------------------


def test_every_recorded_disturbance_is_judged_and_what_fails_stays() -> None:
    recording = source.open_campaign("", source.DISTURBED)
    runs, rows = recording.alone.table("runs"), recording.alone.table("collectives")
    assert (rows.groupby("link")["session"].nunique() == 2).all(), "drift is known"
    found = disturbances.judged(runs, recording.workloads(), Calibration.of(rows, draws=50))
    assert found["iterations"].sum() == len(runs), "no iteration is left out"
    off = found["relative_error"].abs() > disturbances.FAILS
    assert (found["fails"] == (off | ~found["inside"])).all()
    kinds = disturbances.by_kind(found).set_index("kind")
    assert kinds["cases"].sum() == len(found)
    wanted = ["none", "one link slower", "all links slower", "others", "jitter", "loss, cubic"]
    assert {*wanted, "all links slower in mid-iteration", "straggler at random"} <= set(kinds.index)
    straggler = found[found["disturbance"] == "straggler at random"].iloc[0]
    assert straggler["iterations"] >= 30 and 0 < straggler["distance"] < 1
