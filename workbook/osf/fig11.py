"""osf Figure 11: what adaptive fusion gains over a constant buffer and over MG-WFBP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import predict
from ddlkit.core.units import MB
from ddlkit.core.workload import Ints, Workload
from ddlkit.model import make_plan
from workbook import plots
from workbook.common import claims
from workbook.common.claims import Outcome, Result, Verdict, check, claimed
from workbook.common.source import REGIMES, Source
from workbook.common.specs import network_title
from workbook.osf import settings
from workbook.osf.cluster import (
    BUFFERS,
    FIVE,
    PaperSetting,
    fused_iteration_s,
    osf_name,
    reference_network,
)
from workbook.osf.equations import largest_fusion_gain, merged
from workbook.osf.frames import rows_of
from workbook.osf.lab import Lab, graded
from workbook.osf.settings import Grid
from workbook.validate import compare

CONSTANT = "buffer:100MB"
RIVAL = "mg_wfbp"
ADAFUSION = "adafusion:repaired"
PLANNERS = (
    "none",
    CONSTANT,
    "buffer:25MB",
    "ddp",
    RIVAL,
    "adafusion",
    ADAFUSION,
    "exact",
)
"""The planners whose scaling factors are modelled."""
RULES = (ADAFUSION, RIVAL, "exact")
"""The planners whose gains are modelled."""
RIVALS = {CONSTANT: "a 100 MB buffer", RIVAL: "MG-WFBP"}
"""The planners with which osf compares adaFusion, as the figure calls them."""


# -- numbers -------------------------------------------------------------------------


def modelled(setting: PaperSetting) -> pd.DataFrame:
    """Return the scaling factors of the five networks by planner.

    Parameters
    ----------
    setting : PaperSetting
        What the paper leaves out of its cluster.

    Returns
    -------
    DataFrame
        A row for each ``network`` and ``planner``, as `_by_planner` describes it.
    """
    cost = setting.cost()
    tables = {}
    for network in FIVE:
        tables[network] = _by_planner(setting.workload(network), cost)
    return pd.concat(tables, names=["network", "planner"]).reset_index()


def _by_planner(workload: Workload, cost: AlphaBeta) -> pd.DataFrame:
    """Return the rows of `modelled` for one network, by planner.

    ``messages`` is the number of messages, ``model`` the scaling factor, and
    ``gain_over_100MB`` the gain over the constant buffer. No plan can gain more over
    that buffer than ``most_possible_gain``.
    """
    messages = {}
    factors = {}
    for planner in PLANNERS:
        plan = make_plan(planner, workload, cost)
        messages[planner] = len(plan.ends)
        factors[planner] = predict(workload, plan, cost).scaling_factor
    table = pd.DataFrame({"messages": messages, "model": factors})
    # A single message would save all start-ups of the constant buffer but one.
    saved_s = (messages[CONSTANT] - 1) * cost.alpha_s
    saved_overhead = saved_s / workload.compute_s
    return table.assign(
        gain_over_100MB=table["model"] / factors[CONSTANT] - 1,
        most_possible_gain=largest_fusion_gain(factors[CONSTANT], saved_overhead),
    )


def modelled_gains(setting: PaperSetting) -> pd.DataFrame:
    """Return the gain of each of RULES over the constant buffer and over MG-WFBP.

    Parameters
    ----------
    setting : PaperSetting
        What the paper leaves out of its cluster.

    Returns
    -------
    DataFrame
        A row for each ``planner``, the planner that it is compared with (``over``) and
        ``network``, with the relative ``gain``.
    """
    factors = modelled(setting).pivot(
        index="network", columns="planner", values="model"
    )
    factors = factors.loc[list(FIVE)]
    gains = {}
    for rule in RULES:
        for other in (CONSTANT, RIVAL):
            # A planner gains nothing over itself.
            if rule != other:
                gains[rule, other] = factors[rule] / factors[other] - 1
    table = pd.concat(gains, names=["planner", "over", "network"])
    return table.rename("gain").reset_index()


def gains_in_lab(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the measured gains of planners over a buffer of 25 MB.

    Parameters
    ----------
    runs : DataFrame
        The measured iterations of a campaign.

    Returns
    -------
    DataFrame
        A row for each planner and network. The gain has its 95% interval over the
        rounds, ``gain_low`` to ``gain_high``.
    """
    tables = []
    for rule in (RIVAL, "exact"):
        tables.append(compare.paired(runs, rule).assign(planner=rule))
    pairs = pd.concat(tables).query("other == 'buffer:25MB'")
    gains = pd.DataFrame(
        {
            "network": pairs["network"],
            "planner": pairs["planner"],
            "over": pairs["other"],
            "gain": pairs["ratio"] - 1,
            "gain_low": pairs["lower"] - 1,
            "gain_high": pairs["upper"] - 1,
        }
    )
    return gains.reset_index(drop=True)


