"""The sharing paper's eight figures as panels: what it prints or its model says, and what a machine measured.

Every figure is drawn from what is there. A machine that has measured training which shares it with messages
(GPUs or a processor; `report.source.open_sharing`) adds its panels; without one there are the paper's alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
from ddlkit.report.figures.sharing_verdicts import (
    LATER_LEVEL,
    LATER_LOOKS,
    LEVEL,
    has_pair,
    verdicts,
)
from ddlkit.report.panels import ENDS, Panel
from ddlkit.report.papers.sharing import BATCHES, DEFAULT, throughput
from ddlkit.report.source import SHARING, Source, machine_of, open_sharing, rounds_apart

RESNET = ("ResNet-18", 32)
"""Network and batch of figures 4 and 5."""
OURS = ("resnet18", "resnet18_64")
"""Their network on a GPU, and its small pictures on a processor."""
KINDS = ("control", "messages", "kernels", "copies", "iterations", "spans", "cells")
"""Of tables; each is called sharing_<kind>."""


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
        """Of KINDS, those that were recorded; those of iterations with the rounds of each point apart."""
        names = {kind: kind for kind in ("controls", "channels")} | {
            kind: f"sharing_{kind}" for kind in KINDS
        }
        there = {kind: name for kind, name in names.items() if self.source.has(name)}
        read = {"iterations": self.source.rounds}
        found = {kind: read.get(kind, self.source.table)(name) for kind, name in there.items()}
        if "kernels" not in found and "messages" in found and self.source.has("contention"):
            contention = self.source.table("contention")
            found["kernels"] = sharing_measured.beside_nccl(contention, found["messages"])
        return found

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

    def two_groups_told(self) -> pd.DataFrame:
        """The same as foretold and measured, by what was trained in the same rounds."""
        rows = self.tables["iterations"]
        two = rows["configuration"].str.contains("+", regex=False)
        keys = [*sharing_measured.CELL, "repeat"]
        beside = two.groupby([rows[key] for key in keys]).transform("any")
        return sharing_predicted.two_groups(self.told(rows[beside]))

    def beside(self, name: str) -> Source | None:
        """What was recorded beside it later, under that name; None where nothing was."""
        found = self.source.directories[0].with_name(f"{SHARING}-{name}")
        return Source((found,)) if found.is_dir() else None

    @property
    def can_judge(self) -> bool:
        """Whether it has what `looks` needs; one that ended early has not."""
        there = self.has("iterations", "spans") and self.source.has("layers")
        return there and all(map(has_pair, sharing_measured.halves(self.tables["iterations"])))

    def looks(self) -> pd.DataFrame:
        """The paper's conclusions, judged on this machine: those of `verdicts`, by ``look``, each one surer.

        The first look takes the recording, the second all cells that were recorded later with it, and each
        after that the cells of a later session alone.
        """
        found = {"first": self._verdicts(LEVEL)}
        if (more := self.beside("more")) is not None:
            every = self, Recording(more)
            iterations = rounds_apart([one.tables["iterations"] for one in every])
            spans = pd.concat([one.tables["spans"] for one in every], ignore_index=True)
            layers = self.source.table("layers")
            found["second"] = verdicts(iterations, spans, layers, LATER_LEVEL)
        for look, (name, level) in LATER_LOOKS.items():
            if (session := self.beside(name)) is not None:
                found[look] = Recording(session)._verdicts(level)
        return pd.concat(found, names=["look", None]).reset_index("look").reset_index(drop=True)

    def _verdicts(self, level: float) -> pd.DataFrame:
        layers = self.source.table("layers")
        return verdicts(self.tables["iterations"], self.tables["spans"], layers, level)


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
ASKED = {"NCCL_MIN_CTAS": "blocks", "NCCL_MAX_CTAS": "blocks", "NCCL_NTHREADS": "threads"}
"""What a variable of the environment asks for: each value was tried in a process of its own."""


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
    if here.has("channels"):
        said |= {name: _taken(here.tables["channels"], what) for name, what in ASKED.items()}
    seen = [
        next((said[key] for key in said if key.split()[-1] in name), "")
        for name in table["control"]
    ]
    return table.assign(read_back=seen)


def _taken(channels: pd.DataFrame, what: str) -> str:
    """Of all collectives the blocks, or threads, that each number asked for took: "2 asked: 2"."""
    seen = channels[(channels[f"asked_{what}"] > 0) & (channels[f"taken_{what}"] > 0)]
    taken = seen.groupby(f"asked_{what}")[f"taken_{what}"].unique()
    return "; ".join(
        f"{asked} asked: {', '.join(map(str, sorted(own)))}" for asked, own in taken.items()
    )


def figure2(here: Recording | None) -> dict[str, Panel]:
    """Time of an all-reduce over the default's: the paper's, and each link's here."""
    printed = sharing_measured.paper_grid(paper_table("sharing", "fig02"), "relative_time")
    panels = {"paper, 25 MB": Panel(printed, (2, 256))}
    if here is not None and here.has("messages"):
        rows = sharing_measured.figure2(here.tables["messages"])
        panels |= {name: _own(own, "ratio") for name, own in rows.groupby("link")}
    return panels


