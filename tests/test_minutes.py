"""The minutes of a notebook are counted in what a reader sees of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from ddlkit.report import minutes

V4 = nbformat.v4


def shown(**data: str) -> Any:
    """A cell that displays this, by kind."""
    kinds = {kind.replace("_", "/"): value for kind, value in data.items()}
    return V4.new_code_cell("x", outputs=[V4.new_output("display_data", data=kinds)])


def printed(text: str) -> Any:
    return V4.new_code_cell("x", outputs=[V4.new_output("stream", text=text)])


FIGURE = shown(text_html="<figure><img><figcaption>many words here</figcaption></figure>")
TABLE = shown(text_html="<table><caption>one two</caption></table>")


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        (V4.new_markdown_cell("three words here"), {"words": 3}),
        (printed("one two\n\nthree\n"), {"words": 3, "sentences": 2}),
        (FIGURE, {"figures": 1}),
        (shown(image_png="abc", text_plain="<Figure>"), {"figures": 1}),
        (TABLE, {"tables": 1}),
        (shown(text_html="<div><b>Two</b> words</div>"), {"words": 2, "sentences": 1}),
        (shown(text_markdown="two words"), {"words": 2, "sentences": 1}),
        (V4.new_code_cell("print('not run')"), {}),
    ],
)
def test_what_is_shown_is_counted_however_it_was_made(cell: Any, found: dict[str, int]) -> None:
    assert {what: n for what, n in minutes.counts([cell]).items() if n} == found
    told = minutes.BEGIN + sum(minutes.PACE[what] * n for what, n in found.items())
    assert minutes.expected_minutes([cell]) == pytest.approx(told)


def test_exercises_are_not_read_and_what_follows_them_is() -> None:
    cells = [V4.new_markdown_cell("## Exercises\n\n1. How?"), printed("Exercise 1: right")]
    last = V4.new_markdown_cell("**Next:** there")
    assert minutes.counts([*cells, last])["words"] == 2


def test_lines_of_code_are_neither_blank_nor_imports_nor_put_in_by_the_book() -> None:
    cell = V4.new_code_cell("import a\nfrom b import (\n    c,\n)\n\nx = 1  # why\n# so\ny = 2")
    given = V4.new_code_cell("data = 'x'", metadata={"tags": ["injected-parameters"]})
    assert minutes.code_lines([cell, given, V4.new_markdown_cell("text")]) == 3


def test_each_limit_is_held(tmp_path: Path) -> None:
    def write(name: str, words: int, code: str = "") -> Path:
        cells = [V4.new_markdown_cell("w " * words), V4.new_code_cell(code)]
        path = tmp_path / f"{name}.ipynb"
        path.write_text(nbformat.writes(V4.new_notebook(cells=cells)), encoding="utf-8")
        return path

    within = int((minutes.LIMIT - minutes.BEGIN) / minutes.PACE["words"])
    assert minutes.find_problems([write("00_a", within)]) == []
    (said,) = minutes.find_problems([write("00_a", within + 10)])
    assert said.startswith("00_a takes 25.1 minutes")
    assert minutes.find_problems([write("10_a", within + 10), write("14_a", within + 10)]) == []
    many = [write(f"{n:02}_a", within) for n in range(12)]
    assert any("the notebooks take 300 minutes" in line for line in minutes.find_problems(many))
    told = V4.new_markdown_cell("# T\n\n* **Time:** 3 minutes; 9 with the exercises " + "w " * 100)
    path = tmp_path / "03_a.ipynb"
    path.write_text(nbformat.writes(V4.new_notebook(cells=[told])), encoding="utf-8")
    (said,) = minutes.find_problems([path])
    assert said == "03_a takes 3.7 minutes, says 3"
    (said,) = minutes.find_problems([write("00_a", 1, "x = 1\n" * (minutes.LINES + 1))])
    assert f"{minutes.LINES + 1} lines of code" in said
