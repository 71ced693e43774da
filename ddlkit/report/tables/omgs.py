"""Tables I to VI of `omgs`."""

from __future__ import annotations

import pandas as pd

from ddlkit.papers import omgs
from ddlkit.report.checks.omgs import speedup_range, tensors
from ddlkit.report.claims import paper_table
from ddlkit.report.tables import named, recomputed

SYMBOLS = {
    "P": "core.case.Case.workers",
    "alpha": "papers.omgs.Instance.alpha_s",
    "beta": "papers.omgs.Instance.beta_s",
    "d": "papers.omgs.selection_s(elements)",
    "d^(l)": "papers.omgs.Instance.elements",
    "L": "papers.omgs.Instance.layers",
    "t_iter": "papers.omgs.merged_iteration_s",
    "t_f": "papers.omgs.Instance.forward_s",
    "t_b": "papers.omgs.Instance.backward_s",
    "t_u": "core.workload.Workload.update_s",
    "t_b^(l)": "papers.omgs.Instance.backward_s",
    "tau_b^(l)": "papers.omgs.backward_start_s",
    "t_s^(l)": "papers.omgs.Instance.selection_s",
    "tau_s^(l)": "papers.omgs.selection_start_s",
    "t_c": "papers.omgs.topk_iteration_s(communication_s)",
    "t_c^(l)": "papers.omgs.Instance.communication_s",
    "tau_c^(l)": "papers.omgs.communication_start_s",
    "t_c^no": "papers.omgs.exposed_s",
}
"""Symbol of Table II -> name below ``ddlkit``; a model's total is the sum over its layers."""

THRESHOLD = 8192
"""Elements from which MGS-SGD sends (omgs V-D)."""


def table1() -> pd.DataFrame:
    """Which of pipelining, sparsification, merging and optimal merging six algorithms have."""
    return paper_table("omgs", "tab01")


def table2() -> pd.DataFrame:
    """omgs Tab II: symbol, meaning in our words, name in ddlkit."""
    return named(paper_table("omgs", "tab02"), SYMBOLS)


def table3() -> pd.DataFrame:
    """Hardware and software of a node."""
    return paper_table("omgs", "tab03")


def table4() -> pd.DataFrame:
    """Data set, epochs, batch, density and learning rate of four trainings."""
    return paper_table("omgs", "tab04")


def table5() -> pd.DataFrame:
    """Messages an iteration under four algorithms, against those counted from the networks' tensors.

    OMGS-SGD's hang on times that the paper leaves unstated, and are not computed.
    """
    table = paper_table("omgs", "tab05")
    sizes = [tensors(network) for network in table["model"]]
    counts = {
        "topk": [1 for _ in sizes],
        "lags": [len(one) for one in sizes],
        "mgs": [len(omgs.merge_up_to(one[::-1], THRESHOLD)) for one in sizes],
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
