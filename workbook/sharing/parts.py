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
    """Return the bars of a link, a pair for each case: the default, then the best.

    A case is a network and a batch, with one plan of buckets and over one link. The columns of
    CELL tell cases apart. The best configuration has the largest gain in the odd rounds. The
    bars are means over the even rounds, so that the luck that helped to choose a configuration
    is not shown. As in the paper, iterations count only if they have DDP's own plan of buckets,
    and the best is one of the configurations that give all messages the same resources. Ranks
    compute with a single thread.

    Parameters
    ----------
    link : str
        The name of the link.
    iterations : DataFrame
        The iterations over this link, as `recordings.recorded` returns them.
    by : str
        The column of CELL that names a case in labels and by which cases are sorted: "network"
        or "batch", whichever of the two a figure compares.

    Returns
    -------
    dict of str to DataFrame
        `Bars` of a single place, which is named "here, <link>". The dict is empty if fewer
        than two cases have both configurations in an even round.
    """
    # `plain` keeps DDP's own plan and a single thread of compute in each rank. Configurations that
    # give the last message other resources are left out later, by `_best_of_cases`.
    rows = plain(iterations)
    is_odd = rows["repeat"] % 2 == 1
    even = rows[~is_odd]
    default = default_of(rows)
    best = _best_of_cases(rows[is_odd]).sort_values(by)
    tables = []
    for _, best_row in best.iterrows():
        chosen = best_row["configuration"]
        # The iterations of the same case, which has the same values of CELL.
        even_of_case = of_cell(even, best_row)
        # A row for each of the two configurations, or for the only one if they are the same.
        means = _mean_parts(even_of_case, default, chosen)
        # The table is empty if a recording ended before an even round had both configurations.
        if means.empty:
            continue
        case = best_row[by]
        best_name = "default" if chosen == default else chosen
        labels = [f"{case}, default", f"{case}, best: {best_name}"]
        # If the default is the best, its row is taken twice, so that there are two bars.
        tables.append(means.loc[[default, chosen]].set_axis(labels))
    # The figures compare batches or networks, and a single one has nothing to compare with.
    if len(tables) < 2:
        return {}
    return {f"here, {link}": pd.concat(tables)}


def _best_of_cases(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the row of the configuration with the largest gain in each case.

    The rows are of `throughputs` for these iterations.
    """
    # `one_group` keeps configurations that give all messages the same resources.
    gains = one_group(throughputs(iterations))
    return gains.loc[gains.groupby(CELL, sort=False)["gain"].idxmax()]


def _mean_parts(cell: pd.DataFrame, default: str, chosen: str) -> pd.DataFrame:
    """Return the means of PARTS in seconds under the default and the chosen configuration.

    Parameters
    ----------
    cell : DataFrame
        The iterations of one network, batch, plan and link.
    default, chosen : str
        The two configurations, which may be the same one.

    Returns
    -------
    DataFrame
        A row for each of the two configurations, with the means over the rounds in which
        both were measured. Without such a round there is no row.
    """
    # The set has one element if the default is the best.
    both = {default, chosen}
    cell = cell[cell["configuration"].isin(both)]
    # How many of the two were measured in the round of each row.
    n_in_round = cell.groupby("repeat")["configuration"].transform("nunique")
    cell = cell[n_in_round == len(both)]
    # The rest of an iteration, in which nothing is sent.
    compute_only_s = cell["iteration_s"] - cell["communication_s"]
    columns = (compute_only_s, cell["overlap_s"], cell["exposed_communication_s"])
    parts_s = pd.concat(columns, axis=1, keys=PARTS)
    return parts_s.groupby(cell["configuration"]).mean()


def pairs(bars: Bars) -> dict[str, tuple[pd.DataFrame, str]]:
    """Return the bars as `workbook.plots.paired_bars` takes them.

    Parameters
    ----------
    bars : Bars
        The bars of each place.

    Returns
    -------
    dict of str to (DataFrame, str)
        By heading, the bars, and the text below them that says which bar of a pair is
        which. The heading says in how many cases the best configuration is faster than the
        default. Cases in which the default is the best do not count.
    """
    drawn = {}
    for place, table in bars.items():
        # Both bars of a pair have the same name.
        renamed = table.set_axis(np.repeat(_names_of_pairs(table), 2))
        renamed = renamed.rename(columns={PARTS[0]: "compute only"})
        best = "best configuration"
        # The odd rounds choose the best configuration of a link, and the bars show its even rounds.
        # The simulation has no rounds. Its best configuration is that of figure 8.
        if place != SIMULATED:
            best += " of the odd rounds"
        # This explains the names of pairs, such as "64: 1x64": the batch and the best.
        below = f"batch: {best} (right bar; left bar: the default)"
        heading = f"{readable(place)}: the best is faster in {_times_faster(table)}"
        drawn[heading] = (renamed, below)
    return drawn


def _names_of_pairs(table: pd.DataFrame) -> list[str]:
    """Return the case and the best configuration of each pair of bars, as they are drawn.

    ``table`` is one of `Bars`.
    """
    # Every second row is a best configuration, after the default of its case. Its label is
    # such as "64, best: 1x64", or in the simulation "64, 1x64".
    names = []
    for label in table.index[1::2]:
        case, configuration = label.replace("best: ", "").split(", ", 1)
        names.append(f"{readable(case)}: {readable(configuration)}")
    return names


def _times_faster(table: pd.DataFrame) -> str:
    """Return in how many pairs of bars the best configuration is faster, such as "3 of 4".

    ``table`` is one of `Bars`. If the default is the best, both bars have the same numbers, and
    the pair does not count.
    """
    # The sum of the parts is an iteration.
    iterations_s = table.sum(axis=1).to_numpy()
    # Rows of the default and of the best alternate.
    default_s = iterations_s[0::2]
    best_s = iterations_s[1::2]
    return f"{sum(best_s < default_s)} of {sum(best_s != default_s)}"
