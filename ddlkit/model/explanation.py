"""Where the time of a training step goes, and what each remedy would gain.

The traces of all ranks are replayed (`ddlkit.core.replay`), with one cause removed at
a time. What the iteration then takes is the answer. Sums of waiting times are not: a rank
that no longer waits for one rank may wait for another, or for the network.

What all ranks do is a `ddlkit.core.replay.Schedule`: segments of work, at the ends of
which ranks post messages or wait for them. To *play it again* is to compute from it
when everything happens. Shapes of arrays are written with these letters:

I, J
    the iterations of the traces, and those of them that are judged: the answer is about
    these, which a user may choose
R
    ranks
S
    segments of work in an iteration
K
    messages in an iteration
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.errors import Finding, UserError
from ddlkit.core.plan import FusionPlan, ddp, exact
from ddlkit.core.replay import PHASES, WAIT, Schedule
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import MIB, format_seconds
from ddlkit.core.workload import Floats
from ddlkit.formats.rank_trace import RankTrace, rank_trace
from ddlkit.formats.trace_stream import read_trace
from ddlkit.model.other_buckets import Buckets, costed_messages_s, of_backward
from ddlkit.model.ranks import (
    LEAST_ITERATIONS,
    TracedTraining,
    training_of,
    with_startup,
)

MOST_REPLAY_ERROR = 0.05
"""If the replay misses iterations by more than this share, nothing is explained."""
RECORD_LONGER = "record longer iterations on machines that do nothing else"
"""The advice if a replay does not explain a training."""
LARGE_MISFIT = 0.25
"""If the fitted line misses a message by more than this share, a finding says so."""
MOST_LAG = 0.05
"""If ranks see the ends of messages this far apart, nothing is explained.

It is the share by which iterations would change if all ranks saw every end at once. The
replay with these lags is exact whatever else goes on between ranks, so that it must not
differ more from the replay without them. The share is at most 0.4% in all 30 recordings
with known delays, and was 3% in a training of 20 ms on a machine with three times as many
processes as processors.
"""
LEAST_SHARE = 0.03
"""A rank is called a straggler only if it costs more than this share of the iteration."""
LARGE_LAG = LEAST_SHARE
"""From this share on, a finding says how far apart ranks see the ends of messages."""
TIMES_NEXT = 2.0
"""A rank is called a straggler only if it costs so many times as much as the next rank."""
IN_ITERATIONS = 0.6
"""A rank is called a straggler only if it stands out in at least this share of the iterations."""
LEVEL = 0.95
"""The nominal coverage of intervals."""
SAMPLES = 2000
"""How many bootstrap samples an interval is made of."""
MOST_TIMES_TYPICAL = 1.5
"""An iteration is called slow if it takes more than this many times the median."""
MOST_RANKS_TRIED = 16
"""For how many ranks the removal of each phase is replayed."""
MOST_FITS = 12
"""How often the start-up of messages that share a link is fitted at most."""
CLOSE_STARTUP = 0.005
"""The start-up is no longer fitted once it changes by no more than this share."""
LEAST_SIZE_RATIO = 4.0
"""Start-up and time per byte are only fitted to sizes that differ by this factor."""
MOST_REFERENCE = 1.3
"""By the reference, messages may take at most this many times as long as in the trace.

It is above 1 because messages of a training can be faster than those of the reference: a
link that is limited by a token bucket saves up tokens while it rests between iterations.
"""
OTHER_UNIT_TIMES = 50.0
"""A reference by which messages take longer by more than this factor is taken as of another unit.

This is a choice. Milliseconds that are taken as seconds make a factor of 1000.
"""
LEAST_LISTED = 0.01
"""A rank is listed as a cause from this share of the iteration on."""
LEAST_JUDGED = 4
"""With fewer judged iterations, no rank is called a straggler."""
MOST_NUMBERS = 12
"""How many late or slow iterations are listed by their numbers, so that these fit a line."""
LEAST_SHOWN_S = 1e-9
"""Shorter gains are rounding errors, and count as none."""
CAPS_MIB = (1, 5, 10, 25, 50, 100)
"""Bucket caps that are tried as a remedy, in MiB."""
MOST_BUCKETS = 2
"""How many choices of buckets are remedies, the best ones first."""
REST_ON_COST = ("start-up", "bandwidth")
"""Causes whose gains rest on what messages cost by their size."""
FITS_TRIED = 12
"""With how many of the resampled costs the iterations are replayed.

