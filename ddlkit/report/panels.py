"""What a heat map shows: a grid of numbers, their intervals, and which of them is the default."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

ENDS = ["lower", "upper"]


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
        return np.asarray((self.lower < self.neutral) & (self.neutral < self.upper))
