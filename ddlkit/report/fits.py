"""How well forms of a message cost hold on measured times, at sizes held out of their fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import SIMPLE_FIRST, Fit, Unseen, chosen_because, fit, unseen_by_form
from ddlkit.core.units import MIB

if TYPE_CHECKING:
    from pandas import DataFrame

SMALL_TO = 25 * MIB
"""Below it are the messages that DistributedDataParallel sends of itself."""


class Comparison(NamedTuple):
    """Forms fitted to the same times, the simplest first.

    table : a row per form: sizes held out, and the median and worst |relative error| there, NaN for too few
    fits : by form; the chosen one with draws; unseen : by form what it says of sizes held out
    """

    table: DataFrame
    fits: dict[str, Fit[MessageCost]]
    unseen: dict[str, Unseen]
    chosen: str
    why: str


def compare(sizes: ArrayLike, seconds: ArrayLike, *forms: str, **use: Any) -> Comparison:
    """Return what "auto" chooses between, and ``forms`` beside, on rows (n,) of messages.

    use : as `ddlkit.core.fit.fit` takes it, which raises for rows that no form can be of
    """
    import pandas as pd

    names = tuple(dict.fromkeys([*SIMPLE_FIRST, *forms]))
    unseen = unseen_by_form(names, sizes, seconds)
    chosen, why = chosen_because({form: unseen[form] for form in SIMPLE_FIRST if form in unseen})
    fits, rows = {}, {}
    for form in names:
        draws = {} if form == chosen else {"draws": 0}
        try:
            fits[form] = fit(form, sizes, seconds, **draws, **use)
        except UserError:
            if form in (chosen, *forms):
                raise
        at = unseen[form].sizes if form in unseen else np.empty(0)
        off = pd.Series(np.abs(unseen[form].errors()) if form in unseen else at, dtype=float)
        rows[form] = {"sizes": len(off), "median": off.median(), "worst": off.max()}
        rows[form]["median_below_25_mib"] = off[at < SMALL_TO].median()
        rows[form]["median_from_1_mib"] = off[at >= MIB].median()
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("form")
    return Comparison(table, fits, unseen, chosen, why)


def page(table: DataFrame) -> str:
    """Return the table of a comparison for a person: errors in percent, under a line of head."""
    heads = ("held out", "median", "worst", "< 25 MiB", ">= 1 MiB")
    named = table.set_axis(heads, axis=1).rename_axis(None)
    return named.to_string(float_format="{:.2%}".format, na_rep="-") + "\n"
