"""Drawings of the library: fitted costs, timelines, and the page of an advice.

This module also says how each name looks: its colour, marker, line and hatch. Two looks differ
also without colour. The extra ``ddlkit[plot]`` installs matplotlib and Jinja2, which are
imported only where they are needed.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core import scaling, units
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit
from ddlkit.core.plan import PLANNERS
from ddlkit.core.timeline import KINDS, Timeline
from ddlkit.model.advice import DEFAULT, Advice
from ddlkit.model.scaling import Count, Scaling
from ddlkit.store.files import atomic_write, atomic_write_text, read_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

THEME = Path(__file__).with_suffix(".mplstyle")
PAGE = Path(__file__).with_suffix(".html")
WIDTH = 7.2
"""Width of a figure in inches."""
SOFT = "#6f6f6f"
"""Colour of what is not the point of a figure."""

DRAWING = ("matplotlib",)
"""What a drawing needs."""
WRITING_A_PAGE = ("matplotlib", "jinja2")
"""What the page of an advice needs."""


def needs(what: str, modules: Sequence[str]) -> None:
    """Raise UserError unless the modules that a result needs are installed.

    Parameters
    ----------
    what : str
        The result or the option that needs the modules, as in "--html".
    modules : sequence of str
        The names of the modules.

    Raises
    ------
    UserError
        If a module is not installed.
    """
    absent = [name for name in modules if find_spec(name) is None]
    if absent:
        raise UserError(
            f"{what} needs {' and '.join(absent)}: pip install 'ddlkit[plot]'"
        )


# ---------------------------------------------------------------- how names look


@dataclass(frozen=True)
class Style:
    """How a name looks wherever it is drawn.

    Attributes
    ----------
    label : str
        What a legend calls it.
    color : str
        A colour as "#rrggbb".
    marker : str
        A marker of matplotlib.
    line : str or tuple
        A line style of matplotlib.
    hatch : str
        A hatch of matplotlib.
    hollow : bool
        Whether its markers are white inside.
    """

    label: str
    color: str
    marker: str = ""
    line: Any = "-"
    hatch: str = ""
    hollow: bool = False

    @property
    def face(self) -> str:
        """Return the colour inside its markers."""
        return "white" if self.hollow else self.color


ROLES = {
    "measured": Style("measured", "#1b1b1b", "o", hollow=True),
    "model": Style("model", "#00588f", "D", "--", "///"),
}
FORMS = {
    "ring_all_reduce": Style("ring, Eq 7", "#b3568a", "v", "--"),
    "alpha_beta": Style("line, relative error", "#d55e00", "s", ":"),
    "alpha_beta:medians": Style("line, medians", "#009e73", "P", (0, [5, 1])),
    "alpha_beta:ends": Style("line, both ends", "#4fc29c", "d", (0, [2, 1])),
    "piecewise": Style("log / linear", "#e0a000", "^", "-."),
    "chords": Style("straight table", "#b0487a", "*", (0, [6, 1, 1, 1])),
    "segments": Style("linear pieces", "#00588f", "D"),
    "table": Style("table", "#1b1b1b", "o", "--"),
}
"""Forms of a message cost."""

SPANS = {
    "io": Style("input", "#bdbdbd", hatch="||||"),
    "decode": Style("decode", "#6b5b95", hatch="ooo"),
    "h2d": Style("copy to device", "#8f8f8f", hatch="----"),
    "forward": Style("forward", "#a9d3f0"),
    "backward": Style("backward", "#4a94c8"),
    "sparsify": Style("sparsify", "#b3568a", hatch="..."),
    "negotiate": Style("negotiate", "#f0c9e0", hatch="++++"),
    "wait": Style("wait", "#f2f2f2"),
    "update": Style("update", "#00664b", hatch="xxxx"),
    "all_reduce": Style("all-reduce", "#c14d00", hatch="////"),
    "all_gather": Style("all-gather", "#e0a000", hatch="\\\\"),
    "reduce_scatter": Style("reduce-scatter", "#8a6d00", hatch="----"),
}
"""Kinds of spans of a timeline; every collective is one."""

LOOKS: dict[str, Style] = {**ROLES, **FORMS, **SPANS}
"""Every name that has a look; the workbook adds its own."""

GREY = "#8f8f8f"
"""Colour of a planner without a look of its own."""
SERIES = (
    ("#00588f", "D", "-", ""),
    ("#d55e00", "s", "--", "///"),
    ("#1b1b1b", "o", "-.", "..."),
    ("#e0a000", "^", ":", "xxx"),
    ("#009e73", "v", "-", "\\\\\\"),
    ("#b3568a", "P", "--", "|||"),
    ("#7fc4ee", "X", "-.", "+++"),
)
"""Colour, marker, line and hatch of other names, by their position among all names."""


def _exact_look(name: str) -> Style | None:
    """Return the look of exactly this name, None if it has none.

    A planner without a look of its own is grey.
    """
    if name in LOOKS:
        return LOOKS[name]
    if name in PLANNERS:
        return Style(name, GREY)
    return None


def _without_argument(name: str) -> str:
    """Return a name such as "buffer:25MB" up to its colon: "buffer"."""
    return name.partition(":")[0]


def has_look(name: str) -> bool:
    """Return whether a name has a look, such as a colour, which `look` then returns.

    Parameters
    ----------
    name : str
        A role, plan, cost form or kind of span, with an argument or without.

    Returns
    -------
    bool
        Whether the name has a look.

    Examples
    --------
    >>> has_look("piecewise:45KB"), has_look("a colleague")
    (True, False)
    """
    head = _without_argument(name)
    return _exact_look(name) is not None or _exact_look(head) is not None


def look(name: str) -> Style:
    """Return the look of a name: its label, colour, marker, line and hatch.

    Parameters
    ----------
    name : str
        A role, plan, cost form or kind of span. A name with an argument, as in "buffer:25MB",
        may have a look of its own. Otherwise it has the look of the name without the argument,
        and the argument is added to the label.

    Returns
    -------
    Style
        The look.

    Raises
    ------
    UserError
        If the name has no look.

    Examples
    --------
    >>> look("piecewise:45KB").label, look("piecewise:45KB").color == look("piecewise").color
    ('log / linear 45KB', True)
    """
    look_of_name = _exact_look(name)
    if look_of_name:
        return look_of_name
    head, _, argument = name.partition(":")
    style = _exact_look(head)
    if style is None:
        raise UserError(
            f"no style for {name!r}: use a role, plan, cost form or span kind"
        )
    # A name such as "buffer:" has an empty argument.
    if not argument:
        return style
    return replace(style, label=f"{style.label} {argument}")


def looks(names: Sequence[str]) -> list[Style]:
    """Return looks for the series of one drawing.

    Parameters
    ----------
    names : sequence of str
        The names of the series.

    Returns
    -------
    list of Style
        A look for each name. A name that has no look gets one of `SERIES` by its position. If
        several names share a look, all but the first one are darker and hollow.
    """
    styles: list[Style] = []
    # Names such as "buffer:10MB" and "buffer:25MB" differ only in their arguments and share a
    # look, so both have the head "buffer". A name such as "alpha_beta:ends" has a look of its
    # own, so its head is the whole name.
    earlier_heads: set[str] = set()
    for position, name in enumerate(names):
        head = name if _exact_look(name) else _without_argument(name)
        if not has_look(name):
            # With more names than looks, the looks begin again.
            color, marker, line, hatch = SERIES[position % len(SERIES)]
            styles.append(Style(name, color, marker, line, hatch))
        elif head in earlier_heads:
            styles.append(_darker(look(name)))
        else:
            styles.append(look(name))
        earlier_heads.add(head)
    return styles


def _darker(style: Style) -> Style:
    """Return a darker look of the same hue, with another line and hatch and hollow markers."""
    from matplotlib.colors import to_hex, to_rgb

    # With about half of the light, the hue stays and the two colours can be told apart.
    red, green, blue = to_rgb(style.color)
    color = to_hex((0.55 * red, 0.55 * green, 0.55 * blue))
    return replace(style, color=color, line=(0, (3, 1)), hatch="|||", hollow=True)


# ---------------------------------------------------------------- axes and units


def time_unit(seconds: ArrayLike) -> tuple[float, str]:
    """Return the unit in which times read best.

    Parameters
    ----------
    seconds : array_like
        Times in seconds.

    Returns
    -------
    factor : float
        The number of these units in a second.
    name : str
        The unit: "s" if the longest time is at least 1 s, else "ms" if it is at least 1 ms,
        else "µs".

    Examples
    --------
    >>> time_unit([2e-3, 0.5e-3])
    (1000.0, 'ms')
    """
    # Missing times (NaN) do not count. Of negative differences of times, the size counts.
    longest_s = float(np.nanmax(np.abs(np.asarray(seconds, dtype=float))))
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if longest_s * factor >= 1:
            return factor, name
    return 1e6, "µs"


def set_log(ax: Axes, log: str) -> None:
    """Make axes logarithmic.

    Parameters
    ----------
    ax : Axes
        The axes to change.
    log : str
        Which of them become logarithmic, a letter for each: "x", "y", and "b" for an x axis of
        message sizes in bytes. With "by", both axes become logarithmic, and x is in bytes.
        With "", neither axis does.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if "x" in log:
        ax.set_xscale("log")
        plain_log_ticks(ax.xaxis)
    if "y" in log:
        ax.set_yscale("log")
        plain_log_ticks(ax.yaxis)
    if "b" in log:
        # With base 2, the labels are round sizes such as "256 KiB". They are wide, so there
        # are few of them.
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
        ax.xaxis.set_minor_locator(NullLocator())
        # matplotlib also passes the position of a tick, which is not used.
        ax.xaxis.set_major_formatter(
            FuncFormatter(lambda size, _: units.format_bytes(size))
        )


