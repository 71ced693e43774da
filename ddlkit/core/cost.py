"""What one message costs: forms of the function bytes -> seconds, and draws that say how sure that is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.collective import find_collective
from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import KIB, MOST
from ddlkit.core.workload import Floats

MOST_WORKERS = 100_000  # more than any machine has GPUs
REPLACED = {
    "curve": "chords",
    "density_log": "log",
    "piecewise:joined": "piecewise",
    "ring_all_reduce": "alpha_beta with algorithm 'ring' and its workers",
    "segments:joined": "segments",
    "segments:jump": "segments",
    "sparse_gather": "the cost of its all_gather, with --density and --selection",
    "stepped": "table, or alpha_beta of a ring",
}
"""Forms and variants that are no more, to what replaces them."""


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """A formula with a name and parameters, numbers or vectors; keyword-only fields say what it holds for."""

    form: ClassVar[str]

    def __post_init__(self) -> None:
        for name, kind in parameters(type(self)).items():
            value = getattr(self, name)
            if kind == "float":
                number = isinstance(value, (int, float, np.number)) and not isinstance(
                    value, bool
                )
                right = number and abs(value) <= MOST
            else:
                value = np.array(value, dtype=float)
                value.setflags(write=False)
                object.__setattr__(self, name, value)
                right = bool(np.all(np.abs(value) <= MOST))
            if not right:
                self.check(
                    False,
                    f"{name} is {shown(value)}: must be a finite number up to {MOST:g}",
                )

    def check(self, right: Any, what: str) -> None:
        """Raise a UserError that says ``what`` must be, unless that is right."""
        if not right:
            raise UserError(f"{self.form} cost: {what}")

    def to_dict(self) -> dict[str, Any]:
        """Return, JSON-ready, ``form``, its unit-named parameters, and what it holds for."""
        values = {name: getattr(self, name) for name in described(type(self))}
        plain = {
            k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()
        }
        return {"form": self.form, **{k: v for k, v in plain.items() if v is not None}}


def described(kind: type[Form]) -> tuple[str, ...]:
    """Return the names of the fields that a form's JSON description has."""
    return tuple(f.name for f in fields(kind) if f.name != "samples")


F = TypeVar("F", bound=Form)


@cache
def parameters(kind: type[Form]) -> dict[str, Any]:
    """Return a form's parameters and what each is annotated as, without what it holds for."""
    return {f.name: f.type for f in fields(kind) if not f.kw_only}


def checked_form(name: Any, forms: Collection[str]) -> str:
    """Return ``name``. Raises UserError unless it is one of ``forms``, naming what replaces one that went."""
    if isinstance(name, str) and name in REPLACED:
        raise UserError(
            f"cost form {name!r} is no more: use {REPLACED[name]}, and fit again"
        )
    if not isinstance(name, str) or name not in forms:
        raise UserError(
            f"unknown cost form {shown(name)}: use one of {', '.join(forms)}"
        )
    return name


def from_dict(description: Any, forms: Mapping[str, type[F]]) -> F:
    """Return the cost that ``to_dict`` described, without its "fit"; raises UserError for anything else."""
    form = description.get("form") if isinstance(description, dict) else description
    kind = forms[checked_form(form, forms)]
    given = set(description) - {"form", "fit"}
    wrong = given - {*described(kind)}, {*parameters(kind)} - given
    if any(wrong):
        unknown, missing = (", ".join(sorted(names)) or "none" for names in wrong)
        raise UserError(
            f"{kind.form} cost: unknown parameters: {unknown}; missing: {missing}"
        )
    try:
        return kind(**{name: description[name] for name in given})
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{kind.form} cost: {error}") from error


class Samples(NamedTuple):
    """Of how many messages in a row, (s,), each measured time of so many bytes, (s,), is the mean."""

    bytes: Floats
    messages: Floats


FORMS: dict[str, type[MessageCost]] = {}
"""Every form of a message cost by its name; a class enters it when it is defined."""


