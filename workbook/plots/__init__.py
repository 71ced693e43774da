"""Plots: draw tables on given axes, in base units; the index has cases or sizes, a column is a series."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from ddlkit.core.timeline import Timeline
from ddlkit.show import cost_fit as cost_fit
from ddlkit.show import cost_forms as cost_forms
from ddlkit.show import gantt as gantt
from ddlkit.show import lines as lines
from ddlkit.show import look as look
from ddlkit.show import points as points
from workbook.plots.shown import fold as fold
from workbook.plots.shown import on_this_machine as on_this_machine
from workbook.plots.shown import save_figure as save_figure
from workbook.plots.shown import table as table
from workbook.plots.shown import write_png as write_png
from workbook.plots.style import (
    FAINT,
    INK,
    WIDTH,
    Style,
    add_legend,
    case_rows,
    known,
    looks,
    name_bars,
    plain_log_ticks,
    time_unit,
)

Shared = bool | Literal["none", "all", "row", "col"]
"""Which axes have one scale, as ``plt.subplots`` takes it."""


def canvas(
    columns: int = 1,
    rows: int = 1,
    height: float = 3.2,
    *,
    sharex: Shared = False,
    sharey: Shared = False,
    squeeze: bool = True,
    height_ratios: Sequence[float] | None = None,
) -> tuple[Figure, Any]:
    """Return a themed figure so many inches high, and its axes as ``plt.subplots`` gives them."""
    return plt.subplots(
        rows,
        columns,
        figsize=(WIDTH, height),
        sharex=sharex,
        sharey=sharey,
        squeeze=squeeze,
        height_ratios=height_ratios,
    )


def heading(ax: Axes, text: str) -> None:
    """Set the bold title of a panel, at its left."""
    ax.set_title(text)


def title(figure: Figure, text: str) -> None:
    """Set what a figure of several panels shows, above them all, in lines as wide as it."""
    lines = textwrap.fill(
        text, int(figure.get_figwidth() / 0.082)
    )  # inches of a letter
    figure.suptitle(lines, x=0.01, ha="left", fontsize=9, fontweight="bold")


@contextmanager
def sheet(
    said: str = "",
    *,
    columns: int = 1,
    rows: int = 1,
    height: float = 3.2,
    sharex: Shared = False,
    sharey: Shared = False,
    squeeze: bool = True,
    height_ratios: Sequence[float] | None = None,
) -> Iterator[tuple[Figure, Any]]:
    """Give a `canvas` to draw on; on leaving, what it shows above, and below a legend of all panels."""
    figure, axes = canvas(
        columns,
        rows,
        height,
        sharex=sharex,
        sharey=sharey,
        squeeze=squeeze,
        height_ratios=height_ratios,
    )
    yield figure, axes
    _shared_legend(figure)
    if said:
        title(figure, said)


def _shared_legend(figure: Figure) -> None:
    named: dict[str, Any] = {}
    for ax in figure.axes:
        named |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(named.values(), named, loc="outside lower left", ncols=4)


def bars(
    ax: Axes,
    table: pd.DataFrame,
    *,
    label: str,
    stacked: bool = False,
    legend: str = "above",
    pairs: str = "",
) -> None:
    """Draw a group of bars per row, a bar per column, beside or upon each other.

    pairs : where every two rows belong together and have one name, what the text below the axis says
    """
    step, (rows, columns) = 2 if pairs else 1, table.shape
    middles = np.arange(rows) + (0.12 * (-1) ** np.arange(rows) if pairs else 0)
    width = 0.72 if stacked else 0.84 / columns
    heights = np.nan_to_num(table.to_numpy(dtype=float))
    bottoms = (
        np.cumsum(heights, axis=1) - heights if stacked else np.zeros_like(heights)
    )
    for k, style in enumerate(looks([str(name) for name in table.columns])):
        at = middles if stacked else middles + width * (k - (columns - 1) / 2)
        drawn = ax.bar(at, heights[:, k], width, bottoms[:, k], label=style.label)
        filled = {"facecolor": style.color, "hatch": style.hatch, "edgecolor": "white"}
        plt.setp(drawn.patches, linewidth=0.3, **filled)
    ax.set(xlabel=pairs, ylabel=label)
    add_legend(ax, legend)
    name_bars(
        ax, np.arange(0, rows, step) + (step - 1) / 2, [*map(str, table.index[::step])]
    )


def paired_bars(
    panels: Mapping[str, tuple[pd.DataFrame, str]], *, label: str
) -> tuple[Figure, Axes]:
    """Draw panels of pairs of stacked bars in seconds, and return empty axes below them."""
    heights = [2.0] * (len(panels) + 1)
    figure, axes = canvas(rows=len(heights), height=sum(heights), height_ratios=heights)
    for ax, (name, (parts, which)) in zip(axes, panels.items(), strict=False):
        factor, unit = time_unit(parts)
        bars(
            ax,
            factor * parts,
            label=f"{label} [{unit}]",
            stacked=True,
            legend="",
            pairs=which,
        )
        heading(ax, name)
    _shared_legend(figure)
    return figure, axes[-1]


def dots(
    ax: Axes,
    cases: Sequence[str],
    values: Mapping[str, ArrayLike] | pd.DataFrame,
    *,
    label: str,
    band: tuple[str, ArrayLike] | None = None,
    legend: str = "above",
) -> None:
    """Draw a row per case, a marker per series, in ``label``'s unit; band : name and half width, in grey."""
    rows = np.arange(len(cases))
    case_rows(ax, cases, 0.0)
    if band is not None:
        half = np.abs(np.asarray(band[1], dtype=float))
        ax.barh(rows, 2 * half, left=-half, height=0.62, color=FAINT, label=band[0])
    for style, name in zip(looks([*map(str, values)]), values, strict=True):
        points(ax, values[name], rows, style, size=4.5)
    ax.set_xlabel(label)
    add_legend(ax, legend)


