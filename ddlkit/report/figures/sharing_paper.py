"""The paper's grid from the paper's kernels: sharing figures 4 to 8 as its figures 2 and 3 predict them.

Figure 2 says how long an all-reduce takes under each of 16 configurations, figure 3 how much longer kernels
take beside it. In an iteration, what is computed beside messages takes longer (`core.link`). Unknown are what
a network computes, the time of an all-reduce of 25 MB, and which share of figure 3's slowdown training
feels: kernels there run beside messages without end. They are fitted on batches 16 and 64 of figure 8; its
batches 32 and 128, and figure 4, are predicted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit import store
from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import Link, one_by_one
from ddlkit.core.timeline import COMPUTE
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.report import source
from ddlkit.report.claims import paper_table, prose
from ddlkit.report.papers.sharing import BATCHES, DEFAULT, throughput

Floats = NDArray[np.float64]
FITTED = (16, 64)
"""Batches of figure 8 that the unknowns are fitted on; the others are judged."""
ALLREDUCE_BYTES = 25e6
"""Of figure 2. Were they 25 MiB, the fitted time of one would be a twentieth longer; nothing else changes."""
MODELS = ("both", "none", "mean")
"""Slowdowns of compute and of messages; no slowdown; the same for all configurations."""
RESNET = ("ResNet-18", 32)
"""Network and batch of figures 4 and 5."""


@cache
def layers(network: str) -> Workload:
    """Return a network whose layers compute as long as their FLOP say, counted in the recorded profiles."""
    wanted = f"network == {store.network_named(network).lower()!r}"
    tables = (each.table("layers") for each in source.recordings("layers").values())
    chosen = (rows.query(f"{wanted} and precision == 'fp32' and ranks == 1") for rows in tables)
    rows = next(rows for rows in chosen if len(rows))
    parts = tuple(rows["tensor"]), rows["parameters"].to_numpy(), rows["flops"].to_numpy()
    counted = LayerProfile.from_flops(network, 1, *parts, peak_flops_per_s=1.0, utilisation=1.0)
    return counted.workload()


@cache
def _buckets(network: str) -> tuple[Floats, Floats]:
    """Return of PyTorch's buckets (G,) shares of compute by which each is ready, and (G,) bytes."""
    work = layers(network)
    sent = plan.ddp(work)
    return sent.group_ready_s(work) / work.compute_s, sent.group_bytes(work).astype(float)


@cache
def relative_times() -> pd.Series:
    """Return time of the all-reduce under each configuration over the default's, sharing Fig 2."""
    grid = paper_table("sharing", "fig02")
    return grid["relative_time"].set_axis(_names(grid))


@cache
def kernel_slowdowns() -> pd.Series:
    """Return how much longer kernels take beside it: geometric mean of the five of sharing Fig 3, less 1."""
    grid = paper_table("sharing", "fig03")
    means = np.exp(np.log(grid["slowdown"]).groupby(_names(grid), sort=False).mean())
    return means[relative_times().index] - 1


def _names(grid: pd.DataFrame) -> list[str]:
    return [f"{blocks}x{threads}" for blocks, threads in grid[["blocks", "threads"]].to_numpy()]


