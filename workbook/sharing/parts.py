"""Parts of an iteration under the default and the best configuration (Figs 6 and 7)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from workbook.sharing.model import PARTS
from workbook.sharing.recordings import (
    CELL,
    default_of,
    of_cell,
    one_group,
    plain,
    throughputs,
)
from workbook.sharing.shown import SIMULATED, readable

Bars = Mapping[str, pd.DataFrame]
"""The drawn bars by the place that they are of.

A table has PARTS in seconds, and two rows for each case: the default, then the best.
"""


def measured_parts(
    link: str, iterations: pd.DataFrame, by: str
) -> dict[str, pd.DataFrame]:
    """Return the bars of a link.

    The best configuration is that of the odd rounds, and bars are means of the even
    rounds, so that the rounds that choose do not judge. As in the paper, iterations count
    only if they have DDP's own plan, and the best is one of the configurations that give
    all messages the same resources.

    Parameters
    ----------
    link : str
        The name of the link.
    iterations : DataFrame
        The iterations over this link, as `recordings.recorded` returns them.
    by : str
        The column that names a case, such as "network".

    Returns
    -------
    dict of str to DataFrame
        `Bars` of a single place, "here, " and the link. The dict is empty if fewer than
        two cases have both configurations.
    """
    # Other plans are dropped, and configurations in which a rank computes with two threads.
    rows = plain(iterations)
    is_odd = rows["repeat"] % 2 == 1
    even = rows[~is_odd]
    default = default_of(rows)
    # Configurations with other resources for the last message are dropped.
    gains = one_group(throughputs(rows[is_odd]))
    best = gains.loc[gains.groupby(CELL, sort=False)["gain"].idxmax()].sort_values(by)

    tables = []
    for _, best_row in best.iterrows():
        chosen = best_row["configuration"]
        means = _mean_parts(of_cell(even, best_row), default, chosen)
        # A recording may end before an even round has both configurations.
        if len(means):
            case = best_row[by]
            best_name = "default" if chosen == default else chosen
            labels = [f"{case}, default", f"{case}, best: {best_name}"]
            # If the default is the best, both bars are the same row.
            tables.append(means.loc[[default, chosen]].set_axis(labels))
    # The figures compare batches or networks, and a single one has nothing to compare with.
    if len(tables) < 2:
        return {}
    return {f"here, {link}": pd.concat(tables)}


def _mean_parts(cell: pd.DataFrame, default: str, chosen: str) -> pd.DataFrame:
    """Return the means of PARTS in seconds, by configuration.

    They are over the rounds in which both configurations were measured. ``cell`` has the
    iterations of one network, batch, plan and link.
    """
    # The set has one element if the default is the best.
    both = {default, chosen}
    cell = cell[cell["configuration"].isin(both)]
    n_configurations = cell.groupby("repeat")["configuration"].transform("nunique")
    cell = cell[n_configurations == len(both)]
    compute_only_s = cell["iteration_s"] - cell["communication_s"]
    columns = (compute_only_s, cell["overlap_s"], cell["exposed_communication_s"])
    parts_s = pd.concat(columns, axis=1, keys=PARTS)
    return parts_s.groupby(cell["configuration"]).mean()


def pairs(bars: Bars) -> dict[str, tuple[pd.DataFrame, str]]:
    """Return the bars for `workbook.plots.paired_bars`.

    Parameters
    ----------
    bars : Bars
        The bars of each place.

    Returns
    -------
    dict of str to (DataFrame, str)
        By heading, the bars, and the text below them that says which bar of a pair is
        which. A heading counts in how many cases the best is faster.
    """
    drawn = {}
    for place, table in bars.items():
        names = []
        # A pair is a default and, after it, a best configuration, which names the pair.
        for label in table.index[1::2]:
            case, configuration = label.replace("best: ", "").split(", ", 1)
            names.append(f"{readable(case)}: {readable(configuration)}")
        renamed = table.set_axis(np.repeat(names, 2))
        renamed = renamed.rename(columns={PARTS[0]: "compute only"})

        default_s, best_s = table.sum(axis=1).to_numpy().reshape(-1, 2).T
        # If the default is the best, both bars have the same numbers. Such a pair does not
        # count.
        n_faster = sum(best_s < default_s)
        n_different = sum(best_s != default_s)
        best = "best configuration"
        # In the simulation, the best is the best of figure 8, and there are no rounds.
        if place != SIMULATED:
            best += " of the odd rounds"
        heading = (
            f"{readable(place)}: the best is faster in {n_faster} of {n_different}"
        )
        below = f"batch: {best} (right bar; left bar: the default)"
        drawn[heading] = (renamed, below)
    return drawn
