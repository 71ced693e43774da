"""What one message costs: forms of the function bytes -> seconds, and draws that say how sure that is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import KIB, MOST
from ddlkit.core.workload import Floats

MOST_WORKERS = 100_000
"""More than any machine has GPUs."""
UNDESCRIBED = {"described": False}
"""Metadata of a field that is no part of a form's JSON description."""
REPLACED = {
    "curve": "chords",
    "off": "the cost itself",
    "piecewise:joined": "piecewise",
    "ring_all_reduce": "alpha_beta with algorithm 'ring' and its workers",
    "segments:joined": "segments",
    "segments:jump": "segments",
    "stepped": "table, or alpha_beta of a ring",
}
"""Forms and variants that are no more, to what replaces them."""


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """A formula with a name and parameters, numbers or vectors: keyword-only fields say what it holds for."""

    form: ClassVar[str]

    def __post_init__(self) -> None:
        for name in parameters(type(self)):
            value = getattr(self, name)
            if isinstance(value, (list, np.ndarray)):
                value = np.array(value, dtype=float)
                value.setflags(write=False)
                object.__setattr__(self, name, value)
            real = isinstance(value, (int, float, np.number, np.ndarray))
            finite = real and not isinstance(value, bool) and np.all(np.isfinite(value))
            self.check(finite, f"{name} is {shown(value)}: must be a finite number")

    def check(self, right: Any, what: str) -> None:
        """Raise a UserError that says ``what`` must be, unless that is right."""
        if not right:
            raise UserError(f"{self.form} cost: {what}")

    def to_dict(self) -> dict[str, Any]:
        """Return, JSON-ready, ``form``, its unit-named parameters, and what it holds for."""
        values = {f.name: getattr(self, f.name) for f in _described(type(self))}
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
        return {"form": self.form, **{k: v for k, v in plain.items() if v is not None}}


F = TypeVar("F", bound=Form)


def _described(kind: type[Form]) -> list[Field[Any]]:
    return [f for f in fields(kind) if f.metadata.get("described", True)]


def parameters(kind: type[Form]) -> tuple[str, ...]:
    """Return the names of a form's parameters, without what it holds for."""
    return tuple(f.name for f in fields(kind) if not f.kw_only)


def checked_form(name: Any, forms: Collection[str]) -> str:
    """Return ``name``. Raises UserError unless it is one of ``forms``; of one that is no more it names
    what replaces it."""
    if isinstance(name, str) and name in REPLACED:
        raise UserError(f"cost form {name!r} is no more: use {REPLACED[name]}, and fit again")
    if not isinstance(name, str) or name not in forms:
        raise UserError(f"unknown cost form {shown(name)}: use one of {', '.join(forms)}")
    return name


def from_dict(description: Any, forms: Mapping[str, type[F]]) -> F:
    """Return the cost that ``to_dict`` described; what ``Fit.to_dict`` adds under "fit" is passed over.

    Raises UserError for an unknown form or wrong parameters.
    """
    form = description.get("form") if isinstance(description, dict) else description
    kind = forms[checked_form(form, forms)]
    allowed, needed = {f.name for f in _described(kind)}, set(parameters(kind))
    given = set(description) - {"form", "fit"}
    if given - allowed or needed - given:
        wrong = given - allowed, needed - given
        unknown, missing = (", ".join(sorted(names)) or "none" for names in wrong)
        raise UserError(f"{kind.form} cost: unknown parameters: {unknown}; missing: {missing}")
    try:
        cost = kind(**{name: description[name] for name in given})
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{kind.form} cost: {error}") from error
    for name in parameters(kind):
        value = getattr(cost, name)
        beyond = isinstance(value, (int, float, np.ndarray)) and np.any(np.abs(value) > MOST)
        cost.check(not beyond, f"{name} is beyond {MOST:g}: nobody means that")
    return cost


@dataclass(frozen=True, eq=False)
class Samples:
    """How many messages, sent one right after the other, each measured time is the mean of.

    bytes : (s,) sizes, increasing; messages : (s,) per sample of that size
    """

    bytes: Floats
    messages: Floats

    def messages_at(self, n_bytes: ArrayLike) -> Floats:
        """Return messages per sample at other sizes, interpolated over the logarithm of the size."""
        return np.interp(np.log(n_bytes), np.log(self.bytes), self.messages)


FORMS: dict[str, type[MessageCost]] = {}
"""Every form of a message cost by its name; a class enters it when it is defined."""


