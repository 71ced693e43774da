"""Where the time of a training step goes, and what each remedy would gain.

The traces of all ranks are played again (`ddlkit.core.replay`), with one cause removed at
a time. What the iteration then takes is the answer. Sums of waiting times are not: a rank
that no longer waits for one rank may wait for another, or for the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.errors import Finding, UserError
from ddlkit.core.plan import ddp, exact
from ddlkit.core.replay import MARK, PHASES, POST, WAIT, Schedule, Segment
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import MIB, format_seconds
from ddlkit.core.workload import Floats
from ddlkit.formats.rank_trace import RankTrace, rank_trace
from ddlkit.formats.trace_stream import read_trace
from ddlkit.model.other_buckets import Buckets, costed_messages_s, of_backward
from ddlkit.model.ranks import LEAST_ITERATIONS, TracedTraining, training_of

MOST_REPLAY_ERROR = 0.05
"""Above this error of the replay, which is a share of the iteration, nothing is said."""
MOST_LAG = 0.25
"""Nothing is said if ranks see the ends of messages this much apart.

It is the share by which iterations change if all ranks saw every end at once."""
LARGE_LAG = 0.05
"""From this share on, a finding says how far apart ranks see the ends of messages."""
LEAST_SHARE = 0.03
"""A rank is named only if it costs more than this share of the iteration."""
TIMES_NEXT = 2.0
"""A rank is named only if it costs so many times as much as the next rank."""
IN_ITERATIONS = 0.6
"""A rank is named only if it stands out in at least this share of the iterations."""
LEVEL = 0.95
"""The nominal coverage of intervals."""
SAMPLES = 2000
"""How many bootstrap samples an interval is made of."""
MOST_TIMES_TYPICAL = 1.5
"""An iteration is called slow if it takes more than this many times the median."""
MOST_RANKS_TRIED = 16
"""For how many ranks the removal of each phase is played again."""
LEAST_SIZE_RATIO = 4.0
"""The sizes of messages tell start-up from bytes if they differ by this factor."""
MOST_REFERENCE = 1.3
"""By the reference, messages may take at most this many times as long as in the trace.

It is above 1 because a link that rests between iterations may save up tokens."""
LEAST_LISTED = 0.01
"""A rank is listed as a cause from this share of the iteration on."""
LEAST_JUDGED = 4
"""With fewer judged iterations, no rank is named."""
LEAST_SHOWN_S = 1e-9
"""Shorter gains are rounding errors, and count as none."""
CAPS_MIB = (1, 5, 10, 25, 50, 100)
"""Bucket caps that are tried as a remedy, in MiB."""
MOST_BUCKETS = 2
"""How many choices of buckets are remedies, the best ones first."""
ALWAYS_LISTED = ("waiting", "start-up", "bandwidth")
"""Causes that are listed even if no iteration gains anything without them."""


@dataclass(frozen=True)
class Cause:
    """Something that an iteration would take less time without.

    Attributes
    ----------
    cause : str
        "waiting", "start-up", "bandwidth", "contention", "copies" or "buffers".
    rank : int or None
        The rank for which the others wait. None for causes of all ranks.
    phase : str or None
        The phase of that rank in which most of its delay is.
    share : float
        The gain as a share of the iteration.
    without_s : float
        What the iteration would take without the cause, in seconds.
    gain_s : float
        The difference to the measured iteration, in seconds.
    interval_s : tuple of float
        The interval of the gain, of nominal coverage `LEVEL`, in seconds.
    """

    cause: str
    rank: int | None
    phase: str | None
    share: float
    without_s: float
    gain_s: float
    interval_s: tuple[float, float]


@dataclass(frozen=True)
class Remedy:
    """A setting or a change of hardware, and what the iteration would take with it.

    Attributes
    ----------
    setting : str
        What to change.
    with_s : float
        What the iteration would take, in seconds.
    gain_s : float
        The difference to the measured iteration, in seconds. It is negative where the
        change would cost time.
    interval_s : tuple of float
        The interval of the gain, of nominal coverage `LEVEL`, in seconds.
    """

    setting: str
    with_s: float
    gain_s: float
    interval_s: tuple[float, float]


@dataclass(frozen=True)
class Explanation:
    """Where the time of an iteration goes.

    Attributes
    ----------
    iteration_s, replay_s : float
        The median iteration, as measured and as played again, in seconds.
    compute_s : float
        How long a rank works in an iteration, as the mean over ranks, in seconds.
    exposed_s : float
        The rest of the iteration, in which a rank waits for messages or other ranks.
    ranks : int
        The number of ranks of the training.
    iterations : int
        How many iterations were judged.
    named : dict or None
        The ``rank`` and the ``phase`` for which the others wait, None if no one rank
        stands out.
    causes : tuple of Cause
        Single removals, the largest gain first. Their gains must not be added.
    waterfall : tuple of (str, float)
        Removals one after the other in a fixed order, each with what the iteration takes
        then, in seconds. The first entry is the iteration itself.
    remedies : tuple of Remedy
        What can be changed.
    messages : tuple of dict
        The messages, each with ``collective``, ``bytes`` and ``seconds``, the median time
        once all ranks have posted it.
    findings : tuple of Finding
        What was left out, and what is not known.
    device : str
        "cpu", or the name of the GPU.
    timeline : Timeline or None
        All ranks in the judged iteration that is nearest to the median. None for the
        trace of one rank.
    each_s : ndarray, shape (2, J)
        The judged iterations as measured, and as played again, in seconds.
    """

    iteration_s: float
    replay_s: float
    compute_s: float
    exposed_s: float
    ranks: int
    iterations: int
    named: dict[str, Any] | None
    causes: tuple[Cause, ...]
    waterfall: tuple[tuple[str, float], ...]
    remedies: tuple[Remedy, ...]
    messages: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...]
    device: str = "cpu"
    timeline: Timeline | None = field(default=None, repr=False)
    each_s: Floats = field(default_factory=lambda: np.zeros((2, 0)), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as ``ddlkit explain --json`` prints it."""
        # What only drawings need is left out.
        description = asdict(replace(self, timeline=None, each_s=np.zeros((2, 0))))
        del description["timeline"]
        del description["each_s"]
        description["waterfall"] = [
            {"without": name, "iteration_s": seconds}
            for name, seconds in self.waterfall
        ]
        description["findings"] = [finding._asdict() for finding in self.findings]
        return description


