"""Figure wb-clusters-scaling: a weather model on up to 400 GPUs, predicted from 40.

The steps were measured on Isambard-AI. The all-reduces of messages alone are those of
Perlmutter, whose nodes have as many GPUs, and whose network is of the same kind.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit import show
from ddlkit.core.fit import fit
from ddlkit.core.workload import Workload
from ddlkit.model.scaling import Count, Scaling, scale
from workbook import plots
from workbook.osf import equations
from workbook.plots.style import SOFT
from workbook.validate.clusters import scaling

GRADIENT_BYTES = 924e6
"""The gradients of the weather model, whose 231 million parameters are in fp32."""
BUCKETS = 37
"""The number of buckets of 25 MB that the gradients fill."""
BACKWARD_S = 0.7106
UPDATE_S = 0.0063
"""Backward pass and update on one GPU, as its profiler reports them."""
SHOWN_NODES = 10
"""The largest number of nodes whose steps the prediction knows."""


def steps() -> pd.DataFrame:
    """Return the steps of the weather model on all counts."""
    return scaling.anemoi_steps()


def weather_model() -> Workload:
    """Return the weather model as BUCKETS buckets with equal bytes and equal backward times.

    The layers of the model are not published. The forward pass is what remains of a step on one
    GPU without the backward pass and the update.
    """
    frame = steps()
    # The median over jobs. A step on one GPU sends nothing.
    one_gpu_s = float(frame.loc[frame["gpus"] == 1, "step_s"].median())
    return Workload.from_arrays(
        forward_s=one_gpu_s - BACKWARD_S - UPDATE_S,
        backward_s=np.full(BUCKETS, BACKWARD_S / BUCKETS),
        n_bytes=np.full(BUCKETS, GRADIENT_BYTES / BUCKETS),
        update_s=UPDATE_S,
    )


def all_reduces() -> pd.DataFrame:
    """Return Perlmutter's all-reduces with four GPUs on each of two nodes or more.

    Nodes of the machine on which the weather model was trained have four GPUs, too.
    """
    times = scaling.perlmutter()
    is_alike = (times["ranks"] == 4 * times["nodes"]) & (times["nodes"] > 1)
    return times[is_alike & (times["collective"] == "all_reduce")]


@cache
def predicted() -> Scaling:
    """Return the steps on 25, 50 and 100 nodes as predicted from the steps on up to SHOWN_NODES.

    The result also says whether a scaling factor of 0.8 is met on 100 nodes, and how long a step
    would take if nothing but messages lengthened it.
    """
    frame = steps()
    return scale(
        frame[frame["nodes"] <= SHOWN_NODES],
        # Steps were measured on these nodes, too, with which the prediction is compared.
        nodes=[25, 50, 100],
        # From these two follows how long a step takes if only messages lengthen it.
        workload=weather_model(),
        collectives=all_reduces(),
        wish=0.8,
    )


@cache
def osf_factor(nodes: int) -> float:
    """Return the scaling factor of the weather model on a number of nodes, as osf predicts it.

    The prediction is Eqs 3 and 7 to 10 of the paper. The layers of its formulas are here the
    buckets of `weather_model`.

    Parameters
    ----------
    nodes : int
        The number of nodes, each with four GPUs.

    Returns
    -------
    float
        The factor. The start-up and the time of a byte in Eq 7 are those of a line that is
        fitted to all-reduces of 1 to 64 MiB on 8 nodes.
    """
    times = all_reduces()
    is_fitted = (times["nodes"] == 8) & times["bytes"].between(2**20, 2**26)
    fitted = times[is_fitted]
    line = fit(
        "alpha_beta", fitted["bytes"].to_numpy(float), fitted["seconds"].to_numpy()
    ).cost
    # By Eq 7, the start-up does not depend on the number N of ranks, and the time of a byte is
    # proportional to (N - 1) / N. The line was fitted to 32 ranks on 8 nodes. Its time of a byte
    # is therefore divided by 31 / 32 and multiplied by (N - 1) / N.
    ranks = 4 * nodes
    growth = ((ranks - 1) / ranks) / (31 / 32)
    model = weather_model()
    # The time of the all-reduce of each bucket.
    sent_s = line.alpha_s + growth * line.beta_s_per_byte * model.bytes
    # With first=0, the all-reduce of a layer waits for the backward of this layer, as the
    # prose of the paper has it. Eq 8 as printed leaves this backward out, and starts too early.
    factor = equations.osf(
        model.forward_s, model.backward_s.tolist(), sent_s.tolist(), first=0
    )
    return float(factor)


def numbers() -> pd.DataFrame:
    """Return the plotted numbers.

    Returns
    -------
    DataFrame
        One row for each number of GPUs, with the columns ``gpus`` and ``nodes``. Steps were
        measured on all of them. The prediction is given those on up to SHOWN_NODES nodes, and
        in their rows ``shown`` is true. ``reconstructed`` is true on 100 nodes, where
        some steps had half a batch, and the measured step is computed as if all batches were
        whole.

        All other columns are scaling factors, NaN where there is none. ``measured`` follows
        from the measured steps. Where ``shown`` is false, ``model`` is the prediction with its
        interval from ``lower`` to ``upper``, and ``log2`` and ``linear`` are the predictions
        of two rival laws. On several nodes, ``messages_alone`` is the factor if nothing but
        messages lengthened the step.
    """
    result = predicted()
    measured = measured_factors()
    # The first count is one GPU. A scaling factor is its step divided by another step.
    one_gpu_s = result.counts[0].step_s
    rows = []
    # The predictions of the rival laws, by the number of nodes.
    curves = show.scaling_curves(result).set_index("nodes")
    # A count is a number of GPUs on a number of nodes, with a measured or a predicted step.
    for count in result.counts:
        row: dict[str, object] = {
            "gpus": count.gpus,
            "nodes": count.nodes,
            "measured": measured[count.gpus],
            # For the prediction, only the steps that it was given are measured.
            "shown": count.measured,
            "reconstructed": count.nodes == 100,
        }
        # On a single node this is None, because the tables have no all-reduces there.
        if count.only_messages_step_s is not None:
            row["messages_alone"] = one_gpu_s / count.only_messages_step_s
        if not count.measured:
            row.update(_predictions(count, curves))
        rows.append(row)
    return pd.DataFrame(rows)


def _predictions(count: Count, curves: pd.DataFrame) -> dict[str, object]:
    """Return the scaling factors that are predicted for a count without a measured step.

    Parameters
    ----------
    count : Count
        The number of GPUs and of nodes, with the predicted step.
    curves : DataFrame
        The scaling factors by each law of growth, by the number of nodes.

    Returns
    -------
    dict
        The columns ``model``, ``lower``, ``upper``, ``log2`` and ``linear`` of `numbers`.
    """
    # Every count without a measured step has an interval, which the type checker cannot know.
    assert count.scaling_factor_interval is not None
    lower, upper = count.scaling_factor_interval
    columns: dict[str, object] = {
        "model": count.scaling_factor,
        "lower": lower,
        "upper": upper,
    }
    for law in ("log2", "linear"):
        # The curve of the law, read at the nodes of this count.
        columns[law] = float(np.interp(count.nodes, curves.index, curves[law]))
    return columns


def measured_factors() -> pd.Series:
    """Return the measured scaling factor by number of GPUs: medians over jobs."""
    medians_s = steps().groupby("gpus")["step_s"].median()
    # A scaling factor is the step on one GPU divided by another step.
    return medians_s.loc[1] / medians_s


def draw() -> Figure:
    """Draw the measured and the predicted scaling factors by the number of GPUs.

    Steps on more than 40 GPUs were measured, too, but are not given to the prediction. They have
    markers of their own.
    """
    result = predicted()
    figure, ax = plots.canvas(height=3.4)
    # This draws the prediction with its interval, and the measured steps that it was given.
    show.scaling_factors(ax, result)
    measured = measured_factors()
    # The anchor is the largest count of GPUs whose measured steps the prediction is given.
    anchor_gpus = result.anchor.gpus
    _draw_not_used(ax, measured[measured.index > anchor_gpus])
    # To the right of this line, everything is predicted.
    ax.axvline(anchor_gpus, color=SOFT, linewidth=0.7, linestyle=":")
    ax.set_ylim(0.3, 1.05)
    # `scaling_factors` has drawn a legend without the markers that were added here.
    ax.legend(loc="lower left", ncols=2)
    # The target is the largest count, 400 GPUs. It is predicted, so that it has an interval,
    # and NaN only satisfies the type checker.
    target = result.target
    low, high = target.scaling_factor_interval or (np.nan, np.nan)
    plots.heading(
        ax,
        f"From 40 GPUs, {target.scaling_factor:.2f} is predicted on 400 ({low:.2f} to {high:.2f}); "
        f"measured {measured[400]:.2f}",
    )
    return figure


def _draw_not_used(ax: Axes, factors: pd.Series) -> None:
    """Draw the measured scaling factors that the prediction is not given.

    ``factors`` has them by the number of GPUs.
    """
    color = plots.look("measured").color
    # The step on 400 GPUs is reconstructed, because some steps had half a batch.
    whole = factors[factors.index < 400]
    ax.plot(
        whole.index,
        whole,
        "s",
        color=color,
        markersize=6,
        label="measured, not used",
    )
    ax.plot(
        [400],
        [factors[400]],
        "s",
        color=color,
        markerfacecolor="white",
        markersize=6,
        label="measured, not used, reconstructed",
    )
