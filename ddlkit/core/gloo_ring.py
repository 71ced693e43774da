"""gloo's own ring all-reduce over links with a delay: segments that wait for word from their receivers.

Read in gloo's source (allreduce.cc, tcp/pair.cc; 2025) and confirmed by measured times: each step of the
ring is cut into segments, two at least, of 1 MiB at most, and two are under way at once. A rank enters a
segment when both of the segment but one before are done, tells its neighbour that it is ready, and sends
when the same word comes from the other side. So small messages pay a round trip r for each pair of segments.

With bytes of x seconds a segment a pair takes T seconds, of which the link is busy 2x. Ranks are not in step,
so the word finds the link at any time of them, and then as a rule x from being free:

    T = r + x + (2x / T) x    or    T = ((r + x) + sqrt((r + x)^2 + 8 x^2)) / 2
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats

SEGMENT_BYTES = 2**20
"""Of a segment, at most."""
UNDER_WAY = 2
"""Segments of each rank at once, and least of a step."""


def half_s(
    segments: ArrayLike, *, bytes_s: ArrayLike, trip_s: ArrayLike, burst_s: ArrayLike = 0.0
) -> Floats:
    """Return seconds from when all ranks begin until all have received the last of so many segments.

    Every argument may be an array, and they broadcast. All but the last of the pairs take T.

    bytes_s : of a segment on its link; trip_s : of word and bytes, both ways, software included
    burst_s : most burst tokens that a resting link saves, in seconds of its rate; each pair has a rest
    """
    count, x, r = (np.asarray(value, float) for value in (segments, bytes_s, trip_s))
    pairs = np.ceil(count / 2)
    pair_s = ((r + x) + np.sqrt((r + x) ** 2 + 8 * x**2)) / 2
    played_s = (pairs - 1) * pair_s + r + x * np.where(count % 2, 1, 2)
    return np.maximum(np.maximum(count * x, pairs * r), played_s - pairs * np.asarray(burst_s))


def ring_s(
    n_bytes: ArrayLike,
    workers: ArrayLike,
    *,
    software_s: ArrayLike,
    link_s_per_byte: ArrayLike,
    core_share: ArrayLike,
    delay_s: ArrayLike,
    burst_s: ArrayLike,
) -> Floats:
    """Return seconds of two halves, which add parts and hand them round.

    Every argument may be an array, and they broadcast; what they are, says `GlooRing`.
    """
    sizes, ranks = np.asarray(n_bytes, float), np.asarray(workers, float)
    whole = np.maximum(np.ceil(sizes / SEGMENT_BYTES), UNDER_WAY * ranks)
    cut = np.ceil(whole / ranks)
    waits = np.maximum(1.0, ranks * np.asarray(core_share))
    bytes_s = sizes / (cut * ranks) * np.asarray(link_s_per_byte)
    trip_s = 4 * np.asarray(delay_s) + np.asarray(software_s) * waits
    return 2 * half_s((ranks - 1) * cut, bytes_s=bytes_s, trip_s=trip_s, burst_s=burst_s)


@dataclass(frozen=True)
class GlooRing:
    """An all-reduce of gloo's from what it is made of; call it on bytes of messages (any shape).

    Where cores are fewer than ranks their software waits for one: it takes workers x core_share times as
    long, if that is above 1.

    software_s : of a round trip, by ranks that have their cores; link_s_per_byte : of one link
    delay_s, burst_s : of each link; a round trip passes four delays
    core_share : share of all cores that a rank's software takes while it runs

    Raises UserError for numbers below zero and fewer than two workers.

    >>> ring = GlooRing(1e-4, 8e-9, workers=4)
    >>> round(ring(8), 6), round(GlooRing(1e-4, 8e-9, workers=4, delay_s=1e-3)(8), 6)
    (0.0006, 0.0246)
    """

    software_s: float
    link_s_per_byte: float
    workers: int
    delay_s: float = 0.0
    burst_s: float = 0.0
    core_share: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise UserError(f"gloo's ring: workers is {self.workers}: must be at least 2")
        for name, value in asdict(self).items():
            if not 0 <= value < np.inf:
                raise UserError(f"gloo's ring: {name} is {value}: at least 0")

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Return seconds for messages of ``n_bytes`` (any shape); a scalar gives a float."""
        seconds = ring_s(n_bytes, **asdict(self))
        return float(seconds) if seconds.ndim == 0 else seconds

    def bytes_s(self, n_bytes: ArrayLike) -> Floats:
        """Return seconds, in the shape of ``n_bytes``, for which each link is busy with a message."""
        ring_share = 2 * (self.workers - 1) / self.workers
        return np.asarray(ring_share * self.link_s_per_byte * np.asarray(n_bytes, float))
