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
    SENDERS,
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


# -- every configuration -------------------------------------------------------------


def panels(tables: Tables) -> pd.DataFrame:
    """Return `shown.cells` of gains in per cent: the paper's, and those of each link."""
    paper = shown.cells(PAPER, gains(), "gain", "case")
    return pd.concat([paper, *measured(tables)], ignore_index=True)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of each link on which several networks were trained."""
    maps = []
    for link, rows in trained(tables):
        by_case = with_case(throughputs(rows)).sort_values("case")
        maps.append(shown.cells(link, by_case, "gain", "case"))
    return maps


def trained(tables: Tables) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each link on which several networks were trained, and its iterations.

    The iterations are of the configurations that at least half of the cases have. The
    others would leave most of their column in the figure empty.
    """
    for link, iterations in by_link(tables, "iterations"):
        rows = with_case(plain(iterations))
        cases = rows.groupby("configuration")["case"].nunique()
        share = cases / rows["case"].nunique()
        if rows["network"].nunique() > 1:
            yield link, rows[rows["configuration"].map(share) >= 0.5]


def texts(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return all gains as text, a table for the paper and one for each link.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.

    Returns
    -------
    dict of str to DataFrame
        By heading. Rows are networks with a batch, and columns are configurations. A
        heading counts the gains, but for those of the default, that lie beyond their
        intervals.
    """
    tables_by_heading = {}
    for name, rows in panels(tables).groupby("panel", sort=False):
        others = rows[~rows["column"].isin(DEFAULTS)]
        # A printed gain has no interval.
        lower = others["lower"].fillna(others["value"])
        upper = others["upper"].fillna(others["value"])
        where = "Paper, two V100S GPUs"
        if name != PAPER:
            where = _where(readable(name))
        heading = (
            f"{where}: of {len(others)} gains, {sum(lower > 0)} are above zero and "
            f"{sum(upper < 0)} are below zero"
        )
        (panel,) = shown.maps(rows).values()
        written = plots.texts(panel, "{:+.0f}")
        tables_by_heading[heading] = written.rename(columns=_in_words)
    return tables_by_heading


def _where(link: str) -> str:
    """Return which machine a readable link joins, and its rate.

    Examples
    --------
    >>> _where("Processor, 1 Gbit/s"), _where("stand-in, 10 GB/s")
    ('Two processor cores, link of 1 Gbit/s', 'One GPU next to a stand-in, 10 GB/s')
    """
    if link.startswith(SENDERS["standin"]):
        return f"One GPU next to a {link}"
    return f"Two processor cores, link of {link.removeprefix('Processor, ')}"


def _in_words(configuration: str) -> str:
    """Return how the head of a table calls a configuration, and whether it is the default.

    Examples
    --------
    >>> _in_words("t2 normal"), _in_words("t1 idle + t2 raised")
    ('2 threads, normal (default)', '1 thread, idle; last message: 2 threads, raised')
    """
    words = re.sub(r"t(\d) ", r"\1 threads, ", configuration)
    words = words.replace("1 threads", "1 thread").replace(" + ", "; last message: ")
    is_default = configuration in map(readable, DEFAULTS)
    return f"{words} (default)" if is_default else words


# -- the best configuration ----------------------------------------------------------


def best(tables: Tables) -> pd.DataFrame:
    """Return the best configuration of each panel, network and batch.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.

    Returns
    -------
    DataFrame
        The columns ``panel``, ``case``, ``network``, ``batch``, ``configuration``, its
        ``gain`` in per cent, and ``lower`` and ``upper``, which the paper's gains lack.
    """
    paper = gains()
    chosen = paper.loc[paper.groupby("case", sort=False)["gain"].idxmax()]
    frames = [chosen.assign(panel=PAPER)]
    for link, rows in trained(tables):
        frames.append(with_case(_chosen_by_other_rounds(rows)).assign(panel=link))
    columns = ["panel", "case", "network", "batch", "configuration", "gain", *ENDS]
    return pd.concat(frames, ignore_index=True).reindex(columns=columns)


def _chosen_by_other_rounds(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the gain of the best configuration without the luck of having been chosen.

    In each round, the gain is that of the configuration with the largest median gain in
    all other rounds. So no round judges a choice to which it contributed.

    Parameters
    ----------
    iterations : DataFrame
        The iterations over a link.

    Returns
    -------
    DataFrame
        A row for each of CELL, with the median ``gain`` over rounds in per cent, its
        ``lower`` and ``upper``, and the ``configuration`` that is chosen most often.
    """
    ratios = one_group(over_default(iterations, "iteration_s", CELL))
    gain = ratios.assign(gain=100 * (1 / ratios["ratio"] - 1))
    judged = []
    for repeat, in_round in gain.groupby("repeat"):
        others = gain[gain["repeat"] != repeat]
        medians = others.groupby([*CELL, "configuration"])["gain"].median()
        winners = medians.loc[medians.groupby(CELL).idxmax()].reset_index()
        # Merging by all common columns keeps the winner of each cell alone.
        judged.append(in_round.merge(winners[[*CELL, "configuration"]]))
    rounds = pd.concat(judged)
    chosen = rounds.groupby(CELL)["configuration"]
    # Of several that are chosen equally often, the first by name is shown.
    most_often = chosen.agg(lambda names: names.mode().iloc[0])
    return summed(rounds, CELL, "gain").merge(most_often.reset_index())


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds.

    There is a row for each gain. The row of a best configuration also has its ``best_gain``,
    ``best_lower`` and ``best_upper``.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    chosen = best(tables).drop(columns=["network", "batch"])
    chosen = chosen.rename(
        columns={
            "case": "row",
            "configuration": "column",
            "gain": "best_gain",
            "lower": "best_lower",
            "upper": "best_upper",
        }
    )
    every = shown.as_saved(panels(tables))
    return every.merge(chosen, how="left", on=["panel", "row", "column"])


def draw(tables: Tables) -> Figure:
    """Draw the gain of the best configuration, a panel for the paper and each link.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    table = best(tables)
    ours = table[table["panel"] != PAPER]
    printed = table.loc[table["panel"] == PAPER, "gain"]
    message = (
        f"The best configuration gains {printed.min():.0f}% to {printed.max():.0f}% in the "
        "paper"
    )
    if len(ours):
        # A gain is certain if all of its interval is above 0.
        n_certain = (ours["lower"] > 0).sum()
        message += f", and {n_certain} of our {len(ours)} gains are certain"
    by_panel = table.groupby("panel", sort=False)
    figure = plots.heat_maps(
        {readable(name): _panel(rows) for name, rows in by_panel},
        label="gain over the default [%]",
        form="{:+.0f}",
        columns=1,
        height=2.1,
    )
    plots.title(figure, message)
    return figure


def _panel(rows: pd.DataFrame) -> Panel:
    """Return the heat map of one panel of `best`: a row a network, a column a batch."""
    rows = rows.assign(
        network=rows["network"].map(readable),
        configuration=rows["configuration"].map(readable),
    )
    wide = rows.pivot(index="network", columns="batch")
    # A pivot sorts the networks by name. They keep the order of ``rows``.
    wide = wide.loc[rows["network"].unique()].rename_axis(index=None)
    return Panel(
        grid=wide["gain"].astype(float),
        low=wide["lower"].astype(float),
        high=wide["upper"].astype(float),
        names=wide["configuration"],
    )
