"""pytorch: logs of all-reduces, and what its models say of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.cost import Table
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats
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
