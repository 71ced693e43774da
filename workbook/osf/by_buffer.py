"""Scaling factors by the size of the fusion buffer, as Figures 4 and 6 show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.units import GB, KB, MB, parse_bytes
from workbook import plots
from workbook.common.specs import network_title
from workbook.osf.cluster import TWO, PaperSetting, fused_iteration_s
from workbook.osf.frames import rows_of
from workbook.osf.lab import LAB, LABS, Lab, buffer_of
from workbook.plots.style import look

_STEPS = (1, 3, 10, 30, 100, 300)
BUFFERS = (*(step * KB for step in _STEPS), *(step * MB for step in _STEPS), GB)
"""The buffers that are drawn, in bytes."""
KEYS = ["network", "buffer_bytes"]
"""The columns that name a case. A buffer of 0 bytes is no fusion."""
NO_FUSION_MB = 3e-4
"""The place of "no fusion" on the logarithmic axis, left of the smallest buffer."""
TICKS = {NO_FUSION_MB: "none", 0.01: "0.01", 1: "1", 100: "100", 1000: "1000"}
"""The labels of that axis by their place in MB."""


def modelled(
    setting: PaperSetting, network: str, buffer_bytes: int
) -> dict[str, float]:
    """Return the effect of a fusion buffer on the paper's cluster.

    Parameters
    ----------
    setting : PaperSetting
        The setting of the cluster.
    network : str
        The network.
    buffer_bytes : int
        The size of the buffer, or 0 for no fusion.

    Returns
    -------
    dict of str to float
        ``all-reduces`` is the number of messages, and ``SF`` the scaling factor of 32
        workers.
    """
    # ``waited_s`` has the time that each message of the plan waits in vain for one more
    # tensor, until the timeout of the buffer.
    workload, plan, waited_s = setting.with_buffer(network, buffer_bytes)
    cost = setting.cost()
    # The function returns one iteration for each overhead in an array. The cluster has one.
    (iteration_s,) = fused_iteration_s(
        workload, plan, waited_s, np.array([cost.alpha_s]), cost.beta_s_per_byte
    )
    return {
        "all-reduces": float(len(plan.ends)),
        "SF": setting.compute_s(network) / iteration_s,
    }


def in_lab(lab: Lab) -> pd.DataFrame:
    """Return the scaling factors of four workers that a campaign measured.

    Parameters
    ----------
    lab : Lab
        The campaign.

    Returns
    -------
    DataFrame
        A row for each network and buffer (KEYS). ``measured`` is the mean scaling
        factor of the repeated iterations, and ``repeatability`` the difference between
        the largest and the smallest of these factors.
    """
    rows = {}
    # Plain cases have dense gradients, workers that are equally fast, and one message at a
    # time. A network and buffer may have been run both with and without a negotiation of the
    # order of messages. Then the case with a negotiation counts, because the network's other
    # buffers were run with one. It comes last, and replaces the row of the other case.
    cases = lab.cases(plain=True) + lab.cases(negotiated=True, plain=True)
    for case in cases:
        # None for plans that are neither a buffer nor no fusion.
        network_and_buffer = buffer_of(case)
        if case.workers == 4 and network_and_buffer is not None:
            factors = lab.rounds(case)["factor"]
            rows[network_and_buffer] = {
                "measured": factors.mean(),
                "repeatability": np.ptp(factors),
            }
    # The keys of ``rows``, the network and the buffer, become the two levels of the index.
    table = pd.DataFrame(rows).T.rename_axis(KEYS)
    return table.sort_index().reset_index()


def replayed_gain(network: str, buffer: str, fitted: str) -> str:
    """Return how much a buffer gains over no fusion in two replays, as the note of a claim.

    The claim is about this gain, which is the "it" of the note. One replay is that of the
    campaign LAB, whose link has cheap start-ups and whose ranks negotiate the order of
    messages. The ranks of the other replay do not negotiate. Both replays have four workers,
    as `in_lab` selects them.

    Parameters
    ----------
    network : str
        The network in the paper's spelling.
    buffer : str
        The size of the buffer, such as "100 MB".
    fitted : str
        The campaign of the other replay, whose link was set from a setting that was fitted
        to the paper, and has expensive start-ups.
    """
    gain = _gain_in_lab(LAB, network, buffer)
    fitted_gain = _gain_in_lab(fitted, network, buffer)
    return (
        "it hangs on start-ups: replayed by 4 workers at 1 Gbit/s "
        f"{100 * gain:+.2g}% negotiated, "
        f"{100 * fitted_gain:+.2g}% where the link is set from a fit, not negotiated"
    )


def _gain_in_lab(campaign: str, network: str, buffer: str) -> float:
    """Return the measured relative gain of a buffer over no fusion, 0.1 for 10%."""
    factors = in_lab(Lab.load(campaign)).set_index(KEYS)["measured"]
    return float(factors[network, parse_bytes(buffer)] / factors[network, 0] - 1)


def draw(frame: pd.DataFrame, quantities: Sequence[str], title: str) -> Figure:
    """Draw the scaling factors by the size of the buffer, a panel for each network.

    Parameters
    ----------
    frame : DataFrame
        The rows of the model and of the lab, as `workbook.osf.lab.graded` returns them.
        If it has the column ``paper``, these printed factors are drawn as points. Otherwise
        it has ``paper_error``, the largest relative error of CSF that the paper prints, and
        the scaling factors for which CSF has at most this error are shaded. They are those
        from ``paper_low`` to ``paper_high``.
    quantities : sequence of str
        The modelled quantities that are drawn. The first is drawn with its range over
        all settings, and printed factors are of this quantity.
    title : str
        The sentence above the figure.
    """
    buffer_mb = frame["buffer_bytes"] / MB
    # No fusion, whose buffer has 0 bytes, needs a place on the logarithmic axis.
    frame = frame.assign(mb=buffer_mb.where(buffer_mb > 0, NO_FUSION_MB))
    sheet = plots.sheet(title, columns=len(TWO), height=3.4)
    with sheet as (figure, axes):
        for ax, network in zip(axes, TWO, strict=True):
            rows = rows_of(frame, network=network)
            by_quantity = rows[rows["grade"] == "model"].pivot(
                index="mb", columns="quantity"
            )
            _draw_modelled(ax, by_quantity, quantities)
            _draw_measured(ax, rows)
            if "paper" in by_quantity:
                printed = by_quantity["paper"][quantities[0]]
                plots.points(ax, printed.index, printed, "paper")
            else:
                # The figure has one legend for both panels, which names the largest error. So
                # the error is passed for both, although it is printed for one network alone.
                _draw_printed_error(ax, by_quantity, _largest_printed_error(frame))
            ax.set_xticks([*TICKS], TICKS.values())
            ax.set_title(network_title(network))
    return figure


def _draw_modelled(
    ax: Axes, by_quantity: pd.DataFrame, quantities: Sequence[str]
) -> None:
    """Draw the modelled quantities, the first in its range over all settings.

    ``by_quantity`` has a row for each size of the buffer in MB. Its columns have two
    levels: the column of the figure's table, such as "model_low", and the quantity.
    """
    shown = list(quantities)
    # Tables with one column, so that only the line of the first quantity has a range.
    low = by_quantity["model_low"][shown[:1]]
    high = by_quantity["model_high"][shown[:1]]
    plots.lines(
        ax,
        by_quantity["model"][shown],
        xlabel="buffer [MB]",
        ylabel="scaling factor",
        log="x",
        # The figure has one legend, which is below all panels.
        legend="",
        ends=(low, high),
    )


def _draw_measured(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw the measured factors of both campaigns."""
    for point_look, links in LABS.items():
        measured = rows[rows["look"] == point_look]
        label = f"measured, {links}"
        plots.points(ax, measured["mb"], measured["measured"], point_look, label=label)


