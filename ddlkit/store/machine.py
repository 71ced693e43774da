"""What hardware and software this is; asks torch for its version only where it is already loaded."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError

# Words that every processor of a maker carries; without them names still differ between machines.
_NOISE = r"\((r|tm)\)|@.*|\b(cpu|processor|platinum|gold|silver|bronze|[\w-]+-core)\b"


def describe() -> dict[str, Any]:
    """Return what the machine is, no host name or address; ``cpu.quota_cores``: of a container, 0: none."""
    limit, _, period = content(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    quota_cores = float(limit) / float(period) if limit.isdigit() else 0.0
    system = re.search(
        r'^PRETTY_NAME="?([^"\n]+)', content(Path("/etc/os-release")), re.MULTILINE
    )
    return {
        "name": name(),
        "cpu": {"model": _cpu_model(), "cores": cores(), "quota_cores": quota_cores},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": system[1] if system else platform.platform(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": list(_gpus()),
    }


def name(device: str = "") -> str:
    """Return a name for directories, as "8x-nvidia-h200"; of "cpu" as "cpu-2x-intel-xeon-8488c"."""
    gpus = _gpus()
    if gpus and device != "cpu":
        return (f"{len(gpus)}x-" if len(gpus) > 1 else "") + _slug(gpus[0]["model"])
    return f"cpu-{cores()}x-{_slug(_cpu_model())}"


def versions() -> dict[str, str]:
    """Return the versions of python, torch, numpy, pandas, cuda and nccl; "none" where absent."""
    cuda, nccl = _cuda_and_nccl()
    packages = {package: installed(package) for package in ("torch", "numpy", "pandas")}
    return {"python": platform.python_version(), **packages, "cuda": cuda, "nccl": nccl}


def installed(package: str) -> str:
    """Return the version of an installed package; "none" where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def commit(directory: Path = Path(__file__).parents[1]) -> str:
    """Return 12 digits of the commit, "+dirty" if code differs; outside git $DDLKIT_COMMIT or "unknown".

    An installed library may lie in a folder of somebody's repository, which does not hold it.
    """
    git = ("git", "-C", str(directory))
    head = output(*git, "rev-parse", "--short=12", "HEAD").strip()
    if head and output(*git, "ls-files", "."):
        return head + ("+dirty" if output(*git, "status", "--porcelain", ".") else "")
    given = os.environ.get("DDLKIT_COMMIT", "")
    parts = re.fullmatch(r"([0-9a-f]{7,40})(\+dirty)?", given)
    if given and not parts:
        advice = "give 7 to 40 hex digits, with +dirty if changed"
        raise UserError(f"DDLKIT_COMMIT is {given!r}: {advice}")
    return parts[1][:12] + (parts[2] or "") if parts else "unknown"


def output(*command: str) -> str:
    """Return what a program prints; "" when it is not there, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def content(path: Path) -> str:
    """Return the text of a file of the kernel; "" when it is not there or refuses."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _slug(text: str) -> str:
    return (
        re.sub(r"[^a-z0-9]+", "-", re.sub(_NOISE, " ", text.lower())).strip("-")
        or "unknown"
    )


def _cpu_model() -> str:
    model = re.search(
        r"^model name\s*:\s*(.+)$", content(Path("/proc/cpuinfo")), re.MULTILINE
    )
    if model:
        return model[1].strip()
    return (
        output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()
    )


def ask_gpus(fields: Sequence[str], *options: str, about: str = "gpu") -> str:
    """Return what nvidia-smi prints of these fields, a line of cells per GPU (or of "compute-apps")."""
    query = f"--query-{about}={','.join(fields)}"
    return output("nvidia-smi", query, "--format=csv,noheader,nounits", *options)


def cells(text: str) -> list[list[str]]:
    """Return the cells of what `ask_gpus` gives, by GPU."""
    return [
        [cell.strip() for cell in line.split(",")] for line in text.splitlines() if line
    ]


def parse_gpus(text: str) -> tuple[dict[str, Any], ...]:
    """Return GPUs from what nvidia-smi prints of name, driver_version, memory.total (in MiB), compute_cap."""
    return tuple(
        {
            "model": model,
            "driver": driver,
            "memory_bytes": int(mib) * 2**20 if mib.isdigit() else 0,
            "compute_capability": capability,
        }
        for model, driver, mib, capability in (
            row for row in cells(text) if len(row) == 4
        )
    )


@functools.cache
def _gpus() -> tuple[dict[str, Any], ...]:
    """Return the GPUs as nvidia-smi lists them."""
    return parse_gpus(
        ask_gpus(("name", "driver_version", "memory.total", "compute_cap"))
    )


def _cuda_and_nccl() -> tuple[str, str]:
    """Return the versions that torch uses, from torch where loaded, else from what lies beside it on disk."""
    torch = sys.modules.get("torch")
    if torch is not None:
        cuda, distributed = torch.version.cuda, torch.distributed
        has_nccl = (
            cuda and distributed.is_available() and distributed.is_nccl_available()
        )
        return cuda or "none", ".".join(
            map(str, torch.cuda.nccl.version())
        ) if has_nccl else "none"
    spec = importlib.util.find_spec("torch")
    text = (
        content(Path(spec.origin).with_name("version.py"))
        if spec and spec.origin
        else ""
    )
    cuda = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    if not cuda:
        return "none", "none"
    return cuda[1], installed(f"nvidia-nccl-cu{cuda[1].partition('.')[0]}")
