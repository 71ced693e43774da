"""A rate enforced by a token bucket: how far a rested link may run ahead, and what framing takes."""

from __future__ import annotations

from ddlkit.core.bandwidth import bus_factor

BURST_S = 128 * 1024 / 1e9  # bytes per (bit/s); a smaller burst breaks the rate by 2x
MIN_BURST_BYTES = 16 * 1024
FRAMING = 1448 / 1514
"""TCP payload in a full Ethernet frame, as tbf counts it: what no collective can exceed."""


def burst_bytes(rate_bits_per_s: float) -> int:
    """Depth of the bucket that the lab gives to a link of that rate."""
    return max(MIN_BURST_BYTES, round(BURST_S * rate_bits_per_s))


def burst_s(rate_bits_per_s: float) -> float:
    """The same in seconds of the rate: what a message after a pause saves at most."""
    return burst_bytes(rate_bits_per_s) * 8 / rate_bits_per_s


def wire_s_per_byte(collective: str, ranks: int, rate_bits_per_s: float) -> float:
    """Of each rank's link, for a byte of a message, at the shaped rate."""
    return bus_factor(collective, ranks) * 8 / (rate_bits_per_s * FRAMING)
