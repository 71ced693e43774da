"""Slides are a notebook without its prose: questions before answers, figures, small tables, nothing empty."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from ddlkit.report import book
from ddlkit.report.site import Page, slides

V4 = nbformat.v4
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def out(**data: str) -> Any:
    cell = V4.new_code_cell("draw()")
    kinds = {kind.replace("_", "/"): value for kind, value in data.items()}
    cell.outputs = [V4.new_output("display_data", data=kinds)]
    return cell


def told(*cells: Any) -> list[list[str]]:
    """Of each slide, its texts, and "out" for what was put out."""
    return [
        ["out" if cell.cell_type == "code" else cell.source for cell in slide]
        for slide in slides.of(cells)
    ]


def text(source: str) -> Any:
    return V4.new_markdown_cell(source)


def test_prose_goes_and_questions_formulas_and_lists_stay() -> None:
    cell = text("# Title\n\n**Question.** Why?\n\nMuch prose.\n\n$$x$$\n\n* one\n* two")
    assert told(cell) == [["# Title\n\n**Question.** Why?\n\n$$x$$\n\n* one\n* two"]]


def test_a_question_stands_before_its_answer_and_a_figure_under_its_heading() -> None:
    picture = out(image_png=PIXEL)
    asked = text("## When\n\n**Predict first.** When?")
    assert told(asked, picture, picture) == [
        [asked.source],
        ["**When**", "out"],
        ["**When**", "out"],
    ]
    assert told(text("## Plain\n\nprose"), picture) == [["## Plain", "out"]]


def test_what_says_nothing_is_no_slide() -> None:
    printed = V4.new_code_cell("print(1)", outputs=[V4.new_output("stream", text="1")])
    long = out(text_html="<table>" + "<tr></tr>" * (slides.MOST_ROWS + 1) + "</table>")
    exercise = out(image_png=PIXEL)
    exercise.metadata["tags"] = ["exercise-1"]
    assert told(text("## Empty\n\nprose"), printed, long, exercise) == []
    short = out(text_html="<table><tr></tr></table>")
    assert told(text("## Table"), short) == [["## Table", "out"]]


def test_printed_conclusions_are_kept() -> None:
    printed = V4.new_code_cell("print(1)", outputs=[V4.new_output("stream", text="* learned")])
    assert told(text("## What was learned"), printed) == [["## What was learned", "out"]]


def test_a_page_of_slides_is_whole_and_names_no_heading_twice(tmp_path: Path) -> None:
    cells = [
        text("# T\n\n**Question.** $x$?"),
        text("## A"),
        *(out(image_png=PIXEL) for _ in range(3)),
    ]
    path = tmp_path / "10_a.ipynb"
    path.write_text(nbformat.writes(V4.new_notebook(cells=cells)), encoding="utf-8")
    page = Page(path)
    page.body()
    shown = page.slides()
    assert shown.count("<section") == shown.count("</section>") == 4
    names = re.findall(r'id="([^"]*)"', shown)
    assert len(names) == len(set(names)) and shown.count("<img") == 3
    assert "draw()" not in shown and "<details" not in shown and "<math" in shown


@pytest.mark.parametrize("path", book.notebooks(), ids=lambda path: path.stem)
def test_every_notebook_makes_slides_of_its_questions(path: Path) -> None:
    """Without figures, which it has once it is executed."""
    made = slides.of(nbformat.read(str(path), as_version=4).cells)
    assert made[0][0].source.startswith("# ") and "**Objective:**" in made[0][0].source
    joined = "\n".join(cell.source for slide in made for cell in slide)
    assert ("Predict first" in joined) == Page(path).core and "## Exercises" in joined
