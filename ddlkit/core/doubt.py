"""How far a message cost is off where it was not fitted, learned from sizes that were left out of the fit.

Repeats of a size tell how the times scatter, not whether the form can follow them; and most logs have no
repeats at all. The error at a size that the fit has not seen holds both.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import Form, MessageCost, Table, cost_from_dict, parameters
from ddlkit.core.errors import UserError, shown
from ddlkit.core.workload import Floats

PLACES = string.digits + string.ascii_lowercase
"""A letter for each of a few values, so that draws of a table with many sizes stay short."""
MOST_DRAWS = 10_000
"""Of a cost: what ddlkit fit writes has 200."""
LEVEL = 0.95
"""Of an interval, where nobody asks for another."""
ENDS = (2.0, 4.0, 8.0)
"""So many times beyond the sizes that it is fitted to, each once, a form is tried at either end."""


def interval(draws: ArrayLike, level: float = LEVEL) -> Floats:
    """Return (2, ...) lower and upper end between which the middle ``level`` of draws (B, ...) lies.

    Raises UserError for a level that is not between 0 and 1.

    >>> interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.5).tolist()
    [2.0, 4.0]
    """
    if not 0 < level < 1:
        raise UserError(f"level is {shown(level)}: must be above 0 and below 1, as 0.95")
    tail = round((1 - level) / 2, 12)  # 0.025 of 0.95, to the last bit
    return np.asarray(np.quantile(np.asarray(draws, dtype=float), [tail, 1 - tail], axis=0))


@dataclass(frozen=True, eq=False)
class Off(MessageCost):
    """Another cost that is off by a factor at the sizes it was fitted to, and by more beyond them.

    cost : the other one; log_error : logarithm of the factor at first_bytes
    falls : power of the size with which that logarithm falls from there to last_bytes; 0: the same at all
    apart : of a cost that has sizes, power of the `gap` with which it grows, log_error being that at a gap
        of 1; 0: gaps do not matter
    below, above : by how much the logarithm grows for a size e times smaller, or larger, than those
    """

    form: ClassVar[str] = "off"
    cost: MessageCost
    log_error: float
    first_bytes: float
    last_bytes: float
    below: float
    above: float
    falls: float = field(default=0.0, kw_only=True)
    apart: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.cost, dict):  # of a JSON description
            object.__setattr__(self, "cost", cost_from_dict(self.cost))
        if not isinstance(self.cost, MessageCost):
            raise UserError(f"off cost: cost is {shown(self.cost)}: must be another cost")
        self._check_numbers("log_error", "first_bytes", "last_bytes", "below", "above")
        if not 0 < self.first_bytes <= self.last_bytes:
            raise UserError("off cost: first_bytes must be above zero and at most last_bytes")
        if self.apart and not isinstance(self.cost, Table):
            raise UserError(f"off cost: a {self.cost.form} cost has no sizes: apart must be 0")
        for name in ("collective", "workers", "algorithm", "samples"):
            object.__setattr__(self, name, getattr(self.cost, name))

    def _seconds(self, sizes: Floats) -> Floats:
        at = np.maximum(sizes, 1.0)
        smaller = np.log(self.first_bytes / np.minimum(at, self.first_bytes))
        larger = np.log(np.maximum(at, self.last_bytes) / self.last_bytes)
        off = self._inside(at) + self.below * smaller + self.above * larger
        return np.asarray(self.cost(sizes) * np.exp(off))

    def _inside(self, sizes: ArrayLike) -> Floats:
        """Logarithm of the factor at sizes, of those beyond the fitted ones as at the nearest."""
        at = np.clip(sizes, self.first_bytes, self.last_bytes)
        off = np.asarray(self.log_error * (self.first_bytes / at) ** self.falls)
        return off * gap(self.cost.bytes, at) ** self.apart if isinstance(self.cost, Table) else off

    def startup_s(self) -> float:
        """That of the other cost: far below the fitted sizes the doubt is large, not the software."""
        return self.cost.startup_s() * float(np.exp(self._inside(self.first_bytes)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the other cost's own description inside."""
        return {**super().to_dict(), "cost": self.cost.to_dict()}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Errors of a form at sizes that were left out of its fit.

    log_errors : (n,) size of the logarithm of measured over predicted, increasing, a row each, as it would
        be at first_bytes, and where errors grow with gaps at a `gap` of 1
    first_bytes, last_bytes : between which sizes the cost was fitted
    below, above : what such an error grows by, for a size e times smaller, or larger, than those: the most
        seen of ENDS
    falls : power of the size with which errors fall from first_bytes to last_bytes
    apart : power of the `gap` with which they grow; 0: gaps do not matter
    """

    log_errors: Floats
    first_bytes: float
    last_bytes: float
    below: float
    above: float
    falls: float = 0.0
    apart: float = 0.0

    def quantile(self, share: ArrayLike) -> Floats:
        """The error that this ``share`` (any shape, below 1) of new rows should stay within.

        One of n known errors, ordered, has k/(n+1) of new ones below it. Beyond the largest nothing is
        known: there errors are taken to thin out as an exponential law does, which is more than a normal one.
        """
        n, wanted = self.log_errors.size, np.asarray(share, dtype=float)
        inside = np.interp(wanted, np.arange(1, n + 1) / (n + 1), self.log_errors)
        return np.asarray(inside * np.maximum(_rarer(wanted, n), 1.0))

    def draws(self, cost: MessageCost, count: int) -> tuple[Off, ...]:
        """``count`` costs, too fast and too slow in turn by evenly spaced quantiles of the error."""
        shares = (np.arange(count) // 2 + 0.5) / max((count + 1) // 2, 1)
        signs = np.where(np.arange(count) % 2, 1.0, -1.0)
        return tuple(
            Off(
                cost,
                float(sign * error),
                self.first_bytes,
                self.last_bytes,
                float(sign * grown * self.below),
                float(sign * grown * self.above),
                falls=self.falls,
                apart=self.apart,
            )
            for sign, grown, error in zip(
                signs, _rarer(shares, len(ENDS)), self.quantile(shares), strict=True
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, errors to four digits; between which sizes the fit itself says."""
        errors = [float(f"{error:.4g}") for error in self.log_errors]
        ends = {"below": self.below, "above": self.above}
        return {"log_errors": errors, "falls": self.falls, "apart": self.apart, **ends}

    @classmethod
    def from_dict(cls, description: Any, fitted: Mapping[str, Any]) -> HeldOut:
        """What ``to_dict`` described, of a fit from_bytes to to_bytes. Raises UserError for anything else."""
        try:
            errors = np.sort(np.asarray(description["log_errors"], dtype=float))
            edges = (float(fitted[name]) for name in ("from_bytes", "to_bytes"))
            ends = (float(description[name]) for name in ("below", "above"))
            powers = [float(description.get(name, 0.0)) for name in ("falls", "apart")]
            found = cls(errors, *edges, *ends, *powers)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                "the cost's held_out is not what ddlkit fit writes: fit again"
            ) from error
        numbers = [*errors.flat, found.first_bytes, found.last_bytes, found.below, found.above]
        if (
            errors.ndim != 1
            or not errors.size
            or not np.all(np.isfinite([*numbers, *powers]))
            or min(numbers) < 0
        ):
            raise UserError("the cost's held_out has no errors, or some below zero: fit again")
        return found


