"""The contention term: the sharing paper's figures 4 to 8 from its figures 2 and 3, and real training.

Figure 2 says how long an all-reduce takes under each of 16 configurations, figure 3 how much longer kernels
take beside it. In an iteration, what is computed beside messages takes longer (`core.link`). Unknown are what
a network computes, the time of an all-reduce of 25 MB, and which share of figure 3's slowdown training
feels: kernels there run beside messages without end. They are fitted on batches 16 and 64 of figure 8; its
batches 32 and 128, and figure 4, are predicted.

Of real training nothing is fitted: a configuration's messages, and what kernels and messages take from each
other, were timed without any network. Judged is the final grid (examples/sharing_steady.yml) on networks that
were held out before anything was recorded (22 November 2026); what lay before is in docs/studies.md. DDP's
copies into buckets count there, and no message is faster than its link's rate: one timed alone finds what a
rested link has saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit import store
from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta, Table
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import Link, one_by_one, wire_s_per_byte
from ddlkit.core.resources import Resources, Shared
from ddlkit.core.timeline import COMPUTE
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.model.predictor import make_plan
from ddlkit.report import source
from ddlkit.report.claims import paper_table, prose
from ddlkit.report.papers.sharing import BATCHES, DEFAULT, throughput
from ddlkit.report.source import Source

Floats = NDArray[np.float64]
FITTED = (16, 64)  # batches of figure 8 that the unknowns are fitted on; the others are judged
ALLREDUCE_BYTES = 25e6  # of figure 2; were they 25 MiB, one's fitted time alone would be longer
RESNET = ("ResNet-18", 32)  # network and batch of figures 4 and 5
PARTS = ["computation only", "overlap", "communication only"]
FIT_MODELS = ["both", "none"]
"""Slowdowns of compute and of messages; no slowdown."""
NOT_HELD_OUT = ("resnet18_64", "vgg16_cifar")
MODELS = ["none", "term", "no overlap"]
"""No slowdown; slowdowns as measured with kernels; messages begin when compute is done."""
CELL = ["network", "batch", "plan", "link"]


# -- the paper's grid ----------------------------------------------------------------------------


def configurations(grid: pd.DataFrame) -> list[str]:
    """Return the configuration of each row with columns blocks and threads."""
    return [f"{blocks}x{threads}" for blocks, threads in grid[["blocks", "threads"]].to_numpy()]


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
    return grid["relative_time"].set_axis(configurations(grid))


@cache
def kernel_slowdowns() -> pd.Series:
    """Return how much longer kernels take beside it: geometric mean of the five of sharing Fig 3, less 1."""
    grid = paper_table("sharing", "fig03")
    means = np.exp(np.log(grid["slowdown"]).groupby(configurations(grid), sort=False).mean())
    return means[relative_times().index] - 1


@dataclass(frozen=True, eq=False)
class Fitted:
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
def fitted(slowdowns: str) -> Fitted:
    """Fit the unknowns of one of FIT_MODELS to the FITTED batches, by least squares of log throughput."""
    from scipy.optimize import least_squares

    measured = throughput()
    names = list(dict.fromkeys(measured.index.get_level_values("network")))
    logs = {name: np.log(measured.loc[name].loc[list(FITTED)].to_numpy()) for name in names}
    n, batches = len(names), np.array(FITTED, float)

    def model(x: Floats) -> Fitted:
        felt, drag = (0.0, 0.0) if slowdowns == "none" else x[1:3].tolist()
        start_s, image_s = (
            dict(zip(names, half, strict=True)) for half in np.exp(x[3:]).reshape(2, n).tolist()
        )
        return Fitted(float(np.exp(x[0])), felt, drag, start_s, image_s)

    def residuals(x: Floats) -> Floats:
        tried = model(x)
        apart = [
            logs[name] - np.log(batches[:, None] / tried.iteration_s(name, batches))
            for name in names
        ]
        joined = np.concatenate(apart, axis=None)
        return joined[np.isfinite(joined)]

    slopes = [float(np.ptp(batches / np.exp(np.nanmax(logs[name], axis=1)))) / 48 for name in names]
    begin = [np.log(0.015), 0.1, 0.1, *np.full(n, np.log(1e-3)), *np.log(slopes)]
    low = [-np.inf, 0.0, 0.0, *np.full(2 * n, np.log(1e-8))]
    return model(least_squares(residuals, begin, bounds=(low, np.inf), x_scale="jac").x)


def predicted(model: str) -> pd.DataFrame:
    """Return figure 8 by one of FIT_MODELS, in images a second, rows and columns as `throughput` has them."""
    grid, tables = throughput(), []
    for network, rows in grid.groupby(level="network", sort=False):
        batches = rows.index.get_level_values("batch").to_numpy(dtype=float)
        seconds = fitted(model).iteration_s(str(network), batches)
        tables.append(pd.DataFrame(batches[:, None] / seconds, rows.index, rows.columns))
    return pd.concat(tables)


def errors(of_fitted: bool = False) -> pd.DataFrame:
    """Return by model: cases, median absolute error of figure 8's throughputs, and regret.

    Of configurations that are printed at both FITTED batches; at the other batches, or ``of_fitted``.
    regret : how much slower, in the mean over networks and batches, the configuration is that the model would
        choose, than the best measured one; also of who always keeps the "default"
    """
    grid = throughput()
    fit = grid.index.isin(FITTED, level="batch")
    printed_twice = grid[fit].notna().groupby("network").all().reindex(grid.index, level="network")
    measured = grid.where(printed_twice)[fit == of_fitted]
    relative, table = measured.div(measured.max(axis=1), axis=0), {}
    for name in FIT_MODELS:
        images = predicted(name).loc[measured.index].where(measured.notna())
        off = (images / measured - 1).abs().stack()
        reached = relative.where(images.eq(images.max(axis=1), axis=0)).max(axis=1)
        table[name] = {"cases": off.count(), "median": off.median(), "regret": 1 - reached.mean()}
    table["default"] = {"regret": 1 - relative[DEFAULT].mean()}
    return pd.DataFrame(table).T


def gains(images: pd.DataFrame) -> pd.DataFrame:
    """Return throughputs' gain over the default's, in per cent, a column each configuration."""
    return 100 * (images.div(images[DEFAULT], axis=0) - 1)


def points_away() -> list[float]:
    """Return how far ResNet-18's gains by the model are from figures 4 and 8: medians, in per cent points."""
    grid = paper_table("sharing", "fig04")
    printed = grid["gain_percent"].set_axis(configurations(grid)), gains(throughput()).loc[RESNET]
    model = gains(predicted("both")).loc[RESNET].drop(DEFAULT)
    return [float((model - each[model.index]).abs().median()) for each in printed]


