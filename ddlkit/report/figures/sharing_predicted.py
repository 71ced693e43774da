"""Real training foretold from messages alone, kernels beside messages, and layers alone.

Each configuration has a cost of messages (figure 2's table), and what kernels and messages take from each
other while both run (figure 3's). A network has its layers, timed without any message, and scaled to what an
iteration without exchange took in the same rounds. Nothing of the iterations with messages is used: but for
two numbers of the model "fitted" and for "mean", which are learned on the networks of FITTED_ON and judged
on the others. Both lists were written down before any iteration was recorded (22 November 2026). The model
"copied" was added when all iterations were known and before what it needs was measured: iterations of DDP
whose buckets nobody sends.

"paced" was the third thing tried once joint plans were found longer than foretold (`sharing_buckets`; neither
a bucket by itself nor small messages' slowdowns explain them), and is judged as examples/sharing_buckets.yml
asks: a message measured alone finds what a rested link has saved, which one behind another does not find. So
none is taken to be faster than the link's rate. Nothing of it is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd

from ddlkit.core.cost import Table
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration, no_overlap, perfect_overlap
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.resources import Resources, Shared, jointly, last_apart, of_each, uniform
from ddlkit.core.workload import Workload
from ddlkit.model.predictor import make_plan
from ddlkit.report.figures.sharing_measured import CELL, beside, default_of, least_first
from ddlkit.report.figures.sharing_sure import Rounds
from ddlkit.report.source import Source

FITTED_ON = ("resnet18_64", "vgg16_cifar")
"""Networks on which "fitted" and "mean" are learned; all others are held out."""
MODELS = {
    "term": "slowdowns as measured with kernels",
    "copied": "the same, and what DDP's buckets take when nobody sends them",
    "paced": "as copied, and no message faster than the link's rate",
    "none": "no slowdown",
    "fitted": "slowdowns times two numbers, learned on two networks",
    "mean": "iteration over computing, the mean of two networks",
    "no_overlap": "computing, then communication",
    "perfect_overlap": "the longer of the two",
}
WIDTH = 24
"""Ways that the joint planner keeps of each prefix: twice or half as many give the same plans here."""
SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""By which "fitted" may multiply each slowdown."""
_SPEEDS = np.linspace(0.4, 2.5, 8)
"""Of computing, at which iterations are played for rounds that are drawn anew."""
Known = Mapping[tuple[str, str], Resources]


def known_resources(
    messages: pd.DataFrame, kernels: pd.DataFrame, paced: bool = False
) -> dict[tuple[str, str], Resources]:
    """What each configuration costs, takes and loses, by link and name: medians over rounds and kernels.

    paced : whether no message is faster than the link's rate; a link without one paces nothing

    Configurations whose messages or kernels were not measured are left out.
    """
    terms = beside(kernels).replace([np.inf, -np.inf], np.nan)
    columns = ["slowdown", "message_slowdown"]
    slowed = terms.groupby(["link", "configuration"])[columns].median().clip(lower=0).dropna()
    whole = messages[messages["parts"] == 1]
    found = {}
    for key, own in whole.groupby(["link", "configuration"]):
        medians = own.groupby("bytes")["seconds"].median()
        if key in slowed.index and len(medians) > 1:
            sizes, seconds = medians.index.to_numpy(float), medians.to_numpy()
            cost = Table(sizes, np.maximum(seconds, _least_s(own) * sizes) if paced else seconds)
            of_computing, of_messages = slowed.loc[key].tolist()
            found[key] = Resources(key[1], cost, of_computing, of_messages)
    return found


def _least_s(messages: pd.DataFrame) -> float:
    """Of a byte of an all-reduce, at the rate of the one link of these messages; 0 without a rate."""
    ranks, bits_per_s = messages[["ranks", "link_bits_per_s"]].iloc[0]
    return wire_s_per_byte("all_reduce", int(ranks), bits_per_s) if bits_per_s else 0.0


def workloads(source: Source) -> dict[tuple[str, int], Workload]:
    """Layers alone, by network and batch, of as many ranks at once as trained."""
    found = source.profiles().values()
    return {(one.network, one.batch): one.workload() for one in found}


def copies(table: pd.DataFrame | None) -> dict[str, float]:
    """By network, what DDP takes for each byte of a gradient on its way into a bucket, and out again, in s.

    table : iterations with buckets that nobody sends, and without buckets; None where there is none. Half of
    what they differ by is each way; medians over rounds and batches.
    """
    if table is None:
        return {}
    each = (table["bucketed_s"] - table["alone_s"]) / table["bytes"] / 2
    found = each.groupby(table["network"]).median().clip(lower=0)
    return {str(network): float(seconds) for network, seconds in found.items()}


