"""Pollux: iterations on T4 GPUs in many placements, predicted from the smallest batch of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats, Workload
from ddlkit.report.clusters import rules
from ddlkit.report.clusters.overlap import FAMILIES, SHAPES, Family, wire_s

PLACE = ["placement", "nodes", "ranks"]
"""What tells placements apart: a file by nodes and ranks does not say how many GPUs each node has."""
COVERED = 0.95
SLOWER_HOSTS = np.linspace(1.0, 1.6, 121)
"""Factors on computing that are tried where GPUs share a node."""


NETWORKS = {
    "pollux-bert": "BERT",
    "pollux-deepspeech2": "DeepSpeech2",
    "pollux-ncf": "NCF",
    "pollux-resnet18": "ResNet-18",
    "pollux-resnet50": "ResNet-50",
    "pollux-resnet50-fitted": "ResNet-50",
    "pollux-yolov3": "YOLOv3",
}
"""What the network of each rule is called."""


@dataclass(frozen=True, eq=False)
class Cells:
    """What a model is told of n rows, and `measured_s`, which only fitting looks at.

    compute_s : the one GPU's iteration at the row's batch
    shown_compute_s, shown_s : the same of the row to calibrate of its placement, and what it took
    place : number of its placement; gpus : on its fullest node; single : whether that is its only one
    """

    compute_s: Floats
    shown_compute_s: Floats
    shown_s: Floats
    place: NDArray[np.int64]
    gpus: NDArray[np.int64]
    single: NDArray[np.bool_]
    measured_s: Floats

    @classmethod
    def of(cls, found: rules.Rows, part: pd.DataFrame) -> Cells:
        """Of one part. Raises UserError for a batch not computed alone, a placement not calibrated."""
        alone = found.compute.set_index("batch")["iteration_s"]
        known = found.calibrate.set_index(PLACE)
        each = pd.MultiIndex.from_frame(part[PLACE])
        lacking = {*part["batch"], *known["batch"]} - {*alone.index}
        if lacking or not each.isin(known.index).all():
            raise UserError(
                f"batches without a row to compute: {sorted(lacking)}, or placements without one "
                "to calibrate: give the rule such rows"
            )
        shown = known.loc[each]
        return cls(
            compute_s=alone[part["batch"]].to_numpy(),
            shown_compute_s=alone[shown["batch"]].to_numpy(),
            shown_s=shown["iteration_s"].to_numpy(),
            place=known.index.get_indexer(each),
            gpus=most_gpus(part),
            single=(part["nodes"] == 1).to_numpy(),
            measured_s=part["iteration_s"].to_numpy(),
        )

    def of_mask(self, mask: NDArray[np.bool_]) -> Cells:
        """Only these rows."""
        return replace(self, **{name: column[mask] for name, column in vars(self).items()})


def most_gpus(part: pd.DataFrame) -> NDArray[np.int64]:
    """(n,) on the fullest node; where the placement is not known, of ranks spread evenly."""
    even = -(-part["ranks"] // part["nodes"])
    placed = part["placement"].map(lambda text: max(map(int, text), default=0))
    return np.where(placed > 0, placed, even).astype(np.int64)


def predict(
    cells: Cells,
    family: Family,
    shape: Workload,
    number: ArrayLike = 0.0,
    hosts: Floats | None = None,
) -> Floats:
    """(n,) iterations in seconds, blind: C is the one GPU's, W what the placement's row to calibrate shows.

    number : one, or (k, 1) for (k, n) iterations of a family of numbers
    hosts : (5,) factor on C by GPUs on the fullest node, from 0; or (k, 5) for (k, n) iterations
    """
    factor = 1.0 if hosts is None else hosts[..., cells.gpus]
    model = family.make(shape, number)
    sent_s = wire_s(model, cells.shown_compute_s * factor, cells.shown_s)
    return model(cells.compute_s * factor, sent_s)


@dataclass(frozen=True, eq=False)
class Fitted:
    """What is fitted of one model.

    number : 0 where it has none; hosts : (5,) factors on computing by GPUs on a node, None where it has none
    low, high : between them lie 95% of measured over predicted
    """

    number: float
    hosts: Floats | None
    low: float
    high: float


def fit(found: rules.Rows, family: Family, shape: Workload) -> Fitted:
    """As the rules say it, from the rows to fit alone; low and high are NaN where there are none."""
    cells = Cells.of(found, found.fit)
    hosts = fit_hosts(cells.of_mask(cells.single), family, shape) if family.hosts else None
    drawn = cells.of_mask(~cells.single)
    if not drawn.place.size:
        return Fitted(0.0, hosts, np.nan, np.nan)
    numbers = np.array(family.numbers or (0.0,))
    each = predict(drawn, family, shape, numbers[:, None], hosts)
    ratio = np.broadcast_to(each / drawn.measured_s, (len(numbers), len(drawn.place)))
    errors = np.abs(ratio - 1)
    left_out = np.empty(len(drawn.place))
    for place in np.unique(drawn.place):
        own = drawn.place == place
        left_out[own] = 1 / ratio[errors[:, ~own].mean(axis=1).argmin(), own]
    best = float(numbers[errors.mean(axis=1).argmin()])
    return Fitted(best, hosts, *conformal(left_out))


def fit_hosts(single: Cells, family: Family, shape: Workload) -> Floats:
    """(5,) for each number of GPUs on a node the factor with the least mean error on that node alone."""
    tried = np.tile(np.array(SLOWER_HOSTS)[:, None], 5)
    predicted = predict(single, family, shape, hosts=tried)
    errors = np.abs(predicted / single.measured_s - 1)
    best = np.ones(5)
    for gpus in np.unique(single.gpus):
        best[gpus] = SLOWER_HOSTS[errors[:, single.gpus == gpus].mean(axis=1).argmin()]
    return best


def conformal(ratios: Floats, covered: float = COVERED) -> tuple[float, float]:
    """The two of n ratios between which the next one lies that often; the outermost where n is too small."""
    ordered, n = np.sort(ratios), len(ratios)
    cut = max(int((n + 1) * (1 - covered) / 2), 1)
    return float(ordered[cut - 1]), float(ordered[n - cut])


def shape_of(rule: str) -> str:
    """Which of `SHAPES` a rule takes; the first one, from before rules said so, is of ResNet-50."""
    return str(rules.rules()[rule].get("shape", "resnet50"))


def rule_names() -> list[str]:
    """All rules on Pollux's data."""
    return [name for name in rules.rules() if name.startswith("pollux-")]


