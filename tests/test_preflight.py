"""What is checked before a recording: a line each, and a fault costs only its own check."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import smi
from ddlkit.core.errors import UserError
from ddlkit.jobs import vitals
from ddlkit.measure import session as sessions
from ddlkit.store import machine
from workbook import cli
from workbook.record import preflight


def wrong(device: str) -> str:
    raise UserError("it is wrong")


def test_each_check_is_a_line_and_a_fault_costs_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = {"wrong": wrong, "fine": lambda device: f"all is well on {device}"}
    monkeypatch.setattr(preflight, "CHECKS", checks)
    monkeypatch.setattr(preflight, "EXPECTED_S", dict.fromkeys(checks, 1.0))
    points = preflight.checks(out=tmp_path, session=1, device="cpu").body
    origin = sessions.Origin(machine={"name": "here"})
    rows = {point.name: point.measure_and_save(tmp_path, origin) for point in points}
    assert (rows["wrong"].outcome, rows["wrong"].reason) == (
        sessions.FAILED,
        "it is wrong",
    )
    assert rows["fine"].outcome == sessions.MEASURED and not [*tmp_path.iterdir()]
    assert "fine: all is well on cpu" in capsys.readouterr().err


def test_variables_that_change_what_is_measured_are_to_be_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in preflight.HARMFUL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DDLKIT_COMMIT", "0123abc+dirty")
    assert cli.main(["record", "cpu", "--preflight"]) == 0
    assert capfd.readouterr().out.startswith("preflight: all is well, after ")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(UserError, match="^NVIDIA_TF32_OVERRIDE: set"):
        preflight.environment("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        UserError, match="run unset NVIDIA_TF32_OVERRIDE CUDA_VISIBLE_DEVICES first$"
    ):
        preflight.environment("cuda")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")
    assert preflight.environment("cpu").startswith("commit ")
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    monkeypatch.delenv("DDLKIT_COMMIT")
    with pytest.raises(UserError, match="set DDLKIT_COMMIT to the hash"):
        preflight.environment("cpu")


def test_what_is_checked_must_be_known_and_have_its_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "describe", lambda: {"gpus": []})
    told = {
        "nosuch --device cpu": "nosuch: no such suite",
        "gpu": "measure the suite cpu",
        "gpu-long": "measure the suite cpu",
        "layers --device cuda": "use --device cpu",
    }
    for words, message in told.items():
        assert cli.main(["record", *words.split(), "--preflight"]) == 2
        assert message in capsys.readouterr().err


def test_a_check_that_failed_is_named_in_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def session(points: object, out: Path, **how: object) -> None:
        ends = {"environment": sessions.FAILED, "packages": sessions.MEASURED}
        rows = [sessions.Row("check", name, outcome) for name, outcome in ends.items()]
        origin = sessions.Origin(machine={"name": "here"})
        origin.save(out / "outcomes.csv", pd.DataFrame(rows), "outcomes")

    monkeypatch.setattr(preflight, "run_session", session)
    assert cli.main(["record", "cpu", "--preflight"]) == 1
    assert capfd.readouterr().out.startswith("preflight: FAILED: environment, after ")


def test_others_on_the_gpu_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "PATIENCE_S", 0.5)
    smi.install(tmp_path / "idle", monkeypatch)
    line = preflight.nvidia_smi("cuda")
    assert line == "0% 4 MiB; persistence mode Disabled; nobody else is there"
    smi.install(
        tmp_path / "busy", monkeypatch, {"utilization.gpu": "97", "memory.used": "4096"}
    )
    with pytest.raises(UserError, match="^gpu0 is in use by others"):
        preflight.nvidia_smi("cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="^nvidia-smi does not answer"):
        preflight.nvidia_smi("cuda")
