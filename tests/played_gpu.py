"""The yardstick on a processor, which stands in for the GPU: small sizes, and the host's clock."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import yardstick

from ddlkit.measure.networks import import_torchvision

SMALL: dict[str, object] = {
    "DEVICE": "cpu",
    "REPEATS": 1,
    "SIDE": 64,
    "COPIED_BYTES": 2**16,
    "PINNED_BYTES": 2**16,
    "SELECTED_FROM": (10, 100, 1000),
    "BATCH": 2,
    "PIXELS": 32,
    "MESSAGE_BYTES": 2**10,
}


class Event:
    """An event in the only stream of a processor, on which all work is done at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def look_at_yardstick() -> None:
    """Run the yardstick with everything but the GPU."""
    torchvision = import_torchvision()  # may be built for CUDA, which is not there
    join = dist.init_process_group
    empty = torch.empty

    def join_gloo(backend: str, device_id: object, **group: Any) -> None:
        assert backend == "nccl"
        join("gloo", **group)

    def empty_unpinned(
        *shape: Any, pin_memory: bool = False, **options: Any
    ) -> torch.Tensor:
        return empty(*shape, **options)

    cuda: dict[str, object] = {
        "Event": Event,
        "_sleep": lambda cycles: None,
        "get_device_name": lambda: "a processor",
        "is_available": lambda: True,
        "synchronize": lambda: None,
    }
    with (
        patch.dict(vars(yardstick), SMALL),
        patch.dict(vars(torch.cuda), cuda),
        patch.object(torch.cuda.nccl, "version", lambda: "none"),
        patch.object(torch, "empty", empty_unpinned),
        patch.object(dist, "init_process_group", join_gloo),
        # Without instructions for bf16, a processor takes seconds for a step of ResNet-50.
        patch.object(torchvision.models, "resnet50", torchvision.models.squeezenet1_1),
    ):
        yardstick.main()