@dataclass(frozen=True, eq=False)
class MessageCost(Form):
    """The time of one collective as a function of its size; call it on a number or an array.

    collective : one of `ddlkit.core.link.COLLECTIVES`
    workers : ranks it was measured with, None if unknown
    algorithm : "ring", ... or None when not known
    samples : how it was measured; None: message by message. Not part of the JSON description

    >>> AlphaBeta(alpha_s=0.5, beta_s_per_byte=1e-6)(4_000_000)
    4.5
    """

    collective: str = field(default="all_reduce", kw_only=True)
    workers: int | None = field(default=None, kw_only=True)
    algorithm: str | None = field(default=None, kw_only=True)
    samples: Samples | None = field(default=None, kw_only=True, metadata=UNDESCRIBED)

    def __init_subclass__(cls, *, described: bool = True) -> None:
        if described:
            FORMS[cls.form] = cls

    def __post_init__(self) -> None:
        super().__post_init__()
        workers = self.workers
        whole = isinstance(workers, (int, np.integer)) and not isinstance(workers, bool)
        what = f"workers is {shown(workers)}: must be a whole number from 1 to {MOST_WORKERS}"
        self.check(workers is None or (whole and 1 <= workers <= MOST_WORKERS), what)
        for name, value in (("collective", self.collective), ("algorithm", self.algorithm or "")):
            self.check(isinstance(value, str), f"{name} is {shown(value)}: must be a name")

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Return seconds for messages of ``n_bytes`` (any shape); a scalar gives a float."""
        if isinstance(n_bytes, (int, float)):  # an array of one number takes three times as long
            return float(self._seconds(np.float64(n_bytes)))
        sizes = np.asarray(n_bytes, dtype=float)
        seconds = self._seconds(sizes)
        return float(seconds) if sizes.ndim == 0 else seconds

    @abstractmethod
    def _seconds(self, sizes: Any) -> Any: ...

    def collective_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Return the size of each of the collectives that a message of ``n_bytes`` (any shape) is."""
        return self.sent_bytes(n_bytes)

    @property
    def selects(self) -> bool:
        """Return whether making a message takes compute time, which delays what is computed next."""
        return False

    def selection_s(self, n_bytes: ArrayLike) -> Floats:
        """Return seconds of the compute stream to make messages of ``n_bytes`` (any shape): none."""
        return np.zeros(np.shape(n_bytes))

    def sent_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Return the size of all collectives together that a message of ``n_bytes`` (any shape) is."""
        return np.asarray(n_bytes, dtype=float)

    def startup_s(self) -> float:
        """Return what a message takes, however few its bytes; below zero for some fitted lines."""
        return float(self(1.0))

    def messages_per_sample(self, n_bytes: ArrayLike) -> Floats:
        """Return of how many messages in a row the time of ``n_bytes`` (any shape) is the mean."""
        sent_bytes = self.sent_bytes(n_bytes)
        return self.samples.messages_at(sent_bytes) if self.samples else np.ones_like(sent_bytes)

    def at_workers(self, workers: int) -> MessageCost:
        """Return the cost with another number of workers; only forms of a known algorithm can tell.

        Raises UserError where the form does not justify it.
        """
        raise UserError(
            f"a {self.form} cost does not say how it depends on the number of workers: "
            f"measure it with {workers} workers, or fit alpha_beta to a ring"
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
        """Return the ring's cost with 2(n-1) steps of latency, 2(n-1)/n of the bytes; gathers alike."""
        if self.algorithm != "ring" or min(workers, self.workers or 0) < 2 or not self.workers:
            raise UserError(
                "an alpha_beta cost can be carried to another number of workers only if it names "
                "algorithm 'ring' and its workers, and both numbers are at least 2"
            )
        steps = (workers - 1) / (self.workers - 1)
        slope = self.beta_s_per_byte * steps * self.workers / workers
        alpha_s = self.alpha_s * steps
        return replace(self, alpha_s=alpha_s, beta_s_per_byte=slope, workers=workers)


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
        super().__post_init__()
        sizes, seconds = np.atleast_1d(self.bytes), np.atleast_1d(self.seconds)
        alike = sizes.ndim == 1 and sizes.shape == seconds.shape
        self.check(alike, "bytes and seconds must be lists of equal length, all finite")
        rising = sizes.size >= 2 and np.all(np.diff(sizes, prepend=0.0) > 0)
        self.check(rising, "bytes must be at least 2 sizes, above zero and increasing")
        self.check(np.all(seconds > 0), "every time in seconds must be above zero")

    @cached_property
    def _logs(self) -> tuple[Floats, Floats]:
        """Return logarithms of bytes and of seconds."""
        return np.log(self.bytes), np.log(self.seconds)

    def _seconds(self, sizes: Floats) -> Floats:
        x, y = self._logs
        inside = np.exp(np.interp(np.log(np.maximum(sizes, self.bytes[0])), x, y))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.bytes[-1] - self.bytes[-2])
        return inside + max(slope, 0.0) * np.maximum(sizes - self.bytes[-1], 0.0)

    def startup_s(self) -> float:
        """Return the first size's time where that is small, or else what a line leaves to no bytes."""
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
        above = self.threshold_bytes > 0
        self.check(above, f"threshold_bytes is {self.threshold_bytes}: must be above zero")

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
        super().__post_init__()
        breaks, alpha_s, beta = map(np.atleast_1d, (getattr(self, n) for n in parameters(Segments)))
        fitting = alpha_s.shape == beta.shape == (breaks.size + 1,)
        rising = fitting and np.all(np.diff(breaks) > 0)
        self.check(
            rising, "k pieces need k-1 increasing breaks_bytes, k alpha_s and beta_s_per_byte"
        )

    def _seconds(self, sizes: Floats) -> Floats:
        piece = np.searchsorted(self.breaks_bytes, sizes, side="right")
        return self.alpha_s[piece] + self.beta_s_per_byte[piece] * sizes


