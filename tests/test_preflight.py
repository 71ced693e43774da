"""Preflight: what would spoil half an hour is found in half a minute, check by check."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import tomllib

import smi
from ddlkit import machine
from ddlkit.core.errors import UserError
from ddlkit.run.instruments import vitals
from ddlkit.run.sessions import preflight
from ddlkit.run.sessions.preflight import Check, Here, Stage
from places import PATIENCE_S, ROOT

HERE = Here("cpu", Path())
LINE = re.compile(r"(ok|FAILED) +\d+\.\d s  ([\w-]+) +\S")


def well(_: Here) -> str:
    return "as it should be"


def wrong(_: Here) -> str:
    raise UserError("mend it")


def broken(_: Here) -> str:
    raise KeyError("drift")


def late(_: Here) -> str:
    time.sleep(2)
    return "late"


def gone(_: Here) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def hanging(_: Here) -> str:
    time.sleep(1000)
    return ""


def test_each_check_is_a_line_and_a_fault_costs_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checks = [Check(run.__name__, run) for run in (well, wrong, broken, gone, hanging)]
    skipped, last = Check("skipped", wrong, gpu=True), Check("last", well)
    # Beside the one that hangs the others have ended long before, on the busiest machine.
    stages = [Stage(20.0, [*checks, skipped]), Stage(250.0, [last])]
    monkeypatch.setattr(preflight, "STAGES", stages)
    before = set(psutil.Process().children())
    assert preflight.preflight("cpu", tmp_path) == 1
    *told, last_check, verdict = capfd.readouterr().out.splitlines()
    assert all(map(LINE.match, (*told, last_check)))
    assert sorted(re.sub(r" +[\d.]+ s  ", " ", line) for line in told) == [
        "FAILED broken       KeyError: 'drift'",
        "FAILED gone         its process was killed by SIGKILL",
        f"FAILED hanging      {told[-1].partition('hanging      ')[2]}",
        "FAILED wrong        mend it",
        "ok well         as it should be",
    ]
    assert re.search(r"did not end within [\d.]+ s$", told[-1]), "and it is the last to end"
    assert last_check.startswith("ok ") and "last" in last_check
    assert re.match("preflight: FAILED: .*hanging, after ", verdict)
    assert set(psutil.Process().children()) == before
    monkeypatch.setattr(preflight, "STAGES", [Stage(250.0, [last])])
    assert preflight.preflight("cpu", tmp_path) == 0
    assert "preflight: all is well, after" in capfd.readouterr().out


def test_no_check_takes_the_time_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of these ends only when all run: one after the other, none would."""
    meeting = multiprocessing.get_context("fork").Barrier(4)

    def meets(_: Here) -> str:
        return f"as number {meeting.wait(PATIENCE_S)}"

    checks = [Check(f"check{number}", meets) for number in range(4)]
    monkeypatch.setattr(preflight, "STAGES", [Stage(PATIENCE_S, checks)])
    assert preflight.preflight("cpu", tmp_path) == 0
    assert len(re.findall("^ok .* as number [0-3]$", capfd.readouterr().out, re.MULTILINE)) == 4


def test_the_time_of_all_is_half_a_minute_and_each_stage_has_some() -> None:
    ends_s = [0.0, *(stage.by_s for stage in preflight.STAGES)]
    assert ends_s[-1] == 30.0
    assert min(b - a for a, b in itertools.pairwise(ends_s)) >= 8.0


@pytest.mark.parametrize("run", [hanging, gone, broken])
def test_a_look_for_gpus_that_breaks_is_not_taken_for_there_being_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    run: Callable[[Here], str],
) -> None:
    """Exit status 2, for no GPU, ends the whole day."""
    stages = [Stage(2.0, [Check("gpu", run, gpu=True)]), Stage(60.0, [Check("well", well)])]
    monkeypatch.setattr(preflight, "STAGES", stages)
    assert preflight.preflight("cuda", tmp_path) == 1
    assert "preflight: FAILED: gpu, after" in capfd.readouterr().out
    monkeypatch.setattr(machine, "describe", lambda: {"gpus": []})
    monkeypatch.setattr(
        preflight, "STAGES", [Stage(250.0, [Check("gpu", preflight.gpu, gpu=True)])]
    )
    with pytest.raises(UserError, match="^no GPU here: "):
        preflight.preflight("cuda", tmp_path)


def ddlkit(*words: str, **how: str) -> subprocess.CompletedProcess[str]:
    """The command, in an environment where nothing harms."""
    harmful = {*preflight.HARMFUL, "CUDA_VISIBLE_DEVICES"}
    environment = {name: value for name, value in os.environ.items() if name not in harmful}
    environment = {**environment, "DDLKIT_COMMIT": "0123abc", "PYTHONPATH": str(ROOT), **how}
    environment.setdefault(preflight.PATIENCE, "20")
    return subprocess.run(words, env=environment, capture_output=True, text=True)


RECORD = (sys.executable, "-m", "ddlkit", "record", "--preflight", "--suite")


@pytest.mark.slow
def test_all_is_well_where_recordings_are_made(tmp_path: Path, require_lab: None) -> None:
    """In a bare network namespace, whose loopback is down."""
    done = ddlkit("unshare", "--net", *RECORD, "cpu", "--out", str(tmp_path / "new" / "one"))
    *told, last = done.stdout.splitlines()
    assert done.returncode == 0 and last.startswith("preflight: all is well"), done.stdout
    checks = [check for stage in preflight.STAGES for check in stage.checks]
    ours = sorted(check.name for check in checks if not check.gpu)
    assert sorted(found[2] for line in told if (found := LINE.match(line))) == ours
    assert "127.0.0.1 answers: lo was down, and was raised" in done.stdout
    assert "all_reduce by 2: 4 KiB in " in done.stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("said", ["none", "0", "-1", "nan", "inf", ""])
