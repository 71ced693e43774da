"""What answers a prediction is folded: in JupyterLab by metadata, on the site as one fold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from ddlkit.report import book, folds
from ddlkit.report.site import Page

V4 = nbformat.v4
ASKED = "## First\n\n**Predict first.** How long?"


def made(*sources: str) -> list[Any]:
    """Cells of these texts, those that begin with "code" being code."""
    make = [V4.new_code_cell if s.startswith("code") else V4.new_markdown_cell for s in sources]
    cells = [new(source) for new, source in zip(make, sources, strict=True)]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return cells


def hidden(cells: list[Any]) -> list[str]:
    """Sources of what JupyterLab does not show at once."""
    return [cell.source for cell in cells if cell.metadata.get("jupyter")]


def test_answers_end_at_a_heading_and_the_heading_is_seen() -> None:
    cells = made("# Title", ASKED, "code", "It is so.\n\n## Second\n\ntext", "code 2")
    marked = folds.marked(cells)
    assert hidden(marked) == ["code", "It is so."]
    assert [cell.source for cell in marked][3:] == ["It is so.", "## Second\n\ntext", "code 2"]
    assert marked[2].metadata["jupyter"] == {"outputs_hidden": True}
    assert marked[3].metadata["jupyter"] == {"source_hidden": True}
    assert len({cell["id"] for cell in marked}) == len(marked)
    assert folds.marked(marked) == marked, "marking twice changes nothing"


@pytest.mark.parametrize("end", [ASKED, "### Deeper", "**Next:** [other](other.ipynb)"])
def test_what_ends_an_answer(end: str) -> None:
    assert hidden(folds.marked(made(ASKED, "code", end))) == ["code"]


def test_an_exercise_is_no_answer() -> None:
    cells = made(ASKED, "code", "code exercise")
    cells[-1].metadata["tags"] = ["exercise-1"]
    assert hidden(folds.marked(cells)) == ["code"]


def test_old_marks_go_and_other_settings_stay() -> None:
    cells = made("# Title", "code")
    cells[1].metadata["jupyter"] = {"outputs_hidden": True, "name": "kept"}
    assert folds.marked(cells)[1].metadata["jupyter"] == {"name": "kept"}


def test_a_heading_within_a_fence_cuts_nothing() -> None:
    text = "see\n\n```python\n# a comment\nf()\n```\n\nend"
    assert folds.split(text) == [text]


def test_on_the_site_an_answer_is_one_fold_and_its_question_and_the_next_heading_are_not(
    tmp_path: Path,
) -> None:
    cells = made("# Title", ASKED, "code", "It is so.\n\n## Second\n\ntext", ASKED, "## Last")
    path = tmp_path / "10_a.ipynb"
    path.write_text(nbformat.writes(V4.new_notebook(cells=cells)), encoding="utf-8")
    body = Page(path).body()
    before, fold = body.split('<details class="answer">')
    inside, after = fold[: fold.index("Second")], fold[fold.index("Second") :]
    assert "How long?" in before and "It is so." in inside
    assert "It is so." not in after and body.count("<details") == body.count("</details>")
    assert inside.rindex("</details>") > inside.index("It is so.")


@pytest.mark.parametrize("path", book.notebooks(), ids=lambda path: path.stem)
def test_nothing_is_hidden_in_a_notebook_but_answers(path: Path) -> None:
    """What a mark is missing for can be mended by ``python -m ddlkit.report.folds``."""
    cells = nbformat.read(str(path), as_version=4).cells
    inside = {cell["id"] for cell in folds.folded(cells) if cell.metadata["opens"]}
    assert bool(inside) == Page(path).core, "the core asks for predictions, nothing else does"
    marks = {cell["id"] for cell in cells if cell.metadata.get("jupyter")}
    assert marks <= {cell["id"] for cell in folds.marked(cells) if cell.metadata.get("jupyter")}
