"""The papers' tables, rendered: as printed, beside what is computed here and the difference.

One module per paper, one function per table of which something is computed, each a data frame: the columns
as transcribed; after a column that can be recomputed, ``<column>_computed`` and ``<column>_difference``
(relative to print). Of a table of symbols there is `symbols`; the others are `paper_table` as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ddlkit.report.claims import paper_table


def recomputed(frame: pd.DataFrame, column: str, values: Sequence[float]) -> pd.DataFrame:
    """A copy of ``frame`` with what was computed, and its relative difference, after ``column``."""
    result, place = frame.copy(), frame.columns.get_loc(column) + 1
    result.insert(place, f"{column}_computed", list(values))
    difference = result[f"{column}_computed"] / frame[column] - 1
    result.insert(place + 1, f"{column}_difference", difference)
    return result


def symbols(paper: str, name: str) -> pd.DataFrame:
    """A table of symbols: symbol, meaning in our words, name in ddlkit (the paper's symbols.csv).

    A name is module.function(parameter), or class attribute, below ``ddlkit``; of a phase's total, the name
    of its layers'. Raises KeyError for a symbol without one.
    """
    names = paper_table(paper, "symbols").set_index("symbol")["ddlkit"].to_dict()
    printed = paper_table(paper, name)
    return printed.assign(ddlkit=[names[symbol] for symbol in printed["symbol"]])