POWERS = np.linspace(-1.0, 1.0, 401)
"""Of the size, among which the one is looked for with which errors fall."""
TRUSTED = 0.5
"""Share of it that is used: ten errors tell a power to a few tenths only. Of shares from a quarter to the
whole it left the narrowest intervals for what they missed on twelve logs, and nearly so on seven dense tables
(`tuned` of rules vidur-*, data/external/rules.yml)."""


def falling(sizes: Floats, errors: Floats) -> float:
    """Power of the size with which errors (n,), none below zero, fall: TRUSTED of the likeliest one.

    Likeliest if at each of the ``sizes`` (n,) an error follows an exponential law whose mean is a power of
    the size. Below 0 where errors rise; 0 where nothing is off, or only at one size.
    """
    if not errors.any() or np.ptp(sizes) == 0:
        return 0.0
    at = np.log(sizes) - np.log(sizes).mean()
    unlikely = np.log(np.exp(POWERS[:, None] * at) @ errors)
    return float(TRUSTED * POWERS[np.argmin(unlikely)])


def gap(known: Floats, sizes: ArrayLike) -> Floats:
    """Logarithm of how many times apart two neighbours of the ``known`` sizes lie, between which each is.

    known : (k,) increasing, at least 2; sizes : any shape; beyond the known ones as of the nearest two
    """
    behind = np.clip(np.searchsorted(known, sizes), 1, known.size - 1)
    return np.asarray(np.log(known[behind] / known[behind - 1]))


def _rarer(share: Floats, n: int) -> Floats:
    """How many times the largest of ``n`` errors that one is which ``share`` of all stay within."""
    return np.asarray(np.log1p(-share) / -np.log1p(n))


# -- draws as a file has them ------------------------------------------------------------------

DIGITS = 7
"""Of numbers in draws; what a resample draws again has the very same digits."""


def packed(draws: Sequence[Form]) -> dict[str, Any]:
    """JSON-ready: how many ``draws`` of one form, and each parameter: its numbers, and which of them by draw.

    Draws of a table have the same sizes, and times of which many are alike: what is alike is there once.
    """
    columns: dict[str, Any] = {"count": len(draws)}
    for name in parameters(type(draws[0])):
        rows = np.array([np.ravel(getattr(draw, name)) for draw in draws], dtype=float)
        columns[name] = [_column(column) for column in rows.T]
    return columns


def _column(numbers: Floats) -> dict[str, Any]:
    values, which = np.unique([f"{number:.{DIGITS}g}" for number in numbers], return_inverse=True)
    known: dict[str, Any] = {"values": [float(value) for value in values]}
    if len(values) == 1:
        return known
    short = len(values) <= len(PLACES)
    return {**known, "which": "".join(PLACES[k] for k in which) if short else which.tolist()}


def unpacked(cost: MessageCost, columns: Any) -> list[MessageCost]:
    """The draws of ``cost`` that ``packed`` described, or that each are a description of their own.

    Raises UserError for anything else.
    """
    if isinstance(columns, list) and len(columns) <= MOST_DRAWS:
        return [cost_from_dict(draw) for draw in columns]
    try:
        count, own = checked_count(columns["count"]), {}
        for name in parameters(type(cost)):
            every = [_numbers(column, count) for column in columns[name]]
            rows = np.array(every, dtype=float).reshape(len(every), count).T
            own[name] = rows if np.ndim(getattr(cost, name)) else rows[:, 0]
        return [replace(cost, **{name: own[name][k] for name in own}) for k in range(count)]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError("the cost's draws are not what ddlkit fit writes: fit again") from error


def checked_count(draws: Any) -> int:
    """How many draws there are. Raises UserError for what is no number of them."""
    if not isinstance(draws, int) or not 0 <= draws <= MOST_DRAWS:
        raise UserError(f"the cost has {shown(draws)} draws: from 0 to {MOST_DRAWS}: fit again")
    return draws


def _numbers(column: Any, count: int) -> Floats:
    values = np.asarray(column["values"], dtype=float)
    which = column.get("which", [0] * count)
    if isinstance(which, str):
        which = [PLACES.index(letter) for letter in which]
    return values[np.asarray(which, dtype=np.int64)]
