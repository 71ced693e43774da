"""What the cost models of the installed PyTorch say: its own functions, called. Nothing is timed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.link import message_parts
from ddlkit.core.units import GIB, KIB, MIB
from ddlkit.measure.session import Unavailable
from ddlkit.store.files import scratch
from workbook.pytorch.equations import GPUS

COLUMNS = ["estimator", "quantity", "what", "device", "ranks", "bytes", "estimate"]
Row = tuple[str, str, str, str, int, int, float]
RANKS = (2, 4, 8, 16, 32, 64)
SIZES = (*(KIB << power for power in range(21)), 4 * MIB - 4, 100 * MIB)
SEEN = {n * MIB: (50e-6 + n * MIB / 10e9,) for n in (1, 8, 25)}
"""What a made-up profile has seen: bytes -> seconds of each sample; 50 us, then 10 GB/s."""
NAMES = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")
"""What CUDA calls GPUs."""


def measure_estimators() -> pd.DataFrame:
    """Return table ``estimators``; bytes and ranks are 0 where they do not matter. Raises Unavailable."""
    version = torch.__version__.partition("+")[0]
    try:
        rows = [*_of_nccl(), *_of_groups(), *_of_profiles(), *_of_rooflines()]
    except (ImportError, AttributeError, TypeError) as error:
        raise Unavailable(f"torch {version} has other cost models: {error}") from error
    return pd.DataFrame(rows, columns=COLUMNS).assign(torch=version)


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
    """The model after NCCL's tuning, and the one of sizes that saturate a link."""
    for device, ranks, what in product(
        ("V100", "A100", "H100"), RANKS, ("all_reduce", "all_gather")
    ):
        with pretended(device) as model:
            kind = model.NCCL_COLL[what.upper()]
            for n in SIZES:
                took_ms = model.estimate_nccl_collective_runtime_impl(n, ranks, kind)
                yield "nccl", "seconds", what, device, ranks, n, took_ms / 1e3
            size = model.compute_min_saturation_bytes(ranks, kind)
            yield "saturation", "saturation_bytes", what, device, ranks, 0, size
    with pretended("H100") as model:
        rate = model.INTERCONNECT_PROFILES[model.detect_interconnect(8)].bus_bw_GBps
        yield "saturation", "bytes_per_s", "nvlink", "H100", 8, 0, 1e9 * rate
        yield (
            "nccl",
            "bytes_per_s",
            "nvlink",
            "H100",
            8,
            0,
            1e9 * model.get_intra_node_bw(),
        )
        took_ms = model.estimate_nccl_collective_runtime_impl(
            GIB, 8, model.NCCL_COLL.P2P
        )
        yield "nccl", "bytes_per_s", "p2p", "H100", 8, GIB, GIB / took_ms * 1e3


