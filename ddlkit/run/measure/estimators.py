"""What the cost models of the installed PyTorch say: its own functions, called. Nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.units import GIB, KIB, MIB
from ddlkit.papers.pytorch import GPUS
from ddlkit.run.sessions import Unavailable
from ddlkit.store.files import scratch

RANKS = (2, 4, 8, 16, 32, 64)
SIZES = (*(KIB << power for power in range(21)), 4 * MIB - 4, 100 * MIB)
SEEN = {n * MIB: (50e-6 + n * MIB / 10e9,) for n in (1, 8, 25)}
"""What a made-up profile has seen: bytes -> seconds of each sample; 50 us, then 10 GB/s."""
NAMES = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")
"""What CUDA calls GPUs."""

Row = dict[str, Any]


def measure_estimators() -> pd.DataFrame:
    """Return table ``estimators``; bytes and ranks are 0 where they do not matter. Raises Unavailable."""
    version = torch.__version__.partition("+")[0]
    try:
        rows = [*_of_nccl(), *_of_graphs(), *_of_meshes(), *_of_profiles(), *_of_rooflines()]
    except (ImportError, AttributeError, TypeError) as error:
        raise Unavailable(f"torch {version} has other cost models: {error}") from error
    return pd.DataFrame(rows).assign(torch=version)


def _row(estimator: str, quantity: str, what: str, estimate: float, **of: Any) -> Row:
    where = {"device": of.get("device", "H100"), "ranks": of.get("ranks", 8)}
    head = {"estimator": estimator, "quantity": quantity, "what": what, **where}
    return {**head, "bytes": of.get("n", 0), "estimate": float(estimate)}


@contextmanager
def pretended(device: str, per_node: int = 8) -> Iterator[Any]:
    """Give comm_analysis, which then finds nodes of so many of these GPUs."""
    from torch._inductor import comm_analysis as model

    kind = model.NVIDIA_GPU_TYPE[GPUS[device].upper()]
    with (
        patch.object(model, "get_gpu_type", lambda: kind),
        patch.object(model, "_has_nvlink", lambda: True),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: per_node),
    ):
        yield model


def _of_nccl() -> Iterator[Row]:
    """The model by NCCL's tuning, and the one of sizes that saturate a link."""
    for device, ranks in product(("V100", "A100", "H100"), RANKS):
        with pretended(device) as model:
            where: Row = {"device": device, "ranks": ranks}
            for what in ("all_reduce", "all_gather"):
                kind = model.NCCL_COLL[what.upper()]
                for n in SIZES:
                    took_ms = model.estimate_nccl_collective_runtime_impl(n, ranks, kind)
                    yield _row("nccl", "seconds", what, took_ms / 1e3, n=n, **where)
                size = model.compute_min_saturation_bytes(ranks, kind)
                yield _row("saturation", "saturation_bytes", what, size, **where)
    with pretended("H100") as model:
        place = model.INTERCONNECT_PROFILES[model.detect_interconnect(8)]
        yield _row("nccl", "bytes_per_s", "nvlink", 1e9 * model.get_intra_node_bw())
        yield _row("saturation", "bytes_per_s", "nvlink", 1e9 * place.bus_bw_GBps)
        took_ms = model.estimate_nccl_collective_runtime_impl(GIB, 8, model.NCCL_COLL.P2P)
        yield _row("nccl", "bytes_per_s", "p2p", GIB / took_ms * 1e3, n=GIB)


