"""How the machine fares while it is measured: clocks, temperature, power and load, sampled beside it.

No torch at import: the sampler belongs into a process that does not measure.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from ddlkit import machine
from ddlkit.model.calibration import STOLEN_LIMIT

PERIOD_S = 1.0
PACKAGES = ("torch", "torchvision", "triton", "numpy", "pandas", "scipy", "psutil", "tqdm")
BUSY = 0.1  # an idle GPU's utilisation is 0; somebody who measures or trains is far above this
LOOKS, LOOK_PERIOD_S = 3, 0.4
BUSY_LIMIT = 0.9  # with more of all cores in use, the processor may set the pace, not the link
TRIES = 3  # how often at most in a campaign; the last one stays, and is marked

# What nvidia-smi calls it, what it is called here, and the factor to its unit.
_SAMPLED = (
    ("clocks.sm", "sm_clock_hz", 1e6),
    ("clocks.mem", "memory_clock_hz", 1e6),
    ("temperature.gpu", "temperature_c", 1.0),
    ("power.draw", "power_w", 1.0),
    ("utilization.gpu", "utilisation", 0.01),
    ("memory.used", "memory_used_bytes", 2.0**20),
)
_FACTS = (
    *("name", "driver_version", "vbios_version", "memory.total", "compute_cap", "pstate"),
    *("power.limit", "power.max_limit", "clocks.max.sm", "clocks.max.mem", "clocks.sm"),
    *("clocks.mem", "temperature.gpu", "power.draw", "pcie.link.gen.max", "pcie.link.width.max"),
    *("ecc.mode.current", "mig.mode.current", "persistence_mode", "compute_mode"),
)
_TORCH_FACTS = (
    *("multi_processor_count", "L2_cache_size", "shared_memory_per_multiprocessor"),
    *("shared_memory_per_block_optin", "regs_per_multiprocessor", "warp_size", "total_memory"),
    *("max_threads_per_multi_processor", "clock_rate", "memory_clock_rate", "memory_bus_width"),
)
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "hypervisor")


class Sampler:
    """Samples in a thread from entry to exit, once in ``period_s``; ``gpu``: nvidia-smi is asked too."""

    def __init__(self, *, gpu: bool, period_s: float = PERIOD_S) -> None:
        self._gpu, self._period_s = gpu, period_s
        self._rows: list[tuple[float, str, str, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._start_s = time.monotonic()

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def frame(self) -> pd.DataFrame:
        """Table ``vitals`` of what was sampled so far; no rows before the first sample."""
        return pd.DataFrame(list(self._rows), columns=["time_s", "device", "quantity", "value"])

    def _run(self) -> None:
        psutil.cpu_percent()  # the next call gives the load since this one
        while not self._done.wait(self._period_s):
            now_s = time.monotonic() - self._start_s
            found = host_vitals() + (gpu_vitals() if self._gpu else [])
            self._rows += [(now_s, *sample) for sample in found]


def host_vitals() -> list[tuple[str, str, float]]:
    """(device, quantity, value): load of all cores since the last call (0..1), free memory, clock.

    Virtual machines often hide the clock and temperatures: what is hidden is left out.
    """
    found = [
        ("cpu", "load", psutil.cpu_percent() / 100),
        ("cpu", "available_bytes", float(psutil.virtual_memory().available)),
    ]
    clock = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    if clock is not None and clock.current > 0:
        found.append(("cpu", "clock_hz", clock.current * 1e6))
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    warmest = [reading.current for chip in sensors.values() for reading in chip]
    if warmest:
        found.append(("cpu", "temperature_c", max(warmest)))
    return found


def gpu_vitals() -> list[tuple[str, str, float]]:
    """(device, quantity, value) of every GPU; nothing where nvidia-smi is not there."""
    return parse_vitals(_ask_visible([name for name, _, _ in _SAMPLED]))


def parse_vitals(text: str) -> list[tuple[str, str, float]]:
    """(device, quantity, value) from what nvidia-smi prints; what a GPU does not say is left out."""
    found = []
    for number, cells in enumerate(machine.cells(text)):
        if len(cells) != len(_SAMPLED):
            continue
        for cell, (_, quantity, factor) in zip(cells, _SAMPLED, strict=True):
            with suppress(ValueError):  # "[N/A]" and its like
                found.append((f"gpu{number}", quantity, float(cell) * factor))
    return found


def gpu_in_use() -> str:
    """Which GPU somebody else computes on, in a few words; "" if none. To be asked while we do not.

    A GPU counts as used if it was found busy each of a few times: right after a program's end, or
    after starting up, utilisation may still be above zero for a moment.
    """
    looks = []
    for number in range(LOOKS):
        time.sleep(LOOK_PERIOD_S if number else 0)
        looks.append({device: load for device, what, load in gpu_vitals() if what == "utilisation"})
    for device in looks[0]:
        load = min(look.get(device, 0.0) for look in looks)
        if load >= BUSY:
            return f"{device} is in use by others: utilisation {load:.0%} while we rest"
    return ""


def facts() -> pd.DataFrame:
    """Table ``facts``: what hardware and software this is, beyond what a stamp says.

    No name or number that only one board or host of its kind has.
    """
    import torch

    found = {**_host_facts(), **_torch_facts(torch)}
    rows = [(*key, str(value)) for key, value in found.items()] + _nvidia_facts()
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        known = [name for name in _TORCH_FACTS if getattr(properties, name, None) is not None]
        rows += [(f"gpu{number}", name, str(getattr(properties, name))) for name in known]
    table = pd.DataFrame(rows, columns=["subject", "fact", "value"])
    return table.drop_duplicates(["subject", "fact"])


def _host_facts() -> dict[tuple[str, str], object]:
    found: dict[tuple[str, str], object] = {
        ("cpu", "physical_cores"): psutil.cpu_count(logical=False),
        ("cpu", "logical_cores"): psutil.cpu_count(),
        ("memory", "total_bytes"): psutil.virtual_memory().total,
        ("memory", "available_bytes"): psutil.virtual_memory().available,
    }
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = (machine.content(cache / name) for name in ("type", "level", "size"))
        found["cpu", f"L{level}_{kind.lower()}"] = size
    lines = machine.content(Path("/proc/cpuinfo")).splitlines()
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    found |= {("cpu", flag): "yes" for flag in _CPU_FLAGS if flag in flags}
    return found | {("library", name): machine.installed(name) for name in PACKAGES}


def _torch_facts(torch: Any) -> dict[tuple[str, str], object]:
    found = {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.is_available(),
    }
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {("torch", name): value for name, value in found.items()}


def _nvidia_facts() -> list[tuple[str, str, str]]:
    """One question per fact: nvidia-smi answers nothing at all if it does not know one of several."""
    return [
        (f"gpu{number}", fact, cells[0])
        for fact in _FACTS
        for number, cells in enumerate(machine.cells(_ask_visible([fact])))
        if cells[0] and not cells[0].startswith("[")
    ]


def _ask_visible(fields: list[str]) -> str:
    """What nvidia-smi prints of the GPUs that CUDA may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return machine.ask_gpus(fields, *(("-i", visible) if visible else ()))


