"""What one message costs: forms of the function bytes -> seconds, each a frozen dataclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MessageCost(ABC):
    """The time of one collective as a function of its size; call it on a number or an array.

    collective : "all_reduce" or "all_gather"; workers : ranks it was measured with, None if unknown
    algorithm : "ring", ... or None when not known
    """

    form: ClassVar[str]
    collective: str = field(default="all_reduce", kw_only=True)
    workers: int | None = field(default=None, kw_only=True)
    algorithm: str | None = field(default=None, kw_only=True)

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Seconds for messages of ``n_bytes`` (any shape); a scalar gives a float."""
        sizes = np.asarray(n_bytes, dtype=float)
        seconds = self._seconds(sizes)
        return float(seconds) if sizes.ndim == 0 else seconds

    @abstractmethod
    def _seconds(self, sizes: Floats) -> Floats: ...

    def at_workers(self, workers: int) -> MessageCost:
        """The cost with another number of workers; only forms whose algorithm is known can tell.

        Raises UserError where the form does not justify it.
        """
        raise UserError(
            f"a {self.form} cost does not say how it depends on the number of workers: "
            f"measure it with {workers} workers, or fit alpha_beta to a ring"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: ``form``, its unit-named parameters, and what is known of the collective."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
        return {"form": self.form, **{k: v for k, v in plain.items() if v is not None}}


@dataclass(frozen=True, eq=False)
class AlphaBeta(MessageCost):
    """t = alpha + beta * bytes: a start-up time and a time per byte."""

    form: ClassVar[str] = "alpha_beta"
    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        _finite(self, "alpha_s", "beta_s_per_byte")

    def _seconds(self, sizes: Floats) -> Floats:
        return self.alpha_s + self.beta_s_per_byte * sizes

    def at_workers(self, workers: int) -> AlphaBeta:
        """Ring all-reduce: 2(n-1) steps of latency, 2(n-1)/n of the bytes; all-gather alike."""
        if self.algorithm != "ring" or self.workers is None:
            raise UserError(
                "this alpha_beta cost does not name algorithm 'ring' and its workers: "
                "it cannot be carried to another number of workers"
            )
        if workers < 2 or self.workers < 2:
            raise UserError(
                f"a collective needs at least 2 workers, not {min(workers, self.workers)}"
            )
        steps = (workers - 1) / (self.workers - 1)
        return replace(
            self,
            alpha_s=self.alpha_s * steps,
            beta_s_per_byte=self.beta_s_per_byte * steps * self.workers / workers,
            workers=workers,
        )


@dataclass(frozen=True, eq=False)
class Table(MessageCost):
    """Measured times, interpolated in log-log; below the first size its time, above the last slope."""

    form: ClassVar[str] = "table"
    bytes: Floats
    seconds: Floats

    def __post_init__(self) -> None:
        _vectors(self, "bytes", "seconds")
        if self.bytes.size < 2 or np.any(np.diff(self.bytes) <= 0) or self.bytes[0] <= 0:
            raise UserError("table cost: bytes must be at least 2 sizes, above zero and increasing")
        if not np.all(self.seconds > 0):
            raise UserError("table cost: every time in seconds must be above zero")

    def _seconds(self, sizes: Floats) -> Floats:
        x, y = np.log(self.bytes), np.log(self.seconds)
        inside = np.exp(np.interp(np.log(np.maximum(sizes, self.bytes[0])), x, y))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.bytes[-1] - self.bytes[-2])
        return inside + max(slope, 0.0) * np.maximum(sizes - self.bytes[-1], 0.0)


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
        _finite(
            self,
            "threshold_bytes",
            "log_slope_s",
            "log_intercept_s",
            "slope_s_per_byte",
            "intercept_s",
        )
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
        _vectors(self, "alpha_s", "beta_s_per_byte")
        breaks = np.asarray(self.breaks_bytes, dtype=float)
        object.__setattr__(self, "breaks_bytes", breaks)
        if breaks.size != self.alpha_s.size - 1 or np.any(np.diff(breaks) <= 0):
            raise UserError("segments cost: k pieces need k-1 increasing breaks_bytes")

    def _seconds(self, sizes: Floats) -> Floats:
        piece = np.searchsorted(self.breaks_bytes, sizes, side="right")
        return self.alpha_s[piece] + self.beta_s_per_byte[piece] * sizes


FORMS: dict[str, type[MessageCost]] = {
    form.form: form for form in (AlphaBeta, Table, Piecewise, Segments)
}


def cost_from_dict(description: dict[str, Any]) -> MessageCost:
    """The cost that ``to_dict`` described; what ``Fit.to_dict`` adds under "fit" is passed over.

    Raises UserError for an unknown form or wrong parameters.
    """
    if not isinstance(description, dict) or description.get("form") not in FORMS:
        form = description.get("form") if isinstance(description, dict) else description
        raise UserError(f"unknown cost form {form!r}: use one of {', '.join(FORMS)}")
    kind = FORMS[description["form"]]
    known = {f.name for f in fields(kind)}
    own = {f.name for f in fields(kind) if not f.kw_only}
    given = set(description) - {"form", "fit"}
    if given - known or own - given:
        unknown, missing = ", ".join(given - known) or "none", ", ".join(own - given) or "none"
        raise UserError(f"{kind.form} cost: unknown parameters: {unknown}; missing: {missing}")
    try:
        return kind(**{name: description[name] for name in given})
    except (TypeError, ValueError) as error:
        raise UserError(f"{kind.form} cost: {error}") from error


def is_monotone(cost: MessageCost, sizes: Sequence[float] | Floats) -> bool:
    """Whether a larger message never costs less, over the given sizes."""
    return bool(np.all(np.diff(cost(np.unique(np.asarray(sizes, float)))) >= -1e-15))


def _finite(cost: MessageCost, *names: str) -> None:
    for name in names:
        value = getattr(cost, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float, np.number))
            or not np.isfinite(value)
        ):
            raise UserError(f"{cost.form} cost: {name} is {value!r}: must be a finite number")


def _vectors(cost: MessageCost, *names: str) -> None:
    """Freeze the named fields as float vectors of one common length."""
    arrays = [np.array(getattr(cost, name), dtype=float) for name in names]
    if any(a.ndim != 1 or a.shape != arrays[0].shape or not np.all(np.isfinite(a)) for a in arrays):
        raise UserError(
            f"{cost.form} cost: {' and '.join(names)} must be lists of equal length, all finite"
        )
    for name, array in zip(names, arrays, strict=True):
        array.setflags(write=False)
        object.__setattr__(cost, name, array)
