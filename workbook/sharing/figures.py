"""The sharing paper's figures: what it prints or its model says, and what machines measured.

A configuration is compared with the default of the same round, so that drift cancels; shown is the median
over rounds, with its 95% interval. Of a GPU of one's own: training beside a stand-in for messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.fit import median_interval
from ddlkit.core.timeline import COLUMNS, Timeline
from workbook.common import places, specs
from workbook.common.claims import paper_table
from workbook.common.source import Source, open_sharing
from workbook.plots import Panel
from workbook.sharing import model as sharing_model
from workbook.sharing.claims import BATCHES, DEFAULT, throughput
from workbook.sharing.model import PARTS, RESNET

Tables = Mapping[str, pd.DataFrame]  # by KINDS
KINDS = ("controls", "control", "messages", "kernels", "iterations", "spans")
DEFAULTS = (
    "t2-free-normal",
    DEFAULT,
)  # of gloo, two threads; of the paper's NCCL, two blocks
LARGE_BYTES = (
    25_000_000  # figure 2's message, which is sent in parts: every thread has some
)
OURS = (
    "resnet18",
    "resnet18_64",
)  # of figures 4 to 6, on a GPU; on a processor, small pictures
SIMULATED = "V100S, simulated"
ENDS = ["lower", "upper"]
CELL = ["network", "batch", "plan", "link"]
WHO = {"standin": "stand-in", "copy_engine": "copy engine"}
COPY_WAY = r"_(h2d|d2h|both)$"  # which way a copy engine copies, after its name
SEEN = {  # where controls are read back
    "threads": ["taken_threads"],
    "cores": ["taken_cores"],
    "priority": ["taken_policy", "taken_nice"],
}


def recorded(data: str = "") -> Tables:
    """Return what a machine measured, by its name or directory, else the first that has some, and a GPU."""
    place, tables = open_sharing(data), {}
    for kind in KINDS:
        name = kind if kind == "controls" else f"sharing_{kind}"
        if place and place.has(name):
            tables[kind] = (
                place.rounds(name) if kind == "iterations" else place.table(name)
            )
    for kind, rows in one_gpu(data).items():
        tables[kind] = pd.concat([tables[kind], rows]) if kind in tables else rows
    return tables


def _links(tables: Tables, kind: str) -> Iterator[tuple[str, pd.DataFrame]]:
    for link, rows in tables[kind].groupby("link") if kind in tables else ():
        yield str(link), rows


def default_of(rows: pd.DataFrame) -> str:
    """Return the default among rows with a column ``configuration``; "" where it was not measured."""
    return next((name for name in DEFAULTS if name in set(rows["configuration"])), "")


def over_default(rows: pd.DataFrame, value: str, keys: Sequence[str]) -> pd.DataFrame:
    """Return rows, a round and configuration each, with ``ratio``: value over the round's default's."""
    keys = [*keys, "repeat"]
    each = (
        rows.groupby([*keys, "configuration"], sort=False)[value].mean().reset_index()
    )
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
    gains = summed(
        each.assign(gain=1 / each["ratio"] - 1), [*CELL, "configuration"], "gain"
    )
    return gains.assign(**{name: 100 * gains[name] for name in ("gain", *ENDS)})


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return iterations or gains under DDP's own plan, of one computing thread a rank."""
    return rows[
        (rows["plan"] == "ddp")
        & ~rows["configuration"].str.contains("-omp", regex=False)
    ]


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


def cells(panel: str, rows: pd.DataFrame, value: str, index: str = "") -> pd.DataFrame:
    """Return a heat map, a row a number; without ``index`` rows are parts of the configuration's name."""
    rows = rows if index else one_group(rows)
    names = rows["configuration"]
    parts = names.str.extract(r"(?P<column>t\d)-(?P<row>.*)")
    if index:
        parts = pd.DataFrame({"row": rows[index], "column": names})
    elif not names.str.startswith("t").any():
        parts = names.str.extract(r"(?P<row>\d+)x(?P<column>\d+)").astype(int)
    ends = {end: rows.get(end, np.nan) for end in ENDS}
    order, place = names.map(least_first), pd.factorize(rows[index])[0] if index else 0
    table = parts.assign(
        panel=panel, value=rows[value], **ends, place=place, order=order
    )
    table = table.dropna(subset="value").sort_values(
        ["place", "order"], ignore_index=True
    )
    return table[["panel", "row", "column", "value", *ENDS, "order"]]


