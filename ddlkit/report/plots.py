"""Figures: one theme, one look for each role, and functions that draw data on given axes.

Every function takes an Axes and numbers in base units (seconds, bytes) and puts units on the axes.
A role, plan, cost form or span kind has one colour, marker, line and hatch in every figure; marker,
line and hatch tell them apart without colour.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit, Judged
from ddlkit.core.timeline import KINDS, Timeline
from ddlkit.core.workload import Workload
from ddlkit.report import outputs
from ddlkit.store.files import atomic_write

Floats = NDArray[np.float64]

WIDTH = 7.2
HEADER_WIDTH = 14  # letters in a line of a table's head
DPI = 160
INK, SOFT, FAINT = "#1b1b1b", "#6f6f6f", "#e4e4e4"

_RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.borderaxespad": 0.2,
    "hatch.linewidth": 0.6,
    "hatch.color": "white",
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "savefig.dpi": DPI,
}


@dataclass(frozen=True)
class Style:
    """How one name looks wherever it appears."""

    label: str
    color: str
    marker: str = ""
    line: Any = "-"  # a matplotlib line style
    hatch: str = ""


ROLES = {
    "measured": Style("measured", INK, "o", "-"),
    "model": Style("model", "#00588f", "D", "--", "///"),
    "paper": Style("paper", "#d55e00", "s", ":", "..."),
    "no_overlap": Style("no overlap", "#e0a000", "v", "-.", "\\\\\\"),
    "perfect_overlap": Style("perfect overlap", "#7fc4ee", "^", (0, (1, 1, 4, 1)), "xxx"),
    "linear": Style("linear cost", "#009e73", "P", (0, (5, 1)), "---"),
    "osf": Style("OSF", "#b3568a", "X", (0, (3, 1, 1, 1)), "+++"),
}
PLANS = {
    "none": Style("none", "#b3568a", "v", "-", "\\\\\\"),
    "single": Style("single", INK, "s", "--", ""),
    "buffer": Style("buffer", "#e0a000", "o", "-.", "..."),
    "ddp": Style("DDP", "#009e73", "D", ":", "///"),
    "exact": Style("exact", "#00588f", "*", "-", "xxx"),
    "mg_wfbp": Style("MG-WFBP", "#7fc4ee", "^", "--", "\\\\\\"),
    "adafusion": Style("adaFusion", "#d55e00", "h", ":", "+++"),
    "cuts": Style("given cuts", "#8f8f8f", "P", "--", "|||"),
    "random": Style("random", "#c4c4c4", "X", ":", "---"),
}
FORMS = {
    "ring_all_reduce": Style("ring, Eq 7", "#b3568a", "v", "--"),
    "alpha_beta": Style("alpha-beta", "#d55e00", "s", ":"),
    "piecewise": Style("log / linear", "#e0a000", "^", "-."),
    "segments": Style("linear pieces", "#00588f", "D", "-"),
    "table": Style("table", INK, "o", "--"),
}
SELECTIONS = {
    "density_log": Style("gamma rho d log d", "#d55e00", "s", ":"),
    "log": Style("gamma d log d", "#e0a000", "^", "-."),
    "scan": Style("start-up + passes", "#00588f", "D", "-"),
}
SPANS = {
    "io": Style("input", "#bdbdbd", hatch="||||"),
    "h2d": Style("copy to device", "#8f8f8f", hatch="----"),
    "forward": Style("forward", "#a9d3f0"),
    "backward": Style("backward", "#4a94c8"),
    "sparsify": Style("sparsify", "#b3568a", hatch="..."),
    "negotiate": Style("negotiate", "#f0c9e0", hatch="++++"),
    "wait": Style("wait", "#f2f2f2"),
    "all_reduce": Style("all-reduce", "#c14d00", hatch="////"),
    "all_gather": Style("all-gather", "#e0a000", hatch="\\\\\\\\"),
    "update": Style("update", "#00664b", hatch="xxxx"),
}
_SERIES = (
    ("#00588f", "D", "-"),
    ("#d55e00", "s", "--"),
    (INK, "o", "-."),
    ("#e0a000", "^", ":"),
    ("#009e73", "v", "-"),
    ("#b3568a", "P", "--"),
)
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "|||")


@contextmanager
def theme() -> Iterator[None]:
    """The workbook's look, as a context (``with theme():``) or a decorator; restored on leaving."""
    with mpl.rc_context(_RC):
        yield


