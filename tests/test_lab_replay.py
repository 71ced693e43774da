"""Laws of replay: never faster than compute or wire, nothing lost, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.bandwidth import FRAMING
from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.units import KIB, MIB
from ddlkit.core.workload import Workload
from ddlkit.run.instruments.processor import Usage
from ddlkit.run.jobs.launch import Loopback, Place
from ddlkit.run.lab import network, replay
from ddlkit.run.lab.calibrate import calibrate, wire_efficiency
from ddlkit.run.lab.network import Lab, clean
from ddlkit.run.lab.replay import Recording, finished
from places import alive, ranks_below
from strategies import plans, workloads

ROOT = Path(__file__).parents[1]
TINY = Workload.from_arrays(0.02, [0.01] * 6, [256 * KIB] * 5 + [1022], update_s=0.01)

Asked = tuple[Case, Workload, FusionPlan]


def asked(
    spec: str, place: Place, workload: Workload = TINY, dilation: float = 1.0, **more: Any
) -> Asked:
    plan = make_plan(spec, workload)
    ends = ";".join(map(str, plan.ends))
    link = (place.name, place.link_bits_per_s)
    collective = "all_gather" if more.get("density", 1.0) < 1 else "all_reduce"
    case = Case("replay", "tiny", "made", 1, 2, *link, collective, spec, ends, dilation=dilation)
    return replace(case, **more), workload, plan


def random_recording(script: replay.Script, rng: np.random.Generator) -> Recording:
    """What a rank might see: it wakes late, posting takes time, collectives follow one another."""
    late_s = rng.exponential(1e-3, (3, len(script.ready_s)))
    awake_s = np.asarray(script.ready_s) + late_s[0]
    awake_s = np.maximum.accumulate(awake_s)
    done_s = np.maximum.accumulate(awake_s + late_s[1]) + np.cumsum(late_s[2])
    waited_s = float(done_s[-1])
    return Recording(
        awake_s=awake_s,
        selected_s=awake_s,
        agreed_s=awake_s,
        posted_s=awake_s + 1e-9,
        done_s=done_s,
        forward_end_s=script.forward_s,
        wait_s=float(awake_s[-1]) + 1e-9,
        waited_s=waited_s,
        end_s=waited_s + script.update_s,
    )


class TestScript:
    @given(st.data(), st.floats(0.1, 100))
    def test_dilation_stretches_time_and_leaves_bytes(self, data: st.DataObject, k: float) -> None:
        workload = data.draw(workloads())
        plan = data.draw(plans(workload.n))
        case, _, _ = asked(f"cuts:{','.join(map(str, plan.ends))}", Loopback(), workload)
        plain = replay.script(case, workload, plan)
        slow_case = Case(**{**vars(case), "dilation": k})
        slow = replay.script(slow_case, workload, plan)
        assert sum(plain.bytes) == workload.bytes.sum()
        assert slow.bytes == plain.bytes
        assert np.allclose(slow.ready_s, np.multiply(plain.ready_s, k))
        assert slow.compute_s == pytest.approx(workload.compute_s * k)
        assert all(
            0 <= 4 * n - size < 4 for n, size in zip(plain.elements, plain.bytes, strict=True)
        )

    def test_a_case_of_another_plan_is_refused(self) -> None:
        case, workload, _ = asked("none", Loopback())
        with pytest.raises(UserError, match="has ends"):
            replay.script(case, workload, make_plan("single", workload))

    @pytest.mark.parametrize("wrong", [{"workers": 3}, {"link": "lab:1gbit"}, {"kind": "training"}])
    def test_a_case_of_another_place_is_refused(self, wrong: dict) -> None:
        case, workload, plan = asked("none", Loopback())
        with pytest.raises(UserError, match=r"not a replay of 2 over loopback"):
            replay.replay(Loopback(), 2, [(Case(**{**vars(case), **wrong}), workload, plan)])

    def test_nothing_to_replay_and_the_same_twice_are_refused(self) -> None:
        with pytest.raises(UserError, match="at least 1"):
            replay.replay(Loopback(), 2, [])
        with pytest.raises(UserError, match="twice"):
            replay.replay(Loopback(), 2, [asked("none", Loopback())] * 2)

    def test_cases_with_different_numbers_in_flight_need_launches_of_their_own(self) -> None:
        cases = [asked("none", Loopback()), asked("single", Loopback(), in_flight=2)]
        with pytest.raises(UserError, match="as many messages in flight"):
            replay.replay(Loopback(), 2, cases)

    def test_only_the_last_rank_straggles_and_selection_stretches_with_it(self) -> None:
        more: dict[str, Any] = {"density": 0.01, "selection_sha256": "abc", "straggler": 1.5}
        case = asked("buffer:512KiB", Loopback(), dilation=2.0, **more)
        one = replay.script(*case, lambda elements, density: 1e-9 * elements)
        assert one.kept == tuple(max(1, round(0.01 * d)) for d in one.elements)
        assert one.sent_bytes == tuple(8 * k for k in one.kept)
        assert one.selection_s == pytest.approx([2e-9 * d for d in one.elements])
        assert [one.played_by(rank, 3) for rank in (0, 1)] == [one, one]
        slow = one.played_by(2, 3)
        assert slow.compute_s == pytest.approx(1.5 * one.compute_s)
        assert slow.sent_bytes == one.sent_bytes

    @pytest.mark.parametrize(
        ("wrong", "reason"),
        [
            ({"straggler": 0.5}, "at least 1"),
            ({"density": 0.0}, "dense gradients"),
            ({"density": 0.5, "collective": "all_reduce"}, "dense gradients"),
            ({"density": 0.5, "selection_sha256": "abc"}, "no times are given"),
        ],
    )
    def test_impossible_cases_are_refused(self, wrong: dict, reason: str) -> None:
        with pytest.raises(UserError, match=reason):
            replay.replay(Loopback(), 2, [asked("single", Loopback(), **wrong)])


class TestTimeline:
    @given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32))
    def test_no_more_messages_overlap_than_are_in_flight_and_no_byte_is_lost(
        self, data: st.DataObject, ranks: int, lanes: int, seed: int
    ) -> None:
        workload = data.draw(workloads(max_tensors=6))
        plan = data.draw(plans(workload.n))
        spec = f"cuts:{','.join(map(str, plan.ends))}"
        case, _, _ = asked(spec, Loopback(), workload, in_flight=lanes)
        script = replay.script(case, workload, plan)
        rng = np.random.default_rng(seed)
        everyone = [random_recording(script, rng) for _ in range(ranks)]
        spans = replay.timeline(script, everyone)
        assert set(spans.rank.tolist()) == set(range(ranks))
        for rank, recording in enumerate(everyone):
            mine = spans.select(spans.rank == rank)
            messages = mine.select(mine.kind == "all_reduce")
            assert np.all(messages.start_s[lanes:] >= messages.end_s[:-lanes])
            assert np.all(messages.start_s >= script.ready_s)
            assert messages.bytes.sum() == workload.bytes.sum()
            assert mine.end_s.max() == recording.end_s
            # Whatever is not compute is exposed communication: nothing else happens in a replay.
            idle_s = mine.duration_s - mine.busy_s(("forward", "backward", "update"))
            assert mine.exposed_communication_s() <= idle_s + 1e-9

    @given(st.integers(1, 5), st.integers(0, 2**32))
    def test_a_recording_survives_the_exchange(self, groups: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        recording = Recording(*rng.uniform(size=(5, groups)), *rng.uniform(size=4).tolist())
        again = Recording.from_array(recording.to_array())
        assert np.array_equal(again.to_array(), recording.to_array())
        assert np.array_equal(again.done_s, recording.done_s)


class TestLoopback:
    """Replay needs no root where the link need not be shaped."""

    def test_replays_are_never_shorter_than_compute(self, tmp_path: Path) -> None:
        place = Loopback()
        cases = [
            asked("none", place),
            asked("single", place),
            asked("buffer:512KiB", place, dilation=2.0),
        ]
        runs, spans, lateness = replay.replay(
            place, 2, cases, rounds=2, raise_priority=False, timeout_s=60
        )
        # Every case once a round, in turn.
        assert list(runs["case"]) == [case.key for case, _, _ in cases] * 2
        assert list(runs["repeat"]) == [0, 0, 0, 1, 1, 1]
        assert (runs["iteration_s"] >= runs["compute_s"]).all()
        expected_s = runs["plan"].map({"none": 1.0, "single": 1.0, "buffer:512KiB": 2.0}) * 0.09
        assert np.allclose(runs["compute_s"], expected_s)
        exposed_s = runs["iteration_s"] - runs["compute_s"]
        assert np.allclose(runs["exposed_communication_s"], exposed_s)
        assert runs["processor_load"].between(0, 1).all()
        assert (
            runs["processor_limited"] == ((runs["processor_load"] >= 0.9) | (runs["stolen"] > 0.02))
        ).all()
        assert (lateness["lateness_median_s"] >= 0).all()
        assert (lateness["lateness_max_s"] >= lateness["lateness_median_s"]).all()
        # The spans of the first round, of both ranks, and every byte in them.
        assert set(spans["repeat"]) == {0} and set(spans["rank"]) == {0, 1}
        sent = spans[spans["kind"] == "all_reduce"].groupby(["case", "rank"])["bytes"].sum()
        assert len(sent) == 6 and (sent == TINY.bytes.sum()).all()
        # And both tables can be recorded as they are.
        for schema, frame in (("runs", runs), ("timeline", spans)):
            path = store.save_table(frame, tmp_path, schema, schema=schema, command=["test"])
            pd.testing.assert_frame_equal(
                store.load_table(path, schema)[list(frame)], frame, check_dtype=False
            )

    def test_two_in_flight_are_carried_at_once(self) -> None:
        """A small message need not wait for the large one that was posted before it."""
        place = Loopback()
        sizes = Workload.from_arrays(0.01, [0.001] * 2, [64 * 1024 * KIB, 4 * KIB])
        cases = [asked("none", place, sizes, in_flight=2)]
        runs, spans, _ = replay.replay(
            place, 2, cases, rounds=1, raise_priority=False, timeout_s=60
        )
        assert (runs["in_flight"] == 2).all()
        large, small = (part for _, part in spans[spans["kind"] == "all_reduce"].groupby("group"))
        assert (small["start_s"].to_numpy() < large["end_s"].to_numpy()).all()

    def test_sparse_gradients_are_selected_and_gathered(self, tmp_path: Path) -> None:
        """Waited out or real, beside a straggler; and what is done is not played again."""
        place = Loopback()

        def waited(elements: Any, density: float) -> Any:
            return 2e-7 * elements  # 13 ms for each of the first five tensors

        slow: dict[str, Any] = {"density": 0.01, "selection_sha256": "abc", "straggler": 2.0}
        cases = [
            asked("none", place, density=0.01, selection_sha256="abc"),
            asked("none", place, density=0.01),
            asked("single", place, straggler=2.0),
            asked("none", place, **slow),
        ]
        runs, spans, _ = replay.replay(
            place,
            2,
            cases,
            rounds=2,
            selection=waited,
            raise_priority=False,
            done=[(cases[2][0].key, 1)],
            out=tmp_path,
            timeout_s=60,
        )
        first, real, straggling, both = (runs[runs["case"] == case.key] for case, _, _ in cases)
        assert [len(rows) for rows in (first, real, straggling, both)] == [2, 2, 1, 2]
        selection_s = float(waited(TINY.bytes.sum() / 4, 0.01))
        assert np.allclose(first["compute_s"], TINY.compute_s + selection_s, rtol=1e-3)
        assert np.allclose(straggling["compute_s"], 2 * TINY.compute_s)
        assert np.allclose(both["compute_s"], 2 * (TINY.compute_s + selection_s), rtol=1e-3)
        assert (real["compute_s"] > TINY.compute_s).all()
        assert (runs["iteration_s"] >= runs["compute_s"]).all()
        kinds = spans[spans["case"] == cases[0][0].key].groupby("kind")["bytes"].sum()
        script = replay.script(*cases[0], waited)
        assert kinds["all_gather"] == 2 * sum(script.sent_bytes)
        assert kinds["sparsify"] == 2 * TINY.bytes.sum()
        assert "all_reduce" not in kinds
        again = replay.replay(
            place, 2, cases, 2, selection=waited, raise_priority=False, done=[], out=tmp_path
        )
        assert len(again.runs) == 8 and len(again.timeline) > len(spans) - 1
        pd.testing.assert_frame_equal(again.runs.head(7), runs)


def test_an_interrupted_replay_keeps_its_complete_rows(tmp_path: Path) -> None:
    """Killed while writing: half a line, and spans of an iteration that has no row yet."""
    place = Loopback()
    first, second = asked("none", place), asked("single", place)
    with pytest.raises(UserError, match="no iteration was completed"):
        finished(tmp_path, [first[0]])
    rng = np.random.default_rng(0)
    for case in (first, second):
        script = replay.script(*case)
        everyone = [random_recording(script, rng)]
        key = {"case": [case[0].key], "repeat": [0]}
        spans = replay.timeline(script, everyone).to_frame()
        replay._append(tmp_path / replay.TIMELINE, pd.DataFrame(key).merge(spans, how="cross"))
        row = pd.DataFrame({**key, **replay._row(script, everyone, Usage(0.5, 0.0))})
        replay._append(tmp_path / replay.ITERATIONS, row)
    for name, cut in ((replay.ITERATIONS, 3), (replay.TIMELINE, 40)):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text[:-cut])
    runs, timeline, lateness = finished(tmp_path, [first[0], second[0]])
    assert list(runs["case"]) == list(lateness["case"]) == [first[0].key]
    assert set(timeline["case"]) == {first[0].key}


def test_efficiency_is_the_share_of_the_rate() -> None:
    """A message that takes exactly its wire time has efficiency 1; twice that, one half."""
    frame = pd.DataFrame(
        {
            "collective": ["all_reduce"] * 2 + ["all_gather"],
            "link": "lab:1gbit",
            "link_bits_per_s": 1e9,
            "ranks": 4,
            "bytes": [10**6, 2 * 10**6, 10**6],
            "seconds": [1.5 * 8e-3, 1.5 * 32e-3, 0.75 * 8e-3],
        }
    )
    table = wire_efficiency(frame).set_index(["collective", "bytes"])["efficiency"]
    assert table["all_reduce", 10**6] == pytest.approx(1)
    assert table["all_reduce", 2 * 10**6] == pytest.approx(0.5)
    assert table["all_gather", 10**6] == pytest.approx(1)
    with pytest.raises(UserError, match="without a rate"):
        wire_efficiency(frame.assign(link_bits_per_s=0.0))


# -- in the lab --------------------------------------------------------------------------------

# A replay of a hundred rounds in a lab of its own, to be interrupted.
LONG = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_lab_replay import asked
from ddlkit.run.lab.network import Lab
from ddlkit.run.lab.replay import replay
with Lab(2, 1e9, sys.argv[2]) as lab:
    replay(lab, 2, [asked("none", lab)], rounds=1000, out=Path(sys.argv[1]))
"""


