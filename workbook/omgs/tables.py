"""omgs's Tables V and VI beside what is counted and replayed here, and their checks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pandas as pd

from workbook.common import claims, source
from workbook.common.claims import Result, check, counted, measured, modelled, own
from workbook.omgs import fig04
from workbook.omgs.code_costs import LEFT, message_counts, recorded_shares
from workbook.omgs.equations import (
    LSTM,
    NETWORKS,
    PLANS,
    merge_up_to,
    most_saved_s,
)
from workbook.omgs.settings import (
    HALF_S,
    RESNET,
    cost_of,
    printed,
    scanned,
    tensors,
)
from workbook.validate import accuracy

THRESHOLD = 8192
"""Elements from which MGS-SGD sends (omgs V-D)."""
DEEP = ("ResNet-50", "Inception-v4")
IDS = dict(zip(("vgg16", "resnet50", "inception", "lstm"), NETWORKS, strict=True))
"""What ids of claims call the networks."""


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Return by network omgs Tab VI's ratios of replays (`fig04.measured`): s1, s2: OMGS over TopK and MGS.

    best: exact merging over TopK; fastest: of three; resolved: how much repeats differ, at most (relative)
    """
    wide = frame.pivot(index="network", columns="algorithm")
    three = ["TopK", "MGS", "OMGS"]
    took = wide["iteration"]
    columns = {
        "s1": took["TopK"] / took["OMGS"],
        "s2": took["MGS"] / took["OMGS"],
        "best": took["TopK"] / took["exact"],
        "fastest": took[three].idxmin(axis=1),
        "messages": wide["messages", "OMGS"].astype(int),
        "resolved": wide["repeatability"][three].max(axis=1),
    }
    return pd.DataFrame(columns).loc[frame["network"].unique()]


@cache
def at_papers_startup() -> pd.DataFrame:
    """Return `speedups` of the recorded campaign."""
    return speedups(fig04.measured(source.open_campaign(name=source.OMGS).alone))


# -- Table V: messages --------------------------------------------------------------------------


def _messages(network: str, threshold: int = 0) -> int:
    return len(merge_up_to(tensors(network)[::-1], threshold))


def table5() -> pd.DataFrame:
    """Return messages by algorithm, against those counted; omgs_lab: of Algorithm 1 in the lab."""
    table = claims.paper_table("omgs", "tab05")
    names = table["model"]
    table["omgs_lab"] = at_papers_startup()["messages"].reindex(names).to_numpy()
    merged = [_messages(name, THRESHOLD) for name in names]
    return claims.recomputed(
        table, topk=[1] * len(names), lags=map(_messages, names), mgs=merged
    )


def _sent(network: str, threshold: int) -> Result:
    rule = f", accumulated to {threshold} elements as the authors' code does; the text does not say how"
    return counted(
        _messages(network, threshold), f"parameter tensors{rule * (threshold > 0)}"
    )


for _id, _network in IDS.items():
    check(f"omgs-tab5-lags-{_id}", _network, 0)(_sent)
    check(f"omgs-tab5-mgs-{_id}", _network, THRESHOLD)(_sent)


def _listed(cases: pd.DataFrame) -> str:
    each = pd.crosstab(cases["how"], cases["messages"]).iterrows()
    counts = (
        (how, ", ".join(f"{n} ({k})" for n, k in row.items() if k)) for how, row in each
    )
    return "; ".join(f"{how}: {listed}" for how, listed in counts)


@check("omgs-tab5-omgs-vgg16", "VGG-16")
@check("omgs-tab5-omgs-resnet50", RESNET)
@check("omgs-tab5-omgs-inception", "Inception-v4")
@check("omgs-tab5-omgs-lstm", LSTM)
def _messages_of_omgs(network: str) -> Result:
    cases = message_counts(network)
    note = (
        f"profiles from CPUs: {len(recorded_shares(network))}, backward 1/2, 2/3 or 3/4 of {LEFT} with "
        f"one gather or, as in the code, both; messages (of {len(cases)} cases): {_listed(cases)}"
    )
    if network == LSTM:
        note += f"; at its 1,500 units (both leave no time) {_listed(cases.query('units == 1500'))}"
    if network == RESNET:
        stated_s = claims.claimed("omgs-computing")
        note += f"; at Section I's {stated_s} s {_listed(message_counts(network, stated_s))}"
    return modelled(cases["messages"].unique(), note)


# -- Table VI: times and speedups ---------------------------------------------------------------


def speedup_range(slow_s: Any, fast_s: Any, half_s: float = HALF_S) -> tuple[Any, Any]:
    """Return the ratios that two times allow which were each rounded to a millisecond."""
    return (slow_s - half_s) / (fast_s + half_s), (slow_s + half_s) / (fast_s - half_s)