def explain(
    paths: Sequence[Path | str],
    *,
    iterations: Sequence[int] = (),
    reference: MessageCost | None = None,
) -> Explanation:
    """Return where the time of a training goes, from the traces of its ranks.

    Parameters
    ----------
    paths : sequence of Path or str
        The traces of torch.profiler of all ranks, in any order, or that of one rank
        alone, for bounds.
    iterations : sequence of int, optional
        The numbers of the iterations to judge. All are played again in any case. By
        default all are judged.
    reference : MessageCost, optional
        What messages cost between as many ranks on the idle machine.

    Returns
    -------
    Explanation
        The explanation.

    Raises
    ------
    UserError
        If traces are missing, damaged, or of different iterations or messages, if the
        training is not DDP, if the replay misses the measured iteration, or if the
        reference is slower than the messages of the trace.
    """
    if not paths:
        raise UserError("explain: give the trace of each rank")
    # Traces are large, so each is read and reduced before the next one.
    traces = [rank_trace(read_trace(path)) for path in paths]
    if len(traces) == 1:
        return bounds(traces[0], iterations)
    startup_s = max(0.0, reference.startup_s()) if reference is not None else 0.0
    return explanation(training_of(traces, startup_s), iterations, reference)


# -- what is judged --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Comparison:
    """Iterations that were played again, and those of changed schedules.

    Attributes
    ----------
    measured_s : ndarray, shape (J,)
        The judged iterations as measured, in seconds.
    replayed_s : ndarray, shape (J,)
        The same iterations played again without a change, in seconds.
    judged : ndarray of bool, shape (I,)
        Which of all iterations are judged.
    lag_share : float
        By which share iterations would be longer or shorter if all ranks saw the end of
        a message at once: the median over iterations.
    resamples : ndarray of int, shape (SAMPLES, J)
        The bootstrap samples: each row draws J of the judged iterations.
    """

    measured_s: Floats
    replayed_s: Floats
    judged: np.ndarray
    lag_share: float
    resamples: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, training: TracedTraining, judged: np.ndarray) -> Comparison:
        """Return the comparison of the judged iterations, shape (I,) of bool."""
        replayed_s = training.schedule.replay().iteration_s[judged]
        without_lag = replace(training.schedule, lag_s=None)
        without_lag_s = without_lag.replay().iteration_s[judged]
        n_judged = int(judged.sum())
        # The same samples serve every change, and a fixed seed makes them repeatable.
        generator = np.random.default_rng(0)
        resamples = generator.integers(n_judged, size=(SAMPLES, n_judged))
        return cls(
            measured_s=training.measured_s[judged],
            replayed_s=replayed_s,
            judged=judged,
            lag_share=float(np.median(np.abs(without_lag_s / replayed_s - 1))),
            resamples=resamples,
        )

    @property
    def iteration_s(self) -> float:
        """Return the median of the measured iterations, in seconds."""
        return float(np.median(self.measured_s))

    def gains_s(self, changed: Schedule) -> Floats:
        """Return what each judged iteration gains by a change, shape (J,), in seconds."""
        gains_s: Floats = self.replayed_s - changed.replay().iteration_s[self.judged]
        return gains_s

    def interval_s(self, gains_s: Floats) -> tuple[float, float]:
        """Return the bootstrap interval of the median gain, in seconds."""
        medians_s = np.median(gains_s[self.resamples], axis=1)
        outside = (1 - LEVEL) / 2
        lower_s, upper_s = np.quantile(medians_s, [outside, 1 - outside])
        return _without_rounding(lower_s), _without_rounding(upper_s)

    def cause(
        self,
        name: str,
        gains_s: Floats,
        rank: int | None = None,
        phase: str | None = None,
    ) -> Cause:
        """Return a cause from what each judged iteration gains without it.

        No gain is below 0, because a rank that is ready sooner could always wait. The
        replay can show a small loss, because messages that are posted sooner can share the
        link with others.
        """
        gain_s = max(0.0, _without_rounding(np.median(gains_s)))
        lower_s, upper_s = self.interval_s(gains_s)
        return Cause(
            cause=name,
            rank=rank,
            phase=phase,
            share=gain_s / self.iteration_s,
            without_s=self.iteration_s - gain_s,
            gain_s=gain_s,
            interval_s=(max(0.0, lower_s), max(0.0, upper_s)),
        )

    def remedy(self, setting: str, gains_s: Floats) -> Remedy:
        """Return a remedy from what each judged iteration gains by it."""
        gain_s = _without_rounding(np.median(gains_s))
        return Remedy(
            setting,
            with_s=self.iteration_s - gain_s,
            gain_s=gain_s,
            interval_s=self.interval_s(gains_s),
        )


