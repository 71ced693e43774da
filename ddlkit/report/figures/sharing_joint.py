"""Fusion and two groups' resources planned together, foretold, and then trained with.

One group of ranks carries the messages that computing hides, another the last one (sharing 5, Future work).
What is chosen is both of their configurations and the buckets. What is measured is an iteration under the
choice and under DDP's own, in turn in the same rounds; and under each half of the choice alone.

Fixed before anything of it was measured (22 November 2026): networks, batches and rates of `FORETOLD`; the
gain is the iteration of DDP's default over that under the joint plan, less 1, in each round; what is said is
the median over rounds with its 95% interval (`core.median`). The gain is foretold where the interval holds
the number that was written down before; the plan gains where the whole interval lies above zero.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from ddlkit.core.doubt import median_interval
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import packed
from ddlkit.core.resources import Shared, jointly_apart
from ddlkit.core.workload import Workload
from ddlkit.report.figures.sharing_measured import default_of, least_first
from ddlkit.report.figures.sharing_predicted import (
    WIDTH,
    Known,
    copies,
    known_resources,
    scaled,
    shared,
    workloads,
)
from ddlkit.report.source import Source, open_sharing
from ddlkit.store.tables import save_table

FORETOLD = (("googlenet_64", 4), ("resnet18_64", 8), ("resnet50_64", 2))
"""Networks and batches, each at every rate of the recording; two of them are held out."""
NAMED = ("ddp", "single", "none", "buffer:2MB", "buffer:4MB", "buffer:8MB", "buffer:16MB")
"""Plans that are tried with every pair of resources, beside those that the programme finds."""
MODELS = ("copied", "term", "none")
"""Of `sharing_predicted.MODELS`, those that know nothing of training; the first one chooses."""
CELLS = ["network", "batch", "link", "plan", "configuration"]


def tried(
    workload: Workload, known: Known, link: str, copy_s_per_byte: float = 0.0
) -> dict[tuple[str, str], Shared]:
    """Iterations by plan and policy: every pair of configurations with NAMED, and with the programme's plans.

    The programme plans for one message under way at a time; what comes out is played with as many as each
    configuration carries, and with copies into buckets and out of them.
    """
    there = [name for at, name in known if at == link]
    names = least_first(there) or there
    choices = [known[link, name] for name in names]
    found = jointly_apart(packed(workload, copy_s_per_byte), choices, WIDTH)
    specs = [*NAMED, *dict.fromkeys(_cuts(one.plan.ends) for one in found)]
    policies = [first if first == last else f"{first}+{last}" for first in names for last in names]
    ways = {}
    for spec in specs:
        for policy in policies:
            one = shared(workload, spec, policy, link, known)
            if one is not None:
                ways[spec, policy] = replace(one, copy_s_per_byte=copy_s_per_byte)
    return ways


def _cuts(ends: Sequence[int]) -> str:
    return "cuts:" + ",".join(map(str, ends))


def planned(
    source: Source,
    known: Known,
    copied: Mapping[str, float],
    compute_s: Mapping[tuple[str, int], float],
) -> pd.DataFrame:
    """Of each of FORETOLD at every rate DDP's default, the joint plan, and each half of it alone.

    compute_s : an iteration without exchange, by network and batch; to which the layers are scaled

    Columns: network, batch, link, plan, configuration, buckets; seconds by each of MODELS.
    """
    layers, rows = workloads(source), []
    default = default_of(pd.DataFrame({"configuration": [name for _, name in known]}))
    for network, batch in FORETOLD:
        work = layers[network, batch]
        work = work.scaled(compute_s[network, batch] / work.compute_s)
        for link in sorted({link for link, _ in known}):
            ways = tried(work, known, link, copied.get(network, 0.0))
            joint = min(ways, key=lambda key: ways[key].iteration_s)
            for key in dict.fromkeys(product(("ddp", joint[0]), (default, joint[1]))):
                told = ways[key]
                labels = {"network": network, "batch": batch, "link": link, "plan": key[0]}
                rows.append(
                    {**labels, "configuration": key[1], "buckets": len(told.given), **_said(told)}
                )
    return pd.DataFrame(rows)


def _said(copied: Shared) -> dict[str, float]:
    term = replace(copied, copy_s_per_byte=0.0)
    ways = {"copied": copied, "term": term, "none": scaled(term, 0.0, 0.0)}
    return {name: ways[name].iteration_s for name in MODELS}


def write(directory: Path) -> None:
    """Write down what `planned` says of the first recording of sharing: a table ``predicted``."""
    source = open_sharing()
    if source is None:
        raise UserError("sharing: nothing recorded to plan from; run ddlkit measure sharing")
    known = known_resources(source.table("sharing_messages"), source.table("sharing_kernels"))
    copied = copies(source.table("sharing_copies"))
    compute_s = compute_of(source.table("sharing_iterations"))
    table = planned(source, known, copied, compute_s)
    case = table[CELLS].astype(str).agg(" ".join, axis=1)
    long = table.assign(case=case).melt("case", list(MODELS), "model", "seconds")
    rows = long.assign(quantity="iteration", cost="", drift="")
    save_table(rows, directory, "predicted-joint", schema="predicted", command=sys.argv)


def compute_of(iterations: pd.DataFrame) -> dict[tuple[str, int], float]:
    """Median seconds of an iteration without exchange, by network and batch, over rounds and links."""
    rounds = iterations[iterations["openmp"] == 1]
    medians = rounds.groupby(["network", "batch"])["compute_s"].median()
    return {(str(name), int(batch)): float(s) for (name, batch), s in medians.items()}


PARTS = {"buckets": (1, 0), "resources": (0, 1), "both": (1, 1)}
"""What of the joint plan is taken: its buckets, its configurations."""


def judged(source: Source) -> pd.DataFrame:
    """Gain over DDP's default by network, rate, and what of the joint plan is taken: foretold and measured.

    Columns: network, batch, link, taken, buckets, plan, configuration; foretold (by the model that chose);
    measured with lower and upper, over rounds; as_foretold and gains, both by the interval.
    """
    iterations = source.rounds("sharing_iterations")
    said = foretold(source)
    rounds = iterations.groupby([*CELLS, "repeat"])["iteration_s"].mean().unstack("repeat")
    buckets = iterations.groupby(CELLS)["buckets"].first()
    rows = []
    for key, own in said.groupby(["network", "batch", "link"], sort=False):
        plans, names = (own[column].unique().tolist() for column in ("plan", "configuration"))
        seconds = own.set_index(["plan", "configuration"])[MODELS[0]]
        base = rounds.loc[(*key, plans[0], names[0])]
        for taken, (of_plans, of_names) in PARTS.items():
            way = plans[min(of_plans, len(plans) - 1)], names[min(of_names, len(names) - 1)]
            ratio = (base / rounds.loc[(*key, *way)] - 1).dropna().to_numpy()
            lower, upper = median_interval(ratio)
            gain = float(seconds[plans[0], names[0]] / seconds[way] - 1)
            found = {"measured": float(np.median(ratio)), "lower": lower, "upper": upper}
            labels = dict(zip(("network", "batch", "link"), key, strict=True)) | {"taken": taken}
            chosen = {
                "buckets": int(buckets[(*key, *way)]),
                "plan": way[0],
                "configuration": way[1],
            }
            verdict = {"as_foretold": lower <= gain <= upper, "gains": _side(lower, upper)}
            rows.append(
                {**labels, **chosen, "foretold": gain, **found, "rounds": len(ratio), **verdict}
            )
    return pd.DataFrame(rows)


def retold(
    joint: pd.DataFrame, source: Source, known: Known, copied: Mapping[str, float]
) -> pd.Series:
    """The gains of `judged` told again by "copied", with ``known`` resources, from the first recording."""
    layers, compute_s = workloads(source), compute_of(source.table("sharing_iterations"))
    default = default_of(pd.DataFrame({"configuration": [name for _, name in known]}))
    gains = []
    for row in joint.itertuples():
        cell = (row.network, row.batch)
        work = layers[cell].scaled(compute_s[cell] / layers[cell].compute_s)
        ways = [("ddp", default), (row.plan, row.configuration)]
        told = [shared(work, *way, row.link, known) for way in ways]
        packed_s = [
            replace(one, copy_s_per_byte=copied.get(row.network, 0.0)).iteration_s
            for one in told
            if one is not None
        ]
        gains.append(packed_s[0] / packed_s[1] - 1 if len(packed_s) == 2 else np.nan)
    return pd.Series(gains, joint.index)


def _side(lower: float, upper: float) -> str:
    return "yes" if lower > 0 else "no" if upper < 0 else "undecided"


def foretold(source: Source) -> pd.DataFrame:
    """What was written down before: CELLS, and seconds of an iteration by each of MODELS."""
    said = source.table("predicted")
    cells = said["case"].str.split(" ", expand=True).set_axis(CELLS, axis=1).astype({"batch": int})
    long = pd.concat([cells, said[["model", "seconds"]]], axis=1)
    return long.pivot_table(
        index=CELLS, columns="model", values="seconds", sort=False
    ).reset_index()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
