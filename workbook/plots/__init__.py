"""Functions that draw tables on given axes.

Numbers are in base units. The index of a table has cases or sizes, and a column is a
series.
"""

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
from numpy.typing import ArrayLike, NDArray

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
    has_look,
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
    """Return a figure of the workbook's width and its axes.

    Parameters
    ----------
    columns, rows : int, optional
        The numbers of panels.
    height : float, optional
        The height of the figure in inches.
    sharex, sharey, squeeze, height_ratios : optional
        As for ``plt.subplots``.

    Returns
    -------
    figure : Figure
        The figure.
    axes : Axes or ndarray of Axes
        Its panels, as ``plt.subplots`` returns them.
    """
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


LETTER_INCHES = 0.082
"""The mean width of a letter in the title of a figure."""


def title(figure: Figure, text: str) -> None:
    """Set the title above all panels of a figure, in lines as wide as the figure."""
    letters = int(figure.get_figwidth() / LETTER_INCHES)
    lines = textwrap.fill(text, letters)
    figure.suptitle(lines, x=0.01, ha="left", fontsize=9, fontweight="bold")


@contextmanager
def sheet(
    heading: str = "",
    *,
    columns: int = 1,
    rows: int = 1,
    height: float = 3.2,
    sharex: Shared = False,
    sharey: Shared = False,
    squeeze: bool = True,
    height_ratios: Sequence[float] | None = None,
) -> Iterator[tuple[Figure, Any]]:
    """Give a `canvas` to draw on, and complete the figure when the drawing is done.

    Parameters
    ----------
    heading : str, optional
        The title above all panels.
    columns, rows, height, sharex, sharey, squeeze, height_ratios : optional
        As for `canvas`.

    Yields
    ------
    figure : Figure
        The figure. A legend of all panels is drawn below it at the end.
    axes : Axes or ndarray of Axes
        Its panels.
    """
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
    if heading:
        title(figure, heading)


def _shared_legend(figure: Figure) -> None:
    """Draw a legend of all panels below a figure, with each label once."""
    # Of several panels with one label, the mark of the last panel stands in the legend.
    by_label: dict[str, Any] = {}
    for ax in figure.axes:
        handles, labels = ax.get_legend_handles_labels()
        by_label.update(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label, loc="outside lower left", ncols=4)


def bars(
    ax: Axes,
    table: pd.DataFrame,
    *,
    label: str,
    stacked: bool = False,
    legend: str = "above",
    pairs: str = "",
) -> None:
    """Draw a group of bars for each row of a table, with a bar for each column.

    Parameters
    ----------
    ax : Axes
        The axes.
    table : DataFrame
        The heights, in the unit of the label. NaN counts as 0.
    label : str
        The label of the vertical axis.
    stacked : bool, optional
        Whether the bars of a group stand on top of each other instead of side by side.
    legend : str, optional
        The place of the legend, as `add_legend` takes it.
    pairs : str, optional
        The label of the horizontal axis. It also says that the first two rows are a pair, the
        next two as well, and so on. Both rows of a pair have the same name, which is written
        once. By default the axis has no label, and each row has a name of its own.
    """
    rows, columns = table.shape
    middles = _group_middles(rows, in_pairs=bool(pairs))
    heights = np.nan_to_num(table.to_numpy(dtype=float))
    if stacked:
        # All bars stand in the middle of their group, and each begins where the bars of the
        # columns before it end.
        width = 0.72
        offsets = np.zeros(columns)
        bottoms = np.cumsum(heights, axis=1) - heights
    else:
        # The bars stand on the axis, arranged evenly around the middle of their group. Groups
        # are 1 apart, and 0.16 of that is the gap between them.
        width = 0.84 / columns
        offsets = width * (np.arange(columns) - (columns - 1) / 2)
        bottoms = np.zeros_like(heights)
    for column, style in enumerate(looks([str(name) for name in table.columns])):
        drawn = ax.bar(
            middles + offsets[column],
            heights[:, column],
            width,
            bottoms[:, column],
            label=style.label,
        )
        plt.setp(
            drawn.patches,
            linewidth=0.3,
            facecolor=style.color,
            hatch=style.hatch,
            edgecolor="white",
        )
    ax.set(xlabel=pairs, ylabel=label)
    add_legend(ax, legend)
    # The name of a pair stands between its two groups, at 0.5, 2.5 and so on. Other names
    # stand at 0, 1 and so on.
    rows_per_name = 2 if pairs else 1
    places = np.arange(0, rows, rows_per_name) + (rows_per_name - 1) / 2
    name_bars(ax, places, [str(name) for name in table.index[::rows_per_name]])


