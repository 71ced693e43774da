"""How the machine fares while it is measured: clocks, temperature, power and load, sampled beside it.

An iteration is ``processor_limited`` where, for the rank that fared worst, cores were busy for BUSY_LIMIT of
the time from its first message to its last; or an emulated link was late with LATE_LIMIT of packets; or
the host took more than STOLEN_LIMIT of the cores: then it is measured again, up to TRIES times. No torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import psutil
from numpy.typing import NDArray

from ddlkit import machine
from ddlkit.core.units import GIB
from ddlkit.model.calibration import STOLEN_LIMIT
from ddlkit.run.jobs import child_environment
from ddlkit.run.jobs.launch import end

LATE_LIMIT = 0.05  # share of packets
BUSY_LIMIT = 0.9  # share of all cores' time; of an emulated link's process, of one core's
TRIES = 3
LINK = "DDLKIT_LINK"  # in a rank's environment: the file in which its emulated link says what has crossed

PERIOD_S = 1.0
BUSY = 0.1  # an idle GPU's utilisation is 0; somebody who measures or trains is far above this
COMPANY_BYTES = GIB  # a driver that starts takes less, somebody who measures or trains more
LOOK_PERIOD_S, PATIENCE_S = 0.4, 10.0

# By nvidia-smi's word: ours, and the factor to its unit.
_SAMPLED = {
    "clocks.sm": ("sm_clock_hz", 1e6),
    "clocks.mem": ("memory_clock_hz", 1e6),
    "temperature.gpu": ("temperature_c", 1.0),
    "power.draw": ("power_w", 1.0),
    "utilization.gpu": ("utilisation", 0.01),
    "memory.used": ("memory_used_bytes", 2.0**20),
}
_FIELDS = ("index", *_SAMPLED)
# Becomes another program that dies with us, whatever we die of.
_BECOME = (
    "import os, sys; from ddlkit.run.jobs import die_with_parent; "
    "die_with_parent(); os.execvp(sys.argv[1], sys.argv[1:])"
)
Vitals = list[tuple[str, str, float]]
"""(device, quantity, value)"""


# -- cores, and an emulated link ---------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Shares of all cores' time between two readings; stolen : in which another virtual machine had them.

    late : share of packets that an emulated link's process carried later than they were due
    """

    busy: float
    stolen: float
    late: float = 0.0

    @property
    def limited(self) -> bool:
        """Return whether the processor, not the link, may have set the pace: ``processor_limited``."""
        return self.busy >= BUSY_LIMIT or self.late > LATE_LIMIT or self.disturbed

    @property
    def disturbed(self) -> bool:
        """Return whether the host took more than STOLEN_LIMIT."""
        return self.stolen > STOLEN_LIMIT


def processor_times() -> Any:
    """Return what `processor_usage` compares; takes some 20 us."""
    return psutil.cpu_times()


def processor_usage(before: Any, after: Any) -> Usage:
    """Return what happened between two readings.

    Guests are in user time already. A core that waits for a disk is idle, or that others use who are nice,
    unless we are nice ourselves.
    """
    names = [name for name in before._fields if not name.startswith("guest")]
    spent = {name: getattr(after, name) - getattr(before, name) for name in names}
    total_s = sum(spent.values())
    if total_s <= 0:
        return Usage(0.0, 0.0)
    ours = ("idle", "iowait") if os.nice(0) > 0 else ("idle", "iowait", "nice")
    idle_s = sum(spent.get(name, 0.0) for name in ours)
    return Usage(1.0 - idle_s / total_s, max(0.0, spent.get("steal", 0.0)) / total_s)


class Watch:
    """How the cores, and the emulated link where there is one, fare from now on. Rank 0 watches the link."""

    def __init__(self, rank: int) -> None:
        self._link = os.environ.get(LINK, "") if rank == 0 else ""
        self._crossed, self._begun = self._read(), processor_times()

    def usage(self) -> Usage:
        """Return the usage until now, as this rank sees it.

        All packets count as late where the link's process had no time to spare: some waited unread.
        """
        used = processor_usage(self._begun, processor_times())
        packets, late, seconds, processor_s = self._read() - self._crossed
        if not packets:
            return used
        return replace(used, late=1.0 if processor_s >= BUSY_LIMIT * seconds else late / packets)

    def _read(self) -> NDArray[np.float64]:
        return np.fromfile(self._link) if self._link else np.zeros(4)


# -- samples -------------------------------------------------------------------------------------


