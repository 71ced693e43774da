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
        The numbers of the cluster that the paper does not state.

    Returns
    -------
    DataFrame
        A row for each ``network`` and ``planner`` (PLANNERS), with the numbers of
        `_by_planner`.
    """
    cost = setting.cost()
    tables = {}
    for network in FIVE:
        tables[network] = _by_planner(setting.workload(network), cost)
    return pd.concat(tables, names=["network", "planner"]).reset_index()


def _by_planner(workload: Workload, cost: AlphaBeta) -> pd.DataFrame:
    """Return the rows of `modelled` for one network, by planner.

    ``messages`` is the number of messages, ``model`` the scaling factor, and
    ``gain_over_100MB`` the relative gain of the factor over that with the constant buffer. No
    plan can gain more over that buffer than ``most_possible_gain``, which all rows repeat.
    """
    messages = {}
    factors = {}
    for planner in PLANNERS:
        plan = make_plan(planner, workload, cost)
        messages[planner] = len(plan.ends)
        factors[planner] = predict(workload, plan, cost).scaling_factor
    table = pd.DataFrame({"messages": messages, "model": factors})
    # A single message would save all start-ups of the constant buffer but one. The bound takes
    # this time as a share of the compute time.
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
        The numbers of the cluster that the paper does not state.

    Returns
    -------
    DataFrame
        A row for each ``planner``, the planner that it is compared with (``over``) and
        ``network``. ``gain`` is the relative gain of the scaling factor.
    """
    factors = modelled(setting).pivot(
        index="network", columns="planner", values="model"
    )
    # The pivot sorted the networks by name. The table has them in the order of FIVE.
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
        A row for each planner, MG-WFBP and the best plan ("exact"), and for each network,
        link and number of workers of the campaign. No column tells the links and numbers of
        workers apart. ``gain`` is the share by which the iteration with the buffer is longer
        than that with the planner, as the median over the rounds of the campaign. Its 95%
        interval is ``gain_low`` to ``gain_high``. A planner that was not replayed has no rows.
    """
    tables = []
    for planner in (RIVAL, "exact"):
        # The ratio is the iteration with the plan ``other``, divided by that with the planner's.
        tables.append(compare.paired(runs, planner).assign(planner=planner))
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
    """Return the measured gains over the constant buffer, on a link with expensive start-ups.

    Returns
    -------
    DataFrame
        A row for each network and planner. ``gain`` is the relative gain of the scaling
        factor (0.1 is 10%), the mean over the repeated iterations, and ``gain_low`` and
        ``gain_high`` are the least and the largest gain of one of them.
    """
    # The campaign whose link has expensive start-ups.
    lab = Lab.load(REGIMES)
    # Plain cases have dense gradients, equally fast workers, and one message at a time.
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
    # The scaling factors of the repeated iterations, by plan.
    factors = {case.plan: lab.rounds(case)["factor"] for case in cases}
    rows = []
    for rule in ("adafusion", *RULES):
        replayed = _replayed_as(rule, lab, cases)
        # There is no row for a plan that was not replayed. Nor is there one for a plan with the
        # messages of the constant buffer, because it gains nothing.
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


def _replayed_as(rule: str, lab: Lab, cases: Sequence[Case]) -> str | None:
    """Return under which name the plan of a rule was replayed, or None if it was not.

    ``cases`` are those of one network, which all have the same workload, link and number of
    workers.
    """
    if any(case.plan == rule for case in cases):
        return rule
    # The same messages may have been replayed under the name of another plan.
    plan = make_plan(
        rule, lab.workload(cases[0]), lab.calibration.of_case(cases[0]).cost
    )
    # Where the messages of the plan end, such as "2;5;9". Equal ends are equal plans.
    ends = ";".join(map(str, plan.ends))
    plan_by_ends = {case.ends: case.plan for case in cases}
    return plan_by_ends.get(ends)


def numbers(campaign: Source) -> pd.DataFrame:
    """Return modelled scaling factors by planner, and modelled and measured gains.

    Parameters
    ----------
    campaign : Source
        The recording of the campaign with a buffer of 25 MB.

    Returns
    -------
    DataFrame
        There are three kinds of rows, in this order:

        * scaling factors of `modelled` in the best setting, without a ``grade``,
        * gains of `modelled_gains` in the best setting, with their range over all compatible
          settings and the ``grade`` "model",
        * gains of `gains_in_lab` and `gains_in_regime`, with the ``grade`` "lab".

        The modelled gains of adaFusion also have the gains that the paper prints, from
        ``paper_gain_low`` to ``paper_gain_high``.
    """
    factors = modelled(settings.setting())
    gains = settings.over(
        modelled_gains, keys=["planner", "over", "network"], values=["gain"]
    )
    measured = gains_in_lab(campaign.table("runs"))
    frame = pd.concat(
        [factors, graded(gains, measured, gains_in_regime())], ignore_index=True
    )
    has_printed_gain = (frame["planner"] == ADAFUSION) & (frame["grade"] == "model")
    # The least and the largest printed gain of adaFusion over each planner.
    low = {
        CONSTANT: claimed("osf-fig11-constant-min") / 100,
        RIVAL: claimed("osf-fig11-mgwfbp-min") / 100,
    }
    high = {
        CONSTANT: claimed("osf-fig11-constant-max") / 100,
        RIVAL: claimed("osf-fig11-mgwfbp-max") / 100,
    }
    return frame.assign(
        paper_gain_low=frame["over"].map(low).where(has_printed_gain),
        paper_gain_high=frame["over"].map(high).where(has_printed_gain),
    )


# -- drawing -------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the gains of adaFusion, a panel for each planner that it is compared with.

    By the printed rule (osf Eq 17), a message does not wait for the next tensor that joins it.
    The repaired rule counts this wait, which is the backward pass of the tensor. Intervals are
    gains of the repaired rule by the model, in all settings of the paper's cluster that are
    compatible with what the paper states. Points are gains of the printed rule in the lab.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    # ADAFUSION is "adafusion:repaired", the only rule of adaFusion whose gains `numbers` models.
    # "adafusion" is the printed rule. The lab replayed its plan, a single message, as a buffer of
    # 1 GB. It replayed no plan of the repaired rule.
    repaired = rows_of(frame, planner=ADAFUSION, grade="model")
    replayed = rows_of(frame, planner="adafusion", grade="lab")
    # The title has the largest gain of any network in any compatible setting. The printed gain
    # is the same number in all rows, so that the maximum is this number.
    over_constant = rows_of(repaired, over=CONSTANT)
    title = (
        f"By the model, adaFusion gains at most {over_constant['gain_high'].max():.0%} "
        f"over a 100 MB buffer; the paper claims at least "
        f"{over_constant['paper_gain_low'].max():.1%}"
    )
    sheet = plots.sheet(title, columns=2, height=3.4, sharey=True)
    with sheet as (figure, axes):
        for ax, (over, name) in zip(axes, RIVALS.items(), strict=True):
            # The lab has no gains of adaFusion over MG-WFBP, so that its table has no rows there
            # and draws no points.
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
        The gains of the repaired rule of adaFusion by network, with their range over the
        settings that are compatible with what the paper states, and with the range that the
        paper prints, which is shaded.
    replayed : DataFrame
        The measured gains of the printed rule of adaFusion by network. It may have no rows.
    rival : str
        What the figure calls the other planner, over which adaFusion gains.
    """
    # A row for each network. Those that were not replayed are NaN, which draws nothing.
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
        # "model" sets the style, and the text after the colon is added to the label.
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
    """Return upper bounds of gains, and the gains of the constant buffer, in a setting.

    The gain of a plan over another one is the time of an iteration with the other plan, divided
    by that with the plan, minus 1.

    Parameters
    ----------
    setting : PaperSetting
        The setting of the cluster.
    network : str
        The network.

    Returns
    -------
    dict of str to float
        - ``over_constant``: an upper bound of the gain of any plan over the constant buffer.
        - ``over_<planner>``: an upper bound of the gain of any plan over this planner, which
          is one of READINGS or adaFusion.
        - ``constant_over_others``: the gain of the constant buffer over the best of no fusion
          and the other buffers of Figure 4, negative if one of them is better.
        - ``constant_over_more``: the gain of the constant buffer over the best of these and of
          the buffers MORE.
    """
    by_buffer_s = {}
    for capacity in (0, *BUFFERS, *MORE):
        by_buffer_s[capacity] = _buffered_s(setting, network, capacity)
    # The constant buffer is taken out, because it is compared with all others.
    constant_s = by_buffer_s.pop(CONSTANT_BYTES)
    in_fig4_s = [
        seconds for capacity, seconds in by_buffer_s.items() if capacity not in MORE
    ]
    # No plan makes an iteration shorter than this.
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
    """Return the iteration of a network with a fusion buffer, in seconds.

    ``capacity`` is the size of the buffer in bytes, or 0 for no fusion.
    """
    # ``waited_s`` has the time that each message of the plan waits in vain for one more
    # tensor, until the timeout of the buffer.
    workload, plan, waited_s = setting.with_buffer(network, capacity)
    cost = setting.cost()
    # The function returns one iteration for each overhead in an array. The cluster has one.
    (iteration_s,) = fused_iteration_s(
        workload, plan, waited_s, np.array([cost.alpha_s]), cost.beta_s_per_byte
    )
    return float(iteration_s)


