"""Plots: functions that draw data on given axes, in one theme, with one look for each role.

Every function takes an Axes and numbers in base units (seconds, bytes) and puts units on the axes. What a
figure consists of is a table: its index the cases, sizes or workers, a column per series. Here are bars and
dots by case; curves, samples and fits against a size; timelines.

    graphs      graphs of tasks
    style       what a role, plan, cost form or span kind looks like; units, legends
    pages       figures and typeset tables, and the files they are kept in
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from numpy.typing import ArrayLike

from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit
from ddlkit.core.timeline import COMMUNICATION, KINDS, Timeline
from ddlkit.core.workload import Workload
from ddlkit.report.panels import Panel
from ddlkit.report.plots.graphs import task_graph as task_graph
from ddlkit.report.plots.graphs import tornado as tornado
from ddlkit.report.plots.pages import canvas as canvas
from ddlkit.report.plots.pages import heading as heading
from ddlkit.report.plots.pages import pictures as pictures
from ddlkit.report.plots.pages import save_figure as save_figure
from ddlkit.report.plots.pages import shared_legend as shared_legend
from ddlkit.report.plots.pages import table as table
from ddlkit.report.plots.pages import title as title
from ddlkit.report.plots.pages import write_png as write_png
from ddlkit.report.plots.shown import live_box as live_box
from ddlkit.report.plots.shown import measured_here as measured_here
from ddlkit.report.plots.style import (
    FAINT,
    INK,
    SOFT,
    WIDTH,
    Style,
    add_legend,
    known,
    looks,
    plain_log_ticks,
    set_log,
    theme,
    time_unit,
)
from ddlkit.report.plots.style import look as look

LETTER = 0.06  # inches of a letter under bars
WIDER = 0.072  # and under a heat map, where names stand close
APART = 0.12  # by which the two bars of a pair move towards each other
LEAST_DRAWN = 1e-3  # a relative error on a logarithmic axis
FEW = 30  # points of a line that are marked one by one
VISIBLE = (
    1.1  # upper over lower end of an interval that is broader than its line, on logarithmic axes
)
NEAR = 0.05  # relative error of a prediction
DARK = 0.3  # from the middle of a colour scale, from where on white is the better ink
EMULATED = "emulated:"  # before the names of links
RIMMED = 3  # size of a marker that has a white rim; smaller ones are many
NUMBERED = 12  # messages that carry the number of their group


@theme()
def bars(
    ax: Axes,
    table: pd.DataFrame,
    *,
    label: str,
    seconds: bool = False,
    stacked: bool = False,
    legend: str = "above",
    spread: tuple[str, ArrayLike, ArrayLike] | None = None,
    pairs: str = "",
) -> None:
    """A group of bars per row (its index names it), a bar per column, beside or upon each other.

    A column named as a plan or role has its look; ``legend`` is "above", "right" or "". Times in
    ``seconds`` are drawn in the unit that reads best, which then follows ``label``. NaN draws nothing.

    spread : its name and the least and most (n,) of each row's whole, in the table's unit; a line from one
        to the other
    pairs : where every two rows belong together and have one name, what the text below the axis says of them
    """
    factor = 1.0
    if seconds:
        factor, unit = time_unit(table.to_numpy())
        table, label = factor * table, f"{label} [{unit}]"
    styles = looks([str(name) for name in table.columns])
    colors, width = [style.color for style in styles], 0.72 if stacked else 0.84
    shape = {"stacked": stacked, "width": width, "edgecolor": "white", "linewidth": 0.3}
    table.plot.bar(ax=ax, color=colors, legend=False, rot=0, xlabel="", ylabel=label, **shape)
    for container, style in zip(ax.containers, styles, strict=True):
        plt.setp(container, hatch=style.hatch)
        container.set_label(style.label)
    if pairs:
        _pair(ax, pairs)
    if spread is not None:
        least, most = (factor * np.asarray(end, dtype=float) for end in spread[1:])
        line: dict[str, Any] = {"color": INK, "linewidth": 1.6, "zorder": 4}
        middle = [bar.get_x() + bar.get_width() / 2 for bar in ax.containers[0]]
        ax.vlines(middle, least, most, label=spread[0], **line)
        ax.autoscale(axis="y")
        ax.set_ylim(bottom=0)
    add_legend(ax, legend)
    whole = ax.get_figure(root=True)
    if legend == "right" and whole is not None and whole.get_layout_engine() is not None:
        whole.draw_without_rendering()  # the legend takes its width from the axes, and so from the names
    _name_bars(ax, [str(name) for name in table.index[:: 2 if pairs else 1]])
    ax.tick_params(axis="x", length=0)


def _pair(ax: Axes, said: str) -> None:
    """Move every two bars together, with one tick between them."""
    for container in ax.containers:
        for place, bar in enumerate(container):
            bar.set_x(bar.get_x() + (-APART if place % 2 else APART))
    ticks = np.asarray(ax.get_xticks())
    ax.set_xticks((ticks[::2] + ticks[1::2]) / 2)
    ax.set_xlabel(said)


def _name_bars(ax: Axes, names: Sequence[str]) -> None:
    """Names below groups of bars: in lines as long as a group is wide, or aslant if a word is longer."""
    inches = ax.bbox.width / ax.figure.dpi
    letters = max(1, int(inches / len(names) / LETTER))
    lines = [textwrap.wrap(name, letters, break_long_words=False) for name in names]
    if any(len(word) > letters for line in lines for word in line):
        ax.set_xticklabels(names, rotation=30, ha="right", rotation_mode="anchor")
    else:
        ax.set_xticklabels(["\n".join(line) for line in lines])


@theme()
def paired_bars(
    panels: Mapping[str, tuple[pd.DataFrame, str]], *, label: str, wide: bool = False
) -> tuple[Figure, Axes]:
    """Stacked bars in seconds, every two of them a pair; and axes for what stands beside the first panel.

    panels : by heading a table, and what `bars` says of its pairs; two in a row
    wide : the first panel has a row of its own, and so have the axes, below all others
    """
    first, *rest = panels
    rows = [[first, first] if wide else [first, ""]]
    rows += [[*rest[k : k + 2], "."][:2] for k in range(0, len(rest), 2)]
    high, low = 2.2 * len(rows) + 0.3, 3.8 * wide
    figure = plt.figure(figsize=(WIDTH, high + low))
    parts: Any = figure.subfigures(2, 1, height_ratios=(high, low)) if wide else [figure]
    above = parts[0]
    axes = above.subplot_mosaic(rows)
    for name, (bars_of, said) in panels.items():
        bars(axes[name], bars_of, label=label, seconds=True, stacked=True, pairs=said, legend="")
        heading(axes[name], name)
    handles, labels = axes[first].get_legend_handles_labels()
    above.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure, parts[1].subplots() if wide else axes[""]


@theme()
def outlined(ax: Axes, spans: Sequence[tuple[float, float]], role: str, *, label: str) -> None:
    """Upon a panel of `gantt`, from its first row on, where another says that each row begins and ends."""
    style = look(role)
    for row, (begin, end) in enumerate(spans):
        bar = ax.broken_barh(
            [(begin, end - begin)], (row - 0.43, 0.86), label="_" if row else label
        )
        bar.set(facecolor="none", edgecolor=style.color, linewidth=1.6, linestyle="--")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


@theme()
def cut(ax: Axes, wholes: ArrayLike, top: float) -> None:
    """Ends the axis of `bars` at ``top``; a bar that goes on beyond it says how long its whole (n,) is."""
    ax.set_ylim(0, top)
    beside = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    wholes = np.asarray(wholes, dtype=float)
    for place in np.flatnonzero(wholes > top):
        text = f"{wholes[place]:.3g}"
        ax.text(float(place), 0.93 * top, text, ha="center", fontsize=7, bbox=beside)


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
    _case_rows(ax, cases, reference)
    if band is not None:
        half = np.broadcast_to(np.abs(np.asarray(band[1], dtype=float)), place.shape)
        ax.barh(place, 2 * half, left=reference - half, height=0.62, color=FAINT, label=band[0])
    if interval is not None:
        ax.hlines(place, *interval, color=INK, label="95% interval")
    for style, name in zip(looks(list(values)), values, strict=True):
        _mark(ax, values[name], place, style, 4.5)
    ax.set_xlabel(label)
    add_legend(ax, legend)


@theme()
def dots_by_heading(panels: Mapping[str, tuple[str, pd.DataFrame]]) -> Figure:
    """Panels of `dots` under each other: by heading the label of the axis and a table of cases."""
    lengths = [len(rows) + 3 for _, rows in panels.values()]
    figure, axes = canvas(
        rows=len(panels),
        height=0.22 * sum(lengths) + 0.5,
        squeeze=False,
        gridspec_kw={"height_ratios": lengths},
    )
    for ax, (name, (label, rows)) in zip(axes.flat, panels.items(), strict=True):
        dots(ax, [str(case) for case in rows.index], rows, label=label, legend="right")
        heading(ax, name)
    return figure


@theme()
def heat_map(
    ax: Axes,
    panel: Panel,
    *,
    scale: Normalize,
    form: str = "{:.2f}",
    xlabel: str = "",
    ylabel: str = "",
) -> Any:
    """A number in each cell, its colour by a ``scale`` that maps of one figure share.

    A cell without a number stays empty; one that may well be no difference stands in parentheses. White is
    no difference, and colours get darker to both sides: blue is better, red worse. Which side it is, a
    number's sign says in grey. Returns what a colour bar takes.
    """
    grid, default = panel.grid, panel.default
    values, unsure = grid.to_numpy(dtype=float), panel.unsure()
    colors = (
        "RdBu_r" if isinstance(scale, LogNorm) else "RdBu"
    )  # a longer time is worse, a gain better
    image = ax.imshow(values, cmap=colors, norm=scale, aspect="auto")
    for place, value in np.ndenumerate(values):
        if np.isfinite(value):
            ink = "white" if abs(scale(value) - 0.5) > DARK else INK
            said = f"({form.format(value)})" if unsure[place] else form.format(value)
            ax.text(place[1], place[0], said, ha="center", va="center", color=ink, fontsize=7)
    if default is not None:
        column = grid.columns.get_loc(default[1])
        row, height = 0, len(grid)
        if default[0] is not None:
            row, height = grid.index.get_loc(default[0]), 1
        corner = (column - 0.5, row - 0.5)
        ax.add_patch(Rectangle(corner, 1, height, fill=False, edgecolor=INK, linewidth=2))
    names = [str(name).replace("-", " ") for name in grid.columns]
    ax.set_xticks(range(len(names)), names)
    inches = ax.bbox.width / ax.figure.dpi
    if max(map(len, names)) > inches / len(names) / WIDER:
        plt.setp(ax.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(grid)), [str(name) for name in grid.index])
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)
    return image


@theme()
def heat_maps(
    panels: Mapping[str, Panel],
    *,
    label: str,
    form: str = "{:.2f}",
    columns: int = 0,
    height: float = 2.5,
    log: bool = False,
    headings: Mapping[str, str] | None = None,
) -> Figure:
    """Heat maps by name, beside each other or in as many ``columns``, on one colour scale.

    The scale has no difference in its middle; of the bar beside it only what occurs is drawn.

    panels : names of a grid's axes go on them. ``label`` names the numbers; ``height`` is of a
        row of panels, in inches, where their grids have as many rows.
    log : the numbers are ratios, of which 1 is no difference: colours by their logarithms
    headings : what stands above each panel, its name where none is given
    """
    columns = columns or len(panels)
    rows = -(-len(panels) // columns)
    lengths = [len(panel.grid) for panel in panels.values()]
    ratios = [max(lengths[k * columns :][:columns]) for k in range(rows)]
    figure, axes = canvas(
        columns, rows, height=rows * height, squeeze=False, gridspec_kw={"height_ratios": ratios}
    )
    grids = [panel.grid.to_numpy(dtype=float).ravel() for panel in panels.values()]
    every = np.concatenate(grids)
    ends = float(np.nanmin(every)), float(np.nanmax(every))
    far = max(ends[1], 1 / ends[0], 1.01) if log else np.abs(ends).max() or 1.0
    scale = LogNorm(1 / far, far) if log else Normalize(-far, far)
    for ax, (name, panel) in zip(axes.flat, panels.items(), strict=False):
        words = {"xlabel": panel.grid.columns.name or "", "ylabel": panel.grid.index.name or ""}
        image = heat_map(ax, panel, scale=scale, form=form, **words)
        heading(ax, (headings or {}).get(name, name))
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=30)
    bar.set_label(label)
    if ends[0] < ends[1]:
        bar.ax.set_ylim(*ends)
    if log:
        plain_log_ticks(bar.ax.yaxis)
    bar.outline.set(visible=False)
    return figure


@theme()
def intervals(
    ax: Axes,
    cases: Sequence[str],
    ranges: Mapping[str, tuple[ArrayLike, ...]],
    *,
    label: str,
    printed: Mapping[str, tuple[float, float]] | None = None,
    reference: float = 0.0,
    legend: str = "above",
) -> None:
    """A row per case, in it a thick line per series, from low to high: name -> (n,) lows and (n,) highs.

    Markers stand at both ends, or at a third (n,) where there is one: the best or middle of each range. A
    range of no width is a dot. printed : what a paper prints as a range, by name, shaded over all rows.
    """
    _case_rows(ax, cases, reference)
    hatches = ("...", "///")
    for (name, (least, most)), hatch in zip((printed or {}).items(), hatches, strict=False):
        color = look(name if known(name) else "paper").color
        band = ax.axvspan(least, most, zorder=0, color=color, alpha=0.16, linewidth=0)
        band.set(hatch=hatch, label=f"paper: {name}")
    step = 0.7 / len(ranges)
    for k, (style, ends) in enumerate(zip(looks(list(ranges)), ranges.values(), strict=True)):
        row = np.arange(len(cases)) + step * (k - (len(ranges) - 1) / 2)
        ax.hlines(row, ends[0], ends[1], color=style.color, linewidth=3)
        for end, named in zip(ends[2:] or ends, (style.label, "_"), strict=False):
            _mark(ax, end, row, replace(style, label=named), 4)
    ax.set_xlabel(label)
    add_legend(ax, legend)


@theme()
def ribbon(
    ax: Axes,
    x: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
    name: str,
    names: Sequence[str],
    *,
    label: str = "_",
) -> None:
    """What lies between (n,) lows and highs, behind the line ``name`` of `lines` with columns ``names``."""
    color = looks(names)[list(names).index(name)].color
    x, low, high = (np.asarray(values, dtype=float) for values in (x, low, high))
    ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0, zorder=0, label=label)


@theme()
def limit(ax: Axes, x: ArrayLike, y: ArrayLike, *, label: str) -> None:
    """A thin grey line through (n,) places that nothing can pass; of several, the legend has one."""
    known = ax.get_legend_handles_labels()[1]
    named = "_" if label in known else label
    ax.plot(x, y, color=SOFT, linewidth=0.8, zorder=1, label=named)


@theme()
def level(ax: Axes, value: float, role: str, *, label: str) -> None:
    """A line of a role across the axes, at a value that belongs to no place on the other axis."""
    style = look(role)
    ax.axhline(value, color=style.color, linestyle=style.line, linewidth=1, label=label)


@theme()
def trace(ax: Axes, x: ArrayLike, y: ArrayLike, role: str, *, label: str) -> None:
    """A thin line of a role through (n,) places, as of what a paper prints, beside what else is drawn."""
    style = look(role)
    ax.plot(x, y, color=style.color, linestyle=style.line, linewidth=1.2, label=label)


@theme()
def dots_by_group(ax: Axes, groups: Sequence[str], values: ArrayLike, *, label: str) -> None:
    """The model's numbers (n,), one point each, in a row per group (n,); a bar marks the median."""
    points = pd.Series(np.asarray(values, dtype=float)).groupby(list(groups), sort=False)
    _case_rows(ax, [str(name) for name, _ in points], 0.0)
    (style,) = looks(["model"])
    for row, (_, of_group) in enumerate(points):
        inside = np.sort(of_group)
        # Spread evenly, not at random: the same data draw the same picture.
        spread = row + 0.5 * (np.arange(len(inside)) % 5 / 4 - 0.5)
        ax.plot(inside, spread, style.marker, color=style.color, markersize=3, alpha=0.6)
        ax.plot([np.median(inside)] * 2, [row - 0.36, row + 0.36], color=INK, linewidth=2)
    ax.set_xlabel(label)


