"""The sharing paper's eight figures as panels: what it prints or its model says, and what a machine measured.

Every figure is drawn from what is there. A machine that has measured training which shares it with messages
(GPUs or a processor; `report.source.open_sharing`) adds its panels; without one there are the paper's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from ddlkit.core.timeline import Timeline
from ddlkit.report.claims import paper_table
from ddlkit.report.figures import (
    sharing_again,
    sharing_grid,
    sharing_measured,
    sharing_predicted,
)
from ddlkit.report.figures.sharing_sure import Sure, sure
from ddlkit.report.figures.sharing_verdicts import LATER_LEVEL, LATER_LOOKS, LEVEL, verdicts
from ddlkit.report.papers.sharing import BATCHES, DEFAULT, throughput
from ddlkit.report.source import SHARING, Source, machine_of, open_sharing

RESNET = ("ResNet-18", 32)
"""Network and batch of figures 4 and 5."""
OURS = "resnet18_64"
KINDS = ("control", "messages", "kernels", "copies", "iterations", "spans", "cells")
"""Of tables; each is called sharing_<kind>."""


class Panel(NamedTuple):
    """A heat map: what it shows, and row and column of the default."""

    grid: pd.DataFrame
    default: tuple[Any, Any] | None


@dataclass(frozen=True, eq=False)
class Recording:
    """What one machine measured; tables by their kind, empty where there is none."""

    source: Source

    @property
    def machine(self) -> str:
        """Its name."""
        return machine_of(self.source.directories[0])

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Of KINDS, those that were recorded."""
        names = {"controls": "controls"} | {kind: f"sharing_{kind}" for kind in KINDS}
        there = {kind: name for kind, name in names.items() if self.source.has(name)}
        return {kind: self.source.table(name) for kind, name in there.items()}

    def has(self, *kinds: str) -> bool:
        """Whether all of these were recorded."""
        return all(kind in self.tables for kind in kinds)

    @cached_property
    def known(self) -> dict[tuple[str, str], Any]:
        """What each configuration costs, takes and loses, by link and name."""
        return sharing_predicted.known_resources(self.tables["messages"], self.tables["kernels"])

    @cached_property
    def paced(self) -> dict[tuple[str, str], Any]:
        """The same, no message faster than its link's rate."""
        tables = self.tables["messages"], self.tables["kernels"]
        return sharing_predicted.known_resources(*tables, paced=True)

    @cached_property
    def copied(self) -> dict[str, float]:
        """By network, what DDP's buckets take for each byte, each way."""
        return sharing_predicted.copies(self.tables.get("copies"))

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Every measured cell of training with what the models say of it."""
        return self.told(self.tables["iterations"])

    def told(self, iterations: pd.DataFrame) -> pd.DataFrame:
        """The same of any table of iterations on this machine."""
        every = (iterations, self.source, self.known, self.copied, self.paced)
        return sharing_predicted.cells(*every)

    def sure(self, model: str) -> Sure:
        """How sure the errors of "copied" or "paced" are, on held-out networks."""
        cells, known = self.cells, self.paced if model == "paced" else self.known
        layers = sharing_predicted.workloads(self.source)
        held = cells[cells["held_out"]]
        every = (self.tables["iterations"], held, layers, known, self.copied)
        return sure(sharing_predicted.drawn(*every))

    @cached_property
    def again(self) -> sharing_again.Grid | None:
        """The later session that foretells from itself; None where there is none."""
        found = self.beside("again")
        return sharing_again.unsent(found) if found is not None else None

    @cached_property
    def met(self) -> sharing_again.Grid | None:
        """The grid after it, in whose base ranks meet; None where there is none."""
        return self.met_but()

    def met_but(self, slowest: bool = False, paired: bool = True) -> sharing_again.Grid | None:
        """The same with a fault of the one before left in, as `sharing_again.met` says."""
        source, trained = self.beside("again"), self.beside("met")
        if source is None or trained is None:
            return None
        return sharing_again.met(source, trained, slowest, paired)

    @cached_property
    def steady(self) -> sharing_again.Grid | None:
        """The grid after that, of more rounds, foretold from its own session; None where there is none."""
        found = self.beside("steady")
        return sharing_again.steady(found) if found is not None else None

    def two_groups(self) -> pd.DataFrame:
        """Gains over the default where the last message had a group of its own."""
        gains = sharing_measured.throughputs(self.tables["iterations"])
        return gains[gains["configuration"].str.contains("+", regex=False)]

    def beside(self, name: str) -> Source | None:
        """What was recorded beside it later, under that name; None where nothing was."""
        found = self.source.directories[0].with_name(f"{SHARING}-{name}")
        return Source((found,)) if [*found.glob("sharing_*.csv")] else None

    def verdicts(self) -> pd.DataFrame:
        """The paper's conclusions, judged on this machine."""
        return _verdicts(self.source)

    def second_look(self) -> pd.DataFrame | None:
        """The same with all cells that were recorded later, surer; None where none were."""
        more = self.beside("more")
        if more is None:
            return None
        names = {"iterations": "sharing_iterations", "spans": "sharing_spans"}
        rows = {
            kind: pd.concat([self.tables[kind], more.table(name)], ignore_index=True)
            for kind, name in names.items()
        }
        layers = self.source.table("layers")
        return verdicts(rows["iterations"], rows["spans"], layers, LATER_LEVEL)

    def later_looks(self) -> pd.DataFrame | None:
        """The same on each later session's cells alone, surer again, by ``look``; None without one."""
        found = {
            look: _verdicts(session, level)
            for look, (name, level) in LATER_LOOKS.items()
            if (session := self.beside(name)) is not None
        }
        return pd.concat(found, names=["look", None]).reset_index("look") if found else None