def error_rows(
    ax: Axes,
    errors: Mapping[str, ArrayLike],
    *,
    label: str,
    styles: Sequence[Style] = (),
) -> None:
    """Draw one row of points for each name, with a bar at the median of its errors.

    The median of the absolute errors stands at the right of each row.

    errors : by name of the row (n,) relative errors, drawn in per cent
    styles : the style of each row; if none is given, all have the style of the model
    """
    case_rows(ax, [*errors], 0.0)
    styles = styles or [look("model")] * len(errors)
    for row, (style, shares) in enumerate(zip(styles, errors.values(), strict=True)):
        percent = 100 * np.asarray(shares, dtype=float)
        places = np.full(percent.size, row)
        (dots,) = ax.plot(percent, places, style.marker, markersize=4.5, alpha=0.45)
        dots.set(color=style.color, markerfacecolor=style.face)
        (bar,) = ax.plot(np.median(percent), row, "|", color=INK)
        bar.set(markersize=16, markeredgewidth=2.2)
        off = np.median(np.abs(percent))
        at_right = ax.get_yaxis_transform()
        number = ax.text(1.02, row, f"{off:.1f}%", transform=at_right)
        number.set(verticalalignment="center", fontweight="bold")
    ax.text(1.02, 1.02, "median\n|error|", transform=ax.transAxes, va="bottom")
    ax.set_xlabel(label)


def intervals(
    ax: Axes,
    cases: Sequence[str],
    ranges: Mapping[str, tuple[ArrayLike, ...]],
    *,
    label: str,
    printed: Mapping[str, tuple[float, float]] | None = None,
    mirrored: bool = False,
    reference: float = 0.0,
) -> None:
    """Draw a row per case, a thick line per series: (n,) lows and highs; markers at both, or at a third.

    printed : by name a range, shaded over all rows; ``mirrored``: it is one of sizes, of either sign
    """
    case_rows(ax, cases, reference)
    for (name, ends), hatch in zip(
        (printed or {}).items(), ("...", "///"), strict=False
    ):
        for sign in (1, -1)[: 1 + mirrored]:
            band = ax.axvspan(
                sign * ends[0], sign * ends[1], zorder=0, alpha=0.16, linewidth=0
            )
            color = look(name if known(name) else "paper").color
            band.set(color=color, hatch=hatch, label=f"paper: {name}")
    step = 0.7 / len(ranges)
    for k, (style, places) in enumerate(
        zip(looks(list(ranges)), ranges.values(), strict=True)
    ):
        row = np.arange(len(cases)) + step * (k - (len(ranges) - 1) / 2)
        ax.hlines(row, places[0], places[1], color=style.color, linewidth=3)
        for place, named in zip(places[2:] or places, (style.label, "_"), strict=False):
            points(ax, place, row, replace(style, label=named), size=4)
    ax.set_xlabel(label)


class Panel(NamedTuple):
    """A heat map: a number for each row and column, NaN where there is none, and lows and highs of 95%.

    names : what stands behind each number, if anything
    """

    grid: pd.DataFrame
    low: pd.DataFrame
    high: pd.DataFrame
    names: pd.DataFrame | None = None


