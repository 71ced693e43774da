"""Notebooks show the package's own code beside its equations."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import nbformat
import pytest

from ddlkit.core import iteration
from ddlkit.core.errors import UserError
from ddlkit.report import book, folds
from ddlkit.report.site import Page
from ddlkit.report.sources import source_of, text_of

BESIDE_EQUATIONS = ("00", "10", "12", "20", "30", "31", "32", "33", "34", "38", "39", "40", "41")
MOST_LINES = 35


def shown(path: Path) -> list[str]:
    """What a notebook shows the code of."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    calls = [source for cell in cells if "source_of(" in (source := "".join(cell["source"]))]
    return [name for call in calls for name in re.findall(r'"([^"]+)"', call)]


@pytest.mark.parametrize("path", book.notebooks(BESIDE_EQUATIONS), ids=lambda path: path.stem)
def test_a_notebook_shows_code_that_is_there_and_short(path: Path) -> None:
    assert shown(path)
    for name in shown(path):
        text = text_of(name)
        ast.parse(text)
        assert text.startswith(("def ", "class ")) and len(text.splitlines()) <= MOST_LINES, name


def test_it_is_the_functions_own_text_without_its_docstring() -> None:
    text = text_of("core.iteration.group_ends")
    whole = inspect.getsource(iteration.group_ends)
    assert '"""' in whole and '"""' not in text
    assert all(line in whole for line in text.splitlines())
    assert whole.rstrip().endswith(text.splitlines()[-1])


def test_methods_are_found_in_their_class_and_lose_its_indentation() -> None:
    assert text_of("core.link.Link.computed_s").startswith("def computed_s(self, ")


@pytest.mark.parametrize(
    "wrong", ["core.plan.none_such", "core.plan", "none.such", "../core.x", ""]
)
def test_what_is_not_defined_is_one_line(wrong: str) -> None:
    with pytest.raises(UserError, match="no code of ddlkit") as raised:
        text_of(wrong)
    assert "\n" not in str(raised.value)


def test_it_stands_unfolded_on_the_site(tmp_path: Path) -> None:
    v4 = nbformat.v4
    code = v4.new_code_cell('source_of("core.iteration.group_ends")')
    text = source_of("core.iteration.group_ends").data
    code.outputs = [v4.new_output("display_data", data={"text/markdown": text})]
    cells = [v4.new_markdown_cell(f"# T\n\n{folds.PROMPT}.**"), code, v4.new_code_cell("1 + 1")]
    path = tmp_path / "10_a.ipynb"
    path.write_text(nbformat.writes(v4.new_notebook(cells=cells)), encoding="utf-8")
    body = Page(path).body()
    before_the_fold = body.split("<details")[0]
    assert "ddlkit.core.iteration.group_ends" in before_the_fold
    assert "cumsum" in before_the_fold and "source_of" not in body