def _verdicts(source: Source, level: float = LEVEL) -> pd.DataFrame:
    rows, spans = (source.table(f"sharing_{kind}") for kind in ("iterations", "spans"))
    return verdicts(rows, spans, source.table("layers"), level)


def recorded(data: str = "") -> Recording | None:
    """A machine's recording, by its name or directory; the first there is, or None."""
    found = open_sharing(data)
    return Recording(found) if found else None


def missing(here: Recording | None) -> list[str]:
    """What of the eight figures no machine has measured yet."""
    needs = {
        1: ("control",),
        2: ("messages",),
        3: ("kernels",),
        **dict.fromkeys((4, 6, 7, 8), ("iterations",)),
        5: ("spans",),
    }
    there = {} if here is None else here.tables
    return [
        f"figure {n}" for n, kinds in sorted(needs.items()) if not all(k in there for k in kinds)
    ]


CONTROLS = (
    ("environment", "NCCL_MIN_CTAS, NCCL_MAX_CTAS"),
    ("environment", "NCCL_NTHREADS"),
    ("communicator", "min_ctas, max_ctas"),
    ("call", "NCCLCollConfig"),
    ("thread", "gloo threads"),
    ("thread", "cores"),
    ("thread", "priority"),
)
"""What limits a collective today, and at which level, where no machine said what it offers."""
SEEN = {
    "gloo threads": ("taken_threads",),
    "cores": ("taken_cores",),
    "priority": ("taken_policy", "taken_nice"),
    "min_ctas, max_ctas": ("blocks",),
}
"""Columns of a control table in which a setting shows once it has taken effect."""


def figure1(here: Recording | None) -> pd.DataFrame:
    """What limits a collective today, at which level, whether a machine offers it, and what was read back."""
    table = pd.DataFrame(CONTROLS, columns=["level", "control"]).assign(outcome="not recorded")
    if here is None or not here.has("control"):
        return table
    if here.has("controls"):
        table = here.tables["controls"][["level", "control", "outcome", "reason"]]
    rows = here.tables["control"].query("outcome == 'applied'")
    said = {}
    for control, columns in SEEN.items():
        values = rows[list(columns)].astype(str).agg(" ".join, axis=1)
        said[control] = "; ".join(sorted(set(values) - {"0"}))
    seen = [
        next((said[key] for key in said if key.split()[-1] in name), "")
        for name in table["control"]
    ]
    return table.assign(read_back=seen)


def figure2(here: Recording | None) -> dict[str, Panel]:
    """Time of an all-reduce over the default's: the paper's, and each link's here."""
    printed = sharing_measured.paper_grid(paper_table("sharing", "fig02"), "relative_time")
    panels = {"paper, 25 MB": Panel(printed, (2, 256))}
    if here is not None and here.has("messages"):
        rows = sharing_measured.figure2(here.tables["messages"])
        panels |= {name: _own(own, "ratio") for name, own in rows.groupby("link")}
    return panels