def look(name: str) -> Style:
    """The style of a role, plan ("buffer:25MB" looks like "buffer"), cost form or span kind.

    Raises UserError for an unknown name.
    """
    head, _, argument = name.partition(":")
    for family in (ROLES, PLANS, FORMS, SELECTIONS, SPANS):
        if head in family:
            style = family[head]
            label = f"{style.label} {argument}" if argument else style.label
            return Style(label, style.color, style.marker, style.line, style.hatch)
    raise UserError(f"no style for {name!r}: use a role, plan, cost form or span kind")


@theme()
def canvas(
    columns: int = 1, rows: int = 1, width: float = WIDTH, height: float = 3.2, **options: Any
) -> tuple[Figure, Any]:
    """A themed figure and its axes (as ``plt.subplots`` gives them); sizes in inches."""
    return plt.subplots(rows, columns, figsize=(width, height), **options)


def save_figure(
    figure: Figure, name: str, numbers: pd.DataFrame, reports: Path | None = None
) -> Path:
    """Write ``figures/<name>.png`` and beside it ``.csv``, the numbers plotted; show it in a notebook.

    The bytes depend on nothing but the figure: no date, no version is written. Returns the PNG.
    """
    path = _write(figure, name, numbers, reports)
    _show(figure, path)
    return path


def _write(figure: Figure, name: str, numbers: pd.DataFrame, reports: Path | None) -> Path:
    buffer = io.BytesIO()
    with theme():
        figure.savefig(buffer, format="png", metadata={"Software": None})
    outputs.write_numbers(name, numbers, reports)
    path = outputs.figure_path(name, ".png", reports)
    atomic_write(path, buffer.getvalue())
    return path


def _show(figure: Figure, path: Path) -> None:
    """In a notebook, what was written: its own showing at a cell's end ends with the first theme."""
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython
    from IPython.display import Image, display

    if get_ipython() is not None:
        plt.close(figure)
        display(Image(path.read_bytes(), width=round(100 * figure.get_figwidth())))


@theme()
def heading(ax: Axes, text: str) -> None:
    """The bold title of a panel, at its left."""
    ax.set_title(text)


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
    measured = np.asarray(measured_s, dtype=float)
    given = {role: np.asarray(values, dtype=float) for role, values in predicted_s.items()}
    everything = np.concatenate([measured, *given.values()])
    scale, unit = _time_unit(everything)
    positive = everything[everything > 0] * scale
    if not positive.size:
        raise UserError(f"no {quantity} above zero to draw")
    line = np.array([positive.min() / 1.1, positive.max() * 1.1])
    ax.plot(line, line, color=SOFT, linewidth=0.8, zorder=1)
    ax.fill_between(line, line * (1 - band), line * (1 + band), color=FAINT, linewidth=0, zorder=0)
    for role in sorted(given, key=lambda role: role == "model"):
        style = look(role)
        ax.scatter(
            measured * scale,
            given[role] * scale,
            s=20,
            marker=style.marker,
            facecolor=style.color if role == "model" else "none",
            edgecolor=style.color,
            linewidth=1.1,
            label=style.label,
            zorder=3 if role == "model" else 2,
        )
    ax.set(xscale="log", yscale="log", xlim=tuple(line), ylim=tuple(line), aspect="equal")
    for axis in (ax.xaxis, ax.yaxis):
        _plain_log_ticks(axis)
    ax.grid(True, axis="both")
    ax.set_xlabel(f"measured {quantity} [{unit}]")
    ax.set_ylabel(f"predicted {quantity} [{unit}]")
    handles, labels = ax.get_legend_handles_labels()
    handles, labels = [*handles[::-1], Patch(color=FAINT)], [*labels[::-1], f"within ±{band:.0%}"]
    ax.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


