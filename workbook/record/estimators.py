"""Estimates of the cost models of the installed PyTorch, whose own functions are called without timing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.units import GIB, KIB, MIB
from ddlkit.measure.session import Unavailable
from ddlkit.store.files import scratch
from workbook.pytorch.equations import GPUS, parts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLUMNS = ["estimator", "quantity", "what", "device", "ranks", "bytes", "estimate"]
"""The columns of table ``estimators``.

``estimator`` is the cost model and ``quantity`` is what it estimates: seconds, bytes/s or bytes, for example.
``what`` is a collective, a link or a case.
"""
Row = tuple[str, str, str, str, int, int, float]
"""A row of the table, whose values are in the order of `COLUMNS`.

Ranks and bytes that do not matter are 0."""
RANKS = (2, 4, 8, 16, 32, 64)
SIZES = (*(KIB << power for power in range(21)), 4 * MIB - 4, 100 * MIB)
"""The sizes of messages in bytes: powers of two, one just below 4 MiB, and 100 MiB."""
SEEN = {size * MIB: (50e-6 + size * MIB / 10e9,) for size in (1, 8, 25)}
"""The samples of a made-up profile, in seconds by bytes: 50 us, then 10 GB/s."""
NAMES = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")
"""The names that CUDA gives to GPUs."""


def measure_estimators() -> pd.DataFrame:
    """Return table ``estimators`` with the estimates of all cost models of PyTorch.

    Bytes and ranks are 0 where they do not matter. Raises Unavailable if the installed PyTorch has
    other cost models.
    """
    # Without the ending of a build, such as "+cu130".
    version = torch.__version__.partition("+")[0]
    try:
        rows = [
            # Inductor's models of collectives.
            *_nccl_rows(),
            # Its models of collectives in a graph, and DTensor's model of meshes of ranks.
            *_group_rows(),
            # The lookup of collectives in a profile.
            *_profile_rows(),
            # The rates in GPUs' data sheets.
            *_roofline_rows(),
        ]
    except (ImportError, AttributeError, TypeError) as error:
        # PyTorch's models are no public interface, so that their names and arguments change.
        raise Unavailable(f"torch {version} has other cost models: {error}") from error
    return pd.DataFrame(rows, columns=COLUMNS).assign(torch=version)


@contextmanager
def pretended(device: str, per_node: int = 8) -> Iterator[Any]:
    """Have PyTorch take this machine for a node of GPUs that it need not have.

    Parameters
    ----------
    device : str
        The GPU, of `GPUS`.
    per_node : int, optional
        The number of GPUs of a node.

    Yields
    ------
    module
        Inductor's cost model comm_analysis. Until the context ends, it finds such nodes, with
        NVLink.
    """
    from torch._inductor import comm_analysis as model

    # Inductor has an entry for each generation of GPUs.
    gpu_type = model.NVIDIA_GPU_TYPE[GPUS[device].upper()]
    with (
        patch.object(model, "get_gpu_type", lambda: gpu_type),
        patch.object(model, "_has_nvlink", lambda: True),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "device_count", lambda: per_node),
    ):
        yield model


def _nccl_rows() -> Iterator[Row]:
    """Yield rows of two cost models of Inductor, which the rows name "nccl" and "saturation".

    "nccl" follows NCCL's tuning and estimates the times of collectives. "saturation" estimates the
    least sizes of messages that use most of a link's bandwidth. The rows of `_nvlink_rows` follow.
    """
    devices = ("V100", "A100", "H100")
    collectives = ("all_reduce", "all_gather")
    for device, ranks, what in product(devices, RANKS, collectives):
        with pretended(device) as comm_analysis:
            collective = comm_analysis.NCCL_COLL[what.upper()]
            estimate_ms = comm_analysis.estimate_nccl_collective_runtime_impl
            # The values of each row are in the order of `COLUMNS`.
            for size in SIZES:
                seconds = estimate_ms(size, ranks, collective) / 1e3
                yield "nccl", "seconds", what, device, ranks, size, seconds
            # The saturating size is an estimate and no given size, so that column ``bytes`` has 0.
            least_bytes = comm_analysis.compute_min_saturation_bytes(ranks, collective)
            yield (
                "saturation",
                "saturation_bytes",
                what,
                device,
                ranks,
                0,
                least_bytes,
            )
    yield from _nvlink_rows()


def _nvlink_rows() -> Iterator[Row]:
    """Yield bandwidths of one node of eight H100 with NVLink.

    They are the bandwidths that the models "saturation" and "nccl" assume of NVLink, and the rate
    at which "nccl" sends a message of 1 GiB from one rank to another ("p2p").
    """
    with pretended("H100") as comm_analysis:
        # The two models read different constants for the same link. Both are in GB/s. The values of
        # a row are in the order of `COLUMNS`. Its bytes are 0, because a bandwidth belongs to no
        # message.
        link = comm_analysis.INTERCONNECT_PROFILES[comm_analysis.detect_interconnect(8)]
        bytes_per_s = 1e9 * link.bus_bw_GBps
        yield "saturation", "bytes_per_s", "nvlink", "H100", 8, 0, bytes_per_s
        bytes_per_s = 1e9 * comm_analysis.get_intra_node_bw()
        yield "nccl", "bytes_per_s", "nvlink", "H100", 8, 0, bytes_per_s
        estimate_ms = comm_analysis.estimate_nccl_collective_runtime_impl
        # The estimate for two ranks depends on how many others there are.
        message_ms = estimate_ms(GIB, 8, comm_analysis.NCCL_COLL.P2P)
        # Bytes divided by milliseconds, times 1e3, are bytes/s.
        bytes_per_s = GIB / message_ms * 1e3
        yield "nccl", "bytes_per_s", "p2p", "H100", 8, GIB, bytes_per_s


def collective_node(
    collective: str, n_bytes: int, ranks: int, group: str
) -> torch.fx.Node:
    """Return a node of a graph of torch.fx that stands for a collective on numbers of float32.

    Nothing is sent. PyTorch's estimates take such a node as their argument.

    Parameters
    ----------
    collective : str
        "all_gather", "reduce_scatter" or "all_reduce".
    n_bytes : int
        The bytes of the whole tensor, as `ddlkit.core.collective` counts them.
    ranks : int
        The number of ranks.
    group : str
        The name of the process group.
    """
    operators = torch.ops._c10d_functional
    # ``options`` are the arguments of the operator between its input and its group.
    if collective == "all_gather":
        operator = operators.all_gather_into_tensor
        options: tuple[Any, ...] = (ranks,)
    elif collective == "reduce_scatter":
        operator = operators.reduce_scatter_tensor
        options = ("sum", ranks)
    else:
        operator = operators.all_reduce
        options = ("sum",)
    graph = torch.fx.Graph()
    source = graph.placeholder("x")
    node = graph.call_function(operator.default, (source, *options, group))
    # The input or the output of each rank may be only one of several equal parts of the tensor.
    source_parts, result_parts = parts(collective, ranks)
    # A number of float32 has 4 bytes.
    elements = n_bytes // 4
    # PyTorch's estimates take the shapes of the input and the output from the key "val". On device
    # meta, a tensor has a shape and no memory.
    source.meta["val"] = torch.empty(elements // source_parts, device="meta")
    node.meta["val"] = torch.empty(elements // result_parts, device="meta")
    return node


def _group_rows() -> Iterator[Row]:
    """Yield the rows of `_graph_rows` and of `_mesh_rows`, which both need a process group.

    The group is PyTorch's "fake" one, which sends nothing and of whose ranks only this process
    exists.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Smaller groups and meshes are made of the ranks of this group.
    dist.init_process_group("fake", rank=0, world_size=max(RANKS), store=FakeStore())
    try:
        yield from _graph_rows()
        yield from _mesh_rows()
    finally:
        dist.destroy_process_group()