@theme()
def points(
    ax: Axes, x: ArrayLike, y: ArrayLike, role: str, *, label: str = "", size: float = 8
) -> None:
    """Markers of a role at (n,) places, as what a paper prints or what was measured, upon lines."""
    _mark(ax, x, y, look(role), size, label)


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
        y = table.iloc[:, place].to_numpy(dtype=float)
        marker = style.marker if len(x) <= FEW else ""
        (line,) = ax.plot(x, y, linestyle=style.line, marker=marker, markersize=4)
        line.set(color=style.color, markerfacecolor=style.face, label=style.label)
    set_log(ax, log)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    add_legend(ax, legend)


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
    unit: str = "",
) -> None:
    """A line through the ``center`` of the samples at each ``x``, in a band that holds ``percent`` of them.

    ``x``, ``y`` and ``series`` are columns; values of the last name the lines. Times in seconds are drawn
    against sizes, in bytes or elements, on logarithmic axes, in the ``unit`` that reads best or in "ms".
    """
    import seaborn as sns  # takes longer to import than all else here

    timed = y == "seconds"
    factor, unit = time_unit(frame[y], unit) if timed else (1.0, "")
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
        set_log(ax, "by" if x == "bytes" else "xy")
    ax.set_xlabel("message size" if x == "bytes" else x)
    ax.set_ylabel(f"time [{unit}]" if timed else y.replace("_", " "))
    add_legend(ax, legend)


