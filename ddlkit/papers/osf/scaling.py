"""osf Eqs 1-6 and 8-10: scaling factors without tensor fusion."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def scaling_factor(alone_s: float, together_s: float, workers: int) -> float:
    """osf Eq 1: SF = T_1 / (T_N N); any unit of time, as long as both share it."""
    return alone_s / (together_s * workers)


def csf(compute_s: float, communication_s: float) -> float:
    """osf Eq 2: the scaling factor when communication (T_comm) follows all computation (T_comp)."""
    return compute_s / (compute_s + communication_s)


def compute_s(forward_flops: ArrayLike, batch: int, c: float, flops_per_s: float) -> float:
    """osf Eqs 4, 5: T_comp = 3 T_forward = sum over layers of 3 M C / (c pi).

    Symbols: C = forward_flops, (n,) of *one sample* (Table 1 says of a mini-batch; then M would
    count twice), M = batch, c = c, pi = flops_per_s.
    """
    return 3 * batch * float(np.sum(forward_flops)) / (c * flops_per_s)


def backward_s(forward_flops: ArrayLike, batch: int, c: float, flops_per_s: float) -> Floats:
    """osf Eq 6: (n,) t_backward = 2 t_forward = 2 M C / (c pi) of each layer; symbols as Eq 5."""
    return 2 * batch * np.asarray(forward_flops, dtype=float) / (c * flops_per_s)


def utilisation(forward_flops: float, compute_s: float, flops_per_s: float) -> float:
    """osf Eq 5 solved for c: the share of a device's peak rate that an iteration reaches.

    Symbols: M C summed over layers = forward_flops (of the whole mini-batch, 2 FLOP a multiply-add),
    T_comp = compute_s (forward and backward, Eq 4: three times the forward FLOP), pi = flops_per_s.
    """
    return 3 * forward_flops / (compute_s * flops_per_s)


def update_start_s(backward_s: Sequence[float], sent_s: Sequence[float], first: int = 1) -> Floats:
    """osf Eq 8: (n,) start of every layer's update, counted from the end of layer n's backward.

    Symbols: t_backward = backward_s, t_update(D) = sent_s, both (n,) in forward order. The sum over
    the backward times starts at j = i + ``first``: 1 as printed, 0 as its prose and Eq 15 have it.
    """
    n = len(backward_s)
    start = np.zeros(n)
    for i in range(n - 2, -1, -1):
        computed = math.fsum(backward_s[i + first : n - 1])
        start[i] = max(start[i + 1] + sent_s[i + 1], computed)
    return start


def overlap_s(backward_s: Sequence[float]) -> float:
    """osf Eq 10: T_overlap, the backward time of all layers but the last."""
    return math.fsum(backward_s[:-1])


def osf(
    forward_s: float, backward_s: Sequence[float], sent_s: Sequence[float], first: int = 1
) -> float:
    """osf Eqs 3, 8-10: T_comp / (T_comp + T_update - T_overlap); ``first`` as in update_start_s."""
    compute = forward_s + math.fsum(backward_s)
    updated = update_start_s(backward_s, sent_s, first)[0] + sent_s[0]  # Eq 9
    return compute / (compute + updated - overlap_s(backward_s))
