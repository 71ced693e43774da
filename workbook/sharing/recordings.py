"""What machines measured of the sharing paper's figures, as several of them read it.

A configuration is compared with the default of the same round, so that drift cancels;
shown is the median over rounds, with its 95% interval. A single GPU trains beside a
stand-in for messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from ddlkit.core.fit import median_interval
from workbook.common import places
from workbook.common.source import Source, open_sharing
from workbook.sharing.printed import DEFAULT

Tables = Mapping[str, pd.DataFrame]
"""What a machine measured, by one of KINDS."""
KINDS = ("controls", "control", "messages", "kernels", "iterations", "spans")
DEFAULTS = ("t2-free-normal", DEFAULT)
"""Of gloo two threads; of the paper's NCCL two blocks."""
OURS = ("resnet18", "resnet18_64")
"""The network of figures 4 to 6: on a GPU; on a processor, with small pictures."""
ENDS = ["lower", "upper"]
CELL = ["network", "batch", "plan", "link"]
WHO = {"standin": "stand-in", "copy_engine": "copy engine"}
COPY_WAY = r"_(h2d|d2h|both)$"  # which way a copy engine copies, after its name


# -- what is there -------------------------------------------------------------------------------


def recorded(data: str = "") -> Tables:
    """Return what a machine measured: training beside its messages, and on a single GPU.

    data : its name or directory; without it, the first of each that is recorded
    """
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


def one_gpu(data: str = "") -> dict[str, pd.DataFrame]:
    """Return iterations and kernels of a single GPU.

    data : a recording's name or directory; without it, the first that has such
    """
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
    """Return the iterations of a ``sharing`` table, of which each sample is a round.

    They are of single precision and at most two ranks.
    """
    rows = sharing.query(
        "precision == 'fp32' and ranks <= 2 and quantity == 'iteration'"
    )
    rows = rows.rename(columns={"sample": "repeat", "seconds": "iteration_s"})
    last = rows["policy"].str.partition("_")[2]
    name = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    overlap_s = rows["communication_s"] - rows["exposed_communication_s"]
    return rows.assign(
        plan="ddp",
        link=[_at("stand-in", rate) for rate in rows["bytes_per_s_asked"]],
        configuration=name.where(last == "", name + "+" + last),
        overlap_s=overlap_s.clip(lower=0),
    )


def _kernels(contention: pd.DataFrame) -> pd.DataFrame:
    """Return a ``contention`` table as kernels; a link is who communicates, and how fast."""
    rows = contention.query("kernel != 'idle' and fifo_bytes == 0")
    by = ["kernel", "ranks"]
    alone_s = rows[rows["communication"] == "none"].groupby(by)["seconds"].median()
    rows = rows.join(alone_s.rename("kernel_alone_s"), on=by)
    way = rows["communication"].str.extract(COPY_WAY, expand=False)
    who = rows["communication"].str.replace(COPY_WAY, "", regex=True).map(WHO)
    rows = rows.assign(who=who, way=way, kernel_beside_s=rows["seconds"])
    rows = rows.dropna(subset="who")
    shape = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    links = [*map(_at, rows["who"], rows["bytes_per_s_asked"])]
    return rows.assign(configuration=rows["way"].fillna(shape), link=links)


def _at(who: str, rate: float) -> str:
    if who != WHO["standin"]:
        return who
    return f"{who}, {rate / 1e9:g} GB/s" if rate else f"{who}, full speed"


# -- which rows ----------------------------------------------------------------------------------


def by_link(tables: Tables, kind: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Give each link on which a kind was measured, and its rows."""
    for link, rows in tables[kind].groupby("link") if kind in tables else ():
        yield str(link), rows


def default_of(rows: pd.DataFrame) -> str:
    """Return the default among rows with a column ``configuration``.

    It is "" where the default was not measured.
    """
    return next((name for name in DEFAULTS if name in set(rows["configuration"])), "")


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return iterations or gains under DDP's own plan, of one computing thread a rank."""
    return rows[
        (rows["plan"] == "ddp")
        & ~rows["configuration"].str.contains("-omp", regex=False)
    ]


def one_group(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of which all messages have the same resources."""
    return rows[~rows["configuration"].str.contains("+", regex=False)]


def of_cell(rows: pd.DataFrame, cell: pd.Series) -> pd.DataFrame:
    """Return rows of the same network, batch, plan and link as a row."""
    return rows[(rows[CELL] == [cell[key] for key in CELL]).all(axis=1)]


def least_first(name: str) -> tuple[int, ...]:
    """Order configurations by what they take from compute; also without their threads."""
    first, last, _ = name.partition("+")
    words = re.fullmatch(r"(?:t(\d)-)?(free|own|one)-(\w+)(-omp2)?", first)
    if words is None:
        return bool(last), *map(int, re.findall(r"\d+", first))
    cores, priority = ("free", "own", "one"), ("idle", "nice10", "normal", "raised")
    place = cores.index(words[2]), priority.index(words[3]), int(words[1] or 0)
    return bool(last), bool(words[4]), *place


# -- medians over rounds -------------------------------------------------------------------------


def over_default(rows: pd.DataFrame, value: str, keys: Sequence[str]) -> pd.DataFrame:
    """Return a row per round and configuration, with ``ratio``.

    It is value over that of the round's default.
    """
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
    """Return training's ``gain`` over the default of the same round, in per cent.

    Its interval has the ends ``lower`` and ``upper``.
    """
    each = over_default(iterations, "iteration_s", CELL)
    gains = summed(
        each.assign(gain=1 / each["ratio"] - 1), [*CELL, "configuration"], "gain"
    )
    return gains.assign(**{name: 100 * gains[name] for name in ("gain", *ENDS)})


def resnet_gains(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the `throughputs` of OURS at the batch with most rows."""
    gains = throughputs(plain(iterations[iterations["network"].isin(OURS)]))
    if gains.empty:
        return gains
    return gains[gains["batch"] == gains["batch"].value_counts().idxmax()]
