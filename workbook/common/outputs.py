"""The reports directory, in which notebooks write for the catalog, the site and reports.

figures/<id>.png, figures/<id>.csv     one figure or table and the numbers in it
summaries/<name>.json                  the key numbers of one notebook
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from workbook.common import places

REPORTS_VARIABLE = "DDLKIT_REPORTS"
DIGITS = 6
"""Significant digits of what is published: as many as every processor computes alike."""
Number = int | float | str | bool


def reports_dir() -> Path:
    """Return the directory for reports.

    It is ``$DDLKIT_REPORTS``, which the book sets for its notebooks, else
    build/reports.
    """
    return Path(os.environ.get(REPORTS_VARIABLE) or places.BUILD / "reports")


def figure_files(figure: str, reports: Path | None = None) -> tuple[Path, Path]:
    """Return the paths of a figure's image and of its plotted numbers."""
    stem = (reports or reports_dir()) / "figures" / figure
    return stem.with_suffix(".png"), stem.with_suffix(".csv")


def is_made(figure: str, reports: Path) -> bool:
    """Return whether both files of a figure are there."""
    return all(path.is_file() for path in figure_files(figure, reports))


def write_numbers(
    figure: str, frame: pd.DataFrame, reports: Path | None = None
) -> Path:
    """Write the plotted numbers of a figure as CSV, each `rounded`.

    Parameters
    ----------
    figure : str
        The id of the figure.
    frame : DataFrame
        The numbers. Its index is not written.
    reports : Path, optional
        The reports directory. By default `reports_dir`.

    Returns
    -------
    Path
        The CSV file.
    """
    _, path = figure_files(figure, reports)
    text = frame.map(rounded).to_csv(index=False, lineterminator="\n")
    store.atomic_write_text(path, text)
    return path


def rounded(value: Any) -> Any:
    """Return a number with DIGITS significant digits.

    Whole numbers, numbers that are not finite, and values that are no float are unchanged.

    Examples
    --------
    >>> rounded(0.1 + 0.2), rounded(123456789.0), rounded("a")
    (0.3, 123456789.0, 'a')
    """
    if not isinstance(value, float | np.floating):
        return value
    if not math.isfinite(value) or value % 1 == 0:
        return value
    return float(f"{value:.{DIGITS}g}")


def record_summary(
    name: str, numbers: Mapping[str, Any], reports: Path | None = None
) -> dict[str, Number]:
    """Write the key numbers of a notebook for REPRODUCTION.md.

    Parameters
    ----------
    name : str
        The name of the notebook.
    numbers : mapping of str to number
        The numbers by name. The name of a number says its unit.
    reports : Path, optional
        The reports directory. By default `reports_dir`.

    Returns
    -------
    dict
        The numbers as written, `rounded`.

    Raises
    ------
    ValueError
        If a number is not finite, which JSON cannot have.
    """
    written: dict[str, Number] = {}
    for key, value in numbers.items():
        # JSON cannot write the numbers of NumPy, so they become those of Python.
        plain = value.item() if isinstance(value, np.generic) else value
        written[key] = rounded(plain)
    path = (reports or reports_dir()) / "summaries" / f"{name}.json"
    store.atomic_write_text(path, json.dumps(written, indent=1, allow_nan=False) + "\n")
    return written


def read_summaries(reports: Path) -> dict[str, dict[str, Number]]:
    """Return all summaries of a reports directory by name, in reading order."""
    paths = sorted((reports / "summaries").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def format_number(value: Any) -> str:
    """Return a number for readers, with up to four significant digits.

    A number that is not finite gives an empty string. A value that is no float is returned
    as its text.

    Examples
    --------
    >>> format_number(0.0220108), format_number(123456.7), format_number(3)
    ('0.02201', '123457', '3')
    """
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return ""
    if 1e4 <= abs(value) < 1e9:
        # With four significant digits, such a number would have an exponent. It is written
        # with all digits before the point instead. Larger numbers keep the exponent.
        return f"{value:.0f}"
    return f"{value:.4g}"


def format_quantity(value: float, unit: str) -> str:
    """Return a number with its unit. The unit "1", of a plain number, is not written.

    A number that is not finite gives an empty string.

    Examples
    --------
    >>> format_quantity(2.5, "ms"), format_quantity(40.0, "%"), format_quantity(0.5, "1")
    ('2.5 ms', '40%', '0.5')
    """
    number = format_number(value)
    if not number or unit == "1":
        return number
    if unit in ("%", "x"):
        return f"{number}{unit}"
    return f"{number} {unit}"