def plain_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, as 500, instead of powers of ten.

    Parameters
    ----------
    axis : Axis
        The axis. An axis whose ends differ by less than a factor of 6 gets round numbers at
        even distances. One of up to three decades gets the numbers 1, 2 and 5 of each decade,
        and a longer one gets the decades alone.
    """
    from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    locator: Locator
    # A short axis would have few of the numbers 1, 2 and 5. A long axis has no room for all of
    # them.
    if 0 < high < 6 * low:
        locator = MaxNLocator(nbins=6)
    elif high > 1e3 * low:
        locator = LogLocator()
    else:
        locator = LogLocator(subs=(1.0, 2.0, 5.0))
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def add_legend(ax: Axes, place: str) -> None:
    """Add a legend to axes.

    Parameters
    ----------
    ax : Axes
        The axes, whose labels the legend has.
    place : str
        "above" the axes, to the "right" of them, "inside" them, or "" for no legend.
    """
    if not place:
        return
    _, labels = ax.get_legend_handles_labels()
    # The corner "loc" of the legend is put at the point "bbox_to_anchor", whose numbers are
    # shares of the width and the height of the axes.
    places: dict[str, dict[str, Any]] = {
        "above": {
            "loc": "lower left",
            "bbox_to_anchor": (0, 1),
            # At most four labels stand side by side.
            "ncols": min(4, len(labels)),
        },
        "right": {"loc": "upper left", "bbox_to_anchor": (1, 1)},
        "inside": {"loc": "upper left"},
    }
    ax.legend(**places[place])


# ---------------------------------------------------------------- drawing on given axes


def points(
    ax: Axes,
    x: ArrayLike,
    y: ArrayLike,
    role: str | Style,
    *,
    label: str = "",
    size: float = 7,
) -> None:
    """Draw a marker at each of n points, without a line between them.

    Parameters
    ----------
    ax : Axes
        Where it is drawn.
    x, y : array_like, shape (n,)
        Where the markers are.
    role : str or Style
        The look of the markers, or a name whose look they have.
    label : str, optional
        What the legend calls the markers. By default it is the label of the look.
    size : float, optional
        The size of a marker in points.
    """
    style = look(role) if isinstance(role, str) else role
    x = np.asarray(x, dtype=float)
    y = np.asarray(y, dtype=float)
    (line,) = ax.plot(x, y, style.marker, color=style.color, markersize=size)
    line.set(markerfacecolor=style.face, label=label or style.label)


MOST_MARKERS = 30
"""A line with more points than this is drawn without markers."""


def lines(
    ax: Axes,
    table: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    log: str = "",
    legend: str = "above",
    ends: tuple[pd.DataFrame, pd.DataFrame] | None = None,
) -> None:
    """Draw a line for each column of a table.

    Parameters
    ----------
    ax : Axes
        Where it is drawn.
    table : DataFrame
        The y values of each line. The index has the x values. Missing values break a line.
    xlabel, ylabel : str
        The labels of the axes.
    log : str, optional
        Which axes are logarithmic, such as "x" or "xy", as `set_log` takes it.
    legend : str, optional
        "above" the axes, to the "right" of them, "inside" them, or "" for no legend.
    ends : pair of DataFrame, optional
        The lower limits and the upper limits, between which a ribbon is drawn. Their
        columns belong to the first columns of the table, by position.
    """
    x = table.index.to_numpy(dtype=float)
    styles = looks([str(name) for name in table.columns])
    # Without ``ends``, the limits have no columns.
    lower_limits, upper_limits = ends or (pd.DataFrame(), pd.DataFrame())
    for column, style in enumerate(styles):
        y = table.iloc[:, column].to_numpy(dtype=float)
        marker = style.marker if len(x) <= MOST_MARKERS else ""
        (line,) = ax.plot(x, y, linestyle=style.line, marker=marker, markersize=4)
        line.set(color=style.color, markerfacecolor=style.face, label=style.label)
        # The limits may have fewer columns than the table.
        if column < lower_limits.shape[1]:
            lower = lower_limits.iloc[:, column].to_numpy(dtype=float)
            upper = upper_limits.iloc[:, column].to_numpy(dtype=float)
            ax.fill_between(
                x, lower, upper, color=style.color, alpha=0.18, linewidth=0, zorder=0
            )
    set_log(ax, log)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    add_legend(ax, legend)


def cost_fit(ax: Axes, fits: Mapping[str, Fit[Any]]) -> None:
    """Draw several costs that were fitted to one set of samples.

    The drawing has the samples, their medians by size, a line for each fit, and a ribbon for
    the 95% interval of each fit that has draws. Draws are costs that show how uncertain the
    fitted cost is.

    Parameters
    ----------
    ax : Axes
        The axes to draw in.
    fits : mapping of str to Fit
        The fits by the name of their form, as in `FORMS`. All have the same samples.
    """
    # All fits have the same samples, so these are taken from the first one.
    any_fit = next(iter(fits.values()))
    sizes = any_fit.sizes
    seconds = any_fit.seconds
    medians_s = pd.Series(seconds).groupby(np.asarray(sizes)).median()
    # Seconds times `scale` are times in `unit`, such as ms.
    scale, unit = time_unit(medians_s)
    points(
        ax,
        medians_s.index,
        scale * medians_s,
        "measured",
        size=4,
        label="measured, median",
    )
    # The samples are small dots behind all else.
    ax.plot(
        sizes, seconds * scale, ".", color=SOFT, markersize=2.5, alpha=0.5, zorder=1
    )
    # With 200 sizes, evenly spaced on a logarithmic axis, curves look smooth.
    grid = np.geomspace(sizes.min(), sizes.max(), 200)
    for fit, style in zip(fits.values(), looks([*fits]), strict=True):
        _draw_fitted_cost(ax, fit, style, grid, scale)
    _label_axes_of_cost(ax, any_fit.cost, unit)
    add_legend(ax, "inside")


def _draw_fitted_cost(
    ax: Axes, fit: Fit[Any], style: Style, grid: np.ndarray, scale: float
) -> None:
    """Draw a fitted cost as a line, with a ribbon for its interval if it has draws.

    ``grid`` has the sizes at which the cost is computed, and ``scale`` is the number of
    units of the axis in a second.
    """
    ax.plot(
        grid,
        scale * fit.cost(grid),
        color=style.color,
        linestyle=style.line,
        label=style.label,
    )
    # The interval follows from the draws, costs that show how uncertain the fitted one is.
    if fit.draws:
        lower_s, upper_s = fit.interval(grid)
        ax.fill_between(
            grid,
            scale * lower_s,
            scale * upper_s,
            color=style.color,
            alpha=0.25,
            linewidth=0,
        )


def _label_axes_of_cost(ax: Axes, cost: Any, unit: str) -> None:
    """Make the axes of a drawn cost logarithmic, and label them.

    ``unit`` is the unit of the times that are drawn. Costs are of two kinds. The cost of a
    message has a ``collective``, and its sizes are bytes. The cost of selecting the largest
    gradients has no collective, and its sizes count elements.
    """
    collective = getattr(cost, "collective", "")
    if collective:
        # "b" is an x axis in bytes, and "y" the y axis.
        set_log(ax, "by")
        ax.set_xlabel("message size")
        # A table has all_reduce where a text has all-reduce.
        ax.set_ylabel(f"{collective.replace('_', '-')} time [{unit}]")
    else:
        set_log(ax, "xy")
        ax.set_xlabel("elements")
        ax.set_ylabel(f"selection time [{unit}]")


def scaling_curves(result: Scaling) -> pd.DataFrame:
    """Return scaling factors by the number of nodes, as three laws predict them.

    A count is a number of GPUs on a number of nodes. The scaling factor of a count is the time
    of a step on the smallest measured count, divided by the time of a step on this count.

    Parameters
    ----------
    result : Scaling
        How a training scales. Its anchor is the measured count with the most GPUs on several
        nodes, from which steps on more nodes are predicted.

    Returns
    -------
    DataFrame
        One row for each of 60 numbers of nodes, from that of the anchor to that of the largest
        count. They are evenly spaced on a logarithmic axis, so most are no whole numbers. The
        columns are ``nodes``, ``gpus``, the scaling factor ``predicted`` with the limits
        ``lower`` and ``upper`` of its interval, and the scaling factors by two other laws,
        ``log2`` and ``linear``, with which the prediction is compared.
    """
    anchor = result.anchor
    on_smallest_s = result.smallest.step_s
    # The target is the count with the most GPUs. If it has a single node, it has fewer nodes than
    # the anchor, and all rows are those of the anchor.
    most_nodes = max(result.target.nodes, anchor.nodes)
    nodes = np.geomspace(anchor.nodes, most_nodes, 60)
    ratio = nodes / anchor.nodes
    # The limits of the predicted step, in seconds.
    lower_s, upper_s = scaling.step_interval_s(
        on_smallest_s,
        anchor.step_s,
        ratio,
        # The longest step on no more GPUs than the anchor has. More GPUs do not shorten a
        # step, so a longer step on fewer GPUs raises the upper limit.
        slowest_s=result.slowest_s,
        # The steps of the fastest and the slowest of the anchor's jobs, which are runs of
        # the training. The interval contains the predictions from both.
        jobs_s=result.anchor_jobs_s,
    )
    predicted_s = scaling.step_s(on_smallest_s, anchor.step_s, ratio)
    gpus_per_node = anchor.gpus / anchor.nodes
    curves = {
        "nodes": nodes,
        "gpus": nodes * gpus_per_node,
        "predicted": on_smallest_s / predicted_s,
        # The longest step has the lowest scaling factor, so ``upper_s`` gives ``lower``.
        "lower": on_smallest_s / upper_s,
        "upper": on_smallest_s / lower_s,
    }
    for law in ("log2", "linear"):
        rival_s = scaling.rival_step_s(
            law, on_smallest_s, anchor.step_s, nodes, anchor.nodes
        )
        curves[law] = on_smallest_s / rival_s
    return pd.DataFrame(curves)


def scaling_factors(ax: Axes, result: Scaling) -> None:
    """Draw the scaling factor of a training by its number of GPUs.

    A count is a number of GPUs on a number of nodes. Measured counts are points, with the range of
    their jobs, which are runs of the training. The prediction is a line with its interval.
    Interpolated counts are points with their interval. A further line has the scaling factor that
    messages alone would give, where it is known. Two thin lines show what the scaling factor would
    be by other laws than that of the prediction. By these laws, the time that a step loses against
    the smallest measured count grows as log2 of the nodes, or in proportion to them.

    Parameters
    ----------
    ax : Axes
        The axes to draw in.
    result : Scaling
        How the training scales.
    """
    # The line of the prediction with its interval, and the two thin lines.
    _draw_scaling_curves(ax, result)
    _draw_messages_alone(ax, result)
    # Counts that are predicted and not interpolated lie on the line, and get no points.
    measured = [count for count in result.counts if count.measured]
    interpolated = [count for count in result.counts if count.interpolated]
    # The look of measured points has hollow markers. Here they are filled, as those of
    # interpolated points are.
    _draw_counts(ax, measured, replace(look("measured"), hollow=False))
    if interpolated:
        _draw_counts(ax, interpolated, replace(look("model"), label="interpolated"))
    set_log(ax, "x")
    # A scaling factor may exceed 1 because jobs scatter.
    highest = max([1.0, *(count.scaling_factor for count in result.counts)])
    # A little room keeps the highest point away from the edge.
    ax.set(xlabel="GPUs", ylabel="scaling factor", ylim=(0, highest + 0.08))
    ax.legend(loc="lower left")


def _draw_scaling_curves(ax: Axes, result: Scaling) -> None:
    """Draw scaling factors by the number of GPUs, as three laws predict them.

    The law of the prediction has a line and an interval. Each of the other two laws has a
    thin line.
    """
    curves = scaling_curves(result)
    gpus = curves["gpus"]
    color = look("model").color
    ax.fill_between(
        gpus,
        curves["lower"],
        curves["upper"],
        color=color,
        alpha=0.18,
        linewidth=0,
        label=f"nominal {result.interval_level:.0%} interval",
    )
    ax.plot(gpus, curves["predicted"], color=color, label="predicted")
    # The loss is the time by which a step is longer than on the smallest measured count.
    rivals = (
        ("log2", ":", "loss grows as log2"),
        ("linear", "--", "loss grows linearly"),
    )
    for law, line, label in rivals:
        ax.plot(gpus, curves[law], color=SOFT, linestyle=line, lw=0.8, label=label)


def _draw_counts(ax: Axes, counts: Sequence[Count], style: Style) -> None:
    """Draw the scaling factors of some counts of GPUs as points, each with its interval.

    The interval of a measured count is the range of its jobs, which are runs of the training. The
    interval of an interpolated count is that of the interpolation.
    """
    for count in counts:
        # A count that a single job measured has no range.
        if count.scaling_factor_interval is not None:
            ax.vlines(
                count.gpus, *count.scaling_factor_interval, color=style.color, lw=1.2
            )
    points(
        ax,
        [count.gpus for count in counts],
        [count.scaling_factor for count in counts],
        style,
    )


def _draw_messages_alone(ax: Axes, result: Scaling) -> None:
    """Draw a line of the scaling factors if nothing but messages lengthened the step.

    The line has the counts of GPUs for which this factor is known. If it is known for no count,
    nothing is drawn.
    """
    on_smallest_s = result.smallest.step_s
    gpus = []
    factors = []
    for count in result.counts:
        if count.only_messages_step_s is not None:
            gpus.append(count.gpus)
            factors.append(on_smallest_s / count.only_messages_step_s)
    if gpus:
        ax.plot(
            gpus,
            factors,
            color=look("all_reduce").color,
            linestyle="-.",
            label="messages alone",
        )


def gantt(
    axes: Axes | np.ndarray,
    timelines: Mapping[str, Timeline],
    exposed_s: Mapping[str, float] | None = None,
) -> None:
    """Draw the spans of rank 0 in some timelines as bars, on one scale of time.

    Parameters
    ----------
    axes : Axes or ndarray of Axes
        One Axes for each timeline, from top to bottom.
    timelines : mapping of str to Timeline
        The timelines by their heading. The duration of each is written above it.
    exposed_s : mapping of str to float, optional
        Seconds of exposed communication to write above each timeline, by its heading. By
        default they are the seconds in which something is sent and nothing is computed. If
        messages slow compute down, communication adds more than these seconds to an
        iteration.
    """
    of_rank_0 = {
        name: spans.select(spans.rank == 0) for name, spans in timelines.items()
    }
    if exposed_s is None:
        exposed_s = {
            name: spans.exposed_communication_s() for name, spans in of_rank_0.items()
        }
    longest_s = max(spans.duration_s for spans in of_rank_0.values())
    scale, unit = time_unit(longest_s)
    # A single Axes becomes an array of one.
    panels = np.atleast_1d(np.asarray(axes, dtype=object))
    for ax, (name, spans) in zip(panels, of_rank_0.items(), strict=True):
        _draw_spans(ax, spans, scale)
        # The axis is a little longer than the longest timeline, so that the edge of its last
        # bar is not cut off.
        ax.set_xlim(0, longest_s * scale * 1.005)
        total = spans.duration_s * scale
        exposed = exposed_s[name] * scale
        text = f"{total:.3g} {unit}, exposed communication {exposed:.3g} {unit}"
        # The heading stands at the left, by the theme. This second title stands at the right.
        ax.set_title(text, loc="right", fontweight="normal", fontsize=7.5, color=SOFT)
        ax.set_title(name)
        # All panels have one scale of time, whose numbers stand below the last panel only.
        ax.tick_params(axis="x", labelbottom=ax is panels[-1])
    panels[-1].set_xlabel(f"time [{unit}]")
    drawn_kinds: set[str] = set()
    for spans in of_rank_0.values():
        drawn_kinds.update(spans.kind)
    _add_legend_of_kinds(panels[0], drawn_kinds)


def _add_legend_of_kinds(ax: Axes, kinds: Collection[str]) -> None:
    """Add a legend with some kinds of spans, in the order of `KINDS`."""
    for kind in KINDS:
        if kind in kinds:
            style = look(kind)
            # A bar without width gives the legend an entry.
            ax.barh(
                0,
                0,
                label=style.label,
                facecolor=style.color,
                edgecolor="white",
                hatch=style.hatch,
            )
    add_legend(ax, "right")


MOST_EDGES = 60
"""The most bars of a kind on a stream that get white edges, which would hide narrow bars."""

BAR_HEIGHT = 0.72
"""The height of a bar, as a share of the distance between two rows."""


def _draw_spans(ax: Axes, spans: Timeline, scale: float) -> None:
    """Draw spans from time zero on, a row for each stream.

    ``scale`` is how many units of the axis are in a second.
    """
    table = spans.to_frame()
    table["left"] = (table["start_s"] - table["start_s"].min()) * scale
    table["width"] = (table["end_s"] - table["start_s"]) * scale
    streams = list(table["stream"].unique())
    for (kind, stream), bars in table.groupby(["kind", "stream"], sort=False):
        style = look(str(kind))
        # Rows are 1 apart, with their middles at 0, 1 and so on.
        bottom = streams.index(stream) - BAR_HEIGHT / 2
        # White edges separate the bars. If there are many bars, they are narrow, and edges would
        # cover them.
        ax.broken_barh(
            bars[["left", "width"]].to_numpy(),
            (bottom, BAR_HEIGHT),
            linewidth=0.4,
            facecolor=style.color,
            hatch=style.hatch,
            edgecolor="white" if len(bars) <= MOST_EDGES else "none",
        )
    ax.set_yticks(range(len(streams)), streams)
    # The axis points down, so that the first stream is on top.
    ax.set_ylim(len(streams) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")


# ---------------------------------------------------------------- whole figures


def cost_forms(fits: Mapping[str, Fit[Any]], chosen: str) -> Figure:
    """Return a figure of cost forms that were fitted to the same messages.

    Parameters
    ----------
    fits : mapping of str to Fit
        The fits by the name of their form.
    chosen : str
        The name of the form that the comparison of these fits chose. The title has its
        label, such as "log / linear" for "piecewise".

    Returns
    -------
    Figure
        The figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.6))
    ax = figure.subplots()
    cost_fit(ax, fits)
    ax.set_title(f"chosen: {look(chosen).label}")
    return figure


