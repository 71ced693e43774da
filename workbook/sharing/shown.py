"""How the sharing paper's figures name and lay out what they show."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd

from workbook.common import specs
from workbook.plots import Panel
from workbook.sharing.recordings import ENDS, least_first, one_group

SIMULATED = "V100S, simulated"
TITLES = {
    "V100S": "V100S, by the model",
    SIMULATED: "V100S, by the model",
    "relu": "ReLU",
    "paper": "Paper, two V100S",
    "paper, 25 MB": "Paper, 25 MB",
    "paper, fig 4": "Paper, figure 4",
    "paper, fig 8": "Paper, figure 8",
}
"""The names that are written out differently, without a rule."""
_LINK = re.compile(
    r"(?:lab|emulated):(?P<rate>\d+)(?P<prefix>[mg])bit(?:-delay(?P<delay_ms>\d+)ms)?"
)
_CONFIGURATION = re.compile(r"t\d-|free-|own-|one-")


def readable(name: Any) -> Any:
    """Return a name as readers know it.

    Parameters
    ----------
    name : Any
        The name of a panel, a link, a configuration, a network, a network and a batch, or
        a kernel. Only the name of a link may begin with "here, ", which is left out. What is
        no text, such as a number of blocks, is returned as it is.

    Examples
    --------
    >>> readable("here, emulated:1gbit-delay2ms"), readable("t1-free-idle+t2-own-raised")
    ('Processor, 1 Gbit/s, 2 ms', 't1 idle + t2 own raised')
    >>> readable("resnet18_64, 8"), readable("batch_norm"), readable("here, copy engine")
    ('ResNet-18, 64 px, 8', 'batch norm', 'copy engine')
    """
    if not isinstance(name, str):
        return name
    if name in TITLES:
        return TITLES[name]
    # The bars of figures 6 and 7 have names such as "here, lab:1gbit".
    without_here = name.removeprefix("here, ")
    link = _LINK.fullmatch(without_here)
    if link:
        # Only processors were joined by such links.
        title = f"Processor, {link['rate']} {link['prefix'].upper()}bit/s"
        if link["delay_ms"]:
            title += f", {link['delay_ms']} ms"
        return title
    if _CONFIGURATION.match(name):
        # Free cores are the common case, which goes without saying: "free-idle" and
        # "t1-free-idle" become "idle" and "t1 idle".
        words = re.sub("-free|^free-", "", name)
        return words.replace("-", " ").replace("+", " + ")
    # A network, alone or with a batch after the comma, gets its title. All other names, such as
    # "stand-in, 10 GB/s", "batch_norm" or "1x64", have no title, and stay as they are but for
    # underscores.
    first, comma, rest = without_here.partition(", ")
    return f"{specs.network_title(first).replace('_', ' ')}{comma}{rest}"


# -- heat maps -----------------------------------------------------------------------


def cells(panel: str, rows: pd.DataFrame, value: str, index: str = "") -> pd.DataFrame:
    """Return the cells of a heat map as a table with a row for each number.

    Parameters
    ----------
    panel : str
        The name of the heat map.
    rows : DataFrame
        The numbers, each with its ``configuration``, and with ``lower`` and ``upper`` if
        they have an interval.
    value : str
        The column of ``rows`` with the numbers. Rows without a number are left out.
    index : str, optional
        The column that names the rows of the map, whose columns are then configurations.
        By default, rows and columns are the two parts of a configuration's name, such as
        blocks and threads: "2x256" stands in row 2 and column 256. A configuration that
        gives the last message other resources, such as "2x256+1x64", has four parts, and
        is left out.

    Returns
    -------
    DataFrame
        The columns ``panel``, ``row``, ``column``, ``value``, ``lower``, ``upper``, and
        ``order``, by which the columns of the map are sorted. Without an interval, ``lower``
        and ``upper`` are NaN.
    """
    # ``parts`` says in which row and column of the map each number stands.
    if index:
        parts = pd.DataFrame({"row": rows[index], "column": rows["configuration"]})
        # Rows of the map stand in the order in which they are given.
        row_order = pd.factorize(rows[index])[0]
    else:
        # Names with a "+" have four parts.
        rows = one_group(rows)
        parts = _parts_of_name(rows["configuration"])
        # All numbers are sorted by their configuration alone.
        row_order = 0
    table = parts.assign(
        panel=panel,
        value=rows[value],
        **{end: rows.get(end, np.nan) for end in ENDS},
        row_order=row_order,
        order=rows["configuration"].map(least_first),
    )
    table = table.dropna(subset="value")
    table = table.sort_values(["row_order", "order"], ignore_index=True)
    return table[["panel", "row", "column", "value", *ENDS, "order"]]


def _parts_of_name(configurations: pd.Series) -> pd.DataFrame:
    """Return the ``row`` and the ``column`` of a heat map in which each configuration stands.

    All configurations are of a processor, such as "t2-free-normal", or all are blocks and
    threads, such as "2x256".
    """
    if configurations.str.startswith("t").any():
        # Threads are the columns. Cores and priority together are the rows.
        return configurations.str.extract(r"(?P<column>t\d)-(?P<row>.*)")
    shapes = configurations.str.extract(r"(?P<row>\d+)x(?P<column>\d+)")
    return shapes.astype(int)


def as_saved(table: pd.DataFrame) -> pd.DataFrame:
    """Return `cells` as a figure's CSV has them."""
    return table.drop(columns="order")


