"""Whether all that a recording needs works: points of a session, so that a fault costs that check alone."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import format_bytes, format_seconds
from ddlkit.jobs import vitals
from ddlkit.jobs.launch import free_port
from ddlkit.measure.session import MEASURED, Point, PointList, Tables, say
from ddlkit.measure.session.engine import run_session
from ddlkit.store import machine

EXPECTED_S = 8.0  # of a check, at most; the engine ends one that hangs
OVERLAP = 0.9  # a stand-in that runs beside less of a product does not run beside it
OVERLAP_TRIES = 5
NVIDIA = ("NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS")
HARMFUL = (
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    *NVIDIA,
)  # variables that change what is measured

Check = Callable[[str], str]
"""Returns how the device is, or raises."""


def preflight(device: str) -> int:
    """Have all checks say a line each; returns the exit status. Raises UserError without the GPU."""
    if device == "cuda" and not machine.describe()["gpus"]:
        raise UserError("no GPU here: nothing can be checked: use --device cpu")
    start_s = time.monotonic()
    with TemporaryDirectory() as out:
        # That others use the GPU is for a check to say.
        run_session(
            partial(checks, device=device),
            Path(out),
            isolate=True,
            gpu=device == "cuda",
            ignore_load=True,
        )
        rows = store.load_table(Path(out) / "outcomes.csv", "outcomes")
    failed = rows["point"][rows["outcome"] != MEASURED]
    verdict = f"FAILED: {', '.join(failed)}" if len(failed) else "all is well"
    print(f"preflight: {verdict}, after {format_seconds(time.monotonic() - start_s)}")
    return int(len(failed) > 0)


def checks(*, out: Path, session: int, device: str) -> PointList:
    """Return each check of the device as a point, which is never measured already."""

    def passed(name: str, check: Check) -> Tables:
        say(f"{name}: {check(device)}")
        return {}

    named = {**CHECKS, **(GPU_CHECKS if device == "cuda" else {})}
    points = [
        Point(
            "check",
            name,
            partial(passed, name, each),
            EXPECTED_S,
            left=lambda: ["all of it"],
        )
        for name, each in named.items()
    ]
    return PointList(points)


def environment(device: str) -> str:
    """Return whose code it is, and that ranks can talk. Raises UserError for what harms."""
    harmful = [name for name in HARMFUL if os.environ.get(name)]
    if device == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        harmful.append("CUDA_VISIBLE_DEVICES")
    if harmful:
        raise UserError(
            f"unset {', '.join(harmful)}: what is measured would be something else"
        )
    if (commit := machine.commit()) == "unknown":
        raise UserError(
            "commit unknown, and every stamp would say so: set DDLKIT_COMMIT"
        )
    free_port()  # 127.0.0.1 is down in a new network namespace: this says so
    return f"commit {commit}, loopback answers"


def packages(device: str) -> str:
    """Return the versions of the packages that measure. Raises UserError for one that is missing."""
    importlib.import_module("ddlkit.measure.networks").import_torchvision()
    names = ("numpy", "pandas", "scipy", "torch", "torchvision")
    return ", ".join(f"{name} {machine.installed(name)}" for name in names)


def nvidia_smi(device: str) -> str:
    """Return that nobody else uses the GPU. Raises UserError where somebody does, or it is not told."""
    asked = machine.cells(
        machine.ask_gpus(("utilization.gpu", "memory.used", "persistence_mode"))
    )
    if not asked:
        raise UserError(
            "nvidia-smi does not answer: no vitals, and others are not noticed"
        )
    if used := vitals.gpu_in_use():
        raise UserError(used)
    load, used_mib, mode = asked[0]
    return f"{load}% {used_mib} MiB; persistence mode {mode}; nobody else is there"


def stand_in(device: str) -> str:
    """Return that NVRTC compiles the stand-in, which runs beside a product as long as that takes."""
    import torch

    from workbook.record.standin import Footprint, GpuStandIn, cubin

    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU: install a build for this driver"
        )
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    size = format_bytes(len(cubin(architecture)))
    standin, a = GpuStandIn(), torch.randn(2048, 2048, device="cuda")
    standin.beside(None, lambda: a @ a)
    share, tries = 0.0, iter(range(OVERLAP_TRIES))  # the first one loads the kernel
    while share <= OVERLAP and next(tries, None) is not None:
        _, read = standin.beside(Footprint(blocks=8, threads=512), lambda: a @ a)
        torch.cuda.synchronize()
        share = read().overlap_share
    line = f"{size} for {architecture}, runs beside {share:.1%} of a product"
    if share <= OVERLAP:
        raise UserError(f"{line}: kernels take turns here")
    return line


CHECKS: dict[str, Check] = {"environment": environment, "packages": packages}
GPU_CHECKS: dict[str, Check] = {"nvidia-smi": nvidia_smi, "stand-in": stand_in}
