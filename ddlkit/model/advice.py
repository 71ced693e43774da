"""From measured times to a decision: which buckets to use, what they gain, what limits.

Every plan that PyTorch's DistributedDataParallel can be given is predicted under the
same draws of what is uncertain. The gain of a plan over the default therefore has an
interval of its own, which is narrower than a comparison of two intervals would say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.core.fit import interval, median_interval
from ddlkit.core.iteration import Iteration
from ddlkit.core.sparse import SparseGather
from ddlkit.core.workload import Floats, Workload
from ddlkit.model.calibration import Communication
from ddlkit.model.predictor import (
    STEADY,
    draw_iterations,
    forecast,
    plan_with_contention,
)

DEFAULT = "ddp"
"""The plan of PyTorch's defaults."""

CAPS = tuple(f"ddp:{mib}MiB" for mib in (1, 2, 5, 10, 50, 100))
"""Plans that the option ``bucket_cap_mb`` can impose."""

LISTS = ("exact", "mg_wfbp", "search")
"""Plans that only the option ``bucket_cap_mb_list`` can impose."""

KEEP = "keep the default"
"""The advice if no plan is worth a change."""

ANOTHER_PLAN = "another plan"
"""The remedy that is the best plan in place of the default."""
HALF_THE_BYTES = "gradients in half the bytes"
"""The remedy that sends gradients in numbers of half the size."""

WORTH = 0.02
"""The least lower end of a gain's interval for which a change is worth its effort."""

WIDE = 0.03
"""The half-width of a gain's interval from which on another measurement would help."""

MODEL_ERROR = 0.03
"""The standard deviation of the errors of predicted gains beyond noise.

It was estimated from the recorded campaign of real training.
"""

HUGE = 0.5
"""From this share of all bytes on, one tensor limits, because no plan can split it."""

ROUNDING = 1e-9
"""A gain up to this share is the rounding of numbers, and counts as 0."""

ONE_DEVIATION = (0.16, 0.84)
"""The quantiles at one standard deviation below and above the mean of normal noise."""


class Option(NamedTuple):
    """A plan, and B draws of its iteration.

    Draw b of every option has the same random cost, noise and contention, so that two
    options can be compared draw by draw.

    Attributes
    ----------
    name : str
        The name of the plan.
    iteration : Iteration
        The predicted iteration under this plan.
    long_run_s : ndarray, shape (B,)
        The mean of many iterations, in seconds. Messages may take longer or shorter than
        predicted, but the scatter from message to message averages out.
    single_s : ndarray, shape (B,)
        Single iterations in seconds: messages and compute also scatter.
    paired_s : ndarray, shape (B,)
        Single iterations in seconds for a comparison with an iteration that follows at
        once: without the slow changes of compute that both share.
    """

    name: str
    iteration: Iteration
    long_run_s: Floats
    single_s: Floats
    paired_s: Floats

    @property
    def seconds(self) -> float:
        """Return the predicted iteration in seconds."""
        return self.iteration.prediction.iteration_s

    def summary(self) -> dict[str, Any]:
        """Return the times of the option, ready for JSON.

        Returns
        -------
        dict
            The name of the plan, the predicted times in seconds, the 95% interval of a
            single iteration, the scaling factor, which is the time of compute divided by
            that of the iteration, and the number of messages.
        """
        predicted = self.iteration.prediction
        # A plan states where each of its messages ends.
        n_messages = len(self.iteration.plan.ends)
        return {
            "plan": self.name,
            "predicted_iteration_s": predicted.iteration_s,
            "predicted_interval_s": interval(self.single_s).tolist(),
            "exposed_communication_s": predicted.exposed_communication_s,
            "scaling_factor": predicted.scaling_factor,
            "message_count": n_messages,
        }


