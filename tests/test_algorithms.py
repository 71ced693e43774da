"""All-reduces step by step on real ranks: the schedules' sums to the last bit; tables say who sent them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepped_job
from ddlkit import store
from ddlkit.cli import main
from ddlkit.core.errors import UserError
from ddlkit.core.schedule import ALGORITHMS, STEPS, Schedule
from ddlkit.model import Calibration
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs import launch as starting
from ddlkit.run.jobs.launch import Loopback, launch
from ddlkit.run.jobs.rank import Rank, carrying_messages
from ddlkit.run.measure.collectives import LIBRARY, CollectivesSettings, collectives_job
from ddlkit.run.sessions import suites
from ddlkit.run.sessions.engine import measure

ELEMENTS = (1, 5, 1000, 70_001)
ONCE = Budget(warmup=1, min_repeats=2, max_repeats=2)
JOIN = {"backend": "gloo", "torch_threads": 1}


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_real_ranks_find_the_sums_of_the_schedule_to_the_last_bit(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the library's, to rounding; between two ranks, whose sums have but one order, to the bit."""
    monkeypatch.setenv("PYTHONPATH", str(Path(stepped_job.__file__).parent))
    monkeypatch.setattr(starting, "_current", None)
    settings = stepped_job.SteppedSettings(list(ALGORITHMS), ELEMENTS)
    launch(
        stepped_job.stepped_job, settings, ranks=ranks, place=Loopback(), join=JOIN, out=tmp_path
    )
    found = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(ranks)]
    for n in ELEMENTS:
        mine = np.stack([stepped_job.drawn(rank, n) for rank in range(ranks)])
        for name in ALGORITHMS:
            wanted = Schedule.of(name, ranks).run(mine)
            for rank, turn in np.ndindex(ranks, 2):
                real = found[rank][f"{name}-{n}-{turn}"]
                assert np.array_equal(real, wanted[rank]), (name, n, rank)
                library = found[rank][f"library-{n}"]
                np.testing.assert_allclose(real, library, atol=2e-7 * ranks * np.abs(mine).max())
                assert ranks > 2 or np.array_equal(real, library)


def test_a_table_says_that_steps_were_sent_and_no_calibration_takes_it() -> None:
    """The sums are checked by the job itself."""
    settings = CollectivesSettings(["all_reduce"], [8, 4096], ONCE, 3, algorithm="tree")
    rows = launch(collectives_job, settings, ranks=3, place=Loopback(), join=JOIN)["collectives"]
    assert set(rows["algorithm"]) == {f"{STEPS}tree"} and set(rows["backend"]) == {"gloo"}
    assert set(rows["bytes"]) == {12, 4104} and (rows["seconds"] > 0).all()
    assert Schedule.of(rows["algorithm"].iloc[0], 3) == Schedule.of("tree", 3)
    with pytest.raises(UserError, match="no calibration of steps:tree"):
        Calibration.of(rows)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"algorithm": "torus", "collectives": ["all_reduce"]}, "unknown algorithm 'torus'"),
        ({"algorithm": "ring"}, "all_gather by ring: only an all_reduce"),
    ],
)
def test_what_has_no_steps_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CollectivesSettings(**wrong)


def test_the_algorithm_of_a_suite_can_be_chosen(tmp_path: Path) -> None:
    """Tables of their own names: what the library's collectives gave stays beside them."""
    how: dict[str, Any] = {"out": tmp_path, "session": 1, "name": "quick", "part": "collectives"}
    own = {point.key for point in suites.points(**how).body}
    chosen = {point.key for point in suites.points(**how, algorithm="halving_doubling").body}
    assert chosen == {f"{key}-halving-doubling" for key in own}
    assert {point.key for point in suites.points(**how, algorithm=LIBRARY).body} == own
    with pytest.raises(UserError, match="for collectives only, not for layers"):
        suites.points(**{**how, "part": "layers"}, algorithm="ring")


def test_a_file_measures_an_algorithm(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(
        '{"about": "a", "out": "mine", "points": [{"measure": "collectives", "link": "loopback-p2",'
        ' "sizes": ["4KiB"], "algorithm": "direct", "collectives": ["all_reduce"],'
        ' "budget": {"min_repeats": 2, "max_repeats": 2}}]}'
    )
    out = measure(str(file), out=tmp_path / "out")
    rows = store.load_table(Path(out) / "collectives-loopback-p2-direct.csv")
    assert set(rows["algorithm"]) == {"steps:direct"} and len(rows) == 2


def test_an_unknown_algorithm_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path)
    assert main(["measure", "collectives", "--algorithm", "torus", "--out", out]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert "unknown algorithm 'torus': use one of ring, halving_doubling, tree" in told[-1]


@pytest.mark.parametrize("raised", [0, 2])
def test_a_thread_that_sends_is_raised_with_gloos_own_and_only_then(
    raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is given back what it had, also after an error."""
    did: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda _, policy, __: did.append(policy))
    me = Rank(0, 1, 0, torch.device("cpu"), "gloo", 1, 1, raised_threads=raised)
    with pytest.raises(ValueError, match="inside"), carrying_messages(me):
        raise ValueError("inside")
    assert did == ([os.SCHED_RR, os.sched_getscheduler(0)] if raised else [])