The gains by all samples are read off a plane that is fitted to these. With all of 150 samples
replayed, the ends of intervals moved by less than a tenth of their width."""
ALWAYS_LISTED = ("delays", "start-up", "bandwidth")
"""Causes that are listed even if no iteration gains anything without them."""


@dataclass(frozen=True)
class Cause:
    """Something that an iteration would take less time without.

    Attributes
    ----------
    cause : str
        "delays", "start-up", "bandwidth", "contention", "copies" or "buffers", or from
        the trace of one rank "waiting".
    rank : int or None
        The rank for which the others wait. None for causes of all ranks.
    phase : str or None
        The phase of that rank in which most of its delay is.
    gain_share : float
        The gain as a share of the iteration.
    iteration_without_s : float
        What the iteration would take without the cause, in seconds.
    gain_s : float
        The difference to the measured iteration, in seconds.
    gain_interval_s : tuple of float
        The interval of the gain, of nominal coverage `LEVEL`, in seconds.
    """

    cause: str
    rank: int | None
    phase: str | None
    gain_share: float
    iteration_without_s: float
    gain_s: float
    gain_interval_s: tuple[float, float]


@dataclass(frozen=True)
class Remedy:
    """A setting or a change of hardware, and what the iteration would take with it.

    Attributes
    ----------
    setting : str
        What to change.
    iteration_with_s : float
        What the iteration would take, in seconds.
    gain_s, gain_interval_s : float, tuple of float
        The gain and its interval, as in `Cause`. Both are negative where the change
        would cost time.
    is_upper_bound : bool
        Whether the iteration gains this at most.
    """

    setting: str
    iteration_with_s: float
    gain_s: float
    gain_interval_s: tuple[float, float]
    is_upper_bound: bool = False


@dataclass(frozen=True)
class Explanation:
    """Where the time of an iteration goes.

    Attributes
    ----------
    iteration_s, replay_s : float
        The median iteration, as measured and as replayed, in seconds. An iteration
        lasts from when all ranks have ended the one before until all ranks have ended it.
    replay_without_lags_s : float
        The median iteration, replayed as if all ranks saw the end of a message at
        once, in seconds. It is the stricter test of the replay, because ``replay_s`` takes
        from the trace how late each rank saw the ends.
    compute_s : float
        How long a rank works in an iteration, as the mean over ranks, in seconds.
    exposed_communication_s : float
        The rest of the iteration, in which a rank waits for messages or other ranks.
    ranks : int
        The number of ranks of the training, 0 if the trace of one rank does not state it.
    iterations : int
        How many iterations were judged.
    straggler : dict or None
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
        once all ranks have posted it. From the trace of one rank, it is the median time
        once this rank has posted it, which contains the wait for the other ranks.
    findings : tuple of Finding
        What was left out, and what is not known.
    device : str
        "cpu", or the name of the GPU.
    timeline : Timeline or None
        All ranks in the judged iteration that is nearest to the median. None for the
        trace of one rank.
    each_s : ndarray, shape (2, J)
        The judged iterations as measured, and as replayed, in seconds.
    why_no_straggler : str
        If a rank costs much and is no straggler: which condition it does not meet, in words.
        Otherwise empty.
    """

    iteration_s: float
    replay_s: float
    replay_without_lags_s: float
    compute_s: float
    exposed_communication_s: float
    ranks: int
    iterations: int
    straggler: dict[str, Any] | None
    causes: tuple[Cause, ...]
    waterfall: tuple[tuple[str, float], ...]
    remedies: tuple[Remedy, ...]
    messages: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...]
    device: str = "cpu"
    timeline: Timeline | None = field(default=None, repr=False)
    each_s: Floats = field(default_factory=lambda: np.zeros((2, 0)), repr=False)
    why_no_straggler: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as ``ddlkit explain --json`` prints it."""
        # What only drawings and the screen need is left out. Arrays are emptied first,
        # because `asdict` makes a deep copy of everything.
        description = asdict(replace(self, timeline=None, each_s=np.zeros((2, 0))))
        del description["timeline"]
        del description["each_s"]
        description["waterfall"] = [
            {"without": name, "iteration_s": seconds}
            for name, seconds in self.waterfall
        ]
        description["findings"] = [finding._asdict() for finding in self.findings]
        # A value that is not known or does not exist is null in the document.
        description["ranks"] = self.ranks or None
        description["why_no_straggler"] = self.why_no_straggler or None
        # If there are too few iterations for intervals, these are null, too.
        if self.iterations < LEAST_ITERATIONS:
            for change in (*description["causes"], *description["remedies"]):
                change["gain_interval_s"] = None
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
        alone, which gives only bounds.
    iterations : sequence of int, optional
        The numbers of the iterations to judge, which the explanation is about. All are
        replayed in any case. By default all are judged.
    reference : MessageCost, optional
        What messages cost between as many ranks on the idle machine. It has no effect on the
        trace of one rank.

    Returns
    -------
    Explanation
        Where the time goes, what causes it, and what would help. From the trace of one
        rank, it has bounds of what waiting costs.

    Raises
    ------
    UserError
        If traces are missing, damaged, or of different iterations or messages, if the
        training is not DDP, if the replay misses the measured iteration, or if the
        reference is slower than the messages of the trace.
    """
    if not paths:
        raise UserError("explain: give the trace of each rank")
    # Traces are large, so each is read and reduced to what its rank did before the next one.
    traces = [rank_trace(read_trace(path)) for path in paths]
    if len(traces) == 1:
        return bounds(traces[0], iterations)
    # The start-up of a message, 0 if it is not known. `training_of` needs it where messages
    # were under way together, to compute what each would have taken alone: they shared the
    # link, but not their start-ups.
    startup_s = 0.0
    if reference is not None:
        # A fitted line can have a start-up below 0.
        startup_s = max(0.0, reference.startup_s())
    return explanation(training_of(traces, startup_s), iterations, reference)


# -- what is judged --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Comparison:
    """The judged iterations, with which those of changed schedules are compared.

    Judged iterations are those that the explanation is about. There are J of them, among
    the I iterations of the traces. A schedule says what all ranks do, and is replayed to
    compute when everything happens.

    Attributes
    ----------
    measured_s : ndarray, shape (J,)
        The judged iterations as measured, in seconds.
    replayed_s : ndarray, shape (J,)
        The same iterations replayed without a change, in seconds.
    judged : ndarray of bool, shape (I,)
        Which of all iterations are judged.
    numbers : ndarray of int, shape (J,)
        The numbers of the judged iterations, as the user gives them.
    without_lags_s : ndarray, shape (J,)
        The same iterations if all ranks saw the end of a message at once, in seconds.
    resamples : ndarray of int, shape (SAMPLES, J)
        The bootstrap samples: each row has J positions among the judged iterations, drawn
        with replacement.
    """

    measured_s: Floats
    replayed_s: Floats
    judged: np.ndarray
    numbers: np.ndarray
    without_lags_s: Floats
    resamples: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, training: TracedTraining, judged: np.ndarray) -> Comparison:
        """Return the comparison for a training.

        ``judged``, shape (I,) of bool, says which of its iterations are judged.
        """
        replayed_s = training.schedule.replay().iteration_s[judged]
        # The lag of a rank is the time from the end of a message until the rank, which waits for
        # it, goes on. A schedule whose ``lag_s`` is None has no lags.
        without_lags = replace(training.schedule, lag_s=None)
        n_judged = int(judged.sum())
        # The same samples serve every change, and a fixed seed makes them repeatable.
        generator = np.random.default_rng(0)
        resamples = generator.integers(n_judged, size=(SAMPLES, n_judged))
        return cls(
            measured_s=training.measured_s[judged],
            replayed_s=replayed_s,
            judged=judged,
            numbers=training.numbers[judged],
            without_lags_s=without_lags.replay().iteration_s[judged],
            resamples=resamples,
        )

    @property
    def iteration_s(self) -> float:
        """Return the median of the measured iterations, in seconds."""
        return float(np.median(self.measured_s))

    @property
    def lag_share(self) -> float:
        """Return the median share by which lags change an iteration.

        A lag is the time from the end of a message until a rank that waits for it goes on.
        """
        return float(np.median(np.abs(self.without_lags_s / self.replayed_s - 1)))

    def gains_s(self, changed: Schedule) -> Floats:
        """Return what each judged iteration gains by a change, shape (J,), in seconds."""
        gains_s: Floats = self.replayed_s - changed.replay().iteration_s[self.judged]
        return gains_s

    def interval_s(self, gains_s: Floats) -> tuple[float, float]:
        """Return the bootstrap interval of the median gain, of nominal coverage `LEVEL`.

        ``gains_s`` is what each judged iteration gains in seconds, shape (J,). Where gains rest on
        a cost of messages that is fitted anew to each bootstrap sample, ``gains_s`` has what each
        judged iteration gains by each of these fits, shape (SAMPLES, J). The ends are also in
        seconds. The interval is for the median of many iterations like these. The median of a few
        further iterations scatters more.
        """
        # Gains that do not rest on a fit are the same for each sample.
        gains_of_samples_s = np.broadcast_to(gains_s, self.resamples.shape)
        # Each row has the gains of the iterations that are in one bootstrap sample.
        drawn_s = np.take_along_axis(gains_of_samples_s, self.resamples, axis=1)
        medians_s = np.median(drawn_s, axis=1)
        # Which share of the samples lies beyond each end. The share is smaller for fewer
        # iterations, whose samples scatter too little.
        tail = share_beyond(len(self.measured_s))
        lower_s, upper_s = np.quantile(medians_s, [tail, 1 - tail])
        return _zero_if_negligible(lower_s), _zero_if_negligible(upper_s)

    def cause(
        self,
        name: str,
        gains_s: Floats,
        rank: int | None = None,
        phase: str | None = None,
        by_sample_s: Floats | None = None,
    ) -> Cause:
        """Return a cause from what each judged iteration gains without it.

        ``name`` is that of the cause, and ``gains_s``, shape (J,), are these gains in
        seconds. ``rank`` and ``phase`` are for a cause that is the delay of one rank.
        ``by_sample_s``, shape (SAMPLES, J), is for a cause whose gains rest on a fit to
        messages: what iterations gain by the fit to each bootstrap sample.

        A gain below 0 counts as 0, because a rank that is ready sooner could always wait.
        The replay can show a small loss, because messages that are posted sooner can share
        the link with others. A gain so small that it is a rounding error counts as 0, too.
        """
        # `interval_s` has set negligible ends of the interval to 0 already.
        gain_s = max(0.0, _zero_if_negligible(np.median(gains_s)))
        lower_s, upper_s = self.interval_s(
            gains_s if by_sample_s is None else by_sample_s
        )
        return Cause(
            cause=name,
            rank=rank,
            phase=phase,
            gain_share=gain_s / self.iteration_s,
            iteration_without_s=self.iteration_s - gain_s,
            gain_s=gain_s,
            gain_interval_s=(max(0.0, lower_s), max(0.0, upper_s)),
        )

    def remedy(
        self,
        setting: str,
        gains_s: Floats,
        *,
        is_upper_bound: bool = False,
        by_sample_s: Floats | None = None,
    ) -> Remedy:
        """Return a remedy from what each judged iteration gains by it.

        ``setting`` is what to change, and ``gains_s``, shape (J,), are these gains in
        seconds. ``is_upper_bound`` says that this is the most that iterations may gain.
        ``by_sample_s``, shape (SAMPLES, J), is for a remedy whose gains rest on a fit to
        messages: what iterations gain by the fit to each bootstrap sample. A remedy can
        cost time, so its gain may be below 0.
        """
        gain_s = _zero_if_negligible(np.median(gains_s))
        return Remedy(
            setting,
            iteration_with_s=self.iteration_s - gain_s,
            gain_s=gain_s,
            gain_interval_s=self.interval_s(
                gains_s if by_sample_s is None else by_sample_s
            ),
            is_upper_bound=is_upper_bound,
        )


def share_beyond(n: int) -> float:
    """Return which share of bootstrap samples lies beyond each end of an interval.

    Parameters
    ----------
    n : int
        How many iterations are resampled.

    Returns
    -------
    float
        The share. It is 0 for fewer than two iterations, of which all samples are alike.

    Notes
    -----
    Quantiles of bootstrap samples make intervals of few values too narrow, for two reasons.
    The samples scatter by only sqrt((n - 1) / n) of what they should. And their quantiles are
    about those of a normal distribution, where those of Student's t would be right. Both are
    corrected by the *expanded percentile interval* [1]_. For n iterations and the nominal
    coverage c, the share is

        Phi(-sqrt(n / (n - 1)) * t),

    where t is the quantile (1 + c) / 2 of Student's t with n - 1 degrees of freedom, and
    Phi is the standard normal distribution. As n grows, the share becomes (1 - c) / 2.

    References
    ----------
    .. [1] T. C. Hesterberg, "What Teachers Should Know About the Bootstrap", The American
       Statistician 69(4), 2015, section 4.4.

    Examples
    --------
    >>> round(share_beyond(8), 4)
    0.0057
    >>> round(share_beyond(10_000), 4)
    0.025
    """
    if n < 2:
        return 0.0
    # `scipy.stats` has the same functions, but takes three times as long to import.
    from scipy.special import ndtr as normal_share
    from scipy.special import stdtrit as student_quantile

    quantile = student_quantile(n - 1, (1 + LEVEL) / 2)
    return float(normal_share(-math.sqrt(n / (n - 1)) * quantile))


def _zero_if_negligible(seconds: float) -> float:
    """Return a gain, or 0 if it is so small that it is only a rounding error."""
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
        The traces of all ranks, put together. With a ``reference``, give `training_of` the
        start-up of that reference.
    iterations : sequence of int, optional
        The numbers of the iterations to judge, which the explanation is about. By default
        all are judged.
    reference : MessageCost, optional
        What messages cost on the idle machine. By default the cost is fitted to the
        messages of the trace.

    Returns
    -------
    Explanation
        Where the time goes, what causes it, and what would help.

    Raises
    ------
    UserError
        If iterations do not exist, if there is one rank only, if the replay misses the
        measured iteration, or if the reference is slower than the messages of the trace.
    """
    if training.schedule.n_ranks < 2:
        raise UserError(
            "explain: a training of one rank waits for no other rank: give the traces of all "
            "ranks"
        )
    # For each iteration, whether it is judged.
    judged = _judged(training, iterations)
    compared = Comparison.of(training, judged)
    _refuse_wrong_replay(compared)
    if reference is not None:
        _refuse_slow_reference(training, reference)
        costs: _Costs | None = _Costs(reference)
    else:
        # If messages are in flight together, they share the link, but not their start-ups. So
        # the time that each would take alone depends on the start-up. That of a reference would
        # be in ``training`` already. Without a reference, it is fitted here.
        if training.schedule.in_flight > 1:
            training = _with_fitted_startup(training, compared)
            # The times of messages have changed, so the iterations are replayed anew.
            compared = Comparison.of(training, judged)
        # None if no cost can be fitted to the messages.
        costs = _costs_of_traced_messages(training, compared)
    # `costs` also has the fits to bootstrap samples, which intervals need. Most functions
    # need the cost alone.
    cost = costs.cost if costs else None

    schedule = training.schedule
    # What each judged iteration gains without the delay of each rank, shape (R, J).
    gains_by_rank_s = _gains_by_rank_s(training, compared)
    causes = _causes_by_rank(training, compared, gains_by_rank_s)
    straggler, why_no_straggler = _straggler(compared, gains_by_rank_s, causes)
    causes += _causes_of_all_ranks(training, compared, costs)
    causes.sort(key=lambda cause: -cause.gain_s)

    compute_s = _typical_work_s(schedule, judged)
    # Time that a rank does not work is exposed. Both terms are medians over iterations,
    # whose difference can be below 0.
    exposed_s = max(0.0, compared.iteration_s - compute_s)
    return Explanation(
        iteration_s=compared.iteration_s,
        replay_s=float(np.median(compared.replayed_s)),
        replay_without_lags_s=float(np.median(compared.without_lags_s)),
        compute_s=compute_s,
        exposed_communication_s=exposed_s,
        ranks=schedule.n_ranks,
        iterations=int(judged.sum()),
        straggler=straggler,
        causes=tuple(causes),
        waterfall=_waterfall(schedule, compared, _removals(training, cost)),
        remedies=tuple(_remedies(training, compared, costs)),
        messages=_described_messages(training),
        findings=tuple(_findings(training, compared, cost, reference)),
        device=training.traces[0].device,
        timeline=schedule.timeline(_nearest_to_median(training, judged)),
        each_s=np.array([compared.measured_s, compared.replayed_s]),
        why_no_straggler=why_no_straggler,
    )


