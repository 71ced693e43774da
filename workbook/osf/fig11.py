"""osf Figure 11: what adaptive fusion gains over a constant buffer and over MG-WFBP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddlkit.core.iteration import predict
from ddlkit.core.units import MB
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

CONSTANT, RIVAL, ADAFUSION = "buffer:100MB", "mg_wfbp", "adafusion:repaired"
PLANNERS = (
    *("none", CONSTANT, "buffer:25MB", "ddp", RIVAL),
    *("adafusion", ADAFUSION, "exact"),
)
RULES = (ADAFUSION, RIVAL, "exact")
RIVALS = {CONSTANT: "a 100 MB buffer", RIVAL: "MG-WFBP"}
"""With which planners osf compares adaFusion, as a drawing calls them."""


# -- numbers -------------------------------------------------------------------------------------


def modelled(setting: PaperSetting) -> pd.DataFrame:
    """Return scaling factors of the five networks by planner, gains over 100 MB, and the most possible."""
    tables, cost = {}, setting.cost()
    for network in FIVE:
        workload = setting.workload(network)
        plans = {name: make_plan(name, workload, cost) for name in PLANNERS}
        factors = {
            name: predict(workload, p, cost).scaling_factor for name, p in plans.items()
        }
        messages = {name: len(plan.ends) for name, plan in plans.items()}
        table = pd.DataFrame({"messages": messages, "model": factors})
        saved = (messages[CONSTANT] - 1) * cost.alpha_s / workload.compute_s
        most = largest_fusion_gain(factors[CONSTANT], saved)
        gain = table["model"] / factors[CONSTANT] - 1
        tables[network] = table.assign(gain_over_100MB=gain, most_possible_gain=most)
    return pd.concat(tables, names=["network", "planner"]).reset_index()


def modelled_gains(setting: PaperSetting) -> pd.DataFrame:
    """Return the gain of each of RULES over the constant buffer and over MG-WFBP."""
    factors = modelled(setting)
    wide = factors.pivot(index="network", columns="planner", values="model")
    wide = wide.loc[list(FIVE)]
    ratios = {
        (rule, other): wide[rule] / wide[other] - 1
        for rule in RULES
        for other in (CONSTANT, RIVAL)
        if rule != other
    }
    gains = pd.concat(ratios, names=["planner", "over", "network"])
    return gains.rename("gain").reset_index()


def gains_in_lab(runs: pd.DataFrame) -> pd.DataFrame:
    """Return measured gains of planners over a buffer of 25 MB, with the 95% interval over the rounds."""
    rules = RIVAL, "exact"
    pairs = pd.concat(
        [compare.paired(runs, rule).assign(planner=rule) for rule in rules]
    )
    pairs = pairs.query("other == 'buffer:25MB'").rename(columns={"other": "over"})
    ends = {"gain": "ratio", "gain_low": "lower", "gain_high": "upper"}
    gains = pairs.assign(**{name: pairs[end] - 1 for name, end in ends.items()})
    return gains[["network", "planner", "over", *ends]].reset_index(drop=True)


def gains_in_regime() -> pd.DataFrame:
    """Return measured gains of planners over the constant buffer, in the regime, by rounds."""
    lab, rows = Lab.load(REGIMES), []
    cases = pd.Series(lab.cases(plain=True))
    named = [osf_name(case.network) for case in cases]
    for network, mine in cases.groupby(named, sort=False):
        first, factors = mine.iloc[0], {c.plan: lab.rounds(c)["factor"] for c in mine}
        names = {case.ends: case.plan for case in mine}
        cost = lab.calibration.of_case(first).cost
        for rule in dict.fromkeys(("adafusion", *RULES)):
            plan = make_plan(rule, lab.workload(first), cost)
            ends = ";".join(map(str, plan.ends))
            # A rule that was not run itself may have the plan of another case.
            name = rule if rule in factors else names.get(ends, CONSTANT)
            if name != CONSTANT:
                gain = factors[name] / factors[CONSTANT] - 1
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
    return pd.DataFrame(rows)


def numbers(campaign: Source) -> pd.DataFrame:
    """Return rows of `modelled`, then gains over all settings that fit, and replayed, by grade."""
    gains = settings.over(modelled_gains, ["planner", "over", "network"], ["gain"])
    labs = gains_in_lab(campaign.table("runs")), gains_in_regime()
    frame = modelled(settings.setting())
    joined = pd.concat([frame, graded(gains, *labs)], ignore_index=True)
    stated = (joined["planner"] == ADAFUSION) & (joined["grade"] == "model")
    printed_by = {CONSTANT: "osf-fig11-constant", RIVAL: "osf-fig11-mgwfbp"}
    for name, end in (("low", "min"), ("high", "max")):
        printed = {
            over: claimed(f"{claim}-{end}") / 100 for over, claim in printed_by.items()
        }
        joined[f"paper_gain_{name}"] = joined["over"].map(printed).where(stated)
    return joined


# -- drawing -------------------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw adaFusion's gains, by model and replayed, against the range that the paper claims."""
    repaired = rows_of(frame, planner=ADAFUSION, grade="model")
    replayed = rows_of(frame, planner="adafusion", grade="lab")
    over_constant = rows_of(repaired, over=CONSTANT)
    said = (
        f"By the model, adaFusion gains at most {over_constant['gain_high'].max():.0%} "
        f"over a 100 MB "
        f"buffer; the paper claims at least {over_constant['paper_gain_low'].max():.1%}"
    )
    with plots.sheet(said, columns=2, height=3.4, sharey=True) as (figure, axes):
        for ax, (over, name) in zip(axes, RIVALS.items(), strict=True):
            _draw_gains(
                ax, rows_of(repaired, over=over), rows_of(replayed, over=over), name
            )
    return figure


