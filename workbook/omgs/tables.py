"""The checks of omgs's Tables V and VI, and the tables with what we count and replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pandas as pd

from workbook.common import claims, source
from workbook.common.claims import Result, check, counted, measured, own
from workbook.omgs import fig04
from workbook.omgs.code_costs import LEFT, message_counts, recorded_devices
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
"""From how many elements on MGS-SGD sends a message (omgs V-D)."""
TIE = 0.002
"""A lead of OMGS-SGD up to this share counts as a tie. It is a choice, not measured."""
DEEP = ("ResNet-50", "Inception-v4")
IDS = dict(zip(("vgg16", "resnet50", "inception", "lstm"), NETWORKS, strict=True))
"""The networks by their names in the ids of claims."""


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the ratios of omgs Tab VI, as they were replayed.

    Parameters
    ----------
    frame : DataFrame
        The replays, as `workbook.omgs.fig04.measured` returns them.

    Returns
    -------
    DataFrame
        A row for each network, in the order of ``frame``:

        s1, s2
            The iterations of TopK-SGD and of MGS-SGD, each divided by that of OMGS-SGD.
        best
            The iteration of TopK-SGD divided by that of exact merging.
        fastest
            Which of TopK-SGD, MGS-SGD and OMGS-SGD has the shortest iteration.
        messages
            How many messages OMGS-SGD sends.
        resolved
            The largest ``repeatability`` of these three algorithms. If two algorithms differ by
            a smaller share of their iteration, this cannot be told from noise.
    """
    # A column for each pair of a quantity and an algorithm. The networks are sorted.
    wide = frame.pivot(index="network", columns="algorithm")
    three = ["TopK", "MGS", "OMGS"]
    iteration_s = wide["iteration"]
    columns = {
        "s1": iteration_s["TopK"] / iteration_s["OMGS"],
        "s2": iteration_s["MGS"] / iteration_s["OMGS"],
        "best": iteration_s["TopK"] / iteration_s["exact"],
        "fastest": iteration_s[three].idxmin(axis=1),
        "messages": wide["messages", "OMGS"].astype(int),
        "resolved": wide["repeatability"][three].max(axis=1),
    }
    return pd.DataFrame(columns).loc[frame["network"].unique()]


@cache
def at_papers_startup() -> pd.DataFrame:
    """Return the `speedups` of the replays at the start-up of the paper's cluster."""
    # A campaign is opened with the other recordings of its machine, which `alone` leaves out.
    return speedups(fig04.measured(source.open_campaign(name=source.OMGS).alone))


# -- Table V: messages ---------------------------------------------------------------


def _messages(network: str, threshold: int = 0) -> int:
    """Return how many messages a network sends, each as soon as it has enough elements.

    At a threshold of 0, each tensor is a message.
    """
    # The tensors are in forward order, and become ready in the reverse order.
    return len(merge_up_to(tensors(network)[::-1], threshold))


def table5() -> pd.DataFrame:
    """Return the messages of each algorithm as printed and as counted (omgs Tab V).

    Returns
    -------
    DataFrame
        The printed table. For TopK-SGD, LAGS-SGD and MGS-SGD it also has the counted
        messages and their relative difference from print. ``omgs_lab`` has the messages of
        Algorithm 1 in the replays at the start-up of the paper's cluster.
    """
    table = claims.paper_table("omgs", "tab05")
    names = table["model"]
    table["omgs_lab"] = at_papers_startup()["messages"].reindex(names).to_numpy()
    return claims.recomputed(
        table,
        # TopK-SGD sends all gradients in one message.
        topk=[1] * len(names),
        # LAGS-SGD sends each tensor as a message.
        lags=[_messages(name) for name in names],
        # MGS-SGD collects tensors until they have THRESHOLD elements or more. Only its last
        # message may have fewer.
        mgs=[_messages(name, THRESHOLD) for name in names],
    )


def _sent(network: str, threshold: int) -> Result:
    """Count the messages of LAGS-SGD, whose threshold is 0, or of MGS-SGD.

    LAGS-SGD sends each tensor as a message.
    """
    note = "parameter tensors"
    if threshold:
        note += (
            f", accumulated to {threshold} elements as the authors' code does; "
            "the text does not say how"
        )
    return counted(_messages(network, threshold), note)


