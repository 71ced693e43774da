"""sharing Fig 8: the gain of training over the default, by network, batch and configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.plots import Panel
from workbook.sharing import shown
from workbook.sharing.printed import gains, with_case
from workbook.sharing.recordings import (
    CELL,
    DEFAULTS,
    ENDS,
    Tables,
    by_link,
    one_group,
    over_default,
    plain,
    summed,
    throughputs,
)
from workbook.sharing.shown import readable

PAPER = "paper"
"""What the panel of the paper's numbers is called in tables."""


# -- every configuration -------------------------------------------------------------------------


def panels(tables: Tables) -> pd.DataFrame:
    """Return `shown.cells` of gains in per cent: the paper's, and of each link."""
    paper = shown.cells(PAPER, gains(), "gain", "case")
    return pd.concat([paper, *measured(tables)], ignore_index=True)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of each link on which several networks were trained."""
    return [
        shown.cells(
            link, with_case(throughputs(rows)).sort_values("case"), "gain", "case"
        )
        for link, rows in trained(tables)
    ]


def trained(tables: Tables) -> Iterator[tuple[str, pd.DataFrame]]:
    """Give each link on which several networks were trained, and its iterations.

    They are of the configurations that at least half of the cases have.
    """
    for link, every in by_link(tables, "iterations"):
        rows = with_case(plain(every))
        shares = (
            rows.groupby("configuration")["case"].nunique() / rows["case"].nunique()
        )
        if rows["network"].nunique() > 1:
            yield link, rows[rows["configuration"].map(shares) >= 0.5]


def texts(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return all gains as text, by heading: rows are networks with a batch, columns configurations.

    A heading counts the gains that are beyond their intervals, without those of the default.
    """
    gains_of = panels(tables)
    written = {}
    for name, rows in gains_of.groupby("panel", sort=False):
        others = rows[~rows["column"].isin(DEFAULTS)]
        low, high = (others[end].fillna(others["value"]) for end in ENDS)
        where = "Paper, two V100S GPUs"
        if name != PAPER:
            rate = readable(name).removeprefix("Processor, ")
            where = f"Two processor cores, link of {rate}"
        heading = (
            f"{where}: of {len(others)} gains, {sum(low > 0)} are above zero and "
            f"{sum(high < 0)} are below zero"
        )
        (panel,) = shown.maps(rows).values()
        written[heading] = plots.texts(panel, "{:+.0f}").rename(columns=_in_words)
    return written


def _in_words(configuration: str) -> str:
    """Return the name of a configuration for a head of a table, which says which is the default.

    >>> _in_words("t2 normal"), _in_words("t1 idle + t2 raised")
    ('2 threads, normal (default)', '1 thread, idle; last message: 2 threads, raised')
    """
    words = re.sub(r"t(\d) ", r"\1 threads, ", configuration)
    words = words.replace("1 threads", "1 thread").replace(" + ", "; last message: ")
    is_default = configuration in map(readable, DEFAULTS)
    return f"{words} (default)" if is_default else words


# -- the best configuration ----------------------------------------------------------------------


def best(tables: Tables) -> pd.DataFrame:
    """Return a row per panel, network and batch: the best configuration and its ``gain``."""
    paper = gains()
    chosen = paper.loc[paper.groupby("case", sort=False)["gain"].idxmax()]
    frames = [chosen.assign(panel=PAPER)]
    for link, rows in trained(tables):
        frames.append(with_case(_chosen_by_other_rounds(rows)).assign(panel=link))
    columns = ["panel", "case", "network", "batch", "configuration", "gain", *ENDS]
    return pd.concat(frames, ignore_index=True).reindex(columns=columns)


def _chosen_by_other_rounds(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the gain of the configuration that is best in the other rounds, so that luck does not choose.

    The median is over the rounds, and the configuration is the one that is chosen most often.
    """
    ratios = one_group(over_default(iterations, "iteration_s", CELL))
    gain = ratios.eval("gain = 100 * (1 / ratio - 1)")
    judged = []
    for repeat, inside in gain.groupby("repeat"):
        others = gain[gain["repeat"] != repeat]
        medians = others.groupby([*CELL, "configuration"])["gain"].median()
        winners = medians.loc[medians.groupby(CELL).idxmax()].reset_index()
        judged.append(inside.merge(winners[[*CELL, "configuration"]]))
    rounds = pd.concat(judged)
    names = rounds.groupby(CELL)["configuration"].agg(lambda each: each.mode().iloc[0])
    return summed(rounds, CELL, "gain").merge(names.reset_index())


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds: all gains, and those of the best configurations."""
    names = {"case": "row", "configuration": "column", "gain": "best_gain"}
    names |= {end: f"best_{end}" for end in ENDS}
    chosen = best(tables).drop(columns=["network", "batch"]).rename(columns=names)
    every = shown.as_saved(panels(tables))
    return every.merge(chosen, how="left", on=["panel", "row", "column"])


def draw(tables: Tables) -> Figure:
    """Draw the gain of the best configuration by network and batch, of the paper and each link."""
    table = best(tables)
    ours = table[table["panel"] != PAPER]
    printed = table.loc[table["panel"] == PAPER, "gain"]
    said = (
        f"The best configuration gains {printed.min():.0f}% to {printed.max():.0f}% in the "
        "paper"
    )
    if len(ours):
        clear = (ours["lower"] > 0).sum()
        said += f", and {clear} of our {len(ours)} gains are certain"
    figure = plots.heat_maps(
        {
            readable(name): _panel(rows)
            for name, rows in table.groupby("panel", sort=False)
        },
        label="gain over the default [%]",
        form="{:+.0f}",
        columns=1,
        height=2.1,
    )
    plots.title(figure, said)
    return figure


def _panel(rows: pd.DataFrame) -> Panel:
    """Return the map of one panel of `best`, networks down and batches along it."""
    rows = rows.assign(
        network=rows["network"].map(readable),
        name=rows["configuration"].map(readable),
    )
    wide = rows.pivot(index="network", columns="batch")
    wide = wide.loc[rows["network"].unique()].rename_axis(index=None)
    gain, lower, upper = (wide[name].astype(float) for name in ("gain", *ENDS))
    return Panel(gain, lower, upper, wide["name"])