@theme()
def cost_fit(
    ax: Axes, *fits: Fit[Any], density: float | None = None, names: Sequence[str] = ()
) -> None:
    """Costs fitted to the same data: samples, their medians, and the fitted lines with 95% intervals.

    fits : of messages, or of selections, of which those at one ``density`` are drawn. A fit without draws
    has no interval. ``names``: the forms as they were asked for ("alpha_beta:ends"), to look like that.
    Raises UserError for a density that was not measured.
    """
    at, seconds = fits[0].at, fits[0].seconds
    chosen = np.full(len(seconds), True)
    if density is not None:
        chosen = np.isclose(at[1], density)
    if not chosen.any():
        raise UserError(f"density {density:g} was not measured: there are {np.unique(at[1])}")
    sizes, seconds = at[0][chosen], seconds[chosen]
    medians = pd.Series(seconds).groupby(sizes).median()
    scale, unit = time_unit(medians)
    grid = np.geomspace(sizes.min(), sizes.max(), 200)
    place = [grid] if density is None else [grid, np.full_like(grid, density)]
    ax.plot(sizes, seconds * scale, ".", color=SOFT, markersize=2.5, alpha=0.5, zorder=1)
    for fit, style in zip(fits, looks(names or [fit.form for fit in fits]), strict=True):
        label = style.label
        if fit.draws:
            low, high = (scale * limit for limit in fit.interval(*place))
            ax.fill_between(grid, low, high, color=style.color, alpha=0.25, linewidth=0)
            seen = np.max(high / np.maximum(low, np.finfo(float).tiny)) > VISIBLE
            label += ", 95% interval" if seen else ", 95% interval within it"
        line = scale * fit.cost(*place)
        ax.plot(grid, line, color=style.color, linestyle=style.line, label=label)
    points(ax, medians.index, scale * medians, "measured", label="measured, median", size=4)
    messages = density is None
    set_log(ax, "by" if messages else "xy")
    what = fits[0].cost.collective.replace("_", "-") if messages else "selection"
    ax.set(xlabel="message size" if messages else "elements", ylabel=f"{what} time [{unit}]")
    add_legend(ax, "inside")


