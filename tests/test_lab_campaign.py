"""Campaigns: what a file asks for, what is wrong with it in one line, and that nothing measured is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.lab import network
from ddlkit.measure.session import Origin, Point
from places import ROOT, alive, ranks_below, wait_for
from test_kinds import SMALLEST, tables_of
from workbook.common.source import Source
from workbook.record import campaigns, grammar
from workbook.record.campaigns import AFTER, BEFORE, DIGITS, LabPoints
from workbook.record.grammar import read
from workbook.record.recording import record
from workbook.validate import accuracy
from workbook.validate.compared import compared

WHOLE: dict[str, Any] = {
    "measure": "campaign",
    "rounds": 2,
    "calibration": "quick",
    "networks": "lenet5:4",
    "plans": ["none", "single"],
    "points": [{"workers": [2], "rates": ["1gbit"]}],
}
POINT = {"workers": 2, "rates": "1gbit"}


def written(directory: Path, described: object, name: str = "tiny.json") -> Path:
    path = directory / name
    path.write_text(described if isinstance(described, str) else json.dumps(described))
    return path


def points(file: Path, out: Path, predict: bool = False) -> list[Point]:
    made = grammar.points(
        out=out, session=1, name=str(file), device="cpu", predict=predict
    )
    return list(made.body)


def labs(file: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[LabPoints]:
    made: list[LabPoints] = []
    monkeypatch.setattr(
        campaigns, "campaign", lambda labs, predict: made.__iadd__(labs) and []
    )
    points(file, out)
    return made


# -- the file ----------------------------------------------------------------------------------


def test_a_grid_is_a_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    measure: campaign
    density: [1.0, 0.01]
    stragglers: [1.0, 1.5]
    plans: [none, "buffer:4MB"]
    points:
      - {networks: [lenet5, resnet18:8], workers: [2, 4], rates: [1gbit]}
      - {networks: lenet5, workers: 4, rates: 1gbit, plans: [none, ddp], rounds: 5}
      - {networks: lenet5, workers: 4, rates: 5gbit}
    """
    file = written(tmp_path, text, "some.yml")
    assert (read(file).folder, read(file).is_campaign) == ("campaign-some", True)
    found = labs(file, tmp_path / "out", monkeypatch)
    assert [lab.shape.name for lab in found] == ["p2-1gbit", "p4-1gbit", "p4-5gbit"]
    sizes = [len(lab.asked) for lab in found]
    assert sizes == [16, 16 + 4, 8], "a request that two grids share is there once"
    assert set(found[0].asked.values()) == {2}
    assert sorted(found[1].asked.values()) == [2] * 12 + [5] * 8, (
        "the most that any grid asks"
    )
    assert {request.batch for request in found[0].asked} == {4, 8}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"repeat": {"cases": 20}}, "repeat: unknown key: "),
        ({"measure": "tensors"}, "measure: 'tensors': must be campaign"),
        ({"rounds": True}, "rounds: True: must be a whole number"),
        (
            {"points": [{"workers": 1, "rates": "1gbit"}]},
            "workers: 1 in a lab: use 2 to",
        ),
        (
            {"points": [{"workers": 65, "rates": "1gbit"}]},
            "workers: 65 in a lab: use 2",
        ),
        ({"plans": "buffer:x"}, "plans: 'buffer:x': size 'x'"),
        ({"plans": ["ddp", "random:1"]}, "plans: 'random:1': "),
        ({"rounds": 10**5}, "2 cases, .* lower rounds"),
        (
            {"points": [{**POINT, "name": "a"}, {**POINT, "name": "b"}]},
            "name: 'a' and 'b': ",
        ),
        (
            {"points": [{"workers": 2, "rates": "fast"}]},
            r"rates: 'fast': rate 'fast' is not",
        ),
        ({"delays": ["2ms"]}, r"points\[0\]: delays: .* write engines: emulated"),
        ({"losses": "1%"}, r"points\[0\]: losses: .* write engines: emulated"),
        (
            {"delays": ["1ms"] * 20_000, "engines": "emulated"},
            "40000 cases, the product of its",
        ),
    ],
)
def test_a_wrong_value_is_one_line_before_anything_is_measured(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    file = written(tmp_path, {**WHOLE, **change})
    with pytest.raises(UserError, match=told) as caught:
        record(str(file), out=tmp_path / "out", dry_run=True)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("networks: [a", "is not YAML: line"),
        ("", "is empty"),
        ("grids: [{workers: 2}]", "a list named points"),
    ],
)
def test_what_is_no_file_of_points_is_told(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(UserError, match=told) as caught:
        read(written(tmp_path, text, "bad.yml"))
    assert "\n" not in str(caught.value)


def test_runs_and_predictions_lie_between_two_calibrations(tmp_path: Path) -> None:
    file = written(
        tmp_path, {**WHOLE, "points": [{"workers": [2, 3], "rates": "1gbit"}]}
    )
    played = [point.key for point in points(file, tmp_path) if point.what != "layers"]
    one = [f"collectives/p2-1gbit-all_reduce {when}" for when in ("before", "after")]
    assert played[:3] == [one[0], "replay/p2-1gbit", one[1]]
    predicted = [point.key for point in points(file, tmp_path, predict=True)]
    assert predicted[-1] == "predicted/cases"
    assert not [key for key in predicted if key.startswith("replay")]
    assert predicted.index(one[1]) > predicted.index(
        "collectives/p3-1gbit-all_reduce before"
    )


# -- in the lab --------------------------------------------------------------------------------


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:

    def wait() -> None:
        if wait_for(condition):
            os.kill(os.getpid(), signal.SIGINT)

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        yield
    finally:
        waiter.join()


def rows_so_far(out: Path) -> int:
    return sum(
        path.read_text().count("\n") for path in out.glob(".partial/*/replay.jsonl")
    )


class TestLab:
    pytestmark = [
        pytest.mark.lab,
        pytest.mark.slow,
        pytest.mark.usefixtures("require_lab"),
    ]

    def test_a_budget_without_time_for_the_calibration_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The profile is expected to take longer than anything else.
        monkeypatch.setattr(
            "workbook.record.campaigns.starting_s", lambda *_, **__: 60.0
        )
        few = {"networks": "lenet5:1", "plans": "single", "rounds": 1}
        file = written(tmp_path, {**WHOLE, **few})
        out = tmp_path / "out"
        profile, before, replay, _ = points(file, out)
        # Enough for the replay, but neither for the profile nor for the calibration before it.
        assert replay.estimate_s < before.estimate_s < profile.estimate_s
        budget_s = (replay.estimate_s + before.estimate_s) / 2
        for missing in ("layers of lenet5", "all_reduce"):
            with pytest.raises(UserError, match=missing) as caught:
                record(str(file), out=out, budget_s=budget_s)
            assert "with a longer --budget" in str(caught.value)
            assert "\n" not in str(caught.value)
            # The second time, the profile is there.
            profile.measure_and_save(out, Origin())

    @pytest.mark.fault(
        fault="a replay in the lab is interrupted, or killed",
        injected="SIGINT, and the next time SIGKILL, while ranks replay",
        holds="no rank, no lab; complete rows are kept, and what follows measures the others once",
    )
    def test_neither_kill_nor_interrupt_loses_a_finished_case(
        self, tmp_path: Path
    ) -> None:
        # Long enough that the kill comes in the middle even on a busy machine: 8 rows, 8 more,
        # and half of them are left.
        rounds = 16
        file = written(tmp_path, {**WHOLE, "rounds": rounds})
        out = tmp_path / "out"
        with (
            pytest.raises(KeyboardInterrupt),
            interrupted_when(lambda: rows_so_far(out) > 8),
        ):
            record(str(file), out=out)
        mine = f"process {os.getpid()}"
        assert not ranks_below(os.getpid())
        assert mine not in [row["owner"] for row in network.status()]
        kept = rows_so_far(out)
        assert kept >= 8
        with pytest.raises(UserError, match="a prediction comes before its runs"):
            record(str(file), out=out, predict=True)
        argv = [
            sys.executable,
            "-m",
            "impatient",
            "workbook",
            "campaign",
            str(file),
            "--out",
            str(out),
        ]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        killed = subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": paths},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert wait_for(lambda: rows_so_far(out) > kept + 8)
        ranks = ranks_below(killed.pid)
        killed.kill()
        killed.communicate()
        psutil.wait_procs(ranks, timeout=60)
        assert len(ranks) == 2 and not alive(ranks)
        network.clean()
        lines = (
            (out / ".partial" / "p2-1gbit" / "replay.jsonl")
            .read_text()
            .splitlines()[:-1]
        )
        key = ["case", "repeat", "iteration_s"]
        finished = {
            tuple(row[name] for name in key) for row, _ in map(json.loads, lines)
        }
        assert len(finished) > kept + 7
        assert record(str(file), out=out) == out
        runs = store.load_table(out / "runs-p2-1gbit.csv", "runs")
        assert (
            len(runs)
            == runs[["case", "repeat"]].drop_duplicates().shape[0]
            == 2 * rounds
        )
        assert finished <= set(runs[key].itertuples(False, None))
        spans = store.load_table(out / "timeline-p2-1gbit.csv.gz", "timeline")
        assert set(spans["case"]) == set(runs["case"])
        assert not spans.duplicated(["case", "repeat", "rank", "task"]).any()
        before = {path: path.stat().st_mtime_ns for path in out.glob("*.csv*")}
        record(str(file), out=out)
        assert {path: path.stat().st_mtime_ns for path in out.glob("*.csv*")} == before

    def test_predictions_come_before_their_runs_and_runs_say_which(
        self, tmp_path: Path
    ) -> None:
        described, tables = SMALLEST["campaign"]
        campaign = {**described, "measure": "campaign", "plans": ["none", "single"]}
        asked = {"points": [campaign]}
        file, out = written(tmp_path, asked), tmp_path / "out"
        record(str(file), out=out, predict=True)
        said = store.load_table(out / "predicted-cases.csv", "predicted")
        assert not [*out.glob("runs-*")]
        calibrated = {path: path.read_bytes() for path in out.glob("collectives-*.csv")}
        sessions = pd.concat(map(store.load_table, calibrated))["session"]
        assert set(sessions) == {BEFORE, AFTER}
        record(str(file), out=out)
        assert tables_of(out) == tables | {"predicted"}, "what its replays need"
        runs = store.load_table(out / "runs-p2-1gbit.csv", "runs")
        digest = store.load_stamp(out / "predicted-cases.csv")["sha256"]
        assert set(runs["predicted"]) == {digest[:DIGITS]}
        assert set(runs["case"]) == set(said["case"])
        assert calibrated == {
            path: path.read_bytes() for path in out.glob("collectives-*.csv")
        }
        found = accuracy.joined(Source((out,)))
        assert found["model_error"].notna().all() and (found["runs"] == 1).all()
        lines = [*compared(out)]
        for case in found.itertuples():
            (line,) = [one for one in lines if f":{case.batch} {case.plan}, " in one]
            assert format_seconds(case.measured_iteration_s) in line
            assert f"error {case.model_error:+.1%}" in line
        more_plans = [*campaign["plans"], "buffer:64KB"]
        more = written(tmp_path, {"points": [{**campaign, "plans": more_plans}]})
        with pytest.raises(
            UserError, match="buffer:64KB.*: name another file, and predict before"
        ):
            record(str(more), out=out)
        assert len(store.load_table(out / "runs-p2-1gbit.csv")) == len(runs)