@dataclass(frozen=True, eq=False)
class MessageCost(Form):
    """The time of one collective as a function of its size; call it on a number or an array.

    workers : ranks it was measured with, None if unknown; algorithm : as "ring", None when not known
    samples : how it was measured; None: message by message

    >>> AlphaBeta(alpha_s=0.5, beta_s_per_byte=1e-6)(4_000_000)
    4.5
    """

    collective: str = field(default="all_reduce", kw_only=True)
    workers: int | None = field(default=None, kw_only=True)
    algorithm: str | None = field(default=None, kw_only=True)
    samples: Samples | None = field(default=None, kw_only=True)

    def __init_subclass__(cls, *, described: bool = True) -> None:
        if described:
            FORMS[cls.form] = cls

    def __post_init__(self) -> None:
        super().__post_init__()
        workers = self.workers
        whole = isinstance(workers, (int, np.integer)) and not isinstance(workers, bool)
        what = f"workers is {shown(workers)}: must be a whole number from 1 to {MOST_WORKERS}"
        self.check(workers is None or (whole and 1 <= workers <= MOST_WORKERS), what)
        for name, value in (
            ("collective", self.collective),
            ("algorithm", self.algorithm or ""),
        ):
            self.check(
                isinstance(value, str), f"{name} is {shown(value)}: must be a name"
            )

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Return seconds for messages of ``n_bytes`` (any shape); a scalar gives a float."""
        if isinstance(
            n_bytes, (int, float)
        ):  # an array of one number takes three times as long
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
        return getattr(self, "selecting", None) is not None

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
        if not self.samples:
            return np.ones_like(sent_bytes)
        sizes, messages = self.samples
        return np.interp(np.log(sent_bytes), np.log(sizes), messages)

    def at_workers(self, workers: int) -> MessageCost:
        """Return the same ring's cost among ``workers``: for its steps and its links' bytes.

        An all-reduce has 2(n-1) steps of latency, and each link carries 2(n-1)/n of its
        bytes. Raises UserError for other forms than `AlphaBeta`, and for unknown collectives.
        """
        if (
            not isinstance(self, AlphaBeta)
            or self.algorithm != "ring"
            or not self.workers
        ):
            raise UserError(
                "an alpha_beta cost can be taken to another number of workers only if it names "
                "algorithm 'ring' and its workers; no other form can"
            )
        self.check(min(workers, self.workers) >= 2, "a ring has at least 2 workers")
        ring = find_collective(self.collective)
        steps = ring.steps(workers) / ring.steps(self.workers)
        sent = ring.pieces_sent(workers) / ring.pieces_sent(self.workers)
        slope = self.beta_s_per_byte * sent
        slope = slope * ring.pieces(self.workers) / ring.pieces(workers)
        return replace(
            self, alpha_s=self.alpha_s * steps, beta_s_per_byte=slope, workers=workers
        )


@dataclass(frozen=True, eq=False)
class AlphaBeta(MessageCost):
    """t = alpha + beta * bytes: a start-up time and a time per byte."""

    form: ClassVar[str] = "alpha_beta"
    alpha_s: float
    beta_s_per_byte: float

    def _seconds(self, sizes: Floats) -> Floats:
        return self.alpha_s + self.beta_s_per_byte * sizes


SMALL = 4 * KIB  # up to which bytes count little beside the start-up, from 1 Gbit/s on


@dataclass(frozen=True, eq=False)
class Table(MessageCost):
    """Measured times, interpolated in log-log; below the first size its time, above the last slope."""

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
        slope = (self.seconds[-1] - self.seconds[-2]) / (
            self.bytes[-1] - self.bytes[-2]
        )
        return inside + max(slope, 0.0) * np.maximum(sizes - self.bytes[-1], 0.0)

    def startup_s(self) -> float:
        """Return the first size's time where that is SMALL, else what a line leaves to no bytes."""
        if self.bytes[0] <= SMALL:
            return super().startup_s()
        slope = (self.seconds[1] - self.seconds[0]) / (self.bytes[1] - self.bytes[0])
        return float(max(0.0, self.seconds[0] - max(slope, 0.0) * self.bytes[0]))


@dataclass(frozen=True, eq=False)
class Chords(Table):
    """A table whose times are straight in the size from one size to the next, not in logarithms."""

    form: ClassVar[str] = "chords"

    def _seconds(self, sizes: Floats) -> Floats:
        inside = np.interp(sizes, self.bytes, self.seconds)
        return np.where(sizes > self.bytes[-1], super()._seconds(sizes), inside)


@dataclass(frozen=True, eq=False)
class Piecewise(MessageCost):
    """Logarithmic below a threshold, linear from it on (osf Eq 18: D_Thresh, a1, b1, a2, b2, in order)."""

    form: ClassVar[str] = "piecewise"
    threshold_bytes: float
    log_slope_s: float
    log_intercept_s: float
    slope_s_per_byte: float
    intercept_s: float

    def _seconds(self, sizes: Floats) -> Floats:
        small_s = (
            self.log_slope_s * np.log2(np.maximum(sizes, 1.0)) + self.log_intercept_s
        )
        large_s = self.slope_s_per_byte * sizes + self.intercept_s
        return np.where(sizes < self.threshold_bytes, small_s, large_s)


@dataclass(frozen=True, eq=False)
class Segments(MessageCost):
    """Several linear pieces (k,), of which breaks_bytes are the first sizes (k-1,) of all but the first."""

    form: ClassVar[str] = "segments"
    breaks_bytes: Floats
    alpha_s: Floats
    beta_s_per_byte: Floats

    def __post_init__(self) -> None:
        super().__post_init__()
        breaks, alpha_s, beta = map(
            np.atleast_1d, (getattr(self, n) for n in parameters(Segments))
        )
        fitting = alpha_s.shape == beta.shape == (breaks.size + 1,)
        what = (
            "k pieces need k-1 increasing breaks_bytes, k alpha_s and beta_s_per_byte"
        )
        self.check(fitting and np.all(np.diff(breaks) > 0), what)

    def _seconds(self, sizes: Floats) -> Floats:
        piece = np.searchsorted(self.breaks_bytes, sizes, side="right")
        return self.alpha_s[piece] + self.beta_s_per_byte[piece] * sizes


