"""What is checked before a recording: a line each, and a fault costs only its own check."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import tomllib

import smi
from ddlkit import cli
from ddlkit.core.errors import UserError
from ddlkit.run import vitals
from ddlkit.run.sessions import preflight
from places import ROOT


def fine(device: str, out: Path) -> str:
    return f"on {device}"


def wrong(device: str, out: Path) -> str:
    raise UserError("it is wrong")


def broken(device: str, out: Path) -> str:
    return dict[str, str]()["key"]


def hanging(device: str, out: Path) -> str:
    time.sleep(100)
    return ""


def killed(device: str, out: Path) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def test_each_check_is_a_line_and_a_fault_costs_only_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = {"fine": fine, "wrong": wrong, "broken": broken, "hanging": hanging}
    monkeypatch.setattr(preflight, "CHECKS", checks | {"killed": killed, "last": fine})
    monkeypatch.setattr(preflight, "LIMIT_S", 0.5)
    assert cli.main(["record", "--suite", "cpu", "--preflight"]) == 1
    *lines, verdict = capsys.readouterr().out.splitlines()
    told = [re.fullmatch(r"(ok|FAILED) +\d+\.\d s  (\w+) +(.*)", line) for line in lines]
    assert [match.groups() for match in told if match] == [
        ("ok", "fine", "on cpu"),
        ("FAILED", "wrong", "it is wrong"),
        ("FAILED", "broken", "KeyError: 'key'"),
        ("FAILED", "hanging", "did not end within 500 ms"),
        ("FAILED", "killed", "its process was killed by SIGKILL"),
        ("ok", "last", "on cpu"),
    ]
    assert verdict.startswith("preflight: FAILED: wrong, broken, hanging, killed, after ")
    monkeypatch.setenv(preflight.PATIENCE, "0")
    assert cli.main(["record", "--suite", "cpu", "--preflight"]) == 2
    assert "a factor above zero is needed" in capsys.readouterr().err


def test_variables_that_change_what_is_measured_are_to_be_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in preflight.HARMFUL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    monkeypatch.delenv("DDLKIT_COMMIT", raising=False)
    with pytest.raises(UserError, match="set DDLKIT_COMMIT$"):
        preflight.environment("cpu", Path())
    monkeypatch.setenv("DDLKIT_COMMIT", "0123abc+dirty")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert preflight.environment("cuda", Path()).startswith("commit 0123abc+dirty")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="^unset CUDA_LAUNCH_BLOCKING, CUDA_VISIBLE_DEVICES"):
        preflight.environment("cuda", Path())


def test_an_old_package_and_too_little_space_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    asked = dict(re.findall(r"([\w-]+) ?>= ?([\d.]+)", str(lists)))
    assert preflight.NEEDED.items() <= asked.items()
    monkeypatch.setitem(preflight.NEEDED, "numpy", "99.1")
    with pytest.raises(UserError, match="^at least numpy 99.1, here "):
        preflight.packages("cpu", tmp_path)
    assert preflight.space("cpu", tmp_path / "to" / "come").startswith("free: memory ")
    monkeypatch.setitem(preflight.SPACE, "disk", 2**60)
    with pytest.raises(UserError, match="^disk needs .* GiB; free: memory "):
        preflight.space("cpu", tmp_path)


def test_others_on_the_gpu_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "PATIENCE_S", 0.5)
    smi.install(tmp_path / "idle", monkeypatch)
    told = preflight.nvidia_smi("cuda", tmp_path)
    assert told == "0% 4 MiB; persistence mode Disabled; nobody else is there"
    smi.install(tmp_path / "busy", monkeypatch, {"utilization.gpu": "97", "memory.used": "4096"})
    with pytest.raises(UserError, match="^gpu0 is in use by others"):
        preflight.nvidia_smi("cuda", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="^nvidia-smi does not answer"):
        preflight.nvidia_smi("cuda", tmp_path)
