"""Iteration times that Pollux's authors measured: T4 GPUs, six networks, many placements and batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.formats import clusters
from ddlkit.store.sheet import Column

if TYPE_CHECKING:
    from pandas import DataFrame

_TIMES = (
    Column("local_bsz", "int", "positive"),
    Column("step_time", "float", "positive"),
    Column("sync_time", "float", "positive"),
)
_PLACED = (Column("placement", "str", "named"), *_TIMES)
_SCALED = (
    Column("num_nodes", "int", "positive"),
    Column("num_replicas", "int", "positive"),
    *_TIMES,
)

MOST_SPREAD = 50.0
"""A placement's slowest iteration takes no longer than so many of its fastest; mixed units do."""


def read_iterations(path: Path) -> DataFrame:
    """Columns placement, nodes, ranks, batch (of one GPU), iteration_s and sync_s, one row a cell measured.

    placement : how many GPUs on each node, a digit a node; "" in a file by nodes and ranks
    sync_s : as published, the part of the iteration in which gradients are synchronised

    Raises UserError naming row and column for rows cut short, an empty placement or one that is not digits
    from 1 to 9, fewer ranks than nodes, a cell measured twice, and times that are not all of one unit.
    """
    placed = clusters.read(path).startswith("placement,")
    columns, place = (
        (_PLACED, ["placement"]) if placed else (_SCALED, ["num_nodes", "num_replicas"])
    )
    frame = clusters.read_columns(path, columns, (*place, "local_bsz"))
    if placed:
        for text in frame["placement"]:
            if not text.isascii() or not text.isdigit() or "0" in text:
                raise UserError(
                    f"{path}: placement {text!r}: must be GPUs of each node, 1 to 9 each"
                )
        frame["num_nodes"] = frame["placement"].str.len()
        frame["num_replicas"] = [sum(map(int, text)) for text in frame["placement"]]
    else:
        frame["placement"] = ""
    _check_counts_and_units(frame, path, place)
    names = {"num_nodes": "nodes", "num_replicas": "ranks", "local_bsz": "batch"}
    names |= {"step_time": "iteration_s", "sync_time": "sync_s"}
    frame = frame.rename(columns=names)
    return frame[["placement", "nodes", "ranks", "batch", "iteration_s", "sync_s"]]


def _check_counts_and_units(frame: DataFrame, path: Path, place: list[str]) -> None:
    """Row numbers in messages count from 1, below the header."""
    wrong = {
        "fewer ranks than nodes": frame["num_replicas"] < frame["num_nodes"],
        "sync_time above step_time: not both in seconds?": frame["sync_time"] > frame["step_time"],
    }
    for problem, rows in wrong.items():
        if rows.any():
            raise UserError(f"{path}: row {int(np.argmax(rows)) + 1}: {problem}")
    spread = frame.groupby(place)["step_time"].agg(lambda times: times.max() / times.min())
    if spread.max() > MOST_SPREAD:
        raise UserError(
            f"{path}: {' '.join(place)} {spread.idxmax()}: its step_time differ {spread.max():.3g} "
            "times: mixed units? give all in seconds"
        )
