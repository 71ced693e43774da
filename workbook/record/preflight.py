"""Checks of whether all that a recording needs works.

The checks are points of a session, so that a check that fails or hangs does not stop the others.
"""

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
from ddlkit.measure.session.engine import Wording, run_session
from ddlkit.store import machine

EXPECTED_S = {"environment": 0.1, "packages": 3.0, "nvidia-smi": 2.0, "stand-in": 8.0}
"""The seconds that each check is expected to take. The engine ends one that hangs."""
CHECKING = Wording(noun="check", doing="running", done="passed")
"""How the session calls its points, which measure nothing here."""
OVERLAP = 0.9
"""A stand-in that runs next to at most this share of a product does not overlap with it."""
NVIDIA = ("NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS")
HARMFUL = ("PYTORCH_NO_CUDA_MEMORY_CACHING", *NVIDIA)
"""Environment variables that change what is measured."""

Check = Callable[[str], str]
"""Takes a device, "cpu" or "cuda", and returns a description of its state.

All checks take the device, so that they can be called alike, even if a check does not depend on it.
Raises an error if something does not work."""


def preflight(device: str, remedy: str = "use --device cpu") -> int:
    """Run all checks of a device and print what became of each and a verdict.

    `run_session` prints a line for each check when it has ended. The verdict is printed here.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".
    remedy : str, optional
        What to do if the device is "cuda" and there is no GPU, as the error says it.

    Returns
    -------
    int
        The exit status, which is 0 if all checks passed and otherwise 1.

    Raises
    ------
    UserError
        If the device is "cuda" and there is no GPU, or if no check passed. There is no verdict
        then.
    """
    if device == "cuda" and not machine.describe()["gpus"]:
        raise UserError(f"no GPU here: nothing can be checked: {remedy}")
    start_s = time.monotonic()
    # Nothing is kept of the session. Its checks measure no tables, and the outcomes, which it
    # writes itself, are read before the directory is removed.
    with TemporaryDirectory() as out:
        run_session(
            partial(checks, device=device),
            Path(out),
            # The checks run in a child process, so that one that fails or hangs does not end the
            # session. Only an isolated session writes outcomes.csv.
            isolate=True,
            gpu=device == "cuda",
            # A session usually refuses to start while others use the GPU. Here the check
            # "nvidia-smi" fails instead.
            ignore_load=True,
            wording=CHECKING,
        )
        # A row for each check, with its name in column ``point``. The outcome of a check that
        # passed is MEASURED.
        outcomes = store.load_table(Path(out) / "outcomes.csv", "outcomes")
    failed = outcomes["point"][outcomes["outcome"] != MEASURED]
    verdict = f"FAILED: {', '.join(failed)}" if len(failed) else "all is well"
    print(f"preflight: {verdict}, after {format_seconds(time.monotonic() - start_s)}")
    return int(len(failed) > 0)


def checks(*, out: Path, session: int, device: str) -> PointList:
    """Return each check of the device as a point of a session.

    A session runs each of its points by itself, so that it can end one that hangs. The directory
    ``out`` and the number ``session`` are not used here. Every function that makes a session's
    points takes them.
    """
    named = dict(CHECKS)
    if device == "cuda":
        named |= GPU_CHECKS
    points = [
        Point(
            "check",
            name,
            partial(_run_check, name, check, device),
            EXPECTED_S[name],
            # A point is measured as long as something is left. A check must run each time, and so
            # always has something left.
            left=lambda: ["all of it"],
        )
        for name, check in named.items()
    ]
    return PointList(points)


def _run_check(name: str, check: Check, device: str) -> Tables:
    """Run a check and print its result. An error of the check fails the point.

    The result, the tables that the session is to save, is empty.
    """
    say(f"{name}: {check(device)}")
    return {}


