"""Our equations of PyTorch's cost models are its installed functions; what `export` writes it reads."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddlkit import cli
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.cost import AlphaBeta, MessageCost, Table
from ddlkit.core.units import KIB, MIB
from ddlkit.formats import export
from workbook.pytorch import curves
from workbook.pytorch import equations as pytorch
from workbook.pytorch.claims import recorded
from workbook.pytorch.equations import GPUS, Group
from workbook.record import estimators
from workbook.validate.clusters import resnet50

pinned = pytest.mark.skipif(
    not torch.__version__.startswith(pytorch.VERSION),
    reason=f"equations of torch {pytorch.VERSION}",
)
groups = st.builds(
    Group, st.sampled_from([*GPUS]), st.integers(2, 600), st.sampled_from([1, 4, 8])
)


@pinned
@settings(max_examples=60)
@given(groups, st.integers(1, 2**33), st.sampled_from([*pytorch.ROUNDS, "p2p"]))
def test_equations_are_what_the_model_after_nccl_computes(
    group: Group, n_bytes: int, collective: str
) -> None:
    with estimators.pretended(group.device, group.per_node) as model:
        kind = model.NCCL_COLL[collective.upper()]
        took_ms = model.estimate_nccl_collective_runtime_impl(
            n_bytes, group.ranks, kind
        )
        assert float(pytorch.nccl_s(n_bytes, group, collective)) == pytest.approx(
            took_ms / 1e3
        )
        if collective in ("all_reduce", "all_gather", "reduce_scatter"):
            size = model.compute_min_saturation_bytes(group.ranks, kind)
            assert pytorch.saturation_bytes(group, collective) == size


@pytest.mark.parametrize("name", sorted(COLLECTIVES.keys() & pytorch.ROUNDS))
def test_a_ring_and_its_buffers_are_what_pytorch_takes_them_for(name: str) -> None:
    known = COLLECTIVES[name]
    for ranks in (2, 3, 64):
        assert known.steps(ranks) == Group("H100", ranks).steps(name)
        parts = known.input_parts(ranks), known.output_parts(ranks)
        assert parts == pytorch.parts(name, ranks)


@pinned
@pytest.mark.parametrize("ranks", [1, 2, 8, 16, 128])
def test_buckets_of_sharded_training_lie_between_two_bounds(ranks: int) -> None:
    from torch._inductor.fx_passes.fsdp import compute_pre_bucket_cap_mb

    with estimators.pretended("H100"):
        cap_mb = compute_pre_bucket_cap_mb(ranks)
    assert pytorch.bucket_cap_bytes(Group("H100", ranks)) == pytest.approx(cap_mb * MIB)


samples = st.lists(
    st.tuples(st.sampled_from([4, 64, KIB, 3 * KIB, MIB]), st.floats(1e-6, 1)),
    min_size=1,
    max_size=9,
)


@pinned
@settings(max_examples=60)
@given(samples, samples, st.integers(1, MIB))
def test_a_profile_is_looked_up_as_by_equation_7(
    seen: list[tuple[int, float]], others: list[tuple[int, float]], elements: int
) -> None:
    tables: dict[str, dict[int, list[float]]] = {"allreduce": {}, "_allgather_base": {}}
    for (_, by_size), rows in zip(tables.items(), (seen, others), strict=True):
        for n, seconds in rows:
            by_size.setdefault(n, []).append(seconds)
    flat = [
        np.array([(n, s) for n, each in by_n.items() for s in each]).T
        for by_n in tables.values()
    ]
    profile = estimators.profile_of(tables)
    took_ms, _ = profile.lookup_collective("all_reduce", (0, 1), elements, "Float")
    ours = pytorch.profiled_s(4 * elements, flat[0][0], flat[0][1], flat[1])
    assert float(ours) == pytest.approx(took_ms / 1e3, rel=1e-6)


@pinned
def test_equations_6_3_and_8_are_what_was_recorded() -> None:
    for key, estimate in recorded().filter(like="mesh seconds").items():
        what, device, ranks, n_bytes = key.split()[2:]
        ours = pytorch.mesh_s(int(n_bytes), Group(device, int(ranks)), what)
        assert float(ours) == pytest.approx(estimate), key
    for key, estimate in recorded().filter(like="priced_bytes").items():
        path, _, what, _, ranks, n_bytes = key.split()
        assert (
            pytorch.priced_bytes(int(n_bytes), int(ranks), what, path == "graph")
            == estimate
        )
    flops, peak = 2 * 8192**3, recorded()["roofline flops_per_s bf16 H100 0 0"]
    rate = recorded()["roofline flops_per_s product H100 0 0"]
    assert flops / rate == pytest.approx(float(pytorch.roofline_s(flops, 0, peak, 1.0)))
    # It imports PyTorch's compiler, for which workers that run other tests need not wait.
    from torch.utils import _runtime_estimation

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_runtime_estimation, "get_gpu_dram_gbps", lambda: 3350)
        took_ns = _runtime_estimation.get_transfer_time(
            [torch.empty(MIB)], [torch.empty(MIB)]
        )
    assert took_ns / 1e9 == pytest.approx(
        float(pytorch.roofline_s(0, 8 * MIB, peak, 3350e9))
    )


def test_a_model_is_told_of_each_log_what_it_is_of() -> None:
    logs = curves.logs()
    assert len(logs) == 27 and logs["ABCI 16 V100"].group == Group("V100", 16, 4)
    for log in logs.values():
        models = curves.models(log)
        assert models["torch.fx"](MIB) == models["Inductor"](2 * MIB)
        seen = np.array(curves.PROFILED_BYTES)
        assert models["profile-guided"](seen).tolist() == pytest.approx(
            log.cost(seen).tolist()
        )


# -- ddlkit export -------------------------------------------------------------------------------

COST = Table(MIB * np.array([2**-10, 1, 64]), np.array([1e-4, 2e-3, 9e-2]), workers=4)


def refused(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert cli.main(["export", *map(str, words)]) == 2
    out, line = capsys.readouterr()
    assert not out and line.count("\n") == 1
    return line


def saved(folder: Path, cost: MessageCost) -> Path:
    path = folder / "cost.json"
    path.write_text(json.dumps(cost.to_dict()))
    return path


@pytest.fixture
def exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Path]:
    """What the command prints, as a file."""

    def export_to(*words: object) -> Path:
        capsys.readouterr()
        assert cli.main(["export", *map(str, words)]) == 0
        path = tmp_path / "exported.py"
        path.write_text(capsys.readouterr().out)
        return path

    return export_to


@pytest.fixture
def world() -> Iterator[None]:
    """Four ranks that are not there."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("to", ["inductor", "profile"])