def _causes_of_all_ranks(
    training: TracedTraining, compared: Comparison, costs: _Costs | None
) -> Iterator[Cause]:
    """Yield the causes that are not the delay of one rank, such as the start-up of messages.

    ``costs`` is what messages cost by their size, None if that is not known. Each cause is
    removed from the schedule as it was traced, by itself. A cause without any gain is left
    out, unless it is always listed.
    """
    cost = costs.cost if costs else None
    for name, removal in _removals(training, cost).items():
        gains_s = compared.gains_s(removal(training.schedule))
        # If a gain rests on a fitted cost, its interval allows for the uncertainty of the fit.
        # For that, the gains are also computed by costs that are fitted to bootstrap samples of
        # the iterations. `_gains_by_sample_s` returns None if the cost was given, not fitted.
        by_sample_s = None
        if costs and name in REST_ON_COST:
            # `gains_by_cost` takes a cost, and returns what iterations gain without this cause.
            gains_by_cost = partial(_gains_without_s, training, compared, name)
            by_sample_s = _gains_by_sample_s(costs, gains_by_cost)
        if gains_s.any() or name in ALWAYS_LISTED:
            yield compared.cause(name, gains_s, by_sample_s=by_sample_s)


def _gains_without_s(
    training: TracedTraining, compared: Comparison, name: str, cost: MessageCost
) -> Floats:
    """Return what judged iterations gain without start-up or without bandwidth, in seconds.

    The J judged iterations are those that the explanation is about. ``compared`` has their
    replays without a change. The result, shape (J,), is by how much each of these takes
    longer than the replay of the same iteration without the cause.

    ``name`` is that of the cause, "start-up" or "bandwidth". ``cost`` is the time of a
    message by its size. It decides which part of a message's time is start-up, and which is
    the time of its bytes.
    """
    # A function from a schedule to a schedule without the cause.
    without_cause = _removals(training, cost)[name]
    return compared.gains_s(without_cause(training.schedule))


def _refuse_wrong_replay(compared: Comparison) -> None:
    """Raise UserError if the replay misses what was measured, or rests on large lags.

    A lag is the time from the end of a message until a rank that waits for it goes on. The
    replay takes the lags from the trace, and does not explain them.
    """
    errors = np.abs(compared.replayed_s / compared.measured_s - 1)
    error_of_single = float(np.median(errors))
    replay_s = float(np.median(compared.replayed_s))
    # Single iterations can be replayed well, and their median badly, if iterations
    # are of several kinds. The screen shows the error of the median.
    error_of_median = abs(replay_s / compared.iteration_s - 1)
    error = max(error_of_single, error_of_median)
    if error > MOST_REPLAY_ERROR:
        raise UserError(
            f"explain: replayed, iterations are off by {error:.1%} (median; the "
            f"typical one takes {format_seconds(replay_s)} instead of "
            f"{format_seconds(compared.iteration_s)}): the traces hold something that "
            f"explain does not model: {RECORD_LONGER}"
        )
    _refuse_large_lags(compared)


def _refuse_large_lags(compared: Comparison) -> None:
    """Raise UserError if iterations would change much if no rank had a lag.

    A lag is the time from the end of a message until a rank that waits for it goes on. All
    that happens between ranks and is not modelled is part of the lags, which the replay copies
    from the trace. So the replay comes close to the trace even where the model is wrong, and its
    error is no test of the model. The size of the lags is such a test: if they are large, the
    model leaves much out.
    """
    if compared.lag_share > MOST_LAG:
        raise UserError(
            f"explain: iterations would change by {compared.lag_share:.0%} (median) if "
            "all ranks saw the end of a message at once, and explain does not model why "
            f"they do not: {RECORD_LONGER}"
        )


def _typical_work_s(schedule: Schedule, judged: np.ndarray) -> float:
    """Return how long a rank works in an iteration, in seconds.

    This is the mean over ranks, and the median over the J judged iterations, which the
    explanation is about. ``judged``, shape (I,) of bool, says which of all I iterations
    these are.
    """
    # The shape (J, R, S) becomes (J, R), the work of each rank, and then (J,).
    work_of_rank_s = schedule.work_s[judged].sum(axis=2)
    return float(np.median(work_of_rank_s.mean(axis=1)))


def _findings(
    training: TracedTraining,
    compared: Comparison,
    cost: MessageCost | None,
    reference: MessageCost | None,
) -> Iterator[Finding]:
    """Yield what was left out, what is not known, and what the numbers rest on.

    ``reference`` is the cost of the option --collectives, None without this option. ``cost`` is
    ``reference`` or, without the option, the cost that was fitted to the messages of the
    trace. ``cost`` is None if none could be fitted.
    """
    # The traces are of one run, and the caveat is the same for all ranks.
    yield _finding_of_profiler(training.traces[0])
    yield from training.findings
    yield from _slow_iterations(compared)
    # The lag of a rank is the time from the end of a message until the rank sees it, and
    # `lag_share` is by how much an iteration that is replayed without lags differs from one with
    # them. If lags are large, the user should know that no cause contains them: each cause is
    # removed from a replay that keeps the lags.
    if compared.lag_share > LARGE_LAG:
        text = (
            f"why ranks see the ends of messages at different times, by which iterations "
            f"change by {compared.lag_share:.0%} (median); no cause listed contains it"
        )
        yield Finding("not known", text=text)
    yield from _findings_of_cost(training, compared, cost, reference)
    yield from _finding_of_few_iterations(len(compared.measured_s))


