"""What hardware and software this is; asks torch only where it is already loaded."""

from __future__ import annotations

import ctypes
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

_PACKAGE = Path(__file__).parent
_GPU_QUERY = ("name", "driver_version", "memory.total", "compute_cap")
_CAPABILITY = (75, 76)  # CUdevice_attribute: major and minor
# Words that every processor of a maker carries; without them names still differ between machines.
_NOISE = r"\((r|tm)\)|@.*|\b(cpu|processor|platinum|gold|silver|bronze|[\w-]+-core)\b"


def describe() -> dict[str, Any]:
    """The machine: name, cpu, memory, operating system, GPUs and links. No host name or address.

    ``cpu.cores`` are those this process may use, ``cpu.quota_cores`` a container's limit on them
    (0: none); ``gpus`` have model, driver, memory_bytes and compute_capability ("" where unknown);
    ``links`` have name, kind (network, infiniband or gpu), bits_per_s (0 where unknown), and
    mtu_bytes or type.
    """
    between_gpus = output("nvidia-smi", "topo", "-m") if len(_gpus()) > 1 else ""
    return {
        "name": name(),
        "cpu": {"model": _cpu_model(), "cores": cores(), "quota_cores": _quota_cores()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": _os_name(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": list(_gpus()),
        "links": [*_network_links(), *_infiniband_links(), *parse_gpu_links(between_gpus)],
    }


def name(device: str = "") -> str:
    """A name for directories: "cpu-2x-intel-xeon-8488c", "nvidia-h200" or "8x-nvidia-h200".

    device : "cpu" for the processor's name, whatever GPUs there are
    """
    gpus = _gpus()
    if gpus and device != "cpu":
        count = f"{len(gpus)}x-" if len(gpus) > 1 else ""
        return count + _slug(gpus[0]["model"])
    return f"cpu-{cores()}x-{_slug(_cpu_model())}"


def versions() -> dict[str, str]:
    """Versions of python, torch, numpy, pandas, cuda and nccl; "none" where absent."""
    cuda, nccl = _cuda_and_nccl()
    packages = {package: installed(package) for package in ("torch", "numpy", "pandas")}
    return {"python": platform.python_version(), **packages, "cuda": cuda, "nccl": nccl}


def installed(package: str) -> str:
    """Version of an installed package; "none" where it is absent.

    >>> installed("no-such-package")
    'none'
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def commit(directory: Path = _PACKAGE) -> str:
    """Commit of the code in ``directory``, 12 digits, "+dirty" when it differs.

    Only the directory itself counts: rows recorded a minute ago do not make the code dirty. Outside git
    it is what DDLKIT_COMMIT in the environment says, "unknown" without that.

    Raises UserError when that is no commit.
    """
    git = ("git", "-C", str(directory))
    head = output(*git, "rev-parse", "--short=12", "HEAD").strip()
    if head:
        return head + ("+dirty" if output(*git, "status", "--porcelain", ".") else "")
    said = os.environ.get("DDLKIT_COMMIT", "")
    found = re.fullmatch(r"([0-9a-f]{7,40})(\+dirty)?", said)
    if said and not found:
        raise UserError(
            f"DDLKIT_COMMIT is {said!r}: give 7 to 40 hex digits, with +dirty if changed"
        )
    return found[1][:12] + (found[2] or "") if found else "unknown"


def output(*command: str) -> str:
    """What a program prints; "" when it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def content(path: Path) -> str:
    """Text of a file of the kernel; "" when it is not there or refuses."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(_NOISE, " ", text.lower())).strip("-") or "unknown"


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", content(Path("/proc/cpuinfo")), re.MULTILINE)
    if found:
        return found[1].strip()
    return output("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota_cores() -> float:
    limit, _, period = content(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    return float(limit) / float(period) if limit.isdigit() else 0.0


def _os_name() -> str:
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', content(Path("/etc/os-release")), re.MULTILINE)
    return found[1] if found else platform.platform()


@functools.cache
def _gpus() -> tuple[dict[str, Any], ...]:
    """GPUs as the driver sees them; those of other makers only where torch is loaded."""
    found = parse_gpus(ask_gpus(_GPU_QUERY)) or _gpus_of_driver()
    torch = sys.modules.get("torch")
    if found or torch is None or not torch.cuda.is_available():
        return found
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(_gpu(p.name, "", p.total_memory, f"{p.major}.{p.minor}") for p in properties)


def _gpus_of_driver() -> tuple[dict[str, Any], ...]:
    """GPUs by CUDA's driver itself, where there is no nvidia-smi; it makes no context on them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    number, model, n_bytes = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return ()
    version = re.search(r"\d+\.[\d.]+", content(Path("/proc/driver/nvidia/version")))
    found = []
    for device in range(number.value):  # which is its handle, too
        driver.cuDeviceGetName(model, len(model), device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(n_bytes), device)
        capability = []
        for attribute in _CAPABILITY:
            driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(str(number.value))
        facts = (version[0] if version else "", n_bytes.value, ".".join(capability))
        found.append(_gpu(model.value.decode(), *facts))
    return tuple(found)


def ask_gpus(fields: Sequence[str], *options: str, about: str = "gpu") -> str:
    """What nvidia-smi prints of these fields, a line of comma-separated cells per GPU; "" without it.

    about : of what: "gpu", or "compute-apps" for a line per process
    """
    return output(*gpu_question(fields, *options, about=about))


def gpu_question(fields: Sequence[str], *options: str, about: str = "gpu") -> list[str]:
    """The command that asks it."""
    return [
        "nvidia-smi",
        f"--query-{about}={','.join(fields)}",
        "--format=csv,noheader,nounits",
        *options,
    ]


def cells(text: str) -> list[list[str]]:
    """The cells of what `ask_gpus` gives, by GPU.

    >>> cells("NVIDIA H200, 143771\\nNVIDIA H200, [N/A]\\n")
    [['NVIDIA H200', '143771'], ['NVIDIA H200', '[N/A]']]
    """
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]


