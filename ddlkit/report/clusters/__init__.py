"""What others measured on their clusters: readers, and rules of which rows may be used for what.

Files lie in data/external with their sources and licences. They are read only while they are what was taken,
by the hashes beside them, so readers check nothing else; they return tables in seconds and bytes.
Predictions are frames of one row per model and tested row, with rule, model, measured_s and predicted_s.
"""

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

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats, Workload
from ddlkit.store import files, readers

EXTERNAL = files.DATA / "external"

# -- what was taken ------------------------------------------------------------------------------


def read(path: Path) -> str:
    """Return the text of a file of others, unpacked. Raises UserError where it is not what was taken."""
    return files.text_of(readers.read_transcribed(path), path)


def table(path: Path, **kinds: type) -> pd.DataFrame:
    """Return a CSV of others; ``kinds`` are types of columns that are not what they look like."""
    return pd.read_csv(io.StringIO(read(path)), dtype=kinds)


def pollux_iterations(path: Path) -> pd.DataFrame:
    """Return placement, nodes, ranks, batch (of one GPU) and iteration_s, a row a configuration.

    placement : how many GPUs on each node, a digit a node; "" in a file by nodes and ranks
    """
    frame = table(path, placement=str)
    if "placement" in frame:
        frame["num_nodes"] = frame["placement"].str.len()
        frame["num_replicas"] = frame["placement"].map(lambda text: sum(map(int, text)))
    frame = frame.assign(placement=frame.get("placement", ""))
    names = {"num_nodes": "nodes", "num_replicas": "ranks", "local_bsz": "batch"}
    names |= {"step_time": "iteration_s"}
    return frame.rename(columns=names)[["placement", *names.values()]]


def abci_iterations(path: Path) -> pd.DataFrame:
    """Return step, iteration_s, ranks, batch (of one GPU) and amp, a row a step of a log of DLLogger.

    iteration_s : images of all GPUs over the throughput that the step printed
    """
    lines = (json.loads(line.removeprefix("DLLL ")) for line in read(path).splitlines())
    (_, settings), *logged = [
        (line["step"], line["data"]) for line in lines if line["type"] == "LOG"
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
    """Return batch (of one GPU), sequence (tokens), bucket_bytes, iteration_s and overlap.

    bucket_bytes : 0 where each tensor travels alone; the source's MB are 1024^2 bytes
    overlap : whether gradients travel beside backward, or all of them after it
    """
    frame = table(path)
    n_bytes = MIB * frame.pop("bucket_mb")
    return frame.assign(bucket_bytes=n_bytes, overlap=frame.get("overlap", True))


def vidur_all_reduce(path: Path) -> pd.DataFrame:
    """Return table, ranks, per_node (ranks of a node), bytes and median_s; a row a size, or two.

    table : the machine, as the file is named, ranks and per_node, as "h100_dgx-8x8"
    """
    frame = table(path)
    machine = path.name.partition("-")[0]
    names = f"{machine}-" + frame["ranks"].astype(str) + "x" + frame["per_node"].astype(str)
    return frame.assign(table=names, median_s=frame["median_us"] / 1e6)


@cache
def resnet50() -> Workload:
    """Return ResNet-50 by the times that kernels ran, as TrioSim traced it on an H100, batch 128, float32.

    An operator of backward with a parameter among its inputs makes the gradients of its layer; the one of
    matrices is traced with a copy, and takes the last layer that is left. What other operators of backward
    take counts with the next gradient.
    """
    frame = table(EXTERNAL / "triosim" / "resnet50-h100-b128.csv.gz")
    for name in ("Operator_input", "InputSize"):
        frame[name] = [tuple(map(int, re.findall(r"\d+", text))) for text in frame[name]]
    frame["seconds"] = frame["Operator_cudatimenooverlap"] / 1e6
    # It takes parameters, then as many first moments and roots of second ones.
    (update,) = frame[frame["OperatorName"] == "aten::_foreach_addcdiv_"].itertuples()
    third = len(update.InputSize) // 3
    elements = dict(zip(update.Operator_input[:third], update.InputSize[:third], strict=True))
    forward, backward = (frame[frame["stage"] == stage] for stage in ("forward", "backward"))
    inputs = ([each for each in row if each in elements] for row in forward["Operator_input"])
    layers = [layer for layer in inputs if layer]
    ready: list[int] = []
    gaps_s = [0.0]
    for row in backward.itertuples():
        gaps_s[-1] += row.seconds
        layer = next((layer for layer in layers if {*layer} & {*row.Operator_input}), None)
        layer = layers[-1] if layer is None and "AddmmBackward" in row.OperatorName else layer
        if layer:
            layers.remove(layer)
            ready += layer[::-1]
            gaps_s += [0.0] * len(layer)
    after_s = gaps_s.pop()
    gaps_s[-1] += after_s
    n_bytes = [4 * elements[tensor] for tensor in ready]
    of_stage = frame.groupby("stage")["seconds"].sum()
    return Workload.from_arrays(of_stage["forward"], gaps_s, n_bytes, of_stage["optimizer"])


# -- which rows may be used for what -------------------------------------------------------------

READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "pollux.read_iterations": pollux_iterations,
    "abci.read_iterations": abci_iterations,
    "abci.read_trainings": table,
    "cs336.read_iterations": cs336_iterations,
    "vidur.read_all_reduce": vidur_all_reduce,
}
"""By their names in rules.yml, which is never edited."""


