"""Vidur's dense tables of all-reduces: fits calibrated by twelve sizes, and what no fit could be nearer than.

NCCL cuts a message into chunks, so that its time rises in teeth of some percent, changes its protocol at
places that differ by machine, and now and then takes one of two times for one size. Twelve sizes show little
of that. Two floors say how much of an error is whose: the times' own scatter beside their neighbours, and
what is left of the nearest curve with twelve knots, if it had seen every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.cost import FORMS, Chords, MessageCost
from ddlkit.core.fit import AUTO, fit
from ddlkit.core.workload import Floats
from ddlkit.report.accuracy import TAIL
from ddlkit.report.clusters.rules import rows, rules
from ddlkit.report.fits import CALIBRATION, GOAL, GOAL_SMALL, SMALL_TO

RULES = ("vidur-64mib", "vidur-512mib")
BESIDE = (1, 2, 4, 8, 16, 32)
"""So many neighbours on either side are tried, to say what a size left out takes."""
STEPS = 40
"""Of least squares, weighted anew each time, towards least absolute errors."""


class Part(NamedTuple):
    """A table's rows by increasing size; tuned: whether its errors were looked at to choose forms."""

    rule: str
    table: str
    tuned: bool
    calibrate: pd.DataFrame
    test: pd.DataFrame

    def whole(self) -> tuple[Floats, Floats]:
        """(n,) bytes and (n,) logarithms of median times of all rows."""
        both = pd.concat([self.calibrate, self.test]).sort_values("bytes", kind="stable")
        return both["bytes"].to_numpy(float), np.log(both["median_s"].to_numpy())


@cache
def tables() -> tuple[Part, ...]:
    """All tables of the rules, in the order of their names; read once, and changed by nobody."""
    every = []
    for rule in RULES:
        found, tuned = rows(rule), rules()[rule]["tuned"]
        for table, test in found.test.groupby("table"):
            shown = found.calibrate[found.calibrate["table"] == table]
            ordered = (part.sort_values("bytes", kind="stable") for part in (shown, test))
            every.append(Part(rule, str(table), table in tuned, *ordered))
    return tuple(every)


@cache
def _predictions(forms: Sequence[str]) -> pd.DataFrame:
    each = [calibrated(part, form) for part in tables() for form in forms]
    return pd.concat(each, ignore_index=True)


def predictions(forms: Sequence[str] = (AUTO,)) -> pd.DataFrame:
    """Of the rules' test rows by every form, as `board.SOURCES` describes it, with what `calibrated` adds."""
    return _predictions(tuple(forms)).copy()


def calibrated(part: Part, form: str) -> pd.DataFrame:
    """Every row that is tested, by one form fitted to the medians of the twelve sizes.

    With table, tuned, bytes, and fitted: the form that AUTO chose.
    """
    known = part.calibrate["bytes"].to_numpy(float), part.calibrate["median_s"].to_numpy()
    found, at = fit(form, *known), part.test["bytes"].to_numpy(float)
    lower_s, upper_s = found.interval(at)
    said = {"measured_s": part.test["median_s"], "predicted_s": found.cost(at)}
    named = {"rule": part.rule, "table": part.table, "tuned": part.tuned, "model": form}
    ends = {"lower_s": lower_s, "upper_s": upper_s, "fitted": found.form}
    return part.test[["bytes"]].assign(**named, **said, **ends)


def judged(predicted: pd.DataFrame) -> pd.DataFrame:
    """A row per model and table: median, below_25_mib, error_90, worst of |error|, covered, n; fitted, tuned.

    held : whether the median and that below SMALL_TO are at most GOAL and GOAL_SMALL
    covered : how many of the n rows lie within their interval
    half_width : of that interval, relative, the median; needed : the error that 95% of the rows stay within
    """
    off = (predicted["predicted_s"] / predicted["measured_s"] - 1).abs()
    inside = predicted["measured_s"].between(predicted["lower_s"], predicted["upper_s"])
    small = off.where(predicted["bytes"] < SMALL_TO)
    half_width = (predicted["upper_s"] - predicted["lower_s"]) / predicted["predicted_s"] / 2
    seen = predicted.assign(off=off, small=small, inside=inside, half_width=half_width)
    by = seen.groupby(["model", "table"], sort=False)
    found = by.agg(
        fitted=("fitted", "first"),
        tuned=("tuned", "first"),
        median=("off", "median"),
        below_25_mib=("small", "median"),
        error_90=("off", lambda sizes: sizes.quantile(TAIL)),
        worst=("off", "max"),
        covered=("inside", "sum"),
        half_width=("half_width", "median"),
        needed=("off", lambda sizes: sizes.quantile(0.95)),
        n=("off", "size"),
    )
    held = (found["median"] <= GOAL) & (found["below_25_mib"] <= GOAL_SMALL)
    return found.assign(held=held).reset_index()


