"""What a heat map shows: a grid of numbers, how sure each is, and which of them is the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

ENDS = ("lower", "upper")


class Panel(NamedTuple):
    """Of one heat map.

    grid : a number for each row and column; NaN where there is none
    default : row and column that are framed, the whole column where the row is None
    lower, upper : likewise the ends of its 95% interval; None where nobody knows
    neutral : the number that says "no difference"
    """

    grid: pd.DataFrame
    default: tuple[Any, Any] | None = None
    lower: pd.DataFrame | None = None
    upper: pd.DataFrame | None = None
    neutral: float = 0.0

    def unsure(self) -> NDArray[np.bool_]:
        """Whether the interval of each cell holds ``neutral`` inside."""
        if self.lower is None or self.upper is None:
            return np.zeros(self.grid.shape, dtype=bool)
        lower, upper = (one.to_numpy(dtype=float) for one in (self.lower, self.upper))
        return np.asarray((lower < self.neutral) & (self.neutral < upper))


def judged(panels: Mapping[str, Panel]) -> dict[str, tuple[int, int, int]]:
    """Of each panel with intervals: numbers surely below neutral, surely above, and unsure."""
    found = {}
    for name, panel in panels.items():
        if panel.lower is not None and panel.upper is not None:
            below, above = panel.upper < panel.neutral, panel.lower > panel.neutral
            counts = below.to_numpy().sum(), above.to_numpy().sum(), panel.unsure().sum()
            found[name] = (int(counts[0]), int(counts[1]), int(counts[2]))
    return found


def numbers(panels: Mapping[str, Panel]) -> pd.DataFrame:
    """What heat maps show, a row a cell: panel, row, column, value; lower, upper where a panel has them."""
    tables = []
    for name, panel in panels.items():
        grids = {"value": panel.grid, "lower": panel.lower, "upper": panel.upper}
        long = {what: _long(grid) for what, grid in grids.items() if grid is not None}
        table = pd.concat(long, axis=1).dropna(subset="value").reset_index()
        tables.append(table.assign(panel=name).astype({"row": str, "column": str}))
    found = pd.concat(tables, ignore_index=True)
    columns: Sequence[str] = ["panel", "row", "column", "value", *ENDS]
    return found[[name for name in columns if name in found]]


def _long(grid: pd.DataFrame) -> pd.Series:
    return grid.rename_axis(index="row", columns="column").stack()
