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
    """Return `shown.cells` of each link on which several networks were trained.

    A row of a heat map is a network with a batch, and a column is a configuration.
    """
    maps = []
    for link, rows in trained(tables):
        by_case = with_case(throughputs(rows)).sort_values("case")
        maps.append(shown.cells(link, by_case, "gain", "case"))
    return maps


def trained(tables: Tables) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each link on which several networks were trained, and its iterations.

    The iterations are those that `plain` keeps, of DDP's own plan and with one thread of
    compute in each rank. Their configurations are those that at least half of the cases
    have, where a case is a network with a batch. Other configurations would leave most of
    their column in the figure empty.
    """
    for link, iterations in by_link(tables, "iterations"):
        rows = with_case(plain(iterations))
        # In which share of all cases each configuration was measured.
        cases = rows.groupby("configuration")["case"].nunique()
        share = cases / rows["case"].nunique()
        # The figure compares networks, so that a link with a single one is left out.
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
        By heading. Rows are networks with a batch, and columns are configurations. The
        heading names the machine, and counts the gains of all configurations but the
        default: how many there are, and how many have an interval above 0 or below it.
    """
    tables_by_heading = {}
    for name, rows in panels(tables).groupby("panel", sort=False):
        # The default gains 0 by definition.
        others = rows[~rows["column"].isin(DEFAULTS)]
        # A printed gain has no interval, and stands for both ends of one.
        lower = others["lower"].fillna(others["value"])
        upper = others["upper"].fillna(others["value"])
        where = "Paper, two V100S GPUs"
        if name != PAPER:
            where = _where(readable(name))
        heading = (
            f"{where}: of {len(others)} gains, {sum(lower > 0)} are above zero and "
            f"{sum(upper < 0)} are below zero"
        )
        # All rows are of one panel, so that they make a single heat map.
        (panel,) = shown.maps(rows).values()
        written = plots.texts(panel, "{:+.0f}")
        tables_by_heading[heading] = written.rename(columns=_in_words)
    return tables_by_heading


def _where(link: str) -> str:
    """Return what machine a link belongs to, and its rate, for the heading of a table.

    ``link`` is the name of a link as `readable` returns it.

    Examples
    --------
    >>> _where("Processor, 1 Gbit/s"), _where("stand-in, 10 GB/s")
    ('Two processor cores, link of 1 Gbit/s', 'One GPU next to a stand-in, 10 GB/s')
    """
    if link.startswith(SENDERS["standin"]):
        return f"One GPU next to a {link}"
    return f"Two processor cores, link of {link.removeprefix('Processor, ')}"


def _in_words(configuration: str) -> str:
    """Return the head of a table's column for a configuration, with a mark of the default.

    ``configuration`` is a name as `readable` returns it.

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
        ``gain`` in per cent, and the ends of its interval, ``lower`` and ``upper``, which
        are NaN for the paper's gains.
    """
    # The paper's best configuration of a case has the largest printed gain.
    paper = gains()
    chosen = paper.loc[paper.groupby("case", sort=False)["gain"].idxmax()]
    frames = [chosen.assign(panel=PAPER)]
    for link, rows in trained(tables):
        # For the gain of each round, all other rounds choose the configuration, so that no
        # configuration counts as the best because of luck in the round of its gain.
        frames.append(with_case(_chosen_by_other_rounds(rows)).assign(panel=link))
    columns = ["panel", "case", "network", "batch", "configuration", "gain", *ENDS]
    # Without any link, `reindex` adds the columns of intervals.
    return pd.concat(frames, ignore_index=True).reindex(columns=columns)


def _chosen_by_other_rounds(iterations: pd.DataFrame) -> pd.DataFrame:
    """Return the gain of the best configuration without the luck of having been chosen.

    In each round, the gain is that of the configuration with the largest median gain in all
    other rounds. So the noise of a round does not help to choose the configuration whose gain
    is taken from this round. Configurations that give the last message other resources do not
    count.

    Parameters
    ----------
    iterations : DataFrame
        The iterations over a link.

    Returns
    -------
    DataFrame
        A row for each network, batch, plan and link (CELL), with the median ``gain`` over
        rounds in per cent, the 95% interval of the median from ``lower`` to ``upper``, and
        the ``configuration`` that is chosen most often.
    """
    ratios = one_group(over_default(iterations, "iteration_s", CELL))
    # An iteration of r times the default's has 1 / r times its throughput.
    gains_by_round = ratios.assign(gain=100 * (1 / ratios["ratio"] - 1))
    of_chosen = []
    for repeat, in_round in gains_by_round.groupby("repeat"):
        others = gains_by_round[gains_by_round["repeat"] != repeat]
        others_medians = others.groupby([*CELL, "configuration"])["gain"].median()
        # For each network, batch, plan and link, the configuration with the largest median.
        best_of_others = others_medians.groupby(CELL).idxmax()
        chosen = others_medians.loc[best_of_others].reset_index()
        # The merge by CELL and configuration keeps this round's gains of the chosen ones.
        of_chosen.append(in_round.merge(chosen[[*CELL, "configuration"]]))
    rounds = pd.concat(of_chosen)
    names_by_cell = rounds.groupby(CELL)["configuration"]
    # If several configurations are chosen equally often, the first by name is shown.
    most_often = names_by_cell.agg(lambda names: names.mode().iloc[0])
    # `summed` returns the median gain over the rounds, with its 95% interval.
    medians = summed(rounds, keys=CELL, value="gain")
    return medians.merge(most_often.reset_index())


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds.

    There is a row for each gain. The row of a best configuration also has the columns
    ``best_gain``, ``best_lower`` and ``best_upper`` of `best`. They are NaN in other rows.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    # The columns are renamed as in `shown.cells`, where the case is the row of a heat map.
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
        # We call a gain certain if its whole interval is above 0.
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
    """Return the heat map of one panel of `best`.

    There is a row for each network, and a column for each batch. The name of the best
    configuration is written after its gain.
    """
    rows = rows.assign(
        network=rows["network"].map(readable),
        configuration=rows["configuration"].map(readable),
    )
    # The columns have two levels: a column of `best`, and the batch.
    wide = rows.pivot(index="network", columns="batch")
    # The pivot has sorted the networks by name. They get the order of ``rows`` back.
    wide = wide.loc[rows["network"].unique()].rename_axis(index=None)
    return Panel(
        grid=wide["gain"].astype(float),
        low=wide["lower"].astype(float),
        high=wide["upper"].astype(float),
        names=wide["configuration"],
    )