@theme()
def cost_fit(ax: Axes, *fits: Fit) -> None:
    """Fitted message costs on the same data: samples, medians, fitted lines and their intervals."""
    data = fits[0]
    sizes = np.unique(data.bytes)
    medians = np.array([np.median(data.seconds[data.bytes == size]) for size in sizes])
    scale, unit = _time_unit(medians)
    grid = np.geomspace(sizes[0], sizes[-1], 200)
    ax.plot(data.bytes, data.seconds * scale, ".", color=SOFT, markersize=2.5, alpha=0.5, zorder=1)
    for fit in fits:
        style = look(fit.cost.form)
        if fit.draws:
            low, high = fit.interval(grid)
            ax.fill_between(
                grid, low * scale, high * scale, color=style.color, alpha=0.25, linewidth=0
            )
        label = f"{style.label}, 95% interval" if fit.draws else style.label
        ax.plot(grid, fit.cost(grid) * scale, color=style.color, linestyle=style.line, label=label)
    _measured_medians(ax, sizes, medians * scale)
    ax.set_yscale("log")
    _plain_log_ticks(ax.yaxis)
    _byte_axis(ax)
    ax.set_ylabel(f"{data.cost.collective.replace('_', '-')} time [{unit}]")
    ax.legend(loc="upper left")


@theme()
def selection_fit(ax: Axes, judged: Mapping[str, Judged], density: float) -> None:
    """Measured times of selecting at one density, and each form fitted to all of them.

    ``judged`` is ``core.fit.judge_selections``'s; a form with draws carries its 95% interval.
    """
    fits = {form: one.fit for form, one in judged.items()}
    elements, densities = next(iter(fits.values())).at
    chosen = np.isclose(densities, density)
    if not chosen.any():
        raise UserError(f"density {density:g} was not measured: there are {np.unique(densities)}")
    seconds = next(iter(fits.values())).seconds[chosen]
    sizes = np.unique(elements[chosen])
    medians = np.array([np.median(seconds[elements[chosen] == size]) for size in sizes])
    grid = np.geomspace(sizes[0], sizes[-1], 200)
    scale, unit = _time_unit(medians)
    for form, fit in fits.items():
        style = look(form)
        if fit.draws:
            low, high = np.quantile([draw(grid, density) for draw in fit.draws], (0.025, 0.975), 0)
            ax.fill_between(
                grid, low * scale, high * scale, color=style.color, alpha=0.25, linewidth=0
            )
        times = fit.cost(grid, density) * scale
        ax.plot(grid, times, color=style.color, linestyle=style.line, label=style.label)
    _measured_medians(ax, sizes, medians * scale)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _plain_log_ticks(ax.yaxis)
    ax.set_xlabel("elements")
    ax.set_ylabel(f"selection time [{unit}]")
    ax.legend(loc="upper left")


@theme()
def error_by_size(
    ax: Axes, errors: Mapping[str, tuple[ArrayLike, ArrayLike]], *, legend: bool = True
) -> None:
    """Signed relative error of cost forms by message size: form -> (sizes in bytes, errors).

    A form with an argument, as "piecewise:45KB", has the form's colour, hollow and dotted.
    """
    ax.axhline(0, color=SOFT, linewidth=0.8)
    for form, (sizes, error) in errors.items():
        style, variant = look(form), ":" in form
        percent = 100 * np.asarray(error, dtype=float)
        ax.plot(
            np.asarray(sizes, dtype=float),
            percent,
            color=style.color,
            marker=style.marker,
            markersize=4,
            markerfacecolor="white" if variant else style.color,
            linestyle=(0, (1, 1)) if variant else style.line,
            linewidth=1.1,
            label=style.label,
        )
    _byte_axis(ax)
    ax.set_ylabel("error on the held-out size [%]")
    if legend:
        ax.legend(loc="best")


@theme()
def training(ax: Axes, rows: pd.DataFrame, *, value: str, ylabel: str, legend: str = "") -> None:
    """A network's mean over its seeds by epoch, in a band from the least to the most of them.

    ``legend`` as in ``bars``.

    ``rows`` has columns network, seed, epoch and ``value``, one row for each of the first three.
    """
    for (name, part), (color, _, line) in zip(
        rows.groupby("network", sort=False), _SERIES, strict=False
    ):
        wide = part.pivot(index="epoch", columns="seed", values=value)
        ax.fill_between(
            wide.index, wide.min(axis=1), wide.max(axis=1), color=color, alpha=0.25, linewidth=0
        )
        ax.plot(wide.index, wide.mean(axis=1), color=color, linestyle=line, label=str(name))
    ax.set_xlabel("epoch")
    ax.set_ylabel(ylabel)
    _legend(ax, legend, rows["network"].nunique())


