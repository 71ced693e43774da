"""The state of the machine while it is measured: load, clocks, temperature and power.

An iteration is ``processor_limited`` if, for the rank that fared worst, one of these
holds:

* The cores were busy for `BUSY_LIMIT` of the time from the rank's first message to its
  last.
* An emulated link was late with more than `LATE_LIMIT` of the packets.
* The host of a virtual machine took more than ``STOLEN_LIMIT`` of the cores.

A measurement is ``disturbed`` if the host took more than ``STOLEN_LIMIT``, or if other
programs took more than ``OTHERS_LIMIT``. It is then repeated after a pause, up to `TRIES`
times.

There is no torch here, because importing torch would disturb what is measured.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import psutil
from numpy.typing import NDArray

from ddlkit.core.units import GIB
from ddlkit.model.calibration import OTHERS_LIMIT, STOLEN_LIMIT
from ddlkit.store import machine

LATE_LIMIT = 0.05
"""A share of packets."""
BUSY_LIMIT = 0.9
"""A share of the time of all cores; of one core, for an emulated link's process."""
TRIES = 3
"""How many times a recording makes one measurement at most, if others disturb it."""
RETRY_S = 2.0
"""Seconds between two tries, in which others may end what disturbs."""
RETRIES = 8
"""How often a job repeats a measurement at most, if others disturb it."""
LINK = "DDLKIT_LINK"
"""In a rank's environment: the file in which its emulated link counts packets."""

PERIOD_S = 2.0
"""Seconds between two samples."""
LEAST_UTILISATION_IN_USE = 0.1
"""The least utilisation of a GPU that counts as in use. An idle GPU has 0, and one in
training has far more."""
LEAST_BYTES_IN_USE = GIB
"""A GPU counts as in use only if more than this much of its memory is used. A driver
that starts takes less, and training takes more."""
LOOK_PERIOD_S = 0.4
"""Seconds between two samples of a GPU, to tell whether it is in use."""
PATIENCE_S = 10.0
"""Seconds for which every sample must show a GPU busy for it to count as in use."""