def _group_middles(rows: int, *, in_pairs: bool) -> NDArray[np.float64]:
    """Return the middle of each group of bars on the horizontal axis, shape (rows,).

    Groups are 1 apart. With ``in_pairs``, each two successive groups are a pair, and are nearer
    to each other.
    """
    numbers = np.arange(rows)
    if not in_pairs:
        return numbers.astype(float)
    # The first group of a pair is moved to the right, and the second one to the left.
    return numbers + 0.12 * (-1) ** numbers


def paired_bars(
    panels: Mapping[str, tuple[pd.DataFrame, str]], *, label: str
) -> tuple[Figure, Axes]:
    """Draw panels of pairs of stacked bars.

    Parameters
    ----------
    panels : mapping of str to (DataFrame, str)
        A table and a text for each panel, by the heading of the panel. The table has the
        seconds of each part of each bar, with two rows for each pair, as `bars` takes it. The
        text is the label of the horizontal axis.
    label : str
        The label of the vertical axes, to which the unit is added.

    Returns
    -------
    figure : Figure
        The figure with a legend of all panels.
    ax : Axes
        Empty axes below the panels.
    """
    # There is one more panel, which is left empty for the caller to draw in.
    heights = [2.0] * (len(panels) + 1)
    figure, axes = canvas(rows=len(heights), height=sum(heights), height_ratios=heights)
    for ax, (name, (parts, pairs)) in zip(axes, panels.items(), strict=False):
        factor, unit = time_unit(parts)
        unit_label = f"{label} [{unit}]"
        bars(ax, factor * parts, label=unit_label, stacked=True, legend="", pairs=pairs)
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
    """Draw a row for each case, with a marker for each series.

    Parameters
    ----------
    ax : Axes
        The axes.
    cases : sequence of str
        The names of the n rows.
    values : mapping or DataFrame
        The n values of each series by its name, in the unit of the label.
    label : str
        The label of the horizontal axis.
    band : (str, ndarray of shape (n,)), optional
        The name of a grey band around 0, and half of its width in each row.
    legend : str, optional
        The place of the legend, as `add_legend` takes it.
    """
    rows = np.arange(len(cases))
    # The reference, a vertical line, is at 0, in the middle of the band.
    case_rows(ax, cases, reference=0.0)
    if band is not None:
        name, half_widths = band
        half = np.abs(np.asarray(half_widths, dtype=float))
        ax.barh(rows, 2 * half, left=-half, height=0.62, color=FAINT, label=name)
    styles = looks([str(name) for name in values])
    for style, name in zip(styles, values, strict=True):
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

    Parameters
    ----------
    ax : Axes
        The axes.
    errors : mapping of str to ndarray of shape (n,)
        Relative errors by the name of the row. They are drawn in per cent.
    label : str
        The label of the horizontal axis.
    styles : sequence of Style, optional
        The style of each row. By default all have the style of the model.
    """
    # The reference, a vertical line, is at no error.
    case_rows(ax, [*errors], reference=0.0)
    styles = styles or [look("model")] * len(errors)
    for row, (style, shares) in enumerate(zip(styles, errors.values(), strict=True)):
        percent = 100 * np.asarray(shares, dtype=float)
        places = np.full(percent.size, row)
        (markers,) = ax.plot(percent, places, style.marker, markersize=4.5, alpha=0.45)
        markers.set(color=style.color, markerfacecolor=style.face)
        (bar,) = ax.plot(np.median(percent), row, "|", color=INK)
        bar.set(markersize=16, markeredgewidth=2.2)
        median_error = np.median(np.abs(percent))
        # In this transform x is a share of the width of the axes, so that 1.02 is just to the
        # right of them, and y is a row.
        at_right = ax.get_yaxis_transform()
        number = ax.text(1.02, row, f"{median_error:.1f}%", transform=at_right)
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
    """Draw a row for each case, with a thick line for the interval of each series.

    Parameters
    ----------
    ax : Axes
        The axes.
    cases : sequence of str
        The names of the n rows.
    ranges : mapping of str to tuple of ndarray of shape (n,)
        The arrays of each series by its name: the lower and the upper ends of its intervals,
        and optionally a third array. Markers are drawn at the values of the third array, or
        at both ends if there is none.
    label : str
        The label of the horizontal axis.
    printed : mapping of str to (float, float), optional
        Ranges that a paper prints, by name. Each is shaded over all rows, in the colour of
        its name if that has a look.
    mirrored : bool, optional
        Whether printed ranges are of absolute values, so that they are also shaded at
        the other side of 0.
    reference : float, optional
        Where a line is drawn over all rows.
    """
    case_rows(ax, cases, reference)
    if printed is not None:
        _shade_printed(ax, printed, mirrored)
    # The lines of a row lie side by side in 0.7 of its height, around its middle.
    step = 0.7 / len(ranges)
    styles = looks(list(ranges))
    for series, (style, arrays) in enumerate(zip(styles, ranges.values(), strict=True)):
        rows = np.arange(len(cases)) + step * (series - (len(ranges) - 1) / 2)
        ax.hlines(rows, arrays[0], arrays[1], color=style.color, linewidth=3)
        # The third array if there is one, else both ends.
        marked = arrays[2:] or arrays
        # Each series has one entry in the legend, that of its first markers, because matplotlib
        # leaves out labels that begin with an underscore.
        for places, marker_label in zip(marked, (style.label, "_"), strict=False):
            points(ax, places, rows, replace(style, label=marker_label), size=4)
    ax.set_xlabel(label)


def _shade_printed(
    ax: Axes, printed: Mapping[str, tuple[float, float]], mirrored: bool
) -> None:
    """Shade ranges that a paper prints over all rows of `intervals`.

    ``printed`` has the ends of each range by its name, and the range has the colour of the name
    if that has a look. If ``mirrored``, each range is also shaded at the other side of 0.
    """
    # Hatches tell at most two printed ranges apart without colour. A third range would not be
    # drawn.
    hatches = ("...", "///")
    for (name, (first, last)), hatch in zip(printed.items(), hatches, strict=False):
        color = look(name if has_look(name) else "paper").color
        signs = (1, -1) if mirrored else (1,)
        for sign in signs:
            band = ax.axvspan(
                sign * first, sign * last, zorder=0, alpha=0.16, linewidth=0
            )
            band.set(color=color, hatch=hatch, label=f"paper: {name}")


class Panel(NamedTuple):
    """One heat map. All tables have the same rows and columns.

    Attributes
    ----------
    grid : DataFrame
        The numbers, NaN where there is none.
    low, high : DataFrame
        The ends of their 95% intervals.
    names : DataFrame, optional
        What is written after each number.
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
    """Draw heat maps with one scale of colours, in which red is worse.

    A number whose interval contains 0, or 1 if the number is a ratio, may be no real difference.
    It is in parentheses and without colour.

    Parameters
    ----------
    panels : mapping of str to Panel
        The heat maps by their headings.
    label : str
        The label of the scale of colours.
    form : str, optional
        The format of a number.
    columns : int, optional
        How many heat maps stand side by side. By default all.
    height : float, optional
        The height of a row of heat maps in inches.
    log : bool, optional
        Whether the numbers are ratios, whose scale is logarithmic.

    Returns
    -------
    Figure
    """
    columns = columns or len(panels)
    # How high the rows of panels are, relative to each other.
    row_heights = _row_lengths(list(panels.values()), columns)
    figure, axes = canvas(
        columns,
        len(row_heights),
        height=len(row_heights) * height,
        squeeze=False,
        height_ratios=row_heights,
    )
    grids = [panel.grid.stack() for panel in panels.values()]
    numbers = pd.concat(grids).astype(float)
    low = numbers.min()
    high = numbers.max()
    scale = _centred_scale(low, high, log)
    for ax, (name, panel) in zip(axes.flat, panels.items(), strict=False):
        _heat_map(ax, panel, scale, form)
        heading(ax, name)
    # The last row may have more axes than panels.
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    # All panels have the same scale of colours, so the colour bar takes that of the first one.
    drawn = axes.flat[0].collections[0]
    bar = figure.colorbar(drawn, ax=axes, label=label, shrink=0.9, aspect=30)
    # The scale is symmetrical, but the bar shows only the numbers that occur.
    bar.ax.set_ylim(low, high)
    if log:
        plain_log_ticks(bar.ax.yaxis)
    return figure


