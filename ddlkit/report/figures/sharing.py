"""The sharing paper's figures: what it prints or its model says, and what machines measured.

A configuration is compared with the default of the same round, so that what drifts from round to round
cancels; the median over rounds is shown, with its 95% interval. Links differ by what carried messages:
threads of gloo on a processor, a stand-in on a GPU (`gpu_own`). A figure's CSV keeps names as they were
recorded; `shown` spells them for readers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.doubt import median_interval
from ddlkit.core.timeline import COLUMNS, Timeline
from ddlkit.report.claims import paper_table
from ddlkit.report.figures import gpu_own, sharing_model
from ddlkit.report.figures.sharing_model import CELL, PARTS, RESNET
from ddlkit.report.panels import ENDS, Panel
from ddlkit.report.papers.sharing import BATCHES, DEFAULT, throughput
from ddlkit.report.source import open_sharing

Tables = Mapping[str, pd.DataFrame]
"""What was measured, by KINDS; what was not is missing."""
Panels = dict[str, Panel]
KINDS = ("controls", "control", "messages", "kernels", "iterations", "spans")
DEFAULTS = ("t2-free-normal", DEFAULT)  # of gloo, two threads; of the paper's NCCL, two blocks
LARGE_BYTES = 25_000_000  # figure 2's message, which is sent in parts: every thread has some
OURS = (
    "resnet18",
    "resnet18_64",
)  # of figures 4 to 6, on a GPU; on a processor with small pictures
SIMULATED = "V100S, simulated"
SEEN = {"threads": ["taken_threads"], "cores": ["taken_cores"]}  # where controls are read back
SEEN |= {"priority": ["taken_policy", "taken_nice"]}
_SHAPE = r"\d+x\d+"  # blocks x threads


def recorded(data: str = "") -> Tables:
    """Return what a machine measured, by its name or directory, else the first that has some, and a GPU."""
    here, tables = open_sharing(data), {}
    for kind in KINDS if here else ():
        name = kind if kind == "controls" else f"sharing_{kind}"
        if here and here.has(name):
            tables[kind] = here.rounds(name) if kind == "iterations" else here.table(name)
    for kind, rows in gpu_own.one_gpu(data).items():
        tables[kind] = pd.concat([tables[kind], rows]) if kind in tables else rows
    return tables


def _links(tables: Tables, kind: str) -> Iterator[tuple[str, pd.DataFrame]]:
    for link, rows in tables[kind].groupby("link") if kind in tables else ():
        yield str(link), rows


# -- rounds and grids ----------------------------------------------------------------------------


def default_of(rows: pd.DataFrame) -> str:
    """Return the default among rows with a column ``configuration``; "" where it was not measured."""
    return next((name for name in DEFAULTS if name in set(rows["configuration"])), "")


def over_default(rows: pd.DataFrame, value: str, keys: Sequence[str]) -> pd.DataFrame:
    """Return rows, a round and configuration each, with ``ratio``: value over the round's default's."""
    keys = [*keys, "repeat"]
    each = rows.groupby([*keys, "configuration"], sort=False)[value].mean().reset_index()
    default = each[each["configuration"] == default_of(rows)].set_index(keys)[value]
    ratios = each.join(default.rename("default"), on=keys)
    return ratios.assign(ratio=ratios[value] / ratios["default"]).dropna(subset="ratio")


def summed(rows: pd.DataFrame, keys: Sequence[str], value: str) -> pd.DataFrame:
    """Return the median of ``value`` for each of ``keys``, and its interval over rows."""
    medians = [
        (*key, float(samples.median()), *median_interval(samples.to_numpy()))
        for key, samples in rows.groupby(list(keys), sort=False)[value]
    ]
    return pd.DataFrame(medians, columns=[*keys, value, *ENDS])


def throughputs(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return training's ``gain`` over the default of the same round, and its ends, in per cent."""
    each = over_default(iterations, "iteration_s", CELL)
    gains = summed(each.assign(gain=1 / each["ratio"] - 1), [*CELL, "configuration"], "gain")
    return gains.assign(**{name: 100 * gains[name] for name in ("gain", *ENDS)})


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return iterations or gains under DDP's own plan, of one computing thread a rank.

    What more threads take from each other is not a message's doing.
    """
    several = rows["configuration"].str.contains("-omp", regex=False)
    return rows[(rows["plan"] == "ddp") & ~several]


def one_group(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of which all messages have the same resources."""
    return rows[~rows["configuration"].str.contains("+", regex=False)]


