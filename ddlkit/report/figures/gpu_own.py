"""What `ddlkit record --suite gpu` measured on a GPU of one's own: panels of its own, and as sharing figures.

A machine may have been taken away early: what is missing leaves its panel out. Training and kernels beside a
stand-in for messages (`ddlkit.run.measure.standin`) are shown as the sharing paper's figures: it takes of a
GPU what NCCL would take, and nobody is waited for. Kernels beside NCCL on one GPU, and beside the copy
engine, are shown with them.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ddlkit import store
from ddlkit.report import compare
from ddlkit.report.figures.sharing_measured import Recording
from ddlkit.report.source import Source, machine_of

Panels = dict[str, tuple[str, pd.DataFrame]]
"""By heading, which says what is found, the label of an axis and a table: a row a case, a column a series."""
WHO = {
    "standin": "stand-in",
    "nccl_one_gpu": "two ranks of NCCL on one GPU",
    "copy_engine": "copy engine",
}
_WAY = r"_(h2d|d2h|both)$"  # which way a copy engine copies, after its name


def recorded() -> dict[str, Panels]:
    """Return by machine the `panels` of each recording under data/recorded that has any."""
    found = {path.name: panels(Source((path,))) for path in store.list_recorded()}
    return {name: drawn for name, drawn in found.items() if drawn}


def panels(source: Source) -> Panels:
    """Return kernels beside messages, and the share of a GPU that training reaches."""
    where = machine_of(source.directories[0])
    found: Panels = {}
    if source.has("contention") and len(times := _slowdowns(source)):
        says = f"kernels beside messages: up to {times.max().max():.0f}% longer"
        found[f"{where}, {says}"] = "longer than alone [%]", times
    if source.has("layers") and source.has("peaks") and len(shares := _shares(source)):
        ends = shares.min().min(), shares.max().max()
        says = "training: {:.0f} to {:.0f}% of the fastest product".format(*ends)
        found[f"{where}, {says}"] = "share of the fastest matrix product [%]", shares
    return found


def _slowdowns(source: Source) -> pd.DataFrame:
    """Return by kernel and who communicates by how many per cent it takes longer; medians over settings."""
    slow = compare.slowdowns(source.table("contention"))
    slow = slow[(slow["device"] == "cuda") & (slow["kernel"] != "idle")]
    columns = [slow[name].str.replace("_", " ") for name in ("kernel", "communication")]
    times = slow.pivot_table("slowdown", *columns, aggfunc="median")
    return 100 * (times.rename(columns={"standin": "stand-in"}) - 1)


def _shares(source: Source) -> pd.DataFrame:
    """Return `compare.steps`'s c in per cent, by network, at its largest batch, and precision."""
    rows = compare.steps(source).query("device == 'cuda' and ranks == 1").dropna(subset="c")
    largest = rows[rows["batch"] == rows.groupby("network")["batch"].transform("max")]
    return 100 * largest.pivot_table("c", largest["network"].map(store.network_title), "precision")


def numbers(drawn: Panels) -> pd.DataFrame:
    """Return what `panels` show, a row a number: axis, case, series, value."""
    tables = []
    for label, rows in drawn.values():
        long = rows.rename_axis(index="case", columns="series").stack().rename("value")
        tables.append(long.reset_index().assign(axis=label))
    return pd.concat(tables, ignore_index=True)[["axis", "case", "series", "value"]]


# -- as the sharing paper's figures --------------------------------------------------------------


def one_gpu(data: str = "") -> Recording | None:
    """Return what a GPU recorded beside the stand-in, as tables of `sharing_measured`; None without any.

    data : its name, or directory; else the first recording that has such training
    """
    named = store.RECORDED / data if data and "/" not in data else Path(data)
    for path in [*([named] if data else []), *store.list_recorded()]:
        source = Source((path,))
        if not source.has("sharing") or "cuda" not in set(source.table("sharing")["device"]):
            continue
        tables = {"iterations": iterations(source.table("sharing"))}
        if source.has("contention"):
            tables["kernels"] = kernels(source.table("contention"))
        return Recording(source, tables)
    return None


def iterations(sharing: pd.DataFrame) -> pd.DataFrame:
    """Return a ``sharing`` table as one of iterations: `sharing_measured.CELL`, configuration, repeat, times.

    Of two emulated ranks and single precision; the link is the stand-in and its rate, a round a sample.
    """
    rows = sharing[(sharing["precision"] == "fp32") & (sharing["ranks"] <= 2)]
    rows = rows.rename(columns={"sample": "repeat", "seconds": "iteration_s"})
    rows = rows[rows["quantity"] == "iteration"].reset_index(drop=True)
    last = rows["policy"].str.partition("_")[2]
    name = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    return rows.assign(
        plan="ddp",
        openmp=1,
        link=[_at("stand-in", rate) for rate in rows["bytes_per_s_asked"]],
        configuration=name.where(last == "", name + "+" + last),
        overlap_s=(rows["communication_s"] - rows["exposed_communication_s"]).clip(lower=0),
    )


def kernels(contention: pd.DataFrame) -> pd.DataFrame:
    """Return a ``contention`` table as one of kernels: link (who communicates, at which rate), times."""
    rows = contention.query("kernel != 'idle' and fifo_bytes == 0")
    by = ["kernel", "ranks"]
    alone_s = rows[rows["communication"] == "none"].groupby(by)["seconds"].median()
    way = rows["communication"].str.extract(_WAY, expand=False)
    who = rows["communication"].str.replace(_WAY, "", regex=True).map(WHO)
    shape = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    rates = zip(who, rows["bytes_per_s_asked"], strict=True)
    rows = rows.join(alone_s.rename("kernel_alone_s"), on=by).rename(
        columns={"seconds": "kernel_beside_s"}
    )
    links = [_at(name, rate) if isinstance(name, str) else None for name, rate in rates]
    return rows.assign(configuration=way.fillna(shape), link=links).dropna(subset="link")


def _at(who: str, rate: float) -> str:
    if who != WHO["standin"]:
        return who
    return f"{who}, {rate / 1e9:g} GB/s" if rate else f"{who}, full speed"
