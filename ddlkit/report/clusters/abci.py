"""ABCI: iterations on one node of A100 or V100 GPUs, and whole trainings on up to 32 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.doubt import interval
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats.clusters import EXTERNAL, abci
from ddlkit.report.clusters.overlap import resnet50
from ddlkit.report.clusters.rules import Rows, rows
from ddlkit.report.clusters.trials import TRIALS, Trial, fitted, root

ITERATIONS = (
    *(f"abci-{device}-{precision}" for device in ("a100", "v100") for precision in ("fp32", "amp")),
    *(f"abci-step-{precision}" for precision in ("fp32", "amp")),
)
TRAININGS = "abci-trainings"
DEVICE = {256: "A100", 128: "V100"}
"""Images a GPU and step of the logged iterations, which tell the device."""
IMAGES, EPOCHS = 1_281_167, 90
"""Of ImageNet (ILSVRC 2012), and how often a training goes through them."""
FUSED_BYTES = 64 * 2**20
"""Horovod's default buffer."""


@cache
def costs() -> dict[tuple[str, int], Table]:
    """What an all-reduce in place costs, by device and ranks."""
    found = {}
    for path in sorted((EXTERNAL / "abci").glob("allreduce_*.log.gz")):
        log = abci.read_all_reduce(path)
        device = next(name for name in DEVICE.values() if name in log["device"].iloc[0])
        sizes, seconds = log["bytes"].to_numpy(float), log["in_place_s"].to_numpy()
        found[device, int(log["ranks"].iloc[0])] = Table(sizes, seconds)
    return found


def predictions() -> pd.DataFrame:
    """Of all rules' test rows by every model, as `board.SOURCES` describes it; with ranks, batch and amp.

    A model with a free number takes part where there are rows to calibrate it.
    """
    parts = {rule: rows(rule) for rule in ITERATIONS}
    each = [
        iterations(found, name).assign(rule=rule)
        for rule, found in parts.items()
        for name, trial in TRIALS.items()
        if len(found.calibrate) or not trial.most
    ]
    whole = [trainings(name) for name, trial in TRIALS.items() if not trial.most]
    return pd.concat([*each, *whole], ignore_index=True)


STEPS = ("abci-step-fp32", "abci-step-amp")
"""Rules of steps that calibrate one constant."""


def _configuration(rows: pd.DataFrame) -> pd.Series:
    precision = rows["amp"].map({True: "AMP", False: "fp32"})
    return rows["ranks"].astype(str) + " " + rows["batch"].map(DEVICE) + ", " + precision


def longer(predicted: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """By configuration, milliseconds that a step takes longer than on one GPU: measured and by models."""
    ours = predicted[predicted["rule"].isin(STEPS)]
    alone_s = rows(STEPS[1]).compute.groupby(["batch", "amp"])["iteration_s"].median()
    one_s = ours.set_index(["batch", "amp"]).index.map(alone_s)
    by = [_configuration(ours), ours["model"]]
    extra = 1e3 * ours[["predicted_s", "measured_s"]].sub(one_s, axis=0).groupby(by).median()
    found = extra["predicted_s"].unstack()[[*models]].rename_axis(index="gpus", columns=None)
    found.insert(0, "measured", extra["measured_s"].groupby(level=0).first())
    return found


class Step(NamedTuple):
    """What a constant a step explains.

    constant_s : fitted to one configuration; slowdown : of compute beside messages, fitted to the same
    errors : of that constant, by each other configuration; trainings : of whole ones, without it
    """

    constant_s: float
    slowdown: float
    errors: pd.Series
    trainings: pd.Series


def step(predicted: pd.DataFrame) -> Step:
    """Of `predictions`: median signed errors of "workbook_step", and signed ones of "workbook"."""
    off = predicted["predicted_s"] / predicted["measured_s"] - 1
    free = predicted.dropna(subset="free").groupby(["rule", "model"])["free"].first()[STEPS[0]]
    own = predicted["rule"].isin(STEPS) & (predicted["model"] == "workbook_step")
    errors = off[own].groupby(_configuration(predicted[own])).median()
    whole = (predicted["rule"] == TRAININGS) & (predicted["model"] == "workbook")
    return Step(free["workbook_step"], free["workbook_slowed"], errors, off[whole])


def iterations(found: Rows, name: str) -> pd.DataFrame:
    """Every step that is tested, by one model; ``free`` is its free number, NaN where it has none.

    The interval of a calibrated model is that of single steps about it: no other cause of error is known.
    """
    trial, shown = TRIALS[name], found.calibrate
    free = lower = upper = np.nan
    if trial.most:
        known_s = shown["iteration_s"].to_numpy()
        free = fitted(partial(steps, found, shown, trial), known_s, trial.most)
        lower, upper = interval(known_s / steps(found, shown, trial, free))
    predicted_s = steps(found, found.test, trial, free)
    kept = found.test[["ranks", "batch", "amp", "step"]]
    said = {"model": name, "measured_s": found.test["iteration_s"], "predicted_s": predicted_s}
    return kept.assign(**said, lower_s=lower * predicted_s, upper_s=upper * predicted_s, free=free)


def steps(found: Rows, wanted: pd.DataFrame, trial: Trial, free: float) -> Floats:
    """(wanted rows,) iteration by a model, of ResNet-50 stretched to what one GPU took."""
    alone_s = found.compute.groupby(["batch", "amp"])["iteration_s"].median()
    predicted_s = np.empty(len(wanted))
    for (ranks, batch, amp), at in (
        wanted.reset_index().groupby(["ranks", "batch", "amp"]).groups.items()
    ):
        work = _taking(float(alone_s[batch, amp]))
        cost = costs()[DEVICE[batch], ranks]
        predicted_s[at] = trial.iteration_s(work, plan.ddp(work), cost, free)
    return predicted_s


def _taking(compute_s: float) -> Workload:
    return resnet50().scaled(compute_s / resnet50().compute_s)


def trainings(name: str) -> pd.DataFrame:
    """Whole trainings on several nodes by one model, from that on one node of the same device."""
    found, trial = rows(TRAININGS), TRIALS[name]

    def iteration_s(compute_s: float, device: str, ranks: int) -> float:
        work = _taking(compute_s)
        sent = plan.buffer(work, FUSED_BYTES, "buffer:64MiB")
        return trial.iteration_s(work, sent, costs()[device, ranks], 0.0)

    predicted_s = []
    one_node = found.calibrate.set_index("device")
    for row in found.test.itertuples():
        one = one_node.loc[row.device]
        shown_s = one["training_s"] / _steps(one["ranks"], one["batch"])
        compute_s = root(
            lambda compute_s, row=row, one=one, shown_s=shown_s: (
                iteration_s(compute_s, row.device, one["ranks"]) - shown_s
            ),
            shown_s / 10,
            shown_s,
        )
        predicted_s.append(
            iteration_s(compute_s, row.device, row.ranks) * _steps(row.ranks, row.batch)
        )
    said = {"model": name, "measured_s": found.test["training_s"], "predicted_s": predicted_s}
    kept = found.test[["nodes", "device", "ranks", "batch"]]
    return kept.assign(**said, lower_s=np.nan, upper_s=np.nan, rule=TRAININGS)


def _steps(ranks: int, batch: int) -> float:
    """Iterations of a training."""
    return EPOCHS * IMAGES / (ranks * batch)