def _graph_rows() -> Iterator[Row]:
    """Yield the sizes and times of collectives as Inductor's cost model of NCCL has them.

    The model takes a collective as a node of a graph of torch.fx, in rows of estimator "graph", or
    as an operation of Inductor, in rows of "nccl". Rows of quantity "priced_bytes" have the size
    that the model assumes for collectives of 4 MiB. Rows of quantity "seconds" have the time of an
    all-reduce of 100 MiB between 8 ranks, which are all on one node or each on a node of its own.
    """
    # A node has 8 GPUs. The ranks 0 to 7 are on one node, and the ranks 0, 8, 16 and so on are each
    # on a node of their own.
    one_node = dist.new_group(list(range(8)))
    eight_nodes = dist.new_group(list(range(0, 64, 8)))
    with pretended("H100") as comm_analysis:
        # The values of each row are in the order of `COLUMNS`.
        for collective in ("all_reduce", "all_gather", "reduce_scatter"):
            node = collective_node(collective, 4 * MIB, 8, one_node.group_name)
            n_bytes = comm_analysis.estimate_fx_collective_size(node)
            yield "graph", "priced_bytes", collective, "H100", 8, 4 * MIB, n_bytes
            n_bytes = comm_analysis.get_collective_input_size_bytes(_operation_of(node))
            yield "nccl", "priced_bytes", collective, "H100", 8, 4 * MIB, n_bytes
        for case, group in (("one_node", one_node), ("eight_nodes", eight_nodes)):
            node = collective_node("all_reduce", 100 * MIB, 8, group.group_name)
            # With None the size is that of the node. With False NCCL is not asked for its own
            # estimate.
            message_ms = comm_analysis.estimate_nccl_collective_runtime_from_fx_node(
                node, None, False
            )
            yield "graph", "seconds", case, "H100", 8, 100 * MIB, message_ms / 1e3


