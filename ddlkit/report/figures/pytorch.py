"""pytorch: its models' times over those of real logs, and what plans cost that are made by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.cost import Table
from ddlkit.core.fit import AUTO, fit
from ddlkit.core.iteration import predict
from ddlkit.core.units import KIB, MIB
from ddlkit.core.workload import Floats, Workload
from ddlkit.model import make_plan
from ddlkit.papers.pytorch import Group, bucket_cap_bytes, mesh_s, nccl_s, profiled_s
from ddlkit.report import clusters, source
from ddlkit.report.clusters import abci

MESH = 2.0 ** np.arange(6, 31, 1 / 8)
"""Bytes of messages at which a model is asked, to make a cost of it."""
SEEN = (MIB, 25 * MIB)
"""What a profile has seen of a log: DDP's first and its other buckets."""
DOZEN = 12  # sizes of a log that calibrate a fit of ours


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
        rows = pd.concat([part.calibrate, part.test]).groupby("bytes")["median_s"].first()
        group = Group(machine[:4].upper(), *map(int, shape.split("x")))
        found[f"Vidur {name}"] = Log(group, Table(rows.index, rows))
    rows = source.recordings("collectives")["cpu-2x-amd-epyc"].table("collectives")
    rows = rows.query("link == 'lab:1gbit' and collective == 'all_reduce'")
    times_s = rows.groupby("bytes")["seconds"].median()
    return {**found, "lab 4 ranks, 1 Gbit/s": Log(Group("A100", 4), Table(times_s.index, times_s))}


def models(log: Log, seen: ArrayLike = SEEN) -> dict[str, Callable[[ArrayLike], Floats]]:
    """Return bytes -> seconds of an all-reduce by four models; seen : (s,) sizes in a profile of the log."""
    sizes = np.unique(seen)
    return {
        "Inductor": partial(nccl_s, group=log.group),
        "torch.fx": lambda n: nccl_s(2 * np.asarray(n), log.group),
        "DTensor": partial(mesh_s, group=log.group),
        "profile-guided": lambda n: profiled_s(n, sizes, log.cost(sizes)),
    }


def ratios() -> pd.DataFrame:
    """Return log, model, bytes, ratio: a model's time over the measured one, from 1 KiB on."""
    parts = []
    for name, log in logs().items():
        at = log.cost.bytes[log.cost.bytes >= KIB]
        for model, seconds in models(log).items():
            ratio = {"bytes": at, "ratio": seconds(at) / log.cost(at)}
            parts.append(pd.DataFrame({"log": name, "model": model, **ratio}))
    return pd.concat(parts, ignore_index=True)


def regrets(works: Mapping[str, Workload], log: Log) -> pd.DataFrame:
    """Return by workload and planner how much longer a step is than under the best plan, as the log judges.

    The best plan by each model, whose profile has seen DDP's own buckets; and by a fit to a dozen sizes.
    Compute is stretched to last as long as one message of everything, where plans matter most.
    """
    table, sizes = {}, log.cost.bytes
    few = np.unique(np.linspace(0, len(sizes) - 1, DOZEN).astype(int))
    fitted = fit(AUTO, sizes[few], log.cost.seconds[few]).cost
    for name, given in works.items():
        work = given.scaled(float(log.cost(given.bytes.sum())) / given.compute_s)
        plans = {"DDP's default": (default := make_plan("ddp", work))}
        seen = default.group_bytes(work)
        plans["saturation"] = make_plan(f"buffer:{bucket_cap_bytes(log.group):.0f}", work)
        costs = {model: Table(MESH, time(MESH)) for model, time in models(log, seen).items()}
        costs |= {f"{DOZEN} sizes": fitted, "best": log.cost}
        plans |= {who: make_plan("exact", work, cost) for who, cost in costs.items()}
        taken = {who: predict(work, plan, log.cost).iteration_s for who, plan in plans.items()}
        table[name] = pd.Series(taken) / taken["best"] - 1
    return pd.DataFrame(table).T.drop(columns="best")