def largest(table: pd.DataFrame) -> list[float]:
    """Return the largest number of the paper, and the largest of all other panels.

    ``table`` has the rows of `cells` of all panels, the paper's first. If it has no other
    panel, the list has only the paper's number.
    """
    is_paper = table["panel"] == table["panel"].iloc[0]
    groups = (table[is_paper], table[~is_paper])
    return [float(rows["value"].max()) for rows in groups if len(rows)]


def maps(table: pd.DataFrame, between: str = "") -> dict[str, Panel]:
    """Return the heat maps of `cells` by their headings.

    Parameters
    ----------
    table : DataFrame
        The rows of `cells` of all panels.
    between : str, optional
        If given, the numbers are gains, and the heading is the name of the panel, this
        text, and how many gains have an interval above 0 or below it. By default, the
        heading is only the name.
    """
    drawn = {}
    for name, rows in table.groupby("panel", sort=False):
        heading = readable(name)
        if between:
            # A printed gain has no interval, and stands for both ends of one.
            lower = rows["lower"].fillna(rows["value"])
            upper = rows["upper"].fillna(rows["value"])
            heading += (
                f"{between}{sum(lower > 0)} of {len(rows)} better, "
                f"{sum(upper < 0)} worse"
            )
        drawn[heading] = _panel(rows)
    return drawn


def _panel(rows: pd.DataFrame) -> Panel:
    """Return the heat map of one panel of `cells`."""
    rows = rows.assign(
        row=rows["row"].map(readable), column=rows["column"].map(readable)
    )
    # A pivot sorts rows and columns by name. Rows keep the order of `cells` instead, and
    # columns follow the configurations, from the least resources to the most.
    row_names = rows["row"].unique()
    column_names = rows.sort_values("order")["column"].unique()
    # If the rows are numbers, they are blocks, and the columns are threads. All other names are
    # words, which need no label of their axis.
    row_axis = ""
    column_axis = ""
    if isinstance(row_names[0], int | np.integer):
        row_axis = "blocks"
        column_axis = "threads"
    # The columns have two levels: "value", "lower" or "upper", and the column of the map.
    wide = rows.pivot(index="row", columns="column", values=["value", *ENDS])
    wide = wide.astype(float).rename_axis(index=row_axis, columns=["", column_axis])
    numbers, lower, upper = (
        wide[name].loc[row_names, column_names] for name in ("value", *ENDS)
    )
    return Panel(numbers, lower, upper)
