"""How sessions of a machine differ, told by all links of a recording together.

Two sessions of one link say little of a third, so that an interval made of them must be wide (Student's t
with a degree or a few). But all links of a recording are one machine's, minutes apart, and it is the machine
that drifts, not the rate of a link. The rule POOLED, in place of OWN, where each link tells its own:

* The variance between a link's sessions, of the mean logarithm of each size, says how far measuring that size
  anew comes out. It is averaged over all links, each counting alike, where the same decides: start-up, bytes,
  or both.
* It has as many degrees as all links have sessions beyond their first. Sizes of one session drift together,
  so they count once.

Before any coverage was computed the rule took off what single samples' scatter makes of that variance, as
the interval holds scatter already. On ``campaign-links-again`` that left next to no drift, and the interval
covered 80%: samples of one size follow one another within a second, and say little of what comes a minute
later. So nothing is taken off, which was chosen with that campaign in sight: only another one can judge it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.workload import Floats
from ddlkit.model.calibration import Calibration, undisturbed
from ddlkit.model.noise import Noise

POOLED, OWN = "pooled", "own"
DRIFTS = (POOLED, OWN)
"""Who tells how a link's sessions drift: all links of a recording, or the link alone."""
KNEE = (1.5, 3.0)
"""A size's time over the smallest one's: below, bytes take less than half of a start-up; above, over two."""
KEY = ["link", "ranks", "collective"]


class Sessions(NamedTuple):
    """What one link's sessions say.

    sessions : how many; bytes : (s,) sizes; decides : (s,) where its time stands to KNEE: 0, 1 or 2
    variance : (s,) of a session's mean logarithm; NaN where fewer than two sessions have the size
    """

    sessions: int
    bytes: Floats
    decides: np.ndarray
    variance: Floats

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Sessions:
        """From rows of one link, number of ranks and collective, one message in flight."""
        told = rows.assign(log=np.log(rows["seconds"]))
        means = told.groupby(["bytes", "session"])["log"].mean()
        medians = rows.groupby("bytes")["seconds"].median()
        over = (medians / medians.iloc[0]).to_numpy()
        sizes = medians.index.to_numpy(float)
        variance = means.groupby("bytes").var().to_numpy(float)
        return cls(rows["session"].nunique(), sizes, np.searchsorted(KNEE, over), variance)


@dataclass(frozen=True)
class Drift:
    """What all links say together.

    variance : of a session, by what decides, (3,); degrees : behind it
    """

    variance: Floats
    degrees: float

    @classmethod
    def of(cls, links: list[Sessions]) -> Drift:
        """Each link counts alike. Where no link says anything of what decides, all that is said counts."""
        means = np.full((len(links), len(KNEE) + 1), np.nan)
        for row, link in enumerate(links):
            for column in range(means.shape[1]):
                here = link.variance[(link.decides == column) & np.isfinite(link.variance)]
                means[row, column] = here.mean() if here.size else np.nan
        known = np.isfinite(means)
        sums, counts = np.where(known, means, 0.0).sum(axis=0), known.sum(axis=0)
        whole = sums.sum() / max(1, counts.sum())
        by = np.divide(sums, counts, where=counts > 0, out=np.full(len(sums), whole))
        told = known.any(axis=1)
        degrees = sum(one.sessions - 1 for one, tells in zip(links, told, strict=True) if tells)
        return cls(by, float(degrees))

    def noise(self, own: Noise, link: Sessions) -> Noise:
        """A link's noise with this drift, about the mean of as many sessions as its cost is of.

        Its own stays where all links together have no more degrees.
        """
        deviation = np.sqrt(self.variance[link.decides] * (1 + 1 / link.sessions))
        better = self.degrees > own.degrees
        drift = np.where(better, deviation, own.drift)
        return replace(own, drift=drift, degrees=np.where(better, self.degrees, own.degrees))


def pooled(calibration: Calibration, collectives: pd.DataFrame) -> Calibration:
    """The same calibration with drift by the rule POOLED; costs and the scatter of messages stay.

    collectives : all rows of the recording, also of links that the calibration does not know
    """
    links = dict(_by_link(collectives))
    drift, known = Drift.of(list(links.values())), dict(calibration.known)
    for key, one in known.items():
        if one.noise is not None and key in links:
            known[key] = replace(one, noise=drift.noise(one.noise, links[key]))
    return Calibration(known)


def _by_link(collectives: pd.DataFrame) -> Iterator[tuple[tuple[str, int, str], Sessions]]:
    """Each link, number of ranks and collective, by the samples that a cost may be fitted to."""
    rows = undisturbed(collectives[collectives["in_flight"] == 1])
    for (link, ranks, collective), own in rows.groupby(KEY):
        yield (str(link), int(ranks), str(collective)), Sessions.of(own)
