"""Settings that a paper leaves open, judged by the paper's statements.

A statement is an interval of a quantity. The quantity is computed for every setting of
a grid. That a statement holds in one setting proves nothing. But statements that hold
together in no setting cannot all hold in the model, within the ranges of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats


@dataclass(frozen=True)
class Stated:
    """One statement of the paper as an interval: low <= quantity <= high.

    Attributes
    ----------
    name : str
        The name of the statement and of its quantity.
    low, high : float
        The ends of the interval, which may be infinite.
    """

    name: str
    low: float
    high: float

    def miss(self, value: Floats) -> NDArray[np.float32]:
        """Return how far values are outside the interval.

        Parameters
        ----------
        value : ndarray
            Values of the quantity, of any shape.

        Returns
        -------
        ndarray of float32, shape of ``value``
            The distance of each value from the interval, in half-widths of the interval, and
            0 inside. An interval with one end is given a half-width of 0.05 in the unit of
            the quantity, which is a choice.
        """
        # This is negative for values inside the interval.
        outside = np.maximum(self.low - value, value - self.high)
        half_width = (self.high - self.low) / 2
        if not math.isfinite(half_width):
            half_width = 0.05
        # A grid has many settings, for which float32 takes little memory.
        return (np.maximum(outside, 0.0) / half_width).astype(np.float32)


APART = 2
"""How many others must be given up, at least, for a statement that they contradict to hold.

