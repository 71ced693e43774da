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
PAPER = {
    "V100S": "V100S, by the model",
    SIMULATED: "V100S, by the model",
    "relu": "ReLU",
    "paper": "Paper, two V100S",
    "paper, 25 MB": "Paper, 25 MB",
    "paper, fig 4": "Paper, figure 4",
    "paper, fig 8": "Paper, figure 8",
}
_LINK = re.compile(r"(?:lab|emulated):(\d+)([mg])bit(?:-delay(\d+)ms)?")


def readable(name: Any) -> Any:
    """Return a name as readers know it.

    It is of a link, a configuration, a network, a batch, both of these, or a kernel.

    >>> readable("here, emulated:1gbit-delay2ms"), readable("t1-free-idle+t2-own-raised")
    ('Processor, 1 Gbit/s, 2 ms', 't1 idle + t2 own raised')
    >>> readable("resnet18_64, 8")
    'ResNet-18, 64 px, 8'
    """
    if not isinstance(name, str) or name in PAPER:
        return PAPER.get(name, name)
    if link := _LINK.fullmatch(name.removeprefix("here, ")):
        delay = f", {link[3]} ms" if link[3] else ""
        return f"Processor, {link[1]} {link[2].upper()}bit/s{delay}"
    if re.match(r"t\d-|free-|own-|one-", name):
        return re.sub("-free|^free-", "", name).replace("-", " ").replace("+", " + ")
    first, comma, rest = name.removeprefix("here, ").partition(", ")
    return f"{specs.network_title(first).replace('_', ' ')}{comma}{rest}"


# -- heat maps -----------------------------------------------------------------------------------


def cells(panel: str, rows: pd.DataFrame, value: str, index: str = "") -> pd.DataFrame:
    """Return a heat map as a table, a row a number, of rows with a configuration each.

    index : the column that is down the map, and configurations are along it; without it
        both are parts of the configuration's name
    """
    rows = rows if index else one_group(rows)
    names = rows["configuration"]
    parts = names.str.extract(r"(?P<column>t\d)-(?P<row>.*)")
    if index:
        parts = pd.DataFrame({"row": rows[index], "column": names})
    elif not names.str.startswith("t").any():
        parts = names.str.extract(r"(?P<row>\d+)x(?P<column>\d+)").astype(int)
    ends = {end: rows.get(end, np.nan) for end in ENDS}
    order, place = names.map(least_first), pd.factorize(rows[index])[0] if index else 0
    table = parts.assign(
        panel=panel, value=rows[value], **ends, place=place, order=order
    )
    table = table.dropna(subset="value").sort_values(
        ["place", "order"], ignore_index=True
    )
    return table[["panel", "row", "column", "value", *ENDS, "order"]]


def as_saved(table: pd.DataFrame) -> pd.DataFrame:
    """Return `cells` as a figure's CSV has them."""
    return table.drop(columns="order")


def largest(table: pd.DataFrame) -> list[float]:
    """Return the largest ratio of the first panel of `cells`, which is the paper's, and of the others.

    The second is absent where there is no other panel.
    """
    ours = table["panel"] != table["panel"].iloc[0]
    return [
        float(rows["value"].max()) for rows in (table[~ours], table[ours]) if len(rows)
    ]


def maps(table: pd.DataFrame, between: str = "") -> dict[str, Panel]:
    """Return the heat maps of `cells` by heading.

    between : if given, it follows the panel's name in the heading, and after it stands
        how many gains lie beyond their intervals
    """
    drawn = {}
    for name, rows in table.groupby("panel", sort=False):
        says = readable(name)
        if between:
            low, high = (rows[end].fillna(rows["value"]) for end in ENDS)
            says += (
                f"{between}{sum(low > 0)} of {len(rows)} better, {sum(high < 0)} worse"
            )
        rows = rows.assign(
            row=rows["row"].map(readable), column=rows["column"].map(readable)
        )
        order = rows["row"].unique(), rows.sort_values("order")["column"].unique()
        axes = (
            ("blocks", "threads")
            if isinstance(order[0][0], int | np.integer)
            else ("", "")
        )
        wide = rows.pivot(
            index="row", columns="column", values=["value", *ENDS]
        ).astype(float)
        wide = wide.rename_axis(index=axes[0], columns=["", axes[1]])
        drawn[says] = Panel(*(wide[end].loc[order] for end in ("value", *ENDS)))
    return drawn
