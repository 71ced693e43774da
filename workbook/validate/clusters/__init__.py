"""What others measured on their clusters (data/external): readers in seconds and bytes, and rules of rows."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.fit import AUTO, fit
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats, Workload
from ddlkit.store import files
from workbook.common import places, transcribed

EXTERNAL = places.DATA / "external"


def read(path: Path) -> str:
    """Return the text of a file of others, unpacked. Raises UserError where it is not what was taken."""
    return files.text_of(transcribed.read_transcribed(path), path)


def table(path: Path, **kinds: type) -> pd.DataFrame:
    """Return a CSV of others; ``kinds`` are types of columns that are not what they look like."""
    return pd.read_csv(io.StringIO(read(path)), dtype=kinds)


def pollux_iterations(path: Path) -> pd.DataFrame:
    """Return placement (GPUs by node, a digit each, or ""), nodes, ranks, batch (of one GPU), iteration_s."""
    names = {"num_nodes": "nodes", "num_replicas": "ranks", "local_bsz": "batch"}
    frame = table(path, placement=str).rename(
        columns={**names, "step_time": "iteration_s"}
    )
    if "placement" in frame:
        frame["nodes"] = frame["placement"].str.len()
        frame["ranks"] = frame["placement"].map(lambda text: sum(map(int, text)))
    placement = frame.get("placement", "")
    return frame.assign(placement=placement)[
        ["placement", *names.values(), "iteration_s"]
    ]


def abci_iterations(path: Path) -> pd.DataFrame:
    """Return step, iteration_s (by the printed throughput), ranks, batch (of one GPU) and amp by step."""
    lines = (json.loads(line.removeprefix("DLLL ")) for line in read(path).splitlines())
    (_, settings), *logged = [
        (at["step"], at["data"]) for at in lines if at["type"] == "LOG"
    ]
    ranks, batch = settings["world_size"], settings["batch_size"]
    rows = [
        (step[1], ranks * batch / data["train.total_ips"])
        for step, data in logged
        if len(step) == 2 and "train.total_ips" in data
    ]
    frame = pd.DataFrame(rows, columns=["step", "iteration_s"])
    return frame.assign(ranks=ranks, batch=batch, amp=bool(settings["amp"]))


def cs336_iterations(path: Path) -> pd.DataFrame:
    """Return batch (of one GPU), sequence, bucket_bytes (0: none), iteration_s, overlap (with backward)."""
    frame = table(path)
    n_bytes = MIB * frame.pop("bucket_mb")
    return frame.assign(bucket_bytes=n_bytes, overlap=frame.get("overlap", True))


def vidur_all_reduce(path: Path) -> pd.DataFrame:
    """Return table (machine, ranks and per_node, as "h100_dgx-8x8"), these two, bytes and median_s."""
    frame = table(path)
    machine = path.name.partition("-")[0]
    names = (
        f"{machine}-" + frame["ranks"].astype(str) + "x" + frame["per_node"].astype(str)
    )
    return frame.assign(table=names, median_s=frame["median_us"] / 1e6)


@cache
def resnet50() -> Workload:
    """Return ResNet-50 by its kernels' times, as TrioSim traced it on an H100, batch 128, float32.

    An operator of backward with a parameter among its inputs makes its layer's gradients; that of matrices is
    traced with a copy, and takes the last layer left. Other operators count with the next gradient.
    """
    frame = table(EXTERNAL / "triosim" / "resnet50-h100-b128.csv.gz")
    for name in ("Operator_input", "InputSize"):
        frame[name] = [
            tuple(map(int, re.findall(r"\d+", text))) for text in frame[name]
        ]
    frame["seconds"] = frame["Operator_cudatimenooverlap"] / 1e6
    # It takes parameters, then as many first moments and roots of second ones.
    (update,) = frame[frame["OperatorName"] == "aten::_foreach_addcdiv_"].itertuples()
    third = len(update.InputSize) // 3
    elements = dict(
        zip(update.Operator_input[:third], update.InputSize[:third], strict=True)
    )
    forward, backward = (
        frame[frame["stage"] == stage] for stage in ("forward", "backward")
    )
    inputs = (
        [each for each in row if each in elements] for row in forward["Operator_input"]
    )
    layers = [layer for layer in inputs if layer]
    ready: list[int] = []
    gaps_s = [0.0]
    for row in backward.itertuples():
        gaps_s[-1] += row.seconds
        layer = next(
            (layer for layer in layers if {*layer} & {*row.Operator_input}), None
        )
        layer = (
            layers[-1]
            if layer is None and "AddmmBackward" in row.OperatorName
            else layer
        )
        if layer:
            layers.remove(layer)
            ready += layer[::-1]
            gaps_s += [0.0] * len(layer)
    after_s = gaps_s.pop()
    gaps_s[-1] += after_s
    n_bytes = [4 * elements[tensor] for tensor in ready]
    of_stage = frame.groupby("stage")["seconds"].sum()
    return Workload.from_arrays(
        of_stage["forward"], gaps_s, n_bytes, of_stage["optimizer"]
    )


READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "pollux.read_iterations": pollux_iterations,
    "abci.read_iterations": abci_iterations,
    "abci.read_trainings": table,
    "cs336.read_iterations": cs336_iterations,
    "vidur.read_all_reduce": vidur_all_reduce,
}
"""By their names in rules.yml, which is never edited."""


class Rows(NamedTuple):
    """The rows of a rule by what they may be used for (none of a part it lacks); no row is in two parts."""

    compute: pd.DataFrame
    calibrate: pd.DataFrame
    fit: pd.DataFrame
    test: pd.DataFrame


@cache
def rules() -> dict[str, dict[str, Any]]:
    """Return rules by name, as the head of data/external/rules.yml describes them."""
    return dict(files.own_yaml(files.read_text(EXTERNAL / "rules.yml"))["rules"])


@cache
def rows(name: str) -> Rows:
    """Return the rows of a rule of data/external/rules.yml."""
    rule = rules()[name]
    paths = sorted(EXTERNAL.glob(rule["files"]))
    frame = pd.concat(
        [READERS[rule["read"]](path) for path in paths], ignore_index=True
    )
    drawn = {"drawn": rule.get("drawn", [])}
    parts = (rule.get(part) for part in Rows._fields)
    return Rows(
        *(
            frame.query(which, local_dict=drawn) if which else frame[:0]
            for which in parts
        )
    )


def fitted(
    predicted_s: Callable[[float], Any],
    measured_s: Any,
    most: float,
    least: float = 0.0,
) -> float:
    """Return the number in [least, most] with the median signed error nearest to 0; times rise with it."""
    from scipy.optimize import brentq  # takes as long to import as pandas

    def bias(free: float) -> float:
        return float(np.median(predicted_s(free) / measured_s - 1))

    if bias(least) >= 0:
        return least
    return most if bias(most) <= 0 else float(brentq(bias, least, most, xtol=1e-9))


def predictions(
    rules: Sequence[str],
    models: Mapping[str, float],
    predicted_s: Callable[[Rows, pd.DataFrame, str, float], Floats],
    columns: Sequence[str],
) -> pd.DataFrame:
    """Return the rules' test rows by every model: columns, model, measured_s, predicted_s, free, rule.

    models : what their free number is at most, 0 for none; it is fitted to the rows to calibrate, but not
        where compute is inverted: there every number meets them
    predicted_s : of a rule's rows, rows that are predicted, a model and its free number
    """
    each = []
    for rule, (model, most) in product(rules, models.items()):
        parts, free = rows(rule), np.nan
        if most and parts.compute.empty:
            continue
        if most:
            by_free = partial(predicted_s, parts, parts.calibrate, model)
            free = fitted(by_free, parts.calibrate["iteration_s"].to_numpy(), most)
        predicted = parts.test[[*columns]].assign(
            model=model, measured_s=parts.test["iteration_s"]
        )
        predicted["predicted_s"] = predicted_s(parts, parts.test, model, free)
        each.append(predicted.assign(free=free, rule=rule))
    return pd.concat(each, ignore_index=True)


# -- Vidur: dense tables of all-reduces, by fits that twelve sizes calibrate ------------------------

DENSE = ("vidur-64mib", "vidur-512mib")
GOAL, GOAL_SMALL = 0.01, 0.05
"""Of a table's median error, and of that below SMALL_TO: fixed before they were computed."""
SMALL_TO = (
    25 * MIB
)  # below are the messages that DistributedDataParallel sends of itself


