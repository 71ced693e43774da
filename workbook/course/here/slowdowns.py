"""How much messages and compute slow each other down, here and in the recording."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.fit import interval
from ddlkit.core.units import MIB, format_bytes
from ddlkit.model.contention import SLOWDOWN_KEY, Contention
from workbook import plots
from workbook.common.source import Source
from workbook.common.specs import link_title, network_title
from workbook.plots.style import Style, add_legend, case_rows, plain_log_ticks

NOTHING = (
    "No slowdown was measured on this machine. "
    "./reproduce.sh measures them on Linux with root."
)
NOT_COMMON = (
    "The slowdowns measured on this machine are of other networks or links than those of "
    "the recording."
)
OF_BACKWARD = "backward"
OF_MESSAGES = "message"
PANELS = {
    OF_BACKWARD: "Backward, while messages travel",
    OF_MESSAGES: "A message, during backward",
}
"""What is slowed down, and the headings of the panels."""

RECORDED = Style("recorded", "#1b1b1b", "o", hollow=True)
HERE = Style("measured here", "#7a3b9a", "X")
"""How the slowdowns of the recording and of this machine look."""

KEYS = [*SLOWDOWN_KEY, "bytes", "slowed"]
"""The columns that name a row of `slowdowns`."""


def compare(recording: Source, here: Source) -> tuple[str, Figure | None]:
    """Compare the slowdowns measured on this machine with those of the recording.

    Only rows of `slowdowns` whose network, batch, number of ranks, link and message size both
    have are compared.

    Parameters
    ----------
    recording : Source
        The tables of the recorded campaign of real training.
    here : Source
        The tables of this machine, which may be none.

    Returns
    -------
    sentence : str
        The median slowdowns of backward and of messages, here and in the recording.
    figure : Figure or None
        Every slowdown with its 95% interval, here and in the recording. None if nothing
        can be compared.
    """
    measured = slowdowns(here)
    if measured.empty:
        return NOTHING, None
    recorded = slowdowns(recording)
    both = measured.merge(recorded, on=KEYS, suffixes=("_here", "_recorded"))
    if both.empty:
        return NOT_COMMON, None
    return _sentence(both), _figure(both)


def slowdowns(tables: Source) -> pd.DataFrame:
    """Return how many times as long backward and messages take while both are under way.

    Backward is the backward pass of a training step.

    Parameters
    ----------
    tables : Source
        The tables of one machine.

    Returns
    -------
    DataFrame
        One row for each cluster (a network, batch, number of ranks and link), message size
        ``bytes`` and ``slowed``, which is "backward" or "message". ``ratio`` is the time divided
        by the time alone, as the median over rounds, but at least 1. ``lower`` and ``upper`` are
        its 95% interval. There are no rows if the machine has no table ``slowdown``.
    """
    columns = [*KEYS, "ratio", "lower", "upper"]
    if not tables.has("slowdown"):
        return pd.DataFrame(columns=columns)
    rows: list[dict[str, object]] = []
    for cluster, timed in tables.table("slowdown").groupby(SLOWDOWN_KEY):
        cluster_columns = dict(zip(SLOWDOWN_KEY, cluster, strict=True))
        for ratio in _ratios(Contention.of(timed)):
            rows.append({**cluster_columns, **ratio})
    return pd.DataFrame(rows, columns=columns)


def _ratios(contention: Contention) -> list[dict[str, object]]:
    """Return the rows of `slowdowns` for one cluster, without the columns of the cluster."""
    # The slowdowns, and both ends of their intervals, have shape (2, sizes). The first row is
    # of backward and the second of messages, as in PANELS.
    lower, upper = interval(contention.draws)
    rows: list[dict[str, object]] = []
    for i, slowed in enumerate(PANELS):
        for j, size in enumerate(contention.bytes):
            # A slowdown of 0.1 means 1.1 times as long.
            rows.append(
                {
                    "bytes": int(size),
                    "slowed": slowed,
                    "ratio": 1 + contention.slowdowns[i, j],
                    "lower": 1 + lower[i, j],
                    "upper": 1 + upper[i, j],
                }
            )
    return rows


def _sentence(both: pd.DataFrame) -> str:
    """Return the median slowdowns of backward and of messages in words.

    ``both`` has a row for each slowdown that was measured here and in the recording. A cluster
    is a network, batch, number of ranks and link. The text calls it a pair of a network and a
    link, because each network has one batch and one number of ranks in the recording.
    """
    clusters = len(both[SLOWDOWN_KEY].drop_duplicates())
    noun = "pair" if clusters == 1 else "pairs"
    backward = both[both["slowed"] == OF_BACKWARD]
    messages = both[both["slowed"] == OF_MESSAGES]
    # The largest and the smallest size are those of each cluster.
    sizes_of_cluster = messages.groupby(SLOWDOWN_KEY)["bytes"]
    is_largest = messages["bytes"] == sizes_of_cluster.transform("max")
    is_smallest = messages["bytes"] == sizes_of_cluster.transform("min")
    # The only size of a cluster counts as the largest, and not as the smallest.
    largest = messages[is_largest]
    smallest = messages[is_smallest & ~is_largest]
    parts = [
        f"While messages travel, backward takes {_times(backward)}.",
        f"During backward, the largest messages take {_times(largest)}.",
    ]
    if len(smallest):
        parts.append(f"The smallest messages take {_times(smallest)}.")
    parts.append(f"These are medians over {clusters} {noun} of a network and a link.")
    return " ".join(parts)


def _times(both: pd.DataFrame) -> str:
    """Return the median ratios as words, those of the recording in parentheses."""
    here = both["ratio_here"].median()
    recorded = both["ratio_recorded"].median()
    return f"{here:.2f} times as long (recording: {recorded:.2f})"


def _figure(both: pd.DataFrame) -> Figure:
    """Return a figure with a row for each network, link and size, in a panel for each of PANELS.

    ``both`` has a row for each slowdown that was measured here and in the recording.
    """
    cases = both.drop_duplicates([*SLOWDOWN_KEY, "bytes"])
    labels = [
        f"{network_title(case.network)}, {link_title(case.link)}, {_size(case.bytes)}"
        for case in cases.itertuples()
    ]
    # In inches: 1.3 for headings and the axis below, and 0.27 for each row.
    height = 1.3 + 0.27 * len(cases)
    figure, axes = plots.canvas(columns=len(PANELS), height=height, sharey=True)
    for ax, (slowed, heading) in zip(axes, PANELS.items(), strict=True):
        # Each case has one row in each panel, in the same order.
        of_panel = both[both["slowed"] == slowed]
        # At the reference line, nothing is slowed down.
        case_rows(ax, labels, reference=1.0)
        # The axis runs downwards, so that the recording is drawn a little above the middle of
        # a row, and this machine a little below.
        _draw(ax, of_panel, "recorded", RECORDED, offset=-0.14)
        _draw(ax, of_panel, "here", HERE, offset=0.14)
        # The axis of messages is logarithmic, because small ones take many times as long.
        if slowed == OF_MESSAGES:
            ax.set_xscale("log")
            plain_log_ticks(ax.xaxis)
        ax.set_xlabel("time over the time alone")
        plots.heading(ax, heading)
    add_legend(axes[-1], "inside")
    return figure


def _draw(
    ax: Axes, rows: pd.DataFrame, where: str, style: Style, offset: float
) -> None:
    """Draw the ratios of one machine with their intervals.

    ``where`` is how the columns of the machine end, "here" or "recorded". The ratios are drawn
    at ``offset`` from the middle of each row of the figure.
    """
    y = [row + offset for row in range(len(rows))]
    ax.hlines(y, rows[f"lower_{where}"], rows[f"upper_{where}"], color=style.color)
    plots.points(ax, rows[f"ratio_{where}"], y, style, size=5)


def _size(n_bytes: int) -> str:
    """Return a message's size in KiB or in MiB with at most one decimal."""
    return f"{n_bytes / MIB:.1f} MiB" if n_bytes >= MIB else format_bytes(n_bytes)