def environment(device: str) -> str:
    """Return which commit runs, and that ranks of this machine can exchange messages.

    Raises an error if an environment variable changes what is measured, if the commit is unknown, or if ranks
    could not exchange messages. ``device`` is "cpu" or "cuda".
    """
    # The variables that are set and not empty.
    harmful = [name for name in HARMFUL if os.environ.get(name)]
    # The values "" and "-1" hide all GPUs. The default "0" hides none, and neither does a variable
    # that is not set.
    if device == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        harmful.append("CUDA_VISIBLE_DEVICES")
    if harmful:
        raise UserError(
            f"{', '.join(harmful)}: set in the environment, where it changes what is measured: "
            f"run unset {' '.join(harmful)} first"
        )
    commit = machine.commit()
    # The stamp of each recorded table names the commit.
    if commit == "unknown":
        raise UserError(
            "the commit of the code is unknown, and every stamp would say so: set DDLKIT_COMMIT to "
            "the hash of the commit"
        )
    # Ranks meet at 127.0.0.1. In a new network namespace this address does not work until it is set
    # up, and looking for a free port raises an error.
    free_port()
    return f"commit {commit}, loopback answers"


def packages(device: str) -> str:
    """Return the versions of the packages that measuring needs. Raises an error if one is missing.

    The device is not used. Every `Check` takes it.
    """
    importlib.import_module("ddlkit.measure.networks").import_torchvision()
    names = ("numpy", "pandas", "scipy", "torch", "torchvision")
    return ", ".join(f"{name} {machine.installed(name)}" for name in names)


def nvidia_smi(device: str) -> str:
    """Return the load, the used memory and the mode of the first GPU, as nvidia-smi tells them.

    Raises UserError if others use a GPU, or if nvidia-smi does not answer. The device is not used, as this
    check is of GPUs only. Every `Check` takes it.
    """
    fields = ("utilization.gpu", "memory.used", "persistence_mode")
    # A list of cells for each GPU, in the order of the fields.
    gpus = machine.cells(machine.ask_gpus(fields))
    if not gpus:
        raise UserError(
            "nvidia-smi does not answer: no vitals, and others are not noticed"
        )
    # A sentence about a GPU that others use, or "".
    use_by_others = vitals.gpu_in_use()
    if use_by_others:
        raise UserError(use_by_others)
    load, used_mib, mode = gpus[0]
    return f"{load}% {used_mib} MiB; persistence mode {mode}; nobody else is there"


PRODUCT_SIZE = 2048
"""The rows and columns of the matrices of the product beside which the stand-in runs."""


def stand_in(device: str) -> str:
    """Return the compiled size of the stand-in, and its overlap with a product of matrices.

    The stand-in is a kernel that loads the GPU as NCCL's communication kernel does. The
    measurements of contention and of sharing need the stand-in to run at the same time as other
    kernels.

    Parameters
    ----------
    device : str
        Not used, as the stand-in runs on a GPU only. Every `Check` takes the device.

    Raises
    ------
    UserError
        If torch sees no GPU, if the stand-in does not compile, and if it does not run at the same
        time as the product.
    """
    import torch

    from workbook.record.standin import cubin

    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU: install a build for this driver"
        )
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}"
    size = format_bytes(len(cubin(architecture)))
    overlap = _overlap()
    line = f"{size} for {architecture}, runs beside {overlap:.1%} of a product"
    if overlap <= OVERLAP:
        raise UserError(f"{line}: kernels take turns here")
    return line


def _overlap() -> float:
    """Return the share of a product of matrices in which all blocks of the stand-in ran.

    Tries end once the share is above OVERLAP, or after `GpuStandIn.chances` tries. The share is
    that of the last try.
    """
    import torch

    from workbook.record.standin import Footprint, GpuStandIn

    neighbour = GpuStandIn()
    matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda")

    def multiply() -> object:
        return matrix @ matrix

    # With None, the product runs alone. The first product loads and allocates, which it cannot do
    # while the stand-in runs.
    neighbour.beside(None, multiply)
    footprint = Footprint(blocks=8, threads=512)
    # The first of several tries loads the stand-in, which then does not overlap with the product.
    for _ in range(neighbour.chances):
        # The marks of the product are not needed.
        _, read = neighbour.beside(footprint, multiply)
        # `read` returns what the stand-in sent meanwhile, once the product has ended.
        torch.cuda.synchronize()
        overlap = read().overlap_share
        if overlap > OVERLAP:
            break
    return overlap


CHECKS: dict[str, Check] = {"environment": environment, "packages": packages}
GPU_CHECKS: dict[str, Check] = {"nvidia-smi": nvidia_smi, "stand-in": stand_in}
