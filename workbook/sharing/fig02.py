"""sharing Fig 2: the time of an all-reduce alone, over the default's."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.workload import Floats
from workbook import plots
from workbook.common.claims import Result, by_readings, check, own
from workbook.sharing import equations, shown
from workbook.sharing.printed import ROUNDING, figure_rows, relative_times
from workbook.sharing.recordings import (
    Tables,
    by_link,
    default_of,
    over_default,
    summed,
)

LARGE_BYTES = 25_000_000
"""The size of the message, which is sent in parts: every thread sends some."""


def panels(tables: Tables) -> pd.DataFrame:
    """Return `shown.cells` of the paper's ratios, and of those measured on each link."""
    paper = shown.cells("paper, 25 MB", figure_rows("fig02"), "relative_time")
    return pd.concat([paper, *measured(tables)], ignore_index=True)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of each link on which the default was measured."""
    maps = []
    for link, rows in by_link(tables, "messages"):
        rows = rows[rows["bytes"] == LARGE_BYTES]
        if default_of(rows):
            # All rows are of one link and size, so that no columns tell cases apart.
            by_round = over_default(rows, "seconds", [])
            ratios = summed(by_round, ["configuration"], "ratio")
            maps.append(shown.cells(link, ratios, "ratio"))
    return maps


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    return shown.as_saved(panels(tables))


def draw(tables: Tables) -> Figure:
    """Draw a heat map of the paper, and one of each link.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    times = panels(tables)
    figure = plots.heat_maps(
        shown.maps(times), label="time relative to the default", height=3.3, log=True
    )
    paper, *ours = shown.largest(times)
    message = (
        f"The slowest configuration takes {paper:.2f} times as long as the default in "
        "the paper"
    )
    # There is no number of ours without a recording, else a single one.
    for ratio in ours:
        message += f", and {ratio:.2f} times in our measurements"
    plots.title(figure, message)
    return figure


# -- claims --------------------------------------------------------------------------


def _relative_time(configuration: str) -> Floats:
    """Return the least and the most that an all-reduce takes over the default, shape (2,).

    They are the ends of the rounding of a number of figure 2.
    """
    return float(relative_times()[configuration]) + ROUNDING


@check("sharing-fig02-speedup", "1x256")
@check("sharing-fig02-2x128", "2x128")
def _allreduce_speedup(configuration: str) -> Result:
    """Return the speedup over the default, and the time that is saved, in per cent.

    The text speaks of a speedup, but its number is that of the time saved (erratum 1).
    """
    # `gain` compares speeds, which are the reciprocals of the times. The default takes 1.
    ends = _relative_time(configuration)
    speedup = equations.gain(1.0, ends.mean())
    note = (
        f"{ends.mean():.2f} of the time is a speedup of {speedup:.1%}; "
        f"{1 - ends.mean():.0%} are the time saved: an error of wording (erratum 1)"
    )
    gained_percent = [100 * equations.gain(1.0, time) for time in ends]
    readings = {
        "a gain in speed": own([gained_percent], ""),
        "time saved": own([100 * (1 - ends)], ""),
    }
    return by_readings(readings, note)


@check("sharing-fig02-slowest")
def _slowest() -> Result:
    return own([100 * (_relative_time("4x512") - 1)], "from Fig 2")


@check("sharing-fig02-1x64")
def _least_resources() -> Result:
    """Return how much longer 1x64 takes than each of its two neighbours, in per cent."""
    percents = []
    for neighbour in ("1x128", "2x64"):
        # The least quotient has the largest divisor.
        ratios = _relative_time("1x64") / _relative_time(neighbour)[::-1]
        percents.append(100 * (ratios - 1))
    return own(percents, "from Fig 2, against 1x128 and against 2x64, as rounded")


@check("sharing-conclusion-last")
def _last_allreduce() -> Result:
    """Return how much longer 4x512 takes than each other configuration."""
    times = relative_times()
    slowest = times["4x512"]
    others = times.drop("4x512")
    # ROUNDING is negative and then positive. The least quotient has the largest divisor.
    least, most = ((slowest + half) / (others - half) for half in ROUNDING)
    note = (
        "from Fig 2, 25 MB; Section 4.3.1 wants what 'finishes fastest': "
        f"{times.idxmin()}"
    )
    return own(np.transpose([least, most]), note)