@theme()
def cost_forms(
    fits: Mapping[str, Fit[Any]],
    off: Mapping[str, tuple[ArrayLike, ArrayLike]],
    chosen: str,
) -> Figure:
    """Forms fitted to the same messages: their times, and below what each is off by at sizes left out.

    fits : by form; off : by form (k,) sizes left out and signed relative errors there; chosen : drawn thick
    """
    figure, (above, below) = canvas(rows=2, height=6.4, sharex=True)
    order = sorted(fits, key=lambda form: form == chosen)  # the chosen one on top
    one = fits[chosen]
    medians = pd.Series(one.seconds).groupby(one.bytes).median()
    scale, unit = time_unit(medians)
    grid = np.geomspace(medians.index.min(), medians.index.max(), 600)
    for form, style in zip(order, looks(order), strict=True):
        width = 2.2 if form == chosen else 0.9
        shape = {"color": style.color, "linestyle": style.line, "linewidth": width}
        label = f"{style.label} (chosen)" if form == chosen else style.label
        above.plot(grid, scale * fits[form].cost(grid), label=label, **shape)
        if form in off:
            at, error = (np.asarray(values, dtype=float) for values in off[form])
            shown = 100 * np.maximum(np.abs(error), LEAST_DRAWN)
            below.plot(at, shown, marker=style.marker, markersize=3.5, **shape)
    points(above, medians.index, scale * medians, "measured", label="measured, median", size=4)
    for ax in (above, below):
        set_log(ax, "by")
    above.set_ylabel(f"{one.cost.collective.replace('_', '-')} time [{unit}]")
    below.set(xlabel="message size", ylabel="error at held-out sizes [%]")
    below.set_ylim(bottom=90 * LEAST_DRAWN)
    above.tick_params(labelbottom=False)
    handles, labels = above.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
    return figure


