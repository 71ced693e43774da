"""Parameters of notebooks: each is held against what is at hand, and a wrong one is one line."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import book, parameters, source
from ddlkit.report.parameters import Number, OneOf, Place

NOTEBOOKS = book.notebooks()
WRONG: tuple[Any, ...] = (
    "no such thing",
    -1,
    None,
    [],
    ["no", "no"],
    True,
    float("nan"),
    {},
    "a\0b",
    "x" * 5000,
)
each = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def told(notebook: Path) -> dict[str, Any]:
    """The parameters as the notebook has them."""
    statements = ast.parse(code(notebook)[0]).body
    assert all(isinstance(one, ast.Assign) for one in statements)
    return {
        ast.unparse(one.targets[0]): ast.literal_eval(one.value)
        for one in statements
        if isinstance(one, ast.Assign)
    }


@pytest.fixture(autouse=True, scope="module")
def read_once() -> Iterator[None]:
    """The recordings are read once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source.Source, "table", functools.cache(source.Source.table))
        yield


@each
def test_a_notebook_holds_its_parameters_before_anything_else(notebook: Path) -> None:
    assert list(told(notebook)) == list(parameters.RULES[notebook.stem])
    lines = [line for line in code(notebook)[1].splitlines() if line.strip()]
    first = next(line for line in lines if not line.startswith(("import ", "from ", " ", ")")))
    assert first == f'parameters.validate("{notebook.stem}", globals())'


@each
def test_what_a_notebook_has_holds_and_nothing_is_said(
    notebook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters.validate(notebook.stem, told(notebook))
    assert capsys.readouterr().out == ""


@each
def test_every_other_value_is_refused_in_one_line_or_holds(notebook: Path) -> None:
    """Another valid value of each parameter, and a dozen that are none."""
    given = told(notebook)
    for name, rule in parameters.RULES[notebook.stem].items():
        choices: Any = rule.known(given)
        others = rule.others(given[name], choices)
        held = [one for one in others if _holds(notebook.stem, _with(notebook, name, one))]
        assert held or not others, f"{name}: none of {others}"
        for wrong in WRONG:
            if not rule.holds(wrong, choices):
                with pytest.raises(
                    UserError, match=f"{notebook.stem}: {name} is .*: give"
                ) as raised:
                    parameters.validate(notebook.stem, {**given, name: wrong})
                assert "\n" not in str(raised.value)
        assert sum(rule.holds(wrong, choices) for wrong in WRONG) == 0


def _with(notebook: Path, name: str, value: Any) -> dict[str, Any]:
    """All parameters with another value of one; those behind it that then hold no more become their first."""
    given = told(notebook)
    given[name] = value
    names = list(given)
    for later in names[names.index(name) + 1 :]:
        rule: Any = parameters.RULES[notebook.stem][later]
        try:
            choices = rule.known(given)
        except UserError:  # no such tables there: hold says so
            break
        if not rule.holds(given[later], choices):
            given[later] = next(iter(rule.others(given[later], choices)), None)
    return given


def _holds(notebook: str, given: Mapping[str, Any]) -> bool:
    """Whether all parameters hold; if not, it must be said in one line."""
    try:
        parameters.validate(notebook, given)
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


def test_a_place_is_empty_a_directory_or_a_machine(tmp_path: Path) -> None:
    place = Place("runs-*.csv", lambda: [tmp_path / "one"], machines=True)
    known = place.known({})
    assert known == ["one"] and place.holds("", known) and place.holds("one", known)
    assert not place.holds(str(tmp_path), known)
    (tmp_path / "runs-a.csv").touch()
    assert place.holds(str(tmp_path), known)
    inside = store.list_tables(store.RECORDED, "*/campaign/runs-*.csv")[0].parent
    assert place.holds(str(inside.relative_to(store.ROOT)), known), "from the project's directory"


@pytest.mark.parametrize("wrong", [[], ["a", "a"], ["a", "c"], "a", ("a", None), 1])
def test_several_are_some_of_the_list(wrong: Any) -> None:
    some = OneOf(lambda given: ["a", "b"], several=True)
    assert some.holds(["b", "a"], some.known({})) and some.holds(("a",), some.known({}))
    assert not some.holds(wrong, some.known({}))


@pytest.mark.parametrize("wrong", [0, 4, 2.5, True, "2", float("inf"), float("nan")])
def test_a_whole_number_lies_between_its_bounds(wrong: Any) -> None:
    whole = Number(1, 3, whole=True)
    assert whole.holds(1, []) and whole.holds(3, [])
    assert not whole.holds(wrong, [])
    assert Number(1, 3).holds(2.5, [])


def test_an_unknown_notebook_is_one_line() -> None:
    with pytest.raises(UserError, match="no parameters of 99_none are known: use one of 00_"):
        parameters.validate("99_none", {})
