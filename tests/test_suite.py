"""``ddlkit measure``: points are resumed, mistakes and damage are one line, no half table is left."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

import faulty_points
from ddlkit import cli, store
from ddlkit.core.errors import UserError
from forked import Forked
from places import PATIENCE_S, ROOT, wait_for
from workbook.cli import main
from workbook.record import grammar, recording
from workbook.record.recording import record

BUDGET = {"warmup": 1, "min_repeats": 2, "max_repeats": 3, "max_s": 0.1}
TINY = {"measure": "layers", "networks": "lenet5:4", "ranks": 1, "budget": BUDGET}


def written(directory: Path, *points: object) -> str:
    file = directory / "mine.json"
    file.write_text(json.dumps({"device": "cpu", "points": list(points)}))
    return str(file)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("asked"), TINY)


@pytest.fixture(scope="module")
def measured(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(record(tiny, out=tmp_path_factory.mktemp("measured")))


def test_a_second_run_measures_nothing_again_and_a_dry_run_nothing_at_all(
    tiny: str, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for path in measured.iterdir()
        if path.suffix == ".csv"
    }
    record(tiny, out=measured)
    assert "already measured: layers/lenet5-b4-r1" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert str(record(tiny, out=measured, dry_run=True)).startswith(
        "1 measurement done already: nothing is left to do"
    )
    lines = str(record(tiny, out=tmp_path, dry_run=True)).splitlines()
    assert lines[0].split()[0] == "layers/lenet5-b4-r1"
    assert lines[1].startswith(f"0 of 1 measurement done in {tmp_path}; the rest takes")
    assert not [*tmp_path.iterdir()]


@pytest.mark.fault(
    fault="a table that is to be gone on from was changed",
    injected="one word of a recorded CSV replaced",
    holds="it is told, and neither used nor overwritten",
)
def test_a_damaged_table_is_told_not_measured_over(
    tiny: str, measured: Path, tmp_path: Path
) -> None:
    for path in measured.glob("*lenet5*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / "layers-lenet5-b4-r1.csv"
    damaged.write_text(damaged.read_text().replace("conv1", "conv9"))
    with pytest.raises(UserError, match="was changed after it was recorded"):
        record(tiny, out=tmp_path)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "points: []: an empty list"),
        ([{"measure": "selections", "more": 1}], "points[0]: more: unknown key"),
        ([{"measure": "training_by_share"}], "must be campaign or layers"),
        ([{"measure": "selections", "device": "tpu"}], "points[0]: device: 'tpu'"),
        (
            [{"measure": "memory_copies", "budget": 1}],
            "budget: 1: must be a mapping of warmup, ",
        ),
        (
            [{"measure": "memory_copies", "budget": {"min_repeat": 1}}],
            "min_repeat: unknown key: did you mean 'min_repeats'?",
        ),
        (
            [{"measure": "memory_copies", "budget": {"min_repeats": "a"}}],
            "min_repeats: 'a': must be a whole number",
        ),
        (
            [{"measure": "collectives", "link": "loopback-p0", "budget": {}}],
            "points[0]: link: 'loopback-p0': unknown: did you mean 'loopback-p2'?",
        ),
        (
            [{"measure": "collectives", "sizes": [], "budget": {}}],
            "points[0]: sizes: []: an empty list",
        ),
        (
            [{"measure": "collectives", "delay": "1ms", "budget": {}}],
            "points[0]: delay: only links that have a rate",
        ),
        (
            [{"measure": "drift", "moment": "end", "side": 9, "size": "1MiB..4MiB"}],
            "points[0]: size: drift takes one size",
        ),
        ([{"measure": "drift", "side": 9}], "points[0]: moment, size: these keys are"),
        (
            [{"measure": "collectives", "sizes": "4Kb", "budget": {}}],
            "size '4Kb' has unit",
        ),
    ],
)
def test_a_wrong_suite_is_one_line_that_names_file_and_key(
    points: list[object], message: str, tmp_path: Path
) -> None:
    file = written(tmp_path, *points)
    with pytest.raises(UserError) as caught:
        record(file, out=tmp_path)
    assert str(caught.value).startswith(f"{file}: points")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"by_name": True}, "by_name"), ({"device": "cuda"}, "device")],
)
def test_a_file_of_which_nothing_is_measured_is_refused(
    keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    file = written(tmp_path, {**TINY, **keys})
    for dry_run in (True, False):
        with pytest.raises(UserError, match=f"^{file}: none of .* {message}"):
            record(file, out=tmp_path, dry_run=dry_run)


def test_predictions_are_made_of_a_part_that_is_a_campaign(tmp_path: Path) -> None:
    planned = record("campaign", out=tmp_path, dry_run=True, predict=True)
    assert "predicted/campaign-quick cases" in str(planned)
    with pytest.raises(UserError, match="nothing .* the part layers of quick"):
        record("layers", out=tmp_path, dry_run=True, predict=True)


@pytest.mark.parametrize("isolate", [True, False])
def test_a_device_that_is_lacking_is_blamed_on_the_file_that_asks_for_it(
    isolate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddlkit.store.machine.describe", lambda: {"gpus": []})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "of_gpus.json"
    asked = {"device": "cuda", "isolate": isolate, "points": [TINY]}
    file.write_text(json.dumps(asked))
    with pytest.raises(UserError, match=f"^{file}: device: cuda: .*write device: cpu"):
        record(str(file), out=tmp_path)
    with pytest.raises(UserError, match="--device cpu$"):
        record(str(file), out=tmp_path, device="cuda")


def test_a_wrong_key_of_all_points_is_not_blamed_on_one(tmp_path: Path) -> None:
    file = tmp_path / "shared.json"
    # Points of another kind have the key "repeats".
    points = [{"measure": "selections"}, {"measure": "memory_copies"}]
    file.write_text(json.dumps({"repeats": 2, "points": points}))
    with pytest.raises(UserError) as caught:
        record(str(file), out=tmp_path)
    assert str(caught.value).startswith(f"{file}: repeats: unknown key of the points")


def record_long(out: Path, said: Path) -> None:
    """The command is ours, and the points are those of a test."""
    # The fork server ignores SIGINT, and its processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    vars(recording)["points"] = faulty_points.long
    vars(recording)["partial"] = lambda make, **_: make
    sys.stderr = said.open("a")
    # The process that measures is a new one, and imports the points.
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    sys.exit(main(["record", "cpu", "--device", "cpu", "--out", str(out)]))


@pytest.mark.fault(
    fault="measuring is interrupted, terminated, or its terminal is closed",
    injected="SIGINT, SIGTERM, SIGHUP between two tables",
    holds="one line; status 130, or 143; whole tables only, which the next run keeps",
)
def test_being_ended_is_one_line_and_leaves_no_half_table(tmp_path: Path) -> None:
    ends = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
    said = tmp_path / "said"
    for number, status in ends.items():
        out = tmp_path / number.name
        process = Forked(record_long, out, said)
        process.start()
        assert process.pid is not None
        assert wait_for((out / "drift-first.csv").exists)
        os.kill(process.pid, number)
        process.join(PATIENCE_S)
        assert process.exitcode == status
        assert [path.name for path in out.glob("drift*.csv")] == ["drift-first.csv"]
        assert len(store.load_table(out / "drift-first.csv", "drift")) == 1
    printed = said.read_text()
    assert printed.count("interrupted; what was measured is kept") == len(ends)
    assert "Traceback" not in printed


def test_tables_of_the_suite_quick_are_not_taken_for_those_of_full(
    measured: Path,
) -> None:
    with pytest.raises(UserError, match="suite full did not measure, as layers-lenet5"):
        record("all", suite="full", out=measured, dry_run=True)
    full, quick = (
        recording._default_out(grammar.read(name), "") for name in ("full", "quick")
    )
    assert full != quick


def test_a_table_that_lacks_sizes_or_collectives_gets_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = {"measure": "collectives", "budget": {**BUDGET, "min_repeats": 3}}
    out, counts = tmp_path / "out", []
    few = {"sizes": ["4KiB", "16KiB"], "collectives": "all_reduce"}
    more = {
        "sizes": ["4KiB", "16KiB", "64KiB"],
        "collectives": ["all_reduce", "reduce_scatter"],
    }
    for wanted in (few, few, more):
        record(written(tmp_path, {**point, **wanted}), out=out)
        rows = store.load_table(out / "collectives-loopback-p2.csv")
        counts.append(rows.groupby(["collective", "bytes"]).size().to_dict())
    assert counts[0] == counts[1] == {("all_reduce", size): 3 for size in (4096, 16384)}
    every = [(name, n) for name in more["collectives"] for n in (4096, 16384, 65536)]
    assert counts[2] == dict.fromkeys(every, 3)
    profile = tmp_path / "profile.csv"
    profile.write_text("tensor,gradient_bytes,forward_s,backward_s\na,8192,0.1,0.1\n")
    table = str(out / "collectives-loopback-p2.csv")
    argv = ["predict", "--profile", str(profile), "--collectives", table, "--json"]
    capsys.readouterr()
    assert cli.main([*argv, "--collective", "reduce_scatter", "--level", "0.9"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    low, high = predicted["iteration_interval_s"]
    assert low <= predicted["iteration_s"] <= high
    # Contention was not measured, so nobody knows how many iterations the interval holds.
    assert (
        predicted["interval_level"] is None
        and "messages" in predicted["interval_includes"]
    )


def test_networks_that_are_chosen_take_the_place_of_the_suites_own(
    tmp_path: Path,
) -> None:
    listed = str(
        record("layers", networks=["lenet5:2", "vgg16"], out=tmp_path, dry_run=True)
    )
    keys = [line.split()[0] for line in listed.splitlines()[:-1]]
    assert keys == ["layers/lenet5-b2-r1", "layers/vgg16-b4-r1"]


def test_networks_are_refused_by_the_name_that_was_given(tmp_path: Path) -> None:
    for name in ("quick", "all", "slowdown"):
        told = f"not on {name}: .* layers --networks lenet5:2$"
        with pytest.raises(UserError, match=told):
            record(name, networks=["lenet5:2"], out=tmp_path)


def test_what_needs_a_lab_is_left_out_or_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is said once, however many points of a part need a lab."""
    for name in ("why_unavailable", "lacking"):
        monkeypatch.setattr(f"ddlkit.lab.network.{name}", lambda: "no lab today")
    in_lab = {"measure": "collectives", "ranks": 2, "rate": "1gbit", "budget": BUDGET}
    alone = written(tmp_path, in_lab, {**in_lab, "rate": "2gbit"})
    for dry_run in (False, True):
        with pytest.raises(UserError, match="no collectives here: no lab today"):
            record(alone, out=tmp_path / "out", dry_run=dry_run)
    capsys.readouterr()
    beside_others = written(tmp_path, in_lab, {**in_lab, "rate": "2gbit"}, TINY)
    plan = str(record(beside_others, out=tmp_path / "out", dry_run=True))
    assert capsys.readouterr().err.count("no lab today") == 1
    assert "layers/" in plan and "collectives/" not in plan
    campaign = str(record("campaign", out=tmp_path / "out", dry_run=True))
    assert campaign.splitlines()[-1].endswith("no lab today")
