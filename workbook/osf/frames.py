"""Tables behind the figures: rows made from cases, and rows found by their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd


def tidy(
    numbers_of: Callable[..., dict[str, float]],
    cases: Mapping[str, Sequence[Any]],
    name: str = "quantity",
    value: str = "model",
) -> pd.DataFrame:
    """Return a table with one row for each number of each combination of values.

    Parameters
    ----------
    numbers_of : callable
        Takes one value of each of ``cases``, in their order, and returns numbers by name.
    cases : mapping of str to sequence
        For each column of the table, the values that are combined.
    name : str, optional
        The column for the name of each number.
    value : str, optional
        The column for the number itself.

    Returns
    -------
    DataFrame
        The columns of ``cases``, then ``name`` and ``value``. Rows are in the order of
        `itertools.product`.
    """
    numbers = {}
    for case in product(*cases.values()):
        for number_name, number in numbers_of(*case).items():
            numbers[(*case, number_name)] = number
    # The keys, which are tuples, become the levels of the index.
    column = pd.Series(numbers, dtype=float).rename_axis([*cases, name])
    return column.reset_index(name=value)


def rows_of(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Return the rows in which the named columns have these values."""
    return frame[_have_values(frame, values)]


def _have_values(frame: pd.DataFrame, values: Mapping[str, Any]) -> pd.Series:
    """Return for each row whether the named columns have these values."""
    return (frame[list(values)] == list(values.values())).all(axis=1)


def printed_at(frame: pd.DataFrame, number: float, **values: Any) -> pd.Series:
    """Return a column with a printed number where the named columns have these values.

    In all other rows the column is NaN.
    """
    column = pd.Series(number, frame.index, dtype=float)
    return column.where(_have_values(frame, values))