class Rows(NamedTuple):
    """The rows of one rule by what they may be used for; no row is in two of the parts."""

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
    """Return the rows that a rule calls compute, calibrate, fit (none if it does not) and test.

    Raises UserError for an unknown rule.
    """
    if name not in rules():
        raise UserError(f"unknown rule {name!r}: use one of {', '.join(rules())}")
    rule = rules()[name]
    paths = sorted(EXTERNAL.glob(rule["files"]))
    frame = pd.concat([READERS[rule["read"]](path) for path in paths], ignore_index=True)
    drawn = {"drawn": rule.get("drawn", [])}
    asked = (rule.get(part) for part in Rows._fields)
    return Rows(*(frame.query(which, local_dict=drawn) if which else frame[:0] for which in asked))


# -- what models share -----------------------------------------------------------------------------


def fitted(predicted_s: Callable[[float], Floats], measured_s: Floats, most: float) -> float:
    """Return the free number from 0 to ``most`` at which the median signed error on (n,) rows is nought.

    predicted_s : what a model says of the rows for a free number; it must not fall as that rises
    Where no number will do, the end of the range that comes nearest.
    """

    def bias(free: float) -> float:
        return float(np.median(predicted_s(free) / measured_s - 1))

    if bias(0.0) >= 0:
        return 0.0
    return most if bias(most) <= 0 else _root(bias, 0.0, most, xtol=1e-12, rtol=1e-9)


def inverted_s(model_s: Callable[[float], float], measured_s: float) -> float:
    """Return the compute with which a model's iteration takes as long as was measured."""
    return _root(lambda compute_s: model_s(compute_s) - measured_s, 1e-6, measured_s, xtol=1e-9)


def predictions(
    rules: Sequence[str],
    models: Mapping[str, float],
    predicted_s: Callable[[Rows, pd.DataFrame, str, float], Floats],
    columns: Sequence[str],
) -> pd.DataFrame:
    """Return the rules' test rows by every model: columns, model, measured_s, predicted_s, free, rule.

    models : what their free number is at most, 0 for none; it is fitted to the rows to calibrate, where
        compute is known: where that is inverted, every number meets what is shown
    predicted_s : of rows that a rule may use, rows that are predicted, a model and its free number
    """
    each = []
    for rule, (model, most) in product(rules, models.items()):
        parts, free = rows(rule), np.nan
        if most and parts.compute.empty:
            continue
        if most:
            by_free = partial(predicted_s, parts, parts.calibrate, model)
            free = fitted(by_free, parts.calibrate["iteration_s"].to_numpy(), most)
        predicted = parts.test[[*columns]].assign(model=model, measured_s=parts.test["iteration_s"])
        predicted["predicted_s"] = predicted_s(parts, parts.test, model, free)
        each.append(predicted.assign(free=free, rule=rule))
    return pd.concat(each, ignore_index=True)


def _root(of: Callable[[float], float], low: float, high: float, **exact: float) -> float:
    from scipy.optimize import brentq  # takes as long to import as pandas

    return float(brentq(of, low, high, **exact))
