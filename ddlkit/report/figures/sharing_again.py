"""The sharing paper's grid foretold from one session, and measured steadily enough to judge an error of 2%.

Cells, models, statistics and goals were written down in examples/sharing_again.yml before any of them was
recorded. Every cell is foretold from its block's base, an iteration whose buckets nobody sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from ddlkit.core.resources import Shared
from ddlkit.core.workload import Workload
from ddlkit.report.figures import sharing_predicted as predicted
from ddlkit.report.figures.sharing_measured import CELL
from ddlkit.report.figures.sharing_sure import Floats, Rounds, Sure, sure
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
"""Of a base, at which iterations are played for rounds that are drawn anew."""
Key = tuple[str, int, str, str, str]
"""Of a cell: its KEYS."""


@dataclass(frozen=True, eq=False)
class Again:
    """One session's recording of what it foretells from, and of training."""

    source: Source

    @cached_property
    def iterations(self) -> pd.DataFrame:
        """Table ``sharing_iterations``."""
        return self.source.table("sharing_iterations")

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """(repeat, KEYS) what was measured: a row a round, a column a cell, in seconds."""
        return _rounds(self.iterations, "iteration_s")

    @cached_property
    def unsent(self) -> pd.DataFrame:
        """Likewise before each cell, with buckets that nobody sends."""
        return _rounds(self.source.table("sharing_unsent"), "bucketed_s")

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
        messages, kernels = (
            self.source.table(f"sharing_{name}") for name in ("messages", "kernels")
        )
        network = kernels["kernel"].str.partition(":")
        network = network[0].where(network[1] == ":", "")
        return {
            str(name): predicted.known_resources(messages, own, paced=True)
            for name, own in kernels.groupby(network)
        }

    def base_s(self, key: Key) -> Floats:
        """(rounds, configurations) of the cell's network, batch, plan and link."""
        network, batch, plan, link, _ = key
        return self.unsent[network, batch, plan, link].dropna(how="all").to_numpy()

    def foretold(self, key: Key, base_s: float, model: str = "paced") -> Shared | None:
        """A cell's iteration from its base, by "paced", "networks" or "none"; None where that cannot say."""
        network, batch, plan, link, configuration = key
        by, work = network if model == "networks" else "", self.layers[network, batch]
        each_s = self.copied.get(network, 0.0)
        copies_s = 2 * each_s * float(work.bytes.sum())
        work = work.scaled((base_s - copies_s) / work.compute_s)
        told = predicted.shared(work, plan, configuration, link, self.known.get(by, {}))
        if told is None:
            return None
        told = replace(told, copy_s_per_byte=each_s)
        return predicted.scaled(told, 0.0, 0.0) if model == "none" else told

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Every cell with what MODELS say of it, in seconds: KEYS, measured_s, base_s, held_out, MODELS."""
        rows = [self._said(key) for key in self.rounds.columns]
        table = pd.DataFrame(rows).dropna(subset="paced")
        return table.assign(held_out=~table["network"].isin(predicted.FITTED_ON))

    def _said(self, key: Key) -> dict[str, object]:
        base_s = float(np.median(self.base_s(key)))
        told = {name: self.foretold(key, base_s, name) for name in ("paced", "networks", "none")}
        said = {name: one.iteration_s if one else np.nan for name, one in told.items()}
        row = {**dict(zip(KEYS, key, strict=True)), "base_s": base_s, **said}
        row["measured_s"] = float(self.rounds[key].median())
        if (one := told["none"]) is not None:
            sizes = one.plan.group_bytes(one.workload).tolist()
            costs = zip(one.given, sizes, strict=True)
            sent_s = sum(float(way.cost(size)) for way, size in costs)
            row |= {"no_overlap": base_s + sent_s, "perfect_overlap": max(base_s, sent_s)}
        return row

    def sure(self, model: str = "paced", held_out: bool = True) -> Sure:
        """How sure the errors of "paced", "networks" or "none" are, on held-out networks or on all."""
        cells = self.cells[self.cells["held_out"] | (not held_out)].dropna(subset=model)
        blocks = [list(self._drawn(own, model)) for _, own in cells.groupby(BLOCK, sort=False)]
        return sure(blocks)

    def _drawn(self, cells: pd.DataFrame, model: str) -> Iterator[Rounds]:
        for key in cells[KEYS].itertuples(index=False, name=None):
            base_s = self.base_s(key)
            at_s = SCALES * float(np.median(base_s))
            told = (self.foretold(key, one, model) for one in at_s.tolist())
            said_s = np.array([one.iteration_s for one in told if one])
            yield Rounds(self.rounds[key].dropna().to_numpy(), base_s, at_s, said_s)

    def third_look(self) -> pd.DataFrame:
        """The paper's conclusions on these cells alone, as sure as a third look asks."""
        layers = self.source.table("layers")
        return verdicts(self.iterations, self.source.table("sharing_spans"), layers, THIRD_LEVEL)


def _rounds(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """(repeat, KEYS): the mean of a round's iterations."""
    means = table.groupby(["repeat", *KEYS], sort=False)[column].mean()
    return means.unstack(KEYS).sort_index(axis=1)


def errors(cells: pd.DataFrame) -> pd.DataFrame:
    """One row a model, over the cells that it speaks of: signed mean, median and largest error."""
    rows = []
    for name, says in MODELS.items():
        off = (cells[name] / cells["measured_s"] - 1).dropna()
        rows.append((name, says, len(off), off.mean(), off.abs().median(), off.abs().max()))
    return pd.DataFrame(rows, columns=["model", "what", "cells", "mean", "median", "largest"])
