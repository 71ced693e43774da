"""What one message costs: forms of the function bytes -> seconds, each a frozen dataclass.

Forms of any cost share checked parameters, and a JSON description that reads back to the same cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError, shown
from ddlkit.core.schedule import STEPS, Schedule
from ddlkit.core.units import KIB, LEAST, MOST
from ddlkit.core.workload import Floats

MOST_WORKERS = 100_000
"""Of a cost: more than any machine has GPUs."""
UNDESCRIBED = {"described": False}
"""Metadata of a field that is no part of a form's JSON description."""


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """A formula with a name and parameters: keyword-only fields say what it holds for."""

    form: ClassVar[str]

    def __post_init__(self) -> None:
        self._check_numbers(*parameters(type(self)))

    def _check_numbers(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            real = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            if not real or not np.isfinite(value):
                raise UserError(
                    f"{self.form} cost: {name} is {shown(value)}: must be a finite number"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: ``form``, its unit-named parameters, and what is known of what it holds for."""
        values = {f.name: getattr(self, f.name) for f in _described(type(self))}
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
        return {"form": self.form, **{k: v for k, v in plain.items() if v is not None}}

    def _freeze(self, *names: str) -> None:
        """Make the named fields read-only float vectors of one common length."""
        arrays = [np.array(getattr(self, name), dtype=float) for name in names]
        if any(
            a.ndim != 1 or a.shape != arrays[0].shape or not np.all(np.isfinite(a)) for a in arrays
        ):
            raise UserError(
                f"{self.form} cost: {' and '.join(names)} must be lists of equal length, all finite"
            )
        for name, array in zip(names, arrays, strict=True):
            array.setflags(write=False)
            object.__setattr__(self, name, array)


F = TypeVar("F", bound=Form)


def _described(kind: type[Form]) -> list[Field[Any]]:
    return [f for f in fields(kind) if f.metadata.get("described", True)]


def parameters(kind: type[Form]) -> tuple[str, ...]:
    """Names of a form's parameters, without what it holds for."""
    return tuple(f.name for f in fields(kind) if not f.kw_only)


def from_dict(description: Any, forms: Mapping[str, type[F]]) -> F:
    """The cost that ``to_dict`` described; what ``Fit.to_dict`` adds under "fit" is passed over.

    Raises UserError for an unknown form or wrong parameters.
    """
    form = description.get("form") if isinstance(description, dict) else None
    if not isinstance(form, str) or form not in forms:
        unknown = form if isinstance(description, dict) else description
        raise UserError(f"unknown cost form {shown(unknown)}: use one of {', '.join(forms)}")
    kind = forms[form]
    known, own = {f.name for f in _described(kind)}, set(parameters(kind))
    given = set(description) - {"form", "fit"}
    if given - known or own - given:
        unknown, missing = (
            ", ".join(sorted(names)) or "none" for names in (given - known, own - given)
        )
        raise UserError(f"{kind.form} cost: unknown parameters: {unknown}; missing: {missing}")
    try:
        found = kind(**{name: description[name] for name in given})
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{kind.form} cost: {error}") from error
    for name in parameters(kind):
        value = getattr(found, name)
        if isinstance(value, (int, float, np.ndarray)) and np.any(np.abs(value) > MOST):
            raise UserError(f"{kind.form} cost: {name} is beyond {MOST:g}: nobody means that")
    return found


@dataclass(frozen=True, eq=False)
class Samples:
    """How many messages, sent one right after the other, each measured time is the mean of.

    bytes : (s,) sizes, increasing; messages : (s,) per sample of that size
    """

    bytes: Floats
    messages: Floats

    def messages_at(self, n_bytes: ArrayLike) -> Floats:
        """Messages per sample at other sizes, interpolated over the logarithm of the size."""
        return np.interp(np.log(n_bytes), np.log(self.bytes), self.messages)


FORMS: dict[str, type[MessageCost]] = {}
"""Every form of a message cost by its name; a class with a ``form`` enters it when it is defined."""


@dataclass(frozen=True, eq=False)
class MessageCost(Form):
    """The time of one collective as a function of its size; call it on a number or an array.

    collective : "all_reduce" or "all_gather"; workers : ranks it was measured with, None if unknown
    algorithm : "ring", ... or None when not known
    samples : how it was measured; None: message by message. Not part of the JSON description

    >>> AlphaBeta(alpha_s=0.5, beta_s_per_byte=1e-6)(4_000_000)
    4.5
    """

    collective: str = field(default="all_reduce", kw_only=True)
    workers: int | None = field(default=None, kw_only=True)
    algorithm: str | None = field(default=None, kw_only=True)
    samples: Samples | None = field(default=None, kw_only=True, metadata=UNDESCRIBED)

    def __init_subclass__(cls) -> None:
        FORMS[cls.form] = cls

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_use()

    def _check_use(self) -> None:
        """Raise a UserError for what cannot be a number of workers, a collective or an algorithm."""
        workers = self.workers
        whole = isinstance(workers, (int, np.integer)) and not isinstance(workers, bool)
        if workers is not None and not (whole and 1 <= workers <= MOST_WORKERS):
            what = f"must be a whole number from 1 to {MOST_WORKERS}"
            raise UserError(f"{self.form} cost: workers is {shown(workers)}: {what}")
        for name, value in (("collective", self.collective), ("algorithm", self.algorithm or "")):
            if not isinstance(value, str):
                raise UserError(f"{self.form} cost: {name} is {shown(value)}: must be a name")

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Seconds for messages of ``n_bytes`` (any shape); a scalar gives a float."""
        if isinstance(n_bytes, (int, float)):  # an array of one number takes three times as long
            return float(self._seconds(np.float64(n_bytes)))
        sizes = np.asarray(n_bytes, dtype=float)
        seconds = self._seconds(sizes)
        return float(seconds) if sizes.ndim == 0 else seconds

    @abstractmethod
    def _seconds(self, sizes: Any) -> Any: ...

    def collective_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Size of each of the collectives that a message of ``n_bytes`` (any shape) really is."""
        return self.sent_bytes(n_bytes)

    @property
    def selects(self) -> bool:
        """Whether it takes compute time to make a message, so that what is computed next is delayed."""
        return False

    def selection_s(self, n_bytes: ArrayLike) -> Floats:
        """Seconds of the compute stream to make messages of ``n_bytes`` (any shape): none."""
        return np.zeros(np.shape(n_bytes))

    def sent_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Size of the collectives that a message of ``n_bytes`` (any shape) really is, together."""
        return np.asarray(n_bytes, dtype=float)

    def startup_s(self) -> float:
        """What a message takes, however few its bytes; may come out below zero for a fitted line."""
        return float(self(1.0))

    def messages_per_sample(self, n_bytes: ArrayLike) -> Floats:
        """Of how many messages in a row the time of ``n_bytes`` (any shape) is the mean."""
        sent_bytes = self.sent_bytes(n_bytes)
        return self.samples.messages_at(sent_bytes) if self.samples else np.ones_like(sent_bytes)

    def at_workers(self, workers: int) -> MessageCost:
        """The cost with another number of workers; only forms whose algorithm is known can tell.

        Raises UserError where the form does not justify it.
        """
        raise UserError(
            f"a {self.form} cost does not say how it depends on the number of workers: "
            f"measure it with {workers} workers, or fit alpha_beta to a ring"
        )

    def at(
        self,
        *,
        workers: int | None = None,
        rate_bits_per_s: float | None = None,
        delay_s: float | None = None,
        algorithm: str | None = None,
    ) -> MessageCost:
        """The cost with other workers, links or another algorithm; what is not said stays.

        Raises UserError but for a form that knows what its messages are made of: see `Stepped`.
        """
        raise UserError(
            f"a {self.form} cost does not say what it is made of: fit stepped to carry it elsewhere"
        )


@dataclass(frozen=True, eq=False)
class AlphaBeta(MessageCost):
    """t = alpha + beta * bytes: a start-up time and a time per byte."""

    form: ClassVar[str] = "alpha_beta"
    alpha_s: float
    beta_s_per_byte: float

    def _seconds(self, sizes: Floats) -> Floats:
        return self.alpha_s + self.beta_s_per_byte * sizes

    def at_workers(self, workers: int) -> AlphaBeta:
        """Ring all-reduce: 2(n-1) steps of latency, 2(n-1)/n of the bytes; all-gather alike."""
        if self.algorithm != "ring" or min(workers, self.workers or 0) < 2 or not self.workers:
            raise UserError(
                "an alpha_beta cost can be carried to another number of workers only if it names "
                "algorithm 'ring' and its workers, and both numbers are at least 2"
            )
        steps = (workers - 1) / (self.workers - 1)
        return replace(
            self,
            alpha_s=self.alpha_s * steps,
            beta_s_per_byte=self.beta_s_per_byte * steps * self.workers / workers,
            workers=workers,
        )


@dataclass(frozen=True, eq=False)
class RingAllReduce(MessageCost):
    """osf Eq 7: t = 2(N-1)/N D/beta + delta, from what a ring is made of; adding takes no time.

    D = bytes, N = workers, beta = bytes_per_s between neighbours, delta = overhead_s of one all-reduce
    of N workers. `ddlkit.papers.osf.update_s` has the term for adding too.
    """

    form: ClassVar[str] = "ring_all_reduce"
    bytes_per_s: float
    overhead_s: float
    algorithm: str | None = field(default="ring", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bytes_per_s < LEAST:
            raise UserError("ring_all_reduce cost: bytes_per_s must be above zero")
        if (self.collective, self.algorithm) != ("all_reduce", "ring"):
            raise UserError(
                f"ring_all_reduce cost: not of {self.collective} by {self.algorithm}: use alpha_beta"
            )
        if not isinstance(self.workers, int) or self.workers < 2:
            raise UserError(f"ring_all_reduce cost: workers is {self.workers}: must be at least 2")

    def _seconds(self, sizes: Floats) -> Floats:
        return self.alpha_beta()._seconds(sizes)

    def at_workers(self, workers: int) -> RingAllReduce:
        """The same links with more or fewer workers: each of the 2(N-1) steps has its share of delta.

        osf Tab 1 lets delta depend on the latency and on the scale of the ring.
        """
        overhead_s = self.alpha_beta().at_workers(workers).alpha_s
        return replace(self, overhead_s=overhead_s, workers=workers)

    def alpha_beta(self) -> AlphaBeta:
        """The straight line that it is at its number of workers."""
        assert self.workers is not None  # checked when made
        beta_s_per_byte = (self.workers - 1) / self.workers * (2 / self.bytes_per_s)
        return AlphaBeta(self.overhead_s, beta_s_per_byte, workers=self.workers, algorithm="ring")

    @classmethod
    def from_alpha_beta(cls, cost: AlphaBeta) -> RingAllReduce:
        """The ring behind a fitted line; undoes `alpha_beta`.

        Raises UserError for a line that is not a ring's, and for one that leaves no time to the links.
        """
        if cost.collective != "all_reduce" or cost.algorithm != "ring" or not cost.workers:
            raise UserError(
                "this alpha_beta cost does not name a ring all_reduce and its workers: "
                "no bandwidth follows from it"
            )
        if cost.workers < 2 or cost.beta_s_per_byte <= 0:
            raise UserError(
                f"alpha_beta cost of {cost.workers} workers: its {cost.beta_s_per_byte:g} s a byte "
                "leave no time for links"
            )
        share = (cost.workers - 1) / cost.workers
        return cls(2 * share / cost.beta_s_per_byte, cost.alpha_s, workers=cost.workers)


SMALL = 4 * KIB
"""Up to this size a message's bytes count little beside its start-up, on any link of 1 Gbit/s or more."""


@dataclass(frozen=True, eq=False)
class Table(MessageCost):
    """Measured times, interpolated in log-log; below the first size its time, above the last slope.

    Where even the first size is larger than SMALL, its time is not that of a start-up: that is where the
    straight line through the first two sizes meets no bytes, at least 0 and at most the first time.
    """

    form: ClassVar[str] = "table"
    bytes: Floats
    seconds: Floats

    def __post_init__(self) -> None:
        self._check_use()
        self._freeze("bytes", "seconds")
        if self.bytes.size < 2 or np.any(np.diff(self.bytes) <= 0) or self.bytes[0] <= 0:
            raise UserError("table cost: bytes must be at least 2 sizes, above zero and increasing")
        if not np.all(self.seconds > 0):
            raise UserError("table cost: every time in seconds must be above zero")

    @cached_property
    def _logs(self) -> tuple[Floats, Floats]:
        """Logarithms of bytes and of seconds."""
        return np.log(self.bytes), np.log(self.seconds)

    def _seconds(self, sizes: Floats) -> Floats:
        x, y = self._logs
        inside = np.exp(np.interp(np.log(np.maximum(sizes, self.bytes[0])), x, y))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.bytes[-1] - self.bytes[-2])
        return inside + max(slope, 0.0) * np.maximum(sizes - self.bytes[-1], 0.0)

    def startup_s(self) -> float:
        """The first size's time where that is small, or else what a line leaves to no bytes."""
        if self.bytes[0] <= SMALL:
            return super().startup_s()
        slope = (self.seconds[1] - self.seconds[0]) / (self.bytes[1] - self.bytes[0])
        return float(max(0.0, self.seconds[0] - max(slope, 0.0) * self.bytes[0]))


@dataclass(frozen=True, eq=False)
class Chords(Table):
    """A table whose times are straight in the size from one size to the next, not in logarithms.

    Where a message's time is that of a line, alpha + beta * bytes, between two sizes, it is exact; a log-log
    table is too slow there, by up to 6% in the middle of two sizes four times apart. Outside as a table.
    """

    form: ClassVar[str] = "chords"

    def _seconds(self, sizes: Floats) -> Floats:
        inside = np.interp(sizes, self.bytes, self.seconds)
        return np.where(sizes > self.bytes[-1], super()._seconds(sizes), inside)


@dataclass(frozen=True, eq=False)
class Curve(Table):
    """A table whose log-log curve is smooth: cubic pieces that rise where the times rise, and only there.

    Slopes at the sizes are weighted harmonic means of those of the neighbouring chords, 0 where one of them
    falls and the other rises: Fritsch and Butland's choice of 1984. Outside the sizes as a table.
    """

    form: ClassVar[str] = "curve"

    def _seconds(self, sizes: Floats) -> Floats:
        x, y = self._logs
        at = np.log(np.clip(sizes, self.bytes[0], self.bytes[-1]))
        piece = np.clip(np.searchsorted(x, at, side="right") - 1, 0, x.size - 2)
        width, chord = np.diff(x), np.diff(y) / np.diff(x)
        slope, u = _rising_slopes(width, chord), (at - x[piece]) / width[piece]
        bend = u * (1 - u) * width[piece]
        bent = (slope[piece] - chord[piece]) * (1 - u) - (slope[piece + 1] - chord[piece]) * u
        inside = np.exp(y[piece] + chord[piece] * u * width[piece] + bend * bent)
        return np.where(sizes > self.bytes[-1], super()._seconds(sizes), inside)


def _rising_slopes(width: Floats, chord: Floats) -> Floats:
    """(n,) slopes at the ends of (n-1,) chords with their widths; at the first and last that of the chord."""
    before, behind = chord[:-1], chord[1:]
    weights = width[:-1] + 2 * width[1:], 2 * width[:-1] + width[1:]
    rising = before * behind > 0
    both = np.where(rising, before * behind, 0.0)
    mean = weights[0] * behind + weights[1] * before
    inner = np.divide(sum(weights) * both, mean, out=np.zeros_like(both), where=rising)
    return np.concatenate([chord[:1], inner, chord[-1:]])


@dataclass(frozen=True, eq=False)
class Piecewise(MessageCost):
    """Logarithmic below a threshold, linear from it on: the form of osf Eq 18.

    a1 = log_slope_s (per doubling), b1 = log_intercept_s, a2 = slope_s_per_byte, b2 = intercept_s,
    D_Thresh = threshold_bytes.
    """

    form: ClassVar[str] = "piecewise"
    threshold_bytes: float
    log_slope_s: float
    log_intercept_s: float
    slope_s_per_byte: float
    intercept_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold_bytes <= 0:
            raise UserError(
                f"piecewise cost: threshold_bytes is {self.threshold_bytes}: must be above zero"
            )

    def _seconds(self, sizes: Floats) -> Floats:
        small = self.log_slope_s * np.log2(np.maximum(sizes, 1.0)) + self.log_intercept_s
        return np.where(
            sizes < self.threshold_bytes, small, self.slope_s_per_byte * sizes + self.intercept_s
        )


@dataclass(frozen=True, eq=False)
class Segments(MessageCost):
    """Several linear pieces, each with its own alpha and beta; jumps between them are allowed.

    breaks_bytes : (k-1,) first size of pieces 2..k; alpha_s, beta_s_per_byte : (k,)
    """

    form: ClassVar[str] = "segments"
    breaks_bytes: Floats
    alpha_s: Floats
    beta_s_per_byte: Floats

    def __post_init__(self) -> None:
        self._check_use()
        self._freeze("alpha_s", "beta_s_per_byte")
        breaks = np.asarray(self.breaks_bytes, dtype=float)
        object.__setattr__(self, "breaks_bytes", breaks)
        if breaks.shape != (self.alpha_s.size - 1,) or not np.all(np.diff(breaks) > 0):
            raise UserError("segments cost: k pieces need k-1 increasing breaks_bytes")

    def _seconds(self, sizes: Floats) -> Floats:
        piece = np.searchsorted(self.breaks_bytes, sizes, side="right")
        return self.alpha_s[piece] + self.beta_s_per_byte[piece] * sizes


class Terms(NamedTuple):
    """What a message's time is made of, in seconds, by its size (any shape).

    software_s : messages of the processor; delay_s : ways between ranks; bytes_s : of the busiest links
    """

    software_s: Floats
    delay_s: Floats
    bytes_s: Floats


@dataclass(frozen=True, eq=False)
class Stepped(MessageCost):
    """An all-reduce from what it is made of, so that it can be carried to other workers, links, algorithms.

    Software of the messages that follow one another + steps x 2 delay_s + carried x bytes x link_s_per_byte,
    as `Schedule.of(algorithm, workers)` counts them, and one more way for STEPS that are sent one by one.
    (What gloo's own ring takes over links with a delay, which is more, says `GlooRing`.) Where cores are
    fewer than ranks, messages wait for one: a step takes core_share of all its messages' software, at least.

    software_s : of a message of a step, by a rank that has its core; link_s_per_byte : of one link
    rate_bits_per_s : of the links it was measured over, 0 if unknown; delay_s : of each link, one way
    saves : whether links save up while the software runs: then the longer of the two decides, not their sum
    core_share : share of all cores that a message's software takes while it runs; 0: none waits for a core

    Raises UserError for numbers below zero, and without workers or a known algorithm.

    >>> ring = Stepped(1e-4, 8e-9, workers=4, rate_bits_per_s=1e9)
    >>> round(ring(1e6), 6), round(ring.at(workers=8, rate_bits_per_s=1e8, delay_s=1e-3)(1e6), 6)
    (0.0126, 0.1694)
    """

    form: ClassVar[str] = "stepped"
    software_s: float
    link_s_per_byte: float
    algorithm: str | None = field(default="ring", kw_only=True)
    rate_bits_per_s: float = field(default=0.0, kw_only=True)
    delay_s: float = field(default=0.0, kw_only=True)
    saves: bool = field(default=False, kw_only=True)
    core_share: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.collective != "all_reduce" or not isinstance(self.workers, int) or self.workers < 2:
            known = f"{self.collective} of {self.workers or 'unknown'} workers"
            hint = ": say between how many, --ranks" if self.workers is None else ""
            raise UserError(f"stepped cost: {known}: must be an all_reduce of at least 2{hint}")
        Schedule.of(str(self.algorithm), self.workers)
        numbers = ("software_s", "link_s_per_byte", "rate_bits_per_s", "delay_s", "core_share")
        for name in numbers:
            if not 0 <= getattr(self, name) < np.inf:
                raise UserError(f"stepped cost: {name} is {getattr(self, name)}: at least 0")

    def terms(self, n_bytes: ArrayLike) -> Terms:
        """What the time of a message of ``n_bytes`` (any shape) is made of."""
        assert self.workers is not None  # checked when made
        schedule, sizes = Schedule.of(str(self.algorithm), self.workers), np.asarray(n_bytes, float)
        counts, messages = schedule.counts, schedule.software(self.core_share)
        software_s = np.full(sizes.shape, messages * self.software_s)
        ways = counts.steps + str(self.algorithm).startswith(STEPS)
        delay_s = np.full(sizes.shape, ways * 2 * self.delay_s)
        return Terms(software_s, delay_s, counts.carried * self.link_s_per_byte * sizes)

    def _seconds(self, sizes: Floats) -> Floats:
        software_s, delay_s, bytes_s = self.terms(sizes)
        both = np.maximum if self.saves else np.add
        return np.asarray(both(software_s + delay_s, bytes_s))

    def at_workers(self, workers: int) -> Stepped:
        """The same links and algorithm with more or fewer workers."""
        return self.at(workers=workers)

    def at(
        self,
        *,
        workers: int | None = None,
        rate_bits_per_s: float | None = None,
        delay_s: float | None = None,
        algorithm: str | None = None,
    ) -> Stepped:
        """The same processor, and links of the same efficiency, in another lab; what is not said stays.

        What a message's software takes is that of whatever sends it: of gloo's own ring and of steps that
        are sent one by one it is not the same.

        Raises UserError for another rate where it is not known which one it was measured at.
        """
        slope, rate = self.link_s_per_byte, self.rate_bits_per_s
        if rate_bits_per_s is not None:
            if not (rate and 0 < rate_bits_per_s < np.inf):
                raise UserError(
                    f"stepped cost measured at {rate:g} bit/s cannot be carried to {rate_bits_per_s:g}: "
                    "both rates must be known and above zero"
                )
            slope, rate = slope * rate / rate_bits_per_s, rate_bits_per_s
        return replace(
            self,
            link_s_per_byte=slope,
            rate_bits_per_s=rate,
            workers=self.workers if workers is None else workers,
            delay_s=self.delay_s if delay_s is None else delay_s,
            algorithm=self.algorithm if algorithm is None else algorithm,
            samples=None,
        )


def cost_from_dict(description: dict[str, Any]) -> MessageCost:
    """The cost that ``to_dict`` described; raises UserError as `from_dict`."""
    return from_dict(description, FORMS)
