"""gloo's ring all-reduce over links with a delay: its law, fitted to all labs of a machine, predicts others.

Read in gloo's source (allreduce.cc, tcp/pair.cc; 2025) and confirmed by measured times: each step of the
ring is cut into segments, two at least, of 1 MiB at most, and two are under way at once. A rank enters a
segment when both of the segment but one before are done, tells its neighbour that it is ready, and sends
when the same word comes from the other side. So small messages pay a round trip r a pair of segments.

With bytes of x seconds a segment a pair takes T seconds, of which the link is busy 2x. Ranks are not in
step, so the word finds the link at any time of them, and then as a rule x from being free:

    T = r + x + (2x / T) x    or    T = ((r + x) + sqrt((r + x)^2 + 8 x^2)) / 2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.collective import STEPS
from ddlkit.core.lab_links import LinkConditions, read_link
from ddlkit.core.workload import Floats, Ints
from ddlkit.model.calibration import undisturbed

EQUAL = re.compile(r"lab:[\w.]+bit|emulated:[\w.]+bit-delay[\d.]+ms(-burst[\d.]+ms)?")
SCATTER = 0.03  # relative error of a lab's median, beside which prior beliefs count
SEGMENT_BYTES, UNDER_WAY = (
    2**20,
    2,
)  # most of a segment; segments at once, and least of a step


@dataclass(frozen=True)
class GlooRing:
    """An all-reduce of gloo's from what it is made of, numbers or arrays; call it on bytes of messages.

    software_s : of a round trip, which also passes four delays, by ranks that have their cores; with fewer
        cores it takes workers x core_share times as long, if that is above 1
    link_s_per_byte, delay_s, burst_s : of each link
    core_share : share of all cores that a rank's software takes while it runs

    >>> ring = GlooRing(1e-4, 8e-9, workers=4)
    >>> round(ring(8), 6), round(GlooRing(1e-4, 8e-9, workers=4, delay_s=1e-3)(8), 6)
    (0.0006, 0.0246)
    """

    software_s: float | Floats
    link_s_per_byte: float | Floats
    workers: int | Ints
    delay_s: float | Floats = 0.0
    burst_s: float | Floats = 0.0
    core_share: float | Floats = 0.0

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Return seconds of two halves, which add parts and hand them round; a scalar gives a float."""
        sizes, ranks = np.asarray(n_bytes, float), self.workers
        cut = np.ceil(
            np.maximum(np.ceil(sizes / SEGMENT_BYTES), UNDER_WAY * ranks) / ranks
        )
        x = sizes / (cut * ranks) * self.link_s_per_byte
        r = 4 * self.delay_s + self.software_s * np.maximum(
            1.0, ranks * self.core_share
        )
        segments = (ranks - 1) * cut
        pairs = np.ceil(segments / 2)
        pair_s = ((r + x) + np.sqrt((r + x) ** 2 + 8 * x**2)) / 2
        # All but the last of the pairs take T, and in each the link rests once and saves tokens.
        played_s = (pairs - 1) * pair_s + r + x * np.where(segments % 2, 1, 2)
        least_s = np.maximum(segments * x, pairs * r)
        seconds = 2 * np.maximum(least_s, played_s - pairs * self.burst_s)
        return float(seconds) if np.ndim(seconds) == 0 else seconds


class RingLab(NamedTuple):
    """One calibrated lab: what its link is, and of each size (s,) the median."""

    link: str
    workers: int
    bytes: Floats
    seconds: Floats

    @property
    def named(self) -> LinkConditions:
        """Return what its link's name says."""
        return read_link(self.link)

    @property
    def kind(self) -> tuple[str, bool]:
        """Return its link's engine, and whether it has a delay."""
        return self.named.engine, self.named.delay_s > 0