If only one must be given up, nothing is decided."""
HALF = 0.5
"""The least share of the settings, or of the cases, in which a statement must hold to be
compatible with them."""


@dataclass(frozen=True, eq=False)
class LeftOut:
    """How a statement stands with the other statements of a search.

    Attributes
    ----------
    values : ndarray
        The values of its quantity in the settings that meet the most others, each once
        and in ascending order.
    others : int
        The number of other statements.
    most : int
        How many others a setting meets at most.
    with_it : int
        How many others a setting meets at most where the statement holds too, or -1 if
        it never holds.
    settings : int
        How many settings meet the most others.
    share : float
        The share of these settings in which the statement holds.
    only : mapping of str to ndarray
        By the name of a scanned number, those of its values at which the statement holds in
        some setting. Numbers at each value of which it does so are left out.
    """

    values: Floats
    others: int
    most: int
    with_it: int
    settings: int
    share: float
    only: Mapping[str, Floats]

    @property
    def standing(self) -> str:
        """Return "contradicted" by the others, "compatible" with them, or "undecided".

        The settings are chosen by the other statements alone. If the statement itself counted,
        it would favour settings that agree with it.
        """
        never_holds = self.with_it < 0
        # Where the statement holds, at least APART fewer others hold than elsewhere.
        costs_others = self.with_it <= self.most - APART
        if never_holds or costs_others:
            return "contradicted"
        # The share is that of the settings which meet the most others.
        if self.share >= HALF:
            return "compatible"
        return "undecided"


class _BestOthers(NamedTuple):
    """The settings that meet the most statements other than one.

    Attributes
    ----------
    most : int
        How many of these other statements each of the settings meets.
    places : ndarray, shape (n,)
        The places of these settings in the flattened grid.
    values : ndarray
        The values of the quantity in these settings, each once and in order.
    """

    most: int
    places: NDArray[np.intp]
    values: Floats


@dataclass(frozen=True, eq=False)
class SettingSearch:
    """Which statements hold in which settings of a grid.

    A setting is one combination of the numbers that a paper leaves open. A statement is
    the interval in which the paper places a quantity.

    Attributes
    ----------
    grid : object
        All settings. It has a ``shape``, and ``free``, a mapping with an array for each of
        its last axes, in their order: the numbers that are scanned along the axis, by name.
    stated : tuple of Stated
        The statements.
    holds : ndarray of bool, shape (statements, *grid.shape)
        Whether each statement holds in each setting.
    values : mapping of str to ndarray
        The quantities, by name of the statement. They broadcast to the grid's shape.
    """

    grid: Any
    stated: tuple[Stated, ...]
    holds: NDArray[np.bool_]
    values: Mapping[str, Floats]

    @cached_property
    def miss(self) -> NDArray[np.float32]:
        """Return the sum of all statements' distances, in half-widths, by setting."""
        missed = np.zeros(self.grid.shape, dtype=np.float32)
        for statement in self.stated:
            missed += statement.miss(self.values[statement.name])
        return missed

    @cached_property
    def count(self) -> NDArray[np.int8]:
        """Return the number of statements that hold, by setting."""
        return self.holds.sum(axis=0, dtype=np.int8)

    def fits_all(self) -> bool:
        """Return whether some setting agrees with every statement."""
        return bool(self.holds.all(axis=0).any())

    def most(self, *required: str) -> NDArray[np.bool_]:
        """Return which settings meet the most statements.

        Parameters
        ----------
        *required : str
            Names of statements that must hold.

        Returns
        -------
        ndarray of bool, shape of the grid
            Of the settings in which all ``required`` statements hold, those in which the
            most statements hold.

        Raises
        ------
        ValueError
            If no statement has a required name, or if no setting meets all required
            statements.
        """
        positions = [self._position(name) for name in required]
        # Without required statements, all settings are allowed.
        allowed = np.all(self.holds[positions], axis=0)
        most = self.count[allowed].max()
        mask: NDArray[np.bool_] = allowed & (self.count == most)
        return mask

    def best_index(self, *required: str) -> tuple[int, ...]:
        """Return the place in the grid of the setting that is the best compromise.

        Of the settings of ``most(*required)`` this setting has the smallest ``miss``.
        """
        misses = np.where(self.most(*required), self.miss, np.inf)
        place = np.unravel_index(int(np.argmin(misses)), misses.shape)
        return tuple(int(i) for i in place)

    def range_of(self, name: str, *required: str) -> tuple[float, float]:
        """Return the least and largest value of a quantity over ``most(*required)``."""
        values = self._value(name)[self.most(*required)]
        return float(values.min()), float(values.max())

    def without(
        self, name: str, low: float = math.nan, high: float = math.nan
    ) -> LeftOut:
        """Return how an interval of a quantity stands with the statements on other quantities.

        The other statements choose the settings that meet the most of them. The interval is
        then compared with the values of the quantity in these settings.

        Parameters
        ----------
        name : str
            The name of the quantity. The search need not have a statement of this name.
        low, high : float, optional
            The ends of the interval that is judged. By default it is that of the statement
            of this name.

        Returns
        -------
        LeftOut
            How many of the other statements can hold together, how many where the quantity lies
            in the interval, and in what share of the chosen settings it lies there.
        """
        # In which settings the statement of this name holds. If there is none, in no setting.
        statement_holds = self._where_holds(name)
        # How many of the other statements hold, by setting.
        others = self.count - statement_holds
        # In which settings the quantity lies in the judged interval. Without a given interval
        # (NaN), the statement is judged.
        holds = statement_holds
        if not math.isnan(low):
            holds = self._where_between(name, low, high)

        # The settings that meet the most others, with one array of places for each axis of
        # the grid.
        best = self._best_others(name, others)
        best_places = np.unravel_index(best.places, self.grid.shape)
        # The statement of this name, if there is one, is not one of the others.
        is_stated = name in [statement.name for statement in self.stated]
        return LeftOut(
            values=best.values,
            others=len(self.stated) - is_stated,
            most=best.most,
            # The most other statements that hold where the quantity lies in the interval, or -1
            # if it lies there in no setting.
            with_it=int(others.max(where=holds, initial=-1)),
            settings=len(best.places),
            share=float(holds[best_places].mean()),
            # The scanned values at which the quantity lies in the interval in some setting.
            only=self._only_at(holds),
        )

    def _best_others(self, name: str, others: NDArray[np.int8]) -> _BestOthers:
        """Return the settings that meet the most statements other than that of a quantity.

        ``others`` is how many of the other statements hold, by setting. The result is
        computed once for each name.
        """
        known = self._best_others_by_name
        if name not in known:
            most = int(others.max())
            # There are few such settings. Taking values at their places is faster than
            # applying a mask to an array that is broadcast along many axes.
            flat_places = np.flatnonzero(others == most)
            places = np.unravel_index(flat_places, self.grid.shape)
            # Each value once, in ascending order.
            values = np.unique(self._value(name)[places])
            known[name] = _BestOthers(most, flat_places, values)
        return known[name]

    @cached_property
    def _best_others_by_name(self) -> dict[str, _BestOthers]:
        """Return what `_best_others` has found so far."""
        return {}

    def most_others(self, name: str) -> NDArray[np.bool_]:
        """Return which settings meet the most statements other than one.

        Parameters
        ----------
        name : str
            The statement that does not count. If no statement has this name, all of them
            count.

        Returns
        -------
        ndarray of bool, shape of the grid
            The settings.
        """
        # How many of the other statements hold, by setting.
        others = self.count - self._where_holds(name)
        return np.asarray(others == others.max())

    def _where_holds(self, name: str) -> NDArray[np.bool_]:
        """Return in which settings a statement holds: in none if there is no such statement."""
        names = [statement.name for statement in self.stated]
        if name in names:
            return np.asarray(self.holds[names.index(name)])
        return np.zeros(self.grid.shape, bool)

    def _where_between(self, name: str, low: float, high: float) -> NDArray[np.bool_]:
        """Return in which settings a quantity is in the interval from ``low`` to ``high``."""
        # The quantity is compared before it is broadcast, while it has fewer elements.
        value = np.asarray(self.values[name])
        return np.broadcast_to((value >= low) & (value <= high), self.grid.shape)

    def _only_at(self, holds: NDArray[np.bool_]) -> dict[str, Floats]:
        """Return the values of scanned numbers at which a statement holds in some setting.

        ``holds`` says in which settings the statement holds. A scanned number is left out of
        the result if the statement holds at each of its values.
        """
        free = self.grid.free
        only = {}
        # The scanned numbers are the last axes of the grid. Along all axes before them, it only
        # matters whether the statement holds anywhere.
        first_axes = tuple(range(holds.ndim - len(free)))
        remaining = holds.any(axis=first_axes)
        # The first axis of what remains belongs to the number whose turn it is.
        for name, scanned in free.items():
            # All other axes become one, along which the statement must hold somewhere.
            holds_somewhere = remaining.reshape(len(scanned), -1).any(axis=1)
            # Without its first axis, ``remaining`` begins with the axis of the next number.
            remaining = remaining.any(axis=0)
            if not holds_somewhere.all():
                only[name] = scanned[holds_somewhere]
        return only

    def dropping(self, *names: str) -> SettingSearch:
        """Return the search without some statements, whose quantities stay."""
        kept = [statement.name not in names for statement in self.stated]
        stated = tuple(
            statement for statement in self.stated if statement.name not in names
        )
        return replace(self, stated=stated, holds=self.holds[kept])

    def _position(self, name: str) -> int:
        return [statement.name for statement in self.stated].index(name)

    def _value(self, name: str) -> Floats:
        return np.broadcast_to(self.values[name], self.grid.shape)

    def residuals(self, index: tuple[int, ...]) -> pd.DataFrame:
        """Return every statement at one setting.

        Parameters
        ----------
        index : tuple of int
            The place of the setting in the grid.

        Returns
        -------
        DataFrame
            A row for each statement, with the ends of its interval, the computed value,
            and whether it holds.
        """
        rows = []
        for statement, holds in zip(self.stated, self.holds, strict=True):
            value = float(self._value(statement.name)[index])
            row = (statement.name, statement.low, statement.high, value)
            rows.append((*row, bool(holds[index])))
        columns = ["statement", "low", "high", "computed", "holds"]
        return pd.DataFrame(rows, columns=columns)

    def alone(self) -> pd.DataFrame:
        """Return in which share of settings each statement holds.

        Returns
        -------
        DataFrame
            A row for each statement, with the share of all ``settings`` and of the
            ``best_settings``, which meet the most statements.
        """
        best = self.most()
        rows = []
        for statement, holds in zip(self.stated, self.holds, strict=True):
            rows.append((statement.name, holds.mean(), holds[best].mean()))
        return pd.DataFrame(rows, columns=["statement", "settings", "best_settings"])

    def ranges(self, wanted: NDArray[np.bool_]) -> pd.DataFrame:
        """Return the range that every scanned number has in some settings.

        Parameters
        ----------
        wanted : ndarray of bool, shape of the grid
            The settings.

        Returns
        -------
        DataFrame
            A row for each scanned number, with its least and its largest value in these
            settings, and with those of all values that were scanned.
        """
        free = self.grid.free
        # The scanned numbers are the last axes of the grid. For each of these axes, there is an
        # array with the places of the wanted settings along the axis.
        places = np.nonzero(wanted)[-len(free) :]
        rows = []
        for (name, scanned), place in zip(free.items(), places, strict=True):
            values = scanned[place]
            ends = (values.min(), values.max(), scanned.min(), scanned.max())
            rows.append((name, *ends))
        columns = ["free", "low", "high", "scanned_low", "scanned_high"]
        return pd.DataFrame(rows, columns=columns)


def settle(
    stated: Sequence[Stated], grid: Any, values: Mapping[str, Floats]
) -> SettingSearch:
    """Return a search that says which statements hold in which settings of a grid.

    Parameters
    ----------
    stated : sequence of Stated
        The statements.
    grid : object
        The settings, as `SettingSearch` describes a grid.
    values : mapping of str to ndarray
        The quantities by name, which broadcast to the grid's shape.

    Returns
    -------
    SettingSearch

    Raises
    ------
    UserError
        If a statement has no quantity.
    """
    unknown = [statement.name for statement in stated if statement.name not in values]
    if unknown:
        raise UserError(f"no quantity {unknown[0]!r}: use one of {', '.join(values)}")
    holds = np.empty((len(stated), *grid.shape), dtype=bool)
    for k, statement in enumerate(stated):
        value = values[statement.name]
        holds[k] = (value >= statement.low) & (value <= statement.high)
    return SettingSearch(grid, tuple(stated), holds, values)
