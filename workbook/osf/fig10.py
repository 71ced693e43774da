"""osf Figure 10: errors of a linear and of a piecewise cost for a network's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, unseen_errors
from ddlkit.core.units import KB, format_bytes
from ddlkit.core.workload import Floats
from ddlkit.model.calibration import undisturbed
from workbook import plots
from workbook.common import claims, networks, source
from workbook.common.claims import Result, check, prose
from workbook.osf import cluster
from workbook.osf import equations as osf
from workbook.osf.frames import rows_of
from workbook.osf.lab import OTHER_LINES, buffer_name
from workbook.plots.style import FAINT, SOFT, look

LINE_MODELS = ["ring_all_reduce", "alpha_beta:medians", "alpha_beta"]
"""Straight lines: osf Eq 7 through the smallest and the largest message, a line through
the medians, and the line with the least relative errors."""
EQ18_MODELS = ["piecewise:BDP", "piecewise"]
"""osf Eq 18, its threshold at the bandwidth-delay product, and where it fits best."""
MODELS = (*LINE_MODELS, *EQ18_MODELS, "segments", "table")
"""Costs that are made from samples. The last two are linear pieces and a table."""
DRAWN = {"alpha_beta:medians": "straight line", "piecewise:BDP": "Eq 18"}
"""The models that are drawn, which are the two forms of which osf claims something."""
LINK = ["link", "ranks"]
LINK_TITLES = {"lab:1gbit": "1 Gbit/s", "lab:500mbit": "500 Mbit/s"}
"""How a heading spells links. Others have their own name."""
TICKS = [256 * 32**step for step in range(4)]
"""Message sizes in bytes that are named on the axis, from 256 B to 8 MiB."""


# -- numbers -------------------------------------------------------------------------


def numbers(
    collectives: pd.DataFrame,
    tensors: pd.DataFrame,
    network: str,
    models: Sequence[str] = MODELS,
) -> pd.DataFrame:
    """Return the error of each model at each size that the tensors of a network have.

    Parameters
    ----------
    collectives : DataFrame
        A machine's table ``collectives``: the samples from which the costs are made.
    tensors : DataFrame
        The machine's table ``tensors``: samples of another run, in which messages have the
        sizes of a network's tensors. The costs predict these samples. A cost that predicts
        a size is made without samples of this size.
    network : str
        The network.
    models : sequence of str, optional
        The models, some of MODELS.

    Returns
    -------
    DataFrame
        A row for each link, number of ranks, model and size in bytes, as `_errors` returns
        them. ``tensors`` is how many tensors of the network have the size, and
        ``paper_bandwidth_delay_bytes`` the bandwidth-delay product that the paper prints.

    Raises
    ------
    UserError
        If no link has samples in both tables.
    """
    # By the link and the number of ranks.
    samples_by_link = dict(iter(_all_reduces(collectives)))
    of_network = tensors[tensors["network"] == network]
    tables = []
    for (link, ranks), to_predict in _all_reduces(of_network):
        samples = samples_by_link.get((link, ranks))
        if samples is not None:
            errors = _errors(samples, to_predict, models)
            tables.append(errors.assign(link=link, ranks=ranks))
    if not tables:
        # The text names a tag of this repository, whose recordings have such links.
        raise UserError(
            f"no link with all-reduces of {network}: those of v0.2-studies have them"
        )
    frame = pd.concat(tables, ignore_index=True)
    # The parameters are float32.
    tensor_bytes = 4 * pd.Series(networks.parameters(network))
    counts = tensor_bytes.value_counts()
    frame.insert(0, "tensors", counts.reindex(frame["bytes"]).to_numpy())
    return frame.assign(paper_bandwidth_delay_bytes=KB * prose("osf")["fig10-bdp"])


def _all_reduces(samples: pd.DataFrame) -> Any:
    """Return a table's all-reduces, without those that the host disturbed, grouped by LINK."""
    return undisturbed(samples[samples["collective"] == "all_reduce"]).groupby(LINK)


