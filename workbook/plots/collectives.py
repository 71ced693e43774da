"""Measured collectives by the size of their messages."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.plots.style import SOFT, time_unit

FLOOR_FROM_BYTES = 2**15
"""The smallest message whose floor is drawn, a choice.

Smaller messages take far longer than their floor."""


def draw(samples: pd.DataFrame, medians: pd.DataFrame) -> Figure:
    """Draw the times of all-reduces by size.

    Parameters
    ----------
    samples : DataFrame
        Measured ``seconds`` by ``bytes`` and ``series``, the name of a link with its ranks.
    medians : DataFrame
        The median ``seconds``, also by ``bytes`` and ``series``. A further column
        ``floor_s`` has the least seconds that the link allows, in which it also carries the
        headers of packets, or NaN if they are not known.

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
        # Links without a known floor have NaN.
        with_floor = medians.dropna()
        with_floor = with_floor[with_floor["bytes"] >= FLOOR_FROM_BYTES]
        # All floors have one label, which the legend of a sheet has once.
        for _, rows in with_floor.groupby("series"):
            ax.plot(
                rows["bytes"],
                scale * rows["floor_s"],
                color=SOFT,
                linewidth=0.8,
                label="floor, with headers",
            )
    return figure
