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
    rounds, so that the rounds that choose do not judge.

    Parameters
    ----------
    link : str
        The name of the link.
    iterations : DataFrame
        The iterations over this link.
    by : str
        The column that names a case, such as "network".

    Returns
    -------
    dict of str to DataFrame
        `Bars` of a single place, "here, " and the link. The dict is empty if there are no
        two cases with both configurations.
    """
    rows = plain(iterations)
    is_odd = rows["repeat"] % 2 == 1
    even = rows[~is_odd]
    default = default_of(rows)
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
            tables.append(means.loc[[default, chosen]].set_axis(labels))
    if len(tables) < 2:
        return {}
    return {f"here, {link}": pd.concat(tables)}


def _mean_parts(cell: pd.DataFrame, default: str, chosen: str) -> pd.DataFrame:
    """Return the means of PARTS in seconds, by configuration.

    They are over the rounds of a cell that have both configurations.
    """
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
        for label in table.index[1::2]:
            case, configuration = label.replace("best: ", "").split(", ", 1)
            names.append(f"{readable(case)}: {readable(configuration)}")
        renamed = table.set_axis(np.repeat(names, 2))
        renamed = renamed.rename(columns={PARTS[0]: "compute only"})

        default_s, best_s = table.sum(axis=1).to_numpy().reshape(-1, 2).T
        n_faster = sum(best_s < default_s)
        n_different = sum(best_s != default_s)
        best = "best configuration"
        if place != SIMULATED:
            best += " of the odd rounds"
        heading = (
            f"{readable(place)}: the best is faster in {n_faster} of {n_different}"
        )
        below = f"batch: {best} (right bar; left bar: the default)"
        drawn[heading] = (renamed, below)
    return drawn
