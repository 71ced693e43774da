"""Pollux: iterations on T4 GPUs in many placements, predicted from the smallest batch of each."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats
from ddlkit.report.clusters.overlap import Overlap, models
from ddlkit.report.clusters.rules import Rows, rows


def predict(found: Rows, model: Overlap) -> Floats:
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


def predictions(rule: str = "pollux-resnet50") -> pd.DataFrame:
    """Of the rule's test rows by every model, as `board.SOURCES` describes it; with placement and batch."""
    found = rows(rule)
    known = found.test[["placement", "nodes", "ranks", "batch"]].assign(
        rule=rule, measured_s=found.test["iteration_s"], lower_s=np.nan, upper_s=np.nan
    )
    each = [
        known.assign(model=name, predicted_s=predict(found, model))
        for name, model in models().items()
    ]
    return pd.concat(each, ignore_index=True)
