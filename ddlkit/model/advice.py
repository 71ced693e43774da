"""From what computing and messages take to a decision: which buckets, what they gain, and what limits."""

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
from ddlkit.core.link import Link
from ddlkit.core.workload import Floats, Workload
from ddlkit.model.calibration import Communication
from ddlkit.model.predictor import STEADY, drawn, forecast, plan_beside

DEFAULT = "ddp"  # what PyTorch does without being told
CAPS = tuple(f"ddp:{mib}MiB" for mib in (1, 2, 5, 10, 50, 100))  # bucket_cap_mb
LISTS = ("exact", "mg_wfbp", "search")  # that only bucket_cap_mb_list can impose
KEEP = "keep the default"
WORTH = 0.02  # a gain whose interval begins below is not worth a change
WIDE = 0.03  # half an interval of the gain: from here on another measurement would help
MISSED = 0.03  # standard deviation of what predicted gains missed beyond noise in campaign-training
HUGE = 0.5  # of all bytes: then one tensor decides, which no plan can split


class Option(NamedTuple):
    """A plan, and (B,) draws of its iteration, the same for every option.

    settled_s : in the long run; single_s : of one; beside_s : of one, but for what it shares with the next
    """

    name: str
    iteration: Iteration
    settled_s: Floats
    single_s: Floats
    beside_s: Floats

    @property
    def seconds(self) -> float:
        """Return the predicted iteration."""
        return self.iteration.prediction.iteration_s

    def summary(self) -> dict[str, Any]:
        """Return its times, with the interval of a single iteration, JSON-ready."""
        said = self.iteration.prediction
        names = ("iteration_s", "exposed_communication_s", "scaling_factor")
        messages = len(self.iteration.plan.ends)
        more = {"interval_s": interval(self.single_s).tolist(), "messages": messages}
        return {name: getattr(said, name) for name in names} | more


class Gain(NamedTuple):
    """How much shorter an iteration is than the default's, as a share; slower : probability it is not."""

    share: float
    interval: Sequence[float]
    slower: float


