"""What a heat map shows: a grid of numbers, their intervals, and which of them is the default."""

from __future__ import annotations

from collections.abc import Mapping
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
        """Return whether each number's interval holds ``neutral`` inside."""
        if self.lower is None or self.upper is None:
            return np.zeros(self.grid.shape, dtype=bool)
        lower, upper = (end.to_numpy(dtype=float) for end in (self.lower, self.upper))
        return np.asarray((lower < self.neutral) & (self.neutral < upper))


def numbers(panels: Mapping[str, Panel]) -> pd.DataFrame:
    """Return what heat maps show, a row a number: panel, row, column, value; lower, upper where known."""
    tables = []
    for name, panel in panels.items():
        grids = {"value": panel.grid, "lower": panel.lower, "upper": panel.upper}
        long = {
            what: grid.rename_axis(index="row", columns="column").stack()
            for what, grid in grids.items()
            if grid is not None
        }
        table = pd.concat(long, axis=1).dropna(subset="value").reset_index()
        tables.append(table.assign(panel=name).astype({"row": str, "column": str}))
    found = pd.concat(tables, ignore_index=True)
    return found[[n for n in ("panel", "row", "column", "value", *ENDS) if n in found]]
