"""Parameters of notebooks: each is held against what is at hand, and a wrong one is one line."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import book, parameters, source

NOTEBOOKS = book.notebooks()
WRONG: tuple[Any, ...] = (
    "no such thing",
    -1,
    None,
    [],
    ["no", "no"],
    True,
    math.nan,
    {},
    "a\0b",
    "x" * 5000,
)
each = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def given_in(notebook: Path) -> dict[str, Any]:
    """The parameters as the notebook has them."""
    cells: dict[str, Any] = {}
    exec(code(notebook)[0], {}, cells)
    return cells


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """The recordings are read once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.Source, "table", functools.cache(source.Source.table))
        yield


@each
def test_a_notebook_holds_its_parameters_before_anything_else(notebook: Path) -> None:
    assert list(given_in(notebook)) == list(parameters.RULES[notebook.stem])
    lines = [line for line in code(notebook)[1].splitlines() if line.strip()]
    first = next(line for line in lines if not line.startswith(("import ", "from ", " ", ")")))
    assert first == f'parameters.validate("{notebook.stem}", globals())'


@each
def test_what_a_notebook_has_holds_and_nothing_is_said(
    notebook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters.validate(notebook.stem, given_in(notebook))
    assert capsys.readouterr().out == ""


@each
def test_a_wrong_value_is_one_line_that_says_what_may_be_given(notebook: Path) -> None:
    given = given_in(notebook)
    for name in given:
        for wrong in WRONG:
            with pytest.raises(UserError, match=f"{notebook.stem}: {name} is .*: give") as raised:
                parameters.validate(notebook.stem, {**given, name: wrong})
            assert "\n" not in str(raised.value)


def test_a_place_is_empty_a_directory_or_a_machine(tmp_path: Path) -> None:
    rule, machine = parameters.place("runs-*.csv", True), store.list_recorded()[0].name
    assert rule("", {}) == rule(machine, {}) == ""
    assert machine in rule(str(tmp_path), {})
    (tmp_path / "runs-a.csv").touch()
    assert rule(str(tmp_path), {}) == ""


@pytest.mark.parametrize("wrong", [[], ["a", "a"], ["a", "c"], "a", ("a", None), 1])
def test_several_are_some_of_the_list(wrong: Any) -> None:
    rule = parameters.one_of(lambda _: ["a", "b"], many=True)
    assert rule(["b", "a"], {}) == rule(("a",), {}) == "" and rule(wrong, {}) == "some of a, b"


@pytest.mark.parametrize("wrong", [0, 4, 2.5, True, "2", float("inf"), float("nan")])
def test_a_whole_number_lies_between_its_bounds(wrong: Any) -> None:
    rule = parameters.number(1, 3)
    assert rule(1, {}) == rule(3, {}) == parameters.number(1, 3, float)(2.5, {}) == ""
    assert rule(wrong, {}) == "a whole number from 1 to 3"
