"""The files of figures and typeset tables, and what a notebook and the site show of them."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from base64 import b64encode
from functools import cache, partial
from html import escape
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import PIL.Image
from matplotlib.figure import Figure
from pandas.io.formats.style import Styler

from ddlkit.show import png
from ddlkit.store.files import atomic_write, own_yaml
from workbook.common import catalog, outputs
from workbook.plots.style import known

_COLUMNS = own_yaml(Path(__file__).with_name("columns.yml").read_text(encoding="utf-8"))


def save_figure(
    figure: Figure,
    name: str,
    numbers: pd.DataFrame,
    reports: Path | None = None,
    *,
    tight: bool = False,
) -> Path:
    """Write ``figures/<name>.png`` and ``.csv``, the numbers; show it in a notebook. Returns the PNG.

    tight : as of `write_png`; such a figure is not shown
    """
    outputs.write_numbers(name, numbers, reports)
    path = write_png(figure, outputs.figure_files(name, reports)[0], tight=tight)
    plt.close(figure)
    if not tight:
        show(figure_html(path, round(100 * figure.get_figwidth())))
    return path


def write_png(figure: Figure, path: Path, *, tight: bool = False) -> Path:
    """Write a figure as a file whose bytes depend on nothing but the figure; return its path.

    tight : whether the image is only as large as what is drawn

    An image that nobody could tell from it stays: processors' last digits shade a dozen pixels otherwise.
    """
    image = png(figure, tight=tight)
    try:
        old, new = (
            np.asarray(PIL.Image.open(file), dtype=int)
            for file in (path, io.BytesIO(image))
        )
        alike = old.shape == new.shape and np.abs(old - new).max() <= 1  # of 255 shades
    except OSError:  # none there, or damaged
        alike = False
    if alike:
        path.touch()
    else:
        atomic_write(path, image)
    return path


def _shell() -> Any:
    """Return the notebook that runs this; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def show(page: str) -> None:
    """Display HTML where a notebook runs; nothing elsewhere."""
    if _shell() is not None:
        from IPython.display import HTML, display

        display(HTML(page))


def show_tables() -> None:
    """Show from now on what a cell of a notebook ends with as `table_html` has it, if it is a table."""
    if (shell := _shell()) is not None:
        for kind in (pd.DataFrame, Styler):
            shell.display_formatter.formatters["text/html"].for_type(kind, table_html)


def table(
    frame: pd.DataFrame,
    name: str,
    reports: Path | None = None,
    numbers: pd.DataFrame | None = None,
    summary: str = "",
) -> Figure:
    """Typeset a table as PNG and CSV (``numbers``, if more than is shown), show it as text, and return it.

    With a ``summary``, the table is shown folded under this summary.
    """
    readable = headed(frame, name)
    heads, units = zip(*(column(str(label)) for label in readable), strict=True)
    cells = [[*map(number, row, units)] for row in readable.to_numpy(object)]
    figure, ax = plt.subplots(
        figsize=(1.0, 0.3), layout="none"
    )  # the table's extent is kept
    ax.axis("off")
    names = [head.replace(" [", "\n[").replace(", ", ",\n") for head in heads]
    lines = 1 + max(head.count("\n") for head in names)
    drawn = ax.table([names, *cells], loc="center", edges="horizontal", cellLoc="left")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7.5)
    drawn.auto_set_column_width(range(frame.shape[1]))
    for place in range(frame.shape[1]):
        drawn[0, place].set_text_props(weight="bold")
        drawn[0, place].set_height(max(2, lines) * drawn[1, place].get_height())
    numbers = frame if numbers is None else numbers
    path = save_figure(figure, name, numbers, reports, tight=True)
    page = table_html(readable.style.hide(), name, path.with_suffix(".csv"))
    show(_folded(page, summary) if summary else page)
    return figure


