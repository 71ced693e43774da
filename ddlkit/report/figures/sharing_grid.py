"""The paper's grid from the paper's kernels: sharing figures 4 and 8 as its figures 2 and 3 foretell them.

Figure 2 says how long an all-reduce takes under each of 16 configurations, figure 3 how much longer kernels
take beside it. In an iteration, what is computed beside messages takes longer (`core.link`). Unknown are what
a network computes, the time of an all-reduce of 25 MB, and which share of figure 3's slowdown training
feels: kernels there run beside messages without end. They are fitted on batches 16 and 64 of figure 8; its
batches 32 and 128, and figure 4, are foretold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit import store
from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import Link, one_by_one
from ddlkit.core.resources import Resources
from ddlkit.core.timeline import COMPUTE
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.report import source
from ddlkit.report.claims import paper_table, prose
from ddlkit.report.papers.sharing import DEFAULT, throughput

Floats = NDArray[np.float64]

FITTED, FORETOLD = (16, 64), (32, 128)
"""Batches of figure 8: those that the unknowns are fitted on, and those that are judged."""
ALLREDUCE_BYTES = 25e6
"""Of figure 2. Were they 25 MiB, the fitted time of one would be a twentieth longer; nothing else changes."""
MODELS = {
    "both": "slowdowns of computing and of messages",
    "computing": "slowdown of computing",
    "whole": "slowdown of computing, all of figure 3's",
    "none": "no slowdown",
    "mean": "the same for all configurations",
    "own": "each cell's own line through both batches",
}


class Shape(NamedTuple):
    """What travels and when, of a network: (G,) shares of compute by which each bucket is ready; bytes."""

    ready: Floats
    n_bytes: Floats


@cache
def shape(network: str) -> Shape:
    """Of PyTorch's buckets of `layers`."""
    workload = layers(network)
    sent = plan.ddp(workload)
    ready = sent.group_ready_s(workload) / workload.compute_s
    return Shape(ready, sent.group_bytes(workload).astype(float))


@cache
def layers(network: str) -> Workload:
    """A network whose layers compute as long as their FLOP say, counted in the recorded profiles."""
    for one in source.recordings("layers").values():
        rows = one.table("layers")
        rows = rows[(rows["network"] == store.network_named(network).lower())]
        rows = rows[(rows["precision"] == "fp32") & (rows["ranks"] == 1)]
        if len(rows):
            break
    names, sizes = tuple(rows["tensor"]), rows["parameters"].to_numpy()
    counted = LayerProfile.from_flops(
        network, 1, names, sizes, rows["flops"].to_numpy(), peak_flops_per_s=1.0, utilisation=1.0
    )
    return counted.workload()


@cache
def relative_times() -> pd.Series:
    """Time of the all-reduce under each configuration over the default's, sharing Fig 2."""
    grid = paper_table("sharing", "fig02")
    return pd.Series(grid["relative_time"].to_numpy(), index=_names(grid))


@cache
def kernel_slowdowns() -> pd.Series:
    """How much longer kernels take beside it, as a share: geometric mean of the five of sharing Fig 3."""
    grid = paper_table("sharing", "fig03")
    means = np.exp(np.log(grid["slowdown"]).groupby(_names(grid), sort=False).mean())
    return means[relative_times().index] - 1


def _names(grid: pd.DataFrame) -> list[str]:
    pairs = zip(grid["blocks"], grid["threads"], strict=True)
    return [f"{blocks}x{threads}" for blocks, threads in pairs]


@dataclass(frozen=True, eq=False)
class Grid:
    """The model of figure 8 with its unknowns.

    allreduce_s : of 25 MB by the default; felt : share of figure 3's slowdown that training feels
    messages : how much longer messages take beside computing
    start_s, image_s : by network: compute of an iteration, and of each image beyond
    """

    allreduce_s: float
    felt: float
    messages: float
    start_s: dict[str, float]
    image_s: dict[str, float]

    def iteration_s(self, network: str, batches: Floats) -> Floats:
        """(len(batches), 16) iterations under every configuration, in figure 2's order."""
        known, ratios = shape(network), relative_times().to_numpy()
        compute_s = self.start_s[network] + self.image_s[network] * np.asarray(batches, float)
        sent_s = self.allreduce_s / ALLREDUCE_BYTES * np.outer(ratios, known.n_bytes)
        ready_s = compute_s[:, None, None] * known.ready
        ready_s, sent_s = np.broadcast_arrays(ready_s, sent_s[None])
        slower = self.felt * kernel_slowdowns().to_numpy()[:, None]
        nothing = np.zeros(sent_s.shape)
        return one_by_one(ready_s, nothing, sent_s, 0.0, slower, self.messages)[1][..., -1]

    def workload(self, network: str, batch: int) -> Workload:
        """What a network computes at a batch."""
        own = layers(network)
        return own.scaled((self.start_s[network] + self.image_s[network] * batch) / own.compute_s)

    def iteration(self, network: str, batch: int, configuration: str) -> Iteration:
        """One of them, with its timeline."""
        work = self.workload(network, batch)
        per_byte = self.allreduce_s / ALLREDUCE_BYTES * float(relative_times()[configuration])
        slower = self.felt * float(kernel_slowdowns()[configuration])
        link = Link(slowdown=slower, message_slowdown=self.messages)
        return Iteration(work, plan.ddp(work), AlphaBeta(0.0, per_byte), link)