def _draw_gains(
    ax: Axes, modelled: pd.DataFrame, replayed: pd.DataFrame, over: str
) -> None:
    """Draw gains over one rival, a row for each network; the claimed range is shaded."""
    modelled = modelled.set_index("network").loc[list(FIVE)]
    replayed = replayed.set_index("network").reindex(FIVE)
    low, high, least, most = (
        (100 * modelled[["gain_low", "gain_high", "paper_gain_low", "paper_gain_high"]])
        .to_numpy()
        .T
    )
    networks = [network_title(network) for network in FIVE]
    plots.intervals(
        ax,
        networks,
        {"model:of the repaired rule": (low, high)},
        label=f"gain over {over} [%]",
        printed={"claimed gain": (least.max(), most.max())},
    )
    rows = range(len(networks))
    name = "replay of the printed rule"
    plots.points(ax, 100 * replayed["gain"], rows, "measured", label=name, size=6)
    ax.set_title(
        f"Over {over}: {low.min():.0f}% to {high.max():.0f}%;\n"
        f"the paper claims {least.max():g}% to {most.max():g}%"
    )


# -- what any plan may gain ----------------------------------------------------------------------

CONSTANT_BYTES = 100 * MB
MORE = {size * MB for size in (3, 10, 25, 30, 64, 300)}
"""Buffers that frameworks have, and between."""
READINGS = {
    "mg_wfbp:osf": "all sent so far",
    "own": "a layer's own",
    "mg_wfbp": "as [43], drawn",
}
"""What MG-WFBP may be: Section 4.2 compares backward with "tensors of layer i"."""


def possible_gains(setting: PaperSetting, network: str) -> dict[str, float]:
    """Return, of one network in one setting, by how much iterations get shorter.

    over_constant, over_<planner> : of the best plan at most, over the constant buffer's, over
        `READINGS`' and adaFusion's: no plan is faster than all bytes after the first gradient,
        or the last tensor after backward
    constant_over_others, constant_over_more : of the constant buffer over Fig 4's others,
        over `MORE` too
    """
    cost, work = setting.cost(), setting.workload(network)
    taken_s = dict[int, float]()
    for capacity in (0, *BUFFERS, *MORE):
        plan = setting.with_buffer(network, capacity)
        overhead_s = np.array([cost.alpha_s])
        taken_s[capacity] = float(
            fused_iteration_s(*plan, overhead_s, cost.beta_s_per_byte)[0]
        )
    constant_s = taken_s.pop(CONSTANT_BYTES)
    after_backward_s = work.compute_s + float(cost(work.bytes[-1:])[0])
    after_first_s = work.forward_s + work.backward_s[0] + float(cost(work.bytes.sum()))
    least_s = max(after_backward_s, after_first_s)
    endless = replace(setting, timeout_s=math.inf)
    over_planners = {
        f"over_{planner}": _planned_s(network, endless, planner) / least_s - 1
        for planner in (*READINGS, ADAFUSION)
    }
    others_s = min(taken_s[capacity] for capacity in taken_s.keys() - MORE)
    return {
        "over_constant": constant_s / least_s - 1,
        **over_planners,
        "constant_over_others": others_s / constant_s - 1,
        "constant_over_more": min(taken_s.values()) / constant_s - 1,
    }


