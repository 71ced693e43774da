"""``ddlkit measure``: points are resumed, damage is told, two runs do not mix, Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ddlkit import cli, store
from ddlkit.core.cost import Table
from ddlkit.core.errors import UserError
from ddlkit.report.source import default_recording, open_source
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.sessions import engine, grammar, lab_kinds
from ddlkit.run.sessions.engine import measure
from ddlkit.run.sessions.session import Origin
from faulty_points import drift
from places import PATIENCE_S

TINY = ["lenet5:4"]
SIZES = np.geomspace(1e3, 1e8, 12)
RING = Table(SIZES, 1e-3 + 12.6e-9 * SIZES, workers=4, algorithm="ring")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("measured")
    measure("layers", networks=TINY, out=out)
    return out


def test_a_second_run_measures_nothing_again(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in measured.iterdir() if path.suffix == ".csv"}
    measure("layers", networks=TINY, out=measured)
    assert "already measured: layers/lenet5-b4-r1" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.fault(
    fault="a table that is to be gone on from was changed",
    injected="one word of a recorded CSV replaced",
    holds="it is told, and neither used nor overwritten",
)
def test_a_damaged_table_is_told_not_measured_over(measured: Path, tmp_path: Path) -> None:
    for path in measured.glob("*lenet5*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / "layers-lenet5-b4-r1.csv"
    damaged.write_text(damaged.read_text().replace("conv1", "conv9"))
    with pytest.raises(UserError, match="differs from its stamp"):
        measure("layers", networks=TINY, out=tmp_path)


def test_a_dry_run_says_what_is_missing_and_measures_nothing(
    measured: Path, tmp_path: Path
) -> None:
    there = measure("layers", networks=TINY, out=measured, dry_run=True)
    assert str(there).startswith("1 of 1 points are there")
    lines = str(measure("layers", networks=TINY, out=tmp_path, dry_run=True)).splitlines()
    assert lines[0].split()[0] == "layers/lenet5-b4-r1"
    assert lines[1].startswith("0 of 1 points are there; the rest takes about")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "points: an empty list"),
        (["layers"], "points: 'layers': must be a mapping"),
        ([{"measure": "speed"}], "points[0]: measure: 'speed': must be"),
        ([{"measure": "selections", "more": 1}], "points[0]: more: unknown key"),
        ([{"measure": "layers", "networks": "lenet5"}], "points[0]: budget: missing"),
        ([{"measure": "facts"}], "(stamps say what the machine is)"),
        (
            [{"measure": "selections"}, {"measure": "selections", "device": "tpu"}],
            "points[1]: device: 'tpu'",
        ),
        ([{"measure": "memory_copies", "budget": {"max": 1}}], "budget: {'max': 1}: must be a map"),
        (
            [{"measure": "collectives", "sizes": "4Kb", "budget": {}}],
            "sizes: '4Kb': size '4Kb' has unit",
        ),
    ],
)
def test_a_wrong_suite_is_one_line_that_names_file_and_key(
    points: object, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"points": points}))
    with pytest.raises(UserError) as caught:
        measure(str(file), out=tmp_path)
    assert str(caught.value).startswith(f"{file}: points")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.fault(
    fault="two measuring runs into one directory",
    injected="the lock of the directory is held",
    holds="the second is refused and names the first's process",
)
def test_two_runs_into_one_directory_do_not_mix(tmp_path: Path) -> None:
    with store.lock(tmp_path / ".lock"), pytest.raises(UserError, match=f"process {os.getpid()}"):
        measure("layers", networks=TINY, out=tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.fault(
    fault="measuring is interrupted, terminated, or its terminal is closed",
    injected="SIGINT, SIGTERM, SIGHUP between two tables",
    holds="one line; status 130, or 143; whole tables only, which the next run keeps",
)
def test_being_ended_is_one_line_and_leaves_no_half_table(
    tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.signal(
        signal.SIGHUP, lambda *_: None
    )  # nohup would have us hand on that it is ignored
    argv = [sys.executable, "-m", "ddlkit", "measure", "layers", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*argv, "--networks", "lenet5:4,vgg16:8"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGHUP, before)
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "samples-lenet5-b4-r1.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert "interrupted; what was measured is kept" in said
    assert "Traceback" not in said
    kept = sorted(path.name for path in tmp_path.glob("*.csv"))
    assert kept == ["layers-lenet5-b4-r1.csv", "samples-lenet5-b4-r1.csv"]
    assert store.read_profile(tmp_path / kept[0]).network == "lenet5"


def test_replay_cases_are_distinct_and_weigh_communication_as_much_as_compute() -> None:
    profile = open_source(default_recording().name).profile("resnet50")
    (replays,) = [one for one in grammar.read("quick").points if one["measure"] == "replays"]
    cases = lab_kinds.replay_cases(profile, replays["plans"], RING, Loopback())
    plans = {one.plan.ends for one in cases}
    assert len(plans) == len(cases) == lab_kinds.DISTINCT_PLANS
    case, workload = cases[0].case, cases[0].workload
    whole_s = float(RING(workload.bytes.sum()))
    assert workload.scaled(case.dilation).compute_s == pytest.approx(whole_s, rel=1e-2)


# -- what is there already ---------------------------------------------------------------------


def others_table(out: Path, name: str = "another") -> None:
    """A table of drift that another machine left."""
    Origin(machine={"name": name}).save(out / "drift-x.csv", drift()["drift"], "drift")


def test_tables_of_two_machines_do_not_mix(tmp_path: Path) -> None:
    others_table(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="holds a recording of another, .*: choose another"):
        measure("layers", networks=TINY, out=tmp_path)
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != ".lock"] == before


def test_tables_of_the_quick_profile_are_not_taken_for_those_of_full(measured: Path) -> None:
    with pytest.raises(UserError, match="not measured by the profile full, such as layers-lenet5"):
        measure("all", profile="full", out=measured, dry_run=True)
    assert engine._default_out(grammar.read("full"), "") != engine._default_out(
        grammar.read("quick"), ""
    )


def test_a_table_that_lacks_sizes_or_collectives_gets_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of reduce_scatter, which then predicts."""
    budget = {"warmup": 1, "min_repeats": 3, "max_repeats": 3, "max_s": 0.1}
    point = {"measure": "collectives", "budget": budget}
    file, out, counts = tmp_path / "mine.json", tmp_path / "out", []
    few = {"sizes": ["4KiB", "16KiB"], "collectives": "all_reduce"}
    more = {"sizes": ["4KiB", "16KiB", "64KiB"], "collectives": ["all_reduce", "reduce_scatter"]}
    for asked in (few, few, more):
        file.write_text(json.dumps({"device": "cpu", "points": [{**point, **asked}]}))
        measure(str(file), out=out)
        rows = store.load_table(out / "collectives-loopback-p2.csv")
        counts.append(rows.groupby(["collective", "bytes"]).size().to_dict())
    assert counts[0] == counts[1] == {("all_reduce", size): 3 for size in (4096, 16384)}
    every = [(name, n) for name in more["collectives"] for n in (4096, 16384, 65536)]
    assert counts[2] == dict.fromkeys(every, 3)
    profile = tmp_path / "profile.csv"
    profile.write_text(
        "tensor,gradient_bytes,forward_s,backward_s\na,8192,0.1,0.1\nb,8192,0.1,0.1\n"
    )
    table = str(out / "collectives-loopback-p2.csv")
    argv = ["predict", "--profile", str(profile), "--collectives", table, "--json"]
    capsys.readouterr()
    assert cli.main([*argv, "--collective", "reduce_scatter"]) == 0
    found = json.loads(capsys.readouterr().out)
    low, high = found["interval_95_s"]
    assert low <= found["iteration_s"] <= high