# -- draws: how sure a cost is -------------------------------------------------------------------

DRAWS, MOST_DRAWS = 200, 10_000  # of a cost: as ddlkit fit writes them, and at most
AROUND = 10
"""So many errors count in the mean around a size: so the half-width of 95% of the draws is below three times
the error in the median of fourteen dense tables (rules vidur-*), and 87% of their rows lie in it."""


@dataclass(frozen=True, eq=False)
class HeldOut(Form):
    """How far a form is off near each size, learned from sizes that were held out of its fit.

    at_bytes : (k,) sizes, increasing, from the first to the last that the cost was fitted to
    log_errors : (k,) mean size of the logarithm of measured over predicted near each; of a table over the
        `gap` there to the power ``apart``, 0: gaps do not matter
    below, above : what that grows by, for a size e times smaller, or larger, than all of them
    """

    form: ClassVar[str] = "held_out"
    at_bytes: Floats
    log_errors: Floats
    below: float
    above: float
    apart: float

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes, errors = np.atleast_1d(self.at_bytes), np.atleast_1d(self.log_errors)
        rising = sizes.size >= 2 and np.all(np.diff(sizes, prepend=0.0) > 0)
        self.check(
            rising and sizes.shape == errors.shape,
            "at_bytes must increase, an error each",
        )
        least = min(errors.min(), self.below, self.above, self.apart)
        self.check(least >= 0, "errors must not be below zero")

    def log_error(self, sizes: ArrayLike, cost: MessageCost) -> Floats:
        """Return the mean size of the logarithm of measured over predicted at sizes (any shape)."""
        at, fitted = np.log(np.maximum(sizes, 1.0)), np.log(self.at_bytes)
        inside = np.interp(at, fitted, self.log_errors)
        if self.apart and isinstance(cost, Table):
            inside = inside * gap(cost.bytes, sizes) ** self.apart
        below, above = np.maximum(fitted[0] - at, 0.0), np.maximum(at - fitted[-1], 0.0)
        return np.asarray(inside + self.below * below + self.above * above)

    def draws(self, cost: MessageCost, count: int) -> tuple[MessageCost, ...]:
        """Return ``count`` costs, too fast and too slow in turn by evenly spaced quantiles of the error.

        Errors follow an exponential law, whose mean AROUND others tell: the share (1 + x / AROUND) ** -AROUND
        of new ones, over that mean, is beyond x.
        """
        shares = (np.arange(count) // 2 + 0.5) / max((count + 1) // 2, 1)
        sizes = AROUND * np.expm1(-np.log1p(-shares) / AROUND)
        times = np.where(np.arange(count) % 2, sizes, -sizes)
        return tuple(
            _Off(
                cost,
                self,
                float(factor),
                collective=cost.collective,
                workers=cost.workers,
                algorithm=cost.algorithm,
                samples=cost.samples,
            )
            for factor in times
        )


@dataclass(frozen=True, eq=False)
class _Off(MessageCost, described=False):
    """Another cost that is off by so many ``times`` the error of sizes held out of its fit: a draw."""

    form: ClassVar[str] = "drawn"
    cost: MessageCost
    held_out: HeldOut
    times: float

    def __post_init__(self) -> None:  # nothing to check: all of it comes from a cost
        pass

    def _seconds(self, sizes: Floats) -> Floats:
        off = self.times * self.held_out.log_error(sizes, self.cost)
        return np.asarray(self.cost(sizes) * np.exp(off))

    def startup_s(self) -> float:
        """Return that of the other cost: far below the fitted sizes the error is large, not the software."""
        log_error = self.held_out.log_error(self.held_out.at_bytes[0], self.cost)
        return self.cost.startup_s() * float(np.exp(self.times * log_error))


def gap(measured: Floats, sizes: ArrayLike) -> Floats:
    """Return the logarithm of how many times apart the two of ``measured`` (k,) next to each size lie."""
    behind = np.clip(np.searchsorted(measured, sizes), 1, measured.size - 1)
    return np.asarray(np.log(measured[behind] / measured[behind - 1]))


def costs_from_dict(
    description: dict[str, Any],
) -> tuple[MessageCost, list[MessageCost]]:
    """Return the cost, and the draws that came with it (none for a cost written by hand)."""
    cost, fitted = from_dict(description, FORMS), description.get("fit", {})
    if not isinstance(fitted, dict):
        raise UserError(
            f"the cost's fit is {shown(fitted)}: write what ddlkit fit does, or none"
        )
    held_out, draws = fitted.get("held_out"), fitted.get("draws", [])
    try:
        if held_out:
            errors = {k: v for k, v in held_out.items() if k != "draws"}
            count = min(int(held_out.get("draws", DRAWS)), MOST_DRAWS)
            drawn = from_dict({"form": HeldOut.form} | errors, {HeldOut.form: HeldOut})
            return cost, [*drawn.draws(cost, count)]
        return cost, [replace(cost, **draw) for draw in draws[:MOST_DRAWS]]
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as error:
        problem = "the cost's draws are not what ddlkit fit writes: fit again"
        raise UserError(f"{problem}: {error}") from error
