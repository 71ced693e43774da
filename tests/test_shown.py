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


def text_of(page: str) -> list[str]:
    """The cells of a table, in reading order."""
    return re.findall(r"<td[^>]*>([^<]*)</td>", page)


def heads_of(page: str) -> list[str]:
    return re.findall(r'<th[^>]* class="col_heading[^>]*>([^<]*)</th>', page)


@given(st.floats(-1e12, 1e12, allow_subnormal=False), st.sampled_from(["", "s", "1", "share"]))
def test_a_number_is_shown_to_four_digits_and_is_what_it_was(value: float, unit: str) -> None:
    told = shown.number(value, f"{value:.6f}", unit)
    said = float(told.removesuffix("%")) / (100 if unit == "share" else 1)
    assert said == pytest.approx(value, rel=6e-3)
    assert shown.digits(told) <= 4


@pytest.mark.parametrize("text", ["+3.1%", "95 to 98", "not measured", "12 ms"])
def test_what_a_notebook_has_given_a_form_stays(text: str) -> None:
    assert shown.number(1.23456, text) == text
    assert shown.number("1.23456", "1.23456") == "1.23456", "a word, whatever it looks like"


@pytest.mark.parametrize(
    ("value", "told"), [(math.nan, ""), (math.inf, "∞"), (-math.inf, "-∞"), (np.float64(2), "2")]
)
def test_what_is_no_number_is_not_printed_as_one(value: float, told: str) -> None:
    assert shown.number(value, str(float(value))) == told


def test_a_head_says_the_unit_and_a_share_has_none() -> None:
    frame = pd.DataFrame(
        {"read_s": [1.23456], "held_s": [0.5], "mean_gap": [0.0123], "name": ["a"]}
    )
    page = shown.table(frame.style.format("{:.1%}", subset=["held_s"]).hide())
    assert heads_of(page) == ["read [s]", "held", "mean gap", "name"]
    assert text_of(page) == ["1.235", "50.0%", "1.23%", "a"]


def test_a_row_is_headed_by_its_number_and_columns_in_two_floors_by_their_unit() -> None:
    index = pd.Index([0.1, 1 / 3], name="share of bytes")
    columns = pd.MultiIndex.from_product([["model_s"], ["WAIT", "MISC"]], names=[None, "phase"])
    page = shown.table(pd.DataFrame(np.full((2, 2), 2 / 3), index, columns))
    assert re.findall(r"row_heading[^>]*>([^<]*)<", page) == ["0.1", "0.3333"]
    assert heads_of(page) == ["model [s]", "WAIT", "MISC"] and text_of(page) == ["0.6667"] * 4


@pytest.mark.parametrize(
    ("rows", "columns", "folded"), [(30, 10, False), (31, 10, True), (30, 11, True)]
)
def test_a_long_or_wide_table_is_folded(rows: int, columns: int, folded: bool) -> None:
    page = shown.table(pd.DataFrame(np.zeros((rows, columns))))
    assert (f"<summary>a table of {rows} rows, {columns} columns</summary>" in page) == folded
    assert (
        page.count("<details>") == page.count("</details>") == folded and page.count("<table") == 1
    )


def test_a_figure_has_its_caption_twice_its_grade_and_a_link_to_its_numbers(tmp_path: Path) -> None:
    figure, _ = plots.canvas(height=1)
    image = plots.save_figure(figure, ENTRY.id, pd.DataFrame({"x": [1.0]}), tmp_path)
    page = shown.figure(image, 720)
    assert f'alt="{CAPTION}"' in page and f'<figcaption class="caption">{CAPTION}' in page
    assert f'<span class="grade">{ENTRY.grade}</span>' in page
    (link,) = re.findall('href="([^"]*)"', page)
    assert Path(os.getcwd(), link).resolve() == image.with_suffix(".csv").resolve()


def test_a_figure_of_no_catalog_has_its_numbers_and_a_name(tmp_path: Path) -> None:
    figure, _ = plots.canvas(height=1)
    page = shown.figure(plots.save_figure(figure, "mine", pd.DataFrame({"x": [1]}), tmp_path), 72)
    assert 'alt="figure mine"' in page and "mine.csv" in page and "grade" not in page


def test_a_table_of_the_catalog_stands_under_its_caption(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x_s": [1.5]})
    page = shown.table(frame, ENTRY.id, tmp_path / "figures" / f"{ENTRY.id}.csv")
    assert f"<caption>{CAPTION} " in page and f"{ENTRY.id}.csv" in page


@pytest.mark.parametrize("name", ["alpha_beta:ends", "mg_wfbp", "buffer:25MB", "ddp"])
def test_names_of_the_code_stay_as_they_are(name: str) -> None:
    assert shown.column(name) == (name, "")