# -- parts of the paper's iterations, by its model and as its text prints them -------------------


def best(network: str, batch: int) -> str:
    """Return the configuration with the largest throughput in figure 8."""
    return str(throughput().loc[(network, batch)].idxmax())


@cache
def parts_s(network: str, batch: int, configuration: str) -> tuple[float, float, float]:
    """Return PARTS of a simulated iteration."""
    timeline = fitted("both").iteration(network, batch, configuration).timeline()
    overlap_s = timeline.overlap_s()
    return timeline.busy_s(COMPUTE) - overlap_s, overlap_s, timeline.exposed_communication_s()


def with_best(networks: Mapping[str, tuple[str, int]]) -> pd.DataFrame:
    """Return `parts_s` of each network and batch, by label, under the default and under the paper's best."""
    rows = {
        f"{label}, {name}": parts_s(*case, name)
        for label, case in networks.items()
        for name in (DEFAULT, best(*case))
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=PARTS)


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
        figure8_s = batch / images[DEFAULT] - batch / images.max()
        rows[batch] = figure8_s, took_s.iloc[0].sum() - took_s.iloc[1].sum()
    saved_s = pd.DataFrame.from_dict(rows, orient="index", columns=["figure 8", "model"])
    return pd.DataFrame({"printed": said}).join(1e3 * saved_s, how="outer").rename_axis("batch")


def printed() -> pd.DataFrame:
    """Return every time that the text gives of figure 7, in ms, beside the model of figure 8.

    Columns: network, configuration, quantity, paper, model; AlexNet's computation only, which is one for both
    configurations, first.
    """
    names = {"alexnet": "AlexNet", "vgg16": "VGG-16", "vgg19": "VGG-19", "vit": "ViT-Base/16"}
    names |= {f"resnet{depth}": f"ResNet-{depth}" for depth in (18, 50, 101)}
    quantities = {part.replace(" ", "-"): [k] for k, part in enumerate(PARTS)}
    quantities |= {"computation": [0, 1], "communication": [1, 2]}
    every = prose("sharing")
    alone = "fig07-alexnet-computation-only"
    every = {f"{alone}-{which}": every[alone] for which in ("default", "best")} | every
    rows = []
    for key, value in every.items():
        if words := re.fullmatch(r"fig07-([a-z0-9]+)-(.+)-(default|best)", key):
            network, quantity = names[words[1]], words[2]
            name = DEFAULT if words[3] == "default" else best(network, 64)
            model_s = np.array(parts_s(network, 64, name))[quantities[quantity]]
            rows.append((network, name, quantity, value, sum(1e3 * model_s)))
    return pd.DataFrame(rows, columns=["network", "configuration", "quantity", "paper", "model"])


# -- real training -------------------------------------------------------------------------------


