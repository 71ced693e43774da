"""Vidur's dense tables of all-reduces: fits calibrated by twelve sizes, and what no fit could be nearer than.

NCCL cuts a message into chunks, so that its time rises in teeth of some percent, changes its protocol at
places that differ by machine, and now and then takes one of two times for one size. Twelve sizes show little
of that. Times are medians of eleven kernels in whole microseconds; each size was timed three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.fit import AUTO, fit
from ddlkit.core.workload import Floats
from ddlkit.report.clusters import rows, rules
from ddlkit.report.fits import SMALL_TO

RULES = ("vidur-64mib", "vidur-512mib")
GOAL, GOAL_SMALL = 0.01, 0.05
"""Of a table's median error, and of that below SMALL_TO: fixed before they were computed."""
NEIGHBOURS = (1, 2, 4, 8, 16, 32)
"""So many on either side are tried, to say what a size held out takes."""
STEPS = 40
"""Of least squares, weighted anew each time, towards least absolute errors."""


class Part(NamedTuple):
    """A table's rows by increasing size; tuned: whether its errors were looked at to choose forms."""

    table: str
    tuned: bool
    calibrate: pd.DataFrame
    test: pd.DataFrame


@cache
def tables() -> tuple[Part, ...]:
    """Return all tables of the rules, in the order of their names; read once, and changed by nobody."""
    parts = []
    for rule in RULES:
        for name, test in rows(rule).test.groupby("table"):
            shown = rows(rule).calibrate.query("table == @name")
            ordered = (part.sort_values("bytes", kind="stable") for part in (shown, test))
            parts.append(Part(str(name), name in rules()[rule]["tuned"], *ordered))
    return tuple(parts)


@cache
def _predicted(number: int, form: str) -> pd.DataFrame:
    part = tables()[number]
    fitted = fit(
        form, part.calibrate["bytes"].to_numpy(float), part.calibrate["median_s"].to_numpy()
    )
    at = part.test["bytes"].to_numpy(float)
    lower_s, upper_s = fitted.interval(at)
    return pd.DataFrame(
        {"bytes": at, "model": form, "table": part.table, "tuned": part.tuned}
        | {"measured_s": part.test["median_s"].to_numpy(), "predicted_s": fitted.cost(at)}
        | {"lower_s": lower_s, "upper_s": upper_s}
    )


def predictions(forms: Sequence[str] = (AUTO,)) -> pd.DataFrame:
    """Return the rules' test rows by every form, fitted to the medians of a table's twelve sizes."""
    each = [_predicted(number, form) for number in range(len(tables())) for form in forms]
    return pd.concat(each, ignore_index=True)


def judged(predicted: pd.DataFrame) -> pd.DataFrame:
    """Return, by model and table, medians of |error|, of all sizes and below_25_mib, n, tuned and held.

    covered : how many of the n rows lie in their interval; half_width : of that, relative, the median
    held : whether the median and that below SMALL_TO are at most GOAL and GOAL_SMALL
    """
    seen = predicted.eval("error = abs(predicted_s / measured_s - 1)")
    seen["small"] = seen["error"].where(seen["bytes"] < SMALL_TO)
    seen["inside"] = seen["measured_s"].between(seen["lower_s"], seen["upper_s"])
    seen["half_width"] = (seen["upper_s"] - seen["lower_s"]) / seen["predicted_s"] / 2
    scores = seen.groupby(["model", "table"], sort=False).agg(
        tuned=("tuned", "first"),
        median=("error", "median"),
        below_25_mib=("small", "median"),
        covered=("inside", "sum"),
        half_width=("half_width", "median"),
        n=("error", "size"),
    )
    held = (scores["median"] <= GOAL) & (scores["below_25_mib"] <= GOAL_SMALL)
    return scores.assign(held=held).reset_index()


@cache
def floors() -> pd.DataFrame:
    """Return, by table, `scatter` and curve (`nearest_curve`): no prediction is expected to be nearer."""
    each = []
    for part in tables():
        every = pd.concat([part.calibrate, part.test]).sort_values("bytes", kind="stable")
        sizes, log_s = every["bytes"].to_numpy(float), np.log(every["median_s"].to_numpy())
        knots = part.calibrate["bytes"].to_numpy(float)
        each.append((part.table, scatter(sizes, log_s), nearest_curve(sizes, log_s, knots)))
    return pd.DataFrame(each, columns=["table", "scatter", "curve"])


def scatter(sizes: Floats, log_s: Floats) -> float:
    """Return how far (n,) times are, in the median, from the median of their neighbours, less a trend.

    As many neighbours as leave least: of fewer, the medians scatter themselves; of more, they miss the teeth.
    """
    at = np.log(sizes)
    rest = log_s - np.polyval(np.polyfit(at, log_s, 1), at)
    errors = []
    for beside in NEIGHBOURS:
        padded = np.pad(rest, beside, constant_values=np.nan)
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * beside + 1)
        others = np.delete(around, beside, axis=1)
        errors.append(np.median(np.abs(np.expm1(np.nanmedian(others, axis=1) - rest))))
    return float(min(errors))


def nearest_curve(sizes: Floats, log_s: Floats, knots: Floats) -> float:
    """Return the median error of the best curve whose log-log pieces join at ``knots`` (k,).

    It has seen every one of the (n,) rows; a table calibrated at the knots has seen k.
    """
    at = np.log(sizes)
    share = np.column_stack([np.interp(at, np.log(knots), unit) for unit in np.eye(len(knots))])
    weight = np.ones_like(log_s)
    for _ in range(STEPS):
        scaled = share * weight[:, None]
        curve = share @ np.linalg.lstsq(scaled, log_s * weight, rcond=None)[0]
        weight = np.maximum(np.abs(curve - log_s), 1e-5) ** -0.5
    return float(np.median(np.abs(np.expm1(curve - log_s))))
