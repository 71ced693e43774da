"""Measured all-reduces, and what PyTorch's cost models estimate of them.

They are the figure wb-pytorch-curves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from ddlkit.core.cost import Table
from ddlkit.core.units import KIB, MIB
from ddlkit.core.workload import Floats
from workbook import plots
from workbook.common import source
from workbook.pytorch.equations import Group, mesh_s, nccl_s, profiled_s
from workbook.validate import clusters
from workbook.validate.clusters import abci

PROFILED_BYTES = (MIB, 25 * MIB)
"""The sizes of a log that a profile has: those of DDP's first and of its other buckets."""
LEFT_MODELS = ("Inductor", "torch.fx")
"""The models that stand before the measured times. All others stand after them."""


class Log(NamedTuple):
    """The measured times of all-reduces among a group of GPUs.

    Attributes
    ----------
    group : Group
        The group that the models are asked about.
    cost : Table
        The measured times by size.
    """

    group: Group
    cost: Table


@cache
def logs() -> dict[str, Log]:
    """Return the measured all-reduces of each cluster and number of ranks, by name.

    There are those of ABCI, those of Vidur's tables, and those of our lab, whose CPUs
    PyTorch's models take for A100s.
    """
    return {**_abci_logs(), **_vidur_logs(), "lab, 4 ranks": _lab_log()}


def _abci_logs() -> dict[str, Log]:
    """Return the logs of ABCI, whose nodes have eight A100s or four V100s, by name."""
    gpus_per_node = {"A100": 8, "V100": 4}
    by_name = {}
    for (device, ranks), cost in sorted(abci.costs().items()):
        group = Group(device, ranks, gpus_per_node[device])
        by_name[f"ABCI {ranks} {device}"] = Log(group, cost)
    return by_name


def _vidur_logs() -> dict[str, Log]:
    """Return Vidur's tables of measured all-reduces as logs, by name.

    The name of a table, such as "a100_dgx-16x8", has the machine, the ranks, and the GPUs of
    a node.
    """
    by_name = {}
    for name, table in clusters.dense_tables().items():
        machine, _, shape = name.rpartition("-")
        # The machine begins with the GPU, whose name has four characters, such as "a100".
        device = machine[:4].upper()
        ranks, per_node = map(int, shape.split("x"))
        rows = pd.concat([table.calibrate, table.test])
        # The files list 16 MiB twice, of which the first row counts.
        median_s = rows.groupby("bytes")["median_s"].first()
        group = Group(device, ranks, per_node)
        by_name[f"Vidur {name}"] = Log(group, Table(median_s.index, median_s))
    return by_name


def _lab_log() -> Log:
    """Return the all-reduces of four ranks in the lab at 1 Gbit/s.

    The models know only GPUs. They are asked about A100s, because Inductor assumes their generation
    where it recognises no GPU. The ranks of the lab are on one machine, and so on one node.
    """
    lab = source.recordings("collectives")["cpu-2x-amd-epyc"].table("collectives")
    rows = lab.query("link == 'lab:1gbit' and collective == 'all_reduce'")
    median_s = rows.groupby("bytes")["seconds"].median()
    return Log(Group("A100", 4), Table(median_s.index, median_s))


def models(
    log: Log, seen_bytes: ArrayLike = PROFILED_BYTES
) -> dict[str, Callable[[ArrayLike], Floats]]:
    """Return four models of an all-reduce in the group of a log.

    Parameters
    ----------
    log : Log
        The log.
    seen_bytes : array_like, shape (s,), optional
        The sizes in bytes in the profile of the profile-guided model, which has the times
        of the log at these sizes.

    Returns
    -------
    dict of str to callable
        By the name of the model, a function from sizes in bytes to seconds.
    """
    group = log.group
    seen = np.unique(seen_bytes)
    return {
        "Inductor": partial(nccl_s, group=group),
        # A graph of torch.fx counts the input and the output of an all-reduce, and so twice
        # its bytes.
        "torch.fx": lambda n_bytes: nccl_s(2 * np.asarray(n_bytes), group),
        "DTensor": partial(mesh_s, group=group),
        "profile-guided": lambda n_bytes: profiled_s(n_bytes, seen, log.cost(seen)),
    }


