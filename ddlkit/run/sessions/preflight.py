"""Whether all that a recording needs is here and works: half a minute of checks, a line for each.

Each check runs in a process of its own, forked from this one once it has imported torch: a fault, or one
that hangs, costs that check alone. This process never touches CUDA.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from ddlkit import machine, store
from ddlkit.core.errors import UserError
from ddlkit.core.units import GIB, KIB, MIB, format_bytes, format_seconds
from ddlkit.run import vitals
from ddlkit.run.jobs import die_with_parent, ending
from ddlkit.run.jobs.launch import Loopback, free_port, launch
from ddlkit.run.sessions import one_line

LIMIT_S = 20.0  # of each check; PATIENCE: by what factor it is longer where all is slow to start
PATIENCE = "DDLKIT_PATIENCE"
OVERLAP = 0.9  # a stand-in that runs beside less of a product does not run beside it
OVERLAP_TRIES = 5
# The oldest versions that ddlkit works with, as in pyproject.toml.
NEEDED = {"numpy": "1.26", "pandas": "2.1", "scipy": "1.11", "torch": "2.4", "torchvision": "0.19"}
# Free space that a whole recording takes, with a margin.
SPACE = {"memory": 2 * GIB, "disk": GIB, "/dev/shm": 60 * MIB}
# Variables that change what is measured, and the values with which they do not.
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": ("0",),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("8", "32"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0",),
    **dict.fromkeys(("NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS"), ()),
}


def preflight(device: str, out: Path | None = None) -> int:
    """Check, and print a line for each check as it ends; returns the exit status: 0 if all is well.

    Raises UserError where there is no GPU and one is to be recorded, and for a PATIENCE that is no factor.
    """
    if device == "cuda" and not machine.describe()["gpus"]:
        raise UserError("no GPU here: nothing can be checked; use --suite cpu")
    text, start_s, failed = os.environ.get(PATIENCE, "1"), time.monotonic(), []
    if not re.fullmatch(r"\d{1,4}(\.\d+)?", text) or float(text) == 0:
        raise UserError(f"{PATIENCE} is {text!r}: a factor above zero is needed, as 3")
    for name, check in {**CHECKS, **(GPU_CHECKS if device == "cuda" else {})}.items():
        begun_s = time.monotonic()
        well, line = _forked(check, device, out or store.RECORDED, LIMIT_S * float(text))
        state, seconds = ("ok" if well else "FAILED"), time.monotonic() - begun_s
        print(f"{state:<6} {seconds:5.1f} s  {name:<12} {line}", flush=True)
        failed += [] if well else [name]
        if name == "packages" and well:  # once, and not in every child
            importlib.import_module("ddlkit.run.sessions.kinds")
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all is well"
    print(f"preflight: {verdict}, after {format_seconds(time.monotonic() - start_s)}")
    return 1 if failed else 0


Check = Callable[[str, Path], str]
"""Returns how it is, or raises; called with the device, and where to record."""


def _forked(check: Check, device: str, out: Path, limit_s: float) -> tuple[bool, str]:
    """Return whether a check went well in a process of its own, and the line that says how."""
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)
    process = fork.Process(target=_check, args=(check, device, out, writing))
    process.start()
    writing.close()
    try:
        if not reading.poll(limit_s):
            return False, f"did not end within {format_seconds(limit_s)}"
        answer: tuple[bool, str] = reading.recv()
        return answer
    except EOFError:
        process.join()
        return False, f"its process {ending(process.exitcode or 0)}"
    finally:
        process.kill()
        process.join()


def _check(check: Check, device: str, out: Path, writing: Connection) -> None:
    """Say, in the child, what became of the check; and end, whatever CUDA's own clean-up would do."""
    die_with_parent(os.getppid())
    os.dup2(2, 1)  # what libraries print is no line of ours
    try:
        writing.send((True, check(device, out)))
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        writing.send((False, f"{kind}{one_line(error)}"))
    os._exit(0)


def environment(device: str, out: Path) -> str:
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


def packages(device: str, out: Path) -> str:
    """Return the versions of all packages. Raises UserError for one that is missing or too old."""

    def number(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)[:3]]

    there = {name: machine.installed(name) for name in NEEDED}
    if old := [name for name in NEEDED if number(there[name]) < number(NEEDED[name])]:
        needed = ", ".join(f"{name} {NEEDED[name]}, here {there[name]}" for name in old)
        raise UserError(f"at least {needed}")
    importlib.import_module("ddlkit.run.nets.registry").import_torchvision()
    return ", ".join(f"{name} {version}" for name, version in there.items())


