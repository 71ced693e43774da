"""Tables I to VI of `omgs`."""

from __future__ import annotations

import pandas as pd

from ddlkit.papers.omgs.algorithms import merge_up_to
from ddlkit.report.checks.omgs import speedup_range, tensors
from ddlkit.report.claims import paper_table
from ddlkit.report.tables import recomputed

THRESHOLD = 8192
"""Elements from which MGS-SGD sends (omgs V-D)."""


def table5() -> pd.DataFrame:
    """Messages per iteration under four algorithms, against those counted from the networks' tensors.

    OMGS-SGD's hang on times that the paper leaves unstated, and are not computed.
    """
    table = paper_table("omgs", "tab05")
    sizes = [tensors(network) for network in table["model"]]
    counts = {
        "topk": [1 for _ in sizes],
        "lags": [len(one) for one in sizes],
        "mgs": [len(merge_up_to(one[::-1], THRESHOLD)) for one in sizes],
    }
    for column, values in counts.items():
        table = recomputed(table, column, values)
    return table


def table6() -> pd.DataFrame:
    """Iteration times, and the speedups against those that follow from them.

    ``_least`` and ``_most`` : the ratios that times rounded to a millisecond allow.
    """
    table = paper_table("omgs", "tab06")
    for column, other in (("s1", "topk_s"), ("s2", "mgs_s")):
        table = recomputed(table, column, (table[other] / table["omgs_s"]).tolist())
        pairs = zip(table[other], table["omgs_s"], strict=True)
        least, most = zip(*(speedup_range(slow, fast) for slow, fast in pairs), strict=True)
        place = table.columns.get_loc(f"{column}_difference") + 1
        table.insert(place, f"{column}_least", least)
        table.insert(place + 1, f"{column}_most", most)
    return table
