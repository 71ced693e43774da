"""Exercises are judged by solutions that lie apart, which say right only what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import book, exercises
from ddlkit.report.exercises import Judge, Key, Malformed, numbers

SOLVED = sorted(exercises.SOLUTIONS.glob("*.ipynb"))


def written(folder: Path, **solutions: str) -> Path:
    """Solutions of a notebook "nn", by exercise: one_1="answer_1 = 2"."""
    cells = []
    for name, code in solutions.items():
        number = name.rpartition("_")[2]
        for kind, source in (("hint", "look"), ("solution", code), ("explanation", "so it is")):
            make = (
                nbformat.v4.new_code_cell if kind == "solution" else nbformat.v4.new_markdown_cell
            )
            cells.append(make(source, metadata={"tags": [f"{kind}-{number}"]}))
    path = folder / "nn.ipynb"
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)), encoding="utf-8")
    return folder


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().out


def test_a_number_is_right_within_the_tolerance_and_the_hint_comes_second(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    judge = Judge("nn", {"two": 2.0}, written(tmp_path, one_1="answer_1 = two / 4"))
    judge(1, None)
    assert "replace None" in said()
    judge(1, 0.6)
    assert "0.6 is too high; try again" in (first := said()) and "Hint" not in first
    judge(1, "45%")
    assert "too low" in (second := said()) and second.endswith("Hint: look\n")
    for right in (0.5, "50%", "0.5", [0.501], np.float32(0.5)):
        judge(1, right)
        assert said() == "Exercise 1: right (0.5). so it is\n"


def test_a_list_needs_all_its_numbers_and_words_are_compared(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    solutions = {"one_1": "answer_1 = [1.0, 2.0]", "two_2": "answer_2 = 'one\\ntwo\\nthree'"}
    judge = Judge("nn", {}, written(tmp_path, **solutions))
    for number, answer, words in (
        (1, 1.0, "has 1 of 2 numbers"),
        (1, [1, 3], "3, at place 2, is too high"),
        (1, (1, "2"), "right"),
        (2, " ", "is not a text"),
        (2, "so", "Exercise 2: does yours say these three things?\none\ntwo\nthree\n"),
    ):
        judge(number, answer)
        assert words in said()


FUNCTION = """
def answer_1(a, b):
    return a + b, [b, b]
expected_1 = answer_1
cases_1 = [(np.arange(3.0), 1.0), (np.ones(2), 2.0)]
"""


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        (lambda a, b: (a + b, [b, b]), "right"),
        (lambda a, b: a - b, "gives"),
        (lambda a, b: a / [], "raises ValueError"),
        (7, "is not a function"),
    ],
)
def test_a_function_is_tried_on_every_case(
    tmp_path: Path, said: Callable[[], str], given_: Any, words: str
) -> None:
    Judge("nn", {"np": np}, written(tmp_path, one_1=FUNCTION))(1, given_)
    assert words in said()


MANY_RIGHT = """
answer_1 = [1.0, 3.0]
def fault_1(given):
    a, b = given
    return "" if a < b else "does not rise"
"""


def test_of_many_right_answers_a_function_tells(tmp_path: Path, said: Callable[[], str]) -> None:
    judge = Judge("nn", {}, written(tmp_path, one_1=MANY_RIGHT))
    for given_, words in (
        ([2, 9], "right. so it is"),
        ([2, 1], "your answer does not rise"),
        ([2], "your answer raises ValueError"),
        (None, "replace None"),
    ):
        judge(1, given_)
        assert words in said()


@given(st.floats(-1e300, 1e300).filter(lambda x: x == 0 or abs(x) > 1e-300))
def test_a_number_is_read_however_it_is_written(value: float) -> None:
    for way in (value, str(value), [value], f" {value} "):
        assert numbers(way) == pytest.approx(value)
    assert numbers(f"{value}%") == pytest.approx(value / 100)


@pytest.mark.parametrize("wrong", ["1.2 s", True, {}, float("nan"), "1e999", [1, "x"], b"1"])
def test_what_is_no_number_is_refused_in_words_and_no_try(wrong: Any) -> None:
    fault = Key(1.0).refusal(wrong)
    assert isinstance(fault, Malformed) and "\n" not in fault


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nn\.ipynb"):
        exercises.read("nn", tmp_path)
    with pytest.raises(UserError, match="has no exercise 2: it has 1"):
        Judge("nn", {}, written(tmp_path, one_1="answer_1 = 1"))(2, 1.0)


def test_where_the_workbook_is_run_a_wrong_solution_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], str]
) -> None:
    monkeypatch.setenv(exercises.SOLVED_VARIABLE, "1")
    refused = "\nwrong_1 = [lambda a, b: a, lambda a, b: (a, b), lambda a, b: (a - b, [b, b])]"
    Judge("nn", {"np": np}, written(tmp_path, one_1=FUNCTION + refused))(1, None)
    assert "right" in said()
    wrong = FUNCTION.replace("expected_1 = answer_1", "expected_1 = lambda a, b: a")
    with pytest.raises(UserError, match="exercise 1: the solution gives"):
        Judge("nn", {"np": np}, written(tmp_path, one_1=wrong + refused))(1, None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("wrong_1 = [1.0, 3.0]", "has fewer than 3 wrong answers"),
        ("wrong_1 = [1.0, 3.0, 2.01]", "wrong answer 3 is accepted"),
        ("answer_1 = 'one\\ntwo'", "give three points"),
    ],
)
def test_where_the_workbook_is_run_a_checker_must_refuse_wrong_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, words: str
) -> None:
    monkeypatch.setenv(exercises.SOLVED_VARIABLE, "1")
    with pytest.raises(UserError, match=words):
        Judge("nn", {}, written(tmp_path, one_1=f"answer_1 = 2.0\n{wrong}"))(1, None)


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_solutions_are_of_a_notebook_that_asks_for_each(path: Path) -> None:
    notebook = store.NOTEBOOKS / path.name
    assert notebook in book.notebooks()
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    asked = [
        tag for cell in cells for tag in cell["metadata"].get("tags", ()) if "exercise-" in tag
    ]
    assert asked == [f"exercise-{number}" for number in exercises.read(path.stem)]
    first = next(
        cell for cell in nbformat.read(str(path), as_version=4).cells if cell.cell_type == "code"
    )
    assert first.source == f"%run ../notebooks/{path.name}"
    text = "".join("".join(cell["source"]) for cell in cells)
    assert "check(" not in text