def lanes(configuration: str) -> int:
    """Messages that a configuration has under way at once: one for each thread of gloo, one by NCCL."""
    return int(configuration[1 : configuration.index("-")]) if configuration[0] == "t" else 1


def base(configuration: str) -> str:
    """The configuration of messages in one that names how many threads compute, too."""
    return configuration.partition("-omp")[0]


def shared(
    workload: Workload, plan: str, configuration: str, link: str, known: Known
) -> Shared | None:
    """The iteration under a configuration, or a policy of two ("hidden+last"); None where one is unknown."""
    hidden, _, last = configuration.partition("+")
    names = [(link, base(one)) for one in (hidden, last) if one]
    if any(name not in known for name in names):
        return None
    sent = make_plan(plan, workload)
    count, given = len(sent.ends), known[names[0]]
    at_once = np.full(count, lanes(hidden))
    each = [given] * count
    if last:
        each[-1], at_once[-1] = known[names[1]], at_once[-1] + 1
    return Shared(workload, sent, tuple(each), at_once)


def scaled(one: Shared, of_computing: float, of_messages: float) -> Shared:
    """The same iteration whose slowdowns are multiplied."""
    given = tuple(
        replace(
            way,
            slowdown=of_computing * way.slowdown,
            message_slowdown=of_messages * way.message_slowdown,
        )
        for way in one.given
    )
    return replace(one, given=given)


def cells(
    iterations: pd.DataFrame,
    source: Source,
    known: Known,
    copied: Mapping[str, float],
    paced: Known | None = None,
) -> pd.DataFrame:
    """Every measured cell with what each of MODELS says of it, in seconds; those that can be said.

    copied : of `copies`; of networks that are not there nothing; paced : as ``known``, which it is without

    Columns: CELL, configuration, measured_s, measured_exposed_s, compute_s, held_out, one a model, and what
    the models with and without the term say of exposed communication.
    """
    layers = workloads(source)
    keys = [*CELL, "configuration"]
    columns = ["iteration_s", "exposed_communication_s", "compute_s"]
    medians = iterations.groupby([*keys, "repeat"])[columns].mean()
    medians = medians.groupby(keys, sort=False).median().reset_index()
    rows, played = [], []
    for one in medians.itertuples(index=False):
        alone = layers.get((one.network, one.batch))
        if alone is None:
            continue
        work = alone.scaled(one.compute_s / alone.compute_s)
        told = shared(work, one.plan, one.configuration, one.link, known)
        if told is None:
            continue
        played.append(told)
        rows.append({**one._asdict(), **_trivial(told)})
    if not rows:
        raise UserError("sharing: measure messages, kernels and layers of what was trained, too")
    measured = {"iteration_s": "measured_s", "exposed_communication_s": "measured_exposed_s"}
    table = pd.DataFrame(rows).rename(columns=measured)
    table["held_out"] = ~table["network"].isin(FITTED_ON)
    table["term"] = [one.iteration_s for one in played]
    bare = [scaled(one, 0.0, 0.0) for one in played]
    table["none"] = [one.iteration_s for one in bare]
    into = table["network"].map(lambda name: copied.get(name, 0.0))
    packing = [replace(one, copy_s_per_byte=each) for one, each in zip(played, into, strict=True)]
    table["copied"] = [one.iteration_s for one in packing]
    table["paced"] = _given(packing, table["link"], known if paced is None else paced)
    table["term_exposed_s"] = [one.exposed_s for one in played]
    table["none_exposed_s"] = [one.exposed_s for one in bare]
    table["mean"] = _mean(table)
    factors = fitted_scales(table, played)
    table["fitted"] = [scaled(one, *factors).iteration_s for one in played]
    return table


def _given(played: list[Shared], links: pd.Series, known: Known) -> list[float]:
    """Iterations, in seconds, whose messages have what is known of the same configurations instead."""
    given = [
        replace(one, given=tuple(known[link, way.name] for way in one.given))
        for one, link in zip(played, links, strict=True)
    ]
    return [one.iteration_s for one in given]