def _findings_of_cost(
    training: TracedTraining,
    compared: Comparison,
    cost: MessageCost | None,
    reference: MessageCost | None,
) -> Iterator[Finding]:
    """Yield what the cost of messages rests on, and what is not known for want of a cost.

    ``reference`` is the cost of the option --collectives, None without this option. ``cost`` is
    ``reference`` or, without the option, the cost that was fitted to the messages of the
    trace. ``cost`` is None if none could be fitted.
    """
    if cost is None:
        text = (
            "start-up and bandwidth, and other buckets: the trace alone does not tell "
            "(give --collectives, measured while the machines are idle)"
        )
        yield Finding("not known", text=text)
        return
    if Buckets.of(training, cost) is None:
        # The trace does not tell which gradients each message carries.
        text = (
            "other buckets: the gradients have several types, are not all used, or do "
            "not fill the messages"
        )
        yield Finding("not known", text=text)
    if reference is None:
        text = (
            "start-up and bandwidth are separated by the sizes of the trace's messages"
        )
        misfit = _misfit(training, compared, cost)
        if misfit > LARGE_MISFIT:
            text += (
                f", but a line through the times of these messages misses one by {misfit:.0%}, "
                "so that gains by start-up, by bytes and by other buckets are rough (give "
                "--collectives, measured while the machines are idle)"
            )
        yield Finding("messages", text=text)


def _misfit(training: TracedTraining, compared: Comparison, cost: MessageCost) -> float:
    """Return the largest error of a cost that was fitted to messages, as a share of their times.

    Only messages with gradients of known size are compared, because the cost was fitted to these
    alone. The time of a message is the median over the judged iterations, which are those that
    the explanation is about.
    """
    has_gradients = _of_gradients(training)
    sizes = training.message_bytes[has_gradients]
    # Shape (J, number of messages with gradients).
    message_s = training.schedule.message_s[compared.judged][:, has_gradients]
    typical_s = np.median(message_s, axis=0)
    errors = np.asarray(cost(sizes)) / typical_s - 1
    return float(np.abs(errors).max())


def _finding_of_few_iterations(n_judged: int) -> Iterator[Finding]:
    """Yield that no interval is known, if too few iterations are judged for one."""
    if n_judged < LEAST_ITERATIONS:
        text = (
            f"how sure this is: an interval needs {LEAST_ITERATIONS} judged iterations, and "
            f"there are {n_judged}"
        )
        yield Finding("not known", text=text)


def _finding_of_profiler(trace: RankTrace) -> Finding:
    """Return the caveat on all times of a trace.

    The profiler makes iterations longer, and explain is not validated on NCCL.
    """
    if trace.uses_nccl:
        text = "explain has not been validated on NCCL, and the profiler costs some percent"
        return Finding("not validated", text=text)
    if trace.device != "cpu":
        text = "the profiler makes iterations longer, by some percent"
    else:
        text = "the profiler makes iterations longer, by a median of 6% in our runs"
    return Finding("profiler", text=text)


def _nearest_to_median(training: TracedTraining, judged: np.ndarray) -> int:
    """Return the index, among all I iterations, of a typical judged one.

    Judged iterations are those that the explanation is about. The typical one is that
    whose measured time is nearest to their median.
    """
    judged_s = training.measured_s[judged]
    nearest = np.abs(judged_s - np.median(judged_s)).argmin()
    # ``nearest`` counts judged iterations only.
    return int(np.flatnonzero(judged)[nearest])


def _judged(training: TracedTraining, iterations: Sequence[int]) -> np.ndarray:
    """Return for each iteration of a training, shape (I,), whether it is judged.

    Judged iterations are those that the explanation is about. ``iterations`` are their
    numbers, and without any number all are judged. Raises UserError if the traces lack
    one of them.
    """
    if not iterations:
        return np.ones(len(training.numbers), dtype=bool)
    unknown = sorted(set(iterations) - set(training.numbers.tolist()))
    if unknown:
        listed = ", ".join(map(str, unknown))
        # Successive numbers are listed as a range.
        is_range = unknown == list(range(unknown[0], unknown[-1] + 1))
        if is_range and len(unknown) > 1:
            listed = f"{unknown[0]}-{unknown[-1]}"
        raise UserError(
            f"--iterations {listed}: the traces have only the iterations "
            f"{training.numbers[0]} to {training.numbers[-1]}: choose among these"
        )
    return np.isin(training.numbers, iterations)


def _slow_iterations(compared: Comparison) -> Iterator[Finding]:
    """Yield a finding if some judged iterations are much slower than the median one.

    Judged iterations are those that the explanation is about.
    """
    slow = compared.measured_s > MOST_TIMES_TYPICAL * compared.iteration_s
    if slow.any():
        numbers = compared.numbers[slow]
        listed = ",".join(map(str, numbers[:MOST_NUMBERS]))
        if len(numbers) > MOST_NUMBERS:
            listed = f"{listed} and {len(numbers) - MOST_NUMBERS} others"
        verb = "takes" if len(numbers) == 1 else "take"
        plural = "" if len(numbers) == 1 else "s"
        text = (
            f"{len(numbers)} of {len(slow)} iterations {verb} more than "
            f"{MOST_TIMES_TYPICAL:g} times the median (iteration{plural} {listed}). All numbers here "
            "are about the median. To leave slow iterations out, give --iterations with the "
            "numbers of all others"
        )
        yield Finding("slow iterations", text=text)


# -- changes of a schedule -------------------------------------------------------------


def without_delay(schedule: Schedule, rank: int, phases: Sequence[str]) -> Schedule:
    """Return a schedule in which one rank is no slower than the other ranks.

    Parameters
    ----------
    schedule : Schedule
        What R ranks do in I iterations, each of which has S segments. A segment is some
        work of one phase, and what the rank does after it, such as waiting.
    rank : int
        The rank that is made faster.
    phases : sequence of str
        The phases in which the rank is made faster.

    Returns
    -------
    Schedule
        The schedule, in which these phases together take the rank no longer than the
        median of the other ranks.

    Notes
    -----
    Between two instants at which ranks wait for each other, the phases may take this rank
    longer in total than the median of the other ranks. The excess is taken off those segments
    in which the rank is slower than the median of the others, from each by the same share of
    its difference from that median. To cut every such segment to the median would remove more
    than the delay, because chance alone makes any rank slower in some segments.
    """
    others = np.arange(schedule.n_ranks) != rank
    in_phases = np.isin([segment.phase for segment in schedule.segments], phases)
    # Work in seconds, shape (I + 1, R, S). A round lasts from the last wait of an iteration
    # to the last wait of the next one. Work is compared by rounds and not by iterations,
    # because ranks go on from the last wait into the next iteration without waiting. So a
    # rank that is slow before the end of an iteration can make up for it behind this end.
    rounds_s = _in_rounds(schedule)
    shorter_s = rounds_s.copy()
    # Work after a wait of all ranks cannot make up for work before it, so each stretch
    # of segments between two waits is shortened by itself. A stretch is a mask, shape (S,).
    for stretch in _stretches(schedule):
        chosen = stretch & in_phases
        # The work of the other ranks, shape (I + 1, R - 1, number of chosen segments).
        others_s = rounds_s[:, others][:, :, chosen]
        shorter_s[:, rank, chosen] = _without_excess_s(
            own_s=rounds_s[:, rank][:, chosen],
            # `other_s` decides in which segments work is taken off, and `other_total_s` how
            # much in all. The median of totals is not the total of the medians.
            other_s=np.median(others_s, axis=1),
            other_total_s=np.median(others_s.sum(axis=2), axis=1),
        )
    return schedule.with_work(_of_iterations(schedule, shorter_s))


def without_delays(schedule: Schedule) -> Schedule:
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
    # The work by rounds, shape (I + 1, R, S) for I iterations of R ranks with S segments. A
    # round lasts from the last wait of an iteration to the last wait of the next one. Work is
    # compared by rounds and not by iterations, because ranks do not wait for each other where
    # one iteration ends and the next one begins. I iterations have I + 1 rounds, because the
    # first one begins without such a wait, and the last one ends without it.
    rounds_s = _in_rounds(schedule)
    shorter_s = rounds_s.copy()
    phase_of_segment = np.array([segment.phase for segment in schedule.segments])
    # Work after a wait of all ranks cannot make up for work before it, so each stretch
    # of segments between two waits is shortened by itself. The first stretch of a round has
    # the segments behind the last wait of an iteration, and those that begin the next one.
    for stretch in _stretches(schedule):
        # By choice, each phase is compared with the rank that is quickest in this phase.
        for phase in PHASES:
            chosen = stretch & (phase_of_segment == phase)
            shorter_s[:, :, chosen] = _as_quick_as_quickest_s(rounds_s[:, :, chosen])
    return schedule.with_work(_of_iterations(schedule, shorter_s))