for _id, _network in IDS.items():
    check(f"omgs-tab5-lags-{_id}", _network, 0)(_sent)
    check(f"omgs-tab5-mgs-{_id}", _network, THRESHOLD)(_sent)


def _listed(cases: pd.DataFrame) -> str:
    """Return the `message_counts` as text: by variant, each count and how many cases have it.

    A case is one choice of what the paper leaves open. A variant is whether a message takes
    one all-gather or both, and the rule of merging, as in "both, Algorithm 1: 4 (9), 5 (6)".
    """
    # A row for each variant, and a column for each number of messages.
    n_cases = pd.crosstab(cases["variant"], cases["messages"])
    listed = []
    for variant, n_by_messages in n_cases.iterrows():
        attained = n_by_messages[n_by_messages > 0]
        counts = ", ".join(f"{messages} ({n})" for messages, n in attained.items())
        listed.append(f"{variant}: {counts}")
    return "; ".join(listed)


@check("omgs-tab5-omgs-vgg16", "VGG-16")
@check("omgs-tab5-omgs-resnet50", RESNET)
@check("omgs-tab5-omgs-inception", "Inception-v4")
@check("omgs-tab5-omgs-lstm", LSTM)
def _messages_of_omgs(network: str) -> Result:
    """Return how many messages OMGS-SGD sends in each case of what the paper leaves open.

    Cases differ in which share of the computing time is the backward pass, and in whether a
    message takes one all-gather, or both of those in the code. The computing time is what
    TopK-SGD's time in Table VI leaves after selecting and sending. LEFT has the words for it in
    the note.
    """
    cases = message_counts(network)
    # The layer times of a network were recorded on these devices.
    devices = recorded_devices(network)
    profiles = f"profiles from CPUs: {devices.count('cpu')}"
    if "cuda" in devices:
        profiles += f", from GPUs: {devices.count('cuda')}"
    note = (
        f"{profiles}, backward 1/2, 2/3 or "
        f"3/4 of {LEFT} with one gather or, as in the code, both; messages "
        f"(of {len(cases)} cases): {_listed(cases)}"
    )
    if network == LSTM:
        # The units of the published code. With these units and both all-gathers, selecting and
        # sending alone take all of TopK-SGD's time in Table VI, so that there is no such case.
        published = cases.query("units == 1500")
        note += f"; at its 1,500 units (both leave no time) {_listed(published)}"
    # Of ResNet-50 alone the paper states a computing time.
    if network == RESNET:
        stated_s = claims.claimed("omgs-computing")
        at_stated = message_counts(network, compute_s=stated_s)
        note += f"; at Section I's {stated_s} s {_listed(at_stated)}"
    return claims.by_cases(cases["messages"], note)


# -- Table VI: times and speedups ----------------------------------------------------


def speedup_range(slow_s: Any, fast_s: Any, half_s: float = HALF_S) -> tuple[Any, Any]:
    """Return the least and the largest ratio of two times that were each rounded.

    Parameters
    ----------
    slow_s, fast_s : float or Series
        The rounded times in seconds.
    half_s : float, optional
        Half a unit of the last digit in seconds, by default half a millisecond.

    Returns
    -------
    least, most : float or Series
        Ratios of the slow time to the fast one.
    """
    # A time before rounding differs by at most half a unit from the rounded time.
    least = (slow_s - half_s) / (fast_s + half_s)
    most = (slow_s + half_s) / (fast_s - half_s)
    return least, most


def table6() -> pd.DataFrame:
    """Return the times and the speedups of omgs Tab VI.

    Returns
    -------
    DataFrame
        The printed table. Five columns follow each of the speedups ``s1`` and ``s2``. Their
        names begin with that of the speedup:

        _computed, _difference
            The quotient of the printed times, and its relative difference from print.
        _least, _most
            The ends of the quotients that the rounding of the times allows.
        _lab
            The speedup in the lab.
    """
    table = claims.paper_table("omgs", "tab06")
    lab = at_papers_startup().reindex(table["model"])
    for column, slower in (("s1", "topk_s"), ("s2", "mgs_s")):
        table = claims.recomputed(table, **{column: table[slower] / table["omgs_s"]})
        least, most = speedup_range(table[slower], table["omgs_s"])
        # `recomputed` has put its two columns after the speedup.
        after = table.columns.get_loc(f"{column}_difference") + 1
        table.insert(after, f"{column}_least", least)
        table.insert(after + 1, f"{column}_most", most)
        table.insert(after + 2, f"{column}_lab", lab[column].to_numpy())
    return table


