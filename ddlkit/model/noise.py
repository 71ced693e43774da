"""How far messages of a run may lie from the cost that was fitted to others, as the samples tell.

Two kinds: a single message scatters about the median of its size, and all messages of a run are slower
or faster together, since the machine of one session is not quite that of the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.workload import Floats

NEIGHBOURS = 4.0
"""Sizes up to this many times smaller or larger inform one size's drift: few sessions say little alone."""


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
        """From samples, (n,) each; a session need not have every size.

        messages_per_sample : of which a sample is the mean; a single one scatters more, by the root
        """
        size, took, of_session, together = (
            np.ravel(column)
            for column in np.broadcast_arrays(n_bytes, seconds, session, messages_per_sample)
        )
        sizes, sessions = np.unique(size).astype(float), np.unique(of_session)
        medians = np.full((len(sessions), len(sizes)), np.nan)
        ratios: list[list[Floats]] = [[] for _ in sizes]
        for row, one in enumerate(sessions):
            for column, n in enumerate(sizes):
                here = (of_session == one) & (size == n)
                if here.any():
                    medians[row, column] = np.median(took[here])
                    ratio = took[here] / medians[row, column]
                    scatter = 1 + (ratio - 1) * np.sqrt(together[here])
                    ratios[column].append(np.maximum(0.0, scatter))
        return cls(sizes, tuple(map(np.concatenate, ratios)), *_drift(sizes, np.log(medians)))

    def certain(self) -> Noise:
        """The same if the drift's deviation were known and not estimated: normal, not by Student's t."""
        return replace(self, degrees=np.full_like(self.degrees, np.inf))

    def factors(self, n_bytes: ArrayLike, draws: int, seed: int = 0) -> Floats:
        """(draws, k) factors by which messages of ``n_bytes`` (k,) differ from what they should cost.

        Each message scatters by itself; the drift of a draw, by Student's t, meets all of its messages.
        Both are those of the measured size that is nearest in ratio.
        """
        from scipy.stats import t as student

        asked = np.log(np.clip(np.asarray(n_bytes, float), self.bytes[0], self.bytes[-1]))
        nearest = np.abs(np.log(self.bytes)[:, None] - asked).argmin(axis=0)
        random = np.random.default_rng(seed)
        drifted = student.ppf(random.uniform(size=(draws, 1)), self.degrees[nearest])
        factors = np.exp(drifted * self.drift[nearest])
        for index in np.unique(nearest):
            chosen = nearest == index
            factors[:, chosen] *= random.choice(self.ratios[index], (draws, int(chosen.sum())))
        return factors


def _drift(sizes: Floats, medians: Floats) -> tuple[Floats, Floats]:
    """(s,) how far a new session lies from the mean of those there were, as a deviation; its degrees.

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