class Sampler:
    """A sampler in threads from entry to exit, once in ``period_s``; ``gpu``: nvidia-smi is heard, too."""

    def __init__(self, *, gpu: bool, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._rows: list[tuple[float, str, str, float]] = []
        self._done = threading.Event()
        self._smi = _resident_smi(period_s) if gpu else contextlib.nullcontext(())
        self._start_s = time.monotonic()

    def __enter__(self) -> Sampler:
        targets = (self._watch_host, ()), (self._hear_gpus, (self._smi.__enter__(),))
        self._threads = [threading.Thread(target=f, args=x, daemon=True) for f, x in targets]
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
        rows = pd.DataFrame(list(self._rows), columns=["time_s", "device", "quantity", "value"])
        return rows.sort_values("time_s", kind="stable", ignore_index=True)

    def _note(self, samples: Vitals) -> None:
        now_s = time.monotonic() - self._start_s
        self._rows.extend((now_s, *sample) for sample in samples)

    def _watch_host(self) -> None:
        psutil.cpu_percent()  # the next call gives the load since this one
        while not self._done.wait(self._period_s):
            available = float(psutil.virtual_memory().available)
            load = psutil.cpu_percent() / 100
            self._note([("cpu", "load", load), ("cpu", "available_bytes", available)])

    def _hear_gpus(self, lines: Iterable[str]) -> None:
        numbers: dict[str, int] = {}
        for line in lines:
            self._note(parse_vitals(line, numbers))


@contextlib.contextmanager
def _resident_smi(period_s: float) -> Iterator[Iterable[str]]:
    """Give the lines of one nvidia-smi that prints `_SAMPLED` of each GPU once in a period; none without it.

    It holds the driver open: else each question starts the driver anew, and an idle GPU looks busy meanwhile.
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


def _visible() -> list[str]:
    """Return nvidia-smi's words for the GPUs that CUDA may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ["-i", visible] if visible else []


def gpu_vitals() -> Vitals:
    """Return the vitals of every GPU that CUDA may see; nothing where nvidia-smi is not there."""
    return parse_vitals(machine.ask_gpus(_FIELDS, *_visible()), {})


def parse_vitals(text: str, numbers: dict[str, int]) -> Vitals:
    """Read what nvidia-smi prints; numbers : from 0, of the GPUs met so far, by their indexes."""
    vitals = []
    for index, *cells in machine.cells(text):
        if len(cells) != len(_SAMPLED):
            continue
        device = f"gpu{numbers.setdefault(index, len(numbers))}"
        for cell, (quantity, factor) in zip(cells, _SAMPLED.values(), strict=True):
            with contextlib.suppress(ValueError):  # "[N/A]" and its like
                vitals.append((device, quantity, float(cell) * factor))
    return vitals


# -- whether a GPU is ours alone -----------------------------------------------------------------


def gpu_in_use() -> str:
    """Return which GPU somebody else computes on, in a few words; "" if none. To be called while we do not.

    Right after a program's end, or while the driver starts, a GPU may look busy: it must for PATIENCE_S.
    """
    give_up = time.monotonic() + PATIENCE_S
    with _resident_smi(PERIOD_S):
        used = _gpus_at_work()
        while used and time.monotonic() < give_up:
            time.sleep(LOOK_PERIOD_S)
            again = _gpus_at_work()
            used = {gpu: min(load, again[gpu]) for gpu, load in used.items() if gpu in again}
    for gpu, load in used.items():
        return f"{gpu} is in use by others: utilisation {load:.0%} or more for {PATIENCE_S:g} s"
    return ""


def _gpus_at_work() -> dict[str, float]:
    """Return the utilisation of each GPU that is busy and on which others have memory or a process."""
    vitals = {(gpu, quantity): value for gpu, quantity, value in gpu_vitals()}
    busy = {gpu: x for (gpu, what), x in vitals.items() if what == "utilisation" and x >= BUSY}
    if not busy:
        return {}
    us = psutil.Process()
    ours = {str(process.pid) for process in (us, *us.parents(), *us.children(recursive=True))}
    uuids = [cells[0] for cells in machine.cells(machine.ask_gpus(["uuid"], *_visible()))]
    pids = machine.ask_gpus(["gpu_uuid", "pid"], *_visible(), about="compute-apps")
    others = {uuid for uuid, *pid in machine.cells(pids) if not ours.issuperset(pid)}
    used = {f"gpu{number}" for number, uuid in enumerate(uuids) if uuid in others}
    used |= {gpu for gpu in busy if vitals.get((gpu, "memory_used_bytes"), 0.0) > COMPANY_BYTES}
    return {gpu: load for gpu, load in busy.items() if gpu in used}
