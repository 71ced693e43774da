"""A loop from a notebook runs on ranks; and what is measured briefly can be read as tables."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.errors import UserError
from leftovers import none_left
from workbook.common import source
from workbook.course.here import gradients
from workbook.record import brief, readiness

NETWORK = "lenet5"


def count(rank: int) -> list[tuple[str, float]]:
    import torch.distributed as dist

    ranks = dist.get_world_size()
    return [(f"gradient {rank + k} of {ranks}", k / 4) for k in range(3)]


def named(rank: int) -> str:
    return f"gradient of rank {rank}"


def call(rank: int) -> list[tuple[str, float]]:
    return [(named(rank), 0.0)]


def fail(rank: int) -> list[tuple[str, float]]:
    raise RuntimeError(f"rank {rank} cannot train")


def test_every_rank_runs_the_loop_and_keeps_its_order(tmp_path: Path) -> None:
    with none_left(tmp_path):
        ready = readiness.watch(count, ranks=2)
    assert ready["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    names = [f"gradient {rank + k} of 2" for rank in range(2) for k in range(3)]
    assert ready["tensor"].tolist() == names
    np.testing.assert_allclose(ready["after_first_s"], 2 * [0, 0.25, 0.5])


def test_a_loop_may_call_functions_that_are_sent_with_it() -> None:
    ready = readiness.watch(call, ranks=2, calls=[named])
    assert ready["tensor"].tolist() == ["gradient of rank 0", "gradient of rank 1"]


def test_a_loop_that_fails_is_one_line_and_leaves_no_rank(tmp_path: Path) -> None:
    with none_left(tmp_path), pytest.raises(UserError, match="cannot train") as raised:
        readiness.watch(fail, ranks=2)
    assert "\n" not in str(raised.value)


def test_what_is_measured_briefly_is_compared_with_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(brief, "SIDES", {"cpu": (8, 64), "cuda": (8, 64)})
    monkeypatch.setattr(brief, "SIZES", (1024, 4096))
    actions: list[Any] = []

    def clock(action: Any, wait: Any) -> float:
        begin = perf_counter()
        actions.append(action())
        wait()
        return perf_counter() - begin

    assert brief.measure(tmp_path, NETWORK, 2, clock) == ""
    assert [tuple(product.shape) for product in actions] == [(8, 8), (64, 64)]
    here = source.open_here(str(tmp_path))
    sentence, figure = gradients.compare(here, here, NETWORK)
    assert figure is not None and "1 KiB" in sentence
    assert isinstance(here.table("peaks"), pd.DataFrame)
    assert capfd.readouterr().err == "", "a notebook shows no lines of progress"


def test_an_unknown_network_is_why_nothing_is_measured(tmp_path: Path) -> None:
    why = brief.measure(tmp_path, "no-such-network", 2, lambda action, wait: 1.0)
    assert "no-such-network" in why
    assert not source.open_here(str(tmp_path)).has("layers")
