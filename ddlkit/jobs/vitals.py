"""How the machine fares while it is measured: clocks, temperature, power and load, sampled beside it.

An iteration is ``processor_limited`` where, for the rank that fared worst, cores were busy for BUSY_LIMIT of
the time from its first message to its last; or an emulated link was late with LATE_LIMIT of packets; or the
host took more than STOLEN_LIMIT of the cores. It is ``disturbed`` where the host took as much, or others
more than OTHERS_LIMIT: then it is measured again after a pause, up to TRIES times. No torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import psutil
from numpy.typing import NDArray

from ddlkit.core.units import GIB
from ddlkit.model.calibration import OTHERS_LIMIT, STOLEN_LIMIT
from ddlkit.store import machine

LATE_LIMIT = 0.05  # share of packets
BUSY_LIMIT = (
    0.9  # share of all cores' time; of an emulated link's process, of one core's
)
TRIES = 3
RETRY_S = 2.0  # between two tries, in which who disturbs may end
LINK = "DDLKIT_LINK"  # in a rank's environment: the file in which its emulated link says what has crossed

PERIOD_S = 2.0
BUSY = 0.1  # an idle GPU's utilisation is 0; somebody who measures or trains is far above this
COMPANY_BYTES = GIB  # a driver that starts takes less, who measures or trains more
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
Vitals = list[tuple[str, str, float]]
"""(device, quantity, value)"""


# -- cores, and an emulated link ---------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Shares of cores' time, busy and ``stolen`` by other virtual machines; late : of a link's packets.

    user : in anybody's program, which the network's work for a program is not; own : in programs of ours
    """

    busy: float
    stolen: float
    late: float = 0.0
    user: float = 0.0
    own: float = 0.0

    @classmethod
    def of_ranks(cls, everyone: NDArray[np.float64]) -> Usage:
        """Return that of a machine by (ranks, 5) fields: of the rank that fared worst, ``own`` of all."""
        busy, stolen, late, user = everyone[:, :4].max(axis=0).tolist()
        return cls(busy, stolen, late, user, float(everyone[:, 4].sum()))

    @property
    def others(self) -> float:
        """Return the share that other programs took."""
        return max(0.0, self.user - self.own)

    @property
    def limited(self) -> bool:
        """Return whether the processor, not the link, may have set the pace: ``processor_limited``."""
        return (
            self.busy >= BUSY_LIMIT
            or self.late > LATE_LIMIT
            or self.stolen > STOLEN_LIMIT
        )

    @property
    def disturbed(self) -> bool:
        """Return whether the host took more than STOLEN_LIMIT, or other programs more than OTHERS_LIMIT."""
        return self.stolen > STOLEN_LIMIT or self.others > OTHERS_LIMIT


processor_times = psutil.cpu_times  # what `processor_usage` compares; takes some 20 us


def processor_usage(before: Any, after: Any, own_s: float = 0.0) -> Usage:
    """Return what happened between two readings, ``own_s`` of it in our program; guests are in user time."""
    names = [name for name in before._fields if not name.startswith("guest")]
    spent = {name: getattr(after, name) - getattr(before, name) for name in names}
    if (total_s := sum(spent.values())) <= 0:
        return Usage(0.0, 0.0)
    idle_s = sum(spent.get(name, 0.0) for name in ("idle", "iowait"))
    user_s = sum(spent.get(name, 0.0) for name in ("user", "nice"))
    stolen = max(0.0, spent.get("steal", 0.0)) / total_s
    return Usage(1.0 - idle_s / total_s, stolen, 0.0, user_s / total_s, own_s / total_s)


