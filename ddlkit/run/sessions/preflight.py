"""Whether all that a recording needs is here and works: half a minute of checks, a line for each.

Each check runs in a process of its own, forked from this one once it has imported torch: a fault, or one
that hangs, costs that check alone, also of its time: checks run beside each other. This process never
touches CUDA.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

import psutil

from ddlkit import machine, store
from ddlkit.core.errors import UserError
from ddlkit.core.units import GIB, KIB, MIB, format_bytes, format_seconds
from ddlkit.run.instruments import vitals
from ddlkit.run.jobs.launch import LOCALHOST, Loopback, launch
from ddlkit.run.jobs.protocol import PARENT, die_with_parent, ending
from ddlkit.run.sessions.session import one_line

SMI_LOOKS, HEARD_S = 3, 3.0
NO_GPU = "no GPU here: nothing can be checked; use --suite cpu"
OVERLAP = 0.9  # a stand-in that runs beside less of a product does not run beside it
OVERLAP_TRIES = 5
# The oldest versions that ddlkit works with, as in pyproject.toml.
NEEDED = {
    **{"numpy": "1.26", "pandas": "2.1", "psutil": "5.9", "scipy": "1.11"},
    **{"torch": "2.4", "torchvision": "0.19", "tqdm": "4.66"},
}
# Free space that a whole recording takes, with a margin.
SPACE = {"memory": 2 * GIB, "disk": GIB, "/dev/shm": 60 * MIB}
# Variables that change what is measured, the values with which they do not, and how they do.
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": (("0",), "nothing runs beside anything"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (("8", "32"), "streams wait for one another"),
    "NVIDIA_TF32_OVERRIDE": ((), "precisions are not what they are called"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("0",), "each tensor waits for its memory"),
    "NCCL_ALGO": ((), "NCCL does not choose"),
    "NCCL_PROTO": ((), "NCCL does not choose"),
    "NCCL_NTHREADS": ((), "NCCL does not choose"),
    "PYTHONDONTWRITEBYTECODE": ((), "every process compiles what it imports anew"),
}
PATIENCE = "DDLKIT_PATIENCE"  # by what factor checks may take longer, where all is slow to start
_SHOWN = re.compile(r"(CUDA|NCCL|TORCH|PYTORCH|OMP|GLOO)_\w+")
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP


class Here(NamedTuple):
    """What is to be recorded: on which device, "cuda" or "cpu", and into which directory."""

    device: str
    out: Path


class Check(NamedTuple):
    """Something that must work: ``run`` says how in a line, or raises; ``gpu``: only where one is."""

    name: str
    run: Callable[[Here], str]
    gpu: bool = False


class Stage(NamedTuple):
    """Checks that run at the same time, so that none takes another's time.

    by_s : after the start of all, when whatever still runs counts as hanging; time that the stages before
        did not need is this one's
    """

    by_s: float
    checks: Sequence[Check]


def preflight(device: str, out: Path | None = None) -> int:
    """Check, and print a line for each check as it ends; returns the exit status: 0 if all is well.

    Raises UserError where there is no GPU and one is to be recorded, and for a PATIENCE that is no factor.
    """
    start_s, patience = time.monotonic(), _patience()
    here = Here(device, out or store.RECORDED)
    failed = []
    for stage in STAGES:
        checks = [check for check in stage.checks if device == "cuda" or not check.gpu]
        for ended in _together(checks, here, start_s + patience * stage.by_s):
            if ended.line == NO_GPU:
                raise UserError(ended.line)
            state = "ok" if ended.well else "FAILED"
            line = f"{state:<6} {ended.seconds:5.1f} s  {ended.check.name:<12} {ended.line}"
            print(line, flush=True)
            if not ended.well:
                failed.append(ended.check.name)
            elif ended.check.run is packages:  # once, and not in every child
                importlib.import_module("ddlkit.run.sessions.suites")
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all is well"
    print(f"preflight: {verdict}, after {format_seconds(time.monotonic() - start_s)}")
    return 1 if failed else 0


def _patience() -> float:
    said = os.environ.get(PATIENCE, "1")
    try:
        factor = float(said)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise UserError(f"{PATIENCE} is {said!r}: a factor above zero is needed, as 3")
    return factor


# -- checks in processes of their own ----------------------------------------------------------


class Ended(NamedTuple):
    """What became of a check, and the line that says so."""

    check: Check
    seconds: float
    well: bool
    line: str


def _together(checks: Sequence[Check], here: Here, until_s: float) -> Iterator[Ended]:
    """Checks as they end, each in a process of its own; what still runs at ``until_s`` is killed."""
    running = {_fork(check, here): check for check in checks}
    begun_s = time.monotonic()
    while running:
        streams = [stream for _, stream in running]
        patience_s = max(0.0, until_s - time.monotonic())
        ready = select.select(streams, [], [], patience_s)[0]
        for pid, stream in [one for one in running if one[1] in ready or not ready]:
            if not ready:
                os.kill(pid, signal.SIGKILL)
            with stream:
                said = stream.read()
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            seconds = time.monotonic() - begun_s
            check = running.pop((pid, stream))
            if said:
                yield Ended(check, seconds, **json.loads(said))
            elif ready:
                yield Ended(check, seconds, False, f"its process {ending(status)}")
            else:
                yield Ended(check, seconds, False, f"did not end within {format_seconds(seconds)}")


def _fork(check: Check, here: Here) -> tuple[int, BinaryIO]:
    """The process of a check, and what it says when it ends."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        _run(check, here, writing)
    os.close(writing)
    return pid, open(reading, "rb")