@theme()
def predicted_vs_measured(
    ax: Axes,
    measured_s: ArrayLike,
    predicted_s: Mapping[str, ArrayLike],
    *,
    quantity: str = "iteration time",
) -> None:
    """Predictions (role -> (n,) seconds) against the measured (n,); on the diagonal they agree.

    Both axes are logarithmic, so equal distances are equal relative errors; the band marks errors
    of at most 5%. Only positive times can be drawn.
    """
    table = pd.DataFrame({role: np.asarray(values) for role, values in predicted_s.items()})
    table.index = pd.Index(np.asarray(measured_s, dtype=float))
    everything = table.reset_index().to_numpy(dtype=float)
    scale, unit = time_unit(everything)
    positive = everything[everything > 0] * scale
    if not positive.size:
        raise UserError(f"no {quantity} above zero to draw")
    line = np.array([positive.min() / 1.1, positive.max() * 1.1])
    ax.plot(line, line, color=SOFT, linewidth=0.8, zorder=1)
    ax.fill_between(line, line * (1 - NEAR), line * (1 + NEAR), color=FAINT, linewidth=0, zorder=0)
    for role in sorted(table, key=lambda role: role == "model"):  # the model's on top
        points(ax, scale * table.index, scale * table[role], str(role), size=4.5)
    ax.set(xscale="log", yscale="log", xlim=tuple(line), ylim=tuple(line), aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        plain_log_ticks(axis)
    ax.grid(True, axis="both")
    ax.set(xlabel=f"measured {quantity} [{unit}]", ylabel=f"predicted {quantity} [{unit}]")
    handles, labels = ax.get_legend_handles_labels()
    handles, labels = [*handles[::-1], Patch(color=FAINT)], [*labels[::-1], f"within ±{NEAR:.0%}"]
    ax.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _case_rows(ax: Axes, names: Sequence[str], reference: float) -> None:
    """One row per name, the first on top, and a line where values are as the reference.

    An emulated link is known by its delay: its prefix takes half of a row and says no more.
    """
    ax.axvline(reference, color=SOFT, linewidth=0.8)
    ax.set_yticks(range(len(names)), [name.replace(EMULATED, "") for name in names])
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="both")


