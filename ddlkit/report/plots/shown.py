"""What a notebook shows of figures and tables, in JupyterLab as on the site.

A figure has its caption, its grade of truth and its numbers under it, and its caption for those who cannot
see it. A table says its units in its head and has up to four significant digits; a wide or long one is
folded.
"""

from __future__ import annotations

import math
import os
import re
import sys
from base64 import b64encode
from collections.abc import Sequence
from functools import cache, partial
from html import escape, unescape
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.io.formats.style import Styler

from ddlkit.report import catalog, outputs
from ddlkit.report.plots.style import FAMILIES
from ddlkit.report.source import Source
from ddlkit.store.files import own_yaml

MOST_COLUMNS, MOST_ROWS = 10, 30
"""A larger table is folded."""
_COLUMNS = own_yaml(Path(__file__).with_name("columns.yml").read_text(encoding="utf-8"))
_QUALIFIERS = ("computed", "difference", "least", "most")
_PLAIN = re.compile(r"[+-]?[\d ,]*\.?\d*(?:e[+-]?\d+)?|nan|-?inf")
_HEAD = re.compile(
    r'(<th[^>]* class="(?:index_name|col_heading level\d+ col(\d+))[^>]*>)([^<]*)(</th>)'
)
_ROW = re.compile(r'(<th[^>]* class="row_heading level(\d+) row(\d+)[^>]*>)([^<]*)(</th>)')
_CELL = re.compile(r'<td( id="[^"]*" class="data row(\d+) col(\d+)[^>]*)>([^<]*)</td>')


_captions = cache(catalog.captions)


def caption(name: str, numbers: Path) -> str:
    """What stands under a figure or table: caption and grade as the catalog has them, a link to its numbers.

    The link leads from where the notebook works. What is in no catalog has the link alone.
    """
    entry = _captions().get(name)
    told = f'{escape(entry[0])} <span class="grade">{entry[1]}</span> ' if entry else ""
    link = escape(Path(os.path.relpath(numbers)).as_posix())
    return f'{told}<a href="{link}">numbers</a>'


def figure(image: Path, width: int) -> str:
    """HTML of a figure so many pixels wide, from its PNG; its numbers lie beside it."""
    entry = _captions().get(image.stem)
    alt = escape(entry[0] if entry else f"figure {image.stem}")
    data = b64encode(image.read_bytes()).decode()
    return (
        f'<figure style="margin: 0"><img alt="{alt}" width="{width}" src="data:image/png;base64,{data}">'
        f'<figcaption class="caption">{caption(image.stem, image.with_suffix(".csv"))}</figcaption></figure>'
    )


def column(name: str) -> tuple[str, str]:
    """What the head of a table calls a column, and its unit by its name.

    The unit is "share" of what is shown in per cent, "1" of a number without unit, "" where nothing is known.

    >>> column("iteration_s"), column("size_mb_computed"), column("size_mb_difference")
    (('iteration [s]', 's'), ('size computed [MB]', 'MB'), ('size difference', 'share'))
    >>> column("exposed [s]"), column("mean_gap"), column("seconds")
    (('exposed [s]', 's'), ('mean gap', 'share'), ('seconds', 's'))
    >>> column("gflop_per_s"), column("link_bits_per_s")
    (('rate [Gflop/s]', 'Gflop/s'), ('link [bit/s]', 'bit/s'))
    """
    if said := re.search(r"\[(.+)\]", name):
        return name.replace("_", " "), said[1]
    if any(name.partition(":")[0] in family for family in FAMILIES.values()):
        return name, ""
    name = _COLUMNS["names"].get(name, name)
    words = re.split(r"[_ ]", name)
    qualifier = [words.pop()] if words[-1] in _QUALIFIERS and len(words) > 1 else []
    found = ""
    for end, one in _COLUMNS["units"].items():
        if words[-len(end.split("_")) :] == end.split("_"):
            found, words = one, words[: -len(end.split("_"))] or [end]
            break
    spoken = " ".join(words + qualifier)
    if qualifier == ["difference"] or (not found and {*words} & {*_COLUMNS["shares"]}):
        return spoken, "share"
    if not found:
        plain = {*words, *qualifier} & {*_COLUMNS["numbers"], *_COLUMNS["rows"]}
        return spoken, "1" if plain else ""
    if spoken in _COLUMNS["units"]:
        return (f"rate [{found}]" if "_per_" in spoken else spoken), found
    return f"{spoken} [{found}]", found


