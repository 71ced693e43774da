"""Models on trial on clusters that others measured: rules fixed before, blind predictions, a scoreboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ddlkit.core import plan
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import LinearScenarios
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats.clusters import EXTERNAL, abci, cs336, pollux, triosim
from ddlkit.report.accuracy import TAIL
from ddlkit.store import files

RULES = EXTERNAL / "rules.yml"
READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "pollux.read_iterations": pollux.read_iterations,
    "abci.read_iterations": abci.read_iterations,
    "abci.read_trainings": abci.read_trainings,
    "cs336.read_iterations": cs336.read_iterations,
}
PARTS = ("compute", "calibrate", "test")


@dataclass(frozen=True)
class Rows:
    """The rows of one source by what they may be used for; no row is in two of the three."""

    compute: pd.DataFrame
    calibrate: pd.DataFrame
    test: pd.DataFrame


def rules(path: Path = RULES) -> dict[str, dict[str, Any]]:
    """Rules by name, as data/external/rules.yml describes them.

    Raises UserError for a rule that lacks a part, or has a reader that is not in `READERS`.
    """
    try:
        found = yaml.safe_load(files.read_text(path))["rules"]
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise UserError(f"{path}: no YAML with rules: restore it") from error
    for name, rule in found.items():
        lacking = {"set", "read", "files", "predicts", *PARTS} - rule.keys()
        if lacking or rule["read"] not in READERS:
            what = f"lacks {', '.join(sorted(lacking))}" if lacking else f"reads {rule['read']!r}"
            raise UserError(f"{path}: rule {name}: {what}: write it as the head of the file says")
    return dict(found)


def rows(name: str, path: Path = RULES) -> Rows:
    """The rows that a rule calls compute, calibrate and test; `files` are found beside the rules.

    Raises UserError for an unknown rule, for one without test rows, and where a row would be in two parts.
    """
    known = rules(path)
    if name not in known:
        raise UserError(f"unknown rule {name!r}: use one of {', '.join(known)}")
    rule = known[name]
    found = sorted(path.parent.glob(rule["files"]))
    if not found:
        raise UserError(f"{path}: rule {name}: there are no files {rule['files']}")
    frame = pd.concat([READERS[rule["read"]](file) for file in found], ignore_index=True)
    parts = {part: frame.query(rule[part]) if rule[part] else frame[:0] for part in PARTS}
    if pd.concat(parts.values()).index.has_duplicates or parts["test"].empty:
        raise UserError(
            f"{path}: rule {name}: tests nothing, or a row is in two parts: divide them"
        )
    return Rows(**parts)


# -- models of two numbers: what computing takes and what all bytes take on the wire ----------------


@dataclass(frozen=True, eq=False)
class Overlap:
    """An iteration that is a maximum of straight lines: max over k of compute[k] C + wire[k] W.

    C : seconds that computing takes alone; W : seconds that all gradients take on the link alone
    compute, wire : (m,) shares, at least 0; of all models here the largest of each is at most 1
    """

    compute: Floats
    wire: Floats

    def iteration_s(self, compute_s: Floats, wire_s: Floats) -> Floats:
        """(n,) of as many iterations."""
        lines = np.outer(compute_s, self.compute) + np.outer(wire_s, self.wire)
        return np.asarray(lines.max(axis=1))

    def wire_s(self, compute_s: Floats, iteration_s: Floats) -> Floats:
        """(n,) the W with which the iteration is as long as that; 0 where computing alone takes as long.

        Infinite where no W makes it longer than computing.
        """
        shown_s, sent = np.asarray(iteration_s), self.wire > 0
        left_s = shown_s[:, None] - np.outer(compute_s, self.compute[sent])
        longest_s = np.min(left_s / self.wire[sent], axis=1, initial=np.inf)
        alone_s = np.asarray(compute_s) * self.compute.max()
        return np.where(shown_s > alone_s, longest_s, 0.0)


def overlapped(workload: Workload, sent: plan.FusionPlan) -> Overlap:
    """The workbook's model without a start-up time: messages leave when ready, one after the other."""
    coefficients = LinearScenarios.of(workload, sent).coefficients
    return Overlap(coefficients[0] / workload.compute_s, coefficients[2] / workload.bytes.sum())


@cache
def resnet50() -> Workload:
    """ResNet-50 in the shape that TrioSim traced on an H100, batch 128, float32."""
    operators = triosim.read_operators(EXTERNAL / "triosim" / "resnet50-h100-b128.csv.gz")
    return triosim.layer_profile(operators, "resnet50", 128).workload()


def models() -> dict[str, Overlap]:
    """Models on trial for ResNet-50 with PyTorch's buckets, by name."""
    one, none = np.ones(1), np.zeros(1)
    return {
        "compute_only": Overlap(one, none),
        "no_overlap": Overlap(one, one),
        "perfect_overlap": Overlap(np.array([1.0, 0.0]), np.array([0.0, 1.0])),
        "workbook": overlapped(resnet50(), plan.ddp(resnet50())),
    }


def predict_pollux(found: Rows, model: Overlap) -> Floats:
    """(test rows,) iteration in seconds, blind: of no placement a row is used that is tested.

    C is the one GPU's iteration at the row's batch size; W is the placement's, from its row to calibrate.

    Raises UserError where a test row's batch was not computed alone, or its placement not calibrated.
    """
    compute_s = found.compute.set_index("batch")["iteration_s"]
    known = found.calibrate.set_index("placement")
    lacking = {*found.test["batch"], *known["batch"]} - {*compute_s.index}
    if lacking or set(found.test["placement"]) - {*known.index}:
        raise UserError(
            f"batches without a row to compute: {sorted(lacking)}, or placements without one to "
            "calibrate: give the rule such rows"
        )
    wire_s = pd.Series(
        model.wire_s(compute_s[known["batch"]].to_numpy(), known["iteration_s"].to_numpy()),
        index=known.index,
    )
    wire_s[~np.isfinite(wire_s)] = 0.0
    return model.iteration_s(
        compute_s[found.test["batch"]].to_numpy(), wire_s[found.test["placement"]].to_numpy()
    )


def scoreboard() -> pd.DataFrame:
    """One row a source and model: median_error, error_90, bias and n; errors relative to what was measured.

    error_90 : what one test row in ten exceeds; bias : median signed error, above 0: predicted too slow
    Only Pollux's ResNet-50 is predicted so far.
    """
    source = "pollux-resnet50"
    found = rows(source)
    measured_s = found.test["iteration_s"].to_numpy()
    board = []
    for name, model in models().items():
        error = predict_pollux(found, model) / measured_s - 1
        size = np.abs(error)
        board.append(
            {
                "source": source,
                "model": name,
                "median_error": float(np.median(size)),
                "error_90": float(np.quantile(size, TAIL)),
                "bias": float(np.median(error)),
                "n": len(error),
            }
        )
    return pd.DataFrame(board)
