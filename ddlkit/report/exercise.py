"""Exercises that check themselves: the expected answer is computed, never written down."""

from __future__ import annotations

import math


def check(number: int, answer: float | None, expected: float, *, tolerance: float = 0.02) -> str:
    """What to say to the reader of exercise ``number``; right within the relative ``tolerance``."""
    if answer is None:
        return f"Exercise {number}: replace None by your answer and run this cell again."
    if math.isclose(answer, expected, rel_tol=tolerance, abs_tol=1e-12):
        return f"Exercise {number}: right ({expected:.4g})."
    side = "high" if answer > expected else "low"
    return f"Exercise {number}: {answer:.4g} is too {side}; try again."