# What is asked of nvidia-smi, by its names. For each quantity: the name in tables, and the
# factor from nvidia-smi's unit to that of the table.
_SAMPLED = {
    "clocks.sm": ("sm_clock_hz", 1e6),
    "clocks.mem": ("memory_clock_hz", 1e6),
    "temperature.gpu": ("temperature_c", 1.0),
    "power.draw": ("power_w", 1.0),
    "utilization.gpu": ("utilisation", 0.01),
    "memory.used": ("memory_used_bytes", 2.0**20),
}
_THROTTLE_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""What nvidia-smi calls the reasons for which a driver lowers the clocks of a GPU. Drivers
from 535 on have the first name, and older ones the second."""
_THROTTLE_REASONS = "throttle_reasons"
"""The name of these reasons in tables. The value is the number that nvidia-smi prints, in
which each reason has a bit, such as 1 for an idle GPU and 4 for the limit of power."""
Vitals = list[tuple[str, str, float]]
"""Samples, each with its device, its quantity and its value."""


# -- cores, and an emulated link -------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """How the cores and an emulated link were used between two readings.

    Attributes
    ----------
    busy : float
        The share of the time of all cores in which they did anything.
    stolen : float
        The share of the time of all cores that other virtual machines of the host took.
    late : float
        The share of packets that an emulated link carried later than they were due.
    user : float
        The share of the time of all cores that all programs spent in user code. What the
        kernel does for a program's messages is not in it.
    own : float
        The share of the time of all cores that programs of this library spent in user
        code.
    """

    busy: float
    stolen: float
    late: float = 0.0
    user: float = 0.0
    own: float = 0.0

    @classmethod
    def of_ranks(cls, everyone: NDArray[np.float64]) -> Usage:
        """Return the usage of a machine from what each of its ranks saw.

        Parameters
        ----------
        everyone : ndarray, shape (ranks, 5)
            The fields of each rank's usage, a row for each rank.

        Returns
        -------
        Usage
            The largest value over the ranks of each field but ``own``, and the sum over
            the ranks of ``own``.
        """
        # The columns are in the order of the fields. `busy`, `stolen` and `user` are of all
        # cores of the machine, so each rank sees nearly the same values, and the largest
        # counts. `late` is of the link, which rank 0 alone watches. The other ranks have 0
        # there, so the largest value is that of rank 0.
        busy, stolen, late, user = everyone[:, :4].max(axis=0).tolist()
        # Each rank sees only the user code of its own programs, so `own` is summed.
        own = everyone[:, 4]
        return cls(busy=busy, stolen=stolen, late=late, user=user, own=float(own.sum()))

    @property
    def others(self) -> float:
        """Return the share that other programs spent in user code."""
        return max(0.0, self.user - self.own)

    @property
    def limited(self) -> bool:
        """Return whether the processor, not the link, may have set the pace."""
        return (
            self.busy >= BUSY_LIMIT
            or self.late > LATE_LIMIT
            or self.stolen > STOLEN_LIMIT
        )

    @property
    def disturbed(self) -> bool:
        """Return whether the host or other programs took more than their limits."""
        return self.stolen > STOLEN_LIMIT or self.others > OTHERS_LIMIT


processor_times = psutil.cpu_times
"""Returns a reading for `processor_usage`. It takes some 20 microseconds."""


def processor_usage(before: Any, after: Any, own_s: float = 0.0) -> Usage:
    """Return the usage of all cores between two readings.

    Parameters
    ----------
    before, after : psutil.scputimes
        Readings of `processor_times`.
    own_s : float, optional
        Seconds that this library's programs spent in user code between the readings,
        summed over the cores.

    Returns
    -------
    Usage
        The usage, without that of a link. All shares are 0 if no time has passed.
    """
    # On Linux, the time of guests is also in the user time, so it would count twice.
    names = [name for name in before._fields if not name.startswith("guest")]
    # For each state of a core, such as "user", the seconds in it, summed over the cores.
    spent_s = {name: getattr(after, name) - getattr(before, name) for name in names}
    total_s = sum(spent_s.values())
    if total_s <= 0:
        return Usage(busy=0.0, stolen=0.0)
    # The operating system decides which states there are, so a missing one counts as 0.
    # A core that waits for a disk ("iowait") is idle, too.
    idle_s = sum(spent_s.get(name, 0.0) for name in ("idle", "iowait"))
    # "nice" is user code of low priority.
    user_s = sum(spent_s.get(name, 0.0) for name in ("user", "nice"))
    # The kernel's count of stolen time sometimes goes back a little.
    stolen_s = max(0.0, spent_s.get("steal", 0.0))
    return Usage(
        busy=1.0 - idle_s / total_s,
        stolen=stolen_s / total_s,
        user=user_s / total_s,
        own=own_s / total_s,
    )


def own_user_s() -> float:
    """Return the seconds that all threads of this process have spent in user code."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


