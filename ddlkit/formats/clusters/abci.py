"""ABCI 2.0: all-reduces of 4 to 128 GPUs, iterations on one node, whole trainings on 1 to 32 nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.formats import clusters, nccl_tests
from ddlkit.store.sheet import Column

if TYPE_CHECKING:
    from pandas import DataFrame


def read_all_reduce(path: Path) -> DataFrame:
    """Columns bytes, ranks, nodes, device, out_of_place_s and in_place_s, one row a size.

    Raises UserError as `ddlkit.formats.nccl_tests.read_log`, and for a log without ranks of one device, or
    with a second table.
    """
    log = nccl_tests.read_log(clusters.read(path), str(path), "all_reduce")
    both = log.frame.pivot(index=["bytes", "ranks"], columns="place", values="seconds")
    if both.index.get_level_values("ranks").nunique() > 1:
        raise UserError(f"{path}: two tables: two logs in one file? divide them")
    if len(set(log.devices)) != 1:
        raise UserError(f"{path}: lacks ranks of one device: the log is cut")
    frame = both.add_suffix("_s").rename_axis(columns=None).reset_index()
    frame = frame.assign(nodes=len(set(log.nodes)), device=log.devices[0])
    return frame[["bytes", "ranks", "nodes", "device", "out_of_place_s", "in_place_s"]]


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