NEUTRAL = {"ratio": 1.0, "gain": 0.0}
"""What says "no difference": of a time over another, of a gain."""


def _own(rows: pd.DataFrame, value: str) -> Panel:
    grid, lower, upper = (sharing_measured.as_grid(rows, name).T for name in (value, *ENDS))
    column, _, row = sharing_measured.default_of(rows).partition("-")
    return Panel(grid, (row, column), lower, upper, neutral=NEUTRAL[value])


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
    names = set(rows["configuration"])
    first = sharing_measured.least_first(sorted(names))
    ordered = [*first, *sorted(names - set(first), key=lambda name: ("+" in name, name))]
    grids = (
        rows.pivot(index=index, columns="configuration", values=name)[ordered]
        for name in (value, *ENDS)
    )
    grid, lower, upper = (one.rename_axis(index="", columns="") for one in grids)
    default = next((name for name in sharing_measured.DEFAULTS if name in names), None)
    framed = (None, default) if default else None
    return Panel(grid, framed, lower, upper, neutral=NEUTRAL[value])


def in_percent(gains: pd.DataFrame) -> pd.DataFrame:
    """Gains and their intervals times 100."""
    columns = ["gain", *ENDS]
    return gains.assign(**{name: 100 * gains[name] for name in columns})


def defaults(panels: Mapping[str, Panel]) -> dict[str, float]:
    """The value in each panel's frame, or the median of it."""
    found = {}
    for name, panel in panels.items():
        grid, default = panel.grid, panel.default
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
            panels[str(link)] = _own(in_percent(own), "gain")
    return panels


def _middle(gains: pd.DataFrame) -> pd.DataFrame:
    """ResNet-18's rows at the batch that most configurations were measured with, under DDP's own plan.

    Of one computing thread a rank: what more take from each other is not a message's doing.
    """
    own = gains[gains["network"].isin(OURS) & (gains["plan"] == "ddp")]
    own = own[~own["configuration"].str.contains("-omp", regex=False)]
    counts = own["batch"].value_counts()
    return own[own["batch"] == counts.idxmax()] if len(own) else own


def figure5(here: Recording | None) -> dict[str, dict[str, Timeline]]:
    """Timelines of ResNet-18, default, best and starved: of the paper by its model, and as measured here.

    Here the best is that of the odd rounds; the iteration that is shown is of an even one.
    """
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
    choosing, _ = sharing_measured.halves(here.tables["iterations"])
    if not sharing_measured.has_default(choosing):
        return found
    rows = _middle(sharing_measured.throughputs(choosing))
    rows = rows[~rows["configuration"].str.contains("+", regex=False)]
    for link, own in rows[~rows["link"].str.startswith("emulated")].groupby("link"):
        names = {
            "default": sharing_measured.default_of(own),
            "best": own.loc[own["gain"].idxmax(), "configuration"],
            "starved": sharing_measured.least_first(own["configuration"].tolist())[0],
        }
        cell = own.iloc[0][sharing_measured.CELL].tolist()
        spans = sharing_measured.timelines(here.tables["spans"], cell, list(names.values()))
        there = {role: name for role, name in names.items() if name in spans}
        if len(there) == len(names):
            found[f"{here.machine}, {link}"] = {
                f"{link}, {role}: {name}": spans[name] for role, name in there.items()
            }
    return found


