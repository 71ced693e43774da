"""Figure wb-clusters-scaling: a weather model on up to 400 GPUs, predicted from 40.

The steps were measured on Isambard-AI. The all-reduces of messages alone are those of
Perlmutter, whose nodes have as many GPUs, and whose network is of the same kind.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit import show
from ddlkit.core.fit import fit
from ddlkit.core.workload import Workload
from ddlkit.model.scaling import Scaling, scale
from workbook import plots
from workbook.osf import equations
from workbook.plots.style import SOFT
from workbook.validate.clusters import scaling

GRADIENT_BYTES = 924e6
"""The gradients of the weather model, whose 231 million parameters are in fp32."""
BUCKETS = 37
"""So many buckets of 25 MB they fill."""
BACKWARD_S = 0.7106
UPDATE_S = 0.0063
"""Backward pass and update on one GPU, as its profiler reports them."""
SHOWN_NODES = 10
"""The largest number of nodes whose steps the prediction knows."""


def steps() -> pd.DataFrame:
    """Return the steps of the weather model on all counts."""
    return scaling.anemoi_steps()


def weather_model() -> Workload:
    """Return the weather model as equal buckets whose gradients become ready in equal times.

    Its layers are not published. The forward pass is what remains of a step on one GPU.
    """
    frame = steps()
    one_s = float(frame.loc[frame["gpus"] == 1, "step_s"].median())
    return Workload.from_arrays(
        one_s - BACKWARD_S - UPDATE_S,
        np.full(BUCKETS, BACKWARD_S / BUCKETS),
        np.full(BUCKETS, GRADIENT_BYTES / BUCKETS),
        UPDATE_S,
    )


def all_reduces() -> pd.DataFrame:
    """Return Perlmutter's all-reduces with four GPUs on each of two nodes or more."""
    times = scaling.perlmutter()
    is_alike = (times["ranks"] == 4 * times["nodes"]) & (times["nodes"] > 1)
    return times[is_alike & (times["collective"] == "all_reduce")]


@cache
def predicted() -> Scaling:
    """Return the steps on 25, 50 and 100 nodes as predicted from the steps on up to 10.

    The result also says whether a scaling factor of 0.8 is met on 100 nodes.
    """
    frame = steps()
    return scale(
        frame[frame["nodes"] <= SHOWN_NODES],
        [25, 50, 100],
        workload=weather_model(),
        collectives=all_reduces(),
        wish=0.8,
    )


@cache
def osf_factor(nodes: int) -> float:
    """Return the scaling factor of osf Eqs 3 and 7 to 10 on a number of nodes.

    Parameters
    ----------
    nodes : int
        The number of nodes, each with four GPUs.

    Returns
    -------
    float
        The factor with alpha and beta of Eq 7 fitted to all-reduces of 1 to 64 MiB on 8 nodes.
    """
    times = all_reduces()
    is_fitted = (times["nodes"] == 8) & times["bytes"].between(2**20, 2**26)
    shown = times[is_fitted]
    line = fit(
        "alpha_beta", shown["bytes"].to_numpy(float), shown["seconds"].to_numpy()
    ).cost
    ranks = 4 * nodes
    # By Eq 7, each of N ranks sends 2 (N - 1) / N times the bytes of a gradient. The line was
    # fitted to all-reduces among the 32 ranks of 8 nodes, so that its time of a byte grows by the
    # ratio of this factor for all ranks to that for 32.
    growth = ((ranks - 1) / ranks) / (31 / 32)
    # With first=0, Eq 8 is read as the prose of the paper has it, and not as printed.
    model = weather_model()
    sent_s = line.alpha_s + growth * line.beta_s_per_byte * model.bytes
    return float(
        equations.osf(
            model.forward_s, model.backward_s.tolist(), sent_s.tolist(), first=0
        )
    )


def numbers() -> pd.DataFrame:
    """Return the plotted numbers.

    Returns
    -------
    DataFrame
        One row for each number of GPUs, with the columns ``gpus`` and ``nodes``. ``shown``
        says whether the prediction is given the measured steps. ``reconstructed`` says
        whether the measured step is reconstructed, as on 100 nodes, where some steps had
        half a batch. All other columns are scaling factors: ``measured``, predicted
        (``model``, with its interval ``lower`` to ``upper``), as it would be if nothing but
        messages lengthened the step (``messages_alone``), and by the laws ``log2`` and
        ``linear``.
    """
    result = predicted()
    measured = measured_factors()
    # The first count is one GPU, on which scaling factors are based.
    one_s = result.counts[0].step_s
    rows = []
    # The laws are curves over all numbers of nodes, which are read at the counts of the rows.
    curves = show.scaling_curves(result).set_index("nodes")
    for count in result.counts:
        row: dict[str, object] = {
            "gpus": count.gpus,
            "nodes": count.nodes,
            "measured": measured[count.gpus],
            "shown": count.measured,
            "reconstructed": count.nodes == 100,
        }
        if count.only_messages_step_s is not None:
            row["messages_alone"] = one_s / count.only_messages_step_s
        if not count.measured and count.scaling_factor_interval is not None:
            row["model"] = count.scaling_factor
            row["lower"], row["upper"] = count.scaling_factor_interval
            for law in ("log2", "linear"):
                row[law] = float(np.interp(count.nodes, curves.index, curves[law]))
        rows.append(row)
    return pd.DataFrame(rows)


def measured_factors() -> pd.Series:
    """Return the measured scaling factor by number of GPUs: medians over jobs."""
    medians_s = steps().groupby("gpus")["step_s"].median()
    return medians_s.loc[1] / medians_s


def draw() -> Figure:
    """Draw the measured and the predicted scaling factors by the number of GPUs."""
    result = predicted()
    figure, ax = plots.canvas(height=3.4)
    show.scaling_factors(ax, result)
    measured = measured_factors()
    # The anchor is the largest measured count that the prediction is given. The step on 400 GPUs
    # is reconstructed, because some steps had half a batch, and has a marker of its own.
    later = measured[(measured.index > result.anchor.gpus) & (measured.index < 400)]
    known = plots.look("measured")
    ax.plot(
        later.index,
        later,
        "s",
        color=known.color,
        markersize=6,
        label="measured, not used",
    )
    ax.plot(
        [400],
        [measured[400]],
        "s",
        color=known.color,
        markerfacecolor="white",
        markersize=6,
        label="measured, not used, reconstructed",
    )
    ax.axvline(result.anchor.gpus, color=SOFT, linewidth=0.7, linestyle=":")
    ax.set_ylim(0.3, 1.05)
    ax.legend(loc="lower left", ncols=2)
    target = result.target
    low, high = target.scaling_factor_interval or (np.nan, np.nan)
    plots.heading(
        ax,
        f"From 40 GPUs, {target.scaling_factor:.2f} is predicted on 400 ({low:.2f} to {high:.2f}); "
        f"measured {measured[400]:.2f}",
    )
    return figure