def numbers(table: pd.DataFrame) -> pd.DataFrame:
    """Return `cells` as a figure's CSV has them."""
    return table.drop(columns="order")


def figure1(tables: Tables) -> pd.DataFrame:
    """Return what limits a collective, at which level, whether it is offered, and what was read back."""
    columns = ["level", "control", "outcome", "reason"]
    if not {"control", "controls"} <= tables.keys():
        return pd.DataFrame([["", "nothing", "not recorded", "none"]], columns=columns)
    table, rows = (
        tables["controls"][columns],
        tables["control"].query("outcome == 'applied'"),
    )
    words = {
        word: "; ".join(
            sorted(set(rows[seen].astype(str).agg(" ".join, axis=1)) - {"0"})
        )
        for word, seen in SEEN.items()
    }
    control = table["control"].str.extract(f"({'|'.join(SEEN)})", expand=False)
    return table.assign(read_back=control.map(words).fillna(""))


def _paper(name: str) -> pd.DataFrame:
    rows = paper_table("sharing", name)
    return rows.assign(configuration=sharing_model.configurations(rows))


def _gains() -> pd.DataFrame:
    """Return figure 8's gains over the default in per cent, by configuration, network, batch and case."""
    images = throughput().rename_axis("configuration", axis=1)
    gains = 100 * (images.div(images[DEFAULT], axis=0) - 1)
    return _named(gains.stack().rename("gain").reset_index())


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(case=rows["network"] + ", " + rows["batch"].astype(str))


def figure2(tables: Tables) -> pd.DataFrame:
    """Return `cells` of an all-reduce's time over the default's: the paper's, and by link as measured."""
    maps = [cells("paper, 25 MB", _paper("fig02"), "relative_time")]
    for link, rows in _links(tables, "messages"):
        rows = rows[rows["bytes"] == LARGE_BYTES]
        if default_of(rows):
            ratios = summed(
                over_default(rows, "seconds", []), ["configuration"], "ratio"
            )
            maps.append(cells(link, ratios, "ratio"))
    return pd.concat(maps, ignore_index=True)


def figure3(tables: Tables) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return `cells` of kernels' time beside messages over that alone: as they are kept, and as drawn."""
    rows = _paper("fig03").replace("_", " ", regex=True)
    paper = [
        cells(str(name), of, "slowdown")
        for name, of in rows.groupby("kernel", sort=False)
    ]
    ours = []
    for link, each in _links(tables, "kernels"):
        each = each.assign(ratio=each["kernel_beside_s"] / each["kernel_alone_s"])
        ratios = summed(each, ["kernel", "configuration"], "ratio")
        ours.append(cells(link, ratios.sort_values("kernel"), "ratio", "kernel"))
    drawn = pd.concat(
        [cells("paper", rows, "slowdown", "kernel"), *ours], ignore_index=True
    )
    return pd.concat([*paper, *ours], ignore_index=True), drawn


def figure4(tables: Tables) -> pd.DataFrame:
    """Return `cells` of ResNet-18's gain in throughput in per cent, at the batch with most rows."""
    again = _gains().query("network == @RESNET[0] and batch == @RESNET[1]")
    maps = [cells("paper, fig 4", _paper("fig04"), "gain_percent")]
    maps.append(cells("paper, fig 8", again, "gain"))
    for link, rows in _links(tables, "iterations"):
        if len(gains := _of_resnet(rows)):
            maps.append(cells(link, gains, "gain"))
    return pd.concat(maps, ignore_index=True)


def _of(rows: pd.DataFrame, cell: pd.Series) -> pd.DataFrame:
    return rows[(rows[CELL] == [cell[key] for key in CELL]).all(axis=1)]


