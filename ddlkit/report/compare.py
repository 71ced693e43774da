"""This machine beside every recorded one, and what its kernels cost, as tables to print and to plot."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.bandwidth import bus_factor
from ddlkit.report.source import Source

ALONE = "none"


def layer_speeds(sources: Mapping[str, Source], network: str) -> pd.DataFrame:
    """One row a machine, batch, precision and number of ranks at which ``network`` was profiled.

    Columns: samples_per_s of each rank, gflops (achieved: forward FLOP x 3 over compute time, osf Eq 4),
    and c (osf Eq 5: gflops over the largest matrix product's on that machine; NaN where none was timed).
    """
    rows = []
    for machine, source in sources.items():
        layers = source.table("layers")
        keys = ["device", "batch", "precision", "ranks"]
        peak = store.measured_peaks(source.table("peaks")) if source.has("peaks") else {}
        for key, tensors in layers[layers["network"] == network].groupby(keys):
            device, batch, precision, ranks = key
            compute_s = tensors["forward_s"].sum() + tensors["backward_s"].sum()
            achieved = 3 * tensors["flops"].sum() / compute_s
            rows.append(
                {
                    "machine": machine,
                    "device": device,
                    "batch": batch,
                    "precision": precision,
                    "ranks": ranks,
                    "samples_per_s": batch / (compute_s + tensors["update_s"].iloc[0]),
                    "gflops": achieved / 1e9,
                    "c": achieved / peak.get((device, precision), np.nan),
                }
            )
    return pd.DataFrame(rows)


def bus_bandwidths(sources: Mapping[str, Source], sizes: Mapping[str, int]) -> pd.DataFrame:
    """One row a machine, link, backend, number of ranks and collective; bus bandwidth by named size.

    ``sizes``: column -> bytes. Gbit/s; NaN where that size was not measured.
    """
    rows = []
    keys = ["link", "backend", "ranks", "collective"]
    for machine, source in sources.items():
        samples = source.table("collectives")
        for key, part in samples[samples["ranks"] > 1].groupby(keys):
            link, backend, ranks, collective = key
            medians = part.groupby("bytes")["seconds"].median()
            row = {"machine": machine, **dict(zip(keys, key, strict=True))}
            for name, size in sizes.items():
                seconds = medians.get(size, np.nan)
                row[name] = size / seconds * bus_factor(collective, ranks) * 8 / 1e9
            rows.append(row)
    return pd.DataFrame(rows)


def slowdowns(contention: pd.DataFrame) -> pd.DataFrame:
    """Medians of a ``contention`` table over the same kernel alone (sharing Tab 1, Fig 3).

    One row a kernel and company: ``slowdown`` = beside / alone, bytes_per_s that the neighbour moved
    meanwhile, and the share of the kernel's time in which it ran too.
    """
    own = ["kernel", "device", "ranks"]
    company = ["communication", "blocks", "threads", "bytes_per_s_asked"]
    seen = ["bytes_per_s", "overlap_share"]
    found = contention.groupby([*own, *company])[["seconds", *seen]].median().reset_index()
    # Between ranks a kernel is timed alone once for every setting of blocks and threads; take all.
    alone = found[found["communication"] == ALONE].groupby(own)["seconds"].median()
    beside = found[found["communication"] != ALONE].join(alone.rename("alone_s"), on=own)
    beside["slowdown"] = beside["seconds"] / beside["alone_s"]
    return beside.reset_index(drop=True)