def _without_rounding(seconds: float) -> float:
    """Return a gain, 0 if it is so small that it is a rounding error."""
    return float(seconds) if abs(seconds) >= LEAST_SHOWN_S else 0.0


def explanation(
    training: TracedTraining,
    iterations: Sequence[int] = (),
    reference: MessageCost | None = None,
) -> Explanation:
    """Return where the time of a training goes.

    Parameters
    ----------
    training : TracedTraining
        The traces of all ranks, put together.
    iterations : sequence of int, optional
        The numbers of the iterations to judge, by default all.
    reference : MessageCost, optional
        What messages cost on the idle machine.

    Returns
    -------
    Explanation
        The explanation.

    Raises
    ------
    UserError
        If iterations do not exist, if the replay misses the measured iteration, or if
        the reference is slower than the messages of the trace.
    """
    judged = _judged(training, iterations)
    compared = Comparison.of(training, judged)
    replay_s = float(np.median(compared.replayed_s))
    error = float(np.median(np.abs(compared.replayed_s / compared.measured_s - 1)))
    if error > MOST_REPLAY_ERROR:
        raise UserError(
            f"explain: played again, iterations are off by {error:.1%} (median; the "
            f"typical one takes {format_seconds(replay_s)} instead of "
            f"{format_seconds(compared.iteration_s)}): the traces hold something that "
            "explain does not model, or the iterations are too short for it: record "
            "longer iterations, as with a larger batch, on machines that do nothing else"
        )
    if compared.lag_share > MOST_LAG:
        raise UserError(
            f"explain: ranks see the ends of messages so far apart that iterations change "
            f"by {compared.lag_share:.0%} (median), which explain does not model: record "
            "longer iterations, as with a larger batch, on machines that do nothing else"
        )
    if reference is not None:
        _refuse_slow_reference(training, reference)

    schedule = training.schedule
    by_rank_s = _gains_by_rank_s(training, compared)
    named, causes = _named(training, compared, by_rank_s)
    cost = reference
    if cost is None:
        cost = _cost_of_traced_messages(training)
    # Each cause is removed from the schedule as it was traced, by itself.
    changes = _changes(training, cost)
    for name, change in changes.items():
        gains_s = compared.gains_s(change(schedule))
        if gains_s.any() or name in ALWAYS_LISTED:
            causes.append(compared.cause(name, gains_s))
    causes.sort(key=lambda cause: -cause.gain_s)

    compute_s = float(np.median(schedule.work_s[judged].sum(axis=2).mean(axis=1)))
    return Explanation(
        iteration_s=compared.iteration_s,
        replay_s=replay_s,
        compute_s=compute_s,
        exposed_s=max(0.0, compared.iteration_s - compute_s),
        ranks=schedule.n_ranks,
        iterations=int(judged.sum()),
        named=named,
        causes=tuple(causes),
        waterfall=_waterfall(schedule, compared, changes),
        remedies=tuple(_remedies(training, compared, cost)),
        messages=_described_messages(training),
        findings=tuple(_findings(training, compared, cost, reference)),
        device=training.traces[0].device,
        timeline=schedule.timeline(_nearest_to_median(training, judged)),
        each_s=np.array([compared.measured_s, compared.replayed_s]),
    )


