"""Machines, kernels and plans compared with each other, as tables to print and to plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ddlkit.core.fit import interval
from ddlkit.core.units import format_bytes
from ddlkit.model.predictor import HOST_BOUND, issue_share
from workbook.common import specs
from workbook.common.source import Source

DRAWS = 2000
"""The number of bootstrap draws."""


def steps(source: Source) -> pd.DataFrame:
    """Return the rate at which the training step of every layer profile computes.

    Parameters
    ----------
    source : Source
        Tables of layers, and of products of matrices as ``peaks``. Without layers the
        result has no row.

    Returns
    -------
    DataFrame
        One row for each profile. The columns are ``network``, ``device``,
        ``precision``, ``batch``, ``ranks``, ``rate`` (FLOP/s, osf Eq 4) and ``c`` (the
        rate divided by that of the fastest product, osf Eq 5, NaN if none was measured).
    """
    profile = ["network", "device", "precision", "batch", "ranks"]
    if not source.has("layers"):
        return pd.DataFrame(columns=[*profile, "rate", "c"])
    layers = source.table("layers").groupby(profile)
    sums = layers[["flops", "forward_s", "backward_s"]].sum()
    layers_s = sums["forward_s"] + sums["backward_s"]
    # Where the host limited a profile, its time is scaled to what the GPU itself needs.
    scales = _scales_to_graph(source)
    layers_s *= [scales.get(key, 1.0) for key in sums.index]
    # ``flops`` are those of forward. Backward does twice as many.
    rates = (3 * sums["flops"] / layers_s).rename("rate").reset_index()
    peaks: dict[tuple[str, str], float] = {}
    if source.has("peaks"):
        peaks = specs.measured_peaks(source.table("peaks"))
    keys = zip(rates["device"], rates["precision"], strict=True)
    return rates.assign(c=rates["rate"] / [peaks.get(key, np.nan) for key in keys])


def _scales_to_graph(source: Source) -> dict[tuple[object, ...], float]:
    """Return by which factor to scale the times of profiles that the host limited.

    The host limits an iteration if it takes longer to issue kernels than the GPU takes to
    run them. The GPU itself needs the time of the iteration as one CUDA graph, whose kernels
    the host does not issue one by one. The keys are network, device, precision, batch and
    ranks. Profiles that the host did not limit, or without a time as a graph, are left out.
    """
    scales: dict[tuple[object, ...], float] = {}
    if not source.has("samples"):
        return scales
    key = ["network", "device", "precision", "batch", "ranks"]
    for profile, samples in source.table("samples").groupby(key):
        medians = samples.groupby("quantity")["seconds"].median()
        if "graph_iteration" in medians and issue_share(samples) > HOST_BOUND:
            # Unhooked iterations ran without the hooks that time single layers, which the
            # graph does not have either.
            scale = medians["graph_iteration"] / medians["unhooked_iteration"]
            # The host can only make iterations longer, so that a scale above 1 is noise.
            scales[profile] = min(1.0, float(scale))
    return scales


def kernel_shares(
    sources: Mapping[str, Source], networks: Sequence[str]
) -> pd.DataFrame:
    """Return which share of the peak of their machine kernels reach.

    Kernels are products of square matrices (also as a convolution), copies in memory
    (which read and write each byte), and the training steps of networks on one rank.

    Parameters
    ----------
    sources : mapping of str to Source
        The tables of each machine.
    networks : sequence of str
        The networks, in the order of their rows.

    Returns
    -------
    DataFrame
        One row for each machine, device, precision and kernel. The columns are
        ``machine``, ``device``, ``precision``, ``unit`` ("FLOP/s" or "B/s"), ``kernel``,
        ``rate`` (a median), ``peak`` (the fastest sample of any product of this device and
        precision, or of any copy) and ``share`` (``rate`` divided by ``peak``).
    """
    key = ["machine", "device", "precision", "unit"]
    tables = []
    for machine, source in sources.items():
        timed = pd.concat([_products(source), _copies(source)])
        timed = timed.assign(machine=machine)
        # Steps of networks set no peak.
        peaks = timed.groupby(key)["rate"].max().rename("peak").reset_index()
        network_steps = _network_steps(source, networks).assign(machine=machine)
        kernels = pd.concat([network_steps, timed])
        rates = kernels.groupby([*key, "kernel"], sort=False)["rate"].median()
        tables.append(rates.reset_index().merge(peaks, on=key))
    return pd.concat(tables, ignore_index=True).eval("share = rate / peak")


def _products(source: Source) -> pd.DataFrame:
    """Return each timed product with its ``unit``, ``kernel`` and ``rate`` in FLOP/s."""
    products = source.table("peaks")
    names = products["kernel"] + " of " + products["side"].astype(str)
    # A product of square matrices has side^3 multiply-adds, each of two operations.
    rates = 2.0 * products["side"] ** 3 / products["seconds"]
    return products.assign(unit="FLOP/s", kernel=names, rate=rates)


def _copies(source: Source) -> pd.DataFrame:
    """Return each timed copy with its ``unit``, ``kernel`` and ``rate`` in bytes/s.

    Only copies within one memory count: of a CPU ("memcpy") or of a GPU ("d2d").
    """
    if not source.has("copies"):
        return pd.DataFrame()
    copies = source.table("copies").query("copy in ('memcpy', 'd2d')")
    copies = copies.sort_values("bytes")
    names = "copy of " + copies["bytes"].map(format_bytes)
    # A copy reads each byte and writes it. Copies have no precision. The word "copies" in its
    # place groups them apart from products.
    rates = 2.0 * copies["bytes"] / copies["seconds"]
    return copies.assign(unit="B/s", kernel=names, rate=rates, precision="copies")


def _network_steps(source: Source, networks: Sequence[str]) -> pd.DataFrame:
    """Return the `steps` of networks on one rank with their ``unit`` and ``kernel``."""
    rows = steps(source).query("ranks == 1 and network in @networks")
    names = "step of " + rows["network"].map(specs.network_title)
    # `kernel_shares` takes the median of the rows with one name. Steps of different batches
    # are therefore named apart.
    of_network = rows.groupby(["network", "device"])["batch"]
    has_several = of_network.transform("nunique") > 1
    names = names.mask(has_several, names + ", batch " + rows["batch"].astype(str))
    rows = rows.assign(unit="FLOP/s", kernel=names)
    order = list(networks)
    return rows.sort_values("network", key=lambda names: names.map(order.index))


def slowdowns(contention: pd.DataFrame) -> pd.DataFrame:
    """Return how much communication slows kernels down (sharing Tab 1 and Fig 3).

    Parameters
    ----------
    contention : DataFrame
        Samples of kernels, alone and next to communication.

    Returns
    -------
    DataFrame
        One row for each kernel and setting of the communication, with medians:
        ``seconds`` (of the kernel), ``bytes_per_s`` (that communication moved),
        ``overlap_share`` (the share of the kernel's time in which communication went on),
        ``alone_s`` (the kernel without communication) and ``slowdown`` (``seconds`` divided
        by ``alone_s``).
    """
    kernel = ["kernel", "device", "ranks"]
    communication = [
        "communication",
        "blocks",
        "threads",
        "fifo_bytes",
        "bytes_per_s_asked",
    ]
    columns = ["seconds", "bytes_per_s", "overlap_share"]
    medians = contention.groupby([*kernel, *communication])[columns].median()
    rows = medians.reset_index()
    # On a single rank, a kernel is timed alone once. A recording of several ranks can have timed it
    # alone once more for every setting of blocks and threads, of which the median is taken.
    is_alone = rows["communication"] == "none"
    alone_s = rows[is_alone].groupby(kernel)["seconds"].median().rename("alone_s")
    beside = rows[~is_alone].join(alone_s, on=kernel)
    return beside.eval("slowdown = seconds / alone_s").reset_index(drop=True)


def paired(runs: pd.DataFrame, plan: str) -> pd.DataFrame:
    """Compare a plan with every other plan of the same network and lab, round by round.

    Parameters
    ----------
    runs : DataFrame
        Iterations by ``plan`` and round (``repeat``).
    plan : str
        The plan. Networks and labs in which it did not run have no row.

    Returns
    -------
    DataFrame
        One row for each network, lab (``link`` and ``workers``) and ``other`` plan.
        ``ratio`` is the iteration of the other plan divided by that of ``plan``, so that
        ``plan`` is faster if it is above 1. It is the median over the rounds in which both plans
        ran, whose number is ``pairs``. ``lower`` and ``upper`` are the 95% bootstrap interval of
        this median.
    """
    rng = np.random.default_rng(0)
    rows = []
    network_and_lab = ["network", "link", "workers"]
    for labels, own_runs in runs.groupby(network_and_lab, sort=False):
        # The mean iteration of each round (row) and plan (column).
        table = own_runs.pivot_table(
            index="repeat", columns="plan", values="iteration_s"
        )
        if plan not in table:
            continue
        for other in table.columns.drop(plan):
            ratios = (table[other] / table[plan]).dropna().to_numpy()
            # The two plans may have no round in common, as after an interrupted session.
            if not ratios.size:
                continue
            # Each resample draws as many rounds as there are, with replacement.
            resamples = rng.choice(ratios, (DRAWS, ratios.size))
            lower, upper = interval(np.median(resamples, axis=1))
            rows.append((*labels, other, ratios.size, np.median(ratios), lower, upper))
    columns = [*network_and_lab, "other", "pairs", "ratio", "lower", "upper"]
    return pd.DataFrame(rows, columns=columns)