def _least_iteration_s(setting: PaperSetting, network: str) -> float:
    """Return a time in seconds below which no plan brings an iteration.

    No plan can send the last tensor before the end of the backward pass, or any byte before the
    first gradient is ready. At best, one message has all bytes.
    """
    work = setting.workload(network)
    cost = setting.cost()
    # Tensors are in ready order, in which the last one is ready at the end of the backward pass.
    last_tensor_s = float(cost(work.bytes[-1:])[0])
    after_backward_s = work.compute_s + last_tensor_s
    all_bytes_s = float(cost(work.bytes.sum()))
    after_first_gradient_s = work.forward_s + work.backward_s[0] + all_bytes_s
    return max(after_backward_s, after_first_gradient_s)


@cache
def _planned_s(network: str, setting: PaperSetting, planner: str) -> float:
    """Return the iteration of a network by a planner, in seconds.

    The planner is one of READINGS, or one that `ddlkit.model.make_plan` knows.
    """
    work = setting.workload(network)
    cost = setting.cost()
    if planner != "own":
        plan = make_plan(planner, work, cost)
        return predict(work, plan, cost).iteration_s
    # "own" is a reading of MG-WFBP that `make_plan` does not have. By this reading, a tensor
    # joins the message of the tensor before it if its backward takes less time than sending that
    # earlier tensor alone, plus one start-up. Tensors are in ready order.
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
        A row for each network and setting. Its columns are the gains, the ``network``, and
        the number of the ``setting``. The wanted settings are numbered from 0, in the order of
        the grid.
    """
    # A row for each wanted setting, with its places on the five axes of the grid.
    indices = np.argwhere(wanted)
    tables = []
    for network in FIVE:
        gains = _gains_at(grid, indices, network)
        setting_numbers = np.arange(len(indices))
        tables.append(gains.assign(network=network, setting=setting_numbers))
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
        A row for each of the s places, in their order, with a column for each gain.
    """
    # Only the compute time of the network's own family counts. Settings that differ in
    # the other one have the same gains, which are computed once.
    is_vgg = reference_network(network) == "VGG16"
    own_axis = 4 if is_vgg else 3
    # ``row_of_setting`` has, for each setting, its row of ``distinct``.
    distinct, row_of_setting = np.unique(
        indices[:, [0, 1, 2, own_axis]], axis=0, return_inverse=True
    )
    rows = []
    # Each row of ``distinct`` has places on four axes. On the fifth axis, the compute time of the
    # other family, any place will do, such as 0.
    for unit, timeout, overhead, own_compute in distinct:
        compute = (0, own_compute) if is_vgg else (own_compute, 0)
        setting = grid.setting((unit, timeout, overhead, *compute))
        rows.append(possible_gains(setting, network))
    # The gains of each setting. `ravel` is for versions of NumPy in which the inverse has two
    # axes.
    return pd.DataFrame(rows).iloc[row_of_setting.ravel()].reset_index(drop=True)


