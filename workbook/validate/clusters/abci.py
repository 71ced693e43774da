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
"""The rules of data/external/rules.yml that calibrate one constant, the same for all steps.

Both calibrate on the steps of four A100 in fp32. The first predicts all other steps in fp32, and
the second those in mixed precision (AMP)."""
DEVICE = {256: "A100", 128: "V100"}
"""The device of logged iterations, by the images per GPU and step, which tell it."""
MODELS = {
    "no_overlap": 0.0,
    "workbook": 0.0,
    "workbook_slowed": 10.0,
    "workbook_step": 1.0,
}
"""The models, and the largest value of their free number.

The free number is a slowdown of compute, or seconds that are added to every step."""


@cache
def costs() -> dict[tuple[str, int], Table]:
    """Return the cost of an all-reduce in place, by GPU ("A100" or "V100") and number of ranks."""
    cost_of = {}
    for path in sorted((EXTERNAL / "abci").glob("allreduce_*.log.gz")):
        text = read(path)
        printed = read_tables(text, file=str(path))
        # The message times of the only printed table of all-reduces, and the table itself.
        times, all_reduces = read_log(printed, file=str(path), collective="all_reduce")
        # The log names the GPUs that it was measured on, as "A100-SXM".
        device = next(name for name in DEVICE.values() if f"{name}-SXM" in text)
        in_place = times[times["place"] == "in_place"]
        sizes = in_place["bytes"].to_numpy(float)
        seconds = in_place["seconds"].to_numpy()
        cost_of[device, all_reduces.ranks] = Table(sizes, seconds)
    return cost_of


def _iteration_s(
    model: str, device: str, ranks: int, compute_s: float, number: float
) -> float:
    """Return an iteration of ResNet-50 in seconds.

    Parameters
    ----------
    model : str
        One of MODELS.
    device : str
        The GPU, "A100" or "V100".
    ranks : int
        The number of GPUs.
    compute_s : float
        The seconds of an iteration on one GPU, to which the traced layers are scaled.
    number : float
        The free number of the model: how much longer compute takes while a message is under
        way, relative to its time alone, in "workbook_slowed", or the seconds that
        "workbook_step" adds to an iteration. Other models ignore it.
    """
    slowdown = number if model == "workbook_slowed" else 0.0
    added_s = number if model == "workbook_step" else 0.0
    # The traced layers give the shares of compute.
    workload = resnet50().scaled(compute_s / resnet50().compute_s)
    cost = costs()[device, ranks]
    link = Link(slowdown=slowdown)
    iteration = Iteration(workload, plan.ddp(workload), cost, link)
    if model == "no_overlap":
        predicted = no_overlap(iteration)
    else:
        predicted = iteration.prediction
    return predicted.iteration_s + added_s


def _one_gpu_s(parts: Rows) -> pd.Series:
    """Return the median iteration of one GPU in seconds.

    The index has ``batch``, which tells the GPU (DEVICE), and ``amp``, whether the precision is
    mixed.
    """
    return parts.compute.groupby(["batch", "amp"])["iteration_s"].median()


def _steps_s(parts: Rows, target: pd.DataFrame, model: str, number: float) -> Floats:
    """Return the predicted steps of n target rows in seconds, shape (n,).

    The ``target`` rows are among the ``parts`` that a rule of data/external/rules.yml divides
    measurements into. Compute is that of one GPU in the part for compute alone. All rows with as
    many GPUs (``ranks``), the same ``batch`` and the same precision (``amp``) have one
    prediction. `_iteration_s` says what the ``model`` and its free ``number`` mean.
    """
    one_gpu_s = _one_gpu_s(parts)
    predicted_s = pd.Series(np.nan, target.index)
    for configuration, equal_rows in target.groupby(["ranks", "batch", "amp"]):
        ranks, batch, amp = configuration
        # The batch tells the GPU.
        predicted_s[equal_rows.index] = _iteration_s(
            model, DEVICE[batch], ranks, float(one_gpu_s[batch, amp]), number
        )
    return predicted_s.to_numpy()


def predictions() -> pd.DataFrame:
    """Return the test rows of STEPS as predicted by every model.

    Returns
    -------
    DataFrame
        The columns ``ranks``, ``batch`` and ``amp``, and then those of
        `workbook.validate.clusters.predictions`.
    """
    return clusters.predictions(STEPS, MODELS, _steps_s, ["ranks", "batch", "amp"])


def _configuration(steps: pd.DataFrame) -> pd.Series:
    """Return the GPUs and the precision of each row, as in "4 A100, fp32"."""
    gpus = steps["ranks"].astype(str) + " " + steps["batch"].map(DEVICE)
    precision = steps["amp"].map({True: "AMP", False: "fp32"})
    return gpus + ", " + precision


def longer(predicted: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Return how much longer a step on several GPUs takes than on one GPU.

    Parameters
    ----------
    predicted : DataFrame
        The rows of `predictions`.
    models : sequence of str
        The models to list.

    Returns
    -------
    DataFrame
        Medians in milliseconds, with one row for each configuration, such as "4 A100, fp32".
        The column ``measured`` comes before one column for each model.
    """
    # Of the two rules by which ``predicted`` was made, the one of mixed precision (AMP) reads the
    # files of both precisions, and so has all iterations on one GPU.
    _rule_of_fp32, rule_of_amp = STEPS
    by_batch_and_amp_s = _one_gpu_s(rows(rule_of_amp))
    # The step of one GPU for each predicted row.
    one_gpu_s = predicted.set_index(["batch", "amp"]).index.map(by_batch_and_amp_s)
    seconds = predicted[["predicted_s", "measured_s"]]
    further_ms = 1e3 * seconds.sub(one_gpu_s, axis=0)
    configurations = _configuration(predicted)
    medians_ms = further_ms.groupby([configurations, predicted["model"]]).median()
    # One row for each configuration, one column for each model.
    table = medians_ms["predicted_s"].unstack()[[*models]]
    # The CSV of a figure has the configurations in a column of this name.
    table = table.rename_axis(index="gpus", columns=None)
    # The median of the measured times is the same for every model, so that the first is taken.
    measured_ms = medians_ms["measured_s"].groupby(level=0).first()
    table.insert(0, "measured", measured_ms)
    return table


def step(predicted: pd.DataFrame) -> tuple[float, pd.Series]:
    """Return the constant that the model "workbook_step" adds, and how well it predicts.

    Parameters
    ----------
    predicted : DataFrame
        The rows of `predictions`.

    Returns
    -------
    constant_s : float
        The seconds that are added to every step.
    errors : Series
        The median signed error of each configuration.
    """
    steps = predicted[predicted["model"] == "workbook_step"]
    errors = steps["predicted_s"] / steps["measured_s"] - 1
    # The constant is the free number of this model, which is fitted to the steps of four A100 in
    # fp32. Both rules of the predictions fit it to these, so that all rows have the same one.
    constant_s = float(steps["free"].iloc[0])
    return constant_s, errors.groupby(_configuration(steps)).median()