def own_user_s() -> float:
    """Return seconds that this process, in all its threads, has spent in user code."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


class Retries:
    """How often a job may still measure again what others disturbed: not for ever, if they never rest.

    The same on all ranks, if these agree on the usage.
    """

    def __init__(self, most: int = 8) -> None:
        self._left = most

    def again(self, used: Usage) -> bool:
        """Return whether to measure again, after a pause: it was disturbed, and may be."""
        if not used.disturbed or not self._left:
            return False
        self._left -= 1
        time.sleep(RETRY_S)
        return True


class Watch:
    """How the cores, and the emulated link where there is one, fare from now on. Rank 0 watches the link."""

    def __init__(self, rank: int = 0) -> None:
        self._link = os.environ.get(LINK, "") if rank == 0 else ""
        self._crossed, self._begun, self._own_s = (
            self._read(),
            processor_times(),
            own_user_s(),
        )

    def usage(self) -> Usage:
        """Return the usage until now; all packets are late where the link's process had no time to spare."""
        packets, late, seconds, processor_s = self._read() - self._crossed
        own_s = own_user_s() - self._own_s + float(processor_s)
        used = processor_usage(self._begun, processor_times(), own_s)
        if not packets:
            return used
        return replace(
            used, late=1.0 if processor_s >= BUSY_LIMIT * seconds else late / packets
        )

    def _read(self) -> NDArray[np.float64]:
        return np.fromfile(self._link) if self._link else np.zeros(4)


# -- samples -------------------------------------------------------------------------------------


class Sampler:
    """A sampler in a thread from entry to exit, once in ``period_s``; ``gpu``: nvidia-smi is asked, too."""

    def __init__(self, *, gpu: bool, period_s: float = PERIOD_S) -> None:
        self._gpu, self._period_s = gpu, period_s
        self._rows: list[tuple[float, str, str, float]] = []
        self._done, self._start_s = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._done.set()
        self._thread.join()

    def frame(self) -> pd.DataFrame:
        """Return table ``vitals`` of what was sampled so far; no rows before the first sample."""
        return pd.DataFrame(
            list(self._rows), columns=["time_s", "device", "quantity", "value"]
        )

    def _sample(self) -> None:
        psutil.cpu_percent()  # the next call gives the load since this one
        while not self._done.wait(self._period_s):
            available = float(psutil.virtual_memory().available)
            vitals = gpu_vitals() if self._gpu else []
            vitals += [("cpu", "load", psutil.cpu_percent() / 100)]
            vitals += [("cpu", "available_bytes", available)]
            now_s = time.monotonic() - self._start_s
            self._rows.extend((now_s, *sample) for sample in vitals)


def gpu_vitals() -> Vitals:
    """Return the vitals of every GPU that CUDA may see; nothing where nvidia-smi is not there."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = ["-i", visible] if visible else []
    return parse_vitals(machine.ask_gpus(("index", *_SAMPLED), *only))


def parse_vitals(text: str) -> Vitals:
    """Read what nvidia-smi prints of GPUs, by its own numbers."""
    vitals = []
    for index, *cells in machine.cells(text):
        for cell, (quantity, factor) in zip(cells, _SAMPLED.values(), strict=False):
            with contextlib.suppress(ValueError):  # "[N/A]" and its like
                vitals.append((f"gpu{index}", quantity, float(cell) * factor))
    return vitals


def gpu_in_use() -> str:
    """Return which GPU somebody else has used for PATIENCE_S; "" if none. To be called while we do not."""
    give_up = time.monotonic() + PATIENCE_S
    used = _gpus_at_work()
    while used and time.monotonic() < give_up:
        time.sleep(LOOK_PERIOD_S)
        again = _gpus_at_work()
        used = {
            gpu: min(load, again[gpu]) for gpu, load in used.items() if gpu in again
        }
    for gpu, load in used.items():
        return f"{gpu} is in use by others: utilisation {load:.0%} or more for {PATIENCE_S:g} s"
    return ""


def _gpus_at_work() -> dict[str, float]:
    """Return the utilisation of each GPU that is busy and on which somebody has memory."""
    vitals: dict[str, dict[str, float]] = {}
    for gpu, quantity, value in gpu_vitals():
        vitals.setdefault(gpu, {})[quantity] = value
    full = {
        gpu: x
        for gpu, x in vitals.items()
        if x.get("memory_used_bytes", 0.0) > COMPANY_BYTES
    }
    return {
        gpu: x["utilisation"]
        for gpu, x in full.items()
        if x.get("utilisation", 0.0) >= BUSY
    }
