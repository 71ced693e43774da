"""What `ddlkit record --suite gpu` measured on a GPU of one's own: its training, and tables for `sharing`.

Beside a stand-in for messages, which takes of a GPU what NCCL would take, nobody is waited for.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ddlkit import store
from ddlkit.report import compare
from ddlkit.report.source import Source

WHO = {
    "standin": "stand-in",
    "copy_engine": "copy engine",
    "nccl_one_gpu": "two ranks of NCCL on one GPU",
}
_WAY = r"_(h2d|d2h|both)$"  # which way a copy engine copies, after its name


def training_shares(source: Source) -> pd.DataFrame:
    """Return in % what training reaches of a GPU's fastest matrix product, by network and precision."""
    rows = compare.steps(source).query("device == 'cuda' and ranks == 1").dropna(subset="c")
    largest = rows[rows["batch"] == rows.groupby("network")["batch"].transform("max")]
    return 100 * largest.pivot_table("c", largest["network"].map(store.network_title), "precision")


def one_gpu(data: str = "") -> dict[str, pd.DataFrame]:
    """Return iterations and kernels of a recording, by name or directory, else the first that has such."""
    named = Path(data) if "/" in data else store.RECORDED / data
    for path in [*([named] if data else []), *store.list_recorded()]:
        source = Source((path,))
        if source.has("sharing") and "cuda" in set(source.table("sharing")["device"]):
            tables = {"iterations": iterations(source.table("sharing"))}
            if source.has("contention"):
                tables["kernels"] = kernels(source.table("contention"))
            return tables
    return {}


def iterations(sharing: pd.DataFrame) -> pd.DataFrame:
    """Return a ``sharing`` table's single precision of at most two ranks as iterations, a round a sample."""
    rows = sharing.query("precision == 'fp32' and ranks <= 2 and quantity == 'iteration'")
    rows = rows.rename(columns={"sample": "repeat", "seconds": "iteration_s"})
    last = rows["policy"].str.partition("_")[2]
    name = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    return rows.assign(
        plan="ddp",
        link=[_at("stand-in", rate) for rate in rows["bytes_per_s_asked"]],
        configuration=name.where(last == "", name + "+" + last),
        overlap_s=(rows["communication_s"] - rows["exposed_communication_s"]).clip(lower=0),
    )


def kernels(contention: pd.DataFrame) -> pd.DataFrame:
    """Return a ``contention`` table as kernels; a link is who communicates, at which rate."""
    rows = contention.query("kernel != 'idle' and fifo_bytes == 0")
    by = ["kernel", "ranks"]
    alone_s = rows[rows["communication"] == "none"].groupby(by)["seconds"].median()
    rows = rows.join(alone_s.rename("kernel_alone_s"), on=by)
    way = rows["communication"].str.extract(_WAY, expand=False)
    who = rows["communication"].str.replace(_WAY, "", regex=True).map(WHO)
    rows = rows.assign(who=who, way=way, kernel_beside_s=rows["seconds"]).dropna(subset="who")
    shape = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    links = [*map(_at, rows["who"], rows["bytes_per_s_asked"])]
    return rows.assign(configuration=rows["way"].fillna(shape), link=links)


def _at(who: str, rate: float) -> str:
    if who != WHO["standin"]:
        return who
    return f"{who}, {rate / 1e9:g} GB/s" if rate else f"{who}, full speed"
