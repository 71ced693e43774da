"""Gradients and messages measured just now, compared with those of the recording."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.units import format_bytes
from ddlkit.core.workload import Workload
from workbook import plots
from workbook.common.source import Source
from workbook.common.specs import network_title
from workbook.plots.style import SOFT, Style, add_legend, set_log, time_unit
from workbook.validate import compare as machines

RECORDED = Style("recorded", SOFT, "o")
MEASURED_HERE = Style("measured here", "#7a3b9a", "X", "--")
"""How the recording and this machine look."""
HOW_TO_MEASURE = "To measure, run ./reproduce.sh, or open this notebook and run it."
RANKS = 2
"""The number of processes whose messages over loopback are compared."""


def compare(
    recording: Source, here: Source, network: str, problem: str = ""
) -> tuple[str, Figure | None]:
    """Compare the gradients of a network and messages over loopback with those of the recording.

    Parameters
    ----------
    recording : Source
        The tables that the lesson is made from.
    here : Source
        The tables of this machine: ``layers``, ``peaks`` and ``collectives``. It may
        have none.
    network : str
        The network whose gradients are compared.
    problem : str
        Why nothing was measured, if so.

    Returns
    -------
    sentence : str
        What the numbers of this machine say.
    figure : Figure or None
        The share of gradients that are ready over time, and message times by size, each
        from the recording and from this machine. None if nothing was measured here.
    """
    if not (here.has("layers") and network in here.networks()):
        because = f" ({problem})" if problem else ""
        return f"Nothing was measured on this page{because}. {HOW_TO_MEASURE}", None
    workload = here.profile(network).workload()
    recorded_workload = recording.profile(network).workload()
    messages = _medians(here)
    recorded_messages = _medians(recording)
    sentences = [_about_compute(network, workload, recorded_workload)]
    if here.has("peaks"):
        sentences.append(_about_rate(network, here))
    sentences += _about_messages(recorded_messages, messages)
    figure, axes = plots.canvas(columns=2, height=3.2)
    _draw_ready(axes[0], recorded_workload, RECORDED)
    _draw_ready(axes[0], workload, MEASURED_HERE)
    _draw_messages(axes[1], recorded_messages, messages)
    plots.heading(axes[0], f"Gradients of {network_title(network)}")
    plots.heading(axes[1], "All-reduce of two processes, loopback")
    return " ".join(sentences), figure


def _about_rate(network: str, here: Source) -> str:
    """Return the rate of a step as a share of the fastest product of matrices."""
    shares = machines.kernel_shares({"here": here}, [network])
    steps = shares[shares["kernel"].str.startswith("step")]
    share = steps["share"].iloc[0]
    return (
        f"The step reaches {share:.0%} of the rate of the fastest product timed here."
    )


def _about_compute(network: str, here: Workload, recorded: Workload) -> str:
    times = f"{_ms(here.compute_s)} here and {_ms(recorded.compute_s)} in the recording"
    return f"A training step of {network_title(network)} computes for {times}."


def _about_messages(recorded: pd.Series, here: pd.Series) -> list[str]:
    """Return a sentence for the smallest and for the largest size that both have.

    Each series has the median seconds of an all-reduce by its bytes.
    """
    both = here.index.intersection(recorded.index)
    if both.empty:
        return []
    sentences = []
    # If both have a single size in common, the set holds it once.
    for size in sorted({both.min(), both.max()}):
        sentences.append(
            f"An all-reduce of {format_bytes(int(size))} between two processes takes "
            f"{_ms(here[size])} here and {_ms(recorded[size])} in the recording."
        )
    return sentences


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * float(seconds)
    digits = 0 if milliseconds >= 10 else 2
    return f"{milliseconds:.{digits}f} ms"


def _medians(tables: Source) -> pd.Series:
    """Return the median seconds of an all-reduce over loopback by its bytes.

    There are none if no all-reduce was timed.
    """
    if not tables.has("collectives"):
        return pd.Series(dtype=float)
    rows = tables.table("collectives")
    rows = rows[
        (rows["collective"] == "all_reduce")
        & (rows["link"] == "loopback")
        & (rows["ranks"] == RANKS)
    ]
    return rows.groupby("bytes")["seconds"].median()


def _draw_ready(ax: Axes, work: Workload, style: Style) -> None:
    """Draw which share of the bytes of gradients is ready, against the time of the step."""
    # No gradient is ready before the end of the forward pass.
    ready_ms = 1e3 * np.concatenate([[0.0, work.forward_s], work.ready_s])
    share = np.cumsum(work.bytes) / work.bytes.sum()
    percent = 100 * np.concatenate([[0.0, 0.0], share])
    shape = {"color": style.color, "linestyle": style.line, "label": style.label}
    ax.plot(ready_ms, percent, drawstyle="steps-post", **shape)
    ax.set(xlabel="time from the start of the step [ms]", ylabel="ready [% of bytes]")
    add_legend(ax, "inside")


def _draw_messages(ax: Axes, recorded: pd.Series, here: pd.Series) -> None:
    """Draw message times against the size, both on logarithmic axes."""
    factor, unit = time_unit(pd.concat([recorded, here]))
    for medians, style in ((recorded, RECORDED), (here, MEASURED_HERE)):
        shape = {"color": style.color, "linestyle": style.line, "label": style.label}
        ax.plot(medians.index, factor * medians, marker=style.marker, **shape)
    set_log(ax, "by")
    ax.set(xlabel="message size", ylabel=f"time [{unit}]")
    add_legend(ax, "inside")
