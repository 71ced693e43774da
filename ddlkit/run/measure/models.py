"""The layers of any model that a user's file gives, alone or in each rank that torchrun or Slurm started."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from ddlkit.core.workload import LayerProfile
from ddlkit.run.clock import Budget
from ddlkit.run.jobs.rank import Rank, everyones, joined
from ddlkit.run.measure.layers import compute_on, profile_training
from ddlkit.run.nets.given import SYNC_BUFFERS, Training, load
from ddlkit.run.sessions import Origin, table_path

MEETING_S = 300.0  # until all ranks have built the model
REBUILT = 3  # iterations after which DDP reports its rebuilt buckets
LATE = 0.9  # a first gradient that is ready at this share of backward leaves nothing to overlap


def measure_model(given: str, accumulate: int, out: Path, budget: Budget) -> dict[str, Any]:
    """Measure the layers of what `load` takes, save them, and return what to show, on rank 0.

    accumulate : calls of the loss in an iteration. All ranks measure at the same time (`joined`). Raises
    UserError as `loaded_together`.
    """
    notes = list[str]()
    with joined(MEETING_S) as me, compute_on(given, me.device, ""):
        training = loaded_together(given, me, notes)
        training.accumulate = accumulate
        types = {str(p.dtype).removeprefix("torch.") for p in training.trained().values()}
        precision = "+".join(sorted(types)).replace("bfloat", "bf").replace("float", "fp")
        profile, samples = profile_training(training, precision, budget, me)
        order = order_beside_ddp(training, profile)
    if me.rank:
        return {}
    notes += remarks(training, profile)
    for note in notes:
        me.say(note)
    how = precision, me.world_size, me.torch_threads
    origin = Origin(remark="; ".join([*notes, f"order: {order}"]))
    name = f"{profile.network}-b{profile.batch}-r{me.world_size}"
    for schema, rows in {"samples": samples, "layers": store.profile_frame(profile, *how)}.items():
        origin.save(path := table_path(out, schema, name), rows, schema)
    median = samples.groupby("quantity")["seconds"].median()
    pairs = samples.pivot(index="sample", columns="quantity", values="seconds")  # drift meets both
    return {
        **{"network": profile.network, "device": profile.device, "precision": precision},
        **{"ranks": me.world_size, "tensors": len(profile.tensor)},
        "gradient_bytes": int(profile.gradient_bytes.sum()),
        **{f"{phase}_s": float(median[phase]) for phase in ("forward", "backward", "update")},
        "hooked_over_unhooked": (pairs["hooked_iteration"] / pairs["unhooked_iteration"]).median(),
        "order": order,
        "profile": str(path),
    }


def loaded_together(given: str, me: Rank, notes: list[str]) -> Training:
    """Return what a user gives, tried out in every rank; what is compiled, inside DDP.

    Raises UserError as `load` and `Training.try_out`, and where another rank cannot, or has another model.
    """
    failure: Exception | None = None
    try:
        training = load(given, me.device, notes)
        if training.compiled:
            wrap_alone(training)
        training.try_out()
        trained = training.trained()
        text = repr([(name, p.shape, p.dtype) for name, p in trained.items()])
        digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)  # which a float64 holds
        mine = [digest, len(trained), sum(p.numel() for p in trained.values())]
    except Exception as error:
        failure, mine = error, [-1, 0, 0]
    first, *others = everyones(mine).tolist()
    if failure:
        raise failure
    for rank, other in enumerate(others, 1):
        if other != first:
            has = "rank {}'s has {:.0f} tensors of {:.0f} elements"
            both = f"{has.format(0, *first[1:])}, {has.format(rank, *other[1:])}"
            raise UserError(f"{given}: models differ between ranks: {both}; build the same on each")
    return training


def wrap_alone(training: Training, **options: Any) -> None:
    """Wrap as `Training.wrap`, with options such as bucket_cap_mb, for a process alone: nothing is sent."""
    only_me: Any = {"backend": "gloo", "use_local_synchronization": True}
    options |= {"process_group": dist.new_group([dist.get_rank()], **only_me), SYNC_BUFFERS: False}
    on_gpu: Any = [training.device] if training.device.type == "cuda" else None

    def sent(buffer: torch.Tensor) -> Any:
        future: Any = torch.futures.Future(devices=on_gpu)
        future.set_result(buffer)
        return future

    training.wrap(**options).register_comm_hook(None, lambda _, bucket: sent(bucket.buffer()))


def order_beside_ddp(training: Training, profile: LayerProfile) -> str:
    """Return how the order in which gradients become ready compares to that in which DDP rebuilds buckets."""
    trained, ready = training.trained(), profile.tensor[::-1]
    if len(trained) > len(ready):
        return "not rebuilt by DDP, which needs find_unused_parameters"
    try:
        if not training.ddp:
            wrap_alone(training)
        for _ in range(REBUILT):
            training.iterate()
    except RuntimeError as error:
        return f"not compared: DDP fails: {one_line(str(error), 200)}"
    ddp: Any = training.ddp
    if not ddp.module.called:
        return "not compared: loss() does not call the model itself, as DDP needs"
    numbers = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    rebuilt = [[*trained][int(number)] for number in numbers.replace(",", " ").split()]
    # A bucket has one type, and those of each close by themselves.
    ours, theirs = (
        sorted(names, key=lambda n: str(trained[n].dtype)) for names in (ready, rebuilt)
    )
    other = sum(a != b for a, b in zip(ours, theirs, strict=False)) + len(ours) - len(theirs)
    return f"other than DDP's in {other} of {len(ours)} tensors" if other else "as DDP rebuilds"


def remarks(training: Training, profile: LayerProfile) -> Iterator[str]:
    """Yield what a user should know of the profile beside its numbers."""
    if training.backwards:
        yield (
            f"loss() runs backward itself, times: {training.backwards}; a gradient counts as ready when it "
            "becomes so for the last time, and forward is all before the last backward"
        )
    if training.compiled:
        yield "compiled: profiled inside DDP in one process; forward is one time, of the first tensor"
    if missing := [name for name in training.trained() if name not in profile.tensor]:
        yield f"{len(missing)} tensors get no gradient and have no row: {', '.join(missing[:3])}"
    if (share := profile.backward_s[-1] / profile.backward_s.sum()) > LATE:
        yield f"gradients are ready after {share:.0%} of backward: nothing can overlap"
