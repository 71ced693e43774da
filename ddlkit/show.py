"""What is drawn: fitted cost forms, timelines, and the page of an advice.

How names look stands here, too, for what this module draws: a colour, a marker, a line and
a hatch, which differ also without colour. matplotlib and Jinja2 are imported where they are
needed, and `needs` says so in one line where they are absent: they are the extra
``ddlkit[plot]``.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit
from ddlkit.core.plan import PLANNERS
from ddlkit.core.timeline import KINDS, Timeline
from ddlkit.model.advice import DEFAULT, Advice
from ddlkit.store.files import atomic_write, atomic_write_text, read_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

THEME = Path(__file__).with_suffix(".mplstyle")
PAGE = Path(__file__).with_suffix(".html")
WIDTH = 7.2  # inches of a figure
SOFT = "#6f6f6f"  # the colour of what is beside the point

DRAWING = ("matplotlib",)
WRITING_A_PAGE = ("matplotlib", "jinja2")


def needs(what: str, modules: Sequence[str]) -> None:
    """Raise UserError unless ``modules`` are installed, which ``what`` needs."""
    absent = [name for name in modules if find_spec(name) is None]
    if absent:
        raise UserError(
            f"{what} needs {' and '.join(absent)}: pip install 'ddlkit[plot]'"
        )


# ---------------------------------------------------------------- how names look


@dataclass(frozen=True)
class Style:
    """How one name looks wherever it appears; ``line`` is a matplotlib line style."""

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

GREY = "#8f8f8f"  # of a planner without a look
SERIES = (
    ("#00588f", "D", "-", ""),
    ("#d55e00", "s", "--", "///"),
    ("#1b1b1b", "o", "-.", "..."),
    ("#e0a000", "^", ":", "xxx"),
    ("#009e73", "v", "-", "\\\\\\"),
    ("#b3568a", "P", "--", "|||"),
    ("#7fc4ee", "X", "-.", "+++"),
)
"""Colour, marker, line and hatch of names without a look, by their place among others."""


def _listed(name: str) -> Style | None:
    """Return the look of exactly this name; of a planner without one, grey."""
    if name in LOOKS:
        return LOOKS[name]
    return Style(name, GREY) if name in PLANNERS else None


def known(name: str) -> bool:
    """Return whether a name has a look of its own, as `look` finds it."""
    head = name.partition(":")[0]
    return _listed(name) is not None or _listed(head) is not None


def look(name: str) -> Style:
    """Return the style of a role, plan, cost form or span kind; with its argument it may have its own.

    >>> look("piecewise:45KB").label, look("piecewise:45KB").color == look("piecewise").color
    ('log / linear 45KB', True)
    """
    head, _, argument = name.partition(":")
    if whole := _listed(name):
        return whole
    if style := _listed(head):
        return replace(style, label=f"{style.label} {argument}") if argument else style
    raise UserError(f"no style for {name!r}: use a role, plan, cost form or span kind")


def looks(names: Sequence[str]) -> list[Style]:
    """Return styles of series, by look or place; of two with one look the second is darker and hollow."""
    styles: list[Style] = []
    heads = [name if _listed(name) else name.partition(":")[0] for name in names]
    for place, (name, head) in enumerate(zip(names, heads, strict=True)):
        if not known(name):
            styles.append(Style(name, *SERIES[place % len(SERIES)]))
        elif head in heads[:place]:
            styles.append(_darker(look(name)))
        else:
            styles.append(look(name))
    return styles


def _darker(style: Style) -> Style:
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = to_rgb(style.color)
    color = to_hex((0.55 * red, 0.55 * green, 0.55 * blue))
    return replace(style, color=color, line=(0, (3, 1)), hatch="|||", hollow=True)


# ---------------------------------------------------------------- axes and units


def time_unit(seconds: ArrayLike) -> tuple[float, str]:
    """Return factor and name of the unit in which the largest time reads best.

    >>> time_unit([2e-3, 0.5e-3])
    (1000.0, 'ms')
    """
    largest = float(np.nanmax(np.abs(np.asarray(seconds, dtype=float))))
    units_by_size = {1.0: "s", 1e3: "ms", 1e6: "µs"}
    return next((u for u in units_by_size.items() if largest * u[0] >= 1), (1e6, "µs"))


def set_log(ax: Axes, log: str) -> None:
    """Make axes logarithmic: "x", "y" or both; "b" for an x axis of message sizes in bytes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axis, letter in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        if letter in log:
            getattr(ax, f"set_{letter}scale")("log")
            plain_log_ticks(axis)
    if "b" in log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(
            FuncFormatter(lambda size, _: units.format_bytes(size))
        )


