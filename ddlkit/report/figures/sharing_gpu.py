"""The sharing paper's figures on one GPU: real kernels and training beside a stand-in for its messages.

The stand-in is a kernel of so many blocks and threads that moves the bytes which each rank of an all-reduce
moves, at full speed or at a rate (`ddlkit.run.measure.standin`). It takes of a GPU what NCCL would take, and
nobody is waited for. So its panels say "stand-in". Kernels beside NCCL on one GPU, and beside the copy
engine, are shown beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from ddlkit import store
from ddlkit.report.figures import sharing_measured, sharing_panels
from ddlkit.report.panels import ENDS, Panel
from ddlkit.report.source import Source, machine_of

DEFAULT = (2, 256)
"""Blocks and threads that NCCL took of itself in the paper."""
RESNET = ("resnet18", 32)
"""Network and batch of figures 2 and 4."""
OVER = {
    "standin": "stand-in",
    "nccl_one_gpu": "two ranks of NCCL on one GPU",
    "copy_engine": "copy engine",
}
"""What figure 3 calls who communicates; NCCL between GPUs has panels of its own (`sharing_panels`)."""


def trained(sharing: pd.DataFrame) -> pd.DataFrame:
    """A ``sharing`` table as one of iterations: CELL, configuration, openmp, repeat, and times in seconds.

    Of two emulated ranks and single precision; the link is the stand-in and its rate, a round a sample.
    ``messages_s`` : the same messages without training, in the same round
    """
    own = sharing[(sharing["precision"] == "fp32") & (sharing["ranks"] <= 2)]
    own = own.rename(columns={"sample": "repeat", "seconds": "iteration_s"})
    keys = ["network", "batch", "repeat"]
    compute_s = own[own["quantity"] == "compute"].groupby(keys)["iteration_s"].median()
    sent = [*keys, "policy", "blocks", "threads", "bytes_per_s_asked"]
    alone = own[own["quantity"] == "communication"].groupby(sent)["communication_s"].median()
    rows = own[own["quantity"] == "iteration"].join(compute_s.rename("compute_s"), on=keys)
    rows = rows.join(alone.rename("messages_s"), on=sent)
    last = rows["policy"].str.partition("_")[2]
    name = rows["blocks"].astype(str) + "x" + rows["threads"].astype(str)
    return rows.assign(
        plan="ddp",
        openmp=1,
        link=[_at(OVER["standin"], rate) for rate in rows["bytes_per_s_asked"]],
        configuration=name.where(last == "", name + "+" + last),
        overlap_s=(rows["communication_s"] - rows["exposed_communication_s"]).clip(lower=0),
    ).reset_index(drop=True)


WAY = r"_(h2d|d2h|both)$"
"""Which way a copy engine copies, after its name."""


def _at(who: str, bytes_per_s: float) -> str:
    if bytes_per_s:
        return f"{who}, {bytes_per_s / 1e9:g} GB/s"
    return f"{who}, full speed" if who == OVER["standin"] else who


@dataclass(frozen=True, eq=False)
class OneGpu:
    """What one machine recorded of it; without a source no figure has a panel."""

    source: Source | None

    @property
    def machine(self) -> str:
        """Its name; "" without one."""
        return machine_of(self.source.directories[0]) if self.source else ""

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Training beside the stand-in, as `trained` has it; none where DEFAULT was not recorded."""
        if self.source is None or not self.source.has("sharing"):
            return pd.DataFrame()
        found = trained(self.source.table("sharing"))
        return found if "x".join(map(str, DEFAULT)) in set(found["configuration"]) else found[:0]

    def figure2(self) -> dict[str, Panel]:
        """Messages of ResNet-18 alone over those of DEFAULT, by rate."""
        if self.rows.empty:
            return {}
        found = sharing_measured.over_default(_resnet(self.rows), "messages_s", ["link"])
        return {str(link): _grid(own, "ratio") for link, own in found.groupby("link")}

    def figure3(self) -> dict[str, Panel]:
        """Kernels beside communication over their time alone, by who communicates and its rate."""
        if self.source is None or not self.source.has("contention"):
            return {}
        rows = self.source.table("contention").query("kernel != 'idle' and fifo_bytes == 0")
        own = ["kernel", "ranks"]
        alone_s = rows[rows["communication"] == "none"].groupby(own)["seconds"].median()
        way = rows["communication"].str.extract(WAY, expand=False)
        who = rows["communication"].str.replace(WAY, "", regex=True)
        threads = ("x" + rows["threads"].astype(str)).where(rows["threads"] > 0, "")
        rows = rows.join(alone_s.rename("alone_s"), on=own).assign(
            ratio=lambda rows: rows["seconds"] / rows["alone_s"],
            configuration=way.fillna(rows["blocks"].astype(str) + threads),
            who=who.map(OVER),
        )
        default, found = "x".join(map(str, DEFAULT)), {}
        for (who, rate), part in rows.groupby(["who", "bytes_per_s_asked"]):
            order = part.sort_values(["blocks", "threads"])["configuration"].unique()
            ratios = sharing_measured.summed(part, ["kernel", "configuration"], "ratio")
            grid, lower, upper = (
                ratios.pivot(index="kernel", columns="configuration", values=name)[order]
                for name in ("ratio", *ENDS)
            )
            named = grid.rename_axis(index="", columns="")
            framed = (None, default) if default in order else None
            found[_at(str(who), float(rate))] = Panel(named, framed, lower, upper, neutral=1.0)
        return found

    def figure4(self) -> dict[str, Panel]:
        """Gain of ResNet-18 over DEFAULT in per cent, by rate."""
        if self.rows.empty:
            return {}
        gains = sharing_panels.in_percent(sharing_measured.throughputs(_resnet(self.rows)))
        return {str(link): _grid(own, "gain") for link, own in gains.groupby("link")}

    def figure6(self) -> dict[str, pd.DataFrame]:
        """Parts of an iteration of ResNet-18 by batch, default and best, by rate."""
        rows = self.rows
        return {} if rows.empty else sharing_panels.parts(_of_resnet(rows), "batch")

    def figure7(self) -> dict[str, pd.DataFrame]:
        """The same of each network at its middle batch."""
        return {} if self.rows.empty else sharing_panels.parts_of_networks(self.rows)

    def figure8(self) -> dict[str, Panel]:
        """Gain over DEFAULT of every network and batch under every configuration, in per cent."""
        return {} if self.rows.empty else sharing_panels.gains(self.rows)