def _own(rows: pd.DataFrame, value: str) -> Panel:
    grid = sharing_measured.as_grid(rows, value).T
    column, _, row = sharing_measured.default_of(rows).partition("-")
    return Panel(grid, (row, column))


def figure3(here: Recording | None) -> tuple[dict[str, Panel], dict[str, Panel]]:
    """Time of kernels beside an all-reduce over their time alone: the paper's five, and each link's here."""
    printed = paper_table("sharing", "fig03")
    paper = {
        str(kernel).replace("_", " "): Panel(sharing_measured.paper_grid(own, "slowdown"), (2, 256))
        for kernel, own in printed.groupby("kernel", sort=False)
    }
    ours = {}
    if here is not None and here.has("kernels"):
        rows = sharing_measured.figure3(here.tables["kernels"])
        for link, own in rows.groupby("link"):
            ours[str(link)] = _by_configuration(own, "kernel", "ratio")
    return paper, ours


def _by_configuration(rows: pd.DataFrame, index: str | list[str], value: str) -> Panel:
    """A row each of ``index``, a column a configuration: those of one group first, the least first."""
    grid = rows.pivot(index=index, columns="configuration", values=value)
    first = [*sharing_measured.least_first(list(grid.columns))]
    grid = grid[
        [*first, *sorted(set(grid.columns) - set(first), key=lambda name: ("+" in name, name))]
    ]
    default = sharing_measured.default_of(rows)
    return Panel(grid.rename_axis(index="", columns=""), (None, default))


def defaults(panels: Mapping[str, Panel]) -> dict[str, float]:
    """The value in each panel's frame, or the median of it."""
    found = {}
    for name, (grid, default) in panels.items():
        if default is not None:
            column = grid[default[1]]
            found[name] = float(column.median() if default[0] is None else column[default[0]])
    return found


def figure4(here: Recording | None) -> dict[str, Panel]:
    """Gain in training throughput of ResNet-18 over the default, in per cent."""
    printed = sharing_measured.paper_grid(paper_table("sharing", "fig04"), "gain_percent")
    panels = {"paper, fig 4": Panel(printed, (2, 256))}
    row = throughput().loc[RESNET]
    again = 100 * (row / row[DEFAULT] - 1)
    blocks = again.index.str.partition("x")
    said = pd.DataFrame(
        {"blocks": [int(one[0]) for one in blocks], "threads": [int(one[2]) for one in blocks]}
    )
    again = said.assign(gain=again.to_numpy())
    panels["paper, fig 8"] = Panel(sharing_measured.paper_grid(again, "gain"), (2, 256))
    if here is not None and here.has("iterations"):
        rows = _middle(sharing_measured.throughputs(here.tables["iterations"]))
        for link, own in rows.groupby("link"):
            panels[str(link)] = _own(own.assign(gain=100 * own["gain"]), "gain")
    return panels


def _middle(gains: pd.DataFrame) -> pd.DataFrame:
    """ResNet-18's rows at the batch that most configurations were measured with, under DDP's own plan.

    Of one computing thread a rank: what more take from each other is not a message's doing.
    """
    own = gains[(gains["network"] == OURS) & (gains["plan"] == "ddp")]
    own = own[~own["configuration"].str.contains("-omp", regex=False)]
    batch = own["batch"].value_counts().idxmax()
    return own[own["batch"] == batch]


def figure5(here: Recording | None) -> dict[str, dict[str, Timeline]]:
    """Timelines of ResNet-18, default, best and starved: of the paper by its model, and as measured here."""
    network, batch = RESNET
    grid = sharing_grid.fitted("both")
    names = {"default": DEFAULT, "best": "1x256", "starved": "1x64"}
    found = {
        "V100S": {
            f"V100S, {role}: {name}": grid.iteration(network, batch, name).timeline()
            for role, name in names.items()
        }
    }
    if here is None or not here.has("iterations", "spans"):
        return found
    rows = _middle(sharing_measured.throughputs(here.tables["iterations"]))
    rows = rows[(rows["link"] == rows["link"].max())]
    one = rows[~rows["configuration"].str.contains("+", regex=False)]
    names = {
        "default": sharing_measured.default_of(one),
        "best": one.loc[one["gain"].idxmax(), "configuration"],
        "starved": sharing_measured.least_first(one["configuration"].tolist())[0],
    }
    cell = rows.iloc[0][sharing_measured.CELL].tolist()
    spans = sharing_measured.timelines(here.tables["spans"], cell, list(names.values()))
    own = {f"here, {role}: {name}": spans[name] for role, name in names.items() if name in spans}
    return found | ({here.machine: own} if own else {})