def _findings(
    training: TracedTraining,
    compared: Comparison,
    cost: MessageCost | None,
    reference: MessageCost | None,
) -> Iterator[Finding]:
    """Yield what was left out, what is not known, and what the numbers rest on.

    ``cost`` is the reference, or else what the messages of the trace tell.
    """
    yield from training.findings
    yield from _slow_iterations(compared)
    if compared.lag_share > LARGE_LAG:
        text = (
            f"why ranks see the ends of messages at different times, by which iterations "
            f"change by {compared.lag_share:.0%} (median); no cause listed contains it"
        )
        yield Finding("not known", (), text)
    if cost is None:
        text = (
            "start-up and bandwidth, and other buckets: the messages of the trace do not "
            "tell them (give --collectives, measured while the machines are idle)"
        )
        yield Finding("not known", (), text)
    elif Buckets.of(training, cost) is None:
        text = (
            "other buckets: the gradients have several types, are not all used, or do "
            "not fill the messages"
        )
        yield Finding("not known", (), text)
    if cost is not None and reference is None:
        text = (
            "start-up and bandwidth are told apart by the sizes of the trace's messages"
        )
        yield Finding("messages", (), text)
    n_judged = len(compared.measured_s)
    if n_judged < LEAST_ITERATIONS:
        text = f"how sure this is: {n_judged} iterations are few for an interval"
        yield Finding("not known", (), text)
    if training.traces[0].device == "cpu":
        text = "the profiler makes iterations longer, by a median of 6% in our runs"
    else:
        text = "explain has not been validated on NCCL; the profiler costs some percent"
    yield Finding("profiler", (), text)


def _nearest_to_median(training: TracedTraining, judged: np.ndarray) -> int:
    """Return the position of the judged iteration that is nearest to their median."""
    positions = np.flatnonzero(judged)
    distance_s = training.measured_s[judged] - np.median(training.measured_s[judged])
    return int(positions[np.abs(distance_s).argmin()])


def _judged(training: TracedTraining, iterations: Sequence[int]) -> np.ndarray:
    """Return for each iteration of a training, shape (I,), whether it is judged."""
    if not iterations:
        return np.ones(len(training.numbers), dtype=bool)
    unknown = sorted(set(iterations) - set(training.numbers.tolist()))
    if unknown:
        raise UserError(
            f"--iterations {unknown[0]}: the traces have iterations "
            f"{training.numbers[0]} to {training.numbers[-1]}"
        )
    return np.isin(training.numbers, iterations)


def _slow_iterations(compared: Comparison) -> Iterator[Finding]:
    """Yield a finding if some judged iterations are much slower than the median one."""
    slow = compared.measured_s > MOST_TIMES_TYPICAL * compared.iteration_s
    if slow.any():
        text = (
            f"{slow.sum()} of {len(slow)} iterations take more than "
            f"{MOST_TIMES_TYPICAL:g} times the median, which all numbers here are about"
        )
        yield Finding("slow iterations", (), text)


# -- changes of a schedule -------------------------------------------------------------


def without_delay(schedule: Schedule, rank: int, phases: Sequence[str]) -> Schedule:
    """Return a schedule in which one rank is no slower than the other ranks.

    Parameters
    ----------
    schedule : Schedule
        What the ranks do.
    rank : int
        The rank that is made faster.
    phases : sequence of str
        The phases in which it is made faster.

    Returns
    -------
    Schedule
        The schedule, in which these phases together take the rank no longer than the
        median of the other ranks.

    Notes
    -----
    The excess is what the phases take this rank more than the median of the others,
    between two instants at which ranks wait for each other. It is taken off where the
    rank is slower than the others, in proportion. Segments are not compared one by one:
    chance makes any rank the slowest one in some segments, and to cut each of them would
    remove more than the delay.
    """
    others = np.arange(schedule.n_ranks) != rank
    in_phases = np.isin([segment.phase for segment in schedule.segments], phases)
    work_s = schedule.work_s.copy()
    # Behind a wait of all ranks, work cannot make up for work before it.
    for stretch in _stretches(schedule):
        chosen = stretch & in_phases
        others_s = schedule.work_s[:, others][:, :, chosen]
        work_s[:, rank, chosen] = _less_excess_s(
            own_s=schedule.work_s[:, rank][:, chosen],
            other_s=np.median(others_s, axis=1),
            other_total_s=np.median(others_s.sum(axis=2), axis=1),
        )
    return schedule.with_work(work_s)