def space(device: str, out: Path) -> str:
    """Return what is free of memory, disk and shared memory. Raises UserError for too little."""
    out = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = {"memory": psutil.virtual_memory().available, "disk": shutil.disk_usage(out).free}
    if Path("/dev/shm").exists():
        free["/dev/shm"] = shutil.disk_usage("/dev/shm").free
    line = "free: " + ", ".join(f"{what} {format_bytes(size)}" for what, size in free.items())
    wrong = [
        f"{what} needs {format_bytes(SPACE[what])}" for what in free if free[what] < SPACE[what]
    ]
    wrong += [] if os.access(out, os.W_OK) else [f"{out} cannot be written"]
    if wrong:
        raise UserError(f"{'; '.join(wrong)}; {line}")
    return line


def nvidia_smi(device: str, out: Path) -> str:
    """Return that nobody else uses the GPU. Raises UserError where somebody does, or it is not told."""
    asked = machine.cells(machine.ask_gpus(("utilization.gpu", "memory.used", "persistence_mode")))
    if not asked:
        raise UserError("nvidia-smi does not answer: no vitals, and others are not noticed")
    if used := vitals.gpu_in_use():
        raise UserError(used)
    load, used_mib, mode = asked[0]
    return f"{load}% {used_mib} MiB; persistence mode {mode}; nobody else is there"


def stand_in(device: str, out: Path) -> str:
    """Return that NVRTC compiles the stand-in, which runs beside a product as long as that takes."""
    import torch

    from ddlkit.run.measure.standin import Footprint, GpuStandIn, cubin

    if not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no GPU: install a build for this driver")
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    size = format_bytes(len(cubin(architecture)))
    standin, a = GpuStandIn(), torch.randn(2048, 2048, device="cuda")
    standin.beside(None, lambda: a @ a)
    for _ in range(OVERLAP_TRIES):  # the first one loads the kernel
        _, read = standin.beside(Footprint(blocks=8, threads=512), lambda: a @ a)
        torch.cuda.synchronize()
        traffic = read()
        if traffic.overlap_share > OVERLAP:
            break
    share = f"{size} for {architecture}, runs beside {traffic.overlap_share:.1%} of a product"
    if traffic.overlap_share <= OVERLAP:
        raise UserError(f"{share}: kernels take turns here")
    return f"{share}, at {traffic.bytes_per_s / 1e9:.0f} GB/s"


def profiler(device: str, out: Path) -> str:
    """Return a kernel that CUPTI tells torch's profiler of. Raises UserError if it tells none."""
    import torch

    from ddlkit.run.clock import chrome_trace

    a = torch.randn(256, 256, device="cuda")
    events = json.loads(chrome_trace(lambda: a @ a, "cuda"))["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    if not kernels:
        raise UserError("the profiler sees no kernel on the GPU: CUPTI is missing or not allowed")
    return f"sees {kernels[0][:60]}"


def _all_reduce(ranks: int, **join: Any) -> str:
    """Return how long ranks take that the real launch forks; what they get is checked."""
    from ddlkit.run.clock import Budget
    from ddlkit.run.measure.collectives import CollectivesSettings, collectives_job

    settings = CollectivesSettings(["all_reduce"], [4 * KIB, MIB], Budget(1, 3, 3))
    tables = launch(collectives_job, settings, ranks=ranks, place=Loopback(), join=join)
    medians = tables["collectives"].groupby("bytes")["seconds"].median()
    each = [f"{format_bytes(n)} in {format_seconds(seconds)}" for n, seconds in medians.items()]
    return f"all_reduce by {ranks}: {', '.join(each)}"


CHECKS: dict[str, Check] = {
    **{"environment": environment, "space": space, "packages": packages},
    # Over 127.0.0.1, from the GPU's memory where there is one.
    "gloo": lambda device, out: _all_reduce(2, backend="gloo", on_gpu=device == "cuda"),
}
GPU_CHECKS: dict[str, Check] = {
    **{"nvidia-smi": nvidia_smi, "stand-in": stand_in, "profiler": profiler},
    "nccl": lambda device, out: _all_reduce(1, backend="nccl"),
}