def test_torch_takes_the_measured_cost_of_its_collectives(
    to: str, collective: str, tmp_path: Path, world: None, exported: Callable[..., Path]
) -> None:
    """As its scheduler asks for it: by Inductor's hook, which a profile fills too."""
    # Importing Inductor takes seconds: no worker but the one of this test has to wait for it.
    from torch._inductor import config
    from torch._inductor.fx_passes import overlap_scheduling
    from torch._inductor.fx_passes.profile_guided_estimation import (
        ProfileGuidedEstimator,
    )

    cost = Table(COST.bytes, COST.seconds, workers=4, collective=collective)
    path = exported("--to", to, saved(tmp_path, cost), "--collective", collective)
    estimate = (
        ProfileGuidedEstimator(str(path))
        if to == "profile"
        else runpy.run_path(str(path))["estimate"]
    )
    name, hook = (
        dist.distributed_c10d._get_default_group().group_name,
        "aten_distributed_optimizations.custom_runtime_estimation",
    )
    for n_bytes in (4 * KIB, 300 * KIB, 5 * MIB, 200 * MIB):
        node = estimators.collective_node(collective, n_bytes, 4, name)
        with config.patch({hook: estimate}):
            given: Any = config.aten_distributed_optimizations.custom_runtime_estimation
        took_ms = overlap_scheduling.estimate_collective_time(node, None, given)
        assert took_ms / 1e3 == pytest.approx(float(cost(n_bytes)), rel=0.01)
    pair = dist.new_group([0, 1])
    node = estimators.collective_node(collective, MIB, 2, pair.group_name)
    assert estimate(node, None) is None  # of two ranks nothing was measured
    if to == "inductor":
        assert estimate(node.all_input_nodes[0], None) is None
        node = estimators.collective_node(collective, MIB, 4, name)
        assert estimate(node, 0) == pytest.approx(1e3 * float(cost(1)))


def test_ddp_takes_the_plan(tmp_path: Path, exported: Callable[..., Path]) -> None:
    sizes = [64, 128, 256, 64, 512, 32]
    layers = [
        torch.nn.Linear(a, b, bias=False)
        for a, b in zip(sizes, sizes[1:], strict=False)
    ]
    n_bytes = [4 * layer.weight.numel() for layer in layers]
    rows = "".join(f"t{k},{n},0.001,0.002\n" for k, n in enumerate(n_bytes))
    profile = tmp_path / "mine.csv"
    profile.write_text("tensor,gradient_bytes,forward_s,backward_s\n" + rows)
    cost = saved(tmp_path, AlphaBeta(1e-3, 2e-8, workers=2))
    words = (
        "--to",
        "ddp",
        "--profile",
        profile,
        "--cost",
        cost,
        "--planner",
        "cuts:2,3",
    )
    caps_mb = json.loads(exported(*words).read_text())["bucket_cap_mb_list"]
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers), bucket_cap_mb_list=caps_mb
        )
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
        told = model._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    finally:
        dist.destroy_process_group()
    *first, last = n_bytes[::-1][:2], n_bytes[::-1][2:3], n_bytes[::-1][3:]
    assert [int(n) for n in told.split(", ")] == [
        sum(first[0]),
        sum(first[1]),
        sum(last),
    ]
    assert math.isclose(sum(caps_mb) * MIB, sum(n_bytes))


def test_what_cannot_be_exported_is_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = saved(tmp_path, COST)
    assert "as in --torch 2.13" in refused(
        capsys, cost, "--to", "inductor", "--torch", "1.0"
    )
    assert "needs --profile" in refused(capsys, cost, "--to", "ddp")
    assert "nothing.json" in refused(
        capsys, tmp_path / "nothing.json", "--to", "profile"
    )
    assert "--collectives" in refused(capsys, "--to", "profile")
    cost = saved(tmp_path, Table(COST.bytes, COST.seconds, collective="all_gather"))
    assert "a cost of all_gather, and not of all_reduce" in refused(
        capsys, cost, "--to", "inductor", "--collective", "all_reduce"
    )
    assert "between how many ranks it was measured: give --ranks" in refused(
        capsys, cost, "--to", "profile"
    )


def test_ddp_sends_nothing_but_all_reduces() -> None:
    from ddlkit.core.errors import UserError
    from ddlkit.core.iteration import Iteration
    from ddlkit.model import make_plan

    work = resnet50()
    gather = AlphaBeta(1e-3, 1e-9, collective="all_gather")
    with pytest.raises(UserError, match="of all_gather: DDP sends all_reduce"):
        export.ddp(Iteration(work, make_plan("ddp", work), gather), "2.13.0")