def ring_labs(rows: pd.DataFrame) -> list[RingLab]:
    """Return labs of equal links in which gloo's own all-reduce was calibrated, one message in flight."""
    rows = rows[~rows["algorithm"].astype(str).str.startswith(STEPS)]
    rows = rows.query(
        "collective == 'all_reduce' and algorithm == 'ring' and in_flight == 1"
    )
    rows = undisturbed(rows[rows["link"].str.fullmatch(EQUAL)])
    labs = []
    for (link, ranks), lab in rows.groupby(["link", "ranks"]):
        medians = lab.groupby("bytes")["seconds"].median()
        sizes, seconds = medians.index.to_numpy(float), medians.to_numpy()
        labs.append(RingLab(str(link), int(ranks), sizes, seconds))
    return labs


def fit_rings(
    labs: Sequence[RingLab], cores: int, waking: float | None = None
) -> Floats:
    """Return (3,) logarithms that all labs together say, each lab counting alike.

    They are of software, in seconds of a round trip; of bytes' time over the rate's; and of the share of all
    cores that a rank's software takes.

    waking : seconds that a round trip takes besides for each second of one link's delay; then no software
        waits for a core, as ranks sleep. None: ranks wake at once
    """
    from scipy.optimize import least_squares

    counts = [lab.bytes.size for lab in labs]
    sizes = np.concatenate([lab.bytes for lab in labs])
    seconds = np.concatenate([lab.seconds for lab in labs])
    alike = np.repeat([count**-0.5 for count in counts], counts) * np.sqrt(
        sizes.size / len(labs)
    )
    rings = [ring_of(np.zeros(3), lab.named, lab.workers, waking) for lab in labs]
    link_s_per_byte, workers, delay_s, burst_s = (
        np.repeat([getattr(ring, name) for ring in rings], counts)
        for name in ("link_s_per_byte", "workers", "delay_s", "burst_s")
    )
    first = labs[0]
    step_s = (
        float(first.seconds[0]) / (2 * (first.workers - 1)) - 4 * first.named.delay_s
    )
    software, share = np.log(max(2e-5, step_s)), -np.log(cores)

    def residuals(values: Floats) -> Floats:
        """Return (..., n + 1): log errors of n medians over SCATTER, and the log share less its prior."""
        software_s, over, of_cores = np.moveaxis(np.exp(values), -1, 0)[..., None]
        ring = GlooRing(
            software_s=software_s,
            link_s_per_byte=over * link_s_per_byte,
            workers=workers,
            delay_s=delay_s,
            burst_s=burst_s,
            core_share=of_cores * (waking is None),
        )
        predicted_s = ring(sizes)
        misses = np.log(predicted_s / seconds) * alike / SCATTER
        # Labs of one number of ranks do not tell the share: it may well be off by a factor of e.
        return np.concatenate([misses, values[..., 2:] - share], axis=-1)

    def slopes(values: Floats) -> Floats:
        step = 1e-5 * np.eye(3)
        return np.asarray(
            (residuals(values + step) - residuals(values - step)).T / 2e-5
        )

    # Whether ranks wait for cores at all is no small step: from both sides.
    starts = [(software, 0.0, share), (software, 0.0, share - np.log(8))]
    how: Any = {"bounds": ([-20, -0.5, -6], [0, 0.5, 0]), "loss": "soft_l1"}
    fits = [
        least_squares(residuals, np.array(start), slopes, **how) for start in starts
    ]
    return np.asarray(min(fits, key=lambda fit: fit.cost).x)


def ring_of(
    values: Floats, named: LinkConditions, workers: int, waking: float | None = None
) -> GlooRing:
    """Return the ring of `fit_rings`'s values over links of that rate and delay, whatever else they do."""
    software_s, over, share = np.exp(values).tolist()
    return GlooRing(
        software_s,
        over * 8 / (named.rate_bits_per_s * named.framing),
        workers,
        delay_s=named.delay_s * (1 + (waking or 0.0) / 4),
        burst_s=named.burst_s,
        core_share=share * (waking is None),
    )


def held_out_rings(
    labs: Sequence[RingLab], cores: int, waking: float | None = None
) -> list[GlooRing]:
    """Return each lab's ring as all others say; none for a single lab. waking : as of `fit_rings`"""
    rings = []
    for lab in labs if len(labs) > 1 else ():
        others = [other for other in labs if other is not lab]
        rings.append(
            ring_of(fit_rings(others, cores, waking), lab.named, lab.workers, waking)
        )
    return rings