def _row_lengths(panels: Sequence[Panel], columns: int) -> list[int]:
    """Return how many rows the longest heat map has in each row of ``columns`` panels."""
    lengths = [len(panel.grid) for panel in panels]
    longest = []
    for first in range(0, len(lengths), columns):
        longest.append(max(lengths[first : first + columns]))
    return longest


def _centred_scale(low: float, high: float, log: bool) -> Normalize:
    """Return a scale of colours that contains ``low`` and ``high``.

    Its middle is no difference: 0, or a ratio of 1 on a logarithmic scale (``log``). Both of
    its ends are as far from the middle as the number that is farthest from it.
    """
    if log:
        # A ratio of 1/2 is as far from 1 as a ratio of 2.
        farthest = max(high, 1 / low)
        return LogNorm(1 / farthest, farthest)
    farthest = max(abs(low), abs(high))
    return Normalize(-farthest, farthest)


def texts(panel: Panel, form: str, no_difference: float = 0.0) -> pd.DataFrame:
    """Return the numbers of a heat map as text.

    Parameters
    ----------
    panel : Panel
        The heat map.
    form : str
        The format of a number.
    no_difference : float, optional
        The number that means no difference. Numbers whose interval contains it are in
        parentheses, except for exact numbers, whose interval has no width.

    Returns
    -------
    DataFrame
        The texts, "" where there is no number.
    """
    written = panel.grid.map(form.format, na_action="ignore").fillna("")
    return written.mask(_is_unsure(panel, no_difference), "(" + written + ")")