@cache
def dense_tables() -> dict[str, Rows]:
    """Return DENSE's rows of each table by size; medians rise in teeth, as NCCL cuts messages into chunks."""
    by_name = {}
    for rule in DENSE:
        parts = [part.sort_values("bytes", kind="stable") for part in rows(rule)]
        for name in sorted({*parts[-1]["table"]}):
            by_name[name] = Rows(*(part[part["table"] == name] for part in parts))
    return by_name


@cache
def dense_predictions(form: str = AUTO) -> pd.DataFrame:
    """Return the rules' test rows by a form, fitted to the medians of a table's twelve sizes."""
    each = []
    for name, part in dense_tables().items():
        shown, at = part.calibrate, part.test["bytes"].to_numpy(float)
        line = fit(form, shown["bytes"].to_numpy(float), shown["median_s"].to_numpy())
        lower_s, upper_s = line.interval(at)
        predicted = {
            "predicted_s": line.cost(at),
            "lower_s": lower_s,
            "upper_s": upper_s,
        }
        measured = part.test[["bytes", "median_s"]].rename(
            columns={"median_s": "measured_s"}
        )
        each.append(measured.assign(table=name, **predicted))
    return pd.concat(each, ignore_index=True)


def judged(predicted: pd.DataFrame) -> pd.DataFrame:
    """Return, by table, medians of |error|, of all sizes and below_25_mib, n and held.

    covered : how many of the n rows lie in their interval; half_width : of that, relative, the median
    held : whether the median and that below SMALL_TO are at most GOAL and GOAL_SMALL
    """
    seen = predicted.eval("error = abs(predicted_s / measured_s - 1)")
    seen["small"] = seen["error"].where(seen["bytes"] < SMALL_TO)
    seen["inside"] = seen["measured_s"].between(seen["lower_s"], seen["upper_s"])
    seen["half_width"] = (seen["upper_s"] - seen["lower_s"]) / seen["predicted_s"] / 2
    scores = seen.groupby("table", sort=False).agg(
        median=("error", "median"),
        below_25_mib=("small", "median"),
        covered=("inside", "sum"),
        half_width=("half_width", "median"),
        n=("error", "size"),
    )
    held = (scores["median"] <= GOAL) & (scores["below_25_mib"] <= GOAL_SMALL)
    return scores.assign(held=held).reset_index()
