"""What is known of a median: an interval from the order of the samples, whatever their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from ddlkit.core.workload import Floats


@cache
def _rank(n: int, rare: int) -> int:
    """Largest k with P(Binomial(n, 1/2) < k) <= 1 / ``rare``; 0 if there is none. Exact, in integers."""
    k, term, below = 0, 1, 1
    while rare * below <= 2**n:
        term = term * (n - k) // (k + 1)
        k, below = k + 1, below + term
    return k


def median_interval(samples: Sequence[float] | Floats, level: float = 0.95) -> tuple[float, float]:
    """Nonparametric interval of the median, by default of 95%, from order statistics.

    The k-th smallest and k-th largest of n samples enclose the median unless fewer than k of them fall
    on one side of it: that is as probable as fewer than k heads in n tosses, whatever the distribution.
    Fewer than 6 samples bound nothing at 95%: (-inf, inf).

    >>> median_interval([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    (1.0, 6.0)
    """
    n = len(samples)
    k = _rank(n, round(2 / (1 - level)))
    if k == 0:
        return -np.inf, np.inf
    ordered = np.sort(samples)
    return float(ordered[k - 1]), float(ordered[n - k])
