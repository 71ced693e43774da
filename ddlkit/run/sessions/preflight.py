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
import socket
import subprocess
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
from ddlkit.run.jobs.launch import LOCALHOST, Loopback, launch
from ddlkit.run.sessions.session import one_line

LIMIT_S = 20.0  # of each check; PATIENCE: by what factor it is longer where all is slow to start
PATIENCE = "DDLKIT_PATIENCE"
OVERLAP = 0.9  # a stand-in that runs beside less of a product does not run beside it
OVERLAP_TRIES = 5
# The oldest versions that ddlkit works with, as in pyproject.toml.
NEEDED = {"numpy": "1.26", "pandas": "2.1", "psutil": "5.9", "scipy": "1.11"}
NEEDED |= {"torch": "2.4", "torchvision": "0.19", "tqdm": "4.66"}
# Free space that a whole recording takes, with a margin.
SPACE = {"memory": 2 * GIB, "disk": GIB, "/dev/shm": 60 * MIB}
# Variables that change what is measured, and the values with which they do not.
HARMFUL = {
    **{"CUDA_LAUNCH_BLOCKING": ("0",), "CUDA_DEVICE_MAX_CONNECTIONS": ("8", "32")},
    **{"PYTORCH_NO_CUDA_MEMORY_CACHING": ("0",), "NVIDIA_TF32_OVERRIDE": ()},
    **{"NCCL_ALGO": (), "NCCL_PROTO": (), "NCCL_NTHREADS": (), "PYTHONDONTWRITEBYTECODE": ()},
}


def preflight(device: str, out: Path | None = None) -> int:
    """Check, and print a line for each check as it ends; returns the exit status: 0 if all is well.

    Raises UserError where there is no GPU and one is to be recorded, and for a PATIENCE that is no factor.
    """
    if device == "cuda" and not machine.describe()["gpus"]:
        raise UserError("no GPU here: nothing can be checked; use --suite cpu")
    said, start_s, failed = os.environ.get(PATIENCE, "1"), time.monotonic(), []
    if not re.fullmatch(r"\d{1,4}(\.\d+)?", said) or float(said) == 0:
        raise UserError(f"{PATIENCE} is {said!r}: a factor above zero is needed, as 3")
    for name, check in {**CHECKS, **(GPU_CHECKS if device == "cuda" else {})}.items():
        begun_s = time.monotonic()
        well, line = _forked(check, device, out or store.RECORDED, LIMIT_S * float(said))
        state, seconds = ("ok" if well else "FAILED"), time.monotonic() - begun_s
        print(f"{state:<6} {seconds:5.1f} s  {name:<12} {line}", flush=True)
        failed += [] if well else [name]
        if name == "packages" and well:  # once, and not in every child
            importlib.import_module("ddlkit.run.sessions.suites")
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
    """Return what decides how CUDA, NCCL and torch work, and whose code. Raises UserError for what harms."""
    harmful = [n for n, fine in HARMFUL.items() if (v := os.environ.get(n)) and v not in fine]
    if device == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        harmful.append("CUDA_VISIBLE_DEVICES")
    if harmful:
        raise UserError(f"unset {', '.join(harmful)}: what is measured would be something else")
    if (commit := machine.commit()) == "unknown":
        raise UserError("commit unknown, and every stamp would say so: set DDLKIT_COMMIT")
    shown = re.compile(r"(CUDA|NCCL|TORCH|PYTORCH|OMP|GLOO)_\w+")
    there = [f"{name}={text}" for name, text in sorted(os.environ.items()) if shown.match(name)]
    return " ".join([f"commit {commit}", *there])


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
    short = [what for what in free if free[what] < SPACE[what]]
    wrong = [f"{what} needs {format_bytes(SPACE[what])}" for what in short]
    wrong += [] if os.access(out, os.W_OK) else [f"{out} cannot be written"]
    if wrong:
        raise UserError(f"{'; '.join(wrong)}; {line}")
    return line