def figure6(here: Recording | None) -> dict[str, pd.DataFrame]:
    """Parts of an iteration of ResNet-18 by batch, default and best: simulated for V100S, measured here."""
    cases = {}
    for batch in BATCHES:
        for name in (DEFAULT, sharing_grid.best(RESNET[0], batch)):
            cases[f"{batch}, {name}"] = RESNET[0], batch, name
    found = {"V100S, simulated": sharing_grid.breakdown(cases)}
    if here is not None and here.has("iterations"):
        rows = here.tables["iterations"]
        found["here"] = _parts(rows[rows["network"] == OURS], "batch")
    return found


def figure7(here: Recording | None) -> dict[str, pd.DataFrame]:
    """Parts of an iteration of each network, default and best: batch 64 by the model, the middle one here."""
    cases = {}
    for network in dict.fromkeys(throughput().index.get_level_values("network")):
        for name in (DEFAULT, sharing_grid.best(network, 64)):
            cases[f"{network}, {name}"] = network, 64, name
    found = {"V100S, simulated": sharing_grid.breakdown(cases)}
    if here is not None and here.has("iterations"):
        rows = here.tables["iterations"]
        middle = rows.groupby("network")["batch"].agg(
            lambda own: sorted(set(own))[len(set(own)) // 2]
        )
        found["here"] = _parts(rows[rows["batch"] == rows["network"].map(middle)], "network")
    return found


def _parts(iterations: pd.DataFrame, by: str) -> pd.DataFrame:
    """Default and best of one group of each, at the highest rate, under DDP's own plan."""
    rows = iterations[(iterations["plan"] == "ddp") & (iterations["openmp"] == 1)]
    rows = rows[rows["link_bits_per_s"] == rows["link_bits_per_s"].max()]
    best = sharing_measured.best_of(sharing_measured.throughputs(rows))
    parts = sharing_measured.breakdown(rows)
    default = sharing_measured.default_of(rows)
    found = {}
    for one in best.sort_values(by).itertuples():
        for name in (default, str(one.configuration)):
            own = parts[(parts[["network", "batch"]] == [one.network, one.batch]).all(axis=1)]
            own = own[own["configuration"] == name].iloc[0]
            columns = ["computation_only_s", "overlap_s", "communication_only_s"]
            found[f"{getattr(one, by)}, {name}"] = own[columns].astype(float).tolist()
    names = ["computation only", "overlap", "communication only"]
    return pd.DataFrame.from_dict(found, orient="index", columns=names)


def figure8(here: Recording | None) -> dict[str, Panel]:
    """Gain over the default of every network and batch under every configuration, in per cent."""
    grid = throughput()
    gains = 100 * (grid.div(grid[DEFAULT], axis=0) - 1)
    gains.index = [f"{network}, {batch}" for network, batch in gains.index]
    panels = {"paper": Panel(gains, (None, DEFAULT))}
    if here is not None and here.has("iterations"):
        rows = here.tables["iterations"]
        rows = rows[(rows["plan"] == "ddp") & (rows["openmp"] == 1)]
        gain = sharing_measured.throughputs(rows)
        gain = gain.assign(
            case=gain["network"] + ", " + gain["batch"].astype(str), gain=100 * gain["gain"]
        )
        for link, own in gain.groupby("link"):
            if own["network"].nunique() > 1:
                panels[str(link)] = _by_configuration(_of_most(own, "case"), "case", "gain")
    return panels


def _of_most(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Those of configurations that were measured in at least half of the cases."""
    shares = rows.groupby("configuration")[by].nunique() / rows[by].nunique()
    return rows[rows["configuration"].map(shares) >= 0.5]


def numbers(panels: Mapping[str, Panel]) -> pd.DataFrame:
    """What heat maps show, a row a cell: panel, row, column, value."""
    tables = []
    for name, panel in panels.items():
        long = (
            panel.grid.rename_axis(index="row", columns="column").stack().rename("value").dropna()
        )
        tables.append(long.reset_index().assign(panel=name).astype({"row": str, "column": str}))
    return pd.concat(tables)[["panel", "row", "column", "value"]]
