"""The sharing paper's eight figures: what it prints or its model says, and what a machine measured.

A figure has panels of what is there. Tables are those of one machine, whatever carried messages: threads of
gloo on a processor, a stand-in on a GPU (`gpu_own.one_gpu`). A configuration is
compared with the default of the same round, so that what drifts from round to round cancels; the median over
rounds is shown, with its 95% interval.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ddlkit.core.fit import median_interval
from ddlkit.core.timeline import COLUMNS, Timeline
from ddlkit.report.claims import paper_table
from ddlkit.report.figures import sharing_paper
from ddlkit.report.panels import ENDS, Panel
from ddlkit.report.papers.sharing import BATCHES, DEFAULT, throughput
from ddlkit.report.source import SHARING, Source, machine_of, open_sharing

DEFAULTS = ("t2-free-normal", DEFAULT)
"""What a library takes by itself: two threads of gloo; two blocks in the paper."""
LEAST_FIRST = (
    *("t1-free-idle", "t1-free-nice10", "t1-free-normal", "t2-free-normal", "t4-free-normal"),
    "t2-free-raised",
)
"""Configurations of the grid by what they take from compute, the least first."""
CELL = ["network", "batch", "plan", "link"]
LARGE_BYTES = 25_000_000
"""Of figure 2's message, which is sent in parts so that every thread has some."""
OURS = ("resnet18", "resnet18_64")
"""The network of figures 4 to 6 on a GPU, and its small pictures on a processor."""
KINDS = ("control", "messages", "kernels", "iterations", "spans")
Panels = dict[str, Panel]
_SHAPE = r"\d+x\d+"  # blocks x threads


@dataclass(frozen=True, eq=False)
class Recording:
    """What one machine measured: tables by their kind."""

    source: Source
    tables: Mapping[str, pd.DataFrame]

    @classmethod
    def of(cls, source: Source) -> Recording:
        """Return all that is there of KINDS, whose tables are called sharing_<kind>, and of controls."""
        names = {"controls": "controls"} | {kind: f"sharing_{kind}" for kind in KINDS}
        of = {kind: source.rounds if kind == "iterations" else source.table for kind in names}
        there = {kind: name for kind, name in names.items() if source.has(name)}
        return cls(source, {kind: of[kind](name) for kind, name in there.items()})

    @property
    def machine(self) -> str:
        """Return its name."""
        return machine_of(self.source.directories[0])

    def has(self, *kinds: str) -> bool:
        """Return whether all of these were recorded."""
        return all(kind in self.tables for kind in kinds)

    def beside(self, name: str) -> Source | None:
        """Return what was recorded beside it later, under that name; None where nothing was."""
        directory = self.source.directories[0].with_name(f"{SHARING}-{name}")
        source = Source((directory,))
        return source if source.has("sharing_iterations") else None


def recorded(data: str = "") -> Recording | None:
    """Return a machine's recording, by its name or directory; the first there is, or None."""
    source = open_sharing(data)
    return Recording.of(source) if source else None


# -- rounds --------------------------------------------------------------------------------------


def default_of(rows: pd.DataFrame) -> str:
    """Return the default among rows with a column ``configuration``; "" where it was not measured."""
    return next((name for name in DEFAULTS if name in set(rows["configuration"])), "")


def least_first(names: Iterable[str]) -> list[str]:
    """Return configurations of one group by what they take: of gloo as LEAST_FIRST, of blocks by size."""
    names = set(names)
    shapes = [name for name in names if re.fullmatch(_SHAPE, name)]
    ordered = sorted(shapes, key=lambda name: tuple(map(int, name.split("x"))))
    return ordered or [name for name in LEAST_FIRST if name in names]


def rounds_over_default(rows: pd.DataFrame, value: str, within: Sequence[str]) -> pd.DataFrame:
    """Return ``value`` over the default's of the same round (``repeat``) as ``ratio``: a row a round."""
    keys = [*within, "repeat"]
    each = rows.groupby([*keys, "configuration"], sort=False)[value].mean().reset_index()
    default = each[each["configuration"] == default_of(rows)].set_index(keys)[value]
    ratios = each.join(default.rename("default"), on=keys)
    return ratios.assign(ratio=ratios[value] / ratios["default"]).dropna(subset="ratio")


def summed(rows: pd.DataFrame, keys: Sequence[str], value: str) -> pd.DataFrame:
    """Return the median of ``value`` for each of ``keys``, its interval over rows, and how many rows."""
    medians = [
        (*key, float(samples.median()), *median_interval(samples.to_numpy()), len(samples))
        for key, samples in rows.groupby(list(keys), sort=False)[value]
    ]
    return pd.DataFrame(medians, columns=[*keys, value, *ENDS, "rounds"])


