"""Vidur: a thousand and more sizes of NCCL's all-reduce, on nodes of A100 and H100 GPUs.

A time is the median of eleven kernels in a row, on one rank, in whole microseconds as the profiler gives
them; each size was timed three times. Buffers are of float16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlkit.core.errors import UserError
from ddlkit.formats import clusters
from ddlkit.store.sheet import Column

if TYPE_CHECKING:
    from pandas import DataFrame

_TIMES = ("min", "median", "max")
_COLUMNS = (
    *(Column(name, "int", "positive") for name in ("ranks", "per_node", "bytes")),
    *(Column(f"{name}_us", "microseconds", "positive") for name in _TIMES),
)
LEAST_SHARE = 0.1
"""More bytes take at least so much of the longest time of fewer; in mixed units they do not."""


def read_all_reduce(path: Path) -> DataFrame:
    """Columns table, ranks, per_node (ranks of one node), bytes, min_s, median_s and max_s of three times.

    table : the machine, as the file is named, ranks and per_node, as "h100_dgx-8x8"; a row a size, or two

    Raises UserError naming row and column for a file that is cut, more ranks on a node than there are, times
    out of order, and times that are not all of one unit.
    """
    frame = clusters.read_columns(path, _COLUMNS, ())
    frame = frame.rename(columns={f"{name}_us": f"{name}_s" for name in _TIMES})
    wrong = {
        "more ranks on a node than there are": frame["per_node"] > frame["ranks"],
        "min, median and max are not in this order: not all in microseconds?": (
            (frame["min_s"] > frame["median_s"]) | (frame["median_s"] > frame["max_s"])
        ),
    }
    for problem, rows in wrong.items():
        if rows.any():
            raise UserError(f"{path}: row {int(rows.to_numpy().argmax()) + 1}: {problem}")
    machine = path.name.partition("-")[0]
    tables = frame.groupby(["ranks", "per_node"])
    if tables["bytes"].agg(frozenset).nunique() > 1:
        raise UserError(f"{path}: its tables are not of the same sizes: the file is cut")
    for (ranks, per_node), rows in tables:
        times = rows.sort_values("bytes", kind="stable")["median_s"]
        if (times < LEAST_SHARE * times.cummax()).any():
            raise UserError(
                f"{path}: {ranks} ranks, {per_node} a node: more bytes take a tenth of the time: mixed "
                "units? give microseconds"
            )
    names = machine + "-" + frame["ranks"].astype(str) + "x" + frame["per_node"].astype(str)
    frame.insert(0, "table", names)
    return frame