def _of_resnet(iterations: pd.DataFrame) -> pd.DataFrame:
    gains = throughputs(plain(iterations[iterations["network"].isin(OURS)]))
    return (
        gains[gains["batch"] == gains["batch"].value_counts().idxmax()]
        if len(gains)
        else gains
    )


def figure8(tables: Tables) -> pd.DataFrame:
    """Return `cells` of all gains in per cent; of configurations that half of the cases have."""
    maps = [cells("paper", _gains(), "gain", "case")]
    for link, rows in _links(tables, "iterations"):
        gains = _named(throughputs(plain(rows)))
        shares = (
            gains.groupby("configuration")["case"].nunique() / gains["case"].nunique()
        )
        if gains["network"].nunique() > 1:
            often = gains[gains["configuration"].map(shares) >= 0.5]
            maps.append(cells(link, often.sort_values("case"), "gain", "case"))
    return pd.concat(maps, ignore_index=True)


def figure5(tables: Tables) -> list[dict[str, Timeline]]:
    """Return timelines of ResNet-18, default, best (of odd rounds) and starved: by the model, and by link."""
    model, roles = sharing_model.fitted("both"), ("default", "best", "starved")
    simulated = {
        f"V100S, {role}: {name}": model.iteration(*RESNET, name).timeline()
        for role, name in zip(roles, (DEFAULT, "1x256", "1x64"), strict=True)
    }
    groups = [simulated]
    for link, rows in _links(tables, "iterations") if "spans" in tables else ():
        gains = one_group(_of_resnet(rows[rows["repeat"] % 2 == 1]))
        if link.startswith("emulated") or gains.empty:
            continue
        best = gains.loc[gains["gain"].idxmax(), "configuration"]
        ways = default_of(gains), best, min(gains["configuration"], key=least_first)
        first = _of(tables["spans"], gains.iloc[0])
        first = first.drop_duplicates(
            ["configuration", "task", "rank"]
        )  # of several sessions
        spans = {
            name: Timeline(**{column: each[column].to_numpy() for column in COLUMNS})
            for name, each in first.groupby("configuration")
        }
        if {*ways} <= spans.keys():
            pairs = zip(roles, ways, strict=True)
            groups.append({f"{link}, {role}: {way}": spans[way] for role, way in pairs})
    return groups


def spans(groups: Sequence[Mapping[str, Timeline]]) -> pd.DataFrame:
    """Return what figure 5 is drawn of: every link's timelines, and what the text prints."""
    each = [
        line.to_frame().assign(case=name)
        for lines in groups
        for name, line in lines.items()
    ]
    return pd.concat([*each, sharing_model.printed_parts()])


