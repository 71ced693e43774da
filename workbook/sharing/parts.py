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
"""By where they are of: PARTS in seconds, a row per case and configuration.

Every two rows belong together: the default, then the best.
"""


def measured_parts(
    link: str, iterations: pd.DataFrame, by: str
) -> dict[str, pd.DataFrame]:
    """Return bars of a link, or nothing where no case has both configurations.

    They are means of the even rounds; the best configuration is that of the odd ones.

    by : the column that names a case, such as "network"
    """
    rows, bars = plain(iterations), [pd.DataFrame()]
    odd, default = rows["repeat"] % 2 == 1, default_of(rows)
    gains, even = one_group(throughputs(rows[odd])), rows[~odd]
    best = gains.loc[gains.groupby(CELL, sort=False)["gain"].idxmax()].sort_values(by)
    for _, row in best.iterrows():
        chosen = row["configuration"]
        cell = of_cell(even, row)
        cell = cell[cell["configuration"].isin([default, chosen])]
        count = cell.groupby("repeat")["configuration"].transform("nunique")
        cell = cell[count == len({default, chosen})]
        alone_s = cell["iteration_s"] - cell["communication_s"]
        columns = alone_s, cell["overlap_s"], cell["exposed_communication_s"]
        means = (
            pd.concat(columns, axis=1, keys=PARTS).groupby(cell["configuration"]).mean()
        )
        if len(means):
            label = f"{row[by]}, best: {'default' if chosen == default else chosen}"
            bars.append(
                means.loc[[default, chosen]].set_axis([f"{row[by]}, default", label])
            )
    return {f"here, {link}": pd.concat(bars)} if len(bars) > 2 else {}


def pairs(bars: Bars) -> dict[str, tuple[pd.DataFrame, str]]:
    """Return for `plots.paired_bars` the bars by heading, and which of a pair is which.

    A heading counts in how many cases the best wins.
    """
    drawn = {}
    for name, table in bars.items():
        cases = [
            label.replace("best: ", "").split(", ", 1) for label in table.index[1::2]
        ]
        names = [f"{readable(case)}: {readable(way)}" for case, way in cases]
        default_s, best_s = table.sum(axis=1).to_numpy().reshape(-1, 2).T
        won = f"the best is faster in {sum(best_s < default_s)} of {sum(best_s != default_s)}"
        renamed = table.set_axis(np.repeat(names, 2)).rename(
            columns={PARTS[0]: "compute only"}
        )
        which = "best configuration" + " of the odd rounds" * (name != SIMULATED)
        below = f"batch: {which} (right bar; left bar: the default)"
        drawn[f"{readable(name)}: {won}"] = renamed, below
    return drawn
