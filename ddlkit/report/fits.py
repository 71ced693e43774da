"""How well forms of a message cost hold on measured times, at sizes held out of their fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import SIMPLE_FIRST, Fit, Unseen, chosen_because, fit, unseen_by_form
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats

if TYPE_CHECKING:
    from pandas import DataFrame

CALIBRATION = 12
"""So many sizes of a dense table, nearest to evenly spaced over the logarithm, are fitted; the rest judge."""
SMALL_TO = 25 * MIB
"""Below it are the messages that DistributedDataParallel sends of itself."""
GOAL, GOAL_SMALL = 0.01, 0.05
"""Of a dense table's median error, and of that below SMALL_TO: fixed before they were computed."""


def held_intervals(
    form: str, sizes: ArrayLike, seconds: ArrayLike, every: int = 1
) -> NDArray[np.bool_]:
    """Return (k,) whether rows of inner sizes lie in the 95% interval of the fit that has not seen them.

    form : as `ddlkit.core.fit.fit` takes it, chosen anew each time if that is "auto"; sizes, seconds : (n,)
    every : of inner sizes each second, third... is held out, by default all

    Where so few sizes are left that the fit has no interval, there is nothing to say.
    """
    sizes, seconds = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    inside = [np.empty(0, dtype=bool)]
    for size in np.unique(sizes)[1:-1:every]:
        kept = sizes != size
        fitted = fit(form, sizes[kept], seconds[kept])
        if fitted.draws:
            low_s, high_s = fitted.interval(size)
            inside.append((low_s <= seconds[~kept]) & (seconds[~kept] <= high_s))
    return np.concatenate(inside)


class Comparison(NamedTuple):
    """Forms fitted to the same times, the simplest first.

    table : a row per form, NaN where it has too few sizes: sizes held out, and of |relative error| there the
        median, the worst, the median below SMALL_TO and from 1 MiB on
    fits : by form; the chosen one with draws; unseen : by form what it says of sizes held out
    """

    table: DataFrame
    fits: dict[str, Fit[MessageCost]]
    unseen: dict[str, Unseen]
    chosen: str
    why: str


def compare(sizes: ArrayLike, seconds: ArrayLike, *forms: str, **use: Any) -> Comparison:
    """Return what "auto" chooses between, and ``forms`` beside, on rows (n,) of messages.

    use : of the messages, as `ddlkit.core.fit.fit` takes it, which raises for rows that no form can be of
    """
    import pandas as pd

    names = tuple(dict.fromkeys([*SIMPLE_FIRST, *forms]))
    unseen = unseen_by_form(names, sizes, seconds)
    chosen, why = chosen_because({form: unseen[form] for form in SIMPLE_FIRST if form in unseen})
    fits = {}
    for form in names:
        draws = {} if form == chosen else {"draws": 0}
        try:
            fits[form] = fit(form, sizes, seconds, **draws, **use)
        except UserError:
            if form in (chosen, *forms):
                raise
    rows = {form: _judged(unseen.get(form)) for form in names}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("form")
    return Comparison(table, fits, unseen, chosen, why)


def _judged(unseen: Unseen | None) -> dict[str, float]:
    at, off = (unseen.sizes, np.abs(unseen.errors())) if unseen else (np.empty(0), np.empty(0))
    return {
        "sizes": len(at),
        "median": _median(off),
        "worst": float(off.max()) if off.size else np.nan,
        "median_below_25_mib": _median(off[at < SMALL_TO]),
        "median_from_1_mib": _median(off[at >= MIB]),
    }


def _median(off: Floats) -> float:
    return float(np.median(off)) if off.size else np.nan


def page(table: DataFrame) -> str:
    """Return the table of a comparison for a person: errors in percent, under a line of head."""
    heads = dict(
        zip(table.columns, ("held out", "median", "worst", "< 25 MiB", ">= 1 MiB"), strict=True)
    )
    lines = [f"{'form':<18}" + "".join(f"{heads[name]:>11}" for name in table.columns)]
    for form, row in table.iterrows():
        errors = ["-" if np.isnan(error) else f"{error:.2%}" for error in row.iloc[1:]]
        lines.append(f"{form:<18}{int(row.iloc[0]):>11}" + "".join(f"{e:>11}" for e in errors))
    return "\n".join([*lines, ""])
