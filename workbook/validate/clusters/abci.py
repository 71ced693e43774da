"""ABCI: steps of ResNet-50 on one node of A100 or V100 GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd

from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.iteration import Iteration, no_overlap
from ddlkit.core.link import Link
from ddlkit.core.workload import Floats
from ddlkit.formats.benchmark_logs import read_log, read_tables
from workbook.validate import clusters
from workbook.validate.clusters import EXTERNAL, Rows, read, resnet50, rows

STEPS = ("abci-step-fp32", "abci-step-amp")
"""Rules of steps that calibrate one constant."""
DEVICE = {256: "A100", 128: "V100"}
"""Images a GPU and step of the logged iterations, which tell the device."""
MODELS = {
    "no_overlap": 0.0,
    "workbook": 0.0,
    "workbook_slowed": 10.0,
    "workbook_step": 1.0,
}
"""Models, and what their free number is at most: a slowdown of compute, or seconds that every step takes."""


@cache
def costs() -> dict[tuple[str, int], Table]:
    """Return what an all-reduce in place costs, by device and ranks."""
    tables = {}
    for path in sorted((EXTERNAL / "abci").glob("allreduce_*.log.gz")):
        text = read(path)
        frame, log = read_log(read_tables(text, str(path)), str(path), "all_reduce")
        device = next(name for name in DEVICE.values() if f"{name}-SXM" in text)
        in_place = frame[frame["place"] == "in_place"]
        sizes, seconds = (
            in_place["bytes"].to_numpy(float),
            in_place["seconds"].to_numpy(),
        )
        tables[device, log.ranks] = Table(sizes, seconds)
    return tables


def _iteration_s(
    model: str, device: str, ranks: int, compute_s: float, free: float
) -> float:
    """Return an iteration of ResNet-50 in seconds by a model, stretched to what one GPU takes."""
    work = resnet50().scaled(compute_s / resnet50().compute_s)
    link = Link(slowdown=free if model == "workbook_slowed" else 0.0)
    whole = Iteration(work, plan.ddp(work), costs()[device, ranks], link)
    predicted = no_overlap(whole) if model == "no_overlap" else whole.prediction
    return predicted.iteration_s + (free if model == "workbook_step" else 0.0)


def _alone_s(parts: Rows) -> pd.Series:
    return parts.compute.groupby(["batch", "amp"])["iteration_s"].median()


def _steps_s(parts: Rows, target: pd.DataFrame, model: str, free: float) -> Floats:
    """Return (target rows,) steps in seconds, the same for all rows of a configuration."""
    predicted_s = pd.Series(np.nan, target.index)
    for (ranks, batch, amp), same in target.groupby(["ranks", "batch", "amp"]):
        compute_s = float(_alone_s(parts)[batch, amp])
        predicted_s[same.index] = _iteration_s(
            model, DEVICE[batch], ranks, compute_s, free
        )
    return predicted_s.to_numpy()


def predictions() -> pd.DataFrame:
    """Return the test rows of `STEPS` by every model, with ranks, batch, amp, and its fitted number, free."""
    return clusters.predictions(STEPS, MODELS, _steps_s, ["ranks", "batch", "amp"])


def _configuration(steps: pd.DataFrame) -> pd.Series:
    precision = steps["amp"].map({True: "AMP", False: "fp32"})
    return (
        steps["ranks"].astype(str) + " " + steps["batch"].map(DEVICE) + ", " + precision
    )


def longer(predicted: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Return, by configuration, how many ms a step takes longer than on one GPU: measured, and by models."""
    one_s = predicted.set_index(["batch", "amp"]).index.map(_alone_s(rows(STEPS[1])))
    by = [_configuration(predicted), predicted["model"]]
    extra = (
        1e3
        * predicted[["predicted_s", "measured_s"]]
        .sub(one_s, axis=0)
        .groupby(by)
        .median()
    )
    table = (
        extra["predicted_s"]
        .unstack()[[*models]]
        .rename_axis(index="gpus", columns=None)
    )
    table.insert(0, "measured", extra["measured_s"].groupby(level=0).first())
    return table


def step(predicted: pd.DataFrame) -> tuple[float, pd.Series]:
    """Return the constant of "workbook_step" in seconds, and its median signed errors by configuration."""
    steps = predicted[predicted["model"] == "workbook_step"]
    errors = steps["predicted_s"] / steps["measured_s"] - 1
    return float(steps["free"].iloc[0]), errors.groupby(_configuration(steps)).median()