def heat_maps(
    panels: Mapping[str, Panel],
    *,
    label: str,
    form: str = "{:.2f}",
    columns: int = 0,
    height: float = 2.5,
    log: bool = False,
) -> Figure:
    """Draw heat maps on one scale, red worse; log : of ratios.

    What may be no difference is in parentheses, and without a colour.
    """
    columns = columns or len(panels)
    lengths = [len(panel.grid) for panel in panels.values()]
    ratios = [
        max(lengths[first : first + columns])
        for first in range(0, len(lengths), columns)
    ]
    figure, axes = canvas(
        columns,
        len(ratios),
        height=len(ratios) * height,
        squeeze=False,
        height_ratios=ratios,
    )
    numbers = pd.concat([panel.grid.stack() for panel in panels.values()]).astype(float)
    low, high = numbers.min(), numbers.max()
    far = max(high, 1 / low) if log else max(abs(low), abs(high))
    scale = LogNorm(1 / far, far) if log else Normalize(-far, far)
    for ax, (name, panel) in zip(axes.flat, panels.items(), strict=False):
        _heat_map(ax, panel, scale, form)
        heading(ax, name)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    bar = figure.colorbar(
        axes.flat[0].collections[0], ax=axes, label=label, shrink=0.9, aspect=30
    )
    bar.ax.set_ylim(low, high)
    if log:
        plain_log_ticks(bar.ax.yaxis)
    return figure


def texts(panel: Panel, form: str, no_difference: float = 0.0) -> pd.DataFrame:
    """Return the numbers of a heat map as text, in parentheses those that may be no difference."""
    written = panel.grid.map(form.format, na_action="ignore").fillna("")
    return written.mask(_unsure(panel, no_difference), "(" + written + ")")


def _unsure(panel: Panel, no_difference: float) -> pd.DataFrame:
    """Return whose interval holds no difference; an interval without a width is exact."""
    held = (panel.low <= no_difference) & (panel.high >= no_difference)
    return held & (panel.low < panel.high)


def _heat_map(ax: Axes, panel: Panel, scale: Normalize, form: str) -> None:
    import seaborn as sns  # takes longer to import than all else here

    same = float(isinstance(scale, LogNorm))
    grid = panel.grid.mask(_unsure(panel, same), same)
    grid = grid.rename(columns=lambda name: str(name).replace("-", " "))
    text = texts(panel, form, same).to_numpy()
    if panel.names is not None:
        text = text + "   " + panel.names.fillna("").to_numpy()
    shape = {"annot": text, "fmt": "", "annot_kws": {"fontsize": 7}, "cbar": False}
    colors = "RdBu_r" if same else "RdBu"
    sns.heatmap(
        grid,
        ax=ax,
        norm=scale,
        cmap=colors,
        xticklabels=True,
        yticklabels=True,
        **shape,
    )
    long = max(len(str(name)) for name in grid) > 4
    leant = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    plt.setp(ax.get_xticklabels(), **(leant if long else {"rotation": 0}))
    plt.setp(ax.get_yticklabels(), rotation=0)
    ax.set(xlabel=grid.columns.name or "", ylabel=grid.index.name or "")
    ax.tick_params(length=0)
    ax.grid(visible=False)


def samples(
    ax: Axes,
    frame: pd.DataFrame,
    *,
    x: str,
    y: str = "seconds",
    series: str,
    center: str = "median",
    percent: float = 95,
) -> None:
    """Draw `lines` through the ``center`` of the samples at each ``x``, in bands with ``percent`` of them."""
    timed = y == "seconds"
    factor, unit = time_unit(frame[y]) if timed else (1.0, "")
    names, half = frame[series].unique(), percent / 200
    by_place = (factor * frame[y]).groupby([frame[x], frame[series]])
    low, high = (
        by_place.quantile(0.5 + side).unstack()[names] for side in (-half, half)
    )
    lines(
        ax,
        by_place.agg(center).unstack()[names],
        xlabel="message size" if timed else x,
        ylabel=f"time [{unit}]" if timed else y,
        log="by" if timed else "",
        legend="",
        ends=(low, high),
    )


def timelines(
    drawn: Mapping[str, Timeline], column: str, said: str = "", height: float = 1.5
) -> tuple[Figure, pd.DataFrame]:
    """Return a `gantt` of timelines, each so many inches high, and their spans, named in a column."""
    figure, axes = canvas(rows=len(drawn), height=height * len(drawn))
    gantt(axes, drawn)
    if said:
        title(figure, said)
    spans = [
        timeline.to_frame().assign(**{column: name}) for name, timeline in drawn.items()
    ]
    return figure, pd.concat(spans)
