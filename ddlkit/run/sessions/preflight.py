"""Whether all that a recording needs is here and works: half a minute of checks, a line for each.

Each check runs in a process of its own, forked from this one once it has imported torch: a fault, or one
that hangs, costs that check alone. This process never touches CUDA.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ddlkit import machine
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB, format_bytes, format_seconds
from ddlkit.run import vitals
from ddlkit.run.jobs import die_with_parent, ending
from ddlkit.run.jobs.launch import Loopback, free_port, launch
from ddlkit.run.sessions import one_line

LIMIT_S = 40.0  # of each check
OVERLAP = 0.9  # a stand-in that runs beside less of a product does not run beside it
OVERLAP_TRIES = 5
# Variables that change what is measured, and the values with which they do not.
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": ("0",),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("8", "32"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0",),
    **dict.fromkeys(("NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS"), ()),
}


def preflight(device: str) -> int:
    """Print a line for each check as it ends; returns the exit status. Raises UserError without the GPU."""
    if device == "cuda" and not machine.describe()["gpus"]:
        raise UserError("no GPU here: nothing can be checked; use --suite cpu")
    start_s, failed = time.monotonic(), []
    for name, check in {**CHECKS, **(GPU_CHECKS if device == "cuda" else {})}.items():
        begun_s = time.monotonic()
        well, line = _forked(check, device)
        state, seconds = ("ok" if well else "FAILED"), time.monotonic() - begun_s
        print(f"{state:<6} {seconds:5.1f} s  {name:<12} {line}", flush=True)
        failed += [] if well else [name]
        if name == "packages" and well:  # once, and not in every child
            importlib.import_module("ddlkit.run.sessions.kinds")
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all is well"
    print(f"preflight: {verdict}, after {format_seconds(time.monotonic() - start_s)}")
    return 1 if failed else 0


Check = Callable[[str], str]
"""Returns how the device is, or raises."""


def _forked(check: Check, device: str) -> tuple[bool, str]:
    """Return whether a check went well in a process of its own, and the line that says how."""
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)
    process = fork.Process(target=_check, args=(check, device, writing))
    process.start()
    writing.close()
    try:
        if not reading.poll(LIMIT_S):
            return False, f"did not end within {format_seconds(LIMIT_S)}"
        answer: tuple[bool, str] = reading.recv()
        return answer
    except EOFError:
        process.join()
        return False, f"its process {ending(process.exitcode or 0)}"
    finally:
        process.kill()
        process.join()


def _check(check: Check, device: str, writing: Connection) -> None:
    """Say, in the child, what became of the check; and end, whatever CUDA's own clean-up would do."""
    die_with_parent(os.getppid())
    os.dup2(2, 1)  # what libraries print is no line of ours
    try:
        writing.send((True, check(device)))
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        writing.send((False, f"{kind}{one_line(error)}"))
    os._exit(0)


def environment(device: str) -> str:
    """Return whose code it is, and that ranks can talk. Raises UserError for what harms."""
    harmful = [n for n, fine in HARMFUL.items() if (v := os.environ.get(n)) and v not in fine]
    if device == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        harmful.append("CUDA_VISIBLE_DEVICES")
    if harmful:
        raise UserError(f"unset {', '.join(harmful)}: what is measured would be something else")
    if (commit := machine.commit()) == "unknown":
        raise UserError("commit unknown, and every stamp would say so: set DDLKIT_COMMIT")
    free_port()  # 127.0.0.1 is down in a new network namespace: this says so
    return f"commit {commit}, loopback answers"


def packages(device: str) -> str:
    """Return the versions of the packages that measure. Raises UserError for one that is missing."""
    importlib.import_module("ddlkit.run.nets.registry").import_torchvision()
    names = ("numpy", "pandas", "scipy", "torch", "torchvision")
    return ", ".join(f"{name} {machine.installed(name)}" for name in names)


def nvidia_smi(device: str) -> str:
    """Return that nobody else uses the GPU. Raises UserError where somebody does, or it is not told."""
    asked = machine.cells(machine.ask_gpus(("utilization.gpu", "memory.used", "persistence_mode")))
    if not asked:
        raise UserError("nvidia-smi does not answer: no vitals, and others are not noticed")
    if used := vitals.gpu_in_use():
        raise UserError(used)
    load, used_mib, mode = asked[0]
    return f"{load}% {used_mib} MiB; persistence mode {mode}; nobody else is there"


def stand_in(device: str) -> str:
    """Return that NVRTC compiles the stand-in, which runs beside a product as long as that takes."""
    import torch

    from ddlkit.run.measure.standin import Footprint, GpuStandIn, cubin

    if not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no GPU: install a build for this driver")
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


def _all_reduce(ranks: int, **join: Any) -> str:
    """Return how long ranks take that the real launch forks; what they get is checked."""
    from ddlkit.run.clock import Budget
    from ddlkit.run.measure.collectives import CollectivesSettings, collectives_job

    settings = CollectivesSettings(["all_reduce"], [4 * KIB, MIB], Budget(1, 3, 3))
    tables = launch(collectives_job, settings, ranks=ranks, place=Loopback(), join=join)
    medians = tables["collectives"].groupby("bytes")["seconds"].median()
    each = [f"{format_bytes(n)} in {format_seconds(seconds)}" for n, seconds in medians.items()]
    return f"all_reduce by {ranks}: {', '.join(each)}"


# Each all-reduce over 127.0.0.1, from the GPU's memory where there is one.
CHECKS: dict[str, Check] = {
    "environment": environment,
    "packages": packages,
    "gloo": lambda device: _all_reduce(2, backend="gloo", on_gpu=device == "cuda"),
}
GPU_CHECKS: dict[str, Check] = {
    "nvidia-smi": nvidia_smi,
    "stand-in": stand_in,
    "nccl": lambda device: _all_reduce(1, backend="nccl"),
}
