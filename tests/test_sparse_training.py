"""Iterations of sparsified training on two ranks: every phase is there, together they are the iteration."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.launch import Loopback, launch
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure import sparse_training
from ddlkit.run.measure.sparse_training import (
    PHASES,
    SIZES,
    SparseTrainingSettings,
    _Block,
    selection_here,
    sparse_training_job,
)

PLANS = {"single": (10,), "none": tuple(range(1, 11)), "cuts:4": (4, 10)}
JOIN = {"backend": "gloo", "timeout_s": 20.0}


def measured(**how: Any) -> pd.DataFrame:
    settings = SparseTrainingSettings("lenet5", 4, **{"density": 0.01, "plans": PLANS, **how})
    found = launch(sparse_training_job, settings, ranks=2, place=Loopback(), join=JOIN)
    return found["sparse_training"]


def test_phases_of_every_plan_iteration_and_rank_make_up_the_iteration() -> None:
    rows = measured(repeats=2, iterations=3)
    assert rows.groupby("plan").size().to_dict() == dict.fromkeys(PLANS, 2 * 3 * 2)
    assert rows.groupby("plan")["messages"].first().to_dict() == {
        name: len(ends) for name, ends in PLANS.items()
    }
    parts = rows[list(PHASES)].sum(axis=1)
    assert (rows[list(PHASES)] > 0).all().all()
    assert (parts <= rows["iteration_s"] + 1e-9).all()
    assert (rows["compute_s"] > 0).all() and set(rows["rank"]) == {0, 1}


def test_a_plan_leaves_no_copy_of_the_network_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SparseTrainingSettings("lenet5", 4, 0.01, PLANS, iterations=1)
    me = Rank(0, 1, 0, torch.device("cpu"), "gloo", 1, 1)
    copies: list[weakref.ref[torch.nn.Parameter]] = []
    before: list[int] = []

    def counted(*given: Any) -> _Block:
        before.append(sum(one() is not None for one in copies))
        block = _Block(*given)
        copies.extend(map(weakref.ref, block.model.parameters()))
        return block

    monkeypatch.setattr(sparse_training, "_Block", counted)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    gc.disable()  # by itself it comes too late for networks of some gigabytes
    try:
        assert len(list(sparse_training_job.part(me, settings))) == 2 * len(PLANS)
    finally:
        gc.enable()
        dist.destroy_process_group()
    assert before == [0] * 2 * len(PLANS)


def test_a_mistake_is_one_line() -> None:
    with pytest.raises(UserError, match="sparsified training of 0 plans, 2 repeats of 10"):
        SparseTrainingSettings("lenet5", 4, 0.01, {})
    with pytest.raises(UserError, match=r"density 2.0 is not above 0 and at most 1 \(rank 0\)"):
        measured(density=2.0)
    with pytest.raises(UserError, match="plan 'x' is of 3 tensors, the module trains 10"):
        measured(plans={"x": (3,)})


def test_selecting_is_timed_to_plan_with() -> None:
    found = selection_here("cpu", 0.01, 1)
    assert found.elements.tolist() == list(SIZES)
    assert (found(1e6, 0.01) > 0) and found(1e6, 0.01) > found(1e3, 0.01)