def savings() -> pd.DataFrame:
    """Return how much time OMGS-SGD saves over TopK-SGD.

    Returns
    -------
    DataFrame
        A row for each network. ``saved_s`` is the printed time of TopK-SGD less that of
        OMGS-SGD. ``most_saved_s`` is the most that the printed number of messages can save
        at the published costs. For the LSTM, whose number of hidden units the paper leaves
        open, it is the largest over all scanned numbers. Both are in seconds.
    """
    frame = printed().assign(saved_s=lambda rows: rows["topk_s"] - rows["omgs_s"])
    for network, messages in frame["messages"].items():
        cost = cost_of(network)
        # Networks without hidden units were scanned with one number, which has no effect.
        bounds_s = [
            most_saved_s(network, cost, int(messages), units)
            for units in scanned(network)["units"].unique()
        ]
        frame.loc[network, "most_saved_s"] = max(bounds_s)
    return frame[["saved_s", "most_saved_s"]]


def _speedup(network: str, slower: str) -> Result:
    """Return the speedup of OMGS-SGD over another algorithm by the printed times.

    The result has all ratios that the rounding of the two times allows. It is judged by two
    readings of the printed speedup: it was rounded, or its last digits were cut off. ``slower``
    is the column of Table VI with the times of the other algorithm.
    """
    row = printed().loc[network]
    slow_s = float(row[slower])
    fast_s = float(row["omgs_s"])
    as_printed = slow_s / fast_s
    note = f"{slow_s} s over {fast_s} s as printed, {as_printed:.4f}; each was rounded"
    allowed = own([speedup_range(slow_s, fast_s)], note)
    return claims.rounded_or_cut_off(allowed)


for _id, _network in IDS.items():
    check(f"omgs-tab6-s1-{_id}", _network, "topk_s")(_speedup)
    check(f"omgs-tab6-s2-{_id}", _network, "mgs_s")(_speedup)


@check("omgs-deep-over-mgs", DEEP, "mgs_s", max)
@check("omgs-deep-over-topk", DEEP, "topk_s", min)
def _extreme_speedup(
    networks: Iterable[str], slower: str, extreme: Callable[..., Result]
) -> Result:
    """Return the largest or the least speedup over several networks.

    Parameters
    ----------
    networks : iterable of str
        Some of NETWORKS.
    slower : str
        The column of Table VI with the times of the slower algorithm.
    extreme : callable
        `max` or `min`.

    Returns
    -------
    Result
        The interval of the speedups that the rounding of the times allows. The largest or the
        least speedup is that with the largest or the least lower end of its interval.
    """
    by_network = {network: _speedup(network, slower) for network in networks}
    # The note has the middle of each interval.
    note = ", ".join(
        f"{network} {speedup.spans.mean():.3g}"
        for network, speedup in by_network.items()
    )
    chosen = extreme(by_network.values(), key=lambda speedup: speedup.low)
    return own(chosen.spans, note)


@check("omgs-vgg16-over-mgs", ["VGG-16"], "mgs_s")
@check("omgs-lstm-over-topk", [LSTM], "topk_s")
@check("omgs-best-gain", NETWORKS, "topk_s")
def _largest_gain(networks: Iterable[str], slower: str) -> Result:
    """Return the largest speedup over several networks as a gain in per cent.

    The result is judged by two readings of the printed gain: it was rounded, or its last digits
    were cut off.
    """
    # ``spans`` has an interval: all speedups that the rounding of two times of Table VI allows.
    # The words "as rounded" in the note are about these times, not about the printed gain.
    largest = _extreme_speedup(networks, slower, max)
    percent = own(100 * (largest.spans - 1), f"{largest.note}, as rounded")
    return claims.rounded_or_cut_off(percent)


