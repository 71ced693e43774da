"""What PyTorch takes of a plan or of a cost, as text; tests let the installed torch read each."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError, shown
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import message_parts
from ddlkit.core.units import MIB

TESTED = {"ddp": ("2.11", "2.13"), "inductor": ("2.13",), "profile": ("2.13",)}
"""With which releases of torch each kind is known to work."""
SIZES = np.unique(
    np.concatenate([[1], np.rint(2.0 ** np.arange(6, 32, 1 / 4))])
).astype(int)
"""Bytes of messages whose times are written down."""
ELEMENTS = {"Float": 4, "Half": 2, "BFloat16": 2}
"""Bytes of numbers as a profile calls them."""
NAMES = {
    "all_reduce": ("allreduce", "all_reduce"),
    "all_gather": ("_allgather_base", "all_gather_into_tensor"),
    "reduce_scatter": ("_reduce_scatter_base", "reduce_scatter_tensor"),
}
"""What a profile and a graph call each collective."""
FUNCTION = Path(__file__).with_name("estimate.txt")


def tested(kind: str, version: str | None) -> str:
    """Return the torch to write for, by default the installed one. Raises UserError unless it is TESTED."""
    try:
        version = version or metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise UserError(
            "no torch is installed here: say which is meant by --torch"
        ) from None
    if ".".join(version.split(".")[:2]) not in TESTED[kind]:
        listed = " or ".join(TESTED[kind])
        raise UserError(
            f"torch {shown(version)}: --to {kind} is known to work with {listed}: say --torch {listed[:4]}"
        )
    return version


def bucket_caps_mb(group_bytes: Any) -> list[float]:
    """Return caps for DistributedDataParallel's bucket_cap_mb_list: a bucket closes on reaching its own.

    >>> bucket_caps_mb([1048576, 5])
    [1.0, 4.76837158203125e-06]
    """
    return [size / MIB for size in np.asarray(group_bytes).tolist()]


def ddp(iteration: Iteration, torch: str) -> str:
    """Return buckets in ready order, in MiB. Raises UserError unless messages are all-reduces."""
    if iteration.cost.collective != "all_reduce":
        raise UserError(
            f"a cost of {iteration.cost.collective}: DDP sends all_reduce: fit that"
        )
    caps = bucket_caps_mb(iteration.group_bytes)
    of = {"torch": torch, "planner": iteration.plan.planner}
    return json.dumps({**of, "bucket_cap_mb_list": caps})


def _ranks(cost: MessageCost) -> int:
    if cost.workers is None:
        raise UserError("a cost of an unknown number of ranks: say --ranks")
    return cost.workers


def inductor(cost: MessageCost, torch: str) -> str:
    """Return a module with ``estimate(node, override_size) -> ms``; between SIZES it draws straight lines."""
    times_ms = tuple(float(f"{1e3 * s:.6g}") for s in cost(SIZES))
    said = {
        "collective": cost.collective,
        "name": NAMES[cost.collective][1],
        "ranks": _ranks(cost),
    }
    return FUNCTION.read_text(encoding="utf-8").format(
        **said, torch=torch, sizes=tuple(SIZES.tolist()), times_ms=times_ms
    )


def profile(cost: MessageCost, torch: str) -> str:
    """Return a Chrome trace of kernels for profile_guided_estimations_profile_path: each size once."""
    ranks, events = _ranks(cost), []
    of_group = {"Group size": ranks, "Process Group Ranks": str(list(range(ranks)))}
    inside, outside = message_parts(cost.collective, ranks)
    for dtype, width in ELEMENTS.items():
        whole = np.unique(np.maximum(SIZES // width // ranks, 1)) * ranks
        for n, seconds in zip(whole.tolist(), cost(whole * width), strict=True):
            sizes = {
                "In msg nelems": n // inside,
                "Out msg nelems": n // outside,
                "dtype": dtype,
            }
            args = {"Collective name": NAMES[cost.collective][0], **of_group, **sizes}
            events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": "nccl",
                    "dur": 1e6 * seconds,
                    "args": args,
                }
            )
    return json.dumps({"torch": torch, "traceEvents": events})
