"""Figures and typeset tables, and the files in which they are kept."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import PIL.Image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddlkit.report import outputs
from ddlkit.report.plots import shown
from ddlkit.report.plots.style import INK, WIDTH, theme
from ddlkit.store.files import atomic_write

HEADER_WIDTH = 14  # letters in a line of a table's head
MOST_NAMES = 6  # beside each other in a legend above a figure
LINE = 0.19  # inches from line to line
TITLE_LETTER = 0.074  # inches of a letter of a title


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
    _show(figure, partial(shown.figure, path, round(100 * figure.get_figwidth())))
    return path


def _write(
    figure: Figure, name: str, numbers: pd.DataFrame, reports: Path | None, **options: Any
) -> Path:
    outputs.write_numbers(name, numbers, reports)
    path, _ = outputs.figure_files(name, reports)
    return write_png(figure, path, **options)


def write_png(figure: Figure, path: Path, **options: Any) -> Path:
    """A figure as a file of its own, whose bytes depend on nothing but the figure. Returns the path.

    An image that is there already, and that nobody could tell from it, stays: processors that differ in a
    number's last digit shade a dozen pixels otherwise.
    """
    buffer = io.BytesIO()
    with theme():
        figure.savefig(buffer, format="png", metadata={"Software": None}, **options)
    if _looks_like(path, buffer):
        path.touch()
    else:
        atomic_write(path, buffer.getvalue())
    return path


def _looks_like(path: Path, image: io.BytesIO) -> bool:
    """Whether the PNG there differs from ``image`` in no pixel by more than one of 255 shades."""
    try:
        old, new = (np.asarray(PIL.Image.open(one), dtype=int) for one in (path, image))
    except OSError:  # none there, or damaged
        return False
    return old.shape == new.shape and bool(np.abs(old - new).max() <= 1)


def _show(figure: Figure, make: Callable[[], str]) -> None:
    """In a notebook, show the HTML that ``make`` gives: a figure's own showing ends with the first theme."""
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython
    from IPython.display import HTML, display

    if get_ipython() is not None:
        plt.close(figure)
        display(HTML(make()))


@theme()
def heading(ax: Axes, text: str) -> None:
    """The bold title of a panel, at its left."""
    ax.set_title(text)


@theme()
def title(figure: Figure, text: str) -> None:
    """What a figure of several panels finds, above them all, in lines as wide as it."""
    letters = int(figure.get_figwidth() / TITLE_LETTER)
    lines = "\n".join(textwrap.wrap(text, letters))
    figure.suptitle(lines, x=0.01, ha="left", fontsize=9, fontweight="bold")


@theme()
def shared_legend(figure: Figure, *axes: Axes) -> None:
    """The legend of some panels, by default the first, above all panels; the layout must be constrained."""
    found: dict[str, Any] = {}
    for ax in axes or figure.axes[:1]:
        handles, labels = ax.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure.legend(
        found.values(), found, loc="outside upper left", ncols=min(MOST_NAMES, len(found))
    )


@theme()
def pictures(axes: Sequence[Axes], images: NDArray[np.uint8], names: Sequence[str]) -> None:
    """Images (n, 3, side, side) in bytes, one on each axes, each with its name above it."""
    for ax, image, name in zip(axes, images, names, strict=True):
        ax.imshow(image.transpose(1, 2, 0))
        ax.set_title(name, fontsize=6, fontweight="normal", loc="center", pad=2)
        ax.axis("off")


@theme()
def table(
    frame: pd.DataFrame, name: str, reports: Path | None = None, numbers: pd.DataFrame | None = None
) -> Figure:
    """A typeset table as ``figures/<name>.png`` and ``.csv``; in a notebook also shown, as text.

    Numbers stand right, words left; up to four significant digits in print, all of them in the CSV.
    Names of columns are broken into lines of about HEADER_WIDTH letters.
    numbers : what the CSV has, where that is more than is shown
    """
    names = [shown.column(str(column))[0] for column in frame.columns]
    head = [textwrap.fill(one, HEADER_WIDTH, break_long_words=False) for one in names]
    units = shown.units(frame)
    text = [
        [shown.number(value, str(value), unit) for value, unit in zip(row, units, strict=True)]
        for row in frame.to_numpy(object)
    ]
    figure, ax = plt.subplots(figsize=(1.0, 0.3))  # what is kept is the table's extent
    figure.set_layout_engine("none")
    ax.axis("off")
    drawn = ax.table(text, colLabels=head, loc="center")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7.5)
    drawn.auto_set_column_width(range(frame.shape[1]))
    n_lines = 1 + max(name.count("\n") for name in head)
    line = LINE / (0.3 * ax.get_position().height)
    for (row, column), cell in drawn.get_celld().items():
        side = "right" if pd.api.types.is_numeric_dtype(frame.dtypes.iloc[column]) else "left"
        cell.set_text_props(ha=side, weight="normal" if row else "bold", color=INK)
        cell.set(height=line * (1 if row else n_lines + 0.5), edgecolor=INK, linewidth=0.8)
        cell.visible_edges = "TB" if row == 0 else "B" if row == len(frame) else "open"
    kept = frame if numbers is None else numbers
    path = _write(figure, name, kept, reports, bbox_inches="tight")
    _show(figure, partial(shown.table, frame.style.hide(), name, path.with_suffix(".csv")))
    return figure