def _errors(
    samples: pd.DataFrame, to_predict: pd.DataFrame, models: Sequence[str]
) -> pd.DataFrame:
    """Return the errors of the models at the sizes of another run over the same link.

    Parameters
    ----------
    samples : DataFrame
        The all-reduces of one run, from which the costs are made.
    to_predict : DataFrame
        The all-reduces of the other run, between as many ranks.
    models : sequence of str
        Some of MODELS.

    Returns
    -------
    DataFrame
        A row for each model and size in bytes: the median measured time of the other run
        (``measured_s``), the time by the model (``model_s``), the relative ``error`` of the
        model, and ``repeated``, by which share the median of the first run differs from that
        of the other. ``bandwidth_delay_bytes`` is that of the link.
    """
    # All samples are of the same number of ranks.
    workers = int(samples["ranks"].iloc[0])
    sizes, seconds = _sizes_and_seconds(samples)
    # The threshold of osf Eq 18, in bytes, by the start-up and the rate of osf Eq 7.
    ring = osf.ring_from_ends(sizes, seconds, workers)
    threshold = osf.bandwidth_delay_bytes(ring)

    measured_s = to_predict.groupby("bytes")["seconds"].median()
    first_run_s = samples.groupby("bytes")["seconds"].median()
    # NaN for sizes that the first run does not have.
    repeated = first_run_s.reindex(measured_s.index) / measured_s - 1

    # Sizes are distinct and ascending in ``measured_s`` and in what `unseen_errors` returns, so
    # that their arrays fit together.
    tables = []
    for model in models:
        # For each size to predict, the cost is made anew from the samples of all other sizes.
        unseen_sizes, errors = unseen_errors(
            partial(_cost, model, workers, threshold),
            (sizes, seconds),
            _sizes_and_seconds(to_predict),
        )
        columns = {
            "model": model,
            "bytes": unseen_sizes.astype(int),
            "measured_s": measured_s.to_numpy(),
            "model_s": (1 + errors) * measured_s.to_numpy(),
            "error": errors,
            "repeated": repeated.to_numpy(),
            "bandwidth_delay_bytes": threshold,
        }
        tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def _sizes_and_seconds(samples: pd.DataFrame) -> tuple[Floats, Floats]:
    """Return the size in bytes and the seconds of each sample, shape (n,)."""
    return samples["bytes"].to_numpy(float), samples["seconds"].to_numpy(float)


def _cost(
    model: str, workers: int, threshold: float, sizes: Floats, seconds: Floats
) -> MessageCost:
    """Return the cost of one of MODELS, made from samples of shape (n,).

    ``sizes`` are in bytes, ``seconds`` are the measured times, and ``threshold`` is the
    bandwidth-delay product of the link in bytes.
    """
    if model == "ring_all_reduce":
        # The line of osf Eq 7 is not fitted to all sizes. It goes through the median times of
        # the smallest and of the largest one, the two ends.
        return osf.ring_from_ends(sizes, seconds, workers)
    # All other models are named by the form of a cost. "BDP" in such a name stands for the
    # threshold. Without draws, the fit computes no interval, which is not needed here.
    form = model.replace("BDP", f"{threshold:.0f}")
    fitted = fit(form, sizes, seconds, workers=workers, algorithm="ring", draws=0)
    return fitted.cost


def decided(frame: pd.DataFrame) -> pd.DataFrame:
    """Return whether a straight line or osf Eq 18 has the smaller errors.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.

    Returns
    -------
    DataFrame
        Two rows for each link and number of ranks. The ``tensors`` of a row are those
        below the bandwidth-delay product ("small") or all others ("large"). ``line`` is
        the best straight line and ``eq18`` the best form of Eq 18. ``line_error`` and
        ``eq18_error`` are the medians over the tensors of their absolute relative errors.
        ``runs_differ`` is the median over the distinct sizes in bytes of the absolute
        relative difference of the two runs. ``decided`` says whether ``line_error`` and
        ``eq18_error`` differ by more than ``runs_differ``.
    """
    is_small = frame["bytes"] < frame["bandwidth_delay_bytes"]
    by_size = frame.assign(
        side=is_small.map({True: "small", False: "large"}),
        error=frame["error"].abs(),
        apart=frame["repeated"].abs(),
    )
    rows = []
    for (link, ranks, side), of_side in by_size.groupby([*LINK, "side"], sort=False):
        # Each size counts as often as the network has tensors of it.
        of_tensors = of_side.loc[of_side.index.repeat(of_side["tensors"])]
        errors = of_tensors.groupby("model")["error"].median()
        # The models with the least error of each kind.
        line = errors[LINE_MODELS].idxmin()
        eq18 = errors[EQ18_MODELS].idxmin()
        runs_differ = of_side["apart"].median()
        rows.append(
            {
                "link": link,
                "ranks": ranks,
                "tensors": side,
                "runs_differ": runs_differ,
                "line": line,
                "line_error": errors[line],
                "eq18": eq18,
                "eq18_error": errors[eq18],
                "decided": abs(errors[line] - errors[eq18]) > runs_differ,
            }
        )
    return pd.DataFrame(rows)