def figure6(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return parts of an iteration of ResNet-18 by batch, default and best: simulated, and measured."""
    bars = {
        SIMULATED: sharing_model.with_best({str(n): (RESNET[0], n) for n in BATCHES})
    }
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
        bars |= parts(
            link, rows[rows["batch"] == rows["network"].map(middle)], "network"
        )
    return bars


def parts(link: str, iterations: pd.DataFrame, by: str) -> dict[str, pd.DataFrame]:
    """Return PARTS (s) of default and best of each case: means of even rounds, best of odd ones."""
    rows, bars = plain(iterations), [pd.DataFrame()]
    odd, default = rows["repeat"] % 2 == 1, default_of(rows)
    gains, even = one_group(throughputs(rows[odd])), rows[~odd]
    best = gains.loc[gains.groupby(CELL, sort=False)["gain"].idxmax()].sort_values(by)
    for _, row in best.iterrows():
        chosen = row["configuration"]
        cell = _of(even, row)
        cell = cell[cell["configuration"].isin([default, chosen])]
        count = cell.groupby("repeat")["configuration"].transform("nunique")
        cell = cell[count == len({default, chosen})]
        alone_s = cell["iteration_s"] - cell["communication_s"]
        columns = alone_s, cell["overlap_s"], cell["exposed_communication_s"]
        means = (
            pd.concat(columns, axis=1, keys=PARTS).groupby(cell["configuration"]).mean()
        )
        if len(means):
            label = f"{row[by]}, best: {'default' if chosen == default else chosen}"
            bars.append(
                means.loc[[default, chosen]].set_axis([f"{row[by]}, default", label])
            )
    return {f"here, {link}": pd.concat(bars)} if len(bars) > 2 else {}


def with_saved(
    bars: Mapping[str, pd.DataFrame], saved_ms: pd.DataFrame
) -> pd.DataFrame:
    """Return what figure 6 is drawn of: bars, in the paper's best ones what they save, a row of its text."""
    table = pd.concat(bars, names=["where", "case"]).reset_index()
    best = {
        f"{batch}, {sharing_model.best('ResNet-18', batch)}": batch for batch in BATCHES
    }
    batches = table["case"].map(best).where(table["where"] == SIMULATED)
    columns = saved_ms.add_prefix("saved ").add_suffix(" [ms]")
    both = pd.concat([table, columns.reindex(batches).reset_index(drop=True)], axis=1)
    rest = saved_ms[~saved_ms.index.isin(BATCHES)]["printed"]
    more = {"where": "paper", "case": [f"{batch}, best" for batch in rest.index]}
    return pd.concat(
        [both, pd.DataFrame(more | {"saved printed [ms]": rest})], ignore_index=True
    )


def with_printed(
    bars: Mapping[str, pd.DataFrame], printed: pd.DataFrame
) -> pd.DataFrame:
    """Return what figure 7 is drawn of: bars, with the times that the text prints of the paper's."""
    table = pd.concat(bars, names=["where", "case"]).reset_index()
    cases = printed["network"] + ", " + printed["configuration"]
    wide = printed.assign(case=cases).pivot(
        index="case", columns="quantity", values="paper"
    )
    wide = wide.add_prefix("printed ").add_suffix(" [ms]")
    of_paper = table["case"].where(table["where"] == SIMULATED)
    return pd.concat([table, wide.reindex(of_paper).reset_index(drop=True)], axis=1)


PAPER = {
    "V100S": "V100S, by the model",
    SIMULATED: "V100S, by the model",
    "relu": "ReLU",
}
PAPER |= {"paper": "Paper, two V100S", "paper, 25 MB": "Paper, 25 MB"}
PAPER |= {f"paper, fig {n}": f"Paper, figure {n}" for n in (4, 8)}
_LINK = re.compile(r"(?:lab|emulated):(\d+)([mg])bit(?:-delay(\d+)ms)?")


def shown(name: Any) -> Any:
    """Return a link, a configuration, a network, a batch, both, or a kernel, as readers know it.

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
    return f"{specs.network_title(first).replace('_', ' ')}{comma}{rest}"


def largest(table: pd.DataFrame) -> str:
    """Return the largest ratio of each panel of `cells`, in parentheses where its interval holds 1."""
    rows = table.loc[table.groupby("panel", sort=False)["value"].idxmax()]
    unsure = (rows["lower"] < 1) & (rows["upper"] > 1)
    return ", ".join(
        map(str.format, np.where(unsure, "({:.2f})", "{:.2f}"), rows["value"])
    )


def maps(table: pd.DataFrame, between: str = "") -> dict[str, Panel]:
    """Return heat maps of `cells` by heading, which after ``between`` counts gains beyond their intervals."""
    drawn = {}
    for name, rows in table.groupby("panel", sort=False):
        says = shown(name)
        if between:
            low, high = (rows[end].fillna(rows["value"]) for end in ENDS)
            says += (
                f"{between}{sum(low > 0)} of {len(rows)} better, {sum(high < 0)} worse"
            )
        rows = rows.assign(row=rows["row"].map(shown), column=rows["column"].map(shown))
        order = rows["row"].unique(), rows.sort_values("order")["column"].unique()
        axes = (
            ("blocks", "threads")
            if isinstance(order[0][0], int | np.integer)
            else ("", "")
        )
        wide = rows.pivot(
            index="row", columns="column", values=["value", *ENDS]
        ).astype(float)
        wide = wide.rename_axis(index=axes[0], columns=["", axes[1]])
        drawn[says] = Panel(*(wide[end].loc[order] for end in ("value", *ENDS)))
    return drawn


def pairs(bars: Mapping[str, pd.DataFrame]) -> dict[str, tuple[pd.DataFrame, str]]:
    """Return for `plots.paired_bars` by heading, which counts wins, the bars and which of a pair is which."""
    drawn = {}
    for name, table in bars.items():
        cases = [
            label.replace("best: ", "").split(", ", 1) for label in table.index[1::2]
        ]
        names = [
            f"{shown(case).partition(', ')[0]} {shown(way)}" for case, way in cases
        ]
        default_s, best_s = table.sum(axis=1).to_numpy().reshape(-1, 2).T
        won = f"best wins {sum(best_s < default_s)}/{sum(best_s != default_s)}"
        renamed = table.set_axis(np.repeat(names, 2)).rename(
            columns={PARTS[0]: "compute only"}
        )
        whose = "the paper's best" if name == SIMULATED else "best of other rounds"
        drawn[f"{shown(name)}: {won}"] = renamed, f"left: default; right: {whose}"
    return drawn


def timelines(group: Mapping[str, Timeline]) -> dict[str, Timeline]:
    """Return one group of `figure5`, named for readers."""
    words = [re.split(r", (?=default|best|starved)|: ", name) for name in group]
    names = [f"{shown(where)}, {role}: {shown(way)}" for where, role, way in words]
    return dict(zip(names, group.values(), strict=True))


def one_gpu(data: str = "") -> dict[str, pd.DataFrame]:
    """Return iterations and kernels of a recording, by name or directory, else the first that has such."""
    named = Path(data) if "/" in data else places.RECORDED / data
    for path in [*([named] if data else []), *places.list_recorded()]:
        source = Source((path,))
        if source.has("sharing") and "cuda" in set(source.table("sharing")["device"]):
            tables = {"iterations": _iterations(source.table("sharing"))}
            if source.has("contention"):
                tables["kernels"] = _kernels(source.table("contention"))
            return tables
    return {}


def _iterations(sharing: pd.DataFrame) -> pd.DataFrame:
    """Return a ``sharing`` table's single precision of at most two ranks as iterations, a round a sample."""
    rows = sharing.query(
        "precision == 'fp32' and ranks <= 2 and quantity == 'iteration'"
    )
    rows = rows.rename(columns={"sample": "repeat", "seconds": "iteration_s"})
    last = rows["policy"].str.partition("_")[2]
    name = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    return rows.assign(
        plan="ddp",
        link=[_at("stand-in", rate) for rate in rows["bytes_per_s_asked"]],
        configuration=name.where(last == "", name + "+" + last),
        overlap_s=(rows["communication_s"] - rows["exposed_communication_s"]).clip(
            lower=0
        ),
    )


def _kernels(contention: pd.DataFrame) -> pd.DataFrame:
    """Return a ``contention`` table as kernels; a link is who communicates, at which rate."""
    rows = contention.query("kernel != 'idle' and fifo_bytes == 0")
    by = ["kernel", "ranks"]
    alone_s = rows[rows["communication"] == "none"].groupby(by)["seconds"].median()
    rows = rows.join(alone_s.rename("kernel_alone_s"), on=by)
    way = rows["communication"].str.extract(COPY_WAY, expand=False)
    who = rows["communication"].str.replace(COPY_WAY, "", regex=True).map(WHO)
    rows = rows.assign(who=who, way=way, kernel_beside_s=rows["seconds"]).dropna(
        subset="who"
    )
    shape = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    links = [*map(_at, rows["who"], rows["bytes_per_s_asked"])]
    return rows.assign(configuration=rows["way"].fillna(shape), link=links)


def _at(who: str, rate: float) -> str:
    if who != WHO["standin"]:
        return who
    return f"{who}, {rate / 1e9:g} GB/s" if rate else f"{who}, full speed"
