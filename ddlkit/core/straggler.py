"""A rank that is slow at random: how slow in which iteration, and how that is distributed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats


def straggler_factors(
    straggler: float, spread: float, seed: int, iterations: Sequence[int]
) -> Floats:
    """(n,) factors on the compute of the slowest rank, one for each iteration of that number.

    What exceeds 1 is lognormal: ``straggler`` - 1 in the median, its logarithm normal with deviation
    ``spread``. An iteration's factor depends on the seed and its number alone, so that it can be repeated.

    Raises UserError for a straggler below 1 and a spread below 0.

    >>> straggler_factors(1.5, 0.0, 7, [0, 1]).tolist()
    [1.5, 1.5]
    """
    if not (straggler >= 1 and spread >= 0):
        raise UserError(f"straggler {straggler:g} with spread {spread:g}: at least 1, and 0")
    normal = [np.random.default_rng([seed, number]).standard_normal() for number in iterations]
    return np.asarray(1 + (straggler - 1) * np.exp(spread * np.array(normal)))