def cost_from_dict(description: dict[str, Any]) -> MessageCost:
    """Return the cost that ``to_dict`` described; raises UserError as `from_dict`."""
    return from_dict(description, FORMS)


# -- draws: how sure a cost is -------------------------------------------------------------------

DRAWS, MOST_DRAWS = 200, 10_000
"""Of a cost: as ddlkit fit writes them, and at most."""
DIGITS = 7
"""Of numbers in draws, in a file; what a resample draws again has the very same digits."""
AROUND = 10
"""So many errors count in the mean around a size. So the half-width of 95% of the draws is less than three
times the error, in the median of fourteen dense tables (rules vidur-*, data/external/rules.yml); 87% of their
rows lie in it, and 95% would lie in five times the error."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """How far a form is off near each size, learned from sizes that were held out of its fit.

    at_bytes : (k,) sizes, increasing, from the first to the last that the cost was fitted to
    log_errors : (k,) mean size of the logarithm of measured over predicted near each; of a table over the
        `gap` there to the power ``apart``
    below, above : what that grows by, for a size e times smaller, or larger, than all of them
    apart : of a table, power of the gap with which errors grow; 0: gaps do not matter
    """

    at_bytes: Floats
    log_errors: Floats
    below: float
    above: float
    apart: float

    def log_error(self, sizes: ArrayLike, cost: MessageCost) -> Floats:
        """Return the mean size of the logarithm of measured over predicted at sizes (any shape)."""
        at, known = np.log(np.maximum(sizes, 1.0)), np.log(self.at_bytes)
        inside = np.interp(at, known, self.log_errors)
        if self.apart and isinstance(cost, Table):
            inside = inside * gap(cost.bytes, sizes) ** self.apart
        below, above = np.maximum(known[0] - at, 0.0), np.maximum(at - known[-1], 0.0)
        return np.asarray(inside + self.below * below + self.above * above)

    def draws(self, cost: MessageCost, count: int) -> tuple[MessageCost, ...]:
        """Return ``count`` costs, too fast and too slow in turn by evenly spaced quantiles of the error.

        Errors are taken to follow an exponential law at each size, whose mean is known from AROUND others:
        of a new one, over that mean, (1 + x / AROUND) ** -AROUND is the share beyond x.
        """
        shares = (np.arange(count) // 2 + 0.5) / max((count + 1) // 2, 1)
        sizes = AROUND * np.expm1(-np.log1p(-shares) / AROUND)
        times = np.where(np.arange(count) % 2, sizes, -sizes)
        use = {name: getattr(cost, name) for name in ("collective", "workers", "algorithm")}
        use["samples"] = cost.samples
        return tuple(_Off(cost, self, float(factor), **use) for factor in times)

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-ready, errors to four digits."""
        errors = [float(f"{error:.4g}") for error in self.log_errors]
        return {**vars(self), "at_bytes": self.at_bytes.tolist(), "log_errors": errors}

    @classmethod
    def from_dict(cls, description: Any) -> HeldOut:
        """Return what ``to_dict`` described. Raises UserError for anything else."""
        try:
            numbers = [np.asarray(description[f.name], float) for f in fields(cls)]
            at_bytes, errors, *ends = numbers
            right = at_bytes.ndim == 1 and at_bytes.size >= 2 and at_bytes.shape == errors.shape
            right &= all(np.all((each >= 0) & (each < np.inf)) for each in numbers)
            right &= bool(np.all(np.diff(at_bytes, prepend=0.0) > 0))
            held_out = cls(at_bytes, errors, *map(float, ends))
        except (KeyError, TypeError, ValueError, OverflowError):
            right = False
        if not right:
            raise UserError("the cost's held_out is not what ddlkit fit writes: fit again")
        return held_out


