"""What is checked before a recording: a line each, and a fault costs only its own check."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

import smi
from ddlkit import cli
from ddlkit.core.errors import UserError
from ddlkit.run import vitals
from ddlkit.run.sessions import preflight


def fine(device: str) -> str:
    return f"on {device}"


def wrong(device: str) -> str:
    raise UserError("it is wrong")


def broken(device: str) -> str:
    return dict[str, str]()["key"]


def hanging(device: str) -> str:
    time.sleep(100)
    return ""


def killed(device: str) -> str:
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


def test_variables_that_change_what_is_measured_are_to_be_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in preflight.HARMFUL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    monkeypatch.delenv("DDLKIT_COMMIT", raising=False)
    with pytest.raises(UserError, match="set DDLKIT_COMMIT$"):
        preflight.environment("cpu")
    monkeypatch.setenv("DDLKIT_COMMIT", "0123abc+dirty")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert preflight.environment("cuda").startswith("commit 0123abc+dirty")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="^unset CUDA_LAUNCH_BLOCKING, CUDA_VISIBLE_DEVICES"):
        preflight.environment("cuda")


def test_others_on_the_gpu_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "PATIENCE_S", 0.5)
    smi.install(tmp_path / "idle", monkeypatch)
    told = preflight.nvidia_smi("cuda")
    assert told == "0% 4 MiB; persistence mode Disabled; nobody else is there"
    smi.install(tmp_path / "busy", monkeypatch, {"utilization.gpu": "97", "memory.used": "4096"})
    with pytest.raises(UserError, match="^gpu0 is in use by others"):
        preflight.nvidia_smi("cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="^nvidia-smi does not answer"):
        preflight.nvidia_smi("cuda")
