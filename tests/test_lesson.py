"""How the site shows a notebook: folds, collapsed code, figures, and exercises with their solutions."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from ddlkit.core.errors import UserError
from workbook.common import catalog, outputs, places
from workbook.course import exercises
from workbook.course.exercises import Solution
from workbook.plots.shown import figure_html
from workbook.site import lesson

V4 = nbformat.v4
SOLUTION = Solution(
    "Halve it.", "import math\nanswer_1 = 1 / 2\nwrong_1 = [1, 2, 3]", "So it is."
)
SOLVED = [path.stem for path in sorted(exercises.SOLUTIONS.glob("*.ipynb"))]


def notebook(*cells: Any) -> Any:
    return V4.new_notebook(cells=[V4.new_markdown_cell("# Title"), *cells])


def answer(source: str) -> Any:
    return V4.new_markdown_cell(source, metadata={"jupyter": {"source_hidden": True}})


def shown(made: Any) -> list[str]:
    """The sources of what is shown of a notebook, without its title."""
    return [cell.source for cell in lesson.as_page(made, {1: SOLUTION}).cells][1:]


def test_answers_in_a_row_are_one_fold_and_nothing_else_is_in_it() -> None:
    asked = V4.new_markdown_cell("**Predict first.** How?")
    rest = V4.new_markdown_cell("## Next")
    sources = shown(notebook(asked, answer("so"), answer("it is"), rest, answer("end")))
    opened = [source.startswith("<details") for source in sources]
    closed = [source == "</details>" for source in sources]
    assert opened == [False, True, False, False, False, False, True, False, False]
    assert closed == [False, False, False, False, True, False, False, False, True]
    assert all(lesson.ANSWER in sources[place] for place in (1, 6))


def test_a_fold_never_holds_a_heading_which_the_contents_would_link_to() -> None:
    with pytest.raises(UserError, match="'## Found' is folded"):
        lesson.as_page(notebook(answer("## Found\n\nso")), {})


def test_a_notebook_is_not_changed_by_being_shown() -> None:
    made = notebook(V4.new_code_cell("import numpy", outputs=[]), answer("so"))
    before = nbformat.writes(made)
    lesson.as_page(made, {})
    assert nbformat.writes(made) == before


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("import numpy as np\nfrom pathlib import Path", False),
        ("plots.bars(ax, frame)", False),
        ("# Draw\nplots.bars(ax, frame)", False),
        ("def step_s(work):\n    return work.forward_s", True),
        (
            "import heapq\n\n\ndef order(tasks):\n    return heapq.nsmallest(2, tasks)",
            True,
        ),
        (
            "import numpy\nparameters.validate(data=data)\n\n\ndef said(x):\n    ...",
            False,
        ),
        ("%run other.ipynb", False),
    ],
)
def test_an_algorithm_is_seen_and_all_other_code_is_collapsed(
    source: str, is_seen: bool
) -> None:
    (cell,) = lesson.as_page(notebook(V4.new_code_cell(source)), {}).cells[1:]
    assert ("hide-input" in cell.metadata.get("tags", [])) != is_seen
    if not is_seen:
        assert cell.metadata["mystnb"]["code_prompt_show"].startswith("Code")


def test_outputs_that_nobody_is_meant_to_read_are_left_out() -> None:
    texts = ["PosixPath('a.png')", "{'a': 1}", "<Axes: >", "0.25", "'a sentence'"]
    results = [V4.new_output("execute_result", {"text/plain": text}) for text in texts]
    (cell,) = lesson.as_page(
        notebook(V4.new_code_cell("x", outputs=results)), {}
    ).cells[1:]
    assert [one.data["text/plain"] for one in cell.outputs] == texts[3:]


def test_a_figure_links_to_its_published_files_only_if_it_is_the_same() -> None:
    entry = next(
        one for one in catalog.load() if outputs.is_made(one.id, places.REPORTS)
    )
    image, _ = outputs.figure_files(entry.id, places.REPORTS)
    html = figure_html(image, 720)
    for figures, embedded in ((image.parent, False), (Path("/nowhere"), True)):
        drawn = V4.new_output("display_data", {"text/html": html})
        cell = V4.new_code_cell("plot()", outputs=[drawn])
        page = lesson.as_page(notebook(cell), {}, figures)
        text = page.cells[1].outputs[0].data["text/html"]
        assert f'href="../reports/figures/{entry.id}.csv"' in text
        assert ("base64" in text) == embedded
        assert (f'src="../reports/figures/{entry.id}.png"' in text) != embedded


def test_an_exercise_is_its_hint_and_its_answer_in_closed_folds() -> None:
    cell = V4.new_code_cell("judge(1, None)", metadata={"tags": ["exercise-1"]})
    hint, solution = shown(notebook(cell))
    assert "Halve it." in hint and "answer_1" not in hint
    assert "answer_1 = 1 / 2" in solution and "So it is." in solution
    assert "wrong_1" not in solution and "judge" not in solution
    assert all(
        text.startswith('<details class="solution">') for text in (hint, solution)
    )
    cell = V4.new_code_cell("judge(7, None)", metadata={"tags": ["exercise-7"]})
    with pytest.raises(UserError, match="exercise 7 has no solution"):
        shown(notebook(cell))


@pytest.mark.parametrize("name", SOLVED)
def test_what_is_shown_of_a_solution_has_all_that_its_answer_needs(name: str) -> None:
    """No name that the whole solution defines is missing, and no part that checks answers is left."""
    for number, (_, code, _) in exercises.read(name).items():
        kept = lesson.answer_code(code, number)
        assert f"answer_{number}" in bound(kept)
        checks = {
            f"{kind}_{number}" for kind in ("wrong", "fault", "cases", "expected")
        }
        assert bound(kept).isdisjoint(checks - used(kept))
        assert (used(kept) & bound(code)) - {*dir(builtins)} <= bound(kept)


def bound(code: str) -> set[str]:
    """Names that code binds at its top level."""
    names = set()
    for statement in ast.parse(code).body:
        names |= lesson._changed(statement)
    return names


def used(code: str) -> set[str]:
    """Names from outside that code uses at its top level or in its functions."""
    return set[str]().union(*(lesson._used(one) for one in ast.parse(code).body))


def test_code_that_only_judges_is_cut_and_code_that_changes_an_answer_stays() -> None:
    code = (
        "table = {}\n"
        "# by plan\n"
        "table['a'] = 1\n"
        "names = []\n"
        "names.append('a')\n"
        "answer_2 = [table, names]\n"
        "# what is wrong\n"
        "wrong_2 = [[table, 1]]\n"
    )
    assert lesson.answer_code(code, 2) == code[: code.index("\n# what")]


def test_a_notebook_that_was_not_run_says_so() -> None:
    cell = V4.new_code_cell("1")
    assert lesson.NOT_RUN in lesson.as_page(notebook(cell), {}).cells[0].source
    cell.execution_count = 1
    assert lesson.NOT_RUN not in lesson.as_page(notebook(cell), {}).cells[0].source


def test_a_thumbnail_stands_below_the_title_and_leads_to_the_gallery() -> None:
    entry = catalog.load()[0]
    made = notebook(V4.new_code_cell("1", execution_count=1))
    made.cells[0].source = "# Title\n\n* **Objective:** this"
    title = lesson.as_page(made, {}, picture=entry).cells[0].source
    assert re.match(rf"# Title\n\n:::.figure. \S*{entry.id}-small.png\n", title)
    assert title.endswith("* **Objective:** this")
    assert f"gallery.html#{entry.id}\n" in title