def without_waiting(schedule: Schedule) -> Schedule:
    """Return a schedule in which all ranks are as quick as the quickest one.

    Parameters
    ----------
    schedule : Schedule
        What the ranks do.

    Returns
    -------
    Schedule
        The schedule, in which no rank works longer in a phase than the rank that works
        least in it, between two instants at which ranks wait for each other.
    """
    work_s = schedule.work_s.copy()
    iterations = np.arange(len(work_s))
    phase_of_segment = np.array([segment.phase for segment in schedule.segments])
    for stretch in _stretches(schedule):
        for phase in PHASES:
            chosen = stretch & (phase_of_segment == phase)
            chosen_s = schedule.work_s[:, :, chosen]
            totals_s = chosen_s.sum(axis=2)
            # The work of the quickest rank of each iteration, shape (I, S').
            quickest_s = chosen_s[iterations, totals_s.argmin(axis=1)]
            for rank in range(schedule.n_ranks):
                work_s[:, rank, chosen] = _less_excess_s(
                    own_s=chosen_s[:, rank],
                    other_s=quickest_s,
                    other_total_s=totals_s.min(axis=1),
                )
    return schedule.with_work(work_s)


def _stretches(schedule: Schedule) -> list[np.ndarray]:
    """Return the segments between waits, each as an array of bool of shape (S,).

    Ranks that have waited for a message go on together. Work behind a wait cannot make
    up for work before it. Waits in a row belong together, with the copies between them.
    What follows the last wait belongs to the same stretch as the beginning of the next
    iteration, and so to the first one.
    """
    number = 0
    stretch_of_segment = []
    was_wait = False
    for segment in schedule.segments:
        is_wait = segment.action == WAIT
        if was_wait and not is_wait:
            number += 1
        stretch_of_segment.append(number)
        was_wait = is_wait
    # The last stretch goes on as the first one of the next iteration.
    numbers = np.array(stretch_of_segment)
    numbers[numbers == number] = 0
    return [numbers == k for k in np.unique(numbers)]


def _less_excess_s(own_s: Floats, other_s: Floats, other_total_s: Floats) -> Floats:
    """Return the work of a rank, shortened to the total that others take, shape (I, S).

    ``own_s`` and ``other_s``, of that shape, are the work of the rank and of others in
    each segment. ``other_total_s``, of shape (I,), is how long others work in all these
    segments together. The rank is made faster in those segments only in which it is
    slower than the others, and in each of them by the same share of the difference.
    """
    slower_by_s = np.maximum(own_s - other_s, 0.0)
    all_slower_by_s = slower_by_s.sum(axis=1)
    excess_s = np.clip(own_s.sum(axis=1) - other_total_s, 0.0, all_slower_by_s)
    share = np.divide(
        excess_s,
        all_slower_by_s,
        out=np.zeros_like(all_slower_by_s),
        where=all_slower_by_s > 0,
    )
    return own_s - share[:, None] * slower_by_s


def _changes(
    training: TracedTraining, cost: MessageCost | None
) -> dict[str, Callable[[Schedule], Schedule]]:
    """Return the removal of each cause, in the fixed order of the waterfall.

    Each is a function of a schedule, so that removals can follow one another.
    """

    def without_contention(schedule: Schedule) -> Schedule:
        return _less_work(schedule, training.contention_s)

    def without_copies(schedule: Schedule) -> Schedule:
        return _less_work(schedule, training.copies_s)

    changes: dict[str, Callable[[Schedule], Schedule]] = {
        "waiting": without_waiting,
        "contention": without_contention,
        "copies": without_copies,
    }
    of_buffers = _sends_buffers(training)
    if of_buffers.any():
        changes["buffers"] = lambda schedule: _without_messages(schedule, of_buffers)
    if cost is not None:
        # What exceeds the start-up of a message is the time of its bytes.
        startup_s = _most_startup_s(training, cost)
        bytes_s = np.maximum(training.schedule.message_s - startup_s, 0.0)

        def without_startup(schedule: Schedule) -> Schedule:
            shorter_s = np.maximum(schedule.message_s - startup_s, 0.0)
            return schedule.with_messages(shorter_s, np.zeros_like(shorter_s))

        def without_bytes(schedule: Schedule) -> Schedule:
            return schedule.with_messages(np.maximum(schedule.message_s - bytes_s, 0.0))

        changes["start-up"] = without_startup
        changes["bandwidth"] = without_bytes
    return changes