def _as_quick_as_quickest_s(work_s: Floats) -> Floats:
    """Return the work of all ranks, none of which works longer than the quickest one.

    ``work_s`` is how long each rank works in each segment of a phase, in seconds. The first
    axis has the rounds (`_in_rounds`), the second one the ranks, and the third one the
    segments. The quickest rank of a round is the one that works least in these segments
    together. Each other rank is made faster in segments in which it is slower than the quickest
    one, until both have the same total over all segments. The result has the same shape.
    """
    shorter_s = work_s.copy()
    # How long each rank works in all segments, shape (rounds, R).
    totals_s = work_s.sum(axis=2)
    # The work of the quickest rank of each round, shape (rounds, number of segments).
    rounds = np.arange(len(work_s))
    quickest_s = work_s[rounds, totals_s.argmin(axis=1)]
    for rank in range(work_s.shape[1]):
        # Here the total is the sum of `other_s`. It is an argument because `without_delay`
        # passes medians, whose sum is not the median of the totals.
        shorter_s[:, rank] = _without_excess_s(
            own_s=work_s[:, rank],
            other_s=quickest_s,
            other_total_s=totals_s.min(axis=1),
        )
    return shorter_s


def _behind_last_wait(schedule: Schedule) -> np.ndarray:
    """Return for each segment, shape (S,), whether it lies behind the last wait."""
    is_wait = [segment.action == WAIT for segment in schedule.segments]
    # How many waits there are from each segment on, itself included.
    waits_to_come = np.cumsum(is_wait[::-1])[::-1]
    return np.asarray(waits_to_come == 0)


def _in_rounds(schedule: Schedule) -> Floats:
    """Return the work of a schedule by rounds, shape (I + 1, R, S), in seconds.

    A round lasts from the last wait of an iteration to the last wait of the next one. It
    has the work behind the last wait of the earlier iteration, such as the update, and the
    work of the later iteration up to its last wait. Ranks do not wait for each other where one
    iteration ends and the next one begins. So a rank that is slow in the first part of a round
    can make up for it in the second part. The first round has no work of an earlier iteration,
    and the last round none of a later one.
    """
    # For each segment, whether it lies behind the last wait.
    behind = _behind_last_wait(schedule)
    n_iterations, n_ranks, n_segments = schedule.work_s.shape
    rounds_s = np.zeros((n_iterations + 1, n_ranks, n_segments))
    # Round i ends at the last wait of iteration i, whose work behind it is in round i + 1.
    rounds_s[:-1, :, ~behind] = schedule.work_s[:, :, ~behind]
    rounds_s[1:, :, behind] = schedule.work_s[:, :, behind]
    return rounds_s


def _of_iterations(schedule: Schedule, rounds_s: Floats) -> Floats:
    """Return work by iterations, shape (I, R, S), from that by rounds (`_in_rounds`)."""
    behind = _behind_last_wait(schedule)
    work_s = np.empty_like(schedule.work_s)
    work_s[:, :, behind] = rounds_s[1:, :, behind]
    work_s[:, :, ~behind] = rounds_s[:-1, :, ~behind]
    return work_s


def _stretches(schedule: Schedule) -> list[np.ndarray]:
    """Return the stretches into which waits divide an iteration, as masks of shape (S,).

    A segment is some work and then perhaps a wait for a message. Here W is a segment with a wait,
    "-" is one without, and the numbers below them are those of stretches:

        - - W W - - W - -
        0 0 0 0 1 1 1 0 0

    A stretch ends with the last one of successive waits. The segments behind the last wait belong
    to stretch 0, because ranks go on from them into the next iteration without a wait.
    """
    stretch = 0
    stretch_of_segment = []
    # Whether the segment before ends with a wait.
    was_wait = False
    for segment in schedule.segments:
        is_wait = segment.action == WAIT
        # A stretch begins behind the last one of successive waits.
        if was_wait and not is_wait:
            stretch += 1
        stretch_of_segment.append(stretch)
        was_wait = is_wait
    numbers = np.array(stretch_of_segment)
    # If the last segment has no wait, the last stretch lies behind the last wait.
    if not was_wait:
        numbers[numbers == stretch] = 0
    return [numbers == number for number in np.unique(numbers)]


def _without_excess_s(own_s: Floats, other_s: Floats, other_total_s: Floats) -> Floats:
    """Return the work of a rank without the excess of its total over that of others.

    Work is in seconds, with a row for each round (`_in_rounds`) and a column for each of
    some segments. That of the rank is ``own_s``, and that of the others, such as their
    median, is ``other_s``. ``other_total_s``, with one value for each round, is how long
    others work in all these segments together. It need not be the sum of ``other_s``: the
    median of totals is not the total of medians. The excess is taken off only in segments
    in which the rank is slower than the others, and in each of them by the same share of the
    difference. The result has the shape of ``own_s``.
    """
    slower_by_s = np.maximum(own_s - other_s, 0.0)
    all_slower_by_s = slower_by_s.sum(axis=1)
    # The excess can be longer than the differences in all slower segments together, because
    # `other_total_s` can be less than the sum of `other_s`. No more than these differences is
    # then taken off, and the total of the rank stays above `other_total_s`.
    excess_s = np.clip(own_s.sum(axis=1) - other_total_s, 0.0, all_slower_by_s)
    # The share is 0, and not 0 / 0, where the rank is slower in no segment.
    share = np.divide(
        excess_s,
        all_slower_by_s,
        out=np.zeros_like(all_slower_by_s),
        where=all_slower_by_s > 0,
    )
    # The share of each round holds for all its segments.
    return own_s - share[:, None] * slower_by_s


def _removals(
    training: TracedTraining, cost: MessageCost | None
) -> dict[str, Callable[[Schedule], Schedule]]:
    """Return for each cause a function that removes it from a schedule.

    Causes are delays of ranks, contention (messages slow compute down), copies of gradients into
    and out of buckets, broadcasts of buffers, start-ups of messages, and bandwidth. Because
    removals are functions of a schedule, one can follow another.

    ``cost`` is what messages cost by their size. Without it, start-up and bandwidth
    cannot be told apart, and have no removals.
    """
    removals: dict[str, Callable[[Schedule], Schedule]] = {
        "delays": without_delays,
        "contention": partial(_with_less_work, less_s=training.contention_s),
        "copies": partial(_with_less_work, less_s=training.copies_s),
    }
    of_buffers = _sends_buffers(training)
    if of_buffers.any():
        removals["buffers"] = partial(Schedule.without_messages, removed=of_buffers)
    if cost is not None:
        # How much of each message can be start-up, shape (K,). It is infinite for messages
        # that do not carry gradients: these are start-up as a whole, however long they take.
        most_startup_s = _most_startup_s(training, cost)
        # What a message takes beyond this limit is the time of its bytes.
        bytes_s = np.maximum(training.schedule.message_s - most_startup_s, 0.0)
        removals["start-up"] = partial(_without_startup, most_startup_s=most_startup_s)
        removals["bandwidth"] = partial(_without_bytes, bytes_s=bytes_s)
    return removals


def _without_startup(schedule: Schedule, most_startup_s: Floats) -> Schedule:
    """Return a schedule in which messages have no start-up.

    ``most_startup_s``, shape (K,), is the most start-up that each message can have.
    """
    shorter_s = np.maximum(schedule.message_s - most_startup_s, 0.0)
    return schedule.with_messages(shorter_s, np.zeros_like(shorter_s))


def _without_bytes(schedule: Schedule, bytes_s: Floats) -> Schedule:
    """Return a schedule without ``bytes_s``, shape (I, K), the time of messages' bytes."""
    return schedule.with_messages(np.maximum(schedule.message_s - bytes_s, 0.0))


def _sends_buffers(training: TracedTraining) -> np.ndarray:
    """Return for each message, shape (K,), whether it sends DDP's buffers."""
    # In a schedule, rooted messages are those that rank 0 alone sends. DDP's buffers
    # are the only ones.
    numbers = np.arange(len(training.messages))
    return np.isin(numbers, training.schedule.rooted)


def _with_less_work(schedule: Schedule, less_s: Floats) -> Schedule:
    """Return a schedule with less work by ``less_s``, shape (I, R, S), but not below 0."""
    return schedule.with_work(np.maximum(schedule.work_s - less_s, 0.0))