@contextmanager
def _world(ranks: int) -> Iterator[None]:
    """Have a process group of ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def collective_node(what: str, n_bytes: int, ranks: int, group: str) -> torch.fx.Node:
    """Return a node of torch.fx that sends ``n_bytes`` of float32, counted as `core.link` does."""
    names = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    more = {"all_gather": (ranks,), "reduce_scatter": ("sum", ranks)}.get(what, ("sum",))
    inside, outside = {"all_gather": (ranks, 1), "reduce_scatter": (1, ranks)}.get(what, (1, 1))
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    operator = getattr(torch.ops._c10d_functional, names.get(what, what)).default
    node = graph.call_function(operator, (given, *more, group))
    for each, parts in ((given, inside), (node, outside)):
        each.meta["val"] = torch.empty(n_bytes // 4 // parts, device="meta")
    return node


def _of_graphs() -> Iterator[Row]:
    """At how many bytes collectives of 4 MiB are priced; and eight ranks on one node and on eight."""
    with pretended("H100") as model, _world(64):
        near, far = (dist.new_group(list(range(0, 8 * each, each))) for each in (1, 8))
        for what in ("all_reduce", "all_gather", "reduce_scatter"):
            node = collective_node(what, 4 * MIB, 8, near.group_name)
            size = model.estimate_fx_collective_size(node)
            yield _row("graph", "priced_bytes", what, size, n=4 * MIB)
            given = node.args[0].meta["val"]
            inputs = [SimpleNamespace(layout=SimpleNamespace(size=given.shape, dtype=given.dtype))]
            size = model.get_collective_input_size_bytes(SimpleNamespace(inputs=inputs))
            yield _row("nccl", "priced_bytes", what, size, n=4 * MIB)
        for what, group in (("one_node", near), ("eight_nodes", far)):
            node = collective_node("all_reduce", 100 * MIB, 8, group.group_name)
            took_ms = model.estimate_nccl_collective_runtime_from_fx_node(
                node, use_nccl_estimator=False
            )
            yield _row("graph", "seconds", what, took_ms / 1e3, n=100 * MIB)


def _of_meshes() -> Iterator[Row]:
    """The model by which DTensor chooses how to lay out a tensor anew."""
    from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import _collective_utils as model
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    with _world(max(RANKS)), patch.object(_mesh_resources, "num_devices_per_host", lambda _: 8):
        for ranks in RANKS:
            mesh = DeviceMesh("cpu", list(range(ranks)), _init_backend=False)
            found = model.MeshTopoInfo.build_from_mesh(mesh)
            for n in SIZES:
                took_us = model.allreduce_cost(n / 2**30, found, 0)
                yield _row("mesh", "seconds", "all_reduce", took_us / 1e6, ranks=ranks, n=n)
            if ranks == 8:
                yield _row("mesh", "bytes_per_s", "nvlink", 1e9 * found.mesh_dim_bandwidth[0])
                took_us = model.allreduce_cost(1.0, found, 0) - model.allreduce_cost(0, found, 0)
                yield _row("mesh", "bytes_per_s", "large", GIB * 14 / 8 / took_us * 1e6, n=GIB)
                meta = TensorMeta(torch.Size((5120, 5120)), (5120, 1), torch.float32)
                split = DTensorSpec(mesh, (Shard(0),), meta)
                for what, to in (("all_gather", Replicate()), ("all_to_all", Shard(1))):
                    whole = DTensorSpec(mesh, (to,), meta)
                    took_us = model.one_step_redistribute_cost(split, whole)
                    yield _row("mesh", "seconds", what, took_us / 1e6, n=100 * MIB)


def profile_of(folder: Path, seen: Mapping[str, Mapping[int, Sequence[float]]]) -> Any:
    """Return PyTorch's profile of what two ranks saw: collective -> bytes of float32 -> seconds."""
    from torch._inductor.fx_passes.profile_guided_estimation import ProfileData

    flat = ((what, n, s) for what, by_n in seen.items() for n, each in by_n.items() for s in each)
    said = {"Process Group Ranks": "[0, 1]", "Group size": 2, "dtype": "Float"}
    events = [
        {"cat": "kernel", "dur": 1e6 * s, "args": {**said, "Collective name": what} | _elements(n)}
        for what, n, s in flat
    ]
    path, profile = folder / "profile.json", ProfileData()
    path.write_text(json.dumps({"traceEvents": events}))
    profile.load(str(path))
    return profile


def _elements(n_bytes: int) -> Row:
    return dict.fromkeys(("In msg nelems", "Out msg nelems"), n_bytes // 4)


def _of_profiles() -> Iterator[Row]:
    """What is looked up of all_reduce: in SEEN; where 1 MiB was seen three times; beside an all_gather."""
    cases: dict[str, tuple[Any, Sequence[int]]] = {
        "all_reduce": ({"allreduce": SEEN}, SIZES),
        "seen_thrice": ({"allreduce": {MIB: (900e-6, 100e-6, 100e-6)}}, [MIB]),
        "beside_all_gather": (
            {"allreduce": {MIB: (100e-6,)}, "_allgather_base": {MIB: (50e-6,)}},
            [2 * MIB, 2 * MIB + 4],
        ),
    }
    for what, (seen, sizes) in cases.items():
        with scratch() as folder:
            profile = profile_of(folder, seen)
        for n in sizes:
            took_ms, _ = profile.lookup_collective("all_reduce", (0, 1), n // 4, "Float")
            yield _row("profile", "seconds", what, took_ms / 1e3, device="any", ranks=2, n=n)


def _of_rooflines() -> Iterator[Row]:
    """A product of matrices on an H100, its peaks, and how many of NAMES are found."""
    from torch._inductor.analysis import device_info
    from torch.utils import _runtime_estimation as model

    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H100"),
    ):
        flops = 2 * 8192**3
        rates = {"product": flops / model.flops_to_ns(flops, torch.bfloat16) * 1e9}
        for what, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            rates[what] = 1e12 * (device_info.datasheet_tops(kind) or 0)
    for what, rate in rates.items():
        yield _row("roofline", "flops_per_s", what, rate, ranks=0)
    found = sum(device_info.lookup_device_info(name) is not None for name in NAMES)
    yield _row("roofline", "names", "found", found, device="any", ranks=0)
