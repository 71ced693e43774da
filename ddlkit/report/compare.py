"""Side by side: machines, kernels beside communication, and plans, as tables to print and to plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.fit import interval
from ddlkit.core.units import format_bytes
from ddlkit.model.predictor import issue_share
from ddlkit.report.source import Source

DRAWS = 2000
WORTH = 0.02
"""A plan that saves less than this share of an iteration is not worth a change."""


def layer_speeds(sources: Mapping[str, Source], network: str) -> pd.DataFrame:
    """Return one row per machine, batch, precision and number of ranks at which ``network`` was profiled.

    Columns: samples_per_s of each rank, gflop_per_s (achieved: forward FLOP x 3 over compute time, osf Eq 4),
    and c (osf Eq 5: gflop_per_s over the largest matrix product's on that machine; NaN where none was timed).
    Where any was timed on a GPU, issue_share too (`ddlkit.model.predictor.issue_share`).
    """
    keys = ["device", "batch", "precision", "ranks"]
    rows = []
    for machine, source in sources.items():
        layers = source.table("layers")
        peak = store.measured_peaks(source.table("peaks")) if source.has("peaks") else {}
        samples = source.table("samples") if source.has("samples") else pd.DataFrame(columns=keys)
        samples = samples[samples["network"] == network] if len(samples) else samples
        issue = {key: issue_share(own) for key, own in samples.groupby(keys)}
        for key, tensors in layers[layers["network"] == network].groupby(keys):
            device, batch, precision, _ = key
            compute_s = tensors["forward_s"].sum() + tensors["backward_s"].sum()
            achieved = 3 * tensors["flops"].sum() / compute_s
            row = {"machine": machine, **dict(zip(keys, key, strict=True))}
            row["samples_per_s"] = batch / (compute_s + tensors["update_s"].iloc[0])
            row["gflop_per_s"] = achieved / 1e9
            row["c"] = achieved / peak.get((device, precision), np.nan)
            rows.append({**row, "issue_share": issue.get(key, np.nan)})
    speeds = pd.DataFrame(rows)
    return speeds if speeds["issue_share"].notna().any() else speeds.drop(columns="issue_share")


def kernel_shares(sources: Mapping[str, Source], networks: Sequence[str]) -> pd.DataFrame:
    """Return what kernels reach of their machine's peak, one row per machine, device, precision and kernel.

    Kernels are products of square matrices by side, alone and as a convolution; steps of ``networks`` on one
    rank (osf Eq 4: forward FLOP x 3 over the time of forward and backward, c of Eq 5 as their share); and
    copies in memory by size, which read and write each byte.
    Columns: unit ("FLOP/s" or "B/s"), rate (a median), peak and share. The peak is the datasheet's of a GPU
    where it is known, else that of the fastest sample of any product, or of any copy, on that machine.
    """
    own = ["machine", "device", "precision", "unit"]
    found = []
    for machine, source in sources.items():
        timed = pd.concat(_timed(source)).assign(machine=machine)
        fastest = timed.groupby(own)["rate"].max().rename("peak").reset_index()
        on_gpu = fastest["device"] == "cuda"
        rates = fastest["precision"] + "_flops_per_s"
        rates = rates.where(fastest["unit"] == "FLOP/s", "memory_bytes_per_s")
        sheet = rates.map(partial(store.datasheet, source.gpu("peaks")))
        fastest["peak"] = fastest["peak"].mask(on_gpu & (sheet > 0), sheet)
        steps = [_step_rates(source, name).assign(machine=machine) for name in networks]
        rates = pd.concat([*steps, timed]).groupby([*own, "kernel"], sort=False)["rate"].median()
        found.append(rates.reset_index().merge(fastest, on=own))
    return pd.concat(found, ignore_index=True).eval("share = rate / peak")


def _timed(source: Source) -> list[pd.DataFrame]:
    """Return samples of products and of copies in memory: device, precision, unit, kernel, rate."""
    peaks = source.table("peaks")
    peaks["rate"] = 2.0 * peaks["side"].astype(float) ** 3 / peaks["seconds"]
    names = peaks["kernel"] + " of " + peaks["side"].astype(str)
    tables = [peaks.assign(unit="FLOP/s", kernel=names)]
    if source.has("copies"):
        rows = source.table("copies")
        rows = rows[rows["copy"].isin(["memcpy", "d2d"])].sort_values("bytes")
        names = "copy of " + rows["bytes"].map(format_bytes)
        rates = {"rate": 2.0 * rows["bytes"] / rows["seconds"], "precision": "copies"}
        tables.append(rows.assign(unit="B/s", kernel=names, **rates))
    columns = ["device", "precision", "unit", "kernel", "rate"]
    return [one[columns] for one in tables]


def _step_rates(source: Source, network: str) -> pd.DataFrame:
    """Return rates of one network's steps, of each of its profiles on one rank; maybe none."""
    rows = source.table("layers") if source.has("layers") else pd.DataFrame(columns=["network"])
    rows = rows[rows["network"] == network]
    if rows.empty:
        return pd.DataFrame()
    sums = rows[rows["ranks"] == 1].groupby(["device", "precision", "batch"])
    sums = sums[["flops", "forward_s", "backward_s"]].sum().reset_index()
    sums["rate"] = 3 * sums["flops"] / (sums["forward_s"] + sums["backward_s"])
    return sums.assign(unit="FLOP/s", kernel=f"step of {store.network_title(network)}")


def slowdowns(contention: pd.DataFrame) -> pd.DataFrame:
    """Return medians of a ``contention`` table over the same kernel alone (sharing Tab 1, Fig 3).

    One row per kernel and company: ``slowdown`` = beside / alone, bytes_per_s that the neighbour moved
    meanwhile, and the share of the kernel's time in which it ran too.
    """
    own = ["kernel", "device", "ranks"]
    company = ["communication", "blocks", "threads", "fifo_bytes", "bytes_per_s_asked"]
    seen = ["bytes_per_s", "overlap_share"]
    found = contention.groupby([*own, *company])[["seconds", *seen]].median().reset_index()
    # Between ranks a kernel is timed alone once for every setting of blocks and threads; take all.
    alone = found[found["communication"] == "none"].groupby(own)["seconds"].median()
    beside = found[found["communication"] != "none"].join(alone.rename("alone_s"), on=own)
    beside["slowdown"] = beside["seconds"] / beside["alone_s"]
    return beside.reset_index(drop=True)


def paired(runs: pd.DataFrame, plan: str) -> pd.DataFrame:
    """Return ``plan`` against every other plan of the same network and lab, round by round.

    Columns: network, link, workers, other, pairs, ratio (median over rounds of the other's iteration
    over this plan's: above 1 the plan is faster), lower, upper (95% bootstrap interval of that median),
    verdict.

    >>> rounds = {"network": "n", "link": "l", "workers": 2, "repeat": [0, 1, 0, 1]}
    >>> runs = pd.DataFrame({**rounds, "plan": ["a", "a", "b", "b"], "iteration_s": [1, 2, 1.5, 3]})
    >>> paired(runs, "a")[["other", "pairs", "ratio", "verdict"]]
      other  pairs  ratio   verdict
    0     b      2    1.5  worth it
    """
    rng, rows = np.random.default_rng(0), []
    place = ["network", "link", "workers"]
    for key, here in runs.groupby(place, sort=False):
        table = here.pivot_table(index="repeat", columns="plan", values="iteration_s")
        if plan not in table:
            continue
        for other in table.columns.drop(plan):
            ratios = (table[other] / table[plan]).dropna().to_numpy()
            drawn = np.median(rng.choice(ratios, (DRAWS, ratios.size)), axis=1)
            lower, upper = interval(drawn).tolist()
            row = {**dict(zip(place, key, strict=True)), "other": other, "pairs": ratios.size}
            row |= {"ratio": float(np.median(ratios)), "lower": lower, "upper": upper}
            rows.append({**row, "verdict": _verdict(lower, upper)})
    return pd.DataFrame(rows)


def _verdict(lower: float, upper: float) -> str:
    if lower > 1 + WORTH:
        return "worth it"
    if upper < 1 + WORTH:
        return "slower" if upper < 1 - WORTH else "not worth it"
    return "undecided"