class Gain(NamedTuple):
    """How much shorter an iteration is than the default's.

    Attributes
    ----------
    share : float
        The gain as a share of the default's iteration; negative for a longer iteration.
    interval : sequence of float, length 2
        The lower and the upper end of the gain.
    slower_share : float
        The share of draws, or of measured rounds, in which the iteration is longer than
        the default's.
    """

    share: float
    interval: Sequence[float]
    slower_share: float


@dataclass(frozen=True, eq=False)
class Advice:
    """Plans for a workload, and what each of them would gain.

    Attributes
    ----------
    workload : Workload
        What one iteration computes.
    communication : Communication
        What is known of its messages.
    options : mapping of str to Option
        Options by the names of their plans, the default first.
    copy_s_per_byte : float
        Seconds per byte to copy gradients into and out of messages, unless the contention of
        ``communication`` has a measured value.
    """

    workload: Workload
    communication: Communication
    options: Mapping[str, Option]
    copy_s_per_byte: float = 0.0

    @classmethod
    def of(
        cls,
        work: Workload,
        messages: Communication,
        scatter: Floats = STEADY,
        lists: bool = True,
        copy_s_per_byte: float = 0.0,
    ) -> Advice:
        """Return the advice on a workload, with every plan that PyTorch can be given.

        Parameters
        ----------
        work : Workload
            What one iteration computes, without the selections of gradients that the cost of
            messages may have.
        messages : Communication
            What is known of the messages, with draws of their cost.
        scatter : ndarray, shape (n,), optional
            The times of successive iterations of one worker alone, each divided by their
            median. By default, compute does not scatter.
        lists : bool, optional
            Whether PyTorch has the option ``bucket_cap_mb_list``, which can impose any
            plan.
        copy_s_per_byte : float, optional
            Seconds per byte to copy gradients into and out of messages, unless the contention
            of ``messages`` has a measured value.

        Returns
        -------
        Advice
            One option for each distinct plan. Of names for equal plans, the first is
            kept.

        Raises
        ------
        UserError
            If the cost has no draws, because a gain would then have no interval.

        Examples
        --------
        Forty small gradients, and messages with a start-up of one millisecond:

        >>> from ddlkit.core.cost import AlphaBeta
        >>> layers = Workload.from_arrays(0.02, [0.001] * 40, [300_000] * 40)
        >>> costs = [AlphaBeta(0.001 * x, 2e-9 * x, workers=2) for x in (0.9, 1, 1.1)]
        >>> advice = Advice.of(layers, Communication(costs[1], draws=costs))
        >>> best = advice.ranked[0]
        >>> best.name, round(advice.gain(best).share, 2), advice.limits()[0]
        ('exact', 0.24, 'bandwidth')
        """
        if not messages.draws:
            raise UserError(
                "the cost of messages has no draws, so that a gain would have no "
                "interval: fit a cost to times of more sizes"
            )
        names = [DEFAULT, *CAPS]
        # The planners of LISTS ("exact" and others) put gradients of any type into one
        # message, but PyTorch applies a list of caps to each type anew.
        if lists and not work.has_several_types:
            names.extend(LISTS)
        # Several names may stand for the same buckets, such as all caps above the bytes of
        # a small model. Plans are equal if they fill their buckets in the same order, and
        # end them at the same gradients.
        option_by_buckets: dict[tuple[tuple[int, ...], ...], Option] = {}
        for name in names:
            # If messages and compute slow each other down, the plan "search" allows for it.
            plan = plan_with_contention(name, work, messages)
            buckets = (plan.ends, plan.order)
            if buckets not in option_by_buckets:
                iteration = forecast(
                    work, plan, messages, copy_s_per_byte=copy_s_per_byte
                ).iteration
                option_by_buckets[buckets] = _option(name, iteration, messages, scatter)
        options = {option.name: option for option in option_by_buckets.values()}
        return cls(work, messages, options, copy_s_per_byte)

    @cached_property
    def ranked(self) -> list[Option]:
        """Return all options by their gains, the largest first.

        Among options with equal gains, the default comes first.
        """
        # The default is the first of the options, and `sorted` keeps the order of equals.
        return sorted(self.options.values(), key=lambda option: -self._share(option))

    def _share(self, option: Option) -> float:
        """Return the predicted gain of an option over the default, as a share."""
        share = 1 - option.seconds / self.options[DEFAULT].seconds
        return float(_without_rounding_errors(share))

    def gain(
        self, option: Option, rounds: int = 0, iterations_per_round: int = 1
    ) -> Gain:
        """Return what an option gains over the default.

        Parameters
        ----------
        option : Option
            One of ``options``.
        rounds : int, optional
            The number of rounds of a measurement that compares the two plans. By
            default (0) there is no measurement, and the interval holds for the gain in
            the long run.
        iterations_per_round : int, optional
            The number of iterations of each plan in a round. Without ``rounds``, it
            is ignored.

        Returns
        -------
        Gain
            The predicted gain, its 95% interval, and the share of draws in which the
            option is slower than the default. With ``rounds``, the interval is one for
            the gain that the measurement will find. It is then wider, by the noise of
            the measurement and by the error of the model.
        """
        default = self.options[DEFAULT]
        # ``long_run_s`` has random draws of the mean of many iterations, and draw b of both
        # options has the same cost and contention. So each draw gives a gain. Rounding errors
        # become 0, because one below 0 would count as slower.
        gain_draws = _without_rounding_errors(
            1 - option.long_run_s / default.long_run_s
        )
        # The default is not compared with itself, so its gain of 0 has no error.
        if rounds and option is not default:
            gain_draws = gain_draws + self._measurement_error(
                option, gain_draws, rounds, iterations_per_round
            )
        # The gain is that of the two predicted iterations (`Option.seconds`). The draws only
        # say how uncertain it is.
        return Gain(
            share=self._share(option),
            interval=interval(gain_draws).tolist(),
            slower_share=float((gain_draws < 0).mean()),
        )

    def _measurement_error(
        self,
        option: Option,
        gain_draws: Floats,
        rounds: int,
        iterations_per_round: int,
    ) -> Floats:
        """Return random differences between a measured gain and each of the B drawn gains.

        A measured gain differs from the predicted one by the noise of the measurement, and
        by the error of the model, MODEL_ERROR. The measurement compares ``option`` with
        the default in ``rounds`` rounds, each of ``iterations_per_round`` iterations of
        both. ``gain_draws``, shape (B,), are the drawn gains without these differences. The
        differences are normal, and the result has the shape (B,). Their standard deviation is

            hypot((1 - gain) * noise of the ratio of two times, MODEL_ERROR).

        A gain is 1 minus the time of the option over the time of the default. The noise
        of this ratio is relative to the ratio, which is 1 - gain.
        """
        # The noise of the ratio of two single iterations. The noise of both times adds up
        # as the root of squares.
        single_noise = math.hypot(
            _relative_deviation(option), _relative_deviation(self.options[DEFAULT])
        )
        # A round's time is the median of its iterations, and the gain is the median
        # over rounds. The median of normal noise scatters more than the mean: 1.18
        # times as much for a few values, such as rounds, and 1.25 times as much for
        # many values, such as iterations.
        ratio_noise = 1.18 * single_noise / math.sqrt(rounds)
        # The minimum is for one iteration in a round. The median is then the iteration itself,
        # whose noise has the factor 1 and not 1.25.
        ratio_noise *= min(1.0, 1.25 / math.sqrt(iterations_per_round))
        deviation = np.hypot((1 - gain_draws) * ratio_noise, MODEL_ERROR)
        # A fixed seed, so that equal tables give equal intervals.
        normal = np.random.default_rng(3).standard_normal(len(gain_draws))
        return deviation * normal

    def limits(self) -> tuple[str, dict[str, float]]:
        """Return what limits the default plan: compute, or a cause of communication.

        Returns
        -------
        limit : str
            "compute" if hardly any communication is exposed. Otherwise the cause with
            the most seconds. "bandwidth" is replaced by "one huge tensor" and its name,
            if one tensor has more than the share `HUGE` of all bytes.
        seconds : dict of str to float
            Seconds of an iteration by cause: "start-ups", "bandwidth", "contention".
        """
        predicted = self.options[DEFAULT].iteration.prediction
        seconds = self._seconds_by_cause()
        # If so little communication is exposed, even its removal would not be worth a change.
        if predicted.exposed_communication_s < WORTH * predicted.iteration_s:
            return "compute", seconds
        limit = max(seconds, key=lambda cause: seconds[cause])
        sizes = self.workload.bytes
        # No plan can split a tensor.
        if limit == "bandwidth" and sizes.max() > HUGE * sizes.sum():
            limit = f"one huge tensor, {self.workload.tensor[int(sizes.argmax())]}"
        return limit, seconds

    def _seconds_by_cause(self) -> dict[str, float]:
        """Return the seconds of an iteration with the default plan by cause of communication.

        The causes are the start-ups of messages, bandwidth, which is the time of their
        bytes, and contention, by which messages and compute slow each other down.
        """
        iteration = self.options[DEFAULT].iteration
        predicted = iteration.prediction
        n_messages = len(iteration.plan.ends)
        # The times of all messages, without contention. Messages that compute hides count, too,
        # so that the causes do not add up to the iteration.
        communication_s = predicted.communication_s
        # Not every form of cost has a parameter for the start-up. The cost of one byte
        # is nearly the start-up, because a byte takes hardly any time of the link.
        startup_s = float(self.communication.cost(np.array([1.0]))[0])
        # Start-ups are a part of communication, so they cannot take longer.
        startups_s = min(communication_s, startup_s * n_messages)
        # The iteration without contention.
        unslowed_link = replace(iteration.link, slowdown=0.0, message_slowdown=0.0)
        unslowed = replace(iteration, link=unslowed_link).prediction
        return {
            "start-ups": startups_s,
            "bandwidth": communication_s - startups_s,
            # Slowdowns only lengthen an iteration, so a difference below 0 counts as none.
            "contention": max(0.0, predicted.iteration_s - unslowed.iteration_s),
        }

    def remedies(self) -> dict[str, float]:
        """Return the gain of the best plan, and of changes other than a plan.

        Returns
        -------
        dict of str to float
            By remedy, in words: the share by which the time for each sample would be
            shorter. It is negative if the time would be longer.
        """
        work = self.workload
        default = self.options[DEFAULT]
        twice_the_batch = replace(
            work, forward_s=2 * work.forward_s, backward_s=2 * work.backward_s
        )
        two_batches_sent_at_once = work.accumulated(2)
        gains = {
            ANOTHER_PLAN: 1 - self.ranked[0].seconds / default.seconds,
            "a link twice as fast": self._gain_of_faster_link(),
            # DDP puts more gradients of half the bytes into a bucket, so that the plan is
            # made anew.
            HALF_THE_BYTES: self._gain_of_workload(_with_half_the_bytes(work)),
            "gradient accumulation over twice as many batches, which also saves every other update": (
                self._gain_of_workload(two_batches_sent_at_once, batches=2)
            ),
            "twice the batch, if compute then takes twice as long, which halves the updates": (
                self._gain_of_workload(twice_the_batch, batches=2)
            ),
            # Selections of gradients count as compute.
            "no communication at all": 1 - default.iteration.prediction.scaling_factor,
        }
        # If gradients are selected, they are modelled in fp32 alone, and not in half the bytes.
        if self.communication.cost.selects:
            del gains[HALF_THE_BYTES]
        return {
            remedy: float(_without_rounding_errors(gain))
            for remedy, gain in gains.items()
        }

    def _gain_of_faster_link(self) -> float:
        """Return the share by which an iteration is shorter over a link twice as fast.

        Such a link is modelled as half the bytes in the present buckets, with unchanged
        start-ups.
        """
        default = self.options[DEFAULT]
        # The compute of this workload includes the selections of gradients, if there are any,
        # which take as long as over the present link. So the cost must not add them again.
        selecting = default.iteration.workload
        communication = self.communication
        if isinstance(communication.cost, SparseGather):
            cost = replace(communication.cost, selecting=None)
            communication = replace(communication, cost=cost)
        faster = forecast(
            _with_half_the_bytes(selecting),
            default.iteration.plan,
            communication,
            copy_s_per_byte=self.copy_s_per_byte,
        )
        return 1 - faster.prediction.iteration_s / default.seconds

    def _gain_of_workload(self, changed: Workload, batches: int = 1) -> float:
        """Return the share by which a changed workload takes less time per batch.

        An iteration of the changed workload has the samples of ``batches`` batches. Its
        gradients are sent in the buckets of PyTorch's defaults.
        """
        plan = plan_with_contention(DEFAULT, changed, self.communication)
        predicted = forecast(
            changed, plan, self.communication, copy_s_per_byte=self.copy_s_per_byte
        ).prediction
        return 1 - predicted.iteration_s / batches / self.options[DEFAULT].seconds

    def measure_next(self) -> int | None:
        """Return the size of the messages that should be measured next, in bytes.

        Returns
        -------
        int or None
            The size that contributes most to the uncertainty of the best gain, or None
            if the half-width of the interval of that gain is below `WIDE`.
        """
        best = self.ranked[0]
        # `np.ptp` is the whole width of the interval, hence the factor of 2.
        if np.ptp(self.gain(best).interval) < 2 * WIDE:
            return None
        # The size of each message of the two plans that are compared.
        sent_bytes = np.concatenate(
            [self.options[DEFAULT].iteration.group_bytes, best.iteration.group_bytes]
        )
        # A size counts as often as the two plans send messages of it.
        sizes, counts = np.unique(sent_bytes, return_counts=True)
        # One row for each draw of the cost, and one column for each size.
        draws_s = [cost(sizes) for cost in self.communication.draws]
        # How far the draws of all messages of a size together differ.
        uncertainty_s = np.std(draws_s, axis=0) * counts
        most_uncertain = sizes[np.argmax(uncertainty_s)]
        # Of selected gradients, the collective sends fewer bytes than the bucket has.
        return int(self.communication.cost.collective_bytes(most_uncertain))

    def to_dict(self, rounds: int = 0, iterations_per_round: int = 1) -> dict[str, Any]:
        """Return the whole advice, ready for JSON.

        Parameters
        ----------
        rounds : int, optional
            The number of rounds of a trial that compares the best option with the
            default. The result then has the entry "predicted_gain_interval_in_trial", an
            interval of the gain that the trial should measure. By default (0), there is
            no trial.
        iterations_per_round : int, optional
            The number of iterations of each plan in a round.

        Returns
        -------
        dict
            The advice, which is the name of a plan or "keep the default", the best
            option with its gain, what limits the default, what else would help, the size
            of messages to measure next, and the gains of all options. All gains but that
            of the trial are gains in the long run.
        """
        best = self.ranked[0]
        gains_of_plans = {
            option.name: _predicted(self.gain(option)) for option in self.ranked
        }
        # Its entries are the gain, its interval, and the probability of a slower iteration.
        gain_of_best = gains_of_plans[best.name]
        # The interval of the gain in the long run decides what to advise.
        least_gain, _ = gain_of_best["predicted_gain_interval"]
        worth_a_change = least_gain >= WORTH
        limit, _ = self.limits()
        result = {
            "advice": best.name if worth_a_change else KEEP,
            "predicted_best": best.name,
            **gain_of_best,
            "default_plan": self._summary_of_default(),
            "best_plan": best.summary(),
            "limited_by": limit,
            # Some remedies change how many samples an iteration has.
            "time_per_sample_shorter_by": self.remedies(),
            "measure_next_bytes": self.measure_next(),
            "gains_of_plans": gains_of_plans,
        }
        if rounds:
            # This interval is wider, because a trial has noise.
            in_trial = self.gain(best, rounds, iterations_per_round)
            result["predicted_gain_interval_in_trial"] = list(in_trial.interval)
        return result

    def _summary_of_default(self) -> dict[str, Any]:
        """Return the times of the default plan with its seconds by cause, ready for JSON."""
        seconds_by_cause: dict[str, float | None] = {**self._seconds_by_cause()}
        contention = self.communication.contention
        if contention is None or not contention.is_measured:
            # By how much messages and compute slow each other down was not measured. The
            # prediction takes 0 for it, which would look as if it had been.
            seconds_by_cause["contention"] = None
        summary = self.options[DEFAULT].summary()
        summary["seconds_by_cause"] = seconds_by_cause
        return summary


