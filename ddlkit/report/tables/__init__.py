"""The papers' tables, rendered: as printed, beside what is computed here and the difference.

One module a paper, one function a table, each a data frame: the columns as transcribed; after a
column that can be recomputed, ``<column>_computed`` and ``<column>_difference`` (relative to print).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd


def recomputed(frame: pd.DataFrame, column: str, values: Sequence[float]) -> pd.DataFrame:
    """A copy of ``frame`` with what was computed, and its relative difference, after ``column``."""
    result, place = frame.copy(), frame.columns.get_loc(column) + 1
    result.insert(place, f"{column}_computed", list(values))
    difference = result[f"{column}_computed"] / frame[column] - 1
    result.insert(place + 1, f"{column}_difference", difference)
    return result


def named(frame: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """A table of symbols with the name that each has in ddlkit. Raises KeyError for one without."""
    return frame.assign(ddlkit=[names[symbol] for symbol in frame["symbol"]])
