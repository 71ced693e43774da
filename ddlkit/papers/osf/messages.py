"""osf Eqs 7 and 18: the time of one all-reduce by its size."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import Piecewise

Floats = NDArray[np.float64]


def update_s(
    n_bytes: ArrayLike,
    workers: int,
    bytes_per_s: float,
    *,
    adds_per_s: float = math.inf,
    bytes_per_parameter: int = 4,
    overhead_s: float = 0.0,
) -> Floats:
    """osf Eq 7: time of a ring all-reduce of ``n_bytes`` (any shape), element by element.

    Symbols: D = n_bytes, N = workers, beta = bytes_per_s, pi = adds_per_s,
    s = bytes_per_parameter, delta = overhead_s. As printed, nothing to send still costs delta.
    """
    share = (workers - 1) / workers
    per_byte = 2 * share / bytes_per_s + share / (adds_per_s * bytes_per_parameter)
    return per_byte * np.asarray(n_bytes, dtype=float) + overhead_s


def piecewise_update(
    threshold_bytes: float, a1_s: float, b1_s: float, a2_s_per_byte: float, b2_s: float
) -> Piecewise:
    """osf Eq 18: logarithmic below D_Thresh = threshold_bytes, linear from there on.

    Symbols: a1 = a1_s (per doubling), b1 = b1_s, a2 = a2_s_per_byte, b2 = b2_s. The paper sets the
    threshold to the bandwidth-delay product; nothing there makes the two pieces meet.
    """
    return Piecewise(threshold_bytes, a1_s, b1_s, a2_s_per_byte, b2_s)