def with_measured(log: Log, sizes: ArrayLike) -> dict[str, Floats]:
    """Return the estimated and the measured times of all-reduces.

    Parameters
    ----------
    log : Log
        The log.
    sizes : array_like, shape (s,)
        Sizes in bytes.

    Returns
    -------
    dict of str to ndarray, shape (s,)
        Seconds by each of `models` and as "measured", in the order in which figures draw
        them. A single size gives arrays without a dimension.
    """
    estimates_s = {name: model(sizes) for name, model in models(log).items()}
    times_s = {name: estimates_s[name] for name in LEFT_MODELS}
    # The cost of a log is no model, but a table of measured times. It is interpolated between
    # the sizes that were measured.
    times_s["measured"] = log.cost(sizes)
    # The models of LEFT_MODELS are in both dicts, and keep their places before the measured
    # times. The other models are added behind them.
    return {**times_s, **estimates_s}


# -- figure wb-pytorch-curves --------------------------------------------------------


def by_size(name: str) -> pd.DataFrame:
    """Return the estimated and the measured times of a log at its own sizes from 1 KiB on.

    Parameters
    ----------
    name : str
        The name of the log.

    Returns
    -------
    DataFrame
        Seconds, with a row for each size in bytes. The columns are the keys of
        `with_measured`.
    """
    log = logs()[name]
    sizes = log.cost.bytes[log.cost.bytes >= KIB]
    return pd.DataFrame(with_measured(log, sizes), index=sizes)


def by_ranks() -> pd.DataFrame:
    """Return estimated and measured times of an all-reduce of 32 MiB among ABCI's A100s.

    ABCI is a cluster. Its nodes have eight A100s, and a rank is one of them.

    Returns
    -------
    DataFrame
        Seconds, with a row for each number of ranks in ascending order. The columns are the
        names of the models of `models`, and "measured".
    """
    times_s = {}
    for name, log in logs().items():
        # ABCI also has logs of V100s.
        if name.startswith("ABCI") and log.group.device == "A100":
            times_s[log.group.ranks] = with_measured(log, 32 * MIB)
    # The dict gives a column for each number of ranks, which the transposition turns into a row.
    # Each time is an array without a dimension, which ``dtype`` turns into a number.
    return pd.DataFrame(times_s, dtype=float).T.sort_index()


def numbers(name: str) -> pd.DataFrame:
    """Return what the figure's CSV holds.

    Parameters
    ----------
    name : str
        The name of the log of the left panel.

    Returns
    -------
    DataFrame
        A row for each ``panel``, ``model``, and ``bytes`` or ``ranks``, with ``seconds``.
        ``panel`` is "bytes" for the left and "ranks" for the right panel. ``model`` may be
        "measured".
    """
    tables = {"bytes": by_size(name), "ranks": by_ranks()}
    frames = []
    for x, times_s in tables.items():
        rows = times_s.rename_axis(x).reset_index()
        long = rows.melt(x, var_name="model", value_name="seconds")
        frames.append(long.assign(panel=x))
    return pd.concat(frames)


def draw(name: str) -> Figure:
    """Draw the times of a log by size, and those of 32 MiB by ranks, with estimates.

    Parameters
    ----------
    name : str
        The name of the log of the left panel.
    """
    size_s = by_size(name)
    ranks_s = by_ranks()
    ratios = size_s.drop(columns="measured").div(size_s["measured"], axis=0)
    # ABCI's nodes have eight A100s, so that 16 fill two nodes.
    two_nodes_over_one = ranks_s.loc[16] / ranks_s.loc[8]
    # The sheet draws one legend for both panels, which therefore have none of their own.
    with plots.sheet(columns=2, height=3.6) as (figure, axes):
        left, right = axes
        # In ``log``, "b" stands for a logarithmic axis of sizes in bytes.
        plots.lines(
            left,
            1e3 * size_s,
            xlabel="size of the message",
            ylabel="time [ms]",
            log="yb",
            legend="",
        )
        plots.heading(
            left,
            f"{name}: estimates are {ratios.min().min():.2g} to\n"
            f"{ratios.max().max():.2g} times the measured time",
        )
        # The profile-guided model has the measured times of each number of ranks in its
        # profile, so that it does not predict how times grow with the ranks.
        plots.lines(
            right,
            1e3 * ranks_s.drop(columns="profile-guided"),
            xlabel="number of GPUs, eight on a node",
            ylabel="time [ms]",
            log="xy",
            legend="",
        )
        plots.heading(
            right,
            f"Two nodes take {two_nodes_over_one['measured']:.0f} times as long as one;\n"
            f"Inductor estimates {two_nodes_over_one['Inductor']:.0f} times as long",
        )
    return figure
