"""gloo's own ring all-reduce over links with a delay: segments that wait for word from their receivers.

Read in gloo's source (allreduce.cc, tcp/pair.cc; 2025) and found again in measured times: each step of the
ring is cut into segments, two at least, of 1 MiB at most. Two are under way at once: a rank enters a
segment, which is to receive one and to send one, when both of the segment but one before are done. It
then tells its neighbour that it is ready, and what it sends itself waits for the same word from the other
side. So small messages pay a round trip for each pair of segments, not one way a step.

Large ones hide the round trip behind the other segment of the pair, but not all of it: the word stands in
line behind the bytes that are on its link already. Ranks are not in step to the microsecond, so the word
finds the link at any time of the pair's T seconds: with bytes of x seconds a segment the link is busy 2x of
them, and then as a rule x from being free, as the two segments follow one another. With the round trip r,

    T = r + x + (2x / T) x    or    T = ((r + x) + sqrt((r + x)^2 + 8 x^2)) / 2

that is r + x for small segments, and the link's own 2x where there is nothing to wait for. It has no
parameter to fit. (Where all ranks are in step, words either never wait or always do: the truth is between.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost, Terms
from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats

SEGMENT_BYTES = 2**20
"""Of a segment, at most."""
UNDER_WAY = 2
"""Segments of each rank at once, and least of a step."""


def half_s(
    segments: ArrayLike, *, bytes_s: ArrayLike, trip_s: ArrayLike, burst_s: ArrayLike = 0.0
) -> Floats:
    """From when all ranks begin until all have taken in the last of so many segments, over equal links.

    Every argument may be an array, and they broadcast. All but the last of the pairs take T.

    bytes_s : of a segment on its link; trip_s : of word and bytes, both ways, software included
    burst_s : most credit that a resting link saves, in seconds of its rate; each pair has a rest at most
    """
    count, x, r = (np.asarray(one, float) for one in (segments, bytes_s, trip_s))
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
    """Two halves, which add parts and hand them round; every argument may be an array: see `GlooRing`."""
    sizes, ranks = np.asarray(n_bytes, float), np.asarray(workers, float)
    whole = np.maximum(np.ceil(sizes / SEGMENT_BYTES), UNDER_WAY * ranks)
    cut = np.ceil(whole / ranks)
    waits = np.maximum(1.0, ranks * np.asarray(core_share))
    bytes_s = sizes / (cut * ranks) * np.asarray(link_s_per_byte)
    trip_s = 4 * np.asarray(delay_s) + np.asarray(software_s) * waits
    return 2 * half_s((ranks - 1) * cut, bytes_s=bytes_s, trip_s=trip_s, burst_s=burst_s)


@dataclass(frozen=True, eq=False)
class GlooRing(MessageCost):
    """An all-reduce of gloo's from what it is made of, so that it can be carried to other labs.

    Each of its steps is cut into segments, as `half_s` says. Where cores are fewer than ranks their
    software waits for one: it takes workers x core_share times as long, if that is above 1.

    software_s : of a round trip, by ranks that have their cores; link_s_per_byte : of one link
    rate_bits_per_s, delay_s, burst_s : of each link; a round trip passes four delays
    core_share : share of all cores that a rank's software takes while it runs

    Raises UserError for numbers below zero and without workers.

    >>> ring = GlooRing(1e-4, 8e-9, workers=4, rate_bits_per_s=1e9)
    >>> round(ring(8), 6), round(ring.at(delay_s=1e-3)(8), 6)  # a round trip for each of 6 steps
    (0.0006, 0.0246)
    """

    form: ClassVar[str] = "gloo_ring"
    software_s: float
    link_s_per_byte: float
    algorithm: str | None = field(default="ring", kw_only=True)
    rate_bits_per_s: float = field(default=0.0, kw_only=True)
    delay_s: float = field(default=0.0, kw_only=True)
    burst_s: float = field(default=0.0, kw_only=True)
    core_share: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.collective, self.algorithm) != ("all_reduce", "ring"):
            raise UserError(
                f"gloo_ring cost: {self.collective} by {self.algorithm}: is a ring's all_reduce"
            )
        if not isinstance(self.workers, int) or self.workers < 2:
            raise UserError(f"gloo_ring cost: workers is {self.workers}: must be at least 2")
        for name in (*_OWN, "rate_bits_per_s"):
            if not 0 <= getattr(self, name) < np.inf:
                raise UserError(f"gloo_ring cost: {name} is {getattr(self, name)}: at least 0")

    def _seconds(self, sizes: Floats) -> Floats:
        assert self.workers is not None  # checked when made
        return ring_s(sizes, self.workers, **{name: getattr(self, name) for name in _OWN})

    def terms(self, n_bytes: ArrayLike) -> Terms:
        """Parts of the time of ``n_bytes`` (any shape): of the links; what delay adds; the rest, software."""
        assert self.workers is not None  # checked when made
        sizes = np.asarray(n_bytes, float)
        busy_s = 2 * (self.workers - 1) / self.workers * self.link_s_per_byte * sizes
        at_once_s = self.at(delay_s=0.0)._seconds(sizes)
        return Terms(at_once_s - busy_s, self._seconds(sizes) - at_once_s, busy_s)

    def at(
        self,
        *,
        workers: int | None = None,
        rate_bits_per_s: float | None = None,
        delay_s: float | None = None,
        algorithm: str | None = None,
        burst_s: float | None = None,
    ) -> GlooRing:
        """The same processors, and links of the same efficiency, in another lab; what is not said stays.

        Raises UserError for another algorithm, and another rate where it is not known which one it was.
        """
        if algorithm not in (None, "ring"):
            raise UserError(f"gloo's own all_reduce is a ring, it cannot be carried to {algorithm}")
        slope, rate = self.link_s_per_byte, self.rate_bits_per_s
        if rate_bits_per_s is not None:
            if not (rate and 0 < rate_bits_per_s < np.inf):
                raise UserError(
                    f"gloo_ring cost measured at {rate:g} bit/s cannot be carried to "
                    f"{rate_bits_per_s:g}: both rates must be known and above zero"
                )
            slope, rate = slope * rate / rate_bits_per_s, rate_bits_per_s
        return replace(
            self,
            link_s_per_byte=slope,
            rate_bits_per_s=rate,
            workers=self.workers if workers is None else workers,
            delay_s=self.delay_s if delay_s is None else delay_s,
            burst_s=self.burst_s if burst_s is None else burst_s,
            samples=None,
        )


_OWN = ("software_s", "link_s_per_byte", "core_share", "delay_s", "burst_s")
