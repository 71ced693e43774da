"""Parameters of notebooks: each is held against what is at hand, and a wrong one is one line."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddlkit.core.errors import UserError
from workbook.common import source
from workbook.course import parameters
from workbook.site import book

WRONG: tuple[Any, ...] = (
    "no such thing",
    -1,
    None,
    [],
    ["no", "no"],
    math.nan,
    {},
    "x" * 5000,
)


def given_in(notebook: Path) -> dict[str, Any]:
    """The parameters as the notebook has them."""
    listed = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    first, second = ["".join(c["source"]) for c in listed if c["cell_type"] == "code"][
        :2
    ]
    values: dict[str, Any] = {}
    exec(first, {}, values)
    call = f"parameters.validate({', '.join(f'{name}={name}' for name in values)})"
    assert call.replace(" ", "") in "".join(second.split()), "parameters are checked"
    return values


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """The recordings are read once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.Source, "table", functools.cache(source.Source.table))
        yield


@pytest.mark.parametrize("notebook", book.notebooks(), ids=lambda path: path.stem)
def test_what_a_notebook_has_holds_and_a_wrong_value_is_one_line(
    notebook: Path,
) -> None:
    given = given_in(notebook)
    parameters.validate(**given)
    for name in parameters.CHOICES.keys() & given.keys():
        for wrong in WRONG:
            with pytest.raises(
                UserError, match=f"^{name} is .*: give one of ."
            ) as raised:
                parameters.validate(**{**given, name: wrong})
            assert "\n" not in str(raised.value)


def test_a_choice_depends_on_the_ones_before_it_and_a_list_needs_all() -> None:
    with pytest.raises(UserError, match="workers is 99"):
        parameters.validate(data="", link="lab:1gbit", workers=99)
    parameters.validate(papers=["osf", "dag"], layers=1, gpus=16)
    for wrong in ({"papers": ["osf", "no"]}, {"layers": 0}, {"gpus": 17}):
        with pytest.raises(UserError, match="give one of"):
            parameters.validate(**wrong)


@pytest.mark.parametrize("notebook", book.notebooks(), ids=lambda path: path.stem)
def test_what_was_measured_here_is_shown_in_its_own_section_only(
    notebook: Path,
) -> None:
    """So everything else on the page is the same on every machine."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    section = ""
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
            section = headings[-1] if headings else section
            continue
        if "parameters" in cell["metadata"].get("tags", ()):
            continue
        names = {
            node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)
        }
        checked = "parameters.validate(" in text
        assert "here" not in names or checked or section == "On this machine", text
