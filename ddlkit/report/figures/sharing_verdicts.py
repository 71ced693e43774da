"""Which of the sharing paper's conclusions hold on another machine: each with a statistic and a verdict.

Statistics, choices of cells and the rule below were written down before any of the tables was recorded
(22 November 2026). A conclusion "carries over" where the whole 95% interval lies on its side, "does not"
where it lies on the other, and is "undecided" else. Intervals draw cells anew, of correlations too.

All five were undecided. Before 14 more cells were recorded (suite sharing_more, the same day) it was fixed
that the second look takes all cells together, by the same statistics and LATER_LEVEL intervals: who looks
twice must be surer each time. A third session has cells of its own (examples/sharing_again.yml, fixed before
it was recorded): they are judged alone, by intervals of LATER_LOOKS, and so are those of a fourth.

Until 23 November rounds of two recordings that had the same number were compared as one. The statistics are
the same since; numbers of the first two looks changed (`ddlkit.report.source.rounds_apart`), no verdict did.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.report.figures.sharing_measured import (
    CELL,
    bootstrap,
    default_of,
    halves,
    has_default,
    hidden,
    intensities,
    least_first,
    rounds_over_default,
    share_of_communication,
)

PAIRS = (("t1-free-nice10", "t2-free-raised"), ("b1", "b0"))
"""A frugal and a rich configuration: of threads of gloo, of blocks of NCCL."""
DRAWS = 2000
LEVEL, LATER_LEVEL = 0.95, 0.975
"""How sure an interval is: of the first look, and of the second."""
LATER_LOOKS = {"third": ("again", 0.9833), "fourth": ("steady", 0.9875)}
"""The session that each later look is on, and how sure its interval is."""
Floats = NDArray[np.float64]


def _row(
    conclusion: str, statistic: str, values: tuple[float, float, float], cells: int
) -> dict[str, object]:
    """values : the statistic and its interval; the conclusion says that it is below 0."""
    value, lower, upper = values
    found = "carries over" if upper < 0 else "does not" if lower > 0 else "undecided"
    row = {"conclusion": conclusion, "statistic": statistic, "value": value}
    row |= {"lower": lower, "upper": upper, "cells": cells, "verdict": found}
    return row | {"needed": needed(value, lower, upper, cells)}


def needed(value: float, lower: float, upper: float, cells: int) -> float:
    """Cells of the same scatter, so that an interval around the same value would leave 0 out.

    Its width falls with the root of their number; infinite where the value is 0, or an end is.

    >>> needed(-0.1, -0.3, 0.1, 10)
    40.0
    """
    beyond = upper - value if value < 0 else value - lower
    if not value or not np.isfinite(beyond):
        return np.inf
    return float(np.ceil(cells * (beyond / value) ** 2))


def pair_of(iterations: pd.DataFrame) -> tuple[str, str]:
    """The frugal and the rich configuration that this machine trained with. Raises UserError without."""
    there = set(iterations["configuration"])
    for frugal, rich in PAIRS:
        if {frugal, f"{frugal}+{rich}"} <= there:
            return frugal, rich
    names = " or ".join(f"{frugal} and {frugal}+{rich}" for frugal, rich in PAIRS)
    raise UserError(f"sharing: train under {names} too")


def has_pair(iterations: pd.DataFrame) -> bool:
    """Whether `pair_of` finds one, and the default was trained with."""
    there = set(iterations["configuration"])
    pairs = any({frugal, f"{frugal}+{rich}"} <= there for frugal, rich in PAIRS)
    return pairs and has_default(iterations)


def _of_medians(values: pd.Series, level: float) -> tuple[float, float, float]:
    known = values.dropna().to_numpy(dtype=float)
    if len(known) < 3:
        return (float(np.median(known)) if len(known) else np.nan, -np.inf, np.inf)
    return (float(np.median(known)), *bootstrap(known, DRAWS, level))


def frugal_while_hidden(
    iterations: pd.DataFrame, spans: pd.DataFrame, level: float = LEVEL
) -> dict[str, object]:
    """Fewer resources are better while hidden: the frugal one, where it hides all but the last message."""
    ratios, (frugal, _) = _ratios(iterations), pair_of(iterations)
    fits = hidden(spans).xs(frugal, level="configuration").reindex(ratios.index).eq(True)
    kept = ratios[frugal][fits]
    says = f"iteration under {frugal} over the default's, less 1, where all but the last are hidden"
    return _row(
        "fewer resources are better while hidden", says, _of_medians(kept - 1, level), len(kept)
    )


def rich_for_the_last(iterations: pd.DataFrame, level: float = LEVEL) -> dict[str, object]:
    """More for the last message: two groups over the frugal one for all."""
    ratios, (frugal, rich) = _ratios(iterations), pair_of(iterations)
    apart = (ratios[f"{frugal}+{rich}"] / ratios[frugal] - 1).dropna()
    says = f"iteration under {frugal}+{rich} over that under {frugal}, less 1"
    return _row("more resources for the last message", says, _of_medians(apart, level), len(apart))


def _ratios(iterations: pd.DataFrame) -> pd.DataFrame:
    """Iterations over the default's: a row a cell, a column a configuration; medians over rounds."""
    each = rounds_over_default(iterations, "iteration_s", CELL)
    return each.pivot_table(index=CELL, columns="configuration", values="ratio", aggfunc="median")


