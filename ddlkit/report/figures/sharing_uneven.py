"""Whether the order of buckets' sizes matters, and to which configuration (sharing 5, Future work: Horovod).

Plans, configurations and statistics were written down in examples/sharing_uneven.yml before it was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from ddlkit.core.doubt import median_interval
from ddlkit.core.workload import Workload
from ddlkit.report.figures import sharing_measured, sharing_predicted
from ddlkit.report.figures.sharing_measured import CELL

NETWORK = ("resnet18_64", 8)
EQUAL = "cuts:5,13,19,62"
ORDERS = {"falling": "cuts:13,17,29,62", "rising": "cuts:2,5,11,62"}
LEVEL = 0.995
"""Of intervals of `shifts`: ten of them are looked at."""


def orders(
    iterations: pd.DataFrame,
    layers: Workload,
    known: sharing_predicted.Known,
    copied: Mapping[str, float],
) -> pd.DataFrame:
    """Iterations with uneven buckets over those with equal ones in the same round.

    Columns: order, configuration, measured, lower, upper, foretold. Asked beforehand was the default alone.
    layers : of NETWORK, scaled to what an iteration without exchange took here; known, copied : as of
        `sharing_predicted`
    """
    seconds = iterations.pivot_table("iteration_s", ["configuration", "repeat"], "plan")
    (link,) = set(iterations["link"])
    work = layers.scaled(float(iterations["compute_s"].median()) / layers.compute_s)

    def told_s(plan: str, name: str) -> float:
        one = sharing_predicted.shared(work, plan, name, link, known)
        if one is None:
            return float("nan")
        return replace(one, copy_s_per_byte=copied.get(NETWORK[0], 0.0)).iteration_s

    rows = []
    for order, plan in ORDERS.items():
        for name, own in seconds.groupby("configuration"):
            ratio = (own[plan] / own[EQUAL]).dropna().to_numpy()
            foretold = told_s(plan, str(name)) / told_s(EQUAL, str(name))
            rows.append((order, name, np.median(ratio), *median_interval(ratio), foretold))
    columns = ["order", "configuration", "measured", "lower", "upper", "foretold"]
    return pd.DataFrame(rows, columns=columns)


def shifts(iterations: pd.DataFrame) -> pd.DataFrame:
    """What configurations gain over the default with uneven buckets, less what with equal ones, in one round.

    Columns: order, configuration, equal and uneven (median gains), more (median), lower and upper (of LEVEL),
    and whether that leaves 0 out.
    """
    default = sharing_measured.default_of(iterations)
    each = sharing_measured.rounds_over_default(iterations, "iteration_s", CELL)
    each = each[each["configuration"] != default]
    gains = each.assign(gain=1 / each["ratio"] - 1).pivot_table(
        "gain", ["configuration", "repeat"], "plan"
    )
    rows = []
    for order, plan in ORDERS.items():
        for name, own in gains.groupby("configuration"):
            more = (own[plan] - own[EQUAL]).dropna()
            lower, upper = median_interval(more.to_numpy(), LEVEL)
            medians = own[EQUAL].median(), own[plan].median(), more.median()
            rows.append((order, name, *medians, lower, upper, lower > 0 or upper < 0))
    columns = ["order", "configuration", "equal", "uneven", "more", "lower", "upper", "differs"]
    return pd.DataFrame(rows, columns=columns)