def recorded(data: str = "") -> OneGpu:
    """Of the GPU of that name, or in that directory, else of the first that has such training."""
    own = store.RECORDED / data if data and "/" not in data else Path(data)
    for path in [*([own] if data else []), *store.list_recorded()]:
        source = Source((path,))
        if source.has("sharing") and "cuda" in set(source.table("sharing")["device"]):
            return OneGpu(source)
    return OneGpu(None)


def _of_resnet(rows: pd.DataFrame) -> pd.DataFrame:
    name = RESNET[0] if RESNET[0] in set(rows["network"]) else rows["network"].iloc[0]
    return rows[rows["network"] == name]


def _resnet(rows: pd.DataFrame) -> pd.DataFrame:
    """Of RESNET, or else of the first network at its first batch."""
    own = _of_resnet(rows)
    batch = RESNET[1] if RESNET[1] in set(own["batch"]) else own["batch"].iloc[0]
    return own[own["batch"] == batch]


def _grid(rows: pd.DataFrame, value: str) -> Panel:
    one = rows[~rows["configuration"].str.contains("+", regex=False)]
    shape = one["configuration"].str.split("x", expand=True).astype(int)
    one = one.assign(blocks=shape[0], threads=shape[1])
    grid, lower, upper = (sharing_measured.paper_grid(one, name) for name in (value, *ENDS))
    framed = DEFAULT if DEFAULT[0] in grid.index and DEFAULT[1] in grid.columns else None
    return Panel(grid, framed, lower, upper, neutral=sharing_panels.NEUTRAL[value])
