"""sharing Fig 8: the gain of training over the default, by network, batch and configuration."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.plots import Panel
from workbook.sharing import shown
from workbook.sharing.printed import gains, with_case
from workbook.sharing.recordings import Tables, by_link, plain, throughputs


def panels(tables: Tables) -> pd.DataFrame:
    """Return `shown.cells` of gains in per cent: the paper's, and of each link."""
    paper = shown.cells("paper", gains(), "gain", "case")
    return pd.concat([paper, *measured(tables)], ignore_index=True)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of each link on which several networks were trained.

    They are of the configurations that at least half of the cases have.
    """
    maps = []
    for link, rows in by_link(tables, "iterations"):
        each = with_case(throughputs(plain(rows)))
        shares = (
            each.groupby("configuration")["case"].nunique() / each["case"].nunique()
        )
        if each["network"].nunique() > 1:
            often = each[each["configuration"].map(shares) >= 0.5]
            maps.append(shown.cells(link, often.sort_values("case"), "gain", "case"))
    return maps


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds."""
    return shown.as_saved(panels(tables))


def maps(tables: Tables) -> dict[str, Panel]:
    """Return the heat maps by heading, which counts gains beyond their intervals."""
    return shown.maps(panels(tables), ": ")


def draw(tables: Tables) -> Figure:
    """Draw a heat map of the paper, and one of each link."""
    return plots.heat_maps(
        maps(tables),
        label="gain over the default [%]",
        form="{:+.0f}",
        columns=1,
        height=3.6,
    )