def _sends_buffers(training: TracedTraining) -> np.ndarray:
    """Return for each message, shape (K,), whether it sends DDP's buffers."""
    # Of all messages, the schedule lists those as rooted that send buffers.
    numbers = np.arange(len(training.messages))
    return np.isin(numbers, training.schedule.rooted)


def _less_work(schedule: Schedule, less_s: Floats) -> Schedule:
    """Return a schedule with less work, but never less than none."""
    return schedule.with_work(np.maximum(schedule.work_s - less_s, 0.0))


def _without_messages(schedule: Schedule, removed: np.ndarray) -> Schedule:
    """Return a schedule without some messages and the waits for them.

    ``removed``, shape (K,) of bool, says which messages these are.
    """
    new_number = np.cumsum(~removed) - 1
    message_s = schedule.message_s[:, ~removed]
    startup_s = schedule.startups_s[:, ~removed]
    rooted = tuple(int(new_number[k]) for k in schedule.rooted if not removed[k])
    segments = []
    for segment in schedule.segments:
        if segment.action in (POST, WAIT) and removed[segment.message]:
            # The work before a post or a wait stays.
            segments.append(Segment(segment.phase, MARK))
        elif segment.action in (POST, WAIT):
            number = int(new_number[segment.message])
            segments.append(segment._replace(message=number))
        else:
            segments.append(segment)
    return replace(
        schedule,
        segments=tuple(segments),
        message_s=message_s,
        startup_s=startup_s,
        rooted=rooted,
    )


def _waterfall(
    schedule: Schedule,
    compared: Comparison,
    changes: dict[str, Callable[[Schedule], Schedule]],
) -> tuple[tuple[str, float], ...]:
    """Return what the iteration takes as one cause after the other is removed.

    The first entry is the iteration with all causes.
    """
    steps = [("nothing", compared.iteration_s)]
    gained_s = 0.0
    # Buffers change the number of messages, so that they are removed last.
    order = [name for name in changes if name != "buffers"]
    order += [name for name in changes if name == "buffers"]
    for name in order:
        schedule = changes[name](schedule)
        gain_s = float(np.median(compared.gains_s(schedule)))
        # As with single removals, no further removal costs time.
        gained_s = max(gained_s, gain_s)
        steps.append((name, compared.iteration_s - gained_s))
    return tuple(steps)


# -- which rank ------------------------------------------------------------------------


def _gains_by_rank_s(training: TracedTraining, compared: Comparison) -> Floats:
    """Return what each judged iteration gains without the delay of a rank, shape (R, J).

    One rank at a time is made no slower than the others, in all phases together.
    """
    schedule = training.schedule
    gains_s = [
        compared.gains_s(without_delay(schedule, rank, PHASES))
        for rank in range(schedule.n_ranks)
    ]
    return np.array(gains_s)


def _named(
    training: TracedTraining, compared: Comparison, by_rank_s: Floats
) -> tuple[dict[str, Any] | None, list[Cause]]:
    """Return the rank and phase to name, if any, and the cause of each slow rank.

    ``by_rank_s``, shape (R, J), is what judged iterations gain without the delay of each
    rank. A rank is named if it stands out by the median gain, by the lower end of its
    interval, and in most single iterations.
    """
    schedule = training.schedule
    medians_s = np.median(by_rank_s, axis=1)
    order = np.argsort(-medians_s)
    causes = []
    for rank in order[:MOST_RANKS_TRIED].tolist():
        if medians_s[rank] <= LEAST_LISTED * compared.iteration_s:
            break
        # The phase of the rank is the one without whose delay the most is gained.
        phase_gains_s = {
            phase: np.median(compared.gains_s(without_delay(schedule, rank, [phase])))
            for phase in PHASES
        }
        phase = max(phase_gains_s, key=lambda name: phase_gains_s[name])
        causes.append(compared.cause("waiting", by_rank_s[rank], rank, phase))
    if not causes or len(compared.measured_s) < LEAST_JUDGED:
        return None, causes
    # The ranks that cost the most, and the next most.
    first, second, *_ = order
    slowest = causes[0]
    lower_s, _ = slowest.interval_s
    least_s = LEAST_SHARE * compared.iteration_s
    stands_out = (by_rank_s[first] > least_s) & (
        by_rank_s[first] > TIMES_NEXT * by_rank_s[second]
    )
    is_named = (
        lower_s > least_s
        and medians_s[first] > TIMES_NEXT * medians_s[second]
        and stands_out.mean() >= IN_ITERATIONS
    )
    if not is_named:
        return None, causes
    return {"rank": slowest.rank, "phase": slowest.phase}, causes


