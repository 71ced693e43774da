"""Vidur's dense tables of all-reduces, by fits that twelve sizes calibrate.

NCCL cuts a message into chunks, so that its time rises in teeth of some percent, and changes its protocol at
places that differ by machine. Times are medians of eleven kernels; each size was timed three times.
"""

from __future__ import annotations

from functools import cache

import pandas as pd

from ddlkit.core.fit import AUTO, fit
from ddlkit.report.clusters import Rows, rows
from ddlkit.report.fits import SMALL_TO

RULES = ("vidur-64mib", "vidur-512mib")
GOAL, GOAL_SMALL = 0.01, 0.05
"""Of a table's median error, and of that below SMALL_TO: fixed before they were computed."""


@cache
def tables() -> dict[str, Rows]:
    """Return the rules' rows of each table by increasing size, by the tables' names."""
    by_name = {}
    for rule in RULES:
        parts = [part.sort_values("bytes", kind="stable") for part in rows(rule)]
        for name in sorted({*parts[-1]["table"]}):
            by_name[name] = Rows(*(part[part["table"] == name] for part in parts))
    return by_name


@cache
def predictions(form: str = AUTO) -> pd.DataFrame:
    """Return the rules' test rows by a form, fitted to the medians of a table's twelve sizes."""
    each = []
    for name, part in tables().items():
        shown, at = part.calibrate, part.test["bytes"].to_numpy(float)
        fitted = fit(form, shown["bytes"].to_numpy(float), shown["median_s"].to_numpy())
        lower_s, upper_s = fitted.interval(at)
        predicted = {"predicted_s": fitted.cost(at), "lower_s": lower_s, "upper_s": upper_s}
        measured = part.test[["bytes", "median_s"]].rename(columns={"median_s": "measured_s"})
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