def rows_written(out: Path) -> int:
    path = out / replay.ITERATIONS
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_rows(out: Path, n: int) -> None:
    give_up = time.monotonic() + 60
    while rows_written(out) <= n:
        assert time.monotonic() < give_up, "the replay does not start"
        time.sleep(0.05)


def namespaces(label: str) -> list[str]:
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"{label}-")]


class TestLab:
    pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("require_lab")]

    @pytest.mark.alone
    def test_a_replay_is_as_long_as_its_wire_and_its_compute(self) -> None:
        """One message after all compute can hide nothing, and takes its bytes over the rate."""
        n_bytes = 4 * MIB
        workload = Workload.from_arrays(0.02, [0.01, 0.01], [n_bytes // 2] * 2, update_s=0.01)
        with Lab(2, 2e8) as lab:
            case = asked("single", lab, workload)
            runs, _, _ = replay.replay(lab, 2, [case], rounds=2, timeout_s=60)
            carried = lab.counters()
        wire_s = n_bytes * 8 / (2e8 * FRAMING)  # each of 2 ranks sends 2 x 1/2 of the message
        assert (runs["exposed_communication_s"] > 0.95 * wire_s).all()
        assert runs["exposed_communication_s"].min() < 1.25 * wire_s
        assert carried["bytes"] > 2 * 2 * n_bytes  # ranks x rounds: it went over the shaped links
        assert carried["drops"] == 0
        assert set(runs["link"]) == {"lab:200mbit"}

    def test_a_killed_rank_ends_the_replay_in_one_line(self, tmp_path: Path) -> None:
        def kill_one() -> None:
            wait_for_rows(tmp_path, 1)
            ranks_below(os.getpid())[0].kill()

        killer = threading.Thread(target=kill_one)
        with Lab(2, 1e9) as lab:
            case = asked("none", lab)
            killer.start()
            with pytest.raises(UserError, match="SIGKILL") as caught:
                replay.replay(lab, 2, [case], rounds=1000, timeout_s=60, out=tmp_path)
            killer.join()
            assert "\n" not in str(caught.value)
            assert ranks_below(os.getpid()) == []
            kept = finished(tmp_path, [case[0]]).runs
        assert 0 < len(kept) < 1000

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_an_interrupted_replay_leaves_its_rows_and_nothing_else(
        self, tmp_path: Path, number: signal.Signals
    ) -> None:
        label = f"cut{int(number)}"
        argv = [sys.executable, "-c", LONG, str(tmp_path), label]
        process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL)
        try:
            wait_for_rows(tmp_path, 1)
            ranks = ranks_below(process.pid)
        finally:
            process.send_signal(number)
            process.wait(timeout=20)
        if number == signal.SIGKILL:  # nobody was left to tidy up: the ranks die, `clean` does it
            psutil.wait_procs(ranks, timeout=5)
            clean()  # unless another lab that was made meanwhile has done it already
        assert process.returncode != 0
        assert len(ranks) == 2 and not alive(ranks)
        assert namespaces(label) == []
        assert not (network.STATE / f"{label}.json").exists()
        assert rows_written(tmp_path) > 1

    @pytest.mark.alone
    def test_sixteen_ranks_in_nodes_of_four_meet_and_replay(self) -> None:
        """Of a ring through all ranks, each node sends on what one rank would have to send."""
        with Lab(16, 1e9, ranks_per_node=4, intra_rate_bits_per_s=1e10) as lab:
            case = asked("buffer:512KiB", lab, workers=16)
            runs, _, _ = replay.replay(lab, 16, [case], rounds=2, timeout_s=60)
            carried = lab.node_counters()
        assert set(runs["link"]) == {"lab:1gbit-g4-10gbit"} and len(runs) == 2
        assert (runs["exposed_communication_s"] > 0).all()
        payload = 2 * 4 * (2 * 15 / 16) * int(TINY.bytes.sum())  # rounds x nodes x a rank's share
        assert 0.95 * payload < carried["bytes"] < 1.5 * payload  # and what the ranks say besides
        assert carried["drops"] == 0

    @pytest.mark.alone
    def test_the_wire_is_used_well(self) -> None:
        """Four ranks; framing leaves 95.6%, and the shaper's burst lends a little to 4 MiB.

        Of each size the fastest sample: whatever else runs here can only slow it down.
        """
        with Lab(4, 1e9) as lab:
            samples = calibrate(lab, [4 * MIB, 16 * MIB], timeout_s=60)
        fastest = samples.groupby("bytes", as_index=False).min()
        efficiency = wire_efficiency(fastest).set_index("bytes")["efficiency"]
        assert 0.90 <= efficiency[4 * MIB] <= FRAMING + 0.03
        assert 0.93 <= efficiency[16 * MIB] <= FRAMING + 0.01