# -- messages --------------------------------------------------------------------------


def _of_gradients(training: TracedTraining) -> np.ndarray:
    """Return for each message, shape (K,), whether it is of gradients and known size."""
    return np.array(
        [
            m.in_backward and m.collective == "all_reduce" and m.n_bytes > 0
            for m in training.messages
        ]
    )


def _refuse_slow_reference(training: TracedTraining, reference: MessageCost) -> None:
    """Raise UserError if messages take longer by the reference than in the trace."""
    gradients = _of_gradients(training)
    sizes = training.message_bytes[gradients]
    traced_s = np.median(training.schedule.message_s, axis=0)[gradients]
    reference_s = np.asarray(reference(sizes))
    ratio = float(reference_s.sum() / traced_s.sum())
    if ratio > MOST_REFERENCE:
        raise UserError(
            f"--collectives: by this reference the messages take {ratio:.2f} times as "
            "long as in the trace, although nothing else ran beside them: measure it on "
            "the same machines and ranks while they are idle"
        )


def _cost_of_traced_messages(training: TracedTraining) -> MessageCost | None:
    """Return what messages cost by their size: a line through those of the trace.

    The result is None if their sizes are too much alike to tell the start-up from the
    bytes, or if their times do not grow with their sizes.
    """
    gradients = _of_gradients(training)
    sizes = training.message_bytes[gradients]
    if len(sizes) < 2 or sizes.max() < LEAST_SIZE_RATIO * sizes.min():
        return None
    seconds = np.median(training.schedule.message_s, axis=0)[gradients]
    if not (seconds > 0).all():
        return None
    # Solve (alpha + beta * size) / seconds = 1, so that relative errors count. Neither the
    # start-up alpha nor the time beta of a byte can be negative.
    design = np.column_stack([1 / seconds, sizes / seconds])
    (alpha_s, beta_s), *_ = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)
    if beta_s <= 0:
        return None
    if alpha_s < 0:
        alpha_s = 0.0
        beta_s = float(np.median(seconds / sizes))
    return AlphaBeta(float(alpha_s), float(beta_s))


def _most_startup_s(training: TracedTraining, cost: MessageCost) -> Floats:
    """Return the most start-up that each message can have, shape (K,), in seconds.

    It is infinite for messages that do not carry gradients, because these are small and
    are nothing but start-up.
    """
    startup_s = max(0.0, cost.startup_s())
    return np.where(_of_gradients(training), startup_s, math.inf)


def _described_messages(training: TracedTraining) -> tuple[dict[str, Any], ...]:
    """Return the messages of an iteration as `Explanation.messages` lists them."""
    medians_s = np.median(training.schedule.message_s, axis=0)
    described = []
    for message, seconds in zip(training.messages, medians_s, strict=True):
        described.append(
            {
                "collective": message.collective,
                "bytes": message.n_bytes,
                "seconds": float(seconds),
            }
        )
    return tuple(described)


# -- remedies --------------------------------------------------------------------------


def _remedies(
    training: TracedTraining, compared: Comparison, cost: MessageCost | None
) -> Iterator[Remedy]:
    """Yield what can be changed, with what the iteration would take then."""
    schedule = training.schedule
    copies_back = any(i.copies_back for t in training.traces for i in t.iterations)
    # Where nothing is copied back, gradients are views of buckets already.
    if copies_back:
        gains_s = compared.gains_s(_less_work(schedule, training.copies_s))
        yield compared.remedy("gradient_as_bucket_view=True (at most)", gains_s)
    of_buffers = _sends_buffers(training)
    if of_buffers.any():
        gains_s = compared.gains_s(_without_messages(schedule, of_buffers))
        yield compared.remedy("broadcast_buffers=False", gains_s)
    if cost is None:
        return
    yield compared.remedy(
        "a link of twice the rate", _gains_of_link_s(training, compared, cost)
    )
    yield from _bucket_remedies(training, compared, cost)


