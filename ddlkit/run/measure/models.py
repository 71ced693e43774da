"""The layers of any model, which a user's file gives: alone, or in each rank that torchrun or Slurm started.

Beside the profile stand two checks: the iteration with hooks over that without, and the order in which
gradients become ready against that in which DistributedDataParallel rebuilds its buckets.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from ddlkit.core.workload import LayerProfile
from ddlkit.run.clock import Budget
from ddlkit.run.jobs.rank import Rank, everyones
from ddlkit.run.measure.layers import compute_on, profile_training
from ddlkit.run.nets.given import SYNC_BUFFERS, Training, load
from ddlkit.run.sessions import Origin, say, table_path

MEETING_S = 300.0  # until all ranks have built the model
REBUILT = 3  # iterations after which DDP reports its rebuilt buckets
LATE = 0.9  # a first gradient that is ready at this share of backward leaves nothing to overlap
_torchs: Any = dist  # with what is not in the type stubs
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def measure_model(given: str, accumulate: int, out: Path, budget: Budget) -> dict[str, Any]:
    """Measure the layers of "FILE.py:function" or "torchvision:NAME", and save them; returns what to show.

    accumulate : calls of the loss in an iteration; where WORLD_SIZE or SLURM_NTASKS says that there are
    other ranks, all measure at the same time, and rank 0 saves. Raises UserError as `load` and
    `Training.try_out`, and where models differ between ranks.
    """
    ranks = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or "1"
    me = None if ranks == "1" else Rank.join(timeout_s=MEETING_S)
    threads, notes = torch.get_num_threads(), list[str]()
    with compute_on(given, me.device if me else _own_device(), "") as place:
        with group_of_one() as group:
            training = loaded_together(given, place, accumulate, group, notes, me)
            precision = "+".join(sorted({_named(p.dtype) for p in training.trained().values()}))
            profile, samples = profile_training(training, precision, budget, me)
            order = order_beside_ddp(training, profile, group)
        if me:
            me.leave()
    notes += _remarks(training, profile)
    result: dict[str, Any] = {
        "network": profile.network,
        "device": profile.device,
        "ranks": me.world_size if me else 1,
        "precision": precision,
        "tensors": len(profile.tensor),
        "gradient_bytes": int(profile.gradient_bytes.sum()),
        **{name: float(getattr(profile, name).sum()) for name in ("forward_s", "backward_s")},
        "update_s": profile.update_s,
        "hooked_over_unhooked": hooked_ratio(samples),
        "order": order,
    }
    if me and me.rank:
        return {}
    for note in notes:
        say(f"{profile.network}: {note}")
    frame = store.profile_frame(profile, precision, result["ranks"], threads)
    origin = Origin(remark="; ".join([*notes, f"order: {order}"]))
    name = f"{profile.network}-b{profile.batch}-r{result['ranks']}"
    for schema, rows in {"layers": frame, "samples": samples}.items():
        origin.save(table_path(out, schema, name), rows, schema)
    return {**result, "profile": str(table_path(out, "layers", name))}


def hooked_ratio(samples: Any) -> float:
    """Return an iteration with hooks over one without, medians of a profile's ``samples``."""
    median = samples.groupby("quantity")["seconds"].median()
    return float(median["hooked_iteration"] / median["unhooked_iteration"])


def _own_device() -> torch.device:
    """Return the GPU of LOCAL_RANK, which becomes the current one, or the processor."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = os.environ.get("LOCAL_RANK", "0")
    device = torch.device("cuda", int(number) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _named(dtype: torch.dtype) -> str:
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


# -- the same model in all ranks ----------------------------------------------------------------


def loaded_together(
    given: str,
    device: torch.device,
    accumulate: int,
    group: Any,
    notes: list[str],
    me: Rank | None = None,
) -> Training:
    """Return the training that a user gives, tried out in every rank; what is compiled, inside DDP.

    Raises UserError where it cannot be built here, or in another rank, or is another one there.
    """
    failure: Exception | None = None
    try:
        training = replace(load(given, device, notes), accumulate=accumulate)
        if training.compiled:
            alone(training, group)
        training.try_out()
        numbers = _fingerprint(training)
    except Exception as error:
        failure, numbers = error, [-1.0, 0.0, 0.0]
    every = everyones(numbers).tolist() if me else [numbers]
    if failure:
        raise failure
    for rank, (digest, *counts) in enumerate(every):
        if digest < 0:
            raise UserError(f"{given}: rank {rank} has no model, and says why")
        if [digest, *counts] != every[0]:
            first, other = (
                "{:.0f} tensors of {:.0f} elements".format(*c) for c in (every[0][1:], counts)
            )
            differ = f"models differ between ranks: rank 0's has {first}, rank {rank}'s {other}"
            raise UserError(f"{given}: {differ}; each must have the same, by name, shape and type")
    return training


def _fingerprint(training: Training) -> list[float]:
    """Return a digest of all trained parameters' names, shapes and types; how many; their elements."""
    trained = training.trained()
    text = repr([(name, tuple(p.shape), str(p.dtype)) for name, p in trained.items()])
    digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)  # which a float64 holds
    return [float(digest), float(len(trained)), float(sum(p.numel() for p in trained.values()))]


