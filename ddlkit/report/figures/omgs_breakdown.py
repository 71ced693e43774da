"""omgs's figure 4 and its tables V and VI by model: where an iteration's time goes on the paper's cluster.

Costs are those of the authors' published code; layer times are scanned (`ddlkit.papers.omgs.cluster`). A
setting is *compatible* with a printed time when it is within TOLERANCE of it, with a count when it is equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd

from ddlkit.papers.omgs import cluster
from ddlkit.papers.omgs.cluster import NETWORKS as NETWORKS
from ddlkit.papers.omgs.cluster import PARTS as PARTS
from ddlkit.papers.omgs.cluster import PLANS, Costs, Setting
from ddlkit.report.claims import paper_table

TOLERANCE = 0.05
TIMES = ("topk_s", "mgs_s", "omgs_s")
OTHERS = TIMES[:2]
KINDS = ("forward", "backward", "sparsify", "all_gather")
"""Spans that look like PARTS in a figure."""
COUNT = "messages"
WORKERS = 16


@cache
def costs() -> Costs:
    """Of 16 workers on 1 Gbit/s, as published."""
    code = paper_table("omgs", "code").set_index("id")["value"]
    alpha_s, beta_s = (float(code[f"{name}-{WORKERS}"]) for name in ("alpha", "beta"))
    return Costs(alpha_s, beta_s, float(code["gamma"]), WORKERS)


@cache
def printed() -> pd.DataFrame:
    """By network: times, ratios and messages of omgs Tabs V and VI, and the density of Tab IV."""
    frame = paper_table("omgs", "tab06").set_index("model")
    frame[COUNT] = paper_table("omgs", "tab05").set_index("model")["omgs"]
    return frame.assign(density=paper_table("omgs", "tab04")["density"].to_numpy())


@cache
def scanned(network: str) -> pd.DataFrame:
    """Every setting of a network under both rules (`cluster.scan`), and whether it agrees, by statement."""
    said = printed().loc[network]
    settings = list(cluster.grid(network, said["topk_s"]))
    frame = pd.DataFrame(cluster.scan(settings, costs().of(said["density"])))
    for name in TIMES:
        frame[f"{name}_agrees"] = (frame[name] / said[name] - 1).abs() <= TOLERANCE
    return frame.assign(messages_agrees=frame[COUNT] == said[COUNT])


def compatible(network: str, with_: Sequence[str] = TIMES) -> pd.DataFrame:
    """Settings that agree with as many of these statements as any does, the nearest to the times first."""
    frame, said = scanned(network), printed().loc[network]
    agree = frame[[f"{name}_agrees" for name in with_]].sum(axis=1)
    far = sum(np.log(frame[name] / said[name]).abs() for name in TIMES)
    most = agree == agree.max()
    return frame[most].assign(agree=agree[most], far=far[most]).sort_values("far", kind="stable")


def at_once() -> pd.DataFrame:
    """By network: share of settings that agree with each of four statements, and how many at once at most.

    saved_s : what OMGS-SGD saves of TopK-SGD's iteration as printed; most_saved_s : the most that any layer
    times allow at the published costs, with as many messages as printed; most_speedup : s1 with that saved
    """
    rows = []
    names = [f"{name}_agrees" for name in (*TIMES, COUNT)]
    for network, said in printed().iterrows():
        frame = scanned(str(network))
        shares = frame[names].mean().set_axis([*TIMES, COUNT]).to_dict()
        most_s = max(
            costs().most_saved_s(str(network), said["density"], int(said[COUNT]), units)
            for units in frame["units"].unique()
        )
        saved = {"saved_s": said["topk_s"] - said["omgs_s"], "most_saved_s": most_s}
        least_s = said["topk_s"] - most_s
        saved["most_speedup"] = said["topk_s"] / least_s if least_s > 0 else math.inf
        at_most = int(frame[names].sum(axis=1).max())
        rows.append(
            {"network": network, "settings": len(frame), **shares, "at_once": at_most, **saved}
        )
    return pd.DataFrame(rows)


def setting(network: str) -> Setting:
    """The compatible setting that is nearest to the printed times."""
    best = compatible(network).iloc[0]
    numbers = {name: float(best[name]) for name in ("compute_s", "backward", "even")}
    return Setting(network, **numbers, units=int(best["units"]))


@cache
def fig04() -> pd.DataFrame:
    """Seconds of PARTS under each algorithm at `setting`, and what the paper prints of whole iterations.

    Columns: network, algorithm, messages, PARTS, iteration, paper. OMGS by both rules.
    """
    rows = []
    plans = {**PLANS, "OMGS code": "omgs:code"}
    for network, said in printed().iterrows():
        chosen, cost = setting(str(network)), costs().of(said["density"])
        for algorithm in ("TopK", "LAGS", "MGS", "OMGS", "OMGS code", "exact"):
            found = cluster.planned(chosen, plans[algorithm], cost)
            column = f"{algorithm.split()[0].lower()}_s"
            place = {"network": network, "algorithm": algorithm}
            rows.append({**place, **found, "paper": said.get(column, np.nan)})
    frame = pd.DataFrame(rows).astype({COUNT: int})
    return frame[["network", "algorithm", COUNT, *PARTS, "iteration", "paper"]]


def predicted_gain(network: str, other: str) -> tuple[float, float]:
    """Least and largest speedup of OMGS-SGD over ``other`` (of OTHERS), where the times of those agree."""
    frame = compatible(network, OTHERS)
    ratio = frame[other] / frame["omgs_s"]
    return float(ratio.min()), float(ratio.max())


def computing_s(network: str) -> tuple[float, float]:
    """What TopK-SGD's printed iteration leaves to forward and backward (omgs Eq 4), within TOLERANCE."""
    said = printed().loc[network]
    rest = Setting(network, 1.0)
    seen = cluster.planned(rest, "single", costs().of(said["density"]))
    other_s = seen["selection"] + seen["exposed"]
    low, high = (said["topk_s"] * (1 + off) - other_s for off in (-TOLERANCE, TOLERANCE))
    return float(low), float(high)
