"""Gradients of several types: messages keep them apart, in the buckets of PyTorch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddlkit.core import plan as plans
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration, predict
from ddlkit.core.plan import FusionPlan, ddp, make_plan
from ddlkit.core.resources import Resources, jointly
from ddlkit.core.workload import Workload
from ddlkit.formats import export, read_plan


def of_types(n_bytes: list[int], dtype: list[str]) -> Workload:
    """A workload whose gradients become ready second by second."""
    work = Workload.from_arrays(0.0, [1.0] * len(n_bytes), n_bytes)
    return replace(work, dtype=tuple(dtype))


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def test_buckets_of_several_types_are_those_that_ddp_assigns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch's own function gets the same tensors, in the same order of readiness."""
    first_bytes, later_bytes = 500, 2000
    monkeypatch.setattr(plans, "DDP_FIRST_BYTES", first_bytes)
    monkeypatch.setattr(plans, "DDP_BUCKET_BYTES", later_bytes)
    distributed: Any = torch.distributed
    assign = distributed._compute_bucket_assignment_by_size
    rng = np.random.default_rng(4)
    for _ in range(200):
        count = int(rng.integers(1, 30))
        dtype = rng.choice([*TYPES], count).tolist()
        elements = rng.integers(1, 200, count).tolist()
        tensors = [
            torch.empty(n, dtype=TYPES[name])
            for n, name in zip(elements, dtype, strict=True)
        ]
        work = of_types([tensor.nbytes for tensor in tensors], dtype)
        ready_order = list(range(count))
        for cap_bytes, limits in ((0, [first_bytes, later_bytes]), (900, [900])):
            assigned, _ = assign(tensors, limits, [False] * count, ready_order)
            plan = ddp(work, cap_bytes)
            assert [gradients.tolist() for gradients in plan.members] == assigned
            sizes = [sum(tensors[i].nbytes for i in bucket) for bucket in assigned]
            assert plan.group_bytes(work).tolist() == sizes


def test_a_message_waits_for_its_own_type_and_for_the_messages_before() -> None:
    cost = AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.01)
    in_turn = of_types([100] * 4, ["fp32", "bf16", "fp32", "bf16"])
    plan = ddp(in_turn, cap_bytes=200)
    # Gradients 0 and 2 leave after 3 s. Gradients 1 and 3 are ready after 4 s, and wait
    # until the first message of 2.5 s has ended.
    step = Iteration(in_turn, plan, cost)
    assert step.ready_s.tolist() == [3.0, 4.0]
    assert step.prediction.iteration_s == 3.0 + 2.5 + 2.5
    spans = step.timeline().to_frame()
    backward = spans[spans["kind"] == "backward"]
    assert backward["group"].tolist() == [0, 1, 0, 1]
    assert plan.forward_groups() == [[3, 1], [2, 0]]
    # What no gradient has closed is sent with the type that was ready first at the end.
    left_open = ddp(of_types([100, 100], ["bf16", "fp32"]))
    assert left_open.order == (1, 0)
    assert left_open.last_needed.tolist() == [1, 1]


def test_a_plan_in_a_file_keeps_types_apart(tmp_path: Path) -> None:
    work = of_types([100] * 4, ["fp32", "bf16", "fp32", "bf16"])
    plan = make_plan("ddp", work)
    written = tmp_path / "plan.json"
    written.write_text(json.dumps(plan.to_dict()))
    assert read_plan(written) == plan
    # Tensors of a message may be listed in any order.
    groups = [group[::-1] for group in plan.forward_groups()]
    written.write_text(json.dumps({"planner": "ddp", "groups": groups}))
    assert read_plan(written) == plan


def test_what_would_mix_types_is_refused() -> None:
    cost = AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.01)
    work = of_types([100] * 4, ["fp32", "bf16", "fp32", "bf16"])
    for spec in ("single", "exact", "mg_wfbp", "buffer:1KB"):
        with pytest.raises(UserError, match=r"several types \(bf16, fp32\)"):
            predict(work, make_plan(spec, work, cost), cost)
    alone = predict(work, make_plan("none", work), cost)
    assert alone.communication_s == 4 * 1.5
    apart = make_plan("ddp", work)
    for needs_contiguous in (
        lambda: apart.slices,
        lambda: jointly(work, [Resources("all", cost)], apart),
        lambda: Iteration(work, apart, cost).edges(),
        lambda: export.ddp(Iteration(work, apart, cost), "2.11"),
    ):
        with pytest.raises(UserError, match="of several types"):
            needs_contiguous()
    with pytest.raises(UserError, match="must have each of 2 gradients once"):
        FusionPlan("mine", (2,), order=(1, 1))
    with pytest.raises(UserError, match="dtype has 1 types, but there are 2 tensors"):
        of_types([100, 100], ["fp32"])