# -- beside DistributedDataParallel --------------------------------------------------------------


@contextmanager
def group_of_one() -> Iterator[Any]:
    """Give a process group of this process alone."""
    if dist.is_initialized():
        only_me: Any = {"backend": "gloo", "use_local_synchronization": True}
        yield dist.new_group([dist.get_rank()], **only_me)
        return
    dist.init_process_group("gloo", store=_torchs.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def alone(training: Training, group: Any, **options: Any) -> None:
    """Wrap as `Training.wrap`, with its options, such as bucket_cap_mb; nothing is sent."""
    options |= {"process_group": group, SYNC_BUFFERS: False}
    on_gpu: Any = [training.device] if training.device.type == "cuda" else None

    def sent(buffer: Any) -> Any:
        future: Any = torch.futures.Future(devices=on_gpu)
        future.set_result(buffer)
        return future

    training.wrap(**options).register_comm_hook(None, lambda _, bucket: sent(bucket.buffer()))


def order_beside_ddp(training: Training, profile: LayerProfile, group: Any) -> str:
    """Return how the order in which gradients become ready compares to that in which DDP rebuilds buckets."""
    trained = training.trained()
    if len(trained) > len(profile.tensor):
        return "not rebuilt by DDP, which needs find_unused_parameters"
    try:
        if not training.ddp:
            alone(training, group)
        for _ in range(REBUILT):
            training.iterate()
    except RuntimeError as error:
        return f"not compared: DDP fails: {one_line(str(error), 200)}"
    assert training.ddp
    log = training.ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    names = [[*trained][int(number)] for number in log.replace(",", " ").split()]
    ready = profile.tensor[::-1]
    types = {p.dtype for p in trained.values()}  # a bucket has one, and buckets close by their own
    pairs = [(_of(kind, ready, trained), _of(kind, names, trained)) for kind in types]
    if any(len(ours) != len(rebuilt) for ours, rebuilt in pairs):
        return "not compared: DDP rebuilt no buckets"
    other = sum(a != b for pair in pairs for a, b in zip(*pair, strict=True))
    return f"other than DDP's in {other} of {len(ready)} tensors" if other else "as DDP rebuilds"


def _of(kind: torch.dtype, names: Sequence[str], trained: dict[str, Any]) -> list[str]:
    return [name for name in names if trained[name].dtype == kind]


def _remarks(training: Training, profile: LayerProfile) -> list[str]:
    """Return what a user should know of the profile beside its numbers."""
    said = []
    if training.backwards:
        times = f"{training.backwards} time{'s' * (training.backwards > 1)}"
        last = "a gradient counts as ready when it becomes so for the last time"
        said.append(f"loss() runs backward itself, {times} each: {last}")
    if training.accumulate > 1:
        said.append(
            f"{training.accumulate} losses an iteration: forward is all before the last backward"
        )
    if training.compiled:
        inside = "profiled inside DistributedDataParallel in one process, with its own cap"
        said.append(f"compiled: {inside}; forward is one time, of the first tensor")
    if missing := [name for name in training.trained() if name not in profile.tensor]:
        some = ", ".join(missing[:3])
        said.append(f"{len(missing)} tensors get no gradient ({some}), and have no row")
    share = float(profile.backward_s[-1] / profile.backward_s.sum())
    if share > LATE:
        said.append(f"gradients are ready after {share:.0%} of backward: nothing can overlap")
    return said
