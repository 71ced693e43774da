"""Iterations of a GPT-2 XL sized model on two GPUs by bucket size, and all-reduces of the same machine.

What the source calls MB, of buckets and of all-reduces, is 1024^2 bytes in the programs that measured it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.formats import clusters
from ddlkit.store.sheet import Column

if TYPE_CHECKING:
    from pandas import DataFrame

_ITERATIONS = (
    Column("batch", "int", "positive"),
    Column("sequence", "int", "positive"),
    Column("bucket_mb", "int", "non_negative"),
    Column("iteration_s", "float", "positive"),
    Column("wait_s", "float", "positive"),
    Column("overlap", "bool", default="True"),
)
_ALL_REDUCE = (
    Column("ranks", "int", "positive"),
    Column("mb", "int", "positive"),
    Column("seconds", "float", "positive"),
)


def read_iterations(path: Path) -> DataFrame:
    """Columns batch, sequence (tokens), bucket_bytes, iteration_s, wait_s, overlap; a row a configuration.

    batch : of one GPU. bucket_bytes : 0 where each tensor travels alone
    wait_s : what the source prints as the time of the all-reduce: from when the host has asked for all of
        backward until the GPU has done everything but the update
    overlap : whether gradients travel beside backward, or all of them after it

    Raises UserError naming row and column for a file that is cut, or a wait longer than its iteration.
    """
    frame = clusters.read_columns(path, _ITERATIONS, ("batch", "sequence", "bucket_mb"))
    for row in frame.itertuples():
        if row.wait_s >= row.iteration_s:
            raise UserError(
                f"{path}: row {row.Index + 1}: wait_s {row.wait_s:g} is not below iteration_s "
                f"{row.iteration_s:g}: mixed units? give both in seconds"
            )
    frame["bucket_mb"] *= MIB
    return frame.rename(columns={"bucket_mb": "bucket_bytes"})


def read_all_reduce(path: Path) -> DataFrame:
    """Columns ranks, bytes and seconds, the slowest rank's; float32 sums.

    Raises UserError naming row and column for a file that is cut, and where more bytes take a tenth of the
    time of fewer, as in mixed units.
    """
    frame = clusters.read_columns(path, _ALL_REDUCE, ("ranks", "mb"))
    for ranks, rows in frame.sort_values("mb").groupby("ranks"):
        if (rows["seconds"].to_numpy()[1:] < rows["seconds"].to_numpy()[:-1] / 10).any():
            raise UserError(
                f"{path}: {ranks} ranks: more bytes take a tenth of the time: mixed units? give seconds"
            )
    return frame.assign(bytes=frame["mb"] * MIB)[["ranks", "bytes", "seconds"]]
