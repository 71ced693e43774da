"""What a link carries: bus bandwidth as nccl-tests defines it, and a rate enforced by a token bucket.

``bytes`` is the size of the reduced buffer for all_reduce, of the whole output for all_gather, and of a
rank's whole input for reduce_scatter; algorithm bandwidth is bytes / time; bus bandwidth multiplies it by
what a link must carry at least, so that it compares with the link's rate whatever the number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlkit.core.errors import UserError

KNOWN = ("all_reduce", "all_gather", "reduce_scatter")

BURST_S = 128 * 1024 / 1e9  # bytes per (bit/s); a smaller burst breaks the rate by 2x
MIN_BURST_BYTES = 16 * 1024
FRAMING = 1448 / 1514
"""TCP payload in a full Ethernet frame, as tbf counts it: what no collective can exceed."""


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes that each rank's link must carry in each direction, per byte of message."""
    if collective not in KNOWN:
        raise UserError(f"unknown collective {collective!r}: use {' or '.join(KNOWN)}")
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def algbw(n_bytes: Any, seconds: Any) -> Any:
    """Algorithm bandwidth in bytes/s, elementwise."""
    return np.asarray(n_bytes) / np.asarray(seconds)


def busbw(collective: str, ranks: int, n_bytes: Any, seconds: Any) -> Any:
    """Bus bandwidth in bytes/s, elementwise.

    >>> float(busbw("all_reduce", 4, 1e9, 2.0))
    750000000.0
    """
    return bus_factor(collective, ranks) * algbw(n_bytes, seconds)


def burst_bytes(rate_bits_per_s: float) -> int:
    """Depth of the bucket that the lab gives to a link of that rate."""
    return max(MIN_BURST_BYTES, round(BURST_S * rate_bits_per_s))


def burst_s(rate_bits_per_s: float) -> float:
    """The same in seconds of the rate: what a message after a pause saves at most."""
    return burst_bytes(rate_bits_per_s) * 8 / rate_bits_per_s


def wire_s_per_byte(collective: str, ranks: int, rate_bits_per_s: float) -> float:
    """Of each rank's link, for a byte of a message, at the shaped rate."""
    return bus_factor(collective, ranks) * 8 / (rate_bits_per_s * FRAMING)
