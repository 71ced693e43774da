"""The contention term: the sharing paper's figures 4 to 8 from its figures 2 and 3.

Unknown are what a network computes, the time of an all-reduce of 25 MB, and which share
of figure 3's slowdown training feels: they are fitted on batches 16 and 64 of figure 8.
Its other batches, and figure 4, are predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import Link, one_by_one
from ddlkit.core.timeline import COMPUTE
from ddlkit.core.workload import LayerProfile, Workload
from workbook.common import source, specs
from workbook.common.claims import paper_table
from workbook.sharing.printed import (
    DEFAULT,
    configurations,
    relative_times,
    throughput,
)

Floats = NDArray[np.float64]
FITTED = (16, 64)
"""Batches of figure 8 on which the unknowns are fitted; the others are judged."""
ALLREDUCE_BYTES = 25e6
"""Of figure 2; were they 25 MiB, only the fitted time of one would be longer."""
PARTS = ["computation only", "overlap", "communication only"]
"""Into which an iteration is divided."""
FIT_MODELS = ["both", "none"]
"""Slowdowns of compute and of messages; no slowdown."""


@cache
def layers(network: str) -> Workload:
    """Return a network whose layers compute as long as their FLOP say, counted in the recorded profiles."""
    wanted = (
        f"network == {specs.network_named(network).lower()!r} and precision == 'fp32'"
    )
    tables = (each.table("layers") for each in source.recordings("layers").values())
    chosen = (rows.query(f"{wanted} and ranks == 1") for rows in tables)
    rows = next(rows for rows in chosen if len(rows))
    parts = (
        tuple(rows["tensor"]),
        rows["parameters"].to_numpy(),
        rows["flops"].to_numpy(),
    )
    counted = LayerProfile.from_flops(
        network, 1, *parts, peak_flops_per_s=1.0, utilisation=1.0
    )
    return counted.workload()


@cache
def _buckets(network: str) -> tuple[Floats, Floats]:
    """Return of PyTorch's buckets (G,) shares of compute by which each is ready, and (G,) bytes."""
    work = layers(network)
    sent = plan.ddp(work)
    return sent.group_ready_s(work) / work.compute_s, sent.group_bytes(work).astype(
        float
    )


@cache
def kernel_slowdowns() -> pd.Series:
    """Return how much longer kernels take beside it: geometric mean of the five of sharing Fig 3, less 1."""
    grid = paper_table("sharing", "fig03")
    means = np.exp(
        np.log(grid["slowdown"]).groupby(configurations(grid), sort=False).mean()
    )
    return means[relative_times().index] - 1


@dataclass(frozen=True, eq=False)
class Fitted:
    """The model of figure 8 with its unknowns.

    allreduce_s : of 25 MB by the default; felt : share of figure 3's slowdown; messages : their own slowdown
    start_s, image_s : by network: compute of an iteration, and of each image beyond
    """

    allreduce_s: float
    felt: float
    messages: float
    start_s: dict[str, float]
    image_s: dict[str, float]

    def iteration_s(self, network: str, batches: Floats) -> Floats:
        """Return (len(batches), 16) iterations under every configuration, in figure 2's order."""
        (ready, n_bytes), ratios = _buckets(network), relative_times().to_numpy()
        compute_s = self.start_s[network] + self.image_s[network] * np.asarray(
            batches, float
        )
        sent_s = self.allreduce_s / ALLREDUCE_BYTES * np.outer(ratios, n_bytes)
        ready_s, sent_s = np.broadcast_arrays(
            compute_s[:, None, None] * ready, sent_s[None]
        )
        slower = self.felt * kernel_slowdowns().to_numpy()[:, None]
        nothing = np.zeros(sent_s.shape)
        return one_by_one(ready_s, nothing, sent_s, 0.0, slower, self.messages)[1][
            ..., -1
        ]

    def iteration(self, network: str, batch: int, configuration: str) -> Iteration:
        """Return one of them, with its timeline."""
        work = layers(network)
        compute_s = self.start_s[network] + self.image_s[network] * batch
        work = work.scaled(compute_s / work.compute_s)
        per_byte = (
            self.allreduce_s / ALLREDUCE_BYTES * float(relative_times()[configuration])
        )
        slower = self.felt * float(kernel_slowdowns()[configuration])
        link = Link(slowdown=slower, message_slowdown=self.messages)
        return Iteration(work, plan.ddp(work), AlphaBeta(0.0, per_byte), link)


