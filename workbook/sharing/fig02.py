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
    """Return `shown.cells` of the ratios on each link.

    Links on which the default was not measured are left out.
    """
    maps = []
    for link, rows in by_link(tables, "messages"):
        rows = rows[rows["bytes"] == LARGE_BYTES]
        # Without the default there is nothing to compare with.
        if default_of(rows):
            # The time of a message divided by that under the default in the same round. All rows
            # are of one link and size, so that there is one case, without keys.
            by_round = over_default(rows, value="seconds", keys=[])
            # `summed` returns the median ratio over the rounds, with its 95% interval.
            median_ratios = summed(by_round, keys=["configuration"], value="ratio")
            maps.append(shown.cells(link, median_ratios, "ratio"))
    return maps


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds: a row for each cell of the heat maps.

    There is a heat map of the paper's ratios, and one of those measured on each link.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    return shown.as_saved(panels(tables))


def draw(tables: Tables) -> Figure:
    """Draw a heat map of the paper's ratios, and one of those on each link.

    The title has the largest ratio of the paper, and the largest that was measured, if any
    was.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    times = panels(tables)
    # Ratios have a logarithmic scale of colours.
    figure = plots.heat_maps(
        shown.maps(times), label="time relative to the default", height=3.3, log=True
    )
    paper, *ours = shown.largest(times)
    message = (
        f"The slowest configuration takes {paper:.2f} times as long as the default in "
        "the paper"
    )
    # ``ours`` is empty without a recording, else it has the largest ratio of all links.
    for ratio in ours:
        message += f", and {ratio:.2f} times in our measurements"
    plots.title(figure, message)
    return figure


# -- claims --------------------------------------------------------------------------


def _relative_time(configuration: str) -> Floats:
    """Return the time of an all-reduce divided by the default's, its least and largest value.

    Figure 2 prints this ratio with two decimals. The result, of shape (2,), has the ends of the
    interval of all ratios that are printed so.
    """
    return float(relative_times()[configuration]) + ROUNDING


@check("sharing-fig02-speedup", "1x256")
@check("sharing-fig02-2x128", "2x128")
def _allreduce_speedup(configuration: str) -> Result:
    """Return the speedup over the default, and the time that is saved, in per cent.

    The text speaks of a speedup, but its number is that of the time saved (erratum 1).
    """
    ends = _relative_time(configuration)
    # The printed ratio is in the middle between both ends.
    printed = ends.mean()
    # Times are relative to the default, whose time and speed are thus 1. Another configuration
    # has the speed 1 / time. It gains 1 / time - 1, which is gain(1.0, time).
    speedup = equations.gain(1.0, printed)
    note = (
        f"{printed:.2f} of the time is a speedup of {speedup:.1%}; "
        f"{1 - printed:.0%} are the time saved: an error of wording (erratum 1)"
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
        # Both arrays have the least time before the largest. For the least ratio, the least time
        # of 1x64 is divided by the largest one of the neighbour, whose order is thus reversed.
        ratios = _relative_time("1x64") / _relative_time(neighbour)[::-1]
        percents.append(100 * (ratios - 1))
    return own(percents, "from Fig 2, against 1x128 and against 2x64, as rounded")


@check("sharing-conclusion-last")
def _last_allreduce() -> Result:
    """Return the time of an all-reduce with the most resources divided by that with fewer.

    The paper concludes that the last all-reduce should get as many resources as possible,
    which are those of 4x512. There is a ratio for each of the other configurations.
    """
    times = relative_times()
    most_resources = times["4x512"]
    others = times.drop("4x512")
    # -0.005 and 0.005, as ratios are printed with two decimals. The ratio of two of them is
    # least if the dividend is as small, and the divisor as large, as rounding allows.
    low_error, high_error = ROUNDING
    least = (most_resources + low_error) / (others + high_error)
    most = (most_resources + high_error) / (others + low_error)
    # Another section wants the fastest configuration for the last all-reduce instead of the
    # one with the most resources. The note names the fastest one of figure 2.
    note = (
        "from Fig 2, 25 MB; Section 4.3.1 wants what 'finishes fastest': "
        f"{times.idxmin()}"
    )
    # An interval of the paper's own numbers for each of the other configurations.
    return own(np.transpose([least, most]), note)