@dataclass(frozen=True, eq=False)
class _Off(MessageCost, described=False):
    """Another cost that is off by so many ``times`` the error of sizes held out of its fit: a draw."""

    form: ClassVar[str] = "drawn"
    cost: MessageCost
    held_out: HeldOut
    times: float

    def __post_init__(self) -> None:
        """Check nothing: all of it comes from a cost."""

    def _seconds(self, sizes: Floats) -> Floats:
        off = self.times * self.held_out.log_error(sizes, self.cost)
        return np.asarray(self.cost(sizes) * np.exp(off))

    def startup_s(self) -> float:
        """Return that of the other cost: far below the fitted sizes the error is large, not the software."""
        log_error = self.held_out.log_error(self.held_out.at_bytes[0], self.cost)
        return self.cost.startup_s() * float(np.exp(self.times * log_error))


def gap(known: Floats, sizes: ArrayLike) -> Floats:
    """Return the logarithm of how many times apart two neighbours lie, between which each size is.

    known : (k,) increasing, at least 2; sizes : any shape; beyond the known ones as of the nearest two
    """
    behind = np.clip(np.searchsorted(known, sizes), 1, known.size - 1)
    return np.asarray(np.log(known[behind] / known[behind - 1]))


def packed(draws: Sequence[Form]) -> dict[str, Any]:
    """Return, JSON-ready, how many ``draws`` of one form, and each parameter's numbers, and which by draw.

    Draws of a table have the same sizes, and times of which many are alike: what is alike is there once.
    """
    columns: dict[str, Any] = {"count": len(draws)}
    for name in parameters(type(draws[0])):
        columns[name] = []
        for numbers in np.array([np.ravel(getattr(draw, name)) for draw in draws], float).T:
            texts = [f"{number:.{DIGITS}g}" for number in numbers]
            values, which = np.unique(texts, return_inverse=True)
            places = which.tolist() if len(values) > 1 else []
            columns[name].append({"values": [*map(float, values)], "which": places})
    return columns


def costs_from_dict(description: dict[str, Any]) -> tuple[MessageCost, list[MessageCost]]:
    """Return the cost, and the draws that came with it (none for a cost written by hand)."""
    cost, fitted = cost_from_dict(description), description.get("fit", {})
    if not isinstance(fitted, dict):
        raise UserError(f"the cost's fit is {shown(fitted)}: write what ddlkit fit does, or none")
    if held_out := fitted.get("held_out"):
        errors = HeldOut.from_dict(held_out)
        return cost, [*errors.draws(cost, _count(held_out.get("draws", DRAWS)))]
    columns = fitted.get("draws") or {"count": 0}
    try:
        count, by_name = _count(columns["count"]), {}
        for name in parameters(type(cost)) if count else ():
            every = [
                np.asarray(column["values"], dtype=float)[column["which"] or [0] * count]
                for column in columns[name]
            ]
            rows = np.array(every, dtype=float).reshape(len(every), count).T
            by_name[name] = rows if np.ndim(getattr(cost, name)) else rows[:, 0]
        draws = [replace(cost, **{n: rows[k] for n, rows in by_name.items()}) for k in range(count)]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError("the cost's draws are not what ddlkit fit writes: fit again") from error
    return cost, draws


def _count(draws: Any) -> int:
    """Return how many draws there are. Raises UserError for what is no number of them."""
    if not isinstance(draws, int) or not 0 <= draws <= MOST_DRAWS:
        raise UserError(f"the cost has {shown(draws)} draws: from 0 to {MOST_DRAWS}: fit again")
    return draws
