"""The timing loop of the project.

It repeats until the median is known well enough, and keeps every sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from ddlkit.core.errors import UserError
from ddlkit.core.fit import median_interval
from ddlkit.core.units import MIB
from ddlkit.store.files import scratch

FLUSH_BYTES = {"cuda": 256 * MIB, "cpu": 64 * MIB}
"""Bytes by device that are more than its last cache holds."""
HOLD_CYCLES = 6_000_000
"""Cycles of a GPU, about 3 ms, in which the host issues what is to be timed."""
PROGRESS_S = 5.0
"""The least time between two lines of progress of a loop, in seconds."""

Floats = NDArray[np.float64]
Action = Callable[[], object]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Attributes
    ----------
    warmup : int
        Repeats whose times are dropped.
    min_repeats, max_repeats : int
        The fewest and the most repeats whose times are kept.
    max_s : float
        Seconds after which no repeat starts, once there are ``min_repeats``.
    relative_halfwidth : float
        The measurement stops earlier if the half-width of the 95% confidence interval of
        the median is at most this share of the median. Fewer than 6 samples have no such
        interval.

    Raises
    ------
    UserError
        If the numbers contradict each other.
    """

    warmup: int = 2
    min_repeats: int = 5
    max_repeats: int = 100
    max_s: float = 5.0
    relative_halfwidth: float = 0.02

    def __post_init__(self) -> None:
        """Raise UserError if a number is out of range, or NaN.

        Any ``relative_halfwidth`` is allowed, because it can only end a measurement early.
        """
        # Unlike "x < 0", the form "not x >= 0" also refuses NaN.
        if not self.warmup >= 0:
            raise UserError(f"warmup of the budget is {self.warmup}: must be 0 or more")
        if not self.min_repeats >= 1:
            raise UserError(
                f"min_repeats of the budget is {self.min_repeats}: must be 1 or more"
            )
        if not self.max_repeats >= self.min_repeats:
            raise UserError(
                f"max_repeats of the budget is {self.max_repeats}: must be at least "
                f"min_repeats, which is {self.min_repeats}"
            )
        if not self.max_s > 0:
            raise UserError(f"max_s of the budget is {self.max_s}: must be above zero")

    def settled(self, samples: list[float]) -> bool:
        """Return whether the median of samples is known well enough.

        Parameters
        ----------
        samples : list of float
            The samples.

        Returns
        -------
        bool

        Examples
        --------
        >>> Budget().settled([1.0] * 6), Budget().settled([1.0, 2.0] * 3)
        (True, False)
        """
        # The bounds of the 95% confidence interval of the median. With fewer than 6 samples
        # they are minus and plus infinity, which is never narrow enough.
        lower, upper = median_interval(samples)
        halfwidth = (upper - lower) / 2
        return halfwidth <= self.relative_halfwidth * float(np.median(samples))


def _nothing() -> None: ...


def _no_progress(repeats: int, taken_s: float) -> None: ...


def synchronizer(device: torch.device | str) -> Action:
    """Return a function that waits until a device has done all its work.

    Parameters
    ----------
    device : torch.device or str
        The device. The work of a CPU is done as soon as it has been asked for.

    Returns
    -------
    callable
        Takes no arguments.
    """
    if torch.device(device).type == "cuda":
        return functools.partial(torch.cuda.synchronize, device)
    return _nothing


