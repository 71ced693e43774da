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
from workbook.plots.style import has_look

_COLUMNS = own_yaml(Path(__file__).with_name("columns.yml").read_text(encoding="utf-8"))


def save_figure(
    figure: Figure,
    name: str,
    numbers: pd.DataFrame,
    reports: Path | None = None,
    *,
    tight: bool = False,
) -> Path:
    """Write a figure as ``figures/<name>.png``, its numbers as ``.csv``, and show the figure.

    Parameters
    ----------
    figure : Figure
        The figure, which is closed.
    name : str
        Its id in the catalog.
    numbers : DataFrame
        The plotted numbers.
    reports : Path, optional
        The reports directory. By default that of `outputs.reports_dir`.
    tight : bool, optional
        Whether the image is only as large as what is drawn. Such a figure is a typeset
        table, and is not shown, because `table` shows the table as text.

    Returns
    -------
    Path
        The PNG file.
    """
    outputs.write_numbers(name, numbers, reports)
    image, _ = outputs.figure_files(name, reports)
    path = write_png(figure, image, tight=tight)
    plt.close(figure)
    if not tight:
        # An inch is shown as 100 pixels.
        show(figure_html(path, round(100 * figure.get_figwidth())))
    return path


def write_png(figure: Figure, path: Path, *, tight: bool = False) -> Path:
    """Write a figure as a PNG file whose bytes depend on nothing but the figure.

    An older file keeps its content if nobody could tell its image from the new one. Processors
    differ in the last digits that they compute, which can shade a dozen pixels differently.

    Parameters
    ----------
    figure : Figure
        The figure.
    path : Path
        The file.
    tight : bool, optional
        Whether the image is only as large as what is drawn.

    Returns
    -------
    Path
        The file.
    """
    image = png(figure, tight=tight)
    if _looks_alike(path, image):
        # The time of change says that the figure was drawn again. Nothing in this package reads it.
        path.touch()
    else:
        atomic_write(path, image)
    return path


def _looks_alike(path: Path, image: bytes) -> bool:
    """Return whether no pixel of two PNG images differs by more than one shade.

    ``path`` is the file of one image, which may be missing, and ``image`` has the bytes of
    the other one.
    """
    try:
        old = np.asarray(PIL.Image.open(path), dtype=int)
    except OSError:
        # The file is missing or damaged.
        return False
    new = np.asarray(PIL.Image.open(io.BytesIO(image)), dtype=int)
    # A pixel has a shade from 0 to 255 for each of its channels, such as red.
    return old.shape == new.shape and bool(np.abs(old - new).max() <= 1)


