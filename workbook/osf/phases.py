"""Communication time by phase, as Figures 5 and 7 show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.case import Case
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
"""The columns that name a case of the lab."""
SLOW_RANK = 1.1
"""How many times as long the slow one of unequal workers takes to compute."""


def modelled(
    setting: PaperSetting,
    network: str,
    slowest: float,
    workers: int,
    buffer_bytes: int = 0,
) -> dict[str, float]:
    """Return how long each phase takes on the paper's cluster, in seconds.

    The phases are those of a worker of usual speed.

    Parameters
    ----------
    setting : PaperSetting
        The setting of the cluster.
    network : str
        The network.
    slowest : float
        By which factor the slowest worker computes longer, 1 if all are equally fast.
    workers : int
        The number of workers.
    buffer_bytes : int, optional
        The size of the fusion buffer, or 0 for no fusion.
    """
    # ``waited_s`` has the time that each message of the plan waits in vain for one more tensor,
    # until the timeout of the buffer.
    workload, plan, waited_s = setting.with_buffer(network, buffer_bytes)
    # The workers agree on the order of messages in one round trip to a coordinator. The paper
    # prints the bandwidth-delay product in KB, which is the bandwidth times a round trip.
    round_trip_s = prose("osf")["fig10-bdp"] * KB / NETWORK_BYTES_PER_S
    return breakdown(
        workload,
        plan,
        setting.cost(workers),
        waited_s=waited_s,
        slowest=slowest,
        negotiate_s=round_trip_s,
    )


def shares(
    seconds_of: Callable[..., dict[str, float]], cases: Mapping[str, Sequence[Any]]
) -> pd.DataFrame:
    """Return the seconds of each phase, and its share of all communication.

    Parameters
    ----------
    seconds_of : callable
        Takes one value of each of ``cases``, in their order, and returns the modelled
        seconds by phase.
    cases : mapping of str to sequence
        For each column of the table, the values that are combined.

    Returns
    -------
    DataFrame
        A row for each combination of the values and each ``phase``. ``model`` is the
        share of its ``seconds`` in those of all phases of the combination.
    """
    frame = tidy(seconds_of, cases, name="phase", value="seconds")
    total_s = frame.groupby([*cases])["seconds"].transform("sum")
    return frame.assign(model=frame["seconds"] / total_s)


def in_lab(
    lab: Lab, *, negotiated: bool = True, first: str = "ALLREDUCE"
) -> pd.DataFrame:
    """Return how long each phase took on rank 0 in the cases of a campaign.

    Parameters
    ----------
    lab : Lab
        The campaign.
    negotiated : bool, optional
        Whether to return the cases in which the ranks agreed on the order of messages.
        Otherwise all other cases are returned.
    first : {"ALLREDUCE", "WAIT", "NEGOTIATE"}, optional
        The phase that counts where measured phases overlap.

    Returns
    -------
    DataFrame
        A row for each case (KEYS) and ``phase``: the seconds by the model (``model_s``)
        and measured (``measured_s``), the mean difference of two repeats
        (``repeatability_s``), and the shares of the communication time by the model
        (``model``) and measured (``measured``). Only cases with a fusion buffer or without
        fusion have rows.
    """
    # By case, as KEYS name it, a table with a row for each phase.
    tables = {}
    for case in lab.cases(negotiated=negotiated):
        # None for plans that are neither a buffer nor no fusion.
        network_and_buffer = buffer_of(case)
        if network_and_buffer is not None:
            network, buffer_bytes = network_and_buffer
            # ``straggler`` is the factor by which the slowest worker computes longer.
            key = (network, case.workers, buffer_bytes, case.straggler)
            tables[key] = _case_in_lab(lab, case, first)
    return pd.concat(tables, names=[*KEYS, "phase"]).reset_index()


def _case_in_lab(lab: Lab, case: Case, first: str) -> pd.DataFrame:
    """Return the rows of `in_lab` for one case, by phase.

    ``first`` is the phase that counts where measured phases overlap.
    """
    # The cost of a message in the lab, and the link that messages share.
    communication = lab.calibration.of_case(case)
    agreed_s = 0.0
    if case.negotiated:
        # The ranks agree on the order of messages by a message of their own. The smallest
        # message that was measured, of 1 KiB, stands for it.
        agreed_s = float(communication.cost(KIB))
    model_s = breakdown(
        lab.workload(case),
        plan_of(case),
        communication.cost,
        slowest=case.straggler,
        link=communication.link,
        negotiate_s=agreed_s,
    )
    measured_s = lab.phases(case, first)
    # Both columns have the phases as their index. The measured times are means over repeats.
    table = pd.DataFrame(
        {"model_s": pd.Series(model_s), "measured_s": measured_s.mean()}
    )
    table["repeatability_s"] = measured_s.agg(mean_difference)
    table["model"] = table["model_s"] / table["model_s"].sum()
    table["measured"] = table["measured_s"] / table["measured_s"].sum()
    return table


def draw(frame: pd.DataFrame, bar_name: str, label: str, title: str) -> Figure:
    """Draw bars of stacked phases in %, with a row of panels for each place.

    A place is the cluster or a link of the lab, as the heading of a panel names it. Each row
    has a panel for each of the networks TWO.

    Parameters
    ----------
    frame : DataFrame
        A row for each network, ``place``, ``bar`` and ``phase``. The columns ``model``,
        ``measured`` and ``paper`` have the height of the phase, or of a printed point, as a
        share of 1. Places and bars are drawn in the order of the rows.
    bar_name : str
        What the bars differ by, such as "workers".
    label : str
        The label of the vertical axis.
    title : str
        The sentence above the figure.
    """
    places = list(frame["place"].unique())
    sheet = plots.sheet(
        title, columns=len(TWO), rows=len(places), height=7.0, sharey=True
    )
    with sheet as (figure, axes):
        panels = product(places, TWO)
        for ax, (place, network) in zip(axes.flat, panels, strict=True):
            rows = rows_of(frame, network=network, place=place)
            _draw_panel(ax, rows, bar_name, label)
            ax.set_title(f"{network_title(network)}, {place}")
        # The label of the vertical axis is at the left panels alone.
        for ax in axes[:, 1]:
            ax.set_ylabel("")
    return figure


def _row_per_drawn_bar(
    rows: pd.DataFrame, names: Sequence[str], values: Sequence[str]
) -> pd.DataFrame:
    """Return a row for each drawn bar, with a column for each of PHASES.

    Each of ``names``, which are in the column ``bar`` of ``rows``, has one drawn bar for each of
    the columns ``values``. With the names "8" and "16" and the columns "model" and "measured",
    the four rows are 8 by the model, 8 measured, 16 by the model and 16 measured.
    """
    by_phase = rows.pivot(index="bar", columns="phase", values=list(values))
    bars = []
    for name in names:
        for value in values:
            bars.append(by_phase[value].loc[[name], list(PHASES)])
    return pd.concat(bars)


def _draw_panel(ax: Axes, rows: pd.DataFrame, bar_name: str, label: str) -> None:
    """Draw the phases of one network on the cluster or in the lab, and the printed shares.

    On the cluster there is one bar for each value of the column ``bar``, by the model. In the
    lab there are two, by the model and measured.

    Parameters
    ----------
    ax : Axes
        Where they are drawn.
    rows : DataFrame
        The rows of `draw` for the network and the place.
    bar_name : str
        What the bars differ by, such as "workers".
    label : str
        The label of the vertical axis.
    """
    # Nothing was measured on the cluster.
    if rows["measured"].notna().any():
        values = ["model", "measured"]
        # How the two bars of a pair differ.
        pairs = "left bars: model, right bars: lab"
        xlabel = f"{bar_name}; {pairs}"
    else:
        values = ["model"]
        pairs = ""
        xlabel = bar_name
    names = list(rows["bar"].unique())
    percent = 100 * _row_per_drawn_bar(rows, names, values)
    plots.bars(ax, percent, label=label, stacked=True, legend="", pairs=pairs)
    # A bar has a row for each phase. All of its rows that have a printed number have the same
    # one. The others are NaN, which the maximum leaves out.
    printed_percent = 100 * rows.groupby("bar")["paper"].max()[names]
    # `plots.bars` has set a tick for each name.
    plots.points(ax, ax.get_xticks(), printed_percent, "paper", size=6)
    ax.set_xlabel(xlabel)
