"""Settings that a paper leaves out, judged by what it states.

A statement is an interval of a quantity, which is computed for every setting of a grid. Of one setting
nothing is proven; what holds together in none of them does not hold in the model, within the grid's ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats


@dataclass(frozen=True)
class Stated:
    """One statement of the paper as an interval: low <= quantity <= high."""

    name: str
    low: float
    high: float

    def miss(self, value: Floats) -> NDArray[np.float32]:
        """Return the distance from the interval in half-widths (half open: 0.05), 0 inside; any shape."""
        outside = np.maximum(self.low - value, value - self.high)
        half = (self.high - self.low) / 2
        width = half if math.isfinite(half) else 0.05
        return (np.maximum(outside, 0.0) / width).astype(np.float32)


APART = 2
"""So many of the others must a statement cost to be contradicted by them: one fewer decides nothing."""


@dataclass(frozen=True, eq=False)
class LeftOut:
    """How a statement stands with the ``others`` of a search.

    values : what its quantity is in the settings that meet the most others, each once, in order
    ends : the least and largest of it in the settings that meet the most statements, itself counted
    most : others that a setting meets at most; with_it : the same where it holds too, -1 if it never does
    settings : how many meet the most statements, itself counted, and the share ``counted`` in which it holds
    uncounted : its share of the settings that meet the most others
    only : each scanned number at some values of which it never holds, with its other values
    """

    values: Floats
    ends: tuple[float, float]
    others: int
    most: int
    with_it: int
    settings: int
    counted: float
    uncounted: float
    only: Mapping[str, Floats]

    @property
    def standing(self) -> str:
        """Return "contradicted" by the others, "compatible" with them, or "undecided"."""
        if self.with_it < 0 or self.with_it <= self.most - APART:
            return "contradicted"
        return "compatible" if self.counted >= 0.5 else "undecided"


@dataclass(frozen=True, eq=False)
class SettingSearch:
    """Which statements hold where: ``holds`` is (statements, *grid.shape).

    grid : its ``shape``, and the scanned numbers of its last axes by name, in order, ``free``
    values : of each statement's quantity, which broadcast to the grid's shape
    """

    grid: Any
    stated: tuple[Stated, ...]
    holds: NDArray[np.bool_]
    values: Mapping[str, Floats]

    @cached_property
    def miss(self) -> NDArray[np.float32]:
        """Return the statements' distances from their intervals, in half-widths, summed, by setting."""
        missed = np.zeros(self.grid.shape, dtype=np.float32)
        for each in self.stated:
            missed += each.miss(self.values[each.name])
        return missed

    @cached_property
    def count(self) -> NDArray[np.int8]:
        """Return how many statements hold, by setting."""
        return self.holds.sum(axis=0, dtype=np.int8)

    def fits_all(self) -> bool:
        """Return whether some setting agrees with every statement."""
        return bool(self.holds.all(axis=0).any())

    def most(self, *required: str) -> NDArray[np.bool_]:
        """Return the mask of the settings with the most statements, among those where ``required`` hold."""
        allowed = np.all(self.holds[[self._number(name) for name in required]], axis=0)
        mask: NDArray[np.bool_] = allowed & (self.count == self.count[allowed].max())
        return mask

    def best_index(self, *required: str) -> tuple[int, ...]:
        """Return the best compromise: ``most(*required)``, and among these the smallest ``miss``."""
        chosen = np.where(self.most(*required), self.miss, np.inf)
        return tuple(
            int(i) for i in np.unravel_index(int(np.argmin(chosen)), chosen.shape)
        )

    def range_of(self, name: str, *required: str) -> tuple[float, float]:
        """Return the least and largest value of a statement's quantity, over ``most(*required)``."""
        seen = self._value(name)[self.most(*required)]
        return float(seen.min()), float(seen.max())

    def without(
        self, name: str, low: float = math.nan, high: float = math.nan
    ) -> LeftOut:
        """Return how a quantity stands with all other statements, if it lies from ``low`` to ``high``.

        low, high : if NaN, of the statement of that name; a quantity need not be stated otherwise
        """
        value, names = self._value(name), [each.name for each in self.stated]
        own = (
            self.holds[names.index(name)]
            if name in names
            else np.zeros(self.grid.shape, bool)
        )
        others = self.count - own
        holds = own if math.isnan(low) else (value >= low) & (value <= high)
        best, counted = others == others.max(), others + holds
        top = counted == counted.max()
        return LeftOut(
            values=np.unique(value[best]),
            ends=(float(value[top].min()), float(value[top].max())),
            others=len(names) - (name in names),
            most=int(others.max()),
            with_it=int(others[holds].max(initial=-1)),
            settings=int(top.sum()),
            counted=float(holds[top].mean()),
            uncounted=float(holds[best].mean()),
            only=self._only_at(holds),
        )

    def _only_at(self, holds: NDArray[np.bool_]) -> dict[str, Floats]:
        """Return where something holds, of each scanned number that it does not hold at every value of."""
        free, only = self.grid.free, {}
        rest = holds.any(axis=tuple(range(holds.ndim - len(free))))
        for name, scanned in free.items():  # each axis in turn is the first of the rest
            anywhere = rest.reshape(len(scanned), -1).any(axis=1)
            rest = rest.any(axis=0)
            if not anywhere.all():
                only[name] = scanned[anywhere]
        return only

    def dropping(self, *names: str) -> SettingSearch:
        """Return the search without these statements; their quantities stay."""
        kept = [each.name not in names for each in self.stated]
        stated = tuple(
            each for each, keep in zip(self.stated, kept, strict=True) if keep
        )
        return replace(self, stated=stated, holds=self.holds[kept])

    def _number(self, name: str) -> int:
        return [statement.name for statement in self.stated].index(name)

    def _value(self, name: str) -> Floats:
        return np.broadcast_to(self.values[name], self.grid.shape)

    def residuals(self, index: tuple[int, ...]) -> pd.DataFrame:
        """Return every statement at one setting: allowed interval, computed value, whether it holds."""
        values = [float(self._value(each.name)[index]) for each in self.stated]
        bounds = [(each.name, each.low, each.high) for each in self.stated]
        holds = [bool(each[index]) for each in self.holds]
        table = [
            (*bound, *rest) for bound, *rest in zip(bounds, values, holds, strict=True)
        ]
        return pd.DataFrame(
            table, columns=["statement", "low", "high", "computed", "holds"]
        )

    def alone(self) -> pd.DataFrame:
        """Return for each statement the share of settings that agree, and of the best ones."""
        best, stated = self.most(), zip(self.stated, self.holds, strict=True)
        rows = [(each.name, holds.mean(), holds[best].mean()) for each, holds in stated]
        return pd.DataFrame(rows, columns=["statement", "settings", "best_settings"])

    def ranges(self, wanted: NDArray[np.bool_]) -> pd.DataFrame:
        """Return the ends of every free setting, over the ``wanted`` ones and as scanned."""
        places = np.nonzero(wanted)[-len(self.grid.free) :]
        rows = [
            (name, scanned[at].min(), scanned[at].max(), scanned.min(), scanned.max())
            for (name, scanned), at in zip(self.grid.free.items(), places, strict=True)
        ]
        return pd.DataFrame(
            rows, columns=["free", "low", "high", "scanned_low", "scanned_high"]
        )


def settle(
    stated: Sequence[Stated], grid: Any, values: Mapping[str, Floats]
) -> SettingSearch:
    """Return every setting of a grid against every statement; ``values`` broadcast to the grid's shape."""
    unknown = [each.name for each in stated if each.name not in values]
    if unknown:
        raise UserError(f"no quantity {unknown[0]!r}: use one of {', '.join(values)}")
    holds = np.empty((len(stated), *grid.shape), dtype=bool)
    for k, each in enumerate(stated):
        value = values[each.name]
        holds[k] = (value >= each.low) & (value <= each.high)
    return SettingSearch(grid, tuple(stated), holds, values)
