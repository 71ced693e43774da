"""What axes need whatever is drawn on them: units, logarithmic ticks, legends, a row per case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from ddlkit.core import units
from ddlkit.report.plots.theme import SOFT


def time_unit(seconds: ArrayLike) -> tuple[float, str]:
    """Factor and name of the unit in which the largest of ``seconds`` reads best.

    >>> time_unit([2e-3, 0.5e-3])
    (1000.0, 'ms')
    """
    largest = float(np.nanmax(np.abs(np.asarray(seconds, dtype=float))))
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if largest * factor >= 1:
            return factor, unit
    return 1e6, "µs"


def scale(ax: Axes, log: str) -> None:
    """Make axes logarithmic: "x", "y" or both; "b" for an x axis of message sizes in bytes."""
    for axis, letter in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        if letter in log:
            getattr(ax, f"set_{letter}scale")("log")
            plain_log_ticks(axis)
    if "b" in log:
        _byte_axis(ax)


def plain_log_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers: evenly spaced if it is short, else 1, 2, 5, 10 ...

    Over more than three decades only one tick per decade fits.
    """
    low, high = axis.get_view_interval()
    short, long = low > 0 and high < 6 * low, high > 1e3 * low
    many = LogLocator(numticks=12) if long else LogLocator(subs=(1.0, 2.0, 5.0), numticks=12)
    axis.set_major_locator(MaxNLocator(6) if short else many)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _byte_axis(ax: Axes) -> None:
    """At most six ticks at powers of two."""
    ax.set_xscale("log", base=2)
    low, high = (int(np.round(np.log2(limit))) for limit in ax.get_xlim())
    step = next((step for step in (1, 2, 5) if (high - low) / step <= 6), 10)
    ticks = [2.0**k for k in range(-(-low // step) * step, high + 1, step)]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: units.format_bytes(size)))


def legend(ax: Axes, place: str = "above", columns: int = 4) -> None:
    """Name what is drawn: "above" the axes in at most ``columns``, to the "right", "inside", or not ("")."""
    entries = len(ax.get_legend_handles_labels()[1])
    places: dict[str, dict[str, Any]] = {
        "above": {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": min(columns, entries)},
        "right": {"loc": "upper left", "bbox_to_anchor": (1, 1)},
        "inside": {"loc": "upper left"},
    }
    if place:
        ax.legend(**places[place])


def rows(ax: Axes, names: Sequence[str], reference: float) -> None:
    """A row per name, the first on top, and a line where values are as the reference."""
    ax.axvline(reference, color=SOFT, linewidth=0.8)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="both")