@dataclass(frozen=True, eq=False)
class Grid:
    """The model of figure 8 with its unknowns.

    allreduce_s : of 25 MB by the default; felt : share of figure 3's slowdown that training feels
    messages : how much longer messages take beside compute
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
        compute_s = self.start_s[network] + self.image_s[network] * np.asarray(batches, float)
        sent_s = self.allreduce_s / ALLREDUCE_BYTES * np.outer(ratios, n_bytes)
        ready_s, sent_s = np.broadcast_arrays(compute_s[:, None, None] * ready, sent_s[None])
        slower = self.felt * kernel_slowdowns().to_numpy()[:, None]
        nothing = np.zeros(sent_s.shape)
        return one_by_one(ready_s, nothing, sent_s, 0.0, slower, self.messages)[1][..., -1]

    def iteration(self, network: str, batch: int, configuration: str) -> Iteration:
        """Return one of them, with its timeline."""
        work = layers(network)
        compute_s = self.start_s[network] + self.image_s[network] * batch
        work = work.scaled(compute_s / work.compute_s)
        per_byte = self.allreduce_s / ALLREDUCE_BYTES * float(relative_times()[configuration])
        slower = self.felt * float(kernel_slowdowns()[configuration])
        link = Link(slowdown=slower, message_slowdown=self.messages)
        return Iteration(work, plan.ddp(work), AlphaBeta(0.0, per_byte), link)


@cache
def fitted(model: str) -> Grid:
    """Fit the unknowns of "both" or "none" to the FITTED batches, by least squares of log throughput."""
    from scipy.optimize import least_squares

    measured = throughput()
    names = list(dict.fromkeys(measured.index.get_level_values("network")))
    logs = {name: np.log(measured.loc[name].loc[list(FITTED)].to_numpy()) for name in names}
    n, batches = len(names), np.array(FITTED, float)

    def grid(x: Floats) -> Grid:
        felt, drag = (0.0, 0.0) if model == "none" else x[1:3].tolist()
        halves = np.exp(x[3:]).reshape(2, n).tolist()
        by_network = (dict(zip(names, half, strict=True)) for half in halves)
        return Grid(float(np.exp(x[0])), felt, drag, *by_network)

    def residuals(x: Floats) -> Floats:
        tried = grid(x)
        apart = [
            logs[name] - np.log(batches[:, None] / tried.iteration_s(name, batches))
            for name in names
        ]
        joined = np.concatenate([part.ravel() for part in apart])
        return joined[np.isfinite(joined)]

    slopes = [float(np.ptp(batches / np.exp(np.nanmax(logs[name], axis=1)))) / 48 for name in names]
    begin = [np.log(0.015), 0.1, 0.1, *np.full(n, np.log(1e-3)), *np.log(slopes)]
    low = [-np.inf, 0.0, 0.0, *np.full(2 * n, np.log(1e-8))]
    return grid(least_squares(residuals, begin, bounds=(low, np.inf), x_scale="jac").x)


def judged() -> pd.DataFrame:
    """Return figure 8 configuration by configuration: measured, and each of MODELS, in images a second.

    Columns: network, batch, configuration, measured, fitted (whether), one a model; of configurations that
    are printed at both FITTED batches.
    """
    measured, tables = throughput(), []
    for network, rows in measured.groupby(level="network", sort=False):
        batches = rows.index.get_level_values("batch").to_numpy(dtype=float)
        times_s = batches[:, None] / rows.to_numpy()
        low_s, high_s = (times_s[batches == batch][0] for batch in FITTED)
        share = (batches - FITTED[0]) / (FITTED[1] - FITTED[0])
        line_s = low_s + share[:, None] * (high_s - low_s)  # each configuration's own
        mean_s = np.nanmean(line_s, axis=1)
        each = {name: fitted(name).iteration_s(network, batches) for name in ("both", "none")}
        each["mean"] = np.repeat(mean_s[:, None], rows.shape[1], axis=1)
        frames = {"measured": rows.where(~np.isnan(line_s))} | {
            name: pd.DataFrame(batches[:, None] / seconds, rows.index, rows.columns)
            for name, seconds in each.items()
        }
        tables.append(pd.concat({name: frame.stack() for name, frame in frames.items()}, axis=1))
    rows = pd.concat(tables).rename_axis(["network", "batch", "configuration"]).reset_index()
    return rows.dropna(subset="measured").assign(fitted=rows["batch"].isin(FITTED))


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Return, one row a model of `judged` rows, how far off it is: model, cells, median, regret.

    median : absolute error of throughput; regret : how much slower, in the mean over networks and batches,
        the configuration is that the model would choose, than the best measured one
    """
    row = ["network", "batch"]
    best = rows.groupby(row)["measured"].max()
    table = []
    for name in MODELS:
        chosen = rows.loc[rows.groupby(row)[name].idxmax()]
        if name == "mean":  # who finds all alike keeps the default
            chosen = rows[rows["configuration"] == DEFAULT]
        regret = (1 - chosen.set_index(row)["measured"] / best).mean()
        table.append((name, len(rows), (rows[name] / rows["measured"] - 1).abs().median(), regret))
    return pd.DataFrame(table, columns=["model", "cells", "median", "regret"])


def figure4() -> pd.DataFrame:
    """Return ResNet-18's gain over the default in per cent: figures 4 and 8, and the model of figure 8."""
    printed = paper_table("sharing", "fig04")
    table = pd.DataFrame({"figure 4": printed["gain_percent"].to_numpy()}, index=_names(printed))
    row = throughput().loc[RESNET]
    table["figure 8"] = 100 * (row / row[DEFAULT] - 1)
    times_s = fitted("both").iteration_s(RESNET[0], np.array([RESNET[1]], float))[0]
    times = pd.Series(times_s, table.index)
    table["both"] = 100 * (times[DEFAULT] / times - 1)
    return table.drop(index=DEFAULT)