@theme()
def pictures(axes: Sequence[Axes], images: NDArray[np.uint8], names: Sequence[str]) -> None:
    """Images (n, 3, side, side) in bytes, one on each axes, each with its name above it."""
    for ax, image, name in zip(axes, images, names, strict=True):
        ax.imshow(image.transpose(1, 2, 0))
        ax.set_title(name, fontsize=6, fontweight="normal", loc="center", pad=2)
        ax.axis("off")


@theme()
def samples_by_size(ax: Axes, samples: pd.DataFrame, *, series: str, size: str = "bytes") -> None:
    """Raw times: a line through the medians of each series, a band from 2.5% to 97.5%.

    ``samples`` has columns seconds, ``size`` and ``series``, whose values name the lines.
    """
    import seaborn as sns  # takes longer to import than all else here

    scale, unit = _time_unit(samples["seconds"].to_numpy())
    for (name, rows), (color, marker, line) in zip(
        samples.groupby(series, sort=False), _SERIES, strict=False
    ):
        sns.lineplot(
            x=rows[size],
            y=rows["seconds"] * scale,
            estimator="median",
            errorbar=("pi", 95),
            color=color,
            marker=marker,
            markersize=4,
            markeredgewidth=0,
            linestyle=line,
            label=str(name),
            ax=ax,
        )
    ax.set_yscale("log")
    _plain_log_ticks(ax.yaxis)
    if size == "bytes":
        _byte_axis(ax)
    else:
        ax.set_xscale("log")
        ax.set_xlabel(size)
    ax.set_ylabel(f"time [{unit}]")
    ax.legend(loc="upper left")


@theme()
def slowdown_by_blocks(ax: Axes, slowdowns: pd.DataFrame) -> None:
    """How many times longer each kernel takes beside communication: a dot for each number of blocks.

    ``slowdowns`` is ``report.compare.slowdowns``'s; of several numbers of threads the median.
    """
    import seaborn as sns

    kernels = list(dict.fromkeys(slowdowns["kernel"]))
    blocks = sorted(slowdowns["blocks"].unique())
    for number, (count, color) in enumerate(
        zip(blocks, sns.color_palette("flare", len(blocks)), strict=True)
    ):
        chosen = slowdowns[slowdowns["blocks"] == count]
        medians = chosen.groupby("kernel")["slowdown"].median().reindex(kernels)
        marker = _SERIES[number % len(_SERIES)][1]
        label = f"{count} block{'s' if count > 1 else ''}"
        ax.plot(medians, range(len(kernels)), marker, color=color, markersize=5, label=label)
    ax.axvline(1, color=SOFT, linewidth=0.8)
    ax.set_yticks(range(len(kernels)), [kernel.replace("_", " ") for kernel in kernels])
    ax.invert_yaxis()
    ax.set_xlabel("time beside communication / time alone")
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(blocks))


@theme()
def gantt(ax: Axes, timeline: Timeline, *, rank: int = 0, iteration: int | None = None) -> None:
    """One rank's spans as bars, a row a stream; the exposed communication is printed above.

    ``iteration`` selects one iteration (default: all). Up to 12 messages carry their group number.
    Raises UserError when nothing is selected.
    """
    spans = _chosen(timeline, rank, iteration)
    scale, unit = _time_unit(spans.duration_s)
    _bars(ax, spans, scale, unit)
    _kind_legend(ax, [spans])


@theme()
def gantts(
    axes: Sequence[Axes],
    timelines: Mapping[str, Timeline],
    *,
    rank: int = 0,
    iteration: int | None = None,
) -> None:
    """Timelines under each other on one time axis, each with its name as heading; as ``gantt``."""
    chosen = {name: _chosen(timeline, rank, iteration) for name, timeline in timelines.items()}
    longest_s = max(spans.duration_s for spans in chosen.values())
    scale, unit = _time_unit(longest_s)
    for ax, (name, spans) in zip(axes, chosen.items(), strict=True):
        _bars(ax, spans, scale, unit)
        ax.set_xlim(0, longest_s * scale * 1.005)
        ax.set_title(name)
        if ax is not axes[-1]:
            ax.set_xlabel("")
            ax.tick_params(axis="x", labelbottom=False)
    _kind_legend(axes[0], list(chosen.values()))


