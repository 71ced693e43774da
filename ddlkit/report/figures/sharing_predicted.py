"""Real training predicted from messages alone, kernels beside messages, and layers alone.

Each configuration has a cost of messages (figure 2's table), and what kernels and messages take from each
other while both run (figure 3's). A network has its layers, timed without any message, and scaled to what an
iteration without messages took in the same rounds. Nothing of the iterations with messages is used.

Two recordings are judged, the first and the final grid (examples/sharing_steady.yml), on networks that were
held out before anything was recorded (22 November 2026). In the final grid DDP's copies into buckets count,
no message is faster than its link's rate (one timed alone finds what a rested link has saved), and each round
is predicted from iterations just before and after whose messages are empty. What lay between is in
docs/studies.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.cost import Table
from ddlkit.core.iteration import Resources, Shared
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.workload import Workload
from ddlkit.model.predictor import forecast_case, make_plan
from ddlkit.report import accuracy
from ddlkit.report.figures.sharing_measured import CELL, Recording
from ddlkit.report.source import Source

NOT_HELD_OUT = ("resnet18_64", "vgg16_cifar")
MODELS = ("none", "term", "no_overlap")
"""No slowdown; slowdowns as measured with kernels; messages begin when compute is done."""
KEYS = [*CELL, "configuration"]
Known = Mapping[tuple[str, str], Resources]
"""What each configuration costs, takes and loses, by link and name."""


def known_resources(
    messages: pd.DataFrame, kernels: pd.DataFrame, line_rate: bool = False
) -> Known:
    """Return resources of every configuration of which both were measured: medians over rounds and kernels.

    slowdown : of what is computed while messages are under way, all that the kernel lost being lost then
    message_slowdown : likewise of all messages; both as shares, 0.1 for a tenth longer
    line_rate : whether no message is faster than its link; one without a rate limits nothing
    """
    took_s, alone_s = kernels["kernel_beside_s"], kernels["kernel_alone_s"]
    overlap_s = kernels["overlap_share"] * took_s
    kept_s = (overlap_s - (took_s - alone_s)).clip(lower=0)
    terms = pd.DataFrame(
        {
            "slowdown": overlap_s / kept_s.where(overlap_s > 0) - 1,
            "message_slowdown": kernels["messages_beside_s"] / kernels["messages_alone_s"] - 1,
        }
    ).replace([np.inf, -np.inf], np.nan)
    by = [kernels["link"], kernels["configuration"]]
    slowed = terms.groupby(by).median().clip(lower=0).dropna()
    found = {}
    whole = messages[messages["parts"] == 1]
    for key, rows in whole.groupby(["link", "configuration"]):
        medians = rows.groupby("bytes")["seconds"].median()
        if key in slowed.index and len(medians) > 1:
            sizes, seconds = medians.index.to_numpy(float), medians.to_numpy()
            ranks, bits_per_s = rows[["ranks", "link_bits_per_s"]].iloc[0]
            if line_rate and bits_per_s:
                least_s = wire_s_per_byte("all_reduce", int(ranks), bits_per_s) * sizes
                seconds = np.maximum(seconds, least_s)
            found[key] = Resources(key[1], Table(sizes, seconds), *slowed.loc[key].tolist())
    return found


def shared(
    workload: Workload, plan: str, configuration: str, link: str, known: Known
) -> Shared | None:
    """Return the iteration under a policy, of one configuration or "hidden+last"; None if one is unknown."""
    hidden, _, last = configuration.partition("+")
    names = [(link, name.partition("-omp")[0]) for name in (hidden, last) if name]
    if any(name not in known for name in names):
        return None
    sent = make_plan(plan, workload)
    count = len(sent.ends)
    # Messages under way at once: one for each thread of gloo, one by NCCL.
    lanes = int(hidden[1 : hidden.index("-")]) if hidden[0] == "t" else 1
    given, at_once = [known[names[0]]] * count, np.full(count, lanes)
    if last:
        given[-1], at_once[-1] = known[names[1]], at_once[-1] + 1
    return Shared(workload, sent, tuple(given), at_once)


class Predictor:
    """What one session knows of messages, kernels, copies and layers.

    corrected : whether copies into buckets count, and no message is faster than its link's rate
    known : resources by link and configuration; copied : s a byte, by network; layers : by network and batch
    """

    def __init__(self, source: Source, corrected: bool) -> None:
        messages, kernels = source.table("sharing_messages"), source.table("sharing_kernels")
        self.known = known_resources(messages, kernels, line_rate=corrected)
        profiles = source.profiles().values()
        self.layers = {(each.network, each.batch): each.workload() for each in profiles}
        self.copied = pd.Series(dtype=float)
        if corrected:
            # Iterations with buckets that nobody sends, and without: half of their difference is each way.
            copied = source.table("sharing_copies")
            each_s = (copied["bucketed_s"] - copied["alone_s"]) / copied["bytes"] / 2
            self.copied = each_s.groupby(copied["network"]).median().clip(lower=0)

    def seconds(self, key: tuple[str, int, str, str, str], base_s: float) -> list[float]:
        """Return iterations by each of MODELS from the no-communication baseline; [] where one is unknown."""
        network, batch, plan, link, configuration = key
        if network in NOT_HELD_OUT or (network, batch) not in self.layers:
            return []
        each_s, work = float(self.copied.get(network, 0.0)), self.layers[network, batch]
        work = work.scaled((base_s - 2 * each_s * float(work.bytes.sum())) / work.compute_s)
        term = shared(work, plan, configuration, link, self.known)
        if term is None:
            return []
        sizes = term.plan.group_bytes(work).tolist()
        sent_s = sum(float(way.cost(n)) for way, n in zip(term.given, sizes, strict=True))
        free = tuple(replace(way, slowdown=0.0, message_slowdown=0.0) for way in term.given)
        term = replace(term, copy_s_per_byte=each_s)
        return [replace(term, given=free).iteration_s, term.iteration_s, base_s + sent_s]


def first_errors(source: Source) -> pd.DataFrame:
    """Return of the first recording, a row each held-out configuration, each of MODELS: relative error.

    The baseline is an iteration without exchange, median over rounds.
    """
    predictor = Predictor(source, corrected=False)
    rounds = source.rounds("sharing_iterations").groupby([*KEYS, "repeat"], sort=False)
    medians = rounds[["iteration_s", "compute_s"]].mean().groupby(KEYS, sort=False).median()
    every = [
        (predictor.seconds(key, base_s), measured_s)
        for key, measured_s, base_s in medians.itertuples(name=None)
    ]
    rows = [np.array(says) / measured_s - 1 for says, measured_s in every if says]
    return pd.DataFrame(rows, columns=[*MODELS])


def final_errors(source: Source) -> pd.DataFrame:
    """Return of the final grid, a row each held-out configuration, each of MODELS: median error of rounds.

    A round's baseline is the mean of its iterations with empty messages just before, and of those before the
    configuration that follows; the last one of a round has only its own.
    """
    predictor, periods = Predictor(source, corrected=True), source.rounds("sharing_periods")
    after = periods.groupby([*CELL, "repeat"], sort=False)["empty_s"].shift(-1)
    base_s = (periods["empty_s"] + after.fillna(periods["empty_s"])) / 2
    rows = []
    for key, rounds in periods.assign(base_s=base_s).groupby(KEYS, sort=False):
        says = [predictor.seconds(key, base) for base in rounds["base_s"]]
        if says[0]:
            ratios = np.array(says) / rounds["iteration_s"].to_numpy()[:, None]
            rows.append(np.median(ratios, axis=0) - 1)
    return pd.DataFrame(rows, columns=[*MODELS])


def training(here: Recording | None) -> pd.DataFrame:
    """Return real training of held-out networks, predicted: a row a recording (first, final) and model.

    Columns: configurations; mean, median and largest error. Empty where no training was recorded with all
    that a prediction needs.
    """
    tables = {}
    if here is not None and here.has("messages", "kernels", "iterations"):
        tables["first"] = first_errors(here.source)
        if (final := here.beside("steady")) is not None:
            tables["final"] = final_errors(final)
    rows = [
        (name, model.replace("_", " "), len(off), off.mean(), off.abs().median(), off.abs().max())
        for name, table in tables.items()
        for model, off in table.items()
    ]
    columns = ["recording", "model", "cases", "mean error", "median error", "largest error"]
    return pd.DataFrame(rows, columns=columns).set_index(["recording", "model"])


# -- training that was recorded before sharing was looked at ------------------------------------


def recorded_training(machine: str = "cpu-2x-amd-epyc") -> pd.DataFrame:
    """Return ResNet-18's measured_s and the validated model's none, without slowdowns, in s: a row a plan.

    On two ranks over 500 Mbit/s; compute is scaled to what the same run took without communication.
    """
    source, rows = Source((store.RECORDED / machine,)), []
    calibration = accuracy.calibrated(source.table("collectives"), draws=0)
    runs = source.table("runs").query("kind == 'training'")
    for case in accuracy.measured(runs).to_dict("records"):
        named = Case(**{name: case[name] for name in CASE_COLUMNS})
        copied = case["copy_s_per_byte"]
        said = forecast_case(
            named, source.workloads(), calibration, copy_s_per_byte=copied
        ).iteration
        work = said.workload.scaled(case["measured_compute_s"] / said.workload.compute_s)
        told_s = replace(said, workload=work).prediction.iteration_s
        rows.append((case["measured_iteration_s"], told_s))
    return pd.DataFrame(rows, columns=["measured_s", "none"])