# -- claims --------------------------------------------------------------------------


@cache
def _fusion_gains() -> pd.DataFrame:
    """Return the `possible_gains` in all settings that agree with the most statements."""
    search = settings.setting_search()
    return possible_gains_over(search.grid, search.most())


def _common_outcome(shares: pd.Series) -> Outcome:
    """Return the outcome on which all readings of a claim agree, or else UNDECIDED.

    ``shares`` is, by reading, the share of the settings that can meet the claim.
    """
    outcomes = {claims.by_share(share) for share in shares}
    if len(outcomes) == 1:
        return outcomes.pop()
    return Outcome.UNDECIDED


def _by_reading(
    high_ends: pd.DataFrame, note: str, low_ends: Any = -math.inf
) -> Result:
    """Return a result on which several readings of a claim must agree.

    Parameters
    ----------
    high_ends : DataFrame
        The largest number that is possible in each setting by each reading. Rows are settings of
        the cluster, and columns are readings.
    note : str
        What the numbers are.
    low_ends : DataFrame or float, optional
        The least number that is possible, as a table like ``high_ends`` or as one number for all.
        By default there is no lower bound.

    Returns
    -------
    Result
        By a reading, a claim is contradicted if no setting can meet it, compatible if at
        least half of the settings can, and else undecided. If readings disagree, the claim
        is undecided.
    """
    # For each setting and reading, the least and the largest number that is possible there,
    # shape (settings times readings, 2).
    spans = np.stack(np.broadcast_arrays(low_ends, high_ends), axis=-1).reshape(-1, 2)

    def judge(low: float, high: float) -> Verdict:
        """Return the verdict on a claim that accepts numbers from ``low`` to ``high``."""
        # A setting can meet the claim if the interval of what is possible there, ``low_ends``
        # to ``high_ends``, overlaps with that of the claim.
        is_possible = (low_ends <= high) & (low <= high_ends)
        # By reading, the share of the settings that can meet the claim.
        shares = is_possible.mean()
        # For the claims below, a setting can meet the claim as soon as its high end reaches
        # ``low``, which is what the text says. The other condition, that its low end is at most
        # ``high``, always holds: the low end of a gain is minus infinity, and that of a number
        # of networks is at most five, the claimed number.
        parts = []
        if np.isfinite(low):
            parts.append(f"from {low:.4g} on it agrees")
        for reading, values in high_ends.items():
            parts.append(
                f"{reading} {values.min():.3g} to {values.max():.3g}, "
                f"reached in {shares[reading]:.0%}"
            )
        return Verdict(_common_outcome(shares), "; ".join(parts))

    # A phrase that says how many settings these are.
    searched = claims.over_compatible(settings.setting_search())
    return replace(claims.modelled(spans, f"{note}, {searched}"), judge=judge)