@theme()
def bars_by_plan(
    ax: Axes,
    plans: Sequence[str],
    seconds: Mapping[str, ArrayLike],
    *,
    spread_s: Mapping[str, ArrayLike] | None = None,
    quantity: str = "iteration time",
) -> None:
    """A group of bars a plan, a bar a role: role -> (n,) seconds; ``spread_s`` half-widths of it."""
    heights = {role: np.asarray(values, dtype=float) for role, values in seconds.items()}
    scale, unit = _time_unit(np.concatenate(list(heights.values())))
    width, spreads = 0.8 / len(heights), spread_s or {}
    for place, (role, values) in enumerate(heights.items()):
        style = look(role)
        spread = np.asarray(spreads[role], dtype=float) * scale if role in spreads else None
        ax.bar(
            np.arange(len(plans)) + (place - (len(heights) - 1) / 2) * width,
            values * scale,
            width * 0.94,
            yerr=spread,
            color=style.color,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0.3,
            label=style.label,
            error_kw={"elinewidth": 0.9, "ecolor": SOFT, "capsize": 1.5},
        )
    crowded = sum(map(len, plans)) > 60
    ax.set_xticks(range(len(plans)), plans)
    ax.tick_params(axis="x", length=0)
    if crowded:
        plt.setp(ax.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    ax.set_ylabel(f"{quantity} [{unit}]")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(heights))


@theme()
def bars(
    ax: Axes, table: pd.DataFrame, *, label: str, stacked: bool = False, legend: str = "above"
) -> None:
    """A group of bars a row (its index names it), a bar a column, beside or upon each other.

    A column named as a plan has the plan's look. ``legend`` is "above", "right" or "". NaN draws nothing.
    """
    width = 0.72 if stacked else 0.84 / table.shape[1]
    base = np.zeros(len(table))
    styles = _series_styles([str(name) for name in table.columns])
    for place, style in enumerate(styles):
        heights = table.iloc[:, place].to_numpy(dtype=float)
        shift = 0.0 if stacked else (place - (table.shape[1] - 1) / 2) * width
        ax.bar(
            np.arange(len(table)) + shift,
            heights,
            width if stacked else width * 0.94,
            bottom=base if stacked else 0.0,
            color=style.color,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0.3,
            label=style.label,
        )
        base += np.nan_to_num(heights)
    ax.set_xticks(range(len(table)), [str(name) for name in table.index])
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel(label)
    _legend(ax, legend, table.shape[1])


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
    """A line a column against the index, with markers if points are few; NaN breaks a line.

    ``log`` is "", "x", "y" or "xy"; ``legend`` as in ``bars``. A column named as a plan has its look.
    """
    x = table.index.to_numpy(dtype=float)
    for place, style in enumerate(_series_styles([str(name) for name in table.columns])):
        ax.plot(
            x,
            table.iloc[:, place].to_numpy(dtype=float),
            color=style.color,
            marker=style.marker if len(x) <= 20 else "",
            markersize=4,
            linestyle=style.line,
            label=style.label,
        )
    for axis, letter in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        if letter in log:
            getattr(ax, f"set_{letter}scale")("log")
            _plain_log_ticks(axis)
            low, high = axis.get_view_interval()
            if high > 1e3 * low:  # many decades: one tick each is all that fits
                axis.set_major_locator(LogLocator(numticks=12))
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    _legend(ax, legend, table.shape[1])


def _legend(ax: Axes, place: str, entries: int) -> None:
    if place == "above":
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(4, entries))
    elif place == "right":
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _series_styles(names: Sequence[str]) -> list[Style]:
    """Plans and roles in their own look, a second variant of a planner darker; others by their place."""
    styles: list[Style] = []
    seen: set[str] = set()
    for place, name in enumerate(names):
        head = name.partition(":")[0]
        color, marker, line = _SERIES[place % len(_SERIES)]
        style = Style(name, color, marker, line, _HATCHES[place % len(_HATCHES)])
        if head in PLANS or name in ROLES:
            style = look(name)
        if head in seen:
            red, green, blue = to_rgb(style.color)
            darker = to_hex((0.55 * red, 0.55 * green, 0.55 * blue))
            style = Style(style.label, darker, style.marker, (0, (3, 1)), "|||")
        seen.add(head)
        styles.append(style)
    return styles


