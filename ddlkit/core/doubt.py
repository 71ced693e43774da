"""How sure a number is: intervals of draws and of medians, and errors of a cost where it was not fitted.

Repeats of a size tell how the times scatter, not whether the form can follow them; and most logs have no
repeats at all. The error at a size that the fit has not seen holds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import Form, MessageCost, Table, parameters
from ddlkit.core.errors import UserError, shown
from ddlkit.core.workload import Floats

MOST_DRAWS = 10_000
"""Of a cost: what ddlkit fit writes has 200."""
NEAR, ALIKE = 2.0, 0.5
"""How fast an error counts less away from its size: e to this power a size further; and how much of what is
expected near a size is expected everywhere. With few errors, neither alone tells enough."""
AROUND = 10
"""So many errors count in the mean around a size. By these three the half-width of 95% of the draws is less
than three times the error, in the median of fourteen dense tables (rules vidur-*, data/external/rules.yml);
87% of their rows lie in it, and 95% would lie in five times the error."""
LEAST_ERROR = 1e-4
"""Of sizes held out: less is chance."""
MEAN = float(np.exp(np.euler_gamma))
"""Of an exponential law over its geometric mean, which single large errors hardly move."""
LEVEL = 0.95
"""Of an interval, where nobody asks for another."""


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


@cache
def _rank(n: int, rare: int) -> int:
    """Return the largest k with P(Binomial(n, 1/2) < k) <= 1 / ``rare``, or 0. Exact, in integers."""
    k, term, below = 0, 1, 1
    while rare * below <= 2**n:
        term = term * (n - k) // (k + 1)
        k, below = k + 1, below + term
    return k


def median_interval(samples: Sequence[float] | Floats, level: float = LEVEL) -> tuple[float, float]:
    """Return the nonparametric interval of the median from order statistics.

    The k-th smallest and k-th largest of n samples enclose the median unless fewer than k of them fall
    on one side of it: that is as probable as fewer than k heads in n tosses, whatever the distribution.
    Fewer than 6 samples bound nothing at 95%: (-inf, inf).

    >>> median_interval([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    (1.0, 6.0)
    """
    n = len(samples)
    k = _rank(n, round(2 / (1 - level)))
    if k == 0:
        return -np.inf, np.inf
    ordered = np.sort(samples)
    return float(ordered[k - 1]), float(ordered[n - k])


# -- where a cost was not fitted -----------------------------------------------------------------


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
    apart: float = 0.0

    @classmethod
    def near(
        cls,
        sizes: Floats,
        log_errors: Floats,
        at_bytes: Floats,
        ends: Sequence[float],
        apart: float = 0.0,
    ) -> HeldOut:
        """Return what errors (n,) at sizes (n,) tell of each of ``at_bytes`` (k,).

        An error counts less the farther away it is, in logarithms, so a range where the form does badly
        widens all others by the share ALIKE only.
        """
        known, logs = np.log(at_bytes), np.log(np.maximum(log_errors, LEAST_ERROR))
        step = (known[-1] - known[0]) / (known.size - 1)
        weight = np.exp(-NEAR * np.abs(known[:, None] - np.log(sizes)) / step)
        here = np.exp(weight @ logs / weight.sum(axis=1))
        everywhere = np.exp(logs.mean())
        mean = MEAN * ((1 - ALIKE) * here + ALIKE * everywhere)
        below, above = ends
        return cls(at_bytes, mean, below, above, apart)

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
        ends = {"below": self.below, "above": self.above, "apart": self.apart}
        return {"at_bytes": self.at_bytes.tolist(), "log_errors": errors, **ends}

    @classmethod
    def from_dict(cls, description: Any) -> HeldOut:
        """Return what ``to_dict`` described. Raises UserError for anything else."""
        try:
            sizes, errors = (
                np.asarray(description[name], float) for name in ("at_bytes", "log_errors")
            )
            ends = [float(description[name]) for name in ("below", "above", "apart")]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            reason = "the cost's held_out is not what ddlkit fit writes: fit again"
            raise UserError(reason) from error
        numbers = np.array([*sizes.ravel(), *errors.ravel(), *ends])
        shaped = sizes.ndim == 1 and sizes.size >= 2 and sizes.shape == errors.shape
        if not (shaped and np.all(np.isfinite(numbers)) and numbers.min() >= 0):
            raise UserError("the cost's held_out has no errors, or some below zero: fit again")
        if not np.all(np.diff(sizes, prepend=0.0) > 0):
            raise UserError("the cost's held_out has sizes that do not increase: fit again")
        return cls(sizes, errors, *ends)


@dataclass(frozen=True, eq=False)
class _Off(MessageCost, described=False):
    """Another cost that is off by so many ``times`` the error of sizes held out of its fit: a draw."""

    form: ClassVar[str] = "drawn"
    cost: MessageCost
    held_out: HeldOut
    times: float

    def __post_init__(self) -> None:
        self._check_use()

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


# -- draws as a file has them ------------------------------------------------------------------

DIGITS = 7
"""Of numbers in draws; what a resample draws again has the very same digits."""


def packed(draws: Sequence[Form]) -> dict[str, Any]:
    """Return, JSON-ready, how many ``draws`` of one form, and each parameter's numbers, and which by draw.

    Draws of a table have the same sizes, and times of which many are alike: what is alike is there once.
    """
    columns: dict[str, Any] = {"count": len(draws)}
    for name in parameters(type(draws[0])):
        rows = [np.ravel(getattr(draw, name)) for draw in draws]
        columns[name] = []
        for numbers in np.array(rows, dtype=float).T:
            texts = [f"{number:.{DIGITS}g}" for number in numbers]
            values, which = np.unique(texts, return_inverse=True)
            columns[name].append({"values": [*map(float, values)], "which": which.tolist()})
            if len(values) == 1:
                columns[name][-1]["which"] = []
    return columns


def unpacked(cost: MessageCost, columns: Any) -> list[MessageCost]:
    """Return the draws of ``cost`` that ``packed`` described; of no draws at all, none.

    Raises UserError for anything else.
    """
    if columns == []:
        return []
    try:
        count, by_name = checked_count(columns["count"]), {}
        for name in parameters(type(cost)):
            every = [
                np.asarray(column["values"], dtype=float)[column["which"] or [0] * count]
                for column in columns[name]
            ]
            rows = np.array(every, dtype=float).reshape(len(every), count).T
            by_name[name] = rows if np.ndim(getattr(cost, name)) else rows[:, 0]
        return [replace(cost, **{n: rows[k] for n, rows in by_name.items()}) for k in range(count)]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError("the cost's draws are not what ddlkit fit writes: fit again") from error


def checked_count(draws: Any) -> int:
    """Return how many draws there are. Raises UserError for what is no number of them."""
    if not isinstance(draws, int) or not 0 <= draws <= MOST_DRAWS:
        raise UserError(f"the cost has {shown(draws)} draws: from 0 to {MOST_DRAWS}: fit again")
    return draws