@cache
def fitted(slowdowns: str) -> Fitted:
    """Fit the unknowns of one of FIT_MODELS to the FITTED batches, by least squares of log throughput."""
    from scipy.optimize import least_squares

    measured = throughput()
    names = list(dict.fromkeys(measured.index.get_level_values("network")))
    logs = {
        name: np.log(measured.loc[name].loc[list(FITTED)].to_numpy()) for name in names
    }
    n, batches = len(names), np.array(FITTED, float)

    def model(x: Floats) -> Fitted:
        felt, drag = (0.0, 0.0) if slowdowns == "none" else x[1:3].tolist()
        start_s, image_s = (
            dict(zip(names, half, strict=True))
            for half in np.exp(x[3:]).reshape(2, n).tolist()
        )
        return Fitted(float(np.exp(x[0])), felt, drag, start_s, image_s)

    def residuals(x: Floats) -> Floats:
        seconds = np.array([model(x).iteration_s(name, batches) for name in names])
        apart = np.array([*logs.values()]) - np.log(batches[:, None] / seconds)
        return apart[np.isfinite(apart)]

    slopes = [
        float(np.ptp(batches / np.exp(np.nanmax(logs[name], axis=1)))) / 48
        for name in names
    ]
    begin = [np.log(0.015), 0.1, 0.1, *np.full(n, np.log(1e-3)), *np.log(slopes)]
    low = [-np.inf, 0.0, 0.0, *np.full(2 * n, np.log(1e-8))]
    return model(least_squares(residuals, begin, bounds=(low, np.inf), x_scale="jac").x)


def predicted(model: str) -> pd.DataFrame:
    """Return figure 8 by one of FIT_MODELS, in images a second, rows and columns as `throughput` has them."""
    grid, tables = throughput(), []
    for network, rows in grid.groupby(level="network", sort=False):
        batches = rows.index.get_level_values("batch").to_numpy(dtype=float)
        seconds = fitted(model).iteration_s(str(network), batches)
        tables.append(
            pd.DataFrame(batches[:, None] / seconds, rows.index, rows.columns)
        )
    return pd.concat(tables)


def errors() -> pd.DataFrame:
    """Return by model: cases, median absolute error of figure 8's throughputs, and regret.

    Of batches not FITTED, and configurations that are printed at both of these.
    regret : how much slower, in the mean, the model's choice is than the best; also of keeping the "default"
    """
    grid = throughput()
    fit = grid.index.isin(FITTED, level="batch")
    printed_twice = (
        grid[fit].notna().groupby("network").all().reindex(grid.index, level="network")
    )
    measured = grid.where(printed_twice)[~fit]
    relative, table = measured.div(measured.max(axis=1), axis=0), {}
    for name in FIT_MODELS:
        images = predicted(name).loc[measured.index].where(measured.notna())
        off = (images / measured - 1).abs().stack()
        reached = relative.where(images.eq(images.max(axis=1), axis=0)).max(axis=1)
        table[name] = {
            "cases": off.count(),
            "median": off.median(),
            "regret": 1 - reached.mean(),
        }
    table["default"] = {"regret": 1 - relative[DEFAULT].mean()}
    return pd.DataFrame(table).T


def best(network: str, batch: int) -> str:
    """Return the configuration with the largest throughput in figure 8."""
    return str(throughput().loc[(network, batch)].idxmax())


@cache
def parts_s(network: str, batch: int, configuration: str) -> tuple[float, float, float]:
    """Return PARTS of a simulated iteration."""
    timeline = fitted("both").iteration(network, batch, configuration).timeline()
    overlap_s = timeline.overlap_s()
    return (
        timeline.busy_s(COMPUTE) - overlap_s,
        overlap_s,
        timeline.exposed_communication_s(),
    )


def with_best(networks: Mapping[str, tuple[str, int]]) -> pd.DataFrame:
    """Return `parts_s` of each network and batch, by label, under the default and under the paper's best."""
    rows = {
        f"{label}, {name}": parts_s(*case, name)
        for label, case in networks.items()
        for name in (DEFAULT, best(*case))
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=PARTS)