@cache
def fitted(model: str) -> Grid:
    """The unknowns of one of MODELS ("both", "computing", "whole" or "none") on the FITTED batches.

    Least squares of log throughput; whoever has no term gets its own best fit too.
    """
    from scipy.optimize import least_squares

    measured = throughput()
    names = networks()
    logs = {name: np.log(measured.loc[name].loc[list(FITTED)].to_numpy()) for name in names}
    n, batches = len(names), np.array(FITTED, float)

    def grid(x: Floats) -> Grid:
        felt = {"none": 0.0, "whole": 1.0}.get(model, float(x[1]))
        drag = float(x[2]) if model == "both" else 0.0
        times = np.exp(x[3:])
        own = (dict(zip(names, half.tolist(), strict=True)) for half in (times[:n], times[n:]))
        return Grid(float(np.exp(x[0])), felt, drag, *own)

    def residuals(x: Floats) -> Floats:
        one = grid(x)
        apart = [
            logs[name] - np.log(batches[:, None] / one.iteration_s(name, batches)) for name in names
        ]
        joined = np.concatenate([part.ravel() for part in apart])
        return joined[np.isfinite(joined)]

    slopes = [float(np.ptp(batches / np.exp(np.nanmax(logs[name], axis=1)))) / 48 for name in names]
    begin = [np.log(0.015), 0.1, 0.1, *np.full(n, np.log(1e-3)), *np.log(slopes)]
    low = [-np.inf, 0.0, 0.0, *np.full(2 * n, np.log(1e-8))]
    found = least_squares(residuals, begin, bounds=(low, np.inf), x_scale="jac")
    return grid(found.x)


def networks() -> list[str]:
    """Those of figure 8, in its order."""
    return list(dict.fromkeys(throughput().index.get_level_values("network")))


def choices(grid: Grid) -> list[Resources]:
    """The 16 configurations as resources that a message may have."""
    costs = grid.allreduce_s / ALLREDUCE_BYTES * relative_times()
    slower = grid.felt * kernel_slowdowns()
    return [
        Resources(str(name), AlphaBeta(0.0, cost), slower[name], grid.messages)
        for name, cost in costs.items()
    ]


def judged() -> pd.DataFrame:
    """Figure 8 cell by cell: network, batch, configuration, whether fitted, measured, and each of MODELS.

    All in images a second, one GPU's; cells that the paper's text lacks are left out.
    """
    measured = throughput()
    cells = measured.rename_axis(columns="configuration").stack().rename("measured").dropna()
    cells = cells.reset_index()
    by = {name: fitted(name) for name in MODELS if name not in ("mean", "own")}
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in MODELS}
    for network, own in measured.groupby(level="network", sort=False):
        batches = own.index.get_level_values("batch").to_numpy(dtype=float)
        times = pd.DataFrame(batches[:, None] / own.to_numpy(), own.index, own.columns)
        each = {name: one.iteration_s(network, batches) for name, one in by.items()}
        each["own"] = _line(batches, times.to_numpy())
        each["mean"] = np.repeat(np.nanmean(each["own"], axis=1)[:, None], own.shape[1], axis=1)
        for name, found in each.items():
            tables[name].append(pd.DataFrame(batches[:, None] / found, own.index, own.columns))
    for name, parts in tables.items():
        column = pd.concat(parts).rename_axis(columns="configuration").stack().rename(name)
        cells = cells.join(column, on=["network", "batch", "configuration"])
    return cells.assign(fitted=cells["batch"].isin(FITTED))


def _line(batches: Floats, times_s: Floats) -> Floats:
    """(len(batches), 16) iterations on the straight line through each configuration's FITTED batches."""
    low, high = (times_s[batches == batch][0] for batch in FITTED)
    share = (batches - FITTED[0]) / (FITTED[1] - FITTED[0])
    return np.asarray(low + share[:, None] * (high - low))


