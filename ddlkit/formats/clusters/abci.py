"""ABCI 2.0: all-reduces of 4 to 128 GPUs, iterations on one node, whole trainings on 1 to 32 nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.formats import clusters
from ddlkit.store.sheet import Column, Schema, Sheet

if TYPE_CHECKING:
    from pandas import DataFrame

_RANK = re.compile(r"#\s+Rank\s+\d+ Pid\s+\d+ on\s+(\S+) device\s+\d+ \[\w+\] (.+)")
_TITLE = re.compile(r"#\s+size\s+count\s+type\s+redop\s+time\s")
_UNITS = "(B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s)"
_ROW = re.compile(r"\s*\d+\s")
_END = "# Avg bus bandwidth"
_WAYS = ("out_of_place", "in_place")
_LOG = Schema(
    "a log of nccl-tests",
    (
        Column("bytes", "int", "positive"),
        Column("out_of_place_s", "microseconds", "positive"),
        Column("out_of_place_algbw", "float", "non_negative"),
        Column("out_of_place_busbw", "float", "non_negative"),
        Column("in_place_s", "microseconds", "positive"),
        Column("in_place_algbw", "float", "non_negative"),
        Column("in_place_busbw", "float", "non_negative"),
    ),
    key=("bytes",),
)


def read_all_reduce(path: Path) -> DataFrame:
    """Columns bytes, ranks, nodes, device, out_of_place_s and in_place_s, one row a size.

    The log prints microseconds, and bandwidths that must agree with them to the digits printed.

    Raises UserError naming line and column for a log without its last line or with short rows (cut), with a
    second table (two logs in one file), in other units, and for times that contradict their bandwidths.
    """
    text = clusters.read(path)
    lines = text.splitlines()
    ranks = [found for line in lines if (found := _RANK.match(line))]
    devices = {found[2].strip() for found in ranks}
    titles = [line for line in lines if _TITLE.match(line)]
    if len(titles) > 1:
        raise UserError(f"{path}: {len(titles)} tables: two logs in one file? divide them")
    if not titles or len(devices) != 1 or not any(line.startswith(_END) for line in lines):
        raise UserError(f"{path}: lacks ranks of one device, a table or '{_END}': the log is cut")
    if not any(" ".join(line.strip("# ").split()) == _UNITS for line in lines):
        raise UserError(f"{path}: its columns are not {_UNITS}: a log in these units is expected")
    sheet = _sheet(lines, path)
    frame = _LOG.frame(sheet)
    _check_bandwidths(frame, sheet, len(ranks))
    nodes = len({found[1] for found in ranks})
    frame = frame.assign(ranks=len(ranks), nodes=nodes, device=devices.pop())
    return frame[["bytes", "ranks", "nodes", "device", *(f"{way}_s" for way in _WAYS)]]


def _sheet(lines: list[str], path: Path) -> Sheet:
    """Of size, count, type, redop, then time, algbw, busbw and error of either way: all but four."""
    numbers, rows = [], []
    start = next(at for at, line in enumerate(lines) if _TITLE.match(line))
    for number, line in enumerate(lines[start:], start + 1):
        if _ROW.match(line):
            cells = line.split()
            if len(cells) != 12:
                raise UserError(f"{path}: line {number}: {len(cells)} of 12 words: the row is cut")
            numbers.append(number)
            rows.append([cells[0], *cells[4:7], *cells[8:11]])
    if not rows:
        raise UserError(f"{path}: a table without rows: the log is cut, or the run failed")
    return Sheet(str(path), _LOG.names, tuple(numbers), tuple(rows))


def _check_bandwidths(frame: DataFrame, sheet: Sheet, ranks: int) -> None:
    """Printed to 0.01 GB/s, from times that are printed to four digits or more."""
    for way in _WAYS:
        for name, factor in (("algbw", 1.0), ("busbw", bus_factor("all_reduce", ranks))):
            rate = factor * frame["bytes"] / frame[f"{way}_s"] / 1e9
            wrong = (rate - frame[f"{way}_{name}"]).abs() > 0.0051 + 0.001 * rate
            if wrong.any():
                sheet.fail(
                    int(np.argmax(wrong)),
                    f"{way}_{name}",
                    "contradicts size over time: mixed units? the time must be in microseconds",
                )


def read_iterations(path: Path) -> DataFrame:
    """Columns step, iteration_s, compute_s, data_s, ranks, batch (of one GPU) and amp, one row a step.

    iteration_s : images of all GPUs over the throughput that the step printed
    compute_s, data_s : as printed; what is called compute has communication in it

    Raises UserError naming the line for one that is not JSON (cut), for a log without its last summary, and
    where throughput and time contradict each other.
    """
    import pandas as pd

    logged = _logged(path)
    known = logged[0]["data"]
    if "world_size" not in known or logged[-1]["step"] != []:
        raise UserError(f"{path}: lacks its parameters or its last summary: the log is cut")
    images = known["world_size"] * known["batch_size"]
    steps: dict[int, dict[str, Any]] = {}
    for one in logged[1:]:
        if len(one["step"]) == 2:
            steps.setdefault(one["step"][1], {}).update(one["data"])
    rows = []
    for step, data in steps.items():
        try:
            times = data["train.compute_time"], data["train.data_time"]
            rate, compute_rate = data["train.total_ips"], data["train.compute_ips"]
        except KeyError as error:
            raise UserError(f"{path}: step {step}: lacks {error}: the log is cut") from error
        if abs(compute_rate * times[0] / images - 1) > 1e-6:
            raise UserError(
                f"{path}: step {step}: compute_ips contradicts compute_time: mixed units?"
            )
        rows.append((step, images / rate, *times))
    frame = pd.DataFrame(rows, columns=["step", "iteration_s", "compute_s", "data_s"])
    return frame.assign(
        ranks=known["world_size"], batch=known["batch_size"], amp=bool(known["amp"])
    )


def _logged(path: Path) -> list[dict[str, Any]]:
    """Lines of type LOG; the first one holds the parameters."""
    logged = []
    for number, line in enumerate(clusters.read(path).splitlines(), 1):
        try:
            entry = json.loads(line.removeprefix("DLLL "))
            if entry["type"] == "LOG":
                logged.append({"step": entry["step"], "data": entry["data"]})
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: line {number}: not a line of DLLL JSON: the log is cut"
            ) from error
    if not logged:
        raise UserError(f"{path}: no line of type LOG: the log is cut")
    return logged


def read_trainings(path: Path) -> DataFrame:
    """Columns nodes, device, ranks, batch (of one GPU) and training_s: 90 epochs with validation, float32.

    Raises UserError naming row and column for a file that is cut or repeats a row, and where more nodes
    take longer, as in mixed units.
    """
    columns = (
        Column("nodes", "int", "positive"),
        Column("device", "str", "named"),
        Column("ranks", "int", "positive"),
        Column("batch", "int", "positive"),
        Column("training_s", "float", "positive"),
    )
    frame = clusters.read_columns(path, columns, ("nodes", "device"))
    for device, rows in frame.sort_values("nodes").groupby("device"):
        if (np.diff(rows["training_s"]) >= 0).any():
            raise UserError(f"{path}: {device}: more nodes take longer: mixed units? give seconds")
    return frame