def figure6(here: Recording | None) -> dict[str, pd.DataFrame]:
    """Parts of an iteration of ResNet-18 by batch, default and best: simulated for V100S, measured here."""
    cases = {}
    for batch in BATCHES:
        for name in (DEFAULT, sharing_grid.best(RESNET[0], batch)):
            cases[f"{batch}, {name}"] = RESNET[0], batch, name
    found = {"V100S, simulated": sharing_grid.breakdown(cases)}
    if here is not None and here.has("iterations"):
        rows = here.tables["iterations"]
        found |= parts(rows[rows["network"].isin(OURS)], "batch")
    return found


def figure7(here: Recording | None) -> dict[str, pd.DataFrame]:
    """Parts of an iteration of each network, default and best: batch 64 by the model, the middle one here."""
    cases = {}
    for network in dict.fromkeys(throughput().index.get_level_values("network")):
        for name in (DEFAULT, sharing_grid.best(network, 64)):
            cases[f"{network}, {name}"] = network, 64, name
    found = {"V100S, simulated": sharing_grid.breakdown(cases)}
    if here is not None and here.has("iterations"):
        found |= parts_of_networks(here.tables["iterations"])
    return found


def parts_of_networks(iterations: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """`parts` of each network at its middle batch."""
    batches = iterations.groupby("network")["batch"]
    middle = batches.agg(lambda own: sorted(set(own))[len(set(own)) // 2])
    return parts(iterations[iterations["batch"] == iterations["network"].map(middle)], "network")


def parts(iterations: pd.DataFrame, by: str) -> dict[str, pd.DataFrame]:
    """By link with several of them, default and best of one group of each, under DDP's own plan.

    The best is that of the odd rounds; shown are means of the even rounds in which both were trained, or of
    all even rounds where they never were in one. What was not trained in even rounds is left out.
    """
    rows = iterations[(iterations["plan"] == "ddp") & (iterations["openmp"] == 1)]
    choosing, showing = sharing_measured.halves(rows)
    if not sharing_measured.has_default(choosing):
        return {}
    default = sharing_measured.default_of(rows)
    columns = ["computation_only_s", "overlap_s", "communication_only_s"]
    found: dict[str, dict[str, list[float]]] = {}
    best = sharing_measured.best_of(sharing_measured.throughputs(choosing))
    for one in best.sort_values(["link", by]).itertuples():
        cell = [one.network, one.batch, one.plan, one.link]
        own = showing[(showing[sharing_measured.CELL] == cell).all(axis=1)]
        name, of = str(one.configuration), getattr(one, by)
        rounds = [
            set(own.loc[own["configuration"] == which, "repeat"]) for which in (default, name)
        ]
        if not all(rounds):
            continue
        both = set.intersection(*rounds) or set.union(*rounds)
        parts = sharing_measured.breakdown(own[own["repeat"].isin(both)])
        parts = parts.set_index("configuration")[columns]
        bars = found.setdefault(f"here, {one.link}", {})
        bars[f"{of}, default"] = parts.loc[default].tolist()
        bars[f"{of}, best: {'default' if name == default else name}"] = parts.loc[name].tolist()
    names = ["computation only", "overlap", "communication only"]
    return {
        link: pd.DataFrame.from_dict(bars, orient="index", columns=names)
        for link, bars in found.items()
        if len(bars) > 2
    }


def figure8(here: Recording | None) -> dict[str, Panel]:
    """Gain over the default of every network and batch under every configuration, in per cent."""
    grid = throughput()
    printed = 100 * (grid.div(grid[DEFAULT], axis=0) - 1)
    printed.index = [f"{network}, {batch}" for network, batch in printed.index]
    panels = {"paper": Panel(printed, (None, DEFAULT))}
    if here is not None and here.has("iterations"):
        panels |= gains(here.tables["iterations"])
    return panels


def gains(iterations: pd.DataFrame) -> dict[str, Panel]:
    """By link with several networks, gain over the default of each cell of DDP's own plan, in per cent."""
    rows = iterations[(iterations["plan"] == "ddp") & (iterations["openmp"] == 1)]
    gain = in_percent(sharing_measured.throughputs(rows))
    gain = gain.assign(case=gain["network"] + ", " + gain["batch"].astype(str))
    return {
        str(link): _by_configuration(_of_most(own, "case"), "case", "gain")
        for link, own in gain.groupby("link")
        if own["network"].nunique() > 1
    }


def _of_most(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Those of configurations that were measured in at least half of the cases."""
    shares = rows.groupby("configuration")[by].nunique() / rows[by].nunique()
    return rows[rows["configuration"].map(shares) >= 0.5]
