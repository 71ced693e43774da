"""pytorch: logs of all-reduces, and what its models say of them (wb-pytorch-curves)."""

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

SEEN = (MIB, 25 * MIB)
"""What a profile has seen of a log: DDP's first and its other buckets."""


class Log(NamedTuple):
    """Measured times of all-reduces, and the group of GPUs that models are told they are of."""

    group: Group
    cost: Table


@cache
def logs() -> dict[str, Log]:
    """Return logs of ABCI, Vidur's tables, and a lab of ours, whose CPUs PyTorch takes for A100s."""
    found = {}
    for (device, ranks), cost in sorted(abci.costs().items()):
        group = Group(device, ranks, {"A100": 8, "V100": 4}[device])
        found[f"ABCI {ranks} {device}"] = Log(group, cost)
    for name, part in clusters.dense_tables().items():
        machine, _, shape = name.rpartition("-")
        rows = (
            pd.concat([part.calibrate, part.test]).groupby("bytes")["median_s"].first()
        )
        group = Group(machine[:4].upper(), *map(int, shape.split("x")))
        found[f"Vidur {name}"] = Log(group, Table(rows.index, rows))
    lab = source.recordings("collectives")["cpu-2x-amd-epyc"].table("collectives")
    rows = lab.query("link == 'lab:1gbit' and collective == 'all_reduce'")
    times_s = rows.groupby("bytes")["seconds"].median()
    return {
        **found,
        "lab, 4 ranks": Log(Group("A100", 4), Table(times_s.index, times_s)),
    }


def models(
    log: Log, seen: ArrayLike = SEEN
) -> dict[str, Callable[[ArrayLike], Floats]]:
    """Return bytes -> seconds of an all-reduce by four models; seen : (s,) sizes in a profile of the log."""
    sizes = np.unique(seen)
    return {
        "Inductor": partial(nccl_s, group=log.group),
        "torch.fx": lambda n: nccl_s(2 * np.asarray(n), log.group),
        "DTensor": partial(mesh_s, group=log.group),
        "profile-guided": lambda n: profiled_s(n, sizes, log.cost(sizes)),
    }


def beside(log: Log, sizes: ArrayLike) -> dict[str, Floats]:
    """Return the times of all-reduces of some sizes by Inductor, torch.fx, as measured, and by the others."""
    said = {name: price(sizes) for name, price in models(log).items()}
    return {**dict([*said.items()][:2]), "measured": log.cost(sizes), **said}


# -- figure wb-pytorch-curves --------------------------------------------------------------------


def by_size(name: str) -> pd.DataFrame:
    """Return `beside` of a log, in seconds, at its own sizes from 1 KiB on."""
    log = logs()[name]
    sizes = log.cost.bytes[log.cost.bytes >= KIB]
    return pd.DataFrame(beside(log, sizes), index=sizes)


def by_ranks() -> pd.DataFrame:
    """Return `beside` of 32 MiB, in seconds, by the number of ABCI's A100."""
    measured = [
        log
        for name, log in logs().items()
        if name.startswith("ABCI") and log.group.device == "A100"
    ]
    each = {log.group.ranks: beside(log, 32 * MIB) for log in measured}
    return pd.DataFrame(each, dtype=float).T.sort_index()


def numbers(name: str) -> pd.DataFrame:
    """Return what the figure's CSV holds, of a log by its name."""
    halves = {"bytes": by_size(name), "ranks": by_ranks()}
    return pd.concat(
        half.rename_axis(at)
        .reset_index()
        .melt(at, var_name="model", value_name="seconds")
        .assign(panel=at)
        for at, half in halves.items()
    )


def draw(name: str) -> Figure:
    """Draw a log's times by size, and those of 32 MiB by ranks, beside what models say."""
    left, right = by_size(name), by_ranks()
    off = left.drop(columns="measured").div(left["measured"], axis=0)
    step = right.loc[16] / right.loc[8]
    with plots.sheet(columns=2, height=3.6) as (figure, axes):
        plots.lines(
            axes[0],
            1e3 * left,
            xlabel="size of the message",
            ylabel="time [ms]",
            log="yb",
            legend="",
        )
        plots.lines(
            axes[1],
            1e3 * right.iloc[:, :4],
            xlabel="number of GPUs, eight on a node",
            ylabel="time [ms]",
            log="xy",
            legend="",
        )
        least, most = off.min().min(), off.max().max()
        plots.heading(
            axes[0],
            f"{name}: estimates are {least:.2g} to\n{most:.2g} times the measured time",
        )
        plots.heading(
            axes[1],
            f"Two nodes take {step['measured']:.0f} times as long as one;\n"
            f"Inductor estimates {step['Inductor']:.0f} times as long",
        )
    return figure
