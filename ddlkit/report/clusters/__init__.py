"""What others measured on their clusters: readers, and rules of which rows may be used for what.

Files lie in data/external with their sources and licences. They are read only while they are what was taken,
by the hashes beside them, so readers check nothing else; they return tables in seconds and bytes.
Predictions are frames of one row per model and tested row, with rule, model, measured_s and predicted_s;
`ddlkit.report.accuracy.scores` judges them all.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import Link
from ddlkit.core.plan import FusionPlan
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats, Workload
from ddlkit.store import files, readers

EXTERNAL = files.DATA / "external"
RULES = EXTERNAL / "rules.yml"
PARTS = ("compute", "calibrate", "fit", "test")

# -- what was taken ------------------------------------------------------------------------------


def read(path: Path) -> str:
    """Return the text of a file of others, unpacked. Raises UserError where it is not what was taken."""
    return files.text_of(readers.read_transcribed(path), path)


def table(path: Path, **kinds: type) -> pd.DataFrame:
    """Return a CSV of others; ``kinds`` are types of columns that are not what they look like."""
    return pd.read_csv(io.StringIO(read(path)), dtype=kinds)


def pollux_iterations(path: Path) -> pd.DataFrame:
    """Return placement, nodes, ranks, batch (of one GPU), iteration_s and sync_s, a row a configuration.

    placement : how many GPUs on each node, a digit a node; "" in a file by nodes and ranks
    """
    frame = table(path, placement=str)
    if "placement" in frame:
        frame["num_nodes"] = frame["placement"].str.len()
        frame["num_replicas"] = frame["placement"].map(lambda text: sum(map(int, text)))
    else:
        frame["placement"] = ""
    names = {"num_nodes": "nodes", "num_replicas": "ranks", "local_bsz": "batch"}
    names |= {"step_time": "iteration_s", "sync_time": "sync_s"}
    return frame.rename(columns=names)[["placement", *names.values()]]


def abci_iterations(path: Path) -> pd.DataFrame:
    """Return step, iteration_s, ranks, batch (of one GPU) and amp, a row a step of a log of DLLogger.

    iteration_s : images of all GPUs over the throughput that the step printed
    """
    lines = (json.loads(line.removeprefix("DLLL ")) for line in read(path).splitlines())
    logged = [(line["step"], line["data"]) for line in lines if line["type"] == "LOG"]
    known = logged[0][1]
    images = known["world_size"] * known["batch_size"]
    steps = {
        step[1]: images / data["train.total_ips"]
        for step, data in logged
        if len(step) == 2 and "train.total_ips" in data
    }
    frame = pd.DataFrame(list(steps.items()), columns=["step", "iteration_s"])
    return frame.assign(
        ranks=known["world_size"], batch=known["batch_size"], amp=bool(known["amp"])
    )


def abci_trainings(path: Path) -> pd.DataFrame:
    """Return nodes, device, ranks, batch (of one GPU) and training_s: 90 epochs with validation, float32."""
    return table(path)


def cs336_iterations(path: Path) -> pd.DataFrame:
    """Return batch (of one GPU), sequence (tokens), bucket_bytes, iteration_s, wait_s and overlap.

    bucket_bytes : 0 where each tensor travels alone; the source's MB are 1024^2 bytes
    overlap : whether gradients travel beside backward, or all of them after it
    """
    frame = table(path)
    n_bytes = MIB * frame.pop("bucket_mb")
    return frame.assign(bucket_bytes=n_bytes, overlap=frame.get("overlap", True))


def vidur_all_reduce(path: Path) -> pd.DataFrame:
    """Return table, ranks, per_node (ranks of a node), bytes, min_s, median_s and max_s of three times.

    table : the machine, as the file is named, ranks and per_node, as "h100_dgx-8x8"; a row a size, or two
    """
    frame = table(path)
    machine = path.name.partition("-")[0]
    names = [f"{machine}-{n}x{of}" for n, of in zip(frame["ranks"], frame["per_node"], strict=True)]
    times = {f"{name}_s": frame.pop(f"{name}_us") / 1e6 for name in ("min", "median", "max")}
    return frame.assign(table=names, **times)


_NODE = re.compile(
    r"^node(\d+) -- (.+) -- forward_compute_time=(\S+), backward_compute_time=(\S+), "
    r"activation_size=.+, parameter_size=(\S+)$",
    re.MULTILINE,
)


@cache
def pipedream_workload(network: str) -> Workload:
    """Return a network as PipeDream's profiler recorded it in milliseconds, one tensor a layer.

    Layers without parameters count to the one before them that has some, or to the first. The input is left
    out: its time is that of loading data. The batch is unknown, so only shares count.
    """
    nodes = _NODE.findall(read(EXTERNAL / "pipedream" / f"{network}.txt.gz"))
    layers = sorted(
        (int(node[0]), *map(float, node[2:])) for node in nodes if node[1][:5] != "Input"
    )
    _, forward_ms, backward_ms, sizes = np.array(layers).T
    owner = np.maximum(np.cumsum(sizes > 0) - 1, 0)
    own_s = np.bincount(owner, backward_ms)[::-1] / 1e3
    return Workload.from_arrays(float(forward_ms.sum()) / 1e3, own_s, sizes[sizes > 0][::-1])


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
    layers = [[one for one in inputs if one in elements] for inputs in forward["Operator_input"]]
    layers = [layer for layer in layers if layer]
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
    "abci.read_trainings": abci_trainings,
    "cs336.read_iterations": cs336_iterations,
    "vidur.read_all_reduce": vidur_all_reduce,
}
"""By their names in rules.yml, which is never edited."""


@dataclass(frozen=True)
class Rows:
    """The rows of one rule by what they may be used for; no row is in two of the parts."""

    compute: pd.DataFrame
    calibrate: pd.DataFrame
    fit: pd.DataFrame
    test: pd.DataFrame


@lru_cache(maxsize=2)
def _parsed(text: str) -> Any:
    return files.own_yaml(text)


def rules(path: Path = RULES) -> dict[str, dict[str, Any]]:
    """Return rules by name, as data/external/rules.yml describes them.

    Raises UserError for a rule that lacks a part, or has a reader that is not in `READERS`.
    """
    try:
        listed = dict(_parsed(files.read_text(path))["rules"])
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise UserError(f"{path}: no YAML with rules: restore it") from error
    for name, rule in listed.items():
        lacking = {"set", "read", "files", "predicts", *PARTS} - {"fit"} - rule.keys()
        if lacking or rule["read"] not in READERS:
            what = f"lacks {', '.join(sorted(lacking))}" if lacking else f"reads {rule['read']!r}"
            raise UserError(f"{path}: rule {name}: {what}: write it as the head of the file says")
    return listed


def rows(name: str, path: Path = RULES) -> Rows:
    """Return the rows that a rule calls compute, calibrate, fit (none if it does not) and test.

    `files` are found beside the rules. Raises UserError for an unknown rule, for one without files or test
    rows, and where a row would be in two parts.
    """
    listed = rules(path)
    if name not in listed:
        raise UserError(f"unknown rule {name!r}: use one of {', '.join(listed)}")
    rule = listed[name]
    paths = sorted(path.parent.glob(rule["files"]))
    if not paths:
        raise UserError(f"{path}: rule {name}: there are no files {rule['files']}")
    frame = pd.concat([READERS[rule["read"]](file) for file in paths], ignore_index=True)
    drawn = {"drawn": rule.get("drawn", [])}
    parts = {
        part: frame.query(rule[part], local_dict=drawn) if rule.get(part) else frame[:0]
        for part in PARTS
    }
    if pd.concat(parts.values()).index.has_duplicates or parts["test"].empty:
        raise UserError(
            f"{path}: rule {name}: tests nothing, or a row is in two parts: divide them"
        )
    return Rows(**parts)


# -- what models share -----------------------------------------------------------------------------


def workbook_s(work: Workload, plan: FusionPlan, cost: MessageCost, slowdown: float = 0.0) -> float:
    """Return the recursion's iteration in seconds; compute beside messages takes longer by ``slowdown``."""
    return Iteration(work, plan, cost, Link(slowdown=slowdown)).prediction.iteration_s


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


def _root(of: Callable[[float], float], low: float, high: float, **exact: float) -> float:
    from scipy.optimize import brentq  # takes as long to import as pandas

    return float(brentq(of, low, high, **exact))
