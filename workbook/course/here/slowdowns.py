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

    Only networks, links and message sizes that both have are compared.

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
        Every slowdown with its interval, here and in the recording. None if nothing can
        be compared.
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

    Parameters
    ----------
    tables : Source
        The tables of one machine.

    Returns
    -------
    DataFrame
        One row for each network, link, message size and ``slowed`` ("backward" or
        "message"). The columns ``ratio``, ``lower`` and ``upper`` are the time over the
        time alone, and its 95% interval over rounds. It has no rows if the machine has
        no table ``slowdown``.
    """
    columns = [*KEYS, "ratio", "lower", "upper"]
    if not tables.has("slowdown"):
        return pd.DataFrame(columns=columns)
    rows: list[dict[str, object]] = []
    for cluster, measured in tables.table("slowdown").groupby(SLOWDOWN_KEY):
        key = dict(zip(SLOWDOWN_KEY, cluster, strict=True))
        contention = Contention.of(measured)
        # Slowdowns have shape (2, sizes): those of backward, then those of messages.
        lower, upper = interval(contention.draws)
        for row, slowed in enumerate(PANELS):
            for column, size in enumerate(contention.bytes):
                # A slowdown of 0.1 means 1.1 times as long.
                rows.append(
                    {
                        **key,
                        "bytes": int(size),
                        "slowed": slowed,
                        "ratio": 1 + contention.slowdowns[row, column],
                        "lower": 1 + lower[row, column],
                        "upper": 1 + upper[row, column],
                    }
                )
    return pd.DataFrame(rows, columns=columns)


def _sentence(both: pd.DataFrame) -> str:
    """Return the median slowdowns of backward and of messages in words.

    ``both`` has a row for each slowdown that was measured here and in the recording.
    """
    clusters = len(both[SLOWDOWN_KEY].drop_duplicates())
    plural = "pair" if clusters == 1 else "pairs"
    backward = both[both["slowed"] == OF_BACKWARD]
    messages = both[both["slowed"] == OF_MESSAGES]
    sizes = messages.groupby(SLOWDOWN_KEY)["bytes"]
    is_largest = messages["bytes"] == sizes.transform("max")
    is_smallest = messages["bytes"] == sizes.transform("min")
    # A single size counts as the largest.
    largest = messages[is_largest]
    smallest = messages[is_smallest & ~is_largest]
    parts = [
        f"While messages travel, backward takes {_times(backward)}.",
        f"During backward, the largest messages take {_times(largest)}.",
    ]
    if len(smallest):
        parts.append(f"The smallest messages take {_times(smallest)}.")
    parts.append(f"These are medians over {clusters} {plural} of a network and a link.")
    return " ".join(parts)


def _times(both: pd.DataFrame) -> str:
    """Return the median ratios as words, those of the recording in parentheses."""
    here = both["ratio_here"].median()
    recorded = both["ratio_recorded"].median()
    return f"{here:.2f} times as long (recording: {recorded:.2f})"


def _figure(both: pd.DataFrame) -> Figure:
    """Return a figure with a row for each network, link and size, in a panel for each of PANELS."""
    names = both.drop_duplicates([*SLOWDOWN_KEY, "bytes"])
    labels = [
        f"{network_title(row.network)}, {link_title(row.link)}, {_size(row.bytes)}"
        for row in names.itertuples()
    ]
    figure, axes = plots.canvas(
        columns=len(PANELS), height=1.3 + 0.27 * len(names), sharey=True
    )
    for ax, (slowed, heading) in zip(axes, PANELS.items(), strict=True):
        of_panel = both[both["slowed"] == slowed]
        case_rows(ax, labels, 1.0)
        # The two machines are drawn a little above and below the middle of a row.
        _draw(ax, of_panel, "recorded", RECORDED, -0.14)
        _draw(ax, of_panel, "here", HERE, 0.14)
        if slowed == OF_MESSAGES:  # small messages take many times as long
            ax.set_xscale("log")
            plain_log_ticks(ax.xaxis)
        ax.set_xlabel("time over the time alone")
        plots.heading(ax, heading)
    add_legend(axes[-1], "inside")
    return figure


def _draw(
    ax: Axes, rows: pd.DataFrame, where: str, style: Style, offset: float
) -> None:
    """Draw the ratios of one machine with their intervals, a little off the middle of each row."""
    places = [place + offset for place in range(len(rows))]
    ax.hlines(places, rows[f"lower_{where}"], rows[f"upper_{where}"], color=style.color)
    plots.points(ax, rows[f"ratio_{where}"], places, style, size=5)


def _size(n_bytes: int) -> str:
    """Return a message's size in KiB or in MiB with at most one decimal."""
    return f"{n_bytes / MIB:.1f} MiB" if n_bytes >= MIB else format_bytes(n_bytes)
