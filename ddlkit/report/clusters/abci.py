"""ABCI: steps on one node of A100 or V100 GPUs, and whole trainings on up to 32 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.iteration import Iteration, no_overlap
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats.messages import read_log
from ddlkit.report.clusters import (
    EXTERNAL,
    Rows,
    fitted,
    inverted_s,
    read,
    resnet50,
    rows,
    workbook_s,
)

STEPS = ("abci-step-fp32", "abci-step-amp")
"""Rules of steps that calibrate one constant."""
DEVICE = {256: "A100", 128: "V100"}
"""Images a GPU and step of the logged iterations, which tell the device."""
IMAGES, EPOCHS = 1_281_167, 90
"""Of ImageNet (ILSVRC 2012), and how often a training goes through them."""
FUSED_BYTES = 64 * 2**20
"""Horovod's default buffer."""
MODELS = {"no_overlap": 0.0, "workbook": 0.0, "workbook_slowed": 10.0, "workbook_step": 1.0}
"""Models, and what their free number is at most: a slowdown of compute, or seconds that every step takes."""


@cache
def costs() -> dict[tuple[str, int], Table]:
    """Return what an all-reduce in place costs, by device and ranks."""
    tables = {}
    for path in sorted((EXTERNAL / "abci").glob("allreduce_*.log.gz")):
        log = read_log(read(path), str(path), "all_reduce")
        device = next(name for name in DEVICE.values() if name in log.devices[0])
        in_place = log.frame[log.frame["place"] == "in_place"]
        sizes, seconds = in_place["bytes"].to_numpy(float), in_place["seconds"].to_numpy()
        tables[device, int(log.frame["ranks"].iloc[0])] = Table(sizes, seconds)
    return tables


def _taking(compute_s: float) -> Workload:
    """ResNet-50 stretched to what one GPU takes."""
    return resnet50().scaled(compute_s / resnet50().compute_s)


def _iteration_s(model: str, work: Workload, cost: Table, free: float) -> float:
    sent = plan.ddp(work)
    if model == "no_overlap":
        return no_overlap(Iteration(work, sent, cost)).iteration_s
    slowdown, step_s = (free, 0.0) if model == "workbook_slowed" else (0.0, free)
    return workbook_s(work, sent, cost, slowdown) + step_s


def _steps(known: Rows, wanted: pd.DataFrame, model: str, free: float) -> Floats:
    """(wanted rows,) steps in seconds; one step is predicted for all rows of a configuration."""
    alone_s = known.compute.groupby(["batch", "amp"])["iteration_s"].median()
    predicted_s = pd.Series(np.nan, wanted.index)
    for (ranks, batch, amp), same in wanted.groupby(["ranks", "batch", "amp"]):
        work = _taking(float(alone_s[batch, amp]))
        predicted_s[same.index] = _iteration_s(model, work, costs()[DEVICE[batch], ranks], free)
    return predicted_s.to_numpy()


def predictions() -> pd.DataFrame:
    """Return the test rows of `STEPS` by every model, with ranks, batch, amp, and its fitted number, free."""
    each = []
    for rule in STEPS:
        known = rows(rule)
        shown_s = known.calibrate["iteration_s"].to_numpy()
        for model, most in MODELS.items():
            by_free = partial(_steps, known, known.calibrate, model)
            free = fitted(by_free, shown_s, most) if most else 0.0
            predicted = {"measured_s": known.test["iteration_s"]}
            predicted |= {"predicted_s": _steps(known, known.test, model, free)}
            kept = known.test[["ranks", "batch", "amp"]]
            each.append(kept.assign(rule=rule, model=model, free=free, **predicted))
    return pd.concat(each, ignore_index=True)


def _configuration(steps: pd.DataFrame) -> pd.Series:
    precision = steps["amp"].map({True: "AMP", False: "fp32"})
    return steps["ranks"].astype(str) + " " + steps["batch"].map(DEVICE) + ", " + precision


def longer(predicted: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Return, by configuration, how many ms a step takes longer than on one GPU: measured, and by models."""
    alone_s = rows(STEPS[1]).compute.groupby(["batch", "amp"])["iteration_s"].median()
    one_s = predicted.set_index(["batch", "amp"]).index.map(alone_s)
    by = [_configuration(predicted), predicted["model"]]
    extra = 1e3 * predicted[["predicted_s", "measured_s"]].sub(one_s, axis=0).groupby(by).median()
    table = extra["predicted_s"].unstack()[[*models]].rename_axis(index="gpus", columns=None)
    table.insert(0, "measured", extra["measured_s"].groupby(level=0).first())
    return table


class Step(NamedTuple):
    """What a constant a step explains.

    constant_s : fitted to one configuration
    errors : of that constant, by each other configuration; trainings : of whole ones, without it
    """

    constant_s: float
    errors: pd.Series
    trainings: pd.Series


def step(predicted: pd.DataFrame) -> Step:
    """Return, of `predictions`, median signed errors of "workbook_step", and those of `trainings`."""
    own = predicted[predicted["model"] == "workbook_step"]
    errors = (own["predicted_s"] / own["measured_s"] - 1).groupby(_configuration(own)).median()
    return Step(float(own["free"].iloc[0]), errors, trainings())


def trainings() -> pd.Series:
    """Return signed errors of whole trainings on several nodes, from that on one node of the same device.

    Compute is inverted: what makes the recursion right on that node.
    """
    known = rows("abci-trainings")

    def iteration_s(device: str, ranks: int, compute_s: float) -> float:
        work = _taking(compute_s)
        sent = plan.buffer(work, FUSED_BYTES, "buffer:64MiB")
        return workbook_s(work, sent, costs()[device, ranks])

    images = EPOCHS * IMAGES
    compute_s = {
        row.device: inverted_s(
            partial(iteration_s, row.device, row.ranks),
            row.training_s * row.ranks * row.batch / images,
        )
        for row in known.calibrate.itertuples()
    }
    predicted_s = [
        images / (row.ranks * row.batch) * iteration_s(row.device, row.ranks, compute_s[row.device])
        for row in known.test.itertuples()
    ]
    return predicted_s / known.test["training_s"] - 1