@check("omgs-best-of-all")
def _best_of_all() -> Result:
    """Compare OMGS-SGD with the faster of TopK-SGD and MGS-SGD, replayed and trained.

    A ratio is the iteration of the faster of these two divided by that of OMGS-SGD. If it is
    above 1, OMGS-SGD is ahead.
    """
    ratios, is_free = _replayed_ratios()
    # The comparisons without a replay in which the processor may have set the pace.
    free = ratios[is_free]
    trained = _trained_ratios()
    # Each network was trained by two and by four ranks, whose ratios are in this order.
    by_network = ", ".join(
        f"{network} {by_ranks.iloc[0]:.2f}, {by_ranks.iloc[1]:.2f}"
        for network, by_ranks in trained.groupby("network")
    )
    note = (
        f"replayed by 16 ranks {ratios.min():.4g} to {ratios.max():.4g}, ahead by over "
        f"{TIE:.1%} on {_leads_in_words(ratios)}; {free.size} comparisons that no "
        f"processor limits have {free.min():.4g} to {free.max():.4g}; {trained.size} "
        f"trainings by 2 and by 4 ranks on two cores, medians of steps: {by_network}"
    )
    # The note above holds for both readings, so that neither has a note of its own.
    readings = {
        "the cases of Table VI, replayed": measured(ratios, note="", grade="replayed"),
        "any training": measured(
            [*ratios, *trained], note="", grade="replayed and measured"
        ),
    }
    return claims.by_readings(readings, note)


def _faster_over_omgs(iteration_s: pd.DataFrame) -> pd.Series:
    """Return the iteration of the faster other algorithm divided by that of OMGS-SGD.

    ``iteration_s`` has a column for the plan of each of the three algorithms.
    """
    return iteration_s.drop(columns="omgs").min(axis=1) / iteration_s["omgs"]


def _plans_of_three() -> list[str]:
    """Return the plans of the three algorithms in the order of a pivoted table."""
    return sorted(PLANS[name] for name in ("TopK", "MGS", "OMGS"))


def _leads_in_words(ratios: pd.Series) -> str:
    """Return in how many cases of each link OMGS-SGD leads by more than TIE.

    ``ratios`` are those of `_replayed_ratios`.
    """
    leads = ratios > 1 + TIE
    by_link = leads.groupby("link", sort=False).agg(["sum", "size"])
    return ", ".join(
        f"{n_ahead} of {n_cases} in {link}"
        for link, n_ahead, n_cases in by_link.itertuples()
    )


def _replayed_ratios() -> tuple[pd.Series, pd.Series]:
    """Return the iteration of the faster other algorithm divided by that of OMGS-SGD in replays.

    Returns
    -------
    ratios : Series
        By link and network. If OMGS-SGD has the same plan as another algorithm, the plan was
        played once for both, and there is no ratio.
    is_free : Series of bool
        With the index of ``ratios``, whether the link set the pace of all three replays. It is
        False if the processor may have set the pace of any.
    """
    # A campaign is opened with the other recordings of its machine, which `alone` leaves out.
    cases = accuracy.joined(source.open_campaign(name=source.OMGS).alone)
    three = cases[cases["plan"].isin(_plans_of_three())]
    # A row for each link and network, and a column for each pair of a quantity and a plan.
    wide = three.pivot(index=["link", "network"], columns="plan")
    # If the plan of OMGS-SGD was played under another name, the ratio is NaN.
    ratios = _faster_over_omgs(wide["measured_iteration_s"]).dropna()
    is_free = wide["processor_limited"].eq(False).all(axis=1)
    return ratios, is_free[ratios.index]


def _trained_ratios() -> pd.Series:
    """Return the step of the faster other algorithm divided by that of OMGS-SGD in training.

    The ratios are those of the median steps, by network and ranks.
    """
    recordings = source.open_labs(name=source.SPARSE_TRAINING)
    rows = recordings.table("sparse_training")
    case = ["network", "ranks", "plan"]
    # The time of a step is the mean over its ranks.
    steps_s = rows.groupby([*case, "repeat", "iteration"])["iteration_s"].mean()
    # A row for each network and number of ranks, and a column for each plan.
    medians_s = steps_s.groupby(case).median().unstack()
    return _faster_over_omgs(medians_s[_plans_of_three()])