@dataclass(frozen=True, eq=False)
class Advice:
    """Options by name, the default first, for a workload and what its messages take."""

    workload: Workload
    communication: Communication
    options: Mapping[str, Option]

    @classmethod
    def of(
        cls,
        work: Workload,
        messages: Communication,
        scatter: Floats = STEADY,
        lists: bool = True,
    ) -> Advice:
        """Return every option; of plans that come out the same, the first.

        scatter : as ``compute_scatter`` of `forecast`; lists : whether any plan can be imposed, not
        bucket_cap_mb alone. Raises UserError for a cost without draws: it has no interval.
        """
        if not messages.draws:
            raise UserError("a cost without draws has no interval: give --collectives")
        options: dict[tuple[int, ...], Option] = {}
        apart = 1 + np.diff(scatter) / math.sqrt(2) if len(scatter) > 2 else scatter
        for name in (DEFAULT, *CAPS, *(LISTS if lists else ())):
            plan = plan_beside(name, work, messages)
            if plan.ends not in options:
                made = forecast(work, plan, messages).iteration
                settled_s, _ = drawn(made, messages, scatter=False)
                single_s, beside_s = (
                    drawn(made, messages, by)[0] for by in (scatter, apart)
                )
                options[plan.ends] = Option(name, made, settled_s, single_s, beside_s)
        return cls(work, messages, {option.name: option for option in options.values()})

    @cached_property
    def ranked(self) -> list[Option]:
        """Return all options, the shortest iteration first, and the default before its equals."""
        return sorted(self.options.values(), key=lambda option: option.seconds)

    def gain(self, option: Option, rounds: int = 0, each: int = 1) -> Gain:
        """Return what an option gains, by the draws of its costs alone.

        rounds, each : of a measurement, if any, and iterations of both in a round: the interval then holds
            what those would measure, with their noise and with what the model is wrong by
        """
        default = self.options[DEFAULT]
        draws = 1 - option.settled_s / default.settled_s
        share = 1 - option.seconds / default.seconds
        if rounds and option is not default:
            both = option, default
            single = (np.quantile(o.beside_s / o.settled_s, (0.16, 0.84)) for o in both)
            # Medians of normal noise, of a few and of many, scatter 1.18 and 1.25 times as much as means.
            noise = (
                1.18
                * math.hypot(*(np.ptp(ends) / 2 for ends in single))
                / math.sqrt(rounds)
            )
            apart = np.hypot(
                (1 - draws) * noise * min(1.0, 1.25 / math.sqrt(each)), MISSED
            )
            draws = draws + apart * np.random.default_rng(3).standard_normal(len(draws))
        return Gain(float(share), interval(draws).tolist(), float((draws < 0).mean()))

    def limits(self) -> tuple[str, dict[str, float]]:
        """Return what takes most of the default's exposed communication, and seconds by cause."""
        iteration, sizes = self.options[DEFAULT].iteration, self.workload.bytes
        said, link = (
            iteration.prediction,
            Link(iteration.link.in_flight, iteration.link.software),
        )
        least_s = float(self.communication.cost(np.array([1.0]))[0])
        starts_s = min(said.communication_s, least_s * len(iteration.plan.ends))
        slowed_s = (
            said.iteration_s - replace(iteration, link=link).prediction.iteration_s
        )
        causes = {"start-ups": starts_s, "bandwidth": said.communication_s - starts_s}
        causes["contention"] = max(0.0, slowed_s)
        if said.exposed_communication_s < WORTH * said.iteration_s:
            return "compute", causes
        most = max(causes, key=causes.__getitem__)
        if most == "bandwidth" and sizes.max() > HUGE * sizes.sum():
            most = f"one huge tensor, {self.workload.tensor[int(sizes.argmax())]}"
        return most, causes

    def remedies(self) -> dict[str, float]:
        """Return, by remedy, by what share an iteration of as many samples would be shorter."""
        work, now_s = self.workload, self.options[DEFAULT].seconds
        halved = replace(work, bytes=np.maximum(1, work.bytes // 2))
        twice = replace(
            work, forward_s=2 * work.forward_s, backward_s=2 * work.backward_s
        )
        tried: dict[str, tuple[Workload, int]] = {
            "gradients in half the bytes, or a link twice as fast": (halved, 1),
            "gradients of two batches sent at once": (work.accumulated(2), 2),
            "twice the batch, if that computes twice as long": (twice, 2),
        }
        better = {"another plan": 1 - self.ranked[0].seconds / now_s}
        for name, (other, batches) in tried.items():
            plan = plan_beside(DEFAULT, other, self.communication)
            took_s = forecast(other, plan, self.communication).prediction.iteration_s
            better[name] = 1 - took_s / batches / now_s
        return better | {"no communication at all": 1 - work.compute_s / now_s}

    def measure_next(self) -> int:
        """Return bytes of the message that makes most of the doubt about the gain; 0: there is little."""
        if np.ptp(self.gain(self.ranked[0]).interval) < 2 * WIDE:
            return 0
        sent = [
            o.iteration.group_bytes for o in (self.options[DEFAULT], self.ranked[0])
        ]
        sizes, counts = np.unique(np.concatenate(sent), return_counts=True)
        unsure_s = (
            np.std([cost(sizes) for cost in self.communication.draws], axis=0) * counts
        )
        return int(sizes[np.argmax(unsure_s)])

    def to_dict(self, rounds: int = 0, each: int = 1) -> dict[str, Any]:
        """Return all of it, JSON-ready; rounds, each : as `gain` takes them, for its interval."""
        best, gains = (
            self.ranked[0],
            {option.name: self.gain(option) for option in self.ranked},
        )
        worth, said = (
            gains[best.name].interval[0] >= WORTH,
            self.gain(best, rounds, each),
        )
        limit, causes = self.limits()
        return {
            "advice": best.name if worth else KEEP,
            "best": best.name,
            "gain": said.share,
            "gain_interval": list(said.interval),
            "probability_slower": gains[best.name].slower,
            "default_plan": self.options[DEFAULT].summary(),
            "best_plan": best.summary(),
            "limited_by": limit,
            "seconds_by_cause": causes,
            "shorter_by": self.remedies(),
            "measure_next_bytes": self.measure_next(),
            "options": {
                name: [gain.share, *gain.interval] for name, gain in gains.items()
            },
        }


def measured_gain(seconds: Mapping[str, Sequence[float] | Floats], plan: str) -> Gain:
    """Return what a plan gained on the default, by (rounds,) seconds of each in turn, six at least.

    It is the median of pairs, its interval that of order statistics; slower : in how many rounds it was.
    """
    shares = 1 - np.asarray(seconds[plan]) / np.asarray(seconds[DEFAULT])
    return Gain(
        float(np.median(shares)), median_interval(shares), float((shares < 0).mean())
    )
