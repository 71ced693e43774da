"""Side by side: machines, kernels beside communication, and plans, as tables to print and to plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ddlkit.core.fit import interval
from ddlkit.core.units import format_bytes
from workbook.common import specs
from workbook.common.source import Source

DRAWS = 2000


def steps(source: Source) -> pd.DataFrame:
    """Return by profile its rate (FLOP/s, osf Eq 4) and c, its share of the largest product's (osf Eq 5)."""
    profile = ["network", "device", "precision", "batch", "ranks"]
    if not source.has("layers"):
        return pd.DataFrame(columns=[*profile, "rate", "c"])
    sums = (
        source.table("layers")
        .groupby(profile)[["flops", "forward_s", "backward_s"]]
        .sum()
    )
    rates = (
        sums.eval("3 * flops / (forward_s + backward_s)").rename("rate").reset_index()
    )
    peaks = specs.measured_peaks(source.table("peaks")) if source.has("peaks") else {}
    where = zip(rates["device"], rates["precision"], strict=True)
    return rates.assign(c=rates["rate"] / [peaks.get(key, np.nan) for key in where])


def kernel_shares(
    sources: Mapping[str, Source], networks: Sequence[str]
) -> pd.DataFrame:
    """Return what kernels reach of their machine's peak, one row per machine, device, precision and kernel.

    Kernels are products of square matrices, also as a convolution; `steps` of ``networks`` on one rank; and
    copies in memory, which read and write each byte. Columns: unit ("FLOP/s" or "B/s"), rate (a median),
    peak (that of the fastest sample of any product, or copy) and share.
    """
    place, tables = ["machine", "device", "precision", "unit"], []
    for machine, source in sources.items():
        products = source.table("peaks")
        names = products["kernel"] + " of " + products["side"].astype(str)
        rates = 2.0 * products["side"] ** 3 / products["seconds"]
        products = products.assign(unit="FLOP/s", kernel=names, rate=rates)
        timed = pd.concat([products, _copies(source)]).assign(machine=machine)
        fastest = timed.groupby(place)["rate"].max().rename("peak").reset_index()
        run = steps(source).query("ranks == 1 and network in @networks")
        titles = "step of " + run["network"].map(specs.network_title)
        run = run.assign(machine=machine, unit="FLOP/s", kernel=titles)
        run = run.sort_values("network", key=lambda names: names.map([*networks].index))
        rates = (
            pd.concat([run, timed])
            .groupby([*place, "kernel"], sort=False)["rate"]
            .median()
        )
        tables.append(rates.reset_index().merge(fastest, on=place))
    return pd.concat(tables, ignore_index=True).eval("share = rate / peak")


def _copies(source: Source) -> pd.DataFrame:
    if not source.has("copies"):
        return pd.DataFrame()
    rows = (
        source.table("copies").query("copy in ('memcpy', 'd2d')").sort_values("bytes")
    )
    names = "copy of " + rows["bytes"].map(format_bytes)
    rates = 2.0 * rows["bytes"] / rows["seconds"]
    return rows.assign(unit="B/s", kernel=names, rate=rates, precision="copies")


def slowdowns(contention: pd.DataFrame) -> pd.DataFrame:
    """Return medians of a ``contention`` table over the same kernel alone (sharing Tab 1, Fig 3).

    ``slowdown`` = beside / alone; bytes_per_s that the neighbour moved; overlap_share of the kernel's time
    """
    same = ["kernel", "device", "ranks"]
    company = ["communication", "blocks", "threads", "fifo_bytes", "bytes_per_s_asked"]
    columns = ["seconds", "bytes_per_s", "overlap_share"]
    rows = contention.groupby([*same, *company])[columns].median().reset_index()
    # Between ranks a kernel is timed alone once for every setting of blocks and threads; take all.
    alone = rows[rows["communication"] == "none"].groupby(same)["seconds"].median()
    beside = rows[rows["communication"] != "none"].join(
        alone.rename("alone_s"), on=same
    )
    return beside.eval("slowdown = seconds / alone_s").reset_index(drop=True)


def paired(runs: pd.DataFrame, plan: str) -> pd.DataFrame:
    """Return ``plan`` against every other plan of the same network and lab, round by round.

    ratio : median over rounds (``pairs``) of the other's iteration over this plan's: above 1 the plan is
        faster; lower, upper : 95% bootstrap interval of that median
    """
    rng, rows = np.random.default_rng(0), []
    for place, same in runs.groupby(["network", "link", "workers"], sort=False):
        table = same.pivot_table(index="repeat", columns="plan", values="iteration_s")
        for other in table.columns.drop(plan) if plan in table else ():
            ratios = (table[other] / table[plan]).dropna().to_numpy()
            drawn = np.median(rng.choice(ratios, (DRAWS, ratios.size)), axis=1)
            rows.append(
                (*place, other, ratios.size, np.median(ratios), *interval(drawn))
            )
    columns = [
        "network",
        "link",
        "workers",
        "other",
        "pairs",
        "ratio",
        "lower",
        "upper",
    ]
    return pd.DataFrame(rows, columns=columns)