def _gains_of_link_s(
    training: TracedTraining, compared: Comparison, cost: MessageCost
) -> Floats:
    """Return what judged iterations gain by a link of twice the rate, shape (J,).

    Seconds. Twice the rate halves the time of bytes and leaves the start-up.
    """
    schedule = training.schedule
    current_s = schedule.message_s
    if schedule.in_flight > 1:
        # Messages that share a link do not share it quite equally. Their sum is in the
        # trace, and how it is divided among them is better known from their cost.
        current_s = current_s.copy()
        sizes = training.message_bytes[of_backward(training)]
        current_s[:, of_backward(training)] = costed_messages_s(training, cost, sizes)
    bytes_s = np.maximum(current_s - _most_startup_s(training, cost), 0.0)
    now_s = schedule.with_messages(current_s).replay().iteration_s
    then_s = schedule.with_messages(current_s - bytes_s / 2).replay().iteration_s
    gained_s: Floats = (now_s - then_s)[compared.judged]
    return gained_s


def _bucket_remedies(
    training: TracedTraining, compared: Comparison, cost: MessageCost
) -> Iterator[Remedy]:
    """Yield the best choices of other buckets, as far as they gain anything."""
    buckets = Buckets.of(training, cost)
    if buckets is None:
        # `_findings` says that nothing is known of other buckets.
        return
    plans = {"the default buckets of DDP": ddp(buckets.workload)}
    for cap_mib in CAPS_MIB:
        plans[f"bucket_cap_mb={cap_mib}"] = ddp(buckets.workload, cap_mib * MIB)
    plans["the exact buckets (bucket_cap_mb_list)"] = exact(buckets.workload, cost)
    gains_by_setting: dict[str, Floats] = {}
    # Several caps can give the same buckets, or those that the training has already.
    tried: list[tuple[int, ...]] = [buckets.current.ends]
    for setting, plan in plans.items():
        if plan.ends not in tried:
            tried.append(plan.ends)
            name = f"{setting}: {len(plan.ends)} messages"
            gains_by_setting[name] = buckets.gains_s(plan, compared.judged)
    medians_s = {name: np.median(gains) for name, gains in gains_by_setting.items()}
    by_gain = sorted(medians_s, key=lambda name: -medians_s[name])
    for name in by_gain[:MOST_BUCKETS]:
        if medians_s[name] > 0:
            yield compared.remedy(name, gains_by_setting[name])


# -- one rank alone --------------------------------------------------------------------


def bounds(trace: RankTrace, iterations: Sequence[int] = ()) -> Explanation:
    """Return what the trace of a single rank says: bounds.

    Parameters
    ----------
    trace : RankTrace
        The trace.
    iterations : sequence of int, optional
        The numbers of the iterations to judge, by default all.

    Returns
    -------
    Explanation
        Without a named rank. What the rank waited may be the time of messages, the
        lateness of other ranks, or both.

    Raises
    ------
    UserError
        If the training had one rank only.
    """
    if trace.ranks == 1:
        raise UserError(f"{trace.source}: a training of one rank sends no messages")
    # If this rank had trained alone, no message would have waited for another rank. All
    # waiting then counts as time of messages, and is gained if these take none.
    alone = training_of([replace(trace, rank=0, ranks=1)], least_iterations=1)
    judged = _judged(alone, iterations)
    compared = Comparison.of(alone, judged)
    schedule = alone.schedule
    compute_s = float(np.median(schedule.work_s[judged].sum(axis=2).mean(axis=1)))
    without_messages = schedule.with_messages(np.zeros_like(schedule.message_s))
    gains_s = compared.gains_s(without_messages)
    gain_s = float(np.median(gains_s))
    _, upper_s = compared.interval_s(gains_s)
    waiting = Cause(
        cause="waiting",
        rank=None,
        phase=None,
        share=gain_s / compared.iteration_s,
        without_s=compared.iteration_s - gain_s,
        gain_s=gain_s,
        # Other ranks may have cost nothing, or all of it.
        interval_s=(0.0, upper_s),
    )
    missing = "the traces of the other ranks"
    if trace.ranks:
        missing = f"the traces of the other {trace.ranks - 1} of {trace.ranks} ranks"
    findings = [
        *alone.findings,
        Finding(
            "not known",
            (),
            f"{missing}: waiting costs at most {format_seconds(upper_s)} an iteration, "
            "and may be the time of messages or the lateness of other ranks",
        ),
    ]
    if judged.sum() < LEAST_ITERATIONS:
        text = f"{judged.sum()} iterations are too few for an interval"
        findings.append(Finding("not known", (), text))
    return Explanation(
        iteration_s=compared.iteration_s,
        replay_s=float(np.median(compared.replayed_s)),
        compute_s=compute_s,
        exposed_s=max(0.0, compared.iteration_s - compute_s),
        ranks=trace.ranks,
        iterations=int(judged.sum()),
        named=None,
        causes=(waiting,),
        waterfall=(),
        remedies=(),
        messages=_described_messages(alone),
        findings=tuple(findings),
        device=trace.device,
    )