def throughputs(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return training's gain over the default of the same round (sharing Figs 4 and 8), in per cent.

    Columns: those of CELL, configuration, gain, lower, upper, rounds.
    """
    each = rounds_over_default(iterations, "iteration_s", CELL)
    gains = summed(each.assign(gain=1 / each["ratio"] - 1), [*CELL, "configuration"], "gain")
    return gains.assign(**{name: 100 * gains[name] for name in ("gain", *ENDS)})


def odd(rows: pd.DataFrame) -> pd.Series:
    """Return which are of odd rounds: what is chosen in these is judged, without its luck, in the others."""
    return rows["repeat"] % 2 == 1


def _one_group(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~rows["configuration"].str.contains("+", regex=False)]


# -- grids ---------------------------------------------------------------------------------------


def as_grid(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return configurations of one group as rows (threads or blocks) and columns (all else).

    "t2-free-normal" stands in row "t2", column "free-normal", "2x256" in row 2, column 256.
    """
    rows = _one_group(rows)
    if rows["configuration"].str.fullmatch(_SHAPE).all():
        shape = rows["configuration"].str.split("x", expand=True).astype(int)
        return paper_grid(rows.assign(blocks=shape[0], threads=shape[1]), value)
    parts = rows["configuration"].str.partition("-")
    grid = rows.assign(row=parts[0], column=parts[2]).pivot(
        index="row", columns="column", values=value
    )
    return grid[sorted(grid, key=_urgency)].rename_axis(index="threads", columns="").T


def _urgency(column: str) -> tuple[int, ...]:
    """Order columns: unpinned before pinned, one computing thread before two, the least urgent first."""
    cores, priority, *openmp = column.split("-")
    places, order = ("free", "own", "one"), ("idle", "nice10", "normal", "raised")
    return len(openmp), places.index(cores), order.index(priority)


def paper_grid(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return blocks x threads of a transcribed figure with columns blocks, threads and ``value``."""
    return rows.pivot(index="blocks", columns="threads", values=value)


def _by_shape(rows: pd.DataFrame, value: str, neutral: float = 0.0) -> Panel:
    grid, lower, upper = (as_grid(rows, name) for name in (value, *ENDS))
    default = default_of(rows)
    threads, _, rest = default.partition("-")
    return Panel(grid, (2, 256) if default == DEFAULT else (rest, threads), lower, upper, neutral)


def _by_configuration(rows: pd.DataFrame, index: str, value: str, neutral: float = 0.0) -> Panel:
    """A row each of ``index``, a column a configuration: those of one group first, the least first."""
    names = set(rows["configuration"])
    first = least_first(names)
    ordered = [*first, *sorted(names - set(first), key=lambda name: ("+" in name, name))]
    grid, lower, upper = (
        rows.pivot(index=index, columns="configuration", values=name)[ordered].rename_axis(
            index="", columns=""
        )
        for name in (value, *ENDS)
    )
    framed = (None, default_of(rows)) if default_of(rows) else None
    return Panel(grid, framed, lower, upper, neutral)


# -- the figures ---------------------------------------------------------------------------------

SEEN = {
    "gloo threads": ["taken_threads"],
    "cores": ["taken_cores"],
    "priority": ["taken_policy", "taken_nice"],
}
"""Columns of a control table in which a setting shows once it has taken effect."""


def figure1(here: Recording | None) -> pd.DataFrame:
    """Return what limits a collective, at which level, whether it is offered, and what was read back."""
    columns = ["level", "control", "outcome", "reason"]
    if here is None or not here.has("control", "controls"):
        return pd.DataFrame([["", "nothing", "not recorded", "none"]], columns=columns)
    table = here.tables["controls"][columns]
    rows = here.tables["control"].query("outcome == 'applied'")
    said = {
        control: "; ".join(sorted(set(rows[seen_in].astype(str).agg(" ".join, axis=1)) - {"0"}))
        for control, seen_in in SEEN.items()
    }
    read_back = [
        next((said[key] for key in said if key.split()[-1] in name), "")
        for name in table["control"]
    ]
    return table.assign(read_back=read_back)


Here = Recording | None
"""A figure's panels are the paper's, and those of each recording that there is."""


def _tables(here: Sequence[Here], kind: str) -> list[pd.DataFrame]:
    return [one.tables[kind] for one in here if one is not None and one.has(kind)]


def figure2(*here: Here) -> Panels:
    """Return time of an all-reduce over the default's: the paper's, and by link what was measured."""
    grid = paper_grid(paper_table("sharing", "fig02"), "relative_time")
    panels = {"paper, 25 MB": Panel(grid, (2, 256))}
    for rows in _tables(here, "messages"):
        rows = rows[rows["bytes"] == LARGE_BYTES]
        if default_of(rows):
            ratios = rounds_over_default(rows, "seconds", ["link"])
            for link, group in summed(ratios, ["link", "configuration"], "ratio").groupby("link"):
                panels[str(link)] = _by_shape(group, "ratio", 1.0)
    return panels


def figure3(*here: Here) -> tuple[Panels, Panels]:
    """Return time of kernels beside messages over that alone: the paper's, and by link what was measured."""
    paper = {
        str(kernel).replace("_", " "): Panel(paper_grid(group, "slowdown"), (2, 256))
        for kernel, group in paper_table("sharing", "fig03").groupby("kernel", sort=False)
    }
    ours = {}
    for kernels in _tables(here, "kernels"):
        ratio = kernels["kernel_beside_s"] / kernels["kernel_alone_s"]
        rows = summed(kernels.assign(ratio=ratio), ["link", "kernel", "configuration"], "ratio")
        for link, group in rows.groupby("link"):
            ours[str(link)] = _by_configuration(group, "kernel", "ratio", 1.0)
    return paper, ours


def figure4(*here: Here) -> Panels:
    """Return gain in training throughput of ResNet-18 over the default, in per cent."""
    grid = paper_grid(paper_table("sharing", "fig04"), "gain_percent")
    row = throughput().loc[sharing_paper.RESNET]
    again = (100 * (row / row[DEFAULT] - 1)).rename("gain").rename_axis("configuration")
    panels = {
        "paper, fig 4": Panel(grid, (2, 256)),
        "paper, fig 8": Panel(as_grid(again.reset_index(), "gain"), (2, 256)),
    }
    for iterations in _tables(here, "iterations"):
        for link, group in _middle(throughputs(iterations)).groupby("link"):
            panels[str(link)] = _by_shape(group, "gain")
    return panels


def _middle(gains: pd.DataFrame) -> pd.DataFrame:
    """Return ResNet-18's rows at the batch with most configurations, under DDP's own plan.

    Of one computing thread a rank: what more take from each other is not a message's doing.
    """
    rows = gains[gains["network"].isin(OURS) & (gains["plan"] == "ddp")]
    rows = rows[~rows["configuration"].str.contains("-omp", regex=False)]
    counts = rows["batch"].value_counts()
    return rows[rows["batch"] == counts.idxmax()] if len(rows) else rows


def figure5(here: Recording | None) -> dict[str, dict[str, Timeline]]:
    """Return timelines of ResNet-18, default, best and starved: of the paper by its model, and measured.

    Here the best is that of the odd rounds; the iteration that is shown is of an even one.
    """
    grid = sharing_paper.fitted("both")
    roles = {"default": DEFAULT, "best": "1x256", "starved": "1x64"}
    simulated = {
        f"V100S, {role}: {name}": grid.iteration(*sharing_paper.RESNET, name).timeline()
        for role, name in roles.items()
    }
    groups = {"V100S": simulated}
    if here is None or not here.has("iterations", "spans"):
        return groups
    iterations = here.tables["iterations"]
    choosing = iterations[odd(iterations)]
    if not default_of(choosing):
        return groups
    rows = _one_group(_middle(throughputs(choosing)))
    for link, group in rows[~rows["link"].str.startswith("emulated")].groupby("link"):
        best = group.loc[group["gain"].idxmax(), "configuration"]
        least = least_first(group["configuration"])[0]
        roles = {"default": default_of(group), "best": best, "starved": least}
        spans = _timelines(here.tables["spans"], group.iloc[0][CELL].tolist(), roles.values())
        if len(spans) == len(set(roles.values())):
            groups[f"{here.machine}, {link}"] = {
                f"{link}, {role}: {name}": spans[name] for role, name in roles.items()
            }
    return groups


def _timelines(
    spans: pd.DataFrame, cell: Sequence[object], names: Iterable[str]
) -> dict[str, Timeline]:
    """Return the measured timeline under each configuration, the first of several sessions."""
    rows = spans[(spans[CELL] == list(cell)).all(axis=1)]
    rows = rows.drop_duplicates([*CELL, "configuration", "task", "rank"])
    return {
        name: Timeline(**{column: group[column].to_numpy() for column in COLUMNS})
        for name, group in rows.groupby("configuration")
        if name in set(names)
    }


def spans(groups: Mapping[str, Mapping[str, Timeline]]) -> pd.DataFrame:
    """Return what figure 5 is drawn of: every link's timelines, and what the text prints."""
    every = [pair for group in groups.values() for pair in group.items()]
    each = [timeline.to_frame().assign(case=name) for name, timeline in every]
    return pd.concat([*each, sharing_paper.printed_parts()])


def figure6(*here: Here) -> dict[str, pd.DataFrame]:
    """Return parts of an iteration of ResNet-18 by batch, default and best: simulated, and measured."""
    networks = {str(batch): (sharing_paper.RESNET[0], batch) for batch in BATCHES}
    found = {"V100S, simulated": sharing_paper.with_best(networks)}
    for rows in _tables(here, "iterations"):
        found |= parts(rows[rows["network"].isin(OURS)], "batch")
    return found


def figure7(*here: Here) -> dict[str, pd.DataFrame]:
    """Return parts of an iteration of each network: batch 64 by the model, the middle one as measured."""
    networks = dict.fromkeys(throughput().index.get_level_values("network"))
    simulated = sharing_paper.with_best({network: (network, 64) for network in networks})
    found = {"V100S, simulated": simulated}
    for rows in _tables(here, "iterations"):
        batches = rows.groupby("network")["batch"]
        middle = batches.agg(lambda every: sorted(set(every))[len(set(every)) // 2])
        found |= parts(rows[rows["batch"] == rows["network"].map(middle)], "network")
    return found


def parts(iterations: pd.DataFrame, by: str) -> dict[str, pd.DataFrame]:
    """Return by link with several of them, default and best of one group of each, under DDP's own plan.

    Computation only, overlap and communication only, in seconds: means of the slowest rank's; waiting counts
    as computation. The best is that of the odd rounds; shown are the even rounds in which both were trained,
    and nothing where there are none.
    """
    rows = iterations[(iterations["plan"] == "ddp") & (iterations["openmp"] == 1)]
    choosing, showing = rows[odd(rows)], rows[~odd(rows)]
    if not default_of(choosing):
        return {}
    gains = _one_group(throughputs(choosing))
    best = gains.loc[gains.groupby(CELL, sort=False)["gain"].idxmax()].sort_values(["link", by])
    bars: dict[str, list[pd.DataFrame]] = {}
    for row in best.to_dict("records"):
        cell = showing[(showing[CELL] == [row[key] for key in CELL]).all(axis=1)]
        both = _both(cell, default_of(rows), row["configuration"])
        bars.setdefault(f"here, {row['link']}", []).append(both.rename(f"{row[by]}, {{}}".format))
    tables = {link: pd.concat(each) for link, each in bars.items()}
    return {link: table for link, table in tables.items() if len(table) > 2}


def _both(rows: pd.DataFrame, default: str, best: str) -> pd.DataFrame:
    """Return mean parts of the rounds of two configurations, a row each; without common rounds none."""
    rounds = [set(rows.loc[rows["configuration"] == name, "repeat"]) for name in (default, best)]
    rows = rows[rows["repeat"].isin(set.intersection(*rounds))]
    columns = {
        "computation only": rows["iteration_s"] - rows["communication_s"],
        "overlap": rows["overlap_s"],
        "communication only": rows["exposed_communication_s"],
    }
    means = pd.DataFrame(columns).groupby(rows["configuration"], sort=False).mean()
    label = f"best: {'default' if best == default else best}"
    return means.loc[[default, best] if len(means) else []].set_axis(
        ["default", label] if len(means) else [], axis=0
    )


def figure8(*here: Here) -> Panels:
    """Return gain over the default of every network and batch under every configuration, in per cent.

    Measured ones by link with several networks, under DDP's own plan, of configurations that were measured
    in at least half of the cases.
    """
    grid = throughput()
    printed = 100 * (grid.div(grid[DEFAULT], axis=0) - 1)
    printed.index = [f"{network}, {batch}" for network, batch in printed.index]
    panels = {"paper": Panel(printed, (None, DEFAULT))}
    for rows in _tables(here, "iterations"):
        gains = throughputs(rows[(rows["plan"] == "ddp") & (rows["openmp"] == 1)])
        gains = gains.assign(case=gains["network"] + ", " + gains["batch"].astype(str))
        for link, group in gains.groupby("link"):
            shares = group.groupby("configuration")["case"].nunique() / group["case"].nunique()
            often = group[group["configuration"].map(shares) >= 0.5]
            if group["network"].nunique() > 1:
                panels[str(link)] = _by_configuration(often, "case", "gain")
    return panels
