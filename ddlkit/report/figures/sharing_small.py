"""Slowdowns by the size of a message: what small messages take from computing, and lose by it, beyond large ones.

Figure 3's messages are large. Once it was known that small ones lose more (examples/sharing_small.yml), and before
any training was foretold with it (22 November 2026), the term "sized" was fixed: to both slowdowns of a
configuration comes what a message of its size has more than the largest measured beside the same kernels in the
same rounds; medians over rounds and kernels, straight lines between them over the logarithm of the size, none
beyond the largest, never below 0 in all. Nothing is fitted to training. It helps if it does what
examples/sharing_buckets.yml asks: iterations of the joint plans' many buckets, 6.9% too short in the signed mean,
within 2%; their re-told gains at 1 Gbit/s in the measured intervals; the 87 held-out cells no worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.resources import Resources, Shared
from ddlkit.report.figures.sharing_measured import beside

Floats = NDArray[np.float64]
More = Mapping[tuple[str, str], tuple[Floats, Floats]]
"""By link and configuration (sizes,) logarithms of bytes, and (sizes, 2) what comes to both slowdowns."""
SLOWDOWNS = ["slowdown", "message_slowdown"]


def more_by_size(kernels: pd.DataFrame) -> More:
    """Of kernels beside messages of several sizes."""
    terms = beside(kernels)
    found = {}
    for key, own in terms.groupby(["link", "configuration"]):
        medians = own.groupby("message_bytes")[SLOWDOWNS].median()
        more = medians - medians.iloc[-1]
        found[str(key[0]), str(key[1])] = np.log(medians.index.to_numpy(float)), more.to_numpy()
    return found


def sized(one: Shared, link: str, more: More) -> Shared:
    """The same iteration, each of its messages with the slowdowns of its size."""
    sizes = one.plan.group_bytes(one.workload).tolist()
    given = tuple(
        _of_size(way, size, more.get((link, way.name)))
        for way, size in zip(one.given, sizes, strict=True)
    )
    return replace(one, given=given)


def _of_size(way: Resources, size: int, more: tuple[Floats, Floats] | None) -> Resources:
    if more is None:
        return way
    logs, rows = more
    of_computing, of_messages = (float(np.interp(np.log(size), logs, row)) for row in rows.T)
    return replace(
        way,
        slowdown=max(0.0, way.slowdown + of_computing),
        message_slowdown=max(0.0, way.message_slowdown + of_messages),
    )
