"""Measured collectives by the size of their messages."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.plots.style import SOFT, time_unit

FLOOR_FROM_BYTES = 2**15
"""The smallest message whose floor is drawn, a choice.

A smaller message takes far longer than its floor, which would only stretch the axis of times."""


def draw(samples: pd.DataFrame, medians: pd.DataFrame) -> Figure:
    """Draw the times of all-reduces by size.

    Parameters
    ----------
    samples : DataFrame
        Measured ``seconds`` by ``bytes`` and ``series``, the name of a link with its ranks.
    medians : DataFrame
        A row for each size in ``bytes`` and each of the ``series``. Only its ``floor_s`` is
        drawn: the least seconds in which the link can carry the message and the headers of its
        packets. It is NaN if the rate of the link is not known.

    Returns
    -------
    Figure
    """
    heading = (
        "A small message takes a constant time, a large one a time in proportion to its "
        "bytes"
    )
    with plots.sheet(heading) as (figure, ax):
        plots.samples(ax, samples.sort_values("series"), x="bytes", series="series")
        # `plots.samples` has drawn its times in the same unit.
        scale, _ = time_unit(samples["seconds"])
        with_floor = medians.dropna(subset="floor_s")
        # Small messages take far longer than their floor. Floors far below all measured times
        # would only stretch the axis.
        with_floor = with_floor[with_floor["bytes"] >= FLOOR_FROM_BYTES]
        # The legend of a sheet has each label once, so that all floors share one entry.
        for _, rows in with_floor.groupby("series"):
            ax.plot(
                rows["bytes"],
                scale * rows["floor_s"],
                color=SOFT,
                linewidth=0.8,
                label="floor, with headers",
            )
    return figure
