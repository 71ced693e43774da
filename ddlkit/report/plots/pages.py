"""Figures and typeset tables, and the files in which they are kept."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddlkit.report import outputs
from ddlkit.report.plots.theme import INK, WIDTH, theme
from ddlkit.store.files import atomic_write

HEADER_WIDTH = 14  # letters in a line of a table's head
LINE, GAP, LETTER = 0.19, 0.22, 0.068  # inches in a table: from line to line, between columns


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
def pictures(axes: Sequence[Axes], images: NDArray[np.uint8], names: Sequence[str]) -> None:
    """Images (n, 3, side, side) in bytes, one on each axes, each with its name above it."""
    for ax, image, name in zip(axes, images, names, strict=True):
        ax.imshow(image.transpose(1, 2, 0))
        ax.set_title(name, fontsize=6, fontweight="normal", loc="center", pad=2)
        ax.axis("off")


@theme()
def table(frame: pd.DataFrame, name: str, reports: Path | None = None) -> Figure:
    """A typeset table as ``figures/<name>.png`` and ``.csv``. Returns the figure, to show it.

    Numbers stand right, words left; up to four significant digits in print, all of them in the CSV.
    Names of columns are broken into lines of about HEADER_WIDTH letters.
    """
    head = _head(frame)
    text = [*head, *([outputs.format_number(v) for v in row] for row in frame.to_numpy(object))]
    widths = np.array([max(map(len, column)) * LETTER for column in zip(*text, strict=True)])
    rights = np.cumsum(widths + GAP) - GAP
    width, height = float(rights[-1]) + 0.2, LINE * (len(text) + 0.9)
    figure = plt.figure(figsize=(width, height))
    figure.set_layout_engine("none")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(-0.1, width - 0.1), ylim=(height, 0))
    ax.axis("off")
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]
    edges = np.where(numeric, rights, rights - widths)
    for number, row in enumerate(text):
        y = LINE * (number + (0.8 if number < len(head) else 1.15))
        weight = "bold" if number < len(head) else "normal"
        for x, right, cell in zip(edges, numeric, row, strict=True):
            side = "right" if right else "left"
            ax.text(x, y, cell, ha=side, va="center", fontweight=weight, fontsize=7.5, color=INK)
    for y, thick in ((0.02, 1.1), (LINE * (len(head) + 0.45), 0.6), (height - 0.02, 1.1)):
        ax.axhline(y, 0.1 / width, 1 - 0.1 / width, color=INK, linewidth=thick)
    _write(figure, name, frame, reports)
    return figure


def _head(frame: pd.DataFrame) -> list[list[str]]:
    """Names of the columns in words, as lines of as many cells."""
    names = [str(column).replace("_", " ") for column in frame.columns]
    broken = [textwrap.wrap(name, HEADER_WIDTH, break_long_words=False) for name in names]
    return [list(line) for line in zip_longest(*broken, fillvalue="")]