def _is_unsure(panel: Panel, no_difference: float) -> pd.DataFrame:
    """Return which numbers may be no real difference, by their intervals.

    The interval of such a number contains ``no_difference``. An interval without a width
    belongs to an exact number, which is never unsure.
    """
    contains = (panel.low <= no_difference) & (panel.high >= no_difference)
    return contains & (panel.low < panel.high)


def _heat_map(ax: Axes, panel: Panel, scale: Normalize, form: str) -> None:
    """Draw one panel of `heat_maps`.

    ``scale`` gives each number its colour, and ``form`` is the format of a number.
    """
    # It is imported only here, because that takes longer than to import all other modules.
    import seaborn as sns

    # Ratios are drawn on a logarithmic scale, and nothing else is.
    is_ratio = isinstance(scale, LogNorm)
    no_difference = 1.0 if is_ratio else 0.0
    # A number whose interval contains ``no_difference`` gets the colour of this value.
    unsure = _is_unsure(panel, no_difference)
    grid = panel.grid.mask(unsure, no_difference)
    # Hyphens join the words of a configuration, such as "free-idle", and are drawn as blanks.
    grid = grid.rename(columns=lambda name: str(name).replace("-", " "))
    text = texts(panel, form, no_difference).to_numpy()
    if panel.names is not None:
        # The name that belongs to a number, such as that of a configuration, stands after it.
        text = text + "   " + panel.names.fillna("").to_numpy()
    sns.heatmap(
        grid,
        ax=ax,
        norm=scale,
        # Red is worse: a large ratio, or a small gain.
        cmap="RdBu_r" if is_ratio else "RdBu",
        xticklabels=True,
        yticklabels=True,
        annot=text,
        fmt="",
        annot_kws={"fontsize": 7},
        cbar=False,
    )
    longest_name = max(len(str(name)) for name in grid)
    _rotate_names(ax, longest_name)
    ax.set(xlabel=grid.columns.name or "", ylabel=grid.index.name or "")
    ax.tick_params(length=0)
    ax.grid(visible=False)