def _run(check: Check, here: Here, writing: int) -> NoReturn:
    """The child: say what became of the check, and end, whatever CUDA's own clean-up would do."""
    said: dict[str, object] = {}
    try:
        os.environ[PARENT] = str(os.getppid())
        die_with_parent()
        os.dup2(2, 1)  # what libraries print is no line of ours
        said = {"well": True, "line": check.run(here)}
    except UserError as error:
        said = {"well": False, "line": one_line(error)}
    except Exception as error:
        said = {"well": False, "line": f"{type(error).__name__}: {one_line(error)}"}
    finally:
        os.write(writing, json.dumps(said).encode() if said else b"")
        os._exit(0 if said else 1)


# -- the machine -------------------------------------------------------------------------------


def gpu(here: Here) -> str:
    """There is one; without nvidia-smi the driver is asked, which no fork of the asking process survives."""
    found = machine.describe()["gpus"]
    if not found:
        raise UserError(NO_GPU)
    one = found[0]
    size = format_bytes(one["memory_bytes"])
    return f"{len(found)} x {one['model']}, {size}, driver {one['driver'] or 'unknown'}"


def environment(here: Here) -> str:
    """Variables that decide how CUDA, NCCL and torch work; none may change what is measured."""
    harmful = {
        name: how
        for name, (harmless, how) in HARMFUL.items()
        if (value := os.environ.get(name)) and value not in harmless
    }
    if here.device == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        harmful["CUDA_VISIBLE_DEVICES"] = "it hides every GPU"
    if harmful:
        raise UserError("; ".join(f"unset {name}: {how}" for name, how in harmful.items()))
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _SHOWN.match(name)]
    return " ".join(shown) or "nothing is set"


def commit(here: Here) -> str:
    """Every stamp says which code measured."""
    found = machine.commit()
    if found == "unknown":
        raise UserError("unknown, and every stamp would say so: set DDLKIT_COMMIT")
    return found


def packages(here: Here) -> str:
    """All packages are there, none is too old, and everything that measures can be imported."""
    found = {name: machine.installed(name) for name in NEEDED}
    old = [f"{name} {there}" for name, there in found.items() if _older(there, NEEDED[name])]
    if old:
        needed = ", ".join(f"{name} {version}" for name, version in NEEDED.items())
        raise UserError(f"{', '.join(old)}: at least {needed} are needed")
    from ddlkit.run.nets.registry import import_torchvision

    importlib.import_module("ddlkit.run.sessions.suites")
    import_torchvision()  # which fails where it was built for another torch
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _older(version: str, least: str) -> bool:
    """Whether it is, or is none at all."""
    have, need = ([int(part) for part in re.findall(r"\d+", text)[:3]] for text in (version, least))
    return have < need