def _waterfall(
    schedule: Schedule,
    compared: Comparison,
    removals: dict[str, Callable[[Schedule], Schedule]],
) -> tuple[tuple[str, float], ...]:
    """Return what the iteration takes as one cause after the other is removed.

    ``removals`` has a function for each cause that removes it from a schedule. The result
    has the name of each cause, and the seconds that the iteration takes without this cause
    and those before it. The first entry, "nothing", is the iteration with all causes.
    """
    steps = [("nothing", compared.iteration_s)]
    gained_s = 0.0
    # The broadcasts of a model's buffers are removed last. Other removals subtract arrays of
    # times with a column for each message, which do not fit a schedule that lacks these
    # broadcasts.
    order = [name for name in removals if name != "buffers"]
    order += [name for name in removals if name == "buffers"]
    for name in order:
        schedule = removals[name](schedule)
        # The gain of this removal and of those before it together.
        gain_s = float(np.median(compared.gains_s(schedule)))
        # No removal costs time. Where the replay shows a small loss, the gain stays as it was.
        gained_s = max(gained_s, gain_s)
        steps.append((name, compared.iteration_s - gained_s))
    return tuple(steps)


# -- which rank ------------------------------------------------------------------------


def _gains_by_rank_s(training: TracedTraining, compared: Comparison) -> Floats:
    """Return what each judged iteration gains without the delay of a rank, shape (R, J).

    Judged iterations are those that the explanation is about. There are J of them, and
    each is compared with its own replay without a change. One of the R ranks at a time is
    made faster: the sum of its work in all phases becomes no longer than the median of this
    sum over the other ranks (`without_delay`). The gains are in seconds.
    """
    schedule = training.schedule
    gains_s = [
        compared.gains_s(without_delay(schedule, rank, PHASES))
        for rank in range(schedule.n_ranks)
    ]
    return np.array(gains_s)


def _causes_by_rank(
    training: TracedTraining, compared: Comparison, gains_by_rank_s: Floats
) -> list[Cause]:
    """Return the causes that are the delay of one rank, the slowest rank first.

    ``gains_by_rank_s``, shape (R, J), is what each of J judged iterations gains without the delay
    of each rank, in seconds. Judged iterations are those that the explanation is about. Ranks that
    cost hardly anything are not listed.
    """
    schedule = training.schedule
    medians_s = np.median(gains_by_rank_s, axis=1)
    # The ranks by their gains, the largest first. Each rank takes a replay for each phase, so
    # only the first ones are tried.
    order = np.argsort(-medians_s)
    causes = []
    for rank in order[:MOST_RANKS_TRIED].tolist():
        # If this rank costs hardly anything, neither do those after it, which cost no more.
        if medians_s[rank] <= LEAST_LISTED * compared.iteration_s:
            break
        # The phase of the rank is the one without whose delay the most is gained.
        phase_gains_s = {
            phase: np.median(compared.gains_s(without_delay(schedule, rank, [phase])))
            for phase in PHASES
        }
        phase = max(phase_gains_s, key=lambda name: phase_gains_s[name])
        causes.append(compared.cause("delays", gains_by_rank_s[rank], rank, phase))
    return causes


def _straggler(
    compared: Comparison, gains_by_rank_s: Floats, causes: Sequence[Cause]
) -> tuple[dict[str, Any] | None, str]:
    """Return the rank and the phase for which the others wait, None if none stands out.

    ``causes`` are those of `_causes_by_rank`, the slowest rank first. ``gains_by_rank_s``, shape
    (R, J), is how much shorter each judged iteration would be without the delay of each rank, in
    seconds. Judged iterations are those that the explanation is about. The slowest rank is called a
    straggler if it stands out by its median gain, in most single iterations, and by the lower end
    of the interval of its gain. If its delay costs much and it is no straggler, the second result
    says which of these conditions it does not meet. Otherwise the second result is empty.
    """
    # If there is no cause, or if even the first one is small, no rank costs much.
    if not causes or causes[0].gain_share <= LEAST_SHARE:
        return None, ""
    slowest = causes[0]
    n_judged = len(compared.measured_s)
    if n_judged < LEAST_JUDGED:
        return None, (
            f"rank {slowest.rank} may be late, but to call it so takes {LEAST_JUDGED} "
            f"judged iterations, and there are {n_judged}"
        )
    # The first condition: over all judged iterations, the rank that costs the most costs far more
    # than the next one. ``first`` is the rank of ``slowest``. There are always two ranks, because
    # `explanation` refuses a training of one.
    medians_s = np.median(gains_by_rank_s, axis=1)
    first, second, *_ = np.argsort(-medians_s)
    is_far_ahead = medians_s[first] > TIMES_NEXT * medians_s[second]
    if not is_far_ahead:
        return None, (
            f"the delay of rank {first} costs no more than {TIMES_NEXT:g} times that of "
            f"rank {second}, and that of a straggler costs more"
        )
    # The second condition: in most single iterations, the first rank costs much, and far more
    # than the second one.
    least_s = LEAST_SHARE * compared.iteration_s
    first_s = gains_by_rank_s[first]
    second_s = gains_by_rank_s[second]
    is_late = (first_s > least_s) & (first_s > TIMES_NEXT * second_s)
    is_frequent = is_late.mean() >= IN_ITERATIONS
    if not is_frequent:
        late = compared.numbers[is_late]
        return None, (
            f"rank {first} is late in {len(late)} of {n_judged} iterations, and a straggler "
            f"is late in at least {IN_ITERATIONS:.0%} of them{_advice_to_judge(late)}"
        )
    # The third condition: even the lower end of the interval of the delay is large.
    lower_s, _ = slowest.gain_interval_s
    if lower_s <= least_s and n_judged < LEAST_ITERATIONS:
        # No interval is shown for so few iterations. ``lower_s`` is then the smallest gain of a
        # single iteration, and the text calls it so.
        return None, (
            f"rank {first} may be late, but its delay costs only {format_seconds(lower_s)} in "
            f"one iteration, and that of a straggler costs more than {format_seconds(least_s)} "
            f"({LEAST_SHARE:.0%} of the iteration) in every judged iteration, if fewer than "
            f"{LEAST_ITERATIONS} are judged"
        )
    if lower_s <= least_s:
        return None, (
            f"rank {first} may be late, but the interval of its delay begins at "
            f"{format_seconds(lower_s)}, and that of a straggler begins above "
            f"{format_seconds(least_s)} ({LEAST_SHARE:.0%} of the iteration)"
        )
    return {"rank": slowest.rank, "phase": slowest.phase}, ""


def _advice_to_judge(late: np.ndarray) -> str:
    """Return how to explain late iterations alone, "" if too few iterations are late.

    The result continues a sentence of `_straggler`, such as "rank 3 is late in 5 of 20
    iterations", and so begins with its full stop. ``late`` has the numbers of the iterations in
    which the rank is late.
    """
    # If only these few iterations were judged, no rank would be called a straggler.
    if len(late) < LEAST_JUDGED:
        return ""
    which = "its late iterations"
    if len(late) > MOST_NUMBERS:
        which = f"the first {MOST_NUMBERS} of these iterations"
    numbers = ",".join(map(str, late[:MOST_NUMBERS]))
    # Any rank looks slow in iterations that are chosen because it was late in them.
    return (
        f". To see what {which} cost (chosen in this way, iterations make any rank look slow), "
        f"give --iterations {numbers}"
    )


# -- messages --------------------------------------------------------------------------


def _of_gradients(training: TracedTraining) -> np.ndarray:
    """Return for each message, shape (K,), whether it sends gradients of known size."""
    of_gradients = []
    for message in training.messages:
        sums_in_backward = message.in_backward and message.collective == "all_reduce"
        # A size that the trace does not tell is 0.
        of_gradients.append(sums_in_backward and message.n_bytes > 0)
    return np.array(of_gradients)


class SlowReferenceError(UserError):
    """A reference by which messages take longer than in the traces."""


def _refuse_slow_reference(training: TracedTraining, reference: MessageCost) -> None:
    """Raise SlowReferenceError if messages take longer by the reference than in the trace.

    The reference is their cost on the idle machine, where nothing else ran beside them. It
    should be no more than the time in the trace, for which `MOST_REFERENCE` allows some
    tolerance.
    """
    # Which messages carry gradients of known size. Only these are compared.
    has_gradients = _of_gradients(training)
    sizes = training.message_bytes[has_gradients]
    traced_s = np.median(training.schedule.message_s, axis=0)[has_gradients]
    reference_s = np.asarray(reference(sizes))
    ratio = float(reference_s.sum() / traced_s.sum())
    if ratio > MOST_REFERENCE:
        advice = "measure the times between the same ranks on the same machines, while these are idle"
        if ratio > OTHER_UNIT_TIMES:
            advice = "check that the times are in seconds"
        raise SlowReferenceError(
            f"by these times, the messages of the traces take {ratio:.2f} times as long as in the "
            "traces, although nothing else should have run while the times were measured: "
            f"{advice}"
        )


