"""The numbers that the sharing paper prints, as its model and several figures read them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from workbook.common.claims import paper_table

DEFAULT = "2x256"
"""NCCL's default: two blocks of 256 threads."""
BATCHES = (16, 32, 64, 128)
"""The batch sizes of figure 8 and of Table 2."""
RESNET = ("ResNet-18", 32)
"""The network and the batch of figures 4 and 5."""
ROUNDING = np.array([-0.005, 0.005])
"""The least and the largest rounding error of figures 2 and 3, which print two decimals."""


def configurations(grid: pd.DataFrame) -> list[str]:
    """Return the configuration of each row, such as "2x256".

    ``grid`` has the columns ``blocks`` and ``threads``.
    """
    return [
        f"{blocks}x{threads}"
        for blocks, threads in grid[["blocks", "threads"]].to_numpy()
    ]


def figure_rows(name: str) -> pd.DataFrame:
    """Return the transcribed numbers of a figure, with their ``configuration``."""
    rows = paper_table("sharing", name)
    return rows.assign(configuration=configurations(rows))


@cache
def relative_times() -> pd.Series:
    """Return the time of an all-reduce divided by the default's, by configuration (Fig 2)."""
    grid = paper_table("sharing", "fig02")
    return grid["relative_time"].set_axis(configurations(grid))


def throughput() -> pd.DataFrame:
    """Return the images per second of sharing Fig 8.

    Returns
    -------
    DataFrame
        A row for each network and batch, and a column for each configuration. It is NaN
        where the figure prints nothing.
    """
    rows = paper_table("sharing", "fig08").set_index(["network", "batch"])
    # Other columns of the file are the printed speedup and a note.
    return rows.filter(regex=r"^\d+x\d+$")


def gains() -> pd.DataFrame:
    """Return the gains of sharing Fig 8 over the default.

    Returns
    -------
    DataFrame
        A row for each network, batch and configuration, with the ``gain`` in per cent
        and the ``case``, such as "ResNet-18, 32".
    """
    images_per_s = throughput().rename_axis("configuration", axis=1)
    percent = 100 * (images_per_s.div(images_per_s[DEFAULT], axis=0) - 1)
    # From a column for each configuration to a row for each.
    return with_case(percent.stack().rename("gain").reset_index())


def with_case(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with ``case``, the network and the batch as one text: "ResNet-18, 32"."""
    return rows.assign(case=rows["network"] + ", " + rows["batch"].astype(str))
