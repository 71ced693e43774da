"""Algorithm and bus bandwidth of collectives, as nccl-tests defines them.

``bytes`` is the size of the reduced buffer for all_reduce, of the whole output for all_gather, and of a
rank's whole input for reduce_scatter; algorithm bandwidth is bytes / time; bus bandwidth multiplies it by
what a link must carry at least, so that it compares with the link's rate whatever the number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlkit.core.errors import UserError

KNOWN = ("all_reduce", "all_gather", "reduce_scatter")


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes that each rank's link must carry in each direction, per byte of message."""
    if collective not in KNOWN:
        raise UserError(f"unknown collective {collective!r}: use {' or '.join(KNOWN)}")
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def algbw(n_bytes: Any, seconds: Any) -> Any:
    """Algorithm bandwidth in bytes/s, elementwise."""
    return np.asarray(n_bytes) / np.asarray(seconds)


def busbw(collective: str, ranks: int, n_bytes: Any, seconds: Any) -> Any:
    """Bus bandwidth in bytes/s, elementwise."""
    return bus_factor(collective, ranks) * algbw(n_bytes, seconds)
