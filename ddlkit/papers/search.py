"""Which of the settings that a paper leaves out agree with what it states: a grid against statements.

A statement is an interval of a quantity; a quantity is computed for every setting of a grid. Of one setting
nothing is proven. What holds together in none of them does not hold together in the model, within the
grid's ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
HALF_OPEN_WIDTH = 0.05
"""What counts as one unit of missing a statement that has only one bound."""


@dataclass(frozen=True)
class Stated:
    """One statement of the paper as an interval: low <= quantity <= high."""

    name: str
    low: float
    high: float

    def miss(self, value: Floats) -> NDArray[np.float32]:
        """Distance from the interval in half-widths, 0 inside."""
        outside = np.maximum(self.low - value, value - self.high)
        half = (self.high - self.low) / 2
        width = half if math.isfinite(half) else HALF_OPEN_WIDTH
        return (np.maximum(outside, 0.0) / width).astype(np.float32)


@dataclass(frozen=True)
class LeftOut:
    """A statement that is left out: its values in the settings that agree with the most ``others``.

    most : how many others these ``settings`` agree with; with_it : how many at most where it holds too. If
    it is fewer, who accepts the statement has to give up so many more of the others.
    """

    low: float
    high: float
    settings: int
    others: int
    most: int
    with_it: int


@dataclass(frozen=True, eq=False)
class SettingSearch:
    """Which statements hold where: ``holds`` is (statements, *grid.shape).

    grid : its ``shape``, and the scanned numbers of its last axes by name, in order, ``free``
    ``miss`` (*grid.shape): the statements' distances from their intervals, in half-widths, summed.
    """

    grid: Any
    stated: tuple[Stated, ...]
    holds: NDArray[np.bool_]
    miss: NDArray[np.float32]
    values: Mapping[str, Floats]

    @cached_property
    def count(self) -> NDArray[np.int64]:
        """How many statements hold, by setting."""
        return self.holds.sum(axis=0)

    def fits_all(self) -> bool:
        """Whether some setting agrees with every statement."""
        return bool(self.holds.all(axis=0).any())

    def most(self, *required: str) -> NDArray[np.bool_]:
        """Mask of the settings with the most statements, among those where ``required`` hold.

        Raises UserError when these hold nowhere together.
        """
        allowed = np.all(self.holds[[self._number(name) for name in required]], axis=0)
        if not np.any(allowed):
            raise UserError(f"no scanned setting agrees with {' and '.join(required)}")
        mask: NDArray[np.bool_] = allowed & (self.count == self.count[allowed].max())
        return mask

    def best_index(self, *required: str) -> tuple[int, ...]:
        """The best compromise: ``most(*required)``, and among these the smallest ``miss``."""
        chosen = np.where(self.most(*required), self.miss, np.inf)
        return tuple(int(i) for i in np.unravel_index(int(np.argmin(chosen)), chosen.shape))

    def range_of(self, name: str, *required: str) -> tuple[float, float]:
        """Least and largest value of what a statement is about, over ``most(*required)``."""
        seen = np.broadcast_to(self.values[name], self.grid.shape)[self.most(*required)]
        return float(seen.min()), float(seen.max())

    def without(self, name: str) -> LeftOut:
        """What all *other* statements say of this one."""
        k, value = self._number(name), np.broadcast_to(self.values[name], self.grid.shape)
        agreed = self.count - self.holds[k]
        best = agreed == agreed.max()
        seen = value[best]
        return LeftOut(
            low=float(seen.min()),
            high=float(seen.max()),
            settings=int(best.sum()),
            others=len(self.stated) - 1,
            most=int(agreed.max()),
            with_it=int(agreed[self.holds[k]].max(initial=0)),
        )

    def _number(self, name: str) -> int:
        return [one.name for one in self.stated].index(name)

    def residuals(self, index: tuple[int, ...]) -> pd.DataFrame:
        """Every statement at one setting: allowed interval, computed value, whether it holds."""
        rows = []
        for one, holds in zip(self.stated, self.holds, strict=True):
            value = np.broadcast_to(self.values[one.name], self.grid.shape)[index]
            rows.append((one.name, one.low, one.high, float(value), bool(holds[index])))
        return frame(rows, ["statement", "low", "high", "computed", "holds"])

    def alone(self) -> pd.DataFrame:
        """For each statement: the share of settings that agree, and of the best ones."""
        best, stated = self.most(), zip(self.stated, self.holds, strict=True)
        rows = [(one.name, holds.mean(), holds[best].mean()) for one, holds in stated]
        return frame(rows, ["statement", "settings", "best_settings"])

    def conflicts(self) -> pd.DataFrame:
        """Pairs of statements of which each holds somewhere, but both nowhere."""
        packed = np.packbits(self.holds.reshape(len(self.stated), -1), axis=1)
        each = [(one, holds) for one, holds in zip(self.stated, packed, strict=True) if holds.any()]
        rows = [
            (one.name, other.name)
            for k, (one, holds) in enumerate(each)
            for other, also in each[:k]
            if not np.any(holds & also)
        ]
        return frame(rows, ["statement", "contradicts"])

    def ranges(self, wanted: NDArray[np.bool_]) -> pd.DataFrame:
        """Smallest and largest value of every free setting over the ``wanted`` ones.

        "scanned" is the range of the grid: a setting whose range is as wide is not determined.
        """
        rows = []
        first = len(self.grid.shape) - len(self.grid.free)
        for axis, (name, scanned) in enumerate(self.grid.free.items(), first):
            seen = scanned[np.nonzero(wanted)[axis]]
            rows.append((name, seen.min(), seen.max(), scanned.min(), scanned.max()))
        return frame(rows, ["free", "low", "high", "scanned_low", "scanned_high"])


def frame(rows: Sequence[Any], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """These rows as a data frame; pandas is loaded only now, as this room imports without it."""
    import pandas as pd

    return pd.DataFrame(rows, columns=columns)


def settle(stated: Sequence[Stated], grid: Any, values: Mapping[str, Floats]) -> SettingSearch:
    """Every setting of a grid against every statement; ``values`` broadcast to the grid's shape.

    Raises UserError for a statement of which there is no value.
    """
    unknown = [one.name for one in stated if one.name not in values]
    if unknown:
        raise UserError(f"no quantity {unknown[0]!r}: use one of {', '.join(values)}")
    holds = np.empty((len(stated), *grid.shape), dtype=bool)
    miss = np.zeros(grid.shape, dtype=np.float32)
    for k, one in enumerate(stated):
        value = values[one.name]
        holds[k] = (value >= one.low) & (value <= one.high)
        miss += one.miss(value)
    return SettingSearch(grid, tuple(stated), holds, miss, values)