def advice_figure(advice: Advice, name_of_best: str = "") -> Figure:
    """Return a figure that compares PyTorch's default buckets with the best ones.

    Parameters
    ----------
    advice : Advice
        The options for the buckets, with what each is predicted to gain.
    name_of_best : str, optional
        The heading of the best option, by default the name of its plan.

    Returns
    -------
    Figure
        The timelines under PyTorch's default and, if it is another option, under the best one.
        Below them is the predicted gain over the default by bucket cap, with its interval, if
        the advice has options with other caps.
    """
    from matplotlib.figure import Figure

    best = advice.ranked[0]
    default = advice.options[DEFAULT]
    compared = {"PyTorch's default": default}
    if best is not default:
        compared[name_of_best or best.name] = best
    timelines = {}
    exposed_s = {}
    for name, option in compared.items():
        timelines[name] = option.iteration.timeline()
        # The text of the advice counts the time by which messages slow compute down as
        # exposed communication. The drawing has to say the same.
        exposed_s[name] = option.iteration.prediction.exposed_communication_s
    capped = _options_with_other_caps(advice)
    figure = Figure(figsize=(WIDTH, 6.0))
    n_timelines = len(compared)
    # One more panel, below the timelines, has the gains by cap.
    n_panels = n_timelines + 1 if capped else n_timelines
    axes = np.atleast_1d(figure.subplots(n_panels))
    gantt(axes[:n_timelines], timelines, exposed_s)
    if capped:
        _draw_gains_by_cap(axes[-1], advice, capped)
    return figure