class Retries:
    """How often a job may still repeat a measurement that was disturbed.

    The number is limited, because disturbances may never end. Each measurement has its own
    `Retries`, so that the numbers which are printed count within it. All ranks decide alike
    if they pass the same usage.

    Parameters
    ----------
    most : int, optional
        How often the job may repeat. By default this is `RETRIES`.
    say : callable, optional
        Prints a line of progress. Each repeat is said, because it takes time.
    """

    def __init__(
        self, most: int | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self._most = RETRIES if most is None else most
        self._left = self._most
        self._say = say
        self._has_said_kept = False

    @classmethod
    def on(cls, device: str, say: Callable[[str], None] | None = None) -> Retries:
        """Return the `Retries` of a job that measures a device.

        On a GPU nothing is repeated, for two reasons. What others do on the cores hardly
        changes how long kernels take. And the host of a virtual machine may take much time
        of the cores all along, so that every measurement would be repeated several times.
        A job records how the cores were used all the same.

        Parameters
        ----------
        device : str
            The type of the device, ``"cpu"`` or ``"cuda"``.
        say : callable, optional
            Prints a line of progress.

        Returns
        -------
        Retries
        """
        return cls(most=0 if device == "cuda" else RETRIES, say=say)

    def again(self, used: Usage) -> bool:
        """Return whether to repeat a measurement, and pause before returning True.

        In the pause, others may end what disturbs. Each True lowers the number of repeats
        that are left.

        Parameters
        ----------
        used : Usage
            The usage during the measurement.

        Returns
        -------
        bool
            True if the measurement was disturbed and the job may repeat.
        """
        if not used.disturbed:
            return False
        if not self._left:
            self._say_kept(used)
            return False
        self._left -= 1
        if self._say:
            self._say_repeat(used)
        time.sleep(RETRY_S)
        return True

    def _say_repeat(self, used: Usage) -> None:
        """Print who disturbed, and the number of the repeat that comes next."""
        assert self._say
        repeat = self._most - self._left
        if repeat == 1:
            self._say(
                f"{_who_disturbed(used)}, so that what was just measured is repeated, even beyond "
                f"a time limit (repeat 1 of at most {self._most} in this measurement)"
            )
        else:
            # The first line has said what a repeat is. The others are many, so they are short.
            self._say(f"disturbed again: repeat {repeat} of at most {self._most}")

    def _say_kept(self, used: Usage) -> None:
        """Print, once, that what was disturbed is kept, because no repeat is left."""
        # A job that repeats nothing, as on a GPU, has no repeats that could be used up.
        if self._say and self._most and not self._has_said_kept:
            self._say(
                f"{_who_disturbed(used)}, but all {self._most} repeats of this measurement are "
                "used: the rest of it is kept, also if it is disturbed"
            )
            self._has_said_kept = True


def _who_disturbed(used: Usage) -> str:
    """Return in words who took how much of the time of all cores, other than the job."""
    # The host of a virtual machine can take time of the cores as well.
    others = "other processes"
    share = used.others
    if used.stolen > used.others:
        others = "the host of this virtual machine"
        share = used.stolen
    return f"{others} took {share:.0%} of the time of all cores"


class Watch:
    """A watch over the cores and the emulated link, which starts when it is created.

    Parameters
    ----------
    rank : int, optional
        The rank of this process. Only rank 0 watches the link.
    """

    def __init__(self, rank: int = 0) -> None:
        # The file in which the process of the emulated link counts, or "" if this rank
        # watches no link.
        self._link = os.environ.get(LINK, "") if rank == 0 else ""
        self._counts_before = self._counts_of_link()
        self._times_before = processor_times()
        self._own_before_s = own_user_s()

    def usage(self) -> Usage:
        """Return how busy the cores and the link were since the watch was created."""
        counts = self._counts_of_link() - self._counts_before
        # Since the watch was created: packets, how many of them were late, seconds that
        # have passed, and seconds for which the link's process used a core.
        packets, late_packets, seconds, processor_s = counts
        # Time of this library's programs, which `processor_usage` tells from that of others.
        # The process of the link is one of these programs.
        own_s = own_user_s() - self._own_before_s + float(processor_s)
        used = processor_usage(self._times_before, processor_times(), own_s)
        # Without a link or without packets, the share of late packets stays 0.
        if not packets:
            return used
        late_share = late_packets / packets
        if processor_s >= BUSY_LIMIT * seconds:
            # The link's process used nearly all of a core, so packets waited until it read
            # them. It does not know how many of them were late, so all count as late.
            late_share = 1.0
        return replace(used, late=late_share)

    def _counts_of_link(self) -> NDArray[np.float64]:
        """Return what the process of the link has counted since it started, shape (4,).

        The counts are packets, late packets, seconds that have passed, and seconds for
        which the process used a core. All are 0 if no link is watched.
        """
        if self._link:
            # The file has the four numbers as float64, which is the default of `fromfile`.
            return np.fromfile(self._link)
        return np.zeros(4)


# -- samples ---------------------------------------------------------------------------


class Sampler:
    """Threads that sample vitals within a ``with`` block.

    Parameters
    ----------
    gpu : bool
        Whether nvidia-smi is asked, too. A single process of it reports for the whole
        block, because starting one takes a good part of a second of a core.
    period_s : float, optional
        Seconds between two samples.
    """

    def __init__(self, *, gpu: bool, period_s: float = PERIOD_S) -> None:
        self._gpu = gpu
        self._period_s = period_s
        self._rows: list[tuple[float, str, str, float]] = []
        self._start_s = time.monotonic()
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._sample, daemon=True)]
        self._reporter: subprocess.Popen[str] | None = None

    def __enter__(self) -> Sampler:
        """Start the threads, and nvidia-smi if GPUs are sampled."""
        if self._gpu:
            # Without nvidia-smi there are no samples of GPUs.
            # With it, a second thread reads what it prints.
            with contextlib.suppress(OSError):
                self._reporter = _start_reporter(self._period_s)
                self._threads.append(threading.Thread(target=self._read, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *reason: Any) -> None:
        """End the threads and nvidia-smi, and wait until all have ended."""
        self._done.set()
        if self._reporter:
            # The end of nvidia-smi also ends the thread that reads its output.
            self._reporter.kill()
            self._reporter.wait()
        for thread in self._threads:
            thread.join()
        # The thread that reads this output has ended by now.
        if self._reporter and self._reporter.stdout:
            self._reporter.stdout.close()

    def frame(self) -> pd.DataFrame:
        """Return the samples so far as a table ``vitals``, in the order of their times.

        The columns are ``time_s`` (seconds since this sampler was made), ``device``,
        ``quantity`` and ``value``.
        """
        columns = ["time_s", "device", "quantity", "value"]
        # The list is copied, because the threads may add to it meanwhile. Two threads may
        # also add samples in another order than that of their times.
        frame = pd.DataFrame(list(self._rows), columns=columns)
        return frame.sort_values("time_s", kind="stable", ignore_index=True)

    def _sample(self) -> None:
        """Sample the processor and its memory once in every period, until the block ends."""
        before = processor_times()
        # `wait` returns True as soon as the block ends, and False after a period.
        while not self._done.wait(self._period_s):
            available = float(psutil.virtual_memory().available)
            now = processor_times()
            used = processor_usage(before, now)
            before = now
            self._add("cpu", "load", used.busy)
            # Time of cores that the host gave to other virtual machines disturbs what is
            # measured.
            self._add("cpu", "stolen", used.stolen)
            self._add("cpu", "available_bytes", available)

    def _read(self) -> None:
        """Keep the samples that nvidia-smi prints, until it ends."""
        assert self._reporter and self._reporter.stdout
        for line in self._reporter.stdout:
            for device, quantity, value in parse_vitals(line):
                self._add(device, quantity, value)

    def _add(self, device: str, quantity: str, value: float) -> None:
        """Keep a sample with its time, in seconds since this sampler was made."""
        now_s = time.monotonic() - self._start_s
        self._rows.append((now_s, device, quantity, value))


def _start_reporter(period_s: float) -> subprocess.Popen[str]:
    """Start nvidia-smi, which prints a sample of each visible GPU in every period.

    If this process is killed, nvidia-smi ends when it prints the next line, because
    nobody reads its output any more.
    """
    # A short period must not be rounded to 0.
    period_ms = max(1, round(1e3 * period_s))
    # The keys of `_SAMPLED` are nvidia-smi's names of the quantities. `parse_vitals` relies
    # on this order of the fields.
    fields = ["index", *_SAMPLED, *_known_throttle_field()]
    # `gpu_question` only makes the command. The option lets nvidia-smi print again and
    # again.
    command = machine.gpu_question(
        fields, f"--loop-ms={period_ms}", *_options_of_visible_gpus()
    )
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _known_throttle_field() -> list[str]:
    """Return the one of `_THROTTLE_FIELDS` that the driver knows, in a list, or [].

    nvidia-smi answers no question that has a field which the driver does not know.
    """
    for field in _THROTTLE_FIELDS:
        # The answer is "" if the driver does not know the field.
        if machine.ask_gpus([field]):
            return [field]
    return []


def _options_of_visible_gpus() -> list[str]:
    """Return the options by which nvidia-smi reports only of GPUs that CUDA may see."""
    # nvidia-smi itself does not read this variable.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ["-i", visible] if visible else []


def gpu_vitals() -> Vitals:
    """Return a sample of every GPU that CUDA may see.

    Returns
    -------
    list of (str, str, float)
        Device (such as "gpu0"), quantity and value, with the names and units of tables.
        The list is empty without nvidia-smi.
    """
    printed = machine.ask_gpus(("index", *_SAMPLED), *_options_of_visible_gpus())
    return parse_vitals(printed)


def parse_vitals(text: str) -> Vitals:
    """Read what nvidia-smi prints about GPUs.

    Parameters
    ----------
    text : str
        A line per GPU: its index, the quantities, and the reasons for which its clocks
        are lowered if these were asked for, separated by commas.

    Returns
    -------
    list of (str, str, float)
        Device, quantity and value. A device such as "gpu0" has the number that nvidia-smi
        gives it. Quantities have the names and units of tables. A quantity for which
        nvidia-smi prints no number is left out.
    """
    vitals = []
    # The name of each quantity in tables, and the factor from nvidia-smi's unit. The
    # reasons are a bit mask, which has no unit.
    quantities = [*_SAMPLED.values(), (_THROTTLE_REASONS, 1.0)]
    # For each line its cells, of which the first one is the index of the GPU.
    for index, *cells in machine.cells(text):
        # The other cells are in the order of the quantities. `strict=False`: a line has
        # no reasons if these were not asked for, or may be cut short.
        for cell, (quantity, factor) in zip(cells, quantities, strict=False):
            # nvidia-smi prints "[N/A]" and the like for what a GPU does not report.
            with contextlib.suppress(ValueError):
                vitals.append((f"gpu{index}", quantity, _number(cell) * factor))
    return vitals


def _number(cell: str) -> float:
    """Return the number in a cell of nvidia-smi, which has bits as in "0x0000000004"."""
    if cell.startswith("0x"):
        return float(int(cell, base=16))
    return float(cell)


def gpu_in_use() -> str:
    """Return in words which GPU other programs use, or "" if they use none.

    This may be called only while this process uses no GPU, because its own work would
    count, too. A GPU may still seem busy right after the end of a program. Therefore each
    GPU is sampled again and again during `PATIENCE_S`, and counts as in use only if every
    sample shows it busy. If none is busy any more, the function returns at once.

    Returns
    -------
    str
        A sentence about one GPU, or an empty string.
    """
    give_up_s = time.monotonic() + PATIENCE_S
    # The lowest utilisation so far of each GPU that was busy in every sample. A GPU that
    # has paused once is left out.
    lowest_utilisations = _gpus_at_work()
    # The loop ends early when no such GPU is left.
    while lowest_utilisations and time.monotonic() < give_up_s:
        time.sleep(LOOK_PERIOD_S)
        at_work = _gpus_at_work()
        lowest_utilisations = {
            gpu: min(utilisation, at_work[gpu])
            for gpu, utilisation in lowest_utilisations.items()
            if gpu in at_work
        }
    if not lowest_utilisations:
        return ""
    # One GPU is enough for a message.
    gpu, utilisation = next(iter(lowest_utilisations.items()))
    duration = f"{utilisation:.0%} or more for {PATIENCE_S:g} s"
    return f"{gpu} is in use by others: utilisation {duration}"


def _gpus_at_work() -> dict[str, float]:
    """Return the utilisation, from 0 to 1, of each GPU that counts as in use just now.

    The keys are names such as "gpu0". A GPU counts only if it computes and if much of its
    memory is used.
    """
    # The samples of `gpu_vitals` by GPU and quantity.
    quantities_of_gpu: dict[str, dict[str, float]] = {}
    for gpu, quantity, value in gpu_vitals():
        quantities_of_gpu.setdefault(gpu, {})[quantity] = value
    at_work = {}
    for gpu, quantities in quantities_of_gpu.items():
        # A GPU that does not report a quantity does not count as in use.
        utilisation = quantities.get("utilisation", 0.0)
        computes = utilisation >= LEAST_UTILISATION_IN_USE
        # A driver that starts uses less memory than this, and training uses more.
        holds_memory = quantities.get("memory_used_bytes", 0.0) > LEAST_BYTES_IN_USE
        if computes and holds_memory:
            at_work[gpu] = utilisation
    return at_work
