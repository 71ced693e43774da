"""The sharing paper's grid foretold from one session, and measured steadily enough to judge an error of 2%.

Twice: cells, models, statistics and goals were written down in examples/sharing_again.yml before that grid
was recorded, and those of the next, which mends faults that it had shown, in examples/sharing_met.yml. Each
cell is foretold from a base: an iteration of its network without messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from ddlkit.core.workload import Workload
from ddlkit.report.figures import sharing_predicted as predicted
from ddlkit.report.figures.sharing_measured import CELL
from ddlkit.report.figures.sharing_sure import Rounds, Sure, sure
from ddlkit.report.figures.sharing_verdicts import THIRD_LEVEL, verdicts
from ddlkit.report.source import Source

BLOCK = ["network", "batch", "link"]
KEYS = [*CELL, "configuration"]
MODELS = {
    "paced": "slowdowns as measured with kernels",
    "networks": "slowdowns as measured with the network itself",
    "none": "no slowdown",
    "no_overlap": "the base, then communication",
    "perfect_overlap": "the longer of the two",
}
SCALES = np.linspace(0.5, 2.0, 7)
"""Of a base that is the median of many, at which iterations are played; between them they are straight."""
Key = tuple[str, int, str, str, str]
"""Of a cell: its KEYS."""


@dataclass(frozen=True, eq=False)
class Teller:
    """What one session knows of messages, kernels, copies and layers, and foretells from it."""

    source: Source

    @cached_property
    def layers(self) -> dict[tuple[str, int], Workload]:
        """Layers alone, by network and batch."""
        return predicted.workloads(self.source)

    @cached_property
    def copied(self) -> dict[str, float]:
        """By network, what DDP's buckets take for each byte, each way."""
        return predicted.copies(self.source.table("sharing_copies"))

    @cached_property
    def known(self) -> dict[str, predicted.Known]:
        """What each configuration costs, takes and loses: by kernels (""), and by network as the kernel."""
        messages = self.source.table("sharing_messages")
        kernels = self.source.table("sharing_kernels")
        parts = kernels["kernel"].str.partition(":")
        network = parts[0].where(parts[1] == ":", "")
        return {
            str(name): predicted.known_resources(messages, own, paced=True)
            for name, own in kernels.groupby(network)
        }

    def said_s(self, key: Key, base_s: float, model: str) -> float:
        """A cell's iteration from its base, by one of MODELS; NaN where that knows nothing of it."""
        network, batch, plan, link, configuration = key
        by, work = network if model == "networks" else "", self.layers[network, batch]
        each_s, n_bytes = self.copied.get(network, 0.0), float(work.bytes.sum())
        work = work.scaled((base_s - 2 * each_s * n_bytes) / work.compute_s)
        told = predicted.shared(work, plan, configuration, link, self.known.get(by, {}))
        if told is None:
            return np.nan
        if model.endswith("overlap"):
            sizes = told.plan.group_bytes(work).tolist()
            sent_s = sum(float(way.cost(n)) for way, n in zip(told.given, sizes, strict=True))
            return base_s + sent_s if model == "no_overlap" else max(base_s, sent_s)
        told = replace(told, copy_s_per_byte=each_s)
        return (predicted.scaled(told, 0.0, 0.0) if model == "none" else told).iteration_s


@dataclass(frozen=True, eq=False)
class Grid:
    """Training under configurations, cell by cell and round by round.

    whole : (repeat, KEYS) iterations; base : likewise what they are foretold from, of the same columns
    paired : whether a round is foretold from its own base; else each cell from all of its plan and block
    """

    teller: Teller
    whole: pd.DataFrame
    base: pd.DataFrame
    paired: bool

    @cached_property
    def cells(self) -> pd.DataFrame:
        """KEYS, medians measured_s and base_s, held_out, and MODELS: foretold over measured, less 1."""
        rows = []
        for key in self.whole.columns:
            drawn = {model: self.rounds(key, model) for model in MODELS}
            some = drawn["paced"]
            row = {
                **dict(zip(KEYS, key, strict=True)),
                "held_out": key[0] not in predicted.FITTED_ON,
            }
            row |= {"measured_s": np.median(some.measured_s), "base_s": np.median(some.base_s)}
            rows.append(row | {model: one.error() for model, one in drawn.items()})
        return pd.DataFrame(rows).dropna(subset="paced")

    def rounds(self, key: Key, model: str) -> Rounds:
        """A cell's rounds, and what a model says of them."""
        base = self.base[[key]] if self.paired else self.base[key[:-1]]
        base_s = base.dropna(how="all").to_numpy()
        at_s = np.unique(base_s) if self.paired else SCALES * float(np.median(base_s))
        said_s = np.array([self.teller.said_s(key, one, model) for one in at_s.tolist()])
        return Rounds(self.whole[key].dropna().to_numpy(), base_s, at_s, said_s, self.paired)

    def sure(self, model: str = "paced", held_out: bool = True) -> Sure:
        """How sure the errors of a model are, on held-out networks or on all."""
        cells = self.cells[self.cells["held_out"] | (not held_out)].dropna(subset=model)
        blocks = [own[KEYS] for _, own in cells.groupby(BLOCK, sort=False)]
        keys = [block.itertuples(index=False, name=None) for block in blocks]
        return sure([[self.rounds(key, model) for key in block] for block in keys])


def unsent(source: Source) -> Grid:
    """Of the slowest rank, from iterations whose buckets nobody sends; medians of both, each by itself."""
    whole = _rounds(source.table("sharing_iterations"), "iteration_s")
    base = _rounds(source.table("sharing_unsent"), "bucketed_s")
    return Grid(Teller(source), whole, base, paired=False)


def met(source: Source, trained: Source, slowest: bool = False, paired: bool = True) -> Grid:
    """Of all ranks, from the iterations just before in which they meet for one number; round by round.

    slowest : of the slowest rank instead; paired : as of a `Grid`. Both as of `unsent`, one fault each
    """
    periods = trained.table("sharing_periods")
    whole = trained.table("sharing_iterations") if slowest else periods
    base = _rounds(periods, "empty_s")
    return Grid(Teller(source), _rounds(whole, "iteration_s"), base, paired)


def third_look(source: Source) -> pd.DataFrame:
    """The paper's conclusions on the cells of `unsent` alone, as sure as a third look asks."""
    rows, spans = (source.table(f"sharing_{kind}") for kind in ("iterations", "spans"))
    return verdicts(rows, spans, source.table("layers"), THIRD_LEVEL)


def _rounds(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """(repeat, KEYS): the mean of a round's iterations."""
    means = table.groupby(["repeat", *KEYS], sort=False)[column].mean()
    return means.unstack(KEYS).sort_index(axis=1)


def errors(cells: pd.DataFrame) -> pd.DataFrame:
    """One row a model, over the cells that it speaks of: signed mean, median and largest error."""
    rows = []
    for name, says in MODELS.items():
        off = cells[name].dropna()
        rows.append((name, says, len(off), off.mean(), off.abs().median(), off.abs().max()))
    return pd.DataFrame(rows, columns=["model", "what", "cells", "mean", "median", "largest"])