def _operation_of(node: torch.fx.Node) -> SimpleNamespace:
    """Return what stands in for the operation of Inductor that runs a collective of a graph.

    The model after NCCL's tuning takes such an operation, and reads only the shapes and the types
    of its inputs.
    """
    tensor = node.all_input_nodes[0].meta["val"]
    layout = SimpleNamespace(size=tensor.shape, dtype=tensor.dtype)
    return SimpleNamespace(inputs=[SimpleNamespace(layout=layout)])


def _mesh_rows() -> Iterator[Row]:
    """Yield rows of the cost model by which DTensor decides how to redistribute a tensor.

    The model is the same for any GPU, so that column ``device`` has H100 for all rows.
    """
    from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
    from torch.distributed.tensor import _collective_utils as model

    meshes = {}
    topologies = {}
    # The model asks how many GPUs a node has. It shall be 8, whatever this machine has.
    with patch.object(_mesh_resources, "num_devices_per_host", lambda _: 8):
        for ranks in RANKS:
            mesh = DeviceMesh("cpu", list(range(ranks)), _init_backend=False)
            meshes[ranks] = mesh
            topologies[ranks] = model.MeshTopoInfo.build_from_mesh(mesh)
    # The model takes GiB and estimates microseconds. Its last argument is the dimension of the
    # mesh, and each mesh has only dimension 0. The values of each row are in the order of
    # `COLUMNS`.
    for ranks, size in product(RANKS, SIZES):
        message_us = model.allreduce_cost(size / GIB, topologies[ranks], 0)
        yield "mesh", "seconds", "all_reduce", "H100", ranks, size, message_us / 1e6
    # The bandwidth that the model assumes between 8 ranks, which fill a node, is that of NVLink, in
    # GB/s. The bytes of this row are 0, because a bandwidth belongs to no message.
    bytes_per_s = 1e9 * topologies[8].mesh_dim_bandwidth[0]
    yield "mesh", "bytes_per_s", "nvlink", "H100", 8, 0, bytes_per_s
    # The rate of large messages. The time of an empty message is subtracted, so that the bytes
    # alone count. In a ring of 8 ranks, each link carries 2 x 7/8 of a message's bytes.
    gib_us = model.allreduce_cost(1, topologies[8], 0)
    empty_us = model.allreduce_cost(0, topologies[8], 0)
    carried_bytes = GIB * 14 / 8
    bytes_per_s = carried_bytes / (gib_us - empty_us) * 1e6
    yield "mesh", "bytes_per_s", "large", "H100", 8, GIB, bytes_per_s
    yield from _redistribution_rows(meshes[8])