# -- the luck of twelve sizes ------------------------------------------------------------------

DOZENS = 200
AWAY = 0.45
"""Share of a step, in logarithms, that another dozen's inner sizes are at most off their even places."""


@cache
def _dozens(sizes: int, form: str) -> pd.DataFrame:
    random, found = np.random.default_rng(14), []
    known = {part.table: part.whole() for part in tables()}
    for _ in range(DOZENS):
        places = np.linspace(0, 1, sizes)
        places[1:-1] += random.uniform(-AWAY, AWAY, sizes - 2) / (sizes - 1)
        found.append({table: _chosen(places, *whole, form) for table, whole in known.items()})
    return pd.DataFrame(found)


def _chosen(places: Floats, sizes: Floats, log_s: Floats, form: str) -> float:
    """Median error of a form through the rows nearest to ``places`` (k,): 0 is the first row, 1 the last."""
    at = np.log(sizes)
    wanted = at[0] + places * (at[-1] - at[0])
    shown = np.unique(np.abs(at - wanted[:, None]).argmin(axis=1))
    kind: Any = FORMS[form]  # of those that are a table of sizes and times
    cost: MessageCost = kind(sizes[shown], np.exp(log_s[shown]))
    left = ~np.isin(sizes, sizes[shown])
    return float(np.median(np.abs(cost(sizes[left]) / np.exp(log_s[left]) - 1)))


def dozens(sizes: int = CALIBRATION, form: str = Chords.form) -> pd.DataFrame:
    """(DOZENS, tables) median errors of chords through other choices of so many ``sizes``, the same by table.

    form : another one through all of its sizes

    First and last size stay; the inner ones lie up to AWAY of a step off their places, as rules.yml says.
    """
    return _dozens(sizes, form).copy()


# -- floors ------------------------------------------------------------------------------------


@cache
def _floors() -> pd.DataFrame:
    found = []
    for part in tables():
        sizes, log_s = part.whole()
        knots = part.calibrate["bytes"].to_numpy(float)
        again = part.test.loc[part.test["bytes"].duplicated(keep=False), "median_s"].to_numpy()
        floors = scatter(sizes, log_s), nearest_curve(sizes, log_s, knots)
        found.append((part.table, part.tuned, abs(again[0] / again[1] - 1), *floors))
    return pd.DataFrame(found, columns=["table", "tuned", "again", "scatter", "curve"])


def floors() -> pd.DataFrame:
    """A row per table, relative: what no prediction of its rows can be expected to be nearer than.

    again : how far the two medians of the size that was timed twice lie apart
    scatter, curve : of `scatter` and `nearest_curve`, the median size of the error
    """
    return _floors().copy()


def scatter(sizes: Floats, log_s: Floats) -> float:
    """What (n,) times are off, in the median, from the median of their neighbours, a trend in size removed.

    As many neighbours as leave least: of fewer, the medians scatter themselves; of more, they miss the teeth.
    """
    at = np.log(sizes)
    rest = log_s - np.polyval(np.polyfit(at, log_s, 1), at)
    off = []
    for beside in BESIDE:
        padded = np.pad(rest, beside, constant_values=np.nan)
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * beside + 1)
        others = np.delete(around, beside, axis=1)
        off.append(np.median(np.abs(np.expm1(np.nanmedian(others, axis=1) - rest))))
    return float(min(off))


def nearest_curve(sizes: Floats, log_s: Floats, knots: Floats) -> float:
    """The median error of the curve of least absolute errors whose log-log pieces join at ``knots`` (k,).

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
