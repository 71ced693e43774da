"""By what communication can be controlled here: each control is offered, or says why not."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddlkit.run.jobs.launch import Loopback, launch
from ddlkit.run.measure import controls
from ddlkit.run.measure.controls import ABSENT, HEEDED, IGNORED, LEVELS, OFFERED
from ddlkit.run.sessions.kinds import Here, controls_of_communication

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def test_every_level_is_listed_and_what_is_absent_says_why() -> None:
    found = controls.offered()
    assert set(found["level"]) == set(LEVELS)
    assert not found["control"].duplicated().any()
    assert set(found["outcome"]) <= {OFFERED, ABSENT}
    assert ((found["reason"] == "none") == (found["outcome"] == OFFERED)).all()
    nccl = found[found["level"].isin(LEVELS[:2])]
    if not dist.is_nccl_available():
        assert set(nccl["outcome"]) == {ABSENT}


def test_a_thread_that_may_not_be_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    rows = controls.offered().set_index("control")
    assert rows.loc["cores", "reason"] == "not permitted: Operation not permitted"
    monkeypatch.delattr(os, "sched_setaffinity")
    assert (
        controls.offered().set_index("control").loc["cores", "reason"]
        == "this system has no such call"
    )


@pytest.mark.parametrize(
    ("names", "reason"),
    [(None, "not installed"), ((), "older than NCCL 2.32"), (("NCCLCollConfig",), "")],
)
def test_a_package_that_is_not_required_is_probed(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] | None, reason: str
) -> None:
    module: Any = ModuleType("nccl.core")
    for name in names or ():
        setattr(module, name, object)
    monkeypatch.setitem(sys.modules, "nccl", ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.core", None if names is None else module)
    assert reason in controls.lacks_call() and bool(reason) == bool(controls.lacks_call())


@pytest.mark.parametrize(
    ("here", "since", "reason"),
    [((2, 28, 9), (2, 17), ""), ((2, 16, 2), (2, 17), "NCCL 2.16.2 is older than 2.17")],
)
def test_an_old_nccl_lacks_what_came_later(
    monkeypatch: pytest.MonkeyPatch,
    here: tuple[int, ...],
    since: tuple[int, ...],
    reason: str,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: here)
    assert controls._lacks_nccl(since) == reason


def test_the_proof_needs_two_gpus(tmp_path: Any) -> None:
    assert [one.name for one in controls_of_communication(Here("cpu", 1, tmp_path))] == ["cpu"]
    _, proof = controls_of_communication(Here("cuda", 1, tmp_path))
    assert (proof.estimate_s > 0) == (torch.cuda.device_count() >= 2)


@pytest.mark.gpu
@two_gpus
def test_gpu_a_communicator_heeds_its_blocks_but_perhaps_not_in_an_all_to_all() -> None:
    how: dict[str, Any] = {"ranks": 2, "place": Loopback(), "join": {"backend": "nccl"}}
    rows = launch(controls.controls_job, controls.ControlsSettings(), **how)["controls"]
    by_operation = rows[rows["level"] == "communicator"].groupby("operation")["outcome"]
    assert set(by_operation.get_group("all_reduce")) == {HEEDED}
    if IGNORED in set(by_operation.get_group("all_to_all")):
        pytest.xfail(f"NVIDIA/nccl#2421 holds in NCCL {torch.cuda.nccl.version()}")