def least_first(name: str) -> tuple[int, ...]:
    """Order configurations, or what stands behind their threads, by what they take from compute."""
    first, last, _ = name.partition("+")
    words = re.fullmatch(r"(?:t(\d)-)?(free|own|one)-(\w+)(-omp2)?", first)
    if words is None:
        return bool(last), *map(int, re.findall(r"\d+", first))
    cores, priority = ("free", "own", "one"), ("idle", "nice10", "normal", "raised")
    place = cores.index(words[2]), priority.index(words[3]), int(words[1] or 0)
    return bool(last), bool(words[4]), *place


def as_grid(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return configurations of one group by their parts: "2x256" in row 2, "t2-free-idle" in column "t2"."""
    rows = one_group(rows)
    names = rows["configuration"].str
    if names.fullmatch(_SHAPE).all():
        shape = names.split("x", expand=True).astype(int)
        rows = rows.assign(blocks=shape[0], threads=shape[1])
        return rows.pivot(index="blocks", columns="threads", values=value)
    parts = names.partition("-")
    rows = rows.assign(threads=parts[0], rest=parts[2])
    grid = rows.pivot(index="rest", columns="threads", values=value).rename_axis(index="")
    return grid.loc[sorted(grid.index, key=least_first)]


def panel(rows: pd.DataFrame, value: str, index: str = "", neutral: float = 0.0) -> Panel:
    """Return the heat map of ``value`` by configuration's parts, or by ``index`` and configuration."""
    default, names = default_of(rows), [name for name in (value, *ENDS) if name in rows]
    if index:
        order = sorted(set(rows["configuration"]), key=least_first)
        wide = rows.pivot(index=index, columns="configuration").rename_axis(index="")
        grids = [wide[name][order].rename_axis(columns="") for name in names]
        framed: Any = (None, default) if default else None
    else:
        grids = [as_grid(rows, name) for name in names]
        threads, _, rest = default.partition("-")
        framed = (2, 256) if default == DEFAULT else (rest, threads)
    return Panel(grids[0], framed, *(grids[1:] or (None, None)), neutral)


def numbers(panels: Panels) -> pd.DataFrame:
    """Return what heat maps show, a row a number: panel, row, column, value, lower, upper."""
    tables = []
    for name, each in panels.items():
        grids = {"value": each.grid, "lower": each.lower, "upper": each.upper}
        long = {
            what: grid.rename_axis(index="row", columns="column").stack()
            for what, grid in grids.items()
            if grid is not None
        }
        table = pd.concat(long, axis=1).dropna(subset="value").reset_index()
        tables.append(table.assign(panel=name).astype({"row": str, "column": str}))
    columns = ["panel", "row", "column", "value", *ENDS]
    return pd.concat(tables, ignore_index=True).reindex(columns=columns)


# -- the figures ---------------------------------------------------------------------------------


def figure1(tables: Tables) -> pd.DataFrame:
    """Return what limits a collective, at which level, whether it is offered, and what was read back."""
    columns = ["level", "control", "outcome", "reason"]
    if not {"control", "controls"} <= tables.keys():
        return pd.DataFrame([["", "nothing", "not recorded", "none"]], columns=columns)
    table, rows = tables["controls"][columns], tables["control"].query("outcome == 'applied'")
    said = {
        word: "; ".join(sorted(set(rows[seen].astype(str).agg(" ".join, axis=1)) - {"0"}))
        for word, seen in SEEN.items()
    }
    read_back = [
        next((said[word] for word in said if word in name), "") for name in table["control"]
    ]
    return table.assign(read_back=read_back)


def _paper(name: str) -> pd.DataFrame:
    rows = paper_table("sharing", name)
    return rows.assign(configuration=sharing_model.configurations(rows))


def figure2(tables: Tables) -> Panels:
    """Return time of an all-reduce over the default's: the paper's, and by link what was measured."""
    panels = {"paper, 25 MB": panel(_paper("fig02"), "relative_time")}
    for link, rows in _links(tables, "messages"):
        rows = rows[rows["bytes"] == LARGE_BYTES]
        if default_of(rows):
            ratios = summed(over_default(rows, "seconds", []), ["configuration"], "ratio")
            panels[link] = panel(ratios, "ratio", neutral=1.0)
    return panels


def figure3(tables: Tables) -> tuple[Panels, Panels]:
    """Return time of kernels beside messages over that alone: the paper's, and by link what was measured."""
    paper = {
        str(kernel).replace("_", " "): panel(group, "slowdown")
        for kernel, group in _paper("fig03").groupby("kernel", sort=False)
    }
    ours = {}
    for link, rows in _links(tables, "kernels"):
        rows = rows.assign(ratio=rows["kernel_beside_s"] / rows["kernel_alone_s"])
        ratios = summed(rows, ["kernel", "configuration"], "ratio")
        ours[link] = panel(ratios, "ratio", "kernel", 1.0)
    return paper, ours


def across(paper: Panels) -> Panels:
    """Return grids of blocks and threads as one: a row each, a column a configuration."""
    grid = pd.DataFrame({name: each.grid.stack() for name, each in paper.items()}).T
    grid.columns = [f"{blocks}x{threads}" for blocks, threads in grid.columns]
    return {"paper": Panel(grid, (None, DEFAULT), neutral=1.0)}


def figure4(tables: Tables) -> Panels:
    """Return ResNet-18's gain in throughput over the default, in per cent, at the batch with most rows."""
    printed = sharing_model.gains(throughput()).loc[RESNET].rename("gain")
    panels = {
        "paper, fig 4": panel(_paper("fig04"), "gain_percent"),
        "paper, fig 8": panel(printed.rename_axis("configuration").reset_index(), "gain"),
    }
    for link, rows in _links(tables, "iterations"):
        if len(gains := _of_resnet(rows)):
            panels[link] = panel(gains, "gain")
    return panels


def _of_resnet(iterations: pd.DataFrame) -> pd.DataFrame:
    gains = throughputs(plain(iterations[iterations["network"].isin(OURS)]))
    return gains[gains["batch"] == gains["batch"].value_counts().idxmax()] if len(gains) else gains


def figure8(tables: Tables) -> Panels:
    """Return gain over the default of every network and batch under every configuration, in per cent.

    Measured ones by link with several networks, of configurations that were measured in half of the cases.
    """
    printed = sharing_model.gains(throughput())
    printed.index = [f"{network}, {batch}" for network, batch in printed.index]
    panels = {"paper": Panel(printed, (None, DEFAULT))}
    for link, rows in _links(tables, "iterations"):
        gains = throughputs(plain(rows))
        gains = gains.assign(case=gains["network"] + ", " + gains["batch"].astype(str))
        shares = gains.groupby("configuration")["case"].nunique() / gains["case"].nunique()
        if gains["network"].nunique() > 1:
            often = gains[gains["configuration"].map(shares) >= 0.5]
            panels[link] = panel(often, "gain", "case")
    return panels


def figure5(tables: Tables) -> list[dict[str, Timeline]]:
    """Return timelines of ResNet-18, default, best and starved: of the paper by its model, and by link.

    Their names are "where, role: configuration". The best is that of odd rounds, the timelines of even ones.
    """
    model, roles = sharing_model.fitted("both"), ("default", "best", "starved")
    names = dict(zip(roles, (DEFAULT, "1x256", "1x64"), strict=True))
    simulated = {
        f"V100S, {role}: {name}": model.iteration(*RESNET, name).timeline()
        for role, name in names.items()
    }
    groups, measured = [simulated], tables.get("spans", pd.DataFrame(columns=CELL))
    for link, rows in _links(tables, "iterations"):
        gains = one_group(_of_resnet(rows[rows["repeat"] % 2 == 1]))
        if link.startswith("emulated") or gains.empty:
            continue
        best = gains.loc[gains["gain"].idxmax(), "configuration"]
        ways = default_of(gains), best, min(gains["configuration"], key=least_first)
        own = measured[(measured[CELL] == gains.iloc[0][CELL].tolist()).all(axis=1)]
        first = own.drop_duplicates([*CELL, "configuration", "task", "rank"])  # of several sessions
        spans = {
            name: Timeline(**{column: each[column].to_numpy() for column in COLUMNS})
            for name, each in (first.groupby("configuration") if len(first) else ())
        }
        if {*ways} <= spans.keys():
            pairs = zip(roles, ways, strict=True)
            groups.append({f"{link}, {role}: {way}": spans[way] for role, way in pairs})
    return groups


def spans(groups: Sequence[Mapping[str, Timeline]]) -> pd.DataFrame:
    """Return what figure 5 is drawn of: every link's timelines, and what the text prints."""
    every = [pair for group in groups for pair in group.items()]
    each = [timeline.to_frame().assign(case=name) for name, timeline in every]
    return pd.concat([*each, sharing_model.printed_parts()])


def figure6(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return parts of an iteration of ResNet-18 by batch, default and best: simulated, and measured."""
    bars = {SIMULATED: sharing_model.with_best({str(n): (RESNET[0], n) for n in BATCHES})}
    for link, rows in _links(tables, "iterations"):
        bars |= parts(link, rows[rows["network"].isin(OURS)], "batch")
    return bars


def figure7(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return parts of an iteration of each network: batch 64 by the model, the middle one as measured."""
    networks = dict.fromkeys(throughput().index.get_level_values("network"))
    bars = {SIMULATED: sharing_model.with_best({name: (name, 64) for name in networks})}
    for link, rows in _links(tables, "iterations"):
        batches = tables["iterations"].groupby("network")["batch"].unique()
        middle = batches.map(lambda every: sorted(every)[len(every) // 2])
        bars |= parts(link, rows[rows["batch"] == rows["network"].map(middle)], "network")
    return bars


def parts(link: str, iterations: pd.DataFrame, by: str) -> dict[str, pd.DataFrame]:
    """Return PARTS of default and best of each network and batch, by "here, link": means of rounds, in s.

    Waiting counts as computation. The best is that of the odd rounds; shown are the even ones in which both
    were trained. Nothing is returned of a single case.
    """
    rows, bars = plain(iterations), [pd.DataFrame()]
    gains, even = (
        one_group(throughputs(rows[rows["repeat"] % 2 == 1])),
        rows[rows["repeat"] % 2 == 0],
    )
    best = gains.loc[gains.groupby(CELL, sort=False)["gain"].idxmax()].sort_values(by)
    for row in best.to_dict("records"):
        default, chosen = default_of(rows), row["configuration"]
        cell = even[(even[CELL] == [row[key] for key in CELL]).all(axis=1)]
        cell = cell[cell["configuration"].isin([default, chosen])]
        both = cell.groupby("repeat")["configuration"].transform("nunique") == len(
            {default, chosen}
        )
        alone_s = cell["iteration_s"] - cell["communication_s"]
        columns = alone_s, cell["overlap_s"], cell["exposed_communication_s"]
        table = pd.concat(columns, axis=1, keys=PARTS)[both]
        means = table.groupby(cell["configuration"][both]).mean()
        if len(means):
            label = f"{row[by]}, best: {'default' if chosen == default else chosen}"
            bars.append(means.loc[[default, chosen]].set_axis([f"{row[by]}, default", label]))
    return {f"here, {link}": pd.concat(bars)} if len(bars) > 2 else {}


# -- with what the text prints -------------------------------------------------------------------


def with_saved(bars: Mapping[str, pd.DataFrame], saved_ms: pd.DataFrame) -> pd.DataFrame:
    """Return what figure 6 is drawn of: bars, in the paper's best ones what they save, a row of its text."""
    table = pd.concat(bars, names=["where", "case"]).reset_index()
    best = {f"{batch}, {sharing_model.best('ResNet-18', batch)}": batch for batch in BATCHES}
    batches = table["case"].map(best).where(table["where"] == SIMULATED)
    columns = saved_ms.add_prefix("saved ").add_suffix(" [ms]")
    both = pd.concat([table, columns.reindex(batches).reset_index(drop=True)], axis=1)
    rest = saved_ms[~saved_ms.index.isin(BATCHES)]["printed"]
    more = {"where": "paper", "case": [f"{batch}, best" for batch in rest.index]}
    return pd.concat([both, pd.DataFrame(more | {"saved printed [ms]": rest})], ignore_index=True)


def with_printed(bars: Mapping[str, pd.DataFrame], printed: pd.DataFrame) -> pd.DataFrame:
    """Return what figure 7 is drawn of: bars, with the times that the text prints of the paper's."""
    table = pd.concat(bars, names=["where", "case"]).reset_index()
    cases = printed["network"] + ", " + printed["configuration"]
    wide = printed.assign(case=cases).pivot(index="case", columns="quantity", values="paper")
    wide = wide.add_prefix("printed ").add_suffix(" [ms]")
    of_paper = table["case"].where(table["where"] == SIMULATED)
    return pd.concat([table, wide.reindex(of_paper).reset_index(drop=True)], axis=1)


# -- for readers ---------------------------------------------------------------------------------

PAPER = {"V100S": "V100S, by the model", SIMULATED: "V100S, by the model"}
PAPER |= {"relu": "ReLU", "paper": "Paper, two V100S", "paper, 25 MB": "Paper, 25 MB"}
PAPER |= {f"paper, fig {n}": f"Paper, figure {n}" for n in (4, 8)}
_LINK = re.compile(r"(?:lab|emulated):(\d+)([mg])bit(?:-delay(\d+)ms)?")


def shown(name: Any) -> Any:
    """Return a link, a configuration, a network, a batch, both, or a kernel, as readers know it.

    Threads of gloo are free on any core where nothing else is said.

    >>> shown("here, emulated:1gbit-delay2ms"), shown("t1-free-idle+t2-own-raised"), shown("resnet18_64, 8")
    ('Processor, 1 Gbit/s, 2 ms', 't1 idle + t2 own raised', 'ResNet-18, 64 px, 8')
    """
    if not isinstance(name, str) or name in PAPER:
        return PAPER.get(name, name)
    if link := _LINK.fullmatch(name.removeprefix("here, ")):
        delay = f", {link[3]} ms" if link[3] else ""
        return f"Processor, {link[1]} {link[2].upper()}bit/s{delay}"
    if re.match(r"t\d-|free-|own-|one-", name):
        return re.sub("-free|^free-", "", name).replace("-", " ").replace("+", " + ")
    first, comma, rest = name.removeprefix("here, ").partition(", ")
    return f"{store.network_title(first).replace('_', ' ')}{comma}{rest}"


def named(panels: Panels) -> Panels:
    """Return the same panels, rows and columns in the words of readers."""
    drawn = {}
    for name, each in panels.items():
        grid, lower, upper = (
            table if table is None else table.rename(index=shown, columns=shown)
            for table in (each.grid, each.lower, each.upper)
        )
        default = each.default and (shown(each.default[0]), shown(each.default[1]))
        drawn[name] = Panel(grid, default, lower, upper, each.neutral)
    return drawn


def better(panels: Panels, between: str = ": ") -> dict[str, str]:
    """Return by panel how many gains are beyond no gain, where there are intervals beyond these."""
    says = {}
    for name, each in panels.items():
        lower, upper = (each.grid if end is None else end for end in (each.lower, each.upper))
        n, wins = int(each.grid.count().sum()), int((lower > 0).sum().sum())
        text = f"up to +{each.grid.max().max():.0f}%"
        if each.lower is not None:
            luck = f" ({0.025 * n:.1f} each by luck)" if between == ": " else ""
            text = f"{int((upper < 0).sum().sum())} worse{luck}"
        says[name] = f"{shown(name)}{between}{wins} of {n} better, {text}"
    return says


def pairs(bars: Mapping[str, pd.DataFrame]) -> dict[str, tuple[pd.DataFrame, str]]:
    """Return for `plots.paired_bars` by heading the bars, both of a pair under one name, and which is which.

    A heading says in how many cases what was chosen makes the iteration shorter than the default.
    """
    drawn = {}
    for name, table in bars.items():
        cases = [label.replace("best: ", "").split(", ", 1) for label in table.index[1::2]]
        names = [f"{shown(case).partition(', ')[0]} {shown(way)}" for case, way in cases]
        default_s, best_s = table.sum(axis=1).to_numpy().reshape(-1, 2).T
        won = f"{np.sum(best_s < default_s)}/{np.sum(best_s != default_s)}"
        renamed = table.set_axis(np.repeat(names, 2)).rename(columns={PARTS[0]: "compute only"})
        whose = "the paper's best" if name == SIMULATED else "best of other rounds"
        drawn[f"{shown(name)}: best wins {won}"] = renamed, f"left: default; right: {whose}"
    return drawn


def timelines(group: Mapping[str, Timeline]) -> dict[str, Timeline]:
    """Return one group of `figure5`, named for readers."""
    words = {name: re.split(r", (?=default|best|starved)|: ", name) for name in group}
    return {
        f"{shown(where)}, {role}: {shown(way)}": group[name]
        for name, (where, role, way) in words.items()
    }
