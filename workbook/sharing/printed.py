"""Numbers that the sharing paper prints, as its model and several figures read them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from workbook.common.claims import paper_table

DEFAULT = "2x256"
"""NCCL's default: two blocks of 256 threads."""
BATCHES = (16, 32, 64, 128)
"""Batch sizes of figure 8 and of Table 2."""
RESNET = ("ResNet-18", 32)
"""Network and batch of figures 4 and 5."""
ROUNDING = np.array([-0.005, 0.005])
"""How far a number of figures 2 and 3, which print two decimals, may be off."""


def configurations(grid: pd.DataFrame) -> list[str]:
    """Return the configuration of each row with columns blocks and threads."""
    return [
        f"{blocks}x{threads}"
        for blocks, threads in grid[["blocks", "threads"]].to_numpy()
    ]


def figure_rows(name: str) -> pd.DataFrame:
    """Return a figure's transcribed numbers, with their configuration."""
    rows = paper_table("sharing", name)
    return rows.assign(configuration=configurations(rows))


@cache
def relative_times() -> pd.Series:
    """Return the time of an all-reduce by configuration, over the default's (Fig 2)."""
    grid = paper_table("sharing", "fig02")
    return grid["relative_time"].set_axis(configurations(grid))


def throughput() -> pd.DataFrame:
    """Return images per second, sharing Fig 8.

    A row is a network and batch, and a column a configuration.
    """
    rows = paper_table("sharing", "fig08").set_index(["network", "batch"])
    return rows.filter(regex=r"^\d+x\d+$")


def gains() -> pd.DataFrame:
    """Return figure 8's gains over the default in per cent.

    A row has configuration, network, batch, `gain`, and network and batch as `case`.
    """
    images = throughput().rename_axis("configuration", axis=1)
    percent = 100 * (images.div(images[DEFAULT], axis=0) - 1)
    return with_case(percent.stack().rename("gain").reset_index())


def with_case(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with network and batch as one text, `case`."""
    return rows.assign(case=rows["network"] + ", " + rows["batch"].astype(str))
