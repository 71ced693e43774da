"""Disturbed iterations: laws of what is foretold, of planning again, and links that change in earnest."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import group_ends, predict
from ddlkit.core.pace import Pace, in_turns
from ddlkit.core.plan import FusionPlan
from ddlkit.core.window import CUBIC, RENO, Control, Windows
from ddlkit.core.workload import Workload, straggler_factors
from ddlkit.model.calibration import Calibration, Communication
from ddlkit.model.disturbed import Disturbance, carried_share, foretell, wire_s_per_byte
from ddlkit.model.noise import Noise
from ddlkit.model.replanning import last_messages, refitted
from ddlkit.report import disturbances, source
from ddlkit.run.instruments.usage import Usage
from ddlkit.run.lab import emulated, network, tunnel
from ddlkit.run.lab.conditions import Background, Change, Conditions, parse_changes
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.replay import replay
from ddlkit.run.lab.script import ITERATIONS, keep_complete
from ddlkit.run.lab.shaper import Shaper, size_of
from ddlkit.run.sessions.replanning import Duel
from ddlkit.run.sessions.replanning import planned as planned_for
from places import TINY, alive, planned, ranks_below, wait_for
from test_lab_emulated import link_process, ping
from test_lab_network import traces

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


@pytest.mark.parametrize(
    ("changes", "told_"),
    [
        ("0s:rate=1gbit;0s", "write for example"),
        ("1s:loss=1%;0.5s:loss=0", "in the order of their times"),
        ("0s:rank=1", "changes nothing"),
    ],
)
def test_changes_that_cannot_be_are_refused(changes: str, told_: str) -> None:
    with pytest.raises(UserError, match=told_):
        parse_changes(changes)


def test_cases_that_cannot_change_are_refused_before_anything_runs() -> None:
    tbf, link = Lab(LabShape(2, 1e9)), Lab(LabShape(2, 1e9, conditions=Conditions(1e-3)))
    with pytest.raises(UserError, match="only emulated links change"):
        replay(tbf, 2, [planned("none", tbf, changes="0s:loss=1%")])
    with pytest.raises(UserError, match="no link of rank 7"):
        replay(link, 2, [planned("none", link, changes="0s:loss=1%,rank=7")])
    with pytest.raises(UserError, match="have it change before"):
        replay(link, 2, [planned("none", link, changes="9s:loss=1%")])


# -- links that change in each iteration -----------------------------------------------------------


def test_a_restored_link_is_as_in_the_beginning() -> None:
    size = size_of(1500)
    shaper = Shaper([1e7] * 2, Conditions(delay_s=1e-3))
    turns = Background(0.5, 1.0, 1.0)
    shaper.change([Change(0.0, 1e6, 0.1, jitter_s=0.05, background=turns)], 1.0)
    shaper.send(2.0, 0, 1, size, "slow")
    (slow,) = (at_s for at_s, _ in shaper.take(9.0))
    shaper.change([Change(1.0, 1e6)], 10.0)
    shaper.restore(10.0)  # and what was to come in a second does not
    shaper.send(11.5, 0, 1, size, "as ever")
    (fast,) = (at_s for at_s, _ in shaper.take(20.0))
    assert slow - 2.0 > 2 * 0.1 - 2 * 0.05
    assert fast - 11.5 == pytest.approx(2 * 1e-3 + 2 * size.bytes * 8 / 1e7, rel=0.51)


def test_a_link_whose_process_had_no_time_to_spare_did_not_do_as_asked() -> None:
    def answer(seconds: float, processor_s: float) -> dict[str, object]:
        ranks = [
            {"rank": 0} | {f"{way}_{n}": 0 for way in ("sent", "received") for n in tunnel.COUNTED}
        ]
        counts = {"late": [9, *[0] * len(tunnel.BINS)], "stray": 0, "refused": 0, "ranks": ranks}
        return {"seconds": seconds, "processor_s": processor_s, **counts}

    before = answer(0.0, 0.0) | {"late": [0] * (1 + len(tunnel.BINS))}
    for busy_s, held in ((0.5, True), (0.95, False)):
        after = answer(1.0, busy_s)
        crossing = emulated.Crossing.between(before, after)
        assert crossing.held is held and crossing.in_time == 1
        assert crossing.judged()["verdict"].startswith("as asked" if held else "late")
        assert Usage(0.1, 0.0, emulated.late_share(before, after)).limited is not held
    assert emulated.late_share({}, {}) == 0


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.usefixtures("require_emulated")
def test_a_case_changes_its_link_in_its_own_iterations_and_no_others() -> None:
    """A delay of 20 ms makes six messages of two steps take 0.48 s at least; the case beside it has none."""
    with Lab(LabShape(2, 1e9, conditions=Conditions(delay_s=1e-4))) as lab:
        slow = planned("none", lab, changes="0s:delay=20ms")
        found = replay(lab, 2, [slow, planned("none", lab)], rounds=3, spans=2)
    # Whatever else this machine does makes both longer: what is compared is of one run, and the shortest.
    took_s = found.runs.groupby("changes")["iteration_s"].min()
    assert took_s["0s:delay=20ms"] >= 6 * 2 * 2 * 20e-3
    assert took_s[""] < took_s["0s:delay=20ms"]
    assert set(found.timeline["repeat"]) == {0, 1}
    seen = last_messages(found.timeline, slow.case.key, 1)
    assert (seen["seconds"] >= 2 * 2 * 20e-3).all() and len(seen) == TINY.n


@pytest.mark.lab
@pytest.mark.alone
@pytest.mark.usefixtures("require_emulated")
class TestFaults:
    def test_a_link_killed_in_mid_replay_costs_one_iteration_and_leaves_nothing(
        self, tmp_path: Path
    ) -> None:
        """Its ranks end with one line; namespaces, processes and locks are gone; the rest is played."""
        shape = LabShape(2, 1e9, conditions=Conditions(delay_s=1e-3))

        def kill_link(label: str) -> None:
            done = tmp_path / ITERATIONS
            assert wait_for(lambda: done.exists() and done.read_text().count("\n") > 3)
            link_process(label).kill()

        with Lab(shape) as lab:
            cases = [planned("none", lab, changes="0s:rate=500mbit"), planned("single", lab)]
            killer = threading.Thread(target=kill_link, args=[lab.label])
            killer.start()
            with pytest.raises(UserError, match="process of the emulated link .* gone") as raised:
                replay(lab, 2, cases, rounds=500, out=tmp_path)
            killer.join()
            assert "\n" not in str(raised.value) and alive(ranks_below(os.getpid())) == []
        assert traces(lab.label) == []
        with open(network.STATE / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = len(keep_complete(tmp_path))
        assert kept >= 2
        with Lab(shape) as lab:
            found = replay(lab, 2, cases, rounds=kept, out=tmp_path)
        assert len(found.runs) == len(found.runs[["case", "repeat"]].drop_duplicates()) >= 2 * kept

    def test_a_rank_that_dies_in_mid_change_leaves_the_link_as_it_was(self) -> None:
        def kill_one() -> None:
            assert wait_for(lambda: len(ranks_below(os.getpid())) == 2)
            time.sleep(2.0)
            ranks_below(os.getpid())[-1].kill()

        with Lab(LabShape(2, 1e9, conditions=Conditions(delay_s=1e-3))) as lab:
            threading.Thread(target=kill_one).start()
            slow = planned("none", lab, changes="0s:delay=300ms")
            with pytest.raises(UserError, match="was killed by SIGKILL"):
                replay(lab, 2, [slow], rounds=500)
            assert wait_for(lambda: ping(lab, 0, 1, 1)[0] < 4 * 300e-3), "for ever slow"
        assert traces(lab.label) == []

    def test_a_queue_that_is_full_drops_and_a_replay_comes_through_all_the_same(self) -> None:
        small = Conditions(delay_s=1e-3, queue_bytes=128 * 1024)
        with Lab(LabShape(2, 1e8, conditions=small)) as lab, lab.watched() as seen:
            work = Workload.from_arrays(0.02, [0.02], [4_000_000])
            found = replay(lab, 2, [planned("none", lab, work)], rounds=1)
        row = seen[0].ranks.sum()
        assert len(found.runs) == 1 and row["sent_dropped"] + row["received_dropped"] > 0
        assert (seen[0].ranks["sent_most_queued_bytes"] <= 128 * 1024).all()

    def test_a_rate_that_no_process_carries_is_marked(self) -> None:
        # A second and more: of a short one, what is around it counts as rest of the link's process.
        work = Workload.from_arrays(0.01, [0.01], [800_000_000])
        with Lab(LabShape(2, 1e11, conditions=Conditions())) as lab:
            runs = replay(lab, 2, [planned("none", lab, work)], rounds=4).runs
        assert runs["processor_limited"].any(), (
            "not each: a process that waits for ranks is not busy"
        )


# -- the duel of plans -----------------------------------------------------------------------------


def test_a_duel_plans_for_both_rates_and_says_what_changes() -> None:
    profile = store.read_profile(store.RECORDED / "cpu-2x-amd-epyc" / "layers-googlenet-b4-r1.csv")
    lab = LabShape(4, 1e9, conditions=Conditions(delay_s=2e-3))
    duel = Duel(profile, lab, 0.25, compute_s=1.5, watched=3, rounds=10)
    assert duel.rates == (1e9, 2.5e8)
    assert [duel.changes(rate) for rate in duel.rates] == ["", "0s:rate=250mbit"]
    assert duel.shape(2.5e8).link == "emulated:250mbit-delay2ms"
    costs = {rate: AlphaBeta(28e-3, 12 / rate / 0.92, workers=4) for rate in duel.rates}
    fast, slow = planned_for(duel, costs).values()
    assert len(fast.ends) > len(slow.ends), "bytes that take longer leave less time for start-ups"
    sent = fast.group_bytes(profile.workload())
    again = refitted(costs[1e9], sent, costs[2.5e8](sent))
    work = profile.workload().scaled(duel.compute_s / profile.workload().compute_s)
    made = planned_for(duel, {2.5e8: again})[2.5e8]
    took_s, best_s = (predict(work, one, costs[2.5e8]).iteration_s for one in (made, slow))
    assert took_s == pytest.approx(best_s, rel=1e-3), "messages tell all of a line"


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