def best(network: str, batch: int) -> str:
    """Return the configuration with the largest throughput in figure 8."""
    return str(throughput().loc[(network, batch)].idxmax())


def breakdown(cases: Mapping[str, tuple[str, int, str]]) -> pd.DataFrame:
    """Return computation only, overlap, communication only of simulated iterations, in seconds.

    cases : name -> network, batch, configuration; a row each
    """
    rows = {}
    for name, (network, batch, configuration) in cases.items():
        timeline = fitted("both").iteration(network, batch, configuration).timeline()
        overlap_s = timeline.overlap_s()
        computing_s = timeline.busy_s(COMPUTE) - overlap_s
        rows[name] = computing_s, overlap_s, timeline.exposed_communication_s()
    columns = ["computation only", "overlap", "communication only"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def with_best(networks: Mapping[str, tuple[str, int]]) -> pd.DataFrame:
    """Return the `breakdown` of each network and batch under the default, and under the paper's best."""
    cases = {}
    for label, (network, batch) in networks.items():
        for name in (DEFAULT, best(network, batch)):
            cases[f"{label}, {name}"] = network, batch, name
    return breakdown(cases)


# -- what the text prints of figures 5 to 7 -----------------------------------------------------


def printed_parts() -> pd.DataFrame:
    """Return what the text gives of figure 5c as rows of a timeline, in which messages overlap so long."""
    words = ("computation", "communication", "overlap")
    compute_s, sent_s, both_s = (prose("sharing")[f"fig05c-{word}"] / 1e3 for word in words)
    begin_s = compute_s - both_s
    ends = [(0.0, compute_s), (begin_s, begin_s + sent_s), (begin_s, compute_s)]
    rows = pd.DataFrame(ends, index=words, columns=["start_s", "end_s"])
    same = {"rank": 0, "iteration": 0, "group": -1, "origin": "printed"}
    same |= {"bytes": 0, "case": "paper: 1x64"}
    rows = rows.assign(task=rows.index, kind=rows.index, stream=rows.index, **same)
    return rows.assign(printed_s=rows["end_s"] - rows["start_s"])


def saved() -> pd.DataFrame:
    """Return by batch of ResNet-18 what the paper's best saves of an iteration, in milliseconds.

    Columns: printed (in the text), figure 8 (from its throughputs), model (of that figure, by its model).
    """
    every = prose("sharing").items()
    said = {int(key.rpartition("-")[2]): n for key, n in every if "fig06-saved" in key}
    rows = {}
    for batch in BATCHES:
        images, took_s = throughput().loc["ResNet-18", batch], with_best({"": ("ResNet-18", batch)})
        printed = batch / images[DEFAULT] - batch / images.max()
        rows[batch] = printed, took_s.iloc[0].sum() - took_s.iloc[1].sum()
    saved_s = pd.DataFrame.from_dict(rows, orient="index", columns=["figure 8", "model"])
    return pd.DataFrame({"printed": said}).join(1e3 * saved_s, how="outer").rename_axis("batch")


def printed() -> pd.DataFrame:
    """Return every time that the text gives of figure 7, in ms, beside the model of figure 8; its error.

    Columns: network, configuration, quantity, paper, model, error; AlexNet's computation only, which is one
    for both configurations, first.
    """
    names = {"alexnet": "AlexNet", "vgg16": "VGG-16", "vgg19": "VGG-19", "vit": "ViT-Base/16"}
    names |= {f"resnet{depth}": f"ResNet-{depth}" for depth in (18, 50, 101)}
    parts = {
        "computation": ("computation only", "overlap"),
        "communication": ("overlap", "communication only"),
        "computation-only": ("computation only",),
        "communication-only": ("communication only",),
        "overlap": ("overlap",),
    }
    said = prose("sharing")
    alone_ms = said["fig07-alexnet-computation-only"]
    times = [("AlexNet", which, "computation-only", alone_ms) for which in ("default", "best")]
    for key, value in said.items():
        if words := re.fullmatch(r"fig07-([a-z0-9]+)-(.+)-(default|best)", key):
            times.append((names[words[1]], words[3], words[2], value))
    rows = []
    for network, which, quantity, value in times:
        name = DEFAULT if which == "default" else best(network, 64)
        bar_ms = 1e3 * breakdown({"": (network, 64, name)}).iloc[0]
        rows.append((network, name, quantity, value, bar_ms[list(parts[quantity])].sum()))
    columns = ["network", "configuration", "quantity", "paper", "model"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(error=table["model"] / table["paper"] - 1)
