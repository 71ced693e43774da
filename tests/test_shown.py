"""What is shown: figures with caption, grade and numbers; tables with units, few digits, and folds."""

from __future__ import annotations

import math
import os
import re
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.report import catalog, plots
from ddlkit.report.plots import shown

ENTRY = catalog.load()[0]
CAPTION = escape(ENTRY.caption)


def cells_of(page: str) -> list[str]:
    """The cells of a table, in reading order."""
    return re.findall(r"<td[^>]*>([^<]*)</td>", page)


def heads_of(page: str) -> list[str]:
    return re.findall(r'<th[^>]* class="col_heading[^>]*>([^<]*)</th>', page)


@given(st.floats(-1e12, 1e12, allow_subnormal=False), st.sampled_from(["", "s", "share"]))
def test_a_number_is_shown_to_four_digits_and_is_what_it_was(value: float, unit: str) -> None:
    text = shown.number(value, unit)
    said = float(text.removesuffix("%")) / (100 if unit == "share" else 1)
    assert said == pytest.approx(value, rel=6e-3)
    assert len(re.sub(r"e.*|[^\d]", "", text).lstrip("0")) <= 4 or "." not in text


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, ""), (math.inf, "∞"), (None, ""), (np.float64(2), "2"), (7, "7")]
)
def test_what_is_no_number_is_not_printed_as_one(value: float, text: str) -> None:
    assert shown.number(value) == text


def test_a_head_says_the_unit_a_share_is_in_per_cent_and_what_has_a_form_keeps_it() -> None:
    frame = pd.DataFrame(
        {"read_s": [1.23456], "held": [0.5], "mean_gap": [0.0123], "name": ["1.23456"]}
    )
    page = shown.table_html(frame.style.format("{:+.1%}", subset=["held"]).hide())
    assert heads_of(page) == ["read [s]", "held", "mean gap", "name"]
    assert cells_of(page) == ["1.235", "+50.0%", "1.23%", "1.23456"]


@pytest.mark.parametrize(
    ("rows", "columns", "folded"), [(30, 10, False), (31, 10, True), (30, 11, True)]
)
def test_a_long_or_wide_table_is_folded(rows: int, columns: int, folded: bool) -> None:
    page = shown.table_html(pd.DataFrame(np.zeros((rows, columns))))
    assert page.count("<details>") == page.count("</details>") == folded


def test_a_figure_has_its_caption_twice_its_grade_and_a_link_to_its_numbers(tmp_path: Path) -> None:
    figure, _ = plots.canvas(height=1)
    image = plots.save_figure(figure, ENTRY.id, pd.DataFrame({"x": [1.0]}), tmp_path)
    page = shown.figure_html(image, 720)
    assert f'alt="{CAPTION}"' in page and f'<figcaption class="caption">{CAPTION}' in page
    assert f'<span class="grade">{ENTRY.grade}</span>' in page
    (link,) = re.findall('href="([^"]*)"', page)
    assert Path(os.getcwd(), link).resolve() == image.with_suffix(".csv").resolve()
    other = shown.figure_html(image.rename(tmp_path / "mine.png"), 720)
    assert 'alt="figure mine"' in other and "mine.csv" in other and "grade" not in other


def test_a_table_of_the_catalog_stands_under_its_caption(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x_s": [1.5]})
    page = shown.table_html(frame, ENTRY.id, tmp_path / "figures" / f"{ENTRY.id}.csv")
    assert f">{CAPTION} " in page and f"{ENTRY.id}.csv" in page