def _options_with_other_caps(advice: Advice) -> list[Any]:
    """Return the options of an advice that differ from the default in the bucket cap alone.

    Such an option has a name that begins with the default's and ends in the cap, as in
    "ddp:10MB".
    """
    prefix = f"{DEFAULT}:"
    options = advice.options.values()
    return [option for option in options if option.name.startswith(prefix)]


def _draw_gains_by_cap(ax: Axes, advice: Advice, capped: Sequence[Any]) -> None:
    """Draw what options such as "ddp:10MB" are predicted to gain over the default.

    ``capped`` has the options whose names end in the cap of their buckets. A gain is a share
    of the default's iteration, and is drawn in percent.
    """
    gains = [advice.gain(option) for option in capped]
    # What stands behind the colon, such as "10MB".
    caps = [option.name.partition(":")[2] for option in capped]
    caps_mib = [units.parse_bytes(cap) / units.MIB for cap in caps]
    # "model" is the name of a role, so that the line looks like all that is predicted.
    percent = pd.DataFrame(
        {
            "model": [100 * gain.share for gain in gains],
            "lower": [100 * gain.interval[0] for gain in gains],
            "upper": [100 * gain.interval[1] for gain in gains],
        },
        index=caps_mib,
    )
    lines(
        ax,
        percent[["model"]],
        ends=(percent[["lower"]], percent[["upper"]]),
        xlabel="bucket_cap_mb [MiB]",
        ylabel="gain [%]",
        log="x",
        legend="",
    )
    ax.set_title("Predicted gain over PyTorch's default, by cap")