def collective_node(what: str, n_bytes: int, ranks: int, group: str) -> torch.fx.Node:
    """Return a node of torch.fx that sends ``n_bytes`` of float32, counted as `core.link` does."""
    operators, sums = torch.ops._c10d_functional, ("sum", ranks)
    operator, more = {
        "all_gather": (operators.all_gather_into_tensor, sums[1:]),
        "reduce_scatter": (operators.reduce_scatter_tensor, sums),
    }.get(what, (operators.all_reduce, sums[:1]))
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    node = graph.call_function(operator.default, (given, *more, group))
    for each, share in zip((given, node), message_parts(what, ranks), strict=True):
        each.meta["val"] = torch.empty(n_bytes // 4 // share, device="meta")
    return node


def _of_groups() -> Iterator[Row]:
    """Collectives in graphs, and DTensor's, of ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=max(RANKS), store=FakeStore())
    try:
        yield from _of_graphs()
        yield from _of_meshes()
    finally:
        dist.destroy_process_group()


def _of_graphs() -> Iterator[Row]:
    """At how many bytes collectives of 4 MiB are priced; and eight ranks on one node and on eight."""
    near, far = (dist.new_group(list(range(0, 8 * each, each))) for each in (1, 8))
    with pretended("H100") as model:
        for what in ("all_reduce", "all_gather", "reduce_scatter"):
            node = collective_node(what, 4 * MIB, 8, near.group_name)
            val = node.all_input_nodes[0].meta["val"]
            given = SimpleNamespace(
                layout=SimpleNamespace(size=val.shape, dtype=val.dtype)
            )
            size = model.estimate_fx_collective_size(node)
            yield "graph", "priced_bytes", what, "H100", 8, 4 * MIB, size
            size = model.get_collective_input_size_bytes(
                SimpleNamespace(inputs=[given])
            )
            yield "nccl", "priced_bytes", what, "H100", 8, 4 * MIB, size
        for what, group in (("one_node", near), ("eight_nodes", far)):
            node, how = (
                collective_node("all_reduce", 100 * MIB, 8, group.group_name),
                (None, False),
            )
            took_ms = model.estimate_nccl_collective_runtime_from_fx_node(node, *how)
            yield "graph", "seconds", what, "H100", 8, 100 * MIB, took_ms / 1e3


def _of_meshes() -> Iterator[Row]:
    """The model by which DTensor chooses how to lay out a tensor anew: of any GPU, called H100 here."""
    from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import _collective_utils as model
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    with patch.object(_mesh_resources, "num_devices_per_host", lambda _: 8):
        meshes = {
            n: DeviceMesh("cpu", list(range(n)), _init_backend=False) for n in RANKS
        }
        found = {
            n: model.MeshTopoInfo.build_from_mesh(mesh) for n, mesh in meshes.items()
        }
    for ranks, n in product(RANKS, SIZES):
        took_us = model.allreduce_cost(n / GIB, found[ranks], 0)
        yield "mesh", "seconds", "all_reduce", "H100", ranks, n, took_us / 1e6
    yield (
        "mesh",
        "bytes_per_s",
        "nvlink",
        "H100",
        8,
        0,
        1e9 * found[8].mesh_dim_bandwidth[0],
    )
    took_us = model.allreduce_cost(1, found[8], 0) - model.allreduce_cost(
        0, found[8], 0
    )
    yield "mesh", "bytes_per_s", "large", "H100", 8, GIB, GIB * 14 / 8 / took_us * 1e6
    meta = TensorMeta(torch.Size((5120, 5120)), (5120, 1), torch.float32)
    split = DTensorSpec(meshes[8], (Shard(0),), meta)
    for what, to in (("all_gather", Replicate()), ("all_to_all", Shard(1))):
        took_us = model.one_step_redistribute_cost(
            split, DTensorSpec(meshes[8], (to,), meta)
        )
        yield "mesh", "seconds", what, "H100", 8, 100 * MIB, took_us / 1e6


def profile_of(seen: Mapping[str, Mapping[int, Sequence[float]]]) -> Any:
    """Return PyTorch's profile of what two ranks saw: collective -> bytes of float32 -> seconds."""
    from torch._inductor.fx_passes.profile_guided_estimation import ProfileData

    said = {"Process Group Ranks": "[0, 1]", "Group size": 2, "dtype": "Float"}
    events, profile = [], ProfileData()
    for what, n, samples in (
        (what, *each) for what, by_n in seen.items() for each in by_n.items()
    ):
        sizes = dict.fromkeys(("In msg nelems", "Out msg nelems"), n // 4)
        args = {**said, **sizes, "Collective name": what}
        events += [
            {"cat": "kernel", "dur": 1e6 * seconds, "args": args} for seconds in samples
        ]
    with scratch() as folder:
        path = folder / "profile.json"
        path.write_text(json.dumps({"traceEvents": events}))
        profile.load(str(path))
    return profile


def _of_profiles() -> Iterator[Row]:
    """What is looked up of all_reduce: in SEEN; where 1 MiB was seen three times; beside an all_gather."""
    thrice, gathers = {MIB: (900e-6, 100e-6, 100e-6)}, {MIB: (50e-6,)}
    cases: dict[str, tuple[Any, Sequence[int]]] = {
        "all_reduce": ({"allreduce": SEEN}, SIZES),
        "seen_thrice": ({"allreduce": thrice}, [MIB]),
        "beside_all_gather": (
            {"allreduce": {MIB: (100e-6,)}, "_allgather_base": gathers},
            [2 * MIB, 2 * MIB + 4],
        ),
    }
    for what, (seen, sizes) in cases.items():
        profile = profile_of(seen)
        for n in sizes:
            took_ms, _ = profile.lookup_collective(
                "all_reduce", (0, 1), n // 4, "Float"
            )
            yield "profile", "seconds", what, "any", 2, n, took_ms / 1e3


def _of_rooflines() -> Iterator[Row]:
    """A product of matrices on an H100, its peaks, and how many of NAMES are found."""
    from torch._inductor.analysis import device_info
    from torch.utils import _runtime_estimation as model

    flops = 2 * 8192**3
    with (
        pretended("H100"),
        patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H100"),
    ):
        rates = {"product": flops / model.flops_to_ns(flops, torch.bfloat16) / 1e3}
        for what, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            rates[what] = device_info.datasheet_tops(kind) or 0
    for what, rate in rates.items():
        yield "roofline", "flops_per_s", what, "H100", 0, 0, 1e12 * rate
    found = sum(device_info.lookup_device_info(name) is not None for name in NAMES)
    yield "roofline", "names", "found", "any", 0, 0, found
