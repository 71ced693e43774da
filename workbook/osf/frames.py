"""Rows of the tables behind figures: made from cases, found by value, beside what is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd


def tidy(
    of: Callable[..., dict[str, float]],
    cases: Mapping[str, Sequence[Any]],
    name: str = "quantity",
    value: str = "model",
) -> pd.DataFrame:
    """Return a row for each of the cases and each number that ``of`` a case has a ``name``."""
    numbers = {
        (*case, key): number
        for case in product(*cases.values())
        for key, number in of(*case).items()
    }
    rows = pd.Series(numbers, dtype=float).rename_axis([*cases, name])
    return rows.reset_index(name=value)


def rows_of(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Return the rows in which columns have these values."""
    return _rows_with(frame, values)


def _rows_with(frame: pd.DataFrame, values: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows in which columns have the values that belong to their names."""
    return frame[(frame[list(values)] == list(values.values())).all(axis=1)]


def printed_at(frame: pd.DataFrame, number: float, **values: Any) -> pd.Series:
    """Return a printed number in the rows in which columns have these values, else NaN."""
    rows = _rows_with(frame, values)
    return pd.Series(number, rows.index, float).reindex(frame.index)