def _with_half_the_bytes(workload: Workload) -> Workload:
    """Return a workload whose gradients have half the bytes."""
    # A gradient in a workload has at least one byte.
    return replace(workload, bytes=np.maximum(1, workload.bytes // 2))


def _relative_deviation(option: Option) -> float:
    """Return the standard deviation of single iterations, relative to the mean of many.

    The single iterations are ``option.paired_s``, without the slow changes of compute.
    Iterations of two plans that are compared follow each other at once, and share these
    changes.
    """
    # Both arrays have one iteration for each draw of the cost of messages: a single one, and
    # the mean of many. The same messages cost the same in both, so the ratio has only the
    # noise of a single iteration.
    relative = option.paired_s / option.long_run_s
    # The quantiles one standard deviation below and above the mean of normal noise are two
    # deviations apart.
    lower, upper = np.quantile(relative, ONE_DEVIATION)
    return float((upper - lower) / 2)


def _predicted(gain: Gain) -> dict[str, Any]:
    """Return a predicted gain in the long run, ready for JSON."""
    return {
        "predicted_gain": gain.share,
        "predicted_gain_interval": list(gain.interval),
        "probability_slower": gain.slower_share,
    }


def _without_rounding_errors(gain: Any) -> Any:
    """Return a gain, or an array of gains, in which 0 replaces mere rounding errors.

    A plan that is as fast as the default would otherwise gain or lose by rounding. Other
    values are not changed. The result is an array, of no dimensions for a single gain.
    """
    return np.where(np.abs(gain) < ROUNDING, 0.0, gain)


def _option(
    name: str, iteration: Iteration, messages: Communication, scatter: Floats
) -> Option:
    """Return an option with the draws of its iteration.

    Parameters
    ----------
    name : str
        The name of the plan.
    iteration : Iteration
        The predicted iteration under this plan.
    messages : Communication
        What is known of the messages, with draws of their cost.
    scatter : ndarray, shape (n,)
        The times of successive iterations of one worker, each divided by their median.
    """
    # `paired_scatter` has factors about 1 as `scatter` does, but without slow changes of
    # compute. It is for two plans that are measured in turn, whose iterations follow each other
    # at once, so that such a change hardly differs between them.
    paired_scatter = scatter
    # At least two differences are needed, and so three times. Steady compute has a single time.
    if len(scatter) >= 3:
        # A slow change hardly differs between successive times either, and so cancels in their
        # differences. The difference of two independent times scatters sqrt(2) times as much as
        # one time.
        paired_scatter = 1 + np.diff(scatter) / math.sqrt(2)
    # The second result, the drift of compute in each draw, is not needed. In the mean of
    # many iterations, the scatter of messages and of compute averages out.
    long_run_s, _ = draw_iterations(iteration, messages, message_scatter=False)
    single_s, _ = draw_iterations(iteration, messages, compute_scatter=scatter)
    paired_s, _ = draw_iterations(iteration, messages, compute_scatter=paired_scatter)
    return Option(
        name, iteration, long_run_s=long_run_s, single_s=single_s, paired_s=paired_s
    )


def is_supported(measured: Gain) -> bool:
    """Return whether a trial supports a change from the default to a plan.

    A trial measures the plan and the default in turn, round by round.

    Parameters
    ----------
    measured : Gain
        The gain of the plan over the default in its own trial.

    Returns
    -------
    bool
        True if the plan is surely faster, because the interval of the gain lies above
        zero, and if its gain may be worth a change, because the interval does not end
        below `WORTH`.

    Examples
    --------
    Two gains of 4%, of which only the first has an interval above zero:

    >>> is_supported(Gain(0.04, (0.01, 0.06), 0.0))
    True
    >>> is_supported(Gain(0.04, (-0.01, 0.06), 0.1))
    False
    """
    lower, upper = measured.interval
    return lower > 0 and upper >= WORTH


def is_decided(measured: Gain) -> bool:
    """Return whether further rounds of a trial could hardly change its result.

    A trial measures a plan and the default in turn, round by round.

    Parameters
    ----------
    measured : Gain
        The gain of the plan over the default in the rounds so far.

    Returns
    -------
    bool
        True if the plan is surely faster, because the interval of the gain lies above
        zero, or if the gain is surely not worth a change of the plan, because the
        interval ends below `WORTH`.
    """
    lower, upper = measured.interval
    return lower > 0 or upper < WORTH


GAIN_WAS_MEASURED = "the gain was measured"
"""The result of a trial that supports a change from the default to a plan."""


def trial_result(measured: Gain) -> str:
    """Return the result of the trial of a plan, in words.

    A trial measures the plan and the default in turn, round by round.

    Parameters
    ----------
    measured : Gain
        The gain of the plan over the default in its own trial.

    Returns
    -------
    str
        A clause without a full stop, as in "no difference could be measured".
    """
    _, upper = measured.interval
    # A plan is supported if its interval begins above zero and ends at `WORTH` or above.
    if is_supported(measured):
        return GAIN_WAS_MEASURED
    if upper < 0:
        return "the plan was measured to be slower"
    # If no gain in the interval is worth a change, the gain itself says which of these it is.
    if upper < WORTH:
        if measured.share <= 0:
            return "no gain was measured"
        return f"the measured gain is below {WORTH:.0%}"
    # The interval ends at `WORTH` or above. So it does not begin above zero, because the plan
    # would be supported otherwise. It contains both zero and gains that are worth a change.
    return "no difference could be measured"


def measured_gain(seconds: Mapping[str, Sequence[float] | Floats], plan: str) -> Gain:
    """Return what a plan gained over the default in a measurement.

    Parameters
    ----------
    seconds : mapping of str to array_like, shape (rounds,)
        The time of an iteration in each round, by the name of the plan. The plans were
        measured in turn in each round. There must be six rounds at least, or the
        interval is infinite.
    plan : str
        The plan that is compared with the default.

    Returns
    -------
    Gain
        The median of the gains of all rounds, with a confidence interval of the median
        for any distribution, whose ends are two of the gains. ``slower_share`` is the
        share of rounds in which the plan was slower.

    Examples
    --------
    >>> seconds = {"ddp": [1.0, 1.1, 1.0, 1.2, 1.0, 1.0], "exact": [0.9] * 6}
    >>> gain = measured_gain(seconds, "exact")
    >>> round(gain.share, 2), np.round(gain.interval, 2).tolist(), gain.slower_share
    (0.1, [0.1, 0.25], 0.0)
    """
    shares = 1 - np.asarray(seconds[plan]) / np.asarray(seconds[DEFAULT])
    return Gain(
        share=float(np.median(shares)),
        interval=median_interval(shares),
        slower_share=float((shares < 0).mean()),
    )