def known_resources(
    messages: pd.DataFrame, kernels: pd.DataFrame
) -> dict[tuple[str, str], Resources]:
    """Return by link and configuration what it costs, takes and loses: medians over rounds and kernels.

    All that a kernel lost is lost while messages are under way. A link without a rate limits no message.
    """
    took_s, alone_s = kernels["kernel_beside_s"], kernels["kernel_alone_s"]
    overlap_s = kernels["overlap_share"] * took_s
    kept_s = (overlap_s - (took_s - alone_s)).clip(lower=0)
    terms: dict[str, Any] = {
        "slowdown": overlap_s / kept_s.where(overlap_s > 0) - 1,
        "message_slowdown": kernels["messages_beside_s"] / kernels["messages_alone_s"] - 1,
    }
    finite = pd.DataFrame(terms).replace([np.inf, -np.inf], np.nan)
    slowed = finite.groupby([kernels["link"], kernels["configuration"]]).median()
    known = {}
    for key, rows in messages[messages["parts"] == 1].groupby(["link", "configuration"]):
        medians = rows.groupby("bytes")["seconds"].median()
        if key in slowed.dropna().index and len(medians) > 1:
            sizes, (ranks, rate) = (
                medians.index.to_numpy(float),
                rows[["ranks", "link_bits_per_s"]].iloc[0],
            )
            slope = wire_s_per_byte("all_reduce", int(ranks), rate) if rate else 0.0
            table = Table(sizes, np.maximum(medians.to_numpy(), slope * sizes))
            known[key] = Resources(key[1], table, *slowed.loc[key].clip(lower=0).tolist())
    return known


def shared(
    workload: Workload, key: tuple[str, str, str], known: Mapping[tuple[str, str], Resources]
) -> Shared | None:
    """Return the iteration by plan, link and configuration, one or "hidden+last"; None if it is unknown."""
    spec, link, configuration = key
    hidden, _, last = configuration.partition("+")
    names = [(link, name.partition("-omp")[0]) for name in (hidden, last) if name]
    if any(name not in known for name in names):
        return None
    sent = make_plan(spec, workload)
    # Messages under way at once: one for each thread of gloo, one by NCCL.
    at_once = np.full(len(sent.ends), int(hidden[1]) if hidden[0] == "t" else 1)
    given = [known[names[0]]] * len(sent.ends)
    if last:
        given[-1], at_once[-1] = known[names[1]], at_once[-1] + 1
    return Shared(workload, sent, tuple(given), at_once)


def training(here: Source) -> pd.DataFrame:
    """Return a row each held-out configuration, a column each of MODELS: median relative error of its rounds.

    A round's no-communication baseline is the mean of its iterations with empty messages just before, and of
    those before the configuration that follows; the last one of a round has only its own.
    """
    known = known_resources(here.table("sharing_messages"), here.table("sharing_kernels"))
    # Iterations with buckets that nobody sends, and without: half of their difference is each way.
    copies = here.table("sharing_copies")
    each_s = (copies["bucketed_s"] - copies["alone_s"]) / copies["bytes"] / 2
    copied = each_s.groupby(copies["network"]).median().clip(lower=0)
    works = {(each.network, each.batch): each.workload() for each in here.profiles().values()}
    periods, errors = here.rounds("sharing_periods"), []
    after_s = periods.groupby([*CELL, "repeat"], sort=False)["empty_s"].shift(-1)
    periods["base_s"] = (periods["empty_s"] + after_s.fillna(periods["empty_s"])) / 2
    for (network, batch, *key), rounds in periods.groupby([*CELL, "configuration"], sort=False):
        if network in NOT_HELD_OUT or (network, batch) not in works:
            continue
        work, copy_s = works[network, batch], float(copied.get(network, 0.0))
        terms = [
            shared(
                work.scaled((base_s - 2 * copy_s * float(work.bytes.sum())) / work.compute_s),
                key,
                known,
            )
            for base_s in rounds["base_s"]
        ]
        if terms[0] is not None:
            copying = (replace(term, copy_s_per_byte=copy_s) for term in terms if term)
            predicted_s = [_by_model(*each) for each in zip(copying, rounds["base_s"], strict=True)]
            ratios = np.array(predicted_s) / rounds["iteration_s"].to_numpy()[:, None]
            errors.append(np.median(ratios, axis=0) - 1)
    return pd.DataFrame(errors, columns=MODELS)


def _by_model(term: Shared, base_s: float) -> list[float]:
    """Return seconds of an iteration by each of MODELS."""
    sizes = term.plan.group_bytes(term.workload).tolist()
    sent_s = sum(float(way.cost(n)) for way, n in zip(term.given, sizes, strict=True))
    free = tuple(replace(way, slowdown=0.0, message_slowdown=0.0) for way in term.given)
    return [replace(term, given=free).iteration_s, term.iteration_s, base_s + sent_s]