def gains_apart(iterations: pd.DataFrame) -> pd.Series:
    """By CELL: gain of the best configuration over the default; chosen in some rounds, judged in the others.

    To choose and judge in the same rounds would call the luckiest the best. Odd rounds choose for even ones
    and the other way round; the mean of both, NaN where either lacks the other's choice.
    """
    each = rounds_over_default(iterations, "iteration_s", CELL)
    each = each[each["configuration"].isin(least_first(sorted(set(each["configuration"]))))]
    medians = [
        half.pivot_table(index=CELL, columns="configuration", values="ratio", aggfunc="median")
        for half in halves(each)
    ]
    gains = []
    for chooses, judges in (medians, medians[::-1]):
        best, judges = chooses.idxmin(axis=1), judges.reindex_like(chooses)
        found = [1 / judges.loc[cell, name] - 1 for cell, name in best.items()]
        gains.append(pd.Series(found, best.index))
    return (gains[0] + gains[1]) / 2


def falls_with_batch(iterations: pd.DataFrame, level: float = LEVEL) -> dict[str, object]:
    """The gain falls with the batch size: of each network, at its largest batch less at its smallest."""
    gains = gains_apart(iterations).rename("gain").reset_index()
    ordered = gains.sort_values("batch").groupby(["network", "plan", "link"])["gain"]
    apart = (ordered.last() - ordered.first())[ordered.size() > 1]
    says = "gain at the largest batch less that at the smallest, median over networks"
    return _row("the gain falls with the batch size", says, _of_medians(apart, level), len(apart))


def rises_with_communication(iterations: pd.DataFrame, level: float = LEVEL) -> dict[str, object]:
    """The gain rises with the share of communication: less Spearman's correlation over cells."""
    gains, share = gains_apart(iterations), share_of_communication(iterations)
    pairs = pd.concat([gains, share.reindex(gains.index)], axis=1).dropna().to_numpy()
    says = "rank correlation of gain and communication over computing, sign turned"
    return _row(
        "the gain rises with the share of communication", says, _turned(pairs, level), len(pairs)
    )


def intensity_order(
    iterations: pd.DataFrame, layers: pd.DataFrame, level: float = LEVEL
) -> dict[str, object]:
    """Networks of higher intensity want less: rank correlation of intensity and the best one's resources."""
    order = least_first(sorted(set(iterations["configuration"])))
    medians = _ratios(iterations)[order]
    ranks = medians.idxmin(axis=1).map({name: place for place, name in enumerate(order)})
    of_network = intensities(layers)
    intensity = ranks.index.get_level_values("network").map(of_network)
    pairs = pd.DataFrame({"rank": -ranks.to_numpy(), "intensity": intensity}).dropna().to_numpy()
    says = "rank correlation of intensity and resources of the best configuration"
    return _row("networks of higher intensity want less", says, _turned(pairs, level), len(pairs))


def _turned(pairs: Floats, level: float) -> tuple[float, float, float]:
    """Less Spearman's correlation of (n, 2) pairs, with its interval; undecided for fewer than five."""
    if len(pairs) < 5:
        return np.nan, -np.inf, np.inf
    rng = np.random.default_rng(0)
    drawn = [_spearman(pairs[rng.integers(0, len(pairs), len(pairs))]) for _ in range(DRAWS)]
    lower, upper = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return -_spearman(pairs), -float(upper), -float(lower)


def _spearman(pairs: Floats) -> float:
    ranks = pd.DataFrame(pairs).rank().to_numpy()
    if (np.ptp(ranks, axis=0) == 0).any():
        return np.nan
    return float(np.corrcoef(ranks.T)[0, 1])


def verdicts(
    iterations: pd.DataFrame, spans: pd.DataFrame, layers: pd.DataFrame, level: float = LEVEL
) -> pd.DataFrame:
    """One row a conclusion: statistic, value, lower, upper, cells, verdict, needed; of DDP's plan only."""
    own = iterations[(iterations["plan"] == "ddp") & iterations["openmp"].eq(1)]
    default_of(own)
    return pd.DataFrame(
        [
            frugal_while_hidden(own, spans, level),
            rich_for_the_last(own, level),
            falls_with_batch(own, level),
            rises_with_communication(own, level),
            intensity_order(own, layers, level),
        ]
    )