def _largest_printed_error(frame: pd.DataFrame) -> float:
    """Return the largest relative error of CSF that the paper prints, such as 0.05 for 5%.

    CSF is the scaling factor without overlap, and its error is relative to the measured one.
    The error is printed for ResNet-101. ``frame`` is that of `draw`, in which the error is NaN
    in the rows of other networks.
    """
    of_csf = frame["quantity"] == "CSF"
    # The maximum leaves NaN out.
    return frame.loc[of_csf, "paper_error"].max()


def _draw_printed_error(
    ax: Axes, by_quantity: pd.DataFrame, largest_error: float
) -> None:
    """Shade the scaling factors for which CSF has at most the error that the paper prints.

    Here the paper prints no scaling factors, only the largest relative error of CSF, which
    is ``largest_error``, such as 0.05 for 5%. ``by_quantity`` has a row for each size of the
    buffer in MB. Its columns have two levels: the column of the figure's table, such as
    "paper_low", and the quantity, such as "CSF". The ends of the shaded range, ``paper_low``
    and ``paper_high`` of CSF, are NaN for a network whose error is not printed. NaN shades
    nothing.
    """
    ax.fill_between(
        by_quantity.index,
        by_quantity["paper_low"]["CSF"],
        by_quantity["paper_high"]["CSF"],
        label=f"paper: error ≤ {largest_error:.1%}",
        color=look("paper").color,
        alpha=0.3,
        linewidth=0,
    )