@check("osf-fig11-constant-min", {"constant": "100 MB"}, "min")
@check("osf-fig11-constant-max", {"constant": "100 MB"}, "max")
@check("osf-fig11-mgwfbp-min", READINGS, "min")
@check("osf-fig11-mgwfbp-max", READINGS, "max")
def _fusion_gain(planners: Mapping[str, str], which: str) -> Result:
    """Return an upper bound of the gain of any plan in %, and so of that of adaFusion.

    The gain of adaFusion itself stands in the note. It is predicted with the straight line of
    osf Eq 7, because the coefficients of Eq 18, by which the paper predicts, are not printed.

    Parameters
    ----------
    planners : mapping of str to str
        What the paper may mean by the planner with which it compares adaFusion: the names in
        `possible_gains`, and what a note calls each of these readings.
    which : {"min", "max"}
        Whether the paper's number is the least or the largest gain of the networks.
    """
    gains = _fusion_gains().set_index(["setting", "network"])
    # ``over_<planner>`` is the bound: the iteration of the planner divided by the least possible
    # one, minus 1. Adding 1 leaves the ratio of the two iterations. Both ratios have the same
    # divisor, so that their quotient is the iteration of the planner divided by that of adaFusion.
    # A row is a setting and network, and a column is a reading.
    planner_over_least = pd.DataFrame(
        {name: 1 + gains[f"over_{planner}"] for planner, name in planners.items()}
    )
    adafusion_over_least = 1 + gains[f"over_{ADAFUSION}"]
    planner_over_adafusion = planner_over_least.div(adafusion_over_least, axis=0)

    # Minus 1, each ratio is a gain. ``which`` takes the least or the largest of the five networks.
    bound_percent = 100 * (planner_over_least.groupby("setting").agg(which) - 1)
    adafusion_percent = 100 * (planner_over_adafusion.groupby("setting").agg(which) - 1)
    # The range over the settings, for each reading.
    ranges = []
    for _reading, percent in adafusion_percent.items():
        ranges.append(f"{percent.min():.3g} to {percent.max():.3g}")
    note = (
        f"adaFusion by Eq 17 repaired {', '.join(ranges)} (Eq 18's coefficients are not "
        "printed); any plan at most (Eqs 4, 7, 11)"
    )
    # A setting can meet the claim if its bound is not below the claimed gain.
    return _by_reading(bound_percent, note)


@check("osf-fig11-best-buffer")
def _best_buffer() -> Result:
    """Return for how many of the five networks the constant buffer of 100 MB is the best.

    The networks are counted in each setting of the cluster. The paper does not say with which
    other buffers it compares this one. By one reading they are no fusion and the buffers of
    Figure 4. By the other reading, the buffers MORE count, too.
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
    n_networks = is_best.groupby("setting").sum()
    # The number is exact in each setting, so that it is both the largest and the least possible.
    return _by_reading(
        n_networks, "against which others is not stated", low_ends=n_networks
    )