def _redistribution_rows(mesh: DeviceMesh) -> Iterator[Row]:
    """Yield the seconds that DTensor's cost model estimates to redistribute a matrix of 100 MiB.

    The ``mesh`` has 8 ranks. Each rank has a part of the rows before. After an all-gather each
    rank has the whole matrix, and after an all-to-all a part of the columns.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import _collective_utils as model
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # 5120 x 5120 numbers of 4 bytes: the shape, the strides and the type.
    meta = TensorMeta(torch.Size((5120, 5120)), (5120, 1), torch.float32)
    source = DTensorSpec(mesh, (Shard(0),), meta)
    for what, placement in (("all_gather", Replicate()), ("all_to_all", Shard(1))):
        target = DTensorSpec(mesh, (placement,), meta)
        message_us = model.one_step_redistribute_cost(source, target)
        # The model estimates microseconds.
        yield "mesh", "seconds", what, "H100", 8, 100 * MIB, message_us / 1e6


def profile_of(samples: Mapping[str, Mapping[int, Sequence[float]]]) -> Any:
    """Return PyTorch's profile of collectives between two ranks, made from given samples.

    Parameters
    ----------
    samples : mapping
        By the profiler's name of a collective, its samples: by the bytes of a message of float32,
        the seconds of one or more such messages.

    Returns
    -------
    ProfileData
        What PyTorch reads from a file of the profiler, and estimates other messages from.
    """
    from torch._inductor.fx_passes.profile_guided_estimation import ProfileData

    # PyTorch reads a profile from a file of the profiler's events, which is made here.
    events = []
    for collective, samples_by_size in samples.items():
        for size, samples_s in samples_by_size.items():
            events += [_event(collective, size, seconds) for seconds in samples_s]
    profile = ProfileData()
    with scratch() as folder:
        path = folder / "profile.json"
        path.write_text(json.dumps({"traceEvents": events}))
        profile.load(str(path))
    return profile


def _event(collective: str, size: int, seconds: float) -> dict[str, Any]:
    """Return the event that the profiler writes for one message of float32 between two ranks.

    The ``size`` is in bytes.
    """
    # A number of float32 has 4 bytes.
    elements = size // 4
    return {
        "cat": "kernel",
        # The profiler's durations are in microseconds.
        "dur": 1e6 * seconds,
        "args": {
            "Process Group Ranks": "[0, 1]",
            "Group size": 2,
            "dtype": "Float",
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Collective name": collective,
        },
    }


def _profile_rows() -> Iterator[Row]:
    """Yield the times of an all-reduce that PyTorch estimates from profiles of collectives.

    There are three made-up profiles. The first one is `SEEN`. The second one shows which samples
    count: it has three samples of one size, one of which takes nine times as long as the others.
    The third one shows what samples of an all-gather change for two all-reduces: one of exactly
    twice the largest all-reduce in the profile, and a larger one.
    """
    three_samples = {MIB: (900e-6, 100e-6, 100e-6)}
    with_all_gather = {
        "allreduce": {MIB: (100e-6,)},
        "_allgather_base": {MIB: (50e-6,)},
    }
    # A case has a name, which column ``what`` has, the samples of a profile, and the sizes in bytes
    # that are estimated from it.
    cases: list[tuple[str, Any, Sequence[int]]] = [
        ("all_reduce", {"allreduce": SEEN}, SIZES),
        ("seen_thrice", {"allreduce": three_samples}, [MIB]),
        ("beside_all_gather", with_all_gather, [2 * MIB, 2 * MIB + 4]),
    ]
    for what, samples, sizes in cases:
        profile = profile_of(samples)
        for size in sizes:
            # The message is between ranks 0 and 1, and has numbers of 4 bytes. The second result
            # says how the estimate was found.
            message_ms, _ = profile.lookup_collective(
                "all_reduce", (0, 1), size // 4, "Float"
            )
            seconds = message_ms / 1e3
            # In the order of `COLUMNS`. A profile names no GPU, so that the device is "any".
            yield "profile", "seconds", what, "any", 2, size, seconds


def _roofline_rows() -> Iterator[Row]:
    """Yield what PyTorch's tables of GPUs say, without measuring.

    The rows are the rate of a product of matrices on an H100, the H100's peak rates, and for how
    many of `NAMES` PyTorch has data of the GPU.
    """
    from torch._inductor.analysis import device_info
    from torch.utils import _runtime_estimation as model

    # A product of square matrices of n = 8192 rows has n^3 multiplications and as many additions.
    flops = 2 * 8192**3
    # The data sheet is looked up by this name.
    name_h100 = patch.object(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    with pretended("H100"), name_h100:
        product_ns = model.flops_to_ns(flops, torch.bfloat16)
        tera_flops_per_s = {
            # One FLOP per nanosecond is 1e9 FLOP/s, or 1e-3 TFLOP/s.
            "product": flops / product_ns / 1e3,
            # The data sheet gives TFLOP/s. Where PyTorch has no data, the rate is 0.
            "bf16": device_info.datasheet_tops(torch.bfloat16) or 0,
            "fp32": device_info.datasheet_tops(torch.float32) or 0,
        }
    # The rate does not depend on ranks and bytes, which are 0.
    for what, rate in tera_flops_per_s.items():
        yield "roofline", "flops_per_s", what, "H100", 0, 0, 1e12 * rate
    is_known = [device_info.lookup_device_info(name) is not None for name in NAMES]
    yield "roofline", "names", "found", "any", 0, 0, sum(is_known)