class Marks:
    """Points in time along the work of a device, which goes on without waiting.

    On CUDA, the marks are events in the current stream. On a CPU, they are times of the
    performance counter.

    Parameters
    ----------
    device : torch.device or str
        The device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the point after the work that has been given to the device so far."""
        # A CPU has done all its work by now. A GPU notes the time of the event later, when
        # it has done the work that was issued before.
        if self._device.type == "cpu":
            self._marks.append(perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def reached(self) -> bool:
        """Return whether the device has reached the last mark already, without waiting."""
        if self._device.type == "cpu":
            return True
        return bool(self._marks[-1].query())

    def seconds(self) -> Floats:
        """Return the seconds from the first mark to every mark, shape (marks,).

        This waits until the device has reached the last mark.
        """
        first = self._marks[0]
        if self._device.type == "cpu":
            return np.array(self._marks) - first
        # An event has a time only once the GPU has reached it.
        torch.cuda.synchronize(self._device)
        durations_ms = [first.elapsed_time(event) for event in self._marks]
        return np.array([duration_ms / 1e3 for duration_ms in durations_ms])


def hold(device: torch.device | str) -> None:
    """Let a GPU wait for about 3 ms, so that the host gets ahead of it.

    The GPU then runs what the host has issued in the meantime without gaps. Otherwise it
    would wait for the host between small kernels, and the times of these kernels would be
    those in which Python issues them.

    Parameters
    ----------
    device : torch.device or str
        The device. A CPU does not wait, because its work is done as it is issued.
    """
    if torch.device(device).type == "cuda":
        # `_sleep` returns at once, and occupies the current GPU for a number of cycles.
        with torch.cuda.device(device):
            torch.cuda._sleep(HOLD_CYCLES)


def between_marks(
    action: Action, device: torch.device | str, *, before: Action = _nothing
) -> Callable[[], Marks]:
    """Return a function that runs an action and times it by the device's own clock.

    Parameters
    ----------
    action : callable
        The action, which takes no arguments.
    device : torch.device or str
        The device.
    before : callable, optional
        Called before the first mark, so that its time does not count. By default nothing
        is called.

    Returns
    -------
    callable
        Takes no arguments, runs the action, and returns `Marks` with two marks: the
        beginning and the end of the action.
    """

    def run() -> Marks:
        """Run the action between two marks."""
        marks = Marks(device)
        before()
        marks.mark()
        action()
        marks.mark()
        return marks

    return run


def timed(
    action: Action, device: torch.device | str, *, before: Action = _nothing
) -> Callable[[], Marks]:
    """Return a function that times an action by the device's own clock, after a `hold`.

    The hold lets a GPU wait, so that the host issues the action before the GPU begins it.

    Parameters
    ----------
    action : callable
        The action, which takes no arguments.
    device : torch.device or str
        The device.
    before : callable, optional
        Called after the hold and before the first mark, such as a small all-reduce, after
        which the devices of all ranks begin the action together. By default nothing is
        called.

    Returns
    -------
    callable
        Takes no arguments, holds the device, runs the action, and returns the `Marks` of
        the action's beginning and end.
    """

    def hold_first() -> None:
        """Hold the device before the caller's own preparation."""
        hold(device)
        before()

    return between_marks(action, device, before=hold_first)


class Pace:
    """Says when it is time for a further line of progress.

    The first line is due `PROGRESS_S` after this object was made, and each further line as
    long after the line before it.
    """

    def __init__(self) -> None:
        self._last_s = perf_counter()

    def due(self) -> bool:
        """Return whether a line is due. If so, the time to the next line begins."""
        now_s = perf_counter()
        if now_s - self._last_s < PROGRESS_S:
            return False
        self._last_s = now_s
        return True


def measure_interleaved(
    actions: Mapping[Key, Action],
    budget: Budget,
    *,
    synchronize: Action = _nothing,
    setup: Action = _nothing,
    agree: Callable[[bool], bool] = bool,
    progress: Callable[[int, float], object] = _no_progress,
) -> dict[Key, Floats]:
    """Time several actions in turn, so that drift of the machine affects all alike.

    Each repeat runs every action once.

    Parameters
    ----------
    actions : mapping of callable
        The actions by their names. An action that returns `Marks` is timed from its first
        mark to its last. Any other is timed by the wall clock, between two calls of
        ``synchronize``.
    budget : Budget
        How long to measure. After its fewest repeats, the loop stops when the confidence
        interval of every action's median is narrow, or when the time is up. It never does
        more than the most repeats.
    synchronize : callable, optional
        Waits until the device has done all its work.
    setup : callable, optional
        Called before each repeat of each action, such as a barrier that lets all ranks
        start together. Its time does not count.
    agree : callable, optional
        Takes whether this rank could stop, and returns whether all ranks stop. If the
        actions communicate, all ranks must do equally many repeats, and this argument
        has to be `ddlkit.jobs.rank.agree_all`. By default this process decides alone:
        ``bool`` returns what it is given.
    progress : callable, optional
        Called after each repeat with the number of repeats so far and the seconds that they
        took. These are 0 after a repeat that warms up. The time of the call counts for no
        action.

    Returns
    -------
    dict of ndarray, shape (repeats,)
        Seconds of each repeat by the names of the actions, without warm-up.
    """
    for _ in range(budget.warmup):
        for action in actions.values():
            _time_once(action, setup, synchronize)
        progress(0, 0.0)
    samples: dict[Key, list[float]] = {name: [] for name in actions}
    begun_s = perf_counter()
    # Repeats are counted from 1, so that `repeat` says how many are done.
    for repeat in range(1, budget.max_repeats + 1):
        for name, action in actions.items():
            samples[name].append(_time_once(action, setup, synchronize))
        taken_s = perf_counter() - begun_s
        progress(repeat, taken_s)
        if repeat < budget.min_repeats:
            continue
        could_stop = taken_s >= budget.max_s
        if not could_stop:
            # The intervals are only computed if there is time left.
            could_stop = all(budget.settled(seconds) for seconds in samples.values())
        # All ranks call this after the same repeats, because it may be a collective.
        if agree(could_stop):
            break
    return {name: np.array(seconds) for name, seconds in samples.items()}


def _time_once(action: Action, setup: Action, synchronize: Action) -> float:
    """Run an action once after its setup, and return the seconds of the action alone.

    ``synchronize`` waits until the device has done all its work. An action that returns
    `Marks` is timed by them, and any other by the wall clock.
    """
    setup()
    # Work of the setup that is still under way must not count.
    synchronize()
    start_s = perf_counter()
    result = action()
    # The action is over only when the device has done the work that it issued.
    synchronize()
    taken_s = perf_counter() - start_s
    if isinstance(result, Marks):
        # The time from the first mark to the last one, by the device's own clock.
        return float(result.seconds()[-1])
    return taken_s


def measure(
    action: Action,
    budget: Budget,
    *,
    synchronize: Action = _nothing,
    setup: Action = _nothing,
    agree: Callable[[bool], bool] = bool,
) -> Floats:
    """Time one action.

    Parameters
    ----------
    action : callable
        The action, which takes no arguments. It is timed by its `Marks` if it returns
        such, and else by the wall clock.
    budget : Budget
        How long to measure.
    synchronize : callable, optional
        Waits until the device has done all its work.
    setup : callable, optional
        Called before each repeat. Its time does not count.
    agree : callable, optional
        Takes whether this rank could stop, and returns whether all ranks stop, as in
        `measure_interleaved`. By default this process decides alone.

    Returns
    -------
    ndarray, shape (repeats,)
        Seconds of each repeat, without warm-up.
    """
    samples = measure_interleaved(
        {"action": action}, budget, synchronize=synchronize, setup=setup, agree=agree
    )
    return samples["action"]


def measure_on(
    device: torch.device,
    action: Action,
    budget: Budget,
    *,
    setup: Action = _nothing,
    host_counts: bool = False,
) -> Floats:
    """Time one action by the device's own clock.

    Parameters
    ----------
    device : torch.device
        The device.
    action : callable
        The action, which takes no arguments.
    budget : Budget
        How long to measure. Each rank decides alone when to stop, so for an action that
        communicates the budget must fix the number of repeats.
    setup : callable, optional
        Called before each repeat. Its time does not count.
    host_counts : bool, optional
        Whether time in which the device waits for the host counts, as it does in
        training. By default `hold` lets the device wait before the action, so that it
        need not wait for the host during the action.

    Returns
    -------
    ndarray, shape (repeats,)
        Seconds of each repeat, without warm-up.
    """
    # `between_marks` and `timed` both run the action between two times of the device's own
    # clock. `timed` holds the device before the first of them, so that the device need not wait
    # for the host during the action.
    time_action = between_marks if host_counts else timed
    timed_action = time_action(action, device)
    return measure(timed_action, budget, synchronize=synchronizer(device), setup=setup)


def sleep_until(deadline_s: float) -> float:
    """Sleep until a time of the performance counter.

    Parameters
    ----------
    deadline_s : float
        When to wake up, in seconds of `time.perf_counter`.

    Returns
    -------
    float
        The time on waking, which is not before the deadline.
    """
    now_s = perf_counter()
    while now_s < deadline_s:
        # `sleep` and the performance counter need not share a clock, so a sleep may end
        # a moment before the deadline.
        sleep(deadline_s - now_s)
        now_s = perf_counter()
    return now_s


def sample_rows(labels: Mapping[str, object], seconds: Floats) -> pd.DataFrame:
    """Return the samples of one measurement as a table, a row for each.

    Parameters
    ----------
    labels : mapping
        The values of all other columns by name: one value for all rows, or a value for
        each sample.
    seconds : ndarray, shape (samples,)
        The samples in seconds.

    Returns
    -------
    DataFrame
        The labels, and columns ``sample`` (from 0) and ``seconds``.
    """
    return pd.DataFrame(
        {**labels, "sample": np.arange(len(seconds)), "seconds": seconds}
    )


def rows_by(
    column: str, samples: Mapping[str, Floats], labels: Mapping[str, Any]
) -> pd.DataFrame:
    """Return a table of several measurements, one below the other.

    Parameters
    ----------
    column : str
        The column that holds the names of the measurements.
    samples : mapping of str to ndarray
        Samples in seconds by the names of the measurements, of which there is at least
        one.
    labels : mapping
        The values of all other columns by name.

    Returns
    -------
    DataFrame
        The labels, the column of the names, and columns ``sample`` (from 0 in each
        measurement) and ``seconds``.
    """
    frames = [
        sample_rows({**labels, column: name}, seconds)
        for name, seconds in samples.items()
    ]
    return pd.concat(frames, ignore_index=True)


def chrome_trace(action: Action, device: torch.device | str) -> str:
    """Return the trace that PyTorch's profiler records of an action and of its work.

    Parameters
    ----------
    action : callable
        The action, which takes no arguments.
    device : torch.device or str
        The device that does the work of the action.

    Returns
    -------
    str
        A Chrome trace as JSON, by `torch.profiler`.
    """
    # The host is always traced, because it issues the work of a GPU.
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    wait_for_device = synchronizer(device)
    with profile(activities=activities) as profiler:
        action()
        # The profile would otherwise end before the device has done all the work.
        wait_for_device()
    # The profiler can write the trace to a file only.
    with scratch() as directory:
        path = directory / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_text()
