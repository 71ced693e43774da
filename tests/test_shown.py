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

from workbook import plots
from workbook.common import catalog
from workbook.plots import shown

ENTRY = catalog.load()[0]
CAPTION = escape(ENTRY.caption)


@given(
    st.floats(-1e12, 1e12, allow_subnormal=False), st.sampled_from(["", "s", "share"])
)
def test_a_number_is_shown_to_four_digits_and_is_what_it_was(
    value: float, unit: str
) -> None:
    text = shown.number(value, unit)
    said = float(text.removesuffix("%")) / (100 if unit == "share" else 1)
    assert said == pytest.approx(value, rel=6e-3)
    assert len(re.sub(r"e.*|[^\d]", "", text).lstrip("0")) <= 4 or "." not in text


def test_what_is_no_number_is_not_printed_as_one() -> None:
    cells = [math.nan, math.inf, -math.inf, None, np.float64(2), 7]
    assert [shown.number(cell) for cell in cells] == ["", "∞", "-∞", "", "2", "7"]


def test_a_head_says_the_unit_a_share_is_in_per_cent_and_what_has_a_form_keeps_it() -> (
    None
):
    columns = {
        "read_s": [1.23456],
        "held": [0.5],
        "mean_gap": [0.0123],
        "name": ["1.23456"],
    }
    page = shown.table_html(
        pd.DataFrame(columns).style.format("{:+.1%}", subset=["held"]).hide()
    )
    heads = re.findall(r'<th[^>]* class="col_heading[^>]*>([^<]*)</th>', page)
    assert heads == ["read [s]", "held", "mean gap", "name"]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", page) == [
        "1.235",
        "+50.0%",
        "1.23%",
        "1.23456",
    ]


def test_a_long_or_wide_table_is_folded() -> None:
    for shape, folded in {(30, 10): False, (31, 10): True, (30, 11): True}.items():
        page = shown.table_html(pd.DataFrame(np.zeros(shape)))
        assert page.count("<details>") == page.count("</details>") == folded


def test_a_figure_has_its_caption_twice_its_grade_and_a_link_to_its_numbers(
    tmp_path: Path,
) -> None:
    figure, _ = plots.canvas(height=1)
    image = plots.save_figure(figure, ENTRY.id, pd.DataFrame({"x": [1.0]}), tmp_path)
    page = shown.figure_html(image, 720)
    assert (
        f'alt="{CAPTION}"' in page and f'<figcaption class="caption">{CAPTION}' in page
    )
    assert f'<span class="grade">{ENTRY.grade}</span>' in page
    (link,) = re.findall('href="([^"]*)"', page)
    assert Path(os.getcwd(), link).resolve() == image.with_suffix(".csv").resolve()


def test_a_table_is_an_image_and_the_full_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"network": ["VGG-16"], "size_mib": [527.7921447753906]})
    (drawn,) = plots.table(frame, "osf-tab2", tmp_path).axes[0].tables
    cells = [
        drawn[row, column].get_text().get_text() for row in (0, 1) for column in (0, 1)
    ]
    assert cells == ["network", "size mib", "VGG-16", "527.8"]
    csv = tmp_path / "figures" / "osf-tab2.csv"
    assert csv.read_text() == "network,size_mib\nVGG-16,527.792\n"