def fits(rule: str, shape: str = "") -> dict[str, Fitted]:
    """What is fitted of each model; by a rule without rows to fit, only models with nothing to fit.

    shape : one of `SHAPES` instead of what the rule names
    """
    return _fits(rule, shape or shape_of(rule))


@cache
def _fits(rule: str, shape: str) -> dict[str, Fitted]:
    found, layers = rules.rows(rule), SHAPES[shape]()
    some = not found.fit.empty
    tried = {name: one for name, one in FAMILIES.items() if some or not (one.numbers or one.hosts)}
    return {name: fit(found, one, layers) for name, one in tried.items()}


def predictions(names: list[str] | None = None, shape: str = "") -> pd.DataFrame:
    """Of the rules' test rows (all rules by default) by every model, as `board.SOURCES` describes it.

    With placement, nodes, ranks and batch, most_gpus, and what computing alone takes, compute_s.
    shape : one of `SHAPES` instead of what the rule names
    """
    each = []
    for rule in rule_names() if names is None else names:
        found, layers = rules.rows(rule), SHAPES[shape or shape_of(rule)]()
        cells = Cells.of(found, found.test)
        known = found.test[[*PLACE, "batch"]].assign(
            rule=rule,
            measured_s=found.test["iteration_s"],
            most_gpus=cells.gpus,
            compute_s=cells.compute_s,
        )
        for name, fitted in fits(rule, shape).items():
            said = predict(cells, FAMILIES[name], layers, fitted.number, fitted.hosts)
            each.append(
                known.assign(
                    model=name,
                    predicted_s=said,
                    lower_s=said * fitted.low,
                    upper_s=said * fitted.high,
                )
            )
    return pd.concat(each, ignore_index=True)


def by_node(said: pd.DataFrame, rule: str, model: str = "workbook") -> pd.Series:
    """Median signed error by GPUs on the fullest node, of the larger half of the batches."""
    own = said[(said["rule"] == rule) & (said["model"] == model)]
    large = own[own["batch"] >= own["batch"].median()]
    error = large["predicted_s"] / large["measured_s"] - 1
    return error.groupby(large["most_gpus"]).median()


def mirrored(rule: str, part: pd.DataFrame) -> NDArray[np.bool_]:
    """(n,) whether a row's placement is one of the rule's drawn ones with its nodes in another order.

    What the rule tests of such placements is hardly new: the same nodes were there to fit.
    """
    drawn = {"".join(sorted(text)) for text in rules.rules()[rule].get("drawn", [])}
    return part["placement"].map(lambda text: "".join(sorted(text)) in drawn).to_numpy(bool)


def single_nodes(found: rules.Rows) -> pd.DataFrame:
    """What GPUs cost each other where all are on one node: a row per number of them and batch.

    Columns gpus, batch, compute_s (one GPU alone), iteration_s, added_s (over that), and sync_s as
    published. From rows to calibrate and to fit.
    """
    shown = pd.concat([found.calibrate, found.fit])
    shown = shown[shown["nodes"] == 1].sort_values(["ranks", "batch"], ignore_index=True)
    compute_s = found.compute.set_index("batch")["iteration_s"][shown["batch"]].to_numpy()
    kept = shown[["batch", "iteration_s", "sync_s"]]
    added = {"compute_s": compute_s, "added_s": kept["iteration_s"] - compute_s}
    return kept.assign(gpus=shown["ranks"], **added)


def shared_node(found: rules.Rows) -> pd.DataFrame:
    """`single_nodes` by the number of GPUs as added seconds = a + b C over the batches.

    Columns gpus, added_s (a: the same at any batch, as what communication costs), share (b: grows with
    computing, as what a shared host costs), and median, of added over C.
    """
    rows = []
    for gpus, own in single_nodes(found).groupby("gpus"):
        share, constant_s = np.polyfit(own["compute_s"], own["added_s"], 1)
        rows.append((gpus, constant_s, share, (own["added_s"] / own["compute_s"]).median()))
    return pd.DataFrame(rows, columns=["gpus", "added_s", "share", "median"])
