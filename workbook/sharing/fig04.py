"""sharing Fig 4: the gain of training ResNet-18 over the default, by configuration."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.common.claims import (
    Result,
    by_readings,
    check,
    own,
    paper_table,
)
from workbook.sharing import implied, shown
from workbook.sharing.printed import RESNET, figure_rows, gains
from workbook.sharing.recordings import Tables, by_link, resnet_gains


def panels(tables: Tables) -> pd.DataFrame:
    """Return `shown.cells` of gains in per cent.

    The panels are the gains that figure 4 prints, those that figure 8 prints of the same
    training, and those measured on each link.
    """
    network, batch = RESNET
    printed = gains()
    is_same = (printed["network"] == network) & (printed["batch"] == batch)
    paper = [
        shown.cells("paper, fig 4", figure_rows("fig04"), "gain_percent"),
        shown.cells("paper, fig 8", printed[is_same], "gain"),
    ]
    return pd.concat([*paper, *measured(tables)], ignore_index=True)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of each link, at the batch with the most rows."""
    maps = []
    for link, rows in by_link(tables, "iterations"):
        resnet = resnet_gains(rows)
        if len(resnet):
            maps.append(shown.cells(link, resnet, "gain"))
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
    """Draw heat maps of figures 4 and 8, and one of each link.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
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
    # The default gains nothing in either figure.
    both = both.drop((2, 256))
    differences = (both["paper, fig 8"] - both["paper, fig 4"]).abs()
    message = (
        f"The paper's figures 4 and 8 differ by up to {differences.max():.1f} percentage "
        f"points (median {differences.median():.1f})"
    )
    plots.title(figure, message)
    return figure


# -- claims --------------------------------------------------------------------------

check("sharing-fig04-best", "ResNet-18", 32, "1x256")(implied.gain)


@check("sharing-fig04-like-fig03")
def _alike() -> Result:
    """Correlate the gains of figure 4 with how little each kernel of figure 3 slows."""
    configuration = ["blocks", "threads"]
    gain = paper_table("sharing", "fig04").set_index(configuration)["gain_percent"]
    kernels = paper_table("sharing", "fig03")
    wide = kernels.pivot(index=configuration, columns="kernel", values="slowdown")
    correlations = -wide.corrwith(gain, method="spearman")
    listed = ", ".join(
        f"{kernel} {value:.2f}" for kernel, value in correlations.items()
    )
    # By the claim, "similar" is a correlation of a half or more.
    n_short = (correlations < 0.5).sum()
    note = f"Spearman's, over {len(gain)} cells; {n_short} fall short: {listed}"
    readings = {
        "some kernel": own(correlations.max(), ""),
        "every kernel": own(correlations.min(), ""),
    }
    return by_readings(readings, note)