@theme()
def error_by_case(
    ax: Axes,
    cases: Sequence[str],
    errors: Mapping[str, ArrayLike],
    *,
    repeatability: ArrayLike | None = None,
    label: str = "relative error, iteration time",
) -> None:
    """Signed relative errors (or what ``label`` says), a row a case, a marker a role: role -> (n,).

    ``repeatability`` (n,): relative difference between two measurements of the same case, drawn as
    a bar around zero; an error inside it cannot be told from noise.
    """
    rows = np.arange(len(cases))
    ax.axvline(0, color=SOFT, linewidth=0.8)
    if repeatability is not None:
        half = 100 * np.abs(np.asarray(repeatability, dtype=float))
        ax.barh(rows, 2 * half, left=-half, height=0.62, color=FAINT, label="repeatability")
    for role, values in errors.items():
        style = look(role)
        ax.plot(
            100 * np.asarray(values, dtype=float),
            rows,
            style.marker,
            color=style.color,
            markerfacecolor=style.color if role == "model" else "white",
            markersize=4.5,
            label=style.label,
        )
    ax.set_yticks(rows, cases)
    ax.set_ylim(len(cases) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="both")
    ax.set_xlabel(f"{label} [%]")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


@theme()
def error_by_group(
    ax: Axes, groups: Sequence[str], errors: ArrayLike, *, quantity: str = "iteration time"
) -> None:
    """Signed relative errors (n,), a point each, a row a group (n,) of cases; a bar marks the median."""
    names = list(dict.fromkeys(groups))
    values, style = 100 * np.asarray(errors, dtype=float), look("model")
    rows = np.array([names.index(group) for group in groups])
    ax.axvline(0, color=SOFT, linewidth=0.8)
    for row in range(len(names)):
        inside = np.sort(values[rows == row])
        # Spread evenly, not at random: the same data draw the same picture.
        spread = row + 0.5 * (np.arange(len(inside)) % 5 / 4 - 0.5)
        ax.plot(inside, spread, style.marker, color=style.color, markersize=3, alpha=0.6)
        ax.plot([np.median(inside)] * 2, [row - 0.36, row + 0.36], color=INK, linewidth=2)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="both")
    ax.set_xlabel(f"relative error, {quantity} [%]")


@theme()
def ratio_by_case(
    ax: Axes, cases: Sequence[str], ratio: ArrayLike, lower: ArrayLike, upper: ArrayLike
) -> None:
    """Measured ratios (n,) with their intervals, a row a case; right of 1 the plan is faster."""
    rows, style = np.arange(len(cases)), look("measured")
    low, middle, high = (np.asarray(values, dtype=float) for values in (lower, ratio, upper))
    ax.axvspan(0.98, 1.02, color=FAINT, label="within 2%")
    ax.axvline(1, color=SOFT, linewidth=0.8)
    ax.errorbar(
        middle,
        rows,
        xerr=[np.maximum(0, middle - low), np.maximum(0, high - middle)],
        fmt=style.marker,
        color=style.color,
        capsize=2,
        label="median and 95% interval",
    )
    ax.set_yticks(rows, cases)
    ax.set_ylim(len(cases) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="both")
    ax.set_xlabel("iteration under the other plan / under this one")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


@theme()
def layer_profile(ax: Axes, workloads: Mapping[str, Workload]) -> None:
    """How gradients become ready: their share against time, from the start of the iteration.

    The flat beginning is the forward pass, its end is marked; a high step is a large tensor; a
    climb close to the end leaves little to hide its communication behind.
    """
    scale, unit = _time_unit([workload.ready_s[-1] for workload in workloads.values()])
    for (name, workload), (color, _, line) in zip(workloads.items(), _SERIES, strict=False):
        time = np.concatenate([[0.0, workload.forward_s], workload.ready_s]) * scale
        ready = np.concatenate([[0.0, 0.0], np.cumsum(workload.bytes)])
        label = f"{name}, {units.format_bytes(ready[-1])}"
        ax.step(
            time, 100 * ready / ready[-1], where="post", color=color, linestyle=line, label=label
        )
        ax.plot([time[1]], [0], "|", color=color, markersize=9, clip_on=False)
    ax.set_xlabel(f"time from the start of the iteration [{unit}]")
    ax.set_ylabel("gradients ready [% of bytes]")
    ax.set_xlim(left=0)
    ax.set_ylim(0, 105)
    ax.legend(loc="lower right")