def _mark(ax: Axes, x: ArrayLike, y: ArrayLike, style: Style, size: float, label: str = "") -> None:
    """Markers of a style at (n,) places, in a white rim that tells them from bars of their colour."""
    ax.plot(
        np.asarray(x, dtype=float),
        np.asarray(y, dtype=float),
        style.marker,
        color=style.color,
        markerfacecolor=style.face,
        markersize=size,
        label=label or style.label,
        path_effects=[withStroke(linewidth=2.5, foreground="white")] if size > RIMMED else None,
    )


@theme()
def gantt(axes: Axes | np.ndarray, timelines: Mapping[str, Timeline], *, rank: int = 0) -> None:
    """One rank's spans as bars, a row per stream; timelines (by heading) under each other on one time axis.

    Above each stands how long it is and its exposed communication. Up to 12 messages carry their group's
    number. Raises UserError when there is no span of that rank.
    """
    chosen = {name: spans.select(spans.rank == rank) for name, spans in timelines.items()}
    if not all(spans.n for spans in chosen.values()):
        raise UserError(f"no span of rank {rank} to draw")
    longest_s = max(spans.duration_s for spans in chosen.values())
    scale, unit = time_unit(longest_s)
    panels = np.atleast_1d(np.asarray(axes, dtype=object))
    for ax, (name, spans) in zip(panels, chosen.items(), strict=True):
        _bars(ax, spans, scale)
        ax.set_xlim(0, longest_s * scale * 1.005)
        total, exposed = spans.duration_s * scale, spans.exposed_communication_s() * scale
        text = f"{total:.3g} {unit}, exposed communication {exposed:.3g} {unit}"
        ax.set_title(text, loc="right", fontweight="normal", fontsize=7.5, color=SOFT)
        ax.set_title(name)
        ax.tick_params(axis="x", labelbottom=ax is panels[-1])
    panels[-1].set_xlabel(f"time [{unit}]")
    kinds = [k for k in KINDS if any(np.any(spans.kind == k) for spans in chosen.values())]
    patches = [
        Patch(facecolor=style.color, edgecolor="white", hatch=style.hatch, label=style.label)
        for style in looks(kinds)
    ]
    panels[0].legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0))


