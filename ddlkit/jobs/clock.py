"""The only timing loop of the project: repeat until the median is known well enough, keep every sample."""

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

FLUSH_BYTES = {"cuda": 256 * MIB, "cpu": 64 * MIB}  # more than the last cache holds

Floats = NDArray[np.float64]
Action = Callable[[], object]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Budget:
    """How long to measure. Raises UserError for numbers that contradict each other.

    warmup : repeats whose times are dropped; after max_s none starts, once there are ``min_repeats``
    relative_halfwidth : stop once half the 95% interval of the median, of 6 or more samples, is this share
    """

    warmup: int = 2
    min_repeats: int = 5
    max_repeats: int = 100
    max_s: float = 5.0
    relative_halfwidth: float = 0.02

    def __post_init__(self) -> None:
        repeats = self.warmup >= 0 and 1 <= self.min_repeats <= self.max_repeats
        if not (repeats and self.max_s > 0):
            needed = "warm-up >= 0, 1 <= fewest <= most repeats, and a time above zero"
            raise UserError(f"budget {self}: needs {needed}")

    def settled(self, samples: list[float]) -> bool:
        """Return whether the median of these is known well enough."""
        low, high = median_interval(samples)
        return (high - low) / 2 <= self.relative_halfwidth * float(np.median(samples))


def _nothing() -> None: ...


def synchronizer(device: torch.device | str) -> Action:
    """Return what to call so that all work given to ``device`` is done, as a CPU's is at once."""
    on_gpu = torch.device(device).type == "cuda"
    return functools.partial(torch.cuda.synchronize, device) if on_gpu else _nothing


class Marks:
    """Points in time along the work of a device, taken without making it wait: on CUDA, events."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the point that the device's work has reached."""
        if self._device.type == "cpu":
            self._marks.append(perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> Floats:
        """Return the time of every mark, counted from the first one, once the device is there."""
        first, *_ = self._marks
        if self._device.type == "cpu":
            return np.array(self._marks) - first
        torch.cuda.synchronize(self._device)
        return np.array([first.elapsed_time(event) / 1e3 for event in self._marks])


def timed(action: Action, device: torch.device | str) -> Callable[[], Marks]:
    """Return ``action`` as one that is timed by the device's own clock."""

    def run() -> Marks:
        marks = Marks(device)
        marks.mark()
        action()
        marks.mark()
        return marks

    return run


def measure_interleaved(
    actions: Mapping[Key, Action],
    budget: Budget,
    *,
    synchronize: Action = _nothing,
    setup: Action = _nothing,
    agree: Callable[[bool], bool] = bool,
) -> dict[Key, Floats]:
    """Return raw seconds of several actions, timed in turn, so that drift of the machine meets all alike.

    An action that returns Marks is timed by these, any other by the wall clock, started and stopped after
    ``synchronize``. ``setup`` runs untimed before each repeat, warm-up included. Stops when every action's
    interval is narrow, or the budget ends; ``agree`` makes of that wish the decision of all ranks.
    """

    def sample(action: Action) -> float:
        setup()
        synchronize()
        start_s = perf_counter()
        result = action()
        synchronize()
        taken_s = perf_counter() - start_s
        return float(result.seconds()[-1]) if isinstance(result, Marks) else taken_s

    for _ in range(budget.warmup):
        for action in actions.values():
            sample(action)
    samples: dict[Key, list[float]] = {name: [] for name in actions}
    begun_s = perf_counter()
    for repeat in range(1, budget.max_repeats + 1):
        for name, action in actions.items():
            samples[name].append(sample(action))
        if repeat < budget.min_repeats:
            continue
        late = perf_counter() - begun_s >= budget.max_s
        if agree(late or all(budget.settled(seconds) for seconds in samples.values())):
            break
    return {name: np.array(seconds) for name, seconds in samples.items()}


def measure(
    action: Action,
    budget: Budget,
    *,
    synchronize: Action = _nothing,
    setup: Action = _nothing,
    agree: Callable[[bool], bool] = bool,
) -> Floats:
    """Return raw seconds of one action, one per repeat; all else as of `measure_interleaved`."""
    samples = measure_interleaved(
        {"": action}, budget, synchronize=synchronize, setup=setup, agree=agree
    )
    return samples[""]


def measure_on(
    device: torch.device, action: Action, budget: Budget, *, setup: Action = _nothing
) -> Floats:
    """Return raw seconds of one action by the device's own clock; ``setup`` runs untimed before each."""
    return measure(
        timed(action, device), budget, synchronize=synchronizer(device), setup=setup
    )


def sleep_until(deadline_s: float) -> float:
    """Sleep to an absolute time of the performance counter; returns the time on waking."""
    while (rest_s := deadline_s - perf_counter()) > 0:
        sleep(rest_s)
    return perf_counter()


def sample_rows(labels: Mapping[str, object], seconds: Floats) -> pd.DataFrame:
    """Return one row per sample: the labels (each one value, or one per sample), sample, seconds."""
    return pd.DataFrame(
        {**labels, "sample": np.arange(len(seconds)), "seconds": seconds}
    )


def rows_by(
    column: str, samples: Mapping[str, Floats], labels: Mapping[str, Any]
) -> pd.DataFrame:
    """Return `sample_rows` of several measurements, one below the other; ``column`` holds their names."""
    frames = [
        sample_rows({**labels, column: name}, seconds)
        for name, seconds in samples.items()
    ]
    return pd.concat(frames, ignore_index=True)


def chrome_trace(action: Action, device: torch.device | str) -> str:
    """Return what `torch.profiler` sees of ``action`` until its work is done: a Chrome trace, as JSON."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    on_gpu = torch.device(device).type == "cuda"
    with profile(activities=activities[: 1 + on_gpu]) as profiler:
        action()
        synchronizer(device)()
    with scratch() as directory:
        path = directory / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_text()