def test_a_patience_that_is_no_factor_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv(preflight.PATIENCE, said)
    with pytest.raises(UserError, match="a factor above zero is needed"):
        preflight.preflight("cpu", tmp_path)


def test_patience_lengthens_what_a_stage_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the stage would have ended before it began, a thousand times as long is enough."""
    monkeypatch.setattr(preflight, "STAGES", [Stage(0.1, [Check("late", late)])])
    monkeypatch.setenv(preflight.PATIENCE, "1000")
    assert preflight.preflight("cpu", tmp_path) == 0
    monkeypatch.setenv(preflight.PATIENCE, "1")
    assert preflight.preflight("cpu", tmp_path) == 1


@pytest.mark.skipif(bool(machine.describe()["gpus"]), reason="there is a GPU")
def test_no_gpu_is_one_line_and_a_failure() -> None:
    done = ddlkit(*RECORD, "gpu")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("ddlkit: error: no GPU here: ") and done.stderr.count("\n") == 1


def test_who_may_not_raise_the_loopback_is_told_how(require_lab: None) -> None:
    check = "from ddlkit.run.sessions import preflight as p; p.loopback(p.Here('cpu', p.Path()))"
    unprivileged = ("unshare", "--net", "setpriv", "--bounding-set=-all", "--inh-caps=-all")
    done = ddlkit(*unprivileged, sys.executable, "-c", check)
    assert done.stderr.splitlines()[-1].endswith("lo is down: as root, ip link set lo up")


def test_variables_that_change_what_is_measured_are_to_be_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in {*os.environ, *preflight.HARMFUL}:
        if name in preflight.HARMFUL or re.match("CUDA|NCCL|TORCH|PYTORCH|OMP|GLOO", name):
            monkeypatch.delenv(name, raising=False)
    assert preflight.environment(HERE) == "nothing is set"
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert preflight.environment(HERE) == "CUDA_LAUNCH_BLOCKING=0 NCCL_DEBUG=INFO"
    for name in preflight.HARMFUL:
        monkeypatch.setenv(name, "1")
    with pytest.raises(UserError) as refused:
        preflight.environment(HERE)
    assert re.findall(r"unset (\w+):", str(refused.value)) == list(preflight.HARMFUL)
    for name in preflight.HARMFUL:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="^unset CUDA_VISIBLE_DEVICES: it hides every GPU$"):
        preflight.environment(Here("cuda", Path()))


def test_the_versions_needed_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["notebooks"]]
    least = dict(re.findall(r"^(\w+)>=([\d.]+)", "\n".join(asked), re.MULTILINE))
    assert {name: least[name] for name in preflight.NEEDED} == preflight.NEEDED
    assert len(preflight.NEEDED) == len(project["dependencies"]) + 1, "torchvision is a notebook's"


def test_an_old_or_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {**preflight.NEEDED, "torch": "2.4.0a0+cu121", "pandas": "2.10", "tqdm": "none"}
    monkeypatch.setattr(machine, "installed", there.__getitem__)
    with pytest.raises(UserError, match="^tqdm none: at least numpy 1.26, .*are needed$"):
        preflight.packages(HERE)
    monkeypatch.setitem(there, "tqdm", "4.70")
    monkeypatch.setitem(there, "torch", "2.3.1")
    with pytest.raises(UserError, match="^torch 2.3.1: at least"):
        preflight.packages(HERE)


def test_a_torchvision_that_cannot_be_imported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "installed", preflight.NEEDED.__getitem__)
    assert preflight.packages(HERE).endswith(preflight.NEEDED["tqdm"])
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UserError, match="^torchvision cannot be imported"):
        preflight.packages(HERE)


def test_what_is_short_of_space_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here("cpu", tmp_path / "to" / "come")
    assert preflight.space(here).startswith("free: memory ")
    monkeypatch.setitem(preflight.SPACE, "disk", 2**60)
    with pytest.raises(UserError, match="^disk needs .* GiB; free: memory "):
        preflight.space(here)


def test_code_of_no_commit_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    monkeypatch.setenv("DDLKIT_COMMIT", "0123abc+dirty")
    assert preflight.commit(HERE) == "0123abc+dirty"
    monkeypatch.delenv("DDLKIT_COMMIT")
    with pytest.raises(UserError, match="set DDLKIT_COMMIT$"):
        preflight.commit(HERE)


def test_nvidia_smi_is_asked_three_times_and_others_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here("cuda", tmp_path)
    monkeypatch.setattr(vitals, "PATIENCE_S", 0.5)
    monkeypatch.setattr(preflight, "HEARD_S", PATIENCE_S)
    played = smi.install(tmp_path / "idle", monkeypatch)
    assert re.fullmatch(
        r"(0% 4 MiB in \d+\.\d\d s, ){2}0% 4 MiB in \S+ s; persistence mode Disabled; .* there",
        preflight.nvidia_smi(here),
    )
    assert sum("persistence_mode" in words[0] for words in played.asked()) == 3
    monkeypatch.setattr(preflight, "HEARD_S", 0.5)
    smi.install(tmp_path / "mute", monkeypatch, mute=True)
    with pytest.raises(UserError, match="^nvidia-smi -lms says nothing"):
        preflight.nvidia_smi(here)
    monkeypatch.setattr(preflight, "HEARD_S", PATIENCE_S)
    busy = {"utilization.gpu": "97", "memory.used": "4096"}
    smi.install(tmp_path / "busy", monkeypatch, busy)
    with pytest.raises(UserError, match="^gpu0 is in use by others"):
        preflight.nvidia_smi(here)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="^nvidia-smi does not answer"):
        preflight.nvidia_smi(here)