def _shell() -> Any:
    """Return the shell of the notebook that runs this, or None outside of notebooks."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def show(page: str) -> None:
    """Display HTML in a notebook. Outside of notebooks, display nothing."""
    if _shell() is not None:
        from IPython.display import HTML, display

        display(HTML(page))


def show_tables() -> None:
    """Have this notebook render tables by `table_html` from now on.

    A table is shown if it is the last value of a cell. Outside of notebooks, this does nothing.
    """
    shell = _shell()
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    for kind in (pd.DataFrame, Styler):
        formatter.for_type(kind, table_html)


def table(
    frame: pd.DataFrame,
    name: str,
    reports: Path | None = None,
    numbers: pd.DataFrame | None = None,
    summary: str = "",
) -> Figure:
    """Typeset a table as PNG, write its numbers as CSV, and show the table as text.

    Parameters
    ----------
    frame : DataFrame
        The table.
    name : str
        Its id in the catalog.
    reports : Path, optional
        The reports directory. By default that of `outputs.reports_dir`.
    numbers : DataFrame, optional
        The numbers of the CSV file. By default they are those of the table.
    summary : str, optional
        The summary under which the table is folded. Without it, the table is not
        folded.

    Returns
    -------
    Figure
        The typeset table.
    """
    # The text and the image have heads and units for readers. The CSV file has the names and
    # the units of the code.
    readable = headed(frame, name)
    figure = _typeset(readable)
    if numbers is None:
        numbers = frame
    path = save_figure(figure, name, numbers, reports, tight=True)
    page = table_html(readable.style.hide(), name, path.with_suffix(".csv"))
    if summary:
        page = _folded(page, summary)
    show(page)
    return figure


def _typeset(readable: pd.DataFrame) -> Figure:
    """Return a figure that consists of a table with bold heads.

    The table must have at least one row, from which the height of the heads is computed.
    """
    heads = []
    # The unit of each column, in which its numbers are formatted.
    units = []
    for label in readable:
        head, unit = column(str(label))
        # The unit of a head, and each part behind a comma, has a line of its own.
        heads.append(head.replace(" [", "\n[").replace(", ", ",\n"))
        units.append(unit)
    cells = []
    for row in readable.to_numpy(object):
        cells.append(
            [number(value, unit) for value, unit in zip(row, units, strict=True)]
        )
    # The image is cut to the table, so that the size of the figure does not matter.
    figure, ax = plt.subplots(figsize=(1.0, 0.3), layout="none")
    ax.axis("off")
    drawn = ax.table([heads, *cells], loc="center", edges="horizontal", cellLoc="left")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7.5)
    columns = range(readable.shape[1])
    drawn.auto_set_column_width(columns)
    # All heads have the height of the longest one, and of at least two lines, which a name
    # with its unit needs.
    lines = max([2, *(1 + head.count("\n") for head in heads)])
    for place in columns:
        drawn[0, place].set_text_props(weight="bold")
        # Row 1 is the first row below the heads, whose cells have a single line.
        drawn[0, place].set_height(lines * drawn[1, place].get_height())
    return figure


def headed(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return a table of a paper with the heads and the units that columns.yml has for it.

    ``name`` is the id of the table in the catalog. A column that columns.yml does not list
    keeps its head, and a table that it does not list is returned as it is.

    Examples
    --------
    >>> headed(pd.DataFrame({"id": [1], "forward_us": [3270000.0]}), "dag-tab6").to_dict("list")
    {'row': [1], 'forward time, printed [ms]': [3270.0]}
    """
    readable = frame.copy()
    heads = {}
    for label, entry in _COLUMNS["tables"].get(name, {}).items():
        # An entry is either a head alone, or a head and a number. The cells of the column are
        # divided by this number, which gives them the unit in the head.
        if isinstance(entry, str):
            heads[label] = entry
            continue
        head, divisor = entry
        heads[label] = head
        if label in frame:
            readable[label] = frame[label] / divisor
    return readable.rename(columns=heads)


def title(name: str) -> str:
    """Return the title of a table of a paper by its id in the catalog.

    The id of anything else, such as a figure, gives an empty string.

    Examples
    --------
    >>> title("osf-tab2"), title("sharing-fig01")
    ('Table 2 of osf', '')
    """
    paper, separator, table_number = name.partition("-tab")
    if not separator:
        return ""
    return f"Table {table_number} of {paper}"


@cache
def _entry(name: str) -> catalog.Entry | None:
    return next((entry for entry in catalog.load() if entry.id == name), None)


def caption(name: str, numbers: Path) -> str:
    """Return HTML of the caption of a figure or of a table.

    Parameters
    ----------
    name : str
        The id of the figure or table. If the catalog has it, its caption and its grade of
        truth, such as "lab" or "model", stand before the link.
    numbers : Path
        The CSV file of the figure, to which a link leads.
    """
    # The path is relative to the working directory. While a notebook runs, that is its folder.
    link = escape(Path(os.path.relpath(numbers)).as_posix())
    numbers_link = f'<a href="{link}">numbers</a>'
    entry = _entry(name)
    if entry is None:
        return numbers_link
    grade = f'<span class="grade">{entry.grade}</span>'
    return f"{escape(entry.caption)} {grade} {numbers_link}"