def parse_gpus(text: str) -> tuple[dict[str, Any], ...]:
    """GPUs from what nvidia-smi prints of name, driver_version, memory.total (in MiB), compute_cap.

    >>> parse_gpus("NVIDIA H200, 570.86.15, 143771, 9.0")[0]["memory_bytes"] == 143771 * 2**20
    True
    """
    rows = (row for row in cells(text) if len(row) == len(_GPU_QUERY))
    return tuple(
        _gpu(model, driver, int(mib) * 2**20 if mib.isdigit() else 0, capability)
        for model, driver, mib, capability in rows
    )


def _gpu(*facts: object) -> dict[str, Any]:
    return dict(zip(("model", "driver", "memory_bytes", "compute_capability"), facts, strict=True))


def _network_links() -> list[dict[str, Any]]:
    """Network interfaces that are up and hardware, or stand for it inside a container.

    Bridges and virtual pairs come and go, those of a lab too; they say nothing about the machine.
    """
    links = []
    for path in sorted(Path("/sys/class/net").glob("*")):
        hardware = (path / "device").exists() or path.name.startswith(("eth", "en", "ib"))
        if not hardware or content(path / "operstate") == "down":
            continue
        # Virtual interfaces say -1 or refuse to say.
        said = [content(path / name) for name in ("speed", "mtu")]
        megabits, mtu_bytes = (int(text) if text.isdigit() else 0 for text in said)
        links.append(_link(path.name, "network", megabits * 1e6) | {"mtu_bytes": mtu_bytes})
    return links


def _infiniband_links() -> list[dict[str, Any]]:
    """Ports of InfiniBand and RoCE adapters; the kernel writes "400 Gb/sec (4X NDR)"."""
    links = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", content(port / "rate"))
        bits_per_s = float(rate[1]) * 1e9 if rate else 0.0
        link = _link(f"{port.parent.parent.name}:{port.name}", "infiniband", bits_per_s)
        links.append(link | {"type": content(port / "link_layer")})
    return links


def _link(name: str, kind: str, bits_per_s: float) -> dict[str, Any]:
    return {"name": name, "kind": kind, "bits_per_s": bits_per_s}


def parse_gpu_links(text: str) -> list[dict[str, Any]]:
    """Pairs of GPUs from ``nvidia-smi topo -m``: type is NV<number of NVLinks>, PIX, PHB, NODE or SYS."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return [
        _link(f"{row[0]}-{other[0]}", "gpu", 0.0) | {"type": row[column]}
        for i, row in enumerate(rows)
        for column, other in enumerate(rows, start=1)
        if column > i + 1
    ]


def _cuda_and_nccl() -> tuple[str, str]:
    """Versions that torch uses, from torch where loaded, else from what lies beside it on disk."""
    torch = sys.modules.get("torch")
    if torch is not None:
        cuda, distributed = torch.version.cuda, torch.distributed
        has_nccl = cuda and distributed.is_available() and distributed.is_nccl_available()
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none"
        return cuda or "none", nccl
    spec = importlib.util.find_spec("torch")
    text = content(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""
    found = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    if not found:
        return "none", "none"
    return found[1], installed(f"nvidia-nccl-cu{found[1].partition('.')[0]}")