def loopback(device: str, out: Path) -> str:
    """Return that ranks can talk over 127.0.0.1, which is down in a new network namespace: root raises it."""
    try:
        socket.create_connection(("127.0.0.1", 9), 5.0).close()
    except ConnectionRefusedError:
        pass  # nobody listens there, which only an interface that is up can tell
    except OSError:
        if subprocess.run(["ip", "link", "set", "lo", "up"], capture_output=True).returncode:
            raise UserError("lo is down: as root, ip link set lo up") from None
        return f"{LOCALHOST}: lo was down, and was raised"
    return f"{LOCALHOST} answers"


def nvidia_smi(device: str, out: Path) -> str:
    """Return the GPU's load, asked three times. Raises UserError where it is another's or not told."""
    looks = []
    for _ in range(3):
        begun_s = time.monotonic()
        asked = machine.ask_gpus(("utilization.gpu", "memory.used", "persistence_mode"))
        if not (rows := machine.cells(asked)):
            raise UserError("nvidia-smi does not answer: no vitals, and others are not noticed")
        looks.append(f"{rows[0][0]}% {rows[0][1]} MiB in {time.monotonic() - begun_s:.2f} s")
    if used := vitals.gpu_in_use():
        raise UserError(used)
    return f"{', '.join(looks)}; persistence mode {rows[0][2]}; nobody else is there"


def product(device: str, out: Path) -> str:
    """Return that a product of whole numbers, which no precision rounds, is right on the device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no GPU: install a build for this driver")
    a, b = torch.randint(0, 4, (2, 256, 256)).float()
    if not torch.equal((a.to(device) @ b.to(device)).cpu(), a @ b):
        raise UserError(f"a product on {device} is wrong")
    if device == "cpu":
        return f"right, by {torch.get_num_threads()} threads"
    gpu = torch.cuda.get_device_properties(0)
    return f"right, by {gpu.name} (sm_{gpu.major}{gpu.minor}), CUDA {torch.version.cuda}"


def stand_in(device: str, out: Path) -> str:
    """Return that NVRTC compiles the stand-in, which runs beside a product as long as that takes."""
    import torch

    from ddlkit.run.measure.standin import Footprint, GpuStandIn, cubin

    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    size = format_bytes(len(cubin(architecture)))
    standin, a = GpuStandIn(), torch.randn(2048, 2048, device="cuda")
    standin.beside(None, lambda: a @ a)
    for _ in range(OVERLAP_TRIES):  # the first one loads the kernel
        passage = standin.beside(Footprint(blocks=8, threads=512), lambda: a @ a)
        torch.cuda.synchronize()
        traffic = passage.traffic()
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
    """Return how long ranks take that the real launch forks."""
    from ddlkit.run.clock import Budget
    from ddlkit.run.measure.collectives import CollectivesSettings, collectives_job

    budget = Budget(warmup=1, min_repeats=3, max_repeats=3)
    settings = CollectivesSettings(["all_reduce"], [4 * KIB, MIB], budget)
    tables = launch(collectives_job, settings, ranks=ranks, place=Loopback(), join=join)
    medians = tables["collectives"].groupby("bytes")["seconds"].median()
    each = [f"{format_bytes(n)} in {format_seconds(seconds)}" for n, seconds in medians.items()]
    return f"all_reduce by {ranks}: {', '.join(each)}"


CHECKS: dict[str, Check] = {
    **{"environment": environment, "space": space, "loopback": loopback, "packages": packages},
    "product": product,
    # Over 127.0.0.1, from the GPU's memory where there is one.
    "gloo": lambda device, out: _all_reduce(2, backend="gloo", on_gpu=device == "cuda"),
}
GPU_CHECKS: dict[str, Check] = {
    **{"nvidia-smi": nvidia_smi, "stand-in": stand_in, "profiler": profiler},
    "nccl": lambda device, out: _all_reduce(1, backend="nccl"),
}