class _Costs(NamedTuple):
    """What messages cost by their size, and what other iterations would tell of it.

    Attributes
    ----------
    cost : MessageCost
        The cost.
    resampled : tuple of AlphaBeta
        The cost as it is fitted to each of the bootstrap samples. It is empty for a
        reference, whose cost is given.
    """

    cost: MessageCost
    resampled: tuple[AlphaBeta, ...] = ()


def _costs_of_traced_messages(
    training: TracedTraining, compared: Comparison
) -> _Costs | None:
    """Return what messages cost by their size: a line through those of the trace.

    The cost is a line through the medians over the judged iterations, which are those that the
    explanation is about. For each bootstrap sample of these iterations there is a further line,
    through the medians over the iterations of the sample. The result is None if there are fewer
    than two messages, if one of them typically takes no time, if their sizes are too much alike
    to tell the start-up from the bytes, or if their times do not grow with their sizes.
    """
    # Which messages carry gradients of known size.
    has_gradients = _of_gradients(training)
    sizes = training.message_bytes[has_gradients]
    if len(sizes) < 2 or sizes.max() < LEAST_SIZE_RATIO * sizes.min():
        return None
    # Shape (J, number of messages with gradients).
    message_s = training.schedule.message_s[compared.judged][:, has_gradients]
    typical_s = np.median(message_s, axis=0)
    # The fit divides by these times.
    if not (typical_s > 0).all():
        return None
    cost = _line_through(sizes, typical_s)
    if cost.beta_s_per_byte <= 0:
        return None
    resampled = []
    for sample in compared.resamples:
        medians_s = np.median(message_s[sample], axis=0)
        # A message that takes no time in most iterations of a sample tells nothing there. If
        # fewer than two messages are left, the fit returns the solution of the least norm.
        telling = medians_s > 0
        resampled.append(_line_through(sizes[telling], medians_s[telling]))
    return _Costs(cost, tuple(resampled))


def _with_fitted_startup(
    training: TracedTraining, compared: Comparison
) -> TracedTraining:
    """Return a training with the start-up that a line through its messages has.

    Messages that are under way together share the link, but not their start-ups. What
    messages take alone therefore depends on the start-up, which is fitted to what they
    take alone. Both are computed in turn until the start-up hardly changes. The training
    stays as it is if no line can be fitted.
    """
    startup_s = 0.0
    fitted = training
    # Only one line is needed here, through the medians of all judged iterations, which the
    # explanation is about. Without bootstrap samples, no lines are fitted to samples.
    without_samples = replace(compared, resamples=compared.resamples[:0])
    for _ in range(MOST_FITS):
        costs = _costs_of_traced_messages(fitted, without_samples)
        if costs is None:
            return training
        change_s = abs(costs.cost.startup_s() - startup_s)
        startup_s = costs.cost.startup_s()
        fitted = with_startup(training, startup_s)
        if change_s <= CLOSE_STARTUP * startup_s:
            break
    return fitted


def _gains_by_sample_s(
    costs: _Costs, gains_by_cost: Callable[[MessageCost], Floats]
) -> Floats | None:
    """Return what iterations gain by the cost of each bootstrap sample, shape (SAMPLES, J).

    A bootstrap sample has J iterations, drawn with replacement from the J judged ones, and a cost
    that is fitted to the messages of these. The row of a sample has what each judged iteration,
    drawn or not, gains by some change if messages have the cost of the sample. ``gains_by_cost``
    returns such gains, shape (J,), for a given cost. The result is None if the cost was not fitted.

    To replay the iterations with the cost of every sample would take a minute. So they are
    replayed with a few of these costs only. For each iteration, a plane is fitted to its gains
    by these few costs, linear in the start-up and in the time of a byte. The gains by the costs
    of all samples are read off these planes.
    """
    # The cost of a reference is given, and has no bootstrap samples.
    if not costs.resampled:
        return None
    fitted = costs.cost
    # Only lines through the messages of a trace are resampled.
    assert isinstance(fitted, AlphaBeta)
    # How the start-up and the time of a byte of each sample differ from the fitted ones, each
    # on its own scale, shape (SAMPLES, 2).
    changes = _scaled_changes(fitted, costs.resampled)
    # The planes go through the gains by the fitted cost, so only their slopes are fitted.
    gains_s = gains_by_cost(fitted)
    tried = costs.resampled[:FITS_TRIED]
    changes_of_gains_s = [gains_by_cost(cost) - gains_s for cost in tried]
    # The slopes of the J planes along these two changes, shape (2, J).
    slopes, *_ = np.linalg.lstsq(
        changes[:FITS_TRIED], np.array(changes_of_gains_s), rcond=None
    )
    by_sample_s: Floats = gains_s + changes @ slopes
    return by_sample_s


def _scaled_changes(fitted: AlphaBeta, resampled: Sequence[AlphaBeta]) -> Floats:
    """Return how far the cost of each bootstrap sample is from the fitted one.

    The result has a row for each sample, and two columns: the change of the start-up, and
    the change of the time of a byte. Each column is divided by its standard deviation, which
    brings seconds and seconds per byte to the same scale.
    """
    lines = [(line.alpha_s, line.beta_s_per_byte) for line in resampled]
    changes = np.array(lines) - [fitted.alpha_s, fitted.beta_s_per_byte]
    deviation = changes.std(axis=0)
    # If all iterations are alike, no line differs from the fitted one. The scale of 1 then
    # avoids a division by 0.
    scaled: Floats = changes / np.where(deviation > 0, deviation, 1.0)
    return scaled


def _line_through(sizes: Floats, seconds: Floats) -> AlphaBeta:
    """Return the line through the times of messages by size, both of shape (K,).

    The fit minimises relative errors. Neither the start-up nor the time of a byte is negative.
    """
    # The least-squares solution of (alpha + beta * size) / seconds = 1 for all messages.
    design = np.column_stack([1 / seconds, sizes / seconds])
    (alpha_s, beta_s), *_ = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)
    if alpha_s < 0:
        # Without a start-up, each message tells the time of a byte by itself.
        alpha_s = 0.0
        beta_s = float(np.median(seconds / sizes))
    if beta_s < 0:
        # Without a time of bytes, each message tells the start-up by itself.
        beta_s = 0.0
        alpha_s = float(np.median(seconds))
    return AlphaBeta(float(alpha_s), float(beta_s))


def _most_startup_s(training: TracedTraining, cost: MessageCost) -> Floats:
    """Return the most start-up that each message can have, shape (K,), in seconds.

    What a message takes beyond it is the time of its bytes. Messages that do not carry
    gradients are small and count as start-up alone. So their limit is infinite.
    """
    # A fitted line can have a start-up below 0.
    startup_s = max(0.0, cost.startup_s())
    return np.where(_of_gradients(training), startup_s, math.inf)


def _described_messages(training: TracedTraining) -> tuple[dict[str, Any], ...]:
    """Return the messages of an iteration as `Explanation.messages` lists them.

    The seconds of a message are the median over all iterations of the trace.
    """
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
    training: TracedTraining, compared: Comparison, costs: _Costs | None
) -> Iterator[Remedy]:
    """Yield what can be changed, with what the iteration would take then.

    ``costs`` is what messages cost by their size. Without ``costs``, nothing is known of
    another link and of other buckets.
    """
    schedule = training.schedule
    copies_back = any(
        iteration.copies_back
        for trace in training.traces
        for iteration in trace.iterations
    )
    # Where nothing is copied from buckets back into gradients, the gradients are views of the
    # buckets already. Views save at most all copies, which are taken off here, so the gain is
    # an upper bound.
    if copies_back:
        gains_s = compared.gains_s(_with_less_work(schedule, training.copies_s))
        yield compared.remedy(
            "gradient_as_bucket_view=True", gains_s, is_upper_bound=True
        )
    of_buffers = _sends_buffers(training)
    if of_buffers.any():
        gains_s = compared.gains_s(schedule.without_messages(of_buffers))
        yield compared.remedy("broadcast_buffers=False", gains_s)
    if costs is None:
        return
    # `gains_by_cost` takes a cost of messages, and returns what iterations gain by the link.
    gains_by_cost = partial(_gains_of_link_s, training, compared)
    # The gains by the costs of bootstrap samples give the interval of the remedy.
    by_sample_s = _gains_by_sample_s(costs, gains_by_cost)
    yield compared.remedy(
        "a link of twice the rate", gains_by_cost(costs.cost), by_sample_s=by_sample_s
    )
    yield from _bucket_remedies(training, compared, costs)


