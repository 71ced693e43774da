"""Curves, samples and fits against a size, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit
from ddlkit.report.plots import axes
from ddlkit.report.plots.theme import FAINT, SOFT, look, looks, theme

FEW = 30  # points of a line that are marked one by one


@theme()
def points(
    ax: Axes, x: ArrayLike, y: ArrayLike, role: str, *, label: str = "", size: float = 8
) -> None:
    """Markers of a role at (n,) places, as what a paper prints or what was measured, upon lines."""
    style = look(role)
    ax.plot(
        np.asarray(x, dtype=float),
        np.asarray(y, dtype=float),
        style.marker,
        color=style.color,
        markerfacecolor=style.face,
        markersize=size,
        label=label or style.label,
    )


@theme()
def lines(
    ax: Axes,
    table: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    log: str = "",
    legend: str = "above",
) -> None:
    """A line per column against the index, with markers if points are few; NaN breaks a line.

    ``log`` names the logarithmic axes: "x", "y" or both, "b" for an x axis of bytes. ``legend`` is "above",
    "right" or "". A column named as a plan, role or cost form has its look.
    """
    x = table.index.to_numpy(dtype=float)
    for place, style in enumerate(looks([str(name) for name in table.columns])):
        ax.plot(
            x,
            table.iloc[:, place].to_numpy(dtype=float),
            color=style.color,
            marker=style.marker if len(x) <= FEW else "",
            markersize=4,
            linestyle=style.line,
            label=style.label,
        )
    axes.scale(ax, log)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend(ax, legend)


@theme()
def samples(
    ax: Axes,
    frame: pd.DataFrame,
    *,
    x: str,
    y: str = "seconds",
    series: str,
    center: str = "median",
    percent: float = 95,
    legend: str = "inside",
) -> None:
    """A line through the ``center`` of the samples at each ``x``, in a band that holds ``percent`` of them.

    ``x``, ``y`` and ``series`` are columns; values of the last name the lines. Times in seconds are drawn
    against sizes, in bytes or elements, on logarithmic axes.
    """
    import seaborn as sns  # takes longer to import than all else here

    timed = y == "seconds"
    factor, unit = axes.time_unit(frame[y]) if timed else (1.0, "")
    groups = list(frame.groupby(series, sort=False))
    for (_, rows), style in zip(groups, looks([str(name) for name, _ in groups]), strict=True):
        few = rows[x].nunique() <= FEW
        sns.lineplot(
            x=rows[x],
            y=factor * rows[y],
            estimator=center,
            errorbar=("pi", percent),
            color=style.color,
            marker=style.marker if few else None,
            markersize=4,
            markeredgewidth=0,
            linestyle=style.line,
            label=style.label,
            legend=False,
            ax=ax,
        )
    if timed:
        axes.scale(ax, "by" if x == "bytes" else "xy")
    ax.set_xlabel("message size" if x == "bytes" else x)
    ax.set_ylabel(f"time [{unit}]" if timed else y.replace("_", " "))
    axes.legend(ax, legend)


@theme()
def cost_fit(ax: Axes, *fits: Fit[Any], density: float | None = None) -> None:
    """Costs fitted to the same data: samples, their medians, and the fitted lines with 95% intervals.

    fits : of messages, or of selections, of which those at one ``density`` are drawn. A fit without draws
    has no interval. Raises UserError for a density that was not measured.
    """
    at, seconds = fits[0].at, fits[0].seconds
    chosen = np.full(len(seconds), True)
    if density is not None:
        chosen = np.isclose(at[1], density)
    if not chosen.any():
        raise UserError(f"density {density:g} was not measured: there are {np.unique(at[1])}")
    sizes, seconds = at[0][chosen], seconds[chosen]
    medians = pd.Series(seconds).groupby(sizes).median()
    scale, unit = axes.time_unit(medians)
    grid = np.geomspace(sizes.min(), sizes.max(), 200)
    place = [grid] if density is None else [grid, np.full_like(grid, density)]
    ax.plot(sizes, seconds * scale, ".", color=SOFT, markersize=2.5, alpha=0.5, zorder=1)
    for fit, style in zip(fits, looks([fit.cost.form for fit in fits]), strict=True):
        label = style.label
        if fit.draws:
            low, high = (scale * limit for limit in fit.interval(*place))
            ax.fill_between(grid, low, high, color=style.color, alpha=0.25, linewidth=0)
            label += ", 95% interval"
        line = scale * fit.cost(*place)
        ax.plot(grid, line, color=style.color, linestyle=style.line, label=label)
    points(ax, medians.index, scale * medians, "measured", label="measured, median", size=4)
    messages = density is None
    axes.scale(ax, "by" if messages else "xy")
    what = fits[0].cost.collective.replace("_", "-") if messages else "selection"
    ax.set(xlabel="message size" if messages else "elements", ylabel=f"{what} time [{unit}]")
    axes.legend(ax, "inside")


@theme()
def predicted_vs_measured(
    ax: Axes,
    measured_s: ArrayLike,
    predicted_s: Mapping[str, ArrayLike],
    *,
    quantity: str = "iteration time",
    band: float = 0.05,
) -> None:
    """Predictions (role -> (n,) seconds) against the measured (n,); on the diagonal they agree.

    Both axes are logarithmic, so equal distances are equal relative errors; the band marks errors
    of at most ``band``. Only positive times can be drawn.
    """
    table = pd.DataFrame({role: np.asarray(values) for role, values in predicted_s.items()})
    table.index = pd.Index(np.asarray(measured_s, dtype=float))
    everything = table.reset_index().to_numpy(dtype=float)
    scale, unit = axes.time_unit(everything)
    positive = everything[everything > 0] * scale
    if not positive.size:
        raise UserError(f"no {quantity} above zero to draw")
    line = np.array([positive.min() / 1.1, positive.max() * 1.1])
    ax.plot(line, line, color=SOFT, linewidth=0.8, zorder=1)
    ax.fill_between(line, line * (1 - band), line * (1 + band), color=FAINT, linewidth=0, zorder=0)
    for role in sorted(table, key=lambda role: role == "model"):  # the model's on top
        points(ax, scale * table.index, scale * table[role], str(role), size=4.5)
    ax.set(xscale="log", yscale="log", xlim=tuple(line), ylim=tuple(line), aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        axes.plain_log_ticks(axis)
    ax.grid(True, axis="both")
    ax.set(xlabel=f"measured {quantity} [{unit}]", ylabel=f"predicted {quantity} [{unit}]")
    handles, labels = ax.get_legend_handles_labels()
    handles, labels = [*handles[::-1], Patch(color=FAINT)], [*labels[::-1], f"within ±{band:.0%}"]
    ax.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