def gains_in_regime() -> pd.DataFrame:
    """Return the measured gains over the constant buffer with expensive start-ups.

    Returns
    -------
    DataFrame
        A row for each network and planner. The gain is the mean over the rounds, and
        ``gain_low`` and ``gain_high`` are the least and the largest of them.
    """
    lab = Lab.load(REGIMES)
    cases_by_network: dict[str, list[Case]] = {}
    for case in lab.cases(plain=True):
        cases_by_network.setdefault(osf_name(case.network), []).append(case)
    rows = []
    for network, cases in cases_by_network.items():
        rows.extend(_network_in_regime(lab, network, cases))
    return pd.DataFrame(rows)


def _network_in_regime(
    lab: Lab, network: str, cases: Sequence[Case]
) -> list[dict[str, Any]]:
    """Return the rows of `gains_in_regime` for one network, from all of its cases."""
    factors = {case.plan: lab.rounds(case)["factor"] for case in cases}
    plan_by_ends = {case.ends: case.plan for case in cases}
    # All cases of a network have the same workload, link and number of workers.
    workload = lab.workload(cases[0])
    cost = lab.calibration.of_case(cases[0]).cost
    rows = []
    for rule in ("adafusion", *RULES):
        replayed: str | None = rule
        if rule not in factors:
            # A rule that was not run itself may make the plan of another case.
            plan = make_plan(rule, workload, cost)
            ends = ";".join(map(str, plan.ends))
            replayed = plan_by_ends.get(ends)
        # A plan that nobody replayed has no row. Nor has the plan of the constant buffer,
        # which gains nothing over itself.
        if replayed is None or replayed == CONSTANT:
            continue
        gain = factors[replayed] / factors[CONSTANT] - 1
        rows.append(
            {
                "network": network,
                "planner": rule,
                "over": CONSTANT,
                "gain": gain.mean(),
                "gain_low": gain.min(),
                "gain_high": gain.max(),
            }
        )
    return rows


def numbers(campaign: Source) -> pd.DataFrame:
    """Return scaling factors by planner, and the gains of planners.

    Parameters
    ----------
    campaign : Source
        The recording of the campaign with a buffer of 25 MB.

    Returns
    -------
    DataFrame
        The rows of `modelled` in the best setting, and then gains, which are modelled in all
        compatible settings or measured. In the rows of gains, ``grade`` is "model" or
        "lab". The printed range of adaFusion's gain is ``paper_gain_low`` to
        ``paper_gain_high``.
    """
    factors = modelled(settings.setting())
    gains = settings.over(modelled_gains, ["planner", "over", "network"], ["gain"])
    measured = gains_in_lab(campaign.table("runs"))
    frame = pd.concat(
        [factors, graded(gains, measured, gains_in_regime())], ignore_index=True
    )
    is_stated = (frame["planner"] == ADAFUSION) & (frame["grade"] == "model")
    low = {
        CONSTANT: claimed("osf-fig11-constant-min") / 100,
        RIVAL: claimed("osf-fig11-mgwfbp-min") / 100,
    }
    high = {
        CONSTANT: claimed("osf-fig11-constant-max") / 100,
        RIVAL: claimed("osf-fig11-mgwfbp-max") / 100,
    }
    return frame.assign(
        paper_gain_low=frame["over"].map(low).where(is_stated),
        paper_gain_high=frame["over"].map(high).where(is_stated),
    )


