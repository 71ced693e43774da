"""Laws of replay: never faster than compute or wire, nothing lost, and nothing left behind."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import FRAMING
from ddlkit.core.units import MIB
from ddlkit.core.workload import Workload
from ddlkit.jobs.launch import Loopback
from ddlkit.jobs.vitals import Usage
from ddlkit.lab.network import Lab, LabShape
from places import TINY, planned, ranks_below, sent_by, wait_for
from strategies import plans, workloads
from workbook.record import replay
from workbook.record.replay import ITERATIONS, Script, append_iteration, keep_complete


def random_times(script: Script, rng: np.random.Generator, ranks: int) -> np.ndarray:
    """What ranks might see: they wake late, posting takes time, collectives follow one another."""
    rows = []
    for _ in range(ranks):
        late_s = rng.exponential(1e-3, (3, len(script.ready_s)))
        awake_s = np.maximum.accumulate(script.ready_s + late_s[0])
        done_s = np.maximum.accumulate(awake_s + late_s[1]) + np.cumsum(late_s[2])
        groups = (awake_s, awake_s, awake_s + 1e-9, done_s)
        ends = script.forward_s, done_s[-1], done_s[-1] + script.update_s
        rows.append(np.hstack([*groups, ends]))
    return np.array(rows)


@given(st.data(), st.floats(0.1, 100))
def test_dilation_stretches_time_and_leaves_bytes(
    data: st.DataObject, k: float
) -> None:
    workload = data.draw(workloads())
    plan = data.draw(plans(workload.n))
    spec = f"cuts:{','.join(map(str, plan.ends))}"
    plain = Script.from_case(planned(spec, Loopback(), workload))
    slow = Script.from_case(planned(spec, Loopback(), workload, dilation=k))
    assert slow.bytes == plain.bytes and sum(plain.bytes) == workload.bytes.sum()
    assert np.allclose(slow.ready_s, np.multiply(plain.ready_s, k))
    assert slow.compute_s == pytest.approx(workload.compute_s * k)
    assert all(
        0 <= 4 * n - size < 4
        for n, size in zip(plain.elements, plain.bytes, strict=True)
    )


def test_only_the_last_rank_straggles_and_selection_stretches_with_it() -> None:
    case = planned(
        "buffer:512KiB",
        Loopback(),
        workers=3,
        dilation=2.0,
        density=0.01,
        selection_sha256="abc",
        straggler=1.5,
    )
    script = Script.from_case(case, lambda elements, density: 1e-9 * elements)
    assert script.kept == [max(1, round(0.01 * d)) for d in script.elements]
    assert script.sent_bytes == [8 * k for k in script.kept]
    assert script.selection_s == pytest.approx([2e-9 * d for d in script.elements])
    assert [script.played_by(rank) for rank in (0, 1)] == [script, script]
    assert script.played_by(2).compute_s == pytest.approx(1.5 * script.compute_s)
    with pytest.raises(UserError, match="unknown times"):
        replay.replay(Loopback(), 2, [case])
    for other in ({"density": 1.0}, {"collective": "all_reduce"}):
        wrong = case._replace(case=replace(case.case, **other))
        with pytest.raises(UserError, match="(dense|sparse) gradients are sent by"):
            Script.from_case(wrong)


@given(st.data(), st.integers(1, 4), st.integers(0, 2**32))
def test_no_overlap_and_no_byte_lost(
    data: st.DataObject, ranks: int, seed: int
) -> None:
    workload = data.draw(workloads(max_tensors=6))
    plan = data.draw(plans(workload.n))
    spec = f"cuts:{','.join(map(str, plan.ends))}"
    script = Script.from_case(planned(spec, Loopback(), workload))
    everyone = random_times(script, np.random.default_rng(seed), ranks)
    spans = replay.make_timeline(script, everyone)
    assert set(spans.rank.tolist()) == set(range(ranks))
    for rank, seen_s in enumerate(everyone):
        mine = spans.select(spans.rank == rank)
        messages = mine.select(mine.kind == "all_reduce")
        assert np.all(messages.start_s[1:] >= messages.end_s[:-1])
        assert np.all(messages.start_s >= script.ready_s)
        assert messages.bytes.sum() == workload.bytes.sum()
        assert mine.end_s.max() == seen_s[-1]
        # Whatever is not compute is exposed communication: nothing else happens in a replay.
        idle_s = mine.duration_s - mine.busy_s(("forward", "backward", "update"))
        assert mine.exposed_communication_s() <= idle_s + 1e-9


def test_replays_over_loopback_are_never_shorter_than_compute(tmp_path: Path) -> None:
    place = Loopback()

    def waited(elements: Any, density: float) -> Any:
        return 2e-7 * elements  # 13 ms for each of the first five tensors

    sparse: dict[str, Any] = {"density": 0.01, "selection_sha256": "abc"}
    cases = [
        planned("single", place),
        planned("buffer:512KiB", place, dilation=2.0),
        planned("none", place, **sparse),
        planned("none", place, **sparse, straggler=2.0),
    ]
    keys = [case.case.key for case in cases]
    play = functools.partial(
        replay.replay, place, 2, cases, 2, selection=waited, out=tmp_path
    )
    runs, spans = play(done=[(keys[1], 1)])
    assert list(runs["case"]) == [*keys, keys[0], *keys[2:]]
    assert list(runs["repeat"]) == [0] * 4 + [1] * 3
    selection_s = float(waited(TINY.bytes.sum() / 4, 0.01))
    sparse_s = TINY.compute_s + selection_s
    each_s = TINY.compute_s, 2 * TINY.compute_s, sparse_s, 2 * sparse_s
    expected_s = dict(zip(keys, each_s, strict=True))
    assert np.allclose(runs["compute_s"], runs["case"].map(expected_s), rtol=1e-3)
    assert (runs["iteration_s"] >= runs["compute_s"]).all()
    exposed_s = runs["iteration_s"] - runs["compute_s"]
    assert np.allclose(runs["exposed_communication_s"], exposed_s)
    limited = (runs["processor_load"] >= 0.9) | (runs["stolen"] > 0.02)
    assert (runs["processor_limited"] == limited).all()
    for case in cases[:2]:  # no rank has its gradients before they are due
        mine = spans[(spans["case"] == case.case.key) & (spans["kind"] == "backward")]
        ready_s = mine.groupby(["rank", "group"])["end_s"].max().unstack()
        assert (ready_s >= Script.from_case(case).ready_s).all(axis=None)
    # The spans of the first round, of both ranks, and every byte in them.
    assert set(spans["repeat"]) == {0} and set(spans["rank"]) == {0, 1}
    sums = spans.groupby(["case", "kind"])["bytes"].sum()
    assert (
        sums[keys[0], "all_reduce"]
        == sums[keys[1], "all_reduce"]
        == 2 * TINY.bytes.sum()
    )
    script = Script.from_case(cases[2], waited)
    assert sums[keys[2], "all_gather"] == 2 * sum(script.sent_bytes)
    assert sums[keys[2], "sparsify"] == 2 * TINY.bytes.sum()
    again = play()
    assert len(again.runs) == 8
    pd.testing.assert_frame_equal(again.runs.head(7), runs)


@pytest.mark.fault(
    fault="a replay is killed while it writes",
    injected="half a line in its file",
    holds="complete iterations are kept, the next run writes behind them",
)
def test_an_interrupted_replay_keeps_its_complete_rows(tmp_path: Path) -> None:
    place = Loopback()
    first, second = planned("none", place), planned("single", place)
    with pytest.raises(UserError, match="no iteration was completed"):
        replay.read_replayed(tmp_path, [first.case])
    rng = np.random.default_rng(0)
    for one in (first, second):
        script = Script.from_case(one)
        everyone = random_times(script, rng, 1)
        append_iteration(tmp_path, script, 0, everyone, Usage(0.5, 0.0))
    text = (tmp_path / ITERATIONS).read_text()
    (tmp_path / ITERATIONS).write_text(text[:-40])
    runs, timeline = replay.read_replayed(tmp_path, [first.case, second.case])
    assert list(runs["case"]) == [first.case.key]
    assert set(timeline["case"]) == {first.case.key}
    # Who goes on there keeps the complete iteration, and writes behind it.
    assert keep_complete(tmp_path) == [(first.case.key, 0)]
    append_iteration(tmp_path, script, 0, everyone, Usage(0.5, 0.0))
    runs, timeline = replay.read_replayed(tmp_path, [first.case, second.case])
    assert list(runs["case"]) == [first.case.key, second.case.key]
    assert set(timeline["case"]) == {first.case.key, second.case.key}


# -- in the lab --------------------------------------------------------------------------------


class TestLab:
    pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("require_lab")]

    @pytest.mark.alone
    def test_a_replay_is_no_shorter_than_its_wire_and_its_compute(self) -> None:
        """One message after all compute can hide nothing, and takes its bytes over the rate."""
        n_bytes = 4 * MIB
        workload = Workload.from_arrays(
            0.02, [0.01, 0.01], [n_bytes // 2] * 2, update_s=0.01
        )
        with Lab(LabShape(2, 2e8)) as lab:
            case = planned("single", lab, workload)
            runs, _ = replay.replay(lab, 2, [case], rounds=2)
            carried = sent_by(lab)
        wire_s = (
            n_bytes * 8 / (2e8 * FRAMING)
        )  # each of 2 ranks sends 2 x 1/2 of the message
        assert (runs["exposed_communication_s"] > 0.95 * wire_s).all()
        # Ranks x rounds: it went over the shaped links, and with it little but framing and greetings.
        assert 2 * 2 * n_bytes < carried["bytes"] < 1.25 * 2 * 2 * n_bytes
        assert carried["drops"] == 0
        assert set(runs["link"]) == {"lab:200mbit"}

    @pytest.mark.fault(
        fault="a rank in the lab is killed",
        injected="SIGKILL while it replays",
        holds="one line; complete iterations are kept",
    )
    def test_a_killed_rank_ends_the_replay_in_one_line(self, tmp_path: Path) -> None:
        def kill_one() -> None:
            rows = tmp_path / ITERATIONS
            assert wait_for(lambda: rows.exists() and rows.read_text().count("\n") > 1)
            ranks_below(os.getpid())[0].kill()

        killer = threading.Thread(target=kill_one)
        with Lab(LabShape(2, 1e9)) as lab:
            case = planned("none", lab)
            killer.start()
            with pytest.raises(UserError, match="SIGKILL") as caught:
                replay.replay(lab, 2, [case], rounds=1000, out=tmp_path)
            killer.join()
            assert "\n" not in str(caught.value)
            assert ranks_below(os.getpid()) == []
            kept = replay.read_replayed(tmp_path, [case.case]).runs
        assert 0 < len(kept) < 1000