def figure_html(image: Path, width: int) -> str:
    """Return HTML of a figure with its caption.

    Parameters
    ----------
    image : Path
        The PNG file. The CSV file of the same name has its numbers.
    width : int
        The width in pixels.
    """
    entry = _entry(image.stem)
    alt = escape(entry.caption if entry else f"figure {image.stem}")
    data = b64encode(image.read_bytes()).decode()
    words = caption(image.stem, image.with_suffix(".csv"))
    return (
        '<figure style="margin: 0">'
        f'<img alt="{alt}" width="{width}" src="data:image/png;base64,{data}">'
        f'<figcaption class="caption">{words}</figcaption></figure>'
    )


_QUALIFIED = re.compile(
    "(?P<plain>.+?)(?: (?P<qualifier>computed|difference|least|most))?"
)
"""The words of a column, and how its numbers differ from the printed ones, if at all."""


def column(name: str) -> tuple[str, str]:
    """Return the head of a column, as readers see it, and the unit of its numbers.

    The unit is "share" if the numbers are shares, which are shown in per cent. The unit is empty
    if the numbers have none.

    Examples
    --------
    >>> column("iteration_s"), column("size_mb_computed"), column("size_mb_difference")
    (('iteration [s]', 's'), ('size computed [MB]', 'MB'), ('size difference', 'share'))
    >>> column("exposed [s]"), column("mean_gap"), column("gflop_per_s")
    (('exposed [s]', 's'), ('mean gap', 'share'), ('rate [Gflop/s]', 'Gflop/s'))
    """
    # A name such as "exposed [s]" already has its unit.
    bracketed = re.search(r"\[(.+)\]", name)
    if bracketed:
        return name.replace("_", " "), bracketed[1]
    if has_look(name):
        # The name is that of a series in figures, such as a plan, and stays as it is.
        return name, ""
    # Some names of the code are shown by other words.
    words = _COLUMNS["names"].get(name, name).replace("_", " ")
    match = _QUALIFIED.fullmatch(words)
    # An empty name does not match.
    if match is None:
        return words, ""
    # "size mb computed" is "size mb" and the qualifier "computed".
    plain = match["plain"]
    qualifier = match["qualifier"] or ""
    # "size mb" is "size" in "MB". A name that is only a unit keeps words: "seconds" stays as it is,
    # and "gflop per s" becomes "rate".
    quantity, unit = _without_unit(plain)
    head = f"{quantity} {qualifier}".strip()
    if qualifier == "difference":
        # Differences from print are relative, whatever the unit of the printed numbers.
        return head, "share"
    if quantity == "seconds":
        # The head says the unit itself.
        return head, unit
    if unit:
        return f"{head} [{unit}]", unit
    # Without a unit, words such as "gap" or "error" say that the numbers are shares.
    is_share = not set(quantity.split(" ")).isdisjoint(_COLUMNS["shares"])
    return head, "share" if is_share else ""


def _without_unit(words: str) -> tuple[str, str]:
    """Return the words of a column without the unit in which they end, and the unit.

    The unit is empty if they do not end in one.
    """
    # The first ending that fits counts, so columns.yml has "bytes_per_s" before "s".
    for ending, unit in _COLUMNS["units"].items():
        # With the blanks, only whole words are compared.
        if not f" {words}".endswith(" " + ending.replace("_", " ")):
            continue
        rest = words[: -len(ending)].strip()
        if not rest:
            # The name of the column is nothing but the unit, such as "gflop_per_s".
            rest = "rate" if "_per_" in ending else ending
        return rest, unit
    return words, ""


def number(value: Any, unit: str = "") -> str:
    """Return a value as the text of a cell.

    A value that is no float is written as it is. None and NaN give an empty text. A float has
    up to four significant digits. A share (``unit`` is "share") is in per cent.

    Examples
    --------
    >>> number(0.0022349), number(0.0022349, "share"), number(45.512, "share"), number("a")
    ('0.002235', '0.223%', '4551%', 'a')
    """
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "share" and not math.isnan(value):
        percent = 100 * value
        # From 1000% on, a number has more than three digits before the point, and .3g would
        # write it with an exponent.
        return f"{percent:.3g}%" if abs(value) < 10 else f"{percent:.0f}%"
    return outputs.format_number(float(value))