# -- drawing -------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the errors of the models DRAWN by message size, a panel for each link.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    # A row for each link, and for small and for large tensors.
    comparisons = decided(frame)
    links = comparisons.groupby(LINK, sort=False)
    sheet = plots.sheet(
        _outcome(comparisons),
        columns=len(links),
        height=3.5,
        sharey=True,
        # The axes are a two-dimensional array even if there is only one link.
        squeeze=False,
    )
    with sheet as (figure, axes):
        for ax, ((link, ranks), of_link) in zip(axes.flat, links, strict=True):
            _draw_link(ax, rows_of(frame, link=link, ranks=ranks))
            name = LINK_TITLES.get(str(link), str(link))
            # The second line says which form is closer, or that nothing is decided.
            ax.set_title(f"{name}, {ranks} ranks\n{_closer(of_link)}")
            # Inner panels have no labels of their axes.
            ax.label_outer()
        axes[0, 0].set_ylabel("error on the held-out size [%]")
    return figure


def _outcome(comparisons: pd.DataFrame) -> str:
    """Return in how many comparisons osf Eq 18 is closer than the best line, in words.

    ``comparisons`` is what `decided` returned.
    """
    # The comparisons in which the two errors differ by more than the times of two runs.
    clear = comparisons[comparisons["decided"]]
    eq18_is_closer = clear["eq18_error"] < clear["line_error"]
    text = (
        f"Eq 18 is closer than the best line in {eq18_is_closer.sum()} of "
        f"{len(comparisons)} comparisons"
    )
    farther = (~eq18_is_closer).sum()
    if farther > 0:
        text += f" and farther in {farther}"
    if len(clear) < len(comparisons):
        text += "; the others are undecided"
    return text


