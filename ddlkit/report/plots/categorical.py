"""Bars and dots by case: plans, networks, kernels, claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import ArrayLike

from ddlkit.report.plots import axes
from ddlkit.report.plots.theme import FAINT, INK, looks, theme

INTERVAL = 0.95
CROWDED = 60  # letters under an axis


@theme()
def bars(
    ax: Axes,
    table: pd.DataFrame,
    *,
    label: str,
    seconds: bool = False,
    stacked: bool = False,
    legend: str = "above",
) -> None:
    """A group of bars per row (its index names it), a bar per column, beside or upon each other.

    A column named as a plan or role has its look; ``legend`` is "above", "right" or "". Times in
    ``seconds`` are drawn in the unit that reads best, which then follows ``label``. NaN draws nothing.
    """
    if seconds:
        factor, unit = axes.time_unit(table.to_numpy())
        table, label = factor * table, f"{label} [{unit}]"
    styles = looks([str(name) for name in table.columns])
    crowded = sum(len(str(name)) for name in table.index) > CROWDED
    table.plot.bar(
        ax=ax,
        stacked=stacked,
        width=0.72 if stacked else 0.84,
        color=[style.color for style in styles],
        edgecolor="white",
        linewidth=0.3,
        legend=False,
        rot=0,
        xlabel="",
        ylabel=label,
    )
    for container, style in zip(ax.containers, styles, strict=True):
        plt.setp(container, hatch=style.hatch)
        container.set_label(style.label)
    if crowded:
        plt.setp(ax.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    ax.tick_params(axis="x", length=0)
    axes.legend(ax, legend)


@theme()
def dots(
    ax: Axes,
    cases: Sequence[str],
    values: Mapping[str, ArrayLike] | pd.DataFrame,
    *,
    label: str,
    reference: float = 0.0,
    band: tuple[str, ArrayLike] | None = None,
    interval: tuple[ArrayLike, ArrayLike] | None = None,
    legend: str = "above",
) -> None:
    """A row per case, a marker per role or series: name -> (n,) numbers in the unit of ``label``.

    band : its name and half width, (n,) or one for all cases, drawn in grey about the ``reference``
    interval : lower and upper ends, (n,) each, of bars about the values
    """
    place = np.arange(len(cases))
    axes.rows(ax, cases, reference)
    if band is not None:
        half = np.broadcast_to(np.abs(np.asarray(band[1], dtype=float)), place.shape)
        ax.barh(place, 2 * half, left=reference - half, height=0.62, color=FAINT, label=band[0])
    if interval is not None:
        ax.hlines(place, *interval, color=INK, label=f"{INTERVAL:.0%} interval")
    for style, name in zip(looks(list(values)), values, strict=True):
        ax.plot(
            np.asarray(values[name], dtype=float),
            place,
            style.marker,
            color=style.color,
            markerfacecolor=style.face,
            markersize=4.5,
            label=style.label,
        )
    ax.set_xlabel(label)
    axes.legend(ax, legend)


@theme()
def dots_by_group(ax: Axes, groups: Sequence[str], values: ArrayLike, *, label: str) -> None:
    """The model's numbers (n,), one point each, in a row per group (n,); a bar marks the median."""
    points = pd.Series(np.asarray(values, dtype=float)).groupby(list(groups), sort=False)
    axes.rows(ax, [str(name) for name, _ in points], 0.0)
    (style,) = looks(["model"])
    for row, (_, of_group) in enumerate(points):
        inside = np.sort(of_group)
        # Spread evenly, not at random: the same data draw the same picture.
        spread = row + 0.5 * (np.arange(len(inside)) % 5 / 4 - 0.5)
        ax.plot(inside, spread, style.marker, color=style.color, markersize=3, alpha=0.6)
        ax.plot([np.median(inside)] * 2, [row - 0.36, row + 0.36], color=INK, linewidth=2)
    ax.set_xlabel(label)


@theme()
def verdict_ratios(ax: Axes, verdicts: pd.DataFrame, *, limit: float = 4.0) -> None:
    """Computed over printed value of every attempted claim, with the tolerance as a bar around 1.

    ``verdicts`` is ``report.verdicts.evaluate()``'s; ratios beyond ``limit`` sit on the border and
    carry their value.
    """
    tried = verdicts[verdicts["verdict"] != "not attempted"].reset_index(drop=True)
    ratio = tried["computed"] / tried["value"]
    shown = ratio.clip(1 / limit, limit)
    kinds = {name: shown.where(tried["verdict"] == name) for name in ("reproduced", "differs")}
    band = "tolerance", tried["tolerance"]
    label = "computed here / printed in the paper"
    dots(ax, tried["id"].tolist(), kinds, label=label, reference=1.0, band=band)
    for row in np.flatnonzero(shown != ratio).tolist():
        text, side = f" {ratio[row]:.2g} ", "left" if ratio[row] < 1 else "right"
        ax.text(shown[row], row, text, va="center", ha=side, fontsize=7)
    ax.set_xscale("log")
    ax.set_xlim(0.9 / limit, 1.1 * limit)
    axes.plain_log_ticks(ax.xaxis)