def number(value: Any, text: str, unit: str = "") -> str:
    """A cell: a number with up to four significant digits, in per cent for a share; ``text`` if it is none.

    What the notebook has given a form of its own, as "+3.1%" or "95 to 98", stays.

    >>> number(0.0022349, "0.002"), number(0.0022349, "0.002", "share"), number(2.5, "+2.500")
    ('0.002235', '0.223%', '+2.5')
    >>> number(45.512, "45.512", "share")
    '4551%'
    """
    if text.endswith("%") and digits(text) > 4:
        return f"{float(text[:-1]):.4g}%"
    if not isinstance(value, float) or not _PLAIN.fullmatch(text.strip()):
        return text
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "share" and value == value:
        return f"{100 * value:.3g}%" if abs(value) < 10 else f"{100 * value:.0f}%"
    sign = "+" if text.strip().startswith("+") and value > 0 else ""
    return sign + outputs.format_number(float(value))


def digits(text: str) -> int:
    """Significant digits of a number with a fraction; 0 of a whole number, and of what is none.

    >>> digits("0.002235"), digits("12.50"), digits("123457"), digits("1.2e-05")
    (4, 4, 0, 2)
    """
    found = re.fullmatch(r"[+-]?([\d ,]*\.\d+)(?:e[+-]?\d+)?%?", text)
    return len(re.sub(r"[^\d]", "", found[1]).lstrip("0")) if found else 0


def table(frame: pd.DataFrame | Styler, name: str = "", numbers: Path | None = None) -> str:
    """HTML of a table: units in its head, numbers right, words left; folded if it is wide or long.

    name : of the catalog, with the path of its numbers; its caption then stands above the table
    """
    styler = frame if isinstance(frame, Styler) else frame.style
    page = styler.set_caption(caption(name, numbers)).to_html() if numbers else styler.to_html()
    shares = {found[3] for found in _CELL.finditer(page) if found[4].endswith("%")}
    page = _HEAD.sub(partial(_head, shares), page)
    page = _ROW.sub(partial(_row, styler.data.index), page)
    page = _CELL.sub(partial(_cell, styler.data, units(styler.data)), page)
    page = page.replace('<style type="text/css">\n</style>\n', "")
    rows, columns = styler.data.shape
    if rows <= MOST_ROWS and columns <= MOST_COLUMNS:
        return page
    summary = f"{name + ', ' if name else ''}a table of {rows} rows, {columns} columns"
    return f"<details><summary>{summary}</summary>{page}</details>"


def _head(shares: set[str], found: re.Match[str]) -> str:
    """The head of a column; none of ``shares``, their numbers as text, has the unit of what is shared."""
    words, unit = column(unescape(found[3]))
    if found[2] in shares:
        words = words.removesuffix(f" [{unit}]")
    return f"{found[1]}{escape(words, quote=False)}{found[4]}"


def units(frame: pd.DataFrame) -> list[str]:
    """Of each column, the unit that the innermost of its names says, or that of all columns."""
    outer = [str(name) for name in frame.columns.names if name]
    names = [
        (*outer, *map(str, one)) if isinstance(one, tuple) else (*outer, str(one)) for one in frame
    ]
    return [next(filter(None, (column(name)[1] for name in each[::-1])), "") for each in names]


def _row(index: pd.Index, found: re.Match[str]) -> str:
    """The head of a row, its number as numbers are shown."""
    value = index.get_level_values(int(found[2]))[int(found[3])]
    return f"{found[1]}{number(value, found[4])}{found[5]}"


def _cell(frame: pd.DataFrame, units: Sequence[str], found: re.Match[str]) -> str:
    row, place = int(found[2]), int(found[3])
    value = frame.iat[row, place]
    side = ' style="text-align: right"' if pd.api.types.is_number(value) else ""
    return f"<td{found[1]}{side}>{number(value, found[4], units[place])}</td>"


def live_box(source: Source, kind: str, sentence: str) -> None:
    """Show what this machine's own tables of ``kind`` say, in a marked box; of recorded ones nothing."""
    if source.is_live(kind):
        measured_here(sentence)


def measured_here(sentence: str) -> None:
    """Show what was measured on this machine, in a marked box."""
    from IPython.display import HTML, display

    words = f"<b>Measured on this machine.</b> {escape(sentence)}"
    display(HTML(f'<div class="live" style="border: 2px solid; padding: 0.5em">{words}</div>'))


def show_tables() -> None:
    """From now on, what a cell of a notebook ends with is shown as `table` has it, if it is a table."""
    if "IPython" in sys.modules:
        from IPython import get_ipython

        if (shell := get_ipython()) is not None:
            html = shell.display_formatter.formatters["text/html"]
            for kind in (pd.DataFrame, Styler):
                html.for_type(kind, table)
