"""How well forms of a message cost hold on measured times: at sizes left out, and calibrated by a few sizes.

What is asked of a calibration, fixed before it was computed: a table is *dense* if it has DENSE_SIZES sizes
or more between DENSE_FROM and DENSE_TO and reaches both. CALIBRATION of its sizes, the nearest to evenly
spaced ones over the logarithm of the size, both ends among them, are fitted; every other size between them is
predicted. An error is |predicted / median of the times there - 1|. Of each table and form: the median of all
errors, which should be at most GOAL; their median below SMALL_TO, which should be at most GOAL_SMALL; and the
worst, which has no goal. Tables that are not dense are treated alike, from their first size to their last.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import (
    AUTO,
    SIMPLE_FIRST,
    Fit,
    Unseen,
    chosen_because,
    unseen_by_form,
    unseen_errors,
)
from ddlkit.core.fit import fit as fit_cost
from ddlkit.core.units import MIB, format_bytes
from ddlkit.core.workload import Floats

if TYPE_CHECKING:
    from pandas import DataFrame

CALIBRATION = 12
DENSE_SIZES, DENSE_FROM, DENSE_TO = 48, 1 * MIB, 1024 * MIB
SMALL_TO = 25 * MIB
"""Below it are the messages that DistributedDataParallel sends of itself."""
GOAL, GOAL_SMALL = 0.01, 0.05


def calibration_sizes(sizes: ArrayLike, count: int = CALIBRATION) -> Floats:
    """Of the distinct ``sizes`` the ``count`` nearest to evenly spaced ones over the logarithm."""
    distinct = np.unique(np.asarray(sizes, dtype=float))
    at = np.log(distinct)
    nearest = np.abs(at[:, None] - np.linspace(at[0], at[-1], count)).argmin(axis=0)
    return np.asarray(distinct[np.unique(nearest)])


def calibrated_errors(form: str, sizes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    """Sizes that a calibration of a few has not seen, and the signed relative error of the median there.

    form : as `ddlkit.core.fit.fit` takes it; sizes, seconds : (n,) rows, sizes may repeat
    """
    sizes, seconds = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    seen = np.isin(sizes, calibration_sizes(sizes))
    at, errors = unseen_errors(
        lambda *rows: fit_cost(form, *rows, draws=0).cost,
        (sizes[seen], seconds[seen]),
        (sizes[~seen], seconds[~seen]),
    )
    return at, errors


def held_intervals(
    form: str, sizes: ArrayLike, seconds: ArrayLike, every: int = 1
) -> NDArray[np.bool_]:
    """(k,) whether rows of inner sizes lie in the 95% interval of the fit that has not seen their size.

    form : as `ddlkit.core.fit.fit` takes it, chosen anew each time if that is AUTO; sizes, seconds : (n,)
    every : of inner sizes each second, third... is left out, by default all

    Where so few sizes are left that the fit has no interval, there is nothing to say.
    """
    sizes, seconds = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    found = [np.empty(0, dtype=bool)]
    for size in np.unique(sizes)[1:-1:every]:
        kept = sizes != size
        fitted = fit_cost(form, sizes[kept], seconds[kept])
        if not fitted.draws:
            continue
        low_s, high_s = fitted.interval(size)
        found.append((low_s <= seconds[~kept]) & (seconds[~kept] <= high_s))
    return np.concatenate(found)


class Comparison(NamedTuple):
    """Forms fitted to the same times, the simplest first.

    table : a row per form, NaN where it has too few sizes: sizes left out, and of |relative error| there the
        median, the worst, the median below SMALL_TO and from DENSE_FROM on; then of
        `judged_calibration`
    fits : by form; the chosen one with draws; unseen : by form what it says of sizes left out
    """

    table: DataFrame
    fits: dict[str, Fit[MessageCost]]
    unseen: dict[str, Unseen]
    chosen: str
    why: str


def compare(sizes: ArrayLike, seconds: ArrayLike, *forms: str, **known: Any) -> Comparison:
    """What AUTO chooses between, and ``forms`` beside, on rows (n,) of messages.

    known : of the messages, as `ddlkit.core.fit.fit` takes it, which raises for rows that no form can be of
    """
    import pandas as pd

    names = tuple(dict.fromkeys([*SIMPLE_FIRST, *forms]))
    unseen = unseen_by_form(sizes, seconds, names)
    chosen, why = chosen_because({form: unseen[form] for form in SIMPLE_FIRST if form in unseen})
    fits, rows = {}, {}
    for form in names:
        draws = {} if form == chosen else {"draws": 0}
        try:
            fits[form] = fit_cost(form, sizes, seconds, **draws, **known)
        except UserError:
            if form in (chosen, *forms):
                raise
        rows[form] = _judged(unseen.get(form)) | judged_calibration(form, sizes, seconds)
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("form")
    return Comparison(table, fits, unseen, chosen, why)


def _judged(unseen: Unseen | None) -> dict[str, float]:
    at, off = (unseen.sizes, np.abs(unseen.errors())) if unseen else (np.empty(0), np.empty(0))
    return {
        "sizes": len(at),
        "median": _median(off),
        "worst": float(off.max()) if off.size else np.nan,
        "median_below_25_mib": _median(off[at < SMALL_TO]),
        "median_from_1_mib": _median(off[at >= DENSE_FROM]),
    }


def judged_calibration(form: str, sizes: ArrayLike, seconds: ArrayLike) -> dict[str, float]:
    """Median, median below SMALL_TO and worst error at sizes that a calibration has not seen; NaN: none."""
    at = off = np.empty(0)
    if np.unique(np.asarray(sizes)).size > CALIBRATION:
        with suppress(UserError):  # of forms that need more sizes
            at, errors = calibrated_errors(form, sizes, seconds)
            off = np.abs(errors)
    return {
        "median_of_12_sizes": _median(off),
        "median_of_12_sizes_below_25_mib": _median(off[at < SMALL_TO]),
        "worst_of_12_sizes": float(off.max()) if off.size else np.nan,
    }


def against_goals(sizes: ArrayLike, seconds: ArrayLike) -> str:
    """How a calibration with AUTO does on these rows (n,) beside the goals, in a sentence."""
    of = np.unique(np.asarray(sizes, dtype=float))
    found = list(judged_calibration(AUTO, sizes, seconds).values())
    if np.isnan(found[0]):
        return (
            f"{of.size} sizes are too few to calibrate with {CALIBRATION} and judge at the others"
        )
    inside = of[(of >= DENSE_FROM) & (of <= DENSE_TO)]
    dense = inside.size >= DENSE_SIZES and of[0] <= DENSE_FROM and of[-1] >= DENSE_TO
    said = [
        f"{error:.2%} (goal {goal:.0%}: {'held' if error <= goal else 'missed'})"
        for error, goal in zip(found, (GOAL, GOAL_SMALL), strict=False)
        if not np.isnan(error)
    ]
    small = f", below {format_bytes(SMALL_TO)} {said[1]}" if len(said) > 1 else ""
    meant = (
        "" if dense else "; the goals are set for dense tables of 1 MiB to 1 GiB, which this is not"
    )
    others = of.size - calibration_sizes(of).size
    return f"auto from {CALIBRATION} sizes is off at the other {others} by {said[0]}{small}{meant}"


def _median(off: Floats) -> float:
    return float(np.median(off)) if off.size else np.nan


def page(table: DataFrame) -> str:
    """The table of a comparison for a person: errors in percent, under two lines of head."""
    heads = {
        "sizes": "left out",
        "median": "median",
        "worst": "worst",
        "median_below_25_mib": "< 25 MiB",
        "median_from_1_mib": ">= 1 MiB",
        "median_of_12_sizes": "12: median",
        "median_of_12_sizes_below_25_mib": "< 25 MiB",
        "worst_of_12_sizes": "worst",
    }
    lines = [f"{'form':<18}" + "".join(f"{heads[name]:>11}" for name in table.columns)]
    for form, row in table.iterrows():
        errors = ["-" if np.isnan(error) else f"{error:.2%}" for error in row.iloc[1:]]
        lines.append(f"{form:<18}{int(row.iloc[0]):>11}" + "".join(f"{e:>11}" for e in errors))
    notes = (
        f"12: median and what follows: at sizes that a calibration by {CALIBRATION} has not seen"
    )
    return "\n".join([*lines, notes, ""])