def write_scaling(result: Scaling, path: Path) -> None:
    """Write the drawing of how a training scales as a PNG.

    Parameters
    ----------
    result : Scaling
        How the training scales.
    path : Path
        The file to write.

    Raises
    ------
    UserError
        If matplotlib is not installed, or the file cannot be written.
    """
    needs("the drawing of a scaling factor", DRAWING)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(fname=THEME):
        figure = Figure(figsize=(WIDTH, 3.6))
        ax = figure.subplots()
        scaling_factors(ax, result)
        # The target is the count with the most GPUs.
        target = result.target
        ax.set_title(
            f"scaling factor {target.scaling_factor:.2f} on {target.gpus} GPUs"
        )
        image = png(figure)
    atomic_write(path, image)


def png(figure: Figure, *, tight: bool = False) -> bytes:
    """Return a figure as the content of a PNG file, which depends on the figure alone.

    Parameters
    ----------
    figure : Figure
        The figure.
    tight : bool, optional
        Whether the image is only as large as what is drawn.

    Returns
    -------
    bytes
        The content of the file.
    """
    buffer = io.BytesIO()
    figure.savefig(
        buffer,
        format="png",
        # Without this, the file would name the version of matplotlib, and change with it.
        metadata={"Software": None},
        bbox_inches="tight" if tight else None,
    )
    return buffer.getvalue()