def plain_log_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: evenly spaced if it is short, else 1, 2, 5, or decades."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    many = LogLocator() if high > 1e3 * low else LogLocator(subs=(1.0, 2.0, 5.0))
    axis.set_major_locator(MaxNLocator(6) if 0 < high < 6 * low else many)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def add_legend(ax: Axes, place: str) -> None:
    """Name what is drawn: "above" the axes, to the "right" of them, "inside", or not ("")."""
    columns = min(4, len(ax.get_legend_handles_labels()[1]))
    places: dict[str, dict[str, Any]] = {
        "above": {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": columns},
        "right": {"loc": "upper left", "bbox_to_anchor": (1, 1)},
        "inside": {"loc": "upper left"},
    }
    if place:
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
    """Draw a role's markers at (n,) places."""
    style = look(role) if isinstance(role, str) else role
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    (line,) = ax.plot(x, y, style.marker, color=style.color, markersize=size)
    line.set(markerfacecolor=style.face, label=label or style.label)


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
    """Draw a line per column against the index, NaN breaks it; ends : lows and highs of a ribbon behind."""
    x = table.index.to_numpy(dtype=float)
    for place, style in enumerate(looks([str(name) for name in table.columns])):
        y = table.iloc[:, place].to_numpy(dtype=float)
        marker = style.marker if len(x) <= 30 else ""
        (line,) = ax.plot(x, y, linestyle=style.line, marker=marker, markersize=4)
        line.set(color=style.color, markerfacecolor=style.face, label=style.label)
        if ends is not None and place < ends[0].shape[1]:
            low, high = (end.iloc[:, place].to_numpy(dtype=float) for end in ends)
            ax.fill_between(
                x, low, high, color=style.color, alpha=0.18, linewidth=0, zorder=0
            )
    set_log(ax, log)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    add_legend(ax, legend)


def cost_fit(ax: Axes, fits: Mapping[str, Fit[Any]]) -> None:
    """Draw costs fitted to the same data, by form: samples, medians, fitted lines with 95% intervals."""
    first, *_ = fits.values()
    sizes, seconds = first.sizes, first.seconds
    medians = pd.Series(seconds).groupby(np.asarray(sizes)).median()
    scale, unit = time_unit(medians)
    points(
        ax, medians.index, scale * medians, "measured", size=4, label="measured, median"
    )
    ax.plot(
        sizes, seconds * scale, ".", color=SOFT, markersize=2.5, alpha=0.5, zorder=1
    )
    grid = np.geomspace(sizes.min(), sizes.max(), 200)
    for fit, style in zip(fits.values(), looks([*fits]), strict=True):
        shape = {"color": style.color, "linestyle": style.line, "label": style.label}
        ax.plot(grid, scale * fit.cost(grid), **shape)
        if fit.draws:
            low, high = (scale * limit for limit in fit.interval(grid))
            ax.fill_between(grid, low, high, color=style.color, alpha=0.25, linewidth=0)
    collective = getattr(first.cost, "collective", "")
    set_log(ax, "by" if collective else "xy")
    what = collective.replace("_", "-") or "selection"
    ax.set(
        xlabel="message size" if collective else "elements",
        ylabel=f"{what} time [{unit}]",
    )
    add_legend(ax, "inside")


def gantt(axes: Axes | np.ndarray, timelines: Mapping[str, Timeline]) -> None:
    """Draw rank 0's spans as bars, timelines (by heading) on one time axis; above each, how long it is."""
    chosen = {name: spans.select(spans.rank == 0) for name, spans in timelines.items()}
    longest_s = max(spans.duration_s for spans in chosen.values())
    scale, unit = time_unit(longest_s)
    panels = np.atleast_1d(np.asarray(axes, dtype=object))
    for ax, (name, spans) in zip(panels, chosen.items(), strict=True):
        _spans(ax, spans, scale)
        ax.set_xlim(0, longest_s * scale * 1.005)
        total, exposed = (
            spans.duration_s * scale,
            spans.exposed_communication_s() * scale,
        )
        text = f"{total:.3g} {unit}, exposed communication {exposed:.3g} {unit}"
        ax.set_title(text, loc="right", fontweight="normal", fontsize=7.5, color=SOFT)
        ax.set_title(name)
        ax.tick_params(axis="x", labelbottom=ax is panels[-1])
    panels[-1].set_xlabel(f"time [{unit}]")
    drawn = {kind for spans in chosen.values() for kind in np.unique(spans.kind)}
    for kind in filter(drawn.__contains__, KINDS):
        style = look(kind)
        shape = {"facecolor": style.color, "edgecolor": "white", "hatch": style.hatch}
        panels[0].barh(0, 0, label=style.label, **shape)
    add_legend(panels[0], "right")


def _spans(ax: Axes, spans: Timeline, scale: float) -> None:
    """Draw spans from time zero, a row per stream."""
    table = spans.to_frame()
    table["left"] = (table["start_s"] - table["start_s"].min()) * scale
    table["width"] = (table["end_s"] - table["start_s"]) * scale
    streams = list(table["stream"].unique())
    for (kind, stream), rows in table.groupby(["kind", "stream"], sort=False):
        style, edge = look(str(kind)), "white" if len(rows) <= 60 else "none"
        shape: dict[str, Any] = {
            "facecolor": style.color,
            "hatch": style.hatch,
            "edgecolor": edge,
        }
        row = streams.index(stream) - 0.36, 0.72
        ax.broken_barh(rows[["left", "width"]].to_numpy(), row, linewidth=0.4, **shape)
    ax.set_yticks(range(len(streams)), streams)
    ax.set_ylim(len(streams) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")


# ---------------------------------------------------------------- whole figures


def cost_forms(fits: Mapping[str, Fit[Any]], chosen: str) -> Figure:
    """Draw times of forms fitted to the same messages."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.6))
    ax = figure.subplots()
    cost_fit(ax, fits)
    ax.set_title(f"chosen: {look(chosen).label}")
    return figure


def advice_figure(advice: Advice) -> Figure:
    """Return an iteration before and after, and the gain over the default by cap, with 95% intervals."""
    from matplotlib.figure import Figure

    named = {
        "PyTorch's default": advice.options[DEFAULT],
        advice.ranked[0].name: advice.ranked[0],
    }
    capped = [o for o in advice.options.values() if o.name.startswith(f"{DEFAULT}:")]
    figure = Figure(figsize=(WIDTH, 6.0))
    axes = figure.subplots(2 + bool(capped))
    gantt(
        axes[:2], {name: option.iteration.timeline() for name, option in named.items()}
    )
    if capped:
        caps = [units.parse_bytes(o.name.partition(":")[2]) / units.MIB for o in capped]
        gains = np.array(
            [(gain.share, *gain.interval) for gain in map(advice.gain, capped)]
        )
        line, low, high = (
            pd.DataFrame({"model": 100 * each}, index=caps) for each in gains.T
        )
        lines(
            axes[2],
            line,
            ends=(low, high),
            xlabel="bucket_cap_mb [MiB]",
            ylabel="gain [%]",
            log="x",
            legend="",
        )
        axes[2].set_title("Predicted gain over PyTorch's default, by cap")
    return figure


def png(figure: Figure, *, tight: bool = False) -> bytes:
    """Return a figure as a file whose bytes depend on nothing but the figure.

    tight : whether the image is only as large as what is drawn
    """
    buffer = io.BytesIO()
    figure.savefig(
        buffer,
        format="png",
        metadata={"Software": None},
        bbox_inches="tight" if tight else None,
    )
    return buffer.getvalue()


def write_cost_forms(fits: Mapping[str, Fit[Any]], chosen: str, path: Path) -> None:
    """Write `cost_forms` as a PNG, in this library's theme. Raises UserError."""
    needs("the drawing of cost forms", DRAWING)
    import matplotlib as mpl

    with mpl.rc_context(fname=THEME):
        image = png(cost_forms(fits, chosen))
    atomic_write(path, image)


def write_advice(advice: Advice, lines: Sequence[str], path: Path) -> None:
    """Write an advice as one file that needs no network: what a person reads, and `advice_figure`."""
    needs("the page of an advice", WRITING_A_PAGE)
    import jinja2
    import matplotlib as mpl

    with mpl.rc_context(fname=THEME):
        image = png(advice_figure(advice))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(read_text(PAGE)).render(
        title=lines[0], text="\n".join(lines[1:]), image=b64encode(image).decode()
    )
    atomic_write_text(path, page)