# -- the processor -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Shares of all cores' time between two readings. busy : not idle, stolen included.

    A virtual machine's clock goes on while another one has its cores: times then depend on the
    neighbours. Linux counts such moments ("steal"), so a disturbed measurement can be taken again.
    """

    busy: float
    stolen: float

    @property
    def limited(self) -> bool:
        """Whether the processor, not the link, may have set the pace."""
        return self.busy >= BUSY_LIMIT or self.disturbed

    @property
    def disturbed(self) -> bool:
        """Whether the host took more than STOLEN_LIMIT."""
        return self.stolen > STOLEN_LIMIT


def processor_times() -> Any:
    """What `processor_usage` compares; takes some 20 us."""
    return psutil.cpu_times()


def processor_usage(before: Any, after: Any) -> Usage:
    """What happened between two readings.

    The kernel already counts guests in user time; a core that waits for a disk is idle.
    """
    names = [name for name in before._fields if not name.startswith("guest")]
    spent = {name: getattr(after, name) - getattr(before, name) for name in names}
    total_s = sum(spent.values())
    if total_s <= 0:
        return Usage(0.0, 0.0)
    idle_s = spent["idle"] + spent.get("iowait", 0.0)
    return Usage(1.0 - idle_s / total_s, max(0.0, spent.get("steal", 0.0)) / total_s)
