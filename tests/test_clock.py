"""The clock: when it stops, what it times and what it leaves out, and what its interval promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from ddlkit.core.errors import UserError
from ddlkit.core.fit import median_interval
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget, Marks, measure, measure_interleaved, timed

ENDLESS = 1e9


class Simulated:
    """A clock that only actions advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: Iterator[float]) -> Callable[[], None]:
        """An action that takes the next of these times at every call."""

        def action() -> None:
            self.now += next(seconds)

        return action


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    fake = Simulated()
    monkeypatch.setattr(clock, "perf_counter", fake)
    return fake


@given(st.integers(9, 400), st.sampled_from([0.4, 0.5, 0.95, 0.97, 0.995]))
def test_interval_covers_the_median_as_often_as_asked(n: int, level: float) -> None:
    low, high = median_interval(np.arange(1.0, n + 1), level)
    assert low + high == n + 1
    # The interval misses when fewer than `low` of n samples fall on one side: a coin each.
    assert 1 - 2 * binom.cdf(low - 1, n, 0.5) >= level > 1 - 2 * binom.cdf(low, n, 0.5)


@pytest.mark.parametrize("share", [0.3, 0.03])
def test_stops_with_the_first_interval_narrow_enough(
    simulated: Simulated, share: float
) -> None:
    times = np.random.default_rng(0).uniform(0.9, 1.3, 5000)
    budget = Budget(warmup=0, max_repeats=5000, max_s=ENDLESS, relative_halfwidth=share)
    kept = measure(simulated.taking(iter(times)), budget)

    def narrow(samples: np.ndarray) -> bool:
        low, high = median_interval(samples)
        return (high - low) / 2 <= share * float(np.median(samples))

    assert [
        n for n in range(budget.min_repeats, len(kept) + 1) if narrow(kept[:n])
    ] == [len(kept)]


def test_time_ends_the_budget_but_not_before_the_fewest_repeats(
    simulated: Simulated,
) -> None:
    slow = simulated.taking(repeat(10.0))
    assert len(measure(slow, Budget(min_repeats=3, max_s=1.0))) == 3
    restless = simulated.taking(cycle([1.0, 2.0]))
    assert len(measure(restless, Budget(warmup=0, min_repeats=3, max_s=15.0))) == 10


def test_warm_up_is_dropped_and_steady_times_stop_at_once(simulated: Simulated) -> None:
    times = chain([100.0, 50.0], repeat(0.5))
    budget = Budget(warmup=2, min_repeats=1, max_s=ENDLESS)
    assert measure(simulated.taking(times), budget).tolist() == [0.5] * 6


def test_device_is_awaited_inside_and_setup_outside_the_time(
    simulated: Simulated,
) -> None:
    pending = 0.0

    def give_work() -> None:
        nonlocal pending
        pending += 1.0

    def wait() -> None:
        nonlocal pending
        simulated.now, pending = simulated.now + pending, 0.0

    def prepare() -> None:
        give_work()  # must be done before the clock starts
        simulated.now += 7.0

    samples = measure(give_work, Budget(max_s=ENDLESS), synchronize=wait, setup=prepare)
    assert set(samples) == {1.0}


def test_actions_take_turns_and_one_restless_keeps_all_running(
    simulated: Simulated,
) -> None:
    calls: list[str] = []
    actions = {name: lambda name=name: calls.append(name) for name in "abc"}
    measure_interleaved(actions, Budget(warmup=1, min_repeats=4, max_repeats=4))
    assert "".join(calls) == "abc" * 5
    two = {
        "steady": simulated.taking(repeat(1.0)),
        "restless": simulated.taking(cycle([1, 2])),
    }
    samples = measure_interleaved(two, Budget(max_repeats=30, max_s=ENDLESS))
    assert len(samples["steady"]) == len(samples["restless"]) == 30


def test_ranks_decide_together(simulated: Simulated) -> None:
    wishes: list[bool] = []

    def until_the_tenth(done: bool) -> bool:
        wishes.append(done)
        return len(wishes) == 10

    action = simulated.taking(repeat(1.0))
    samples = measure(
        action, Budget(min_repeats=5, max_s=ENDLESS), agree=until_the_tenth
    )
    assert len(samples) == 14  # asked from the fifth repeat on, at every one
    assert wishes == [False] + [True] * 9  # five samples have no interval


def test_progress_counts_the_repeats_after_the_warm_up(simulated: Simulated) -> None:
    heard: list[tuple[int, float]] = []
    measure_interleaved(
        {"action": simulated.taking(repeat(2.0))},
        Budget(warmup=2, min_repeats=3, max_repeats=3),
        progress=lambda repeats, taken_s: heard.append((repeats, taken_s)),
    )
    assert heard == [(0, 0.0), (0, 0.0), (1, 2.0), (2, 4.0), (3, 6.0)]


def test_an_action_that_returns_marks_is_timed_by_them(simulated: Simulated) -> None:
    def action() -> Marks:
        simulated.now += 0.03  # what the host does before and after does not count
        marks = timed(simulated.taking(repeat(0.005)), "cpu")()
        simulated.now += 0.03
        return marks

    samples = measure(action, Budget(warmup=0, min_repeats=3, max_repeats=3))
    assert samples == pytest.approx(np.full(3, 0.005))


def test_marks_of_a_gpu_are_events_of_the_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fake of CUDA's events, whose times are in milliseconds from the first event to another."""
    now_ms = [100.0]
    streams: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing, "CUDA refuses to time other events"
            self.at_ms = float("inf")

        def record(self, stream: object) -> None:
            self.at_ms = now_ms[0]
            streams.append(stream)

        def query(self) -> bool:
            return now_ms[0] > self.at_ms

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    waited_for: list[object] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", waited_for.append)
    marks = Marks("cuda:1")
    for _ in range(3):
        marks.mark()
        assert not marks.reached()
        now_ms[0] += 2.0
        assert marks.reached()
    assert marks.seconds() == pytest.approx([0.0, 0.002, 0.004])
    assert waited_for == [torch.device("cuda:1")]
    assert streams == 3 * ["of cuda:1"]


def test_the_host_counts_in_training_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default a device first waits, so that the host gets ahead of it."""
    held: list[object] = []
    monkeypatch.setattr(clock, "hold", held.append)
    device = torch.device("cpu")
    twice = Budget(warmup=1, min_repeats=2, max_repeats=2)
    assert len(clock.measure_on(device, list, twice, host_counts=True)) == 2
    assert not held
    assert len(clock.measure_on(device, list, twice)) == 2
    assert held == 3 * [device]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Budget(warmup=-1),
        lambda: Budget(min_repeats=101),
        lambda: Budget(max_s=float("nan")),
    ],
)
def test_contradictory_budget_is_refused(wrong: Callable[[], Budget]) -> None:
    with pytest.raises(UserError, match="budget"):
        wrong()
