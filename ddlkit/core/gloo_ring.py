"""gloo's own ring all-reduce over links with a delay: segments that wait for word from their receivers.

Read in gloo's source (allreduce.cc, tcp/pair.cc; 2025) and found again in measured times: each step of the
ring is cut into segments, two at least, of 1 MiB at most. Two are under way at once: a rank enters a
segment, which is to receive one and to send one, when both of the segment but one before are done. It
then tells its neighbour that it is ready, and what it sends itself waits for the same word from the other
side. So small messages pay a round trip a step, not one way; large ones hide it behind the other segment,
but for this: the word stands in line behind the bytes that are on the link already.
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
PLAYED = 48
"""Segments of one half that are played one by one; from then on each pair takes as long as the last."""


def half_s(
    steps: ArrayLike,
    *,
    bytes_s: ArrayLike,
    software_s: ArrayLike = 0.0,
    wake_s: ArrayLike = 0.0,
    way_s: ArrayLike = 0.0,
    in_line: ArrayLike = 1.0,
    burst_s: ArrayLike = 0.0,
) -> Floats:
    """From when all ranks begin until all have received and taken in the last of ``steps`` segments.

    All links are equal; every argument may be an array, and they broadcast.

    bytes_s : of a segment on its link; software_s : before its bytes leave, while the link rests
    wake_s : from its arrival until its receiver can go on; way_s : from one rank to another
    in_line : share of a segment's bytes that stand on the link before the word that follows it
    burst_s : most credit that a resting link saves, in seconds of its rate
    """
    shaped = np.broadcast_arrays(
        *(
            np.asarray(one, float)
            for one in (steps, bytes_s, software_s, wake_s, way_s, in_line, burst_s)
        )
    )
    count, carried_s, before_s, after_s, way, share, depth_s = shaped
    played = np.where(count > PLAYED, PLAYED - (count - PLAYED) % 2, count).astype(int)
    # Of the last two segments: when asked for, begun and left. The links have rested as between two halves.
    begun = asked = left = -(way + after_s)
    credit = entered = np.zeros(count.shape)
    earlier = np.full(count.shape, -np.inf)
    ends = []
    for _ in range(int(played.max(initial=0))):
        entered = np.maximum(entered, earlier + way + after_s)
        behind = np.where(asked <= entered, begun + share * (left - begun), entered)
        asked = np.maximum(entered, behind) + way
        begun = np.maximum(asked, left)
        saved = np.minimum(depth_s, credit + begun + before_s - left)
        waits = np.maximum(0.0, carried_s - saved)
        credit = saved + waits - carried_s
        earlier, left = left, begun + before_s + waits
        ends.append(left)
    found = np.stack(ends)
    last, before = (
        np.take_along_axis(found, np.maximum(played - back, 0)[None], axis=0)[0] for back in (1, 3)
    )
    return np.asarray(last + (count - played) / 2 * (last - before) + way + after_s)


def ring_s(
    n_bytes: ArrayLike,
    workers: ArrayLike,
    *,
    software_s: ArrayLike,
    wake_s: ArrayLike,
    link_s_per_byte: ArrayLike,
    core_share: ArrayLike,
    in_line: ArrayLike,
    way_s: ArrayLike,
    burst_s: ArrayLike,
) -> Floats:
    """Two halves, which add parts and hand them round; every argument may be an array: see `GlooRing`."""
    sizes, ranks = np.asarray(n_bytes, float), np.asarray(workers, float)
    whole = np.maximum(np.ceil(sizes / SEGMENT_BYTES), UNDER_WAY * ranks)
    cut, waits = np.ceil(whole / ranks), np.maximum(1.0, ranks * np.asarray(core_share))
    return 2 * half_s(
        (ranks - 1) * cut,
        bytes_s=sizes / (cut * ranks) * np.asarray(link_s_per_byte),
        software_s=software_s * waits,
        wake_s=wake_s * waits,
        way_s=way_s,
        in_line=in_line,
        burst_s=burst_s,
    )


@dataclass(frozen=True, eq=False)
class GlooRing(MessageCost):
    """An all-reduce of gloo's from what it is made of, so that it can be carried to other labs.

    Each of its steps is cut into segments, and played by `half_s`. Where cores are fewer than ranks their
    software waits for one: it takes workers x core_share times as long, if that is above 1.

    software_s, wake_s : of a segment, by a rank that has its core, before its bytes and after
    link_s_per_byte : of one link
    rate_bits_per_s, delay_s, burst_s : of each link; a way passes two delays
    core_share : share of all cores that a rank's software takes while it runs
    in_line : share of a segment's bytes that stand on a link before the word that follows

    Raises UserError for numbers below zero and without workers.

    >>> ring = GlooRing(0.0, 1e-4, 8e-9, workers=4, rate_bits_per_s=1e9)
    >>> round(ring(8), 6), round(ring.at(delay_s=1e-3)(8), 6)  # a round trip for each of 6 steps
    (0.0006, 0.0246)
    """

    form: ClassVar[str] = "gloo_ring"
    software_s: float
    wake_s: float
    link_s_per_byte: float
    algorithm: str | None = field(default="ring", kw_only=True)
    rate_bits_per_s: float = field(default=0.0, kw_only=True)
    delay_s: float = field(default=0.0, kw_only=True)
    burst_s: float = field(default=0.0, kw_only=True)
    core_share: float = field(default=0.0, kw_only=True)
    in_line: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.collective, self.algorithm) != ("all_reduce", "ring"):
            raise UserError(
                f"gloo_ring cost: {self.collective} by {self.algorithm}: is a ring's all_reduce"
            )
        if not isinstance(self.workers, int) or self.workers < 2:
            raise UserError(f"gloo_ring cost: workers is {self.workers}: must be at least 2")
        own = ("software_s", "wake_s", "link_s_per_byte", "rate_bits_per_s", "delay_s", "burst_s")
        for name in (*own, "core_share", "in_line"):
            if not 0 <= getattr(self, name) < np.inf:
                raise UserError(f"gloo_ring cost: {name} is {getattr(self, name)}: at least 0")

    def _seconds(self, sizes: Floats) -> Floats:
        assert self.workers is not None  # checked when made
        names = ("software_s", "wake_s", "link_s_per_byte", "core_share", "in_line", "burst_s")
        known = {name: getattr(self, name) for name in names}
        return ring_s(sizes, self.workers, way_s=2 * self.delay_s, **known)

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
