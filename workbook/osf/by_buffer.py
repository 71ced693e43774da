"""Scaling factors against the size of the fusion buffer, as Figures 4 and 6 show them."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.units import GB, KB, MB, parse_bytes
from workbook import plots
from workbook.common.specs import network_title
from workbook.osf.cluster import TWO, PaperSetting, fused_iteration_s
from workbook.osf.frames import rows_of
from workbook.osf.lab import LAB, LABS, Lab, buffer_of
from workbook.plots.style import look

BUFFERS = tuple(m * u for u in (KB, MB) for m in (1, 3, 10, 30, 100, 300)) + (GB,)
"""The buffers that are drawn, in bytes."""
KEYS = ["network", "buffer_bytes"]
NO_FUSION_MB = 3e-4
"""Where no buffer stands on a logarithmic axis of buffers: left of the smallest."""


def modelled(
    setting: PaperSetting, network: str, buffer_bytes: int
) -> dict[str, float]:
    """Return the number of messages, and the scaling factor, with a fusion buffer (0: without)."""
    workload, plan, waited_s = setting.with_buffer(network, buffer_bytes)
    cost = setting.cost()
    overhead_s = np.array([cost.alpha_s])
    taken_s = fused_iteration_s(
        workload, plan, waited_s, overhead_s, cost.beta_s_per_byte
    )[0]
    return {
        "all-reduces": float(len(plan.ends)),
        "SF": setting.compute_s(network) / taken_s,
    }


def in_lab(lab: Lab) -> pd.DataFrame:
    """Return factors measured against the buffer by four workers.

    Of cases that were run both ways the negotiated one counts.
    """
    rows = {}
    for case in (*lab.cases(plain=True), *lab.cases(negotiated=True, plain=True)):
        if case.workers == 4 and (place := buffer_of(case)):
            factors = lab.rounds(case)["factor"]
            rows[place] = {"measured": factors.mean(), "repeatability": np.ptp(factors)}
    return pd.DataFrame(rows).T.rename_axis(KEYS).sort_index().reset_index()


def replayed_gain(network: str, buffer: str, fitted: str) -> str:
    """Return, for a note, what a buffer gains over no fusion in two replays.

    fitted : the campaign whose link was set from a fit
    """
    campaigns = {
        LAB: "negotiated",
        fitted: "where the link is set from a fit, not negotiated",
    }
    gains = list[str]()
    for campaign, where in campaigns.items():
        factor = in_lab(Lab.load(campaign)).set_index(KEYS)["measured"]
        gain = factor[network, parse_bytes(buffer)] / factor[network, 0] - 1
        gains.append(f"{100 * gain:+.2g}% {where}")
    each = f"replayed by 4 workers at 1 Gbit/s {', '.join(gains)}"
    return f"it hangs on start-ups: {each}"


def draw(frame: pd.DataFrame, shown: list[str], said: str) -> Figure:
    """Draw factors by the buffer: modelled, the first with its range, measured, and printed."""
    mb = (frame["buffer_bytes"] / MB).where(frame["buffer_bytes"] > 0, NO_FUSION_MB)
    with plots.sheet(said, columns=len(TWO), height=3.4) as (figure, axes):
        for ax, network in zip(axes, TWO, strict=True):
            rows = rows_of(frame.assign(mb=mb), network=network)
            wide = rows[rows["grade"] == "model"].pivot(index="mb", columns="quantity")
            ends = wide["model_low"][shown[:1]], wide["model_high"][shown[:1]]
            plots.lines(
                ax,
                wide["model"][shown],
                xlabel="buffer [MB]",
                ylabel="scaling factor",
                log="x",
                legend="",
                ends=ends,
            )
            for mark, links in LABS.items():
                at = rows[rows["look"] == mark]
                plots.points(
                    ax, at["mb"], at["measured"], mark, label=f"measured, {links}"
                )
            if "paper" in wide:
                plots.points(ax, wide.index, wide["paper"][shown[0]], "paper")
            else:
                low, high = wide["paper_low"]["CSF"], wide["paper_high"]["CSF"]
                shape = {"color": look("paper").color, "alpha": 0.3, "linewidth": 0}
                most = frame.loc[frame["quantity"] == "CSF", "paper_error"].max()
                label = f"if CSF errs by ≤ {most:.1%} (paper)"
                ax.fill_between(wide.index, low, high, label=label, **shape)
            ticks = {
                NO_FUSION_MB: "none",
                0.01: "0.01",
                1: "1",
                100: "100",
                1000: "1000",
            }
            ax.set_xticks([*ticks], ticks.values())
            ax.set_title(network_title(network))
    return figure