def space(here: Here) -> str:
    """Memory, the disk of the recording, and what processes share."""
    out = next(path for path in (here.out, *here.out.absolute().parents) if path.exists())
    shared = Path("/dev/shm")
    free = {
        "memory": psutil.virtual_memory().available,
        "disk": shutil.disk_usage(out).free,
        **({"/dev/shm": shutil.disk_usage(shared).free} if shared.exists() else {}),
    }
    short = [
        f"{what} needs {format_bytes(SPACE[what])}" for what in free if free[what] < SPACE[what]
    ]
    line = ", ".join(f"{what} {format_bytes(size)}" for what, size in free.items())
    if not os.access(out, os.W_OK):
        short.append(f"{out} cannot be written")
    if short:
        raise UserError(f"{'; '.join(short)}; free: {line}")
    return f"free: {line}"


def loopback(here: Here) -> str:
    """Ranks talk over 127.0.0.1, which is down in a new network namespace: root raises it."""
    try:
        _echo()
        return f"{LOCALHOST} answers"
    except OSError:
        _raise_lo()
    _echo()
    return f"{LOCALHOST} answers: lo was down, and was raised"


def _echo() -> None:
    with socket.create_server((LOCALHOST, 0)) as server:
        server.settimeout(5.0)
        with socket.create_connection(server.getsockname(), 5.0) as sender:
            sender.sendall(b"?")
            with server.accept()[0] as receiver:
                assert receiver.recv(1) == b"?"


def _raise_lo() -> None:
    """What ``ip link set lo up`` does. Raises UserError for who may not."""
    request = bytearray(struct.pack("16sH22x", b"lo", 0))  # struct ifreq
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _GET_FLAGS, request)
        (flags,) = struct.unpack_from("H", request, 16)
        struct.pack_into("H", request, 16, flags | _UP)
        try:
            fcntl.ioctl(control, _SET_FLAGS, request)
        except PermissionError as error:
            raise UserError("lo is down: as root, ip link set lo up") from error


def nvidia_smi(here: Here) -> str:
    """Asked three times, what is the GPU's load; that one which stays tells it; that it is nobody else's."""
    fields = ("utilization.gpu", "memory.used", "persistence_mode")
    looks = []
    with vitals.Sampler(gpu=True, period_s=0.2) as sampler:
        for _ in range(SMI_LOOKS):
            begun_s = time.monotonic()
            rows = machine.cells(machine.ask_gpus(fields))
            if not rows:
                raise UserError("nvidia-smi does not answer: no vitals, and others are not noticed")
            load, mib, persistence = rows[0]
            looks.append(f"{load}% {mib} MiB in {time.monotonic() - begun_s:.2f} s")
        give_up = time.monotonic() + HEARD_S
        while "gpu0" not in set(sampler.frame()["device"]):
            if time.monotonic() > give_up:
                raise UserError("nvidia-smi -lms says nothing: vitals would have no GPU")
            time.sleep(0.05)
    if used := vitals.gpu_in_use():
        raise UserError(used)
    return f"{', '.join(looks)}; persistence mode {persistence}; nobody else is there"


# -- torch and the GPU -------------------------------------------------------------------------


def product(here: Here) -> str:
    """A product of whole numbers, which no precision rounds, is right on the device."""
    import torch

    if here.device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"torch {torch.__version__} sees no GPU: install a build for this driver")
    a, b = torch.randint(0, 4, (2, 256, 256)).float()
    if not torch.equal((a.to(here.device) @ b.to(here.device)).cpu(), a @ b):
        raise UserError(f"a product on {here.device} is wrong")
    if here.device == "cpu":
        return f"right, by {torch.get_num_threads()} threads"
    gpu = torch.cuda.get_device_properties(0)
    return f"right, by {gpu.name} (sm_{gpu.major}{gpu.minor}), CUDA {torch.version.cuda}"