# -- drawing -------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the gains of adaFusion, a panel for each planner that it is compared with.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    # The model has gains of the repaired rule, and the lab those of the printed rule.
    repaired = rows_of(frame, planner=ADAFUSION, grade="model")
    replayed = rows_of(frame, planner="adafusion", grade="lab")
    over_constant = rows_of(repaired, over=CONSTANT)
    title = (
        f"By the model, adaFusion gains at most {over_constant['gain_high'].max():.0%} "
        f"over a 100 MB buffer; the paper claims at least "
        f"{over_constant['paper_gain_low'].max():.1%}"
    )
    sheet = plots.sheet(title, columns=2, height=3.4, sharey=True)
    with sheet as (figure, axes):
        for ax, (over, name) in zip(axes, RIVALS.items(), strict=True):
            _draw_gains(
                ax, rows_of(repaired, over=over), rows_of(replayed, over=over), name
            )
    return figure


def _draw_gains(
    ax: Axes, modelled: pd.DataFrame, replayed: pd.DataFrame, rival: str
) -> None:
    """Draw the gains over one planner, a row for each network.

    Parameters
    ----------
    ax : Axes
        Where they are drawn.
    modelled : DataFrame
        The gains of the repaired rule, with their range and the printed range, which is
        shaded.
    replayed : DataFrame
        The measured gains of the printed rule.
    rival : str
        What the figure calls the planner.
    """
    modelled = modelled.set_index("network").loc[list(FIVE)]
    replayed = replayed.set_index("network").reindex(FIVE)
    low = 100 * modelled["gain_low"]
    high = 100 * modelled["gain_high"]
    # The printed range is the same in all rows.
    printed_low = 100 * modelled["paper_gain_low"].max()
    printed_high = 100 * modelled["paper_gain_high"].max()
    networks = [network_title(network) for network in FIVE]
    plots.intervals(
        ax,
        networks,
        {"model:of the repaired rule": (low.to_numpy(), high.to_numpy())},
        label=f"gain over {rival} [%]",
        printed={"claimed gain": (printed_low, printed_high)},
    )
    plots.points(
        ax,
        100 * replayed["gain"],
        range(len(networks)),
        "measured",
        label="replay of the printed rule",
        size=6,
    )
    ax.set_title(
        f"Over {rival}: {low.min():.0f}% to {high.max():.0f}%;\n"
        f"the paper claims {printed_low:g}% to {printed_high:g}%"
    )


# -- what any plan may gain ----------------------------------------------------------

CONSTANT_BYTES = 100 * MB
MORE = {size * MB for size in (3, 10, 25, 30, 64, 300)}
"""Buffers in bytes that are not in Figure 4: those of frameworks, and some between."""
READINGS = {
    "mg_wfbp:osf": "all sent so far",
    "own": "a layer's own",
    "mg_wfbp": "as [43], drawn",
}
"""What MG-WFBP may be. Section 4.2 compares the backward time with that of sending the
"tensors of layer i", which may be all tensors up to layer i or those of layer i alone.
The third reading is that of the paper which proposed MG-WFBP, reference [43]."""


def possible_gains(setting: PaperSetting, network: str) -> dict[str, float]:
    """Return by which share an iteration of a network can get shorter in a setting.

    Parameters
    ----------
    setting : PaperSetting
        The setting of the cluster.
    network : str
        The network.

    Returns
    -------
    dict of str to float
        ``over_constant`` and ``over_<planner>`` are upper bounds of the gain of any
        plan over the constant buffer, over READINGS and over adaFusion. The gain of the
        constant buffer over the best other buffer of Figure 4 is
        ``constant_over_others``. For ``constant_over_more``, the buffers MORE count
        too.
    """
    by_buffer_s = {}
    for capacity in (0, *BUFFERS, *MORE):
        by_buffer_s[capacity] = _buffered_s(setting, network, capacity)
    # The constant buffer is taken out, because it is compared with all others.
    constant_s = by_buffer_s.pop(CONSTANT_BYTES)
    in_fig4_s = [
        seconds for capacity, seconds in by_buffer_s.items() if capacity not in MORE
    ]
    least_s = _least_iteration_s(setting, network)
    gains = {"over_constant": constant_s / least_s - 1}
    # The timeout does not matter to planners. Without it, settings that differ only in
    # the timeout share a cached result.
    without_timeout = replace(setting, timeout_s=math.inf)
    for planner in (*READINGS, ADAFUSION):
        planned_s = _planned_s(network, without_timeout, planner)
        gains[f"over_{planner}"] = planned_s / least_s - 1
    gains["constant_over_others"] = min(in_fig4_s) / constant_s - 1
    gains["constant_over_more"] = min(by_buffer_s.values()) / constant_s - 1
    return gains


