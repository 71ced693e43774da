"""osf Eqs 7 and 18: the time of one all-reduce by its size."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import AlphaBeta, Piecewise, RingAllReduce
from ddlkit.core.errors import UserError

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


def ring_from_ends(n_bytes: ArrayLike, seconds: ArrayLike, workers: int) -> RingAllReduce:
    """osf Eq 7 with beta and delta from the smallest and the largest measured message, adding for free.

    n_bytes, seconds : (n,) raw samples. The paper has delta "measured directly" and names no rate:
    the line through the medians of the two ends is what that comes to. Raises UserError for one size.
    """
    sizes, times = np.asarray(n_bytes, dtype=float), np.asarray(seconds, dtype=float)
    ends = np.array([sizes.min(), sizes.max()])
    if ends[0] == ends[1]:
        raise UserError(f"every message has {ends[0]:g} bytes: a rate needs two sizes")
    first_s, last_s = (float(np.median(times[sizes == end])) for end in ends)
    slope = (last_s - first_s) / float(ends[1] - ends[0])
    line = AlphaBeta(first_s - slope * float(ends[0]), slope, workers=workers, algorithm="ring")
    return RingAllReduce.from_alpha_beta(line)


def bandwidth_delay_bytes(cost: RingAllReduce) -> float:
    """The bandwidth-delay product of a ring's links, which osf Eq 18 takes for D_Thresh.

    beta = cost.bytes_per_s, delta = cost.overhead_s. The paper gives only the product, 45 KB. Here the
    delay of a round trip is taken from delta: N workers pass 2(N-1) messages one after the other, two of
    them as long as a round trip.
    """
    assert cost.workers is not None  # checked when made
    return cost.bytes_per_s * cost.overhead_s / (cost.workers - 1)