@theme()
def verdict_ratios(ax: Axes, verdicts: pd.DataFrame, *, limit: float = 4.0) -> None:
    """Computed over printed value of every attempted claim, with the tolerance as a bar around 1.

    ``verdicts`` is ``report.verdicts.evaluate()``'s; ratios beyond ``limit`` sit on the border and
    carry their value.
    """
    tried = verdicts[verdicts["verdict"] != "not attempted"].reset_index(drop=True)
    ratio = (tried["computed"] / tried["value"]).to_numpy(dtype=float)
    rows, tolerance = np.arange(len(tried)), tried["tolerance"].to_numpy(dtype=float)
    ax.axvline(1, color=SOFT, linewidth=0.8)
    ax.barh(rows, 2 * tolerance, left=1 - tolerance, height=0.62, color=FAINT, label="tolerance")
    shown = np.clip(ratio, 1 / limit, limit)
    for verdict, marker, face in (("reproduced", "o", INK), ("differs", "X", "white")):
        here = (tried["verdict"] == verdict).to_numpy()
        ax.plot(shown[here], rows[here], marker, color=INK, markerfacecolor=face, label=verdict)
    for row in np.flatnonzero(shown != ratio):
        side = 1 if ratio[row] < 1 else -1
        ax.annotate(
            f"{ratio[row]:.2g}",
            (shown[row], row),
            (8 * side, 0),
            textcoords="offset points",
            va="center",
            ha="left" if side > 0 else "right",
            fontsize=7,
        )
    ax.set_xscale("log")
    ax.set_xlim(0.9 / limit, 1.1 * limit)
    _plain_log_ticks(ax.xaxis)
    ax.set_yticks(rows, tried["id"])
    ax.set_ylim(len(tried) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    ax.set_xlabel("computed here / printed in the paper")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)


@theme()
def table(frame: pd.DataFrame, name: str, reports: Path | None = None) -> Figure:
    """A typeset table as ``figures/<name>.png`` and ``.csv``. Returns the figure, to show it.

    Numbers stand right, words left; up to four significant digits in print, all of them in the CSV.
    Names of columns are broken into lines of about HEADER_WIDTH letters.
    """
    heads = [str(column).replace("_", " ") for column in frame.columns]
    broken = [textwrap.wrap(head, HEADER_WIDTH, break_long_words=False) for head in heads]
    n_heads = max(map(len, broken))
    text = [[lines[k] if k < len(lines) else "" for lines in broken] for k in range(n_heads)]
    text += [[outputs.format_number(v) for v in row] for row in frame.itertuples(index=False)]
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]
    line, gap, em = 0.19, 0.22, 0.068
    widths = [max(len(row[k]) for row in text) * em for k in range(frame.shape[1])]
    lefts = np.cumsum([0.0, *[width + gap for width in widths[:-1]]])
    size = (float(lefts[-1] + widths[-1]) + 0.2, line * (len(text) + 0.9))
    figure = plt.figure(figsize=size)
    figure.set_layout_engine("none")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(-0.1, size[0] - 0.1), ylim=(size[1], 0))
    ax.axis("off")
    for number, row in enumerate(text):
        y = line * (number + (0.8 if number < n_heads else 1.15))
        for column, cell in enumerate(row):
            right = numeric[column]
            ax.text(
                lefts[column] + right * widths[column],
                y,
                cell,
                ha="right" if right else "left",
                va="center",
                fontweight="bold" if number < n_heads else "normal",
                fontsize=7.5,
                color=INK,
            )
    for y, weight in ((0.02, 1.1), (line * (n_heads + 0.45), 0.6), (size[1] - 0.02, 1.1)):
        ax.plot([0, size[0] - 0.2], [y, y], color=INK, linewidth=weight)
    _write(figure, name, frame, reports)
    return figure


def _measured_medians(ax: Axes, sizes: ArrayLike, medians: ArrayLike) -> None:
    measured = look("measured")
    ax.plot(
        sizes,
        medians,
        measured.marker,
        color=measured.color,
        markersize=4,
        markerfacecolor="white",
        label="measured, median",
    )


