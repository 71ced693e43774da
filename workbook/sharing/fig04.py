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
    # RESNET is the training that figure 4 shows.
    network, batch = RESNET
    printed = gains()
    is_same = (printed["network"] == network) & (printed["batch"] == batch)
    # Both columns are in per cent.
    paper = [
        shown.cells("paper, fig 4", figure_rows("fig04"), "gain_percent"),
        shown.cells("paper, fig 8", printed[is_same], "gain"),
    ]
    return pd.concat([*paper, *measured(tables)], ignore_index=True)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of ResNet-18's gains on each link.

    They are at the batch with the most configurations. Links without ResNet-18 are left out.
    """
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
    """Draw heat maps of figure 4, of figure 8, and of the gains on each link.

    The title says by how much figures 4 and 8 differ, although both print the gains of the
    same training.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    table = panels(tables)
    # With ``between``, a heading is the name of its panel, this text and a count of gains, such
    # as "12 of 15 better, 2 worse".
    figure = plots.heat_maps(
        shown.maps(table, between=":\n"),
        label="gain over the default [%]",
        form="{:+.1f}",
        columns=3,
        height=2.9,
    )
    # A row for each configuration, named by blocks and threads, and a column for each figure.
    paper = table[table["panel"].str.startswith("paper")]
    both = paper.set_index(["panel", "row", "column"])["value"].unstack("panel")
    # The default gains nothing in either figure, so that its difference of 0 says nothing.
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
def _similar_to_figure3() -> Result:
    """Correlate the gains of figure 4 with the slowdowns of each kernel of figure 3.

    The paper says that the heat map of figure 4 is similar to those of figure 3. This is taken
    to mean that configurations that slow a kernel down less gain more.
    """
    configuration = ["blocks", "threads"]
    gain = paper_table("sharing", "fig04").set_index(configuration)["gain_percent"]
    kernels = paper_table("sharing", "fig03")
    wide = kernels.pivot(index=configuration, columns="kernel", values="slowdown")
    # The sign is turned, so that 1 means that a smaller slowdown always goes with a larger gain.
    correlations = -wide.corrwith(gain, method="spearman")
    listed = ", ".join(
        f"{kernel} {value:.2f}" for kernel, value in correlations.items()
    )
    # In our reading of the claim, "similar" is a correlation of a half or more.
    n_short = (correlations < 0.5).sum()
    note = f"Spearman's, over {len(gain)} cells; {n_short} fall short: {listed}"
    readings = {
        "some kernel": own(correlations.max(), ""),
        "every kernel": own(correlations.min(), ""),
    }
    return by_readings(readings, note)
