"""What DDP takes for a bucket, and for its bytes, where nobody sends them: found by few buckets and many.

Fixed before anything of it was recorded (22 November 2026; examples/sharing_buckets.yml): of each network and
cap the median over rounds; one slope for all networks, each with a level of its own, is what a bucket takes;
levels over bytes are what a byte takes, in the median over networks. Intervals draw rounds anew, all caps of
a network by the same ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

DRAWS = 2000
WHEN = ("until the last post", "after it", "both")
Floats = NDArray[np.float64]


class _Network(NamedTuple):
    """counts : (caps,) buckets; seconds : (when, caps, rounds) that they took more than none."""

    n_bytes: int
    counts: Floats
    seconds: Floats


def taken(table: pd.DataFrame) -> pd.DataFrame:
    """What a bucket and a byte take; a row each and WHEN: value, lower and upper (95%), in seconds."""
    networks = [_network(own) for _, own in table.groupby("network")]
    rng = np.random.default_rng(0)
    found = _lines([one.seconds for one in networks], networks)
    drawn = np.array([_lines(_drawn(networks, rng), networks) for _ in range(DRAWS)])
    lower, upper = np.quantile(drawn, [0.025, 0.975], axis=0)
    rows = [
        (what, when, found[i, k], lower[i, k], upper[i, k])
        for i, what in enumerate(("bucket", "byte"))
        for k, when in enumerate(WHEN)
    ]
    return pd.DataFrame(rows, columns=["of", "when", "seconds", "lower", "upper"])


def _network(own: pd.DataFrame) -> _Network:
    into = own["posted_s"] - own["alone_backward_s"]
    both = own["bucketed_s"] - own["alone_s"]
    keys = [own["cap_bytes"], own["repeat"]]
    grids = [one.groupby(keys).first().unstack("repeat") for one in (into, both - into, both)]
    counts = own.groupby("cap_bytes")["buckets"].first().to_numpy(float)
    return _Network(int(own["bytes"].iloc[0]), counts, np.array(grids, float))


def _drawn(networks: list[_Network], rng: np.random.Generator) -> list[Floats]:
    drawn = []
    for one in networks:
        rounds = one.seconds.shape[-1]
        drawn.append(one.seconds[..., rng.integers(0, rounds, rounds)])
    return drawn


def _lines(seconds: list[Floats], networks: list[_Network]) -> Floats:
    """(2, when) slope over buckets that all share, and the median of levels over bytes."""
    medians = [np.median(one, axis=-1) for one in seconds]
    away = [one.counts - one.counts.mean() for one in networks]
    slope = sum(y @ x for x, y in zip(away, medians, strict=True)) / sum(x @ x for x in away)
    levels = [
        (y.mean(axis=-1) - slope * one.counts.mean()) / one.n_bytes
        for y, one in zip(medians, networks, strict=True)
    ]
    return np.array([slope, np.median(levels, axis=0)])
