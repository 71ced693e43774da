"""The scoreboard: what every model on trial predicts of every source, and how far it is off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from ddlkit.report.accuracy import TAIL
from ddlkit.report.clusters import abci, cs336, pollux, vidur

SOURCES: dict[str, Callable[[], pd.DataFrame]] = {
    "pollux": pollux.predictions,
    "abci": abci.predictions,
    "cs336": cs336.predictions,
    "vidur": vidur.predictions,
}
"""What each source's models predict, by the first part of its rules' names.

A frame of one row per model and test row: rule, model, measured_s, predicted_s, lower_s and upper_s of a
95% interval (NaN where the model has none), and what tells the test rows of that source apart.
"""


def predictions() -> pd.DataFrame:
    """Every source's predictions, below each other."""
    return pd.concat([predict() for predict in SOURCES.values()], ignore_index=True)


def scoreboard(predicted: pd.DataFrame, by: Sequence[str] = ("rule", "model")) -> pd.DataFrame:
    """One row per rule and model: median_error, error_90, bias, n, coverage; errors relative to the measured.

    by : other columns that tell the rows of the scoreboard apart
    error_90 : what one test row in ten exceeds; bias : median signed error, above 0: predicted too slow
    coverage : share of test rows within the interval; NaN for a model that gives none
    """
    error = predicted["predicted_s"] / predicted["measured_s"] - 1
    inside = predicted["measured_s"].between(predicted["lower_s"], predicted["upper_s"])
    judged = predicted[[*by]].assign(
        median_error=error.abs(),
        error_90=error.abs(),
        bias=error,
        n=1,
        coverage=inside.where(predicted["lower_s"].notna()).astype(float),
    )
    return (
        judged.groupby([*by], sort=False)
        .agg(
            median_error=("median_error", "median"),
            error_90=("error_90", lambda size: size.quantile(TAIL)),
            bias=("bias", "median"),
            n=("n", "sum"),
            coverage=("coverage", "mean"),
        )
        .reset_index()
    )