def _buffered_s(setting: PaperSetting, network: str, capacity: int) -> float:
    """Return an iteration with a buffer of so many bytes (0: no fusion), in seconds."""
    workload, plan, waited_s = setting.with_buffer(network, capacity)
    cost = setting.cost()
    # The only overhead, so that there is a single iteration.
    overheads_s = np.array([cost.alpha_s])
    iterations_s = fused_iteration_s(
        workload, plan, waited_s, overheads_s, cost.beta_s_per_byte
    )
    return float(iterations_s[0])


def _least_iteration_s(setting: PaperSetting, network: str) -> float:
    """Return a time in seconds below which no plan brings an iteration.

    The last tensor is sent after the backward pass, and all bytes are sent after the
    first gradient.
    """
    work = setting.workload(network)
    cost = setting.cost()
    after_backward_s = work.compute_s + float(cost(work.bytes[-1:])[0])
    all_bytes_s = float(cost(work.bytes.sum()))
    after_first_s = work.forward_s + work.backward_s[0] + all_bytes_s
    return max(after_backward_s, after_first_s)


@cache
def _planned_s(network: str, setting: PaperSetting, planner: str) -> float:
    """Return the iteration of a network by a planner, in seconds.

    The planner is one of READINGS or of `ddlkit.model.make_plan`.
    """
    work = setting.workload(network)
    cost = setting.cost()
    if planner != "own":
        plan = make_plan(planner, work, cost)
        return predict(work, plan, cost).iteration_s
    # "own" is a reading that `make_plan` does not have. By this reading, a tensor joins the
    # message of the tensor before it if its backward takes less time than sending the tensor
    # before it alone and one more start-up.
    limits_s = cost(work.bytes) + cost.alpha_s

    def joins(tensor: int, _group_bytes: float, _start_s: float) -> bool:
        return bool(work.backward_s[tensor] < limits_s[tensor - 1])

    plan = merged("own", work, cost, joins)
    return predict(work, plan, cost).iteration_s


def possible_gains_over(grid: Grid, wanted: NDArray[np.bool_]) -> pd.DataFrame:
    """Return the `possible_gains` of all five networks in some settings of a grid.

    Parameters
    ----------
    grid : Grid
        The settings.
    wanted : ndarray of bool, shape ``grid.shape``
        The settings that count.

    Returns
    -------
    DataFrame
        A row for each network and setting.
    """
    indices = np.argwhere(wanted)
    tables = []
    for network in FIVE:
        gains = _gains_at(grid, indices, network)
        # The settings are numbered in the order of the grid.
        settings_of_rows = np.arange(len(indices))
        tables.append(gains.assign(network=network, setting=settings_of_rows))
    return pd.concat(tables, ignore_index=True)


def _gains_at(grid: Grid, indices: Ints, network: str) -> pd.DataFrame:
    """Return the `possible_gains` of a network at some places of a grid.

    Parameters
    ----------
    grid : Grid
        The settings.
    indices : ndarray of int, shape (s, 5)
        The places on the axes unit, timeout, overhead, and the compute times of
        ResNet-101 and of VGG-16.
    network : str
        The network.

    Returns
    -------
    DataFrame
        A row for each of the s places.
    """
    # Only the compute time of the network's own family counts. Settings that differ in
    # the other one have the same gains, which are computed once.
    is_vgg = reference_network(network) == "VGG16"
    own_axis = 4 if is_vgg else 3
    # The row of ``distinct`` that each setting has is in ``row_of_setting``.
    distinct, row_of_setting = np.unique(
        indices[:, [0, 1, 2, own_axis]], axis=0, return_inverse=True
    )
    rows = []
    # The place 0 on the axis of the other family is as good as any.
    for unit, timeout, overhead, compute in distinct:
        times = (0, compute) if is_vgg else (compute, 0)
        setting = grid.setting((unit, timeout, overhead, *times))
        rows.append(possible_gains(setting, network))
    return pd.DataFrame(rows).iloc[row_of_setting.ravel()].reset_index(drop=True)


# -- claims --------------------------------------------------------------------------


@cache
def _fusion_gains() -> pd.DataFrame:
    """Return the possible gains in all settings that agree with the most statements."""
    search = settings.setting_search()
    return possible_gains_over(search.grid, search.most())


