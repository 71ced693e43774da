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
    """Compare gradients and messages of this machine with those of the recording.

    The gradients are those of one network. The messages are all-reduces over loopback.

    Parameters
    ----------
    recording : Source
        The tables that the lesson is made from.
    here : Source
        The tables of this machine: ``layers``, ``peaks`` (timed products of matrices) and
        ``collectives``. Each of them may be missing.
    network : str
        The network whose gradients are compared.
    problem : str
        Why nothing was measured, if nothing was. The sentence then names this reason.

    Returns
    -------
    sentence : str
        What the numbers of this machine say.
    figure : Figure or None
        The share of gradients that are ready over time, and message times by size, each
        from the recording and from this machine. None if the layers of the network were
        not measured here.
    """
    # Without a table of layers, `networks` would raise an error.
    if not (here.has("layers") and network in here.networks()):
        because = f" ({problem})" if problem else ""
        return f"Nothing was measured on this page{because}. {HOW_TO_MEASURE}", None
    workload_here = here.profile(network).workload()
    recorded_workload = recording.profile(network).workload()
    messages_here = _medians(here)
    recorded_messages = _medians(recording)
    sentences = [_about_compute(network, workload_here, recorded_workload)]
    if here.has("peaks"):
        sentences.append(_about_rate(network, here))
    # There is no sentence about messages if the two machines have no size in common.
    sentences += _about_messages(messages_here, recorded_messages)
    figure, (left, right) = plots.canvas(columns=2, height=3.2)
    _draw_ready(left, recorded_workload, RECORDED)
    _draw_ready(left, workload_here, MEASURED_HERE)
    _draw_messages(right, messages_here, recorded_messages)
    plots.heading(left, f"Gradients of {network_title(network)}")
    plots.heading(right, "All-reduce of two processes, loopback")
    return " ".join(sentences), figure


def _about_rate(network: str, here: Source) -> str:
    """Return a sentence that compares the rate of a step with the fastest product of matrices."""
    shares = machines.kernel_shares({"here": here}, [network])
    # The other rows are products of matrices and copies.
    steps = shares[shares["kernel"].str.startswith("step")]
    # There are several steps if several batches or precisions were measured. The first counts.
    share = steps["share"].iloc[0]
    return (
        f"The step reaches {share:.0%} of the rate of the fastest product timed here."
    )


def _about_compute(network: str, here: Workload, recorded: Workload) -> str:
    times = f"{_ms(here.compute_s)} here and {_ms(recorded.compute_s)} in the recording"
    return f"A training step of {network_title(network)} computes for {times}."


def _about_messages(here: pd.Series, recorded: pd.Series) -> list[str]:
    """Return a sentence for the smallest and for the largest size that both series have.

    Each series has the median seconds of an all-reduce by its bytes. The list is empty if they
    have no size in common.
    """
    common_bytes = here.index.intersection(recorded.index)
    if common_bytes.empty:
        return []
    sentences = []
    # A single common size is the smallest and the largest one. The set has it once.
    for size in sorted({common_bytes.min(), common_bytes.max()}):
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
    """Return the median seconds of an all-reduce of RANKS processes over loopback, by bytes.

    The series is empty if no such all-reduce was timed.
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
    # The gradients of a workload are in the order in which they are ready.
    share = np.cumsum(work.bytes) / work.bytes.sum()
    # Two points are put before them: no gradient is ready at time 0, nor at the end of the
    # forward pass.
    ready_ms = 1e3 * np.concatenate([[0.0, work.forward_s], work.ready_s])
    percent = 100 * np.concatenate([[0.0, 0.0], share])
    line_style = {"color": style.color, "linestyle": style.line, "label": style.label}
    # The share stays as it is until the next gradient is ready.
    ax.plot(ready_ms, percent, drawstyle="steps-post", **line_style)
    ax.set(xlabel="time from the start of the step [ms]", ylabel="ready [% of bytes]")
    add_legend(ax, "inside")


def _draw_messages(ax: Axes, here: pd.Series, recorded: pd.Series) -> None:
    """Draw message times against the size, both on logarithmic axes.

    Each series has the median seconds of an all-reduce by its bytes.
    """
    # Seconds times ``factor`` are times in ``unit``, which suits both series.
    factor, unit = time_unit(pd.concat([recorded, here]))
    for medians, style in ((recorded, RECORDED), (here, MEASURED_HERE)):
        line_style = {
            "color": style.color,
            "linestyle": style.line,
            "label": style.label,
        }
        ax.plot(medians.index, factor * medians, marker=style.marker, **line_style)
    # "b" is an x axis in bytes, and "y" the y axis.
    set_log(ax, "by")
    ax.set(xlabel="message size", ylabel=f"time [{unit}]")
    add_legend(ax, "inside")