def table6() -> pd.DataFrame:
    """Return times, and speedups as they follow from them: within rounding, and in the lab."""
    table = claims.paper_table("omgs", "tab06")
    lab = at_papers_startup().reindex(table["model"])
    for column, other in (("s1", "topk_s"), ("s2", "mgs_s")):
        table = claims.recomputed(table, **{column: table[other] / table["omgs_s"]})
        least, most = speedup_range(table[other], table["omgs_s"])
        place = table.columns.get_loc(f"{column}_difference") + 1
        table.insert(place, f"{column}_least", least)
        table.insert(place + 1, f"{column}_most", most)
        table.insert(place + 2, f"{column}_lab", lab[column].to_numpy())
    return table


def savings() -> pd.DataFrame:
    """Return what OMGS-SGD saves of TopK-SGD's iteration: as printed, and the most that costs allow, in s."""
    frame = printed().assign(saved_s=lambda rows: rows["topk_s"] - rows["omgs_s"])
    for name, count in frame["messages"].items():
        units, cost = scanned(name)["units"].unique(), cost_of(name)
        most_s = max(most_saved_s(name, cost, int(count), each) for each in units)
        frame.loc[name, "most_saved_s"] = most_s
    return frame[["saved_s", "most_saved_s"]]


def _speedup(network: str, other: str) -> Result:
    slow_s, fast_s = (float(printed().loc[network, name]) for name in (other, "omgs_s"))
    note = f"{slow_s} s over {fast_s} s as printed, {slow_s / fast_s:.4f}; each was rounded"
    return own([speedup_range(slow_s, fast_s)], note)


for _id, _network in IDS.items():
    check(f"omgs-tab6-s1-{_id}", _network, "topk_s")(_speedup)
    check(f"omgs-tab6-s2-{_id}", _network, "mgs_s")(_speedup)


@check("omgs-deep-over-mgs", DEEP, "mgs_s", max)
@check("omgs-deep-over-topk", DEEP, "topk_s", min)
def _speedup_of(those: Iterable[str], other: str, of: Any) -> Result:
    each = {network: _speedup(network, other) for network in those}
    note = ", ".join(
        f"{network} {ratio.spans.mean():.3g}" for network, ratio in each.items()
    )
    return own(of(each.values(), key=lambda ratio: ratio.low).spans, note)


@check("omgs-vgg16-over-mgs", ["VGG-16"], "mgs_s")
@check("omgs-lstm-over-topk", [LSTM], "topk_s")
@check("omgs-best-gain", NETWORKS, "topk_s")
def _largest_gain(those: Iterable[str], other: str) -> Result:
    ratio = _speedup_of(those, other, max)
    return own(100 * (ratio.spans - 1), f"{ratio.note}, as rounded")


@check("omgs-best-of-all")
def _best_of_all() -> Result:
    """Replayed, where no other plan is the same and was played once for both; and really trained."""
    cases = accuracy.joined(source.open_campaign(name=source.OMGS).alone)
    three = cases[cases["plan"].isin(PLANS[name] for name in ("TopK", "MGS", "OMGS"))]
    wide = three.pivot(index=["link", "network"], columns="plan")
    took = wide["measured_iteration_s"]
    ratios = (took.drop(columns="omgs").min(axis=1) / took["omgs"]).dropna()
    ahead = (ratios > 1.002).groupby("link", sort=False).agg(["sum", "size"])
    each = ", ".join(f"{n} of {of} in {link}" for link, n, of in ahead.itertuples())
    free = ratios[wide["processor_limited"].eq(False).all(axis=1)[ratios.index]]
    rows = source.open_labs("", source.SPARSE_TRAINING).table("sparse_training")
    steps = rows.groupby(["network", "ranks", "plan", "repeat", "iteration"])[
        "iteration_s"
    ].mean()
    step_s = steps.groupby(level=[0, 1, 2]).median().unstack()[took.columns]
    trained = step_s.drop(columns="omgs").min(axis=1) / step_s["omgs"]
    by = (
        f"{at} {of.iloc[0]:.2f}, {of.iloc[1]:.2f}"
        for at, of in trained.groupby("network")
    )
    note = (
        f"replayed by 16 ranks {ratios.min():.4g} to {ratios.max():.4g}, ahead by over 0.2% on {each}; "
        f"{free.size} comparisons that no processor limits have {free.min():.4g} to {free.max():.4g}; "
        f"trained by 2 and by 4 ranks on two cores, medians of steps: {', '.join(by)}"
    )
    return measured([*ratios, *trained], note, "replayed and measured")