MOST_ROWS = 30
MOST_COLUMNS = 10
"""The size of the largest table that is not folded."""


def table_html(
    frame: pd.DataFrame | Styler, name: str = "", numbers: Path | None = None
) -> str:
    """Return HTML of a table whose heads have units.

    A table of more than MOST_ROWS rows or MOST_COLUMNS columns is folded.

    Parameters
    ----------
    frame : DataFrame or Styler
        The table.
    name : str, optional
        Its id in the catalog.
    numbers : Path, optional
        The CSV file of its numbers. With it, the table has a caption.

    Returns
    -------
    str
    """
    styler = frame if isinstance(frame, Styler) else frame.style
    _format_numbers(styler)
    # `column` returns a head, which contains the unit, and the unit.
    styler.format_index(lambda label: column(str(label))[0], axis="columns")
    styler.format_index(number, axis="index")
    data = styler.data
    numeric = data.select_dtypes("number").columns
    if len(numeric):
        # The columns of numbers, in all rows.
        styler.set_properties(subset=(slice(None), numeric), **{"text-align": "right"})
    page = styler.to_html()
    table_title = title(name)
    if numbers:
        bold = f"<b>{table_title}.</b> " if table_title else ""
        page = f'<p class="caption">{bold}{caption(name, numbers)}</p>{page}'
    rows, columns = data.shape
    if rows <= MOST_ROWS and columns <= MOST_COLUMNS:
        return page
    size = f"{rows} rows and {columns} columns"
    return _folded(page, f"{table_title or 'A table'}: {size}, folded")


def _format_numbers(styler: Styler) -> None:
    """Format the cells of a table in the units of their columns.

    Columns that already have a format keep it.
    """
    data = styler.data
    # The keys of this dict are the rows and the columns of cells that have a format.
    formatted = {place for _, place in styler._display_funcs}
    # The head of a column can have several levels, and each level can have a name. The lowest
    # level that states a unit decides. If none does, the first name that states one decides.
    units_of_names = [column(str(level))[1] for level in data.columns.names if level]
    for place, label in enumerate(data.columns):
        if place in formatted:
            continue
        levels = label if isinstance(label, tuple) else (label,)
        units = [column(str(level))[1] for level in reversed(levels)]
        unit = next(filter(None, [*units, *units_of_names]), "")
        styler.format(partial(number, unit=unit), subset=(slice(None), [label]))


def _folded(page: str, summary: str) -> str:
    """Return HTML of which only the summary is seen until it is opened."""
    return f"<details><summary>{escape(summary)}</summary>{page}</details>"


def fold(frame: pd.DataFrame, summary: str, rows: str | None = None) -> None:
    """Show a table that is looked up and not read: folded, under its summary.

    Parameters
    ----------
    frame : DataFrame
        The table.
    summary : str
        The text that is seen until the table is opened.
    rows : str, optional
        The heading of the labels of the rows. By default they have none.
    """
    # The heading is given as the name of the columns, because pandas prints that above the labels
    # of the rows, in the same line as the heads. The name of the index would take another line.
    page = frame.rename_axis(index=None, columns=rows).to_html(border=0)
    show(_folded(page, summary))


def on_this_machine(sentence: str, figure: Figure | None = None) -> None:
    """Show what was measured on this machine, apart from the recording that the text is about.

    Parameters
    ----------
    sentence : str
        What the numbers measured here say, made from them.
    figure : Figure, optional
        A drawing of them. The figure is shown and not saved: reports/ holds figures of
        recordings only.
    """
    words = f"<b>On this machine.</b> {escape(sentence)}"
    show(f'<div class="live" style="border: 2px solid; padding: 0.5em">{words}</div>')
    if figure is not None:
        # An inch is shown as 100 pixels, as in `save_figure`.
        data = b64encode(png(figure)).decode()
        width = round(100 * figure.get_figwidth())
        plt.close(figure)
        show(
            f'<img alt="{escape(sentence)}" width="{width}" src="data:image/png;base64,{data}">'
        )