def headed(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return a table of a paper with the heads and in the units that columns.yml has for it.

    >>> headed(pd.DataFrame({"id": [1], "forward_us": [3270000.0]}), "dag-tab6").to_dict("list")
    {'row': [1], 'forward time, printed [ms]': [3270.0]}
    """
    readable = frame.copy()
    heads = {}
    for label, entry in _COLUMNS["tables"].get(name, {}).items():
        heads[label] = entry if isinstance(entry, str) else entry[0]
        if label in frame and not isinstance(entry, str):
            readable[label] = frame[label] / entry[1]
    return readable.rename(columns=heads)


def title(name: str) -> str:
    """Return the title of a paper's table, by its name in the catalog; "" of all others.

    >>> title("osf-tab2"), title("sharing-fig01")
    ('Table 2 of osf', '')
    """
    paper, table, place = name.partition("-tab")
    return f"Table {place} of {paper}" if table else ""


@cache
def _entry(name: str) -> catalog.Entry | None:
    return next((entry for entry in catalog.load() if entry.id == name), None)


def caption(name: str, numbers: Path) -> str:
    """Return what stands under a figure: caption and grade by the catalog, a link to its numbers."""
    entry = _entry(name)
    words = (
        f'{escape(entry.caption)} <span class="grade">{entry.grade}</span> '
        if entry
        else ""
    )
    link = escape(Path(os.path.relpath(numbers)).as_posix())
    return f'{words}<a href="{link}">numbers</a>'


def figure_html(image: Path, width: int) -> str:
    """Return HTML of a figure so many pixels wide, from its PNG; its numbers lie beside it."""
    entry = _entry(image.stem)
    alt = escape(entry.caption if entry else f"figure {image.stem}")
    data = b64encode(image.read_bytes()).decode()
    return (
        f'<figure style="margin: 0"><img alt="{alt}" width="{width}" src="data:image/png;base64,{data}">'
        f'<figcaption class="caption">{caption(image.stem, image.with_suffix(".csv"))}</figcaption></figure>'
    )


def column(name: str) -> tuple[str, str]:
    """Return what the head of a table calls a column, and its unit; "share" of what is shown in per cent.

    >>> column("iteration_s"), column("size_mb_computed"), column("size_mb_difference")
    (('iteration [s]', 's'), ('size computed [MB]', 'MB'), ('size difference', 'share'))
    >>> column("exposed [s]"), column("mean_gap"), column("gflop_per_s")
    (('exposed [s]', 's'), ('mean gap', 'share'), ('rate [Gflop/s]', 'Gflop/s'))
    """
    if bracketed := re.search(r"\[(.+)\]", name):
        return name.replace("_", " "), bracketed[1]
    if known(name):
        return name, ""
    words, unit = _COLUMNS["names"].get(name, name).replace("_", " "), ""
    pattern = "(.+?)(?: (computed|difference|least|most))?$"
    ((plain, qualifier),) = re.findall(pattern, words)
    of_share = {*plain.split(" ")} & {*_COLUMNS["shares"]}
    for ending, spelled in _COLUMNS["units"].items():
        if (" " + plain).endswith(" " + ending.replace("_", " ")):
            plain, unit = plain[: -len(ending)].strip(), spelled
            plain = plain or ("rate" if "_per_" in ending else ending)
            break
    head = f"{plain} {qualifier}".strip()
    if qualifier == "difference" or (not unit and of_share):
        return head, "share"
    return (f"{head} [{unit}]" if unit and plain != "seconds" else head), unit


def number(value: Any, unit: str = "") -> str:
    """Return a cell's text: of a float up to four significant digits, in per cent where it is a share.

    >>> number(0.0022349), number(0.0022349, "share"), number(45.512, "share"), number("a")
    ('0.002235', '0.223%', '4551%', 'a')
    """
    if value is None or not isinstance(value, float):
        return "" if value is None else str(value)
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "share" and value == value:
        return f"{100 * value:.3g}%" if abs(value) < 10 else f"{100 * value:.0f}%"
    return outputs.format_number(float(value))


def table_html(
    frame: pd.DataFrame | Styler, name: str = "", numbers: Path | None = None
) -> str:
    """Return HTML of a table, its head with units, folded if large; with ``numbers``, under its caption."""
    styler = frame if isinstance(frame, Styler) else frame.style
    data, formed = styler.data, {place for _, place in styler._display_funcs}
    outer = [column(str(level))[1] for level in data.columns.names if level]
    for place, label in enumerate(data.columns):
        levels = label if isinstance(label, tuple) else (label,)
        units = [column(str(level))[1] for level in reversed(levels)]
        unit = next(filter(None, [*units, *outer]), "")
        if place not in formed:
            styler.format(partial(number, unit=unit), subset=(slice(None), [label]))
    styler.format_index(lambda label: column(str(label))[0], axis="columns")
    styler.format_index(number, axis="index")
    numeric = data.select_dtypes("number").columns
    if len(numeric):
        styler.set_properties(subset=(slice(None), numeric), **{"text-align": "right"})
    page = styler.to_html()
    above = f"<b>{title(name)}.</b> " if title(name) else ""
    if numbers:
        page = f'<p class="caption">{above}{caption(name, numbers)}</p>{page}'
    rows, columns = data.shape
    if rows <= 30 and columns <= 10:
        return page
    return _folded(
        page,
        f"{title(name) or 'A table'}: {rows} rows and {columns} columns, folded",
    )


def _folded(page: str, summary: str) -> str:
    """Return HTML of which only the summary is seen until it is opened."""
    return f"<details><summary>{escape(summary)}</summary>{page}</details>"


def fold(frame: pd.DataFrame, summary: str, rows: str | None = None) -> None:
    """Show a table that is looked up and not read: folded, under its summary.

    rows : what the labels of its rows say
    """
    page = frame.rename_axis(index=None, columns=rows).to_html(border=0)
    show(_folded(page, summary))


def on_this_machine(sentence: str, figure: Figure | None = None) -> None:
    """Show what was measured on this machine, apart from the recording that the text speaks of.

    Parameters
    ----------
    sentence : str
        What the numbers measured here say, made from them.
    figure : Figure, optional
        A drawing of them. The figure is shown and not saved: reports/ holds figures of recordings only.
    """
    words = f"<b>On this machine.</b> {escape(sentence)}"
    show(f'<div class="live" style="border: 2px solid; padding: 0.5em">{words}</div>')
    if figure is not None:
        data = b64encode(png(figure)).decode()
        width = round(100 * figure.get_figwidth())
        plt.close(figure)
        show(
            f'<img alt="{escape(sentence)}" width="{width}" src="data:image/png;base64,{data}">'
        )