def _time_unit(seconds: ArrayLike) -> tuple[float, str]:
    """Factor and name of the unit in which the largest of ``seconds`` reads best."""
    largest = float(np.nanmax(np.abs(np.asarray(seconds, dtype=float))))
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if largest * factor >= 1:
            return factor, unit
    return 1e6, "µs"


def _byte_axis(ax: Axes) -> None:
    """A logarithmic axis of message sizes with at most six ticks at powers of two."""
    ax.set_xscale("log", base=2)
    low, high = (int(np.round(np.log2(limit))) for limit in ax.get_xlim())
    step = next((step for step in (1, 2, 5) if (high - low) / step <= 6), 10)
    ax.xaxis.set_major_locator(
        FixedLocator([2.0**k for k in range(-(-low // step) * step, high + 1, step)])
    )
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: units.format_bytes(size)))
    ax.set_xlabel("message size")


def _plain_log_ticks(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers: 1, 2, 5, 10 ..., evenly spaced if it is short."""
    low, high = axis.get_view_interval()
    short = low > 0 and high < 6 * low
    axis.set_major_locator(
        MaxNLocator(6) if short else LogLocator(subs=(1.0, 2.0, 5.0), numticks=12)
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _chosen(timeline: Timeline, rank: int, iteration: int | None) -> Timeline:
    """The spans of one rank, of one iteration or all. Raises UserError when there is none."""
    mask = timeline.rank == rank
    if iteration is not None:
        mask &= timeline.iteration == iteration
    spans = timeline.select(mask)
    if not spans.n:
        raise UserError(f"no span of rank {rank}, iteration {iteration} to draw")
    return spans


def _bars(ax: Axes, spans: Timeline, scale: float, unit: str) -> None:
    """Draw spans on the axes from time zero, and write their length and exposed communication."""
    start_s = float(spans.start_s.min())
    streams = list(dict.fromkeys(spans.stream.tolist()))
    lefts, widths = (spans.start_s - start_s) * scale, (spans.end_s - spans.start_s) * scale
    for kind, stream in dict.fromkeys(zip(spans.kind.tolist(), spans.stream.tolist(), strict=True)):
        style, row = look(kind), streams.index(stream)
        here = (spans.kind == kind) & (spans.stream == stream)
        ax.broken_barh(
            list(zip(lefts[here].tolist(), widths[here].tolist(), strict=True)),
            (row - 0.36, 0.72),
            facecolor=style.color,
            edgecolor="white" if here.sum() <= 60 else "none",
            linewidth=0.4,
            hatch=style.hatch,
        )
    _group_numbers(ax, spans, streams, start_s, scale)
    ax.set_yticks(range(len(streams)), streams)
    ax.set_ylim(len(streams) - 0.5, -0.5)
    ax.set_xlim(0, spans.duration_s * scale * 1.005)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
    ax.set_xlabel(f"time [{unit}]")
    total, exposed = spans.duration_s * scale, spans.exposed_communication_s() * scale
    text = f"{total:.3g} {unit}, exposed communication {exposed:.3g} {unit}"
    ax.set_title(text, loc="right", fontweight="normal", fontsize=7.5, color=SOFT)


def _kind_legend(ax: Axes, timelines: Sequence[Timeline]) -> None:
    """Name the kinds present, to the right of the axes."""
    kinds = [k for k in KINDS if any(np.any(spans.kind == k) for spans in timelines)]
    patches = [
        Patch(facecolor=look(k).color, edgecolor="white", hatch=look(k).hatch, label=look(k).label)
        for k in kinds
    ]
    ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _group_numbers(
    ax: Axes, spans: Timeline, streams: Sequence[str], start_s: float, scale: float
) -> None:
    """Write the group on each message when they are few and wide enough to carry it."""
    messages = np.flatnonzero(np.isin(spans.kind, ("all_reduce", "all_gather")))
    if len(messages) > 12:
        return
    for k in messages:
        if spans.end_s[k] - spans.start_s[k] > 0.03 * spans.duration_s:
            ax.text(
                ((spans.start_s[k] + spans.end_s[k]) / 2 - start_s) * scale,
                streams.index(str(spans.stream[k])),
                str(spans.group[k]),
                ha="center",
                va="center",
                fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
            )
