"""Communication time by phase, as Figures 5 and 7 show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.units import KB, KIB
from ddlkit.model.predictor import plan_of
from workbook import plots
from workbook.common.claims import prose
from workbook.common.specs import network_title
from workbook.osf.cluster import NETWORK_BYTES_PER_S, TWO, PaperSetting
from workbook.osf.equations import PHASES, breakdown
from workbook.osf.frames import rows_of, tidy
from workbook.osf.lab import Lab, buffer_of
from workbook.validate.accuracy import mean_difference

KEYS = ["network", "workers", "buffer_bytes", "slowest"]
SLOW_RANK = 1.1
"""How many times as long the slow one of unequal workers takes to compute."""


def modelled(
    setting: PaperSetting,
    network: str,
    slowest: float,
    workers: int,
    buffer_bytes: int = 0,
) -> dict[str, float]:
    """Return seconds of each phase; an agreement takes one round trip to the coordinator."""
    workload, plan, waited_s = setting.with_buffer(network, buffer_bytes)
    agreed_s = prose("osf")["fig10-bdp"] * KB / NETWORK_BYTES_PER_S
    return breakdown(
        workload,
        plan,
        setting.cost(workers),
        waited_s=waited_s,
        slowest=slowest,
        negotiate_s=agreed_s,
    )


def shares(
    of: Callable[..., dict[str, float]], cases: Mapping[str, Sequence[Any]]
) -> pd.DataFrame:
    """Return seconds of each phase in each case, and as ``model`` its share of all communication."""
    frame = tidy(of, cases, "phase", "seconds")
    whole = frame.groupby([*cases])["seconds"].transform("sum")
    return frame.assign(model=frame["seconds"] / whole)


def in_lab(
    lab: Lab, *, negotiated: bool = True, first: str = "ALLREDUCE"
) -> pd.DataFrame:
    """Return one row per case and phase, of rank 0: seconds, and shares of the communication time.

    first : the phase that counts where two happen at once
    """
    tables = {}
    for case in lab.cases(negotiated=negotiated):
        if place := buffer_of(case):
            messages, measured = lab.calibration.of_case(case), lab.phases(case, first)
            agreed_s = float(messages.cost(KIB)) if negotiated else 0.0  # the smallest
            model = breakdown(
                lab.workload(case),
                plan_of(case),
                messages.cost,
                slowest=case.straggler,
                link=messages.link,
                negotiate_s=agreed_s,
            )
            columns = {"model_s": pd.Series(model), "measured_s": measured.mean()}
            table = pd.DataFrame(columns).assign(
                repeatability_s=measured.agg(mean_difference)
            )
            for name in ("model", "measured"):
                table[name] = table[f"{name}_s"] / table[f"{name}_s"].sum()
            tables[place[0], case.workers, place[1], case.straggler] = table
    return pd.concat(tables, names=[*KEYS, "phase"]).reset_index()


def draw(frame: pd.DataFrame, by: str, label: str, said: str) -> Figure:
    """Draw phases in %, stacked: of each network and ``place``, by model, or beside the measured."""
    places, both = (
        list(dict.fromkeys(frame["place"])),
        "left bars: model, right bars: lab",
    )
    with plots.sheet(
        said, columns=len(TWO), rows=len(places), height=7.0, sharey=True
    ) as (figure, axes):
        for ax, (place, network) in zip(axes.flat, product(places, TWO), strict=True):
            rows = rows_of(frame, network=network, place=place)
            names = list(dict.fromkeys(rows["bar"]))
            values = ["model", "measured"][: 1 + rows["measured"].notna().any()]
            tables = rows.pivot(index="bar", columns="phase", values=values)
            bars = [
                tables[value].loc[[name], list(PHASES)]
                for name in names
                for value in values
            ]
            pairs = both if len(values) > 1 else ""
            table = 100 * pd.concat(bars)
            plots.bars(ax, table, label=label, stacked=True, legend="", pairs=pairs)
            printed = 100 * rows.groupby("bar")["paper"].max()[names]
            plots.points(ax, ax.get_xticks(), printed, "paper", size=6)
            ax.set_xlabel("; ".join(filter(None, (by, pairs))))
            ax.set_title(f"{network_title(network)}, {place}")
        for ax in axes[:, 1]:
            ax.set_ylabel("")
    return figure
