"""What should be known of a message cost: how well forms hold at sizes held out, and what it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import DRAWS, MessageCost, Table
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import SIMPLE_FIRST, Fit, chosen_because, errors_by_form, fit
from ddlkit.core.units import format_bytes

if TYPE_CHECKING:
    from pandas import DataFrame

_BETWEEN = {
    "nccl": "GPUs",
    "nccl-tests": "GPUs",
    "osu-cuda": "GPUs",
    "osu-rocm": "GPUs",
}
_BETWEEN |= dict.fromkeys(("gloo", "osu", "imb"), "processors")
"""What the programs that time messages send them between."""


class Comparison(NamedTuple):
    """Forms fitted to the same times, the simplest first.

    table : a row per form: sizes held out, and the median and worst |relative error| there, NaN for too few
    fits : by form; the chosen one with draws
    """

    table: DataFrame
    fits: dict[str, Fit[MessageCost]]
    chosen: str
    why: str


def compare(
    sizes: ArrayLike,
    seconds: ArrayLike,
    *forms: str,
    collective: str | None = None,
    workers: int | None = None,
    algorithm: str | None = None,
) -> Comparison:
    """Return what "auto" chooses between, and ``forms`` beside, on rows (n,); all else as `fit` takes it."""
    import pandas as pd

    names = tuple(dict.fromkeys([*SIMPLE_FIRST, *forms]))
    unseen = errors_by_form(names, sizes, seconds)
    chosen, why = chosen_because(
        {form: unseen[form] for form in SIMPLE_FIRST if form in unseen}
    )
    fits, rows = {}, {}
    for form in names:
        try:
            fits[form] = fit(
                form,
                sizes,
                seconds,
                DRAWS if form == chosen else 0,
                collective=collective,
                workers=workers,
                algorithm=algorithm,
            )
        except UserError:
            if form in (chosen, *forms):
                raise
        at = unseen[form].sizes if form in unseen else np.empty(0)
        off = pd.Series(
            np.abs(unseen[form].errors) if form in unseen else at, dtype=float
        )
        rows[form] = {"sizes": len(off), "median": off.median(), "worst": off.max()}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("form")
    return Comparison(table, fits, chosen, why)


class Measured(NamedTuple):
    """What is known of the messages that a cost was fitted to; ``between`` is "GPUs" or "processors"."""

    from_bytes: float | None = None
    to_bytes: float | None = None
    between: str | None = None

    @classmethod
    def of(cls, sizes: ArrayLike, *programs: str | None) -> Measured:
        """Return what is known of messages of those sizes (n,), timed by those backends or programs.

        >>> Measured.of([1024, 4096], "nccl")
        Measured(from_bytes=1024.0, to_bytes=4096.0, between='GPUs')
        """
        between = {_BETWEEN[name] for name in programs if name in _BETWEEN}
        where = between.pop() if len(between) == 1 else None
        return cls(float(np.min(sizes)), float(np.max(sizes)), where)

    @classmethod
    def read(cls, description: Mapping[str, Any], cost: MessageCost) -> Measured:
        """Return what ``ddlkit fit --json`` wrote; of a table by hand, its own sizes; else nothing."""
        given = cls(*(description.get("fit", {}).get(name) for name in cls._fields))
        are_sizes = all(
            n is None or isinstance(n, (int, float)) and n > 0 for n in given[:2]
        )
        if not are_sizes or not isinstance(given.between, str | None):
            raise UserError(
                f"the cost's fit says {shown(tuple(given))}: sizes, a name: fit again"
            )
        if given.from_bytes is None and isinstance(cost, Table):
            return cls.of(cost.bytes)._replace(between=given.between)
        return given


def several_populations(fitted: Mapping[str, Any]) -> Iterator[str]:
    """Yield whether rows are ten times as far from their fit, and over 1%, as medians of sizes held out."""
    off, held_out = (
        fitted["median_abs_relative_error"],
        fitted["median_abs_held_out_error"],
    )
    if held_out is not None and off > max(10 * held_out, 0.01):
        far = f"half of the rows are off by {off:.1%} and more, medians of sizes held out by {held_out:.1%}"
        yield f"{far}: times of several kinds? Choose by --place, --table, --ranks or --collective"


def doubts(device: str, measured: Measured, n_bytes: ArrayLike) -> Iterator[str]:
    """Yield where a profile's ``device``, a cost and messages of ``n_bytes`` (G,) do not fit together."""
    computed = "processors" if device == "cpu" else "GPUs"
    if device not in ("", "unknown") and measured.between not in (None, computed):
        yield (
            f"the profile is of {computed} ({device}), the messages were timed between "
            f"{measured.between}: measure both on the same devices"
        )
    if measured.from_bytes is None or measured.to_bytes is None:
        return
    sizes = np.asarray(n_bytes, dtype=float)
    outside = sizes[(sizes < measured.from_bytes) | (sizes > measured.to_bytes)]
    if outside.size:
        sent = " to ".join(
            dict.fromkeys(map(format_bytes, (outside.min(), outside.max())))
        )
        fitted = (
            f"{format_bytes(measured.from_bytes)} to {format_bytes(measured.to_bytes)}"
        )
        yield (
            f"{outside.size} of {sizes.size} messages ({sent}) are outside the sizes that were "
            f"measured ({fitted}): their time is extrapolated, measure such sizes too"
        )


def table_cost(rows: DataFrame, workers: int) -> MessageCost:
    """Return the cost of one collective, by its rows of a table ``collectives``."""
    fitted = fit(
        "table",
        rows["bytes"],
        rows["seconds"],
        draws=0,
        collective=rows["collective"].iloc[0],
        workers=workers,
        algorithm=rows["algorithm"].iloc[0],
    )
    return fitted.cost