def compiler(here: Here) -> str:
    """NVRTC makes the stand-in's machine code for this very GPU."""
    import torch

    from ddlkit.run.measure.standin import cubin

    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return f"{format_bytes(len(cubin(architecture)))} for {architecture}"


def overlap(here: Here) -> str:
    """The stand-in runs beside a product, as long as that takes."""
    import torch

    from ddlkit.run.measure.standin import Footprint, GpuStandIn

    standin, a = GpuStandIn(), torch.randn(2048, 2048, device="cuda")
    standin.beside(None, lambda: a @ a)
    for _ in range(OVERLAP_TRIES):  # the first one loads the kernel, and other checks use the GPU
        passage = standin.beside(Footprint(blocks=8, threads=512), lambda: a @ a)
        torch.cuda.synchronize()
        traffic = passage.traffic()
        if traffic.overlap_share > OVERLAP:
            break
    took = format_seconds(traffic.closed_s - traffic.opened_s)
    found = f"beside {traffic.overlap_share:.1%} of a product that took {took}"
    if traffic.overlap_share <= OVERLAP:
        raise UserError(f"the stand-in runs {found}: kernels take turns here")
    return f"the stand-in runs {found}, at {traffic.bytes_per_s / 1e9:.0f} GB/s"


def profiler(here: Here) -> str:
    """CUPTI tells torch's profiler which kernels ran."""
    import torch

    from ddlkit.run.instruments.clock import chrome_trace

    a = torch.randn(256, 256, device="cuda")
    events = json.loads(chrome_trace(lambda: a @ a, "cuda"))["traceEvents"]
    kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
    if not kernels:
        raise UserError("the profiler sees no kernel on the GPU: CUPTI is missing or not allowed")
    return f"sees {kernels[0][:60]}"


# -- ranks -------------------------------------------------------------------------------------


def nccl(here: Here) -> str:
    """A rank, forked by the real launch, can use CUDA, and NCCL begins and sums there."""
    import torch

    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{version}, {_all_reduce(1, backend='nccl')}"


def gloo(here: Here) -> str:
    """Two ranks of the real launch sum over 127.0.0.1, from the GPU's memory where there is one."""
    return _all_reduce(2, backend="gloo", on_gpu=here.device == "cuda")


def _all_reduce(ranks: int, **join: object) -> str:
    from ddlkit.run.instruments.clock import Budget
    from ddlkit.run.measure.collectives import CollectivesSettings, collectives_job

    budget = Budget(warmup=1, min_repeats=3, max_repeats=3)
    settings = CollectivesSettings(["all_reduce"], [4 * KIB, MIB], budget)
    rows = launch(collectives_job, settings, ranks=ranks, place=Loopback(), join=join)[
        "collectives"
    ]
    medians = rows.groupby("bytes")["seconds"].median()
    times = ", ".join(
        f"{format_bytes(size)} in {format_seconds(seconds)}" for size, seconds in medians.items()
    )
    return f"all_reduce by {ranks}: {times}"


# Nothing of ours computes on the GPU while others are looked for; each of the last stage uses it alone.
STAGES = (
    Stage(12.0, [Check("gpu", gpu, gpu=True)]),  # a driver that nobody holds open starts slowly
    Stage(
        20.0,
        [
            Check("environment", environment),
            Check("commit", commit),
            Check("nvidia-smi", nvidia_smi, gpu=True),
            Check("space", space),
            Check("loopback", loopback),
            Check("packages", packages),
        ],
    ),
    Stage(
        30.0,
        [
            Check("product", product),
            Check("compiler", compiler, gpu=True),
            Check("overlap", overlap, gpu=True),
            Check("profiler", profiler, gpu=True),
            Check("gloo", gloo),
            Check("nccl", nccl, gpu=True),
        ],
    ),
)
