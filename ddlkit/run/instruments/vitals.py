"""How the machine fares while it is measured: clocks, temperature, power and load, sampled beside it.

No torch at import: the sampler belongs into a process that does not measure.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import psutil

from ddlkit import machine
from ddlkit.core.units import GIB
from ddlkit.run.jobs.launch import end
from ddlkit.run.jobs.protocol import child_environment

PERIOD_S = 1.0
BUSY = 0.1  # an idle GPU's utilisation is 0; somebody who measures or trains is far above this
COMPANY_BYTES = GIB  # a driver that starts takes less, somebody who measures or trains more
LOOK_PERIOD_S, PATIENCE_S = 0.4, 10.0

# What nvidia-smi calls it, what it is called here, and the factor to its unit.
_SAMPLED = (
    ("clocks.sm", "sm_clock_hz", 1e6),
    ("clocks.mem", "memory_clock_hz", 1e6),
    ("temperature.gpu", "temperature_c", 1.0),
    ("power.draw", "power_w", 1.0),
    ("utilization.gpu", "utilisation", 0.01),
    ("memory.used", "memory_used_bytes", 2.0**20),
)
_FIELDS = ("index", *(name for name, _, _ in _SAMPLED))
# Becomes another program that dies with us, whatever we die of.
_BECOME = (
    "import os, sys; from ddlkit.run.jobs.protocol import die_with_parent; "
    "die_with_parent(); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Sampler:
    """A sampler in threads from entry to exit, once in ``period_s``; ``gpu``: nvidia-smi is heard, too."""

    def __init__(self, *, gpu: bool, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._rows: list[tuple[float, str, str, float]] = []
        self._done = threading.Event()
        self._smi = _resident_smi(period_s) if gpu else contextlib.nullcontext(())
        self._start_s = time.monotonic()

    def __enter__(self) -> Sampler:
        lines = self._smi.__enter__()
        self._threads = [
            threading.Thread(target=self._watch_host, daemon=True),
            threading.Thread(target=self._hear_gpus, args=[lines], daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._done.set()
        self._smi.__exit__(*reason)  # what it printed ends here
        for thread in self._threads:
            thread.join()

    def frame(self) -> pd.DataFrame:
        """Return table ``vitals`` of what was sampled so far; no rows before the first sample."""
        rows = sorted(list(self._rows), key=lambda row: row[0])
        return pd.DataFrame(rows, columns=["time_s", "device", "quantity", "value"])

    def _note(self, samples: Iterable[tuple[str, str, float]]) -> None:
        now_s = time.monotonic() - self._start_s
        self._rows.extend((now_s, *sample) for sample in samples)

    def _watch_host(self) -> None:
        psutil.cpu_percent()  # the next call gives the load since this one
        while not self._done.wait(self._period_s):
            self._note(host_vitals())

    def _hear_gpus(self, lines: Iterable[str]) -> None:
        numbers: dict[str, int] = {}
        for line in lines:
            self._note(parse_vitals(line, numbers))


@contextlib.contextmanager
def _resident_smi(period_s: float) -> Iterator[Iterable[str]]:
    """Give the lines of one nvidia-smi that prints `_SAMPLED` of each GPU once in a period; none without it.

    It holds the driver open. Where nobody does (no persistence mode), each question starts the driver
    anew: that takes seconds, in which an idle GPU looks busy. It does not outlive the block, or us.
    """
    question = machine.gpu_question(_FIELDS, "-lms", f"{period_s * 1e3:.0f}", *_visible())
    process = subprocess.Popen(
        [sys.executable, "-c", _BECOME, *question],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout
    try:
        yield map(bytes.decode, process.stdout)
    finally:
        end([process])


def host_vitals() -> list[tuple[str, str, float]]:
    """Return (device, quantity, value): load of all cores since the last call (0..1), free memory, clock.

    Virtual machines often hide the clock and temperatures: what is hidden is left out.
    """
    vitals = [
        ("cpu", "load", psutil.cpu_percent() / 100),
        ("cpu", "available_bytes", float(psutil.virtual_memory().available)),
    ]
    clock = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    if clock is not None and clock.current > 0:
        vitals.append(("cpu", "clock_hz", clock.current * 1e6))
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    warmest = [reading.current for chip in sensors.values() for reading in chip]
    if warmest:
        vitals.append(("cpu", "temperature_c", max(warmest)))
    return vitals


def gpu_vitals() -> list[tuple[str, str, float]]:
    """Return (device, quantity, value) of every GPU; nothing where nvidia-smi is not there."""
    return parse_vitals(_ask_visible(_FIELDS), {})


def parse_vitals(text: str, numbers: dict[str, int]) -> list[tuple[str, str, float]]:
    """Read (device, quantity, value) from what nvidia-smi prints; what a GPU does not say is left out.

    numbers : of the GPUs met so far, by their indexes: those that CUDA sees are counted from 0
    """
    found = []
    for index, *cells in machine.cells(text):
        if len(cells) != len(_SAMPLED):
            continue
        device = f"gpu{numbers.setdefault(index, len(numbers))}"
        for cell, (_, quantity, factor) in zip(cells, _SAMPLED, strict=True):
            with contextlib.suppress(ValueError):  # "[N/A]" and its like
                found.append((device, quantity, float(cell) * factor))
    return found


def gpu_in_use() -> str:
    """Say which GPU somebody else computes on, in a few words; "" if none. To be asked while we do not.

    A GPU is used if it is busy, and somebody has memory or a process on it, at every look in PATIENCE_S:
    right after a program's end, or while the driver starts, utilisation may be high with nobody there.
    """
    give_up = time.monotonic() + PATIENCE_S
    with _resident_smi(PERIOD_S):
        used = _computing_gpus()
        while used and time.monotonic() < give_up:
            time.sleep(LOOK_PERIOD_S)
            again = _computing_gpus()
            used = {gpu: min(load, again[gpu]) for gpu, load in used.items() if gpu in again}
    for gpu, load in used.items():
        return f"{gpu} is in use by others: utilisation {load:.0%} or more for {PATIENCE_S:g} s"
    return ""


def _computing_gpus() -> dict[str, float]:
    """Return the utilisation of each GPU that is busy and on which others have memory or a process."""
    found = {(gpu, quantity): value for gpu, quantity, value in gpu_vitals()}
    busy = {gpu: x for (gpu, what), x in found.items() if what == "utilisation" and x >= BUSY}
    if not busy:
        return {}
    used = {gpu for gpu in busy if found.get((gpu, "memory_used_bytes"), 0.0) > COMPANY_BYTES}
    return {gpu: load for gpu, load in busy.items() if gpu in used | _gpus_with_processes()}


def _gpus_with_processes() -> set[str]:
    """Name GPUs on which a process computes that is neither this one nor of its family."""
    us = psutil.Process()
    ours = {str(one.pid) for one in (us, *us.parents(), *us.children(recursive=True))}
    uuids = [cells[0] for cells in machine.cells(_ask_visible(["uuid"]))]
    running = machine.cells(_ask_visible(["gpu_uuid", "pid"], about="compute-apps"))
    used = {uuid for uuid, *pid in running if not ours.issuperset(pid)}
    return {f"gpu{number}" for number, uuid in enumerate(uuids) if uuid in used}


def _ask_visible(fields: Sequence[str], about: str = "gpu") -> str:
    """Return what nvidia-smi prints of the GPUs that CUDA may see."""
    return machine.ask_gpus(fields, *_visible(), about=about)


def _visible() -> list[str]:
    """Return nvidia-smi's words for the GPUs that CUDA may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ["-i", visible] if visible else []