@cache
def _planned_s(network: str, setting: PaperSetting, planner: str) -> float:
    cost, work = setting.cost(), setting.workload(network)
    if planner != "own":
        return predict(work, make_plan(planner, work, cost), cost).iteration_s
    limits_s = cost(work.bytes) + cost.alpha_s
    plan = merged("own", work, cost, lambda i, *_: work.backward_s[i] < limits_s[i - 1])
    return predict(work, plan, cost).iteration_s


def possible_gains_over(grid: Grid, wanted: NDArray[np.bool_]) -> pd.DataFrame:
    """Return `possible_gains` of all five networks over the ``wanted`` settings of a grid.

    There is a row per network and setting.
    """
    places, frames = np.argwhere(wanted), []
    for network in FIVE:
        family = 4 if reference_network(network) == "VGG16" else 3
        keys, of_setting = np.unique(
            places[:, [0, 1, 2, family]], axis=0, return_inverse=True
        )
        rows = []
        for key in keys:
            # Only the compute time of the network's own family counts.
            times = (0, key[3]) if family == 4 else (key[3], 0)
            setting = grid.setting((*key[:3], *times))
            rows.append(possible_gains(setting, network))
        gained = pd.DataFrame(rows).iloc[of_setting.ravel()].reset_index(drop=True)
        frames.append(gained.assign(network=network, setting=np.arange(len(places))))
    return pd.concat(frames, ignore_index=True)


# -- claims --------------------------------------------------------------------------------------


@cache
def _fusion_gains() -> pd.DataFrame:
    """Return possible gains in all settings that agree with the most of osf's statements."""
    search = settings.setting_search()
    return possible_gains_over(search.grid, search.most())


def _by_reading(ends: pd.DataFrame, note: str, low_ends: Any = -math.inf) -> Result:
    """Judge by each reading's numbers, a column of all settings', or bounds: half must agree by all."""
    spans = np.stack(np.broadcast_arrays(low_ends, ends), axis=-1).reshape(-1, 2)

    def judge(low: float, high: float) -> Verdict:
        shares = ((low_ends <= high) & (low <= ends)).mean()
        each = (f"{name} {of.min():.3g} to {of.max():.3g}" for name, of in ends.items())
        outcomes = "contradicted", "undecided", "compatible"
        outcome = outcomes[int(shares.max() > 0) + int(shares.min() >= 0.5)]
        note = "; ".join(
            map("{}, reached in {:.0%}, itself not counted".format, each, shares)
        )
        return Verdict(Outcome(outcome), note)

    searched = claims.over_compatible(settings.setting_search())
    return replace(claims.modelled(spans, f"{note}, {searched}"), judge=judge)


@check("osf-fig11-constant-min", {"constant": "100 MB"}, "min")
@check("osf-fig11-constant-max", {"constant": "100 MB"}, "max")
@check("osf-fig11-mgwfbp-min", READINGS, "min")
@check("osf-fig11-mgwfbp-max", READINGS, "max")
def _fusion_gain(readings: Mapping[str, str], which: str) -> Result:
    """Return what the best of all plans can gain at most: adaFusion's is one of them."""
    table = 1 + _fusion_gains().set_index(["setting", "network"])
    over = table[[f"over_{name}" for name in readings]].set_axis(
        [*readings.values()], axis=1
    )
    most, own = (
        100 * (each.groupby("setting").agg(which) - 1)
        for each in (over, over.div(table[f"over_{ADAFUSION}"], axis=0))
    )
    itself = ", ".join(f"{of.min():.3g} to {of.max():.3g}" for _, of in own.items())
    note = f"adaFusion by Eq 17 repaired {itself} (Eq 18's coefficients are not printed); any plan at most"
    return _by_reading(most, f"{note} (Eqs 4, 7, 11)")


@check("osf-fig11-best-buffer")
def _best_buffer() -> Result:
    """Count networks for which the constant buffer is best: against Fig 4's buffers, and more."""
    compared = ["constant_over_others", "constant_over_more"]
    table = _fusion_gains().groupby("setting")[compared]
    more = ", ".join(f"{size // MB}" for size in sorted(MORE))
    names = ["no fusion and the buffers of Fig 4", f"{more} MB too"]
    best = table.agg(lambda gains: gains.ge(0).sum()).set_axis(names, axis=1)
    return _by_reading(best, "against which others is not stated", low_ends=best)