def write_cost_forms(fits: Mapping[str, Fit[Any]], chosen: str, path: Path) -> None:
    """Write the figure of `cost_forms` as a PNG, in the theme of this library.

    Parameters
    ----------
    fits : mapping of str to Fit
        The fits by the name of their form.
    chosen : str
        The name of the form that the comparison of these fits chose. The title has its
        label, such as "log / linear" for "piecewise".
    path : Path
        The file to write.

    Raises
    ------
    UserError
        If matplotlib is not installed, or the file cannot be written.
    """
    needs("the drawing of cost forms", DRAWING)
    import matplotlib as mpl

    with mpl.rc_context(fname=THEME):
        image = png(cost_forms(fits, chosen))
    atomic_write(path, image)


def write_advice(
    advice: Advice,
    lines: Sequence[str],
    path: Path,
    *,
    facts: Mapping[str, str] | None = None,
    name_of_best: str = "",
) -> None:
    """Write an advice as a page that needs no network.

    Parameters
    ----------
    advice : Advice
        The options for the buckets, which `advice_figure` draws.
    lines : sequence of str
        The title, and the lines that a person reads.
    path : Path
        The HTML file to write.
    facts : mapping of str to str, optional
        What the page says of its origin, such as the date and the machine, by name.
    name_of_best : str, optional
        What the drawing calls the best option, by default the name of its plan.

    Raises
    ------
    UserError
        If matplotlib or Jinja2 is not installed, or the file cannot be written.
    """
    needs("the page of an advice", WRITING_A_PAGE)
    import matplotlib as mpl

    with mpl.rc_context(fname=THEME):
        image = png(advice_figure(advice, name_of_best))
    write_page(
        lines,
        path,
        image,
        heading="Predicted timelines",
        alt="an iteration before and after, and the predicted gain by cap",
        facts=facts,
    )


def write_page(
    lines: Sequence[str],
    path: Path,
    image: bytes,
    *,
    heading: str,
    alt: str,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write a page with text and one drawing that needs no network.

    Parameters
    ----------
    lines : sequence of str
        The title, and the lines that a person reads.
    path : Path
        The HTML file to write.
    image : bytes
        The drawing as PNG.
    heading, alt : str
        The heading above the drawing, and the description of the drawing for those who cannot
        see it.
    facts : mapping of str to str, optional
        What the page says of its origin, such as the date and the machine, by name.

    Raises
    ------
    UserError
        If Jinja2 is not installed, or the file cannot be written.
    """
    needs("a page", WRITING_A_PAGE)
    import jinja2

    # Texts are escaped for HTML. A name in the template without a value is an error.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    # The image is part of the page, in base64, so that the page needs no other file.
    page = environment.from_string(read_text(PAGE)).render(
        title=lines[0],
        text="\n".join(lines[1:]),
        facts=facts or {},
        heading=heading,
        alt=f"{alt}; the numbers stand above",
        image=b64encode(image).decode(),
    )
    atomic_write_text(path, page)