def _draw_link(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw the errors in % over one link, and two bandwidth-delay products (BDP) in bytes.

    One product is that of the link, and the other is the one that the paper prints. Errors
    within the difference of two runs, which is shaded, decide nothing. ``rows`` are the rows
    of `numbers` for the link.
    """
    # The difference does not depend on the model, so that the first row of a size has it. It is
    # NaN for sizes that one of the runs does not have.
    difference = 100 * rows.groupby("bytes")["repeated"].first().abs().dropna()
    ax.fill_between(
        difference.index,
        -difference,
        difference,
        color=FAINT,
        label="difference of two runs",
    )
    errors = 100 * rows.pivot(index="bytes", columns="model", values="error")
    plots.lines(
        ax,
        errors[[*DRAWN]],
        xlabel="message size",
        ylabel="",
        # A horizontal axis of bytes, which is logarithmic.
        log="b",
        # The figure has one legend, which is below all panels.
        legend="",
    )
    # The lines are in the order of DRAWN, whose values are their labels.
    for line, name in zip(ax.get_lines(), DRAWN.values(), strict=True):
        line.set_label(name)
    ax.set_xticks(TICKS, [format_bytes(size) for size in TICKS])
    _draw_products(ax, rows)


def _draw_products(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw the bandwidth-delay products (BDP) of a link and of the paper as vertical lines.

    ``rows`` are the rows of `numbers` for the link.
    """
    # All rows have the same two products.
    link_bdp = rows["bandwidth_delay_bytes"].iloc[0]
    ax.axvline(link_bdp, color=SOFT, label="BDP of the link")
    paper_bdp = rows["paper_bandwidth_delay_bytes"].iloc[0]
    ax.axvline(
        paper_bdp,
        color=look("paper").color,
        linestyle=":",
        label=f"paper: BDP of {paper_bdp / KB:g} KB",
    )


def _closer(comparisons: pd.DataFrame) -> str:
    """Return which form is closer below and above the BDP of a link, in words.

    ``comparisons`` are the rows of `decided` for the link, of which only decided ones count.
    """
    sides = {"small": "below", "large": "above"}
    parts = []
    for row in comparisons[comparisons["decided"]].itertuples():
        form = "Eq 18" if row.eq18_error < row.line_error else "line"
        parts.append(f"{form} closer {sides[row.tensors]} the BDP")
    return ", ".join(parts) or "undecided"


# -- claims --------------------------------------------------------------------------

LINES = [LINE_MODELS[0], *OTHER_LINES]
"""The straight lines with which the claims compare Eq 18."""
BENT = "piecewise:BDP"
"""osf Eq 18 with the threshold that the paper gives it."""


def _links_in_words(ratios: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return the ratios of errors of each link, and by how much two runs over it differ.

    Parameters
    ----------
    ratios : DataFrame
        The median error of a straight line, divided by that of osf Eq 18. There is a row for
        each link, and a column for each of LINES.
    rows : DataFrame
        What `_cost_errors` returns.
    """
    # A cost is made from one run, and judged by another. ``repeated`` is the relative difference
    # of the two runs at the size of a tensor, which no cost can foresee.
    difference = rows["repeated"].abs()
    runs_apart = difference.groupby(rows["link"]).agg(["median", "max"])
    links = []
    for link, of_link in ratios.iterrows():
        listed = ", ".join(f"{ratio:.2g}" for ratio in of_link)
        runs = runs_apart.loc[link]
        links.append(
            f"{link} {listed} "
            f"(runs {runs['median']:.1%} apart, up to {runs['max']:.1%})"
        )
    return links


@check("osf-fig10-small", "bytes < bandwidth_delay_bytes")
@check("osf-fig10-all", "bytes > 0")
def _linear_over_piecewise(condition: str) -> Result:
    """Return the median error of each straight line, divided by that of osf Eq 18, by link.

    The medians are over the tensors of ResNet-101.

    Parameters
    ----------
    condition : str
        Which tensors count, in the syntax of `pandas.DataFrame.query`.
    """
    rows = _cost_errors().query(condition)
    medians = rows.groupby(["link", "model"])["error"].median().unstack()
    # A row for each link, and a column for each line. Above 1, the line has the larger error.
    ratios = medians[LINES].div(medians[BENT], axis=0)
    # "n links" says that the n of each result counts links. The lines are named in the order of
    # LINES: through both ends, through the medians of the samples of each size, with the least
    # relative errors, and with the least squares.
    note = (
        "medians; n links, lines by both ends, medians, relative error, least squares: "
        + "; ".join(_links_in_words(ratios, rows))
    )
    # How the paper fits its line is not stated, so that each line is a reading.
    by_line = {}
    for line, of_links in ratios.items():
        by_line[str(line)] = claims.measured(of_links, note="", grade="recorded")
    return claims.by_readings(by_line, note)


@check("osf-below-bdp")
def _below_bandwidth_delay() -> Result:
    """Return the share of messages below the printed bandwidth-delay product, in %.

    The paper states neither the networks nor the buffers. Each choice is a reading. The claim
    is undecided, because some readings agree with the printed share of 53.1% and others do not.
    """
    # A buffer of 0 bytes is no fusion, and the others are those of Figure 4. For VGG-16 alone,
    # only the two readings that agree are taken. Its other buffers disagree, as all readings of
    # the five networks do, and would not change the outcome.
    readings = {}
    for buffer_bytes in (0, KB):
        readings[f"VGG-16, buffer {buffer_name(buffer_bytes)}"] = claims.counted(
            _percent_below(["VGG16"], buffer_bytes), ""
        )
    for buffer_bytes in (0, *cluster.BUFFERS):
        readings[f"all five networks, buffer {buffer_name(buffer_bytes)}"] = (
            claims.counted(_percent_below(cluster.FIVE, buffer_bytes), "")
        )
    return claims.by_readings(readings)


def _percent_below(networks_named: Sequence[str], buffer_bytes: float) -> float:
    """Return the share of messages below the printed bandwidth-delay product, in %.

    Parameters
    ----------
    networks_named : sequence of str
        The networks, whose messages count together.
    buffer_bytes : float
        The size of the fusion buffer, which has no timeout, or 0 for no fusion.
    """
    sizes = []
    for network in networks_named:
        # Without a timeout, the size of a message does not depend on the compute time, so that
        # any will do.
        workload, plan, _ = cluster.fused(
            network,
            compute_s=1.0,
            capacity=buffer_bytes,
            timeout_s=math.inf,
            unit="tensor",
        )
        sizes.append(plan.group_bytes(workload))
    is_below = np.concatenate(sizes) < KB * prose("osf")["fig10-bdp"]
    return float(100 * np.mean(is_below))


@cache
def _cost_errors() -> pd.DataFrame:
    """Return the absolute relative errors for each link, model and tensor of ResNet-101.

    The models are LINES and BENT. If several machines recorded a link, only the last recording
    counts.
    """
    by_link = {}
    for recording in source.recordings("tensors").values():
        collectives = recording.table("collectives")
        tensors = recording.table("tensors")
        by_size = numbers(collectives, tensors, "ResNet101", [*LINES, BENT])
        # A row for each tensor instead of each size, of which the network may have several
        # tensors.
        of_tensors = by_size.loc[by_size.index.repeat(by_size["tensors"])]
        of_tensors = of_tensors.assign(error=of_tensors["error"].abs())
        for link, of_link in of_tensors.groupby("link"):
            by_link[link] = of_link
    return pd.concat(by_link.values())
