"""How far messages of a run may lie from the cost that was fitted to others, as the samples tell.

Two kinds: a single message scatters about the median of its size, and all messages of a run are slower
or faster together, since the machine of one session is not quite that of the next. The latter, the drift,
a link's own sessions tell (`Noise`), or better all links of a recording together (`Drift`): two sessions
say little of a third, but all links are one machine's, minutes apart, and it is the machine that drifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.workload import Floats

NEIGHBOURS = 4.0
"""Sizes up to this many times smaller or larger inform one size's drift: few sessions say little alone."""
KNEE = (1.5, 3.0)
"""A size's time over the smallest one's: below, bytes take less than half of a start-up; above, over two."""


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of one collective over one link.

    bytes : (s,) measured sizes, increasing
    ratios : of each size, what single messages take over the median of their session
    drift : (s,) standard deviation of the logarithm of a session's median; 0 for a single session
    degrees : (s,) degrees of freedom behind it: a deviation that few sessions tell is itself unsure
    """

    bytes: Floats
    ratios: tuple[Floats, ...]
    drift: Floats
    degrees: Floats

    @classmethod
    def of(
        cls,
        n_bytes: ArrayLike,
        seconds: ArrayLike,
        session: ArrayLike = 0,
        messages_per_sample: ArrayLike = 1,
    ) -> Noise:
        """Return the noise of samples, (n,) each; a session need not have every size.

        messages_per_sample : of which a sample is the mean; a single one scatters more, by the root
        """
        size, took_s, of_session, together = (
            np.ravel(column)
            for column in np.broadcast_arrays(n_bytes, seconds, session, messages_per_sample)
        )
        sizes, sessions = np.unique(size).astype(float), np.unique(of_session)
        medians = np.full((len(sessions), len(sizes)), np.nan)
        ratios: list[list[Floats]] = [[] for _ in sizes]
        for row, number in enumerate(sessions):
            for column, n in enumerate(sizes):
                chosen = (of_session == number) & (size == n)
                if chosen.any():
                    medians[row, column] = np.median(took_s[chosen])
                    ratio = took_s[chosen] / medians[row, column]
                    scatter = 1 + (ratio - 1) * np.sqrt(together[chosen])
                    ratios[column].append(np.maximum(0.0, scatter))
        return cls(sizes, tuple(map(np.concatenate, ratios)), *_own_drift(sizes, np.log(medians)))

    def factors(self, n_bytes: ArrayLike, draws: int, seed: int = 0) -> Floats:
        """Return (draws, k) factors by which messages of ``n_bytes`` (k,) differ from their cost.

        Each message scatters by itself; the drift of a draw, by Student's t, meets all of its messages.
        Both are those of the measured size that is nearest in ratio.
        """
        from scipy.stats import t as student

        inside = np.log(np.clip(np.asarray(n_bytes, float), self.bytes[0], self.bytes[-1]))
        nearest = np.abs(np.log(self.bytes)[:, None] - inside).argmin(axis=0)
        random = np.random.default_rng(seed)
        drifted = student.ppf(random.uniform(size=(draws, 1)), self.degrees[nearest])
        factors = np.exp(drifted * self.drift[nearest])
        for index in np.unique(nearest):
            chosen = nearest == index
            factors[:, chosen] *= random.choice(self.ratios[index], (draws, int(chosen.sum())))
        return factors


def _own_drift(sizes: Floats, medians: Floats) -> tuple[Floats, Floats]:
    """Return (s,) how far a new session lies from the mean of those there were, and its degrees.

    medians : (sessions, s) logarithms, NaN where a session lacks a size. A size that fewer than two
        sessions have drifts as its neighbours do; without any such neighbour, as the sizes do on average
    """
    known = np.isfinite(medians).sum(axis=0)
    often = known > 1
    if not often.any():
        return np.zeros(len(sizes)), np.ones(len(sizes))
    variance = np.zeros(len(sizes))
    variance[often] = np.nanvar(medians[:, often], axis=0, ddof=1) * (1 + 1 / known[often])
    apart = np.abs(np.log(sizes)[:, None] - np.log(sizes))
    near = (apart <= np.log(NEIGHBOURS) * (1 + 1e-9)) & often
    count = near.sum(axis=1)
    around = np.divide(
        (near * variance).sum(axis=1), count, where=count > 0, out=np.zeros(len(sizes))
    )
    degrees = near @ np.maximum(0, known - 1)
    drift = np.sqrt(np.where(count > 0, around, variance[often].mean()))
    return drift, np.where(count > 0, degrees, (known[often] - 1).sum()).astype(float)


# -- drift that all links of a recording tell together --------------------------------------------


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
        """Return it of rows of one link, number of ranks and collective, one message in flight."""
        logs = rows.assign(log=np.log(rows["seconds"]))
        means = logs.groupby(["bytes", "session"])["log"].mean()
        medians = rows.groupby("bytes")["seconds"].median()
        over = (medians / medians.iloc[0]).to_numpy()
        sizes = medians.index.to_numpy(float)
        variance = means.groupby("bytes").var().to_numpy(float)
        return cls(rows["session"].nunique(), sizes, np.searchsorted(KNEE, over), variance)


@dataclass(frozen=True)
class Drift:
    """The variance of a session, by what decides, (3,), as all links say; and the degrees behind it.

    It is averaged over all links where the same decides: start-up, bytes, or both. It has as many degrees
    as all links have sessions beyond their first: sizes of one session drift together, so they count once.
    Nothing is taken off for single samples' scatter, though an interval holds that already: samples of one
    size follow one another within a second, and say little of what comes a minute later.
    """

    variance: Floats
    degrees: float

    @classmethod
    def of(cls, links: Sequence[Sessions]) -> Drift:
        """Return it with each link counting alike. Where none says anything, all that is said counts."""
        means = np.full((len(links), len(KNEE) + 1), np.nan)
        for row, link in enumerate(links):
            for column in range(means.shape[1]):
                chosen = link.variance[(link.decides == column) & np.isfinite(link.variance)]
                means[row, column] = chosen.mean() if chosen.size else np.nan
        known = np.isfinite(means)
        sums, counts = np.where(known, means, 0.0).sum(axis=0), known.sum(axis=0)
        whole = sums.sum() / max(1, counts.sum())
        by = np.divide(sums, counts, where=counts > 0, out=np.full(len(sums), whole))
        tells = known.any(axis=1)
        degrees = sum(link.sessions - 1 for link, does in zip(links, tells, strict=True) if does)
        return cls(by, float(degrees))

    def noise(self, own: Noise, link: Sessions) -> Noise:
        """Return a link's noise with this drift, about the mean of the sessions that its cost is of.

        Its own stays where all links together have no more degrees.
        """
        deviation = np.sqrt(self.variance[link.decides] * (1 + 1 / link.sessions))
        better = self.degrees > own.degrees
        drift = np.where(better, deviation, own.drift)
        return replace(own, drift=drift, degrees=np.where(better, self.degrees, own.degrees))