def errors(cells: pd.DataFrame) -> pd.DataFrame:
    """One row a model of `judged` cells, of those that all models have: what it says and how far off it is.

    median, mean : of the absolute and the signed error of throughput; gain_points : median difference from
        the measured gain over the default, in points; regret : how much slower, in the mean over networks
        and batches, the configuration is that the model would choose, than the best measured one
    """
    whole = cells.dropna(subset=list(MODELS))
    row = ["network", "batch"]
    default = whole[whole["configuration"] == DEFAULT].set_index(row)
    best = whole.groupby(row)["measured"].max()
    found = []
    for name, says in MODELS.items():
        off = whole[name] / whole["measured"] - 1
        over = whole.join(default[[name, "measured"]].add_suffix("_default"), on=row)
        gains = [over[one] / over[f"{one}_default"] - 1 for one in (name, "measured")]
        chosen = whole.loc[whole.groupby(row)[name].idxmax()].set_index(row)["measured"]
        # Who finds all alike keeps the default.
        chosen = default["measured"] if name == "mean" else chosen
        regret = (1 - chosen / best).mean()
        apart = 100 * (gains[0] - gains[1])[whole["configuration"] != DEFAULT].abs().median()
        found.append((name, says, len(whole), off.abs().median(), off.mean(), apart, regret))
    columns = ["model", "what", "cells", "median", "mean", "gain_points", "regret"]
    return pd.DataFrame(found, columns=columns)


def figure4() -> pd.DataFrame:
    """ResNet-18 at batch 32, gain over the default in per cent: figure 4, figure 8, and models of figure 8.

    One row a configuration but the default.
    """
    printed = paper_table("sharing", "fig04")
    table = pd.DataFrame({"figure 4": printed["gain_percent"].to_numpy()}, index=_names(printed))
    row = throughput().loc[("ResNet-18", 32)]
    table["figure 8"] = 100 * (row / row[DEFAULT] - 1)
    for name in ("both", "computing", "none"):
        times = pd.Series(fitted(name).iteration_s("ResNet-18", np.array([32.0]))[0], table.index)
        table[name] = 100 * (times[DEFAULT] / times - 1)
    return table.drop(index=DEFAULT)


def best(network: str, batch: int) -> str:
    """The configuration with the largest throughput in figure 8."""
    return str(throughput().loc[(network, batch)].idxmax())


def breakdown(cases: Mapping[str, tuple[str, int, str]], model: str = "both") -> pd.DataFrame:
    """Computation only, overlap, communication only of simulated iterations, in seconds; a row a case.

    cases : name -> network, batch, configuration
    """
    rows = {}
    for name, (network, batch, configuration) in cases.items():
        timeline = fitted(model).iteration(network, batch, configuration).timeline()
        overlap_s = timeline.overlap_s()
        computing_s = timeline.busy_s(COMPUTE) - overlap_s
        rows[name] = computing_s, overlap_s, timeline.exposed_communication_s()
    columns = ["computation only", "overlap", "communication only"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


PRINTED = {
    "computation": ("computation only", "overlap"),
    "communication": ("overlap", "communication only"),
    "computation-only": ("computation only",),
    "communication-only": ("communication only",),
    "overlap": ("overlap",),
}
"""What the text of sections 4.3 and 4.4.3 gives of a bar, as parts of `breakdown`."""


def printed() -> pd.DataFrame:
    """Every time that the text gives of figures 5c and 7, in ms, beside the model of figure 8; its error."""
    names = {"alexnet": "AlexNet", "vgg16": "VGG-16", "vgg19": "VGG-19", "vit": "ViT-Base/16"}
    names |= {f"resnet{depth}": f"ResNet-{depth}" for depth in (18, 50, 101)}
    rows = []
    for key, value in prose("sharing").items():
        figure, _, rest = key.partition("-")
        first, _, what = rest.partition("-")
        which = what.rpartition("-")[2]
        if figure == "fig05c" and rest in PRINTED:
            case, part = ("ResNet-18", 32, "1x64"), rest
        elif figure == "fig07" and which in ("default", "best"):
            network = names[first]
            case = network, 64, DEFAULT if which == "default" else best(network, 64)
            part = what.rpartition("-")[0]
        else:
            continue
        parts = 1e3 * breakdown({"it": case}).loc["it", list(PRINTED[part])].sum()
        rows.append((*case, part, value, parts, parts / value - 1))
    columns = ["network", "batch", "configuration", "quantity", "printed_ms", "model_ms", "error"]
    return pd.DataFrame(rows, columns=columns)