def _rotate_names(ax: Axes, longest_name: int) -> None:
    """Set the angles of the names of rows and columns next to a heat map.

    ``longest_name`` is the number of letters of the longest name of a column. Names of more than
    4 letters would overlap if they were level, so that the names of columns are then slanted.
    """
    plt.setp(ax.get_yticklabels(), rotation=0)
    if longest_name > 4:
        plt.setp(ax.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    else:
        plt.setp(ax.get_xticklabels(), rotation=0)


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
    """Draw a line through the middle of the samples of each series, in a band with most of them.

    Parameters
    ----------
    ax : Axes
        The axes.
    frame : DataFrame
        The samples.
    x, y, series : str
        The columns of the sizes, of the measured values and of the names of the series. If y
        is "seconds", both axes are logarithmic, and the sizes are bytes.
    center : str, optional
        The statistic through which a line goes.
    percent : float, optional
        How many per cent of the samples at one size a band holds.
    """
    names = frame[series].unique()
    keys = [frame[x], frame[series]]
    # Times are drawn in the unit in which they read best. Other values are drawn as they are,
    # on linear axes.
    if y == "seconds":
        factor, unit = time_unit(frame[y])
        xlabel = "message size"
        ylabel = f"time [{unit}]"
        # Both axes are logarithmic: "b" is a horizontal one of bytes, and "y" the vertical one.
        log = "by"
    else:
        factor = 1.0
        xlabel = x
        ylabel = y
        log = ""
    grouped = (factor * frame[y]).groupby(keys)
    # Half of the samples in a band lie below the median, and half above it. With 95%, the band
    # goes from the quantile 0.025 to the quantile 0.975.
    half = percent / 100 / 2
    # `unstack` gives a row for each size and a column for each series. It sorts the series,
    # and ``names`` brings them back into the order in which they occur.
    low = grouped.quantile(0.5 - half).unstack()[names]
    high = grouped.quantile(0.5 + half).unstack()[names]
    lines(
        ax,
        grouped.agg(center).unstack()[names],
        xlabel=xlabel,
        ylabel=ylabel,
        log=log,
        legend="",
        ends=(low, high),
    )


def timelines(
    drawn: Mapping[str, Timeline], column: str, heading: str = "", height: float = 1.5
) -> tuple[Figure, pd.DataFrame]:
    """Draw timelines below each other.

    Parameters
    ----------
    drawn : mapping of str to Timeline
        The timelines by name.
    column : str
        The column of the table of spans that has the name of the timeline.
    heading : str, optional
        The title above all timelines.
    height : float, optional
        The height of one timeline in inches.

    Returns
    -------
    figure : Figure
        The figure with a panel for each timeline, drawn by `gantt`.
    spans : DataFrame
        The spans of all timelines and ranks, of which the figure shows those of rank 0.
    """
    figure, axes = canvas(rows=len(drawn), height=height * len(drawn))
    gantt(axes, drawn)
    if heading:
        title(figure, heading)
    spans = []
    for name, timeline in drawn.items():
        spans.append(timeline.to_frame().assign(**{column: name}))
    return figure, pd.concat(spans)