def _gains_of_link_s(
    training: TracedTraining, compared: Comparison, cost: MessageCost
) -> Floats:
    """Return what judged iterations gain by a link of twice the rate, shape (J,), in seconds.

    Judged iterations are those that the explanation is about. ``cost`` is what messages
    cost by their size. Twice the rate halves the time of bytes and leaves the start-up. Only
    messages that carry gradients get faster: others count as start-up alone. No iteration gains
    more than without any time of bytes.
    """
    schedule = training.schedule
    current_s = schedule.message_s
    if schedule.in_flight > 1:
        # Messages that are in flight together do not share the link quite equally. So the sum
        # of their times is more certain than the single times. `costed_messages_s` divides the
        # sum for the messages of backward, which carry the gradients, among them according to
        # their cost. The times are changed in a copy, because the schedule is used again below.
        current_s = current_s.copy()
        in_backward = of_backward(training)
        sizes = training.message_bytes[in_backward]
        current_s[:, in_backward] = costed_messages_s(training, cost, sizes)
    # What a message takes beyond the most start-up that it can have is the time of its bytes.
    # This limit is infinite for a message that counts as start-up alone, which has no such time.
    bytes_s = np.maximum(current_s - _most_startup_s(training, cost), 0.0)
    now_s = schedule.with_messages(current_s).replay().iteration_s
    then_s = schedule.with_messages(current_s - bytes_s / 2).replay().iteration_s
    gained_s = (now_s - then_s)[compared.judged]
    # If messages do not follow their cost, an iteration with the divided times can be longer than
    # the traced one, and ``gained_s`` has time that the training has not spent. So the gain is
    # limited to what the traced iteration gains without any time of bytes.
    most_s = _gains_without_s(training, compared, "bandwidth", cost)
    return np.asarray(np.minimum(gained_s, most_s))


def _bucket_remedies(
    training: TracedTraining, compared: Comparison, costs: _Costs
) -> Iterator[Remedy]:
    """Yield the best choices of other buckets, as far as they gain anything.

    ``costs`` is what messages cost by their size. The choices are DDP's default, other caps
    on the size of a bucket, and the best buckets that a list of caps can impose. At most
    `MOST_BUCKETS` of them are yielded.
    """
    buckets = Buckets.of(training, costs.cost)
    if buckets is None:
        # `_findings` says that nothing is known of other buckets.
        return
    plans = _plans_of_other_buckets(buckets)
    # What each judged iteration gains by a plan. Judged iterations are those that the
    # explanation is about.
    gains_s = {
        setting: buckets.gains_s(plan, compared.judged)
        for setting, plan in plans.items()
    }
    medians_s = {setting: np.median(gains) for setting, gains in gains_s.items()}
    by_gain = sorted(medians_s, key=lambda setting: -medians_s[setting])
    for setting in by_gain[:MOST_BUCKETS]:
        if medians_s[setting] > 0:
            # `gains_by_cost` takes a cost of messages, and returns what iterations gain by the plan.
            gains_by_cost = partial(
                _gains_of_plan_s, buckets, plans[setting], compared.judged
            )
            # The gains by the costs of bootstrap samples give the interval of the remedy.
            by_sample_s = _gains_by_sample_s(costs, gains_by_cost)
            yield compared.remedy(setting, gains_s[setting], by_sample_s=by_sample_s)


def _plans_of_other_buckets(buckets: Buckets) -> dict[str, FusionPlan]:
    """Return plans of buckets that DDP can be given, other than those of the training.

    A key is the setting of DDP in words, with the number of messages. Of several settings
    that give the same buckets, only the first is listed.
    """
    plans = {"the default buckets of DDP": ddp(buckets.workload)}
    for cap_mib in CAPS_MIB:
        plans[f"bucket_cap_mb={cap_mib}"] = ddp(buckets.workload, cap_mib * MIB)
    # The plan "exact" has the shortest iteration of all possible buckets.
    plans["the exact buckets (bucket_cap_mb_list)"] = exact(
        buckets.workload, buckets.cost
    )
    # Buckets are the same if they end behind the same gradients.
    listed: list[tuple[int, ...]] = [buckets.current.ends]
    others = {}
    for setting, plan in plans.items():
        if plan.ends not in listed:
            listed.append(plan.ends)
            noun = "message" if len(plan.ends) == 1 else "messages"
            others[f"{setting}: {len(plan.ends)} {noun}"] = plan
    return others


def _gains_of_plan_s(
    buckets: Buckets, plan: FusionPlan, judged: np.ndarray, cost: MessageCost
) -> Floats:
    """Return what judged iterations gain by a plan if messages cost so much, shape (J,)."""
    return replace(buckets, cost=cost).gains_s(plan, judged)


# -- one rank alone --------------------------------------------------------------------


def bounds(trace: RankTrace, iterations: Sequence[int] = ()) -> Explanation:
    """Return bounds of what waiting costs, which is all that one rank's trace tells.

    At least nothing can be gained, if the rank waits for other ranks, which compute all the time.
    At most all waiting can be gained, if all of it is the time of messages.

    Parameters
    ----------
    trace : RankTrace
        The trace.
    iterations : sequence of int, optional
        The numbers of the iterations to judge, which the bounds are about. By default all
        are judged.

    Returns
    -------
    Explanation
        Without a straggler. Its only cause is "waiting". What the rank waited may be the
        time of messages, the delays of other ranks, or both.

    Raises
    ------
    UserError
        If the training had one rank only, or if the trace lacks one of ``iterations``.
    """
    if trace.ranks == 1:
        raise UserError(
            f"{trace.source}: a training of one rank sends no messages: give the traces of a "
            "training of two or more ranks"
        )
    # The trace is replayed as if this rank had trained alone. No message then waits for
    # another rank, so that all waiting counts as time of messages. A replay in which messages
    # take no time then saves all waiting, which is the upper bound. One iteration is enough.
    alone = training_of([replace(trace, rank=0, ranks=1)], least_iterations=1)
    judged = _judged(alone, iterations)
    compared = Comparison.of(alone, judged)
    schedule = alone.schedule
    compute_s = _typical_work_s(schedule, judged)
    # Time that the rank does not work is exposed. `iteration_s` and `compute_s` are medians over
    # iterations, each its own, so that their difference can be below 0.
    exposed_s = max(0.0, compared.iteration_s - compute_s)
    waiting = _waiting(schedule, compared)
    n_judged = int(judged.sum())
    return Explanation(
        iteration_s=compared.iteration_s,
        replay_s=float(np.median(compared.replayed_s)),
        replay_without_lags_s=float(np.median(compared.without_lags_s)),
        compute_s=compute_s,
        exposed_communication_s=exposed_s,
        ranks=trace.ranks,
        iterations=n_judged,
        straggler=None,
        causes=(waiting,),
        waterfall=(),
        remedies=(),
        messages=_described_messages(alone),
        findings=(
            _finding_of_profiler(trace),
            *alone.findings,
            *_findings_of_one_rank(trace, n_judged, most_waiting_s(waiting, n_judged)),
        ),
        device=trace.device,
    )


def _waiting(schedule: Schedule, compared: Comparison) -> Cause:
    """Return the cause "waiting" of a rank whose trace is the only one.

    ``schedule`` is that of the rank as if it had trained alone, so that all its waiting is
    time of messages. The gain is what iterations gain if messages take no time.
    """
    without_messages = schedule.with_messages(np.zeros_like(schedule.message_s))
    gains_s = compared.gains_s(without_messages)
    gain_s = float(np.median(gains_s))
    _, upper_s = compared.interval_s(gains_s)
    return Cause(
        cause="waiting",
        rank=None,
        phase=None,
        gain_share=gain_s / compared.iteration_s,
        iteration_without_s=compared.iteration_s - gain_s,
        gain_s=gain_s,
        # Nothing is gained if the rank only waited for the delays of other ranks.
        gain_interval_s=(0.0, upper_s),
    )


def most_waiting_s(waiting: Cause, n_judged: int) -> float:
    """Return what waiting costs an iteration at most, by the trace of one rank.

    Parameters
    ----------
    waiting : Cause
        The cause "waiting" of that trace.
    n_judged : int
        From how many iterations it follows.

    Returns
    -------
    float
        Seconds: the upper end of the interval of the gain without waiting. Of fewer than
        `LEAST_ITERATIONS` iterations there is no interval, and the gain itself is returned.
    """
    if n_judged < LEAST_ITERATIONS:
        return waiting.gain_s
    _, upper_s = waiting.gain_interval_s
    return upper_s


def _findings_of_one_rank(
    trace: RankTrace, n_judged: int, most_s: float
) -> Iterator[Finding]:
    """Yield what the trace of one rank does not tell.

    ``most_s`` is what waiting costs an iteration at most. It follows from ``n_judged``
    iterations.
    """
    missing = "the traces of the other ranks"
    # A trace that does not say how many ranks there were has 0 for it.
    if trace.ranks == 2:
        missing = "the trace of the other rank"
    elif trace.ranks:
        missing = f"the traces of the other {trace.ranks - 1} of {trace.ranks} ranks"
    text = (
        f"{missing}: waiting costs at most {format_seconds(most_s)} an "
        "iteration, and may be the time of messages or the delays of other ranks"
    )
    yield Finding("not known", text=text)
    yield from _finding_of_few_iterations(n_judged)