def _by_reading(ends: pd.DataFrame, note: str, low_ends: Any = -math.inf) -> Result:
    """Return a result on which several readings of a claim must agree.

    Parameters
    ----------
    ends : DataFrame
        A column for each reading, and a row for each setting: the largest number that
        is possible there.
    note : str
        What the numbers are.
    low_ends : DataFrame or float, optional
        The least number that is possible there. By default there is no lower bound.

    Returns
    -------
    Result
        By a reading, a claim is contradicted if no setting can meet it, and compatible
        if at least half of the settings can. If readings disagree, it is undecided.
    """
    # Each row is the least and the largest number that is possible in a setting by a reading.
    spans = np.stack(np.broadcast_arrays(low_ends, ends), axis=-1).reshape(-1, 2)

    def judge(low: float, high: float) -> Verdict:
        # The claim accepts numbers from low to high. In a setting it is possible if one of
        # these can be reached there.
        is_possible = (low_ends <= high) & (low <= ends)
        shares = is_possible.mean()
        outcomes = {claims.by_share(share) for share in shares}
        outcome = Outcome.UNDECIDED
        if len(outcomes) == 1:
            (outcome,) = outcomes
        # A claim of "at most" accepts all small numbers, and has no least number to name.
        parts = [f"from {low:.4g} on it agrees"] if np.isfinite(low) else []
        for reading, values in ends.items():
            parts.append(
                f"{reading} {values.min():.3g} to {values.max():.3g}, "
                f"reached in {shares[reading]:.0%}"
            )
        return Verdict(outcome, "; ".join(parts))

    searched = claims.over_compatible(settings.setting_search())
    return replace(claims.modelled(spans, f"{note}, {searched}"), judge=judge)


@check("osf-fig11-constant-min", {"constant": "100 MB"}, "min")
@check("osf-fig11-constant-max", {"constant": "100 MB"}, "max")
@check("osf-fig11-mgwfbp-min", READINGS, "min")
@check("osf-fig11-mgwfbp-max", READINGS, "max")
def _fusion_gain(planners: Mapping[str, str], which: str) -> Result:
    """Return what the best of all plans can gain at most, and thus adaFusion too.

    Parameters
    ----------
    planners : mapping of str to str
        The planners over which it is a gain, and what a note calls them.
    which : {"min", "max"}
        Whether the paper's number is the least or the largest gain of the networks.
    """
    gains = _fusion_gains().set_index(["setting", "network"])
    # For each planner, its iteration over the shortest possible one, which is 1 plus the gain
    # of the best plan over this planner.
    any_plan = pd.DataFrame(
        {name: 1 + gains[f"over_{planner}"] for planner, name in planners.items()}
    )
    any_plan_over_adafusion = 1 + gains[f"over_{ADAFUSION}"]
    # The quotient is the iteration of each planner over that of adaFusion.
    adafusion = any_plan.div(any_plan_over_adafusion, axis=0)

    largest_percent = 100 * (any_plan.groupby("setting").agg(which) - 1)
    adafusion_percent = 100 * (adafusion.groupby("setting").agg(which) - 1)
    ranges = []
    for _, percent in adafusion_percent.items():
        ranges.append(f"{percent.min():.3g} to {percent.max():.3g}")
    note = (
        f"adaFusion by Eq 17 repaired {', '.join(ranges)} (Eq 18's coefficients are not "
        "printed); any plan at most (Eqs 4, 7, 11)"
    )
    return _by_reading(largest_percent, note)


@check("osf-fig11-best-buffer")
def _best_buffer() -> Result:
    """Return for how many networks the constant buffer is the best.

    The paper does not say with which buffers it is compared. By one reading they are
    those of Figure 4, and by the other MORE count too.
    """
    more_mb = ", ".join(f"{size // MB}" for size in sorted(MORE))
    gains = _fusion_gains().set_index("setting")
    is_best = pd.DataFrame(
        {
            # A gain of 0 is a tie, in which the constant buffer is one of the best.
            "no fusion and the buffers of Fig 4": gains["constant_over_others"] >= 0,
            f"{more_mb} MB too": gains["constant_over_more"] >= 0,
        }
    )
    # The number is known in a setting, so that it is both the least and the largest.
    n_networks = is_best.groupby("setting").sum()
    return _by_reading(
        n_networks, "against which others is not stated", low_ends=n_networks
    )
