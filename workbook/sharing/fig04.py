"""sharing Fig 4: the gain of training ResNet-18 over the default, by configuration."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.common.claims import Result, check, own, paper_table
from workbook.sharing import implied, shown
from workbook.sharing.printed import RESNET, figure_rows, gains
from workbook.sharing.recordings import Tables, by_link, resnet_gains


def panels(tables: Tables) -> pd.DataFrame:
    """Return `shown.cells` of gains in per cent.

    They are the paper's, as figures 4 and 8 print them, and of each link, as measured.
    """
    network, batch = RESNET
    every = gains()
    again = every[(every["network"] == network) & (every["batch"] == batch)]
    paper = [
        shown.cells("paper, fig 4", figure_rows("fig04"), "gain_percent"),
        shown.cells("paper, fig 8", again, "gain"),
    ]
    return pd.concat([*paper, *measured(tables)], ignore_index=True)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of each link, at the batch with most rows."""
    maps = []
    for link, rows in by_link(tables, "iterations"):
        ours = resnet_gains(rows)
        if len(ours):
            maps.append(shown.cells(link, ours, "gain"))
    return maps


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds."""
    return shown.as_saved(panels(tables))


def draw(tables: Tables) -> Figure:
    """Draw heat maps of figures 4 and 8, and one of each link."""
    table = panels(tables)
    figure = plots.heat_maps(
        shown.maps(table, ":\n"),
        label="gain over the default [%]",
        form="{:+.1f}",
        columns=3,
        height=2.9,
    )
    paper = table[table["panel"].str.startswith("paper")]
    both = paper.set_index(["panel", "row", "column"])["value"].unstack("panel")
    apart = both.drop((2, 256)).diff(axis=1).abs().iloc[:, 1]  # but for the default
    said = (
        f"The paper's figures 4 and 8 differ by up to {apart.max():.1f} percentage points "
        f"(median {apart.median():.1f})"
    )
    plots.title(figure, said)
    return figure


# -- claims --------------------------------------------------------------------------------------

check("sharing-fig04-best", "ResNet-18", 32, "1x256")(implied.gain)


@check("sharing-fig04-like-fig03")
def _alike() -> Result:
    case = ["blocks", "threads"]
    gain = paper_table("sharing", "fig04").set_index(case)["gain_percent"]
    slower = paper_table("sharing", "fig03").pivot(index=case, columns="kernel")
    alike = -slower["slowdown"].corrwith(gain, method="spearman")
    each = ", ".join(f"{kernel} {value:.2f}" for kernel, value in alike.items())
    short = (alike < 0.5).sum()
    note = f"Spearman's, over {len(gain)} cells; {short} fall short: {each}"
    return own(alike, note)
