"""What controls communication here: every level is listed, and what is absent says why."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from ddlkit.run.measure import controls
from ddlkit.run.measure.controls import ABSENT, OFFERED


def test_every_level_is_listed_and_what_is_absent_says_why() -> None:
    table = controls.offered()
    levels = ["environment", "communicator", "call", "thread"]
    assert list(dict.fromkeys(table["level"])) == levels
    assert not table["control"].duplicated().any()
    assert set(table["outcome"]) <= {OFFERED, ABSENT}
    assert ((table["reason"] == "none") == (table["outcome"] == OFFERED)).all()
    if not dist.is_nccl_available():
        assert set(table.loc[table["level"] != "thread", "outcome"]) == {ABSENT}


def test_a_thread_that_may_not_be_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    reasons = controls.offered().set_index("control")["reason"]
    assert reasons["cores"] == "not permitted: Operation not permitted"


@pytest.mark.parametrize(
    ("version", "since", "reason"),
    [((2, 28, 9), (2, 17), ""), ((2, 16, 2), (2, 17), "NCCL 2.16.2 is older than 2.17")],
)
def test_a_version_of_nccl_is_compared_with_what_it_must_be(
    version: tuple[int, ...],
    since: tuple[int, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert controls._lacks_nccl(since) == reason