@theme()
def layer_profile(ax: Axes, workloads: Mapping[str, Workload], *, legend: str = "right") -> None:
    """How gradients become ready: their share against time, from the start of the iteration.

    The flat beginning is the forward pass, its end is marked; a high step is a large tensor; a
    climb close to the end leaves little to hide its communication behind.
    """
    scale, unit = time_unit([workload.ready_s[-1] for workload in workloads.values()])
    for style, workload in zip(looks(list(workloads)), workloads.values(), strict=True):
        time = np.concatenate([[0.0, workload.forward_s], workload.ready_s]) * scale
        ready = np.concatenate([[0.0, 0.0], np.cumsum(workload.bytes)])
        label = f"{style.label}, {units.format_bytes(ready[-1])}"
        share = 100 * ready / ready[-1]
        ax.step(time, share, where="post", color=style.color, linestyle=style.line, label=label)
        ax.plot([time[1]], [0], "|", color=style.color, markersize=9, clip_on=False)
    ax.plot([], [], "|", color=SOFT, markersize=9, label="end of forward")
    ax.set_xlabel(f"time from the start of the iteration [{unit}]")
    ax.set_ylabel("gradients ready [% of bytes]")
    ax.set_xlim(left=0)
    ax.set_ylim(0, 105)
    add_legend(ax, legend)


def _bars(ax: Axes, spans: Timeline, scale: float) -> None:
    """Draw spans on the axes from time zero; number the messages if they are few and wide enough."""
    streams = list(dict.fromkeys(spans.stream.tolist()))
    lefts = (spans.start_s - spans.start_s.min()) * scale
    widths = (spans.end_s - spans.start_s) * scale
    rows = np.array([streams.index(stream) for stream in spans.stream.tolist()])
    for kind, row in dict.fromkeys(zip(spans.kind.tolist(), rows.tolist(), strict=True)):
        here, style = (spans.kind == kind) & (rows == row), look(kind)
        ax.broken_barh(
            np.column_stack([lefts[here], widths[here]]).tolist(),
            (row - 0.36, 0.72),
            facecolor=style.color,
            edgecolor="white" if here.sum() <= 60 else "none",
            linewidth=0.4,
            hatch=style.hatch,
        )
    messages = np.flatnonzero(np.isin(spans.kind, COMMUNICATION))
    wide = messages[widths[messages] > 0.03 * spans.duration_s * scale]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}
    for k in wide if len(messages) <= NUMBERED else ():
        middle, group = lefts[k] + widths[k] / 2, str(spans.group[k])
        ax.text(middle, rows[k], group, ha="center", va="center", fontsize=7, bbox=box)
    ax.set_yticks(range(len(streams)), streams)
    ax.set_ylim(len(streams) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