def drawn(
    iterations: pd.DataFrame,
    cells: pd.DataFrame,
    layers: Mapping[tuple[str, int], Workload],
    known: Known,
    copied: Mapping[str, float],
) -> list[list[Rounds]]:
    """By block, the rounds of these ``cells`` with what "copied" says of them, or "paced" if ``known`` is."""
    keys, columns = [*CELL, "configuration"], ["iteration_s", "compute_s"]
    rounds = iterations.groupby([*keys, "repeat"])[columns].mean()
    blocks: dict[tuple[str, int, str], list[Rounds]] = {}
    for key in cells[keys].itertuples(index=False, name=None):
        network, batch, plan, link, configuration = key
        told = shared(layers[network, batch], plan, configuration, link, known)
        if told is not None:
            told = replace(told, copy_s_per_byte=copied.get(network, 0.0))
            at_speeds = [replace(told, workload=told.workload.scaled(one)) for one in _SPEEDS]
            measured_s, compute_s = rounds.loc[key].to_numpy(float).T
            at_s = _SPEEDS * told.workload.compute_s
            said_s = np.array([one.iteration_s for one in at_speeds])
            one = Rounds(measured_s, compute_s[:, None], at_s, said_s)
            blocks.setdefault((network, batch, link), []).append(one)
    return list(blocks.values())


def two_groups(table: pd.DataFrame) -> pd.DataFrame:
    """Cells in which the last message had a group of its own: gain over the default, measured and foretold.

    Columns: CELL, configuration, measured, term, none; of `cells` whose default was measured too.
    """
    default = table[table["configuration"] == default_of(table)].set_index(CELL)
    names = {"measured": "measured_s", "term": "term", "none": "none"}
    rows = table[table["configuration"].str.contains("+", regex=False)]
    both = rows.join(default[list(names.values())].add_suffix("_default"), on=CELL)
    gains = {name: both[f"{column}_default"] / both[column] - 1 for name, column in names.items()}
    return both[[*CELL, "configuration"]].assign(**gains).dropna()


def _trivial(one: Shared) -> dict[str, float]:
    bare = Iteration(one.workload, one.plan, one.given[0].cost)
    return {
        "no_overlap": no_overlap(bare).iteration_s,
        "perfect_overlap": perfect_overlap(bare).iteration_s,
    }


def _mean(table: pd.DataFrame) -> pd.Series:
    """Computing times the mean ratio of the networks of FITTED_ON, by plan, link and configuration."""
    keys = ["plan", "link", "configuration"]
    learned = table[~table["held_out"]]
    ratios = (
        (learned["measured_s"] / learned["compute_s"])
        .groupby([learned[key] for key in keys])
        .mean()
    )
    return table["compute_s"] * table.join(ratios.rename("ratio"), on=keys)["ratio"]


def fitted_scales(table: pd.DataFrame, played: list[Shared]) -> tuple[float, float]:
    """By which both slowdowns are multiplied: of SCALES those with the least squares on FITTED_ON."""
    learned = [
        (one, seconds)
        for one, seconds, out in zip(played, table["measured_s"], table["held_out"], strict=True)
        if not out
    ]
    if not learned:
        return 1.0, 1.0

    def squares(factors: tuple[float, float]) -> float:
        logs = [np.log(scaled(one, *factors).iteration_s / seconds) for one, seconds in learned]
        return float(np.square(logs).sum())

    return min(product(SCALES, SCALES), key=squares)


def errors(table: pd.DataFrame) -> pd.DataFrame:
    """One row a model of `cells`, over those that all models have: signed mean and median absolute error."""
    whole = table.dropna(subset=list(MODELS))
    found = []
    for name, says in MODELS.items():
        off = whole[name] / whole["measured_s"] - 1
        found.append((name, says, len(whole), off.mean(), off.abs().median(), off.abs().max()))
    return pd.DataFrame(found, columns=["model", "what", "cells", "mean", "median", "largest"])


def _length(one: Shared) -> float:
    return one.iteration_s


def plans(layers: Mapping[tuple[str, int], Workload], known: Known, link: str) -> pd.DataFrame:
    """What planning resources and buckets could gain over the default, by network and batch; simulated.

    Columns: network, batch, default_s, and as shares of it saved: the best one for all messages; another for
    the last; of each message its own; and these jointly with fusion, with its number of messages. One
    message under way at a time.
    """
    there = [name for at, name in known if at == link]
    choices = [known[link, name] for name in least_first(there) or there]
    default = known[link, default_of(pd.DataFrame({"configuration": there}))]
    rows = []
    for (network, batch), work in layers.items():
        sent = make_plan("ddp", work)
        now_s = Shared(work, sent, (default,) * len(sent.ends)).iteration_s
        joint = min(jointly(work, choices, WIDTH), of_each(work, sent, choices), key=_length)
        ways = {
            "one for all": uniform(work, sent, choices),
            "another for the last": last_apart(work, sent, choices),
            "each its own": of_each(work, sent, choices),
            "with buckets": joint,
        }
        saved = {name: 1 - way.iteration_s / now_s for name, way in ways.items()}
        more = {"buckets": len(joint.given), "last": joint.names[-1]}
        rows.append({"network": network, "batch": batch, "default_s": now_s, **saved, **more})
    return pd.DataFrame(rows)
